"""Plugins with one fault each, for the contract kit to find, and some without any."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, cast

import msgspec

from perdure import Message, ToolContext, tool
from perdure.errors import Unavailable
from perdure.model.llm import ModelResponse
from perdure.model.plugin import AbortTurn, AskPerson, Directive, EmitEvents, PluginSnapshot, PromptPart, ReplaceArgs
from perdure.plugins.hooks import (
    CatalogContext,
    CheckpointContext,
    FilterContext,
    InputContext,
    Plugin,
    PromptContext,
    SessionConfig,
    SessionContext,
    SnapshotReader,
    SnapshotWriter,
    StreamContext,
    ToolCallContext,
    ToolEndContext,
    TurnContext,
    TurnEndContext,
    ViewContext,
)
from perdure.ports.services import StreamEnd

# ---------------------------------------------------------------------- without a fault


class Counter(Plugin):
    """Counts calls: state as it should be. By their ids, since a crash may bring the same call twice."""

    id = "counter"

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._revision = 0

    def for_session(self, ctx: SessionContext) -> Plugin:
        return type(self)()

    def after_tool_call(self, ctx: ToolEndContext) -> None:
        self.count(ctx.call_id)

    def count(self, call_id: str) -> None:
        if call_id not in self.seen:
            self.seen = sorted([*self.seen, call_id])
            self._revision += 1

    @property
    def revision(self) -> int:
        return self._revision

    def snapshot(self, writer: SnapshotWriter) -> Any:
        writer.put("count", str(len(self.seen)).encode())
        return {"seen": self.seen}

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        if snapshot.state is not None:
            self.seen = msgspec.convert(snapshot.state["seen"], list[str])
        self._revision = snapshot.revision


class Everything(Counter):
    """Has every hook, and does something in each of them."""

    id = "everything"

    async def session_ready(self, ctx: SessionContext) -> None:
        await asyncio.sleep(0)

    def configure(self, ctx: SessionContext, config: SessionConfig) -> SessionConfig:
        return SessionConfig(config.instructions + " Be kind.", config.budget)

    async def transform_input(self, ctx: InputContext, message: Message) -> Message:
        await asyncio.sleep(0)
        return message

    def tools(self) -> Iterable[Any]:
        @tool(recovery="rerun")
        async def count_up(ctx: ToolContext[Any]) -> int:
            """Count."""
            self.count(f"{ctx.call_id} itself")
            return len(self.seen)

        return [count_up]

    def hidden_tools(self, ctx: CatalogContext) -> Iterable[str]:
        return ["dangerous"]

    async def prompt(self, ctx: PromptContext) -> Iterable[PromptPart]:
        try:
            shown = len(await ctx.host.tool_catalog())
        except Unavailable:
            shown = 0
        return [PromptPart(f"{len(self.seen)} calls so far, {shown} tools.")]

    def transform_view(self, ctx: ViewContext, messages: Sequence[Message]) -> Sequence[Message]:
        return [*messages]

    async def before_turn(self, ctx: TurnContext) -> Directive:
        return EmitEvents(({"turn": ctx.turn_id},))

    async def at_checkpoint(self, ctx: CheckpointContext) -> None:
        await asyncio.sleep(0)

    def after_turn(self, ctx: TurnEndContext) -> list[Directive]:
        return []

    async def turn_finalized(self, ctx: TurnEndContext) -> None:
        await asyncio.sleep(0)

    def turn_persisted(self, ctx: TurnEndContext) -> None:
        return None

    def session_restored(self, ctx: SessionContext) -> None:
        return None

    def transform_text(self, ctx: StreamContext, text: str) -> str:
        return text.replace("special", "particular")

    async def transform_response(self, ctx: StreamContext, response: ModelResponse) -> ModelResponse:
        return response

    def stream_finished(self, ctx: StreamContext, reason: StreamEnd) -> None:
        return None

    async def before_tool_call(self, ctx: ToolCallContext) -> Directive | None:
        if ctx.tool.name == "stumble":
            return AskPerson("sure?")
        return ReplaceArgs({**ctx.args, "word": "lasting"}) if ctx.tool.name == "look_up" else None

    def project_result(self, ctx: ToolEndContext) -> Any:
        return {"seen": type(ctx.outcome).__name__}

    def project_prose(self, ctx: StreamContext, text: str) -> str:
        return text.upper()


class Guard(Plugin):
    """Ends every turn, on purpose."""

    id = "guard"

    def before_turn(self, ctx: TurnContext) -> Directive:
        return AbortTurn("closed", "come back tomorrow")


# ---------------------------------------------------------------------- definition


class Nameless(Plugin):
    def before_turn(self, ctx: TurnContext) -> None:
        return None


class Patient(Plugin):
    id = "patient"
    time_limit = 86_400.0


class Fickle(Plugin):
    made: ClassVar[int] = 0

    def __init__(self) -> None:
        Fickle.made += 1
        self.id = f"fickle-{Fickle.made}"


class Misspelt(Plugin):
    id = "misspelt"

    def before_toolcall(self, ctx: ToolCallContext) -> None:
        return None


def misshapen(self: Plugin, ctx: ToolCallContext, args: dict[str, Any]) -> None:
    """A hook that wants to be told more than there is."""


class Misshapen(Plugin):
    id = "misshapen"
    before_tool_call: Any = misshapen


class Unsaved(Plugin):
    id = "unsaved"

    def snapshot(self, writer: SnapshotWriter) -> Any:
        return {}


# ---------------------------------------------------------------------- turns


class Talkative(Plugin):
    """Gives a directive where it means nothing."""

    id = "talkative"

    def after_turn(self, ctx: TurnEndContext) -> Directive:
        return AbortTurn("too_late")


class Clumsy(Plugin):
    """Fails beside the turn, where only an issue tells of it."""

    id = "clumsy"

    def turn_persisted(self, ctx: TurnEndContext) -> None:
        raise KeyError("cents")


class BadTool(Plugin):
    id = "bad_tool"

    def tools(self) -> Iterable[Any]:
        @tool(recovery="rerun")
        def divide(by: int) -> float:
            """Divide."""
            return 1 / by

        return [divide]


class Meddling(Plugin):
    """Writes into arguments that it was only shown."""

    id = "meddling"

    def before_tool_call(self, ctx: ToolCallContext) -> None:
        ctx.args["seen"] = True


class Mixing(Plugin):
    """A filter that takes all values for JSON."""

    id = "mixing"
    is_filter = True

    def filter_value(self, ctx: FilterContext, value: Any) -> Any:
        return [value]


class Cutting(Plugin):
    """Changes the list of messages instead of returning another one."""

    id = "cutting"

    def transform_view(self, ctx: ViewContext, messages: Sequence[Message]) -> Sequence[Message]:
        mine: Any = messages
        mine.append(Message("user", "And quickly."))
        return messages


class Refusing(Plugin):
    """Lets nothing be said."""

    id = "refusing"

    def transform_input(self, ctx: InputContext, message: Message) -> Any:
        return None


# ---------------------------------------------------------------------- state


class Alive(Counter):
    """Saves a live object."""

    def snapshot(self, writer: SnapshotWriter) -> Any:
        return {"seen": self.seen, "task": object()}


class Forgetful(Counter):
    """Restores less than it saved."""

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        super().restore(snapshot, reader)
        self.seen = self.seen[:1]


class Silent(Counter):
    """Changes and does not say so."""

    def count(self, call_id: str) -> None:
        self.seen = [*self.seen, call_id]


class SilentTool(Everything):
    """The same, in a tool: only the tool changes anything."""

    def count(self, call_id: str) -> None:
        self.seen = [*self.seen, call_id]

    def after_tool_call(self, ctx: ToolEndContext) -> None:
        return None


class Reborn(Counter):
    """Counts its revisions from 0 after a restart."""

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        super().restore(snapshot, reader)
        self._revision = 0


class Expecting(Counter):
    """Expects that something was saved."""

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        self.seen, self._revision = snapshot.state["seen"], snapshot.revision


class Gullible(Counter):
    """Takes anything for a state."""

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        self._revision = snapshot.revision
        try:
            super().restore(snapshot, reader)
        except (KeyError, TypeError, ValueError):
            self.seen = []


class Trusting(Counter):
    """Takes half a state, and falls over it later."""

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        if snapshot.state is not None:
            self.seen = cast(list[str], dict(snapshot.state).get("seen"))
        self._revision = snapshot.revision


class Restless(Counter):
    """Looks different every time it is asked."""

    asked = 0

    def snapshot(self, writer: SnapshotWriter) -> Any:
        Restless.asked += 1
        return {"seen": self.seen, "asked": Restless.asked}


# ---------------------------------------------------------------------- sessions


class Sharing(Counter):
    """Keeps its state where all sessions find it."""

    all: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.all.clear()  # as a new process would

    def for_session(self, ctx: SessionContext) -> Plugin:
        made = object.__new__(type(self))
        made.seen, made._revision = [], 0
        return made

    def count(self, call_id: str) -> None:
        self.all.append(call_id)
        super().count(call_id)
        self.seen = sorted({*self.seen, *self.all})


class Gossip(Plugin):
    """Tells one session about the others."""

    id = "gossip"

    def __init__(self) -> None:
        self.heard: list[str] = []

    def before_turn(self, ctx: TurnContext) -> None:
        if ctx.session_id not in self.heard:
            self.heard.append(ctx.session_id)

    def prompt(self, ctx: PromptContext) -> Iterable[str]:
        return [f"You also talk with {', '.join(self.heard)}."]


# ---------------------------------------------------------------------- disturbances


class OnlyOnce(Plugin):
    """Cannot stand being asked twice about the same call."""

    id = "only_once"

    def __init__(self) -> None:
        self.seen: set[tuple[str, bool]] = set()

    def before_tool_call(self, ctx: ToolCallContext) -> None:
        if (ctx.call_id, ctx.inspecting) in self.seen:
            raise RuntimeError(f"{ctx.call_id} again?")
        self.seen.add((ctx.call_id, ctx.inspecting))


class Dependent(Plugin):
    """Cannot do without a model's opinion."""

    id = "dependent"

    async def before_tool_call(self, ctx: ToolCallContext) -> Directive | None:
        opinion = await ctx.host.complete(f"Is {ctx.tool.name} harmless?", label="opinion")
        return AskPerson(opinion.text) if opinion.text == "no" else None


