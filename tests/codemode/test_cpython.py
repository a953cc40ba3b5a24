"""CPython's own: processes that are a cache of cells, code that speaks for its driver, and the whole language."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from perdure.codemode.cpython import CPythonExecutor, check_cpython
from perdure.commands.bound import PipedCommands
from perdure.commands.engine import CommandEngine
from perdure.commands.sandbox import IMPLEMENTATIONS, Sandbox
from perdure.errors import CommandsUnavailable, DumpRefused, InvalidDefinition, RuntimeClosed
from perdure.model.code import CellEnd, CodeLimits, CPython, Given, Paused
from perdure.model.command import Command, CommandSettings
from perdure.model.sandbox import Implementation
from perdure.ports.bound import BoundCommand
from perdure.ports.code import Repl
from perdure.stores import open_store
from tests.codemode.kit import AT, TOOLS, cpython, run
from tests.codemode.programs import PROGRAMS, answer, chosen
from tests.codemode.programs import TOOLS as PROGRAM_TOOLS
from tests.commands.conftest import require
from tests.kit import SOON


@pytest.fixture(scope="module")
async def executor() -> AsyncIterator[CPythonExecutor]:
    async with cpython(limits=CodeLimits(seconds=20.0)) as executor:
        yield executor


@pytest.fixture
async def repl(executor: CPythonExecutor) -> AsyncIterator[Repl]:
    repl = await executor.open()
    yield repl
    await repl.close()


# Processes come and go


async def test_variables_are_made_again_in_a_new_process_without_a_call_or_a_print() -> None:
    async with cpython(workers=1) as executor:
        one, other = await executor.open(), await executor.open()
        code = (
            "import random, time\nx = await search('a')\ny = [random.random(), time.time(), {'b', 'c', 'd'}]\nprint(y)"
        )
        first = await run(one, code)
        await run(other, "x = 'other'")
        again = await run(one, "print(x, y)")

        assert first.printed in again.printed.replace("search0 ", "")
        assert again.calls == []
        assert (await run(other, "x")).end.value == "'other'"


async def test_a_cell_that_waits_goes_on_in_a_new_process() -> None:
    async with cpython(workers=1) as executor:
        one, other = await executor.open(), await executor.open()
        await run(one, "kept = [1]")
        await one.begin(
            "print('once')\nfor n in range(3):\n    kept.append(await search(str(n)))\nkept", TOOLS, at=AT, seed="s"
        )
        second = await one.resume(Given(0, "tea"), at=AT + 5)
        await run(other, "1")
        third = await one.resume(Given(1, "milk"))

        assert (second.printed, third.printed) == ("", "")
        assert isinstance(third, Paused)
        assert [call.number for call in third.calls] == [2]
        assert await one.resume(Given(2, "sugar")) == CellEnd(value="[1, 'tea', 'milk', 'sugar']")


async def test_cells_that_wait_for_cells_get_on_with_one_place() -> None:
    async with cpython(workers=1) as executor:

        async def nested(depth: int) -> str:
            repl = await executor.open()
            step = await repl.begin("x = await search('a')\nx + '!'", TOOLS, at=AT, seed="s", check=False)
            assert isinstance(step, Paused)
            end = await repl.resume(Given(0, await nested(depth - 1) if depth else "tea"))
            await repl.close()
            assert isinstance(end, CellEnd)
            return str(end.value).strip("'")

        async with asyncio.timeout(SOON):
            assert tuple(await asyncio.gather(nested(2), nested(1))) == ("tea!!!", "tea!!")
        assert executor.workers == 0


async def test_a_process_that_is_killed_in_mid_cell_loses_the_cell_and_no_variable(
    executor: CPythonExecutor, repl: Repl
) -> None:
    await run(repl, "kept = [await search('a')]")
    await repl.begin("kept.append(2)\nawait search('b')", TOOLS, at=AT, seed="s")
    [worker] = executor.taken
    worker.kill()
    lost = await repl.resume(Given(0, "b"))

    assert isinstance(lost, CellEnd)
    assert lost.error is not None
    assert (lost.error.code, lost.error.rolled_back) == ("lost", True)
    assert (await run(repl, "kept")).end.value == "['search0']"


async def test_a_cell_that_does_something_else_when_it_is_run_again_is_lost_not_mixed_up() -> None:
    async with cpython(workers=1) as executor:
        one, other = await executor.open(), await executor.open()
        await run(one, "x = await search(open('/proc/uptime').read() + open('/proc/stat').read())")
        await run(other, "1")
        ran = await run(one, "x")

        assert ran.end.error is not None
        assert (ran.end.error.code, ran.end.error.rolled_back) == ("lost", True)
        assert "did something else when it was run again" in ran.end.error.message


async def test_all_programs_are_made_again_in_one_process(executor: CPythonExecutor, repl: Repl) -> None:
    for which in PROGRAMS[:40]:
        step = await repl.begin(which.code, PROGRAM_TOOLS, at=AT, seed=str(which.seed), check=False)
        answered = 0
        while isinstance(step, Paused):
            paused = repl.paused
            assert paused is not None
            call = chosen(which.seed, answered, paused.calls)
            answered += 1
            step = await repl.resume(answer(call), at=AT + answered * 1000)
        assert step.error is None, which.code
    before = await run(repl, "(total, words, seen, basket.items, more(0))")
    [worker] = executor.taken
    worker.kill()
    lost = await run(repl, "1")  # its process is gone: the next one is made from all cells
    after = await run(repl, "(total, words, seen, basket.items, more(0))")

    assert lost.end.error is not None
    assert before.end.value is not None
    assert after.end.value == before.end.value


async def test_nothing_is_saved(repl: Repl, executor: CPythonExecutor) -> None:
    assert not executor.saves
    with pytest.raises(DumpRefused):
        await repl.dump("x")
    with pytest.raises(DumpRefused):
        await executor.open(b"x")


class Unavailable:
    """Bound commands of a machine that has no processes left."""

    async def check(self, command: Command) -> None: ...

    async def start(self, label: str, command: Command, values: Mapping[str, str]) -> BoundCommand:
        raise CommandsUnavailable("no process could be begun")

    async def end_leftovers(self) -> int:
        return 0


async def test_a_process_that_cannot_be_begun_is_told_and_leaves_its_place() -> None:
    executor = CPythonExecutor(Unavailable(), workers=1)
    repl = await executor.open()
    for _ in range(2):
        ran = await run(repl, "1")
        assert ran.end.error is not None
        assert (ran.end.error.code, ran.end.error.rolled_back) == ("lost", True)
        assert "no process could be begun" in ran.end.error.message
    assert executor.workers == 0
    await executor.aclose()
    with pytest.raises(RuntimeClosed):
        await executor.open()


# Code that speaks for its driver

DRIVER = "import gc\ndriver = next(each for each in gc.get_objects() if type(each).__name__ == 'Driver')\n"


def forged(message: str) -> str:
    return f"{DRIVER}driver._put({message.encode()!r} + b'\\n')\nwhile True:\n    pass"


CALL = '{"kind":"call","number":0,"path":"search","args":{"query":"a"},"line":1,"sync":false}'


@pytest.mark.parametrize(
    "code",
    [
        forged("garbage"),
        forged("[1, 2]"),
        forged('{"kind":"ready"}'),
        forged('{"kind":"paused"}'),
        forged('{"kind":"print","text":""}'),
        forged('{"kind":"shutdown"}'),
        forged('{"kind":"paused","more":1}'),
        forged(CALL.replace('"number":0', '"number":1')),
        forged(CALL.replace('"number":0', '"number":-1')),
        forged(CALL.replace("search", "os.system")),
        forged(CALL.replace('"sync":false', '"sync":true')),
        forged(CALL.replace('"query":"a"', "")),
        forged(CALL.replace('"query":"a"', '"query":"a","other":1')),
        forged(CALL.replace('"a"', str(2**70))),
        forged(CALL.replace('"a"', "[" * 70 + "]" * 70)),
        forged(CALL.replace("search", "finish").replace("query", "value")),
        forged(CALL.replace("search", "sleep").replace("query", "seconds")),
        forged('{"kind":"end","value":null,"error":{"code":"lost","message":"","kind":"","line":0},"variables":[]}'),
        f"{DRIVER}driver._put(b'x' * 70_000_000)",
        f"{DRIVER}driver._put(b'{{\"kind\"')\nimport os\nos._exit(0)",
        "import os\nos.closerange(3, 100)\nwhile True:\n    pass",
        "import os\nos._exit(0)",
        "import os\nos.abort()",
        "import ctypes\nctypes.string_at(0)",
        "import os, sys\nos.execv('/proc/self/exe', ['python', '-c', 'print(1)'])",
    ],
)
async def test_a_message_that_no_driver_writes_loses_the_cell(repl: Repl, code: str) -> None:
    ran = await run(repl, code, check=False)

    assert ran.calls == []
    assert ran.end.error is not None
    assert (ran.end.error.code, ran.end.error.rolled_back) == ("lost", True)


async def test_a_call_that_code_forges_is_a_call_like_any_other(repl: Repl) -> None:
    """It has the power of the code and no more: it is numbered, checked and recorded as if the code had made it."""
    message = CALL.encode() + b'\n{"kind":"paused"}\n'
    step = await repl.begin(f"{DRIVER}driver._put({message!r})\ndriver.receive()", TOOLS, at=AT, seed="s", check=False)

    assert isinstance(step, Paused)
    assert [(call.number, call.name, call.args) for call in step.calls] == [(0, "search", {"query": "a"})]
    await repl.rollback()


FLOODS = {
    f'{DRIVER}while True:\n    driver._put(b\'{{"kind":"print","text":"tea"}}\\n\')': "output",
    f"{DRIVER}while True:\n    search('a')": "calls",
    "big = []\nwhile True:\n    big.append('x' * 1_000_000)": "memory",
}
SILENCES = [
    f"{DRIVER}driver.receive()",
    f"{DRIVER}driver._put(b'{{')\nwhile True:\n    pass",
    "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 60))\nwhile True:\n    pass",
    "import re\nre.match('(a+)+$', 'a' * 5000 + 'b')",
]


async def test_floods_end_at_the_limits() -> None:
    assert await _reached(CodeLimits(output=10_000, calls=50, memory=64_000_000), list(FLOODS)) == list(FLOODS.values())


async def test_silence_ends_when_the_time_is_over() -> None:
    assert await _reached(CodeLimits(seconds=0.5), SILENCES) == ["time"] * len(SILENCES)


async def _reached(limits: CodeLimits, codes: list[str]) -> list[str]:
    """The limits that these cells reach, each in a REPL of its own."""
    async with cpython(limits=limits, workers=len(codes)) as executor:
        repls = [await executor.open() for _ in codes]
        ran = await asyncio.gather(*[run(repl, code, check=False) for repl, code in zip(repls, codes, strict=True)])
    return [each.end.error.which for each in ran if each.end.error is not None and each.end.error.rolled_back]


# Every sandbox


class Confining:
    """What bound commands need of the engine of commands, with one sandbox to choose from."""

    def __init__(self, engine: CommandEngine, how: Implementation) -> None:
        self._engine, self.store, self.spawner = engine, engine.store, engine.spawner
        self._sandbox = Sandbox(engine.bound_jobs, None, [how])

    def bound_jobs(self) -> Path:
        return self._engine.bound_jobs()

    def environment_of(self, command: Command, values: Mapping[str, str]) -> dict[str, str]:
        return self._engine.environment_of(command, values)

    async def confined(self, command: Command) -> tuple[Command, list[bytes]]:
        assert command.sandbox is not None
        chosen = await asyncio.to_thread(self._sandbox.choose, command.sandbox)
        return replace(command, sandbox=chosen), self._sandbox.rules(chosen)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
async def test_cells_run_in_every_sandbox(how: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    require(how, monkeypatch)
    store = open_store("memory")
    await store.open()
    engine = CommandEngine(store, CommandSettings())
    executor = CPythonExecutor(PipedCommands(Confining(engine, how)), CPython(limits=CodeLimits(memory=50_000_000)))
    repl = await executor.open()
    ran = await run(repl, "x = [await search(word) for word in 'ab']\nx")
    full = await run(repl, "y = 'x' * 60_000_000")
    again = await run(repl, "x")
    await executor.aclose()
    await engine.close()
    await store.close()

    assert ran.end.value == again.end.value == "['search0', 'search1']"
    assert full.end.error is not None
    assert full.end.error.which == "memory"


# The language and its library


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("class Odd(ValueError):\n    pass\ntry:\n    raise Odd('x')\nexcept ValueError as e:\n    e", None),
        ("def f():\n    yield 1\n    yield from [2]\nlist(f())", "[1, 2]"),
        ("import enum\nclass A(enum.Enum):\n    ONE = 1\nA.ONE", "<A.ONE: 1>"),
        ("import asyncio\nt = asyncio.create_task(search('a'))\nawait t", "'search0'"),
        ("import asyncio as a\nasync with a.TaskGroup() as g:\n    t = g.create_task(search('a'))\nt.done()", "True"),
        ("import asyncio\nawait asyncio.gather(*map(search, ['a', 'b']))", "['search0', 'search1']"),
        ("import asyncio\nq = asyncio.Queue()\nasyncio.create_task(q.put(1))\nawait q.get()", "1"),
        ("import asyncio\nawait asyncio.wait_for(search('a'), 5)", "'search0'"),
        ("import statistics, textwrap, zlib\nstatistics.mean([1, 2, 6])", "3"),
        ("import datetime, zoneinfo\nd = datetime.datetime.now()\nisinstance(d, datetime.date), d.date()",
         "(True, datetime.date(2023, 11, 14))"),
        ("import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\nP(1)", "P(x=1)"),
        ("import os\nos.environ.get('HOME'), os.getpid()", "(None, 2)"),
        ("print(__name__)\n_ = await search('a')\ndel _", None),
    ],
)  # fmt: skip
async def test_the_whole_language_is_there(repl: Repl, code: str, value: str | None) -> None:
    ran = await run(repl, code, check=False)

    assert ran.end.error is None, ran.end.error
    assert ran.end.value == value


async def test_a_timeout_is_noticed_when_an_answer_comes_and_a_lone_timer_is_a_sleep(repl: Repl) -> None:
    code = """
