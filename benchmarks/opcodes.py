"""Compare the bytecode instructions of turns, a process and an import with a committed table.

    python -m benchmarks.opcodes                 compare with benchmarks/opcodes.json (part of `make test`)
    python -m benchmarks.opcodes --write         write the table; the commit says why the figures moved
    python -m benchmarks.opcodes --by 25 one     list the 25 functions that cost most in the entry "one"
    python -m benchmarks.opcodes --json          print the comparison as JSON

Each entry is counted in a process of its own (`opcode_child.py`), in virtual time, with a fixed hash seed, and with
only the packages that Perdure needs. Two runs give the same number, and other load on the machine does not change it.
Instructions inside C code (msgspec, SQLite, Monty) are not counted.

Numbers differ between versions of Python and of the packages, so the table names its environment. In another
environment an older tree (`tests/golden/trees`) is counted too. The table also has the figures of that tree, so the
ratio of the present tree to it is known:

    expected here = present in the table × older tree here / older tree in the table

The table has one environment, because figures of a second one would describe an older tree after the next `--write`.
Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TABLE = HERE / "opcodes.json"
TREES = ROOT / "tests" / "golden" / "trees"
OLDER = "82f0b67"
"""The commit whose tree is counted in other environments. A change of it needs a new table."""

TOLERANCE = 0.01
TIMEOUT = 300
"""Seconds for one entry: a hundred times what it takes."""

ENTRIES = {
    "import": "`import perdure` in a fresh interpreter",
    "one": "a turn in memory with one call",
    "ten": "ten calls, one after another",
    "four": "four calls at once",
    "hook": "one call, and a plugin that looks at it",
    "limit": "one call, under a limit of tokens",
    "sqlite": "one call, on SQLite",
    "cell": "one call from a code cell",
    "process": "a process of one step, on SQLite",
}
WRITE = "python -m benchmarks.opcodes --write"


class OpcodesError(Exception):
    """Counting or comparing failed. The message says what to do."""


# Counting


@dataclass(frozen=True, slots=True)
class Counted:
    """Instructions of one turn (or process, or import), and of each function in it."""

    instructions: float
    by: Mapping[str, float]


class Counter(Protocol):
    """Counts an entry of a tree. `source` is the folder that holds its package."""

    def count(self, source: Path, entry: str) -> Counted: ...


class ChildCounter:
    """Counts each entry in a fresh process, which finds msgspec and, for a cell, Monty, but nothing else."""

    def __init__(self, folder: Path, timeout: float = TIMEOUT) -> None:
        self._folder, self._timeout = folder, timeout
        self._core = _linked(folder / "core", {"msgspec": "msgspec"})
        self._imported: set[Path] = set()

    def count(self, source: Path, entry: str) -> Counted:
        if entry == "import" and source not in self._imported:
            self._run(source, entry)  # compiles the tree
            self._imported.add(source)
        return self._run(source, entry)

    def _run(self, source: Path, entry: str) -> Counted:
        package, paths = package_of(source), [source, self._core]
        dropped = ("PYTHON", "MONTY", "PERDURE_", f"{package.upper()}_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        if entry == "cell":
            paths.append(
                _linked(
                    self._folder / "code",
                    {"pydantic_monty": "pydantic-monty", "typing_extensions": "typing-extensions"},
                )
            )
            environment["MONTY_BIN"] = _monty()
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-S", "-P", str(HERE / "opcode_child.py"), entry, package]
        try:
            ended = subprocess.run(
                command, cwd=self._folder, env=environment, capture_output=True, text=True, timeout=self._timeout
            )
        except subprocess.TimeoutExpired:
            raise OpcodesError(
                f"{entry!r} did not end within {self._timeout} s: "
                "its time is virtual, so nothing in it may wait for a timer"
            ) from None
        if ended.returncode:
            raise OpcodesError(f"{entry!r} cannot be counted in {source}: {ended.stderr.strip()[-2000:]}")
        return Counted(**json.loads(ended.stdout))


def package_of(source: Path) -> str:
    """Return the name of the only package in a folder."""
    found = [path.parent.name for path in source.glob("*/__init__.py")]
    if len(found) != 1:
        raise OpcodesError(f"expected one package in {source}, found {len(found)}")
    return found[0]


def _linked(folder: Path, distributions: Mapping[str, str]) -> Path:
    """Return a folder with links to the modules of these distributions, and to their metadata."""
    folder.mkdir(exist_ok=True)
    for module, distribution in distributions.items():
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise OpcodesError(f"{distribution} is not installed: run `make setup`")
        found = Path(spec.origin)
        found = found.parent if found.name == "__init__.py" else found
        for each in (found, *found.parent.glob(f"{module}-*.dist-info")):
            if not (folder / each.name).exists():
                (folder / each.name).symlink_to(each)
    return folder


def _monty() -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("monty", path=path)
    if program is None:
        raise OpcodesError("the program `monty` is not installed: run `make setup`")
    return program


@contextmanager
def older_tree(trees: Path = TREES) -> Iterator[Path]:
    """Unpack the older tree. Yields the folder that holds its package."""
    archive = trees / f"{OLDER}.tar.xz"
    listed = (TREES / "README.md").read_text()
    if not archive.exists() or hashlib.sha256(archive.read_bytes()).hexdigest() not in listed:
        raise OpcodesError(
            f"{archive.name} is missing, or is not the archive whose SHA-256 is in tests/golden/trees/README.md: "
            f"restore it from git"
        )
    with tempfile.TemporaryDirectory(prefix="perdure-opcodes-") as folder, tarfile.open(archive) as packed:
        # Before CPython 3.11.4 there are no filters. The archive is known by its digest.
        packed.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        packed.extractall(folder)
        yield Path(folder) / "src"


def count_tree(counter: Counter, source: Path) -> dict[str, float]:
    return {entry: counter.count(source, entry).instructions for entry in ENTRIES}


def environment() -> str:
    """Return the name of this environment: what determines a number besides the tree."""
    python = f"{platform.python_implementation()} {platform.python_version()} on {sys.platform}"
    packages = [f"{name} {_version(name)}" for name in ("msgspec", "pydantic-monty")]
    return ", ".join([python, f"SQLite {sqlite3.sqlite_version}", *packages])


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise OpcodesError(f"{distribution} is not installed: run `make setup`") from None


# The table, and the comparison


@dataclass(frozen=True, slots=True)
class Table:
    """Committed figures: of the present tree and of the older one, in one environment."""

    environment: str
    present: Mapping[str, float]
    older: Mapping[str, float]

    @classmethod
    def read(cls, path: Path) -> Table:
        try:
            data = json.loads(path.read_text())
            table = cls(data["environment"], _positive(data["present"]), _positive(data[OLDER]))
        except FileNotFoundError:
            raise OpcodesError(f"there is no table at {path}: restore it from git, or run `{WRITE}`") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OpcodesError(f"{path} cannot be read ({error!r}): restore it from git, or run `{WRITE}`") from None
        for figures in (table.present, table.older):
            if set(figures) != set(ENTRIES):
                wrong = ", ".join(sorted(set(figures) ^ set(ENTRIES)))
                raise OpcodesError(
                    f"{path} and ENTRIES in benchmarks/opcodes.py have different entries ({wrong}): run `{WRITE}`"
                )
        return table

    def write(self, path: Path) -> None:
        present, older = (
            {entry: round(count, 1) for entry, count in each.items()} for each in (self.present, self.older)
        )
        figures = {"environment": self.environment, "present": present, OLDER: older}
        path.write_text(json.dumps(figures, indent=2) + "\n")


def _positive(figures: Mapping[str, float]) -> dict[str, float]:
    if min(figures.values(), default=1) <= 0:
        raise ValueError("a figure is not above zero")
    return dict(figures)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One entry: the expected and the counted figure, and the ratio of the count to that of the older tree."""

    entry: str
    expected: float
    counted: float
    of_older: float

    @property
    def change(self) -> float:
        return self.counted / self.expected - 1

    @property
    def moved(self) -> bool:
        """True if the entry costs more or less than the table allows. A gain counts too: it could be lost unnoticed."""
        return abs(self.change) > TOLERANCE


