"""The rules of the writer, one by one: with a scripted backend, then with real SQLite."""

import asyncio
import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import Fenced, InvalidInput, PerdureError, StoreUnavailable
from perdure.model.process import Registration
from perdure.model.session import Node, WaitRow, WorkerRow
from perdure.model.write import (
    Accept,
    Accepted,
    Advance,
    Append,
    Appended,
    Beat,
    Branch,
    Claim,
    Claimed,
    Commit,
    Committed,
    ProcessRef,
    ProcessScope,
    Register,
    Release,
    Released,
    SessionRef,
    TurnScope,
    Write,
)
from perdure.stores.blobs import FileBlobs
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite.database import WriterFile
from perdure.stores.sqlite.group_commit import MAINTENANCE_BATCHES, GroupWriter


def record(scope: str, number: int) -> Append:
    """The `number`th record of a scope."""
    return Append(TurnScope(scope, ord(scope), 1, "w1", 1), (Node(number, b"%d" % number),), 0)


def beat(worker: str, number: int = 0) -> Beat:
    return Beat(WorkerRow(worker, "here", "boot", 1, 0, number))


def name(write: Write[Any]) -> str:
    """`a2` for the second record of scope a, and the worker's id for a beat."""
    if isinstance(write, Append):
        return f"{write.scope.session_id}{write.nodes[0].ordinal}"
    assert isinstance(write, Beat)
    return write.worker.id


