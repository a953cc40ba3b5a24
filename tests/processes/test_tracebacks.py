"""What a function, a step or a task raises leaves its traceback in the log and in its record; no model sees it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from perdure import Agent, ProcessContext, Runtime, ToolError, process
from perdure.errors import ProcessFailed, StepFailed
from perdure.model.process import Failure, TaskSpec
from perdure.model.record import Done, StepFaltered
from perdure.processes.function.calls import MAX_TRACEBACK, log_raised, traceback_text
from perdure.processes.run import load_steps
from tests.kit import SOON, Place, until
from tests.sessions.test_tasks import host
from tests.sessions.test_wakes import Ear

Ctx = ProcessContext[Any]


def deep_inside(secret: str) -> None:
    raise ValueError("no paper")


async def printing(page: str) -> None:
    deep_inside(page)


async def refusing() -> None:
    raise ToolError("out of ink", code="ink")


@process
async def plain(ctx: Ctx, page: str) -> None:
    deep_inside(page)


@process
async def stepping(ctx: Ctx, page: str) -> None:
    await ctx.step(printing, page)


@process
async def retrying(ctx: Ctx) -> str:
    try:
        await ctx.step(printing, "x", recovery="rerun", retries=1)
    except StepFailed as failed:
        return failed.traceback
    return ""


@process
async def told(ctx: Ctx) -> None:
    await ctx.step(refusing)


@process
async def parent(ctx: Ctx) -> None:
    await (await ctx.start(plain, {"page": "hidden page"})).result()


ALL = [plain, stepping, retrying, told, parent]


async def failed(runtime: Runtime, function: Any, **args: Any) -> Failure:
    outcome = await (await runtime.start(function, args, id="p")).outcome(SOON)
    assert isinstance(outcome, Failure)
    return outcome


async def test_function_that_raises_leaves_its_traceback(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    async with place.runtime(processes=ALL) as runtime:
        outcome = await failed(runtime, plain, page="a secret page")

    lines = outcome.traceback.splitlines()
    assert outcome.message == "ValueError: no paper"
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: no paper"
    assert [line.rpartition(" in ")[2] for line in lines if line.startswith("  File")] == ["plain", "deep_inside"]
    assert "a secret page" not in outcome.traceback
    [record] = [each for each in caplog.records if each.name == "perdure.processes"]
    assert (record.levelno, record.getMessage()) == (logging.WARNING, "process p raised ValueError: no paper")
    assert record.exc_info
    assert isinstance(record.exc_info[1], ValueError)


async def test_step_that_raises_leaves_its_traceback_in_its_record_and_in_that_of_its_process(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    async with place.runtime(processes=ALL) as runtime:
        outcome = await failed(runtime, stepping, page="x")
        row = await runtime.processes.get("p")
        records, _ = await load_steps(runtime.store, row.pid, row.id)

    [done] = [each for each in records if isinstance(each, Done)]
    assert done.fault is not None
    assert "in deep_inside" in done.fault.traceback
    assert outcome.traceback.startswith(done.fault.traceback)
    assert "in stepping" in outcome.traceback
    assert "step printing of process p raised ValueError: no paper" in caplog.messages


async def test_attempts_that_falter_leave_their_tracebacks_and_replay_sees_the_same(place: Place) -> None:
    async with place.runtime(processes=ALL) as runtime:
        value = await (await runtime.start(retrying, id="p")).result(SOON)
        row = await runtime.processes.get("p")
        records, _ = await load_steps(runtime.store, row.pid, row.id)

    [faltered] = [each for each in records if isinstance(each, StepFaltered)]
    [done] = [each for each in records if isinstance(each, Done)]
    assert "in deep_inside" in faltered.traceback
    assert done.fault is not None
    assert value == done.fault.traceback


async def test_step_that_tells_what_is_wrong_leaves_its_traceback_too(place: Place) -> None:
    async with place.runtime(processes=ALL) as runtime:
        outcome = await failed(runtime, told)

    assert (outcome.code, outcome.message) == ("ink", "step refusing: out of ink")
    assert "in refusing" in outcome.traceback


async def test_traceback_of_a_child_is_in_its_own_record(place: Place) -> None:
    async with place.runtime(processes=ALL) as runtime:
        outcome = await failed(runtime, parent)
        [child] = [row for row in await runtime.processes.list() if row.id != "p"]

    assert isinstance(child.record.outcome, Failure)
    assert "in deep_inside" in child.record.outcome.traceback
    assert "in parent" in outcome.traceback
    assert "traceback" not in outcome.data


async def test_task_that_raises_leaves_its_traceback(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        deep_inside("x")

    async with place.runtime(Agent(Ear().model)) as runtime:
        outcome = await (await host(runtime).spawn_managed_task(TaskSpec("t"), work)).outcome(SOON)

    assert isinstance(outcome, Failure)
    assert "in deep_inside" in outcome.traceback
    assert [each.exc_info is not None for each in caplog.records if each.name == "perdure.processes"] == [True]


async def test_no_model_is_told_a_traceback(place: Place) -> None:
    ear = Ear()
    async with place.runtime(Agent(ear.model), processes=ALL) as runtime:
        session = await runtime.session("chat")
        handle = await session.start(plain, {"page": "x"})
        with pytest.raises(ProcessFailed, match="no paper") as caught:
            await handle.result(SOON)
        await until(lambda: len(ear.heard) == 1)

    assert "in deep_inside" in caught.value.outcome["traceback"]
    assert "no paper" in ear.heard[0]
    assert "deep_inside" not in ear.heard[0]


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def endless(n: int) -> int:
    return endless(n + 1) + len(f"{n:0>100}")


def test_traceback_is_bounded_and_its_end_is_kept() -> None:
    error = raised(ValueError("x" * 3 * MAX_TRACEBACK + "the end"))
    text = traceback_text(error)

    assert text.endswith("the end")
    assert text.startswith(f"… (the last {MAX_TRACEBACK:,} of ")
    assert len(text) < MAX_TRACEBACK + 100


def test_traceback_of_an_endless_recursion_is_short() -> None:
    with pytest.raises(RecursionError) as caught:
        endless(0)

    assert len(traceback_text(caught.value)) < MAX_TRACEBACK + 100


def test_traceback_is_text_that_every_store_holds() -> None:
    text = traceback_text(raised(ValueError("half a \ud83e fox and \x00")))

    assert text.encode()
    assert "\x00" not in text


def test_log_line_can_be_written_whatever_the_exception_says(caplog: pytest.LogCaptureFixture) -> None:
    log_raised("it raised", raised(ValueError("half a \ud83e fox")))

    assert caplog.text.encode()
    assert "half a \ufffd fox" in caplog.text
    assert "in raised" in caplog.text


class Hostile(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


def test_exception_that_cannot_be_shown_has_a_traceback_all_the_same() -> None:
    assert "Hostile" in traceback_text(raised(Hostile()))
    assert traceback_text(ValueError("never raised")) == ""
