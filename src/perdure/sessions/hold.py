"""Holding a turn whose model has answered while commands run that it started (`Agent(wait_for_commands=…)`).

Without it, "I will wait for the tests" ends the turn, and with it the commands that the turn owns. With it the turn is
parked at that point, as one is whose tool waits for processes, and costs no tokens:

    a command ends        the model is told how, in one message for all of them, and answers again
    it writes to stderr   the model is shown what is new, at once for the first time, and answers again
    it has written        the same, at looks that get rarer
    it is silent          the model is told so after five minutes
    its time is over      the model is told once; from then on nothing is held for that command, or it is ended
    it is released        by signal "release": nothing is held for it from then on
    anything is said      the model is told that, and answers again

What a turn is held for is decided in `turn/hold.py`, from its commands, the wait on disk, and the time. Each look
is a wait of its own. What an update tells is written in one before the model is told, so that it is the same after a
crash.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct, ValidationError, to_builtins
from msgspec.structs import replace

from perdure.engine.driver import Parked, Run
from perdure.engine.journal import taken
from perdure.engine.waits import decode_pending, wait_id, whole
from perdure.errors import CommandsUnavailable, InvalidInput
from perdure.lifecycle.process import AWAITED, ENDS
from perdure.model.codec import convert, encode
from perdure.model.command import COMMAND_KIND, CommandHold, CommandResult, OutputChunk, OutputQuery, Stream
from perdure.model.message import Message, Text
from perdure.model.outcome import PendingCall
from perdure.model.process import Abandoned, Cancelled, Failure, ProcessRow, Success, Wake
from perdure.model.session import WaitRow
from perdure.model.write import Dismiss, ProcessFilter
from perdure.plugins.turn import plugins_of
from perdure.ports.store import Store
from perdure.turn.hold import UPDATES, AskAgain, CancelLate, HeldCommand, Ladder, ParkTurn, Update, decide

MOST = 100
"""Commands of one turn that are looked at."""
TAIL = 2_000
"""Characters of each stream that the model is shown; `await_process` gives it more."""

_decode_wake = msgspec.json.Decoder(Wake).decode


class HeldCommands(Struct, frozen=True):
    """What is asked of commands: `output` reads what one has written, `cancel` asks it to end, and says why."""

    output: Callable[[ProcessRow, OutputQuery], AsyncGenerator[OutputChunk, None]]
    cancel: Callable[[str, str], Awaitable[object]]


async def held(store: Store, port: HeldCommands, run: Run, rule: CommandHold) -> Parked | Message | None:
    """Hold the turn if there is something to hold it for: it is parked, or this message is for the model. None: it is
    over, or something was said that comes first (`run.journal.inputs`).

    What it is held for is written before it parks: a command may end between the two, and the model is told of that
    wherever the host dies.
    """
    scope, step, limit = run.scope, run.machine.state.step, int(rule.seconds * 1000)
    call = f"{run.turn_id}.{step}.0"
    wait = await _newest(store, run) if run.resumed else None
    ladder, attempt, before = Ladder(), 0, None
    while True:
        session = await store.session_by_sid(scope.sid)
        if session is None or await _something_was_said(store, run):
            run.journal.note_inputs()
            return None
        if wait is not None:
            pending = decode_pending(wait.body)
            ladder = convert(pending.args, Ladder)
            if wait.call == f"{step}.0":
                before, attempt = pending.processes, _attempt(wait)
            else:  # the model has had what there was to tell
                ladder = replace(ladder, news=())
        rows = await _commands(store, run, before)
        commands = [await _looked_at(port, row) for row in rows.values()]
        now = run.clock.now() if wait is None else _now(run, wait)
        match decide(commands, before, now, limit, ladder, rule.at_limit):
            case None:
                return None
            case CancelLate(late):
                for each in late:
                    await port.cancel(each, f"its turn was held for it for {rule.seconds:g} seconds")
            case AskAgain(ended, late, live):
                await _dismiss(store, run, [rows[each] for each in ended])
                return _digest(rows, ended, late, live)
            case Update(_, news) if before is not None and news == ladder:
                return await _update(port, rows, news, now)
            case ParkTurn(_, _, same) if (
                before is not None and same == ladder and wait is not None and wait.state == "open"
            ):
                if (plugins := plugins_of(run)) is not None:
                    plugins.note()
                appended = await run.journal.flush((), (wait.id,), before, session.next)
                if appended is not None and appended.parked:
                    return Parked((), before)
                run.check_cancel()
            case ParkTurn(ids, _, after) | Update(ids, after) as decided:
                due = decided.due if isinstance(decided, ParkTurn) else None
                asked = PendingCall(call, "process", "answer", to_builtins(after), now, due, processes=ids)
                name = wait_id(run.turn_id, f"{step}.0", "process", attempt + 1)
                wait = WaitRow(name, scope.sid, scope.turn, f"{step}.0", "process", "open", due, encode(asked))
                await run.journal.flush((wait,))


async def _newest(store: Store, run: Run) -> WaitRow | None:
    """The wait that this turn was last held by. Waits of its tools have an ordinal."""
    found = [
        wait for wait in await store.waits(run.scope.sid) if wait.kind == "process" and wait.turn == run.scope.turn
    ]
    for each in sorted(found, key=lambda wait: (int(wait.call.partition(".")[0]), _attempt(wait)), reverse=True):
        wait = await whole(store, each)
        if wait is not None and decode_pending(wait.body).ordinal == 0:
            return wait
    return None


def _now(run: Run, wait: WaitRow) -> int:
    """The clock may have been set back since the wait expired."""
    return max(run.clock.now(), wait.due or 0) if wait.state == "expired" else run.clock.now()


def _attempt(wait: WaitRow) -> int:
    return int(wait.id.rpartition(":")[2].partition("#")[2] or 1)


async def _something_was_said(store: Store, run: Run) -> bool:
    known = {*taken(run.records), *[each.input for each in run.machine.state.delivered]}
    return any(row.kind != "queue" and row.input not in known for row in await store.inbox(run.scope.sid))


async def _commands(store: Store, run: Run, before: Sequence[str] | None) -> dict[str, ProcessRow]:
    """The commands that calls of this turn have started and that end with the turn or its session, and those that it
    was held for before."""
    wanted = ProcessFilter(kind=COMMAND_KIND, session_id=run.scope.session_id, live=True, limit=MOST)
    found = {
        row.id: row
        for row in await store.processes(wanted)
        if row.registration.parent is not None
        and row.registration.cause is not None
        and row.registration.cause.id.startswith(f"{run.turn_id}.")
    }
    for process_id in before or ():
        row = await store.process(process_id)
        if row is not None:
            found[process_id] = row
    return {name: row for name, row in found.items() if not row.live or not _is_released(row)}


def _is_released(row: ProcessRow) -> bool:
    reference = row.record.external_ref
    return isinstance(reference, dict) and reference.get("released") is True


async def _dismiss(store: Store, run: Run, rows: Sequence[ProcessRow]) -> None:
    """The turn tells of these ends: they wake the session no second time."""
    numbers = {row.pid for row in rows}
    wakes = [wake for wake in await store.wakes(run.scope.session_id) if wake.pid in numbers]
    ends = tuple([wake.number for wake in wakes if _decode_wake(wake.body).type in ENDS.values()])
    if ends:
        await store.write(Dismiss(ends, run.clock.now(), AWAITED))


def _digest(rows: dict[str, ProcessRow], ended: Sequence[str], late: Sequence[str], live: Sequence[str]) -> Message:
    """One message for all commands; what they wrote is quoted, so that it cannot pass for words of the runtime."""
    lines = ["[process commands] Your turn was held for commands that it started."]
    for each in ended:
        lines += _ending(rows[each])
    for each in late:
        then = "ends with your turn" if rows[each].registration.parent_end == "cancel" else "goes on without it"
        lines.append(f"{each} ({_name(rows[each])}) still runs, and is not waited for any longer: it {then}.")
    for each in live:
        lines.append(f"{each} ({_name(rows[each])}) still runs: answer, and you are told when it ends.")
    return Message("user", (Text("\n".join(lines)),))


async def _update(port: HeldCommands, rows: dict[str, ProcessRow], ladder: Ladder, now: int) -> Message:
    """What is new of commands that run, and when there may be more."""
    lines = ["[process commands] Your turn is held for commands that it started."]
    for each in ladder.news:
        row, before, after = rows.get(each.after.id), each.before, each.after
        if row is None:
            continue
        if after.silent:
            lines.append(f"{row.id} ({_name(row)}) still runs, and has written nothing for five minutes.")
            continue
        lines.append(f"{row.id} ({_name(row)}) still runs, and has written more.")
        streams: tuple[tuple[Stream, int, int], ...] = (
            ("stdout", before.stdout, after.stdout),
            ("stderr", before.stderr, after.stderr),
        )
        for stream, start, end in streams:
            chunk = await _read(port, row, OutputQuery(stream, max(start, end - TAIL), max(1, min(end - start, TAIL))))
            text = "" if chunk is None or end == start else chunk.text
            lines += _quoted(stream, text, end - start > TAIL)
    more = f"in {max(0, ladder.next - now) / 1000:.0f} seconds at the earliest"
    left = "there are no more updates" if ladder.updates >= UPDATES else f"the next update is {more}"
    lines.append(f"Answer to wait on: you are told when one ends, and {left}.")
    return Message("user", (Text("\n".join(lines)),))


async def _looked_at(port: HeldCommands, row: ProcessRow) -> HeldCommand:
    live = row.live and row.stuck is None
    out = await _read(port, row, OutputQuery("stdout", limit=1)) if live else None
    err = await _read(port, row, OutputQuery("stderr", limit=1)) if live else None
    sizes = [0 if chunk is None else chunk.total for chunk in (out, err)]
    return HeldCommand(row.id, row.created, live, sizes[0], sizes[1], row.record.cancel is not None)


async def _read(port: HeldCommands, row: ProcessRow, query: OutputQuery) -> OutputChunk | None:
    """The first bytes that a query asks for; None where they cannot be read: the command is on another machine, or has
    ended and its folder was swept, which is told next."""
    try:
        async with contextlib.aclosing(port.output(row, query)) as chunks:
            return await anext(chunks, None)
    except (CommandsUnavailable, InvalidInput):
        return None


def _name(row: ProcessRow) -> str:
    return " ".join((row.registration.label or row.registration.name).split())[:200]


def _ending(row: ProcessRow) -> list[str]:
    outcome, result = row.record.outcome, None
    value: Any = outcome.value if isinstance(outcome, Success | Cancelled | Abandoned) else None
    with contextlib.suppress(ValidationError):
        result = convert(value, CommandResult) if value is not None else None
    if result is None:
        why = outcome.message if isinstance(outcome, Failure) else row.status
        return [f"{row.id} ({_name(row)}) has ended: {' '.join(why.split())[:200]}."]
    how = f"{result.status} {result.exit_code}" if result.exit_code is not None else result.status
    lines = [f"{row.id} ({_name(row)}) has ended: {how}, after {result.duration_ms / 1000:.1f} s."]
    for stream, text in (("stdout", result.stdout), ("stderr", result.stderr)):
        lines += _quoted(stream, text[-TAIL:], len(text) > TAIL)
    return lines


def _quoted(stream: str, text: str, cut: bool) -> list[str]:
    if not text.strip():
        return []
    return [f"{stream}:", *[f"> {line}" for line in f"{'…' if cut else ''}{text}".splitlines()]]
