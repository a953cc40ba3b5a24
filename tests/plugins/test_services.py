"""The services that hooks are given, in real turns: reading, tools, other sessions, history, direct completions."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Agent, Message, ModelRequest, ToolCall, tool
from perdure.errors import Conflict, ProviderError, StaleSettings, UnknownNode, UnknownSession, UnknownTool
from perdure.model.llm import ModelResponse, Usage
from perdure.model.outcome import Finished, PluginAborted
from perdure.model.plugin import CreateSession
from perdure.model.record import Closed, Completed
from perdure.model.session import Appending, StaleBranch, ToolState, load_settings
from perdure.model.tool import Cancelled, Failed, Ok
from perdure.plugins.hooks import Plugin, ToolEndContext
from perdure.testing import FunctionModel, VirtualClock
from tests.kit import SOON, Place, TellingModel, crash, overloaded, texts
from tests.plugins.made import having

Do = Callable[[Any], Awaitable[Any]]


@tool
async def add(n: int) -> int:
    """Add one."""
    return n + 1


@tool
async def drop() -> str:
    """Drop everything."""
    return "dropped"


def once(hook: str, do: Do, session: str = "s") -> Plugin:
    """A plugin that does something with its services the first time its hook is called in that session."""
    done: list[str] = []

    async def answer(ctx: Any, *rest: Any) -> Any:
        if not done and ctx.session_id == session:
            done.append(ctx.turn_id)
            await do(ctx)
        return rest[0] if rest else None

    return having(hook, answer)


class Shown:
    """A model that remembers which tools it was shown; it calls `add` first and answers then."""

    def __init__(self) -> None:
        self.tools: list[list[str]] = []
        self.direct: list[ModelRequest] = []

    def __call__(self, request: ModelRequest) -> Any:
        if not request.turn_id:
            self.direct.append(request)
            return f"about {request.messages[-1].text}"
        self.tools.append(sorted([each.name for each in request.tools]))
        if request.messages[-1].role == "tool":
            return "done"
        return [ToolCall("c", "add", {"n": 1})]


def agent(model: Callable[[ModelRequest], Any], *plugins: Plugin) -> Agent[str]:
    return Agent(FunctionModel(model), name="agent", tools=[add, drop], plugins=plugins)


# ---------------------------------------------------------------------- reading


async def test_snapshot_tells_what_is_committed_and_which_turn_runs(place: Place) -> None:
    seen: list[Any] = []

    async def look(ctx: Any) -> None:
        seen.append(await ctx.host.snapshot())
        seen.append(await ctx.host.snapshot("other"))
        with pytest.raises(UnknownSession):
            await ctx.host.snapshot("nobody")

    async with place.runtime(agent(Shown())) as runtime:
        await (await runtime.session("other")).run("hello")
        await (await runtime.session("s")).run("first")
    async with place.runtime(agent(Shown(), once("before_tool_call", look))) as runtime:
        result = await (await runtime.session("s")).run("second")

    assert (result.outcome, [call.outcome for call in result.tool_calls]) == (Finished("done"), [Ok(2)])
    own, other = seen
    assert (own.session_id, own.head, own.turn, texts(own.messages)[0]) == ("s", 1, 2, "first")
    assert (other.session_id, other.head, other.turn, len(other.messages)) == ("other", 1, None, 4)


async def test_catalogue_is_what_the_model_is_shown(place: Place) -> None:
    seen: list[Any] = []

    async def look(ctx: Any) -> None:
        seen.extend([sorted([each["name"] for each in await ctx.host.tool_catalog()])])
        await ctx.host.set_tools(["drop"], False)
        seen.extend([sorted([each["name"] for each in await ctx.host.tool_catalog()])])

    async with place.runtime(agent(Shown(), once("before_tool_call", look))) as runtime:
        await (await runtime.session("s")).run("go")

    assert seen == [["add", "drop"], ["add"]]


# ---------------------------------------------------------------------- tools


async def test_tool_that_is_switched_off_in_a_turn_is_gone_from_its_next_model_call_on(place: Place) -> None:
    model = Shown()

    async def switch(ctx: Any) -> None:
        await ctx.host.set_tools(["drop"], False)

    async with place.runtime(agent(model, once("before_tool_call", switch))) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await session.run("again")
        state = await session.tools.state()
    async with place.runtime(agent(model)) as runtime:
        await (await runtime.session("s")).run("after a restart")

    assert model.tools == [["add", "drop"], ["add"], ["add"], ["add"], ["add"], ["add"]]
    assert (state.members, state.generation) == ({"drop": False}, 1)


async def test_tool_that_the_host_switches_off_during_a_turn_is_gone_from_the_next_turn_on(place: Place) -> None:
    model, running, go_on = Shown(), asyncio.Event(), asyncio.Event()

    async def wait(ctx: Any) -> None:
        running.set()
        await go_on.wait()

    async with place.runtime(agent(model, once("before_tool_call", wait))) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        receipt = await session.send("go")
        await running.wait()
        await session.tools.disable("drop")
        go_on.set()
        await receipt.result()
        await session.run("again")

    assert model.tools[2:] == [["add"], ["add"]]


async def test_switch_that_is_recorded_counts_in_the_turn_that_goes_on_after_a_crash(place: Place) -> None:
    model, died = Shown(), TellingModel()

    async def switch(ctx: Any) -> None:
        await ctx.host.set_tools(["drop"], False)

    first = Agent(died, name="agent", tools=[add, drop], plugins=[once("before_tool_call", switch)])
    runtime = await place.runtime(first).__aenter__()
    receipt = await (await runtime.session("s")).send("go")
    await died.next()
    died.say([ToolCall("c", "add", {"n": 1})])
    request = await died.next()
    assert [each.name for each in request.tools] == ["add"]
    await crash(runtime)
    async with place.runtime(agent(model, having("before_turn", lambda ctx: None))) as runtime:
        session = await runtime.session("s")
        result = await session.result(receipt.turn_id)
        state = await session.tools.state()

    assert result.outcome == Finished("done")
    assert model.tools == [["add"]]
    assert state.members == {"drop": False}


async def test_edits_of_the_state_are_checked_by_generation_and_name(place: Place) -> None:
    seen: list[Any] = []

    async def edit(ctx: Any) -> None:
        state = await ctx.host.tool_state()
        seen.append(await ctx.host.apply_tool_state(ToolState(state.generation, {"drop": False})))
        with pytest.raises(StaleSettings):
            await ctx.host.apply_tool_state(ToolState(state.generation, {}))
        with pytest.raises(UnknownTool):
            await ctx.host.set_tools(["dorp"], False)
        with pytest.raises(UnknownSession):
            await ctx.host.tool_state("nobody")
        with pytest.raises(UnknownSession):
            await ctx.host.set_tools(["drop"], False, "nobody")
        seen.append(await ctx.host.tool_state())

    async with place.runtime(agent(Shown(), once("before_tool_call", edit))) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert [call.outcome for call in result.tool_calls] == [Ok(2)]
    assert seen == [1, ToolState(1, {"drop": False})]


# ---------------------------------------------------------------------- other sessions


async def test_hook_creates_runs_and_closes_another_session(place: Place) -> None:
    seen: list[Any] = []

    async def delegate(ctx: Any) -> None:
        child = await ctx.host.create_session(CreateSession(session_id="child", hidden=("drop",), label="side job"))
        made = await ctx.host.snapshot(child)
        assert (made.parent, made.label) == ("s", "side job")
        result = await ctx.host.start_turn(child, "work", key="k")
        again = await ctx.host.start_turn(child, "work", key="k")
        seen.extend([child, result.outcome, again.turn_id])
        await ctx.host.close_session(child)
        with pytest.raises(Conflict, match="cannot close itself"):
            await ctx.host.close_session(ctx.session_id)
        with pytest.raises(Conflict, match="of its own session"):
            await ctx.host.start_turn(ctx.session_id, "work", key="k")
        for unknown in (ctx.host.close_session("nobody"), ctx.host.start_turn("nobody", "hm", key="k")):
            with pytest.raises(UnknownSession):
                await unknown

    model = Shown()
    async with place.runtime(agent(model, once("before_tool_call", delegate))) as runtime, asyncio.timeout(SOON):
        result = await (await runtime.session("s")).run("go")
        snapshot = [row.id for row in await runtime.sessions.list()]

    assert [call.outcome for call in result.tool_calls] == [Ok(2)]
    assert seen == ["child", Finished("done"), "child.1"]
    assert sorted(snapshot) == ["child", "s"]
    assert model.tools == [["add", "drop"], ["add"], ["add"], ["add", "drop"]], "what a parent hides stays hidden"


async def test_hook_cancels_a_turn_of_another_session(place: Place) -> None:
    busy = TellingModel()

    async def stop(ctx: Any) -> None:
        assert await ctx.host.cancel_turn("busy", "no time") == "requested"
        with pytest.raises(UnknownSession):
            await ctx.host.cancel_turn("nobody")
        with pytest.raises(Conflict, match="has a running turn"):
            await ctx.host.close_session("idle")

    slow = Agent(busy, name="slow")
    async with place.runtime(agent(Shown(), once("before_tool_call", stop)), slow) as runtime, asyncio.timeout(SOON):
        receipt = await (await runtime.session("busy", agent="slow")).send("take your time")
        held = await (await runtime.session("idle", agent="slow")).send("wait")
        await busy.next()
        await busy.next()
        result = await (await runtime.session("s")).run("go")
        stopped = await receipt.result()
        busy.say("done")
        await held.result()

    assert [call.outcome for call in result.tool_calls] == [Ok(2)]
    assert stopped.outcome == Cancelled("session s", "no time")


async def test_fork_of_a_session_has_services_of_its_own(place: Place) -> None:
    seen: list[str] = []

    async def look(ctx: Any) -> None:
        seen.append((await ctx.host.snapshot()).session_id)

    async with place.runtime(agent(Shown())) as runtime:
        await (await runtime.session("s")).run("go")
        await (await runtime.session("s")).fork(session_id="fork")
    async with place.runtime(agent(Shown(), once("before_turn", look, "fork"))) as runtime:
        await (await runtime.session("fork")).run("go")

    assert seen == ["fork"]


# ---------------------------------------------------------------------- history


async def test_message_appended_in_a_turn_is_part_of_its_commit(place: Place) -> None:
    seen: list[Any] = []

    async def append(ctx: Any) -> None:
        seen.append(await ctx.host.append([Message("user", "by the way")], after="s.1"))
        seen.append(await ctx.host.append([Message("user", "lost")], after="s.7"))

    async with place.runtime(agent(Shown())) as runtime:
        await (await runtime.session("s")).run("first")
    async with place.runtime(agent(Shown(), once("before_tool_call", append))) as runtime:
        session = await runtime.session("s")
        await session.run("second")
        history = texts(await session.history())

    assert seen == [Appending(("s.3.0",), "s.3.0"), StaleBranch("s.1")]
    assert [text for text in history if text] == ["first", "done", "second", "by the way", "done"]


async def test_message_appended_to_another_session_waits_for_its_next_turn(place: Place) -> None:
    async def append(ctx: Any) -> None:
        await ctx.host.append([Message("user", "from afar")], session_id="other")
        with pytest.raises(UnknownSession):
            await ctx.host.append([Message("user", "hm")], session_id="nobody")

    async with place.runtime(agent(Shown(), once("before_tool_call", append))) as runtime:
        other = await runtime.session("other")
        await other.run("hello")
        await (await runtime.session("s")).run("go")
        before = texts(await other.history())
        await other.run("and now?")
        after = texts(await other.history())

    assert "from afar" not in before
    assert "from afar" in after


# ---------------------------------------------------------------------- direct completions


@dataclasses.dataclass
class Verdict:
    safe: bool
    reason: str = ""


HOOKS = ["compact", "prompt", "transform_view", "before_tool_call", "after_tool_call"]


@pytest.mark.parametrize("hook", HOOKS)
async def test_completion_in_a_hook_is_recorded_and_counted_by_its_label(place: Place, hook: str) -> None:
    seen: list[Any] = []

    def model(request: ModelRequest) -> Any:
        if not request.turn_id:
            return ModelResponse("in short", usage=Usage(3, 2), model="small")
        return "done" if request.messages[-1].role == "tool" else [ToolCall("c", "add", {"n": 1})]

    async def ask(ctx: Any) -> None:
        seen.append(await ctx.host.complete("summarise", label="digest", system="be brief"))

    async with place.runtime(agent(model, once(hook, ask))) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == Finished("done")
    assert [(each.text, each.value, each.model) for each in seen] == [("in short", None, "small")]
    [record] = [each for each in result.records if isinstance(each, Completed)]
    assert (record.label, record.text) == ("digest", "in short")
    closed = result.records[-1]
    assert isinstance(closed, Closed)
    assert closed.ledger == {"digest": Usage(3, 2, calls=1)}
    assert result.usage.calls == 2, "the turn's own calls only"


async def test_completions_as_json_and_as_a_type(place: Place) -> None:
    seen: list[Any] = []

    def model(request: ModelRequest) -> Any:
        return '{"safe": true, "reason": "small"}' if not request.turn_id else "done"

    async def ask(ctx: Any) -> None:
        seen.append((await ctx.host.complete("check", label="check", output="json")).value)
        seen.append((await ctx.host.complete("check", label="check", output=Verdict)).value)

    async with place.runtime(agent(model, once("prompt", ask))) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert seen == [{"safe": True, "reason": "small"}, Verdict(True, "small")]
    closed = result.records[-1]
    assert isinstance(closed, Closed)
    assert closed.ledger == {"check": Usage(calls=2, unknown=2)}


async def test_completion_is_tried_again_like_a_model_call(place: Place) -> None:
    attempts: list[int] = []

    def model(request: ModelRequest) -> Any:
        if request.turn_id:
            return "done"
        attempts.append(request.attempt)
        if request.attempt < 3:
            raise overloaded()
        return "at last"

    async def ask(ctx: Any) -> None:
        await ctx.host.complete("hm?", label="x")

    async with place.runtime(agent(model, once("prompt", ask)), clock=VirtualClock(auto=True)) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert (result.outcome, attempts) == (Finished("done"), [1, 2, 3])


@pytest.mark.parametrize("how", ["refused", "nonsense"])
async def test_completion_that_fails_raises_in_its_hook(place: Place, how: str) -> None:
    def model(request: ModelRequest) -> Any:
        if request.turn_id:
            return "done"
        if how == "refused":
            raise ProviderError("no credit", code="no_credit")
        return "not JSON"

    async def ask(ctx: Any) -> None:
        await ctx.host.complete("hm?", label="x", output="json")

    async with place.runtime(agent(model, once("prompt", ask))) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        after = await session.run("again")

    assert isinstance(result.outcome, PluginAborted)
    assert (result.outcome.plugin, result.outcome.code) == ("p", "context_prepare_turn")
    assert "no credit" in result.outcome.message or "required form" in result.outcome.message
    assert after.outcome == Finished("done")


async def test_provider_that_breaks_in_a_completion_is_a_fault_of_the_hook(place: Place) -> None:
    def model(request: ModelRequest) -> Any:
        if request.turn_id:
            return "done" if request.messages[-1].role == "tool" else [ToolCall("c", "add", {"n": 1})]
        raise SystemExit(4)

    async def ask(ctx: Any) -> None:
        await ctx.host.complete("hm?", label="x")

    async with place.runtime(agent(model, once("before_tool_call", ask))) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == Finished("done")
    [call] = result.tool_calls
    assert isinstance(call.outcome, Failed)
    assert call.outcome.code == "before_tool_call_failed"


async def test_completion_after_the_commit_is_counted_in_the_session(place: Place) -> None:
    seen: list[str] = []

    async def ask(ctx: Any) -> None:
        seen.append((await ctx.host.complete("how was it?", label="review")).text)

    async with place.runtime(agent(Shown(), once("turn_persisted", ask))) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        row = await runtime.store.session("s")
        after = await session.run("again")

    assert row is not None
    assert load_settings(row.settings).ledger == {"review": Usage(calls=1, unknown=1)}
    assert (result.outcome, result.issues, seen) == (Finished("done"), [], ["about how was it?"])
    assert after.outcome == Finished("done")


async def test_append_follows_what_was_appended_and_no_record_that_is_not_there(place: Place) -> None:
    """The ancestor must be on the active path: what was accepted just now is, a record that is not there is not."""
    seen: list[Any] = []

    class Appender(Plugin):
        id = "appender"

        async def after_tool_call(self, ctx: ToolEndContext) -> None:
            first = await ctx.host.append([Message("user", "one")])
            assert isinstance(first, Appending)
            seen.append(first)
            seen.append(await ctx.host.append([Message("user", "two")], after=first.leaf_node_id))
            for after in ("s.1.99", "s.1.0", "s.9.0", "other.1.0"):
                seen.append(await ctx.host.append([Message("user", after)], after=after))

    @tool
    def note() -> str:
        """Note."""
        return "noted"

    def answer(request: ModelRequest) -> Any:
        asked = any(message.tool_calls for message in request.messages)
        return "done" if asked else [ToolCall("a", "note")]

    agent = Agent(FunctionModel(answer), tools=[note], plugins=[Appender()])
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        await session.run("go")

        assert [type(each) for each in seen] == [Appending, Appending, StaleBranch, Appending, StaleBranch, StaleBranch]
        fork = await session.fork(seen[0].leaf_node_id)
        assert "one" in [message.text for message in await fork.history()]
        with pytest.raises(UnknownNode):
            await session.fork("s.1.99")
