"""What a model is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from msgspec import Struct, field
from msgspec.json import encode
from msgspec.structs import force_setattr, replace

from perdure.errors import InvalidDefinition, InvalidInput, quoted
from perdure.model.message import NO_METADATA, Message, Metadata, OpenFile, Part, Reasoning, Text, ToolCall
from perdure.model.tool import ProviderTool, ToolSpec

Stop: TypeAlias = Literal["end", "tool_calls", "length", "filtered", "paused"]
"""Why an answer ended. `paused`: the provider's own tools are at work, and it goes on when it is asked again."""


BUCKETS = ("input", "output", "cache_read", "cache_write", "reasoning", "cost")


class Usage(Struct, frozen=True, gc=False, omit_defaults=True):
    """Tokens spent. `input` excludes what the cache answered; `reasoning` is part of `output`.

    None is what a provider does not tell, which is not zero. `calls` counts answered model calls; `unknown` counts
    those whose usage was never reported (a crash, a stream that broke off). `cost` is money where the provider reports
    it, in its own currency. In a sum that some calls have a figure for and others do not, `missing` says how many do
    not.
    """

    input: int | None = None
    output: int | None = None
    cache_read: int | None = None
    cache_write: int | None = None
    reasoning: int | None = None
    calls: int = 0
    unknown: int = 0
    cost: Decimal | None = None
    missing: dict[str, int] | None = None

    if TYPE_CHECKING:

        def __init__(  # noqa: PLR0913  # as the fields above
            self,
            input: int | None = None,
            output: int | None = None,
            cache_read: int | None = None,
            cache_write: int | None = None,
            reasoning: int | None = None,
            calls: int = 0,
            unknown: int = 0,
            cost: Decimal | float | str | None = None,
            missing: dict[str, int] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        cost: object = self.cost
        if cost is not None and type(cost) is not Decimal and type(cost) in (int, float, str):
            try:
                force_setattr(self, "cost", Decimal(str(cost)))  # 0.1 is a tenth, not the binary fraction next to it
            except InvalidOperation:
                raise InvalidInput(f"a cost of {quoted(cost)} is no amount of money") from None

    @property
    def total(self) -> int:
        """All tokens that were reported."""
        return (self.input or 0) + (self.output or 0) + (self.cache_read or 0) + (self.cache_write or 0)

    def __add__(self, other: Usage) -> Usage:
        missing: dict[str, int] = {}
        sums: dict[str, Any] = {}
        for name in BUCKETS:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is None and theirs is None:
                continue
            # Count the answered calls without this figure: all calls of a side where it is None, else its `missing`.
            lacking = 0
            if mine is None:
                lacking = self.calls
            elif self.missing is not None:
                lacking = self.missing.get(name, 0)
            if theirs is None:
                lacking += other.calls
            elif other.missing is not None:
                lacking += other.missing.get(name, 0)
            if lacking:
                missing[name] = lacking
            sums[name] = theirs if mine is None else mine if theirs is None else mine + theirs
        calls, unknown = self.calls + other.calls, self.unknown + other.unknown
        return Usage(**sums, calls=calls, unknown=unknown, missing=missing or None)


Effort: TypeAlias = Literal["off", "minimal", "low", "medium", "high", "max"]
"""How much a model should think before it answers."""


OutputMode: TypeAlias = Literal["schema", "tool", "prompt"]
"""How a typed answer is asked for: by the API's own schema, by a tool that the model calls, or in the instructions."""


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _within(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


def _kept(value: Any) -> bool:
    """Whether settings with it can be written down, which those of a session and of an input are."""
    try:
        encode(value, order="deterministic")
    except (TypeError, ValueError, RecursionError):  # also text that is none
        return False
    return True


_SETTINGS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("max_tokens", "1 or more", _whole(1)),
    ("temperature", "a number from 0 to 2", _within(0, 2)),
    ("top_p", "a number from 0 to 1", _within(0, 1)),
    (
        "stop",
        "a few strings",
        lambda value: isinstance(value, list | tuple) and all(isinstance(s, str) and s for s in value) and _kept(value),
    ),
    ("seed", "a whole number", lambda value: type(value) is int),
    ("reasoning", f"one of {', '.join(get_args(Effort))}, or tokens", lambda v: v in get_args(Effort) or _whole(1)(v)),
    (
        "tool_choice",
        "'auto', 'none', 'required' or a tool's name",
        lambda value: isinstance(value, str) and value != "" and _kept(value),
    ),
    ("parallel_tool_calls", "True or False", lambda value: isinstance(value, bool)),
    ("timeout", "seconds above 0", lambda value: _within(0, 1e9)(value) and value > 0),
    ("cache", "True, False, '5m' or '1h'", lambda value: isinstance(value, bool) or value in ("5m", "1h")),
    ("extra", "a dict of JSON", lambda value: isinstance(value, dict) and _kept(value)),
    ("output_mode", "'schema', 'tool' or 'prompt'", lambda value: value in get_args(OutputMode)),
)
"""Name, what fits in words, and whether a value does."""


class ModelSettings(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """How a model is asked. None leaves it to the provider; a provider refuses what its API cannot do.

    `reasoning` is an effort, or a number of tokens. `tool_choice` is "auto", "none", "required" or a tool's name.
    `timeout` bounds one attempt, in seconds; waiting for a rate limit does not count. `cache` False turns prompt
    caching off, "1h" keeps entries for longer where the provider can. `extra` goes into the request as it is.
    `output_mode` is how an agent with an output type is asked for its answer; None chooses what suits the model.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    reasoning: Effort | int | None = None
    tool_choice: str | None = None
    parallel_tool_calls: bool | None = None
    timeout: float | None = None
    cache: bool | Literal["5m", "1h"] | None = None
    extra: dict[str, Any] | None = None
    output_mode: OutputMode | None = None

    def __post_init__(self) -> None:
        for name, wanted, fits in _SETTINGS:
            value = getattr(self, name)
            if value is not None and not fits(value):
                raise InvalidDefinition(f"ModelSettings({name}={quoted(value)}) is not usable: give {wanted}")
        if type(self.stop) is not tuple:
            force_setattr(self, "stop", tuple(self.stop or ()))

    def over(self, below: ModelSettings | None) -> ModelSettings:
        """These settings, and those of `below` where these say nothing."""
        if below is None:
            return self
        said = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) not in (None, ())}
        if self.extra and below.extra:
            said["extra"] = {**below.extra, **self.extra}
        return replace(below, **said)


DEFAULT_SETTINGS = ModelSettings()


class ModelChoice(Struct, frozen=True, gc=False, omit_defaults=True):
    """Which model is asked, and how, where that is not left to the agent. `model` is a name, "" where none was said."""

    model: str = ""
    settings: ModelSettings | None = None


class RateLimit(Struct, frozen=True, gc=False, kw_only=True):
    """How much of a model may be used at once, and in any `per` seconds. None is no limit.

    `concurrency` counts calls under way, `requests` calls that start, `tokens` what they take in and give out without
    what a cache answered. `wait` is how many seconds a call waits for room before it fails as `rate_limited`.

        Runtime("agent.db", agents=[agent], rate_limits={"anthropic:": RateLimit(concurrency=8, requests=50)})
    """

    concurrency: int | None = None
    requests: int | None = None
    tokens: int | None = None
    per: float = 60.0
    wait: float | None = None

    def __post_init__(self) -> None:
        for name in ("concurrency", "requests", "tokens"):
            value = getattr(self, name)
            if value is not None and not _whole(1)(value):
                raise InvalidDefinition(f"RateLimit({name}={quoted(value)}) is not usable: give 1 or more, or None")
        if not _within(0.001, 1e9)(self.per):
            raise InvalidDefinition(f"RateLimit(per={quoted(self.per)}) is not usable: give seconds above 0")
        if self.wait is not None and not _within(0, 1e9)(self.wait):
            raise InvalidDefinition(f"RateLimit(wait={quoted(self.wait)}) is not usable: give seconds, or None")


class Remaining(Struct, frozen=True, gc=False):
    """What a provider says is left: `left` of `limit`, and all of it again in `seconds`."""

    left: int
    seconds: float
    limit: int | None = None


class RateReport(Struct, frozen=True, gc=False):
    """What a provider says of its rate limits when an answer begins. `accepted`: it took the call."""

    requests: Remaining | None = None
    tokens: Remaining | None = None
    accepted: bool = True


class ModelRequest(Struct, frozen=True, gc=False):
    """One question to a model. `call_id` names the model call and `attempt` counts from 1.

    `label` says what it is asked for: "turn", or the label of a direct completion. `open_file` reads the blobs that its
    messages refer to. A provider that gets rate limits with an answer passes them to `report`. `provider_tools` are
    what the provider may run itself while it answers. `metadata` says whom it is asked for, for
    the provider alone: none of ours sends it.
    """

    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    output_schema: dict[str, Any] | None = None
    call_id: str = ""
    attempt: int = 1
    session_id: str = ""
    turn_id: str = ""
    tool_choice: Literal["auto", "none"] = "auto"
    settings: ModelSettings = DEFAULT_SETTINGS
    label: str = "turn"
    open_file: OpenFile | None = None
    report: Callable[[RateReport], None] | None = None
    provider_tools: Sequence[ProviderTool] = ()
    metadata: Metadata = NO_METADATA


class ModelResponse(Struct, frozen=True, gc=False, omit_defaults=True):
    """One complete answer. A stream that ends without one is broken off, never finished."""

    text: str = ""
    tool_calls: Sequence[ToolCall] = ()
    usage: Usage | None = None
    stop: Stop = "end"
    reasoning: Sequence[Reasoning] = ()
    model: str = ""
    parts: Sequence[Part] = field(default=())

    def all_parts(self) -> tuple[Part, ...]:
        """The answer in emission order; providers that know the order give `parts` themselves."""
        if self.parts:
            return tuple(self.parts)
        text = (Text(self.text),) if self.text else ()
        return (*self.reasoning, *text, *self.tool_calls)


class Attempt(Struct, frozen=True, gc=False, omit_defaults=True):
    """One attempt to ask a model: which one, when it ended (ms), and why it failed. The one that answered has no code.

    `delay_ms` is how long the next attempt had to wait. `number` counts from 1 within the call.
    """

    number: int
    model: str = ""
    at: int = 0
    code: str = ""
    message: str = ""
    delay_ms: int = 0


class ModelRecord(Struct, frozen=True, gc=False, omit_defaults=True):
    """One model call of a turn, as a person reads it: its attempts in order, and what came of them.

    `stop` is None where no answer came. `interrupted` counts attempts whose end was not seen, because the process
    died. `label` is that of a direct completion (then `step` is 0), and "turn" for the turn's own calls.
    """

    step: int
    attempts: tuple[Attempt, ...]
    usage: Usage | None = None
    stop: Stop | None = None
    interrupted: int = 0
    label: str = "turn"


class Completion(Struct, frozen=True, gc=False, omit_defaults=True):
    """The answer to a direct completion. `value` is set when JSON or a type was asked for and no tool is called.

    `parts` are the whole answer in order: as `Message("assistant", parts)` it is said again in the next question, with
    the results of its calls after it. Nothing has run them.
    """

    text: str
    value: Any = None
    usage: Usage | None = None
    model: str = ""
    stop: Stop = "end"
    parts: tuple[Part, ...] = ()

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tools that the model would call."""
        return tuple([part for part in self.parts if isinstance(part, ToolCall)])


class CallPiece(Struct, frozen=True, gc=False):
    """A piece of a tool call's arguments as the model writes them. `index` counts the calls of the answer."""

    index: int
    name: str
    text: str


Delta: TypeAlias = str | Reasoning | CallPiece | ModelResponse
"""What a provider streams: pieces of text, of reasoning and of tool calls, and last the whole answer."""
