"""`perdure workers`: the Runtimes that have a store open, and what they do."""

from __future__ import annotations

import time
from typing import Any

from perdure.cli.host import OK, JsonOption, StoreOption, dead_workers, perform, reading
from perdure.cli.render import ago, console, print_json, table, text_line
from perdure.model.session import Offers, WorkerRow, WorkerUse

UNKNOWN = "—"
"""Stands for a figure that a worker of an older version does not publish."""


def workers(store: StoreOption = None, json: JsonOption = False) -> None:
    """List the Runtimes that have the store open: host, pid, version, start time, and places in use.

    Turns, processes and threads are as of the last renewal of the worker. Calls that were given up and still hold a
    thread are named below the table.
    """

    async def work() -> int:
        async with reading(store) as opened:
            dead, rows = await dead_workers(opened), await opened.workers()
        if json:
            print_json([_as_json(row, dead.get(row.id, True)) for row in rows])
        else:
            _print(rows, dead)
        return OK

    perform(work, json)


def _as_json(row: WorkerRow, dead: bool) -> dict[str, Any]:
    offers = row.offers or Offers()
    use = offers.use or WorkerUse()
    return {
        "id": row.id,
        "alive": not dead,
        "host": row.host,
        "pid": row.pid,
        "version": offers.version or None,
        "since": row.started,
        "turns": {"in_use": use.turns, "places": use.most_turns},
        "processes": {"in_use": use.processes, "places": use.most_processes},
        "threads": {"in_use": use.threads, "places": use.most_threads},
        "left": list(use.left),
        "agents": list(offers.agents),
        "functions": list(offers.functions),
    }


def _print(rows: list[WorkerRow], dead: dict[str, bool]) -> None:
    out, now = console(), int(time.time() * 1000)
    if not rows:
        text_line(out, "no worker has this store open")
        return
    shown = [
        [
            row.id,
            "dead" if dead.get(row.id, True) else "running",
            row.host,
            str(row.pid),
            (row.offers or Offers()).version or UNKNOWN,
            ago(row.started, now),
            *_in_use(row),
        ]
        for row in rows
    ]
    table(out, ["worker", "state", "host", "pid", "version", "since", "turns", "processes", "threads"], shown)
    for row in rows:
        use = None if row.offers is None else row.offers.use
        for call in () if use is None else use.left:
            text_line(out, f"  {row.id}: call {call} was given up and still holds a thread", "yellow")


def _in_use(row: WorkerRow) -> list[str]:
    use = None if row.offers is None else row.offers.use
    if use is None:
        return [UNKNOWN] * 3
    return [
        f"{use.turns}/{use.most_turns}",
        f"{use.processes}/{use.most_processes}",
        f"{use.threads}/{use.most_threads}",
    ]
