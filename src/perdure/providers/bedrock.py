"""Amazon Bedrock's Converse API: one format for all models there, in AWS's event-stream frames.

An answer is complete by `messageStop` and the `metadata` that follows it. Requests are signed over their whole body,
so a body with files in it is read twice: once for its hash, once to be sent.

Keys come from where the AWS tools look: variables, the shared credentials and config files of a profile, its
`credential_process`; or from a function of the host. A bearer token (`AWS_BEARER_TOKEN_BEDROCK`) goes before all of
them.
"""

from __future__ import annotations

import asyncio
import configparser
import hashlib
import inspect
import os
import re
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias
from urllib.parse import quote

import msgspec
from msgspec import Struct

from perdure.aws import BadFrame, Credentials, Frame, FrameReader, Signing, signed_headers
from perdure.errors import InvalidDefinition, ProviderError
from perdure.model.llm import CallPiece, Delta, ModelRequest, ModelResponse, ModelSettings, Stop, Usage
from perdure.model.message import (
    Audio,
    Document,
    File,
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
from perdure.providers.claude import reasons
from perdure.providers.dialect import (
    UNREADABLE,
    Block,
    Conversations,
    Piece,
    Spoken,
    Structured,
    Timeouts,
    Wire,
    broken,
    call_args,
    compact,
    encode,
    figure_in,
    foreign_text,
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
from perdure.providers.http import Authorise, HttpProvider, KeyHeader, usable_key
from perdure.providers.schemas import (
    ANTHROPIC_NATIVE,
    ANY,
    Remembered,
    output_for,
    parameters,
    tool_schema,
    translated,
)

NAME = "bedrock"
WHO = "Bedrock"

OLD = ("claude-3", "claude-v2", "claude-2", "claude-instant", "claude-opus-4-2025", "claude-sonnet-4-2025")
"""Claude models without structured output of their own."""
CALL_ID = re.compile(r"[a-zA-Z0-9_.:-]+")
DOCUMENT_NAME = re.compile(r"[^a-zA-Z0-9\-()\[\] ]+")

IMAGES = {"image/png": "png", "image/jpeg": "jpeg", "image/gif": "gif", "image/webp": "webp"}
DOCUMENTS = {
    "application/pdf": "pdf", "text/csv": "csv", "text/html": "html", "text/plain": "txt", "text/markdown": "md",
    "application/msword": "doc", "application/vnd.ms-excel": "xls",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": "docx",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": "xlsx",
}  # fmt: skip
SOUND = {
    "audio/mpeg": "mp3", "audio/wav": "wav", "audio/opus": "opus", "audio/aac": "aac", "audio/flac": "flac",
    "audio/ogg": "ogg", "audio/mp4": "m4a", "audio/webm": "webm",
}  # fmt: skip

STOPS: dict[str, Stop] = {
    "end_turn": "end",
    "stop_sequence": "end",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "guardrail_intervened": "filtered",
    "content_filtered": "filtered",
}

CACHE_POINT = json_block({"cachePoint": {"type": "default"}})
LONG_CACHE_POINT = json_block({"cachePoint": {"type": "default", "ttl": "1h"}})


COUNTED = ("toolConfig", "additionalModelRequestFields")
"""What of a request's head counts towards its tokens, and the API for that takes."""


class BedrockConverse:
    """The dialect."""

    name = NAME

    def __init__(self) -> None:
        self._conversations = Conversations(_spoken, b"content")
        self._output = Remembered(lambda schema: translated(schema, ANTHROPIC_NATIVE))
        self._parameters = Remembered(lambda schema: tool_schema(schema, ANY))

    def structured(self, request: ModelRequest, model: str) -> Structured:
        """Of the models there, newer ones of Anthropic are known to take a schema; some cannot be made to call a tool,
        and none while it thinks."""
        native = "claude" in model and not any(old in model for old in OLD)
        native = native and self._output.takes(request.output_schema or {})
        forced = any(name in model for name in ("claude", "nova", "mistral-large"))
        forced = forced and request.settings.reasoning in (None, "off")
        return Structured("schema" if native else "tool", object_root=False, forced=forced)

    def build(self, request: ModelRequest, model: str) -> Wire:
        head: dict[str, Any] = {
            "inferenceConfig": _inference(request.settings),
            **self._tuning(request, model),
            **(request.settings.extra or {}),
        }
        return Wire(
            f"/model/{quote(model, safe='')}/converse-stream",
            self._body(head, request, model),
            {"accept": "application/vnd.amazon.eventstream"},
        )

    def build_count(self, request: ModelRequest, model: str) -> Wire:
        head = {name: value for name, value in self._tuning(request, model).items() if name in COUNTED}
        asked = compact([b'{"input":{"converse":', *self._body(head, request, model), b"}}"])
        return Wire(f"/model/{quote(model, safe='')}/count-tokens", asked, {"accept": "application/json"})

    def read_count(self, body: bytes) -> int:
        return figure_in(body, "inputTokens")

    def _body(self, head: dict[str, Any], request: ModelRequest, model: str) -> tuple[Piece, ...]:
        point = _cache_point(request.settings, model)
        system, settled, messages = self._conversations(request)
        pieces: list[Piece] = [encode(head)[:-1]]
        if system:
            pieces += [b',"system":[' if head else b'"system":[', *joined([*system, *point]), b"]"]
        # Last, so that one request begins as the one before it did.
        pieces += [b',"messages":[' if head or system else b'"messages":[', *settled]
        last = len(messages) - 1
        for index, (role, blocks) in enumerate(messages):
            marked = (*blocks, *(point if index == last else ()))
            pieces += [*([b","] if index else []), *self._conversations.written(role, marked)]
        pieces.append(b"]}")
        return compact(pieces)

    def reader(self, model: str) -> BedrockReader:
        return BedrockReader(model)

    def failure(self, status: int, headers: Mapping[str, str], body: bytes) -> ProviderError:
        kind = headers.get("x-amzn-errortype", "").partition(":")[0]
        try:
            message = msgspec.json.decode(body, type=_Message).message
        except UNREADABLE:
            message = ""
        return status_error(status, headers, message or body[:500].decode("utf-8", "replace"), kind)

    def _tuning(self, request: ModelRequest, model: str) -> dict[str, Any]:
        settings, out = request.settings, dict[str, Any]()
        if settings.seed is not None:
            raise ProviderError("Bedrock's Converse API takes no seed: leave it out", code="invalid_settings")
        own_tools(request, {}, WHO)
        if request.output_schema:
            output = output_for(self._output, request.output_schema, WHO)
            schema = {"name": "answer", "schema": encode(output).decode()}
            out["outputConfig"] = {"textFormat": {"type": "json_schema", "structure": {"jsonSchema": schema}}}
        # Not switched off by a word: there nothing reasons unless it is asked to.
        reasoned = reasons(settings, model) if settings.reasoning != "off" else None
        if reasoned is not None:
            if "claude" in model or reasoned.tokens:
                out["additionalModelRequestFields"] = {"thinking": reasoned.thinking}
            if reasoned.effort:
                out.setdefault("outputConfig", {})["effort"] = reasoned.effort
        if request.tools:
            tools = [
                {"toolSpec": {"name": t.name, "description": t.description or t.name, "inputSchema": {"json": schema}}}
                for t, schema in parameters(self._parameters, request, WHO)
            ]
            wanted = "none" if request.tool_choice == "none" else settings.tool_choice or "auto"
            # There is no way to say "none", and a conversation with calls in it must come with tools.
            choice: Any = {"auto": {"auto": {}}, "none": {"auto": {}}, "required": {"any": {}}}.get(wanted)
            out["toolConfig"] = {"tools": tools, "toolChoice": choice or {"tool": {"name": wanted}}}
        return out


def _cache_point(settings: ModelSettings, model: str) -> tuple[Block, ...]:
    """Models that know no cache refuse the marker: it is set by itself for those that are known to have one."""
    known = any(name in model for name in ("claude", "nova"))
    if settings.cache is False or (settings.cache is None and not known):
        return ()
    return (LONG_CACHE_POINT if settings.cache == "1h" else CACHE_POINT,)


def _inference(settings: ModelSettings) -> dict[str, Any]:
    names = (("max_tokens", "maxTokens"), ("temperature", "temperature"), ("top_p", "topP"), ("stop", "stopSequences"))
    return {theirs: value for ours, theirs in names if (value := getattr(settings, ours)) not in (None, ())}


def _spoken(message: Message) -> Spoken:
    role = "user" if message.role == "tool" else message.role
    return Spoken(role, tuple(block for part in message.parts if (block := _block(part)) is not None))


def _block(part: Part) -> Block | None:
    match part:
        case Text(text):
            return json_block({"text": text}) if text.strip() else None
        case ToolCall(id, name):
            return json_block({"toolUse": {"toolUseId": wire_id(id, CALL_ID), "name": name, "input": call_args(part)}})
        case ToolResult():
            return _result(part)
        case ProviderPart("bedrock", _, _, body):
            return (body.encode(),)
        case ProviderPart() | Reasoning():
            text = foreign_text(part)
            return json_block({"text": text}) if text else None
        case _:
            return _file(part)


def _result(part: ToolResult) -> Block:
    head = {"toolUseId": wire_id(part.call_id, CALL_ID), "status": "success" if part.status == "ok" else "error"}
    content = [json_block({"text": result_text(part.content) or "(nothing)"}), *[_file(each) for each in part.files]]
    return compact([b'{"toolResult":', encode(head)[:-1], b',"content":[', *joined(content), b"]}}"])


def _file(part: File) -> Block:
    match part:
        case Image(Stored() as stored, kind) if kind in IMAGES:
            form = IMAGES[kind]
            return with_file(stored, lambda data: {"image": {"format": form, "source": {"bytes": data}}})
        case Document(Stored() as stored, kind, name) if kind in DOCUMENTS:
            form, name = DOCUMENTS[kind], DOCUMENT_NAME.sub(" ", name).strip()[:200] or "document"
            return with_file(
                stored, lambda data: {"document": {"format": form, "name": name, "source": {"bytes": data}}}
            )
        case Audio(Stored() as stored, kind) if kind in SOUND:
            form = SOUND[kind]
            return with_file(stored, lambda data: {"audio": {"format": form, "source": {"bytes": data}}})
        case _:
            unsupported(part, WHO, "pictures, documents and sound whose bytes it is sent, no addresses")


# ---------------------------------------------------------------------- what comes back


class _Message(Struct):
    message: str = ""


class _ToolStart(Struct, rename="camel"):
    tool_use_id: str = ""
    name: str = ""
    type: str = ""


class _Start(Struct, rename="camel"):
    tool_use: _ToolStart | None = None


class _BlockStart(Struct, rename="camel"):
    content_block_index: int
    start: _Start


class _Input(Struct):
    input: str = ""


class _ReasoningDelta(Struct, rename="camel"):
    text: str | None = None
    signature: str | None = None
    redacted_content: str | None = None


class _DeltaBody(Struct, rename="camel"):
    text: str | None = None
    tool_use: _Input | None = None
    reasoning_content: _ReasoningDelta | None = None


class _BlockDelta(Struct, rename="camel"):
    content_block_index: int
    delta: _DeltaBody


class _MessageStop(Struct, rename="camel"):
    stop_reason: str


class _Counts(Struct, rename="camel"):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_write_input_tokens: int | None = None


class _Metadata(Struct):
    usage: _Counts | None = None


DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "contentBlockStart": msgspec.json.Decoder(_BlockStart),
    "contentBlockDelta": msgspec.json.Decoder(_BlockDelta),
    "messageStop": msgspec.json.Decoder(_MessageStop),
    "metadata": msgspec.json.Decoder(_Metadata),
}
"""By the type of the event; others are passed over."""

EXCEPTIONS = {
    "internalServerException": 500,
    "modelStreamErrorException": 424,
    "modelTimeoutException": 504,
    "validationException": 400,
    "throttlingException": 429,
    "serviceUnavailableException": 503,
}


class _Block:
    """A content block. Not all models report its end; all report that of the answer."""

    def __init__(self, call: _ToolStart | None = None) -> None:
        self.call = call
        self.text: list[str] = []
        self.json: list[str] = []
        self.thought: list[str] = []
        self.signature: list[str] = []
        self.redacted: list[str] = []

    def part(self, model: str) -> Part | None:
        if self.call is not None:
            args, raw = parsed_args("".join(self.json))
            return ToolCall(self.call.tool_use_id, self.call.name, args, raw)
        text = "".join(self.thought)
        if text and not self.signature:  # models that sign nothing refuse to be sent their reasoning: it goes in words
            return Reasoning(text)
        if self.signature:
            said = {"text": text, "signature": "".join(self.signature)}
            body = encode({"reasoningContent": {"reasoningText": said}}).decode()
            return ProviderPart(NAME, model, "reasoning", body, text)
        if self.redacted:
            body = encode({"reasoningContent": {"redactedContent": "".join(self.redacted)}}).decode()
            return ProviderPart(NAME, model, "redacted", body)
        return Text("".join(self.text)) if self.text else None


class BedrockReader:
    """Reads one answer."""

    def __init__(self, model: str) -> None:
        self._frames = FrameReader()
        self._model = model
        self._blocks: dict[int, _Block] = {}
        self._calls: dict[int, int] = {}
        self._stop: str | None = None
        self._metadata: _Metadata | None = None

    def feed(self, chunk: bytes) -> Iterable[Delta]:
        out: list[Delta] = []
        try:
            for frame in self._frames.feed(chunk):
                self._receive(frame, out)
        except BadFrame as error:
            raise broken(str(error)) from None
        return out

    def _receive(self, frame: Frame, out: list[Delta]) -> None:
        kind = frame.headers.get(":message-type")
        if kind in ("exception", "error"):
            name = str(frame.headers.get(":exception-type") or frame.headers.get(":error-code") or "")
            try:
                message = msgspec.json.decode(frame.payload, type=_Message).message
            except UNREADABLE:
                message = str(frame.headers.get(":error-message", ""))
            raise status_error(EXCEPTIONS.get(name, 500), {}, message, name)
        decoder = DECODERS.get(str(frame.headers.get(":event-type", "")))
        if decoder is None:
            return
        try:
            event = decoder.decode(frame.payload)
        except UNREADABLE:
            raise nonsense("an event that cannot be read", frame.payload) from None
        match event:
            case _BlockDelta(index, delta):
                self._continue(index, self._blocks.setdefault(index, _Block()), delta, out)
            case _BlockStart(index, start):
                self._blocks[index] = _Block(start.tool_use)
                if start.tool_use is not None:
                    self._calls[index] = len(self._calls)
                    out.append(CallPiece(self._calls[index], start.tool_use.name, ""))
            case _MessageStop(reason):
                self._stop = reason
            case _Metadata():
                self._metadata = event
            case _:
                pass

    def _continue(self, index: int, block: _Block, delta: _DeltaBody, out: list[Delta]) -> None:
        if delta.text:
            block.text.append(delta.text)
            out.append(delta.text)
        elif delta.tool_use is not None and block.call is not None:
            block.json.append(delta.tool_use.input)
            out.append(CallPiece(self._calls[index], block.call.name, delta.tool_use.input))
        elif delta.reasoning_content is not None:
            thought = delta.reasoning_content
            if thought.text:
                block.thought.append(thought.text)
                out.append(Reasoning(thought.text))
            if thought.signature:
                block.signature.append(thought.signature)
            if thought.redacted_content:
                block.redacted.append(thought.redacted_content)

    def close(self) -> ModelResponse:
        if self._stop is None or self._metadata is None or self._frames.partial:
            raise broken("the connection ended before messageStop and metadata")
        stop = STOPS.get(self._stop)
        if stop is None:  # malformed_model_output and its like: another attempt may be better
            raise ProviderError(f"the model gave up with {self._stop}", retryable=True, code="malformed_answer")
        counts = self._metadata.usage
        usage = None
        if counts is not None:
            usage = Usage(
                counts.input_tokens,
                counts.output_tokens,
                counts.cache_read_input_tokens,
                counts.cache_write_input_tokens,
            )
        parts = [part for index in sorted(self._blocks) if (part := self._blocks[index].part(self._model)) is not None]
        return ModelResponse(parts=tuple(parts), usage=usage, stop=stop, model=self._model)


# ---------------------------------------------------------------------- keys

FindKeys: TypeAlias = Callable[[], Credentials | Awaitable[Credentials]]


def bedrock(
    model: str,
    base_url: str,
    key: Any,
    headers: Mapping[str, str] | None,
    timeouts: Timeouts | None = None,
    http2: bool = False,
) -> HttpProvider:
    """`key` is a function that gives `Credentials`, or a bearer token."""
    region = find_region()
    if not region and not base_url:
        raise InvalidDefinition("which region? set AWS_REGION for 'bedrock:…', or region in your profile")
    where = base_url or f"https://bedrock-runtime.{region}.amazonaws.com"
    authorise: Authorise = BedrockKeys(region or "us-east-1", key if callable(key) else None)
    if isinstance(key, str):
        authorise = KeyHeader(NAME, ("AWS_BEARER_TOKEN_BEDROCK",), "authorization", "Bearer ", key)
    return HttpProvider(
        BedrockConverse(),
        model,
        name=NAME,
        base_url=where,
        authorise=authorise,
        headers=headers,
        timeouts=timeouts,
        http2=http2,
    )


class BedrockKeys:
    """Signs requests. Keys are looked up for every request: they expire, and files and variables are cheap to read."""

    def __init__(self, region: str, keys: FindKeys | None = None, now: Callable[[], float] = time.time) -> None:
        self._region, self._keys, self._now = region, keys, now

    def lacking(self) -> str:
        """What is missing, in words. A `credential_process` is not run for it."""
        if self._keys is not None or os.environ.get("AWS_BEARER_TOKEN_BEDROCK", "").strip():
            return ""
        try:
            _credentials_at_hand()
        except ProviderError as error:
            return str(error)
        return ""

    async def __call__(self, wire: Wire, url: str, body: Callable[[], AsyncIterator[bytes]]) -> Mapping[str, str]:
        token = os.environ.get("AWS_BEARER_TOKEN_BEDROCK", "").strip()
        if token and self._keys is None:
            return {"authorization": f"Bearer {usable_key(NAME, token)}"}
        if self._keys is None:
            credentials = await find_credentials()
        else:
            found = self._keys()
            credentials = await found if inspect.isawaitable(found) else found
            if not isinstance(credentials, Credentials):  # a function of the host's may return anything
                raise ProviderError("the key=… of 'bedrock' gave no Credentials of perdure.aws", code="missing_key")
        credentials = Credentials(*(usable_key(NAME, part) for part in msgspec.structs.astuple(credentials)))
        payload = hashlib.sha256()
        async for piece in body():
            payload.update(piece)
        at = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._now()))
        signing = Signing(credentials, self._region, "bedrock", at)
        return signed_headers(signing, "POST", url, {"content-type": "application/json"}, payload.hexdigest())


