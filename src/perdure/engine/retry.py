"""When a failed attempt is made again. Due times are recorded, so a crash in between neither hurries nor forgets."""

from __future__ import annotations

import logging
import math

from perdure.model.retries import MOST_SECONDS, Failures, Retries
from perdure.ports.host import Random

log = logging.getLogger("perdure.engine")

USUAL = Retries()
IN_MEMORY = Retries(within=60.0)
"""The retries of model calls where a store does not outlive its program."""


def is_retried(retries: Retries, error: BaseException, usual: bool) -> bool:
    """True if a failure may be followed by another attempt. `usual` is the answer of the rule that `on` replaces."""
    if _matches(retries.never, error):
        return False
    return usual if retries.on is None else _matches(retries.on, error)


def _matches(failures: Failures, error: BaseException) -> bool:
    if isinstance(failures, type | tuple):
        return isinstance(error, failures)
    try:
        return bool(failures(error))
    except Exception:  # a function of the host: its fault must not hide the failure that it was asked about
        log.exception("a function of Retries(on=…, never=…) raised: it is taken to say no")
        return False


def _wanted(asked: object) -> float | None:
    """Return the pause that the other side asked for, within bounds; None if there is none or it is not a number."""
    # NaN and infinity are no seconds; an int may be beyond what a float can hold.
    if isinstance(asked, int | float) and -math.inf < asked < math.inf:
        return min(max(asked, 0.0), MOST_SECONDS)
    return None


def pause(retries: Retries, failures: int, asked: float | None, random: Random) -> float:
    """Return the seconds to wait after so many failed attempts. What the other side asked for goes first."""
    if (wanted := _wanted(asked)) is not None:
        return wanted
    # 2,000 doublings are beyond a float, and far beyond any `longest`.
    try:
        wait = min(retries.first * float(retries.factor) ** (failures - 1), retries.longest)
    except OverflowError:
        wait = retries.longest
    return wait * (1 - random.bits(16) / 65536 / 4)


def is_over(retries: Retries, asked: float | None, now: int, since: int) -> bool:
    """True if `within` leaves no room for another attempt, or for the pause that the other side asked for."""
    if retries.within is None:
        return False
    end = since + int(retries.within * 1000)
    return now >= end or now + (_wanted(asked) or 0) * 1000 > end


def next_due(retries: Retries, failures: int, asked: float | None, now: int, since: int, random: Random) -> int | None:
    """Return when the next attempt is due (ms), or None if there is none.

    `failures` attempts have failed, the first one at `since`. The last computed pause is
    shortened to the end of `within`; a requested one is not.
    """
    if (retries.attempts is not None and failures >= retries.attempts) or is_over(retries, asked, now, since):
        return None
    due = now + int(pause(retries, failures, asked, random) * 1000)
    return due if retries.within is None else min(due, since + int(retries.within * 1000))


def kept_due(retries: Retries, recorded: int, now: int) -> int:
    """Return when a recorded attempt is due (ms): no later than any pause can end, because the clock that set it may
    have been ahead of ours."""
    longest = max(retries.longest, MOST_SECONDS if retries.within is None else retries.within)
    return min(recorded, now + int(longest * 1000))
