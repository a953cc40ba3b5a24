"""What a store must do. Writes are data (`perdure.model.write`): a store applies each one in one transaction.

A write that returns is durable; a refused one raises a typed error and has changed nothing. A cancelled `await` is not
an abort: the write may still land. `perdure.testing.store_contract` is the whole contract, runnable on any store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from msgspec import Struct

from perdure.model.limit import Account, Reservation
from perdure.model.process import Event, ProcessRow, WakeRow
from perdure.model.search import FoundRecord, SearchFilter
from perdure.model.session import Deaths, Dump, InboxRow, SessionRow, WaitRow, WorkerRow
from perdure.model.spending import UsageFilter, UsageRow
from perdure.model.write import ProcessFilter, SessionFilter, StoreFacts, Write

STORE_FOLDER = ".perdure"
"""The folder of default stores."""
OLD_STORE_FOLDER = ".mainstay"
"""The same before the project was renamed: it is protected like the new one, and a store in it is never ignored."""

R = TypeVar("R")

Tell: TypeAlias = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all of a long operation. It may raise, which ends the operation."""

SWEEP_GRACE = 3600.0
"""Seconds for which a blob that was put is believed to be about to be referred to."""


class SessionReads(Protocol):
    """What is on disk now. Reads see every acknowledged write of any process."""

    async def session(self, session_id: str) -> SessionRow | None: ...

    async def session_by_sid(self, sid: int) -> SessionRow | None: ...

    async def sessions(self, wanted: SessionFilter) -> list[SessionRow]: ...

    async def open_sessions(self) -> list[SessionRow]:
        """Sessions with an open turn: what recovery reads."""
        ...

    async def nodes(self, sid: int, first: int, last: int) -> list[tuple[int, int, bytes]]:
        """(turn, ordinal, bytes) of the turns `first` to `last`, in order."""
        ...

    async def turn_ends(self, turns: Sequence[tuple[int, int]]) -> list[tuple[bytes, bytes] | None]:
        """The first and the last record of each of these turns, by session number and turn; None where there is none,
        or none that is what was written: a listing shows the other sessions."""
        ...

    async def inbox(self, sid: int) -> list[InboxRow]: ...

    async def waits(self, sid: int | None = None, due: int | None = None) -> list[WaitRow]:
        """Waits of one session, or all open ones; with `due`, only those whose time is up by then."""
        ...

    async def wait(self, wait_id: str) -> WaitRow | None: ...

    async def dump(self, sid: int, last: int) -> tuple[int, Dump] | None:
        """The newest dump of a session's turns up to `last`, with its turn. Nothing has checked it yet."""
        ...

    async def usage(self, wanted: UsageFilter) -> list[UsageRow]:
        """What sessions have spent, also those that are deleted since; by session number, hour, label and model."""
        ...

    async def accounts(self) -> list[Account]:
        """What counts against limits, by name and key."""
        ...

    async def reservations(self, sid: int | None = None) -> list[Reservation]:
        """What is reserved for calls: of one session, or of all."""
        ...


class ProcessReads(Protocol):
    """The same of processes."""

    async def process(self, process_id: str) -> ProcessRow | None:
        """A process, or the tombstone of one."""
        ...

    async def processes(self, wanted: ProcessFilter) -> list[ProcessRow]: ...

    async def active_processes(self) -> list[ProcessRow]:
        """Running processes, owned or to be claimed: what recovery reads. Parked and stuck ones are not."""
        ...

    async def unowned_processes(self, after: int, limit: int) -> list[ProcessRow]:
        """Active processes without an owner, by number."""
        ...

    async def due_processes(self, now: int, limit: int = 1000, skip: int = 0) -> list[ProcessRow]:
        """Parked processes whose time has come, the longest overdue first, after the first `skip` of them."""
        ...

    async def events(self, pid: int, after: int = 0, limit: int = 1000) -> list[tuple[int, int, Event]]:
        """(cursor, sequence, event) of one process, after a sequence."""
        ...

    async def changes(self, after: int = 0, limit: int = 1000) -> list[tuple[int, ProcessRow]]:
        """Processes with events after a cursor, each once and as it is now; of `limit` events at most.

        A tombstone has the place at which its process was pruned, and no other event.
        """
        ...

    async def last_change(self) -> int: ...

    async def steps(self, pid: int) -> list[tuple[int, bytes]]:
        """(ordinal, bytes) of a process's journal, in order."""
        ...

    async def is_granted(self, session_id: str, process_id: str) -> bool: ...

    async def grantees(self, process_id: str) -> list[str]:
        """The sessions that may see a process."""
        ...

    async def wakes(self, session_id: str | None = None, state: str = "pending") -> list[WakeRow]: ...


class WorkerLease(Protocol):
    """Proof that a worker lives, beyond its row. On one file it is a lock that the kernel frees when it dies.

    `process` names the OS process that it dies with, as no other one is ever called.
    """

    @property
    def process(self) -> str: ...

    async def hold(self) -> None: ...

    async def drop(self) -> None: ...


