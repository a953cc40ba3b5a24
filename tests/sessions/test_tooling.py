"""`session.tools`: what a session is shown, and deciding about single tools of it."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Message, ModelRequest, Session, ToolCall, tool
from perdure.errors import InvalidDefinition, SessionDeleted, StaleSettings, Unavailable, UnknownSession, UnknownTool
from perdure.model.plugin import CreateSession, PromptPart
from perdure.model.session import ToolState
from perdure.model.tool import Failed
from perdure.plugins.hooks import CatalogContext, Plugin, TurnContext
from perdure.plugins.operations import CommandContext, command
from perdure.testing import FunctionModel
from tests.kit import SOON, Place, TellingModel
from tests.tools.samples import Offering, add, drop, other_add, say


def shown(request: ModelRequest) -> str:
    """A model that answers with its instructions and the tools it is shown."""
    instructions = next((m.text for m in request.messages if m.role == "system"), "")
    return ": ".join([each for each in (instructions, ", ".join(sorted([t.name for t in request.tools]))) if each])


def agent(*tools: Any, plugins: Iterable[Plugin] = (), name: str = "agent") -> Agent[str]:
    return Agent(FunctionModel(shown), name=name, tools=tools or (add, drop), plugins=plugins)


async def listed(session: Session) -> list[str]:
    return sorted([each["name"] for each in await session.tools.list()])


async def seen(session: Session) -> str:
    return (await session.run("what can you do?")).text


# ---------------------------------------------------------------------- switching


async def test_tool_is_switched_off_on_and_back_to_what_the_catalogue_says(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s")
        assert (await listed(session), await seen(session)) == (["add", "drop"], "add, drop")

        assert await session.tools.disable("drop") == 1
        assert (await listed(session), await seen(session)) == (["add"], "add")
        assert await session.tools.enable("drop") == 2
        assert (await listed(session), await seen(session)) == (["add", "drop"], "add, drop")
        assert await session.tools.clear("drop") == 3

        assert await session.tools.state() == ToolState(3, {})
        assert await seen(session) == "add, drop"


async def test_tool_that_is_switched_off_cannot_be_called(place: Place) -> None:
    def model(request: ModelRequest) -> Any:
        return "done" if request.messages[-1].role == "tool" else [ToolCall("c", "drop")]

    async with place.runtime(Agent(FunctionModel(model), tools=[add, drop])) as runtime:
        session = await runtime.session("s")
        await session.tools.disable("drop")
        [call] = (await session.run("go")).tool_calls

    assert isinstance(call.outcome, Failed)
    assert (call.outcome.code, call.attempts) == ("tool_unavailable", 0)


async def test_decisions_hold_after_a_restart_and_before_anything_was_said(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        await (await runtime.session("s")).tools.disable("drop")
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s")
        state = await session.tools.state()
        answer = await seen(session)
        other = await seen(await runtime.session("other"))

    assert (state, answer, other) == (ToolState(1, {"drop": False}), "add", "add, drop")


async def test_name_that_nobody_knows_is_refused_and_nothing_is_switched(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s")
        for edit in (session.tools.enable, session.tools.disable, session.tools.clear):
            with pytest.raises(UnknownTool, match="'dorp'"):
                await edit("drop", "dorp")
        with pytest.raises(UnknownTool, match="'dorp'"):
            await session.tools.apply(ToolState(0, {"dorp": False}))

        assert await session.tools.state() == ToolState()


async def test_state_is_applied_as_a_whole_unless_somebody_edited_it_since(place: Place) -> None:
    async with place.runtime(agent()) as runtime, place.runtime(agent()) as other:
        session = await runtime.session("s")
        await session.tools.disable("drop")
        state = await session.tools.state()
        assert await (await other.session("s")).tools.apply(ToolState(state.generation, {"add": False})) == 2

        with pytest.raises(StaleSettings):
            await session.tools.apply(ToolState(state.generation, {}))

        assert await session.tools.state() == ToolState(2, {"add": False})
        assert await seen(session) == "drop"


async def test_two_editors_at_once_lose_nothing(place: Place) -> None:
    many = [tool(name=f"t{n}")(lambda: "x") for n in range(12)]
    async with place.runtime(agent(*many)) as one, place.runtime(agent(*many)) as two, asyncio.timeout(SOON):
        sessions = [await one.session("s"), await two.session("s")]
        await asyncio.gather(*[sessions[n % 2].tools.disable(f"t{n}") for n in range(12)])
        state = await sessions[0].tools.state()

    assert state == ToolState(12, {f"t{n}": False for n in range(12)})


async def test_decision_about_a_tool_that_is_away_counts_when_it_comes_back(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        await (await runtime.session("s")).tools.disable("drop")
    async with place.runtime(agent(add)) as runtime:
        session = await runtime.session("s")
        away = (await seen(session), await session.tools.orphans(), await session.tools.state())
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s")
        back = (await seen(session), await session.tools.orphans())

    assert away == ("add", ["drop"], ToolState(1, {"drop": False}))
    assert back == ("add", [])


async def test_session_without_decisions_has_no_orphans(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        assert await (await runtime.session("s")).tools.orphans() == []


async def test_deleted_session_has_no_tools_to_decide_about(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s")
        await session.run("hello")
        await runtime.sessions.delete("s")

        for refused in (session.tools.list(), session.tools.state(), session.tools.disable("drop")):
            with pytest.raises((UnknownSession, SessionDeleted)):
                await refused


async def test_catalogue_of_an_agent_that_is_not_here_cannot_be_told(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        await (await runtime.session("s")).run("hello")
    async with place.runtime() as runtime:
        with pytest.raises(Unavailable):
            await (await runtime.session("s")).tools.list()


ROOT = Path(__file__).parents[2]
CHILD = """
import asyncio, sys
from perdure import Runtime
from tests.sessions.test_tooling import agent

