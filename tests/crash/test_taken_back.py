"""A deferred call whose body fails: its key is taken back before its end is recorded. Killed anywhere, also between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest

from perdure import Agent, ToolContext, ToolError, tool
from perdure.testing.crash import Crash, Lab, Report, play
from tests.kit import agent_calling


def clerk(lab: Lab, recovery: Literal["once", "rerun"]) -> Agent[str]:
    @tool(deferred=True, recovery=recovery)
    async def order(ctx: ToolContext[Any]) -> None:
        """Order."""
        await lab.effect("order", ctx.idempotency_key)
        ctx.defer()
        raise ToolError("the printer jams")

    return agent_calling("order", name="clerk", tools=[order])


async def ordered(lab: Lab, recovery: Literal["once", "rerun"]) -> None:
    async with lab.runtime([clerk(lab, recovery)]) as runtime:
        session = await runtime.session("s")
        await session.run("go", key="go")


async def ordered_once(lab: Lab) -> None:
    await ordered(lab, "once")


async def ordered_again(lab: Lab) -> None:
    await ordered(lab, "rerun")


def ends(report: Report) -> set[tuple[str, str]]:
    """How the turn and its call ended, over all kills."""
    found = set()
    for row in report.rows:
        session = row.played.ending.session("s")
        assert session is not None
        found.add((session.said[-1], session.calls[0].outcome))
    return found


@pytest.mark.parametrize(
    "real", [False, pytest.param(True, marks=[pytest.mark.kill, pytest.mark.gate])], ids=["played", "real"]
)
def test_one_that_may_be_repeated_fails_wherever_it_is_killed(crash_kit: Callable[..., Report], real: bool) -> None:
    report = crash_kit(ordered_again, real=real)

    assert report.problems == []
    assert ends(report) == {("assistant: done", "failed")}
    assert (report.lost, report.unknown) == (0, 0)
    assert max(row.effects for row in report.rows) == 2


def test_one_that_may_not_is_unknown_when_its_key_is_taken_back_and_its_end_is_not_recorded() -> None:
    played = play(ordered_once, [Crash("append 1: ended 1.0, opening a wait", "before")])

    session = played.ending.session("s")
    assert session is not None
    assert (session.said[-1], session.calls[0].outcome) == ("assistant: done", "outcome_unknown")
    assert list(played.effects.values()) == [1]
