"""Work on a whole store: copy, restore, compact, delete, and refuse one that lies under the project's old name.

A Runtime that worked on a copy while the original lives would do everything a second time, under the same idempotency
keys. So a copy is *held*: it can be read and accepts inputs, but nothing in it can be claimed until a person calls
`restore`. Then it gets an id of its own. A copy carries a mark: `back_up` writes it, and so does `database.WriterFile`
when it opens a database without its lock file. A folder that was copied together with its lock file looks like its
original.

    back_up    snapshot → database and mark in a folder of its own → blobs → the database gets its name
    restore    under the lock: the new id and no mark, in one transaction → the note in the lock file

A process that is killed in `back_up` leaves no database under the copy's name. One that is killed in `restore` leaves
the copy held or restored; between the transaction and the note the copy stays refused or held, and a second `restore`
gives it one more id, which is harmless because nothing can have started under the first.

`compact` rewrites a database that no Runtime has open. It is one transaction of SQLite, so a process that is killed in
it leaves the file unchanged. A process that is killed in `delete` leaves a whole store, or a store that is refused
until it is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shlex
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from perdure.errors import (
    BlobMissing,
    InvalidInput,
    NotAStore,
    StoreDamaged,
    StoreInUse,
    StoreMoved,
    StoreUnavailable,
)
from perdure.ports.store import OLD_STORE_FOLDER, STORE_FOLDER, Tell
from perdure.stores.blobs import FileBlobs
from perdure.stores.files import PRIVATE, access_of, make_parents, open_file, sync_folder
from perdure.stores.os_process import new_store_id
from perdure.stores.sqlite.database import BACKUP, COPY, ID, connect, is_referred_to, marks, migrate, put_mark, reading
from perdure.stores.sqlite.locks import LockFile, LockNote, is_open_elsewhere, locked_files, workers_folder

R = TypeVar("R")

FOLDERS = ("-blobs", "-jobs", "-workers")
"""Endings of the folders that a store has next to its database."""
PAGES_AT_ONCE = 1024
TRIES = 5
"""Attempts to copy a store whose blobs are swept during the copy, because sessions are deleted."""
STEPS_BETWEEN_LOOKS: int = 100_000
"""Instructions of SQLite's virtual machine between two checks for cancellation."""


# ---------------------------------------------------------------------- making one


def back_up(path: Path, blobs: FileBlobs, to: Path, tell: Tell) -> None:
    """Copy a store that may be in use. The file `to` appears at the end, complete and marked as a copy."""
    for taken in (to, *(Path(f"{to}{suffix}") for suffix in ("-wal", "-shm", "-lock"))):
        if os.path.lexists(taken):
            raise InvalidInput(f"{taken} exists already, and nothing is overwritten: give the copy another name")
    try:
        make_parents(to.parent)
        _remove_leftovers(to)
        for _ in range(TRIES):
            if _copied(path, blobs, to, tell):
                return
    except OSError as error:
        raise StoreUnavailable(f"cannot write a copy to {to}: {error.strerror or error}") from None
    raise StoreUnavailable(f"sessions of {path} are deleted faster than it can be copied: try again later")


