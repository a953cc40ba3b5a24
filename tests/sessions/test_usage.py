"""`session.usage()`: everything a session asked of models is counted once, under the label that asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Agent, Budget, Message, ModelRequest, ModelResponse, ToolCall, ToolContext, Usage, tool
from perdure.errors import InvalidInput, ProviderError, SessionDeleted, TurnFailed
from perdure.model.outcome import BudgetSpent, Finished, PluginAborted
from perdure.model.plugin import CreateSession
from perdure.model.session import Settings, dump_settings
from perdure.model.tool import Cancelled
from perdure.model.write import Configure
from perdure.plugins.hooks import Plugin, TurnContext
from perdure.plugins.operations import CommandContext, command
from perdure.testing import FunctionModel, VirtualClock
from perdure.testing.crash import Lab, kill_everywhere
from tests.kit import SOON, Place, TellingModel, crash


class Books:
    """A model that keeps books of its own: who asked, and what it was told it had cost."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, request: ModelRequest) -> Any:
        said = request.messages[-1].text
        self.asked.append("turn" if request.turn_id else said)
        usage = Usage(input=10, output=len(self.asked), cost=0.5)
        if not request.turn_id or request.messages[-1].role == "tool":
            return ModelResponse(f"about {said}", usage=usage)
        return ModelResponse("", [ToolCall("c", "look")], usage=usage, stop="tool_calls")

    def total(self) -> Usage:
        count = len(self.asked)
        return Usage(10 * count, count * (count + 1) // 2, calls=count, cost=0.5 * count)


class Asking(Plugin):
    """Asks a model of its own wherever it can."""

    id = "asking"

    async def _ask(self, ctx: Any, label: str) -> None:
        await ctx.host.complete(label, label=label)

    async def prompt(self, ctx: Any) -> str:
        if ctx.step == 1:
            await self._ask(ctx, "prompt")
        return ""

    async def after_tool_call(self, ctx: Any) -> None:
        await self._ask(ctx, "review")

    async def turn_persisted(self, ctx: Any) -> None:
        await asyncio.gather(ctx.host.complete("after", label="after"), ctx.host.complete("after", label="after"))

    @command
    async def check(self, ctx: CommandContext) -> str:
        """Ask between two turns."""
        return (await ctx.host.complete("check", label="check")).text


@tool
async def look(ctx: ToolContext[Any]) -> str:
    """Look."""
    return (await ctx.host.complete("inside", label="inside")).text


def added(usage: dict[str, Usage]) -> Usage:
    return sum(usage.values(), Usage())


async def test_session_in_which_nothing_was_said_has_cost_nothing(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(Books()), tools=[look])) as runtime:
        assert await (await runtime.session("s")).usage() == {"turns": Usage()}


async def test_everything_that_was_asked_is_counted_once_by_its_label(place: Place) -> None:
    books = Books()
    async with place.runtime(Agent(FunctionModel(books), tools=[look], plugins=[Asking()])) as runtime:
        session = await runtime.session("s")
        first = await session.run("go")
        await session.call("asking.check")
        second = await session.run("again")
        usage = await session.usage()
    async with place.runtime() as runtime:
        later = await (await runtime.session("s")).usage()

    assert {label: each.calls for label, each in usage.items()} == {
        "turns": 4,
        "prompt": 2,
        "inside": 2,
        "review": 2,
        "after": 4,
        "check": 1,
    }
    assert len(books.asked) == 15
    assert added(usage) == books.total()
    assert usage["turns"] == first.usage + second.usage
    assert later == usage


async def test_open_turn_counts_as_far_as_it_is_recorded(place: Place) -> None:
    answered = Books()

    @tool(approval="ask", name="look")
    async def ask_first() -> str:
        """Look, if a person agrees."""
        return "seen"

    async with place.runtime(Agent(FunctionModel(answered), tools=[ask_first])) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        assert result.waiting
        waiting = await session.usage()
        await session.send("and then?")  # said, and nothing asked for it yet
        assert await session.usage() == waiting
        [call] = await session.pending()
        await session.approve(call.call_id)
        await session.result("s.1")
        assert await runtime.wait_idle(SOON)

    assert waiting == {"turns": Usage(10, 1, calls=1, cost=0.5)}


