r"""Redaction: what looks like a secret is replaced by `[redacted:<kind>]` before it is recorded, streamed or traced.

All patterns search the same text. What any of them takes for a secret goes; where two overlap, the whole of both.

A stream gives its text in pieces, and a secret may be cut in two. So text is held back until nothing that is still to
come can change what becomes of it, which for most text is the end of the word. What makes this exact:

    - a match is within one word (printable ASCII without spaces), or its pattern has `open`: how such a match looks,
      as far as it is there, at the end of a text that goes on;
    - a pattern reads at most one character beyond its match, and does not tell spaces from what is not ASCII;
    - text is parted between words only, never within a match, nor after a place where one may have begun.

Then the redacted pieces together are the redacted whole, wherever it was cut.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import InvalidDefinition, InvalidInput, quoted
from perdure.model.codec import MAX_DEPTH, clean
from perdure.model.llm import ModelResponse
from perdure.model.message import FILES, File, FileRef, Inline, Message, Part, Reasoning, Stored, Text, Url
from perdure.model.plugin import ShortCircuit
from perdure.model.tool import Failed, Ok, ToolOutcome
from perdure.plugins.hooks import FilterContext, InputContext, Plugin, SessionContext, StreamContext, ToolEndContext
from perdure.ports.services import StreamEnd, TraceSink

# ---------------------------------------------------------------------- patterns


class Pattern(Struct, frozen=True):
    r"""A kind of secret, as a regular expression (`re.ASCII`).

    If it has groups, the last one that took part is the secret, and the rest of the match stays readable. A match that
    may go beyond one word needs `open`, which fits every beginning of a match. `hints` save time: texts in small
    letters, one of which is in all that either of the two fits.

        Pattern("customer", r"CUST-[0-9]{8}")
        Pattern("card", r"[0-9]{4}(?: [0-9]{4}){3}", open=r"[0-9][0-9 ]*")
    """

    kind: str
    secret: str
    open: str = ""
    hints: tuple[str, ...] = ()


_ALONE = r"(?<![A-Za-z0-9])"
_MARKED = r"(?!\\?[\"']?\[redacted:\w+\](?![^\s\"'&;,]))"
_BARE = r"[^\s\"'&;,]"

# Bare words are secrets only when they stand alone or shout: a `next_page_token` is none, and PWD is where one is.
_NAME = (
    r"(?:passw(?:or)?d|passphrase|(?-i:[Pp]wd|_PWD)|client[_-]?secret|secret[_-]?key|access[_-]?key|private[_-]?key"
    r"|api[_-]?key|(?:access|api|auth|bearer|id|refresh|secret|session)[_-]?token"
    r"|(?<![a-z0-9_-])(?:secret|token)|(?-i:[A-Z]_(?:SECRET|TOKEN)))"
)
_NAMED = rf"{_NAME}\\?[\"']?[ \t]*"
_SCHEME = r"(?:bearer|basic|token)"
_AUTHORIZATION = r"authorization\\?[\"']?[ \t]*"
_TOKEN = r"[A-Za-z0-9._~+/=-]"

_SEP = r"(?:\s|\\[nr])"
_BASE64 = r"[A-Za-z0-9+/=]"
_FRAME = r"[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
_FRAMED = r"[\w\s+/=\\:,.()@<>-]"

BUILTIN = (
    Pattern(
        "private_key",
        # Without a footer too: a key that was cut off is a key.
        rf"-----BEGIN {_FRAME}{_SEP}++(?:[A-Za-z][A-Za-z-]{{1,30}}: [\w+/=:,.()@<> -]{{0,200}}{_SEP}++){{0,10}}+"
        rf"(?:{_BASE64}{{16,}}+{_SEP}*+)++(?:{_BASE64}{{1,15}}+{_SEP}*+){{0,2}}+(?:-----END {_FRAME})?+",
        rf"-----BEGIN(?:[A-Z0-9 ]*-{{0,4}}| {_FRAME}(?!{_FRAMED}*?-----END {_FRAME}){_FRAMED}*+)",
        hints=("-----begin",),
    ),
    Pattern("aws_key", rf"{_ALONE}A(?:KI|SI)A[A-Z0-9]{{16}}(?![A-Za-z0-9])", hints=("akia", "asia")),
    Pattern(
        "api_key",
        rf"{_ALONE}(?:sk-(?=[A-Za-z_-]{{0,80}}[0-9])[A-Za-z0-9_-]{{16,}}|[sr]k_(?:live|test)_[A-Za-z0-9]{{10,}}"
        r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}"
        r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{30,}|hf_[A-Za-z0-9]{20,}|npm_[A-Za-z0-9]{30,}"
        r"|pypi-[A-Za-z0-9_-]{30,})",
        hints=(
            *("sk-", "k_live_", "k_test_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox"),
            *("aiza", "hf_", "npm_", "pypi-"),
        ),
    ),
    Pattern(
        "jwt",
        r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?",
        hints=("eyj",),
    ),
    Pattern("url_password", r"://[!-.0-9;-?A-Z\\-~]{0,100}:(?!\[redacted:\w+\]@)([!-.0-~]{1,200})@"),
    Pattern(
        "authorization",
        rf"(?i:{_AUTHORIZATION}[:=][ \t]*\\?[\"']?(?:{_SCHEME}[ \t]++)?+{_MARKED}({_BARE}++)"
        rf"|{_ALONE}(?:bearer|basic)[ \t]++((?=[A-Za-z._~+/=-]*[0-9]){_TOKEN}{{16,}}))",
        rf"(?i:{_AUTHORIZATION}(?:[:=][ \t]*\\?[\"']?(?:{_SCHEME}[ \t]*)?{_BARE}*)?"
        rf"|(?:bearer|basic)(?:[ \t]+{_TOKEN}*)?)",
        hints=("authorization", "bearer", "basic"),
    ),
    Pattern(
        "password",
        rf"(?i:{_NAMED}[:=][ \t]*{_MARKED}"
        rf"(?:\"((?:\\.|[^\"\\\n])+)|'((?:\\.|[^'\\\n])+)|\\[\"']([^\"'\\\n]+)|({_BARE}++)))",
        rf"(?i:{_NAMED}(?:[:=][ \t]*"
        rf"(?:\"(?:\\.|[^\"\\\n])*\\?|'(?:\\.|[^'\\\n])*\\?|\\[\"'][^\"'\\\n]*|{_BARE}*))?)",
        hints=("passw", "passphrase", "pwd", "secret", "token", "key"),
    ),
)
"""What is recognised by default."""

_SECRET_KEY = re.compile(rf"(?i:{_NAME}|authorization)\Z", re.ASCII)
_WORD = re.compile(r"[!-~]*")
_BORDER = re.compile(r"[^!-~]")
SHORTEST = 6
"""Characters of a literal secret: shorter ones are found in the middle of ordinary words."""

LONG = 1000
"""Characters: what is held back beyond this is searched when it has grown by a part, not with every piece."""


# ---------------------------------------------------------------------- text and JSON


class Redactor:
    """Finds secrets: those of `builtin` kinds (None: all), your own `patterns`, and `literals`, which you know.

    secrets = Redactor(literals=[os.environ["DB_PASSWORD"]], patterns=[Pattern("customer", r"CUST-[0-9]{8}")])
    """

    def __init__(
        self,
        *,
        literals: Iterable[str] = (),
        patterns: Iterable[Pattern] = (),
        builtin: Iterable[str] | None = None,
    ) -> None:
        kinds = {each.kind for each in BUILTIN}
        wanted = kinds if builtin is None else set(builtin)
        if wanted - kinds:
            raise InvalidDefinition(f"there is no built-in kind {min(wanted - kinds)!r}: pick from {sorted(kinds)}")
        chosen = [*patterns, *[each for each in BUILTIN if each.kind in wanted]]
        self._kinds = [_Kind(each) for each in chosen]
        self._literals = sorted({_checked(each) for each in literals})
        self._loose = [each for each in self._literals if _BORDER.search(each)]

    def text(self, text: str) -> str:
        """`text` without its secrets."""
        found = [(*match.span(match.lastindex or 0), kind) for kind, match in self._matches(text)]
        found += [(start, end, "secret") for start, end in _places(text, self._literals)]
        if not found:
            return text
        pieces, done = [], 0
        for start, end, kind in sorted(found, key=lambda each: each[0]):  # at one place the earlier pattern names it
            if start >= done:
                pieces += [text[done:start], f"[redacted:{kind}]"]
            done = max(done, end)
        return "".join([*pieces, text[done:]])

    def value(self, value: Any, depth: int = 0) -> Any:
        """JSON without its secrets, those among them that only their key gives away. Never raises."""
        if isinstance(value, str):
            return self.text(value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if depth >= MAX_DEPTH:
            return "[redacted:too_deep]"
        if isinstance(value, Mapping):
            return self._object(value, depth)
        if isinstance(value, list | tuple):
            return [self.value(item, depth + 1) for item in value]
        try:
            return self.value(clean(value), depth + 1)
        except Exception:  # what cannot be read cannot be shown to be harmless, and a trace must not fail
            return "[redacted:unreadable]"

    def settled(self, text: str) -> int:
        """How much of a text that goes on can be redacted by itself already."""
        present = self._present(text)
        opened = [match.start() for each in present if each.open and (match := each.open.search(text))]
        cut = min([len(text), *opened, *[_begun(text, each) for each in self._loose]])
        whole = [match.span() for _, match in self._matches(text)] + _places(text, self._loose)
        while True:
            starts = [start for start, end in whole if start < cut < end]
            moved = min([_between_words(text, cut), *starts])
            if moved == cut:
                return cut
            cut = moved

    def _matches(self, text: str) -> list[tuple[str, re.Match[str]]]:
        return [(each.name, match) for each in self._present(text) for match in each.secret.finditer(text)]

    def _present(self, text: str) -> list[_Kind]:
        lowered = text.lower()
        return [each for each in self._kinds if not each.hints or any(hint in lowered for hint in each.hints)]

    def _object(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        for key, item in value.items():
            name = self.text(str(key))
            while name in shown:  # keys that were secrets, and are alike now
                name += "'"
            plain = not isinstance(item, str | int | float) or isinstance(item, bool) or item == ""
            hidden = not plain and _SECRET_KEY.search(str(key))
            shown[name] = "[redacted:password]" if hidden else self.value(item, depth + 1)
        return shown


class _Kind:
    """A pattern, compiled."""

    def __init__(self, pattern: Pattern) -> None:
        self.name, self.hints = pattern.kind, pattern.hints
        what = f"the pattern of kind {self.name!r}"
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", self.name):
            raise InvalidDefinition(f"{what} needs another name: small letters, digits and underscores")
        try:
            self.secret = re.compile(pattern.secret, re.ASCII)
            self.open = re.compile(rf"(?:{pattern.open})\Z", re.ASCII) if pattern.open else None
        except re.error as error:
            raise InvalidDefinition(f"{what} is no regular expression: {error}") from None
        if self.secret.search("") or self.secret.search(f"[redacted:{self.name}]"):
            raise InvalidDefinition(f"{what} finds secrets in nothing, or in its own mark: make it stricter")


def _checked(literal: str) -> str:
    if len(literal) < SHORTEST or literal in "[redacted:secret]":
        raise InvalidDefinition(f"a secret of {len(literal)} characters is too short: it would tear up other words")
    return literal


def _places(text: str, literals: Iterable[str]) -> list[tuple[int, int]]:
    found = []
    for literal in literals:
        at = text.find(literal)
        while at >= 0:
            found.append((at, at + len(literal)))
            at = text.find(literal, at + 1)
    return found


def _begun(text: str, literal: str) -> int:
    """Where a literal begins that the text ends in the middle of."""
    for length in range(min(len(literal) - 1, len(text)), 0, -1):
        if text.endswith(literal[:length]):
            return len(text) - length
    return len(text)


def _between_words(text: str, cut: int) -> int:
    """`cut`, or the beginning of the word that it is in; the last word may go on."""
    if cut < len(text) and _BORDER.match(text, cut):
        return cut
    tail = _WORD.match(text[:cut][::-1])
    assert tail is not None
    return cut - tail.end()


DEFAULT = Redactor()


def redact(value: Any, redactor: Redactor = DEFAULT) -> Any:
    """A text or JSON without its secrets."""
    return redactor.value(value)


# ---------------------------------------------------------------------- the plugin, and traces


class Redaction(Plugin):
    """Keeps secrets out of what a session records and shows: what tools leave, and what the model says.

        Agent(model, tools=[…], plugins=[Redaction(), …])

    It is a filter: wherever it stands, it sees what all other plugins have left. It filters outcomes of calls, also
    those that come from outside (completions, settlements, reasons) or from another plugin; progress and artifacts of
    tools, and files that they return; what wakes say of processes; and the model's text. Artifacts and files that are
    no text pass as they are, or not at all (`binary="withhold"`): a tool that puts such an artifact gets an error, and
    in place of such a file the result says so.

    It does not touch arguments: the call would be another one. Nor does it see what users say and which files they
    send (`InputRedaction` does), what processes keep of themselves, or a model's live reasoning. Traces have their own:
    `RedactingSink`.
    """

    id = "redaction"
    is_filter = True

    def __init__(self, redactor: Redactor = DEFAULT, *, binary: Literal["pass", "withhold"] = "pass") -> None:
        if binary not in ("pass", "withhold"):
            raise InvalidDefinition(f"binary artifacts 'pass', or one says 'withhold', not {quoted(binary):.80}")
        self.redactor, self.binary = redactor, binary
        self._hold(None, "")

    def for_session(self, ctx: SessionContext) -> Redaction:
        return copy.copy(self)

    def after_tool_call(self, ctx: ToolEndContext) -> ShortCircuit | None:
        outcome = self._outcome(ctx.outcome)
        return None if outcome == ctx.outcome else ShortCircuit(outcome)

    def filter_value(self, ctx: FilterContext, value: Any) -> Any:
        if isinstance(value, bytes):
            return value if self.binary == "pass" else None
        return self.redactor.value(value)

    def transform_text(self, ctx: StreamContext, text: str) -> str:
        if self._stream != (ctx.turn_id, ctx.step):
            self._hold((ctx.turn_id, ctx.step), "")
        self._held.append(text)
        self._size += len(text)
        if not ctx.final and (self._size < self._due or not _BORDER.search(text)):
            return ""
        held = "".join(self._held)
        cut = len(held) if ctx.final else self.redactor.settled(held)
        self._hold(self._stream, held[cut:])
        return self.redactor.text(held[:cut])

    def stream_finished(self, ctx: StreamContext, reason: StreamEnd) -> None:
        """What was held back of an attempt that was given up is of no use to the next one."""
        self._hold(None, "")

    def _hold(self, stream: tuple[str, int] | None, text: str) -> None:
        self._stream, self._held, self._size = stream, [text], len(text)
        self._due = len(text) + max(len(text) - LONG, 0) // 4

    def transform_response(self, ctx: StreamContext, response: ModelResponse) -> ModelResponse:
        return replace(
            response,
            text=self.redactor.text(response.text),
            reasoning=tuple([self._reasoning(each) for each in response.reasoning]),
            parts=tuple([self._part(part) for part in response.parts]),
        )

    def _outcome(self, outcome: ToolOutcome) -> ToolOutcome:
        match outcome:
            case Ok(value=value, files=files):
                # Without a `whole` that nothing has looked through.
                return Ok(self.redactor.value(value), files=self._files(files) if files else ())
            case Failed(code=code, message=message, data=data):
                return Failed(code, self.redactor.text(message), self.redactor.value(data))
            case _:
                return replace(outcome, reason=self.redactor.text(outcome.reason))

    def _files(self, files: tuple[File, ...]) -> tuple[File, ...]:
        """Bytes in the store have passed `filter_value`; those at an address or a provider nothing here can read.
        An address that holds a secret leads nowhere without it: that file is left out."""
        passed = []
        for file in files:
            source = None if isinstance(file, FileRef) else file.source
            open_address = isinstance(source, Url) and self.redactor.text(source.url) == source.url
            if isinstance(source, Stored) or (self.binary == "pass" and (source is None or open_address)):
                passed.append(replace(file, name=self.redactor.text(file.name)))
        return tuple(passed)

    def _part(self, part: Part) -> Part:
        match part:
            case Text(text=text):
                return Text(self.redactor.text(text))
            case Reasoning():
                return self._reasoning(part)
            case _:
                return part

    def _reasoning(self, reasoning: Reasoning) -> Reasoning:
        # `replay` is the provider's own, often signed: changed, it would be refused.
        return Reasoning(self.redactor.text(reasoning.text), reasoning.replay)


class InputRedaction(Plugin):
    """Keeps secrets out of what is said to an agent, before anything of it is stored.

        Agent(model, plugins=[InputRedaction(Redactor(patterns=[Pattern("customer", r"CUST-[0-9]{8}")]))])

    A Runtime without the agent says nothing to it unless it has the same plugin: `Runtime(input_filters={"name": …})`.
    Of a file its name and its address are looked at, and its bytes if they were given as such and are text. Any other
    file passes as it is, or the input is refused (`binary="refuse"`).
    """

    id = "input_redaction"

    def __init__(self, redactor: Redactor = DEFAULT, *, binary: Literal["pass", "refuse"] = "pass") -> None:
        if binary not in ("pass", "refuse"):
            raise InvalidDefinition(f"files that are no text 'pass', or one says 'refuse', not {quoted(binary):.80}")
        self.redactor, self.binary = redactor, binary

    def transform_input(self, ctx: InputContext, message: Message) -> Message:
        return Message(message.role, tuple([self._part(part) for part in message.parts]))

    def _part(self, part: Part) -> Part:
        if isinstance(part, Text):
            return Text(self.redactor.text(part.text))
        if not isinstance(part, FILES):
            return part
        source = None if isinstance(part, FileRef) else part.source
        named = replace(part, name=self.redactor.text(part.name))
        if isinstance(source, Inline) and (text := _as_text(source.data)) is not None:
            return replace(named, source=Inline(self.redactor.text(text).encode()))
        if isinstance(source, Url) and self.redactor.text(source.url) != source.url:
            raise InvalidInput("the address of a file holds a secret: give the file itself")
        if self.binary == "refuse":
            raise InvalidInput("this agent takes no files but texts: say what is in it")
        return named


def _as_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class RedactingSink:
    """A trace sink before another one: `RedactingSink(sink)`."""

    def __init__(self, sink: TraceSink, redactor: Redactor = DEFAULT) -> None:
        self._sink, self._redactor = sink, redactor

    def write(self, name: str, payload: Mapping[str, Any]) -> None:
        self._sink.write(name, self._redactor.value(payload))
