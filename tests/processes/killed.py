"""Durable functions that the crash tests kill, as scenarios for the crash kit.

Each scenario starts its process under an id, sends its signals under keys, waits for its end and writes that into the
ledger: said again after a kill, it is the same thing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
from typing import Any

import msgspec

from perdure import Process, ProcessContext, Retry, Runtime, call, process
from perdure.engine.lease import LeaseTerms
from perdure.errors import OutcomeUnknown, StepFailed
from perdure.lifecycle.process import unsettled_steps
from perdure.testing.crash import Lab, Played

Ctx = ProcessContext[Lab]
TIMEOUT = 20
OFTEN = LeaseTerms(term=3, renewal=1)
"""What rests because a reply was lost is looked at twice within a second."""


async def pay(lab: Lab, what: str) -> str:
    await lab.effect("pay", what)
    return f"paid {what}"


async def note(lab: Lab, what: str) -> str:
    await lab.effect("note", what)
    return f"noted {what}"


def note_now(lab: Lab, what: str) -> str:
    lab.effect_now("note", what)
    return f"noted {what}"


async def flaky(lab: Lab, what: str) -> str:
    await lab.effect("note", what)
    if [line.key for line in lab.ledger].count(what) == 1:
        raise Retry("busy", after=0.01)
    return f"noted {what}"


async def paid(ctx: Ctx, what: str) -> str:
    """A step that is never repeated, by code that can live with not knowing."""
    try:
        return await ctx.step(pay, ctx.deps, what, name=what, recovery="once")
    except OutcomeUnknown:
        return f"unknown {what}"


async def noted(ctx: Ctx, what: str) -> str:
    return await ctx.step(note, ctx.deps, what, name=what, recovery="rerun")


# ---------------------------------------------------------------------- functions


@process
async def plain(ctx: Ctx) -> list[str]:
    return [await paid(ctx, "a"), await noted(ctx, "b"), await paid(ctx, "c")]


@dataclasses.dataclass
class Bill:
    day: datetime.date
    amount: decimal.Decimal


async def bill(lab: Lab, what: str) -> Bill:
    await lab.effect("note", what)
    return Bill(datetime.date(2026, 11, 16), decimal.Decimal("1.10"))


@process
async def billing(ctx: Ctx, what: str) -> Bill:
    found = await ctx.step(call(bill, ctx.deps, what), recovery="rerun")
    return Bill(found.day, found.amount * 2)


@process
async def typed(ctx: Ctx) -> list[str]:
    """Reads attributes of what its steps and its child return: JSON would raise at these lines."""
    first = await ctx.step(call(bill, ctx.deps, "a"), recovery="rerun")
    second = await (await ctx.start(billing.call("b"))).result()
    return [first.day.isoformat(), str(first.amount + second.amount), await noted(ctx, "c")]


@process
async def branching(ctx: Ctx) -> list[Any]:
    async def branch(name: str) -> list[str]:
        return [await paid(ctx, f"{name}1"), await noted(ctx, f"{name}2"), await paid(ctx, f"{name}3")]

    return [*await ctx.gather(branch("a"), branch("b"))]


@process(events=["told"])
async def waiting(ctx: Ctx) -> list[Any]:
    first = await ctx.wait_signal("go")
    await ctx.emit("told", first)
    tried = await ctx.step(flaky, ctx.deps, "t", name="t", retries=1, recovery="rerun")
    await ctx.sleep(0.01)
    return [first, tried, await ctx.wait_signal("go"), await ctx.step(note_now, ctx.deps, "n", recovery="rerun")]


@process
async def leaf(ctx: Ctx) -> list[Any]:
    return [await noted(ctx, "leaf"), await ctx.wait_signal("word")]


@process
async def raising(ctx: Ctx) -> list[Any]:
    """Has a child, tells it something, and waits for it."""
    child = await ctx.start(leaf)
    await child.signal("word", "grow")
    return [*await child.result(), await paid(ctx, "school")]


@process
async def looping(ctx: Ctx) -> list[Any]:
    seen = ctx.state or []
    while len(seen) < 2:
        seen = [*seen, await paid(ctx, f"round {len(seen)}")]
        await ctx.checkpoint(seen, restart=True)
    return [*seen, await ctx.step(note, ctx.deps, "end", recovery="rerun")]


@process
async def polling(ctx: Ctx) -> list[Any]:
    """Goes on after its checkpoint with the call that it begins with."""
    seen = ctx.state or []
    while len(seen) < 2:
        what = f"round {len(seen)}"
        try:
            seen = [*seen, await ctx.step(call(pay, ctx.deps, what), recovery="once")]
        except OutcomeUnknown:
            seen = [*seen, f"unknown {what}"]
        await ctx.checkpoint(seen)
    return seen


@process
async def choosing(ctx: Ctx) -> list[Any]:
    async def loses() -> None:
        try:
            await ctx.wait_signal("never")
        finally:
            await paid(ctx, "tidied")

    which, _ = await ctx.any(loses(), noted(ctx, "quick"))
    return [which, await paid(ctx, "last")]


@process
async def cancelled(ctx: Ctx) -> None:
    try:
        await ctx.gather(ctx.wait_signal("never"), ctx.wait_signal("nor this"))
    finally:
        await noted(ctx, "tidied")


@process
async def bidding(ctx: Ctx) -> list[Any]:
    """What it pays for is who was first: another order on replay is another argument."""
    answers: list[str] = []

    async def bid(*names: str) -> None:
        for name in names:
            await noted(ctx, name)
        answers.append(names[0])

    await ctx.gather(bid("s1", "s2"), bid("q"))
    try:
        paid_for = await ctx.step(pay, ctx.deps, "order", name=" ".join(answers), recovery="once")
    except OutcomeUnknown:
        paid_for = "unknown order"
    return [len(answers), paid_for, await noted(ctx, "end")]


@process
async def joined(ctx: Ctx) -> str:
    try:
        await ctx.gather(ctx.wait_signal("a"), ctx.wait_signal("b"), return_exceptions=True)
    finally:
        await noted(ctx, "tidied")
    return "went on"


@process
async def limited(ctx: Ctx) -> list[Any]:
    try:
        async with asyncio.timeout(60):
            await ctx.sleep(0)
    except StepFailed as refused:
        return [refused.fault, await paid(ctx, "a"), await noted(ctx, "b")]
    return []


@process
async def reading(ctx: Ctx) -> list[str]:
    """Says nothing of recovery, neither alone nor in branches."""
    first = await ctx.step(note, ctx.deps, "r1")
    both = await ctx.gather(ctx.step(note, ctx.deps, "r2"), ctx.step(note_now, ctx.deps, "r3"))
    return [first, *both, await ctx.step(flaky, ctx.deps, "r4", retries=1)]


@process
async def asking(ctx: Ctx) -> list[str]:
    """Has a person say what became of its payment."""
    return [await ctx.step(pay, ctx.deps, "a", recovery="ask"), await noted(ctx, "b")]


FUNCTIONS: tuple[Process[..., Any], ...] = (
    plain, typed, billing, branching, waiting, leaf, raising, looping, polling, choosing, cancelled, bidding, joined,
    limited, reading, asking,
)  # fmt: skip


# ---------------------------------------------------------------------- scenarios


async def end(lab: Lab, runtime: Runtime) -> None:
    outcome = msgspec.to_builtins(await runtime.handle("p").outcome(TIMEOUT))
    await lab.effect("ended", "p", outcome)


def runtime_of(lab: Lab) -> Runtime:
    return lab.runtime(processes=FUNCTIONS, deps=lab, lease=OFTEN)


async def _plainly(lab: Lab, what: Process[..., Any]) -> None:
    async with runtime_of(lab) as runtime:
        await runtime.start(what, id="p")
        await end(lab, runtime)


async def play_plain(lab: Lab) -> None:
    await _plainly(lab, plain)


async def play_typed(lab: Lab) -> None:
    await _plainly(lab, typed)


async def play_branching(lab: Lab) -> None:
    await _plainly(lab, branching)


async def play_raising(lab: Lab) -> None:
    await _plainly(lab, raising)


async def play_looping(lab: Lab) -> None:
    await _plainly(lab, looping)


async def play_polling(lab: Lab) -> None:
    await _plainly(lab, polling)


async def play_choosing(lab: Lab) -> None:
    await _plainly(lab, choosing)


async def play_waiting(lab: Lab) -> None:
    async with runtime_of(lab) as runtime:
        handle = await runtime.start(waiting, id="p")
        for number in (1, 2):
            await handle.signal("go", number, key=str(number))
        await end(lab, runtime)


async def play_parked(lab: Lab) -> None:
    """The same, but each signal finds it on disk."""
    async with runtime_of(lab) as runtime:
        handle = await runtime.start(waiting, id="p")
        for number, key in ((1, "1"), (2, "5")):
            await lab.until(lambda store, key=key: _is_at(store, key))  # type: ignore[misc]
            await handle.signal("go", number, key=str(number))
        await end(lab, runtime)


async def play_bidding(lab: Lab) -> None:
    await _plainly(lab, bidding)


async def play_reading(lab: Lab) -> None:
    await _plainly(lab, reading)


async def play_asking(lab: Lab) -> None:
    """The person looks whether the payment has happened, and says so or has it made."""
    async with runtime_of(lab) as runtime:
        handle = await runtime.start(asking, id="p")
        await lab.until(_has_ended_or_asks)
        for call in await handle.pending():
            if ("pay", "a") in {(line.name, line.key) for line in lab.ledger}:
                await handle.settle(call.call_id, "done", value="paid a")
            else:
                await handle.settle(call.call_id, "rerun")
        await end(lab, runtime)


async def _has_ended_or_asks(store: Any) -> bool:
    row = await store.process("p")
    return not row.live or bool(unsettled_steps(row.record.waits))


async def play_limited(lab: Lab) -> None:
    await _plainly(lab, limited)


async def play_cancelled(lab: Lab) -> None:
    await _cancelled(lab, cancelled)


async def play_joined(lab: Lab) -> None:
    await _cancelled(lab, joined)


async def _cancelled(lab: Lab, what: Process[..., Any]) -> None:
    async with runtime_of(lab) as runtime:
        handle = await runtime.start(what, id="p")
        await lab.until(_is_parked)
        await handle.cancel("enough")
        await end(lab, runtime)


async def _is_parked(store: Any) -> bool:
    """Parked, or past that: after a kill the signal or request may be there already."""
    row = await store.process("p")
    return row.status == "waiting" or not row.live or row.record.cancel is not None


async def _is_at(store: Any, key: str) -> bool:
    row = await store.process("p")
    if not row.live:
        return True
    told = [event.key for _, _, event in await store.events(row.pid) if event.key]
    wanted = 1 if key == "1" else 2
    return len(told) >= wanted or any(wait.key == key for wait in row.record.waits)


def ended(played: Played) -> Any:
    """How it ended, by every life that saw it; all must agree."""
    assert played.problems == []
    seen = [line.data for line in played.ledger if line.name == "ended"]
    assert seen
    assert all(each == seen[0] for each in seen)
    return seen[0]
