"""What a stranger does to processes: wrong types, foreign errors, handles that outlive their Runtime."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import ProcessContext, Runtime, process
from perdure.errors import (
    InvalidDefinition,
    InvalidInput,
    PerdureError,
    ProcessFailed,
    RuntimeClosed,
    StepFailed,
    WrongLoop,
)
from perdure.model.process import EventType, WakeTarget
from perdure.processes.local import External
from tests.kit import SOON, Place, untyped

WRONG: Any = 5


def anything(value: Any) -> Any:
    """A value that no type checker looks at: users have none."""
    return value


@process
async def waiting(ctx: ProcessContext) -> Any:
    return await ctx.wait_signal("go")


@process
async def quick(ctx: ProcessContext, n: int = 1) -> int:
    return n


# ------------------------------------------------------------------ wrong types never make a store unreadable


Ask = Callable[[Runtime], Awaitable[object]]

ASKED: dict[str, Ask] = {
    "the name of a signal": lambda runtime: runtime.handle("external").signal(WRONG),
    "the key of a signal": lambda runtime: runtime.handle("external").signal("stop", key=WRONG),
    "an event": lambda runtime: runtime.processes.emit("external", WRONG),
    "the key of an event": lambda runtime: runtime.processes.emit("external", "built", key=WRONG),
    "the key of an event, in bytes": lambda runtime: runtime.processes.emit("external", "built", key=anything(b"x")),
    "a schema": lambda runtime: runtime.processes.register("r", signals={"stop": WRONG}),
    "an event type": lambda runtime: runtime.processes.register("r", events=[EventType(WRONG)]),
    "no text in an event type": lambda runtime: runtime.processes.register("r", events=[EventType("\ud800")]),
    "a wake target": lambda runtime: runtime.processes.register("r", wake=WRONG),
    "the session of a wake target": lambda runtime: runtime.processes.register("r", wake=WakeTarget(WRONG)),
    "the policy of a wake target": lambda runtime: runtime.processes.register(
        "r", wake=WakeTarget("s", policy=anything("soon"))
    ),
    "another wake target": lambda runtime: runtime.processes.retarget("external", WakeTarget(WRONG)),
    "an outcome": lambda runtime: runtime.processes.complete("external", outcome=WRONG),
    "arguments": lambda runtime: runtime.start(quick, WRONG),
    "arguments by position": lambda runtime: runtime.start(quick, anything([1])),
    "no arguments by position": lambda runtime: runtime.start(quick, anything([])),
    "an age": lambda runtime: runtime.processes.prune(older_than=anything("a day")),
}


@pytest.mark.parametrize("what", ASKED)
async def test_a_wrong_type_is_refused_and_the_store_opens_again(place: Place, what: str) -> None:
    async with place.runtime(processes=[quick]) as runtime:
        await runtime.processes.register("external", signals=["stop"], events=[EventType("built")])
        with pytest.raises(InvalidInput):
            await ASKED[what](runtime)
    async with place.runtime(processes=[quick]) as runtime:
        assert [row.id for row in await runtime.processes.list()] == ["external"]


CALLED: dict[str, Callable[[ProcessContext], Awaitable[object]]] = {
    "the name of a signal": lambda ctx: ctx.wait_signal(WRONG),
    "no text as name of a signal": lambda ctx: ctx.wait_signal("\ud800"),
    "the name of a step": lambda ctx: ctx.step(len, [], name=WRONG),
    "an event": lambda ctx: ctx.emit(WRONG),
    "what becomes of a child": lambda ctx: ctx.start(quick, parent_end=anything("detach")),
    "whom a child wakes": lambda ctx: ctx.start(quick, wake=anything("soon")),
    "the arguments of a child": lambda ctx: ctx.start(quick, WRONG),
    "the arguments of a new beginning": lambda ctx: ctx.continue_as_new(WRONG),
    "retries": lambda ctx: ctx.step(len, [], retries=anything(1.5)),
    "a time limit": lambda ctx: ctx.step(len, [], timeout=anything("3")),
}


@pytest.mark.parametrize("what", CALLED)
async def test_a_wrong_type_in_a_call_fails_its_process_and_no_store(place: Place, what: str) -> None:
    @process
    async def wrong(ctx: ProcessContext) -> object:
        try:
            await CALLED[what](ctx)
        except PerdureError as error:
            return error.fault if isinstance(error, StepFailed) else error.code
        return "taken"

    async with place.runtime(processes=[wrong, quick]) as runtime:
        handle = await runtime.start(wrong, id="wrong")
        assert await handle.result(timeout=SOON) in ("invalid_input", "invalid_process")
    async with place.runtime(processes=[wrong, quick]) as runtime:
        assert [row.id for row in await runtime.processes.list()] == ["wrong"]


DEFINED: dict[str, Callable[[], object]] = {
    "attempts that are no number": lambda: process(max_attempts=anything(1.5))(quick.fn),
    "attempts that are true": lambda: process(max_attempts=True)(quick.fn),
    "a version that is no text": lambda: process(version=WRONG)(quick.fn),
    "a name that is no text": lambda: process(name=WRONG)(quick.fn),
    "an event that is none": lambda: process(events=[WRONG])(quick.fn),
    "signals without types": lambda: process(signals=anything(["go"]))(quick.fn),
    "a signal that is no text": lambda: process(signals={WRONG: int})(quick.fn),
    "external work without a name": lambda: External(WRONG),
    "external work with an event that is none": lambda: External("build", events=[WRONG]),
    "a function without a name": lambda: process(functools.partial(quick.fn, n=1)),
}


@pytest.mark.parametrize("what", DEFINED)
def test_a_definition_that_cannot_work_is_refused_where_it_is_made(what: str) -> None:
    with pytest.raises(InvalidInput):
        DEFINED[what]()


def test_a_method_is_refused_because_its_instance_would_be_gone() -> None:
    class Books:
        async def nightly(self, ctx: ProcessContext) -> None: ...

    with pytest.raises(InvalidDefinition, match="is a method"):
        untyped(process)(Books.nightly)


@pytest.mark.parametrize("seconds", [-1, float("nan"), True, "3"])
async def test_a_time_limit_that_is_none_is_refused(place: Place, seconds: Any) -> None:
    async with place.runtime(processes=[waiting]) as runtime:
        handle = await runtime.start(waiting)
        with pytest.raises(InvalidInput, match="timeout="):
            await handle.result(timeout=seconds)


# ------------------------------------------------------------------ errors that are no Exception


class Panic(BaseException):
    """What code below Python raises when it gives up, and what `pytest.fail` does."""


async def test_a_step_may_raise_what_is_no_exception(place: Place) -> None:
    def panic() -> None:
        raise Panic("out of range")

    @process
    async def careful(ctx: ProcessContext) -> str:
        try:
            await ctx.step(panic)
        except StepFailed as failed:
            return failed.message
        return "fine"

    async with place.runtime(processes=[careful]) as runtime:
        assert await (await runtime.start(careful)).result(timeout=SOON) == "Panic: out of range"


@pytest.mark.parametrize("error", [Panic("lost"), SystemExit(3), BaseExceptionGroup("two", [Panic("lost")])])
async def test_a_function_that_raises_what_is_no_exception_fails(place: Place, error: BaseException) -> None:
    runs = []

    @process
    async def panics(ctx: ProcessContext) -> None:
        runs.append(1)
        raise error

    async with place.runtime(processes=[panics]) as runtime:
        with pytest.raises(ProcessFailed, match=type(error).__name__):
            await (await runtime.start(panics)).result(timeout=SOON)
    assert runs == [1]


# ------------------------------------------------------------------ what outlives its Runtime


async def test_whoever_waits_is_told_that_the_runtime_was_left(place: Place) -> None:
    async def follow(runtime: Runtime) -> None:
        async for _ in runtime.handle("w").events(follow=True):
            following.set()

    following = asyncio.Event()
    async with place.runtime(processes=[waiting]) as runtime:
        handle = await runtime.start(waiting, id="w")
        result, events = asyncio.create_task(handle.result()), asyncio.create_task(follow(runtime))
        await following.wait()
    for task in (result, events):
        with pytest.raises(RuntimeClosed):
            await asyncio.wait_for(task, SOON)


async def test_a_handle_whose_runtime_was_left_says_so(place: Place) -> None:
    async with place.runtime(processes=[waiting]) as runtime:
        handle, processes = await runtime.start(waiting), runtime.processes
    asked: list[Awaitable[object]] = [
        handle.status(),
        handle.signal("go"),
        handle.cancel(),
        handle.result(timeout=1),
        processes.list(),
        processes.start(waiting),
        processes.register("external"),
    ]
    for each in asked:
        with pytest.raises(RuntimeClosed):
            await each


async def test_a_handle_is_refused_on_another_loop(tmp_path: Path) -> None:
    refused: list[type[BaseException]] = []

    async with Runtime(tmp_path / "w.db", processes=[waiting]) as runtime:
        held = runtime.handle("w")
        await runtime.start(waiting, id="w")
        thread = threading.Thread(target=_on_a_loop_of_its_own, args=(held, refused))
        thread.start()
        await asyncio.get_running_loop().run_in_executor(None, thread.join)
        assert refused == [WrongLoop, WrongLoop]
        assert await held.status() in ("running", "waiting")


def _on_a_loop_of_its_own(handle: Any, refused: list[type[BaseException]]) -> None:
    for ask in (handle.status, functools.partial(handle.signal, "go")):
        try:
            asyncio.run(ask())
        except PerdureError as error:
            refused.append(type(error))


async def test_a_handle_may_be_given_as_the_text_of_its_json(place: Place) -> None:
    async with place.runtime(processes=[waiting]) as runtime:
        handle = await runtime.start(waiting, id="w")
        assert runtime.handle(json.dumps(handle.to_json())) == handle
        assert runtime.handle("{w").id == "{w"
