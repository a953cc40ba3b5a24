"""Turns whose cells run in full CPython: the same turns, with what Monty lacks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure import Agent, Plugin, Runtime, ToolContext, tool
from perdure.codemode.inside.values import EARLIER
from perdure.errors import InvalidDefinition, SandboxUnavailable
from perdure.model.code import CodeLimits, CPython
from perdure.model.outcome import Finished
from perdure.model.tool import Ok
from perdure.ports.code import Executor
from perdure.testing import ScriptedModel
from tests.codemode.kit import require_sandbox
from tests.kit import SOON, until
from tests.tools.coding import cell, coder, outputs
from tests.tools.saving import CALLS, IN_CPYTHON, TOLD, Seen, leave


@pytest.fixture(autouse=True)
def sandbox() -> None:
    require_sandbox()


@tool
async def double(n: int) -> int:
    """Twice as much."""
    return 2 * n


INHERITS = """
class Pair(tuple):
    def total(self):
        return sum(self)
pair = Pair([await double(1), await double(20)])
print(pair.total())
"""


async def test_cell_of_full_python_calls_tools_and_its_class_lives_on_in_another_process(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    async with Runtime(store, agents=[coder(cell(INHERITS), "It is 42.", tools=[double], code=CPython())]) as runtime:
        first = await (await runtime.session("s")).run("go")
    again = coder(cell("print(type(pair).__mro__[1], pair.total())"), "Still 42.", tools=[double], code=CPython())
    async with Runtime(store, agents=[again]) as runtime:
        second = await (await runtime.session("s")).run("and again")

    assert first.outcome == Finished("It is 42.")
    assert outputs(first.messages) == ["Output of the cell:\n42"]
    assert [(call.call_id, call.outcome) for call in first.tool_calls] == [("s.1.1.0", Ok(2)), ("s.1.1.1", Ok(40))]
    assert outputs(second.new_messages) == ["Output of the cell:\n<class 'tuple'> 42"]
    assert second.tool_calls == []


async def test_call_of_an_earlier_cell_raises_live_and_when_cells_are_run_again(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    early = cell("early = double(1)\nprint(await double(2), await early)")
    late = cell("try:\n    await early\nexcept Exception as error:\n    print(error)")
    async with Runtime(store, agents=[coder(early, late, "live", tools=[double], code=CPython())]) as runtime:
        live = await (await runtime.session("s")).run("one")
    async with Runtime(store, agents=[coder(late, "later", tools=[double], code=CPython())]) as runtime:
        later = await (await runtime.session("s")).run("two")

    assert outputs(live.messages) == ["Output of the cell:\n4 2", f"Output of the cell:\n{EARLIER}"]
    assert outputs(later.new_messages) == [f"Output of the cell:\n{EARLIER}"]


async def test_cell_that_waits_for_a_person_goes_on_at_its_line_in_another_process(tmp_path: Path) -> None:
    @tool(approval="ask")
    async def sign(n: int) -> str:
        """Sign."""
        return f"signed {n}"

    code = (
        "import random\nnumber = random.randint(1, 10**9)\nprint(number)\nfinish(f'{number} {await sign(7)} {number}')"
    )
    store = tmp_path / "store.db"
    async with Runtime(store, agents=[coder(cell(code), tools=[sign], code=CPython())]) as runtime:
        parked = await (await runtime.session("s")).run("go")
    async with Runtime(store, agents=[coder(tools=[sign], code=CPython())]) as runtime:
        session = await runtime.session("s")
        await session.approve(parked.pending[0].call_id)
        result = await session.result(parked.turn_id)

    number, *signed, again = result.text.split()
    assert number == again
    assert signed == ["signed", "7"]


async def test_model_is_told_what_its_python_supports() -> None:
    seen: list[Any] = []
    async with Runtime("memory", agents=[coder("Fine.", seen=seen, tools=[double], code=CPython())]) as runtime:
        await (await runtime.session("s")).run("go")

    system = next(message.text for message in seen[0] if message.role == "system")
    assert "CPython 3." in system
    assert "no threads and no processes" in system
    assert "async def double(n: int) -> int:" in system


async def test_process_that_is_killed_in_mid_cell_is_made_again_and_nothing_is_called_twice() -> None:
    made: list[int] = []
    started, go_on = asyncio.Event(), asyncio.Event()

    @tool
    async def count(n: int, ctx: ToolContext[Any]) -> int:
        """Count."""
        made.append(n)
        if n == 2:
            started.set()
            await go_on.wait()
        return n

    agent = coder(cell("a = await count(1)\nb = await count(2)\nfinish(str([a, b]))"), tools=[count], code=CPython())
    async with Runtime("memory", agents=[agent]) as runtime:
        session = await runtime.session("s")
        turn = asyncio.ensure_future(session.run("go"))
        async with asyncio.timeout(SOON):
            await started.wait()
        executor: Any = executor_of(runtime)
        [worker] = executor.taken
        worker.kill()
        go_on.set()
        result = await turn

    assert result.text == "[1, 2]"
    assert made == [1, 2]


def executor_of(runtime: Runtime) -> Executor:
    [executor] = [each for each in runtime._executors if each is not None]
    return executor


async def test_agents_share_a_runtime_with_an_executor_for_each_way_to_run() -> None:
    def named(name: str, **options: Any) -> Agent[str]:
        return Agent(
            ScriptedModel([cell("import sys\nprint(sys.version[:2])"), name]), name=name, mode="code", **options
        )

    small = CPython(limits=CodeLimits(seconds=5))
    agents = [named("a"), named("b", code=CPython()), named("c", code=CPython()), named("d", code=small)]
    async with Runtime("memory", agents=agents) as runtime:
        told = [outputs((await (await runtime.session(each.name, agent=each)).run("go")).messages) for each in agents]
        executors = list(runtime._executors)

    assert [each.name for each in executors if each is not None] == ["monty", "cpython", "cpython"]
    assert told[1] == told[2] == told[3] == ["Output of the cell:\n3."]


async def test_no_process_is_left_when_the_runtime_is_left(tmp_path: Path) -> None:
    async with Runtime(tmp_path / "s.db", agents=[coder(cell("x = 1"), "Done.", code=CPython())]) as runtime:
        await (await runtime.session("s")).run("go")
        executor: Any = executor_of(runtime)
        [worker] = executor.taken
        pid = worker._command.pid
        assert Path(f"/proc/{pid}").exists()

    await until(lambda: not Path(f"/proc/{pid}").exists())
    assert list((tmp_path / "s.db-jobs").iterdir()) == []


def test_what_cannot_be_is_refused_at_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Plugin):
        id = "own"

        def code_executor(self) -> Executor:
            raise NotImplementedError

    with pytest.raises(InvalidDefinition, match="leave it out, or give it mode='code'"):
        Agent("scripted", code=CPython())
    with pytest.raises(InvalidDefinition, match="leave one of them out"):
        Agent("scripted", mode="code", code=CPython(), plugins=[Own()])
    wrong: Any = "cpython"
    with pytest.raises(InvalidDefinition, match="give CPython"):
        Agent("scripted", mode="code", code=wrong)
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="a matter of Linux"):
        Agent("scripted", mode="code", code=CPython())


async def test_machine_without_a_sandbox_is_refused_at_entry_unless_that_is_accepted_by_name(tmp_path: Path) -> None:
    """A store inside of what a cell may read cannot be hidden, so nothing can confine it as asked."""
    (tmp_path / "packages").mkdir()
    store = tmp_path / "packages" / "store.db"
    packages = (str(tmp_path / "packages"),)
    with pytest.raises(SandboxUnavailable):
        async with Runtime(store, agents=[coder("x", code=CPython(packages))]):
            pass

    open_to_all = CPython(packages, unsandboxed=True)
    agent = coder(cell("import os\nprint(os.path.exists('/etc/passwd'))"), "Done.", code=open_to_all)
    async with Runtime(store, agents=[agent]) as runtime:
        result = await (await runtime.session("s")).run("go")
    assert outputs(result.messages) == ["Output of the cell:\nTrue"]


# A process of CPython is begun for each of them, twice: some of the calls, and with PERDURE_CODE=cpython all.
IN_FULL = range(CALLS) if os.environ.get("PERDURE_CODE") == "cpython" else (1, 4)


@pytest.mark.slow
def test_cell_in_cpython_left_in_a_call_ends_the_same_in_another_process(tmp_path: Path) -> None:
    """There is no state to save: the cells are made again from their answers."""
    folders = [tmp_path / f"{IN_CPYTHON} {call}" for call in IN_FULL]

    async def leave_all() -> None:
        for call, folder in zip(IN_FULL, folders, strict=True):
            folder.mkdir()
            await leave(folder, call)

    asyncio.run(leave_all())
    said = subprocess.run(
        [sys.executable, "-m", "tests.tools.saving", *map(str, folders)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    ).stdout
    resumed = msgspec.json.decode(said, type=dict[str, Seen])

    for call, folder in zip(IN_FULL, folders, strict=True):
        seen = resumed[str(folder)]
        assert seen.told == TOLD, call
        assert sorted(seen.ledger) == sorted([100, *range(CALLS), call]), call
        assert seen.attempts == [1 if n != call + 1 else 2 for n in range(CALLS + 1)], call
