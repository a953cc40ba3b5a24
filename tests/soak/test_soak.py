"""A seeded sample of `make soak`."""

from pathlib import Path

from tests.soak.run import soak


def test_random_kills_and_leavings_lose_nothing_and_repeat_only_what_may_be(tmp_path: Path) -> None:
    count = soak(tmp_path, kills=8, leavings=4, seed=7, inputs=60)
    print(count)

    assert count.problems == []
    assert (count.kills, count.leavings) == (8, 4)
    assert count.acknowledged >= 60
