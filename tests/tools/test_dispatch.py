"""Calls of a reply: how bodies run, what they are given, and what becomes of whatever they do."""

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import msgspec
import pytest

from perdure import Agent, ModelRequest, ModelResponse, Runtime, ToolCall, ToolContext, ToolError, tool
from perdure.errors import InvalidDefinition
from perdure.model.event import ToolProgress
from perdure.model.tool import BlobRef, Failed, Ok, OutputBudget, PreparedCall, ToolOutcome, ToolRecord, ToolSpec
from perdure.testing import FunctionModel, ScriptedModel
from tests.keys import within_store
from tests.kit import SOON, Place


async def outcome_of(place: Place, body: Any, args: dict[str, Any] | None = None, **options: Any) -> ToolOutcome:
    """How one call ends: the turn must finish, and its history must read the same from the store."""
    return (await record_of(place, ToolCall("p", "body", args or {}), body, **options)).outcome


async def record_of(place: Place, call: ToolCall, body: Any, **options: Any) -> ToolRecord:
    made = tool(name="body", **options)(body)
    agent = Agent(ScriptedModel([[call], "done"]), tools=[made])
    async with place.runtime(agent) as runtime:
        live = await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)
    async with place.runtime(Agent(ScriptedModel(["fine"]))) as runtime:
        session = await runtime.session("chat")
        stored = await session.result("chat.1")
        assert (await session.run("again")).text == "fine"

    assert live.text == "done"
    assert live.tool_calls == stored.tool_calls
    assert live.messages == stored.messages
    (record,) = live.tool_calls
    return record


# ---------------------------------------------------------------------- running


async def test_sync_and_async_tools_return_to_the_model(place: Place) -> None:
    @tool
    def on_a_thread(n: int) -> dict[str, Any]:
        return {"n": n, "thread": threading.current_thread() is not threading.main_thread()}

    @tool
    async def on_the_loop(n: int) -> dict[str, Any]:
        return {"n": n, "thread": threading.current_thread() is not threading.main_thread()}

    model = ScriptedModel([[ToolCall("a", "on_a_thread", {"n": 1}), ToolCall("b", "on_the_loop", {"n": 2})], "done"])
    async with place.runtime(Agent(model, tools=[on_a_thread, on_the_loop])) as runtime:
        await (await runtime.session("chat")).run("go")

    results = [m.tool_results[0] for m in model.requests[1].messages if m.role == "tool"]
    assert [(r.call_id, r.name, r.content, r.status) for r in results] == [
        ("a", "on_a_thread", {"n": 1, "thread": True}, "ok"),
        ("b", "on_the_loop", {"n": 2, "thread": False}, "ok"),
    ]


async def test_a_tool_is_given_its_context(place: Place) -> None:
    seen: list[ToolContext[dict[str, int]]] = []

    @tool
    def look(where: str, ctx: ToolContext[dict[str, int]]) -> None:
        seen.append(ctx)

    model = ScriptedModel([[ToolCall("p", "look", {"where": "up"})], "done"])
    deps = {"n": 1}
    async with place.runtime(Agent(model, tools=[look]), deps=deps) as runtime:
        await (await runtime.session("chat")).run("go")

    (ctx,) = seen
    assert (ctx.session_id, ctx.turn_id, ctx.call_id, ctx.tool) == ("chat", "chat.1", "chat.1.1.0", "look")
    assert (ctx.attempt, within_store(ctx.idempotency_key), ctx.cancelled) == (1, "chat.1.1.0", False)
    assert ctx.generation >= 1
    assert ctx.deps is deps
    assert list(model.requests[0].tools[0].input_schema["properties"]) == ["where"]


async def test_a_thread_sees_the_callers_context_variables(place: Place) -> None:
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")

    def look() -> str:
        return who.get()

    who.set("somebody")
    assert await outcome_of(place, look) == Ok("somebody")


@pytest.mark.parametrize("kind", ["thread", "loop"])
async def test_progress_is_seen_while_the_tool_runs(place: Place, kind: str) -> None:
    def on_a_thread(ctx: ToolContext[None]) -> str:
        for n in range(3):
            ctx.progress({"n": n, "odd": float("nan")})
        return "done"

    async def on_the_loop(ctx: ToolContext[None]) -> str:
        return on_a_thread(ctx)

    made = tool(name="body")(on_a_thread if kind == "thread" else on_the_loop)
    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "body")], "ok"]), tools=[made])) as runtime:
        session = await runtime.session("chat")
        async with session.stream("go") as turn:
            seen = [e async for e in turn if isinstance(e, ToolProgress)]

    assert [e.value for e in seen] == [{"n": n, "odd": "NaN"} for n in range(3)]
    assert {(e.call_id, e.tool) for e in seen} == {("chat.1.1.0", "body")}


