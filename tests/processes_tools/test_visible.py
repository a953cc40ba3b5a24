"""What a session may do with handles, and what is recorded of it: the verbs, with exact texts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from perdure import Plugin, ProcessContext, Runtime, ToolContext, ToolError, process, tool
from perdure.errors import PluginError, UnknownProcess
from perdure.model.process import Abandoned, Cancelled, Evidence, Failure, ProcessRow, Success
from perdure.model.tool import Cancelled as CallCancelled
from perdure.model.tool import Failed, Ok, OutcomeUnknown, ToolRecord
from perdure.plugins.hooks import SessionContext
from perdure.processes.handle import CancelAsk, Processes
from perdure.processes.visible import Asker, Visible, as_call
from perdure.testing.clock import VirtualClock
from perdure.tools.define import Tool
from tests.kit import SOON, Place, until
from tests.processes_tools.talk import Talk, agent_of, call, event_types, handle, outcomes, row_of, said


@tool(background=True)
async def crawl(site: str) -> str:
    """Crawl a site."""
    return f"crawled {site}"


def seen_by(runtime: Runtime, session_id: str = "chat", call_id: str = "chat.9.1.0") -> Visible:
    """What a call of a session's ninth turn sees."""
    asker = Asker(session_id, "assistant", call_id, call_id.rsplit(".", 2)[0])
    return Visible(runtime.processes, runtime._dispatcher, asker)


def runtime_of(place: Place, **options: Any) -> Runtime:
    return place.runtime(agent_of(Talk(), crawl), **options)


# ---------------------------------------------------------------------- malformed handles

MALFORMED: list[tuple[Any, str]] = [
    (None, "Invalid process handle: missing `__handle__`"),
    ("chat.1.1.0", "Invalid process handle: missing `__handle__`"),
    ([], "Invalid process handle: missing `__handle__`"),
    ({}, "Invalid process handle: missing `__handle__`"),
    ({"__handle__": 7, "id": "p"}, "Invalid process handle: missing `__handle__`"),
    ({"__handle__": "file", "id": "p"}, "Invalid process handle kind: file"),
    ({"__handle__": "process"}, "Invalid process handle: missing `id`"),
    ({"__handle__": "process", "id": 7}, "Invalid process handle: missing `id`"),
    ({"__handle__": "process", "id": ""}, "Invalid process handle: missing `id`"),
]


@pytest.mark.parametrize(("given", "text"), MALFORMED)
async def test_a_malformed_handle_is_recorded_as_it_was_given(place: Place, given: Any, text: str) -> None:
    async with runtime_of(place) as runtime:
        verbs = seen_by(runtime)
        records = [
            await verbs.await_process(given),
            await verbs.signal_process(given, "go", {"n": 1}),
            await verbs.cancel_process(given),
        ]

    assert [record.outcome for record in records] == [Failed("invalid_handle", text)] * 3
    assert [record.tool for record in records] == ["await_process", "signal_process", "cancel_process"]
    assert [record.call_id for record in records] == ["chat.9.1.0"] * 3
    assert [record.args for record in records] == [
        {"handle": given},
        {"handle": given, "signal_name": "go", "payload": {"n": 1}},
        {"handle": given},
    ]


@pytest.mark.parametrize(("given", "text"), MALFORMED)
async def test_a_model_is_told_the_same_of_a_malformed_handle(place: Place, given: Any, text: str) -> None:
    talk = Talk([call("await_process", handle=given), call("cancel_process", handle=given)])
    async with place.runtime(agent_of(talk, crawl)) as runtime:
        assert await outcomes(runtime) == [Failed("invalid_handle", text)] * 2


async def test_more_than_a_handle_is_a_handle_too(place: Place) -> None:
    async with runtime_of(place) as runtime:
        await runtime.processes.register("job", grants=["chat"])
        await runtime.processes.complete("job", 7)
        record = await seen_by(runtime).await_process({**handle("job"), "tool": "crawl", "extra": 1})

    assert record.outcome == Ok(7)


# ---------------------------------------------------------------------- who may

NOT_VISIBLE = "process 'job': it is neither live nor visible in session 'chat'"


