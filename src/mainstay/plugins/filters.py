"""What passes the filters of a session before it is stored or shown, beside the outcomes of calls.

Outcomes pass `after_tool_call` ([laws](laws.py)). Everything else that tools, processes and people outside give passes
`filter_value`, one filter after another, each on a value of its own. A filter that fails withholds the value: a text
takes its place that names the plugin, and nothing else of what it raised, which may quote the value.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from mainstay.errors import PluginFault, ToolError
from mainstay.model.codec import clean, clean_text
from mainstay.model.own import own
from mainstay.plugins.calls import Hooks
from mainstay.plugins.hooks import FilterContext, FilterKind, Plugin

log = logging.getLogger("mainstay.plugins")

ContentKind: TypeAlias = Literal["artifact", "file"]

_TEXTS = ("wake", "answer", "issue")
_NAMES = {"projection": "result", "wake": "news of processes", "answer": "reason"}
"""What is withheld, where that is not the name of its kind."""


def withheld(what: str, plugin: str) -> str:
    """What stands in the place of a value that a plugin failed on."""
    return f"{what} withheld: plugin {plugin!r} failed"


class Filters:
    """The filters of one session. `base` is what every hook knows; `report` is told of faults.

    `refused` is the plugin that keeps the session from opening: nothing passes then.
    """

    __slots__ = ("_base", "_hooks", "_refused", "_report")

    def __init__(
        self,
        hooks: Hooks,
        base: tuple[str, str, str, Any],
        report: Callable[[PluginFault], None],
        refused: str | None = None,
    ) -> None:
        self._hooks, self._base, self._report, self._refused = hooks, base, report, refused

    def value(self, kind: FilterKind, value: Any, call_id: str = "", tool: str = "") -> Any:
        """A text or JSON as it may be stored and shown; in place of what is withheld, that it is."""
        try:
            return self.passed(kind, value, call_id, tool)
        except PluginFault as fault:
            return withheld(_NAMES.get(kind, kind), fault.plugin)

    def passed(self, kind: FilterKind, value: Any, call_id: str = "", tool: str = "") -> Any:
        """A text or JSON as filters leave it. Raises PluginFault when one of them fails."""
        if self._refused is not None:
            raise PluginFault(self._refused, "filter_value", "the session cannot be opened")
        ctx = FilterContext(*self._base, kind, call_id, tool)
        for plugin, method in self._hooks.entries:
            try:
                answer = method(ctx, own(value))
                value = _text(answer) if kind in _TEXTS else clean(answer)
            except BaseException as error:  # whatever it was about to hide must not be stored
                raise self._faulted(plugin, error) from error
        return value

    def content(self, kind: ContentKind, call_id: str, tool: str, name: str, data: bytes, media_type: str) -> bytes:
        """The bytes of an artifact, or of a file that a tool returns, as they may be kept. Raises ToolError when they
        may not."""
        if self._refused is not None:
            raise _kept_back(kind, name, self._refused, "failed")
        ctx = FilterContext(*self._base, kind, call_id, tool, name, media_type)
        for plugin, method in self._hooks.entries:
            try:
                answer = method(ctx, _readable(data))
                passed = None if answer is None else _content(answer)
            except BaseException as error:  # as above
                self._faulted(plugin, error)
                raise _kept_back(kind, name, plugin.id, "failed") from None
            if passed is None:
                raise _kept_back(kind, name, plugin.id, "does not let it pass")
            data = passed
        return data

    def _faulted(self, plugin: Plugin, error: BaseException) -> PluginFault:
        log.warning("filter_value of plugin %s raised", plugin.id, exc_info=error)
        fault = PluginFault(plugin.id, "filter_value", type(error).__name__)
        self._report(fault)
        return fault


def _text(answer: object) -> str:
    if not isinstance(answer, str):
        raise TypeError(f"it returned a {type(answer).__name__}, not text")
    return clean_text(answer)


def _readable(data: bytes) -> str | bytes:
    """Whatever reads as UTF-8 is looked at as text, whatever its media type says."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _content(answer: object) -> bytes:
    if not isinstance(answer, str | bytes):
        raise TypeError(f"it returned a {type(answer).__name__}, neither text nor bytes")
    return answer.encode() if isinstance(answer, str) else answer


def _kept_back(kind: ContentKind, name: str, plugin: str, why: str) -> ToolError:
    return ToolError(f"{kind} {name!r} is withheld: plugin {plugin!r} {why}", code=f"{kind}_withheld")
