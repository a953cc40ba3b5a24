"""What stores promise to a process that is parked with a turn: whatever ends the turn's wait wakes the process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from perdure.model.codec import encode
from perdure.model.message import Message
from perdure.model.process import ProcessRow, Registration, WaitOn
from perdure.model.record import Said
from perdure.model.session import Answer, CancelRequest, SessionRow, WaitRow
from perdure.model.write import (
    Accept,
    Advance,
    Advanced,
    Append,
    Cancel,
    Claim,
    Delete,
    ProcessScope,
    Register,
    Resolve,
    SendSignal,
    SessionRef,
    TurnScope,
)
from perdure.ports.store import Store
from tests.kit import Place

WAITS = (WaitOn("turn", "turn", "s.1"), WaitOn("message", "signal", "message"))


@pytest.fixture
async def store(place: Place) -> AsyncIterator[Store]:
    opened = place.store()
    await opened.open()
    yield opened
    await opened.close()


async def turn(store: Store, session_id: str = "s") -> SessionRow:
    said = encode(Said(Message("user", "go")))
    return (await store.write(Accept(session_id, "agent", said, f"op {session_id}", 1, worker="w"))).row


async def park_turn(store: Store, row: SessionRow) -> None:
    wait = WaitRow(f"{row.id}.1.1.0:approval", row.sid, 1, "1.0", "approval")
    scope = TurnScope(row.id, row.sid, 1, "w", row.generation)
    appended = await store.write(Append(scope, (), 2, waits=(wait,), park=(wait.id,)))
    assert appended.parked


async def park_process(store: Store) -> Advanced:
    row = (await store.write(Register(Registration("p", "turn", "rerunnable", open_signals=True), 3, "w"))).row
    scope = ProcessScope("p", row.pid, "w", row.generation)
    return await store.write(Advance(scope, 4, first=True, seen=row.record.sequence, park=WAITS))


async def process(store: Store) -> ProcessRow:
    row = await store.process("p")
    assert row is not None
    return row


async def test_it_parks_while_its_turn_is_parked(store: Store) -> None:
    await park_turn(store, await turn(store))
    advanced = await park_process(store)

    assert advanced.parked
    assert (await process(store)).record.waits == WAITS
    assert await store.active_processes() == []


async def test_it_does_not_park_with_a_turn_that_works(store: Store) -> None:
    await turn(store)
    advanced = await park_process(store)

    assert not advanced.parked
    assert advanced.row.owner == "w", "it goes on looking"


async def test_it_does_not_park_with_a_turn_that_is_not_there(store: Store) -> None:
    assert not (await park_process(store)).parked


async def approve(store: Store) -> None:
    await store.write(Resolve("s.1.1.0:approval", Answer("approved"), 5, None, ()))


async def cancel(store: Store) -> None:
    await store.write(Cancel(SessionRef("s"), CancelRequest("ann", "stop"), 5))


async def claim(store: Store) -> None:
    """By somebody who saw the turn before it was parked."""
    assert (await store.write(Claim(SessionRef("s"), "other", 1, 5))).won


async def delete(store: Store) -> None:
    await store.write(Delete("s", 5))


async def expire(store: Store) -> None:
    await store.write(Resolve("s.1.1.0:approval", None, 5, None, ()))


@pytest.mark.parametrize("wake", [approve, cancel, claim, delete, expire])
async def test_whatever_ends_the_wait_of_the_turn_wakes_it(
    store: Store, wake: Callable[[Store], Awaitable[None]]
) -> None:
    await park_turn(store, await turn(store))
    await park_process(store)
    await wake(store)

    row = await process(store)
    assert (row.status, row.owner, row.record.waits) == ("running", None, ())
    assert [each.id for each in await store.active_processes()] == ["p"]
    log = [event.type for _, _, event in await store.events(row.pid)]
    assert log == ["process.created", "process.first_started", "process.waiting", "process.resumed"]


async def test_the_turn_of_another_session_leaves_it_alone(store: Store) -> None:
    await park_turn(store, await turn(store))
    await park_turn(store, await turn(store, "other"))
    await park_process(store)
    await store.write(Resolve("other.1.1.0:approval", Answer("approved"), 5, None, ()))

    assert (await process(store)).status == "waiting"


async def test_a_message_wakes_it_once_and_the_turn_then_does_not_do_so_again(store: Store) -> None:
    await park_turn(store, await turn(store))
    await park_process(store)
    await store.write(SendSignal("p", "message", "hello", "k", 5))
    await approve(store)

    row = await process(store)
    log = [event.type for _, _, event in await store.events(row.pid)]
    assert row.status == "running"
    assert log[2:] == ["process.waiting", "signal.message", "process.resumed"]
