"""What was decided for a session besides its history: options of plugins, tools switched on and off, its parent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mainstay.model.llm import ModelChoice, Usage
from mainstay.model.message import Message
from mainstay.model.plugin import PluginSnapshot
from mainstay.model.session import ToolState


class EarlierChoice(Struct, frozen=True, gc=False, omit_defaults=True):
    """The choice of model that the inputs before `until` were accepted under."""

    until: int
    choice: ModelChoice | None = None


class Settings(Struct, frozen=True, gc=False, omit_defaults=True):
    """Kept in the session's row. `options` are keyed by plugin.

    `hidden` are tools that nobody can switch on here, `only` all that anybody can: a parent's decision. `snapshots` are
    states of plugins that were changed between turns; the next turn records them and its commit takes them out. `saved`
    names the save that wrote last: two that write the same must not take each other's for their own. `ledger` is what
    direct completions outside of turns have cost, by label, and `models` the same by model. `children` are sessions
    that were begun outside of turns. `prelude` is what a child begins with; its first commit records it and takes it
    out. `output` is the schema of what turns answer with, in place of the agent's own;
    `depth` counts the parents above it. `choice` is the model that its turns ask in place of the agent's; `earlier` are
    choices before it, oldest first, kept for inputs that were accepted under them and may not have ended yet.
    """

    options: dict[str, Any] = {}
    tools: ToolState = ToolState()
    parent: str | None = None
    hidden: tuple[str, ...] = ()
    label: str = ""
    snapshots: dict[str, PluginSnapshot] = {}
    saved: str = ""
    ledger: dict[str, Usage] = {}
    only: tuple[str, ...] | None = None
    models: dict[str, Usage] = {}
    children: tuple[str, ...] = ()
    prelude: tuple[Message, ...] = ()
    output: dict[str, Any] | None = None
    depth: int = 0
    choice: ModelChoice | None = None
    earlier: tuple[EarlierChoice, ...] = ()


_DECODER = msgspec.json.Decoder(Settings)


def dump(settings: Settings) -> bytes:
    """As the row keeps it; empty for a session nobody decided anything for."""
    data = msgspec.json.encode(settings, order="deterministic")
    return b"" if data == b"{}" else data


def load(data: bytes) -> Settings:
    return _DECODER.decode(data) if data else Settings()


def choice_for(settings: Settings, turn: int) -> ModelChoice | None:
    """The choice that an input was accepted under: a turn asks the same model however often it is taken over."""
    return next((each.choice for each in settings.earlier if turn < each.until), settings.choice)


def choosing(settings: Settings, choice: ModelChoice | None, first: int, following: int) -> Settings:
    """The settings with another choice, for inputs from `following` on. The first that has not ended is `first`."""
    if choice == settings.choice:
        return settings
    earlier = [each for each in settings.earlier if each.until > first]
    if first < following:
        earlier.append(EarlierChoice(following, settings.choice))
    return replace(settings, choice=choice, earlier=tuple(earlier))


def edited(state: ToolState, edits: Mapping[str, bool | None]) -> ToolState:
    """The state after some tools were switched on, off, or (None) left to the catalogue again."""
    members = {name: member for name, member in (state.members | dict(edits)).items() if member is not None}
    return ToolState(state.generation + 1, members)


def committed(data: bytes, edits: Mapping[str, bool | None] | None, recorded: Mapping[str, int] | None) -> bytes:
    """The settings after a turn that made these edits and recorded these revisions of plugins."""
    settings, recorded = load(data), recorded or {}
    tools = edited(settings.tools, edits) if edits else settings.tools
    waiting = {name: each for name, each in settings.snapshots.items() if each.revision > recorded.get(name, -1)}
    saved = settings.saved if waiting else ""
    return dump(replace(settings, tools=tools, snapshots=waiting, saved=saved, prelude=()))


def forked(data: bytes, latest: bool) -> bytes:
    """The settings of a fork, without what was spent. A prelude that is there still belongs to the shared history.

    `latest`: the fork shares all of it, so that states of plugins that wait for a turn are its own as well. Elsewhere
    they are states of another history.
    """
    settings = load(data)
    waiting, saved = (settings.snapshots, settings.saved) if latest else ({}, "")
    return dump(replace(settings, snapshots=waiting, saved=saved, ledger={}, models={}, children=(), earlier=()))
