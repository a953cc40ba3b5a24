"""Rolling history: a long conversation is stored whole and shown to the model in part.

What is shown is a function of what is stored, so nothing is remembered between calls and nothing is lost in a crash.
A prompt that is too large is made smaller in three steps, each taken only when the one before was not enough:

    1. old tool results are cut to their ends
    2. whole user turns are left out, oldest first; a first message says how many
    3. results of the newest turns are cut too, except those that the model has not answered yet
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from perdure.errors import InvalidDefinition
from perdure.model.message import Message, Part, ToolCall, ToolResult
from perdure.model.tool import OutputBudget
from perdure.model.transcript import shown_outcome
from perdure.plugins.hooks import Plugin, ToolEndContext, ViewContext
from perdure.tools.output import project

Estimate: TypeAlias = Callable[[Message], int]
"""How many tokens a message takes in a prompt."""

TOKEN_BYTES = 4

_encode = msgspec.json.Encoder().encode


def estimate_tokens(message: Message) -> int:
    """A token for every four bytes of JSON: near the truth for English and for code, and too many for other scripts."""
    return -(-len(_encode(message)) // TOKEN_BYTES)


class RollingHistory(Plugin):
    """Shows the model the newest part of a conversation once the whole takes too much of its context.

    The prompt is pruned when it is estimated above `share` of `context_tokens`; the `keep_turns` newest user turns, the
    running one among them, are always shown, and so are system messages and what stands before the first user turn (the
    summary that a compaction left). An old tool result is shown with `result_tokens` at most.

        Agent(model, plugins=[RollingHistory(context_tokens=200_000)])
    """

    id = "rolling_history"
    priority = -100  # after all other views: what they add counts

    def __init__(
        self,
        context_tokens: int = 128_000,
        *,
        share: float = 0.6,
        keep_turns: int = 2,
        result_tokens: int = 1_000,
        estimate: Estimate = estimate_tokens,
    ) -> None:
        if not 0 < share <= 1:
            raise InvalidDefinition(
                f"share={share!r} is not usable: give the part of the context to fill, above 0 to 1"
            )
        self._limit = int(whole_number("context_tokens", context_tokens) * share)
        self._keep = whole_number("keep_turns", keep_turns)
        self._results = result_budget(result_tokens)
        self._estimate = estimate
        # Leaving out a little more than needed leaves the cut where it is for a while, and with it the beginning of the
        # prompt, which a provider may have in its cache.
        self._stride = max(self._limit // 4, 1)

    def transform_view(self, ctx: ViewContext, messages: Sequence[Message]) -> Sequence[Message]:
        sizes = [self._estimate(message) for message in messages]
        if sum(sizes) <= self._limit:
            return messages
        # An input may have been steered into the running turn: it is one turn still, and stays whole.
        starts = [at for at in user_turns(messages) if at <= ctx.history]
        recent = starts[-self._keep :][0] if starts else 0
        shown, sizes = self._cut_results(messages, sizes, recent)
        if len(starts) > self._keep and sum(sizes) > self._limit:
            shown, sizes = self._without_old_turns(shown, sizes, starts[: 1 - self._keep or None])
        if sum(sizes) > self._limit:
            answered = max([at for at, message in enumerate(shown) if message.role == "assistant"], default=0)
            shown, _ = self._cut_results(shown, sizes, answered)
        return shown

    def _cut_results(self, messages: Sequence[Message], sizes: list[int], end: int) -> tuple[list[Message], list[int]]:
        """Cut the tool results that stand before `end`."""
        shown = shrunk(messages[:end], self._results)
        cut = [sizes[at] if new is messages[at] else self._estimate(new) for at, new in enumerate(shown)]
        return [*shown, *messages[end:]], [*cut, *sizes[end:]]

    def _without_old_turns(
        self, shown: list[Message], sizes: list[int], starts: list[int]
    ) -> tuple[list[Message], list[int]]:
        """Leave out as many turns as it takes. `starts` are those of turns that may go, and of the first to stay."""
        excess = sum(sizes) - self._limit
        enough = -(-excess // self._stride) * self._stride
        gone: set[int] = set()
        count = freed = 0
        for start, end in pairwise(starts):
            going = [at for at in range(start, end) if shown[at].role != "system"]
            gone.update(going)
            freed += sum([sizes[at] for at in going])
            count += 1
            if freed >= enough + self._estimate(_left_out(count)):
                break
        kept = [at for at in range(len(shown)) if at not in gone]
        first = _left_out(count)
        return [first, *[shown[at] for at in kept]], [self._estimate(first), *[sizes[at] for at in kept]]


def _left_out(turns: int) -> Message:
    return Message("system", f"[{turns} earlier {'turn is' if turns == 1 else 'turns are'} not shown]")


def user_turns(messages: Sequence[Message]) -> list[int]:
    """Where a history may be cut: at user messages, and never between a tool call and its result."""
    starts: list[int] = []
    asked: dict[str, int] = {}
    for at, message in enumerate(messages):
        if message.role == "user":
            starts.append(at)
        for part in message.parts:
            if type(part) is ToolCall:
                asked[part.id] = at
            elif type(part) is ToolResult and part.call_id in asked:
                called = asked.pop(part.call_id)
                while starts and starts[-1] > called:
                    starts.pop()
    return starts


def shrunk(messages: Iterable[Message], budget: OutputBudget) -> list[Message]:
    """The messages with every tool result within the budget; a message that is within it is the same object."""
    return [_shrunk(message, budget) if message.role == "tool" else message for message in messages]


def _shrunk(message: Message, budget: OutputBudget) -> Message:
    parts = [_within(part, budget) for part in message.parts]
    same = all(new is old for new, old in zip(parts, message.parts, strict=True))
    return message if same else Message(message.role, parts)


def _within(part: Part, budget: OutputBudget) -> Part:
    if type(part) is not ToolResult:
        return part
    shown = project(part.content, budget)
    return replace(part, content=shown.value) if shown.truncated else part


def result_budget(tokens: int) -> OutputBudget:
    """So many tokens of a tool result, by the usual estimate."""
    return OutputBudget(bytes=whole_number("result_tokens", tokens) * TOKEN_BYTES, lines=None)


def whole_number(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidDefinition(f"{name}={value!r} is not usable: give a whole number above 0")
    return value


# ---------------------------------------------------------------------- output of tools


class OutputLimit(Plugin):
    """Shows the model at most so many bytes and lines, or estimated tokens, of each tool's output; the whole is kept.

    Without numbers it is the usual budget, with some only those count. A tool that declares a budget of its own keeps
    it. The slot is exclusive: a second plugin that projects results is refused.

        Agent(model, tools=[…], plugins=[OutputLimit(tokens=2_000)])
    """

    id = "output_budget"

    def __init__(self, *, bytes: int | None = None, lines: int | None = None, tokens: int | None = None) -> None:
        if bytes is not None and tokens is not None:
            raise InvalidDefinition(
                f"an output budget of bytes={bytes!r} and tokens={tokens!r} is two: give one of them"
            )
        if tokens is not None:
            bytes = whole_number("tokens", tokens) * TOKEN_BYTES
        self._usual = OutputBudget() if bytes is None and lines is None else OutputBudget(bytes=bytes, lines=lines)

    def project_result(self, ctx: ToolEndContext) -> Any:
        # The message of a failure may be long as well: it is often a program's output.
        return project(shown_outcome(ctx.outcome), ctx.tool.output_budget or self._usual).value
