"""A host that only looks, over and over, lets its own Runtime work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, ProcessContext, Runtime, process
from perdure.sessions.session import Session
from perdure.testing import FunctionModel

LOOKS = 20_000


@process
async def listening(ctx: ProcessContext[Any]) -> Any:
    return await ctx.wait_signal("go")


READS: dict[str, Callable[[Runtime, Session], Awaitable[Any]]] = {
    "history": lambda runtime, session: session.history(),
    "pending": lambda runtime, session: session.pending(),
    "usage": lambda runtime, session: session.usage(),
    "processes of a session": lambda runtime, session: session.processes(),
    "sessions": lambda runtime, session: runtime.sessions.list(),
    "processes": lambda runtime, session: runtime.processes.list(),
    "status": lambda runtime, session: runtime.handle("p").status(),
    "wakes": lambda runtime, session: runtime.processes.wakes(),
}


@pytest.mark.parametrize("store", ["memory", "file"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
async def test_a_host_that_polls_does_not_starve_its_runtime(
    tmp_path: Path, store: str, read: Callable[[Runtime, Session], Awaitable[Any]]
) -> None:
    answered: list[str] = []

    def model(request: Any) -> str:
        answered.append("well")
        return "well"

    where = "memory" if store == "memory" else tmp_path / "x.db"
    async with Runtime(where, agents=[Agent(FunctionModel(model))], processes=[listening]) as runtime:
        await runtime.start(listening, id="p")
        session = await runtime.session("s")
        await session.run("hello")
        answered.clear()
        receipt = await session.send("again")
        for _ in range(LOOKS):
            await read(runtime, session)
            if answered:
                break

        assert answered, f"{LOOKS} looks, and the turn never ran"
        assert (await receipt.result()).text == "well"
