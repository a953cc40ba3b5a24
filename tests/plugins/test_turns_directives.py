"""What plugins say at each seam of a real turn, and what becomes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Message, ModelRequest, ToolCall, ToolContext, tool
from perdure.model.event import PluginEvent
from perdure.model.llm import ModelResponse
from perdure.model.outcome import Finished, PendingCall, PluginAborted, Waiting
from perdure.model.plugin import (
    AbortTurn,
    AskPerson,
    CreateSession,
    Decision,
    Directive,
    EmitEvents,
    EmitTrace,
    EnqueueMessages,
    ReplaceArgs,
    Seam,
    ShortCircuit,
)
from perdure.model.record import Ended, Started
from perdure.model.tool import Denied, Failed, Ok
from perdure.plugins.hooks import Plugin, SessionContext, ToolCallContext
from perdure.testing import FunctionModel
from perdure.tracing.jsonl import JsonlSink
from tests.kit import SOON, Place
from tests.plugins.made import having


class Bench:
    """A tool that counts its runs, and a model that asks for it twice at once and then answers."""

    def __init__(self, *calls: dict[str, Any]) -> None:
        self.ran: list[int] = []
        self.requests: list[ModelRequest] = []
        self._calls = calls or ({"n": 1},)

        @tool
        async def add(n: int) -> int:
            """Add one."""
            self.ran.append(n)
            return n + 1

        self.tool = add

    def model(self, request: ModelRequest) -> Any:
        self.requests.append(request)
        said = [m for m in request.messages if m.role in ("user", "tool") and not m.text.startswith("[plugin]")]
        if said[-1].role == "tool":
            return "done"
        calls = tuple([ToolCall(f"c{i}", "add", args) for i, args in enumerate(self._calls)])
        return ModelResponse("", calls, stop="tool_calls")

    def agent(self, *plugins: Plugin) -> Agent[str]:
        return Agent(FunctionModel(self.model), name="agent", tools=[self.tool], plugins=plugins)


def says(seam: Seam, *directives: Directive, id: str = "p", at: str | None = None) -> Plugin:
    """A plugin that gives directives at a seam; of checkpoints, only at one boundary and only once in a turn."""
    given: set[str] = set()

    def answer(ctx: Any) -> Sequence[Directive]:
        if at is not None and (ctx.boundary != at or ctx.turn_id in given):
            return ()
        given.add(ctx.turn_id)
        return directives

    return having(seam, answer, id)


def enqueue(text: str, role: Any = "user") -> EnqueueMessages:
    return EnqueueMessages((Message(role, f"[plugin] {text}"),))


def outline(messages: Sequence[Message]) -> list[str]:
    """Each message on a line; results with what they answer."""
    lines = []
    for message in messages:
        calls = "".join([f" +{call.id}" for call in message.tool_calls])
        results = "".join([f" {each.call_id}={each.content}" for each in message.tool_results])
        lines.append(f"{message.role}: {message.text}{calls}{results}".replace(":  ", ": "))
    return lines


# ---------------------------------------------------------------------- abort


async def test_abort_before_a_turn_asks_no_model_and_the_session_goes_on(place: Place) -> None:
    bench = Bench()

    def answer(ctx: Any) -> Any:
        return AbortTurn("office_closed", "come back tomorrow") if ctx.said.text == "go" else None

    async with place.runtime(bench.agent(having("before_turn", answer))) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        asked = len(bench.requests)
        after = await session.run("and now?")
        history = outline(await session.history())

    assert result.outcome == PluginAborted("p", "office_closed", "come back tomorrow")
    assert asked == 0
    assert after.outcome == Finished("done")
    assert history == [
        "user: go",
        "user: and now?",
        "assistant: +c0",
        "tool: c0=2",
        "assistant: done",
    ]


async def test_last_of_two_aborts_counts(place: Place) -> None:
    plugins = (says("before_turn", AbortTurn("one"), id="a"), says("before_turn", AbortTurn("two"), id="b"))
    async with place.runtime(Bench().agent(*plugins)) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == PluginAborted("b", "two")


@pytest.mark.parametrize(("boundary", "steps"), [("after_work", 1), ("before_completion", 2)])
async def test_abort_at_a_checkpoint_keeps_what_was_done(place: Place, boundary: str, steps: int) -> None:
    bench = Bench()
    async with place.runtime(bench.agent(says("at_checkpoint", AbortTurn("enough"), at=boundary))) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        history = outline(await session.history())

    assert result.outcome == PluginAborted("p", "enough")
    assert len(bench.requests) == steps
    assert history == ["user: go", "assistant: +c0", "tool: c0=2", "assistant: done"][: 2 + steps]
    assert [call.outcome for call in result.tool_calls] == [Ok(2)]


async def test_abort_at_a_call_fails_that_call_only(place: Place) -> None:
    bench = Bench({"n": 1}, {"n": 2})

    def answer(ctx: ToolCallContext) -> Any:
        return AbortTurn("forbidden", "not that one") if ctx.args == {"n": 1} else None

    async with place.runtime(bench.agent(having("before_tool_call", answer))) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == Finished("done")
    assert [call.outcome for call in result.tool_calls] == [Failed("forbidden", "not that one"), Ok(3)]
    assert bench.ran == [2]


# ---------------------------------------------------------------------- enqueue

PLACED = {
    "before_turn": [
        "user: go",
        "user: [plugin] hm",
        "assistant: +c0 +c1",
        "tool: c0=2",
        "tool: c1=3",
        "assistant: done",
    ],
    "after_tool_call": [
        "user: go",
        "assistant: +c0 +c1",
        "tool: c0=2",
        "tool: c1=3",
        "user: [plugin] hm",
        "user: [plugin] hm",
        "assistant: done",
    ],
    "after_work": [
        "user: go",
        "assistant: +c0 +c1",
        "tool: c0=2",
        "tool: c1=3",
        "user: [plugin] hm",
        "assistant: done",
    ],
    "before_completion": [
        "user: go",
        "assistant: +c0 +c1",
        "tool: c0=2",
        "tool: c1=3",
        "assistant: done",
        "user: [plugin] hm",
        "assistant: done",
    ],
    "after_turn": [
        "user: go",
        "assistant: +c0 +c1",
        "tool: c0=2",
        "tool: c1=3",
        "assistant: done",
        "user: [plugin] hm",
    ],
}


@pytest.mark.parametrize("where", PLACED)
async def test_enqueued_messages_stand_where_they_were_said_and_results_stay_paired(place: Place, where: str) -> None:
    bench = Bench({"n": 1}, {"n": 2})
    boundary = where if where in ("after_work", "before_completion") else None
    seam: Any = "at_checkpoint" if boundary else where
    async with place.runtime(bench.agent(says(seam, enqueue("hm"), at=boundary))) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        live = outline(await session.history())
    async with place.runtime(bench.agent()) as runtime:
        read = outline(await (await runtime.session("s")).history())

    assert result.outcome == Finished("done")
    assert live == PLACED[where]
    assert read == PLACED[where], "another process reads the same"
    assert outline(result.new_messages) == PLACED[where]


async def test_what_is_said_after_a_turn_is_shown_to_the_next_one(place: Place) -> None:
    bench = Bench()
    async with place.runtime(bench.agent(says("after_turn", enqueue("be careful", "system")))) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await session.run("again")

    assert outline(bench.requests[2].messages)[-2:] == ["system: [plugin] be careful", "user: again"]


# ---------------------------------------------------------------------- other sessions


@pytest.mark.parametrize("seam", ["before_turn", "before_tool_call", "after_tool_call", "at_checkpoint", "after_turn"])
async def test_child_session_runs_its_first_input(place: Place, seam: Seam) -> None:
    child = CreateSession(agent="helper", said=Message("user", "help"), label="aid")
    helper = Agent(FunctionModel(lambda request: f"helping with {request.messages[-1].text}"), name="helper")
    boundary = "after_work" if seam == "at_checkpoint" else None
    async with place.runtime(Bench().agent(says(seam, child, at=boundary)), helper) as runtime:
        result = await (await runtime.session("s")).run("go")
        await runtime.wait_idle(timeout=SOON)
        others = [each for each in await runtime.sessions.list() if each.id != "s"]
        history = outline(await (await runtime.session(others[0].id)).history())

    assert (result.outcome, result.issues) == (Finished("done"), [])
    assert [each.agent for each in others] == ["helper"]
    assert others[0].id.startswith("s.1~")
    assert history == ["user: help", "assistant: helping with help"]


async def test_named_child_that_belongs_to_somebody_else_is_an_issue_of_the_turn(place: Place) -> None:
    bench = Bench()
    async with place.runtime(bench.agent(says("before_turn", CreateSession(session_id="taken")))) as runtime:
        await (await runtime.session("taken")).run("mine")
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == Finished("done")
    assert [(issue.plugin, issue.code) for issue in result.issues] == [("p", "plugin_fault")]
    assert "'taken' exists and is no child of 's'" in result.issues[0].message


# ---------------------------------------------------------------------- tool calls


async def test_arguments_are_checked_after_the_hooks(place: Place) -> None:
    """What the model got wrong, a plugin may put right."""
    bench = Bench({"n": "one"})
    async with place.runtime(bench.agent(says("before_tool_call", ReplaceArgs({"n": 1})))) as runtime:
        result = await (await runtime.session("s")).run("go")

    [call] = result.tool_calls
    assert (call.outcome, call.args, bench.ran) == (Ok(2), {"n": 1}, [1])
    started = next(record for record in result.records if isinstance(record, Started))
    assert started.slot is not None
    assert started.slot.decisions == (Decision("p", "before_tool_call", "replace_tool_args", {"n": 1}),)


async def test_replaced_arguments_are_checked_too(place: Place) -> None:
    bench = Bench()
    async with place.runtime(bench.agent(says("before_tool_call", ReplaceArgs({"n": "one"})))) as runtime:
        result = await (await runtime.session("s")).run("go")

    [call] = result.tool_calls
    assert isinstance(call.outcome, Failed)
    assert (call.outcome.code, bench.ran) == ("invalid_tool_args", [])


async def test_later_plugin_sees_replaced_arguments_and_the_earlier_one_looks_again(place: Place) -> None:
    bench, seen = Bench(), list[tuple[str, Any, bool]]()

    def watching(name: str, answer: Directive | None = None) -> Plugin:
        def hook(ctx: ToolCallContext) -> Any:
            seen.append((name, ctx.args, ctx.inspecting))
            return answer

        return having("before_tool_call", hook, name)

    plugins = (watching("a"), watching("b", ReplaceArgs({"n": 5})), watching("c"))
    async with place.runtime(bench.agent(*plugins)) as runtime:
        await (await runtime.session("s")).run("go")

    assert seen == [("a", {"n": 1}, False), ("b", {"n": 1}, False), ("a", {"n": 5}, True), ("c", {"n": 5}, False)]
    assert bench.ran == [5]


async def test_denied_call_does_not_run_and_its_record_says_who(place: Place) -> None:
    bench = Bench()
    denial = ShortCircuit(Denied("not today", "policy"))
    async with place.runtime(bench.agent(says("before_tool_call", denial))) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")

    [call] = result.tool_calls
    assert (call.outcome, bench.ran) == (Denied("not today", "policy"), [])
    ended = next(record for record in result.records if isinstance(record, Ended))
    assert ended.slot is not None
    assert ended.slot.decisions == (Decision("p", "before_tool_call", "short_circuit_tool"),)
    assert not any(isinstance(record, Started) for record in result.records)


async def test_outcome_is_replaced_before_anybody_sees_it(place: Place) -> None:
    bench = Bench()
    async with place.runtime(bench.agent(says("after_tool_call", ShortCircuit(Ok("secret"))))) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert [call.outcome for call in result.tool_calls] == [Ok("secret")]
    assert outline(bench.requests[1].messages)[-1] == "tool: c0=secret"
    assert bench.ran == [1]


async def test_value_that_came_from_outside_passes_the_hooks_too(place: Place) -> None:
    """A deferred call ends long after its body: what is sent in for it is a result like any other."""
    keys: list[str] = []

    @tool(deferred=True)
    async def later(ctx: ToolContext[Any]) -> None:
        """Ends when somebody sends its value in."""
        keys.append(ctx.defer())

    def model(request: ModelRequest) -> Any:
        return "done" if any(m.tool_results for m in request.messages) else [ToolCall("c", "later")]

    hide = says("after_tool_call", ShortCircuit(Ok("hidden")), enqueue("hm"))
    async with place.runtime(Agent(FunctionModel(model), tools=[later], plugins=[hide])) as runtime:
        session = await runtime.session("s")
        assert (await session.run("go")).waiting
        await runtime.resolve(keys[0], "secret")
        result = await session.result("s.1")

    assert [call.outcome for call in result.tool_calls] == [Ok("hidden")]
    assert outline(result.new_messages)[2:] == ["tool: c=hidden", "user: [plugin] hm", "assistant: done"]


# ---------------------------------------------------------------------- a person is asked


class Asking(Plugin):
    """Asks a person about every call, with arguments of its own; remembers whom it asked."""

    id = "asking"

    def __init__(self, log: list[str]) -> None:
        self.log, self.asked = log, 0

    def for_session(self, ctx: SessionContext) -> Asking:
        return Asking(self.log)

    def before_tool_call(self, ctx: ToolCallContext) -> Any:
        self.asked += 1
        self.log.append(f"asked for {ctx.call_id}")
        return [ReplaceArgs({"n": 7}), AskPerson("is it safe?")]

    def after_tool_call(self, ctx: Any) -> None:
        self.log.append(f"ended with {ctx.outcome}, {self.asked} asked")

    @property
    def revision(self) -> int:
        return self.asked

    def snapshot(self, writer: Any) -> Any:
        return self.asked

    def restore(self, snapshot: Any, reader: Any) -> None:
        self.asked = snapshot.state or 0


def shown(pending: PendingCall) -> tuple[str, str, dict[str, Any], str]:
    return pending.call_id, pending.kind, pending.args, pending.reason


async def test_asked_person_approves_in_another_runtime_what_was_shown(place: Place) -> None:
    bench, log = Bench(), list[str]()
    async with place.runtime(bench.agent(Asking(log))) as runtime:
        result = await (await runtime.session("s")).run("go")
        assert isinstance(result.outcome, Waiting)
        assert [shown(each) for each in result.outcome.calls] == [("s.1.1.0", "approval", {"n": 7}, "is it safe?")]
    assert bench.ran == []
    async with place.runtime() as runtime:
        session = await runtime.session("s")
        assert [shown(each) for each in await session.pending()] == [("s.1.1.0", "approval", {"n": 7}, "is it safe?")]
        await session.approve("s.1.1.0", by="ada")
    async with place.runtime(bench.agent(Asking(log))) as runtime:
        result = await (await runtime.session("s")).result("s.1")

    assert result.outcome == Finished("done")
    assert [(call.outcome, call.args) for call in result.tool_calls] == [(Ok(8), {"n": 7})]
    assert bench.ran == [7]
    assert log == ["asked for s.1.1.0", "ended with Ok(value=8, whole=None, files=()), 1 asked"]
    started = next(record for record in result.records if isinstance(record, Started))
    assert started.approved == {"by": "ada"}
    assert started.slot is not None
    assert [each.kind for each in started.slot.decisions] == ["replace_tool_args", "ask_person"]


async def test_asked_person_rejects(place: Place) -> None:
    bench, log = Bench(), list[str]()
    async with place.runtime(bench.agent(Asking(log))) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await session.reject("s.1.1.0", "too much", by="ada")
        result = await session.result("s.1")

    assert result.outcome == Finished("done")
    assert [call.outcome for call in result.tool_calls] == [Denied("too much", "ada")]
    assert (bench.ran, log) == ([], ["asked for s.1.1.0"])


@pytest.mark.parametrize(("verdict", "ran"), [("approve", [7]), ("reject", [])])
async def test_answer_counts_although_the_plugin_that_asked_is_gone(place: Place, verdict: str, ran: list[int]) -> None:
    bench = Bench()
    async with place.runtime(bench.agent(Asking([]))) as runtime:
        await (await runtime.session("s")).run("go")
    async with place.runtime(bench.agent()) as runtime:
        session = await runtime.session("s")
        await (session.approve if verdict == "approve" else session.reject)("s.1.1.0")
        result = await session.result("s.1")

    assert result.outcome == Finished("done")
    assert bench.ran == ran


async def test_state_of_the_plugin_that_asked_is_there_when_the_answer_comes(place: Place) -> None:
    """It parked with nothing recorded but its question, and is asked no more: what it remembers of it must stay."""
    bench, log = Bench(), list[str]()
    async with place.runtime(bench.agent(Asking(log))) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await session.approve("s.1.1.0")
        await session.result("s.1")

    assert log[-1] == "ended with Ok(value=8, whole=None, files=()), 1 asked"


async def test_two_calls_wait_each_for_its_own_answer(place: Place) -> None:
    bench = Bench({"n": 1}, {"n": 2})
    async with place.runtime(bench.agent(says("before_tool_call", AskPerson("?")))) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        assert isinstance(result.outcome, Waiting)
        await session.approve("s.1.1.1")
        await session.reject("s.1.1.0", "no")
        result = await session.result("s.1")

    assert [call.outcome for call in result.tool_calls] == [Denied("no", "host"), Ok(3)]


# ---------------------------------------------------------------------- events and traces

SEAMS: list[tuple[Seam, str | None]] = [
    ("before_turn", None),
    ("before_tool_call", None),
    ("after_tool_call", None),
    ("at_checkpoint", "after_work"),
    ("at_checkpoint", "before_completion"),
    ("after_turn", None),
]


@pytest.mark.parametrize(("seam", "boundary"), SEAMS)
async def test_observer_sees_the_events_of_a_plugin(place: Place, seam: Seam, boundary: str | None) -> None:
    plugin = says(seam, EmitEvents(({"progress": 1}, "half")), at=boundary)
    async with place.runtime(Bench().agent(plugin)) as runtime:
        session = await runtime.session("s")
        async with asyncio.timeout(SOON), session.stream("go") as turn:
            seen = [
                (event.plugin, event.value, event.turn_id) async for event in turn if isinstance(event, PluginEvent)
            ]

    assert seen == [("p", {"progress": 1}, "s.1"), ("p", "half", "s.1")]


@pytest.mark.parametrize(("seam", "boundary"), SEAMS)
async def test_trace_of_a_plugin_is_a_line_in_the_file(
    place: Place, tmp_path: Path, seam: Seam, boundary: str | None
) -> None:
    sink = JsonlSink(tmp_path / "trace.jsonl")
    plugin = says(seam, EmitTrace("seen", {"n": 1}, {"why": "audit"}), at=boundary)
    async with place.runtime(Bench().agent(plugin), trace=sink) as runtime:
        await (await runtime.session("s")).run("go")
    sink.close()

    lines = [json.loads(line) for line in sink.path.read_text().splitlines()]
    [line] = [each for each in lines if each["name"] == "plugin.p.seen"]
    assert line["session_id"] == "s"
    assert (line["turn_id"], line["payload"], line["context"]) == ("s.1", {"n": 1}, {"why": "audit"})


WRONG: list[tuple[Seam, Directive, Callable[[Any], Any], Any]] = [
    ("before_turn", ReplaceArgs({}), lambda r: r.outcome.code, "plugin_prepare_turn"),
    ("at_checkpoint", ShortCircuit(Ok(1)), lambda r: r.outcome.code, "plugin_checkpoint"),
    ("after_turn", AbortTurn("late"), lambda r: r.outcome.code, "plugin_finalize_turn"),
    ("before_tool_call", enqueue("hm"), lambda r: r.tool_calls[0].outcome.code, "before_tool_call_failed"),
    ("after_tool_call", ReplaceArgs({}), lambda r: r.tool_calls[0].outcome.code, "after_tool_call_failed"),
]


@pytest.mark.parametrize(("seam", "directive", "code", "expected"), WRONG, ids=[each[0] for each in WRONG])
async def test_directive_that_means_nothing_at_its_seam_is_a_fault(
    place: Place, seam: Seam, directive: Directive, code: Callable[[Any], Any], expected: str
) -> None:
    async with place.runtime(Bench().agent(says(seam, directive))) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert code(result) == expected
