"""Bad input, kind by kind: a typed error that names the plugin and says what to do, and nothing is half-registered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from perdure import Agent, tool
from perdure.errors import (
    InvalidArguments,
    InvalidDefinition,
    InvalidInput,
    MissingSession,
    NotFound,
    OperationError,
    PluginConflict,
    PluginError,
    UnexpectedSession,
    UnknownOperation,
)
from perdure.model.outcome import Finished, PluginAborted
from perdure.model.plugin import ReplaceArgs, TriggerEvent
from perdure.plugins.hooks import Plugin, SessionContext
from perdure.plugins.operations import command, query
from perdure.testing import FunctionModel
from tests.kit import Place, agent_calling
from tests.plugins.made import having
from tests.plugins.test_engines import Echo


@tool
def add(n: int) -> int:
    """Add one."""
    return n + 1


class Adds(Plugin):
    id = "adds"

    def tools(self) -> Iterable[Any]:
        return [add]


class AlsoAdds(Adds):
    id = "also"


class Twice(Plugin):
    id = "twice"

    def tools(self) -> Iterable[Any]:
        return [add, add]


class Breaks(Plugin):
    id = "breaks"

    def tools(self) -> Iterable[Any]:
        raise OSError("no tools today")


class Asks(Plugin):
    id = "asks"

    @query(name="ask")
    def first(self, n: int = 0) -> int:
        """Ask."""
        return n

    @query(name="anywhere", session="forbidden")
    def second(self) -> int:
        """Ask anywhere."""
        return 1


class Commands(Plugin):
    id = "commands"

    @command(name="ask")
    def first(self) -> int:
        """Do."""
        return 1


def triggers(id: str) -> Plugin:
    return having("trigger_events", lambda: [TriggerEvent("mail", "came")], id)


def nothing(*told: Any) -> Any:
    return None


REFUSED: dict[str, tuple[list[Plugin], str, str]] = {
    "duplicate ids": ([Adds(), having("prompt", nothing, "adds")], "adds", "the id 'adds' belongs to 'adds' already"),
    "a tool of the agent's name": ([Adds()], "adds", "a tool named 'add' belongs to 'the agent' already"),
    "a tool of two plugins": ([Adds(), AlsoAdds()], "also", "a tool named 'add' belongs to 'adds' already"),
    "an operation of two plugins": ([Asks(), Commands()], "commands", "the operation 'ask' belongs to 'asks' already"),
    "an event of two plugins": ([triggers("one"), triggers("two")], "two", "the event 'mail.came' belongs to 'one'"),
    "two projectors of results": (
        [having("project_result", nothing, "one"), having("project_result", nothing, "two")],
        "two",
        "the slot project_result belongs to 'one' already",
    ),
    "two projectors of prose": (
        [having("project_prose", nothing, "one"), having("project_prose", nothing, "two")],
        "two",
        "the slot project_prose belongs to 'one' already",
    ),
    "two protocols": (
        [having("protocol", nothing, "one"), having("protocol", nothing, "two")],
        "two",
        "the slot protocol belongs to 'one' already",
    ),
    "two code executors": (
        [having("code_executor", nothing, "one"), having("code_executor", nothing, "two")],
        "two",
        "the slot code_executor belongs to 'one' already",
    ),
    "two engines": (
        [having("engines", lambda: [Echo()], "one"), having("engines", lambda: [Echo()], "two")],
        "two",
        "the engine of kind 'echo' belongs to 'one' already",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_conflict_names_both_says_what_to_do_and_registers_nothing(place: Place, kind: str) -> None:
    plugins, loser, says = REFUSED[kind]
    bystander = having("prompt", lambda ctx: "I am here.", "bystander")
    tools = [add] if kind == "a tool of the agent's name" else []

    with pytest.raises(PluginConflict) as refused:
        Agent(FunctionModel(lambda request: "done"), tools=tools, plugins=[bystander, *plugins])

    assert refused.value.plugin == loser
    assert says in str(refused.value)
    assert str(refused.value).endswith(": leave one of them out")
    assert isinstance(refused.value, InvalidDefinition)
    # The first of each pair is as good as before it met the second.
    if not kind.startswith(("two protocols", "two code")):
        kept = Agent(FunctionModel(lambda request: request.messages[0].text), plugins=[bystander, plugins[0]])
        async with place.runtime(kept) as runtime:
            result = await (await runtime.session("s")).run("go")
            assert result.outcome == Finished("I am here.")


@pytest.mark.parametrize(
    ("plugin", "says"),
    [
        (Twice(), "plugin 'twice': its tools cannot be used: two tools are named 'add': rename one"),
        (Breaks(), "plugin 'breaks': its tools cannot be used: OSError: no tools today"),
        (having("code_executor", nothing), "plugin 'p' has code_executor: leave it out, or give the agent mode='code'"),
        (having("engines", lambda: [object()]), "is no engine: its `kind` is a text"),
        (having("engines", lambda: [SimpleNamespace(kind="turn")]), "kind 'turn' is the runtime's own"),
        (having("engines", lambda: [SimpleNamespace(kind="x")]), "the engine of kind 'x' has no method `knows`"),
        (having("engines", lambda: int("none")), "its engines cannot be used: ValueError"),
    ],
    ids=[
        "two tools of one name",
        "tools that raise",
        "a code executor",
        "no engine",
        "an engine of our kind",
        "an engine that does not run",
        "engines that raise",
    ],
)
def test_plugin_that_cannot_be_registered_is_named(plugin: Plugin, says: str) -> None:
    with pytest.raises(InvalidDefinition, match=says):
        Agent(FunctionModel(lambda request: "done"), plugins=[plugin])


async def test_tool_whose_name_is_taken_in_one_session_only_refuses_its_turns_and_names_the_plugin(
    place: Place,
) -> None:
    class Sometimes(Plugin):
        id = "sometimes"

        def __init__(self, offers: bool = False) -> None:
            self.offers = offers

        def for_session(self, ctx: SessionContext) -> Plugin:
            return Sometimes(ctx.session_id == "s")

        def tools(self) -> Iterable[Any]:
            return [add] if self.offers else []

    agent = Agent(FunctionModel(lambda request: "done"), tools=[add], plugins=[Sometimes()])
    async with place.runtime(agent) as runtime:
        refused = await (await runtime.session("s")).run("go")
        fine = await (await runtime.session("other")).run("go")

    assert isinstance(refused.outcome, PluginAborted)
    assert (refused.outcome.plugin, refused.outcome.code) == ("sometimes", "plugin_session")
    assert "two tools are named 'add': rename one" in refused.outcome.message
    assert fine.outcome == Finished("done")


async def test_wrong_directive_names_its_plugin_and_those_that_are_right(place: Place) -> None:
    plugin = having("before_turn", lambda ctx: ReplaceArgs({}))
    async with place.runtime(Agent(FunctionModel(lambda request: "done"), plugins=[plugin])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert isinstance(result.outcome, PluginAborted)
    assert result.outcome.plugin == "p"
    assert result.outcome.message.startswith("plugin 'p': before_turn: ReplaceArgs means nothing here")
    assert "AbortTurn" in result.outcome.message


CALLS: dict[str, tuple[str, dict[str, Any], str | None, type[OperationError], type[Exception], str, str]] = {
    "unknown operation": ("aks", {}, "s", UnknownOperation, NotFound, "", "no plugin offers it; near: ask"),
    "missing session": ("ask", {}, None, MissingSession, InvalidInput, "asks", "it works on a session: name one"),
    "unexpected session": (
        "anywhere",
        {},
        "s",
        UnexpectedSession,
        InvalidInput,
        "asks",
        "it works on no session: call it without 's'",
    ),
    "bad arguments": ("ask", {"n": "many"}, "s", InvalidArguments, InvalidInput, "asks", "$.n: expected int, got str"),
}


@pytest.mark.parametrize("kind", CALLS)
async def test_call_of_an_operation_that_makes_no_sense_is_refused(place: Place, kind: str) -> None:
    name, args, session, error, family, plugin, says = CALLS[kind]
    async with place.runtime(Agent(FunctionModel(lambda request: "done"), plugins=[Asks()])) as runtime:
        await (await runtime.session("s")).run("go")
        with pytest.raises(error) as refused:
            await runtime.operations.call(name, args, session=session)

    assert isinstance(refused.value, family)
    assert isinstance(refused.value, PluginError)
    assert (refused.value.operation, refused.value.plugin) == (name, plugin)
    assert str(refused.value).startswith(f"operation {name!r}: ")
    assert says in str(refused.value)


async def test_snapshot_that_does_not_decode_is_an_issue_that_names_its_plugin_and_what_to_do(place: Place) -> None:
    def counting(restore: Callable[..., None]) -> Plugin:
        class Counting(Plugin):
            id = "counting"

            def __init__(self) -> None:
                self.count = 0

            def for_session(self, ctx: SessionContext) -> Plugin:
                return Counting()

            @property
            def revision(self) -> int:
                return self.count

            def before_tool_call(self, ctx: Any) -> None:
                self.count += 1

            def snapshot(self, writer: Any) -> Any:
                return "seven"

            def restore(self, snapshot: Any, reader: Any) -> None:
                restore(self, snapshot)

        return Counting()

    def undecodable(plugin: Any, snapshot: Any) -> None:
        plugin.count = int(snapshot.state or 0)

    async with place.runtime(agent_calling("add", {"n": 1}, tools=[add], plugins=[counting(nothing)])) as runtime:
        await (await runtime.session("s")).run("go")
    async with place.runtime(agent_calling("add", {"n": 1}, tools=[add], plugins=[counting(undecodable)])) as runtime:
        result = await (await runtime.session("s")).run("go on")

    assert result.outcome == Finished("done")
    [issue] = result.issues
    assert (issue.code, issue.plugin) == ("plugin_snapshot_unreadable", "counting")
    assert "invalid literal for int() with base 10: 'seven'" in issue.message
    assert issue.message.endswith("the snapshot is kept: use a version of the plugin that can read it")
