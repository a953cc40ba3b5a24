"""The tool for git: what it shows, and that no repository can have it run a program.

Each attack is first made on git itself, where it succeeds, and then on the tool.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import Runtime, Workspace
from perdure.model.command import CommandSettings
from perdure.workspace.policy import Policy, Rule
from tests import programs
from tests.workspace.asking import Conversation

ENV = {
    "PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", "GIT_AUTHOR_NAME": "Ada",
    "GIT_AUTHOR_EMAIL": "ada@example.org", "GIT_COMMITTER_NAME": "Ada", "GIT_COMMITTER_EMAIL": "ada@example.org",
    "GIT_AUTHOR_DATE": "2026-01-02T03:04:05Z", "GIT_COMMITTER_DATE": "2026-01-02T03:04:05Z",
    "GIT_ALLOW_PROTOCOL": "file:ssh",
}  # fmt: skip


def git(where: Path, *arguments: str, given: str = "") -> str:
    """Git itself, as a person would run it there; what it printed."""
    ran = subprocess.run(
        ["git", *arguments], cwd=where, env=ENV, input=given, capture_output=True, text=True, timeout=60, check=False
    )
    return ran.stdout


@pytest.fixture(autouse=True)
def needs_git() -> None:
    programs.git()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A repository with one commit, a change that is not staged, and a file that git does not know."""
    found = tmp_path / "work"
    found.mkdir()
    git(found, "init", "-q", "-b", "main")
    (found / "a.txt").write_text("one\n")
    (found / "sub").mkdir()
    (found / "sub" / "b.txt").write_text("two\n")
    git(found, "add", ".")
    git(found, "commit", "-q", "-m", "Begin")
    (found / "a.txt").write_text("one more\n")
    (found / "new.txt").write_text("new\n")
    return found


@pytest.fixture
async def model(work: Path) -> AsyncIterator[Conversation]:
    found = Conversation(Workspace([work], unsandboxed=True).tools(commands=True))
    async with Runtime("memory", agents=[found.agent]) as found.runtime:
        found.session = await found.runtime.session("s")
        yield found


async def test_what_a_repository_holds_is_shown(model: Conversation, work: Path) -> None:
    git(work, "add", "new.txt")
    git(work, "branch", "other")

    async def ask(operation: str, **more: Any) -> str:
        answer = await model.call("git", operation=operation, **more)
        return str(answer["output"] if isinstance(answer, dict) else answer)

    assert await ask("status") == "## main\n M a.txt\nA  new.txt\n"
    assert await ask("status", path="sub") == "## main\n"
    assert "-one\n+one more\n" in await ask("diff")
    assert "new.txt" in await ask("diff", staged=True, stat=True)
    assert "-one\n+one more\n" in await ask("diff", revision="HEAD", path="a.txt")
    assert (await ask("log")).endswith("2026-01-02T03:04:05+00:00 Ada (HEAD -> main, other) Begin\n")
    assert await ask("log", path="new.txt") == ""
    assert "+two\n" in await ask("show")
    assert await ask("show", revision="HEAD:sub/b.txt") == "two\n"
    assert "(Ada 2026-01-02 1) two\n" in await ask("blame", path="sub/b.txt")
    assert (await ask("branches")).split()[:2] == ["*", "main"]
    assert await ask("files") == "a.txt\nnew.txt\nsub/b.txt\n"
    assert await ask("files", repository="sub") == "a.txt\nnew.txt\nsub/b.txt\n"


async def test_long_output_is_read_on(model: Conversation, work: Path) -> None:
    (work / "a.txt").write_text("".join(f"line {number}\n" for number in range(20_000)))

    first = await model.call("git", operation="diff")
    second = await model.call("git", operation="diff", offset=first["next_offset"])

    assert "bytes" in first["truncated"]
    assert int(second["output"].splitlines()[0].split()[-1]) == int(first["output"].splitlines()[-1].split()[-1]) + 1


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({"operation": "push"}, "invalid_tool_args"),
        ({"operation": "diff", "revision": "--output=made"}, "invalid_tool_args"),
        ({"operation": "log", "revision": "a b"}, "invalid_tool_args"),
        ({"operation": "log", "revision": ""}, "invalid_tool_args"),
        ({"operation": "log", "max_count": 0}, "invalid_tool_args"),
        ({"operation": "log", "revision": "nothing-of-that-name"}, "git_failed"),
        ({"operation": "blame"}, "invalid_tool_args"),
        ({"operation": "blame", "path": "missing.txt"}, "git_failed"),
        ({"operation": "diff", "path": "/etc/passwd"}, "outside_workspace"),
        ({"operation": "diff", "path": ".git/config"}, "outside_workspace"),
        ({"operation": "status", "repository": "/tmp"}, "outside_workspace"),
        ({"operation": "status", "offset": -1}, "invalid_tool_args"),
        ({"operation": "status", "offset": 10_000}, "past_the_end"),
    ],
)
async def test_what_cannot_be_shown_is_told(model: Conversation, work: Path, args: dict[str, Any], code: str) -> None:
    assert await model.call("git", **args) == code
    assert not (work / "made").exists()


