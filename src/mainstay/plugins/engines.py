"""Engines that plugins bring for kinds of processes of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mainstay.errors import InvalidDefinition, PluginConflict
from mainstay.model.codec import error_text
from mainstay.plugins.hooks import Plugin
from mainstay.plugins.registry import PluginSet, overrides
from mainstay.ports.process import Engine

OURS = ("function", "tool", "turn", "external", "command", "task")
"""Kinds that the runtime itself runs, now or in a later version."""


def engines_of(sets: Iterable[PluginSet]) -> list[Engine]:
    """The engines of all plugins; one that several agents share is asked once. Raises what says whose is wrong."""
    asked = {id(plugin): plugin for each in sets for plugin in each.plugins if overrides(plugin, "engines")}
    found: dict[str, tuple[Plugin, Engine]] = {}
    for plugin in asked.values():
        for engine in _engines(plugin):
            if engine.kind in found:
                raise PluginConflict(plugin.id, found[engine.kind][0].id, f"the engine of kind {engine.kind!r}")
            found[engine.kind] = (plugin, engine)
    return [engine for _, engine in found.values()]


def _engines(plugin: Plugin) -> list[Engine]:
    try:
        engines = list(plugin.engines())
    except Exception as error:  # its own code runs here, and its author is told whose it is
        raise InvalidDefinition(
            f"plugin {plugin.id!r}: its engines cannot be used: {type(error).__name__}: {error_text(error)}"
        ) from error
    for engine in engines:
        _check(plugin, engine)
    return engines


def _check(plugin: Plugin, engine: Any) -> None:
    kind = getattr(engine, "kind", None)
    if not isinstance(kind, str) or not kind:
        raise InvalidDefinition(f"plugin {plugin.id!r}: {engine!r} is no engine: its `kind` is a text")
    if kind in OURS:
        raise InvalidDefinition(f"plugin {plugin.id!r}: kind {kind!r} is the runtime's own: choose another")
    for method in ("knows", "run"):
        if not callable(getattr(engine, method, None)):
            raise InvalidDefinition(f"plugin {plugin.id!r}: the engine of kind {kind!r} has no method `{method}`")
