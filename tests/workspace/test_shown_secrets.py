"""What those who watch see of a call whose arguments hold secrets: plugins, events, the command line."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, ModelRequest, Plugin, Runtime, ToolCall, Workspace
from perdure.model.event import AnyEvent, ToolCallDelta, ToolStarted
from perdure.model.llm import CallPiece, Delta, ModelResponse
from perdure.model.plugin import ReplaceArgs, ShortCircuit
from perdure.model.secrets import Marks, hide_argv
from perdure.model.tool import Failed, Ok, PreparedCall, ToolSpec
from perdure.plugins.hooks import ToolCallContext, ToolEndContext
from perdure.ports.tool import CallContext
from perdure.testing import ScriptedModel
from perdure.workspace.policy import Policy, Rule
from tests.cli.shell import shell

SECRET = "hunter2"
LINE = f"echo --password={SECRET}"

linux = pytest.mark.usefixtures("linux")


class Watcher(Plugin):
    """Writes down what it sees of calls, and answers as a test says."""

    id = "watcher"

    def __init__(self, answer: Any = None) -> None:
        self.before: list[dict[str, Any]] = []
        self.after: list[dict[str, Any]] = []
        self._answer = answer

    async def before_tool_call(self, ctx: ToolCallContext) -> Any:
        self.before.append(ctx.args)
        return self._answer(ctx.args) if self._answer is not None else None

    async def after_tool_call(self, ctx: ToolEndContext) -> Any:
        self.after.append(ctx.args)


class Later(Watcher):
    id = "later"


def agent(work: Path, calls: Sequence[ToolCall], *plugins: Plugin, policy: Policy | None = None) -> Agent[str]:
    policy = Policy(otherwise="allow") if policy is None else policy
    tools = Workspace([work], unsandboxed=True, policy=policy).tools(commands=True)
    return Agent(ScriptedModel([*[[call] for call in calls], "done"]), name="a", tools=[tools], plugins=list(plugins))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store" / "agent.db"


@linux
async def test_plugins_and_events_see_marks_and_the_command_runs_with_its_secret(
    work: Path, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    watcher, events = Watcher(), list[AnyEvent]()
    call = ToolCall(name="run_command", args={"command": LINE})
    async with Runtime(store, agents=[agent(work, [call], watcher)]) as runtime:
        session = await runtime.session("s")
        async with session.stream("go") as turn:
            async for event in turn:
                events.append(event)
            result = await turn.result()
    told = await asyncio.to_thread(shell, "show", "s", store=store)

    [record] = result.tool_calls
    [started] = [each for each in events if isinstance(each, ToolStarted)]
    marked = watcher.before[0]["command"]
    assert re.fullmatch(r"echo --password=<secret [0-9a-f]{12}>", marked)
    assert watcher.before == watcher.after == [{"command": marked}]
    assert started.args == {"command": marked}
    assert record.value["stdout"] == f"--password={SECRET}\n"
    assert (record.args, record.shown) == ({"command": LINE}, {"command": marked})
    assert marked[:30] in told.stdout
    assert LINE not in told.stdout
    assert SECRET not in caplog.text


@linux
async def test_what_a_plugin_leaves_alone_stays_the_real_value(work: Path, store: Path) -> None:
    first = Watcher(lambda args: ReplaceArgs({"command": f"{args['command']} --token=swordfish"}))
    second = Later()
    call = ToolCall(name="run_command", args={"command": LINE})
    async with Runtime(store, agents=[agent(work, [call], first, second)]) as runtime:
        result = await (await runtime.session("s")).run("go")

    [record] = result.tool_calls
    assert record.value["stdout"] == f"--password={SECRET} --token=swordfish\n"
    assert re.fullmatch(r"echo --password=<secret \w+> --token=<secret \w+>", second.before[0]["command"])
    assert SECRET not in str([*first.before, *second.before, *second.after])


@linux
async def test_a_mark_that_a_model_writes_itself_is_a_text(work: Path, store: Path) -> None:
    watcher = Watcher()
    first = ToolCall(name="run_command", args={"command": ["echo", f"--password={SECRET}"]})
    async with Runtime(store, agents=[agent(work, [first], watcher)]) as runtime:
        await (await runtime.session("s")).run("go")
    mark = watcher.before[0]["command"][1].partition("=")[2]
    guess = ToolCall(name="run_command", args={"command": ["echo", mark]})
    replacing = Watcher(lambda args: ReplaceArgs({**args, "timeout": 60}))
    async with Runtime(store, agents=[agent(work, [guess], replacing)]) as runtime:
        result = await (await runtime.session("s")).run("go")

    [record] = result.tool_calls
    assert record.value["stdout"] == f"{mark}\n"


@linux
async def test_what_is_typed_into_a_command_is_a_secret_as_a_whole(work: Path, store: Path) -> None:
    watcher = Watcher()
    begin = ToolCall(name="run_command", args={"command": "cat", "stdin": True, "background": True})
    write = ToolCall(name="write_stdin", args={"id": "s.1.1.0.command", "text": "open sesame\n", "close": True})
    async with Runtime(store, agents=[agent(work, [begin, write], watcher)]) as runtime:
        result = await (await runtime.session("s")).run("go")
        command = runtime.handle("s.1.1.0.command")
        ended = await command.result()
    told = await asyncio.to_thread(shell, "show", "s", store=store)

    assert ended.stdout == "open sesame\n"
    assert re.fullmatch(r"<secret \w+>", watcher.before[1]["text"])
    assert watcher.before[1] == watcher.after[1]
    assert result.tool_calls[1].args["text"] == "open sesame\n"
    assert "open sesame" not in told.stdout


@linux
@pytest.mark.parametrize("by", ["policy", "plugin"])
async def test_a_call_that_never_began_shows_no_secret(work: Path, store: Path, by: str) -> None:
    policy = Policy((Rule("deny", "echo"),)) if by == "policy" else None
    answer = (lambda args: ShortCircuit(Failed("no", f"not {args['command']}"))) if by == "plugin" else None
    call = ToolCall(name="run_command", args={"command": LINE})
    async with Runtime(store, agents=[agent(work, [call], Watcher(answer), policy=policy)]) as runtime:
        result = await (await runtime.session("s")).run("go")
    told = await asyncio.to_thread(shell, "show", "s", store=store)

    assert isinstance(result.tool_calls[0].outcome, Failed)
    assert SECRET not in result.tool_calls[0].outcome.message
    assert "<secret" in told.stdout
    assert LINE not in told.stdout


@linux
async def test_the_person_who_approves_sees_all_of_it(work: Path, store: Path) -> None:
    call = ToolCall(name="run_command", args={"command": LINE})
    policy, watcher = Policy((Rule("ask", "echo"),)), Watcher()
    async with Runtime(store, agents=[agent(work, [call], watcher, policy=policy)]) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        [asked] = await session.pending()
        await session.approve(asked.call_id)
        result = await session.result(result.turn_id)

    assert asked.args == {"command": LINE}
    assert f"  | {LINE}" in asked.reason
    assert result.tool_calls[0].value["stdout"] == f"--password={SECRET}\n"
    assert SECRET not in str([*watcher.before, *watcher.after])


@linux
async def test_marks_are_the_same_in_the_next_runtime_and_in_no_other_store(work: Path, tmp_path: Path) -> None:
    seen = []
    for name in ("one", "one", "two"):
        watcher, call = Watcher(), ToolCall(name="run_command", args={"command": LINE})
        async with Runtime(tmp_path / name / "agent.db", agents=[agent(work, [call], watcher)]) as runtime:
            await (await runtime.session("s")).run("go")
        seen.append(watcher.before[0])

    assert seen[0] == seen[1]
    assert seen[0] != seen[2]


class Pieces:
    """A model that writes two calls in pieces, and gives an answer without any."""

    name = "pieces"

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        yield CallPiece(0, "run_command", f'{{"command": "{LINE}"}}')
        yield CallPiece(1, "other", '{"x": 1}')
        yield ModelResponse(text="no call after all")


async def test_pieces_of_a_call_that_may_hold_secrets_are_not_streamed(work: Path) -> None:
    tools = Workspace([work], unsandboxed=True).tools(commands=True)
    events = []
    made = Agent(Pieces(), name="a", tools=[tools])
    async with Runtime("memory", agents=[made]) as runtime, (await runtime.session("s")).stream("go") as turn:
        async for event in turn:
            events.append(event)

    assert [(each.tool, each.text) for each in events if isinstance(each, ToolCallDelta)] == [
        ("run_command", ""),
        ("other", '{"x": 1}'),
    ]


class Vault:
    """A set of tools of somebody else, which knows what its secrets are; or fails to tell."""

    def __init__(self, fails: bool = False) -> None:
        self.ran: list[dict[str, Any]] = []
        self._fails = fails

    def specs(self) -> Sequence[ToolSpec]:
        fields = {"user": {"type": "string"}, "pin": {"type": "string"}}
        return [ToolSpec("unlock", input_schema={"type": "object", "properties": fields})]

    async def prepare(self, call: PreparedCall, ctx: CallContext) -> PreparedCall:
        return call

    async def execute(self, call: PreparedCall, ctx: CallContext) -> str:
        self.ran.append(call.args)
        return "open"

    def shown_args(self, call: PreparedCall, marks: Marks) -> Mapping[str, Any]:
        if self._fails:
            raise RuntimeError(f"no idea about {call.args}")
        return {**call.args, "pin": marks.mark(call.args["pin"])}


@pytest.mark.parametrize("fails", [False, True])
async def test_any_set_of_tools_may_hide_what_it_is_given(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    vault, watcher = Vault(fails), Watcher(lambda args: ReplaceArgs({**args}))
    call = ToolCall(name="unlock", args={"user": "ada", "pin": "1234"})
    made = Agent(ScriptedModel([[call], "done"]), name="a", tools=[vault], plugins=[watcher])
    async with Runtime("memory", agents=[made]) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.tool_calls[0].outcome == Ok("open")
    assert vault.ran == [{"user": "ada", "pin": "1234"}]
    assert ("ada" in str(watcher.before)) is not fails, "where it fails to tell, everything is hidden"
    assert "1234" not in str([*watcher.before, *watcher.after])
    assert "1234" not in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        "echo --token=x$(rm -rf /)",
        'echo --token="a; rm -rf /"',
        "echo --token='$(rm -rf /)'",
        'echo "--token=\'" ; rm -rf / ; echo "\'"',
        "echo token:\nrm -rf /",
        "TOKEN= rm -rf /",
        "echo --token\nrm -rf /",
        "echo '-----BEGIN PRIVATE KEY-----'; rm -rf /",
        "echo -----BEGIN PRIVATE KEY-----\nrm -rf /",
        "echo -----BEGIN PRIVATE KEY-----\n/usr/sbin/rm -rf /",
        "mysql; rm -prf /",
        "echo bearer\nrm -rf /",
        "sudo -u basic rm -rf /",
        "curl -u a:b`rm -rf /` x",
        "curl http://a:b|rm@x",
    ],
)
def test_what_may_run_is_never_hidden_from_a_plugin_that_guards(line: str) -> None:
    assert "rm" in Marks(b"key").hide(line)


@pytest.mark.parametrize("piece", ["x", "a-", "eyJ-", "token-", "token=a ", "a://", "://:", "sk-a-", "-----BEGIN "])
def test_a_long_text_takes_no_time_by_the_square_of_its_length(piece: str) -> None:
    """It would not end while anybody waits, and nothing else would go on meanwhile."""
    marks, text = Marks(b"key"), piece * (150_000 // len(piece))

    assert marks.restore(marks.hide(text)) == text


@pytest.mark.parametrize(
    ("argv", "secret"),
    [
        (["curl", "--password", "open sesame"], "open sesame"),
        (["curl", "--password=hunter2"], "hunter2"),
        (["curl", "-u", "joe:hunter2", "x"], "hunter2"),
        (["/usr/bin/mysql", "-phunter2"], "hunter2"),
        (["curl", "-H", "Authorization: Bearer abcdefgh12"], "abcdefgh12"),
    ],
)
def test_secrets_are_found_in_lists_of_arguments(argv: list[str], secret: str) -> None:
    marks = Marks(b"key")
    shown = hide_argv(argv, marks)

    assert secret not in str(shown)
    assert len(shown) == len(argv)
    assert marks.restore(shown) == argv
