"""A caller that goes away at any pass of the event loop: as a web server's does whose client hangs up.

Cancelling is not aborting. What was accepted is on disk and runs, once; whoever asks again under the same key finds it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, ModelRequest, Runtime, Session, ToolCall, tool
from perdure.model.tool import Cancelled, Denied, Ok
from perdure.testing import FunctionModel, VirtualClock

PASSES = 60
SOON = 60
"""Seconds. The clocks here stand still, so nobody comes round to look for turns that lie about."""


@pytest.fixture(params=["memory", "sqlite"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory" if request.param == "memory" else str(tmp_path / "agent.db")


async def given_up(work: Awaitable[Any], passes: int) -> bool:
    """Give the work so many passes of the event loop, then cancel it. Whether it had ended by then."""
    task = asyncio.ensure_future(work)
    for _ in range(passes):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    return not task.cancelled()


async def watch(session: Session, said: str, key: str) -> None:
    async with session.stream(said, key=key) as turn:
        async for _ in turn:
            pass


SAY: dict[str, Callable[[Session, str, str], Awaitable[Any]]] = {
    "run": lambda session, said, key: session.run(said, key=key),
    "run in time": lambda session, said, key: session.run(said, key=key, timeout=SOON),
    "send": lambda session, said, key: session.send(said, key=key),
    "stream": watch,
}


@pytest.mark.parametrize("how", SAY)
async def test_what_a_lost_caller_said_runs_once_and_at_once(where: str, how: str) -> None:
    ran = Counter[str]()

    @tool
    async def work(order: str) -> str:
        ran[order] += 1
        await asyncio.sleep(0)
        return order

    def answer(request: ModelRequest) -> Any:
        last = request.messages[-1]
        return "done" if last.role == "tool" else [ToolCall("a", "work", {"order": last.text})]

    agent = Agent(FunctionModel(answer), tools=[work])
    async with Runtime(where, agents=[agent], clock=VirtualClock()) as runtime:
        session, ended = await runtime.session("s"), 0
        for passes in range(PASSES):
            key = f"order {passes}"
            ended += await given_up(SAY[how](session, key, key), passes)
            async with asyncio.timeout(SOON):
                result = await session.run(key, key=key)
            assert (result.text, result.turn_id) == ("done", f"s.{passes + 1}")

    assert ran == Counter({f"order {passes}": 1 for passes in range(PASSES)})
    assert ended < PASSES


async def test_a_turn_runs_though_nobody_asks_for_it_again(where: str) -> None:
    """Without a second asking that might wake it."""
    async with Runtime(where, agents=[Agent("scripted")], clock=VirtualClock()) as runtime:
        for passes in range(1, 12):
            session = await runtime.session(f"s{passes}")
            await given_up(session.run("hello"), passes)
        assert await runtime.wait_idle(SOON)

        rows = await runtime.sessions.list()
        assert {(row.state, row.head) for row in rows} == {("idle", 1)}


async def asking(runtime: Runtime, name: str) -> tuple[Session, str]:
    session = await runtime.session(name)
    parked = await session.run("go")
    assert parked.waiting
    return session, f"{parked.turn_id}.1.0"


DECIDE: dict[str, tuple[Callable[[Session, str], Awaitable[Any]], type]] = {
    "approve": (lambda session, call: session.approve(call), Ok),
    "reject": (lambda session, call: session.reject(call, "no"), Denied),
    "cancel": (lambda session, call: session.cancel("stop"), Cancelled),
}


@pytest.mark.parametrize("how", DECIDE)
async def test_a_decision_whose_maker_goes_away_is_made_or_not_but_never_lies_about(where: str, how: str) -> None:
    @tool(approval="ask")
    async def pay() -> str:
        return "paid"

    def answer(request: ModelRequest) -> Any:
        return "done" if request.messages[-1].role == "tool" else [ToolCall("a", "pay")]

    decide, outcome = DECIDE[how]
    agent = Agent(FunctionModel(answer), tools=[pay])
    async with Runtime(where, agents=[agent], clock=VirtualClock()) as runtime:
        made = 0
        for passes in range(1, 12):
            session, call = await asking(runtime, f"s{passes}")
            await given_up(decide(session, call), passes)
            assert await runtime.wait_idle(SOON)
            result = await session.result(f"s{passes}.1")
            if not result.waiting:
                made += 1
                assert type(result.tool_calls[0].outcome) is outcome

    assert made


async def test_a_cancel_request_whose_maker_goes_away_reaches_the_running_turn(where: str) -> None:
    asked = asyncio.Event()

    async def never(request: ModelRequest) -> str:
        asked.set()
        await asyncio.Event().wait()
        return ""

    async with Runtime(where, agents=[Agent(FunctionModel(never))], grace=0, clock=VirtualClock()) as runtime:
        for passes in range(1, 8):
            asked.clear()
            session = await runtime.session(f"s{passes}")
            receipt = await session.send("go")
            await asked.wait()
            await given_up(session.cancel("stop"), passes)
            row = await runtime.store.session(session.id)
            if row is None or row.cancel is None:
                await session.cancel("stop, and now for good")

            assert type((await receipt.result(SOON)).outcome) is Cancelled
