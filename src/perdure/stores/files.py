"""Files and folders of a store: made for its owner alone, and never reached through a link.

A new store is private: files 0600, folders 0700, whatever the umask. What is added to a store that exists takes the
access of its database, as SQLite does for the WAL. A store may come from a stranger: a link in the place of a file or
folder of ours would lead its writes and deletions elsewhere, so none is followed.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from msgspec import Struct

LINK = "it is a link, and links are not followed: put the file or folder itself there"
NO_FILE = "it is no regular file"


class Access(Struct, frozen=True):
    """Who may use a file. `user` and `group` are set where root adds to the store of another user."""

    mode: int = 0o600
    user: int = -1
    group: int = -1

    @property
    def folder_mode(self) -> int:
        """Who may read a file may enter its folder."""
        return 0o700 | self.mode | (self.mode & 0o444) >> 2


PRIVATE = Access()


def access_of(database: Path) -> Access:
    """The access of an existing database; that of a new one where there is none yet."""
    try:
        found = os.stat(database)
    except OSError:
        return PRIVATE
    mode = 0o600 | stat.S_IMODE(found.st_mode) & 0o666
    return Access(mode, found.st_uid, found.st_gid) if os.geteuid() == 0 else Access(mode)


def shared(database: Path) -> list[str]:
    """The files and folders of a store that others than their owner may use."""
    found = []
    for suffix in ("", "-wal", "-shm", "-lock", "-workers", "-blobs", "-jobs"):
        path = f"{database}{suffix}"
        try:
            if stat.S_IMODE(os.lstat(path).st_mode) & 0o077:
                found.append(path)
        except OSError:
            continue  # not made yet
    return found


def open_file(path: Path, flags: int, access: Access | None = None) -> int:
    """A descriptor of a regular file, which is made when there is none and its `access` is given."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # the last for a pipe in its place: it must not be waited for
    while access is not None:
        try:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, access.mode)
        except FileExistsError:
            if path.is_symlink() or path.exists():
                break  # and otherwise it went again meanwhile
        else:
            os.fchmod(descriptor, access.mode)
            if access.user >= 0:
                os.fchown(descriptor, access.user, access.group)
            return descriptor
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise OSError(error.errno, LINK, str(path)) if error.errno == errno.ELOOP else error from None
    try:
        regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def make_folder(folder: Path, access: Access) -> None:
    """Make a folder unless it is there; a link in its place is refused."""
    try:
        os.mkdir(folder, access.folder_mode)
    except FileExistsError:
        check_folder(folder)
    else:
        os.chmod(folder, access.folder_mode)
        if access.user >= 0:
            os.chown(folder, access.user, access.group)


def make_parents(folder: Path) -> None:
    """Make a folder and those above it which are missing, for us alone."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        make_folder(each, PRIVATE)


def check_folder(folder: Path) -> None:
    """Raise OSError unless it is a folder, and no link to one."""
    mode = os.lstat(folder).st_mode
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, LINK, str(folder))
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def regular(found: os.stat_result, path: Path) -> tuple[int, int]:
    """The identity of a file, which must be a regular one."""
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, NO_FILE, str(path))
    return found.st_dev, found.st_ino


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def identity(path: str | Path) -> tuple[int, int] | None:
    """Which file a name leads to just now; None when it leads to none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
