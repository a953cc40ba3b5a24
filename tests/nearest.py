"""Print the test files that are nearest to some packages by imports: `python tests/nearest.py sessions,turn`.

`make quick PKG=sessions,turn` runs them. The distance of a test file to a package is

    0      it lies in the package's folder of tests (`tests/sessions`, and `tests/processes_tools` for `processes`)
    1      it, or a helper of its folder that it imports, imports a module of the package
    2, …   a module that it imports does so in so many steps of imports between modules of `perdure`

A name of the root (`from perdure import Runtime`) counts as the module that defines it. At the same distance files come
first that import fewer packages, because they test little else. Files are taken in this order as long as they hold no
more than `MOST` test functions, since nearly every test reaches nearly every package through the Runtime; those in the
folders of the packages are always taken. Folders that `make quick` leaves (`tests.lanes.FOLDERS`) are left here too,
unless the package is their own: PKG=cli.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import grimp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # run as a program, for `tests.lanes`

from tests.lanes import FOLDERS  # noqa: E402  # found by the line above

MOST = 800
"""How many test functions are run: what two free cores do within the minute that `make quick PKG=` may take."""
FAR = 1_000
"""A distance that no chain of imports has."""


class FileOfTests(NamedTuple):
    """A test file, as far as its distance to packages is concerned. `imports` are modules of `perdure`."""

    path: str
    imports: frozenset[str]
    functions: int

    @property
    def folder(self) -> str:
        """The name of the folder in `tests` that it lies in."""
        parts = self.path.split("/")
        return parts[1] if len(parts) > 2 else ""


def packages(source: Path = ROOT / "src" / "perdure") -> list[str]:
    """Return the packages and modules directly below `perdure`."""
    found = {each.stem for each in source.iterdir() if each.suffix == ".py" or (each / "__init__.py").exists()}
    return sorted(name for name in found if not name.startswith("_"))


def asked(words: str, known: Sequence[str]) -> list[str]:
    """Return the packages that `PKG` names. Raises ValueError, which lists those that exist, for any other name."""
    names = [name for word in words.replace(",", " ").split() if (name := word.removeprefix("perdure.").strip("/"))]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        wrong = f"There is no package {', '.join(map(repr, unknown))}." if unknown else "PKG names no package."
        raise ValueError(f"{wrong} Give one or more of these, such as PKG={','.join(known[:2])}: {' '.join(known)}")
    return names


def distances(wanted: Iterable[str], importers: dict[str, set[str]]) -> dict[str, int]:
    """Return for each module in how many steps of imports it reaches a module of the packages; 0 for their own."""
    prefixes = tuple(f"perdure.{name}" for name in wanted)
    near = {m for m in importers if any(m == prefix or m.startswith(f"{prefix}.") for prefix in prefixes)}
    found, steps = dict.fromkeys(near, 0), 0
    while near:
        steps += 1
        near = {by for module in near for by in importers.get(module, ())} - found.keys()
        found.update(dict.fromkeys(near, steps))
    return found


def nearest(files: Iterable[FileOfTests], wanted: Sequence[str], far: dict[str, int], most: int = MOST) -> list[str]:
    """Return the paths of the files that are run for some packages, in the order of their distance."""
    order = []
    for file in files:
        mine = file.folder in wanted or file.folder.startswith(tuple(f"{name}_" for name in wanted))
        steps = 0 if mine else 1 + min((far.get(module, FAR) for module in file.imports), default=FAR)
        others = {module.split(".")[1] for module in file.imports if "." in module} - set(wanted)
        if steps < FAR and (mine or file.folder not in FOLDERS):
            order.append((steps, len(others), file.path, file.functions))
    chosen, functions = list[str](), 0
    for steps, _, path, count in sorted(order):
        if steps > 0 and functions + count > most:
            break
        chosen.append(path)
        functions += count
    return chosen


# ---------------------------------------------------------------------- read from the tree


def read(root: Path = ROOT) -> list[FileOfTests]:
    """Read what every test file imports, itself and through the helpers of its folder."""
    homes = _homes(root / "src" / "perdure" / "__init__.py")
    trees = {path: ast.parse(path.read_bytes()) for path in sorted((root / "tests").rglob("*.py"))}
    files = []
    for path, tree in trees.items():
        if not path.name.startswith("test_"):
            continue
        names = _imported(tree, homes)
        for name in [name for name in names if name.startswith(f"tests.{path.parent.name}.")]:
            helper = root.joinpath(*name.split(".")).with_suffix(".py")
            names |= _imported(trees[helper], homes) if helper in trees else set()
        functions = sum(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
            for node in ast.walk(tree)
        )
        modules = frozenset(name for name in names if name.split(".")[0] == "perdure")
        files.append(FileOfTests(path.relative_to(root).as_posix(), modules, functions))
    return files


def _homes(init: Path) -> dict[str, str]:
    """Return the module that each name of the root comes from."""
    nodes = [node for node in ast.parse(init.read_bytes()).body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: str(node.module) for node in nodes for alias in node.names}


def _imported(tree: ast.Module, homes: dict[str, str]) -> set[str]:
    """Return the modules that a file imports, each by every way to read `from a import b`: `a` and `a.b`."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "perdure":
            found |= {homes.get(alias.name, f"perdure.{alias.name}") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def importers_of_modules() -> dict[str, set[str]]:
    """Return for each module of `perdure` the modules that import it, the root itself left out."""
    graph = grimp.build_graph("perdure", cache_dir=str(ROOT / ".import_linter_cache"))
    modules = graph.modules - {"perdure"}
    return {module: set(graph.find_modules_that_directly_import(module)) - {"perdure"} for module in modules}


def main(arguments: Sequence[str]) -> int:
    try:
        wanted = asked(" ".join(arguments), packages())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(" ".join(nearest(read(), wanted, distances(wanted, importers_of_modules()))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
