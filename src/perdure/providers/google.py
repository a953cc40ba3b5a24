"""Google's Gemini API, and the same models on Vertex AI.

An answer is a series of whole `GenerateContentResponse`s; it is complete once a candidate has a `finishReason`, or the
prompt was blocked. Calls have no ids of their own on the Gemini API: the engine gives them some, results are paired by
name and order there.

Thought signatures must come back in their place. One on a call rides with the call (`ToolCall.replay`), one on text
follows it as a `ProviderPart` of its own.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from perdure.errors import ProviderError
from perdure.model.llm import CallPiece, Delta, ModelRequest, ModelResponse, OutputMode, Stop, Usage
from perdure.model.message import (
    File,
    FileRef,
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
    result_text,
    retry_after,
    status_error,
    unsupported,
    with_file,
)
from perdure.providers.schemas import GOOGLE, Remembered, output_for, parameters, tool_schema, translated
from perdure.providers.sse import SseReader

NAME = "google"
WHO = "Google's API"

TOOLS = {"web_search": "googleSearch", "code_execution": "codeExecution", "web_fetch": "urlContext"}
"""Tools that run at the provider."""

STOPS: dict[str, Stop] = {
    "STOP": "end",
    "MAX_TOKENS": "length",
    "SAFETY": "filtered",
    "RECITATION": "filtered",
    "LANGUAGE": "filtered",
    "BLOCKLIST": "filtered",
    "PROHIBITED_CONTENT": "filtered",
    "SPII": "filtered",
    "IMAGE_SAFETY": "filtered",
    "IMAGE_PROHIBITED_CONTENT": "filtered",
    "IMAGE_RECITATION": "filtered",
    "MODEL_ARMOR": "filtered",
}

SAYS_NOTHING = frozenset({"thought", "thoughtSignature"})
"""Fields of a part that are about what else it says. One without anything else may not be sent back."""

NOT_SIGNED = base64.b64encode(b"skip_thought_signature_validator").decode()
"""Newer models refuse a message whose first call has no signature. This is Google's word for one that another model
made."""

BUDGETS = {"off": 0, "minimal": 512, "low": 1024, "medium": 8192, "high": 24_576, "max": -1}
"""Efforts as tokens for Gemini 2.5, which takes no levels; -1 leaves it to the model."""
LEVELS = {"off": "minimal", "minimal": "minimal", "low": "low", "medium": "medium", "high": "high", "max": "high"}


class GoogleGenerate:
    """The dialect. `prefix` is what stands before `models/` in the path: it differs on Vertex."""

    name = NAME

    def __init__(self, prefix: str = "/v1beta") -> None:
        self._prefix, self._on_vertex = prefix, "/projects/" in prefix
        self._conversations = Conversations(_spoken, b"parts")
        self._output = Remembered(lambda schema: translated(schema, GOOGLE))
        self._parameters = Remembered(lambda schema: tool_schema(schema, GOOGLE))

    def structured(self, request: ModelRequest, model: str) -> Structured:
        """Gemini 2 cannot be held to a schema where it has tools, nor be given functions beside Google's own tools."""
        mode: OutputMode = "schema"
        if model.removeprefix("models/").startswith(("gemini-1", "gemini-2")):
            mode = "prompt" if request.provider_tools else "tool" if request.tools else "schema"
        if mode == "schema" and not self._output.takes(request.output_schema or {}):
            mode = "tool"
        return Structured(mode, object_root=False, forced=not request.provider_tools)

    def build(self, request: ModelRequest, model: str) -> Wire:
        head: dict[str, Any] = {"generationConfig": self._generation(request, model), **self._tools(request)}
        body = self._body(head | (request.settings.extra or {}), request)
        return Wire(f"{self._prefix}/models/{model}:streamGenerateContent?alt=sse", body)

    def build_count(self, request: ModelRequest, model: str) -> Wire:
        tools = self._tools(request)
        if self._on_vertex:
            tools.pop("toolConfig", None)  # unknown there
            body = self._body({"generationConfig": self._generation(request, model), **tools}, request)
        else:  # here the tokens of instructions and tools count only in a request within the request
            inner = self._body({"model": f"models/{model}", **tools}, request)
            body = compact([b'{"generateContentRequest":', *inner, b"}"])
        return Wire(f"{self._prefix}/models/{model}:countTokens", body, {"accept": "application/json"})

    def read_count(self, body: bytes) -> int:
        return figure_in(body, "totalTokens")

    def _body(self, head: dict[str, Any], request: ModelRequest) -> tuple[Piece, ...]:
        system, settled, contents = self._conversations(request)
        pieces: list[Piece] = [encode(head)[:-1]]
        if system:
            pieces += [b',"systemInstruction":{"parts":[', *joined(system), b"]}"]
        # Last, so that one request begins as the one before it did.
        pieces += [b',"contents":[', *settled]
        for index, (role, blocks) in enumerate(contents):
            pieces += [*([b","] if index else []), *self._conversations.written(role, blocks)]
        pieces.append(b"]}")
        return compact(pieces)

    def reader(self, model: str) -> GoogleReader:
        return GoogleReader(model)

    def failure(self, status: int, headers: Mapping[str, str], body: bytes) -> ProviderError:
        return _failure(status, headers, body)

    def _generation(self, request: ModelRequest, model: str) -> dict[str, Any]:
        settings, out = request.settings, dict[str, Any]()
        for ours, theirs in (
            ("max_tokens", "maxOutputTokens"),
            ("temperature", "temperature"),
            ("top_p", "topP"),
            ("seed", "seed"),
            ("stop", "stopSequences"),
        ):
            if (value := getattr(settings, ours)) not in (None, ()):
                out[theirs] = value
        if request.output_schema:
            schema = output_for(self._output, request.output_schema, WHO)
            out["responseMimeType"], out["responseJsonSchema"] = "application/json", schema
        wanted = settings.reasoning
        if wanted is not None:
            if isinstance(wanted, int):
                thinking: dict[str, Any] = {"thinkingBudget": wanted}
            elif model.startswith(("gemini-2", "models/gemini-2")):
                thinking = {"thinkingBudget": BUDGETS[wanted]}
            else:
                thinking = {"thinkingLevel": LEVELS[wanted]}
            out["thinkingConfig"] = {**thinking, "includeThoughts": wanted not in ("off", 0)}
        return out

    def _tools(self, request: ModelRequest) -> dict[str, Any]:
        tools: list[dict[str, Any]] = [{name: options} for name, options in own_tools(request, TOOLS, WHO)]
        if not request.tools:
            return {"tools": tools} if tools else {}
        declared = [
            {"name": tool.name, "description": tool.description, "parametersJsonSchema": schema}
            for tool, schema in parameters(self._parameters, request, WHO)
        ]
        wanted = "none" if request.tool_choice == "none" else request.settings.tool_choice or "auto"
        mode = {"auto": "AUTO", "none": "NONE", "required": "ANY"}.get(wanted)
        choice = {"mode": "ANY", "allowedFunctionNames": [wanted]} if mode is None else {"mode": mode}
        return {
            "tools": [*tools, {"functionDeclarations": declared}],
            "toolConfig": {"functionCallingConfig": choice},
        }


