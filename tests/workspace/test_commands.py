"""The tools for commands: what a model gets of them, what it is told of its mistakes, and what it may not reach."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Runtime, ToolCall, ToolContext, ToolError, Workspace
from perdure.errors import InvalidDefinition, UnknownProcess
from perdure.model.command import OutputChunk
from perdure.model.tool import Ok
from perdure.testing import ScriptedModel
from perdure.tools.context import CallHost
from perdure.workspace.commands import READ_BYTES, READ_LINES, LineSearch
from perdure.workspace.policy import Policy, Rule
from perdure.workspace.tools import FileTools
from tests.kit import SOON, until, untyped
from tests.workspace.asking import Conversation, prepare

pytestmark = pytest.mark.usefixtures("linux")

ANYTHING = Policy(otherwise="allow")
NEVER = "600"
"""Seconds that a command sleeps which a test ends."""


@contextlib.asynccontextmanager
async def conversation(
    tools: FileTools, store: str | Path = "memory", session: str = "s"
) -> AsyncGenerator[Conversation]:
    model = Conversation(tools)
    async with Runtime(store, agents=[model.agent]) as model.runtime:
        model.session = await model.runtime.session(session)
        yield model


@pytest.fixture
async def model(work: Path) -> AsyncIterator[Conversation]:
    async with conversation(Workspace([work], unsandboxed=True, policy=ANYTHING).tools(commands=True)) as found:
        yield found


# ---------------------------------------------------------------------- running


def test_commands_are_off_unless_they_are_asked_for(work: Path) -> None:
    files = {each.name for each in Workspace([work]).tools().specs()}
    more = {each.name for each in Workspace([work], unsandboxed=True, policy=ANYTHING).tools(commands=True).specs()}

    assert "run_command" not in files
    assert more - files == {
        "run_command", "read_command_output", "wait_command", "wait_command_output", "wait_port", "write_stdin",
        "list_commands", "release_command", "cancel_command", "run_test", "run_build_command", "read_diagnosis", "git",
    }  # fmt: skip


def test_every_tool_may_be_attempted_again_after_a_crash(work: Path) -> None:
    specs = Workspace([work], unsandboxed=True, policy=ANYTHING).tools(commands=True).specs()

    assert {each.name: each.recovery for each in specs if each.recovery != "rerun"} == {}


async def test_a_line_for_the_shell_and_a_list_of_arguments(model: Conversation, work: Path) -> None:
    (work / "sub").mkdir()

    line = await model.call("run_command", command="echo out; echo bad >&2; exit 3", cwd="sub")
    plain = await model.call("run_command", command=["echo", "$HOME; no shell"])
    where = await model.call("run_command", command=["pwd"], cwd="sub")

    assert {name: line[name] for name in ("status", "exit_code", "stdout", "stderr")} == {
        "status": "exited", "exit_code": 3, "stdout": "out\n", "stderr": "bad\n",
    }  # fmt: skip
    assert "truncated" not in line
    assert plain["stdout"] == "$HOME; no shell\n"
    assert where["stdout"] == f"{work.resolve()}/sub\n"


async def test_a_slow_command_becomes_a_handle_and_its_end_is_told(model: Conversation, work: Path) -> None:
    slow = await model.call("run_command", command="cat", stdin=True, background_after=0)
    assert slow["status"] == "running"

    await model.call("write_stdin", id=slow["id"], text="so be it\n", close=True)
    assert model.session is not None
    session = model.session

    async def told() -> bool:
        return any("so be it" in each.text for each in await session.history() if each.role == "user")

    await until(told)


async def test_a_waited_command_is_not_told_a_second_time(work: Path) -> None:
    tools = Workspace([work], unsandboxed=True, policy=ANYTHING).tools(commands=True)
    async with conversation(tools) as model:
        slow = await model.call("run_command", command="cat", stdin=True, background=True)
        await model.call("write_stdin", id=slow["id"], close=True)
        ended = await model.call("wait_command", id=slow["id"])
        assert model.session is not None
        history = await model.session.history()

    assert (ended["status"], ended["exit_code"]) == ("exited", 0)
    assert [each.text for each in history if each.role == "user"] == [
        "call run_command", "call write_stdin", "call wait_command",
    ]  # fmt: skip


async def test_long_output_is_cut_in_the_middle_and_says_how_to_read_it(model: Conversation) -> None:
    made = await model.call("run_command", command="seq 100000; echo the end")

    assert made["stdout"].startswith("1\n2\n3\n")
    assert made["stdout"].endswith("100000\nthe end\n")
    assert "588,903 bytes" in made["truncated"]
    assert "read_command_output" in made["truncated"]


async def test_a_command_that_is_ended_by_its_time(model: Conversation) -> None:
    late = await model.call("run_command", command=["sleep", NEVER], timeout=0.05)

    assert (late["status"], late["reason"]) == ("timed_out", "its time was over")


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({"command": ""}, "invalid_tool_args"),
        ({"command": "  "}, "invalid_tool_args"),
        ({"command": []}, "invalid_tool_args"),
        ({"command": [""]}, "invalid_command"),
        ({"command": ["no such program"]}, "invalid_command"),
        ({"command": "ls", "cwd": "/etc"}, "outside_workspace"),
        ({"command": "ls", "cwd": "../.."}, "outside_workspace"),
        ({"command": "ls", "cwd": "a.txt"}, "not_a_folder"),
        ({"command": "ls", "cwd": "away"}, "outside_workspace"),
        ({"command": "ls", "cwd": "missing"}, "not_found"),
        ({"command": "ls", "timeout": -1}, "invalid_tool_args"),
        ({"command": "ls", "timeout": 0}, "invalid_tool_args"),
        ({"command": "ls", "background_after": -0.1}, "invalid_tool_args"),
        ({"command": "ls", "background_after": 1e9}, "invalid_tool_args"),
    ],
)
async def test_a_command_that_cannot_be_run_is_told(
    model: Conversation, work: Path, args: dict[str, Any], code: str
) -> None:
    (work / "a.txt").write_text("text\n")
    (work / "away").symlink_to("/etc")

    assert await model.call("run_command", **args) == code
    assert await model.call("list_commands", live=False) == {"commands": []}


async def test_a_workspace_without_a_sandbox_refuses_unless_the_host_allows_it(work: Path, tmp_path: Path) -> None:
    tools = Workspace([work]).tools(commands=True)
    async with conversation(tools, tmp_path / "store" / "a.db") as model:
        found = await model.call("run_command", command="echo hi")

    if isinstance(found, dict):
        assert found["stdout"] == "hi\n"  # this machine can confine it
    else:
        assert found == "sandbox_unavailable"


# ---------------------------------------------------------------------- the policy


async def test_what_the_policy_denies_is_not_run_and_the_model_is_told_why(work: Path) -> None:
    policy = Policy((Rule("deny", "touch", reason="no new files"),), otherwise="allow")
    async with conversation(Workspace([work], unsandboxed=True, policy=policy).tools(commands=True)) as model:
        code = await model.call("run_command", command="echo hi; touch made")
        told = await model.told("run_command", command=["touch", "made"])
        runs = await model.call("run_command", command="echo hi")

    assert code == "denied_by_policy"
    assert "no new files" in told
    assert runs["exit_code"] == 0
    assert not (work / "made").exists()


async def test_a_denial_names_the_file_that_may_hold_credentials(work: Path) -> None:
    policy = Policy((Rule("deny", labels=("credential_read",)),))
    async with conversation(Workspace([work], unsandboxed=True, policy=policy).tools(commands=True)) as model:
        told = await model.told("run_command", command="cat .env --token=hunter2")

    assert "credential_read: .env may hold credentials" in told
    assert "hunter2" not in told


async def test_what_the_policy_asks_about_waits_for_a_person_who_sees_the_whole_command(work: Path) -> None:
    async with conversation(Workspace([work], unsandboxed=True).tools(commands=True)) as model:
        line = f"touch {'a' * 500}; touch made"
        await model.turn("run_command", command=line)
        assert model.session is not None
        [asked] = await model.session.pending()
        before = list(work.iterdir())
        await model.session.approve(asked.call_id)
        result = await model.session.result(asked.call_id.rpartition(".")[0].rpartition(".")[0])

    assert (asked.kind, asked.args) == ("approval", {"command": line})
    assert asked.reason
    assert before == []
    assert result.tool_calls[0].value["status"] == "exited"
    assert (work / "made").exists()


async def test_a_rejected_command_is_not_run(work: Path) -> None:
    async with conversation(Workspace([work], unsandboxed=True).tools(commands=True)) as model:
        await model.turn("run_command", command="touch made")
        assert model.session is not None
        [asked] = await model.session.pending()
        await model.session.reject(asked.call_id, "no")
        await model.runtime.wait_idle()
        listed = await model.call("list_commands", live=False)

    assert listed == {"commands": []}
    assert list(work.iterdir()) == []


async def test_a_policy_that_asks_by_now_lets_no_call_run_that_nobody_approved(work: Path) -> None:
    """As after a crash: the call was prepared under another policy than that under which it is attempted again."""
    allows = Workspace([work], unsandboxed=True, policy=ANYTHING).tools(commands=True)
    asks = Workspace([work], unsandboxed=True).tools(commands=True)
    args = {"command": "touch made"}
    call = await prepare(allows, "run_command", **args)
    context = ToolContext[Any](call_id="c", tool="run_command", host=NoCommands(), attempt=2, payload=call.payload)

    with pytest.raises(ToolError) as refused:
        await asks.execute(call, context)

    assert refused.value.code == "approval_needed"


class NoCommands(CallHost):
    """A host that has none of the commands of this session, and runs none."""

    def handles(self) -> Any:
        return self

    async def command_of(self, process_id: str) -> Any:
        raise UnknownProcess(process_id)


def test_a_policy_that_is_none_is_refused(work: Path) -> None:
    with pytest.raises(InvalidDefinition, match="policy="):
        Workspace([work], policy=untyped({"rules": []}))


# ---------------------------------------------------------------------- reading


async def test_output_is_read_by_offset_in_whole_characters(model: Conversation) -> None:
    made = await model.call("run_command", command="printf 'aé🦉z'; printf err >&2")

    async def read(offset: int = 0, stream: str = "stdout", **more: Any) -> Any:
        return await model.call("read_command_output", id=made["id"], offset=offset, stream=stream, **more)

    first = await read(limit=2)
    second = await read(first["next_offset"], limit=5)
    rest = await read(second["next_offset"])
    errors = await read(stream="stderr")

    assert [first["content"], second["content"], rest["content"]] == ["a", "é", "🦉z"]
    assert (first["eof"], second["eof"], rest["eof"], rest["next_offset"], rest["total"]) == (False, False, True, 8, 8)
    assert errors["content"] == "err"


async def test_pieces_of_output_make_the_whole_and_none_passes_the_budget(model: Conversation) -> None:
    zeros = "head -c 40000 /dev/zero; head -c 9000 /dev/zero | tr '\\0' '\\377'"
    made = await model.call("run_command", command=f"seq 30000; {zeros}")

    text, offset, pieces = "", 0, 0
    while True:
        result = await model.turn("read_command_output", id=made["id"], stream="stdout", offset=offset)
        outcome = result.tool_calls[0].outcome
        assert isinstance(outcome, Ok)
        assert outcome.whole is None, "nothing had to be cut for the model"
        piece = outcome.value
        text, offset, pieces = text + piece["content"], piece["next_offset"], pieces + 1
        assert piece["content"].count("\n") <= READ_LINES
        if piece["eof"]:
            break

    assert offset == 168_894 + 49_000
    assert text.replace("\0", "").replace("�", "").rstrip() == "\n".join(str(n) for n in range(1, 30_001))
    assert pieces > offset // READ_BYTES


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({"offset": 7}, "past_the_end"),
        ({"offset": -1}, "invalid_tool_args"),
        ({"limit": 0}, "invalid_tool_args"),
        ({"stream": "stdlog"}, "invalid_tool_args"),
        ({"id": "s.9.9.9.command"}, "unknown_command"),
        ({"id": ""}, "unknown_command"),
        ({"id": "../../etc"}, "unknown_command"),
    ],
)
async def test_output_that_is_not_there_is_told(model: Conversation, args: dict[str, Any], code: str) -> None:
    made = await model.call("run_command", command="echo hello")

    assert await model.call("read_command_output", **{"id": made["id"], **args}) == code


async def test_a_command_of_another_session_is_unknown(work: Path) -> None:
    tools = Workspace([work], unsandboxed=True, policy=ANYTHING).tools(commands=True)
    model = Conversation(tools)
    async with Runtime("memory", agents=[model.agent]) as runtime:
        model.session = await runtime.session("theirs")
        theirs = await model.call("run_command", command="cat", stdin=True, background=True)
        model.session = await runtime.session("ours")
        answers = {
            "read_command_output": await model.call("read_command_output", id=theirs["id"]),
            "wait_command": await model.call("wait_command", id=theirs["id"]),
            "wait_command_output": await model.call("wait_command_output", id=theirs["id"], pattern="x"),
            "wait_port": await model.call("wait_port", id=theirs["id"], port=80),
            "write_stdin": await model.call("write_stdin", id=theirs["id"], text="x"),
            "cancel_command": await model.call("cancel_command", id=theirs["id"]),
        }
        listed = await model.call("list_commands")
        status = await runtime.handle(theirs["id"]).status()

    assert set(answers.values()) == {"unknown_command"}
    assert listed == {"commands": []}
    assert status == "running"


# ---------------------------------------------------------------------- waiting


async def test_a_wait_that_is_over_says_how_the_command_is(model: Conversation) -> None:
    made = await model.call("run_command", command="echo begun; cat", stdin=True, background=True)
    await model.call("wait_command_output", id=made["id"], pattern="begun")

    waited = await model.call("wait_command", id=made["id"], timeout=0)

    assert (waited["status"], waited["output"], waited["next_offset"]) == ("running", "begun\n", 6)


async def test_a_line_is_waited_for(model: Conversation) -> None:
    made = await model.call("run_command", command="echo first; cat", stdin=True, background=True)
    waiting = asyncio.ensure_future(
        model.call("wait_command_output", id=made["id"], pattern=r"^port (\d+)$", stream="stdout")
    )
    handle = model.runtime.handle(made["id"])
    await handle.signal("stdin", {"text": "no port\n"})
    await handle.signal("stdin", {"text": "port 8081\nlast\n"})

    found = await waiting
    behind = {"offset": found["next_offset"], "stream": found["stream"]}
    after = await model.call("wait_command_output", id=made["id"], pattern="last", **behind)

    assert found == {
        "id": made["id"], "matched": True, "stream": "stdout", "line": "port 8081", "offset": 14, "next_offset": 24,
        "status": "running",
    }  # fmt: skip
    assert (after["offset"], after["next_offset"]) == (24, 29)


async def test_a_wait_for_a_line_ends_with_the_command_or_its_time(model: Conversation) -> None:
    short = await model.call("run_command", command="echo only this; exit 4")
    long = await model.call("run_command", command="echo only this; cat", stdin=True, background=True)

    ended = await model.call("wait_command_output", id=short["id"], pattern="something else")
    late = await model.call("wait_command_output", id=long["id"], pattern="something else", timeout=0.05)
    there = await model.call("wait_command_output", id=short["id"], pattern="only", timeout=0)

    assert (ended["matched"], ended["status"], ended["exit_code"]) == (False, "exited", 4)
    assert (late["matched"], late["status"]) == (False, "running")
    assert there["matched"] is True, "what was written before is looked at, however short the time is"


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({"pattern": "("}, "invalid_pattern"),
        ({"pattern": ""}, "invalid_tool_args"),
        ({"pattern": "x", "offset": -1}, "invalid_tool_args"),
        ({"pattern": "x", "offset": 99}, "past_the_end"),
        ({"pattern": "x", "timeout": -1}, "invalid_tool_args"),
        ({"pattern": "x", "timeout": 1e12}, "invalid_tool_args"),
    ],
)
async def test_a_wait_that_makes_no_sense_is_told(model: Conversation, args: dict[str, Any], code: str) -> None:
    made = await model.call("run_command", command="echo hello")

    assert await model.call("wait_command_output", id=made["id"], **args) == code


async def test_a_fixed_pattern_is_a_text(model: Conversation) -> None:
    made = await model.call("run_command", command="echo 'a(b'")

    assert (await model.call("wait_command_output", id=made["id"], pattern="a(b", fixed=True))["matched"] is True


def chunk(data: bytes) -> OutputChunk:
    return OutputChunk(data, 0, 0, False)


async def test_lines_are_found_in_whatever_pieces_they_come() -> None:
    with contextlib.closing(LineSearch("ready: é", False, 100)) as lines:
        await lines.begin()
        before = [await lines.look(chunk(each)) for each in (b"one\ntwo re", b"ady: \xc3", b"")]
        line_at = lines.line_at
        found = await lines.look(chunk(b"\xa9 now\nnext\n"))

    assert before == [None, None, None]
    assert line_at == 104
    assert found == {"line": "two ready: é now", "offset": 104, "next_offset": 122}


async def test_a_question_without_a_line_feed_is_found() -> None:
    with contextlib.closing(LineSearch(r"password: $", False, 0)) as lines:
        await lines.begin()
        found = await lines.look(chunk(b"hello\npassword: "))

    assert found == {"line": "password: ", "offset": 6, "next_offset": 16}


async def test_a_pattern_without_end_is_told_and_holds_up_nothing() -> None:
    with contextlib.closing(LineSearch(r"(a+)+$", False, 0, seconds=1)) as lines:
        await lines.begin()
        with pytest.raises(ToolError, match="simpler pattern"):
            await lines.look(chunk(b"a" * 40 + b"b"))


async def test_a_port_is_waited_for(model: Conversation) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = f"import socket; s = socket.create_server(('127.0.0.1', {port})); input()"
    made = await model.call("run_command", command=[sys.executable, "-c", serve], stdin=True, background=True)

    opened = await model.call("wait_port", id=made["id"], port=port)
    await model.call("write_stdin", id=made["id"], close=True, text="\n")
    await model.call("wait_command", id=made["id"])
    closed = await model.call("wait_port", id=made["id"], port=port)

    assert opened == {"id": made["id"], "port": port, "open": True}
    assert (closed["open"], closed["status"]) == (False, "exited")


async def test_a_port_that_stays_closed_is_told(model: Conversation) -> None:
    made = await model.call("run_command", command="cat", stdin=True, background=True)

    late = await model.call("wait_port", id=made["id"], port=1, timeout=0.05)

    assert (late["open"], late["status"]) == (False, "running")
    assert await model.call("wait_port", id=made["id"], port=0) == "invalid_tool_args"
    assert await model.call("wait_port", id=made["id"], port=65_536) == "invalid_tool_args"


# ---------------------------------------------------------------------- writing, listing, ending


async def test_a_command_is_written_to(model: Conversation) -> None:
    made = await model.call("run_command", command="cat", stdin=True, background=True)

    wrote = await model.call("write_stdin", id=made["id"], text="é\n")
    closed = await model.call("write_stdin", id=made["id"], close=True)
    ended = await model.call("wait_command", id=made["id"])

    assert (wrote["written"], wrote["closed"], closed["closed"]) == (3, False, True)
    assert ended["stdout"] == "é\n"
    assert await model.call("write_stdin", id=made["id"], text="more") == "command_ended"


async def test_what_cannot_be_written_is_told(model: Conversation) -> None:
    made = await model.call("run_command", command=["sleep", NEVER], background=True)

    assert await model.call("write_stdin", id=made["id"], text="x") == "no_stdin"
    assert await model.call("write_stdin", id=made["id"]) == "invalid_tool_args"


async def test_commands_are_listed_newest_first(model: Conversation) -> None:
    ended = await model.call("run_command", command="exit 7")
    first = await model.call("run_command", command="cat", stdin=True, background=True)
    second = await model.call("run_command", command=["sleep", NEVER], background=True)

    live = await model.call("list_commands")
    newest = await model.call("list_commands", live=False, limit=2)
    every = await model.call("list_commands", live=False)

    running = [
        {"id": second["id"], "command": "sleep 600", "status": "running"},
        {"id": first["id"], "command": "cat", "status": "running"},
    ]
    assert live == {"commands": running}
    assert newest == {"commands": running}
    assert every == {
        "commands": [*running, {"id": ended["id"], "command": "exit 7", "status": "exited", "exit_code": 7}]
    }
    assert await model.call("list_commands", limit=0) == "invalid_tool_args"


def sleeps(seconds: str) -> bool:
    """Whether some `sleep` of this length runs: a confined command knows other numbers of its processes than we do."""
    for each in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if each.name.isdigit() and (each / "cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                return True
    return False


async def test_a_command_is_ended_with_all_that_it_started(model: Conversation) -> None:
    mark = f"{NEVER}.{secrets.randbelow(1 << 60)}"
    made = await model.call("run_command", command=f"sleep {mark} & echo $!; wait", background=True)
    await model.call("wait_command_output", id=made["id"], pattern=r"\d+")
    await until(lambda: sleeps(mark))

    ended = await model.call("cancel_command", id=made["id"], reason="enough")
    again = await model.call("cancel_command", id=made["id"])

    assert (ended["status"], again["status"]) == ("killed", "killed")
    assert "enough" in ended["reason"]
    assert not sleeps(mark)


async def test_a_turn_is_not_held_for_a_server_that_its_model_has_released(work: Path) -> None:
    steps: list[str | list[ToolCall]] = [
        [ToolCall("1", "run_command", {"command": f"exec sleep {NEVER}", "background": True})],
        [ToolCall("2", "release_command", {"id": "s.1.1.0.command"})],
        "the server runs",
    ]
    tools = Workspace([work], unsandboxed=True, policy=ANYTHING).tools(commands=True)
    agent = Agent(ScriptedModel(steps), tools=[tools], wait_for_commands=600)
    async with Runtime(work.parent / "agent.db", agents=[agent]) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("serve it"), SOON)
        (row,) = await runtime.processes.list(kind="command")
        await runtime.handle(row.id).cancel()
        await runtime.handle(row.id).result()

    assert (result.text, row.live) == ("the server runs", True)
    assert result.tool_calls[1].value == {"id": row.id, "status": "running", "waited_for": False}


async def test_a_turn_that_is_cancelled_while_its_command_starts_leaves_none(work: Path) -> None:
    tools = Workspace([work], unsandboxed=True, policy=ANYTHING).tools(commands=True)
    async with conversation(tools) as model:
        waiting = asyncio.ensure_future(model.turn("run_command", command=f"exec sleep {NEVER}"))

        async def registered() -> bool:
            return bool(await model.runtime.processes.list(kind="command"))

        await until(registered)
        assert model.session is not None
        await model.session.cancel()
        await waiting
        [row] = await model.runtime.processes.list(kind="command")
        await model.runtime.handle(row.id).outcome()


async def test_a_cancelled_turn_ends_the_command_that_it_waits_for(work: Path) -> None:
    mark = f"{NEVER}.{secrets.randbelow(1 << 60)}"
    tools = Workspace([work], unsandboxed=True, policy=ANYTHING).tools(commands=True)
    async with conversation(tools) as model:
        waiting = asyncio.ensure_future(model.turn("run_command", command=f"echo $$; exec sleep {mark}"))

        async def begun() -> bool:
            return bool(await model.runtime.processes.list(kind="command", live=True))

        await until(begun)
        [row] = await model.runtime.processes.list(kind="command", live=True)
        handle = model.runtime.handle(row.id)
        await until(lambda: sleeps(mark))
        assert model.session is not None
        await model.session.cancel()
        await waiting
        await handle.outcome()

    assert not sleeps(mark)
