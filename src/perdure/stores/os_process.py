"""What stores need of the OS process that they run in: which one it is, also after a fork, random ids, and threads."""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from perdure.errors import StoreUnavailable

R = TypeVar("R")

OUT_OF_MEMORY = "this process is out of memory: end what holds it, or raise its limit; it is tried again until then"
NO_THREAD = "this process can have no further thread ({}): end what holds them, or raise its limit of memory or threads"

# Remembered, because `os.getpid` is a system call and every write and every verb asks. Renewed in a forked child.
_pid = os.getpid()
_name = secrets.token_hex(8)


def pid() -> int:
    return _pid


def name() -> str:
    """A name of this OS process that no other one ever has, unlike its id."""
    return _name


def _in_child() -> None:
    global _pid, _name
    _pid, _name = os.getpid(), secrets.token_hex(8)


os.register_at_fork(after_in_child=_in_child)


@contextmanager
def exhaustion_is_typed() -> Generator[None]:
    """Raises StoreUnavailable where the OS process has no memory for what is done, or to map a library of its own
    Python: a module that is not there at all is another error."""
    try:
        yield
    except ModuleNotFoundError:
        raise
    except (MemoryError, ImportError):
        raise StoreUnavailable(OUT_OF_MEMORY) from None


def new_store_id() -> str:
    """The random id of a store, by which its idempotency keys differ from those of every other store: 64 random bits as
    13 letters and digits. Short, because the record of every call's start holds it."""
    return base64.b32encode(secrets.token_bytes(8)).decode().rstrip("=").lower()


async def in_thread(work: Callable[..., R], *arguments: Any) -> R:
    """Run blocking work on a thread of the event loop's executor. Raises StoreUnavailable where the OS process can have
    no thread or no memory for it."""
    try:
        working = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
    except RuntimeError as error:
        raise StoreUnavailable(NO_THREAD.format(error)) from None
    try:
        return await working
    except MemoryError:
        raise StoreUnavailable(OUT_OF_MEMORY) from None