async def test_calls_run_at_once_and_results_come_in_emission_order(place: Place) -> None:
    order: list[int] = []
    met = asyncio.Barrier(3)

    @tool
    async def meet(n: int) -> int:
        await met.wait()  # none passes unless all three run
        for _ in range(3 - n):
            await asyncio.sleep(0)
        order.append(n)
        return n

    model = ScriptedModel([[ToolCall(f"p{n}", "meet", {"n": n}) for n in range(3)], "done"])
    async with place.runtime(Agent(model, tools=[meet])) as runtime:
        result = await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)

    assert sorted(order, reverse=True) == order
    assert [m.tool_results[0].content for m in model.requests[1].messages if m.role == "tool"] == [0, 1, 2]
    assert [c.outcome for c in result.tool_calls] == [Ok(0), Ok(1), Ok(2)]


async def test_forty_calls_of_one_reply(place: Place) -> None:
    @tool
    def double(n: int) -> int:
        return 2 * n

    model = ScriptedModel([[ToolCall(f"p{n}", "double", {"n": n}) for n in range(40)], "done"])
    async with place.runtime(Agent(model, tools=[double])) as runtime:
        result = await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)

    assert [c.outcome for c in result.tool_calls] == [Ok(2 * n) for n in range(40)]
    assert [c.call_id for c in result.tool_calls] == [f"chat.1.1.{n}" for n in range(40)]


# ---------------------------------------------------------------------- what a tool may raise


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def recurse() -> None:
    recurse()


@pytest.mark.parametrize("kind", ["thread", "loop"])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt("enough"), "KeyboardInterrupt: enough"),
        (asyncio.CancelledError(), "CancelledError: the tool cancelled itself"),
        (MemoryError(), "MemoryError: "),
        (Unspeakable(), "Unspeakable: (it cannot be shown)"),
        (OSError("lone \ud800"), "OSError: lone \ufffd"),
        (ExceptionGroup("both", [ValueError("a")]), "ExceptionGroup: both (1 sub-exception)"),
    ],
    ids=lambda p: type(p).__name__ if isinstance(p, BaseException) else "",
)
async def test_whatever_a_tool_raises_ends_its_call_only(
    place: Place, kind: str, error: BaseException, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    # The log shows the error as it is, and a test worker cannot report a lone surrogate to its master.
    caplog.set_level(logging.CRITICAL, logger="perdure.tools")

    def on_a_thread() -> None:
        raise error

    async def on_the_loop() -> None:
        raise error

    outcome = await outcome_of(place, on_a_thread if kind == "thread" else on_the_loop)

    assert outcome == Failed("tool_raised", message)


async def test_endless_recursion_ends_its_call_only(place: Place) -> None:
    outcome = await outcome_of(place, recurse)

    assert isinstance(outcome, Failed)
    assert outcome.message.startswith("RecursionError")


@pytest.mark.parametrize("kind", ["thread", "loop"])
@pytest.mark.parametrize("error", [StopIteration("x"), GeneratorExit("x")], ids=lambda e: type(e).__name__)
async def test_signals_of_the_interpreter_end_their_call_only(place: Place, kind: str, error: BaseException) -> None:
    def on_a_thread() -> None:
        raise error

    async def on_the_loop() -> None:
        raise error

    outcome = await outcome_of(place, on_a_thread if kind == "thread" else on_the_loop)

    assert isinstance(outcome, Failed)
    assert outcome.code == "tool_raised"
    assert type(error).__name__ in outcome.message


async def test_a_tool_error_tells_the_model(place: Place) -> None:
    def body() -> None:
        raise ToolError("no such file", code="missing", data={"path": "x"})

    assert await outcome_of(place, body) == Failed("missing", "no such file", {"path": "x"})


# Without their types: what a tool without a checker may write.
Error: Any = ToolError
Call: Any = ToolCall


@pytest.mark.parametrize(
    "error",
    [Error("x", data=object()), Error("x", code=5), Error(5)],
    ids=["data", "code", "message"],
)
async def test_a_tool_error_that_cannot_be_stored_still_tells_the_model(place: Place, error: ToolError) -> None:
    def body() -> None:
        raise error

    assert await outcome_of(place, body) == Failed("tool_error", str(error))


# ---------------------------------------------------------------------- what a tool may return


class Colour(Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    y: float


class Hostile:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def numbers() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (None, None),
        (float("nan"), "NaN"),
        ([float("inf"), float("-inf")], ["Infinity", "-Infinity"]),
        ("lone \ud800 and nul \0", "lone \ufffd and nul \ufffd"),
        ({"\ud800": 1}, {"\ufffd": 1}),
        (2**70, str(2**70)),
        (2**63 - 1, 2**63 - 1),
        (b"\x00\xff", "AP8="),
        ((1, (2, 3)), [1, [2, 3]]),
        ({1: "one", None: "none"}, {"1": "one", "null": "none"}),
        (Colour.RED, "red"),
        (Point(1, 0.5), {"x": 1, "y": 0.5}),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00Z"),
        ({1}, [1]),
    ],
    ids=str,
)
async def test_values_are_normalised_once_and_alike_for_every_store(place: Place, value: Any, stored: Any) -> None:
    assert await outcome_of(place, lambda: value) == Ok(stored)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def circular() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "make",
    [object, numbers, lambda: print, lambda: nested(100), circular, lambda: {(1, 2): 3}, lambda: 1j, Hostile],
    ids=["object", "generator", "function", "deep", "circular", "tuple key", "complex", "hostile"],
)
async def test_what_is_not_json_is_a_failed_call(place: Place, make: Callable[[], Any]) -> None:
    outcome = await outcome_of(place, lambda: make())

    assert isinstance(outcome, Failed)
    assert outcome.code == "invalid_output"


