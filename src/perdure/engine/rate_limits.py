"""Rate limits of models: how many calls are under way, and how many calls and tokens go out per window.

    Limiter      decides, without I/O: which calls wait, which goes next, and when time alone lets one go
    InFlight     bounds the calls of one model that are under way, where the host set no limit for it
    RateLimits   acts: one per Runtime, shared by all of its turns and direct completions; wakes who may go

A call passes every limit that its model has: the model's own, and that of its provider where the host set one. It takes
all of them at once or none, so a call that waits for one limit holds no place of another. In each limit calls go in the
order in which they came. A call passes others only where it does not need what those wait for: calls of a model that
has no room of its own do not stop the provider's other models.

What the host sets is kept to exactly: in no window of `per` seconds do more calls start than `requests`. Tokens are
estimated when a call starts and corrected when its usage is known; how far estimates were off corrects the next ones.

A call of a model without a limit of the host's takes a place in flight first (`Runtime(model_calls=64)`). It waits for
that place as long as it takes, in line, and no provider has heard of it; only then it passes the limits above.

Models without limits of the host's learn from their provider. Figures that come with an answer count for a minute at
most. A 429 holds back every call of the model until the time that the provider asked for; then one call goes, and each
one that is accepted lets two follow, so that those who waited are no second storm.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import InvalidDefinition, ProviderError, quoted
from perdure.model.llm import ModelRequest, ModelResponse, RateLimit, RateReport, Remaining, Usage
from perdure.ports.host import Clock
from perdure.ports.provider import Provider, candidates

Reason: TypeAlias = Literal["concurrency", "requests", "tokens", "provider"]
"""What a call waits for. `provider`: it told us to wait, or lets us go on step by step after it did."""

Lack: TypeAlias = tuple[Reason, float | None]
"""What there is no room of, and until when where time alone decides."""

AskModel: TypeAlias = Callable[[Provider, ModelRequest], Awaitable[ModelResponse]]

LONGEST = 60.0
"""Seconds for which a provider is believed. It may speak of a day, or of a clock that is wrong; asking it tells."""
RAMP = 32
"""After so many calls have been accepted since a refusal, nothing is held back any more."""
UNLIMITED = RateLimit(wait=300.0)
"""For models that the host set no limit for: they wait only when their provider says so."""
TOKEN_BYTES = 4
MOST = 2**53
SHORTEST = 0.001
"""Seconds: a sleep that rounding made zero would not move any clock."""

_encode = msgspec.json.Encoder(enc_hook=str).encode


class RateWait(Struct, frozen=True):
    """What a call waits for: which limit, why, and in how many seconds there may be room, where time alone decides."""

    limit: str
    reason: Reason
    seconds: float | None = None


class Ticket(Struct, eq=False):
    """A call that wants to go, or has gone. `tokens` is what it counts for; `estimate` what it was first taken for.

    `queued` is set while it waits for a place in flight, before the limiter knows it; `in_flight` while it has one.
    """

    number: int
    lane: Lane
    estimate: int
    expires: float | None
    tokens: int
    going: bool = False
    left: bool = False
    at: float = 0.0
    wake: asyncio.Future[None] | None = None
    queued: asyncio.Future[None] | None = None
    in_flight: bool = False


class Lane:
    """Calls of one model, in the order in which they came, and the limits that they pass: the first is its own.

    `ratio` is what its calls took, lately, for every token that they were estimated at.
    """

    __slots__ = ("flight", "limits", "ratio", "waiting")

    def __init__(self, limits: tuple[LearnedLimit, ...], flight: InFlight | None = None) -> None:
        self.limits, self.ratio, self.flight = limits, 1.0, flight
        self.waiting: deque[Ticket] = deque()

    def lacking(self, ticket: Ticket, now: float) -> dict[LearnedLimit, Lack]:
        """What the call has to wait for, limit by limit."""
        ticket.tokens = max(int(ticket.estimate * self.ratio), 1)
        return {limit: lack for limit in self.limits if (lack := limit.lacks(ticket, now)) is not None}

    def spent(self, ticket: Ticket, tokens: int) -> None:
        """How far the estimate was off corrects the next ones: caches and long answers are the rule, not chance."""
        if tokens and ticket.estimate:
            self.ratio = min(max(0.8 * self.ratio + 0.2 * tokens / ticket.estimate, 0.05), 4.0)


class InFlight:
    """Places for the calls of one model under way, first come first served. A call keeps its place while it waits for
    its provider."""

    __slots__ = ("_line", "_most", "_used")

    def __init__(self, most: int) -> None:
        self._most, self._used = most, 0
        self._line: deque[Ticket] = deque()

    def take(self, ticket: Ticket) -> bool:
        """True if the call has a place now. Otherwise it stands in line, and `queued` is done when it has a place."""
        if self._used < self._most and not self._line:
            self._used += 1
            ticket.in_flight = True
            return True
        ticket.queued = asyncio.get_running_loop().create_future()
        self._line.append(ticket)
        return False

    def leave(self, ticket: Ticket) -> None:
        """Release the call's place, or its position in line, and give the place to the next call in line."""
        if ticket.in_flight:
            ticket.in_flight = False
            self._used -= 1
            if self._line:
                self._admit(self._line.popleft())
        elif ticket.queued is not None:
            self._line.remove(ticket)
            ticket.queued = None

    def _admit(self, ticket: Ticket) -> None:
        self._used += 1
        ticket.in_flight = True
        assert ticket.queued is not None
        if not ticket.queued.done():
            ticket.queued.set_result(None)  # a cancelled call leaves by itself and passes its place on


