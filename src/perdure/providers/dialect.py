"""What a dialect is: how one API writes a request and streams an answer, without any I/O.

A dialect builds the bytes of a request (`Wire`) and reads the bytes of its answer (`AnswerReader`); `providers/http.py`
carries both. Everything here is shared by the dialects: JSON with files spliced in, the cache of encoded messages,
ids and texts in the form that other APIs accept, and what an HTTP status means.

A request is a list of pieces: bytes, and blobs whose base64 is made while it is sent. The encoded blocks of a message
are kept from request to request, so asking the next question of a long session encodes only what is new; and the
prefix that a provider may have cached stays the same, byte for byte.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from operator import is_
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar, runtime_checkable

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import InvalidDefinition, ProviderError, quoted
from perdure.model.llm import Delta, ModelRequest, ModelResponse, OutputMode, RateReport, Remaining
from perdure.model.message import (
    FILES,
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
)

T = TypeVar("T")

encode = msgspec.json.encode

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are no JSON, or not the JSON that was expected."""

Piece: TypeAlias = bytes | Stored
"""Bytes as they are, or a blob whose base64 goes there."""

Block: TypeAlias = tuple[Piece, ...]
"""One JSON value of a request."""

_MARK = secrets.token_hex(16)
"""Stands in a value where the base64 of a blob goes. Random, so that nothing a user says can be taken for it."""
_QUOTED_MARK = f'"{_MARK}"'.encode()


