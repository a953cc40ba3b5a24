"""An input queued behind a parked turn, of which its host is told, at every death: it is kept, and runs once."""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import Any

import pytest
from msgspec import Struct

from perdure import Agent, ModelRequest, ModelResponse, Session, ToolCall, ToolContext, TurnResult, Usage, tool
from perdure.errors import AlreadyAnswered
from perdure.model.outcome import Queued
from perdure.testing import FunctionModel
from perdure.testing.crash import MODES, Crash, ForkServer, Lab, Mode, Played, StoreKind, play
from tests.crash.reference import ATTENDED, patiently

STORES: tuple[StoreKind, ...] = ("memory", "sqlite")


class Fate(Struct, frozen=True):
    """Requests to the model of both turns, and those whose usage is unknown."""

    model: int = 3
    usage: int = 0


PLAIN = Fate()
# A model call in flight is asked again, and may have been asked for nothing.
UNSURE = Fate(usage=1)
AGAIN = Fate(4, usage=1)

RULINGS: dict[str, dict[Mode, Fate]] = {
    "beat": {"before": PLAIN, "lost": PLAIN, "hang": PLAIN},
    # Accepted, its owner may have asked the model already.
    "accept queue": {"before": PLAIN, "lost": UNSURE, "hang": PLAIN},
    "ask model 1.1": {"before": UNSURE, "lost": AGAIN, "hang": UNSURE},
    "chunk 1 of model 1.1": {"before": AGAIN},
    "append 1: replied 1, opening a wait, parking": {"before": AGAIN, "lost": PLAIN, "hang": AGAIN, "late": AGAIN},
    # The input behind the parked turn: on disk or said again, and in flight is nothing.
    "accept queue #2": {"before": PLAIN, "lost": PLAIN, "hang": PLAIN},
    "resolve approval": {"before": PLAIN, "lost": PLAIN, "hang": PLAIN},
    "append 1: started 1.0": {"before": PLAIN, "lost": PLAIN, "hang": PLAIN, "late": PLAIN},
    "begin sign 1.1.0": {"before": PLAIN},
    "effect sign": {"before": PLAIN, "lost": PLAIN, "hang": PLAIN},
    "end sign 1.1.0": {"before": PLAIN},
    "append 1: ended 1.0": {"before": PLAIN, "lost": UNSURE, "hang": PLAIN, "late": PLAIN},
    "ask model 1.2": {"before": UNSURE, "lost": AGAIN, "hang": UNSURE},
    "chunk 1 of model 1.2": {"before": AGAIN},
    "chunk 2 of model 1.2": {"before": AGAIN},
    # The commit opens the queued turn for the same owner.
    "commit 1": {"before": AGAIN, "lost": UNSURE, "hang": AGAIN, "late": AGAIN},
    "ask model 2.1": {"before": UNSURE, "lost": AGAIN, "hang": UNSURE},
    "chunk 1 of model 2.1": {"before": AGAIN},
    "chunk 2 of model 2.1": {"before": AGAIN},
    "commit 2": {"before": AGAIN, "lost": PLAIN, "hang": AGAIN, "late": AGAIN},
    "retire": {"before": PLAIN, "lost": PLAIN, "hang": PLAIN},
}


def clerk(lab: Lab) -> Agent[str]:
    @tool(approval="ask", recovery="rerun")
    async def sign(ctx: ToolContext[Any]) -> str:
        """Sign."""
        await lab.effect("sign", ctx.idempotency_key)
        return "signed"

    def answer(request: ModelRequest) -> ModelResponse:
        last, usage = request.messages[-1], Usage(input=1, output=1)
        if last.role == "user" and last.text == "sign":
            return ModelResponse(tool_calls=[ToolCall("c", "sign")], usage=usage)
        return ModelResponse(f"after {last.role}", usage=usage)

    return Agent(FunctionModel(answer), name="clerk", tools=[sign])


async def queue_up(lab: Lab) -> None:
    """What a host does that is started again after every death: the same keys, and approval of what waits."""
    async with lab.runtime([clerk(lab)], lease=ATTENDED) as runtime:
        session = await runtime.session("s")
        await patiently(lambda: session.run("sign", key="1"))
        told = await patiently(lambda: session.run("hello", key="2"))
        if isinstance(told.outcome, Queued):
            assert (told.turn_id, told.outcome.behind) == ("s.2", "s.1")
            await approve(session)
        await patiently(lambda: ended(session))


async def approve(session: Session) -> None:
    for pending in await session.pending():
        try:
            await patiently(functools.partial(session.approve, pending.call_id))
        except AlreadyAnswered:
            return


async def ended(session: Session) -> TurnResult[Any]:
    return await session.result("s.2")


def check(played: Played, fate: Fate) -> None:
    assert played.problems == []
    session = played.ending.session("s")
    assert session is not None
    assert (session.state, session.head, session.turns) == ("idle", 2, {1: "finished", 2: "finished"})
    assert session.said[-2:] == ["user: hello", "assistant: after user"]
    assert Fate(played.model_calls, session.unknown_usage) == fate


DEATHS = [
    pytest.param(Crash(point, mode), fate, id=f"{mode} {point}")
    for point, fates in RULINGS.items()
    for mode, fate in fates.items()
]
KILLS = [death for death in DEATHS if str(death.id).split()[0] in ("before", "lost")]
WRITES = ["accept queue", "accept queue #2", "resolve approval", "commit 1", "commit 2"]


@pytest.mark.parametrize("store", STORES)
def test_every_point_of_a_queued_input_is_ruled(store: StoreKind) -> None:
    played = play(queue_up, [], store=store)

    check(played, PLAIN)
    kinds = {point.name: set(MODES[point.kind]) - {"unheard"} for point in played.traces[-1]}
    assert {point: set(fates) for point, fates in RULINGS.items()} == kinds


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("crash", "fate"), DEATHS)
def test_kill_while_an_input_is_queued_has_its_ruled_fate(crash: Crash, fate: Fate, store: StoreKind) -> None:
    check(play(queue_up, [crash], store=store, timeout=60), fate)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("point", WRITES)
def test_lost_reply_costs_a_queued_input_nothing(point: str, store: StoreKind) -> None:
    check(play(queue_up, [Crash(point, "unheard")], store=store, timeout=60), PLAIN)


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(queue_up, timeout=60) as ready:
        yield ready


@pytest.mark.kill
@pytest.mark.parametrize(("crash", "fate"), KILLS)
def test_real_kill_while_an_input_is_queued_has_its_ruled_fate(forks: ForkServer, crash: Crash, fate: Fate) -> None:
    check(forks.play([crash]), fate)
