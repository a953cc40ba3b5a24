"""The tools of one session: what its agent offers, an overlay of its host, less what was switched off.

Membership is the only availability fact. It is decided by, in this order: the agent's tools and its plugins' (unless
the overlay leaves them out), the overlay, which replaces what has the same name, and then what takes tools away: the
session's own state, plugins, and last what a parent hid or did not grant, which nobody can undo. A name in the state
whose tool is not there now is kept: it counts again when the tool comes back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mainstay.errors import UnknownTool
from mainstay.model.session import ToolState
from mainstay.model.settings import edited
from mainstay.model.tool import ToolSpec
from mainstay.tools.catalog import Catalog, Entry

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

    def get(self, name: str) -> Entry | None:
        return self.current().get(name)

    def specs(self) -> Sequence[ToolSpec]:
        return self.current().specs()

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
        """Switch tools on, off, or back to what the catalogue says. A name that nobody knows changes nothing."""
        known = self._all().keys() | self.state.members.keys()
        unknown = sorted(name for name in edits if name not in known)
        if unknown:
            raise UnknownTool(unknown[0], sorted(self._all()))
        self.state = edited(self.state, edits)
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

    def _all(self) -> dict[str, Entry]:
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
