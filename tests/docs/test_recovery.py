"""Every tool that the documentation shows answers the question: may this be done twice?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_examples import PAGES, blocks_of, name_of

TOOL = re.compile(r"^( *)@tool(\([^\n]*\))?[^\n]*\n(?:\1@[^\n]*\n)*\1(?:async )?def (\w+)", re.MULTILINE)

EFFECTS = {
    "build", "charge", "delete_all", "draw", "first", "order", "order_build", "pay", "research", "second", "send_mail",
    "shell", "sign", "test_all", "undo", "work",
}  # fmt: skip
"""Tools of examples that do something outside, and rely on the default or say `recovery="ask"`."""


def undeclared(text: str) -> set[str]:
    return {found[3] for found in TOOL.finditer(text) if "recovery=" not in (found[2] or "")}


def test_a_tool_without_a_recovery_is_found() -> None:
    unsaid = "@tool\ndef one(): ...\n\n@tool(limit=2)  # two\nasync def two(): ...\n"
    text = f'{unsaid}\n@tool(recovery="rerun")\ndef three(): ...\n'

    assert undeclared(text) == {"one", "two"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_tool_that_only_reads_declares_that_it_may_run_again(page: Path) -> None:
    shown = {name for block in blocks_of(page) if block.language == "python" for name in undeclared(block.text)}

    assert shown - EFFECTS == set(), 'it only reads: mark it with recovery="rerun", or add it to EFFECTS'
