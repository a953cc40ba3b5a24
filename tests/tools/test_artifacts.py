"""Artifacts: bytes that tools put under a name, who finds them, and when they are gone."""

import asyncio
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, ModelRequest, Retry, Runtime, Session, ToolCall, ToolContext, ToolError, TurnResult, tool
from perdure.model.tool import Artifact, Failed, Ok, OutcomeUnknown
from perdure.testing import FunctionModel, ScriptedModel
from tests.kit import SOON, Place, crash, until


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@tool
async def write(name: str, text: str, ctx: ToolContext[Any]) -> str:
    """Put a text."""
    await ctx.artifacts.put(text, name=name)
    return f"wrote {name}"


@tool
async def read(name: str, ctx: ToolContext[Any]) -> str:
    """Get a text."""
    return (await ctx.artifacts.get(name)).decode()


def says(request: ModelRequest) -> Any:
    """Calls what it is told to call: `write report hello`, several separated by `;`. Then it repeats the results."""
    last = request.messages[-1]
    if last.role == "tool":
        return "done"
    calls = [line.split() for line in last.text.split(";")]
    keys = {"write": ("name", "text"), "read": ("name",)}
    return [
        ToolCall(f"c{n}", name, dict(zip(keys.get(name, ()), args, strict=False)))
        for n, (name, *args) in enumerate(calls)
    ]


def clerk(*more: Any) -> Agent[str]:
    return Agent(FunctionModel(says), name="clerk", tools=[write, read, *more])


async def ask(session: Session, what: str) -> list[Any]:
    """The outcomes of the calls that the model is told to make."""
    result = await asyncio.wait_for(session.run(what), SOON)
    return [call.outcome for call in result.tool_calls]


NOBODY = Failed("artifact_unknown", "there is no artifact 'report' in this session")


# ---------------------------------------------------------------------- who finds them


async def test_a_later_tool_of_the_session_gets_what_an_earlier_one_put(place: Place) -> None:
    async with place.runtime(clerk()) as runtime:
        session = await runtime.session("chat")
        await ask(session, "write report hello")

        assert await ask(session, "read report") == [Ok("hello")]
        assert await ask(await runtime.session("other"), "read report") == [NOBODY]
    async with place.runtime(clerk()) as runtime:
        assert await ask(await runtime.session("chat"), "read report") == [Ok("hello")]


async def test_a_later_step_of_the_same_turn_gets_it_too(place: Place) -> None:
    steps = [[ToolCall("a", "write", {"name": "n", "text": "early"})], [ToolCall("b", "read", {"name": "n"})], "done"]

    def model(request: ModelRequest) -> Any:
        return steps[sum(1 for m in request.messages if m.role == "assistant")]

    async with place.runtime(Agent(FunctionModel(model), tools=[write, read])) as runtime:
        result = await (await runtime.session("chat")).run("go")

    assert [c.outcome for c in result.tool_calls] == [Ok("wrote n"), Ok("early")]


async def test_the_host_reads_what_a_call_has_put(place: Place) -> None:
    @tool
    async def draw(ctx: ToolContext[Any]) -> str:
        """Draw a picture."""
        put = await ctx.artifacts.put(b"\x89PNG\x00", name="picture", media_type="image/png")
        return put.name

    expected = (Artifact("picture", digest(b"\x89PNG\x00"), 5, "image/png"),)
    async with place.runtime(clerk(draw)) as runtime:
        live = await (await runtime.session("chat")).run("draw")
        assert live.tool_calls[0].artifacts == expected
    async with place.runtime(clerk()) as runtime:
        stored = await (await runtime.session("chat")).result("chat.1")
        assert stored.tool_calls == live.tool_calls
        assert await runtime.store.blobs.get(expected[0].digest) == b"\x89PNG\x00"


