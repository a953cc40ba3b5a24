"""Tables on a terminal: nothing that a person may want to copy is cut. And what no terminal gets to see."""

import ast
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from perdure.cli import render
from perdure.cli.processes import print_rows
from perdure.cli.render import as_json, brief, call_text, on_one_line, safe, styled, table, text_line, whole_call
from perdure.cli.run import LiveTurn
from perdure.model.event import ToolFinished
from perdure.model.tool import Failed

HEADERS = ["process", "what", "status", "age", "worker", "waits for, or how it ended"]
ROWS = [
    ["order-A-7.1.3.0.deliver", "function deliver@1", "completed", "4 min", "attempt 3", "parcel-1: on its way"],
    ["order-A-7.1.1.1", "turn fraud", "interrupted", "4 min", "w-01m7g6nyj10dr6chb2", "looks honest"],
]


def drawn(width: int, headers: list[str], rows: list[list[str]], fold: tuple[int, ...]) -> list[str]:
    written = io.StringIO()
    out = Console(file=written, width=width, force_terminal=True, no_color=True, highlight=False)
    table(out, headers, rows, fold)
    return [
        line for line in written.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines() if line.strip()
    ]


@pytest.mark.parametrize("width", [72, 80, 100, 160])
def test_a_table_fits_its_terminal_and_drops_no_word(width: int) -> None:
    lines = drawn(width, HEADERS, ROWS, (0, 1, 4, 5))

    assert max(len(line) for line in lines) <= width
    letters = sorted("".join("".join(lines).replace("─", "").split()))
    assert letters == sorted("".join("".join(["".join(HEADERS), *["".join(row) for row in ROWS]]).split()))


def test_the_first_column_takes_the_room_that_others_leave() -> None:
    name = "a-session-with-a-long-name-" * 3

    lines = drawn(100, ["session", "turns"], [[name, "7"]], (0,))

    assert lines[-1].split() == [name, "7"]


# ---------------------------------------------------------------------- the filter

HOSTILE = {
    "ESC": "\x1b[2J",
    "OSC": "\x1b]0;owned\x07",
    "CSI of C1": "\x9b2J",
    "OSC of C1": "\x9d0;owned\x9c",
    "backspace": "ok\b\bno",
    "carriage return": "no\rok",
    "delete": "\x7f",
    "override": "\u202efdp.exe",
    "isolate": "\u2066x\u2069",
    "marks": "\u200e\u200f\u061c",
    "line separator": "one\u2028two",
}
REFUSED = set("\x1b\x07\x08\r\x7f\x9b\x9c\x9d\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2028\u2029")
REFUSED |= set("\u2066\u2067\u2068\u2069")


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_nothing_that_is_printed_commands_a_terminal(text: str) -> None:
    printed = [
        safe(text),
        on_one_line(text),
        brief(text),
        brief({"a": text}),
        call_text(text, {text: text}),
        whole_call(text, {text: text}),
        str(styled(text)),
        as_json({"a": text}),
    ]

    assert [each for each in printed if REFUSED & set(each)] == []
    assert json.loads(as_json({"a": text})) == {"a": text}


def test_a_name_begins_no_line_of_its_own() -> None:
    written = io.StringIO()
    out = Console(file=written, width=100)

    text_line(out, "agent evil\nall is well")
    table(out, ["session"], [["s\nall is well"]])

    assert written.getvalue().splitlines() == ["agent evil�all is well", "session", "s�all is well"]


def test_an_unknown_tool_cannot_command_the_terminal_of_a_live_turn() -> None:
    live, written = LiveTurn(), io.StringIO()
    live._out = Console(file=written, width=100, force_terminal=True, no_color=True)

    live.show(ToolFinished("c", "s", "s.1", "s.1.1.0", "\x1b]0;owned\x07", Failed("tool_unavailable", "there is none")))

    assert "\x1b]" not in written.getvalue()
    assert "owned" in written.getvalue()


def test_every_text_of_the_command_line_is_made_by_the_filter() -> None:
    makers = []
    for path in sorted(Path(render.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        if "Text" in called:
            makers.append(path.name)

    assert makers == ["render.py"]


def test_what_is_decided_on_is_shown_whole() -> None:
    args = {"to": "everybody@example.com", "text": "x" * 500 + "DROP TABLE"}

    assert whole_call("mail", args) == f'mail(to="everybody@example.com", text="{args["text"]}")'


PROCESS_HEADERS = ["process", "what", "status", "age", "worker", "progress", "waits for, is stuck by, or ended as"]
PROCESSES = [
    ["n-7", "function nightly@2", "waiting", "4 min", "", "12 of 90", "signal approve, at most 24 h"],
    ["order-2026-11-19-000123", "tool research", "interrupted, asked to stop", "3 days", "w-9f86d081884c7d65", "", ""],
]


@pytest.mark.parametrize("width", [40, 80, 100])
def test_processes_are_listed_on_lines_of_their_own_where_a_table_would_not_fit(width: int) -> None:
    written = io.StringIO()
    out = Console(file=written, width=width, force_terminal=True, color_system=None, highlight=False)
    print_rows(out, PROCESS_HEADERS, PROCESSES)
    lines = written.getvalue().splitlines()

    assert max(len(line) for line in lines) <= width
    assert lines[5:7] == ["order-2026-11-19-000123", "    tool research"]
    assert (
        " ".join(" ".join(lines).split())
        == (
            "n-7 function nightly@2 waiting, 4 min 12 of 90 signal approve, at most 24 h order-2026-11-19-000123 "
            "tool research interrupted, asked to stop, 3 days, worker w-9f86d081884c7d65"
        )
        or width == 40
    )


def test_processes_are_a_table_where_it_fits() -> None:
    written = io.StringIO()
    out = Console(file=written, width=80, force_terminal=True, color_system=None, highlight=False)
    print_rows(out, PROCESS_HEADERS, PROCESSES[:1])

    assert "process " in written.getvalue()
    assert max(len(line.rstrip()) for line in written.getvalue().splitlines()) <= 80
