"""Commands as hosts, sessions, tools and durable functions run them, with real processes."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from perdure import Agent, ProcessContext, ProcessHandle, Runtime, ToolContext, process, tool
from perdure.commands.job import Job
from perdure.errors import (
    CommandsUnavailable,
    InvalidCommand,
    InvalidInput,
    InvalidProcess,
    ProcessConflict,
    ProcessEnded,
    TooManyCommands,
    UndeclaredEvent,
    UnknownProcess,
)
from perdure.lifecycle.process import session_parent
from perdure.model.command import CommandResult, CommandSettings
from perdure.model.process import Abandoned, Cancelled, Registration, Success
from perdure.stores.blobs import FileBlobs
from perdure.testing import FunctionModel
from tests.commands.host import lives
from tests.kit import agent_calling, crash, until

LONG = ["sleep", "600"]


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with Runtime(tmp_path / "a.db", agents=[Agent(FunctionModel(lambda request: "done"))]) as made:
        yield made
        for row in await made.processes.list(kind="command", live=True):
            await made.processes.cancel(row.id)
            await made.processes.outcome(row.id)


def sh(line: str) -> list[str]:
    return ["sh", "-c", line]


async def reference(handle: ProcessHandle[Any]) -> dict[str, Any]:
    found: dict[str, Any] = (await handle.record()).record.external_ref
    return found


async def ended(runtime: Runtime, handle: ProcessHandle[Any]) -> CommandResult:
    result = await handle.result()
    assert isinstance(result, CommandResult)
    return result


# ---------------------------------------------------------------------- results


async def test_an_exit_code_is_a_result_and_no_failure_of_the_process(runtime: Runtime) -> None:
    handle = await runtime.command(sh("echo out; echo err >&2; exit 3"))

    result = await handle.result()

    assert (result.status, result.exit_code, result.signal, result.ok) == ("exited", 3, None, False)
    assert (result.stdout, result.stderr) == ("out\n", "err\n")
    assert (result.stdout_bytes, result.stdout_lines, result.truncated, result.drain) == (4, 1, False, "complete")
    assert result.stdout_sha256 == hashlib.sha256(b"out\n").hexdigest()
    assert (result.command_id, result.command) == (handle.id, "sh -c echo out; echo err >&2; exit 3")
    assert await handle.status() == "completed"


async def test_a_command_is_named_by_its_registration_and_identified_before_its_handle_is_there(
    runtime: Runtime,
) -> None:
    handle = await runtime.command(LONG)

    named, identified = [event.payload async for event in handle.events() if event.type == "process.external_ref_set"]
    first = [event.type async for event in handle.events()][:3]
    assert first == ["process.created", "process.first_started", "process.external_ref_set"]
    assert "pid" not in named
    assert identified == named | identified
    assert identified["pid"] > 0


async def test_a_handle_has_the_pid_of_a_program_that_runs(runtime: Runtime) -> None:
    handle = await runtime.command(LONG)

    found = await reference(handle)

    assert Path(f"/proc/{found['pid']}/comm").read_text() == "sleep\n"
    assert found["host"] == (await handle.record()).registration.definition


async def test_a_signal_from_outside_is_told_by_name_and_number(runtime: Runtime) -> None:
    result = await (await runtime.command(sh("kill -9 $$"))).result()

    assert (result.status, result.signal, result.signal_number, result.exit_code) == ("signaled", "SIGKILL", 9, None)


async def test_a_timeout_kills_and_says_which(runtime: Runtime) -> None:
    result = await (await runtime.command(LONG, timeout=0.2)).result()

    assert (result.status, result.timed_out) == ("timed_out", True)


async def test_over_its_limit_of_output_it_is_killed_with_the_limit_as_reason(runtime: Runtime) -> None:
    result = await (await runtime.command(["yes"], output_limit=100_000)).result()

    assert result.status == "killed"
    assert "output" in result.reason
    assert 0 < result.stdout_bytes <= 100_000


async def test_a_long_output_is_inline_with_head_and_tail_and_whole_as_an_artifact(runtime: Runtime) -> None:
    handle = await runtime.command(sh("seq 1 20000"))

    result = await handle.result()

    assert result.stdout_truncated
    assert result.stdout.startswith("1\n2\n")
    assert result.stdout.endswith("19999\n20000\n")
    assert (result.stdout_lines, result.artifact_error) == (20000, "")
    (kept,) = [event.payload async for event in handle.events() if event.type == "artifact"]
    whole = await runtime.store.blobs.get(kept["digest"])
    assert whole == b"".join([bytes(chunk) async for chunk in handle.output()])
    assert len(whole) == result.stdout_bytes


async def test_a_long_output_is_on_the_disk_once(runtime: Runtime) -> None:
    handle = await runtime.command(sh("seq 1 20000"))
    result = await handle.result()
    (kept,) = [event.payload async for event in handle.events() if event.type == "artifact"]
    assert isinstance(runtime.store.blobs, FileBlobs)

    assert os.path.samefile(runtime.store.blobs.path(kept["digest"]), result.stdout_path)
    assert not list(Path(result.stdout_path).parent.glob("*.shared"))


async def test_bytes_that_are_no_text_are_replaced_inline_and_exact_on_disk(runtime: Runtime) -> None:
    handle = await runtime.command(sh(r"printf 'a\377\000b'"))

    result = await handle.result()

    assert result.stdout.startswith("a\ufffd")
    assert result.stdout.endswith("b")
    assert await handle.output() == b"a\xff\x00b"


# ---------------------------------------------------------------------- output


async def test_output_is_read_by_offset_while_it_runs_and_after_it(runtime: Runtime) -> None:
    handle = await runtime.command(sh("echo one; read line; echo two"), stdin=True)

    first = await handle.output(follow=True)
    await handle.signal("stdin", {"text": "go\n"})
    await handle.result()

    assert (first, first.eof) == (b"one\n", False)
    rest = await handle.output(after=first.next)
    assert (rest, rest.next, rest.total, rest.eof) == (b"two\n", 8, 8, True)
    assert await handle.output(after=8) == b""
    with pytest.raises(InvalidInput, match="9"):
        await handle.output(after=9)


async def test_following_ends_with_the_command(runtime: Runtime) -> None:
    handle = await runtime.command(sh("for i in 1 2 3; do echo $i; done"))

    assert b"".join([bytes(chunk) async for chunk in handle.output(follow=True)]) == b"1\n2\n3\n"


async def test_only_what_has_output_can_be_read(runtime: Runtime) -> None:
    with pytest.raises(UnknownProcess):
        await runtime.handle("nobody").output()
    other, wrong = await runtime.processes.register("external-1"), cast(Any, "stdin")
    with pytest.raises(InvalidProcess, match="no output"):
        await other.output()
    with pytest.raises(InvalidInput, match="stdin"):
        await other.output(wrong)
    await runtime.processes.complete(other)


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("argv", "options", "words"),
    [
        ([], {}, "empty"),
        ([""], {}, "first argument is empty"),
        ("ls -l", {}, "a list of arguments"),
        (["ls", 5], {}, "argument 1"),
        (["ls", "a\0b"], {}, "NUL"),
        (["ls", "\ud800"], {}, "surrogates"),
        (["x"] * 1_000_000, {}, "at most"),
        (["echo", "x" * 200_000], {}, "131,071"),
        (["echo", *["x" * 100_000] * 20], {}, "bytes"),
        (["no-such-program-at-all"], {}, "no program"),
        (["./nothing-here"], {}, "no program"),
        (["ls"], {"cwd": "/no/such/folder"}, "working directory"),
        (["ls"], {"cwd": "/etc/hostname"}, "working directory"),
        (["ls"], {"timeout": -1}, "timeout"),
        (["ls"], {"timeout": float("nan")}, "timeout"),
        (["ls"], {"env": {"A=B": "1"}}, "no name"),
        (["ls"], {"env": {"API_KEY": "1"}}, "secret"),
        (["ls"], {"grants": ["NOT_SET_ANYWHERE"]}, "no value"),
        (["ls"], {"owner": "session"}, "not possible here"),
        (["ls"], {"pty": (0, 80)}, "pty"),
        (["ls"], {"strays": "adopt"}, "strays"),
        (["ls"], {"shell": True}, "no shell="),
    ],
)
async def test_what_cannot_be_run_is_refused_before_anything_is_written(
    runtime: Runtime, argv: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidCommand, match=words):
        await runtime.command(argv, **options)

    assert await runtime.processes.list(kind="command") == []


async def test_a_program_that_cannot_be_executed_after_all_is_a_result(runtime: Runtime, tmp_path: Path) -> None:
    program = tmp_path / "broken"
    program.write_bytes(b"\x7fELF but not really")
    program.chmod(0o700)

    result = await (await runtime.command([str(program)])).result()

    assert result.status == "spawn_failed"
    assert "ENOEXEC" in result.reason


# ---------------------------------------------------------------------- environment


async def test_a_command_inherits_little_and_what_is_granted_is_not_stored(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_PRIVATE_THING", "inherited?")
    monkeypatch.setenv("HOST_TOKEN", "of-the-host-9137")
    handle = await runtime.command(["env"], env={"MODE": "fast"}, grants={"API_KEY": "given-4711"})
    named = await runtime.command(["env"], grants=["HOST_TOKEN"])

    seen = (await handle.result()).stdout
    assert ("SOME_PRIVATE_THING" in seen, "MODE=fast" in seen, "API_KEY=given-4711" in seen) == (False, True, True)
    assert "HOST_TOKEN=of-the-host-9137" in (await named.result()).stdout
    row = await handle.record()
    assert row.registration.input["grants"] == ["API_KEY"]
    assert "given-4711" not in repr(row.registration)


# ---------------------------------------------------------------------- writing to it


async def test_stdin_is_written_in_order_and_closed(runtime: Runtime) -> None:
    handle = await runtime.command(["cat"], stdin=True)

    for n in range(20):
        await handle.signal("stdin", {"text": f"{n}\n"})
    await handle.signal("stdin", {"base64": "/w==", "close": True})

    await handle.result()
    assert await handle.output() == b"".join(b"%d\n" % n for n in range(20)) + b"\xff"


async def test_a_command_without_stdin_takes_no_bytes(runtime: Runtime) -> None:
    handle = await runtime.command(LONG)

    with pytest.raises(UndeclaredEvent):
        await handle.signal("stdin", {"text": "hello"})


async def test_a_signal_goes_to_the_whole_group_once_and_only_by_a_name_that_there_is(runtime: Runtime) -> None:
    handle = await runtime.command(sh('trap "echo told" USR1; echo ready; while :; do sleep 0.05; done'))
    await handle.output(follow=True)

    with pytest.raises(InvalidProcess, match="interrupt"):
        await handle.signal("interrupt", {"signal": "NOPE"})
    await handle.signal("interrupt", {"signal": "USR1"}, key="once")
    await handle.signal("interrupt", {"signal": "USR1"}, key="once")
    told = await handle.output(after=6, follow=True)
    await handle.signal("interrupt", {"signal": "KILL"})

    assert (told, (await handle.result()).signal) == (b"told\n", "SIGKILL")


async def test_bytes_after_the_end_are_refused(runtime: Runtime) -> None:
    handle = await runtime.command(["true"], stdin=True)
    await handle.result()

    with pytest.raises(ProcessEnded):
        await handle.signal("stdin", {"text": "too late"})


async def test_a_terminal_has_one_stream_and_can_be_resized_and_interrupted(runtime: Runtime) -> None:
    handle = await runtime.command(
        sh('trap "stty size; exit 7" INT; echo ready >&2; while :; do sleep 0.05; done'), pty=(10, 20)
    )
    assert "ready" in (await handle.output(follow=True)).text

    await handle.signal("resize", {"rows": 33, "columns": 44})
    await handle.signal("interrupt")

    result = await handle.result()
    assert (result.exit_code, result.stderr, result.pty) == (7, "", True)
    assert "33 44" in result.stdout


# ---------------------------------------------------------------------- cancelling


async def test_cancelling_kills_the_whole_tree_and_keeps_its_output(runtime: Runtime) -> None:
    handle = await runtime.command(sh("setsid sleep 600 & sleep 600 & echo begun; wait"))
    await handle.output(follow=True)

    assert await handle.cancel("enough") == "requested"
    result = await handle.result()

    assert (result.status, result.stdout, result.reason) == ("killed", "begun\n", "cancelled by host: enough")
    assert (result.cleanup.verified, result.cleanup.left) == (True, 0)
    assert result.cleanup.found >= 2
    assert await handle.status() == "cancelled"
    assert isinstance(await handle.outcome(), Cancelled)


async def test_a_cancel_after_the_end_changes_nothing(runtime: Runtime) -> None:
    handle = await runtime.command(["true"])
    before = await handle.result()

    assert await handle.cancel() == "ended"

    assert await handle.result() == before
    assert isinstance(await handle.outcome(), Success)


async def test_a_cancel_that_races_the_end_has_one_outcome(runtime: Runtime) -> None:
    handles = [await runtime.command(sh("exit 5")) for _ in range(8)]

    await asyncio.gather(*(each.cancel("race") for each in handles))

    for each in handles:
        result, outcome = await each.result(), await each.outcome()
        if result.status == "exited":
            assert (result.exit_code, type(outcome)) == (5, Success)
        else:
            assert (result.status, type(outcome)) == ("killed", Cancelled)


# ---------------------------------------------------------------------- ids, limits, places


async def test_the_same_key_is_the_same_command(runtime: Runtime) -> None:
    first = await runtime.command(LONG, key="server")
    again = await runtime.command(LONG, key="server")

    assert (first.id, again.id) == ("command.server", "command.server")
    assert len(await runtime.processes.list(kind="command")) == 1
    with pytest.raises(ProcessConflict):
        await runtime.command(["sleep", "601"], key="server")


async def test_the_same_key_is_the_same_command_for_a_runtime_with_other_limits_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the Runtime adds to a command, its folder and its limits, is not what the caller asked for."""
    (tmp_path / "earlier").mkdir()
    monkeypatch.chdir(tmp_path / "earlier")
    async with Runtime(tmp_path / "a.db", commands=CommandSettings(seconds=3600, output_bytes=1 << 20)) as runtime:
        first = await runtime.command(sh("read line; pwd"), stdin=True, key="build")

    monkeypatch.chdir(tmp_path)
    async with Runtime(tmp_path / "a.db") as runtime:
        again = await runtime.command(sh("read line; pwd"), stdin=True, key="build")
        with pytest.raises(ProcessConflict):
            await runtime.command(sh("read line; pwd"), stdin=True, key="build", cwd="/")
        await again.signal("stdin", {"text": "go\n"})
        result = await again.result()

    assert (again.id, result.stdout) == (first.id, f"{tmp_path / 'earlier'}\n")


