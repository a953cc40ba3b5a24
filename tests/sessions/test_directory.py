"""The sessions of a store: listing, deleting, whose they are, and runtimes that only look."""

import asyncio

import pytest

from perdure import Agent, ModelRequest, Runtime, ToolCall, tool
from perdure.errors import (
    AlreadyAnswered,
    InvalidDefinition,
    SessionDeleted,
    UnknownCall,
    WrongAgent,
)
from perdure.model.outcome import Waiting
from perdure.testing import FunctionModel, ScriptedModel, VirtualClock
from tests.kit import SOON, Place, TellingModel, texts


def echo(name: str = "assistant") -> Agent[str]:
    return Agent(FunctionModel(lambda request: f"{name}: {request.messages[-1].text}"), name=name)


async def test_sessions_are_listed_by_their_latest_change(place: Place) -> None:
    clock = VirtualClock()
    async with place.runtime(echo(), clock=clock) as runtime:
        for name in ("a", "b", "c", "a"):
            clock.advance(1)
            await (await runtime.session(name)).run("hello")

        assert [row.id for row in await runtime.sessions.list()] == ["a", "c", "b"]
        assert [row.id for row in await runtime.sessions.list(limit=2)] == ["a", "c"]


async def test_a_list_may_be_narrowed(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(echo(), Agent(model, name="slow"), grace=0) as runtime:
        await (await runtime.session("team-1")).run("hello")
        await (await runtime.session("team_2")).run("hello")
        await (await runtime.session("team-3", agent="slow")).send("hello")
        await model.next()
        sessions = runtime.sessions

        assert {row.id for row in await sessions.list(prefix="team-")} == {"team-1", "team-3"}
        assert [row.id for row in await sessions.list(agent="slow")] == ["team-3"]
        assert [row.id for row in await sessions.list(state="open")] == ["team-3"]
        assert await sessions.list(prefix="%") == []


async def test_a_deleted_session_is_gone_and_its_id_is_spent(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        await session.run("hello", key="m1")

        assert await runtime.sessions.delete("chat")
        assert not await runtime.sessions.delete("chat")
        assert not await runtime.sessions.delete("never was")
        assert await runtime.sessions.list() == []
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        with pytest.raises(SessionDeleted, match="choose another"):
            await session.run("hello", key="m1")
        with pytest.raises(SessionDeleted):
            await session.history()
        with pytest.raises(SessionDeleted):
            await session.result("chat.1")
        with pytest.raises(SessionDeleted):
            await session.pending()


async def test_deleting_a_busy_session_stops_it_and_tells_who_waits(place: Place) -> None:
    asked, stopped = asyncio.Event(), asyncio.Event()

    async def hang(request: ModelRequest) -> None:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with place.runtime(Agent(FunctionModel(hang)), echo("echo")) as runtime:
        session = await runtime.session("chat")
        running, queued = await session.send("one"), await session.send("two")
        waiters = [asyncio.create_task(r.result(SOON)) for r in (running, queued)]
        await asked.wait()
        await runtime.sessions.delete("chat")
        ends = await asyncio.gather(*waiters, return_exceptions=True)

        assert [type(e) for e in ends] == [SessionDeleted, SessionDeleted]
        await asyncio.wait_for(stopped.wait(), SOON)
        other = await runtime.session("other", agent="echo")
        assert (await other.run("hello")).text == "echo: hello"


async def test_deleting_a_parked_session_revokes_its_questions(place: Place) -> None:
    @tool(approval="ask")
    async def shoot() -> str:
        return "bang"

    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "shoot")]]), tools=[shoot])) as runtime:
        session = await runtime.session("chat")
        parked = await session.run("go")
        await runtime.sessions.delete("chat")

        assert isinstance(parked.outcome, Waiting)
        with pytest.raises(UnknownCall):
            await session.approve(parked.outcome.calls[0].call_id)


async def test_a_session_belongs_to_its_agent(place: Place) -> None:
    async with place.runtime(echo("one"), echo("two")) as runtime:
        assert (await (await runtime.session("a")).run("hello")).text == "one: hello"
        assert (await (await runtime.session("b", agent="two")).run("hello")).text == "two: hello"

        with pytest.raises(WrongAgent, match="open it with agent='one'"):
            await runtime.session("a", agent="two")
        again = await runtime.session("b")
        assert (again.agent, (await again.run("more")).text) == ("two", "two: more")


