"""Messages, replies and how records read as messages."""

from __future__ import annotations

from perdure.model.llm import ModelResponse, Usage
from perdure.model.message import Message, Reasoning, ResultStatus, Text, ToolCall, ToolResult, unanswered
from perdure.model.outcome import BudgetSpent, Finished, Waiting
from perdure.model.record import (
    Closed,
    Delivered,
    Ended,
    Faltered,
    Framed,
    Joined,
    Record,
    Replied,
    Said,
    Slot,
    Started,
)
from perdure.model.tool import Cancelled, Failed, Ok, ToolSpec
from perdure.model.transcript import Transcript

HI = Message("user", "hi")
A, B = ToolCall("a", "look"), ToolCall("b", "look")
USAGE = Usage()


def read(*records: Record) -> list[Message]:
    transcript = Transcript()
    for record in records:
        transcript.add(record)
    return transcript.messages


def result(call_id: str, content: object, status: ResultStatus = "ok") -> Message:
    return Message("tool", (ToolResult(call_id, "look", content, status),))


# ---------------------------------------------------------------------- messages


def test_a_string_is_the_only_part() -> None:
    assert Message("user", "hi") == Message("user", (Text("hi"),)) == Message("user", [Text("hi")])


def test_a_message_reads_its_parts_by_kind() -> None:
    message = Message("assistant", (Reasoning("hm"), Text("a"), A, Text("b"), ToolResult("x", "look")))

    assert message.text == "ab"
    assert message.tool_calls == [A]
    assert message.tool_results == [ToolResult("x", "look")]


def test_unanswered_calls_are_those_no_result_follows() -> None:
    asked = Message("assistant", (A, B))

    assert unanswered([HI]) == []
    assert unanswered([asked]) == ["a", "b"]
    assert unanswered([asked, result("b", 1)]) == ["a"]
    assert unanswered([result("a", 1), Message("assistant", (A,))]) == ["a"]
    assert unanswered([asked, result("a", 1), result("b", 1), result("stray", 1)]) == []


def test_a_response_gives_its_parts_in_emission_order() -> None:
    assert ModelResponse("hi", (A,), reasoning=(Reasoning("hm"),)).all_parts() == (Reasoning("hm"), Text("hi"), A)
    assert ModelResponse(tool_calls=[A]).all_parts() == (A,)
    assert ModelResponse("ignored", parts=[A, Text("after")]).all_parts() == (A, Text("after"))


def test_usage_adds_up_and_totals_what_was_paid_for() -> None:
    one, other = Usage(1, 2, 3, 4, 5, 6, 7, 0.5), Usage(10, 20, 30, 40, 50, 60, 70, 0.25)

    assert one + other == Usage(11, 22, 33, 44, 55, 66, 77, 0.75)
    assert one.total == 10


def test_a_tool_has_an_id_that_outlives_its_name() -> None:
    assert ToolSpec("look").tool_id == "tool:look"
    assert ToolSpec("look", id="tool:see").tool_id == "tool:see"


# ---------------------------------------------------------------------- records as messages


def test_a_plain_turn_reads_as_said_and_answered() -> None:
    assert read(Said(HI), Closed(Finished(), USAGE, Replied(1, (Text("hello"),)))) == [
        HI,
        Message("assistant", "hello"),
    ]


def test_results_wait_for_the_last_of_them() -> None:
    records: list[Record] = [Said(HI), Replied(1, (A, B)), Ended("1.1", Ok("second"))]

    assert read(*records) == [HI, Message("assistant", (A, B))]
    assert read(*records, Ended("1.0", Failed("oops", "no")))[2:] == [
        result("a", {"error": "oops", "message": "no"}, "failed"),
        result("b", "second"),
    ]


def test_what_was_gathered_stands_before_the_record_that_carries_it() -> None:
    steered, added = Message("user", "steer"), Message("user", "added")
    slot = Slot(delivered=(Delivered(2, steered),), messages=(added,))

    assert read(Said(HI), Replied(1, (Text("ok"),), slot=slot)) == [HI, steered, added, Message("assistant", "ok")]


def test_starts_failed_attempts_and_joined_inputs_say_nothing() -> None:
    assert read(Started("1.0", {}), Faltered("busy", "no", 0), Joined(3)) == []


def test_a_frame_says_nothing_itself_and_keeps_what_it_brought() -> None:
    summary, steered = Message("user", "in short"), Message("user", "steer")
    slot = Slot(delivered=(Delivered(2, steered),))

    assert read(Said(HI), Framed("too long", (summary,), slot=slot)) == [HI, steered]


def test_calls_that_never_ran_are_answered_when_the_turn_closes() -> None:
    never = {"error": "cancelled", "message": "the turn ended before the call ran"}

    assert read(Said(HI), Replied(1, (A, B)), Ended("1.1", Ok(1)), Closed(BudgetSpent("steps", 1), USAGE))[2:] == [
        result("a", never, "cancelled"),
        result("b", 1),
    ]


def test_a_turn_that_waits_has_not_answered_its_calls_yet() -> None:
    assert read(Said(HI), Replied(1, (A,)), Closed(Waiting(), USAGE)) == [HI, Message("assistant", (A,))]


def test_a_cancelled_turn_tells_its_open_calls_why() -> None:
    why = {"error": "cancelled", "message": "enough"}

    assert read(Said(HI), Replied(1, (A,)), Closed(Cancelled("ann", "enough"), USAGE))[2:] == [
        result("a", why, "cancelled")
    ]


def test_what_a_commit_gathered_stands_after_the_reply_that_rides_in_it() -> None:
    steered = Message("user", "one more thing")
    closed = Closed(
        BudgetSpent("tokens", 5), USAGE, Replied(1, (Text("hello"),)), slot=Slot(delivered=(Delivered(2, steered),))
    )

    assert read(Said(HI), closed) == [HI, Message("assistant", "hello"), steered]


def test_what_a_commit_gathered_does_not_part_calls_from_their_results() -> None:
    late = Message("user", "late")
    closed = Closed(BudgetSpent("steps", 1), USAGE, Replied(1, (A,)), slot=Slot(messages=(late,)))

    assert [m.role for m in read(Said(HI), closed)] == ["user", "assistant", "tool", "user"]
