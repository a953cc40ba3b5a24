"""Rolling history: what a model is shown of a conversation that has become too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure import Agent, Message, ModelRequest, Runtime, ToolCall, ToolResult
from perdure.builtin import RollingHistory
from perdure.builtin.history import estimate_tokens, user_turns
from perdure.errors import InvalidDefinition
from perdure.model.codec import encode
from perdure.model.message import Role, Text
from perdure.plugins.calls import pipe
from perdure.plugins.hooks import Plugin, ViewContext
from perdure.plugins.registry import PluginSet
from perdure.testing import FunctionModel
from tests.fuzzing import cases

law = settings(max_examples=cases(150, 3_000), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def context(history: int) -> ViewContext:
    """A model call is about to be made; so many messages come from before its turn. The host is not needed."""
    host: Any = None
    return ViewContext("chat", "chat.9", "assistant", None, host, step=1, history=history)


def said(text: str, role: Role = "user") -> Message:
    return Message(role, text)


def called(name: str) -> Message:
    return Message("assistant", (ToolCall(name, "read"),))


def returned(name: str, content: Any = "done") -> Message:
    return Message("tool", (ToolResult(name, "read", content),))


def one_each(message: Message) -> int:
    """A token per character of what was said, so that expected sizes can be read off the test."""
    return len(message.text)


def letters(messages: Sequence[Message]) -> str:
    return " ".join([message.text[:1] or message.role for message in messages])


# Each turn is a question and an answer of 10 tokens each: A a, B b, …
def turns(names: str) -> list[Message]:
    found = []
    for name in names:
        found += [said(name * 10), said(name.lower() * 10, "assistant")]
    return found


NOW = said("?" * 10)


# ---------------------------------------------------------------------- leaving out turns


def test_a_prompt_that_fits_is_shown_as_it_is() -> None:
    plugin = RollingHistory(200, share=0.5, estimate=one_each)
    messages = [*turns("ABCD"), said("?" * 20)]  # 100 tokens, as many as there may be

    assert plugin.transform_view(context(8), messages) is messages


def test_above_60_percent_of_the_context_the_oldest_turns_go() -> None:
    plugin = RollingHistory(150, estimate=one_each)  # 90 tokens
    messages = [*turns("ABCDE"), NOW]  # 110 tokens

    view = plugin.transform_view(context(10), messages)

    assert view[0] == said("[3 earlier turns are not shown]", "system")
    assert letters(view[1:]) == "D d E e ?"  # with its 31 tokens of marker and 50 more it fits
    assert letters(messages) == "A a B b C c D d E e ?"


def test_one_turn_left_out_is_said_in_the_singular() -> None:
    plugin = RollingHistory(200, estimate=one_each)  # 120 tokens

    view = plugin.transform_view(context(4), [*turns("AB"), said("?" * 90)])  # 130 tokens

    assert view[0] == said("[1 earlier turn is not shown]", "system")
    assert letters(view[1:]) == "B b ?"


def test_the_running_turn_and_the_one_before_stay_however_large_they_are() -> None:
    plugin = RollingHistory(100, estimate=one_each)

    view = plugin.transform_view(context(6), [*turns("AB"), said("C" * 500), said("c" * 500, "assistant"), NOW])

    assert letters(view) == "[ C c ?"


@pytest.mark.parametrize(
    ("keep", "shown"), [(1, "[ ?"), (2, "[ D d ?"), (4, "[ B b C c D d ?"), (5, "A a B b C c D d ?")]
)
def test_so_many_turns_are_kept_as_was_asked_for(keep: int, shown: str) -> None:
    plugin = RollingHistory(1, share=1, keep_turns=keep, estimate=one_each)

    assert letters(plugin.transform_view(context(8), [*turns("ABCD"), NOW])) == shown


def test_a_running_turn_that_was_steered_is_one_turn() -> None:
    plugin = RollingHistory(1, share=1, estimate=one_each)
    running = [said("1"), called("x"), returned("x"), said("2"), called("y"), returned("y"), said("3")]

    view = plugin.transform_view(context(6), [*turns("ABC"), *running])

    assert view[1:] == [*turns("C"), *running]


def test_system_messages_outlive_their_turn() -> None:
    plugin = RollingHistory(1, share=1, estimate=one_each)
    rule = said("Never say no.", "system")

    view = plugin.transform_view(context(7), [said("A"), rule, said("a", "assistant"), *turns("BC"), NOW])

    assert view == [said("[2 earlier turns are not shown]", "system"), rule, *turns("C"), NOW]


def test_a_system_message_that_stays_frees_nothing() -> None:
    plugin = RollingHistory(200, share=1, estimate=one_each)
    rule = said("!" * 100, "system")

    view = plugin.transform_view(context(7), [said("A"), rule, said("a", "assistant"), *turns("BC"), said("?" * 60)])

    assert letters(view) == "[ ! C c ?"  # the first turn frees 2 tokens, not 102: the second goes too


def test_the_summary_of_a_compaction_is_no_turn_and_stays() -> None:
    plugin = RollingHistory(1, share=1, estimate=one_each)
    summary = said("It was about ships.", "assistant")

    view = plugin.transform_view(context(5), [summary, *turns("AB"), NOW])

    assert view == [said("[1 earlier turn is not shown]", "system"), summary, *turns("B"), NOW]


def test_a_message_between_a_call_and_its_result_begins_no_turn() -> None:
    messages = [said("A"), called("x"), said("hurry"), returned("x"), said("B")]

    assert user_turns(messages) == [0, 4]


def test_a_call_id_that_is_used_again_belongs_to_the_turn_it_is_in() -> None:
    messages = [said("A"), called("x"), returned("x"), said("B"), called("x"), returned("x"), said("C")]

    assert user_turns(messages) == [0, 3, 6]


def test_the_cut_stays_where_it_is_while_the_conversation_grows() -> None:
    """A provider caches the beginning of a prompt: a cut that moved with every step would spoil it."""
    plugin = RollingHistory(1000, share=1, estimate=one_each)
    messages = turns("ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 2)  # 1,040 tokens
    running = [NOW]
    shown = []
    for _ in range(20):  # 200 tokens more
        shown.append(plugin.transform_view(context(104), [*messages, *running]))
        running.append(said("s" * 10, "assistant"))

    firsts = [view[:2] for view in shown]

    assert firsts == [firsts[0]] * 20
    assert all(sum(map(one_each, view)) <= 1000 for view in shown)


# ---------------------------------------------------------------------- cutting results


def test_old_results_are_cut_before_any_turn_goes() -> None:
    plugin = RollingHistory(3_000, share=1, result_tokens=100)
    old = [said("A"), called("x"), returned("x", "0123456789" * 1_500), said("a", "assistant")]  # 3,750 tokens
    recent = [*turns("B"), NOW]

    view = plugin.transform_view(context(6), [*old, *recent])

    assert view[0] == said("A")
    assert [*view[:2], *view[3:]] == [*old[:2], *old[3:], *recent]
    assert 350 < len(view[2].tool_results[0].content) <= 400
    assert "the whole output is kept" in view[2].tool_results[0].content
    assert view[2].tool_results[0].call_id == "x"


def test_a_cut_result_keeps_its_status_and_its_shape() -> None:
    plugin = RollingHistory(3_000, share=1, result_tokens=100)
    failure = Message("tool", (ToolResult("x", "read", {"error": "tool_raised", "message": "m" * 20_000}, "failed"),))

    view = plugin.transform_view(context(5), [said("A"), called("x"), failure, *turns("B"), NOW])

    cut = view[2].tool_results[0]
    assert (cut.status, cut.name, cut.content["error"]) == ("failed", "read", "tool_raised")
    assert len(cut.content["message"]) < 400


def test_results_of_the_newest_turns_are_cut_last_and_never_one_that_is_not_answered_yet() -> None:
    plugin = RollingHistory(3_000, share=1, result_tokens=100)
    large = "0123456789" * 1_000  # 2,500 tokens
    running = [NOW, called("x"), returned("x", large), called("y"), returned("y", large)]

    view = plugin.transform_view(context(2), [*turns("A"), *running])

    assert view[:4] == [*turns("A"), NOW, called("x")]
    assert len(view[4].tool_results[0].content) <= 400
    assert view[5:] == [called("y"), returned("y", large)]


def test_a_recent_result_is_whole_while_leaving_out_turns_is_enough() -> None:
    plugin = RollingHistory(3_000, share=1, result_tokens=100)
    large = returned("x", "0123456789" * 1_000)  # 2,500 tokens
    old = said("A" * 4_000)  # 1,000 tokens

    view = plugin.transform_view(context(3), [old, *turns("B"), NOW, called("x"), large, said("so", "assistant")])

    assert view[1:] == [*turns("B"), NOW, called("x"), large, said("so", "assistant")]


# ---------------------------------------------------------------------- estimating


def test_four_bytes_of_json_are_a_token() -> None:
    message = Message("user", (Text("hello"),))

    assert encode(message) == b'{"role":"user","parts":[{"type":"text","text":"hello"}]}'  # 56 bytes
    assert estimate_tokens(message) == 14
    assert estimate_tokens(said("hello!")) == 15


def test_what_is_called_returned_and_replayed_counts() -> None:
    long = "x" * 4_000

    assert estimate_tokens(Message("assistant", (ToolCall("a", "read", {"path": long}),))) > 1_000
    assert estimate_tokens(returned("a", {"lines": [long]})) > 1_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"context_tokens": 0},
        {"context_tokens": 1.5},
        {"context_tokens": True},
        {"share": 0},
        {"share": 60},
        {"keep_turns": 0},
        {"result_tokens": -1},
        {"result_tokens": 10},
    ],
)
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidDefinition, match="is not usable"):
        RollingHistory(**wrong)


async def test_it_looks_at_the_view_after_all_other_plugins() -> None:
    class Verbose(Plugin):
        id = "verbose"

        def transform_view(self, ctx: ViewContext, messages: Sequence[Message]) -> Sequence[Message]:
            return [*messages, said("!" * 100)]

    plugins = PluginSet([RollingHistory(100, share=1, estimate=one_each), Verbose()]).open({})

    view = await pipe(plugins.hooks("transform_view"), [*turns("ABC"), NOW], lambda plugin, now: (context(6), now))

    assert letters(view) == "[ C c ? !"


async def test_the_model_of_a_long_session_sees_its_end_and_people_see_all_of_it() -> None:
    asked: list[Sequence[Message]] = []

    def answer(request: ModelRequest) -> str:
        asked.append(request.messages)
        return "a" * 50

    agent = Agent(FunctionModel(answer), plugins=[RollingHistory(300, share=1, estimate=one_each)])
    async with Runtime("memory", agents=[agent]) as runtime:
        session = await runtime.session("chat")
        for name in "ABC":
            await session.run(name * 50)
        result = await session.run("D" * 50)
        history = await session.history()

    assert letters(asked[2]) == "A a B a C"  # 250 tokens
    assert letters(asked[3]) == "[ C a D"  # it would be 350
    assert result.text == "a" * 50
    assert letters(history) == "A a B a C a D a"


# ---------------------------------------------------------------------- laws, for any history


KINDS = ["user", "user", "system", "answer", "call", "call", "result", "result"]
events = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from(["x", "y", "z"]), st.sampled_from([0, 5, 300, 3_000])),
    max_size=40,
)
plugins = st.builds(
    RollingHistory,
    st.sampled_from([1, 100, 400, 1_000, 4_000]),
    keep_turns=st.integers(1, 3),
    result_tokens=st.sampled_from([64, 200]),
)


def as_messages(drawn: list[tuple[str, str, int]]) -> list[Message]:
    """Messages that can be told apart: calls without result, results without call, and reused ids among them."""
    found = []
    for serial, (kind, call_id, size) in enumerate(drawn):
        name, filling = f"#{serial}", "f" * size
        if kind == "call":
            found.append(Message("assistant", (Text(name), ToolCall(call_id, name, {"filling": filling}))))
        elif kind == "result":
            found.append(Message("tool", (ToolResult(call_id, name, {"lines": [filling, filling]}),)))
        else:
            role: Role = "assistant" if kind == "answer" else "user" if kind == "user" else "system"
            found.append(said(f"{name} {filling}", role))
    return found


def serials(messages: Sequence[Message]) -> list[str]:
    """Which messages these are; what the plugin itself says is left out."""
    names = [m.tool_results[0].name if m.tool_results else m.text.split(" ")[0] for m in messages]
    return [name for name in names if name.startswith("#")]


def pairs(messages: Sequence[Message]) -> set[tuple[str, str]]:
    """Each result with the newest call of its id that had none before."""
    waiting: dict[str, str] = {}
    found = set()
    for message in messages:
        for call in message.tool_calls:
            waiting[call.id] = call.name
        for result in message.tool_results:
            if result.call_id in waiting:
                found.add((waiting.pop(result.call_id), result.name))
    return found


@law
@given(plugins, events, st.data())
def test_a_call_and_its_result_are_shown_together_or_not_at_all(
    plugin: RollingHistory, drawn: list[tuple[str, str, int]], data: st.DataObject
) -> None:
    messages = as_messages(drawn)
    history = data.draw(st.integers(0, len(messages)))

    view = plugin.transform_view(context(history), messages)

    shown = set(serials(view))
    whole = pairs(messages)
    assert pairs(view) == {pair for pair in whole if pair[0] in shown}
    assert pairs(view) == {pair for pair in whole if pair[1] in shown}


@law
@given(plugins, events, st.data())
def test_a_view_of_a_view_is_the_same_view(
    plugin: RollingHistory, drawn: list[tuple[str, str, int]], data: st.DataObject
) -> None:
    messages = as_messages(drawn)
    history = data.draw(st.integers(0, len(messages)))
    view = plugin.transform_view(context(history), messages)

    again = plugin.transform_view(context(len(view) - (len(messages) - history)), view)

    assert list(again) == list(view)


@law
@given(plugins, events, st.data())
def test_rules_and_the_running_turn_are_always_shown_in_order(
    plugin: RollingHistory, drawn: list[tuple[str, str, int]], data: st.DataObject
) -> None:
    messages = as_messages(drawn)
    history = data.draw(st.integers(0, len(messages)))
    before = encode(messages)

    view = plugin.transform_view(context(history), messages)

    shown = serials(view)
    assert [name for name in serials(messages) if name in shown] == shown
    assert set(serials([m for m in messages if m.role == "system"])) <= set(shown)
    assert set(serials(messages[history:])) <= set(shown)
    assert encode(messages) == before
