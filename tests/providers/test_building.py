"""What is sent: requests as each dialect writes them, sans-IO."""

from __future__ import annotations

import itertools
import random
import re
import tracemalloc
from typing import Any

import msgspec
import pytest

from perdure.errors import ProviderError
from perdure.model.llm import ModelRequest, ModelSettings
from perdure.model.message import (
    Audio,
    Document,
    FileRef,
    Image,
    Message,
    Part,
    ProviderPart,
    Reasoning,
    Stored,
    Text,
    ToolCall,
    ToolResult,
)
from perdure.model.tool import ToolSpec
from perdure.providers.anthropic import MAX_TOKENS
from perdure.providers.dialect import Dialect
from perdure.providers.openai_chat import ChatCompletions, Quirks
from tests.fuzzing import cases
from tests.providers.wire import ANSWERS, MODEL, dialects

NAMES = list(ANSWERS)
PAIRS = list(itertools.permutations(NAMES, 2))
TOOL = ToolSpec("get", "Look it up.", {"type": "object", "properties": {"city": {"type": "string"}}})


def body(dialect: Dialect, request: ModelRequest, model: str = MODEL) -> bytes:
    wire = dialect.build(request, model)
    assert all(isinstance(piece, bytes) for piece in wire.body)
    assert wire.size == sum(len(piece) for piece in wire.body if isinstance(piece, bytes))
    return b"".join(piece for piece in wire.body if isinstance(piece, bytes))


def sent(dialect: Dialect, messages: list[Message], **fields: Any) -> Any:
    return msgspec.json.decode(body(dialect, ModelRequest(messages, **fields)))


def history(name: str) -> list[Message]:
    """A conversation that this provider's model had: it thought, called a tool, and answered."""
    thought, call = ANSWERS[name]["reasoning"].response, ANSWERS[name]["tool"].response
    [asked] = [part for part in call.parts if isinstance(part, ToolCall)]
    asked = ToolCall(asked.id or "c-1", asked.name, asked.args, asked.raw, asked.replay)
    return [
        Message("system", "Be brief."),
        Message("user", "How is Paris?"),
        Message("assistant", (*[p for p in thought.parts if isinstance(p, ProviderPart)], asked)),
        Message("tool", (ToolResult(asked.id, "get", {"weather": "fine"}),)),
        Message("assistant", thought.parts),
        Message("user", "And now?"),
    ]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_conversation_goes_on_with_another_provider_without_what_only_the_first_understands(
    first: str, second: str
) -> None:
    said = history(first)
    own = [part for message in said for part in message.parts if isinstance(part, ProviderPart)]

    text = body(dialects()[second], ModelRequest(said)).decode()

    assert "c2ln" not in text, "a signature"
    assert "b3BhcXVl" not in text, "redacted reasoning"
    assert "Z2VoZWlt" not in text, "encrypted reasoning"
    assert "First, look." in text, "reasoning in words"
    assert "Paris" in text
    assert own


@pytest.mark.parametrize("name", [name for name in NAMES if name != "openai-chat"])
def test_a_provider_gets_its_own_parts_back_byte_for_byte(name: str) -> None:
    said = history(name)

    text = body(dialects()[name], ModelRequest(said)).decode()

    for part in [part for message in said for part in message.parts if isinstance(part, ProviderPart)]:
        assert part.body in text
    if name == "google":
        assert text.count('"thoughtSignature":"c2ln"') == 3, "of the call, and twice of the text"


@pytest.mark.parametrize("name", NAMES)
def test_every_call_has_its_result_under_the_id_that_the_call_has(name: str) -> None:
    calls = (ToolCall("turn-1.1.0'", "get", {"n": 1}), ToolCall("x" * 90, "get", {"n": 2}))
    said = [
        Message("user", "go"),
        Message("assistant", calls),
        *[Message("tool", (ToolResult(call.id, call.name, "ok"),)) for call in calls],
    ]

    text = body(dialects()[name], ModelRequest(said)).decode()

    if name == "google":
        assert text.count('"name":"get"') == 4  # paired by name and order
    else:
        field = {"openai": "call_id", "bedrock": "toolUseId"}.get(name)
        ids = _ids(msgspec.json.decode(text), {field} if field else {"id", "tool_use_id", "tool_call_id"})
        assert len(ids) == 4
        assert ids[:2] == ids[2:]
        assert len(set(ids)) == 2
        assert all(len(each) <= 64 for each in ids)