async def test_the_newest_of_a_name_is_the_one_that_is_found(place: Place) -> None:
    @tool
    async def again(ctx: ToolContext[Any]) -> str:
        """Put a name twice, and look at it in between."""
        await ctx.artifacts.put("third", name="report")
        seen = await ctx.artifacts.get("report")
        await ctx.artifacts.put("fourth", name="report")
        return seen.decode()

    async with place.runtime(clerk(again)) as runtime:
        session = await runtime.session("chat")
        await ask(session, "write report first")
        await ask(session, "write report second;write other else")
        assert await ask(session, "read report") == [Ok("second")]
        result = await session.run("again")

        assert result.tool_calls[0].outcome == Ok("third")
        assert [a.size for a in result.tool_calls[0].artifacts] == [len("fourth")]
        assert await ask(session, "read report") == [Ok("fourth")]


async def test_it_is_found_behind_a_long_history(place: Place) -> None:
    async with place.runtime(clerk()) as runtime:
        session = await runtime.session("chat")
        await ask(session, "write report hello")
        for _ in range(70):
            await ask(session, "write other x")

        assert await ask(session, "read report") == [Ok("hello")]


async def test_a_fork_has_the_artifacts_of_its_past_and_no_others(place: Place) -> None:
    async with place.runtime(clerk()) as runtime:
        session = await runtime.session("chat")
        await ask(session, "write report first")
        await ask(session, "write report second")
        early, late = await session.fork("chat.1"), await session.fork()
        await ask(late, "write report third")

        assert await ask(early, "read report") == [Ok("first")]
        assert await ask(late, "read report") == [Ok("third")]
        assert await ask(session, "read report") == [Ok("second")]
        assert await ask(await late.fork(), "read report") == [Ok("third")]


async def test_a_fork_in_the_middle_of_a_turn_has_what_was_put_before_it(place: Place) -> None:
    answers = [[ToolCall("a", "write", {"name": "report", "text": text})] for text in ("first", "second")]
    model = ScriptedModel([*answers, "done", [ToolCall("b", "read", {"name": "report"})], "done"])
    async with place.runtime(Agent(model, tools=[write, read])) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        branch = await session.fork("chat.1.2")  # the input, the first reply, the outcome of its call

        assert await ask(branch, "go") == [Ok("first")]


async def test_a_fork_keeps_them_when_its_source_is_deleted(place: Place) -> None:
    async with place.runtime(clerk()) as runtime:
        session = await runtime.session("chat")
        await ask(session, "write report hello")
        branch = await session.fork()
        await runtime.sessions.delete("chat")
        await runtime.store.sweep(grace=0)
        assert await ask(branch, "read report") == [Ok("hello")]

        await runtime.sessions.delete(branch.id)

        assert await runtime.store.sweep(grace=0) == 1


# ---------------------------------------------------------------------- which attempts count


async def test_what_a_call_put_stays_when_it_fails(place: Place) -> None:
    @tool
    async def build(ctx: ToolContext[Any]) -> str:
        """Build, and keep the log."""
        await ctx.artifacts.put("line 1: error", name="report")
        raise ToolError("the build failed")

    async with place.runtime(clerk(build)) as runtime:
        session = await runtime.session("chat")
        assert await ask(session, "build") == [Failed("tool_error", "the build failed")]

        assert await ask(session, "read report") == [Ok("line 1: error")]


async def test_only_the_last_attempt_counts(place: Place) -> None:
    @tool(retries=1)
    async def flaky(ctx: ToolContext[Any]) -> str:
        """Fail once."""
        if ctx.attempt == 1:
            await ctx.artifacts.put("half", name="report")
            raise Retry("again", after=0)
        return "done"

    async with place.runtime(clerk(flaky)) as runtime:
        session = await runtime.session("chat")
        result = await session.run("flaky")

        assert result.tool_calls[0].artifacts == ()
        assert await ask(session, "read report") == [NOBODY]
        assert await runtime.store.sweep(grace=0) == 1


