"""The tools of an agent by name. Membership is the only availability fact: what is not here cannot be called."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from mainstay.errors import InvalidDefinition
from mainstay.model.tool import ToolSpec
from mainstay.ports.tool import ToolProvider
from mainstay.tools.define import Tool, as_tool

log = logging.getLogger("mainstay.tools")


class Entry(Struct, frozen=True):
    """One callable tool: a function of ours, or a member of a provider's set."""

    spec: ToolSpec
    tool: Tool[..., Any] | None = None
    provider: ToolProvider | None = None


class Catalog:
    """What can be called. Providers are asked again for every turn, so their sets may change."""

    def __init__(self, tools: Iterable[Any] = ()) -> None:
        self._fixed: dict[str, Entry] = {}
        self._providers: list[ToolProvider] = []
        for item in tools:
            if isinstance(item, ToolProvider) and not isinstance(item, Tool):
                self._providers.append(item)
            else:
                tool = as_tool(item)
                self._add(self._fixed, Entry(tool.spec, tool=tool))
        self._entries = self._fixed
        self._specs: tuple[ToolSpec, ...] = tuple(e.spec for e in self._fixed.values())
        self.refresh()

    def refresh(self) -> None:
        """Ask the providers what they offer now."""
        if not self._providers:
            return
        try:
            entries = self._ask()
        except Exception:
            if self._entries is self._fixed:
                raise  # at the definition, where its author sees it
            log.exception("a tool provider cannot say what it offers; what it offered before stays")
            return
        self._entries = entries
        self._specs = tuple(e.spec for e in entries.values())

    def _ask(self) -> dict[str, Entry]:
        entries = dict(self._fixed)
        for provider in self._providers:
            for spec in provider.specs():
                self._add(entries, Entry(spec, provider=provider))
        return entries

    @staticmethod
    def _add(entries: dict[str, Entry], entry: Entry) -> None:
        if entry.spec.name in entries:
            raise InvalidDefinition(f"two tools are named {entry.spec.name!r}: rename one with @tool(name=…)")
        entries[entry.spec.name] = entry

    def get(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def specs(self) -> Sequence[ToolSpec]:
        return self._specs

    def names(self) -> list[str]:
        return list(self._entries)
