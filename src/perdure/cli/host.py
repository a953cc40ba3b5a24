"""What every command shares: which store, how it is opened, and how errors become one line and an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from perdure.cli.render import as_json, complain, console, text_line
from perdure.errors import (
    InputFilterMissing,
    InvalidInput,
    NotFound,
    PerdureError,
    SessionDeleted,
    TurnFailed,
    UnknownCall,
    UnknownProcess,
    UnknownSession,
    quoted,
)
from perdure.lifecycle.process import known
from perdure.model.codec import clean_text
from perdure.model.process import ProcessRow
from perdure.model.session import SessionRow
from perdure.ports.store import Store
from perdure.processes.handle import handle_id
from perdure.runtime import DEFAULT_STORE, Runtime
from perdure.stores import file_path, open_store

R = TypeVar("R")

OK, FAILED, USAGE = 0, 1, 2
INTERRUPTED = 130

StoreOption = Annotated[
    str | None,
    typer.Option("--store", envvar="PERDURE_STORE", help="The store's file.", show_default=DEFAULT_STORE),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
ProcessArgument = Annotated[
    str, typer.Argument(metavar="ID", help="The process's id, or its handle as JSON; `perdure ps` lists them.")
]
ByOption = Annotated[str | None, typer.Option("--by", help="Who decides.", show_default="your login name")]


class Refusal(Exception):
    """The command cannot be done as it was asked; the text says what to do."""

    def __init__(self, message: str, exit_code: int = USAGE, code: str = "usage") -> None:
        self.exit_code, self.code = exit_code, code
        super().__init__(message)


def perform(work: Callable[[], Coroutine[Any, Any, int]], json: bool = False) -> None:
    """Run a command to its exit code. A known error is one line, or one JSON object; an unknown one is a traceback."""
    try:
        code = asyncio.run(work())
    except Refusal as error:
        code = error.exit_code
        _say(str(error), error.code, json)
    except PerdureError as error:
        code = USAGE if isinstance(error, InvalidInput | NotFound) else FAILED
        _say(with_command(error), error.code, json)
    except (KeyboardInterrupt, asyncio.CancelledError):
        code = INTERRUPTED
    raise typer.Exit(code)


def _say(message: str, code: str, json: bool) -> None:
    if json:
        sys.stdout.write(as_json({"error": {"code": code, "message": clean_text(message)}}))
    else:
        complain(message)


HINTS: dict[type[PerdureError], str] = {
    InputFilterMissing: ": `perdure run MODULE:AGENT` has them, and says it by the agent itself",
    UnknownCall: "; `perdure pending` lists what waits for a person",
    UnknownSession: ": `perdure sessions` lists the sessions",
    UnknownProcess: "; `perdure ps --all` lists the processes",
    TurnFailed: "; `perdure doctor` lists turns that are stuck",
}
"""What an error advises here, in place of its hint for Python code."""


def with_command(error: PerdureError) -> str:
    """An error with a hint that names a command."""
    hint = next((hint for kind, hint in HINTS.items() if isinstance(error, kind)), error.hint)
    return f"{error.summary}{hint}"


def answered_by(by: str | None) -> str:
    """Who decides, for the record."""
    if by:
        return by
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "command line"


@contextlib.contextmanager
def on_signals(handlers: dict[signal.Signals, Callable[[], object]]) -> Generator[None, None, None]:
    """Signals belong to the command line: call these on the event loop for as long as the block runs."""
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


# ---------------------------------------------------------------------- stores


def store_path(store: str | None) -> str:
    """The store that was named, or the one every Runtime takes by default."""
    return store or DEFAULT_STORE


def existing(store: str | None) -> str:
    """A store that is there. Reading must not make one: a mistyped path would then look like an empty store."""
    where = store_path(store)
    if where in ("memory", ":memory:"):
        raise Refusal("a store in memory ends with its process: there is nothing to look at from here")
    if not is_there(where):
        from perdure.stores.sqlite.maintenance import refuse_moved

        refuse_moved(Path(file_path(where)))
        raise Refusal(
            f"there is no store at {where}: name one with --store or PERDURE_STORE, "
            "or go to the folder where the runtime runs"
        )
    return where


def is_there(where: str) -> bool:
    """Whether a file store exists; what is no file is for `open_store` to judge."""
    try:
        path = file_path(where)
        return where not in ("memory", ":memory:") and ("://" in path or Path(path).exists())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise Refusal(f"{quoted(where)} cannot be looked at ({why}): check the path, and who may read it") from None


@contextlib.asynccontextmanager
async def reading(store: str | None) -> AsyncGenerator[Store, None]:
    """An existing store, opened to be read."""
    where = existing(store)
    opened = open_store(where)
    async with explained_wait(where):
        await opened.open()
    try:
        yield opened
    finally:
        await opened.close()


@contextlib.asynccontextmanager
async def deciding(store: str | None) -> AsyncGenerator[Runtime, None]:
    """A Runtime on an existing store that accepts and answers, and runs nothing."""
    async with contextlib.AsyncExitStack() as stack:
        async with explained_wait(existing(store)):
            runtime = await stack.enter_async_context(Runtime(existing(store), agents=[], recover=False))
        yield runtime


@contextlib.asynccontextmanager
async def explained_wait(where: str) -> AsyncGenerator[None, None]:
    """Say what is waited for when the store's lock is not free: its holder may be stopped."""
    loop = asyncio.get_running_loop()
    timer = loop.call_later(1.0, complain, f"waiting for another process to close {where} …")
    try:
        yield
    finally:
        timer.cancel()


