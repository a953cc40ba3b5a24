"""Filters of what comes in: `transform_input` of plugins, and what a store has of an input that passed them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Document, Message, ModelRequest, Plugin, Runtime, Session, ToolCall, tool
from perdure.errors import (
    InputFilterMissing,
    InvalidDefinition,
    InvalidInput,
    KeyConflict,
    PluginFault,
    ProcessConflict,
)
from perdure.model.codec import encode
from perdure.model.event import AnyEvent, TurnCommitted
from perdure.model.message import InputContent, Text
from perdure.model.outcome import Queued
from perdure.model.plugin import CreateSession
from perdure.model.session import load_settings
from perdure.plugins import InputContext, SessionContext, TurnContext
from perdure.testing import FunctionModel
from perdure.tools.context import ToolContext
from perdure.tracing.jsonl import JsonlSink
from tests.kit import Place, TellingModel, crash, until

RAW = "4000-1234-5678"
NUMBER = re.compile(r"\d{4}-\d{4}-\d{4}")


class Numbers(Plugin):
    """Takes card numbers out of what is said; of a file with one, it leaves a line."""

    id = "numbers"

    def __init__(self) -> None:
        self.seen: list[InputContext] = []

    def transform_input(self, ctx: InputContext, message: Message) -> Message:
        self.seen.append(ctx)
        return Message(
            "user",
            tuple(
                [Text(NUMBER.sub("[card]", p.text)) if isinstance(p, Text) else Text("[file]") for p in message.parts]
            ),
        )


class Sign(Plugin):
    """Adds who has seen it."""

    id = "sign"

    async def transform_input(self, ctx: InputContext, message: Message) -> str:
        await asyncio.sleep(0)
        return f"{message.text} (seen by {ctx.metadata.get('user', 'nobody')}'s desk)"


def echo(request: ModelRequest) -> str:
    return f"re: {request.messages[-1].text}"


def support(*plugins: Plugin, **options: Any) -> Agent[str]:
    return Agent(FunctionModel(echo), name="support", plugins=plugins or [Numbers()], **options)


def having(answer: Callable[[InputContext, Message], Any]) -> Plugin:
    class Filter(Plugin):
        id = "filter"

        def transform_input(self, ctx: InputContext, message: Message) -> Any:
            return answer(ctx, message)

    return Filter()


def files_with(folder: Path, raw: str) -> list[str]:
    """The files below a folder that hold some bytes: database, WAL, blobs, traces."""
    found = [each for each in folder.rglob("*") if each.is_file()]
    assert found
    return [each.name for each in found if raw.encode() in each.read_bytes()]


# ---------------------------------------------------------------------- what is stored


async def test_the_last_of_the_filters_in_their_order_says_what_is_stored_and_answered(place: Place) -> None:
    numbers = Numbers()
    async with place.runtime(support(numbers, Sign())) as runtime:
        session = await runtime.session("s", metadata={"user": "ada"})
        first = await session.run(f"my card is {RAW}", metadata={"source": "mail"})
        history = await session.history()

    assert first.text == "re: my card is [card] (seen by ada's desk)"
    assert [message.text for message in history] == ["my card is [card] (seen by ada's desk)", first.text]
    assert [(ctx.session_id, ctx.agent, ctx.kind, dict(ctx.metadata)) for ctx in numbers.seen] == [
        ("s", "support", "queue", {"user": "ada", "source": "mail"})
    ]


async def test_an_agent_without_a_filter_has_none(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(echo), name="support")) as runtime:
        session = await runtime.session("s")
        result = await session.run(RAW)
        row = await runtime.store.session("s")

    assert result.text == f"re: {RAW}"
    assert row is not None
    assert row.settings == b""


async def by_run(session: Session[Any], said: InputContent) -> None:
    await session.run(said, key="k")


async def by_send(session: Session[Any], said: InputContent) -> None:
    await (await session.send(said, key="k")).result()


async def by_steer(session: Session[Any], said: InputContent) -> None:
    await (await session.steer(said, key="k")).result()


async def by_stream(session: Session[Any], said: InputContent) -> None:
    async with session.stream(said, key="k") as turn:
        async for _ in turn:
            pass


async def by_start(session: Session[Any], said: InputContent) -> None:
    handle = await session.start(
        "support", {"input": said, "seed": [{"role": "user", "parts": [{"type": "text", "text": RAW}]}]}
    )
    await handle.result()


async def by_count(session: Session[Any], said: InputContent) -> None:
    await session.run("hello")
    with pytest.raises(Exception, match="count"):
        await session.count_tokens(said)


WAYS_IN = [by_run, by_send, by_steer, by_stream, by_start, by_count]
SAID: list[InputContent] = [
    f"my card is {RAW}",
    f"my card is {RAW}, " + "and so on " * 20_000,  # too large for a row
    [f"my card is {RAW}", Document.from_bytes(f"statement of {RAW}".encode(), "text/plain")],
]


@pytest.mark.parametrize("said", SAID, ids=["text", "large", "file"])
@pytest.mark.parametrize("way", WAYS_IN, ids=lambda way: way.__name__)
async def test_no_byte_of_the_folder_has_what_was_said(
    way: Callable[[Session[Any], InputContent], Awaitable[None]],
    said: InputContent,
    file: Place,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if way is by_start and not isinstance(said, str):
        return  # an agent is started with files that are in the store already
    caplog.set_level(logging.DEBUG)
    with contextlib.closing(JsonlSink(tmp_path / "trace.jsonl")) as trace:
        async with file.runtime(support(), trace=trace) as runtime:
            await way(await runtime.session("s"), said)
            trace.write("the end", {})
            while_open = files_with(tmp_path, RAW)

    assert while_open == []
    assert files_with(tmp_path, RAW) == []
    assert RAW not in caplog.text


async def test_neither_readers_elsewhere_nor_the_queue_get_what_was_said(file: Place, tmp_path: Path) -> None:
    model, seen = TellingModel(), list[AnyEvent]()
    agent = Agent(model, name="support", plugins=[Numbers()])
    async with file.runtime(agent) as worker, Runtime(file.store()) as reader:
        session = await worker.session("s")
        await session.send(f"first {RAW}")
        await model.next()
        watching = (await reader.session("s")).observe()
        queued = await session.send(f"second {RAW}")
        await session.steer(f"third {RAW}")
        queue = await (await reader.session("s")).queue()
        reading = asyncio.create_task(read_until(watching, seen, queued.turn_id))
        await until(lambda: worker._live_server.connections)
        model.say("one", "two", "three")
        await reading

    assert [each.message.text for each in queue] == ["second [card]", "third [card]"]
    assert RAW not in repr(seen)
    assert files_with(tmp_path, RAW) == []


async def read_until(events: Any, seen: list[AnyEvent], turn: str) -> None:
    async for event in events:
        seen.append(event)
        if isinstance(event, TurnCommitted) and event.turn_id == turn:
            return


async def test_what_a_person_answers_with_passes_too(file: Place, tmp_path: Path) -> None:
    numbers, keys = Numbers(), list[str]()

    @tool(approval="ask")
    async def pay() -> str:
        """Pay."""
        return "paid"

    @tool(deferred=True)
    async def ship(ctx: ToolContext[Any]) -> None:
        """Ship."""
        keys.append(ctx.defer())

    def model(request: ModelRequest) -> Any:
        last = request.messages[-1]
        if last.role == "tool":
            return " ".join(str(each.content) for each in last.tool_results)
        return [ToolCall("a", last.text)]

    agent = Agent(FunctionModel(model), name="support", tools=[pay, ship], plugins=[numbers])
    async with file.runtime(agent) as runtime:
        session = await runtime.session("s")
        await session.run("pay")
        await session.reject("s.1.1.0", f"{RAW} is blocked")
        rejected = await session.result("s.1")
        await session.run("ship")
        await runtime.resolve(keys[0], error=f"no parcel for {RAW}")
        failed = await session.result("s.2")
        await session.run("ship")
        await session.settle("s.3.1.0", "failed", reason=f"lost {RAW}")
        settled = await session.result("s.3")

    assert "[card] is blocked" in rejected.text
    assert "no parcel for [card]" in failed.text
    assert "lost [card]" in settled.text
    assert [ctx.kind for ctx in numbers.seen] == ["queue", "answer"] * 3
    assert files_with(tmp_path, RAW) == []


async def test_a_message_to_an_agent_at_work_passes(file: Place, tmp_path: Path) -> None:
    model, numbers = TellingModel(), Numbers()
    async with file.runtime(Agent(model, name="support", plugins=[numbers])) as runtime:
        handle = await runtime.start("support", {"input": f"begin with {RAW}"}, id="job")
        asked = await model.next()
        await handle.signal("message", f"also {RAW}")
        model.say("one", "two")
        await handle.result()
        row = await handle.record()

    assert asked.messages[-1].text == "begin with [card]"
    assert row.registration.input["input"]["parts"] == [{"type": "text", "text": "begin with [card]"}]
    assert [ctx.kind for ctx in numbers.seen] == ["queue", "steer"]
    assert files_with(tmp_path, RAW) == []


async def test_what_an_agent_or_a_plugin_says_itself_does_not_pass(place: Place) -> None:
    """It was stored before it was said: in the records of the turn that says it."""
    numbers = Numbers()

    class Opening(Plugin):
        id = "opening"

        def before_turn(self, ctx: TurnContext) -> CreateSession | None:
            return CreateSession(agent="support", session_id="child", said=Message("user", RAW))

    def ask(request: ModelRequest) -> Any:
        return "done" if request.messages[-1].role == "tool" else [ToolCall("a", "support", {"task": RAW})]

    asking = Agent(FunctionModel(ask), name="asking", tools=[support(numbers).as_tool()], plugins=[Opening()])
    async with place.runtime(asking) as runtime:
        await (await runtime.session("s", agent="asking")).run("go")
        await runtime.wait_idle()

    assert numbers.seen == []


async def test_a_plugin_that_keeps_something_for_each_session_filters_with_the_object_of_the_agent() -> None:
    class Counting(Numbers):
        def for_session(self, ctx: SessionContext) -> Counting:
            return Counting()

    counting = Counting()
    async with Runtime("memory", agents=[support(counting)]) as runtime:
        await (await runtime.session("s")).run(RAW)

    assert len(counting.seen) == 1


async def test_a_chat_and_a_single_run_in_memory_pass_filters() -> None:
    agent = support()
    chat = agent.chat()

    assert (await chat.run(f"my card is {RAW}")).text == "re: my card is [card]"
    async with chat.stream(RAW) as turn:
        assert (await turn.result()).text == "re: [card]"
    assert (await agent.run(RAW)).text == "re: [card]"
    assert RAW not in repr(await chat.history())


# ---------------------------------------------------------------------- filters that fail


def raising(ctx: InputContext, message: Message) -> Any:
    raise LookupError(f"no rule for {message.text}")


async def raising_later(ctx: InputContext, message: Message) -> Any:
    await asyncio.sleep(0)
    raise LookupError(f"no rule for {message.text}")


BROKEN: list[tuple[Callable[[InputContext, Message], Any], str]] = [
    (raising, "plugin 'filter': transform_input: LookupError"),
    (raising_later, "plugin 'filter': transform_input: LookupError"),
    (lambda ctx, message: None, "it returned a NoneType"),
    (lambda ctx, message: 7, "it returned a int"),
    (lambda ctx, message: "  ", "it returned a str"),
    (lambda ctx, message: Message("assistant", message.parts), "it returned a Message"),
    (lambda ctx, message: [ToolCall("a", "pay")], "it returned a list"),
]


@pytest.mark.parametrize(
    ("answer", "why"), BROKEN, ids=["raises", "raises later", "none", "int", "empty", "role", "call"]
)
async def test_a_filter_that_fails_refuses_the_input_and_tells_nothing_of_it(
    answer: Callable[[InputContext, Message], Any], why: str, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    async with place.runtime(support(having(answer))) as runtime:
        session = await runtime.session("s", options=None, metadata={"user": "ada"})
        with pytest.raises(PluginFault, match=re.escape(why)) as refused:
            await session.run(RAW)
        written = await runtime.store.session("s")

    assert written is None
    assert RAW not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__
    assert RAW not in caplog.text


async def test_a_filter_may_refuse_an_input_in_its_own_words(place: Place) -> None:
    def refuse(ctx: InputContext, message: Message) -> Any:
        raise InvalidInput("send card numbers by letter")

    async with place.runtime(support(having(refuse))) as runtime:
        with pytest.raises(InvalidInput, match="send card numbers by letter"):
            await (await runtime.session("s")).send(RAW)
        written = await runtime.store.session("s")

    assert written is None


async def test_a_filter_that_hangs_is_cut_off_after_its_time_limit(place: Place) -> None:
    async def hang(ctx: InputContext, message: Message) -> Any:
        await asyncio.Event().wait()

    filter = having(hang)
    filter.time_limit = 0.01
    async with place.runtime(support(filter)) as runtime:
        with pytest.raises(PluginFault, match="did not end within"):
            await (await runtime.session("s")).run(RAW)
        written = await runtime.store.session("s")

    assert written is None


@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_caller_that_goes_away_while_a_filter_works_has_said_nothing(stubborn: bool, place: Place) -> None:
    begun, swallowed = asyncio.Event(), asyncio.Event()

    async def hang(ctx: InputContext, message: Message) -> Any:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            swallowed.set()
            if not stubborn:
                raise
        return message

    async with place.runtime(support(having(hang))) as runtime:
        running = asyncio.create_task((await runtime.session("s")).run(RAW, key="k"))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        written = await runtime.store.session("s")

    assert swallowed.is_set()
    assert written is None


async def test_bad_keys_are_refused_before_a_filter_is_asked() -> None:
    numbers = Numbers()
    async with Runtime("memory", agents=[support(numbers)]) as runtime:
        with pytest.raises(InvalidInput, match="a key is a string"):
            await (await runtime.session("s")).run(RAW, key="")

    assert numbers.seen == []


# ---------------------------------------------------------------------- keys


SECRET = b"kept where secrets are kept"


async def stored_digest(place: Place, key: str) -> bytes:
    if place.kind == "memory":
        (found,) = [digest for (_, name), (_, digest) in place._rows.keys.items() if name == key]
        return bytes(found)
    import sqlite3

    with sqlite3.connect(place.path) as file:
        ((found,),) = file.execute("SELECT digest FROM keys WHERE key = ?", (key,)).fetchall()
    file.close()
    return bytes(found)


async def test_the_same_key_means_the_same_words_as_they_were_said(place: Place) -> None:
    async with place.runtime(support(), input_secret=SECRET) as runtime:
        session = await runtime.session("s")
        first = await session.send(f"card {RAW}", key="k")
        again = await session.send(f"card {RAW}", key="k")
        with pytest.raises(KeyConflict):
            await session.send("card 4000-0000-0000", key="k")  # of which filters leave the same
    async with place.runtime(support(), input_secret=SECRET.decode()) as runtime:
        later = await (await runtime.session("s")).send(f"card {RAW}", key="k")

    assert (first.known, again.known, later.known) == (False, True, True)
    assert first.turn_id == again.turn_id == later.turn_id


async def test_a_filter_that_answers_otherwise_each_time_keeps_keys(place: Place) -> None:
    count = iter(range(10))
    tokens = having(lambda ctx, message: f"customer {next(count)}")
    async with place.runtime(support(tokens)) as runtime:
        session = await runtime.session("s")
        first, again = await session.send(RAW, key="k"), await session.send(RAW, key="k")
        started = [await runtime.start("support", {"input": RAW}, id="job") for _ in range(2)]
        with pytest.raises(ProcessConflict):
            await runtime.start("support", {"input": "another"}, id="job")
        await started[0].result()

    assert first.turn_id == again.turn_id
    assert started[0].id == started[1].id


async def test_what_the_store_has_of_a_key_cannot_be_made_without_the_secret(place: Place) -> None:
    async with place.runtime(support(), input_secret=SECRET) as runtime:
        await (await runtime.session("s")).run(RAW, key="k")
        of_store = await runtime.store.secret()

    found = await stored_digest(place, "k")
    content = encode((False, Message("user", (Text(RAW),))))
    assert found == hmac.new(SECRET, b"mainstay input\0" + content, hashlib.sha256).digest()[:16]
    assert found != hmac.new(of_store, b"mainstay input\0" + content, hashlib.sha256).digest()[:16]
    assert found != hashlib.blake2b(content, digest_size=16).digest()


async def test_another_secret_makes_a_repeated_key_a_conflict(place: Place) -> None:
    async with place.runtime(support(), input_secret=SECRET) as runtime:
        await (await runtime.session("s")).run(RAW, key="k")
    async with place.runtime(support(), input_secret=SECRET + b" no more") as runtime:
        with pytest.raises(KeyConflict):
            await (await runtime.session("s")).run(RAW, key="k")


async def test_a_key_from_before_the_agent_had_a_filter_is_known_still(place: Place) -> None:
    said: InputContent = ["[process x]", Document.from_bytes(b"statement", "text/plain")]
    async with place.runtime(Agent(FunctionModel(echo), name="support")) as runtime:
        first = await (await runtime.session("s")).send(said, key="k", metadata={"source": "mail"})
        await first.result()
    async with place.runtime(support()) as runtime:
        session = await runtime.session("s")
        again = await session.send(said, key="k", metadata={"source": "mail"})
        with pytest.raises(KeyConflict):
            await session.send("something else", key="k")

    assert again.known
    assert again.turn_id == first.turn_id


async def test_a_file_of_the_host_is_part_of_what_a_key_stands_for(file: Place, tmp_path: Path) -> None:
    statement = tmp_path.parent / f"{tmp_path.name}-statement.txt"
    statement.write_text(f"statement of {RAW}")
    async with file.runtime(support()) as runtime:
        session = await runtime.session("s")
        first = await session.send(["this", Document.file(statement)], key="k")
        again = await session.send(["this", Document.file(statement)], key="k")
        statement.write_text("another")
        with pytest.raises(KeyConflict):
            await session.send(["this", Document.file(statement)], key="k")
        await first.result()

    assert again.known
    assert files_with(tmp_path, RAW) == []


# ---------------------------------------------------------------------- front ends


async def test_a_worker_says_which_of_its_agents_filter_what_comes_in(place: Place) -> None:
    plain = Agent(FunctionModel(echo), name="plain")
    async with place.runtime(plain, support()) as runtime, place.runtime(support(), recover=False) as waiting:
        rows = {row.id: () if row.offers is None else row.offers.input_filters for row in await runtime.store.workers()}

    assert rows == {runtime._worker.id: ("support",), waiting._worker.id: ("support",)}


async def saying(session: Session[Any], runtime: Runtime) -> list[Awaitable[Any]]:
    """Every way to say something to an agent."""

    async def stream() -> None:
        async with session.stream(RAW):
            raise AssertionError

    return [
        session.run(RAW),
        session.send(RAW),
        session.steer(RAW),
        stream(),
        runtime.start("support", {"input": RAW}, id="job"),
        session.start("support", {"input": RAW}),
    ]


async def test_a_runtime_without_the_filter_refuses_what_is_said_to_its_agent(file: Place, tmp_path: Path) -> None:
    async with file.runtime(support()), Runtime(file.store()) as front:
        session = await front.session("s", agent="support")
        for asking in await saying(session, front):
            with pytest.raises(InputFilterMissing, match=r"Runtime\(input_filters=\{…\}\)"):
                await asking
        with pytest.raises(InputFilterMissing) as missing:
            await session.run(RAW)
        written, processes = await front.store.session("s"), await front.processes.list()

    assert (missing.value.agent, missing.value.code) == ("support", "input_filter_missing")
    assert "input_filters" not in missing.value.summary
    assert written is None
    assert processes == []
    assert files_with(tmp_path, RAW) == []


async def test_a_runtime_that_was_given_the_filter_says_what_it_leaves(file: Place, tmp_path: Path) -> None:
    async with file.runtime(support()), Runtime(file.store(), input_filters={"support": Numbers()}) as front:
        session = await front.session("s", agent="support")
        text = (await session.run(f"card {RAW}")).text
        async with session.stream(f"again {RAW}") as turn:
            streamed = (await turn.result()).text
        started = await (await front.start("support", {"input": RAW})).result()

    assert (text, streamed, started) == ("re: card [card]", "re: again [card]", "re: [card]")
    assert files_with(tmp_path, RAW) == []


async def test_keys_are_the_same_for_worker_and_front_end(file: Place) -> None:
    filters = {"support": [Numbers()]}
    async with (
        file.runtime(support(), input_secret=SECRET) as worker,
        Runtime(file.store(), input_filters=filters, input_secret=SECRET) as front,
    ):
        first = await (await front.session("s", agent="support")).send(RAW, key="k")
        again = await (await worker.session("s")).send(RAW, key="k")
        await first.result()

    assert again.known


async def test_a_front_end_still_talks_to_agents_without_filters(file: Place) -> None:
    plain = Agent(FunctionModel(echo), name="plain")
    async with file.runtime(plain, support()), Runtime(file.store()) as front:
        result = await (await front.session("s", agent="plain")).run("hello")

    assert result.text == "re: hello"


async def test_that_an_agent_is_filtered_is_known_while_no_worker_lives(file: Place, tmp_path: Path) -> None:
    async with file.runtime(support(), Agent(FunctionModel(echo), name="plain")) as runtime:
        await (await runtime.session("old", agent="support")).run("hello")
        await (await runtime.session("other", agent="plain")).run("hello")
    async with Runtime(file.store()) as front:
        queued = await (await front.session("new", agent="plain")).run("hello")
        for name in ("old", "new-1"):
            session = await front.session(name, agent="support")
            with pytest.raises(InputFilterMissing):
                await session.run(RAW)

    assert isinstance(queued.outcome, Queued)
    assert files_with(tmp_path, RAW) == []


async def test_a_worker_that_was_killed_leaves_the_knowledge_too(place: Place) -> None:
    runtime = await place.runtime(support()).__aenter__()
    await (await runtime.session("s")).run("hello")
    await crash(runtime)

    async with Runtime(place.store()) as front:
        with pytest.raises(InputFilterMissing):
            await (await front.session("s")).run(RAW)


async def test_a_session_from_before_the_filter_is_marked_by_its_next_input(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(echo), name="support")) as runtime:
        await (await runtime.session("s", metadata={"user": "ada"})).run("hello")
    async with place.runtime(support()) as runtime:
        result = await (await runtime.session("s")).run(RAW)
        row = await runtime.store.session("s")

    assert result.text == "re: [card]"
    assert row is not None
    settings = load_settings(row.settings)
    assert (settings.filtered, settings.metadata) == (True, {"user": "ada"})


async def test_a_person_at_a_front_end_may_decide_without_a_reason(file: Place) -> None:
    @tool(approval="ask")
    async def pay() -> str:
        """Pay."""
        return "paid"

    def model(request: ModelRequest) -> Any:
        return "done" if request.messages[-1].role == "tool" else [ToolCall("a", "pay")]

    agent = Agent(FunctionModel(model), name="support", tools=[pay], plugins=[Numbers()])
    async with file.runtime(agent) as worker, Runtime(file.store()) as front:
        await (await worker.session("s")).run("pay")
        session = await front.session("s")
        with pytest.raises(InputFilterMissing):
            await session.reject("s.1.1.0", f"{RAW} is blocked")
        await session.reject("s.1.1.0")
        result = await session.result("s.1")

    assert result.text == "done"


async def test_a_filter_of_a_front_end_is_shut_down_with_it() -> None:
    closed = list[str]()

    class Closing(Numbers):
        def shutdown(self) -> None:
            closed.append(self.id)

    async with Runtime("memory", input_filters={"support": Closing(), "another": Closing()}):
        assert closed == []

    assert closed == ["numbers", "numbers"]


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"input_filters": [Numbers()]}, "give a dict of agents' names and plugins"),
        ({"input_filters": {7: Numbers()}}, "agent"),
        ({"input_filters": {"x": []}}, r"input_filters\['x'\] has no plugin"),
        ({"input_filters": {"x": 7}}, "plugins"),
        ({"input_filters": {"x": Plugin}}, "plugins"),
        ({"input_filters": {"x": [object()]}}, "derive it from perdure.Plugin"),
        ({"input_filters": {"support": Numbers()}}, "this Runtime has the agent"),
        ({"input_secret": b"short"}, "give 16 random bytes or more"),
        ({"input_secret": 7}, "give 16 random bytes or more"),
    ],
)
def test_what_a_runtime_cannot_filter_with_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidDefinition, match=why):
        Runtime("memory", agents=[support()], **options)


def test_a_plugin_without_the_hook_is_no_filter() -> None:
    class Silent(Plugin):
        id = "silent"

    with pytest.raises(InvalidDefinition, match="plugin 'silent' has no transform_input"):
        Runtime("memory", input_filters={"support": Silent()})


def test_a_secret_is_not_shown_where_it_is_refused() -> None:
    with pytest.raises(InvalidDefinition) as refused:
        Runtime("memory", input_secret="hunter2")

    assert "hunter2" not in str(refused.value)


def test_a_method_with_nearly_the_name_of_the_hook_is_refused() -> None:
    class Slip(Plugin):
        id = "slip"

        def transform_inputs(self, ctx: InputContext, message: Message) -> Message:
            return message

    with pytest.raises(InvalidDefinition, match="do you mean transform_input"):
        Agent("scripted", plugins=[Slip()])
