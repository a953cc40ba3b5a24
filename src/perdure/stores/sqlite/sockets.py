"""Sockets of workers, next to their locked files: other processes on this machine read live events from them.

A worker's row names its socket: a file in the folder of workers or, if that path is too long for a socket, a file in a
short private folder. The store may come from a stranger, so a row is trusted only if it names a socket that a worker
could have made: with such a name, owned by this user, in a folder that no other user may enter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import stat
import tempfile
from pathlib import Path

from perdure.errors import LiveEventsUnavailable
from perdure.ports.store import WorkerSocket

log = logging.getLogger("perdure.stores")

LONGEST = 107
"""The most bytes in the path of a socket."""
PRIVATE_NAME = "live.sock"
_PRIVATE_FOLDER = re.compile(r"(?:perdure|mainstay)-[A-Za-z0-9_]{6,12}", re.ASCII)
"""Workers of versions before the rename make `mainstay-…` folders."""


def new_socket(folder: Path, worker_id: str) -> WorkerSocket | None:
    """Choose the socket on which a worker will listen, in a new private folder if its path would be too long. Returns
    None if no socket is possible here."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    beside = folder / f"{worker_id}.sock"
    if len(os.fsencode(beside)) <= LONGEST:
        return WorkerSocket(str(beside), beside.name)
    for where in (None, "/tmp"):
        try:
            path = Path(tempfile.mkdtemp(prefix="perdure-", dir=where)) / PRIVATE_NAME
        except OSError as error:
            log.warning("cannot make a folder for a socket of live events: %s", error)
            continue
        if len(os.fsencode(path)) <= LONGEST:
            return WorkerSocket(str(path), str(path))
        path.parent.rmdir()
    return None


def find_socket(folder: Path, worker_id: str, name: str) -> WorkerSocket:
    """Return the socket that a worker's row names. Raises LiveEventsUnavailable if it is missing or not trusted."""
    if not hasattr(socket, "AF_UNIX"):
        raise LiveEventsUnavailable(worker_id, "this platform has no Unix sockets")
    if not name:
        raise LiveEventsUnavailable(worker_id, "it listens on no socket")
    beside, path = name == f"{worker_id}.sock", folder / name
    if not beside and not (path == Path(name) and path.name == PRIVATE_NAME and _is_private_name(path.parent)):
        raise LiveEventsUnavailable(worker_id, f"its row names {name!r}, which is no socket of a worker")
    try:
        above, found = os.lstat(path.parent), os.lstat(path)
    except OSError as error:
        raise LiveEventsUnavailable(worker_id, f"{path}: {error.strerror}", gone=True) from None
    if not stat.S_ISSOCK(found.st_mode) or not stat.S_ISDIR(above.st_mode):
        raise LiveEventsUnavailable(worker_id, f"{path} is no socket")
    users = {os.geteuid()}
    if os.geteuid() == 0:
        users.add(os.lstat(folder).st_uid)  # root reads what the owner of the store runs
    if found.st_uid not in users:
        raise LiveEventsUnavailable(worker_id, f"{path} belongs to user {found.st_uid}")
    if not beside and (above.st_uid not in users or stat.S_IMODE(above.st_mode) & 0o077):
        raise LiveEventsUnavailable(worker_id, f"{path.parent} belongs to user {above.st_uid}, or is open to others")
    return WorkerSocket(str(path), name, frozenset(users))


def _is_private_name(folder: Path) -> bool:
    return folder.is_absolute() and _PRIVATE_FOLDER.fullmatch(folder.name) is not None


def remove_socket(path: str) -> None:
    """Remove a socket without a listener, and its private folder if it has one."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    if _is_private_name(Path(path).parent):
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(path))


def remove_left(folder: Path, worker_id: str, name: str) -> None:
    """Remove the socket of a dead worker if it belongs to this user."""
    with contextlib.suppress(LiveEventsUnavailable):
        remove_socket(find_socket(folder, worker_id, name).path)
