"""A model that is told what to call, and people who look what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from perdure import Agent, ModelRequest, Runtime, ToolCall
from perdure.model.process import ProcessRow
from perdure.model.tool import ToolOutcome, ToolRecord
from perdure.testing import FunctionModel
from tests.kit import SOON

Answer: TypeAlias = "str | list[ToolCall] | Callable[[list[Any]], str | list[ToolCall]]"


class Talk:
    """Answers in order, each as it is or made from the results of the calls before. News are only heard."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.requests: list[ModelRequest] = []
        self.news: list[str] = []

    def __call__(self, request: ModelRequest) -> str | list[ToolCall]:
        last = request.messages[-1]
        if last.role == "user" and last.text.startswith("[process"):
            self.news.append(last.text)
            return "heard"
        self.requests.append(request)
        answer = self._answers.pop(0) if self._answers else "done"
        return answer if isinstance(answer, str | list) else answer(results_of(request))


def results_of(request: ModelRequest) -> list[Any]:
    """What the newest calls came to, in order."""
    found: list[Any] = []
    for message in reversed(request.messages):
        if message.role != "tool":
            break
        found.insert(0, message.tool_results[0].content)
    return found


def call(name: str, /, **args: Any) -> ToolCall:
    return ToolCall(name=name, args=args)


def handle(process_id: str) -> dict[str, str]:
    """The JSON of a handle, written by hand."""
    return {"__handle__": "process", "id": process_id}


def agent_of(talk: Talk, *tools: Any, **options: Any) -> Agent[Any]:
    return Agent(FunctionModel(talk), tools=tools, **options)


async def said(runtime: Runtime, text: str = "go", session: str = "chat") -> list[ToolRecord]:
    """Say something, and see the calls that it led to."""
    result = await asyncio.wait_for((await runtime.session(session)).run(text), SOON)
    return list(result.tool_calls)


async def outcomes(runtime: Runtime, text: str = "go", session: str = "chat") -> list[ToolOutcome]:
    return [record.outcome for record in await said(runtime, text, session)]


async def row_of(runtime: Runtime, process_id: str) -> ProcessRow:
    return await runtime.processes.get(process_id)


async def event_types(runtime: Runtime, process_id: str) -> list[str]:
    return [event.type async for event in runtime.processes.events(process_id)]


async def ended(runtime: Runtime, *process_ids: str) -> list[str]:
    """Wait until they have ended; how."""
    for process_id in process_ids:
        await asyncio.wait_for(runtime.handle(process_id).outcome(), SOON)
    return [(await row_of(runtime, each)).status for each in process_ids]


def ids(rows: Sequence[ProcessRow]) -> list[str]:
    return [row.id for row in rows]
