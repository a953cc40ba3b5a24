"""`Runtime(deps=…)`: an object for all runs, or a function of the caller that makes objects for each run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest

from perdure import Agent, Caller, Plugin, ProcessContext, Retry, Runtime, ToolContext, process, tool
from perdure.errors import DepsFailed, InvalidDefinition, ProcessStuck
from perdure.model.outcome import Waiting
from perdure.model.tool import Cancelled, Failed
from perdure.plugins import QueryContext, TurnContext, query
from perdure.testing import VirtualClock
from tests.kit import SOON, Place, agent_calling, crash, until, untyped


@tool
async def who(ctx: ToolContext[Any]) -> str:
    """Says what it was given."""
    return str(ctx.deps)


@process
async def named(ctx: ProcessContext[Any]) -> str:
    return str(ctx.deps)


def deps_of(caller: Caller) -> str:
    return f"deps of {caller.session_id!r} for {caller.agent!r}"


async def deps_later(caller: Caller) -> str:
    await asyncio.sleep(0)
    return deps_of(caller)


@contextlib.asynccontextmanager
async def deps_entered(caller: Caller) -> AsyncGenerator[str]:
    yield deps_of(caller)


class Maker:
    def deps_for(self, caller: Caller) -> str:
        return deps_of(caller)


class Ledger:
    """What was made for whom, and what has been left."""

    def __init__(self, fail: list[BaseException] | None = None) -> None:
        self.made: list[Caller] = []
        self.left: list[BaseException | None] = []
        self.fail = fail or []

    @contextlib.asynccontextmanager
    async def deps(self, caller: Caller) -> AsyncGenerator[str]:
        if self.fail:
            raise self.fail.pop(0)
        self.made.append(caller)
        try:
            yield f"deps {len(self.made)}"
        except BaseException as error:
            self.left.append(error)
            raise
        self.left.append(None)


@pytest.mark.parametrize(
    "deps",
    [deps_of, deps_later, deps_entered, Maker().deps_for, functools.partial(deps_of)],
    ids=["sync", "async", "context manager", "method", "partial"],
)
async def test_a_function_makes_what_the_tools_of_a_turn_see(deps: Any) -> None:
    async with Runtime("memory", agents=[agent_calling("who", tools=[who])], deps=deps) as runtime:
        result = await (await runtime.session("chat")).run("go")

    assert result.tool_calls[0].value == "deps of 'chat' for 'assistant'"


class Pool:
    """An object of the host's that can be called and entered, and belongs to all runs."""

    entered = 0

    def __call__(self, caller: Caller) -> str:
        return "called"

    async def __aenter__(self) -> Pool:
        self.entered += 1
        return self

    async def __aexit__(self, *how: object) -> None: ...

    def __str__(self) -> str:
        return f"a pool, entered {self.entered} times"


@pytest.mark.parametrize("as_function", [False, True], ids=["object", "returned"])
async def test_an_object_is_given_as_it_is_though_it_could_be_called_or_entered(as_function: bool) -> None:
    pool = Pool()
    deps = (lambda _: pool) if as_function else pool
    async with Runtime("memory", agents=[agent_calling("who", tools=[who])], deps=deps) as runtime:
        result = await (await runtime.session("chat")).run("go")

    assert result.tool_calls[0].value == "a pool, entered 0 times"


async def test_every_turn_has_objects_of_its_own_which_are_left_before_its_result_is_there() -> None:
    ledger = Ledger()
    async with Runtime("memory", agents=[agent_calling("who", tools=[who])], deps=ledger.deps) as runtime:
        session = await runtime.session("chat")
        first = await session.run("go")
        after_first = list(ledger.left)
        second = await session.run("again")

    assert [first.tool_calls[0].value, second.tool_calls[0].value] == ["deps 1", "deps 2"]
    assert (after_first, ledger.left) == ([None], [None, None])


async def test_hooks_queries_and_processes_see_the_objects_of_their_run(place: Place) -> None:
    seen: list[Any] = []

    class Seeing(Plugin):
        id = "seeing"

        def before_turn(self, ctx: TurnContext) -> None:
            seen.append(ctx.deps)

        @query
        def asked(self, ctx: QueryContext) -> str:
            return str(ctx.deps)

    agent = Agent("scripted", plugins=[Seeing()])
    async with place.runtime(agent, processes=[named], deps=deps_entered) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        asked = await runtime.operations.call("seeing.asked", session="chat")
        by_session = await (await session.start(named)).result()
        by_host = await (await runtime.start(named)).result()

    assert set(seen) == {"deps of 'chat' for 'assistant'"}
    assert asked.output == "deps of 'chat' for 'assistant'"
    assert by_session == "deps of 'chat' for 'assistant'"
    assert by_host == "deps of '' for ''"


