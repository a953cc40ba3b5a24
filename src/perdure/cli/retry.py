"""`perdure retry`: continue turns that ended without an answer, and make waiting ones due."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from typing import Annotated

import typer

from perdure.cli.host import (
    ByOption,
    JsonOption,
    Refusal,
    StoreOption,
    answered_by,
    deciding,
    find,
    is_terminal,
    perform,
)
from perdure.cli.processes import seconds_of
from perdure.cli.render import console, plural, print_json, text_line
from perdure.errors import PerdureError
from perdure.model.outcome import BudgetSpent, Incomplete, LimitReached, PluginAborted, ProviderFailed
from perdure.model.session import ListedSession
from perdure.model.tool import Failed
from perdure.model.write import SessionFilter
from perdure.ports.store import Store
from perdure.runtime import Runtime
from perdure.sessions.directory import described

PAGE = 500
KINDS = tuple(
    sorted(
        str(each.__struct_config__.tag)
        for each in (ProviderFailed, BudgetSpent, LimitReached, PluginAborted, Incomplete, Failed)
    )
)


def retry(
    session: Annotated[str | None, typer.Argument(metavar="[SESSION]", help="The session's id.")] = None,
    now: Annotated[
        bool, typer.Option("--now", help="Make the next attempt of a turn at once that waits for its model.")
    ] = False,
    failed: Annotated[
        str | None, typer.Option(metavar="KIND", help=f"All sessions whose last turn ended so: {', '.join(KINDS)}.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="With --failed: only those that ended in the last 30min, 2h, 7d.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --failed: only list them.")] = False,
    by: ByOption = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Continue a turn that ended without an answer; a living worker with its agent takes it up.

    The turn keeps its input and all that is recorded: no recorded call runs again.
    """

    async def work() -> int:
        if (session is None) == (failed is None):
            raise Refusal("name a session, or say --failed KIND for many")
        async with deciding(store) as runtime:
            if session is not None:
                return await _one(runtime, session, now, answered_by(by), json)
            assert failed is not None
            return await _many(runtime, failed, since, dry_run, answered_by(by), json)

    perform(work, json)


async def _one(runtime: Runtime, name: str, now: bool, by: str, json: bool) -> int:
    row = await find(runtime.store, name)
    session = await runtime.session(name)
    if now:
        done = await session.retry_now(by=by)
        if not done:
            raise Refusal(f"session {name!r} has no turn that waits for its model", 1, "cannot_retry")
        what = "makes its next attempt now"
        turn = f"{name}.{row.turn}"
    else:
        turn, what = (await session.reopen(by=by)).turn_id, "goes on"
    if json:
        print_json({"session_id": name, "turn_id": turn, "now": now})
    else:
        text_line(console(), f"{turn} {what}")
    return 0


async def _many(runtime: Runtime, kind: str, since: str | None, dry_run: bool, by: str, json: bool) -> int:
    if kind not in KINDS:
        raise Refusal(f"--failed {kind!r} is not usable: use one of {', '.join(KINDS)}")
    first = 0 if since is None else int((time.time() - seconds_of(since)) * 1000)
    found = await _failed(runtime.store, kind, first)
    told, failures, out = list[dict[str, str]](), 0, console()
    with _progress(len(found)) as advance:
        for row in found:
            turn = f"{row.id}.{row.head}"
            result = "would go on" if dry_run else "goes on"
            if not dry_run:
                try:
                    await (await runtime.session(row.id)).reopen(turn, by=by)
                except PerdureError as error:  # of this session alone: the others are retried
                    result, failures = str(error), failures + 1
            told.append({"turn_id": turn, "session_id": row.id, "result": result})
            if not json:
                text_line(out, f"{turn} {result}")
            advance()
    if json:
        print_json(told)
    elif not found:
        text_line(out, f"no session's last turn ended as {kind}")
    else:
        text_line(out, f"{plural(len(found) - failures, 'turn')} of {len(found)}")
    return 1 if failures else 0


@contextlib.contextmanager
def _progress(total: int) -> Generator[Callable[[], None], None, None]:
    """Show a progress bar on a terminal; nothing elsewhere."""
    if not is_terminal():
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("retrying"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("retrying", total=total)
        yield lambda: progress.advance(task)


async def _failed(store: Store, kind: str, since: int) -> list[ListedSession]:
    """The idle sessions whose last turn ended so since then, the most recently changed first."""
    found, after = list[ListedSession](), None
    while True:
        rows = await store.sessions(SessionFilter(state="idle", since=since, limit=PAGE, after=after))
        for row in await described(store, rows):
            error = row.error
            if error is not None and error.kind == kind and error.at >= since:
                found.append(row)
        if len(rows) < PAGE:
            return found
        after = (rows[-1].updated, rows[-1].sid)
