"""Light writes are committed on the event loop's own thread, and never out of order with those of the writer thread."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from itertools import count, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from perdure.errors import Fenced, StoreUnavailable
from perdure.model.session import Node
from perdure.model.write import Accept, Append, Write
from perdure.stores.sqlite import SqliteStore, group_commit
from perdure.stores.sqlite.database import TICK
from perdure.stores.sqlite.group_commit import (
    LIGHT_BYTES,
    LIGHT_RECORDS,
    LOOP_BATCH,
    STALLS_APART,
    GroupWriter,
    SyncPace,
)
from tests.stores.test_group_commit import Notebook, beat, locked, opened_turn, record

HERE = threading.current_thread().name


class Desk:
    """A writer on a notebook, with the test's own event loop."""

    def __init__(self, notes: Notebook, loop_sync: float) -> None:
        self.notes, self.writer = notes, GroupWriter(notes, "writer", loop_sync)
        self.writer.start(asyncio.get_running_loop())

    async def write(self, *writes: Write[Any]) -> list[Any]:
        """Answers to writes of one pass of the loop."""
        return await asyncio.gather(*(self.writer.write(write) for write in writes), return_exceptions=True)

    @contextlib.contextmanager
    def busy_thread(self) -> Any:
        """The thread is in the middle of a transaction meanwhile."""
        entered, go_on = threading.Event(), threading.Event()

        def wait(applied: str) -> None:
            if applied == "held":
                entered.set()
                assert go_on.wait(30)

        self.notes.on_apply = wait
        self.writer.submit(beat("held"), lambda receipt, error: None)
        assert entered.wait(30)
        try:
            yield
        finally:
            go_on.set()


@contextlib.asynccontextmanager
async def desk_of(notes: Notebook | None = None, loop_sync: float = math.inf) -> AsyncGenerator[Desk]:
    desk = Desk(notes or Notebook(), loop_sync)
    try:
        yield desk
    finally:
        desk.writer.leave_loop()
        await asyncio.to_thread(desk.writer.stop)


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    async with desk_of() as made:
        yield made


def heavy(scope: str, number: int) -> Append:
    """Too large for the loop. Of a scope, as the records of `record` are."""
    light = record(scope, number)
    return Append(light.scope, (Node(number, bytes(LIGHT_BYTES + 1)),), 0)


async def test_the_writes_of_one_pass_share_one_commit_on_the_loops_own_thread(desk: Desk) -> None:
    answers = await desk.write(record("a", 1), record("b", 1), record("a", 2))

    assert answers == ["receipt of a1", "receipt of b1", "receipt of a2"]
    assert desk.notes.commits == [["a1", "b1", "a2"]]
    assert set(desk.notes.threads.values()) == {HERE}


async def test_a_heavy_write_goes_to_the_thread_and_keeps_its_place(desk: Desk) -> None:
    await desk.write(record("a", 1), heavy("a", 2), record("a", 3))

    assert desk.notes.kept == ["a1", "a2", "a3"]
    assert desk.notes.threads["a2"] == "writer"


async def test_a_write_of_many_records_goes_to_the_thread(desk: Desk) -> None:
    light = record("a", 1)
    await desk.write(Append(light.scope, tuple(Node(number, b"1") for number in range(1, LIGHT_RECORDS + 2)), 0))

    assert desk.notes.threads == {"a1": "writer"}


async def test_a_write_that_refers_to_a_blob_goes_to_the_thread(desk: Desk) -> None:
    light = record("a", 1)
    await desk.write(Append(light.scope, light.nodes, 0, blobs=("digest",)))

    assert desk.notes.threads == {"a1": "writer"}


async def test_a_renewal_goes_to_the_thread(desk: Desk) -> None:
    await desk.write(beat("w1"))

    assert desk.notes.threads == {"w1": "writer"}


async def test_the_loop_overtakes_nothing_that_the_thread_is_to_write(desk: Desk) -> None:
    with desk.busy_thread():
        first = asyncio.ensure_future(desk.writer.write(heavy("a", 1)))
        await asyncio.sleep(0)
        second = desk.writer.write(record("a", 2))
        for _ in range(5):
            await asyncio.sleep(0)

        assert desk.notes.kept == [], "the loop neither waits nor writes while the thread is at it"
    await asyncio.gather(first, second)

    assert desk.notes.kept == ["held", "a1", "a2"]


