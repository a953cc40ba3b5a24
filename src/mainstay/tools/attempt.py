"""One attempt of one call: the body runs, whatever it does becomes an outcome."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from mainstay.engine.admission import Capacity, Needs
from mainstay.engine.gate import CANCEL_GRACE
from mainstay.engine.threads import Threads
from mainstay.errors import InvalidInput, Retry, ToolError
from mainstay.model.codec import MAX_VALUE, clean, encode, error_text, model_text
from mainstay.model.effect import AskedCall
from mainstay.model.media import FILES, File, FileRef, Inline, Local, Stored
from mainstay.model.own import own
from mainstay.model.tool import BlobRef, Failed, Ok, OutcomeUnknown, OutputBudget, ToolOutcome, ToolSpec
from mainstay.plugins.turn import Projected
from mainstay.stores.blobs import host_pieces
from mainstay.tools import output
from mainstay.tools.context import ToolContext
from mainstay.tools.prepare import Ready, failure

log = logging.getLogger("mainstay.tools")


class Keeps(Protocol):
    """Keeps bytes beside the store and gives their digest; of a file of the host, also its size."""

    async def keep(self, data: bytes) -> str: ...

    async def keep_file(self, path: str) -> tuple[str, int]: ...


Look: TypeAlias = Callable[[ToolOutcome], Awaitable[ToolOutcome]]
"""What plugins make of how a call ended, before anything of it is kept."""

Project: TypeAlias = Callable[[ToolOutcome], Awaitable[Projected]]
"""What a plugin lets the model see of a result."""


FilterFile: TypeAlias = Callable[[str, bytes, str], bytes]
"""The bytes of a file of this name and media type as filters let them be kept. Raises ToolError where they do not."""


class Outlet(Struct, frozen=True, gc=False):
    """Where what a call returns goes: past `look`, to the model as far as `budget` allows, and whole to `keep`.

    The bytes of its files pass `filter_file` before they are put.
    """

    keeps: Keeps
    budget: OutputBudget
    look: Look | None = None
    project: Project | None = None
    filter_file: FilterFile | None = None


def needs_of(spec: ToolSpec) -> Needs:
    """What an attempt of this tool takes a place of: at most `limit` calls of it, one call at a time for a resource."""
    needs: Needs = ()
    if spec.limit is not None:
        needs = (Capacity(f"tool {spec.name}", spec.limit),)
    if spec.resource is not None:
        needs = (*needs, Capacity(f"resource {spec.resource}", 1))
    return needs


class EndsAs(Exception):
    """Raised by tools of ours that know an outcome which is neither a value nor a failure."""

    def __init__(self, outcome: ToolOutcome) -> None:
        self.outcome = outcome
        super().__init__(type(outcome).__name__)


class Again(Struct, frozen=True, gc=False):
    """The tool said that running it again is safe, or its contract allows it after a timeout."""

    failed: Failed
    after: float | None
    otherwise: ToolOutcome


class Asking(Struct, frozen=True, gc=False):
    """A call that may run with these arguments once a person has said so."""

    call: AskedCall
    reason: str


class Attempted(Struct, frozen=True, gc=False):
    """How an attempt ended, what it refers to, and whether the tool deferred its completion.

    `asks`: it did not begin, and waits for a person; `end` says nothing then. `withheld` is shown to the model in place
    of a result that a plugin failed to project.
    """

    end: ToolOutcome | Again
    blobs: tuple[str, ...] = ()
    deferred: bool = False
    due: float | None = None
    asks: Asking | None = None
    withheld: str = ""


class Interrupted(Struct):
    """Why a body was cancelled from outside, if it was: set before the cancel reaches it.

    `over`: the body has returned, there is nothing to cancel any more. `acknowledged`: an answer from outside that was
    acknowledged says how the call ended: it is recorded, however long plugins look at it.
    """

    reason: str | None = None
    timed_out: bool = False
    over: bool = False
    acknowledged: bool = False


async def attempt(
    ready: Ready,
    ctx: ToolContext[Any],
    threads: Threads,
    outlet: Outlet,
    interrupted: Interrupted,
    ended: Callable[[], None] | None = None,
) -> Attempted:
    """Run the body once. Never raises: a tool may do anything and harms nobody but its own call.

    `ended` is called when a sync body's thread has really ended, also after the call was given up.
    """
    try:
        value = await _run(ready, ctx, threads, ended)
    except asyncio.CancelledError:
        return Attempted(_cut_off(ready, interrupted))
    except Retry as retry:
        failed = failure(retry)
        return Attempted(Again(failed, retry.after, failed))
    except ToolError as error:
        return Attempted(failure(error))
    except EndsAs as end:
        return Attempted(end.outcome)
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a tool end the tool only
        log.warning("tool %s raised %s", ctx.tool, type(error).__name__, exc_info=error)
        return Attempted(Failed("tool_raised", f"{type(error).__name__}: {model_text(error)}"))
    interrupted.over = True
    return await returned(value, outlet)


async def _run(ready: Ready, ctx: ToolContext[Any], threads: Threads, ended: Callable[[], None] | None) -> Any:
    tool = ready.entry.tool
    if tool is None:
        assert ready.entry.provider is not None
        return await ready.entry.provider.execute(own(ready.call), ctx)
    kwargs = ready.kwargs if ready.kwargs is not None else {}
    if tool.is_async:
        return await tool.invoke(kwargs, ctx)

    return await _on_thread(functools.partial(tool.invoke, kwargs, ctx), threads, ended or _nobody)


def _nobody() -> None:
    """Nobody wants to know that a thread has ended."""


async def _on_thread(invoke: Callable[[], Any], threads: Threads, ended: Callable[[], None]) -> Any:
    def work() -> Any:
        value = None
        try:
            value = invoke()
            return value
        finally:
            if not inspect.isawaitable(value):
                ended()

    try:
        future = threads.run(work)
    except RuntimeError as error:  # no more threads: it has not begun, and holds nothing
        ended()
        raise ToolError(f"the tool could not be started: {error}", code="no_thread") from None
    try:
        value = await asyncio.shield(future)
    except asyncio.CancelledError:
        if future.done():
            raise  # the tool's own
        # A thread cannot be stopped, but it may look at `ctx.cancelled` and say how far it came.
        await asyncio.wait({future}, timeout=CANCEL_GRACE)
        future.add_done_callback(functools.partial(_look_at, ended))
        if not future.done() or _unawaited(future):
            raise
        return future.result()
    if not inspect.isawaitable(value):
        return value
    try:
        return await value  # a plain wrapper around an async function gives what is still to be awaited
    finally:
        ended()


def _unawaited(future: asyncio.Future[Any]) -> bool:
    return not future.cancelled() and future.exception() is None and inspect.isawaitable(future.result())


def _look_at(ended: Callable[[], None], future: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more: looked at, so that asyncio does not complain; what it gave is not awaited."""
    if _unawaited(future):
        if inspect.iscoroutine(future.result()):
            future.result().close()
        ended()


