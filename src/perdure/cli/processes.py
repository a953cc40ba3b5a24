"""`perdure ps`, `logs`, `signal` and `perdure processes …`: list processes, read one, and act on them."""

from __future__ import annotations

import asyncio
import re
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from perdure.cli.commands import (
    CommandFacts,
    command_end,
    facts_of,
    facts_text,
    is_here,
    lines_text,
    show_output,
)
from perdure.cli.host import (
    FAILED,
    OK,
    JsonOption,
    ProcessArgument,
    Refusal,
    StoreOption,
    dead_workers,
    deciding,
    existing,
    find_process,
    has_live_worker,
    is_terminal,
    perform,
    process_id,
    reading,
    say_when,
    with_command,
)
from perdure.cli.render import (
    ago,
    brief,
    complain,
    console,
    json_line,
    moment,
    plural,
    print_json,
    print_value,
    span,
    table,
    text_line,
)
from perdure.errors import TimedOut, UnknownProcess
from perdure.lifecycle.process import is_settlement
from perdure.model.command import COMMAND_KIND, Stream
from perdure.model.monitor import MONITOR_KIND, read_cursor
from perdure.model.process import (
    RETIRED,
    Abandoned,
    Cancelled,
    Failure,
    ProcessEvent,
    ProcessOutcome,
    ProcessRow,
    Success,
    WaitOn,
    Wake,
    WakeRow,
)
from perdure.model.record import Begun, Done, Segment, StepFaltered, StepRecord
from perdure.model.write import Dismiss, ProcessFilter
from perdure.ports.store import Store
from perdure.processes.handle import Settlement, pending_steps
from perdure.processes.run import load_steps
from perdure.runtime import Runtime
from perdure.wire import process_event_json, process_json

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
            raise Refusal(f"there is no status {status!r}: use one of {', '.join(STATES)}")
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
            facts = {row.id: known for row in found if (known := facts_of(opened, row)) is not None}
        if json:
            print_json([process_json(row, state_of(row, dead)) | _facts_json(facts, row) for row in found])
        else:
            _print(found, dead, over, {name: facts_text(each) for name, each in facts.items()})
        return 0

    perform(work, json)


def _facts_json(facts: dict[str, CommandFacts], row: ProcessRow) -> dict[str, Any]:
    return {"command": msgspec.to_builtins(facts[row.id])} if row.id in facts else {}


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


# ---------------------------------------------------------------------- printing


def _say_more(limit: int, json: bool) -> None:
    if not json:
        text_line(console(stderr=True), f"the newest {limit:,} of them: --limit shows more", "dim")


def _print(found: list[ProcessRow], dead: dict[str, bool], over: bool, facts: dict[str, str]) -> None:
    out, now = console(), int(time.time() * 1000)
    if not found:
        text_line(out, "no processes" if over else "no live processes: --all lists those that are over too")
        return
    headers = ["process", "what", "status", "age", "worker", "progress", "waits for, is stuck by, or ended as"]
    cells = [_cells(row, state_of(row, dead), now, facts.get(row.id)) for row in found]
    print_rows(out, headers, cells)


NOTE_WIDTH = 16
"""Cells of a terminal that the last column of `ps` needs: its text is broken into lines of that length."""


def print_rows(out: Console, headers: list[str], cells: list[list[str]]) -> None:
    """Print processes as a table. On a terminal, columns that are empty in all rows are left out, and a table that does
    not fit gives way to a block of lines for each process. Elsewhere columns stay where they are."""
    shown = [i for i in range(len(headers)) if not out.is_terminal or any(row[i] for row in cells)]
    if not out.is_terminal or _natural_width(headers, cells, shown) <= out.width:
        _table(out, headers, cells, shown)
        return
    for row in cells:
        _print_block(out, row)


def _natural_width(headers: list[str], cells: list[list[str]], shown: list[int]) -> int:
    """Return the width at which no column but the last is broken."""
    widths = [max(len(headers[i]) if i != 6 else 0, *[len(row[i]) for row in cells]) for i in shown]
    if 6 in shown:
        widths[-1] = min(widths[-1], NOTE_WIDTH)
    return sum(widths) + 3 * len(widths)


