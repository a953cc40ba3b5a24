"""The variables of sessions in code mode: where they are between two cells, and how they are had again.

    in memory     those of the sessions that worked last
    in a dump     the newest that fits: of this turn, of an older one, or of the session that this one was forked from
    nowhere       the cells of the branch are run again from the first, against their recorded answers

Answers are the truth, and the other two are caches of it (ADR 0047). So whatever is found says which cell left it (a
`Mark`), and is used only where that cell is one that the variables come from; cells that ended after it are run again
on top. A dump may also hold a cell in its middle. Where that is the cell which is to go on, and everything in the dump
is recorded, it goes on from there; otherwise it is dropped, and what was before it is used.

Running cells again shows and records nothing, and calls nothing. Beyond `REBUILD_SECONDS` of it the variables are
lost, and the next cell says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec
from msgspec import Struct

from perdure.engine.driver import Run
from perdure.errors import BlobMissing, DumpRefused
from perdure.graph.cells import Cell, effective
from perdure.model.code import CodeStep, Paused
from perdure.model.session import Dump
from perdure.ports.code import Executor, Repl
from perdure.ports.host import Clock
from perdure.ports.store import Store
from perdure.tools.dialogue import CellDiverged, Dialogue
from perdure.turn.tools import functions

log = logging.getLogger("perdure.tools")

MOST_KEPT = 64
"""Sessions whose variables are kept in memory."""

MOST_HELD = MOST_KEPT * 64 * 1024
"""Bytes that these may take together. Of larger ones fewer are kept: the others are found again in their dumps."""

REBUILD_SECONDS = 10.0
"""How long cells may be run again to make variables anew; then they are lost, and the model is told."""

Past = Callable[[Run, int], Awaitable[Sequence[Cell]]]
"""The cells of a session's committed turns after one of them, oldest first; after 0 also those it was forked with."""


class Mark(Struct, frozen=True, array_like=True):
    """The cell that left some variables, by the record of its end; `at` is the time of that."""

    sid: int
    turn: int
    key: str
    at: int


class Saved(Struct, frozen=True, omit_defaults=True):
    """What a dump is of, sealed with it. `mark` is the last cell whose variables are in it, None where none was.

    In the middle of a cell, that is the one before it, and the rest is about the cell that runs: it is cell `key` of
    turn `turn` of session `sid`, has made `asked` calls, and the last answer that it got is the record of `call`, made
    `at` that time. `printed` is what it has printed, `fresh` why it began without variables.
    """

    mark: Mark | None
    sid: int = 0
    turn: int = 0
    key: str = ""
    asked: int = 0
    call: str = ""
    at: int = 0
    printed: str = ""
    fresh: str = ""


encode_saved = msgspec.json.encode
_decode = msgspec.json.Decoder(Saved).decode


class KeptVariables(Struct, frozen=True):
    """Variables that are there, as the cell `mark` left them. `fresh`: why those of the cells before are lost.

    `saved`: the cell that is to run stands in its middle.
    """

    repl: Repl
    mark: Mark | None
    fresh: str = ""
    saved: Saved | None = None


class Lost(Exception):
    """The variables of a session cannot be made again."""


def mark_of(cell: Cell) -> Mark | None:
    return None if cell.end is None else Mark(cell.sid, cell.turn, cell.key, cell.end.at)


