"""What a session has cost: read from its records, so that it is as durable as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mainstay.engine.journal import load
from mainstay.graph.commit import ledger
from mainstay.graph.tree import turns
from mainstay.model.llm import Usage
from mainstay.model.record import Closed, Record, Replied
from mainstay.model.session import SessionRow
from mainstay.model.settings import load as settings_of
from mainstay.ports.store import Store
from mainstay.turn.machine import usage_of

TURNS = "turns"
"""The label of what turns themselves ask."""

PIECE = 64
"""A long session is read so many turns at a time, and others get their turn in between."""


async def spent(store: Store, row: SessionRow) -> dict[str, Usage]:
    """The usage of a session by label: its own turns, also the open one as far as it is recorded, and the rest."""
    found = {TURNS: Usage()}
    for first in range(1, row.next, PIECE):
        for turn in turns(await load(store, row.sid, first, min(first + PIECE, row.next) - 1)):
            _add(found, _of_turn(turn.records))
        await asyncio.sleep(0)
    _add(found, settings_of(row.settings).ledger)
    return found


def _of_turn(records: Sequence[Record]) -> dict[str, Usage]:
    closed = records[-1]
    if isinstance(closed, Closed):
        return _sum({TURNS: closed.usage}, closed.ledger or {})
    own = sum([usage_of(each) for each in records if isinstance(each, Replied)], Usage())
    return _sum({TURNS: own}, ledger(records) or {})


def _sum(one: dict[str, Usage], other: dict[str, Usage]) -> dict[str, Usage]:
    """Both together; a plugin may have chosen our own label for its questions."""
    found = dict(one)
    _add(found, other)
    return found


def _add(found: dict[str, Usage], more: dict[str, Usage]) -> None:
    for label, usage in more.items():
        found[label] = found.get(label, Usage()) + usage