async def test_what_finds_the_file_locked_is_left_to_the_thread(desk: Desk) -> None:
    desk.notes.locked = True
    await desk.write(record("a", 1))
    desk.notes.locked = False
    await desk.write(record("a", 2))

    assert desk.notes.threads == {"a1": "writer", "a2": HERE}


async def test_a_large_batch_is_left_to_the_thread(desk: Desk) -> None:
    await desk.write(*(record("a", number) for number in range(LOOP_BATCH + 1)))

    assert set(desk.notes.threads.values()) == {"writer"}
    assert desk.notes.kept == [f"a{number}" for number in range(LOOP_BATCH + 1)]


async def test_a_refused_write_fails_alone_on_the_loop_too(desk: Desk) -> None:
    desk.notes.refuse = {"a2"}

    answers = await desk.write(record("a", 1), record("a", 2), record("b", 1), record("a", 3))

    assert [type(answer) for answer in answers] == [str, Fenced, str, Fenced]
    assert desk.notes.kept == ["a1", "b1"]
    assert set(desk.notes.threads.values()) == {HERE}


@pytest.mark.parametrize("how", ["fails", "landed and failed"])
async def test_after_a_failed_commit_on_the_loop_the_thread_finds_out_what_landed(desk: Desk, how: str) -> None:
    desk.notes.at_commit = [how]

    answers = await desk.write(record("a", 1), record("b", 1))
    await desk.write(record("a", 2))

    assert answers == ["receipt of a1", "receipt of b1"]
    assert desk.notes.kept == ["a1", "b1", "a2"], "each once"


async def test_a_write_that_breaks_on_the_loop_harms_no_other(desk: Desk) -> None:
    desk.notes.break_on = {"b1": 9}

    answers = await desk.write(record("a", 1), record("b", 1), record("c", 1))

    assert [type(answer) for answer in answers] == [str, StoreUnavailable, str]


class Alarm(BaseException):
    """What a signal handler of a host raises, wherever the main thread is just now."""


async def test_no_write_is_forgotten_when_a_signal_handler_raises_in_the_transaction(desk: Desk) -> None:
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context.get("exception")))

    def alarm(applied: str) -> None:
        if not raised and threading.current_thread().name == HERE:
            raise Alarm

    desk.notes.on_apply = alarm
    answers = await desk.write(record("a", 1), record("b", 1))

    assert answers == ["receipt of a1", "receipt of b1"]
    assert [type(error) for error in raised] == [Alarm]


