"""Chat Completions: OpenAI's older API, and the one that most other servers speak.

Servers differ in small ways, and each way is a field of `Quirks`; nothing else knows which server it talks to. An
answer is complete once a choice has a `finish_reason`; usage may follow it, in a chunk without choices, until the
body ends, with `[DONE]` or without.

Reasoning is read where a server tells it (`reasoning_content`, `reasoning`, `reasoning_details`, Mistral's thinking
chunks) and goes back only to servers that ask for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from perdure.errors import ProviderError
from perdure.model.llm import CallPiece, Delta, ModelRequest, ModelResponse, OutputMode, Stop, Usage
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
    foreign_text,
    joined,
    json_block,
    nonsense,
    own_tools,
    parsed_args,
    result_text,
    status_error,
    status_in,
    unsupported,
    wire_id,
    with_file,
    with_file_url,
)
from perdure.providers.schemas import (
    ANY,
    OPENAI_STRICT,
    Remembered,
    Untranslatable,
    output_for,
    parameters,
    tool_schema,
    translated,
)
from perdure.providers.sse import SseReader

EFFORTS = {"off": "none", "minimal": "minimal", "low": "low", "medium": "medium", "high": "high", "max": "xhigh"}
SOUND = {"audio/wav": "wav", "audio/mpeg": "mp3"}
OLD = ("gpt-3.5", "gpt-4-", "gpt-4:", "o1-mini", "o1-preview")
"""OpenAI's models that take no schema for their answers."""


class Quirks(Struct, frozen=True, kw_only=True):
    """How a server differs from OpenAI's own.

    `call_id` is what ids of calls must look like. `reasoning_back`: the field in which it wants its reasoning to be
    sent back, if it wants that. `output`: how it is best asked for a typed answer, and `output_with_tools` where there
    are tools as well. `json_object`: it knows the wish for JSON of any form. `forced`: it can be made to call a tool.
    """

    max_tokens: Literal["max_completion_tokens", "max_tokens"] = "max_tokens"
    usage_option: bool = True
    call_id: re.Pattern[str] = re.compile(r"[\x21-\x7e]{1,64}")
    output: OutputMode = "schema"
    output_with_tools: OutputMode | None = None
    json_object: bool = False
    forced: bool = True
    strict: bool = False
    reasoning: Literal["reasoning_effort", "reasoning", "none"] = "reasoning_effort"
    reasoning_back: Literal["", "reasoning_content", "reasoning_details"] = ""
    documents: bool = False
    seed: str = "seed"
    cache_key: bool = False


