"""Looking through the files of a workspace: which files there are, and where a pattern is in them.

Folders are read one at a time, each opened in the one above it without following links, so that what is visited is
below the place that was checked. Patterns are matched by a program of their own (`matcher.py`), which gets the bytes of
many files at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from perdure.errors import ToolError
from perdure.workspace.paths import GIT, Location, Paths

MATCHER = str(Path(__file__).with_name("matcher.py"))
SECONDS = 20
"""Of a CPU, for one search."""

BATCH_BYTES = 1024 * 1024
BATCH_FILES = 200
MAX_DEPTH = 100
MAX_IGNORE = 256 * 1024
SNIFFED = 8192


class Query(NamedTuple):
    pattern: str
    glob: str | None = None
    ignore_case: bool = False
    fixed: bool = False
    most: int = 200
    before: int = 0
    after: int = 0
    hidden: bool = False
    seconds: int = SECONDS


@dataclass(slots=True)
class Tally:
    """What a walk left out: files that may not be read, and names that are not UTF-8."""

    files: int = 0
    skipped: int = 0
    names: list[str] = field(default_factory=list)


def search(  # what one search needs, each by its place
    paths: Paths,
    place: Location,
    query: Query,
    found: Callable[[int], None],
    stop: Callable[[], bool],
    candidates: Iterator[str] | None = None,
) -> Any:
    """What `search` returns. `found` is told how many matches there are so far; `stop` ends it early. `candidates` are
    paths of files below the place, in order: no other file matches."""
    matches, tally, truncated = list[dict[str, Any]](), Tally(), False
    wanted = None if query.glob is None else glob_pattern(query.glob)
    with contextlib.closing(Matcher(query)) as matcher:
        matcher.begin()
        if candidates is None:
            files = walk(paths, place, query.hidden, tally)
        else:
            files = among(paths, place, query.hidden, tally, candidates)
        for batch in _batches(paths, files, wanted, tally):
            for text, line, column, words, before, after in matcher.ask(batch):
                match = {"path": batch[text].path, "line": line, "column": column, "text": words}
                context = {"before": before, "after": after} if query.before or query.after else {}
                matches.append({**match, **context})
            if len(matches) > query.most:
                truncated = True
                del matches[query.most :]
                break
            if matches:
                found(len(matches))
            if stop():
                raise ToolError("the search was cancelled", code="cancelled")
    answer: dict[str, Any] = {"matches": matches, "truncated": truncated}
    if candidates is None:
        answer["files_searched"] = tally.files
    if tally.skipped:
        answer["files_skipped"] = tally.skipped
    return answer


# ---------------------------------------------------------------------- files


class FilePiece(NamedTuple):
    """Bytes of a file from the beginning of a line on, and the number of that line."""

    path: str
    first: int
    data: bytes


def _batches(
    paths: Paths, files: Iterator[tuple[int, str, str]], wanted: re.Pattern[str] | None, tally: Tally
) -> Iterator[list[FilePiece]]:
    """Pieces of files, many at once; few at first, so that the first match is told soon."""
    batch, size, room = list[FilePiece](), 0, 1
    for folder, name, path in files:
        if wanted is not None and not wanted.fullmatch(path):
            continue
        try:
            descriptor = paths.open_file(folder, name)
        except (OSError, ToolError):
            tally.skipped += 1
            continue
        with open(descriptor, "rb", buffering=0) as file:
            tally.files += 1
            for piece in _pieces(file.fileno(), path):
                batch.append(piece)
                size += len(piece.data)
                if size >= BATCH_BYTES or len(batch) >= room:
                    yield batch
                    batch, size, room = [], 0, min(2 * room, BATCH_FILES)
    if batch:
        yield batch


def _pieces(descriptor: int, path: str) -> Iterator[FilePiece]:
    """A file in pieces that end with a line, as far as lines are shorter than a piece; nothing of a binary one."""
    left, first, rest = os.fstat(descriptor).st_size, 1, b""
    while left > 0 and (data := os.read(descriptor, min(BATCH_BYTES, left))):
        if first == 1 and not rest and b"\0" in data[:SNIFFED]:
            return
        left -= len(data)
        data = rest + data
        end = len(data) if left <= 0 or len(data) >= 4 * BATCH_BYTES else data.rfind(b"\n") + 1
        rest = data[end:]
        if end:
            yield FilePiece(path, first, data[:end])
            first += data.count(b"\n", 0, end)
    if rest:
        yield FilePiece(path, first, rest)


def walk(paths: Paths, place: Location, hidden: bool, tally: Tally) -> Iterator[tuple[int, str, str]]:
    """The files below a place, in order: the descriptor of the folder, the name in it, the path as it is shown."""
    try:
        folder = paths.open_folder(place.folder, place.name)
    except NotADirectoryError:
        yield place.folder, place.name, paths.shown(place)
        return
    try:
        yield from _walk(paths, place, folder, hidden, tally, ())
    finally:
        os.close(folder)


def _walk(
    paths: Paths, place: Location, folder: int, hidden: bool, tally: Tally, above: tuple[_Ignore, ...]
) -> Iterator[tuple[int, str, str]]:
    ignores = (*above, *_ignores(paths, folder, len(place.names)))
    with os.scandir(folder) as entries:
        found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries if not entry.is_symlink())
    for name, is_folder in found:
        inner = Location(place.root, (*place.names, name), folder)
        if _left_out(name, hidden):
            continue
        if any(0xDC80 <= ord(each) <= 0xDCFF for each in name):
            tally.skipped += 1
            continue
        if ignores and _ignored(ignores, inner.names, is_folder):
            continue
        try:
            paths.check(place.root, inner.names)
            if not is_folder:
                yield folder, name, paths.shown(inner)
                continue
            descriptor = paths.open_folder(folder, name)
        except (OSError, ToolError):
            tally.skipped += 1
            continue
        try:
            if len(inner.names) < MAX_DEPTH:
                yield from _walk(paths, inner, descriptor, hidden, tally, ignores)
            else:
                tally.skipped += 1
        finally:
            os.close(descriptor)


def among(
    paths: Paths, place: Location, hidden: bool, tally: Tally, candidates: Iterator[str]
) -> Iterator[tuple[int, str, str]]:
    """Those of some files that `walk` would come to, as it gives them. `candidates` are paths from the place on."""
    rules: dict[tuple[str, ...], tuple[_Ignore, ...] | None] = {}

    def rules_in(names: tuple[str, ...]) -> tuple[_Ignore, ...] | None:
        """The rules for what is in a folder; None where the folder is left out."""
        if names in rules:
            return rules[names]
        above = () if names == place.names else rules_in(names[:-1])
        if (
            above is not None
            and names != place.names
            and (_left_out(names[-1], hidden) or _ignored(above, names, True))
        ):
            above = None
        if above is not None:
            with contextlib.suppress(ToolError), paths.locate("/".join((place.root, *names, ".gitignore"))) as inner:
                above = (*above, *_ignores(paths, inner.folder, len(names)))
        rules[names] = above
        return above

    for each in candidates:
        names = (*place.names, *[name for name in each.split("/") if name not in ("", ".")])
        ignores = rules_in(names[:-1]) if len(names) <= MAX_DEPTH else None
        if ignores is None or _left_out(names[-1], hidden) or _ignored(ignores, names, False):
            continue
        try:
            with paths.locate("/".join((place.root, *names)), follow=False) as inner:
                yield inner.folder, inner.name, paths.shown(inner)
        except (OSError, ToolError):
            tally.skipped += 1


def _left_out(name: str, hidden: bool) -> bool:
    return (not hidden and name.startswith(".")) or GIT.fullmatch(name) is not None


class _Ignore(NamedTuple):
    """A line of a `.gitignore`: what it matches below the folder that has it, `depth` names down from the root."""

    pattern: re.Pattern[str]
    depth: int
    folders: bool
    back: bool


def _ignores(paths: Paths, folder: int, depth: int) -> Iterator[_Ignore]:
    try:
        with open(paths.open_file(folder, ".gitignore"), "rb", buffering=0) as file:
            text = file.read(MAX_IGNORE).decode(errors="replace")
    except (OSError, ToolError):
        return
    for line in text.splitlines():
        rule = line.rstrip().removeprefix("\\") if not line.startswith("#") else ""
        back, rule = rule.startswith("!"), rule.removeprefix("!")
        folders, rule = rule.endswith("/"), rule.rstrip("/")
        if rule:
            try:
                pattern = _translated(rule.lstrip("/"))
                compiled = re.compile(pattern if "/" in rule else f"(?:.*/)?{pattern}")
            except re.error:
                continue  # a line that cannot be understood ignores nothing
            yield _Ignore(compiled, depth, folders, back)


def _ignored(ignores: tuple[_Ignore, ...], names: tuple[str, ...], is_folder: bool) -> bool:
    for rule in reversed(ignores):
        if (is_folder or not rule.folders) and rule.pattern.fullmatch("/".join(names[rule.depth :])):
            return not rule.back
    return False


def glob_pattern(glob: str) -> re.Pattern[str]:
    """A glob as a pattern: one with a slash is about the whole path, one without about a name at any depth."""
    try:
        patterns = []
        for each in _expanded(glob):
            pattern = _translated(each.strip("/"))
            patterns.append(pattern if "/" in each.rstrip("/") else f"(?:.*/)?{pattern}")
        return re.compile("|".join(patterns))
    except re.error as error:
        raise ToolError(f"the glob {glob!r} is not usable: {error}", code="invalid_pattern") from None


def _expanded(glob: str) -> list[str]:
    """The globs that one with braces stands for: `*.{js,ts}` is two."""
    found = [glob]
    while any(match := re.search(r"\{([^{}]*)\}", each) for each in found) and match is not None:
        found = [
            each.replace(match[0], chosen, 1) if match[0] in each else each
            for each in found
            for chosen in (match[1].split(",") if match[0] in each else [""])
        ]
        if len(found) > MAX_GLOBS:
            raise re.error(f"it stands for more than {MAX_GLOBS} globs")
    return found


MAX_GLOBS = 64
MAX_ANY = 3
"""How often a glob may say `**`: each one more multiplies the time that a path can take."""


def _translated(glob: str) -> str:
    """A glob as a regular expression: `*` and `?` stay inside of a name, `**` is any number of folders."""
    segments = glob.split("/")
    if sum("**" in each for each in segments) > MAX_ANY:
        raise re.error(f"it has more than {MAX_ANY} **")
    parts = list[str]()
    for segment in segments:
        parts.append("(?:[^/]+/)*" if segment == "**" else f"{_segment(segment)}/")
    last = parts.pop()
    return "".join(parts) + (".*" if segments[-1] == "**" else last[:-1])


def _segment(segment: str) -> str:
    """One name. What follows a star is searched once, for good: time stays linear, however many stars there are."""
    literals = [""]
    index = 0
    while index < len(segment):
        letter = segment[index]
        if letter == "*":
            if literals[-1] or len(literals) == 1:
                literals.append("")
        elif letter == "?":
            literals[-1] += "[^/]"
        elif letter == "[" and (end := segment.find("]", index + 2)) > 0:
            # Of the signs that have a meaning in a set, a glob knows `-` alone, and not two of them.
            chosen = re.sub(r"[\\\[&|~]", r"\\\g<0>", segment[index + 1 : end]).replace("--", r"\-\-")
            literals[-1] += f"[{'^' + chosen[1:] if chosen[0] in '!^' else chosen}]"
            index = end
        else:
            literals[-1] += re.escape(letter)
        index += 1
    first, *rest = literals
    middle = "".join(f"(?>[^/]*?{each})" for each in rest[:-1])
    return first + middle + (f"[^/]*{rest[-1]}" if rest else "")


# ---------------------------------------------------------------------- matching


class Matcher:
    """The program that matches, at work: what it is given, and what it finds there. `begin` and `ask` wait for it."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", MATCHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
        )

    def begin(self) -> None:
        """Give it the pattern. Raises ToolError where that is not usable."""
        query = self._query
        asked = {
            "pattern": re.escape(query.pattern) if query.fixed else query.pattern,
            "ignore_case": query.ignore_case,
            "before": query.before,
            "after": query.after,
            "most": query.most + 1,
            "seconds": query.seconds,
        }
        error = self._exchange(json.dumps(asked).encode() + b"\n").get("error")
        if error is not None:
            raise ToolError(f"the pattern is not usable: {error}; fixed=true takes it as it is", code="invalid_pattern")

    def ask(self, batch: list[FilePiece]) -> list[Any]:
        """Matches, each with the number of its piece, line, column, the line itself, lines before and after it."""
        sizes = json.dumps([[piece.first, len(piece.data)] for piece in batch])
        return self._exchange(sizes.encode() + b"\n", *[piece.data for piece in batch])  # type: ignore[no-any-return]

    def _exchange(self, *parts: bytes) -> Any:
        given, told = self._child.stdin, self._child.stdout
        assert given is not None
        assert told is not None
        try:
            for part in parts:
                given.write(part)
            given.flush()
            line = told.readline()
        except (OSError, ValueError):  # it has ended, or was closed meanwhile
            line = b""
        if not line:
            raise ToolError(
                f"the search took more than {self._query.seconds} s of a CPU: give a simpler pattern, or fewer files",
                code="search_too_long",
            )
        return json.loads(line)

    def close(self) -> None:
        """End it, also while it is asked on another thread."""
        self._child.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._child.wait()
