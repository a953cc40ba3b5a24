"""What each write does, decided once for every store.

A rule reads rows, refuses with a typed error before it has changed anything, or changes rows and returns its receipt.
The store runs it inside one transaction. Rules know no SQL, no clock and no randomness; stores know no rules.

Two laws hold throughout. *Fencing*: a write of an owner names its generation, and after a claim by another nothing of
the old owner's changes anything. *Recognition*: a write sent twice because its reply was lost is applied once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar, cast

from msgspec.structs import replace

from perdure.errors import InternalError, PerdureError
from perdure.lifecycle.process import OF_SESSION
from perdure.model.codec import spilled
from perdure.model.ids import turn_id
from perdure.model.process import ProcessRow, SessionOrigin, is_task
from perdure.model.session import SessionRow
from perdure.model.write import (
    Accept,
    AddEvent,
    Advance,
    Append,
    Beat,
    Branch,
    Cancel,
    CancelReceipt,
    Claim,
    Claimed,
    Commit,
    Complete,
    Configure,
    Delete,
    Deliver,
    Dismiss,
    Outlived,
    ProcessScope,
    Prune,
    Register,
    Release,
    Released,
    ReopenTurn,
    Resolve,
    Resume,
    Retire,
    SendSignal,
    SessionRef,
    Share,
    Transfer,
    TurnScope,
    Write,
)
from perdure.stores.rules import processes, sessions, spending, takeovers
from perdure.stores.rules.rows import (
    AllWorkers,
    ChildrenOf,
    DeathsOf,
    DeathsOfProcess,
    DeathsOfSession,
    DropWorker,
    EventByKey,
    EventsAfter,
    HasBlob,
    InputByKey,
    LastStep,
    LiveProcessesNamed,
    NextPid,
    NextPlace,
    NextSid,
    OwnedTurn,
    ProcessById,
    ProcessByPid,
    ProcessesAwaiting,
    ProcessesOwnedBy,
    PutSession,
    PutWorker,
    ReservationsOf,
    RowRead,
    Rows,
    SessionById,
    SessionsOwnedBy,
    Transaction,
    WaitById,
    WorkerById,
)

R = TypeVar("R")


async def apply(tx: Transaction, write: Write[R], held: bool = False) -> R:
    """Run the rule of a write. In a store that is `held` everything is accepted and nothing is claimed."""
    if held:
        if isinstance(write, Claim):
            kind = SessionById if isinstance(write.target, SessionRef) else ProcessById
            return cast(R, Claimed(await tx.read(kind(write.target.id)), won=False))
        write = unclaimed(write)
    before, numbers = tx.flushed + len(tx.changes), tx.numbers.copy()
    try:
        receipt: R = await RULES[type(write)](tx, write)
    except PerdureError:
        tx.undo(before, numbers)
        raise
    return receipt


async def transact(rows: Rows, write: Write[R], held: bool = False) -> R:
    """A write in a transaction of its own, flushed."""
    tx = Transaction(rows)
    receipt = await apply(tx, write, held)
    await tx.flush()
    return receipt


def unclaimed(write: Write[R]) -> Write[R]:
    """The write without the claim that goes with it."""
    return cast(Write[R], replace(write, worker=None)) if isinstance(write, CLAIMING) else write


async def beat(tx: Transaction, write: Beat) -> bool:
    known = await tx.read(WorkerById(write.worker.id))
    # Which suspect it runs is decided by claims, not by the worker.
    running = None if known is None else await takeovers.running_suspect(tx, known)
    tx.change(PutWorker(replace(write.worker, suspect=running)))
    return known is not None or write.worker.beat == 0


async def retire(tx: Transaction, write: Retire) -> None:
    await spending.bury(tx, write.worker_id)
    turns, work = await tx.read(SessionsOwnedBy(write.worker_id)), await tx.read(ProcessesOwnedBy(write.worker_id))
    if write.dead and (turns or work):
        return  # the row stays until each scope has been claimed, which fences it
    if write.dead and await _is_evidence(tx, write):
        return
    for row in turns:
        await spending.lose(tx, row.id)
        tx.change(PutSession(replace(row, owner=None)))
    for process in work:
        await processes.release_leaving(tx, process, write.at)
    tx.change(DropWorker(write.worker_id))


async def _is_evidence(tx: Transaction, write: Retire) -> bool:
    """Whether the row names the suspect that its OS process ran, and another worker that died with it still owns
    something: whether that is claimed as a suspect is decided by this row."""
    row = await tx.read(WorkerById(write.worker_id))
    if row is None or row.suspect is None:
        return False
    for each in await tx.read(AllWorkers()):
        if each.id in write.beside and each.id != row.id and each.process == row.process != "":
            turns, work = await tx.read(SessionsOwnedBy(each.id)), await tx.read(ProcessesOwnedBy(each.id))
            if turns or work:
                return True
    return False


async def claim(tx: Transaction, write: Claim[Any]) -> Claimed[Any]:
    return await (sessions.claim if isinstance(write.target, SessionRef) else processes.claim)(tx, write)


async def release(tx: Transaction, write: Release[Any]) -> Released[Any]:
    scope: object = write.scope
    if isinstance(scope, TurnScope):
        return await sessions.release(tx, scope, write.at, write.stuck)
    if isinstance(scope, ProcessScope):
        return await processes.release(tx, scope, write.at, write.stuck)
    raise InternalError(f"{scope!r} is neither a turn nor a process")


async def cancel(tx: Transaction, write: Cancel[Any]) -> CancelReceipt[Any]:
    return await (sessions.cancel if isinstance(write.target, SessionRef) else processes.cancel)(tx, write)


async def resume(tx: Transaction, write: Resume[Any]) -> SessionRow | ProcessRow | None:
    return await (sessions.resume if isinstance(write.target, SessionRef) else processes.resume)(tx, write)


CLAIMING = (Accept, Cancel, ReopenTurn, Resolve, Resume, Register, Deliver)
"""Writes that claim what they open, for the worker that they name."""

RULES: dict[type, Callable[[Transaction, Any], Awaitable[Any]]] = {
    Accept: sessions.accept,
    Claim: claim,
    Append: sessions.append,
    Commit: sessions.commit,
    Release: release,
    Cancel: cancel,
    Resolve: sessions.resolve,
    ReopenTurn: sessions.reopen,
    Resume: resume,
    Configure: sessions.configure,
    Branch: sessions.branch,
    Delete: sessions.delete,
    Register: processes.register,
    Advance: processes.advance,
    SendSignal: processes.send_signal,
    AddEvent: processes.add_event,
    Complete: processes.complete,
    Share: processes.share,
    Transfer: processes.transfer,
    Deliver: sessions.deliver,
    Dismiss: processes.dismiss,
    Prune: processes.prune,
    Beat: beat,
    Retire: retire,
    Outlived: takeovers.outlived,
}


async def applied(tx: Transaction, write: Write[R], held: bool = False) -> R | None:
    """The receipt of a write that may have landed before its reply was lost; None when it must be sent again.

    All writes but these recognise themselves when they are applied again. An acceptance with a key, or a registration,
    would be answered as a repeated request (`known`), and its worker would not run what it had claimed.
    """
    if held:
        write = unclaimed(write)
    if isinstance(write, Accept):
        return cast("R | None", await sessions.accept_applied(tx, write))
    if isinstance(write, Register):
        return cast("R | None", await processes.register_applied(tx, write))
    return None


# ---------------------------------------------------------------------- what hot writes read


def reads(write: Write[Any]) -> list[RowRead[Any]]:
    """The declared reads of a write, each once; none for most writes."""
    declared = READS.get(type(write))
    return [] if declared is None else list(dict.fromkeys(declared(write)))


def _blobs(digests: tuple[str, ...]) -> Iterator[RowRead[Any]]:
    for digest in digests:
        yield HasBlob(digest)


def _accept(write: Accept) -> Iterator[RowRead[Any]]:
    yield SessionById(write.session_id)
    yield NextSid()
    if write.key is not None:
        yield InputByKey(write.session_id, write.key)
    yield from _blobs(write.blobs)


def _claim(write: Claim[Any]) -> Iterator[RowRead[Any]]:
    if isinstance(write.target, SessionRef):
        yield SessionById(write.target.id)
        yield DeathsOfSession(write.target.id)
        yield ReservationsOf(write.target.id)
    else:
        yield ProcessById(write.target.id)
        yield DeathsOfProcess(write.target.id)
        yield NextPlace()
    # Which suspects run in the OS process of the claimant.
    yield WorkerById(write.worker)
    yield AllWorkers()


def _append(write: Append) -> Iterator[RowRead[Any]]:
    scope = write.scope
    yield OwnedTurn(scope.sid, scope.turn, write.take)
    yield DeathsOf(scope.sid)
    yield WorkerById(scope.owner)
    for wait_id in (*(wait.id for wait in write.waits), *write.park):
        yield WaitById(wait_id)
    for process_id in write.awaits:
        yield ProcessById(process_id)
    yield from _blobs(write.blobs)
    yield from _blobs(tuple(digest for wait in write.waits if (digest := spilled(wait.body)) is not None))


def _commit(write: Commit) -> Iterator[RowRead[Any]]:
    scope = write.scope
    yield OwnedTurn(scope.sid, scope.turn, write.take)
    yield DeathsOf(scope.sid)
    yield WorkerById(scope.owner)
    if write.children:
        yield ChildrenOf(turn_id(scope.session_id, scope.turn), False)
    yield from _blobs(write.blobs)


def _register(write: Register) -> Iterator[RowRead[Any]]:
    asked = write.registration
    yield ProcessById(asked.id)
    yield NextPid()
    yield NextPlace()
    if asked.parent is not None:
        if asked.parent.startswith(OF_SESSION):
            yield SessionById(asked.parent.removeprefix(OF_SESSION))
        else:
            yield ProcessById(asked.parent)
            yield SessionById(asked.parent.rpartition(".")[0])
    if is_task(asked) and isinstance(asked.origin, SessionOrigin):
        yield LiveProcessesNamed(asked.origin.session_id, asked.name)
    yield from _blobs(write.blobs)


def _advance(write: Advance) -> Iterator[RowRead[Any]]:
    scope = write.scope
    yield ProcessByPid(scope.pid)
    yield NextPlace()
    yield DeathsOf(-scope.pid)
    yield WorkerById(scope.owner)
    if write.records:
        yield LastStep(scope.pid)
    elif write.events:
        yield EventsAfter(scope.pid, write.seen)
    for event in write.events:
        if event.key is not None:
            yield EventByKey(scope.pid, event.key)
    if write.outcome is not None:
        yield ProcessesAwaiting(scope.id)
        yield ChildrenOf(scope.id, False)
    for wait in write.park:
        if wait.kind == "process":
            yield ProcessById(wait.name)
        elif wait.kind == "turn":
            yield SessionById(wait.name.rpartition(".")[0])
    yield from _blobs(write.blobs)


READS: dict[type, Callable[[Any], Iterator[RowRead[Any]]]] = {
    Accept: _accept,
    Claim: _claim,
    Append: _append,
    Commit: _commit,
    Register: _register,
    Advance: _advance,
}
"""What the writes of every turn and every process will read, said before their rules run.

A store over a network fetches it in one round trip (`Transaction.learn`), and such a write then takes one to read and
one to write. Whatever a rule reads besides is fetched when it is asked for: in rare forms of these writes, and in all
writes that are not here.
"""
