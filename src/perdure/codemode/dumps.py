"""Saved states of an interpreter, sealed: nothing is loaded that this host did not save itself.

A dump is a cache. What it holds can be had again by running the cells against their recorded answers, so that any
doubt about a dump is a reason to refuse it, never to look closer. An interpreter that reads a dump trusts it: of 150
dumps with one flipped bit, 49 loaded and one crashed the worker. So a dump begins with a MAC over all the rest, under
a key that is not in the store: who can write to the store can make a session run its cells again, and no more.

    magic 4 · MAC 32 · length of the header 4 · header (JSON) · variables before the cell · the cell, if one runs
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import tempfile
from pathlib import Path

import msgspec
from msgspec import Struct

from perdure.errors import DumpRefused, StoreUnavailable
from perdure.model.code import CellEnd, CodeCall, CodeLimits

log = logging.getLogger("perdure.codemode")

MAGIC = b"MSD1"
_MAC = hashlib.sha256().digest_size
_FIXED = len(MAGIC) + _MAC + 4
KEY_BYTES = 32
KEY_SUFFIX = ".code-key"


class CellState(Struct, frozen=True, omit_defaults=True):
    """The cell that runs: what the executor must know of it besides the interpreter's own state.

    `calls` have no answer yet; `ids` are the interpreter's numbers for them. `end`: the code is over, and only these
    answers are missing.
    """

    code: str
    at: int
    seed: str
    calls: tuple[CodeCall, ...] = ()
    ids: dict[int, int] = {}
    emitted: int = 0
    drawn: int = 0
    spent: float = 0.0
    output: int = 0
    notes: tuple[str, ...] = ()
    end: CellEnd | None = None


class DumpHeader(Struct, frozen=True, omit_defaults=True):
    """What a dump says of itself. `contains` names the last record in it, `catalogue` is the print of its tools."""

    contains: str
    executor: str
    version: str
    policy: str
    limits: CodeLimits
    catalogue: str = ""
    names: tuple[str, ...] = ()
    seed: str = ""
    feeds: int = 0
    base: int = -1
    """Bytes of the variables before the cell; -1 where there were none yet."""
    cell: CellState | None = None
    cell_feeds: int = 0


class SealedDump(Struct, frozen=True):
    header: DumpHeader
    base: bytes | None
    cell: bytes


_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(DumpHeader).decode


def seal(dump: SealedDump, key: bytes) -> bytes:
    header = _encode(dump.header)
    body = b"".join((len(header).to_bytes(4, "big"), header, dump.base or b"", dump.cell))
    return MAGIC + hmac.digest(key, MAGIC + body, "sha256") + body


def unseal(sealed: bytes, key: bytes) -> SealedDump:
    """The dump, if this key sealed exactly these bytes. Raises DumpRefused."""
    if not sealed.startswith(MAGIC) or len(sealed) < _FIXED:
        raise DumpRefused("it is no dump of this version, or not whole")
    mac, body = sealed[len(MAGIC) : len(MAGIC) + _MAC], sealed[len(MAGIC) + _MAC :]
    if not hmac.compare_digest(mac, hmac.digest(key, MAGIC + body, "sha256")):
        raise DumpRefused("it was changed, or saved under another key")
    # From here on the bytes are our own: what does not fit was written by another version of us.
    size = int.from_bytes(body[:4], "big")
    try:
        header = _decode(body[4 : 4 + size])
    except msgspec.MsgspecError:
        raise DumpRefused("its header is of another version") from None
    rest = body[4 + size :]
    if header.base < 0:
        return SealedDump(header, None, rest)
    return SealedDump(header, rest[: header.base], rest[header.base :])


def fitting(dump: SealedDump, *, executor: str, version: str, policy: str, limits: CodeLimits) -> SealedDump:
    """The dump, if it was made by this executor under these rules. Raises DumpRefused.

    A loaded interpreter keeps the limits that it was saved with, so other limits are a reason too.
    """
    header = dump.header
    if (header.executor, header.version) != (executor, version):
        raise DumpRefused(f"{header.executor} {header.version} saved it, and this is {executor} {version}")
    if header.policy != policy:
        raise DumpRefused("it was saved under other rules for clock, sleep and random numbers")
    if header.limits != limits:
        raise DumpRefused("it was saved under other limits")
    return dump


def key_for(store: str | os.PathLike[str] | None) -> bytes:
    """The key beside a store in a file; for any other store, and where that file cannot be used, one of this process.

    Dumps are a cache: without their key a later process runs the cells again, and nothing else is lost.
    """
    if store is not None:
        try:
            return key_beside(store)
        except StoreUnavailable as error:
            log.warning("%s; until then sessions in code mode run their cells again after a restart", error)
    return secrets.token_bytes(KEY_BYTES)


def key_beside(store: str | os.PathLike[str]) -> bytes:
    """The key of the dumps of a store in a file: 32 random bytes in a file of their own beside it, mode 0600.

    Not inside the store: a copy, a backup or a stranger who can write rows must not bring a key along. Two processes
    that make it at once end with the same one. A key file that others can read, or that is no key, is refused.
    """
    path = Path(f"{os.fspath(store)}{KEY_SUFFIX}")
    try:
        try:
            return _read_key(path)
        except FileNotFoundError:
            _make_key(path)
            return _read_key(path)
    except OSError as error:
        raise StoreUnavailable(f"the key of saved code cannot be kept in {path}: {error.strerror or error}") from error


def _make_key(path: Path) -> None:
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # 0600 from its first byte
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(name, path)  # whole or not at all, and never over another's
    finally:
        os.unlink(name)


def _read_key(path: Path) -> bytes:
    # Without O_NONBLOCK a pipe of that name would be waited for.
    handle = os.open(
        path, os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK"))
    )
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        key = file.read(KEY_BYTES + 1)
    if os.name == "posix" and status.st_mode & 0o077:
        raise StoreUnavailable(f"{path} can be read by others, and is a key: chmod 600 it, or delete it for a new one")
    if len(key) != KEY_BYTES:
        raise StoreUnavailable(f"{path} is no key of {KEY_BYTES} bytes: delete it, and a new one is made")
    return key