class ChatCompletions:
    """The dialect, as one server speaks it. `name` is the server's: parts of one are foreign to another."""

    def __init__(self, name: str = "openai-chat", quirks: Quirks | None = None) -> None:
        self.name, self._quirks = name, quirks or Quirks()
        self._who = f"the API of {name!r}"
        self._encoded = Encoded(self._messages)
        self._output = Remembered(strict_schema if self._quirks.strict else loose_schema)
        self._parameters = Remembered(lambda schema: tool_schema(schema, ANY))

    def structured(self, request: ModelRequest, model: str) -> Structured:
        quirks = self._quirks
        mode = quirks.output if not request.tools else quirks.output_with_tools or quirks.output
        return Structured("tool" if model.startswith(OLD) else mode, forced=quirks.forced)

    def build(self, request: ModelRequest, model: str) -> Wire:
        head: dict[str, Any] = {"model": model, "stream": True, **self._tuning(request)}
        head |= request.settings.extra or {}
        pieces: list[Piece] = [encode(head)[:-1]]
        messages = [block for blocks in self._encoded(request.messages) for block in blocks]
        # Last, so that one request begins as the one before it did.
        pieces += [b',"messages":[', *joined(messages), b"]}"]
        return Wire("/chat/completions", compact(pieces))

    def reader(self, model: str) -> ChatReader:
        return ChatReader(self.name, model)

    def failure(self, status: int, headers: Mapping[str, str], body: bytes) -> ProviderError:
        return openai_failure(status, headers, body)

    def _tuning(self, request: ModelRequest) -> dict[str, Any]:
        settings, quirks, out = request.settings, self._quirks, dict[str, Any]()
        own_tools(request, {}, self._who)
        if quirks.usage_option:
            out["stream_options"] = {"include_usage": True}
        if quirks.cache_key and settings.cache is not False and request.session_id:
            out["prompt_cache_key"] = request.session_id[:64]
        names = (
            ("temperature", "temperature"), ("top_p", "top_p"), ("max_tokens", quirks.max_tokens),
            ("seed", quirks.seed), ("stop", "stop"), ("parallel_tool_calls", "parallel_tool_calls"),
        )  # fmt: skip
        for ours, theirs in names:
            value = getattr(settings, ours)
            if value not in (None, ()) and (ours != "parallel_tool_calls" or request.tools):
                out[theirs] = value
        out |= self._reasoning(settings.reasoning)
        if request.output_schema:
            schema, strict = output_for(self._output, request.output_schema, self._who)
            form = {"name": "answer", "schema": schema, "strict": strict}
            out["response_format"] = {"type": "json_schema", "json_schema": form}
        elif request.output_schema is not None and quirks.json_object:
            out["response_format"] = {"type": "json_object"}
        if request.tools:
            out["tools"] = [
                {
                    "type": "function",
                    "function": {"name": tool.name, "description": tool.description, "parameters": schema},
                }
                for tool, schema in parameters(self._parameters, request, self._who)
            ]
            wanted = "none" if request.tool_choice == "none" else settings.tool_choice or "auto"
            plain = wanted in ("auto", "none", "required")
            out["tool_choice"] = wanted if plain else {"type": "function", "function": {"name": wanted}}
        return out

    def _reasoning(self, wanted: str | int | None) -> dict[str, Any]:
        if wanted is None:
            return {}
        way = self._quirks.reasoning
        if way == "reasoning":
            return {"reasoning": {"max_tokens": wanted} if isinstance(wanted, int) else {"effort": EFFORTS[wanted]}}
        if way == "none" or isinstance(wanted, int):
            raise ProviderError(
                f"{self.name!r} cannot be told to reason by {wanted!r}: "
                + ("leave ModelSettings(reasoning=…) out" if way == "none" else "use an effort such as 'high'"),
                code="invalid_settings",
            )
        return {"reasoning_effort": EFFORTS[wanted]}

    # ------------------------------------------------------------------ messages

    def _messages(self, message: Message) -> tuple[Block, ...]:
        if message.role == "tool":
            return tuple(block for part in message.parts if type(part) is ToolResult for block in self._result(part))
        if message.role == "assistant":
            return self._assistant(message)
        content: list[Block] = []
        for part in message.parts:
            if type(part) is Text:
                if part.text:
                    content.append(json_block({"type": "text", "text": part.text}))
            elif isinstance(part, ProviderPart | Reasoning):
                if text := foreign_text(part):
                    content.append(json_block({"type": "text", "text": text}))
            elif isinstance(part, Image | Document | Audio | FileRef):
                content.append(self._file(part))
        if not content:
            return ()
        if all(type(part) is Text for part in message.parts):  # every server reads a string; some read nothing else
            return (json_block({"role": message.role, "content": message.text}),)
        return (compact([b'{"role":"%b","content":[' % message.role.encode(), *joined(content), b"]}"]),)

    def _assistant(self, message: Message) -> tuple[Block, ...]:
        said: dict[str, Any] = {"role": "assistant"}
        text: list[str] = []
        back: list[str] = []
        for part in message.parts:
            match part:
                case Text(words):
                    text.append(words)
                case ProviderPart(dialect, _, _, body) if dialect == self.name:
                    back.append(body)
                case ProviderPart() | Reasoning():
                    text.append(foreign_text(part))
                case _:
                    pass
        calls = [self._call(part) for part in message.parts if type(part) is ToolCall]
        words = "".join(text)
        if not words and not calls:
            return ()
        said["content"] = words or None
        if calls:
            said["tool_calls"] = calls
        if self._quirks.reasoning_back and back:
            # Each body is what this server streamed in that field, as one JSON value.
            said[self._quirks.reasoning_back] = _joined_reasoning(back)
        elif calls and self._quirks.reasoning_back == "reasoning_content":
            said["reasoning_content"] = ""  # a call without it is refused, also one that another model made
        return (json_block(said),)

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments = encode(call.args).decode() if call.raw is None else call.raw
        said: dict[str, Any] = {
            "id": self._id(call.id),
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }
        if isinstance(call.replay, dict) and call.replay.get("dialect") == self.name:
            said["extra_content"] = call.replay.get("extra_content")
        return said

    def _id(self, given: str) -> str:
        pattern = self._quirks.call_id
        found = wire_id(given, pattern)
        return found if pattern.fullmatch(found) else found.removeprefix("call_")[:9]  # Mistral: nine characters

    def _result(self, part: ToolResult) -> Iterable[Block]:
        text = result_text(part.content)
        if part.files and not text:
            text = "see the next message"
        yield json_block({"role": "tool", "tool_call_id": self._id(part.call_id), "content": text})
        if part.files:  # results are text here: what a tool shows follows as if the user had shown it
            files = [self._file(each) for each in part.files]
            about = json_block({"type": "text", "text": f"What the tool {part.name} returned:"})
            yield compact([b'{"role":"user","content":[', *joined([about, *files]), b"]}"])

    def _file(self, part: File) -> Block:
        match part:
            case Image(Stored() as stored, kind) if kind.startswith("image/"):
                return with_file_url(stored, kind, lambda url: {"type": "image_url", "image_url": {"url": url}})
            case Image(Url(url)):
                return json_block({"type": "image_url", "image_url": {"url": url}})
            case Audio(Stored() as stored, kind) if kind in SOUND:
                form = SOUND[kind]
                return with_file(stored, lambda d: {"type": "input_audio", "input_audio": {"data": d, "format": form}})
            case Document(Stored() as stored, kind, name) if self._quirks.documents:
                name = name or "document"
                return with_file_url(
                    stored, kind, lambda url: {"type": "file", "file": {"filename": name, "file_data": url}}
                )
            case FileRef(provider, id) if provider == self.name and self._quirks.documents:
                return json_block({"type": "file", "file": {"file_id": id}})
            case _:
                takes = "pictures, WAV and MP3" + (", and documents" if self._quirks.documents else "")
                unsupported(part, self._who, takes)


