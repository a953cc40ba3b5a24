"""Monitors that plugins offer, and monitors as plugins, tools and operations ask for them."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Agent, Plugin, Runtime, ToolContext, tool
from perdure.errors import (
    CommandsUnavailable,
    Conflict,
    InvalidInput,
    PerdureError,
    PluginError,
    ProcessRefused,
    UnknownMonitor,
    UnknownSession,
)
from perdure.model.monitor import LINES, MonitorSnapshot, MonitorSpec, MonitorStatus, MonitorUpdate, MonitorUpdates
from perdure.model.outcome import PluginAborted
from perdure.plugins import CommandContext, QueryContext, SessionContext, command, query
from perdure.ports.services import ToolHost
from perdure.processes.handle import ProcessAsk, ProcessPolicy
from perdure.sessions.session import Session
from perdure.stores.memory import MemoryStore
from perdure.testing import FunctionModel
from tests.commands import plugged
from tests.commands.plugged import Watching, starting
from tests.kit import SOON, agent_calling, crash, until, untyped

MANUAL = MonitorSpec("log", ["sh", "-c", "echo up; exec sleep 1000"], persistent=True, wake="none", batch=0.02)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "agent.db"


def counted(runs: Path, then: str = "exec sleep 1000") -> MonitorSpec:
    """Starts with its session, and leaves a line in a file each time that it runs."""
    return starting(f"echo run >> '{runs}'; echo up; {then}")


async def status(session: Session[Any]) -> MonitorStatus:
    (found,) = (await session.monitors()).monitors
    return found


async def until_status(session: Session[Any], met: Callable[[MonitorStatus], bool]) -> None:
    async def look() -> bool:
        return met(await status(session))

    await until(look)


async def stop(session: Session[Any]) -> None:
    """Stop the monitor of a session, and wait for that: no test leaves a process behind."""
    await (await session.monitor((await status(session)).id)).cancel("enough")
    await until_status(session, lambda found: not found.armed)


# ---------------------------------------------------------------------- what plugins offer


async def test_manual_monitor_of_a_plugin_is_idle_until_it_is_started_by_its_id(store: Path) -> None:
    async with Runtime(store, agents=[plugged.agent(MANUAL)]) as runtime:
        session = await runtime.session("chat")
        await session.run("hello")

        assert await session.monitors() == MonitorSnapshot(0, 0, (MonitorStatus("ops:log", "", "idle", False),))
        handle = await session.monitor("ops:log")
        assert handle.id == "chat.monitor.ops:log"
        await until_status(session, lambda found: found.last_event == "up")
        assert await session.monitor("ops:log") == handle
        await stop(session)


async def test_armed_monitor_starts_with_the_first_turn_and_not_again_when_it_has_ended(
    store: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    for _ in range(2):
        async with Runtime(store, agents=[plugged.agent(counted(runs, "true"))]) as runtime:
            session = await runtime.session("chat")
            assert (await session.run("hello")).issues == []
            await session.run("again")
            await until_status(session, lambda found: found.state == "exited")

    assert runs.read_text() == "run\n"


async def test_two_runtimes_start_one_armed_monitor_in_all(store: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    agent = plugged.agent(counted(runs))
    async with Runtime(store, agents=[agent]) as one, Runtime(store, agents=[agent]) as other:
        both = [await one.session("chat"), await other.session("chat")]
        await asyncio.gather(*[each.run("hello") for each in both])
        await until_status(both[0], lambda found: found.last_event == "up")

        assert [row.id for row in await one.processes.list(kind="monitor")] == ["chat.monitor.ops:log"]
        assert runs.read_text() == "run\n"
        await stop(both[0])


async def test_every_session_has_its_own(store: Path, tmp_path: Path) -> None:
    async with Runtime(store, agents=[plugged.agent(counted(tmp_path / "runs", "true"))]) as runtime:
        for name in ("a", "b"):
            session = await runtime.session(name)
            await session.run("hello")
            await until_status(session, lambda found: found.state == "exited")

    assert (tmp_path / "runs").read_text() == "run\nrun\n"


async def test_reading_the_session_first_does_not_keep_its_first_turn_from_starting_it(
    store: Path, tmp_path: Path
) -> None:
    async with Runtime(store, agents=[plugged.agent(counted(tmp_path / "runs", "true"))]) as runtime:
        session = await runtime.session("chat")
        assert (await status(session)).process_id == ""
        await session.tools.list()
        await session.run("hello")
        await until_status(session, lambda found: found.state == "exited")


async def test_changed_spec_counts_from_the_next_start(store: Path) -> None:
    async with Runtime(store, agents=[plugged.agent(replace(MANUAL, arm_on="session_start"))]) as runtime:
        session = await runtime.session("chat")
        await session.run("hello")
        await until_status(session, lambda found: found.last_event == "up")
    changed = replace(MANUAL, command=["sh", "-c", "echo changed"], arm_on="session_start")
    async with Runtime(store, agents=[plugged.agent(changed)]) as runtime:
        session = await runtime.session("chat")
        await session.run("hello again")
        assert (await status(session)).state == "running"
        with pytest.raises(Conflict, match="stop that first"):
            await session.monitor("ops:log")
        await runtime.handle("chat.monitor.ops:log").cancel("enough")
        await until_status(session, lambda found: found.state == "stopped")
        await (await session.monitor("ops:log")).outcome(SOON)

        assert (await status(session)).last_event == "changed"


async def test_armed_monitor_that_cannot_start_is_an_issue_of_the_turn(store: Path) -> None:
    wrong = replace(MANUAL, command=["/no/program"], arm_on="session_start")
    async with Runtime(store, agents=[plugged.agent(wrong)]) as runtime:
        result = await (await runtime.session("chat")).run("hello")

        (issue,) = result.issues
        assert (result.text, issue.code, issue.plugin) == ("I see.", "monitor_not_started", "ops")
        assert "/no/program" in issue.message
        assert await runtime.processes.list() == []


class Raises(Watching):
    def monitors(self, ctx: SessionContext) -> Iterable[MonitorSpec]:
        raise RuntimeError("no idea")


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (Watching(MANUAL, MANUAL), "two monitors have the id 'ops:log'"),
        (Watching(untyped("make watch")), "is no monitor"),
        (Watching(replace(MANUAL, arm_on=untyped("now"))), "arm_on='now' is not usable"),
        (Watching(replace(MANUAL, id="x" * 99)), "1 to 100 printable characters"),
        (Raises(), "no idea"),
    ],
)
async def test_plugin_that_offers_what_is_no_monitor_refuses_the_session(
    store: Path, plugin: Plugin, words: str
) -> None:
    agent = Agent(FunctionModel(lambda request: "I see."), name="ear", plugins=[plugin])
    async with Runtime(store, agents=[agent]) as runtime:
        session = await runtime.session("chat")
        outcome = (await session.run("hello")).outcome

        assert isinstance(outcome, PluginAborted)
        assert words in outcome.message
        with pytest.raises(PluginError, match="monitors"):
            await session.monitors()


@pytest.mark.gate
@pytest.mark.kill
async def test_killed_again_and_again_its_program_starts_one_armed_monitor_in_all(store: Path, tmp_path: Path) -> None:
    """The program dies as soon as the monitor is registered, when its command runs, and after the turn."""
    runs, agent = tmp_path / "runs", plugged.agent(counted(tmp_path / "runs"))
    for reached in (_registered, _ran, _answered):
        program = [sys.executable, plugged.__file__, str(store), str(agent_script(runs))]
        with subprocess.Popen(program, stdout=subprocess.PIPE) as child:
            try:
                await reached(child, store, runs)
            finally:
                child.kill()
    async with Runtime(store, agents=[agent]) as runtime:
        session = await runtime.session("chat")
        await session.run("hello")
        await until_status(session, lambda found: found.last_event == "up")
        assert [row.id for row in await runtime.processes.list(kind="monitor")] == ["chat.monitor.ops:log"]
        await stop(session)

    assert runs.read_text() == "run\n"


def agent_script(runs: Path) -> str:
    return str(counted(runs).command[-1])


async def _registered(child: subprocess.Popen[bytes], store: Path, runs: Path) -> None:
    await until(store.exists)
    async with Runtime(store, recover=False) as looking:

        async def look() -> bool:
            return bool(await looking.processes.list(kind="monitor"))

        await until(look)


async def _ran(child: subprocess.Popen[bytes], store: Path, runs: Path) -> None:
    await until(runs.exists)


async def _answered(child: subprocess.Popen[bytes], store: Path, runs: Path) -> None:
    assert child.stdout is not None
    assert await asyncio.to_thread(child.stdout.readline) == b"ready\n"


# ---------------------------------------------------------------------- the services


@tool
async def start(ctx: ToolContext[None]) -> str:
    return (await ctx.host.start_monitor(MANUAL)).process_id


async def test_tool_starts_a_monitor_that_ends_with_the_session_and_not_with_the_turn(store: Path) -> None:
    async with Runtime(store, agents=[agent_calling("start", tools=[start])]) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await until_status(session, lambda found: found.last_event == "up")
        row = await runtime.processes.get("chat.monitor.log")
        await runtime.sessions.delete("chat")
        await runtime.handle(row.id).outcome(SOON)

        assert row.registration.cause is not None
        assert row.registration.cause.type == "tool_call"


async def test_call_that_runs_again_after_a_crash_does_not_begin_its_monitor_again(store: Path, tmp_path: Path) -> None:
    """Its monitor has ended meanwhile, so that its name is free: only the call tells that it is the same."""
    runs, started, hold = tmp_path / "runs", asyncio.Event(), asyncio.Event()
    spec = replace(MANUAL, command=["sh", "-c", f"echo run >> '{runs}'"])

    @tool(recovery="rerun")
    async def watch(ctx: ToolContext[None]) -> str:
        found = await ctx.host.start_monitor(spec)
        started.set()
        await hold.wait()
        return found.process_id

    agent = agent_calling("watch", tools=[watch])
    runtime = await Runtime(store, agents=[agent]).__aenter__()
    session = await runtime.session("chat")
    receipt = await session.send("go")
    await asyncio.wait_for(started.wait(), SOON)
    await until_status(session, lambda found: found.state == "exited")
    await crash(runtime)
    hold.set()
    async with Runtime(store, agents=[agent]) as again:
        session = await again.session("chat")
        await session.result(receipt.turn_id)
        assert len(await again.processes.list(kind="monitor")) == 1

    assert runs.read_text() == "run\n"


class Asking:
    """An agent with a tool that asks the services for what a test wishes."""

    def __init__(self, *plugins: Plugin) -> None:
        self.agent = agent_calling("ask", tools=[self.tool()], plugins=list(plugins))
        self.wish: Callable[[ToolHost], Awaitable[Any]] | None = None
        self.answer: Any = None

    def tool(self) -> Any:
        @tool
        async def ask(ctx: ToolContext[None]) -> None:
            assert self.wish is not None
            try:
                self.answer = await self.wish(ctx.host)
            except PerdureError as error:
                self.answer = error

        return ask

    async def ask(self, session: Session[Any], wish: Callable[[ToolHost], Awaitable[Any]]) -> Any:
        self.wish = wish
        await session.run("go")
        return self.answer


async def test_services_start_show_and_stop_a_monitor_that_a_plugin_offers(store: Path) -> None:
    asking = Asking(Watching(MANUAL))
    async with Runtime(store, agents=[asking.agent]) as runtime:
        session = await runtime.session("chat")
        idle = MonitorStatus("ops:log", "", "idle", False)
        assert await asking.ask(session, lambda host: host.stop_monitor("ops:log")) == idle
        assert await asking.ask(session, lambda host: host.monitor_snapshot()) == MonitorSnapshot(0, 0, (idle,))

        begun = await asking.ask(session, lambda host: host.start_monitor("ops:log"))
        assert (begun.id, begun.process_id, begun.armed) == ("ops:log", "chat.monitor.ops:log", True)
        await until_status(session, lambda found: found.last_event == "up")
        shown = await asking.ask(session, lambda host: host.monitor_snapshot())
        assert (shown.active_count, shown.monitors[0].state) == (1, "running")

        await asking.ask(session, lambda host: host.stop_monitor("ops:log", "enough"))
        await until_status(session, lambda found: found.state == "stopped")
        again = await asking.ask(session, lambda host: host.stop_monitor("ops:log"))
        assert (again.state, again.armed) == ("stopped", False)


async def test_updates_are_taken_once_each_by_who_keeps_the_revision(store: Path, tmp_path: Path) -> None:
    asking = Asking()
    specs = {
        name: MonitorSpec(
            name,
            ["sh", "-c", f"echo {name}1; until [ -e '{tmp_path / name}' ]; do sleep 0.02; done; echo {name}2"],
            wake="none",
            batch=0.02,
        )
        for name in ("a", "b")
    }
    async with Runtime(store, agents=[asking.agent]) as runtime:
        session = await runtime.session("chat")
        handles = [await session.monitor(specs["a"])]
        await until_lines(session, 1)
        handles.append(await session.monitor(specs["b"]))
        await until_lines(session, 2)
        first = await asking.ask(session, lambda host: host.take_monitor_updates())
        seen = await session.monitors()
        nothing = await asking.ask(session, lambda host: host.take_monitor_updates(first.revision))
        (tmp_path / "b").touch()
        await handles[1].outcome(SOON)
        (tmp_path / "a").touch()
        await handles[0].outcome(SOON)
        second = await asking.ask(session, lambda host: host.take_monitor_updates(first.revision))
        since = await asking.ask(session, lambda host: host.take_monitor_updates(seen.revision))

    assert told(first) == [("a", "1 line:\na1"), ("b", "1 line:\nb1")]
    assert nothing == MonitorUpdates(first.revision, 2, ())
    assert told(second) == [("b", "1 line:\nb2"), ("a", "1 line:\na2")]
    assert since.events == second.events
    assert (first.active_count, second.active_count) == (2, 0)


async def until_lines(session: Session[Any], count: int) -> None:
    async def look() -> bool:
        return sum(each.event_count for each in (await session.monitors()).monitors) == count

    await until(look)


def told(updates: MonitorUpdates) -> list[tuple[str, str]]:
    return [(each.monitor_id, each.message) for each in updates.events]


async def test_many_updates_are_taken_in_pieces_with_none_left_out(store: Path) -> None:
    asking = Asking()
    async with Runtime(store, agents=[asking.agent]) as runtime:
        session = await runtime.session("chat")
        handle = await session.monitor(MANUAL)
        await until_status(session, lambda found: found.last_event == "up")
        for n in range(300):
            await runtime.processes.emit(
                handle.id, LINES, {"first": n + 2, "count": 0, "stderr": f"{n}", "stderr_count": 1}
            )
        pieces: list[MonitorUpdates] = []
        while not pieces or pieces[-1].events:
            after = pieces[-1].revision if pieces else 0
            pieces.append(await asking.ask(session, functools.partial(_take, after)))
        await stop_by(runtime, handle.id)

    assert [len(each.events) for each in pieces] == [128, 128, 45, 0]
    found = [each for piece in pieces for each in piece.events]
    assert [each.stderr for each in found] == ["", *map(str, range(300))]
    assert found[0] == MonitorUpdate(found[0].sequence, "log", "1 line:\nup", lines=1)
    assert found[1] == MonitorUpdate(found[1].sequence, "log", stderr="0", lines=1)


async def _take(after: int, host: ToolHost) -> MonitorUpdates:
    return await host.take_monitor_updates(after)


async def stop_by(runtime: Runtime, process_id: str) -> None:
    handle = runtime.handle(process_id)
    await handle.cancel("enough")
    await handle.outcome(SOON)


async def test_update_that_runs_a_turn_says_so(store: Path) -> None:
    asking = Asking()
    spec = MonitorSpec("log", ["sh", "-c", "echo up"], batch=0.02)
    async with Runtime(store, agents=[asking.agent]) as runtime:
        session = await runtime.session("chat")
        asking.wish = functools.partial(_take, 0)
        await (await session.monitor(spec)).outcome(SOON)
        assert await runtime.wait_idle(SOON)
        taken = await asking.ask(session, functools.partial(_take, 0))

    assert [each.wakes for each in taken.events] == [True]


@pytest.mark.parametrize(
    ("wish", "error"),
    [
        (lambda host: host.start_monitor("ops:none"), UnknownMonitor),
        (lambda host: host.stop_monitor("none"), UnknownMonitor),
        (lambda host: host.start_monitor(replace(MANUAL, command="")), InvalidInput),
        (lambda host: host.start_monitor(7), InvalidInput),
        (lambda host: host.take_monitor_updates(-1), InvalidInput),
        (lambda host: host.monitor_snapshot(session_id="nobody"), UnknownSession),
    ],
    ids=["start unknown", "stop unknown", "empty command", "no spec", "no revision", "other session"],
)
async def test_what_makes_no_sense_is_refused_before_anything_begins(
    store: Path, wish: Callable[[ToolHost], Awaitable[Any]], error: type[PerdureError]
) -> None:
    asking = Asking(Watching(MANUAL))
    async with Runtime(store, agents=[asking.agent]) as runtime:
        session = await runtime.session("chat")
        assert isinstance(await asking.ask(session, wish), error)
        assert await runtime.processes.list() == []


class NoFolders(MemoryStore):
    """A store that keeps no folders for commands."""

    jobs_folder = untyped(None)


async def test_where_no_command_can_run_a_monitor_is_refused_and_reading_works() -> None:
    asking = Asking()
    async with Runtime(NoFolders(), agents=[asking.agent]) as runtime:
        session = await runtime.session("chat")

        refused = await asking.ask(session, lambda host: host.start_monitor(MANUAL))
        assert isinstance(refused, CommandsUnavailable)
        assert await asking.ask(session, lambda host: host.monitor_snapshot()) == MonitorSnapshot(0, 0, ())


class NoMonitors(ProcessPolicy):
    def check(self, ask: ProcessAsk) -> None:
        raise ProcessRefused(ask.verb, ask.name, ask.session_id)


async def test_policy_of_the_host_may_refuse_what_tools_and_plugins_start(store: Path) -> None:
    asking = Asking(Watching(replace(MANUAL, arm_on="session_start")))
    async with Runtime(store, agents=[asking.agent], process_policy=NoMonitors()) as runtime:
        session = await runtime.session("chat")
        asking.wish = functools.partial(_take, 0)
        result = await session.run("go")
        refused = await asking.ask(session, lambda host: host.start_monitor("ops:log"))

        assert isinstance(refused, ProcessRefused)
        assert [(each.code, each.plugin) for each in result.issues] == [("monitor_not_started", "ops")]
        assert await runtime.processes.list() == []


class Reading(Plugin):
    id = "reading"

    @query()
    async def look(self, ctx: QueryContext) -> int:
        snapshot, updates = await ctx.host.monitor_snapshot(), await ctx.host.take_monitor_updates()
        return len(snapshot.monitors) + len(updates.events)

    @command()
    async def begin(self, ctx: CommandContext) -> str:
        return (await ctx.host.start_monitor(MANUAL)).process_id


async def test_command_starts_a_monitor_before_the_first_turn_and_a_query_reads_it(store: Path) -> None:
    agent = agent_calling("ask", tools=[Asking().tool()], plugins=[Reading()])
    async with Runtime(store, agents=[agent]) as runtime:
        session = await runtime.session("chat")
        process_id = (await session.call("reading.begin")).output
        await until_status(session, lambda found: found.last_event == "up")

        assert (await session.call("reading.look")).output == 2
        await stop_by(runtime, process_id)
