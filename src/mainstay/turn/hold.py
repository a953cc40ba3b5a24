"""Whether a turn that has an answer is held for commands that it started: a pure function of them and of the time."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class HeldCommand(Struct, frozen=True, gc=False):
    id: str
    since: int
    live: bool


class Hold(Struct, frozen=True, gc=False):
    """Park until one of these ends, and no longer than until `due`."""

    commands: tuple[str, ...]
    due: int


class Tell(Struct, frozen=True, gc=False):
    """Ask the model again: these have ended, or (`late`) are waited for no longer; `live` are held still."""

    ended: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    live: tuple[str, ...] = ()


def decide(commands: Sequence[HeldCommand], held: Sequence[str] | None, now: int, limit: int) -> Hold | Tell | None:
    """What becomes of a turn that has an answer. `held` are the commands that it was held for before, None where it was
    not; each is held for `limit` ms from its start. None: the turn ends."""
    live = [each for each in commands if each.live and now < each.since + limit]
    if held is not None:
        ended = tuple([each.id for each in commands if each.id in held and not each.live])
        late = tuple([each.id for each in commands if each.id in held and each.live and now >= each.since + limit])
        if ended or late:
            return Tell(ended, late, tuple([each.id for each in live]))
    if not live:
        return None
    return Hold(tuple([each.id for each in live]), min(each.since for each in live) + limit)
