"""The crash experiment: the model asks for tool one, then for tool two, then answers. Killed around effect two."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, get_args

from perdure import Agent, ModelRequest, ToolCall, ToolContext, tool
from perdure.engine.journal import load
from perdure.model.record import Ended
from perdure.model.tool import Recovery
from perdure.ports.store import Store
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab

SESSION = "s"
RECOVERIES: tuple[Recovery, ...] = get_args(Recovery)


def agent_for(lab: Lab, recovery: Recovery, parallel: bool) -> Agent[str]:
    @tool(recovery=recovery)
    async def one(ctx: ToolContext[Any]) -> str:
        """The first."""
        await lab.effect("one", ctx.idempotency_key)
        return "one done"

    @tool(recovery=recovery)
    async def two(ctx: ToolContext[Any]) -> str:
        """The second; killed only when its sibling is on disk."""
        await lab.until(one_is_recorded)
        await lab.effect("two", ctx.idempotency_key)
        return "two done"

    def answer(request: ModelRequest) -> Any:
        done = sum(len(m.tool_results) for m in request.messages)
        asked = sum(1 for m in request.messages if m.role == "assistant")
        if parallel:
            # A question first, so that here too there are three calls to the model.
            steps: list[Any] = [[ToolCall("c1", "one"), ToolCall("c2", "two")], [ToolCall("c3", "three")], "the end"]
        else:
            steps = [[ToolCall("c1", "one")], [ToolCall("c2", "two")], "the end"]
        assert done >= asked, "every call has its result"
        return steps[asked]

    @tool
    async def three() -> str:
        """Nothing outside."""
        return "three done"

    return Agent(FunctionModel(answer), name="subject", tools=[one, two, three])


async def one_is_recorded(store: Store) -> bool:
    row = await store.session(SESSION)
    records = [] if row is None else await load(store, row.sid, 1, 1)
    return any(isinstance(r, Ended) and r.call == "1.0" for _, r in records)


def begin(recovery: Recovery, parallel: bool) -> Callable[[Lab], Awaitable[None]]:
    async def scenario(lab: Lab) -> None:
        async with lab.runtime([agent_for(lab, recovery, parallel)]) as runtime:
            session = await runtime.session(SESSION)
            await session.run("go")

    return _named(scenario, f"begin_{recovery}_{parallel}")


def enter(recovery: Recovery, parallel: bool) -> Callable[[Lab], Awaitable[None]]:
    async def scenario(lab: Lab) -> None:
        """All that a host must do: enter a Runtime on the same file. A parked call is then for a person."""
        async with lab.runtime([agent_for(lab, recovery, parallel)]) as runtime:
            await runtime.wait_idle(timeout=60)
            session = await runtime.session(SESSION)
            for pending in await session.pending():
                assert pending.kind == "recovery"
                happened = any(line.key.endswith(f".{pending.call_id}") for line in lab.ledger)
                await session.settle(pending.call_id, "done" if happened else "rerun", value="two done")
            await runtime.wait_idle(timeout=60)

    return _named(scenario, f"enter_{recovery}_{parallel}")


def _named(scenario: Any, name: str) -> Callable[[Lab], Awaitable[None]]:
    scenario.__name__ = scenario.__qualname__ = name
    globals()[name] = scenario  # where another process finds it
    return scenario


SCENARIOS = {(r, p): (begin(r, p), enter(r, p)) for r in RECOVERIES for p in (False, True)}
