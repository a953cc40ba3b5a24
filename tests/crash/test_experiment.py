"""The crash experiment with real kills. Ideal: three model calls, effect one once, effect two once or unknown."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from perdure.model.tool import Recovery
from perdure.testing.crash import Crash, ForkServer, Mode
from tests.crash.experiment import SCENARIOS, SESSION


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(*SCENARIOS["once", False]) as ready:
        yield ready


# Killed just before effect two, and just after it: times it happened, its outcome, repeats counted in its record.
EXPECTED: dict[tuple[str, str], tuple[int, str, int]] = {
    ("once", "before"): (0, "outcome_unknown", 0),
    ("once", "lost"): (1, "outcome_unknown", 0),
    ("rerun", "before"): (1, "ok", 1),
    ("rerun", "lost"): (2, "ok", 1),
    ("ask", "before"): (1, "ok", 1),
    ("ask", "lost"): (1, "ok", 0),
}


@pytest.mark.kill
@pytest.mark.parametrize("parallel", [False, True], ids=["serial", "parallel"])
@pytest.mark.parametrize("mode", ["before", "lost"], ids=["before effect two", "after effect two"])
@pytest.mark.parametrize("recovery", ["once", "rerun", "ask"])
def test_turn_goes_on_when_a_runtime_is_entered(
    forks: ForkServer, recovery: Recovery, mode: Mode, parallel: bool, record_property: Any
) -> None:
    scenario, resume = SCENARIOS[recovery, parallel]

    played = forks.play([Crash("effect two", mode)], scenario, resume)

    assert played.problems == []
    session = played.ending.session(SESSION)
    assert session is not None
    assert (session.state, session.turns) == ("idle", {1: "finished"})
    two = next(call for call in session.calls if call.tool == "two")
    assert (played.model_calls, played.count("one")) == (3, 1)
    assert (played.count("two"), two.outcome, two.repeated) == EXPECTED[recovery, mode]
    when = "before" if mode == "before" else "after"
    calls = f"{played.model_calls} model calls, effects {played.count('one')} and {played.count('two')}"
    way = "parallel" if parallel else "serial"
    record_property("perdure", f"experiment: {recovery}, {way}, killed {when} effect two: {calls}, {two.outcome}")
