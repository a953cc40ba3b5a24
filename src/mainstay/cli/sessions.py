"""`mainstay sessions`, `fork` and `delete`: the sessions of a store."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from mainstay.cli.host import (
    JsonOption,
    Refused,
    StoreOption,
    condition,
    dead_workers,
    deciding,
    find,
    is_terminal,
    perform,
    reading,
)
from mainstay.cli.render import ago, console, plural, print_json, table, text_line
from mainstay.model.ids import node_id
from mainstay.model.session import SessionRow
from mainstay.model.write import SessionFilter
from mainstay.ports.store import Store

SessionArgument = Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.")]

STATES = {"running": "open", "queued": "open", "interrupted": "open"} | {
    s: s for s in ("open", "parked", "stuck", "idle")
}
"""What a person may ask for, and what the store calls it."""


def sessions(
    store: StoreOption = None,
    agent: Annotated[str | None, typer.Option(help="Only sessions of this agent.")] = None,
    state: Annotated[str | None, typer.Option(help="Only those that are " + ", ".join(STATES) + ".")] = None,
    prefix: Annotated[str, typer.Option(help="Only ids that begin like this.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 100,
    json: JsonOption = False,
) -> None:
    """List sessions, the most recently changed first."""

    async def work() -> int:
        if state is not None and state not in STATES:
            raise Refused(f"there is no state {state!r}: use one of {', '.join(STATES)}")
        wanted = SessionFilter(agent, None if state is None else STATES[state], prefix, limit)
        async with reading(store) as opened:
            dead = await dead_workers(opened)
            found = [await _described(opened, row, dead) for row in await opened.sessions(wanted)]
        if state in ("running", "queued", "interrupted"):
            found = [s for s in found if s["state"] == state]
        if json:
            print_json(found)
        else:
            _print(found)
        return 0

    perform(work, json)


async def _described(store: Store, row: SessionRow, dead: dict[str, bool]) -> dict[str, Any]:
    origin = None
    if row.fork is not None:
        source = await store.session_by_sid(row.fork.sid)
        origin = node_id(source.id if source else "?", row.fork.turn, row.fork.ordinal)
    return {
        "id": row.id,
        "agent": row.agent,
        "state": await condition(store, row, dead),
        "reason": row.reason,
        "turns": row.head,
        "inputs": row.next - 1,
        "open_turn": None if row.turn is None else f"{row.id}.{row.turn}",
        "owner": row.owner,
        "created": row.created,
        "updated": row.updated,
        "forked_at": origin,
    }


def _print(found: list[dict[str, Any]]) -> None:
    out, now = console(), int(time.time() * 1000)
    if not found:
        text_line(out, "no sessions")
        return
    # A column of its own where width is free; below the id on a terminal.
    forks = not out.is_terminal and any(s["forked_at"] for s in found)
    headers = ["session", "agent", "state", "turns", "updated", *(["forked at"] if forks else [])]
    rows = []
    for s in found:
        told = f"{s['state']}: {s['reason']}" if s["reason"] else s["state"]
        name = f"{s['id']}\n⑂ {s['forked_at']}" if out.is_terminal and s["forked_at"] else s["id"]
        row = [name, s["agent"], told, str(s["turns"]), ago(s["updated"], now)]
        rows.append([*row, s["forked_at"] or ""] if forks else row)
    table(out, headers, rows, fold=(0, 2, 5))


def fork(
    session: SessionArgument,
    at: Annotated[
        str | None, typer.Option(help="The node (or turn) to branch after; `mainstay show --records` lists them.")
    ] = None,
    as_: Annotated[str | None, typer.Option("--as", help="The id of the new session; one is made if absent.")] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Begin a new session that shares the history of this one."""

    async def work() -> int:
        async with deciding(store) as runtime:
            await find(runtime.store, session)
            if as_ is not None and await runtime.store.session(as_) is not None:
                raise Refused(f"there is a session {as_!r} already: choose another id", 1, "conflict")
            branch = await (await runtime.session(session)).fork(at, session_id=as_)
        if json:
            print_json({"session_id": branch.id, "agent": branch.agent, "source": session, "at": at})
        else:
            text_line(console(), branch.id)
        return 0

    perform(work, json)


def delete(
    session: SessionArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a session for good; its id is never used again, and forks keep what they share."""

    async def work() -> int:
        async with deciding(store) as runtime:
            row = await find(runtime.store, session)
            if not yes:
                _confirm(row)
            await runtime.sessions.delete(session)
        if json:
            print_json({"session_id": session, "deleted": True})
        else:
            text_line(console(), f"deleted {session}")
        return 0

    perform(work, json)


def _confirm(row: SessionRow) -> None:
    if not (sys.stdin.isatty() and is_terminal()):
        raise Refused(f"deleting {row.id} cannot be undone: say --yes")
    if not typer.confirm(f"Delete {row.id} with {plural(row.head, 'turn')}? This cannot be undone"):
        raise Refused("nothing was deleted", 1, "refused")
