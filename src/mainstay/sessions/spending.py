"""What a session has cost: read from its records, so that it is as durable as they are.

A child session is known to its parent by id, from a record or from the parent's settings, since before it was made. Its
cost is read from its own records whenever somebody asks; nothing is copied, so nothing can be counted twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Literal, TypeAlias

from mainstay.engine.journal import load_turns
from mainstay.graph.commit import completions
from mainstay.model.llm import Usage
from mainstay.model.record import INTERRUPTED, Closed, Faltered, Record, Replied, slots
from mainstay.model.session import SessionRow
from mainstay.model.settings import load as settings_of
from mainstay.ports.store import Store
from mainstay.turn.machine import usage_of

TURNS = "turns"
"""The label of what turns themselves ask."""

PIECE = 64
"""A long session is read so many turns at a time, and others get their turn in between."""

By: TypeAlias = Literal["label", "model"]
"""How costs are told apart: by who asked, or by which model answered ("" where no answer named one)."""


async def spent(store: Store, row: SessionRow, by: By = "label") -> dict[str, Usage]:
    """The usage of a session and its children, also of open turns as far as they are recorded."""
    found = {TURNS: Usage()} if by == "label" else {}
    # Each with the label of the child of `row` that it goes back to.
    family: list[tuple[SessionRow, str | None]] = [(row, None)]
    while family:
        member, of_child = family.pop()
        children: dict[str, None] = {}
        async for own, usage in _costs(store, member, by, children):
            name = own if by == "model" or of_child is None else of_child
            found[name] = found.get(name, Usage()) + usage
        for child in [each for name in children if (each := await _child(store, name, member.id)) is not None]:
            family.append((child, settings_of(child.settings).label if of_child is None else of_child))
    return found


async def _child(store: Store, name: str, parent: str) -> SessionRow | None:
    """A session that was to be begun; None when a crash came first, its id was taken, or it was deleted."""
    row = await store.session(name)
    return row if row is not None and settings_of(row.settings).parent == parent else None


async def _costs(store: Store, row: SessionRow, by: By, children: dict[str, None]) -> AsyncIterator[tuple[str, Usage]]:
    """What one session has asked of models; `children` is filled with the ids of those it has begun."""
    for first in range(1, row.next, PIECE):
        for turn in await load_turns(store, row.sid, first, min(first + PIECE, row.next) - 1):
            for label, model, usage in _of_turn(turn.records):
                yield label if by == "label" else model, usage
            children.update(dict.fromkeys([child for slot in slots(turn.records) for child in slot.children]))
        await asyncio.sleep(0)
    settings = settings_of(row.settings)
    children.update(dict.fromkeys(settings.children))
    for name, usage in (settings.ledger if by == "label" else settings.models).items():
        yield name, usage


def _of_turn(records: Sequence[Record]) -> Iterator[tuple[str, str, Usage]]:
    """Label, model and usage of everything that a turn has asked.

    An ask that ended the turn has no record of its own: only the turn's whole usage tells that it was begun.
    """
    unknown = 0
    for record in records:
        reply = record.reply if isinstance(record, Closed) else record
        if isinstance(reply, Replied):
            usage = usage_of(reply)
            unknown += usage.unknown
            yield TURNS, reply.model, usage
        elif isinstance(record, Faltered) and (record.code == INTERRUPTED or record.begun) and not record.call:
            unknown += 1
            yield TURNS, "", Usage(unknown=1)
        if isinstance(record, Closed) and record.usage.unknown > unknown:
            yield TURNS, "", Usage(unknown=record.usage.unknown - unknown)
    yield from completions(records)
