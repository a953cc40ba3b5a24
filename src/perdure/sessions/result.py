"""What a turn led to, as its caller reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, Self, TypeVar, cast

import msgspec

from perdure.errors import NoAnswer, NotRevived, TurnFailed, TurnPending
from perdure.graph.view import TurnView, model_calls, turn_view
from perdure.model import validate
from perdure.model.codec import copied
from perdure.model.llm import ModelRecord, Usage
from perdure.model.message import Message
from perdure.model.outcome import Finished, Outcome, PendingCall, Queued, Waiting, answerable, kind_of
from perdure.model.plugin import Issue
from perdure.model.record import Record, slots
from perdure.model.tool import ToolRecord

MAX_SHOWN = 200
"""Characters of an outcome in the representation of its result."""

T = TypeVar("T")
A_co = TypeVar("A_co", covariant=True)

if TYPE_CHECKING:
    # Type checkers know it on every Python: what is written without an argument is of any type.
    from typing_extensions import TypeVar as DefaultTypeVar

    T_co = DefaultTypeVar("T_co", covariant=True, default=Any)
else:
    T_co = TypeVar("T_co", covariant=True)


class Answering(Protocol[A_co]):
    """An agent, as a reader of its answers sees it."""

    @property
    def name(self) -> str: ...

    def read_output(self, finished: Finished) -> A_co:
        """The output of a turn, of the agent's type. ValueError says why it is none."""
        ...


class TurnResult(Generic[T_co]):
    """How a turn ended, or that it waits. Details are read from its records when they are asked for.

    `text` and `output` raise NoAnswer unless the turn finished. Everything else can be read of every turn.
    `agent` is the name of the agent whose turn it was.
    """

    __slots__ = (
        "_history",
        "_late",
        "_past",
        "_revive",
        "_view",
        "agent",
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
        agent: str,
        outcome: Outcome,
        usage: Usage,
        records: Sequence[Record],
        history: list[Message],
        revive: Callable[[Finished], Any] | None = None,
        late: Sequence[Issue] = (),
    ) -> None:
        self.turn_id, self.session_id, self.agent, self.usage = turn_id, session_id, agent, usage
        # JSON in it is the reader's own; an answer in words has none.
        self.outcome = outcome if type(outcome) is Finished and outcome.value is None else copied(outcome)
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
        """Return the answer. Raises TurnFailed if the turn ended without one, TurnPending if it waits or is queued.

        Partial text of a turn that ended early is `outcome.text`, where `outcome` is an Incomplete.
        """
        return self._finished().text

    @property
    def output(self) -> T_co:
        """Return the typed output, or the text if the agent declares none.

        Raises NoAnswer as `text` does, and NotRevived if an agent of another type has answered, or this one before its
        type was changed.

        In a session that was opened by a name, and in a Runtime that lacks the agent, a typed output is the JSON value
        that it was made of.
        """
        finished = self._finished()
        if self._revive is None:
            return cast(T_co, finished.text if finished.value is None else finished.value)
        try:
            return cast(T_co, self._revive(finished))
        except ValueError as error:
            raise NotRevived(f"turn {self.turn_id}", f"the output of agent {self.agent!r}", str(error)) from None

    def read_by(self, agent: Answering[T]) -> TurnResult[T]:
        """The same with the output of an agent whose type the reader knows."""
        history, late = self._history[: self._past], self._late
        return TurnResult(
            self.turn_id, self.session_id, self.agent, self.outcome, self.usage, self.records, history,
            agent.read_output, late,
        )  # fmt: skip

    def raise_for_outcome(self) -> Self:
        """Raise what `text` raises unless the turn finished; returns itself, for chaining."""
        self._finished()
        return self

    def _finished(self) -> Finished:
        if isinstance(self.outcome, Finished):
            return self.outcome
        raise self._no_answer()

    def _no_answer(self) -> NoAnswer:
        kind = TurnPending if isinstance(self.outcome, Waiting | Queued) else TurnFailed
        return kind(self.turn_id, kind_of(self.outcome), msgspec.to_builtins(self.outcome))

    @property
    def failed(self) -> bool:
        """Whether the turn ended without an answer. One that waits, or is queued, has not ended."""
        return not isinstance(self.outcome, Finished | Waiting | Queued)

    @property
    def error(self) -> str | None:
        """Why it failed, in words; None unless it did. `outcome` has the parts."""
        return self._no_answer().summary if self.failed else None

    @property
    def pending(self) -> tuple[PendingCall, ...]:
        """The waits that a person or an outside key can answer: approvals, settlements, questions, completions. A
        queued turn has those of the turn before it. `outcome.calls` has all waits, also those for time, a model, a
        command, a subagent or a process."""
        return answerable(self.outcome.calls) if isinstance(self.outcome, Waiting | Queued) else ()

    @property
    def tool_calls(self) -> list[ToolRecord]:
        """Every tool call of the turn, in emission order."""
        return [copied(each) for each in self._read().tool_calls]

    @property
    def model_calls(self) -> list[ModelRecord]:
        """Every model call of the turn with its attempts, also those that failed, and direct completions beside it."""
        return model_calls(self.records)

    @property
    def new_messages(self) -> list[Message]:
        """The turn's own messages, from its input on."""
        return [copied(each) for each in self._read().messages]

    @property
    def messages(self) -> list[Message]:
        """The whole conversation up to and including this turn."""
        return [copied(each) for each in (*self._history[: self._past], *self._read().messages)]

    @property
    def issues(self) -> list[Issue]:
        """What went wrong beside the turn without ending it: faults of plugins, mostly."""
        return [*[issue for slot in slots(self.records) for issue in slot.issues], *self._late]

    @property
    def waiting(self) -> bool:
        return isinstance(self.outcome, Waiting)

    def __repr__(self) -> str:
        shown = repr(self.outcome)
        return f"TurnResult({self.turn_id!r}, {shown if len(shown) <= MAX_SHOWN else f'{shown[:MAX_SHOWN]}…'})"