@pytest.mark.parametrize("exists", [True, False], ids=["ungranted", "unknown"])
async def test_what_is_not_granted_is_not_told_from_what_is_not_there(place: Place, exists: bool) -> None:
    async with runtime_of(place) as runtime:
        if exists:
            await runtime.processes.register("job", signals=["go"], grants=["other"])
        verbs = seen_by(runtime)
        awaited = (await verbs.await_process(handle("job"), 1)).outcome
        told = (await verbs.signal_process(handle("job"), "go")).outcome
        stopped = (await verbs.cancel_process(handle("job"))).outcome
        if exists:
            assert await event_types(runtime, "job") == ["process.created"], "nothing was done to it"

    assert isinstance(awaited, Failed)
    assert isinstance(told, Failed)
    assert isinstance(stopped, Failed)
    assert {awaited.code, told.code, stopped.code} == {"process_not_visible"}
    hint = "; list_processes shows those that you may use"  # a tool of the model's, and no name in Python
    assert awaited.message == f"{NOT_VISIBLE}{hint}"
    assert told.message == f"signal failed: {NOT_VISIBLE}{hint}"
    assert stopped.message == f"cancel failed: {NOT_VISIBLE}{hint}"


async def test_a_grant_is_enough_and_can_be_taken_back(place: Place) -> None:
    async with runtime_of(place) as runtime:
        await runtime.processes.register("job", signals=["go"], grants=["other"])
        await runtime.processes.grant("chat", "job")
        assert isinstance((await seen_by(runtime).signal_process(handle("job"), "go")).outcome, Ok)
        await runtime.processes.revoke("chat", "job")
        assert isinstance((await seen_by(runtime).signal_process(handle("job"), "go")).outcome, Failed)
        assert isinstance((await seen_by(runtime, "other").cancel_process(handle("job"))).outcome, Ok)


async def test_what_the_run_at_hand_started_needs_no_grant(place: Place) -> None:
    """Possession: its registration says that this turn started it. Another turn of the session needs a grant."""

    @tool
    async def quietly(ctx: ToolContext[Any]) -> dict[str, str]:
        return (await ctx.start(crawl, {"site": "a"}, grant=False)).to_json()

    talk = Talk(
        [call("quietly")],
        lambda found: [call("await_process", handle=found[0]), call("list_processes", live=False)],
        "done",
        [call("await_process", handle=handle("chat.1.1.0.1"))],
    )
    async with place.runtime(agent_of(talk, crawl, quietly)) as runtime:
        _, awaited, listed = await outcomes(runtime)
        (later,) = await outcomes(runtime, "again")

    assert awaited == Ok("crawled a")
    assert listed == Ok([])
    assert isinstance(later, Failed)
    assert later.code == "process_not_visible"


async def test_another_session_cannot_use_a_handle_that_was_copied_to_it(place: Place) -> None:
    talk = Talk([call("crawl", site="a")], "started", [call("await_process", handle=handle("chat.1.1.0"))])
    async with place.runtime(agent_of(talk, crawl)) as runtime:
        await said(runtime)
        (outcome,) = await outcomes(runtime, "steal it", "thief")

    assert isinstance(outcome, Failed)
    assert outcome.code == "process_not_visible"


async def test_a_handle_works_in_another_runtime_on_the_same_store(file: Place) -> None:
    """Copied as JSON to another process: what was granted is on disk."""
    talk = Talk([call("crawl", site="a")])
    async with file.runtime(agent_of(talk, crawl)) as runtime:
        (record,) = await said(runtime)
        assert isinstance(record.outcome, Ok)
        assert await runtime.wait_idle(SOON)  # else the turn that hears of its end may take the next input along
        async with file.runtime(agent_of(Talk([call("await_process", handle=record.outcome.value)]), crawl)) as other:
            assert await outcomes(other, "what came of it") == [Ok("crawled a")]
            assert await other.handle(record.outcome.value).result(SOON) == "crawled a"


# ---------------------------------------------------------------------- await

EVIDENCE = Evidence("sweep", 5, "w-1", "its lock is free")

