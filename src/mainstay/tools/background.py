"""Calls that run in the background: prepared in their turn like any other, then left to the workers of processes.

The call's start is on disk before its process is registered, under the call's own id. Found so after a crash, it is
registered again, which is the same process; what the model is told is its handle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mainstay.errors import MainstayError, ProcessPruned, StoreError
from mainstay.model.codec import model_text
from mainstay.model.effect import AskedCall
from mainstay.model.tool import Failed, Ok, PreparedCall, ToolOutcome, ToolSpec
from mainstay.ports.tool import Handles
from mainstay.tools.attempt import Again, Attempted, EndsAs
from mainstay.tools.context import ToolContext
from mainstay.tools.prepare import Ready, consult, inspect
from mainstay.tools.vetting import Vetting

UNAVAILABLE = Failed("processes_unavailable", "nothing can be started in the background here")


async def sent_off(handles: Handles | None, ready: Ready | Failed) -> ToolOutcome:
    """The handle of the call's process, which exists from now on; or why there is none."""
    if handles is None:
        return UNAVAILABLE
    if isinstance(ready, Failed):
        # Its tool is gone. If the process was registered before, it is what the model was to be told of.
        found = await handles.known()
        return ready if found is None else Ok(found)
    try:
        return Ok(await handles.begin(ready.call, ready.entry.spec))
    except ProcessPruned:  # it has ended long ago, and nobody kept it; it was started, and that is what is asked here
        found = await handles.known()
        return UNAVAILABLE if found is None else Ok(found)
    except StoreError:
        raise
    except MainstayError as error:
        return Failed(error.code, model_text(error))


async def prepared_instead(
    vetting: Vetting, call: AskedCall, ctx: ToolContext[Any], name: str, args: Mapping[str, Any]
) -> tuple[PreparedCall, ToolSpec]:
    """Another tool of the catalogue, prepared as if the model had asked for it in this call.

    Plugins are asked about that tool, not only about the one which starts it: else it would be a way round them.
    """
    asked = AskedCall(call.call, call.provider_id, name, dict(args))
    ready = inspect(vetting.catalog, asked, ctx.call_id)
    if isinstance(ready, Failed):
        raise EndsAs(ready)
    if vetting.concerns(asked):
        vetted = await vetting.before(asked, ready.entry.spec)
        if isinstance(vetted, Attempted):
            raise EndsAs(_needs_a_person(name) if vetted.asks is not None else _ended(vetted))
        ready = vetted[1]
    if ready.entry.spec.approval == "ask":
        raise EndsAs(_needs_a_person(name))
    prepared = await consult(ready, ctx, anew=True)
    if not isinstance(prepared, Ready):
        raise EndsAs(prepared)
    return prepared.call, prepared.entry.spec


def _needs_a_person(name: str) -> Failed:
    return Failed("approval_needed", f"tool {name} waits for approval: call it itself, and it will be asked for")


def _ended(vetted: Attempted) -> ToolOutcome:
    return vetted.end.otherwise if isinstance(vetted.end, Again) else vetted.end
