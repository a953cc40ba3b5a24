"""Workers are few, and a REPL holds one only while its cell runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pydantic_monty
import pytest

from perdure.codemode import monty as module
from perdure.codemode.dumps import CellState
from perdure.codemode.stubs import Functions
from perdure.codemode.worker import LOST, MontyCell, MontyWorker
from perdure.errors import DumpRefused, InvalidDefinition, RuntimeClosed
from perdure.model.code import CellEnd, CodeLimits, Given, Paused
from tests.codemode.kit import AT, TOOLS, executing, run
from tests.kit import SOON, until


async def test_an_idle_session_holds_no_worker_and_little_memory() -> None:
    async with executing() as executor:
        repls = [await executor.open() for _ in range(30)]
        for repl in repls:
            await run(repl, "x = [1, 2, 3]\nname = await search('tea')")

        assert executor.workers == 0
        assert len(await repls[0].dump("")) < 8 * 1024


async def test_a_cell_that_waits_gives_its_worker_back() -> None:
    async with executing() as executor:
        repl = await executor.open()
        await repl.begin("x = 1\ny = await search('a')\n(x, y)", TOOLS, at=AT, seed="s")
        await until(lambda: executor.workers == 0)

        assert await repl.resume(Given(0, "tea")) == CellEnd(value="(1, 'tea')")
        assert executor.workers == 0


async def test_cells_that_wait_for_cells_get_on_with_one_worker() -> None:
    """Each cell waits for the one inside it, deeper than there are workers."""
    async with executing(workers=1) as executor:

        async def nested(depth: int) -> str:
            repl = await executor.open()
            step = await repl.begin("x = await search('a')\nx + '!'", TOOLS, at=AT, seed="s")
            assert isinstance(step, Paused)
            inner = await nested(depth - 1) if depth else "tea"
            end = await repl.resume(Given(0, inner))
            await repl.close()
            assert isinstance(end, CellEnd)
            return str(end.value).strip("'\"")

        async with asyncio.timeout(SOON):
            assert await asyncio.gather(*map(nested, (4, 3, 2))) == ["tea!!!!!", "tea!!!!", "tea!!!"]


async def test_more_cells_than_workers_run_one_after_the_other() -> None:
    async with executing(workers=2) as executor:
        repls = [await executor.open() for _ in range(12)]
        ran = await asyncio.gather(
            *[run(repl, f"y = await search('a')\nsum(range(10_000)) + {n}") for n, repl in enumerate(repls)]
        )

        assert [each.end.value for each in ran] == [str(49_995_000 + n) for n in range(12)]
        assert executor.workers == 0


async def test_a_caller_that_gives_up_waiting_for_a_worker_leaves_it_to_the_next() -> None:
    async with executing(workers=1) as executor:
        busy, waits, third = [await executor.open() for _ in range(3)]
        running = asyncio.create_task(busy.begin("while True:\n    pass", TOOLS, at=AT, seed="s", check=False))
        await until(lambda: executor.workers == 1)
        waiting = asyncio.create_task(waits.begin("1", TOOLS, at=AT, seed="s", check=False))
        following = asyncio.create_task(third.begin("3", TOOLS, at=AT, seed="s", check=False))
        await asyncio.sleep(0)
        waiting.cancel()
        running.cancel()
        await asyncio.wait([waiting, running])

        assert await following == CellEnd(value="3")
        await waits.rollback()
        await busy.rollback()
        assert (await run(waits, "1")).end.value == "1"
        assert executor.workers == 0


def _children() -> set[int]:
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
    return found


async def test_a_worker_that_is_killed_costs_its_cell_and_no_other() -> None:
    others = _children()
    async with executing(workers=1) as executor:
        repl = await executor.open()
        await run(repl, "x = 1")
        step = await repl.begin("x = 2\nawait search('a')", TOOLS, at=AT, seed="s")
        assert isinstance(step, Paused)
        for pid in _children() - others:
            os.kill(pid, signal.SIGKILL)
        end = await repl.resume(Given(0, 1))

        assert isinstance(end, CellEnd)
        assert end.error is not None
        assert (end.error.code, end.error.rolled_back) == ("lost", True)
        assert (await run(repl, "x", check=False)).end.value == "1"
        assert (await run(repl, "x")).end.value == "1"  # the checker's worker was killed as well


async def test_a_worker_that_dies_before_its_cell_is_saved_loses_the_cell_and_no_variable() -> None:
    """Who saves the cell is the first to notice, and Monty has taken the worker back by the next step."""
    async with executing() as executor:
        repl = await executor.open()
        await run(repl, "x = 1")
        large = "big = 'x' * 400_000\nfor n in range(3):\n    await search('a')"  # is not saved in its steps
        await repl.begin(large, TOOLS, at=AT, seed="s")
        await repl.dump("first")
        await repl.resume(Given(0, 1))
        assert repl._worker is not None
        repl._worker.kill()
        with pytest.raises(DumpRefused):
            await repl.dump("second")
        end = await repl.resume(Given(1, 1))
        later = await run(repl, "x")

    assert isinstance(end, CellEnd)
    assert end.error is not None
    assert end.error.code == "lost"
    assert later.end.value == "1"


class Dying(MontyWorker):
    """Dies when it is asked for the variables that a cell has left."""

    def dump(self) -> bytes:
        self.kill()
        return super().dump()


@pytest.mark.parametrize("code", ["1", "x = 1\n1 / 0", "calls = [search('a')]\nawait calls[0]"])
def test_a_worker_that_dies_while_variables_are_saved_loses_the_cell(code: str) -> None:
    functions, limits = Functions(TOOLS), CodeLimits()
    cell = MontyCell(functions, limits, CellState(code, AT, "s"), 0, ("calls",))
    with pydantic_monty.Monty(min_processes=1) as pool:
        worker = Dying(pool, limits, "s", functions)
        step = cell.begin(worker, None)
        if isinstance(step, Paused):
            step = cell.resume(worker, None, Given(0, "tea"))

    assert step == CellEnd(error=LOST)
    assert cell.variables is None


async def test_a_worker_has_limits_of_the_os() -> None:
    others = _children()
    async with executing(workers=1) as executor:
        repl = await executor.open()
        await repl.begin("await search('a')", TOOLS, at=AT, seed="s", check=False)
        limits = [Path(f"/proc/{pid}/limits").read_text() for pid in _children() - others]
        environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in _children() - others]

        assert any("Max file size             0                    0" in text for text in limits)
        assert any("Max core file size        0                    0" in text for text in limits)
        assert any("Max address space         1342177280           1342177280" in text for text in limits)
        assert set(environments) == {b""}  # a worker sees no keys of its host


async def test_a_cancelled_check_leaves_the_checker_to_the_next() -> None:
    async with executing() as executor:
        for _ in range(5):
            repl = await executor.open()
            checked = asyncio.create_task(repl.begin("x = 1\n" * 2000 + "serch('a')", TOOLS, at=AT, seed="s"))
            await asyncio.sleep(0)
            checked.cancel()
            await asyncio.wait([checked])
        ran = await run(await executor.open(), "serch('a')")

        assert ran.end.error is not None
        assert ran.end.error.code == "check"


async def test_closing_ends_every_worker_and_thread() -> None:
    others = _children()
    async with executing() as executor:
        await run(await executor.open(), "1")
        waits = await executor.open()
        await waits.begin("await search('a')", TOOLS, at=AT, seed="s")
        assert _children() - others

    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("perdure-code")] == []
    assert _children() - others == set()
    with pytest.raises(RuntimeClosed):
        await executor.open()


async def test_closing_ends_who_waits_for_a_worker() -> None:
    async with executing(workers=1) as executor:
        busy, waits = await executor.open(), await executor.open()
        running = asyncio.create_task(busy.begin("while True:\n    pass", TOOLS, at=AT, seed="s", check=False))
        await until(lambda: executor.workers == 1)
        waiting = asyncio.create_task(waits.begin("1", TOOLS, at=AT, seed="s", check=False))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])

    await asyncio.wait([waiting])
    assert waiting.exception() is None or isinstance(waiting.exception(), RuntimeClosed)


def test_the_core_imports_nothing_of_the_sandbox() -> None:
    code = "import perdure, sys, perdure.codemode; sys.exit('pydantic_monty' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_code_mode_without_its_extra_says_what_to_install() -> None:
    code = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "pydantic_monty":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from perdure.errors import MissingExtra
try:
    import perdure.codemode.monty
except MissingExtra as error:
    assert str(error) == (
        "code mode needs packages that are not installed: run `pip install -e '.[code]'` in Perdure's folder"
    ), error
else:
    sys.exit("imported")
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert module.PARK_AFTER == 0.1


HOST = """
import asyncio, os, pathlib
from perdure.codemode.monty import MontyExecutor
from perdure.model.code import CodeLimits