async def test_usage_that_a_provider_does_not_tell_is_unknown_and_not_zero(place: Place) -> None:
    def model(request: ModelRequest) -> str:
        return "done"

    class Once(Plugin):
        id = "once"

        async def prompt(self, ctx: Any) -> str:
            await ctx.host.complete("hm?", label="turns")
            return ""

    async with place.runtime(Agent(FunctionModel(model), plugins=[Once()])) as runtime:
        session = await runtime.session("s")
        await session.run("go")

        assert await session.usage() == {"turns": Usage(calls=2, unknown=2)}, "also under a label that is taken"


async def test_two_questions_that_cost_the_same_at_the_same_time_are_both_counted(place: Place) -> None:
    class Reviews(Plugin):
        id = "reviews"

        async def turn_persisted(self, ctx: Any) -> None:
            await asyncio.gather(*[ctx.host.complete("hm?", label="review") for _ in range(5)])

    model = FunctionModel(lambda request: ModelResponse("done", usage=Usage(2, 1)))
    async with place.runtime(Agent(model, plugins=[Reviews()])) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        assert await runtime.wait_idle(SOON)

        assert (await session.usage())["review"] == Usage(10, 5, calls=5)


async def test_fork_begins_with_nothing_and_its_source_keeps_what_it_spent(place: Place) -> None:
    books = Books()
    async with place.runtime(Agent(FunctionModel(books), tools=[look], plugins=[Asking()])) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        before = await session.usage()
        fork = await session.fork(session_id="fork")
        nothing = await fork.usage()
        await fork.run("go on")
        together = added(await session.usage()) + added(await fork.usage())

        assert await session.usage() == before
    assert (nothing, together) == ({"turns": Usage()}, books.total())


async def test_deleted_session_has_no_usage_to_tell(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(Books()), tools=[look])) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await runtime.sessions.delete("s")
        with pytest.raises(SessionDeleted):
            await session.usage()


async def test_long_session_is_added_up_over_many_pieces(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(lambda request: ModelResponse("done", usage=Usage(2, 1))))) as runtime:
        session = await runtime.session("s")
        for n in range(130):
            await session.run(str(n))

        assert await session.usage() == {"turns": Usage(260, 130, calls=130)}


# ---------------------------------------------------------------------- by model


async def test_usage_by_model_adds_up_to_the_same(place: Place) -> None:
    def model(request: ModelRequest) -> Any:
        if not request.turn_id:
            return ModelResponse("in short", usage=Usage(3, 1), model="small")
        if request.messages[-1].role == "tool":
            return ModelResponse("done", usage=Usage(5, 2))  # it does not say which it was
        return ModelResponse("", [ToolCall("c", "look")], usage=Usage(7, 2), stop="tool_calls", model="large")

    async with place.runtime(Agent(FunctionModel(model), tools=[look], plugins=[Asking()])) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await session.call("asking.check")
        by_label, by_model = await session.usage(), await session.usage(by="model")

    assert by_model == {"large": Usage(7, 2, calls=1), "": Usage(5, 2, calls=1), "small": Usage(18, 6, calls=6)}
    assert added(by_model) == added(by_label)


async def test_usage_by_anything_else_is_refused_in_words(place: Place) -> None:
    wrong: Any = "day"
    async with place.runtime(Agent(FunctionModel(Books()))) as runtime:
        session = await runtime.session("s")
        assert await session.usage(by="model") == {}
        with pytest.raises(InvalidInput, match="by 'label' or 'model', not 'day'"):
            await session.usage(by=wrong)


# ---------------------------------------------------------------------- children


class Delegating(Plugin):
    """Begins children with its first turns, and one by command; a child begins one of its own."""

    id = "delegating"

    def before_turn(self, ctx: TurnContext) -> Any:
        said = Message("user", "go")
        match ctx.turn_id:
            case "s.1":
                return [CreateSession(session_id=name, said=said, label="research") for name in ("a", "b")]
            case "a.1":
                return CreateSession(session_id="a2", said=said, label="deeper")
            case "s.2":
                return CreateSession(session_id="c", start="fork", said=said)
            case _:
                return None

    @command
    async def more(self, ctx: CommandContext) -> str:
        """Begin another one between two turns."""
        return await ctx.host.create_session(CreateSession(session_id="d", said=Message("user", "go"), label="more"))


