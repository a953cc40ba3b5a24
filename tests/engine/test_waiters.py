"""One table of futures for everything that tasks of a Runtime wait for."""

from __future__ import annotations

import asyncio

import pytest

from perdure.engine.waiters import CurrentWork, Waiters


async def test_every_waiter_of_a_part_gets_the_result_and_no_other_does() -> None:
    waiters: Waiters[int, str] = Waiters()
    first, second, other = waiters.expect("s", 1), waiters.expect("s", 1), waiters.expect("s", 2)
    waiters.resolve("s", 1, "done")

    assert (await first, await second, other.done()) == ("done", "done", False)
    assert waiters.parts("s") == [2]


async def test_a_waiter_that_was_cancelled_keeps_the_others_from_nothing() -> None:
    waiters: Waiters[int, str] = Waiters()
    gone, there = waiters.expect("s", 1), waiters.expect("s", 1)
    gone.cancel()
    waiters.withdraw("s", 1, gone)
    waiters.resolve("s", 1, "done")

    assert await there == "done"
    assert "s" not in waiters


async def test_an_error_reaches_its_waiter_and_none_that_is_left_unread_is_complained_of() -> None:
    waiters: Waiters[int, str] = Waiters()
    read, unread = waiters.expect("s", 1), waiters.expect("s", 1)
    waiters.resolve("s", 1, ValueError("gone"))
    waiters.withdraw("s", 1, unread)

    with pytest.raises(ValueError, match="gone"):
        await read


async def test_only_what_work_waits_for_is_needed_and_only_as_long_as_it_does() -> None:
    waiters: Waiters[int, str] = Waiters()
    _ = waiters.expect("host", 1)
    needed = list[object]()

    async def work() -> None:
        CurrentWork("w", ("s", 1)).begin()
        future = waiters.expect("s", 1)
        needed.append(waiters.needed)
        await future

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    waiters.resolve("s", 1, "done")
    await task

    assert needed == [{("s", 1)}]
    assert waiters.needed == set()


async def test_whoever_still_waits_when_it_is_closed_is_told_why() -> None:
    waiters: Waiters[int, str] = Waiters()
    left = waiters.expect("s", 1)
    waiters.close(lambda name: RuntimeError(f"{name} was left"))

    with pytest.raises(RuntimeError, match="s was left"):
        await left
    assert list(waiters) == []