class Notebook:
    """A backend that writes names down. `refuse` and `break_on` act on writes by name, `at_commit` on whole commits."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.commits: list[list[str]] = []
        self.maintained = 0
        self.refuse: set[str] = set()
        self.break_on: dict[str, int] = {}
        self.at_commit: list[str] = []
        self.rollback_fails = 0
        self.is_due = self.locked = False
        self.threads: dict[str, str] = {}
        self.on_apply: Callable[[str], None] = lambda name: None
        self._open: list[str] = []

    def begin(self) -> None:
        self._open = []

    def begin_nowait(self) -> bool:
        self._open = []
        return not self.locked

    def apply(self, write: Write[Any]) -> Any:
        self.on_apply(name(write))
        if name(write) in self.refuse:
            raise Fenced(name(write), 1)
        if self.break_on.get(name(write), 0) > 0:
            self.break_on[name(write)] -= 1
            raise OSError("the disk coughs")
        self._open.append(name(write))
        self.threads[name(write)] = threading.current_thread().name
        return f"receipt of {name(write)}"

    def commit(self) -> None:
        what = self.at_commit.pop(0) if self.at_commit else "works"
        if what != "fails":
            self.kept += self._open
            self.commits.append(self._open)
        self._open = []
        if what != "works":
            raise OSError(f"COMMIT {what}")

    def rollback(self) -> None:
        self._open = []
        if self.rollback_fails:
            self.rollback_fails -= 1
            raise OSError("ROLLBACK fails")

    def applied(self, write: Write[Any]) -> Any | None:
        return f"receipt of {name(write)}" if name(write) in self.kept else None

    def mapped(self, error: Exception) -> PerdureError:
        return StoreUnavailable(str(error))

    def maintenance_due(self) -> bool:
        return self.is_due

    def maintain(self) -> None:
        self.maintained += 1


class Desk:
    """A writer on a notebook. What is submitted while the `held` write is being applied makes up the next batch."""

    def __init__(self, notes: Notebook | None = None) -> None:
        self.notes = Notebook() if notes is None else notes
        self.writer = GroupWriter(self.notes, "writer")
        self.answers: dict[str, object] = {}
        self._entered, self._go_on = threading.Event(), threading.Event()

    def submit(self, write: Write[Any]) -> None:
        def done(receipt: Any, error: BaseException | None) -> None:
            self.answers[name(write)] = receipt if error is None else type(error)

        self.writer.submit(write, done)

    def batch(self, *writes: Write[Any]) -> None:
        """These and nothing else in one batch, written when this returns."""
        hold = self.notes.on_apply

        def wait(applied: str) -> None:
            if applied == "held":
                self._entered.set()
                assert self._go_on.wait(30)

        self.notes.on_apply = wait
        self.writer.submit(beat("held"), lambda receipt, error: None)
        assert self._entered.wait(30)
        self.notes.on_apply = hold
        for write in writes:
            self.submit(write)
        self._go_on.set()
        self.settle()
        self._entered.clear()
        self._go_on.clear()

    def settle(self) -> None:
        """Until the writer has done everything submitted so far."""
        through = threading.Event()
        self.writer.submit(beat("last"), lambda receipt, error: through.set())
        assert through.wait(30)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    desk.writer.start()
    yield desk
    desk.writer.stop()


# ---------------------------------------------------------------------- a scripted backend


def test_everything_that_waits_shares_one_commit_in_the_order_it_came(desk: Desk) -> None:
    writes = [record(scope, number) for number in range(40) for scope in "ab"]

    desk.batch(*writes)

    in_order = [name(write) for write in writes]
    assert desk.notes.commits[1][: len(in_order)] == in_order
    assert desk.answers == {n: f"receipt of {n}" for n in in_order}


def test_a_refused_write_takes_the_later_ones_of_its_scope_with_it_and_nobody_else(desk: Desk) -> None:
    desk.notes.refuse = {"a2"}

    desk.batch(record("a", 1), record("a", 2), record("b", 1), record("a", 3), beat("w"), record("b", 2))

    assert {n for n in desk.answers if desk.answers[n] == f"receipt of {n}"} == {"a1", "b1", "w", "b2"}
    assert desk.answers["a2"] is Fenced
    assert desk.answers["a3"] is Fenced, "it is told why, and not that something is wrong here"
    assert [n for n in desk.notes.kept if n not in ("held", "last")] == ["a1", "b1", "w", "b2"]


def test_a_scope_goes_on_in_the_next_batch(desk: Desk) -> None:
    desk.notes.refuse = {"a1"}
    desk.batch(record("a", 1), record("a", 2))
    desk.batch(record("a", 3))

    assert desk.answers == {"a1": Fenced, "a2": Fenced, "a3": "receipt of a3"}


def test_writes_from_outside_are_scopes_of_their_own(desk: Desk) -> None:
    desk.notes.refuse = {"w1"}
    desk.batch(beat("w1"), beat("w2"), beat("w3"))

    assert desk.answers == {"w1": Fenced, "w2": "receipt of w2", "w3": "receipt of w3"}


def test_after_a_failed_statement_each_write_is_sent_again_alone(desk: Desk) -> None:
    desk.notes.break_on = {"b1": 1}

    desk.batch(record("a", 1), record("b", 1), record("c", 1))

    assert [c for c in desk.notes.commits if c[0] in ("a1", "b1", "c1")] == [["a1"], ["b1"], ["c1"]]
    assert desk.answers == {n: f"receipt of {n}" for n in ("a1", "b1", "c1")}


def test_a_write_that_keeps_failing_fails_alone_with_a_typed_error(desk: Desk) -> None:
    desk.notes.break_on = {"b1": 9}

    desk.batch(record("a", 1), record("b", 1), record("b", 2), record("c", 1))

    failed = StoreUnavailable  # for both: a scope that is told so stalls, and sends them again
    assert desk.answers == {"a1": "receipt of a1", "b1": failed, "b2": failed, "c1": "receipt of c1"}
    assert "b2" not in desk.notes.kept, "it was made in the belief that the one before would land"


def test_after_a_failed_commit_each_write_is_sent_again_alone(desk: Desk) -> None:
    desk.notes.at_commit = ["works", "fails"]

    desk.batch(record("a", 1), record("b", 1))

    assert [c for c in desk.notes.commits if c[0] in ("a1", "b1")] == [["a1"], ["b1"]]
    assert desk.answers == {"a1": "receipt of a1", "b1": "receipt of b1"}


def test_a_commit_that_landed_after_all_is_read_back_and_not_applied_again(desk: Desk) -> None:
    desk.notes.at_commit = ["works", "landed and failed"]

    desk.batch(record("a", 1), record("b", 1))

    assert sorted(n for n in desk.notes.kept if n in ("a1", "b1")) == ["a1", "b1"]
    assert desk.answers == {"a1": "receipt of a1", "b1": "receipt of b1"}


def test_the_writer_outlives_a_rollback_that_fails(desk: Desk) -> None:
    desk.notes.at_commit = ["works", "fails"]
    desk.notes.rollback_fails = 1
    desk.batch(record("a", 1), record("b", 1))
    desk.batch(record("a", 2))

    assert desk.answers == {"a1": StoreUnavailable, "b1": StoreUnavailable, "a2": "receipt of a2"}


class OutOfMemory(Notebook):
    """A backend without memory, also in what handles its errors."""

    def commit(self) -> None:
        if self.at_commit == ["fails"]:
            raise MemoryError
        super().commit()

    def mapped(self, error: Exception) -> PerdureError:
        self.at_commit = []
        raise MemoryError

    def maintain(self) -> None:
        super().maintain()
        raise MemoryError


def test_the_writer_outlives_a_lack_of_memory_and_tells_everybody() -> None:
    notes = OutOfMemory()
    desk = Desk(notes)
    desk.writer.start()
    try:
        notes.at_commit = ["works", "fails"]
        desk.batch(record("a", 1), record("b", 1))
        notes.is_due = True
        desk.batch(record("a", 2))
    finally:
        desk.writer.stop()

    assert desk.answers == {"a1": StoreUnavailable, "b1": StoreUnavailable, "a2": "receipt of a2"}
    assert notes.maintained > 0


def test_the_writer_outlives_a_caller_that_cannot_bear_its_answer(desk: Desk) -> None:
    def done(receipt: Any, error: BaseException | None) -> None:
        raise ValueError(receipt)

    desk.writer.submit(beat("w1"), done)
    desk.batch(beat("w2"))

    assert desk.answers == {"w2": "receipt of w2"}


def test_maintenance_that_is_due_is_done_even_where_a_write_always_waits(desk: Desk) -> None:
    """Each write brings the next one along, so the queue is never empty."""
    maintained: list[int] = []
    through = threading.Event()

    def one_more(applied: str) -> None:
        maintained.append(desk.notes.maintained)
        if len(maintained) < 2 * MAINTENANCE_BATCHES:
            desk.submit(beat(f"w{len(maintained)}"))
        else:
            through.set()

    desk.notes.is_due, desk.notes.on_apply = True, one_more
    desk.submit(beat("first"))
    assert through.wait(30)

    assert (maintained[0], maintained[MAINTENANCE_BATCHES - 1], maintained[-1]) == (0, 0, 1)


async def test_a_cancelled_await_cancels_nothing(desk: Desk) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold(applied: str) -> None:
        entered.set()
        assert go_on.wait(30)

    desk.notes.on_apply = hold
    task = asyncio.ensure_future(desk.writer.write(record("a", 1)))
    await asyncio.to_thread(entered.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await asyncio.to_thread(desk.settle)

    assert desk.notes.kept[0] == "a1"


def test_many_event_loops_write_at_once_and_each_hears_of_its_own(desk: Desk) -> None:
    heard: dict[int, list[str]] = {}

    async def write_all(loop: int) -> None:
        heard[loop] = await asyncio.gather(*[desk.writer.write(beat(f"{loop}-{n}")) for n in range(50)])

    threads = [threading.Thread(target=asyncio.run, args=(write_all(loop),)) for loop in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert heard == {loop: [f"receipt of {loop}-{n}" for n in range(50)] for loop in range(4)}


def test_a_loop_that_was_closed_meanwhile_harms_nobody(desk: Desk) -> None:
    async def ask_and_leave() -> None:
        asked.append(desk.writer.write(beat("gone")))

    asked: list[asyncio.Future[Any]] = []
    left = threading.Event()

    def until_it_left(applied: str) -> None:
        assert left.wait(30)

    desk.notes.on_apply = until_it_left
    asyncio.run(ask_and_leave())
    left.set()
    desk.batch(beat("w1"))

    assert desk.answers == {"w1": "receipt of w1"}
    assert "gone" in desk.notes.kept


async def test_a_submitted_write_is_answered_while_the_event_loop_is_blocked(desk: Desk) -> None:
    answered = threading.Event()
    desk.writer.submit(beat("w1"), lambda receipt, error: answered.set())

    assert answered.wait(30), "this very wait blocks the loop"


# ---------------------------------------------------------------------- real SQLite


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold what every writer of the file needs, from outside."""
    descriptor = os.open(f"{path}-lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


@pytest.fixture
async def store(tmp_path: Path) -> Any:
    store = SqliteStore(tmp_path / "agent.db")
    await store.open()
    yield store
    await store.close()


async def opened_turn(store: SqliteStore, session_id: str) -> TurnScope:
    accepted = await store.write(Accept(session_id, "clerk", b"said", f"op-{session_id}", 1, worker="w1"))
    return TurnScope(session_id, accepted.row.sid, 1, "w1", 1)


async def together(store: SqliteStore, *writes: Write[Any]) -> list[Any]:
    """Answers to writes that went into one transaction, but for the first, which waited for the lock alone."""
    with locked(store.path):
        tasks = [asyncio.ensure_future(store.write(write)) for write in (beat("held"), *writes)]
        await asyncio.sleep(0)
    return (await asyncio.gather(*tasks, return_exceptions=True))[1:]


async def test_two_hundred_sessions_share_two_transactions(store: SqliteStore) -> None:
    before = store.batches

    with locked(store.path):
        accepts = [Accept(f"s{n}", "clerk", b"said", f"op{n}", 1) for n in range(200)]
        tasks = [asyncio.ensure_future(store.write(accept)) for accept in accepts]
        await asyncio.sleep(0)
    receipts = await asyncio.gather(*tasks)

    assert [r.row.id for r in receipts] == [f"s{n}" for n in range(200)]
    assert store.batches - before <= 2


async def test_a_relieved_owner_among_others_fails_alone(store: SqliteStore) -> None:
    first, second = await opened_turn(store, "a"), await opened_turn(store, "b")
    await store.write(Claim(SessionRef("a"), "w2", 1, 2))

    answers = await together(
        store,
        Append(first, (Node(1, b"late"),), 3),
        Append(second, (Node(1, b"one"),), 3),
        Append(first, (Node(2, b"later still"),), 3),
        Append(second, (Node(2, b"two"),), 3),
    )

    assert [type(a) for a in answers] == [Fenced, Appended, Fenced, Appended]
    assert await store.nodes(first.sid, 1, 1) == [(1, 0, b"said")]
    assert await store.nodes(second.sid, 1, 1) == [(1, 0, b"said"), (1, 1, b"one"), (1, 2, b"two")]


async def test_a_relieved_owner_that_lets_go_of_a_process_is_told_that_it_was_relieved(store: SqliteStore) -> None:
    row = (await store.write(Register(Registration("p", "function", "rerunnable"), 1, "w1"))).row
    scope = ProcessScope("p", row.pid, "w1", row.generation)
    assert (await store.write(Claim(ProcessRef("p"), "w2", row.generation, 2, "dead"))).won

    answers = await together(store, Advance(scope, 3, first=True), Release(scope, 3))

    assert [type(a) for a in answers] == [Fenced, Fenced]


async def test_a_full_disk_fails_what_does_not_fit_and_nothing_else(store: SqliteStore) -> None:
    scopes = [await opened_turn(store, name) for name in "abc"]
    assert store._file is not None
    connection = store._file._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 8}")

    small, large, other = await together(
        store,
        Append(scopes[0], (Node(1, b"small"),), 2),
        Append(scopes[1], (Node(1, bytes(64 * 1024)),), 2),
        Append(scopes[2], (Node(1, b"small too"),), 2),
    )

    assert isinstance(small, Appended)
    assert isinstance(other, Appended)
    assert isinstance(large, StoreUnavailable)
    assert "disk is full" in str(large)
    assert await store.nodes(scopes[1].sid, 1, 1) == [(1, 0, b"said")]
    connection.execute("PRAGMA max_page_count = 1000000")
    assert await store.write(Append(scopes[1], (Node(1, bytes(64 * 1024)),), 3)) == Appended()


