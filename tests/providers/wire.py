"""What each provider's API sends, by hand from its documentation, and what it must be read as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from perdure.model.llm import ModelResponse, Usage
from perdure.model.message import ProviderPart, Reasoning, Text, ToolCall
from perdure.providers.anthropic import AnthropicMessages
from perdure.providers.bedrock import BedrockConverse
from perdure.providers.dialect import Dialect
from perdure.providers.google import GoogleGenerate
from perdure.providers.openai_chat import ChatCompletions, Quirks
from perdure.providers.openai_responses import OpenAIResponses
from perdure.testing.model_server import Reply, frames

MODEL = "m-1"


class Answer(Struct, frozen=True):
    """A stream and the answer that it is."""

    reply: Reply
    response: ModelResponse
    reasoning: str = ""


class Failure(Struct, frozen=True):
    """A stream or a status, and what it means for the turn."""

    reply: Reply
    code: str
    retryable: bool = False
    after: float | None = None
    says: str = ""


def dialects() -> dict[str, Dialect]:
    return {
        "anthropic": AnthropicMessages(),
        "openai": OpenAIResponses(),
        "openai-chat": ChatCompletions("openai-chat", Quirks(max_tokens="max_completion_tokens", documents=True)),
        "google": GoogleGenerate(),
        "bedrock": BedrockConverse(),
    }


def said(text: str, usage: Usage | None, model: str = MODEL, stop: Any = "end") -> ModelResponse:
    return ModelResponse(parts=(Text(text),) if text else (), usage=usage, stop=stop, model=model)


def called(usage: Usage | None, *calls: tuple[str, str, dict[str, Any]], model: str = MODEL) -> ModelResponse:
    return ModelResponse(
        parts=tuple(ToolCall(id, name, args) for id, name, args in calls), usage=usage, stop="tool_calls", model=model
    )


# ---------------------------------------------------------------------- Anthropic


def _anthropic(*blocks: tuple[dict[str, Any], list[dict[str, Any]]], stop: str = "end_turn", out: int = 7) -> Reply:
    usage = {"input_tokens": 12, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 5, "output_tokens": 1}
    start = {"type": "message", "role": "assistant", "model": MODEL, "content": [], "usage": usage}
    events: list[tuple[str, dict[str, Any]]] = [
        ("message_start", {"type": "message_start", "message": start}),
        ("ping", {"type": "ping"}),
    ]
    for index, (block, deltas) in enumerate(blocks):
        events.append(("content_block_start", {"index": index, "content_block": block}))
        events += [("content_block_delta", {"index": index, "delta": delta}) for delta in deltas]
        events.append(("content_block_stop", {"index": index}))
    ending = {"delta": {"stop_reason": stop, "stop_sequence": None}, "usage": {"output_tokens": out}}
    return Reply.sse(*[(n, {"type": n, **d}) for n, d in [*events, ("message_delta", ending), ("message_stop", {})]])


def _nameless(reply: Reply) -> Reply:
    lines = [line for line in reply.body.splitlines(keepends=True) if not line.startswith(b"event:")]
    return Reply(body=b"".join(lines), headers=reply.headers)


def _text(*pieces: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return {"type": "text", "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces]


def _tool(id: str, name: str, *pieces: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    start = {"type": "tool_use", "id": id, "name": name, "input": {}}
    return start, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]


A_USAGE = Usage(12, 7, 100, 5)
THINKING = '{"type":"thinking","thinking":"First, look.","signature":"c2ln"}'
REDACTED = '{"type":"redacted_thinking","data":"b3BhcXVl"}'

FOUND = {
    "type": "web_search_tool_result",
    "tool_use_id": "srvtoolu_1",
    "content": [
        {
            "type": "web_search_result",
            "title": "Paris today",
            "url": "https://w.example/paris",
            "encrypted_content": "Z2VoZWlt",
            "page_age": None,
        }
    ],
}
RAN = {
    "type": "bash_code_execution_tool_result",
    "tool_use_id": "srvtoolu_2",
    "content": {
        "type": "bash_code_execution_result",
        "stdout": "42\n",
        "stderr": "",
        "return_code": 0,
        "content": [],
    },
}

ECHOED = {
    "type": "mcp_tool_result",
    "tool_use_id": "mcptoolu_1",
    "is_error": False,
    "content": [{"type": "text", "text": "you said x"}],
}

ANTHROPIC_ANSWERS = {
    "text": Answer(_anthropic(_text("Grüße, ", "Welt 😀")), said("Grüße, Welt 😀", A_USAGE)),
    "tool": Answer(
        _anthropic(_tool("toolu_1", "get", "", '{"city": "Pa', 'ris"}'), stop="tool_use"),
        called(A_USAGE, ("toolu_1", "get", {"city": "Paris"})),
    ),
    "parallel": Answer(
        _anthropic(
            _text("Two things."), _tool("toolu_1", "get", '{"n":1}'), _tool("toolu_2", "put", "{}"), stop="tool_use"
        ),
        ModelResponse(
            parts=(Text("Two things."), ToolCall("toolu_1", "get", {"n": 1}), ToolCall("toolu_2", "put", {})),
            usage=A_USAGE,
            stop="tool_calls",
            model=MODEL,
        ),
    ),
    "reasoning": Answer(
        _anthropic(
            (
                {"type": "thinking", "thinking": "", "signature": ""},
                [
                    {"type": "thinking_delta", "thinking": "First, "},
                    {"type": "thinking_delta", "thinking": "look."},
                    {"type": "signature_delta", "signature": "c2ln"},
                ],
            ),
            ({"type": "redacted_thinking", "data": "b3BhcXVl"}, []),
            _text("Done."),
        ),
        ModelResponse(
            parts=(
                ProviderPart("anthropic", MODEL, "thinking", THINKING, "First, look."),
                ProviderPart("anthropic", MODEL, "redacted_thinking", REDACTED),
                Text("Done."),
            ),
            usage=A_USAGE,
            model=MODEL,
        ),
        "First, look.",
    ),
    "structured": Answer(_anthropic(_text('{"name":', '"Ada"}')), said('{"name":"Ada"}', A_USAGE)),
    "refusal": Answer(_anthropic(_text("I can't."), stop="refusal"), said("I can't.", A_USAGE, stop="filtered")),
    "length": Answer(_anthropic(_text("And then"), stop="max_tokens"), said("And then", A_USAGE, stop="length")),
    "paused": Answer(
        _anthropic(
            (
                {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
                [{"type": "input_json_delta", "partial_json": '{"query":"x"}'}],
            ),
            stop="pause_turn",
        ),
        ModelResponse(
            parts=(
                ProviderPart(
                    "anthropic",
                    MODEL,
                    "server_tool_use",
                    '{"type":"server_tool_use","id":"srvtoolu_1","name":"web_search","input":{"query":"x"}}',
                    'web_search: {"query":"x"}',
                ),
            ),
            usage=A_USAGE,
            stop="paused",
            model=MODEL,
        ),
    ),
    "web search": Answer(
        _anthropic(
            (
                {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
                [{"type": "input_json_delta", "partial_json": '{"query":"Paris"}'}],
            ),
            (FOUND, []),
            _text("It rains."),
        ),
        ModelResponse(
            parts=(
                ProviderPart(
                    "anthropic",
                    MODEL,
                    "server_tool_use",
                    '{"type":"server_tool_use","id":"srvtoolu_1","name":"web_search","input":{"query":"Paris"}}',
                    'web_search: {"query":"Paris"}',
                ),
                ProviderPart(
                    "anthropic",
                    MODEL,
                    "web_search_tool_result",
                    msgspec.json.encode(FOUND).decode(),
                    "web_search found:\nParis today https://w.example/paris",
                ),
                Text("It rains."),
            ),
            usage=A_USAGE,
            model=MODEL,
        ),
    ),
    "code execution": Answer(
        _anthropic((RAN, []), _text("42")),
        ModelResponse(
            parts=(
                ProviderPart(
                    "anthropic",
                    MODEL,
                    "bash_code_execution_tool_result",
                    msgspec.json.encode(RAN).decode(),
                    "bash_code_execution returned:\n42\n",
                ),
                Text("42"),
            ),
            usage=A_USAGE,
            model=MODEL,
        ),
    ),
    "answer by tool": Answer(
        _anthropic(_text("Here it is."), _tool("toolu_9", "final_answer", '{"name": ', '"Ada"}'), stop="tool_use"),
        ModelResponse(
            parts=(Text("Here it is."), ToolCall("toolu_9", "final_answer", {"name": "Ada"})),
            usage=A_USAGE,
            stop="tool_calls",
            model=MODEL,
        ),
    ),
    "empty": Answer(_anthropic(), said("", A_USAGE)),
    "a conversation that the provider shortened": Answer(
        _anthropic(
            (
                {"type": "compaction", "content": None},
                [
                    {"type": "compaction_delta", "content": "They spoke "},
                    {"type": "compaction_delta", "content": "of rain."},
                ],
            ),
            _text("Done."),
        ),
        ModelResponse(
            parts=(
                ProviderPart(
                    "anthropic",
                    MODEL,
                    "compaction",
                    '{"type":"compaction","content":"They spoke of rain."}',
                ),
                Text("Done."),
            ),
            usage=A_USAGE,
            model=MODEL,
        ),
    ),
    "events without names": Answer(_nameless(_anthropic(_text("Hi"))), said("Hi", A_USAGE)),
    "a beginning that says nothing": Answer(
        Reply.sse(
            *[
                (event["type"], event)
                for event in (
                    {"type": "message_start"},
                    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
                    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}},
                    {"type": "content_block_stop", "index": 0},
                    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}},
                    {"type": "message_stop"},
                )
            ]
        ),
        said("Hi", Usage(None, 7)),
    ),
    "cited text": Answer(
        _anthropic(
            (
                {"type": "text", "text": "", "citations": []},
                [
                    {"type": "citations_delta", "citation": {"type": "char_location", "cited_text": "rain"}},
                    {"type": "text_delta", "text": "It rains."},
                ],
            )
        ),
        said("It rains.", A_USAGE),
    ),
    "thinking that was cut off before its signature": Answer(
        _anthropic(
            ({"type": "thinking", "thinking": "", "signature": ""}, [{"type": "thinking_delta", "thinking": "First"}]),
            stop="max_tokens",
        ),
        ModelResponse(parts=(Reasoning("First"),), usage=A_USAGE, stop="length", model=MODEL),
        "First",
    ),
    "thinking that is not shown": Answer(
        _anthropic(
            (
                {"type": "thinking", "thinking": "", "signature": ""},
                [{"type": "thinking_delta", "thinking": ""}, {"type": "signature_delta", "signature": "c2ln"}],
            ),
            _text("Done."),
        ),
        ModelResponse(
            parts=(
                ProviderPart("anthropic", MODEL, "thinking", '{"type":"thinking","thinking":"","signature":"c2ln"}'),
                Text("Done."),
            ),
            usage=A_USAGE,
            model=MODEL,
        ),
    ),
    "blocks that begin with what they say": Answer(
        _anthropic(
            ({"type": "thinking", "thinking": "First, look.", "signature": "c2ln"}, []),
            ({"type": "text", "text": "Two"}, [{"type": "text_delta", "text": " things."}]),
            ({"type": "tool_use", "id": "toolu_1", "name": "get", "input": {"n": 1}}, []),
            stop="tool_use",
        ),
        ModelResponse(
            parts=(
                ProviderPart("anthropic", MODEL, "thinking", THINKING, "First, look."),
                Text("Two things."),
                ToolCall("toolu_1", "get", {"n": 1}),
            ),
            usage=A_USAGE,
            stop="tool_calls",
            model=MODEL,
        ),
        "First, look.",
    ),
    "a tool on a server of the user's": Answer(
        _anthropic(
            (
                {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "echo", "server_name": "own", "input": {}},
                [{"type": "input_json_delta", "partial_json": '{"q":"x"}'}],
            ),
            (ECHOED, []),
            _text("x"),
        ),
        ModelResponse(
            parts=(
                ProviderPart(
                    "anthropic",
                    MODEL,
                    "mcp_tool_use",
                    '{"type":"mcp_tool_use","id":"mcptoolu_1","name":"echo","server_name":"own","input":{"q":"x"}}',
                    'echo: {"q":"x"}',
                ),
                ProviderPart(
                    "anthropic",
                    MODEL,
                    "mcp_tool_result",
                    msgspec.json.encode(ECHOED).decode(),
                    "mcp returned:\nyou said x",
                ),
                Text("x"),
            ),
            usage=A_USAGE,
            model=MODEL,
        ),
    ),
    "half a call": Answer(
        _anthropic(_tool("toolu_1", "get", '{"city": "Pa'), stop="tool_use"),
        ModelResponse(
            parts=(ToolCall("toolu_1", "get", {}, '{"city": "Pa'),), usage=A_USAGE, stop="tool_calls", model=MODEL
        ),
    ),
}


def _anthropic_error(status: int, kind: str, message: str, **headers: str) -> Reply:
    return Reply.error(status, {"type": "error", "error": {"type": kind, "message": message}}, **headers)


ANTHROPIC_FAILURES = {
    "overloaded": Failure(_anthropic_error(529, "overloaded_error", "Overloaded"), "overloaded", True),
    "rate limit": Failure(
        _anthropic_error(429, "rate_limit_error", "slow down", retry_after="17"), "rate_limited", True, 17.0
    ),
    "hard quota": Failure(
        _anthropic_error(429, "rate_limit_error", "Your credit balance is too low"), "quota", says="credit balance"
    ),
    "spent credit": Failure(
        _anthropic_error(
            400,
            "invalid_request_error",
            "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to upgrade.",
        ),
        "quota",
    ),
    "prompt and answer too long together": Failure(
        _anthropic_error(
            400,
            "invalid_request_error",
            "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000, decrease input length",
        ),
        "context_overflow",
    ),
    "more output than the model can write": Failure(
        _anthropic_error(
            400,
            "invalid_request_error",
            "max_tokens: 100000 > 64000, which is the maximum allowed number of output tokens for m-1",
        ),
        "invalid_request",
    ),
    "filtered answer": Failure(
        _anthropic_error(400, "invalid_request_error", "Output blocked by content filtering policy"), "filtered"
    ),
    "a server that forbids another attempt": Failure(
        _anthropic_error(429, "rate_limit_error", "not now", x_should_retry="false"), "rate_limited"
    ),
    "a server that wants another attempt": Failure(
        _anthropic_error(418, "api_error", "try again", x_should_retry="true"), "overloaded", True
    ),
    "a gateway's page": Failure(
        Reply(
            status=524,
            body=b"<!DOCTYPE html><html><title>524: A timeout occurred</title></html>",
            headers={"content-type": "text/html"},
        ),
        "overloaded",
        True,
    ),
    "an error of a proxy with status 200": Failure(
        Reply.error(200, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
        "overloaded",
        True,
    ),
    "wrong key": Failure(_anthropic_error(401, "authentication_error", "invalid x-api-key"), "authentication"),
    "unknown model": Failure(_anthropic_error(404, "not_found_error", "model: m-1"), "unknown_model"),
    "too long": Failure(
        _anthropic_error(400, "invalid_request_error", "prompt is too long: 210000 tokens > 200000 maximum"),
        "context_overflow",
    ),
    "error in the stream": Failure(
        Reply.sse(("error", {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}})),
        "overloaded",
        True,
    ),
    "no JSON": Failure(Reply.sse(("message_start", "{oops")), "provider_nonsense"),
    "another API": Failure(
        Reply(body=b"<html>proxy</html>", headers={"content-type": "text/html"}), "provider_nonsense"
    ),
    "no stream at all": Failure(Reply(headers={"content-type": "text/event-stream"}), "broken_stream", True),
}

# ---------------------------------------------------------------------- OpenAI, Responses


def _responses(*items: dict[str, Any], end: str = "response.completed", why: str | None = None) -> Reply:
    usage = {
        "input_tokens": 120,
        "input_tokens_details": {"cached_tokens": 100, "cache_write_tokens": 5},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 129,
    }
    events: list[dict[str, Any]] = [{"type": "response.created", "response": {"id": "resp_1", "model": MODEL}}]
    for index, item in enumerate(items):
        events.append({"type": "response.output_item.added", "output_index": index, "item": {**item, "content": []}})
        if item["type"] == "message":
            text = "".join(each.get("text", each.get("refusal", "")) for each in item["content"])
            kind = "refusal" if any("refusal" in each for each in item["content"]) else "output_text"
            for piece in (text[:3], text[3:]):
                events.append({"type": f"response.{kind}.delta", "output_index": index, "delta": piece})
        elif item["type"] == "function_call":
            for piece in (item["arguments"][:4], item["arguments"][4:]):
                events.append({"type": "response.function_call_arguments.delta", "output_index": index, "delta": piece})
        elif item["type"] == "reasoning":
            for each in item["summary"]:
                events.append(
                    {"type": "response.reasoning_summary_text.delta", "output_index": index, "delta": each["text"]}
                )
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    response = {"model": MODEL, "usage": usage, "incomplete_details": None if why is None else {"reason": why}}
    events.append({"type": end, "response": response})
    return Reply.sse(*[(event["type"], event) for event in events])


def _message(*content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": list(content)}


def _words(text: str) -> dict[str, Any]:
    return _message({"type": "output_text", "text": text, "annotations": []})


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function_call", "id": f"fc_{id}", "call_id": id, "name": name, "arguments": arguments}


O_USAGE = Usage(15, 9, 100, 5, 4)
R_ITEM = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [{"type": "summary_text", "text": "First, look."}],
    "encrypted_content": "Z2VoZWlt",
}
R_BODY = msgspec.json.encode(R_ITEM).decode()

SEARCHED = {
    "type": "web_search_call",
    "id": "ws_1",
    "status": "completed",
    "action": {"type": "search", "query": "Paris", "sources": [{"type": "url", "url": "https://w.example/paris"}]},
}
COMPUTED = {
    "type": "code_interpreter_call",
    "id": "ci_1",
    "status": "completed",
    "container_id": "cntr_1",
    "code": "print(6 * 7)",
    "outputs": [{"type": "logs", "logs": "42\n"}],
}

PLAIN = {**R_ITEM, "encrypted_content": None}
HIDDEN = {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "Z2VoZWlt"}
FILES_SEARCHED = {
    "type": "file_search_call",
    "id": "fs_1",
    "status": "completed",
    "queries": ["Paris"],
    "results": [{"file_id": "file_1", "filename": "weather.txt", "text": "wet"}],
}
REMOTE = {
    "type": "mcp_call",
    "id": "mcp_1",
    "name": "echo",
    "server_label": "own",
    "arguments": "{}",
    "output": "you said x",
    "error": None,
}

OPENAI_ANSWERS = {
    "text": Answer(_responses(_words("Grüße, Welt 😀")), said("Grüße, Welt 😀", O_USAGE)),
    "tool": Answer(
        _responses(_call("call_1", "get", '{"city":"Paris"}')), called(O_USAGE, ("call_1", "get", {"city": "Paris"}))
    ),
    "parallel": Answer(
        _responses(_call("call_1", "get", '{"n":1}'), _call("call_2", "put", "{}")),
        called(O_USAGE, ("call_1", "get", {"n": 1}), ("call_2", "put", {})),
    ),
    "reasoning": Answer(
        _responses(R_ITEM, _words("Done.")),
        ModelResponse(
            parts=(ProviderPart("openai", MODEL, "reasoning", R_BODY, "First, look."), Text("Done.")),
            usage=O_USAGE,
            model=MODEL,
        ),
        "First, look.",
    ),
    "structured": Answer(_responses(_words('{"name":"Ada"}')), said('{"name":"Ada"}', O_USAGE)),
    "web search": Answer(
        _responses(R_ITEM, SEARCHED, _words("It rains.")),
        ModelResponse(
            parts=(
                ProviderPart("openai", MODEL, "reasoning", R_BODY, "First, look."),
                ProviderPart(
                    "openai",
                    MODEL,
                    "web_search_call",
                    msgspec.json.encode(SEARCHED).decode(),
                    "web_search: Paris\nhttps://w.example/paris",
                ),
                Text("It rains."),
            ),
            usage=O_USAGE,
            model=MODEL,
        ),
        "First, look.",
    ),
    "code execution": Answer(
        _responses(COMPUTED, _words("42")),
        ModelResponse(
            parts=(
                ProviderPart(
                    "openai",
                    MODEL,
                    "code_interpreter_call",
                    msgspec.json.encode(COMPUTED).decode(),
                    "code_execution:\nprint(6 * 7)\n42\n",
                ),
                Text("42"),
            ),
            usage=O_USAGE,
            model=MODEL,
        ),
    ),
    "answer by tool": Answer(
        _responses(_call("call_9", "final_answer", '{"name":"Ada"}')),
        called(O_USAGE, ("call_9", "final_answer", {"name": "Ada"})),
    ),
    "refusal": Answer(
        _responses(_message({"type": "refusal", "refusal": "I can't."})), said("I can't.", O_USAGE, stop="filtered")
    ),
    "length": Answer(
        _responses(_words("And then"), end="response.incomplete", why="max_output_tokens"),
        said("And then", O_USAGE, stop="length"),
    ),
    "empty": Answer(_responses(), said("", O_USAGE)),
    "reasoning that is not encrypted": Answer(
        _responses(PLAIN, _words("Done.")),
        ModelResponse(parts=(Reasoning("First, look."), Text("Done.")), usage=O_USAGE, model=MODEL),
        "First, look.",
    ),
    "reasoning without a summary": Answer(
        _responses(HIDDEN, _call("call_1", "get", "{}")),
        ModelResponse(
            parts=(
                ProviderPart("openai", MODEL, "reasoning", msgspec.json.encode(HIDDEN).decode()),
                ToolCall("call_1", "get", {}),
            ),
            usage=O_USAGE,
            stop="tool_calls",
            model=MODEL,
        ),
    ),
    "a call without deltas": Answer(
        Reply.sse(
            *[
                (event["type"], event)
                for event in (
                    {"type": "response.created", "response": {"model": MODEL}},
                    {"type": "response.in_progress", "response": {"model": MODEL}},
                    {"type": "response.output_item.added", "output_index": 1, "item": _call("call_1", "get", "")},
                    {
                        "type": "response.function_call_arguments.done",
                        "output_index": 1,
                        "arguments": '{"n":1}',
                    },
                    {"type": "response.output_item.done", "output_index": 1, "item": _call("call_1", "get", '{"n":1}')},
                    {"type": "response.completed", "response": {"model": MODEL, "usage": None}},
                )
            ]
        ),
        called(None, ("call_1", "get", {"n": 1})),
    ),
    "a search in files and one on a server of the user's": Answer(
        _responses(FILES_SEARCHED, REMOTE, _words("It rains.")),
        ModelResponse(
            parts=(
                ProviderPart(
                    "openai",
                    MODEL,
                    "file_search_call",
                    msgspec.json.encode(FILES_SEARCHED).decode(),
                    "file_search: Paris\nwet",
                ),
                ProviderPart("openai", MODEL, "mcp_call", msgspec.json.encode(REMOTE).decode(), "echo: {}\nyou said x"),
                Text("It rains."),
            ),
            usage=O_USAGE,
            model=MODEL,
        ),
    ),
    "filtered": Answer(
        _responses(_words("And"), end="response.incomplete", why="content_filter"),
        said("And", O_USAGE, stop="filtered"),
    ),
    "half a call": Answer(
        _responses(_call("call_1", "get", '{"city": "Pa')),
        ModelResponse(
            parts=(ToolCall("call_1", "get", {}, '{"city": "Pa'),), usage=O_USAGE, stop="tool_calls", model=MODEL
        ),
    ),
}


def _openai_error(status: int, code: str | None, message: str, **headers: str) -> Reply:
    return Reply.error(status, {"error": {"type": "x", "code": code, "message": message}}, **headers)


OPENAI_FAILURES = {
    "overloaded": Failure(_openai_error(503, None, "The engine is overloaded"), "overloaded", True),
    "rate limit": Failure(
        _openai_error(429, "rate_limit_exceeded", "slow down", retry_after_ms="1500"), "rate_limited", True, 1.5
    ),
    "hard quota": Failure(_openai_error(429, "insufficient_quota", "You exceeded your current quota"), "quota"),
    "wrong key": Failure(_openai_error(401, "invalid_api_key", "Incorrect API key provided"), "authentication"),
    "too long": Failure(
        _openai_error(400, "context_length_exceeded", "Your input exceeds the context window"), "context_overflow"
    ),
    "error in the stream": Failure(
        Reply.sse(("error", {"type": "error", "code": "server_error", "message": "sorry"})), "overloaded", True
    ),
    "error in the stream, one level down": Failure(
        Reply.sse(
            (
                "error",
                {
                    "type": "error",
                    "sequence_number": 2,
                    "error": {
                        "type": "invalid_request_error",
                        "code": "context_length_exceeded",
                        "message": "Your input exceeds the context window of this model.",
                        "param": "input",
                    },
                },
            )
        ),
        "context_overflow",
        says="exceeds the context window",
    ),
    "overload that is told in the stream": Failure(
        Reply.sse(
            (
                "response.failed",
                {
                    "type": "response.failed",
                    "response": {"error": {"code": "server_is_overloaded", "message": "try again"}},
                },
            )
        ),
        "overloaded",
        True,
    ),
    "a stream of the older API": Failure(
        Reply.sse({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "Hi"}}]}),
        "provider_nonsense",
        says="openai-chat",
    ),
    "rate limit that speaks of payment": Failure(
        _openai_error(
            429,
            "rate_limit_exceeded",
            "Rate limit reached for m-1 on tokens per min (TPM): Limit 30000, Used 29000, Requested 2000. Please try "
            "again in 2s. You can increase your rate limit by adding a payment method to your account at "
            "https://platform.openai.com/account/billing.",
            retry_after="2",
        ),
        "rate_limited",
        True,
        2.0,
    ),
    "more tokens than a minute has": Failure(
        _openai_error(
            429,
            "rate_limit_exceeded",
            "Request too large for m-1 on tokens per min (TPM): Limit 30000, Requested 41000. The input or output "
            "tokens must be reduced in order to run successfully.",
        ),
        "context_overflow",
    ),
    "filtered prompt": Failure(
        Reply.error(
            400,
            {
                "error": {
                    "message": "The response was filtered due to the prompt triggering Azure OpenAI's content "
                    "management policy. Please modify your prompt and retry.",
                    "type": None,
                    "param": "prompt",
                    "code": "content_filter",
                    "status": 400,
                    "innererror": {"code": "ResponsibleAIPolicyViolation", "content_filter_result": {}},
                }
            },
        ),
        "filtered",
    ),
    "response failed": Failure(
        Reply.sse(
            (
                "response.failed",
                {
                    "type": "response.failed",
                    "response": {"error": {"code": "rate_limit_exceeded", "message": "slow down"}},
                },
            )
        ),
        "rate_limited",
        True,
    ),
    "no JSON": Failure(Reply.sse(("response.created", "{oops")), "provider_nonsense"),
    "no stream at all": Failure(Reply(headers={"content-type": "text/event-stream"}), "broken_stream", True),
}

# ---------------------------------------------------------------------- Chat Completions


def _chat(*deltas: dict[str, Any], finish: str = "stop", done: bool = True, usage: bool = True) -> Reply:
    return Reply.sse(*_chunks(*deltas, finish=finish, usage=usage), done=done)


def _spoiled(*chunks: dict[str, Any]) -> Reply:
    """Chunks that OpenAI's own server would not send, or not so."""
    return Reply.sse(*chunks, done=True)


