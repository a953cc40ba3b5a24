"""Blobs beside the store: files named by their SHA-256, whole or not there at all.

A blob is written to a temporary name, synced, renamed, and its folder synced, before any row may refer to it. The sweep
deletes inside a write transaction what no row refers to, and a reference is checked inside one as well: whichever
comes first, no row ever points at nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from mainstay.errors import BlobMissing, StoreDamaged


class FileBlobs:
    """Content-addressed files in one folder, made when the first blob comes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def put(self, data: bytes) -> str:
        return await asyncio.to_thread(self.write, data)

    async def get(self, digest: str) -> bytes:
        return await asyncio.to_thread(self.read, digest)

    def path(self, digest: str) -> Path:
        if len(digest) != 64 or not all(c in "0123456789abcdef" for c in digest):
            raise BlobMissing(digest)
        return self.folder / digest[:2] / digest[2:]

    def has(self, digest: str) -> bool:
        return self.path(digest).exists()

    def write(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        path = self.path(digest)
        if path.exists():
            return digest
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
        return digest

    def read(self, digest: str) -> bytes:
        try:
            data = self.path(digest).read_bytes()
        except FileNotFoundError:
            raise BlobMissing(digest) from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise StoreDamaged(str(self.path(digest)), "the blob's content does not match its name")
        return data

    def all(self) -> Iterator[str]:
        if not self.folder.exists():
            return
        for shelf in sorted(self.folder.iterdir()):
            for file in sorted(shelf.iterdir()):
                if not file.name.startswith("."):
                    yield shelf.name + file.name

    def remove(self, digest: str) -> None:
        self.path(digest).unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
