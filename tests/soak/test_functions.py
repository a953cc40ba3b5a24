"""A seeded sample of the soak of durable functions."""

from pathlib import Path

import pytest

from tests.soak.run_functions import soak


@pytest.mark.kill
@pytest.mark.slow
def test_counters_known_beforehand_come_out_right_under_random_kills(tmp_path: Path) -> None:
    count = soak(tmp_path, kills=6, seed=7, processes=120)
    print(count)

    assert count.problems == []
    assert count.kills == 6
    assert count.completed == 120 * count.rounds