def _print_block(out: Console, row: list[str]) -> None:
    """Print one process on lines of its own, for a terminal that is too narrow for a table."""
    name, what, state, age, worker, progress, note = row
    text_line(out, name, "bold")
    first = ", ".join(each for each in (state, age, f"worker {worker}" if worker else "") if each)
    for line in (what, first, progress, note):
        for part in textwrap.wrap(line, max(out.width - 4, 20), break_on_hyphens=False):
            text_line(out, f"    {part}")


def _table(out: Console, headers: list[str], cells: list[list[str]], shown: list[int]) -> None:
    wordy = any(" " in row[2] for row in cells)  # a bare status is one word, and stays whole
    fold = [place for place, i in enumerate(shown) if i in (0, 1, 4, 6) or (i == 2 and wordy)]
    table(out, [headers[i] for i in shown], [[row[i] or "—" for i in shown] for row in cells], fold=fold)


def _cells(row: ProcessRow, state: str, now: int, facts: str | None) -> list[str]:
    record = row.record
    if record.cancel is not None and row.live:
        state = f"{state}, asked to stop"
    worker = "" if row.owner is None else row.owner
    if row.attempts > 1 and row.live:
        worker = f"{worker} attempt {row.attempts}".strip()
    progress = "" if record.progress is None or not row.live else progress_text(row)
    if facts is not None:  # of a command, which says nothing of itself
        progress = facts
    settles = [f"perdure settle {call.call_id} done (or failed, rerun)" for call in pending_steps(row)]
    waits = [wait_text(wait, now) for wait in record.waits if not is_settlement(wait)]
    note = "; ".join(settles + waits) if row.live else ended_text(row)
    if row.stuck is not None and row.live:  # as long as it likes: beside the status it would part all rows
        note = f"{row.stuck}; {note}" if note else row.stuck
    return [row.id, what_text(row), state, span(max(0, now - row.created)), worker, progress, note]


def what_text(row: ProcessRow) -> str:
    """`function nightly@2 "the night of the 3rd"`"""
    each = row.registration
    bound = each.kind in (COMMAND_KIND, MONITOR_KIND)  # their definition is the machine that they are on
    words = [each.kind, each.name if bound else (each.definition or each.name).removeprefix(f"{each.kind}:")]
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


def progress_text(row: ProcessRow) -> str:
    """What a process says of its progress; of a monitor, how many lines it has told, and the newest of them."""
    if row.kind != MONITOR_KIND:
        return brief(row.record.progress, 30)
    told = read_cursor(row.record.progress)
    return brief(f"{lines_text(told.lines)}, the last: {told.last}" if told.last else lines_text(told.lines), 60)


def ended_text(row: ProcessRow) -> str:
    if row.kind in (COMMAND_KIND, MONITOR_KIND):
        words = command_end(getattr(row.record.outcome, "value", None))
        if words:
            return brief(words, 100)
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


# ---------------------------------------------------------------------- acting on processes

_WAKE = msgspec.json.Decoder(Wake).decode

UNITS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86_400}
"""Seconds in what a person may write after a number."""

processes = typer.Typer(
    help="Look after processes: wait for one, resume a stuck one, forget old ones, list wakes that were not delivered.",
    no_args_is_help=True,
)


def what_it_takes(row: ProcessRow) -> str:
    """What a Runtime needs to work on a process."""
    asked = row.registration
    if asked.kind in (COMMAND_KIND, MONITOR_KIND):
        return f"any definitions, or none, on host {asked.definition!r}"
    return f"{asked.kind} {asked.definition or asked.name!r}" if asked.name else f"an engine for {asked.kind!r}"


async def settle_step(runtime: Runtime, call: str, verdict: Settlement, **said: Any) -> ProcessRow | None:
    """Settle the step of a process that has this id. Returns the process, or None if no step under this id waits."""
    parts = call.split(".")
    for count in range(len(parts) - 1, 0, -1):
        row = await runtime.store.process(".".join(parts[:count]))
        if row is not None and call in [each.call_id for each in pending_steps(row)]:
            await runtime.processes.settle(row.id, call, verdict, **said)
            return await find_process(runtime.store, row.id)
    return None


