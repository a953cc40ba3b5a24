"""A conversation that the model refuses as too long in its third turn, and that goes on from a summary."""

from __future__ import annotations

from typing import Any

from perdure import Agent, ModelRequest
from perdure.builtin.compaction import SYSTEM, Compaction
from perdure.engine.journal import load
from perdure.errors import ProviderError
from perdure.model.record import Completed, Faltered, Framed
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab

SAID = ("A", "B", "C", "D")
LONG = 400
MOST = 1_900
"""Characters that the model takes: two turns and a third input, but nothing estimates them."""
SUMMARY = "They went through the alphabet."


def answer(request: ModelRequest) -> Any:
    """Tells which words of the user it was shown, and whether a summary stood before them."""
    if request.messages[0].text == SYSTEM:
        return SUMMARY
    if sum(len(message.text) for message in request.messages) > MOST:
        raise ProviderError("the conversation does not fit the model", code="context_overflow")
    begin = "sum " if SUMMARY in request.messages[0].text else ""
    shown = "".join([message.text[0] for message in request.messages if message.role == "user"])
    return f"{begin}{shown}".ljust(LONG, ".")


def agent() -> Agent[str]:
    return Agent(FunctionModel(answer, name="narrow"), name="talker", plugins=[Compaction(context_tokens=100_000)])


async def leave_records(lab: Lab) -> None:
    """Leave a line with what the incarnation before left on disk of the third turn."""
    async with lab.runtime([agent()], recover=False) as reader:
        row = await reader.store.session("s")
        if row is None:
            return
        for _, record in await load(reader.store, row.sid, 1, row.next):
            if isinstance(record, Completed | Framed) or (isinstance(record, Faltered) and not record.call):
                await lab.effect("recorded", type(record).__name__)


async def overflowing(lab: Lab) -> None:
    if lab.incarnation > 1:
        await leave_records(lab)
    async with lab.runtime([agent()]) as runtime:
        session = await runtime.session("s")
        for word in SAID:
            await session.run(word * LONG, key=word)
        row = await runtime.store.session("s")
        assert row is not None
        found = await load(runtime.store, row.sid, 1, row.head)
        await lab.effect("frames", "s", [number for number, record in found if isinstance(record, Framed)])
        history = [message.text for message in await session.history()]
        assert history[::2] == [word * LONG for word in SAID], "nothing of what was said is ever gone"
