"""A search finds the same with ripgrep and without; `PERDURE_REQUIRE=rg` makes its absence a failure."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perdure import Runtime, Workspace
from perdure.model.command import CommandSettings
from perdure.workspace.policy import Policy, Rule
from perdure.workspace.ripgrep import is_recent, widened
from tests.programs import ripgrep
from tests.workspace.asking import Conversation, ask, refused


@pytest.fixture
def rg(monkeypatch: pytest.MonkeyPatch) -> str:
    found = ripgrep()
    monkeypatch.setenv("PATH", f"{found.parent}:{os.environ['PATH']}")
    return str(found)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Files of every kind that matters to a search."""
    found = tmp_path / "work"
    for name in ("src/deep", "build", ".hidden", ".git", "kept", "src/own"):
        (found / name).mkdir(parents=True)
    texts: dict[str, bytes] = {
        "a.py": b"import os\nname = 'caf\xc3\xa9'\nNAME\n",
        "b.txt": b"name\r\nlast name",
        "src/c.py": b"def name():\n    return 1\n",
        "src/deep/d.py": b"x = name[0]\nna\xffme\n\xfename\n",
        "src/d.ts": b"let name = 1\n",
        "build/e.py": b"name ignored\n",
        "kept/f.log": b"name ignored\n",
        "kept/g.log": b"name kept\n",
        "src/own/h.py": b"name of its own\n",
        ".hidden/i.py": b"name hidden\n",
        ".git/j": b"name of git\n",
        "binary": b"name\0\n",
        "late binary": b"name\n" * 3000 + b"\0\nname\n",
        "utf-16": "name\n".encode("utf-16"),
        ".gitignore": b"build/\n*.log\n!g.log\n",
        "src/own/.gitignore": b"!h.py\n",
        ".rgignore": b"*.py\n",
        ".ignore": b"*.txt\n",
        "empty": b"",
        "two\nlines.py": b"name\n",
    }
    for name, data in texts.items():
        (found / name).write_bytes(data)
    (found / "link.py").symlink_to("a.py")
    os.link(found / "a.py", found / "linked twice.py")
    (tmp_path / "rgrc").write_text("--invert-match\n")
    return found


@pytest.fixture
async def model(work: Path) -> AsyncIterator[Conversation]:
    found = Conversation(Workspace([work], unsandboxed=True).tools(commands=True))
    async with Runtime("memory", agents=[found.agent]) as found.runtime:
        found.session = await found.runtime.session("s")
        yield found


def plain(answer: Any) -> Any:
    return {name: value for name, value in answer.items() if name in ("matches", "truncated")}


@pytest.mark.usefixtures("rg")
@pytest.mark.parametrize(
    "args",
    [
        {"pattern": "name"},
        {"pattern": "^name$"},
        {"pattern": "NAME", "ignore_case": True},
        {"pattern": "caf."},
        {"pattern": "na.me"},
        {"pattern": "[^a-z]name"},
        {"pattern": r"\bname\b(?!\()"},
        {"pattern": r"(n)ame.*\1"},
        {"pattern": "name[", "fixed": True},
        {"pattern": "name", "glob": "*.py"},
        {"pattern": "name", "glob": "src/**/*.{py,ts}"},
        {"pattern": "name", "path": "src"},
        {"pattern": "name", "path": "src/c.py"},
        {"pattern": "name", "include_hidden": True},
        {"pattern": "name", "max_matches": 3},
        {"pattern": "name", "context_before": 1, "context_after": 1},
        {"pattern": "nothing of the kind"},
        {"pattern": ""},
        {"pattern": "("},
        {"pattern": "name", "path": "missing"},
    ],
)
async def test_ripgrep_finds_what_our_own_search_finds(model: Conversation, work: Path, args: dict[str, Any]) -> None:
    with_it = await model.call("search", **args)
    commands = await model.runtime.processes.list(kind="command")
    mistake = await refused(Workspace([work]).tools(), "search", **args)
    if mistake:
        assert with_it == mistake
    else:
        assert plain(with_it) == plain(await ask(Workspace([work]).tools(), "search", **args))
        assert ("files_searched" in with_it) == (args.get("path") == "src/c.py")
    assert bool(commands) == (args["pattern"] not in ("", "(") and args.get("path") not in ("src/c.py", "missing"))


