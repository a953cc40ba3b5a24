"""Observing a session that another process works on, or deletes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Agent, ModelRequest, Runtime, Session
from perdure.errors import SessionDeleted
from perdure.model.event import Gap, TextDelta, TurnCommitted, TurnStarted
from perdure.model.outcome import Finished
from perdure.testing import FunctionModel
from tests.kit import SOON, Place, until


def echo() -> Agent[str]:
    def model(request: ModelRequest) -> str:
        return f"re: {request.messages[-1].text}"

    return Agent(FunctionModel(model), name="echo")


async def observing(session: Session, seen: list[Any], ready: asyncio.Event) -> None:
    events = session.observe()
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    ready.set()
    seen.append(await first)
    async for event in events:
        seen.append(event)


async def until_committed(seen: list[Any], turn: str) -> None:
    await until(lambda: any(isinstance(e, TurnCommitted) and e.turn_id == turn for e in seen))


async def watcher(runtime: Runtime, seen: list[Any]) -> asyncio.Task[None]:
    ready = asyncio.Event()
    task = asyncio.create_task(observing(await runtime.session("s"), seen, ready))
    await ready.wait()
    return task


async def test_a_turn_where_no_event_can_be_read_is_a_gap_and_its_end(file: Place) -> None:
    seen: list[Any] = []
    async with file.runtime(echo()) as worker, file.runtime(echo()) as other:
        worker._live_server.abandon()
        session = await worker.session("s")
        await session.run("zero")
        task = await watcher(other, seen)

        await session.run("one")
        await until_committed(seen, "s.2")
        task.cancel()

    assert [(type(e), e.turn_id) for e in seen] == [(Gap, "s.2"), (TurnCommitted, "s.2")]
    assert seen[0].last_committed == "s.2"
    assert seen[1].outcome == Finished("re: one")


async def test_a_turn_of_ours_is_told_once_whatever_others_write(file: Place) -> None:
    seen: list[Any] = []
    async with file.runtime(echo()) as worker, file.runtime(echo()) as other:
        task = await watcher(worker, seen)
        await (await worker.session("s")).run("one")
        await (await other.session("another")).run("so that there is something to notice")
        await (await other.session("s")).run("two")
        await until_committed(seen, "s.2")
        task.cancel()

    kinds = [(type(e), e.turn_id) for e in seen]
    ours = [(TurnStarted, "s.1"), (TextDelta, "s.1"), (TurnCommitted, "s.1")]
    assert kinds == [*ours, (TurnStarted, "s.2"), (TextDelta, "s.2"), (TurnCommitted, "s.2")]


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_observing_ends_with_the_session(file: Place, elsewhere: bool) -> None:
    seen: list[Any] = []
    async with file.runtime(echo()) as runtime, file.runtime(echo()) as other:
        await (await runtime.session("s")).run("one")
        task = await watcher(runtime, seen)

        await (other if elsewhere else runtime).sessions.delete("s")
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(task, SOON)

        with pytest.raises(SessionDeleted):
            await anext((await runtime.session("s")).observe())
    assert seen == []
