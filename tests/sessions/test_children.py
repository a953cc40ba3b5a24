"""Child sessions: what they begin with, and that each is begun once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Agent, Message, ModelRequest, Runtime, ToolCall, ToolContext, tool
from perdure.engine.journal import load
from perdure.errors import Conflict, InvalidInput
from perdure.model.message import Text, ToolResult
from perdure.model.plugin import Compaction, CreateSession
from perdure.model.record import Ended
from perdure.plugins.hooks import CompactContext, Plugin, TurnContext
from perdure.plugins.operations import CommandContext, command
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab, kill_everywhere
from tests.kit import SOON, Place, TellingModel, crash, texts, until
from tests.plugins.made import having

SEEN = (Message("user", "What is tea?"), Message("assistant", "A drink."))


def counting(request: ModelRequest) -> str:
    """A model that answers with how much it is shown, and the first of it."""
    return f"{len(request.messages)} from {request.messages[0].text}"


def parent(request: CreateSession | Callable[[TurnContext], Any], name: str = "agent", **options: Any) -> Agent[str]:
    """An agent that begins a child with every turn of `s`."""

    def begin(ctx: TurnContext) -> Any:
        if ctx.session_id != "s":
            return None
        return request(ctx) if callable(request) else request

    plugins = [having("before_turn", begin), *options.pop("plugins", ())]
    return Agent(FunctionModel(counting), name=name, plugins=plugins, **options)


# ---------------------------------------------------------------------- what it begins with


async def test_child_finds_its_prelude_before_its_first_input(place: Place) -> None:
    request = CreateSession(session_id="child", prelude=SEEN, said=Message("user", "More."))
    async with place.runtime(parent(request)) as runtime, asyncio.timeout(SOON):
        await (await runtime.session("s")).run("go")
        child = await runtime.session("child")
        first = await child.result("child.1")
        second = await child.run("And more?")
        live = texts(await child.history())
    async with place.runtime(parent(request)) as runtime:
        child = await runtime.session("child")
        loaded, third = texts(await child.history()), await child.run("Still there?")
        again = await child.result("child.1")

    assert (first.text, second.text, third.text) == (
        "3 from What is tea?",
        "5 from What is tea?",
        "7 from What is tea?",
    )
    assert live == loaded
    assert live[:4] == ["What is tea?", "A drink.", "More.", "3 from What is tea?"]
    for result in (first, again):
        assert texts(result.messages) == live[:4]
        assert texts(result.new_messages) == live[2:4], "a prelude is no part of the turn"


async def test_prelude_is_there_before_anything_was_said_to_the_child(place: Place) -> None:
    request = CreateSession(session_id="child", prelude=SEEN)
    async with place.runtime(parent(request)) as runtime, asyncio.timeout(SOON):
        child = await runtime.session("child")
        await child.tools.list()  # somebody looked before there was one
        await (await runtime.session("s")).run("go")
        before = texts(await child.history())
        answer = await child.run("More.")

    assert (before, answer.text) == (["What is tea?", "A drink."], "3 from What is tea?")


async def test_fork_of_a_child_has_its_prelude_wherever_it_branches_and_also_when_the_child_is_gone(
    place: Place,
) -> None:
    request = CreateSession(session_id="child", prelude=SEEN, said=Message("user", "More."))
    async with place.runtime(parent(request)) as runtime, asyncio.timeout(SOON):
        await (await runtime.session("s")).run("go")
        child = await runtime.session("child")
        await child.result("child.1")
        await child.run("And more?")
        forks = [await child.fork(at, session_id=f"fork{n}") for n, at in enumerate(("child.1.0", "child.1", None))]
        await runtime.sessions.delete("child")
        histories = [texts(await fork.history()) for fork in forks]

    assert [len(history) for history in histories] == [3, 4, 6]
    assert {tuple(history[:3]) for history in histories} == {("What is tea?", "A drink.", "More.")}


async def test_forked_child_has_the_history_of_its_parent_up_to_the_last_committed_turn(place: Place) -> None:
    def begin(ctx: TurnContext) -> Any:
        if ctx.turn_id == "s.1":
            return None
        return CreateSession(session_id="child", start="fork", prelude=SEEN, said=Message("user", "More."))

    async with place.runtime(parent(begin)) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        await session.run("one")
        await session.run("two")
        child = await runtime.session("child")
        result = await child.result("child.1")
        await session.run("three")
        history = texts(await child.history())

    assert history == ["one", "1 from one", "What is tea?", "A drink.", "More.", "5 from one"]
    assert texts(result.messages) == history


async def test_forked_child_of_a_session_without_history_begins_with_nothing(place: Place) -> None:
    request = CreateSession(session_id="child", start="fork", said=Message("user", "More."))
    async with place.runtime(parent(request)) as runtime, asyncio.timeout(SOON):
        await (await runtime.session("s")).run("one")
        child = await runtime.session("child")
        await child.result("child.1")

        assert texts(await child.history()) == ["More.", "1 from More."]


async def test_forked_child_of_a_child_in_its_first_turn_has_what_that_one_began_with(place: Place) -> None:
    def begin(ctx: TurnContext) -> Any:
        said = Message("user", f"from {ctx.session_id}")
        if ctx.session_id == "s":
            return CreateSession(session_id="child", prelude=SEEN, said=said)
        if ctx.session_id == "child":
            return CreateSession(session_id="grandchild", start="fork", prelude=(Message("user", "And?"),), said=said)
        return None

    agent = Agent(FunctionModel(counting), plugins=[having("before_turn", begin)])
    async with place.runtime(agent) as runtime, asyncio.timeout(SOON):
        await (await runtime.session("s")).run("one")
        assert await runtime.wait_idle(SOON)
        grandchild = await runtime.session("grandchild")

        assert (texts(await grandchild.history()))[:4] == ["What is tea?", "A drink.", "And?", "from child"]


async def test_forked_child_may_see_no_more_than_its_parent_grants_and_belong_to_another_agent(place: Place) -> None:
    @tool
    def look() -> str:
        """Look."""
        return "seen"

    def begin(ctx: TurnContext) -> Any:
        return CreateSession("helper", "child", start="fork", hidden=("look",)) if ctx.turn_id == "s.2" else None

    helper = Agent(FunctionModel(counting), name="helper", tools=[look])
    async with place.runtime(parent(begin, tools=[look]), helper) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        await session.run("one")
        await session.run("two")
        child = await runtime.session("child")

        assert (child.agent, await child.tools.list()) == ("helper", [])
        assert texts(await child.history()) == ["one", "1 from one"]


async def test_prelude_with_calls_and_results_in_pairs_is_history_like_any_other(place: Place) -> None:
    prelude = (
        Message("user", "How late?"),
        Message("assistant", (Text("I look."), ToolCall("c", "clock"))),
        Message("tool", (ToolResult("c", "clock", "noon"),)),
        Message("assistant", "Noon."),
    )
    request = CreateSession(session_id="child", prelude=prelude, said=Message("user", "And now?"))
    async with place.runtime(parent(request)) as runtime, asyncio.timeout(SOON):
        await (await runtime.session("s")).run("go")
        child = await runtime.session("child")

        assert (await child.result("child.1")).text == "5 from How late?"
        assert (await child.history())[:4] == list(prelude)


async def test_frame_that_the_first_turn_begins_stands_in_place_of_the_prelude(place: Place) -> None:
    class Short(Plugin):
        id = "short"

        def compact(self, ctx: CompactContext) -> Compaction | None:
            return Compaction((Message("user", "In short: tea."),)) if len(ctx.messages) == 2 else None

    request = CreateSession(session_id="child", prelude=SEEN, said=Message("user", "More."))
    made = parent(request, plugins=[Short()])
    async with place.runtime(made) as runtime, asyncio.timeout(SOON):
        await (await runtime.session("s")).run("go")
        child = await runtime.session("child")
        first = (await child.result("child.1")).text
        second = (await child.run("And?")).text
    async with place.runtime(made) as runtime:
        child = await runtime.session("child")
        third, history = (await child.run("So?")).text, texts(await child.history())

    assert [first, second, third] == ["2 from In short: tea.", "4 from In short: tea.", "6 from In short: tea."]
    assert history[:3] == ["What is tea?", "A drink.", "More."]


async def test_prelude_larger_than_a_row_is_kept_whole(file: Place) -> None:
    large = Message("user", "tea " * 40_000)
    request = CreateSession(session_id="child", prelude=(large,), said=Message("user", "More."))
    async with file.runtime(parent(request)) as runtime, asyncio.timeout(SOON):
        await (await runtime.session("s")).run("go")
        await (await runtime.session("child")).result("child.1")
    async with file.runtime(parent(request)) as runtime:
        child = await runtime.session("child")
        row = await runtime.store.session("child")

        assert (await child.history())[0] == large
    assert row is not None
    assert len(row.settings) < 200, "a row that is read with every write is small again"


# ---------------------------------------------------------------------- bad input


CALL = Message("assistant", (ToolCall("c", "clock"),))
RESULT = Message("tool", (ToolResult("c", "clock", "noon"),))


def wrong(value: object) -> Any:
    return value


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (CreateSession(prelude=(CALL,)), "a call without its result"),
        (CreateSession(prelude=(RESULT, CALL)), "a result without its call"),
        (CreateSession(prelude=(Message("user", " "),)), "a message of the prelude is empty"),
        (CreateSession(prelude=(Message("user", CALL.parts),)), "cannot be said by 'user'"),
        (CreateSession(prelude=(Message(wrong("robot"), "hi"),)), "cannot be said by 'robot'"),
        (CreateSession(prelude=wrong("hello")), "a str is no tuple of values"),
        (CreateSession(prelude=wrong(("hello",))), "a str is no message"),
        (CreateSession(start=wrong("middle")), "Invalid enum value 'middle'"),
        (CreateSession(label=wrong(5)), "Expected `str`, got `int`"),
    ],
)
async def test_child_that_makes_no_sense_is_refused_in_words_and_not_begun(
    place: Place, request_: CreateSession, why: str
) -> None:
    class Begin(Plugin):
        id = "begin"

        @command
        async def child(self, ctx: CommandContext) -> None:
            """Begin a child."""
            with pytest.raises(InvalidInput, match=why):
                await ctx.host.create_session(request_)

    async with place.runtime(Agent(FunctionModel(counting), plugins=[Begin()])) as runtime:
        await (await runtime.session("s")).call("begin.child")

        assert await runtime.sessions.list() == []


async def test_fork_that_its_user_made_is_no_child_that_a_crash_left(place: Place) -> None:
    def begin(ctx: TurnContext) -> Any:
        return CreateSession(session_id="mine", start="fork") if ctx.turn_id == "s.2" else None

    async with place.runtime(parent(begin)) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        await session.fork(session_id="mine")
        result = await session.run("two")

    assert ["exists and is no child of 's'" in issue.message for issue in result.issues] == [True]


# ---------------------------------------------------------------------- once


def asking(do: Callable[[Any], Awaitable[Any]], model: Any = None) -> Agent[str]:
    return Agent(model or FunctionModel(counting), name="agent", plugins=[having("before_turn", do)])


async def test_service_in_a_hook_that_runs_again_after_a_crash_begins_the_same_children(place: Place) -> None:
    died, begun = TellingModel(), list[list[str]]()
    request = CreateSession(label="side job")

    async def begin(ctx: TurnContext) -> None:
        if ctx.session_id == "s":
            begun.append([await ctx.host.create_session(each) for each in (request, request, CreateSession())])

    runtime = await place.runtime(asking(begin, died)).__aenter__()
    receipt = await (await runtime.session("s")).send("go")
    await died.next()
    await crash(runtime)  # nothing of the turn itself is recorded
    async with place.runtime(asking(begin)) as runtime, asyncio.timeout(SOON):
        await (await runtime.session("s")).result(receipt.turn_id)
        rows = [row.id for row in await runtime.sessions.list()]

    assert begun[0] == begun[1]
    assert len(set(begun[0])) == 3, "asked for twice, it is two; asked for again, it is the same"
    assert sorted(rows) == sorted([*begun[0], "s"])


async def test_tool_that_runs_again_begins_the_same_child(place: Place) -> None:
    begun: list[list[str]] = []
    hang = asyncio.Event()

    @tool(recovery="rerun")
    async def delegate(ctx: ToolContext[Any]) -> str:
        """Delegate."""
        begun.append([await ctx.host.create_session(CreateSession()) for _ in range(2)])
        if len(begun) == 1:
            hang.set()
            await asyncio.Event().wait()
        return "delegated"

    def model(request: ModelRequest) -> Any:
        return "done" if request.messages[-1].role == "tool" else [ToolCall("c", "delegate"), ToolCall("d", "other")]

    agent = Agent(FunctionModel(model), tools=[delegate])
    runtime = await place.runtime(agent).__aenter__()
    receipt = await (await runtime.session("s")).send("go")
    async with asyncio.timeout(SOON):
        await hang.wait()
    await crash(runtime)
    async with place.runtime(agent) as runtime, asyncio.timeout(SOON):
        await (await runtime.session("s")).result(receipt.turn_id)
        rows = [row.id for row in await runtime.sessions.list()]

    assert (begun[0], len(set(begun[0])), len(rows)) == (begun[1], 2, 3)


async def test_hooks_of_calls_that_run_side_by_side_do_not_take_each_others_children(place: Place) -> None:
    begun: dict[int, list[str]] = {0: [], 1: []}
    second = asyncio.Event()

    @tool(recovery="rerun")
    def add(n: int) -> int:
        """Add one."""
        return n + 1

    async def begin(ctx: Any) -> None:
        n = ctx.args["n"]
        begun[n].append(await ctx.host.create_session(CreateSession()))
        if n == 1 and len(begun[1]) == 1:
            second.set()
            await asyncio.Event().wait()

    def model(request: ModelRequest) -> Any:
        return "done" if request.messages[-1].role == "tool" else [ToolCall(f"c{n}", "add", {"n": n}) for n in (0, 1)]

    agent = Agent(FunctionModel(model), tools=[add], plugins=[having("before_tool_call", begin)])
    runtime = await place.runtime(agent).__aenter__()
    receipt = await (await runtime.session("s")).send("go")
    async with asyncio.timeout(SOON):
        await second.wait()
        await until(lambda: _ended(runtime))
    await crash(runtime)
    async with place.runtime(agent) as runtime, asyncio.timeout(SOON):
        await (await runtime.session("s")).result(receipt.turn_id)

    assert (len(begun[0]), len(begun[1]), len(set(begun[1]))) == (1, 2, 1), (
        "the first call was over, the second was not"
    )
    assert begun[0][0] != begun[1][0]


async def _ended(runtime: Runtime) -> bool:
    row = await runtime.store.session("s")
    assert row is not None
    return any(isinstance(record, Ended) for _, record in await load(runtime.store, row.sid, 1, 1))


async def test_directives_at_different_seams_and_steps_of_a_turn_begin_different_children(place: Place) -> None:
    class Eager(Plugin):
        id = "eager"

        def before_turn(self, ctx: Any) -> Any:
            return CreateSession(label="before turn") if ctx.session_id == "s" else None

        def before_tool_call(self, ctx: Any) -> Any:
            return CreateSession(label=f"before {ctx.args['n']}")

        def after_tool_call(self, ctx: Any) -> Any:
            return CreateSession(label=f"after {ctx.args['n']}")

        def at_checkpoint(self, ctx: Any) -> Any:
            return CreateSession(label=f"{ctx.boundary} {len(ctx.messages)}")

    @tool
    def add(n: int) -> int:
        """Add one."""
        return n + 1

    def model(request: ModelRequest) -> Any:
        steps = sum(message.role == "assistant" for message in request.messages)
        return [ToolCall(f"c{steps}{n}", "add", {"n": 2 * steps + n}) for n in (0, 1)] if steps < 2 else "done"

    made = Agent(FunctionModel(model), tools=[add], plugins=[Eager()])
    async with place.runtime(made) as runtime:
        await (await runtime.session("s")).run("go")
        names = [row.id for row in await runtime.sessions.list() if row.id != "s"]

    assert len(names) == 1 + 4 + 4 + 3


async def test_two_who_begin_the_same_child_at_once_begin_one(place: Place) -> None:
    class Begin(Plugin):
        id = "begin"

        @command
        async def child(self, label: str, ctx: CommandContext) -> str:
            """Begin a child."""
            said = Message("user", "go")
            request = CreateSession(session_id="child", start="fork", said=said, label=label)
            return await ctx.host.create_session(request)

    async with place.runtime(Agent(FunctionModel(counting), plugins=[Begin()])) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        await session.run("hello")
        begun = await asyncio.gather(*[session.call("begin.child", {"label": name}) for name in "abcde"])
        assert await runtime.wait_idle(SOON)
        row = await runtime.store.session("child")

    assert row is not None
    assert ({each.output for each in begun}, row.next) == ({"child"}, 2)


async def test_child_of_somebody_else_is_refused(place: Place) -> None:
    seen: list[str] = []

    async def begin(ctx: TurnContext) -> None:
        if ctx.session_id == "thief":
            with pytest.raises(Conflict, match="is no child of 'thief'"):
                await ctx.host.create_session(CreateSession(session_id="child"))
            seen.append("refused")
        elif ctx.session_id == "s":
            await ctx.host.create_session(CreateSession(session_id="child"))

    async with place.runtime(asking(begin)) as runtime:
        await (await runtime.session("s")).run("go")
        await (await runtime.session("thief")).run("go")

    assert seen == ["refused"]


# ---------------------------------------------------------------------- wherever it is killed


async def family(lab: Lab) -> None:
    """Two turns; the second one begins a fork with a prelude by a directive, and another child by a service."""

    async def begin(ctx: TurnContext) -> Any:
        if ctx.turn_id != "s.2":
            return None
        await ctx.host.create_session(CreateSession(prelude=SEEN, said=Message("user", "served"), label="served"))
        return CreateSession(start="fork", prelude=SEEN, said=Message("user", "directed"), label="directed")

    async with lab.runtime([asking(begin)]) as runtime:
        session = await runtime.session("s")
        for said in ("one", "two"):
            await session.run(said, key=said)
        await runtime.wait_idle(timeout=60)
        for row in await runtime.sessions.list():
            child = await runtime.session(row.id)
            await lab.effect("history", row.id, texts(await child.history()))
        await lab.effect("usage", "s", {label: usage.calls for label, usage in (await session.usage()).items()})


def test_children_are_begun_once_and_whole_wherever_their_parent_is_killed() -> None:
    report = kill_everywhere(family)

    assert (report.lost, report.problems, report.unreached) == (0, [], [])
    names = {str(row.crash) for row in report.rows}
    assert {"lost branch", "before configure", "lost configure", "lost accept queue"} <= names
    for row in report.rows:
        last = max(line.incarnation for line in row.played.ledger if line.name == "usage")
        told = [line for line in row.played.ledger if line.incarnation == last]
        histories = sorted(line.data for line in told if line.name == "history")
        assert histories == [
            ["What is tea?", "A drink.", "served", "3 from What is tea?"],
            ["one", "1 from one", "What is tea?", "A drink.", "directed", "5 from one"],
            ["one", "1 from one", "two", "3 from one"],
        ], str(row.crash)
        assert [line.data for line in told if line.name == "usage"] == [{"turns": 2, "served": 1, "directed": 1}]
