"""Limits: what may be spent by whom in how long, what was, and what is reserved for calls in flight.

Money is counted in billionths of the host's currency, as integers: a cheap token costs less than a millionth.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from msgspec import Struct
from msgspec.structs import force_setattr

from perdure.errors import InvalidDefinition, quoted
from perdure.model.codec import clean_text
from perdure.model.message import Scalar
from perdure.model.spending import METADATA, money

NANO = 10**9
"""Units of an amount of money."""
FLOOR = 256
"""Tokens of an answer below which a model is not asked: an answer that is cut off so early is worth nothing."""
THINKING = 1_024
"""Tokens that a model which is to think takes for that, before it says anything."""
MOST = 2**53
MOST_COUNTED = 2**62
"""Units at which an account stops: a store keeps integers of 64 bits, and a provider may report anything."""

LimitKind: TypeAlias = Literal["money", "tokens", "turns"]
KINDS: tuple[LimitKind, ...] = ("money", "tokens", "turns")

SECONDS = {"minute": 60, "hour": 3_600, "day": 86_400, "week": 604_800}
WINDOWS = (*SECONDS, "month")
MONDAY = 4 * 86_400_000
"""The first Monday of the clock that counts from 1970, in ms."""


class Limit(Struct, frozen=True, gc=False, kw_only=True):
    """How much may be spent in a `window` of time, `per` session, agent, metadata key, or by all together.

    One of `money`, `tokens` and `turns` is given. `per` is "session" (with everything that it leads to), "agent",
    "metadata.<key>" or "all". A window is "minute", "hour", "day", "week" or "month" of the calendar (UTC), a number of
    seconds, or None: for ever. From the part `warn` of it on, turns are told that it is nearly spent.

        Runtime("agent.db", agents=[agent], limits=[Limit(money=5, per="metadata.user", window="day")])
    """

    money: Decimal | None = None
    tokens: int | None = None
    turns: int | None = None
    per: str = "session"
    window: str | float | None = None
    warn: float = 0.8

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            money: Decimal | float | str | None = None,
            tokens: int | None = None,
            turns: int | None = None,
            per: str = "session",
            window: str | float | None = None,
            warn: float = 0.8,
        ) -> None: ...

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise InvalidDefinition("a Limit bounds one thing: give one of money=, tokens= and turns=")
        self._check_amount(given[0])
        per: object = self.per
        known = per in ("session", "agent", "all")
        of_metadata = isinstance(per, str) and per.startswith(METADATA) and per != METADATA and clean_text(per) == per
        if not known and not of_metadata:
            raise InvalidDefinition(
                f"Limit(per={quoted(per):.80}) is not usable: give 'session', 'agent', 'metadata.<key>' or 'all'"
            )
        window: object = self.window
        seconds = type(window) in (int, float) and 1 <= float(str(window)) < MOST
        if window is not None and window not in WINDOWS and not seconds:
            raise InvalidDefinition(
                f"Limit(window={quoted(window):.80}) is not usable: give {', '.join(map(repr, WINDOWS))}, seconds from "
                "1 on, or None for ever"
            )
        if type(self.warn) not in (int, float) or not 0 < self.warn <= 1:
            raise InvalidDefinition(
                f"Limit(warn={quoted(self.warn):.80}) is not usable: give a part above 0, at most 1"
            )

    def _check_amount(self, kind: LimitKind) -> None:
        given: object = getattr(self, kind)
        if kind == "money":
            amount = money(given)
            if amount is None or units(amount) > MOST_COUNTED:
                raise InvalidDefinition(
                    f"Limit(money={quoted(given):.80}) is not usable: give an amount from 0 to {MOST_COUNTED // NANO:,}"
                )
            force_setattr(self, "money", amount)
        elif type(given) is not int or not 0 <= given < MOST:
            raise InvalidDefinition(f"Limit({kind}={quoted(given):.80}) is not usable: give a whole number, 0 or more")

    @property
    def kind(self) -> LimitKind:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def name(self) -> str:
        """What accounts are kept under: two limits that differ in their amounts alone count the same."""
        window = "ever" if self.window is None else self.window
        return f"{self.kind}/{self.per}/{window if isinstance(window, str) else f'{_plain(window)}s'}"

    @property
    def most(self) -> int:
        """The amount, in the units that are counted."""
        return (
            units(self.money) if self.money is not None else self.tokens if self.tokens is not None else self.turns or 0
        )

    def start(self, at: int) -> int:
        """When the window began that a time (ms) is in; 0 for a limit that holds for ever."""
        if self.window is None:
            return 0
        if self.window == "month":
            return _month_start(at)
        if self.window == "week":
            return at - (at - MONDAY) % (SECONDS["week"] * 1000)
        seconds = SECONDS[self.window] if isinstance(self.window, str) else self.window
        return at - at % round(seconds * 1000)


def parts_of(name: str) -> tuple[LimitKind, str, str | float | None]:
    """What a limit of that name bounds, for whom and in which window."""
    kind, _, rest = name.partition("/")
    per, _, window = rest.rpartition("/")
    if window == "ever" or window in WINDOWS:
        return cast(LimitKind, kind), per, None if window == "ever" else window
    return cast(LimitKind, kind), per, float(window.removesuffix("s"))


def _plain(seconds: float) -> str:
    """A number of seconds so that different ones are different text."""
    return str(int(seconds)) if seconds == int(seconds) else repr(seconds)


def units(amount: Decimal) -> int:
    """An amount of money in billionths, rounded up."""
    return int((amount * NANO).to_integral_value(ROUND_CEILING))


def shown(kind: LimitKind, amount: int) -> str:
    """An amount for a person."""
    return f"{Decimal(amount) / NANO:.4f}" if kind == "money" else f"{amount:,} {kind}"


def _month_start(at: int) -> int:
    """The first of the month, UTC; by the days of the proleptic calendar, because nothing here may ask a clock."""
    days = at // 86_400_000
    z = days + 719_468
    era = z // 146_097
    day_of_era = z - era * 146_097
    year_of_era = (day_of_era - day_of_era // 1_460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)  # from the 1st of March
    month = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * month + 2) // 5
    return (days - day) * 86_400_000


# ---------------------------------------------------------------------- what a write says


class Bound(Struct, frozen=True, gc=False):
    """A limit as a write names it: in the window that begins at `start`, `most` may be spent; from `near` on it is
    nearly spent."""

    name: str
    kind: LimitKind
    per: str
    start: int
    most: int
    near: int


class Ask(Struct, frozen=True, gc=False):
    """What a call may take: `input` tokens by our estimate, and `output` at most, or what is left of that, which is
    `least` or more. Prices are billionths for a million tokens; 0 where no limit on money holds."""

    input: int
    output: int
    input_price: int = 0
    output_price: int = 0
    least: int = FLOOR


class Settle(Struct, frozen=True, gc=False, omit_defaults=True):
    """How a call ended that something was reserved for: what it has taken, None where it is not known. `free`: it
    was not made, and all is given back."""

    tokens: int | None = None
    money: int | None = None
    free: bool = False


class Spending(Struct, frozen=True, gc=False):
    """What a write does to the accounts of its session: it settles the reservation `name`, and asks for another one.

    `name` is "" for the turn's own calls, else that of a direct completion. `op` names this spending, so that it is
    recognised when its write is sent again. `metadata` is that of the input, beside the session's.
    """

    name: str
    op: str
    bounds: tuple[Bound, ...] = ()
    ask: Ask | None = None
    settle: Settle | None = None
    metadata: dict[str, Scalar] = {}


class NearLimit(Struct, frozen=True, gc=False):
    """An account of which little is left."""

    name: str
    key: str
    start: int
    spent: int
    reserved: int
    most: int


class Granted(Struct, frozen=True, gc=False):
    """What became of an ask: `output` tokens may be answered with, 0 where the call may not be made.

    Then `short` is the account that has too little. `waits`: others have reserved some of it and may give it back.
    """

    op: str
    output: int = 0
    short: NearLimit | None = None
    waits: bool = False
    near: tuple[NearLimit, ...] = ()


# ---------------------------------------------------------------------- rows


class Account(Struct, frozen=True, gc=False):
    """What counts against a limit (`name`) for one session, agent or value (`key`, as JSON): in the window that begins
    at `start`, so much is `spent`, with `unknown` calls counted at what was reserved for them; so much is reserved for
    calls in flight. `most` is the limit of who wrote last."""

    name: str
    key: str
    start: int = 0
    spent: int = 0
    reserved: int = 0
    unknown: int = 0
    most: int = 0


class Hold(Struct, frozen=True, gc=False):
    """What is reserved in an account, in the window that began at `start`."""

    name: str
    key: str
    start: int
    amount: int


class Reservation(Struct, frozen=True, gc=False, omit_defaults=True):
    """What is reserved for one call of a session, by the owner of its turn (`turn` 0: a completion outside of turns).

    Without holds it says that turn `turn` was counted, and what the last spending was granted.
    """

    sid: int
    name: str
    owner: str
    generation: int
    turn: int
    granted: Granted
    holds: tuple[Hold, ...] = ()