def signal(
    process: ProcessArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The signal's name.")],
    payload: Annotated[str, typer.Argument(metavar="JSON", help="What it says, as JSON; '-' reads stdin.")] = "null",
    key: Annotated[str | None, typer.Option(help="Sent twice under the same key, it is one signal.")] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Send a signal to a process: it is stored, and the worker that runs the process gets it, now or later."""

    async def work() -> int:
        target, said = process_id(process), _payload(payload)
        async with deciding(store) as runtime:
            sent = await runtime.processes.signal(target, name, said, key=key)
            row = await find_process(runtime.store, target)
            live_worker = await has_live_worker(runtime, row.owner)
        if json:
            known = {"awaited": sent.awaited, "waits_for": sent.waits_for}
            print_json({"process_id": target, "signal": name, "event": int(sent)} | known)
        else:
            note = sent.note(name)
            text_line(console(), f"told {target}: {name} (event {int(sent)})", "yellow" if note else "green")
            if note:
                text_line(console(), note, "yellow")
            if row.active:
                say_when(what_it_takes(row), live_worker)
        return OK

    perform(work, json)


def _payload(text: str) -> Any:
    data = sys.stdin.buffer.read() if text == "-" else text.encode(errors="surrogateescape")
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise Refusal(f"the payload is not JSON ({error}): quote strings, for example '\"yes\"'") from None


END_SECONDS = 60.0
"""For so long the command line waits for the end of a command that it ends itself."""


async def cancel_process(runtime: Runtime, target: str, reason: str, by: str, json: bool) -> int:
    """The part of `perdure cancel` that is about processes."""
    status = await runtime.processes.cancel(target, reason, by=by)
    row = await find_process(runtime.store, target)
    live_worker = await has_live_worker(runtime, row.owner)
    if json:
        print_json({"process_id": target, "status": status, "process": row.state})
        return FAILED if status == "ended" else OK
    if status == "ended":
        text_line(console(), f"nothing to stop: process {target} is {row.status}")
        return FAILED
    if not row.live:
        text_line(console(), f"process {target} is {row.status}: no worker was running it")
        return OK
    asked = {"requested": f"asked process {target} to stop"}
    text_line(console(), asked.get(status, f"process {target} was asked to stop before"))
    if row.active:
        say_when(what_it_takes(row), live_worker)
    return OK


async def is_unwatched(runtime: Runtime, target: str) -> bool:
    """Whether this is a command on this machine that lives, and no live Runtime watches it."""
    row = await find_process(runtime.store, target)
    bound = row.registration.kind in (COMMAND_KIND, MONITOR_KIND) and is_here(row) and row.live
    return bound and not await has_live_worker(runtime, row.owner)


async def end_here(store: str | None, target: str, json: bool) -> None:
    """End a command that was asked to stop and that no live Runtime watches: adopt it, as the next Runtime would."""
    async with Runtime(existing(store), agents=[]) as runtime:
        outcome = await runtime.handle(target).outcome(END_SECONDS)
    if not json:
        value = getattr(outcome, "value", None)
        status = value.get("status", "ended") if isinstance(value, dict) else "ended"
        text_line(console(), f"no Runtime watched it: it was ended from here ({status})")


# ---------------------------------------------------------------------- pruning and versions


def resume(process: ProcessArgument, store: StoreOption = None, json: JsonOption = False) -> None:
    """Let a stuck process be worked on again, once its cause is mended; `perdure doctor` says why it is stuck."""

    async def work() -> int:
        target = process_id(process)
        async with deciding(store) as runtime:
            resumed = await runtime.processes.resume(target)
            row = await find_process(runtime.store, target)
            live_worker = await has_live_worker(runtime, row.owner)
        if json:
            print_json({"process_id": target, "resumed": resumed, "status": row.state})
        elif resumed:
            text_line(console(), f"resumed {target}", "green")
            if row.active:
                say_when(what_it_takes(row), live_worker)
        else:
            text_line(console(), f"nothing to resume: process {target} is {row.state}, not stuck")
        return OK if resumed else FAILED

    perform(work, json)


def prune(
    older_than: Annotated[str, typer.Option(help="Those that ended so long ago: 90s, 30min, 12h, 7d.")],
    status: Annotated[list[str] | None, typer.Option(help=f"Only those that are {', '.join(sorted(RETIRED))}.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Forget processes that are over: their events and values go for good, their ids stay spent."""

    async def work() -> int:
        seconds = seconds_of(older_than)
        if unknown := sorted(set(status or ()) - RETIRED):
            raise Refusal(f"only what is over can be pruned, and {', '.join(unknown)} is not: use one of "
                          f"{', '.join(sorted(RETIRED))}")  # fmt: skip
        async with deciding(store) as runtime:
            if not yes:
                _confirm(older_than)
            gone = await runtime.processes.prune(seconds, status=status or ())
        if json:
            print_json({"pruned": gone})
        else:
            text_line(console(), f"pruned {plural(gone, 'process', 'processes')}")
        return OK

    perform(work, json)


def seconds_of(text: str) -> float:
    """`7d` in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|)", text.strip())
    if found is None:
        raise Refusal(f"{text!r} is no length of time: write for example 90s, 30min, 12h or 7d")
    return float(found[1]) * UNITS[found[2]]


def _confirm(older_than: str) -> None:
    if not (sys.stdin.isatty() and is_terminal()):
        raise Refusal("what is pruned cannot be brought back: say --yes")
    if not typer.confirm(f"Forget every process that ended more than {older_than} ago? This cannot be undone"):
        raise Refusal("nothing was pruned", FAILED, "refused")


def versions(store: StoreOption = None, json: JsonOption = False) -> None:
    """Count live processes by definition: code of a version that is not listed may be retired."""

    async def work() -> int:
        async with deciding(store) as runtime:
            counts = await runtime.processes.drain_status()
        if json:
            print_json(counts)
        elif counts:
            table(console(), ["definition", "live"], [[name, f"{count:,}"] for name, count in counts.items()])
        else:
            text_line(console(), "no live processes")
        return OK

    perform(work, json)


# ---------------------------------------------------------------------- wakes


class WakeStates(StrEnum):
    """What becomes of the wakes of a session."""

    pending = "pending"
    enqueued = "enqueued"
    discarded = "discarded"


def wakes(
    state: Annotated[WakeStates | None, typer.Option(help="Only these; by default pending and discarded.")] = None,
    session: Annotated[str | None, typer.Option(help="Only those for this session.")] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """List wakes that were not delivered to their sessions: what waits, and what was discarded."""

    async def work() -> int:
        wanted = [WakeStates.pending, WakeStates.discarded] if state is None else [state]
        async with reading(store) as opened:
            found = [_wake_json(row) for each in wanted for row in await opened.wakes(session, each)]
        if json:
            print_json(found)
        else:
            _print_wakes(found)
        return OK

    perform(work, json)


def _wake_json(row: WakeRow) -> dict[str, Any]:
    wake = _WAKE(row.body)
    return {
        "number": row.number,
        "session_id": row.session_id,
        "process_id": wake.process_id,
        "event": wake.type,
        "status": wake.status,
        "policy": row.policy,
        "state": row.state,
        "at": row.at,
        "turn": None if row.turn is None else f"{row.session_id}.{row.turn}",
        "reason": row.reason,
    }


def _print_wakes(found: list[dict[str, Any]]) -> None:
    out, now = console(), int(time.time() * 1000)
    if not found:
        text_line(out, "none")
        return
    rows = [
        [
            str(wake["number"]), wake["session_id"], wake["process_id"], wake["event"],
            f"{wake['state']}: {wake['reason']}" if wake["reason"] else wake["state"], ago(wake["at"], now),
        ]
        for wake in found
    ]  # fmt: skip
    table(out, ["number", "session", "process", "event", "state", "since"], rows, fold=(1, 2, 4))
    if any(wake["state"] == "discarded" for wake in found):
        text_line(out, "bring discarded ones back with: perdure processes redrive NUMBER …", "dim")


def redrive(
    numbers: Annotated[list[int], typer.Argument(metavar="NUMBER…", help="Of `perdure processes wakes`.")],
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Deliver discarded wakes after all: to their session, when a Runtime next polls the store."""

    async def work() -> int:
        async with deciding(store) as runtime:
            back = await runtime.store.write(Dismiss(tuple(numbers), int(time.time() * 1000)))
        if json:
            print_json({"redriven": [row.number for row in back]})
        else:
            numbered = brief(", ".join(str(row.number) for row in back), 200)
            text_line(console(), f"brought back: {numbered}" if back else "none of them is discarded")
        return OK if back else FAILED

    perform(work, json)


# ---------------------------------------------------------------------- logs, result and steps: one process

POLL = 0.1
"""Seconds between two polls for writes of another process."""

CANCELLED = 4


class Streams(StrEnum):
    """What a command writes: both in the order in which they were read, or one of them."""

    combined = "combined"
    stdout = "stdout"
    stderr = "stderr"


def logs(
    process: ProcessArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it has ended; Ctrl-C leaves.")] = False,
    after: Annotated[int, typer.Option(min=0, help="Only events after this number; of a command, bytes.")] = 0,
    stream: Annotated[Streams, typer.Option(help="Of a command: which of its outputs.")] = Streams.combined,
    events: Annotated[bool, typer.Option("--events", help="Of a command too, its events and not its output.")] = False,
    store: StoreOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line, for machines.")] = False,
) -> None:
    """Show the output of a command as it wrote it; of any other process its events, one per line."""

    async def work() -> int:
        async with reading(store) as opened:
            row = await find_process(opened, process)
            if row.registration.kind == COMMAND_KIND and not events:
                wanted: Stream = stream.value
                await show_output(opened, process, wanted, after, follow, json)
                return OK
            async for event in events_of(opened, process, after, follow):
                _print_event(event, json)
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
    """Wait until another connection has written. Polling needs no Runtime, and leaves no trace in the store."""
    while not await store.changed():  # noqa: ASYNC110  # another OS process writes: there is nothing to be woken by
        await asyncio.sleep(POLL)


def _print_event(event: ProcessEvent, json: bool) -> None:
    if json:
        sys.stdout.write(json_line(process_event_json(event)) + "\n")
    else:
        out = console()
        payload, where = _without_traceback(event.payload)
        shown = "" if payload is None else json_line(payload)
        line = f"{event.sequence:>4}  {moment(event.at)}  {event.type}  {shown}".rstrip()
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

    Exit codes: 0 completed, 1 failed, abandoned, stuck, out of time, or there is no such process, 4 cancelled.
    """

    async def work() -> int:
        async with reading(store) as opened:
            try:
                async with asyncio.timeout(timeout):
                    row = await ended(opened, process)
            except TimeoutError:
                raise TimedOut(f"process {process_id(process)!r} did not end", timeout) from None
            except UnknownProcess as unknown:  # 2 is for a command line that is wrong in any store
                raise Refusal(with_command(unknown), FAILED, unknown.code) from None
            outcome = await _whole(opened, row)
        if json:
            print_json({"process_id": row.id, "status": row.status, "outcome": msgspec.to_builtins(outcome)})
        else:
            _print_outcome(row.id, outcome)
        return OK if isinstance(outcome, Success) else CANCELLED if isinstance(outcome, Cancelled) else FAILED

    perform(work, json)


async def ended(store: Store, process: str) -> ProcessRow:
    """The process, once it is over. One that is stuck will not be by itself."""
    while True:
        row = await find_process(store, process)
        if not row.live:
            return row
        if row.stuck is not None:
            advice = f"mend the cause, then `perdure processes resume {row.id}`"
            raise Refusal(f"process {row.id!r} is stuck ({row.stuck}): {advice}", FAILED, "process_stuck")
        await _another_write(store)


async def _whole(store: Store, row: ProcessRow) -> ProcessOutcome | None:
    outcome = row.record.outcome
    if isinstance(outcome, Success) and outcome.blob is not None:
        return Success(msgspec.json.decode(await store.blobs.get(outcome.blob.digest)))
    return outcome


def _print_outcome(process: str, outcome: ProcessOutcome | None) -> None:
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
            complain(f"process {process!r}: its caller has departed, and its end will not be reported")


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
        rows = _step_rows(records, int(time.time() * 1000))
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


def _step_rows(records: Iterable[StepRecord], now: int) -> list[list[str]]:
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


for verb in (result, steps, resume, prune, versions, wakes, redrive):
    processes.command()(verb)
