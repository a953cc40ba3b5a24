"""The kits in a test in which an event loop runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Agent, Plugin
from perdure.errors import InvalidInput
from perdure.plugins import ToolCallContext
from perdure.testing import FunctionModel, crash
from perdure.testing.crash import Crash, Lab
from perdure.testing.plugin_contract import check_plugin, check_plugin_async


class Meddling(Plugin):
    id = "meddling"

    def before_tool_call(self, ctx: ToolCallContext) -> None:
        ctx.args["seen"] = True


async def scenario(lab: Lab) -> None:
    async with lab.runtime([Agent(FunctionModel(lambda request: "done"))]) as runtime:
        await (await runtime.session("s")).run("go", key="go")


async def test_a_plugin_is_checked_beside_a_running_event_loop() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    report = await check_plugin_async(Meddling, checks=["defined", "undisturbed", "arguments"])
    ticking.cancel()

    assert [str(finding) for finding in report.findings] == [
        "before_tool_call: it changes ctx.args, which it was only shown: make a copy"
    ]
    assert ticks > 1


async def test_a_scenario_is_killed_beside_a_running_event_loop() -> None:
    report = await crash.kill_everywhere_async(scenario, modes=["before"])
    played = await crash.play_async(scenario, [Crash("commit 1", "lost")])

    assert (report.lost, report.problems) == (0, [])
    assert report.kills > 3
    assert played.problems == []


@pytest.mark.kill
@pytest.mark.slow
async def test_a_scenario_is_really_killed_beside_a_running_event_loop() -> None:
    report = await crash.kill_everywhere_async(scenario, modes=["before"], real=True)

    assert (report.lost, report.problems) == (0, [])


@pytest.mark.parametrize(
    ("kit", "named"),
    [
        (lambda: check_plugin(Meddling), "check_plugin_async"),
        (lambda: crash.kill_everywhere(scenario), "kill_everywhere_async"),
        (lambda: crash.play(scenario), "play_async"),
    ],
    ids=["check_plugin", "kill_everywhere", "play"],
)
async def test_the_sync_form_names_the_async_one_where_a_loop_runs(kit: Any, named: str) -> None:
    with pytest.raises(InvalidInput, match=rf"await {named}\(…\) instead"):
        kit()
