"""Tasks with an owner: a fault ends one of them, is written down, and harms no neighbour."""

import asyncio

import pytest

from perdure.engine.runner import Supervisor


async def test_a_fault_ends_its_task_only_and_is_written_down(caplog: pytest.LogCaptureFixture) -> None:
    supervisor, go = Supervisor(), asyncio.Event()
    done = []

    async def fail() -> None:
        raise ZeroDivisionError("a bug")

    async def work() -> None:
        await go.wait()
        done.append("worked")

    tasks = [supervisor.spawn(fail(), "the faulty one"), supervisor.spawn(work(), "its neighbour")]
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert [task.done() for task in tasks] == [True, False]
    assert len(supervisor) == 1
    assert "the faulty one ended by a fault of ours" in caplog.text
    assert "ZeroDivisionError: a bug" in caplog.text
    go.set()
    assert await supervisor.finish(None)
    assert done == ["worked"]


async def test_finishing_gives_up_in_time_and_cancels_nobody() -> None:
    supervisor, go = Supervisor(), asyncio.Event()

    async def work() -> None:
        await go.wait()

    task = supervisor.spawn(work(), "slow")

    assert not await supervisor.finish(0)
    assert not task.done()
    go.set()
    assert await supervisor.finish(None)


async def test_whoever_spawns_is_not_cancelled_with_it_and_stopping_waits_for_the_end() -> None:
    supervisor = Supervisor()
    ends = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ends.append("tidied up")

    task = supervisor.spawn(work(), "tidy")
    await asyncio.sleep(0)
    await supervisor.stop()

    assert task.cancelled()
    assert ends == ["tidied up"]
    assert len(supervisor) == 0


async def test_a_task_that_ignores_its_cancellation_is_named_and_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    supervisor, go = Supervisor(), asyncio.Event()

    async def stubborn() -> None:
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue

    task = supervisor.spawn(stubborn(), "the stubborn one")
    await asyncio.sleep(0)
    await supervisor.stop()

    assert "the stubborn one does not end when it is cancelled" in caplog.text
    go.set()
    await asyncio.wait({task})
