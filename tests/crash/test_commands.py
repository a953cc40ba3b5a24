"""The worker of a command, and of a plugin's monitor, is killed at every point of their lives.

The kills are real: what a command does goes on without its worker. How often the command ran is what it says itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from pathlib import Path

import pytest

from perdure import Agent
from perdure.model.monitor import LINES
from perdure.ports.store import JobFolders
from perdure.testing import FunctionModel
from perdure.testing.crash import Crash, ForkServer, Lab, Played
from tests.commands.plugged import agent, starting

EAR = Agent(FunctionModel(lambda request: "I see."), name="ear")


def marks(lab: Lab) -> str:
    """A file that the commands of all incarnations write to."""
    assert isinstance(lab.store, JobFolders)
    return str(Path(lab.store.jobs_folder()).with_name("marks"))


async def build(lab: Lab) -> None:
    """A command of a session, asked for again after every start, and what the session hears of its end."""
    async with lab.runtime([EAR]) as runtime:
        session = await runtime.session("chat")
        command = await session.command(["sh", "-c", 'echo ran >> "$0"; exec cat "$0"', marks(lab)], key="c")
        await command.result()
        await runtime.wait_idle()


async def tail(lab: Lab) -> None:
    """A monitor that a plugin starts with its session, and that is stopped when its first lines were told."""
    script = f'echo ran >> "{marks(lab)}"; cat "{marks(lab)}"; exec sleep 600'
    async with lab.runtime([agent(starting(script))]) as runtime:
        session = await runtime.session("chat")
        await session.run("hello", key="hello")
        handle = runtime.handle("chat.monitor.ops:log")
        async for event in handle.events(follow=True):
            if event.type == LINES:
                break
        await handle.cancel("enough")
        await handle.outcome()
        await runtime.wait_idle()


# Where it dies, and what is found at the end: how often a reference to its job was written (its name, who it is, and
# another name if nothing had begun under the first), and how many workers had it.
BUILD: dict[Crash, tuple[int, int]] = {
    Crash("configure", "before"): (2, 1),
    Crash("configure", "lost"): (2, 1),
    Crash("register chat.command.c", "before"): (2, 1),
    Crash("register chat.command.c", "lost"): (3, 2),
    Crash("advance chat.command.c: process.external_ref_set", "before"): (2, 2),
    Crash("advance chat.command.c: process.external_ref_set", "lost"): (2, 2),
    Crash("advance chat.command.c: ending", "before"): (2, 2),
    Crash("advance chat.command.c: ending", "lost"): (2, 1),
    Crash("deliver", "before"): (2, 1),
    Crash("deliver", "lost"): (2, 1),
    Crash("ask model 1.1", "before"): (2, 1),
    Crash("ask model 1.1", "lost"): (2, 1),
    Crash("chunk 1 of model 1.1", "before"): (2, 1),
    Crash("chunk 2 of model 1.1", "before"): (2, 1),
    Crash("commit 1", "before"): (2, 1),
    Crash("commit 1", "lost"): (2, 1),
    Crash("retire", "before"): (2, 1),
    Crash("retire", "lost"): (2, 1),
}

LOG = "chat.monitor.ops:log"

# The same of the command of a monitor, from where it is armed.
TAIL: dict[Crash, tuple[int, int]] = {
    Crash("accept queue", "before"): (2, 1),
    Crash("accept queue", "lost"): (2, 1),
    Crash(f"register {LOG}", "before"): (2, 1),
    Crash(f"register {LOG}", "lost"): (2, 1),
    Crash(f"advance {LOG}: starting", "before"): (2, 1),
    Crash(f"advance {LOG}: starting", "lost"): (2, 1),
    Crash(f"register {LOG}.1", "before"): (2, 1),
    Crash(f"register {LOG}.1", "lost"): (3, 2),
    Crash(f"advance {LOG}.1: process.external_ref_set", "before"): (2, 2),
    Crash(f"advance {LOG}.1: process.external_ref_set", "lost"): (2, 2),
    Crash(f"advance {LOG}: output.lines, process.progress", "before"): (2, 2),
    Crash(f"advance {LOG}: output.lines, process.progress", "lost"): (2, 2),
    Crash(f"cancel {LOG}", "before"): (2, 2),
    Crash(f"cancel {LOG}", "lost"): (2, 2),
    Crash(f"cancel {LOG}.1", "before"): (2, 2),
    Crash(f"cancel {LOG}.1", "lost"): (2, 2),
    Crash(f"advance {LOG}.1: ending", "before"): (2, 2),
    Crash(f"advance {LOG}.1: ending", "lost"): (2, 1),
    Crash(f"advance {LOG}: ending", "before"): (2, 1),
    Crash(f"advance {LOG}: ending", "lost"): (2, 1),
}
OF_THE_TURN = {"ask model 1.1", "chunk 1 of model 1.1", "chunk 2 of model 1.1", "commit 1", "retire"}
"""Points of the turn beside it, which have their rulings elsewhere."""


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(build) as helper:
        yield helper


def found(played: Played, process_id: str) -> tuple[int, int]:
    """What is left of a command that ran once: how often its reference was written, and how many workers had it."""
    command = played.ending.process(process_id)

    assert (played.problems, played.unreached) == ([], [])
    assert command is not None
    assert (command.outcome["value"]["stdout"], command.attempts, command.stuck) == ("ran\n", 1, None)
    return command.events.count("process.external_ref_set"), command.generation


@pytest.mark.kill
@pytest.mark.parametrize("crash", BUILD, ids=str)
def test_killed_here_a_command_runs_once_and_its_session_hears_of_it_once(forks: ForkServer, crash: Crash) -> None:
    played = forks.play([crash], build)

    assert found(played, "chat.command.c") == BUILD[crash]
    command, session = played.ending.process("chat.command.c"), played.ending.session("chat")
    assert command is not None
    assert (command.status, command.told) == ("completed", ["enqueued"])
    assert session is not None
    assert (session.turns, session.inbox, len(session.said)) == ({1: "finished"}, [], 2)


@pytest.mark.kill
@pytest.mark.parametrize("crash", TAIL, ids=str)
def test_killed_here_a_plugins_monitor_is_armed_once_and_tells_each_line_once(forks: ForkServer, crash: Crash) -> None:
    played = forks.play([crash], tail)

    assert found(played, f"{LOG}.1") == TAIL[crash]
    monitor, command = played.ending.process(LOG), played.ending.process(f"{LOG}.1")
    assert monitor is not None
    assert command is not None
    assert len(played.ending.processes) == 2
    assert (monitor.status, monitor.attempts, monitor.stuck) == ("cancelled", 1, None)
    assert monitor.events.count(LINES) == 1
    assert (command.status, command.outcome["value"]["status"]) == ("cancelled", "killed")


@pytest.mark.kill
@pytest.mark.parametrize(("scenario", "ruled"), [(build, BUILD), (tail, TAIL)], ids=["build", "tail"])
def test_every_point_has_a_ruling(
    forks: ForkServer, scenario: Callable[[Lab], Awaitable[None]], ruled: dict[Crash, tuple[int, int]]
) -> None:
    points = {point.name for point in forks.play([], scenario).traces[0]}

    assert points - {"beat"} - (OF_THE_TURN if scenario is tail else set()) == {crash.point for crash in ruled}