async def find_credentials() -> Credentials:
    """Where the AWS tools look, in their order."""
    found = _credentials_at_hand()
    return await _from_process(found) if isinstance(found, str) else found


def _credentials_at_hand() -> Credentials | str:
    """Keys of variables or of a profile, or the command that prints them."""
    variables = os.environ
    if variables.get("AWS_ACCESS_KEY_ID") and variables.get("AWS_SECRET_ACCESS_KEY"):
        return Credentials(
            variables["AWS_ACCESS_KEY_ID"], variables["AWS_SECRET_ACCESS_KEY"], variables.get("AWS_SESSION_TOKEN", "")
        )
    profile = variables.get("AWS_PROFILE", "default")
    found = profile_settings(profile)
    if found.get("aws_access_key_id") and found.get("aws_secret_access_key"):
        token = found.get("aws_session_token", "")
        return Credentials(found["aws_access_key_id"], found["aws_secret_access_key"], token)
    if found.get("credential_process"):
        return found["credential_process"]
    raise ProviderError(
        "there are no keys for 'bedrock': set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
        f"AWS_BEARER_TOKEN_BEDROCK, or fill the profile {profile!r}, or make the provider with key=…",
        code="missing_key",
    )


def find_region() -> str | None:
    variables = os.environ
    return (
        variables.get("AWS_REGION")
        or variables.get("AWS_DEFAULT_REGION")
        or profile_settings(variables.get("AWS_PROFILE", "default")).get("region")
    )


