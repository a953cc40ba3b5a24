"""A Runtime that drains: nothing new is taken up, but what work in hand waits for is part of that work.

While it drains everything that is asked for is only written down, as nobody's. Whatever of it a running turn or process
waits for is found here and taken up: a subagent, a process that another Runtime left behind, a turn that goes on
because a person has answered. The rest stays on disk for the next entry.
"""

from __future__ import annotations

import asyncio
import logging

from mainstay.errors import StoreError
from mainstay.processes.worker import ProcessWorker
from mainstay.sessions.desk import Desk

log = logging.getLogger("mainstay.sessions")

PERIOD = 0.05
"""Looked at again and again: what is waited for becomes free in many ways, also by what others write."""


async def see_to_needs(desk: Desk, work: ProcessWorker) -> None:
    """Take up what work in hand waits for and nobody has, until the Runtime is left."""
    while not desk.turns.leaving:
        try:
            work.look_around()
            await _claim_turns(desk)
        except StoreError as error:
            log.warning("cannot look at what running work waits for: %s", error)
        await asyncio.sleep(PERIOD)


async def _claim_turns(desk: Desk) -> None:
    for session_id, turn in desk.turns.residents.needed.items():
        row = await desk.store.session(session_id)
        if row is not None and row.state == "open" and row.owner is None and row.turn is not None and row.turn <= turn:
            await desk.turns.claim(row)
