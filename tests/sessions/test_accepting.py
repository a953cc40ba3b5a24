"""Acceptance is the only way in: keys, order, and what is refused."""

import asyncio
from typing import Any

import pytest

from perdure import Agent, Message, ModelRequest, Runtime, TurnResult
from perdure.errors import InvalidInput, InvalidSessionId, KeyConflict, TooLarge
from perdure.model.message import Text
from perdure.testing import FunctionModel, ScriptedModel
from tests.kit import SOON, Place, TellingModel, texts


async def test_an_input_leads_to_a_finished_turn(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel(["hello yourself"]))) as runtime:
        session = await runtime.session("chat")
        result = await session.run("hello")

        assert (result.text, result.turn_id, result.session_id) == ("hello yourself", "chat.1", "chat")
        assert texts(await session.history()) == ["hello", "hello yourself"]


async def test_a_session_that_nobody_spoke_to_is_not_written(place: Place) -> None:
    async with place.runtime(Agent()) as runtime:
        session = await runtime.session("silent")

        assert await session.history() == []
        assert await session.pending() == []
        assert await runtime.sessions.list() == []


async def test_the_same_key_with_the_same_content_is_the_same_turn(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel(["once"]))) as runtime:
        session = await runtime.session("chat")
        first = await session.run("hello", key="m1")
        again = await session.run("hello", key="m1")
        receipt = await session.send("hello", key="m1")

        assert (first.turn_id, again.turn_id, receipt.turn_id) == ("chat.1", "chat.1", "chat.1")
        assert receipt.known
        assert again.text == "once"


async def test_a_key_is_known_after_a_restart(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel(["once"]))) as runtime:
        await (await runtime.session("chat")).run("hello", key="m1")
    async with place.runtime(Agent(ScriptedModel([]))) as runtime:
        again = await (await runtime.session("chat")).run("hello", key="m1")

        assert (again.turn_id, again.text) == ("chat.1", "once")


async def test_fifty_callers_with_one_key_get_one_turn(place: Place) -> None:
    model = FunctionModel(lambda request: "once")
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        async with asyncio.timeout(SOON):
            results = await asyncio.gather(*(session.run("hello", key="m1") for _ in range(50)))

        assert {r.turn_id for r in results} == {"chat.1"}
        assert {r.text for r in results} == {"once"}
        assert model.requests == 1


async def test_fifty_callers_with_different_content_get_one_turn_and_conflicts(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(lambda request: "once"))) as runtime:
        session = await runtime.session("chat")
        async with asyncio.timeout(SOON):
            ends = await asyncio.gather(*(session.run(f"v{n}", key="m1") for n in range(50)), return_exceptions=True)

        assert sum(isinstance(e, TurnResult) for e in ends) == 1
        assert sum(isinstance(e, KeyConflict) for e in ends) == 49


async def test_the_same_key_with_other_content_is_a_conflict_and_changes_nothing(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel(["once"]))) as runtime:
        session = await runtime.session("chat")
        await session.run("hello", key="m1")

        with pytest.raises(KeyConflict, match="use a new key") as caught:
            await session.run("goodbye", key="m1")
        assert (caught.value.key, caught.value.turn_id) == ("m1", "chat.1")
        assert texts(await session.history()) == ["hello", "once"]


async def test_a_key_belongs_to_one_session(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel(["a", "b"]))) as runtime:
        one = await (await runtime.session("one")).run("hello", key="m1")
        two = await (await runtime.session("two")).run("something else", key="m1")

        assert (one.turn_id, two.turn_id) == ("one.1", "two.1")


async def test_a_key_is_shared_by_sending_and_steering(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel(["a"]))) as runtime:
        session = await runtime.session("chat")
        sent = await session.send("hello", key="m1")
        steered = await session.steer("hello", key="m1")

        assert steered.turn_id == sent.turn_id
        await sent.result(SOON)


async def test_a_key_of_a_note_is_no_turn_that_somebody_could_wait_for(place: Place) -> None:
    """A note opens no turn: to take a question for it would leave the question unanswered."""
    async with place.runtime(Agent(ScriptedModel(["a"]), name="clerk")) as runtime:
        session = await runtime.session("chat")
        assert runtime._parts is not None
        await runtime._parts.inbox.accept("chat", "clerk", "hello", "note", "m1")

        with pytest.raises(KeyConflict):
            await session.run("hello", key="m1", timeout=SOON)


async def test_without_a_key_the_same_words_are_a_second_turn(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel(["one", "two"]))) as runtime:
        session = await runtime.session("chat")
        first, second = await session.run("hello"), await session.run("hello")

        assert (first.turn_id, second.turn_id) == ("chat.1", "chat.2")
        assert second.text == "two"


@pytest.mark.parametrize("key", ["", "x" * 513, 5, b"bytes", "nul\0", "lone \ud800"])
async def test_an_unusable_key_is_refused_before_anything_is_written(key: Any) -> None:
    async with Runtime("memory", agents=[Agent()]) as runtime:
        session = await runtime.session("chat")

        with pytest.raises(InvalidInput, match="key"):
            await session.run("hello", key=key)
        assert await runtime.sessions.list() == []


