"""What the writes of every turn and every process will read, said before their rules run.

A store over a network fetches it in one round trip (`Transaction.learn`), and such a write then takes one to read and
one to write. Whatever a rule reads besides is fetched when it is asked for: in rare forms of these writes, and in all
writes that are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mainstay.model.codec import spilled
from mainstay.model.ids import turn_id
from mainstay.model.process import SessionOrigin, is_task
from mainstay.model.write import Accept, Advance, Append, Claim, Commit, Register, SessionRef, Write
from mainstay.stores.rules.rows import Read


def reads(write: Write[Any]) -> list[Read]:
    """The declared reads of a write, each once; none for most writes."""
    declared = READS.get(type(write))
    return [] if declared is None else list(dict.fromkeys(declared(write)))


def _blobs(digests: tuple[str, ...]) -> Iterator[Read]:
    for digest in digests:
        yield "has_blob", (digest,)


def _accept(write: Accept) -> Iterator[Read]:
    yield "session", (write.session_id,)
    yield "next_sid", ()
    if write.key is not None:
        yield "key", (write.session_id, write.key)
    yield from _blobs(write.blobs)


def _claim(write: Claim[Any]) -> Iterator[Read]:
    if isinstance(write.target, SessionRef):
        yield "session", (write.target.id,)
        yield "session_deaths", (write.target.id,)
    else:
        yield "process", (write.target.id,)
        yield "process_deaths", (write.target.id,)
        yield "next_place", ()
    # Which suspects run in the OS process of the claimant.
    yield "worker", (write.worker,)
    yield "workers", ()


def _append(write: Append) -> Iterator[Read]:
    scope = write.scope
    yield "session_by_sid", (scope.sid,)
    yield "records", (scope.sid, scope.turn)
    yield "has_mail", (scope.sid, write.take)
    yield "deaths", (scope.sid,)
    yield "worker", (scope.owner,)
    for wait_id in (*(wait.id for wait in write.waits), *write.park):
        yield "wait", (wait_id,)
    yield from _blobs(write.blobs)
    yield from _blobs(tuple(digest for wait in write.waits if (digest := spilled(wait.body)) is not None))


def _commit(write: Commit) -> Iterator[Read]:
    scope = write.scope
    yield "session_by_sid", (scope.sid,)
    yield "records", (scope.sid, scope.turn)
    yield "first_mail", (scope.sid, write.take)
    yield "deaths", (scope.sid,)
    yield "worker", (scope.owner,)
    if write.children:
        yield "children", (turn_id(scope.session_id, scope.turn), False)
    yield from _blobs(write.blobs)


def _register(write: Register) -> Iterator[Read]:
    asked = write.registration
    yield "process", (asked.id,)
    yield "next_pid", ()
    yield "next_place", ()
    if asked.parent is not None:
        yield "process", (asked.parent,)
        yield "session", (asked.parent.rpartition(".")[0],)
    if is_task(asked) and isinstance(asked.origin, SessionOrigin):
        yield "live_named", (asked.origin.session_id, asked.name)
    yield from _blobs(write.blobs)


def _advance(write: Advance) -> Iterator[Read]:
    scope = write.scope
    yield "process_by_pid", (scope.pid,)
    yield "next_place", ()
    yield "deaths", (-scope.pid,)
    yield "worker", (scope.owner,)
    if write.records:
        yield "last_step", (scope.pid,)
    elif write.events:
        yield "events_after", (scope.pid, write.seen)
    for event in write.events:
        if event.key is not None:
            yield "event_by_key", (scope.pid, event.key)
    for wait in write.park:
        if wait.kind == "process":
            yield "process", (wait.name,)
        elif wait.kind == "turn":
            yield "session", (wait.name.rpartition(".")[0],)
    yield from _blobs(write.blobs)


READS: dict[type, Callable[[Any], Iterator[Read]]] = {
    Accept: _accept,
    Claim: _claim,
    Append: _append,
    Commit: _commit,
    Register: _register,
    Advance: _advance,
}
