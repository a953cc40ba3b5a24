"""What a process tells its session, killed at every point: told once, in order, whoever died meanwhile."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from msgspec import Struct

from perdure import Agent, ModelRequest, ToolCall, ToolContext, tool
from perdure.ports.store import Store
from perdure.processes.function.context import ProcessContext
from perdure.processes.function.engine import process
from perdure.testing import FunctionModel
from perdure.testing.crash import MODES, Crash, ForkServer, Lab, Mode, Played, StoreKind, play
from perdure.testing.crash.scenario import Scenario
from tests.crash.reference import ATTENDED, patiently

STORES: tuple[StoreKind, ...] = ("memory", "sqlite")


@process
async def add(ctx: ProcessContext[Any], a: int, b: int) -> int:
    return a + b


@process
async def wait(ctx: ProcessContext[Any]) -> None:
    await ctx.wait_signal("never")


@tool(recovery="rerun")
async def sum_up(ctx: ToolContext[Any]) -> str:
    """Begin sums, and do not return before they are there: the turn is busy when their wakes come."""
    for n in range(3):
        started = await ctx.host.start_process(add, {"a": 2, "b": n}, key=f"sum{n}", wake="turn")
        await started.result()
    return "begun"


@tool(recovery="rerun")
async def stand_by(ctx: ToolContext[Any]) -> str:
    """Begin something that ends with the turn."""
    await ctx.host.start_process(wait, key="wait", parent_end="cancel", wake="turn")
    return "waiting"


def answer(request: ModelRequest) -> Any:
    last = request.messages[-1]
    if last.role == "tool":
        return "It is begun."
    if last.text in ("sum_up", "stand_by"):
        return ToolCall("c1", last.text)
    told = [line.partition(": ")[2] for line in last.text.split("\n") if line.startswith(("value", "cancelled"))]
    return f"I heard: {', '.join(told)}."


def agent() -> Agent[Any]:
    return Agent(FunctionModel(answer), name="clerk", tools=[sum_up, stand_by])


def reached(head: int) -> Any:
    async def check(store: Store) -> bool:
        row = await store.session("s")
        return row is not None and row.head == head and row.turn is None

    return check


async def idle_session(lab: Lab) -> None:
    """A process that a host starts for an idle session."""
    async with lab.runtime([agent()], processes=[add], lease=ATTENDED) as runtime:
        session = await runtime.session("s")
        await patiently(lambda: session.start(add, {"a": 2, "b": 3}, id="p"))
        await lab.until(reached(1))


async def busy_session(lab: Lab) -> None:
    """Three processes that a turn starts, and that end before it does."""
    async with lab.runtime([agent()], processes=[add], lease=ATTENDED) as runtime:
        session = await runtime.session("s")
        await patiently(lambda: session.send("sum_up", key="1"))
        await lab.until(reached(2))


async def ended_turn(lab: Lab) -> None:
    """A process that is to end with the turn that started it."""
    async with lab.runtime([agent()], processes=[wait], lease=ATTENDED) as runtime:
        session = await runtime.session("s")
        await patiently(lambda: session.send("stand_by", key="1"))
        await lab.until(reached(2))


class End(Struct, frozen=True):
    """How it must end: what the model said, how often it was asked when nobody died, and what became of processes."""

    said: tuple[str, ...]
    model: int
    processes: tuple[str, ...]


ENDS: dict[Scenario, End] = {
    idle_session: End(("I heard: 5.",), 1, ("completed",)),
    busy_session: End((" [sum_up]", "It is begun.", "I heard: 2, 3, 4."), 3, ("completed",) * 3),
    ended_turn: End((" [stand_by]", "It is begun.", "I heard: its parent has ended."), 3, ("cancelled",)),
}
SCENARIOS = list(ENDS)


def asked_again(crash: Crash) -> bool:
    """Whether the model is asked once more: its answer was on the way, or was not on disk yet."""
    point = crash.point.partition(" #")[0]
    if point.startswith("ask model"):
        return crash.mode == "lost"
    if point.startswith("chunk"):
        return True
    return (point.startswith("commit") or "replied" in point) and crash.mode != "lost"


def check(played: Played, end: End, again: bool = False) -> None:
    assert played.problems == []
    session = played.ending.session("s")
    assert session is not None
    assert (session.state, set(session.turns.values())) == ("idle", {"finished"})
    spoken = [each.removeprefix("assistant: ") for each in session.said if each.startswith("assistant: ")]
    assert tuple(spoken) == end.said
    assert sum("[process" in each for each in session.said) == 1
    assert tuple(each.status for each in played.ending.processes) == end.processes
    assert played.model_calls == end.model + again


def points(scenario: Scenario) -> list[Crash]:
    """Every way to die in a scenario, but for lost replies."""
    trace = play(scenario).traces[-1]
    return [Crash(point.name, mode) for point in trace for mode in MODES[point.kind] if mode != "unheard"]


def _name(scenario: Scenario) -> str:
    return str(getattr(scenario, "__name__", scenario))


DEATHS = [pytest.param(each, crash, id=f"{_name(each)} {crash}") for each in SCENARIOS for crash in points(each)]


def test_the_scenarios_have_the_points_that_matter() -> None:
    names = {each: [point.name for point in play(each).traces[-1]] for each in SCENARIOS}
    assert names[idle_session] == [
        "beat",
        "register p",
        "advance p: starting, ending",
        "deliver",
        "ask model 1.1",
        "chunk 1 of model 1.1",
        "chunk 2 of model 1.1",
        "commit 1",
        "retire",
    ]
    assert names[busy_session].count("deliver") == 1
    assert names[busy_session].index("deliver") > names[busy_session].index("commit 1")


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("scenario", "crash"), DEATHS)
def test_killed_anywhere_it_is_told_once_and_in_order(scenario: Scenario, crash: Crash, store: StoreKind) -> None:
    check(play(scenario, [crash], store=store, timeout=60), ENDS[scenario], asked_again(crash))


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("store", STORES)
def test_lost_reply_of_a_delivery_costs_nothing(scenario: Scenario, store: StoreKind) -> None:
    check(play(scenario, [Crash("deliver", "unheard")], store=store, timeout=60), ENDS[scenario])


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("mode", ["before", "lost"])
def test_killed_at_every_delivery_in_a_row_it_is_told_once(mode: Mode, store: StoreKind) -> None:
    """Lost, the first is the last one: the wake is told, and what is left is a turn like any other."""
    deaths = [Crash("deliver", mode)] * (3 if mode == "before" else 1)
    check(play(busy_session, deaths, store=store, timeout=60), ENDS[busy_session])


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(idle_session, timeout=60) as ready:
        yield ready


def kills() -> Generator[Any, None, None]:
    for scenario in SCENARIOS:
        for crash in points(scenario):
            if crash.mode in ("before", "lost") and crash.point.startswith(
                ("register", "advance", "commit", "deliver", "ask")
            ):
                yield pytest.param(scenario, crash, id=f"{_name(scenario)} {crash}")


@pytest.mark.kill
@pytest.mark.parametrize(("scenario", "crash"), list(kills()))
def test_really_killed_it_is_told_once_and_in_order(forks: ForkServer, scenario: Scenario, crash: Crash) -> None:
    check(forks.play([crash], scenario), ENDS[scenario], asked_again(crash))
