"""What a turn led to, as its caller reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

import msgspec

from mainstay.errors import TurnFailed
from mainstay.graph.view import TurnView, model_calls, turn_view
from mainstay.model import validate
from mainstay.model.llm import ModelRecord, Usage
from mainstay.model.message import Message
from mainstay.model.outcome import Finished, Outcome, Waiting, kind_of
from mainstay.model.own import own
from mainstay.model.plugin import Issue
from mainstay.model.record import Record, slots
from mainstay.model.tool import ToolRecord

T = TypeVar("T")


class TurnResult(Generic[T]):
    """How a turn ended, or that it waits. Details are read from its records when they are asked for."""

    __slots__ = (
        "_history",
        "_late",
        "_past",
        "_revive",
        "_view",
        "outcome",
        "records",
        "session_id",
        "turn_id",
        "usage",
    )

    def __init__(  # noqa: PLR0913  # made in three places, read everywhere
        self,
        turn_id: str,
        session_id: str,
        outcome: Outcome,
        usage: Usage,
        records: Sequence[Record],
        history: list[Message],
        revive: Callable[[Any], Any] | None = None,
        late: Sequence[Issue] = (),
    ) -> None:
        self.turn_id, self.session_id, self.usage = turn_id, session_id, usage
        # JSON in it is the reader's own; an answer in words has none.
        self.outcome = outcome if type(outcome) is Finished and outcome.value is None else own(outcome)
        self.records, self._history, self._past, self._revive = records, history, len(history), revive
        self._view: TurnView | None = None
        self._late = late

    if not TYPE_CHECKING:  # to a checker it has the attributes that it has

        def __getattr__(self, word: str) -> NoReturn:
            validate.unknown_attribute(self, word, validate.RESULT_ATTRIBUTES)

    def _read(self) -> TurnView:
        if self._view is None:
            self._view = turn_view(self.turn_id, self.records)
        return self._view

    @property
    def text(self) -> str:
        """The answer; for a turn that did not finish, what there is of one."""
        return getattr(self.outcome, "text", "")

    @property
    def output(self) -> T:
        """The typed output, or the text when the agent declares none. Raises TurnFailed unless finished.

        In a Runtime that lacks the agent, a typed output is the JSON value that it was made of.
        """
        self.raise_for_outcome()
        assert isinstance(self.outcome, Finished)
        if self._revive is not None:
            return cast(T, self._revive(self.outcome.value))
        return cast(T, self.outcome.text if self.outcome.value is None else self.outcome.value)

    def raise_for_outcome(self) -> TurnResult[T]:
        """Raise TurnFailed unless the turn finished; returns itself, for chaining."""
        if not isinstance(self.outcome, Finished):
            raise TurnFailed(self.turn_id, kind_of(self.outcome), msgspec.to_builtins(self.outcome))
        return self

    @property
    def tool_calls(self) -> list[ToolRecord]:
        """Every tool call of the turn, in emission order."""
        return [own(each) for each in self._read().tool_calls]

    @property
    def model_calls(self) -> list[ModelRecord]:
        """Every model call of the turn with its attempts, also those that failed, and direct completions beside it."""
        return model_calls(self.records)

    @property
    def new_messages(self) -> list[Message]:
        """The turn's own messages, from its input on."""
        return [own(each) for each in self._read().messages]

    @property
    def messages(self) -> list[Message]:
        """The whole conversation up to and including this turn."""
        return [own(each) for each in (*self._history[: self._past], *self._read().messages)]

    @property
    def issues(self) -> list[Issue]:
        """What went wrong beside the turn without ending it: faults of plugins, mostly."""
        return [*[issue for slot in slots(self.records) for issue in slot.issues], *self._late]

    @property
    def waiting(self) -> bool:
        return isinstance(self.outcome, Waiting)

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}…"
        return f"TurnResult({self.turn_id!r}, {kind_of(self.outcome)}, text={text!r})"
