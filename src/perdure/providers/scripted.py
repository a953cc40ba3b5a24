"""Models without a network: answers from a list, from a function, or an echo of what was said."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from perdure.errors import InvalidDefinition, ProviderError, ScriptExhausted, quoted
from perdure.model import validate
from perdure.model.llm import Delta, ModelRequest, ModelResponse
from perdure.model.message import Reasoning, ToolCall

Answer = Any
"""What a fake model may answer: a string, tool calls, a ModelResponse, or an exception to raise."""


class FunctionModel:
    """A model that is a function of the request.

    `fn(request)` returns a string, a list of ToolCall, or a ModelResponse; it may be async, or an async generator of
    strings and ToolCalls. What it raises is what the provider raised.
    """

    reports_cost = True

    def __init__(self, fn: Callable[[ModelRequest], Any], name: str = "function") -> None:
        if not callable(fn):
            raise InvalidDefinition(f"{quoted(fn)} cannot be called: a FunctionModel answers with a function")
        self._fn, self.name = fn, validate.name(name, "name", InvalidDefinition)
        self._streams = inspect.isasyncgenfunction(fn)
        self.requests = 0

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        self.requests += 1
        answer = self._fn(request)
        if self._streams or inspect.isasyncgen(answer):
            async for delta in _streamed(answer):
                yield delta
            return
        if inspect.isawaitable(answer):
            answer = await answer
        response = as_response(answer)
        if response.text:
            yield response.text
        yield response


class ScriptedModel:
    """A model that answers from a list, in order. Running dry is an error, and so are answers left over."""

    reports_cost = True

    def __init__(self, answers: Iterable[Answer], name: str = "scripted") -> None:
        self.name = validate.name(name, "name", InvalidDefinition)
        self._answers = list(validate.several(answers, "answers", InvalidDefinition))
        self._asked = 0
        self.requests: list[ModelRequest] = []

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        self.requests.append(request)
        if self._asked >= len(self._answers):
            raise ScriptExhausted(
                f"the script has {len(self._answers)} answers and was asked for number {self._asked + 1}: add one"
            )
        answer = self._answers[self._asked]
        self._asked += 1
        if isinstance(answer, BaseException):
            raise answer
        response = as_response(answer)
        if response.text:
            yield response.text
        yield response

    @property
    def remaining(self) -> int:
        return len(self._answers) - self._asked

    def check_done(self) -> None:
        """Raise ScriptExhausted if some answers were never asked for."""
        if self.remaining:
            raise ScriptExhausted(f"{self.remaining} of {len(self._answers)} scripted answers were never asked for")

    def __enter__(self) -> ScriptedModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.check_done()


class EchoModel:
    """Behind `model="scripted"`: needs no key and no network, and repeats what was said."""

    name = "scripted"

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        said = next((m.text for m in reversed(request.messages) if m.role == "user"), "")
        text = f"You said: {said}"
        first, *others = text.split(" ")
        yield first
        for word in others:
            yield f" {word}"
        yield ModelResponse(text, model="scripted")


def as_response(answer: Answer) -> ModelResponse:
    """A fake model's answer in whatever form, as a response."""
    if isinstance(answer, ModelResponse):
        return answer
    if isinstance(answer, str):
        return ModelResponse(answer)
    if isinstance(answer, ToolCall):
        return ModelResponse(tool_calls=(answer,), stop="tool_calls")
    if isinstance(answer, Sequence) and all(isinstance(c, ToolCall) for c in answer):
        return ModelResponse(tool_calls=tuple(answer), stop="tool_calls")
    raise ProviderError(
        f"a fake model answered with a {type(answer).__name__}: use a string, a list of ToolCall or a ModelResponse",
        code="provider_nonsense",
    )


async def _streamed(answer: AsyncIterator[Any]) -> AsyncIterator[Delta]:
    """Pieces as they come, then the whole of them. A generator that ends early by an error is a broken stream."""
    text: list[str] = []
    calls: list[ToolCall] = []
    reasoning: list[Reasoning] = []
    async for piece in answer:
        if type(piece) is str:
            text.append(piece)
            yield piece
        elif isinstance(piece, ToolCall):
            calls.append(piece)
        elif isinstance(piece, Reasoning):
            reasoning.append(piece)
            yield piece
        elif isinstance(piece, ModelResponse):
            yield piece
            return
        else:
            raise ProviderError(f"a fake model streamed a {type(piece).__name__}", code="provider_nonsense")
    yield ModelResponse("".join(text), tuple(calls), stop="tool_calls" if calls else "end", reasoning=tuple(reasoning))
