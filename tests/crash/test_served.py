"""Kills before, inside and after a call of an MCP server, and around a question that it answers with.

Fates are written by hand: how often the server was really called, and how the call ended. A call that may have been
sent is never sent again; a question that is on disk is answered in whatever process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from perdure.testing.crash import Crash, Mode, play
from tests.crash.served import Served, asked, called

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="servers over pipes run on Linux")

CALLED: list[tuple[str, Mode, int, str]] = [
    ("register mcp.stub", "lost", 1, "ok"),
    ("event", "before", 1, "ok"),
    ("event", "lost", 1, "ok"),
    ("append 1: started 1.0", "before", 1, "ok"),
    ("append 1: started 1.0", "lost", 0, "outcome_unknown"),
    ("begin mcp__stub__echo 1.1.0", "before", 0, "outcome_unknown"),
    ("end mcp__stub__echo 1.1.0", "before", 1, "outcome_unknown"),
    ("append 1: ended 1.0", "before", 1, "outcome_unknown"),
    ("append 1: ended 1.0", "lost", 1, "ok"),
    ("commit 1", "before", 1, "ok"),
]

PARKING = "append 1: nothing, opening a wait, parking"
ASKED: list[tuple[str, Mode, int, str]] = [
    ("append 1: started 1.0", "before", 2, "ok"),
    ("begin mcp__stub__ask 1.1.0", "before", 0, "outcome_unknown"),
    (PARKING, "before", 1, "outcome_unknown"),
    (PARKING, "lost", 2, "ok"),
    ("resolve input#2", "before", 2, "ok"),
    ("resolve input#2", "lost", 2, "ok"),
    ("append 1: started 1.0 #2", "before", 2, "ok"),
    ("append 1: started 1.0 #2", "lost", 1, "outcome_unknown"),
    ("begin mcp__stub__ask 1.1.0 #2", "before", 1, "outcome_unknown"),
    ("end mcp__stub__ask 1.1.0", "before", 2, "outcome_unknown"),
    ("append 1: ended 1.0", "lost", 2, "ok"),
]


@pytest.mark.parametrize(("point", "mode", "calls", "outcome"), CALLED, ids=[f"{each[0]} {each[1]}" for each in CALLED])
def test_call_of_a_server_is_sent_at_most_once(
    tmp_path: Path, point: str, mode: Mode, calls: int, outcome: str
) -> None:
    served = Served(tmp_path, "echo")
    played = play(called(served), [Crash(point, mode)])

    check(played.ending.session("s"), outcome)
    assert (played.problems, played.unreached) == ([], [])
    assert served.calls == calls


@pytest.mark.parametrize(("point", "mode", "calls", "outcome"), ASKED, ids=[f"{each[0]} {each[1]}" for each in ASKED])
def test_question_of_a_server_is_answered_once(
    tmp_path: Path, point: str, mode: Mode, calls: int, outcome: str
) -> None:
    served = Served(tmp_path, "ask")
    played = play(asked(served), [Crash(point, mode)])

    check(played.ending.session("s"), outcome)
    assert (played.problems, played.unreached) == ([], [])
    assert served.calls == calls


def check(session: object, outcome: str) -> None:
    assert [each.outcome for each in getattr(session, "calls", ())] == [outcome]
    assert getattr(session, "turns", None) == {1: "finished"}
