"""Paths that must not lead out of a workspace, nor to what is off limits in it, whatever tool they are given to."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import Workspace
from perdure.errors import InvalidDefinition
from tests.kit import untyped
from tests.workspace.asking import ask, refused

SECRET = "the secret"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A workspace beside things that it must not reach."""
    root = tmp_path / "work"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "inside.txt").write_text("inside")
    for outside in (tmp_path / "out", tmp_path / "work-of-others"):
        outside.mkdir()
        (outside / "secret.txt").write_text(SECRET)
    return root


def link(target: str, name: str = "way") -> Callable[[Path], str]:
    def make(root: Path) -> str:
        (root / name).symlink_to(target.replace("OUT", str(root.parent / "out")))
        return name

    return make


def file_at(path: str) -> Callable[[Path], str]:
    def make(root: Path) -> str:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(SECRET)
        return path

    return make


def joined(*parts: Callable[[Path], str] | str) -> Callable[[Path], str]:
    return lambda root: "/".join([part if isinstance(part, str) else part(root) for part in parts])


def made(before: Callable[[Path], str], path: str) -> Callable[[Path], str]:
    def make(root: Path) -> str:
        before(root)
        return path

    return make


OUTSIDE: dict[str, Callable[[Path], str]] = {
    "up": lambda root: "../out/secret.txt",
    "up from below": lambda root: "sub/../../out/secret.txt",
    "from the top": lambda root: str(root.parent / "out" / "secret.txt"),
    "from the top, by way of the root": lambda root: f"{root}/../out/secret.txt",
    "a folder whose name begins like the root's": lambda root: f"{root}-of-others/secret.txt",
    "a link to a file": link("OUT/secret.txt"),
    "a relative link to a file": link("../out/secret.txt"),
    "a link to a folder": joined(link("OUT"), "secret.txt"),
    "a relative link to a folder": joined(link("../out"), "secret.txt"),
    "a link to the top": lambda root: f"{link('/')(root)}{root.parent}/out/secret.txt",
    "a link to a link": made(lambda root: link("way", "first")(root) + link("OUT")(root), "first/secret.txt"),
    "a link below a folder": made(link("../../out", "sub/way"), "sub/way/secret.txt"),
    "a link through itself": made(link("sub/../../out"), "way/secret.txt"),
    "this process": joined(link("/proc/self"), "environ"),
    "an open file of this process": joined(link("/proc/self/fd"), "0"),
}
OFF_LIMITS: dict[str, Callable[[Path], str]] = {
    "git's configuration": file_at(".git/config"),
    "git's configuration, in capital letters": file_at(".GIT/Config"),
    "git's configuration, with an invisible letter": file_at(".g\u200cit/config"),
    "git's configuration, by its short name": file_at("GIT~1/config"),
    "git's configuration, with a dot": file_at(".git./config"),
    "a hook": file_at(".git/hooks/pre-commit"),
    "a submodule's configuration": file_at(".git/modules/lib/config"),
    "a nested repository's hook": file_at("sub/.git/hooks/post-checkout"),
    "git's configuration behind a link": made(
        lambda root: file_at(".git/config")(root) + link(".git/config")(root), "way"
    ),
    "git's configuration behind a link to its folder": made(
        lambda root: file_at(".git/config")(root) + link(".git")(root), "way/config"
    ),
    "the store": file_at("agent.db"),
    "the store's log": file_at("agent.db-wal"),
    "the store's log, in capital letters": file_at("AGENT.DB-WAL"),
    "a blob": file_at("agent.db-blobs/ab/cdef"),
    "a job of a command": file_at("agent.db-jobs/x/stdout"),
    "the store behind a link": made(lambda root: file_at("agent.db")(root) + link("agent.db")(root), "way"),
    "the folder of another store": file_at(".perdure/runtime.db"),
    "the folder of a store before the rename": file_at(".mainstay/runtime.db"),
}
READING: dict[str, dict[str, Any]] = {
    "read_file": {},
    "list_directory": {},
    "search": {"pattern": "secret"},
    "file_outline": {},
}
CHANGING: dict[str, dict[str, Any]] = {
    "write_file": {"content": "overwritten"},
    "edit_file": {"old_text": "secret", "new_text": "prize"},
    "delete_file": {},
}


def everything(root: Path) -> dict[str, str]:
    """What all files hold, in the workspace and beside it."""
    found = {}
    for folder, _, names in os.walk(root.parent):
        for name in names:
            path = Path(folder, name)
            found[str(path)] = os.readlink(path) if path.is_symlink() else path.read_text()
    return found


