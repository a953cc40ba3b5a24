"""The border to a protocol that a plugin brings: what it gives is checked, and what it raises ends the turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mainstay.engine.control import TurnAborted
from mainstay.model.codec import clean_part, clean_text, error_text
from mainstay.model.message import Message, Part, Text, ToolCall
from mainstay.model.protocol import Prompt, Reading
from mainstay.model.tool import ToolSpec
from mainstay.ports.protocol import TurnProtocol

T = TypeVar("T")


class PluginProtocol:
    """A protocol of the plugin `plugin`. Whatever goes wrong in it is the plugin's fault, and a TurnAborted says so.

    `native` is the protocol that the agent had without it: that knows which calls are cells.
    """

    def __init__(self, plugin: str, make: Callable[[], TurnProtocol], native: TurnProtocol) -> None:
        self._plugin, self._native = plugin, native
        self._protocol = self._within("protocol", lambda: _protocol(make()))

    def ask(self, prompt: Prompt) -> Prompt:
        return self._within("ask", lambda: _asked(self._protocol.ask(prompt)))

    def read(self, parts: Sequence[Part], name: str) -> Reading:
        return self._within("read", lambda: self._read(self._protocol.read(tuple(parts), name), name))

    def _read(self, given: object, name: str) -> Reading:
        """A reading whose parts can be recorded, with an id for every call."""
        if not isinstance(given, Reading):
            raise TypeError(f"it returned a {type(given).__name__}, not a Reading")
        read = self._native.read([clean_part(part) for part in given.parts], name)
        cell, length = given.cell, sum(len(part.text) for part in read.parts if type(part) is Text)
        if cell is not None:
            start, end = cell
            if type(start) is not int or type(end) is not int or not 0 <= start <= end <= length:
                raise ValueError(f"its cell {cell!r:.80} is not within the {length:,} characters of the text")
            if any(type(part) is ToolCall for part in read.parts):
                raise ValueError("it has calls and a cell: give one of them")
            cell = (start, end)
        return Reading(read.parts, cell, clean_text(given.fault), read.cells)

    def _within(self, what: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except Exception as error:  # its own code may raise anything, and no turn can go on without it
            why = f"its protocol ({what}): {type(error).__name__}: {error_text(error)}"
            raise TurnAborted(self._plugin, "plugin_protocol", f"plugin {self._plugin!r}: {why}") from error


def _protocol(made: Any) -> TurnProtocol:
    for method in ("ask", "read"):
        if not callable(getattr(made, method, None)):
            raise TypeError(f"a {type(made).__name__} is no protocol: it has no method `{method}`")
    checked: TurnProtocol = made
    return checked


def _asked(given: object) -> Prompt:
    if not isinstance(given, Prompt):
        raise TypeError(f"it returned a {type(given).__name__}, not a Prompt")
    if not all(isinstance(each, Message) for each in given.messages):
        raise TypeError("its messages are no Messages")
    if not all(isinstance(each, ToolSpec) for each in given.tools):
        raise TypeError("its tools are no ToolSpecs")
    return Prompt(clean_text(given.instructions), list(given.messages), tuple(given.tools), given.output)
