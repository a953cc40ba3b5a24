"""What plugins make of a prompt: pieces by slot, views by priority, frames by the first who has one, projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from perdure import Agent, Message, ModelRequest, ToolCall, tool
from perdure.model.outcome import Finished
from perdure.model.plugin import Compaction, PromptPart
from perdure.model.record import Framed
from perdure.model.tool import Ok
from perdure.plugins.hooks import Plugin
from perdure.testing import FunctionModel
from perdure.turn.prompt import compose
from tests.kit import Place, texts
from tests.plugins.made import having

# ---------------------------------------------------------------------- pieces


def test_pieces_stand_by_slot_name_then_by_priority_then_as_they_came() -> None:
    parts = [
        PromptPart("third", "b", 1),
        PromptPart("fourth", "b", 1),
        PromptPart("fifth", "b", 2),
        PromptPart("second", "b", -1),
        PromptPart("first", "a", 9),
    ]

    assert compose("Instructions.", parts) == "Instructions.\n\nfirst\n\nsecond\n\nthird\n\nfourth\n\nfifth"


def test_piece_that_is_said_again_at_the_same_place_is_dropped_whatever_its_title() -> None:
    parts = [
        PromptPart("Be kind.", title="Tone"),
        PromptPart("  Be kind.\n", title="Manners"),
        PromptPart("Be kind.", priority=1),
        PromptPart("Be kind.", slot="other"),
        PromptPart("   "),
    ]

    assert compose("", parts) == "## Tone\nBe kind.\n\nBe kind.\n\nBe kind."


pieces = st.builds(PromptPart, st.sampled_from(["x", " x", "y", ""]), st.sampled_from("ab"), st.integers(0, 2))


@given(st.lists(pieces))
def test_every_piece_is_there_once_and_in_order(parts: list[PromptPart]) -> None:
    wanted = {(part.slot, part.priority, part.content.strip()) for part in parts if part.content.strip()}
    shown = compose("", parts).split("\n\n")

    assert sorted(shown) == sorted([content for *_, content in wanted] or [""])
    assert compose("", [*parts, *parts]) == compose("", parts)


def heard(request: ModelRequest) -> str:
    return " | ".join([f"{message.role}: {message.text}" for message in request.messages])


async def test_pieces_of_all_plugins_reach_the_model(place: Place) -> None:
    plugins = [
        having("prompt", lambda ctx: ["Be brief.", PromptPart("You are Kim.", "about")], "one"),
        having("prompt", lambda ctx: "Be brief.", "two"),
    ]
    async with place.runtime(Agent(FunctionModel(heard), instructions="Help.", plugins=plugins)) as runtime:
        result = await (await runtime.session("s")).run("hello")

    assert result.text == "system: Help.\n\nYou are Kim.\n\nBe brief. | user: hello"


# ---------------------------------------------------------------------- views and frames


def views(id: str, priority: int) -> Plugin:
    def add(ctx: Any, messages: Sequence[Message]) -> list[Message]:
        return [*messages, Message("user", id)]

    return having("transform_view", add, id, priority=priority)


async def test_views_are_changed_by_descending_priority_and_what_is_stored_stays(place: Place) -> None:
    agent = Agent(FunctionModel(heard), plugins=[views("last", -1), views("second", 5), views("first", 9)])
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        result = await session.run("hello")
        history = await session.history()

    assert result.text == "user: hello | user: first | user: second | user: last"
    assert texts(history) == ["hello", result.text]


async def test_first_frame_that_is_not_empty_wins_and_later_compactors_are_not_asked(place: Place) -> None:
    asked: list[str] = []

    def compactor(id: str, priority: int, summary: tuple[Message, ...] | None) -> Plugin:
        async def compact(ctx: Any) -> Compaction | None:
            asked.append(id)
            return None if summary is None or ctx.turn_id == "s.1" else Compaction(summary, id)

        return having("compact", compact, id, priority=priority)

    plugins = [
        compactor("never", 1, (Message("assistant", "not this"),)),
        compactor("wins", 2, (Message("assistant", "in short"),)),
        compactor("empty", 3, ()),
        compactor("none", 4, None),
    ]
    async with place.runtime(Agent(FunctionModel(heard), plugins=plugins)) as runtime:
        session = await runtime.session("s")
        await session.run("hello")
        asked.clear()
        result = await session.run("and now?")
        history = texts(await session.history())

    assert asked == ["none", "empty", "wins"]
    assert [(each.reason, texts(each.summary)) for each in result.records if isinstance(each, Framed)] == [
        ("wins", ["in short"])
    ]
    assert result.text == "assistant: in short | user: and now?"
    assert history == ["hello", "user: hello", "and now?", result.text], "nothing that was said is gone"


# ---------------------------------------------------------------------- projections


@tool
def look() -> dict[str, str]:
    """Look."""
    return {"secret": "4711", "shown": "tea"}


def model(request: ModelRequest) -> Any:
    results = request.messages[-1].tool_results
    return f"saw {results[0].content}" if results else [ToolCall("c", "look")]


async def test_projector_decides_what_the_model_sees_and_the_whole_is_kept(place: Place) -> None:
    plugin = having("project_result", lambda ctx: {"shown": ctx.outcome.value["shown"]})
    async with place.runtime(Agent(FunctionModel(model), tools=[look], plugins=[plugin])) as runtime:
        result = await (await runtime.session("s")).run("go")
    async with place.runtime(Agent(FunctionModel(model), tools=[look])) as runtime:
        [call] = (await (await runtime.session("s")).result("s.1")).tool_calls
        assert isinstance(call.outcome, Ok)
        assert call.outcome.whole is not None
        whole = await runtime.store.blobs.get(call.outcome.whole.digest)

    assert result.outcome == Finished("saw {'shown': 'tea'}")
    assert (call.outcome.value, whole) == ({"shown": "tea"}, b'{"secret":"4711","shown":"tea"}')


async def test_prose_is_shown_to_people_as_its_projector_says_or_withheld_and_stays_as_it_is(place: Place) -> None:
    shouting = having("project_prose", lambda ctx, text: text.upper())

    def broken(ctx: Any, text: str) -> str:
        raise ValueError("oh")

    async with place.runtime(Agent(FunctionModel(lambda request: "well"), plugins=[shouting])) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        loud = texts(await session.history())
    async with place.runtime(
        Agent(FunctionModel(lambda request: "well"), plugins=[having("project_prose", broken)])
    ) as runtime:
        kept = texts(await (await runtime.session("s")).history())

    assert (result.text, loud, kept) == ("well", ["go", "WELL"], ["go", "text withheld: plugin 'p' failed"])
