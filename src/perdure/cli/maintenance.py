"""`perdure backup`, `restore`, `compact`, `prune` and `delete-store`: copies of a store, keeping one small, and its
end."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.host import FAILED, JsonOption, Refusal, StoreOption, deciding, existing, is_terminal, perform
from perdure.cli.processes import seconds_of
from perdure.cli.render import console, plural, print_json, size, text_line
from perdure.runtime import Runtime
from perdure.stores import file_path


def backup(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The store to copy; it may be in use.")],
    to: Annotated[str, typer.Argument(metavar="DST", help="The file to make. Nothing is overwritten.")],
    json: JsonOption = False,
) -> None:
    """Copy a store, with its blobs, while it is in use.

    The copy is there whole or not at all. It can be looked at and takes inputs, and nothing in it runs until `perdure
    restore` lets it go on.
    """

    async def work() -> int:
        bytes_done = 0
        where = existing(source)
        with bar("copying") as shown:

            def advance(done: int, whole: int) -> None:
                nonlocal bytes_done
                bytes_done = done
                shown(done, whole)

            async with Runtime(where, agents=[], recover=False) as runtime:
                await runtime.backup(to, progress=advance)
        if json:
            print_json({"store": where, "copy": to, "bytes": bytes_done})
        else:
            text_line(console(), f"copied {where} to {to} ({size(bytes_done)})")
        return 0

    perform(work, json)


def restore(
    store: Annotated[str, typer.Argument(metavar="COPY", help="The copy, in the place where it is to be used.")],
    json: JsonOption = False,
) -> None:
    """Let a copy of a store go on as a store of its own.

    It gets an id of its own, from which the idempotency keys of everything that starts in it are made. What was under
    way when the copy was made goes on here, too: make sure that the original does not.
    """

    async def work() -> int:
        where = existing(store)
        own = await Runtime.restore(where)
        if json:
            print_json({"store": where, "id": own})
        else:
            text_line(console(), f"restored {where}: its id is {own}, and the next Runtime goes on with what is open")
        return 0

    perform(work, json)


def compact(
    store: Annotated[str, typer.Argument(metavar="STORE", help="The store; no Runtime may have it open.")],
    json: JsonOption = False,
) -> None:
    """Make a store as small as it can be.

    A store that this version made gives its free pages back by itself. One of an earlier version does so from here on.
    It is written anew: there must be room for it a second time.
    """

    async def work() -> int:
        where = existing(store)
        with bar("compacting") as shown:
            before, after = await Runtime.compact(where, progress=shown)
        if json:
            print_json({"store": where, "bytes_before": before, "bytes_after": after})
        else:
            text_line(console(), f"compacted {where}: {size(before)} became {size(after)}")
        return 0

    perform(work, json)


def prune(
    older_than: Annotated[str, typer.Option(help="What was not used for so long: 12h, 30d.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Forget sessions that were idle for so long, and processes that ended so long ago. Their ids stay spent.

    Left alone is what has an open turn, an input that waits, a fork, a wake that was not delivered, or a live process.
    """

    async def work() -> int:
        seconds = seconds_of(older_than)
        async with deciding(store) as runtime:
            if not yes:
                _confirm(older_than)
            gone = await runtime.processes.prune(seconds)
            sessions = await runtime.sessions.prune(seconds)
        if json:
            print_json({"sessions": sessions, "processes": gone})
        else:
            what = f"{plural(sessions, 'session')} and {plural(gone, 'process', 'processes')}"
            text_line(console(), f"forgot {what}")
        return 0

    perform(work, json)


def delete_store(
    store: Annotated[str, typer.Argument(metavar="STORE", help="The store's file.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete it. Without this, only say what would be.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete a store: its file, lock, blobs, workers and job folders.

    It is refused while a process has the store open or a command of it runs. No link is followed.
    """

    async def work() -> int:
        from perdure.stores.sqlite import maintenance

        path = _unlinked(store)
        if not (parts := maintenance.parts_of(path)):
            raise Refusal(f"there is no store at {store}")
        if not yes:
            names = ", ".join(str(part) for part in parts)
            raise Refusal(f"this would delete {names}; what is deleted cannot be brought back: say --yes")
        deleted = [str(part) for part in maintenance.delete(path)]
        if json:
            print_json({"store": str(path), "deleted": deleted})
        else:
            for name in deleted:
                text_line(console(), f"deleted {name}")
        return 0

    perform(work, json)


def _unlinked(store: str) -> Path:
    """Return the absolute path of a store without links in its folders. The file itself may be a link."""
    given = Path(os.path.abspath(file_path(store)))
    return given.parent.resolve() / given.name


def _confirm(older_than: str) -> None:
    if not (sys.stdin.isatty() and is_terminal()):
        raise Refusal("what is pruned cannot be brought back: say --yes")
    question = f"Forget every session that was idle, and process that ended, for more than {older_than}?"
    if not typer.confirm(f"{question} This cannot be undone"):
        raise Refusal("nothing was pruned", FAILED, "refused")


@contextlib.contextmanager
def bar(what: str) -> Generator[Callable[[int, int], None], None, None]:
    """A progress bar on a terminal, of so many bytes of so many; nothing elsewhere."""
    if not is_terminal():
        yield lambda done, whole: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, whole: progress.update(task, completed=done, total=whole)