def compare(
    table: Table, here: str, counted: Mapping[str, float], older_here: Mapping[str, float] | None = None
) -> list[Comparison]:
    """Compare figures of the present tree with the table.

    `older_here` are the figures of the older tree in this environment, needed if it is not that of the table.
    """
    older = table.older if here == table.environment else older_here
    if older is None:
        raise OpcodesError(f"the table is of {table.environment}: count {OLDER} here as well")
    return [
        Comparison(
            entry,
            table.present[entry] * older[entry] / table.older[entry],
            counted[entry],
            counted[entry] / older[entry],
        )
        for entry in ENTRIES
    ]


def check(counter: Counter, path: Path = TABLE, here: str | None = None) -> list[Comparison]:
    """Count the present tree, and the older one if the table is of another environment; compare with the table."""
    here, table = here or environment(), Table.read(path)
    older_here = None
    if here != table.environment:
        with older_tree() as source:
            older_here = count_tree(counter, source)
    return compare(table, here, count_tree(counter, ROOT / "src"), older_here)


def write(counter: Counter, path: Path = TABLE, here: str | None = None) -> None:
    """Count both trees, and write the table of this environment."""
    with older_tree() as source:
        older = count_tree(counter, source)
    Table(here or environment(), count_tree(counter, ROOT / "src"), older).write(path)