async def test_no_more_than_the_limit_run_at_once(tmp_path: Path) -> None:
    settings = CommandSettings(per_session=1, total=2)
    async with Runtime(tmp_path / "a.db", agents=[agent_calling("x", {})], commands=settings) as runtime:
        session, other = await runtime.session("one"), await runtime.session("two")
        first = await session.command(LONG, key="a")
        with pytest.raises(TooManyCommands, match="session 'one'"):
            await session.command(LONG, key="b")
        assert (await session.command(LONG, key="a")).id == first.id
        second = await other.command(LONG)
        with pytest.raises(TooManyCommands, match="of this store"):
            await runtime.command(LONG)

        await first.cancel()
        await first.result()
        third = await session.command(["true"], key="b")
        await third.result()
        await second.cancel()
        await second.result()


async def test_commands_of_a_session_share_their_limit_of_output(tmp_path: Path) -> None:
    """Also where they run in several Runtimes of the store."""
    settings, agents = CommandSettings(session_output_bytes=1000), [agent_calling("x", {})]

    def opened() -> Runtime:
        return Runtime(tmp_path / "a.db", agents=agents, commands=settings)

    async with opened() as one, opened() as other:
        session, elsewhere = await one.session("one"), await other.session("one")
        first = await session.command(sh("head -c 600 /dev/zero; sleep 600"))
        await until(lambda: _has_written(first, 600))
        second = await (await elsewhere.command(["yes"])).result()
        third = await session.command(sh("head -c 400 /dev/zero; sleep 600"))
        await until(lambda: _has_written(third, 400))
        with pytest.raises(TooManyCommands, match="bytes"):
            await elsewhere.command(["true"])

        assert (second.status, second.stdout_bytes) == ("killed", 400)
        for each in (first, third):
            await each.cancel()
            await each.result()


