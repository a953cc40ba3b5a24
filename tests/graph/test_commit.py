"""What the one write that ends a turn contains."""

from __future__ import annotations

from perdure.graph.commit import End, Tail, close, plan
from perdure.model.llm import Usage
from perdure.model.message import Text
from perdure.model.outcome import BudgetSpent, Finished, Incomplete
from perdure.model.record import Closed, Replied, Slot
from perdure.model.session import Node
from perdure.model.tool import Cancelled
from perdure.model.write import Commit, TurnScope

SCOPE = TurnScope("chat", 4, 7, "w-1", 3)
REPLY = Replied(2, (Text("good day"),))
USAGE = Usage(input=5, calls=2)


def test_the_last_record_carries_the_reply_and_not_its_text_twice() -> None:
    assert close(End(Finished("good day", {"v": 1}), USAGE), REPLY, 9) == Closed(
        Finished("", {"v": 1}), USAGE, REPLY, 9
    )
    assert close(End(Incomplete("length", "good"), USAGE), REPLY, 9).outcome == Incomplete("length")


def test_other_outcomes_are_kept_as_they_are() -> None:
    slot = Slot(elapsed_ms=5)

    spent = BudgetSpent("steps", 1)

    assert close(End(spent, USAGE, slot), None, 9) == Closed(spent, USAGE, None, 9, slot)


def test_a_commit_writes_what_is_left_and_moves_the_head() -> None:
    tail = Tail(3, [b"ended", b"closed"], (8, 9), ("digest",))

    commit = plan(SCOPE, 5, tail, Closed(Finished(), USAGE, at=11))

    assert commit == Commit(
        SCOPE, (Node(3, b"ended"), Node(4, b"closed")), 5, 11, (8, 9), cancelled=False, blobs=("digest",)
    )


def test_a_cancelled_turns_commit_says_so() -> None:
    commit = plan(SCOPE, 5, Tail(1, [b"closed"]), Closed(Cancelled("ann"), USAGE, at=11))

    assert commit == Commit(SCOPE, (Node(1, b"closed"),), 5, 11, cancelled=True)