ENDS = [
    (Success({"n": 1}), Ok({"n": 1})),
    (Failure("not_found", "no such thing", {"n": 1}), Failed("not_found", "no such thing", {"n": 1})),
    (Cancelled("kim", "enough"), CallCancelled("kim", "enough")),
    (
        Cancelled("kim", "enough", unknown=True),
        OutcomeUnknown("process 'job' was cancelled by kim while it ran: enough"),
    ),
    (Abandoned(EVIDENCE), OutcomeUnknown("process 'job' was given up (sweep): its lock is free")),
]


@pytest.mark.parametrize(("output", "expected"), ENDS)
def test_how_a_process_ended_is_how_the_call_ends_that_awaited_it(output: Any, expected: Any) -> None:
    assert as_call("job", output) == expected


async def test_an_abandoned_process_reads_as_unknown(place: Place) -> None:
    async with runtime_of(place) as runtime:
        await runtime.processes.register("job", grants=["chat"])
        await runtime.processes.request_abandon("job", "the machine is gone", by="kim")
        await runtime.processes.reconcile_abandon("job")
        record = await seen_by(runtime).await_process(handle("job"))

    assert record.outcome == OutcomeUnknown("process 'job' was given up (reconciled_request): the machine is gone")


async def test_time_that_is_up_ends_the_wait_and_not_the_process(place: Place) -> None:
    async with runtime_of(place) as runtime:
        await runtime.processes.register("job", grants=["chat"])
        record = await seen_by(runtime).await_process(handle("job"), 0.01)
        status = (await row_of(runtime, "job")).status

    assert record.outcome == Failed("timed_out", "process 'job' did not end within 0.01 s")
    assert status == "running"


async def test_what_was_pruned_is_told_as_that(place: Place) -> None:
    clock = VirtualClock()
    async with runtime_of(place, clock=clock) as runtime:
        await runtime.processes.register("job", grants=["chat"])
        await runtime.processes.complete("job", 7)
        clock.advance(60)
        assert await runtime.processes.prune(30) == 1
        verbs = seen_by(runtime)
        awaited = (await verbs.await_process(handle("job"))).outcome
        told = (await verbs.signal_process(handle("job"), "go")).outcome
        stopped = (await verbs.cancel_process(handle("job"))).outcome

    text = "process 'job': it was completed, and is no longer retained"
    assert isinstance(awaited, Failed)
    assert isinstance(told, Failed)
    assert isinstance(stopped, Failed)
    assert {awaited.code, told.code, stopped.code} == {"process_no_longer_retained"}
    assert awaited.message.startswith(text)
    assert told.message.startswith(f"signal failed: {text}")
    assert stopped.message.startswith(f"cancel failed: {text}")


class Shifting(Plugin):
    """Makes one background tool for each session, whose name may be another one tomorrow."""

    id = "shifting"

    def __init__(self, name: str) -> None:
        self.name = name

    def for_session(self, ctx: SessionContext) -> Shifting:
        return Shifting(self.name)

    def tools(self) -> Iterable[Tool[..., Any]]:
        async def wait() -> None:
            await asyncio.Event().wait()

        return [tool(name=self.name, background=True, recovery="rerun")(wait)]


async def test_a_process_whose_tool_cannot_be_made_any_more_is_stuck_and_told_as_that(place: Place) -> None:
    async with place.runtime(agent_of(Talk([call("wait")]), plugins=[Shifting("wait")]), grace=0) as runtime:
        await said(runtime)
    async with place.runtime(agent_of(Talk(), plugins=[Shifting("rest")])) as runtime:
        record = await asyncio.wait_for(seen_by(runtime).await_process(handle("chat.1.1.0")), SOON)
        row = await row_of(runtime, "chat.1.1.0")

    assert isinstance(record.outcome, Failed)
    assert record.outcome.code == "process_stuck"
    assert row.stuck == "InvalidProcess: the tool of process 'chat.1.1.0' is not there: bring it back, then resume it"


async def test_elapsed_time_is_that_of_the_injected_clock(place: Place) -> None:
    clock = VirtualClock()
    async with runtime_of(place, clock=clock) as runtime:
        await runtime.processes.register("job", grants=["chat"])
        waiting = asyncio.ensure_future(seen_by(runtime).await_process(handle("job")))
        await until(lambda: "job" in runtime._work.awaited)
        clock.advance(1.2345)
        await runtime.processes.complete("job", 7)
        record = await asyncio.wait_for(waiting, SOON)

    assert record == ToolRecord("chat.9.1.0", "await_process", {"handle": handle("job")}, Ok(7), duration_ms=1234)


