"""The tool that shows what git knows of a workspace, and changes nothing.

A repository names programs that git runs: monitors of the file system, filters, external diffs, converters of text,
hooks, pagers, signers, transports. Whoever writes into its configuration, or brings a repository along, runs code in
the next `git status`. A list of settings to turn off would miss those that it does not know, and names of filters and
converters are anybody's choice. So the configuration of the repository is not read at all:

    a git folder of our own    HEAD copied, references, logs and `info/exclude` linked, a configuration that we wrote
    objects and the index      where they are, by variables of git's
    nothing else               no hooks, no attributes of `.git/info`, no alternate configuration, no global one

`.gitattributes` of the tree may name drivers; without a configuration none of them is defined. Of the repository's own
settings, those that say how its files are compared are copied by name (`PLAIN`). Submodules have configurations of
their own and are not entered. All of it runs confined like any other command: this is about what git does, and the
sandbox about what it could do.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from perdure.errors import ToolError, quoted
from perdure.model.command import CommandResult
from perdure.tools.context import ToolContext
from perdure.tools.define import Tool, tool
from perdure.workspace.commands import READ_BUDGET, READ_BYTES, awaited, shown_output
from perdure.workspace.paths import Location, Paths
from perdure.workspace.spawning import Program, Programs, SpawnOptions, refusals

GitOperation: TypeAlias = Literal["status", "diff", "log", "show", "blame", "branches", "files"]

KEY = "git"
SECONDS = 60.0
OUTPUT_BYTES = 16 * 1024 * 1024
"""Written by git before it is ended."""
MAX_COUNT = 1000
REVISION = re.compile(r"[A-Za-z0-9_.@^~:/{}+=!*?\[\]()-]{1,200}|:/[^\0\n]{1,200}")

PLAIN = "core.autocrlf core.eol core.safecrlf core.filemode core.ignorecase core.symlinks core.precomposeunicode"
"""Settings of a repository that are copied: they name no program."""

SCRIPT = f"""
set -eu
for name in $(env | sed -n 's/^\\(GIT_[A-Za-z0-9_]*\\)=.*/\\1/p'); do unset "$name"; done
tree=$1; shift
real=$tree/.git
own=$(mktemp -d)
trap 'rm -rf "$own"' EXIT
mkdir "$own/info" "$own/home"
cat "$real/HEAD" > "$own/HEAD"
for each in refs logs packed-refs shallow info/exclude; do
    if [ -e "$real/$each" ]; then ln -s "$real/$each" "$own/$each"; fi
done
for each in "$real"/sharedindex.*; do
    if [ -e "$each" ]; then ln -s "$each" "$own/"; fi
done
mkdir -p "$own/refs"
export HOME="$own/home" XDG_CONFIG_HOME="$own/home"
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1
export GIT_DIR="$own" GIT_WORK_TREE="$tree" GIT_OBJECT_DIRECTORY="$real/objects" GIT_INDEX_FILE="$real/index"
export GIT_OPTIONAL_LOCKS=0 GIT_NO_REPLACE_OBJECTS=1 GIT_LITERAL_PATHSPECS=1 GIT_NO_LAZY_FETCH=1
export GIT_ALLOW_PROTOCOL= GIT_TERMINAL_PROMPT=0 GIT_ASKPASS=false GIT_SSH_COMMAND=false
export GIT_PAGER=cat PAGER=cat GIT_EDITOR=false
cat > "$own/config" <<'END'
[core]
    repositoryformatversion = 0
    bare = false
    fsmonitor = false
    hooksPath = /dev/null
    attributesFile = /dev/null
    excludesFile = /dev/null
    untrackedCache = false
[submodule]
    recurse = false
END
for each in {PLAIN}; do
    if value=$(git config --no-includes --file "$real/config" --get "$each" 2>/dev/null); then
        git config --file "$own/config" "$each" "$value"
    fi
