"""The chart of the README: a few headline figures, ours beside the others', as one SVG without dependencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from figures import Line, number


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure of the chart. `show` picks peers by the beginning of their names, under the words shown."""

    row: str
    path: str
    title: str
    unit: str
    show: tuple[tuple[str, str], ...]


SQLITE = (
    ("LangGraph create_agent, SQLite", "LangGraph"),
    ("DBOS + Pydantic AI, SQLite", "DBOS + Pydantic AI"),
    ("OpenAI Agents SQLiteSession", "OpenAI Agents"),
    ("Google ADK Sqlite", "Google ADK"),
)
UNITS = (("Restate", "Restate"), ("Procrastinate", "Procrastinate"), ("DBOS, SQLite", "DBOS"))
PANELS = (
    Panel(
        "w1",
        "t1.cpu_ms",
        "A turn in memory",
        "ms CPU",
        (
            ("MS Agent Framework", "MS Agent Framework"),
            ("LangGraph create_agent", "LangGraph"),
            ("OpenAI Agents", "OpenAI Agents"),
            ("Pydantic AI", "Pydantic AI"),
        ),
    ),
    Panel("w2", "t1.cpu_ms", "A durable turn (SQLite)", "ms CPU", SQLITE),
    Panel("w3", "1000.written_b", "Written by turn 1,000 of a session", "kB", SQLITE),
    Panel("w4s", "seq_p50_ms", "A durable process, start to result", "ms", UNITS),
    Panel("w4", "cpu_ms", "The same, 50 at once", "ms CPU", UNITS),
    Panel(
        "w5s",
        "wall_s",
        "1,000 durable sessions at once",
        "s",
        (("LangGraph create_agent, SQLite", "LangGraph, SQLite"), ("DBOS", "DBOS, Postgres")),
    ),
    Panel(
        "w6",
        "cold_cpu_ms",
        "Cold start to a built agent",
        "ms CPU",
        (
            ("MS Agent Framework", "MS Agent Framework"),
            ("Pydantic AI (slim)", "Pydantic AI"),
            ("LangGraph", "LangGraph"),
            ("OpenAI Agents", "OpenAI Agents"),
        ),
    ),
    Panel(
        "w8",
        "since_start_s",
        "kill -9: 200 turns, restart to all done",
        "s",
        (("Restate", "Restate"), ("LangGraph", "LangGraph, by hand"), ("DBOS, SQLite", "DBOS")),
    ),
)

WIDTH, COLUMNS, GAP, MARGIN = 860, 2, 36, 20
NAME, BAR, ROW, TOP = 140, 165, 22, 34
STYLE = """
  text { font: 12px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: #3d444d; }
  .title { font-weight: 600; font-size: 13px; fill: #1f2328; }
  .ours { font-weight: 600; fill: #0a6b4b; }
  .bar { fill: #b6bfc9; }
  .bar-ours { fill: #12a574; }
  .note { font-size: 11px; fill: #6a737d; }
  @media (prefers-color-scheme: dark) {
    text { fill: #c2cad2; }
    .title { fill: #f0f3f6; }
    .ours { fill: #4fd6a5; }
    .bar { fill: #59636e; }
    .bar-ours { fill: #2fbf8d; }
    .note { fill: #8b949e; }
  }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    value: float
    ours: bool = False


def draw(lines: Sequence[Line]) -> str:
    """The chart of those panels whose figures were measured."""
    panels = [(panel, bars) for panel in PANELS if len(bars := _bars(panel, lines)) > 1]
    column = (WIDTH - 2 * MARGIN - GAP * (COLUMNS - 1)) / COLUMNS
    body, top = [], float(MARGIN)
    for first in range(0, len(panels), COLUMNS):
        beside = panels[first : first + COLUMNS]
        for place, (panel, bars) in enumerate(beside):
            body += _panel(panel, bars, MARGIN + place * (column + GAP), top)
        top += TOP + ROW * max(len(bars) for _, bars in beside) + 22
    body.append(
        f'<text class="note" x="{MARGIN}" y="{top + 6:.0f}">Shorter is better; bars are logarithmic. '
        "One script for all; CPU figures follow a floor measured beside both. Details: benchmarks/README.md</text>"
    )
    height = top + MARGIN
    told = "; ".join(f"{panel.title}: {bars[0].name} {number(bars[0].value)} {panel.unit}" for panel, bars in panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(told, {chr(34): "&quot;"})}">\n'
        f"<style>{STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _bars(panel: Panel, lines: Sequence[Line]) -> list[Bar]:
    line = next((ln for ln in lines if ln.figure.row == panel.row and ln.figure.path == panel.path), None)
    if line is None:
        return []
    bars = [Bar("Perdure", line.ours, ours=True)]
    for begins, shown in panel.show:
        peer = next((p for p in line.peers if p.name.startswith(begins)), None)
        if peer is not None:
            bars.append(Bar(shown, peer.value))
    return bars[:1] + sorted(bars[1:], key=lambda bar: bar.value)


def _panel(panel: Panel, bars: Sequence[Bar], left: float, top: float) -> list[str]:
    """A title and its bars. A logarithmic axis has no zero: it begins at a third of the smallest value."""
    low = min(bar.value for bar in bars) / 3
    high = max(bar.value for bar in bars)
    out = [f'<text class="title" x="{left:.0f}" y="{top + 14:.0f}">{escape(panel.title)}, {panel.unit}</text>']
    for index, bar in enumerate(bars):
        y = top + TOP + ROW * index
        length = max(3.0, BAR * math.log10(bar.value / low) / math.log10(high / low))
        times = "" if bar.ours else f"  ({number(round(bar.value / bars[0].value, 1))}×)"
        kind = ' class="ours"' if bar.ours else ""
        out += [
            f'<text{kind} x="{left + NAME - 8:.0f}" y="{y + 4:.0f}" text-anchor="end">{escape(bar.name)}</text>',
            f'<rect class="{"bar-ours" if bar.ours else "bar"}" x="{left + NAME:.0f}" y="{y - 7:.0f}" '
            f'width="{length:.1f}" height="14" rx="2"/>',
            f'<text{kind} x="{left + NAME + length + 6:.0f}" y="{y + 4:.0f}">{number(bar.value)}{times}</text>',
        ]
    return out
