"""The executor over CPython: the whole language and its standard library, in the sandbox of commands.

An interpreter cannot be saved, so what is kept of a REPL are its cells and the answers that they got. Its process is a
cache of that: it is begun when a cell runs, kept while the REPL rests (a cell waits, or none runs) for `KEEP_FOR`, or
until another REPL wants a place, and then ended. Whatever needs it later runs the cells again against their answers in
a new one. So a rollback is the end of a process, a process that dies costs time, and what a cell has done outside
stands in its records alone.

    begin ── check ── place ── [run_again] ── Cell.begin ──▶ Paused ── (rests) ── [run_again] ── Cell.resume ──▶ …

The event loop owns every state here; threads run one blocking function each on a worker that a REPL holds.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, ParamSpec, TypeVar

from perdure.codemode import pipe
from perdure.codemode.check import judge, oversize, read_cell
from perdure.codemode.pipe import CPythonCell, CPythonWorker, Kept, run_again
from perdure.codemode.places import Catalogues, Places, to_its_end
from perdure.codemode.stubs import Functions, shown
from perdure.errors import (
    CommandsUnavailable,
    DumpRefused,
    InternalError,
    InvalidCommand,
    InvalidDefinition,
    SandboxUnavailable,
    quoted,
)
from perdure.model import validate
from perdure.model.code import CellEnd, CodeAnswer, CodeError, CodeLimits, CodeStep, CPython, Paused, Variable
from perdure.model.tool import ToolSpec
from perdure.ports.bound import BoundCommands
from perdure.tools.invoke import Threads

NAME: Final = "cpython"
KEEP_FOR = 60.0
"""Seconds that a REPL which rests may keep its process."""

P = ParamSpec("P")
T = TypeVar("T")

SUPPORTS = """\
The code runs in CPython {version}, with the whole language and its standard library, in a sandbox: no network, no \
environment variables, no threads and no processes, and no files but those of Python itself.{packages}
The functions below are asynchronous: a call goes out when it is made, and its result is awaited. Use `await f()`, \
several at once with `await asyncio.gather(a(), b())`, `asyncio.create_task()` or `asyncio.TaskGroup`, or \
`await settle(a(), b())`, which returns an exception in place of a result where one fails. They may be given to map(), \
as in `await asyncio.gather(*map(f, rows))`; where a result is needed at once, in sorted(key=…) or a dunder method, \
nothing can be awaited: get the results first. Arguments and results are plain data: None, bool, int, float, str, \
list, dict.
The clock stands still between two results, and timeouts are noticed when one comes. `await sleep(seconds)` waits, for \
days if need be. `finish(value)` ends your work with that value. Variables stay for later cells; a call can be awaited \
only in the cell that makes it."""


def check_cpython(given: object) -> CPython:
    """What an agent says about CPython, with its folders resolved. Raises InvalidDefinition or SandboxUnavailable."""
    if not isinstance(given, CPython):
        raise InvalidDefinition(f"code={quoted(given):.200} is not usable: give CPython(…)")
    validate.flag(given.unsandboxed, "unsandboxed", InvalidDefinition)
    if not isinstance(given.limits, CodeLimits):
        raise InvalidDefinition(f"limits={quoted(given.limits):.200} is not usable: give CodeLimits(…)")
    folders = []
    for path in validate.several(given.packages, "packages", InvalidDefinition):
        if not isinstance(path, str | os.PathLike) or not os.path.isabs(path) or not os.path.isdir(path):
            raise InvalidDefinition(f"packages: {quoted(path):.200} is no folder: give absolute paths of folders")
        folders.append(os.path.realpath(path))
    if sys.platform != "linux":
        raise SandboxUnavailable(
            "CPython runs the code of a model as a command, which is a matter of Linux: leave `code` out"
        )
    return CPython(tuple(folders), given.limits, given.unsandboxed)


class CPythonExecutor:
    """Opens REPLs, each with a CPython of its own while it works. `check` says whether this machine can confine one."""

    def __init__(self, commands: BoundCommands, chosen: CPython | None = None, *, workers: int | None = None) -> None:
        chosen = CPython() if chosen is None else chosen
        self._commands, self._limits, self._packages = commands, chosen.limits, chosen.packages
        self._command = pipe.command_of(chosen)
        self._checker = _checker()
        most = workers or max(2, os.cpu_count() or 2)
        self.places: Places[CPythonRepl] = Places(most, KEEP_FOR)
        self._catalogues = Catalogues()
        self._threads = Threads("perdure-code", idle_seconds=None, most=most + 1)
        self._checking = asyncio.Lock()
        self._repls: set[CPythonRepl] = set()

    async def check(self) -> None:
        """Raises SandboxUnavailable where this machine cannot confine it, after a self-test."""
        await self._commands.check(self._command)
        await self._commands.end_leftovers()  # their processes died with their Runtime, their folders did not

    @property
    def name(self) -> str:
        return NAME

    @property
    def limits(self) -> CodeLimits:
        return self._limits

    @property
    def saves(self) -> bool:
        return False

    @property
    def workers(self) -> int:
        """How many places are taken now."""
        return self.places.taken

    @property
    def taken(self) -> list[CPythonWorker]:
        """The processes that REPLs have now."""
        return [repl.worker for repl in self._repls if repl.worker is not None]

    def binds(self, code: str) -> tuple[str, ...]:
        return read_cell(code, ()).binds

    def describe(self, tools: Sequence[ToolSpec], output_schema: dict[str, Any] | None = None) -> str:
        version = ".".join(map(str, sys.version_info[:2]))
        installed = " More packages are installed: import what you need." if self._packages else ""
        text = SUPPORTS.format(version=version, packages=installed)
        return f"{text}\n\n```python\n{shown(self.functions(tools), output_schema)}\n```"

    def fault(self, tools: Sequence[ToolSpec]) -> str | None:
        return self.functions(tools).fault

    def functions(self, tools: Sequence[ToolSpec]) -> Functions:
        return self._catalogues.functions(tools)

    async def open(self, state: bytes | None = None, tools: Sequence[ToolSpec] = ()) -> CPythonRepl:
        self.places.check_open()
        if state is not None:
            raise DumpRefused("CPython cannot be saved: its cells are run again")
        repl = CPythonRepl(self)
        self._repls.add(repl)
        return repl

    async def aclose(self) -> None:
        """Give up every REPL, and end every process and thread."""
        self.places.close()
        for repl in tuple(self._repls):
            await repl.close()
        await self.places.wait_left()
        async with self._checking:
            if self._checker is not None:
                await self.in_thread(self._checker.close)
        self._threads.close()
        self._threads.join()

    # ------------------------------------------------------------------ threads and places

    def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        return self._threads.run(functools.partial(function, *args, **kwargs))

    async def take(self) -> CPythonWorker:
        """A process in a place of its own, when there is one. It is given back with `give`. Raises Ended where none
        can be begun."""
        await self.places.take()
        try:
            return await self._begin()
        except BaseException as error:  # a cancel as well: nothing else gives back the place
            self.places.release()
            if isinstance(error, InvalidCommand | CommandsUnavailable):
                raise pipe.CellDropped(pipe.lost(f"could not be begun: {error}")) from None
            raise

    async def _begin(self) -> CPythonWorker:
        starting = asyncio.ensure_future(self._commands.start("code", self._command, {}))
        worker = CPythonWorker(await to_its_end(starting, lambda: CPythonWorker(starting.result()).end()))
        try:
            await to_its_end(self.in_thread(worker.wait_ready))
        except BaseException as error:  # a cancel as well: nobody else knows of the process
            worker.kill()
            said = await worker.complaints() if isinstance(error, pipe.CellDropped) else ""
            await worker.end()
            if said:
                raise pipe.CellDropped(pipe.lost(f"could not be begun: {said.splitlines()[-1]}")) from None
            raise
        return worker

    async def give(self, worker: CPythonWorker) -> None:
        try:
            await worker.end()
        finally:
            self.places.release()

    def closed(self, repl: CPythonRepl) -> None:
        self.places.goes_on(repl)
        self._repls.discard(repl)

    # ------------------------------------------------------------------ type check

    async def diagnose(self, code: str, functions: Functions, mentions: frozenset[str], names: Sequence[str]) -> Any:
        """Diagnostics of a cell, without what is said of modules: the checker knows those that Monty has. None where
        there is no checker, or where it gave up."""
        if self._checker is None:
            return ()
        async with self._checking:
            found = await to_its_end(self.in_thread(_checked, self._checker, code, functions, mentions, names))
        return [each for each in found if each.rule != "unresolved-import" and not each.message.startswith("Module `")]


def _checker() -> Any:
    """Monty's type checker, if it is installed. Without it names and arguments are checked when a cell gets there."""
    try:
        from perdure.codemode.worker import TypeChecker  # noqa: PLC0415  # an extra, which is not needed to run
    except ImportError:
        return None
    return TypeChecker()