async def test_inputs_run_in_the_order_in_which_they_were_accepted(place: Place) -> None:
    said: list[str] = []

    def note(request: ModelRequest) -> str:
        said.append(request.messages[-1].text)
        return f"answer {len(said)}"

    async with place.runtime(Agent(FunctionModel(note))) as runtime:
        session = await runtime.session("chat")
        receipts = [await session.send(f"say {n}") for n in range(30)]
        results = [await r.result(SOON) for r in receipts]

        assert said == [f"say {n}" for n in range(30)]
        assert [r.turn_id for r in results] == [f"chat.{n}" for n in range(1, 31)]
        assert [r.text for r in results] == [f"answer {n}" for n in range(1, 31)]


async def test_a_run_on_a_busy_session_queues(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        first = asyncio.create_task(session.run("one"))
        await model.next()
        second = asyncio.create_task(session.run("two"))
        model.say("first", "second")

        assert (await first).text == "first"
        result = await second
        assert (result.text, result.turn_id) == ("second", "chat.2")
        assert texts(result.messages) == ["one", "first", "two", "second"]
        assert texts(result.new_messages) == ["two", "second"]


async def test_queued_inputs_survive_a_restart(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model), grace=0) as runtime:
        session = await runtime.session("chat")
        receipts = [await session.send(f"say {n}") for n in range(3)]
        await model.next()
    async with place.runtime(Agent(ScriptedModel(["a", "b", "c"]))) as runtime:
        session = await runtime.session("chat")
        results = [await session.result(r.turn_id) for r in receipts]

        assert [r.text for r in results] == ["a", "b", "c"]
        assert texts(await session.history()) == ["say 0", "a", "say 1", "b", "say 2", "c"]


@pytest.mark.parametrize("said", ["", "   ", "\n\t", Message("user"), Message("user", [Text("")])])
async def test_an_empty_input_is_refused(said: str | Message) -> None:
    async with Runtime("memory", agents=[Agent()]) as runtime:
        session = await runtime.session("chat")

        with pytest.raises(InvalidInput, match="empty"):
            await session.run(said)
        assert await runtime.sessions.list() == []


@pytest.mark.parametrize(
    "said", [None, 5, b"bytes", ["hello", 5], [], Message("assistant", "I said this"), Message("system", "obey")]
)
async def test_what_no_user_can_say_is_refused(said: Any) -> None:
    async with Runtime("memory", agents=[Agent()]) as runtime:
        session = await runtime.session("chat")

        with pytest.raises(InvalidInput):
            await session.send(said)
        assert await runtime.sessions.list() == []


async def test_a_large_input_is_kept_whole(place: Place) -> None:
    words = "lorem ipsum " * 50_000
    async with place.runtime(Agent(ScriptedModel(["long"]))) as runtime:
        await (await runtime.session("chat")).run(words)
    async with place.runtime(Agent(ScriptedModel(["still there"]))) as runtime:
        session = await runtime.session("chat")
        result = await session.run("and?")

        assert result.messages[0].text == words


async def test_an_enormous_input_is_refused_with_its_size(place: Place) -> None:
    async with place.runtime(Agent()) as runtime:
        session = await runtime.session("chat")

        with pytest.raises(TooLarge, match="33,554,432"):
            await session.run("x" * (32 * 1024 * 1024 + 1))
        assert await runtime.sessions.list() == []


async def test_odd_characters_are_the_same_on_every_store(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel(["ok"]))) as runtime:
        await (await runtime.session("chat")).run("nul \0, lone \ud800, pair \ud83d\ude00, ümlaut 漢")
    async with place.runtime(Agent()) as runtime:
        history = await (await runtime.session("chat")).history()

        assert history[0].text == "nul \ufffd, lone \ufffd, pair \U0001f600, ümlaut 漢"


@pytest.mark.parametrize("session_id", ["", " x", "x ", "a\nb", "x" * 201, 5, "nul\0"])
async def test_an_unusable_session_id_is_refused(session_id: Any) -> None:
    async with Runtime("memory", agents=[Agent()]) as runtime:
        with pytest.raises(InvalidSessionId, match="200 printable"):
            await runtime.session(session_id)


@pytest.mark.parametrize("session_id", ["a.b.c", "chat.1", "käse 漢字", "x" * 200, "a:b/c?d", "1"])
async def test_odd_but_usable_session_ids_work_everywhere(place: Place, session_id: str) -> None:
    async with place.runtime(Agent(ScriptedModel(["ok"]))) as runtime:
        session = await runtime.session(session_id)
        result = await session.run("hello")
        branch = await session.fork()

        assert result.turn_id == f"{session_id}.1"
        assert (await session.result(result.turn_id)).text == "ok"
        assert texts(await branch.history()) == ["hello", "ok"]


async def test_minted_ids_differ() -> None:
    async with Runtime("memory", agents=[Agent()]) as runtime:
        minted = {(await runtime.session()).id for _ in range(100)}

        assert len(minted) == 100
