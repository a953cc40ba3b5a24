"""Sets of tools: what a ToolProvider may do in preparation and execution, and what becomes of its mistakes."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Agent, ModelRequest, Retry, ToolCall, ToolError, TurnResult
from perdure.errors import InvalidDefinition
from perdure.model.tool import Cancelled, Denied, Failed, Ok, OutcomeUnknown, PreparedCall, ToolSpec
from perdure.ports.tool import CallContext
from perdure.testing import FunctionModel, ScriptedModel, VirtualClock
from tests.kit import SOON, Place, crash

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}


class Files:
    """A set with one tool. What it is asked to do is noted."""

    def __init__(self, **spec: Any) -> None:
        self.spec = ToolSpec("read", "Read a file.", SCHEMA, id="files/read", **spec)
        self.prepared: list[dict[str, Any]] = []
        self.executed: list[PreparedCall] = []

    def specs(self) -> Sequence[ToolSpec]:
        return [self.spec]

    async def prepare(self, call: PreparedCall, ctx: CallContext) -> Any:
        self.prepared.append(call.args)
        return call

    async def execute(self, call: PreparedCall, ctx: CallContext) -> Any:
        self.executed.append(call)
        return f"content of {call.args['path']}"


def script(*answers: Any) -> ScriptedModel:
    return ScriptedModel(answers or [[ToolCall("a", "read", {"path": "x"})], "done"])


def reader(files: Any, *answers: Any) -> Agent[str]:
    return Agent(script(*answers), tools=[files])


async def read(place: Place, files: Any, *answers: Any, **options: Any) -> TurnResult[Any]:
    """One turn, read back from the store as well."""
    async with place.runtime(reader(files, *answers), **options) as runtime:
        live = await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)
    async with place.runtime(Agent()) as runtime:
        stored = await (await runtime.session("chat")).result("chat.1")
    assert live.tool_calls == stored.tool_calls
    return live


def codes(result: TurnResult[Any]) -> list[str]:
    return [c.outcome.code for c in result.tool_calls if isinstance(c.outcome, Failed)]


async def test_a_set_offers_its_tools_and_runs_them(place: Place) -> None:
    files, model = Files(), script()
    async with place.runtime(Agent(model, tools=[files])) as runtime:
        result = await (await runtime.session("chat")).run("go")

        assert result.tool_calls[0].outcome == Ok("content of x")
        assert [t.name for t in model.requests[0].tools] == ["read"]
        assert files.executed == [PreparedCall("chat.1.1.0", "files/read", "read", {"path": "x"})]


async def test_preparation_may_rewrite_arguments_and_attach_a_payload(place: Place) -> None:
    class Rooted(Files):
        async def prepare(self, call: PreparedCall, ctx: CallContext) -> PreparedCall:
            return replace(call, args={"path": f"/srv/{call.args['path']}", "more": 1}, payload={"token": ctx.call_id})

        async def execute(self, call: PreparedCall, ctx: Any) -> str:
            seen.append(ctx.payload)
            return str(await super().execute(call, ctx))

    seen: list[Any] = []
    files = Rooted()
    result = await read(place, files)

    assert result.tool_calls[0].outcome == Ok("content of /srv/x")
    assert result.tool_calls[0].args == {"path": "/srv/x", "more": 1}
    assert files.executed[0].payload == {"token": "chat.1.1.0"}
    assert seen == [{"token": "chat.1.1.0"}]


async def test_what_preparation_keeps_belongs_to_the_session_once_the_call_has_started(place: Place) -> None:
    class Keeping(Files):
        async def prepare(self, call: PreparedCall, ctx: Any) -> PreparedCall:
            kept = await ctx.artifacts.put(b"as it was", name="earlier")
            return replace(call, payload=kept.digest)

        async def execute(self, call: PreparedCall, ctx: CallContext) -> int:
            return await store.sweep(grace=0)

    async with place.runtime(reader(Keeping())) as runtime:
        store = runtime.store
        [call] = (await (await runtime.session("chat")).run("go")).tool_calls

        assert call.value == 0, "the record of its start refers to it"
        assert call.artifacts == (), "and no name does"


@pytest.mark.parametrize(
    "outcome", [Ok({"cached": True}), Failed("gone", "no such file"), Denied("secret"), Cancelled(), OutcomeUnknown()]
)
async def test_preparation_may_end_the_call(place: Place, outcome: Any) -> None:
    class Deciding(Files):
        async def prepare(self, call: PreparedCall, ctx: CallContext) -> Any:
            return outcome

    files = Deciding()
    result = await read(place, files)

    assert result.tool_calls[0].outcome == outcome
    assert files.executed == []


async def test_a_call_prepared_for_another_tool_is_refused(place: Place) -> None:
    class Confused(Files):
        async def prepare(self, call: PreparedCall, ctx: CallContext) -> PreparedCall:
            return replace(call, tool_id="files/delete")

    files = Confused()
    result = await read(place, files)

    expected = Failed("prepared_tool_id_mismatch", "preparation answered for files/delete, not files/read")
    assert result.tool_calls[0].outcome == expected
    assert files.executed == []


async def test_arguments_are_checked_against_the_schema_before_preparation(place: Place) -> None:
    files = Files()
    result = await read(place, files, [ToolCall("a", "read", {"path": 5}), ToolCall("b", "read")], "done")

    assert codes(result) == ["invalid_tool_args"] * 2
    assert files.prepared == []


class Broken(Files):
    """A set whose second tool has a schema that nothing can be held to."""

    def __init__(self, schema: Any) -> None:
        super().__init__()
        self.broken = ToolSpec("write", "Write a file.", schema)

    def specs(self) -> Sequence[ToolSpec]:
        return [self.spec, self.broken]


async def test_a_tool_without_a_contract_is_not_offered_and_not_run(place: Place) -> None:
    model = script([ToolCall("a", "write", {"path": "x"}), ToolCall("b", "read", {"path": "x"})], "done")
    files = Broken({"$ref": "#/$defs/gone"})
    async with place.runtime(Agent(model, tools=[files])) as runtime:
        result = await (await runtime.session("chat")).run("go")

    told = "tool write cannot be called: its input schema refers to '#/$defs/gone', which is not there"
    assert [spec.name for spec in model.requests[0].tools] == ["read"]
    assert [c.outcome for c in result.tool_calls] == [
        Failed("tool_contract_unavailable", told),
        Ok("content of x"),
    ]
    assert [call.name for call in files.executed] == ["read"]


async def test_a_contract_that_breaks_between_turns_fails_its_calls_only(place: Place) -> None:
    files = Files()
    model = script([ToolCall("a", "read", {"path": "x"})], "one", [ToolCall("b", "read", {"path": "x"})], "two")
    async with place.runtime(Agent(model, tools=[files])) as runtime:
        session = await runtime.session("chat")
        first = await session.run("go")
        files.spec = replace(files.spec, input_schema={"type": "string"})
        second = await session.run("go")

    assert first.tool_calls[0].outcome == Ok("content of x")
    assert codes(second) == ["tool_contract_unavailable"]
    assert second.text == "two"


async def test_a_schema_changed_behind_our_back_fails_the_call_only(place: Place) -> None:
    files = Files()
    path: dict[str, Any] = {"type": "string"}
    files.spec = replace(files.spec, input_schema={"type": "object", "properties": {"path": path}})
    agent = reader(files)
    path["enum"] = [object()]
    async with place.runtime(agent) as runtime:
        result = await (await runtime.session("chat")).run("go")

    assert codes(result) == ["tool_contract_unavailable"]
    assert result.text == "done"


def test_a_set_that_offers_nonsense_is_refused_where_it_is_defined() -> None:
    class Nonsense(Files):
        def specs(self) -> Any:
            return ["read"]

    with pytest.raises(InvalidDefinition, match="offers a str"):
        Agent(tools=[Nonsense()])


async def test_preparation_goes_through_its_steps_in_order(place: Place) -> None:
    """Each call has every fault that comes after its first one: the first one is told."""

    class Faulty(Broken):
        async def prepare(self, call: PreparedCall, ctx: CallContext) -> PreparedCall:
            self.prepared.append(call.args)
            return replace(call, tool_id="files/delete")

    files = Faulty({"type": "string"})
    calls = [
        ToolCall("a", "gone", {"path": 5}),
        ToolCall("b", "write", {"path": 5}),
        ToolCall("c", "read", {"path": 5}),
        ToolCall("d", "read", {"path": "x"}),
    ]
    result = await read(place, files, calls, "done")

    assert codes(result) == [
        "tool_unavailable",
        "tool_contract_unavailable",
        "invalid_tool_args",
        "prepared_tool_id_mismatch",
    ]
    assert files.prepared == [{"path": "x"}]
    assert files.executed == []


def odd(make: Any) -> Any:
    class Odd(Files):
        async def prepare(self, call: PreparedCall, ctx: CallContext) -> Any:
            return make(call)

    return Odd()


def raising(error: BaseException) -> Any:
    def make(call: PreparedCall) -> None:
        raise error

    return make


def deep(call: PreparedCall) -> PreparedCall:
    value: Any = 1
    for _ in range(100):
        value = [value]
    return replace(call, args={"path": value})


@pytest.mark.parametrize(
    "make",
    [
        lambda call: None,
        lambda call: {"args": {}},
        lambda call: replace(call, args=[1]),
        lambda call: replace(call, payload=object()),
        lambda call: replace(call, ask=None),
        lambda call: Ok(object()),
        lambda call: replace(Failed("code", "x"), code=5),
        deep,
        raising(ValueError("bad")),
        raising(asyncio.CancelledError()),
    ],
    ids=["none", "dict", "list", "payload", "ask", "value", "code", "deep", "raises", "cancels"],
)
async def test_nonsense_in_preparation_is_a_failed_call(place: Place, make: Any) -> None:
    files = odd(make)
    result = await read(place, files)

    assert isinstance(result.tool_calls[0].outcome, Failed)
    assert result.tool_calls[0].outcome.code == "tool_prepare_failed"
    assert result.text == "done"
    assert files.executed == []


async def test_a_tool_error_in_preparation_tells_the_model(place: Place) -> None:
    result = await read(place, odd(raising(ToolError("no", code="nope", data={"a": 1}))))

    assert result.tool_calls[0].outcome == Failed("nope", "no", {"a": 1})


async def test_a_retry_of_execution_runs_as_it_was_prepared(place: Place) -> None:
    """Preparing what preparation made would rewrite it twice."""

    class Flaky(Files):
        async def prepare(self, call: PreparedCall, ctx: CallContext) -> PreparedCall:
            self.prepared.append(call.args)
            return replace(call, args={"path": f"/srv/{call.args['path']}"}, payload=1)

        async def execute(self, call: PreparedCall, ctx: CallContext) -> Any:
            self.executed.append(call)
            if ctx.attempt == 1:
                raise Retry("busy")
            return "ok"

    files = Flaky(retries=1)
    result = await read(place, files, clock=VirtualClock(auto=True))

    assert result.tool_calls[0].outcome == Ok("ok")
    assert files.prepared == [{"path": "x"}]
    assert [(c.args, c.payload) for c in files.executed] == [({"path": "/srv/x"}, 1)] * 2


async def test_a_rerun_after_a_crash_runs_as_it_was_prepared(place: Place) -> None:
    running = asyncio.Event()

    class Rooted(Files):
        async def prepare(self, call: PreparedCall, ctx: CallContext) -> PreparedCall:
            return replace(call, args={"path": f"/srv/{call.args['path']}", "outside": "the schema"}, payload=1)

        async def execute(self, call: PreparedCall, ctx: CallContext) -> Any:
            self.executed.append(call)
            if ctx.attempt == 1:
                running.set()
                await asyncio.Event().wait()
            return "ok"

    files = Rooted(recovery="rerun")
    runtime = await place.runtime(reader(files)).__aenter__()
    await (await runtime.session("chat")).send("go")
    await running.wait()
    await crash(runtime)
    async with place.runtime(reader(files, "done")) as runtime:
        result = await asyncio.wait_for((await runtime.session("chat")).result("chat.1"), SOON)

    assert result.tool_calls[0].outcome == Ok("ok")
    assert files.executed[0] == files.executed[1]


async def test_whatever_execution_raises_or_returns_is_an_outcome(place: Place) -> None:
    class Broken(Files):
        async def execute(self, call: PreparedCall, ctx: CallContext) -> Any:
            if call.args["path"] == "raise":
                raise SystemExit(1)
            return object()

    calls = [ToolCall("a", "read", {"path": "raise"}), ToolCall("b", "read", {"path": "return"})]
    result = await read(place, Broken(), calls, "done")

    assert codes(result) == ["tool_raised", "invalid_output"]


async def test_a_set_may_change_between_turns(place: Place) -> None:
    class Growing(Files):
        names: tuple[str, ...] = ("read",)

        def specs(self) -> Sequence[ToolSpec]:
            return [ToolSpec(name) for name in self.names]

    files = Growing()
    model = FunctionModel(lambda request: ", ".join(t.name for t in request.tools))
    async with place.runtime(Agent(model, tools=[files])) as runtime:
        session = await runtime.session("chat")
        before = (await session.run("what have you got?")).text
        files.names = ("read", "write")

        assert (before, (await session.run("and now?")).text) == ("read", "read, write")


async def test_a_set_that_cannot_say_what_it_offers_keeps_what_it_offered(place: Place) -> None:
    class Moody(Files):
        ill = False

        def specs(self) -> Sequence[ToolSpec]:
            if self.ill:
                raise ConnectionError("no server")
            return super().specs()

    files = Moody()
    async with place.runtime(reader(files)) as runtime:
        files.ill = True
        result = await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)

        assert result.tool_calls[0].outcome == Ok("content of x")


def test_a_set_that_cannot_say_what_it_offers_is_refused_where_it_is_defined() -> None:
    class Broken(Files):
        def specs(self) -> Sequence[ToolSpec]:
            raise ConnectionError("no server")

    with pytest.raises(InvalidDefinition, match="the tools of a Broken cannot be listed"):
        Agent(ScriptedModel([]), tools=[Broken()])
    with pytest.raises(InvalidDefinition, match="two tools are named 'read'"):
        Agent(ScriptedModel([]), tools=[Files(), Files()])


async def test_a_set_may_ask_for_approval_and_be_limited(place: Place) -> None:
    files = Files(approval="ask", limit=1, resource="disk")

    def model(request: ModelRequest) -> Any:
        return "done" if request.messages[-1].role == "tool" else [ToolCall("a", "read", {"path": "x"})]

    async with place.runtime(Agent(FunctionModel(model), tools=[files])) as runtime:
        session = await runtime.session("chat")
        assert (await session.run("go")).waiting
        await session.approve("chat.1.1.0")
        result = await asyncio.wait_for(session.result("chat.1"), SOON)

        assert result.tool_calls[0].outcome == Ok("content of x")


class Asking(Files):
    """A set that wants to be asked about some paths, and rewrites them."""

    async def prepare(self, call: PreparedCall, ctx: CallContext) -> PreparedCall:
        self.prepared.append(call.args)
        secret = call.args["path"] == "x"
        return replace(call, args={"path": f"/srv/{call.args['path']}"}, ask="x is secret" if secret else "")


async def test_preparation_may_ask_for_approval_of_this_call_alone(place: Place) -> None:
    files = Asking()
    calls = [ToolCall("a", "read", {"path": "x"}), ToolCall("b", "read", {"path": "y"})]
    async with place.runtime(reader(files, calls, "done")) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        [asked] = await session.pending()
        before = [each.args for each in files.executed]
        await session.approve(asked.call_id)
        result = await session.result("chat.1")

    assert (asked.kind, asked.args, asked.reason) == ("approval", {"path": "x"}, "x is secret")
    assert before == [{"path": "/srv/y"}]
    assert [each.outcome for each in result.tool_calls] == [Ok("content of /srv/x"), Ok("content of /srv/y")]
    assert [each.args for each in files.executed] == [{"path": "/srv/y"}, {"path": "/srv/x"}]


async def test_a_call_that_preparation_asked_about_is_not_run_when_it_is_rejected(place: Place) -> None:
    files = Asking()
    async with place.runtime(reader(files)) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        [asked] = await session.pending()
        await session.reject(asked.call_id, "leave it")
        result = await session.result("chat.1")

    assert isinstance(result.tool_calls[0].outcome, Denied)
    assert files.executed == []


async def test_the_question_of_a_preparation_outlives_a_crash(place: Place) -> None:
    runtime = await place.runtime(reader(Asking(), [ToolCall("a", "read", {"path": "x"})])).__aenter__()
    await (await runtime.session("chat")).run("go")
    await crash(runtime)
    files = Asking()
    async with place.runtime(reader(files, "done")) as again:
        session = await again.session("chat")
        [asked] = await session.pending()
        await session.approve(asked.call_id)
        result = await session.result("chat.1")

    assert result.tool_calls[0].outcome == Ok("content of /srv/x")
    assert len(files.executed) == 1
