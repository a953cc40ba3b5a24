"""`shutdown`: a plugin closes what it holds open when a Runtime ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Agent, Plugin, Runtime
from perdure.plugins import TurnEndContext
from perdure.plugins.hooks import SessionContext
from perdure.testing import ScriptedModel
from tests.kit import Place, TellingModel, crash


class Connection(Plugin):
    """Opens a connection when a turn needs it, and keeps it for the next one."""

    id = "connection"

    def __init__(self, log: list[str], name: str = "connection") -> None:
        self.id, self._log, self._open = name, log, False

    def turn_persisted(self, ctx: TurnEndContext) -> None:
        if not self._open:
            self._open = True
            self._log.append(f"{self.id} opened")
        self._log.append(f"{ctx.turn_id} persisted")

    async def shutdown(self) -> None:
        await asyncio.sleep(0)
        if self._open:
            self._open = False
            self._log.append(f"{self.id} closed")


async def test_plugin_is_shut_down_once_after_all_turns_though_two_agents_share_it(place: Place) -> None:
    log: list[str] = []
    shared = Connection(log)
    agents = [Agent(ScriptedModel(["x", "y"]), name=name, plugins=[shared]) for name in ("one", "two")]
    async with place.runtime(*agents) as runtime:
        await (await runtime.session("a", agent="one")).run("go")
        await (await runtime.session("b", agent="two")).run("go")

    assert log == ["connection opened", "a.1 persisted", "b.1 persisted", "connection closed"]


async def test_plugin_serves_the_next_runtime_after_it_was_shut_down(place: Place) -> None:
    log: list[str] = []
    agent = Agent(ScriptedModel(["x", "y"]), plugins=[Connection(log)])
    for _ in range(2):
        async with place.runtime(agent) as runtime:
            await (await runtime.session("a")).run("go")

    assert [line for line in log if "persisted" not in line] == ["connection opened", "connection closed"] * 2


async def test_plugin_is_shut_down_when_the_body_of_a_runtime_raises() -> None:
    log: list[str] = []

    async def host() -> None:
        async with Runtime("memory", agents=[Agent(ScriptedModel(["x"]), plugins=[Connection(log)])]) as runtime:
            await (await runtime.session("a")).run("go")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await host()

    assert log[-1] == "connection closed"


async def test_death_shuts_nothing_down_and_the_next_runtime_does_its_own(place: Place) -> None:
    log: list[str] = []
    model = TellingModel()
    first = await place.runtime(Agent(model, plugins=[Connection(log, "first")])).__aenter__()
    await (await first.session("a")).send("go")
    await model.next()
    await crash(first)
    model.say("x")
    async with place.runtime(Agent(model, plugins=[Connection(log, "second")])) as runtime:
        await (await runtime.session("a")).result("a.1")

    assert log == ["second opened", "a.1 persisted", "second closed"]


class Faulty(Plugin):
    id = "faulty"
    time_limit = 0.05

    def __init__(self, fault: str) -> None:
        self._fault = fault

    async def shutdown(self) -> None:
        if self._fault == "hangs":
            await asyncio.Event().wait()
        if self._fault == "exits":
            raise SystemExit(3)
        raise OSError("the line is dead")


@pytest.mark.parametrize("fault", ["raises", "hangs", "exits"])
async def test_fault_of_one_is_logged_and_keeps_nothing_open(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []
    agent = Agent(ScriptedModel(["x"]), plugins=[Faulty(fault), Connection(log)])
    runtime = await Runtime("memory", agents=[agent]).__aenter__()
    await (await runtime.session("a")).run("go")
    await runtime.__aexit__(None, None, None)

    assert log[-1] == "connection closed"
    assert "plugin 'faulty': shutdown: " in caplog.messages[-1]


class PerSession(Plugin):
    id = "per session"

    def __init__(self, log: list[str], name: str = "shared") -> None:
        self._log, self._name = log, name

    def for_session(self, ctx: SessionContext) -> PerSession:
        return PerSession(self._log, ctx.session_id)

    def shutdown(self) -> Any:
        self._log.append(self._name)


async def test_shared_object_is_shut_down_and_instances_of_sessions_are_not() -> None:
    log: list[str] = []
    async with Runtime("memory", agents=[Agent(ScriptedModel(["x"]), plugins=[PerSession(log)])]) as runtime:
        await (await runtime.session("a")).run("go")

    assert log == ["shared"]