async def test_a_turn_and_a_process_leave_their_objects_at_their_park_and_get_new_ones_after_it(place: Place) -> None:
    @tool(approval="ask")
    async def asks(ctx: ToolContext[Any]) -> str:
        """Waits for a person first."""
        return str(ctx.deps)

    @process
    async def waits(ctx: ProcessContext[Any]) -> list[str]:
        before = str(ctx.deps)
        await ctx.wait_signal("go")
        return [before, str(ctx.deps)]

    ledger = Ledger()
    async with place.runtime(agent_calling("asks", tools=[asks]), processes=[waits], deps=ledger.deps) as runtime:
        session = await runtime.session("chat")
        parked = await session.run("go")
        assert isinstance(parked.outcome, Waiting)
        assert ledger.left == [None]
        await session.approve(parked.pending[0].call_id)
        result = await session.result(parked.turn_id)
        handle = await runtime.start(waits)
        await until(lambda: len(ledger.left) == 3)
        await handle.signal("go")
        ends = await handle.result()

    assert result.tool_calls[0].value == "deps 2"
    assert ends == ["deps 4", "deps 4"]
    assert len(ledger.made) == len(ledger.left) == 4


async def test_metadata_reaches_the_function_in_turns_processes_and_queries() -> None:
    seen: list[Any] = []

    class Asked(Plugin):
        id = "asked"

        @query
        def nothing(self, ctx: QueryContext) -> str:
            return ""

    @tool
    async def starts(ctx: ToolContext[Any]) -> str:
        """Starts a process."""
        return (await ctx.start(named)).id

    agent, ada = agent_calling("starts", tools=[starts], plugins=[Asked()]), {"user": "ada"}
    async with Runtime(
        "memory", agents=[agent], processes=[named], deps=lambda caller: seen.append(dict(caller.metadata))
    ) as runtime:
        session = await runtime.session("chat", metadata=ada)
        await session.run("go", metadata={"source": "mail"})
        await runtime.operations.call("asked.nothing", session="chat")
        await runtime.wait_idle()

    assert seen.count(ada | {"source": "mail"}) >= 2  # the turn and its process
    assert ada in seen  # the query


async def test_recovery_makes_the_objects_again(place: Place) -> None:
    ledger = Ledger()
    begun = asyncio.Event()

    @tool(recovery="rerun")
    async def holds(ctx: ToolContext[Any]) -> str:
        """Waits for ever in its first run."""
        if ctx.deps == "deps 1":
            begun.set()
            await asyncio.Event().wait()
        return str(ctx.deps)

    agent = agent_calling("holds", tools=[holds])
    first = await place.runtime(agent, deps=ledger.deps).__aenter__()
    receipt = await (await first.session("chat")).send("go")
    await begun.wait()
    await crash(first)
    async with place.runtime(agent, deps=ledger.deps) as runtime:
        result = await (await runtime.session("chat")).result(receipt.turn_id)

    assert result.tool_calls[0].value == "deps 2"
    assert ledger.made == [Caller("chat", "assistant"), Caller("chat", "assistant")]


async def test_a_turn_without_records_fails_with_the_reason_and_others_go_on() -> None:
    def deps(caller: Caller) -> str:
        if caller.session_id == "bad":
            raise LookupError("no such tenant")
        return "fine"

    async with Runtime("memory", agents=[agent_calling("who", tools=[who])], deps=deps) as runtime:
        bad = await (await runtime.session("bad")).run("go")
        good = await (await runtime.session("good")).run("go")

    assert isinstance(bad.outcome, Failed)
    assert bad.outcome.code == "deps_failed"
    assert "LookupError: no such tenant" in bad.outcome.message
    assert good.tool_calls[0].value == "fine"


