"""`mainstay ps`: the processes of a store, as they are right now."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from mainstay.cli.host import JsonOption, Refused, StoreOption, dead_workers, perform, reading
from mainstay.cli.render import ago, brief, console, print_json, span, table, text_line
from mainstay.model.process import RETIRED, Abandoned, Cancelled, Failure, ProcessRow, Success, WaitOn
from mainstay.model.process_write import ProcessFilter
from mainstay.ports.store import Store
from mainstay.wire import process_json

if TYPE_CHECKING:
    from rich.console import Console

PAGE = 500

STATES = {
    "running": ("running",),
    "queued": ("queued",),
    "interrupted": ("running",),
    "waiting": ("waiting",),
    "stuck": ("stuck",),
} | {status: (status,) for status in sorted(RETIRED)}
"""What a person may ask for, and what the store calls it."""


def ps(
    every: Annotated[bool, typer.Option("--all", "-a", help="Those that are over too.")] = False,
    status: Annotated[str | None, typer.Option(help="Only those that are " + ", ".join(STATES) + ".")] = None,
    kind: Annotated[str | None, typer.Option(help="Only this kind: function, tool, turn, external, …")] = None,
    name: Annotated[str | None, typer.Option(help="Only this function or tool.")] = None,
    session: Annotated[str | None, typer.Option(help="Only those that this session may see.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 100,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """List processes, the newest first: those that live, with who works on them and what they wait for."""

    async def work() -> int:
        if status is not None and status not in STATES:
            raise Refused(f"there is no status {status!r}: use one of {', '.join(STATES)}")
        over = every or status in RETIRED
        wanted = ProcessFilter((), kind, name, session_id=session, live=None if over else True)
        async with reading(store) as opened:
            dead = await dead_workers(opened)
            found: list[ProcessRow] = []
            async for row in listed(opened, wanted if status is None else replace(wanted, status=STATES[status])):
                if status is not None and state_of(row, dead) != status:
                    continue
                if len(found) == limit:
                    _say_more(limit, json)
                    break
                found.append(row)
        if json:
            print_json([process_json(row, state_of(row, dead)) for row in found])
        else:
            _print(found, dead, over)
        return 0

    perform(work, json)


async def listed(store: Store, wanted: ProcessFilter) -> AsyncIterator[ProcessRow]:
    """All that there are, page by page."""
    before: int | None = None
    while page := await store.processes(replace(wanted, before=before, limit=PAGE)):
        for row in page:
            yield row
        before = page[-1].pid


def state_of(row: ProcessRow, dead: dict[str, bool]) -> str:
    """The state of a process as a person would say it: it runs only while its owner lives."""
    if not row.active or row.owner is None:
        return row.state
    return "interrupted" if dead.get(row.owner, True) else "running"


# ---------------------------------------------------------------------- telling


def _say_more(limit: int, json: bool) -> None:
    if not json:
        text_line(console(stderr=True), f"the newest {limit:,} of them: --limit shows more", "dim")


def _print(found: list[ProcessRow], dead: dict[str, bool], over: bool) -> None:
    out, now = console(), int(time.time() * 1000)
    if not found:
        text_line(out, "no processes" if over else "no live processes: --all lists those that are over too")
        return
    headers = ["process", "what", "status", "age", "worker", "progress", "waits for, or how it ended"]
    cells = [_cells(row, state_of(row, dead), now) for row in found]
    # A terminal is narrow: what nobody has anything to say in is left out there. Elsewhere columns stay where they are.
    shown = [i for i in range(len(headers)) if not out.is_terminal or any(row[i] for row in cells)]
    _table(out, headers, cells, shown)


def _table(out: Console, headers: list[str], cells: list[list[str]], shown: list[int]) -> None:
    told = any(" " in row[2] for row in cells)  # a bare status is one word, and stays whole
    fold = [place for place, i in enumerate(shown) if i in (0, 1, 4, 6) or (i == 2 and told)]
    table(out, [headers[i] for i in shown], [[row[i] or "—" for i in shown] for row in cells], fold=fold)


def _cells(row: ProcessRow, state: str, now: int) -> list[str]:
    record = row.record
    state = f"stuck: {row.stuck}" if state == "stuck" else state
    if record.cancel is not None and row.live:
        state = f"{state}, asked to stop"
    worker = "" if row.owner is None else row.owner
    if row.attempts > 1 and row.live:
        worker = f"{worker} attempt {row.attempts}".strip()
    progress = "" if record.progress is None or not row.live else brief(record.progress, 30)
    note = "; ".join(wait_text(wait, now) for wait in record.waits) if row.live else ended_text(row)
    return [row.id, what_text(row), state, span(max(0, now - row.created)), worker, progress, note]


def what_text(row: ProcessRow) -> str:
    """`function nightly@2 "the night of the 3rd"`"""
    each = row.registration
    words = [each.kind, (each.definition or each.name).removeprefix(f"{each.kind}:")]
    if each.label and each.label not in (each.name, each.definition):
        words.append(f'"{brief(each.label, 40)}"')
    return " ".join(word for word in words if word)


def wait_text(wait: WaitOn, now: int) -> str:
    """What is waited for, and until when."""
    what = wait.kind if wait.kind == "time" else f"{wait.kind} {wait.name}"
    if wait.due is None:
        return what
    if wait.due <= now:
        return f"{what}, due {ago(wait.due, now)}"
    return f"{what}, {'in' if wait.kind == 'time' else 'at most'} {span(wait.due - now)}"


def ended_text(row: ProcessRow) -> str:
    match row.record.outcome:
        case Success(blob=blob) if blob is not None:
            return f"{blob.size:,} bytes"
        case Success(value=value):
            return "" if value is None else brief(value)
        case Failure(code=code, message=message):
            return brief(f"{code}: {message}", 100)
        case Cancelled(by=by, reason=reason):
            return brief(f"by {by}: {reason}" if reason else f"by {by}", 100)
        case Abandoned(evidence=evidence):
            return brief(f"{evidence.writer}: {evidence.proof}", 100)
        case None:
            return ""
