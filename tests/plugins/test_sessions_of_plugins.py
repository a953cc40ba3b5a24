"""What the plugins of a session have at hand: the session itself, each other, and what operations may do with it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from perdure import Agent, Message, ModelRequest, Plugin, ProcessContext, Runtime, process, tool
from perdure.errors import InvalidDefinition, InvalidInput, KeyConflict, OperationFailed
from perdure.model.event import PluginEvent
from perdure.model.plugin import CreateSession, Extension, TriggerEvent
from perdure.model.process import TaskSpec
from perdure.plugins import (
    CatalogContext,
    CommandContext,
    QueryContext,
    QueueTurn,
    Result,
    SessionContext,
    TurnContext,
    command,
    query,
)
from perdure.sessions.services.host import SessionHost
from perdure.testing import FunctionModel
from tests.kit import Place, untyped


def echo(request: ModelRequest) -> str:
    return f"re: {request.messages[-1].text}"


@tool
async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


# ---------------------------------------------------------------------- what an instance knows


class Member(Plugin):
    """Remembers what it was told of its session."""

    def __init__(self, id: str, adds: Mapping[str, Any] | None = None) -> None:
        self.id, self.adds = id, adds or {}
        self.opened: list[SessionContext] = []
        self.catalogues: list[CatalogContext] = []
        self.turns: list[TurnContext] = []

    def for_session(self, ctx: SessionContext) -> Member:
        made = type(self)(self.id, self.adds)
        made.opened, made.catalogues, made.turns = self.opened, self.catalogues, self.turns
        self.opened.append(ctx)
        return made

    def extensions(self) -> Mapping[str, Any]:
        return self.adds

    def hidden_tools(self, ctx: CatalogContext) -> Sequence[str]:
        self.catalogues.append(ctx)
        return ()

    def trigger_events(self) -> Sequence[TriggerEvent]:
        return [TriggerEvent(self.id, "ticked")]

    def before_turn(self, ctx: TurnContext) -> None:
        self.turns.append(ctx)


async def test_a_session_of_plugins_has_everything_that_belongs_to_it(place: Place) -> None:
    first = Member("first", {"menu": {"dish": "soup"}})
    second = Member("second", {"menu": {"dish": "bread"}, "bar": ["water"]})
    agent = Agent(FunctionModel(echo), name="support", tools=[add], plugins=[first, second])
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s", options={"first": {"tone": "kind"}}, metadata={"user": "ada"})
        session.tools.overlay([tool(name="extra")(_extra)])
        await session.run("one")
        child = await SessionHost(runtime._open(), "s", "support").create_session(
            CreateSession(agent="support", hidden=("add",), said=Message("user", "two"))
        )
        await runtime.wait_idle()
        row = await runtime.store.session("s")
        assert row is not None
        setup = await runtime._open().turns.setup(row)
        definition = runtime._open().definitions["support"]

    ctx = first.opened[0]
    assert (ctx.session_id, ctx.agent, ctx.options, dict(ctx.metadata)) == (
        "s",
        "support",
        {"tone": "kind"},
        {"user": "ada"},
    )
    # Instances, in the order of the agent; the host's overlay stands after them.
    assert setup.plugins is not None
    assert [plugin.id for plugin in setup.plugins.plugins] == ["first", "second", "context"]
    # Tools as the session sees them, and the overlay over them.
    assert [spec.name for spec in first.catalogues[0].tools] == ["add", "extra"]
    assert [spec.name for spec in setup.definition.catalog.specs] == ["add", "extra"]
    # What a child may not see, and whose child it is.
    below = next(each for each in first.opened if each.session_id == child)
    assert (below.parent, below.depth, below.hidden) == ("s", 1, frozenset({"add"}))
    # What plugins add to each other, and the events that they will report.
    assert ctx.extensions == {
        "menu": (Extension("first", {"dish": "soup"}), Extension("second", {"dish": "bread"})),
        "bar": (Extension("second", ["water"]),),
    }
    assert [event.source_type for event in definition.plugins.trigger_events] == ["first.ticked", "second.ticked"]
    # What they contribute: who has which hook.
    assert [plugin.id for plugin, _ in setup.plugins.hooks("before_turn").entries] == ["first", "second"]
    # And the services of a turn.
    assert [(turn.session_id, turn.said.text) for turn in first.turns if turn.session_id == "s"] == [("s", "one")]


async def _extra() -> str:
    """Extra."""
    return "extra"


async def test_what_plugins_add_is_a_copy_for_each_that_reads_it() -> None:
    class Greedy(Member):
        def for_session(self, ctx: SessionContext) -> Member:
            ctx.extensions["menu"][0].value.clear()
            return super().for_session(ctx)

    greedy, other = Greedy("greedy", {"menu": {"dish": "soup"}}), Member("other")
    async with Runtime("memory", agents=[Agent(FunctionModel(echo), plugins=[greedy, other])]) as runtime:
        await (await runtime.session("s")).run("one")

    assert other.opened[0].extensions == {"menu": (Extension("greedy", {"dish": "soup"}),)}


async def test_a_plugin_that_only_adds_something_keeps_sessions_as_they_were() -> None:
    class Adding(Plugin):
        id = "adding"

        def extensions(self) -> Mapping[str, Any]:
            return {"menu": "soup"}

    agent = Agent(FunctionModel(echo), plugins=[Adding()])

    assert agent.definition().plugins.lean
    assert (await agent.run("hello")).text == "re: hello"


@pytest.mark.parametrize(
    ("adds", "why"),
    [
        (["menu"], "a list is no dict of JSON"),
        (None, "a NoneType is no dict of JSON"),
        ({"menu": object()}, "cannot be used: InvalidInput"),
        ({7: object()}, "cannot be used"),
    ],
)
def test_what_cannot_be_added_is_refused_with_the_agent(adds: Any, why: str) -> None:
    class Adding(Plugin):
        id = "adding"

        def extensions(self) -> Any:
            return adds

    with pytest.raises(InvalidDefinition, match=why):
        Agent("scripted", plugins=[Adding()])


# ---------------------------------------------------------------------- inputs that plugins inject


async def test_an_injected_input_with_a_key_is_said_once(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(echo), name="support")) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        host = SessionHost(runtime._open(), "s", "support")
        said = [await host.inject_turn_input(Message("user", "by the way"), key="note-1") for _ in range(2)]
        other = await host.inject_turn_input("by the way")
        with pytest.raises(KeyConflict):
            await host.inject_turn_input("something else", key="note-1")
        with pytest.raises(InvalidInput):
            await host.inject_turn_input("something else", key=untyped(7))
        await session.run("two")
        history = [message.text for message in await session.history() if message.role == "user"]

    assert said == ["s.2", "s.2"]
    assert other == "s.3"
    assert history.count("by the way") == 2


# ---------------------------------------------------------------------- operations


class Desk(Plugin):
    """Reads with a query, and does everything with a command."""

    id = "desk"

    @query
    async def work(self, ctx: QueryContext) -> dict[str, Any]:
        """What is under way."""
        tasks = await ctx.host.list_background_tasks()
        await ctx.host.validate_handles_visible([])
        snapshot = await ctx.host.snapshot()
        return {"session": ctx.session_id, "tasks": [task.id for task in tasks], "head": snapshot.head}

    @query
    async def meddle(self, ctx: QueryContext) -> None:
        """Tries to change something."""
        await untyped(ctx.host).start_process("nightly", key="k")

    @command
    async def open(self, ctx: CommandContext) -> Result[dict[str, Any]]:
        """Uses all services of a command."""
        await ctx.host.set_tools(["add"], False)
        child = await ctx.host.create_session(CreateSession(agent="support", session_id="child"))
        appended = await ctx.host.append([Message("user", "for the record")])
        handle = await ctx.host.start_process("nightly", {}, key="night")
        told = QueueTurn("the desk is open", key="open")
        output = {"child": child, "appended": type(appended).__name__, "process": handle.id}
        return Result(output, events=({"desk": "open"},), directives=(told,))


async def test_a_query_reads_its_session_and_its_processes_and_changes_nothing(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(echo), name="support", plugins=[Desk()])) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        host = SessionHost(runtime._open(), "s", "support")
        await host.register_background_task(TaskSpec("parcel"))
        read = await session.call("desk.work")
        with pytest.raises(OperationFailed, match="a query only reads and has no 'start_process'"):
            await session.call("desk.meddle")

    assert (read.plugin, read.output) == ("desk", {"session": "s", "tasks": ["parcel"], "head": 1})
    assert (read.events, read.directives) == ((), ())


async def test_a_command_has_state_lifecycle_graph_and_processes_and_tells_what_it_led_to(place: Place) -> None:
    @process
    async def nightly(ctx: ProcessContext[Any]) -> str:
        return "done"

    agent = Agent(FunctionModel(echo), name="support", tools=[add], plugins=[Desk()])
    async with place.runtime(agent, processes=[nightly]) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        events = session.observe()
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)  # it reads from here on
        done = await session.call("desk.open")
        told = await first
        while not isinstance(told, PluginEvent):
            told = await anext(events)
        queued = await session.result(done.accepted[0])
        state = await session.tools.state()
        child = await runtime.store.session("child")
        night = await runtime.handle(done.output["process"]).result()
        await runtime.wait_idle()
        said = [message.text for message in await session.history()]

    assert (done.plugin, done.output["child"], done.output["appended"]) == ("desk", "child", "Appending")
    assert done.events == ({"desk": "open"},)
    assert [each.key for each in done.directives] == ["open"]
    assert queued.failed is False
    assert state.members == {"add": False}
    assert child is not None
    assert night == "done"
    assert {"for the record", "the desk is open"} <= set(said)
    assert (told.plugin, told.value) == ("desk", {"desk": "open"})
