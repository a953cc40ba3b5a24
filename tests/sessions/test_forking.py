"""Forks share history, cost no copy, and go their own way."""

import pytest

from perdure import Agent, ToolCall, tool
from perdure.errors import InvalidSessionId, SessionDeleted, UnknownNode, UnknownSession
from perdure.testing import FunctionModel, ScriptedModel
from tests.kit import SOON, Place, TellingModel, texts


def echo() -> Agent[str]:
    return Agent(FunctionModel(lambda request: f"re: {request.messages[-1].text}"))


@tool
async def look() -> str:
    return "seen"


async def test_a_fork_shares_history_and_diverges(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        await session.run("one")
        branch = await session.fork()
        await session.run("two")
        await branch.run("other")

        assert texts(await session.history()) == ["one", "re: one", "two", "re: two"]
        assert texts(await branch.history()) == ["one", "re: one", "other", "re: other"]


async def test_reading_a_fork_twice_shows_its_past_once(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        await session.run("one")
        branch = await session.fork()

        assert texts(await branch.history()) == ["one", "re: one"]
        assert texts(await branch.history()) == ["one", "re: one"]
        assert texts((await branch.run("two")).messages) == ["one", "re: one", "two", "re: two"]


async def test_a_fork_is_the_same_after_a_restart(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        await session.run("one")
        branch = await session.fork(session_id="branch")
        await branch.run("other")
    async with place.runtime(echo()) as runtime:
        branch = await runtime.session("branch")
        result = await branch.run("more")

        assert texts(result.messages) == ["one", "re: one", "other", "re: other", "more", "re: more"]


async def test_a_fork_at_a_turn_and_at_a_node(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        for said in ("one", "two", "three"):
            await session.run(said)
        at_turn = await session.fork(at="chat.2")
        at_node = await session.fork(at="chat.1.1")
        at_input = await session.fork(at="chat.2.0")

        assert texts(await at_turn.history()) == ["one", "re: one", "two", "re: two"]
        assert texts(await at_node.history()) == ["one", "re: one"]
        assert texts(await at_input.history()) == ["one", "re: one", "two"]


async def test_a_fork_in_the_middle_of_a_turn_needs_paired_calls(place: Place) -> None:
    agent = Agent(ScriptedModel([[ToolCall("a", "look"), ToolCall("b", "look")], "done", "again"]), tools=[look])
    async with place.runtime(agent) as runtime:
        session = await runtime.session("chat")
        await session.run("go")

        with pytest.raises(UnknownNode, match="choose a later node"):
            await session.fork(at="chat.1.1")
        with pytest.raises(UnknownNode, match="choose a later node"):
            await session.fork(at="chat.1.2")
        branch = await session.fork(at="chat.1.3")
        assert [m.role for m in await branch.history()] == ["user", "assistant", "tool", "tool"]
        assert (await branch.run("and?")).text == "again"


async def test_a_fork_of_a_fork(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        await session.run("one")
        branch = await session.fork()
        await branch.run("two")
        twig = await branch.fork()
        await twig.run("three")

        expected = ["one", "re: one", "two", "re: two", "three", "re: three"]
        assert texts(await twig.history()) == expected
        assert texts(await branch.history()) == expected[:4]


async def test_a_fork_of_a_fork_that_has_said_nothing_yet(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        await session.run("one")
        twig = await (await (await session.fork()).fork()).fork()

        assert texts((await twig.run("two")).messages) == ["one", "re: one", "two", "re: two"]


async def test_a_session_without_a_committed_turn_cannot_be_forked(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model), grace=0) as runtime:
        session = await runtime.session("chat")
        with pytest.raises(UnknownSession, match=r"sessions\.list"):
            await session.fork()
        await session.send("one")
        await model.next()

        with pytest.raises(UnknownNode, match="no committed turn"):
            await session.fork()
        with pytest.raises(UnknownNode, match="not committed"):
            await session.fork(at="chat.1")


@pytest.mark.parametrize(
    ("at", "why"),
    [
        ("chat.9", "no such node"),
        ("chat.1.9", "records 0 to 1"),
        ("chat.0", "no such node"),
        ("other.1.0", "not a node of session"),
        ("nonsense", "no node id"),
        ("chat.-1.0", "no node id"),
        ("", "no node id"),
    ],
)
async def test_a_node_that_is_not_there_is_refused(place: Place, at: str, why: str) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        await session.run("one")

        with pytest.raises(UnknownNode, match=why):
            await session.fork(at=at)


async def test_a_steered_input_is_no_place_to_fork(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        await session.send("go")
        await model.next()
        steered = await session.steer("left")
        model.say("one", "two")
        await steered.result(SOON)

        with pytest.raises(UnknownNode, match="delivered into turn 1: fork there"):
            await session.fork(at=steered.turn_id)


async def test_a_fork_may_be_named_and_a_name_is_used_once(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        await session.run("one")
        branch = await session.fork(session_id="branch")
        again = await session.fork(session_id="branch")

        assert (branch.id, again.id) == ("branch", "branch")
        await session.run("two")
        with pytest.raises(InvalidSessionId, match="it is taken"):
            await session.fork(session_id="branch")
        with pytest.raises(InvalidSessionId):
            await session.fork(session_id="bad\nname")


async def test_a_fork_runs_while_its_source_does(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        model.say("first")
        await session.run("one")
        branch = await session.fork()
        busy = await session.send("two")
        await model.next()
        await model.next()
        other = await branch.send("other")
        await model.next()
        model.say("a", "b")

        assert {(await busy.result(SOON)).text, (await other.result(SOON)).text} == {"a", "b"}


async def test_deleting_the_source_leaves_its_forks_whole(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        await session.run("one")
        branch = await session.fork(session_id="branch")
        await runtime.sessions.delete("chat")

        with pytest.raises(SessionDeleted):
            await session.history()
        assert texts((await branch.run("two")).messages) == ["one", "re: one", "two", "re: two"]
    async with place.runtime(echo()) as runtime:
        assert texts(await (await runtime.session("branch")).history()) == ["one", "re: one", "two", "re: two"]


async def test_a_deleted_session_cannot_be_forked(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        await session.run("one")
        await runtime.sessions.delete("chat")

        with pytest.raises(SessionDeleted):
            await session.fork()


async def test_the_name_of_a_deleted_session_is_spent_for_forks_too(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        await session.run("one")
        await (await runtime.session("old")).run("one")
        await runtime.sessions.delete("old")

        with pytest.raises(InvalidSessionId, match="it is taken"):
            await session.fork(session_id="old")


async def test_nodes_go_with_the_last_fork_that_reaches_them(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        await session.run("one")
        branch = await session.fork()
        await runtime.sessions.delete("chat")
        kept = (await runtime.store.facts()).nodes
        await runtime.sessions.delete(branch.id)

        assert kept == 2
        assert (await runtime.store.facts()).nodes == 0