def _cut_off(ready: Ready, interrupted: Interrupted) -> ToolOutcome | Again:
    """A started body that was stopped: nobody knows how far it came."""
    if interrupted.reason is None:
        return Failed("tool_raised", "CancelledError: the tool cancelled itself")
    unknown = OutcomeUnknown(interrupted.reason)
    if interrupted.timed_out and ready.entry.spec.recovery == "rerun":
        return Again(Failed("timeout", interrupted.reason), None, unknown)
    return unknown


async def returned(value: Any, outlet: Outlet) -> Attempted:
    """What the tool returned as JSON within the output budget; what did not fit is kept whole beside it."""
    try:
        value, files = await _saved(value, outlet)
        plain = clean(value)
    except InvalidInput as error:
        return Attempted(Failed("invalid_output", str(error)))
    except BaseException as error:  # its own methods ran, and are no more to be trusted than the tool
        return Attempted(Failed("invalid_output", f"{type(error).__name__}: {error_text(error)}"))
    encoded = encode(plain)
    if len(encoded) > MAX_VALUE:
        return Attempted(
            Failed("output_too_large", f"the result has {len(encoded):,} bytes, the limit is {MAX_VALUE:,}")
        )
    if outlet.look is not None:
        seen = await outlet.look(Ok(plain, files=files))
        if not isinstance(seen, Ok):
            return Attempted(seen)
        plain, encoded, files = seen.value, encode(seen.value), seen.files
    withheld = ""
    if outlet.project is not None:
        seen_by_model = await outlet.project(Ok(plain, files=files))
        withheld = seen_by_model.withheld
        if not withheld:
            return await _kept(seen_by_model.value, plain, encoded, files, outlet)
    shown = output.project(plain, outlet.budget, encoded=encoded)
    ended = await _kept(shown.value if shown.truncated else plain, plain, encoded, files, outlet)
    return replace(ended, withheld=withheld) if withheld else ended


