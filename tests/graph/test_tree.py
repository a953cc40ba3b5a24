"""How sessions share history: stretches, turns, and where one may branch."""

from __future__ import annotations

import pytest

from perdure.graph.view import Stretch, Turn, forkable, stretches
from perdure.model.llm import Usage
from perdure.model.message import Message, Text, ToolCall
from perdure.model.outcome import Finished
from perdure.model.record import Closed, Ended, Joined, Replied, Said
from perdure.model.session import Fork, SessionRow
from perdure.model.tool import Cancelled, Ok

SAID = Said(Message("user", "hi"))
CALLS = Replied(1, (ToolCall("a", "look"), ToolCall("b", "look")), started=(0, 1))
CLOSED = Closed(Finished(), Usage(), Replied(2, (Text("done"),)))


def session(sid: int, head: int, fork: Fork | None = None) -> SessionRow:
    return SessionRow(sid, f"s{sid}", "a", head=head, fork=fork)


# ---------------------------------------------------------------------- stretches


def test_a_session_of_its_own_is_one_stretch() -> None:
    assert stretches([session(1, 4)]) == [Stretch(1, 4)]


def test_a_fork_begins_with_a_stretch_of_its_source() -> None:
    assert stretches([session(2, 3, Fork(1, 5, 2)), session(1, 9)]) == [Stretch(1, 5, 2), Stretch(2, 3)]


def test_forks_of_forks_read_from_the_oldest_on() -> None:
    lineage = [session(3, 1, Fork(2, 2, 0)), session(2, 7, Fork(1, 5, 4)), session(1, 9)]

    assert stretches(lineage) == [Stretch(1, 5, 4), Stretch(2, 2, 0), Stretch(3, 1)]


def test_a_fork_of_a_fork_without_turns_has_an_empty_stretch_in_between() -> None:
    lineage = [session(3, 1, Fork(2, 0, 0)), session(2, 0, Fork(1, 5, 4)), session(1, 9)]

    assert stretches(lineage) == [Stretch(1, 5, 4), Stretch(2, 0, 0), Stretch(3, 1)]


# ---------------------------------------------------------------------- turns


def test_a_turn_knows_its_beginning_its_end_and_what_it_joined() -> None:
    whole, joined, open_ = Turn(1, [SAID, CLOSED]), Turn(2, [SAID, Joined(1)]), Turn(3, [SAID])

    assert (whole.said, whole.closed, whole.joined) == (SAID, CLOSED, None)
    assert (joined.said, joined.closed, joined.joined) == (SAID, None, 1)
    assert (open_.said, open_.closed, open_.joined) == (SAID, None, None)


def test_a_turn_without_records_or_with_others_first_has_no_input() -> None:
    assert (Turn(1, []).said, Turn(1, []).closed, Turn(1, []).joined) == (None, None, None)
    assert Turn(1, [CALLS]).said is None


# ---------------------------------------------------------------------- where history may branch

WHOLE = Turn(7, [SAID, CALLS, Ended("1.1", Ok(1)), Ended("1.0", Ok(1)), CLOSED])


@pytest.mark.parametrize("ordinal", [0, 3, 4])
def test_history_branches_where_every_call_has_its_result(ordinal: int) -> None:
    assert forkable(WHOLE, ordinal) is None


@pytest.mark.parametrize("ordinal", [1, 2])
def test_history_does_not_branch_between_a_call_and_its_result(ordinal: int) -> None:
    assert forkable(WHOLE, ordinal) == "tool calls before it have no result yet: choose a later node"


@pytest.mark.parametrize("ordinal", [-1, 5, 99])
def test_history_does_not_branch_where_there_is_no_record(ordinal: int) -> None:
    assert forkable(WHOLE, ordinal) == "its turn has records 0 to 4"


def test_history_does_not_branch_in_an_open_turn() -> None:
    assert forkable(Turn(7, [SAID, CALLS]), 0) == "its turn is not committed"
    assert forkable(Turn(7, []), 0) == "its turn is not committed"


def test_history_does_not_branch_at_an_input_that_joined_another_turn() -> None:
    assert forkable(Turn(8, [SAID, Joined(7)]), 0) == "input 8 was delivered into turn 7: fork there"


def test_history_branches_after_a_cancelled_turn_whose_calls_were_cut_off() -> None:
    cancelled = Turn(7, [SAID, CALLS, Closed(Cancelled("ann"), Usage())])

    assert forkable(cancelled, 1) is not None
    assert forkable(cancelled, 2) is None
