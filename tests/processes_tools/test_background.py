"""Background calls: prepared in their turn, run as processes, told to the model as handles."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from perdure import Plugin, ToolCall, ToolContext, ToolError, tool
from perdure.model.plugin import ReplaceArgs, ShortCircuit
from perdure.model.process import Cause, Failure, SessionOrigin, Success, WakeTarget
from perdure.model.tool import Denied, Failed, Ok, PreparedCall, ToolOutcome, ToolSpec
from perdure.plugins.hooks import SessionContext, ToolCallContext, ToolEndContext
from perdure.ports.tool import CallContext
from perdure.tools.define import Tool
from tests.keys import within_store
from tests.kit import SOON, Place, until
from tests.processes_tools.talk import Talk, agent_of, call, ended, handle, ids, outcomes, row_of, said


@tool(background=True)
async def crawl(site: str) -> str:
    """Crawl a site."""
    return f"crawled {site}"


# ---------------------------------------------------------------------- starting


async def test_the_model_is_given_the_handle_of_a_process_with_the_id_of_the_call(place: Place) -> None:
    talk = Talk([call("crawl", site="a")])
    async with place.runtime(agent_of(talk, crawl)) as runtime:
        (record,) = await said(runtime)
        output = await runtime.handle("chat.1.1.0").outcome(SOON)

    assert record.outcome == Ok({"__handle__": "process", "id": "chat.1.1.0"})
    assert (record.call_id, record.tool, record.args) == ("chat.1.1.0", "crawl", {"site": "a"})
    assert output == Success("crawled a")


async def test_its_registration_says_who_asked_and_who_hears_of_it(place: Place) -> None:
    async with place.runtime(agent_of(Talk([call("crawl", site="a")]), crawl, name="spider")) as runtime:
        await said(runtime)
        row = await row_of(runtime, "chat.1.1.0")
        granted = await runtime.store.is_granted("chat", "chat.1.1.0")

    registration = row.registration
    assert (registration.kind, registration.name, registration.label) == ("tool", "crawl", "crawl")
    assert registration.input == {"agent": "spider", "tool": "crawl", "tool_id": "tool:crawl", "args": {"site": "a"}}
    assert registration.origin == SessionOrigin("chat")
    assert registration.cause == Cause("tool_call", "chat.1.1.0")
    assert registration.wake == WakeTarget("chat", "spider", "turn")
    assert (registration.parent, registration.parent_end) == ("chat.1", "abandon")
    assert granted


async def test_starting_never_waits_for_the_work(place: Place) -> None:
    go = asyncio.Event()

    @tool(background=True)
    async def wait() -> str:
        await go.wait()
        return "waited"

    async with place.runtime(agent_of(Talk([call("wait")]), wait)) as runtime:
        assert await outcomes(runtime) == [Ok(handle("chat.1.1.0"))]
        assert (await row_of(runtime, "chat.1.1.0")).status == "running"
        go.set()
        assert await ended(runtime, "chat.1.1.0") == ["completed"]


async def test_the_end_of_a_turn_does_not_end_what_it_started(place: Place) -> None:
    go = asyncio.Event()

    @tool(background=True)
    async def wait() -> str:
        await go.wait()
        return "waited"

    talk = Talk([call("wait")], "first", "second")
    async with place.runtime(agent_of(talk, wait)) as runtime:
        await said(runtime)
        await said(runtime, "and now")
        assert (await row_of(runtime, "chat.1.1.0")).record.cancel is None
        go.set()
        assert await runtime.handle("chat.1.1.0").result(SOON) == "waited"


async def test_the_session_hears_of_the_end_in_a_turn_of_its_own(place: Place) -> None:
    talk = Talk([call("crawl", site="a")])
    async with place.runtime(agent_of(talk, crawl)) as runtime:
        await said(runtime)
        await until(lambda: talk.news)
        await runtime.wait_idle(SOON)

    (news,) = talk.news
    assert "chat.1.1.0" in news
    assert "crawled a" in news


async def test_many_calls_of_one_reply_are_many_processes(place: Place) -> None:
    talk = Talk([call("crawl", site=site) for site in "abc"])
    async with place.runtime(agent_of(talk, crawl)) as runtime:
        assert await outcomes(runtime) == [Ok(handle(f"chat.1.1.{n}")) for n in range(3)]
        found = [await runtime.handle(f"chat.1.1.{n}").result(SOON) for n in range(3)]

    assert found == ["crawled a", "crawled b", "crawled c"]


async def test_environments_are_kept_once_by_their_content(file: Place) -> None:
    talk = Talk([call("crawl", site="a"), call("crawl", site="b")])
    async with file.runtime(agent_of(talk, crawl)) as runtime:
        await said(runtime)
        await ended(runtime, "chat.1.1.0", "chat.1.1.1")
        first, second = await row_of(runtime, "chat.1.1.0"), await row_of(runtime, "chat.1.1.1")
        digest = first.registration.env
        assert digest is not None
        kept = await runtime.store.blobs.get(digest)

    assert first.registration.env == second.registration.env
    assert kept == b'{"type":"environment.1","agent":"assistant"}'


# ---------------------------------------------------------------------- preparation


class Rewriter(Plugin):
    """Rewrites the site, and sees what calls came to."""

    id = "rewriter"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.ends: list[tuple[str, ToolOutcome]] = []

    def before_tool_call(self, ctx: ToolCallContext) -> ReplaceArgs | None:
        if not ctx.inspecting:
            self.asked.append(ctx.tool.name)
        if ctx.tool.name != "crawl" or ctx.args["site"] == "rewritten":
            return None
        return ReplaceArgs({"site": "rewritten"})

    def after_tool_call(self, ctx: ToolEndContext) -> None:
        self.ends.append((ctx.tool.name, ctx.outcome))


async def test_plugins_are_asked_once_and_what_they_rewrote_runs(place: Place) -> None:
    plugin = Rewriter()
    talk = Talk([call("crawl", site="a")])
    async with place.runtime(agent_of(talk, crawl, plugins=[plugin])) as runtime:
        (record,) = await said(runtime)
        value = await runtime.handle("chat.1.1.0").result(SOON)
        row = await row_of(runtime, "chat.1.1.0")

    assert plugin.asked == ["crawl"]
    assert record.args == {"site": "rewritten"}
    assert row.registration.input["args"] == {"site": "rewritten"}
    assert value == "crawled rewritten"


async def test_plugins_see_the_handle_and_later_once_what_it_came_to(place: Place) -> None:
    plugin, go = Rewriter(), asyncio.Event()

    @tool(background=True)
    async def crawl(site: str) -> str:
        await go.wait()
        return f"crawled {site}"

    async with place.runtime(agent_of(Talk([call("crawl", site="a")]), crawl, plugins=[plugin])) as runtime:
        await said(runtime)
        go.set()
        await ended(runtime, "chat.1.1.0")
        assert await runtime.wait_idle(SOON)

    assert plugin.ends == [("crawl", Ok(handle("chat.1.1.0"))), ("crawl", Ok("crawled rewritten"))]


class Denier(Plugin):
    id = "denier"

    def before_tool_call(self, ctx: ToolCallContext) -> ShortCircuit:
        return ShortCircuit(Denied("not here"))


async def test_what_plugins_deny_is_never_registered(place: Place) -> None:
    talk = Talk([call("crawl", site="a")])
    async with place.runtime(agent_of(talk, crawl, plugins=[Denier()])) as runtime:
        (outcome,) = await outcomes(runtime)
        rows = await runtime.processes.list()

    assert isinstance(outcome, Denied)
    assert ids(rows) == []


async def test_arguments_that_do_not_fit_are_refused_before_anything_is_registered(place: Place) -> None:
    talk = Talk([call("crawl", site=7), call("vanish")])
    async with place.runtime(agent_of(talk, crawl)) as runtime:
        first, second = await outcomes(runtime)
        rows = await runtime.processes.list()

    assert isinstance(first, Failed)
    assert first.code == "invalid_tool_args"
    assert isinstance(second, Failed)
    assert second.code == "tool_unavailable"
    assert ids(rows) == []


async def test_approval_is_asked_for_before_it_starts(place: Place) -> None:
    @tool(background=True, approval="ask")
    async def order(what: str) -> str:
        return f"ordered {what}"

    async with place.runtime(agent_of(Talk([call("order", what="lamp")]), order)) as runtime:
        session = await runtime.session("chat")
        assert (await session.run("go")).waiting
        assert ids(await runtime.processes.list()) == []

        await session.approve("chat.1.1.0", by="kim")
        result = await session.result("chat.1")
        assert [each.outcome for each in result.tool_calls] == [Ok(handle("chat.1.1.0"))]
        assert await runtime.handle("chat.1.1.0").result(SOON) == "ordered lamp"


async def test_a_rejected_call_starts_nothing(place: Place) -> None:
    @tool(background=True, approval="ask")
    async def order(what: str) -> str:
        return f"ordered {what}"

    async with place.runtime(agent_of(Talk([call("order", what="lamp")]), order)) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await session.reject("chat.1.1.0", "no")
        result = await session.result("chat.1")
        rows = await runtime.processes.list()

    assert [each.outcome for each in result.tool_calls] == [Denied("no", "host")]
    assert ids(rows) == []


class Library:
    """A set of tools whose preparation attaches something that execution gets back."""

    def __init__(self) -> None:
        self.prepared = 0
        self.executed: list[PreparedCall] = []

    def specs(self) -> Sequence[ToolSpec]:
        schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
        return [ToolSpec("fetch", "Fetch a book.", schema, recovery="rerun", background=True)]

    async def prepare(self, call: PreparedCall, ctx: CallContext) -> PreparedCall | ToolOutcome:
        self.prepared += 1
        if call.args["title"] == "lost":
            return Failed("lost", "it was lost")
        return PreparedCall(call.call_id, call.tool_id, call.name, {"title": "Dune"}, {"shelf": 3})

    async def execute(self, call: PreparedCall, ctx: CallContext) -> Any:
        self.executed.append(call)
        return {"shelf": call.payload["shelf"], "key": within_store(ctx.idempotency_key)}


async def test_a_prepared_call_is_registered_with_its_payload(place: Place) -> None:
    library = Library()
    async with place.runtime(agent_of(Talk([call("fetch", title="dune")]), library)) as runtime:
        (record,) = await said(runtime)
        value = await runtime.handle("chat.1.1.0").result(SOON)
        row = await row_of(runtime, "chat.1.1.0")

    assert library.prepared == 1
    assert record.args == {"title": "Dune"}
    assert row.registration.input["args"] == {"title": "Dune"}
    assert row.registration.input["payload"] == {"shelf": 3}
    assert library.executed == [PreparedCall("chat.1.1.0", "tool:fetch", "fetch", {"title": "Dune"}, {"shelf": 3})]
    assert value == {"shelf": 3, "key": "chat.1.1.0"}


async def test_preparation_may_end_the_call_and_then_nothing_is_registered(place: Place) -> None:
    async with place.runtime(agent_of(Talk([call("fetch", title="lost")]), Library())) as runtime:
        assert await outcomes(runtime) == [Failed("lost", "it was lost")]
        assert ids(await runtime.processes.list()) == []


# ---------------------------------------------------------------------- what the body is given


async def test_a_background_tool_is_given_its_context(place: Place) -> None:
    seen: list[ToolContext[Any]] = []

    @tool(background=True)
    async def look(ctx: ToolContext[dict[str, int]]) -> str:
        seen.append(ctx)
        return (await ctx.host.snapshot()).session_id

    deps = {"n": 1}
    async with place.runtime(agent_of(Talk([call("look")]), look), deps=deps) as runtime:
        await said(runtime)
        assert await runtime.handle("chat.1.1.0").result(SOON) == "chat"

    (ctx,) = seen
    assert (ctx.session_id, ctx.turn_id, ctx.call_id, ctx.tool) == ("chat", "chat.1", "chat.1.1.0", "look")
    assert (ctx.attempt, within_store(ctx.idempotency_key), ctx.generation) == (1, "chat.1.1.0", 1)
    assert ctx.deps is deps


async def test_a_sync_tool_runs_on_a_thread(place: Place) -> None:
    @tool(background=True)
    def block() -> bool:
        return threading.current_thread() is threading.main_thread()

    async with place.runtime(agent_of(Talk([call("block")]), block)) as runtime:
        await said(runtime)
        assert await runtime.handle("chat.1.1.0").result(SOON) is False


async def test_a_tool_that_a_plugin_makes_for_its_session_runs_as_that_one(place: Place) -> None:
    class Named(Plugin):
        id = "named"

        def __init__(self, name: str = "nobody") -> None:
            self.name = name

        def for_session(self, ctx: SessionContext) -> Named:
            return Named(str(ctx.options))

        def tools(self) -> Iterable[Tool[..., Any]]:
            @tool(background=True)
            async def who() -> str:
                return self.name

            return [who]

    async with place.runtime(agent_of(Talk([call("who")]), plugins=[Named()])) as runtime:
        session = await runtime.session("chat", options={"named": "kim"})
        await session.run("go")
        assert await runtime.handle("chat.1.1.0").result(SOON) == "kim"


async def test_a_tool_laid_over_its_session_runs_in_the_background_too(place: Place) -> None:
    async with place.runtime(agent_of(Talk([call("crawl", site="a")]))) as runtime:
        session = await runtime.session("chat")
        session.tools.overlay([crawl])
        await session.run("go")
        assert await runtime.handle("chat.1.1.0").result(SOON) == "crawled a"


# ---------------------------------------------------------------------- what becomes of it


async def outcome_of(place: Place, made: Tool[..., Any], **args: Any) -> Any:
    async with place.runtime(agent_of(Talk([call(made.spec.name, **args)]), made)) as runtime:
        await said(runtime)
        return await asyncio.wait_for(runtime.handle("chat.1.1.0").outcome(), SOON)


async def test_a_tool_error_is_the_failure_of_the_process(place: Place) -> None:
    @tool(background=True)
    async def fail() -> None:
        raise ToolError("no such thing", code="not_found", data={"n": 1})

    assert await outcome_of(place, fail) == Failure("not_found", "no such thing", {"n": 1})


async def test_whatever_a_tool_raises_ends_its_own_process_only(place: Place) -> None:
    @tool(background=True)
    async def explode() -> None:
        raise SystemExit("boom")

    assert await outcome_of(place, explode) == Failure("tool_raised", "SystemExit: boom")


async def test_a_tool_that_cancels_itself_has_failed(place: Place) -> None:
    @tool(background=True)
    async def sulk() -> None:
        raise asyncio.CancelledError

    assert await outcome_of(place, sulk) == Failure("tool_raised", "CancelledError: the tool cancelled itself")


async def test_a_result_that_is_no_json_is_a_failure_that_says_so(place: Place) -> None:
    @tool(background=True)
    async def weird() -> object:
        return object()

    output = await outcome_of(place, weird)
    assert isinstance(output, Failure)
    assert output.code == "invalid_output"


async def test_a_large_result_is_kept_whole(place: Place) -> None:
    @tool(background=True)
    async def long() -> str:
        return "row\n" * 100_000

    assert await outcome_of(place, long) == Success("row\n" * 100_000)


async def test_artifacts_are_the_process_s_at_once_and_the_session_s_with_the_await(place: Place) -> None:
    @tool(background=True)
    async def draw(ctx: ToolContext[Any]) -> str:
        await ctx.artifacts.put(b"<svg/>", name="plan.svg", media_type="image/svg+xml")
        return "drawn"

    @tool
    async def measure(ctx: ToolContext[Any]) -> int:
        return len(await ctx.artifacts.get("plan.svg"))

    talk = Talk([call("draw")], lambda found: [call("await_process", handle=found[0])], [call("measure")])
    async with place.runtime(agent_of(talk, draw, measure)) as runtime:
        drawn, awaited, measured = await said(runtime)
        await runtime.store.sweep(0)
        again = await runtime.store.blobs.get(awaited.artifacts[0].digest)
        events = [e.payload async for e in runtime.processes.events("chat.1.1.0") if e.type == "artifact"]

    assert drawn.artifacts == ()
    assert [(each.name, each.size, each.media_type) for each in awaited.artifacts] == [("plan.svg", 6, "image/svg+xml")]
    assert measured.outcome == Ok(6)
    assert again == b"<svg/>"
    assert [each["name"] for each in events] == ["plan.svg"]


async def test_a_background_tool_finds_the_artifacts_of_its_session(place: Place) -> None:
    @tool
    async def draw(ctx: ToolContext[Any]) -> str:
        await ctx.artifacts.put(b"<svg/>", name="plan.svg")
        return "drawn"

    @tool(background=True)
    async def measure(ctx: ToolContext[Any]) -> int:
        return len(await ctx.artifacts.get("plan.svg"))

    async with place.runtime(agent_of(Talk([call("draw")], "drawn", [call("measure")]), draw, measure)) as runtime:
        await said(runtime)
        await said(runtime, "measure")
        assert await runtime.handle("chat.2.1.0").result(SOON) == 6


# ---------------------------------------------------------------------- nobody to run it


async def test_a_process_whose_tool_is_gone_waits_until_it_is_back(place: Place) -> None:
    go = asyncio.Event()

    @tool(background=True, recovery="rerun")
    async def wait() -> str:
        await go.wait()
        return "waited"

    async with place.runtime(agent_of(Talk([call("wait")]), wait), grace=0) as runtime:
        await said(runtime)
    async with place.runtime(agent_of(Talk(), crawl)) as runtime:
        await said(runtime, "hello", "other")
        assert (await row_of(runtime, "chat.1.1.0")).owner is None
    go.set()
    async with place.runtime(agent_of(Talk(), wait)) as runtime:
        assert await runtime.handle("chat.1.1.0").result(SOON) == "waited"


async def test_an_id_that_is_taken_by_something_else_is_a_failed_call(place: Place) -> None:
    async with place.runtime(agent_of(Talk([call("crawl", site="a")]), crawl)) as runtime:
        await runtime.processes.register("chat.1.1.0")
        (outcome,) = await outcomes(runtime)

    assert isinstance(outcome, Failed)
    assert outcome.code == "process_conflict"


@pytest.mark.parametrize("name", ["start_process", "await_process", "signal_process", "cancel_process"])
async def test_an_agent_s_own_tool_of_such_a_name_stays_its_own(place: Place, name: str) -> None:
    async def mine() -> str:
        return "mine"

    own = tool(name=name)(mine)
    async with place.runtime(agent_of(Talk([ToolCall(name=name)]), crawl, own)) as runtime:
        assert await outcomes(runtime) == [Ok("mine")]


def test_an_agent_without_background_tools_has_none_of_the_tools_for_processes() -> None:
    @tool
    def plain() -> None: ...

    assert agent_of(Talk(), plain).spec.tools == ("plain",)
    assert agent_of(Talk(), crawl).spec.tools == (
        "crawl",
        "start_process",
        "await_process",
        "signal_process",
        "cancel_process",
        "list_processes",
    )
