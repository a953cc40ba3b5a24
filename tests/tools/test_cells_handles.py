"""Handles in cells: background tools, agents, durable functions and commands, with the verbs that models have."""

import asyncio
from typing import Any

from perdure import Agent, ProcessContext, ToolContext, process, tool
from perdure.builtin.processes import process_tools
from perdure.model.tool import Failed
from tests.kit import SOON, Place, crashed_in, until
from tests.tools.coding import cell, coder, outputs


@tool(background=True, recovery="rerun")
async def dig(depth: int) -> str:
    """Dig."""
    return f"dug {depth}"


@process
async def gate(ctx: ProcessContext[Any], name: str) -> str:
    """Wait for a word."""
    return f"{name} heard {await ctx.wait_signal('word')}"


async def test_cell_lists_awaits_and_cancels_what_it_started(place: Place) -> None:
    opened = asyncio.Event()

    @tool(background=True, recovery="rerun")
    async def wait(n: int) -> int:
        """Wait."""
        await opened.wait()
        return n

    code = """
jobs = [await wait(n) for n in range(2)]
print(sorted(job['id'] for job in jobs))
print(len(await list_processes()))
await cancel_process(jobs[1], 'not needed')
try:
    await await_process(jobs[1])
except BaseException as error:
    print(error)"""
    async with place.runtime(coder(cell(code), "done", "woken", "woken", tools=[wait])) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)
        opened.set()

    assert outputs(result.messages)[0].splitlines()[1:] == [
        "['s.1.1.0', 's.1.1.1']",
        "2",
        "await_process: process 's.1.1.1' was cancelled by session s while it ran: not needed; "
        "it may or may not have taken effect",
    ]


async def test_handle_in_a_variable_is_good_in_another_turn_and_another_process(place: Place) -> None:
    async with place.runtime(coder(cell("job = await dig(3)"), "one", "woken", tools=[dig])) as runtime:
        await (await runtime.session("s")).run("go")
        await runtime.wait_idle()
    async with place.runtime(coder(cell("print(await await_process(job))"), "two", tools=[dig])) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("again"), SOON)

    assert "dug 3" in outputs(result.new_messages)[0]


async def test_cell_follows_an_agent_in_the_background(place: Place) -> None:
    helper = Agent(coder(cell("finish('found')")).model, name="helper", mode="code")
    code = "job = await ask_helper('look')\nprint(await await_process(job))"
    tools = [helper.as_tool("ask_helper", "Ask.", background=True)]
    async with place.runtime(coder(cell(code), "done", "woken", tools=tools)) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    assert "found" in outputs(result.messages)[0]


async def test_cell_starts_a_durable_function_and_tells_it_something(place: Place) -> None:
    code = """
job = await start_process('gate', {'name': 'north'})
await signal_process(job, 'word', 'open')
print(await await_process(job))"""
    agent = coder(cell(code), "done", "woken", tools=process_tools(gate))
    async with place.runtime(agent, processes=[gate]) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    assert "north heard open" in outputs(result.messages)[0]


async def test_cell_waits_for_a_command_and_reads_how_it_ended(place: Place) -> None:
    @tool(recovery="rerun")
    async def build(ctx: ToolContext[Any]) -> dict[str, Any]:
        """Build."""
        return (await ctx.command(["sh", "-c", "exit 3"])).to_json()

    code = "job = await build()\nend = await await_process(job)\nprint(end['exit_code'])"
    tools = [build, *process_tools()]
    async with place.runtime(coder(cell(code), "done", "woken", tools=tools)) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    assert outputs(result.messages) == ["Output of the cell:\n3"]


async def test_handle_that_the_session_does_not_hold_is_of_no_use(place: Place) -> None:
    code = "print(await settle(await_process({'__handle__': 'process', 'id': 'secret-1'})))"
    async with place.runtime(coder(cell(code), "done", tools=process_tools()), processes=[gate]) as runtime:
        handle = await runtime.start(gate, {"name": "south"}, id="secret-1")
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)
        await handle.cancel("enough")

    assert [type(call.outcome) for call in result.tool_calls] == [Failed]


async def test_process_of_a_cell_is_started_once_wherever_it_is_killed(place: Place) -> None:
    dug, entered = list[int](), asyncio.Event()

    @tool(background=True, recovery="rerun")
    async def once(n: int) -> int:
        """Once."""
        dug.append(n)
        return n

    def holding(held: bool) -> Any:
        @tool(recovery="rerun")
        async def hold() -> None:
            """Hold."""
            if held:
                entered.set()
                await asyncio.Event().wait()

        return hold

    code = "job = await once(7)\nawait hold()\nprint(await await_process(job))"
    await crashed_in(place.runtime(coder(cell(code), "", tools=[once, holding(True)])), entered)
    async with place.runtime(coder("done", "woken", tools=[once, holding(False)])) as runtime:
        session = await runtime.session("s")
        result = await asyncio.wait_for(session.result("s.1"), SOON)
        processes = await runtime.processes.list()
        await until(lambda: bool(dug))

    assert outputs(result.messages)[0].startswith("Output of the cell:\n")
    assert [each.id for each in processes] == ["s.1.1.0"]
