"""Typed answers by schema, by tool and by prompt: what is asked, what is read, and what a turn makes of it."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure import Agent, Plugin, Runtime, tool
from perdure.errors import InvalidDefinition, ProviderError
from perdure.model.event import TextDelta, ToolCallDelta, ToolStarted
from perdure.model.llm import CallPiece, ModelRequest, ModelResponse, ModelSettings, OutputMode
from perdure.model.message import Message, Reasoning, Text, ToolCall
from perdure.model.outcome import ProviderFailed
from perdure.model.tool import ToolSpec
from perdure.providers.dialect import AnswerReader, Dialect
from perdure.providers.registry import provider
from perdure.providers.structured import AnswerCall, Unwrapping, WrappedText, shape_request
from perdure.testing.model_server import Asked, ModelServer, Reply
from tests.providers.wire import ANSWERS, MODEL, Answer, dialects

NAMES = list(ANSWERS)
MODES: list[OutputMode] = ["schema", "tool", "prompt"]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
GET = ToolSpec("get", "Look it up.", {"type": "object", "properties": {"city": {"type": "string"}}})


class Person(msgspec.Struct):
    name: str


def wanted(mode: OutputMode | None = None, **fields: Any) -> ModelRequest:
    settings = ModelSettings(output_mode=mode)
    fields = {"settings": settings, "output_schema": SCHEMA, **fields}
    return ModelRequest([Message("system", "Be brief."), Message("user", "Who?")], **fields)


def built(dialect: Dialect, request: ModelRequest, model: str = MODEL) -> Any:
    wire = dialect.build(shape_request(dialect, request, model).request, model)
    return msgspec.json.decode(b"".join(piece for piece in wire.body if isinstance(piece, bytes)))


def read(reader: AnswerReader, pieces: list[bytes]) -> tuple[ModelResponse, str, list[Any]]:
    text, others = [], []
    for piece in pieces:
        for delta in reader.feed(piece):
            if isinstance(delta, str):
                text.append(delta)
            else:
                others.append(delta)
    return reader.close(), "".join(text), others


# ---------------------------------------------------------------------- what is asked


@pytest.mark.parametrize("mode", ["json", "", 7])
def test_a_mode_that_is_none_is_refused_by_name(mode: Any) -> None:
    with pytest.raises(InvalidDefinition, match="output_mode"):
        ModelSettings(output_mode=mode)


PARAMETERS = {
    "anthropic": "output_config",
    "openai": "text",
    "openai-chat": "response_format",
    "google": "generationConfig",
    "bedrock": "outputConfig",
}


@pytest.mark.parametrize("name", NAMES)
def test_by_schema_the_parameter_of_the_api_is_used(name: str) -> None:
    said = built(dialects()[name], wanted("schema"))

    assert "additionalProperties" in str(said) or name in ("openai-chat", "google")
    assert "name" in str(said[PARAMETERS[name]])
    assert "tools" not in said


@pytest.mark.parametrize("name", NAMES)
def test_by_tool_one_more_tool_is_offered_and_a_call_is_wanted(name: str) -> None:
    said = built(dialects()[name], wanted("tool", tools=(GET,)), "claude-4")

    shown = str(said)
    assert shown.index("'get'") < shown.index("'final_answer'"), "after the agent's own"
    assert PARAMETERS[name] not in said or name in ("google", "openai-chat")
    forced = {
        "anthropic": {"type": "any"},
        "openai": "required",
        "openai-chat": "required",
        "google": {"functionCallingConfig": {"mode": "ANY"}},
        "bedrock": {"any": {}},
    }[name]
    assert forced in (said.get("tool_choice"), said.get("toolConfig"), said.get("toolConfig", {}).get("toolChoice"))


@pytest.mark.parametrize("name", NAMES)
def test_by_tool_the_last_step_may_still_answer(name: str) -> None:
    said = built(dialects()[name], wanted("tool", tool_choice="none"), "claude-4")

    assert str(said).count("final_answer") == 2, "offered, and chosen"


def test_a_model_that_thinks_is_offered_the_answer_tool_and_not_made_to_call_it() -> None:
    request = wanted(settings=ModelSettings(output_mode="tool", reasoning="high"))

    assert built(dialects()["anthropic"], request)["tool_choice"] == {"type": "auto"}


@pytest.mark.parametrize("name", NAMES)
def test_by_prompt_the_schema_is_in_the_instructions_and_nowhere_else(name: str) -> None:
    said = built(dialects()[name], wanted("prompt", tools=(GET,)))

    assert msgspec.json.encode(SCHEMA).decode() in str(said).replace("\\\\", "\\")
    assert "final_answer" not in str(said)
    assert PARAMETERS[name] not in said or name == "google"
    assert str(said).count("Be brief.") == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_request_for_a_typed_answer_begins_as_the_one_before_it_did(name: str, mode: OutputMode) -> None:
    first = wanted(mode, tools=(GET,), session_id="s")
    longer = [*first.messages, Message("assistant", '{"name":1}'), Message("user", "Again.")]
    settings = ModelSettings(output_mode=mode, cache=False)

    def body(messages: Any) -> bytes:
        dialect = dialects()[name]
        request = wanted(mode, tools=(GET,), session_id="s", settings=settings)
        request = msgspec.structs.replace(request, messages=messages)
        wire = dialect.build(shape_request(dialect, request, MODEL).request, MODEL)
        return b"".join(piece for piece in wire.body if isinstance(piece, bytes))

    assert body(longer).startswith(body(first.messages).rstrip(b"]}"))


@pytest.mark.parametrize(
    ("name", "fields", "mode"),
    [
        ("anthropic:claude-sonnet-4-5", {}, "schema"),
        ("anthropic:claude-3-5-haiku-latest", {}, "tool"),
        ("anthropic:claude-sonnet-4-20250514", {}, "tool"),
        ("anthropic:claude-sonnet-4-5", {"output_schema": {"type": "object"}}, "tool"),
        ("openai:gpt-5", {}, "schema"),
        ("openai:gpt-3.5-turbo", {}, "tool"),
        ("google:gemini-3-pro", {"tools": (GET,)}, "schema"),
        ("google:gemini-2.5-flash", {}, "schema"),
        ("google:gemini-2.5-flash", {"tools": (GET,)}, "tool"),
        ("bedrock:anthropic.claude-sonnet-4-5-20250929-v1:0", {}, "schema"),
        ("bedrock:us.amazon.nova-pro-v1:0", {}, "tool"),
        ("deepseek:deepseek-chat", {}, "prompt"),
        ("ollama:llama3", {}, "schema"),
        ("ollama:llama3", {"tools": (GET,)}, "tool"),
        ("groq:llama-3.3-70b", {"tools": (GET,)}, "tool"),
    ],
)
def test_each_model_is_asked_in_the_way_that_suits_it(name: str, fields: Any, mode: str) -> None:
    made: Any = provider(name, base_url="http://localhost:1", key="k")

    assert made.dialect.structured(wanted(**fields), name.partition(":")[2]).mode == mode


def test_deepseek_is_asked_for_json_beside_the_prompt() -> None:
    made: Any = provider("deepseek:deepseek-chat", key="k")

    assert built(made.dialect, wanted())["response_format"] == {"type": "json_object"}


def test_a_schema_that_an_api_cannot_take_is_named_with_the_setting_to_change() -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "object"}}, "required": ["tags"]}

    with pytest.raises(ProviderError, match=r"\$\.properties\.tags.*output_mode='tool'") as caught:
        built(dialects()["anthropic"], wanted("schema", output_schema=schema))
    assert caught.value.code == "invalid_schema"


@pytest.mark.parametrize("name", NAMES)
def test_a_tool_that_no_api_can_take_is_named(name: str) -> None:
    odd = ToolSpec("odd", "x", {"anyOf": [{"type": "object", "properties": {}}, {"type": "string"}]})

    with pytest.raises(ProviderError, match=r"'odd', at \$\.anyOf\[1\]") as caught:
        built(dialects()[name], wanted(output_schema=None, tools=(odd,)))
    assert caught.value.code == "invalid_schema"


# ---------------------------------------------------------------------- what is read


@pytest.mark.parametrize("name", NAMES)
def test_a_call_of_the_answer_tool_is_read_as_text_however_the_stream_is_split(name: str) -> None:
    dialect = dialects()[name]
    body = ANSWERS[name]["answer by tool"].reply.body
    cuts = random.Random(7).sample(range(1, len(body)), 40)

    for pieces in [[body], [body[i : i + 1] for i in range(len(body))], *[[body[:at], body[at:]] for at in cuts]]:
        response, text, others = read(AnswerCall(dialect.reader(MODEL), name="final_answer", plain=True), pieces)

        assert msgspec.json.decode(text) == {"name": "Ada"}
        assert [part.text for part in response.parts if isinstance(part, Text)] == [text]
        assert response.stop == "end"
        assert not any(isinstance(each, CallPiece) for each in others)


def test_words_before_an_answer_by_tool_are_kept_as_reasoning() -> None:
    body = ANSWERS["anthropic"]["answer by tool"].reply.body

    response, text, _ = read(AnswerCall(dialects()["anthropic"].reader(MODEL), name="final_answer", plain=True), [body])

    assert response.parts == (Reasoning("Here it is."), Text('{"name": "Ada"}'))
    assert text == '{"name": "Ada"}'


def test_real_calls_beside_an_answer_stay_calls_and_are_counted_without_it() -> None:
    body = ANSWERS["anthropic"]["parallel"].reply.body

    response, text, others = read(AnswerCall(dialects()["anthropic"].reader(MODEL), name="get", plain=True), [body])

    assert response.parts == (Reasoning("Two things."), Text('{"n":1}'), ToolCall("toolu_2", "put", {}))
    assert response.stop == "tool_calls"
    assert {each.index for each in others if isinstance(each, CallPiece)} == {0}
    assert text == '{"n":1}'


def test_any_number_of_answers_by_tool_is_read_in_time_and_the_first_counts() -> None:
    calls = [
        {"index": number, "id": f"c{number}", "function": {"name": "get", "arguments": f'{{"n":{number}}}'}}
        for number in range(50_000)
    ]
    body = Reply.sse({"choices": [{"index": 0, "delta": {"tool_calls": calls}, "finish_reason": "tool_calls"}]}).body

    response, text, _ = read(AnswerCall(dialects()["openai-chat"].reader(MODEL), name="get", plain=True), [body])

    assert (response.parts, response.stop, text) == ((Text('{"n":0}'),), "end", '{"n":0}')


def test_an_answer_in_words_where_a_tool_was_offered_is_an_answer() -> None:
    body = ANSWERS["anthropic"]["structured"].reply.body

    response, text, _ = read(AnswerCall(dialects()["anthropic"].reader(MODEL), name="final_answer", plain=True), [body])

    assert response.parts == (Text('{"name":"Ada"}'),)
    assert text == '{"name":"Ada"}'


def test_half_an_answer_by_tool_is_text_that_does_not_fit() -> None:
    body = ANSWERS["anthropic"]["half a call"].reply.body

    response, _, _ = read(AnswerCall(dialects()["anthropic"].reader(MODEL), name="get", plain=True), [body])

    assert response.parts == (Text('{"city": "Pa'),)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('{"answer": [1, 2]}', "[1, 2]"),
        (' {\n "answer" : {"a": {}}}\n', '{"a": {}}'),
        ('{"answer": "}"}', '"}"'),
        ('{"answer": [{"b": 1}, {}]  } ', '[{"b": 1}, {}]'),
        ("[1, 2]", None),
        ('{"answers": 1}', None),
        ('{"answer": [1', None),
    ],
)
def test_a_value_in_an_object_is_read_without_it_in_pieces_of_any_size(written: str, value: str | None) -> None:
    for size in range(1, len(written) + 1):
        reading = Unwrapping()
        shown = "".join([reading.feed(written[at : at + size]) for at in range(0, len(written), size)])

        assert reading.whole == value, size
        if value is not None:
            assert shown.strip() == value, size


def test_a_list_that_an_api_takes_only_in_an_object_is_read_as_a_list() -> None:
    dialect = dialects()["openai"]
    schema = {"type": "array", "items": {"type": "integer"}}
    request, reading = shape_request(dialect, wanted(output_schema=schema), MODEL)

    assert request.output_schema is not None
    assert request.output_schema["required"] == ["answer"]
    assert reading is WrappedText


# ---------------------------------------------------------------------- turns


@tool
def get(city: str) -> str:
    """Look it up."""
    return f"rain in {city}"


def script(name: str, *cases: str) -> list[Reply]:
    return [ANSWERS[name][case].reply for case in cases]


NAMED = {"anthropic": "anthropic", "openai": "openai", "openai-chat": "openai-chat", "google": "google"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMED)
async def test_a_turn_ends_with_the_typed_value_in_each_mode(name: str, mode: OutputMode) -> None:
    last = "answer by tool" if mode == "tool" else "structured"
    async with ModelServer(script(name, "tool", last)) as server:
        model = provider(f"{name}:{MODEL}", base_url=server.url, key="k")
        agent = Agent(model, tools=[get], output=Person, settings=ModelSettings(output_mode=mode))
        async with Runtime("memory", agents=[agent]) as runtime:
            session = await runtime.session("s")
            async with session.stream("Who?") as turn:
                events = [event async for event in turn]
            result = await turn.result()

    assert result.output == Person("Ada")
    assert [call.tool for call in result.tool_calls] == ["get"], "the answer is no call"
    assert [event.tool for event in events if isinstance(event, ToolStarted)] == ["get"]
    assert "final_answer" not in [event.tool for event in events if isinstance(event, ToolCallDelta)]
    assert msgspec.json.decode("".join([e.text for e in events if isinstance(e, TextDelta)])) == {"name": "Ada"}


class Watching(Plugin):
    id = "watching"

    def __init__(self) -> None:
        self.answers: list[ModelResponse] = []
        self.calls: list[str] = []

    async def transform_response(self, ctx: Any, response: ModelResponse) -> ModelResponse:
        self.answers.append(response)
        return response

    async def before_tool_call(self, ctx: Any) -> None:
        self.calls.append(ctx.tool.name)


async def test_plugins_and_records_know_nothing_of_an_answer_by_tool(tmp_path: Path) -> None:
    watching = Watching()
    async with ModelServer(script("anthropic", "tool", "answer by tool")) as server:
        model = provider(f"anthropic:{MODEL}", base_url=server.url, key="k")
        settings = ModelSettings(output_mode="tool")
        agent = Agent(model, tools=[get], output=Person, settings=settings, plugins=[watching])
        async with Runtime(tmp_path / "a.db", agents=[agent]) as runtime:
            session = await runtime.session("s")
            result = await session.run("Who?")
            history = await session.history()

    assert result.output == Person("Ada")
    assert watching.calls == ["get"]
    assert all(call.name == "get" for answer in watching.answers for call in answer.parts if isinstance(call, ToolCall))
    assert "final_answer" not in repr(history)


async def test_an_answer_beside_a_real_call_waits_for_the_result() -> None:
    """Both in one reply: the call runs, and the model answers again knowing what it gave."""
    both = _both()
    async with ModelServer([both, *script("anthropic", "answer by tool")]) as server:
        model = provider(f"anthropic:{MODEL}", base_url=server.url, key="k")
        agent = Agent(model, tools=[get], output=Person, settings=ModelSettings(output_mode="tool"))
        result = await agent.run("Who?")
        second = server.asked[1].json

    assert result.output == Person("Ada")
    assert [call.tool for call in result.tool_calls] == ["get"]
    [_, answer, results] = second["messages"]
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use"]
    assert answer["content"][0]["text"] == '{"name": "Too early"}'
    assert [block["type"] for block in results["content"]] == ["tool_result"]


def _both() -> Reply:
    blocks = [
        {"type": "tool_use", "id": "toolu_1", "name": "final_answer", "input": {}},
        {"type": "tool_use", "id": "toolu_2", "name": "get", "input": {}},
    ]
    inputs = ['{"name": "Too early"}', '{"city": "Paris"}']
    events: list[tuple[str, Any]] = [("message_start", {"type": "message_start", "message": {"model": MODEL}})]
    for index, block in enumerate(blocks):
        delta = {"type": "input_json_delta", "partial_json": inputs[index]}
        events.append(("content_block_start", {"index": index, "content_block": block}))
        events.append(("content_block_delta", {"index": index, "delta": delta}))
        events.append(("content_block_stop", {"index": index}))
    events.append(("message_delta", {"delta": {"stop_reason": "tool_use"}}))
    return Reply.sse(*events, ("message_stop", {}))


@pytest.mark.parametrize("mode", MODES)
async def test_an_answer_that_does_not_fit_is_mended_in_each_mode(mode: OutputMode) -> None:
    wrong, right = ("tool", "answer by tool") if mode == "tool" else ("text", "structured")
    first = Answer(ANSWERS["anthropic"][wrong].reply, ANSWERS["anthropic"][wrong].response).reply
    if mode == "tool":
        first = Reply(body=first.body.replace(b'"get"', b'"final_answer"'), headers=first.headers)
    async with ModelServer([first, *script("anthropic", right)]) as server:
        model = provider(f"anthropic:{MODEL}", base_url=server.url, key="k")
        result = await Agent(model, output=Person, settings=ModelSettings(output_mode=mode)).run("Who?")
        again = server.asked[1].json["messages"][-1]["content"][-1]["text"]

    assert result.output == Person("Ada")
    assert "does not have the required form" in again


async def test_a_schema_that_cannot_be_sent_ends_the_turn_with_a_code() -> None:
    async with ModelServer([]) as server:
        model = provider(f"anthropic:{MODEL}", base_url=server.url, key="k")
        agent = Agent(model, output=dict[str, int], settings=ModelSettings(output_mode="schema"))
        async with Runtime("memory", agents=[agent]) as runtime:
            result = await (await runtime.session("s")).run("Who?")

    assert isinstance(result.outcome, ProviderFailed)
    assert result.outcome.code == "invalid_schema"
    assert server.asked == []


async def test_prompted_answers_are_read_from_fences_and_out_of_prose() -> None:
    def reply(asked: Asked) -> Reply:
        text = 'Here you are:\n\n```json\n{"name": "Ada"}\n```\nAnything else?'
        return Reply.sse({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}, done=True)

    async with ModelServer(reply) as server:
        model = provider("llamacpp:tiny", base_url=server.url)
        result = await Agent(model, output=Person, settings=ModelSettings(output_mode="prompt")).run("Who?")

    assert result.output == Person("Ada")
    assert len(server.asked) == 1


# ---------------------------------------------------------------------- kills


def killable(url: str, mode: OutputMode) -> Agent[Person]:
    made = provider(f"anthropic:{MODEL}", base_url=url, key="k")
    return Agent(made, tools=[get], output=Person, settings=ModelSettings(output_mode=mode))


async def live(url: str, path: str, mode: OutputMode) -> None:
    """What the child process does until it is killed."""
    async with Runtime(path, agents=[killable(url, mode)]) as runtime:
        await (await runtime.session("s")).run("Who?", key="once")


@pytest.mark.kill
@pytest.mark.parametrize("mode", MODES)
async def test_a_typed_answer_that_a_kill_cuts_off_is_asked_for_again_in_the_same_way(
    mode: OutputMode, tmp_path: Path
) -> None:
    """SIGKILL in the middle of the answer: the recorded call does not run again, and the turn ends with the value."""
    path, last = (
        str(tmp_path / "a.db"),
        ANSWERS["anthropic"]["answer by tool" if mode == "tool" else "structured"].reply,
    )
    children: list[asyncio.subprocess.Process] = []

    def reply(asked: Asked) -> Reply:
        if b"rain in Paris" not in asked.body:
            return ANSWERS["anthropic"]["tool"].reply
        if len(server.asked) > 2:
            return last
        half = last.body.index(b"Ada")
        return msgspec.structs.replace(last, upto=half, end="hang", then=lambda: children[0].kill())

    async with ModelServer(reply) as server:
        work = f"live({server.url!r}, {path!r}, {mode!r})"
        code = f"import asyncio; from tests.providers.test_structured import live; asyncio.run({work})"
        children.append(await asyncio.create_subprocess_exec(sys.executable, "-c", code))
        assert await children[0].wait() == -signal.SIGKILL
        async with Runtime(path, agents=[killable(server.url, mode)]) as runtime:
            result = await (await runtime.session("s")).run("Who?", key="once")

    assert result.output == Person("Ada")
    assert [call.tool for call in result.tool_calls] == ["get"]
    assert len(server.asked) == 3
    assert server.asked[1].body == server.asked[2].body
    assert result.usage.unknown == 1