async def test_children_count_in_their_parent_under_their_labels_with_all_they_led_to(place: Place) -> None:
    model = FunctionModel(lambda request: ModelResponse("done", usage=Usage(2, 1), model="m"))
    async with place.runtime(Agent(model, plugins=[Delegating()])) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        await session.run("two")
        await session.call("delegating.more")
        assert await runtime.wait_idle(SOON)
        usage, by_model = await session.usage(), await session.usage(by="model")
        family = {name: await (await runtime.session(name)).usage() for name in ("a", "a2", "b", "c", "d")}
        await runtime.sessions.delete("a")
        without = await session.usage()

    one = Usage(2, 1, calls=1)
    assert usage == {"turns": one + one, "research": one + one + one, "child": one, "more": one}
    assert by_model == {"m": Usage(14, 7, calls=7)}
    assert family["a"] == {"turns": one, "deeper": one}
    assert [family[name] for name in ("a2", "b", "c", "d")] == [{"turns": one}] * 4
    assert without["research"] == one, "what is deleted is gone with what it led to"


async def test_fork_does_not_count_the_children_of_its_source(place: Place) -> None:
    model = FunctionModel(lambda request: ModelResponse("done", usage=Usage(2, 1)))
    async with place.runtime(Agent(model, plugins=[Delegating()])) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        await session.call("delegating.more")
        assert await runtime.wait_idle(SOON)
        fork = await session.fork(session_id="fork")

        assert await fork.usage() == {"turns": Usage()}


async def test_long_line_of_descendants_is_added_up(place: Place) -> None:
    """Deeper than Python would let a function call itself."""
    deep = 1200
    one = FunctionModel(lambda request: ModelResponse("done", usage=Usage(1)))
    async with place.runtime(Agent(one, name="agent")) as runtime:
        store, child = runtime.store, Settings(parent="g0", children=("g2",), ledger={"x": Usage(1)})
        await store.write(Configure("g0", "agent", dump_settings(Settings(children=("g1",))), 0))
        for n in range(1, deep):
            settings = replace(child, parent=f"g{n - 1}", children=(f"g{n + 1}",), label=f"l{n}")
            await store.write(Configure(f"g{n}", "agent", dump_settings(settings), 0))

        assert await (await runtime.session("g0")).usage() == {"turns": Usage(), "l1": Usage(deep - 1)}


# ---------------------------------------------------------------------- crashes


class Once(Plugin):
    """Asks in one hook, unless it is told not to. The next life of its turn then does not ask."""

    id = "once"

    def __init__(self, hook: str) -> None:
        self.hook = hook

    async def _ask(self, ctx: Any, hook: str) -> None:
        if self.hook == hook:
            await ctx.host.complete("hm?", label="aside")

    async def before_tool_call(self, ctx: Any) -> None:
        await self._ask(ctx, "before_tool_call")

    async def compact(self, ctx: Any) -> None:
        await self._ask(ctx, "compact")

    async def prompt(self, ctx: Any) -> str:
        await self._ask(ctx, "prompt")
        return ""


def answering(request: ModelRequest) -> Any:
    """The same as the first model, for a life after its death: what it is asked costs something else."""
    usage = Usage(10, 1)
    if not request.turn_id or request.messages[-1].role == "tool":
        return ModelResponse("done", usage=usage)
    return ModelResponse("", [ToolCall("c", "plain")], usage=usage, stop="tool_calls")


@tool(recovery="rerun")
def plain() -> str:
    """Nothing special."""
    return "seen"


