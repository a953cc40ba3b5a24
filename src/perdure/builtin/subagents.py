"""Subagents: a model gives work to other agents, several at once, and goes on with their answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from perdure.errors import InvalidDefinition, ToolError
from perdure.model.message import Message
from perdure.plugins.hooks import CatalogContext, Plugin, SessionContext
from perdure.sessions.definition import Defined
from perdure.sessions.services.host import MAX_DEPTH
from perdure.sessions.subagents import SubagentRequest, delegate, follow_up
from perdure.tools.context import ToolContext
from perdure.tools.define import Tool, ToolOptions

SPAWN = "spawn_agent"


class Subagents(Plugin):
    """Gives the model the tool `spawn_agent`.

    `agents` are those that it may choose from, an agent or the name of one; the agent itself may be among them, by its
    name. `hidden` are tools that no child gets to see. Sessions that are `depth` deep have no such tool.

        Agent(model, plugins=[Subagents([researcher, "assistant"], hidden=["send_mail"])])
    """

    id = "subagents"
    starts_agents = True  # some of them in the background: the model needs what it takes to handle processes

    def __init__(self, agents: Iterable[Defined | str], *, hidden: Iterable[str] = (), depth: int = MAX_DEPTH) -> None:
        given = [agents] if isinstance(agents, str) else list(agents)
        self.names = tuple(dict.fromkeys([each if isinstance(each, str) else each.name for each in given]))
        self.agents: tuple[Defined, ...] = tuple([each for each in given if not isinstance(each, str)])
        if not self.names:
            raise InvalidDefinition("give at least one agent that may be spawned")
        if isinstance(hidden, str):
            raise InvalidDefinition(f"hidden={hidden!r} is not usable: give a list of names")
        if type(depth) is not int or not 1 <= depth <= MAX_DEPTH:
            raise InvalidDefinition(f"depth={depth!r} is not usable: give a whole number from 1 to {MAX_DEPTH}")
        self.hidden, self.depth = tuple(hidden), depth
        self.at_limit = False
        self._tool = _spawning(self.names, self.hidden)

    def for_session(self, ctx: SessionContext) -> Subagents:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, at_limit=ctx.depth >= self.depth)
        return made

    def tools(self) -> Iterable[Tool[..., Any]]:
        return (self._tool,)

    def hidden_tools(self, ctx: CatalogContext) -> Iterable[str]:
        return (SPAWN,) if self.at_limit else ()


def _spawning(names: tuple[str, ...], hidden: tuple[str, ...]) -> Tool[..., Any]:
    async def spawn_agent(  # noqa: PLR0913  # what a model may say about an agent at work, each by name
        prompt: str,
        ctx: ToolContext[Any],
        agent: str = names[0],
        output: dict[str, Any] | None = None,
        seed: dict[str, Any] | None = None,
        background: bool = False,
        label: str = "",
        follow: dict[str, Any] | None = None,
    ) -> Any:
        """Give work to another agent, who does it in a session of its own and answers. Several may work at once.

        Args:
            prompt: What to do. The agent knows nothing of this conversation: say all that it needs.
            agent: Who does it.
            output: A JSON schema, if the answer has to be JSON that fits it.
            seed: Values that the agent finds at its beginning, by name.
            background: Return a handle at once instead of the answer; you are told when the answer is there.
            label: What it is for, in a few words.
            follow: The handle of an agent that you gave work to before: the prompt is said to it, in its session.
        """
        if follow is not None:
            if output is not None or seed:
                why = "output and seed are given when an agent begins: leave them out"
                raise ToolError(why, code="invalid_tool_args")
            return await follow_up(ctx, follow, prompt, background=background)
        asked = SubagentRequest(prompt, output=output, seed=_seeds(seed), hidden=hidden)
        return await delegate(ctx, agent, asked, label=label, background=background)

    spawn_agent.__annotations__["agent"] = Literal.__getitem__(names)  # what to choose from is not known before
    # Made again it finds the agent at work: its process has the id of the call.
    return Tool(spawn_agent, ToolOptions(name=SPAWN, recovery="rerun"))


def _seeds(seed: dict[str, Any] | None) -> tuple[Message, ...]:
    """Values as the first message that the child finds."""
    if not seed:
        return ()
    lines = [f"{name}: {msgspec.json.encode(value).decode()}" for name, value in seed.items()]
    return (Message("user", "\n".join(["These values are given:", *lines])),)