class Signals:
    """Raises `Alarm` in the writer's code on this thread, at the `number`th place where the interpreter looks for
    signals: after a call, and at the beginning of a function or of a loop's next round."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.came_at = ""
        self._places: dict[CodeType, set[int]] = {}

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != group_commit.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_lasti in self._places_in(frame.f_code):
            self._left -= 1
            if self._left == 0:
                self.came_at = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                sys.settrace(None)
                raise Alarm
        return self.trace

    def _places_in(self, code: CodeType) -> set[int]:
        if code not in self._places:
            found = list(dis.get_instructions(code))
            after = {b.offset for a, b in pairwise(found) if a.opname == "RESUME" or a.opname.startswith("CALL")}
            self._places[code] = after | {each.argval for each in found if each.opname == "JUMP_BACKWARD"}
            if code.co_name == "_flush":  # it has not begun: the event loop may lose any callback so
                self._places[code].remove(min(after))
        return self._places[code]


async def test_no_write_or_lock_is_forgotten_wherever_a_signal_handler_raises() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    number = 0
    for number in count(1):
        async with desk_of() as desk, asyncio.timeout(10):
            signals = Signals(number)
            waiting = [desk.writer.write(write) for write in (record("a", 1), record("b", 1), record("a", 2))]
            sys.settrace(signals.trace)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            sys.settrace(None)

            answers = await asyncio.gather(*waiting)
            assert answers == ["receipt of a1", "receipt of b1", "receipt of a2"], signals.came_at
            assert await desk.write(record("c", 1)) == ["receipt of c1"], signals.came_at
        assert sorted(desk.notes.kept) == ["a1", "a2", "b1", "c1"], signals.came_at
        assert desk.notes.kept.index("a1") < desk.notes.kept.index("a2"), signals.came_at
        if not signals.came_at:
            break
    assert number > 20, "the places are found"


async def test_a_flush_that_a_signal_handler_ended_as_it_began_is_made_up_for_with_the_next_renewal(desk: Desk) -> None:
    came = list[str]()

    def trace(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "_flush":
            sys.settrace(None)
            came.append(frame.f_code.co_name)
            raise Alarm

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    waiting = desk.writer.write(record("a", 1))
    sys.settrace(trace)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    sys.settrace(None)
    assert came == ["_flush"]
    assert not waiting.done()
    desk.writer.submit(record("b", 1), lambda receipt, error: None)

    async with asyncio.timeout(10):
        assert await waiting == "receipt of a1"


async def test_a_cancelled_await_cancels_nothing(desk: Desk) -> None:
    waiting = asyncio.ensure_future(desk.writer.write(record("a", 1)))
    waiting.cancel()
    await desk.write(record("a", 2))

    assert waiting.cancelled()
    assert desk.notes.kept == ["a1", "a2"]


async def test_what_is_collected_when_the_store_is_closed_still_lands() -> None:
    async with desk_of() as desk:
        waiting = desk.writer.write(record("a", 1))

    assert await waiting == "receipt of a1"
    assert desk.notes.threads == {"a1": "writer"}


async def test_another_event_loop_is_served_by_the_thread(desk: Desk) -> None:
    async def write() -> Any:
        return await desk.writer.write(record("b", 1))

    assert await asyncio.to_thread(asyncio.run, write()) == "receipt of b1"
    assert desk.notes.threads == {"b1": "writer"}


class Rested(Notebook):
    """A backend that is due for maintenance from its first write on, and says on which thread that was done."""

    def __init__(self) -> None:
        super().__init__()
        self.rested, self.on = threading.Event(), ""

    def commit(self) -> None:
        super().commit()
        self.is_due = True

    def maintain(self) -> None:
        self.is_due, self.on = False, threading.current_thread().name
        self.rested.set()


async def test_only_the_thread_folds_the_wal() -> None:
    notes = Rested()
    async with desk_of(notes) as desk:
        await desk.write(record("a", 1))

        assert await asyncio.to_thread(notes.rested.wait, 30)
    assert notes.threads == {"a1": HERE}
    assert notes.on == "writer"


# ---------------------------------------------------------------------- how fast the disk is


class Stalling(Notebook):
    """Commits take a fiftieth of a second, so the thread has the writes of the next two seconds."""

    def commit(self) -> None:
        super().commit()
        threading.Event().wait(0.02)


async def test_a_commit_that_stalls_sends_the_next_writes_to_the_thread() -> None:
    async with desk_of(Stalling(), loop_sync=1e-9) as desk:
        await desk.write(record("a", 1))
        await desk.write(record("a", 2))

    assert desk.notes.threads == {"a1": HERE, "a2": "writer"}


async def test_with_a_limit_of_nothing_the_loop_commits_nothing() -> None:
    async with desk_of(loop_sync=0) as desk:
        await desk.write(record("a", 1))

    assert desk.notes.threads == {"a1": "writer"}


def test_after_a_stall_the_loop_tries_again_when_a_hundred_times_as_long_is_over() -> None:
    now = 0.0
    pace = SyncPace(0.002, lambda: now)
    for _ in range(100):
        pace.note(0.0002)
    pace.note(0.05)
    assert not pace.is_fast()

    now = STALLS_APART * 0.05
    assert pace.is_fast()
    pace.note(0.0002)
    assert pace.is_fast(), "the stall is forgotten"


def test_a_single_commit_a_little_over_the_limit_changes_nothing() -> None:
    pace = SyncPace(0.002, lambda: 0.0)
    for took in (0.0002, 0.0002, 0.005, 0.0002):
        pace.note(took)

    assert pace.is_fast()


# ---------------------------------------------------------------------- real SQLite


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "agent.db", math.inf)
    await store.open()
    yield store
    await store.close()


async def test_the_loop_goes_on_while_another_process_holds_the_lock(store: SqliteStore) -> None:
    scope = await opened_turn(store, "a")
    with locked(store.path):
        waiting = asyncio.ensure_future(store.write(Append(scope, (Node(1, b"one"),), 2)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
    await waiting

    assert await store.nodes(scope.sid, 1, 1) == [(1, 0, b"said"), (1, 1, b"one")]


async def test_the_loop_goes_on_while_another_program_is_in_a_transaction(store: SqliteStore) -> None:
    scope = await opened_turn(store, "a")
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as foreign:
        foreign.execute("BEGIN IMMEDIATE")
        waiting = asyncio.ensure_future(store.write(Append(scope, (Node(1, b"one"),), 2)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        foreign.execute("COMMIT")
        await waiting

    await store.write(Append(scope, (Node(2, b"two"),), 3))
    assert await store.nodes(scope.sid, 1, 1) == [(1, 0, b"said"), (1, 1, b"one"), (1, 2, b"two")]


async def test_a_backup_made_meanwhile_holds_whole_transactions(store: SqliteStore, tmp_path: Path) -> None:
    scope = await opened_turn(store, "a")
    copying = asyncio.ensure_future(store.backup(str(tmp_path / "copy.db"), lambda done, whole: None))
    for number in range(1, 40):
        await store.write(Append(scope, (Node(number, b"record"),), 2))
    await copying

    copy = SqliteStore(tmp_path / "copy.db")
    await copy.open()
    row = await copy.session("a")
    assert row is not None
    found = [ordinal for _, ordinal, _ in await copy.nodes(row.sid, 1, 1)]
    assert found == list(range(len(found)))
    await copy.close()


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-lock"])
@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
@pytest.mark.parametrize("loop_sync", [math.inf, 0.0], ids=["loop", "thread"])
async def test_a_file_that_loses_its_name_is_noticed_after_a_long_quiet(
    tmp_path: Path, suffix: str, how: str, loop_sync: float
) -> None:
    """The folder has not changed for long, so that it alone is looked at; then it has."""
    path = tmp_path / "agent.db"
    store = SqliteStore(path, loop_sync)
    await store.open()
    scope, number = await opened_turn(store, "a"), 1
    while time.time_ns() - os.stat(tmp_path).st_ctime_ns <= 2 * TICK:
        await store.write(Append(scope, (Node(number, b"quiet"),), 2))
        number += 1
    await store.write(Append(scope, (Node(number, b"quiet"),), 2))

    file = Path(f"{path}{suffix}")
    if how == "removed":
        file.unlink()
    elif how == "moved":
        file.rename(tmp_path / "elsewhere")
    else:
        shutil.copy(file, tmp_path / "copy")
        (tmp_path / "copy").rename(file)

    with pytest.raises(StoreUnavailable, match="moved, removed or replaced while it was open"):
        await store.write(Append(scope, (Node(number + 1, b"late"),), 2))
    await store.close()


FORK = """
import asyncio, math, os, sys
from perdure.errors import StoreInherited
from perdure.model.write import Accept
from perdure.stores.sqlite import SqliteStore

