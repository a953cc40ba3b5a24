"""The turns that a plugin under contract runs in: three of them, with a restart before the last one.

The model is a function: it calls the kit's own tools, one of which fails, and the tools that the author names; then it
streams an answer in pieces. Every request for approval is granted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from typing import Any

import msgspec
from msgspec import Struct

from mainstay.agent import Agent
from mainstay.errors import Conflict, MainstayError, NotFound, ToolError
from mainstay.model.agent import Budget
from mainstay.model.ids import split
from mainstay.model.llm import ModelRequest
from mainstay.model.message import ToolCall
from mainstay.model.outcome import PluginAborted, kind_of
from mainstay.model.tool import Failed
from mainstay.plugins.hooks import Plugin
from mainstay.plugins.registry import overrides
from mainstay.plugins.turn import CODES
from mainstay.providers.scripted import FunctionModel
from mainstay.runtime import Runtime
from mainstay.sessions.result import TurnResult
from mainstay.sessions.session import Session
from mainstay.stores.memory import MemoryRows, MemoryStore
from mainstay.testing.plugin_contract.probe import Probe, remembered
from mainstay.tools.context import ToolContext
from mainstay.tools.define import tool

SESSION = "probed"
PIECES = ("Here is wh", "at I fo", "und: noth", "ing special.")
INPUTS = ("Look it up, please.", "And once more.", "Thank you.")
SECONDS = 30.0
"""For one turn, also on a busy machine."""

UNENDED = ("hung", "stuck")
"""What becomes of a turn that does not end, beside the outcomes of those that do."""

ABORTED = {*CODES.values(), "plugin_output", "plugin_session", "plugin_snapshot_newer", "plugin_snapshot_unreadable"}
SPOILT = {"before_tool_call_failed", "after_tool_call_failed", "plugin_conflict"}
"""How turns and calls end by a plugin's fault. Whatever else they end with is a decision."""

RAISED = {"tool_raised", "invalid_tool_args", "invalid_output", "tool_unavailable"}
"""How calls of the author's own tools must not end here."""


@tool(recovery="rerun")
async def look_up(word: str) -> str:
    """Look something up."""
    return f"{word}: nothing special"


@tool(name="look_up", recovery="rerun")
async def look_up_aloud(word: str, ctx: ToolContext[Any]) -> str:
    """Look something up, and tell and keep what a filter wants to see."""
    ctx.progress({"looking up": word})
    await ctx.artifacts.put(f"{word}: nothing special", name=f"{word}.txt")
    await ctx.artifacts.put(b"\xff\x00", name=f"{word}.bin")
    return f"{word}: nothing special"


@tool(recovery="rerun")
async def stumble(word: str) -> str:
    """Fail."""
    raise ToolError(f"cannot find {word}", code="not_found", data={"word": word})


class Subject(Struct, frozen=True):
    """A plugin and what it needs to show what it does.

    `calls` are made by the model in every turn, beside the kit's own; `tools` are tools of the host for them; `others`
    makes plugins that run before it.
    """

    make: Callable[[], Plugin]
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    tools: tuple[Any, ...] = ()
    options: Any = None
    others: Callable[[], Iterable[Plugin]] = tuple
    fails_without_services: frozenset[str] = frozenset()


class TurnEnd(Struct, frozen=True):
    """One turn: how it ended, what its messages say, and what a plugin did wrong in it."""

    kind: str
    said: tuple[str, ...]
    faults: tuple[str, ...] = ()


class ContractRun(Struct, frozen=True):
    """All turns. `requests` is what the model was asked.

    `states` is the plugin's state before the restart and in the end.
    """

    turns: tuple[TurnEnd, ...]
    requests: tuple[bytes, ...]
    states: tuple[bytes | None, ...] = ()


