"""The engine of kind "operation": tasks of plugins, as processes.

Calling one registers it and returns its handle. It runs on the session's own instance of its plugin; what it changed of
that is on disk before it has ended. What it declared decides what becomes of it when its Runtime dies: `once`, the
default, is given up as unknown, `rerun` is called again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from mainstay.engine.gate import Leaving, SelfCancelled, TurnCancelled
from mainstay.errors import Conflict, InvalidInput, NotFound, OperationFailed, PluginError, RuntimeClosed, Unavailable
from mainstay.model.process import Cancelled, Failure, ProcessOutcome, ProcessRecovery, Registration, Success
from mainstay.ports.process import EngineRun
from mainstay.processes.run import ProcessRun
from mainstay.sessions.definition import Definition
from mainstay.sessions.operations import Operations, TaskRun

KIND = "operation"


class TaskCall(Struct, frozen=True):
    """A task of a plugin that somebody wants to start, its arguments checked."""

    agent: str
    operation: str
    recovery: str
    session_id: str | None = None


class OperationEngine:
    """Runs tasks of plugins. `operations` gives what may be asked of an agent's plugins."""

    kind = KIND

    def __init__(self, definitions: Mapping[str, Definition], operations: Callable[[str], Operations]) -> None:
        self._definitions, self._operations = definitions, operations

    def draft(self, what: Any, args: Mapping[str, Any]) -> Registration | None:
        if not isinstance(what, TaskCall):
            return None
        asked = {"agent": what.agent, "args": dict(args), "session_id": what.session_id}
        recovery: ProcessRecovery = "rerunnable" if what.recovery == "rerun" else "owner_bound"
        return Registration("", KIND, recovery, what.operation, "", asked, what.operation)

    def knows(self, registration: Registration) -> bool:
        asked = registration.input
        agent = self._definitions.get(asked["agent"]) if isinstance(asked, dict) and "agent" in asked else None
        return agent is not None and registration.name in agent.operations.names

    async def run(self, run: EngineRun) -> ProcessOutcome:
        assert isinstance(run, ProcessRun)
        asked = run.registration
        task = TaskRun(asked.id, run.attempt, run.progress)
        try:
            operations = self._operations(asked.input["agent"])
        except RuntimeClosed:
            raise Leaving from None  # for whoever comes next
        await run.begin()
        try:
            work = operations.run_task(asked.name, asked.input["args"], asked.input["session_id"], task)
            return Success((await run.guard(work)).output)
        except TurnCancelled:
            request = run.gate.request
            assert request is not None
            return Cancelled(request.by, request.reason, unknown=True)
        except SelfCancelled as error:
            return Failure("raised", str(error))
        except OperationFailed as error:
            return Failure(error.code, str(error), {"accepted": list(error.accepted)} if error.accepted else None)
        except (Conflict, InvalidInput, NotFound, PluginError, Unavailable) as error:
            return Failure(error.code, str(error))