async def _has_written(handle: ProcessHandle[Any], size: int) -> bool:
    return (await handle.output()).total >= size


async def test_a_command_begins_though_every_place_is_taken(tmp_path: Path) -> None:
    @process
    async def busy(ctx: ProcessContext) -> None:
        await ctx.step(asyncio.Event().wait)

    async with Runtime(tmp_path / "a.db", processes=[busy], concurrency=1, grace=0) as runtime:
        held = await runtime.start(busy)
        handle = await runtime.command(sh("echo here"))

        assert (await handle.result()).stdout == "here\n"
        assert await held.status() == "running"


async def test_a_running_command_holds_no_place(tmp_path: Path) -> None:
    async with Runtime(tmp_path / "a.db", concurrency=1) as runtime:
        first = await runtime.command(LONG)
        second = await runtime.command(sh("echo here"))

        assert (await second.result()).stdout == "here\n"
        await first.cancel()
        await first.result()


async def test_a_slow_foreground_call_becomes_a_handle(runtime: Runtime) -> None:
    quick = await runtime.command(sh("echo quick"), background_after=60)
    slow = await runtime.command(LONG, background_after=0.05)

    assert isinstance(quick, CommandResult)
    assert quick.stdout == "quick\n"
    assert isinstance(slow, ProcessHandle)
    assert await slow.status() == "running"


