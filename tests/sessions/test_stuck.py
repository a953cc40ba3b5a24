"""A turn that cannot go on says why, and goes on again when a person says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Agent, ModelRequest, Runtime, TurnFailed
from perdure.engine.lease import LeaseTerms
from perdure.model.codec import encode
from perdure.model.message import Message
from perdure.model.record import Said
from perdure.model.write import Accept, Release, TurnScope
from perdure.sessions.definition import Definition
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.testing import FunctionModel, ScriptedModel
from tests.kit import SOON, until


async def stuck_turn() -> MemoryRows:
    """Rows in which turn s.1 got stuck."""
    store = MemoryStore()
    accepted = await store.write(
        Accept("s", "assistant", encode(Said(Message("user", "hi"))), "op", 1, worker="another")
    )
    scope = TurnScope("s", accepted.row.sid, 1, "another", accepted.row.generation)
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


async def test_what_is_said_after_a_stuck_turn_is_told_why_it_does_not_run_and_runs_when_that_goes_on() -> None:
    rows = await stuck_turn()

    async with Runtime(
        MemoryStore(rows), agents=[Agent(ScriptedModel(["hello again", "and hello to you"]))]
    ) as runtime:
        session = await runtime.session("s")
        with pytest.raises(TurnFailed, match="the disk ate it") as caught:
            await session.run("are you there?", key="there")
        await session.resume()
        result = await session.run("are you there?", key="there")

    assert (caught.value.turn_id, caught.value.kind) == ("s.1", "stuck")
    assert (result.turn_id, result.text) == ("s.2", "and hello to you")


class Faulty:
    """An agent with a fault of ours or the host's, as far as one can be made: reading its output fails."""

    name = "assistant"

    def __init__(self, model: FunctionModel) -> None:
        self._agent = Agent(model)
        self.spec = self._agent.spec

    def definition(self) -> Definition:
        made = self._agent.definition()
        made.output_rule = self._read
        return made

    def _read(self, text: str) -> Any:
        raise ZeroDivisionError("a bug")


async def test_whoever_waits_already_hears_that_the_turn_before_his_got_stuck() -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    async def model(request: ModelRequest) -> str:
        began.set()
        await go_on.wait()
        return "an answer"

    faulty: Any = Faulty(FunctionModel(model))
    async with Runtime("memory", agents=[faulty], lease=LeaseTerms(0.3, 0.1)) as runtime:
        session = await runtime.session("s")
        await session.send("first")
        await began.wait()
        second = asyncio.create_task(session.run("second"))
        waiters = runtime._open().outcomes.waiters
        await until(lambda: 2 in waiters.parts("s"))
        go_on.set()
        with pytest.raises(TurnFailed, match="a bug") as caught:
            await asyncio.wait_for(second, SOON)

    assert (caught.value.turn_id, caught.value.kind) == ("s.1", "stuck")
