"""A Runtime in trouble: cancelled half-way, on a full disk, with its file or its folder changed underneath."""

import asyncio
import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Runtime, tool
from perdure.engine.lease import LeaseTerms
from perdure.errors import StoreUnavailable
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite.locks import LockFile
from perdure.testing import ScriptedModel
from tests.kit import SOON, Place, TellingModel, agent_calling, texts, until


def ours() -> list[str]:
    """Threads of ours that live."""
    return [t.name for t in threading.enumerate() if t.name.startswith("perdure")]


def descriptors(place: Place) -> list[str]:
    """Files of the store that this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.append(os.readlink(link))
    return sorted(name for name in found if name.startswith(str(place.path)))


# ---------------------------------------------------------------------- cancelled


async def passes(count: int) -> None:
    """So many passes of the event loop; later ones last a little, so that threads come along."""
    for number in range(count):
        await asyncio.sleep(0 if number < 30 else 0.0002)


async def ends(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=SOON)
    assert task.done()


async def test_entering_and_leaving_may_be_cancelled_at_any_moment(file: Place) -> None:
    """Nothing is left behind: no thread, no descriptor, no owner, and what was accepted is worked on."""

    async def use() -> None:
        async with file.runtime(Agent("scripted"), grace=SOON) as runtime:
            await (await runtime.session("s")).send("hello")

    for count in [*range(1, 24), *range(24, 80, 4)]:
        task = asyncio.create_task(use())
        await passes(count)
        await ends(task)
        await until(lambda: not ours() and not descriptors(file))  # a thread finishes what was begun

    async with file.runtime(Agent("scripted")) as runtime:
        assert await runtime.wait_idle(SOON)
        assert [row.id for row in await runtime.store.workers()] == [runtime._worker.id]
        assert await runtime.sessions.list(state="open") == []


async def test_a_second_cancel_while_leaving_leaves_nothing_behind_either(file: Place) -> None:
    model, leaving = TellingModel(), asyncio.Event()

    async def use() -> None:
        async with file.runtime(Agent(model), grace=3600) as runtime:
            await (await runtime.session("s")).send("hello")
            await model.next()
            leaving.set()

    task = asyncio.create_task(use())
    await leaving.wait()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    await ends(task)

    await until(lambda: not ours() and not descriptors(file))


async def test_a_leaving_that_is_cancelled_before_a_thread_is_free_still_closes_the_file(file: Place) -> None:
    loop, gate = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    runtime = file.runtime(Agent("scripted"))
    await runtime.__aenter__()
    busy = loop.run_in_executor(None, gate.wait)
    leaving = asyncio.create_task(runtime.__aexit__(None, None, None))
    await passes(80)

    await ends(leaving)
    gate.set()
    await busy

    await until(lambda: not ours() and not descriptors(file))


# ---------------------------------------------------------------------- a full disk


def fill(runtime: Runtime) -> None:
    """No page more."""
    store: Any = runtime.store
    pages = store._file._connection.execute("PRAGMA page_count").fetchone()[0]
    store._file._connection.execute(f"PRAGMA max_page_count = {pages}")


async def filled(session: Any) -> None:
    """Say things until the disk takes no more."""
    for number in range(1000):
        end = await refusal_of(lambda: session.send(f"{number} " + "x" * 500))  # noqa: B023  # awaited before the next
        if "the disk is full" in end:
            return
    pytest.fail("there was always room")


@pytest.mark.slow
async def test_a_runtime_can_be_left_while_the_disk_is_full(file: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with file.runtime(Agent(TellingModel()), grace=0) as runtime:
        session = await runtime.session("s")
        await session.send("first")
        fill(runtime)
        await filled(session)
        store: Any = runtime.store
        # A worker that leaves gives pages back; here they are taken away from it, so that not even that is written.
        store._file._connection.execute("PRAGMA query_only = 1")

    assert "leaves without a word" in caplog.text
    assert (ours(), descriptors(file)) == ([], [])
    async with file.runtime(Agent("scripted")) as runtime:
        assert (await (await runtime.session("s")).result("s.1")).text == "You said: first"


class Refusing(MemoryStore):
    """A store that takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    async def write(self, write: Any) -> Any:
        raise StoreUnavailable("no space")

    async def close(self) -> None:
        self.closed = True
        await super().close()


async def test_a_runtime_that_cannot_be_entered_closes_what_it_opened() -> None:
    store = Refusing()
    with pytest.raises(StoreUnavailable, match="no space"):
        await Runtime(store, agents=[Agent("scripted")]).__aenter__()

    assert store.closed
    assert ours() == []


# ---------------------------------------------------------------------- the file


BIG = "a line\n" * 20_000


def reporter() -> Agent[str]:
    @tool
    async def report() -> str:
        return BIG

    return agent_calling("report", tools=[report])