@pytest.mark.parametrize("hook", ["before_tool_call", "compact", "prompt"])
@pytest.mark.parametrize("again", [True, False])
async def test_completion_in_flight_at_a_crash_is_one_unknown_call_whether_or_not_it_is_asked_again(
    place: Place, hook: str, again: bool
) -> None:
    died = TellingModel()
    runtime = await place.runtime(Agent(died, name="agent", tools=[plain], plugins=[Once(hook)])).__aenter__()
    receipt = await (await runtime.session("s")).send("go")
    if hook == "before_tool_call":
        await died.next()
        died.say(answering(ModelRequest([Message("user", "go")], turn_id="s.1")))
    assert not (await died.next()).turn_id, "a completion is in flight"
    await crash(runtime)
    agent = Agent(FunctionModel(answering), name="agent", tools=[plain], plugins=[Once(hook if again else "")])
    async with place.runtime(agent) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        result = await session.result(receipt.turn_id)
        usage = await session.usage()

    asked = (2 if hook == "prompt" else 1) if again else 0
    assert isinstance(result.outcome, Finished)
    assert usage["aside"] == Usage(10 * asked or None, asked or None, calls=asked, unknown=1)
    assert usage["turns"] == Usage(20, 2, calls=2), "no question of the turn itself was lost"


async def test_each_crash_in_the_same_completion_is_counted(place: Place) -> None:
    for _ in range(2):
        died = TellingModel()
        runtime = await place.runtime(Agent(died, name="agent", plugins=[Once("compact")])).__aenter__()
        session = await runtime.session("s")
        await session.send("go", key="go")
        assert not (await died.next()).turn_id
        await crash(runtime)
    async with place.runtime(Agent(FunctionModel(answering), name="agent", plugins=[Once("compact")])) as runtime:
        session = await runtime.session("s")
        async with asyncio.timeout(SOON):
            await session.result("s.1")

        assert (await session.usage())["aside"] == Usage(10, 1, calls=1, unknown=2)


async def test_completion_that_kills_again_and_again_leaves_the_turn_stuck(place: Place) -> None:
    """That it is asked is on record; that it is asked again is no new record that would prove progress."""
    for _ in range(5):
        died = TellingModel()
        runtime = await place.runtime(Agent(died, name="agent", plugins=[Once("compact")])).__aenter__()
        await (await runtime.session("s")).send("go", key="go")
        await died.next()
        await crash(runtime)
    async with place.runtime(Agent(FunctionModel(answering), name="agent", plugins=[Once("compact")])) as runtime:
        session = await runtime.session("s")
        with pytest.raises(TurnFailed, match="stuck"):
            async with asyncio.timeout(SOON):
                await session.result("s.1")


async def test_completion_outside_of_turns_that_a_crash_cuts_off_is_unknown(place: Place) -> None:
    died = TellingModel()
    runtime = await place.runtime(Agent(died, name="agent", plugins=[Asking()])).__aenter__()
    call = asyncio.create_task((await runtime.session("s")).call("asking.check"))
    await died.next()
    await crash(runtime)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    async with place.runtime(Agent(FunctionModel(answering), name="agent", plugins=[Asking()])) as runtime:
        session = await runtime.session("s")
        before = await session.usage()
        await session.call("asking.check")

        assert before == {"turns": Usage(), "check": Usage(unknown=1)}
        assert await session.usage() == {"turns": Usage(), "check": Usage(10, 1, calls=1, unknown=1)}
        assert await session.usage(by="model") == {"": Usage(10, 1, calls=1, unknown=1)}


@pytest.mark.parametrize("inside", [True, False], ids=["in a turn", "outside"])
async def test_completion_that_is_refused_has_cost_nothing(place: Place, inside: bool) -> None:
    class Patient(Plugin):
        id = "patient"

        async def prompt(self, ctx: Any) -> str:
            with pytest.raises(ProviderError, match="no credit"):
                await ctx.host.complete("hm?", label="aside")
            return ""

        @command
        async def ask(self, ctx: CommandContext) -> None:
            """Ask."""
            with pytest.raises(ProviderError, match="no credit"):
                await ctx.host.complete("hm?", label="aside")

    def model(request: ModelRequest) -> Any:
        if not request.turn_id:
            raise ProviderError("no credit", code="no_credit")
        return ModelResponse("done", usage=Usage(2, 1))

    async with place.runtime(Agent(FunctionModel(model), plugins=[Patient()])) as runtime:
        session = await runtime.session("s")
        await (session.run("go") if inside else session.call("patient.ask"))
        usage = added(await session.usage())

    assert usage == (Usage(2, 1, calls=1) if inside else Usage())


