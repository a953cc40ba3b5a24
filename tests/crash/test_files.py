"""Files and several models, killed at every point: a file is put before anything refers to it, and the list of models
goes on where it was."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Agent, Image, ModelRequest, ToolCall, tool
from perdure.errors import ProviderError
from perdure.providers.fallback import Fallback
from perdure.testing import FunctionModel


def busy(request: ModelRequest) -> str:
    raise ProviderError("busy", retryable=True, code="overloaded")


def model(request: ModelRequest) -> str | list[ToolCall]:
    return "done" if request.messages[-1].role == "tool" else [ToolCall("c", "show")]


@tool(recovery="rerun")
def show() -> Image:
    """Show it."""
    return Image.file(__file__, "image/png")


async def scenario(lab: Any) -> None:
    """Any bytes will do for a picture here: those of this file."""
    agent = Agent(Fallback(FunctionModel(busy), FunctionModel(model)), tools=[show])
    async with lab.runtime(agents=[agent]) as runtime:
        session = await runtime.session("s")
        assert (await session.run(["see", Image.file(__file__, "image/png")], key="1")).text == "done"


@pytest.mark.kill
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.gate)], ids=["in process", "by SIGKILL"])
def test_a_picture_is_said_and_shown_wherever_its_host_is_killed(crash_kit: Any, real: bool) -> None:
    figures = crash_kit(scenario, real=real)

    # Said again under its key after the kill: nothing is lost. The tool may run again, a busy model may be asked again.
    assert (figures.lost, figures.unknown) == (0, 0)
