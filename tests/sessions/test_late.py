"""Results that come after their turn pass the plugins of their session before anything of them is kept or told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, ModelRequest, Plugin, Retry, Runtime, ToolCall, ToolError, tool
from perdure.builtin import OutputBudget, Redaction, Subagents
from perdure.model.event import AnyEvent, PluginEvent
from perdure.model.message import Message
from perdure.model.plugin import EmitEvents, EnqueueMessages, ShortCircuit
from perdure.model.process import EventType, Failure, Success, WakeRule, WakeTarget
from perdure.model.tool import Cancelled, Denied, Failed, Ok, ToolOutcome
from perdure.plugins.hooks import CatalogContext, SessionContext, ToolEndContext
from perdure.processes.function.context import ProcessContext
from perdure.processes.function.engine import process
from perdure.sessions.wakes.late_results import IN_FULL
from perdure.testing import FunctionModel
from tests.kit import SOON, Place, crash, until

SECRET = "ghp_" + "abcdefghijklmnopqrstuvwxyz0123456789"  # was never valid
HIDDEN = "[redacted:api_key]"


@process
async def leaking(ctx: ProcessContext[Any], how: str = "returns") -> Any:
    if how == "raises":
        raise ValueError(f"no access with {SECRET}")
    if how == "waits":
        await ctx.wait_signal("go")
    return {"found": SECRET}


@tool(background=True)
async def fetch(page: str = "") -> str:
    """Fetch something."""
    if page == "broken":
        raise ToolError(f"no access with {SECRET}", code="forbidden", data={"sent": SECRET})
    return f"the token is {SECRET}"


class Talk:
    """Calls a tool when it is spoken to, and remembers what it hears of processes."""

    def __init__(self, *calls: ToolCall) -> None:
        self._calls, self.news = list(calls), list[str]()
        self.model = FunctionModel(self.answer)

    def answer(self, request: ModelRequest) -> Any:
        last = request.messages[-1]
        if last.role == "user" and last.text.startswith("[process"):
            self.news.append(last.text)
            return "heard"
        return [self._calls.pop(0)] if self._calls and last.role == "user" else "done"


class Seeing(Plugin):
    """Sees how calls end, and answers with what it was made with."""

    id = "seeing"

    def __init__(self, answer: Any = None, refuses: bool = False) -> None:
        self.answer, self.refuses = answer, refuses
        self.seen: list[tuple[str, str, ToolOutcome]] = []
        self.contexts: list[ToolEndContext] = []

    def session_ready(self, ctx: SessionContext) -> None:
        if self.refuses:
            raise ValueError("not here")

    def after_tool_call(self, ctx: ToolEndContext) -> Any:
        self.seen.append((ctx.call_id, ctx.tool.name, ctx.outcome))
        self.contexts.append(ctx)
        if isinstance(ctx.outcome, Ok) and isinstance(ctx.outcome.value, dict) and "__handle__" in ctx.outcome.value:
            return None
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def idle(runtime: Runtime) -> None:
    assert await runtime.wait_idle(SOON)


def last_lines(talk: Talk) -> list[str]:
    """What is said of each process in its block's end."""
    return [text.rsplit("\n", 1)[-1] for text in talk.news]


def on_disk(folder: Path, text: str) -> list[str]:
    return [each.name for each in folder.rglob("*") if each.is_file() and text.encode() in each.read_bytes()]


# ---------------------------------------------------------------------- background tools


async def test_what_a_background_tool_returns_is_redacted_before_it_is_recorded(file: Place) -> None:
    talk = Talk(ToolCall(name="fetch"))
    async with file.runtime(Agent(talk.model, tools=[fetch], plugins=[Redaction()])) as runtime:
        await (await runtime.session("chat")).run("go")
        outcome = await runtime.handle("chat.1.1.0").outcome(SOON)
        await idle(runtime)
        leaked = on_disk(file.path.parent, SECRET)

    assert outcome == Success(f"the token is {HIDDEN}")
    assert last_lines(talk) == [f"value: the token is {HIDDEN}"]
    assert leaked == []


