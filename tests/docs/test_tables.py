"""The tables of the pages have a row for each argument, event, outcome and command that there is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from perdure import Agent, Budget, Runtime, Workspace
from perdure.cli.app import app
from perdure.model import event, outcome

DOCS = Path(__file__).parents[2] / "docs"


def rows(page: str, heading: str = "") -> set[str]:
    """The names in code in the first cells of the tables of a page, or of one of its sections."""
    text = (DOCS / page).read_text()
    if heading:
        text = text.split(f"\n## {heading}\n")[1].partition("\n## ")[0]
    first = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in first for name in re.findall(r"`([A-Za-z_][A-Za-z_-]*)", cell)}


CONFIGURED: list[Any] = [Runtime, Agent, Workspace, Budget]


@pytest.mark.parametrize("kind", CONFIGURED)
def test_configuration_has_every_argument(kind: Any) -> None:
    parameters = inspect.signature(kind).parameters.values()
    names = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}

    assert names - rows("configuration.md", kind.__name__) == set()


def test_observing_has_every_event_of_a_turn() -> None:
    assert {each.__name__ for each in get_args(event.AnyEvent)} - rows("observing.md") == set()


def test_sessions_has_every_outcome() -> None:
    ends = {each.__name__ for each in get_args(outcome.Outcome)}

    assert (ends | {outcome.Queued.__name__}) - rows("sessions.md") == set()


def test_command_line_has_every_command() -> None:
    command = typer.main.get_command(app)

    assert set(getattr(command, "commands")) - rows("cli.md") == set()  # noqa: B009