def _joined_reasoning(bodies: list[str]) -> Any:
    values = [msgspec.json.decode(body) for body in bodies]
    if all(isinstance(value, str) for value in values):
        return "".join(values)
    return [each for value in values for each in (value if isinstance(value, list) else [value])]


def strict_schema(schema: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """A schema in OpenAI's strict form, and whether it could be brought into it.

    Strict means that every property is required and no other is allowed. One that has a default, or a map of any keys,
    cannot be said that way: it is sent as it is, as advice.
    """
    try:
        return translated(schema, OPENAI_STRICT), True
    except Untranslatable:
        return loose_schema(schema)


def loose_schema(schema: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    return translated(schema, ANY), False


# ---------------------------------------------------------------------- what comes back


class _Error(Struct):
    message: str | None = None
    type: str | None = None
    code: str | int | None = None

    @property
    def kind(self) -> str:
        """Its code; its type where the code only repeats a status."""
        return str(self.type or self.code or "") if status_in(self.code) else str(self.code or self.type or "")


class _Function(Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _CallDelta(Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None
    extra_content: Any = None  # where Google's compatible API puts its signatures


class _ChoiceDelta(Struct):
    content: str | list[Any] | None = None
    refusal: str | None = None
    reasoning_content: Any = None  # text, where it is reasoning
    reasoning: Any = None
    reasoning_details: list[Any] | None = None
    tool_calls: list[_CallDelta] | None = None


class _Cached(Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None


class _Thought(Struct):
    reasoning_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None
    completion_tokens_details: _Thought | None = None
    prompt_cache_hit_tokens: int | None = None  # DeepSeek's name
    total_tokens: int | None = None


class _Choice(Struct):
    index: int = 0
    delta: _ChoiceDelta | None = None
    finish_reason: str | None = None
    usage: _Usage | None = None  # Moonshot's place for it
    error: _Error | str | None = None  # OpenRouter's


class _Chunk(Struct):
    model: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: _Error | str | None = None
    object: Any = None


_chunk = msgspec.json.Decoder(_Chunk)
_whole_error = msgspec.json.Decoder(_Error)

STOPS: dict[str, Stop] = {
    "stop": "end",
    "eos": "end",
    "eos_token": "end",
    "stop_sequence": "end",
    "end_turn": "end",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "length": "length",
    "model_length": "length",
    "content_filter": "filtered",
}

ERROR_STATUS = {
    "rate_limit_exceeded": 429,
    "rate_limit_error": 429,
    "insufficient_quota": 429,
    "context_length_exceeded": 400,
    "invalid_request_error": 400,
    "authentication_error": 401,
}
"""What an error in the middle of a stream would have been as a status, where it does not tell one."""

GAVE_UP = frozenset({"error", "abort", "insufficient_system_resource"})
"""Ends that are none: the server could not go on."""

FINISHED = 64
"""Chunks after the last word in which usage may come. A server that goes on talking then is cut off."""


class _OpenCall:
    """A call that is being written. The first value of each field counts: servers repeat names, and change ids."""

    def __init__(self) -> None:
        self.id, self.name = "", ""
        self.extra: Any = None
        self.pieces: list[str] = []

    def whole(self) -> bool:
        closed = bool(self.pieces) and self.pieces[-1].rstrip().endswith("}")
        return closed and parsed_args("".join(self.pieces))[1] is None


class ChatReader:
    """Reads one answer."""

    def __init__(self, name: str, model: str) -> None:
        self._sse = SseReader()
        self._name, self._model = name, model
        self._text: list[str] = []
        self._thought: list[str] = []
        self._details: list[Any] = []
        self._calls: list[_OpenCall] = []
        self._by_index: dict[int | str, int] = {}
        self._usage: _Usage | None = None
        self._finish: str | None = None
        self._refused = False
        self._after = 0

    def feed(self, chunk: bytes) -> Iterable[Delta]:
        out: list[Delta] = []
        for _, data in self._sse.feed(chunk):
            if data == b"[DONE]":
                continue
            try:
                event = _chunk.decode(data)
                if event.object == "error":  # vLLM: all of the chunk is one
                    event.error = _whole_error.decode(data)
            except UNREADABLE:
                raise nonsense("a chunk that cannot be read", data) from None
            if event.error is not None:
                raise _streamed_error(event.error)
            self._model = event.model or self._model
            self._usage = event.usage or self._usage
            for choice in event.choices or ():
                if choice.index == 0:
                    self._choice(choice, out)
            if self._finish is not None:
                self._after += 1
                if self._after > FINISHED:
                    raise nonsense("more and more chunks after the end of its answer", data)
        return out

    def _choice(self, choice: _Choice, out: list[Delta]) -> None:
        if choice.error is not None:
            raise _streamed_error(choice.error)
        self._finish = choice.finish_reason or self._finish
        self._usage = choice.usage or self._usage
        delta = choice.delta
        if delta is None:
            return
        thought = delta.reasoning_content or delta.reasoning
        thought = thought if isinstance(thought, str) else ""
        for detail in delta.reasoning_details or ():
            _add_detail(self._details, detail)
            if isinstance(detail, dict) and not (delta.reasoning_content or delta.reasoning):
                thought += str(detail.get("text") or detail.get("summary") or "")
        if isinstance(delta.content, list):
            text, thinking = _mistral_content(delta.content)
            thought = thought or thinking
        else:
            text = delta.content or ""
        if thought:
            self._thought.append(thought)
            out.append(Reasoning(thought))
        if delta.refusal:
            self._refused, text = True, text + delta.refusal
        if text:
            self._text.append(text)
            out.append(text)
        for call in delta.tool_calls or ():
            self._call(call, out)

    def _call(self, delta: _CallDelta, out: list[Delta]) -> None:
        function = delta.function or _Function()
        id, name = delta.id or "", function.name or ""
        number = self._number(delta, id, name)
        if number is None:
            number = len(self._calls)
            self._calls.append(_OpenCall())
            out.append(CallPiece(number, name, ""))
        self._by_index[delta.index if delta.index is not None else id] = number
        call = self._calls[number]
        call.id, call.name, call.extra = call.id or id, call.name or name, call.extra or delta.extra_content
        arguments = function.arguments
        if isinstance(arguments, dict):
            arguments = encode(arguments).decode()
        if arguments:
            call.pieces.append(arguments)
            out.append(CallPiece(number, call.name, arguments))

    def _number(self, delta: _CallDelta, id: str, name: str) -> int | None:
        """Which call a delta belongs to; None where it begins one.

        By its index, as documented. Servers that number nothing, or every call with 0, begin a call with its name, and
        tell it from a name that is only repeated by another id, or by arguments that are whole already.
        """
        index = delta.index
        if index is None and id:
            return self._by_index.get(id)
        number = self._by_index.get(index) if index is not None else len(self._calls) - 1 if self._calls else None
        if number is None or not name:
            return number
        call = self._calls[number]
        begins = name != call.name or bool(delta.function and delta.function.arguments)
        another = id != call.id if id and call.id else begins and call.whole()
        return None if call.name and another else number

    def close(self) -> ModelResponse:
        if self._finish is None:
            raise broken("the connection ended before a finish_reason")
        parts: list[Part] = []
        thought = "".join(self._thought)
        if self._details:
            body = encode(self._details).decode()
            parts.append(ProviderPart(self._name, self._model, "reasoning_details", body, thought))
        elif thought:
            body = encode(thought).decode()
            parts.append(ProviderPart(self._name, self._model, "reasoning", body, thought))
        if self._text:
            parts.append(Text("".join(self._text)))
        for call in self._calls:
            args, raw = parsed_args("".join(call.pieces))
            replay = {"dialect": self._name, "extra_content": call.extra} if call.extra else None
            parts.append(ToolCall(call.id, call.name, args, raw, replay))
        if self._finish in GAVE_UP:
            raise ProviderError(f"the server gave up with {self._finish!r}", retryable=True, code="overloaded")
        stop = "filtered" if self._refused else STOPS.get(self._finish)
        if stop is None:
            raise ProviderError(f"the answer stopped for an unknown reason, {self._finish!r}", code="provider_nonsense")
        if stop == "end" and self._calls:  # several servers say "stop" for calls
            stop = "tool_calls"
        return ModelResponse(parts=tuple(parts), usage=_usage(self._usage), stop=stop, model=self._model)


def _add_detail(details: list[Any], piece: Any) -> None:
    """Add a piece of OpenRouter's reasoning. A signature is of the whole text, which comes in pieces."""
    if isinstance(piece, dict) and piece.get("type") in ("reasoning.text", "reasoning.summary"):
        same = (piece["type"], piece.get("index"))
        for known in reversed(details):
            if isinstance(known, dict) and (known.get("type"), known.get("index")) == same:
                for name, value in piece.items():
                    joins = name in ("text", "summary") and isinstance(known.get(name), str)
                    if value is not None:
                        known[name] = known[name] + str(value) if joins else value
                return
            if same[1] is None:  # without numbers, only neighbours are of one text
                break
    details.append(piece)


def _mistral_content(content: list[Any]) -> tuple[str, str]:
    text, thinking = [], []
    for each in content:
        if not isinstance(each, dict):
            continue
        if each.get("type") == "text":
            text.append(str(each.get("text", "")))
        elif each.get("type") == "thinking":
            thinking += [str(t.get("text", "")) for t in each.get("thinking", ()) if isinstance(t, dict)]
    return "".join(text), "".join(thinking)


def _usage(usage: _Usage | None) -> Usage | None:
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    cached = details.cached_tokens if details is not None else None
    if cached is None:
        cached = usage.prompt_cache_hit_tokens
    written = details.cache_write_tokens if details is not None else None
    details_out = usage.completion_tokens_details
    thought = None if details_out is None else details_out.reasoning_tokens
    asked, said = usage.prompt_tokens, usage.completion_tokens
    if asked is not None and said is not None and thought and usage.total_tokens == asked + said + thought:
        said += thought  # xAI counts it apart
    return Usage(
        input=None if asked is None else max(asked - (cached or 0) - (written or 0), 0),
        output=said,
        cache_read=cached,
        cache_write=written,
        reasoning=thought,
    )


class _Failure(Struct):
    error: _Error | str | None = None
    message: str | None = None
    detail: Any = None


def openai_failure(status: int, headers: Mapping[str, str], body: bytes) -> ProviderError:
    """An error body in any of the shapes that compatible servers send."""
    shown = body[:500].decode("utf-8", "replace")
    try:
        found = msgspec.json.decode(body, type=_Failure | list[_Failure])
    except UNREADABLE:
        return status_error(status, headers, shown)
    failure = found if isinstance(found, _Failure) else found[0] if found else _Failure()
    error = failure.error
    if isinstance(error, _Error):
        return status_error(status, headers, error.message or shown, error.kind)
    return status_error(status, headers, error or failure.message or shown)


def _streamed_error(error: _Error | str) -> ProviderError:
    """An error in the middle of a stream; some servers give the status that it would have had."""
    if isinstance(error, str):
        return status_error(500, {}, error)
    status = status_in(error.code) or ERROR_STATUS.get(str(error.code)) or ERROR_STATUS.get(str(error.type), 500)
    return status_error(status, {}, error.message or "no message", error.kind)
