"""A session in which much was asked of people costs no more than one in which nothing was."""

from __future__ import annotations

from perdure import Agent, Runtime, ToolContext, tool
from perdure.model.session import WaitRow
from perdure.stores.memory import MemoryStore
from tests.kit import agent_calling


class Counting(MemoryStore):
    """Counts the waits that are read."""

    read = 0

    async def waits(self, sid: int | None = None, due: int | None = None) -> list[WaitRow]:
        found = await super().waits(sid, due)
        self.read += len(found) if sid is not None else 0
        return found

    async def wait(self, wait_id: str) -> WaitRow | None:
        found = await super().wait(wait_id)
        self.read += found is not None
        return found


def calls(name: str) -> Agent[str]:
    return agent_calling(name, tools=[pay, order])


@tool(approval="ask")
def pay() -> str:
    return "paid"


@tool(deferred=True)
def order(ctx: ToolContext) -> None:
    keys.append(ctx.defer())


keys: list[str] = []


async def test_an_approval_reads_no_waits_of_earlier_turns() -> None:
    store, read = Counting(), []
    async with Runtime(store, agents=[calls("pay")]) as runtime:
        session = await runtime.session("s")
        for turn in range(1, 6):
            before = store.read
            assert (await session.run("pay")).waiting
            await session.approve(f"s.{turn}.1.0")
            assert (await session.result(f"s.{turn}")).text == "done"
            read.append(store.read - before)

    assert read == [read[0]] * 5


async def test_a_deferred_completion_reads_no_waits_of_earlier_turns() -> None:
    store, read = Counting(), []
    async with Runtime(store, agents=[calls("order")]) as runtime:
        session = await runtime.session("s")
        for turn in range(1, 6):
            before = store.read
            assert (await session.run("order")).waiting
            await runtime.resolve(keys.pop(), "sent")
            assert (await session.result(f"s.{turn}")).text == "done"
            read.append(store.read - before)

    assert read == [read[0]] * 5