class Wire(Struct, frozen=True):
    """A request as it is sent: below the provider's base URL, without what authorises it."""

    path: str
    body: tuple[Piece, ...]
    headers: Mapping[str, str] = {}

    @property
    def size(self) -> int:
        return sum(-(-piece.size // 3) * 4 if isinstance(piece, Stored) else len(piece) for piece in self.body)


class AnswerReader(Protocol):
    """Reads one answer. `feed` raises ProviderError for an error that the stream itself tells."""

    def feed(self, chunk: bytes) -> Iterable[Delta]: ...

    def close(self) -> ModelResponse:
        """The body has ended: the whole answer, or ProviderError when the dialect's terminal event never came."""
        ...


class Structured(Struct, frozen=True):
    """How an API is best asked for a typed answer. `object_root`: its own parameter takes objects only. `forced`: the
    model can be made to call a tool."""

    mode: OutputMode = "schema"
    object_root: bool = True
    forced: bool = True


class Dialect(Protocol):
    """One wire format."""

    @property
    def name(self) -> str: ...

    def structured(self, request: ModelRequest, model: str) -> Structured:
        """How to ask this model, for this request, where the settings leave it open."""
        ...

    def build(self, request: ModelRequest, model: str) -> Wire: ...

    def reader(self, model: str) -> AnswerReader: ...

    def failure(self, status: int, headers: Mapping[str, str], body: bytes) -> ProviderError: ...


@runtime_checkable
class CountsTokens(Protocol):
    """A dialect whose API tells how many tokens a request has without answering it."""

    def build_count(self, request: ModelRequest, model: str) -> Wire: ...

    def read_count(self, body: bytes) -> int: ...


# ---------------------------------------------------------------------- building


def json_block(value: Any) -> Block:
    return (encode(value),)


def with_file(stored: Stored, make: Callable[[str], Any]) -> Block:
    """The JSON of `make(data)`, where `data` is the base64 of a blob, read when it is sent."""
    before, _, after = encode(make(_MARK)).partition(_QUOTED_MARK)
    return (before + b'"', stored, b'"' + after)


def with_file_url(stored: Stored, media_type: str, make: Callable[[str], Any]) -> Block:
    """The same for APIs that take a `data:` URL."""
    before, _, after = encode(make(_MARK)).partition(_QUOTED_MARK)
    return (before + f'"data:{media_type};base64,'.encode(), stored, b'"' + after)


def joined(blocks: Iterable[Block]) -> Iterator[Piece]:
    """Values separated by commas."""
    first = True
    for block in blocks:
        if not first:
            yield b","
        first = False
        yield from block


def compact(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same body with neighbouring bytes joined."""
    out: list[Piece] = []
    run: list[bytes] = []
    for piece in pieces:
        if type(piece) is bytes:
            run.append(piece)
        else:
            if run:
                out.append(b"".join(run))
                run = []
            out.append(piece)
    if run:
        out.append(b"".join(run))
    return tuple(out)


class Encoded(Generic[T]):
    """What messages look like on the wire, kept for as long as they are likely to be sent again.

    Messages are frozen and a session's history hands out the same objects for every request, so they are known by
    identity; holding them keeps the identity from being used again. All is dropped when there is too much of it, by
    number or by size.
    """

    def __init__(
        self, encode_message: Callable[[Message], T], most: int = 20_000, most_bytes: int = 64_000_000
    ) -> None:
        self._encode, self._most, self._most_bytes = encode_message, most, most_bytes
        self._known: dict[int, tuple[Message, T]] = {}
        self._size = 0

    def __call__(self, messages: Sequence[Message]) -> list[T]:
        known = self._known
        if len(known) > self._most or self._size > self._most_bytes:
            known.clear()
            self._size = 0
        out: list[T] = []
        for index, message in enumerate(messages):
            found = known.get(id(message))
            if found is None or found[0] is not message:
                found = known[id(message)] = (message, self._new(message, messages, index))
                self._size += _bytes_in(found[1])
            out.append(found[1])
        return out

    def _new(self, message: Message, messages: Sequence[Message], index: int) -> T:
        """A file that the model cannot take is refused where it is said. Once it is part of the conversation, or a tool
        shows it, the model gets words in its place: else no later turn of the session could be had."""
        try:
            return self._encode(message)
        except ProviderError as error:
            said_now = message.role == "user" and not any(each.role == "user" for each in messages[index + 1 :])
            if error.code != "invalid_input" or said_now:
                raise
            return self._encode(Message(message.role, tuple([self._shown(message, part) for part in message.parts])))

    def _shown(self, message: Message, part: Part) -> Part:
        if isinstance(part, FILES):
            return part if self._takes(message, part) else Text(_not_shown(part))
        if not isinstance(part, ToolResult) or self._takes(message, part):
            return part
        kept = tuple([file for file in part.files if self._takes(message, replace(part, files=(file,)))])
        notes = [_not_shown(file) for file in part.files if file not in kept]
        content = part.content if isinstance(part.content, str) else result_text(part.content)
        return replace(part, content="\n".join([content, *notes]), files=kept)

    def _takes(self, message: Message, part: Part) -> bool:
        try:
            self._encode(Message(message.role, (part,)))
        except ProviderError:
            return False
        return True


def _bytes_in(encoded: object) -> int:
    """How many bytes something holds that is made of bytes and tuples."""
    if isinstance(encoded, tuple | list):
        return sum([_bytes_in(each) for each in encoded])
    return len(encoded) if isinstance(encoded, bytes) else 0


def _not_shown(file: File) -> str:
    return f"[{type(file).__name__} {file.name or file.media_type!r} is not shown: this model cannot take it]"


class Spoken(NamedTuple):
    """One message in a role of the wire, as content blocks."""

    role: str
    blocks: tuple[Block, ...]


class Conversation(NamedTuple):
    """The messages of a request, for APIs that take turns strictly: neighbours of one role are one message, and what
    says nothing is left out. `settled` are those before `recent`, as they are sent, a comma after each."""

    system: list[Block]
    settled: tuple[Piece, ...]
    recent: list[Spoken]


class _Settled(NamedTuple):
    """How the conversation of a session begins: these messages, and what they are on the wire."""

    messages: Sequence[Message]
    pieces: tuple[Piece, ...]
    next_role: str
    size: int


NOTHING_SETTLED = _Settled((), (), "", 0)


class _Turn(NamedTuple):
    """Neighbours of one role, and the index of the first of them."""

    role: str
    blocks: list[Block]
    first: int


class Conversations:
    """Writes messages in strict turns. The next request of a session takes from its last one what is the same, so it
    costs what is new and not how long the session is.

    What is settled is known by the identity of its messages, as in `Encoded`; it has no marks of a cache, which only
    the last `RECENT` messages can have. All is dropped when there is too much of it.
    """

    RECENT = 3

    def __init__(self, encode_message: Callable[[Message], Spoken], content: bytes, most: int = 16_000_000) -> None:
        """`content` is what stands between the role of a message and its blocks."""
        self._encoded, self._content, self._most = Encoded(encode_message), content, most
        self._settled: dict[str, _Settled] = {}
        self._size = 0

    def __call__(self, request: ModelRequest) -> Conversation:
        messages = request.messages
        # Instructions may be others each time; the conversation after them only grows.
        start = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
        system = [block for spoken in self._encoded(messages[:start]) for block in spoken.blocks]
        known = self._settled.get(request.session_id)
        if known is None or not _begins(messages, start, known.messages):
            known = NOTHING_SETTLED
        turns, notes = self._turns(messages, start + len(known.messages))
        if known.messages and (len(turns) < self.RECENT or turns[0].role != known.next_role):  # it was cut short there
            known = NOTHING_SETTLED
            turns, notes = self._turns(messages, start)
        old, recent, pieces = turns[: -self.RECENT], turns[-self.RECENT :], known.pieces
        if old:
            written = [piece for turn in old for piece in (*self.written(turn.role, turn.blocks), b",")]
            pieces = compact([*pieces, *written])
            if request.session_id and not notes:
                self._keep(request.session_id, messages[start : recent[0].first], pieces, recent[0].role)
        return Conversation([*system, *notes], pieces, [Spoken(turn.role, tuple(turn.blocks)) for turn in recent])

    def _turns(self, messages: Sequence[Message], first: int) -> tuple[list[_Turn], list[Block]]:
        """The messages from there on in turns; and what of them goes to the instructions."""
        turns, notes = list[_Turn](), list[Block]()
        for index, (role, blocks) in enumerate(self._encoded(messages[first:]), first):
            if role == "system":
                notes += blocks
            elif blocks and turns and turns[-1].role == role:
                turns[-1].blocks.extend(blocks)
            elif blocks:
                turns.append(_Turn(role, list(blocks), index))
        return turns, notes

    def written(self, role: str, blocks: Iterable[Block]) -> list[Piece]:
        return [b'{"role":"%b","%b":[' % (role.encode(), self._content), *joined(blocks), b"]}"]

    def _keep(self, session_id: str, messages: Sequence[Message], pieces: tuple[Piece, ...], next_role: str) -> None:
        size = sum([len(piece) for piece in pieces if type(piece) is bytes])
        before = self._settled.get(session_id, NOTHING_SETTLED)
        self._size += size - before.size
        if self._size > self._most:
            self._settled.clear()
            self._size = size
        self._settled[session_id] = _Settled(messages, pieces, next_role, size)


def _begins(messages: Sequence[Message], start: int, with_: Sequence[Message]) -> bool:
    return len(messages) - start >= len(with_) and all(map(is_, messages[start : start + len(with_)], with_))


def result_text(content: Any) -> str:
    """A tool's result as the text that models are shown: strings as they are, anything else as JSON."""
    return content if isinstance(content, str) else encode(content).decode()


REASONING = frozenset(
    {"thinking", "redacted_thinking", "reasoning", "reasoning_details", "thought", "signature", "redacted"}
)
"""Kinds of provider parts that are reasoning. All others tell what a tool of the provider's did."""


def foreign_text(part: ProviderPart | Reasoning) -> str:
    """What another provider's part says in words. Reasoning and what tools did are marked, so that a model does not
    take them for an answer."""
    if not part.text.strip():
        return ""
    word = "thinking" if isinstance(part, Reasoning) or part.kind in REASONING else "tool_use"
    return f"<{word}>\n{part.text}\n</{word}>"


TOLD = 2_000
"""Characters of what a provider's tool returned that another provider is shown."""


def in_words(what: str, *shown: str) -> str:
    """What a tool of the provider's did, for another provider: a line, and the beginning of what it gave."""
    rest = "\n".join(filter(None, shown))
    return f"{what}\n{rest[:TOLD]}{' …' if len(rest) > TOLD else ''}" if rest else what


def call_args(call: ToolCall) -> dict[str, Any]:
    """The arguments that a model is reminded of. What it wrote and was no JSON object is quoted."""
    return call.args if call.raw is None else {"unreadable_arguments": call.raw}


def wire_id(given: str, pattern: re.Pattern[str], length: int = 64) -> str:
    """An id of a call in the form that an API accepts: as it is, or with the digest of what had to be replaced."""
    if pattern.fullmatch(given) and len(given) <= length:
        return given
    digest = hashlib.sha256(given.encode()).hexdigest()[:24]
    return f"call_{digest}"[:length]


def own_tools(request: ModelRequest, known: Mapping[str, Any], who: str) -> list[tuple[Any, dict[str, Any]]]:
    """The tools of the provider that a request allows: what `known` says of each, and its options."""
    for tool in request.provider_tools:
        if tool.kind not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ProviderError(
                f"{who} has no tool {tool.kind!r} of its own: {has}. Leave ProviderTool({tool.kind!r}) out of "
                "Agent(tools=[…]), or ask another model",
                code="invalid_settings",
            )
    return [(known[tool.kind], tool.options) for tool in request.provider_tools]


def unsupported(part: File, who: str, takes: str) -> NoReturn:
    """Refuse a part that the model cannot take, before anything is sent."""
    kind = type(part).__name__
    what = (
        f"a FileRef of {part.provider!r}" if isinstance(part, FileRef) else f"{kind} {part.name or part.media_type!r}"
    )
    raise ProviderError(f"{who} cannot take {what}: it takes {takes}", code="invalid_input")


# ---------------------------------------------------------------------- reading


def parsed_args(text: str) -> tuple[dict[str, Any], str | None]:
    """A call's arguments; and the text itself where it is no JSON object."""
    if text.strip() in ("", "null"):  # what some models write for a tool without parameters
        return {}, None
    try:
        args = msgspec.json.decode(text)
    except UNREADABLE:
        return {}, text
    return (args, None) if isinstance(args, dict) else ({}, text)


def broken(why: str) -> ProviderError:
    return ProviderError(f"the answer broke off: {why}", retryable=True, code="broken_stream")


def nonsense(what: str, data: bytes) -> ProviderError:
    shown = data[:200].decode("utf-8", "replace")
    return ProviderError(f"the provider sent {what}: {shown!r}", code="provider_nonsense")


def figure_in(body: bytes, name: str) -> int:
    """The one figure that a count of tokens is."""
    try:
        value = msgspec.json.decode(body, type=dict[str, Any]).get(name)
    except UNREADABLE:
        value = None
    if type(value) is not int or value < 0:
        raise nonsense("no count of tokens", body)
    return value


# ---------------------------------------------------------------------- how long it may take


class Timeouts(Struct, frozen=True, kw_only=True):
    """How long a provider over HTTP may take, in seconds: to connect, until an answer begins, between two pieces of it,
    and for one attempt as a whole where `ModelSettings(timeout=…)` does not say less.

    Each ends the attempt with a `timeout` that is worth another one.
    """

    connect: float = 10.0
    first_byte: float = 300.0
    silence: float = 120.0
    whole: float = 3600.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value <= 1e9:
                raise InvalidDefinition(f"Timeouts({name}={quoted(value)}) is not usable: give seconds above 0")


def too_slow(who: str, what: str, setting: str, seconds: float) -> ProviderError:
    return ProviderError(
        f"{who} {what} within {seconds:g} s: give provider(…, timeouts=Timeouts({setting}=…)) more",
        retryable=True,
        code="timeout",
        unseen=setting != "connect",
    )


# ---------------------------------------------------------------------- what went wrong

RETRYABLE = frozenset({408, 409, 424, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})

OVERFLOW = re.compile(
    r"prompt is too long|context.{0,10}(window|length)|maximum.{0,20}tokens|too many (input )?tokens|input is too long"
    r"|token count.{0,40}exceeds|exceeds?.{0,30}(context|token limit)|reduce the length|maximum prompt length"
    r"|tokens \+ \W?max_new_tokens|too many total text bytes",
    re.IGNORECASE,
)
TOO_MUCH_ASKED = re.compile(r"^\W{0,3}max_(completion_|output_)?tokens\W{0,3} (must be|is too)", re.IGNORECASE)
"""About the setting `max_tokens`, though the context window is mentioned: no shorter conversation would help."""
OVERFLOW_KINDS = frozenset({"context_length_exceeded", "exceed_context_size_error"})
"""Said with any status, also in the middle of a stream."""
QUOTA = re.compile(r"insufficient_quota|billing|credit balance|exceeded your current quota|spend limit|payment", re.I)
SPENT = re.compile(r"credit balance is too low|ServiceQuotaExceeded|insufficient (credit|balance)", re.IGNORECASE)
"""Said of a spent quota with statuses that mean something else as a rule."""
LIMITED = re.compile(r"rate limit reached|try again in \d", re.IGNORECASE)
"""Said of a limit that passes, in texts that go on to advertise a larger one with a link to the billing page."""
FILTERED_KINDS = frozenset({"content_filter", "content_policy_violation", "invalid_prompt"})
FILTERED = re.compile(
    r"content management policy|content filtering policy|(input|prompt) was flagged|requires moderation", re.IGNORECASE
)
MALFORMED_KINDS = frozenset({"tool_use_failed", "output_parse_failed", "json_validate_failed"})
"""The model wrote something that the server could not read: another attempt may be better."""


def status_error(status: int, headers: Mapping[str, str], message: str, kind: str = "") -> ProviderError:
    """What an API's refusal means for the turn: ask again, stop, or shrink what is asked."""
    said = f"{message} (HTTP {status}{f', {kind}' if kind else ''})"
    words = f"{kind} {message}"
    if 300 <= status < 400 and "location" in headers:
        where = f"{headers['location']!r:.200}"
        return ProviderError(
            f"the provider redirects to {where}, and no key is sent after a redirect: set base_url (HTTP {status})",
            code="invalid_base_url",
        )
    if kind in MALFORMED_KINDS:
        return ProviderError(f"the model's answer could not be read: {said}", retryable=True, code="malformed_answer")
    if kind in FILTERED_KINDS or (status in (400, 403) and FILTERED.search(message)):
        return ProviderError(f"a content filter stopped the request: {said}", code="filtered")
    if status == 402 or (status in (400, 403) and SPENT.search(words)):
        return ProviderError(f"the account's quota is spent: {said}", code="quota")
    if status in (401, 403):
        return ProviderError(f"the provider did not accept the key: {said}", code="authentication")
    if status == 404:
        return ProviderError(f"the provider knows no such model or address: {said}", code="unknown_model")
    if _does_not_fit(status, kind, message):
        return ProviderError(f"the conversation does not fit the model: {said}", code="context_overflow")
    if status == 429 and QUOTA.search(words) and not LIMITED.search(message):
        return ProviderError(f"the account's quota is spent: {said}", code="quota")
    wanted = headers.get("x-should-retry", "")
    if status in RETRYABLE or wanted == "true":
        code = "rate_limited" if status == 429 else "overloaded"
        return ProviderError(said, retryable=wanted != "false", after=retry_after(headers), code=code)
    return ProviderError(f"the provider refused the request: {said}", code="invalid_request")


def _does_not_fit(status: int, kind: str, message: str) -> bool:
    if status == 413 or kind in OVERFLOW_KINDS:
        return True
    if status == 429:  # more tokens in one request than a minute has: no wait would help
        return message.lower().startswith("request too large")
    return status in (400, 422) and bool(OVERFLOW.search(f"{kind} {message}")) and not TOO_MUCH_ASKED.search(message)


def hidden_status(body: bytes) -> int | None:
    """The status that an error should have had which came as an answer, with 200; None where the body tells none."""
    try:
        found = msgspec.json.decode(body)
    except UNREADABLE:
        return None
    found = found[0] if isinstance(found, list) and found else found
    error = found.get("error") if isinstance(found, dict) else None
    if not error:
        return None
    return status_in(error.get("code") if isinstance(error, dict) else found.get("code")) or 500


def status_in(code: object) -> int | None:
    """A status that an error tells as its code: a number, or the digits of one."""
    if isinstance(code, str) and code.isdecimal():
        code = int(code[:4])
    return code if type(code) is int and 400 <= code < 600 else None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait. A date is compared with the server's own, so no clock of ours matters."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) / unit
        except ValueError:
            continue
        if 0 <= seconds < 86_400:
            return seconds
    try:
        until, now = (parsedate_to_datetime(headers[name]) for name in ("retry-after", "date"))
        return max((until - now).total_seconds(), 0.0)
    except (KeyError, ValueError, TypeError, OverflowError):
        return None


# ---------------------------------------------------------------------- rate limits

_COUNTED: dict[str, tuple[tuple[str, str, str], ...]] = {
    "requests": (
        (
            "anthropic-ratelimit-requests-remaining",
            "anthropic-ratelimit-requests-reset",
            "anthropic-ratelimit-requests-limit",
        ),
        ("x-ratelimit-remaining-requests", "x-ratelimit-reset-requests", "x-ratelimit-limit-requests"),
        ("x-ratelimit-remaining", "x-ratelimit-reset", "x-ratelimit-limit"),
    ),
    "tokens": (
        (
            "anthropic-ratelimit-tokens-remaining",
            "anthropic-ratelimit-tokens-reset",
            "anthropic-ratelimit-tokens-limit",
        ),
        ("x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens", "x-ratelimit-limit-tokens"),
        (
            "x-ratelimit-remaining-tokens-minute",
            "x-ratelimit-reset-tokens-minute",
            "x-ratelimit-limit-tokens-minute",
        ),
        ("x-tokenlimit-remaining", "x-tokenlimit-reset", "x-tokenlimit-limit"),
    ),
}
"""Headers that tell what is left, until when, and of how much: the first that is there counts."""

_SPAN = re.compile(r"(?:(\d+(?:\.\d+)?)(ms|h|m|s))")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_EPOCH = 1_000_000_000
"""A number of seconds above it is a date."""


def rate_report(headers: Mapping[str, str], accepted: bool) -> RateReport:
    """What an answer's headers say of the provider's rate limits; figures that make no sense are none."""
    found: dict[str, Remaining] = {}
    for what, names in _COUNTED.items():
        for left, reset, limit in names:
            if left in headers:
                count, seconds = _figure(headers[left]), _seconds_until(headers.get(reset, ""), headers.get("date", ""))
                if count is not None and seconds is not None:
                    found[what] = Remaining(count, seconds, _figure(headers.get(limit, "")))
                break
    return RateReport(found.get("requests"), found.get("tokens"), accepted)


def _figure(text: str) -> int | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if 0 <= value < 1e15 else None


def _seconds_until(text: str, date: str) -> float | None:
    """A duration ("6m0s", "120ms", "11.4"), or a date compared with the server's own."""
    text = text.strip()
    try:
        seconds = float(text)
    except ValueError:
        pieces = _SPAN.findall(text)
        if pieces and "".join([number + unit for number, unit in pieces]) == text:
            return sum([float(number) * _UNITS[unit] for number, unit in pieces])
        try:
            return max((datetime.fromisoformat(text) - parsedate_to_datetime(date)).total_seconds(), 0.0)
        except (ValueError, TypeError, OverflowError):
            return None
    return seconds if 0 <= seconds < _EPOCH else None
