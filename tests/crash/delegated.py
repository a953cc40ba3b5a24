"""Agents that give work to agents: what the crash kit kills."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from perdure import Agent, ModelRequest, Session, ToolCall, ToolContext, tool
from perdure.builtin import Subagents
from perdure.errors import AlreadyAnswered, ProcessEnded, UnknownCall
from perdure.model.outcome import kind_of
from perdure.model.process import Cancelled
from perdure.model.write import SessionFilter
from perdure.ports.store import Store
from perdure.processes.handle import ProcessHandle
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab
from tests.kit import results


def agents(lab: Lab) -> Agent[str]:
    """boss → two workers → each one clerk, who has an effect."""

    @tool(recovery="rerun")
    async def file(what: str, ctx: ToolContext[None]) -> str:
        await lab.effect("file", ctx.idempotency_key, what)
        return f"filed {what}"

    def clerking(request: ModelRequest) -> str | list[ToolCall]:
        found = results(request)
        return found[0].content if found else [ToolCall("f", "file", {"what": request.messages[-1].text})]

    def working(request: ModelRequest) -> str | list[ToolCall]:
        found = results(request)
        if not found:
            return [ToolCall("c", "clerk", {"task": request.messages[-1].text.upper()})]
        return f"done: {found[0].content}"

    def leading(request: ModelRequest) -> str | list[ToolCall]:
        found = results(request)
        if not found:
            return [ToolCall(str(n), "worker", {"task": f"job {n}"}) for n in (1, 2)]
        return " and ".join([str(result.content) for result in found])

    clerk = Agent(FunctionModel(clerking), name="clerk", tools=[file])
    worker = Agent(FunctionModel(working), name="worker", tools=[clerk.as_tool()])
    return Agent(FunctionModel(leading), name="boss", tools=[worker.as_tool()])


async def delegated(lab: Lab) -> None:
    async with lab.runtime(agents=[agents(lab)]) as runtime:
        session = await runtime.session("s")
        result = await session.run("go", key="go")
        assert result.text == "done: filed JOB 1 and done: filed JOB 2", result


# ---------------------------------------------------------------------- a child that waits for a person


def patient() -> Agent[str]:
    """Asks a person before it pays; its answer tells what was said to it."""

    @tool(approval="ask", recovery="rerun")
    async def pay(amount: int) -> str:
        return f"paid {amount}"

    def paying(request: ModelRequest) -> str | list[ToolCall]:
        if not results(request):
            return [ToolCall("p", "pay", {"amount": 3})]
        said = [message.text for message in request.messages if message.role == "user"]
        return " / ".join([str(results(request)[0].content), *said])

    return Agent(FunctionModel(paying), name="patient", tools=[pay])


async def waited(lab: Lab) -> None:
    """A process parks with its child's turn, hears a message, and goes on when somebody approves."""
    agent = patient()
    async with lab.runtime(agents=[agent]) as runtime:
        handle = await runtime.start(agent, {"input": "buy"}, id="job")
        session = await runtime.session("job~patient")
        if await _open(lab, "job"):
            await lab.until(lambda store: _is_parked(store, "job~patient"))
            await _tell(handle)
            await lab.until(lambda store: _heard(store, "job~patient"))
            for call in await session.pending():
                await _approve(session, call.call_id)
        value = await handle.result()
        assert value == "paid 3 / buy / the red one", value


async def _open(lab: Lab, process_id: str) -> bool:
    row = await lab.store.process(process_id)
    return row is not None and row.live


async def _is_parked(store: Store, session_id: str) -> bool:
    session = await store.session(session_id)
    return session is not None and (session.state == "parked" or session.head > 0)


async def _heard(store: Store, session_id: str, inputs: int = 2) -> bool:
    session = await store.session(session_id)
    return session is not None and session.next > inputs


async def _tell(handle: ProcessHandle[Any]) -> None:
    with contextlib.suppress(ProcessEnded):  # it was told in a life before this one, and has answered since
        await handle.signal("message", "the red one", key="told")


async def _approve(session: Session, call_id: str) -> None:
    with contextlib.suppress(AlreadyAnswered, UnknownCall):  # so it was approved before
        await session.approve(call_id)


