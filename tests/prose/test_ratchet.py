"""The ratchet counts defects of prose for each part of the project, and its table only falls."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from tests.prose import ratchet
from tests.prose.ratchet import (
    STRING_OR_COMMENT,
    TABLE,
    check,
    defects_of_module,
    defects_of_page,
    find_defects,
    package,
)

HEAD = "# Counts.\n\n"

OPENINGS = ["What", "Which", "Those", "That", "One", "Whether", "Of", "So", "Whoever", "It", "This", "As", "Is", "Such"]
COUNTED = [
    "what is",
    "What was",
    "what has",
    "one that",
    "those that",
    "of ours",
    "whatever",
    "beside",
    "news",
    "Nobody",
]
NOT_COUNTED = [
    "what are",
    "somewhat is",
    "what isolates",
    "what, is",
    "one. That",
    "those thatched",
    "of course",
    "besides",
    "newsletter",
    "WakeNews",
    "read_news",
    "`news`",
    "``what is``",
    "what `it` is",
]


def in_module(source: str) -> list[tuple[str, int]]:
    return [(defect.kind, defect.line) for defect in defects_of_module(source, "m.py")]


def in_page(text: str) -> list[int]:
    return [defect.line for defect in defects_of_page(text, "page.md")]


def tree(root: Path, table: str, page: str = "", **modules: str) -> Path:
    """Make a tree with a package of modules, a page and a table."""
    files = {f"src/demo/{name}.py": source for name, source in modules.items()}
    for name, text in {"src/demo/__init__.py": "", "docs/page.md": page, TABLE: HEAD + table, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# Docstrings of functions


@pytest.mark.parametrize("word", [*OPENINGS, "Both", "what"])
def test_an_opening_of_a_function_counts(word: str) -> None:
    assert in_module(f'def f():\n    """{word} follows."""\n') == [("openings", 2)]


@pytest.mark.parametrize(
    "docstring",
    [
        "Return the row.",
        "Ones and zeros.",
        "One-shot wait.",
        "Iterate over rows.",
        "Issue an id.",
        "Return it. That ends the wait.",
        "",
    ],
)
def test_another_opening_does_not_count(docstring: str) -> None:
    assert in_module(f'def f():\n    """{docstring}"""\n') == []


def test_openings_count_in_coroutines_and_nested_functions_and_not_in_classes() -> None:
    source = '''
class Row:
    """That of a table."""

    async def load(self):
        """What there can be."""
        if self:
            def inner():
                """Of a row."""
'''

    assert in_module(source) == [("openings", 6), ("openings", 9)]


# Predicates


@pytest.mark.parametrize("docstring", ["Return a flag.", "True in one worker only.", "true if open."])
def test_a_predicate_without_true_if_counts(docstring: str) -> None:
    assert in_module(f'def f() -> bool:\n    """{docstring}"""\n') == [("predicates", 2)]


@pytest.mark.parametrize(
    "source",
    [
        'def f() -> bool:\n    """True if the row is open."""\n',
        'def f() -> bool:\n    """True\n    if the row is open."""\n',
        'async def f() -> bool:\n    """Take a slot. True if one was free."""\n',
        "def f() -> bool:\n    return False\n",
        'def f() -> bool | None:\n    """Return a flag."""\n',
        'def f():\n    """Return a flag."""\n',
    ],
    ids=["predicate", "two lines", "verb", "no docstring", "optional", "no annotation"],
)
def test_other_functions_do_not_count_as_predicates(source: str) -> None:
    assert in_module(source) == []


def test_a_docstring_can_have_defects_of_every_kind() -> None:
    source = 'def f() -> bool:\n    """Whether nobody waits."""\n'

    assert in_module(source) == [("openings", 2), ("predicates", 2), ("words", 2)]


# Words


@pytest.mark.parametrize("words", COUNTED)
def test_counted_words_are_found_in_docstrings_comments_and_pages(words: str) -> None:
    assert in_module(f'"""Rows.\n\nRead {words} here."""\n') == [("words", 3)]
    assert in_module(f"x = 1  # read {words} here\n") == [("words", 1)]
    assert in_page(f"# Rows\n\nRead {words} here.\n") == [3]


@pytest.mark.parametrize("words", NOT_COUNTED)
def test_other_words_and_code_spans_are_not_found(words: str) -> None:
    assert in_module(f'"""Rows.\n\nRead {words} here."""\n') == []
    assert in_module(f"x = 1  # read {words} here\n") == []
    assert in_page(f"# Rows\n\nRead {words} here.\n") == []


def test_words_are_found_across_the_lines_of_a_paragraph() -> None:
    assert in_module("x = 1\n# read what\n# is there\n") == [("words", 2)]
    assert in_module('"""Read what\n    was there."""\n') == [("words", 1)]
    assert in_page("- Read those\n  that wait.\n\n> One\n> that waits.\n") == [1, 4]


def test_words_of_two_paragraphs_are_not_joined() -> None:
    assert in_module("x = 1  # read what\n\n# is there\n") == []
    assert in_page("Read what\n\nis there.\n") == []


def test_a_code_span_that_is_not_closed_ends_with_its_paragraph() -> None:
    assert in_page("Type ` here.\n\nRead the news.\n\nType ` there.\n") == [3]


def test_words_in_code_of_a_module_do_not_count() -> None:
    assert in_module('def news(beside: str) -> str:\n    return "what is # whatever" + beside\n') == []


def test_docstrings_of_constants_and_classes_have_counted_words_too() -> None:
    source = '''LIMIT = 3
"""Rows; whatever their size."""

class Row:
    """A row
    beside others."""
'''

    assert in_module(source) == [("words", 2), ("words", 6)]


def test_comments_are_found_as_tokenize_finds_them() -> None:
    source = r"""