async def test_how_a_background_tool_failed_is_redacted_before_it_is_recorded(file: Place) -> None:
    talk = Talk(ToolCall(name="fetch", args={"page": "broken"}))
    async with file.runtime(Agent(talk.model, tools=[fetch], plugins=[Redaction()])) as runtime:
        await (await runtime.session("chat")).run("go")
        outcome = await runtime.handle("chat.1.1.0").outcome(SOON)
        await idle(runtime)
        leaked = on_disk(file.path.parent, SECRET)

    assert outcome == Failure("forbidden", f"no access with {HIDDEN}", {"sent": HIDDEN})
    assert leaked == []


async def test_what_a_background_tool_said_before_it_is_tried_again_is_kept_by_nobody(file: Place) -> None:
    attempts = 0

    @tool(background=True, retries=1)
    async def flaky() -> str:
        """Fail once."""
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise Retry(f"busy, said {SECRET}", after=0.01)
        return "fine"

    agent = Agent(Talk(ToolCall(name="flaky")).model, tools=[flaky], plugins=[Redaction()])
    async with file.runtime(agent) as runtime:
        await (await runtime.session("chat")).run("go")
        outcome = await runtime.handle("chat.1.1.0").outcome(SOON)
        await idle(runtime)
        leaked = on_disk(file.path.parent, SECRET)

    assert (outcome, attempts) == (Success("fine"), 2)
    assert leaked == []


@pytest.mark.parametrize(
    ("answer", "recorded"),
    [
        (ShortCircuit(Ok("instead")), Success("instead")),
        (ShortCircuit(Failed("odd", "no")), Failure("odd", "no")),
        (ShortCircuit(Denied("not for you")), Failure("denied", "not for you")),
        (ShortCircuit(Cancelled(reason="enough")), Failure("cancelled", "enough")),
        (
            ValueError("oops"),
            Failure(
                "after_tool_call_failed",
                "the call ended and its result is withheld: plugin 'seeing': after_tool_call: ValueError: oops",
            ),
        ),
    ],
    ids=["value", "failure", "denial", "cancel", "fault"],
)
async def test_what_a_plugin_makes_of_a_background_tool_is_how_it_ended(
    place: Place, answer: Any, recorded: object
) -> None:
    talk = Talk(ToolCall(name="fetch"))
    async with place.runtime(Agent(talk.model, tools=[fetch], plugins=[Seeing(answer)])) as runtime:
        await (await runtime.session("chat")).run("go")
        outcome = await runtime.handle("chat.1.1.0").outcome(SOON)

    assert outcome == recorded


async def test_the_end_of_a_background_tool_is_shown_once_however_often_it_is_told(place: Place) -> None:
    plugin, talk = Seeing(), Talk(ToolCall(name="fetch"))
    agent = Agent(talk.model, tools=[fetch], plugins=[plugin])
    async with place.runtime(agent) as runtime:
        await (await runtime.session("chat")).run("go")
        await idle(runtime)
    async with place.runtime(agent) as runtime:
        await (await runtime.session("chat")).run("again")

    late = [each for each in plugin.seen if each[2] == Ok(f"the token is {SECRET}")]
    assert late == [("chat.1.1.0", "fetch", Ok(f"the token is {SECRET}"))]
    assert len(talk.news) == 1


# ---------------------------------------------------------------------- other processes


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("returns", 'value: {"found":"[redacted:api_key]"}'),
        ("raises", "error: raised: ValueError: no access with [redacted:api_key]"),
    ],
)
async def test_what_a_session_hears_of_a_function_is_redacted_and_its_record_stays(
    place: Place, how: str, told: str
) -> None:
    talk = Talk()
    async with place.runtime(Agent(talk.model, plugins=[Redaction()]), processes=[leaking]) as runtime:
        session = await runtime.session("chat")
        started = await session.start(leaking, {"how": how}, id="p1")
        outcome = await started.outcome(SOON)
        await idle(runtime)
        said = (await session.result("chat.1")).records[0]

    assert last_lines(talk) == [told]
    assert SECRET in repr(outcome)  # the function's own, for whoever has its handle
    assert SECRET not in repr(said)


