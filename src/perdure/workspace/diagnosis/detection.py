"""What a project is tested and built with, from the files in its folder.

Pure: the names in the folder, and in its folder of tests, and the text of those that are `wanted` go in. What comes out
is every runner that the files speak for, each with its reason. Where they speak for several, the caller is told, and
nothing is guessed: only a Makefile gives way to the runner of a language, because it usually calls just that one, and
`also` says so.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeAlias

from msgspec import Struct

Purpose: TypeAlias = Literal["test", "build"]

WANTED = (
    "pyproject.toml", "setup.cfg", "tox.ini", "pytest.ini", "requirements.txt", "requirements-dev.txt",
    "package.json", "Cargo.toml", "go.mod", "Makefile", "makefile", "GNUmakefile",
)  # fmt: skip
"""The files whose text is looked at, besides some of the tests."""
TEST_FOLDERS = ("tests/", "test/")
MOST_TESTS = 5
"""Files of tests that are looked at: the first ones tell what the others are written for."""


class Runner(Struct, frozen=True, gc=False):
    """A way to test or to build a project: its name, what is run, and which file speaks for it. `filter` is what comes
    before the name of a test, to run only that; None if it has no such option."""

    name: str
    argv: tuple[str, ...]
    because: str
    filter: tuple[str, ...] | None = None

    def selecting(self, only: str) -> tuple[str, ...]:
        """The arguments to run some of the tests only."""
        return (*self.argv, *(self.filter or ()), only)


class Detected(Struct, frozen=True, gc=False):
    """The runners that a project speaks for: one to use, several to choose from, or none. `also` are further ones that
    give way."""

    runners: tuple[Runner, ...] = ()
    also: tuple[Runner, ...] = ()

    @property
    def runner(self) -> Runner | None:
        return self.runners[0] if len(self.runners) == 1 else None

    def named(self, name: str) -> Runner | None:
        return next((each for each in (*self.runners, *self.also) if each.name == name), None)


def wanted(names: Collection[str]) -> list[str]:
    """The files whose text tells something, of all names."""
    return [*[each for each in WANTED if each in names], *_test_files(names)[:MOST_TESTS]]


def detect(purpose: Purpose, names: Collection[str], texts: Mapping[str, str]) -> Detected:
    """The runners for a folder that holds `names`; folders among them end with a slash."""
    project = _Project(frozenset(names), texts)
    found = [runner for family in FAMILIES[purpose] for runner in family(project)]
    make = _make(project, purpose)
    return Detected(tuple(found), tuple(make)) if found else Detected(tuple(make))


class _Project:
    """A folder: what is in it, and what its files say. A file that cannot be read as what it is says nothing."""

    def __init__(self, names: frozenset[str], texts: Mapping[str, str]) -> None:
        self.names, self.texts = names, texts
        self.pyproject = _table(texts.get("pyproject.toml"))
        self.package = _object(texts.get("package.json"))

    def has(self, *names: str) -> str | None:
        return next((each for each in names if each in self.names), None)

    def python(self, module: str) -> tuple[str, ...]:
        """How this project runs a module of Python."""
        if self.has("uv.lock"):
            return ("uv", "run", module)
        if self.has("poetry.lock"):
            return ("poetry", "run", module)
        folder = self.has(".venv/", "venv/")
        return (f"{folder}bin/python" if folder else "python3", "-m", module)

    def node(self, program: str) -> tuple[str, ...]:
        """How this project runs a program that it depends on: never one that has to be downloaded."""
        return ("npx", "--no-install", program)

    @property
    def npm(self) -> str:
        return "pnpm" if self.has("pnpm-lock.yaml") else "yarn" if self.has("yarn.lock") else "npm"

    def script(self, name: str) -> str | None:
        scripts = self.package.get("scripts")
        text = scripts.get(name) if isinstance(scripts, dict) else None
        return text if isinstance(text, str) and "no test specified" not in text else None

    def depends_on(self, name: str) -> bool:
        tables = (self.package.get(each) for each in ("dependencies", "devDependencies"))
        return any(isinstance(each, dict) and name in each for each in tables)


def _table(text: str | None) -> dict[str, Any]:
    try:
        return tomllib.loads(text or "")
    except ValueError:
        return {}


def _object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _inner(table: Any, *keys: str) -> Any:
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table


# ---------------------------------------------------------------------- tests

_TEST_FILE = re.compile(r"(?:tests?/)?(?:test_\w+|\w+_test)\.py")
_FOR_PYTEST = re.compile(r"^(?:async )?def test|^(?:import|from) pytest\b|^class Test\w*:", re.M)
"""What unittest would not run, or pass over in silence."""


def _test_files(names: Collection[str]) -> list[str]:
    found = sorted(each for each in names if _TEST_FILE.fullmatch(each))
    return sorted(found, key=lambda each: "/" in each)


def _python_tests(project: _Project) -> list[Runner]:
    why = _speaks_for_pytest(project)
    if why is not None:
        return [Runner("pytest", project.python("pytest"), why, ("-k",))]
    tests = [each for each in _test_files(project.names) if "/" not in each]
    folder, beside = project.has(*TEST_FOLDERS), project.has("pyproject.toml", "setup.py", "setup.cfg")
    if tests:
        return [Runner("unittest", project.python("unittest"), f"{tests[0]}, and no file names pytest", ("-k",))]
    if folder and beside:
        argv = (*project.python("unittest"), "discover", "-s", folder.rstrip("/"), "-t", ".")
        return [Runner("unittest", argv, f"{folder} beside {beside}, and no file names pytest", ("-k",))]
    return []


def _speaks_for_pytest(project: _Project) -> str | None:
    for name in ("pytest.ini", ".pytest.ini", "conftest.py"):
        if project.has(name):
            return name
    if _inner(project.pyproject, "tool", "pytest") is not None:
        return "[tool.pytest] in pyproject.toml"
    if re.search(r"^\[tool:pytest\]", project.texts.get("setup.cfg", ""), re.M):
        return "[tool:pytest] in setup.cfg"
    if re.search(r"^\[pytest\]", project.texts.get("tox.ini", ""), re.M):
        return "[pytest] in tox.ini"
    for name in ("pyproject.toml", "requirements-dev.txt", "requirements.txt", "setup.cfg", "tox.ini"):
        if re.search(r"(?<![\w-])pytest(?![\w-])", project.texts.get(name, "")):
            return f"pytest in {name}"
    for name in _test_files(project.names):
        if _FOR_PYTEST.search(project.texts.get(name, "")):
            return f"tests in {name} that are written for pytest"
    return None


def _node_tests(project: _Project) -> list[Runner]:
    script = project.script("test")
    if script is not None:
        tool = next((each for each in ("vitest", "jest") if re.search(rf"\b{each}\b", script)), None)
        told = f'the script "test" of package.json: {script[:100]}'
        dashes = () if project.npm == "yarn" else ("--",)
        return [Runner(f"{project.npm} test", (project.npm, "test"), told, (*dashes, "-t") if tool else None)]
    found = []
    if project.depends_on("vitest"):
        found.append(Runner("vitest", (*project.node("vitest"), "run"), "vitest in package.json", ("-t",)))
    if project.depends_on("jest"):
        found.append(Runner("jest", project.node("jest"), "jest in package.json", ("-t",)))
    return found


def _go_tests(project: _Project) -> list[Runner]:
    return [Runner("go", ("go", "test", "-json", "./..."), "go.mod", ("-run",))] if project.has("go.mod") else []


def _cargo_tests(project: _Project) -> list[Runner]:
    return [Runner("cargo", ("cargo", "test"), "Cargo.toml", ())] if project.has("Cargo.toml") else []


def _cmake_tests(project: _Project) -> list[Runner]:
    if not project.has("CMakeLists.txt") or not project.has("build/"):
        return []
    argv = ("ctest", "--test-dir", "build", "--output-on-failure")
    return [Runner("ctest", argv, "CMakeLists.txt and build/", ("-R",))]


# ---------------------------------------------------------------------- builds


def _python_checks(project: _Project) -> list[Runner]:
    def configured(tool: str) -> str | None:
        named = project.has(f"{tool}.ini", f".{tool}.ini", f"{tool}.toml", f".{tool}.toml")
        here = _inner(project.pyproject, "tool", tool) is not None
        return named or (f"[tool.{tool}] in pyproject.toml" if here else None)

    found = []
    if (why := configured("mypy")) is not None:
        files = _inner(project.pyproject, "tool", "mypy", "files") is not None or why.endswith(".ini")
        found.append(Runner("mypy", (*project.python("mypy"), *(() if files else (".",))), why))
    if (why := configured("ruff")) is not None:
        found.append(Runner("ruff", (*project.python("ruff"), "check"), why))
    return found


def _node_builds(project: _Project) -> list[Runner]:
    script = project.script("build")
    if script is not None:
        told = f'the script "build" of package.json: {script[:100]}'
        return [Runner(f"{project.npm} run build", (project.npm, "run", "build"), told)]
    if project.has("tsconfig.json"):
        return [Runner("tsc", (*project.node("tsc"), "--noEmit"), "tsconfig.json")]
    return []


def _go_builds(project: _Project) -> list[Runner]:
    return [Runner("go", ("go", "build", "./..."), "go.mod")] if project.has("go.mod") else []


def _cargo_builds(project: _Project) -> list[Runner]:
    return [Runner("cargo", ("cargo", "build", "--all-targets"), "Cargo.toml")] if project.has("Cargo.toml") else []


def _cmake_builds(project: _Project) -> list[Runner]:
    if not project.has("CMakeLists.txt"):
        return []
    if project.has("build/"):
        return [Runner("cmake", ("cmake", "--build", "build"), "CMakeLists.txt and build/")]
    return [Runner("cmake", ("sh", "-c", "cmake -S . -B build && cmake --build build"), "CMakeLists.txt")]


# ---------------------------------------------------------------------- make

_TARGET = re.compile(r"^([A-Za-z][\w-]*)(?: [\w -]*)?:(?!=)", re.M)


def _make(project: _Project, purpose: Purpose) -> list[Runner]:
    name = project.has("GNUmakefile", "makefile", "Makefile")
    if name is None:
        return []
    targets = _TARGET.findall(project.texts.get(name, ""))
    wanted = ("test", "check") if purpose == "test" else ("build", "all")
    target = next((each for each in wanted if each in targets), None)
    if target is not None:
        return [Runner(f"make {target}", ("make", target), f"the target {target} in {name}")]
    return [Runner("make", ("make",), name)] if purpose == "build" and targets else []


_Family: TypeAlias = Callable[[_Project], list[Runner]]
FAMILIES: dict[Purpose, tuple[_Family, ...]] = {
    "test": (_python_tests, _node_tests, _go_tests, _cargo_tests, _cmake_tests),
    "build": (_python_checks, _node_builds, _go_builds, _cargo_builds, _cmake_builds),
}
