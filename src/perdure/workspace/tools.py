"""The tools of a workspace: one set, a `ToolProvider`, whose paths all go through `Paths`. Those for files are here;
others, which run programs, are parts that are given to it (`commands.py`, `git.py`).

How a change of a file survives a crash:

    prepare     read the file, work out what it will be, keep what it was in the store; nothing is changed
    (start)     the runtime records the call with its `EditPlan`: the digests of the content before and after
    execute     the file as it is now decides:
                    as before       put the new content in its place
                    as after        an attempt that was killed has done it already: say so
                    anything else   first attempt: nothing was done, and the model is told that the file has changed;
                                    a repeated one: the outcome is unknown, because the change may have come between

So a call that is repeated changes nothing twice, and is unknown only where the digests do not decide. All others have
no effect, or the same again.

Calls of one reply run at once. Those that change the same file take turns from their preparation on (`_Claims`): the
second one is prepared on what the first one left. A claim is a courtesy and ends after a while, because a call that was
prepared may never run; without it, the digests refuse the second call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import stat
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

from msgspec import ValidationError
from msgspec.structs import replace as with_changes

from perdure.engine.control import CANCEL_GRACE
from perdure.errors import ToolError, UndoRefused
from perdure.model.codec import convert
from perdure.model.edit import PAYLOAD, EditPlan, FileRestore, UndoneFile
from perdure.model.secrets import Marks, hide_argv
from perdure.model.tool import OutcomeUnknown, OutputBudget, PreparedCall, ToolSpec
from perdure.ports.tool import CallContext
from perdure.tools.attempt import EndsAs
from perdure.tools.context import ToolContext
from perdure.tools.define import Tool, tool
from perdure.workspace import files
from perdure.workspace.files import Content
from perdure.workspace.paths import Location, Paths, telling
from perdure.workspace.policy import load_parsers
from perdure.workspace.reading import Unit, outline, shown_file
from perdure.workspace.ripgrep import search_among
from perdure.workspace.search import Query, search
from perdure.workspace.spawning import Programs, ToolPart

R = TypeVar("R")

READ_BUDGET = OutputBudget(96 * 1024, 2100)
MAX_ENTRIES = 1000
CLAIM_SECONDS = 10.0
MAX_REMEMBERED = 8 * 1024 * 1024
"""Bytes of a file that stay in memory from the preparation of a change to its execution, to be compared with."""


async def _in_thread(work: Callable[[], R]) -> R:
    """Run blocking work without effects on a thread."""
    return await asyncio.get_running_loop().run_in_executor(None, work)


async def _to_its_end(work: Callable[[], R]) -> R:
    """Run a change on a thread. A caller that is cancelled waits a moment for its end, and gets what it returned: a
    thread cannot be stopped, and what it did is not left unknown."""
    working = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working}, timeout=CANCEL_GRACE)
        if not working.done():
            working.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        return working.result()


@dataclass(frozen=True, slots=True)
class _Change:
    """What a tool makes of a file: `new` is its content from now on, None where it is deleted. The first `same` bytes
    are as they were."""

    new: bytes | None
    answer: dict[str, Any]
    same: int = 0


@dataclass(slots=True)
class _Claim:
    """A call that is about to change a file. `seen` and `change` are what its preparation found and made of it."""

    call_id: str
    until: float
    over: asyncio.Event = field(default_factory=asyncio.Event)
    seen: Content | None = None
    change: _Change | None = None

    def remember(self, seen: Content | None, change: _Change) -> None:
        if seen is None or seen.size <= MAX_REMEMBERED:
            self.seen, self.change = seen, change


class _Claims:
    """Which call is about to change a file. Lives on one event loop."""

    def __init__(self, seconds: float) -> None:
        self._held: dict[str, _Claim] = {}
        self._seconds = seconds

    async def take(self, path: str, call_id: str) -> _Claim:
        now = asyncio.get_running_loop().time
        while (held := self._held.get(path)) is not None and held.call_id != call_id and held.until > now():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(held.until):
                    await held.over.wait()
        if held is None or held.call_id != call_id:
            held = self._held[path] = _Claim(call_id, now() + self._seconds)
        return held

    def release(self, path: str, call_id: str) -> None:
        held = self._held.get(path)
        if held is not None and held.call_id == call_id:
            del self._held[path]
            held.over.set()


class FileTools:
    """The tools for the files of a workspace: `Agent(tools=[Workspace(roots=["."]).tools()])`.

    `parts` are more tools of it, which run programs.
    """

    def __init__(
        self,
        paths: Paths,
        claim_seconds: float = CLAIM_SECONDS,
        programs: Programs | None = None,
        parts: Sequence[ToolPart] = (),
    ) -> None:
        self._paths, self._claim_seconds, self._programs = paths, claim_seconds, programs
        self._sparing: dict[str, Paths] = {}
        self._claims: WeakKeyDictionary[asyncio.AbstractEventLoop, _Claims] = WeakKeyDictionary()
        tools: tuple[Tool[..., Any], ...] = (
            self.read_file, self.write_file, self.edit_file, self.delete_file,
            self.list_directory, self.search, self.file_outline,
        )  # fmt: skip
        self._tools = {each.spec.name: each for each in tools}
        self._parts = {name: part for part in parts for name in part.tools}
        for part in parts:
            self._tools |= part.tools

    def _allowed(self, store: str | None) -> Paths:
        """The paths of the workspace without those of a store."""
        found = self._sparing.get(store or "")
        if found is None:
            found = self._sparing[store or ""] = self._paths.sparing(store)
        return found

    def _claims_here(self) -> _Claims:
        loop = asyncio.get_running_loop()
        found = self._claims.get(loop)
        if found is None:
            found = self._claims[loop] = _Claims(self._claim_seconds)
        return found

    def specs(self) -> Sequence[ToolSpec]:
        """What a model is shown."""
        return [each.spec for each in self._tools.values()]

    async def prepare(self, call: PreparedCall, ctx: CallContext) -> PreparedCall:
        """Work out what a call will change, and keep what was there."""
        kwargs, context = self._tools[call.name].bind(call.args), cast("ToolContext[Any]", ctx)
        part = self._parts.get(call.name)
        if part is not None:
            program = await part.program(call.name, kwargs, context)
            assert self._programs is not None
            return call if program is None else self._programs.prepare(call, program, context)
        change = CHANGES.get(call.name)
        if change is None:
            return call
        paths = self._allowed(context.store_location)
        # Not on a thread: calls of one reply claim their files in the order in which the model asked.
        path = _resolved(paths, kwargs["path"], follow=call.name != "delete_file")
        claims = self._claims_here()
        claim = await claims.take(path, call.call_id)
        try:
            plan, data = await _in_thread(functools.partial(_plan, paths, path, change, kwargs, claim))
            if data is not None:
                plan = with_changes(plan, kept=await _kept(context, data, plan.before))
        except BaseException:  # also a cancellation: a claim that stays would hold up the next call
            claims.release(path, call.call_id)
            raise
        return with_changes(call, payload={PAYLOAD: plan})

    def shown_args(self, call: PreparedCall, marks: Marks) -> Mapping[str, Any]:
        """What plugins and events see: the arguments without the secrets of a command. What is written to files is
        shown as it is, because plugins guard that, too."""
        return {**call.args, **_without_secrets(call.name, call.args, marks)}

    async def execute(self, call: PreparedCall, ctx: CallContext) -> Any:
        """Run a tool."""
        made, context = self._tools[call.name], cast("ToolContext[Any]", ctx)
        kwargs = made.bind(call.args)
        if call.name not in CHANGES:
            return await made.invoke(kwargs, context)
        plan = read_plan(call.payload)
        if plan is None:
            raise ToolError("the call was not prepared, and nothing was changed: call it again", code="not_prepared")
        paths, claims = self._allowed(context.store_location), self._claims_here()
        claim = await claims.take(plan.path, call.call_id)
        try:
            work = functools.partial(_apply, paths, plan, CHANGES[call.name], kwargs, context, claim)
            return await _to_its_end(work)
        finally:
            claims.release(plan.path, call.call_id)

    # ------------------------------------------------------------------ undoing

    def load_parsers(self) -> None:
        """Load what judges command lines. Tools for files alone need none of it."""
        if self._programs is not None:
            load_parsers()

    def covers(self, path: str) -> bool:
        """Whether a path is one of this workspace."""
        return self._paths.covers(path)

    async def restore(
        self, wanted: Sequence[FileRestore], earlier: Mapping[str, bytes], store: str | None
    ) -> list[UndoneFile]:
        """Bring files back to what they were, all of them or, where one is not as an edit left it, none.

        `earlier` is the content that their targets name.
        """
        paths = self._allowed(store)
        claims = self._claims_here()
        for each in wanted:
            await claims.take(each.path, "undo")
        try:
            work = functools.partial(_restore_all, paths, wanted, earlier)
            working = asyncio.get_running_loop().run_in_executor(None, work)
            try:
                return await asyncio.shield(working)
            except asyncio.CancelledError:  # the host's: it is told when the files are at rest
                await asyncio.wait({working})
                raise
        finally:
            for each in wanted:
                claims.release(each.path, "undo")

    # ------------------------------------------------------------------ the tools

    @tool(recovery="rerun", output_budget=READ_BUDGET)
    async def read_file(
        self, path: str, ctx: ToolContext[Any], offset: int = 0, limit: int | None = None, unit: Unit = "lines"
    ) -> Any:
        """Read a file, or a part of it. Pictures and PDFs are shown as such.

        Args:
            path: The file.
            offset: The first line (from 1), or the first byte (from 0) with unit="bytes".
            limit: How many lines or bytes at most.
            unit: What offset and limit count.
        """
        if offset < 0 or (limit is not None and limit < 1):
            raise ToolError("offset is 0 or more, and limit 1 or more", code="invalid_tool_args")
        return await self._at(path, ctx, lambda paths, place: shown_file(paths, place, offset, limit, unit))

    @tool(recovery="rerun")
    async def write_file(
        self, path: str, content: str, create_parents: bool = True, overwrite: bool = True
    ) -> dict[str, Any]:
        """Write a file, in place of what it held.

        Args:
            path: The file.
            content: All of what it is to hold.
            create_parents: Make the folders that are missing on the way.
            overwrite: Replace a file that is there; false refuses.
        """
        raise NotImplementedError  # `execute` applies the change that was prepared

    @tool(recovery="rerun")
    async def edit_file(self, path: str, old_text: str, new_text: str, replace_all: bool = False) -> dict[str, Any]:
        """Replace a text in a file by another one.

        Args:
            path: The file.
            old_text: What is there now, exactly, and enough of it to be there once.
            new_text: What is to be there instead.
            replace_all: Replace it wherever it is.
        """
        raise NotImplementedError  # `execute` applies the change that was prepared

    @tool(recovery="rerun")
    async def delete_file(self, path: str) -> dict[str, Any]:
        """Delete a file, or a link itself.

        Args:
            path: The file.
        """
        raise NotImplementedError  # `execute` applies the change that was prepared

    @tool(recovery="rerun")
    async def list_directory(
        self, ctx: ToolContext[Any], path: str = ".", include_hidden: bool = False, max_entries: int = 200
    ) -> dict[str, Any]:
        """List what is in a folder, in the order of the names.

        Args:
            path: The folder.
            include_hidden: Also what begins with a dot.
            max_entries: How many entries at most.
        """
        most = max(1, min(max_entries, MAX_ENTRIES))
        return await self._at(path, ctx, lambda paths, place: _listed(paths, place, include_hidden, most))

    @tool(recovery="rerun")
    async def search(  # noqa: PLR0913  # what a model may say, each by name
        self,
        pattern: str,
        ctx: ToolContext[Any],
        path: str = ".",
        glob: str | None = None,
        ignore_case: bool = False,
        fixed: bool = False,
        max_matches: int = 100,
        context_before: int = 0,
        context_after: int = 0,
        include_hidden: bool = False,
    ) -> dict[str, Any]:
        """Search the lines of files for a pattern. What `.gitignore` files name is left out, and so are binary files.

        Args:
            pattern: A regular expression of Python.
            path: The folder to look in, or one file.
            glob: Only files of this kind: "*.py", "src/**/*.ts".
            ignore_case: Take capital and small letters for the same.
            fixed: Take the pattern as a text, not as a regular expression.
            max_matches: How many matches at most.
            context_before: Lines to show before each match.
            context_after: Lines to show after each match.
            include_hidden: Also files and folders that begin with a dot.
        """
        if not pattern or not all(0 <= each <= 20 for each in (context_before, context_after)):
            raise ToolError("give a pattern, and 0 to 20 lines of context", code="invalid_tool_args")
        most = max(1, min(max_matches, MAX_ENTRIES))
        query = Query(pattern, glob, ignore_case, fixed, most, context_before, context_after, include_hidden)

        def found(count: int) -> None:
            ctx.progress({"matches": count})

        def work(paths: Paths, place: Location, candidates: Iterator[str] | None = None) -> Any:
            return search(paths, place, query, found, lambda: ctx.cancelled, candidates)

        paths, programs, folder = self._allowed(ctx.store_location), self._programs, None
        if programs is not None:
            with contextlib.suppress(ToolError):  # where it is one file, or nothing, there is nothing to narrow down
                folder = programs.folder(path, ctx.store_location)
        if programs is not None and folder is not None:

            def narrowed(candidates: Iterator[str]) -> Any:
                with paths.locate(path) as place, telling(path):
                    return work(paths, place, candidates)

            answer = await search_among(programs, ctx, folder, query, narrowed)
            if answer is not None:
                return cast("dict[str, Any]", answer)
        return await self._at(path, ctx, work)

    @tool(recovery="rerun")
    async def file_outline(self, path: str, ctx: ToolContext[Any]) -> dict[str, Any]:
        """List the classes and functions of a source file, or the headings of a Markdown text, with their lines.

        Args:
            path: The file.
        """
        return await self._at(path, ctx, outline)

    async def _at(self, path: str, ctx: ToolContext[Any], work: Callable[[Paths, Location], R]) -> R:
        paths = self._allowed(ctx.store_location)

        def run() -> R:
            with paths.locate(path) as place, telling(path):
                return work(paths, place)

        return await _in_thread(run)


def _without_secrets(name: str, args: Mapping[str, Any], marks: Marks) -> dict[str, Any]:
    """The arguments of a call that may hold secrets, with marks in their place. What is typed into a command is one as
    a whole: nothing tells an answer to a question for a password from any other."""
    if name == "write_stdin":
        text = args.get("text")
        return {"text": marks.mark(text)} if text and isinstance(text, str) else {}
    command = args.get("command")
    if isinstance(command, str):
        return {"command": marks.hide(command)}
    if isinstance(command, list) and all(isinstance(each, str) for each in command):
        return {"command": hide_argv(command, marks)}
    return {}


def read_plan(payload: Any) -> EditPlan | None:
    """The plan in a payload, if there is one."""
    try:
        return convert(payload[PAYLOAD], EditPlan)
    except (TypeError, KeyError, ValidationError):
        return None


# ---------------------------------------------------------------------- changes

ChangePlan: TypeAlias = Callable[[str, Content | None, dict[str, Any]], _Change]
"""What becomes of a file: its path as it is shown, what is there, and the arguments of the tool; or a ToolError."""


def _resolved(paths: Paths, path: str, follow: bool) -> str:
    with paths.locate(path, change=True, follow=follow, missing=True) as place:
        return place.path


def _plan(
    paths: Paths, path: str, change: ChangePlan, kwargs: dict[str, Any], claim: _Claim
) -> tuple[EditPlan, bytes | None]:
    """What will become of a file, and what it holds now, where that is to be kept."""
    with paths.locate(path, change=True, follow=False, missing=True) as place, telling(path):
        if place.folder < 0 and not _makes_folders(kwargs):
            raise ToolError(f"{paths.shown(place)}: there is no such file or folder", code="not_found")
        now = files.content(paths, place, files.MAX_EDIT, digested=change is not _edited)
        shown = paths.shown(place)
        made = change(shown, now, kwargs)
    after = None
    if now is not None and now.data is not None and made.new is not None and not now.digest:
        before, after = files.digests(now.data, made.new, made.same)
        now = now._replace(digest=before)
    elif made.new is not None:
        after = hashlib.sha256(made.new).hexdigest()
    claim.remember(now, made)
    if now is None:
        return EditPlan(path, None, after, shown=shown), None
    data = now.data if now.size <= files.MAX_KEPT else None
    return EditPlan(path, now.digest, after, False, now.mode, shown), data


def _makes_folders(kwargs: dict[str, Any]) -> bool:
    return "content" in kwargs and kwargs.get("create_parents", True)


async def _kept(context: ToolContext[Any], data: bytes, digest: str | None) -> bool:
    """Whether the earlier content is in the store as it was: filters of the session may not let it."""
    try:
        kept = await context.artifacts.put(data, name="content before the change")
    except ToolError:
        return False
    return kept.digest == digest


def _apply(  # what one change needs, each by its place
    paths: Paths, plan: EditPlan, change: ChangePlan, kwargs: dict[str, Any], ctx: ToolContext[Any], claim: _Claim
) -> dict[str, Any]:
    with paths.locate(plan.path, change=True, follow=False, make=_makes_folders(kwargs)) as place, telling(plan.path):
        shown = paths.shown(place)
        now = files.content(paths, place, files.MAX_EDIT, claim.seen)
        digest = None if now is None else now.digest
        if digest == plan.after and plan.before != plan.after:
            return {"path": shown, "done_before": True} if ctx.attempt > 1 else {"path": shown, "unchanged": True}
        if digest != plan.before:
            if ctx.attempt > 1:
                raise EndsAs(OutcomeUnknown(f"{shown} is neither as it was before the call nor as the call leaves it"))
            raise ToolError(f"{shown} has changed since the call began, and was left alone", code="file_changed")
        made = claim.change or change(shown, now, kwargs)
        if made.new is None:
            if now is not None:
                files.remove(place)
        elif now is None or made.new != now.data:
            files.replace(place, made.new, ctx.idempotency_key, None if now is None else now.mode, new=now is None)
        return made.answer


def _written(path: str, now: Content | None, kwargs: dict[str, Any]) -> _Change:
    _no_link(path, now)
    if now is not None and not kwargs.get("overwrite", True):
        raise ToolError(f"{path} is there already: edit it, or write it with overwrite=true", code="file_exists")
    data = kwargs["content"].encode()
    return _Change(data, {"path": path, "size": len(data), "created": now is None})


def _no_link(path: str, now: Content | None) -> None:
    if now is not None and now.digest.startswith("link:"):  # the link was followed before: it is new, or leads nowhere
        raise ToolError(f"{path} has become a link, and was left alone", code="file_changed")


def _edited(path: str, now: Content | None, kwargs: dict[str, Any]) -> _Change:
    old, new = kwargs["old_text"], kwargs["new_text"]
    if not old or old == new:
        raise ToolError("old_text is a text, and new_text another one", code="invalid_tool_args")
    _no_link(path, now)
    if now is None:
        raise ToolError(f"{path}: there is no such file; write_file makes one", code="not_found")
    if now.data is None:
        raise ToolError(
            f"{path} has {now.size:,} bytes; files of up to {files.MAX_EDIT:,} can be edited", code="file_too_large"
        )
    data, count, same = files.edited(now.data, old, new, kwargs.get("replace_all", False), path)
    return _Change(data, {"path": path, "replaced": count, "size": len(data)}, same)


def _deleted(path: str, now: Content | None, kwargs: dict[str, Any]) -> _Change:
    return _Change(None, {"path": path, "removed": now is not None})


CHANGES: dict[str, ChangePlan] = {"write_file": _written, "edit_file": _edited, "delete_file": _deleted}
"""What each tool makes of a file that it changes."""


# ---------------------------------------------------------------------- undoing


def _restore_all(paths: Paths, wanted: Sequence[FileRestore], earlier: Mapping[str, bytes]) -> list[UndoneFile]:
    refused = dict[str, str]()
    for each in wanted:
        with _reasons(refused, each.path), paths.locate(each.path, change=True, follow=False, missing=True) as place:
            _ = _state(paths, place, each)
    if refused:
        raise UndoRefused(refused)
    done = list[UndoneFile]()
    for each in wanted:
        with _reasons(refused, each.path):
            done.append(_restore(paths, each, earlier))
        if refused:  # it was changed since all of them were looked at
            raise UndoRefused(refused, [one.path for one in done])
    return done


@contextlib.contextmanager
def _reasons(refused: dict[str, str], path: str) -> Generator[None, None, None]:
    try:
        yield
    except ToolError as error:
        refused[path] = error.message


def _state(paths: Paths, place: Location, wanted: FileRestore) -> Content | None:
    """What a file is now. Raises ToolError unless an edit left it so, or it is as it was before the edits."""
    with telling(wanted.path):
        now = files.content(paths, place, files.MAX_EDIT)
    digest = None if now is None else now.digest
    if digest != wanted.target and digest not in wanted.states:
        raise ToolError(f"{wanted.path} is no longer what the edit left", code="file_changed")
    return now


def _restore(paths: Paths, wanted: FileRestore, earlier: Mapping[str, bytes]) -> UndoneFile:
    make = wanted.target is not None
    with paths.locate(wanted.path, change=True, follow=False, missing=not make, make=make) as place:
        now = _state(paths, place, wanted)
        if (None if now is None else now.digest) == wanted.target:
            return UndoneFile(wanted.path, "unchanged")
        with telling(wanted.path):
            if wanted.target is None:
                files.remove(place)
            else:
                files.replace(place, earlier[wanted.target], "undo", wanted.mode, new=now is None)
        return UndoneFile(wanted.path, "undone")


# ---------------------------------------------------------------------- listing


def _listed(paths: Paths, place: Location, hidden: bool, most: int) -> dict[str, Any]:
    folder = paths.open_folder(place.folder, place.name)
    try:
        with os.scandir(folder) as entries:
            count = 0

            def names() -> Iterator[str]:
                nonlocal count
                for entry in entries:
                    if hidden or not entry.name.startswith("."):
                        with contextlib.suppress(ToolError):  # what is off limits is not shown either
                            paths.check(place.root, (*place.names, entry.name))
                            count += 1
                            yield entry.name

            first = nsmallest(most, names())
        return {
            "path": paths.shown(place),
            "entries": [_entry(folder, name) for name in first],
            "truncated": count > most,
            "count": count,
        }
    finally:
        os.close(folder)


def _entry(folder: int, name: str) -> dict[str, Any]:
    shown = os.fsencode(name).decode(errors="replace")
    entry: dict[str, Any] = {"name": shown}
    if shown != name:
        entry["not_utf8"] = True
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        kind = "file" if stat.S_ISREG(found.st_mode) else "other"
        if stat.S_ISDIR(found.st_mode):
            kind = "folder"
        elif stat.S_ISLNK(found.st_mode):
            kind, target = "link", os.readlink(name, dir_fd=folder)
            entry["target"] = os.fsencode(target).decode(errors="replace")
    except OSError:
        return {**entry, "kind": "gone"}
    return {**entry, "kind": kind, **({"size": found.st_size} if kind == "file" else {})}