def _ids(value: Any, names: set[str]) -> list[str]:
    if isinstance(value, dict):
        own = [each for key, each in value.items() if key in names and isinstance(each, str)]
        return own + [id for key, each in value.items() if key not in names for id in _ids(each, names)]
    return [id for each in value for id in _ids(each, names)] if isinstance(value, list) else []


MARKERS = (b',"cache_control":{"type":"ephemeral"}', b',{"cachePoint":{"type":"default"}}')


@pytest.mark.parametrize("name", NAMES)
def test_a_request_begins_as_the_one_before_it_did(name: str) -> None:
    """What the provider cached of one request is the beginning of the next, also after a restart (a fresh dialect)."""
    said = history(name)
    longer = [*said, Message("assistant", "Rain."), Message("user", "Thanks.")]

    first = body(dialects()[name], ModelRequest(said, (TOOL,), session_id="s"))
    second = body(dialects()[name], ModelRequest(longer, (TOOL,), session_id="s"))

    for marker in MARKERS:
        first, second = first.replace(marker, b""), second.replace(marker, b"")
    assert second.startswith(first.rstrip(b"]}"))


@pytest.mark.parametrize("name", NAMES)
def test_what_was_encoded_once_is_not_encoded_again(name: str) -> None:
    dialect = dialects()[name]
    said = history(name)
    before = dialect.build(ModelRequest(said), MODEL)

    assert dialect.build(ModelRequest(said), MODEL) == before
    assert dialect.build(ModelRequest(list(said)), MODEL) == before


def spoken(chance: random.Random, number: int) -> Message:
    """Anything that may come next in a conversation, in any order."""
    picture = Image(Stored("d" * 64, 30), "image/png")
    return chance.choice(
        [
            Message("user", f"question {number}"),
            Message("user", (Text("see"), picture)),
            Message("assistant", f"answer {number}"),
            Message("assistant", (Text("so"), ToolCall(f"call_{number}", "get", {"n": number}))),
            Message("tool", (ToolResult(f"call_{number}", "get", {"n": number}),)),
            Message("assistant", ()),
            Message("system", f"note {number}"),
        ]
    )


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(cases(5, 200)))
@pytest.mark.parametrize("name", NAMES)
def test_what_is_taken_from_the_request_before_is_what_would_be_written_anew(name: str, seed: int) -> None:
    """While a session grows, is cut short and told other instructions, beside another one."""
    chance, long_lived = random.Random(seed), dialects()[name]
    sessions: dict[str, list[Message]] = {"": [], "s": [], "t": []}

    for number in range(60):
        id = chance.choice(list(sessions))
        said = sessions[id]
        said += [spoken(chance, number) for _ in range(chance.randrange(4))]
        if chance.random() < 0.1:
            del said[chance.randrange(len(said) + 1) :]
        if said and chance.random() < 0.1:
            said[chance.randrange(len(said))] = spoken(chance, number)
        asked = [Message("system", f"It is {number // 10} o'clock."), *said, Message("user", "go on")]
        request = ModelRequest(asked, (TOOL,), session_id=id)

        assert long_lived.build(request, MODEL) == dialects()[name].build(request, MODEL), number


@pytest.mark.parametrize("name", ["anthropic", "google", "bedrock"])
def test_what_is_remembered_of_requests_is_bounded(name: str) -> None:
    dialect: Any = dialects()[name]
    text = "x" * 100_000
    for number in range(400):
        said = [Message(role, f"{text}{number}") for role in ("user", "assistant") * 2] + [Message("user", "and?")]
        dialect.build(ModelRequest(said, session_id=f"s-{number}"), MODEL)

    kept = dialect._conversations._settled.values()
    assert 0 < sum(each.size for each in kept) <= 16_000_000


def test_a_call_that_another_model_made_has_the_field_that_deepseek_insists_on() -> None:
    deepseek = ChatCompletions("deepseek", Quirks(reasoning_back="reasoning_content"))
    thought = ProviderPart("deepseek", MODEL, "reasoning", '"Look."', "Look.")
    call = ToolCall("c-1", "get")

    _, own, foreign, words = sent(
        deepseek,
        [
            Message("user", "x"),
            Message("assistant", (thought, call)),
            Message("assistant", (call,)),
            Message("assistant", "Done."),
        ],
    )["messages"]

    assert (own["reasoning_content"], foreign["reasoning_content"]) == ("Look.", "")
    assert "reasoning_content" not in words


UNSIGNED = {
    "anthropic": "thinking that was cut off before its signature",
    "openai": "reasoning that is not encrypted",
    "bedrock": "reasoning without a signature",
}


