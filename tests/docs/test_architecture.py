"""ARCHITECTURE.md is true: the packages, paths and names in it exist, and no package is left out."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "perdure"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
CODE = "\n".join(path.read_text() for path in sorted(SOURCE.rglob("*.py")))

NOT_YET = {"server", "commands", "triggers", "stores/postgres"}
"""Packages that are named with their place, and not written."""

PATHS = sorted(set(re.findall(r"(?<![\w/.])((?:[a-z_]+/)+(?:[a-z_]+\.py)?|[a-z_]+/[a-z_]+(?:\.py)?)(?![\w/-])", TEXT)))
"""What reads like a path below the package, in words, links and drawings."""

DRAWN = re.findall(r"\b([A-Z][a-z]+[A-Z]\w+(?:\._?[a-z]\w+)*)", "".join(TEXT.split("```")[1::2]))
NAMES = sorted({*re.findall(r"`_?([A-Z]\w+(?:\._?[a-z]\w+)*)`", TEXT), *DRAWN})
"""Classes and their methods, in words and in drawings."""


def _exists(path: str) -> bool:
    bare = path.rstrip("/")
    places = (ROOT / bare, ROOT / "src" / bare, SOURCE / bare, SOURCE / f"{bare}.py")
    return bare in NOT_YET or any(place.exists() for place in places) or any(SOURCE.glob(f"*/{bare}"))


def test_it_names_paths_and_parts() -> None:
    assert len(PATHS) > 50
    assert len(NAMES) > 40


@pytest.mark.parametrize("path", PATHS)
def test_every_path_in_it_exists(path: str) -> None:
    assert _exists(path)


@pytest.mark.parametrize("name", NAMES)
def test_every_part_in_it_is_in_the_code(name: str) -> None:
    first, *rest = name.split(".")

    assert re.search(rf"\b{first}\b", CODE)
    for each in rest:
        assert re.search(rf"def {each}\b|\b{each}:", CODE)


def test_its_table_of_layers_has_every_package() -> None:
    table = TEXT[TEXT.index("| Package |") : TEXT.index("## Reading order")]
    listed = set(re.findall(r"^\| \[(\w+)/?\]", table, re.MULTILINE))
    there = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}

    assert listed == there - {"__init__", "__main__"}


def test_its_drawing_of_layers_has_every_package_below_those_that_import_it() -> None:
    """The order is that of the contract which import-linter checks."""
    drawing = TEXT[TEXT.index("what is started") : TEXT.index("what is raised") + 60]
    contract = (ROOT / "pyproject.toml").read_text().partition("layers = [")[2].partition("]")[0]
    layers = [re.findall(r"\w+", line) for line in re.findall(r'"(.*?)"', contract) if line != "__main__"]
    rows = {name: number for number, line in enumerate(drawing.splitlines()) for name in re.findall(r"[a-z_]+", line)}
    places = [[rows[name] for name in layer] for layer in layers]

    for upper, lower in itertools.pairwise(places):
        assert max(upper) <= min(lower), (upper, lower)
