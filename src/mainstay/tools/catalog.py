"""The tools of an agent by name. Membership is the only availability fact: what is not here cannot be called."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from mainstay.errors import InvalidDefinition
from mainstay.model.codec import clean, decode, encode, error_text
from mainstay.model.tool import ToolSpec
from mainstay.ports.tool import ToolProvider
from mainstay.tools.check import contract_fault
from mainstay.tools.define import Tool, as_tool

log = logging.getLogger("mainstay.tools")


class Entry(Struct, frozen=True):
    """One callable tool: a function of ours, or a member of a provider's set.

    `fault` is why its input schema is no contract that arguments could be held to. It is then shown to no model.
    """

    spec: ToolSpec
    tool: Tool[..., Any] | None = None
    provider: ToolProvider | None = None
    fault: str | None = None


def _offered(provider: ToolProvider) -> list[object]:
    """What a set of tools says that it has. Its code may raise anything, and its author is told whose it is."""
    try:
        given: object = provider.specs()
        if inspect.iscoroutine(given):
            given.close()
            raise TypeError("it is asked where nothing can wait: make it plain")
        return list(given)  # type: ignore[call-overload, no-any-return]  # whatever it is, it is looked at one by one
    except Exception as error:  # its own code ran, and may raise anything: its author is told whose it is
        raise InvalidDefinition(
            f"the tools of a {type(provider).__name__} cannot be listed: specs() raised {type(error).__name__}: "
            f"{error_text(error)}"
        ) from error


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
        self._json: bytes | None = None
        self.generation = 0
        self.refresh()

    @classmethod
    def of(cls, entries: dict[str, Entry]) -> Catalog:
        """A catalogue of exactly these."""
        made = cls()
        made._fixed = made._entries = entries
        made._specs = tuple(e.spec for e in entries.values() if e.fault is None)
        return made

    def extended(self, tools: Iterable[Any]) -> Catalog:
        """The same with more tools; a name that is taken is refused."""
        more = Catalog(tools)
        made = Catalog()
        made._fixed = dict(self._fixed)
        for entry in more._fixed.values():
            self._add(made._fixed, entry)
        made._providers = [*self._providers, *more._providers]
        made._entries = made._fixed
        made._specs = tuple(e.spec for e in made._fixed.values())
        made.refresh()
        return made

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self._entries

    def refresh(self) -> None:
        """Ask the providers what they offer now."""
        if not self._providers:
            return
        try:
            entries = self._ask()
        except Exception:  # a provider's code may raise anything, between two turns where nobody would see it
            if self._entries is self._fixed:
                raise  # at the definition, where its author sees it
            log.exception("a tool provider cannot say what it offers; what it offered before stays")
            return
        if entries != self._entries:
            self._entries, self._json = entries, None
            self._specs = tuple(e.spec for e in entries.values() if e.fault is None)
            self.generation += 1

    def _ask(self) -> dict[str, Entry]:
        entries = dict(self._fixed)
        for provider in self._providers:
            for spec in _offered(provider):
                self._add(entries, self._member(provider, spec))
        return entries

    def _member(self, provider: ToolProvider, spec: object) -> Entry:
        if not isinstance(spec, ToolSpec):
            raise InvalidDefinition(f"a set of tools offers a {type(spec).__name__}: its `specs()` are ToolSpecs")
        known = self._entries.get(spec.name)
        if known is not None and known.provider is provider and known.spec == spec:
            return known  # looked at before
        fault = contract_fault(spec.input_schema)
        if fault is not None:
            log.warning("tool %s cannot be called: %s", spec.name, fault)
        return Entry(spec, provider=provider, fault=fault)

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
        """What a model may choose from."""
        return [name for name, entry in self._entries.items() if entry.fault is None]

    def as_json(self) -> list[dict[str, Any]]:
        """The catalogue as people and other programs read it: for each its own, of a projection that is made once."""
        found: list[dict[str, Any]] = decode(self.projection())
        return found

    def projection(self) -> bytes:
        """The same as bytes."""
        if self._json is None:
            self._json = encode(clean([_projected(spec) for spec in self._specs]))
        return self._json


def _projected(spec: ToolSpec) -> dict[str, Any]:
    contract = {"input_schema": spec.input_schema, "output_schema": spec.output_schema}
    return {
        "id": spec.tool_id,
        "name": spec.name,
        "description": spec.description,
        "activation": "always",
        "bindings": {},
        "contract": contract,
    }
