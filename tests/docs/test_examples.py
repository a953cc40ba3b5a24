"""The documentation runs: examples, links, command lines, decision records and the glossary.

A page's Python blocks are one program: they run in order, in one namespace, in an empty folder. A block that cannot run
says why in a comment on the line before it: `<!-- not run: it needs a key -->`.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

import perdure
from perdure.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
DECISIONS = sorted((ROOT / "docs" / "adr").glob("*.md"))
NOT_RUN = re.compile(r"<!-- not run: .{10,} -->")
LINK = re.compile(r"\]\(([^)\s]+)\)|<img [^>]*src=\"([^\"]+)\"")


class Block(NamedTuple):
    """A fenced block: its language, the line of its first line of content (from 1), its text, the line above it."""

    language: str
    line: int
    text: str
    above: str


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    opened: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number
            continue
        above = lines[opened - 1] if opened else ""
        yield Block(lines[opened][3:].strip(), opened + 2, "\n".join(lines[opened + 1 : number]) + "\n", above)
        opened = None
    assert opened is None, f"{page.name}: the block that begins in line {opened} never ends"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Examples


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_python_block_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # the `perdure` of this Python
    before = set(sys.modules)
    module = types.ModuleType(f"example_of_{page.stem.lower()}")
    sys.modules[module.__name__] = module  # dataclasses and annotations look their names up there
    try:
        for block in blocks_of(page):
            if block.language == "python" and not NOT_RUN.fullmatch(block.above):
                # As many empty lines before it as in the page: a traceback names the page's own line.
                exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), module.__dict__)
    finally:
        for name in set(sys.modules) - before:
            if getattr(sys.modules[name], "__file__", None) is None or str(tmp_path) in str(sys.modules[name].__file__):
                del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_page_shows_something_that_runs(page: Path) -> None:
    assert any(block.language == "python" for block in blocks_of(page))


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=name_of)
def test_every_page_says_what_happens_when_the_process_dies(page: Path) -> None:
    assert "> **If the process dies here**" in page.read_text()


# Links


@pytest.mark.parametrize("text", TEXTS, ids=name_of)
def test_every_relative_link_leads_somewhere(text: Path) -> None:
    targets = [one or other for one, other in LINK.findall(text.read_text())]
    broken = [target for target in targets if not _leads_somewhere(text, target)]

    assert broken == []


def _leads_somewhere(text: Path, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return True
    path, _, anchor = target.partition("#")
    found = (text.parent / path).resolve() if path else text
    return found.exists() and (not anchor or anchor in _anchors(found))


def _anchors(page: Path) -> set[str]:
    """Headings as a forge names them: lower case, spaces to dashes, other signs dropped."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# Command lines


def command_lines(program: str) -> list[tuple[str, tuple[str, ...]]]:
    """Where a command of this program is shown, and its words."""
    found = []
    for text in TEXTS:
        for block in blocks_of(text):
            if block.language not in ("console", "sh"):
                continue
            for line in block.text.splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words[:1] == [program]:
                    found.append((f"{name_of(text)}: {line}", tuple(words[1:])))
    return list(dict.fromkeys(found))


GROUPS = ("processes",)
"""Commands that have commands."""


@functools.cache
def help_of(*command: str) -> str:
    shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert shown.exit_code == 0, shown.output
    return shown.output


@pytest.mark.parametrize(("where", "words"), command_lines("perdure"))
def test_every_command_line_shown_exists(where: str, words: tuple[str, ...]) -> None:
    command = words[:2] if words[0] in GROUPS else words[:1]
    options = [word.partition("=")[0] for word in words[1:] if word.startswith("--")]

    shown = help_of(*command)

    assert [option for option in options if option not in shown] == []


@pytest.mark.parametrize(("where", "words"), command_lines("make"))
def test_every_make_target_shown_exists(where: str, words: tuple[str, ...]) -> None:
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)

    assert set(words) <= set(targets)


# Decision records


def test_numbers_of_decision_records_are_unique_and_have_no_holes() -> None:
    numbers = [int(path.name[:4]) for path in DECISIONS]

    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("path", DECISIONS, ids=name_of)
def test_a_decision_record_states_its_decision_and_has_its_four_parts(path: Path) -> None:
    text = path.read_text()

    assert re.fullmatch(r"\d{4}(-[a-z0-9]+)+\.md", path.name)
    assert re.match(rf"# {path.name[:4]}\. \S", text)
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences", "Rejected"]


# Glossary and terms


GLOSSARY = ROOT / "CONTEXT.md"
DEFINING = [GLOSSARY, ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]


def term_rows(page: Path) -> list[str]:
    """Return the first cells of the tables that define terms: all tables of CONTEXT.md, the section Terms elsewhere."""
    text = page.read_text()
    if page != GLOSSARY:
        section = re.search(r"^## Terms$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        text = section[1] if section else ""
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    return [cell for cell in rows if cell != "Term" and set(cell) != {"-"}]


def terms_of(page: Path) -> list[str]:
    """Return the terms that a page defines, in lower case. A row may define several: `| **Plugin, hook** | … |`."""
    return [term.lower() for cell in term_rows(page) for term in cell.strip("*").split(", ")]


@pytest.mark.parametrize("name", perdure.__all__)
def test_the_documentation_knows_every_public_name(name: str) -> None:
    assert [page.name for page in DEFINING if page.name != "ARCHITECTURE.md" and f"`{name}`" in page.read_text()] != []


def test_the_glossary_has_each_word_once() -> None:
    words = terms_of(GLOSSARY)

    assert len(words) > 30
    assert len(words) == len(set(words))


@pytest.mark.parametrize("page", [page for page in DEFINING if term_rows(page)], ids=name_of)
def test_every_row_of_a_table_of_terms_defines_a_term(page: Path) -> None:
    rows = term_rows(page)

    assert [cell for cell in rows if not re.fullmatch(r"\*\*[^*]+\*\*", cell)] == []


def test_no_term_is_defined_twice() -> None:
    places: dict[str, list[str]] = {}
    for page in DEFINING:
        for term in terms_of(page):
            places.setdefault(term, []).append(name_of(page))

    assert {term: pages for term, pages in places.items() if len(pages) > 1} == {}
