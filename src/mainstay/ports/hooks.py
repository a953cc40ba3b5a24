"""What plugins do to a running turn, as the engine sees it. A turn whose plugins do nothing has none of this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from mainstay.model.llm import ModelResponse
from mainstay.model.message import Message
from mainstay.model.record import Slot
from mainstay.model.tool import ToolSpec

StreamEnd: TypeAlias = Literal["complete", "attempt_reset", "aborted", "cancelled", "provider_error"]


class TextStream(Protocol):
    """The text of one model call on its way to whoever watches. `stopped`: a plugin has seen enough."""

    @property
    def stopped(self) -> bool: ...

    def feed(self, text: str) -> str:
        """A piece as it is shown."""
        ...

    def finish(self, response: ModelResponse | None) -> str:
        """What was held back until now; all of it, when the text came with the whole answer only."""
        ...

    def shown(self, response: ModelResponse | None) -> ModelResponse:
        """The answer with the text that was shown."""
        ...


class TurnHooks(Protocol):
    """Raises TurnAborted where a plugin ends the turn, or one that it cannot do without has failed."""

    def may_shrink(self) -> bool:
        """Whether a plugin could make the conversation before this turn shorter."""
        ...

    async def shrink(self) -> bool:
        """Make it shorter, because the model refuses it as too long; False when that cannot be done."""
        ...

    async def shape(
        self, step: int, tools: Sequence[ToolSpec], instructions: str, messages: list[Message]
    ) -> tuple[str, list[Message]]:
        """The instructions with what plugins add, and the messages as they want them shown."""
        ...

    def stream(self, step: int) -> TextStream | None:
        """How text is shown; None when nobody changes it."""
        ...

    async def respond(self, response: ModelResponse, step: int) -> ModelResponse: ...

    async def stream_finished(self, step: int, reason: StreamEnd) -> None: ...

    def slot(self, slot: Slot | None) -> Slot | None:
        """What the next record carries, with the state of plugins that has changed."""
        ...
