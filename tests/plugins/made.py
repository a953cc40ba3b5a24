"""Plugins made on the spot, and what hooks are told about a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from perdure.model.tool import Failed, Ok, ToolOutcome, ToolSpec
from perdure.plugins import decisions
from perdure.plugins.calls import Hooks, after_tool_call, before_tool_call
from perdure.plugins.hooks import Plugin, SessionContext, ToolCallContext, ToolEndContext
from perdure.plugins.registry import PluginSet

ARGS = {"n": 1}
ENDED = Ok("as it was")
TOOL = ToolSpec("add")


def having(hook: str, body: Callable[..., Any], id: str = "p", **attributes: Any) -> Plugin:
    """A plugin with one hook, async when `body` is."""

    async def later(self: Plugin, *told: Any) -> Any:
        return await body(*told)

    def plain(self: Plugin, *told: Any) -> Any:
        return body(*told)

    method = later if inspect.iscoroutinefunction(body) else plain
    made: Plugin = type("Made", (Plugin,), {"id": id, hook: method, **attributes})()
    return made


def hooks_of(hook: str, *plugins: Plugin) -> Hooks:
    """Who has a hook, as a session finds it."""
    contexts = {plugin.id: SessionContext("s", "agent") for plugin in plugins}
    return PluginSet(plugins).open(contexts).hooks(hook)


class Voice(Plugin):
    """Says one thing about a call, and another when it looks again; `seen` is what it was shown."""

    def __init__(self, id: str, says: Any = None, again: Any = None) -> None:
        self.id, self.says, self.again = id, says, again
        self.seen: list[tuple[Any, bool]] = []

    def answer(self, shown: Any, inspecting: bool) -> Any:
        self.seen.append((shown, inspecting))
        said = self.again if inspecting else self.says
        if isinstance(said, BaseException):
            raise said
        return said


class Before(Voice):
    def before_tool_call(self, ctx: ToolCallContext) -> Any:
        return self.answer(ctx.args, ctx.inspecting)


class LaterBefore(Voice):
    async def before_tool_call(self, ctx: ToolCallContext) -> Any:
        return self.answer(ctx.args, ctx.inspecting)


class After(Voice):
    def after_tool_call(self, ctx: ToolEndContext) -> Any:
        return self.answer(ctx.outcome, ctx.inspecting)


class LastAfter(After):
    """The same as a filter."""

    is_filter = True


class LaterAfter(Voice):
    async def after_tool_call(self, ctx: ToolEndContext) -> Any:
        return self.answer(ctx.outcome, ctx.inspecting)


def call_context(args: dict[str, Any], inspecting: bool) -> ToolCallContext:
    host: Any = None  # no law needs it
    return ToolCallContext("s", "s.1", "agent", None, host, "s.1.0.0", TOOL, args, inspecting)


def end_context(outcome: ToolOutcome) -> ToolEndContext:
    host: Any = None
    return ToolEndContext("s", "s.1", "agent", None, host, "s.1.0.0", TOOL, ARGS, outcome)


async def before(*plugins: Plugin, args: dict[str, Any] | None = None) -> decisions.CallVerdict:
    return await before_tool_call(hooks_of("before_tool_call", *plugins), call_context, ARGS if args is None else args)


async def after(*plugins: Plugin, ended: ToolOutcome = ENDED) -> decisions.Left:
    return await after_tool_call(hooks_of("after_tool_call", *plugins), end_context, ended)


def failed(verdict: decisions.CallVerdict | decisions.Left) -> Failed:
    assert isinstance(verdict.outcome, Failed)
    return verdict.outcome
