"""Calling operations: on which instance, what is refused, and what is durable before the caller has its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from perdure import Agent, Message, Runtime
from perdure.errors import (
    InvalidArguments,
    InvalidSessionId,
    MissingSession,
    NotFound,
    OperationFailed,
    PluginError,
    StoreUnavailable,
    Unavailable,
    UnexpectedSession,
    UnknownOperation,
    UnknownSession,
)
from perdure.model.message import Text
from perdure.model.session import SessionSnapshot
from perdure.plugins.hooks import Plugin, SessionContext, SnapshotWriter
from perdure.plugins.operations import (
    CommandContext,
    OperationDefinition,
    OperationOutcome,
    QueryContext,
    QueueTurn,
    Result,
    SessionParam,
    command,
    query,
    task,
)
from perdure.plugins.registry import PluginSession, PluginSet
from perdure.ports.services import ToolHost
from perdure.sessions.operation_table import Operations, OperationSeams, OperationTable, effective_session
from perdure.testing import FunctionModel


class Services:
    """The host services that operations here use, for one session or for none."""

    def __init__(self, session_id: str | None) -> None:
        self._session_id = session_id

    async def snapshot(self, session_id: str | None = None) -> SessionSnapshot:
        if (wanted := session_id or self._session_id) is None:
            raise Unavailable("there is no session here")
        return SessionSnapshot(wanted, "assistant", 0, ())

    async def tool_catalog(self, session_id: str | None = None) -> Sequence[Any]:
        return [{"name": "look"}]

    async def set_tools(self, names: Sequence[str], member: bool | None, session_id: str | None = None) -> int:
        return len(names)


class Desk:
    """Where operations are called here. `log` is what happened around them, in order."""

    def __init__(self, *plugins: Plugin) -> None:
        self.log: list[Any] = []
        self.absent: frozenset[str] = frozenset()
        self.broken: Exception | None = None
        self._set = PluginSet(plugins)
        self._sessions: dict[str, PluginSession] = {}
        seams = OperationSeams(
            "assistant", self.instances, self.host, self.persist, self.queue, self.emit, deps={"shop": "tea"}
        )
        self.operations = Operations(OperationTable(self._set.plugins), seams)

    async def instances(self, session_id: str) -> PluginSession:
        if session_id == "nowhere":
            raise UnknownSession(session_id)
        if session_id not in self._sessions:
            contexts = {id: SessionContext(session_id, "assistant") for id in self._set.ids}
            self._sessions[session_id] = self._set.open(contexts)
        return self._sessions[session_id].without(self.absent)

    def host(self, session_id: str | None) -> ToolHost:
        return cast("ToolHost", Services(session_id))

    async def persist(self, session_id: str, plugins: PluginSession) -> None:
        await asyncio.sleep(0)
        if self.broken is not None:
            raise self.broken
        self.log.append(("saved", session_id, [plugin.revision for plugin in plugins.plugins]))

    async def queue(self, session_id: str, said: Message, key: str | None) -> str:
        self.log.append(("queued", session_id, said.text, key))
        return f"{session_id}.{len(self.log)}"

    def emit(self, session_id: str, plugin: str, events: tuple[Any, ...]) -> None:
        self.log.append(("told", session_id, plugin, events))


class Counter(Plugin):
    """Counts for each session, and for none."""

    id = "counter"

    def __init__(self, session_id: str | None = None) -> None:
        self.session_id, self.count, self.changes = session_id, 0, 0

    def for_session(self, ctx: SessionContext) -> Counter:
        return Counter(ctx.session_id)

    @property
    def revision(self) -> int:
        return self.changes

    def snapshot(self, writer: SnapshotWriter) -> int:
        return self.count

    @query(session="optional")
    def where(self, ctx: QueryContext) -> list[str | None]:
        return [self.session_id, ctx.session_id]

    @query
    async def shown(self, ctx: QueryContext) -> Any:
        catalog = await ctx.host.tool_catalog()
        return [(await ctx.host.snapshot()).session_id, catalog, ctx.agent, ctx.deps]

    @query(session="forbidden")
    def limit(self, ctx: QueryContext) -> list[str | None]:
        return ["100", self.session_id, ctx.session_id]

    @query(session="optional")
    async def meddle(self, ctx: QueryContext) -> None:
        await cast("ToolHost", ctx.host).set_tools(["look"], False)

    @command
    def add(self, by: int = 1) -> int:
        self.count += by
        self.changes += 1
        return self.count

    @command
    async def touch(self, ctx: CommandContext) -> int:
        return await ctx.host.set_tools(["look", "go"], None)

    @command
    def add_and_tell(self, words: str) -> Result[int]:
        self.add()
        return Result(
            self.count, ({"added": words},), (QueueTurn(words, "k"), QueueTurn(Message("user", (Text("and"),))))
        )

    @command
    def add_and_break(self) -> None:
        self.add()
        raise RuntimeError("no more")

    @task
    async def count_all(self) -> int:
        return 0


# ---------------------------------------------------------------------- which session, which instance


def definition(session: SessionParam) -> OperationDefinition:
    return OperationDefinition("shop.list", "query", "shop", "", session, {}, {})


@pytest.mark.parametrize(
    ("session", "explicit", "default", "effective"),
    [
        ("required", "a", None, "a"),
        ("required", "a", "b", "a"),
        ("required", None, "b", "b"),
        ("optional", "a", "b", "a"),
        ("optional", None, "b", "b"),
        ("optional", None, None, None),
        ("optional", None, "", None),
        ("forbidden", None, "b", None),
        ("forbidden", None, None, None),
    ],
)
def test_explicit_session_goes_before_the_default_and_a_forbidden_one_takes_neither(
    session: SessionParam, explicit: str | None, default: str | None, effective: str | None
) -> None:
    assert effective_session(definition(session), explicit, default) == effective


@pytest.mark.parametrize("default", [None, ""])
def test_operation_that_needs_a_session_is_refused_without_one(default: str | None) -> None:
    with pytest.raises(MissingSession, match=r"operation 'shop\.list': it works on a session: name one") as caught:
        effective_session(definition("required"), None, default)

    assert (caught.value.operation, caught.value.plugin) == ("shop.list", "shop")


@pytest.mark.parametrize("default", [None, "a", "b"])
def test_operation_that_takes_no_session_is_refused_with_one(default: str | None) -> None:
    with pytest.raises(UnexpectedSession, match=r"operation 'shop\.list': it works on no session: call it without 'a'"):
        effective_session(definition("forbidden"), "a", default)


def test_session_must_have_a_usable_id() -> None:
    with pytest.raises(InvalidSessionId):
        effective_session(definition("optional"), "", "b")


async def test_each_session_answers_with_its_own_instance() -> None:
    operations = Desk(Counter()).operations

    await operations.command("counter.add", {"by": 5}, "a")
    first = await operations.command("counter.add", {"by": 1}, "a")
    other = await operations.command("counter.add", {"by": 1}, "b")

    assert (first.output, other.output) == (6, 1)
    assert (await operations.query("counter.where", {}, "a")).output == ["a", "a"]


async def test_default_session_is_the_one_the_caller_is_in() -> None:
    operations = Desk(Counter()).operations

    assert (await operations.query("counter.where", default="b")).output == ["b", "b"]


async def test_shared_object_answers_without_a_session() -> None:
    operations = Desk(Counter()).operations

    assert (await operations.query("counter.where")).output == [None, None]


async def test_operation_that_takes_no_session_works_from_inside_one() -> None:
    operations = Desk(Counter()).operations

    assert (await operations.query("counter.limit", default="a")).output == ["100", None, None]


async def test_session_that_is_not_there_is_refused() -> None:
    with pytest.raises(UnknownSession):
        await Desk(Counter()).operations.query("counter.where", {}, "nowhere")


async def test_plugin_that_is_left_out_of_a_session_is_not_called() -> None:
    desk = Desk(Counter())
    desk.absent = frozenset({"counter"})

    with pytest.raises(Unavailable, match=r"'counter\.add': plugin 'counter' is left out of this session"):
        await desk.operations.command("counter.add", {}, "a")

    assert desk.log == []


# ---------------------------------------------------------------------- finding


async def test_unknown_operation_is_refused_with_names_that_are_near() -> None:
    with pytest.raises(UnknownOperation, match=r"operation 'counter\.ad': .*counter\.add") as caught:
        await Desk(Counter()).operations.call("counter.ad")

    assert isinstance(caught.value, NotFound)
    assert isinstance(caught.value, PluginError)


async def test_unknown_operation_far_from_everything_is_refused() -> None:
    with pytest.raises(UnknownOperation, match="operation 'weather': no such name"):
        await Desk(Counter()).operations.query("weather")


async def test_operation_of_another_kind_is_refused() -> None:
    desk = Desk(Counter())

    with pytest.raises(UnknownOperation, match=r"operation 'counter\.add': it is a command, not a query"):
        await desk.operations.query("counter.add", {}, "a")

    assert desk.log == []


async def test_call_finds_the_kind() -> None:
    operations = Desk(Counter()).operations

    added = await operations.call("counter.add", {"by": 2}, "a")
    asked = await operations.call("counter.where", default="a")

    assert (added.output, asked.output) == (2, ["a", "a"])


async def test_operations_are_listed() -> None:
    assert [each.name for each in Desk(Counter()).operations.list()] == [
        "counter.limit",
        "counter.meddle",
        "counter.shown",
        "counter.where",
        "counter.add",
        "counter.add_and_break",
        "counter.add_and_tell",
        "counter.touch",
        "counter.count_all",
    ]


async def test_tasks_need_somebody_who_works_on_them() -> None:
    operations = Desk(Counter()).operations

    with pytest.raises(Unavailable, match=r"'counter\.count_all': nobody here works on tasks"):
        await operations.task("counter.count_all", {}, "a")
    with pytest.raises(MissingSession):
        await operations.call("counter.count_all", {})


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"by": "many"}, r"\$\.by: expected int, got str"),
        ({"of": 1}, r"\$: object contains unknown field of; known: by"),
        ([1], r"\$: expected object, got array"),
        ({"by": object()}, "is not JSON"),
    ],
)
async def test_bad_arguments_are_refused_and_nothing_is_called(args: Any, why: str) -> None:
    desk = Desk(Counter())

    with pytest.raises(InvalidArguments, match=rf"operation 'counter\.add': .*{why}") as caught:
        await desk.operations.command("counter.add", args, "a")

    assert caught.value.plugin == "counter"
    assert (await desk.operations.command("counter.add", {"by": 0}, "a")).output == 0


async def test_missing_argument_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidArguments, match="missing required field words"):
        await Desk(Counter()).operations.command("counter.add_and_tell", None, "a")


# ---------------------------------------------------------------------- contexts


async def test_operation_is_told_its_agent_its_objects_and_its_services() -> None:
    outcome = await Desk(Counter()).operations.query("counter.shown", {}, "a")

    assert outcome.output == ["a", [{"name": "look"}], "assistant", {"shop": "tea"}]


async def test_query_cannot_change_anything_through_its_host() -> None:
    with pytest.raises(OperationFailed, match=r"Unavailable: a query only reads and has no 'set_tools'"):
        await Desk(Counter()).operations.query("counter.meddle")


async def test_command_may() -> None:
    assert (await Desk(Counter()).operations.command("counter.touch", {}, "a")).output == 2


# ---------------------------------------------------------------------- answers


class Odd(Plugin):
    """Answers nonsense."""

    id = "odd"
    entered: asyncio.Event

    @command(session="optional")
    def answer(self, ctx: CommandContext) -> Any:
        return ctx.deps

    @query(session="optional")
    def ask(self, ctx: QueryContext) -> Any:
        return ctx.deps

    @query(session="optional")
    async def raise_it(self, ctx: QueryContext) -> None:
        raise ctx.deps

    @query(session="optional")
    def raise_at_once(self, ctx: QueryContext) -> None:
        raise ctx.deps

    @command(session="optional")
    async def hang(self) -> None:
        self.entered.set()
        await asyncio.Event().wait()


def odd(deps: Any) -> tuple[Operations, list[Any]]:
    desk = Desk(Odd())
    seams = OperationSeams("assistant", desk.instances, desk.host, desk.persist, desk.queue, desk.emit, deps)
    return Operations(OperationTable([Odd()]), seams), desk.log


@pytest.mark.parametrize("name", ["odd.raise_it", "odd.raise_at_once"])
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ValueError("too odd"), "ValueError: too odd"),
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "it cancelled itself"),
        (StopIteration("done"), "(RuntimeError: coroutine raised )?StopIteration"),
        (UnknownSession("x"), "UnknownSession: there is no session 'x'"),
    ],
)
async def test_whatever_an_operation_raises_is_its_failure(name: str, error: BaseException, why: str) -> None:
    operations, _ = odd(error)

    with pytest.raises(OperationFailed, match=f"operation '{name}': {why}") as caught:
        await operations.query(name)

    assert caught.value.plugin == "odd"


async def test_cancelling_the_caller_is_not_a_failure_of_the_operation() -> None:
    plugin = Odd()
    plugin.entered = asyncio.Event()
    caller = asyncio.create_task(Desk(plugin).operations.command("odd.hang"))
    await plugin.entered.wait()

    caller.cancel()

    with pytest.raises(asyncio.CancelledError):
        await caller


@pytest.mark.parametrize("name", ["odd.answer", "odd.ask"])
@pytest.mark.parametrize("value", [object(), {"deep": [object()]}, {object(): 1}])
async def test_output_that_is_not_json_is_a_failure(name: str, value: Any) -> None:
    operations, _ = odd(value)

    with pytest.raises(OperationFailed, match=f"operation '{name}': its output is not JSON"):
        await operations.call(name)


async def test_output_is_normalised_like_everything_that_is_stored() -> None:
    operations, _ = odd({1: (float("nan"), 2**70, "a\0b")})

    outcome = await operations.query("odd.ask")

    assert outcome.output == {"1": ["NaN", "1180591620717411303424", "a\ufffdb"]}


async def test_query_cannot_lead_to_anything() -> None:
    operations, log = odd(Result(1, ({"x": 1},)))

    with pytest.raises(OperationFailed, match="a query returns a value"):
        await operations.query("odd.ask", {}, "a")

    assert log == []


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Result(1, cast("Any", "event")), "its events are a str: give a tuple"),
        (Result(1, (), cast("Any", QueueTurn("hi"))), "its directives are a QueueTurn: give a tuple"),
        (Result(1, (object(),)), "what it returned cannot be used: a object is not JSON"),
        (Result(1, ({},), cast("Any", ("hi",))), "a str is no directive of an operation: use QueueTurn"),
        (Result(1, (), (QueueTurn("fine"), QueueTurn(""))), "the input is empty"),
        (Result(1, (), (QueueTurn("fine"), QueueTurn("no", ""))), "a key is a string, not ''"),
        (Result(1, (), (QueueTurn("fine"), QueueTurn("no", cast("Any", 5)))), "a key is a string, not 5"),
        (Result(object(), (), (QueueTurn("fine"),)), "its output is not JSON"),
    ],
)
async def test_nothing_is_queued_or_told_of_an_answer_that_makes_no_sense(answer: Result[Any], why: str) -> None:
    operations, log = odd(answer)

    with pytest.raises(OperationFailed, match=why):
        await operations.command("odd.answer", {}, "a")

    assert log == []


async def test_command_without_a_session_cannot_queue_turns() -> None:
    operations, log = odd(Result(1, (), (QueueTurn("hi"),)))

    with pytest.raises(OperationFailed, match="it was called without a session"):
        await operations.command("odd.answer")

    assert log == []


async def test_events_without_a_session_go_to_the_caller_alone() -> None:
    operations, log = odd(Result(1, ({"x": (1, 2)},)))

    outcome = await operations.command("odd.answer")

    assert outcome == OperationOutcome("odd", 1, ({"x": [1, 2]},))
    assert log == []


# ---------------------------------------------------------------------- what a command leads to


async def test_state_is_saved_before_turns_are_queued_before_observers_and_caller_are_told() -> None:
    desk = Desk(Counter())

    outcome = await desk.operations.command("counter.add_and_tell", {"words": "hello"}, "a")

    assert desk.log == [
        ("saved", "a", [1]),
        ("queued", "a", "hello", "k"),
        ("queued", "a", "and", None),
        ("told", "a", "counter", ({"added": "hello"},)),
    ]
    assert outcome.to_json() == {
        "plugin": "counter",
        "output": 1,
        "events": [{"added": "hello"}],
        "directives": [
            {"kind": "queue_turn", "input": {"role": "user", "parts": [{"type": "text", "text": "hello"}]}, "key": "k"},
            {"kind": "queue_turn", "input": {"role": "user", "parts": [{"type": "text", "text": "and"}]}},
        ],
        "accepted": ["a.2", "a.3"],
    }


async def test_state_that_did_not_change_is_not_saved() -> None:
    desk = Desk(Counter())

    await desk.operations.command("counter.touch", {}, "a")
    await desk.operations.query("counter.where", {}, "a")

    assert desk.log == []


async def test_state_of_another_plugin_that_a_command_changed_is_saved() -> None:
    class Caller(Plugin):
        id = "caller"

        @command
        async def forward(self, ctx: CommandContext) -> int:
            assert ctx.session_id is not None
            counter, _ = (await desk.instances(ctx.session_id)).plugins
            assert isinstance(counter, Counter)
            return counter.add()

    desk = Desk(Counter(), Caller())

    await desk.operations.command("caller.forward", {}, "a")

    assert desk.log == [("saved", "a", [1, 0])]


async def test_state_that_a_failed_command_changed_is_saved_too() -> None:
    desk = Desk(Counter())

    with pytest.raises(OperationFailed, match="RuntimeError: no more"):
        await desk.operations.command("counter.add_and_break", {}, "a")

    assert desk.log == [("saved", "a", [1])]


async def test_nothing_is_queued_when_state_cannot_be_saved() -> None:
    desk = Desk(Counter())
    desk.broken = StoreUnavailable("the disk is full")

    with pytest.raises(StoreUnavailable, match="the disk is full"):
        await desk.operations.command("counter.add_and_tell", {"words": "hello"}, "a")

    assert desk.log == []


# ---------------------------------------------------------------------- real turns


class Reminder(Plugin):
    id = "reminder"

    @command
    def remind(self, words: list[str], key: str | None = None) -> Result[int]:
        turns = tuple([QueueTurn(word, None if key is None else f"{key}-{n}") for n, word in enumerate(words)])
        return Result(len(words), (), turns)


def reminding(runtime: Runtime) -> Operations:
    async def queue(session_id: str, said: Message, key: str | None) -> str:
        return (await (await runtime.session(session_id)).send(said, key=key)).turn_id

    desk = Desk(Reminder())
    seams = OperationSeams("assistant", desk.instances, desk.host, desk.persist, queue, desk.emit)
    return Operations(OperationTable([Reminder()]), seams)


def echoing() -> Agent[str]:
    return Agent(FunctionModel(lambda request: f"you said {request.messages[-1].text}"))


async def test_queued_turns_run_in_order_and_the_receipt_names_them() -> None:
    async with Runtime("memory", agents=[echoing()]) as runtime:
        outcome = await reminding(runtime).command("reminder.remind", {"words": ["milk", "tea"]}, "chat")
        session = await runtime.session("chat")
        last = await session.result("chat.2")

        assert outcome.accepted == ("chat.1", "chat.2")
        assert last.text == "you said tea"
        assert [message.text for message in await session.history()] == ["milk", "you said milk", "tea", "you said tea"]


async def test_command_called_again_under_the_same_key_queues_the_same_turn() -> None:
    async with Runtime("memory", agents=[echoing()]) as runtime:
        operations = reminding(runtime)
        args = {"words": ["milk"], "key": "monday"}

        first = await operations.command("reminder.remind", args, "chat")
        again = await operations.command("reminder.remind", args, "chat")
        session = await runtime.session("chat")
        await session.result("chat.1")

        assert first.accepted == again.accepted == ("chat.1",)
        assert len(await session.history()) == 2


async def test_turn_that_is_refused_is_a_failure_that_names_those_before_it() -> None:
    async with Runtime("memory", agents=[echoing()]) as runtime:
        session = await runtime.session("chat")
        await session.run("something else", key="monday-1")

        with pytest.raises(
            OperationFailed, match=r"a turn was not queued: key 'monday-1'.*queued before: chat\.2"
        ) as e:
            await reminding(runtime).command("reminder.remind", {"words": ["milk", "tea"], "key": "monday"}, "chat")

        assert e.value.accepted == ("chat.2",)
