"""Limits on what is spent: asking for room before a call, waiting for it, and settling after it.

    SpendLimits     of a Runtime: its limits, what models cost, and the calls that wait for room
    TurnSpending    of one turn: what is reserved for its next call

Nothing here writes by itself: what is to be reserved and settled rides in the writes of the turn (`TurnJournal.spend`).
The decision is made in the transaction (`lifecycle.limits`), for all processes of a store alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import LimitReached, ProviderError
from perdure.model.codec import clean_text
from perdure.model.limit import FLOOR, NANO, THINKING, Ask, Bound, Granted, Limit, NearLimit, Settle, Spending, units
from perdure.model.llm import ModelRequest, ModelSettings, Usage
from perdure.model.message import FILES, Audio, Document, Message, Scalar, Stored, ToolResult
from perdure.model.outcome import LimitReached as Reached
from perdure.model.spending import Price
from perdure.model.tool import ToolSpec
from perdure.ports.host import Clock
from perdure.ports.provider import Prices, Provider

ANSWER = 8_192
"""Tokens that are reserved for an answer whose settings bound it to nothing; it is bounded to that then."""
RATIO = 1 / 3
"""Tokens in a byte of a request, before a model has told better: more than most have."""
POLL = 0.5
"""Seconds after which calls that wait look again, for what other processes have settled: each look is a write."""
LONGEST_POLL = 4.0
"""The same after looks that found nothing new."""
FILE_BYTES = 4_800
"""Bytes of text that are as dear as a picture, or as a file of which only the address is known."""

_encode = msgspec.json.Encoder().encode


class SpendLimits:
    """The limits of a Runtime. Belongs to one event loop."""

    def __init__(
        self,
        limits: tuple[Limit, ...],
        prices: Prices | None,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        self.limits, self._prices, self._clock, self._spawn = limits, prices, clock, spawn
        self._by_name = {limit.name: limit for limit in limits}
        self._bounds = [
            (each, each.name, each.kind, each.most, max(round(each.most * each.warn), 1)) for each in limits
        ]
        self._paid = any(limit.kind == "money" for limit in limits)
        self._ratios: dict[str, float] = {}
        self._settings = ModelSettings(), ModelSettings()
        self._waiting: set[asyncio.Future[None]] = set()
        self._timer: asyncio.Task[None] | None = None
        self._pause = POLL

    def bounds(self) -> tuple[Bound, ...]:
        """The limits as they hold now."""
        now = self._clock.now()
        return tuple(
            [
                Bound(name, kind, limit.per, 0 if limit.window is None else limit.start(now), most, near)
                for limit, name, kind, most, near in self._bounds
            ]
        )

    def ask(self, model: str, size: int, settings: Any) -> Ask:
        """What a request of so many bytes may take. A model without a price is not asked where money is limited."""
        tokens, reasoning = max(round(size * self._ratios.get(model, RATIO)), 1), settings.reasoning
        thinking = reasoning if type(reasoning) is int else 0 if reasoning in (None, "off") else THINKING
        output = settings.max_tokens or ANSWER + (reasoning if type(reasoning) is int else 0)
        least = thinking + FLOOR
        if not self._paid:
            return Ask(tokens, output, least=least)
        price = price_of(self._prices, model)
        most = max(price.input, price.cache_write or price.input)
        return Ask(tokens, output, units(most), units(price.output), least)

    def settle(self, model: str, usage: Usage | None, size: int, reserved: Reserved | None) -> Settle:
        """What a call has taken; None where its provider does not tell. Where it tells of one half only, the other one
        counts as it was reserved."""
        if usage is None:
            return Settle()
        asked = usage.total - (usage.output or 0)
        if asked and size:
            before = self._ratios.get(model, RATIO)
            self._ratios[model] = min(max(asked / size, before * 0.9, 1 / 16), 2.0)
        cost = usage.cost
        if cost is None and self._prices is not None:
            cost = self._prices.cost(model, usage)
        tokens = None
        if usage.input is not None and usage.output is not None:
            tokens = usage.total
        elif reserved is not None and usage.total:
            tokens = usage.total + (reserved.ask.input if usage.input is None else reserved.output)
        return Settle(tokens, None if cost is None else units(cost))

    def bounded(self, request: ModelRequest, output: int) -> ModelRequest:
        """The request, with an answer of so many tokens at most. The last settings are kept: most calls have the same,
        and making them checks them."""
        before, after = self._settings
        if before is not request.settings or after.max_tokens != output:
            before, after = request.settings, replace(request.settings, max_tokens=output)
            self._settings = before, after
        return replace(request, settings=after)

    # ------------------------------------------------------------------ waiting

    async def room(self) -> None:
        """Wait until something was settled here, or others may have settled something."""
        wake = asyncio.get_running_loop().create_future()
        self._waiting.add(wake)
        if self._timer is None:
            self._timer = self._spawn(self._look_again(), "perdure limits")
        try:
            await wake
        finally:
            self._waiting.discard(wake)

    def settled(self) -> None:
        """Something is on disk that may have made room."""
        self._pause = POLL
        self._wake()

    def _wake(self) -> None:
        for wake in self._waiting:
            if not wake.done():
                wake.set_result(None)

    async def _look_again(self) -> None:
        try:
            await self._clock.sleep(self._pause)
            self._pause = min(self._pause * 2, LONGEST_POLL)
        finally:
            self._timer = None
            self._wake()

    # ------------------------------------------------------------------ in words

    def reached(self, short: NearLimit) -> Reached:
        """How a turn ends that a limit stops."""
        limit = self._by_name[short.name]
        key = msgspec.json.decode(short.key)
        spent, most = amount(limit.kind, short.spent), amount(limit.kind, short.most)
        window = limit.window if isinstance(limit.window, str) or limit.window is None else f"{limit.window:g} s"
        return Reached(limit.kind, most, spent, limit.per, key, window or "")

    def refusal(self, short: NearLimit) -> LimitReached:
        """The same for a direct completion."""
        how = self.reached(short)
        return LimitReached(how.kind, how.limit, how.spent, how.per, how.key, how.window)


def price_of(prices: Prices | None, model: str) -> Price:
    """What a model costs. Raises ProviderError where that is not known: what is not known is not free."""
    price = None if prices is None else prices.price(model)
    if price is None:
        raise ProviderError(
            f"what {model} costs is not known, and a limit on money holds: give Runtime(prices={{{model!r}: "
            "Price(input=…, output=…)}), or prices='genai-prices'",
            code="price_missing",
        )
    return price


def amount(kind: str, given: int) -> Decimal:
    """Return an amount as people count it."""
    return Decimal(given) / NANO if kind == "money" else Decimal(given)


class RequestSizes:
    """Bytes of what a model is asked, as JSON, with what its files may be as text.

    One is kept for each session in memory: of a request that goes on from the last one, only what is new is encoded,
    or every call would cost as much as the history before it. `_sums` are the sizes up to each of the `_messages`,
    without instructions, which are put in front of every request anew.
    """

    __slots__ = ("_messages", "_schema", "_sums", "_tools")

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._sums: list[int] = []
        self._tools: tuple[Sequence[ToolSpec], int] = (), 0
        self._schema: tuple[object, int] = None, 0

    def of(self, request: ModelRequest) -> int:
        if self._tools[0] is not request.tools:
            self._tools = request.tools, sum([len(_encode(each)) for each in request.tools])
        if self._schema[0] is not request.output_schema:
            self._schema = request.output_schema, len(_encode(request.output_schema))
        size, messages = self._tools[1], [*request.messages]
        if request.output_schema is not None:
            size += self._schema[1]
        if messages and messages[0].role == "system":
            size += _size_of_message(messages.pop(0))
        known, sums = self._messages, self._sums
        if messages[: len(known)] != known:  # compares what is the same object by that
            pairs = enumerate(zip(known, messages, strict=False))
            same = next((at for at, (before, now) in pairs if before != now), len(messages))
            del known[same:], sums[same:]
        for message in messages[len(known) :]:
            sums.append(_size_of_message(message) + (sums[-1] if sums else 0))
            known.append(message)
        return size + (sums[-1] if sums else 0)


def size_of(request: ModelRequest) -> int:
    """The same for a request that no other follows."""
    return RequestSizes().of(request)


def _size_of_message(message: Message) -> int:
    encoded = _encode(message)
    if b'"media_type":' in encoded or b'"source":' in encoded:
        return len(encoded) + _size_of_files(message)
    return len(encoded)


def _size_of_files(message: Message) -> int:
    """How many bytes of text cost as much as the files of a message, which is told of them by digest or address."""
    size = 0
    for part in message.parts:
        for file in part.files if isinstance(part, ToolResult) else (part,):
            if not isinstance(file, FILES):
                continue
            source = getattr(file, "source", None)
            stored = source.size if isinstance(source, Stored) else FILE_BYTES
            if isinstance(file, Document):
                size += stored if file.media_type.startswith("text/") else max(stored // 4, FILE_BYTES)
            else:
                size += max(stored // 100, FILE_BYTES) if isinstance(file, Audio) else FILE_BYTES
    return size


class Reserved(Struct, frozen=True, gc=False):
    """What is reserved for a call that was not made yet."""

    ask: Ask
    output: int

    def covers(self, ask: Ask) -> bool:
        """Whether a call may be made with it: no smaller an answer was asked for, and its input fits."""
        prices = (self.ask.input_price, self.ask.output_price) == (ask.input_price, ask.output_price)
        return prices and ask.input <= self.ask.input and min(ask.output, ask.least) <= self.output


class TurnSpending:
    """What a turn has reserved for its next call, and what is to be settled of the last one.

    `reserved` is on disk, and no call was made with it yet; of what was asked for last, that is not known yet while it
    `asks`. `_inherited`: what an earlier run of the turn has reserved may be there still, and what became of it is not
    known. `warned` are the accounts that the turn was told of.
    """

    __slots__ = (
        "_answer",
        "_asked",
        "_count",
        "_inherited",
        "_metadata",
        "_op",
        "_size",
        "_sizes",
        "asks",
        "limits",
        "reserved",
        "warned",
    )

    def __init__(
        self,
        limits: SpendLimits,
        op: str,
        metadata: dict[str, Scalar],
        reserved: Reserved | None,
        sizes: RequestSizes,
    ) -> None:
        self.limits, self._op, self._metadata, self.reserved, self._sizes = limits, op, metadata, reserved, sizes
        self._count, self._size = 0, 0
        self._asked: tuple[ModelRequest, str, Ask] | None = None
        self._inherited, self.asks = reserved is None, False
        self._answer: Settle | None = None
        self.warned: set[tuple[str, str, int]] = set()

    def ask(self, model: str, request: ModelRequest) -> Ask:
        """What a request may take; the same for the write before a call and for the call."""
        asked = self._asked
        if asked is None or asked[0] is not request or asked[1] != model:
            self._size = self._sizes.of(request)
            asked = self._asked = request, model, self.limits.ask(model, self._size, request.settings)
        return asked[2]

    def reserve(self, ask: Ask) -> Spending:
        """What asks for room for the next call. What was reserved before and not used is given back."""
        settle = self._taken()
        self.asks = True
        return Spending("", self._next(), self.limits.bounds(), ask, settle, self._metadata)

    def granted(self, ask: Ask, given: Granted) -> None:
        self.asks, self.reserved = False, Reserved(ask, given.output) if given.output else None

    def ended(self, model: str, usage: Usage | None, begun: bool) -> None:
        """The call that something was reserved for has ended. One that was not begun has cost nothing."""
        reserved, self.reserved = self.reserved, None
        self._answer = self.limits.settle(model, usage, self._size, reserved) if begun else Settle(free=True)

    def pending(self) -> Iterator[Spending]:
        """What is to be settled with the next write."""
        if self._answer is not None:
            yield Spending("", self._next(), settle=self._taken(), metadata=self._metadata)

    def is_settled_by(self, spendings: Sequence[Spending]) -> bool:
        """Whether a write with these leaves nothing of the turn's own calls to settle."""
        kept = self.asks or self.reserved is not None or self._answer is not None
        return not kept and any(not each.name for each in spendings)

    def close(self) -> Spending:
        """The turn ends, or is left: what is not settled yet is settled or given back."""
        return Spending("", self._next(), settle=self._taken(), metadata=self._metadata)

    def news(self, given: Granted) -> Iterator[NearLimit]:
        """The accounts that are nearly spent, and that were not told of yet."""
        for each in given.near:
            if (each.name, each.key, each.start) not in self.warned:
                self.warned.add((each.name, each.key, each.start))
                yield each

    def _taken(self) -> Settle:
        """How the last call ended; or that there was none with what is reserved."""
        answer, inherited = self._answer, self._inherited
        self._answer, self._inherited, self.reserved = None, False, None
        return answer or Settle(free=not inherited)

    def _next(self) -> str:
        self._count += 1
        return f"{self._op}.{self._count}"


