"""What passes between a turn and its protocol: how a model is asked, and what its answer means.

A protocol decides how a turn talks with its model: by native tool calls, by cells of code, or by a form that a plugin
brings. It changes what the model is shown, never what is recorded of the past; and what it reads in an answer is
recorded with it. So a turn goes on as it began, whatever protocol its agent has after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from perdure.model.message import Message, Part
from perdure.model.tool import ToolSpec


class Prompt(Struct, frozen=True, gc=False):
    """What a model is to be asked with.

    `messages` are the conversation, without the instructions: replies with their calls as they are recorded, each call
    followed by its result. `output` is the JSON schema of the turn's answer, where it has one. `tools` are empty in the
    last step of a turn whose budget is spent.
    """

    instructions: str
    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    output: dict[str, Any] | None = None


class Reading(Struct, frozen=True, gc=False):
    """What an answer of a model means, as it is recorded.

    `parts` are what is kept of it; the calls among them are made. Without calls and anything below, the text is the
    turn's answer. `cell` is where in the text the code stands that is to be run. `fault`: nothing can be made of the
    answer; the model is told why, and asked again as often as outputs are repaired. `cells` are the numbers of those
    calls, counted from 0, that are cells themselves: their argument `code` is run.
    """

    parts: tuple[Part, ...]
    cell: tuple[int, int] | None = None
    fault: str = ""
    cells: tuple[int, ...] = ()
