"""The codec: one canonical form for everything stored, one normalisation for everything that comes in."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import math
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.errors import InvalidInput, TooLarge
from perdure.model.codec import (
    MAX_DEPTH,
    MAX_VALUE,
    clean,
    clean_message,
    clean_part,
    clean_text,
    decode,
    encode,
    encode_checked,
    error_text,
)
from perdure.model.message import Message, Part, Reasoning, Text, ToolCall, ToolResult
from perdure.model.record import Said

GONE = "\ufffd"
HIGH, LOW = "\ud83d", "\ude00"
"""The two halves of 😀 in UTF-16."""

# Structs are not checked when they are made: these stand where they do not belong.
THING: Any = object()
LIST: Any = [1]
WORD: Any = "text"
FIVE: Any = 5


class Colour(str, enum.Enum):  # noqa: UP042  # the older spelling, whose `str()` is not its value
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Size(enum.Enum):
    BIG = "big"


class Ratio(float): ...


class Name(str):
    __slots__ = ()


class Point(NamedTuple):
    x: int
    y: int


class City(msgspec.Struct):
    name: str
    size: int = 0


@dataclasses.dataclass
class Trip:
    to: City
    days: float


class Person(pydantic.BaseModel):
    name: str
    born: datetime.date


class Broken(pydantic.BaseModel):
    thing: Any


class Itself:
    """Claims to be a model, and gives itself back."""

    def model_dump(self, mode: str) -> Itself:
        return self


def nested(levels: int) -> Any:
    value: Any = "core"
    for _ in range(levels):
        value = [value]
    return value


def nested_objects(levels: int) -> Any:
    value: Any = "core"
    for _ in range(levels):
        value = {"in": value}
    return value


def endless() -> Any:
    value: list[Any] = []
    value.append(value)
    value.append(value)
    return value


# ---------------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("given_", "kept"),
    [
        ("", ""),
        ("plain", "plain"),
        ("grüße, 世界 😀", "grüße, 世界 😀"),
        ("a\0b", f"a{GONE}b"),
        ("ä\0b", f"ä{GONE}b"),
        (HIGH + LOW, "😀"),
        (f"a{HIGH}b", f"a{GONE}b"),
        (f"a{LOW}b", f"a{GONE}b"),
        (LOW + HIGH, f"{GONE}{GONE}"),
        (f"end {HIGH}", f"end {GONE}"),
        (HIGH + HIGH + LOW, f"{GONE}😀"),
        ("\ufeffmark \ud800", f"\ufeffmark {GONE}"),
        ("\0\ud800", f"{GONE}{GONE}"),
        ("\r\n\t\x07\x7f\u2028", "\r\n\t\x07\x7f\u2028"),
        (Name("name"), "name"),
        (Colour.RED, "red"),
    ],
)
def test_text_keeps_what_every_store_can_hold(given_: str, kept: str) -> None:
    cleaned = clean_text(given_)

    assert cleaned == kept
    assert type(cleaned) is str


def test_text_that_needs_nothing_is_the_same_object() -> None:
    for text in ("plain", "grüße"):
        assert clean_text(text) is text


@pytest.mark.parametrize("given_", [None, 5, b"bytes", ["a"]])
def test_what_is_no_text_is_refused_as_such(given_: Any) -> None:
    with pytest.raises(InvalidInput, match="is not text"):
        clean_text(given_)


@settings(deadline=None)
@given(st.text(st.characters(codec=None, exclude_categories=())))
def test_clean_text_is_valid_and_stays_as_it_is(text: str) -> None:
    cleaned = clean_text(text)

    assert cleaned.encode().decode() == cleaned
    assert "\0" not in cleaned
    assert clean_text(cleaned) is cleaned


PIECES = {"a": "a", "é😀": "é😀", "\0": GONE, HIGH + LOW: "😀", HIGH: GONE, LOW: GONE, "\ufeff": "\ufeff"}


@settings(deadline=None)
@given(st.lists(st.sampled_from(sorted(PIECES))))
def test_only_what_cannot_be_held_is_replaced(pieces: list[str]) -> None:
    assert clean_text("|".join(pieces)) == "|".join(PIECES[piece] for piece in pieces)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_what_an_exception_says_is_text_whatever_it_does() -> None:
    assert error_text(ValueError("a\0b")) == f"a{GONE}b"
    assert error_text(ValueError()) == ""
    assert error_text(Unspeakable()) == "(it cannot be shown)"


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("given_", "kept"),
    [
        (None, None),
        (True, True),
        (0, 0),
        (-0.0, -0.0),
        (1.5, 1.5),
        (5e-324, 5e-324),
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        (2**63 - 1, 2**63 - 1),
        (-(2**63), -(2**63)),
        (2**63, "9223372036854775808"),
        (-(2**63) - 1, "-9223372036854775809"),
        (2**64, "18446744073709551616"),
        ("\ud800", GONE),
        ((1, [2, (3,)]), [1, [2, [3]]]),
        ({"a\0": {"b": math.nan}}, {f"a{GONE}": {"b": "NaN"}}),
        ({1: "a", 2.5: "b"}, {"1": "a", "2.5": "b"}),
        ({False: 0, None: 1}, {"false": 0, "null": 1}),
        ({2**64: 1, math.nan: 2}, {"18446744073709551616": 1, "NaN": 2}),
        ({Colour.RED: 1, Level.LOW: 2, Name("n"): 3}, {"red": 1, "1": 2, "n": 3}),
        (Colour.RED, "red"),
        (Level.LOW, 1),
        (Size.BIG, "big"),
        (Ratio("1.25"), 1.25),
        (Name("a\0"), f"a{GONE}"),
        ({5}, [5]),
        (frozenset({2**64}), ["18446744073709551616"]),
        (Point(1, 2), [1, 2]),
        (City("Bern"), {"name": "Bern", "size": 0}),
        (City("Bern\0", 2**64), {"name": f"Bern{GONE}", "size": "18446744073709551616"}),
        (Trip(City("Bern"), math.inf), {"to": {"name": "Bern", "size": 0}, "days": "Infinity"}),
        ([Trip(City("B"), 1.0)], [{"to": {"name": "B", "size": 0}, "days": 1.0}]),
        (Person(name="Ann\0", born=datetime.date(2000, 1, 2)), {"name": f"Ann{GONE}", "born": "2000-01-02"}),
        (datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC), "2026-01-02T03:04:05Z"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (decimal.Decimal("1.10"), "1.10"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (b"\x00\xff", "AP8="),
    ],
)
def test_every_value_has_one_form_for_all_stores(given_: Any, kept: Any) -> None:
    cleaned = clean(given_)

    assert repr(cleaned) == repr(kept)
    assert decode(encode(cleaned)) == kept


def test_an_integer_too_long_for_decimal_digits_is_kept_in_hexadecimal() -> None:
    cleaned = clean([10**5000])

    assert cleaned == [hex(10**5000)]
    assert int(cleaned[0], 16) == 10**5000


@pytest.mark.parametrize("make", [nested, nested_objects])
def test_nesting_is_accepted_up_to_its_limit(make: Any) -> None:
    assert clean(make(MAX_DEPTH)) == make(MAX_DEPTH)
    with pytest.raises(InvalidInput, match="deeper than 64 levels"):
        clean(make(MAX_DEPTH + 1))


@pytest.mark.parametrize(
    "value",
    [
        nested(10**5),
        nested_objects(10**5),
        endless(),
        Trip(City("B"), nested(10**5)),
        {"model": Broken(thing=nested(100))},
    ],
    ids=["lists", "objects", "endless", "dataclass", "model"],
)
def test_values_without_a_floor_are_refused(value: Any) -> None:
    with pytest.raises(InvalidInput):
        clean(value)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        lambda: 1,
        City,
        Person,
        Path("here"),
        1j,
        range(3),
        iter([1]),
        ValueError("x"),
        Itself(),
        Broken(thing=object()),
        {"deep": [{"er": object()}]},
        {(1, 2): "tuple key"},
        {b"bytes": 1},
        {frozenset(): 1},
        City(THING),
    ],
)
def test_what_is_not_json_is_refused_with_advice(value: Any) -> None:
    with pytest.raises(InvalidInput) as raised:
        clean(value)

    assert "not JSON" in str(raised.value) or "JSON key" in str(raised.value)


wild = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None, exclude_categories=()), max_size=5)
    | st.dates()
    | st.decimals()
    | st.uuids()
    | st.binary(max_size=4)
    | st.sampled_from([Colour.RED, Level.LOW, Size.BIG]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.floats() | st.none(), inner, max_size=3)
        | st.builds(Trip, st.builds(City, st.text(max_size=3), st.integers()), st.floats())
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(wild)
def test_clean_values_stay_as_they_are_and_survive_the_codec(value: Any) -> None:
    cleaned = clean(value)

    assert repr(clean(cleaned)) == repr(cleaned)
    assert repr(decode(encode(cleaned))) == repr(cleaned) or decode(encode(cleaned)) == cleaned
    # What we store, any JSON reader reads.
    assert json.loads(encode(cleaned)) == cleaned


@settings(deadline=None)
@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=3), st.integers(0, 9)))
def test_encoding_does_not_depend_on_the_order_of_keys(value: dict[str, int]) -> None:
    backwards = dict(reversed(value.items()))

    assert encode(value) == encode(backwards)


# ---------------------------------------------------------------------- parts and messages


@pytest.mark.parametrize(
    ("part", "kept"),
    [
        (Text("a\0"), Text(f"a{GONE}")),
        (Reasoning("a\0", {"sig": math.nan}), Reasoning(f"a{GONE}", {"sig": "NaN"})),
        (ToolResult("i\0", "n\0", (1, 2), "failed"), ToolResult(f"i{GONE}", f"n{GONE}", [1, 2], "failed")),
        (ToolCall("i\0", "n\0", {"q": math.inf}), ToolCall(f"i{GONE}", f"n{GONE}", {"q": "Infinity"})),
        (ToolCall("i", "n", {}, "{oops\0", (1,)), ToolCall("i", "n", {}, f"{{oops{GONE}", [1])),
        (ToolCall("i", "n", LIST), ToolCall("i", "n", {}, "[1]")),
        (ToolCall("i", "n", WORD), ToolCall("i", "n", {}, "text")),
        (ToolCall("i", "n", LIST, "[1"), ToolCall("i", "n", {}, "[1")),
    ],
)
def test_parts_are_normalised(part: Part, kept: Part) -> None:
    assert clean_part(part) == kept


def test_text_parts_that_need_nothing_are_the_same_object() -> None:
    part = Text("plain")

    assert clean_part(part) is part


def test_arguments_that_cannot_be_kept_become_words_the_model_sees_again() -> None:
    call = clean_part(ToolCall("i", "n", {"deep": nested(100)}))

    assert call == ToolCall("i", "n", {}, "the value is nested deeper than 64 levels: flatten it")


@pytest.mark.parametrize("part", ["text", None, {"type": "text", "text": "hi"}, Message("user", "hi")])
def test_what_is_no_part_is_refused(part: Any) -> None:
    with pytest.raises(InvalidInput, match="is not a part"):
        clean_part(part)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("hello", Message("user", "hello")),
        ("a\ud800", Message("user", f"a{GONE}")),
        (Message("user", "hello"), Message("user", "hello")),
        (Message("user", [Text("a\0"), Text(" ")]), Message("user", (Text(f"a{GONE}"), Text(" ")))),
    ],
)
def test_what_a_host_says_becomes_one_clean_message(said: Any, kept: Message) -> None:
    assert clean_message(said) == kept


@pytest.mark.parametrize(
    "said",
    [
        "",
        "   \n\t ",
        Message("user"),
        Message("user", ""),
        Message("user", (Text(" "), Text("\n"))),
        Message("assistant", "hello"),
        Message("system", "hello"),
        Message("tool", (ToolResult("a", "look"),)),
        Message("user", (ToolCall("a", "look"),)),
        Message("user", (Text("see"), ToolResult("a", "look"))),
        Message("user", (Reasoning("hm"),)),
        Message("user", (Text(FIVE),)),
        Message("user", (WORD,)),
        None,
        5,
        b"hello",
        ["hello", 5],
        [],
        {"role": "user", "content": "hello"},
    ],
    ids=repr,
)
def test_what_a_host_may_not_say_is_refused(said: Any) -> None:
    with pytest.raises(InvalidInput):
        clean_message(said)


def test_an_enormous_input_is_refused_with_its_size() -> None:
    said = Said(clean_message("x" * 40_000_000))

    with pytest.raises(TooLarge) as raised:
        encode_checked(said, "the input")

    assert raised.value.size > 40_000_000
    assert raised.value.limit == MAX_VALUE == 33_554_432
    assert str(raised.value).startswith("the input has 40,000,0")


def test_a_value_at_the_limit_is_accepted() -> None:
    assert len(encode_checked("x" * (MAX_VALUE - 2), "it")) == MAX_VALUE
    with pytest.raises(TooLarge):
        encode_checked("x" * (MAX_VALUE - 1), "it")