def agent_for(subject: Subject, probe: Probe, requests: list[bytes] | None = None) -> Agent[str]:
    """The agent with a new plugin under the probe. Raises what a Runtime would refuse it with."""

    async def model(request: ModelRequest) -> AsyncIterator[str | ToolCall]:
        if requests is not None:
            requests.append(msgspec.json.encode(request.messages))
        if ":" in request.call_id:  # a plugin asks beside the turn
            yield "It was about nothing special."
            return
        _, (_, step) = split(request.call_id, 2)
        if step > 1:
            for piece in PIECES:
                yield piece
                await asyncio.sleep(0)
            return
        wanted = [("look_up", {"word": "durable"}), ("stumble", {"word": "nowhere"}), *subject.calls]
        for at, (name, args) in enumerate(wanted):
            yield ToolCall(f"call-{request.call_id}-{at}", name, args)

    plugin = probe.watch(subject.make())
    return Agent(
        FunctionModel(model),
        name="contract",
        instructions="Answer briefly.",
        tools=[look_up_aloud if overrides(plugin, "filter_value") else look_up, stumble, *subject.tools],
        plugins=[*subject.others(), plugin],
        budget=Budget(steps=8),
    )


async def run_turns(subject: Subject, probe: Probe, *, before: str | None = None) -> ContractRun:
    """Three turns; disturbed, if at all, is the first. `before` is another session that goes first.

    A turn that cannot go on is the last one: the session would accept no other.
    """
    rows, requests, turns, states = MemoryRows(), list[bytes](), list[TurnEnd](), list[bytes | None]()
    for numbers in ((1, 2), (3,)):
        async with runtime(subject, probe, rows, requests) as host:
            if before is not None and probe.incarnation == 1:
                await run_turn(host, subject, 1, before)
                requests.clear()
            for number in numbers:
                turns.append(await run_turn(host, subject, number))
                probe.calm()
                if turns[-1].kind in UNENDED:
                    return ContractRun(tuple(turns), tuple(requests))
            probe.check_state(instance(probe))
            states.append(remembered(instance(probe)))
        probe.incarnation += 1
    return ContractRun(tuple(turns), tuple(requests), tuple(states))


def instance(probe: Probe) -> Plugin:
    """The plugin instance of the session, as it is now."""
    return probe.instances.get(SESSION) or probe.instances[""]


def runtime(subject: Subject, probe: Probe, rows: MemoryRows, requests: list[bytes]) -> Runtime:
    probe.instances.clear()
    return Runtime(MemoryStore(rows), agents=[agent_for(subject, probe, requests)], grace=0.5)


async def opened(host: Runtime, subject: Subject, name: str) -> Session:
    options = None if subject.options is None else {subject.make().id: subject.options}
    return await host.session(name, options=options)


async def run_turn(host: Runtime, subject: Subject, number: int, name: str = SESSION) -> TurnEnd:
    """Say something, approve whatever asks, and see how it ends."""
    try:
        async with asyncio.timeout(SECONDS):
            session = await opened(host, subject, name)
            result = await session.run(INPUTS[number - 1], key=f"turn-{number}")
            while result.waiting:
                await approve(session)
                result = await session.result(result.turn_id)
            await session.history()
    except TimeoutError:
        return TurnEnd("hung", (), (f"turn {number} did not end within {SECONDS:g} s",))
    except MainstayError as error:
        return TurnEnd("stuck", (), (f"turn {number} cannot go on: {error}",))
    said = tuple([f"{message.role}: {message.text}" for message in result.new_messages])
    return TurnEnd(kind_of(result.outcome), said, tuple(faults(result)))


async def approve(session: Session) -> None:
    """Answer what waits. After a crash it may be answered already."""
    for pending in await session.pending():
        with contextlib.suppress(Conflict, NotFound):
            if pending.kind == "approval":
                await session.approve(pending.call_id)
            else:
                await session.settle(pending.call_id, "done")


def faults(result: TurnResult[Any]) -> Generator[str, None, None]:
    """What plugins did wrong in a turn."""
    for issue in result.issues:
        yield f"{issue.code}: {issue.message}"
    outcome = result.outcome
    if isinstance(outcome, PluginAborted) and outcome.code in ABORTED:
        yield f"the turn ends as {outcome.code}: {outcome.message}"
    for call in result.tool_calls:
        end = call.outcome
        if isinstance(end, Failed) and end.code in (SPOILT if call.tool in ("look_up", "stumble") else SPOILT | RAISED):
            yield f"the call of {call.tool} ends as {end.code}: {end.message}"