async def test_who_stops_waiting_harms_nobody(place: Place) -> None:
    async with runtime_of(place) as runtime:
        await runtime.processes.register("job", grants=["chat"])
        waiting = asyncio.ensure_future(seen_by(runtime).await_process(handle("job")))
        await until(lambda: "job" in runtime._work.awaited)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await row_of(runtime, "job")).record.cancel is None
        await runtime.processes.complete("job", 7)
        assert (await seen_by(runtime).await_process(handle("job"))).outcome == Ok(7)


# ---------------------------------------------------------------------- signal


async def test_a_signal_becomes_an_event_of_its_name(place: Place) -> None:
    async with runtime_of(place) as runtime:
        await runtime.processes.register("job", signals=["ready"], grants=["chat"])
        record = await seen_by(runtime).signal_process(handle("job"), "ready", {"n": 1})
        events = [(e.sequence, e.type, e.payload, e.key) async for e in runtime.processes.events("job")]

    assert record.outcome == Ok({"process_id": "job", "sequence": 2})
    assert (record.call_id, record.tool) == ("chat.9.1.0", "signal_process")
    assert events[1] == (2, "signal.ready", {"n": 1}, "process:job:signal.ready:process-chat.9.1.0")


async def test_a_model_is_told_what_a_process_waits_for_instead(place: Place) -> None:
    @process
    async def asking(ctx: ProcessContext[Any]) -> Any:
        return await ctx.wait_signal("approve")

    async with runtime_of(place, processes=[asking]) as runtime:
        await (await runtime.session("chat")).start(asking, id="job", wake="none")
        await until(lambda: _parked(runtime))
        record = await seen_by(runtime).signal_process(handle("job"), "aprove")

    assert isinstance(record.outcome, Ok)
    assert record.outcome.value["note"].startswith("it does not wait for 'aprove', it waits for: approve")


async def _parked(runtime: Runtime) -> bool:
    return bool(await runtime.handle("job").status() == "waiting")


async def test_a_call_that_is_made_again_sends_the_same_signal(place: Place) -> None:
    async with runtime_of(place) as runtime:
        await runtime.processes.register("job", signals=["ready"], grants=["chat"])
        first = await seen_by(runtime).signal_process(handle("job"), "ready", 1)
        again = await seen_by(runtime).signal_process(handle("job"), "ready", 1)
        another = await seen_by(runtime, call_id="chat.9.1.1").signal_process(handle("job"), "ready", 1)

    assert (first.outcome, again.outcome) == (Ok({"process_id": "job", "sequence": 2}),) * 2
    assert another.outcome == Ok({"process_id": "job", "sequence": 3})


@pytest.mark.parametrize(
    ("name", "payload", "code", "text"),
    [
        ("stop", None, "undeclared_event", "signal failed: process 'job' takes no signal 'stop'; it takes: ready"),
        ("ready", "soon", "invalid_process", "signal failed: the payload of 'signal.ready' does not fit"),
        ("", None, "invalid_process", "signal failed: a signal needs a name, not ''"),
    ],
)
async def test_a_signal_that_the_process_does_not_take_is_refused(
    place: Place, name: str, payload: Any, code: str, text: str
) -> None:
    async with runtime_of(place) as runtime:
        await runtime.processes.register("job", signals={"ready": {"type": "integer"}}, grants=["chat"])
        record = await seen_by(runtime).signal_process(handle("job"), name, payload)
        types = await event_types(runtime, "job")

    assert isinstance(record.outcome, Failed)
    assert record.outcome.code == code
    assert record.outcome.message.startswith(text)
    assert types == ["process.created"]


async def test_the_dead_take_no_signals(place: Place) -> None:
    async with runtime_of(place) as runtime:
        await runtime.processes.register("job", signals=["ready"], grants=["chat"])
        await runtime.processes.complete("job", 7)
        record = await seen_by(runtime).signal_process(handle("job"), "ready")

    assert isinstance(record.outcome, Failed)
    assert record.outcome.code == "process_already_terminal"
    assert record.outcome.message.startswith("signal failed: process 'job'")


# ---------------------------------------------------------------------- cancel


