"""Watches a session that another process works on: `python -m tests.crash.watcher <folder>`.

Each event is a line in the folder's ledger, under its cursor. Started again, it goes on after the last of them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from perdure import Runtime
from perdure.model.event import AnyEvent, Gap, TextDelta
from perdure.testing.crash import Ledger, LedgerLine
from tests.kit import print_line, until


def line_of(event: AnyEvent) -> list[str]:
    """An event's kind, its turn, and its text; of a gap the last turn that is committed."""
    if isinstance(event, Gap):
        return ["Gap", event.turn_id, event.last_committed]
    return [type(event).__name__, event.turn_id, event.text if isinstance(event, TextDelta) else ""]


async def watch(folder: Path) -> None:
    ledger = Ledger(folder / "ledger")
    kept = [line.key for line in ledger.lines()]
    async with Runtime(folder / "agent.db") as runtime:
        session = await runtime.session("s")
        reading = asyncio.create_task(keep(session.observe(kept[-1] if kept else None), ledger))
        assert runtime._parts is not None
        followed = runtime._parts.relay._followed
        await until(lambda: "s" in followed and followed["s"].ready.is_set())  # the next turn is news
        print_line("ready")
        await reading


async def keep(events: AsyncIterator[AnyEvent], ledger: Ledger) -> None:
    async for event in events:
        ledger.write(LedgerLine("shown", event.cursor, os.getpid(), line_of(event)))


if __name__ == "__main__":
    asyncio.run(watch(Path(sys.argv[1])))
