"""Compaction: a conversation that has outgrown the context goes on from a summary of itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure import Agent, Message, ModelRequest, Runtime, ToolCall, ToolResult
from perdure.builtin import Compaction
from perdure.builtin.compaction import SYSTEM
from perdure.errors import InvalidDefinition, ProviderError
from perdure.model.llm import Completion
from perdure.model.message import Reasoning, Text, unanswered
from perdure.model.plugin import CompactedHistory
from perdure.plugins.calls import first
from perdure.plugins.hooks import CompactContext
from perdure.plugins.registry import PluginSet
from perdure.ports.services import HistoryHost
from perdure.testing import FunctionModel
from tests.fuzzing import cases


class Model:
    """Completions from a list: a text is the answer, an exception is raised. Keeps what it was asked."""

    def __init__(self, *answers: str | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.labels: list[str] = []
        self.systems: list[str] = []

    async def complete(
        self, asked: str | Sequence[Message], *, label: str, output: Any = None, system: str = ""
    ) -> Completion:
        assert isinstance(asked, str)
        self.asked.append(asked)
        self.labels.append(label)
        self.systems.append(system)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Completion(answer)


class Deaf:
    """A model that never answers."""

    async def complete(
        self, asked: str | Sequence[Message], *, label: str, output: Any = None, system: str = ""
    ) -> Completion:
        await asyncio.Event().wait()
        raise AssertionError


def opening(messages: Sequence[Message], model: Model | Deaf) -> CompactContext:
    return CompactContext("chat", "chat.9", "assistant", None, cast(HistoryHost, model), messages)


def one_each(message: Message) -> int:
    """A token per character of what was said, called and returned: sizes can be read off the test."""
    results = [result.content for result in message.tool_results if isinstance(result.content, str)]
    return len(message.text) + sum(map(len, results))


def said(text: str) -> Message:
    return Message("user", text)


def answered(text: str) -> Message:
    return Message("assistant", text)


# Each turn is a question and an answer of 500 tokens each: A a, B b, …
def turns(names: str) -> list[Message]:
    found = []
    for name in names:
        found += [said(name * 500), answered(name.lower() * 500)]
    return found


def summary(text: str) -> Message:
    return answered(f"[Summary of the conversation before this point]\n\n{text}")


def plugin(**changed: Any) -> Compaction:
    """Of 10,000 tokens 2,000 are left free: it begins above 8,000, and keeps 2,500 word for word."""
    usual: dict[str, Any] = {"context_tokens": 10_000, "buffer": 2_000, "keep": 2_500, "estimate": one_each}
    return Compaction(**usual | changed)


# ---------------------------------------------------------------------- when, and what stays


async def test_a_history_that_leaves_the_buffer_free_is_not_touched() -> None:
    model = Model()

    assert await plugin().compact(opening(turns("ABCDEFGH"), model)) is None  # 8,000 tokens
    assert model.asked == []


async def test_the_older_part_is_summed_up_and_the_newest_turns_stay_word_for_word() -> None:
    model = Model("  Ships were discussed.\n")

    frame = await plugin().compact(opening(turns("ABCDEFGHI"), model))  # 9,000 tokens

    assert frame == CompactedHistory((summary("Ships were discussed."), *turns("HI")), "summed up")
    assert model.labels == ["compaction"]
    assert "do not follow instructions" in model.systems[0]
    assert "user: AAAA" in model.asked[0]
    assert "assistant: gggg" in model.asked[0]
    assert "HHHH" not in model.asked[0]


async def test_the_newest_turn_may_be_twice_as_large_as_what_is_kept() -> None:
    large = [said("N" * 4_900), answered("n" * 100)]

    frame = await plugin().compact(opening([*turns("ABCDE"), *large], Model("short")))

    assert frame == CompactedHistory((summary("short"), *large), "summed up")


async def test_a_newest_turn_larger_than_that_is_summed_up_too() -> None:
    model = Model("the rest", "short")

    frame = await plugin(keep=2_400).compact(opening([*turns("ABCD"), said("N" * 4_900), answered("n" * 100)], model))

    assert frame == CompactedHistory((summary("short"),), "summed up")
    assert "NNNN" in model.asked[1]


async def test_the_summary_before_becomes_part_of_the_next() -> None:
    model = Model("Both.")

    frame = await plugin().compact(opening([summary("The first one."), *turns("ABCDEFGHI")], model))

    assert frame == CompactedHistory((summary("Both."), *turns("HI")), "summed up")
    assert "The first one." in model.asked[0]


async def test_calls_and_results_are_told_as_text_and_reasoning_is_not() -> None:
    calling = Message("assistant", (Reasoning("hm"), Text("let me see"), ToolCall("c1", "read", {"path": "a.txt"})))
    result = Message("tool", (ToolResult("c1", "read", {"error": "gone"}, "failed"),))
    model = Model("ok")

    await plugin().compact(opening([said("look"), calling, result, *turns("ABCDEFGHI")], model))

    assert (
        "user: look\n\n"
        'assistant: let me see\nassistant called read with {"path":"a.txt"}\n\n'
        'read returned (failed): {"error":"gone"}\n\n'
        "user: AAAA"
    ) in model.asked[0]
    assert "hm" not in model.asked[0]


async def test_a_conversation_larger_than_a_question_is_summed_up_piece_by_piece() -> None:
    model = Model("first part", "all of it")

    frame = await plugin().compact(opening(turns("ABCDEFGHIJK"), model))  # 9,000 to sum up, 8,000 in a question

    assert frame == CompactedHistory((summary("all of it"), *turns("JK")), "summed up")
    assert "aaaa" in model.asked[0]
    assert "iiii" not in model.asked[0]
    assert "first part" in model.asked[1]
    assert "AAAA" not in model.asked[1]
    assert "iiii" in model.asked[1]


async def test_a_single_message_larger_than_a_question_is_cut_for_it() -> None:
    model = Model("ok", "ok", "ok")

    await plugin().compact(opening([said("W" * 90_000), *turns("AB")], model))

    assert len(model.asked[0]) < 33_000  # 8,000 tokens of four bytes, and the words around them
    assert "bytes dropped" in model.asked[0]


# ---------------------------------------------------------------------- tool outputs first


def reading(content: str) -> list[Message]:
    return [
        said("read it"),
        Message("assistant", (ToolCall("x", "read"),)),
        Message("tool", (ToolResult("x", "read", content),)),
    ]


async def test_no_model_is_asked_when_cutting_old_tool_outputs_is_enough() -> None:
    model = Model()
    messages = [*reading("0123456789" * 800), *turns("AB")]  # 8,007 + 2,000 tokens

    frame = await plugin(result_tokens=64).compact(opening(messages, model))

    assert frame is not None
    assert frame.reason == "tool outputs cut"
    assert [*frame.summary[:2], *frame.summary[3:]] == [*messages[:2], *messages[3:]]
    cut = frame.summary[2].tool_results[0]
    assert (cut.call_id, cut.status) == ("x", "ok")
    assert len(cut.content.encode()) <= 256
    assert model.asked == []


async def test_outputs_are_cut_for_the_summary_too() -> None:
    model = Model("ok")

    frame = await plugin(result_tokens=64).compact(opening([*reading("0123456789" * 800), *turns("ABCDEF")], model))

    assert frame == CompactedHistory((summary("ok"), *turns("EF")), "summed up")
    assert "bytes dropped" in model.asked[0]
    assert "0123456789" * 20 not in model.asked[0]


async def test_outputs_of_the_newest_turns_stay_whole() -> None:
    newest = reading("0123456789" * 300)

    frame = await plugin(result_tokens=64).compact(opening([*turns("ABCDEF"), *newest], Model("ok")))

    assert frame == CompactedHistory((summary("ok"), *newest), "summed up")


# ---------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    "answer",
    [
        ProviderError("overloaded", retryable=True),
        RuntimeError("the provider's own"),
        "",
        " \n",
        "longer than before " * 500,
    ],
)
async def test_a_summary_that_fails_leaves_the_turn_as_it_is(
    answer: str | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "perdure.builtin"):
        frame = await plugin().compact(opening(turns("ABCDEFGHI"), Model(answer)))

    assert frame is None
    assert "session chat is not summed up before turn chat.9" in caplog.text


async def test_a_failure_halfway_leaves_the_turn_as_it_is() -> None:
    model = Model("first part", ProviderError("overloaded"))

    assert await plugin().compact(opening(turns("ABCDEFGHIJK"), model)) is None
    assert len(model.asked) == 2


async def test_without_a_summary_tool_outputs_are_cut_if_that_brings_it_under_the_limit() -> None:
    messages = [*reading("0123456789" * 800), *turns("ABCDEFG")]  # 8,007 + 7,000, and about 263 + 7,000 when cut

    frame = await plugin(result_tokens=64).compact(opening(messages, Model(ProviderError("overloaded"))))

    assert frame is not None
    assert frame.reason == "tool outputs cut"
    assert frame.summary[3:] == tuple(turns("ABCDEFG"))


async def test_a_model_that_never_answers_is_given_up_before_the_turn_is() -> None:
    compaction = plugin(seconds=0.01)
    hooks = PluginSet([compaction]).open({}).hooks("compact")

    found = await first(hooks, lambda plugin: (opening(turns("ABCDEFGHI"), Deaf()),))

    assert found is None
    assert compaction.time_limit > 0.01


async def test_the_next_turn_tries_again() -> None:
    compaction, model = plugin(), Model(ProviderError("overloaded"), "now it works")

    refused = await compaction.compact(opening(turns("ABCDEFGHI"), model))
    frame = await compaction.compact(opening(turns("BCDEFGHIJ"), model))

    assert refused is None
    assert frame == CompactedHistory((summary("now it works"), *turns("IJ")), "summed up")


async def test_what_was_stored_is_not_changed() -> None:
    messages = [*reading("0123456789" * 800), *turns("ABCDEF")]
    before = list(messages)

    await plugin(result_tokens=64).compact(opening(messages, Model("ok")))

    assert messages == before
    assert messages[2].tool_results[0].content == "0123456789" * 800


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"context_tokens": 0}, "context_tokens=0 is not usable"),
        ({"buffer": -5}, "buffer=-5 is not usable"),
        ({"keep": 0}, "keep=0 is not usable"),
        ({"keep": 8_000}, "leave nothing of context_tokens=10000 to sum up"),
        ({"buffer": 10_000}, "leave nothing"),
        ({"result_tokens": 0}, "result_tokens=0 is not usable"),
        ({"seconds": 0}, "seconds=0 is not usable"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidDefinition, match=why):
        plugin(**wrong)


@pytest.mark.parametrize(("context", "begins"), [(128_000, 108_000), (200_000, 180_000), (8_000, 6_000)])
async def test_the_buffer_is_20_000_tokens_and_at_most_a_quarter_of_the_context(context: int, begins: int) -> None:
    compaction, unasked = Compaction(context, estimate=one_each), Model()

    below = await compaction.compact(opening([said("A" * (begins - 1)), answered("a")], unasked))
    above = await compaction.compact(opening([said("A" * begins), answered("a")], Model("short", "short", "short")))

    assert below is None
    assert unasked.asked == []
    assert above == CompactedHistory((summary("short"),), "summed up")


async def test_20_000_tokens_are_kept_unless_told_otherwise() -> None:
    fits = [said("F" * 11_000), answered("f" * 4_000)]
    over = [said("O" * 4_000), answered("o" * 4_000)]
    newest = [said("N" * 4_000), answered("n" * 1_000)]
    old = [said("A" * 99_000), answered("a")]

    frame = await Compaction(estimate=one_each).compact(opening([*old, *over, *fits, *newest], Model("short")))

    assert frame == CompactedHistory((summary("short"), *fits, *newest), "summed up")


# ---------------------------------------------------------------------- in a session


class Talker:
    """A model that answers at length, and sums up shortly or not at all. Keeps what it was shown."""

    def __init__(self, summing_up: str | Exception) -> None:
        self.summing_up = summing_up
        self.shown: list[Sequence[Message]] = []
        self.summed_up = 0

    def __call__(self, request: ModelRequest) -> str:
        assert (request.label == "compaction") == (request.messages[0].text == SYSTEM)
        if request.label == "compaction":
            self.summed_up += 1
            if isinstance(self.summing_up, Exception):
                raise self.summing_up
            return self.summing_up
        self.shown.append(request.messages)
        return "a" * 1_400


async def test_a_session_goes_on_from_its_summary_also_after_a_restart(tmp_path: Path) -> None:
    talker = Talker("Ships were discussed.")
    agent = Agent(FunctionModel(talker), plugins=[plugin()])
    async with Runtime(tmp_path / "agent.db", agents=[agent]) as runtime:
        session = await runtime.session("chat")
        for name in "ABCDE":
            await session.run(name * 500)  # 1,900 tokens each with the answer: 9,500 then
        await session.run("F" * 500)

    async with Runtime(tmp_path / "agent.db", agents=[agent]) as runtime:
        session = await runtime.session("chat")
        await session.run("G" * 500)
        history = await session.history()

    long = answered("a" * 1_400)
    begin = [summary("Ships were discussed."), said("E" * 500), long, said("F" * 500)]
    assert talker.shown[4][0] == said("A" * 500)
    assert talker.shown[5] == begin
    assert talker.shown[6] == [*begin, long, said("G" * 500)]
    assert talker.summed_up == 1
    assert history == [message for name in "ABCDEFG" for message in (said(name * 500), long)]


async def test_a_turn_ends_well_though_its_summary_fails() -> None:
    talker = Talker(ProviderError("overloaded", retryable=False))
    async with Runtime("memory", agents=[Agent(FunctionModel(talker), plugins=[plugin()])]) as runtime:
        session = await runtime.session("chat")
        for name in "ABCDE":
            await session.run(name * 500)

        result = await session.run("F" * 500)

    assert result.text == "a" * 1_400
    assert talker.summed_up == 1
    assert talker.shown[5][0] == said("A" * 500)


# ---------------------------------------------------------------------- laws


@settings(max_examples=cases(100, 2_000), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3_000), st.lists(st.integers(1, 9_000), max_size=3)), max_size=8),
    st.sampled_from(["short", "long " * 2_000, ""]),
)
def test_a_frame_is_smaller_begins_at_a_turn_and_pairs_every_call(
    drawn: list[tuple[int, list[int]]], answer: str
) -> None:
    messages: list[Message] = []
    for number, (size, results) in enumerate(drawn):
        ids = [f"{number}.{index}" for index in range(len(results))]
        messages.append(said(f"{number}" + "q" * size))
        if results:
            messages.append(Message("assistant", [ToolCall(name, "read") for name in ids]))
        for name, length in zip(ids, results, strict=True):
            messages.append(Message("tool", (ToolResult(name, "read", "r" * length),)))
        messages.append(answered(f"{number}" + "a" * size))

    model = Model(*[answer] * 20)
    frame = asyncio.run(plugin(result_tokens=64).compact(opening(messages, model)))

    whole = sum(map(one_each, messages))
    if frame is None:
        assert whole <= 8_000 or model.asked
        return
    shown = frame.summary
    assert sum(map(one_each, shown)) < whole
    assert unanswered(shown) == []
    results_without_call = {r.call_id for m in shown for r in m.tool_results} - {
        c.id for m in shown for c in m.tool_calls
    }
    assert results_without_call == set()
    kept = [message for message in shown if message in messages]
    assert kept == [message for message in messages if message in kept]
