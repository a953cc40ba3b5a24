"""Every kind of write is a crash point somewhere, with an outcome written by hand.

A new write on a ruled path fails the matrix; one on a path that no scenario takes would not. It fails here, until
somebody says where it is killed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.model import write
from perdure.stores.rules import RULES

TESTS = Path(__file__).parents[1]

KILLED: dict[type, tuple[str, str]] = {
    write.Accept: ("crash/outcomes.py", '"accept queue"'),
    write.Append: ("crash/outcomes.py", '"append 1: ended 1.0"'),
    write.Commit: ("crash/outcomes.py", '"commit 1"'),
    write.Resolve: ("crash/outcomes.py", '"resolve approval"'),
    write.Beat: ("crash/outcomes.py", '"beat"'),
    write.Retire: ("crash/outcomes.py", '"retire"'),
    write.Outlived: ("crash/test_suspect_points.py", '"outlived"'),
    write.Claim: ("crash/test_halted.py", '"claim"'),
    write.Release: ("crash/test_halted.py", '"release"'),
    write.Cancel: ("crash/test_halted.py", '"cancel"'),
    write.Resume: ("crash/test_stuck.py", '"resume"'),
    write.ReopenTurn: ("crash/test_continued.py", '"lost reopen 1"'),
    write.Configure: ("crash/test_settings.py", "configure"),
    write.Branch: ("crash/test_turns.py", '"branch"'),
    write.Delete: ("crash/test_turns.py", '"delete"'),
    write.Register: ("crash/test_processes_points.py", '"register p"'),
    write.Advance: ("crash/test_processes_points.py", '"advance p: ending"'),
    write.SendSignal: ("processes/test_function_kills.py", '"signal p"'),
    write.AddEvent: ("crash/test_processes_verbs.py", '"event"'),
    write.Share: ("crash/test_processes_verbs.py", '"share"'),
    write.Transfer: ("crash/test_processes_verbs.py", '"transfer"'),
    write.Complete: ("crash/test_processes_verbs.py", '"complete"'),
    write.Dismiss: ("crash/test_processes_verbs.py", '"dismiss"'),
    write.Prune: ("crash/test_processes_verbs.py", '"prune"'),
    write.Deliver: ("crash/test_wakes.py", '"deliver"'),
}


OF_PROCESSES: dict[type, tuple[str, str]] = {
    write.Claim: ("processes/test_function_kills.py", '"claim p"'),
    write.Cancel: ("processes/test_function_kills.py", '"cancel p"'),
    write.Release: ("crash/test_processes_verbs.py", '"release p as stuck"'),
    write.Resume: ("crash/test_processes_verbs.py", '"resume p"'),
}
"""The same writes, where it is a process that they are about."""


def test_every_write_has_a_ruling() -> None:
    assert {kind.__name__ for kind in RULES} == {kind.__name__ for kind in KILLED}


@pytest.mark.parametrize("ruling", [*KILLED.values(), *OF_PROCESSES.values()], ids=lambda ruling: ruling[1].strip('"'))
def test_its_point_stands_where_it_is_said_to(ruling: tuple[str, str]) -> None:
    file, point = ruling

    assert point in (TESTS / file).read_text()
