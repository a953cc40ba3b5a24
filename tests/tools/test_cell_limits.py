"""What a cell may use: one that reaches a limit ends with a typed outcome, and leaves the variables before it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Budget, Plugin, tool
from perdure.codemode.monty import MontyExecutor
from perdure.model.code import CodeLimits
from perdure.model.outcome import BudgetSpent
from perdure.ports.code import Executor
from perdure.testing import VirtualClock
from tests.kit import Place
from tests.tools.coding import cell, coder, outputs

KEY = b"0123456789abcdef0123456789abcdef"


class Bounded(Plugin):
    """Runs cells under these limits."""

    id = "bounded"

    def __init__(self, limits: CodeLimits | None = None) -> None:
        self.limits = limits
        self.executor: MontyExecutor | None = None

    def code_executor(self) -> Executor:
        self.executor = MontyExecutor(key=KEY, limits=self.limits, workers=2)
        return self.executor


@tool
async def double(n: int) -> int:
    """Twice as much."""
    return 2 * n


LIMITS: dict[str, tuple[CodeLimits, str, str]] = {
    "time": (CodeLimits(seconds=2), "while True:\n    pass", "it ran for more than 2 s"),
    "memory": (CodeLimits(memory=64 * 1024 * 1024), "b = [0] * 10**9", "its values take more than 67,108,864 bytes"),
    "output": (CodeLimits(output=1000), "for n in range(10_000):\n    print(n)", "it printed more than 1,000 bytes"),
    "state": (CodeLimits(state=20_000), "b = 'x' * 100_000", "bytes when they are saved, and may take 20,000"),
    "calls": (CodeLimits(calls=3), "for n in range(9):\n    await double(n)", "it made more than 3 calls"),
}


@pytest.mark.parametrize("which", LIMITS)
async def test_cell_beyond_a_limit_leaves_the_variables_before_it(place: Place, which: str) -> None:
    limits, code, why = LIMITS[which]
    answers = [cell("a = 1"), cell(f"a = 2\nx = await double(1)\n{code}"), cell("print(a)"), "done"]
    async with place.runtime(coder(*answers, tools=[double], plugins=[Bounded(limits)])) as runtime:
        result = await (await runtime.session("s")).run("go")
    async with place.runtime(coder(cell("print(a)"), "done", tools=[double], plugins=[Bounded(limits)])) as runtime:
        again = await (await runtime.session("s")).run("again")

    told = [message.text for message in result.messages if message.role == "user"]
    assert any(why in text and "\nWhat it had called before stays done: double() " in text for text in told)
    assert [outputs(each)[-1] for each in (result.messages, again.new_messages)] == ["Output of the cell:\n1"] * 2


async def test_calls_beyond_those_of_a_turn_are_not_made(place: Place) -> None:
    made: list[int] = []

    @tool
    async def count(n: int) -> None:
        """Count."""
        made.append(n)

    code = "import asyncio\nawait count(-1)\nawait asyncio.gather(*[count(n) for n in range(10_000)])"
    cells = [cell("a = 1"), cell(f"a = 2\n{code}"), cell("print(a)")]
    agent = coder(*cells, "done", tools=[count], plugins=[Bounded(CodeLimits(calls=20_000))])
    async with place.runtime(agent) as runtime:
        result = await (await runtime.session("s")).run("go")

    told = [message.text for message in result.messages if message.role == "user"]
    assert any("The cells of one turn may make 10,000 calls" in text and "done: count() 1x." in text for text in told)
    assert outputs(result.messages)[-1] == "Output of the cell:\n1"
    assert made == [-1]


@pytest.mark.parametrize(
    ("budget", "spent", "made"),
    [
        (Budget(tokens=3), BudgetSpent("tokens", 3), 0),
        (Budget(calls=2), BudgetSpent("calls", 2), 2),
        (Budget(seconds=5), BudgetSpent("seconds", 5), 1),
    ],
)
async def test_budget_is_looked_at_before_each_call(
    place: Place, budget: Budget, spent: BudgetSpent, made: int
) -> None:
    clock, calls = VirtualClock(), list[int]()

    @tool
    async def work(n: int) -> None:
        """Work for ten seconds."""
        calls.append(n)
        clock.advance(10)

    agent = coder(cell("for n in range(9):\n    await work(n)"), tools=[work], budget=budget)
    async with place.runtime(agent, clock=clock) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == spent
    assert calls == list(range(made))


async def test_session_that_is_parked_or_idle_holds_no_worker(place: Place) -> None:
    @tool(approval="ask")
    async def sign(n: int) -> int:
        """Sign."""
        return n

    plugin = Bounded()
    answers = [*[cell("x = await sign(1)\nprint(x)")] * 6, *["done"] * 6]
    agent = coder(*answers, tools=[sign], plugins=[plugin])
    async with place.runtime(agent) as runtime:
        sessions = [await runtime.session(f"s{n}") for n in range(6)]
        parked = [await session.run("go") for session in sessions]
        executor: Any = plugin.executor
        while_parked = executor.workers
        for session, waiting in zip(sessions, parked, strict=True):
            await session.approve(waiting.pending[0].call_id)
        ended = await asyncio.gather(*[session.result(f"{session.id}.1") for session in sessions])
        while_idle = executor.workers

    assert (while_parked, while_idle) == (0, 0)
    assert [outputs(each.messages) for each in ended] == [["Output of the cell:\n1"]] * 6
