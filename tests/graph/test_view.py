"""What a session looks like: messages, frames, and how a turn ended."""

from __future__ import annotations

import pytest

from perdure.graph.commit import End, close
from perdure.graph.view import TurnView, View, turn_view, with_text
from perdure.model.llm import Usage
from perdure.model.message import Message, Text, ToolCall, ToolResult
from perdure.model.outcome import BudgetSpent, Finished, Incomplete, Outcome
from perdure.model.record import Closed, Ended, Faltered, Framed, Record, Replied, Said, Started
from perdure.model.tool import Cancelled, Failed, Ok, ToolRecord

USAGE = Usage(input=5, calls=1)


def user(text: str) -> Message:
    return Message("user", text)


def answer(text: str) -> Message:
    return Message("assistant", text)


def plain_turn(said: str, answered: str) -> list[Record]:
    return [Said(user(said)), Closed(Finished(), USAGE, Replied(1, (Text(answered),)))]


# ---------------------------------------------------------------------- history


def test_history_grows_turn_by_turn() -> None:
    view = View()

    view.extend(1, plain_turn("one", "first"))
    view.extend(3, plain_turn("two", "second"))

    assert view.messages == [user("one"), answer("first"), user("two"), answer("second")]
    assert view.prompt() == view.messages
    assert view.head == 3


def test_a_turn_committed_here_reads_like_one_loaded_from_disk() -> None:
    loaded, adopted = View(), View()
    loaded.extend(1, plain_turn("one", "first"))

    adopted.add(1, [user("one"), answer("first")])

    assert adopted == loaded


def test_a_prompt_without_a_frame_is_not_copied() -> None:
    view = View()
    view.extend(1, plain_turn("one", "first"))

    assert view.prompt() is view.messages


def test_a_frame_hides_the_past_from_prompts_and_not_from_history() -> None:
    view = View()
    view.extend(1, plain_turn("one", "first"))
    framed: list[Record] = [Said(user("two")), Framed("too long", (user("in short: one"),))]
    view.extend(2, [*framed, Closed(Finished(), USAGE, Replied(1, (Text("second"),)))])
    view.extend(3, plain_turn("three", "third"))

    assert view.prompt() == [user("in short: one"), user("two"), answer("second"), user("three"), answer("third")]
    assert view.messages == [
        user("one"),
        answer("first"),
        user("two"),
        answer("second"),
        user("three"),
        answer("third"),
    ]


def test_the_newest_frame_counts() -> None:
    view = View()
    view.extend(
        1,
        [
            Said(user("one")),
            Framed("first", (user("short"),)),
            Replied(1, (Text("between"),)),
            Framed("second", (user("shorter"),)),
            Closed(Finished(), USAGE, Replied(2, (Text("end"),))),
        ],
    )

    assert view.prompt() == [user("shorter"), user("one"), answer("between"), answer("end")]
    assert view.messages == [user("one"), answer("between"), answer("end")]


def test_part_of_a_turn_reads_up_to_where_it_was_forked() -> None:
    view = View()

    view.extend(1, [Said(user("one")), Faltered("busy", "no", 0, step=1)])

    assert view.messages == [user("one")]


# ---------------------------------------------------------------------- one turn


def test_a_turn_reads_with_its_calls_and_how_each_ended() -> None:
    records: list[Record] = [
        Said(user("go")),
        Replied(1, (Text("wait"), ToolCall("a", "look", {"q": 1}), ToolCall("b", "pay", {"n": 2})), started=(0,)),
        Started("1.1", {"n": 3}),
        Ended("1.1", Ok("paid"), 2, 1, 30),
        Faltered("retry", "later", 0, 1, 1, "1.0"),
        Ended("1.0", Failed("tool_error", "no"), 3),
        Replied(2, (ToolCall("c", "look"),)),
        Closed(BudgetSpent("steps", 1), USAGE),
    ]

    assert turn_view("s.1", records) == TurnView(
        BudgetSpent("steps", 1),
        USAGE,
        [
            user("go"),
            Message("assistant", (Text("wait"), ToolCall("a", "look", {"q": 1}), ToolCall("b", "pay", {"n": 2}))),
            Message("tool", (ToolResult("a", "look", {"error": "tool_error", "message": "no"}, "failed"),)),
            Message("tool", (ToolResult("b", "pay", "paid"),)),
            Message("assistant", (ToolCall("c", "look"),)),
            Message(
                "tool",
                (
                    ToolResult(
                        "c",
                        "look",
                        {"error": "cancelled", "message": "the turn ended before the call ran"},
                        "cancelled",
                    ),
                ),
            ),
        ],
        [
            ToolRecord("s.1.1.0", "look", {"q": 1}, Failed("tool_error", "no"), 3),
            ToolRecord("s.1.1.1", "pay", {"n": 3}, Ok("paid"), 2, 1, 30),
            ToolRecord("s.1.2.0", "look", {}, Cancelled("runtime", "the turn ended before the call ran"), 0),
        ],
    )


def test_calls_of_a_reply_that_rides_in_the_commit_are_read_too() -> None:
    view = turn_view(
        "s.1",
        [Said(user("go")), Closed(BudgetSpent("steps", 0), USAGE, Replied(1, (ToolCall("a", "look", {"q": 1}),)))],
    )

    assert view.tool_calls == [
        ToolRecord("s.1.1.0", "look", {"q": 1}, Cancelled("runtime", "the turn ended before the call ran"), 0)
    ]


def test_a_finished_turn_gets_its_text_back_from_the_last_reply() -> None:
    view = turn_view("s.1", plain_turn("one", "first"))

    assert view.outcome == Finished("first")


def test_an_open_turn_is_not_read_as_a_result() -> None:
    with pytest.raises(AssertionError, match="a committed turn has an outcome"):
        turn_view("s.1", [Said(user("one"))])


# ---------------------------------------------------------------------- texts of outcomes


@pytest.mark.parametrize(
    ("outcome", "stored"),
    [
        (Finished("text", {"v": 1}), Finished("", {"v": 1})),
        (Incomplete("length", "half"), Incomplete("length")),
        (BudgetSpent("steps", 1), BudgetSpent("steps", 1)),
    ],
)
def test_an_outcome_is_stored_without_the_text_that_stands_beside_it(outcome: Outcome, stored: Outcome) -> None:
    assert close(End(outcome, USAGE), None, 0).outcome == stored


@pytest.mark.parametrize(
    ("stored", "messages", "outcome"),
    [
        (Finished(""), [user("one"), answer("first"), user("late")], Finished("first")),
        (Incomplete("length"), [answer("half")], Incomplete("length", "half")),
        (Finished(""), [user("one")], Finished("")),
        (Finished("kept"), [answer("other")], Finished("kept")),
        (BudgetSpent("steps", 1), [answer("other")], BudgetSpent("steps", 1)),
    ],
)
def test_a_stored_outcome_is_read_with_its_text(stored: Outcome, messages: list[Message], outcome: Outcome) -> None:
    assert with_text(stored, messages) == outcome