async def codes(root: Path, path: str, store: str | None = None) -> dict[str, str]:
    """How each tool ends that is given a path. A link at its end is deleted itself, so that one is not asked."""
    tools, found = Workspace([root]).tools(), {}
    for tool, args in {**READING, **CHANGING}.items():
        if tool != "delete_file" or not (root / path).is_symlink():
            found[tool] = await refused(tools, tool, store, path=path, **args)
    return found


@pytest.mark.parametrize("way", OUTSIDE)
async def test_no_path_leads_out(work: Path, way: str) -> None:
    path = OUTSIDE[way](work)
    before = everything(work)

    found = await codes(work, path)

    assert found == dict.fromkeys(found, "outside_workspace")
    assert everything(work) == before


@pytest.mark.parametrize("way", OFF_LIMITS)
async def test_git_and_the_store_are_off_limits(work: Path, way: str) -> None:
    path = OFF_LIMITS[way](work)
    before = everything(work)

    found = await codes(work, path, str(work / "agent.db"))

    assert found == dict.fromkeys(found, "outside_workspace")
    assert everything(work) == before


@pytest.mark.parametrize(
    "path",
    [".git", ".git/config", ".git/hooks/pre-push", "agent.db", "agent.db-blobs/ab/c", ".perdure/x", ".mainstay/x"],
)
async def test_what_is_off_limits_cannot_be_made_either(work: Path, path: str) -> None:
    code = await refused(Workspace([work]).tools(), "write_file", str(work / "agent.db"), path=path, content="x")

    assert code == "outside_workspace"
    assert sorted(os.listdir(work)) == ["sub"]


async def test_a_dangling_link_cannot_be_written_through(work: Path) -> None:
    (work / "way").symlink_to(work.parent / "out" / "new.txt")

    assert await refused(Workspace([work]).tools(), "write_file", path="way", content="x") == "outside_workspace"
    assert not (work.parent / "out" / "new.txt").exists()


async def test_a_second_name_of_a_file_from_outside_is_refused_unless_the_host_allows_it(work: Path) -> None:
    os.link(work.parent / "out" / "secret.txt", work / "own.txt")

    strict, loose = Workspace([work]).tools(), Workspace([work], hard_links=True).tools()

    assert await refused(strict, "read_file", path="own.txt") == "hard_link"
    assert await refused(strict, "edit_file", path="own.txt", old_text="secret", new_text="x") == "hard_link"
    assert (await ask(strict, "search", pattern="secret"))["matches"] == []
    assert (await ask(loose, "read_file", path="own.txt"))["content"] == SECRET
    await ask(loose, "edit_file", path="own.txt", old_text="secret", new_text="x")
    assert (work.parent / "out" / "secret.txt").read_text() == SECRET, "the other name keeps what it had"


