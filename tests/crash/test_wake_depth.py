"""A session that wakes itself again and again is set aside: killed at every point on the way there, and just after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from perdure import Agent, ToolContext, tool
from perdure.ports.store import Store
from perdure.processes.function.context import ProcessContext
from perdure.processes.function.engine import process
from perdure.testing.crash import Lab, Report
from tests.crash.reference import ATTENDED, SESSION, patiently
from tests.kit import agent_calling


@process
async def tick(ctx: ProcessContext[Any]) -> str:
    return "tick"


@tool(recovery="rerun")
async def wind(ctx: ToolContext[Any]) -> str:
    """Start what wakes the session, and do not return before it has ended: the turn is busy when the wake comes."""
    await (await ctx.host.start_process(tick, key="tick", wake="turn")).result()
    return "wound"


def clock() -> Agent[str]:
    return agent_calling("wind", answer="It ticks.", name="clock", tools=[wind], wake_depth=2)


async def set_aside(store: Store) -> bool:
    row = await store.session(SESSION)
    return row is not None and row.state == "stuck"


async def wound_up(lab: Lab) -> None:
    async with lab.runtime([clock()], processes=[tick], lease=ATTENDED) as runtime:
        session = await runtime.session(SESSION)
        await patiently(lambda: session.send("go", key="go"))
        await lab.until(set_aside)


@pytest.mark.parametrize(
    "real", [False, pytest.param(True, marks=[pytest.mark.kill, pytest.mark.gate])], ids=["played", "real"]
)
def test_it_is_set_aside_once_wherever_it_is_killed(crash_kit: Callable[..., Report], real: bool) -> None:
    report = crash_kit(wound_up, real=real)

    assert report.problems == []
    assert {"before", "lost"} <= {row.crash.mode for row in report.rows if row.crash.point == "deliver #2"}
    for row in report.rows:
        session = row.played.ending.session(SESSION)
        assert session is not None
        assert (session.state, session.head, session.turn, session.inbox) == ("stuck", 2, 3, [])
        assert session.reason is not None
        assert session.reason.startswith("2 wakes in a row")
        assert session.turns == {1: "finished", 2: "finished"}
        assert [each.status for each in row.played.ending.processes] == ["completed", "completed"]
        assert [each.told for each in row.played.ending.processes] == [["enqueued"], ["enqueued"]]
