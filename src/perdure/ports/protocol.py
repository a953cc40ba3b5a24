"""How a turn talks with its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from perdure.model.message import Part
from perdure.model.protocol import Prompt, Reading


class TurnProtocol(Protocol):
    """Asked by every model call of a turn. Both methods are pure: no I/O, no clock, the same for the same arguments.

    `turn/tools.py` and `turn/code.py` are those of `Agent(mode=…)`; a plugin may bring another one.
    """

    def ask(self, prompt: Prompt) -> Prompt:
        """The prompt as the model is shown it.

        The history may have been made under another protocol. What the model could not have said in this one is to be
        shown as text; without tools in the prompt that is every call and every result.
        """
        ...

    def read(self, parts: Sequence[Part], name: str) -> Reading:
        """What an answer means. Every call in it gets an id, unique in the answer; `name` is one that no other answer
        has, to make ids from."""
        ...
