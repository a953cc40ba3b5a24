"""How things look: rich on a terminal, plain and untruncated lines elsewhere, JSON for machines."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

STYLES = {
    "ok": "green",
    "finished": "green",
    "idle": "dim",
    "running": "green",
    "parked": "yellow",
    "waiting": "yellow",
    "interrupted": "yellow",
    "queued": "yellow",
    "completed": "green",
    "abandoned": "yellow",
    "caller_departed": "yellow",
    "outcome_unknown": "yellow",
    "budget_spent": "yellow",
    "limit_reached": "yellow",
    "incomplete": "yellow",
    "cancelled": "yellow",
    "denied": "yellow",
    "stuck": "bold red",
    "failed": "red",
    "provider_failed": "red",
    "plugin_aborted": "red",
    "invalid_input": "red",
}

MARKS = {"ok": "✓", "failed": "✗", "denied": "⊘", "cancelled": "⊘", "outcome_unknown": "?"}

_UNSEEN = (
    *(n for n in range(32) if n not in (9, 10)),  # ESC begins a sequence that moves the cursor, or names the window
    *range(127, 160),  # DEL and C1: one byte that does the same as ESC and a letter
    *(0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),  # reorder what stands beside them
    *(0x2028, 0x2029),  # lines and paragraphs end here for some
)
_CONTROL = dict.fromkeys(_UNSEEN, "�")
_ONE_LINE = _CONTROL | {10: "�", 9: " "}
_IN_JSON = {n: f"\\u{n:04x}" for n in _UNSEEN if n > 31}  # a JSON encoder escapes the others itself


def console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False)


def complain(message: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"perdure: {safe(message)}\n")
    sys.stderr.flush()


def as_json(value: Any) -> str:
    """Indented JSON with a newline."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode().translate(_IN_JSON) + "\n"


def json_line(value: Any) -> str:
    """JSON on one line. What a terminal would act on is escaped: it means the same in JSON."""
    return msgspec.json.encode(value).decode().translate(_IN_JSON)


def print_json(value: Any) -> None:
    sys.stdout.write(as_json(value))


def print_value(value: Any) -> None:
    """Text as it is, everything else as JSON; nothing where there is nothing."""
    if isinstance(value, str):
        sys.stdout.write(safe(value) + ("" if value.endswith("\n") else "\n"))
    elif value is not None:
        print_json(value)


def safe(text: str) -> str:
    """Text that can neither move the cursor nor change how its neighbours read: the filter of all that is printed.

    What models, tools and stores of others say is not trusted with a terminal.
    """
    return text.translate(_CONTROL)


def on_one_line(text: str) -> str:
    """The same for a name: a line that it begins would pass for one of ours."""
    return text.translate(_ONE_LINE)


def styled(text: str, style: str = "", **options: Any) -> Text:
    """Text for a terminal, filtered. Every such text is made here."""
    from rich.text import Text

    return Text(safe(text), style=style, **options)


def brief(value: Any, width: int = 60) -> str:
    """A value on one line."""
    text = value if isinstance(value, str) else json_line(value)
    text = safe(" ".join(text.split()))
    return text if len(text) <= width else f"{text[: width - 1]}…"


def call_text(tool: str, args: dict[str, Any], width: int = 60) -> str:
    """`search(query="trains", limit=5)`"""
    inside = ", ".join(f"{name}={brief(json_line(value), 40)}" for name, value in args.items())
    return brief(f"{tool}({inside})", width)


def whole_call(tool: str, args: dict[str, Any]) -> str:
    """The same and nothing left out: for a person who decides on it."""
    inside = ", ".join(f"{on_one_line(name)}={json_line(value)}" for name, value in args.items())
    return f"{on_one_line(tool)}({inside})"


def ago(then: int, now: int) -> str:
    """How long ago, in the largest unit that fits."""
    if not then:
        return "—"
    return f"{span(max(0, now - then))} ago"


def span(millis: int) -> str:
    seconds = millis / 1000
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "min"), (86400, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.0f} d"


def moment(at: int) -> str:
    """A time of the store, on this machine's clock, to the millisecond."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at / 1000))}.{at % 1000:03}"


def size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def table(out: Console, headers: Sequence[str], rows: Sequence[Sequence[str]], fold: Sequence[int] = (0,)) -> None:
    """A table. Columns in `fold` are broken where they do not fit and never cut, because people copy what is in them.

    The first column holds ids and gives way last. Elsewhere than on a terminal nothing is broken or cut.
    """
    if not out.is_terminal:
        plain_table(out, headers, rows)
        return
    from rich import box
    from rich.table import Table

    rows = [[on_one_line(cell) for cell in row] for row in rows]
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    first = _first_width(out.width, headers, rows)
    for index, header in enumerate(headers):
        # A fixed width: with a least one rich draws tables that are wider than the terminal, and cuts them.
        drawn.add_column(header, overflow="fold", no_wrap=index not in fold, width=None if index else first)
    for row in rows:
        drawn.add_row(*[styled(cell, STYLES.get(cell.split(":")[0].split(" ")[0], "")) for cell in row])
    out.print(drawn)


def _first_width(width: int, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """What the first column gets: all it wants if there is room, else up to two fifths of the terminal."""
    from rich.cells import cell_len

    wanted = [
        max(cell_len(line) for cell in column for line in (cell or " ").splitlines())
        for column in zip(headers, *rows, strict=True)
    ]
    room = width - sum(wanted[1:]) - 3 * len(wanted)  # three between two columns, one at either end
    return min(wanted[0], max(room, int(width * 0.4)))


def plain_table(out: Console, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [list(headers), *[[on_one_line(c) for c in row] for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    for line in lines:
        out.file.write("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() + "\n")


def text_line(out: Console, text: str, style: str = "") -> None:
    """One line of plain text: coloured on a terminal, never wrapped elsewhere."""
    text_block(out, on_one_line(text), style)


def heading(out: Console, text: str, style: str = "bold") -> None:
    """A line after an empty one."""
    text_block(out, f"\n{on_one_line(text)}", style)


def text_block(out: Console, text: str, style: str = "") -> None:
    """Several lines, for text that has its own: what was said."""
    if out.is_terminal:
        out.print(styled(text, style))
    else:
        out.file.write(f"{safe(text)}\n")