async def test_a_configuration_of_ripgrep_is_not_read(
    rg: str, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIPGREP_CONFIG_PATH", str(tmp_path / "rgrc"))
    inverted = subprocess.run([rg, "-l", "xyzzy", "src"], cwd=work, capture_output=True, check=False).stdout
    found = Conversation(Workspace([work], unsandboxed=True).tools(commands=True))
    settings = CommandSettings(inherit=("RIPGREP_CONFIG_PATH",))
    async with Runtime("memory", agents=[found.agent], commands=settings) as runtime:
        found.session = await runtime.session("s")
        answer = await found.call("search", pattern="xyzzy")

    assert inverted, "ripgrep itself obeys it, or this test proves nothing"
    assert answer["matches"] == []


async def test_without_ripgrep_or_where_it_may_not_run_we_search_ourselves(work: Path) -> None:
    policy = Policy((Rule("deny", "rg"),))
    found = Conversation(Workspace([work], unsandboxed=True, policy=policy).tools(commands=True))
    async with Runtime("memory", agents=[found.agent]) as runtime:
        found.session = await runtime.session("s")
        answer = await found.call("search", pattern="name", path="src")

    assert answer["files_searched"] == 4
    assert len(answer["matches"]) == 5


@pytest.mark.parametrize("said", ["ripgrep 13.0.0", "ripgrep", "", "grep 99.0"])
async def test_old_ripgrep_is_asked_its_version_once_and_not_used(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    program = tmp_path / "bin" / "rg"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho \"$1\" >> {tmp_path}/asked\necho '{said}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    found = Conversation(Workspace([work], unsandboxed=True).tools(commands=True))
    async with Runtime("memory", agents=[found.agent]) as runtime:
        found.session = await runtime.session("s")
        answers = [await found.call("search", pattern="name", path="src") for _ in range(2)]
        commands = await runtime.processes.list(kind="command")

    assert [len(each["matches"]) for each in answers] == [5, 5]
    assert (tmp_path / "asked").read_text() == "--version\n"
    assert commands == []


@pytest.mark.parametrize(("said", "recent"), [("ripgrep 13.0.0", False), ("ripgrep 14.1.1 (rev 4649aa9700)", True)])
def test_ripgrep_is_recent_from_version_14_on(tmp_path: Path, said: str, recent: bool) -> None:
    program = tmp_path / "rg"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)

    assert is_recent(str(program)) == recent
    assert not is_recent(str(tmp_path / "gone"))


# ---------------------------------------------------------------------- the pattern


@pytest.mark.parametrize("pattern", ["(", "(?x) a b", "(?i:a)", "\\n", "(a)?(?(1)b|c)"])
def test_what_cannot_be_widened_is_not(pattern: str) -> None:
    assert widened(pattern) is None


DOTTED, DOTLESS, LONG_S, KELVIN = "\u0130", "\u0131", "\u017f", "\u212a"
LETTERS = f"ab1_ \t.\u00e9{DOTTED}{DOTLESS}{LONG_S}{KELVIN}KIi\u00df\u2028\x85\x1c\u00b2\u0301"
PARTS = ["a", "b+", "[^a]", r"\w", r"\W", r"\s", r"\S", r"\d", ".", "(?:a|b)?", r"\b", "^", "$", "[a-z]", "i", "K"]


@pytest.mark.usefixtures("rg")
@settings(max_examples=20, deadline=None)
@example(["i"], [DOTTED, DOTLESS], True)
@example(["k"], [KELVIN], True)
@given(
    st.lists(
        st.sampled_from(
            ["a", "b+", "[^a]", r"\w", r"\W", r"\s", r"\S", r"\d", ".", "(?:a|b)?", r"\b", "^", "$", "[a-z]", "i", "K"]
        ),
        min_size=1,
        max_size=5,
    ),
    st.lists(st.text(LETTERS, max_size=6), min_size=1, max_size=30),
    st.booleans(),
)
def test_a_widened_pattern_matches_every_line_that_the_pattern_does(
    parts: list[str], lines: list[str], ignore_case: bool
) -> None:
    pattern = "".join(parts)
    wide = widened(pattern, ignore_case)
    compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    texts = [line for line in lines if "\n" not in line]
    data = "".join(f"{text}\n" for text in texts).encode()
    assert wide is not None
    ran = subprocess.run(
        ["rg", "--no-config", "--text", "--encoding=none", "--line-number", f"--regexp={wide}", "-"],
        input=data, capture_output=True, check=False,
    )  # fmt: skip
    found = {int(line.split(b":")[0]) for line in ran.stdout.splitlines() if line}

    assert ran.returncode in (0, 1), ran.stderr
    assert {number for number, text in enumerate(texts, 1) if compiled.search(text)} <= found
