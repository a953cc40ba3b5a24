"""Processes that a turn starts: with `parent_end="cancel"` they are asked to stop when it ends, in the same write."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Agent, Retry, ToolCall, ToolContext, tool
from perdure.errors import UnknownProcess
from perdure.model.process import Cancelled, Cause, Registration
from perdure.model.tool import Ok
from perdure.model.write import Register
from perdure.processes.function.context import ProcessContext
from perdure.processes.function.engine import process
from perdure.testing import ScriptedModel
from tests.kit import SOON, Place, TellingModel, crash, until
from tests.sessions.test_wakes import FUNCTIONS, when_told


@process
async def parent(ctx: ProcessContext[Any]) -> Any:
    child = await ctx.start(when_told, parent_end="cancel")
    return await child.result()


ALL = (*FUNCTIONS, parent)


@tool(recovery="rerun")
async def begin(ctx: ToolContext[Any], end: str = "cancel", what: str = "when_told") -> dict[str, str]:
    """Begin something."""
    function = {"when_told": when_told, "parent": parent}[what]
    policy: Any = end
    handle = await ctx.host.start_process(function, key="one", parent_end=policy)
    return handle.to_json()


def call(**args: str) -> ToolCall:
    return ToolCall("c1", "begin", args)


async def the_process(runtime: Any) -> Any:
    (row,) = await runtime.processes.list()
    return row


async def test_child_of_a_turn_ends_with_it(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel([call(), "done"]), tools=[begin]), processes=ALL) as runtime:
        session = await runtime.session("chat")
        result = await session.run("go")
        assert result.text == "done"
        row = await the_process(runtime)
        # In the transaction of the commit: whoever sees the one sees the other.
        assert row.record.cancel is not None
        assert (row.registration.parent, row.registration.cause) == ("chat.1", Cause("tool_call", "chat.1.1.0"))

        outcome = await runtime.handle(row.id).outcome(SOON)
        assert outcome == Cancelled("parent chat.1", "its parent has ended")


async def test_child_that_is_abandoned_outlives_its_turn(place: Place) -> None:
    model = ScriptedModel([call(end="abandon"), "done"])
    async with place.runtime(Agent(model, tools=[begin]), processes=ALL) as runtime:
        await (await runtime.session("chat")).run("go")
        row = await the_process(runtime)
        assert row.record.cancel is None

        await runtime.handle(row.id).signal("go", 3)
        assert await runtime.handle(row.id).result(SOON) == 3


async def test_children_of_children_are_asked_too(place: Place) -> None:
    model = ScriptedModel([call(what="parent"), "done"])
    async with place.runtime(Agent(model, tools=[begin]), processes=ALL) as runtime:
        await (await runtime.session("chat")).run("go")
        await until(lambda: _all_over(runtime))
        assert {row.status for row in await runtime.processes.list()} == {"cancelled"}


async def _all_over(runtime: Any) -> bool:
    return not await runtime.processes.list(live=True)


async def test_child_ends_with_a_turn_that_is_cancelled(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model, tools=[begin]), processes=ALL) as runtime:
        session = await runtime.session("chat")
        running = asyncio.create_task(session.run("go"))
        await model.next()
        model.say(call())
        await model.next()
        assert (await the_process(runtime)).record.cancel is None
        await session.cancel("enough")
        await running

        outcome = await runtime.handle((await the_process(runtime)).id).outcome(SOON)
        assert isinstance(outcome, Cancelled)


async def test_child_ends_with_a_turn_that_another_runtime_ends(place: Place) -> None:
    """Who takes a turn over does not know what it has started: it asks the store."""
    model = TellingModel()
    runtime = place.runtime(Agent(model, name="a", tools=[begin]), processes=ALL)
    await runtime.__aenter__()
    session = await runtime.session("chat")
    await session.send("go")
    await model.next()
    model.say(call())
    await model.next()
    process_id = (await the_process(runtime)).id
    await crash(runtime)

    async with place.runtime(Agent(ScriptedModel(["done"]), name="a", tools=[begin]), processes=ALL) as later:
        await (await later.session("chat")).result("chat.1")
        assert isinstance(await later.handle(process_id).outcome(SOON), Cancelled)


async def test_child_of_an_open_turn_ends_with_its_session(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model, tools=[begin]), processes=ALL) as runtime:
        session = await runtime.session("chat")
        await session.send("go")
        await model.next()
        model.say(call())
        await model.next()
        await runtime.sessions.delete("chat")

        outcome = await runtime.handle((await the_process(runtime)).id).outcome(SOON)
        assert isinstance(outcome, Cancelled)


async def test_child_that_comes_after_the_end_of_its_turn_is_asked_at_once(place: Place) -> None:
    """A relieved owner who does not know it may still start something."""
    async with place.runtime(Agent(ScriptedModel(["done"])), processes=ALL) as runtime:
        await (await runtime.session("chat")).run("go")
        late = Registration("late", "function", "rerunnable", "f", parent="chat.1", parent_end="cancel")
        registered = await runtime.store.write(Register(late, 1))
        assert registered.row.status == "cancelled"

        kept = Registration("kept", "function", "rerunnable", "f", parent="chat.1", parent_end="abandon")
        assert (await runtime.store.write(Register(kept, 1))).row.record.cancel is None
        for stranger in ("chat.2", "chat.0", "nobody.1", "chat"):
            odd = Registration("odd", "function", "rerunnable", "f", parent=stranger, parent_end="cancel")
            with pytest.raises(UnknownProcess):
                await runtime.store.write(Register(odd, 1))


async def test_same_start_of_a_call_that_is_made_again_is_the_same_process(place: Place) -> None:
    attempts = 0

    @tool(recovery="rerun", retries=1)
    async def twice(ctx: ToolContext[Any]) -> str:
        """Fails once, after it has started something."""
        nonlocal attempts
        attempts += 1
        handle = await ctx.host.start_process(when_told, key="one")
        if attempts == 1:
            raise Retry("again")
        return handle.id

    model = ScriptedModel([ToolCall("c1", "twice"), "done"])
    async with place.runtime(Agent(model, tools=[twice]), processes=ALL) as runtime:
        result = await (await runtime.session("chat")).run("go")
        row = await the_process(runtime)

        assert attempts == 2
        assert result.tool_calls[0].outcome == Ok(row.id)


async def test_unknown_way_to_end_with_a_parent_is_refused(place: Place) -> None:
    model = ScriptedModel([call(end="linger"), "done"])
    async with place.runtime(Agent(model, tools=[begin]), processes=ALL) as runtime:
        result = await (await runtime.session("chat")).run("go")

        assert "'cancel' or 'abandon'" in str(result.tool_calls[0].outcome)
        assert await runtime.processes.list() == []


async def test_who_waits_for_a_child_that_nobody_had_begun_hears_of_its_end(place: Place) -> None:
    """It ends in the write that ends its parent, and nobody here has worked on it."""
    async with place.runtime(Agent(ScriptedModel([])), processes=ALL) as runtime:
        above = await runtime.start(when_told, id="above")
        child = Registration("child", "function", "rerunnable", "f@9", "f@9", parent="above", parent_end="cancel")
        await runtime.store.write(Register(child, 1))
        waiting = asyncio.create_task(runtime.handle("child").outcome(SOON))
        await asyncio.sleep(0)
        await above.signal("go")

        assert await waiting == Cancelled("parent above", "its parent has ended")
