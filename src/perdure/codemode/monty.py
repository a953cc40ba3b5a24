"""The executor over Monty: REPLs without a process of their own, on a bounded pool of workers.

A worker is an OS process that runs one REPL at a time. A REPL that does not run is bytes: its variables between cells,
and while a cell waits, the whole of its interpreter. A cell that pauses keeps its worker for a moment, because most
answers come soon; it gives it back when it has waited for `PARK_AFTER`, or when another REPL wants a worker. So two
cells whose subagents run cells themselves cannot stop a machine with two workers, and an idle session holds none.

    begin ── check ── worker ── Cell.begin ──▶ Paused ──(100 ms, or wanted)──▶ bytes ── worker ── Cell.resume ──▶ …

The event loop owns every state here; threads run one blocking function each on a worker that a REPL holds.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, ParamSpec, TypeVar

from perdure.codemode import worker as blocking
from perdure.codemode.check import CellCode, judge, oversize, read_cell
from perdure.codemode.dumps import KEY_BYTES, CellState, DumpHeader, SealedDump, fitting, seal, unseal
from perdure.codemode.places import Catalogues, Places, to_its_end
from perdure.codemode.stubs import Functions, shown
from perdure.codemode.worker import MontyCell, MontyProgram, MontyWorker, TypeChecker
from perdure.errors import DumpRefused, InternalError, InvalidDefinition, MissingExtra
from perdure.model import validate
from perdure.model.code import (
    CellEnd,
    CodeAnswer,
    CodeError,
    CodeLimits,
    CodeStep,
    Paused,
    Variable,
)
from perdure.model.tool import ToolSpec
from perdure.tools.invoke import Threads

try:
    import pydantic_monty as monty
except ImportError:  # the classes below are refused before they are used
    raise MissingExtra("code mode", "code") from None

NAME: Final = "monty"
PARK_AFTER = 0.1
"""Seconds that a cell which waits may keep its worker."""

SMALL = 256 * 1024
"""Bytes that are sealed and unsealed on the event loop: a quarter of a millisecond."""

P = ParamSpec("P")
T = TypeVar("T")

SUPPORTS = """\
The code runs in a sandboxed Python without files, network, environment variables or packages.
It has functions, closures, lambdas, comprehensions, f-strings, match, try/except/finally, plain classes and \
dataclasses, async/await and asyncio.gather(), and of the standard library: asyncio, base64, bisect, collections, \
copy, csv, dataclasses, datetime, decimal, functools, hashlib, itertools, json, math, random, re, time, typing.
It has no class inheritance (so no exceptions or enums of your own), no yield, no decorators in classes, no del, no \
`async with`, no asyncio.create_task() and no other module.
The functions below are asynchronous: call them with `await`, or several at once with `await asyncio.gather(a(), b())` \
or `await settle(a(), b())`, which returns an exception in place of a result where one fails. They cannot be called \
where Python itself calls back: not in map(), filter(), sorted(key=…) or a dunder method; use a comprehension or a \
loop. Arguments and results are plain data: None, bool, int, float, str, list, dict.
`await sleep(seconds)` waits, for days if need be. `finish(value)` ends your work with that value. Variables stay for \
later cells; a call can be awaited only in the cell that makes it."""


class MontyExecutor:
    """Opens REPLs on a pool of Monty's workers. `key` seals their dumps.

    Two threads at least: one more than workers, for the type check.
    """

    def __init__(self, *, key: bytes, limits: CodeLimits | None = None, workers: int | None = None) -> None:
        if type(key) is not bytes or len(key) < KEY_BYTES:
            raise InvalidDefinition(f"the key is not usable: give {KEY_BYTES} bytes that nobody else knows")
        if workers is not None:
            validate.count(workers, "workers", 1, InvalidDefinition)
        self._limits = limits or CodeLimits()
        self.key = key
        self._most = workers or max(2, os.cpu_count() or 2)
        self.places: Places[MontyRepl] = Places(self._most, PARK_AFTER)
        self._catalogues = Catalogues()
        self._threads = Threads("perdure-code", idle_seconds=None, most=self._most + 1)
        self._pool: monty.Monty | None = None
        self._program: MontyProgram | None = None
        self._starting: asyncio.Task[monty.Monty] | None = None
        self._checker = TypeChecker()
        self._checking = asyncio.Lock()
        self._repls: set[MontyRepl] = set()

    @property
    def name(self) -> str:
        return NAME

    @property
    def limits(self) -> CodeLimits:
        return self._limits

    @property
    def saves(self) -> bool:
        return True

    def binds(self, code: str) -> tuple[str, ...]:
        return read_cell(code, ()).binds

    @property
    def workers(self) -> int:
        """How many workers are taken now."""
        return self.places.taken

    def describe(self, tools: Sequence[ToolSpec], output_schema: dict[str, Any] | None = None) -> str:
        return f"{SUPPORTS}\n\n```python\n{shown(self.functions(tools), output_schema)}\n```"

    def fault(self, tools: Sequence[ToolSpec]) -> str | None:
        return self.functions(tools).fault

    def functions(self, tools: Sequence[ToolSpec]) -> Functions:
        return self._catalogues.functions(tools)

    async def open(self, state: bytes | None = None, tools: Sequence[ToolSpec] = ()) -> MontyRepl:
        self.places.check_open()
        if state is None:
            repl = MontyRepl(self, None, Functions(()))
        else:
            small = len(state) <= SMALL
            dump = fitting(
                unseal(state, self.key) if small else await self.in_thread(unseal, state, self.key),
                executor=NAME,
                version=blocking.VERSION,
                policy=blocking.POLICY,
                limits=self._limits,
            )
            repl = MontyRepl(self, dump, self.functions(tools))
        self._repls.add(repl)
        return repl

    async def aclose(self) -> None:
        """Give up every REPL, and end every worker and thread."""
        self.places.close()
        for repl in tuple(self._repls):
            await repl.close()
        await self.places.wait_left()
        if self._starting is not None:
            await asyncio.wait([self._starting])
        async with self._checking:
            await self.in_thread(self._checker.close)
        if self._pool is not None:
            await self.in_thread(self._pool.__exit__, None, None, None)
        if self._program is not None:
            self._program.close()
        self._threads.close()
        self._threads.join()

    # ------------------------------------------------------------------ threads and workers

    def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        return self._threads.run(functools.partial(function, *args, **kwargs))

    async def take(self, seed: str, functions: Functions) -> MontyWorker:
        """A worker, when one is free; its process is had on a thread. It is given back with `give`."""
        await self.places.take()
        try:
            return MontyWorker(self._pool or await self._started(), self._limits, seed, functions)
        except BaseException:  # a cancel as well: without a worker there is nothing that gives the slot back
            self.places.release()
            raise

    async def give(self, worker: MontyWorker) -> None:
        try:
            await to_its_end(self.in_thread(worker.close))
        finally:
            self.places.release()

    async def _started(self) -> monty.Monty:
        """The pool, started once; a caller that is cancelled does not stop the start for the others."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> monty.Monty:
        program = self._program = await self.in_thread(MontyProgram)
        pool = monty.Monty(
            binary_path=program.path,
            min_processes=1,
            max_processes=self._most,
            request_timeout=self._limits.seconds + 10,
        )
        await self.in_thread(pool.__enter__)
        self._pool = pool
        return pool

    def closed(self, repl: MontyRepl) -> None:
        self.places.goes_on(repl)
        self._repls.discard(repl)

    # ------------------------------------------------------------------ type check

    async def check(self, code: str, functions: Functions, mentions: frozenset[str], names: Sequence[str]) -> Any:
        """Diagnostics of a cell; None where the checker gave up on it."""
        async with self._checking:
            try:
                return await to_its_end(self.in_thread(self._checker.check, code, functions, mentions, names))
            except (monty.MontyError, OSError):
                return None


