"""Where the stores under test keep their rows."""

import math
import shutil
import tempfile
from pathlib import Path

from mainstay.ports.store import Store
from mainstay.stores.memory import MemoryRows, MemoryStore
from mainstay.stores.sqlite import SqliteStore


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
        self._folder = Path(tempfile.mkdtemp(prefix="mainstay-store-"))
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
        # A process dies at one instant, copying takes several. Each transaction that moves what was noted of an earlier
        # one changes the lock file first: if it is the same before and after, then the copies may be of one instant.
        lock = Path(f"{before}-lock")
        while True:
            noted = lock.read_bytes()
            for suffix in ("-lock", "", "-wal"):
                if Path(f"{before}{suffix}").exists():
                    shutil.copy(f"{before}{suffix}", f"{self.path}{suffix}")
            if lock.read_bytes() == noted:
                break
        if Path(f"{before}-blobs").exists():
            shutil.copytree(f"{before}-blobs", f"{self.path}-blobs")
        await store.close()

    def clear(self) -> None:
        shutil.rmtree(self._folder)


class InOneFileOnAThread(InOneFile):
    """The writer thread commits everything."""

    loop_sync = 0.0
