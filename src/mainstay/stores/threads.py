"""Work that would hold up the event loop, done on a thread; and what a process may lack for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from mainstay.errors import StoreUnavailable

R = TypeVar("R")

OUT_OF_MEMORY = "this process is out of memory: end what holds it, or raise its limit; it is tried again until then"
NO_THREAD = "this process can have no further thread ({}): end what holds them, or raise its limit of memory or threads"


async def in_thread(work: Callable[..., R], *arguments: Any) -> R:
    """Run it on a thread of the event loop's. Without a thread or memory it is the store that is not to be had."""
    try:
        working = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
    except RuntimeError as error:
        raise StoreUnavailable(NO_THREAD.format(error)) from None
    try:
        return await working
    except MemoryError:
        raise StoreUnavailable(OUT_OF_MEMORY) from None