class Variables:
    """Those of all sessions of a Runtime. `_kept` are in memory, those used last at the end."""

    def __init__(self, store: Store, clock: Clock, past: Past) -> None:
        self._store, self._clock, self._past = store, clock, past
        self._kept: dict[str, KeptVariables] = {}

    async def keep(self, session_id: str, kept: KeptVariables) -> None:
        self._kept[session_id] = kept
        # The newest stays whatever it takes: its session has more cells to run, most likely.
        while len(self._kept) > MOST_KEPT or (
            len(self._kept) > 1 and sum([each.repl.size for each in self._kept.values()]) > MOST_HELD
        ):
            await self._kept.pop(next(iter(self._kept))).repl.close()

    async def close(self) -> None:
        while self._kept:
            await self._kept.popitem()[1].repl.close()

    # ------------------------------------------------------------------ finding them

    async def find(
        self, run: Run, executor: Executor, cell: Cell, earlier: Sequence[Cell], dumps: bool = True
    ) -> KeptVariables:
        """The variables before `cell`, or that cell in its middle. `earlier` are those of the turn before it that have
        left some. Without `dumps` none is loaded: one took its worker with it, perhaps."""
        kept = self._kept.pop(run.scope.session_id, None)
        if kept is not None:
            found = await self._brought_forward(run, executor, kept, earlier)
            if found is not None:
                return found
        if run.scope.turn == 1 and not run.resumed and not earlier:
            row = await self._store.session_by_sid(run.scope.sid)
            if row is not None and row.fork is None:
                return KeptVariables(await executor.open(), None)  # the first cell of a session
        if dumps:
            async for sealed in self._sealed(run):
                found = await self._opened(run, executor, sealed, cell, earlier)
                if found is not None:
                    return found
        return await self._made_again(run, executor, effective([*await self._past(run, 0), *earlier]))

    async def _sealed(self, run: Run) -> AsyncIterator[bytes]:
        """The dumps of a session's branch, newest first."""
        sid, last = run.scope.sid, run.scope.turn
        while True:
            found = await self._store.dump(sid, last)
            if found is not None:
                last = found[0] - 1
                sealed = await self._whole(found[1])
                if sealed:
                    yield sealed
                continue
            row = await self._store.session_by_sid(sid)
            if row is None or row.fork is None:
                return
            sid, last = row.fork.sid, row.fork.turn

    async def _whole(self, dump: Dump) -> bytes:
        if dump.digest is None:
            return dump.body
        try:
            return await self._store.blobs.get(dump.digest)
        except BlobMissing:
            return b""

    async def _opened(
        self, run: Run, executor: Executor, sealed: bytes, cell: Cell, earlier: Sequence[Cell]
    ) -> KeptVariables | None:
        try:
            repl = await executor.open(sealed, functions(run.agent.catalog.specs))
        except DumpRefused as refused:
            log.info("a saved state of %s is not used: %s", run.turn_id, refused)
            return None
        try:
            saved = _decode(repl.contains)
        except msgspec.MsgspecError:  # of another version of us
            await repl.close()
            return None
        paused = repl.paused
        if paused is not None:
            if _goes_on(saved, paused, cell):
                return KeptVariables(repl, saved.mark, saved.fresh, saved)
            await repl.rollback()
            if saved.fresh:  # it began without the variables that `mark` left
                await repl.close()
                return None
        return await self._brought_forward(run, executor, KeptVariables(repl, saved.mark), earlier)

    async def _brought_forward(
        self, run: Run, executor: Executor, kept: KeptVariables, earlier: Sequence[Cell]
    ) -> KeptVariables | None:
        """These variables, after the cells that have ended since; None, and closed, where they are of no use."""
        mark, scope = kept.mark, run.scope
        if mark is not None and (mark.sid, mark.turn) == (scope.sid, scope.turn):
            cells = list(earlier)
        else:
            after = mark.turn - 1 if mark is not None and mark.sid == scope.sid else 0
            cells = effective([*await self._past(run, after), *earlier])
        marks = [mark_of(each) for each in cells]
        if mark is None or mark in marks:
            since = cells if mark is None else cells[marks.index(mark) + 1 :]
            if not since:
                return kept
            try:
                await self._run_again(run, kept.repl, since)
                return KeptVariables(kept.repl, marks[-1])
            except (Lost, CellDiverged) as error:
                log.info("variables of %s are made from the first cell on: %s", run.turn_id, error)
            except BaseException:  # also a cancel: what is half made is of no use
                await kept.repl.close()
                raise
        await kept.repl.close()
        return None

    async def _made_again(self, run: Run, executor: Executor, cells: Sequence[Cell]) -> KeptVariables:
        mark, repl = mark_of(cells[-1]) if cells else None, await executor.open()
        try:
            await self._run_again(run, repl, cells)
            return KeptVariables(repl, mark)
        except BaseException as error:  # also a cancel: what is half made is of no use
            await repl.close()
            if not isinstance(error, Lost | CellDiverged):
                raise
            names = dict.fromkeys([name for cell in cells for name in executor.binds(cell.code)])
            return KeptVariables(await executor.open(), mark, f"{error} They were: {', '.join(names) or 'none'}.")

    # ------------------------------------------------------------------ making them again

    async def _run_again(self, run: Run, repl: Repl, cells: Sequence[Cell]) -> None:
        if not cells:
            return
        work = asyncio.ensure_future(_all_again(run, repl, cells))
        limit = asyncio.ensure_future(self._clock.sleep(REBUILD_SECONDS))
        try:
            await asyncio.wait({work, limit}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Lost(f"running the cells again took more than {REBUILD_SECONDS:.0f} s.")
            await work
        finally:
            for task in (work, limit):
                task.cancel()
            await asyncio.gather(work, limit, return_exceptions=True)


async def _all_again(run: Run, repl: Repl, cells: Sequence[Cell]) -> None:
    """Run cells that have ended, against their answers: nothing is recorded, shown or done."""
    for cell in cells:
        dialogue, step = Dialogue(cell), await begin(run, repl, cell, check=False)
        while isinstance(step, Paused):
            if dialogue.asked(step.calls) or (answer := dialogue.next_answer()) is None:
                raise Lost(f"cell {cell.turn}.{cell.key} asks for more than is recorded.")
            step = await repl.resume(dialogue.answer(answer), at=answer.at)
        if step.error is not None and step.error.rolled_back:
            raise Lost(f"cell {cell.turn}.{cell.key} cannot be run again: {step.error.message}")


async def begin(run: Run, repl: Repl, cell: Cell, *, check: bool) -> CodeStep:
    tools = functions(run.agent.catalog.specs)
    return await repl.begin(cell.code, tools, at=cell.at, seed=cell.seed, check=check)


def _goes_on(saved: Saved, paused: Paused, cell: Cell) -> bool:
    """Whether a dump in the middle of a cell is of this one, and everything that is in it is recorded."""
    if (saved.sid, saved.turn, saved.key) != (cell.sid, cell.turn, cell.key) or saved.asked > len(cell.calls):
        return False
    answered = {each.call: each for each in cell.answers}
    last = answered.get(saved.call)
    if saved.call and (last is None or last.at != saved.at):
        return False
    waiting = {call.number for call in paused.calls}
    return all(f"{cell.key}.{number}" in answered for number in range(saved.asked) if number not in waiting)
