"""What may be watched of a command, and what a monitor may be: bad input is refused, and says what to give."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace

from perdure.errors import InvalidCommand
from perdure.model.monitor import (
    MonitorSpec,
    MonitorStatus,
    Watch,
    monitor_events,
    monitor_status,
    read_spec,
    read_watch,
    watch_events,
)
from perdure.model.process import (
    Abandoned,
    Cancelled,
    Evidence,
    Failure,
    FirstStart,
    ProcessOutcome,
    ProcessRecord,
    ProcessRow,
    ProcessStatus,
    Registration,
    Success,
)

SPEC = MonitorSpec("tests", "make watch")


def test_no_watch_is_none() -> None:
    assert read_watch(None) is None
    assert watch_events(None) == ()


@pytest.mark.parametrize(
    "given",
    [
        Watch(True, 5, ("FAILED*",), 30),
        {"stderr": True, "silence": 5, "match": "FAILED*", "progress": 30},
        {"stderr": True, "silence": 5.0, "match": ["FAILED*"], "progress": 30.0},
    ],
)
def test_a_watch_is_read_from_itself_and_from_a_dict(given: Any) -> None:
    assert read_watch(given) == Watch(True, 5.0, ("FAILED*",), 30.0)


def test_a_command_has_the_events_that_are_watched_for_and_each_wakes() -> None:
    events = watch_events(Watch(True, 5, ("x",), 30))

    assert [each.name for each in events] == ["output.stderr", "output.silent", "output.matched", "output.progress"]
    assert all(each.wake is not None and each.wake.when == "/text" for each in events)
    assert watch_events(Watch()) == ()
    assert [each.name for each in monitor_events()] == ["output.lines", "monitor.restarted"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"matches": "x"}, "watch has no 'matches': there are stderr, silence, match, progress"),
        ("FAILED", "give Watch"),
        ({"stderr": "yes"}, "stderr"),
        ({"silence": 0}, "more than 0"),
        ({"silence": float("nan")}, "silence"),
        ({"progress": -1}, "progress"),
        ({"match": ""}, "1 to 500 characters of one line"),
        ({"match": "***"}, "1 to 500 characters of one line"),
        ({"match": ["a\nb"]}, "1 to 500 characters of one line"),
        ({"match": [7]}, "1 to 500 characters of one line"),
        ({"match": "x" * 501}, "1 to 500 characters of one line"),
        ({"match": ["x"] * 33}, "at most 32 texts"),
        ({"match": re.compile("(a+)+$")}, "is a regular expression, which may take for ever"),
        ({"match": 7}, "match"),
    ],
)
def test_what_cannot_be_watched_is_refused(given: Any, words: str) -> None:
    with pytest.raises(InvalidCommand, match=re.escape(words)):
        read_watch(given)


def test_a_monitor_is_read_as_it_is_kept() -> None:
    given = MonitorSpec("tests", ["make", "watch"], env={"CI": "1"}, timeout=60, batch=0)

    assert read_spec(given) == MonitorSpec("tests", ("make", "watch"), env={"CI": "1"}, timeout=60.0, batch=0.0)
    assert read_spec(SPEC) == SPEC


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": ""}, "monitor id ''"),
        ({"id": "a\nb"}, "1 to 100 printable characters"),
        ({"id": "a#b"}, "no '#'"),
        ({"id": "x" * 101}, "1 to 100 printable characters"),
        ({"wake": "queue_turn"}, "say 'turn', 'notify' or 'none'"),
        ({"timeout": None}, "up to 3600 seconds"),
        ({"timeout": 3601}, "persistent=True for one that runs on"),
        ({"timeout": 0}, "timeout=0"),
        ({"persistent": 1}, "persistent"),
        ({"batch": 61}, "up to 60 seconds"),
        ({"batch": None}, "up to 60 seconds"),
        ({"restart_on_restore": "no"}, "restart_on_restore"),
    ],
)
def test_what_no_monitor_can_be_is_refused(change: Any, words: str) -> None:
    with pytest.raises(InvalidCommand, match=re.escape(words)):
        read_spec(replace(SPEC, **change))


def test_only_a_spec_is_a_monitor() -> None:
    with pytest.raises(InvalidCommand, match="is no monitor: give MonitorSpec"):
        read_spec({"id": "tests"})


STARTED = FirstStart("w", 1, 1, 5)


@pytest.mark.parametrize(
    ("status", "outcome", "state", "error", "code"),
    [
        ("running", None, "running", "it began again", None),
        ("completed", Success({"exit_code": 3}), "exited", "it began again", 3),
        ("completed", Success(None), "exited", "it began again", None),
        ("failed", Failure("timed_out", "too long", {"exit_code": None}), "failed", "too long", None),
        ("cancelled", Cancelled("host"), "stopped", "it began again", None),
        ("abandoned", Abandoned(Evidence("sweep")), "failed", "it was given up", None),
    ],
)
def test_a_monitor_is_as_its_process_is(
    status: ProcessStatus, outcome: ProcessOutcome | None, state: Any, error: str, code: int | None
) -> None:
    told = {"lines": 7, "last": "seven", "command": 2, "error": "it began again"}
    record = ProcessRecord(status, first_started=STARTED, progress=told, outcome=outcome)
    row = ProcessRow(1, Registration("p", "monitor", "reattachable", "tests"), record)

    assert monitor_status(row) == MonitorStatus("tests", "p", state, outcome is None, 7, "seven", error, code, 1)


def test_a_monitor_that_has_not_begun_is_idle() -> None:
    row = ProcessRow(1, Registration("p", "monitor", "reattachable", "tests"), ProcessRecord())

    assert monitor_status(row) == MonitorStatus("tests", "p", "idle", True)
