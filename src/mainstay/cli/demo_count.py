"""Counting the demo from outside: the services' own ledger against the records on disk, nothing from the agent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from mainstay.cli.demo_agent import Line
from mainstay.model.message import ToolCall
from mainstay.model.outcome import Finished
from mainstay.model.record import Closed, Ended, Record, Replied
from mainstay.wire import outcome_kind


class Death(Struct, frozen=True):
    """One kill: who died, where, and the records that were on disk at that moment."""

    pid: int
    status: int
    where: str
    records: list[Record]
    lines: int


class Row(Struct):
    """One thing that was done outside: how often it began, how often it took effect, and what its record says."""

    key: str
    who: str
    contract: str
    began: int = 0
    effects: int = 0
    recorded: str = "nothing"
    claimed: int = 0


class Report(Struct):
    """What the demo proves, or fails to. `broken` is empty when every promise held."""

    kills: int
    answers: int
    outcomes: int
    commits: int
    rows: list[Row]
    repeated: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def count(
    turn: str, lines: Sequence[Line], records: Sequence[Record], deaths: Sequence[Death], contracts: Mapping[str, str]
) -> Report:
    """Compare what happened outside with what is on disk."""
    rows = _rows(turn, lines, records, contracts)
    closed = [r for r in records if isinstance(r, Closed)]
    replies = _replies(records)
    ended = [r for r in records if isinstance(r, Ended)]
    report = Report(len(deaths), len(replies), len(ended), len(closed), rows)
    report.unknown = [f"{r.who} ({r.key})" for r in rows if r.recorded == "outcome_unknown"]
    _count_repeats(report)
    _count_losses(report, records, deaths)
    _check_once(report)
    _check_recorded_stays(report, turn, lines, deaths)
    if len(closed) != 1 or not isinstance(closed[0].outcome, Finished):
        report.broken.append("the turn did not end in exactly one commit as finished")
    return report


def _replies(records: Sequence[Record]) -> list[Replied]:
    found = [r for r in records if isinstance(r, Replied)]
    return found + [r.reply for r in records if isinstance(r, Closed) and r.reply is not None]


def _rows(turn: str, lines: Sequence[Line], records: Sequence[Record], contracts: Mapping[str, str]) -> list[Row]:
    rows: dict[str, Row] = {}
    for line in lines:
        row = rows.setdefault(line.key, Row(line.key, line.who, contracts.get(line.who, "model")))
        row.began += line.what in ("began", "asked")
        row.effects += line.what == "effect"
    for reply in _replies(records):
        asked = rows.get(f"{turn}.{reply.step}")
        if asked is not None:
            asked.recorded, asked.claimed = "answer", reply.interrupted
    for record in records:
        if isinstance(record, Ended):
            key = f"{turn}.{record.call}"
            row = rows.setdefault(key, Row(key, _tool_name(records, record.call), "?"))
            row.recorded, row.claimed = outcome_kind(record.outcome), record.repeated
    return list(rows.values())


def _tool_name(records: Sequence[Record], call: str) -> str:
    step, _, index = call.partition(".")
    for reply in _replies(records):
        calls = [p for p in reply.parts if isinstance(p, ToolCall)]
        if reply.step == int(step) and int(index) < len(calls):
            return calls[int(index)].name
    return "?"


def _count_repeats(report: Report) -> None:
    """A second start is allowed for what was in flight at a kill, if its contract says so, and must be on record."""
    for row in report.rows:
        again = max(0, row.began - 1)
        if row.contract != "once" and row.claimed != again:
            report.broken.append(f"{row.who} was repeated {again} times, its record says {row.claimed}")
        if not again:
            continue
        report.repeated.append(f"{row.who} ({row.key}) {'asked' if row.contract == 'model' else 'began'} {row.began}×")
        if row.contract == "once":
            continue  # judged below
        if again > report.kills:
            report.broken.append(f"{row.who} was repeated {again} times for {report.kills} kills")


def _count_losses(report: Report, records: Sequence[Record], deaths: Sequence[Death]) -> None:
    """Lost is: a record that was on disk and is not any more, or an effect outside that no record knows of."""
    for death in deaths:
        for ordinal, record in enumerate(death.records):
            if ordinal >= len(records) or records[ordinal] != record:
                report.lost.append(f"record {ordinal}, on disk when {death.pid} was killed")
    for row in report.rows:
        if row.recorded == "nothing":
            report.lost.append(f"{row.who} ({row.key}) happened outside and has no record")
    report.broken += [f"lost: {what}" for what in report.lost]


def _check_once(report: Report) -> None:
    for row in report.rows:
        if row.contract == "once" and (row.began > 1 or row.effects > 1):
            report.broken.append(f"{row.who} is once and began {row.began} times, with {row.effects} effects")
    charged = sum(row.effects for row in report.rows if row.who == "charge_card")
    if charged != 1:
        report.broken.append(f"the card was charged {charged} times")


def _check_recorded_stays(report: Report, turn: str, lines: Sequence[Line], deaths: Sequence[Death]) -> None:
    """What was on record at a kill must not happen again after it."""
    for death in deaths:
        settled = {f"{turn}.{r.call}" for r in death.records if isinstance(r, Ended)}
        settled |= {f"{turn}.{r.step}" for r in death.records if isinstance(r, Replied)}
        again = Counter(line.who for line in lines[death.lines :] if line.key in settled)
        report.broken += [f"{who} was recorded before the kill and happened again" for who in again]
