"""What a model provider must offer: one method that streams an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from mainstay.model.llm import Delta, ModelRequest


class Provider(Protocol):
    """A model behind whatever API.

    `stream` yields text and reasoning as it arrives and exactly one ModelResponse last. It raises ProviderError, with
    `retryable` where another attempt may help; it never retries behind the engine's back. A stream that ends without a
    ModelResponse counts as broken off.
    """

    @property
    def name(self) -> str: ...

    def stream(self, request: ModelRequest) -> AsyncIterator[Delta]: ...
