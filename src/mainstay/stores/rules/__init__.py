"""What each write does, decided once for every store.

A rule reads rows, refuses with a typed error before it has changed anything, or changes rows and returns its receipt.
The store runs it inside one transaction. Rules know no SQL, no clock and no randomness; stores know no rules.

Two laws hold throughout. *Fencing*: a write of an owner names its generation, and after a claim by another nothing of
the old owner's changes anything. *Recognition*: a write sent twice because its reply was lost is applied once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from msgspec.structs import replace

from mainstay.model.process_write import (
    Advance,
    Complete,
    Deliver,
    Dismiss,
    LetGo,
    Mark,
    Prune,
    Register,
    Revive,
    Share,
    Stop,
    Take,
    Taken,
    Tell,
    Transfer,
)
from mainstay.model.write import (
    Accept,
    Append,
    Beat,
    Branch,
    Cancel,
    Claim,
    Claimed,
    Commit,
    Configure,
    Delete,
    Outlived,
    Release,
    Resolve,
    Resume,
    Retire,
    Write,
)
from mainstay.stores.rules import processes, sessions, takeovers, wakes
from mainstay.stores.rules.rows import Rows

R = TypeVar("R")


def apply(rows: Rows, write: Write[R], held: bool = False) -> R:
    """Run the rule of a write. In a store that is `held` everything is accepted and nothing is claimed."""
    if held:
        if isinstance(write, Claim):
            return cast(R, Claimed(rows.session(write.session_id), won=False))
        if isinstance(write, Take):
            return cast(R, Taken(rows.process(write.process_id), won=False))
        write = unclaimed(write)
    receipt: R = RULES[type(write)](rows, write)
    return receipt


def unclaimed(write: Write[R]) -> Write[R]:
    """The write without the claim that goes with it."""
    return cast(Write[R], replace(write, worker=None)) if isinstance(write, CLAIMING) else write


def beat(rows: Rows, write: Beat) -> bool:
    known = rows.worker(write.worker.id)
    # Which suspect it runs is decided by claims, not by the worker.
    running = None if known is None else takeovers.running(rows, known)
    rows.put_worker(replace(write.worker, suspect=running))
    return known is not None or write.worker.beat == 0


def retire(rows: Rows, write: Retire) -> None:
    turns, work = rows.owned_by(write.worker_id), rows.processes_of(write.worker_id)
    if write.dead and (turns or work):
        return  # what a dead worker owned is claimed first, each with its own fence
    if write.dead and _tells(rows, write):
        return
    for row in turns:
        rows.put_session(replace(row, owner=None))
    for process in work:
        processes.drained(rows, process, write.at)
    rows.drop_worker(write.worker_id)


def _tells(rows: Rows, write: Retire) -> bool:
    """Whether the row says which suspect ran when others died whose scopes are not claimed yet."""
    row = rows.worker(write.worker_id)
    if row is None or row.suspect is None:
        return False
    others = [each for each in rows.workers() if each.id in write.beside and each.process == row.process != ""]
    return any(rows.owned_by(each.id) or rows.processes_of(each.id) for each in others if each.id != row.id)


CLAIMING = (Accept, Cancel, Resolve, Resume, Register, Deliver)
"""Writes that claim what they open, for the worker that they name."""

RULES: dict[type, Callable[[Rows, Any], Any]] = {
    Accept: sessions.accept,
    Claim: sessions.claim,
    Append: sessions.append,
    Commit: sessions.commit,
    Release: sessions.release,
    Cancel: sessions.cancel,
    Resolve: sessions.resolve,
    Resume: sessions.resume,
    Configure: sessions.configure,
    Branch: sessions.branch,
    Delete: sessions.delete,
    Register: processes.register,
    Take: processes.take,
    Advance: processes.advance,
    LetGo: processes.let_go,
    Tell: processes.tell,
    Mark: processes.mark,
    Stop: processes.stop,
    Complete: processes.complete,
    Revive: processes.revive,
    Share: wakes.share,
    Transfer: wakes.transfer,
    Deliver: wakes.deliver,
    Dismiss: wakes.dismiss,
    Prune: wakes.prune,
    Beat: beat,
    Retire: retire,
    Outlived: takeovers.outlived,
}


def applied(rows: Rows, write: Write[R], held: bool = False) -> R | None:
    """The receipt of a write that may have landed before its reply was lost; None when it must be sent again.

    All but these recognise themselves when they are applied again. An acceptance with a key, or a registration, would
    take itself for a second asking, and nobody would work on it.
    """
    if held:
        write = unclaimed(write)
    if isinstance(write, Accept):
        return cast("R | None", sessions.accept_applied(rows, write))
    if isinstance(write, Register):
        return cast("R | None", processes.register_applied(rows, write))
    return None
