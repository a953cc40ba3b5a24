"""Blobs beside the store: files named by their SHA-256, whole or not there at all.

A blob is written to a temporary name, synced, renamed, and its folder synced, before any row may refer to it. The sweep
deletes inside a write transaction what no row refers to, and a reference is checked inside one as well: whichever
comes first, no row ever points at nothing.

Digests are read from a store, which may be a stranger's: what is no digest names no file, and no link is followed.

Between its put and the row that refers to it a blob looks like an orphan. So the sweep takes only old ones: a file's
time of change is when it was last put, be it new or there already.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import time
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from perdure.errors import BlobMissing, InvalidInput, StoreDamaged, StoreUnavailable
from perdure.stores.files import PRIVATE, access_of, check_folder, make_folder, open_file
from perdure.stores.os_process import in_thread

LEFTOVER_SECONDS = 3600

MAX_FILE = 1024**3
"""Bytes of one file in a message. No model takes more, and what never ends must not fill the disk."""

PIECE = 192 * 1024
"""Bytes that are read at once: a multiple of three, so that the base64 of pieces is that of the whole."""


class FileBlobs:
    """Content-addressed files in one folder, made when the first blob comes, with the access of `database`."""

    def __init__(self, folder: Path, database: Path | None = None) -> None:
        self.folder, self._database = folder, database

    async def put(self, data: bytes) -> str:
        return await in_thread(self.write, data)

    async def put_file(self, path: str) -> tuple[str, int]:
        return await in_thread(self.copy, path)

    async def share(self, digest: str, path: str) -> bool:
        return await in_thread(self._link, digest, path)

    async def get(self, digest: str) -> bytes:
        return await in_thread(self.read, digest)

    async def pieces(self, digest: str) -> AsyncIterator[bytes]:
        """Checked like `get`: bytes that do not match their name raise before the last piece is handed out."""
        file = await in_thread(self._open, digest)
        try:
            seen, held = hashlib.sha256(), b""
            while piece := await in_thread(file.read, PIECE):
                seen.update(piece)
                if held:
                    yield held
                held = piece
            if seen.hexdigest() != digest:
                raise StoreDamaged(str(self.path(digest)), "the blob's content does not match its name")
            if held:
                yield held
        finally:
            file.close()

    def path(self, digest: str) -> Path:
        if not _is_digest(digest):
            raise BlobMissing(digest)
        return self.folder / digest[:2] / digest[2:]

    def has(self, digest: str) -> bool:
        path = self.path(digest)
        try:
            self._check_folders(path)
            return stat.S_ISREG(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:  # it may be there: taken for missing, it would be put again, or its turn given up
            raise StoreUnavailable(f"cannot look at the blob {digest}: {error.strerror}") from error

    def _check_folders(self, path: Path) -> None:
        for folder in (self.folder, path.parent):
            check_folder(folder)

    def write(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        with self._writing():
            if not self._touched(self.path(digest)):
                self._store([data])
            self._sync(digest)
        return digest

    def copy(self, path: str) -> tuple[str, int]:
        """A file of the host as a blob; its digest and its size."""
        with self._writing():
            digest, size = self._store(host_pieces(path))
            self._sync(digest)
        return digest, size

    def _link(self, digest: str, path: str) -> bool:
        """Put a link to a blob in the place of a file. Whole at any instant: the link is made beside it and renamed."""
        beside = f"{path}.shared"
        try:
            os.link(self.path(digest), beside, follow_symlinks=False)
            os.rename(beside, path)
        except OSError:  # another file system, or one without links: the file stays as it is
            return False
        finally:
            with contextlib.suppress(OSError):
                os.unlink(beside)
        return True

    @contextlib.contextmanager
    def _writing(self) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            raise StoreUnavailable(f"cannot write a blob to {self.folder}: {error.strerror}") from error

    def _sync(self, digest: str) -> None:
        # One that was there may have been renamed an instant ago, by a process that has not synced the folder yet.
        for folder in (self.path(digest).parent, self.folder, self.folder.parent):
            _sync_folder(folder)

    def _touched(self, path: Path) -> bool:
        """Make a blob young; False when it is not there, or not ours to touch: then it is written anew."""
        try:
            self._check_folders(path)
            os.utime(path, follow_symlinks=False)
            return stat.S_ISREG(os.lstat(path).st_mode)
        except OSError:
            return False

    def _store(self, pieces: Iterable[bytes]) -> tuple[str, int]:
        """Write a blob a piece at a time. Its name is known when all of it has been seen."""
        access = PRIVATE if self._database is None else access_of(self._database)
        token = secrets.token_hex(8)
        temporary = self.folder / token[:2] / f".{token}.tmp"
        for folder in (self.folder, temporary.parent):
            make_folder(folder, access)
        seen, size = hashlib.sha256(), 0
        try:
            with open(open_file(temporary, os.O_WRONLY, access), "wb") as file:
                for piece in pieces:
                    seen.update(piece)
                    size += len(piece)
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            target = self.path(seen.hexdigest())
            make_folder(target.parent, access)
            if not self._touched(target):
                temporary.rename(target)
        finally:
            temporary.unlink(missing_ok=True)
        return seen.hexdigest(), size

    def _open(self, digest: str) -> BinaryIO:
        path = self.path(digest)
        try:
            self._check_folders(path)
            return open(open_file(path, os.O_RDONLY), "rb")
        except FileNotFoundError:
            raise BlobMissing(digest) from None
        except OSError as error:
            raise StoreUnavailable(f"cannot read the blob {digest}: {error.strerror}") from error

    def read(self, digest: str) -> bytes:
        with self._open(digest) as file:
            try:
                data = file.read()
            except OSError as error:
                raise StoreUnavailable(f"cannot read the blob {digest}: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise StoreDamaged(str(self.path(digest)), "the blob's content does not match its name")
        return data

    def all(self) -> Iterator[str]:
        for folder, name in self._files():
            if _is_digest(folder + name):  # not a write under way, nor a file of the host's
                yield folder + name

    def _files(self) -> Iterator[tuple[str, str]]:
        """Every file by the names of its folder and its own, in order."""
        try:
            check_folder(self.folder)
            folders = sorted(each.name for each in os.scandir(self.folder) if each.is_dir(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            if error.errno == errno.ELOOP:
                return
            raise
        for folder in folders:
            for file in sorted(os.listdir(self.folder / folder)):
                yield folder, file

    def old(self, before: int) -> list[str]:
        """Blobs last put before then, in nanoseconds. What killed puts left behind goes on the way."""
        try:
            self.remove_leftovers()
            return [digest for digest in self.all() if self.is_old(digest, before)]
        except OSError as error:
            raise StoreUnavailable(f"cannot look through the blobs in {self.folder}: {error.strerror}") from error

    def is_old(self, digest: str, before: int) -> bool:
        """Whether a blob is there and was last put before then."""
        try:
            return self.has(digest) and os.lstat(self.path(digest)).st_mtime_ns <= before
        except (OSError, StoreUnavailable):
            return False

    def remove(self, digest: str, before: int) -> None:
        """Delete a blob that nothing refers to, unless it was put again meanwhile.

        One that cannot be deleted is found by the next sweep.
        """
        with contextlib.suppress(OSError):
            if self.is_old(digest, before):
                self.path(digest).unlink()

    def remove_leftovers(self) -> None:
        """Delete what puts left behind whose process was killed: a put takes seconds, and these are an hour old."""
        before = time.time() - LEFTOVER_SECONDS
        for folder, name in self._files():
            if name.startswith(".") and name.endswith(".tmp"):
                file = self.folder / folder / name
                with contextlib.suppress(OSError):
                    if os.lstat(file).st_mtime < before:
                        file.unlink()


def host_pieces(path: str) -> Iterator[bytes]:
    """The bytes of a file of the host, a piece at a time. What is no file, cannot be read or never ends is refused: it
    is the host's or the tool's, and no trouble of the store."""
    try:
        # A pipe would be waited for without end; what is no regular file is not looked into.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidInput(f"{path!r} is no regular file: a folder, a pipe and a device cannot be kept")
            left = MAX_FILE
            while piece := file.read(PIECE):
                left -= len(piece)
                if left < 0:
                    raise InvalidInput(f"{path!r} has more than {MAX_FILE:,} bytes: give an address, or less of it")
                yield piece
    except ValueError as error:  # a NUL in its name
        raise InvalidInput(f"cannot read {path!r}: {error}") from None
    except OSError as error:
        raise InvalidInput(f"cannot read {path!r}: {error.strerror}") from None


def _is_digest(name: str) -> bool:
    return len(name) == 64 and all(c in "0123456789abcdef" for c in name)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
