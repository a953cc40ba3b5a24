"""Whether a turn with an answer is held for its commands: by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mainstay.turn.hold import HeldCommand, Hold, Tell, decide

RUNS, OVER = HeldCommand("a", 1_000, True), HeldCommand("b", 2_000, False)


@pytest.mark.parametrize(
    ("commands", "held", "now", "then"),
    [
        ([], None, 5_000, None),
        ([OVER], None, 5_000, None),
        ([RUNS], None, 5_000, Hold(("a",), 11_000)),
        ([RUNS, OVER], None, 5_000, Hold(("a",), 11_000)),
        ([RUNS, HeldCommand("c", 500, True)], None, 5_000, Hold(("a", "c"), 10_500)),
        ([RUNS], None, 11_000, None),
        ([RUNS], ("a",), 5_000, Hold(("a",), 11_000)),
        ([RUNS, OVER], ("a", "b"), 5_000, Tell(("b",), (), ("a",))),
        ([OVER], ("b",), 5_000, Tell(("b",))),
        ([RUNS], ("a",), 11_000, Tell((), ("a",))),
        ([RUNS, OVER], ("a", "b"), 11_000, Tell(("b",), ("a",))),
        ([RUNS, OVER], ("a",), 5_000, Hold(("a",), 11_000)),
    ],
)
def test_what_a_turn_is_held_for_follows_from_its_commands_and_the_time(
    commands: list[HeldCommand], held: tuple[str, ...] | None, now: int, then: Any
) -> None:
    assert decide(commands, held, now, 10_000) == then