# ---------------------------------------------------------------------- adopting


async def test_leaving_the_runtime_leaves_the_command_and_the_next_one_has_its_result(tmp_path: Path) -> None:
    async with Runtime(tmp_path / "a.db", grace=None) as runtime:
        handle = await runtime.command(sh("read line; echo $line; exit 4"), stdin=True)
        pid = (await reference(handle))["pid"]
    assert lives(pid)

    async with Runtime(tmp_path / "a.db") as runtime:
        again = runtime.handle(handle.id)
        await again.signal("stdin", {"text": "hello\n"})
        result = await ended(runtime, again)
        row = await again.record()

    assert (result.exit_code, result.stdout, result.pid) == (4, "hello\n", pid)
    assert (row.attempts, row.takeovers) == (1, 0)


async def test_what_ended_while_nobody_was_there_is_told_as_it_was(tmp_path: Path) -> None:
    async with Runtime(tmp_path / "a.db") as runtime:
        handle = await runtime.command(sh("read line; exit 9"), stdin=True)
        job = Job(tmp_path / "a.db-jobs" / (await reference(handle))["job"])
    await job.close_stdin(2**40)
    await job.wait()

    async with Runtime(tmp_path / "a.db") as runtime:
        result = await ended(runtime, runtime.handle(handle.id))

    assert (result.status, result.exit_code) == ("exited", 9)


