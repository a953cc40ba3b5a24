"""Cells at their limits, and beside other parts: plugins, people, processes, workers that die."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Plugin, Runtime, tool
from perdure.model.plugin import AbortTurn
from perdure.model.tool import Failed, Ok
from perdure.plugins.hooks import ToolCallContext
from tests.kit import SOON, Place, crashed_in, until
from tests.tools.coding import cell, coder, outputs


@tool
async def double(n: int) -> int:
    """Twice as much."""
    return 2 * n


async def test_cell_that_reaches_a_limit_is_rolled_back_and_the_turn_goes_on(place: Place) -> None:
    answers = [cell("a = 1"), cell("a = 2\nb = [0] * 10**10"), cell("print(a)"), "done"]
    async with place.runtime(coder(*answers, tools=[double])) as runtime:
        result = await (await runtime.session("s")).run("go")
    async with place.runtime(coder(cell("print(a)"), "done", tools=[double])) as runtime:
        again = await (await runtime.session("s")).run("again")

    assert "its values take more than" in outputs(result.messages)[1]
    assert outputs(result.messages)[2] == outputs(again.new_messages)[0] == "Output of the cell:\n1"


async def test_plugin_that_aborts_a_call_fails_it_at_its_line(place: Place) -> None:
    class Guard(Plugin):
        id = "guard"

        def before_tool_call(self, ctx: ToolCallContext) -> Any:
            return AbortTurn("enough", "no more")

    code = "print('before')\nawait double(1)\nprint('after')"
    async with place.runtime(coder(cell(code), "done", tools=[double], plugins=[Guard()])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert [call.outcome for call in result.tool_calls] == [Failed("enough", "no more")]
    told = outputs(result.messages)[0]
    assert told.startswith("Output of the cell:\nbefore\n\n")
    assert "line 2" in told
    assert told.endswith("RuntimeError: enough: no more")


async def test_person_settles_a_call_of_a_cell_whose_end_is_unknown(place: Place) -> None:
    entered = asyncio.Event()

    @tool(recovery="ask")
    async def pay() -> str:
        """Pay."""
        entered.set()
        await asyncio.Event().wait()
        return "paid"

    code = "print('it is', await pay())"
    await crashed_in(place.runtime(coder(cell(code), "", tools=[pay])), entered)
    async with place.runtime(coder("done", tools=[pay])) as runtime:
        session = await runtime.session("s")
        await asyncio.wait_for(session.result("s.1"), SOON)  # it is parked
        await session.settle("s.1.1.0", "done", value="paid by hand")
        result = await asyncio.wait_for(session.result("s.1"), SOON)

    assert outputs(result.messages) == ["Output of the cell:\nit is paid by hand"]


async def test_background_tool_gives_a_cell_a_handle_that_it_may_await(place: Place) -> None:
    @tool(background=True)
    async def dig(depth: int) -> str:
        """Dig."""
        return f"dug {depth}"

    code = "job = await dig(3)\ndone = await await_process(job)\nprint(done)"
    async with place.runtime(coder(cell(code), "done", "woken", tools=[dig])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert "dug 3" in outputs(result.messages)[0]


def workers() -> list[int]:
    """The workers of the sandbox that are children of this process."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            with contextlib.suppress(OSError):
                if b"monty" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
    return found


@tool
async def strike(n: int) -> int:
    """Kill every worker."""
    for pid in workers():
        os.kill(pid, signal.SIGKILL)
    return n


