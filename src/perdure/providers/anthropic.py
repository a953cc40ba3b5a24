"""Anthropic's Messages API.

An answer is a list of content blocks, each begun, continued by deltas and ended; `message_delta` brings the reason to
stop and the usage, and only `message_stop` makes the answer complete. Blocks that only Anthropic understands (thinking
with its signature, redacted thinking, what server tools did) become `ProviderPart`s and go back unchanged.

Caching: at most three markers, set when a request is built and never stored. One after tools and system, one at the end
of the conversation, one at the end of the request before this one, so that a step with many blocks still finds it: the
API looks back twenty blocks from a marker.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from perdure.errors import InternalError, ProviderError
from perdure.model.llm import CallPiece, Delta, ModelRequest, ModelResponse, ModelSettings, Stop, Usage
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
from perdure.providers.claude import Reasons, reasons
from perdure.providers.dialect import (
    UNREADABLE,
    Block,
    Conversations,
    Piece,
    Spoken,
    Structured,
    Wire,
    broken,
    call_args,
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
)
from perdure.providers.schemas import (
    ANTHROPIC_NATIVE,
    ANY,
    Remembered,
    output_for,
    parameters,
    tool_schema,
    translated,
)
from perdure.providers.sse import SseReader

VERSION = "2023-06-01"
WHO = "Anthropic's API"

MAX_TOKENS = 8192
"""The API wants a limit. Set `ModelSettings(max_tokens=…)` for longer answers."""

CALL_ID = re.compile(r"[a-zA-Z0-9_-]+")
IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")

STOPS: dict[str, Stop] = {
    "end_turn": "end",
    "stop_sequence": "end",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "filtered",
    "pause_turn": "paused",
    "compaction": "paused",
}

OLD = (
    "claude-2", "claude-3", "claude-instant", "claude-4-", "claude-opus-4-0", "claude-opus-4-2025",
    "claude-sonnet-4-0", "claude-sonnet-4-2025",
)  # fmt: skip
"""Models without structured output of their own."""

TOOLS: dict[str, dict[str, str]] = {
    "web_search": {"type": "web_search_20250305", "name": "web_search"},
    "web_fetch": {"type": "web_fetch_20250910", "name": "web_fetch"},
    "code_execution": {"type": "code_execution_20250825", "name": "code_execution"},
}
"""Tools that run at the provider. A newer version is chosen by the option `type`."""

BETAS = {"web_fetch_20250910": "web-fetch-2025-09-10", "code_execution_20250825": "code-execution-2025-08-25"}
"""Tools that are there only for requests with this header."""

COUNTED = ("model", "tools", "tool_choice", "thinking", "output_config", "output_format", "mcp_servers")
"""What of a request's head counts towards its tokens, and the API for that takes."""