async def test_plugins_can_tell_a_process_from_a_tool_of_the_same_name(place: Place) -> None:
    plugin = Seeing()
    async with place.runtime(Agent(Talk().model, tools=[fetch], plugins=[plugin]), processes=[leaking]) as runtime:
        session = await runtime.session("chat")
        await (await session.start(leaking, id="p1")).outcome(SOON)
        await (await session.start(fetch, id="p2")).outcome(SOON)
        await idle(runtime)

    assert [(ctx.call_id, ctx.tool.tool_id, ctx.args, ctx.turn_id, ctx.late) for ctx in plugin.contexts] == [
        ("p1", "process:leaking", {}, "", True),
        ("p2", "tool:fetch", {}, "", True),
    ]


async def test_a_value_that_is_kept_beside_the_store_is_redacted_too(place: Place) -> None:
    @process
    async def wordy(ctx: ProcessContext[Any]) -> str:
        return f"{SECRET} " + "word " * 100_000

    talk = Talk()
    async with place.runtime(Agent(talk.model, plugins=[Redaction()]), processes=[wordy]) as runtime:
        await (await (await runtime.session("chat")).start(wordy)).outcome(SOON)
        await idle(runtime)

    (news,) = talk.news
    assert f"value: {HIDDEN} word word" in news
    assert SECRET not in news


@tool(background=True)
async def patient() -> None:
    """Wait for ever."""
    await asyncio.Event().wait()


async def test_a_session_that_hears_of_the_tool_of_another_has_its_own_plugins_look(place: Place) -> None:
    """Those of the session that asked for it have seen how it ended, and let pass what these do not."""
    go = asyncio.Event()

    @tool(background=True)
    async def fetch_slowly() -> str:
        """Fetch something."""
        await go.wait()
        return f"the token is {SECRET}"

    asking, hearing, seeing = Talk(ToolCall(name="fetch_slowly")), Talk(), Seeing()
    careless = Agent(asking.model, name="careless", tools=[fetch_slowly], plugins=[seeing])
    careful = Agent(hearing.model, name="careful", plugins=[Redaction()])
    async with place.runtime(careless, careful) as runtime:
        await (await runtime.session("chat")).run("go")
        await runtime.processes.retarget("chat.1.1.0", WakeTarget("other", "careful", "turn"))
        go.set()
        await idle(runtime)

    assert seeing.seen[-1] == ("chat.1.1.0", "fetch_slowly", Ok(f"the token is {SECRET}"))
    assert (last_lines(hearing), asking.news) == ([f"value: the token is {HIDDEN}"], [])


@pytest.mark.parametrize(("what", "args"), [(leaking, {"how": "waits"}), (patient, {})], ids=["function", "tool"])
async def test_why_a_process_was_cancelled_is_redacted(place: Place, what: Any, args: dict[str, Any]) -> None:
    talk = Talk()
    agent = Agent(talk.model, tools=[patient], plugins=[Redaction()])
    async with place.runtime(agent, processes=[leaking]) as runtime:
        started = await (await runtime.session("chat")).start(what, args, id="p1")
        await started.cancel(reason=f"revoked {SECRET}")
        await started.outcome(SOON)
        await idle(runtime)

    (news,) = talk.news
    assert f"cancelled by host: revoked {HIDDEN}" in news.split("\n")
    assert SECRET not in news