def _spoken(message: Message) -> Spoken:
    role = {"assistant": "model", "tool": "user"}.get(message.role, message.role)
    first = next((part for part in message.parts if type(part) is ToolCall), None)
    blocks = (_call(part, part is first) if type(part) is ToolCall else _block(part) for part in message.parts)
    return Spoken(role, tuple(block for block in blocks if block is not None))


def _call(part: ToolCall, first: bool) -> Block:
    call: dict[str, Any] = {"functionCall": {"name": part.name, "args": call_args(part)}}
    if isinstance(part.replay, dict) and part.replay.get("dialect") == NAME:
        call["thoughtSignature"] = part.replay.get("signature")
    elif first:
        call["thoughtSignature"] = NOT_SIGNED
    return json_block(call)


def _block(part: Part) -> Block | None:
    match part:
        case Text(text):
            return json_block({"text": text}) if text else None
        case ToolCall():
            return _call(part, first=False)
        case ToolResult():
            return _result(part)
        case ProviderPart(dialect, _, _, body) if dialect == NAME:
            return (body.encode(),)
        case ProviderPart() | Reasoning():
            text = foreign_text(part)
            return json_block({"text": text}) if text else None
        case _:
            return _file(part)


def _result(part: ToolResult) -> Block:
    content = part.content
    if part.status != "ok":
        response: Any = {"error": result_text(content)}
    else:
        response = content if isinstance(content, dict) else {"output": content}
    head = {"name": part.name, "response": response}
    if not part.files:
        return json_block({"functionResponse": head})
    files = [_file(each) for each in part.files]
    return compact([b'{"functionResponse":', encode(head)[:-1], b',"parts":[', *joined(files), b"]}}"])


