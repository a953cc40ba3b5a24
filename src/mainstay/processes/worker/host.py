"""What a worker does for the durable functions that it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import Struct

from mainstay.engine.admission import Admission
from mainstay.engine.clock_skew import ClockSkew
from mainstay.engine.threads import Threads
from mainstay.model.process import ParentEnd, ProcessRow, WakePolicy
from mainstay.model.session import CancelRequest
from mainstay.ports.host import Clock, Random
from mainstay.ports.store import Store


class Host(Protocol):
    """What a worker does for the functions that it runs."""

    store: Store
    clock: Clock
    random: Random
    threads: Threads
    admission: Admission
    deps: Any
    skew: ClockSkew

    async def still_ours(self, row: ProcessRow) -> bool:
        """Whether no other worker can have claimed the process."""
        ...

    def placed(self, process_id: str) -> bool:
        """Whether a process has a place to work in."""
        ...

    async def place(self, process_id: str) -> None:
        """Wait for one."""
        ...

    def listen(self, process_id: str, other: str) -> None:
        """Tell the one when the other has ended."""
        ...

    async def start_child(
        self, parent: ProcessRow, key: str, what: Any, args: Mapping[str, Any], options: ChildOptions
    ) -> str: ...

    async def signal(self, process_id: str, name: str, payload: Any, key: str) -> int: ...

    async def cancel(self, process_id: str, request: CancelRequest) -> None: ...


class ChildOptions(Struct, frozen=True):
    """How a child is started."""

    parent_end: ParentEnd = "cancel"
    label: str = ""
    wake: WakePolicy = "none"