async def test_a_turn_with_records_is_set_aside_and_goes_on_when_it_is_resumed(place: Place) -> None:
    @tool(approval="ask")
    async def asks(ctx: ToolContext[Any]) -> str:
        """Waits for a person first."""
        return str(ctx.deps)

    ledger = Ledger()
    async with place.runtime(agent_calling("asks", tools=[asks]), deps=ledger.deps) as runtime:
        session = await runtime.session("chat")
        parked = await session.run("go")
        ledger.fail.append(OSError("the database is away"))
        await session.approve(parked.pending[0].call_id)
        with pytest.raises(DepsFailed, match="the database is away"):
            await session.result(parked.turn_id)
        await until(lambda: runtime.sessions.list(state="stuck"))
        (stuck,) = await runtime.sessions.list(state="stuck")
        await session.resume()
        result = await session.result(parked.turn_id)

    assert "the database is away" in str(stuck.reason)
    assert result.text == "done"
    assert result.tool_calls[0].value == "deps 2"


async def test_a_process_is_stuck_with_the_reason() -> None:
    ledger = Ledger([OSError("the database is away")])
    async with Runtime("memory", processes=[named], deps=ledger.deps) as runtime:
        handle = await runtime.start(named)
        with pytest.raises(ProcessStuck, match="the database is away"):
            await handle.result(timeout=SOON)


async def test_a_function_that_asks_for_a_retry_is_called_again_then() -> None:
    clock = VirtualClock()
    ledger = Ledger([Retry(after=5), Retry(after=7), Retry(after=3)])
    agent = agent_calling("who", tools=[who])
    async with Runtime("memory", agents=[agent], processes=[named], deps=ledger.deps, clock=clock) as runtime:
        began = clock.monotonic()
        running = asyncio.ensure_future((await runtime.session("chat")).run("go"))
        await until(lambda: len(ledger.fail) == 2)
        clock.advance(5)
        await until(lambda: len(ledger.fail) == 1)
        assert not ledger.made
        clock.advance(7)
        await until(lambda: not ledger.fail)
        clock.advance(3)
        result = await running

    assert result.tool_calls[0].value == "deps 1"
    assert clock.monotonic() - began == 15


async def test_a_turn_whose_objects_never_come_can_be_cancelled() -> None:
    begun = asyncio.Event()

    async def deps(caller: Caller) -> str:
        begun.set()
        await asyncio.Event().wait()
        return "never"

    async with Runtime("memory", agents=[Agent("scripted")], deps=deps) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("go")
        await begun.wait()
        await session.cancel("enough")
        result = await receipt.result()

    assert isinstance(result.outcome, Cancelled)


async def test_a_runtime_can_be_left_while_a_function_hangs() -> None:
    begun = asyncio.Event()

    async def deps(caller: Caller) -> str:
        begun.set()
        await asyncio.Event().wait()
        return "never"

    async with asyncio.timeout(SOON):
        async with Runtime("memory", agents=[Agent("scripted")], processes=[named], deps=deps, grace=0) as runtime:
            await (await runtime.session("chat")).send("go")
            await runtime.start(named)
            await begun.wait()


async def test_what_leaving_raises_changes_no_outcome(caplog: pytest.LogCaptureFixture) -> None:
    @contextlib.asynccontextmanager
    async def deps(caller: Caller) -> AsyncGenerator[str]:
        yield "fine"
        raise OSError("the connection broke")

    async with Runtime("memory", agents=[agent_calling("who", tools=[who])], deps=deps) as runtime:
        result = await (await runtime.session("chat")).run("go")

    assert result.text == "done"
    assert "deps for session chat could not be left" in caplog.text


@contextlib.contextmanager
def entered_without_await(caller: Caller) -> Generator[str]:
    yield "never"


async def gives_a_coroutine(caller: Caller) -> Any:
    return deps_later(caller)


async def ends_the_program(caller: Caller) -> str:
    raise KeyboardInterrupt


async def cancels_itself(caller: Caller) -> str:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)
    return "never"


@pytest.mark.parametrize("deps", [entered_without_await, ends_the_program, cancels_itself])
async def test_a_function_that_makes_nothing_usable_fails_its_turn_alone(deps: Any) -> None:
    async with Runtime("memory", agents=[Agent("scripted")], deps=deps) as runtime:
        result = await (await runtime.session("chat")).run("go")

    assert isinstance(result.outcome, Failed)
    assert result.outcome.code == "deps_failed"


async def undecorated(caller: Caller) -> AsyncGenerator[str]:
    yield "never"


def of_two(caller: Caller, more: str) -> str:
    return more


@pytest.mark.parametrize("deps", [undecorated, of_two, lambda: "nothing"])
def test_a_function_that_cannot_be_called_with_a_caller_is_refused_when_the_runtime_is_made(deps: Any) -> None:
    with pytest.raises(InvalidDefinition, match="deps="):
        Runtime("memory", agents=[Agent("scripted")], deps=untyped(deps))
