"""Monitors: lines of a command reach their session, none twice and none left out, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Agent, ModelRequest, Runtime, ToolContext, tool
from perdure.errors import Conflict, InvalidCommand
from perdure.model.command import CommandSettings
from perdure.model.monitor import MonitorSpec, MonitorStatus, read_cursor
from perdure.model.process import Cancelled, Failure, Success
from perdure.sessions.session import Session
from perdure.testing import FunctionModel
from tests.commands import monitored
from tests.kit import SOON, agent_calling, until

SPEC = MonitorSpec("m", ["sh", "-c", "echo one; echo two"], batch=0.02)


class Ear:
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.agent = Agent(FunctionModel(self.answer), name="ear")

    def answer(self, request: ModelRequest) -> str:
        self.heard.append(request.messages[-1].text)
        return "I see."

    @property
    def lines(self) -> list[str]:
        return lines_of(self.heard)


def lines_of(heard: list[str]) -> list[str]:
    """The lines of a monitor that were told, in order."""
    return [line[2:] for text in heard for line in text.split("\n") if re.match("> (?!.*lines?[:,])", line)]


@pytest.fixture
def ear() -> Ear:
    return Ear()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "agent.db"


def sh(script: str, **more: Any) -> MonitorSpec:
    return replace(SPEC, command=("sh", "-c", script), **more)


def gated(gate: Path) -> str:
    """A script that waits for a file."""
    return f"until [ -e '{gate}' ]; do sleep 0.02; done"


async def status(session: Session[Any]) -> MonitorStatus:
    (found,) = (await session.monitors()).monitors
    return found


async def until_status(session: Session[Any], met: Callable[[MonitorStatus], bool]) -> None:
    async def look() -> bool:
        return met(await status(session))

    await until(look)


async def test_lines_of_stdout_wake_the_session_and_its_end_is_told(ear: Ear, store: Path) -> None:
    async with Runtime(store, agents=[ear.agent]) as runtime:
        session = await runtime.session("chat")
        handle = await session.monitor(sh("echo one; echo; echo two; exit 3"))
        outcome = await handle.outcome(SOON)
        assert await runtime.wait_idle(SOON)

        assert isinstance(outcome, Success)
        assert outcome.value == {"status": "exited", "exit_code": 3, "signal": None, "lines": 2}
        assert await status(session) == MonitorStatus("m", handle.id, "exited", False, 2, "two", None, 3)
    assert ear.lines == ["one", "two"]
    assert '[process "monitor m" completed]' in ear.heard[-1]


async def test_a_line_for_a_shell_is_run_by_a_login_shell(ear: Ear, store: Path, tmp_path: Path) -> None:
    async with Runtime(store, agents=[ear.agent]) as runtime:
        session = await runtime.session("chat")
        spec = MonitorSpec("m", 'echo "$0 $FLAVOUR in $PWD"', cwd=str(tmp_path), env={"FLAVOUR": "plain"})
        await (await session.monitor(spec)).outcome(SOON)
        assert await runtime.wait_idle(SOON)

    assert re.fullmatch(rf"/bin/(ba)?sh plain in {re.escape(str(tmp_path))}", ear.lines[0])


async def test_stderr_alone_wakes_nobody(ear: Ear, store: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with Runtime(store, agents=[ear.agent]) as runtime:
        session = await runtime.session("chat")
        handle = await session.monitor(sh(f"echo noise >&2; {gated(go)}"))
        await until_status(session, lambda found: found.event_count == 1)
        assert await runtime.processes.wakes() == []
        assert ear.heard == []
        go.touch()
        await handle.outcome(SOON)

        events = [event async for event in handle.events() if event.type == "output.lines"]
        assert [event.payload["stderr"] for event in events] == ["1 line of stderr:\nnoise"]


async def test_a_flood_is_told_in_few_turns_with_the_newest_lines_and_a_count(ear: Ear, store: Path) -> None:
    async with Runtime(store, agents=[ear.agent]) as runtime:
        session = await runtime.session("chat")
        handle = await session.monitor(sh("seq 1 20000", batch=0.2))
        await handle.outcome(SOON)
        assert await runtime.wait_idle(SOON)
        events = [event.payload async for event in handle.events() if event.type == "output.lines"]
        found = await status(session)

    assert sum(each["count"] for each in events) == 20_000 == found.event_count
    assert len(ear.heard) <= len(events) + 1
    assert ear.lines[-1] == "20000"
    assert max(text.count("\n> ") for text in ear.heard) <= 2 * 128 + 2


async def test_one_that_notifies_waits_for_the_next_turn(ear: Ear, store: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with Runtime(store, agents=[ear.agent]) as runtime:
        session = await runtime.session("chat")
        await session.run("hello")
        handle = await session.monitor(sh(f"echo one; {gated(go)}; echo two", wake="notify"))
        await until_status(session, lambda found: found.event_count == 1)
        await until(lambda: _nothing_waits(runtime))
        assert ear.heard == ["hello"]
        go.touch()
        await handle.outcome(SOON)
        await session.run("what is new?")

    assert len(ear.heard) == 2


async def _nothing_waits(runtime: Runtime) -> bool:
    return not await runtime.processes.wakes()


async def test_limit_of_one_that_is_not_persistent_ends_it_as_failed(ear: Ear, store: Path) -> None:
    async with Runtime(store, agents=[ear.agent]) as runtime:
        session = await runtime.session("chat")
        handle = await session.monitor(sh("sleep 1000", timeout=0.1))
        outcome = await handle.outcome(SOON)

        assert isinstance(outcome, Failure)
        assert (outcome.code, outcome.message) == ("timed_out", "it ran for its limit of 0.1 seconds and was ended")
        assert (await status(session)).state == "failed"


async def test_stopping_ends_the_command_and_frees_the_name(ear: Ear, store: Path) -> None:
    async with Runtime(store, agents=[ear.agent]) as runtime:
        session = await runtime.session("chat")
        handle = await session.monitor(sh("echo up; sleep 1000", persistent=True))
        await until_status(session, lambda found: found.event_count == 1)
        assert await session.monitor(sh("echo up; sleep 1000", persistent=True)) == handle
        with pytest.raises(Conflict, match="stop that first"):
            await session.monitor(SPEC)
        await handle.cancel("enough")
        outcome = await handle.outcome(SOON)

        assert isinstance(outcome, Cancelled)
        assert not outcome.unknown
        (command,) = await runtime.processes.list(kind="command")
        assert command.status == "cancelled"
        assert (await status(session)).state == "stopped"
        again = await session.monitor(SPEC)
        assert (handle.id, again.id) == ("chat.monitor.m", "chat.monitor.m.2")
        await again.outcome(SOON)


async def test_deleting_the_session_ends_its_monitors(ear: Ear, store: Path) -> None:
    async with Runtime(store, agents=[ear.agent]) as runtime:
        session = await runtime.session("chat")
        await session.run("hello")
        handle = await session.monitor(sh("echo up; sleep 1000", persistent=True, wake="none"))
        await until_status(session, lambda found: found.event_count == 1)
        await runtime.sessions.delete("chat")

        assert isinstance(await handle.outcome(SOON), Cancelled)


async def test_deleting_the_session_ends_a_monitor_that_its_tool_started(store: Path) -> None:
    @tool
    async def watch(ctx: ToolContext) -> str:
        spec = sh("echo up; sleep 1000", persistent=True)
        return (await ctx.host.start_process(spec, key="log")).id

    async with Runtime(store, agents=[agent_calling("watch", {}, tools=[watch])]) as runtime:
        session = await runtime.session("chat")
        result = await session.run("watch the log")
        await until_status(session, lambda found: found.event_count == 1)
        await runtime.sessions.delete("chat")

        assert isinstance(await runtime.handle(result.tool_calls[0].value).outcome(SOON), Cancelled)


async def test_wakes_of_one_monitor_are_no_deeper_than_each_other(ear: Ear, store: Path, tmp_path: Path) -> None:
    agent = Agent(FunctionModel(ear.answer), name="ear", wake_depth=2)
    async with Runtime(store, agents=[agent]) as runtime:
        session = await runtime.session("chat")
        script = "; ".join(f"echo {n}; {gated(tmp_path / str(n))}" for n in range(4))
        handle = await session.monitor(sh(script))
        for n in range(4):
            await until_status(session, functools.partial(_has_told, n + 1))
            await until(lambda: _nothing_waits(runtime))
            (tmp_path / str(n)).touch()
        await handle.outcome(SOON)
        assert await runtime.wait_idle(SOON)

    assert ear.lines == ["0", "1", "2", "3"]


def _has_told(count: int, found: MonitorStatus) -> bool:
    return found.event_count == count


async def test_lost_command_is_begun_again_if_the_monitor_says_so(ear: Ear, store: Path, tmp_path: Path) -> None:
    counter = tmp_path / "runs"
    script = f"echo run >> '{counter}'; echo up; if [ $(wc -l < '{counter}') = 1 ]; then sleep 1000; fi"
    async with Runtime(store, agents=[ear.agent]) as runtime:
        session = await runtime.session("chat")
        handle = await session.monitor(sh(script, persistent=True, restart_on_restore=True))
        await until_status(session, lambda found: found.event_count == 1)
        (row,) = await runtime.processes.list(kind="command")
        os.kill(row.record.external_ref["shim"], signal.SIGKILL)
        assert isinstance(await handle.outcome(SOON), Success)
        found = await status(session)

    assert (found.state, found.event_count, found.restarts) == ("exited", 2, 1)
    assert found.last_error is not None
    assert "begins again" in found.last_error


async def test_a_runtime_with_other_limits_in_another_folder_goes_on_with_it(
    ear: Ear, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a front end that outlives the worker: the command runs, and is not asked for anew."""
    go = tmp_path / "go"
    (tmp_path / "worker" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "worker")
    async with Runtime(store, agents=[ear.agent], commands=CommandSettings(seconds=3600)) as runtime:
        session = await runtime.session("chat")
        handle = await session.monitor(sh(f"echo one; {gated(go)}; echo two", persistent=True, cwd="here"))
        await until_status(session, lambda found: found.event_count == 1)

    monkeypatch.chdir(tmp_path)
    async with Runtime(store, agents=[ear.agent]) as runtime:
        go.touch()
        assert isinstance(await runtime.handle(handle.id).outcome(SOON), Success)
        assert await runtime.wait_idle(SOON)
        assert [row.id for row in await runtime.processes.list(kind="command")] == [f"{handle.id}.1"]

    assert ear.lines == ["one", "two"]


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, command=""),
        replace(SPEC, command=()),
        replace(SPEC, cwd="/nowhere"),
        replace(SPEC, command=["/no/p"]),
    ],
)
async def test_what_cannot_be_run_is_refused_before_anything_begins(ear: Ear, store: Path, spec: MonitorSpec) -> None:
    async with Runtime(store, agents=[ear.agent]) as runtime:
        session = await runtime.session("chat")
        with pytest.raises(InvalidCommand):
            await session.monitor(spec)

        assert await runtime.processes.list() == []


