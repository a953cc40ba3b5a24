"""Where the stores under test keep their rows."""

import math
import shutil
import tempfile
from pathlib import Path

from perdure.ports.store import Store
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.stores.sqlite import SqliteStore


class InMemory:
    """Rows outlive the store object; a crash takes nothing else with it."""

    def __init__(self) -> None:
        self.rows = MemoryRows()

    def store(self) -> MemoryStore:
        return MemoryStore(self.rows)

    async def crash(self, store: Store) -> None: ...

    def clear(self) -> None: ...


class InOneFile:
    """A real file. A crash leaves what a killed process leaves: the files as they are, with a WAL nobody folded back.

    The next store opens a copy of them, without the shared-memory file, so that it has to recover the WAL.
    """

    loop_sync = math.inf
    """The event loop commits whatever it can."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="perdure-store-"))
        self._lives = 0

    @property
    def path(self) -> Path:
        return self._folder / str(self._lives) / "agent.db"

    def store(self) -> SqliteStore:
        return SqliteStore(self.path, self.loop_sync)

    async def crash(self, store: Store) -> None:
        before = self.path
        self._lives += 1
        self.path.parent.mkdir()
        for suffix, data in _at_one_instant(before).items():
            Path(f"{self.path}{suffix}").write_bytes(data)
        if Path(f"{before}-blobs").exists():
            shutil.copytree(f"{before}-blobs", f"{self.path}-blobs")
        await store.close()

    def clear(self) -> None:
        shutil.rmtree(self._folder)


class InOneFileOnAThread(InOneFile):
    """The writer thread commits everything."""

    loop_sync = 0.0


def _at_one_instant(path: Path) -> dict[str, bytes]:
    """The files as they may be when a process dies, though reading them takes longer than that.

    Meanwhile a thread may write. What the lock file notes may have been rewritten, or the WAL folded into the database
    and begun anew: then they are read again. A WAL that has only grown is what a commit leaves that nobody heard of.
    """
    while True:
        lock, database, wal = _read(path)
        lock_later, database_later, wal_later = _read(path)
        if (lock, database) == (lock_later, database_later) and wal_later.startswith(wal):
            return {"-lock": lock, "": database, "-wal": wal}


def _read(path: Path) -> tuple[bytes, bytes, bytes]:
    lock, database, wal = (Path(f"{path}{suffix}") for suffix in ("-lock", "", "-wal"))
    return lock.read_bytes(), database.read_bytes(), wal.read_bytes() if wal.exists() else b""