async def test_five_deaths_of_its_owner_are_held_against_nobody(tmp_path: Path) -> None:
    runtime = await Runtime(tmp_path / "a.db").__aenter__()
    handle = await runtime.command(["cat"], stdin=True)
    for _ in range(5):
        await crash(runtime)
        runtime = await Runtime(tmp_path / "a.db").__aenter__()
        mine, again = runtime._worker.id, runtime.handle(handle.id)

        async def adopted(again: ProcessHandle[Any] = again, mine: str = mine) -> bool:
            return (await again.record()).owner == mine

        await until(adopted)
    again = runtime.handle(handle.id)
    row = await again.record()
    await again.signal("stdin", {"text": "still here\n", "close": True})
    result = await ended(runtime, again)
    await runtime.__aexit__(None, None, None)

    assert (row.attempts, row.takeovers, row.stuck) == (1, 0, None)
    assert (result.status, result.stdout) == ("exited", "still here\n")


async def test_a_killed_shim_is_lost_with_its_tree_ended_first(runtime: Runtime) -> None:
    handle = await runtime.command(sh("setsid sleep 600 & sleep 600 & echo begun; wait"))
    await handle.output(follow=True)
    found = await reference(handle)

    os.kill(found["shim"], 9)
    result = await handle.result()

    assert (result.status, result.stdout, result.cleanup.verified) == ("lost", "begun\n", True)
    assert result.cleanup.found >= 2
    assert not lives(found["pid"])
    assert isinstance(await handle.outcome(), Abandoned)
    assert await handle.status() == "abandoned"


async def test_after_another_boot_it_is_lost_and_nothing_is_killed(tmp_path: Path) -> None:
    """The number of its leader is that of a process which lives, and is no business of ours any more."""
    async with Runtime(tmp_path / "a.db") as runtime:
        handle = await runtime.command(["cat"], stdin=True)
        found = await reference(handle)
    job = Job(tmp_path / "a.db-jobs" / found["job"])

    async with Runtime(tmp_path / "a.db", recover=False) as runtime:
        await runtime.processes.set_external_ref(handle.id, found | {"boot": "another"})
    async with Runtime(tmp_path / "a.db") as runtime:
        result = await ended(runtime, runtime.handle(handle.id))

    assert (result.status, result.cleanup.found) == ("lost", 0)
    assert "started again" in result.reason
    assert lives(found["pid"])
    await job.kill("the test is over", 0.0)


