"""Where live events go."""

from __future__ import annotations

from typing import Any, Protocol

from mainstay.model.event import Event


class EventSink(Protocol):
    """Takes events of one turn. Must never wait and never raise: a reader's trouble is not the turn's."""

    def emit(self, kind: type[Event], /, **fields: Any) -> None: ...

    def text(self, step: int, text: str) -> None: ...
