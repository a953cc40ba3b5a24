"""Tasks: background work of a session as plugins and tools see it. Each is a process; this is only a narrower view."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

TaskKind: TypeAlias = Literal["monitor", "subagent", "observer", "other"]
TaskState: TypeAlias = Literal["pending", "running", "idle", "cancel_requested", "completed", "failed", "cancelled"]
TaskEnd: TypeAlias = Literal["completed", "failed", "cancelled"]
LiveState: TypeAlias = Literal["running", "idle"]


class TaskSpec(Struct, frozen=True, omit_defaults=True):
    """What a task is. `id` is its name in its session: it may be used again once the task before has ended."""

    id: str
    kind: TaskKind = "other"
    producer: str = ""
    label: str = ""
    child_session_id: str | None = None
    parent_task_id: str | None = None


class TaskRecord(Struct, frozen=True, omit_defaults=True):
    """A task as it is now. `state` "idle" waits for something; `ended` is when it ended, in `value` or `error` how."""

    id: str
    process_id: str
    kind: TaskKind
    state: TaskState
    session_id: str
    producer: str = ""
    label: str = ""
    child_session_id: str | None = None
    parent_task_id: str | None = None
    created: int = 0
    updated: int = 0
    ended: int | None = None
    value: Any = None
    error: str = ""

    @property
    def live(self) -> bool:
        return self.ended is None
