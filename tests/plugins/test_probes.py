"""Whoever traces is told when hooks begin and end: which ones, under which name, and also when they fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from perdure import tool
from perdure.model.outcome import Finished, PluginAborted
from perdure.plugins.hooks import Plugin, SessionConfig, SessionContext
from tests.kit import Place, agent_calling


class Kept:
    """A trace that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, Any]] = []
        self.context: list[tuple[Any, Any]] = []

    def write(self, name: str, payload: Mapping[str, Any]) -> None:
        self.lines.append((name, payload["payload"]))
        self.context.append((payload["session_id"], payload["turn_id"]))


class Busy(Plugin):
    """Has every hook that is asked once per turn or call, plain and async ones."""

    id = "busy"

    def __init__(self, failing: str = "") -> None:
        self.failing = failing

    def _do(self, hook: str) -> None:
        if hook == self.failing:
            raise ValueError("oh")

    async def before_turn(self, ctx: Any) -> None:
        self._do("before_turn")

    def prompt(self, ctx: Any) -> str:
        return ""

    def transform_view(self, ctx: Any, messages: Any) -> Any:
        self._do("transform_view")
        return messages

    def before_tool_call(self, ctx: Any) -> None:
        pass

    async def after_tool_call(self, ctx: Any) -> None:
        pass

    async def at_checkpoint(self, ctx: Any) -> None:
        pass

    def after_turn(self, ctx: Any) -> None:
        self._do("after_turn")

    async def turn_finalized(self, ctx: Any) -> None:
        self._do("turn_finalized")

    def turn_persisted(self, ctx: Any) -> None:
        self._do("turn_persisted")


@tool
def add(n: int) -> int:
    """Add one."""
    return n + 1


def both(kind: str) -> list[tuple[str, str]]:
    return [(f"plugin_hook.{kind}.busy", "begin"), (f"plugin_hook.{kind}.busy", "end")]


async def traced(place: Place, failing: str = "") -> tuple[Kept, Any]:
    kept = Kept()
    agent = agent_calling("add", {"n": 1}, tools=[add], plugins=[Busy(failing)])
    async with place.runtime(agent, trace=kept) as runtime:
        return kept, await (await runtime.session("s")).run("go")


async def test_hooks_of_a_turn_are_told_and_those_of_prompts_calls_and_checkpoints_are_not(place: Place) -> None:
    kept, result = await traced(place)

    assert result.outcome == Finished("done")
    assert kept.lines == [
        *both("before_turn"),
        *both("context_transform"),
        *both("context_transform"),
        *both("after_turn"),
        *both("turn_finalized"),
        *both("turn_persisted"),
    ]
    assert set(kept.context) == {("s", "s.1")}


@pytest.mark.parametrize(
    ("hook", "kind", "ends"),
    [
        ("before_turn", "before_turn", True),
        ("transform_view", "context_transform", True),
        ("after_turn", "after_turn", True),
        ("turn_finalized", "turn_finalized", False),
        ("turn_persisted", "turn_persisted", False),
    ],
)
async def test_end_is_told_also_when_the_hook_failed(place: Place, hook: str, kind: str, ends: bool) -> None:
    kept, result = await traced(place, hook)

    assert isinstance(result.outcome, PluginAborted) == ends
    told = [line for line in kept.lines if line[0] == f"plugin_hook.{kind}.busy"]
    assert told == both(kind) * (len(told) // 2)
    assert told


class Settling(Plugin):
    """Is told when a session is loaded and when it runs differently; its tone decides how it runs."""

    id = "busy"

    def __init__(self, tone: str, failing: str = "") -> None:
        self.tone, self.failing = tone, failing

    def for_session(self, ctx: SessionContext) -> Plugin:
        return Settling(ctx.options or self.tone, self.failing)

    def configure(self, ctx: SessionContext, config: SessionConfig) -> SessionConfig:
        return SessionConfig(self.tone, config.budget)

    async def session_restored(self, ctx: SessionContext) -> None:
        if self.failing == "session_restored":
            raise ValueError("oh")

    def session_config_changed(self, ctx: SessionContext, before: SessionConfig, after: SessionConfig) -> None:
        if self.failing == "session_config_changed":
            raise ValueError("oh")


@pytest.mark.parametrize("failing", ["", "session_restored", "session_config_changed"])
async def test_loading_a_session_and_changing_how_it_runs_are_told_with_the_turn_that_does(
    place: Place, failing: str
) -> None:
    kept, agent = Kept(), agent_calling("add", {"n": 1}, tools=[add], plugins=[Settling("kind", failing)])
    async with place.runtime(agent, trace=kept) as runtime:
        await (await runtime.session("s")).run("go")
        assert kept.lines == [], "it was neither loaded from disk nor changed"
        result = await (await runtime.session("s", options={"busy": "stern"})).run("again")

    assert result.outcome == Finished("done")
    assert kept.lines == [*both("session_restored"), *both("session_config_changed")]
    assert set(kept.context) == {("s", "s.2")}
    assert [issue.code for issue in result.issues] == ["lifecycle_hook_failed"] * bool(failing)


async def test_loading_a_session_for_somebody_who_reads_it_is_told_without_a_turn(place: Place) -> None:
    kept, agent = Kept(), agent_calling("add", {"n": 1}, tools=[add], plugins=[Settling("kind")])
    async with place.runtime(agent) as runtime:
        await (await runtime.session("s")).run("go")
    async with place.runtime(agent, trace=kept) as runtime:
        await (await runtime.session("s")).tools.list()

    assert (kept.lines, set(kept.context)) == (both("session_restored"), {("s", None)})


async def test_trace_that_breaks_harms_no_turn(place: Place) -> None:
    class Broken:
        def write(self, name: str, payload: Mapping[str, Any]) -> None:
            raise OSError("no disk")

    agent = agent_calling("add", {"n": 1}, tools=[add], plugins=[Busy()])
    async with place.runtime(agent, trace=Broken()) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == Finished("done")
