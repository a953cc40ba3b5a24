"""Providers over real HTTP, to a local server that replays scripts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Agent, NoAnswer, Runtime, TurnFailed, tool
from perdure.errors import InvalidDefinition, ProviderError
from perdure.model.event import TextDelta, ToolCallDelta
from perdure.model.llm import ModelRequest, ModelResponse, ModelSettings
from perdure.model.message import Document, Image, Message, Stored, Text
from perdure.model.outcome import ProviderFailed, text_of
from perdure.ports.provider import Provider
from perdure.providers.fallback import Fallback
from perdure.providers.http import HttpProvider, KeyHeader
from perdure.providers.registry import SERVICES, provider
from perdure.testing import FunctionModel, ScriptedModel, VirtualClock
from perdure.testing.model_server import AnswerEnd, Asked, ModelServer, Reply
from tests.fuzzing import cases
from tests.providers.wire import ANSWERS, FAILURES, MODEL, dialects

ANSWER_CASES = [(name, case) for name, answers in ANSWERS.items() for case in answers]
FAILURE_CASES = [(name, case) for name, failures in FAILURES.items() for case in failures]
SECRET = "sk-very-secret-4711"


def connect(server: ModelServer, name: str = "anthropic", key: Any = SECRET) -> HttpProvider:
    authorise = KeyHeader(name, ("SOME_KEY",), "x-api-key", "", key)
    return HttpProvider(dialects()[name], MODEL, name=name, base_url=server.url, authorise=authorise)


def ask(*said: Any) -> ModelRequest:
    return ModelRequest([Message("user", said or "hello")], session_id="s")


async def answer(model: Provider, request: ModelRequest | None = None) -> tuple[ModelResponse, str]:
    text: list[str] = []
    async for delta in model.stream(request or ask()):
        if isinstance(delta, str):
            text.append(delta)
        elif isinstance(delta, ModelResponse):
            return delta, "".join(text)
    raise AssertionError("no response")


@pytest.mark.parametrize("piece", [0, 7])
@pytest.mark.parametrize(("name", "case"), ANSWER_CASES)
async def test_an_answer_over_http_is_that_of_its_script(name: str, case: str, piece: int) -> None:
    script = ANSWERS[name][case]
    reply = Reply(body=script.reply.body, headers=script.reply.headers, piece=piece)
    async with ModelServer([reply]) as server:
        model = connect(server, name)
        async with model.connected():
            response, _ = await answer(model)

    assert response == script.response


@pytest.mark.parametrize(("name", "case"), FAILURE_CASES)
async def test_a_failure_says_what_happens_next(name: str, case: str) -> None:
    failure = FAILURES[name][case]
    async with ModelServer([failure.reply]) as server:
        model = connect(server, name)
        async with model.connected():
            with pytest.raises(ProviderError) as caught:
                await answer(model)

    assert (caught.value.code, caught.value.retryable) == (failure.code, failure.retryable)
    assert caught.value.after == failure.after
    assert failure.says in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_connection_that_is_cut_off_is_a_broken_stream(name: str) -> None:
    script = ANSWERS[name]["text"].reply
    half = Reply(body=script.body, headers=script.headers, upto=len(script.body) // 2, end="cut")
    async with ModelServer([half]) as server:
        model = connect(server, name)
        async with model.connected():
            with pytest.raises(ProviderError) as caught:
                await answer(model)

    assert (caught.value.code, caught.value.retryable) == ("broken_stream", True)


@pytest.mark.fuzz
@pytest.mark.parametrize("end", ["whole", "cut"])
@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_cut_off_at_any_byte_is_broken_also_when_the_server_ends_it_cleanly(
    name: str, end: AnswerEnd, record_property: Callable[[str, object], None]
) -> None:
    chance, script = random.Random(name), [answer.reply for answer in ANSWERS[name].values()]
    last = {"anthropic": b"message_stop", "openai": b"event: response.", "google": b"modelVersion"}
    terminal = last.get(name, b"metadata" if name == "bedrock" else b'"finish_reason":"')
    places = [(whole, at) for whole in script for at in range(whole.body.rindex(terminal))]
    chosen = chance.sample(places, min(cases(25, 2_000), len(places)))
    async with ModelServer([]) as server:
        model = connect(server, name)
        async with model.connected():
            for whole, at in chosen:
                server.script = lambda _, whole=whole, at=at: replace(whole, upto=at, end=end, piece=97)
                with pytest.raises(ProviderError) as caught:
                    await answer(model)
                assert (caught.value.code, caught.value.retryable) == ("broken_stream", True), (at, whole.body)
    record_property("perdure", f"over HTTP, {name}: {len(chosen)} of {len(places)} places to end an answer, {end}")


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ANSWERS)
async def test_it_does_not_matter_where_an_answer_is_split_over_http(name: str) -> None:
    chance = random.Random(name)
    async with ModelServer([]) as server:
        model = connect(server, name)
        async with model.connected():
            for script in ANSWERS[name].values():
                for _ in range(cases(2, 100)):
                    reply = replace(script.reply, piece=chance.randrange(1, 60))
                    server.script = lambda _, reply=reply: reply
                    assert (await answer(model))[0] == script.response, reply.piece


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_cancelled_call_closes_its_connection_and_leaves_its_neighbour_alone(name: str) -> None:
    script = ANSWERS[name]["text"].reply
    hanging = Reply(body=script.body, headers=script.headers, upto=len(script.body) // 2, end="hang")
    async with ModelServer([hanging, script]) as server:
        model = connect(server, name)
        async with model.connected():
            task = asyncio.create_task(answer(model))
            await asyncio.wait_for(server.was_asked(), 60)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await asyncio.wait_for(server.client_gone(), 60)
            response, _ = await answer(model)

    assert response == ANSWERS[name]["text"].response


def beside(whole: Reply, both_begun: asyncio.Barrier, server: ModelServer) -> list[Reply]:
    """One reply that hangs in the middle of an event, and one that goes on from there when its client has gone."""

    async def gone() -> None:
        await both_begun.wait()
        await server.client_gone()

    half = len(whole.body) // 2 + 3
    return [
        replace(whole, upto=half, end="hang", then=both_begun.wait),
        replace(whole, upto=half, end="rest", then=gone),
    ]


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_cancel_in_the_middle_of_a_chunk_hurts_no_stream_beside_it(name: str) -> None:
    """Both are over one pool; the neighbour gets the rest of its answer only when the server saw the other one go."""
    script = ANSWERS[name]["text"]
    both_begun = asyncio.Barrier(3)
    async with ModelServer([]) as server:
        server.script = [*beside(script.reply, both_begun, server), script.reply]
        model = connect(server, name)
        async with model.connected():
            cancelled = asyncio.create_task(answer(model))
            await asyncio.wait_for(server.was_asked(), 60)
            neighbour = asyncio.create_task(answer(model))
            await asyncio.wait_for(both_begun.wait(), 60)
            assert server.open == 2
            cancelled.cancel()
            response, text = await asyncio.wait_for(neighbour, 60)
            after, _ = await answer(model)

        assert cancelled.cancelled()
        assert server.open == 1, "the connection of the neighbour is used again"
    assert (response, after) == (script.response, script.response)
    assert text == "Grüße, Welt 😀"


async def test_a_cancelled_turn_leaves_its_connection_at_once_and_the_turn_beside_it_alone() -> None:
    both_begun = asyncio.Barrier(3)
    async with ModelServer([]) as server:
        server.script = beside(ANSWERS["anthropic"]["text"].reply, both_begun, server)
        async with Runtime("memory", agents=[Agent(connect(server))]) as runtime:
            session, other = await runtime.session("s"), await runtime.session("t")
            cancelled = await session.send("one")
            await asyncio.wait_for(server.was_asked(), 60)
            neighbour = await other.send("two")
            await asyncio.wait_for(both_begun.wait(), 60)
            await session.cancel()
            results = [await asyncio.wait_for(each.result(), 60) for each in (cancelled, neighbour)]

        assert [text_of(result.outcome) for result in results] == ["", "Grüße, Welt 😀"]
        assert [result.usage.unknown for result in results] == [1, 0]
        assert len(server.asked) == 2


async def test_nobody_there_is_worth_another_attempt() -> None:
    async with ModelServer([]) as server:
        model = connect(server)
    with pytest.raises(ProviderError) as caught:
        await answer(model)
    assert (caught.value.code, caught.value.retryable) == ("unreachable", True)


async def test_redirects_are_not_followed() -> None:
    async with ModelServer([Reply(status=307, headers={"location": "http://127.0.0.1:1/"})]) as server:
        model = connect(server)
        async with model.connected():
            with pytest.raises(ProviderError, match="307"):
                await answer(model)


# ---------------------------------------------------------------------- keys


async def test_a_key_function_that_raises_is_asked_again_and_its_words_are_not_told() -> None:
    away = [OSError(f"the vault is away, it had {SECRET}"), OSError("still")]

    def fetch() -> str:
        if away:
            raise away.pop(0)
        return SECRET

    async with ModelServer([ANSWERS["anthropic"]["text"].reply]) as server:
        with pytest.raises(ProviderError, match="raised OSError") as failed:
            await answer(connect(server, key=fetch))
        assert (failed.value.retryable, failed.value.code, SECRET in str(failed.value)) == (True, "no_key_given", False)
        assert server.asked == []
        with pytest.raises(ProviderError):
            await answer(connect(server, key=fetch))
        await answer(connect(server, key=fetch))

    assert len(server.asked) == 1


async def test_a_key_may_be_a_function_that_is_asked_every_time() -> None:
    keys = iter(["first", "second"])

    async def key() -> str:
        return next(keys)

    text = ANSWERS["anthropic"]["text"].reply
    async with ModelServer([text, text]) as server:
        model = connect(server, key=key)
        async with model.connected():
            await answer(model)
            await answer(model)

        assert [asked.headers["x-api-key"] for asked in server.asked] == ["first", "second"]


@pytest.mark.parametrize("key", ["", "  ", lambda: None, "sk-with\nnewline", "sk-ünïcode"])
async def test_a_key_that_is_none_is_refused_before_anything_is_sent(key: Any) -> None:
    async with ModelServer([]) as server:
        model = connect(server, key=key)
        async with model.connected():
            with pytest.raises(ProviderError) as caught:
                await answer(model)

        assert caught.value.code in ("missing_key", "authentication")
        assert "sk-" not in str(caught.value)
        assert not server.asked


async def test_a_missing_key_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with pytest.raises(ProviderError, match="ANTHROPIC_API_KEY") as caught:
        await answer(provider("anthropic:claude-x"))
    assert caught.value.code == "missing_key"


async def test_keys_are_in_no_repr_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with ModelServer([ANSWERS["anthropic"]["text"].reply]) as server:
        model = connect(server)
        async with model.connected():
            await answer(model)

    assert SECRET not in repr(model) + repr(vars(model)) + caplog.text


# ---------------------------------------------------------------------- files


class Files:
    """Blobs of a test, read in odd pieces."""

    def __init__(self, blobs: Mapping[str, bytes], piece: int = 5) -> None:
        self._blobs, self._piece = blobs, piece

    async def __call__(self, stored: Stored) -> AsyncIterator[bytes]:
        data = self._blobs[stored.digest]
        for at in range(0, len(data), self._piece):
            yield data[at : at + self._piece]


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 1000])
async def test_a_file_arrives_whole_as_base64(name: str, size: int) -> None:
    import base64

    data = bytes(range(256)) * 4
    data = data[:size]
    picture = Image(Stored("d1", size), "image/png", "x.png")
    paper = Document(Stored("d1", size), "application/pdf", "x.pdf")
    message = Message("user", (Text("What is this?"), picture, paper))
    request = ModelRequest([message], open_file=Files({"d1": data}).__call__)
    async with ModelServer([ANSWERS[name]["text"].reply]) as server:
        model = connect(server, name)
        async with model.connected():
            await answer(model, request)

        [asked] = server.asked
        assert asked.body.count(base64.b64encode(data)) == 2
        assert asked.json
        assert len(asked.body) == int(asked.headers["content-length"])


# ---------------------------------------------------------------------- in a turn


@tool
def get(city: str) -> str:
    """Look a city up."""
    return f"{city} is fine"


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_turn_with_a_tool_goes_through_a_real_connection(name: str) -> None:
    script = [ANSWERS[name]["tool"].reply, ANSWERS[name]["text"].reply]
    async with ModelServer(script) as server:
        agent = Agent(connect(server, name), tools=[get])
        async with Runtime("memory", agents=[agent]) as runtime:
            session = await runtime.session("s")
            events = []
            async with session.stream("How is Paris?") as turn:
                async for event in turn:
                    events.append(event)
                result = await turn.result()

        assert result.text == "Grüße, Welt 😀"
        assert [call.outcome.value for call in result.tool_calls if hasattr(call.outcome, "value")] == ["Paris is fine"]
        assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "Grüße, Welt 😀"
        assert "".join(e.text for e in events if isinstance(e, ToolCallDelta)).replace(" ", "") == '{"city":"Paris"}'
        assert "Paris is fine" in server.asked[1].body.decode()


@pytest.mark.parametrize("name", [name for name in ANSWERS if "half a call" in ANSWERS[name]])
async def test_half_a_call_is_told_to_the_model_and_the_session_goes_on(name: str) -> None:
    script = [ANSWERS[name]["half a call"].reply, ANSWERS[name]["text"].reply, ANSWERS[name]["text"].reply]
    async with ModelServer(script) as server:
        async with Runtime("memory", agents=[Agent(connect(server, name), tools=[get])]) as runtime:
            session = await runtime.session("s")
            first, second = await session.run("How is Paris?"), await session.run("And now?")

        assert [first.text, second.text] == ["Grüße, Welt 😀"] * 2
        assert [type(call.outcome).__name__ for call in first.tool_calls] == ["Failed"]
        assert "city" in server.asked[1].body.decode(), "it sees what it wrote"


async def test_an_overloaded_server_is_asked_again_and_a_wrong_key_is_not() -> None:
    failures = FAILURES["anthropic"]
    script = [failures["error in the stream"].reply, ANSWERS["anthropic"]["text"].reply, failures["wrong key"].reply]
    async with ModelServer(script) as server:
        agent = Agent(connect(server))
        async with Runtime("memory", agents=[agent]) as runtime:
            session = await runtime.session("s")
            first, second = await session.run("one"), await session.run("two")

        assert first.text == "Grüße, Welt 😀"
        assert isinstance(second.outcome, ProviderFailed)
        assert second.outcome.code == "authentication"
        assert len(server.asked) == 3


# ---------------------------------------------------------------------- model strings


@pytest.mark.parametrize("wrong", ["claude", "anthropic:", "nobody:x", ":x", "anthropic: "])
def test_a_model_string_that_means_nothing_is_refused_by_the_agent(wrong: str) -> None:
    with pytest.raises(InvalidDefinition):
        Agent(wrong)


@pytest.mark.parametrize("name", [name for name in SERVICES if name not in ("azure", "vertex", "bedrock")])
async def test_every_service_obeys_its_base_url_and_its_key_variable(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = SERVICES[name]
    for variable in service.key_variables:
        monkeypatch.setenv(variable, "k-1")
    dialect = {"anthropic": "anthropic", "responses": "openai", "google": "google"}.get(service.dialect, "openai-chat")
    async with ModelServer([ANSWERS[dialect]["text"].reply]) as server:
        monkeypatch.setenv(service.base_url_variable, server.url)
        async with Runtime("memory", agents=[Agent(f"{name}:{MODEL}")]) as runtime:
            result = await (await runtime.session("s")).run("hello")

        assert result.text == "Grüße, Welt 😀"
        [asked] = server.asked
        if service.key_variables:
            assert "k-1" in asked.headers[service.header]


async def test_no_network_means_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_NO_NETWORK", "1")
    monkeypatch.delenv("ANTHROPIC_BASE_URL", raising=False)
    with pytest.raises(ProviderError, match="PERDURE_NO_NETWORK") as caught:
        await answer(provider("anthropic:claude-x", key="k"))
    assert caught.value.code == "no_network"

    async with ModelServer([ANSWERS["anthropic"]["text"].reply]) as server:
        response, _ = await answer(provider("anthropic:claude-x", key="k", base_url=server.url))
    assert response.stop == "end"


# ---------------------------------------------------------------------- from sync code


class Pooled:
    """A provider of a host that holds on to the loop of its first call, as a pool of connections does."""

    name = "pooled"

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelResponse]:
        self._loop = self._loop or asyncio.get_running_loop()
        self._loop.call_soon(lambda: None)  # raises when it is closed
        yield ModelResponse("fine")


def test_sync_code_may_ask_twice_with_connections_of_its_own() -> None:
    agent = Agent(Pooled())
    assert [agent.run_sync("one").text, agent.run_sync("two").text] == ["fine", "fine"]


def test_another_model_may_be_laid_over_an_agent() -> None:
    agent = Agent(FunctionModel(lambda _: "first"), settings=ModelSettings(temperature=0.5, max_tokens=9))
    other = agent.override(model=ScriptedModel(["second"]), settings=ModelSettings(max_tokens=5))

    assert (agent.run_sync("x").text, other.run_sync("x").text) == ("first", "second")
    assert other.settings == ModelSettings(temperature=0.5, max_tokens=5)
    with pytest.raises(InvalidDefinition):
        agent.override(model="nonsense")


async def test_an_attempt_that_was_accepted_and_said_nothing_is_a_call_of_unknown_cost() -> None:
    whole = ANSWERS["anthropic"]["text"].reply
    async with ModelServer([replace(whole, upto=0, end="cut"), whole]) as server:
        agent = Agent(connect(server))
        async with Runtime("memory", agents=[agent], clock=VirtualClock(auto=True)) as runtime:
            result = await (await runtime.session("s")).run("hello")

    assert result.text == "Grüße, Welt 😀"
    assert result.usage.unknown == 1


class Nameless:
    """A model that lacks what every record of an attempt holds."""

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelResponse]:
        yield ModelResponse("fine")


@pytest.mark.parametrize(
    "make",
    [
        Agent,
        lambda model: Fallback("ollama:any", model),
        lambda model: Runtime("memory", agents=[Agent()], models={"mine": model}),
    ],
    ids=["agent", "fallback", "runtime"],
)
def test_a_provider_without_a_name_is_refused_before_a_turn_fails_by_it(make: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidDefinition):
        make(Nameless())


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": "many"},
        {"temperature": 3},
        {"temperature": float("nan")},
        {"top_p": -0.1},
        {"stop": "END"},
        {"stop": ("",)},
        {"seed": 1.5},
        {"reasoning": "very"},
        {"reasoning": True},
        {"tool_choice": ""},
        {"parallel_tool_calls": 1},
        {"timeout": 0},
        {"cache": "2h"},
        {"extra": [1]},
        {"extra": {"a": object()}},
        {"extra": {1: 2}},
        {"extra": {"a": "\ud800"}},
        {"stop": ("\ud800",)},
        {"tool_choice": "\ud800"},
    ],
)
def test_settings_that_no_model_could_be_asked_with_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidDefinition, match=next(iter(wrong))):
        ModelSettings(**wrong)


@pytest.mark.parametrize("name", ModelSettings.__struct_fields__)
def test_a_setting_that_is_none_is_left_to_the_provider(name: str) -> None:
    nothing: dict[str, Any] = {name: None}
    assert ModelSettings(**nothing) == ModelSettings()


async def test_a_script_that_raises_is_told_to_whoever_asked_it() -> None:
    def script(asked: Asked) -> Reply:
        raise KeyError(asked.path)

    async with ModelServer(script) as server:
        with pytest.raises(ProviderError, match="the script raised KeyError: '/v1/messages'") as caught:
            await answer(connect(server))

    assert not caught.value.retryable


async def test_an_attempt_that_takes_too_long_is_made_again() -> None:
    text = ANSWERS["anthropic"]["text"].reply
    hanging = Reply(body=text.body, headers=text.headers, upto=40, end="hang")
    async with ModelServer([hanging, text]) as server:
        agent = Agent(connect(server), settings=ModelSettings(timeout=0.05))
        async with Runtime("memory", agents=[agent]) as runtime:
            result = await (await runtime.session("s")).run("hello")

        assert result.text == "Grüße, Welt 😀"
        assert len(server.asked) == 2


@pytest.mark.parametrize(
    "reply",
    [
        Reply.error(401, {"error": {"message": f"Incorrect API key provided: {SECRET}"}}),
        Reply(status=500, body=b"x" * 488 + SECRET.encode()),
        Reply.sse(("error", {"type": "error", "error": {"type": "api_error", "message": f"bad key {SECRET}"}})),
        Reply.sse(("message_start", f"{{oops {SECRET}")),
    ],
    ids=["in an error", "cut off in an error", "in the stream", "in garbage"],
)
async def test_a_key_that_a_server_quotes_is_in_no_message(reply: Reply) -> None:
    async with ModelServer([reply]) as server:
        model = connect(server)
        async with model.connected():
            with pytest.raises(ProviderError) as caught:
                await answer(model)

    assert SECRET[:8] not in str(caught.value)
    assert "[key]" in str(caught.value)


async def test_an_answer_without_end_is_cut_off() -> None:
    asked = 0

    class Endless:
        name = "endless"

        async def stream(self, request: ModelRequest) -> AsyncIterator[str]:
            nonlocal asked
            while True:
                asked += 1
                yield "x" * 1_000_000

    async with Runtime("memory", agents=[Agent(Endless())]) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert isinstance(result.outcome, ProviderFailed)
    assert result.outcome.code == "answer_too_large"
    assert asked < 80


@pytest.mark.parametrize("read", ["text", "output"])
async def test_turn_whose_provider_refuses_the_key_raises_where_its_answer_is_read(read: str) -> None:
    replies = [Reply.error(401, {"error": {"message": "invalid x-api-key"}})]
    async with ModelServer(replies) as server, Runtime("memory", agents=[Agent(connect(server))]) as runtime:
        result = await (await runtime.session("chat")).run("hello")

    with pytest.raises(TurnFailed, match="invalid x-api-key") as caught:
        getattr(result, read)

    assert "turn chat.1 did not finish: provider_failed: authentication" in str(caught.value)
    assert "correct the model's name, key or address" in str(caught.value)
    assert isinstance(caught.value, NoAnswer)
    assert (result.failed, result.pending) == (True, ())
    assert result.error == caught.value.summary
    assert repr(result).startswith("TurnResult('chat.1', ProviderFailed(code='authentication', message='")
