"""Who was there at a death is not guilty: the law that tells suspects from bystanders, as a table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from perdure.lifecycle import suspects
from perdure.model.session import Death, Deaths

SCOPE, OTHER = 7, -3
NOBODY, ITSELF, ANOTHER = Death("w"), Death("w", suspect=SCOPE), Death("w", suspect=OTHER)


def lived_through(*deaths: Death) -> Deaths:
    mark = None
    for death in deaths:
        mark = suspects.after(mark, SCOPE, death)
    return mark or Deaths(SCOPE)


@pytest.mark.parametrize(
    ("deaths", "suspect", "stuck"),
    [
        ([], False, False),
        ([NOBODY], False, False),
        ([NOBODY, NOBODY], True, False),
        ([NOBODY, NOBODY, ITSELF], True, False),
        ([NOBODY, NOBODY, ITSELF, ITSELF], True, False),
        ([NOBODY, NOBODY, ITSELF, ITSELF, ITSELF], True, True),
        ([ANOTHER] * 9, False, False),
        ([NOBODY, *[ANOTHER] * 9], False, False),
        ([NOBODY, NOBODY, *[ANOTHER] * 9], True, False),
        ([NOBODY] * 9, True, False),
    ],
)
def test_deaths_make_suspects_and_only_those_of_the_only_suspect_make_it_stuck(
    deaths: list[Death], suspect: bool, stuck: bool
) -> None:
    mark = lived_through(*deaths)

    assert (suspects.is_suspect(mark), suspects.is_stuck(mark)) == (suspect, stuck)


def test_a_life_is_measured_on_the_clock_of_the_worker_that_lived_it() -> None:
    taken = Deaths(SCOPE, counted=1, worker="w", since=4_000)

    assert suspects.after(taken, SCOPE, Death("w", 9_000)).life == 5_000
    assert suspects.after(replace(taken, life=6_000), SCOPE, Death("w", 9_000)).life == 6_000
    assert suspects.after(taken, SCOPE, Death("v", 9_000)).life == 0, "another worker has another clock"
    assert suspects.after(taken, SCOPE, Death("w", 3_000)).life == 0, "it had not beaten since the claim"
    assert suspects.after(taken, SCOPE, Death("w", 9_000, OTHER)).life == 0, "that death is not counted"


@pytest.mark.parametrize(
    ("lives", "room"), [([], 10_000), ([0, 4_000], 10_000), ([5_001], 10_002), ([60_000, 1], 120_000)]
)
def test_a_suspect_makes_room_after_twice_the_longest_fatal_life_and_ten_seconds(lives: list[int], room: int) -> None:
    assert suspects.room_after([Deaths(n, life=life) for n, life in enumerate(lives)]) == room


def test_a_suspect_that_made_room_is_none_and_its_fatal_lives_are_remembered() -> None:
    mark = replace(lived_through(NOBODY, NOBODY, ITSELF), life=8_000)

    freed = suspects.excused(mark)

    assert not suspects.is_suspect(freed)
    assert (freed.alone, freed.life) == (0, 8_000)
    assert not suspects.is_suspect(suspects.after(freed, SCOPE, NOBODY))
    assert suspects.is_suspect(suspects.after(suspects.after(freed, SCOPE, NOBODY), SCOPE, NOBODY))


@given(st.lists(st.sampled_from([NOBODY, ITSELF, ANOTHER])))
def test_a_scope_is_stuck_only_after_three_deaths_as_the_only_suspect(deaths: list[Death]) -> None:
    mark = lived_through(*deaths)

    assert suspects.is_stuck(mark) is (deaths.count(ITSELF) >= 3)
    assert mark.counted == sum(death is not ANOTHER for death in deaths)


def test_a_suspect_is_told_of_in_words() -> None:
    told = suspects.why(lived_through(NOBODY, NOBODY, ITSELF))

    assert told.startswith("3 workers died with it in their hands, without a new record")
    assert told.endswith("1 of 3 died so")