class LimitedCall:
    """A direct completion that limits hold for, under a reservation of its own (`name`). `models` are those that may be
    asked, because their price is known; the dearest is reserved for. Raises ProviderError where there is none."""

    def __init__(self, limits: SpendLimits, name: str, models: Sequence[Provider], request: ModelRequest) -> None:
        self.limits, self.name, self._size, self._count = limits, name, size_of(request), 0
        asked, asks, unpriced = list[Provider](), list[Ask](), None
        for each in models:
            try:
                asks.append(limits.ask(clean_text(str(each.name)), self._size, request.settings))
            except ProviderError as error:
                unpriced = error
            else:
                asked.append(each)
        if unpriced is not None and not asks:
            raise unpriced
        self.models = tuple(asked)
        self._ask = Ask(
            max([each.input for each in asks]),
            asks[0].output,
            max([each.input_price for each in asks]),
            max([each.output_price for each in asks]),
            asks[0].least,
        )
        self._reserved: Reserved | None = None

    def ask(self, metadata: dict[str, Scalar]) -> Spending:
        """What asks for room. What is reserved for an attempt that has no answer counts as spent."""
        self._reserved = None
        return Spending(self.name, self._next(), self.limits.bounds(), self._ask, metadata=metadata)

    def bounded(self, request: ModelRequest, given: Granted) -> ModelRequest | None:
        """The request as it may be asked; None while others have reserved what is left. Raises LimitReached."""
        if given.output:
            self._reserved = Reserved(self._ask, given.output)
            return self.limits.bounded(request, given.output)
        if given.waits or given.short is None:
            return None
        raise self.limits.refusal(given.short)

    def settled(self, usage: Usage | None) -> Spending:
        """It was answered."""
        model = clean_text(str(self.models[0].name))  # by the name of the one that answered, the cost was told already
        return Spending(self.name, self._next(), settle=self.limits.settle(model, usage, self._size, self._reserved))

    def failed(self, free: bool) -> Spending:
        """It has no answer. What a provider refused has cost nothing; what was cut off is not known."""
        return Spending(self.name, self._next(), settle=Settle(free=free or self._reserved is None))

    def _next(self) -> str:
        self._count += 1
        return f"{self.name}.{self._count}"
