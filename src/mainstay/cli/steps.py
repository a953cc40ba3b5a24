"""`mainstay processes steps`: what a durable function has done through its context, and what it is at."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from mainstay.cli.host import OK, JsonOption, ProcessArgument, StoreOption, find_process, perform, reading
from mainstay.cli.logs import show_traceback
from mainstay.cli.render import brief, console, print_json, span, table, text_line
from mainstay.model.step import Begun, Done, Segment, StepFaltered, StepRecord
from mainstay.processes.journal import load_steps


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