class Bucket:
    """What a provider says is left, refilled evenly until it is full again."""

    __slots__ = ("at", "full", "left", "rate", "until")

    def __init__(self, told: Remaining, now: float, pending: int) -> None:
        seconds = min(max(told.seconds, 0.0), LONGEST)
        self.at, self.until, self.left = now, now + seconds, float(max(told.left - pending, 0))
        self.full = float("inf") if told.limit is None else float(told.limit)
        missing = 0.0 if told.limit is None else max(told.limit - told.left, 0)
        self.rate = missing / told.seconds if told.seconds > 0 else 0.0

    def due(self, now: float) -> float | None:
        """When there is one more; None when there is one now, or what the provider said is too old."""
        if now >= self.until or min(self.left + self.rate * (now - self.at), self.full) >= 1 - 1e-6:
            return None
        return self.until if not self.rate else min(self.at + (1 - self.left) / self.rate, self.until)


class LearnedLimit:
    """One limit: the host's rule for it, and what its provider has said.

    `restricted`: there may be something to wait for. Until its provider has told of a limit, a model for which the host
    sets none has nothing, and its calls are only counted as `active`.
    """

    __slots__ = ("_held", "_log", "_opening", "_reports", "_spent", "_trying", "active", "name", "restricted", "rule")

    def __init__(self, name: str, rule: RateLimit) -> None:
        self.name, self.rule = name, rule
        self.restricted = not (rule.concurrency is None and rule.requests is None and rule.tokens is None)
        self.active: set[Ticket] = set()
        self._log: deque[Ticket] = deque()  # calls that started within the window, oldest first
        self._spent = 0
        self._held = float("-inf")
        self._opening: int | None = None  # how many calls may be unanswered since the provider refused one
        self._trying: set[Ticket] = set()
        self._reports: dict[Reason, Bucket] = {}

    def held(self, now: float) -> float:
        """Seconds that the provider wants no calls for."""
        return max(self._held - now, 0.0)

    def lacks(self, ticket: Ticket, now: float) -> Lack | None:
        """What the call has to wait for here; None when it may go."""
        rule = self.rule
        if self._held > now:
            return "provider", self._held
        if self._opening is not None and len(self._trying) >= self._opening:
            return "provider", None
        for bucket in self._reports.values():
            if (due := bucket.due(now)) is not None:
                return "provider", due
        if rule.concurrency is not None and len(self.active) >= rule.concurrency:
            return "concurrency", None
        if rule.requests is None and rule.tokens is None:
            return None
        while self._log and self._log[0].at + rule.per <= now:
            self._spent -= self._log.popleft().tokens
        if rule.requests is not None and len(self._log) >= rule.requests:
            return "requests", self._log[len(self._log) - rule.requests].at + rule.per
        if rule.tokens is not None and self._log:
            # One that is larger than the whole window goes when there is no other in it.
            over = self._spent + min(ticket.tokens, rule.tokens) - rule.tokens
            for older in self._log if over > 0 else ():
                over -= older.tokens
                if over <= 0:
                    return "tokens", older.at + rule.per
        return None

    def start(self, ticket: Ticket) -> None:
        self.active.add(ticket)
        if self._opening is not None:
            self._trying.add(ticket)
        if "requests" in self._reports:
            self._reports["requests"].left -= 1
        if self.rule.requests is not None or self.rule.tokens is not None:
            self._log.append(ticket)
            self._spent += ticket.tokens

    def accepted(self, ticket: Ticket) -> None:
        """The provider took the call: more may follow."""
        if ticket in self._trying:
            self._trying.discard(ticket)
            assert self._opening is not None
            self._opening = None if self._opening >= RAMP else self._opening + 1
            if self._opening is None:
                self._trying.clear()

    def learn(self, ticket: Ticket, report: RateReport, now: float) -> None:
        """What the provider says is left after this call; later ones may not be counted in it."""
        self.restricted = self.restricted or report.requests is not None or report.tokens is not None
        later = sum([1 for each in self.active if each.number > ticket.number])
        if report.requests is not None:
            self._reports["requests"] = Bucket(report.requests, now, later)
        if report.tokens is not None:
            self._reports["tokens"] = Bucket(report.tokens, now, 0)

    def hold(self, seconds: float, now: float) -> None:
        self._held = max(self._held, now + min(max(seconds, 0.0), LONGEST))
        self._opening, self.restricted = 1, True
        self._trying.clear()

    def end(self, ticket: Ticket, spent: int | None) -> None:
        """The call is over; `spent` is what it took in tokens, None where that is not known."""
        self.active.discard(ticket)
        self._trying.discard(ticket)
        if spent is not None and self._log and ticket.at >= self._log[0].at:
            self._spent += spent - ticket.tokens


