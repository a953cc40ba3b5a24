"""What a hook is shown is its own: whatever it does to it, nobody else sees anything of that."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from perdure import Agent, Message, ModelRequest, Plugin, ToolCall, tool
from perdure.model.codec import CopiedOnRead, copied, read_only_spec
from perdure.model.event import AnyEvent, ToolFinished, ToolStarted, TurnCommitted
from perdure.model.message import Text, ToolResult
from perdure.model.outcome import Finished
from perdure.model.plugin import PluginSnapshot
from perdure.model.session import Settings, ToolState
from perdure.model.tool import Ok, PreparedCall, ToolSpec
from perdure.plugins import (
    CatalogContext,
    CheckpointContext,
    CommandContext,
    CompactContext,
    PromptContext,
    SessionContext,
    SnapshotReader,
    SnapshotWriter,
    ToolCallContext,
    ToolEndContext,
    TurnContext,
    TurnEndContext,
    ViewContext,
    command,
)
from perdure.ports.tool import CallContext
from perdure.testing import FunctionModel
from tests.kit import SOON, Place
from tests.plugins.made import having


class Reply(Struct):
    rows: list[dict[str, int]]


@tool
async def look_up(where: dict[str, list[str]]) -> dict[str, Any]:
    """Look something up."""
    return {"rows": [{"n": 1}, {"n": 2}], "where": where}


def spoil(value: Any) -> None:
    """Change whatever can be changed of a value, from the inside out."""
    if isinstance(value, Struct):
        for name in value.__struct_fields__:
            if name not in ("host", "deps"):
                spoil(getattr(value, name))
    elif isinstance(value, list | tuple | dict):
        for each in list(value.values() if isinstance(value, dict) else value):
            spoil(each)
        spoilt: Any = value
        for change in ("reverse", "clear", "pop"):
            with contextlib.suppress(AttributeError, TypeError, KeyError, IndexError):
                getattr(spoilt, change)()
        with contextlib.suppress(TypeError):
            spoilt["spoilt"] = True
        with contextlib.suppress(AttributeError, TypeError):
            spoilt.append("spoilt")


class Vandal(Plugin):
    """Spoils everything that it is shown, and says nothing."""

    id = "vandal"

    def for_session(self, ctx: SessionContext) -> Vandal:
        spoil(ctx)
        return copy.copy(self)

    def hidden_tools(self, ctx: CatalogContext) -> Sequence[str]:
        spoil(ctx)
        return ()

    def prompt(self, ctx: PromptContext) -> Sequence[str]:
        spoil(ctx)
        return ()

    def transform_view(self, ctx: ViewContext, messages: Sequence[Message]) -> Sequence[Message]:
        spoil(messages)
        return messages

    def compact(self, ctx: CompactContext) -> None:
        spoil(ctx)

    def before_turn(self, ctx: TurnContext) -> None:
        spoil(ctx)

    async def at_checkpoint(self, ctx: CheckpointContext) -> None:
        spoil(ctx)

    async def after_turn(self, ctx: TurnEndContext) -> None:
        spoil(ctx)
        host: Any = ctx.host
        spoil(await host.snapshot())

    def turn_finalized(self, ctx: TurnEndContext) -> None:
        spoil(ctx)

    def turn_persisted(self, ctx: TurnEndContext) -> None:
        spoil(ctx)

    def before_tool_call(self, ctx: ToolCallContext) -> None:
        spoil(ctx)

    async def after_tool_call(self, ctx: ToolEndContext) -> None:
        spoil(ctx)


class Witness(Vandal):
    """Remembers what it is shown, by hook."""

    id = "witness"

    def __init__(self) -> None:
        self.shown: list[tuple[str, bytes]] = []


def _watching(hook: str) -> Any:
    def watch(self: Witness, ctx: Any, *rest: Any) -> Any:
        told = {n: getattr(ctx, n) for n in ctx.__struct_fields__ if n not in ("host", "deps")}
        self.shown.append((hook, msgspec.json.encode([told, rest])))
        if hook == "hidden_tools":
            return ()
        return copy.copy(self) if hook == "for_session" else rest[0] if rest else None

    return watch


for _hook in [name for name in vars(Vandal) if not name.startswith("_") and name != "id"]:
    setattr(Witness, _hook, _watching(_hook))


async def conversation(place: Place, *plugins: Plugin) -> tuple[list[bytes], list[Any]]:
    """What the model is shown in two turns, and what is left of them."""
    requests: list[bytes] = []

    def answer(request: ModelRequest) -> Any:
        requests.append(msgspec.json.encode([request.messages, request.tools]))
        if request.messages[-1].role == "user":
            return [ToolCall("c", "look_up", {"where": {"in": ["here", "there"]}})]
        return '{"rows": [{"n": 3}]}'

    agent = Agent(FunctionModel(answer), tools=[look_up], plugins=plugins, output=Reply)
    left: list[Any] = []
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s", options={"witness": {"deep": [{"n": 1}]}, "vandal": {"deep": [1]}})
        for text in ("one", "two"):
            result = await session.run(text)
            calls = [replace(each, duration_ms=0) for each in result.tool_calls]
            left += [msgspec.to_builtins(result.outcome), result.issues, msgspec.to_builtins(calls)]
            left.append(msgspec.to_builtins(await session.history()))
    async with place.runtime(agent) as runtime:
        left.append(msgspec.to_builtins(await (await runtime.session("s")).history()))
    return requests, left


async def test_whatever_a_hook_does_to_what_it_is_shown_nobody_else_sees_anything_of_it(
    place: Place, tmp_path_factory: pytest.TempPathFactory
) -> None:
    alone, beside = Witness(), Witness()
    other = having("turn_persisted", lambda ctx: None, "vandal", for_session=lambda self, ctx: copy.copy(self))

    plain = await conversation(Place(place.kind, tmp_path_factory.mktemp("plain")), other, alone)
    spoilt = await conversation(place, Vandal(), beside)

    assert spoilt == plain
    assert beside.shown == alone.shown
    assert {hook for hook, _ in alone.shown} == {
        *("for_session", "hidden_tools", "prompt", "transform_view", "compact", "before_turn", "at_checkpoint"),
        *("after_turn", "turn_finalized", "turn_persisted", "before_tool_call", "after_tool_call"),
    }


async def test_history_is_a_tuple_that_cannot_be_emptied(place: Place) -> None:
    kinds = list[type]()

    def before_turn(ctx: TurnContext) -> None:
        history: Any = ctx.history
        kinds.append(type(history))
        with pytest.raises(AttributeError):
            history.clear()

    agent = Agent(FunctionModel(lambda request: "hi"), plugins=[having("before_turn", before_turn)])
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        await session.run("two")
        history = await session.history()

    assert all(issubclass(kind, tuple) for kind in kinds)
    assert [message.text for message in history] == ["one", "hi", "two", "hi"]


async def test_a_state_of_tools_that_a_plugin_or_a_host_changes_in_place_is_that_of_no_session(place: Place) -> None:
    async def before_turn(ctx: TurnContext) -> None:
        spoil(await ctx.host.tool_state())
        spoil((await ctx.host.snapshot()).tools)

    agent = Agent(FunctionModel(lambda request: "hi"), tools=[look_up], plugins=[having("before_turn", before_turn)])
    async with place.runtime(agent) as runtime:
        session, other = await runtime.session("s"), await runtime.session("other")
        spoil(await session.tools.state())
        await session.run("hi")

        assert await session.tools.state() == ToolState()
        assert (await other.tools.state()).members == {}
    assert Settings().tools.members == {}


async def test_what_a_projection_is_shown_is_its_own(place: Place) -> None:
    def project(ctx: ToolEndContext) -> str:
        spoil(ctx)
        return "seen"

    def answer(request: ModelRequest) -> Any:
        return "done" if len(request.messages) > 1 else [ToolCall("c", "look_up", {"where": {"in": ["here"]}})]

    agent = Agent(FunctionModel(answer), tools=[look_up], plugins=[having("project_result", project)])
    async with place.runtime(agent) as runtime:
        result = await (await runtime.session("s")).run("go")
        outcome = result.tool_calls[0].outcome
        assert isinstance(outcome, Ok)
        assert outcome.whole is not None
        kept = await runtime.store.blobs.get(outcome.whole.digest)

    assert result.tool_calls[0].args == {"where": {"in": ["here"]}}
    assert msgspec.json.decode(kept) == {"rows": [{"n": 1}, {"n": 2}], "where": {"in": ["here"]}}


async def test_what_is_shown_of_a_late_result_is_the_hooks_own(place: Place) -> None:
    shown = list[bytes]()

    @tool(background=True)
    async def crawl(site: str) -> dict[str, Any]:
        """Crawl."""
        return {"pages": [1, 2]}

    def answer(request: ModelRequest) -> Any:
        shown.append(msgspec.json.encode(request.tools))
        return [ToolCall("c", "crawl", {"site": "a"})] if len(request.messages) == 1 else "done"

    agent = Agent(FunctionModel(answer), tools=[crawl], plugins=[having("after_tool_call", spoil)])
    async with place.runtime(agent) as runtime:
        await (await runtime.session("s")).run("go")
        value = await runtime.handle("s.1.1.0").result(SOON)
        assert await runtime.wait_idle(SOON)

    assert value == {"pages": [1, 2]}
    assert len(shown) > 2
    assert set(shown) == {shown[0]}


class Hoard(Plugin):
    """Goes on with the very object that it was given back."""

    id = "hoard"

    def __init__(self) -> None:
        self.things: list[str] = []
        self._revision = 0

    def for_session(self, ctx: SessionContext) -> Hoard:
        return Hoard()

    @property
    def revision(self) -> int:
        return self._revision

    def snapshot(self, writer: SnapshotWriter) -> Any:
        return {"things": self.things}

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        if snapshot.state is not None:
            self.things, self._revision = snapshot.state["things"], snapshot.revision

    @command
    def add(self, thing: str) -> list[str]:
        """Add one."""
        self.things.append(thing)
        self._revision += 1
        return self.things

    @command
    def meddle(self, ctx: CommandContext) -> list[str]:
        """Change something and forget to count it."""
        self.things.append("uncounted")
        return self.things


async def test_a_state_that_a_plugin_was_given_back_is_its_own(place: Place) -> None:
    agent = Agent(FunctionModel(lambda request: "hi"), plugins=[Hoard()])
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        await session.call("hoard.add", {"thing": "one"})
        await session.run("hi")
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        await session.call("hoard.meddle")
        branch = await session.fork()

        assert (await branch.call("hoard.add", {"thing": "two"})).output == ["one", "two"]


# ---------------------------------------------------------------------- the values themselves


def test_items_of_a_view_are_copied_when_they_are_taken_out() -> None:
    plain, nested = Message("user", "hi"), Message("tool", (ToolResult("c", "t", {"a": [1]}),))
    seen = CopiedOnRead([plain, nested])

    assert seen[0] is plain
    assert seen[1] == nested
    assert seen[1] is not nested
    for taken in (seen[1], seen[-1:][0], [*seen][1], list(seen)[1], operator.add(seen, ())[1], next(reversed(seen))):
        taken.tool_results[0].content["a"].append(2)
    assert nested.tool_results[0].content == {"a": [1]}
    assert isinstance(seen[:1], tuple)
    assert seen == (plain, nested)


def test_what_cannot_be_changed_is_shared() -> None:
    message = Message("assistant", (Text("hi"), ToolCall("c", "t", {"a": 1})))

    mine = copied(message)

    assert mine == message
    assert mine.parts[0] is message.parts[0]
    assert mine.tool_calls[0].args is not message.tool_calls[0].args


def test_a_schema_is_read_only_and_a_copy_of_it_is_not() -> None:
    spec = ToolSpec("t", input_schema={"properties": {"n": {"enum": [1]}}, "required": ["n"]})
    shown = read_only_spec(spec)

    assert shown == spec
    assert msgspec.json.encode(shown) == msgspec.json.encode(spec)
    with pytest.raises(TypeError, match="read-only"):
        shown.input_schema["properties"]["n"]["enum"].append(2)
    with pytest.raises(TypeError, match="read-only"):
        shown.input_schema.update(required=[])
    mine = copy.deepcopy(shown.input_schema)
    mine["properties"]["n"]["enum"].append(2)
    assert type(mine) is dict
    assert spec.input_schema == {"properties": {"n": {"enum": [1]}}, "required": ["n"]}


# ---------------------------------------------------------------------- beside hooks


async def test_an_event_that_a_reader_changes_is_changed_for_nobody_else(place: Place) -> None:
    def answer(request: ModelRequest) -> Any:
        return text if len(request.messages) > 1 else [ToolCall("c", "look_up", {"where": {"in": ["here"]}})]

    text = '{"rows": []}'
    again = list[AnyEvent]()
    agent = Agent(FunctionModel(answer), tools=[look_up], output=Reply)
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        cursors = list[str]()
        async with session.stream("go") as events:
            async for event in events:
                cursors.append(event.cursor)
                spoil(event)
            result = await events.result()
            spoil((await events.result()).outcome)
        async for event in session.observe(cursors[0]):
            again.append(event)
            if isinstance(event, TurnCommitted):
                break

    assert result.tool_calls[0].args == {"where": {"in": ["here"]}}
    assert result.tool_calls[0].outcome == Ok({"rows": [{"n": 1}, {"n": 2}], "where": {"in": ["here"]}})
    assert [event.args for event in again if isinstance(event, ToolStarted)] == [{"where": {"in": ["here"]}}]
    assert [event.outcome for event in again if isinstance(event, ToolFinished)] == [result.tool_calls[0].outcome]
    assert [event.outcome for event in again if isinstance(event, TurnCommitted)] == [Finished(text, {"rows": []})]


class Remote:
    """Tools that live elsewhere, and that use what they are given as they like."""

    def specs(self) -> Sequence[ToolSpec]:
        return [ToolSpec("remote", input_schema={"type": "object"})]

    async def prepare(self, call: PreparedCall, ctx: CallContext) -> PreparedCall:
        prepared = copy.deepcopy(call)
        spoil(call)
        return prepared

    async def execute(self, call: PreparedCall, ctx: CallContext) -> Any:
        spoil(call)
        return "done"


async def test_arguments_that_a_provider_of_tools_changes_are_its_own(place: Place) -> None:
    seen = list[Any]()

    def answer(request: ModelRequest) -> Any:
        return "done" if len(request.messages) > 1 else [ToolCall("c", "remote", {"rows": [1, 2]})]

    def after(ctx: ToolEndContext) -> None:
        seen.append(ctx.args)

    agent = Agent(FunctionModel(answer), tools=[Remote()], plugins=[having("after_tool_call", after)])
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        history = await session.history()

    assert result.tool_calls[0].args == {"rows": [1, 2]}
    assert history[1].tool_calls[0].args == {"rows": [1, 2]}
    assert seen == [{"rows": [1, 2]}]


async def test_what_is_read_of_a_process_is_the_readers_own(place: Place) -> None:
    @tool(background=True)
    async def crawl(site: str) -> dict[str, Any]:
        """Crawl."""
        return {"pages": [1, 2]}

    def answer(request: ModelRequest) -> Any:
        return [ToolCall("c", "crawl", {"site": "a"})] if len(request.messages) == 1 else "done"

    async def after_turn(ctx: TurnEndContext) -> None:
        host: Any = ctx.host
        spoil(await host.list_background_tasks(include_ended=True))

    agent = Agent(FunctionModel(answer), tools=[crawl], plugins=[having("after_turn", after_turn)])
    async with place.runtime(agent) as runtime:
        await (await runtime.session("s")).run("go")
        handle = runtime.handle("s.1.1.0")
        await handle.result(SOON)
        assert await runtime.wait_idle(SOON)
        plain = msgspec.json.encode([await handle.record(), [event async for event in handle.events()]])
        for read in (handle.record, handle.outcome, runtime.processes.list):
            spoil(await read())
        spoil([event async for event in handle.events()])

        assert msgspec.json.encode([await handle.record(), [event async for event in handle.events()]]) == plain
        assert await handle.result(SOON) == {"pages": [1, 2]}