def _checked(checker: Any, *args: Any) -> Any:
    import pydantic_monty as monty  # noqa: PLC0415  # there is no checker without it

    try:
        return checker.check(*args)
    except (monty.MontyError, OSError):
        return ()


class CPythonRepl:
    """The REPL of one session.

    Mutable state, owned by the event loop: `_cells` are those whose variables it has; `_cell` the one that runs;
    `worker` a process in which all of them have run as far as they have, or None. `_lock` is held by whoever uses the
    worker.
    """

    def __init__(self, executor: CPythonExecutor) -> None:
        self._executor = executor
        self._lock = asyncio.Lock()
        self.worker: CPythonWorker | None = None
        self._cell: CPythonCell | None = None
        self._cells: list[Kept] = []
        self._variables: list[Variable] = []
        self._names: tuple[str, ...] = ()
        self._binds: tuple[str, ...] = ()

    @property
    def contains(self) -> str:
        return ""

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    @property
    def size(self) -> int:
        return sum([each.size for each in self._cells])

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
            found = await self._executor.diagnose(code, functions, read.mentions, self._names)
            verdict = judge(read, found, asynchronous, {*functions.asynchronous, *self._names, *read.binds})
            notes = verdict.notes
            if verdict.refused:
                error = CodeError("check", verdict.refused, line=verdict.line, rolled_back=True)
                return CellEnd(error=error, notes=notes)
        self._binds = read.binds
        cell = self._cell = CPythonCell(code, functions, self._executor.limits, at, seed)
        cell.notes = notes
        self._executor.places.goes_on(self)
        async with self._lock:
            return await self._step(cell, cell.begin, waits=False)

    async def resume(self, answer: CodeAnswer, *, at: int = 0) -> CodeStep:
        cell = self._cell
        if cell is None or answer.call not in cell.calls:
            raise InternalError(f"call {answer.call} of a cell is answered, and waits for no answer")
        self._executor.places.goes_on(self)
        async with self._lock:
            cell.at = max(cell.at, at)
            if cell.end is None:
                return await self._step(cell, cell.resume, answer, waits=True)
            del cell.calls[answer.call]
            if self.worker is not None:
                self._executor.places.rests(self)
            return Paused() if cell.calls else self._ended(cell)

    async def _step(self, cell: CPythonCell, step: Callable[..., CodeStep], *args: Any, waits: bool) -> CodeStep:
        """Let the cell run on. A cancel kills the process: nothing else ends code that does not wait."""
        if self.worker is None:
            why = await self._begin_again([*self._cells, cell.kept()] if waits else self._cells, waits)
            if why:
                cell.over(CellEnd(error=CodeError("lost", f"The cell could not be run: {why}", rolled_back=True)))
                return self._ended(cell)
        worker = self.worker
        assert worker is not None
        done = await self._on_worker(worker, step, worker, *args)
        end = cell.end
        if end is None or (end.error is None or not end.error.rolled_back or end.error.code == "syntax"):
            self._executor.places.rests(self)
        else:
            await self._give_back()
        return self._ended(cell) if end is not None and not cell.calls else done

    async def _begin_again(self, cells: Sequence[Kept], waits: bool) -> str:
        """Have a process that is where the one before was. Says why there is none; "" where there is."""
        try:
            worker = self.worker = await self._executor.take()
        except pipe.CellDropped as ended:
            return ended.error.message
        if not cells:
            return ""
        why = await self._on_worker(worker, run_again, worker, cells, self._executor.limits, waits=waits)
        if why:
            await self._give_back()
        return why

    async def _on_worker(self, worker: CPythonWorker, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        running = self._executor.in_thread(function, *args, **kwargs)
        try:
            return await asyncio.shield(running)
        except BaseException:  # a cancel: nobody waits for the step any more, and the thread must come back
            worker.kill()
            await asyncio.wait([running])
            await self._give_back()
            raise

    def _ended(self, cell: CPythonCell) -> CellEnd:
        end, self._cell = cell.end, None
        assert end is not None
        if cell.keep:
            self._cells.append(cell.kept())
            self._variables = cell.variables
            self._names = tuple(dict.fromkeys((*self._names, *self._binds)))
        return end

    async def rollback(self) -> None:
        self._executor.places.goes_on(self)
        async with self._lock:
            running, self._cell = self._cell is not None, None
            if running:
                await self._give_back()
            elif self.worker is not None:
                self._executor.places.rests(self)

    async def leave(self) -> None:
        """Give up the process; the next step has a new one."""
        async with self._lock:
            await self._give_back()

    async def _give_back(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            await self._executor.give(worker)

    # ------------------------------------------------------------------ state

    async def variables(self) -> list[Variable]:
        return list(self._variables)

    async def dump(self, contains: str) -> bytes:
        raise DumpRefused("CPython cannot be saved: its cells are run again")

    async def close(self) -> None:
        self._executor.closed(self)
        async with self._lock:
            self._cell = None
            await self._give_back()
