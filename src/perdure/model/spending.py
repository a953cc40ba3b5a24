"""What was spent: prices, and the rows that sums are read from without reading any history."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from perdure.errors import InvalidDefinition, quoted
from perdure.model.llm import Usage
from perdure.model.message import Scalar

HOUR = 3_600_000
"""Milliseconds. What was spent is kept by the hour, so that a day of any time zone can be added up."""

MILLION = Decimal(1_000_000)

METADATA = "metadata."
"""What a key of metadata is named with, where sums and limits go by it."""


class Price(Struct, frozen=True, gc=False):
    """What a million tokens of a model cost, in the currency of the host's bill.

    What a cache answers and what is put into one cost as much as other input where nothing is said of them.

        Price(input=3, output=15, cache_read="0.30", cache_write="3.75")
    """

    input: Decimal
    output: Decimal
    cache_read: Decimal | None = None
    cache_write: Decimal | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            input: Decimal | float | str,
            output: Decimal | float | str,
            cache_read: Decimal | float | str | None = None,
            cache_write: Decimal | float | str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            given: object = getattr(self, name)
            if given is None and name.startswith("cache"):
                continue
            amount = money(given)
            if amount is None:
                raise InvalidDefinition(
                    f"Price({name}={quoted(given)}) is not usable: give 0 or more per million tokens"
                )
            force_setattr(self, name, amount)

    def of(self, usage: Usage) -> Decimal | None:
        """What a call has cost; None where it is not known how many tokens it had."""
        if usage.input is None or usage.output is None:
            return None
        read = self.input if self.cache_read is None else self.cache_read
        write = self.input if self.cache_write is None else self.cache_write
        cost = usage.input * self.input + usage.output * self.output
        return (cost + (usage.cache_read or 0) * read + (usage.cache_write or 0) * write) / MILLION


def money(given: object) -> Decimal | None:
    """An amount of money, 0 or more; None where it is none. 0.1 is a tenth, not the binary fraction next to it."""
    if isinstance(given, bool) or not isinstance(given, int | float | str | Decimal):
        return None
    try:
        amount = Decimal(str(given))
    except InvalidOperation:
        return None
    return amount if amount.is_finite() and 0 <= amount < 2**53 else None


# ---------------------------------------------------------------------- rows


class UsageRow(Struct, frozen=True, gc=False):
    """What a session has spent in an hour (`hour` is when it begins, in ms) on one model for one purpose, for whom.

    `label` is "turns", or that of direct completions. `metadata` is whom it was for, as text that is equal for equal
    metadata (`metadata_text`); `family` are the sessions above it, the oldest first. A row stays when its session is
    deleted: sums of the past do not shrink. In a write it is what is to be added to the row of the same key.
    """

    sid: int
    hour: int
    label: str
    model: str
    metadata: str
    session_id: str
    agent: str
    family: tuple[str, ...]
    usage: Usage


class UsageFilter(Struct, frozen=True, gc=False, kw_only=True):
    """Hours from `since` up to, and not with, `until` (ms); all sessions, or one with those below it."""

    since: int | None = None
    until: int | None = None
    session_id: str | None = None
    agent: str | None = None

    def fits(self, row: UsageRow) -> bool:
        return (
            (self.since is None or row.hour >= self.since)
            and (self.until is None or row.hour < self.until)
            and (self.agent is None or row.agent == self.agent)
            and (self.session_id is None or self.session_id == row.session_id or self.session_id in row.family)
        )


def hour_of(at: int) -> int:
    return at - at % HOUR


_encode = msgspec.json.Encoder(order="deterministic").encode


def metadata_text(metadata: Mapping[str, Scalar]) -> str:
    """Metadata as rows are told apart by it."""
    return _encode(dict(metadata)).decode() if metadata else "{}"
