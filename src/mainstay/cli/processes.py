"""`mainstay signal` and `mainstay processes …`: what a person may do with processes, from any OS process."""

from __future__ import annotations

import re
import sys
import time
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import typer

from mainstay.cli.host import (
    FAILED,
    OK,
    JsonOption,
    ProcessArgument,
    Refused,
    StoreOption,
    deciding,
    find_process,
    is_helped,
    is_terminal,
    perform,
    process_id,
    reading,
    say_when,
)
from mainstay.cli.logs import result
from mainstay.cli.render import ago, brief, console, plural, print_json, table, text_line
from mainstay.cli.steps import steps
from mainstay.model.process import RETIRED, ProcessRow, Wake, WakeRow
from mainstay.model.process_write import Dismiss
from mainstay.runtime import Runtime

_WAKE = msgspec.json.Decoder(Wake).decode

UNITS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86_400}
"""Seconds in what a person may write after a number."""

processes = typer.Typer(
    help="Look after processes: wait for one, resume a stuck one, forget old ones, see who was not told.",
    no_args_is_help=True,
)


def what_it_takes(row: ProcessRow) -> str:
    """What a Runtime needs to work on a process."""
    asked = row.registration
    return f"{asked.kind} {asked.definition or asked.name!r}" if asked.name else f"an engine for {asked.kind!r}"


def signal(
    process: ProcessArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The signal's name.")],
    payload: Annotated[str, typer.Argument(metavar="JSON", help="What it says, as JSON; '-' reads stdin.")] = "null",
    key: Annotated[str | None, typer.Option(help="Sent twice under the same key, it is one signal.")] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Send a signal to a process: whoever works on it hears of it, now or later."""

    async def work() -> int:
        target, told = process_id(process), _payload(payload)
        async with deciding(store) as runtime:
            sent = await runtime.processes.signal(target, name, told, key=key)
            row = await find_process(runtime.store, target)
            helped = await is_helped(runtime, row.owner)
        if json:
            known = {"awaited": sent.awaited, "waits_for": sent.waits_for}
            print_json({"process_id": target, "signal": name, "event": int(sent)} | known)
        else:
            note = sent.note(name)
            text_line(console(), f"told {target}: {name} (event {int(sent)})", "yellow" if note else "green")
            if note:
                text_line(console(), note, "yellow")
            if row.active:
                say_when(what_it_takes(row), helped)
        return OK

    perform(work, json)


def _payload(text: str) -> Any:
    data = sys.stdin.buffer.read() if text == "-" else text.encode(errors="surrogateescape")
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise Refused(f"the payload is not JSON ({error}): quote strings, for example '\"yes\"'") from None


async def cancel_process(runtime: Runtime, target: str, reason: str, by: str, json: bool) -> int:
    """The part of `mainstay cancel` that is about processes."""
    status = await runtime.processes.cancel(target, reason, by=by)
    row = await find_process(runtime.store, target)
    helped = await is_helped(runtime, row.owner)
    if json:
        print_json({"process_id": target, "status": status, "process": row.state})
        return FAILED if status == "ended" else OK
    if status == "ended":
        text_line(console(), f"nothing to stop: process {target} is {row.status}")
        return FAILED
    if not row.live:
        text_line(console(), f"process {target} is {row.status}: nobody was working on it")
        return OK
    asked = {"requested": f"asked process {target} to stop"}
    text_line(console(), asked.get(status, f"process {target} was asked to stop before"))
    if row.active:
        say_when(what_it_takes(row), helped)
    return OK


# ---------------------------------------------------------------------- keeping house


def resume(process: ProcessArgument, store: StoreOption = None, json: JsonOption = False) -> None:
    """Let a stuck process be worked on again, once its cause is mended; `mainstay doctor` says why it is stuck."""

    async def work() -> int:
        target = process_id(process)
        async with deciding(store) as runtime:
            resumed = await runtime.processes.resume(target)
            row = await find_process(runtime.store, target)
            helped = await is_helped(runtime, row.owner)
        if json:
            print_json({"process_id": target, "resumed": resumed, "status": row.state})
        elif resumed:
            text_line(console(), f"resumed {target}", "green")
            if row.active:
                say_when(what_it_takes(row), helped)
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
            raise Refused(f"only what is over can be pruned, and {', '.join(unknown)} is not: use one of "
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
        raise Refused(f"{text!r} is no length of time: write for example 90s, 30min, 12h or 7d")
    return float(found[1]) * UNITS[found[2]]


def _confirm(older_than: str) -> None:
    if not (sys.stdin.isatty() and is_terminal()):
        raise Refused("what is pruned cannot be brought back: say --yes")
    if not typer.confirm(f"Forget every process that ended more than {older_than} ago? This cannot be undone"):
        raise Refused("nothing was pruned", FAILED, "refused")


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
    """What becomes of news for a session."""

    pending = "pending"
    enqueued = "enqueued"
    discarded = "discarded"


def wakes(
    state: Annotated[WakeStates | None, typer.Option(help="Only these; by default pending and discarded.")] = None,
    session: Annotated[str | None, typer.Option(help="Only those for this session.")] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """List news of processes that sessions were not told: what waits, and what could not be delivered."""

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
        text_line(out, "bring discarded ones back with: mainstay processes redrive NUMBER …", "dim")


def redrive(
    numbers: Annotated[list[int], typer.Argument(metavar="NUMBER…", help="Of `mainstay processes wakes`.")],
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Deliver discarded news after all: to its session, when a Runtime next looks."""

    async def work() -> int:
        async with deciding(store) as runtime:
            back = await runtime.store.write(Dismiss(tuple(numbers), int(time.time() * 1000)))
        if json:
            print_json({"redriven": [row.number for row in back]})
        else:
            told = brief(", ".join(str(row.number) for row in back), 200)
            text_line(console(), f"brought back: {told}" if back else "none of them is discarded")
        return OK if back else FAILED

    perform(work, json)


for verb in (result, steps, resume, prune, versions, wakes, redrive):
    processes.command()(verb)
