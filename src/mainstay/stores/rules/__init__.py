"""What each write does, decided once for every store.

A rule reads rows, refuses with a typed error before it has changed anything, or changes rows and returns its receipt.
The store runs it inside one transaction. Rules know no SQL, no clock and no randomness; stores know no rules.

Two laws hold throughout. *Fencing*: a write of an owner names its generation, and after a claim by another nothing of
the old owner's changes anything. *Recognition*: a write sent twice because its reply was lost is applied once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from msgspec.structs import replace

from mainstay.errors import InternalError, MainstayError
from mainstay.model.process import ProcessRow
from mainstay.model.session import SessionRow
from mainstay.model.write import (
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
from mainstay.stores.rules import processes, sessions, takeovers
from mainstay.stores.rules.rows import Rows, Transaction

R = TypeVar("R")


async def apply(rows: Transaction, write: Write[R], held: bool = False) -> R:
    """Run the rule of a write. In a store that is `held` everything is accepted and nothing is claimed."""
    if held:
        if isinstance(write, Claim):
            of_session, target = isinstance(write.target, SessionRef), write.target.id
            row: Any = await (rows.session(target) if of_session else rows.process(target))
            return cast(R, Claimed(row, won=False))
        write = unclaimed(write)
    try:
        receipt: R = await RULES[type(write)](rows, write)
    except MainstayError:
        rows.discard()
        raise
    rows.keep()
    return receipt


async def transact(rows: Rows, write: Write[R], held: bool = False) -> R:
    """A write in a transaction of its own, flushed."""
    transaction = Transaction(rows)
    receipt = await apply(transaction, write, held)
    await transaction.flush()
    return receipt


def unclaimed(write: Write[R]) -> Write[R]:
    """The write without the claim that goes with it."""
    return cast(Write[R], replace(write, worker=None)) if isinstance(write, CLAIMING) else write


async def beat(rows: Transaction, write: Beat) -> bool:
    known = await rows.worker(write.worker.id)
    # Which suspect it runs is decided by claims, not by the worker.
    running = None if known is None else await takeovers.running(rows, known)
    rows.put_worker(replace(write.worker, suspect=running))
    return known is not None or write.worker.beat == 0


async def retire(rows: Transaction, write: Retire) -> None:
    turns, work = await rows.owned_by(write.worker_id), await rows.processes_of(write.worker_id)
    if write.dead and (turns or work):
        return  # what a dead worker owned is claimed first, each with its own fence
    if write.dead and await _tells(rows, write):
        return
    for row in turns:
        rows.put_session(replace(row, owner=None))
    for process in work:
        await processes.drained(rows, process, write.at)
    rows.drop_worker(write.worker_id)


async def _tells(rows: Transaction, write: Retire) -> bool:
    """Whether the row says which suspect ran when others died whose scopes are not claimed yet."""
    row = await rows.worker(write.worker_id)
    if row is None or row.suspect is None:
        return False
    others = [each for each in await rows.workers() if each.id in write.beside and each.process == row.process != ""]
    for each in others:
        if each.id != row.id and (await rows.owned_by(each.id) or await rows.processes_of(each.id)):
            return True
    return False


async def claim(rows: Transaction, write: Claim[Any]) -> Claimed[Any]:
    return await (sessions.claim if isinstance(write.target, SessionRef) else processes.claim)(rows, write)


async def release(rows: Transaction, write: Release[Any]) -> Released[Any]:
    scope: object = write.scope
    if isinstance(scope, TurnScope):
        return await sessions.release(rows, scope, write.at, write.stuck)
    if isinstance(scope, ProcessScope):
        return await processes.release(rows, scope, write.at, write.stuck)
    raise InternalError(f"{scope!r} is neither a turn nor a process")


async def cancel(rows: Transaction, write: Cancel[Any]) -> CancelReceipt[Any]:
    return await (sessions.cancel if isinstance(write.target, SessionRef) else processes.cancel)(rows, write)


async def resume(rows: Transaction, write: Resume[Any]) -> SessionRow | ProcessRow | None:
    return await (sessions.resume if isinstance(write.target, SessionRef) else processes.resume)(rows, write)


CLAIMING = (Accept, Cancel, Resolve, Resume, Register, Deliver)
"""Writes that claim what they open, for the worker that they name."""

RULES: dict[type, Callable[[Transaction, Any], Awaitable[Any]]] = {
    Accept: sessions.accept,
    Claim: claim,
    Append: sessions.append,
    Commit: sessions.commit,
    Release: release,
    Cancel: cancel,
    Resolve: sessions.resolve,
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


async def applied(rows: Transaction, write: Write[R], held: bool = False) -> R | None:
    """The receipt of a write that may have landed before its reply was lost; None when it must be sent again.

    All but these recognise themselves when they are applied again. An acceptance with a key, or a registration, would
    take itself for a second asking, and nobody would work on it.
    """
    if held:
        write = unclaimed(write)
    if isinstance(write, Accept):
        return cast("R | None", await sessions.accept_applied(rows, write))
    if isinstance(write, Register):
        return cast("R | None", await processes.register_applied(rows, write))
    return None
