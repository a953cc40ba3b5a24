"""`mainstay logs`, `processes result` and `processes steps`: what a process reported, returned and recorded."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from mainstay.cli.host import (
    FAILED,
    OK,
    JsonOption,
    ProcessArgument,
    Refused,
    StoreOption,
    find_process,
    perform,
    process_id,
    reading,
)
from mainstay.cli.render import (
    brief,
    complain,
    console,
    json_line,
    moment,
    print_json,
    print_value,
    span,
    table,
    text_line,
)
from mainstay.errors import TimedOut
from mainstay.model.process import (
    Abandoned,
    Cancelled,
    Failure,
    ProcessEvent,
    ProcessOutcome,
    ProcessRow,
    Success,
)
from mainstay.model.record import Begun, Done, Segment, StepFaltered, StepRecord
from mainstay.ports.store import Store
from mainstay.processes.run import load_steps
from mainstay.wire import process_event_json

if TYPE_CHECKING:
    from rich.console import Console

POLL = 0.1
"""Seconds between two looks at whether another process has written."""

CANCELLED = 4


def logs(
    process: ProcessArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it has ended; Ctrl-C leaves.")] = False,
    after: Annotated[int, typer.Option(min=0, help="Only events after this number.")] = 0,
    store: StoreOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line, for machines.")] = False,
) -> None:
    """Show the events of a process, one per line."""

    async def work() -> int:
        async with reading(store) as opened:
            async for event in events_of(opened, process, after, follow):
                _print(event, json)
        return OK

    perform(work, json)


async def events_of(store: Store, process: str, after: int, follow: bool) -> AsyncIterator[ProcessEvent]:
    """The events of a process after number `after`; with `follow`, until it has ended."""
    while True:
        row = await find_process(store, process)
        while found := await store.events(row.pid, after):
            for place, after, event in found:
                yield ProcessEvent(row.id, after, place, event.type, event.payload, event.at, event.key)
        if not follow or not row.live:
            return
        await _another_write(store)


async def _another_write(store: Store) -> None:
    """Wait until somebody has written: only looking needs no Runtime, and leaves no trace in the store."""
    while not await store.changed():  # noqa: ASYNC110  # another OS process writes: there is nothing to be woken by
        await asyncio.sleep(POLL)


def _print(event: ProcessEvent, json: bool) -> None:
    if json:
        sys.stdout.write(json_line(process_event_json(event)) + "\n")
    else:
        out = console()
        payload, where = _without_traceback(event.payload)
        told = "" if payload is None else json_line(payload)
        line = f"{event.sequence:>4}  {moment(event.at)}  {event.type}  {told}".rstrip()
        text_line(out, _fitted(line, out.width) if out.is_terminal else line)
        show_traceback(out, where, "      ")
    sys.stdout.flush()


def _without_traceback(payload: Any) -> tuple[Any, str]:
    """What an event says, and the traceback in it: that is shown as lines."""
    if not isinstance(payload, dict) or not isinstance(payload.get("traceback"), str):
        return payload, ""
    return {name: value for name, value in payload.items() if name != "traceback"}, payload["traceback"]


def show_traceback(out: Console, text: str, indent: str = "") -> None:
    for line in text.splitlines():
        text_line(out, f"{indent}{line}", "dim")


def _fitted(line: str, width: int) -> str:
    """A line that fits a terminal."""
    return line if len(line) <= width else f"{line[: width - 1]}…"


# ---------------------------------------------------------------------- how it ended


def result(
    process: ProcessArgument,
    timeout: Annotated[float | None, typer.Option(min=0, help="Wait at most so many seconds.")] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Wait until a process has ended, and print its value.

    Exit codes: 0 completed, 1 failed, abandoned, stuck or out of time, 2 there is no such process, 4 cancelled.
    """

    async def work() -> int:
        async with reading(store) as opened:
            try:
                async with asyncio.timeout(timeout):
                    row = await ended(opened, process)
            except TimeoutError:
                raise TimedOut(f"process {process_id(process)!r} did not end", timeout) from None
            outcome = await _whole(opened, row)
        if json:
            print_json({"process_id": row.id, "status": row.status, "outcome": msgspec.to_builtins(outcome)})
        else:
            _tell(row.id, outcome)
        return OK if isinstance(outcome, Success) else CANCELLED if isinstance(outcome, Cancelled) else FAILED

    perform(work, json)


