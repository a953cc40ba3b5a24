"""`ps`, `logs -f`, `cancel`, `signal` and `doctor` for commands that other OS processes began."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure import Agent, Runtime, ToolCall, ToolContext, tool
from perdure.cli.commands import command_end, notes_of
from perdure.cli.doctor import examine_processes
from perdure.cli.processes import progress_text
from perdure.commands.sandbox import IMPLEMENTATIONS, counts_processes, examine
from perdure.model.monitor import OutputCursor
from perdure.model.process import ProcessRecord, ProcessRow, Registration
from perdure.model.write import Register
from perdure.stores.sqlite import SqliteStore
from perdure.testing import ScriptedModel
from tests.cli.shell import command, shell, shell_json, start
from tests.kit import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="commands run on Linux")


def begun(store: Path, *argv: str, **options: Any) -> str:
    """Begin a command and leave: it goes on, and no Runtime watches it. Its id."""

    async def work() -> str:
        async with Runtime(store, agents=[Agent(ScriptedModel([]))]) as runtime:
            handle = await runtime.command(list(argv), key="c", **options)
            return handle.id

    return asyncio.run(work())


@pytest.fixture(autouse=True)
def nothing_left(store: Path) -> Iterator[None]:
    """Whatever still runs is ended by what the test ends it with, or here."""
    yield
    if store.exists():
        for row in _running(store):
            shell("cancel", row["id"], store=store)
        assert _running(store) == []


def _running(store: Path) -> list[Any]:
    return [row for row in shell_json("ps", store=store) if row["command"]["here"]]


def test_doctor_names_the_command_that_a_parked_turn_waits_for(store: Path) -> None:
    @tool
    async def serve(ctx: ToolContext) -> str:
        """Begin a server."""
        await ctx.command(["sleep", "1000"])
        return "it runs"

    async def work() -> None:
        model = ScriptedModel([[ToolCall(name="serve")], "I wait."])
        agent = Agent(model, name="helper", tools=[serve], wait_for_commands=900)
        async with Runtime(store, agents=[agent]) as runtime:
            await (await runtime.session("dev")).send("serve")
            await runtime.wait_idle()

    asyncio.run(work())
    (row,) = shell_json("ps", store=store)
    told = shell("doctor", store=store).stdout
    (turn,) = shell_json("doctor", store=store)["open_turns"]

    assert (turn["state"], turn["waits_for"]) == ("parked", [f"the end of {row['id']}"])
    assert f"the end of {row['id']}\n" in told


def test_ps_lists_commands_with_what_they_run_and_have_written(store: Path) -> None:
    name = begun(store, "sh", "-c", "echo hello; sleep 1000")
    job = next(Path(f"{store}-jobs").iterdir())
    asyncio.run(until(lambda: (job / "stdout").exists() and (job / "stdout").read_bytes()))

    (row,) = shell_json("ps", store=store)
    listed = shell("ps", store=store)

    assert row["command"] == {
        "host": socket.gethostname(),
        "here": True,
        "argv": ["sh", "-c", "echo hello; sleep 1000"],
        "pid": row["external_ref"]["pid"],
        "output_bytes": 6,
    }
    assert f"pid {row['command']['pid']}, 6 B" in listed.stdout
    assert "sh -c echo hello; sleep 1000" in listed.stdout
    assert name in listed.stdout


def test_ps_says_in_words_how_a_command_ended(store: Path) -> None:
    async def work() -> None:
        async with Runtime(store, agents=[]) as runtime:
            await (await runtime.command(["sh", "-c", "exit 2"])).result()

    asyncio.run(work())
    listed = shell("ps", "--all", store=store).stdout

    assert "exited 2, after" in listed
    assert "exit_code" not in listed


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"status": "exited", "exit_code": 0, "duration_ms": 61_000}, "exited 0, after 1 min"),
        ({"status": "exited", "exit_code": 1, "lines": 1}, "exited 1, 1 line"),
        ({"status": "signaled", "signal": "SIGTERM", "lines": 1200}, "ended by SIGTERM, 1,200 lines"),
        ({"status": "timed_out", "reason": "silence"}, "timed out: silence"),
        ({"status": "lost"}, "lost"),
        ({"status": "fine"}, ""),
        ([1, 2], ""),
        (None, ""),
    ],
)
def test_the_end_of_a_command_in_words(value: Any, words: str) -> None:
    assert command_end(value) == words


def test_the_progress_of_a_monitor_in_words() -> None:
    asked = Registration("chat.monitor.log", "monitor", "reattachable", "log", label="monitor log")
    told = msgspec.to_builtins(OutputCursor(stdout=8, lines=2, last="two"))
    row = ProcessRow(1, asked, ProcessRecord(progress=told))

    assert progress_text(row) == "2 lines, the last: two"
    assert (row.kind, row.name, row.label) == ("monitor", "log", "monitor log")


def test_logs_show_what_a_command_wrote_byte_by_byte(store: Path) -> None:
    name = begun(store, "sh", "-c", r"printf 'one\n\377\n'; echo two >&2; printf end")

    line, options = command("logs", "-f", name, "--stream", "stdout", store=store)
    followed = subprocess.run(line, capture_output=True, timeout=120, check=False, **options)

    assert (followed.returncode, followed.stdout) == (0, b"one\n\xff\nend")
    assert shell("logs", name, "--stream", "stderr", store=store).stdout == "two\n"
    lines = [
        json.loads(line)
        for line in shell("logs", name, "--stream", "stdout", "--json", store=store).stdout.splitlines()
    ]
    assert "".join(line["text"] for line in lines) == "one\n\ufffd\nend"
    assert lines[-1]["next"] == 9
    assert shell("logs", name, "--stream", "stdout", "--after", "6", store=store).stdout == "end"
    assert shell("logs", name, "--stream", "stdout", "--after", "10", store=store).exit_code == 2
    assert "process.created" in shell("logs", name, "--events", store=store).stdout


def test_logs_follow_a_command_to_its_end(store: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    name = begun(store, "sh", "-c", f"echo before; until [ -e '{go}' ]; do sleep 0.02; done; echo after")

    with start("logs", "--follow", name, store=store) as following:
        assert following.stdout is not None
        first = following.stdout.readline()
        go.touch()
        rest = following.stdout.read()
        following.wait(60)

    assert (first, rest, following.returncode) == ("before\n", "after\n", 0)


def test_a_command_that_no_runtime_watches_is_ended_by_cancel(store: Path) -> None:
    name = begun(store, "sleep", "1000")
    (row,) = shell_json("ps", store=store)

    cancelled = shell("cancel", name, "--reason", "enough", store=store)

    assert cancelled.exit_code == 0
    assert "no Runtime watched it: it was ended from here (killed)" in cancelled.stdout
    assert not os.path.exists(f"/proc/{row['command']['pid']}")
    (after,) = shell_json("ps", "--all", store=store)
    assert (after["state"], after["outcome"]["value"]["status"]) == ("cancelled", "killed")
    assert shell("cancel", name, store=store).exit_code == 1


def test_a_signal_is_written_to_the_stdin_of_a_command(store: Path) -> None:
    name = begun(store, "head", "-n", "1", stdin=True)

    assert shell("signal", name, "stdin", '{"text": "hello\\n"}', store=store).exit_code == 0

    assert shell("signal", name, "nonsense", store=store).exit_code != 0
    asyncio.run(_ended(store, name))
    assert shell("logs", name, store=store).stdout == "hello\n"


async def _ended(store: Path, name: str) -> None:
    async with Runtime(store) as runtime:
        await runtime.handle(name).outcome(60)


# ---------------------------------------------------------------------- doctor


def test_doctor_counts_commands_that_run_here(store: Path) -> None:
    begun(store, "sleep", "1000")

    found = shell_json("doctor", store=store)["commands"]

    assert (found["here"], found["elsewhere"], found["lost"], found["orphans"]) == (1, {}, 0, [])
    assert "commands: 1 here" in shell("doctor", store=store).stdout


def test_doctor_names_folders_in_which_something_runs_that_no_process_knows(store: Path) -> None:
    """As after a store was replaced by an older copy."""
    begun(store, "sleep", "1000")
    (job,) = Path(f"{store}-jobs").iterdir()
    known = (job / "lock").read_text()
    (job / "lock").write_text("gone")

    found = shell_json("doctor", store=store)
    (job / "lock").write_text(known)

    assert found["commands"]["orphans"] == [str(job)]
    assert [need["about"] for need in found["needs"] if "job folder" in need["problem"]] == [str(job)]


async def test_doctor_names_the_host_of_a_command_that_is_bound_to_another(store: Path) -> None:
    opened = SqliteStore(store)
    await opened.open()
    try:
        asked = Registration("far", "command", "reattachable", "make", "elsewhere.example", {"argv": ["make"]})
        await opened.write(Register(asked, 1, "w-dead"))
        health = await examine_processes(opened, {}, 10**12)
    finally:
        await opened.close()

    (need,) = health.needs
    assert need.about == "host elsewhere.example"
    assert need.problem == "1 command is bound to this host, and no Runtime there has them: far"
    assert health.commands.elsewhere == {"elsewhere.example": 1}


@pytest.mark.parametrize(
    ("cgroup", "container", "words"),
    [
        ("0::/system.slice/agents.service\n", False, ["KillMode=process"]),
        ("0::/user.slice/user-0.slice/session-1.scope\n", False, []),
        ("0::/user.slice/user@0.service\n", False, []),
        ("0::/\n", True, ["this is a container"]),
        ("", False, []),
    ],
)
def test_doctor_says_what_ends_commands_besides_us(cgroup: str, container: bool, words: list[str]) -> None:
    notes = notes_of(cgroup, container)

    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_doctor_names_what_confines_commands_in_a_line(store: Path) -> None:
    begun(store, "true")
    found = shell_json("doctor", store=store)["sandbox"]
    printed = " ".join(shell("doctor", store=store).stdout.split())
    chosen = next((how for how in IMPLEMENTATIONS if not examine(how).refused), None)
    uncounted = chosen is not None and not counts_processes(chosen)

    assert found["used"] == chosen
    assert ("a limit on processes is not enforced" in found["open"]) == uncounted
    assert (f"commands are confined by {chosen}" if chosen else "nothing confines commands here") in printed


def test_doctor_tells_what_confines_commands_here() -> None:
    found = shell("doctor", "--sandbox", "--json")
    told = json.loads(found.stdout)

    assert [each["name"] for each in told["sandboxes"]] == ["bubblewrap", "namespaces", "landlock"]
    assert found.exit_code == (1 if told["used"] is None else 0)
    for each in told["sandboxes"]:
        assert not each["usable"] or "NOT STOPPED" not in each["attacks"].values()