def _copied(path: Path, blobs: FileBlobs, to: Path, tell: Tell) -> bool:
    """Copy one snapshot. True if all its blobs were still there; some may have been swept with deleted sessions."""
    folder = Path(tempfile.mkdtemp(prefix=f".{to.name}.", suffix=".partial", dir=to.parent))
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)  # while it is locked, its maker lives
        copy = folder / "copy.db"
        with contextlib.closing(connect(path)) as source, reading(path):
            source.execute("BEGIN")
            pages, digests = _size(source), [r[0] for r in source.execute("SELECT DISTINCT digest FROM blobs")]
            whole = pages + sum(_blob_size(blobs, digest) for digest in digests)
            _copy_database(source, copy, lambda left, all_: tell(pages * (all_ - left) // max(all_, 1), whole))
            source.execute("ROLLBACK")
        done, target = pages, FileBlobs(Path(f"{to}-blobs"))
        for digest in digests:
            try:
                data = blobs.read(digest)
            except BlobMissing:
                _check_swept(path, digest)
                return False
            target.write(data)
            done += len(data)
            tell(done, max(done, whole))
        _publish(copy, to)
        return True
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _blob_size(blobs: FileBlobs, digest: str) -> int:
    try:
        return blobs.path(digest).stat().st_size
    except (OSError, BlobMissing):
        return 0  # the copy reports a missing blob when it reads it


def _copy_database(source: sqlite3.Connection, copy: Path, tell: Tell) -> None:
    """Write the snapshot of `source` and the mark of a copy to one file without WAL."""
    os.close(open_file(copy, os.O_RDWR, PRIVATE))
    with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as target:
        source.backup(target, pages=PAGES_AT_ONCE, progress=lambda _, left, all_: tell(left, all_), sleep=0)
    with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as target:
        target.execute("PRAGMA journal_mode = DELETE")
        target.execute("BEGIN")
        put_mark(target, COPY, BACKUP)
        target.execute("COMMIT")


def _check_swept(path: Path, digest: str) -> None:
    """Raise StoreDamaged if the store refers to a missing blob, because its copy would look complete."""
    with contextlib.closing(connect(path)) as connection, reading(path):
        if is_referred_to(connection, digest):
            raise StoreDamaged(str(path), f"the blob {digest} is missing")


def _publish(copy: Path, to: Path) -> None:
    """Sync the copy and give it its final name. Raises InvalidInput if a file of that name exists by now."""
    descriptor = open_file(copy, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.link(copy, to)
    except FileExistsError:
        raise InvalidInput(f"{to} exists already, and nothing is overwritten: give the copy another name") from None
    except OSError:  # a file system without hard links
        if os.path.lexists(to):
            raise
        copy.rename(to)
    sync_folder(to.parent)


def _remove_leftovers(to: Path) -> None:
    """Remove the folders that killed copies to the same name have left. The folder of a running copy is locked."""
    for folder in to.parent.glob(f".{to.name}.*.partial"):
        if folder.is_symlink():
            continue
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


# ---------------------------------------------------------------------- going on with one


def restore(path: Path) -> str:
    """Give a store a new id and remove the mark of a copy. Returns the id.

    A held copy may be open elsewhere: its Runtimes notice the change. Raises StoreInUse for any other open store,
    because running work uses the present id.
    """
    if not path.exists():
        raise InvalidInput(f"there is no store at {path}")
    lock = LockFile(Path(f"{path}-lock"), access_of(path))
    try:
        lock.hold()
        with contextlib.closing(connect(path)) as connection, reading(path):
            migrate(connection, path)
            if COPY not in marks(connection, path) and not lock.blank:
                refuse_if_open(path)
            own = new_store_id()
            connection.execute("BEGIN IMMEDIATE")
            put_mark(connection, ID, own.encode())
            connection.execute("DELETE FROM meta WHERE key IN (?, ?)", (COPY, f"{COPY}_crc"))
            tip = connection.execute("UPDATE tip SET count = count + 1 RETURNING count").fetchone()[0]
            connection.execute("COMMIT")
            lock.note_first(LockNote(lock.noted().writes + 1, tip))
    finally:
        lock.close()
    return own


def refuse_if_open(path: Path) -> None:
    """Raise StoreInUse while a Runtime has the store open."""
    workers = locked_files(workers_folder(path))
    if workers:
        raise StoreInUse(str(path), [file.name for file in workers])


def refuse_moved(path: Path) -> None:
    """Raise StoreMoved if a store would be made at `path` while the folder of the project's old name holds one.

    An empty old folder holds none: sandboxes make one to mount over.
    """
    folder = path.parent
    if folder.name != STORE_FOLDER or path.exists():
        return
    old = folder.with_name(OLD_STORE_FOLDER)
    try:
        if not os.listdir(old):
            return
    except (FileNotFoundError, NotADirectoryError):
        return
    store = old / path.name
    workers = [file.name for file in locked_files(workers_folder(store))]
    commands = [file.parent.name for file in locked_files(Path(f"{store}-jobs"), "*/lock")]
    found = sorted(old.iterdir()) if folder.exists() else [old]  # a sandbox may have made the new folder
    move = shlex.join(["mv", *map(_from_here, found), _from_here(folder)])
    raise StoreMoved(_from_here(path), _from_here(old), move, workers, commands)


def _from_here(path: Path) -> str:
    """Return a path as a user in the current folder would type it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


# ---------------------------------------------------------------------- writing a store anew


def compact(path: Path, tell: Tell, steps: int = STEPS_BETWEEN_LOOKS) -> tuple[int, int]:
    """Rewrite a database without free pages; later it returns free pages by itself. Returns its size in bytes before
    and after. Raises StoreInUse while a Runtime has it open."""
    if not path.exists():
        raise InvalidInput(f"there is no store at {path}")
    lock = LockFile(Path(f"{path}-lock"), access_of(path))
    try:
        lock.hold()
        refuse_if_open(path)
        with contextlib.closing(connect(path)) as connection, reading(path):
            migrate(connection, path)
            before = _size(connection)
            connection.set_progress_handler(lambda: tell(0, before), steps)
            connection.execute("VACUUM")
            connection.set_progress_handler(None, 0)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            after = _size(connection)
            tell(after, after)
            return before, after
    finally:
        lock.close()


def _size(connection: sqlite3.Connection) -> int:
    pages, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return int(pages * size)


# ---------------------------------------------------------------------- deleting one


def parts_of(path: Path) -> list[Path]:
    """Return the files and folders of a store that exist, in the order in which `delete` removes them.

    The lock file is the last one: until it is gone, opening the path raises StoreEmptied, which names the command that
    deletes the rest.
    """
    names = ("", "-journal", "-wal", "-shm", *FOLDERS, "-lock")
    return [part for name in names if os.path.lexists(part := Path(f"{path}{name}"))]


def delete(path: Path) -> list[Path]:
    """Delete a store with its lock, blobs, workers and job folders. Returns the deleted parts.

    Raises StoreInUse while any process has it open or a command of it runs, and NotAStore for the file of another
    program. No link is followed: a link in the place of a part is refused before anything is deleted, and links inside
    of a folder are removed themselves.
    """
    parts = parts_of(path)
    if not parts:
        raise InvalidInput(f"there is no store at {path}")
    for part in parts:
        if part.is_symlink() or part.is_dir() != str(part).endswith(tuple(f"{path}{each}" for each in FOLDERS)):
            raise InvalidInput(
                f"{part} is a link, or not what a store has there, and links are not followed: nothing was deleted; "
                "move it away, or name the store that it leads to"
            )
    lock = LockFile(Path(f"{path}-lock"), access_of(path))
    try:
        if not lock.hold_nowait():
            raise StoreInUse(str(path), [])
        refuse_if_open(path)
        if commands := _running(Path(f"{path}-jobs")):
            raise StoreInUse(str(path), [], commands)
        if is_open_elsewhere(path):
            raise StoreInUse(str(path), [])
        _check_deletable(path, lock)
        for part in parts:
            try:
                if part.is_dir():
                    shutil.rmtree(part)
                else:
                    part.unlink(missing_ok=True)  # SQLite removes some when its last connection closes
            except OSError as error:
                raise StoreUnavailable(
                    f"cannot delete {error.filename or part}: {error.strerror or error}; delete the rest with the same "
                    "command once that is repaired"
                ) from None
        lock.path.unlink(missing_ok=True)
        sync_folder(path.parent)
    finally:
        lock.close()
    return parts


def _running(jobs: Path) -> list[str]:
    """Return the ids of the commands of a store whose shims live."""
    held = locked_files(jobs, "*/lock")
    return [file.read_text(errors="replace").strip() or file.parent.name for file in held]


def _check_deletable(path: Path, lock: LockFile) -> None:
    """Raise NotAStore unless the database is ours. A damaged one is ours if its lock file has a note."""
    if not path.exists() or not path.stat().st_size:
        return
    try:
        connect(path).close()
    except NotAStore:
        raise
    except StoreDamaged:
        if lock.blank:
            raise NotAStore(str(path)) from None


# ---------------------------------------------------------------------- long work on a thread


class _Stopped(Exception):
    """Ends work on a thread whose caller was cancelled."""


async def on_thread(work: Callable[[Tell], R], tell: Tell) -> R:
    """Run long work on a thread and report its progress on the event loop. Cancellation stops the work and waits for
    its clean-up."""
    loop, stop = asyncio.get_running_loop(), threading.Event()

    def advance(done: int, whole: int) -> None:
        if stop.is_set():
            raise _Stopped
        loop.call_soon_threadsafe(tell, done, whole)

    working = loop.run_in_executor(None, work, advance)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({working})
        if not working.cancelled():
            working.exception()  # looked at, so that asyncio does not complain
        raise