# ---------------------------------------------------------------------- a tree that is cancelled


async def cancelled(lab: Lab) -> None:
    """boss → worker → two clerks who would think for ever."""

    async def thinking(request: ModelRequest) -> str:
        await asyncio.Event().wait()
        return ""

    def working(request: ModelRequest) -> str | list[ToolCall]:
        return [ToolCall(str(n), "clerk", {"task": f"job {n}"}) for n in (1, 2)]

    clerk = Agent(FunctionModel(thinking), name="clerk")
    worker = Agent(FunctionModel(working), name="worker", tools=[clerk.as_tool()])
    asking = FunctionModel(lambda _: [ToolCall("w", "worker", {"task": "go"})])
    boss = Agent(asking, name="boss", tools=[worker.as_tool()])
    async with lab.runtime(agents=[boss]) as runtime:
        session = await runtime.session("s")
        receipt = await session.send("go", key="go")
        await lab.until(_all_at_work)
        await session.cancel("enough", by="ann", turn_id=receipt.turn_id)
        result = await receipt.result()
        assert kind_of(result.outcome) == "cancelled", result
        for row in await runtime.processes.list():
            outcome = await runtime.handle(row.id).outcome()
            assert isinstance(outcome, Cancelled), outcome
        await lab.until(_all_idle)


async def _all_at_work(store: Store) -> bool:
    """Both clerks are asked, or it is too late for that."""
    rows = {row.id: row for row in await store.sessions(SessionFilter(limit=100))}
    clerks = [row for name, row in rows.items() if name.endswith("clerk") and row.next > 1]
    boss = rows.get("s")
    return len(clerks) == 2 or (boss is not None and (boss.turn is None or boss.cancel is not None))


async def _all_idle(store: Store) -> bool:
    return all(row.turn is None for row in await store.sessions(SessionFilter(limit=100)))


# ---------------------------------------------------------------------- by handle


async def followed(lab: Lab) -> None:
    """A child in the background that wakes its session, which then follows it up."""

    def leading(request: ModelRequest) -> str | list[ToolCall]:
        last, found = request.messages[-1], results(request)
        if last.role == "user" and last.text == "go":
            return [ToolCall("a", "spawn_agent", {"prompt": "one", "background": True})]
        if last.role == "user":
            return [ToolCall("b", "spawn_agent", {"prompt": "two", "follow": found[0].content})]
        return "told" if len(found) == 1 else f"{found[1].content}"

    echo = FunctionModel(lambda request: f"{len(request.messages)}: {request.messages[-1].text}")
    clerk = Agent(echo, name="clerk")
    boss = Agent(FunctionModel(leading), name="boss", plugins=[Subagents([clerk])])
    async with lab.runtime(agents=[boss]) as runtime:
        session = await runtime.session("s")
        await session.run("go", key="go")
        await lab.until(lambda store: _heard(store, "s"))
        result = await session.result("s.2")
        assert result.text == "3: two", result


async def reminded(lab: Lab) -> None:
    """A child in the background waits for a person; what its parent says to it meanwhile is said once."""

    def leading(request: ModelRequest) -> str | list[ToolCall]:
        last, found = request.messages[-1], results(request)
        if last.role == "tool":
            return "started" if len(found) == 1 else f"{found[1].content}"
        if last.text == "go":
            return [ToolCall("a", "spawn_agent", {"prompt": "buy", "background": True})]
        if last.text == "remind":
            return [ToolCall("b", "spawn_agent", {"prompt": "the red one", "follow": found[0].content})]
        return "I know"

    boss = Agent(FunctionModel(leading), name="boss", plugins=[Subagents([patient()])])
    async with lab.runtime(agents=[boss]) as runtime:
        session, child = await runtime.session("s"), await runtime.session("s.1.1.0~patient")
        await session.run("go", key="go")
        await lab.until(lambda store: _is_parked(store, child.id))
        receipt = await session.send("remind", key="remind")
        await lab.until(lambda store: _heard(store, child.id))
        for call in await child.pending():
            await _approve(child, call.call_id)
        result = await receipt.result()
        assert result.text == "paid 3 / buy / the red one", result
        await lab.until(lambda store: _heard(store, "s", 3))
        assert (await session.result("s.3")).text == "I know"
