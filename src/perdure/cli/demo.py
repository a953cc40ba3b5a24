"""`perdure demo`: run the example that is killed and resumed, shown in panels on a terminal and as lines elsewhere."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from perdure.cli.host import FAILED, OK, JsonOption, is_terminal, on_signals, perform
from perdure.cli.render import MARKS, STYLES, brief, call_text, console, plural, print_json, styled
from perdure.examples.coder import PROMPT as CODER_PROMPT
from perdure.examples.kill_and_resume import DemoReport, DemoView, EffectCount, Kill, KillAndResume, SilentDemo
from perdure.examples.killed_coder import CoderReport, KilledCoder
from perdure.examples.trip import PROMPT, Line
from perdure.model.event import (
    AnyEvent,
    TextDelta,
    ToolFinished,
    ToolProgress,
    ToolStarted,
    TurnCommitted,
    TurnStarted,
)
from perdure.model.record import Closed, Ended, Record, Replied, Said, Started
from perdure.wire import outcome_kind, outcome_words

if TYPE_CHECKING:
    from rich.text import Text


FAST = 0.04


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Where to kill: 0 to 7, and twice from 8 on.")] = 0,
    fast: Annotated[bool, typer.Option("--fast", help="Do not wait for people to read.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder with the store and the ledger.")] = False,
    coder: Annotated[bool, typer.Option("--coder", help="A coding agent, killed while its tests run (Linux).")] = False,
    json: JsonOption = False,
) -> None:
    """Watch a durable agent being killed in mid-turn and finishing. No key, no network.

    Exit codes: 0 every promise held, 1 one was broken.
    """

    async def work() -> int:
        folder = Path(tempfile.mkdtemp(prefix="perdure-demo-"))
        pace = FAST if fast else 1.0
        view: DemoView = SilentDemo() if json else RichView(pace) if is_terminal() else PlainView()
        me = asyncio.current_task()
        assert me is not None
        try:
            # Also when the terminal is closed: the agent's process must end, and the folder be removed.
            with on_signals(dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), me.cancel)):
                report: DemoReport | CoderReport
                if coder:
                    report = await show_coder(folder, json)
                else:
                    report = await KillAndResume(folder, seed, pace, view).run()
        finally:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)
        if json:
            print_json(msgspec.to_builtins(report) | {"folder": str(folder) if keep else None})
        elif keep:
            sys.stdout.write(f"kept: {folder}\n")
        return FAILED if report.broken else OK

    perform(work, json)


async def show_coder(folder: Path, silent: bool) -> CoderReport:
    """The coding agent, line by line; then what was counted."""

    def say(line: str) -> None:
        if not silent:
            print(line, flush=True)

    say(f"user: {CODER_PROMPT}")
    report = await KilledCoder(folder, say).run()
    say("")
    say(f"tests: begun {plural(report.test_runs_begun, 'time')}, as often as the agent asked for them")
    say("  The one that the agent was killed under went on, and its result was there when the agent came back.")
    kept = f"by {report.confined_by}: they can change their folder only" if report.confined_by else "by nothing here"
    say(f"commands: confined {kept}; perdure doctor tells more")
    say(f"edits: {report.edits}, by the records and by the file")
    held = "every promise held: nothing was done twice, and nothing was lost"
    say(f"verdict: {held if not report.broken else 'BROKEN: ' + '; '.join(report.broken)}")
    return report


# ---------------------------------------------------------------------- plain lines


class PlainView(SilentDemo):
    """One line for each thing that happened, for logs and pipes."""

    def __init__(self) -> None:
        self._text = ""

    def opened(self, seed: int, where: list[str], folder: Path) -> None:
        self._say(f"demo, seed {seed}: an agent books a trip; it will be killed with SIGKILL")
        for place in where:
            self._say(f"kill point: {place}")
        self._say(f"user: {PROMPT}")

    def started(self, pid: int, start: int) -> None:
        self._say(f"started: process {pid}" if start == 1 else f"started again: process {pid}, the same program")

    def event(self, event: AnyEvent) -> None:
        match event:
            case TextDelta(text=text):
                self._text += text
            case TurnStarted(resumed=True):
                self._say("resumed: the turn goes on by itself")
            case ToolStarted():
                self._flush()
                self._say(f"tool started: {call_text(event.tool, event.args)}, attempt {event.attempt}")
            case ToolFinished(outcome=outcome) if outcome is not None:
                self._say(f"tool ended: {event.tool}: {outcome_kind(outcome)}: {brief(outcome_words(outcome), 100)}")
            case TurnCommitted():
                self._flush()
                self._say("committed: the turn is durable, whole and final")
            case _:
                pass

    def killed(self, kill: Kill) -> None:
        self._flush(" …")
        self._say(f"KILLED: process {kill.pid} with SIGKILL {kill.where}")
        self._say(f"dead: status {kill.status}; on disk: {plural(len(kill.records), 'record')}")

    def report(self, report: DemoReport, kills: Sequence[Kill]) -> None:
        self._say("")
        for row in report.rows:
            what = "asked" if row.contract == "model" else f"{row.contract}, began"
            effects = "" if row.contract == "model" else f", effects {row.effects}"
            self._say(f"  {row.who} {row.key}: {what} {row.began}{effects}, record: {row.recorded}")
        for name, text in summary(report):
            self._say(f"{name}: {text}")

    def _flush(self, end: str = "") -> None:
        if self._text:
            self._say(f"agent: {self._text.strip()}{end}")
        self._text = ""

    def _say(self, line: str) -> None:
        print(line, flush=True)


def summary(report: DemoReport) -> list[tuple[str, str]]:
    """The four counts, and the verdict."""
    repeated = f"{len(report.repeated)}"
    if report.repeated:
        repeated += f": {'; '.join(report.repeated)}. In flight at the kill, and allowed by contract"
    unknown = f"{len(report.unknown)}"
    if report.unknown:
        unknown += f": {'; '.join(report.unknown)}. Declared, and not repeated: the model was told and looked first"
    kept = "every record from before the kill is there, unchanged, and every effect has its record"
    lost = f"{len(report.lost)}: {'; '.join(report.lost) or kept}"
    charged = sum(r.effects for r in report.rows if r.who == "charge_card")
    held = f"every promise held; by the bank's own ledger the card was charged {plural(charged, 'time')}"
    return [
        (
            "recorded",
            f"{plural(report.answers, 'model answer')}, {plural(report.outcomes, 'tool outcome')}, "
            f"{plural(report.commits, 'commit')}; {plural(report.kills, 'kill')}",
        ),
        ("repeated", repeated),
        ("unknown", unknown),
        ("lost", lost),
        ("verdict", held if not report.broken else f"BROKEN: {'; '.join(report.broken)}"),
    ]


# ---------------------------------------------------------------------- panels on a terminal

BAR = 12


class RichView(SilentDemo):
    """Three panels and a timeline, redrawn as things happen.

    `_script` are lines of the agent's panel that stay; `_text` the words being spoken and `_running` the tools at work
    are drawn below them, and become struck-out lines when their process is killed.
    """

    def __init__(self, pace: float) -> None:
        self._out, self._pace = console(), pace
        self._script: list[Text] = []
        self._text = ""
        self._running: dict[str, tuple[str, dict[str, Any]]] = {}
        self._lines: Sequence[Line] = ()
        self._records: Sequence[Record] = ()
        self._marks: list[tuple[float, str, str]] = []
        self._began = time.monotonic()
        self._title, self._status, self._state = "", styled(""), "cyan"
        self._live = Live(console=self._out, get_renderable=self._draw, refresh_per_second=15, vertical_overflow="crop")

    def __enter__(self) -> RichView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    # ------------------------------------------------------------------ what happens

    def opened(self, seed: int, where: list[str], folder: Path) -> None:
        self._title = f"perdure demo · seed {seed}"
        self._add(f"you ▸ {PROMPT}", "bold cyan")

    def started(self, pid: int, start: int) -> None:
        self._state = "cyan"
        self._mark("▶" if start == 1 else "↻", "bold green")
        word = "at work" if start == 1 else "started again, the same program: nobody told it what to do"
        self._status = styled(f"process {pid} {word}", style="green")
        if start > 1:
            self._add(f"↻ process {pid} starts", "bold green")

    def event(self, event: AnyEvent) -> None:
        match event:
            case TextDelta(text=text):
                self._text += text
            case TurnStarted(resumed=True):
                self._add("  takes the turn over and goes on from the last record", "green")
            case ToolStarted():
                self._spoken()
                self._running[event.call_id] = (call_text(event.tool, event.args, 44), {})
                if event.attempt > 1:
                    self._add(f"  {event.tool} may run again: attempt {event.attempt}, same key", "yellow")
            case ToolProgress():
                label, _ = self._running.get(event.call_id, (event.tool, {}))
                self._running[event.call_id] = (label, event.value)
            case ToolFinished(outcome=outcome) if outcome is not None:
                self._running.pop(event.call_id, None)
                self._spoken()
                kind = outcome_kind(outcome)
                value = outcome_words(outcome) if kind == "ok" else f"{kind}: not repeated, the model is told"
                self._add(f"  {MARKS[kind]} {event.tool} → {brief(value, 50)}", STYLES[kind])
            case TurnCommitted():
                self._spoken()
                self._mark("◆", "bold green")
                self._status = styled("committed: the turn is durable, whole and final", style="bold green")
                self._state = "green"
            case _:
                pass

    def outside(self, lines: Sequence[Line], records: Sequence[Record]) -> None:
        for record in records[len(self._records) :]:
            if isinstance(record, Replied):
                self._mark("●", "cyan")
            elif isinstance(record, Ended):
                self._mark("■", STYLES[outcome_kind(record.outcome)])
        self._lines, self._records = lines, records

    def killed(self, kill: Kill) -> None:
        self._state = "red"
        self._mark("✗", "bold red")
        if self._text:
            self._add(f"agent ▸ {self._text.strip()} …", "dim strike")
        for label, _ in list(self._running.values()):
            self._add(f"  ✗ {label}", "red strike")
        self._text, self._running = "", {}
        self._add(f"SIGKILL: process {kill.pid} is dead (status {kill.status})", "bold white on red")
        self._add(f"  {kill.where}", "red")
        on_disk = f"{plural(len(kill.records), 'record')} and {plural(kill.lines, 'ledger line')}"
        self._status = styled(f"process {kill.pid} is dead; on disk: {on_disk}", style="bold red")

    # ------------------------------------------------------------------ how it looks

    def _add(self, text: str, style: str = "") -> None:
        width = max(30, self._out.width - 6)
        for line in textwrap.wrap(text, width, subsequent_indent="  ") or [""]:
            self._script.append(styled(line, style=style))

    def _spoken(self) -> None:
        if self._text:
            self._add(f"agent ▸ {self._text.strip()}")
        self._text = ""

    def _mark(self, sign: str, style: str) -> None:
        self._marks.append((time.monotonic() - self._began, sign, style))

    def _draw(self) -> RenderableType:
        height = max(20, min(self._out.height, 34)) - 1
        low = 7
        body = self._agent(height - low - 6)
        # Never wider than the screen, never taller: a frame that scrolls is a frame that flickers.
        left = _box(self._ledger(low - 2), "outside: the services' ledger", "magenta")
        right = _box(self._store(low - 2), "inside: records on disk", "blue")
        pair = Table.grid(expand=True, padding=0)
        pair.add_column(ratio=1)
        pair.add_column(ratio=1)
        pair.add_row(left, right)
        return Group(
            Panel(
                body,
                title=self._title,
                title_align="left",
                subtitle="● answer  ■ tool outcome  ✗ kill  ↻ restart  ◆ commit",
                subtitle_align="right",
                box=box.HEAVY,
                border_style=self._state,
            ),
            pair,
            self._timeline(),
            self._status,
        )

    def _agent(self, rows: int) -> RenderableType:
        lines = list(self._script)
        if self._text:
            width = max(30, self._out.width - 6)
            lines += [
                styled(x) for x in textwrap.wrap(f"agent ▸ {self._text.strip()} ▌", width, subsequent_indent="  ")
            ]
        for label, value in list(self._running.values()):
            lines.append(_bar(label, value))
        shown = lines[-rows:]
        return Group(*shown, *[styled("")] * (rows - len(shown)))

    def _ledger(self, rows: int) -> RenderableType:
        shown: list[Text] = []
        effects = [x for x in self._lines if x.what in ("effect", "recognised")]
        for line in effects[-rows:]:
            call = ".".join(line.key.split(".")[-2:])
            known = line.what == "recognised"
            text = styled(f"{call} ", style="dim", no_wrap=True, overflow="ellipsis")
            text.append(f"{line.who:<15} ", style="yellow" if known else "magenta")
            shown.append(text.append("known key" if known else line.detail))
        return Group(*shown, *[styled("")] * (rows - len(shown)))

    def _store(self, rows: int) -> RenderableType:
        shown = [_record_line(n, r) for n, r in enumerate(self._records)][-rows:]
        return Group(*shown, *[styled("")] * (rows - len(shown)))

    def _timeline(self) -> RenderableType:
        """Marks at the time they happened: ● answer, ■ tool outcome, ✗ kill, ↻ restart, ◆ commit."""
        elapsed = time.monotonic() - self._began
        width = max(20, self._out.width - 10)
        whole = max(elapsed, 16 * self._pace)
        cells = [("━", "dim") if i <= elapsed / whole * (width - 1) else ("╌", "bright_black") for i in range(width)]
        at = -1
        for moment, sign, style in list(self._marks):
            at = min(width - 1, max(at + 1, int(moment / whole * (width - 1))))
            cells[at] = (sign, style)
        line = styled(" ")
        for sign, style in cells:
            line.append(sign, style=style)
        return line.append(f" {elapsed:4.1f} s", style="dim")

    # ------------------------------------------------------------------ the end

    def report(self, report: DemoReport, kills: Sequence[Kill]) -> None:
        out = self._out
        out.print()
        drawn = Table(box=box.SIMPLE_HEAD, title="Counted from outside: the ledger against the store", pad_edge=False)
        for header in ("what", "key", "contract"):
            drawn.add_column(header, no_wrap=True)
        for header in ("began", "effects"):
            drawn.add_column(header, justify="right")
        drawn.add_column("its record says", no_wrap=True)
        for row in report.rows:
            if row.contract != "model":
                drawn.add_row(*_cells(row))
        asked = [r for r in report.rows if r.contract == "model"]
        drawn.add_row(
            styled("model", style="bold"),
            styled(plural(len(asked), "call"), style="dim"),
            "ask again",
            str(sum(r.began for r in asked)),
            "",
            styled(plural(report.answers, "answer"), style="cyan"),
        )
        out.print(drawn)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column()
        styles = {"recorded": "cyan", "repeated": "yellow", "unknown": "yellow"}
        bad = {"lost": bool(report.lost), "verdict": bool(report.broken)}
        for name, text in summary(report):
            calm = text == "0" and name in ("repeated", "unknown")
            style = "bold red" if bad.get(name) else "green" if calm else styles.get(name, "bold green")
            grid.add_row(name, styled(text, style=style))
        out.print(Panel(grid, box=box.HEAVY, border_style="red" if report.broken else "green"))
        if not report.broken:
            out.print(styled("Kill it elsewhere: perdure demo --seed 1 … 7, twice from 8 on.", style="dim"))


def _box(body: RenderableType, title: str, style: str) -> Panel:
    return Panel(body, title=title, box=box.ROUNDED, border_style=style)


def _cells(row: EffectCount) -> list[RenderableType]:
    """A tool call in the final table."""
    return [
        styled(row.who, style="bold"),
        styled(row.key, style="dim"),
        row.contract,
        styled(str(row.began), style="yellow" if row.began > 1 else ""),
        str(row.effects),
        styled(row.recorded, style=STYLES.get(row.recorded, "")),
    ]


def _bar(label: str, value: dict[str, Any]) -> Text:
    done = int(float(value.get("done", 0)) * BAR)
    line = styled(f"  ⚙ {label} ", style="bold")
    line.append("━" * done, style="green").append("━" * (BAR - done), style="bright_black")
    return line.append(f" {value.get('step', '')}", style="dim")


def _record_line(number: int, record: Record) -> Text:
    match record:
        case Said():
            return styled(f"{number:2} ○ accepted the input", style="cyan")
        case Replied(step=step):
            return styled(f"{number:2} ● answer of step {step}", style="cyan")
        case Started(call=call, attempt=attempt):
            return styled(f"{number:2} ▷ start of call {call}, attempt {attempt}", style="yellow")
        case Ended(call=call, outcome=outcome):
            kind = outcome_kind(outcome)
            return styled(f"{number:2} ■ call {call}: {kind}", style=STYLES[kind])
        case Closed(outcome=outcome):
            return styled(f"{number:2} ◆ commit: {outcome_kind(outcome)}", style="bold green")
        case _:
            return styled(f"{number:2} {brief(msgspec.to_builtins(record), 30)}")