async def test_cell_whose_worker_died_goes_on_in_another_one_without_repeating_anything(place: Place) -> None:
    answers = [cell("a = 7"), cell("b = await strike(a)\nprint(a, b)"), "done"]
    async with place.runtime(coder(*answers, tools=[strike])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert outputs(result.messages)[1] == "Output of the cell:\n7 7"
    assert [call.attempts for call in result.tool_calls] == [1]


@pytest.mark.skipif(os.environ.get("PERDURE_CODE") == "cpython", reason="it kills the workers of Monty")
async def test_cell_whose_worker_died_twice_is_rolled_back(place: Place) -> None:
    answers = [cell("a = 7"), cell("a = 8\nawait strike(1)\nawait strike(2)\nprint('never')"), cell("print(a)"), "done"]
    async with place.runtime(coder(*answers, tools=[strike])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert "never" not in outputs(result.messages)[1]
    assert outputs(result.messages)[2].startswith("Output of the cell:\n7")
    assert [call.outcome for call in result.tool_calls] == [Ok(1), Ok(2)]


async def test_two_cells_that_wait_for_agents_with_cells_do_not_stop_each_other(place: Place) -> None:
    inner = coder(*[cell("x = await double(2)\nfinish(f'{x}')")] * 4, tools=[double])
    helper = Agent(inner.model, name="helper", tools=[double], mode="code")
    code = "import asyncio\nprint(await asyncio.gather(*[ask_helper(f'{n}') for n in range(4)]))"
    agent = coder(cell(code), "done", tools=[helper.as_tool("ask_helper", "Ask.")])
    async with place.runtime(agent) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    assert outputs(result.messages) == ["Output of the cell:\n['4', '4', '4', '4']"]


async def test_cell_goes_on_after_the_runtime_was_left_in_its_middle(place: Place) -> None:
    entered, made = asyncio.Event(), list[int]()

    @tool(recovery="rerun")
    async def work(n: int) -> int:
        """Work."""
        made.append(n)
        if len(made) == 2:
            entered.set()
            await asyncio.Event().wait()
        return n

    code = "seen = []\nfor n in range(3):\n    seen.append(await work(n))\nprint(seen)"
    async with place.runtime(coder(cell(code), tools=[work]), grace=0.0) as runtime:
        await (await runtime.session("s")).send("go")
        await asyncio.wait_for(entered.wait(), SOON)
    async with place.runtime(coder("done", tools=[work])) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).result("s.1"), SOON)

    assert outputs(result.messages) == ["Output of the cell:\n[0, 1, 2]"]
    assert made == [0, 1, 1, 2]


async def test_cancel_ends_a_cell_that_computes(place: Place) -> None:
    started = asyncio.Event()

    @tool
    async def begin() -> None:
        """Begin."""
        started.set()

    code = "a = 2\nawait begin()\nwhile True:\n    a += 1"
    async with place.runtime(coder(cell("a = 1"), cell(code), cell("print(a)"), "done", tools=[begin])) as runtime:
        session = await runtime.session("s")
        receipt = await session.send("go")
        await asyncio.wait_for(started.wait(), SOON)
        await session.cancel("enough")
        cancelled = await asyncio.wait_for(receipt.result(), SOON)
        result = await session.run("and then")

    assert [type(call.outcome) for call in cancelled.tool_calls] == [Ok]
    assert outputs(result.new_messages) == ["Output of the cell:\n1"]


async def is_parked(runtime: Runtime) -> bool:
    return [row.state for row in await runtime.sessions.list()] == ["parked"]


async def test_cell_that_waits_for_a_process_is_parked_and_goes_on_when_that_ends(place: Place) -> None:
    dug = asyncio.Event()

    @tool(background=True, recovery="rerun")
    async def dig(depth: int) -> str:
        """Dig."""
        await dug.wait()
        return f"dug {depth}"

    code = "job = await dig(3)\nprint('begun')\ndone = await await_process(job)\nprint(done)"
    async with place.runtime(coder(cell(code), "done", "woken", tools=[dig])) as runtime:
        session = await runtime.session("s")
        receipt = await session.send("go")
        await until(lambda: is_parked(runtime))
        dug.set()
        result = await asyncio.wait_for(receipt.result(), SOON)

    assert outputs(result.messages)[0].startswith("Output of the cell:\nbegun\n")
    assert "dug 3" in outputs(result.messages)[0]