class AnthropicMessages:
    """The dialect. One object serves all sessions: it holds nothing but encoded messages."""

    name = "anthropic"

    def __init__(self) -> None:
        self._conversations = Conversations(_spoken, b"content")
        self._output = Remembered(lambda schema: translated(schema, ANTHROPIC_NATIVE))
        self._parameters = Remembered(lambda schema: tool_schema(schema, ANY))

    # ------------------------------------------------------------------ the request

    def structured(self, request: ModelRequest, model: str) -> Structured:
        """A model that thinks cannot be made to call a tool, and answers with citations cannot be held to a schema."""
        schema = request.output_schema or {}
        native = not model.startswith(OLD) and not request.provider_tools and self._output.takes(schema)
        thinks = request.settings.reasoning not in (None, "off")
        forced = not thinks and not request.provider_tools
        return Structured("schema" if native else "tool", object_root=False, forced=forced)

    def build(self, request: ModelRequest, model: str) -> Wire:
        head = self._head(request, model)
        return Wire("/v1/messages", self._body(head, request), _headers(head))

    def build_count(self, request: ModelRequest, model: str) -> Wire:
        head = {name: value for name, value in self._head(request, model).items() if name in COUNTED}
        headers = {**_headers(head), "accept": "application/json"}
        return Wire("/v1/messages/count_tokens", self._body(head, request), headers)

    def read_count(self, body: bytes) -> int:
        return figure_in(body, "input_tokens")

    def _head(self, request: ModelRequest, model: str) -> dict[str, Any]:
        """All of a request but what is said in it."""
        settings, reasoned = request.settings, reasons(request.settings, model)
        head: dict[str, Any] = {
            "model": model,
            # What is thought counts towards the limit: without one of the user's there is as much left for the answer.
            "max_tokens": settings.max_tokens or MAX_TOKENS + (reasoned.tokens if reasoned else 0),
            "stream": True,
            **self._tuning(request, reasoned),
            **(settings.extra or {}),
        }
        own: list[dict[str, Any]] = [{**base, **options} for base, options in own_tools(request, TOOLS, WHO)]
        if request.tools or own:
            declared = parameters(self._parameters, request, WHO)
            head["tools"] = own + [
                {"name": tool.name, "description": tool.description, "input_schema": schema}
                for tool, schema in declared
            ]
        return head

    def _body(self, head: dict[str, Any], request: ModelRequest) -> tuple[Piece, ...]:
        marker = _marker(request.settings)
        system, settled, messages = self._conversations(request)
        pieces: list[Piece] = [encode(head)[:-1]]
        if system:
            pieces += [b',"system":[', *joined([*system[:-1], _marked(system[-1], marker)]), b"]"]
        # Last, so that one request begins as the one before it did.
        pieces += [b',"messages":[', *settled]
        ends = _cache_ends(messages)
        for index, (role, blocks) in enumerate(messages):
            if index in ends:
                blocks = (*blocks[:-1], _marked(blocks[-1], marker))
            pieces += [*([b","] if index else []), *self._conversations.written(role, blocks)]
        pieces.append(b"]}")
        return compact(pieces)

    def _tuning(self, request: ModelRequest, reasoned: Reasons | None) -> dict[str, Any]:
        """Everything of the settings that has a field of its own."""
        settings, out = request.settings, dict[str, Any]()
        for name in ("temperature", "top_p"):
            if (value := getattr(settings, name)) is not None:
                out[name] = value
        if settings.seed is not None:
            raise ProviderError(
                "Anthropic's API takes no seed: leave ModelSettings(seed=…) out", code="invalid_settings"
            )
        if settings.stop:
            out["stop_sequences"] = settings.stop
        output: dict[str, Any] = {}
        if request.output_schema:
            schema = output_for(self._output, request.output_schema, WHO)
            output["format"] = {"type": "json_schema", "schema": schema}
        if reasoned is not None:
            out["thinking"] = reasoned.thinking
            if reasoned.effort:
                output["effort"] = reasoned.effort
        if output:
            out["output_config"] = output
        if request.tools:
            out["tool_choice"] = _tool_choice(request)
        return out

    # ------------------------------------------------------------------ the answer

    def reader(self, model: str) -> AnthropicReader:
        return AnthropicReader(model)

    def failure(self, status: int, headers: Mapping[str, str], body: bytes) -> ProviderError:
        try:
            error = msgspec.json.decode(body, type=_ErrorEvent).error
        except UNREADABLE:
            return status_error(status, headers, body[:500].decode("utf-8", "replace"))
        return status_error(status, headers, error.message, error.type)


def _headers(head: dict[str, Any]) -> dict[str, str]:
    headers = {"anthropic-version": VERSION}
    kinds = [tool.get("type") for tool in head.get("tools", ()) if isinstance(tool, dict)]
    if betas := [BETAS[kind] for kind in kinds if kind in BETAS]:
        headers["anthropic-beta"] = ",".join(betas)
    return headers


def _tool_choice(request: ModelRequest) -> dict[str, Any]:
    wanted = "none" if request.tool_choice == "none" else request.settings.tool_choice or "auto"
    kind = {"auto": "auto", "none": "none", "required": "any"}.get(wanted)
    choice: dict[str, Any] = {"type": "tool", "name": wanted} if kind is None else {"type": kind}
    if request.settings.parallel_tool_calls is False and kind != "none":
        choice["disable_parallel_tool_use"] = True
    return choice


