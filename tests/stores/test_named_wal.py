"""What is acknowledged is in a WAL that has a name.

Closing any descriptor of a file drops the POSIX locks that this process has on it, and so those of SQLite: a host that
reads its own database file makes the next reader of another process take itself for the last one.
"""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from perdure.errors import StoreDamaged
from perdure.stores.sqlite import SqliteStore
from tests.stores.test_sqlite_file import ROOT, integrity, opened

LOOK = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT count(*) FROM nodes'); c.close()"
READERS = {
    "sqlite3": [sys.executable, "-c", LOOK],
    "perdure sessions": [sys.executable, "-m", "perdure", "sessions", "--store"],
}


class Host:
    """A process that has a store open and does what it is told."""

    def __init__(self, path: Path, *options: str) -> None:
        self.path = path
        command = [sys.executable, "-m", "tests.stores.obedient", str(path), *options]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def does(self, *words: str) -> list[str]:
        """Tell it to do these, one after the other, and hear how each went."""
        assert self.process.stdin is not None
        answers = []
        for word in words:
            self.process.stdin.write(f"{word}\n")
            self.process.stdin.flush()
            answers.append(self._answer())
        return answers

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)
        assert self.process.returncode == -signal.SIGKILL


@contextlib.contextmanager
def hosting(path: Path, *options: str) -> Generator[Host]:
    path.parent.mkdir(exist_ok=True)
    host = Host(path, *options)
    try:
        yield host
    finally:
        host.process.kill()
        host.process.communicate(timeout=60)


def reader(path: Path, name: str = "sqlite3") -> None:
    """Another process opens the file, reads and leaves."""
    subprocess.run([*READERS[name], str(path)], cwd=ROOT, check=True, capture_output=True, timeout=60)


async def history(path: Path) -> list[bytes]:
    """What each committed turn of session "s" said; the file is whole."""
    async with opened(path) as store:
        row = await store.session("s")
        nodes = [] if row is None else await store.nodes(row.sid, 1, row.head)
    assert integrity(path) == "ok"
    return [body for _, ordinal, body in nodes if ordinal == 1]


def said(last: int) -> list[bytes]:
    return [b"%d" % number for number in range(1, last + 1)]


@pytest.mark.kill
@pytest.mark.parametrize("reading", READERS)
@pytest.mark.parametrize("how", ["read", pytest.param("copy", marks=pytest.mark.gate)])
async def test_turns_survive_a_kill_after_the_host_read_its_own_file(tmp_path: Path, how: str, reading: str) -> None:
    path = tmp_path / "store" / "agent.db"
    with hosting(path) as host:
        assert host.does("turn", how) == ["1", "done"]
        reader(path, reading)
        assert Path(f"{path}-wal").exists()

        assert host.does("turn", "turn", how, "turn") == ["2", "3", "done", "4"]
        reader(path, reading)
        assert host.does("turn") == ["5"]
        host.kill()

    assert await history(path) == said(5)


@pytest.mark.kill
@pytest.mark.parametrize("other", ["fork", "another\none less"])
async def test_the_wal_keeps_its_name_whatever_else_the_process_does(tmp_path: Path, other: str) -> None:
    """Children that are forked, and further stores on the same file, come and go."""
    path = tmp_path / "store" / "agent.db"
    with hosting(path) as host:
        host.does("turn", *other.split("\n"), "read")
        reader(path)

        assert host.does("turn") == ["2"]
        host.kill()

    assert await history(path) == said(2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["read", "copy"])
async def test_the_last_to_leave_still_folds_the_wal(tmp_path: Path, how: str) -> None:
    path = tmp_path / "store" / "agent.db"
    with hosting(path) as host:
        host.does("another", "turn", how, "turn", "one less", "turn")
        assert Path(f"{path}-wal").exists()

        assert host.does("close") == ["done"]
        assert sorted(file.name for file in path.parent.glob("agent.db-*")) == ["agent.db-lock"]

    assert await history(path) == said(3)


async def test_a_connection_of_the_host_outlives_the_store_with_its_locks(tmp_path: Path) -> None:
    """Whatever the store had open is not closed before the host's own connection is: its locks would go with it."""
    path = tmp_path / "store" / "agent.db"
    with hosting(path) as host:
        host.does("turn", "look", "close")
        reader(path)

        assert Path(f"{path}-wal").exists()


