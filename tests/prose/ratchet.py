"""Count the sentences that a reader has to translate, and compare the counts with a table that may only fall.

    python tests/prose/ratchet.py            compare the tree with tests/prose/counts.toml (part of `make check`)
    python tests/prose/ratchet.py --write    lower the numbers of the table to the counts of the tree

The parts of the project are the packages and modules of `src` and the pages of documentation. Each has three counts:

    openings     docstrings of functions that begin with a word of `OPENINGS`
    predicates   functions annotated `-> bool` whose docstring does not say "True if". Functions without a docstring do
                 not count, because obvious private functions need none. The two words may stand anywhere in the
                 docstring, so that a verb can report success: "Take a slot. True if one was free."
    words        `WORDS`, in docstrings and comments of `src` and in pages. Code spans and the targets of links do not
                 count; in a fenced block only comments do.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

ROOT = Path(__file__).parents[2]
TABLE = "tests/prose/counts.toml"
KINDS = ("openings", "predicates", "words")

OPENINGS = re.compile(
    r"(?:What|Which|Those|That|One|Whether|Of|So|Nobody|Whoever|It|This|As|Is|Such|Both)\b(?!-)", re.IGNORECASE
)
GAP = r"(?:[ \t]+|[ \t]*\n[ \t>]*)"
"""Between two words: spaces, or a line break inside a paragraph."""
WORDS = re.compile(
    rf"\b(?:what{GAP}(?:is|was|has)|(?:one|those){GAP}that|of{GAP}ours|whatever|beside|news|nobody)\b", re.IGNORECASE
)
STRING_OR_COMMENT = re.compile(r"""("{3}|'{3}|"|')(?:\\.|.)*?\1|#[^\n]*""", re.DOTALL)
"""Finds comments as `tokenize` does, in a twentieth of its time."""
FENCE = re.compile(r"\s*(```|~~~)")
COMMENT_IN_BLOCK = re.compile(r"(?:^|\s)#\s.*")
CODE_SPAN_OR_TARGET = re.compile(r"`+(?:[^`\n]|\n(?!\s*\n))+`+|\]\([^)\s]*\)")

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Defect(NamedTuple):
    """A sentence to rewrite, and its place."""

    kind: str
    file: str
    line: int
    text: str


@dataclass(slots=True)
class Line:
    """A line of the table: the counts that a part may have, and why some of them stay."""

    counts: Counter[str] = field(default_factory=Counter)
    readable: bool = False
    why: dict[str, str] = field(default_factory=dict)


class WrongTable(Exception):
    """The table, or a line of it, cannot be read."""


# Reading the tree


def package(root: Path) -> Path:
    """Return the folder of the import package, the only package below `src`."""
    found = [path.parent for path in (root / "src").glob("*/__init__.py")]
    if len(found) != 1:
        raise SystemExit(f"expected one package below {root / 'src'}, found {len(found)}")
    return found[0]


def statements(tree: ast.AST, above: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the nodes below a node, without expressions, each with the qualified name of its class or function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue
        name = above
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{above}.{node.name}".lstrip(".")
        yield name, node
        yield from statements(node, name)


def _defects_of_docstring(name: str, node: Function, file: str) -> Iterator[Defect]:
    docstring = ast.get_docstring(node)
    if docstring is None:
        return
    line, text = node.body[0].lineno, f"{name}: " + docstring.partition("\n")[0]
    if OPENINGS.match(docstring):
        yield Defect("openings", file, line, text)
    returns_bool = isinstance(node.returns, ast.Name) and node.returns.id == "bool"
    if returns_bool and "True if" not in " ".join(docstring.split()):
        yield Defect("predicates", file, line, text)


def _defects_of_prose(lines: Sequence[str], file: str) -> Iterator[Defect]:
    prose = "\n".join(lines)
    searched = CODE_SPAN_OR_TARGET.sub(lambda match: re.sub(r"[^\n]", "`", match[0]), prose)
    for match in WORDS.finditer(searched):
        start, end = match.span()
        before, after = prose[:start].rpartition("\n")[2][-50:], prose[end:].partition("\n")[0][:50]
        text = " ".join(f"{before}{prose[start:end]}{after}".split())
        yield Defect("words", file, prose.count("\n", 0, start) + 1, text)


def defects_of_module(source: str, file: str) -> Iterator[Defect]:
    """Yield the defects of Python source. Raises SyntaxError."""
    lines = source.split("\n")
    prose = [""] * len(lines)  # everything else is blank, so that lines keep their numbers
    for match in STRING_OR_COMMENT.finditer(source):
        if match[0].startswith("#"):
            prose[source.count("\n", 0, match.start())] = match[0].lstrip("#")
    for name, node in statements(ast.parse(source, file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _defects_of_docstring(name, node, file)
        # A string that stands alone is a docstring: of a module, class or function, or of the constant above it.
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose[node.lineno - 1 : node.end_lineno] = lines[node.lineno - 1 : node.end_lineno]
    yield from _defects_of_prose(prose, file)


def defects_of_page(text: str, file: str) -> Iterator[Defect]:
    """Yield the defects of a page in Markdown."""
    prose = []
    opened = None
    for line in text.split("\n"):
        fence = FENCE.match(line)
        if fence and opened in (None, fence[1]):
            opened = None if opened else fence[1]
            prose.append("")
        elif opened:
            comment = COMMENT_IN_BLOCK.search(line)
            prose.append(comment[0] if comment else "")
        else:
            prose.append(line)
    yield from _defects_of_prose(prose, file)


def find_defects(root: Path) -> dict[str, list[Defect]]:
    """Return the defects of each part of a tree. Parts are named `sessions`, `errors.py`, `docs/tools.md`."""

    def read(file: Path, defects_of: Callable[[str, str], Iterator[Defect]]) -> Iterator[Defect]:
        return defects_of(file.read_text(encoding="utf-8"), file.relative_to(root).as_posix())

    found: dict[str, list[Defect]] = {}
    folder = package(root)
    for file in sorted(folder.rglob("*.py")):
        part = file.relative_to(folder).parts[0]
        found.setdefault(part, []).extend(read(file, defects_of_module))
    for page in sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")]):
        found[page.relative_to(root).as_posix()] = list(read(page, defects_of_page))
    return found


# The table


def parse(text: str) -> dict[str, Line]:
    """Read the table. Raises WrongTable."""
    try:
        return {part: _line(part, entry) for part, entry in tomllib.loads(text).items()}
    except tomllib.TOMLDecodeError as error:
        raise WrongTable(str(error)) from None


def _line(part: str, entry: Any) -> Line:
    if not isinstance(entry, dict) or not entry.keys() <= {*KINDS, "readable", "why"}:
        raise WrongTable(f"{part}: a line has the keys {', '.join(KINDS)}, readable and why")
    counts = Counter({kind: entry[kind] for kind in KINDS if kind in entry})
    if not all(type(count) is int and count > 0 for count in counts.values()):
        raise WrongTable(f"{part}: a count is a whole number above zero; leave out zeros")
    readable, why = entry.get("readable", False), entry.get("why", {})
    explained = isinstance(why, dict) and why.keys() <= counts.keys()
    if (
        not isinstance(readable, bool)
        or not explained
        or not all(isinstance(each, str) and each for each in why.values())
    ):
        raise WrongTable(f'{part}: write readable = true, and why = {{ words = "…" }} for a count that stays')
    return Line(counts, readable, why)


def render(head: str, table: Mapping[str, Line]) -> str:
    """Write the table as text: its head, then a line for each part, code before pages."""
    rows = []
    for part, line in sorted(table.items(), key=lambda item: (item[0].endswith(".md"), item[0])):
        cells = [f"{kind} = {line.counts[kind]}" for kind in KINDS if line.counts[kind]]
        if line.readable:
            cells.append("readable = true")
        if line.why:
            reasons = (f"{kind} = {json.dumps(line.why[kind], ensure_ascii=False)}" for kind in sorted(line.why))
            cells.append(f"why = {{ {', '.join(reasons)} }}")
        rows.append(f"{json.dumps(part):28} = {{ {', '.join(cells)} }}\n")
    return head + "".join(rows)


# The comparison


def rises(found: Mapping[str, Sequence[Defect]], table: Mapping[str, Line]) -> list[str]:
    """Return a message for each count above the table, or unexplained in a readable part, with all its defects."""
    messages = []
    for part, defects in found.items():
        line = table.get(part, Line())
        for kind in KINDS:
            here = [defect for defect in defects if defect.kind == kind]
            unexplained = line.readable and kind not in line.why
            allowed = 0 if unexplained else line.counts[kind]
            if len(here) > allowed:
                hint = ", because the part is readable and nothing explains them" if unexplained else ""
                messages.append(f"{part}: {len(here)} {kind}, {allowed} allowed{hint}:")
                messages.extend(f"    {defect.file}:{defect.line}: {defect.text}" for defect in here)
    return messages


def lowered(found: Mapping[str, Sequence[Defect]], table: Mapping[str, Line]) -> dict[str, Line]:
    """Return the table for the counts of the tree, without explanations and parts that no longer exist."""
    now = {}
    for part, defects in found.items():
        line, counts = table.get(part, Line()), Counter(defect.kind for defect in defects)
        if counts or line.readable:
            now[part] = Line(counts, line.readable, {kind: line.why[kind] for kind in line.why if counts[kind]})
    return now


def check(root: Path, write: bool) -> str:
    """Compare a tree with its table, or lower the table. Returns the problems as text, empty if there are none."""
    path = root / TABLE
    text = path.read_text(encoding="utf-8")
    try:
        table, found = parse(text), find_defects(root)
    except WrongTable as error:
        return f"{TABLE}: {error}"
    except SyntaxError as error:
        return f"{error.filename}:{error.lineno}: {error.msg}"
    if messages := rises(found, table):
        return "\n".join(["rewrite the new sentences; the table does not rise:", *messages])
    now = lowered(found, table)
    if now == table:
        return ""
    if not write:
        behind = ", ".join(part for part in table if table[part] != now.get(part))
        return f"the table has more than the tree ({behind}): run `python tests/prose/ratchet.py --write`"
    head = re.match(r"(?:#.*\n|\n)*", text)
    assert head is not None  # it may be empty
    path.write_text(render(head[0], now), encoding="utf-8")
    return ""


def main() -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Compare the prose of the project with tests/prose/counts.toml.")
    parser.add_argument("--write", action="store_true", help="lower the numbers of the table to the counts of the tree")
    problems = check(ROOT, parser.parse_args().write)
    print(f"prose: {problems or 'clean'}", file=sys.stderr if problems else sys.stdout)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
