"""What a claim does with the deaths of a scope's owners: counts them, holds a suspect back, lets one run.

A scope that was taken over from a dead owner has a row in `deaths` until it makes a new record, parks or ends. Its
number is that of the session, or the negative of the process's. The law is in `lifecycle.suspects`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from perdure.lifecycle import suspects
from perdure.model.session import Death, Deaths, WorkerRow
from perdure.model.write import Outlived
from perdure.stores.rules.rows import (
    AllWorkers,
    DeathsOf,
    DropDeaths,
    PutDeaths,
    PutWorker,
    Transaction,
    WorkerById,
)

Fate: TypeAlias = Literal["runs", "held", "stuck"]


class Ruling(Struct, frozen=True):
    """What becomes of a claim, and what is known of the scope's deaths then. `held`: another suspect runs already."""

    fate: Fate = "runs"
    deaths: Deaths | None = None

    @property
    def suspect(self) -> bool:
        return self.deaths is not None and suspects.is_suspect(self.deaths)


NOTHING_KNOWN = Ruling()


async def judge(
    tx: Transaction, scope: int, owner: str | None, mark: Deaths | None, claim: tuple[str, Death | None]
) -> Ruling:
    """Decide about a claim of a scope. `mark` is what is known of its deaths, `claim` the worker that claims it and
    what that one knows of the owner's death."""
    worker, death = claim
    if owner is not None:
        mark = suspects.after(mark, scope, Death(owner) if death is None else death)
    if mark is None:
        return NOTHING_KNOWN
    if suspects.is_stuck(mark):
        return Ruling("stuck", mark)
    if suspects.is_suspect(mark) and await _runs_another_suspect(tx, worker, scope):
        return Ruling("held", mark)
    return Ruling("runs", mark)


async def _runs_another_suspect(tx: Transaction, worker: str, scope: int) -> bool:
    """Whether the worker's OS process runs another suspect. Several Runtimes may live in one."""
    me = await tx.read(WorkerById(worker))
    if me is None:
        return False
    workers = await tx.read(AllWorkers()) if me.process else [me]
    for row in workers:
        if row.process == me.process and await running_suspect(tx, row) not in (None, scope):
            return True
    return False


async def running_suspect(tx: Transaction, row: WorkerRow) -> int | None:
    """The suspect that a worker runs; None when another worker has claimed it since."""
    mark = None if row.suspect is None else await tx.read(DeathsOf(row.suspect))
    return mark.scope if mark is not None and mark.worker == row.id else None


async def mark_running(tx: Transaction, ruling: Ruling, worker: str, lived: int) -> None:
    """The claim is won: the scope runs from now on, as its worker's suspect if it is one."""
    if ruling.deaths is None:
        return
    tx.change(PutDeaths(replace(ruling.deaths, worker=worker, since=lived)))
    row = await tx.read(WorkerById(worker)) if ruling.suspect else None
    if row is not None:
        tx.change(PutWorker(replace(row, suspect=ruling.deaths.scope)))


async def clear(tx: Transaction, scope: int, takeovers: int) -> None:
    """Forget the deaths of a scope that has made a new record, parked or ended."""
    mark = await tx.read(DeathsOf(scope)) if takeovers else None
    if mark is not None:
        tx.change(DropDeaths(scope))
        await _unmark(tx, mark)


async def release(tx: Transaction, scope: int, takeovers: int) -> None:
    """Note that a scope whose owner gave it up runs no more. It is a suspect still."""
    mark = await tx.read(DeathsOf(scope)) if takeovers else None
    if mark is not None:
        await _unmark(tx, mark)


async def _unmark(tx: Transaction, mark: Deaths) -> None:
    row = await tx.read(WorkerById(mark.worker)) if suspects.is_suspect(mark) else None
    if row is not None and row.suspect == mark.scope:
        tx.change(PutWorker(replace(row, suspect=None)))


async def resume(tx: Transaction, scope: int, takeovers: int) -> Ruling:
    """Count the deaths as the only suspect anew, because a person resumed the scope. It is a suspect still."""
    mark = await tx.read(DeathsOf(scope)) if takeovers else None
    if mark is None:
        return NOTHING_KNOWN
    mark = replace(mark, alone=0)
    tx.change(PutDeaths(mark))
    return Ruling("runs", mark)


async def resume_for(tx: Transaction, scope: int, takeovers: int, worker: str, lived: int) -> None:
    """The same for a worker that claims it: as its suspect, unless its OS process runs another."""
    ruling = await resume(tx, scope, takeovers)
    if not ruling.suspect or not await _runs_another_suspect(tx, worker, scope):
        await mark_running(tx, ruling, worker, lived)


async def outlived(tx: Transaction, write: Outlived) -> bool:
    mark = await tx.read(DeathsOf(write.scope))
    if mark is None or mark.worker != write.worker:
        return False
    if suspects.is_suspect(mark):
        await _unmark(tx, mark)
        tx.change(PutDeaths(suspects.excused(mark)))
    return True
