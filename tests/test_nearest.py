"""The test files that `make quick PKG=…` runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.nearest import FileOfTests, asked, distances, importers_of_modules, nearest, packages, read

ROOT = Path(__file__).parent.parent
IMPORTERS = {
    "perdure.turn.machine": {"perdure.sessions.turns"},
    "perdure.sessions.turns": {"perdure.runtime"},
    "perdure.runtime": {"perdure.cli.main"},
    "perdure.cli.main": set[str](),
    "perdure.turning": set[str](),
}


def file(path: str, *imports: str, functions: int = 10) -> FileOfTests:
    return FileOfTests(path, frozenset(imports), functions)


def near(*files: FileOfTests, wanted: str = "turn", most: int = 800) -> list[str]:
    return nearest(files, [wanted], distances([wanted], IMPORTERS), most)


def test_the_distance_of_a_module_is_the_shortest_chain_of_imports() -> None:
    assert distances(["turn"], IMPORTERS) == {
        "perdure.turn.machine": 0,
        "perdure.sessions.turns": 1,
        "perdure.runtime": 2,
        "perdure.cli.main": 3,
    }


def test_files_of_its_folder_come_first_then_those_that_import_it_then_those_farther_away() -> None:
    far = file("tests/runtime/test_far.py", "perdure.runtime")
    direct = file("tests/engine/test_direct.py", "perdure.turn.machine")
    own = file("tests/turn/test_own.py", "perdure.runtime")

    assert near(far, direct, own) == [own.path, direct.path, far.path]


def test_at_the_same_distance_a_file_that_imports_little_else_comes_first() -> None:
    much = file("tests/a/test_much.py", "perdure.turn.machine", "perdure.runtime", "perdure.cli.main")
    little = file("tests/b/test_little.py", "perdure.turn.machine")

    assert near(much, little) == [little.path, much.path]


def test_files_that_reach_no_module_of_it_are_left_and_those_that_take_too_long() -> None:
    none = file("tests/a/test_none.py", "perdure.turning")
    folder = file("tests/docs/test_pages.py", "perdure.turn.machine")

    assert near(none, folder) == []
    assert near(file("tests/cli/test_own.py"), wanted="cli") == ["tests/cli/test_own.py"]


def test_no_more_functions_are_run_than_a_minute_allows_but_its_folder_whole() -> None:
    own = file("tests/turn/test_own.py", functions=30)
    beside = file("tests/turn_more/test_beside.py", functions=30)
    direct = file("tests/engine/test_direct.py", "perdure.turn.machine")

    assert near(own, beside, direct, most=65) == [own.path, beside.path]
    assert near(own, beside, direct, most=70) == [own.path, beside.path, direct.path]


@pytest.mark.parametrize("words", ["sessions,turn", "perdure.sessions, turn/", "sessions turn"])
def test_packages_are_named_with_commas(words: str) -> None:
    assert asked(words, packages()) == ["sessions", "turn"]


@pytest.mark.parametrize(("words", "wrong"), [("session", "no package 'session'"), (" , ", "PKG names no package")])
def test_a_package_that_is_not_there_is_refused_with_those_that_are(words: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong) as refused:
        asked(words, packages())

    assert "sessions stores" in str(refused.value)


def test_the_files_of_the_tree_are_read_with_their_helpers_and_the_homes_of_public_names() -> None:
    files = {each.path: each for each in read()}

    assert "perdure.agent" in files["tests/sessions/test_chat.py"].imports
    # Only a helper in its folder imports this module.
    assert "perdure.engine.journal" in files["tests/crash/test_matrix.py"].imports
    assert files["tests/crash/test_matrix.py"].functions > 5


def test_the_graph_has_the_imports_of_the_package() -> None:
    found = importers_of_modules()

    assert "perdure.sessions.turns" in found["perdure.turn.machine"]


@pytest.mark.slow
def test_a_wrong_package_ends_the_command_with_one_line() -> None:
    ran = subprocess.run(
        [sys.executable, "tests/nearest.py", "turns"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("There is no package 'turns'. Give one or more of these")
    assert len(ran.stderr.splitlines()) == 1
