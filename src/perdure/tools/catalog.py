"""The tools of an agent by name, and those of one of its sessions. What is not there cannot be called.

    Catalog       what an agent offers: functions, and the sets of providers, which are asked again for every turn
    Membership    the same for one session: with what its host laid over it, less what was switched off

Which tools a session has is decided by, in this order: the agent's tools and its plugins' (unless the overlay leaves
them out), the overlay, which replaces what has the same name, and then what takes tools away: the session's own state,
plugins, and last what a parent hid or did not grant, which cannot be undone. A name in the state whose tool is not
there now is kept: it counts again when the tool comes back.
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from perdure.engine.admission import Needs
from perdure.errors import InvalidDefinition, UnknownTool
from perdure.model.code import RUN_CODE
from perdure.model.codec import clean, decode, encode, error_text
from perdure.model.retries import Retries
from perdure.model.session import ToolState, edited_tools
from perdure.model.tool import ToolSpec
from perdure.ports.tool import HidesSecrets, ToolProvider
from perdure.tools.attempt import needs_of
from perdure.tools.check import contract_fault
from perdure.tools.define import Tool, as_tool

log = logging.getLogger("perdure.tools")


class ToolEntry(Struct, frozen=True):
    """One callable tool: a function of ours, or a member of a provider's set.

    `fault` is why its input schema is no contract that arguments could be held to. It is then shown to no model.
    `hides`: its set knows where arguments hold secrets. `needs` are the places that an attempt takes.
    """

    spec: ToolSpec
    tool: Tool[..., Any] | None = None
    provider: ToolProvider | None = None
    fault: str | None = None
    hides: bool = False
    needs: Needs = ()

    @property
    def retries(self) -> Retries:
        """The retries of its calls: a set of tools declares a number of them, and no more."""
        return Retries(attempts=self.spec.retries + 1) if self.tool is None else self.tool.retries


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
    """What can be called. Providers are asked again for every turn, so their sets may change.

    `specs` are the contracts of what a model may choose from.
    """

    def __init__(self, tools: Iterable[Any] = ()) -> None:
        self._fixed: dict[str, ToolEntry] = {}
        self.providers: list[ToolProvider] = []
        for item in tools:
            if isinstance(item, ToolProvider) and not isinstance(item, Tool):
                self.providers.append(item)
            else:
                tool = as_tool(item)
                self._add(self._fixed, ToolEntry(tool.spec, tool=tool, needs=needs_of(tool.spec)))
        self._entries = self._fixed
        self.specs: tuple[ToolSpec, ...] = tuple(e.spec for e in self._fixed.values())
        self._json: bytes | None = None
        self.generation = 0
        self.refresh()

    @classmethod
    def of(cls, entries: dict[str, ToolEntry]) -> Catalog:
        """A catalogue of exactly these."""
        made = cls()
        made._fixed = made._entries = entries
        made.specs = tuple(e.spec for e in entries.values() if e.fault is None)
        return made

    def extended(self, tools: Iterable[Any]) -> Catalog:
        """The same with more tools; a name that is taken is refused."""
        more = Catalog(tools)
        made = Catalog()
        made._fixed = dict(self._fixed)
        for entry in more._fixed.values():
            self._add(made._fixed, entry)
        made.providers = [*self.providers, *more.providers]
        made._entries = made._fixed
        made.specs = tuple(e.spec for e in made._fixed.values())
        made.refresh()
        return made

    @property
    def entries(self) -> Mapping[str, ToolEntry]:
        return self._entries

    def refresh(self) -> None:
        """Ask the providers what they offer now."""
        if not self.providers:
            return
        try:
            entries = self._ask()
        except Exception:  # a provider's code may raise anything, between two turns, where no caller would see it
            if self._entries is self._fixed:
                raise  # at the definition, where its author sees it
            log.exception("a tool provider cannot say what it offers; what it offered before stays")
            return
        if entries != self._entries:
            self._entries, self._json = entries, None
            self.specs = tuple(e.spec for e in entries.values() if e.fault is None)
            self.generation += 1

    def _ask(self) -> dict[str, ToolEntry]:
        entries = dict(self._fixed)
        for provider in self.providers:
            for spec in _offered(provider):
                self._add(entries, self._member(provider, spec))
        return entries

    def _member(self, provider: ToolProvider, spec: object) -> ToolEntry:
        if not isinstance(spec, ToolSpec):
            raise InvalidDefinition(f"a set of tools offers a {type(spec).__name__}: its `specs()` are ToolSpecs")
        known = self._entries.get(spec.name)
        if known is not None and known.provider is provider and known.spec == spec:
            return known  # looked at before
        fault = contract_fault(spec.input_schema)
        if fault is not None:
            log.warning("tool %s cannot be called: %s", spec.name, fault)
        return ToolEntry(spec, None, provider, fault, isinstance(provider, HidesSecrets), needs_of(spec))

    @staticmethod
    def _add(entries: dict[str, ToolEntry], entry: ToolEntry) -> None:
        if entry.spec.name in entries:
            raise InvalidDefinition(f"two tools are named {entry.spec.name!r}: rename one with @tool(name=…)")
        entries[entry.spec.name] = entry

    def get(self, name: str) -> ToolEntry | None:
        return self._entries.get(name)

    @property
    def runs_code(self) -> bool:
        """Whether the tool `run_code` is among them: ours, and not another one of that name."""
        entry = self.get(RUN_CODE)
        if entry is None:
            return False
        from perdure.tools.run_code import run_code  # noqa: PLC0415  # few agents have it, and it is itself a tool

        return entry.spec == run_code.spec  # by value: a wrapped one is the same tool

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
            self._json = encode(clean([_projected(spec) for spec in self.specs]))
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


# The tools of one session

KEEP = 8
"""How many composed catalogues a session keeps."""

_NOTHING = ToolState()

Removals = Callable[[Sequence[ToolSpec]], Iterable[str]]
"""What plugins take away of the tools they are shown."""


class Membership:
    """Reads like a Catalog, and changes when anything it is made of does."""

    def __init__(
        self,
        base: Catalog,
        state: ToolState = _NOTHING,
        hidden: Iterable[str] = (),
        removals: Removals | None = None,
        plugins: Callable[[], int] = lambda: 0,
        only: Iterable[str] | None = None,
    ) -> None:
        self._base, self.state, self._hidden = base, state, frozenset(hidden)
        self._only = None if only is None else frozenset(only)
        self._removals, self._plugins = removals, plugins
        self._overlay: Catalog | None = None
        self._with_base, self._revision = True, 0
        self._cache: OrderedDict[tuple[Any, ...], Catalog] = OrderedDict()

    # ------------------------------------------------------------------ reading

    @property
    def providers(self) -> list[ToolProvider]:
        """Those that may change what they offer."""
        return self._base.providers + ([] if self._overlay is None else self._overlay.providers)

    def current(self) -> Catalog:
        """The catalogue as it is now; composed once for as long as nothing changes."""
        laid = 0 if self._overlay is None else self._overlay.generation
        key = (self._with_base, self._revision, self._base.generation, laid, self._plugins(), self.state.generation)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._compose()
            while len(self._cache) > KEEP:
                self._cache.popitem(last=False)
        return found

    def get(self, name: str) -> ToolEntry | None:
        return self.current().get(name)

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return self.current().specs

    def names(self) -> list[str]:
        return self.current().names()

    def refresh(self) -> None:
        """Ask the providers behind it what they offer now."""
        self._base.refresh()
        if self._overlay is not None:
            self._overlay.refresh()

    def orphans(self) -> list[str]:
        """Tools that something was decided for and that are not there now."""
        return sorted(set(self.state.members) - self._all().keys())

    # ------------------------------------------------------------------ changing

    def edit(self, edits: Mapping[str, bool | None]) -> ToolState:
        """Switch tools on, off, or back to what the catalogue says. An unknown name changes nothing."""
        known = self._all().keys() | self.state.members.keys()
        unknown = sorted(name for name in edits if name not in known)
        if unknown:
            raise UnknownTool(unknown[0], sorted(self._all()))
        self.state = edited_tools(self.state, edits)
        return self.state

    def overlay(self, tools: Catalog, include_base: bool = True) -> None:
        """Lay tools over the base, in place of those of the same name and of what was laid over it before."""
        self._overlay, self._with_base = tools, include_base
        self._revision += 1
        self._cache.clear()

    def copy(self) -> Membership:
        """Another one of the same parts, to try an edit on."""
        made = Membership(self._base, self.state, self._hidden, self._removals, self._plugins, self._only)
        made._overlay, made._with_base = self._overlay, self._with_base
        return made

    def invalidate(self) -> None:
        """Forget what was composed."""
        self._cache.clear()

    # ------------------------------------------------------------------ composing

    def _all(self) -> dict[str, ToolEntry]:
        entries = dict(self._base.entries) if self._with_base else {}
        if self._overlay is not None:
            entries.update(self._overlay.entries)
        return entries

    def _compose(self) -> Catalog:
        entries = self._all()
        gone = {name for name, member in self.state.members.items() if not member}
        if self._removals is not None:
            gone |= set(self._removals([e.spec for e in entries.values() if e.fault is None]))
        gone |= self._hidden
        if self._only is not None:
            gone |= entries.keys() - self._only
        return Catalog.of({name: entry for name, entry in entries.items() if name not in gone})
