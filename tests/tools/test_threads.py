"""Threads for sync tools: daemons of our own, as many as there is work at once."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
from collections.abc import AsyncIterator

import pytest

from perdure.tools.invoke import Threads

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    threads = Threads("test-tool")
    yield threads
    threads.close()


async def test_work_runs_on_a_daemon_thread_of_ours(threads: Threads) -> None:
    thread = await threads.run(threading.current_thread)

    assert thread is not threading.current_thread()
    assert thread.daemon
    assert thread.name.startswith("test-tool-")


async def test_work_sees_a_copy_of_the_callers_context(threads: Threads) -> None:
    def work() -> str:
        seen = WHO.get()
        WHO.set("the tool")
        return seen

    WHO.set("the caller")

    assert await threads.run(work) == "the caller"
    assert WHO.get() == "the caller"
    assert await threads.run(work) == "the caller", "a thread used again does not remember"


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), KeyboardInterrupt()], ids=repr)
async def test_whatever_work_raises_reaches_its_caller_alone(threads: Threads, error: BaseException) -> None:
    def work() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        await threads.run(work)

    assert raised.value is error
    assert await threads.run(lambda: "still here") == "still here"


@pytest.mark.parametrize("error", [StopIteration(5), GeneratorExit()], ids=repr)
async def test_what_a_coroutine_cannot_be_told_is_told_in_words(threads: Threads, error: BaseException) -> None:
    def work() -> None:
        raise error

    with pytest.raises(RuntimeError) as raised:
        await threads.run(work)

    assert str(raised.value) == f"the function raised {error!r}"


async def test_all_work_runs_at_once(threads: Threads) -> None:
    # Each waits for all the others: fewer threads than work would never meet.
    together = threading.Barrier(50, timeout=30)

    met = await asyncio.gather(*[threads.run(together.wait) for _ in range(50)])

    assert sorted(met) == list(range(50))


async def test_a_thread_without_work_is_used_again(threads: Threads) -> None:
    seen: list[int] = []
    # A thread says that it is idle a moment after its result is there, hence more than one try.
    while len(set(seen)) == len(seen) < 1_000:
        seen.append(await threads.run(threading.get_ident))

    assert len(set(seen)) < len(seen)


async def test_work_goes_on_when_nobody_waits_for_it(threads: Threads) -> None:
    go, done = threading.Event(), threading.Event()

    def work() -> None:
        go.wait(30)
        done.set()

    future = threads.run(work)
    future.cancel()
    go.set()

    assert await threads.run(lambda: done.wait(30))
    assert future.cancelled()


async def test_a_thread_without_work_goes_after_a_while() -> None:
    threads = Threads("test-idle", idle_seconds=0.001)

    thread = await threads.run(threading.current_thread)
    thread.join(30)

    assert not thread.is_alive()
    assert await threads.run(lambda: "others come") == "others come"


async def test_a_closed_pool_lets_its_threads_go() -> None:
    threads = Threads("test-closing", idle_seconds=3_600)
    go, began = threading.Event(), threading.Event()

    def work() -> threading.Thread:
        began.set()
        go.wait(30)
        return threading.current_thread()

    idle = await threads.run(threading.current_thread)
    busy = threads.run(work)
    began.wait(30)

    threads.close()
    go.set()

    thread = await busy
    for one in (idle, thread):
        one.join(30)
        assert not one.is_alive()


async def test_work_beyond_the_most_threads_waits_for_one_of_them() -> None:
    threads, go = Threads("test-most", idle_seconds=None, most=2), threading.Event()
    # Each piece of work waits for another thread: one thread, however quick, cannot do all of it by itself.
    together = threading.Barrier(2, timeout=30)

    def work() -> threading.Thread:
        go.wait(30)
        together.wait()
        return threading.current_thread()

    running = [threads.run(work) for _ in range(6)]
    started = [thread for thread in threading.enumerate() if thread.name.startswith("test-most-")]
    go.set()
    ran_on = set(await asyncio.gather(*running))
    later = {await threads.run(threading.current_thread) for _ in range(3)}
    threads.close()
    threads.join()

    assert len(started) == 2
    assert ran_on == set(started)
    assert later <= ran_on
    assert not any(thread.is_alive() for thread in ran_on)


def test_a_tool_that_hangs_does_not_keep_the_interpreter() -> None:
    child = """
import asyncio, threading
from perdure.tools.invoke import Threads

async def main():
    began = threading.Event()
    Threads().run(lambda: (began.set(), threading.Event().wait()))
    began.wait()

asyncio.run(main())
print("left")
"""

    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


def test_a_result_that_comes_after_the_loop_has_closed_disturbs_nobody() -> None:
    go = threading.Event()
    threads = Threads("test-late")

    async def main() -> None:
        late.append(threads.run(lambda: go.wait(30)))

    late: list[asyncio.Future[bool]] = []
    asyncio.run(main())
    go.set()
    threads.close()

    for thread in threading.enumerate():
        if thread.name.startswith("test-late"):
            thread.join(30)
            assert not thread.is_alive()


async def test_work_that_cannot_have_a_thread_is_not_run_by_a_later_one() -> None:
    threads, ran = Threads(), list[str]()
    start = threading.Thread.start

    def no_more(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threading.Thread.start = no_more  # type: ignore[method-assign]  # the interpreter's, not ours
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await threads.run(lambda: ran.append("refused"))
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
    await threads.run(lambda: ran.append("taken"))

    assert ran == ["taken"]
    threads.close()
