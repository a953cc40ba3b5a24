"""Plan: a to-do list that the model keeps, sees before every step, and that people watch change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from msgspec import Struct, convert, to_builtins

from perdure.errors import ToolError
from perdure.model.plugin import EmitEvents, PluginSnapshot, PromptPart
from perdure.model.tool import Ok
from perdure.plugins.hooks import (
    Plugin,
    PromptContext,
    SessionContext,
    SnapshotReader,
    SnapshotWriter,
    ToolEndContext,
)
from perdure.tools.define import Tool, tool

MAX_STEPS = 50
MAX_TEXT = 200

MARKS = {"pending": "[ ]", "active": "[>]", "done": "[x]"}


class Step(Struct, frozen=True):
    """One step of a plan."""

    text: str
    status: Literal["pending", "active", "done"] = "pending"


@tool(recovery="rerun")  # it only looks: what it accepted is remembered with the record of its outcome
async def update_plan(steps: list[Step]) -> str:
    """Write down your plan for work of several steps, and keep it current as you go on.

    Give the whole plan every time: it replaces the one before. An empty list ends it.

    Args:
        steps: The steps in order, in a few words each. At most one is active: the one you are working on.
    """
    done = sum(step.status == "done" for step in checked(steps))
    return f"{done} of {len(steps)} steps are done" if steps else "there is no plan any more"


def checked(steps: Iterable[Step]) -> tuple[Step, ...]:
    """The steps with each text on one line; ToolError tells the model what to mend."""
    plan = tuple([Step(" ".join(step.text.split()), step.status) for step in steps])
    if len(plan) > MAX_STEPS:
        raise ToolError(f"a plan has at most {MAX_STEPS} steps, not {len(plan)}: join some", code="invalid_plan")
    for number, step in enumerate(plan, 1):
        if not step.text:
            raise ToolError(f"step {number} is empty: say what is to be done", code="invalid_plan")
        if len(step.text) > MAX_TEXT:
            raise ToolError(
                f"step {number} has {len(step.text)} characters: say it in {MAX_TEXT} or less", code="invalid_plan"
            )
    active = [str(number) for number, step in enumerate(plan, 1) if step.status == "active"]
    if len(active) > 1:
        raise ToolError(f"steps {', '.join(active)} are active: work on one at a time", code="invalid_plan")
    return plan


class Plan(Plugin):
    """Gives the model the tool `update_plan`, and shows it its plan before every model call.

    Observers of the session get an event with `{"plan": [{"text": …, "status": …}, …]}` when it changes.

    The plan changes with the record of the call: killed before, the call runs again; killed after, the plan is there.
    """

    id = "plan"

    def __init__(self) -> None:
        self.steps: tuple[Step, ...] = ()
        self._revision = 0

    def for_session(self, ctx: SessionContext) -> Plan:
        return type(self)()

    def tools(self) -> Iterable[Tool[..., Any]]:
        return (update_plan,)

    def prompt(self, ctx: PromptContext) -> Iterable[PromptPart]:
        if not self.steps:
            return ()
        lines = [f"{MARKS[step.status]} {step.text}" for step in self.steps]
        return (PromptPart("\n".join(["Your plan (keep it current with update_plan):", *lines]), slot="plan"),)

    def after_tool_call(self, ctx: ToolEndContext) -> EmitEvents | None:
        # The arguments, not the result: that is for the model, and other plugins may have shortened it.
        if ctx.tool.tool_id != update_plan.spec.tool_id or not isinstance(ctx.outcome, Ok):
            return None
        steps = checked(convert(ctx.args["steps"], list[Step], strict=False))
        if steps == self.steps:
            return None
        self.steps = steps
        self._revision += 1
        return EmitEvents(({"plan": to_builtins(list(steps))},))

    @property
    def revision(self) -> int:
        return self._revision

    def snapshot(self, writer: SnapshotWriter) -> Any:
        return to_builtins(self.steps)

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        self.steps = () if snapshot.state is None else convert(snapshot.state, tuple[Step, ...])
        self._revision = snapshot.revision
