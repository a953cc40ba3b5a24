"""The reference scenario: one turn in which everything happens that a turn can do, a sweep, and one turn after it.

Two inputs, the second steered into the running turn; five parallel calls (one of each recovery, one that asks for
approval, one deferred); a result large enough for a blob, and a blob that nobody refers to; keyed acceptances. Bodies
wait for each other through what is on disk, so that the order of records is the same on every store and after every
crash.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from perdure import Agent, ModelRequest, ModelResponse, Session, ToolCall, ToolContext, TurnResult, Usage, tool
from perdure.engine.journal import load
from perdure.engine.lease import LeaseTerms
from perdure.errors import AlreadyAnswered, StoreUnavailable
from perdure.model.outcome import PendingCall
from perdure.model.record import Ended, Started
from perdure.ports.host import Clock
from perdure.ports.store import Store
from perdure.runtime import Runtime
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab

R = TypeVar("R")

SESSION = "books"
ATTENDED = LeaseTerms(term=30.0, renewal=0.4)
"""Looks round often, so that a turn nobody attends to is soon found."""
BIG = "row of figures\n" * 3000


def recorded(kind: type[Started] | type[Ended], call: str) -> Callable[[Store], Awaitable[bool]]:
    """Whether a record about a call of turn 1 is on disk."""

    async def check(store: Store) -> bool:
        row = await store.session(SESSION)
        records = [] if row is None else await load(store, row.sid, 1, 1)
        return any(isinstance(r, kind) and r.call == call for _, r in records)

    return check


async def signed(store: Store) -> bool:
    """Whether signing is over, or waits for a person: who waits for that must not keep the turn from parking."""
    row = await store.session(SESSION)
    asked = [] if row is None else [w.kind for w in await store.waits(row.sid)]
    return "recovery" in asked or await recorded(Ended, "1.2")(store)


async def steered(store: Store) -> bool:
    """Whether the second input is on disk."""
    row = await store.session(SESSION)
    return row is not None and row.next > 2


def clerk(lab: Lab) -> Agent[str]:
    @tool(recovery="once")
    async def pay(ctx: ToolContext[Any]) -> str:
        """Pay."""
        await lab.until(steered)
        await lab.effect("pay", ctx.idempotency_key)
        return "paid"

    @tool(recovery="rerun")
    async def tally(ctx: ToolContext[Any]) -> str:
        """Write a long report."""
        await lab.until(recorded(Ended, "1.0"))
        await lab.effect("tally", ctx.idempotency_key)
        return BIG

    @tool(recovery="ask")
    async def sign(ctx: ToolContext[Any]) -> str:
        """Sign."""
        await lab.until(recorded(Ended, "1.1"))
        await lab.effect("sign", ctx.idempotency_key)
        return "signed"

    @tool(approval="ask")
    async def book(ctx: ToolContext[Any]) -> str:
        """Book, if a person agrees."""
        await lab.effect("book", ctx.idempotency_key)
        return "booked"

    @tool(recovery="rerun", deferred=True)
    async def ship(ctx: ToolContext[Any]) -> None:
        """Ask a carrier, who answers later."""
        await lab.until(signed)
        await lab.effect("ship", ctx.idempotency_key, ctx.defer())

    return Agent(FunctionModel(answer), name="clerk", tools=[pay, tally, sign, book, ship])


async def answer(request: ModelRequest) -> AsyncIterator[str | ModelResponse]:
    """The model: two pieces of text, then the whole, with its usage."""
    said = [m.text for m in request.messages if m.role == "user"]
    results = [r for m in request.messages for r in m.tool_results]
    calls: tuple[ToolCall, ...] = ()
    if said[-1] == "and now?":
        pieces = ("Now ", "rest.")
    elif not results:
        pieces = ("Let me ", "see.")
        calls = tuple(ToolCall(f"c-{name}", name) for name in ("pay", "tally", "sign", "book", "ship"))
    else:
        pieces = ("Done: ", f"{sum(r.status == 'ok' for r in results)} of {len(results)}, and {said[-1]}.")
    for piece in pieces:
        yield piece
    yield ModelResponse("".join(pieces), calls, Usage(input=10, output=5), stop="tool_calls" if calls else "end")


async def scenario(lab: Lab) -> None:
    await settle_the_day(lab)


async def attended(lab: Lab) -> None:
    """The same where a reply may get lost: a turn that rests because of it is found sooner than by default."""
    await settle_the_day(lab, ATTENDED)


async def settle_the_day(lab: Lab, lease: LeaseTerms | None = None, clock: Clock | None = None) -> None:
    """What a host does, written so that it may be started again at any time."""
    async with lab.runtime([clerk(lab)], lease=lease, clock=clock) as runtime:
        session = await runtime.session(SESSION)
        receipt = await patiently(lambda: session.send("settle the day", key="in-1"))
        await lab.until(recorded(Started, "1.4"))
        await patiently(lambda: session.steer("greet them", key="in-2"))
        result = await patiently(receipt.result)
        while result.waiting:
            result = await answer_next(lab, runtime, session, result)
        assert result.turn_id == f"{SESSION}.1"
        await lab.store.blobs.put(b"nobody refers to this")
        await patiently(lambda: lab.store.sweep(grace=0))
        after = await patiently(lambda: session.run("and now?", key="in-3"))
        assert after.text == "Now rest."


async def patiently(call: Callable[[], Awaitable[R]]) -> R:
    """A store in trouble cannot say whether it has taken something: say the same again."""
    while True:
        try:
            return await call()
        except StoreUnavailable:
            await asyncio.sleep(0)


async def answer_next(lab: Lab, runtime: Runtime, session: Session, result: TurnResult[str]) -> TurnResult[str]:
    """Answer one thing that waits and see what the turn makes of it: two answers at once would race."""
    order = {"recovery": 0, "deferred": 1, "approval": 2}
    pending = sorted(await session.pending(), key=lambda p: order[p.kind])
    with contextlib.suppress(AlreadyAnswered):  # by us, when the reply was lost
        await patiently(lambda: answer_one(lab, runtime, session, pending[0]))
    return await patiently(lambda: session.result(result.turn_id))


async def answer_one(lab: Lab, runtime: Runtime, session: Session, pending: PendingCall) -> None:
    happened = [line for line in lab.ledger if line.key.endswith(f".{pending.call_id}")]
    if pending.kind == "approval":
        await session.approve(pending.call_id)
    elif pending.kind == "deferred":
        await runtime.resolve(happened[-1].data, "sent")
    elif happened:
        await session.settle(pending.call_id, "done", value="seen")
    else:
        await session.settle(pending.call_id, "rerun")