class MontyRepl:
    """The REPL of one session.

    Mutable state, owned by the event loop: `_variables` is what is kept between cells (None: nothing yet); `_cell` the
    cell that runs; `_worker` where it does; `_frozen` the bytes of its interpreter as of its last pause, if they were
    made. `_lock` is held by whoever uses the worker. `_dumped`: the last pause was dumped by our caller, or there was
    none yet; then those bytes are made in the step that leads to the next one, unless they were large.
    """

    def __init__(self, executor: MontyExecutor, dump: SealedDump | None, functions: Functions) -> None:
        self._executor = executor
        self._lock = asyncio.Lock()
        self._worker: MontyWorker | None = None
        self._cell: MontyCell | None = None
        self._frozen: bytes | None = None
        self._variables = dump.base if dump else None
        self._contains = dump.header.contains if dump else ""
        self._names = dump.header.names if dump else ()
        self._seed = dump.header.seed if dump else ""
        self._feeds = dump.header.feeds if dump else 0
        self._catalogue = dump.header.catalogue if dump else ""
        self._binds: tuple[str, ...] = ()
        self._dumped = True
        if dump is not None and dump.header.cell is not None:
            self._revive(dump, dump.header.cell, functions)

    def _revive(self, dump: SealedDump, state: CellState, functions: Functions) -> None:
        read = read_cell(state.code, functions.asynchronous.difference(self._names))
        self._binds = read.binds
        self._cell = MontyCell(functions, self._executor.limits, state, dump.header.cell_feeds, self._keepers(read))
        if state.end is not None:
            self._cell.ended(state.end, dump.cell or None)
        else:
            self._frozen = dump.cell

    @property
    def contains(self) -> str:
        return self._contains

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    @property
    def size(self) -> int:
        return len(self._variables or b"")

    @property
    def paused(self) -> Paused | None:
        return None if self._cell is None else Paused(tuple(self._cell.calls.values()))

    # ------------------------------------------------------------------ a cell

    async def begin(self, code: str, tools: Sequence[ToolSpec], *, at: int, seed: str, check: bool = True) -> CodeStep:
        if self._cell is not None:
            raise InternalError("a cell is begun while another one runs")
        if why := oversize(code):
            return CellEnd(error=CodeError("check", why, rolled_back=True))
        functions = self._executor.functions(tools)
        asynchronous = functions.asynchronous.difference(self._names)  # a variable hides the tool of its name
        read = read_cell(code, asynchronous)
        notes: tuple[str, ...] = ()
        if check:
            found = await self._executor.check(code, functions, read.mentions, self._names)
            known = {*functions.asynchronous, *self._names, *read.binds}
            verdict = judge(read, found or (), asynchronous, known)
            if verdict.refused:
                error = CodeError("check", verdict.refused, line=verdict.line, rolled_back=True)
                return CellEnd(error=error, notes=verdict.notes)
            notes = verdict.notes if found is not None else ("The types of this cell could not be checked.",)
        self._catalogue = functions.print
        self._seed = self._seed or seed
        self._binds = read.binds
        state = CellState(code=code, at=at, seed=seed, notes=notes)
        cell = self._cell = MontyCell(functions, self._executor.limits, state, self._feeds, self._keepers(read))
        async with self._lock:
            return await self._step(cell, cell.begin, self._variables)

    def _keepers(self, read: CellCode) -> tuple[str, ...]:
        return (*read.binds, *sorted(read.mentions.intersection(self._names))) if read.keeps else ()

    async def resume(self, answer: CodeAnswer, *, at: int = 0) -> CodeStep:
        cell = self._cell
        if cell is None or answer.call not in cell.calls:
            raise InternalError(f"call {answer.call} of a cell is answered, and waits for no answer")
        self._executor.places.goes_on(self)
        async with self._lock:
            cell.at = max(cell.at, at)
            if not cell.awaited(answer.call):
                cell.forget(answer.call)
                if cell.end is not None and not cell.calls:
                    return self._ended(cell)
                if cell.end is None and self._worker is not None:
                    self._executor.places.rests(self)
                return Paused()
            frozen, self._frozen = self._frozen, None
            if frozen == b"" or (self._worker is None and frozen is None):  # it died before it could be saved
                self._cell = None
                await self._give_back()
                return CellEnd(error=blocking.LOST, notes=cell.notes)
            return await self._step(cell, cell.resume, None if self._worker is not None else frozen, answer)

    async def _step(self, cell: MontyCell, step: Callable[..., CodeStep], *args: Any) -> CodeStep:
        """Run the interpreter until it stops. A cancel kills the worker: nothing else ends code that does not wait."""
        if self._worker is None:
            self._worker = await self._executor.take(self._seed, cell.functions)
        worker = self._worker
        cell.save, self._dumped = self._dumped, False
        running = self._executor.in_thread(step, worker, *args)
        try:
            done = await asyncio.shield(running)
        except BaseException:  # a cancel: nobody waits for the step any more, and the thread must come back
            worker.kill()
            await asyncio.wait([running])
            await self._give_back()
            raise
        if cell.end is not None:
            self._worker = None
            self._executor.places.release()
            return self._ended(cell) if not cell.calls else done
        self._frozen = cell.saved
        self._executor.places.rests(self)
        return done

    def _ended(self, cell: MontyCell) -> CellEnd:
        end, self._cell, self._frozen = cell.end, None, None
        assert end is not None
        if cell.variables is not None:
            self._variables, self._feeds = cell.variables, cell.feeds
            self._names = tuple(dict.fromkeys((*self._names, *self._binds)))
        return end

    async def rollback(self) -> None:
        self._executor.places.goes_on(self)
        async with self._lock:
            self._cell = self._frozen = None
            await self._give_back()

    async def _give_back(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await self._executor.give(worker)

    # ------------------------------------------------------------------ states

    async def leave(self) -> None:
        """Turn a cell that waits into bytes, and give its worker back."""
        async with self._lock:
            worker, cell = self._worker, self._cell
            if worker is None or cell is None or cell.end is not None:
                return
            await self._freeze(worker)
            await self._give_back()

    async def _freeze(self, worker: MontyWorker) -> bytes:
        frozen = self._frozen
        if frozen is None:
            try:
                frozen = await to_its_end(self._executor.in_thread(worker.dump))
            except monty.MontyError:  # it died while the cell waited: the next step finds nothing to load
                frozen = b""
            self._frozen = frozen
        return frozen

    async def dump(self, contains: str) -> bytes:
        async with self._lock:
            cell, saved = self._cell, b""
            if cell is not None:
                saved = (cell.variables or b"") if cell.end is not None else await self._frozen_now()
                self._dumped = len(saved) <= SMALL
            header = DumpHeader(
                contains=contains,
                executor=NAME,
                version=blocking.VERSION,
                policy=blocking.POLICY,
                limits=self._executor.limits,
                catalogue=self._catalogue,
                names=self._names,
                seed=self._seed,
                feeds=self._feeds,
                base=-1 if self._variables is None else len(self._variables),
                cell=None if cell is None else cell.state(),
                cell_feeds=0 if cell is None else cell.feeds,
            )
            dump, key = SealedDump(header, self._variables, saved), self._executor.key
            if len(saved) + max(header.base, 0) <= SMALL:
                return seal(dump, key)
            return await to_its_end(self._executor.in_thread(seal, dump, key))

    async def _frozen_now(self) -> bytes:
        frozen = self._frozen if self._worker is None else await self._freeze(self._worker)
        if not frozen:
            raise DumpRefused("the worker that ran the cell died")
        return frozen

    async def variables(self) -> list[Variable]:
        if self._variables is None or not self._names:
            return []
        worker = await self._executor.take(self._seed, Functions(()))
        try:
            return await to_its_end(
                self._executor.in_thread(blocking.list_variables, worker, self._variables, self._names)
            )
        finally:
            await self._executor.give(worker)

    async def close(self) -> None:
        self._executor.closed(self)
        await self.rollback()
