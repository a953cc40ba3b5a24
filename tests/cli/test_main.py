"""The command itself: help, the extra it needs, and what it leaves alone."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure import __version__
from perdure.cli import help
from perdure.cli.app import app
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


def test_help_of_the_command_lists_what_the_commands_say_of_themselves() -> None:
    told = dict[str, dict[str, str]]()
    for each in app.registered_commands:
        assert inspect.isfunction(each.callback)
        assert each.callback.__doc__ is not None
        name = each.name or each.callback.__name__.replace("_", "-")
        first = " ".join(each.callback.__doc__.split("\n\n")[0].split())
        told.setdefault(str(each.rich_help_panel), {})[name] = first
    for group in app.registered_groups:
        assert group.typer_instance is not None
        told[str(group.rich_help_panel)][str(group.name)] = str(group.typer_instance.info.help)

    assert told == help.COMMANDS
    assert all(name in shell("--help", COLUMNS=200).stdout for name in ("--version", "--install-completion"))


PERDURE = str(Path(sys.executable).with_name("perdure"))


@pytest.mark.parametrize(("given", "code"), [(["--help"], 0), (["-h"], 0), ([], 2)])
def test_help_imports_no_command(given: list[str], code: int) -> None:
    program = "import sys; from perdure.cli import main; sys.argv[1:] = sys.argv[1:]; main()"
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program, *given], capture_output=True, text=True, check=False
    )
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}

    assert ended.returncode == code
    assert " delete-store " in ended.stdout
    assert imported & {"typer", "rich", "sqlite3", "perdure.cli.app", "perdure.cli.host", "perdure.examples"} == set()


@pytest.mark.parametrize("typed", ["perdure del", "perdure processes re"])
def test_shell_completes_commands(typed: str) -> None:
    words = typed.split()
    env = {**os.environ, "_PERDURE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    ended = subprocess.run([PERDURE], env=env, capture_output=True, text=True, check=False)

    assert ended.stdout.split() == (["delete", "delete-store"] if len(words) == 2 else ["result", "resume", "redrive"])


def test_completion_is_shown_for_a_shell(store: Path) -> None:
    ended = subprocess.run(
        ["bash", "-c", '"$0" --show-completion; true', PERDURE], capture_output=True, text=True, check=False
    )

    assert "_PERDURE_COMPLETE=complete_bash" in ended.stdout
