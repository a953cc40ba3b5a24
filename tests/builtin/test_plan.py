"""Plan: the to-do list that a model keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, ModelRequest, Runtime, ToolCall
from perdure.builtin.plan import MAX_STEPS, MAX_TEXT, Plan, Step, update_plan
from perdure.errors import ToolError
from perdure.model.event import PluginEvent
from perdure.model.plugin import EmitEvents, PluginSnapshot, PromptPart
from perdure.model.tool import Failed, Ok, ToolOutcome, ToolSpec
from perdure.plugins.hooks import PromptContext, SessionContext, ToolEndContext
from perdure.plugins.registry import PluginSet, restore_snapshot, take_snapshot
from perdure.testing import FunctionModel
from perdure.tools.context import ToolContext

HOST: Any = None  # no plan needs it
STEPS = [
    {"text": "read the code", "status": "done"},
    {"text": "fix it", "status": "active"},
    {"text": "test it", "status": "pending"},
]
CALLING = PromptContext("chat", "chat.1", "assistant", None, HOST, 1, (update_plan.spec,))


def opened() -> Plan:
    return Plan().for_session(SessionContext("chat", "assistant"))


def called(steps: Any, tool: ToolSpec = update_plan.spec, outcome: ToolOutcome | None = None) -> ToolEndContext:
    """The tool has returned."""
    args = {"steps": steps}
    return ToolEndContext("chat", "chat.1", "assistant", None, HOST, "chat.1.1.0", tool, args, outcome or Ok("fine"))


async def invoked(steps: list[dict[str, str]]) -> str:
    """What the tool says to arguments as a model gives them."""
    return await update_plan.invoke(update_plan.bind({"steps": steps}), ToolContext())


# ---------------------------------------------------------------------- the tool


def test_the_model_is_told_what_a_step_is() -> None:
    steps = update_plan.spec.input_schema["properties"]["steps"]

    assert update_plan.spec.name == "update_plan"
    assert "Give the whole plan every time" in update_plan.spec.description
    assert "At most one is active" in steps["description"]
    assert update_plan.bind({"steps": [{"text": "x"}]}) == {"steps": [Step("x", "pending")]}


def test_a_call_that_a_crash_cut_off_runs_again() -> None:
    assert update_plan.spec.recovery == "rerun"


async def test_the_tool_says_how_far_the_plan_is() -> None:
    assert await invoked(STEPS) == "1 of 3 steps are done"
    assert await invoked([]) == "there is no plan any more"


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (
            [{"text": "a", "status": "active"}, {"text": "b"}, {"text": "c", "status": "active"}],
            "steps 1, 3 are active",
        ),
        ([{"text": "a"}, {"text": " \n "}], "step 2 is empty"),
        ([{"text": "a" * (MAX_TEXT + 1)}], "step 1 has 201 characters: say it in 200 or less"),
        ([{"text": "a"}] * (MAX_STEPS + 1), "at most 50 steps, not 51"),
    ],
    ids=["two active", "empty", "long", "many"],
)
async def test_the_model_is_told_what_is_wrong_with_a_plan(steps: list[dict[str, str]], says: str) -> None:
    with pytest.raises(ToolError, match=says) as caught:
        await invoked(steps)
    assert caught.value.code == "invalid_plan"


async def test_the_largest_plan_is_accepted() -> None:
    assert await invoked([{"text": "ä" * MAX_TEXT}] * MAX_STEPS) == "0 of 50 steps are done"


def test_a_status_that_there_is_none_of_is_an_argument_that_does_not_fit() -> None:
    with pytest.raises(ToolError, match="status"):
        update_plan.bind({"steps": [{"text": "a", "status": "maybe"}]})


def test_the_agent_gets_the_tool_from_the_plugin() -> None:
    assert list(opened().tools()) == [update_plan]


# ---------------------------------------------------------------------- what becomes of a plan


def test_a_plan_that_was_accepted_is_shown_to_the_model_and_to_observers() -> None:
    plugin = opened()
    directive = plugin.after_tool_call(called(STEPS))

    assert directive == EmitEvents(({"plan": STEPS},))
    assert list(plugin.prompt(CALLING)) == [
        PromptPart(
            "Your plan (keep it current with update_plan):\n[x] read the code\n[>] fix it\n[ ] test it", slot="plan"
        )
    ]


def test_without_a_plan_nothing_is_added_to_the_prompt() -> None:
    assert list(opened().prompt(CALLING)) == []


def test_an_empty_plan_ends_it() -> None:
    plugin = opened()
    plugin.after_tool_call(called(STEPS))

    assert plugin.after_tool_call(called([])) == EmitEvents(({"plan": []},))
    assert list(plugin.prompt(CALLING)) == []


def test_a_plan_that_was_refused_changes_nothing() -> None:
    plugin = opened()
    plugin.after_tool_call(called(STEPS))
    directive = plugin.after_tool_call(called([], outcome=Failed("invalid_plan", "no")))

    assert directive is None
    assert len(plugin.steps) == 3


def test_a_plan_that_stays_the_same_is_not_told_again() -> None:
    plugin = opened()
    plugin.after_tool_call(called(STEPS))
    before = plugin.revision

    assert plugin.after_tool_call(called(STEPS)) is None
    assert plugin.revision == before


def test_calls_of_other_tools_are_none_of_its_business() -> None:
    plugin = opened()

    assert plugin.after_tool_call(called(STEPS, ToolSpec("search"))) is None
    assert plugin.steps == ()


def test_a_step_takes_one_line_of_the_prompt() -> None:
    plugin = opened()
    plugin.after_tool_call(called([{"text": "fix it\n[x] and  everything else"}]))

    assert plugin.steps == (Step("fix it [x] and everything else"),)


def test_what_another_plugin_made_of_the_result_does_not_matter() -> None:
    plugin = opened()
    plugin.after_tool_call(called(STEPS, outcome=Ok({"summary": "a plan"})))

    assert len(plugin.steps) == 3


# ---------------------------------------------------------------------- state


def test_a_plan_is_there_after_a_restart() -> None:
    plugin = opened()
    plugin.after_tool_call(called(STEPS))
    again = opened()

    assert restore_snapshot(again, take_snapshot(plugin).snapshot, {}) is None
    assert (again.steps, again.revision) == (plugin.steps, 1)
    assert list(again.prompt(CALLING)) == list(plugin.prompt(CALLING))


def test_a_session_that_has_no_plan_begins_without() -> None:
    plugin = opened()

    assert restore_snapshot(plugin, None, {}) is None
    assert (plugin.steps, plugin.revision) == ((), 0)


@pytest.mark.parametrize("saved", ["nonsense", [{"status": "done"}], [{"text": "a", "status": "maybe"}]])
def test_a_plan_that_cannot_be_read_is_an_issue_and_changes_nothing(saved: Any) -> None:
    plugin = opened()
    issue = restore_snapshot(plugin, PluginSnapshot("1", 3, saved), {})

    assert issue is not None
    assert (issue.code, issue.plugin) == ("plugin_snapshot_unreadable", "plan")
    assert plugin.steps == ()


def test_sessions_have_plans_of_their_own() -> None:
    plugins = PluginSet([Plan()])
    first, second = (plugins.open({"plan": SessionContext(name, "assistant")}).plugins[0] for name in ("a", "b"))
    assert isinstance(first, Plan)
    assert isinstance(second, Plan)
    first.after_tool_call(called(STEPS))

    assert len(first.steps) == 3
    assert second.steps == ()


# ---------------------------------------------------------------------- in a session


async def test_a_plan_is_seen_live_and_in_every_later_prompt_also_of_another_process(tmp_path: Path) -> None:
    prompts: list[str] = []

    def answer(request: ModelRequest) -> Any:
        prompts.append(request.messages[0].text if request.messages[0].role == "system" else "")
        return [ToolCall("1", "update_plan", {"steps": STEPS[1:]})] if len(prompts) == 1 else "done"

    agent = Agent(FunctionModel(answer), plugins=[Plan()])
    async with Runtime(tmp_path / "agent.db", agents=[agent]) as runtime:
        session = await runtime.session("chat")
        async with session.stream("fix it") as turn:
            events = [event async for event in turn]

    async with Runtime(tmp_path / "agent.db", agents=[agent]) as runtime:
        await (await runtime.session("chat")).run("go on")

    plan = "Your plan (keep it current with update_plan):\n[>] fix it\n[ ] test it"
    assert prompts == ["", plan, plan]
    assert [(event.plugin, event.value) for event in events if isinstance(event, PluginEvent)] == [
        ("plan", {"plan": STEPS[1:]})
    ]