@pytest.mark.parametrize(
    ("plugin", "told"),
    [
        (Redaction(), f'payload: {{"key":"{HIDDEN}"}}'),
        (Seeing(ShortCircuit(Failed("odd", "no"))), 'payload: {"error":"odd","message":"no"}'),
    ],
    ids=["redacted", "failed"],
)
async def test_an_event_that_wakes_is_shown_as_plugins_leave_it(place: Place, plugin: Plugin, told: str) -> None:
    talk = Talk()
    async with place.runtime(Agent(talk.model, name="a", plugins=[plugin])) as runtime:
        await runtime.session("chat")
        job = await runtime.processes.register(
            "job", events=[EventType("found", wake=WakeRule())], wake=WakeTarget("chat", "a"), grants=["chat"]
        )
        await runtime.processes.emit(job, "found", {"key": SECRET})
        await until(lambda: talk.news)
        await idle(runtime)

    assert last_lines(talk) == [told]


async def test_what_a_subagent_in_the_background_says_passes_the_plugins_of_its_parent(place: Place) -> None:
    worker = Agent(FunctionModel(lambda _: f"it is {SECRET}"), name="worker")
    talk = Talk(ToolCall("c", "spawn_agent", {"prompt": "look", "background": True}))
    boss = Agent(talk.model, name="boss", plugins=[Redaction(), Subagents([worker])])
    async with place.runtime(boss) as runtime:
        await (await runtime.session("chat")).run("go")
        await until(lambda: talk.news)
        await idle(runtime)

    assert last_lines(talk) == [f"value: it is {HIDDEN}"]


async def test_plugins_see_what_is_told_in_full_and_not_what_is_only_named(place: Place) -> None:
    """While the session is busy news gather; of the many that it hears of at once the last are only named."""
    held, many = asyncio.Event(), IN_FULL + 2

    @tool
    async def hold() -> str:
        """Hold the line."""
        await held.wait()
        return "held"

    talk, seeing = Talk(ToolCall(name="hold")), Seeing()
    async with place.runtime(Agent(talk.model, tools=[hold], plugins=[seeing]), processes=[leaking]) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("go")
        handles = [await session.start(leaking, id=f"p{number:02}") for number in range(many)]
        for handle in handles:
            await handle.outcome(SOON)
        held.set()
        await receipt.result(SOON)
        await idle(runtime)

    (news,) = talk.news
    seen = [call for call, name, _ in seeing.seen if name == "leaking"]
    assert (len(seen), len(set(seen))) == (IN_FULL, IN_FULL)
    named = {f"p{number:02}" for number in range(many)} - set(seen)
    assert len(named) == 2
    assert all(name in news for name in named)


async def test_a_fault_withholds_what_a_session_would_hear(place: Place) -> None:
    talk = Talk()
    agent = Agent(talk.model, plugins=[Seeing(ValueError("oops"))])
    async with place.runtime(agent, processes=[leaking]) as runtime:
        await (await (await runtime.session("chat")).start(leaking, id="p1")).outcome(SOON)
        await idle(runtime)

    assert last_lines(talk) == [
        "error: after_tool_call_failed: the call ended and its result is withheld: "
        "plugin 'seeing': after_tool_call: ValueError: oops"
    ]


async def test_a_plugin_that_refuses_the_session_lets_nothing_pass(place: Place) -> None:
    agent = Agent(Talk().model, tools=[fetch], plugins=[Seeing(refuses=True)])
    async with place.runtime(agent, processes=[leaking]) as runtime:
        session = await runtime.session("chat")
        await (await session.start(leaking, id="p1")).outcome(SOON)
        await idle(runtime)
        result = await session.result("chat.1")

    assert type(result.outcome).__name__ == "PluginAborted"
    assert SECRET not in repr(result.records)


class Hiding(Seeing):
    """Cannot say which tools it hides, once it is told to fail."""

    id = "hiding"
    fails = False

    def hidden_tools(self, ctx: CatalogContext) -> list[str]:
        if self.fails:
            raise ValueError("no idea")
        return []

    @property
    def revision(self) -> int:
        return int(self.fails)