async def test_an_output_of_forty_megabytes_is_refused(place: Place) -> None:
    outcome = await outcome_of(place, lambda: "x" * 40_000_000)

    assert isinstance(outcome, Failed)
    assert outcome.code == "output_too_large"
    assert "40,000,002 bytes" in outcome.message


@pytest.mark.parametrize(
    "value",
    ["line\n" * 20_000, list(range(50_000)), {f"key {n}": "v" * 50 for n in range(2_000)}],
    ids=["text", "list", "dict"],
)
async def test_a_large_output_is_cut_for_the_model_and_kept_whole(place: Place, value: Any) -> None:
    outcome = await outcome_of(place, lambda: value)

    assert isinstance(outcome, Ok)
    assert type(outcome.value) is type(value)
    assert len(msgspec.json.encode(outcome.value)) <= 17 * 1024
    assert "dropped; the whole output is kept" in str(outcome.value)
    assert isinstance(outcome.whole, BlobRef)
    async with place.runtime() as runtime:
        whole = await runtime.store.blobs.get(outcome.whole.digest)
        assert msgspec.json.decode(whole) == value
        assert await runtime.store.sweep(grace=0) == 0


LINES = "\n".join(f"line {n}" for n in range(100))


def lines() -> str:
    return LINES


async def shown_lines(place: Place, tools: list[Any], budget: OutputBudget | None = None) -> tuple[int, bool]:
    """How many lines of a hundred the model was shown, and whether the whole is kept beside them."""
    model = ScriptedModel([[ToolCall("p", "lines")], "done"])
    async with place.runtime(Agent(model, tools=tools, output_budget=budget)) as runtime:
        (call,) = (await (await runtime.session("chat")).run("go")).tool_calls
    (result,) = model.requests[1].messages[-1].tool_results
    assert isinstance(call.outcome, Ok)
    return len(result.content.split("\n")), call.outcome.whole is not None


async def test_the_output_budget_of_the_agent_counts_for_its_tools(place: Place) -> None:
    assert await shown_lines(place, [tool(lines)], OutputBudget(lines=10)) == (10, True)


async def test_the_output_budget_of_a_tool_goes_before_that_of_its_agent(place: Place) -> None:
    generous = tool(output_budget=OutputBudget(lines=50))(lines)

    assert await shown_lines(place, [generous], OutputBudget(lines=10)) == (50, True)


async def test_without_an_output_budget_a_model_is_shown_everything(place: Place) -> None:
    unlimited = tool(output_budget=OutputBudget(bytes=None, lines=None))(lines)

    assert await shown_lines(place, [unlimited], OutputBudget(bytes=256, lines=8)) == (100, False)


async def test_a_member_of_a_set_may_have_an_output_budget(place: Place) -> None:
    class Set:
        def specs(self) -> list[ToolSpec]:
            return [ToolSpec("lines", output_budget=OutputBudget(lines=20))]

        async def prepare(self, call: PreparedCall, ctx: Any) -> PreparedCall:
            return call

        async def execute(self, call: PreparedCall, ctx: Any) -> str:
            return LINES

    assert await shown_lines(place, [Set()]) == (20, True)


async def test_an_unlimited_output_above_the_size_of_a_row_is_shown_and_stored(place: Place) -> None:
    outcome = await outcome_of(place, lambda: "x" * 200_000, output_budget=OutputBudget(None, None))

    assert outcome == Ok("x" * 200_000)


def test_an_output_budget_that_is_none_is_refused() -> None:
    budget: Any = 4096

    with pytest.raises(InvalidDefinition, match="output_budget=4096 is not usable"):
        Agent(output_budget=budget)


def test_the_output_budget_is_part_of_the_definition_that_is_shown() -> None:
    assert Agent(output_budget=OutputBudget(lines=9)).spec.output_budget == OutputBudget(lines=9)
    assert Agent().spec.output_budget == OutputBudget(16 * 1024, 400)