class Limiter:
    """Who waits and who goes next. All times are seconds of one clock that never goes back."""

    def __init__(self, rules: Mapping[str, RateLimit], most: int | None = None) -> None:
        self._rules, self._most = dict(rules), most
        self._limits: dict[str, LearnedLimit] = {}
        self.lanes: dict[tuple[str, ...], Lane] = {}
        self.numbers = itertools.count(1)
        self.waiting = 0

    def lane(self, *names: str) -> Lane:
        """The limits that a model passes which is known under these names; the first is its own."""
        found = self.lanes.get(names)
        if found is None:
            own, *others = names
            limits = [self._limit(own, self._rules.get(own, UNLIMITED))]
            limits += [self._limit(name, self._rules[name]) for name in others if name in self._rules and name != own]
            bounded = own in self._rules or any(limit.rule.concurrency is not None for limit in limits)
            flight = None if bounded or self._most is None else InFlight(self._most)
            found = self.lanes[names] = Lane(tuple(limits), flight)
        return found

    def _limit(self, name: str, rule: RateLimit) -> LearnedLimit:
        return self._limits.setdefault(name, LearnedLimit(name, rule))

    def join(self, lane: Lane, estimate: int, now: float) -> Ticket:
        """A call that wants to go: it is `going` at once where no other call waits and there is room."""
        ticket = Ticket(next(self.numbers), lane, estimate, None, estimate)
        self.enter(ticket, now)
        return ticket

    def enter(self, ticket: Ticket, now: float) -> None:
        """Have a call pass the limits: at once where no other call waits and there is room. Its time to wait begins."""
        lane = ticket.lane
        waits = [each.rule.wait for each in lane.limits if each.rule.wait is not None]
        ticket.expires = now + min(waits) if waits else None
        if not self.waiting and not lane.lacking(ticket, now):
            self._started(ticket, now)
        else:
            lane.waiting.append(ticket)
            self.waiting += 1

    def advance(self, now: float) -> tuple[list[Ticket], float | None]:
        """Those that may go now, marked `going`, and those that have waited too long, marked `left`; and when to look
        again, where time alone changes something."""
        moved: list[Ticket] = []
        dues: list[float] = []
        for lane in self.lanes.values():
            while lane.waiting and _expired(lane.waiting[0], now):
                moved.append(self._dropped(lane.waiting.popleft()))
        heads = [(lane.waiting[0].number, lane) for lane in self.lanes.values() if lane.waiting]
        heapq.heapify(heads)
        short: set[LearnedLimit] = set()
        while heads:
            _, lane = heapq.heappop(heads)
            head = lane.waiting[0]
            blocked = not short.isdisjoint(lane.limits)  # an earlier call waits for something that this one needs too
            lacking = {} if blocked else lane.lacking(head, now)
            if not blocked and not lacking:
                self.waiting -= 1
                moved.append(self._started(lane.waiting.popleft(), now))
                if lane.waiting:
                    heapq.heappush(heads, (lane.waiting[0].number, lane))
                continue
            if head.expires is not None:
                dues.append(head.expires)
            if blocked:
                continue
            short.update(lacking)
            untils = [until for _, until in lacking.values()]
            if all(until is not None for until in untils):
                dues.append(max(until for until in untils if until is not None))
        return moved, min(dues, default=None)

    def _started(self, ticket: Ticket, now: float) -> Ticket:
        ticket.at, ticket.going = now, True
        for limit in ticket.lane.limits:
            limit.start(ticket)
        return ticket

    def _dropped(self, ticket: Ticket) -> Ticket:
        ticket.left = True
        self.waiting -= 1
        return ticket

    def why(self, ticket: Ticket, now: float) -> RateWait:
        """What a waiting call waits for: room, or that a call before it has some."""
        ahead = [lane.waiting[0] for lane in self.lanes.values() if lane.waiting and lane.waiting[0] is not ticket]
        ahead = [each for each in ahead if each.number < ticket.number]
        for each in (ticket, *sorted(ahead, key=lambda each: each.number)):
            for limit, (reason, until) in each.lane.lacking(each, now).items():
                if limit in ticket.lane.limits:
                    return RateWait(limit.name, reason, None if until is None else max(until - now, 0.0))
        return RateWait(ticket.lane.limits[0].name, "concurrency")

    def leave(self, ticket: Ticket, spent: int | None = 0) -> None:
        """A call is over, or gives up waiting. Those behind it may go now: `advance` tells."""
        if ticket.left:
            return
        if not ticket.going:
            ticket.lane.waiting.remove(ticket)
            self._dropped(ticket)
            return
        ticket.left = True
        for limit in ticket.lane.limits:
            limit.end(ticket, spent)
        if spent is not None:
            ticket.lane.spent(ticket, spent)
            ticket.tokens = spent