async def test_a_cancel_answers_with_the_status(place: Place) -> None:
    async with runtime_of(place) as runtime:
        await runtime.processes.register("job", grants=["chat"])
        first = await seen_by(runtime).cancel_process(handle("job"))
        again = await seen_by(runtime).cancel_process(handle("job"))
        row = await row_of(runtime, "job")
        await runtime.processes.complete("job", outcome=Cancelled("me"))
        after = await seen_by(runtime).cancel_process(handle("job"))

    assert first.outcome == again.outcome == Ok({"process_id": "job", "status": "running"})
    assert after.outcome == Ok({"process_id": "job", "status": "cancelled"})
    assert row.record.cancel is not None
    assert (row.record.cancel.by, row.record.cancel.reason) == ("session chat", "requested by process handle")


class Policy:
    """A host that decides by itself, and remembers what it was asked."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal
        self.asked: list[CancelAsk] = []

    async def cancel(self, processes: Processes, ask: CancelAsk) -> ProcessRow:
        self.asked.append(ask)
        if self.refusal is not None:
            raise self.refusal
        await processes.cancel(ask.process_id, ask.reason, by="policy")
        return await processes.get(ask.process_id)


@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        (ToolError("denied by host"), "cancel failed: denied by host"),
        (RuntimeError("denied by host"), "cancel failed: denied by host"),
        (PluginError("guard", "denied by host"), "cancel failed: plugin 'guard': denied by host"),
    ],
)
async def test_the_host_may_refuse_a_cancel(place: Place, refusal: Exception, text: str) -> None:
    policy = Policy(refusal)
    async with runtime_of(place) as runtime:
        runtime.processes.cancel_policy = policy
        await runtime.processes.register("job", grants=["chat"])
        record = await seen_by(runtime).cancel_process(handle("job"))
        row = await row_of(runtime, "job")

    assert isinstance(record.outcome, Failed)
    assert record.outcome.message == text
    assert row.record.cancel is None
    assert policy.asked == [
        CancelAsk("chat", "job", "chat.9.1.0", "process", handle("job"), "requested by process handle", True)
    ]


async def test_the_host_may_grant_what_no_grant_allows(place: Place) -> None:
    policy = Policy()
    async with runtime_of(place) as runtime:
        runtime.processes.cancel_policy = policy
        await runtime.processes.register("job")
        record = await seen_by(runtime).cancel_process(handle("job"), "it is late")
        row = await row_of(runtime, "job")

    assert record.outcome == Ok({"process_id": "job", "status": "running"})
    assert row.record.cancel is not None
    assert (row.record.cancel.by, row.record.cancel.reason) == ("policy", "it is late")
    assert [ask.granted for ask in policy.asked] == [False]


async def test_the_host_is_not_asked_about_what_the_run_started_itself(place: Place) -> None:
    going = asyncio.Event()

    @tool(background=True)
    async def wait() -> None:
        await going.wait()

    talk = Talk([call("wait")], lambda found: [call("cancel_process", handle=found[0])])
    policy = Policy(ToolError("denied by host"))
    async with place.runtime(agent_of(talk, wait)) as runtime:
        runtime.processes.cancel_policy = policy
        _, cancelled = await outcomes(runtime)
        output = await runtime.handle("chat.1.1.0").outcome(SOON)

    assert isinstance(cancelled, Ok)
    assert isinstance(output, Cancelled)
    assert policy.asked == []


async def test_a_model_is_told_of_no_names_in_python(place: Place) -> None:
    """Whatever an error says to a host, a tool that lets it through tells its model what happened only."""

    @tool
    async def ask(ctx: ToolContext[Any]) -> Any:
        """Ask."""
        return await ctx.host.start_process("nothing of ours", key="k")

    @tool
    async def look(ctx: ToolContext[Any]) -> Any:
        """Look."""
        raise UnknownProcess("job")

    async with place.runtime(agent_of(Talk([call("look"), call("ask")]), ask, look)) as runtime:
        found = await outcomes(runtime)

    texts = [each.message for each in found if isinstance(each, Failed)]
    assert texts[0] == "UnknownProcess: process 'job': there is no such process in this store"
    assert not [text for text in texts if "runtime." in text or "processes=" in text]
