"""A turn that cannot go on says why, and goes on again when a person says so."""

from __future__ import annotations

import pytest

from mainstay import Agent, Runtime, TurnFailed
from mainstay.model.codec import encode
from mainstay.model.message import Message
from mainstay.model.record import Said
from mainstay.model.write import Accept, Release, Scope
from mainstay.stores.memory import MemoryRows, MemoryStore
from mainstay.testing import ScriptedModel


async def stuck_turn() -> MemoryRows:
    """Rows in which turn s.1 got stuck."""
    store = MemoryStore()
    accepted = await store.write(
        Accept("s", "assistant", encode(Said(Message("user", "hi"))), "op", 1, worker="another")
    )
    scope = Scope("s", accepted.row.sid, 1, "another", accepted.row.generation)
    await store.write(Release(scope, 2, stuck="the disk ate it"))
    return store.rows


async def test_waiting_for_a_stuck_turn_says_why_it_is_stuck() -> None:
    rows = await stuck_turn()

    async with Runtime(MemoryStore(rows), agents=[Agent(ScriptedModel([]))]) as runtime:
        session = await runtime.session("s")
        with pytest.raises(TurnFailed, match="the disk ate it") as caught:
            await session.result("s.1")

    assert caught.value.kind == "stuck"


async def test_a_stuck_turn_goes_on_when_a_person_resumes_it() -> None:
    rows = await stuck_turn()

    async with Runtime(MemoryStore(rows), agents=[Agent(ScriptedModel(["hello again"]))]) as runtime:
        session = await runtime.session("s")
        resumed = await session.resume()
        result = await session.result("s.1")
        again = await session.resume()

    assert (resumed, result.text, again) == (True, "hello again", False)


async def test_nothing_takes_up_a_stuck_turn_by_itself() -> None:
    rows = await stuck_turn()

    async with Runtime(MemoryStore(rows), agents=[Agent(ScriptedModel([]))]) as runtime:
        assert await runtime.wait_idle(1)
        listed = await runtime.sessions.list(state="stuck")

    assert [(row.id, row.reason) for row in listed] == [("s", "the disk ate it")]
