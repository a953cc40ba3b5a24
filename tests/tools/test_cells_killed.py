"""Processes that run cells are killed at any moment, while the turns of several sessions run cells: each turn ends, and
nothing is called twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from perdure import Agent, ModelRequest, ModelResponse, Plugin, Runtime, Usage, tool
from perdure.codemode.monty import MontyExecutor
from perdure.ports.code import Executor
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.testing import FunctionModel
from tests.fuzzing import cases
from tests.tools.coding import cell

TURNS, SESSIONS = 6, 3


class Killed(Plugin):
    """Runs cells on workers that it kills."""

    id = "killed"

    def __init__(self) -> None:
        self.executor: Any = None

    def code_executor(self) -> Executor:
        self.executor = MontyExecutor(key=b"0123456789abcdef0123456789abcdef", workers=2)
        return self.executor

    def kill(self, choose: Callable[[Any], Any]) -> None:
        workers = [repl._worker for repl in self.executor._repls if repl._worker is not None]
        if workers:
            choose(workers).kill()


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(cases(3, 100)))
async def test_turns_end_and_call_nothing_twice_however_often_workers_are_killed(seed: int) -> None:
    dice, made, plugin = random.Random(seed), Counter[tuple[str, int]](), Killed()

    @tool
    async def pay(session: str, n: int) -> int:
        """Pay."""
        made[session, n] += 1
        if dice.random() < 0.3:  # in this call, in its write, or in a later step of some cell
            asyncio.get_running_loop().call_later(dice.random() * 0.004, plugin.kill, dice.choice)
        return n

    def answer(request: ModelRequest) -> ModelResponse:
        if request.messages[-1].text[:2] != "go":
            return ModelResponse("done", (), Usage(input=1, output=2))
        _, session, turn = request.messages[-1].text.split()
        code = f"""\
import asyncio
first = {int(turn) * 10}
paid = [await pay({session!r}, first + n) for n in range(4)]
paid += await asyncio.gather(*[pay({session!r}, first + n) for n in (4, 5, 6)])
{"1 / 0" if dice.random() < 0.3 else "paid"}"""
        return ModelResponse(cell(code), (), Usage(input=1, output=2))

    agent = Agent(FunctionModel(answer), name="payer", tools=[pay], mode="code", plugins=[plugin])
    ended: list[str] = []
    async with Runtime(MemoryStore(MemoryRows()), agents=[agent]) as runtime:

        async def talk(name: str) -> None:
            session = await runtime.session(name)
            for turn in range(TURNS):
                ended.append((await session.run(f"go {name} {turn}")).text)

        await asyncio.gather(*[talk(f"s{n}") for n in range(SESSIONS)])

    assert ended == ["done"] * (TURNS * SESSIONS)
    assert set(made.values()) == {1}
