"""Cancelling what is queued, at every death: all that one request names is cancelled, or none; and it never begins."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from perdure import Agent, ModelRequest, ToolCall, ToolContext, tool
from perdure.errors import AlreadyAnswered
from perdure.testing import FunctionModel
from perdure.testing.crash import Crash, Lab, Report, StoreKind, play
from tests.crash.reference import ATTENDED, patiently


def clerk(lab: Lab) -> Agent[str]:
    @tool(approval="ask", recovery="rerun")
    async def sign(ctx: ToolContext[Any]) -> str:
        """Sign."""
        await lab.effect("sign", ctx.idempotency_key)
        return "signed"

    def answer(request: ModelRequest) -> str | list[ToolCall]:
        last = request.messages[-1]
        return [ToolCall("c", "sign", {})] if last.text == "sign" else f"after {last.text or last.role}"

    return Agent(FunctionModel(answer), name="clerk", tools=[sign])


async def cancelled_while_queued(lab: Lab) -> None:
    """A host that is started again after every death: it says the same under the same keys, and takes two of its inputs
    back while the turn before them waits for a person."""
    async with lab.runtime([clerk(lab)], lease=ATTENDED) as runtime:
        session = await runtime.session("s")
        await patiently(lambda: session.run("sign", key="sign"))
        for said in ("two", "three", "four"):
            await patiently(functools.partial(session.send, said, key=said))
        queue = await session.queue()
        wanted = [each.turn_id for each in queue if each.message.text in ("two", "three")]
        assert wanted in ([], ["s.2", "s.3"])  # one write: never one of them alone
        if wanted:
            await patiently(functools.partial(queue.cancel, *wanted, reason="not needed"))
        for pending in await session.pending():
            try:
                await patiently(functools.partial(session.approve, pending.call_id))
            except AlreadyAnswered:
                break
        await patiently(lambda: session.result("s.4"))


def check(report: Report) -> None:
    assert (report.lost, report.problems) == (0, [])
    for row in report.rows:
        session, at = row.played.ending.session("s"), str(row.crash)
        assert session is not None, at
        assert session.turns == {1: "finished", 2: "cancelled", 3: "cancelled", 4: "finished"}, at
        assert session.said[-1] == "assistant: after four", at
        assert not [point for trace in row.played.traces for point in trace if " model 2." in point.name], at
        assert not [point for trace in row.played.traces for point in trace if " model 3." in point.name], at
    assert {"before cancel", "lost cancel"} <= {str(row.crash) for row in report.rows}


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_cancelled_inputs_never_begin_wherever_it_is_killed(store: StoreKind, crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(cancelled_while_queued, store=store))


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_a_lost_reply_cancels_nothing_twice(store: StoreKind) -> None:
    played = play(cancelled_while_queued, [Crash("cancel", "unheard")], store=store, timeout=60)

    session = played.ending.session("s")
    assert played.problems == []
    assert session is not None
    assert session.turns == {1: "finished", 2: "cancelled", 3: "cancelled", 4: "finished"}


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
def test_cancelled_inputs_never_begin_wherever_it_is_really_killed(crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(cancelled_while_queued, real=True))
