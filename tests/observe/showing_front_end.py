"""A front end that shows a session: `python -m tests.observe.showing_front_end <folder> [<cursor>]`.

It prints each event as one line: its cursor, its kind and its text. When it follows the session, it prints one more.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from perdure import Runtime, Session
from perdure.model.event import TextDelta
from tests.kit import print_line, until


async def show(folder: Path, cursor: str | None) -> None:
    async with Runtime(folder / "agent.db") as runtime:
        assert runtime._parts is not None
        relay = runtime._parts.relay
        showing = asyncio.create_task(print_all(await runtime.session("s", agent="speaker"), cursor))
        await until(lambda: "s" in relay._followed and relay._followed["s"].ready.is_set())
        print_line("\tready\t")
        await showing


async def print_all(session: Session, cursor: str | None) -> None:
    async for event in session.observe(cursor):
        text = event.text if isinstance(event, TextDelta) else ""
        print_line(f"{event.cursor}\t{type(event).__name__}\t{text}")


if __name__ == "__main__":
    asyncio.run(show(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))