import asyncio
try:
    async with asyncio.timeout(5):
        await search('slow')
except TimeoutError:
    print('too late')
async with asyncio.timeout_at(asyncio.get_running_loop().time() + 3):
    await asyncio.Event().wait()
"""
    await repl.begin(code, TOOLS, at=AT, seed="s", check=False)
    step = await repl.resume(Given(0, "late"), at=AT + 6000)

    assert isinstance(step, Paused)
    assert step.printed == "too late\n"
    assert [(call.name, call.args) for call in step.calls] == [("sleep", {"seconds": 3.0})]
    end = await repl.resume(Given(1), at=AT + 9000)
    assert isinstance(end, CellEnd)
    assert end.error is not None
    assert end.error.kind == "TimeoutError"


async def test_tasks_end_with_their_cell(repl: Repl) -> None:
    code = """
import asyncio
async def beside():
    try:
        await asyncio.Event().wait()
    finally:
        print('never shown')
        await search('never called')
asyncio.create_task(beside())
await asyncio.sleep(0)
1
"""
    ran = await run(repl, code, check=False)

    assert (ran.calls, ran.end) == ([], CellEnd(value="1"))


async def test_clock_random_numbers_and_hashes_are_the_same_each_time(executor: CPythonExecutor) -> None:
    code = """
