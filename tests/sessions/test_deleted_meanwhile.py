"""A session that is deleted while it is read: that is told, and no damage of the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Agent, Runtime, Session
from perdure.errors import SessionDeleted
from perdure.model.write import Delete
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.testing import FunctionModel


class Deleting(MemoryStore):
    """Deletes the session when its records are about to be read for the `at`th time."""

    def __init__(self, rows: MemoryRows, at: int) -> None:
        super().__init__(rows)
        self.left = at

    async def nodes(self, sid: int, first: int, last: int) -> list[tuple[int, int, bytes]]:
        self.left -= 1
        if self.left == 0:
            await self.write(Delete("s", 1))
        return await super().nodes(sid, first, last)


async def send_and_wait(session: Session) -> Any:
    return await (await session.send("three")).result()


READS: dict[str, Callable[[Session], Awaitable[Any]]] = {
    "a turn": lambda session: session.run("three"),
    "a queued turn": send_and_wait,
    "a history": lambda session: session.history(),
    "a result": lambda session: session.result("s.2"),
}


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("how", READS)
async def test_a_session_that_is_deleted_while_it_is_read_is_deleted(how: str, at: int) -> None:
    rows, agent = MemoryRows(), Agent(FunctionModel(lambda _: "done"))
    async with Runtime(MemoryStore(rows), agents=[agent]) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        await session.run("two")
    store = Deleting(rows, at)
    async with Runtime(store, agents=[agent]) as runtime:
        session = await runtime.session("s")
        try:
            await READS[how](session)
        except SessionDeleted:
            pass
        else:
            assert store.left > 0, "it was read whole before"