def _expired(ticket: Ticket, now: float) -> bool:
    return ticket.expires is not None and ticket.expires <= now


class RateLimits:
    """The limits of a Runtime. Belongs to one event loop."""

    def __init__(
        self,
        rules: Mapping[str, RateLimit],
        models: Mapping[str, Provider],
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        most: int | None = None,
    ) -> None:
        self._clock, self._spawn = clock, spawn
        self._limiter = Limiter(rules, most)
        self._named = {id(each): name for name, given in models.items() for each in candidates(given) if name in rules}
        self._timer: asyncio.Task[None] | None = None
        self._due: float | None = None

    def held(self, provider: Provider) -> float:
        """Seconds for which the provider of this model wants no calls."""
        return self._lane(provider).limits[0].held(self._clock.monotonic())

    def join(self, provider: Provider, request: ModelRequest) -> Ticket:
        """Queue a call. It may go at once when `going` is set; otherwise `wait` for it. In the end, `leave`."""
        lane = self._lane(provider)
        limits, flight = lane.limits, lane.flight
        if len(limits) == 1 and not limits[0].restricted:
            ticket = Ticket(next(self._limiter.numbers), lane, 0, None, 0)
            if flight is None or flight.take(ticket):
                ticket.going = True
                limits[0].active.add(ticket)
            return ticket
        estimate = _estimate(request) if any(limit.rule.tokens is not None for limit in limits) else 0
        ticket = Ticket(next(self._limiter.numbers), lane, estimate, None, estimate)
        if flight is None or flight.take(ticket):
            self._enter(ticket)
        return ticket

    def _enter(self, ticket: Ticket) -> None:
        """Have a call pass the limits of its model, whose limits may have changed while the call stood in line."""
        limits = ticket.lane.limits
        if not limits[0].restricted and len(limits) == 1:
            ticket.going = True
            limits[0].active.add(ticket)
            return
        self._limiter.enter(ticket, self._clock.monotonic())
        if not ticket.going:
            self._advance()

    def why(self, ticket: Ticket) -> RateWait:
        if ticket.queued is not None:
            return RateWait(ticket.lane.limits[0].name, "concurrency")
        return self._limiter.why(ticket, self._clock.monotonic())

    async def wait(self, ticket: Ticket) -> None:
        """Wait until the call may go. Who is cancelled here must `leave` as well."""
        if ticket.queued is not None:
            await ticket.queued
            ticket.queued = None
            self._enter(ticket)
        if not ticket.going and not ticket.left:
            ticket.wake = asyncio.get_running_loop().create_future()
            await ticket.wake
        if ticket.left:
            if ticket.lane.flight is not None:
                ticket.lane.flight.leave(ticket)
            names = " and ".join(repr(limit.name) for limit in ticket.lane.limits)
            raise ProviderError(
                f"it has waited too long for the rate limit of {names}: give RateLimit(wait=…) more, or ask less",
                code="rate_limited",
            )

    async def call(self, provider: Provider, request: ModelRequest, ask: AskModel) -> ModelResponse:
        """Ask a model when there is room for it."""
        ticket = self.join(provider, request)
        try:
            await self.wait(ticket)
        except BaseException:  # nothing is handled here: nothing was asked, and the provider has refused nothing
            self.leave(ticket)
            raise
        try:
            response = await ask(provider, replace(request, report=functools.partial(self.learn, ticket)))
        except Exception as error:  # raised again: the ticket ends with it, whatever the provider raised
            self.failed(ticket, error, begun=True)
            raise
        else:
            self.answered(ticket, response.usage)
            return response
        finally:
            self.leave(ticket)

    def learn(self, ticket: Ticket, report: RateReport) -> None:
        """Take note of the figures that a provider tells when its answer begins."""
        if ticket.going and not ticket.left:
            own = ticket.lane.limits[0]
            own.learn(ticket, report, self._clock.monotonic())
            if report.accepted:
                own.accepted(ticket)
            self._advance()

    def answered(self, ticket: Ticket, usage: Usage | None) -> None:
        """The call has ended with an answer. What a cache answered does not count."""
        lane = ticket.lane
        first, flight = lane.limits[0], lane.flight
        if not first.restricted and len(lane.limits) == 1:
            ticket.left = True
            first.active.discard(ticket)
            if flight is not None:
                flight.leave(ticket)
            return
        first.accepted(ticket)
        counts = [getattr(usage, name, None) for name in ("input", "output", "cache_write")]
        known = [count for count in counts if type(count) is int and 0 <= count < MOST]  # providers may say anything
        self.leave(ticket, sum(known) if known else None)

    def failed(self, ticket: Ticket, error: BaseException, begun: bool) -> None:
        """The call has failed. One that the provider refused counts as a call without tokens."""
        if isinstance(error, ProviderError) and (
            error.code == "rate_limited" or (error.code == "overloaded" and error.after is not None)
        ):
            after = error.after if isinstance(error.after, int | float) and error.after == error.after else 0.0
            ticket.lane.limits[0].hold(after, self._clock.monotonic())
        self.leave(ticket, None if begun else 0)

    def leave(self, ticket: Ticket, spent: int | None = None) -> None:
        if ticket.queued is None:
            self._limiter.leave(ticket, spent)
        if ticket.lane.flight is not None:
            ticket.lane.flight.leave(ticket)
        if self._limiter.waiting:
            self._advance()
        elif self._timer is not None:
            self._timer.cancel()
            self._due = self._timer = None

    def _advance(self) -> None:
        """Wake the calls that may go, and set a timer for when time lets the next one go."""
        now = self._clock.monotonic()
        moved, due = self._limiter.advance(now)
        for ticket in moved:
            if ticket.wake is not None and not ticket.wake.done():
                ticket.wake.set_result(None)
        if due is not None and (self._due is None or due < self._due):
            if self._timer is not None:
                self._timer.cancel()
            self._due = due
            self._timer = self._spawn(self._advance_later(due - now), "perdure rate limits")

    async def _advance_later(self, seconds: float) -> None:
        await self._clock.sleep(max(seconds, SHORTEST))
        self._due = self._timer = None
        self._advance()

    def _lane(self, provider: Provider) -> Lane:
        name = str(provider.name)
        names = self._named.get(id(provider), name), f"{name.partition(':')[0]}:"
        return self._limiter.lanes.get(names) or self._limiter.lane(*names)


def _estimate(request: ModelRequest) -> int:
    """About how many tokens a request has: a token for every four bytes of JSON."""
    size = sum([len(_encode(each)) for each in (*request.messages, *request.tools)])
    return max(-(-size // TOKEN_BYTES), 1)


def checked(limits: Any) -> dict[str, RateLimit]:
    """`Runtime(rate_limits=…)`: limits by the names of models and providers."""
    if not isinstance(limits, Mapping):
        raise InvalidDefinition(
            f"rate_limits={quoted(limits)} is not usable: give a dict such as {{'anthropic:': RateLimit(requests=50)}}"
        )
    for name, rule in limits.items():
        if not isinstance(name, str) or not name.strip():
            raise InvalidDefinition(f"{quoted(name)} is no name of a model: write 'provider:model', or 'provider:'")
        if not isinstance(rule, RateLimit):
            raise InvalidDefinition(f"rate_limits[{name!r}]={quoted(rule)} is not usable: give RateLimit(…)")
    return dict(limits)
