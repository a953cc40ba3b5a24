"""The tools with which a model handles processes: told to it as a host is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Plugin, ProcessContext, ToolContext, process, tool
from perdure.builtin.processes import process_tools
from perdure.model.plugin import AskPerson, ReplaceArgs, ShortCircuit
from perdure.model.process import Abandoned, Cancelled, EventType, Success, WakeRule
from perdure.model.tool import Cancelled as CallCancelled
from perdure.model.tool import Denied, Failed, Ok, OutcomeUnknown, OutputBudget
from perdure.plugins.hooks import ToolCallContext
from perdure.processes.local import External
from perdure.wire import status_json, view_json
from tests.kit import SOON, Place, until
from tests.processes_tools.talk import Talk, agent_of, call, ended, handle, ids, outcomes, results_of, row_of, said


@tool(background=True)
async def crawl(site: str) -> str:
    """Crawl a site."""
    return f"crawled {site}"


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@process(signals={"approve": dict})
async def publish(ctx: ProcessContext[Any], what: str) -> str:
    answer = await ctx.wait_signal("approve")
    return f"{what}: {answer['by']}"


# ---------------------------------------------------------------------- the same for models and hosts


async def test_what_a_model_is_told_is_what_a_host_is_told(place: Place) -> None:
    talk = Talk(
        [call("start_process", name="publish", args={"what": "news"}, label="the news")],
        lambda found: [call("list_processes")],
        lambda _: [call("signal_process", handle=handle("chat.1.1.0"), signal_name="approve", payload={"by": "kim"})],
        lambda _: [call("await_process", handle=handle("chat.1.1.0"))],
        lambda _: [call("cancel_process", handle=handle("chat.1.1.0")), call("list_processes", live=False)],
    )
    agent = agent_of(talk, *process_tools(publish))
    async with place.runtime(agent, processes=[publish]) as runtime:
        started, listed, told, awaited, stopped, over = await outcomes(runtime)
        row = await row_of(runtime, "chat.1.1.0")
        rows = await runtime.processes.list(session_id="chat")
        value = await runtime.handle("chat.1.1.0").result()
        signals = [e.sequence async for e in runtime.processes.events("chat.1.1.0") if e.type == "signal.approve"]

    assert started == Ok(runtime_json(row.id))
    assert isinstance(listed, Ok)
    assert [(each["process_id"], each["label"], each["kind"]) for each in listed.value] == [
        ("chat.1.1.0", "the news", "function")
    ]
    assert told == Ok({"process_id": "chat.1.1.0", "sequence": signals[0]})
    assert awaited == Ok(value) == Ok("news: kim")
    assert stopped == Ok(status_json(row)) == Ok({"process_id": "chat.1.1.0", "status": "completed"})
    assert over == Ok([view_json(each) for each in rows])


def runtime_json(process_id: str) -> dict[str, str]:
    return {"__handle__": "process", "id": process_id}


async def test_results_belong_to_the_call_that_asked_for_them(place: Place) -> None:
    talk = Talk(
        [call("crawl", site=site) for site in "abc"],
        lambda found: [call("await_process", handle=each) for each in reversed(found)],
    )
    async with place.runtime(agent_of(talk, crawl)) as runtime:
        await said(runtime)

    assert results_of(talk.requests[2]) == ["crawled c", "crawled b", "crawled a"]


# ---------------------------------------------------------------------- start_process


async def test_any_tool_of_the_agent_can_be_started_in_the_background(place: Place) -> None:
    talk = Talk([call("start_process", name="add", args={"a": 1, "b": 2})])
    async with place.runtime(agent_of(talk, add, crawl)) as runtime:
        assert await outcomes(runtime) == [Ok(handle("chat.1.1.0"))]
        assert await runtime.handle("chat.1.1.0").result(SOON) == 3


@pytest.mark.parametrize(
    ("name", "args", "code"),
    [
        ("vanish", {}, "tool_unavailable"),
        ("add", {"a": 1}, "invalid_tool_args"),
        ("add", {"a": "x", "b": 2}, "invalid_tool_args"),
        ("publish", {"what": "news"}, "tool_unavailable"),
    ],
)
async def test_what_cannot_be_called_cannot_be_started(place: Place, name: str, args: Any, code: str) -> None:
    """A durable function of the host is no model's to start unless its agent offers it."""
    talk = Talk([call("start_process", name=name, args=args)])
    async with place.runtime(agent_of(talk, add, crawl), processes=[publish]) as runtime:
        (outcome,) = await outcomes(runtime)
        rows = await runtime.processes.list()

    assert isinstance(outcome, Failed)
    assert outcome.code == code
    assert ids(rows) == []


class Guard(Plugin):
    """Denies, asks or rewrites calls of `add`, and lets everything else pass."""

    id = "guard"

    def __init__(self, directive: Any) -> None:
        self.directive = directive

    def before_tool_call(self, ctx: ToolCallContext) -> Any:
        if ctx.tool.name != "add" or ctx.args == {"a": 5, "b": 5}:
            return None
        return self.directive