import datetime, os, random, secrets, time, uuid, tempfile
class A:
    pass
(time.time(), time.monotonic_ns(), time.perf_counter(), time.strftime('%H:%M'), time.localtime().tm_hour,
 datetime.datetime.now(), datetime.datetime.utcnow(), datetime.datetime.now(datetime.UTC), datetime.date.today(),
 random.random(), random.Random().random(), secrets.token_hex(4), uuid.uuid1(), uuid.uuid4(), os.urandom(4),
 {'a', 'b', 'c', 'd'}, hash('x'), time.ctime())
"""
    values = []
    for _ in range(2):
        repl = await executor.open()
        values.append((await run(repl, code, check=False)).end.value)
        await repl.close()

    assert values[0] is not None
    assert values[0] == values[1]
    assert values[0].startswith(
        "(1700000000.0, 1700000000000000000, 1700000000.0, '22:13', 22, datetime.datetime(2023,"
    )


async def test_packages_are_those_that_the_host_grants(tmp_path: Path) -> None:
    (tmp_path / "granted_package.py").write_text("VALUE = 7\n")
    async with cpython(packages=(str(tmp_path),)) as executor:
        ran = await run(await executor.open(), "import granted_package\ngranted_package.VALUE", check=False)
        assert "More packages are installed" in executor.describe(TOOLS)
    assert ran.end == CellEnd(value="7")

    async with cpython() as executor:
        ran = await run(await executor.open(), "import msgspec", check=False)
        assert "More packages" not in executor.describe(TOOLS)
    assert ran.end.error is not None
    assert ran.end.error.kind == "ModuleNotFoundError"


def test_what_an_agent_says_of_cpython_is_checked(tmp_path: Path) -> None:
    number: Any = 1
    for wrong in ("cpython", CPython(("relative",)), CPython((str(tmp_path / "none"),)), CPython((number,))):
        with pytest.raises(InvalidDefinition):
            check_cpython(wrong)
    os.symlink(tmp_path, tmp_path / "link")

    assert check_cpython(CPython((str(tmp_path / "link"),))).packages == (str(tmp_path),)