# ---------------------------------------------------------------------- what a model may ask for


async def test_an_unknown_tool_is_told_with_what_there_is(place: Place) -> None:
    record = await record_of(place, ToolCall("p", "bodies"), lambda: 1)

    assert record.outcome == Failed("tool_unavailable", "there is no tool 'bodies'; available: body")
    assert record.attempts == 0


@pytest.mark.parametrize("args", [{}, {"n": "many"}, {"n": 1, "m": 2}, {"n": None}, {"n": float("nan")}], ids=str)
async def test_arguments_that_do_not_fit_never_reach_the_tool(place: Place, args: dict[str, Any]) -> None:
    ran: list[int] = []

    def body(n: int) -> None:
        ran.append(n)

    outcome = await outcome_of(place, body, args)

    assert isinstance(outcome, Failed)
    assert outcome.code == "invalid_tool_args"
    assert ran == []


@pytest.mark.parametrize(
    "call",
    [
        ToolCall("p", "body", raw='{"n": 1'),
        Call("p", "body", args=[1, 2]),
        Call("p", "body", args="text"),
        ToolCall("p", "body", args={"n": nested(100)}),
        ToolCall("p", "body", args={"n": object()}),
    ],
    ids=["raw", "list", "text", "deep", "object"],
)
async def test_arguments_that_are_no_object_never_reach_the_tool(place: Place, call: ToolCall) -> None:
    ran: list[Any] = []

    def body(n: Any = None) -> None:
        ran.append(n)

    record = await record_of(place, call, body)

    assert isinstance(record.outcome, Failed)
    assert record.outcome.code == "invalid_tool_args"
    assert ran == []


async def test_ten_megabytes_of_arguments_are_refused_and_the_session_lives(place: Place) -> None:
    ran: list[str] = []

    def body(text: str) -> None:
        ran.append(text)

    outcome = await outcome_of(place, body, {"text": "x" * 10_000_000})

    assert outcome == Failed("invalid_tool_args", "the arguments have 10,000,011 bytes, the limit is 1,048,576")
    assert ran == []


async def test_arguments_above_the_size_of_a_row_are_fine(place: Place) -> None:
    assert await outcome_of(place, lambda text: len(text), {"text": "x" * 500_000}) == Ok(500_000)


async def test_duplicate_and_empty_call_ids_are_made_unique(place: Place) -> None:
    @tool
    def double(n: int) -> int:
        return 2 * n

    calls = [ToolCall(provider_id, "double", {"n": n}) for n, provider_id in enumerate(["a", "a", "", "", "b"])]
    model = ScriptedModel([calls, "done"])
    async with place.runtime(Agent(model, tools=[double])) as runtime:
        result = await (await runtime.session("chat")).run("go")

    asked = [c.id for c in model.requests[1].messages[1].tool_calls]
    told = [m.tool_results[0] for m in model.requests[1].messages if m.role == "tool"]
    assert len(set(asked)) == 5
    assert [r.call_id for r in told] == asked
    assert [r.content for r in told] == [0, 2, 4, 6, 8]
    assert [c.call_id for c in result.tool_calls] == [f"chat.1.1.{n}" for n in range(5)]


async def test_a_tool_that_changes_its_arguments_does_not_change_what_was_asked(place: Place) -> None:
    def body(d: dict[str, int]) -> int:
        d["evil"] = 1
        return len(d)

    record = await record_of(place, ToolCall("p", "body", {"d": {}}), body)

    assert record.args == {"d": {}}
    assert record.outcome == Ok(1)


async def test_calls_with_text_keep_both(place: Place) -> None:
    @tool
    def look() -> str:
        return "seen"

    reply = ModelResponse("Let me look.", [ToolCall("a", "look")], stop="tool_calls")
    async with place.runtime(Agent(ScriptedModel([reply, "done"]), tools=[look])) as runtime:
        session = await runtime.session("chat")
        await session.run("go")

        history = await session.history()
        assert (history[1].text, history[1].tool_calls[0].name) == ("Let me look.", "look")


async def test_a_fault_in_one_session_harms_no_other() -> None:
    @tool
    def explode() -> None:
        raise SystemExit

    def model(request: ModelRequest) -> Any:
        if request.messages[-1].role == "tool":
            return "survived"
        return [ToolCall("a", "explode")] if "bad" in request.session_id else "fine"

    async with Runtime("memory", agents=[Agent(FunctionModel(model), tools=[explode])]) as runtime:
        names = [f"bad {n}" for n in range(20)] + [f"good {n}" for n in range(20)]
        sessions = [await runtime.session(name) for name in names]
        results = await asyncio.wait_for(asyncio.gather(*(s.run("go") for s in sessions)), SOON)

        assert [r.text for r in results] == ["survived"] * 20 + ["fine"] * 20