async def test_a_host_may_change_its_folder(tmp_path: Path) -> None:
    before, there = Path.cwd(), tmp_path / "elsewhere"
    there.mkdir()
    os.chdir(tmp_path)
    try:
        async with Runtime("agent.db", agents=[reporter()]) as runtime:
            session = await runtime.session("s")
            os.chdir(there)
            result = await session.run("go")
            facts = await runtime.store.facts()
    finally:
        os.chdir(before)

    assert result.text == "done"
    assert facts.nodes == 4
    assert list(there.iterdir()) == []


async def test_a_file_has_one_lock_and_one_folder_of_blobs_whatever_it_is_called(file: Place, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(file.path)
    async with Runtime(link, agents=[reporter()]) as runtime:
        await (await runtime.session("s")).run("go")

    assert [p.name for p in tmp_path.glob("link.db*")] == ["link.db"]
    async with file.runtime() as runtime:
        (call,) = (await (await runtime.session("s")).result("s.1")).tool_calls
        outcome: Any = call.outcome
        assert len(await runtime.store.blobs.get(outcome.whole.digest)) > len(BIG)


Change = Callable[[Path], Any]


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.unlink(),
        lambda path: path.rename(f"{path}-away"),
        lambda path: path.rename(f"{path}-away") and path.write_bytes(b""),
        lambda path: Path(f"{path}-lock").unlink(),
    ],
    ids=["removed", "moved", "replaced", "its lock removed"],
)
async def test_nothing_is_acknowledged_into_a_file_that_is_not_there_any_more(file: Place, change: Change) -> None:
    async with file.runtime(Agent("scripted"), grace=0) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        change(file.path)

        with pytest.raises(StoreUnavailable, match="moved, removed or replaced while it was open"):
            await session.send("two")


async def test_work_goes_on_when_the_file_is_put_back(file: Place) -> None:
    async with file.runtime(Agent("scripted")) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        file.path.rename(f"{file.path}-away")
        with pytest.raises(StoreUnavailable):
            await session.send("lost in between")
        Path(f"{file.path}-away").rename(file.path)
        await session.run("two")

        assert texts(await session.history())[::2] == ["one", "two"]


# ---------------------------------------------------------------------- somebody does not let go


def test_whoever_does_not_let_go_of_the_lock_is_not_waited_for_in_silence(tmp_path: Path) -> None:
    one, other = LockFile(tmp_path / "lock"), LockFile(tmp_path / "lock", wait_seconds=0.02)
    one.hold()
    with pytest.raises(StoreUnavailable, match="another process has held"):
        other.hold()
    one.free()
    other.hold()

    with pytest.raises(StoreUnavailable):
        LockFile(tmp_path / "lock", wait_seconds=0).hold()
    one.close()
    other.close()


async def test_a_host_that_holds_a_write_lock_delays_and_loses_nothing(file: Place) -> None:
    """With a connection of its own, in this process: what is said meanwhile waits for it."""
    async with file.runtime(Agent("scripted")) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        host = sqlite3.connect(file.path, isolation_level=None)
        host.execute("BEGIN IMMEDIATE")
        said = [asyncio.create_task(session.run(f"two {n}")) for n in range(3)]
        done, _ = await asyncio.wait(said, timeout=0.1)
        host.execute("ROLLBACK")
        host.close()

        assert not done
        assert [r.text for r in await asyncio.gather(*said)] == [f"You said: two {n}" for n in range(3)]


# ---------------------------------------------------------------------- the pulse


class Stumbling(MemoryStore):
    """A store that fails in a way of its own when it is first spoken to from a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.beats, self.stumbled = 0, False

    def submit(self, write: Any, done: Any) -> None:
        if not self.stumbled:
            self.stumbled = True
            raise ZeroDivisionError("a bug in the store")
        self.beats += 1
        super().submit(write, done)


async def test_a_fault_in_a_renewal_is_not_the_last_renewal(caplog: pytest.LogCaptureFixture) -> None:
    store = Stumbling()
    async with Runtime(store, agents=[Agent("scripted")], lease=LeaseTerms(term=0.3, renewal=0.05)):
        await until(lambda: store.beats >= 2)

    assert "it is tried again" in caplog.text


# ---------------------------------------------------------------------- what others see at once


async def refusal_of(ask: Callable[[], Awaitable[Any]]) -> str:
    try:
        await ask()
    except StoreUnavailable as error:
        return str(error)
    return "taken"


async def test_all_who_wait_for_a_file_that_is_not_to_be_had_are_told_together(file: Place) -> None:
    """Not one after the other, each after a wait of its own."""
    async with file.runtime(Agent(ScriptedModel([])), grace=0) as runtime:
        sessions = [await runtime.session(f"s{n}") for n in range(20)]
        store: Any = runtime.store
        store._file._lock._wait = 0.2
        other = LockFile(Path(f"{file.path}-lock"))
        other.hold()
        async with asyncio.timeout(SOON):
            ends = await asyncio.gather(*(refusal_of(lambda s=s: s.send("x")) for s in sessions))  # type: ignore[misc]
        other.close()

        assert {end[:26] for end in ends} == {"another process has held /"}
