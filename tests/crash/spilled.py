"""A turn in which whatever waits is too large for a row: each goes to a blob first, and then the row that refers to it.

The input; the arguments of a call, in the reply's record and once more in the wait that asks a person about them; the
completion of a deferred call; the reason of a refusal; the signature under an approval. Nobody says the same words
after a crash: what was put and not referred to stays an orphan, which the next incarnation sweeps away before anything
else, with the turn open and its waits unanswered. What is referred to must survive that.
"""

from __future__ import annotations

import contextlib
from typing import Any

from perdure import Agent, ModelRequest, ModelResponse, Session, ToolCall, ToolContext, TurnResult, Usage, tool
from perdure.errors import AlreadyAnswered
from perdure.runtime import Runtime
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab
from tests.crash.reference import ATTENDED, SESSION, patiently

LONG = 70_000
"""Characters: more than a row may hold."""
DEED = "whereas " * (LONG // 8)


def clerk(lab: Lab) -> Agent[str]:
    @tool(approval="ask")
    async def seal(ctx: ToolContext[Any], deed: str) -> str:
        """Seal a deed, if a person agrees."""
        await lab.effect("seal", ctx.idempotency_key, len(deed))
        return "sealed"

    @tool(approval="ask")
    async def burn(ctx: ToolContext[Any]) -> str:
        """Burn the files, if a person agrees."""
        await lab.effect("burn", ctx.idempotency_key)
        return "burnt"

    @tool(recovery="rerun", deferred=True)
    async def survey(ctx: ToolContext[Any]) -> None:
        """Ask a surveyor, who answers later."""
        await lab.effect("survey", ctx.idempotency_key, ctx.defer())

    return Agent(FunctionModel(answer), name="notary", tools=[seal, burn, survey])


def answer(request: ModelRequest) -> ModelResponse:
    results = [r for m in request.messages for r in m.tool_results]
    if results:
        return ModelResponse(f"Done: {[r.status for r in results]}", usage=Usage(input=10, output=5))
    calls = (ToolCall("c-seal", "seal", {"deed": DEED}), ToolCall("c-burn", "burn"), ToolCall("c-survey", "survey"))
    return ModelResponse("", calls, Usage(input=10, output=5), stop="tool_calls")


async def spilled(lab: Lab) -> None:
    await notarise(lab)


async def notarise(lab: Lab) -> None:
    """What a host does, written so that it may be started again at any time."""
    if lab.incarnation > 1:
        await sweep(lab)
    async with lab.runtime([clerk(lab)], lease=ATTENDED) as runtime:
        session = await runtime.session(SESSION)
        receipt = await patiently(lambda: session.send(DEED, key="in-1"))
        result = await patiently(receipt.result)
        while result.waiting:
            result = await answer_next(lab, runtime, session, result)


async def sweep(lab: Lab) -> None:
    """Nobody works yet: what the sweep takes is what the dead left behind."""
    await lab.store.open()
    taken = await lab.store.sweep(grace=0)
    await lab.store.close()
    await lab.effect("swept", str(lab.incarnation), taken)


async def answer_next(lab: Lab, runtime: Runtime, session: Session, result: TurnResult[str]) -> TurnResult[str]:
    """Answer one thing that waits and see what the turn makes of it: the survey, the burning, the sealing."""
    pending = {p.tool: p for p in await session.pending()}
    words = f"in life {lab.incarnation} ".ljust(LONG, ".")
    with contextlib.suppress(AlreadyAnswered):  # by us, when the reply was lost
        if "survey" in pending:
            keys = [line.data for line in lab.ledger if line.key.endswith("." + pending["survey"].call_id)]
            await patiently(lambda: runtime.resolve(keys[-1], words))
        elif "burn" in pending:
            await patiently(lambda: session.reject(pending["burn"].call_id, words))
        else:
            assert pending["seal"].args == {"deed": DEED}, "what is asked about is there as a whole"
            await patiently(lambda: session.approve(pending["seal"].call_id, by=words))
    return await patiently(lambda: session.result(result.turn_id))
