"""Tables on a terminal: nothing that a person may want to copy is cut."""

import io

import pytest
from rich.console import Console

from mainstay.cli.render import table

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