async def main():
    store = SqliteStore(sys.argv[1], math.inf)
    await store.open()
    waiting = asyncio.ensure_future(store.write(Accept("s", "clerk", b"said", "op", 1)))
    await asyncio.sleep(0)  # it is collected now, and not committed
    child = os.fork()
    try:
        await waiting
        written = True
    except StoreInherited:
        written = False
    if child == 0:
        os._exit(7 if not written else 1)
    assert written
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    await store.close()

asyncio.run(main())
"""


def test_what_was_collected_before_a_fork_is_written_by_the_parent_alone(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, str(path)], env=os.environ, capture_output=True, timeout=60
    )

    assert ran.returncode == 0, ran.stderr.decode()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM nodes").fetchone() == (1,)


async def test_writes_of_many_tasks_land_in_the_order_of_each(store: SqliteStore) -> None:
    """Light and heavy ones in turn, so that the order is kept between both ways to commit."""
    scopes = [await opened_turn(store, f"s{n}") for n in range(6)]

    async def append_all(scope: Any) -> None:
        for number in range(1, 20):
            body = bytes(LIGHT_BYTES + 1) if (number + scope.sid) % 5 == 0 else b"light"
            await store.write(Append(scope, (Node(number, body),), 2))

    await asyncio.gather(*map(append_all, scopes))

    for scope in scopes:
        assert [ordinal for _, ordinal, _ in await store.nodes(scope.sid, 1, 1)] == list(range(20))


async def test_an_input_is_accepted_on_the_loop_and_read_back(store: SqliteStore) -> None:
    before = store.batches
    accepted = await asyncio.gather(*(store.write(Accept(f"s{n}", "a", b"x", f"op{n}", 1)) for n in range(50)))

    assert store.batches == before + 1
    assert [r.row.id for r in accepted] == [f"s{n}" for n in range(50)]