async def started_under(place: Place, directive: Any) -> tuple[Any, list[str], list[Any]]:
    talk = Talk([call("start_process", name="add", args={"a": 1, "b": 2})])
    async with place.runtime(agent_of(talk, add, crawl, plugins=[Guard(directive)])) as runtime:
        (outcome,) = await outcomes(runtime)
        rows = await runtime.processes.list()
        for row in rows:
            await ended(runtime, row.id)
        found = [(await row_of(runtime, row.id)).record.outcome for row in rows]
    return outcome, ids(rows), found


async def test_starting_a_tool_is_no_way_round_a_plugin_that_denies_it(place: Place) -> None:
    outcome, started, _ = await started_under(place, ShortCircuit(Denied("never", "guard")))

    assert outcome == Denied("never", "guard")
    assert started == []


async def test_starting_a_tool_is_no_way_round_a_person(place: Place) -> None:
    outcome, started, _ = await started_under(place, AskPerson("are you sure?"))

    assert isinstance(outcome, Failed)
    assert outcome.code == "approval_needed"
    assert started == []


async def test_what_a_plugin_rewrites_is_what_is_started(place: Place) -> None:
    outcome, started, found = await started_under(place, ReplaceArgs({"a": 5, "b": 5}))

    assert outcome == Ok(handle("chat.1.1.0"))
    assert started == ["chat.1.1.0"]
    assert found == [Success(10)]


async def test_a_tool_that_asks_for_approval_is_not_started_without_it(place: Place) -> None:
    @tool(approval="ask")
    async def order() -> str:
        return "ordered"

    async with place.runtime(agent_of(Talk([call("start_process", name="order")]), order, crawl)) as runtime:
        (outcome,) = await outcomes(runtime)
        rows = await runtime.processes.list()

    assert isinstance(outcome, Failed)
    assert outcome.code == "approval_needed"
    assert ids(rows) == []


async def test_a_tool_that_defers_is_not_started(place: Place) -> None:
    @tool(deferred=True)
    async def build(ctx: ToolContext[Any]) -> None:
        ctx.defer()

    async with place.runtime(agent_of(Talk([call("start_process", name="build")]), build, crawl)) as runtime:
        (outcome,) = await outcomes(runtime)
        rows = await runtime.processes.list()

    assert isinstance(outcome, Failed)
    assert "defers its completion" in outcome.message
    assert ids(rows) == []


# ---------------------------------------------------------------------- await_process


async def test_an_awaited_end_wakes_the_session_no_second_time(place: Place) -> None:
    talk = Talk(
        [call("crawl", site="a"), call("crawl", site="b")],
        lambda found: [call("await_process", handle=found[0])],
        lambda _: "done",
    )
    async with place.runtime(agent_of(talk, crawl)) as runtime:
        await said(runtime)
        await until(lambda: talk.news)
        await runtime.wait_idle(SOON)
        discarded = await runtime.store.wakes("chat", "discarded")

    (news,) = talk.news
    assert "crawled b" in news
    assert "crawled a" not in news
    assert [wake.reason for wake in discarded] == ["the session awaited it"]


async def test_other_news_of_an_awaited_process_are_still_told(place: Place) -> None:
    @tool
    async def build(ctx: ToolContext[Any]) -> dict[str, str]:
        work = External("build", events=[EventType("red", wake=WakeRule())])
        started = await ctx.start(work, wake="turn")
        await ctx.deps["processes"]().emit(started.id, "red", {"line": 7})
        await ctx.deps["processes"]().complete(started.id, "built")
        return started.to_json()

    talk = Talk([call("build")], lambda found: [call("await_process", handle=found[0])])
    deps: dict[str, Any] = {}
    async with place.runtime(agent_of(talk, build, crawl), deps=deps) as runtime:
        deps["processes"] = lambda: runtime.processes
        _, awaited = await outcomes(runtime)
        await until(lambda: talk.news)
        await runtime.wait_idle(SOON)

    assert awaited == Ok("built")
    (news,) = talk.news
    assert "red" in news
    assert "built" not in news


async def test_a_model_that_waits_too_long_is_told_that_it_goes_on(place: Place) -> None:
    going = asyncio.Event()

    @tool(background=True)
    async def wait() -> str:
        await going.wait()
        return "waited"

    talk = Talk([call("wait")], lambda found: [call("await_process", handle=found[0], timeout=0.01)])
    async with place.runtime(agent_of(talk, wait)) as runtime:
        _, outcome = await outcomes(runtime)
        going.set()
        assert await runtime.handle("chat.1.1.0").result(SOON) == "waited"

    assert outcome == Failed("timed_out", "process 'chat.1.1.0' did not end within 0.01 s")


