"""Model calls that do not begin at once, and that cannot be made as they were: what is killed.

`limited`: two sessions share a model that takes one call at a time, and the call of the second waits for room.
`lost_file`: the bytes of a picture of the first turn are gone when the second turn asks the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from perdure import Agent, Image, ModelRequest, ModelResponse, RateLimit, Session, Usage
from perdure.model.event import RateLimitWait
from perdure.model.message import Stored, Text
from perdure.stores.memory import MemoryBlobs
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab

WAITS = "the second call waits"


async def limited(lab: Lab) -> None:
    asked, waiting = asyncio.Event(), asyncio.Event()

    async def answer(request: ModelRequest) -> ModelResponse:
        text = request.messages[-1].text
        if text == "first":
            asked.set()
            # Only one host needs the wait to be seen: after a kill it depends on which turn is taken up first.
            if lab.incarnation == 1:
                await waiting.wait()
        return ModelResponse(f"heard {text}", usage=Usage(input=1, output=2))

    agent = Agent(FunctionModel(answer, "p:slow"), name="limited")
    async with lab.runtime([agent], rate_limits={"p:": RateLimit(concurrency=1)}) as runtime:
        one, two = await runtime.session("one"), await runtime.session("two")
        first = await one.send("first", key="1")
        if lab.incarnation == 1:
            await asked.wait()
        seen = asyncio.create_task(_sees_a_wait(two))
        await asyncio.sleep(0)
        second = await two.send("second", key="2")
        if lab.incarnation == 1:
            await seen
            await lab.mark(WAITS)
            waiting.set()
        seen.cancel()
        await first.result()
        await second.result()


async def _sees_a_wait(session: Session) -> None:
    async for event in session.observe():
        if isinstance(event, RateLimitWait):
            return


PICTURE = b"a picture"


async def _look(request: ModelRequest) -> AsyncIterator[str | ModelResponse]:
    """Reads the files that it is shown, and says what it saw."""
    assert request.open_file is not None
    seen = ""
    for part in [part for message in request.messages for part in message.parts]:
        if isinstance(part, Image):
            assert isinstance(part.source, Stored)
            seen = b"".join([piece async for piece in request.open_file(part.source)]).decode()
        elif isinstance(part, Text) and "is not shown" in part.text:
            seen = "nothing"
    yield f"saw {seen}"
    yield ModelResponse(f"saw {seen}", usage=Usage(input=1, output=2))


async def lost_file(lab: Lab) -> None:
    if any(line.name == "first turn" for line in lab.ledger):
        _lose(lab.store)  # and not put again: the input that brought it is not said again
    async with lab.runtime([Agent(FunctionModel(_look), name="looking")]) as runtime:
        session = await runtime.session("s")
        if not any(line.name == "first turn" for line in lab.ledger):
            await session.run(["what is this?", Image.from_bytes(PICTURE, "image/png", "p.png")], key="1")
            await lab.effect("first turn", "1")
            _lose(lab.store)
        await session.run("and now?", key="2")


def _lose(store: Any) -> None:
    """Take the bytes of all blobs away, as a damaged disk does."""
    blobs = store.inner.blobs
    if isinstance(blobs, MemoryBlobs):
        blobs._rows.blobs.clear()
        return
    for path in blobs.folder.rglob("*"):
        if path.is_file():
            path.unlink()
