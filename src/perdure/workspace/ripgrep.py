"""Which files a search has to look at, found by ripgrep where that is there.

Ripgrep narrows down, and decides nothing: it names the files in which something may match, in the order in which our
own walk would come to them. Each is then checked, opened and matched as without it (`search.py`), so a search finds the
same with and without ripgrep. For that its pattern must match at least what the pattern of Python matches. Most of the
syntax is the same. What is not is widened: assertions are left out, sets that differ become larger ones, and a byte
that is not UTF-8 stands for any character, because we read it as U+FFFD. What cannot be widened is searched without
ripgrep.

Its configuration and the ignore files that are its own are not read: a file in the workspace must not decide what a
search leaves out. `.gitignore` counts as in our own walk.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import queue
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

from perdure.errors import PerdureError, StoreError, ToolError
from perdure.ports.tool import CommandHandle
from perdure.tools.context import ToolContext
from perdure.workspace.search import Query
from perdure.workspace.spawning import Program, Programs, SpawnOptions

_parser: Any = importlib.import_module("re._parser")
"""Python's own reader of patterns. It has no public name, and is the same from 3.11 to 3.14."""

KEY = "ripgrep"
OLDEST = 14
"""The first version that finds every file with these flags. Version 13, which Debian 12 has, leaves some out."""
VERSION_SECONDS = 10.0
_recent: dict[str, tuple[int, bool]] = {}
"""Per program: when its file changed, and whether its version is recent. Threads may ask twice, which is harmless."""
SECONDS = 60.0
OUTPUT_BYTES = 64 * 1024 * 1024
PLAIN_GLOB = re.compile(r"\*\.[A-Za-z0-9_]+")
"""A glob that means the same to both."""

FLAGS = (
    "--no-config", "--count", "--max-count=1", "--null", "--sort=path", "--line-buffered", "--no-messages",
    "--color=never", "--no-ignore-parent", "--no-ignore-global", "--no-ignore-exclude", "--no-ignore-dot",
    "--no-require-git", "--text", "--encoding=none", "--no-follow", "--iglob=!.git",
)  # fmt: skip

RECORD = re.compile(rb"([^\0]+)\0[0-9]+\n")

ANY = r"(?:.|(?-u:[\x80-\xff]))"
REPLACED = 0xFFFD


# ---------------------------------------------------------------------- the pattern


class _NotWidened(Exception):
    """There is no pattern of ripgrep that surely matches as much."""


def widened(pattern: str, ignore_case: bool = False) -> str | None:
    """A pattern of ripgrep that matches every line that one of Python matches; None where there is none."""
    try:
        tree = _parser.parse(pattern)
        if tree.state.flags & ~int(re.UNICODE):
            return None
        found = _all(tree, ignore_case)
    except (re.error, RecursionError, OverflowError, _NotWidened):
        return None
    return f"(?i:{found})" if ignore_case else found


def _all(tree: Any, ignore_case: bool) -> str:
    return "".join([_one(op, value, ignore_case) for op, value in tree])


def _one(op: Any, value: Any, ignore_case: bool) -> str:
    match str(op):
        case "LITERAL":
            return _set([(op, value)], ignore_case)
        case "IN":
            return _set(value, ignore_case)
        case "ANY" | "NOT_LITERAL":
            return ANY
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            least, most, inner = value
            return f"(?:{_all(inner, ignore_case)}){{{least},{'' if most is _parser.MAXREPEAT else most}}}"
        case "SUBPATTERN":
            _, added, removed, inner = value
            if added or removed:
                raise _NotWidened
            return f"(?:{_all(inner, ignore_case)})"
        case "ATOMIC_GROUP":
            return f"(?:{_all(value, ignore_case)})"
        case "BRANCH":
            return f"(?:{'|'.join([_all(each, ignore_case) for each in value[1]])})"
        case "AT":
            return {"AT_BEGINNING": "^", "AT_BEGINNING_STRING": "^", "AT_END": "$", "AT_END_STRING": "$"}.get(
                str(value), ""
            )
        case "ASSERT" | "ASSERT_NOT":
            return ""
        case "GROUPREF":
            return f"{ANY}*"
        case _:
            raise _NotWidened


