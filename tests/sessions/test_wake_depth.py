"""A loop of wakes: work that a turn starts wakes its session, whose turn starts it again."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Agent, ModelRequest, ProcessContext, Runtime, ToolCall, ToolContext, process, tool
from perdure.engine.journal import load
from perdure.errors import InvalidDefinition, TurnFailed
from perdure.model.record import Said
from perdure.model.write import ProcessFilter
from perdure.sessions.wakes.late_results import read
from perdure.testing import FunctionModel
from tests.kit import Place, until


@tool(background=True)
async def work() -> str:
    """Work."""
    return "done"


def restless(asked: list[str], **options: Any) -> Agent[str]:
    """An agent that starts its background tool again whenever it is spoken to, or woken."""

    def answer(request: ModelRequest) -> Any:
        last = request.messages[-1]
        if last.role == "tool":
            return "started"
        asked.append(last.text)
        return [ToolCall("a", "work")] if "stop" not in last.text else "stopped"

    return Agent(FunctionModel(answer), name="restless", tools=[work], **options)


async def stuck(runtime: Runtime, session_id: str = "s") -> bool:
    row = await runtime.store.session(session_id)
    return row is not None and row.state == "stuck"


async def depths(runtime: Runtime, session_id: str = "s") -> list[int]:
    row = await runtime.store.session(session_id)
    assert row is not None
    return [record.depth for _, record in await load(runtime.store, row.sid, 1, row.next) if type(record) is Said]


async def test_a_session_that_wakes_itself_for_ever_is_set_aside_at_depth_25(place: Place) -> None:
    asked: list[str] = []
    async with place.runtime(restless(asked)) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await until(lambda: stuck(runtime))
        row = await runtime.store.session("s")

        assert row is not None
        assert len(asked) == 25
        assert row.reason is not None
        assert "25 wakes in a row" in row.reason
        assert "wake_depth" in row.reason
        assert (row.head, row.turn, row.owner) == (25, 26, None)
        with pytest.raises(TurnFailed, match="25 wakes in a row"):
            await session.result("s.26")


async def test_one_that_is_resumed_goes_on_at_depth_0(place: Place) -> None:
    asked: list[str] = []
    async with place.runtime(restless(asked, wake_depth=3)) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await until(lambda: stuck(runtime))
        assert len(asked) == 3
        await session.resume()
        await until(lambda: len(asked) == 6)
        await until(lambda: stuck(runtime))

        assert await depths(runtime) == [0, 1, 2, 0, 1, 2, 0]


async def test_what_is_said_from_outside_begins_anew(place: Place) -> None:
    asked: list[str] = []
    async with place.runtime(restless(asked, wake_depth=2)) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await until(lambda: stuck(runtime))
        assert await session.cancel("enough") == "requested"
        assert (await session.run("now stop")).text == "stopped"

        assert (await depths(runtime))[-1] == 0


async def test_without_a_limit_it_goes_on(place: Place) -> None:
    asked: list[str] = []
    async with place.runtime(restless(asked, wake_depth=None), grace=0) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await until(lambda: len(asked) > 30)


@pytest.mark.parametrize("depth", [0, -1, True, "9", 2.5])
def test_a_depth_is_a_number(depth: Any) -> None:
    with pytest.raises(InvalidDefinition, match="wake_depth"):
        Agent("scripted", wake_depth=depth)


async def test_what_a_host_starts_for_a_session_wakes_it_at_depth_0(place: Place) -> None:
    asked: list[str] = []
    async with place.runtime(restless(asked, wake_depth=1)) as runtime:
        session = await runtime.session("s")
        await session.start(work)
        await until(lambda: stuck(runtime))

        assert await depths(runtime) == [0, 0]
        assert len(asked) == 1


async def test_a_process_passes_its_depth_on_to_what_it_starts(place: Place) -> None:
    @process
    async def inner(ctx: ProcessContext) -> str:
        return "inner"

    @process
    async def outer(ctx: ProcessContext) -> str:
        return await (await ctx.start(inner, {})).result()

    @tool
    async def begin(ctx: ToolContext[Any]) -> str:
        """Begin."""
        await (await ctx.start(outer, {}, wake="none")).result()
        return "begun"

    def answer(request: ModelRequest) -> Any:
        return "done" if request.messages[-1].role == "tool" else [ToolCall("a", "begin")]

    agent = Agent(FunctionModel(answer), tools=[begin])
    async with place.runtime(agent, processes=[inner, outer]) as runtime:
        await (await runtime.session("s")).run("go")
        await (await runtime.start(outer, id="host's")).result()
        found = {row.id: row.registration.depth for row in await runtime.store.processes(ProcessFilter())}

        assert found == {"s.1.1.0.1": 1, "s.1.1.0.1.1": 1, "host's": 0, "host's.1": 0}


async def test_the_turn_of_a_subagent_and_what_it_starts_are_as_deep_as_its_process(place: Place) -> None:
    asked: list[str] = []
    helper = restless(asked, wake_depth=3)

    def answer(request: ModelRequest) -> Any:
        return "done" if request.messages[-1].role == "tool" else [ToolCall("a", "restless", {"task": "go"})]

    lead = Agent(FunctionModel(answer), name="lead", tools=[helper.as_tool()])
    async with place.runtime(lead) as runtime:
        await (await runtime.session("s")).run("go")
        child = next(row.id for row in await runtime.sessions.list() if row.agent == "restless")
        await until(lambda: stuck(runtime, child))

        assert await depths(runtime, child) == [1, 2, 0]


async def test_a_session_is_not_woken_for_what_it_has_cancelled_itself(place: Place) -> None:
    @process
    async def wait(ctx: ProcessContext) -> None:
        await ctx.wait_signal("go")

    asked: list[str] = []

    def answer(request: ModelRequest) -> str:
        asked.append(request.messages[-1].text)
        return "heard"

    async with place.runtime(Agent(FunctionModel(answer)), processes=[wait]) as runtime:
        session = await runtime.session("s")
        own, other = [await session.start(wait, id=name) for name in ("own", "other")]
        await own.cancel("enough", by="session s")
        await other.cancel("enough")
        await until(lambda: asked)

        assert [wake.process_id for wake in await wakes_of(runtime)] == ["other"]


async def wakes_of(runtime: Runtime) -> list[Any]:
    return [read(wake) for state in ("pending", "enqueued") for wake in await runtime.store.wakes(state=state)]
