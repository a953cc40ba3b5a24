"""What a model provider must offer: one method that streams an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from decimal import Decimal
from typing import Protocol, runtime_checkable

from perdure.errors import ProviderError
from perdure.model.llm import Delta, ModelRequest, Usage
from perdure.model.spending import Price


class Provider(Protocol):
    """A model behind whatever API.

    `stream` yields text and reasoning as it arrives and exactly one ModelResponse last. It raises ProviderError, with
    `retryable` where another attempt may help; it never retries behind the engine's back. A stream that ends without a
    ModelResponse counts as broken off.
    """

    @property
    def name(self) -> str: ...

    def stream(self, request: ModelRequest) -> AsyncIterator[Delta]: ...


def is_provider(model: object) -> bool:
    """Whether an object has what every provider has."""
    return callable(getattr(model, "stream", None)) and isinstance(getattr(model, "name", None), str)


def candidates(provider: Provider) -> tuple[Provider, ...]:
    """The models that may answer in its place: itself, unless it is a list of them (`providers.fallback`)."""
    found: tuple[Provider, ...] = getattr(provider, "candidates", (provider,))
    return found


def reports_cost(model: Provider) -> bool:
    """Whether a provider says of itself, by an attribute `reports_cost`, that its answers tell what they have cost: a
    budget of money then needs no price of it."""
    return getattr(model, "reports_cost", False) is True


class Prices(Protocol):
    """What models cost, by their names ("provider:model"). None: it is not known, which is not free."""

    def price(self, model: str) -> Price | None:
        """What a million tokens cost at most: what is reserved for a call is estimated by it."""
        ...

    def cost(self, model: str, usage: Usage) -> Decimal | None:
        """What a call has cost."""
        ...


@runtime_checkable
class Counting(Protocol):
    """A provider that can tell how many tokens a request has before it is asked. Optional."""

    async def count_tokens(self, request: ModelRequest) -> int: ...


def no_token_count(name: str) -> ProviderError:
    """What is raised for a model whose API does not count."""
    return ProviderError(
        f"{name} cannot count the tokens of a request before it is asked: go by `result.usage` of earlier turns, "
        "or by the length of the text",
        code="no_token_count",
    )


@runtime_checkable
class Connecting(Protocol):
    """A provider with connections to keep. A Runtime that has it enters `connected` and leaves it last of all.

    One object may be in several Runtimes, also of several event loops: it counts them.
    """

    def connected(self) -> AbstractAsyncContextManager[None]: ...