def profile_settings(profile: str) -> dict[str, str]:
    """A profile of the shared files; what the credentials file says goes before the config file."""
    config = os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")
    shared = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    section = profile if profile == "default" else f"profile {profile}"
    return {**_section(config, section), **_section(shared, profile)}


def _section(path: str, name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(os.path.expanduser(path), encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ProviderError(f"{path} cannot be read: {error}", code="missing_key") from None
    return dict(parser[name]) if parser.has_section(name) else {}


class _ProcessKeys(Struct, rename="pascal"):
    access_key_id: str
    secret_access_key: str
    session_token: str = ""


async def _from_process(command: str) -> Credentials:
    """Run a profile's `credential_process`, which prints keys as JSON."""
    try:
        started = await asyncio.create_subprocess_exec(
            *shlex.split(command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        printed, complaint = await asyncio.wait_for(started.communicate(), 60)
        if started.returncode == 0:
            keys = msgspec.json.decode(printed, type=_ProcessKeys)
            return Credentials(keys.access_key_id, keys.secret_access_key, keys.session_token)
        why = complaint.decode("utf-8", "replace").strip()[:300] or f"it ended with {started.returncode}"
    except (OSError, ValueError, TimeoutError, msgspec.DecodeError) as error:
        why = type(error).__name__ if isinstance(error, msgspec.DecodeError) else str(error) or "it took too long"
    raise ProviderError(f"the profile's credential_process gave no keys: {why}", code="missing_key")
