"""Ids: made from the parent's, read from the right."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import InvalidSessionId, UnknownTurn
from perdure.model import ids

sessions = st.text(st.sampled_from("ab.1-é "), min_size=1, max_size=8).filter(lambda s: s == s.strip())
numbers = st.integers(0, 10**15 - 1)


def test_a_childs_id_is_its_parents_and_an_ordinal() -> None:
    assert ids.turn_id("chat-1", 7) == "chat-1.7"
    assert ids.node_id("chat-1", 7, 2) == "chat-1.7.2"
    assert ids.call_id("chat-1.7", 1, 0) == "chat-1.7.1.0"


@given(sessions, numbers, numbers, numbers)
def test_ids_are_read_back_whatever_the_session_is_called(session: str, turn: int, step: int, index: int) -> None:
    turn_id = ids.turn_id(session, turn)

    assert ids.split(turn_id, 1) == (session, (turn,))
    assert ids.split(ids.node_id(session, turn, step), 2) == (session, (turn, step))
    assert ids.split(ids.call_id(turn_id, step, index), 3) == (session, (turn, step, index))


def test_a_session_id_may_have_dots_and_digits() -> None:
    assert ids.split("v1.2.3.7", 1) == ("v1.2.3", (7,))
    assert ids.split("v1.2.3.7.0", 2) == ("v1.2.3", (7, 0))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", 1),
        ("chat", 1),
        ("chat.", 1),
        (".7", 1),
        ("chat.x", 1),
        ("chat.-1", 1),
        ("chat.+1", 1),
        ("chat. 1", 1),
        ("chat.1_0", 1),
        ("chat.٣", 1),
        ("chat.²", 1),
        ("chat.7", 2),
        ("chat.7.x", 2),
        ("chat.7.1", 3),
        ("chat." + "9" * 16, 1),
        ("chat." + "9" * 10_000, 1),
    ],
)
def test_what_is_no_id_is_unknown(text: str, parts: int) -> None:
    with pytest.raises(UnknownTurn):
        ids.split(text, parts)


# ---------------------------------------------------------------------- session ids


@pytest.mark.parametrize(
    "given_", ["a", "chat-1", "with space", "a.b.c", "ünï", "世界", "😀", "a/b\\c", "x" * 200, "."]
)
def test_a_session_may_be_called(given_: str) -> None:
    assert ids.check_session_id(given_) == given_


@pytest.mark.parametrize(
    "given_",
    ["", "x" * 201, " a", "a ", "a\nb", "a\0b", "a\x7f", "\ud800", "a\u2028b", "\u00a0", "\u200b", None, 5, b"chat"],
)
def test_a_session_may_not_be_called(given_: Any) -> None:
    with pytest.raises(InvalidSessionId) as raised:
        ids.check_session_id(given_)

    assert raised.value.session_id == given_


# ---------------------------------------------------------------------- minting

millis = st.integers(0, 16**11 - 1)
noises = st.integers(0, 16**10 - 1)


def test_minted_ids_are_eleven_digits_of_time_and_ten_of_noise() -> None:
    assert ids.mint("s", 0, 0) == "s-000000000000000000000"
    assert ids.mint("s", 16, 15) == "s-00000000010000000000f"
    assert ids.mint("s", 16**11 - 1, 16**10 - 1) == "s-fffffffffffffffffffff"


@given(st.tuples(millis, noises), st.tuples(millis, noises))
def test_minted_ids_sort_by_time_and_differ_when_their_noise_does(one: tuple[int, int], other: tuple[int, int]) -> None:
    first, second = ids.mint("s", *one), ids.mint("s", *other)

    assert (first < second) == (one < other)
    assert (first == second) == (one == other)


@given(millis, noises)
def test_a_minted_id_is_a_session_id(at: int, noise: int) -> None:
    minted = ids.mint("s", at, noise)

    assert ids.check_session_id(minted) == minted
    assert ids.split(ids.turn_id(minted, 1), 1) == (minted, (1,))
