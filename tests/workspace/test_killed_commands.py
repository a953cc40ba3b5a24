"""The OS process of a Runtime is killed before, in and after every tool for commands. What then happens is by hand."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from perdure import Runtime
from perdure.errors import SessionDeleted
from perdure.model.process import Cancelled
from tests.kit import until
from tests.workspace.commanding import CALLS, COMMAND, agent

pytestmark = pytest.mark.kill

ROOT = Path(__file__).parents[2]

ROWS: dict[tuple[str, str], tuple[int, str]] = {
    # what, where it is killed            repeated attempts of its last call, how the command is
    ("run", "before started 1.0"): (0, "exited"),
    ("run", "after started 1.0"): (1, "exited"),
    ("run", "before register"): (1, "exited"),
    ("run", "after register"): (1, "exited"),
    ("run", "before outcome"): (1, "exited"),
    ("run", "after outcome"): (1, "exited"),
    ("run", "before ended 1.0"): (1, "exited"),
    ("run", "after ended 1.0"): (0, "exited"),
    ("background", "after started 1.0"): (1, "running"),
    ("background", "after register"): (1, "running"),
    ("background", "before ended 1.0"): (1, "running"),
    ("background", "after ended 1.0"): (0, "running"),
    ("wait", "before started 2.0"): (0, "exited"),
    ("wait", "after started 2.0"): (1, "exited"),
    ("wait", "before ended 2.0"): (1, "exited"),
    ("wait", "after ended 2.0"): (0, "exited"),
    ("output", "after started 2.0"): (1, "matched"),
    ("output", "before ended 2.0"): (1, "matched"),
    ("write", "before started 2.0"): (0, "written"),
    ("write", "after started 2.0"): (1, "written"),
    ("write", "before signal"): (1, "written"),
    ("write", "after signal"): (1, "written"),
    ("write", "before ended 2.0"): (1, "written"),
    ("write", "after ended 2.0"): (0, "written"),
    ("cancel", "after started 2.0"): (1, "killed"),
    ("cancel", "before outcome"): (1, "killed"),
    ("cancel", "before ended 2.0"): (1, "killed"),
}


class Mortals:
    """Starts Runtimes that are killed."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def run(self, folder: Path, what: str, point: str) -> int:
        asked = {"store": str(folder / "a.db"), "work": str(folder / "work"), "what": what, "point": point}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        status: int = json.loads(self._server.stdout.readline())["status"]
        return status


@pytest.fixture(scope="module")
def mortals() -> Generator[Mortals]:
    program = [sys.executable, "-m", "tests.workspace.commanding"]
    server = subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Mortals(server)
    finally:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.close()
        server.wait()
        server.stdout.close()


@pytest.mark.parametrize(("what", "point"), ROWS)
async def test_killed_around_a_tool_nothing_is_done_twice(
    mortals: Mortals, tmp_path: Path, what: str, point: str
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    status = mortals.run(tmp_path, what, point)
    assert status == -signal.SIGKILL

    async with Runtime(tmp_path / "a.db", agents=[agent(str(work), what)]) as runtime:
        session = await runtime.session("s")
        result = await session.run("go", key="once")
        calls = result.tool_calls
        handle = runtime.handle(COMMAND)
        if what in ("background", "write"):
            await handle.signal("stdin", {"close": True})
        ended: Any = await handle.result()
        await runtime.wait_idle()

    repeated, how = ROWS[what, point]
    value = calls[-1].value
    assert [each.tool for each in calls] == [each.name for each in CALLS[what]]
    assert calls[-1].repeated == repeated
    assert (work / "ran").read_text() == "ran\n"
    match how:
        case "matched":
            assert (value["matched"], value["line"]) == (True, "out")
        case "written":
            assert (value["written"], ended.stdout) == (5, "once\n")
        case _:
            assert value["status"] == how
    if what == "run":
        assert (value["exit_code"], value["stdout"]) == (3, "out\n")


PORTS = {
    # where it is killed, repeated attempts of the call that waits for a port
    "before started 2.0": 0,
    "after started 2.0": 1,
    "before ended 2.0": 1,
    "after ended 2.0": 0,
}


@pytest.mark.parametrize("point", PORTS)
async def test_killed_around_the_wait_for_a_port_its_server_is_begun_once_and_found_open(
    mortals: Mortals, tmp_path: Path, point: str
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    status = mortals.run(tmp_path, f"port {port}", point)
    assert status == -signal.SIGKILL

    async with Runtime(tmp_path / "a.db", agents=[agent(str(work), f"port {port}")]) as runtime:
        session = await runtime.session("s")
        result = await session.run("go", key="once")
        running = (await runtime.handle(COMMAND).record()).live
        await runtime.handle(COMMAND).cancel()
        ended: Any = await runtime.handle(COMMAND).result()
        await runtime.wait_idle()

    call = result.tool_calls[-1]
    assert (call.tool, call.repeated, call.value) == (
        "wait_port",
        PORTS[point],
        {"id": COMMAND, "port": port, "open": True},
    )
    assert (running, ended.status, ended.cleanup.verified) == (True, "killed", True)
    assert (work / "ran").read_text() == "ran\n"


APPROVED: dict[str, tuple[bool, int]] = {
    # where it is killed     whether a person is asked in the next Runtime, repeated attempts of the call
    "after question": (True, 0),
    "before answer": (True, 0),
    "after answer": (False, 0),
    "before started 1.0": (False, 0),
    "after started 1.0": (False, 1),
    "before register": (False, 1),
    "after register": (False, 1),
    "before ended 1.0": (False, 1),
    "after ended 1.0": (False, 0),
}


@pytest.mark.parametrize("point", APPROVED)
async def test_killed_around_a_command_that_a_person_approves_it_runs_once(
    mortals: Mortals, tmp_path: Path, point: str
) -> None:
    """No answer that was acknowledged is asked for again, and nothing runs without one."""
    work = tmp_path / "work"
    work.mkdir()
    status = mortals.run(tmp_path, "approved", point)
    assert status == -signal.SIGKILL
    asks, repeated = APPROVED[point]

    async with Runtime(tmp_path / "a.db", agents=[agent(str(work), "approved")]) as runtime:
        session = await runtime.session("s")
        result = await session.run("go", key="once")
        asked = await session.pending()
        ran_unasked = asks and (work / "ran").exists()
        for each in asked:
            await session.approve(each.call_id, by="ada")
        result = await session.result(result.turn_id)

    [call] = result.tool_calls
    assert [each.call_id for each in asked] == (["s.1.1.0"] if asks else [])
    assert not ran_unasked
    assert call.repeated == repeated
    assert (call.value["exit_code"], call.value["stdout"]) == (3, "out\n")
    assert (work / "ran").read_text() == "ran\n"


@pytest.mark.parametrize("what", ["held", "held output"])
async def test_a_session_that_is_deleted_while_its_tools_wait_ends_its_commands(tmp_path: Path, what: str) -> None:
    work = tmp_path / "work"
    work.mkdir()
    async with Runtime(tmp_path / "a.db", agents=[agent(str(work), what)]) as runtime:
        session = await runtime.session("s")
        receipt = await session.send("go")
        await until(lambda: (work / "ran").exists())
        await runtime.sessions.delete("s")
        outcome = await runtime.handle(COMMAND).outcome()
        with pytest.raises(SessionDeleted):
            await receipt.result()

    assert isinstance(outcome, Cancelled)
