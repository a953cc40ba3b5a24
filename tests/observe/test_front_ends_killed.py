"""Front end and worker as OS processes of their own, and either of them killed with SIGKILL."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from perdure import Runtime
from perdure.model.event import Gap, TextDelta, TurnCommitted, TurnStarted
from tests.crash.children import Child, folder
from tests.kit import SOON, until
from tests.observe.test_front_ends import watching

__all__ = ["folder"]  # a fixture

pytestmark = [pytest.mark.kill, pytest.mark.slow]


@contextlib.contextmanager
def worker(folder: Path) -> Generator[Child, None, None]:
    """A worker process that is ready."""
    one = Child("tests.observe.speaking_worker", folder)
    try:
        assert one.line().startswith("w-")
        yield one
    finally:
        one.end()


@contextlib.contextmanager
def front_end(folder: Path, *cursor: str) -> Generator[Child, None, None]:
    one = Child("tests.observe.showing_front_end", folder, *cursor)
    try:
        yield one
    finally:
        one.end()


async def told(child: Child) -> tuple[str, str, str]:
    assert child.process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(child.process.stdout.readline), SOON)
    cursor, kind, text = line.rstrip("\n").split("\t")
    return cursor, kind, text


async def test_live_text_comes_from_another_process(folder: Path) -> None:
    with worker(folder):
        async with Runtime(folder / "agent.db") as front:
            session = await front.session("s", agent="speaker")
            async with session.stream("100 50") as turn, asyncio.timeout(SOON):
                text, kinds = "", set()
                async for event in turn:
                    kinds.add(type(event))
                    if isinstance(event, TextDelta):
                        text += event.text
                    if text.endswith("50 "):
                        (folder / "go").touch()  # it speaks on when what it said was seen here

    assert text == "".join(f"{n} " for n in range(100))
    assert kinds == {TurnStarted, TextDelta, TurnCommitted}


async def test_a_worker_that_is_killed_in_mid_stream_is_a_gap_and_the_turn_goes_on(folder: Path) -> None:
    with worker(folder) as first, worker(folder) as second:
        async with Runtime(folder / "agent.db") as front:
            session = await front.session("s", agent="speaker")
            async with watching(front, "s") as reader:
                await session.send("20 9")
                await until(lambda: reader.text.endswith("9 "))
                row = await front.store.session("s")
                assert row is not None
                owner = {each.id: each.pid for each in await front.store.workers()}[row.owner or ""]
                cursor = reader.seen[-1].cursor
                (first if first.pid == owner else second).kill()
                (folder / "go").touch()
                await reader.committed("s.1")
            history = await session.history()
            async with watching(front, "s", cursor) as again:
                await until(lambda: again.seen)

    assert reader.kinds == ["TurnStarted", "TextDelta", "Gap", "TurnStarted", "TextDelta", "TurnCommitted"]
    assert [event.resumed for event in reader.seen if isinstance(event, TurnStarted)] == [False, True]
    whole = "".join(f"{n} " for n in range(20))
    resumed = next(n for n, event in enumerate(reader.seen) if isinstance(event, Gap))
    after = "".join(event.text for event in reader.seen[resumed:] if isinstance(event, TextDelta))
    assert (after, history[-1].text) == (whole, whole)
    assert isinstance(again.seen[0], Gap)  # that cursor is from the middle of what the dead worker said
    assert not os.path.exists(f"{folder}/agent.db-workers/{row.owner}.sock")  # the heir has removed it


async def test_a_front_end_that_is_killed_harms_no_turn_and_the_next_goes_on_from_its_cursor(folder: Path) -> None:
    with worker(folder):
        with front_end(folder) as shown:
            assert (await told(shown))[1] == "ready"
            async with Runtime(folder / "agent.db") as sender:
                await (await sender.session("s", agent="speaker")).send("20 9")
                text = cursor = ""
                while not text.endswith("9 "):
                    cursor, kind, piece = await told(shown)
                    assert kind in ("TurnStarted", "TextDelta")
                    text += piece
            shown.kill()
        (folder / "go").touch()
        with front_end(folder, cursor) as again:
            kind = ""
            while kind != "TurnCommitted":
                cursor, kind, piece = await told(again)
                assert kind in ("ready", "TextDelta", "TurnCommitted")
                text += piece
        # After the turn its cursor is good without the worker, too.
    with worker(folder), front_end(folder, cursor) as later:
        assert (await told(later))[1] == "ready"
        async with Runtime(folder / "agent.db") as sender:
            await (await sender.session("s")).send("1 1")
            kinds = [(await told(later))[1] for _ in range(3)]

    assert text == "".join(f"{n} " for n in range(20))
    assert kinds == ["TurnStarted", "TextDelta", "TurnCommitted"]
