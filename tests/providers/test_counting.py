"""Tokens counted before a call, over real HTTP, where an API counts them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from perdure import (
    Agent,
    Image,
    Message,
    ModelRequest,
    ModelResponse,
    ModelSettings,
    Runtime,
    ToolCall,
    ToolResult,
    tool,
)
from perdure.errors import ProviderError
from perdure.model.message import ProviderPart, Text
from perdure.model.tool import ToolSpec
from perdure.plugins.hooks import CompactContext, Plugin
from perdure.ports.provider import Provider
from perdure.providers.fallback import Fallback
from perdure.providers.google import GoogleGenerate
from perdure.providers.http import HttpProvider, KeyHeader
from perdure.testing import FunctionModel
from perdure.testing.model_server import ModelServer, Reply
from tests.providers.wire import ANSWERS, dialects

MODEL = "some-model"
SECRET = "sk-very-secret-4711"
REQUEST = ModelRequest(
    [
        Message("system", "Be brief."),
        Message("user", "Weather?"),
        Message("assistant", [Text("I look."), ToolCall("call1", "weather", {"city": "Oslo"})]),
        Message("tool", [ToolResult("call1", "weather", "21")]),
        Message("user", "And Bern?"),
    ],
    [ToolSpec("weather", "The weather.", {"type": "object", "properties": {"city": {"type": "string"}}})],
    session_id="s",
    settings=ModelSettings(max_tokens=50, temperature=0.2, tool_choice="required"),
)

# Dialect -> path and what is answered.
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "anthropic": ("/v1/messages/count_tokens", {"input_tokens": 4711}),
    "openai": ("/responses/input_tokens", {"object": "response.input_tokens", "input_tokens": 4711}),
    "google": (f"/v1beta/models/{MODEL}:countTokens", {"totalTokens": 4711, "cachedContentTokenCount": 3}),
    "vertex": (f"/v1/projects/p/locations/global/publishers/google/models/{MODEL}:countTokens", {"totalTokens": 4711}),
    "bedrock": (f"/model/{MODEL}/count-tokens", {"inputTokens": 4711}),
}
KEYS = {
    "anthropic": {"model", "tools", "tool_choice", "system", "messages"},
    "openai": {"model", "tools", "tool_choice", "input"},
    "google": {"generateContentRequest"},
    "vertex": {"generationConfig", "tools", "systemInstruction", "contents"},
    "bedrock": {"input"},
}


def connect(server: ModelServer, name: str) -> HttpProvider:
    dialect = GoogleGenerate("/v1/projects/p/locations/global/publishers/google") if name == "vertex" else None
    authorise = KeyHeader(name, ("SOME_KEY",), "x-api-key", "", SECRET)
    return HttpProvider(dialect or dialects()[name], MODEL, name=name, base_url=server.url, authorise=authorise)


def counted(figures: Any) -> Reply:
    return Reply.error(200, figures)


@pytest.mark.parametrize("name", APIS)
async def test_a_request_is_counted_by_its_provider(name: str) -> None:
    path, answer = APIS[name]
    async with ModelServer([counted(answer)]) as server:
        count = await connect(server, name).count_tokens(REQUEST)

    [asked] = server.asked
    assert (count, asked.path, asked.headers["x-api-key"]) == (4711, path, SECRET)
    assert asked.headers["accept"] == "application/json"
    assert set(asked.json) == KEYS[name]


@pytest.mark.parametrize("name", APIS)
async def test_what_is_counted_is_said_as_it_would_be_asked(name: str) -> None:
    async with ModelServer([counted(APIS[name][1])]) as server:
        model = connect(server, name)
        await model.count_tokens(REQUEST)
    body = server.asked[0].json
    body = body["input"]["converse"] if name == "bedrock" else body.get("generateContentRequest", body)
    asked = b"".join([piece for piece in model.dialect.build(REQUEST, MODEL).body if isinstance(piece, bytes)])
    said = {"anthropic": "messages", "openai": "input", "bedrock": "messages"}.get(name, "contents")

    whole = msgspec.json.decode(asked)
    assert body[said] == whole[said]
    for key in ("system", "systemInstruction", "tools", "toolConfig" if name == "bedrock" else "tools"):
        assert body.get(key) == whole.get(key)


async def test_a_bedrock_request_with_nothing_but_words_is_sound() -> None:
    async with ModelServer([counted({"inputTokens": 2})]) as server:
        await connect(server, "bedrock").count_tokens(ModelRequest([Message("user", "hi")]))

    assert server.asked[0].json == {
        "input": {"converse": {"messages": [{"role": "user", "content": [{"text": "hi"}]}]}}
    }


@pytest.mark.parametrize("name", APIS)
@pytest.mark.parametrize("answer", [{}, {"input_tokens": "many"}, {"totalTokens": -1}, [], "text"])
async def test_an_answer_without_a_figure_is_nonsense(name: str, answer: Any) -> None:
    async with ModelServer([counted(answer)]) as server:
        with pytest.raises(ProviderError) as caught:
            await connect(server, name).count_tokens(REQUEST)

    assert caught.value.code == "provider_nonsense"


@pytest.mark.parametrize(("status", "code", "retryable"), [(401, "authentication", False), (529, "overloaded", True)])
@pytest.mark.parametrize("name", APIS)
async def test_a_refused_count_says_what_happens_next(name: str, status: int, code: str, retryable: bool) -> None:
    async with ModelServer([Reply.error(status, {"error": {"message": f"your key is {SECRET}"}})]) as server:
        with pytest.raises(ProviderError) as caught:
            await connect(server, name).count_tokens(REQUEST)

    assert (caught.value.code, caught.value.retryable) == (code, retryable)
    assert SECRET not in str(caught.value)


async def test_an_api_that_does_not_count_says_so_and_is_not_asked() -> None:
    async with ModelServer([]) as server:
        with pytest.raises(ProviderError) as caught:
            await connect(server, "openai-chat").count_tokens(REQUEST)

    assert (caught.value.code, server.asked) == ("no_token_count", [])


class Counted:
    """A provider of a host that counts words."""

    name = "counted"

    def __init__(self) -> None:
        self.asked: list[ModelRequest] = []

    async def count_tokens(self, request: ModelRequest) -> int:
        self.asked.append(request)
        return sum(len(message.text.split()) for message in request.messages)

    async def stream(self, request: ModelRequest) -> Any:
        yield ModelResponse("two words")


@tool
def add(n: int) -> int:
    """Add."""
    return n


async def test_a_host_counts_what_the_next_turn_would_begin_with() -> None:
    own, other = Counted(), Counted()
    agent = Agent(own, instructions="Be brief.", tools=[add], settings=ModelSettings(max_tokens=5))
    async with Runtime("memory", agents=[agent], models={"other": Fallback(other, own)}) as runtime:
        session = await runtime.session("s")
        empty = await session.count_tokens()
        first = await session.count_tokens(["one two three", Image.from_bytes(b"PNG", "image/png")])
        await session.run("hello")
        second = await session.count_tokens("one two three")
        await session.configure(model="other")
        await session.count_tokens("one")
        history = await session.history()

    assert (empty, first, second) == (2, 5, 8)
    assert [spec.name for spec in own.asked[0].tools] == ["add"]
    assert (own.asked[0].settings.max_tokens, own.asked[0].label) == (5, "count")
    assert len(other.asked) == 1
    assert [message.text for message in history] == ["hello", "two words"], "what is counted is not said"


async def test_a_plugin_counts_what_it_would_ask() -> None:
    counts: list[int] = []

    class Counter(Plugin):
        id = "counter"

        async def compact(self, ctx: CompactContext) -> None:
            counts.append(await ctx.host.count_tokens(list(ctx.messages) or "nothing yet", system="be brief"))
            counts.append(await ctx.host.count_tokens("a b c d", model="other", tools=[add]))

    async with Runtime(
        "memory", agents=[Agent(Counted(), plugins=[Counter()])], models={"other": Counted()}
    ) as runtime:
        session = await runtime.session("s")
        await session.run("hello")
        usage = await session.usage()

    assert counts == [4, 4]
    assert list(usage) == ["turns"]


async def test_a_model_that_cannot_count_says_so() -> None:
    async with Runtime("memory", agents=[Agent(FunctionModel(lambda _: "x"))]) as runtime:
        session = await runtime.session("s")
        with pytest.raises(ProviderError) as caught:
            await session.count_tokens("hello")

    assert caught.value.code == "no_token_count"


async def test_a_session_over_http_is_counted_with_the_parts_of_its_provider() -> None:
    thought = ANSWERS["anthropic"]["reasoning"]
    async with ModelServer([thought.reply, counted({"input_tokens": 99})]) as server:
        model: Provider = connect(server, "anthropic")
        async with Runtime("memory", agents=[Agent(model)]) as runtime:
            session = await runtime.session("s")
            await session.run("hello")
            count = await session.count_tokens("and now?")

    assert count == 99
    sent = server.asked[1].json["messages"]
    assert [each["role"] for each in sent] == ["user", "assistant", "user"]
    assert any(isinstance(part, ProviderPart) for part in thought.response.parts)
    assert sent[1]["content"][0]["type"] in ("thinking", "redacted_thinking")
