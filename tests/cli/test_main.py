"""The command itself: help, the extra it needs, and what it leaves alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from perdure import __version__
from tests.cli.shell import shell

COMMANDS = ["demo", "run", "sessions", "show", "pending", "doctor", "fork", "delete"]
COMMANDS += [
    "approve",
    "reject",
    "settle",
    "cancel",
    "operations",
    "call",
    "send",
    "steer",
    "ps",
    "logs",
    "signal",
    "processes",
]


def test_help_lists_every_command() -> None:
    result = shell("--help")

    assert result.exit_code == 0
    assert [c for c in COMMANDS if f" {c} " not in result.stdout] == []


def test_run_documents_its_exit_codes() -> None:
    told = " ".join(shell("run", "--help").stdout.split())

    assert "0 finished, 1 failed, 2 usage error, 3 waiting" in told
    assert "4 cancelled" in told
    assert "5 budget spent, 6 incomplete" in told


def test_the_package_run_as_a_module_is_the_command(store: Path) -> None:
    program = [sys.executable, "-m", "perdure", "sessions", "--store", str(store)]

    ended = subprocess.run(program, capture_output=True, text=True, check=False)

    assert ended.returncode == 2
    assert ended.stderr.startswith(f"perdure: there is no store at {store}")


def test_importing_the_module_that_is_run_runs_nothing() -> None:
    program = "import sys, perdure.__main__; print('typer' in sys.modules)"

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert ended.stdout == "False\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_in_one_line_what_to_install(missing: str) -> None:
    program = f"import sys; sys.modules['{missing}'] = None; from perdure.cli import main; main()"

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert ended.returncode == 2
    install = "run `pip install -e '.[cli]'` in Perdure's folder"
    assert ended.stderr == f"perdure: the command line needs {missing}: {install}\n"


@pytest.mark.parametrize(
    "args",
    [
        ["sessions"],
        ["show", "chat"],
        ["pending"],
        ["doctor"],
        ["doctor", "--deep"],
        ["fork", "chat"],
        ["approve", "chat.1.1.0"],
        ["reject", "chat.1.1.0"],
        ["settle", "chat.1.1.0", "done"],
        ["cancel", "chat"],
        ["delete", "chat", "--yes"],
        ["call", "sample_agents:noting", "notes.find", "--session", "chat"],
    ],
    ids=" ".join,
)
def test_no_command_makes_a_store_by_looking_for_one(args: list[str], store: Path) -> None:
    result = shell(*args, store=store)

    assert result.exit_code == 2
    assert result.stderr.startswith(f"perdure: there is no store at {store}")
    assert list(store.parent.iterdir()) == []


def test_the_option_goes_before_the_variable(store: Path, tmp_path: Path) -> None:
    result = shell("sessions", "--store", tmp_path / "other.db", store=store)

    assert "other.db" in result.stderr


@pytest.mark.parametrize(
    ("where", "words"),
    [("memory", "ends with its process"), ("postgresql://db", "not part of this version"), ("ftp://x", "not a store")],
)
def test_what_cannot_be_a_store_to_look_at_is_refused(where: str, words: str) -> None:
    result = shell("sessions", "--store", where)

    assert result.exit_code == 2
    assert words in result.stderr


def test_errors_are_json_for_machines(store: Path) -> None:
    result = shell("sessions", "--json", store=store)

    assert result.exit_code == 2
    assert '"code": "usage"' in result.stdout


def test_it_tells_its_version() -> None:
    assert shell("--version") == (0, f"perdure {__version__}\n", "")
