"""Whoever catches everything says why."""

from __future__ import annotations

import re
from pathlib import Path

import perdure

BROAD = re.compile(r"^\s*except\s+\(?.*\b(BaseException|Exception)\b.*:")


def test_every_except_that_catches_everything_says_why() -> None:
    """In a comment on its line, or on the next one."""
    silent = []
    for file in sorted(Path(perdure.__file__).parent.rglob("*.py")):
        lines = [*file.read_text().splitlines(), ""]
        for number, line in enumerate(lines[:-1]):
            if BROAD.match(line) and "  # " not in line and not lines[number + 1].lstrip().startswith("# "):
                silent.append(f"{file.name}:{number + 1}: {line.strip()}")

    assert silent == []
