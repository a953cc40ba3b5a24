"""`session.update(metadata=…)` against writes that open, commit and queue turns at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Agent, Runtime, ToolCall, ToolContext, tool
from perdure.errors import MetadataConflict
from perdure.model.llm import ModelRequest
from perdure.model.write import Configure, Write
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.testing import FunctionModel
from tests.kit import SOON, Place, TellingModel, until

TURNS = 30


class Overtaken(MemoryStore):
    """A store on which something else is written between what the first update has read and what it writes."""

    def __init__(self, rows: MemoryRows) -> None:
        super().__init__(rows)
        self.meanwhile: Callable[[], Awaitable[Any]] | None = None
        self.configured = 0

    async def write(self, write: Write[Any]) -> Any:
        if isinstance(write, Configure):
            self.configured += 1
            if (meanwhile := self.meanwhile) is not None:
                self.meanwhile = None
                await meanwhile()
        return await super().write(write)


def seen_by(request: ModelRequest) -> Any:
    return request.metadata["n"]


async def test_turn_opened_while_an_update_is_under_way_keeps_what_it_was_opened_under() -> None:
    rows, model = MemoryRows(), TellingModel()
    store = Overtaken(rows)
    async with Runtime(MemoryStore(rows), agents=[Agent(model)]) as worker, Runtime(store) as other:
        session = await worker.session("s", metadata={"n": 0})
        model.say("one")
        await session.run("one")
        await model.next()

        async def opens() -> None:
            await session.send("two")

        store.meanwhile = opens
        await (await other.session("s")).update(metadata={"n": 1})
        second = await model.next()
        model.say([ToolCall("c", "nothing", {})], "two", "three")
        again = await model.next()
        await session.result("s.2")
        await session.run("three")
        third = await model.next()

    assert [seen_by(each) for each in (second, again, third)] == [0, 0, 1]
    assert store.configured == 2  # the first one was refused, and made again on top of the open turn


async def test_turn_that_a_commit_opens_while_an_update_is_under_way_keeps_what_it_was_opened_under() -> None:
    rows, model = MemoryRows(), TellingModel()
    store = Overtaken(rows)
    async with Runtime(MemoryStore(rows), agents=[Agent(model)]) as worker, Runtime(store) as other:
        session = await worker.session("s", metadata={"n": 0})
        await session.send("one")
        await session.send("two")
        await session.send("three")
        first = await model.next()

        async def commits() -> None:
            model.say("one")
            await session.result("s.1")

        store.meanwhile = commits
        await (await other.session("s")).update(metadata={"n": 1})
        second = await model.next()
        model.say("two", "three")
        await session.result("s.3")
        third = await model.next()
        held = await other.sessions.list(metadata={"n": 1})

    assert [seen_by(each) for each in (first, second, third)] == [0, 0, 1]
    assert ([row.id for row in held], store.configured) == (["s"], 2)


async def test_update_that_another_one_overtakes_is_made_on_top_of_it() -> None:
    rows, model = MemoryRows(), TellingModel()
    store = Overtaken(rows)
    async with Runtime(MemoryStore(rows), agents=[Agent(model)]) as worker, Runtime(store) as other:
        session = await worker.session("s", metadata={"n": 0})
        await session.send("one")
        await model.next()

        async def retitled() -> None:
            await session.update(metadata={"n": 1}, title="called so meanwhile")

        store.meanwhile = retitled
        await (await other.session("s")).update(metadata={"n": 2})
        model.say([ToolCall("c", "nothing", {})], "one", "two")
        again = await model.next()
        await session.result("s.1")
        await session.run("two")
        second = await model.next()
        [row] = await other.sessions.list()

    assert [seen_by(each) for each in (again, second)] == [0, 2]
    assert (row.metadata, row.title) == ({"n": 2}, "called so meanwhile")


async def test_first_input_of_a_session_that_an_update_made_first_is_refused_if_it_is_for_somebody_else() -> None:
    rows = MemoryRows()
    store = Overtaken(rows)
    agent = Agent(FunctionModel(lambda request: str(seen_by(request))))
    async with Runtime(MemoryStore(rows), agents=[agent]) as worker, Runtime(store, agents=[agent]) as other:
        mine = await worker.session("s", metadata={"n": 1})

        async def accepted() -> None:
            await mine.run("hello")

        store.meanwhile = accepted
        theirs = await other.session("s", metadata={"n": 2})
        with pytest.raises(MetadataConflict):
            await theirs.update(title="ours")
        [row] = await worker.sessions.list()

    assert (row.metadata, row.title) == ({"n": 1}, "hello")  # the title is made of the first input


@pytest.mark.parametrize("updates", [1, 3])
async def test_every_turn_works_for_one_of_those_that_the_session_was_for(file: Place, updates: int) -> None:
    """Two Runtimes on one file: one says things and runs the turns, the other updates all the while."""
    worked: dict[str, list[int]] = {}
    told = 0

    @tool
    async def work(ctx: ToolContext[Any]) -> str:
        """Note whom it works for."""
        await asyncio.sleep(0)
        worked[ctx.turn_id].append(int(ctx.metadata["n"]))
        return "done"

    def model(request: ModelRequest) -> str | list[ToolCall]:
        worked.setdefault(request.turn_id, []).append(int(seen_by(request)))
        return "done" if request.messages[-1].role == "tool" else [ToolCall("c", "work", {})]

    agent = Agent(FunctionModel(model), tools=[work])
    async with file.runtime(agent) as worker, file.runtime() as front:
        session = await worker.session("s", metadata={"n": 0})
        await session.send("begin")

        async def update() -> None:
            nonlocal told
            other = await front.session("s")
            while len(worked) < TURNS:
                told += 1
                await other.update(metadata={"n": told})
                await asyncio.sleep(0)

        async def talk() -> dict[str, int]:
            """The least that each turn may see: what an update had returned for before the input was said."""
            least: dict[str, int] = {}
            while len(worked) < TURNS:
                known = int((await front.sessions.list())[0].metadata["n"])
                receipts = [await session.send("more") for _ in range(2)]
                least |= {each.turn_id: known for each in receipts}
                await receipts[-1].result(SOON)
            return least

        talking = asyncio.create_task(talk())
        await asyncio.gather(talking, *[update() for _ in range(updates)])
        least = talking.result()
        await until(lambda: worker.wait_idle(SOON))
        [row] = await front.sessions.list()
        last = (await session.run("last", metadata={"last": True})).turn_id

    ordered = [worked[f"s.{n}"] for n in range(1, len(worked) + 1)]
    assert all(len(set(each)) == 1 and len(each) == 3 for each in ordered)
    if updates == 1:  # of several at once, none is the later one
        assert all(worked[turn][0] >= known for turn, known in least.items())
        assert [each[0] for each in ordered] == sorted(each[0] for each in ordered)
    assert worked[last][0] == row.metadata["n"]