async def test_what_was_never_recorded_is_swept_and_what_was_is_not(place: Place) -> None:
    put = asyncio.Event()

    @tool
    async def hang(ctx: ToolContext[Any]) -> None:
        """Put something and never end."""
        await ctx.artifacts.put("lost", name="report")
        put.set()
        await asyncio.Event().wait()

    runtime = await place.runtime(clerk(hang)).__aenter__()
    session = await runtime.session("chat")
    await ask(session, "write kept hello")
    await session.send("hang")
    await asyncio.wait_for(put.wait(), SOON)
    await crash(runtime)
    async with place.runtime(clerk(hang)) as runtime:
        session = await runtime.session("chat")
        (unknown,) = (await session.result("chat.2")).tool_calls

        assert isinstance(unknown.outcome, OutcomeUnknown)
        assert unknown.artifacts == ()
        assert await runtime.store.sweep(grace=0) == 1
        assert await ask(session, "read report;read kept") == [NOBODY, Ok("hello")]


async def test_what_was_put_before_a_cancel_is_evidence(place: Place) -> None:
    put = asyncio.Event()

    @tool
    async def hang(ctx: ToolContext[Any]) -> None:
        """Put something and never end."""
        await ctx.artifacts.put("so far", name="report")
        put.set()
        await asyncio.Event().wait()

    async with place.runtime(clerk(hang)) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("hang")
        await asyncio.wait_for(put.wait(), SOON)
        await session.cancel()
        (call,) = (await receipt.result(SOON)).tool_calls

        assert isinstance(call.outcome, OutcomeUnknown)
        assert await ask(session, "read report") == [Ok("so far")]


async def test_a_body_that_was_left_behind_can_put_nothing_more(place: Place) -> None:
    late: list[ToolError] = []
    go = asyncio.Event()

    @tool(timeout=0.01)
    async def deaf(ctx: ToolContext[Any]) -> None:
        """Ignore the cancellation."""
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue
        try:
            await ctx.artifacts.put("too late", name="report")
        except ToolError as error:
            late.append(error)

    async with place.runtime(clerk(deaf)) as runtime:
        session = await runtime.session("chat")
        (outcome,) = await ask(session, "deaf")
        go.set()
        await until(lambda: late)

        assert isinstance(outcome, OutcomeUnknown)
        assert (late[0].code, late[0].message) == ("call_is_over", "the call is over: artifact 'report' is not kept")
        assert await ask(session, "read report") == [NOBODY]


async def test_a_deferred_call_hands_over_what_it_has_put(place: Place) -> None:
    keys: list[str] = []

    @tool(deferred=True)
    async def order(ctx: ToolContext[Any]) -> None:
        """Order something: the form is kept, the answer comes later."""
        await ctx.artifacts.put("form", name="report")
        keys.append(ctx.defer())

    form = Artifact("report", digest(b"form"), 4, "text/plain; charset=utf-8")
    async with place.runtime(clerk(order)) as runtime:
        session = await runtime.session("chat")
        await session.run("order")
        assert [p.artifacts for p in await session.pending()] == [(form,)]
        assert await runtime.store.sweep(grace=0) == 0
    async with place.runtime(clerk(order)) as runtime:
        await runtime.resolve(keys[0], "here it is")
        session = await runtime.session("chat")
        (call,) = (await session.result("chat.1")).tool_calls

        assert (call.outcome, call.artifacts) == (Ok("here it is"), (form,))
        assert await ask(session, "read report") == [Ok("form")]


async def test_a_deferred_call_that_is_cancelled_keeps_what_it_has_put(place: Place) -> None:
    handed = asyncio.Event()
    go = asyncio.Event()

    @tool(deferred=True)
    async def order(ctx: ToolContext[Any]) -> None:
        """Order something."""
        await ctx.artifacts.put("form", name="report")
        ctx.defer()
        handed.set()

    @tool
    async def wait() -> None:
        """Keep the turn from parking."""
        await go.wait()

    async with place.runtime(clerk(order, wait)) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("order;wait")
        await asyncio.wait_for(handed.wait(), SOON)
        await until(session.pending)
        await session.cancel()
        result: TurnResult[Any] = await receipt.result(SOON)

        assert [len(call.artifacts) for call in result.tool_calls] == [1, 0]


