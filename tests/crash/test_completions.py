"""A plugin that asks another model with tools, killed at every point: what is recorded is not asked for again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure import Agent, ModelRequest, ModelResponse, ModelSettings, Plugin, ToolCall, Usage
from perdure.model.tool import ToolSpec
from perdure.plugins import PromptContext
from perdure.testing import FunctionModel
from perdure.testing.crash import KillResult, Lab, Report, StoreKind
from tests.fuzzing import REAL_KILLS

PICK = ToolSpec("pick", "Pick a number.")


class Judge(Plugin):
    """Asks its own model which number to name, and writes down what it was told."""

    id = "judge"

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    async def prompt(self, ctx: PromptContext) -> str:
        settings = ModelSettings(tool_choice="required")
        told = await ctx.host.complete("which?", label="judge", tools=[PICK], settings=settings, model="judge")
        await self.lab.effect("told", ctx.turn_id)
        return f"name {told.tool_calls[0].args['n']}, {told.stop}"


async def scenario(lab: Lab) -> None:
    async def judge(request: ModelRequest) -> ModelResponse:
        assert (request.label, request.settings.tool_choice) == ("judge", "required")
        await lab.effect("judge", request.call_id)
        return ModelResponse(tool_calls=(ToolCall("", "pick", {"n": 7}),), stop="tool_calls", usage=Usage(2, 1))

    def own(request: ModelRequest) -> str:
        assert request.label == "turn", "what is asked of the judge is never asked of the session's model"
        return request.messages[0].text

    agent = Agent(FunctionModel(own), name="agent", plugins=[Judge(lab)])
    async with lab.runtime([agent], models={"judge": FunctionModel(judge)}) as runtime:
        session = await runtime.session("s")
        await session.run("go", key="go")
        await session.configure(model="judge")  # of no turn that was accepted before
        usage = (await session.usage())["judge"]
        assert usage.calls == 1
        await lab.effect("counted", "usage", usage.unknown)


def faults(row: KillResult) -> list[str]:
    found, ledger = list(row.problems), row.played.ledger
    said = [session.said for session in row.played.ending.sessions]
    if said != [["user: go", "assistant: name 7, tool_calls"]]:
        found.append(f"said {said}")
    asked = [line for line in ledger if line.name == "judge"]
    if not 1 <= len(asked) <= 2 or len({line.key for line in asked}) != 1:
        found.append(f"the judge was asked {[line.key for line in asked]}")
    told = next(index for index, line in enumerate(ledger) if line.name == "told")
    if any(line.name == "judge" for line in ledger[told:]):
        found.append("the judge was asked again although its answer was recorded")
    if len(asked) == 2 and not any(line.name == "counted" and line.data == 1 for line in ledger):
        found.append("the question that was cut off is not counted")
    return found


def check(report: Report) -> None:
    assert {str(row.crash): faults(row) for row in report.rows if faults(row)} == {}
    assert report.lost == 0
    again = [row for row in report.rows if sum(line.name == "judge" for line in row.played.ledger) == 2]
    assert again, "killed between the question and its record, it is asked again"


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_an_answer_is_asked_for_until_it_is_recorded(store: StoreKind, crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(scenario, store=store))


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
def test_an_answer_is_asked_for_until_it_is_recorded_by_a_process_that_is_really_killed(
    crash_kit: Callable[..., Report],
) -> None:
    check(crash_kit(scenario, real=True, sample=REAL_KILLS))
