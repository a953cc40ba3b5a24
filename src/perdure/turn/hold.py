"""Whether a turn that has an answer is held for commands that it started: a pure function of them and of the time.

The model is asked again when a command ends or its time is over, and for updates: when one has first written to stderr,
and after 30 seconds, then 60, up to five minutes, where a command has written something since it was last shown, or
nothing for five minutes. A look that finds neither costs no tokens. A turn has `UPDATES` of them; ends are told without
a limit.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from perdure.model.command import AtLimit

UPDATES = 8
FIRST_LOOK, LONGEST_LOOK, SILENCE = 30_000, 300_000, 300_000
"""Milliseconds."""


class HeldCommand(Struct, frozen=True, gc=False):
    """`stdout` and `stderr` are the bytes that it has written so far. `stopping`: it was asked to end."""

    id: str
    since: int
    live: bool
    stdout: int = 0
    stderr: int = 0
    stopping: bool = False


class Shown(Struct, frozen=True, gc=False, omit_defaults=True):
    """How far the model was shown a command's output. At `at` a look last found more of it, and `silent` says that the
    model was told of the silence since."""

    id: str
    at: int
    stdout: int = 0
    stderr: int = 0
    silent: bool = False


class News(Struct, frozen=True, gc=False):
    """What an update tells of a command: its output from `before` to `after`, or that there is none."""

    before: Shown
    after: Shown


class Ladder(Struct, frozen=True, omit_defaults=True):
    """Where the updates of a turn stand: its looks so far, the time of the next, and the updates it has had. `news` are
    those that the model is to be told now."""

    looks: int = 0
    next: int = 0
    updates: int = 0
    shown: tuple[Shown, ...] = ()
    news: tuple[News, ...] = ()


class ParkTurn(Struct, frozen=True, gc=False):
    """Park until one of these ends, and no longer than until `due`."""

    commands: tuple[str, ...]
    due: int
    ladder: Ladder


class AskAgain(Struct, frozen=True, gc=False):
    """Ask the model again: these have ended, or (`late`) are waited for no longer; `live` are held still."""

    ended: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    live: tuple[str, ...] = ()


class Update(Struct, frozen=True, gc=False):
    """Ask the model again with the news of the ladder; all of `commands` are held still."""

    commands: tuple[str, ...]
    ladder: Ladder


class CancelLate(Struct, frozen=True, gc=False):
    """Ask these to end, whose time is over, and decide again: the turn is held for their ends."""

    commands: tuple[str, ...]


def decide(
    commands: Sequence[HeldCommand],
    held: Sequence[str] | None,
    now: int,
    limit: int,
    ladder: Ladder,
    at_limit: AtLimit = "release",
) -> ParkTurn | AskAgain | Update | CancelLate | None:
    """What becomes of a turn that has an answer. `held` are the commands that it was held for before, since this
    answer, None where it was not; each is held for `limit` ms from its start, and one that is to end until it has.
    None: the turn ends."""
    over = [each for each in commands if each.live and not each.stopping and now >= each.since + limit]
    if over and at_limit == "cancel":
        return CancelLate(tuple([each.id for each in over]))
    live = [each for each in commands if each.live and each not in over]
    ids = tuple([each.id for each in live])
    if held is not None:
        ended = tuple([each.id for each in commands if each.id in held and not each.live])
        late = tuple([each.id for each in over if each.id in held])
        if ended or late:
            return AskAgain(ended, late, ids)
    if not live:
        return None
    if ladder.news:
        return Update(ids, ladder)
    end = min([each.since + limit for each in live if not each.stopping], default=now + LONGEST_LOOK)
    if ladder.updates >= UPDATES:
        return ParkTurn(ids, end, ladder)
    due, looked = now >= ladder.next, ladder.next > 0
    if (due and looked) or _first_stderr(live, ladder):
        ladder = _look(live, ladder, now)
    if due:
        looks = ladder.looks + looked
        ladder = replace(ladder, looks=looks, next=now + min(FIRST_LOOK << min(looks, 10), LONGEST_LOOK))
    return Update(ids, ladder) if ladder.news else ParkTurn(ids, min(end, ladder.next), ladder)


def _first_stderr(live: Sequence[HeldCommand], ladder: Ladder) -> bool:
    heard = {each.id for each in ladder.shown if each.stderr}
    return any(each.stderr and each.id not in heard for each in live)


def _look(live: Sequence[HeldCommand], ladder: Ladder, now: int) -> Ladder:
    known = {each.id: each for each in ladder.shown}
    shown, news = [], []
    for each in live:
        before = known.get(each.id) or Shown(each.id, each.since)
        after = before
        if each.stdout > before.stdout or each.stderr > before.stderr:
            after = Shown(each.id, now, each.stdout, each.stderr)
        elif now - before.at >= SILENCE and not before.silent:
            after = replace(before, silent=True)
        if after != before:
            news.append(News(before, after))
        shown.append(after)
    return replace(ladder, updates=ladder.updates + bool(news), shown=tuple(shown), news=tuple(news))
