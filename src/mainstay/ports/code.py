"""What runs code that a model wrote."""

from __future__ import annotations

from typing import Any, Protocol

from mainstay.model.plugin import ExecRequest


class CodeExecutor(Protocol):
    """Raises CodeUnavailable where a session has none, and CodeRuntimeExited when what it ran in is gone."""

    async def execute(self, request: ExecRequest, context: Any) -> Any: ...
