"""`mainstay pending`, `approve`, `reject`, `settle` and `cancel`: what a person decides, from any process."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import typer

from mainstay.cli.host import (
    FAILED,
    ByOption,
    JsonOption,
    Refused,
    StoreOption,
    answered_by,
    deciding,
    find,
    is_helped,
    perform,
    process_id,
    reading,
    say_when,
)
from mainstay.cli.processes import cancel_process
from mainstay.cli.render import ago, console, print_json, table, text_line, whole_call
from mainstay.engine.waits import asked
from mainstay.errors import SessionDeleted, UnknownCall, UnknownTurn
from mainstay.model import ids
from mainstay.ports.store import Store
from mainstay.runtime import Runtime
from mainstay.sessions.session import Session
from mainstay.wire import pending_json

CallArgument = Annotated[str, typer.Argument(metavar="CALL", help="The call's id; `mainstay pending` lists them.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; the model is told.")]


class Settlement(StrEnum):
    """What became of a call whose end was not seen."""

    done = "done"
    failed = "failed"
    rerun = "rerun"


def pending(store: StoreOption = None, json: JsonOption = False) -> None:
    """List what waits for a person, or for an outside completion, in the whole store."""

    async def work() -> int:
        async with reading(store) as opened:
            stopping = {row.sid for row in await opened.open_sessions() if row.cancel is not None}
            found = await asked(opened, [wait for wait in await opened.waits() if wait.sid not in stopping])
        if json:
            print_json([pending_json(c) for c in found])
            return 0
        out, now = console(), int(time.time() * 1000)
        if not found:
            text_line(out, "nothing waits")
            return 0
        rows = [[c.call_id, c.kind, whole_call(c.tool, c.args), ago(c.since, now)] for c in found]
        table(out, ["call", "waits for", "what", "since"], rows, fold=(0, 2))
        kinds = {c.kind for c in found}
        if "approval" in kinds:
            text_line(out, "answer an approval with: mainstay approve CALL, mainstay reject CALL --reason …", "dim")
        if "recovery" in kinds:
            text_line(out, "answer a recovery with:  mainstay settle CALL done | failed | rerun", "dim")
        return 0

    perform(work, json)


def approve(call: CallArgument, by: ByOption = None, store: StoreOption = None, json: JsonOption = False) -> None:
    """Let a call run that asks for approval."""
    _answer(call, store, json, "approved", lambda s: s.approve(call, by=answered_by(by)))


def reject(
    call: CallArgument,
    reason: ReasonOption = "",
    by: ByOption = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Refuse a call that asks for approval."""
    _answer(call, store, json, "rejected", lambda s: s.reject(call, reason, by=answered_by(by)))


def settle(
    call: CallArgument,
    verdict: Annotated[Settlement, typer.Argument(metavar="VERDICT", help="What became of it; rerun: run it again.")],
    value: Annotated[str | None, typer.Option("--value", help="What the tool would have returned, as JSON.")] = None,
    reason: ReasonOption = "",
    by: ByOption = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Say what became of a call that a crash left unknown."""

    async def say(session: Session) -> None:
        known = None if value is None else _json_value(value)
        await session.settle(call, verdict.value, value=known, reason=reason, by=answered_by(by))

    _answer(call, store, json, f"settled as {verdict.value}", say)


def _json_value(text: str) -> Any:
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise Refused(f"--value is not JSON ({error}): quote strings, for example --value '\"seat 12A\"'") from None


def _answer(call: str, store: str | None, json: bool, word: str, answer: Callable[[Session], Awaitable[None]]) -> None:
    async def work() -> int:
        session_id, turn = _turn_of(call)
        async with deciding(store) as runtime:
            row = await runtime.store.session(session_id)
            if row is None or row.deleted:
                raise UnknownCall(call, f"there is no session {session_id!r} in this store")
            await answer(await runtime.session(session_id))
            helped = await is_helped(runtime, row.owner)
        if json:
            print_json({"call_id": call, "session_id": session_id, "answer": word})
        else:
            text_line(console(), f"{word} {call}", "green")
            if row.turn == turn:
                say_when(f"agent {row.agent!r}", helped)
            else:
                text_line(console(), f"its turn is over: the model is told with the next one of {session_id}", "dim")
        return 0

    perform(work, json)


def _turn_of(call: str) -> tuple[str, int]:
    try:
        session_id, (turn, *_) = ids.split(call, 3)
    except UnknownTurn:
        raise Refused(f"{call!r} is not a call id: it looks like session.turn.step.index") from None
    return session_id, turn


def cancel(
    target: Annotated[str, typer.Argument(metavar="ID", help="A session's id; or a process's id or handle JSON.")],
    turn: Annotated[str | None, typer.Option(help="This turn (its id or number), not the open one.")] = None,
    process: Annotated[
        bool | None, typer.Option("--process/--session", help="Which of the two it is, where both have this id.")
    ] = None,
    reason: ReasonOption = "",
    by: ByOption = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Ask a turn of a session, or a process, to stop."""

    async def work() -> int:
        async with deciding(store) as runtime:
            if await _is_process(runtime.store, target, False if turn is not None else process):
                return await cancel_process(runtime, process_id(target), reason, answered_by(by), json)
            return await _cancel_turn(runtime, target, turn, reason, answered_by(by), json)

    perform(work, json)


async def _is_process(store: Store, target: str, said: bool | None) -> bool:
    """Whether a process is meant. What may be either is refused: the wrong one must not be stopped."""
    if said is not None or target.lstrip().startswith("{"):
        return said is not False
    a_session = (row := await store.session(target)) is not None and not row.deleted
    a_process = await store.process(target) is not None
    if a_session and a_process:
        raise Refused(f"{target!r} is a session and a process: say --session or --process")
    if not a_session and not a_process:
        if row is not None:
            raise SessionDeleted(target)
        raise Refused(
            f"there is no session {target!r} in this store: `mainstay sessions` shows what is; nor a process: "
            "`mainstay ps` shows those",
            code="not_found",
        )
    return a_process


async def _cancel_turn(runtime: Runtime, session: str, turn: str | None, reason: str, by: str, json: bool) -> int:
    name = ids.turn_id(session, int(turn)) if turn is not None and turn.isdecimal() else turn
    row = await find(runtime.store, session)
    asked = name or (None if row.turn is None else ids.turn_id(session, row.turn))
    status = await (await runtime.session(session)).cancel(reason, by=by, turn_id=name)
    helped = await is_helped(runtime, row.owner)
    if json:
        print_json({"session_id": session, "turn_id": asked, "status": status})
    else:
        ended = status == "completion_won" and asked is None
        words = f"nothing to stop: no turn of {session} is open" if ended else CANCELLED[status].format(turn=asked)
        text_line(console(), words)
        if status == "requested":
            say_when(f"agent {row.agent!r}", helped)
    return 0 if status in ("requested", "already_requested") else FAILED


CANCELLED = {
    "requested": "asked turn {turn} to stop",
    "already_requested": "turn {turn} was asked to stop before",
    "completion_won": "nothing to stop: turn {turn} has ended",
    "unknown": "there is no turn {turn}",
}