async def ended(store: Store, process: str) -> ProcessRow:
    """The process, once it is over. One that is stuck will not be by itself."""
    while True:
        row = await find_process(store, process)
        if not row.live:
            return row
        if row.stuck is not None:
            advice = f"mend the cause, then `mainstay processes resume {row.id}`"
            raise Refused(f"process {row.id!r} is stuck ({row.stuck}): {advice}", FAILED, "process_stuck")
        await _another_write(store)


async def _whole(store: Store, row: ProcessRow) -> ProcessOutcome | None:
    outcome = row.record.outcome
    if isinstance(outcome, Success) and outcome.blob is not None:
        return Success(msgspec.json.decode(await store.blobs.get(outcome.blob.digest)))
    return outcome


def _tell(process: str, outcome: ProcessOutcome | None) -> None:
    match outcome:
        case Success(value=value):
            print_value(value)
        case Failure(code=code, message=message, traceback=where):
            complain(f"process {process!r} failed: {code}: {message}")
            show_traceback(console(stderr=True), where)
        case Cancelled(by=by, reason=reason):
            complain(f"process {process!r} was cancelled by {by or 'somebody'}{f': {reason}' if reason else ''}")
        case Abandoned(evidence=evidence):
            complain(
                f"process {process!r} was given up ({evidence.writer}: {evidence.proof}): whether its last effect "
                "happened is not known"
            )
        case None:
            complain(f"process {process!r}: its caller has departed, and nobody will say how it ended")


# ---------------------------------------------------------------------- steps


def steps(process: ProcessArgument, store: StoreOption = None, json: JsonOption = False) -> None:
    """List what a process has done through its context since its last checkpoint: what a replay is answered from."""

    async def work() -> int:
        async with reading(store) as opened:
            row = await find_process(opened, process)
            records, _ = await load_steps(opened, row.pid, row.id)
        if json:
            print_json([msgspec.to_builtins(record) for record in records])
            return OK
        rows = _rows(records, int(time.time() * 1000))
        if rows:
            out = console()
            table(out, ["call", "what", "attempts", "how it ended, or what it waits for"], rows, fold=(1, 3))
            for key, where in _tracebacks(records).items():
                text_line(out, f"call {key} raised:")
                show_traceback(out, where, "  ")
        else:
            text_line(console(), "nothing is recorded")
        return OK

    perform(work, json)


def _rows(records: Iterable[StepRecord], now: int) -> list[list[str]]:
    """A line for each call, in the order in which they were made: its last record has the last word."""
    found: dict[str, list[str]] = {}
    for record in records:
        match record:
            case Segment(number=number, state=state):
                found[f"segment {number}"] = ["—", f"checkpoint {number}", "", brief(state)]
            case Begun(key=key, kind=kind, name=name, attempt=attempt, due=due):
                found[key] = [key, f"{kind} {name}".strip(), str(attempt), f"begun{_until(due, now)}"]
            case StepFaltered(key=key, code=code, message=message, due=due, attempt=attempt):
                what = found[key][1] if key in found else ""
                found[key] = [key, what, str(attempt), brief(f"{code}: {message}", 80) + f", again{_until(due, now)}"]
            case Done(key=key, kind=kind, name=name, attempts=attempts):
                found[key] = [key, f"{kind} {name}".strip(), str(attempts), _ending(record)]
    return list(found.values())


def _tracebacks(records: Iterable[StepRecord]) -> dict[str, str]:
    """Where each call that failed raised, the last time that it did."""
    found: dict[str, str] = {}
    for record in records:
        if isinstance(record, StepFaltered):
            found[record.key] = record.traceback
        elif isinstance(record, Done):
            found[record.key] = "" if record.fault is None else record.fault.traceback
    return {key: where for key, where in found.items() if where}


def _until(due: int | None, now: int) -> str:
    return "" if due is None else f", due {span(now - due)} ago" if due <= now else f", in {span(due - now)}"


def _ending(done: Done) -> str:
    if done.unknown is not None:
        return f"unknown: {done.unknown}"
    if done.fault is not None:
        return brief(f"{done.fault.code}: {done.fault.message}", 100)
    if done.dropped:
        return "dropped: another branch was chosen"
    if done.cut:
        return "cut off: asked to stop"
    return "out of time" if done.late else f"ok: {brief(done.value)}"