def _file(part: File) -> Block:
    if isinstance(part, FileRef):
        if part.provider != NAME:
            unsupported(part, WHO, "its own files")
        return json_block({"fileData": {"mimeType": part.media_type, "fileUri": part.id}})
    kind = part.media_type
    match part.source:
        case Stored() as stored if kind:
            return with_file(stored, lambda data: {"inlineData": {"mimeType": kind, "data": data}})
        case Url(url):
            return json_block({"fileData": {"fileUri": url, **({"mimeType": kind} if kind else {})}})
        case _:
            unsupported(part, WHO, "files whose media type is said")


# ---------------------------------------------------------------------- what comes back


class _Call(Struct):
    name: str = ""
    args: dict[str, Any] | None = None
    id: str | None = None


class _Part(Struct, rename="camel"):
    text: str | None = None
    thought: bool = False
    thought_signature: str | None = None
    function_call: _Call | None = None


class _Content(Struct):
    parts: list[msgspec.Raw] | None = None


class _Candidate(Struct, rename="camel"):
    index: int = 0
    content: _Content | None = None
    finish_reason: str | None = None
    finish_message: str | None = None


class _Counts(Struct, rename="camel"):
    prompt_token_count: int | None = None
    candidates_token_count: int | None = None
    cached_content_token_count: int | None = None
    thoughts_token_count: int | None = None
    tool_use_prompt_token_count: int | None = None

    def reported(self) -> dict[str, int]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class _Feedback(Struct, rename="camel"):
    block_reason: str | None = None


class _ErrorBody(Struct):
    code: int | None = None
    message: str = ""
    status: str = ""
    details: list[dict[str, Any]] | None = None


class _Response(Struct, rename="camel"):
    candidates: list[_Candidate] | None = None
    usage_metadata: _Counts | None = None
    model_version: str | None = None
    prompt_feedback: _Feedback | None = None
    error: _ErrorBody | None = None


_response = msgspec.json.Decoder(_Response)
_part = msgspec.json.Decoder(_Part)


