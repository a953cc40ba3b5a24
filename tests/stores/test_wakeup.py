"""A wake-up is received on its loop, also what was sent just before it was closed."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest

from perdure.stores.sqlite import group_commit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no eventfd")


async def test_news_from_a_thread_are_heard_in_order_on_the_loop() -> None:
    heard: list[tuple[int, str]] = []
    enough = asyncio.Event()

    def hear(news: int) -> None:
        heard.append((news, threading.current_thread().name))
        if news == 99:
            enough.set()

    hung = group_commit.Wakeup(asyncio.get_running_loop(), hear)

    def ring_often() -> None:
        for number in range(100):
            hung.send(number)
        hung.close()

    ringer = threading.Thread(target=ring_often)
    ringer.start()
    await asyncio.wait_for(enough.wait(), 30)
    ringer.join()
    assert heard == [(n, threading.current_thread().name) for n in range(100)]


async def test_what_was_rung_before_the_end_is_heard_and_the_descriptor_goes() -> None:
    heard: list[str] = []
    before = len(os.listdir("/proc/self/fd"))
    hung = group_commit.wakeup_of(asyncio.get_running_loop(), heard.append)
    assert hung is not None
    hung.send("last words")
    hung.close()
    await asyncio.sleep(0)
    assert heard == ["last words"]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_loop_that_is_gone_leaves_no_descriptor_behind() -> None:
    loop = asyncio.new_event_loop()
    before = len(os.listdir("/proc/self/fd"))
    hung = group_commit.wakeup_of(loop, print)
    assert hung is not None
    loop.close()
    hung.send("to nobody")
    hung.close()
    assert len(os.listdir("/proc/self/fd")) < before


async def test_news_that_there_is_no_memory_for_are_heard_in_the_next_pass() -> None:
    heard: list[int] = []
    lacks, enough = [MemoryError(), MemoryError()], asyncio.Event()

    def hear(news: int) -> None:
        if news == 1 and lacks:
            raise lacks.pop()
        heard.append(news)
        if news == 2:
            enough.set()

    hung = group_commit.Wakeup(asyncio.get_running_loop(), hear)
    for number in range(3):
        hung.send(number)
    await asyncio.wait_for(enough.wait(), 30)
    hung.close()
    await asyncio.sleep(0)
    assert heard == [0, 1, 2]
