"""What sessions have asked of models, and what that has cost.

    of one session, from its records      `spent`: exact to the last record, also of turns that are open
    of a whole store, from sums           `total`: rows that every commit adds to (`turn_costs`), so that no history is
                                          read; an open turn is not in them yet

The metadata of a sum is that of the turn which has spent it. Sums stay when a session is deleted.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from perdure.engine.driver import Run
from perdure.engine.journal import load_turns
from perdure.engine.waiters import current_metadata
from perdure.errors import InvalidInput, quoted
from perdure.graph.commit import End, completions
from perdure.model.llm import Usage
from perdure.model.record import INTERRUPTED, Closed, Faltered, Record, Reopened, Replied, since_reopened, slots
from perdure.model.session import SessionRow, load_settings
from perdure.model.spending import METADATA, UsageFilter, UsageRow, metadata_text
from perdure.ports.store import SessionReads, Store
from perdure.sessions.cache import PIECE
from perdure.turn.machine import usage_of

TURNS = "turns"
"""The label of what turns themselves ask."""

NOTHING = Usage()

MAX_FAMILY = 64
"""Sessions above one that are told of; no agent starts agents so deep."""

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
            family.append((child, load_settings(child.settings).label if of_child is None else of_child))
    return found


async def _child(store: Store, name: str, parent: str) -> SessionRow | None:
    """A session that was to be begun; None when a crash came first, its id was taken, or it was deleted."""
    row = await store.session(name)
    return row if row is not None and load_settings(row.settings).parent == parent else None


async def _costs(store: Store, row: SessionRow, by: By, children: dict[str, None]) -> AsyncIterator[tuple[str, Usage]]:
    """What one session has asked of models; `children` is filled with the ids of those it has begun."""
    for first in range(1, row.next, PIECE):
        for turn in await load_turns(store, row.sid, first, min(first + PIECE, row.next) - 1):
            for label, model, usage in costs_of(turn.records):
                yield label if by == "label" else model, usage
            children.update(dict.fromkeys([child for slot in slots(turn.records) for child in slot.children]))
        await asyncio.sleep(0)
    settings = load_settings(row.settings)
    children.update(dict.fromkeys(settings.children))
    for name, usage in (settings.ledger if by == "label" else settings.models).items():
        yield name, usage


def costs_of(records: Iterable[Record]) -> Iterator[tuple[str, str, Usage]]:
    """Label, model and usage of everything that a turn has asked.

    An ask that ended the turn has no record of its own: only the turn's whole usage tells that it was begun.
    """
    unknown = 0
    for record in records:
        reply = record.reply if isinstance(record, Closed) else record
        if isinstance(record, Reopened):
            unknown = 0
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


# ---------------------------------------------------------------------- what a commit adds to the sums


async def turn_costs(store: SessionReads, row: SessionRow, run: Run, end: End, hour: int) -> tuple[UsageRow, ...]:
    """What a turn that ends now has spent, by label and model."""
    found: dict[tuple[str, str], Usage] = {}
    for label, model, usage in costs_of([*since_reopened(run.records), Closed(end.outcome, end.usage)]):
        found[label, model] = found.get((label, model), NOTHING) + usage
    costs = [(label, model, usage) for (label, model), usage in found.items() if usage != NOTHING]
    return await usage_rows(store, row, hour, metadata_text(current_metadata()), costs)


async def usage_rows(
    store: SessionReads, row: SessionRow, hour: int, metadata: str, costs: Iterable[tuple[str, str, Usage]]
) -> tuple[UsageRow, ...]:
    """What is added to the sums of a session: each a label, a model and a usage."""
    family = await family_of(store, row) if row.settings else ()
    whose = row.id, row.agent, family
    return tuple([UsageRow(row.sid, hour, label, model, metadata, *whose, usage) for label, model, usage in costs])


async def family_of(store: SessionReads, row: SessionRow) -> tuple[str, ...]:
    """The sessions above one, the oldest first."""
    found: list[str] = []
    above = load_settings(row.settings).parent
    while above is not None and above not in found and len(found) < MAX_FAMILY:
        found.insert(0, above)
        parent = await store.session(above)
        above = None if parent is None else load_settings(parent.settings).parent
    return tuple(found)


# ---------------------------------------------------------------------- of a whole store


class UsageGroup(Struct, frozen=True, gc=False):
    """What was spent by one of those that are told apart: `key` has a value for each thing that was asked for."""

    key: tuple[str, ...]
    usage: Usage


GROUPS: dict[str, Callable[[UsageRow], str]] = {
    "model": lambda row: row.model,
    "label": lambda row: row.label,
    "agent": lambda row: row.agent,
    "session": lambda row: row.session_id,
    "family": lambda row: row.family[0] if row.family else row.session_id,
    "day": lambda row: _utc(row.hour).date().isoformat(),
    "hour": lambda row: _utc(row.hour).strftime("%Y-%m-%dT%H:00Z"),
}
"""What sums may be told apart by, besides `metadata.<key>`."""


async def total(
    store: SessionReads, by: str | Iterable[str], wanted: UsageFilter, metadata: dict[str, Any] | None = None
) -> list[UsageGroup]:
    """What was spent, told apart by one thing or several, in the order of their names."""
    names = _names(by)
    found: dict[tuple[str, ...], Usage] = {}
    for number, row in enumerate(await store.usage(wanted)):
        if number % 1000 == 999:
            await asyncio.sleep(0)  # a long sum keeps no turn waiting
        said = msgspec.json.decode(row.metadata) if metadata or any(name.startswith(METADATA) for name in names) else {}
        if metadata and any(key not in said or said[key] != value for key, value in metadata.items()):
            continue
        key = tuple([_of_metadata(said, name) if name.startswith(METADATA) else GROUPS[name](row) for name in names])
        found[key] = found.get(key, NOTHING) + row.usage
    return [UsageGroup(key, found[key]) for key in sorted(found) if found[key] != NOTHING]


def _names(by: object) -> tuple[str, ...]:
    given = (by,) if isinstance(by, str) else tuple(by) if isinstance(by, list | tuple) else None
    if given is None or not given:
        raise InvalidInput(f"by={quoted(by):.80} is not usable: give {KNOWN}, or several of them")
    for name in given:
        if not isinstance(name, str) or (name not in GROUPS and not (name.startswith(METADATA) and name != METADATA)):
            raise InvalidInput(f"usage is not told by {quoted(name):.80}: give {KNOWN}")
    return given


KNOWN = f"{', '.join(repr(name) for name in GROUPS)} or 'metadata.<key>'"


def _of_metadata(said: dict[str, Any], name: str) -> str:
    value = said.get(name.removeprefix(METADATA))
    return value if isinstance(value, str) else "" if value is None else msgspec.json.encode(value).decode()


def _utc(at: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at / 1000, datetime.UTC)


def moment(given: object, name: str) -> int | None:
    """A time as the host gives it, in ms: a datetime with a zone, a date (its midnight, UTC), or ms."""
    if given is None:
        return None
    if isinstance(given, datetime.datetime) and given.tzinfo is not None:
        return round(given.timestamp() * 1000)
    if isinstance(given, datetime.date) and not isinstance(given, datetime.datetime):
        return round(datetime.datetime(given.year, given.month, given.day, tzinfo=datetime.UTC).timestamp() * 1000)
    if type(given) is int and 0 <= given < 2**53:
        return given
    raise InvalidInput(f"{name}={quoted(given):.80} is not usable: give a date, a datetime with a time zone, or ms")