@pytest.mark.parametrize("name", UNSIGNED)
def test_reasoning_that_the_api_would_not_take_back_goes_back_in_words(name: str) -> None:
    parts = ANSWERS[name][UNSIGNED[name]].response.parts
    [thought] = [part.text for part in parts if isinstance(part, Reasoning)]

    said = body(dialects()[name], ModelRequest([Message("user", "x"), Message("assistant", parts)])).decode()

    assert f"<thinking>\\n{thought}\\n</thinking>" in said
    assert not re.search(r'"type":"(thinking|reasoning)"|reasoningContent|rs_1', said)


def test_reasoning_after_which_nothing_was_said_is_not_sent_to_openai() -> None:
    thought, _ = ANSWERS["openai"]["reasoning"].response.parts
    talk = [Message("user", "x"), Message("assistant", (thought,)), Message("user", "go on")]

    alone = sent(dialects()["openai"], talk)["input"]
    followed = sent(dialects()["openai"], [*talk[:1], Message("assistant", (thought, ToolCall("c", "get")))])["input"]

    assert [item["role"] for item in alone] == ["user", "user"]
    assert [item.get("type") for item in followed] == [None, "reasoning", "function_call"]


def test_calls_of_another_model_are_marked_as_unsigned_for_google() -> None:
    own = {"dialect": "google", "signature": "c2ln"}
    said = sent(
        dialects()["google"],
        [
            Message("user", "x"),
            Message("assistant", (ToolCall("a", "get"), ToolCall("b", "put"))),
            Message("tool", (ToolResult("a", "get", "1"), ToolResult("b", "put", "2"))),
            Message("assistant", (ToolCall("c", "get", {}, None, own), ToolCall("d", "put"))),
        ],
    )["contents"]

    signatures = [[part.get("thoughtSignature") for part in said[at]["parts"]] for at in (1, 3)]
    assert signatures == [["c2tpcF90aG91Z2h0X3NpZ25hdHVyZV92YWxpZGF0b3I=", None], ["c2ln", None]]


def test_what_a_compatible_server_put_beside_a_call_goes_back_to_it_alone() -> None:
    call = ANSWERS["openai-chat"]["a signature beside a call"].response.parts
    said = [Message("user", "x"), Message("assistant", call)]

    [back] = sent(dialects()["openai-chat"], said)["messages"][1]["tool_calls"]

    assert back["extra_content"] == {"google": {"thought_signature": "c2ln"}}
    assert all(b"c2ln" not in body(dialects()[name], ModelRequest(said)) for name in NAMES if name != "openai-chat")
    assert b"c2ln" not in body(ChatCompletions("groq"), ModelRequest(said))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_remembered_of_large_messages_is_bounded_by_their_size(name: str) -> None:
    dialect = dialects()[name]
    tracemalloc.start()
    try:
        for number in range(400):
            said = Message("user", str(number) * 330_000)
            dialect.build(ModelRequest([said], session_id=f"s-{number}"), MODEL)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held < 150_000_000, "of 370 MB, once as they were said and once as they are sent"


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_answer_is_not_sent_back(name: str) -> None:
    said = [Message("user", "a"), Message("assistant", ()), Message("assistant", (Text(""),)), Message("user", "b")]

    text = body(dialects()[name], ModelRequest(said)).decode()

    assert "assistant" not in text
    assert '"role":"model"' not in text


# ---------------------------------------------------------------------- settings

ALL = ModelSettings(
    max_tokens=50, temperature=0.5, top_p=0.9, reasoning="high", tool_choice="get", parallel_tool_calls=False
)


def test_settings_of_anthropic() -> None:
    said = sent(dialects()["anthropic"], [Message("user", "x")], tools=(TOOL,), settings=ALL)

    assert said["max_tokens"] == 50
    assert (said["temperature"], said["top_p"]) == (0.5, 0.9)
    assert said["thinking"] == {"type": "adaptive"}
    assert said["output_config"] == {"effort": "high"}
    assert said["tool_choice"] == {"type": "tool", "name": "get", "disable_parallel_tool_use": True}


BUDGETED = ("claude-3-7-sonnet-latest", "claude-opus-4-20250514", "claude-sonnet-4-5", "claude-haiku-4-5@20251001")
ADAPTIVE = ("claude-opus-4-6", "claude-sonnet-4-6", "claude-opus-4-7-20260416", "claude-sonnet-5", "claude-fable-5-1")


def thinking(name: str, model: str, **settings: Any) -> Any:
    request = ModelRequest([Message("user", "x")], settings=ModelSettings(**settings))
    return msgspec.json.decode(body(dialects()[name], request, model))