def _chunks(*deltas: dict[str, Any], finish: str = "stop", usage: bool = True) -> list[dict[str, Any]]:
    def chunk(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": MODEL, "choices": choices, **more}

    chunks = [chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])]
    chunks += [chunk([{"index": 0, "delta": delta, "finish_reason": None}]) for delta in deltas]
    chunks.append(chunk([{"index": 0, "delta": {}, "finish_reason": finish}]))
    if usage:
        counts = {
            "prompt_tokens": 120,
            "completion_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 100},
            "completion_tokens_details": {"reasoning_tokens": 4},
        }
        chunks.append(chunk([], usage=counts))
    return chunks


def _detail(**fields: str) -> dict[str, Any]:
    return {"type": "reasoning.text", "format": "anthropic-claude-v1", "index": 0, **fields}


def _calls(*calls: tuple[int | None, str | None, str | None, str]) -> dict[str, Any]:
    return {
        "tool_calls": [
            {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, id, name, arguments in calls
        ]
    }


C_USAGE = Usage(20, 9, 100, None, 4)

CHAT_ANSWERS = {
    "text": Answer(_chat({"content": "Grüße, "}, {"content": "Welt 😀"}), said("Grüße, Welt 😀", C_USAGE)),
    "text without [DONE]": Answer(_chat({"content": "Hi"}, done=False), said("Hi", C_USAGE)),
    "text without usage": Answer(_chat({"content": "Hi"}, usage=False), said("Hi", None)),
    "tool": Answer(
        _chat(
            _calls((0, "call_1", "get", "")),
            _calls((0, None, None, '{"city": "Pa')),
            _calls((0, None, None, 'ris"}')),
            finish="tool_calls",
        ),
        called(C_USAGE, ("call_1", "get", {"city": "Paris"})),
    ),
    "half a call": Answer(
        _chat(_calls((0, "call_1", "get", '{"city": "Pa')), finish="tool_calls"),
        ModelResponse(
            parts=(ToolCall("call_1", "get", {}, '{"city": "Pa'),), usage=C_USAGE, stop="tool_calls", model=MODEL
        ),
    ),
    "parallel": Answer(
        _chat(
            _calls((0, "call_1", "get", '{"n":')),
            _calls((1, "call_2", "put", "{}")),
            _calls((0, None, None, "1}")),
            finish="tool_calls",
        ),
        called(C_USAGE, ("call_1", "get", {"n": 1}), ("call_2", "put", {})),
    ),
    "calls that all have index 0": Answer(
        _chat(_calls((0, "call_1", "get", '{"n":1}')), _calls((0, "call_2", "put", "{}")), finish="stop"),
        called(C_USAGE, ("call_1", "get", {"n": 1}), ("call_2", "put", {})),
    ),
    "reasoning": Answer(
        _chat({"reasoning_content": "First, "}, {"reasoning_content": "look."}, {"content": "Done."}),
        ModelResponse(
            parts=(
                ProviderPart("openai-chat", MODEL, "reasoning", '"First, look."', "First, look."),
                Text("Done."),
            ),
            usage=C_USAGE,
            model=MODEL,
        ),
        "First, look.",
    ),
    "a chunk of the gateway's before the first": Answer(
        _spoiled(
            {"choices": [], "model": "", "prompt_filter_results": [{"prompt_index": 0, "content_filter_results": {}}]},
            *_chunks({"content": "Hi"}),
        ),
        said("Hi", C_USAGE),
    ),
    "comments, empty roles and chunks that say nothing": Answer(
        Reply(
            body=b": OPENROUTER PROCESSING\n\n: OPENROUTER PROCESSING\n\n"
            + _chat({"role": "", "content": None}, {"content": "Hi", "role": ""}, {}, {"content": ""}).body,
            headers={"content-type": "text/event-stream"},
        ),
        said("Hi", C_USAGE),
    ),
    "delta that is null, choices that are null": Answer(
        _spoiled(
            *_chunks({"content": "Hi"}),
            {"choices": [{"index": 0, "delta": None, "finish_reason": None}], "model": MODEL},
            {"choices": None, "model": MODEL},
        ),
        said("Hi", C_USAGE),
    ),
    "usage in every chunk": Answer(
        _spoiled(
            {
                "model": MODEL,
                "choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": None}],
                "usage": {"prompt_tokens": 120, "completion_tokens": 1},
            },
            {
                "model": MODEL,
                "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 120, "completion_tokens": 2},
            },
        ),
        said("Hi", Usage(120, 2)),
    ),
    "usage within the choice": Answer(
        _spoiled(
            {"model": MODEL, "choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": None}]},
            {
                "model": MODEL,
                "choices": [
                    {
                        "index": 0,
                        "delta": {},
                        "finish_reason": "stop",
                        "usage": {"prompt_tokens": 120, "completion_tokens": 2},
                    }
                ],
            },
        ),
        said("Hi", Usage(120, 2)),
    ),
    "usage that counts reasoning apart": Answer(
        _spoiled(
            {"model": MODEL, "choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}]},
            {
                "model": MODEL,
                "choices": [],
                "usage": {
                    "prompt_tokens": 12,
                    "completion_tokens": 2,
                    "total_tokens": 114,
                    "completion_tokens_details": {"reasoning_tokens": 100},
                },
            },
        ),
        said("Hi", Usage(12, 102, reasoning=100)),
    ),
    "an index that begins with 1": Answer(
        _chat(
            _calls((1, "call_1", "get", "")),
            _calls((1, None, None, '{"n":')),
            _calls((1, None, None, "1}")),
            _calls((1, None, None, "")),
            finish="tool_calls",
        ),
        called(C_USAGE, ("call_1", "get", {"n": 1})),
    ),
    "a call without an index goes on without an id": Answer(
        _chat(
            _calls((None, "call_1", "get", '{"n":')),
            _calls((None, None, None, "1}")),
            _calls((None, "call_2", "put", "{")),
            _calls((None, None, None, "}")),
            finish="tool_calls",
        ),
        called(C_USAGE, ("call_1", "get", {"n": 1}), ("call_2", "put", {})),
    ),
    "whole calls with neither index nor id": Answer(
        _chat(_calls((None, None, "get", '{"n":1}'), (None, None, "put", "{}")), finish="tool_calls"),
        called(C_USAGE, ("", "get", {"n": 1}), ("", "put", {})),
    ),
    "whole calls with index 0 and no id": Answer(
        _chat(_calls((0, "", "get", '{"n":1}')), _calls((0, "", "put", "{}")), finish="tool_calls"),
        called(C_USAGE, ("", "get", {"n": 1}), ("", "put", {})),
    ),
    "a name that comes after its call has begun": Answer(
        _chat(
            _calls((0, "call_1", None, "")),
            _calls((0, None, "get", "")),
            _calls((0, None, "get", '{"n":1}')),
            _calls((0, None, "get", "")),
            finish="tool_calls",
        ),
        called(C_USAGE, ("call_1", "get", {"n": 1})),
    ),
    "an id in every delta, and another one each time": Answer(
        _chat(
            _calls((0, "call_1", "get", "")),
            _calls((0, "call_x", None, '{"n":')),
            _calls((0, "null", "", "1}")),
            finish="tool_calls",
        ),
        called(C_USAGE, ("call_1", "get", {"n": 1})),
    ),
    "arguments that are an object": Answer(
        _chat(
            {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "get", "arguments": {"n": 1}}}]},
            finish="tool_calls",
        ),
        called(C_USAGE, ("call_1", "get", {"n": 1})),
    ),
    "arguments that are null": Answer(
        _chat(_calls((0, "call_1", "get", "null")), finish="tool_calls"), called(C_USAGE, ("call_1", "get", {}))
    ),
    "a signature beside a call": Answer(
        _chat(
            {
                "tool_calls": [
                    {
                        "index": 0,
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "get", "arguments": "{}"},
                        "extra_content": {"google": {"thought_signature": "c2ln"}},
                    }
                ]
            },
            finish="tool_calls",
        ),
        ModelResponse(
            parts=(
                ToolCall(
                    "call_1",
                    "get",
                    {},
                    None,
                    {"dialect": "openai-chat", "extra_content": {"google": {"thought_signature": "c2ln"}}},
                ),
            ),
            usage=C_USAGE,
            stop="tool_calls",
            model=MODEL,
        ),
    ),
    "reasoning in two fields": Answer(
        _chat({"reasoning_content": "Look.", "reasoning": "Look."}, {"content": "Done."}),
        ModelResponse(
            parts=(ProviderPart("openai-chat", MODEL, "reasoning", '"Look."', "Look."), Text("Done.")),
            usage=C_USAGE,
            model=MODEL,
        ),
        "Look.",
    ),
    "reasoning that is no text": Answer(
        _chat({"reasoning_content": {"tokens": 3}, "content": "Done."}), said("Done.", C_USAGE)
    ),
    "reasoning details in pieces": Answer(
        _chat(
            {"reasoning": "First, ", "reasoning_details": [_detail(text="First, ")]},
            {"reasoning_details": [_detail(text="look.")]},
            {"reasoning_details": [_detail(signature="c2ln")]},
            {"reasoning_details": [{"type": "reasoning.encrypted", "data": "Z2VoZWlt", "index": 1}]},
            {"content": "Done."},
        ),
        ModelResponse(
            parts=(
                ProviderPart(
                    "openai-chat",
                    MODEL,
                    "reasoning_details",
                    '[{"type":"reasoning.text","format":"anthropic-claude-v1","index":0,"text":"First, look.",'
                    '"signature":"c2ln"},{"type":"reasoning.encrypted","data":"Z2VoZWlt","index":1}]',
                    "First, look.",
                ),
                Text("Done."),
            ),
            usage=C_USAGE,
            model=MODEL,
        ),
        "First, look.",
    ),
    "an end in another server's word": Answer(_chat({"content": "Hi"}, finish="eos_token"), said("Hi", C_USAGE)),
    "structured": Answer(_chat({"content": '{"name":'}, {"content": '"Ada"}'}), said('{"name":"Ada"}', C_USAGE)),
    "answer by tool": Answer(
        _chat(
            _calls((0, "call_9", "final_answer", '{"name":')), _calls((0, None, None, '"Ada"}')), finish="tool_calls"
        ),
        called(C_USAGE, ("call_9", "final_answer", {"name": "Ada"})),
    ),
    "refusal": Answer(_chat({"refusal": "I can't."}), said("I can't.", C_USAGE, stop="filtered")),
    "filtered": Answer(_chat({"content": "And"}, finish="content_filter"), said("And", C_USAGE, stop="filtered")),
    "length": Answer(_chat({"content": "And then"}, finish="length"), said("And then", C_USAGE, stop="length")),
    "empty": Answer(_chat(), said("", C_USAGE)),
}

