"""A Runtime or an agent put together wrongly is refused where it is made, never in the middle of a turn."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Budget, Runtime, tool
from perdure.engine.lease import LeaseTerms
from perdure.errors import InvalidDefinition
from perdure.model.outcome import BudgetSpent
from perdure.model.tool import OutputBudget
from perdure.testing import FunctionModel, ScriptedModel
from tests.kit import SOON, Place, TellingModel, untyped

WRONG: Any = 5
NAN = float("nan")
HUGE = 10**5000


class Role(str, enum.Enum):  # noqa: UP042  # users write this, and `format` shows its name
    HELPER = "helper"


class Hidden:
    """Cannot be shown, not even in an error."""

    def __repr__(self) -> str:
        raise ValueError("do not look")


def made(**options: Any) -> Callable[[], object]:
    return lambda: Runtime("memory", **options)


def agent(**options: Any) -> Callable[[], object]:
    return lambda: Agent(**options)


def given_to_tool(**options: Any) -> Callable[[], object]:
    return lambda: tool(**options)(lambda: 1)


PUT_TOGETHER: dict[str, Callable[[], object]] = {
    "a number as a store": lambda: Runtime(WRONG),
    "nothing as a store": lambda: Runtime(untyped(None)),
    "no path": lambda: Runtime(""),
    "a path with NUL": lambda: Runtime("a\0b.db"),
    "a path that is no text": lambda: Runtime("a\ud800.db"),
    "agents": made(agents=WRONG),
    "an agent without its list": made(agents=Agent("scripted")),
    "an agent by name": made(agents=["assistant"]),
    "processes": made(processes=WRONG),
    "a plain function as a process": made(processes=[print]),
    "a process that cannot be shown": made(processes=[Hidden()]),
    "nobody at work": made(concurrency=0),
    "half a worker": made(concurrency=1.5),
    "a grace in words": made(grace="soon"),
    "a grace below none": made(grace=-1),
    "a grace that is not a number": made(grace=NAN),
    "a grace that no timer can count": made(grace=HUGE),
    "whether to recover": made(recover="no"),
    "a lease": made(lease=30),
    "a clock": made(clock=WRONG),
    "randomness": made(random=WRONG),
    "a sink of traces": made(trace="trace.jsonl"),
    "a policy": made(cancel_policy="never"),
    "a term in words": lambda: LeaseTerms(untyped("30"), 10),
    "a renewal of nothing": lambda: LeaseTerms(30, untyped(None)),
    "a term for ever": lambda: LeaseTerms(HUGE, 10),
    "a model": agent(model=None),
    "a model without a stream": agent(model=WRONG),
    "a model's name in bytes": agent(model=b"scripted"),
    "an agent's name": agent(name=WRONG),
    "an agent's name in bytes": agent(name=b"anna"),
    "an agent's name that is no text": agent(name="\ud800"),
    "tools": agent(tools=WRONG),
    "letters for tools": agent(tools="add"),
    "a tool that cannot be called": agent(tools=[WRONG]),
    "a tool that cannot be shown": agent(tools=[Hidden()]),
    "plugins": agent(plugins=WRONG),
    "a budget": agent(budget=WRONG),
    "an empty budget of another kind": agent(budget={}),
    "a budget of tools' output": agent(output_budget=Hidden()),
    "an output": agent(output=Hidden()),
    "steps below none": lambda: Budget(steps=-1),
    "steps in words": lambda: Budget(steps=untyped("3")),
    "money that is not a number": lambda: Budget(money=NAN),
    "seconds without end": lambda: Budget(seconds=float("inf")),
    "seconds that no float can hold": lambda: Budget(seconds=HUGE),
    "bytes in words": lambda: OutputBudget(bytes=untyped(Hidden())),
    "whether a subagent works in the background": lambda: Agent("scripted").as_tool(background=untyped("yes")),
    "a function model of no function": lambda: FunctionModel(WRONG),
    "a function model's name": lambda: FunctionModel(lambda _: "x", name=WRONG),
    "a script": lambda: ScriptedModel(WRONG),
    "a script of letters": lambda: ScriptedModel("hello"),
    "a tool's name": given_to_tool(name=Hidden()),
    "a tool's time": given_to_tool(name="f", timeout=HUGE),
    "a tool's recovery": given_to_tool(name="f", recovery=Hidden()),
}


@pytest.mark.parametrize("what", PUT_TOGETHER)
def test_what_is_put_together_wrongly_is_refused_at_once(what: str) -> None:
    with pytest.raises(InvalidDefinition) as refused:
        PUT_TOGETHER[what]()

    assert len(str(refused.value)) < 700


async def test_a_refused_runtime_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidDefinition):
        Runtime(tmp_path / "agent.db", agents=[Agent("scripted")], concurrency=0)

    assert list(tmp_path.iterdir()) == []


async def test_a_kind_of_string_names_an_agent_by_its_value(place: Place) -> None:
    """Not by what `format` makes of it: the next Runtime would not know whose session it is."""
    async with place.runtime(Agent("scripted", name=Role.HELPER)) as runtime:
        await (await runtime.session("s", agent=Role.HELPER)).run("hello")
    async with place.runtime(Agent("scripted", name="helper")) as runtime:
        session = await runtime.session("s", agent="helper")
        assert (await asyncio.wait_for(session.run("again"), SOON)).text == "You said: again"
        assert type(session.agent) is str


async def test_a_budget_of_nothing_is_one(place: Place) -> None:
    async with place.runtime(Agent("scripted", budget=Budget(tokens=0, seconds=60, money=0))) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("hello"), SOON)

    assert isinstance(result.outcome, BudgetSpent)


async def test_a_grace_without_a_limit_waits_for_what_runs(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model), grace=None) as runtime:
        receipt = await (await runtime.session("s")).send("hello")
        await model.next()
        asyncio.get_running_loop().call_soon(model.say, "done")  # while the Runtime is left
    async with place.runtime(Agent("scripted")) as runtime:
        assert (await (await runtime.session("s")).result(receipt.turn_id)).text == "done"