@pytest.mark.parametrize("model", BUDGETED)
def test_claude_before_4_6_is_told_an_effort_as_a_number_of_tokens(model: str) -> None:
    """It refuses the way in which later models are asked."""
    said = thinking("anthropic", model, reasoning="low")
    assert said["thinking"] == {"type": "enabled", "budget_tokens": 2048}
    assert said["max_tokens"] == MAX_TOKENS + 2048  # as long an answer as without
    assert "output_config" not in said

    said = thinking("bedrock", f"eu.anthropic.{model}-v1:0", reasoning="low")
    assert said["additionalModelRequestFields"]["thinking"] == {"type": "enabled", "budget_tokens": 2048}
    assert "outputConfig" not in said


@pytest.mark.parametrize("model", ADAPTIVE)
def test_claude_from_4_6_on_is_told_an_effort_by_name(model: str) -> None:
    """It is deprecated or refused there to give a number of tokens."""
    said = thinking("anthropic", model, reasoning="minimal")
    assert (said["thinking"], said["output_config"]) == ({"type": "adaptive"}, {"effort": "low"})
    assert said["max_tokens"] == MAX_TOKENS

    said = thinking("bedrock", f"anthropic.{model}", reasoning="minimal")
    assert said["additionalModelRequestFields"]["thinking"] == {"type": "adaptive"}
    assert said["outputConfig"] == {"effort": "low"}


def test_reasoning_leaves_room_for_an_answer_within_max_tokens() -> None:
    said = thinking("anthropic", "claude-sonnet-4-5", reasoning="high", max_tokens=6000)
    assert (said["max_tokens"], said["thinking"]["budget_tokens"]) == (6000, 3000)

    said = thinking("anthropic", "claude-sonnet-4-5", reasoning=10_000)
    assert (said["max_tokens"], said["thinking"]["budget_tokens"]) == (MAX_TOKENS + 10_000, 10_000)

    with pytest.raises(ProviderError, match="max_tokens") as caught:
        thinking("anthropic", "claude-sonnet-4-5", reasoning="low", max_tokens=1024)
    assert caught.value.code == "invalid_settings"


def test_settings_of_openai() -> None:
    said = sent(dialects()["openai"], [Message("user", "x")], tools=(TOOL,), settings=ALL)

    assert said["max_output_tokens"] == 50
    assert said["store"] is False
    assert said["reasoning"]["effort"] == "high"
    assert said["tool_choice"] == {"type": "function", "name": "get"}
    assert said["parallel_tool_calls"] is False


def test_settings_of_chat_completions() -> None:
    said = sent(
        dialects()["openai-chat"],
        [Message("user", "x")],
        tools=(TOOL,),
        settings=ModelSettings(max_tokens=50, seed=7, stop=("END",), reasoning="low", tool_choice="required"),
    )

    assert (said["max_completion_tokens"], said["seed"], said["stop"]) == (50, 7, ["END"])
    assert said["reasoning_effort"] == "low"
    assert said["tool_choice"] == "required"
    assert said["stream_options"] == {"include_usage": True}


def test_settings_of_google() -> None:
    said = sent(dialects()["google"], [Message("user", "x")], tools=(TOOL,), settings=ALL)

    assert said["generationConfig"]["maxOutputTokens"] == 50
    assert said["generationConfig"]["thinkingConfig"] == {"thinkingLevel": "high", "includeThoughts": True}
    assert said["toolConfig"]["functionCallingConfig"] == {"mode": "ANY", "allowedFunctionNames": ["get"]}


def test_settings_of_bedrock() -> None:
    said = sent(dialects()["bedrock"], [Message("user", "x")], tools=(TOOL,), settings=ALL)

    assert said["inferenceConfig"] == {"maxTokens": 50, "temperature": 0.5, "topP": 0.9}
    assert said["toolConfig"]["toolChoice"] == {"tool": {"name": "get"}}


@pytest.mark.parametrize("name", NAMES)
def test_no_tool_may_be_called_in_a_last_step(name: str) -> None:
    text = body(dialects()[name], ModelRequest([Message("user", "x")], (TOOL,), tool_choice="none")).decode()
    assert {"bedrock": '"auto"'}.get(name, "one") in text.lower()