async def test_pipes_sockets_and_folders_are_no_files(work: Path) -> None:
    os.mkfifo(work / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        before = os.getcwd()
        os.chdir(work)  # the path of a socket is short
        try:
            server.bind("socket")
        finally:
            os.chdir(before)
        tools = Workspace([work]).tools()

        assert await refused(tools, "read_file", path="pipe") == "not_a_file"
        assert await refused(tools, "read_file", path="socket") == "not_a_file"
        assert await refused(tools, "read_file", path="sub") == "not_a_file"
        assert await refused(tools, "write_file", path="sub", content="x") == "not_a_file"
        assert await refused(tools, "edit_file", path="pipe", old_text="a", new_text="b") == "not_a_file"
        assert (await ask(tools, "search", pattern="x"))["files_skipped"] == 2


@pytest.mark.parametrize("path", ["", "a\0b", "sub/inside.txt\0", "caf\udce9.txt"])
async def test_what_is_no_path_is_refused(work: Path, path: str) -> None:
    assert await refused(Workspace([work]).tools(), "read_file", path=path) == "invalid_path"
    assert await refused(Workspace([work]).tools(), "write_file", path=path, content="x") == "invalid_path"


@pytest.mark.parametrize(
    ("path", "code"),
    [("missing.txt", "not_found"), ("sub/inside.txt/x", "not_a_folder"), ("x" * 300, "invalid_path")],
)
async def test_what_is_not_there_is_told(work: Path, path: str, code: str) -> None:
    assert await refused(Workspace([work]).tools(), "read_file", path=path) == code


@pytest.mark.parametrize("target", ["sub", "../work/sub", "ROOT/sub"])
async def test_links_that_stay_inside_are_followed(work: Path, target: str) -> None:
    (work / "way").symlink_to(target.replace("ROOT", str(work)))
    tools = Workspace([work]).tools()

    if target.startswith(".."):  # it leads above the root, and by name nothing is there
        assert await refused(tools, "read_file", path="way/inside.txt") == "outside_workspace"
        return
    assert (await ask(tools, "read_file", path="way/inside.txt"))["path"] == "sub/inside.txt"
    await ask(tools, "edit_file", path="way/inside.txt", old_text="inside", new_text="changed")
    assert (work / "sub" / "inside.txt").read_text() == "changed"


async def test_a_link_at_the_end_is_edited_through_and_deleted_itself(work: Path) -> None:
    (work / "way.txt").symlink_to("sub/inside.txt")
    tools = Workspace([work]).tools()

    await ask(tools, "edit_file", path="way.txt", old_text="inside", new_text="changed")
    assert (work / "way.txt").is_symlink()
    await ask(tools, "delete_file", path="way.txt")

    assert (work / "sub" / "inside.txt").read_text() == "changed"
    assert not (work / "way.txt").is_symlink()


async def test_links_in_a_circle_end(work: Path) -> None:
    (work / "one").symlink_to("two")
    (work / "two").symlink_to("one")

    assert await refused(Workspace([work]).tools(), "read_file", path="one/x") == "invalid_path"


async def test_a_path_from_the_top_is_looked_for_in_every_root(work: Path) -> None:
    tools = Workspace([work / "sub", work.parent / "out"]).tools()

    assert (await ask(tools, "read_file", path="inside.txt"))["content"] == "inside"
    found = await ask(tools, "read_file", path=str(work.parent / "out" / "secret.txt"))
    assert found["content"] == SECRET
    assert found["path"] == str(work.parent / "out" / "secret.txt")
    assert await refused(tools, "read_file", path="../out/secret.txt") == "outside_workspace"


async def test_the_rest_of_git_can_be_read_and_not_changed(work: Path) -> None:
    file_at(".git/HEAD")(work)
    tools = Workspace([work]).tools()

    assert (await ask(tools, "read_file", path=".git/HEAD"))["content"] == SECRET
    assert await refused(tools, "delete_file", path=".git/HEAD") == "outside_workspace"


async def test_what_is_off_limits_is_not_listed_or_searched(work: Path) -> None:
    for path in ("agent.db", "agent.db-wal", ".perdure/x", ".mainstay/x", ".git/config"):
        file_at(path)(work)
    tools, store = Workspace([work]).tools(), str(work / "agent.db")

    listed = await ask(tools, "list_directory", store, include_hidden=True)
    found = await ask(tools, "search", store, pattern="secret", include_hidden=True)

    assert [entry["name"] for entry in listed["entries"]] == [".git", "sub"]
    assert found["matches"] == []


@pytest.mark.parametrize("roots", [[], ["missing"], ["file.txt"], ["/"], ["/proc"], ["/proc/self"], [3], 3, ["a\0b"]])
def test_a_root_that_is_not_usable_is_refused(roots: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("x")

    with pytest.raises(InvalidDefinition, match="root"):
        Workspace(untyped(roots))


def test_a_root_may_be_a_path_of_its_own_and_a_link(work: Path) -> None:
    (work.parent / "way").symlink_to(work)

    assert Workspace(work.parent / "way").roots == (str(work),)
    assert Workspace([work, str(work)]).roots == (str(work),)


async def test_every_parameter_that_is_a_path_is_called_path() -> None:
    """So that the tests above see each of them."""
    for spec in Workspace(["."]).tools().specs():
        assert set(spec.input_schema["properties"]) - {
            "path", "content", "create_parents", "overwrite", "old_text", "new_text", "replace_all", "offset", "limit",
            "unit", "include_hidden", "max_entries", "pattern", "glob", "ignore_case", "fixed", "max_matches",
            "context_before", "context_after",
        } == set()  # fmt: skip
        assert "path" in spec.input_schema["properties"]
        assert spec.recovery == "rerun"


async def test_the_python_of_the_host_is_not_changed_unless_that_is_accepted() -> None:
    """The host runs what is there, outside of every sandbox. What is deleted here is not there."""
    package = Path(perdure.__file__).resolve().parent
    guarded = Workspace(package.parent).tools()
    accepting = Workspace(package.parent, accept=["python"]).tools()

    for path in (f"{package.name}/nothing.py", f"{package.name}/workspace/nothing.py"):
        assert await refused(guarded, "delete_file", path=path) == "outside_workspace"
        assert await ask(accepting, "delete_file", path=path) == {"path": path, "removed": False}
    assert await refused(guarded, "delete_file", path=f"{package.name.upper()}/nothing.py") == "outside_workspace"
    assert (await ask(guarded, "read_file", path=f"{package.name}/__init__.py", limit=1))["lines"] == 1
