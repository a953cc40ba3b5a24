"""Lines of a host's trace about one session. A trace never holds anything up, and its trouble is nobody else's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mainstay.model.codec import error_text
from mainstay.plugins.calls import Probe
from mainstay.ports.services import TraceSink

log = logging.getLogger("mainstay.sessions")


class Tracer:
    """Writes what it is told to a sink, under a session and, in a turn, its id."""

    __slots__ = ("_session_id", "_sink", "_turn_id")

    def __init__(self, sink: TraceSink, session_id: str, turn_id: str | None = None) -> None:
        self._sink, self._session_id, self._turn_id = sink, session_id, turn_id

    def write(self, name: str, payload: Any = None, context: Mapping[str, Any] | None = None) -> None:
        told = {"session_id": self._session_id, "turn_id": self._turn_id, "payload": payload, "context": context or {}}
        try:
            self._sink.write(name, told)
        except Exception as error:  # a sink of the host may raise anything: no turn and no plugin is to blame for it
            log.warning("the trace did not take %s: %s: %s", name, type(error).__name__, error_text(error))


def probe_of(sink: TraceSink | None, session_id: str, turn_id: str | None = None) -> Probe | None:
    """What writes when hooks begin and end, where somebody traces."""
    return None if sink is None else Tracer(sink, session_id, turn_id).write