async def find(store: Store, session_id: str) -> SessionRow:
    """A session that exists, or the typed error."""
    row = await store.session(session_id)
    if row is None:
        raise UnknownSession(session_id)
    if row.deleted:
        raise SessionDeleted(session_id)
    return row


def process_id(given: str) -> str:
    """The id of a process from what a person has of it: the id, or its handle as JSON."""
    if not given.lstrip().startswith("{"):
        return handle_id(given)
    try:
        found = msgspec.json.decode(given.encode())
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise Refusal(
            f"{given!r} looks like a handle, but is not JSON ({error}): put it in single quotes, for example "
            '\'{"__handle__": "process", "id": "nightly-1"}\''
        ) from None
    return handle_id(found)


async def find_process(store: Store, given: str) -> ProcessRow:
    """A process that is still there, or the typed error."""
    name = process_id(given)
    return known(await store.process(name), name)


async def dead_workers(store: Store) -> dict[str, bool]:
    """Every known worker, and whether it is proven dead."""
    return {w.id: await store.proven_dead(w) for w in await store.workers()}


async def condition(store: Store, row: SessionRow, dead: dict[str, bool]) -> str:
    """The state of a session as a person would say it: an open turn runs only while its owner lives, and one of which
    nothing is recorded but its input waits to be begun."""
    if row.state != "open" or row.turn is None:
        return row.state
    if row.owner is not None:
        return "interrupted" if dead.get(row.owner, True) else "running"
    begun = row.takeovers or len(await store.nodes(row.sid, row.turn, row.turn)) > 1
    return "interrupted" if begun else "queued"


async def finish(ending: Coroutine[Any, Any, bool], what: str) -> None:
    """Wait for an ending before leaving: what a command began or took up is not cut off unseen."""
    me = asyncio.current_task()
    assert me is not None
    sys.stdout.flush()  # the answer is not kept back
    timer = asyncio.get_running_loop().call_later(1.0, complain, f"{what} (Ctrl-C leaves it) …")
    try:
        with on_signals({signal.SIGINT: me.cancel, signal.SIGTERM: me.cancel}):
            await ending
    finally:
        timer.cancel()


async def has_live_worker(runtime: Runtime, owner: str | None) -> bool:
    """Whether a live worker could go on with the work: its owner, or any other Runtime on this store."""
    dead = await dead_workers(runtime.store)
    if owner is not None and not dead.get(owner, True):
        return True
    return sum(1 for gone in dead.values() if not gone) > 1  # one of them is this command


def say_when(what: str, live_worker: bool) -> None:
    """Where no live worker can do it, say which one is needed."""
    if not live_worker:
        text_line(console(), f"it goes on when a Runtime with {what} opens this store", "dim")


def is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