@pytest.mark.kill
async def test_without_open_file_locks_nothing_is_acknowledged_that_would_be_gone(tmp_path: Path) -> None:
    path = tmp_path / "store" / "agent.db"
    with hosting(path, "--plain-locks") as host:
        assert host.does("turn", "read") == ["1", "done"]
        reader(path)
        assert not Path(f"{path}-wal").exists()

        (answer,) = host.does("turn")
        assert answer.startswith("StoreUnavailable: ")
        assert "moved, removed or replaced while it was open" in answer
        host.kill()

    assert await history(path) == said(1)


@pytest.mark.kill
@pytest.mark.parametrize("options", [[], ["--plain-locks"]], ids=["open file locks", "plain locks"])
async def test_a_removed_wal_is_noticed_and_costs_no_acknowledged_turn(tmp_path: Path, options: list[str]) -> None:
    path = tmp_path / "store" / "agent.db"
    with hosting(path, *options) as host:
        assert host.does("turn", "turn") == ["1", "2"]
        Path(f"{path}-wal").unlink()

        (answer,) = host.does("turn")
        assert answer.startswith("StoreUnavailable: ")
        assert f"{path}-wal" in answer
        host.kill()

    assert await history(path) == said(2)


@pytest.mark.kill
async def test_a_removed_index_of_the_wal_is_noticed_before_two_processes_write_over_each_other(tmp_path: Path) -> None:
    """The second process makes an index of its own; the first must not go on with the one that lost its name."""
    path = tmp_path / "store" / "agent.db"
    with hosting(path) as host:
        assert host.does("turn", "turn") == ["1", "2"]
        Path(f"{path}-shm").unlink()
        with hosting(path) as second:
            assert second.does("turn") == ["3"]

            (answer,) = host.does("turn")
            assert answer.startswith("StoreUnavailable: ")
            assert f"{path}-shm" in answer
            assert second.does("turn") == ["4"]
            second.kill()
        host.kill()

    assert await history(path) == [*said(2), *said(2)], "two of each"


# ---------------------------------------------------------------------- killed before, inside and after

# What happens just before which statement of the second turn, which has two transactions -> what the host says of that
# turn, and what is found after its death: so many turns, or that the file is refused.
OURS = "INSERT"
SURVIVED: list[tuple[str, str, int]] = [
    ("at, BEGIN, read, let in, die", "", 1),
    (f"at, {OURS}, read, let in, die", "", 1),
    ("at, COMMIT, read, let in, die", "", 1),
    ("at, BEGIN, read, let in", "2", 2),
    (f"at, {OURS}, read, let in", "2", 2),
    ("at, COMMIT, read, let in", "2", 2),
    ("at, BEGIN, remove", "StoreUnavailable", 1),
    (f"at, {OURS}, remove", "StoreUnavailable", 1),
    ("at, COMMIT, remove", "StoreUnavailable", 1),
    ("at, BEGIN, read, let in, remove", "StoreUnavailable", 1),
]


@pytest.mark.kill
@pytest.mark.parametrize(("deed", "answer", "turns"), SURVIVED)
async def test_killed_host_whose_locks_were_dropped_or_wal_removed(
    tmp_path: Path, deed: str, answer: str, turns: int
) -> None:
    """Of the removed WAL's turn the first transaction was acknowledged after the WAL was folded, the second refused."""
    path = tmp_path / "store" / "agent.db"
    with hosting(path) as host:
        said_of_it = host.does("turn", deed, "turn")[-1]
        assert said_of_it.split(":")[0] == answer
        host.process.kill()
        host.process.communicate(timeout=60)

    assert await history(path) == said(turns)
    async with opened(path) as store:
        row = await store.session("s")
        assert row.next == (2 if "die" in deed else 3)  # what was acknowledged of the second turn


@pytest.mark.kill
@pytest.mark.parametrize("statement", ["BEGIN", OURS, "COMMIT", "PRAGMA wal_checkpoint"])
async def test_a_wal_that_nobody_could_fold_any_more_is_missed(tmp_path: Path, statement: str) -> None:
    """It was removed, and the only process that had it open was killed before it noticed: the file is refused."""
    path = tmp_path / "store" / "agent.db"
    with hosting(path) as host:
        host.does("turn")
        if statement.startswith("PRAGMA"):
            Path(f"{path}-wal").unlink()
            assert host.does(f"at, {statement}, die", "turn") == ["done", ""]
        else:
            assert host.does(f"at, {statement}, remove, die", "turn") == ["done", ""]

    with pytest.raises(StoreDamaged, match="acknowledged transactions are missing"):
        await SqliteStore(path).open()
