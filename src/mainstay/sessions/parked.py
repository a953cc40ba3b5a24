"""Turns that are parked until a process ends, so that they go on as soon as that has happened in this Runtime.

What is kept is a hint: the row of the session and the store's own rules decide. A turn whose process ends elsewhere is
found by the watch, which also finds those that other Runtimes have parked.
"""

from __future__ import annotations

from collections.abc import Callable

from mainstay.engine.waiters import Deadlocks


class ParkedTurns:
    """`waiting` are sessions by the processes that their turns wait for, `processes` the other way round. `_forget`
    takes a turn's waits out of the check for circles. It lives on the event loop."""

    def __init__(self, deadlocks: Deadlocks) -> None:
        self._deadlocks = deadlocks
        self.waiting: dict[str, set[str]] = {}
        self.processes: dict[str, tuple[str, ...]] = {}
        self._forget: dict[str, Callable[[], None]] = {}

    def add(self, session_id: str, turn: int, processes: tuple[str, ...]) -> None:
        """The turn of a session was parked."""
        self.drop(session_id)
        self.processes[session_id] = processes
        for process_id in processes:
            self.waiting.setdefault(process_id, set()).add(session_id)
        self._forget[session_id] = self._deadlocks.park((session_id, turn), [(each, None) for each in processes])

    def drop(self, session_id: str) -> None:
        """Its turn goes on, here or elsewhere, or is over."""
        for process_id in self.processes.pop(session_id, ()):
            sessions = self.waiting[process_id]
            sessions.discard(session_id)
            if not sessions:
                del self.waiting[process_id]
        if (forget := self._forget.pop(session_id, None)) is not None:
            forget()