async def main():
    executor = MontyExecutor(key=bytes(32), workers=1, limits=CodeLimits(seconds=3600))
    repl = await executor.open()
    running = asyncio.create_task(repl.begin("while True:\\n    pass", [], at=1, seed="s", check=False))
    found = []
    while not found or not executor.workers:
        await asyncio.sleep(0.01)
        tasks = pathlib.Path("/proc/self/task").iterdir()
        found = [pid for task in tasks for pid in (task / "children").read_text().split()]
    print(*found, flush=True)
    await running

asyncio.run(main())
"""


@pytest.mark.kill
async def test_a_worker_ends_with_a_host_that_is_killed() -> None:
    """Its cell never stops, and would run for an hour: the kernel kills it with the thread that started it."""
    if sys.platform != "linux" or shutil.which("setpriv") is None:
        pytest.skip("nothing here tells a worker that its host is gone")
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    workers = [int(pid) for pid in (await asyncio.to_thread(host.stdout.readline)).split()]
    host.kill()
    host.wait()
    host.stdout.close()

    assert workers
    await until(lambda: not any(map(_runs, workers)))


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("workers", [0, -1, "2", True])
def test_a_pool_of_no_workers_is_refused(workers: Any) -> None:
    with pytest.raises(InvalidDefinition, match="workers="):
        module.MontyExecutor(key=bytes(32), workers=workers)