class BlobStore(Protocol):
    """Bytes by their SHA-256. `put` is durable when it returns and safe to repeat; repeated, it makes a blob young."""

    async def put(self, data: bytes) -> str: ...

    async def put_file(self, path: str) -> tuple[str, int]:
        """Put a copy of a file of the host, in pieces; its digest and its size."""
        ...

    async def get(self, digest: str) -> bytes: ...

    def pieces(self, digest: str) -> AsyncIterator[bytes]:
        """The bytes of a blob, a piece at a time."""
        ...


class Store(SessionReads, ProcessReads, Protocol):
    """Durable rows. One instance belongs to one Runtime and one event loop."""

    @property
    def blobs(self) -> BlobStore: ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def write(self, write: Write[R]) -> R: ...

    def submit(self, write: Write[R], done: Callable[[R | None, BaseException | None], None]) -> None:
        """The same from any thread, even while the event loop is blocked; `done` is called on some thread."""
        ...

    async def workers(self) -> list[WorkerRow]: ...

    async def deaths(self) -> list[Deaths]:
        """What turns and processes lived through that were taken over and have no new record since."""
        ...

    async def changed(self) -> bool:
        """Whether another process has written since the last time this was asked."""
        ...

    async def facts(self, deep: bool = False) -> StoreFacts: ...

    async def sweep(self, grace: float = SWEEP_GRACE) -> int:
        """Delete blobs that nothing refers to and that were not put within `grace` seconds; returns how many.

        Fenced against writers: a reference that comes too late is refused with BlobMissing, none is left dangling.
        """
        ...

    def identity(self) -> str:
        """The store's own random id: no two stores have the same, and a copy gets another one when it is restored."""
        ...

    def held(self) -> str | None:
        """Why this store accepts everything and lets nothing be claimed: it is a copy that was not restored yet. None
        for every other store."""
        ...

    async def secret(self) -> bytes:
        """What keys of waits are signed with; made once per store."""
        ...

    def lease(self, worker_id: str) -> WorkerLease: ...

    async def proven_dead(self, worker: WorkerRow) -> bool:
        """Whether the lease of a worker is known to have ended. False also when that cannot be found out: then the
        worker's term decides."""
        ...


class WorkerSocket(Struct, frozen=True):
    """Where live events of a worker are read. `name` is what its row says of it; it is served by one of `users`."""

    path: str
    name: str
    users: frozenset[int] = frozenset()


@runtime_checkable
class WorkerSockets(Protocol):
    """What a store can do whose workers are on one machine: give each a socket, where others read its live events."""

    def new_socket(self, worker_id: str) -> WorkerSocket | None:
        """Where a worker of this store is to listen; None where there can be no socket."""
        ...

    def find_socket(self, worker: WorkerRow) -> WorkerSocket:
        """Where a worker listens. Raises LiveEventsUnavailable where its socket may not be used."""
        ...

    def remove_socket(self, where: WorkerSocket) -> None: ...


@runtime_checkable
class JobFolders(Protocol):
    """What a store can do whose workers share a file system: keep a folder for each command that they run."""

    @property
    def outlives_us(self) -> bool:
        """Whether a later Runtime finds the folders again. Otherwise commands end with the Runtime that runs them."""
        ...

    def jobs_folder(self, make: bool = True) -> str:
        """The folder of these folders, for our user alone; made unless it is there or `make` is false."""
        ...


@runtime_checkable
class SharesFiles(Protocol):
    """What blobs can do that are files of this machine."""

    async def share(self, digest: str, path: str) -> bool:
        """Let a file that is not changed any more, and whose content is that of a blob, be one file on the disk with
        it. False where that is not possible: then both stay."""
        ...


@runtime_checkable
class Searchable(Protocol):
    """What a store can do that finds sessions by their words, once it is told to keep an index of them."""

    async def keep_index(self, keep: bool) -> None:
        """Keep an index from now on, by whatever process writes; or drop it."""
        ...

    async def index_more(self) -> bool:
        """Take some more of what was there before into the index; whether there is more still."""
        ...

    async def search(self, wanted: SearchFilter) -> tuple[list[FoundRecord], float]:
        """What is found, and how much of the store was searched. Raises SearchUnavailable where there is no index."""
        ...


@runtime_checkable
class OnDisk(Protocol):
    """What a store can do that lives in a file of its own. `location` is that file."""

    @property
    def location(self) -> str: ...

    async def backup(self, to: str, tell: Tell) -> None:
        """Copy it, with its blobs, while it is used. The copy is there whole or not at all, and is `held`."""
        ...

    async def restore(self) -> str:
        """Give a store that is not open a new id, and let what is in it be claimed. Returns the id."""
        ...

    async def compact(self, tell: Tell) -> tuple[int, int]:
        """Write a store that is not open anew, without free pages. Returns its bytes before and after."""
        ...
