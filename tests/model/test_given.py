"""What callers give, looked at where it comes in."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest

from perdure.errors import InvalidDefinition, InvalidInput, UnknownTurn, quoted
from perdure.model import ids, validate
from perdure.model.agent import Budget
from perdure.model.message import Message
from perdure.model.session import ToolState
from tests.kit import untyped

NAN = float("nan")
WRONG: Any = 5


class Mood(str, enum.Enum):  # noqa: UP042  # users write this, and `format` shows its name
    CALM = "calm"


class Loud(str):
    """A string that shows itself differently."""

    def __str__(self) -> str:
        return "LOUD"


class Hidden:
    def __repr__(self) -> str:
        raise SystemExit("do not look")


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


REFUSED: dict[str, Callable[[], object]] = {
    "a number as a name": lambda: validate.name(5, "agent"),
    "bytes as a name": lambda: validate.name(b"x", "agent"),
    "a lone surrogate in a name": lambda: validate.name("\ud800", "agent"),
    "NUL in a name": lambda: validate.name("a\0b", "agent"),
    "text as seconds": lambda: validate.seconds("5"),
    "less than no time": lambda: validate.seconds(-1),
    "NaN as seconds": lambda: validate.seconds(NAN),
    "a yes as seconds": lambda: validate.seconds(True),
    "seconds that no float can hold": lambda: validate.seconds(10**5000),
    "nothing as a count": lambda: validate.count(None, "limit"),
    "a fraction as a count": lambda: validate.count(1.5, "limit"),
    "a yes as a count": lambda: validate.count(True, "limit"),
    "a count that no store can hold": lambda: validate.count(2**63, "limit"),
    "too small a count": lambda: validate.count(0, "concurrency", 1),
    "one string for several": lambda: validate.several("stop", "signals"),
    "one thing for several": lambda: validate.several(5, "tools"),
    "a number as a flag": lambda: validate.flag(1, "recover"),
    "an object without the method": lambda: validate.having(5, "clock", "now"),
    "a struct of wrong types": lambda: validate.readable(ToolState(0, {"add": WRONG}), "the state"),
    "a struct that would be read as another": lambda: validate.readable(Message("user", "\ud800"), "it"),
    "a budget below nothing": lambda: Budget(steps=-1),
    "a budget of NaN": lambda: Budget(money=NAN),
    "a budget in words": lambda: Budget(seconds=untyped("a minute")),
    "a budget that says yes": lambda: Budget(tokens=True),
    "parts of a message that are none": lambda: Message("user", WRONG),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_value_is_refused_with_what_to_give_instead(what: str) -> None:
    with pytest.raises(InvalidInput):
        REFUSED[what]()


def test_what_is_refused_can_be_an_error_of_the_definition() -> None:
    with pytest.raises(InvalidDefinition, match="grace='soon' is not usable: give seconds, 0 or more, or None"):
        validate.seconds("soon", "grace", InvalidDefinition)


def test_what_is_right_comes_back_as_it_is() -> None:
    tools = [1, 2]

    assert validate.name("anna", "agent") == "anna"
    assert [validate.seconds(each) for each in (None, 0, 1.5)] == [None, 0, 1.5]
    assert validate.count(2**63 - 1, "limit") == 2**63 - 1
    assert validate.several(tools, "tools") == (1, 2)
    assert validate.flag(False, "recover") is False
    assert validate.readable(ToolState(3, {"add": False}), "it") == ToolState(3, {"add": False})


@pytest.mark.parametrize("odd", [Mood.CALM, Loud("calm")], ids=["an enum", "a subclass"])
def test_a_kind_of_string_is_its_plain_value(odd: str) -> None:
    """What `format` makes of it would be another id than the one in the rows."""
    for plain in (validate.name(odd, "agent"), ids.check_session_id(odd)):
        assert type(plain) is str
        assert plain == "calm"


@pytest.mark.parametrize("no_id", [None, 5, b"s.1", ["s.1"]])
def test_what_is_no_string_is_no_id_of_a_turn(no_id: Any) -> None:
    with pytest.raises(UnknownTurn):
        ids.split(no_id, 1)


@pytest.mark.parametrize("odd", [Hidden(), nested(10_000), 10**5000], ids=["hidden", "deep", "long"])
def test_a_message_survives_what_cannot_be_shown(odd: object) -> None:
    assert quoted(odd) == f"<a {type(odd).__name__} that cannot be shown>"


def test_a_message_quotes_the_beginning_of_what_is_long() -> None:
    assert quoted("short") == "'short'"
    assert quoted("x" * 1_000_000) == "'" + "x" * 499 + "…"
