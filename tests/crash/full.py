"""Turns that come to the limits of what a turn may have: what is killed."""

from __future__ import annotations

from typing import Any

from perdure import Agent, Budget, ModelRequest, Plugin, ToolCall, ToolContext, tool
from perdure.model.codec import encode
from perdure.model.ids import MAX_ORDINAL
from perdure.model.message import Message, Text
from perdure.model.record import Ended, Replied, Said
from perdure.model.session import Node
from perdure.model.tool import Ok
from perdure.model.write import Accept, Append, Release, TurnScope
from perdure.plugins.hooks import TurnEndContext
from perdure.ports.store import Store
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab
from tests.crash.reference import SESSION

OTHER = "another worker"


class Watching(Plugin):
    """Looks at how a turn ends, so that its last reply is recorded before the commit."""

    id = "watching"

    def after_turn(self, ctx: TurnEndContext) -> None: ...


def greedy(lab: Lab) -> Agent[str]:
    @tool
    async def work(ctx: ToolContext[Any]) -> str:
        """Work."""
        await lab.effect("work", ctx.idempotency_key)
        return "done"

    def answer(request: ModelRequest) -> Any:
        return [ToolCall("", "work")] * (2 if len(request.messages) == 1 else 4)

    budget = Budget(calls_per_reply=3)
    return Agent(FunctionModel(answer), name="greedy", tools=[work], plugins=[Watching()], budget=budget)


async def asked_too_much(lab: Lab) -> None:
    """The second reply asks for more calls than one may."""
    async with lab.runtime([greedy(lab)]) as runtime:
        await (await runtime.session(SESSION)).run("go", key="go")


async def filled_up(lab: Lab) -> None:
    """Every ordinal of the turn is used, as an older version left it; it is cancelled."""
    async with lab.runtime():
        await fill(lab._raw)
    async with lab.runtime([greedy(lab)]) as runtime:
        session = await runtime.session(SESSION)
        await session.cancel("enough", turn_id=f"{SESSION}.1")
        await session.result(f"{SESSION}.1")


async def fill(store: Store) -> None:
    """Not through the lab: these writes are another version's."""
    row = await store.session(SESSION)
    if row is None:
        said = encode(Said(Message("user", (Text("go"),)), op="op"))
        accepted = await store.write(Accept(SESSION, "greedy", said, "op", 1, worker=OTHER))
        scope = TurnScope(SESSION, accepted.row.sid, 1, OTHER, accepted.row.generation)
        parts = tuple([ToolCall(f"c{index}", "work") for index in range(MAX_ORDINAL)])
        records = [
            encode(Replied(1, parts, started=tuple(range(MAX_ORDINAL)))),
            *[encode(Ended(f"1.{index}", Ok("done"))) for index in range(MAX_ORDINAL - 1)],
        ]
        await store.write(Append(scope, tuple(Node(n, body) for n, body in enumerate(records, 1)), 2))
        await store.write(Release(scope, 3, stuck="too many records"))
