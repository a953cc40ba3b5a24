"""Rows of the failure model that are no point of the reference turn: forks, observers, changed agents, blobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from perdure import Agent, Budget, ModelRequest, ToolCall, ToolContext, tool
from perdure.errors import SessionDeleted
from perdure.model.event import Gap, TextDelta, TurnCommitted
from perdure.testing import FunctionModel
from perdure.testing.crash import (
    Crash,
    ForkServer,
    Lab,
    Played,
    SessionEnding,
    Statement,
    StoreKind,
    kill_everywhere,
    play,
)

STORES: tuple[StoreKind, ...] = ("memory", "sqlite")


def only(played: Played) -> SessionEnding:
    assert played.problems == []
    (session,) = played.ending.sessions
    return session


# ---------------------------------------------------------------------- T1: what is acknowledged is on disk


async def say_once(lab: Lab) -> None:
    async with lab.runtime([Agent(name="echo")]) as runtime:
        session = await runtime.session("s")
        receipt = await session.send("hello")
        await lab.effect("acknowledged", receipt.turn_id)
        await receipt.result()


async def only_enter(lab: Lab) -> None:
    async with lab.runtime([Agent(name="echo")]) as runtime:
        await runtime.wait_idle(timeout=60)


@pytest.mark.kill
@pytest.mark.parametrize("store", ["sqlite", "sqlite-thread"])
def test_nothing_is_acknowledged_before_it_is_on_disk(store: StoreKind) -> None:
    """The process dies in a COMMIT, a while after it came to it: of the schema, the worker, the input, the turn."""
    with ForkServer(say_once, only_enter, timeout=60, store=store) as forks:
        forks.play()
        commits = [Statement(s.number, slow=True) for s in forks.statements if s.text == "COMMIT"][:4]
        played = [forks.play([commit]) for commit in commits]

    assert [p.problems for p in played] == [[], [], [], []]
    assert [(p.count("acknowledged"), len(p.ending.sessions)) for p in played] == [(0, 0), (0, 0), (0, 0), (1, 1)]


@pytest.mark.kill
def test_what_was_acknowledged_runs_without_being_said_again() -> None:
    with ForkServer(say_once, only_enter, timeout=60) as forks:
        played = forks.play([Crash("effect acknowledged", "lost")])

    assert only(played).said == ["user: hello", "assistant: You said: hello"]


# ---------------------------------------------------------------------- T20: fork and delete


async def fork_and_delete(lab: Lab) -> None:
    async with lab.runtime([Agent(name="echo")]) as runtime:
        origin = await runtime.session("origin")
        try:
            await origin.run("one", key="1")
            branch = await origin.fork(session_id="branch")
        except SessionDeleted:
            branch = await runtime.session("branch")
        await branch.run("two", key="2")
        await runtime.sessions.delete("origin")
        told = [message.text for message in await branch.history()]
        assert told == ["one", "You said: one", "two", "You said: two"]


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_fork_and_delete_survive_every_crash(store: StoreKind) -> None:
    report = kill_everywhere(fork_and_delete, store=store)

    assert (report.lost, report.repeated, report.problems, report.unreached) == (0, 0, [], [])
    assert [s.id for s in report.plain.ending.sessions] == ["branch"]
    assert {"branch", "delete"} <= {row.crash.point for row in report.rows}


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
def test_fork_and_delete_survive_every_real_kill(record_property: Callable[[str, object], None]) -> None:
    report = kill_everywhere(fork_and_delete, real=True)

    assert (report.lost, report.repeated, report.problems, report.unreached) == (0, 0, [], [])
    record_property("perdure", f"crash: {report}")


# ---------------------------------------------------------------------- T19: whoever watched


def test_observer_of_a_dead_process_is_told_of_the_gap_and_sees_the_commit_once() -> None:
    cursors, seen = list[str](), list[Any]()

    async def watch(lab: Lab) -> None:
        async def words(request: ModelRequest) -> Any:
            yield "half "
            if lab.incarnation == 1:
                await asyncio.Event().wait()
            yield "of it"

        async with lab.runtime([Agent(FunctionModel(words), name="speaker")]) as runtime:
            session = await runtime.session("s")
            if lab.incarnation == 1:
                async with session.stream("go", key="1") as turn:
                    async for event in turn:
                        cursors.append(event.cursor)
                        if isinstance(event, TextDelta):
                            await lab.mark("first words are shown")
            async for event in session.observe(cursors[-1]):
                seen.append(event)
                if isinstance(event, TurnCommitted):
                    break

    played = play(watch, [Crash("first words are shown")])

    assert only(played).said == ["user: go", "assistant: half of it"]
    assert isinstance(seen[0], Gap)
    assert [type(event) for event in seen].count(TurnCommitted) == 1


# ---------------------------------------------------------------------- T15: blobs


def big_report(recovery: Any) -> Callable[[Lab], Any]:
    async def scenario(lab: Lab) -> None:
        @tool(recovery=recovery)
        async def report(ctx: ToolContext[Any]) -> str:
            """A long report."""
            return f"{ctx.attempt}: " + "figures\n" * 9000

        def answer(request: ModelRequest) -> Any:
            return "done" if request.messages[-1].role == "tool" else [ToolCall("c", "report")]

        async with lab.runtime([Agent(FunctionModel(answer), name="reporter", tools=[report])]) as runtime:
            session = await runtime.session("s")
            await session.run("go", key="1")

    return scenario


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("recovery", "crash", "outcome", "orphans"),
    [
        ("once", Crash("put blob", "before"), "outcome_unknown", 0),
        ("once", Crash("put blob", "lost"), "outcome_unknown", 1),
        ("once", Crash("append 1: ended 1.0", "before"), "outcome_unknown", 1),
        ("once", Crash("append 1: ended 1.0", "lost"), "ok", 0),
        ("rerun", Crash("append 1: ended 1.0", "before"), "ok", 1),
    ],
    ids=str,
)
def test_blob_nobody_refers_to_is_collected_and_no_other(
    recovery: str, crash: Crash, outcome: str, orphans: int, store: StoreKind
) -> None:
    played = play(big_report(recovery), [crash], store=store)

    assert [call.outcome for call in only(played).calls] == [outcome]
    assert played.ending.orphans == orphans


# ---------------------------------------------------------------------- T22: the agent changed meanwhile


def order(*tools: Any, budget: Budget | None = None) -> Callable[[Lab], Any]:
    """An agent that calls `ship(to="Oslo")` and then says how that ended."""

    def answer(request: ModelRequest) -> Any:
        results = [r for m in request.messages for r in m.tool_results]
        return results[0].status if results else [ToolCall("c", "ship", {"to": "Oslo"})]

    async def scenario(lab: Lab) -> None:
        agent = Agent(FunctionModel(answer), name="shop", tools=tools, budget=budget)
        async with lab.runtime([agent]) as runtime:
            session = await runtime.session("s")
            result = await session.run("go", key="1")
            if result.waiting and lab.incarnation > 1:
                (pending,) = await session.pending()
                await session.approve(pending.call_id)
                await session.result(result.turn_id)

    return scenario


@tool(recovery="rerun")
async def ship(to: str) -> str:
    """Ship."""
    return to


@tool(name="ship", recovery="rerun", approval="ask")
async def ship_if_approved(to: str) -> str:
    """Ship."""
    return to


@tool(name="ship", recovery="rerun")
async def ship_by_weight(kilos: int) -> str:
    """Ship; its arguments are others now."""
    return str(kilos)


STARTED = Crash("begin ship 1.1.0")
PARKED = Crash("append 1: replied 1, opening a wait, parking", "lost")


@pytest.mark.parametrize("store", STORES)
def test_call_in_flight_whose_tool_is_gone_is_unknown(store: StoreKind) -> None:
    played = play(order(ship), [STARTED], resume=order(), store=store)

    session = only(played)
    assert [(c.outcome, c.attempts) for c in session.calls] == [("outcome_unknown", 1)]
    assert session.said[-1] == "assistant: outcome_unknown"
    assert played.count("ship") == 0


@pytest.mark.parametrize("store", STORES)
def test_call_in_flight_whose_schema_changed_is_not_silently_run_again(store: StoreKind) -> None:
    played = play(order(ship), [STARTED], resume=order(ship_by_weight), store=store)

    assert [c.outcome for c in only(played).calls] == ["outcome_unknown"]
    assert played.count("ship") == 0


@pytest.mark.parametrize("tools", [(), (ship_by_weight,)], ids=["gone", "another schema"])
@pytest.mark.parametrize("store", STORES)
def test_approved_call_whose_tool_changed_fails_and_says_so(tools: Any, store: StoreKind) -> None:
    played = play(order(ship_if_approved), [PARKED], resume=order(*tools), store=store)

    session = only(played)
    assert [(c.outcome, c.attempts) for c in session.calls] == [("failed", 0)]
    assert session.said[-1] == "assistant: failed"
    assert played.count("ship") == 0


@pytest.mark.parametrize("store", STORES)
def test_recorded_steps_stand_under_another_budget(store: StoreKind) -> None:
    """One step is allowed now and one is recorded: the turn gets its last word, and no recorded step is lost."""
    crash = Crash("append 1: ended 1.0", "lost")
    played = play(order(ship), [crash], resume=order(ship, budget=Budget(steps=1)), store=store)

    session = only(played)
    assert session.turns == {1: "finished"}
    assert [(c.outcome, c.repeated) for c in session.calls] == [("ok", 0)]
    assert (played.model_calls, played.count("ship")) == (2, 1)


@pytest.mark.parametrize("store", STORES)
def test_spent_budget_of_the_new_definition_ends_the_turn_typed(store: StoreKind) -> None:
    crash = Crash("append 1: ended 1.0", "lost")
    played = play(order(ship), [crash], resume=order(ship, budget=Budget(no_progress=0)), store=store)

    session = only(played)
    assert session.turns == {1: "budget_spent"}
    assert [c.outcome for c in session.calls] == ["ok"]
