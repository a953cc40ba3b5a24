"""What went wrong is told to the model in words that fit, however many there are."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Agent, ModelRequest, ToolCall, ToolError, tool
from perdure.model.message import ToolResult
from perdure.model.tool import Failed
from perdure.testing import FunctionModel
from tests.kit import Place


@tool
def told() -> None:
    raise ToolError("[" + "x" * 1_000_000 + "]")


@tool
def raised() -> None:
    raise ValueError("[" + "x" * 1_000_000 + "]")


@pytest.mark.parametrize("name", ["told", "raised"])
async def test_a_failure_of_a_megabyte_is_kept_whole_and_told_with_head_and_tail(place: Place, name: str) -> None:
    seen: list[Any] = []

    def model(request: ModelRequest) -> Any:
        seen.extend(part for part in request.messages[-1].parts if isinstance(part, ToolResult))
        return "done" if seen else [ToolCall("a", name)]

    async with place.runtime(Agent(FunctionModel(model), tools=[told, raised])) as runtime:
        result = await (await runtime.session("s")).run("go")

    message = seen[0].content["message"]
    assert len(message) < 5_000
    assert "[xxx" in message
    assert message.endswith("xxx]")
    assert "characters dropped" in message
    outcome = result.tool_calls[0].outcome
    assert isinstance(outcome, Failed)
    assert len(outcome.message) > 1_000_000