# ---------------------------------------------------------------------- what may be put


async def test_a_tool_on_a_thread_is_told_to_be_async(place: Place) -> None:
    @tool
    def blocking(ctx: ToolContext[Any]) -> None:
        """Cannot await."""
        _ = ctx.artifacts.put("x", name="report")

    async with place.runtime(clerk(blocking)) as runtime:
        (outcome,) = await ask(await runtime.session("chat"), "blocking")

    assert outcome == Failed(
        "artifacts_need_async",
        "tool 'blocking' runs on a thread and cannot await its artifacts: declare it with `async def`",
    )


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201, 5, None], ids=["empty", "break", "long", "number", "none"])
async def test_a_name_that_is_none_is_refused(name: Any) -> None:
    artifacts = ToolContext().artifacts

    with pytest.raises(ToolError, match="1 to 200 printable characters") as put:
        await artifacts.put("x", name=name)
    with pytest.raises(ToolError, match="1 to 200 printable characters"):
        await artifacts.get(name)
    assert put.value.code == "invalid_artifact"


async def test_what_is_neither_bytes_nor_text_is_refused() -> None:
    thing: Any = {"a": 1}

    with pytest.raises(ToolError, match="bytes or a string, not a dict"):
        await ToolContext().artifacts.put(thing, name="x")


async def test_more_than_a_session_can_carry_is_refused() -> None:
    with pytest.raises(ToolError, match="33,554,433 bytes, the limit is 33,554,432") as refused:
        await ToolContext().artifacts.put(bytes(32 * 1024 * 1024 + 1), name="x")
    assert refused.value.code == "artifact_too_large"


async def test_a_tool_can_be_tested_without_a_runtime() -> None:
    ctx: ToolContext[Any] = ToolContext()

    assert await write("report", "lone \ud800", ctx) == "wrote report"
    assert await read("report", ctx) == "lone \ufffd"
    with pytest.raises(ToolError, match="no artifact 'other'"):
        await read("other", ctx)


# ---------------------------------------------------------------------- a real kill

KILLED = '''
import asyncio, os, signal, sys
from perdure import Agent, Runtime, ToolCall, ToolContext, tool
from perdure.testing import FunctionModel

@tool
async def write(ctx: ToolContext) -> str:
    """Put a text."""
    await ctx.artifacts.put("survives", name="report")
    return "wrote"

@tool
async def die(ctx: ToolContext) -> None:
    """Put another one and die before anything of it is recorded."""
    await ctx.artifacts.put("does not", name="report")
    os.kill(os.getpid(), signal.SIGKILL)

def model(request):
    return [ToolCall(name=["write", "die"][sum(m.role == "assistant" for m in request.messages)])]

async def main():
    agent = Agent(FunctionModel(model), name="clerk", tools=[write, die])
    async with Runtime(sys.argv[1], agents=[agent]) as runtime:
        await (await runtime.session("chat")).run("go")

asyncio.run(main())
'''


@pytest.mark.kill
async def test_what_was_recorded_survives_a_kill_and_what_was_not_is_swept(tmp_path: Path) -> None:
    store = tmp_path / "agent.db"
    child = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", KILLED, str(store)], timeout=60, capture_output=True, check=False
    )
    assert child.returncode == -9, child.stderr

    async with Runtime(store, agents=[clerk()]) as runtime:
        session = await runtime.session("chat")
        first, second = (await session.result("chat.1")).tool_calls

        assert [a.name for a in first.artifacts] == ["report"]
        assert isinstance(second.outcome, OutcomeUnknown)
        assert await runtime.store.sweep(grace=0) == 1
        assert await ask(session, "read report") == [Ok("survives")]
