"""The part of `mainstay doctor` that is about processes: which are stuck, which nobody takes up, who was not told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from mainstay.cli.ps import listed, state_of
from mainstay.cli.render import plural, span
from mainstay.errors import MainstayError
from mainstay.model.process import ProcessRow, Success, WakeRow
from mainstay.model.process_write import ProcessFilter
from mainstay.ports.store import Store
from mainstay.processes.journal import load_steps

PATIENCE_MS = 60_000
"""Two lease terms: what nobody took up for so long says why, and that is here."""
NAMED = 10
"""Problems of one sort that are listed one by one; of more, how many there are."""


class Need(Struct, frozen=True):
    """Something a person should do."""

    about: str
    problem: str
    advice: str


class Processes(Struct, frozen=True):
    """What doctor found about processes: how many live, by state, and how many wakes wait or were discarded."""

    states: dict[str, int]
    wakes: dict[str, int]
    needs: list[Need]


async def examine_processes(store: Store, dead: dict[str, bool], now: int) -> Processes:
    helped = not all(dead.values())
    states: dict[str, int] = {}
    stuck, asked, idle = list[ProcessRow](), list[ProcessRow](), dict[tuple[str, str], list[ProcessRow]]()
    async for row in listed(store, ProcessFilter(live=True)):
        state = state_of(row, dead)
        states[state] = states.get(state, 0) + 1
        if state == "stuck":
            stuck.append(row)
        elif row.record.abandon is not None and row.owner is None:
            asked.append(row)
        elif (sort := _left_alone(row, state, helped, now)) is not None:
            idle.setdefault((_definition(row), sort), []).append(row)
    needs = [*_stuck(stuck), *_to_abandon(asked)]
    needs += [_taken_up_by_nobody(name, sort, rows, helped, now) for (name, sort), rows in sorted(idle.items())]
    pending, discarded = await store.wakes(None, "pending"), await store.wakes(None, "discarded")
    needs += await _wakes(store, pending, discarded, now)
    return Processes(dict(sorted(states.items())), {"pending": len(pending), "discarded": len(discarded)}, needs)


def _definition(row: ProcessRow) -> str:
    asked = row.registration
    return asked.definition or asked.name or asked.kind


def _stuck(rows: list[ProcessRow]) -> list[Need]:
    needs = [
        Need(
            row.id,
            f"stuck: {row.stuck}",
            f"repair the cause, then `mainstay processes resume {row.id}`, or end it with `mainstay cancel {row.id}`",
        )
        for row in rows[:NAMED]
    ]
    if len(rows) > NAMED:
        left = len(rows) - NAMED
        needs.append(Need("processes", f"{left:,} more are stuck", "`mainstay ps --status stuck` lists them"))
    return needs


def _to_abandon(rows: list[ProcessRow]) -> list[Need]:
    needs = []
    for row in rows[:NAMED]:
        request = row.record.abandon
        assert request is not None
        problem = f"{request.by} thinks that it will never end: {request.reason or 'no reason given'}"
        advice = "look into it, then `runtime.processes.reconcile_abandon(…)` or `.complete(…)`"
        needs.append(Need(row.id, problem, advice))
    return needs


def _left_alone(row: ProcessRow, state: str, helped: bool, now: int) -> str | None:
    """What nobody does with it, if somebody should have by now."""
    if state in ("queued", "interrupted"):
        since, sort = row.record.updated, state
    elif state == "waiting" and row.due is not None:
        since, sort = row.due, "overdue"
    else:
        return None
    # With a worker there it goes on by itself in a moment; without one it does not.
    return sort if now - since > (PATIENCE_MS if helped else 0) else None


def _taken_up_by_nobody(name: str, sort: str, rows: list[ProcessRow], helped: bool, now: int) -> Need:
    """One line for all processes of a definition: they want the same thing."""
    since = min(row.due or 0 if sort == "overdue" else row.record.updated for row in rows)
    ids = ", ".join(row.id for row in rows[:3])
    more = f" and {len(rows) - 3:,} more" if len(rows) > 3 else ""
    why = "nobody took them up" if helped else "no live worker has this store open"
    problem = f"{plural(len(rows), 'process', 'processes')} {sort} for {span(now - since)}, and {why}: {ids}{more}"
    kind = rows[0].registration.kind
    if helped:
        places = "; if one does, all its places are taken" if sort != "overdue" else ""
        return Need(name, problem, f"does a live worker have {kind} {name!r}? start one that does{places}")
    return Need(name, problem, f"start a Runtime with {kind} {name!r} on this store: they go on by themselves")


async def _wakes(store: Store, pending: list[WakeRow], discarded: list[WakeRow], now: int) -> list[Need]:
    needs = list[Need]()
    # A note waits for the next turn, whenever that is.
    late = [wake for wake in pending if wake.policy == "turn" and now - wake.at > PATIENCE_MS]
    for (session_id, _), rows in _by_session(late).items():
        session = await store.session(session_id)
        if session is None or session.turn is None:  # a busy one is told when its turn has ended
            problem = f"{plural(len(rows), 'wake waits', 'wakes wait')} for {span(now - rows[0].at)} to be delivered"
            agent = f"its agent {session.agent!r}" if session is not None and session.agent else "its agent"
            advice = f"does a live worker have {agent}? start one that does"
            needs.append(Need(f"session {session_id}", problem, advice))
    for (session_id, reason), rows in _by_session(discarded).items():
        session = await store.session(session_id)
        if session is not None and session.deleted:
            continue  # nobody is there to be told
        numbers = " ".join(str(row.number) for row in rows[:NAMED])
        problem = f"{plural(len(rows), 'wake was', 'wakes were')} discarded: {reason or 'no reason recorded'}"
        advice = f"if it should be told: mainstay processes redrive {numbers}"
        needs.append(Need(f"session {session_id}", problem, advice))
    return needs


def _by_session(wakes: list[WakeRow]) -> dict[tuple[str, str | None], list[WakeRow]]:
    """By session, and by why they were discarded."""
    found: dict[tuple[str, str | None], list[WakeRow]] = {}
    for wake in wakes:
        found.setdefault((wake.session_id, wake.reason), []).append(wake)
    return found


# ---------------------------------------------------------------------- deep


async def read_processes(store: Store, needs: list[Need], advance: Callable[[int], Any]) -> int:
    """Decode every event and every record of every journal, and look at every blob that one refers to."""
    count = 0
    async for row in listed(store, ProcessFilter()):
        try:
            count += await _read_process(store, row)
        except MainstayError as error:
            needs.append(Need(row.id, str(error), "restore the store from a backup"))
        advance(1)
    return count


async def _read_process(store: Store, row: ProcessRow) -> int:
    count = after = 0
    while page := await store.events(row.pid, after):
        count, after = count + len(page), page[-1][1]
    records, _ = await load_steps(store, row.pid, row.id)
    outcome = row.record.outcome
    if isinstance(outcome, Success) and outcome.blob is not None:
        await store.blobs.get(outcome.blob.digest)
    if row.registration.env is not None:
        await store.blobs.get(row.registration.env)
    return count + len(records)
