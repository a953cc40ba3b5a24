"""What a tool does that gives work to a subagent: begins its session in the books of the turn, starts it, awaits it.

    child session   noted in the calling turn, its id derives from the call
    process         its id is the call's; it ends with the turn unless it was started in the background
    answer          the value of the process, or an error for the model; the child's session stays, to be looked at

All of it derives from the call, so a call that is made again after a crash finds what it began and awaits that.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from mainstay.errors import MainstayError, ProcessEnded, ProcessNotVisible, ProcessStuck, StoreError, ToolError
from mainstay.model.codec import model_text
from mainstay.model.process import Abandoned, Cancelled, Cause, Failure, SessionOrigin, Success, WakeTarget
from mainstay.processes.handle import ProcessHandle, parse_handle
from mainstay.processes.service import Start
from mainstay.sessions.definition import Defined
from mainstay.sessions.services import Services
from mainstay.sessions.subagents import KIND, Asked, checked, child_session, creating
from mainstay.tools.context import ToolContext
from mainstay.tools.define import Tool, ToolOptions


class AgentTool(Tool[..., Any]):
    """An agent as something that another agent may call."""

    agent: Defined
    in_background: bool


def agent_tool(
    agent: Defined, returns: Any, name: str | None = None, description: str | None = None, background: bool = False
) -> AgentTool:
    """The tool that gives a task to an agent. `returns` is the type of its answers."""

    async def ask(task: str, ctx: ToolContext[Any]) -> Any:
        """
        Args:
            task: What to do. The agent knows nothing of this conversation: say all that it needs.
        """
        return await delegate(ctx, agent.name, Asked(task), background=background)

    ask.__annotations__["return"] = dict[str, str] if background else returns
    told = f"Give a task to the agent {agent.name}, who works on it alone and answers."
    if background:
        told = f"Give a task to the agent {agent.name}, who works on it in the background. Returns a handle at once."
    options = ToolOptions(
        name=_tool_name(agent.name) if name is None else name,
        description=told if description is None else description,
        recovery="rerun",  # made again it finds the agent at work: its process has the id of the call
    )
    made = AgentTool(ask, options)
    made.agent, made.in_background = agent, background
    return made


def _tool_name(name: str) -> str:
    """An agent's name as far as a tool may carry it."""
    return re.sub(r"[^a-zA-Z0-9_-]+", "_", name)[:64]


async def delegate(
    ctx: ToolContext[Any], agent: str, asked: Asked, *, label: str = "", background: bool = False
) -> Any:
    """Run an agent as a subagent of the calling session: its answer, or with `background` its handle at once.

    A background one outlives the turn, and the session is woken when it ends.
    """
    try:
        handle = await _start(ctx, agent, checked(agent, asked), label or agent, background)
        return handle.to_json() if background else await answer(handle)
    except StoreError:
        raise  # the store is in trouble, not the call
    except MainstayError as error:
        raise ToolError(model_text(error), code=error.code) from error


async def follow_up(ctx: ToolContext[Any], handle: Any, text: str, *, background: bool = False) -> Any:
    """Say more to a subagent of this session: to its turn while it works or waits, else as its next turn.

    Which of both it was stays so when the call is made again: the process keeps the message under the call's id.
    """
    try:
        process_id, _ = parse_handle(handle)
        desk = _services(ctx).at_hand.desk
        row = await desk.store.process(process_id)
        if row is None or not await desk.store.is_granted(ctx.session_id, process_id):
            raise ProcessNotVisible(process_id, ctx.session_id)
        if row.registration.kind != KIND:
            raise ToolError(f"process {process_id!r} is no agent: nothing can be said to it", code="no_agent")
        found = desk.processes.handle(process_id)
        try:
            await found.signal("message", text, key=ctx.call_id)
        except ProcessEnded:
            session_id = row.registration.input.get("session_id") or child_session(process_id, row.registration.name)
            asked = Asked(text, session_id)
            return await delegate(
                ctx, row.registration.name, asked, label=row.registration.label, background=background
            )
        return found.to_json() if background else await answer(found)
    except StoreError:
        raise
    except MainstayError as error:
        raise ToolError(model_text(error), code=error.code) from error


async def answer(handle: ProcessHandle) -> Any:
    """The value of a subagent, once it has ended; ToolError tells the model why there is none."""
    try:
        outcome = await handle.outcome()
    except ProcessStuck as error:
        raise ToolError(model_text(error), code=error.code, data=handle.to_json()) from error
    match outcome:
        case Success(value=value):
            return value
        case Failure(code=code, message=message):
            why = f"it failed ({code}): {message}"
        case Cancelled(by=by, reason=reason):
            code, why = "cancelled", f"it was cancelled by {by or 'somebody'}: {reason or 'no reason was given'}"
        case Abandoned():
            code, why = "outcome_unknown", "it was given up, and nobody knows how far it came"
        case _:
            code, why = "no_longer_retained", "it ended long ago, and what it answered was not kept"
    raise ToolError(why, code=code, data={"handle": handle.to_json(), "outcome": msgspec.to_builtins(outcome)})


async def _start(ctx: ToolContext[Any], agent: str, asked: Asked, label: str, background: bool) -> ProcessHandle:
    services = _services(ctx)
    at = services.at_hand
    if asked.session_id is None:
        child = child_session(ctx.call_id, agent)
        asked = Asked(asked.input, await services.create_session(creating(asked, agent, child, label)))
    if at.run is not None and not background:
        at.run.children = True  # before there is one: the turn's commit asks those to stop that it leaves behind
    start = Start(
        id=ctx.call_id,
        label=label,
        origin=SessionOrigin(at.id),
        cause=Cause("tool_call", ctx.call_id),
        parent=ctx.turn_id,
        parent_end="abandon" if background else "cancel",
        wake=WakeTarget(at.id, at.agent, "turn" if background else "none"),
        grants=(at.id,),
    )
    return await at.desk.processes.start(agent, msgspec.to_builtins(asked), start)


def _services(ctx: ToolContext[Any]) -> Services:
    host = ctx.host
    if not isinstance(host, Services):
        raise ToolError("agents are started by a call of a session, and not from here", code="unavailable")
    return host