@pytest.mark.parametrize("part", ["HEAD", "packed-refs", "shallow", "index", "info/exclude", "logs", "objects", "refs"])
async def test_a_repository_with_parts_elsewhere_is_not_read(model: Conversation, work: Path, part: str) -> None:
    """Git prints lines of what it does not understand."""
    found, away = work / ".git" / part, work.parent / "away"
    if found.exists():
        found.rename(away)
    else:
        away.write_text("root:x:0:0\n")
    found.parent.mkdir(exist_ok=True)
    found.symlink_to(away)

    assert await model.call("git", operation="log") == "no_repository"


@pytest.mark.parametrize(("where", "code"), [("../../../outside", "no_repository"), ("../../inside", "")])
async def test_objects_of_a_repository_outside_are_not_read(
    model: Conversation, work: Path, where: str, code: str
) -> None:
    alternates = work / ".git" / "objects" / "info" / "alternates"
    alternates.parent.mkdir(exist_ok=True)
    alternates.write_text(f"# of somebody\n{where}/.git/objects\n")

    told = await model.call("git", operation="log")

    assert (told if isinstance(told, str) else "") == code


async def test_programs_of_a_folder_of_the_workspace_are_not_run_unasked(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of an environment is in the PATH of a host, and may be in a root."""
    for name in ("git", "rg", "sh", "mktemp"):
        planted = work / "bin" / name
        planted.parent.mkdir(exist_ok=True)
        planted.write_text("#!/bin/sh\ntouch /proc/self/cwd/made\n")
        planted.chmod(0o755)
    monkeypatch.setenv("PATH", f"{work}/bin:bin::{os.environ['PATH']}")
    found = Conversation(Workspace([work], unsandboxed=True).tools(commands=True))
    async with Runtime("memory", agents=[found.agent]) as runtime:
        found.session = await runtime.session("s")
        status = await found.call("git", operation="log")
        await found.call("search", pattern="one")

    assert "Begin" in status["output"]
    assert not list(work.rglob("made"))


async def test_objects_that_a_repository_inside_has_of_one_outside_are_not_read(
    model: Conversation, work: Path
) -> None:
    for folder, other in ((".git/objects", "../../second"), ("second", "../third"), ("third", "../../outside")):
        (work / folder / "info").mkdir(parents=True, exist_ok=True)
        (work / folder / "info" / "alternates").write_text(f"{other}\n")

    assert await model.call("git", operation="log") == "no_repository"

    (work / "third" / "info" / "alternates").write_text("../second\n")  # in a circle

    assert "output" in await model.call("git", operation="log")


async def test_a_folder_without_a_repository_is_told(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".git").write_text("gitdir: /somewhere/else\n")
    found = Conversation(Workspace([tmp_path / "plain", tmp_path / "linked"], unsandboxed=True).tools(commands=True))
    async with Runtime("memory", agents=[found.agent]) as runtime:
        found.session = await runtime.session("s")
        plain = await found.told("git", operation="status")
        linked = await found.told("git", operation="status", repository=str(tmp_path / "linked"))

    assert "no git repository" in plain
    assert "elsewhere" in linked


async def test_a_policy_may_deny_git(work: Path) -> None:
    policy = Policy((Rule("deny", "git"),))
    found = Conversation(Workspace([work], unsandboxed=True, policy=policy).tools(commands=True))
    async with Runtime("memory", agents=[found.agent]) as runtime:
        found.session = await runtime.session("s")
        assert await found.call("git", operation="status") == "denied_by_policy"


# ---------------------------------------------------------------------- attacks


def configured(*lines: str) -> Callable[[Path, Path], None]:
    """An attack by the configuration of a repository; MARK is a program that leaves a mark."""

    def attack(work: Path, mark: Path) -> None:
        text = "\n".join(lines).replace("MARK", str(mark))
        with (work / ".git" / "config").open("a") as file:
            file.write(f"\n{text}\n")

    return attack


def attributed(attribute: str, *lines: str) -> Callable[[Path, Path], None]:
    def attack(work: Path, mark: Path) -> None:
        (work / ".gitattributes").write_text(f"*.txt {attribute}\n")
        configured(*lines)(work, mark)

    return attack


def attributed_in_git(attribute: str, *lines: str) -> Callable[[Path, Path], None]:
    def attack(work: Path, mark: Path) -> None:
        (work / ".git" / "info").mkdir(exist_ok=True)
        (work / ".git" / "info" / "attributes").write_text(f"*.txt {attribute}\n")
        configured(*lines)(work, mark)

    return attack


def included(work: Path, mark: Path) -> None:
    (work / "settings").write_text(f"[core]\n fsmonitor = {mark}\n")
    configured("[include]", f" path = {work}/settings")(work, mark)


def hooked(work: Path, mark: Path) -> None:
    hooks = work / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    (hooks / "post-index-change").write_text(f"#!/bin/sh\nexec {mark}\n")
    (hooks / "post-index-change").chmod(0o755)
    os.utime(work / "sub" / "b.txt", (1, 1))  # the index is written, because the time of a file has changed


def with_a_submodule(work: Path, mark: Path) -> None:
    inner = work / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    (inner / "c.txt").write_text("three\n")
    git(inner, "add", ".")
    git(inner, "commit", "-q", "-m", "Inner")
    git(work, "add", "inner")
    git(work, "commit", "-q", "-m", "With a submodule")
    configured("[core]", f" fsmonitor = {mark}")(inner, mark)


def signed(work: Path, mark: Path) -> None:
    head = git(work, "cat-file", "commit", "HEAD")
    fields, _, message = head.partition("\n\n")
    signature = "gpgsig -----BEGIN PGP SIGNATURE-----\n \n abc\n -----END PGP SIGNATURE-----"
    made = git(work, "hash-object", "-t", "commit", "-w", "--stdin", given=f"{fields}\n{signature}\n\n{message}")
    git(work, "update-ref", "HEAD", made.strip())
    configured("[log]", " showSignature = true", "[gpg]", " program = MARK")(work, mark)


def missing_objects(work: Path, mark: Path) -> None:
    blob = git(work, "rev-parse", "HEAD:sub/b.txt").strip()
    (work / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    configured(
        "[core]", " repositoryformatversion = 1", " sshCommand = MARK", "[extensions]", " partialClone = origin",
        '[remote "origin"]', " url = ssh://host.invalid/x", " promisor = true",
    )(work, mark)  # fmt: skip


ATTACKS: dict[str, tuple[Callable[[Path, Path], None], list[str], dict[str, Any]]] = {
    "fsmonitor": (configured("[core]", " fsmonitor = MARK"), ["status"], {"operation": "status"}),
    "include": (included, ["status"], {"operation": "status"}),
    "external diff": (configured("[diff]", " external = MARK"), ["diff"], {"operation": "diff"}),
    "diff driver": (attributed("diff=own", '[diff "own"]', " command = MARK"), ["diff"], {"operation": "diff"}),
    "textconv": (attributed("diff=own", '[diff "own"]', " textconv = MARK"), ["diff"], {"operation": "diff"}),
    "textconv of show": (attributed("diff=own", '[diff "own"]', " textconv = MARK"), ["show"], {"operation": "show"}),
    "textconv of blame": (
        attributed_in_git("diff=own", '[diff "own"]', " textconv = MARK"),
        ["blame", "sub/b.txt"],
        {"operation": "blame", "path": "sub/b.txt"},
    ),
    "filter": (attributed("filter=own", '[filter "own"]', " clean = MARK"), ["status"], {"operation": "status"}),
    "filter of diff": (
        attributed_in_git("filter=own", '[filter "own"]', " clean = MARK"),
        ["diff"],
        {"operation": "diff"},
    ),
    "hook": (hooked, ["status"], {"operation": "status"}),
    "submodule": (with_a_submodule, ["status"], {"operation": "status"}),
    "signature": (signed, ["log"], {"operation": "log"}),
    "fetch of missing objects": (missing_objects, ["show", "HEAD:sub/b.txt"], {"operation": "show"}),
}


@pytest.mark.parametrize("name", ATTACKS)
async def test_no_repository_has_a_program_run(model: Conversation, work: Path, name: str) -> None:
    attack, plain, asked = ATTACKS[name]
    ran, mark = work / "ran", work / "mark"  # where a confined command may write and run, too
    mark.write_text(f"#!/bin/sh\necho ran >> '{ran}'\ncat >/dev/null 2>&1 </dev/null\n")
    mark.chmod(0o755)
    attack(work, mark)

    os.utime(work / "sub" / "b.txt", (1, 1))  # git looks at the content of files whose times are new to it
    git(work, *plain)
    succeeded = ran.exists()
    ran.unlink(missing_ok=True)
    os.utime(work / "sub" / "b.txt", (2, 2))
    answer = await model.call("git", **asked)

    assert succeeded, "git itself runs it, or this test proves nothing"
    assert not ran.exists()
    assert isinstance(answer, dict) or name == "fetch of missing objects"


@pytest.mark.parametrize(
    ("name", "value", "operation"),
    [("GIT_EXTERNAL_DIFF", "{mark}", "diff"), ("GIT_CONFIG_PARAMETERS", "'core.fsmonitor={mark}'", "status")],
)
async def test_variables_of_git_are_not_passed_on(
    work: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, operation: str
) -> None:
    ran, mark = work / "ran", work / "mark"  # where a confined command may write and run, too
    mark.write_text(f"#!/bin/sh\necho ran >> '{ran}'\n")
    mark.chmod(0o755)
    monkeypatch.setenv(name, value.format(mark=mark))
    subprocess.run(["git", operation], cwd=work, env={**ENV, name: os.environ[name]}, capture_output=True, check=False)
    succeeded = ran.exists()
    ran.unlink(missing_ok=True)
    found = Conversation(Workspace([work], unsandboxed=True).tools(commands=True))
    async with Runtime("memory", agents=[found.agent], commands=CommandSettings(inherit=(name,))) as runtime:
        found.session = await runtime.session("s")
        answer = await found.call("git", operation=operation)

    assert succeeded, "git itself runs it, or this test proves nothing"
    assert "a.txt" in answer["output"]
    assert not ran.exists()