class LosesReplies:
    """A real file whose every commit lands, and once in a while says that it did not."""

    def __init__(self, file: WriterFile) -> None:
        self._file = file
        self.lose = False

    def commit(self) -> None:
        self._file.commit()
        if self.lose:
            self.lose = False
            raise OSError("the reply was lost")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.fixture
def lossy(tmp_path: Path) -> Iterator[tuple[LosesReplies, GroupWriter]]:
    backend: Any = LosesReplies(WriterFile(tmp_path / "agent.db", FileBlobs(tmp_path / "blobs")))
    writer = GroupWriter(backend, "writer")
    writer.start()
    yield backend, writer
    writer.stop()
    backend.close()


SCOPE = TurnScope("s", 1, 1, "w1", 1)
WAIT = WaitRow("wait", 1, 1, "1.0", "approval")
ACCEPT = Accept("s", "clerk", b"said op1", "op1", 1, worker="w1")


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (Accept("s", "clerk", b"said op2", "op2", 2), Accepted),
        (Accept("s", "clerk", b"said op3", "op3", 2, key="k", digest=b"d"), Accepted),
        (Claim(SessionRef("s"), "w2", 1, 2), Claimed),
        (Append(SCOPE, (Node(1, b"one"),), 2), Appended),
        (Append(SCOPE, (Node(1, b"one"),), 2, waits=(WAIT,), park=("wait",)), Appended),
        (Commit(SCOPE, (Node(1, b"closed"),), 0, 2), Committed),
        (Release(SCOPE, 2), Released),
        (Release(SCOPE, 2, stuck="a bug"), Released),
        (Branch("t", "clerk", "s", 1, 0, 2), None),
    ],
    ids=["accept", "keyed accept", "claim", "append", "park", "commit", "release", "stuck", "branch"],
)
async def test_a_write_whose_reply_was_lost_is_recognised_and_answered_as_the_first_time(
    tmp_path: Path, lossy: tuple[LosesReplies, GroupWriter], write: Write[Any], expected: type | None
) -> None:
    backend, writer = lossy
    undisturbed = SqliteStore(tmp_path / "undisturbed.db")
    await undisturbed.open()
    await undisturbed.write(ACCEPT)
    await writer.write(ACCEPT)

    backend.lose = True
    answer = await writer.write(write)

    assert not backend.lose, "the reply was not lost"
    assert answer == await undisturbed.write(write)
    assert expected is None or isinstance(answer, expected)
    again = SqliteStore(tmp_path / "agent.db")
    await again.open()
    assert await again.session("s") == await undisturbed.session("s")
    assert await again.nodes(1, 1, 9) == await undisturbed.nodes(1, 1, 9)
    await again.close()
    await undisturbed.close()


async def test_the_same_input_without_a_key_is_a_second_input_when_its_first_reply_came(
    lossy: tuple[LosesReplies, GroupWriter],
) -> None:
    """Only a lost reply makes it the same one: who asks twice without a key is heard twice."""
    _, writer = lossy

    first, second = await writer.write(ACCEPT), await writer.write(ACCEPT)

    assert (first.turn, second.turn) == (1, 2)


async def test_a_write_beyond_the_limits_of_the_file_leaves_nothing_behind(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "agent.db")
    await store.open()
    accepted = await store.write(Accept("s", "a", b"{}", "op", 1, worker="w"))
    scope = TurnScope("s", accepted.row.sid, 1, "w", accepted.row.generation)
    wait = WaitRow("s.1.1.0:approval", accepted.row.sid, 1, "1.0", "approval")

    with pytest.raises(InvalidInput, match="in another turn"):
        await store.write(Append(scope, (Node(1, b"1"), Node(2**16, b"2")), 2, waits=(wait,)))

    assert await store.nodes(accepted.row.sid, 1, 1) == [(1, 0, b"{}")]
    assert await store.waits() == []
    await store.close()
