"""Holding a turn whose model has answered while commands run that it started (`Agent(wait_for_commands=…)`).

Without it, "I will wait for the tests" ends the turn, and with it the commands that the turn owns. With it the turn is
parked at that point, as one is whose tool waits for processes, and costs no tokens:

    a command ends        the model is told how, in one message for all of them, and answers again
    its time is over      the model is told once; from then on nothing is held for that command, which goes on
    anything is said      the model is told that, and answers again

What a turn is held for is decided in `turn/hold.py`, from its commands, the wait on disk, and the time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import ValidationError

from mainstay.engine.driver import Parked, Run
from mainstay.engine.journal import taken
from mainstay.engine.waits import decode_pending, wait_id, whole
from mainstay.lifecycle.process import AWAITED, ENDS
from mainstay.model.codec import convert, encode
from mainstay.model.command import COMMAND_KIND, CommandResult
from mainstay.model.message import Message, Text
from mainstay.model.outcome import PendingCall
from mainstay.model.process import Abandoned, Cancelled, Failure, ProcessRow, Success, Wake
from mainstay.model.session import WaitRow
from mainstay.model.write import Dismiss, ProcessFilter
from mainstay.plugins.turn import plugins_of
from mainstay.ports.store import Store
from mainstay.turn.hold import HeldCommand, Hold, Tell, decide

MOST = 100
"""Commands of one turn that are looked at."""
TAIL = 2_000
"""Characters of each stream that the model is shown; `await_process` gives it more."""

_decode_wake = msgspec.json.Decoder(Wake).decode


async def held(store: Store, run: Run, seconds: float) -> Parked | Message | None:
    """Hold the turn if there is something to hold it for: it is parked, or this message is for the model. None: it is
    over, or something was said that comes first (`run.journal.inputs`).

    What it is held for is written before it parks: a command may end between the two, and the model is told of that
    wherever the host dies.
    """
    scope, step, limit = run.scope, run.machine.state.step, int(seconds * 1000)
    name = wait_id(f"{run.turn_id}.{step}.0", "process")
    found = await store.wait(name) if run.resumed else None
    wait = None if found is None else await whole(store, found)
    while True:
        session = await store.session_by_sid(scope.sid)
        if session is None or await _something_was_said(store, run):
            run.journal.note_inputs()
            return None
        before = None if wait is None else decode_pending(wait.body).processes
        rows = await _commands(store, run, before)
        commands = [HeldCommand(row.id, row.created, row.live and row.stuck is None) for row in rows.values()]
        now = run.clock.now()
        if wait is not None and wait.state == "expired":
            now = max(now, wait.due or 0)  # the clock may have been set back since
        match decide(commands, before, now, limit):
            case None:
                return None
            case Tell(ended, late, live):
                await _dismiss(store, run, [rows[each] for each in ended])
                return _digest(rows, ended, late, live)
            case Hold(ids, due):
                if wait is None:
                    asked = PendingCall(f"{run.turn_id}.{step}.0", "process", "answer", {}, now, due, processes=ids)
                    wait = WaitRow(name, scope.sid, scope.turn, f"{step}.0", "process", "open", due, encode(asked))
                    await run.journal.flush((wait,))
                    continue
                if (plugins := plugins_of(run)) is not None:
                    plugins.note()
                appended = await run.journal.flush((), (name,), ids, session.next)
                if appended is not None and appended.parked:
                    return Parked((), ids)
                run.check_cancel()


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
    return found


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
        lines.append(f"{each} ({_name(rows[each])}) still runs, and is not waited for any longer.")
    for each in live:
        lines.append(f"{each} ({_name(rows[each])}) still runs: answer, and you are told when it ends.")
    return Message("user", (Text("\n".join(lines)),))


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
        if text.strip():
            cut = "…" if len(text) > TAIL else ""
            lines.append(f"{stream}:")
            lines += [f"> {line}" for line in f"{cut}{text[-TAIL:]}".splitlines()]
    return lines
