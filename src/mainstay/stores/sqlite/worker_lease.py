"""A worker's locked file. Locked: its process lives, perhaps stopped. Not locked: it is dead.

The ids of workers are read from a store, and become names of files. A row may be a stranger's: an id that is not of our
form belongs to no worker that lives, and no file is looked at for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path

from mainstay.errors import InternalError, StoreUnavailable
from mainstay.model.session import WorkerRow
from mainstay.stores import os_process
from mainstay.stores.files import access_of, check_folder, make_folder, open_file
from mainstay.stores.sqlite.lockfile import close_lock, open_lock

WORKER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


class FileLease:
    """One file in `<store>-workers/`, named by the worker's id."""

    def __init__(self, database: Path, worker_id: str) -> None:
        self._database, self._id, self.process = database, worker_id, os_process.name()
        self._folder = Path(f"{database}-workers")
        self._descriptor: int | None = None

    def hold(self) -> None:
        if not _is_ours(self._id):
            raise InternalError(f"worker id {self._id!r} is no name for a file")
        access = access_of(self._database)
        try:
            make_folder(self._folder, access)
            self._descriptor = open_lock(self._folder / self._id, access)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError as error:
            self.drop()
            raise StoreUnavailable(f"cannot lock a file in {self._folder}: {error.strerror}") from None

    def drop(self) -> None:
        """Free the lock, which proves that this worker is gone; whether or not the file can be removed."""
        if self._descriptor is not None and close_lock(self._descriptor):
            with contextlib.suppress(OSError):
                (self._folder / self._id).unlink()
        self._descriptor = None


def is_freed(database: Path, worker: WorkerRow) -> bool:
    """Whether the lock of a worker is free. False also when it cannot be told, for want of a descriptor or of
    permission."""
    if not _is_ours(worker.id):
        return True
    folder = Path(f"{database}-workers")
    path = folder / worker.id
    try:
        check_folder(folder)
        descriptor = open_file(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        with contextlib.suppress(OSError):  # where it may not be removed it is proof all the same
            path.unlink()  # ids are used once: no process will lock it again
        return True
    finally:
        os.close(descriptor)


def _is_ours(worker_id: object) -> bool:
    return isinstance(worker_id, str) and WORKER_ID.fullmatch(worker_id) is not None
