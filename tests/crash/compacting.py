"""A conversation that outgrows its context: its fifth turn goes on from a summary of the first three.

Every start leaves a line with what is on disk of the history, before anything goes on.
"""

from __future__ import annotations

from typing import Any

from perdure import Agent, ModelRequest
from perdure.builtin.compaction import SYSTEM, Compaction
from perdure.engine.journal import load
from perdure.model.message import Message
from perdure.model.record import Completed, Framed
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab

SAID = ("A", "B", "C", "D", "E", "F")
LONG = 400
SUMMARY = "They went through the alphabet."
BEGIN = f"[Summary of the conversation before this point]\n\n{SUMMARY}"


def length(message: Message) -> int:
    """A token is a character here."""
    return len(message.text)


def answer(request: ModelRequest) -> Any:
    """Tells which words of the user it was shown, and whether a summary stood before them."""
    if request.messages[0].text == SYSTEM:
        return SUMMARY
    begin = "sum " if request.messages[0].text == BEGIN else ""
    shown = "".join([message.text[0] for message in request.messages if message.role == "user"])
    return f"{begin}{shown}".ljust(LONG, ".")


def agent() -> Agent[str]:
    # It begins above 3,100, with the four turns of 800 that stand before the fifth; the newest one is kept.
    compaction = Compaction(3_300, buffer=200, keep=800, estimate=length)
    return Agent(FunctionModel(answer), name="talker", plugins=[compaction])


async def leave_history(lab: Lab) -> None:
    """Leave a line with what the incarnation before left on disk."""
    async with lab.runtime([agent()], recover=False) as reader:
        row = await reader.store.session("s")
        if row is None:
            return
        history = [message.text[0] for message in await (await reader.session("s")).history() if message.role == "user"]
        await lab.effect("history", str(row.head), "".join(history))
        for _, record in await load(reader.store, row.sid, 1, row.next):
            if isinstance(record, Completed | Framed):
                await lab.effect("recorded", type(record).__name__)


async def compacting(lab: Lab) -> None:
    if lab.incarnation > 1:
        await leave_history(lab)
    async with lab.runtime([agent()]) as runtime:
        session = await runtime.session("s")
        for word in SAID:
            await session.run(word * LONG, key=word)
        row = await runtime.store.session("s")
        assert row is not None
        frames = [number for number, r in await load(runtime.store, row.sid, 1, row.head) if isinstance(r, Framed)]
        await lab.effect("frames", "s", frames)
        history = [message.text for message in await session.history()]
        assert history[::2] == [word * LONG for word in SAID], "nothing of what was said is ever gone"