@pytest.mark.parametrize("name", NAMES)
def test_extra_goes_into_the_request_as_it_is(name: str) -> None:
    said = sent(dialects()[name], [Message("user", "x")], settings=ModelSettings(extra={"future_field": [1]}))
    assert said["future_field"] == [1]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("anthropic", ModelSettings(seed=1)),
        ("openai", ModelSettings(seed=1)),
        ("openai", ModelSettings(stop=("x",))),
        ("openai", ModelSettings(reasoning=2000)),
        ("openai-chat", ModelSettings(reasoning=2000)),
        ("bedrock", ModelSettings(seed=1)),
    ],
)
def test_a_setting_that_an_api_does_not_have_is_refused_by_name(name: str, settings: ModelSettings) -> None:
    with pytest.raises(ProviderError) as caught:
        dialects()[name].build(ModelRequest([Message("user", "x")], settings=settings), MODEL)
    assert caught.value.code == "invalid_settings"


# ---------------------------------------------------------------------- files

BYTES = Stored("d1", 3)
TAKES: dict[str, list[Part]] = {
    "anthropic": [
        Image(BYTES, "image/png"),
        Image.url("https://x.example/a.png"),
        Document(BYTES, "application/pdf", "a.pdf"),
        FileRef("anthropic", "file_1", "image/png"),
    ],
    "openai": [
        Image(BYTES, "image/png"),
        Document(BYTES, "application/pdf"),
        Audio(BYTES, "audio/wav"),
        FileRef("openai", "file-1"),
    ],
    "openai-chat": [Image(BYTES, "image/png"), Audio(BYTES, "audio/mpeg"), Document(BYTES, "application/pdf", "a.pdf")],
    "google": [
        Image(BYTES, "image/heic"),
        Document(BYTES, "application/pdf"),
        Audio(BYTES, "audio/flac"),
        FileRef("google", "https://files/1", "image/png"),
    ],
    "bedrock": [Image(BYTES, "image/png"), Document(BYTES, "text/csv", "a_b.csv"), Audio(BYTES, "audio/wav")],
}
REFUSES: dict[str, list[Part]] = {
    "anthropic": [Audio(BYTES, "audio/wav"), Image(BYTES, "image/tiff"), FileRef("openai", "file-1")],
    "openai": [Audio(BYTES, "audio/flac"), FileRef("anthropic", "file_1")],
    "openai-chat": [Audio(BYTES, "audio/flac"), FileRef("openai", "x"), Document.url("https://x.example/a.pdf")],
    "google": [FileRef("openai", "x"), Image(BYTES)],
    "bedrock": [Image.url("https://x.example/a.png"), FileRef("bedrock", "x"), Image(BYTES, "image/tiff")],
}


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in TAKES.items() for part in parts])
def test_a_file_is_taken_in_inputs_and_in_results(name: str, part: Any) -> None:
    said = [
        Message("user", (Text("See:"), part)),
        Message("assistant", (ToolCall("c1", "get", {}),)),
        Message("tool", (ToolResult("c1", "get", "shown", files=(part,)),)),
    ]
    wire = dialects()[name].build(ModelRequest(said), MODEL)

    stored = [piece for piece in wire.body if isinstance(piece, Stored)]
    assert len(stored) == (2 if isinstance(getattr(part, "source", None), Stored) else 0)
    joined = b"".join(b"AAAA" if isinstance(piece, Stored) else piece for piece in wire.body)
    assert msgspec.json.decode(joined)
    assert wire.size == len(joined)


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in REFUSES.items() for part in parts])
def test_a_file_that_an_api_cannot_take_is_named(name: str, part: Any) -> None:
    with pytest.raises(ProviderError, match=type(part).__name__) as caught:
        dialects()[name].build(ModelRequest([Message("user", (part,))]), MODEL)
    assert caught.value.code == "invalid_input"


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in REFUSES.items() for part in parts])
def test_a_file_that_an_api_cannot_take_does_not_spoil_what_comes_after_it(name: str, part: Any) -> None:
    """A committed session can always be continued: in an earlier input and in a result it is told of in words."""
    said = [
        Message("user", (Text("See:"), part)),
        Message("assistant", (ToolCall("c1", "get", {}),)),
        Message("tool", (ToolResult("c1", "get", {"a": 1}, files=(Image(BYTES, "image/png", "fine.png"), part)),)),
        Message("user", "And now?"),
    ]
    wire = dialects()[name].build(ModelRequest(said), MODEL)

    joined = b"".join(b"AAAA" if isinstance(piece, Stored) else piece for piece in wire.body)
    assert msgspec.json.decode(joined)
    assert joined.count(b"is not shown: this model cannot take it") == 2
    assert joined.count(b"AAAA") == 1, "the file that it can take"
