"""Plugins in real turns: the order of hooks, and what becomes of a turn when a hook is broken in any way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from perdure import Agent, Message, ModelRequest, Session, ToolCall, tool
from perdure.errors import PluginError
from perdure.model.codec import MAX_VALUE
from perdure.model.llm import ModelResponse
from perdure.model.message import ToolResult
from perdure.model.outcome import Finished, PluginAborted
from perdure.model.plugin import Compaction, EnqueueMessages, Issue, PromptPart
from perdure.model.record import slots
from perdure.model.tool import Cancelled, Failed, Ok
from perdure.plugins.hooks import (
    CatalogContext,
    CheckpointContext,
    CompactContext,
    Plugin,
    PromptContext,
    SessionConfig,
    SessionContext,
    StreamContext,
    ToolCallContext,
    ToolEndContext,
    TurnContext,
    TurnEndContext,
    ViewContext,
)
from perdure.sessions.result import TurnResult
from perdure.testing import FunctionModel, VirtualClock
from tests.kit import SOON, Place, overloaded, texts
from tests.plugins.made import having


@tool
async def add(n: int) -> int:
    """Add one."""
    return n + 1


class Recorder(Plugin):
    """Writes down every hook that is called, with what tells one call from another."""

    id = "recorder"

    def __init__(self, log: list[str]) -> None:
        self.log, self.changes = log, 0

    def for_session(self, ctx: SessionContext) -> Recorder:
        self.log.append(f"for_session {ctx.session_id}")
        return Recorder(self.log)

    async def session_ready(self, ctx: SessionContext) -> None:
        self.log.append("session_ready")

    def restore(self, snapshot: Any, reader: Any) -> None:
        self.log.append(f"restore {snapshot.state}")

    def configure(self, ctx: SessionContext, config: SessionConfig) -> SessionConfig:
        self.log.append("configure")
        return config

    def session_restored(self, ctx: SessionContext) -> None:
        self.log.append("session_restored")

    def tools(self) -> Sequence[Any]:
        self.log.append("tools")
        return [add]

    def hidden_tools(self, ctx: CatalogContext) -> Sequence[str]:
        self.log.append("hidden_tools")
        return ()

    async def before_turn(self, ctx: TurnContext) -> None:
        self.log.append(f"before_turn {ctx.said.text}")

    def compact(self, ctx: CompactContext) -> None:
        self.log.append(f"compact {len(ctx.messages)}")

    async def prompt(self, ctx: PromptContext) -> Sequence[str]:
        self.log.append(f"prompt {ctx.step}")
        return ["be brief"]

    def transform_view(self, ctx: ViewContext, messages: Sequence[Message]) -> Sequence[Message]:
        self.log.append(f"transform_view {ctx.step}: {ctx.history} before, {len(messages)} in all")
        return messages

    def transform_text(self, ctx: StreamContext, text: str) -> str:
        self.log.append(f"transform_text {ctx.step} {'final' if ctx.final else text}")
        return text

    async def transform_response(self, ctx: StreamContext, response: ModelResponse) -> ModelResponse:
        self.log.append(f"transform_response {ctx.step}")
        return response

    def stream_finished(self, ctx: StreamContext, reason: str) -> None:
        self.log.append(f"stream_finished {ctx.step} {reason}")

    def before_tool_call(self, ctx: ToolCallContext) -> None:
        self.log.append(f"before_tool_call {ctx.call_id}")

    async def after_tool_call(self, ctx: ToolEndContext) -> None:
        self.changes += 1
        self.log.append(f"after_tool_call {ctx.call_id} {ctx.outcome}")

    def project_result(self, ctx: ToolEndContext) -> Any:
        self.log.append(f"project_result {ctx.call_id}")
        assert isinstance(ctx.outcome, Ok)
        return ctx.outcome.value

    async def at_checkpoint(self, ctx: CheckpointContext) -> None:
        self.log.append(f"at_checkpoint {ctx.boundary}")

    def after_turn(self, ctx: TurnEndContext) -> None:
        self.log.append(f"after_turn {type(ctx.outcome).__name__}")

    async def turn_finalized(self, ctx: TurnEndContext) -> None:
        self.changes += 1
        self.log.append("turn_finalized")

    def turn_persisted(self, ctx: TurnEndContext) -> None:
        self.log.append("turn_persisted")

    @property
    def revision(self) -> int:
        return self.changes

    def snapshot(self, writer: Any) -> Any:
        self.log.append(f"snapshot {self.changes}")
        return self.changes


ORDER = [
    "tools",  # when the agent is taken in: its tools must have names of their own
    "for_session s",
    "session_ready",
    "restore None",
    "configure",
    "tools",
    "before_turn go",
    "compact 0",
    "hidden_tools",
    "prompt 1",
    "transform_view 1: 0 before, 1 in all",
    "stream_finished 1 attempt_reset",
    "prompt 1",
    "transform_view 1: 0 before, 1 in all",
    "transform_text 1 let me see",
    "transform_text 1 final",
    "transform_response 1",
    "stream_finished 1 complete",
    "before_tool_call s.1.1.0",
    "before_tool_call s.1.1.1",
    # Both bodies have begun; the one that is steered waits for the other.
    "after_tool_call s.1.1.1 Ok(value=3, whole=None, files=())",
    "project_result s.1.1.1",
    "snapshot 1",
    "after_tool_call s.1.1.0 Ok(value='steered', whole=None, files=())",
    "project_result s.1.1.0",
    "snapshot 2",
    "at_checkpoint after_work",
    "hidden_tools",  # its revision has moved, so it may hide others now
    "prompt 2",
    "transform_view 2: 0 before, 5 in all",
    "transform_text 2 done",
    "transform_text 2 final",
    "transform_response 2",
    "stream_finished 2 complete",
    "at_checkpoint before_completion",
    "after_turn Finished",
    "turn_finalized",
    "snapshot 3",
    "turn_persisted",
]


async def test_order_of_one_turn(place: Place) -> None:
    """With a model attempt that is tried again, two tools at once, and an input that reaches the running turn."""
    log: list[str] = []
    asked: list[ModelRequest] = []
    sessions: list[Session] = []

    @tool
    async def steered() -> str:
        """Says something to its own session once the other call is over."""
        while "snapshot 1" not in log:  # noqa: ASYNC110  # nobody tells when a record is made
            await asyncio.sleep(0)
        await sessions[0].steer("hurry")
        return "steered"

    def model(request: ModelRequest) -> Any:
        asked.append(request)
        if len(asked) == 1:
            raise overloaded()
        if request.messages[-1].role == "user" and len(asked) == 2:
            return ModelResponse(
                "let me see", (ToolCall("a", "steered"), ToolCall("b", "add", {"n": 2})), stop="tool_calls"
            )
        return "done"

    agent = Agent(FunctionModel(model), tools=[steered], plugins=[Recorder(log)])
    async with place.runtime(agent, clock=VirtualClock(auto=True)) as runtime:
        sessions.append(await runtime.session("s"))
        result = await sessions[0].run("go")

    assert (result.outcome, result.issues) == (Finished("done"), [])
    assert log == ORDER
    assert texts(asked[-1].messages[-1:]) == ["hurry"]
    assert [m.role for m in asked[-1].messages] == ["system", "user", "assistant", "tool", "tool", "user"]


async def test_restarted_session_is_restored_before_its_turn(place: Place) -> None:
    log: list[str] = []
    for said in ("first", "second"):
        agent = Agent(FunctionModel(lambda request: "done"), plugins=[Recorder(log)])
        async with place.runtime(agent) as runtime:
            await (await runtime.session("s")).run(said)

    again = log[log.index("turn_persisted") + 1 :]
    assert again[:9] == [
        "tools",
        "for_session s",
        "session_ready",
        "restore 1",
        "configure",
        "session_restored",
        "tools",
        "before_turn second",
        "compact 2",
    ]


async def test_live_session_makes_no_new_instances_for_its_next_turn(place: Place) -> None:
    log: list[str] = []
    async with place.runtime(Agent(FunctionModel(lambda request: "done"), plugins=[Recorder(log)])) as runtime:
        session = await runtime.session("s")
        await session.run("first")
        await session.run("second")

    assert [line for line in log if line.startswith(("for_session", "restore", "before_turn"))] == [
        "for_session s",
        "restore None",
        "before_turn first",
        "before_turn second",
    ]


# ---------------------------------------------------------------------- broken hooks

LIMIT = 0.02


class Nonsense:
    def __repr__(self) -> str:
        return "nonsense"


async def raises() -> Any:
    raise ZeroDivisionError("no way")


async def exits() -> Any:
    raise SystemExit(3)


async def cancels_itself() -> Any:
    raise asyncio.CancelledError


async def hangs() -> Any:
    await asyncio.Event().wait()


async def is_deaf() -> Any:
    """Swallows its cancellation, and goes on for longer than anybody waits."""
    for seconds in (60, 0.05, 0.05, 0.05):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(seconds)


async def answers_nonsense() -> Any:
    return Nonsense()


FAULTS: dict[str, Callable[[], Any]] = {
    "raises": raises,
    "exits": exits,
    "cancels itself": cancels_itself,
    "hangs": hangs,
    "is deaf": is_deaf,
    "answers nonsense": answers_nonsense,
}
PLAIN_FAULTS: dict[str, Any] = {
    "raises": ZeroDivisionError("no way"),
    "exits": SystemExit(3),
    "cancels itself": asyncio.CancelledError(),
    "answers nonsense": Nonsense(),
}

# Hook -> the code with which the turn ends.
ABORTS = {
    "session_ready": "plugin_session",
    "before_turn": "plugin_prepare_turn",
    "compact": "context_prepare_turn",
    "prompt": "context_prepare_turn",
    "transform_view": "context_prepare_turn",
    "transform_response": "plugin_output",
    "stream_finished": "plugin_output",
    "at_checkpoint": "plugin_checkpoint",
    "after_turn": "plugin_finalize_turn",
}
PLAIN_ABORTS = {
    "for_session": "plugin_session",
    "tools": "plugin_session",
    "hidden_tools": "plugin_session",
    "transform_text": "plugin_output",
}
# Hook -> the code with which the call fails; the turn goes on.
DENIES = {"before_tool_call": "before_tool_call_failed", "after_tool_call": "after_tool_call_failed"}
# Hook -> the code of the issue that is reported beside the turn.
REPORTS = {
    "configure": "config_mutator_failed",
    "turn_finalized": "lifecycle_hook_failed",
    "turn_persisted": "lifecycle_hook_failed",
}
# Nobody reads what these answer.
UNREAD = ("session_ready", "stream_finished", "turn_finalized", "turn_persisted")
# What they must give back when they are well.
PASSES = ("transform_view", "transform_response", "configure", "transform_text")
EMPTY = ("prompt", "tools", "hidden_tools")


def well(hook: str, told: Sequence[Any]) -> Any:
    return told[1] if hook in PASSES else () if hook in EMPTY else None


class Broken:
    """Makes a plugin whose hook is broken in session "broken" until it is `mended`, and well in any other."""

    def __init__(self, hook: str, fault: str) -> None:
        self.hook, self.fault, self.mended = hook, fault, False
        self.plugin = having(hook, self.answer, "broken", time_limit=LIMIT)

    async def answer(self, *told: Any) -> Any:
        if self.mended or told[0].session_id != "broken":
            return well(self.hook, told)
        return await FAULTS[self.fault]()


def pairs(hooks: Sequence[str], faults: Sequence[str]) -> list[Any]:
    return [
        pytest.param(hook, fault, id=f"{hook} {fault}")
        for hook in hooks
        for fault in faults
        if not (fault == "answers nonsense" and hook in UNREAD)
    ]


def model(request: ModelRequest) -> Any:
    """Asks for one call, and answers when its result is there."""
    if request.messages[-1].role == "tool":
        return "done"
    return ModelResponse("let me see", (ToolCall("c", "add", {"n": 1}),), stop="tool_calls")


async def run_beside_a_neighbour(place: Place, plugin: Plugin, mend: Callable[[], None]) -> TurnResult[Any]:
    """A turn of the broken session; its neighbour, and its own next turn, must be as if nothing had happened."""
    agent = Agent(FunctionModel(model), tools=[add], plugins=[plugin])
    async with place.runtime(agent) as runtime, asyncio.timeout(SOON):
        broken, fine = await runtime.session("broken"), await runtime.session("fine")
        result, neighbour = await asyncio.gather(broken.run("go"), fine.run("go"))
        mend()
        after = await broken.run("and now?")

        assert (neighbour.outcome, neighbour.issues) == (Finished("done"), [])
        assert [call.outcome for call in neighbour.tool_calls] == [Ok(2)]
        assert after.outcome == Finished("done")
        assert [call.outcome for call in after.tool_calls] == [Ok(2)]
    return result


@pytest.mark.parametrize(("hook", "fault"), pairs(list(ABORTS), list(FAULTS)))
async def test_broken_hook_that_a_turn_cannot_do_without_ends_it(place: Place, hook: str, fault: str) -> None:
    broken = Broken(hook, fault)
    result = await run_beside_a_neighbour(place, broken.plugin, lambda: setattr(broken, "mended", True))

    assert isinstance(result.outcome, PluginAborted)
    assert (result.outcome.plugin, result.outcome.code) == ("broken", ABORTS[hook])
    assert hook in result.outcome.message


class BrokenPlainly:
    """The same for hooks that cannot be async."""

    def __init__(self, hook: str, fault: str) -> None:
        self.hook, self.fault, self.mended = hook, fault, False
        answer = self.answer

        def plain(self: Plugin, *told: Any) -> Any:
            return answer(self, *told)

        # `tools` is told nothing: its session is known from the instance.
        attributes = {"id": "broken", "session": "", hook: plain}
        if hook != "for_session":
            attributes["for_session"] = lambda shared, ctx: _instance(shared, ctx)
        self.plugin: Plugin = type("Made", (Plugin,), attributes)()

    def answer(self, plugin: Any, *told: Any) -> Any:
        session = told[0].session_id if told else plugin.session
        if self.mended or session != "broken":
            return _instance(plugin, told[0]) if self.hook == "for_session" else well(self.hook, told)
        fault = PLAIN_FAULTS[self.fault]
        if isinstance(fault, BaseException):
            raise fault
        return fault


def _instance(shared: Any, ctx: SessionContext) -> Any:
    made = type(shared)()
    made.session = ctx.session_id
    return made


@pytest.mark.parametrize(("hook", "fault"), pairs(list(PLAIN_ABORTS), list(PLAIN_FAULTS)))
async def test_broken_plain_hook_that_a_turn_cannot_do_without_ends_it(place: Place, hook: str, fault: str) -> None:
    broken = BrokenPlainly(hook, fault)
    result = await run_beside_a_neighbour(place, broken.plugin, lambda: setattr(broken, "mended", True))

    assert isinstance(result.outcome, PluginAborted)
    assert (result.outcome.plugin, result.outcome.code) == ("broken", PLAIN_ABORTS[hook])
    assert hook in result.outcome.message


@pytest.mark.parametrize(("hook", "fault"), pairs(list(DENIES), list(FAULTS)))
async def test_broken_hook_of_a_call_fails_that_call(place: Place, hook: str, fault: str) -> None:
    broken = Broken(hook, fault)
    result = await run_beside_a_neighbour(place, broken.plugin, lambda: setattr(broken, "mended", True))

    assert result.outcome == Finished("done")
    [call] = result.tool_calls
    assert isinstance(call.outcome, Failed)
    assert call.outcome.code == DENIES[hook]
    assert f"plugin 'broken': {hook}" in call.outcome.message


@pytest.mark.parametrize(("hook", "fault"), pairs(list(REPORTS), list(FAULTS)))
async def test_broken_hook_that_a_turn_can_do_without_is_reported(place: Place, hook: str, fault: str) -> None:
    broken = Broken(hook, fault)
    result = await run_beside_a_neighbour(place, broken.plugin, lambda: setattr(broken, "mended", True))

    assert result.outcome == Finished("done")
    assert [call.outcome for call in result.tool_calls] == [Ok(2)]
    assert [(issue.plugin, issue.code) for issue in result.issues] == [("broken", REPORTS[hook])]
    assert hook in result.issues[0].message


WRONG: Any = 42
HALF_SENSE: list[Any] = [
    pytest.param("prompt", [PromptPart("a", slot=WRONG), PromptPart("b")], id="prompt"),
    pytest.param("transform_view", [Message("user", (WRONG,))], id="transform_view"),
    pytest.param("compact", Compaction((Message("assistant", (ToolCall("x", "add"),)),)), id="compact a call"),
    pytest.param("compact", Compaction((Message("tool", (ToolResult("x", "add", 1),)),)), id="compact a result"),
]


@pytest.mark.parametrize(("hook", "answer"), HALF_SENSE)
async def test_answer_that_makes_sense_only_at_first_sight_ends_the_turn_too(
    place: Place, hook: str, answer: Any
) -> None:
    mended: list[bool] = []

    async def give(*told: Any) -> Any:
        return well(hook, told) if mended or told[0].session_id != "broken" else answer

    result = await run_beside_a_neighbour(place, having(hook, give, "broken"), lambda: mended.append(True))

    assert isinstance(result.outcome, PluginAborted)
    assert (result.outcome.plugin, result.outcome.code) == ("broken", "context_prepare_turn")


async def test_configuration_with_nonsense_in_it_changes_nothing(place: Place) -> None:
    plugin = having("configure", lambda ctx, config: SessionConfig(WRONG), "broken")
    async with place.runtime(Agent(FunctionModel(model), tools=[add], plugins=[plugin])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == Finished("done")
    assert [(issue.plugin, issue.code) for issue in result.issues] == [("broken", "config_mutator_failed")]


async def test_listing_tools_tells_whose_fault_it_is_that_it_cannot(place: Place) -> None:
    broken = BrokenPlainly("hidden_tools", "raises")
    async with place.runtime(Agent(FunctionModel(model), tools=[add], plugins=[broken.plugin])) as runtime:
        with pytest.raises(PluginError, match="hidden_tools: ZeroDivisionError") as caught:
            await (await runtime.session("broken")).tools.list()

    assert caught.value.plugin == "broken"


async def test_first_fault_of_a_model_call_is_the_one_that_is_told(place: Place) -> None:
    async def later(*told: Any) -> None:
        raise ValueError("second")

    def sooner(*told: Any) -> str:
        raise ValueError("first")

    plugins = [having("stream_finished", later, "later"), having("transform_text", sooner, "sooner")]
    async with place.runtime(Agent(FunctionModel(lambda request: "done"), plugins=plugins)) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert isinstance(result.outcome, PluginAborted)
    assert (result.outcome.plugin, result.outcome.message.endswith("first")) == ("sooner", True)


async def check_withheld(place: Place, plugin: Plugin) -> None:
    """A projection that fails withholds the result from the model, and costs nothing else."""
    agent = Agent(FunctionModel(model), tools=[add], plugins=[plugin])
    async with place.runtime(agent) as runtime, asyncio.timeout(SOON):
        result = await (await runtime.session("broken")).run("go")
    async with place.runtime(agent) as runtime:
        session = await runtime.session("broken")
        shown, again = await session.history(), await session.result(result.turn_id)

    assert result.outcome == Finished("done")
    assert [call.outcome for call in result.tool_calls] == [call.outcome for call in again.tool_calls] == [Ok(2)]
    assert [(issue.plugin, issue.code) for issue in result.issues] == [("broken", "plugin_fault")]
    told = "result withheld: plugin 'broken' failed"
    assert result.new_messages[2].tool_results[0].content == told
    assert shown[2].tool_results[0].content == told


@pytest.mark.parametrize("fault", PLAIN_FAULTS)
async def test_broken_projection_withholds_the_result_from_the_model(place: Place, fault: str) -> None:
    await check_withheld(place, BrokenPlainly("project_result", fault).plugin)


@pytest.mark.parametrize("fault", FAULTS)
async def test_broken_async_projection_withholds_the_result_from_the_model(place: Place, fault: str) -> None:
    async def project(ctx: ToolEndContext) -> Any:
        return await FAULTS[fault]()

    await check_withheld(place, having("project_result", project, "broken", time_limit=LIMIT))


async def test_projection_that_is_too_large_withholds_the_result_from_the_model(place: Place) -> None:
    await check_withheld(place, having("project_result", lambda ctx: "x" * (MAX_VALUE + 1), "broken"))


async def test_async_projection_is_awaited(place: Place) -> None:
    async def project(ctx: ToolEndContext) -> Any:
        await asyncio.sleep(0)
        return {"seen": str(ctx.outcome)}

    agent = Agent(FunctionModel(model), tools=[add], plugins=[having("project_result", project, "p")])
    async with place.runtime(agent) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.new_messages[2].tool_results[0].content == {"seen": str(Ok(2))}
    assert result.issues == []


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "answers nonsense"])
async def test_broken_hook_of_a_restored_session_is_reported(place: Place, fault: str) -> None:
    async def answer(ctx: SessionContext) -> None:
        await FAULTS[fault]()

    plugin = having("session_restored", answer, "broken", time_limit=LIMIT)
    for expected in ([], [("broken", "lifecycle_hook_failed")]):
        async with place.runtime(Agent(FunctionModel(model), tools=[add], plugins=[plugin])) as runtime:
            result = await (await runtime.session("s")).run("go")

        assert result.outcome == Finished("done")
        assert [(issue.plugin, issue.code) for issue in result.issues] == expected


async def test_several_faults_beside_a_turn_are_all_told_in_order(place: Place) -> None:
    async def raising(*told: Any) -> None:
        raise ValueError("oh")

    plugins = [having("turn_finalized", raising, "b"), having("turn_finalized", raising, "a")]
    async with place.runtime(Agent(FunctionModel(lambda request: "done"), plugins=plugins)) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        read = await session.result(result.turn_id)

    issue = "lifecycle_hook_failed"
    assert result.issues == [
        Issue(issue, "plugin 'b': turn_finalized: ValueError: oh", "b"),
        Issue(issue, "plugin 'a': turn_finalized: ValueError: oh", "a"),
    ]
    assert read.issues == result.issues, "they are in the commit"


# ---------------------------------------------------------------------- cancelling, and what changes between turns

GUARDED = [
    "compact",
    "before_turn",
    "prompt",
    "transform_view",
    "transform_response",
    "before_tool_call",
    "at_checkpoint",
]


@pytest.mark.parametrize("hook", GUARDED)
async def test_cancel_reaches_a_turn_whose_hook_hangs(place: Place, hook: str) -> None:
    waiting, ended = asyncio.Event(), list[str]()

    async def answer(*told: Any) -> Any:
        if told[0].turn_id != "s.1":
            return well(hook, told)
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            ended.append(hook)

    agent = Agent(FunctionModel(model), tools=[add], plugins=[having(hook, answer)])
    async with place.runtime(agent) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        receipt = await session.send("go")
        await waiting.wait()
        await session.cancel("enough")
        result = await receipt.result()
        after = await session.run("and now?")

    assert result.outcome == Cancelled("host", "enough")
    assert ended == [hook], "it is not left running"
    assert after.outcome == Finished("done")


async def test_cancel_while_a_plugin_looks_at_a_result(place: Place) -> None:
    """The body has returned, and nobody knows what would have been recorded of it."""
    waiting = asyncio.Event()

    async def answer(ctx: ToolEndContext) -> None:
        waiting.set()
        await asyncio.Event().wait()

    agent = Agent(FunctionModel(model), tools=[add], plugins=[having("after_tool_call", answer)])
    async with place.runtime(agent) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        receipt = await session.send("go")
        await waiting.wait()
        await session.cancel("enough")
        result = await receipt.result()

    assert result.outcome == Cancelled("host", "enough")
    assert [type(call.outcome).__name__ for call in result.tool_calls] == ["OutcomeUnknown"]


async def test_cancel_that_comes_before_the_commit_keeps_what_plugins_said_and_changed(place: Place) -> None:
    """The commit is refused and made again as a cancelled one: with everything that was to ride in the first."""
    sessions: list[Session] = []

    class Last(Recorder):
        def for_session(self, ctx: SessionContext) -> Last:
            return Last(self.log)

        def after_turn(self, ctx: TurnEndContext) -> Any:
            return EnqueueMessages((Message("user", "noted"),))

        async def turn_finalized(self, ctx: TurnEndContext) -> None:
            self.changes += 1
            await sessions[0].cancel("at the last moment")
            raise ValueError("oh")

    async with place.runtime(Agent(FunctionModel(lambda request: "done"), plugins=[Last([])])) as runtime:
        sessions.append(await runtime.session("s"))
        result = await sessions[0].run("go")
        read = await sessions[0].result("s.1")
        history = texts(await sessions[0].history())

    assert result.outcome == Cancelled("host", "at the last moment")
    assert history == ["go", "done", "noted"]
    assert [issue.message for issue in read.issues] == ["plugin 'recorder': turn_finalized: ValueError: oh"]
    states = [each.state for slot in slots(read.records) for each in (slot.snapshots or {}).values()]
    assert states == [1]


class Configured(Plugin):
    """Says what its options say; remembers what it was told of changes."""

    id = "configured"

    def __init__(self, told: list[Any], broken: bool = False) -> None:
        self.told, self.broken = told, broken

    def configure(self, ctx: SessionContext, config: SessionConfig) -> SessionConfig:
        return SessionConfig((ctx.options or {}).get("say", config.instructions), config.budget)

    async def session_config_changed(self, ctx: SessionContext, before: SessionConfig, after: SessionConfig) -> None:
        self.told.append((before.instructions, after.instructions))
        if self.broken:
            raise ValueError("oh")


@pytest.mark.parametrize("broken", [False, True])
async def test_changed_options_change_how_the_session_runs_from_the_next_turn_on(place: Place, broken: bool) -> None:
    told: list[Any] = []
    asked: list[str] = []

    def answer(request: ModelRequest) -> str:
        asked.append(request.messages[0].text)
        return "done"

    agent = Agent(FunctionModel(answer), instructions="be brief", plugins=[Configured(told, broken)])
    async with place.runtime(agent) as runtime:
        await (await runtime.session("s")).run("first")
        result = await (await runtime.session("s", options={"configured": {"say": "be kind"}})).run("second")
        third = await (await runtime.session("s")).run("third")

    assert asked == ["be brief", "be kind", "be kind"]
    assert told == [("be brief", "be kind")]
    assert [issue.code for issue in result.issues] == (["lifecycle_hook_failed"] if broken else [])
    assert third.issues == []
