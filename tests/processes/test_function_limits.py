"""Time limits of asyncio around calls of a durable function: refused, on the first run and on every replay."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import anyio
import pytest

from perdure import Process, ProcessContext, process
from perdure.errors import ForeignTask, StepFailed
from perdure.model.process import Failure
from perdure.model.record import Done
from tests.kit import SOON, Place
from tests.processes.functions import World, dying, journal_of, living, memory, parked, result, stuck

__all__ = ["memory"]

Ctx = ProcessContext[World]

CALLS: dict[str, Callable[[Ctx], Awaitable[Any]]] = {
    "sleep": lambda ctx: ctx.sleep(1.5),
    "signal": lambda ctx: ctx.wait_signal("never"),
    "step": lambda ctx: ctx.step(ctx.deps.act, "x"),
    "gather": lambda ctx: ctx.gather(ctx.wait_signal("never"), ctx.sleep(5)),
    "any": lambda ctx: ctx.any(ctx.wait_signal("never"), ctx.step(ctx.deps.act, "x")),
    "start": lambda ctx: ctx.start("limited", {"what": "sleep"}),
    "result": lambda ctx: ctx.result("other"),
    "emit": lambda ctx: ctx.emit("told"),
    "checkpoint": lambda ctx: ctx.checkpoint(1),
}


@process(events=["told"])
async def limited(ctx: Ctx, what: str) -> list[Any]:
    try:
        async with asyncio.timeout(0.1):
            await CALLS[what](ctx)
    except StepFailed as failed:
        return [failed.fault, failed.message, await ctx.wait_signal("go")]
    return ["it had an effect"]


@pytest.mark.parametrize("what", CALLS)
async def test_a_call_inside_a_timeout_is_refused_before_it_does_anything_and_on_replay_too(
    place: Place, what: str
) -> None:
    world = World()
    async with dying(place, limited, deps=world) as runtime:
        handle = await runtime.start(limited, {"what": what}, id="p")
        await parked(handle)
        [refused, *_] = await journal_of(runtime, handle)
        assert isinstance(refused, Done)
        assert refused.fault is not None
        assert refused.ordered
    async with living(place, limited, deps=world) as runtime:
        await runtime.handle("p").signal("go", "on")
        fault, message, told = await result(runtime.handle("p"))

        assert (fault, told) == ("time_limit_around", "on")
        assert "asyncio Timeout around this call cannot be kept to" in message
        assert "`ctx.any(work(), ctx.sleep(seconds))`" in message
        assert [row.id for row in await runtime.processes.list()] == ["p"]
    assert world.begun == []


async def test_what_does_not_catch_it_ends_as_failed_and_says_what_to_use(place: Place) -> None:
    @process
    async def impatient(ctx: Ctx) -> None:
        async with asyncio.timeout(3600):
            await ctx.wait_signal("go")

    async with living(place, impatient) as runtime:
        outcome = await (await runtime.start(impatient)).outcome(SOON)

    assert isinstance(outcome, Failure)
    assert outcome.code == "time_limit_around"
    assert "use its own `timeout=`" in outcome.message


# ---------------------------------------------------------------------- where a limit may hide


@contextlib.asynccontextmanager
async def wrapped(seconds: float) -> AsyncGenerator[None]:
    async with asyncio.timeout(seconds):
        yield


async def outer(ctx: Ctx) -> None:
    async with asyncio.timeout(60):
        await inner(ctx)


async def inner(ctx: Ctx) -> None:
    await ctx.sleep(0)


async def as_a_name(ctx: Ctx) -> None:
    async with asyncio.timeout(None) as limit:
        limit.reschedule(asyncio.get_running_loop().time() + 60)
        await ctx.sleep(0)


async def of_anyio(ctx: Ctx) -> None:
    with anyio.move_on_after(60):
        await ctx.sleep(0)


async def of_anyio_that_fails(ctx: Ctx) -> None:
    with anyio.fail_after(60):
        await ctx.sleep(0)


async def of_anyio_that_was_cancelled(ctx: Ctx) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await ctx.sleep(0)


async def in_a_context_manager(ctx: Ctx) -> None:
    async with wrapped(60):
        await ctx.sleep(0)


async def on_a_stack(ctx: Ctx) -> None:
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(60))
        await ctx.sleep(0)


async def around_an_async_generator(ctx: Ctx) -> None:
    async def each() -> AsyncGenerator[int]:
        async with asyncio.timeout(60):
            await ctx.sleep(0)
            yield 1

    async for _ in each():
        pass


async def a_cancel_of_its_own_task(ctx: Ctx) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    try:
        await ctx.sleep(0)
    finally:
        await asyncio.sleep(0)  # nothing of it is left
        await ctx.sleep(0)


async def a_branch_that_cancels_itself(ctx: Ctx) -> None:
    await ctx.gather(a_cancel_of_its_own_task(ctx), ctx.sleep(0))


async def in_a_branch(ctx: Ctx) -> None:
    await ctx.gather(outer(ctx), ctx.sleep(0))


async def wait_for(ctx: Ctx) -> None:
    await asyncio.wait_for(ctx.sleep(0), 60)


HIDDEN = [
    outer,
    as_a_name,
    of_anyio,
    of_anyio_that_fails,
    of_anyio_that_was_cancelled,
    in_a_context_manager,
    on_a_stack,
    around_an_async_generator,
    a_cancel_of_its_own_task,
    a_branch_that_cancels_itself,
    in_a_branch,
    wait_for,
]


def made(work: Callable[[Ctx], Awaitable[Any]]) -> Process[..., Any]:
    @process
    async def trying(ctx: Ctx) -> str:
        try:
            await work(ctx)
        except StepFailed as failed:
            return failed.fault
        except ForeignTask:
            return "foreign_task"
        return "made"

    return trying


@pytest.mark.parametrize("hidden", HIDDEN, ids=lambda each: str(each.__name__))
async def test_a_limit_or_a_cancel_is_found_wherever_the_function_has_it_from(
    memory: Place, hidden: Callable[[Ctx], Awaitable[Any]]
) -> None:
    trying = made(hidden)
    # Before Python 3.12, `wait_for` runs what it is given in a task of its own, which is refused as any such is.
    wanted = "foreign_task" if hidden is wait_for and sys.version_info < (3, 12) else "time_limit_around"
    async with living(memory, trying) as runtime:
        assert await result(await runtime.start(trying)) == wanted


# ---------------------------------------------------------------------- what is no limit


async def without_a_time(ctx: Ctx) -> None:
    async with asyncio.timeout(None):
        await ctx.sleep(0)


async def left_again(ctx: Ctx) -> None:
    async with asyncio.timeout(60) as limit:
        await asyncio.sleep(0)
    assert not limit.expired()
    await ctx.sleep(0)


async def a_scope_without_a_deadline(ctx: Ctx) -> None:
    with anyio.CancelScope():
        await ctx.sleep(0)


async def inside_of_a_step(ctx: Ctx) -> None:
    async def body() -> None:
        async with asyncio.timeout(60):
            await asyncio.sleep(0)

    await ctx.step(body)


async def around_other_things(ctx: Ctx) -> None:
    async with asyncio.timeout(60), asyncio.Lock():
        await asyncio.sleep(0)
    async with asyncio.Lock():
        await ctx.sleep(0)


HARMLESS = [without_a_time, left_again, a_scope_without_a_deadline, inside_of_a_step, around_other_things]


@pytest.mark.parametrize("harmless", HARMLESS, ids=lambda each: str(each.__name__))
async def test_what_limits_no_call_is_none_of_our_business(
    memory: Place, harmless: Callable[[Ctx], Awaitable[Any]]
) -> None:
    trying = made(harmless)
    async with living(memory, trying) as runtime:
        assert await result(await runtime.start(trying)) == "made"


async def test_a_branch_that_its_own_code_cancels_leaves_the_process_stuck_with_advice(place: Place) -> None:
    """No limit of a library that could be seen: what is cancelled is a task."""

    @process
    async def impatient(ctx: Ctx) -> None:
        async def branch() -> None:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_later(0.01, task.cancel)
            await ctx.step(ctx.deps.act, "x")

        await ctx.gather(branch())

    world = World()
    world.open.clear()
    async with living(place, impatient, deps=world) as runtime:
        assert "use the `timeout` of the call" in await stuck(await runtime.start(impatient))
