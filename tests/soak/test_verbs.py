"""A seeded sample of the soak of all verbs."""

import asyncio
from pathlib import Path

import pytest

from tests.soak.program import append
from tests.soak.run_verbs import Count, judge, soak


@pytest.mark.kill
@pytest.mark.slow
def test_three_processes_keep_every_promise_under_kills_stops_and_leavings(tmp_path: Path) -> None:
    count = soak(tmp_path, seconds=8, seed=7, least=5)
    print(count)

    assert count.problems == []
    assert count.kills >= 3
    assert count.stops >= 1
    assert count.leavings >= 1
    assert count.cases > 100

    append(tmp_path / "ledger", "pay s0.1.1.99")
    append(tmp_path / "told", "turn s0.99999")
    again = Count()
    asyncio.run(judge(tmp_path, again))
    assert len(again.problems) == 2, "an effect and an acknowledgement that the store knows nothing of are noticed"