CHAT_FAILURES = {
    **{name: each for name, each in OPENAI_FAILURES.items() if each.reply.status != 200},
    "error in the stream": Failure(Reply.sse({"error": {"code": 502, "message": "upstream"}}), "overloaded", True),
    "an error beside the choice": Failure(
        Reply.sse(
            {
                "choices": [
                    {
                        "index": 0,
                        "delta": {"content": ""},
                        "finish_reason": "error",
                        "error": {"code": 502, "message": "upstream"},
                    }
                ]
            }
        ),
        "overloaded",
        True,
        says="upstream",
    ),
    "an end that is an error": Failure(_chat({"content": "And"}, finish="error"), "overloaded", True),
    "an end for want of machines": Failure(
        _chat({"content": "And"}, finish="insufficient_system_resource"), "overloaded", True
    ),
    "an error in the stream whose code is text": Failure(
        Reply.sse({"error": {"code": "429", "message": "slow down"}}), "rate_limited", True
    ),
    "an error in the stream that only has a type": Failure(
        Reply.sse({"error": {"code": None, "type": "invalid_request_error", "message": "no such tool"}}),
        "invalid_request",
    ),
    "an error in the stream that is no field": Failure(
        Reply.sse(
            {
                "object": "error",
                "message": "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
                "type": "BadRequestError",
                "param": None,
                "code": 400,
            }
        ),
        "context_overflow",
    ),
    "an error with status 200": Failure(
        Reply.error(200, {"error": {"code": 429, "message": "slow down"}, "user_id": "u"}), "rate_limited", True
    ),
    "an error with status 200 that has no code": Failure(
        Reply.error(
            200,
            {"code": "The service is currently unavailable", "error": "Timed out waiting for first token"},
        ),
        "overloaded",
        True,
        says="waiting for first token",
    ),
    "a whole answer in place of a stream": Failure(
        Reply.error(200, {"object": "chat.completion", "choices": [{"message": {"content": "Hi"}}]}),
        "provider_nonsense",
    ),
    "a call that the server could not read": Failure(
        Reply.error(
            400,
            {
                "error": {
                    "message": "Failed to call a function. Please adjust your prompt.",
                    "type": "invalid_request_error",
                    "code": "tool_use_failed",
                    "failed_generation": "<function=get>{n: 1}",
                }
            },
        ),
        "malformed_answer",
        True,
    ),
    "a call that the server could not read, in the stream": Failure(
        Reply.sse(
            (
                "error",
                {
                    "error": {
                        "message": "Tool call validation failed",
                        "type": "invalid_request_error",
                        "code": "tool_use_failed",
                        "status_code": 400,
                    }
                },
            )
        ),
        "malformed_answer",
        True,
    ),
    "no credits": Failure(
        Reply.error(402, {"error": {"code": 402, "message": "Insufficient credits. Add more using …"}}), "quota"
    ),
    "a limit of a minute that points to the billing page": Failure(
        Reply.error(
            429,
            {
                "error": {
                    "message": "Rate limit reached for model `m-1` on tokens per minute (TPM): Limit 6000, Used 5000. "
                    "Please try again in 10s. Need more tokens? Upgrade at https://console.groq.com/settings/billing",
                    "type": "tokens",
                    "code": "rate_limit_exceeded",
                }
            },
            retry_after="10",
        ),
        "rate_limited",
        True,
        10.0,
    ),
    "more output than the model can write": Failure(
        Reply.error(
            400,
            {
                "error": {
                    "message": "`max_tokens` must be less than or equal to `8192`, the maximum value for `max_tokens` "
                    "is less than the `context_window` for this model",
                    "type": "invalid_request_error",
                }
            },
        ),
        "invalid_request",
    ),
    "flagged input": Failure(
        Reply.error(
            403,
            {
                "error": {
                    "code": 403,
                    "message": 'm-1 requires moderation on A. Your input was flagged for "violence".',
                    "metadata": {"reasons": ["violence"], "flagged_input": "…"},
                }
            },
        ),
        "filtered",
    ),
    "too long for the server's memory": Failure(
        Reply.error(
            400,
            {
                "error": {
                    "code": 400,
                    "message": "the request exceeds the available context size, try increasing it",
                    "type": "exceed_context_size_error",
                    "n_prompt_tokens": 5000,
                    "n_ctx": 4096,
                }
            },
        ),
        "context_overflow",
    ),
    "a prompt that is longer than the longest": Failure(
        Reply.error(
            400,
            {
                "code": "Client specified an invalid argument",
                "error": "This model's maximum prompt length is 131072 but the request contains 540000 tokens.",
            },
        ),
        "context_overflow",
    ),
    "an input that leaves no room": Failure(
        Reply.error(
            422,
            {
                "error": {
                    "message": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8193. Given: "
                    "9000 `inputs` tokens and 100 `max_new_tokens`",
                    "type": "invalid_request_error",
                }
            },
        ),
        "context_overflow",
    ),
    "a setting that mentions the same words": Failure(
        Reply.error(422, {"error": {"message": "Input validation error: `max_new_tokens` must be strictly positive"}}),
        "invalid_request",
    ),
    "a list of errors": Failure(
        Reply.error(
            400,
            [{"error": {"code": 400, "message": "API key not valid.", "status": "INVALID_ARGUMENT"}}],
        ),
        "invalid_request",
        says="the request: API key not valid.",
    ),
    "a model that was never fetched": Failure(
        Reply.error(404, {"error": "model 'm-1' not found, try pulling it first"}), "unknown_model", says="pulling"
    ),
    "an error that is a string": Failure(Reply.error(500, {"error": "out of memory"}), "overloaded", True),
    "no JSON": Failure(Reply.sse("{oops"), "provider_nonsense"),
    "no stream at all": Failure(Reply(headers={"content-type": "text/event-stream"}), "broken_stream", True),
}

