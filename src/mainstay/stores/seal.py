"""Checksums of rows, kept beside them: SQLite notices a damaged page only where its structure suffers."""

from __future__ import annotations

import sqlite3
import zlib
from typing import Any


def seal(values: tuple[Any, ...]) -> int:
    """A checksum of a row's values, kept beside them."""
    return zlib.crc32(repr(values).encode())


def unsealed(table: str, found: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values of a row; refused when they are not those that were written."""
    if seal(found[:-1]) != found[-1]:
        raise sqlite3.DatabaseError(f"malformed row of {table}: it does not match its checksum")
    return found[:-1]


def sealed(number: int, body: bytes) -> bytes:
    """A body as it is stored: after a checksum that belongs to the row of this number."""
    return zlib.crc32(body, number & 0xFFFFFFFF).to_bytes(4, "big") + body


def opened(table: str, number: int, body: bytes) -> bytes:
    """A body as it was before; refused when it is not what was written."""
    if type(body) is not bytes or type(number) is not int or sealed(number, body[4:]) != body:
        raise sqlite3.DatabaseError(f"malformed row of {table}: it does not match its checksum")
    return body[4:]
