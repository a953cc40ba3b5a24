"""Whoever waits in a turn for what can only end after it is told so at once; whatever would end is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Agent, Plugin, ProcessContext, Runtime, ToolCall, ToolContext, process, tool
from perdure.errors import WaitsForItself
from perdure.model.llm import ModelRequest
from perdure.model.outcome import ProviderFailed
from perdure.model.tool import Failed, Ok
from perdure.plugins.hooks import TurnContext, TurnEndContext
from perdure.sessions.session import Session
from perdure.testing import FunctionModel, ScriptedModel
from tests.kit import SOON, Place, texts

REFUSED = (
    "WaitsForItself: the next turn of session 'chat' can only end after turn chat.1, which would wait for it: use "
    "`send`, `steer` or `start` and do not wait for the result, or ask in another session"
)

Do = Callable[[Session], Awaitable[Any]]


def acting(do: Do, sessions: list[Session]) -> Agent[str]:
    """An agent whose tool does something with a session, once."""

    @tool
    async def act() -> Any:
        return await do(sessions[0])

    return Agent(ScriptedModel([[ToolCall("a", "act")], "first", "second"]), name="actor", tools=[act])


async def acted(place: Place, do: Do) -> tuple[Any, list[str]]:
    """How the call ended, and all that was said in the end."""
    sessions = list[Session]()
    async with place.runtime(acting(do, sessions)) as runtime:
        sessions.append(await runtime.session("chat"))
        result = await asyncio.wait_for(sessions[0].run("go"), SOON)
        assert await runtime.wait_idle(SOON)
        return result.tool_calls[0].outcome, texts(await sessions[0].history())


async def streamed(session: Session) -> str:
    async with session.stream("more") as turn:
        return (await turn.result()).text


@pytest.mark.parametrize(
    "do",
    [
        pytest.param(lambda session: session.run("more"), id="run"),
        pytest.param(lambda session: session.run("more", timeout=SOON), id="run with a timeout"),
        pytest.param(streamed, id="stream"),
        pytest.param(lambda session: asyncio.create_task(session.run("more")), id="in a task of its own"),
    ],
)
async def test_a_tool_that_runs_its_own_session_is_refused_before_anything_is_written(place: Place, do: Do) -> None:
    outcome, said = await acted(place, do)

    assert outcome == Failed("tool_raised", REFUSED)
    assert said == ["go", "", "", "first"]


async def test_a_sync_tool_that_runs_its_own_session_from_its_thread_is_refused(place: Place) -> None:
    sessions, loop = list[Session](), asyncio.get_running_loop()

    @tool
    def act() -> str:
        return asyncio.run_coroutine_threadsafe(sessions[0].run("more"), loop).result(SOON).text

    agent = Agent(ScriptedModel([[ToolCall("a", "act")], "first"]), tools=[act])
    async with place.runtime(agent) as runtime:
        sessions.append(await runtime.session("chat"))
        result = await asyncio.wait_for(sessions[0].run("go"), SOON)

    assert result.tool_calls[0].outcome == Failed("tool_raised", REFUSED)


async def sent(session: Session) -> Any:
    return (await (await session.send("more")).result()).text


async def steered(session: Session) -> Any:
    return (await (await session.steer("more")).result()).text


async def with_a_key(session: Session) -> Any:
    return (await session.run("more", key="k")).text


@pytest.mark.parametrize("do", [sent, with_a_key])
async def test_waiting_for_what_was_queued_is_refused_and_it_runs_all_the_same(place: Place, do: Do) -> None:
    outcome, said = await acted(place, do)

    assert isinstance(outcome, Failed)
    assert outcome.message.startswith("WaitsForItself: turn chat.2 can only end after turn chat.1,")
    assert said == ["go", "", "", "first", "more", "second"]


async def test_waiting_for_what_was_steered_is_refused_and_it_is_heard_all_the_same(place: Place) -> None:
    outcome, said = await acted(place, steered)

    assert isinstance(outcome, Failed)
    assert outcome.message.startswith("WaitsForItself: turn chat.2 can only end after turn chat.1,")
    assert said == ["go", "", "", "more", "first"]


async def test_waiting_for_the_turn_that_a_tool_is_called_in_is_refused(place: Place) -> None:
    outcome, _ = await acted(place, lambda session: session.result("chat.1"))

    assert isinstance(outcome, Failed)
    assert outcome.message.startswith("WaitsForItself: turn chat.1 can only end after turn chat.1,")


async def test_what_has_ended_is_told_to_a_tool_of_the_same_session(place: Place) -> None:
    sessions = list[Session]()

    @tool
    async def recall() -> list[str]:
        session = sessions[0]
        again = await session.run("one", key="k")
        return [again.text, (await session.result("chat.1")).text, *texts(await session.history())]

    agent = Agent(ScriptedModel(["first", [ToolCall("r", "recall")], "done"]), tools=[recall])
    async with place.runtime(agent) as runtime:
        sessions.append(await runtime.session("chat"))
        await sessions[0].run("one", key="k")
        result = await asyncio.wait_for(sessions[0].run("two"), SOON)

    assert result.tool_calls[0].outcome == Ok(["first", "first", "one", "first"])


async def test_a_tool_may_run_another_session_and_one_of_the_same_name_elsewhere(place: Place) -> None:
    rooms = list[Runtime]()

    @tool
    async def ask() -> list[str]:
        other = Agent(ScriptedModel(["there"]), name="other")
        async with Runtime("memory", agents=[other]) as elsewhere:
            there = await (await elsewhere.session("chat")).run("hello")
        near = await (await rooms[0].session("beside", agent="other")).run("hello")
        return [near.text, there.text]

    agent = Agent(ScriptedModel([[ToolCall("a", "ask")], "done"]), name="asker", tools=[ask])
    async with place.runtime(agent, Agent(ScriptedModel(["near"]), name="other")) as runtime:
        rooms.append(runtime)
        result = await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)

    assert result.tool_calls[0].outcome == Ok(["near", "there"])


async def test_a_task_that_a_tool_left_behind_may_run_its_session_once_the_tool_has_ended(place: Place) -> None:
    left, sessions, ended = list[asyncio.Task[str]](), list[Session](), asyncio.Event()

    async def later() -> str:
        await ended.wait()
        return (await sessions[0].run("more")).text

    @tool
    async def leave() -> None:
        left.append(asyncio.create_task(later()))

    def answer(request: ModelRequest) -> Any:
        if request.messages[-1].text == "go":
            return [ToolCall("l", "leave")]
        ended.set()  # the tool has ended, its turn has not
        return f"answer {len(request.messages)}"

    async with place.runtime(Agent(FunctionModel(answer), tools=[leave])) as runtime:
        sessions.append(await runtime.session("chat"))
        await asyncio.wait_for(sessions[0].run("go"), SOON)

        assert await asyncio.wait_for(left[0], SOON) == "answer 5"


async def test_a_provider_that_runs_the_session_it_answers_in_is_refused(place: Place) -> None:
    sessions = list[Session]()

    async def ask(request: ModelRequest) -> str:
        return (await sessions[0].run("more")).text

    async with place.runtime(Agent(FunctionModel(ask))) as runtime:
        sessions.append(await runtime.session("chat"))
        result = await asyncio.wait_for(sessions[0].run("go"), SOON)

    assert isinstance(result.outcome, ProviderFailed)
    assert (result.outcome.code, result.outcome.message) == ("waits_for_itself", REFUSED)


class Eager(Plugin):
    """Runs the session that it sits in."""

    id = "eager"

    def __init__(self, at: str, sessions: list[Session]) -> None:
        self._at, self._sessions = at, sessions
        self.refused: list[str] = []

    async def before_turn(self, ctx: TurnContext) -> None:
        await self._ask("before_turn")

    async def turn_persisted(self, ctx: TurnEndContext) -> None:
        await self._ask("turn_persisted")

    async def _ask(self, at: str) -> None:
        if at == self._at:
            with pytest.raises(WaitsForItself) as raised:
                await self._sessions[0].run("more")
            self.refused.append(f"WaitsForItself: {raised.value}")


@pytest.mark.parametrize("at", ["before_turn", "turn_persisted"])
async def test_a_hook_that_runs_its_own_session_is_refused(place: Place, at: str) -> None:
    """Also after the commit: the next turn begins when the hooks of this one are done."""
    sessions = list[Session]()
    eager = Eager(at, sessions)
    async with place.runtime(Agent(ScriptedModel(["first"]), plugins=[eager])) as runtime:
        sessions.append(await runtime.session("chat"))
        result = await asyncio.wait_for(sessions[0].run("go"), SOON)

    assert result.text == "first"
    assert eager.refused == [REFUSED]


# ---------------------------------------------------------------------- more than one


async def test_two_sessions_whose_tools_run_each_other_do_not_hang(place: Place) -> None:
    rooms = list[Runtime]()

    @tool
    async def ask_b() -> str:
        return (await (await rooms[0].session("b", agent="b")).run("from a")).text

    @tool
    async def ask_a() -> str:
        return (await (await rooms[0].session("a", agent="a")).run("from b")).text

    a = Agent(ScriptedModel([[ToolCall("x", "ask_b")], "a"]), name="a", tools=[ask_b])
    b = Agent(ScriptedModel([[ToolCall("y", "ask_a")], "b"]), name="b", tools=[ask_a])
    async with place.runtime(a, b) as runtime:
        rooms.append(runtime)
        result = await asyncio.wait_for((await runtime.session("a", agent="a")).run("go"), SOON)
        other = await (await runtime.session("b")).result("b.1")

    assert result.tool_calls[0].outcome == Ok("b")
    failed = other.tool_calls[0].outcome
    assert isinstance(failed, Failed)
    assert failed.message.startswith(
        "WaitsForItself: the next turn of session 'a' can only end after turn b.1, which would wait for it"
    )


async def test_a_subagent_that_runs_the_session_which_waits_for_it_does_not_hang(place: Place) -> None:
    rooms = list[Runtime]()

    @tool
    async def ask_back() -> str:
        return (await (await rooms[0].session("chat", agent="parent")).run("may I?")).text

    child = Agent(ScriptedModel([[ToolCall("y", "ask_back")], "child"]), name="child", tools=[ask_back])
    tools = [child.as_tool(description="A child.")]
    agent = Agent(ScriptedModel([[ToolCall("c", "child", {"task": "x"})], "done"]), name="parent", tools=tools)
    async with place.runtime(agent, child) as runtime:
        rooms.append(runtime)
        result = await asyncio.wait_for((await runtime.session("chat", agent="parent")).run("go"), SOON)
        inner = await (await runtime.session("chat.1.1.0~child")).result("chat.1.1.0~child.1")

    assert result.tool_calls[0].outcome == Ok("child")
    failed = inner.tool_calls[0].outcome
    assert isinstance(failed, Failed)
    assert failed.message.startswith("WaitsForItself: the next turn of session 'chat' can only end after")


async def test_a_process_that_runs_the_session_which_waits_for_it_does_not_hang(place: Place) -> None:
    """Whichever of the two begins to wait last is told."""
    rooms = list[Runtime]()

    @process
    async def consult(ctx: ProcessContext) -> str:
        async def ask() -> str:
            return (await (await rooms[0].session("chat")).run("may I?")).text

        return str(await ctx.step(ask))

    @tool
    async def start(ctx: ToolContext[None]) -> str:
        return str(await (await ctx.start(consult)).result())

    agent = Agent(ScriptedModel([[ToolCall("c", "start")], "done", "yes"]), tools=[start])
    async with place.runtime(agent, processes=[consult]) as runtime:
        rooms.append(runtime)
        result = await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)

    failed = result.tool_calls[0].outcome
    assert isinstance(failed, Failed)
    assert "can only end after" in failed.message


async def test_a_turn_that_a_tool_only_sent_may_run_the_tools_session(place: Place) -> None:
    """It began in the middle of the tool, and works for itself: nobody waits for it."""
    rooms, asks, release = list[Runtime](), asyncio.Event(), asyncio.Event()

    async def asking(request: ModelRequest) -> str:
        session = await rooms[0].session("chat", agent="sender")
        running = asyncio.create_task(session.run("may I?"))
        asks.set()
        return (await running).text

    @tool
    async def send() -> str:
        await (await rooms[0].session("other", agent="other")).send("hello")
        await asks.wait()
        await release.wait()
        return "sent"

    sender = Agent(ScriptedModel([[ToolCall("s", "send")], "done", "you may"]), name="sender", tools=[send])
    async with place.runtime(sender, Agent(FunctionModel(asking), name="other")) as runtime:
        rooms.append(runtime)
        receipt = await (await runtime.session("chat", agent="sender")).send("go")
        await asyncio.wait_for(asks.wait(), SOON)
        release.set()

        assert (await receipt.result(SOON)).tool_calls[0].outcome == Ok("sent")
        assert (await (await runtime.session("other")).result("other.1")).text == "you may"


async def test_a_process_that_a_tool_only_started_may_run_the_tools_session(place: Place) -> None:
    rooms, asks, release = list[Runtime](), asyncio.Event(), asyncio.Event()

    @process
    async def consult(ctx: ProcessContext) -> str:
        async def ask() -> str:
            running = asyncio.create_task((await rooms[0].session("chat")).run("may I?"))
            asks.set()
            return (await running).text

        return str(await ctx.step(ask))

    @tool
    async def start(ctx: ToolContext[None]) -> str:
        handle = await ctx.start(consult)
        await release.wait()
        return handle.id

    agent = Agent(ScriptedModel([[ToolCall("s", "start")], "done", "you may"]), tools=[start])
    async with place.runtime(agent, processes=[consult]) as runtime:
        rooms.append(runtime)
        receipt = await (await runtime.session("chat")).send("go")
        await asyncio.wait_for(asks.wait(), SOON)
        release.set()
        started = (await receipt.result(SOON)).tool_calls[0].outcome

        assert isinstance(started, Ok)
        assert await runtime.handle(started.value).result(SOON) == "you may"