CATEGORIES = {"CATEGORY_DIGIT": r"\p{N}", "CATEGORY_WORD": r"\w\p{N}", "CATEGORY_SPACE": r"\s\x1c-\x1f\x85"}


def _set(items: Any, ignore_case: bool) -> str:
    parts = ""
    for op, value in items:
        match str(op):
            case "LITERAL":
                first = last = value
            case "RANGE":
                first, last = value
            case "CATEGORY" if str(value) in CATEGORIES:
                parts += CATEGORIES[str(value)]
                continue
            case _:
                return ANY
        if first <= REPLACED <= last or first <= 0x0A <= last or (ignore_case and last > 0x7F):
            if first == last == 0x0A:
                raise _NotWidened
            return ANY
        if 0xD800 <= first <= 0xDFFF or 0xD800 <= last <= 0xDFFF:
            raise _NotWidened
        parts += f"\\x{{{first:x}}}-\\x{{{last:x}}}"
        if ignore_case and any(first <= ord(each) <= last for each in "iI"):
            parts += "\u0130\u0131"  # which ripgrep does not take for an i
    return f"[{parts}]"


# ---------------------------------------------------------------------- the files


def is_recent(program: str) -> bool:
    """True if this ripgrep has at least version `OLDEST`. It is asked once, until its file changes."""
    try:
        changed = os.stat(program).st_mtime_ns
    except OSError:
        return False
    known = _recent.get(program)
    if known is None or known[0] != changed:
        known = _recent[program] = changed, _version(program) >= OLDEST
    return known[1]


def _version(program: str) -> int:
    try:
        done = subprocess.run(
            [program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.match(rb"ripgrep ([0-9]{1,9})\.", done.stdout)
    return int(found[1]) if found else 0


async def search_among(
    programs: Programs,
    ctx: ToolContext[Any],
    cwd: str,
    query: Query,
    work: Callable[[Iterator[str]], Any],
) -> Any | None:
    """What `work` makes of the paths, below a folder, of files that may match; None where ripgrep cannot tell.

    `work` runs on a thread, and begins with the first path. It need not take all of them.
    """
    pattern = widened(re.escape(query.pattern) if query.fixed else query.pattern, query.ignore_case)
    installed = shutil.which("rg", path=programs.of_host()["PATH"])
    if pattern is None or installed is None or not await asyncio.to_thread(is_recent, installed):
        return None
    hidden = ("--hidden",) if query.hidden else ()
    glob = (f"--glob={query.glob}",) if query.glob is not None and PLAIN_GLOB.fullmatch(query.glob) else ()
    program = Program(("rg", *FLAGS, *hidden, *glob, f"--regexp={pattern}", "--", "."), cwd, "tool")
    options = SpawnOptions(KEY, "rg", listed=False, timeout=SECONDS, output_limit=OUTPUT_BYTES)
    try:
        handle = await programs.run(ctx, program, options)
    except ToolError:
        return None  # the policy, or the machine, does not let it run: our own walk needs neither
    names: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    over = False

    def paths() -> Iterator[str]:
        nonlocal over
        while (name := names.get()) is not None:
            yield name
        over = True

    feeding = asyncio.ensure_future(_feed(handle, names))
    try:
        found = await asyncio.get_running_loop().run_in_executor(None, work, paths())
        if not over:
            await handle.cancel("enough was found")
            return found
        await feeding
        result = await handle.result()
    except StoreError:
        raise
    except PerdureError:
        return None  # its output cannot be read
    finally:
        names.put(None)
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
    complete = result.status == "exited" and (result.exit_code in (0, 1) or not result.stderr)
    return found if complete else None


async def _feed(handle: CommandHandle, names: queue.SimpleQueue[str | None]) -> None:
    """Hand over paths as ripgrep writes them: a path, NUL, a number, a line feed. A path may have line feeds in it, and
    what ends with one leaves ripgrep's buffer at once."""
    rest = b""
    try:
        async for chunk in handle.output("stdout", follow=True):
            rest += chunk
            done = 0
            for record in RECORD.finditer(rest):
                names.put(os.fsdecode(record[1]))
                done = record.end()
            rest = rest[done:]
    finally:
        names.put(None)