done
cd "$tree"
git --no-pager "$@"
"""
"""Gets the top of a working tree, then the arguments of git."""

QUIET = ("--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=all", "--submodule=short")
PARTS = (
    "HEAD", "objects", "objects/info", "objects/info/alternates", "objects/pack", "refs", "logs", "index", "info",
    "info/exclude", "packed-refs", "shallow",
)  # fmt: skip
"""What git reads of a repository's own folder."""
MOST_ALTERNATES = 64 * 1024
MOST_REPOSITORIES = 20
LOG = "--format=%h %ad %an%d %s"


class GitTools:
    """The tool for git, a part of the tools of a workspace."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self.tools: dict[str, Tool[..., Any]] = {"git": self.git}

    async def program(self, name: str, kwargs: Mapping[str, Any], ctx: ToolContext[Any]) -> Program | None:
        """The call of git, as people read it; what runs is the script with the same arguments."""
        return self._program(kwargs, ctx)

    @tool(recovery="rerun", output_budget=READ_BUDGET)
    async def git(  # noqa: PLR0913  # what a model may say, each by name
        self,
        operation: GitOperation,
        ctx: ToolContext[Any],
        path: str | None = None,
        revision: str | None = None,
        staged: bool = False,
        stat: bool = False,
        max_count: int = 20,
        repository: str = ".",
        offset: int = 0,
    ) -> dict[str, Any]:
        """Look at a git repository. Nothing is changed.

        Args:
            operation: status, diff (of the working tree, or to a revision or between two: "a..b"), log, show (a
                commit, or a file as "revision:path"), blame, branches, files (that git keeps).
            path: Only this file or folder. blame needs one.
            revision: A commit, a branch, a tag, or a range.
            staged: diff shows what is staged.
            stat: diff, log and show give numbers of changed lines only.
            max_count: Commits that log shows at most.
            repository: A folder in the repository.
            offset: The first byte to show; next_offset of the last answer goes on from there.
        """
        if offset < 0:
            raise ToolError("offset is 0 or more", code="invalid_tool_args")
        given = {
            "operation": operation, "path": path, "revision": revision, "staged": staged, "stat": stat,
            "max_count": max_count, "repository": repository,
        }  # fmt: skip
        program = self._program(given, ctx)
        options = SpawnOptions(KEY, program.text, listed=False, timeout=SECONDS, output_limit=OUTPUT_BYTES)
        handle = await self._programs.run(ctx, program, options)
        await awaited(handle, ctx, SECONDS + 30)
        with refusals():
            result = await handle.result()
        if result.status != "exited" or result.exit_code != 0:
            _check(result)
        content, end, chunk = await shown_output(handle, "stdout", offset, READ_BYTES)
        answer: dict[str, Any] = {"operation": operation, "output": content}
        if end < chunk.total:
            answer |= {"truncated": f"{end:,} of {chunk.total:,} bytes", "next_offset": end}
        return answer

    def _program(self, given: Mapping[str, Any], ctx: ToolContext[Any]) -> Program:
        paths = self._programs.sparing(ctx.store_location)
        repository = given.get("repository", ".")
        with paths.locate(repository) as place:
            tree = _top(paths, place, repository)
        path = given.get("path")
        arguments = _arguments(given, None if path is None else _below(paths, tree, path))
        return Program(("git", *arguments), tree, "tool", ("sh", "-c", SCRIPT, "git", tree, *arguments))


def _check(result: CommandResult) -> None:
    if result.status == "killed" and result.stdout_bytes + result.stderr_bytes >= OUTPUT_BYTES:
        return  # it was cut off, which the answer says
    words = (result.stderr or result.stdout).strip()[:1000] or result.reason or result.status
    raise ToolError(f"git could not do that: {words}", code="git_failed")


def _top(paths: Paths, place: Location, asked: str) -> str:
    """The top of the working tree that a folder is in."""
    for count in range(len(place.names), -1, -1):
        folder = "/".join((place.root, *place.names[:count]))
        with contextlib.suppress(OSError):
            mode = os.lstat(f"{folder}/.git").st_mode
            if stat.S_ISDIR(mode):
                _check_inside(paths, f"{folder}/.git")
                return folder
            raise ToolError(
                f"{folder}/.git is no folder, and leads to a repository elsewhere: look at that one",
                code="no_repository",
            )
    raise ToolError(f"{asked} is in no git repository below {place.root}", code="no_repository")


def _check_inside(paths: Paths, folder: str) -> None:
    """Raise ToolError where git would read what is outside of the workspace, parts of which it prints in its errors.
    Where a sandbox confines git it could not read that either."""
    for part in PARTS:
        if os.path.islink(f"{folder}/{part}"):
            raise ToolError(f"{folder}/{part} is a link, and leads to a repository elsewhere", code="no_repository")
    found = [f"{folder}/objects"]
    for objects in found:  # which have objects of others in turn
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            with open(f"{objects}/info/alternates", "rb") as file:
                others = file.read(MOST_ALTERNATES).splitlines()
            for other in others:
                where = os.path.realpath(os.path.join(objects, os.fsdecode(other)))
                if not other or other.startswith(b"#") or where in found:
                    continue
                if not paths.covers(where) or len(found) > MOST_REPOSITORIES:
                    raise ToolError(
                        f"{folder} has its objects in a repository outside of the workspace", code="no_repository"
                    )
                found.append(where)


def _below(paths: Paths, tree: str, path: str) -> str:
    with paths.locate(path, follow=False, missing=True) as place:
        if place.path != tree and not place.path.startswith(f"{tree}/"):
            raise ToolError(f"{path} is not in the repository {tree}", code="no_repository")
        return place.path[len(tree) + 1 :] or "."


def _revision(text: str | None) -> list[str]:
    if text is None:
        return []
    if text.startswith("-") or not REVISION.fullmatch(text):
        raise ToolError(
            f"{quoted(text):.200} is no revision: give a commit, a branch, a tag or a range", code="invalid_tool_args"
        )
    return [text]


def _arguments(given: Mapping[str, Any], path: str | None) -> list[str]:
    """The arguments of git for what a model asked for."""
    operation, revision = given["operation"], _revision(given.get("revision"))
    count = given.get("max_count", 20)
    if not 1 <= count <= MAX_COUNT:
        raise ToolError(f"max_count is 1 to {MAX_COUNT}", code="invalid_tool_args")
    if operation not in get_args(GitOperation):
        raise ToolError(f"git has no operation {quoted(operation)} here", code="invalid_tool_args")
    numbers = ["--stat"] if given.get("stat") else []
    of_path = ["--", *([] if path is None else [path])]
    match operation:
        case "status":
            return [
                "status",
                "--porcelain=v1",
                "--branch",
                "--untracked-files=normal",
                "--ignore-submodules=all",
                *of_path,
            ]
        case "diff":
            return ["diff", *QUIET, *(["--cached"] if given.get("staged") else []), *numbers, *revision, *of_path]
        case "log":
            return [
                "log",
                *QUIET,
                "--no-show-signature",
                LOG,
                "--date=iso-strict",
                f"-n{count}",
                *numbers,
                *revision,
                *of_path,
            ]
        case "show":
            whole = [] if path is None else of_path
            return [
                "show",
                *QUIET,
                "--no-show-signature",
                "--date=iso-strict",
                *numbers,
                *(revision or ["HEAD"]),
                *whole,
            ]
        case "blame":
            if path is None:
                raise ToolError("blame needs the path of a file", code="invalid_tool_args")
            return ["blame", "--no-textconv", "--date=short", *revision, *of_path]
        case "branches":
            form = "%(if)%(HEAD)%(then)%(HEAD)%(else) %(end) %(refname:short) %(objectname:short) %(subject)"
            return ["for-each-ref", f"--format={form}", "refs/heads", "refs/remotes"]
        case _:
            return ["ls-files", *of_path]
