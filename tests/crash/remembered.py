"""What commands changed of a plugin's state between turns: for the session itself, a fork and a child that is one.

The plugin counts its changes from 0 again whenever it is made. What was acknowledged is not asked for again by the next
incarnation: it must be there.
"""

from __future__ import annotations

from typing import Any

from perdure import Agent, ModelRequest
from perdure.model.plugin import CreateSession, PluginSnapshot
from perdure.plugins.hooks import Plugin, PromptContext, SessionContext, SnapshotReader, SnapshotWriter, TurnContext
from perdure.plugins.operations import command
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab


class Words(Plugin):
    """A list of words, shown to the model."""

    id = "words"

    def __init__(self) -> None:
        self.words: list[str] = []
        self._changes = 0

    def for_session(self, ctx: SessionContext) -> Words:
        return Words()

    def prompt(self, ctx: PromptContext) -> str:
        return "+".join(self.words) or "nothing"

    def before_turn(self, ctx: TurnContext) -> Any:
        self.put(f"turn {ctx.turn_id}")
        return CreateSession(session_id="child", start="fork") if ctx.turn_id == "s.2" else None

    @command
    def put(self, word: str) -> None:
        """Remember a word, once."""
        if word not in self.words:
            self.words.append(word)
            self._changes += 1

    @property
    def revision(self) -> int:
        return self._changes

    def snapshot(self, writer: SnapshotWriter) -> Any:
        return self.words

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        self.words = snapshot.state or []


def shown(request: ModelRequest) -> str:
    return request.messages[0].text


async def remembered(lab: Lab) -> None:
    async with lab.runtime([Agent(FunctionModel(shown), name="agent", plugins=[Words()])]) as runtime:
        session = await runtime.session("s")
        await session.run("one", key="one")
        await once(lab, session, "a")
        await once(lab, session, "b")
        fork = await session.fork("s.1", session_id="fork")
        await session.run("two", key="two")
        await fork.run("two", key="two")
        await (await runtime.session("child")).run("three", key="three")


async def once(lab: Lab, session: Any, word: str) -> None:
    """Put a word, unless that was acknowledged before."""
    if not any(line.name == "put" and line.key == word for line in lab.ledger):
        await session.call("words.put", {"word": word})
        await lab.effect("put", word)