async def test_completion_that_its_hook_gave_up_may_have_cost_something(place: Place) -> None:
    class Hasty(Plugin):
        id = "hasty"

        async def prompt(self, ctx: Any) -> str:
            asked = asyncio.ensure_future(ctx.host.complete("hm?", label="aside"))
            await model.next()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            gave_up.set()
            return ""

    model, gave_up = TellingModel(), asyncio.Event()
    runtime = await place.runtime(Agent(model, name="agent", plugins=[Hasty()])).__aenter__()
    receipt = await (await runtime.session("s")).send("go")
    async with asyncio.timeout(SOON):
        await gave_up.wait()
    assert (await model.next()).turn_id
    await crash(runtime)  # the turn's own question is in flight, and counts for itself
    async with place.runtime(Agent(FunctionModel(answering), name="agent", tools=[plain])) as runtime:
        session = await runtime.session("s")
        async with asyncio.timeout(SOON):
            await session.result(receipt.turn_id)

        assert await session.usage() == {"turns": Usage(20, 2, calls=2, unknown=1), "aside": Usage(unknown=1)}


async def test_usage_that_makes_no_sense_is_refused_before_it_is_written(place: Place) -> None:
    odd: Any = Usage(-1)

    class Odd(Plugin):
        id = "odd"

        async def prompt(self, ctx: Any) -> str:
            with pytest.raises(ProviderError, match="the provider reported a usage of"):
                await ctx.host.complete("hm?", label="aside")
            return ""

    def model(request: ModelRequest) -> Any:
        return ModelResponse("done", usage=Usage(2, 1) if request.turn_id else odd)

    async with place.runtime(Agent(FunctionModel(model), plugins=[Odd()])) as runtime:
        session = await runtime.session("s")
        await session.run("go")

        assert await session.usage() == {"turns": Usage(2, 1, calls=1), "aside": Usage(unknown=1)}


async def test_what_was_recorded_before_a_crash_is_counted_once_and_what_was_lost_is_unknown(place: Place) -> None:
    died = TellingModel()
    runtime = await place.runtime(Agent(died, name="agent", tools=[look], plugins=[Asking()])).__aenter__()
    receipt = await (await runtime.session("s")).send("go")
    assert not (await died.next()).turn_id
    died.say(ModelResponse("in short", usage=Usage(3, 2)))
    assert (await died.next()).turn_id
    await crash(runtime)  # the completion is recorded, the turn's own question is in flight
    books = Books()
    async with place.runtime(Agent(FunctionModel(books), name="agent", tools=[look], plugins=[Asking()])) as runtime:
        session = await runtime.session("s")
        result = await session.result(receipt.turn_id)
        assert await runtime.wait_idle(SOON)
        usage = await session.usage()

    assert isinstance(result.outcome, Finished)
    assert "prompt" not in books.asked
    assert added(usage) == Usage(3, 2, calls=1, unknown=1) + books.total()


async def spending(lab: Lab) -> None:
    agent = Agent(FunctionModel(Books()), tools=[look], plugins=[Asking()])
    async with lab.runtime([agent]) as runtime:
        session = await runtime.session("s")
        await session.run("go", key="go")
        await runtime.wait_idle(timeout=60)
        usage = added(await session.usage())
        await lab.effect("counted", "s", [usage.calls, usage.unknown])


def test_nothing_is_counted_twice_wherever_it_is_killed_and_what_was_in_flight_is_unknown() -> None:
    """One more than was asked may be unknown: killed just before, nobody can tell that it was not asked."""
    report = kill_everywhere(spending)

    assert (report.lost, report.problems, report.unreached) == (0, [], [])
    for row in report.rows:
        asked = sum(1 for line in row.played.ledger if line.name == "model")
        calls, unknown = next(line.data for line in reversed(row.played.ledger) if line.name == "counted")
        assert calls <= asked, f"{row.crash}: something is counted twice"
        assert calls + unknown >= asked, f"{row.crash}: {asked} were asked, {calls} counted, {unknown} unknown"
        assert calls + unknown <= asked + 1, f"{row.crash}: {asked} were asked, {calls} counted, {unknown} unknown"
    plain = [line.data for line in report.plain.ledger if line.name == "counted"]
    assert plain == [[7, 0]]


