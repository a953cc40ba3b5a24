"""How a Runtime comes to rest: what there is still to do, and what a draining one goes on with.

When it drains nothing new is taken up, but what work in hand waits for is part of that work: everything that is asked
for is only written down, as nobody's, and what of it a running turn or process waits for is found here and taken up. It
may be a subagent, a process that another Runtime left behind, a turn that goes on because a person has answered. The
rest stays on disk for the next entry.
"""

from __future__ import annotations

import logging

from mainstay.engine.lease import Worker
from mainstay.errors import StoreError
from mainstay.processes.worker import ProcessWorker
from mainstay.sessions.desk import Desk

log = logging.getLogger("mainstay.sessions")


async def see_to_needs(desk: Desk, work: ProcessWorker) -> None:
    """Take up what work in hand waits for and nobody has, until the Runtime is left.

    It looks when somebody here begins to wait, when something here has changed, and with every look of the watch: what
    is waited for becomes free in many ways, also by what others write.
    """
    while not desk.turns.leaving:
        desk.stirred.clear()
        try:
            work.look_around()
            await _claim_turns(desk)
        except StoreError as error:
            log.warning("cannot look at what running work waits for: %s", error)
        await desk.stirred.wait()


async def _claim_turns(desk: Desk) -> None:
    for session_id, turn in desk.turns.residents.needed.items():
        row = await desk.store.session(session_id)
        if row is not None and row.state == "open" and row.owner is None and row.turn is not None and row.turn <= turn:
            await desk.turns.claim(row)


async def could_work(desk: Desk, work: ProcessWorker, worker: Worker, recovers: bool) -> bool:
    """Whether this Runtime could work on something now that is on disk."""
    if desk.turns.draining or desk.store.held() is not None:
        return False  # what runs is waited for, and nothing else is taken up
    turns = [r for r in await desk.store.open_sessions() if r.state == "open" and r.agent in desk.definitions]
    processes = [r for r in await desk.store.active_processes() if work.can(r.registration)]
    owners = {row.owner for row in turns} | {row.owner for row in processes}
    if worker.id in owners:
        return True
    if not recovers:
        return False  # what others have or left behind is never taken up here
    if owners and (None in owners or await worker.any_gone(owners)):
        return True
    return await desk.wakes.could_deliver()