@pytest.mark.parametrize("timeout", [-1, 1e9])
async def test_a_time_that_makes_no_sense_is_refused(place: Place, timeout: float) -> None:
    talk = Talk([call("await_process", handle=handle("p"), timeout=timeout)])
    async with place.runtime(agent_of(talk, crawl)) as runtime:
        (outcome,) = await outcomes(runtime)

    assert isinstance(outcome, Failed)
    assert outcome.code == "invalid_tool_args"


async def test_a_large_value_is_shown_within_the_budget_and_kept_whole(place: Place) -> None:
    @tool(background=True)
    async def long() -> str:
        return "row\n" * 10_000

    talk = Talk([call("long")], lambda found: [call("await_process", handle=found[0])])
    agent = agent_of(talk, long, output_budget=OutputBudget(lines=20))
    async with place.runtime(agent) as runtime:
        _, outcome = await outcomes(runtime)
        value = await runtime.handle("chat.1.1.0").result()

    assert isinstance(outcome, Ok)
    assert outcome.value.count("\n") < 25
    assert outcome.whole is not None
    assert value == "row\n" * 10_000


async def test_the_model_is_told_unknown_as_unknown(place: Place) -> None:
    @tool(background=True, timeout=0.01)
    async def hang() -> None:
        await asyncio.Event().wait()

    talk = Talk([call("hang")], lambda found: [call("await_process", handle=found[0])])
    async with place.runtime(agent_of(talk, hang)) as runtime:
        _, outcome = await outcomes(runtime)
        output = await runtime.handle("chat.1.1.0").outcome()

    assert outcome == OutcomeUnknown("process 'chat.1.1.0' was given up (engine_gave_up): it did not end within 0.01 s")
    assert isinstance(output, Abandoned)
    assert results_of(talk.requests[2])[0]["error"] == "outcome_unknown"


# ---------------------------------------------------------------------- a turn that is cancelled


def waiting_tool(begun: asyncio.Event, listens: bool = True) -> Any:
    @tool(background=True)
    async def wait() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not listens:
                await asyncio.Event().wait()
            raise
        return "waited"

    return wait


async def test_a_cancelled_turn_stops_what_it_started_and_awaits_and_learns_the_truth(place: Place) -> None:
    begun = asyncio.Event()
    talk = Talk([call("wait")], lambda found: [call("await_process", handle=found[0])])
    async with place.runtime(agent_of(talk, waiting_tool(begun))) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("go")
        await begun.wait()
        await until(lambda: "chat.1.1.0" in runtime._work.awaited)
        await session.cancel("enough", by="kim")
        await asyncio.wait_for(receipt.result(), SOON)
        output = await runtime.handle("chat.1.1.0").outcome(SOON)

    assert output == Cancelled("kim", "its turn was cancelled", unknown=True)


async def test_a_cancelled_turn_leaves_alone_what_another_started(place: Place) -> None:
    begun = asyncio.Event()
    talk = Talk([call("wait")], "started", [call("await_process", handle=handle("chat.1.1.0"))], "never said")
    async with place.runtime(agent_of(talk, waiting_tool(begun)), grace=0) as runtime:
        await said(runtime)
        session = await runtime.session("chat")
        receipt = await session.send("wait for it")
        await until(lambda: "chat.1.1.0" in runtime._work.awaited)
        await session.cancel("enough")
        await asyncio.wait_for(receipt.result(), SOON)
        row = await row_of(runtime, "chat.1.1.0")

    assert row.record.cancel is None


async def test_a_runtime_that_is_left_while_a_turn_awaits_stops_nothing(place: Place) -> None:
    """Another process waits on, for the same one."""
    going, begun = asyncio.Event(), asyncio.Event()

    @tool(background=True, recovery="rerun")
    async def wait() -> str:
        begun.set()
        await going.wait()
        return "waited"

    talk = Talk([call("wait")], lambda found: [call("await_process", handle=found[0])])
    agent = agent_of(talk, wait)
    async with place.runtime(agent, grace=0) as runtime:
        await (await runtime.session("chat")).send("go")
        await begun.wait()
        await until(lambda: "chat.1.1.0" in runtime._work.awaited)
    going.set()
    async with place.runtime(agent) as runtime:
        session = await runtime.session("chat")
        result = await asyncio.wait_for(session.result("chat.1"), SOON)
        row = await row_of(runtime, "chat.1.1.0")

    assert result.tool_calls[1].outcome == Ok("waited")
    assert row.record.cancel is None


async def test_a_cancelled_process_is_told_as_cancelled(place: Place) -> None:
    @tool(background=True, limit=1)
    async def one(n: int) -> int:
        await asyncio.sleep(3600)
        return n

    talk = Talk(
        [call("one", n=1)],
        [call("one", n=2)],
        lambda found: [call("cancel_process", handle=found[0], reason="not needed")],
        [call("await_process", handle=handle("chat.1.2.0"))],
    )
    async with place.runtime(agent_of(talk, one), grace=0) as runtime:
        *_, outcome = await outcomes(runtime)

    assert outcome == CallCancelled("session chat", "not needed")