a = "# no"  # yes
b = '\'# no'  # yes
c = r'\'  # no'
d = f"{a!r:#>4} # no"  # yes
e = '''
# no ' " \''' # no'''  # yes
# yes "open
f = ("x"  # yes 'quote'
     "# no")
"""
    expected = [t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]

    found = [match[0] for match in STRING_OR_COMMENT.finditer(source) if match[0].startswith("#")]

    assert found == expected
    assert found == ["# yes", "# yes", "# yes", "# yes", '# yes "open', "# yes 'quote'"]


def test_only_comments_count_in_blocks_of_a_page() -> None:
    page = """\
```python
news = whatever()  # what is read
~~~
beside = "#nobody"
```
Read the news in [a page](docs/nobody.md#beside).
~~~
news
~~~
"""

    assert in_page(page) == [2, 6]


# The table


def test_defects_belong_to_a_package_a_module_or_a_page(tmp_path: Path) -> None:
    root = tree(tmp_path, "", page="News.", errors="# news")
    (root / "src" / "demo" / "turn" / "deep").mkdir(parents=True)
    (root / "src" / "demo" / "turn" / "deep" / "read.py").write_text("# news\n# news")
    (root / "README.md").write_text("Rows.")
    (root / "src" / "old" / "__pycache__").mkdir(parents=True)

    found = find_defects(root)

    assert {part: len(defects) for part, defects in found.items()} == {
        "__init__.py": 0,
        "errors.py": 1,
        "turn": 2,
        "README.md": 0,
        "docs/page.md": 1,
    }


def test_a_tree_like_its_table_is_clean(tmp_path: Path) -> None:
    source = 'def f() -> bool:\n    """What is of ours."""\n'
    table = '"errors.py" = { openings = 1, predicates = 1, words = 2 }\n"docs/page.md" = { words = 1 }\n'

    assert check(tree(tmp_path, table, page="News.", errors=source), write=False) == ""


def test_a_rise_names_each_place(tmp_path: Path) -> None:
    root = tree(tmp_path, '"errors.py" = { words = 1 }\n', errors="# news\nx = 1  # whatever\n")

    assert check(root, write=False) == (
        "rewrite the new sentences; the table does not rise:\n"
        "errors.py: 2 words, 1 allowed:\n"
        "    src/demo/errors.py:1: news\n"
        "    src/demo/errors.py:2: whatever"
    )


def test_a_rise_of_docstrings_names_the_function(tmp_path: Path) -> None:
    problem = check(
        tree(tmp_path, "", errors='class A:\n    def f(self):\n        """So it goes.\n\n        On."""'), write=False
    )

    assert problem.endswith("errors.py: 1 openings, 0 allowed:\n    src/demo/errors.py:3: A.f: So it goes.")


def test_a_new_page_starts_at_zero(tmp_path: Path) -> None:
    problem = check(tree(tmp_path, "", page="# News"), write=False)

    assert problem.endswith("docs/page.md: 1 words, 0 allowed:\n    docs/page.md:1: # News")


def test_the_write_changes_no_number_if_one_would_rise(tmp_path: Path) -> None:
    table = '"docs/page.md" = { words = 2 }\n"errors.py" = { words = 1 }\n'
    root = tree(tmp_path, table, page="Rows.", errors="# news, news")

    problem = check(root, write=True)

    assert "errors.py: 2 words, 1 allowed" in problem
    assert (root / TABLE).read_text() == HEAD + table


def test_a_fall_asks_for_the_write_which_lowers_the_table(tmp_path: Path) -> None:
    table = 'gone = { openings = 3 }\n"errors.py" = { words = 3 }\n"docs/page.md" = { words = 1 }\n'
    root = tree(tmp_path, table, page="Rows.", errors="# news")

    problem = check(root, write=False)

    assert problem == (
        "the table has more than the tree (gone, errors.py, docs/page.md): run `python tests/prose/ratchet.py --write`"
    )
    assert (root / TABLE).read_text() == HEAD + table

    assert check(root, write=True) == ""
    assert (root / TABLE).read_text() == HEAD + '"errors.py"                  = { words = 1 }\n'
    assert check(root, write=False) == ""


# Readable parts


def test_a_readable_part_explains_each_count(tmp_path: Path) -> None:
    bare = '"errors.py" = { words = 1, readable = true }\n'
    explained = '"errors.py" = { words = 1, readable = true, why = { words = "quotes a program" } }\n'

    problem = check(tree(tmp_path, bare, errors="# news"), write=False)

    assert problem.endswith(
        "errors.py: 1 words, 0 allowed, because the part is readable and nothing explains them:\n"
        "    src/demo/errors.py:1: news"
    )
    assert check(tree(tmp_path, explained, errors="# news"), write=False) == ""
    assert "2 words, 1 allowed:" in check(tree(tmp_path, explained, errors="# news, news"), write=False)


def test_the_write_keeps_readable_lines_and_drops_stale_explanations(tmp_path: Path) -> None:
    table = (
        '"errors.py" = { openings = 1, words = 2, readable = true, why = { openings = "a pun", words = "\\"a\\"" } }\n'
        '"wire.py" = { words = 1, readable = true, why = { words = "quotes a program" } }\n'
    )
    root = tree(tmp_path, table, errors="# news", wire="")

    assert check(root, write=True) == ""
    assert (root / TABLE).read_text() == (
        HEAD
        + '"errors.py"                  = { words = 1, readable = true, why = { words = "\\"a\\"" } }\n'
        + '"wire.py"                    = { readable = true }\n'
    )
    assert check(root, write=False) == ""


# Mistakes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a = 1", "a: a line has the keys"),
        ("a = { word = 1 }", "a: a line has the keys"),
        ("a = { words = 0 }", "a: a count is a whole number"),
        ("a = { words = true }", "a: a count is a whole number"),
        ("a = { words = 1, readable = 1 }", "a: write readable = true"),
        ('a = { words = 1, why = { words = "" } }', "a: write readable = true"),
        ('a = { words = 1, why = { openings = "x" } }', "a: write readable = true"),
        ("a = {", "at line 3"),
    ],
    ids=range(8),
)
def test_a_wrong_line_of_the_table_is_named(tmp_path: Path, line: str, message: str) -> None:
    problem = check(tree(tmp_path, f"{line}\n"), write=True)

    assert problem.startswith(f"{TABLE}: ")
    assert message in problem


def test_a_syntax_error_has_its_place(tmp_path: Path) -> None:
    assert check(tree(tmp_path, "", errors="x = 1\ndef"), write=False).startswith("src/demo/errors.py:2: ")


def test_two_packages_are_refused(tmp_path: Path) -> None:
    root = tree(tmp_path, "")
    (root / "src" / "other").mkdir()
    (root / "src" / "other" / "__init__.py").write_text("")

    with pytest.raises(SystemExit, match="expected one package"):
        package(root)


def test_the_command_needs_no_git_and_runs_from_any_folder(tmp_path: Path) -> None:
    root = tree(tmp_path / "a folder", '"errors.py" = { words = 2 }\n', errors="# news")
    script = shutil.copy(ratchet.__file__, root / "tests" / "prose")

    def run(*options: str) -> tuple[int, str, str]:
        command = [sys.executable, script, *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    assert run() == (
        1,
        "",
        "prose: the table has more than the tree (errors.py): run `python tests/prose/ratchet.py --write`\n",
    )
    assert run("--write") == (0, "prose: clean\n", "")
    assert run() == (0, "prose: clean\n", "")
