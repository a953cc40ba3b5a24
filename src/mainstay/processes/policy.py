"""Who may cancel a process that a session did not start in the run at hand: the host's to say.

Without a policy, a model may ask what its session sees to end (`cancel_process`), and plugins and tools end what is the
session's own (`ctx.host.cancel_background_task` and its kin).
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias

from msgspec import Struct

from mainstay.model.process import ProcessRow
from mainstay.processes.handle import Processes

CancelSource: TypeAlias = Literal["tool", "process", "host_api"]

BY_HANDLE = "requested by process handle"


class CancelAsk(Struct, frozen=True):
    """A session wants a process to end. `handle` is what it gave, `call_id` the call in which it did.

    `granted`: it may see the process. `source`: "process" when a model gave a handle to `cancel_process`, "host_api"
    when a plugin or a tool asked through its services.
    """

    session_id: str
    process_id: str
    call_id: str = ""
    source: CancelSource = "process"
    handle: Any = None
    reason: str = BY_HANDLE
    granted: bool = False


class CancelPolicy(Protocol):
    """A host's own way to decide about cancels: `Runtime(cancel_policy=…)`.

    Asked for every process that the run at hand has not started itself. It cancels through `processes` or raises; what
    it raises is told to whoever asked.
    """

    async def cancel(self, processes: Processes, ask: CancelAsk) -> ProcessRow: ...
