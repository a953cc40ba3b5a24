"""Background work of a session, for plugins and tools: a thin layer over processes.

    hidden        fire and forget; nobody lists it, `await_hidden_tasks` waits for all
    managed       runs here under a name, is listed, can be cancelled
    registered    somebody else runs it and says how it ended

A hidden or managed task is code in memory: with its Runtime it is gone, and reads as given up. What must survive is a
durable function: `start_process`. `session_id` None is the session at hand.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from mainstay.model.message import Message
from mainstay.model.process import LiveState, ParentEnd, TaskEnd, TaskKind, TaskRecord, TaskSpec, WakePolicy
from mainstay.ports.tool import Handle

Work: TypeAlias = Callable[[], Awaitable[Any]]
"""What a task does: called once, where it was spawned."""
CancelHook: TypeAlias = Callable[[], Awaitable[None] | None]


class Tasks(Protocol):
    async def inject_turn_input(self, said: str | Message, *, session_id: str | None = None) -> str:
        """Say something to the running turn at its next boundary, or with the next turn; returns the input's id."""
        ...

    async def start_process(
        self,
        what: Any,
        args: Mapping[str, Any] | None = None,
        *,
        key: str,
        label: str = "",
        wake: WakePolicy = "none",
        parent_end: ParentEnd = "abandon",
    ) -> Handle:
        """Begin a durable process for the session at hand. In a turn, the same key from the same place is the same one.

        With parent_end="cancel" it is asked to stop when the turn that started it has ended.
        """
        ...

    async def spawn_hidden_task(self, label: str, work: Work, *, session_id: str | None = None) -> Handle: ...

    async def await_hidden_tasks(self, *, session_id: str | None = None) -> None:
        """Wait until no hidden task is left, also of those that they spawn; raises the first failure."""
        ...

    async def spawn_managed_task(self, task: TaskSpec, work: Work, *, session_id: str | None = None) -> Handle: ...

    async def cancel_managed_task(
        self, task_id: str, reason: str = "", *, session_id: str | None = None
    ) -> TaskRecord: ...

    async def register_background_task(
        self, task: TaskSpec, cancel: CancelHook | None = None, *, session_id: str | None = None
    ) -> Handle:
        """List work that somebody else does. `cancel` is called once when it is to stop; then it is cancelled."""
        ...

    async def unregister_background_task(self, task_id: str, *, session_id: str | None = None) -> None:
        """List it no longer. Nobody will say how it ended."""
        ...

    async def complete_background_task(
        self, task_id: str, state: TaskEnd, value: Any = None, *, error: str = "", session_id: str | None = None
    ) -> None:
        """Say how a registered task ended. What has ended stays as it is."""
        ...

    async def transition_live_state(self, task_id: str, state: LiveState, *, session_id: str | None = None) -> None:
        """Say that a task works, or waits for something. What has ended stays as it is."""
        ...

    async def list_background_tasks(
        self, *, kind: TaskKind | None = None, include_ended: bool = False, session_id: str | None = None
    ) -> Sequence[TaskRecord]:
        """Everything that the session may see, as tasks, the oldest first."""
        ...

    async def cancel_background_task(
        self, task_id: str, reason: str = "", *, session_id: str | None = None
    ) -> TaskRecord: ...

    async def cancel_all_background_tasks(
        self, reason: str = "", *, session_id: str | None = None
    ) -> Sequence[TaskRecord]:
        """Cancel what is live, in order. The first that cannot be cancelled ends it, and is raised."""
        ...

    async def validate_handles_visible(self, handles: Sequence[Any], *, session_id: str | None = None) -> None:
        """Raises ProcessNotVisible for the first that the session may not see."""
        ...

    async def transfer_handles(self, target: str, handles: Sequence[Any], *, session_id: str | None = None) -> int:
        """Hand processes on to another session, with their names and their news. Returns how many."""
        ...

    async def cancel_unreferenced_handles(
        self, keep: Sequence[Any], reason: str = "", *, session_id: str | None = None
    ) -> Sequence[TaskRecord]:
        """Cancel every live process of the session that is not among `keep`."""
        ...
