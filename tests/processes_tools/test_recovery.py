"""What is found of background calls when somebody else goes on: other definitions, deaths in a row, people."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Agent, ToolContext, tool
from perdure.model.process import Abandoned, Cancelled
from perdure.model.tool import Recovery
from perdure.model.write import ProcessScope, Release
from perdure.testing import FunctionModel
from perdure.testing.crash import Crash, Lab, play
from tests.kit import SOON, Place, crash, until
from tests.processes_tools.crashing import ATTENDED, SESSION
from tests.processes_tools.talk import Talk, agent_of, call, row_of, said

FIRST = "chat.1.1.0"


def deadly(ran: list[int], **options: Any) -> Any:
    """A tool that never ends: whoever runs it is killed meanwhile."""

    @tool(background=True, **options)
    async def sink(ctx: ToolContext[Any]) -> None:
        ran.append(ctx.attempt)
        await asyncio.Event().wait()

    return sink


# ---------------------------------------------------------------------- deaths in a row


async def test_a_rerun_tool_that_kills_its_workers_is_set_aside(place: Place) -> None:
    ran: list[int] = []
    agent = agent_of(Talk([call("sink")]), deadly(ran, recovery="rerun"))
    runtime = await place.runtime(agent).__aenter__()
    await said(runtime)
    for deaths in range(5):
        await until(lambda deaths=deaths: len(ran) == deaths + 1)  # type: ignore[misc]
        await crash(runtime)
        runtime = await place.runtime(agent).__aenter__()
    await until(lambda: is_stuck(runtime))
    row = await row_of(runtime, FIRST)
    await crash(runtime)

    assert ran == [1, 2, 3, 4, 5]
    assert (row.stuck or "").startswith("3 workers in a row took it over and died without a new record")


async def is_stuck(runtime: Any) -> bool:
    return (await row_of(runtime, FIRST)).stuck is not None


async def test_a_once_tool_is_abandoned_with_the_proof_that_its_worker_died(place: Place) -> None:
    ran: list[int] = []
    agent = agent_of(Talk([call("sink")]), deadly(ran))
    runtime = await place.runtime(agent).__aenter__()
    await said(runtime)
    await until(lambda: ran)
    owner = (await row_of(runtime, FIRST)).owner
    await crash(runtime)
    async with place.runtime(agent) as runtime:
        output = await runtime.handle(FIRST).outcome(SOON)

    assert ran == [1]
    assert isinstance(output, Abandoned)
    assert (output.evidence.writer, output.evidence.owner) == ("sweep", owner)
    assert output.evidence.proof


async def test_cancelled_after_its_worker_died_a_rerun_tool_is_unknown(place: Place) -> None:
    """The first attempt may have had its effect, and there is no second one."""
    ran: list[int] = []
    agent = agent_of(Talk([call("sink")]), deadly(ran, recovery="rerun"))
    runtime = await place.runtime(agent).__aenter__()
    await said(runtime)
    await until(lambda: ran)
    await crash(runtime)
    async with place.runtime(recover=False) as runtime:
        assert await runtime.handle(FIRST).cancel("enough", by="kim") == "requested"
    async with place.runtime(agent) as runtime:
        output = await runtime.handle(FIRST).outcome(SOON)

    assert output == Cancelled("kim", "enough", unknown=True)
    assert ran == [1]


async def test_a_once_tool_that_was_set_aside_and_resumed_is_not_begun_again(place: Place) -> None:
    ran: list[int] = []
    async with place.runtime(agent_of(Talk([call("sink")]), deadly(ran))) as runtime:
        await said(runtime)
        await until(lambda: ran)
        row = await row_of(runtime, FIRST)
        assert row.owner is not None
        scope = ProcessScope(row.id, row.pid, row.owner, row.generation)
        await runtime.store.write(Release(scope, runtime._clock.now(), "somebody looked"))
        assert await runtime.processes.resume(FIRST)
        output = await runtime.handle(FIRST).outcome(SOON)

    assert ran == [1]
    assert isinstance(output, Abandoned)
    assert output.evidence.writer == "engine_gave_up"


# ---------------------------------------------------------------------- another definition


def scenario_of(first: Any, later: Any) -> Any:
    """The tool `crawl` is made by `first`, and after the kill by `later`; None is no tool."""

    async def scenario(lab: Lab) -> None:
        made = (first if lab.incarnation == 1 else later)(lab)

        def think(request: Any) -> Any:
            last = request.messages[-1]
            if last.role == "user":
                return "heard" if last.text.startswith("[process") else [call("crawl")]
            return last.tool_results[0].status

        agent = Agent(FunctionModel(think), name="spider", tools=[] if made is None else [made])
        async with lab.runtime([agent], lease=ATTENDED) as runtime:
            await (await runtime.session(SESSION)).run("go", key="1")
            for row in await runtime.processes.list():
                if made is not None:
                    await runtime.handle(row.id).outcome()

    return scenario


def made(background: bool, recovery: Recovery = "once") -> Any:
    def make(lab: Lab) -> Any:
        @tool(background=background, recovery=recovery)
        async def crawl(ctx: ToolContext[Any]) -> str:
            await lab.effect("crawl", ctx.idempotency_key)
            return "crawled"

        return crawl

    return make


def gone(lab: Lab) -> None:
    return None


REGISTER = "register chat.1.1.0"


def calls_of(played: Any) -> list[tuple[str, str]]:
    assert played.problems == []
    session = played.ending.session(SESSION)
    return [(each.tool, each.outcome) for each in session.calls]


@pytest.mark.parametrize("mode", ["before", "lost"])
def test_a_call_that_was_sent_to_the_background_goes_there_again_whatever_its_tool_says_now(mode: Any) -> None:
    """Its record tells: a tool that runs in the foreground by now would be a second run beside the process."""
    played = play(scenario_of(made(True), made(False)), [Crash(REGISTER, mode)])

    assert calls_of(played) == [("crawl", "ok")]
    assert [each.id for each in played.ending.processes] == [FIRST]
    assert played.count("crawl") == 1


def test_a_call_that_began_in_the_foreground_is_not_begun_again_in_the_background() -> None:
    played = play(scenario_of(made(False), made(True)), [Crash("end crawl 1.1.0", "before")])

    assert calls_of(played) == [("crawl", "outcome_unknown")]
    assert played.ending.processes == []
    assert played.count("crawl") == 1


def test_a_call_whose_tool_is_gone_before_it_was_registered_has_not_run() -> None:
    played = play(scenario_of(made(True), gone), [Crash(REGISTER, "before")])

    assert calls_of(played) == [("crawl", "failed")]
    assert played.ending.processes == []


def test_a_call_whose_tool_is_gone_after_it_was_registered_is_told_as_started() -> None:
    played = play(scenario_of(made(True), gone), [Crash(REGISTER, "lost")])

    assert calls_of(played) == [("crawl", "ok")]
    process = played.ending.process(FIRST)
    assert process is not None
    assert (process.status, played.count("crawl")) == ("running", 0), "it waits for its tool"


def test_killed_twice_it_is_still_one_process() -> None:
    starting = "advance chat.1.1.0: starting"
    rerun = made(True, "rerun")
    played = play(scenario_of(rerun, rerun), [Crash(REGISTER, "lost"), Crash(starting, "lost")])

    assert calls_of(played) == [("crawl", "ok")]
    assert [(each.id, each.status) for each in played.ending.processes] == [(FIRST, "completed")]
    assert played.count("crawl") == 1
