"""The model of a turn, killed at every point: for one turn, for a session, and with another choice made meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure import Agent
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab, Report, StoreKind


def named(name: str) -> FunctionModel:
    return FunctionModel(lambda request: f"{name} has heard {request.messages[-1].text}", name)


async def scenario(lab: Lab) -> None:
    """A program that starts again configures the session anew while turns that it left behind are taken up."""
    models = {"one": named("one"), "two": named("two")}
    async with lab.runtime([Agent(named("own"), name="agent")], models=models) as runtime:
        session = await runtime.session("s")
        await session.configure(reset=True)
        await session.run("1", key="1", model="one")
        await session.run("2", key="2")
        await session.configure(model="two")
        for word in ("3", "4"):
            await session.send(word, key=word)
        await session.configure(model="one")
        await session.run("5", key="5")


ENDED = [
    *("user: 1", "assistant: one has heard 1"),
    *("user: 2", "assistant: own has heard 2"),
    *("user: 3", "assistant: two has heard 3"),
    *("user: 4", "assistant: two has heard 4"),
    *("user: 5", "assistant: one has heard 5"),
]


def check(report: Report) -> None:
    assert (report.lost, report.problems) == (0, [])
    for row in report.rows:
        found = {session.id: session.said for session in row.played.ending.sessions}
        assert found == {"s": ENDED}, str(row.crash)
    assert {"before configure", "lost configure"} <= {str(row.crash) for row in report.rows}


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_each_turn_asks_the_model_it_was_accepted_under(store: StoreKind, crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(scenario, store=store))


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
def test_each_turn_asks_the_model_it_was_accepted_under_after_a_real_kill(crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(scenario, real=True))
