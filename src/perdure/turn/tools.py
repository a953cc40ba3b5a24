"""The tools protocol: a model calls tools by the means of its provider.

    reply              means
    calls              they are made, all at once; those of `run_code` after the others, one after the other
    no calls           the answer

Every call needs an id that is its own in the reply: results are paired by it. History of cells is text already.

`run_code` is a tool only to the model. Each call of it is a cell: an effect of the turn, not an attempt of a tool. One
whose arguments do not fit is left to the tools, which tell the model so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from perdure.model.code import RUN_CODE
from perdure.model.message import Part, ToolCall
from perdure.model.protocol import Prompt, Reading
from perdure.model.tool import ToolSpec

RULES = (
    "run_code runs Python, in which these functions are there besides. What it prints and the value of its last line "
    "come back, or what was given to finish(value); variables are kept for the next call of it."
)

Describe = Callable[[Sequence[ToolSpec], dict[str, Any] | None], str]
"""What a model must know to write cells, for tools and the schema of what they finish with."""


class ToolsProtocol(Struct, frozen=True, gc=False):
    """How a turn of an agent with mode="tools" is asked, and its replies are read: as they are.

    `describe` is there where the agent has `run_code`.
    """

    describe: Describe | None = None

    def ask(self, prompt: Prompt) -> Prompt:
        if self.describe is None or all(spec.name != RUN_CODE for spec in prompt.tools):
            return prompt
        told = (prompt.instructions, RULES, self.describe(functions(prompt.tools), {}))
        return replace(prompt, instructions="\n\n".join([each for each in told if each]))

    def read(self, parts: Sequence[Part], name: str) -> Reading:
        calls = [part for part in parts if type(part) is ToolCall]
        cells = () if self.describe is None else tuple([i for i, call in enumerate(calls) if _is_cell(call)])
        ids = [call.id for call in calls]
        given = set(ids)
        if len(given) == len(ids) and "" not in given:
            return Reading(tuple(parts), cells=cells)
        seen: set[str] = set()
        out: list[Part] = []
        index = 0
        for part in parts:
            if type(part) is ToolCall:
                if not part.id or part.id in seen:
                    own = f"{name}.{index}"
                    while own in given or own in seen:
                        own += "'"
                    part = replace(part, id=own)
                seen.add(part.id)
                index += 1
            out.append(part)
        return Reading(tuple(out), cells=cells)


NATIVE = ToolsProtocol()


def functions(tools: Sequence[ToolSpec]) -> list[ToolSpec]:
    """The tools that a cell may call: all but the one that runs it."""
    return [spec for spec in tools if spec.name != RUN_CODE]


def _is_cell(call: ToolCall) -> bool:
    fits = call.raw is None and call.args.keys() == {"code"} and type(call.args["code"]) is str
    return call.name == RUN_CODE and fits