async def _kept(value: Any, plain: Any, encoded: bytes, files: tuple[File, ...], outlet: Outlet) -> Attempted:
    """The model sees `value`; the whole is kept where that is less. Files are referred to by the record."""
    blobs = blobs_of(files) if files else ()
    if value is plain or value == plain:
        return Attempted(Ok(plain, files=files), blobs)
    digest = await outlet.keeps.keep(encoded)
    return Attempted(Ok(value, BlobRef(digest, len(encoded)), files), (*blobs, digest))


async def _saved(value: Any, outlet: Outlet) -> tuple[Any, tuple[File, ...]]:
    """The value with the bytes of its files in the store, and those files: the value itself, or what stands in a list
    or a dict. Deeper down nothing is looked for, so that a large value costs no more than a look at its items."""
    if isinstance(value, FILES):
        [item], files = await _saved([value], outlet)
        return item, files
    if type(value) is dict and any(isinstance(each, FILES) for each in value.values()):
        items, files = await _saved(list(value.values()), outlet)
        return dict(zip(value, items, strict=True)), files
    if type(value) in (list, tuple) and any(isinstance(each, FILES) for each in value):
        items = [await _passed(each, outlet) if isinstance(each, FILES) else each for each in value]
        return items, tuple([each for each in items if isinstance(each, FILES)])
    return value, ()


async def _passed(file: File, outlet: Outlet) -> File | str:
    """The file with its bytes in the store as filters leave them; a text in its place where they withhold it."""
    keeps = outlet.keeps
    if outlet.filter_file is not None and not isinstance(file, FileRef) and isinstance(file.source, Local | Inline):
        data = await asyncio.to_thread(_read, file.source.path) if isinstance(file.source, Local) else file.source.data
        if data is None or len(data) > MAX_VALUE:
            return f"file {file.name!r} is withheld: plugins look at {MAX_VALUE:,} bytes at most, and it has more"
        if not data:
            raise _empty(file)
        try:
            file = replace(file, source=Inline(outlet.filter_file(file.name, data, file.media_type)))
        except ToolError as error:
            return str(error)
    return await saved(file, keeps.keep, keeps.keep_file)


def _read(path: str) -> bytes | None:
    """A file of the host; None where it is too large to be looked at."""
    with contextlib.suppress(OSError, ValueError):  # what is wrong with it is said by `host_pieces`
        if os.stat(path).st_size > MAX_VALUE:
            return None
    pieces, size = list[bytes](), 0
    for piece in host_pieces(path):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_VALUE:  # it grows
            return None
    return b"".join(pieces)


async def saved(
    file: File, put: Callable[[bytes], Awaitable[str]], put_file: Callable[[str], Awaitable[tuple[str, int]]]
) -> File:
    """The file with its bytes in the store, unless they are at an address. They pass through memory in pieces."""
    if isinstance(file, FileRef):
        return file
    source = file.source
    if isinstance(source, Local):
        digest, size = await put_file(source.path)
    elif isinstance(source, Inline):
        digest, size = await put(source.data), len(source.data)
    else:
        return file
    if not size:
        raise _empty(file)
    return replace(file, source=Stored(digest, size))


def _empty(file: File) -> InvalidInput:
    return InvalidInput(f"the {type(file).__name__} {file.name!r} is empty")


def blobs_of(files: Iterable[File]) -> tuple[str, ...]:
    """What a record that holds these files refers to."""
    sources = [file.source for file in files if not isinstance(file, FileRef)]
    return tuple(dict.fromkeys([source.digest for source in sources if isinstance(source, Stored)]))