class GoogleReader:
    """Reads one answer."""

    def __init__(self, model: str) -> None:
        self._sse = SseReader()
        self._model = model
        self._parts: list[Part] = []
        self._text: list[str] = []
        self._thought: list[str] = []
        self._calls = 0
        self._counts: dict[str, int] = {}
        self._finish: str | None = None
        self._why = ""

    def feed(self, chunk: bytes) -> Iterable[Delta]:
        out: list[Delta] = []
        for _, data in self._sse.feed(chunk):
            try:
                response = _response.decode(data)
                if response.error is not None:
                    error = response.error
                    raise status_error(error.code or 500, {}, error.message, error.status)
                self._model = response.model_version or self._model
                if response.usage_metadata is not None:  # later figures are totals; one that is left out stays
                    self._counts |= response.usage_metadata.reported()
                if response.prompt_feedback is not None and response.prompt_feedback.block_reason:
                    self._finish = "PROHIBITED_CONTENT"
                for candidate in response.candidates or ():
                    if candidate.index == 0:
                        self._candidate(candidate, out)
            except UNREADABLE:
                raise nonsense("a response that cannot be read", data) from None
        return out

    def _candidate(self, candidate: _Candidate, out: list[Delta]) -> None:
        self._finish = candidate.finish_reason or self._finish
        self._why = candidate.finish_message or self._why
        for raw in (candidate.content.parts if candidate.content is not None else None) or ():
            part = _part.decode(raw)
            if part.function_call is not None:
                self._called(part.function_call, part.thought_signature, out)
            elif part.text is None:
                self._did_itself(bytes(raw), part.thought_signature)
            elif part.thought:
                if self._text:
                    self._settle()
                self._thought.append(part.text)
                out.append(Reasoning(part.text))
                if part.thought_signature:
                    self._keep_thought(part.thought_signature)
            else:
                if part.text:
                    self._keep_thought()
                    self._text.append(part.text)
                    out.append(part.text)
                self._signed(part.thought_signature)

    def _did_itself(self, raw: bytes, signature: str | None) -> None:
        """Executed code, its result, and what else the provider did without being called."""
        body = msgspec.json.decode(raw)
        says = [name for name in body if name not in SAYS_NOTHING]
        if not says:
            self._signed(signature)
            return
        self._settle()
        self._parts.append(ProviderPart(NAME, self._model, says[0], raw.decode(), _did(body)))

    def _signed(self, signature: str | None) -> None:
        """A signature of the text before it."""
        if signature:
            self._settle()
            body = encode({"text": "", "thoughtSignature": signature}).decode()
            self._parts.append(ProviderPart(NAME, self._model, "signature", body))

    def _called(self, call: _Call, signature: str | None, out: list[Delta]) -> None:
        self._settle()
        replay = {"dialect": NAME, "signature": signature} if signature else None
        self._parts.append(ToolCall(call.id or "", call.name, call.args or {}, None, replay))
        out.append(CallPiece(self._calls, call.name, encode(call.args or {}).decode()))
        self._calls += 1

    def _keep_thought(self, signature: str = "") -> None:
        if self._thought:
            text = "".join(self._thought)
            signed = {"thoughtSignature": signature} if signature else {}
            body = encode({"text": text, "thought": True, **signed}).decode()
            self._parts.append(ProviderPart(NAME, self._model, "thought", body, text))
            self._thought = []

    def _settle(self) -> None:
        """What was gathered so far becomes parts, in the order in which it came."""
        self._keep_thought()
        if self._text:
            self._parts.append(Text("".join(self._text)))
            self._text = []

    def close(self) -> ModelResponse:
        if self._finish is None:
            raise broken("the connection ended before a finishReason")
        self._settle()
        stop = STOPS.get(self._finish)
        if stop is None:
            # MALFORMED_FUNCTION_CALL and its like: the model failed to say what it wanted, another attempt may not.
            message = f"the model gave up with {self._finish}{f': {self._why}' if self._why else ''}"
            raise ProviderError(message, retryable=True, code="malformed_answer")
        if stop == "end" and self._calls:
            stop = "tool_calls"
        return ModelResponse(
            parts=tuple(self._parts), usage=_usage(_Counts(**self._counts)), stop=stop, model=self._model
        )


def _did(part: dict[str, Any]) -> str:
    """What a tool of the provider's did, in words for another provider."""
    if isinstance(code := part.get("executableCode"), dict):
        return in_words("code_execution:", str(code.get("code", "")))
    if isinstance(result := part.get("codeExecutionResult"), dict):
        return in_words("code_execution returned:", str(result.get("output", "")))
    return ""


def _usage(counts: _Counts) -> Usage | None:
    if not counts.reported():
        return None
    asked, cached, thought = counts.prompt_token_count, counts.cached_content_token_count, counts.thoughts_token_count
    written = counts.candidates_token_count
    return Usage(
        input=None if asked is None else max(asked - (cached or 0), 0) + (counts.tool_use_prompt_token_count or 0),
        # A count of nothing is left out: thoughts that use up all tokens leave no candidate to count.
        output=None if written is None and thought is None else (written or 0) + (thought or 0),
        cache_read=cached,
        reasoning=thought,
    )


def _failure(status: int, headers: Mapping[str, str], body: bytes) -> ProviderError:
    try:
        found = msgspec.json.decode(body, type=list[_Response] | _Response)
    except UNREADABLE:
        return status_error(status, headers, body[:500].decode("utf-8", "replace"))
    error = None if not found else found[0].error if isinstance(found, list) else found.error
    if error is None:
        return status_error(status, headers, body[:500].decode("utf-8", "replace"))
    delays = [str(each.get("retryDelay", "")).removesuffix("s") for each in error.details or ()]
    wait = next((delay for delay in delays if delay), "")
    if wait and "retry-after" not in headers:
        headers = {**headers, "retry-after": wait}
    if status == 429 and wait and "PerDay" not in str(error.details):
        # "You exceeded your current quota" is said of a minute too; a spent quota is none that seconds would mend.
        said = f"{error.message} (HTTP 429, {error.status})"
        return ProviderError(said, retryable=True, after=retry_after(headers), code="rate_limited")
    if status == 400 and ("API key not valid" in error.message or "API_KEY_INVALID" in str(error.details)):
        status = 401
    return status_error(status, headers, error.message, error.status)
