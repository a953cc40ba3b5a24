"""Blobs beside the store: files named by their SHA-256, whole or not there at all.

A blob is written to a temporary name, synced, renamed, and its folder synced, before any row may refer to it. The sweep
deletes inside a write transaction what no row refers to, and a reference is checked inside one as well: whichever
comes first, no row ever points at nothing.

Between its put and the row that refers to it a blob looks like an orphan. So the sweep takes only old ones: a file's
time of change is when it was last put, be it new or there already.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from mainstay.errors import BlobMissing, StoreDamaged, StoreUnavailable

LEFTOVER_SECONDS = 3600


class FileBlobs:
    """Content-addressed files in one folder, made when the first blob comes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def put(self, data: bytes) -> str:
        return await asyncio.to_thread(self.write, data)

    async def get(self, digest: str) -> bytes:
        return await asyncio.to_thread(self.read, digest)

    def path(self, digest: str) -> Path:
        if not _is_digest(digest):
            raise BlobMissing(digest)
        return self.folder / digest[:2] / digest[2:]

    def has(self, digest: str) -> bool:
        return self.path(digest).exists()

    def write(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        path = self.path(digest)
        try:
            if not _touched(path):
                self._write(path, data)
            # One that was there may have been renamed an instant ago, by somebody who has not synced the folder yet.
            for folder in (path.parent, self.folder, self.folder.parent):
                _sync_folder(folder)
        except OSError as error:
            raise StoreUnavailable(f"cannot write a blob to {path.parent}: {error.strerror}") from error
        return digest

    def _write(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)

    def read(self, digest: str) -> bytes:
        try:
            data = self.path(digest).read_bytes()
        except FileNotFoundError:
            raise BlobMissing(digest) from None
        except OSError as error:
            raise StoreUnavailable(f"cannot read the blob {digest}: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise StoreDamaged(str(self.path(digest)), "the blob's content does not match its name")
        return data

    def all(self) -> Iterator[str]:
        if not self.folder.exists():
            return
        for file in sorted(self.folder.glob("*/*")):
            if _is_digest(file.parent.name + file.name):  # and not a write under way, or somebody's own file
                yield file.parent.name + file.name

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
            return self.path(digest).stat().st_mtime_ns <= before
        except OSError:
            return False

    def remove(self, digest: str, before: int) -> None:
        """Delete a blob that nobody refers to, unless it was put again meanwhile.

        One that cannot be deleted is found by the next sweep.
        """
        with contextlib.suppress(OSError):
            if self.is_old(digest, before):
                self.path(digest).unlink()

    def remove_leftovers(self) -> None:
        """Delete what puts left behind whose process was killed. A put takes seconds; an hour is nobody's."""
        before = time.time() - LEFTOVER_SECONDS
        for file in self.folder.glob("*/.*.tmp"):
            with contextlib.suppress(OSError):
                if file.stat().st_mtime < before:
                    file.unlink()


def _is_digest(name: str) -> bool:
    return len(name) == 64 and all(c in "0123456789abcdef" for c in name)


def _touched(path: Path) -> bool:
    """Make a blob young; False when it is not there, or not ours to touch: then it is written anew."""
    try:
        os.utime(path)
    except OSError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
