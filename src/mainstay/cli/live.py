"""A turn on a terminal: words as they come, a line for each tool, and what is going on right now."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from mainstay.cli.render import MARKS, STYLES, brief, call_text, console, on_one_line, safe, styled
from mainstay.model.event import (
    AnyEvent,
    Gap,
    InputDelivered,
    Retracted,
    TextDelta,
    ToolFinished,
    ToolProgress,
    ToolStarted,
    TurnStarted,
)
from mainstay.model.tool import ToolOutcome
from mainstay.sessions.result import TurnResult
from mainstay.wire import outcome_kind, outcome_words


class LiveTurn:
    """Finished lines scroll by; the line being written and the running tools stay below them.

    `_line` is text not yet broken into a printed line, `_running` are calls with their start and progress.
    """

    def __init__(self) -> None:
        self._out = console()
        self._line = ""
        self._said = ""
        self._running: dict[str, tuple[str, float, Any]] = {}
        self._since = time.monotonic()
        self._ended = False
        # Drawn from the event loop only: a thread that redraws while lines are printed erases some of them.
        self._live = Live(console=self._out, get_renderable=self._now, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveTurn:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._break()
        self._live.stop()

    async def keep_drawing(self) -> None:
        """For ever: what runs has a clock and a spinner."""
        while True:
            self._live.refresh()
            await asyncio.sleep(1 / 12)

    # ------------------------------------------------------------------ what happens

    def show(self, event: AnyEvent) -> None:
        """Take one event in."""
        match event:
            case TextDelta(text=text):
                self._said += text
                self._write(safe(text))
            case ToolStarted():
                self._break()
                self._running[event.call_id] = (call_text(event.tool, event.args), time.monotonic(), None)
            case ToolProgress():
                label, since, _ = self._running.get(event.call_id, (brief(event.tool), time.monotonic(), None))
                self._running[event.call_id] = (label, since, event.value)
            case ToolFinished(outcome=outcome) if outcome is not None:
                label, since, _ = self._running.pop(event.call_id, (brief(event.tool), time.monotonic(), None))
                self._tool_line(label, time.monotonic() - since, outcome)
            case Retracted(reason=reason):
                if self._said:
                    self._mark("↺", f"taken back: {reason}", "yellow")
                self._said = ""
            case _:
                self._note(event)
        if not isinstance(event, ToolProgress):
            self._since = time.monotonic()

    def _note(self, event: AnyEvent) -> None:
        match event:
            case TurnStarted(resumed=True):
                self._mark("↻", "this turn was interrupted and goes on", "yellow")
            case InputDelivered(input_id=name):
                self._mark("→", f"input {name} reached the turn", "cyan")
            case Gap(reason=reason):
                self._mark("…", f"some live events are missing: {reason}", "dim")
            case _:
                pass

    def ended(self, result: TurnResult[Any]) -> None:
        """The turn is over: what was not seen live is shown now."""
        self._break()
        if result.text and result.text.strip() not in self._said:
            self._out.print(styled(result.text))

    # ------------------------------------------------------------------ how it looks

    def _write(self, text: str) -> None:
        self._line += text
        width = max(20, self._out.width - 1)
        while "\n" in self._line or len(self._line) > width:
            line, newline, rest = self._line.partition("\n")
            if len(line) > width:
                cut = line.rfind(" ", 1, width)
                cut = width if cut < 0 else cut
                line, rest = line[:cut], line[cut:].lstrip() + newline + rest
            self._out.print(styled(line))
            self._line = rest

    def _break(self) -> None:
        if self._line:
            self._out.print(styled(self._line))
        self._line = ""

    def _mark(self, sign: str, text: str, style: str) -> None:
        self._break()
        self._out.print(styled(f"{sign} {on_one_line(text)}", style))

    def _tool_line(self, label: str, seconds: float, outcome: ToolOutcome) -> None:
        kind = outcome_kind(outcome)
        told = brief(outcome_words(outcome), max(20, self._out.width - len(label) - 16))
        line = styled(f"{MARKS[kind]} ", style=STYLES[kind]).append(label, style="bold")
        self._out.print(line.append(f"  {seconds:.1f} s  {told}", style="dim"), overflow="ellipsis", no_wrap=True)

    def _now(self) -> RenderableType:
        """The live part: the line being written, what runs, or that something is waited for."""
        if self._ended:
            return styled("")
        if self._line:
            return styled(self._line)
        if not self._running:
            waited = time.monotonic() - self._since
            return Spinner("dots", styled(f"thinking … {waited:.0f} s" if waited > 2 else "thinking …", style="dim"))
        rows = Table.grid(padding=(0, 1))
        for label, since, value in list(self._running.values()):
            progress = "" if value is None else brief(value, 30)
            rows.add_row(
                Spinner("dots", styled(label)), styled(f"{time.monotonic() - since:.0f} s {progress}", style="dim")
            )
        return Group(rows)
