"""Services where no turn runs: for commands on sessions, on sessions in which nothing was said, and on none."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Agent, Message, ModelRequest, ModelResponse, Usage
from perdure.errors import CodeRuntimeExited, CodeUnavailable, OperationFailed, ProviderUnavailable, Unavailable
from perdure.model.plugin import CreateSession, TriggerEvent
from perdure.model.session import Appending, StaleBranch
from perdure.plugins.hooks import Plugin
from perdure.plugins.operations import CommandContext, QueryContext, command, query
from perdure.plugins.registry import PluginSet
from perdure.testing import FunctionModel
from tests.kit import Place, texts
from tests.plugins.made import having


class Desk(Plugin):
    """Hands everything it is asked for on to its services."""

    id = "desk"

    @command(session="optional")
    async def complete(self, ctx: CommandContext) -> str:
        """Ask a model."""
        return (await ctx.host.complete("hm?", label="desk")).text

    @command
    async def begin(self, ctx: CommandContext) -> str:
        """Begin a child."""
        return await ctx.host.create_session(CreateSession(session_id="child", said=Message("user", "go")))

    @command
    async def append(self, ctx: CommandContext, after: str) -> bool:
        """Add to the history, after a node."""
        added = await ctx.host.append([Message("user", "by the way")], after=after)
        assert isinstance(added, Appending | StaleBranch)
        return isinstance(added, Appending)

    @query
    async def reads(self, ctx: QueryContext) -> int:
        """Only read."""
        host: Any = ctx.host
        for service in ("complete", "append", "create_session", "set_tools", "start_turn", "trace"):
            with pytest.raises(Unavailable, match=f"a query only reads and has no '{service}': make it a command"):
                getattr(host, service)
        return len((await ctx.host.snapshot()).messages)


class Asked:
    """A model that counts how often it was asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, request: ModelRequest) -> Any:
        self.count += 1
        return ModelResponse("done", usage=Usage(2, 1))


def agent(model: Any, *plugins: Plugin) -> Agent[str]:
    return Agent(FunctionModel(model), name="agent", plugins=[Desk(), *plugins])


async def test_completion_before_anything_was_said_is_counted_in_the_session(place: Place) -> None:
    asked = Asked()
    async with place.runtime(agent(asked)) as runtime:
        session = await runtime.session("s")
        done = await session.call("desk.complete")

        assert (done.output, asked.count) == ("done", 1)
        assert await session.usage() == {"turns": Usage(), "desk": Usage(2, 1, calls=1)}
        assert (await session.run("go")).text == "done"


async def test_completion_without_a_session_is_refused_before_a_model_is_asked(place: Place) -> None:
    asked = Asked()
    async with place.runtime(agent(asked)) as runtime:
        with pytest.raises(OperationFailed, match="this operation is about no session"):
            await runtime.operations.call("desk.complete")

    assert asked.count == 0


async def test_child_may_be_begun_before_anything_was_said_to_its_parent(place: Place) -> None:
    async with place.runtime(agent(Asked())) as runtime:
        begun = await (await runtime.session("s")).call("desk.begin")
        result = await (await runtime.session("child")).result("child.1")

    assert (begun.output, result.text) == ("child", "done")


async def test_query_only_reads_and_everything_else_says_so(place: Place) -> None:
    async with place.runtime(agent(Asked())) as runtime:
        session = await runtime.session("s")
        await session.run("go")

        assert (await session.call("desk.reads")).output == 2


@pytest.mark.parametrize(
    ("after", "lives"),
    [("s.1", True), ("s.2", False), ("fork.1", True), ("fork.2", False), ("other.1", False), ("s.1.0", True)],
)
async def test_history_is_added_to_only_where_the_node_is_part_of_it(place: Place, after: str, lives: bool) -> None:
    """A fork has the nodes of its source up to where it left, and its own."""
    async with place.runtime(agent(Asked())) as runtime:
        session = await runtime.session("s")
        await (await runtime.session("other")).run("hello")
        await session.run("one")
        fork = await session.fork(session_id="fork")
        await session.run("two")
        await fork.run("another two")

        assert (await fork.call("desk.append", {"after": after})).output is lives
        await fork.run("three")
        assert ("by the way" in texts(await fork.history())) is lives


def test_errors_of_a_session_have_their_words() -> None:
    assert str(CodeUnavailable()) == "code execution is not available in this session"
    assert str(CodeRuntimeExited()) == "code execution runtime exited unexpectedly"
    missing = ProviderUnavailable("helper", "s")
    assert str(missing) == "agent 'helper' is not part of this Runtime, which session 's' belongs to"
    assert (missing.agent, missing.session_id, missing.code) == ("helper", "s", "provider_unavailable")


def test_declared_events_of_all_plugins_are_listed_by_source_and_name() -> None:
    mail = TriggerEvent("mail", "came", "A mail came.", {"type": "object"})
    plugins = PluginSet(
        [
            having("trigger_events", lambda: [mail, TriggerEvent("mail", "went")], "mail"),
            having("trigger_events", lambda: [TriggerEvent("clock", "struck")], "clock"),
        ]
    )

    assert [event.source_type for event in plugins.trigger_events] == ["mail.came", "mail.went", "clock.struck"]
    assert plugins.trigger_events[0] == mail