# What is printed


def as_text(rows: Sequence[Comparison]) -> str:
    lines = [f"{'':9}{'expected':>12}{'counted':>12}{'change':>10}{'of ' + OLDER:>12}"]
    lines += [
        f"{row.entry:9}{row.expected:>12,.0f}{row.counted:>12,.0f}{row.change:>+10.2%}{row.of_older:>12.3f}"
        f"  {ENTRIES[row.entry]}"
        for row in rows
    ]
    return "\n".join(lines)


def as_json(rows: Sequence[Comparison], here: str) -> str:
    entries = {row.entry: asdict(row) | {"change": row.change, "moved": row.moved} for row in rows}
    return json.dumps({"environment": here, "tolerance": TOLERANCE, "entries": entries}, indent=2)


def complaint(rows: Sequence[Comparison]) -> str | None:
    """Return what moved, before and after, and what to do; or None."""
    moved = [row for row in rows if row.moved]
    if not moved:
        return None
    lines = [
        f"{row.entry}: {row.expected:,.0f} -> {row.counted:,.0f} instructions ({row.change:+.2%}; "
        f"{TOLERANCE:.0%} is allowed): {ENTRIES[row.entry]}"
        for row in moved
    ]
    return "\n".join(
        [
            *lines,
            f"See where they are executed: python -m benchmarks.opcodes --by 25 {moved[0].entry}",
            f"If the change is meant, write the table, commit it, and say in the commit why: {WRITE}",
        ]
    )


def costliest(counted: Counted, most: int) -> str:
    """Return the functions that execute most instructions, one in each line."""
    ranked = sorted(counted.by.items(), key=lambda item: (-item[1], item[0]))[:most]
    lines = [f"{counted.instructions:>12,.0f}         all"]
    lines += [f"{count:>12,.0f}{count / counted.instructions:>7.1%}  {name}" for name, count in ranked]
    return "\n".join(lines)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.opcodes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="write the table instead of comparing with it")
    what.add_argument("--by", nargs=2, metavar=("N", "ENTRY"), help="the N functions that cost most in an entry")
    what.add_argument("--json", action="store_true", help="the comparison as JSON")
    parser.add_argument("--table", type=Path, default=TABLE, help="another table than benchmarks/opcodes.json")
    found = parser.parse_args(arguments)
    if found.by and (not found.by[0].isdecimal() or found.by[1] not in ENTRIES):
        parser.error(f"--by takes a number and one of these entries: {', '.join(ENTRIES)}")
    return found


def run(arguments: Sequence[str] | None, counter: Counter) -> int:
    """Do what the arguments say. Returns the exit status: 1 if an entry moved, 2 if counting or comparing failed."""
    chosen = options(arguments)
    try:
        if chosen.by:
            print(costliest(counter.count(ROOT / "src", chosen.by[1]), int(chosen.by[0])))
            return 0
        if chosen.write:
            write(counter, chosen.table)
            print(f"The figures of {environment()} are in {chosen.table}. Say in the commit why they moved.")
            return 0
        rows = check(counter, chosen.table)
    except OpcodesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(as_json(rows, environment()) if chosen.json else f"{environment()}\n\n{as_text(rows)}")
    found = complaint(rows)
    if found is not None:
        print(f"\n{found}", file=sys.stderr)
    return 0 if found is None else 1


def main(arguments: Sequence[str] | None = None) -> int:
    with tempfile.TemporaryDirectory(prefix="perdure-opcodes-") as folder:
        try:
            counter = ChildCounter(Path(folder))
        except OpcodesError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return run(arguments, counter)


if __name__ == "__main__":
    sys.exit(main())