def _marker(settings: ModelSettings) -> bytes:
    if settings.cache is False:
        return b""
    ttl = b',"ttl":"1h"' if settings.cache == "1h" else b""
    return b',"cache_control":{"type":"ephemeral"%b}}' % ttl


def _marked(block: Block, marker: bytes) -> Block:
    first, last = block[0], block[-1]
    # Thinking blocks may carry no marker; they are in the API's cache with what follows them.
    if not marker or isinstance(first, Stored) or isinstance(last, Stored) or first.startswith(b'{"type":"thinking"'):
        return block
    return (*block[:-1], last[:-1] + marker)


def _cache_ends(messages: list[Spoken]) -> tuple[int, ...]:
    """Which messages end with a marker: the last one, and the last one of the request before this."""
    last = len(messages) - 1
    before = next((i for i in range(last - 1, -1, -1) if messages[i].role == "user"), None)
    return (last,) if before is None else (before, last)


def _spoken(message: Message) -> Spoken:
    if message.role == "tool":
        return Spoken("user", tuple(_result(part) for part in message.parts if type(part) is ToolResult))
    role = "assistant" if message.role == "assistant" else message.role
    return Spoken(role, tuple(block for part in message.parts if (block := _block(part)) is not None))


def _block(part: Part) -> Block | None:
    match part:
        case Text(text):
            return json_block({"type": "text", "text": text}) if text.strip() else None
        case ToolCall(id, name):
            call = {"type": "tool_use", "id": wire_id(id, CALL_ID), "name": name, "input": call_args(part)}
            return json_block(call)
        case ProviderPart("anthropic", _, _, body):
            return (body.encode(),)
        case ProviderPart() | Reasoning():
            text = foreign_text(part)
            return json_block({"type": "text", "text": text}) if text else None
        case ToolResult():
            return _result(part)
        case _:
            return _file(part)


def _file(part: File) -> Block:
    takes = "pictures (PNG, JPEG, GIF, WebP) and PDF"
    match part:
        case Image(Stored() as stored, kind) if kind in IMAGES:
            return with_file(
                stored,
                lambda data: {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}},
            )
        case Document(Stored() as stored, "application/pdf" as kind, name):
            source = {"type": "base64", "media_type": kind}
            return with_file(stored, lambda data: _document({**source, "data": data}, name))
        case Image(Url(url)):
            return json_block({"type": "image", "source": {"type": "url", "url": url}})
        case Document(Url(url), _, name):
            return json_block(_document({"type": "url", "url": url}, name))
        case FileRef("anthropic", id, kind, name) if kind.startswith("image/"):
            return json_block({"type": "image", "source": {"type": "file", "file_id": id}})
        case FileRef("anthropic", id, _, name):
            return json_block(_document({"type": "file", "file_id": id}, name))
        case Audio() | _:
            unsupported(part, WHO, takes)


def _document(source: dict[str, Any], name: str) -> dict[str, Any]:
    return {"type": "document", "source": source, **({"title": name} if name else {})}


def _result(part: ToolResult) -> Block:
    head: dict[str, Any] = {"type": "tool_result", "tool_use_id": wire_id(part.call_id, CALL_ID)}
    if part.status != "ok":
        head["is_error"] = True
    text = result_text(part.content)
    content = [json_block({"type": "text", "text": text})] if text.strip() else []
    content += [_file(each) for each in part.files]
    return compact([encode(head)[:-1], b',"content":[', *joined(content), b"]}"])


# ---------------------------------------------------------------------- events


class _Error(Struct):
    message: str = ""
    type: str = ""


class _ErrorEvent(Struct):
    error: _Error


class _OutputDetails(Struct):
    thinking_tokens: int | None = None


