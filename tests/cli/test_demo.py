"""`perdure demo` without a terminal, its ledger and store counted again here; and the counting itself."""

import json
import re
import shutil
import sqlite3
import sys
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from perdure.examples.kill_and_resume import POINTS, DemoReport, Kill, count, points
from perdure.examples.trip import Line
from perdure.model.llm import Usage
from perdure.model.message import Message, Part, Text, ToolCall
from perdure.model.outcome import Finished
from perdure.model.record import Closed, Ended, Record, Replied, Said
from perdure.model.tool import Ok, OutcomeUnknown
from tests.cli.shell import process

ONCE = "charge_card"


def outside(folder: Path) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """From the services' ledger: how often each key began, took effect, and how often the card was charged."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    began = Counter(x["key"] for x in lines if x["what"] in ("began", "asked"))
    effects = Counter(x["key"] for x in lines if x["what"] == "effect")
    return began, effects, Counter(x["who"] for x in lines if x["what"] == "effect")


def recorded(folder: Path) -> dict[str, tuple[str, str, int]]:
    """From the file, by hand: outcome, tool and repeats of every call."""
    file = sqlite3.connect(folder / "demo.db")
    records = [json.loads(body) for (body,) in file.execute("SELECT body FROM nodes ORDER BY rowid")]
    file.close()
    names: dict[str, str] = {}
    for record in records:
        calls = [p for p in record.get("parts", []) if p["type"] == "tool_call"]
        names |= {f"trip.1.{record['step']}.{i}": call["name"] for i, call in enumerate(calls)}
    ended = [r for r in records if r["type"] == "ended.1"]
    return {
        f"trip.1.{r['call']}": (r["outcome"]["type"], names[f"trip.1.{r['call']}"], r.get("repeated", 0)) for r in ended
    }


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "unknown", "repeated", "beside"),
    [
        (0, ["charge_card"], [], []),
        (2, [], ["book_seat"], ["reserve_room"]),  # which may have been quick enough to end
        (3, [], [], []),
    ],
    ids=["in a once tool", "in a rerun tool", "in mid-stream"],
)
def test_the_demo_tells_what_the_ledger_and_the_file_say(
    seed: int, unknown: list[str], repeated: list[str], beside: list[str], store: Path
) -> None:
    ended = process("demo", "--fast", "--keep", "--seed", seed, store=store)
    told = re.search(r"^kept: (.+)$", ended.stdout, re.MULTILINE)
    assert told is not None, ended.stdout + ended.stderr
    folder = Path(told[1])
    try:
        began, effects, by_tool = outside(folder)
        calls = recorded(folder)
    finally:
        shutil.rmtree(folder)

    assert ended.returncode == 0
    assert "KILLED: process" in ended.stdout
    assert "lost: 0" in ended.stdout
    assert by_tool["charge_card"] == 1
    assert all(began[key] == effects[key] == 1 for key, (_, tool, _) in calls.items() if tool == ONCE)
    assert [tool for kind, tool, _ in calls.values() if kind == "outcome_unknown"] == unknown
    again = sorted(tool for key, (_, tool, _) in calls.items() if began[key] > 1)
    assert again in (repeated, sorted(repeated + beside))
    assert all(began[key] - 1 == again for key, (_, tool, again) in calls.items() if tool != ONCE)
    assert set(effects) <= set(calls)
    asked_again = [key for key in began if key not in calls and began[key] > 1]
    assert asked_again == (["trip.1.2"] if seed == 3 else [])


def test_every_seed_names_a_place_and_large_ones_two() -> None:
    assert [points(seed) for seed in range(8)] == [[point] for point in POINTS]
    assert all(len(set(points(seed))) == 2 for seed in range(8, 200))


# ---------------------------------------------------------------------- the counting is not blind

CONTRACTS = {"charge_card": "once", "book_seat": "rerun"}


def line(what: str, who: str, key: str, pid: int = 1) -> Line:
    return Line(what, who, key, pid, 0)


def reply(step: int, *tools: str, interrupted: int = 0) -> Replied:
    parts: tuple[Part, ...] = (Text("…"), *[ToolCall(name, name, {}) for name in tools])
    return Replied(step, parts, Usage(), interrupted=interrupted)


LINES = [
    line("asked", "model", "t.1"),
    line("began", "charge_card", "t.1.0"),
    line("effect", "charge_card", "t.1.0"),
    line("began", "book_seat", "t.1.1"),
    line("asked", "model", "t.2", pid=2),
]
RECORDS: list[Record] = [
    Said(Message("user", "go")),
    reply(1, "charge_card", "book_seat"),
    Ended("1.0", Ok("paid")),
    Ended("1.1", Ok("12A")),
    Closed(Finished(), Usage(), reply(2)),
]
KILL = Kill(1, -9, "somewhere", RECORDS[:4], 4)


def counted(lines: list[Line], records: list[Record], kill: Kill = KILL) -> DemoReport:
    return count("t", lines, records, [kill], CONTRACTS)


def test_a_run_in_which_all_is_well_is_counted_as_such() -> None:
    report = counted(LINES, RECORDS)

    assert (report.answers, report.outcomes, report.commits) == (2, 2, 1)
    assert (report.repeated, report.unknown, report.lost, report.broken) == ([], [], [], [])


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([line("began", "charge_card", "t.1.0", pid=2)], "charge_card is once and began 2 times"),
        ([line("effect", "charge_card", "t.1.0")], "the card was charged 2 times"),
        ([line("asked", "model", "t.1", pid=2)], "model was recorded before the kill and happened again"),
        ([line("began", "book_seat", "t.1.1", pid=2)], "book_seat was repeated 1 times, its record says 0"),
        ([line("effect", "refund", "t.9.0")], "lost: refund (t.9.0) happened outside and has no record"),
    ],
    ids=["once began twice", "charged twice", "asked again", "repeat not on record", "effect without a record"],
)
def test_a_broken_promise_outside_is_seen(lines: list[Line], words: str) -> None:
    assert any(words in broken for broken in counted([*LINES, *lines], RECORDS).broken)


def test_a_record_that_is_gone_or_changed_is_lost() -> None:
    gone = counted(LINES, [*RECORDS[:3], RECORDS[4]])
    changed = counted(LINES, [*RECORDS[:2], Ended("1.0", Ok("nothing")), *RECORDS[3:]])

    assert any("record 3, on disk when 1 was killed" in what for what in gone.lost)
    assert changed.lost == ["record 2, on disk when 1 was killed"]


def test_a_turn_without_its_commit_is_broken() -> None:
    assert "the turn did not end in exactly one commit as finished" in counted(LINES, RECORDS[:4]).broken


def test_an_unknown_outcome_is_declared_not_lost() -> None:
    records: list[Record] = [*RECORDS[:2], Ended("1.0", OutcomeUnknown("died")), *RECORDS[3:]]

    report = counted(LINES, records, replace(KILL, records=RECORDS[:2], lines=3))

    assert (report.unknown, report.lost, report.broken) == (["charge_card (t.1.0)"], [], [])


# ---------------------------------------------------------------------- the coding agent


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="commands run on Linux")
def test_the_coder_is_killed_under_its_tests_and_they_are_not_begun_again(store: Path, tmp_path: Path) -> None:
    """In a folder with a space."""
    (tmp_path / "a place").mkdir()

    ended = process("demo", "--coder", "--keep", store=store, TMPDIR=tmp_path / "a place")

    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = re.search(r"^kept: (.+)$", ended.stdout, re.MULTILINE)
    assert told is not None
    runs = (Path(told[1]) / "project/runs.log").read_text().splitlines()
    assert [each for each in runs if each != "at work"] == ["began", "ended", "began", "ended"]
    assert "in the middle of its test run; status -9" in ended.stdout
    assert "the test run has ended, while no agent was there" in ended.stdout
    assert "verdict: every promise held" in ended.stdout
