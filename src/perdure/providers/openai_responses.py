"""OpenAI's Responses API.

A conversation is a list of items; an answer adds items to it. We keep no state at the provider (`store` is false), so
what only OpenAI understands, encrypted reasoning and the work of its own tools, travels with the conversation as
`ProviderPart`s and goes back unchanged, in its place between the other items.

An answer is complete by `response.completed` or `response.incomplete`; `response.failed` and `error` end it
otherwise. The parts come from the items that `response.output_item.done` tells, which are whole; deltas are for
people who watch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from perdure.errors import InternalError, ProviderError
from perdure.model.llm import CallPiece, Delta, ModelRequest, ModelResponse, Stop, Usage
from perdure.model.message import (
    Audio,
    Document,
    File,
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
    Url,
)
from perdure.providers.dialect import (
    UNREADABLE,
    Block,
    Encoded,
    Piece,
    Structured,
    Wire,
    broken,
    compact,
    encode,
    figure_in,
    foreign_text,
    in_words,
    joined,
    json_block,
    nonsense,
    own_tools,
    parsed_args,
    result_text,
    status_error,
    unsupported,
    wire_id,
    with_file,
    with_file_url,
)
from perdure.providers.openai_chat import OLD, openai_failure, strict_schema
from perdure.providers.schemas import ANY, Remembered, output_for, parameters, tool_schema
from perdure.providers.sse import SseReader

CALL_ID = re.compile(r"[\x21-\x7e]+")
EFFORTS = {"off": "none", "minimal": "minimal", "low": "low", "medium": "medium", "high": "high", "max": "xhigh"}
SOUND = {"audio/wav": "wav", "audio/mpeg": "mp3"}
WHO = "OpenAI's Responses API"

TOOLS: dict[str, dict[str, Any]] = {
    "web_search": {"type": "web_search"},
    "code_execution": {"type": "code_interpreter", "container": {"type": "auto"}},
}
"""Tools that run at the provider."""

INCLUDE = {"web_search": "web_search_call.action.sources", "code_interpreter": "code_interpreter_call.outputs"}
"""What they did, which is left out of answers unless it is asked for."""


COUNTED = ("model", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning")
"""What of a request's head counts towards its tokens, and the API for that takes."""


class OpenAIResponses:
    """The dialect."""

    name = "openai"

    def __init__(self) -> None:
        self._encoded = Encoded(_items)
        self._output = Remembered(strict_schema)
        self._parameters = Remembered(lambda schema: tool_schema(schema, ANY))

    def structured(self, request: ModelRequest, model: str) -> Structured:
        return Structured("tool" if model.startswith(OLD) else "schema", forced=not request.provider_tools)

    def build(self, request: ModelRequest, model: str) -> Wire:
        settings = request.settings
        head: dict[str, Any] = {"model": model, "stream": True, "store": False, **self._tuning(request)}
        if settings.cache is not False and request.session_id:
            head["prompt_cache_key"] = request.session_id[:64]
        return Wire("/responses", self._body(head | (settings.extra or {}), request))

    def build_count(self, request: ModelRequest, model: str) -> Wire:
        whole = {"model": model, **self._tuning(request), **(request.settings.extra or {})}
        head = {name: value for name, value in whole.items() if name in COUNTED}
        return Wire("/responses/input_tokens", self._body(head, request), {"accept": "application/json"})

    def read_count(self, body: bytes) -> int:
        return figure_in(body, "input_tokens")

    def _body(self, head: dict[str, Any], request: ModelRequest) -> tuple[Piece, ...]:
        pieces: list[Piece] = [encode(head)[:-1]]
        items = (item for items in self._encoded(request.messages) for item in items)
        # Last, so that one request begins as the one before it did.
        pieces += [b',"input":[', *joined(items), b"]}"]
        return compact(pieces)

    def reader(self, model: str) -> ResponsesReader:
        return ResponsesReader(model)

    def failure(self, status: int, headers: Mapping[str, str], body: bytes) -> ProviderError:
        return openai_failure(status, headers, body)

    def _tuning(self, request: ModelRequest) -> dict[str, Any]:
        settings, out = request.settings, dict[str, Any]()
        if settings.seed is not None or settings.stop:
            raise ProviderError(
                "OpenAI's Responses API takes neither seed nor stop: leave them out, or use 'openai-chat:'",
                code="invalid_settings",
            )
        for ours, theirs in (("temperature", "temperature"), ("top_p", "top_p"), ("max_tokens", "max_output_tokens")):
            if (value := getattr(settings, ours)) is not None:
                out[theirs] = value
        match settings.reasoning:
            case None:
                pass
            case int():
                raise ProviderError(
                    "OpenAI's API takes an effort, not a number of tokens: use ModelSettings(reasoning='high')",
                    code="invalid_settings",
                )
            case effort:
                out["reasoning"] = (
                    {"effort": EFFORTS[effort], "summary": "auto"} if effort != "off" else {"effort": "none"}
                )
        own: list[dict[str, Any]] = [{**base, **options} for base, options in own_tools(request, TOOLS, WHO)]
        out["include"] = [
            "reasoning.encrypted_content",
            *[INCLUDE[tool["type"]] for tool in own if tool["type"] in INCLUDE],
        ]
        if request.output_schema:
            schema, strict = output_for(self._output, request.output_schema, WHO)
            out["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": strict}}
        if request.tools or own:
            out["tools"] = own + [
                {
                    "type": "function",
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": schema,
                    "strict": False,
                }
                for tool, schema in parameters(self._parameters, request, WHO)
            ]
            wanted = "none" if request.tool_choice == "none" else settings.tool_choice or "auto"
            plain = wanted in ("auto", "none", "required")
            out["tool_choice"] = wanted if plain else {"type": "function", "name": wanted}
            if settings.parallel_tool_calls is not None:
                out["parallel_tool_calls"] = settings.parallel_tool_calls
        return out