class _Usage(Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    output_tokens_details: _OutputDetails | None = None


class _Begun(Struct, frozen=True):
    model: str = ""
    usage: _Usage | None = None


class _MessageStart(Struct):
    message: _Begun = _Begun()  # a gateway of Amazon's sends one without


class _BlockStart(Struct):
    index: int
    content_block: msgspec.Raw


class _Delta(Struct):
    type: str = ""
    text: str = ""
    partial_json: str = ""
    thinking: str = ""
    signature: str = ""
    content: Any = None


class _BlockDelta(Struct):
    index: int
    delta: _Delta


class _BlockStop(Struct):
    index: int


class _Ending(Struct):
    stop_reason: str | None = None


class _MessageDelta(Struct):
    delta: _Ending
    usage: _Usage | None = None


class _MessageStop(Struct):
    pass


DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "message_start": msgspec.json.Decoder(_MessageStart),
    "content_block_start": msgspec.json.Decoder(_BlockStart),
    "content_block_delta": msgspec.json.Decoder(_BlockDelta),
    "content_block_stop": msgspec.json.Decoder(_BlockStop),
    "message_delta": msgspec.json.Decoder(_MessageDelta),
    "message_stop": msgspec.json.Decoder(_MessageStop),
    "error": msgspec.json.Decoder(_ErrorEvent),
}
"""By the name of the event; others, such as `ping` and those that the API may add, are passed over."""

