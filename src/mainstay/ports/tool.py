"""What a set of tools must offer. A decorated function is the usual one; a provider is a whole set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from mainstay.model.tool import PreparedCall, ToolOutcome, ToolSpec


class CallContext(Protocol):
    """What preparation and execution may know of their call; `mainstay.ToolContext` is the whole of it."""

    @property
    def session_id(self) -> str: ...
    @property
    def turn_id(self) -> str: ...
    @property
    def call_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def idempotency_key(self) -> str: ...
    @property
    def deps(self) -> Any: ...


@runtime_checkable
class ToolProvider(Protocol):
    """A set of tools whose members may change between turns.

    `prepare` sees checked arguments and may rewrite them, attach a payload that `execute` gets back, or end the call at
    once with an outcome. It must not have effects: preparation may run again after a crash. `execute` does the work and
    returns any JSON value, or raises ToolError or Retry.
    """

    def specs(self) -> Sequence[ToolSpec]: ...

    async def prepare(self, call: PreparedCall, ctx: CallContext) -> PreparedCall | ToolOutcome: ...

    async def execute(self, call: PreparedCall, ctx: CallContext) -> Any: ...
