"""Whether a turn with an answer is held for its commands: by hand."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from perdure.turn.hold import UPDATES, AskAgain, CancelLate, HeldCommand, Ladder, News, ParkTurn, Shown, Update, decide

RUNS, OVER = HeldCommand("a", 1_000, True), HeldCommand("b", 2_000, False)
FRESH = Ladder()


@pytest.mark.parametrize(
    ("commands", "held", "now", "then"),
    [
        ([], None, 5_000, None),
        ([OVER], None, 5_000, None),
        ([RUNS], None, 5_000, ParkTurn(("a",), 11_000, FRESH)),
        ([RUNS, OVER], None, 5_000, ParkTurn(("a",), 11_000, FRESH)),
        ([RUNS, HeldCommand("c", 500, True)], None, 5_000, ParkTurn(("a", "c"), 10_500, FRESH)),
        ([RUNS], None, 11_000, None),
        ([RUNS], ("a",), 5_000, ParkTurn(("a",), 11_000, FRESH)),
        ([RUNS, OVER], ("a", "b"), 5_000, AskAgain(("b",), (), ("a",))),
        ([OVER], ("b",), 5_000, AskAgain(("b",))),
        ([RUNS], ("a",), 11_000, AskAgain((), ("a",))),
        ([RUNS, OVER], ("a", "b"), 11_000, AskAgain(("b",), ("a",))),
        ([RUNS, OVER], ("a",), 5_000, ParkTurn(("a",), 11_000, FRESH)),
    ],
)
def test_what_a_turn_is_held_for_follows_from_its_commands_and_the_time(
    commands: list[HeldCommand], held: tuple[str, ...] | None, now: int, then: Any
) -> None:
    found = decide(commands, held, now, 10_000, Ladder())

    assert (ParkTurn(found.commands, found.due, FRESH) if isinstance(found, ParkTurn) else found) == then


def looks_of(written: dict[int, tuple[int, int]], limit: int) -> list[tuple[int, tuple[News, ...]]]:
    """When the model is updated, and of what, if a command begun at 0 has written so much by these seconds."""
    told, ladder, now = [], Ladder(), 0
    held: tuple[str, ...] | None = None
    while True:
        out, err = max([(at, sizes) for at, sizes in written.items() if at * 1000 <= now], default=(0, (0, 0)))[1]
        match decide([HeldCommand("a", 0, True, out, err)], held, now, limit * 1000, ladder):
            case ParkTurn(held, due, ladder):
                now = due
            case Update(_, ladder):
                told.append((now // 1000, ladder.news))
                ladder, held = replace(ladder, news=()), None
            case _:
                return told


def test_looks_double_up_to_five_minutes_and_tell_only_what_is_new() -> None:
    told = looks_of({1: (5, 0), 100: (5, 7), 800: (9, 7)}, 1500)

    first, second = Shown("a", 30_000, 5), Shown("a", 210_000, 5, 7)
    assert told == [
        (30, (News(Shown("a", 0), first),)),
        (210, (News(first, second),)),
        (750, (News(second, replace(second, silent=True)),)),
        (1050, (News(replace(second, silent=True), Shown("a", 1_050_000, 9, 7)),)),
        (1350, (News(Shown("a", 1_050_000, 9, 7), Shown("a", 1_050_000, 9, 7, True)),)),
    ]


def test_a_turn_has_so_many_updates_and_then_waits_for_ends_only() -> None:
    told = looks_of({at: (at, 0) for at in range(10_000)}, 10_000)

    assert [at for at, _ in told] == [30, 90, 210, 450, 750, 1050, 1350, 1650]
    assert len(told) == UPDATES


def test_first_bytes_on_stderr_are_shown_at_once_and_later_ones_at_the_next_look() -> None:
    ladder = Ladder(next=31_000)
    first = decide([HeldCommand("a", 1_000, True, 5, 7)], ("a",), 2_000, 900_000, ladder)
    shown = Shown("a", 2_000, 5, 7)
    later = decide([HeldCommand("a", 1_000, True, 5, 70)], None, 3_000, 900_000, Ladder(0, 31_000, 1, (shown,)))
    spent = decide([HeldCommand("a", 1_000, True, 5, 7)], ("a",), 2_000, 900_000, replace(ladder, updates=UPDATES))

    assert first == Update(("a",), Ladder(0, 31_000, 1, (shown,), (News(Shown("a", 1_000), shown),)))
    assert later == ParkTurn(("a",), 31_000, Ladder(0, 31_000, 1, (shown,)))
    assert isinstance(spent, ParkTurn)


def test_commands_whose_time_is_over_are_ended_where_the_agent_says_so_and_held_until_they_are() -> None:
    ladder, stopping = Ladder(next=31_000), HeldCommand("a", 1_000, True, stopping=True)
    at_limit: list[Any] = [
        decide([each], ("a",), 11_000, 10_000, ladder, "cancel")
        for each in (RUNS, stopping, replace(stopping, live=False))
    ]
    before = decide([RUNS], ("a",), 10_999, 10_000, ladder, "cancel")

    assert at_limit == [CancelLate(("a",)), ParkTurn(("a",), 31_000, ladder), AskAgain(("a",))]
    assert isinstance(before, ParkTurn)


def test_news_that_a_crash_kept_from_the_model_are_told_as_they_were_written() -> None:
    news = (News(Shown("a", 1_000), Shown("a", 4_000, 5)),)
    ladder = Ladder(1, 64_000, 1, (news[0].after,), news)

    assert decide([HeldCommand("a", 1_000, True, 99)], ("a",), 5_000, 900_000, ladder) == Update(("a",), ladder)
    assert decide([HeldCommand("a", 1_000, False, 99)], ("a",), 5_000, 900_000, ladder) == AskAgain(("a",))
