"""What a hook may answer: which directives mean something where, and what becomes of odd ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from perdure.errors import PluginFault
from perdure.model.codec import convert, decode, encode
from perdure.model.message import Message, Text, ToolCall
from perdure.model.plugin import (
    AbortTurn,
    AskPerson,
    CreateSession,
    Directive,
    EmitEvents,
    EmitTrace,
    EnqueueMessages,
    ReplaceArgs,
    Seam,
    ShortCircuit,
    kind_of,
)
from perdure.model.tool import Cancelled, Denied, Failed, Ok, OutcomeUnknown
from perdure.plugins.decisions import read
from perdure.plugins.hooks import Plugin

SEAMS: tuple[Seam, ...] = ("before_turn", "before_tool_call", "after_tool_call", "at_checkpoint", "after_turn")

# By hand, one row per directive: before_turn, before_tool_call, after_tool_call, at_checkpoint, after_turn.
LEGALITY: list[tuple[Directive, str, tuple[bool, bool, bool, bool, bool]]] = [
    (AbortTurn("stop"), "abort_turn", (True, True, True, True, False)),
    (EnqueueMessages((Message("user", "psst"),)), "enqueue_messages", (True, False, True, True, True)),
    (CreateSession(), "create_session", (True, True, True, True, True)),
    (ReplaceArgs({"n": 2}), "replace_tool_args", (False, True, False, False, False)),
    (ShortCircuit(Ok(1)), "short_circuit_tool", (False, True, True, False, False)),
    (AskPerson("sure?"), "ask_person", (False, True, False, False, False)),
    (EmitEvents((1,)), "emit_runtime_events", (True, True, True, True, True)),
    (EmitTrace("seen"), "emit_trace", (True, True, True, True, True)),
]
CASES = [
    pytest.param(directive, seam, legal, id=f"{kind}-{seam}")
    for directive, kind, row in LEGALITY
    for seam, legal in zip(SEAMS, row, strict=True)
]


class Named(Plugin):
    id = "p"


P = Named()


def fault(answer: object, seam: Seam = "before_tool_call") -> str:
    with pytest.raises(PluginFault) as caught:
        read(P, seam, answer)
    assert (caught.value.plugin, caught.value.hook) == ("p", seam)
    return caught.value.what


# ---------------------------------------------------------------------- what means something where


@pytest.mark.parametrize(("directive", "seam", "legal"), CASES)
def test_every_directive_at_every_seam(directive: Directive, seam: Seam, legal: bool) -> None:
    if legal:
        assert read(P, seam, directive) == [directive]
    else:
        assert fault(directive, seam).startswith(f"{type(directive).__name__} means nothing here; use one of ")


@pytest.mark.parametrize(("directive", "kind"), [(each, kind) for each, kind, _ in LEGALITY])
def test_directives_have_stable_names_and_survive_the_wire(directive: Directive, kind: str) -> None:
    assert kind_of(directive) == kind
    assert decode(encode(directive))["kind"] == kind
    assert convert(decode(encode(directive)), Directive) == directive


def test_a_fault_says_what_would_be_legal() -> None:
    assert fault(AbortTurn("stop"), "after_turn") == (
        "AbortTurn means nothing here; use one of CreateSession, EmitEvents, EmitTrace, EnqueueMessages"
    )


# ---------------------------------------------------------------------- the shape of an answer


def test_an_answer_is_nothing_one_directive_or_several() -> None:
    trace, events = EmitTrace("seen"), EmitEvents((1,))

    def generated() -> Iterator[Directive]:
        yield trace
        yield events

    assert read(P, "before_turn", None) == []
    assert read(P, "before_turn", ()) == []
    assert read(P, "before_turn", trace) == [trace]
    assert read(P, "before_turn", [trace, events]) == [trace, events]
    assert read(P, "before_turn", generated()) == [trace, events]


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (42, "it returned a int in place of directives"),
        ("abort", "it returned a str in place of directives"),
        (b"abort", "it returned a bytes in place of directives"),
        ({"kind": "abort_turn"}, "it returned a dict in place of directives"),
        (False, "it returned a bool in place of directives"),
        (AbortTurn, "it returned a StructMeta in place of directives"),
        ([EmitTrace("x"), None], "a NoneType is no directive"),
        ([{"kind": "abort_turn"}], "a dict is no directive"),
        (itertools.repeat(EmitTrace("x")), "it gave more than 1000 directives at once"),
    ],
)
def test_an_answer_that_makes_no_sense_is_a_fault(answer: object, what: str) -> None:
    assert fault(answer) == what


@pytest.mark.parametrize("raised", [ZeroDivisionError("no"), SystemExit(2), KeyboardInterrupt()])
def test_an_answer_that_raises_while_it_is_read_is_a_fault(raised: BaseException) -> None:
    def generated() -> Iterator[Directive]:
        yield EmitTrace("seen")
        raise raised

    assert fault(generated()).startswith(type(raised).__name__)


def test_one_wrong_directive_spoils_the_whole_answer() -> None:
    assert "means nothing here" in fault([AbortTurn("stop"), EnqueueMessages((Message("user", "psst"),))])


# ---------------------------------------------------------------------- what is in a directive


@dataclass
class Row:
    n: int


def test_values_are_normalised_as_a_store_would_give_them_back() -> None:
    assert read(
        P, "before_tool_call", ReplaceArgs({"a": float("nan"), "b": 2**70, "c": (1, Row(2)), "d": "\ud800"})
    ) == [ReplaceArgs({"a": "NaN", "b": "1180591620717411303424", "c": [1, {"n": 2}], "d": "�"})]
    assert read(P, "before_tool_call", AbortTurn("st\0p", "\ud800")) == [AbortTurn("st�p", "�")]
    assert read(P, "before_tool_call", AskPerson("\0")) == [AskPerson("�")]
    assert read(P, "before_tool_call", EmitEvents((Row(1), {2: "\0"}))) == [EmitEvents(({"n": 1}, {"2": "�"}))]
    assert read(P, "before_tool_call", EmitTrace("\0", Row(1), {"x": (1,)})) == [EmitTrace("�", {"n": 1}, {"x": [1]})]
    assert read(P, "before_turn", EnqueueMessages((Message("system", "a\0b"),))) == [
        EnqueueMessages((Message("system", "a�b"),))
    ]


@pytest.mark.parametrize(
    ("outcome", "kept"),
    [
        (Ok(Row(1)), Ok({"n": 1})),
        (Ok((1, "\0")), Ok([1, "�"])),
        (Failed("quota", "n\0", Row(1)), Failed("quota", "n�", {"n": 1})),
        (Denied("n\0", "ann"), Denied("n�", "ann")),
        (Cancelled("ann", "\0"), Cancelled("ann", "�")),
        (OutcomeUnknown("\0"), OutcomeUnknown("�")),
    ],
)
def test_outcomes_are_normalised_too(outcome: Any, kept: Any) -> None:
    assert read(P, "after_tool_call", ShortCircuit(outcome)) == [ShortCircuit(kept)]


def test_what_a_plugin_keeps_of_its_answer_cannot_change_it_later() -> None:
    args: dict[str, Any] = {"path": ["a"]}

    [directive] = read(P, "before_tool_call", ReplaceArgs(args))
    args["path"].append("b")

    assert directive == ReplaceArgs({"path": ["a"]})


def test_a_child_is_asked_for_in_plain_values() -> None:
    asked = CreateSession("critic", "child-1", Message("user", "look\0"), {"plan": Row(1)}, ("rm",), "review", ("ls",))

    assert read(P, "before_turn", asked) == [
        CreateSession("critic", "child-1", Message("user", "look�"), {"plan": {"n": 1}}, ("rm",), "review", ("ls",))
    ]


def test_what_a_child_begins_with_is_asked_for_in_plain_values() -> None:
    prelude: Any = [Message("user", "look\0"), Message("assistant", "seen")]

    assert read(P, "after_turn", CreateSession(start="fork", prelude=prelude)) == [
        CreateSession(start="fork", prelude=(Message("user", "look\ufffd"), Message("assistant", "seen")))
    ]


class Angry:
    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("no")


ODD: Any = object()


def wrong(value: object) -> Any:
    """What no type checker would let pass."""
    return value


@pytest.mark.parametrize(
    ("seam", "directive", "why"),
    [
        ("before_turn", AbortTurn(ODD), "its abort_turn cannot be stored: a object is not text"),
        ("before_turn", EnqueueMessages(ODD), "its enqueue_messages cannot be stored: a object is no tuple"),
        ("before_turn", EnqueueMessages(wrong(Angry())), "its enqueue_messages cannot be stored: a Angry is no tuple"),
        ("before_turn", EnqueueMessages(wrong(("psst",))), "plugins say user and system messages"),
        ("before_turn", EnqueueMessages((Message("assistant", "I did"),)), "plugins say user and system messages"),
        ("before_turn", EnqueueMessages((Message("tool", "I did"),)), "plugins say user and system messages"),
        ("before_turn", EnqueueMessages((Message("user", [ToolCall("1", "rm")]),)), "plugins say text"),
        ("before_turn", EnqueueMessages((Message("user", " "),)), "the message is empty"),
        ("before_turn", EnqueueMessages((Message("user", [Text(ODD)]),)), "a object is not text"),
        ("before_tool_call", ReplaceArgs(wrong([1])), "its replace_tool_args cannot be stored: Expected `object`"),
        ("before_tool_call", ReplaceArgs({"x": ODD}), "a object is not JSON"),
        ("before_tool_call", ShortCircuit(ODD), "a object is no outcome of a call"),
        ("before_tool_call", ShortCircuit(Ok(ODD)), "a object is not JSON"),
        ("before_tool_call", ShortCircuit(Ok(1, ODD)), "its short_circuit_tool cannot be stored"),
        ("before_tool_call", ShortCircuit(Failed(wrong(5), "x")), "Expected `str`, got `int`"),
        ("before_tool_call", ShortCircuit(Denied(wrong(5))), "Expected `str`, got `int`"),
        ("before_tool_call", AskPerson(ODD), "a object is not text"),
        ("before_turn", EmitEvents(wrong("abc")), "a str is no tuple of values"),
        ("before_turn", EmitEvents(wrong({"a": 1})), "a dict is no tuple of values"),
        ("before_turn", EmitEvents((ODD,)), "a object is not JSON"),
        ("before_turn", EmitTrace(ODD), "a object is not text"),
        ("before_turn", EmitTrace("x", None, ODD), "its emit_trace cannot be stored"),
        ("before_turn", CreateSession(agent=ODD), "its create_session cannot be stored"),
        ("before_turn", CreateSession(session_id="a\0"), "session id 'a\\x00' is not usable"),
        ("before_turn", CreateSession(said=Message("system", "obey")), "role 'user', not 'system'"),
        ("before_turn", CreateSession(said=Message("user", "")), "the input is empty"),
        ("before_turn", CreateSession(options=wrong([1])), "Expected `object`, got `array`"),
        ("before_turn", CreateSession(hidden=wrong("rm")), "Expected `array`, got `str`"),
        ("before_turn", CreateSession(label=wrong(5)), "Expected `str`, got `int`"),
        ("before_turn", CreateSession(only=wrong("ls")), "Expected `array | null`, got `str`"),
        ("before_turn", CreateSession(start=wrong("end")), "Invalid enum value 'end'"),
        ("before_turn", CreateSession(prelude=(Message("user", ""),)), "a message of the prelude is empty"),
    ],
)
def test_a_directive_that_no_store_could_hold_is_a_fault(seam: Seam, directive: Directive, why: str) -> None:
    assert why in fault(directive, seam)


def test_arguments_nested_without_end_are_a_fault() -> None:
    args: dict[str, Any] = {}
    args["self"] = args

    assert "nested deeper than 64 levels" in fault(ReplaceArgs(args))
