"""Draw functions for a reader who has not seen the code: `python tests/prose/draw.py 24 sessions engine`.

Prints 30 signatures with their docstrings and without their bodies. The reader says what each function does. The seed
is the number of the issue: the same seed draws the same functions from the same tree. Packages and modules are named
by their paths below the import package: `sessions`, `stores/sqlite`, `runtime.py`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import random
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.prose.ratchet import package, statements  # noqa: E402  # found through the line above

DRAWN = 30


class Described(NamedTuple):
    """A function as its reader sees it."""

    name: str
    signature: str
    docstring: str


class UnknownPackage(Exception):
    """No package or module has this name."""


def described(folder: Path, part: str) -> list[Described]:
    """Return the functions with docstrings of a package or module below `folder`. Raises UnknownPackage."""
    place = folder / part
    files = (
        sorted(place.rglob("*.py")) if place.is_dir() else [place] if place.suffix == ".py" and place.exists() else []
    )
    if not files:
        known = sorted(path.name for path in folder.iterdir() if path.suffix == ".py" or any(path.glob("*.py")))
        raise UnknownPackage(f"no package or module {part}: there are {', '.join(known)}, and paths below them")
    return [each for file in files for each in _of_module(file, folder)]


def _of_module(file: Path, folder: Path) -> list[Described]:
    module = ".".join(file.relative_to(folder).with_suffix("").parts)
    found = []
    for name, node in statements(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (docstring := ast.get_docstring(node)):
            bare = copy.copy(node)
            bare.body = []
            found.append(Described(f"{module}.{name}", ast.unparse(bare).strip(), docstring))
    return found


def draw(seed: int, folder: Path, parts: Sequence[str]) -> list[Described]:
    """Return 30 functions of packages below `folder`, or all if there are fewer. Raises UnknownPackage."""
    population = sorted({each for part in parts for each in described(folder, part)})
    return random.Random(seed).sample(population, min(DRAWN, len(population)))


def main() -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Draw 30 functions with docstrings, without their bodies.")
    parser.add_argument("seed", type=int, help="the number of the issue")
    parser.add_argument("packages", nargs="+", metavar="package", help="such as sessions, stores/sqlite or runtime.py")
    given = parser.parse_args()
    try:
        drawn = draw(given.seed, package(ROOT), given.packages)
    except UnknownPackage as error:
        parser.error(str(error))
    for number, each in enumerate(drawn, 1):
        text = textwrap.indent(f"{each.signature}\n{textwrap.indent(each.docstring, '    ')}", "    ")
        print(f"{number}. {each.name}\n\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