ERROR_STATUS = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""What an error event in the middle of a stream would have been as a status."""


class _Type(Struct):
    type: str = ""


_type_of = msgspec.json.Decoder(_Type)


class _OpenBlock:
    """A content block that is being written."""

    def __init__(self, raw: bytes) -> None:
        self.start: dict[str, Any] = msgspec.json.decode(raw)
        self.kind = str(self.start.get("type", ""))
        self.text: list[str] = [self.start.get("text") or self.start.get("thinking") or ""]
        self.json: list[str] = []
        self.signature: list[str] = [self.start.get("signature") or ""]
        self.raw = raw


class AnthropicReader:
    """Reads one answer."""

    def __init__(self, model: str) -> None:
        self._sse = SseReader()
        self._model = model
        self._open: dict[int, _OpenBlock] = {}
        self._parts: list[Part] = []
        self._calls: dict[int, int] = {}  # block index → index of the call in the answer
        self._usage: dict[str, Any] = {}
        self._stop: str | None = None
        self._complete = False

    def feed(self, chunk: bytes) -> Iterable[Delta]:
        out: list[Delta] = []
        for name, data in self._sse.feed(chunk):
            try:
                decoder = DECODERS.get(name or _type_of.decode(data).type)  # some gateways leave the names out
                if decoder is None:
                    continue
                event = decoder.decode(data)
            except UNREADABLE:
                raise nonsense(f"a {name} event that cannot be read", data) from None
            if type(event) is _BlockDelta:
                self._continue(event.index, event.delta, out)
            else:
                self._receive(event, out)
        return out

    def _continue(self, index: int, delta: _Delta, out: list[Delta]) -> None:
        block = self._open.get(index)
        if block is None:
            raise broken(f"content block {index} goes on and was never begun")
        if delta.text:
            block.text.append(delta.text)
            out.append(delta.text)
        elif delta.partial_json:
            block.json.append(delta.partial_json)
            if block.kind == "tool_use":
                out.append(CallPiece(self._calls[index], str(block.start.get("name", "")), delta.partial_json))
        elif delta.thinking:
            block.text.append(delta.thinking)
            out.append(Reasoning(delta.thinking))
        elif delta.signature:
            block.signature.append(delta.signature)
        elif delta.type == "compaction_delta" and isinstance(delta.content, str):
            block.text.append(delta.content)

    def _receive(self, event: Any, out: list[Delta]) -> None:
        match event:
            case _MessageStart(message):
                self._model = message.model or self._model
                self._count(message.usage)
            case _BlockStart(index, raw):
                block = self._open[index] = _OpenBlock(bytes(raw))
                if block.kind == "tool_use":
                    self._calls[index] = len(self._calls)
                    out.append(CallPiece(self._calls[index], str(block.start.get("name", "")), ""))
                elif block.kind == "text" and block.text[0]:
                    out.append(block.text[0])
                elif block.kind == "thinking" and block.text[0]:
                    out.append(Reasoning(block.text[0]))
            case _BlockStop(index):
                ended = self._open.pop(index, None)
                if ended is not None:
                    self._parts.append(self._part(ended))
            case _MessageDelta(ending, usage):
                self._stop = ending.stop_reason or self._stop
                self._count(usage)
            case _MessageStop():
                self._complete = True
            case _ErrorEvent(error):
                raise status_error(ERROR_STATUS.get(error.type, 500), {}, error.message, error.type)
            case _:
                raise InternalError(f"no case for {type(event).__name__}")

    def _part(self, block: _OpenBlock) -> Part:
        text = "".join(block.text)
        body: dict[str, Any]
        match block.kind:
            case "text":
                return Text(text)
            case "tool_use":
                given = block.start.get("input")
                args, raw = parsed_args("".join(block.json)) if block.json else (given or {}, None)
                return ToolCall(str(block.start.get("id", "")), str(block.start.get("name", "")), args, raw)
            case "thinking" if not any(block.signature):
                # The API refuses one without a signature, and the session with it: it goes back in words.
                return Reasoning(text)
            case "thinking":
                body = {"type": "thinking", "thinking": text, "signature": "".join(block.signature)}
                return ProviderPart(self.name, self._model, "thinking", encode(body).decode(), text)
            case "compaction":  # the provider's own short form of what went before: others get that as it was
                body = {**block.start, "content": text or block.start.get("content")}
                return ProviderPart(self.name, self._model, "compaction", encode(body).decode())
            case kind if block.json:  # a server tool's call: its input was streamed
                body = {**block.start, "input": parsed_args("".join(block.json))[0]}
                return ProviderPart(self.name, self._model, kind, encode(body).decode(), _did(body))
            case kind:
                return ProviderPart(self.name, self._model, kind, block.raw.decode(), _did(block.start))

    name = AnthropicMessages.name

    def _count(self, usage: _Usage | None) -> None:
        """Later figures are totals and replace earlier ones; what one does not say stays."""
        if usage is None:
            return
        details = usage.output_tokens_details
        for name, value in (
            ("input", usage.input_tokens),
            ("output", usage.output_tokens),
            ("cache_read", usage.cache_read_input_tokens),
            ("cache_write", usage.cache_creation_input_tokens),
            ("reasoning", None if details is None else details.thinking_tokens),
        ):
            if value is not None:
                self._usage[name] = value

    def close(self) -> ModelResponse:
        if not self._complete:
            raise broken("the connection ended before message_stop")
        if self._stop is None or self._open:
            raise broken("it ended without a stop reason, or in the middle of a block")
        stop = STOPS.get(self._stop)
        if stop is None:
            raise ProviderError(f"the answer stopped for an unknown reason, {self._stop!r}", code="provider_nonsense")
        return ModelResponse(
            parts=tuple(self._parts), usage=Usage(**self._usage) if self._usage else None, stop=stop, model=self._model
        )


def _did(block: dict[str, Any]) -> str:
    """What a tool of the provider's was asked, or what it gave, in words for another provider."""
    kind, content = str(block.get("type", "")), block.get("content")
    if kind in ("server_tool_use", "mcp_tool_use"):
        return in_words(f"{block.get('name')}: {encode(block.get('input')).decode()}")
    if not kind.endswith("_tool_result"):
        return ""
    if kind == "mcp_tool_result" and isinstance(content, list):
        return in_words("mcp returned:", *[str(each.get("text", "")) for each in content if isinstance(each, dict)])
    if isinstance(content, list):  # what a search found; the text of it is encrypted
        found = [f"{each.get('title', '')} {each.get('url', '')}" for each in content if isinstance(each, dict)]
        return in_words(f"{kind.removesuffix('_tool_result')} found:", *found)
    content = content if isinstance(content, dict) else {}
    shown = [str(content.get(name) or "") for name in ("error_code", "url", "stdout", "stderr")]
    return in_words(f"{kind.removesuffix('_tool_result')} returned:", *shown)
