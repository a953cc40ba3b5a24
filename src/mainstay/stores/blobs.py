"""Blobs beside the store: files named by their SHA-256, whole or not there at all.

A blob is written to a temporary name, synced, renamed, and its folder synced, before any row may refer to it. The sweep
deletes inside a write transaction what no row refers to, and a reference is checked inside one as well: whichever
comes first, no row ever points at nothing.
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
        if not path.exists():
            try:
                self._write(path, data)
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
        for folder in (path.parent, self.folder, self.folder.parent):
            _sync_folder(folder)

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

    def remove(self, digest: str) -> None:
        """Delete a blob that nobody refers to; one that cannot be deleted is found again by the next sweep."""
        with contextlib.suppress(OSError):
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


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
