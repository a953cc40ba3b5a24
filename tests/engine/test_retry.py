"""How long to wait before the next attempt."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import Retries
from perdure.engine.retry import is_retried, kept_due, next_due, pause
from perdure.errors import InvalidDefinition, ProviderError
from perdure.model.retries import UNBOUNDED, read_retries
from tests.kit import untyped


class Noise:
    """A Random that always says the same."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def bits(self, count: int) -> int:
        assert 0 <= self.value < 2**count
        return self.value


RETRIES = Retries(longest=10.0)


@pytest.mark.parametrize(
    ("attempt", "seconds"), [(1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0), (6, 10.0), (7, 10.0), (5_000, 10.0)]
)
def test_the_wait_doubles_up_to_the_longest(attempt: int, seconds: float) -> None:
    assert pause(RETRIES, attempt, None, Noise()) == seconds


@pytest.mark.parametrize(("noise", "seconds"), [(0, 4.0), (32_768, 3.5), (16_384, 3.75)])
def test_jitter_takes_off_up_to_a_quarter(noise: int, seconds: float) -> None:
    assert pause(RETRIES, 4, None, Noise(noise)) == seconds


@given(st.integers(1, 10_000), st.integers(0, 65_535))
def test_the_wait_stays_within_its_bounds(attempt: int, noise: int) -> None:
    seconds = pause(RETRIES, attempt, None, Noise(noise))

    whole = pause(RETRIES, attempt, None, Noise())
    assert 0.75 * whole < seconds <= whole <= RETRIES.longest


@pytest.mark.parametrize(("asked", "seconds"), [(0, 0.0), (3, 3.0), (0.25, 0.25), (600, 600.0), (-5, 0.0)])
def test_what_the_other_side_asked_for_goes_first(asked: float, seconds: float) -> None:
    assert pause(RETRIES, 1, asked, Noise(65_535)) == seconds
    assert pause(RETRIES, 6, asked, Noise()) == seconds


def test_nonsense_that_the_other_side_asked_for_is_ignored() -> None:
    assert pause(RETRIES, 1, math.nan, Noise()) == 0.5


@pytest.mark.parametrize(("failures", "due"), [(1, 1_500), (2, 2_000), (3, None), (4, None)])
def test_no_attempt_follows_the_last_one(failures: int, due: int | None) -> None:
    assert next_due(Retries(attempts=3, within=None), failures, None, 1_000, 0, Noise()) == due


@pytest.mark.parametrize(
    ("now", "due"), [(1_000, 33_000), (29_000, 61_000), (40_000, 61_000), (60_999, 61_000), (61_000, None)]
)
def test_the_last_pause_ends_with_the_time_for_retries(now: int, due: int | None) -> None:
    """The first attempt failed at second 1, and retries are made for a minute."""
    assert next_due(Retries(within=60), 7, None, now, 1_000, Noise()) == due


@pytest.mark.parametrize(
    ("asked", "due"), [(59, 60_000), (60, 61_000), (61, None), (math.inf, 1_500), (10**400, None), (math.nan, 1_500)]
)
def test_a_pause_that_was_asked_for_is_not_shortened(asked: float, due: int | None) -> None:
    assert next_due(Retries(within=60), 1, asked, 1_000, 1_000, Noise()) == due


def test_without_a_limit_of_time_attempts_go_on() -> None:
    assert next_due(Retries(within=None), 10_000, None, 10**13, 0, Noise()) == 10**13 + 60_000
    assert next_due(Retries(within=None), 1, 10**400, 0, 0, Noise()) == 10**12


@pytest.mark.parametrize(
    ("recorded", "due"), [(0, 0), (5_000, 5_000), (61_000, 61_000), (61_001, 61_000), (10**9, 61_000)]
)
def test_a_recorded_time_is_kept_unless_no_wait_is_that_long(recorded: int, due: int) -> None:
    """The clock that set it may have been ahead of ours."""
    assert kept_due(Retries(longest=10, within=60), recorded, now=1_000) == due


def test_a_whole_number_is_the_number_of_further_attempts() -> None:
    assert read_retries(3, "retries") == Retries(attempts=4)
    assert read_retries(0, "retries").more == 0
    assert Retries().more == UNBOUNDED


@pytest.mark.parametrize(
    ("retries", "error", "retried"),
    [
        (Retries(), ValueError(), True),
        (Retries(never=ValueError), ValueError(), False),
        (Retries(on=KeyError), ValueError(), False),
        (Retries(on=(KeyError, ValueError)), ValueError(), True),
        (Retries(on=Exception, never=lambda error: "no" in str(error)), ValueError("no"), False),
        (Retries(on=lambda error: "yes" in str(error)), ValueError("yes"), True),
        (Retries(on=lambda error: bool(error.args[7])), ValueError("yes"), False),
    ],
)
def test_which_failures_are_retried(retries: Retries, error: Exception, retried: bool) -> None:
    assert is_retried(retries, error, usual=True) is retried


def test_on_takes_the_place_of_the_usual_rule() -> None:
    refused = ProviderError("no such key", code="unauthorized")

    assert not is_retried(Retries(), refused, usual=False)
    assert is_retried(Retries(on=ProviderError), refused, usual=False)


@pytest.mark.parametrize(
    "given",
    [
        {"attempts": 0}, {"attempts": True}, {"attempts": 1.5}, {"first": -1}, {"first": "1"}, {"factor": 0.5},
        {"longest": math.inf}, {"within": math.nan}, {"within": -1}, {"on": "ValueError"}, {"on": int},
        {"never": ("ValueError",)}, {"never": [ValueError]},
    ],
)  # fmt: skip
def test_retries_that_mean_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidDefinition, match="is not usable: give"):
        Retries(**given)


@pytest.mark.parametrize("given", [-1, True, 1.0, "2", UNBOUNDED])
def test_what_is_neither_a_number_nor_retries_is_refused(given: object) -> None:
    with pytest.raises(InvalidDefinition, match=r"give a whole number, 0 or more, or Retries\(…\)"):
        read_retries(untyped(given), "retries")