async def test_a_command_of_another_host_is_left_alone_until_an_operator_abandons_it(tmp_path: Path) -> None:
    asked = Registration("far", "command", "reattachable", "make", "another-host", {"argv": ["make"], "cwd": "/"})
    async with Runtime(tmp_path / "a.db") as runtime:
        handle = await runtime.start(asked, id="far")
        await runtime.wait_idle(5)

        row = await handle.record()
        assert (row.owner, row.state) == (None, "queued")
        with pytest.raises(CommandsUnavailable, match="another-host"):
            await handle.output()

        await runtime.processes.request_abandon(handle, "that host is gone")
        await runtime.processes.reconcile_abandon(handle)
        assert await handle.status() == "abandoned"


async def test_a_store_in_memory_ends_its_commands_with_its_runtime() -> None:
    async with Runtime("memory") as runtime:
        handle = await runtime.command(LONG)
        pid = (await reference(handle))["pid"]

    assert not lives(pid)


# ---------------------------------------------------------------------- ownership


async def test_deleting_a_session_kills_what_it_owns_and_not_what_it_sees(runtime: Runtime) -> None:
    session = await runtime.session("chat")
    await session.run("hello")
    owned, detached = await session.command(LONG), await session.command(LONG, owner="detached")
    theirs = await runtime.command(LONG)
    await runtime.processes.grant("chat", theirs)

    await runtime.sessions.delete("chat")

    assert (await owned.result()).status == "killed"
    assert (await owned.record()).registration.parent == session_parent("chat")
    assert [await each.status() for each in (detached, theirs)] == ["running", "running"]


async def test_what_a_deleted_session_owned_is_killed_by_the_next_runtime(tmp_path: Path) -> None:
    agent = Agent(FunctionModel(lambda request: "done"), name="clerk")
    async with Runtime(tmp_path / "a.db", agents=[agent]) as runtime:
        session = await runtime.session("chat")
        handle = await session.command(LONG)
        found = await reference(handle)
    async with Runtime(tmp_path / "a.db", recover=False) as runtime:
        assert await runtime.sessions.delete("chat")
        assert lives(found["pid"])

    async with Runtime(tmp_path / "a.db", agents=[agent]) as runtime:
        result = await ended(runtime, runtime.handle(handle.id))

    assert (result.status, result.cleanup.verified) == ("killed", True)
    assert not lives(found["pid"])


async def test_a_command_of_a_turn_ends_with_its_commit_and_one_of_the_session_does_not(tmp_path: Path) -> None:
    handles = dict[str, str]()

    @tool
    async def build(ctx: ToolContext) -> str:
        for owner in ("turn", "session"):
            handles[owner] = (await ctx.command(LONG, owner=owner)).id
        return "started"

    async with Runtime(tmp_path / "a.db", agents=[agent_calling("build", {}, tools=[build])]) as runtime:
        session = await runtime.session("chat")
        result = await session.run("go")
        call = result.tool_calls[0].call_id
        killed = await ended(runtime, runtime.handle(handles["turn"]))
        left = runtime.handle(handles["session"])

        assert (handles["turn"], handles["session"]) == (f"{call}.1", f"{call}.2")
        assert killed.status == "killed"
        assert await left.status() == "running"
        await left.cancel()
        await left.result()


async def test_a_durable_function_runs_a_command_once(tmp_path: Path) -> None:
    @process
    async def nightly(ctx: ProcessContext) -> list[Any]:
        job = await ctx.command(sh("echo built; exit 2"))
        found = await job.result()
        await ctx.wait_signal("go")
        return [job.id, found.exit_code, found.stdout]

    async with Runtime(tmp_path / "a.db", processes=[nightly]) as runtime:
        handle = await runtime.start(nightly, {}, id="n")
        await until(lambda: _waits(handle))
    async with Runtime(tmp_path / "a.db", processes=[nightly]) as runtime:
        again = runtime.handle("n")
        await again.signal("go")
        value = await again.result()
        commands = await runtime.processes.list(kind="command")

    assert value[1:] == [2, "built\n"]
    assert [row.id for row in commands] == [value[0]]


async def _waits(handle: ProcessHandle[Any]) -> bool:
    return await handle.status() == "waiting"


# ---------------------------------------------------------------------- keeping house


