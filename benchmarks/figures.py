"""What is reported: each figure, where it is found in the samples, and what it must reach."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Sample = dict[str, Any]
Rows = dict[str, list[Sample]]
"""Samples by row: `w1` is ours, `w1 floor` the floor's."""

YARD_MS = 8.92
"""The yardstick where the targets were set: CPU figures are shown at that speed, whatever the machine does just now."""

TITLES = {
    "w1": "W1 · a turn in memory",
    "w2": "W2 · a durable turn: SQLite, every step synced, a new session each time",
    "w2x64": "W2 · the same with 64 sessions at once",
    "w3": "W3 · turn number 1,000 of a session against turn number 10; a session of 10,000 turns opened cold",
    "w4": "W4 · 1,000 durable units (start, one step, result) on SQLite, 50 at once; the floor with group commit",
    "w4r": "W4 · the same with a step that may be run again",
    "w4s": "W4 · one after another; the floor without group commit",
    "w4p": "W4 · 10,000 processes that wait: what they hold, and until all were woken and have ended",
    "w4l": "W4 · one process with 10,000 steps; kill -9 after the last, then start again",
    "w4i": "W4 · kill -9 with 200 processes in their second step of three, then start again",
    "w4m": "W4 · the same with 2,000",
    "w5": "W5 · 1,000 sessions at once, each model call waits 50 ms",
    "w5s": "W5 · the same on SQLite",
    "w6": "W6 · cold start",
    "w7": "W7 · streaming 5,000 deltas",
    "w7a": "W7 · the same, each delta in a pass of the event loop of its own",
    "wp": "Plugins · a turn with one tool call in memory, against the same without them; slice by slice in one process",
    "wps": "Plugins · the same on SQLite",
    "wcs": "Commands · /bin/true, from the call to its handle; what the shims of 20 that run hold",
    "wco": "Commands · 1 GiB from `yes`, from the call to its result with checksum",
    "wcn": "Commands · a line from the command’s write to a reader",
    "wct": "Commands · a tree of 50 processes, from the cancel until it is verified dead",
    "wca": "Commands · kill -9 with 50 commands that run, then start again",
    "wcx": "Commands · what each sandbox of this machine adds to the start of /bin/true",
    "wxc": "MCP · a call of a tool of a server over pipes, without the journal",
    "wxi": "MCP · 50 servers, attached and idle",
    "wfp": "Files · a path of four names in a workspace",
    "wfe": "Files · an edit of 1 MB, synced, with the earlier content kept and a digest before and after",
    "wfs": "Files · a search through 20,000 files for a line in the last one",
    "wff": "Files · a search through 50,000 files, one of 500 with a match, until the first is told",
    "wfd": "Files · the output of a test run of 100,000 lines, read for failures",
    "wmc": "Code · a turn with one call from a cell, type check on, against the same tool call; ten against ten steps",
    "wmr": "Code · from a dump with a megabyte of state to the end of its cell, on warm workers",
    "wmi": "Code · 200 sessions that have run a cell and are idle",
    "wmp": "Code · a turn with one call from a cell in CPython, against the same tool call; and the first of a session",
    "whs": "HTTP · a delta from the socket to a reader of events; the server is another process",
    "wht": "HTTP · a turn with one tool call, so two requests, against a model in the same process",
    "whb": "HTTP · building the next request of a session of 1,000 messages",
    "whi": "HTTP · importing a provider",
    "wil": "Sessions · a page of those for one user, one tenant, both and nobody, and the latest, among 100,000",
    "wir": "Types · a dataclass of a date and a Decimal, from the JSON of a record",
    "wit": "Front ends · text from a worker to a reader in another process",
    "w8": "W8 · kill -9 with 200 turns in their second tool of three, then start again",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report. `path` leads to it in a sample, `a/b` is a quotient; CPU figures are scaled.

    So are wall figures that are CPU time for the most part, in a line of their own; `waits` of them is waiting.
    `target_floor` is what the floor took where the target was set: their quotient holds on any machine.
    `peers` are the beginnings of names, or parts of them, that may be compared; `peer_row` is their workload.
    """

    row: str
    words: str
    path: str
    target: float | None = None
    target_floor: float | None = None
    at_least: bool = False
    cpu: bool = False
    waits: float = 0.0
    per: float = 1.0
    floor: bool = True
    peer_row: str = ""
    peer_path: str = ""
    peers: tuple[str, ...] = ("",)
    by_floor: bool = True


RESUMABLE = ("LangGraph create_agent, SQLite", "LangGraph StateGraph, SQLite", "DBOS + Pydantic AI, SQLite")
STORED = ("SQLite", "Postgres")

SAME = "the same at the targets’ speed"

FIGURES = (
    Figure("w1", "1 tool call, CPU ms", "t1.cpu_ms", 0.17, 0.004, cpu=True),
    Figure("w1", "10 tool calls in a row, CPU ms", "t10.cpu_ms", 0.92, 0.03, cpu=True),
    Figure("w1", "4 tool calls at once, CPU ms", "p4.cpu_ms", 0.27, 0.03, cpu=True),
    Figure("w2", "CPU ms", "t1.cpu_ms", 0.95, 0.35, cpu=True, peers=RESUMABLE),
    Figure("w2", "wall ms", "t1.wall_ms", 1.7, 0.68, peers=RESUMABLE),
    Figure("w2", "the first turns, while the WAL grows, CPU ms", "t1.growing.cpu_ms", cpu=True, floor=False, peers=()),
    Figure("w2", "the same, wall ms", "t1.growing.wall_ms", floor=False, peers=()),
    Figure("w2", "transactions", "t1.commits", 4, peers=RESUMABLE, by_floor=False),
    Figure("w2", "kB written", "t1.written_b", 30, per=1000, peers=RESUMABLE, by_floor=False),
    Figure("w2", "10 tool calls in a row, CPU ms", "t10.cpu_ms", cpu=True, peers=RESUMABLE),
    Figure("w2", "one write with fdatasync meanwhile, ms", "fsync_ms", by_floor=False, peers=RESUMABLE),
    Figure("w2x64", "CPU ms a turn", "t1.cpu_ms", 0.25, cpu=True, floor=False, peer_row="w1", by_floor=False),
    Figure("w2x64", "turns/s", "t1.turns_per_s", 2500, at_least=True, floor=False, peer_row="w1", by_floor=False),
    Figure("w2x64", SAME, "t1.turns_per_s", at_least=True, cpu=True, floor=False, peers=()),
    Figure("w2x64", "transactions a turn", "t1.commits", floor=False, peers=()),
    Figure("w3", "CPU, turn 1,000 ÷ turn 10", "1000.cpu_ms/10.cpu_ms", 1.5, by_floor=False, peers=STORED),
    Figure("w3", "bytes, turn 1,000 ÷ turn 10", "1000.written_b/10.written_b", 1.2, by_floor=False, peers=STORED),
    Figure("w3", "turn 1,000, CPU ms", "1000.cpu_ms", cpu=True, peers=STORED),
    Figure("w3", "turn 1,000, kB written", "1000.written_b", per=1000, by_floor=False, peers=STORED),
    Figure("w3", "10,000 turns, cold, until the model is called, ms", "cold.wall_ms", 100, floor=False, peers=()),
    Figure("w3", SAME, "cold.wall_ms", cpu=True, floor=False, peers=()),
    Figure("w4", "units/s", "units_per_s", 4200, 23_195, at_least=True, by_floor=False),
    Figure("w4", SAME, "units_per_s", at_least=True, cpu=True, peers=()),
    Figure("w4", "CPU ms a unit", "cpu_ms", cpu=True, by_floor=False),
    Figure("w4", "transactions a unit", "commits", floor=False, by_floor=False),
    Figure("w4", "kB written a unit", "written_b", per=1000, by_floor=False),
    Figure("w4r", "units/s", "units_per_s", 4000, at_least=True, floor=False, peer_row="w4", by_floor=False),
    Figure("w4r", SAME, "units_per_s", at_least=True, cpu=True, floor=False, peers=()),
    Figure("w4r", "CPU ms a unit", "cpu_ms", cpu=True, floor=False, peer_row="w4", by_floor=False),
    Figure("w4s", "p50 ms", "seq_p50_ms", 2, 0.65, peer_row="w4"),
    Figure("w4s", SAME, "seq_p50_ms", cpu=True, peers=()),
    Figure("w4s", "one write with fdatasync meanwhile, ms", "fsync_ms", peer_row="w4", by_floor=False),
    Figure("w4p", "tasks", "tasks", 0, floor=False, peers=()),
    Figure("w4p", "MB more", "memory_mb", 5, floor=False, peers=()),
    Figure("w4p", "all woken by a signal each, s", "signalled_s", 10, floor=False, peers=()),
    Figure("w4p", SAME, "signalled_s", cpu=True, floor=False, peers=()),
    Figure("w4p", "all woken because their time has come, s", "due_s", 10, floor=False, peers=()),
    Figure("w4p", SAME, "due_s", cpu=True, floor=False, peers=()),
    Figure("w4p", "to start and park one, ms", "park_ms", cpu=True, floor=False, peers=()),
    Figure("w4l", "CPU of a step, last tenth ÷ second", "last.cpu_ms/second.cpu_ms", 1.1, floor=False, peers=()),
    Figure("w4l", "wall ms a step, last tenth", "last.wall_ms", floor=False, peers=()),
    Figure("w4l", "from process start until it has ended, s", "since_start_s", 1, floor=False, peers=()),
    Figure("w4l", SAME, "since_start_s", cpu=True, floor=False, peers=()),
    Figure(
        "w4i",
        "from process start until all have ended, s",
        "since_start_s",
        0.5,
        floor=False,
        peer_row="w8",
        by_floor=False,
    ),
    Figure("w4i", SAME, "since_start_s", cpu=True, floor=False, peers=()),
    Figure("w4i", "of it after imports, s", "recover_s", floor=False, peer_row="w8", by_floor=False),
    Figure("w4m", "from process start until all have ended, s", "since_start_s", 5, floor=False, peers=()),
    Figure("w4m", SAME, "since_start_s", cpu=True, floor=False, peers=()),
    Figure("w5", "wall s", "wall_s", 0.35, 0.11),
    Figure("w5", SAME, "wall_s", cpu=True, waits=0.1, peers=()),
    Figure("w5", "CPU ms a session", "cpu_ms", cpu=True),
    Figure("w5", "KiB kept for an idle session", "idle_kb_per_session", 4, by_floor=False),
    Figure("w5s", "wall s", "wall_s", 0.6, floor=False, peer_row="w5", peers=STORED, by_floor=False),
    Figure("w5s", SAME, "wall_s", cpu=True, waits=0.1, floor=False, peers=()),
    Figure("w5s", "CPU ms a session", "cpu_ms", cpu=True, floor=False, peer_row="w5", peers=STORED, by_floor=False),
    Figure(
        "w5s",
        "KiB kept for an idle session",
        "idle_kb_per_session",
        4,
        floor=False,
        peer_row="w5",
        peers=STORED,
        by_floor=False,
    ),
    Figure("w6", "to a built agent, CPU ms", "cold_cpu_ms", 120, 67, cpu=True),
    Figure("w6", "to its first answer, CPU ms", "answer_cpu_ms", cpu=True),
    Figure("w6", "MB after it", "answer_rss_mb", by_floor=False),
    Figure("w7", "CPU µs a delta", "cpu_us_per_delta", 4, 0.13, cpu=True),
    Figure("w7a", "CPU µs a delta", "cpu_us_per_delta", cpu=True, floor=False, peer_row="w7", by_floor=False),
    Figure("w8", "from process start until all are done, s", "since_start_s", 0.5, floor=False, by_floor=False),
    Figure("w8", SAME, "since_start_s", cpu=True, floor=False, peers=()),
    Figure("w8", "of it after imports, s", "recover_s", floor=False, by_floor=False),
    Figure("wcs", "p50 ms", "p50_ms", 8, floor=False, peers=()),
    Figure("wcs", "p99 ms", "p99_ms", 30, floor=False, peers=()),
    Figure("wcs", "the first, without a spawner, ms", "cold_ms", 25, floor=False, peers=()),
    Figure("wcs", "starts/s", "starts_per_s", 100, at_least=True, floor=False, peers=()),
    Figure("wcs", "MB (PSS) of a shim", "shim_mb", 6, floor=False, peers=()),
    Figure("wcs", "ms that the file system takes for one new file", "file_ms", floor=False, peers=()),
    Figure("wco", "MB more, at most", "grown_mb", 5, floor=False, peers=()),
    Figure("wco", "event loop blocked at most, ms", "lag_ms", 20, floor=False, peers=()),
    Figure("wco", "its thread waited for a CPU at most, ms", "descheduled_ms", floor=False, peers=()),
    Figure("wco", "MB/s", "mb_per_s", at_least=True, floor=False, peers=()),
    Figure("wcn", "p50 ms", "p50_ms", floor=False, peers=()),
    Figure("wcn", "p99 ms", "most_ms", 50, floor=False, peers=()),
    Figure("wct", "s", "wall_s", 2.5, floor=False, peers=()),
    Figure("wca", "after imports, s", "adopted_s", 1, floor=False, peers=()),
    Figure("wcx", "added by Landlock, ms", "landlock_added_ms", 10, floor=False, peers=()),
    Figure("wcx", "added by namespaces, ms", "namespaces_added_ms", 30, floor=False, peers=()),
    Figure("wcx", "added by bubblewrap, ms", "bubblewrap_added_ms", 30, floor=False, peers=()),
    Figure("wxc", "÷ the bare SDK's, CPU", "call_cpu_ms/bare_cpu_ms", 1.3, floor=False, peers=()),
    Figure("wxi", "KiB each in the runtime", "held_kb", 1024, floor=False, peers=()),
    Figure("wfp", "check against what is off limits, CPU µs", "check_us", cpu=True, floor=False, peers=()),
    Figure("wfp", "check and walk to the open folder, CPU µs", "locate_us", 20, cpu=True, floor=False, peers=()),
    Figure("wfe", "CPU ms", "edit_ms", 1, cpu=True, floor=False, peers=()),
    Figure("wfs", "s", "search_s", floor=False, peers=()),
    Figure("wff", "with ripgrep, ms", "first_ms", 200, floor=False, peers=()),
    Figure("wff", "without ripgrep, ms", "first_without_ripgrep_ms", floor=False, peers=()),
    Figure("wfd", "CPU ms for a megabyte", "parse_ms_per_mb", cpu=True, floor=False, peers=()),
    Figure("wmc", "above the tool call, CPU ms", "above_cpu_ms", 1.5, cpu=True, floor=False, peers=()),
    Figure("wmc", "above the tool call, wall ms", "above_wall_ms", 20, floor=False, peers=()),
    Figure("wmc", "ten calls in a cell ÷ ten steps, CPU", "loop_cpu_ms/calls_cpu_ms", 0.5, floor=False, peers=()),
    Figure("wmc", "the same, wall, with answers of 50 ms", "slow_loop_ms/slow_calls_ms", 0.5, floor=False, peers=()),
    Figure("wmr", "ms", "resume_ms", 50, floor=False, peers=()),
    Figure("wmi", "KiB each in the runtime", "held_kb", 64, floor=False, peers=()),
    Figure("wmi", "workers", "workers", 0, floor=False, peers=()),
    Figure("wmp", "above the tool call, CPU ms", "above_cpu_ms", 2.5, cpu=True, floor=False, peers=()),
    Figure("wmp", "above the tool call, wall ms", "above_wall_ms", 20, floor=False, peers=()),
    Figure("wmp", "the first, which begins the process, ms", "first_ms", floor=False, peers=()),
    Figure("whs", "many in a read, CPU µs each", "together.feed_us", 20, cpu=True, floor=False, peers=()),
    Figure("whs", "httpx2’s raw reader on the same bytes", "together.httpx2_us", cpu=True, floor=False, peers=()),
    Figure("whs", "one in each read, CPU µs each", "apart.feed_us", cpu=True, floor=False, peers=()),
    Figure("whs", "httpx2’s raw reader on the same bytes", "apart.httpx2_us", cpu=True, floor=False, peers=()),
    Figure("whs", "a bare asyncio stream on the same bytes", "apart.asyncio_us", cpu=True, floor=False, peers=()),
    Figure("whs", "one in each read ÷ httpx2", "apart.feed_us/apart.httpx2_us", 1.3, floor=False, peers=()),
    Figure(
        "whs", "without the engine and the feed ÷ httpx2", "apart.provider_us/apart.httpx2_us", floor=False, peers=()
    ),
    Figure("wht", "CPU ms more than with a model in the process", "more_ms", 2, cpu=True, floor=False, peers=()),
    Figure("wht", "CPU ms", "http_ms", cpu=True, floor=False, peers=()),
    Figure("whb", "CPU ms, the slowest dialect", "next_ms", 1, cpu=True, floor=False, peers=()),
    Figure("whb", "Anthropic", "anthropic.next_ms", cpu=True, floor=False, peers=()),
    Figure("whb", "OpenAI, Responses", "openai.next_ms", cpu=True, floor=False, peers=()),
    Figure("whb", "OpenAI, Chat Completions", "chat.next_ms", cpu=True, floor=False, peers=()),
    Figure("whb", "Google", "google.next_ms", cpu=True, floor=False, peers=()),
    Figure("whb", "Bedrock", "bedrock.next_ms", cpu=True, floor=False, peers=()),
    Figure("whi", "CPU ms more than Perdure alone", "import_ms", 80, cpu=True, floor=False, peers=()),
    Figure("whi", "CPU ms more at its first request", "first_ms", cpu=True, floor=False, peers=()),
    Figure("wil", "the slowest of them, ms", "most_ms", 20, floor=False, peers=()),
    Figure("wil", "twenty of a user, ms", "user_ms", floor=False, peers=()),
    Figure("wil", "a hundred of a tenant’s tenth, ms", "tenant_ms", floor=False, peers=()),
    Figure("wil", "a hundred of what all sessions have, ms", "all_ms", floor=False, peers=()),
    Figure("wir", "CPU µs", "row_us", 5, cpu=True, floor=False, peers=()),
    Figure("wir", "one that holds ten, CPU µs", "report_us", cpu=True, floor=False, peers=()),
    Figure(
        "wir",
        "from the value, with the proof that it comes back, CPU µs",
        "row_store_us",
        cpu=True,
        floor=False,
        peers=(),
    ),
    Figure("wit", "5,000 at once, CPU µs a delta in the worker", "fast.cpu_us", 15, cpu=True, floor=False, peers=()),
    Figure("wit", "the same without a reader", "fast.unread_us", cpu=True, floor=False, peers=()),
    Figure(
        "wit", "one every 2 ms, CPU µs more than without a reader", "paced.more_us", 15, cpu=True, floor=False, peers=()
    ),
    Figure("wit", "p50 ms behind", "p50_ms", floor=False, peers=()),
    Figure("wit", "p99 ms behind", "p99_ms", 20, floor=False, peers=()),
    Figure("wp", "20 plugins that override nothing", "idle.cpu_ms/plain.cpu_ms", 1.05, floor=False, peers=()),
    Figure("wp", "20 that look at every tool call", "vetted.cpu_ms/plain.cpu_ms", 1.25, floor=False, peers=()),
    Figure("wp", "20 with a state that does not change", "unchanged.cpu_ms/plain.cpu_ms", floor=False, peers=()),
    Figure("wp", "500 tools against 5", "tools500.cpu_ms/tools5.cpu_ms", 1.1, floor=False, peers=()),
    Figure("wp", "under a limit", "limited.cpu_ms/plain.cpu_ms", floor=False, peers=()),
    Figure("wps", "20 plugins that override nothing", "idle.cpu_ms/plain.cpu_ms", 1.05, floor=False, peers=()),
    Figure("wps", "20 that look at every tool call", "vetted.cpu_ms/plain.cpu_ms", 1.25, floor=False, peers=()),
    Figure("wps", "20 with a state that does not change", "unchanged.cpu_ms/plain.cpu_ms", floor=False, peers=()),
    Figure("wps", "transactions, with those", "unchanged.commits", 4, floor=False, peers=(), by_floor=False),
    Figure("wps", "500 tools against 5", "tools500.cpu_ms/tools5.cpu_ms", 1.1, floor=False, peers=()),
    Figure("wps", "under a limit", "limited.cpu_ms/plain.cpu_ms", 1.05, floor=False, peers=()),
    Figure("wps", "transactions, under a limit", "limited.commits", 4, floor=False, peers=(), by_floor=False),
)
NOT_PEERS = ("floor", "bare", "this machine")


# ---------------------------------------------------------------------- reading samples


def dig(sample: Sample, path: str) -> float | None:
    """The value at `path`, or the quotient of two."""
    over, _, under = path.partition("/")
    if under:
        a, b = dig(sample, over), dig(sample, under)
        return a / b if a is not None and b else None
    found: Any = sample
    for part in over.split("."):
        if not isinstance(found, dict) or part not in found:
            return None
        found = found[part]
    return None if found is None else float(found)


def value(samples: Iterable[Sample], figure: Figure, path: str = "", yard: float = YARD_MS) -> float | None:
    """The median over samples, CPU figures at the speed of `yard`."""
    found = []
    for sample in samples:
        seen = dig(sample, path or figure.path)
        if seen is None:
            continue
        speed = yard / sample["yard_ms"] if figure.cpu and "yard_ms" in sample else 1.0
        scaled = seen / speed if figure.at_least else figure.waits + (seen - figure.waits) * speed
        found.append(scaled / figure.per)
    return statistics.median(found) if found else None


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    value: float


class Anchors:
    """The stored figures of other systems, and of the floor beside them."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = data["rows"]
        yards = [s["yard_ms"] for r in self.rows for s in r["samples"] if "yard_ms" in s]
        self.yard = statistics.median(yards) if yards else YARD_MS

    def floor(self, figure: Figure) -> float | None:
        workload = figure.peer_row or figure.row
        rows = [r for r in self.rows if r["workload"] == workload and r["name"].startswith("floor")]
        rows = [r for r in rows if "Postgres" not in r["name"] and "group" not in r["name"]]
        return value(rows[0]["samples"], figure, yard=self.yard) if rows else None

    def peers(self, figure: Figure, floor: float | None) -> list[Peer]:
        """Comparable systems, the best first. Where the floor ran too, their figures follow its speed."""
        scale, stored = 1.0, self.floor(figure)
        if figure.by_floor and floor and stored:
            scale = floor / stored
        found = []
        for row in self.rows:
            if row["workload"] != (figure.peer_row or figure.row) or row["name"].startswith(NOT_PEERS):
                continue
            if not any(part in row["name"] for part in figure.peers):
                continue
            seen = value(row["samples"], figure, figure.peer_path, self.yard)
            if seen is not None:
                found.append(Peer(row["name"], seen * scale))
        return sorted(found, key=lambda p: p.value, reverse=figure.at_least)


# ---------------------------------------------------------------------- the report


@dataclass(frozen=True, slots=True)
class Line:
    """A figure as measured, beside what it is compared with."""

    figure: Figure
    ours: float
    floor: float | None
    peers: Sequence[Peer]

    @property
    def met(self) -> bool | None:
        target = self.figure.target
        if target is None:
            return None
        # A count that is exact but for a renewal now and then is judged as shown.
        return self.ours >= target * 0.995 if self.figure.at_least else self.ours <= target * 1.005

    @property
    def verdict(self) -> str:
        target = self.figure.target
        if target is None:
            return ""
        if self.met:
            return "met"
        if not target:
            return "MISSED: there is some"
        return _missed(target / self.ours if self.figure.at_least else self.ours / target)

    @property
    def ratio_limit(self) -> float | None:
        """How many times the floor the target allows, or asks for, where the floor ran beside us."""
        target, at = self.figure.target, self.figure.target_floor
        return target / at if target is not None and at is not None and self.floor else None

    @property
    def ratio_verdict(self) -> str:
        """The same judged by the floor of this very run: a slow machine or disk slows both."""
        limit = self.ratio_limit
        if limit is None or not self.floor:
            return ""
        ratio = self.ours / self.floor
        over = limit / ratio if self.figure.at_least else ratio / limit
        return "met" if over <= 1.005 else _missed(over)


def _missed(by: float) -> str:
    return f"MISSED by {100 * (by - 1):.0f} %" if by < 3 else f"MISSED by {by:.1f}×"


def report(rows: Rows, anchors: Anchors | None) -> list[Line]:
    lines = []
    for figure in FIGURES:
        ours = value(rows.get(figure.row, ()), figure)
        if ours is None:
            continue
        floor = value(rows.get(f"{figure.row} floor", ()), figure) if figure.floor else None
        lines.append(Line(figure, ours, floor, anchors.peers(figure, floor) if anchors else ()))
    return lines


def number(shown: float | None) -> str:
    if shown is None:
        return "–"
    if shown == 0:
        return "0"
    return f"{shown:,.0f}" if abs(shown) >= 1000 else f"{shown:.3g}"


def table(lines: Sequence[Line]) -> str:
    """All lines as text, one table for each workload."""
    out, row = [], ""
    for line in lines:
        if line.figure.row != row:
            row = line.figure.row
            out += ["", TITLES[row], _cells("", "floor", "ours", "÷ floor", "fastest peer", "must reach", "")]
        out.append(_line(line))
    return "\n".join(out[1:])


def _line(line: Line) -> str:
    figure, best = line.figure, line.peers[0] if line.peers else None
    ratio = f"{number(line.ours / line.floor)}×" if line.floor else "–"
    peer = f"{number(best.value)} {best.name}" if best is not None else "–"
    sign = "≥" if figure.at_least else "≤"
    goal = "" if figure.target is None else f"{sign} {number(figure.target)}"
    verdict = line.verdict
    if line.ratio_limit is not None:
        verdict = f"{verdict:<16}  by ratio {sign} {number(line.ratio_limit)}×: {line.ratio_verdict}"
    return _cells(figure.words, number(line.floor), number(line.ours), ratio, peer, goal, verdict)


def _cells(words: str, floor: str, ours: str, ratio: str, peer: str, goal: str, verdict: str) -> str:
    return f"  {words:<50}{floor:>9}{ours:>9}{ratio:>9}   {peer:<44.44}{goal:>11}  {verdict}".rstrip()
