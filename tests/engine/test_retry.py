"""How long to wait before the next attempt."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.engine.retry import MODEL_RETRIES, RetryPolicy


class Noise:
    """A Random that always says the same."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def bits(self, count: int) -> int:
        assert 0 <= self.value < 2**count
        return self.value


POLICY = RetryPolicy(attempts=4, base=0.5, cap=10.0, asked_cap=60.0)


@pytest.mark.parametrize(
    ("attempt", "seconds"), [(1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0), (6, 10.0), (7, 10.0), (5_000, 10.0)]
)
def test_the_wait_doubles_up_to_its_cap(attempt: int, seconds: float) -> None:
    assert POLICY.delay(attempt, None, Noise()) == seconds


@pytest.mark.parametrize(("noise", "seconds"), [(0, 4.0), (32_768, 3.5), (16_384, 3.75)])
def test_jitter_takes_off_up_to_a_quarter(noise: int, seconds: float) -> None:
    assert POLICY.delay(4, None, Noise(noise)) == seconds


@given(st.integers(1, 10_000), st.integers(0, 65_535))
def test_the_wait_stays_within_its_bounds(attempt: int, noise: int) -> None:
    seconds = POLICY.delay(attempt, None, Noise(noise))

    whole = POLICY.delay(attempt, None, Noise())
    assert 0.75 * whole < seconds <= whole <= POLICY.cap


@pytest.mark.parametrize(
    ("asked", "seconds"), [(0, 0.0), (3, 3.0), (0.25, 0.25), (60, 60.0), (61, 60.0), (math.inf, 60.0), (-5, 0.0)]
)
def test_what_the_other_side_asked_for_goes_first_within_its_own_cap(asked: float, seconds: float) -> None:
    assert POLICY.delay(1, asked, Noise(65_535)) == seconds
    assert POLICY.delay(6, asked, Noise()) == seconds


def test_nonsense_that_the_other_side_asked_for_is_ignored() -> None:
    assert POLICY.delay(1, math.nan, Noise()) == 0.5


def test_a_model_is_asked_four_times_in_all() -> None:
    assert RetryPolicy(4, 0.5, 10.0, 60.0) == MODEL_RETRIES


@pytest.mark.parametrize(
    ("recorded", "due"), [(0, 0), (5_000, 5_000), (61_000, 61_000), (61_001, 61_000), (10**9, 61_000)]
)
def test_a_recorded_time_is_kept_unless_no_wait_is_that_long(recorded: int, due: int) -> None:
    """The clock that set it may have been ahead of ours."""
    assert RetryPolicy(cap=10, asked_cap=60).due(recorded, now=1_000) == due