async def test_pruning_removes_the_folders_of_commands(runtime: Runtime, tmp_path: Path) -> None:
    handle, left = await runtime.command(sh("echo gone")), await runtime.command(LONG)
    await handle.result()
    folders = tmp_path / "a.db-jobs"
    assert len(list(folders.iterdir())) == 2

    assert await runtime.processes.prune(0) == 1

    assert [each.name for each in folders.iterdir()] == [(await reference(left))["job"]]


async def test_deleting_a_session_removes_the_folders_of_what_it_ran(runtime: Runtime, tmp_path: Path) -> None:
    session = await runtime.session("chat")
    handle, other = await session.command(sh("echo private")), await runtime.command(sh("echo kept"))
    await handle.result()
    await other.result()

    await runtime.sessions.delete("chat")

    kept = [(await reference(other))["job"]]
    await until(lambda: [each.name for each in (tmp_path / "a.db-jobs").iterdir()] == kept)
    with pytest.raises(CommandsUnavailable, match="removed"):
        await handle.output()


async def test_a_store_whose_commands_are_never_run_has_no_folder_for_them(tmp_path: Path) -> None:
    async with Runtime(tmp_path / "a.db") as runtime:
        await runtime.processes.register("external-1")
        await runtime.processes.complete("external-1")
        await runtime.processes.prune(0)

    assert not (tmp_path / "a.db-jobs").exists()


# ---------------------------------------------------------------------- trouble


async def test_a_result_arrives_though_its_output_cannot_be_kept(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "a.db-blobs").write_text("a file where the folder of blobs would be")

    result = await (await runtime.command(sh("seq 1 20000"))).result()

    assert (result.exit_code, result.stdout_lines, result.stdout_truncated) == (0, 20000, True)
    assert "stdout could not be kept" in result.artifact_error


async def test_much_is_written_to_stdin_whole_and_in_order(runtime: Runtime) -> None:
    text = "".join(f"{n:07}\n" for n in range(300_000))
    handle = await runtime.command(["sha256sum"], stdin=True)

    await handle.signal("stdin", {"text": text, "close": True})

    assert (await handle.result()).stdout.split()[0] == hashlib.sha256(text.encode()).hexdigest()


async def test_a_tool_that_is_run_again_finds_its_command(tmp_path: Path) -> None:
    marks, runs = tmp_path / "marks", list[str]()

    @tool(recovery="rerun")
    async def build(ctx: ToolContext) -> str:
        job = await ctx.command(["sh", "-c", 'echo ran >> "$0"; read line; echo "$line"', str(marks)], stdin=True)
        runs.append(job.id)
        return (await job.result()).stdout

    def agent() -> Agent[Any]:
        return agent_calling("build", {}, tools=[build])

    runtime = await Runtime(tmp_path / "a.db", agents=[agent()]).__aenter__()
    receipt = await (await runtime.session("chat")).send("go")
    await until(lambda: runs)
    await crash(runtime)

    async with Runtime(tmp_path / "a.db", agents=[agent()]) as runtime:
        await until(lambda: len(runs) == 2)
        await runtime.handle(runs[0]).signal("stdin", {"text": "built\n"})
        result = await (await runtime.session("chat")).result(receipt.turn_id)

    assert runs[0] == runs[1]
    assert marks.read_text() == "ran\n"
    assert result.tool_calls[0].value == "built\n"


async def test_leaving_waits_for_a_command_that_running_work_waits_for(tmp_path: Path) -> None:
    """It has the grace that its tool has, and the result is recorded."""
    jobs = list[Job]()

    @tool
    async def build(ctx: ToolContext) -> str:
        job = await ctx.command(sh("read line; echo done"), stdin=True)
        found = await held.store.process(job.id)
        assert found is not None
        jobs.append(Job(tmp_path / "a.db-jobs" / found.record.external_ref["job"]))
        return (await job.result()).stdout

    held = await Runtime(tmp_path / "a.db", agents=[agent_calling("build", {}, tools=[build])], grace=None).__aenter__()
    receipt = await (await held.session("chat")).send("go")
    await until(lambda: jobs)
    await until(lambda: held._work.waiters.needed)
    leaving = asyncio.ensure_future(held.__aexit__(None, None, None))
    await until(lambda: held._parts is None)
    await jobs[0].close_stdin(2**40)
    await leaving

    async with Runtime(tmp_path / "a.db", agents=[agent_calling("build", {}, tools=[build])]) as again:
        result = await (await again.session("chat")).result(receipt.turn_id)
    assert result.tool_calls[0].value == "done\n"