def _items(message: Message) -> tuple[Block, ...]:
    """One message as items. Content of one role that stands together is one item; calls and reasoning are their own."""
    role = message.role
    items: list[Block] = []
    content: list[Block] = []

    def said() -> None:
        if content:
            items.append(compact([b'{"role":"%b","content":[' % role.encode(), *joined(content), b"]}"]))
            content.clear()

    kind = "output_text" if role == "assistant" else "input_text"
    for part in _answered(message.parts):
        match part:
            case Text(text):
                if text:
                    content.append(json_block({"type": kind, "text": text}))
            case ProviderPart("openai", _, _, body):
                said()
                items.append((body.encode(),))
            case ProviderPart() | Reasoning():
                if text := foreign_text(part):
                    content.append(json_block({"type": kind, "text": text}))
            case ToolCall(id, name, args, raw):
                said()
                arguments = encode(args).decode() if raw is None else raw
                call = {"type": "function_call", "call_id": wire_id(id, CALL_ID), "name": name, "arguments": arguments}
                items.append(json_block(call))
            case ToolResult():
                said()
                items.append(_result(part))
            case _:
                content.append(_file(part))
    said()
    return tuple(items)


def _answered(parts: Sequence[Part]) -> Sequence[Part]:
    """Without reasoning at the end, which an answer that was cut off has: the API refuses it without what follows."""
    end = len(parts)
    while (
        end
        and isinstance(last := parts[end - 1], ProviderPart)
        and (last.dialect, last.kind) == ("openai", "reasoning")
    ):
        end -= 1
    return parts[:end]


def _result(part: ToolResult) -> Block:
    text = result_text(part.content)
    head = {"type": "function_call_output", "call_id": wire_id(part.call_id, CALL_ID)}
    if not part.files:
        return json_block({**head, "output": text})
    content = [json_block({"type": "input_text", "text": text})] if text else []
    content += [_file(each) for each in part.files]
    return compact([encode(head)[:-1], b',"output":[', *joined(content), b"]}"])


def _file(part: File) -> Block:
    match part:
        case Image(Stored() as stored, kind) if kind.startswith("image/"):
            return with_file_url(stored, kind, lambda url: {"type": "input_image", "detail": "auto", "image_url": url})
        case Image(Url(url)):
            return json_block({"type": "input_image", "detail": "auto", "image_url": url})
        case Document(Stored() as stored, kind, name):
            name = name or "document"
            return with_file_url(stored, kind, lambda url: {"type": "input_file", "filename": name, "file_data": url})
        case Document(Url(url)):
            return json_block({"type": "input_file", "file_url": url})
        case Audio(Stored() as stored, kind) if kind in SOUND:
            form = SOUND[kind]
            return with_file(stored, lambda d: {"type": "input_audio", "input_audio": {"data": d, "format": form}})
        case FileRef("openai", id, kind) if kind.startswith("image/"):
            return json_block({"type": "input_image", "detail": "auto", "file_id": id})
        case FileRef("openai", id):
            return json_block({"type": "input_file", "file_id": id})
        case _:
            unsupported(part, WHO, "pictures, documents, WAV and MP3")