class Breaking:
    """A model whose first streams break off, after some text or before it."""

    name = "breaking"

    def __init__(self, breaks: int, text: str, code: str = "overloaded", retryable: bool = True) -> None:
        self.breaks, self.text, self.error = breaks, text, ProviderError("broke", retryable=retryable, code=code)

    async def stream(self, request: ModelRequest) -> Any:
        if self.text:
            yield self.text
        self.breaks -= 1
        if self.breaks >= 0:
            raise self.error
        yield ModelResponse("done", usage=Usage(input=1, output=2))


@pytest.mark.parametrize(("text", "unknown"), [("so far", 2), ("", 0)])
async def test_a_stream_that_breaks_after_text_and_is_asked_again_is_unknown(
    place: Place, text: str, unknown: int
) -> None:
    async with place.runtime(Agent(Breaking(2, text)), clock=VirtualClock(auto=True)) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")

        assert (result.usage.calls, result.usage.unknown) == (1, unknown)
        assert await session.usage() == {"turns": result.usage}


@pytest.mark.parametrize(("text", "unknown"), [("so far", 1), ("", 0)])
async def test_a_stream_that_breaks_for_good_after_text_is_unknown(place: Place, text: str, unknown: int) -> None:
    async with place.runtime(Agent(Breaking(1, text, retryable=False))) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")

        assert (result.usage.calls, result.usage.unknown) == (0, unknown)
        assert sum([each.unknown for each in (await session.usage()).values()]) == unknown


async def test_a_model_call_that_is_ended_by_a_cancel_is_one_of_unknown_cost(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        receipt = await session.send("go")
        await model.next()
        await session.cancel("stop")
        result = await receipt.result()
        usage, by_model = await session.usage(), await session.usage(by="model")
    async with place.runtime() as runtime:
        later = await (await runtime.session("s")).usage()

    assert result.outcome == Cancelled("host", "stop")
    assert result.usage == Usage(unknown=1)
    assert usage == later == {"turns": Usage(unknown=1)}
    assert by_model == {"": Usage(unknown=1)}


async def test_a_model_call_that_is_ended_by_the_time_of_its_turn_is_one_of_unknown_cost(place: Place) -> None:
    async with place.runtime(Agent(TellingModel(), budget=Budget(seconds=0.01))) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        result = await session.run("go")
        usage = await session.usage()

    assert result.outcome == BudgetSpent("seconds", 0.01)
    assert result.usage == Usage(unknown=1)
    assert usage == {"turns": Usage(unknown=1)}


async def test_a_turn_that_is_cancelled_before_its_model_is_asked_has_cost_nothing(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        await session.send("one")
        await model.next()
        queued = await session.send("two")
        await session.cancel("not needed", turn_id=queued.turn_id)
        model.say("done")
        result = await queued.result()
        assert await runtime.wait_idle(SOON)
        usage = await session.usage()

    assert result.usage == Usage()
    assert usage == {"turns": Usage(calls=1, unknown=1)}, "a script says nothing of usage"


@pytest.mark.parametrize("place", ["memory"], indirect=True)
async def test_an_answer_that_a_plugin_refuses_is_one_of_unknown_cost(place: Place) -> None:
    class Refuses(Plugin):
        id = "refuses"

        async def transform_response(self, ctx: Any, response: ModelResponse) -> ModelResponse:
            raise ValueError("not this one")

    answered = FunctionModel(lambda _: ModelResponse("done", usage=Usage(input=5)))
    async with place.runtime(Agent(answered, plugins=[Refuses()])) as runtime, asyncio.timeout(SOON):
        result = await (await runtime.session("s")).run("go")

    assert isinstance(result.outcome, PluginAborted)
    assert result.usage == Usage(unknown=1)
