"""One call, in each way a call can come to its start, under each recovery contract: what the window tests kill.

    plain     starts with its reply          queued    waits for the slot that another call holds
    approved  waits for a person             retried   a first attempt failed and is recorded, with its due time
    deferred  is completed from outside

A scenario is a module-level function for each combination, named `<kind>_<recovery>`, because another process must
find it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, get_args

from perdure import Agent, ModelRequest, Retry, Session, Tool, ToolCall, ToolContext, tool
from perdure.model.outcome import PendingCall
from perdure.model.tool import Approval, Recovery
from perdure.runtime import Runtime
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab

KINDS = ("plain", "queued", "approved", "retried", "deferred")
RECOVERIES: tuple[Recovery, ...] = get_args(Recovery)
DUE = 0.05


def worker(lab: Lab, kind: str, recovery: Recovery) -> Tool[..., Any]:
    approval: Approval = "ask" if kind == "approved" else "never"
    limit, retries = (1 if kind == "queued" else None), int(kind == "retried")

    @tool(recovery=recovery, approval=approval, limit=limit, retries=retries, deferred=kind == "deferred")
    async def work(ctx: ToolContext[Any]) -> str:
        """Work."""
        if kind == "retried" and ctx.attempt == 1:
            raise Retry("not now", after=DUE)
        key = ctx.defer() if kind == "deferred" else None
        await lab.effect("work", ctx.idempotency_key, key)
        return "done"

    return work


def model_for(kind: str) -> Callable[[ModelRequest], Any]:
    calls = [ToolCall("c0", "work"), ToolCall("c1", "work")] if kind == "queued" else [ToolCall("c0", "work")]

    def answer(request: ModelRequest) -> Any:
        results = [r for m in request.messages for r in m.tool_results]
        return "done" if results else calls

    return answer


def scenario_for(kind: str, recovery: Recovery) -> Callable[[Lab], Awaitable[None]]:
    async def scenario(lab: Lab) -> None:
        agent = Agent(FunctionModel(model_for(kind)), name="worker", tools=[worker(lab, kind, recovery)])
        async with lab.runtime([agent]) as runtime:
            session = await runtime.session("s")
            result = await session.run("go", key="go")
            while result.waiting:
                for pending in await session.pending():
                    await answer(lab, runtime, session, pending)
                result = await session.result(result.turn_id)

    scenario.__name__ = scenario.__qualname__ = f"{kind}_{recovery}"
    return scenario


async def answer(lab: Lab, runtime: Runtime, session: Session, pending: PendingCall) -> None:
    happened = [line for line in lab.ledger if line.key.endswith(f".{pending.call_id}")]
    if pending.kind == "approval":
        await session.approve(pending.call_id)
    elif pending.kind == "deferred":
        if not happened:
            # Nobody outside was given the key, so nobody will ever use it: only a person can end the wait.
            await session.cancel("the carrier was never asked", turn_id=pending.call_id.rsplit(".", 2)[0])
            return
        await runtime.resolve(happened[-1].data, "done")
    elif happened:
        await session.settle(pending.call_id, "done", value="seen")
    else:
        await session.settle(pending.call_id, "rerun")


for _kind in KINDS:
    for _recovery in RECOVERIES:
        globals()[f"{_kind}_{_recovery}"] = scenario_for(_kind, _recovery)