# ---------------------------------------------------------------------- events


class _CachedInput(Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None


class _ReasoningOutput(Struct):
    reasoning_tokens: int | None = None


class _Usage(Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _CachedInput | None = None
    output_tokens_details: _ReasoningOutput | None = None


class _Why(Struct):
    reason: str | None = None


class _Error(Struct):
    message: str = ""
    code: str | None = None
    type: str | None = None


class _ErrorEvent(Struct):
    """Documented flat; sent with the error one level down."""

    message: str = ""
    code: str | None = None
    error: _Error | None = None


class _Response(Struct):
    model: str | None = None
    usage: _Usage | None = None
    incomplete_details: _Why | None = None
    error: _Error | None = None


class _Ended(Struct):
    response: _Response


class _Item(Struct):
    output_index: int
    item: msgspec.Raw


class _Delta(Struct):
    output_index: int = 0
    delta: str = ""


DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "response.created": msgspec.json.Decoder(_Ended),
    "response.output_item.added": msgspec.json.Decoder(_Item),
    "response.output_item.done": msgspec.json.Decoder(_Item),
    "response.output_text.delta": msgspec.json.Decoder(_Delta),
    "response.refusal.delta": msgspec.json.Decoder(_Delta),
    "response.reasoning_summary_text.delta": msgspec.json.Decoder(_Delta),
    "response.reasoning_text.delta": msgspec.json.Decoder(_Delta),
    "response.function_call_arguments.delta": msgspec.json.Decoder(_Delta),
    "response.completed": msgspec.json.Decoder(_Ended),
    "response.incomplete": msgspec.json.Decoder(_Ended),
    "response.failed": msgspec.json.Decoder(_Ended),
    "error": msgspec.json.Decoder(_ErrorEvent),
}
"""By the type of the event; others are passed over."""

ERROR_STATUS = {
    "rate_limit_exceeded": 429,
    "server_error": 500,
    "insufficient_quota": 429,
    "context_length_exceeded": 400,
    "invalid_request_error": 400,
    "server_is_overloaded": 503,
    "slow_down": 503,
}


class _Type(Struct):
    type: str = ""


_type_of = msgspec.json.Decoder(_Type)


class ResponsesReader:
    """Reads one answer."""

    def __init__(self, model: str) -> None:
        self._sse = SseReader()
        self._model = model
        self._items: dict[int, bytes] = {}
        self._calls: dict[int, tuple[int, str]] = {}  # output index → number of the call, and its name
        self._end: tuple[str, _Response] | None = None

    def feed(self, chunk: bytes) -> Iterable[Delta]:
        out: list[Delta] = []
        for name, data in self._sse.feed(chunk):
            try:
                kind = name or _type_of.decode(data).type
                decoder = DECODERS.get(kind)
                if decoder is None:
                    if not kind and b'"chat.completion.chunk"' in data:
                        raise nonsense("a stream of Chat Completions, which 'openai-chat:' speaks", data)
                    continue
                event = decoder.decode(data)
            except UNREADABLE:
                if data == b"[DONE]":
                    continue
                raise nonsense("an event that cannot be read", data) from None
            self._receive(kind, event, out)
        return out

    def _receive(self, kind: str, event: Any, out: list[Delta]) -> None:
        match kind:
            case "response.output_text.delta" | "response.refusal.delta":
                if event.delta:
                    out.append(event.delta)
            case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                out.append(Reasoning(event.delta))
            case "response.function_call_arguments.delta":
                number, name = self._calls.get(event.output_index, (0, ""))
                out.append(CallPiece(number, name, event.delta))
            case "response.output_item.added":
                item = msgspec.json.decode(event.item)
                if item.get("type") == "function_call":
                    number, name = len(self._calls), str(item.get("name", ""))
                    self._calls[event.output_index] = (number, name)
                    out.append(CallPiece(number, name, ""))
            case "response.output_item.done":
                self._items[event.output_index] = bytes(event.item)
            case "response.created":
                self._model = event.response.model or self._model
            case "response.completed" | "response.incomplete":
                self._end = (kind, event.response)
            case "response.failed":
                error = event.response.error or _Error("the response failed, and the provider does not say why")
                raise status_error(ERROR_STATUS.get(error.code or "", 400), {}, error.message, error.code or "")
            case "error":
                error = event.error or _Error(event.message, event.code)
                code = error.code or error.type or ""
                raise status_error(ERROR_STATUS.get(code, 500), {}, error.message, code)
            case _:
                raise InternalError(f"no case for {kind}")

    def close(self) -> ModelResponse:
        if self._end is None:
            raise broken("the connection ended before response.completed")
        kind, response = self._end
        model = response.model or self._model
        parts: list[Part] = []
        refused = False
        for index in sorted(self._items):
            refused |= _read_item(self._items[index], model, parts)
        return ModelResponse(
            parts=tuple(parts), usage=_usage(response.usage), stop=_stop(kind, response, parts, refused), model=model
        )


def _stop(kind: str, response: _Response, parts: list[Part], refused: bool) -> Stop:
    if kind == "response.incomplete":
        why = response.incomplete_details.reason if response.incomplete_details else None
        return "filtered" if why == "content_filter" else "length"
    if refused:
        return "filtered"
    return "tool_calls" if any(type(part) is ToolCall for part in parts) else "end"


def _read_item(raw: bytes, model: str, parts: list[Part]) -> bool:
    """Add what an item says; whether it is a refusal."""
    item = msgspec.json.decode(raw)
    match item.get("type"):
        case "message":
            content = item.get("content") or []
            for each in content:
                text = each.get("text") or each.get("refusal") or ""
                if text:
                    parts.append(Text(str(text)))
            return any(each.get("type") == "refusal" for each in content)
        case "function_call":
            args, unread = parsed_args(str(item.get("arguments", "")))
            parts.append(ToolCall(str(item.get("call_id", "")), str(item.get("name", "")), args, unread))
        case "reasoning":
            said = [str(each.get("text", "")) for each in (item.get("summary") or item.get("content") or [])]
            text = "\n\n".join(said)
            if item.get("encrypted_content"):
                parts.append(ProviderPart("openai", model, "reasoning", raw.decode(), text))
            elif text:  # known by its id only, at a provider that we ask to keep nothing
                parts.append(Reasoning(text))
        case kind:
            parts.append(ProviderPart("openai", model, str(kind), raw.decode(), _did(item)))
    return False


def _did(item: dict[str, Any]) -> str:
    """What a tool of the provider's did, in words for another provider."""
    match item.get("type"):
        case "web_search_call":
            action = item.get("action") or {}
            found = [str(each.get("url", "")) for each in action.get("sources") or () if isinstance(each, dict)]
            return in_words(f"web_search: {action.get('query') or action.get('url') or ''}", *found)
        case "code_interpreter_call":
            logs = [str(each.get("logs", "")) for each in item.get("outputs") or () if isinstance(each, dict)]
            return in_words("code_execution:", str(item.get("code") or ""), *logs)
        case "file_search_call":
            found = [str(each.get("text", "")) for each in item.get("results") or () if isinstance(each, dict)]
            return in_words(f"file_search: {', '.join(map(str, item.get('queries') or ()))}", *found)
        case "mcp_call":
            gave = str(item.get("output") or item.get("error") or "")
            return in_words(f"{item.get('name')}: {item.get('arguments')}", gave)
        case _:
            return ""


def _usage(usage: _Usage | None) -> Usage | None:
    if usage is None:
        return None
    cached, written = None, None
    if usage.input_tokens_details is not None:
        cached, written = usage.input_tokens_details.cached_tokens, usage.input_tokens_details.cache_write_tokens
    reasoning = usage.output_tokens_details.reasoning_tokens if usage.output_tokens_details is not None else None
    asked = usage.input_tokens
    return Usage(
        input=None if asked is None else max(asked - (cached or 0) - (written or 0), 0),
        output=usage.output_tokens,
        cache_read=cached,
        cache_write=written,
        reasoning=reasoning,
    )