async def test_two_handles_that_race_for_a_new_session_with_different_agents(place: Place) -> None:
    async with place.runtime(echo("one"), echo("two")) as runtime:
        first = await runtime.session("chat", agent="one")
        second = await runtime.session("chat", agent="two")
        await first.run("hello")

        with pytest.raises(WrongAgent):
            await second.run("hello")
        assert texts(await first.history()) == ["hello", "one: hello"]


async def test_an_agent_that_is_not_here_is_named(place: Place) -> None:
    async with place.runtime(echo("one")) as runtime:
        with pytest.raises(InvalidDefinition, match="it has: one"):
            await runtime.session("chat", agent="two")
    async with place.runtime() as runtime:
        with pytest.raises(InvalidDefinition, match="no agents"):
            await runtime.session("chat")


async def test_two_agents_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidDefinition, match="two agents are named 'a'"):
        Runtime("memory", agents=[echo("a"), echo("a")])


async def test_unknown_calls_are_refused_with_advice(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        await session.run("hello")

        for call in ("chat.1.1.0", "chat.9.9.9", "nonsense", "", "other.1.1.0"):
            with pytest.raises(UnknownCall, match=r"session\.pending"):
                await session.approve(call)
            with pytest.raises(UnknownCall, match=r"session\.pending"):
                await session.reject(call, "no")
            with pytest.raises(UnknownCall, match=r"session\.pending"):
                await session.settle(call, "done")


async def test_a_session_of_an_agent_that_is_not_here_can_be_read_and_spoken_to(place: Place) -> None:
    async with place.runtime(echo("one")) as runtime:
        await (await runtime.session("chat")).run("hello")
    async with place.runtime(echo("two")) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("anybody?")

        assert texts(await session.history()) == ["hello", "one: hello"]
        assert await runtime.wait_idle(SOON)
    async with place.runtime(echo("one")) as runtime:
        assert (await (await runtime.session("chat")).result(receipt.turn_id)).text == "one: anybody?"


async def test_a_runtime_without_agents_accepts_and_another_one_runs_it(file: Place) -> None:
    async with file.runtime(echo()) as runtime:
        await (await runtime.session("chat")).run("hello")
    async with file.runtime() as front, file.runtime(echo()):
        session = await front.session("chat")
        result = await (await session.send("anybody?")).result(SOON)

        assert result.text == "assistant: anybody?"


async def test_a_runtime_without_agents_runs_nothing(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        await (await runtime.session("chat")).run("hello")
    async with place.runtime() as front:
        session = await front.session("chat")
        await session.send("anybody?")
        assert await front.wait_idle(SOON)

        assert texts(await session.history()) == ["hello", "assistant: hello"]
        assert [row.state for row in await front.sessions.list()] == ["open"]


async def test_a_runtime_without_agents_approves_and_another_one_goes_on(file: Place) -> None:
    @tool(approval="ask")
    async def shoot() -> str:
        return "bang"

    agent = Agent(ScriptedModel([[ToolCall("a", "shoot")], "shot"]), tools=[shoot])
    async with file.runtime(agent) as working, file.runtime() as front:
        parked = await (await working.session("chat")).run("go")
        session = await front.session("chat")
        pending = await session.pending()
        await session.approve(pending[0].call_id, by="operator")

        assert (await session.result(parked.turn_id)).text == "shot"
        with pytest.raises(AlreadyAnswered):
            await session.reject(pending[0].call_id)


async def test_without_recovery_the_work_of_others_is_left_alone(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model), grace=0) as runtime:
        await (await runtime.session("old")).send("go")
        await model.next()
    async with place.runtime(echo(), recover=False) as runtime:
        new = await runtime.session("new")

        assert (await new.run("hello")).text == "assistant: hello"
        assert [row.id for row in await runtime.sessions.list(state="open")] == ["old"]
    async with place.runtime(echo()) as runtime:
        assert (await (await runtime.session("old")).result("old.1")).text == "assistant: go"
