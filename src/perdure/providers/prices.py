"""What models cost: a table of the host's own, or the one that comes with the package genai-prices.

That package is imported when its table is asked for, and only what it was installed with is read: nothing here lets it
look for newer prices.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from perdure.errors import InvalidDefinition, MissingExtra, ProviderError, quoted
from perdure.model.codec import error_text
from perdure.model.llm import Usage
from perdure.model.spending import MILLION, Price, money
from perdure.ports.provider import Prices

log = logging.getLogger("perdure.providers")

BUNDLED = "genai-prices"

VENDORS = {"openai-chat": "openai", "vertex": "google", "bedrock": "aws", "xai": "x-ai"}
"""What that package calls a provider that we call otherwise."""


class PriceList:
    """Prices by the names of models, as agents name them: "provider:model"."""

    def __init__(self, prices: Mapping[str, Price]) -> None:
        self._prices = dict(prices)

    def price(self, model: str) -> Price | None:
        return self._prices.get(model)

    def cost(self, model: str, usage: Usage) -> Decimal | None:
        price = self._prices.get(model)
        return None if price is None else price.of(usage)


class BundledPrices:
    """The table of genai-prices, as it was installed. What a model costs may depend on how much it is asked."""

    def __init__(self) -> None:
        try:
            package = importlib.import_module("genai_prices")  # an extra, and slow to import
        except ImportError:
            raise MissingExtra("its table of prices", "prices") from None
        self._counted, self._calculate = package.Usage, package.calc_price
        self._known: dict[str, Price | None] = {}

    def price(self, model: str) -> Price | None:
        """What a million tokens cost where a call has that many: the highest, where small calls cost less."""
        if model not in self._known:
            count = int(MILLION)
            read = self.cost(model, Usage(input=count, output=0))
            both = self.cost(model, Usage(input=count, output=count))
            written = self.cost(model, Usage(input=0, output=0, cache_write=count))
            known = None if read is None or both is None else Price(read, both - read, None, written)
            self._known[model] = known
        return self._known[model]

    def cost(self, model: str, usage: Usage) -> Decimal | None:
        if usage.input is None or usage.output is None:
            return None
        vendor, _, name = model.partition(":")
        read, written = usage.cache_read or 0, usage.cache_write or 0
        counted: Any = self._counted(
            input_tokens=usage.input + read + written,
            cache_read_tokens=read,
            cache_write_tokens=written,
            output_tokens=usage.output,
        )
        try:
            found = self._calculate(counted, name, provider_id=VENDORS.get(vendor, vendor))
        except LookupError:
            return None
        total: Decimal = found.total_price
        return total


class PriceFunction:
    """Prices of a function of the host: of a model's name, a Price or None."""

    def __init__(self, function: Callable[[str], Price | None]) -> None:
        self._function = function

    def price(self, model: str) -> Price | None:
        return self._function(model)

    def cost(self, model: str, usage: Usage) -> Decimal | None:
        price = self.price(model)
        return None if price is None else price.of(usage)


class CheckedPrices:
    """A table that is not ours, which may raise and give anything. A price that is none is told before a call; an
    answer is kept without a cost where the table has none for it."""

    def __init__(self, table: Prices) -> None:
        self._table = table

    def price(self, model: str) -> Price | None:
        try:
            found: object = self._table.price(model)
        except Exception as error:  # code of the host, which may raise anything: told before the call, with its model
            raise _no_price(model, f"raised {type(error).__name__}: {error_text(error)}") from error
        if found is not None and not isinstance(found, Price):
            raise _no_price(model, f"gave {quoted(found):.80}")
        return found

    def cost(self, model: str, usage: Usage) -> Decimal | None:
        try:
            found: object = self._table.cost(model, usage)
        except Exception:  # the same; an answer that was paid for is kept, without a cost
            log.warning("prices raised when they were asked what a call of %s has cost", model, exc_info=True)
            return None
        amount = money(found)
        if amount is None and found is not None:
            log.warning("prices gave %.80s as what a call of %s has cost: that is no amount", quoted(found), model)
        return amount


def _no_price(model: str, why: str) -> ProviderError:
    return ProviderError(f"prices {why} for {model!r}: give Price(…), or None", code="price_missing")


def checked(prices: Any) -> Prices:
    """`Runtime(prices=…)`."""
    if prices == BUNDLED:
        return CheckedPrices(BundledPrices())
    if isinstance(prices, Mapping):
        for name, price in prices.items():
            if not isinstance(name, str) or not name.strip() or not isinstance(price, Price):
                raise InvalidDefinition(
                    f"prices[{quoted(name):.80}]={quoted(price):.80} is not usable: give Price(input=…, output=…) by "
                    "the name of a model, such as 'anthropic:claude-…'"
                )
        return PriceList(prices)
    if callable(prices):
        return CheckedPrices(PriceFunction(prices))
    if callable(getattr(prices, "price", None)) and callable(getattr(prices, "cost", None)):
        return CheckedPrices(prices)
    raise InvalidDefinition(
        f"prices={quoted(prices):.80} is not usable: give a dict of Price(…) by the names of models, a function of "
        f"such a name, or {BUNDLED!r}"
    )