async def main():
    async with Runtime(sys.argv[1], agents=[agent()], recover=False) as runtime:
        session = await runtime.session("s")
        print((await session.tools.state()).generation, await session.tools.disable("drop"))

asyncio.run(main())
"""


async def test_decision_of_another_process_counts_from_the_next_turn_on(file: Place) -> None:
    async with file.runtime(agent()) as runtime:
        session = await runtime.session("s")
        await session.tools.enable("add")
        before = await seen(session)
        child = functools.partial(subprocess.run, [sys.executable, "-c", CHILD, str(file.path)], cwd=ROOT)
        done = await asyncio.to_thread(child, capture_output=True, text=True, timeout=60, check=False)
        after, state = await seen(session), await session.tools.state()

    assert (done.stdout, done.stderr) == ("1 2\n", "")
    assert (before, after) == ("add, drop", "add")
    assert state == ToolState(2, {"add": True, "drop": False})


# ---------------------------------------------------------------------- an overlay


async def test_overlay_adds_replaces_and_leaves_out(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s")
        assert session.tools.overlay([other_add, say], prompts=["Be kind."])
        assert await seen(session) == "Be kind.: add, drop, say"
        assert {each["name"]: each["description"] for each in await session.tools.list()}["add"] == "Add two."

        assert session.tools.overlay([say], include_base=False)
        assert (await seen(session), await listed(session)) == ("say", ["say"])
        assert session.tools.overlay()
        assert await seen(session) == "add, drop"
        assert await seen(await runtime.session("other")) == "add, drop"


async def test_overlay_that_changes_nothing_says_so(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s")
        assert not session.tools.overlay()
        assert session.tools.overlay([say], prompts=[PromptPart("Be kind.", priority=2)])

        assert not session.tools.overlay([say], prompts=[PromptPart("Be kind.", priority=2)])
        assert session.tools.overlay([say], prompts=["Be kind."])


@pytest.mark.parametrize(
    ("tools", "base"),
    [((say, drop), True), ((drop,), True), ((drop, say), False), ((drop, tool(name="say")(lambda: "hello")), True)],
    ids=["another order", "fewer", "without the agent's own", "an equal one"],
)
async def test_overlay_that_differs_is_laid_anew(place: Place, tools: tuple[Any, ...], base: bool) -> None:
    async with place.runtime(agent(add)) as runtime:
        session = await runtime.session("s")
        session.tools.overlay([drop, say])

        assert not session.tools.overlay([drop, say])
        assert session.tools.overlay(tools, include_base=base)


async def test_overlay_that_cannot_be_composed_leaves_the_one_before(place: Place) -> None:
    wrong: Any = 7
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s")
        session.tools.overlay([say])
        with pytest.raises(InvalidDefinition, match="failed to build session tool registry: two tools are named 'add'"):
            session.tools.overlay([add, other_add])
        with pytest.raises(InvalidDefinition, match="a int is no piece of prompt"):
            session.tools.overlay([add], prompts=[wrong])

        assert await seen(session) == "add, drop, say"


async def test_overlay_is_gone_after_a_restart_and_decisions_about_its_tools_wait(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s")
        session.tools.overlay([say])
        await session.tools.disable("say")
        first = await seen(session)
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s")
        second, orphans = await seen(session), await session.tools.orphans()
        session.tools.overlay([say])
        third = await seen(session)

    assert (first, second, orphans, third) == ("add, drop", "add, drop", ["say"], "add, drop")


async def test_overlay_laid_during_a_turn_counts_from_the_next_one_on(place: Place) -> None:
    telling = TellingModel()
    async with place.runtime(Agent(telling, name="agent", tools=[add])) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        receipt = await session.send("go")
        first = await telling.next()
        session.tools.overlay([say])
        telling.say("done")
        await receipt.result()
        receipt = await session.send("again")
        second = await telling.next()
        telling.say("done")
        await receipt.result()

    assert [[each.name for each in request.tools] for request in (first, second)] == [["add"], ["add", "say"]]


# ---------------------------------------------------------------------- asking again


class Fickle(Plugin):
    """Hides what it is told to, without counting that."""

    id = "fickle"
    hidden: tuple[str, ...] = ()

    def hidden_tools(self, ctx: CatalogContext) -> Iterable[str]:
        return self.hidden


async def test_providers_are_asked_again_when_the_host_asks(place: Place) -> None:
    offering = Offering("fly")
    async with place.runtime(agent(add, offering)) as runtime:
        session = await runtime.session("s")
        assert await listed(session) == ["add", "fly"]

        offering.names = ("swim",)
        assert await listed(session) == ["add", "fly"]
        session.tools.refresh()
        assert await listed(session) == ["add", "swim"]


async def test_providers_of_an_overlay_are_asked_again_too(place: Place) -> None:
    laid = Offering("fly")
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s")
        session.tools.overlay([laid])
        assert await listed(session) == ["add", "drop", "fly"]

        laid.names = ("swim",)
        session.tools.refresh()
        assert await listed(session) == ["add", "drop", "swim"]


async def test_plugins_that_hide_are_asked_again_too(place: Place) -> None:
    fickle = Fickle()
    async with place.runtime(agent(plugins=[fickle])) as runtime:
        session = await runtime.session("s")
        assert await seen(session) == "add, drop"

        fickle.hidden = ("drop",)
        assert await seen(session) == "add, drop", "it did not say that anything changed"
        session.tools.refresh()
        assert (await listed(session), await seen(session)) == (["add"], "add")


async def test_refresh_while_a_turn_runs_counts_from_the_next_one_on(place: Place) -> None:
    telling, offering = TellingModel(), Offering("fly")
    async with place.runtime(Agent(telling, name="agent", tools=[add, offering])) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        await session.tools.enable("add")
        requests = []
        for answers in ([[ToolCall("c", "add", {"n": 1})], "done"], ["done"]):
            receipt = await session.send("go")
            for answer in answers:
                requests.append(await telling.next())
                offering.names = ("swim",)
                session.tools.refresh()
                telling.say(answer)
            await receipt.result()

    assert [[each.name for each in request.tools] for request in requests] == [
        ["add", "fly"],
        ["add", "fly"],
        ["add", "swim"],
    ]


class Counter(Plugin):
    """Counts in its own state."""

    id = "counter"

    def __init__(self) -> None:
        self.count = 0

    def for_session(self, ctx: Any) -> Counter:
        return Counter()

    @property
    def revision(self) -> int:
        return self.count

    def snapshot(self, writer: Any) -> Any:
        return self.count

    def restore(self, snapshot: Any, reader: Any) -> None:
        self.count = snapshot.state or 0

    @command
    def bump(self, ctx: CommandContext) -> int:
        """Count on."""
        self.count += 1
        return self.count


async def test_refresh_while_a_turn_runs_disturbs_no_command(place: Place) -> None:
    telling = TellingModel()
    async with place.runtime(Agent(telling, name="agent", plugins=[Counter()])) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        receipt = await session.send("go")
        await telling.next()
        session.tools.refresh()
        counted = [(await session.call("counter.bump")).output for _ in range(2)]
        telling.say("done")
        await receipt.result()
        counted.append((await session.call("counter.bump")).output)

    assert counted == [1, 2, 3]


async def test_catalogue_that_a_caller_changes_is_his_own(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        session, other = await runtime.session("s"), await runtime.session("other")
        mine: Any = await session.tools.list()
        mine[0]["contract"]["input_schema"].clear()
        mine.clear()

        assert (await listed(session), await listed(other)) == (["add", "drop"], ["add", "drop"])
        entry = (await session.tools.list())[0]
        assert entry["contract"]["input_schema"]["properties"]["n"] == {"type": "integer"}


# ---------------------------------------------------------------------- children and forks


class Delegating(Plugin):
    """Begins a child with every first turn of a session it was not told to leave alone."""

    id = "delegating"

    def __init__(self, children: dict[str, CreateSession]) -> None:
        self.children = children

    async def before_turn(self, ctx: TurnContext) -> Any:
        return self.children.get(ctx.session_id)


FAMILY = {
    "s": CreateSession(session_id="child", hidden=("drop",), said=Message("user", "what can you do?")),
    "child": CreateSession(session_id="grandchild", hidden=("say",), said=Message("user", "and you?")),
}


async def test_what_a_parent_hides_is_hidden_down_the_line_and_nobody_switches_it_on(place: Place) -> None:
    made = agent(add, drop, say, plugins=[Delegating(FAMILY)])
    async with place.runtime(made) as runtime, asyncio.timeout(SOON):
        first = await seen(await runtime.session("s"))
        assert await runtime.wait_idle(SOON)
        child, grandchild = await runtime.session("child"), await runtime.session("grandchild")
        told = [(await each.history())[-1].text for each in (child, grandchild)]
        await grandchild.tools.enable("drop", "say")
        grandchild.tools.overlay([drop, say])
        stays = (await listed(grandchild), await seen(grandchild))
        fork = await grandchild.fork(session_id="fork")
        forked = await seen(fork)
    async with place.runtime(made) as runtime:
        after = await seen(await runtime.session("grandchild"))

    assert (first, told) == ("add, drop, say", ["add, say", "add"])
    assert stays == (["add"], "add")
    assert (forked, after) == ("add", "add")


async def test_child_begins_with_the_decisions_of_its_parent_and_goes_its_own_way(place: Place) -> None:
    made = agent(add, drop, say, plugins=[Delegating({"s": CreateSession(session_id="child")})])
    async with place.runtime(made) as runtime:
        session = await runtime.session("s")
        await session.tools.disable("drop")
        await session.run("go")
        child = await runtime.session("child")
        before = await seen(child)
        await child.tools.enable("drop")

        assert (before, await seen(child), await seen(session)) == ("add, say", "add, drop, say", "add, say")


async def test_child_begins_with_what_its_parents_turn_has_switched_until_then(place: Place) -> None:
    class Switching(Plugin):
        id = "switching"

        async def before_turn(self, ctx: TurnContext) -> None:
            if ctx.session_id == "s":
                await ctx.host.set_tools(["drop"], False)
                await ctx.host.create_session(CreateSession(session_id="child"))

    async with place.runtime(agent(plugins=[Switching()])) as runtime:
        await (await runtime.session("s")).run("go")

        assert await seen(await runtime.session("child")) == "add"


GRANTED = {
    "s": CreateSession(session_id="child", only=("add", "say", "fly"), said=Message("user", "what can you do?")),
    "child": CreateSession(session_id="grandchild", only=("drop", "say"), said=Message("user", "and you?")),
    "grandchild": CreateSession(session_id="last", hidden=("say",), said=Message("user", "and you?")),
}


async def test_child_sees_only_what_its_parent_grants_of_what_it_may_see_itself(place: Place) -> None:
    made = agent(add, drop, say, plugins=[Delegating(GRANTED)])
    async with place.runtime(made) as runtime, asyncio.timeout(SOON):
        first = await seen(await runtime.session("s"))
        assert await runtime.wait_idle(SOON)
    async with place.runtime(agent(add, drop, say)) as runtime:
        family = [await runtime.session(name) for name in ("child", "grandchild", "last")]
        told = [(await each.result(f"{each.id}.1")).text for each in family]
        await family[1].tools.enable("add", "drop")
        family[1].tools.overlay([add, drop])
        stays = await seen(family[1])
        forked = await seen(await family[1].fork(session_id="fork"))

    assert (first, told) == ("add, drop, say", ["add, say", "say", ""])
    assert (stays, forked) == ("say", "say")


async def test_fork_begins_with_the_decisions_of_its_source_and_goes_its_own_way(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s")
        await session.tools.disable("drop")
        await session.run("hello")
        fork = await session.fork(session_id="fork")
        before = (await seen(fork), await fork.tools.state())
        await fork.tools.enable("drop")
        await session.tools.disable("add")
        after = (await seen(fork), await seen(session))

    assert before == ("add", ToolState(1, {"drop": False}))
    assert after == ("add, drop", "")


async def test_fork_has_the_overlay_of_its_source_until_it_is_given_another(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s")
        session.tools.overlay([say], include_base=False)
        await session.run("hello")
        fork = await session.fork(session_id="fork")
        same = await seen(fork)
        fork.tools.overlay([other_add], include_base=False)
        await session.fork(session_id="fork")

        assert (same, await seen(fork), await seen(session)) == ("say", "add", "say")
