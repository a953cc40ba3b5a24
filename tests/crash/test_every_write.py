"""Every kind of write is a crash point somewhere, with an outcome written by hand.

A new write on a ruled path fails the matrix; one on a path that no scenario takes would not. It fails here, until
somebody says where it is killed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mainstay.model import process_write as processes
from mainstay.model import write as sessions
from mainstay.stores.rules import RULES

TESTS = Path(__file__).parents[1]

KILLED: dict[type, tuple[str, str]] = {
    sessions.Accept: ("crash/outcomes.py", '"accept queue"'),
    sessions.Append: ("crash/outcomes.py", '"append 1: ended 1.0"'),
    sessions.Commit: ("crash/outcomes.py", '"commit 1"'),
    sessions.Resolve: ("crash/outcomes.py", '"resolve approval"'),
    sessions.Beat: ("crash/outcomes.py", '"beat"'),
    sessions.Retire: ("crash/outcomes.py", '"retire"'),
    sessions.Outlived: ("crash/test_suspect_points.py", '"outlived"'),
    sessions.Claim: ("crash/test_halted.py", '"claim"'),
    sessions.Release: ("crash/test_halted.py", '"release"'),
    sessions.Cancel: ("crash/test_halted.py", '"cancel"'),
    sessions.Resume: ("crash/test_stuck.py", '"resume"'),
    sessions.Configure: ("crash/test_settings.py", "configure"),
    sessions.Branch: ("crash/test_turns.py", '"branch"'),
    sessions.Delete: ("crash/test_turns.py", '"delete"'),
    processes.Register: ("crash/test_processes_points.py", '"register p"'),
    processes.Advance: ("crash/test_processes_points.py", '"advance p: ending"'),
    processes.SendSignal: ("processes/test_function_kills.py", '"signal p"'),
    processes.AddEvent: ("crash/test_processes_verbs.py", '"event"'),
    processes.Share: ("crash/test_processes_verbs.py", '"share"'),
    processes.Transfer: ("crash/test_processes_verbs.py", '"transfer"'),
    processes.Complete: ("crash/test_processes_verbs.py", '"complete"'),
    processes.Dismiss: ("crash/test_processes_verbs.py", '"dismiss"'),
    processes.Prune: ("crash/test_processes_verbs.py", '"prune"'),
    processes.Deliver: ("crash/test_wakes.py", '"deliver"'),
}


OF_PROCESSES: dict[type, tuple[str, str]] = {
    sessions.Claim: ("processes/test_function_kills.py", '"claim p"'),
    sessions.Cancel: ("processes/test_function_kills.py", '"cancel p"'),
    sessions.Release: ("crash/test_processes_verbs.py", '"release p as stuck"'),
    sessions.Resume: ("crash/test_processes_verbs.py", '"resume p"'),
}
"""The same writes, where it is a process that they are about."""


def test_every_write_has_a_ruling() -> None:
    assert {kind.__name__ for kind in RULES} == {kind.__name__ for kind in KILLED}


@pytest.mark.parametrize("ruling", [*KILLED.values(), *OF_PROCESSES.values()], ids=lambda ruling: ruling[1].strip('"'))
def test_its_point_stands_where_it_is_said_to(ruling: tuple[str, str]) -> None:
    file, point = ruling

    assert point in (TESTS / file).read_text()
