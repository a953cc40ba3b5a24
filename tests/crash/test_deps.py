"""Live objects made for every run, at every death: in the function that makes them, before the first record, at a park.

A turn parks for an approval, a process for a signal; whatever they do, they do with objects that were made for them in
the same life of the program, and a run that ends or parks leaves its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Callable

import pytest

from perdure import Agent, Caller, ModelRequest, ProcessContext, Runtime, ToolCall, ToolContext, process, tool
from perdure.errors import AlreadyAnswered
from perdure.ports.store import Store
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab, Played, Report, StoreKind
from tests.crash.reference import ATTENDED, patiently

CALLERS = [["s", "clerk", "u-17"], ["", "", None]]
"""Of the turn; of the process, which the host starts."""


async def with_live_objects(lab: Lab) -> None:
    made = 0

    @contextlib.asynccontextmanager
    async def deps(caller: Caller) -> AsyncGenerator[str]:
        nonlocal made
        made += 1
        name = f"{lab.incarnation}.{made}"
        whom = [caller.session_id, caller.agent, caller.metadata.get("user")]
        await lab.effect("open", name, whom)
        try:
            yield name
        finally:
            await lab.effect("close", name, whom)

    async def use(what: str, key: str, name: str) -> str:
        await lab.effect(what, key, name)
        return what

    @tool(approval="ask", recovery="rerun")
    async def sign(ctx: ToolContext[str]) -> str:
        """Sign with what was made for the turn."""
        return await use("sign", ctx.idempotency_key, ctx.deps)

    @process
    async def ship(ctx: ProcessContext[str]) -> str:
        async def pack() -> str:
            return await use("pack", ctx.process_id, ctx.deps)

        async def send() -> str:
            return await use("send", ctx.process_id, ctx.deps)

        await ctx.step(pack, recovery="rerun")
        await ctx.wait_signal("go")
        return await ctx.step(send, recovery="rerun")

    def answer(request: ModelRequest) -> str | list[ToolCall]:
        return "done" if request.messages[-1].role == "tool" else [ToolCall("c", "sign", {})]

    agent = Agent(FunctionModel(answer), name="clerk", tools=[sign])
    async with lab.runtime([agent], processes=[ship], deps=deps, lease=ATTENDED) as runtime:
        await patiently(functools.partial(sign_it, runtime))
        handle = await patiently(lambda: runtime.start(ship, id="p"))
        await lab.until(parked_or_signalled)
        await patiently(lambda: handle.signal("go", key="go"))
        await patiently(handle.result)
        await runtime.wait_idle()


async def parked_or_signalled(store: Store) -> bool:
    row = await store.process("p")
    assert row is not None
    return row.status != "running" or "signal.go" in [event.type for _, _, event in await store.events(row.pid)]


async def sign_it(runtime: Runtime) -> None:
    session = await runtime.session("s", metadata={"user": "u-17"})
    await session.run("sign", key="sign")
    for pending in await session.pending():
        with contextlib.suppress(AlreadyAnswered):
            await session.approve(pending.call_id)
    await session.result("s.1")


def check_objects(played: Played, at: str) -> None:
    """What was used was open, of the same life of the program; the last life has left all that it opened."""
    opened: list[str] = []
    for line in played.ledger:
        if line.name == "open":
            assert line.data in CALLERS, at
            opened.append(line.key)
        elif line.name == "close":
            opened.remove(line.key)
        elif line.name in ("sign", "pack", "send"):
            assert line.data in opened, f"{at}: {line}"
            assert line.data.startswith(f"{line.incarnation}."), f"{at}: {line}"
    last = max(line.incarnation for line in played.ledger)
    assert not [name for name in opened if name.startswith(f"{last}.")], at


def check(report: Report) -> None:
    assert report.problems == []
    for row in report.rows:
        played, at = row.played, str(row.crash)
        check_objects(played, at)
        session, shipped = played.ending.session("s"), played.ending.process("p")
        assert session is not None, at
        assert shipped is not None, at
        assert (session.state, session.turns) == ("idle", {1: "finished"}), at
        assert (shipped.status, shipped.outcome["value"]) == ("completed", "send"), at
    crashes = {str(row.crash) for row in report.rows}
    assert crashes >= INSIDE | BEFORE_THE_FIRST_RECORD | AT_THE_PARK | IN_THE_PROCESS


INSIDE = {"before effect open", "lost effect open", "before effect open #2", "lost effect open #2"}
BEFORE_THE_FIRST_RECORD = {"before ask model 1.1", "before append 1: replied 1, opening a wait, parking"}
AT_THE_PARK = {
    "lost append 1: replied 1, opening a wait, parking",
    "before effect close",
    "lost effect close",
    "before resolve approval",
    "lost resolve approval",
}
IN_THE_PROCESS = {"before effect open #3", "lost effect open #3", "before effect close #3", "lost effect close #3"}


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_live_objects_are_made_again_wherever_it_is_killed(store: StoreKind, crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(with_live_objects, store=store))


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
def test_live_objects_are_made_again_wherever_it_is_really_killed(crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(with_live_objects, real=True))