class Stubborn(Plugin):
    """Takes its cancellation for an answer."""

    id = "stubborn"

    async def prompt(self, ctx: PromptContext) -> Iterable[str]:
        try:
            await ctx.host.snapshot()
        except asyncio.CancelledError:
            return ["cancelled"]
        return ["ready"]


class Deaf(Plugin):
    """Goes on after its cancellation."""

    id = "deaf"

    async def prompt(self, ctx: PromptContext) -> Iterable[str]:
        for _ in range(2):
            try:
                await ctx.host.snapshot()
            except asyncio.CancelledError:
                continue
        return []


class Jammed(Plugin):
    """Holds something over a model call, and never lets go of it when the call is not made."""

    id = "jammed"
    held = False

    def prompt(self, ctx: PromptContext) -> Iterable[str]:
        if self.held:
            raise RuntimeError("somebody else is at it")
        self.held = True
        return []

    def stream_finished(self, ctx: StreamContext, reason: StreamEnd) -> None:
        self.held = False


# ---------------------------------------------------------------------- replay


class TooLate(Counter):
    """Counts turns after their commit, where nothing is saved any more until the next turn."""

    def after_tool_call(self, ctx: ToolEndContext) -> None:
        return None

    def turn_persisted(self, ctx: TurnEndContext) -> None:
        self.count(ctx.turn_id)


class Naive(Counter):
    """Counts, and counts a call twice that a crash brings twice."""

    def before_tool_call(self, ctx: ToolCallContext) -> None:
        self.count(f"{len(self.seen):04}")

    def after_tool_call(self, ctx: ToolEndContext) -> None:
        self.count(f"{len(self.seen):04}")


class Numbering(Plugin):
    """Numbers answers by what it has in memory only."""

    id = "numbering"

    def __init__(self) -> None:
        self.answers = 0

    def for_session(self, ctx: SessionContext) -> Plugin:
        return type(self)()

    def transform_response(self, ctx: StreamContext, response: ModelResponse) -> ModelResponse:
        self.answers += 1
        return ModelResponse(f"{self.answers}. {response.text}", response.tool_calls, response.usage, response.stop)