# ---------------------------------------------------------------------- killed


@pytest.mark.gate
@pytest.mark.kill
async def test_killed_again_and_again_its_program_loses_and_repeats_no_line(store: Path, tmp_path: Path) -> None:
    """The command goes on while its program is dead. Few lines at a time, so that none are left out of a flood.

    The program dies when lines are written and not told, when they are told, and in the turn that they make.
    """
    steps = [f"{gated(tmp_path / f'go{n}')}; seq {25 * n + 1} {25 * n + 25}" for n in range(5)]
    script = "; ".join([*steps, gated(tmp_path / "end")])
    for n, reached in enumerate([_written, _told, _written, _turned, _told]):
        program = [sys.executable, monitored.__file__, str(store), script]
        with subprocess.Popen(program, stdout=subprocess.PIPE) as child:
            try:
                assert child.stdout is not None
                assert await asyncio.to_thread(child.stdout.readline) == b"ready\n"
                (tmp_path / f"go{n}").touch()
                await reached(store, 25 * n + 1)
            finally:
                child.kill()
    async with Runtime(store, agents=[monitored.agent()]) as runtime:
        session = await runtime.session("chat")
        (tmp_path / "end").touch()
        assert isinstance(await runtime.handle("chat.monitor.counter").outcome(SOON), Success)
        assert await runtime.wait_idle(SOON)
        told = lines_of([message.text for message in await session.history() if message.role == "user"])
        (command,) = await runtime.processes.list(kind="command")

    assert told == [str(n) for n in range(1, 126)]
    assert command.takeovers == 0


async def _written(store: Path, lines: int) -> None:
    """The command has written so many lines."""
    files = Path(f"{store}-jobs").glob
    await until(lambda: any(file.read_bytes().count(b"\n") >= lines for file in files("*/stdout")))


async def _told(store: Path, lines: int) -> None:
    """So many lines are told: in an event, with its wake."""
    async with Runtime(store, recover=False) as looking:
        (row,) = await looking.processes.list(kind="monitor")

        async def look() -> bool:
            return read_cursor((await looking.processes.get(row.id)).record.progress).lines >= lines

        await until(look)


async def _turned(store: Path, lines: int) -> None:
    """A turn that tells one of these lines has begun or is committed."""
    await _told(store, lines)
    async with Runtime(store, recover=False) as looking:
        await until(lambda: _nothing_waits(looking))
