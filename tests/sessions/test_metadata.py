"""Whom a session is for: kept with its first input, seen by all that its turns do, and what sessions are found by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from perdure import Agent, Caller, Message, ModelSettings, Plugin, ProcessContext, ToolCall, ToolContext, process, tool
from perdure.engine.journal import load
from perdure.errors import Conflict, InvalidArguments, InvalidInput, MetadataConflict
from perdure.model.llm import ModelRequest, ModelResponse
from perdure.model.monitor import MonitorSpec
from perdure.model.plugin import CreateSession
from perdure.model.record import Said
from perdure.plugins import (
    CatalogContext,
    CommandContext,
    InputContext,
    QueryContext,
    QueueTurn,
    Result,
    SessionContext,
    SnapshotWriter,
    StreamContext,
    TaskContext,
    command,
    query,
    task,
)
from perdure.plugins.hooks import PromptContext, ToolCallContext, TurnEndContext
from perdure.testing import FunctionModel
from tests.kit import Place

pytestmark = pytest.mark.anyio

Seen = list[tuple[str, dict[str, Any]]]


def watched(seen: Seen) -> tuple[Agent[Any], Any]:
    """An agent whose model, hook, tool and background process note whom they work for."""

    @process
    async def job(ctx: ProcessContext[Any]) -> str:
        seen.append(("process", dict(ctx.metadata)))
        await ctx.step(inside)
        return "done"

    @tool
    async def inside(ctx: ToolContext[Any]) -> str:
        """A tool as a step."""
        seen.append(("step", dict(ctx.metadata)))
        return "x"

    @tool
    async def work(ctx: ToolContext[Any]) -> str:
        """Start something, and wait for it."""
        seen.append(("tool", dict(ctx.metadata)))
        handle = await ctx.start(job)
        return str(await handle.result())

    class Watch(Plugin):
        id = "watch"

        async def before_tool_call(self, ctx: ToolCallContext) -> None:
            seen.append(("hook", dict(ctx.metadata)))

    def model(request: ModelRequest) -> str | list[ToolCall]:
        seen.append(("model", dict(request.metadata)))
        return "done" if request.messages[-1].role == "tool" else [ToolCall("", "work", {})]

    return Agent(FunctionModel(model), tools=[work], plugins=[Watch()]), job


async def test_a_turn_and_all_that_it_does_see_the_metadata_of_its_session_and_its_input(
    place: Place,
) -> None:
    seen: Seen = []
    agent, job = watched(seen)
    async with place.runtime(agent, processes=[job]) as runtime:
        session = await runtime.session("a", metadata={"user": "u-17", "paying": True})
        await session.run("go", metadata={"ip": "127.0.0.1"})

    whom = {"user": "u-17", "paying": True, "ip": "127.0.0.1"}
    assert [who for who, _ in seen] == ["model", "hook", "tool", "process", "step", "model"]
    assert [found for _, found in seen] == [whom] * 6


async def test_metadata_of_a_session_is_there_after_a_restart_and_that_of_an_input_is_not_the_next_ones(
    place: Place,
) -> None:
    seen: Seen = []
    agent, job = watched(seen)
    async with place.runtime(agent, processes=[job]) as runtime:
        await (await runtime.session("a", metadata={"user": "u-17"})).run("go", metadata={"ip": "127.0.0.1"})
    seen.clear()
    async with place.runtime(agent, processes=[job]) as runtime:
        await (await runtime.session("a")).run("again")

    assert {tuple(found.items()) for _, found in seen} == {(("user", "u-17"),)}


async def test_opening_a_session_writes_nothing(place: Place) -> None:
    async with place.runtime(Agent("scripted")) as runtime:
        await runtime.session("a", metadata={"user": "u-17"})

        assert await runtime.sessions.list() == []


async def test_a_session_that_exists_is_opened_with_the_same_metadata_or_with_none(
    place: Place,
) -> None:
    async with place.runtime(Agent(FunctionModel(lambda _: "ok"))) as runtime:
        await (await runtime.session("a", metadata={"user": "u-17", "tenant": 4})).run("hello")

        await (await runtime.session("a", metadata={"tenant": 4, "user": "u-17"})).run("the order does not matter")
        await (await runtime.session("a")).run("hello")
        with pytest.raises(MetadataConflict, match=r"'a' has other metadata .* in 'user'") as caught:
            await runtime.session("a", metadata={"user": "u-18", "tenant": 4})
        assert isinstance(caught.value, Conflict)
        assert caught.value.stored == {"user": "u-17", "tenant": 4}


@pytest.mark.parametrize("options", [None, {}])
async def test_of_two_who_open_a_new_session_for_different_people_the_second_is_refused(
    place: Place, options: dict[str, Any] | None
) -> None:
    async with place.runtime(Agent(FunctionModel(lambda _: "ok"))) as runtime:
        one = await runtime.session("a", metadata={"user": "one"}, options=options)
        two = await runtime.session("a", metadata={"user": "two"}, options=options)
        await one.run("hello")

        with pytest.raises(MetadataConflict):
            await two.run("hello")
        assert len(await one.history()) == 2
        [row] = await runtime.sessions.list()
        assert row.metadata == {"user": "one"}


async def test_an_open_turn_keeps_what_it_was_opened_under_and_the_next_sees_the_update(
    place: Place,
) -> None:
    seen: list[str] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    @tool
    async def wait(ctx: ToolContext[Any]) -> str:
        """Wait."""
        seen.append(str(ctx.metadata["user"]))
        begun.set()
        await go_on.wait()
        return "ok"

    def model(request: ModelRequest) -> str | list[ToolCall]:
        seen.append(str(request.metadata["user"]))
        return "done" if request.messages[-1].role == "tool" else [ToolCall("", "wait", {})]

    async with place.runtime(Agent(FunctionModel(model), tools=[wait])) as runtime:
        session = await runtime.session("a", metadata={"user": "old"})
        first, second = await session.send("one"), await session.send("two")
        await begun.wait()
        await session.update(metadata={"user": "newer"})
        await session.update(metadata={"user": "newest"}, title="A talk")
        go_on.set()
        await first.result()
        await second.result()
        [row] = await runtime.sessions.list(metadata={"user": "newest"})

        assert seen == ["old", "old", "old", "newest", "newest", "newest"]
        assert (row.id, row.title) == ("a", "A talk")
        assert await runtime.sessions.list(metadata={"user": "old"}) == []


async def test_sessions_are_found_by_all_of_the_given_metadata_and_page_by_page(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(lambda _: "ok"))) as runtime:
        for number in range(6):
            whom = {"user": f"u-{number % 2}", "tenant": "x" if number < 4 else "y"}
            await (await runtime.session(f"s-{number}", metadata=whom)).run("hello")
        await (await runtime.session("plain")).run("hello")
        listing = runtime.sessions.list
        found = await listing(metadata={"user": "u-1"})
        first = await listing(metadata={"user": "u-1"}, limit=2)
        rest = await listing(metadata={"user": "u-1"}, limit=2, cursor=first[-1].cursor)

        assert [row.id for row in found] == ["s-5", "s-3", "s-1"]
        assert [row.id for row in first] + [row.id for row in rest] == ["s-5", "s-3", "s-1"]
        assert [row.id for row in await listing(metadata={"user": "u-1", "tenant": "y"})] == ["s-5"]
        assert await listing(metadata={"user": "nobody"}) == []
        assert len(await listing(since=found[0].updated)) >= 1
        assert len(await listing()) == 7


async def test_values_of_different_types_are_different(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(lambda _: "ok"))) as runtime:
        for name, value in (("int", 1), ("float", 1.0), ("bool", True), ("text", "1")):
            await (await runtime.session(name, metadata={"v": value})).run("hello")

        for name, value in (("int", 1), ("float", 1.0), ("bool", True), ("text", "1")):
            assert [row.id for row in await runtime.sessions.list(metadata={"v": value})] == [name]


async def test_a_fork_is_for_the_same_person_and_a_deleted_session_is_found_no_more(
    place: Place,
) -> None:
    async with place.runtime(Agent(FunctionModel(lambda _: "ok"))) as runtime:
        session = await runtime.session("a", metadata={"user": "u-17"})
        await session.run("hello")
        await session.fork(session_id="b")
        await runtime.sessions.delete("a")

        assert [row.id for row in await runtime.sessions.list(metadata={"user": "u-17"})] == ["b"]


async def test_the_same_key_with_other_metadata_is_another_input(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(lambda _: "ok"))) as runtime:
        session = await runtime.session("a")
        await session.run("hello", key="k", metadata={"user": "one"})

        assert (await session.send("hello", key="k", metadata={"user": "one"})).known
        with pytest.raises(Conflict):
            await session.send("hello", key="k", metadata={"user": "two"})


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ("u-17", "give a dict"),
        ({"user": None}, "leave out the unknown"),
        ({"user": ["u-17"]}, "text, a number or a truth value"),
        ({"user": {"id": 1}}, "text, a number or a truth value"),
        ({"user": float("nan")}, "text, a number or a truth value"),
        ({"user": 2**70}, "text, a number or a truth value"),
        ({"user": "\ud800"}, "text, a number or a truth value"),
        ({"": "x"}, "a key is text of 1 to 64"),
        ({7: "x"}, "a key is text of 1 to 64"),
        ({"k" * 65: "x"}, "a key is text of 1 to 64"),
        ({"perdure.user": "x"}, "Perdure's own"),
        ({f"k{number}": 1 for number in range(33)}, "32 are the most"),
        ({"text": "x" * 5000}, "4096 are the most"),
    ],
    ids=[
        "no dict",
        "null",
        "list",
        "nested",
        "nan",
        "huge",
        "surrogate",
        "no key",
        "number",
        "long",
        "own",
        "many",
        "big",
    ],
)
async def test_metadata_that_cannot_be_kept_is_refused_before_anything_is_written(
    place: Place, metadata: Any, words: str
) -> None:
    async with place.runtime(Agent(FunctionModel(lambda _: "ok"))) as runtime:
        with pytest.raises(InvalidInput, match=words):
            await runtime.session("a", metadata=metadata)
        session = await runtime.session("a")
        for say in (session.run, session.send, session.steer):
            with pytest.raises(InvalidInput, match=words):
                await say("hello", metadata=metadata)
        with pytest.raises(InvalidInput, match=words):
            await session.update(metadata=metadata)
        with pytest.raises(InvalidInput, match=words):
            await runtime.sessions.list(metadata=metadata)

        assert await runtime.sessions.list() == []


@pytest.mark.parametrize("cursor", ["", "x", "1", "1.x", "-1.2", "9" * 30 + ".1", 7])
async def test_a_cursor_that_is_none_is_refused(place: Place, cursor: Any) -> None:
    async with place.runtime(Agent("scripted")) as runtime:
        with pytest.raises(InvalidInput, match="cursor"):
            await runtime.sessions.list(cursor=cursor)


# ---------------------------------------------------------------------- what else may create a session, or work for it


async def test_values_that_are_equal_to_python_and_not_on_disk_are_a_conflict_and_an_update(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(lambda _: "ok"))) as runtime:
        session = await runtime.session("a", metadata={"v": 1})
        await session.run("hello")

        with pytest.raises(MetadataConflict, match="in 'v'"):
            await runtime.session("a", metadata={"v": True})
        await session.update(metadata={"v": True})
        assert [row.id for row in await runtime.sessions.list(metadata={"v": True})] == ["a"]
        assert await runtime.sessions.list(metadata={"v": 1}) == []


@pytest.mark.parametrize("first", ["configure", "disable", "title", "start"])
async def test_whatever_creates_a_session_keeps_the_metadata_that_it_was_opened_with(place: Place, first: str) -> None:
    seen: Seen = []
    agent, job = watched(seen)
    async with place.runtime(agent, processes=[job]) as runtime:
        session = await runtime.session("a", metadata={"user": "u-17"})
        match first:
            case "configure":
                await session.configure(settings=ModelSettings(temperature=0.5))
            case "disable":
                await session.tools.disable("work")
                await session.tools.enable("work")
            case "title":
                await session.update(title="A talk")
            case _:
                await (await session.start(job, wake="none")).result()
                assert [found for _, found in seen] == [{"user": "u-17"}] * 2
        await session.run("hello")

        assert {tuple(found.items()) for _, found in seen} == {(("user", "u-17"),)}
        assert [row.id for row in await runtime.sessions.list(metadata={"user": "u-17"})] == ["a"]


async def test_a_key_gives_nobody_the_turn_of_a_session_that_is_for_another_person(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(lambda _: "a secret of one"))) as runtime:
        one = await runtime.session("a", metadata={"user": "one"})
        two = await runtime.session("a", metadata={"user": "two"})
        await one.run("hello", key="k")

        with pytest.raises(MetadataConflict):
            await two.run("hello", key="k")


async def test_a_steered_input_keeps_its_metadata_and_the_turn_keeps_that_of_its_opening(place: Place) -> None:
    seen: list[dict[str, Any]] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    @tool
    async def wait(ctx: ToolContext[Any]) -> str:
        """Wait."""
        begun.set()
        await go_on.wait()
        return "ok"

    def model(request: ModelRequest) -> str | list[ToolCall]:
        seen.append(dict(request.metadata))
        return [ToolCall("", "wait", {})] if len(request.messages) == 1 else "done"

    async with place.runtime(Agent(FunctionModel(model), tools=[wait])) as runtime:
        session = await runtime.session("a", metadata={"user": "u-17"})
        running = await session.send("go", metadata={"ip": "one"})
        await begun.wait()
        await session.steer("and this", metadata={"ip": "two"})
        go_on.set()
        await running.result()
        row = await runtime.store.session("a")
        assert row is not None
        [(_, said), *_] = await load(runtime.store, row.sid, 2, 2)

    assert seen == [{"user": "u-17", "ip": "one"}] * 2
    assert isinstance(said, Said)
    assert said.metadata == {"ip": "two"}


async def test_a_subagent_works_for_the_same_person_and_is_found_by_that(place: Place) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    def ask(request: ModelRequest) -> str | list[ToolCall]:
        seen.append(("parent", dict(request.metadata)))
        return "done" if request.messages[-1].role == "tool" else [ToolCall("", "helper", {"task": "look"})]

    def look(request: ModelRequest) -> str:
        seen.append(("child", dict(request.metadata)))
        return "found"

    helper = Agent(FunctionModel(look), name="helper")
    parent = Agent(FunctionModel(ask), name="parent", tools=[helper.as_tool(description="Looks things up.")])
    async with place.runtime(parent) as runtime:
        await (await runtime.session("a", agent="parent", metadata={"user": "u-17"})).run("go", metadata={"ip": "x"})
        found = await runtime.sessions.list(metadata={"user": "u-17"})

    assert seen == [(who, {"user": "u-17", "ip": "x"}) for who in ("parent", "child", "parent")]
    assert {row.agent for row in found} == {"parent", "helper"}


async def test_a_completion_and_a_line_of_the_trace_say_whom_they_are_for(place: Place) -> None:
    asked: list[dict[str, Any]] = []
    lines: list[Mapping[str, Any]] = []

    class Sink:
        def write(self, name: str, payload: Mapping[str, Any]) -> None:
            lines.append(payload)

    class Ask(Plugin):
        id = "ask"

        async def prompt(self, ctx: PromptContext) -> list[str]:
            await ctx.host.complete("what?", label="inner")
            return []

        def after_turn(self, ctx: TurnEndContext) -> None:
            ctx.host.trace("asked")

    def model(request: ModelRequest) -> str:
        asked.append(dict(request.metadata))
        return "ok"

    async with place.runtime(Agent(FunctionModel(model), plugins=[Ask()]), trace=Sink()) as runtime:
        await (await runtime.session("a", metadata={"user": "u-17"})).run("go")

    assert asked == [{"user": "u-17"}] * 2
    assert lines
    assert [line.get("metadata") for line in lines] == [{"user": "u-17"}] * len(lines)


class Clerk(Plugin):
    """Does what it is asked for whom the session is for, and notes who that was."""

    id = "clerk"

    def __init__(self, seen: Seen, changes: int = 0) -> None:
        self.seen, self.changes = seen, changes

    def for_session(self, ctx: SessionContext) -> Clerk:
        self.seen.append(("instance", dict(ctx.metadata)))
        return Clerk(self.seen)

    @property
    def revision(self) -> int:
        return self.changes

    def snapshot(self, writer: SnapshotWriter) -> int:
        return self.changes

    def transform_input(self, ctx: InputContext, message: Message) -> Message:
        self.seen.append(("input", dict(ctx.metadata)))
        return message

    def hidden_tools(self, ctx: CatalogContext) -> list[str]:
        self.seen.append(("hidden tools", dict(ctx.metadata)))
        return [] if ctx.metadata.get("user") == "u-17" else ["work"]

    def monitors(self, ctx: SessionContext) -> list[MonitorSpec]:
        self.seen.append(("monitors", dict(ctx.metadata)))
        return []

    @query
    def look(self, ctx: QueryContext) -> str:
        self.seen.append(("query", dict(ctx.metadata)))
        return str(ctx.deps)

    @command
    async def change(self, ctx: CommandContext) -> str:
        self.changes += 1
        self.seen.append(("command", dict(ctx.metadata)))
        return str(ctx.deps)

    @command
    async def queue(self, ctx: CommandContext) -> Result[str]:
        return Result(str(ctx.deps), directives=(QueueTurn("hello"),))

    @command
    async def begin_child(self, ctx: CommandContext) -> str:
        await ctx.host.create_session(CreateSession(session_id="child"))
        return str(ctx.deps)

    @task
    async def work_long(self, ctx: TaskContext) -> str:
        self.seen.append(("task", dict(ctx.metadata)))
        return str(ctx.deps)


class Counting:
    """A model that counts the tokens of what it would be asked."""

    name = "counting"

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    async def stream(self, request: ModelRequest) -> AsyncIterator[str | ModelResponse]:
        self.seen.append(("model", dict(request.metadata)))
        yield ModelResponse("ok")

    async def count_tokens(self, request: ModelRequest) -> int:
        self.seen.append(("count", dict(request.metadata)))
        return 7


def clerk(seen: Seen) -> Agent[Any]:
    @tool
    def work() -> str:
        """Work."""
        return "done"

    def instructions(caller: Caller) -> str:
        seen.append(("instructions", dict(caller.metadata)))
        return "Work."

    return Agent(Counting(seen), name="clerk", instructions=instructions, tools=[work], plugins=[Clerk(seen)])


def user(caller: Caller) -> str:
    return str(caller.metadata.get("user"))


@pytest.mark.parametrize("asked", ["tools", "orphans", "tokens", "monitors", "query"])
async def test_what_is_asked_of_a_new_session_knows_whom_it_is_for_and_writes_nothing(place: Place, asked: str) -> None:
    seen: Seen = []
    async with place.runtime(clerk(seen), deps=user) as runtime:
        session = await runtime.session("a", metadata={"user": "u-17"})
        match asked:
            case "tools":
                assert [each["name"] for each in await session.tools.list()] == ["work"]
            case "orphans":
                assert await session.tools.orphans() == []
            case "tokens":
                assert await session.count_tokens("hello") == 7
            case "monitors":
                await session.monitors()
            case _:
                assert (await session.call("clerk.look")).output == "u-17"

        assert await runtime.sessions.list() == []
        assert (await session.run("hello")).text == "ok"
        assert [row.id for row in await runtime.sessions.list(metadata={"user": "u-17"})] == ["a"]
    assert {tuple(found.items()) for _, found in seen} == {(("user", "u-17"),)}


@pytest.mark.parametrize("operation", ["change", "queue", "begin_child", "work_long"])
async def test_an_operation_on_a_new_session_works_for_whom_that_was_opened(place: Place, operation: str) -> None:
    seen: Seen = []
    async with place.runtime(clerk(seen), deps=user) as runtime:
        session = await runtime.session("a", metadata={"user": "u-17"})
        output = (await session.call(f"clerk.{operation}")).output
        assert (await runtime.handle(output).result() if operation == "work_long" else output) == "u-17"
        await runtime.wait_idle()
        assert (await session.run("hello")).text == "ok"

        listed = [row.id for row in await runtime.sessions.list(metadata={"user": "u-17"})]
        assert sorted(listed) == (["a", "child"] if operation == "begin_child" else ["a"])
    assert {tuple(found.items()) for _, found in seen} == {(("user", "u-17"),)}


async def test_an_operation_that_is_refused_begins_no_session(place: Place) -> None:
    async with place.runtime(clerk([])) as runtime:
        session = await runtime.session("a", metadata={"user": "u-17"})
        with pytest.raises(InvalidArguments):
            await session.call("clerk.change", {"what": 1})

        assert await runtime.sessions.list() == []


async def test_tools_are_hidden_by_whom_the_session_is_for_now(place: Place) -> None:
    seen: Seen = []
    async with place.runtime(clerk(seen)) as runtime:
        session = await runtime.session("a", metadata={"user": "u-18"})
        await session.run("hello")
        assert await session.tools.list() == []

        await session.update(metadata={"user": "u-17"})
        assert [each["name"] for each in await session.tools.list()] == ["work"]


async def test_what_is_shown_of_an_answer_may_depend_on_whom_it_is_shown_to(place: Place) -> None:
    class Addressing(Plugin):
        id = "addressing"

        def project_prose(self, ctx: StreamContext, text: str) -> str:
            return f"{text}, {ctx.metadata['user']}"

    agent = Agent(FunctionModel(lambda _: "Hello"), plugins=[Addressing()])
    async with place.runtime(agent) as runtime:
        session = await runtime.session("a", metadata={"user": "Ada"})
        await session.run("hi")
        assert [message.text for message in await session.history()] == ["hi", "Hello, Ada"]

        await session.update(metadata={"user": "Bob"})
        assert (await session.history())[-1].text == "Hello, Bob"
