"""A call that takes its worker's life again and again does not take every worker's."""

from __future__ import annotations

import asyncio

import pytest

from perdure import Agent, ToolCall, tool
from perdure.errors import TurnFailed
from perdure.testing import FunctionModel
from tests.kit import SOON, Place, crash, until


class Bench:
    """Where the poisonous call is tasted, and counted."""

    def __init__(self) -> None:
        self.tasted, self.inside = 0, False
        self.safe = asyncio.Event()

    def agent(self) -> Agent[str]:
        @tool(recovery="rerun")
        async def taste() -> str:
            """Taste it."""
            self.tasted, self.inside = self.tasted + 1, True
            await self.safe.wait()
            return "sweet"

        return Agent(
            FunctionModel(
                lambda request: "Sweet." if request.messages[-1].role == "tool" else [ToolCall("c", "taste")]
            ),
            name="taster",
            tools=[taste],
        )


async def test_a_repeated_call_that_kills_every_worker_is_set_aside_and_goes_on_when_somebody_says_so(
    file: Place,
) -> None:
    bench = Bench()
    for _ in range(5):
        runtime = file.runtime(bench.agent())
        await runtime.__aenter__()
        if bench.tasted == 0:
            await (await runtime.session("s")).send("Taste it.", key="1")
        await until(lambda: bench.inside)
        bench.inside = False
        await crash(runtime)

    async with file.runtime(bench.agent()) as runtime:
        session = await runtime.session("s")
        async with asyncio.timeout(SOON):
            with pytest.raises(TurnFailed, match="stuck"):
                await session.result("s.1")
        assert bench.tasted == 5
        bench.safe.set()
        assert await session.resume()
        result = await session.result("s.1")

    [call] = result.tool_calls
    assert (result.text, call.attempts, call.repeated) == ("Sweet.", 6, 5)
