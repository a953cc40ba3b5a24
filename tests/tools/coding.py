"""Agents in code mode for tests: the cells that a model writes, one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from perdure import Agent, ModelRequest, ModelResponse, Usage
from perdure.model.code import CPython
from perdure.model.message import Message
from perdure.testing import FunctionModel

CODE = CPython() if os.environ.get("PERDURE_CODE") == "cpython" else None
"""What runs the cells of tests that do not say it."""


def cell(code: str) -> str:
    return f"```python\n{code}\n```"


def coder(*answers: str, seen: list[Sequence[Message]] | None = None, **options: Any) -> Agent[Any]:
    """An agent in code mode that gives these answers in order; an empty one is never given. `seen` is filled with the
    conversations that the model was shown."""
    given = iter(answers)

    def answer(request: ModelRequest) -> ModelResponse:
        if seen is not None:
            seen.append(request.messages)
        return ModelResponse(next(given), (), Usage(input=1, output=2))

    options.setdefault("code", CODE)
    return Agent(FunctionModel(answer), name="coder", mode="code", **options)


def outputs(messages: Sequence[Message]) -> list[str]:
    """What a model was told of its cells."""
    told = [message.text for message in messages if message.role == "user"]
    return [text for text in told if text.startswith(("Output of the cell:", "The cell printed"))]


Check = Callable[[], object]