# ---------------------------------------------------------------------- Google


def _google(*parts: list[dict[str, Any]], finish: str = "STOP", message: str | None = None) -> Reply:
    chunks: list[dict[str, Any]] = [
        {"candidates": [{"content": {"role": "model", "parts": each}}], "modelVersion": MODEL} for each in parts
    ]
    counts = {
        "promptTokenCount": 120,
        "cachedContentTokenCount": 100,
        "candidatesTokenCount": 5,
        "thoughtsTokenCount": 4,
    }
    last: dict[str, Any] = {"finishReason": finish, **({"finishMessage": message} if message else {})}
    chunks.append({"candidates": [last], "usageMetadata": counts, "modelVersion": MODEL})
    body = b"".join(b"data: " + msgspec.json.encode(chunk) + b"\r\n\r\n" for chunk in chunks)
    return Reply(body=body, headers={"content-type": "text/event-stream"})


G_USAGE = Usage(20, 9, 100, None, 4)

GOOGLE_ANSWERS = {
    "text": Answer(_google([{"text": "Grüße, "}], [{"text": "Welt 😀"}]), said("Grüße, Welt 😀", G_USAGE)),
    "tool": Answer(
        _google([{"functionCall": {"name": "get", "args": {"city": "Paris"}}, "thoughtSignature": "c2ln"}]),
        ModelResponse(
            parts=(ToolCall("", "get", {"city": "Paris"}, None, {"dialect": "google", "signature": "c2ln"}),),
            usage=G_USAGE,
            stop="tool_calls",
            model=MODEL,
        ),
    ),
    "parallel": Answer(
        _google([{"functionCall": {"name": "get", "args": {"n": 1}}}, {"functionCall": {"name": "put", "args": {}}}]),
        called(G_USAGE, ("", "get", {"n": 1}), ("", "put", {})),
    ),
    "reasoning": Answer(
        _google(
            [{"text": "First, ", "thought": True}],
            [{"text": "look.", "thought": True}],
            [{"text": "Done."}],
            [{"text": "", "thoughtSignature": "c2ln"}],
        ),
        ModelResponse(
            parts=(
                ProviderPart("google", MODEL, "thought", '{"text":"First, look.","thought":true}', "First, look."),
                Text("Done."),
                ProviderPart("google", MODEL, "signature", '{"text":"","thoughtSignature":"c2ln"}'),
            ),
            usage=G_USAGE,
            model=MODEL,
        ),
        "First, look.",
    ),
    "structured": Answer(_google([{"text": '{"name":'}], [{"text": '"Ada"}'}]), said('{"name":"Ada"}', G_USAGE)),
    "code execution": Answer(
        _google(
            [{"executableCode": {"language": "PYTHON", "code": "print(6 * 7)"}}],
            [{"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "42\n"}}],
            [{"text": "42"}],
        ),
        ModelResponse(
            parts=(
                ProviderPart(
                    "google",
                    MODEL,
                    "executableCode",
                    '{"executableCode":{"language":"PYTHON","code":"print(6 * 7)"}}',
                    "code_execution:\nprint(6 * 7)",
                ),
                ProviderPart(
                    "google",
                    MODEL,
                    "codeExecutionResult",
                    '{"codeExecutionResult":{"outcome":"OUTCOME_OK","output":"42\\n"}}',
                    "code_execution returned:\n42\n",
                ),
                Text("42"),
            ),
            usage=G_USAGE,
            model=MODEL,
        ),
    ),
    "answer by tool": Answer(
        _google([{"functionCall": {"name": "final_answer", "args": {"name": "Ada"}}}]),
        called(G_USAGE, ("", "final_answer", {"name": "Ada"})),
    ),
    "refusal": Answer(_google([{"text": "I"}], finish="SAFETY"), said("I", G_USAGE, stop="filtered")),
    "length": Answer(_google([{"text": "And then"}], finish="MAX_TOKENS"), said("And then", G_USAGE, stop="length")),
    "empty": Answer(_google(), said("", G_USAGE)),
    "thoughts between words": Answer(
        _google([{"text": "Let me "}], [{"text": "see."}], [{"text": "Look.", "thought": True}], [{"text": "Done."}]),
        ModelResponse(
            parts=(
                Text("Let me see."),
                ProviderPart("google", MODEL, "thought", '{"text":"Look.","thought":true}', "Look."),
                Text("Done."),
            ),
            usage=G_USAGE,
            model=MODEL,
        ),
        "Look.",
    ),
    "a signature on a thought": Answer(
        _google(
            [{"text": "First", "thought": True}],
            [{"text": ", look.", "thought": True, "thoughtSignature": "c2ln"}],
            [{"text": "Done."}],
        ),
        ModelResponse(
            parts=(
                ProviderPart(
                    "google",
                    MODEL,
                    "thought",
                    '{"text":"First, look.","thought":true,"thoughtSignature":"c2ln"}',
                    "First, look.",
                ),
                Text("Done."),
            ),
            usage=G_USAGE,
            model=MODEL,
        ),
        "First, look.",
    ),
    "parts that say nothing": Answer(
        _google([{}], [{"thought": True}], [{"text": "Hi"}], [{"text": ""}], [{"thoughtSignature": "c2ln"}]),
        ModelResponse(
            parts=(
                Text("Hi"),
                ProviderPart("google", MODEL, "signature", '{"text":"","thoughtSignature":"c2ln"}'),
            ),
            usage=G_USAGE,
            model=MODEL,
        ),
    ),
    "a signature before the code it belongs to": Answer(
        _google([{"thoughtSignature": "c2ln", "executableCode": {"language": "PYTHON", "code": "1"}}]),
        ModelResponse(
            parts=(
                ProviderPart(
                    "google",
                    MODEL,
                    "executableCode",
                    '{"thoughtSignature":"c2ln","executableCode":{"language":"PYTHON","code":"1"}}',
                    "code_execution:\n1",
                ),
            ),
            usage=G_USAGE,
            model=MODEL,
        ),
    ),
    "calls with ids, a signature on the first": Answer(
        _google(
            [{"functionCall": {"id": "fc-1", "name": "get", "args": {"n": 1}}, "thoughtSignature": "c2ln"}],
            [{"functionCall": {"id": "fc-2", "name": "get"}}],
        ),
        ModelResponse(
            parts=(
                ToolCall("fc-1", "get", {"n": 1}, None, {"dialect": "google", "signature": "c2ln"}),
                ToolCall("fc-2", "get", {}),
            ),
            usage=G_USAGE,
            stop="tool_calls",
            model=MODEL,
        ),
    ),
    "thoughts that left no room for an answer": Answer(
        Reply.sse(
            {
                "candidates": [{"content": {"role": "model"}, "finishReason": "MAX_TOKENS", "index": 0}],
                "usageMetadata": {"promptTokenCount": 12, "totalTokenCount": 52, "thoughtsTokenCount": 40},
                "modelVersion": MODEL,
            }
        ),
        said("", Usage(12, 40, reasoning=40), stop="length"),
    ),
    "usage in pieces": Answer(
        Reply.sse(
            {
                "candidates": [{"content": {"parts": [{"text": "Hi"}]}}],
                "usageMetadata": {"promptTokenCount": 120, "cachedContentTokenCount": 100, "thoughtsTokenCount": 4},
                "modelVersion": MODEL,
            },
            {
                "candidates": [{"finishReason": "STOP"}],
                "usageMetadata": {"promptTokenCount": 120, "candidatesTokenCount": 5},
                "modelVersion": MODEL,
            },
        ),
        said("Hi", G_USAGE),
    ),
    "filtered by a firewall": Answer(_google(finish="MODEL_ARMOR"), said("", G_USAGE, stop="filtered")),
    "a prompt that was blocked": Answer(
        Reply.sse({"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}, "modelVersion": MODEL}),
        said("", None, stop="filtered"),
    ),
}


def _google_error(status: int, kind: str, message: str, details: list[dict[str, Any]] | None = None) -> Reply:
    return Reply.error(
        status, {"error": {"code": status, "status": kind, "message": message, "details": details or []}}
    )


GOOGLE_FAILURES = {
    "rate limit that speaks of a quota": Failure(
        _google_error(
            429,
            "RESOURCE_EXHAUSTED",
            "You exceeded your current quota, please check your plan and billing details",
            [
                {"@type": "QuotaFailure", "violations": [{"quotaId": "GenerateRequestsPerMinutePerProjectPerModel"}]},
                {"@type": "RetryInfo", "retryDelay": "34.07s"},
            ],
        ),
        "rate_limited",
        True,
        34.07,
    ),
    "quota of a day": Failure(
        _google_error(
            429,
            "RESOURCE_EXHAUSTED",
            "You exceeded your current quota, please check your plan and billing details",
            [
                {"@type": "QuotaFailure", "violations": [{"quotaId": "GenerateRequestsPerDayPerProjectPerModel"}]},
                {"@type": "RetryInfo", "retryDelay": "34s"},
            ],
        ),
        "quota",
    ),
    "overloaded": Failure(_google_error(503, "UNAVAILABLE", "The model is overloaded."), "overloaded", True),
    "rate limit": Failure(
        _google_error(429, "RESOURCE_EXHAUSTED", "slow down", [{"@type": "RetryInfo", "retryDelay": "34s"}]),
        "rate_limited",
        True,
        34.0,
    ),
    "hard quota": Failure(
        _google_error(429, "RESOURCE_EXHAUSTED", "You exceeded your current quota, check your billing"), "quota"
    ),
    "wrong key": Failure(_google_error(400, "INVALID_ARGUMENT", "API key not valid."), "authentication"),
    "too long": Failure(
        _google_error(400, "INVALID_ARGUMENT", "The input token count (1200000) exceeds the maximum"),
        "context_overflow",
    ),
    "error in the stream": Failure(
        Reply.sse({"error": {"code": 503, "status": "UNAVAILABLE", "message": "The model is overloaded."}}),
        "overloaded",
        True,
    ),
    "expired key": Failure(
        _google_error(
            400,
            "INVALID_ARGUMENT",
            "API key expired. Please renew the API key.",
            [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID"}],
        ),
        "authentication",
    ),
    "a call that was not expected": Failure(_google(finish="UNEXPECTED_TOOL_CALL"), "malformed_answer", True),
    "error in a list with status 200": Failure(
        Reply.error(200, [{"error": {"code": 503, "status": "UNAVAILABLE", "message": "overloaded"}}]),
        "overloaded",
        True,
    ),
    "malformed call": Failure(
        _google(finish="MALFORMED_FUNCTION_CALL", message="print(x"), "malformed_answer", True, says="print"
    ),
    "no JSON": Failure(Reply.sse("{oops"), "provider_nonsense"),
    "no stream at all": Failure(Reply(headers={"content-type": "text/event-stream"}), "broken_stream", True),
}

# ---------------------------------------------------------------------- Bedrock

EVENT_STREAM = {"content-type": "application/vnd.amazon.eventstream"}


def _bedrock(*blocks: tuple[dict[str, Any] | None, list[dict[str, Any]]], stop: str = "end_turn") -> Reply:
    events: list[tuple[str, dict[str, Any]]] = [("messageStart", {"role": "assistant"})]
    for index, (start, deltas) in enumerate(blocks):
        if start is not None:
            events.append(("contentBlockStart", {"contentBlockIndex": index, "start": start}))
        events += [("contentBlockDelta", {"contentBlockIndex": index, "delta": delta}) for delta in deltas]
        events.append(("contentBlockStop", {"contentBlockIndex": index}))
    counts = {"inputTokens": 12, "outputTokens": 7, "totalTokens": 124, "cacheReadInputTokens": 100}
    events += [("messageStop", {"stopReason": stop}), ("metadata", {"usage": counts, "metrics": {"latencyMs": 1}})]
    return Reply(body=frames(events), headers=EVENT_STREAM)


def _frames(*events: tuple[str, dict[str, Any]]) -> Reply:
    return Reply(body=frames(events), headers=EVENT_STREAM)


def _use(id: str, name: str, *pieces: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return {"toolUse": {"toolUseId": id, "name": name}}, [{"toolUse": {"input": piece}} for piece in pieces]


B_USAGE = Usage(12, 7, 100)
B_THOUGHT = '{"reasoningContent":{"reasoningText":{"text":"First, look.","signature":"c2ln"}}}'

BEDROCK_ANSWERS = {
    "text": Answer(_bedrock((None, [{"text": "Grüße, "}, {"text": "Welt 😀"}])), said("Grüße, Welt 😀", B_USAGE)),
    "tool": Answer(
        _bedrock(_use("tooluse_1", "get", '{"city": "Pa', 'ris"}'), stop="tool_use"),
        called(B_USAGE, ("tooluse_1", "get", {"city": "Paris"})),
    ),
    "half a call": Answer(
        _bedrock(_use("tooluse_1", "get", '{"city": "Pa'), stop="tool_use"),
        ModelResponse(
            parts=(ToolCall("tooluse_1", "get", {}, '{"city": "Pa'),), usage=B_USAGE, stop="tool_calls", model=MODEL
        ),
    ),
    "parallel": Answer(
        _bedrock(_use("tooluse_1", "get", '{"n":1}'), _use("tooluse_2", "put"), stop="tool_use"),
        called(B_USAGE, ("tooluse_1", "get", {"n": 1}), ("tooluse_2", "put", {})),
    ),
    "reasoning": Answer(
        _bedrock(
            (
                None,
                [
                    {"reasoningContent": {"text": "First, "}},
                    {"reasoningContent": {"text": "look."}},
                    {"reasoningContent": {"signature": "c2ln"}},
                ],
            ),
            (None, [{"reasoningContent": {"redactedContent": "b3BhcXVl"}}]),
            (None, [{"text": "Done."}]),
        ),
        ModelResponse(
            parts=(
                ProviderPart("bedrock", MODEL, "reasoning", B_THOUGHT, "First, look."),
                ProviderPart("bedrock", MODEL, "redacted", '{"reasoningContent":{"redactedContent":"b3BhcXVl"}}'),
                Text("Done."),
            ),
            usage=B_USAGE,
            model=MODEL,
        ),
        "First, look.",
    ),
    "structured": Answer(_bedrock((None, [{"text": '{"name":'}, {"text": '"Ada"}'}])), said('{"name":"Ada"}', B_USAGE)),
    "answer by tool": Answer(
        _bedrock(_use("tooluse_9", "final_answer", '{"name":', '"Ada"}'), stop="tool_use"),
        called(B_USAGE, ("tooluse_9", "final_answer", {"name": "Ada"})),
    ),
    "reasoning without a signature": Answer(
        _bedrock((None, [{"reasoningContent": {"text": "Look."}}]), (None, [{"text": "Done."}])),
        ModelResponse(parts=(Reasoning("Look."), Text("Done.")), usage=B_USAGE, model=MODEL),
        "Look.",
    ),
    "empty deltas and a start without a tool": Answer(
        _bedrock(({}, [{"text": ""}, {"text": "\n\n"}, {"text": "Hi"}])), said("\n\nHi", B_USAGE)
    ),
    "calls that are written side by side": Answer(
        _frames(
            ("messageStart", {"role": "assistant"}),
            ("contentBlockStart", {"contentBlockIndex": 0, "start": _use("tooluse_1", "get")[0]}),
            ("contentBlockStart", {"contentBlockIndex": 1, "start": _use("tooluse_2", "put")[0]}),
            ("contentBlockDelta", {"contentBlockIndex": 1, "delta": {"toolUse": {"input": "{}"}}}),
            ("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"toolUse": {"input": '{"n":1}'}}}),
            ("contentBlockStop", {"contentBlockIndex": 1}),
            ("contentBlockStop", {"contentBlockIndex": 0}),
            ("messageStop", {"stopReason": "tool_use", "additionalModelResponseFields": {"stop_sequence": None}}),
            ("metadata", {"usage": {"inputTokens": 1, "outputTokens": 2, "totalTokens": 3}}),
        ),
        called(Usage(1, 2), ("tooluse_1", "get", {"n": 1}), ("tooluse_2", "put", {})),
    ),
    "a block whose end is not told": Answer(
        _frames(
            ("messageStart", {"role": "assistant"}),
            ("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": "Hi"}}),
            ("messageStop", {"stopReason": "end_turn"}),
            ("metadata", {"usage": {"inputTokens": 1, "outputTokens": 2, "totalTokens": 3}}),
        ),
        said("Hi", Usage(1, 2)),
    ),
    "refusal": Answer(
        _bedrock((None, [{"text": "I"}]), stop="guardrail_intervened"), said("I", B_USAGE, stop="filtered")
    ),
    "length": Answer(
        _bedrock((None, [{"text": "And then"}]), stop="max_tokens"), said("And then", B_USAGE, stop="length")
    ),
    "empty": Answer(_bedrock(), said("", B_USAGE)),
}


def _bedrock_error(status: int, kind: str, message: str) -> Reply:
    headers = {"content-type": "application/json", "x-amzn-errortype": f"{kind}:http://internal.amazon.com/"}
    return Reply(status=status, body=msgspec.json.encode({"message": message}), headers=headers)


BEDROCK_FAILURES = {
    "overloaded": Failure(_bedrock_error(503, "ServiceUnavailableException", "try again"), "overloaded", True),
    "rate limit": Failure(_bedrock_error(429, "ThrottlingException", "Too many requests"), "rate_limited", True),
    "hard quota": Failure(_bedrock_error(402, "PaymentRequired", "billing is not set up"), "quota"),
    "wrong key": Failure(_bedrock_error(403, "UnrecognizedClientException", "The token is invalid."), "authentication"),
    "too long": Failure(_bedrock_error(400, "ValidationException", "Input is too long for model"), "context_overflow"),
    "error in the stream": Failure(
        Reply(body=frames([("throttlingException", {"message": "slow"})]), headers=EVENT_STREAM), "rate_limited", True
    ),
    "a model that fails in the stream": Failure(
        _frames(("modelStreamErrorException", {"message": "try again", "originalStatusCode": 500})), "overloaded", True
    ),
    "a model that takes too long in the stream": Failure(
        _frames(("modelTimeoutException", {"message": "timed out"})), "overloaded", True
    ),
    "too long, told in the stream": Failure(
        _frames(("validationException", {"message": "Input is too long for requested model."})), "context_overflow"
    ),
    "a model that fails": Failure(_bedrock_error(424, "ModelErrorException", "the model failed"), "overloaded", True),
    "a model that is not ready": Failure(
        _bedrock_error(429, "ModelNotReadyException", "The model is not ready"), "rate_limited", True
    ),
    "tokens of a minute": Failure(
        _bedrock_error(429, "ThrottlingException", "Too many tokens, please wait before trying again."),
        "rate_limited",
        True,
    ),
    "a quota of the account": Failure(
        _bedrock_error(400, "ServiceQuotaExceededException", "Your request exceeds the service quota."), "quota"
    ),
    "too many bytes": Failure(
        _bedrock_error(400, "ValidationException", "too many total text bytes: 30000000 > 25000000"), "context_overflow"
    ),
    "no frames": Failure(Reply(body=b"not an event stream at all", headers=EVENT_STREAM), "broken_stream", True),
    "no stream at all": Failure(Reply(headers=EVENT_STREAM), "broken_stream", True),
}

ANSWERS: Mapping[str, Mapping[str, Answer]] = {
    "anthropic": ANTHROPIC_ANSWERS,
    "openai": OPENAI_ANSWERS,
    "openai-chat": CHAT_ANSWERS,
    "google": GOOGLE_ANSWERS,
    "bedrock": BEDROCK_ANSWERS,
}
FAILURES: Mapping[str, Mapping[str, Failure]] = {
    "anthropic": ANTHROPIC_FAILURES,
    "openai": OPENAI_FAILURES,
    "openai-chat": CHAT_FAILURES,
    "google": GOOGLE_FAILURES,
    "bedrock": BEDROCK_FAILURES,
}