async def test_a_plugin_that_cannot_say_what_it_hides_holds_nothing_up(place: Place) -> None:
    plugin, talk = Hiding(), Talk(ToolCall(name="fetch"))
    async with place.runtime(Agent(talk.model, tools=[fetch], plugins=[plugin])) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await idle(runtime)
        plugin.fails = True
        await (await session.start(fetch, id="p1")).outcome(SOON)
        await idle(runtime)
        result = await session.result("chat.3")

    assert type(result.outcome).__name__ == "PluginAborted"


async def test_what_a_session_is_told_is_what_was_decided_before_its_owner_died(file: Place) -> None:
    """Decided, written, and the model is not asked yet: the next owner tells the same, and asks no plugin."""
    plugin, asked = Seeing(ShortCircuit(Ok("first"))), asyncio.Event()

    async def hang(request: ModelRequest) -> str:
        asked.set()
        await asyncio.Event().wait()
        return ""

    runtime = file.runtime(Agent(FunctionModel(hang), name="a", plugins=[plugin]), processes=[leaking])
    await runtime.__aenter__()
    await (await (await runtime.session("chat")).start(leaking, id="p1")).outcome(SOON)
    await asyncio.wait_for(asked.wait(), SOON)
    await crash(runtime)
    later, talk = Seeing(ShortCircuit(Ok("second"))), Talk()
    async with file.runtime(Agent(talk.model, name="a", plugins=[later]), processes=[leaking]) as runtime:
        await until(lambda: talk.news)
        await idle(runtime)

    assert (len(plugin.seen), later.seen) == (1, [])
    assert last_lines(talk) == ["value: first"]


class Short(Plugin):
    """Shows one word of whatever a tool returned."""

    id = "short"

    def project_result(self, ctx: ToolEndContext) -> Any:
        return "seen"


@pytest.mark.parametrize(
    ("page", "told"), [("", "value: seen"), ("broken", f'data: {{"sent":"{SECRET}"}}')], ids=["returned", "failed"]
)
async def test_what_the_model_sees_of_a_value_is_decided_and_a_failure_is_told_as_it_is(
    place: Place, page: str, told: str
) -> None:
    talk = Talk(ToolCall(name="fetch", args={"page": page}))
    async with place.runtime(Agent(talk.model, tools=[fetch], plugins=[Short()])) as runtime:
        await (await runtime.session("chat")).run("go")
        await idle(runtime)

    assert last_lines(talk) == [told]


async def test_the_output_budget_of_the_agent_holds_for_what_its_sessions_hear(place: Place) -> None:
    @process
    async def wordy(ctx: ProcessContext[Any]) -> str:
        return "word " * 1000

    talk = Talk()
    async with place.runtime(Agent(talk.model, plugins=[OutputBudget(bytes=300)]), processes=[wordy]) as runtime:
        await (await (await runtime.session("chat")).start(wordy)).outcome(SOON)
        await idle(runtime)

    (news,) = talk.news
    assert len(news) < 600


async def test_beside_a_late_result_events_are_told_and_what_needs_a_turn_is_logged(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    said = EnqueueMessages((Message("user", "look!"),))
    plugin, events = Seeing([EmitEvents(({"n": 1},)), said]), list[AnyEvent]()
    async with place.runtime(Agent(Talk().model, plugins=[plugin]), processes=[leaking]) as runtime:
        session = await runtime.session("chat")

        async def listen() -> None:
            async for event in session.observe():
                events.append(event)

        listening = asyncio.create_task(listen())
        await asyncio.sleep(0)
        await (await session.start(leaking, id="p1")).outcome(SOON)
        await idle(runtime)
        listening.cancel()

    assert [each.value for each in events if isinstance(each, PluginEvent)] == [{"n": 1}]
    assert "plugin seeing: enqueue_messages means nothing after the result of process p1" in caplog.text
