"""A seeded sample of `make soak`: workers that are told to stop under load."""

from pathlib import Path

import pytest

from tests.soak.run_stops import Count, stop_under_load


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
async def test_a_worker_that_is_told_to_stop_under_load_drains(tmp_path: Path, seed: int) -> None:
    count = Count()

    await stop_under_load(count, tmp_path, seed)

    assert count.problems == []
    assert count.stops == 1
