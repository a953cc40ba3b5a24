"""A draw shows functions as a reader without the code sees them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.prose import draw as script
from tests.prose.draw import DRAWN, Described, UnknownPackage, described, draw

INBOX = '''
"""Inputs."""


class Inbox:
    """Inputs of a session."""

    @property
    def empty(self) -> bool:
        """True if no input waits."""
        return not self._inputs  # secret

    async def take(self, /, *keys: str, most: int = 3) -> list[str]:
        """Remove inputs.

        The oldest come first.
        """

        def newest(key: str) -> int:
            """Return its number."""
            return secret(key)

    def undescribed(self) -> None:
        pass
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A package with the parts `sessions`, `turn` and `errors.py`."""
    package = tmp_path / "a folder" / "src" / "demo"
    many = "\n".join(f'def f{number}() -> None:\n    """Do {number}."""\n' for number in range(100))
    for name, source in {"__init__": "", "errors": many, "sessions/inbox": INBOX, "turn/deep/machine": many}.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    (package / "turn" / "__init__.py").write_text("")
    return package


def test_functions_have_their_signature_and_docstring_and_no_body(folder: Path) -> None:
    assert described(folder, "sessions") == [
        Described("sessions.inbox.Inbox.empty", "@property\ndef empty(self) -> bool:", "True if no input waits."),
        Described(
            "sessions.inbox.Inbox.take",
            "async def take(self, /, *keys: str, most: int=3) -> list[str]:",
            "Remove inputs.\n\nThe oldest come first.",
        ),
        Described("sessions.inbox.Inbox.take.newest", "def newest(key: str) -> int:", "Return its number."),
    ]


def test_a_draw_has_thirty_different_functions_of_the_parts(folder: Path) -> None:
    drawn = draw(24, folder, ["errors.py", "turn/deep"])

    assert len(set(drawn)) == DRAWN == 30
    assert {each.name.rpartition(".")[0] for each in drawn} == {"errors", "turn.deep.machine"}


def test_the_same_seed_draws_the_same_and_another_seed_others(folder: Path) -> None:
    first = draw(24, folder, ["errors.py", "turn"])

    assert draw(24, folder, ["turn", "errors.py", "turn"]) == first
    assert draw(25, folder, ["errors.py", "turn"]) != first


def test_a_draw_from_few_functions_has_all_of_them(folder: Path) -> None:
    assert sorted(draw(24, folder, ["sessions"])) == sorted(described(folder, "sessions"))


@pytest.mark.parametrize("part", ["session", "sessions/inbox", "__pycache__"])
def test_an_unknown_package_is_refused_with_the_known_ones(folder: Path, part: str) -> None:
    (folder / "__pycache__").mkdir()

    with pytest.raises(UnknownPackage, match=r"errors\.py, sessions, turn, and paths below them") as refused:
        draw(24, folder, [part])

    assert str(refused.value).startswith(f"no package or module {part}: ")


def test_the_command_prints_signatures_and_docstrings(folder: Path, tmp_path: Path) -> None:
    here = Path(script.__file__).parent
    there = folder.parents[1] / "tests" / "prose"
    shutil.copytree(here, there, ignore=shutil.ignore_patterns("__pycache__"))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(there / "draw.py"), *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = run("24", "sessions")
    assert done.returncode == 0
    assert (
        "    async def take(self, /, *keys: str, most: int=3) -> list[str]:\n        Remove inputs.\n\n" in done.stdout
    )
    assert "secret" not in done.stdout
    assert "no package or module nowhere" in run("24", "nowhere").stderr
