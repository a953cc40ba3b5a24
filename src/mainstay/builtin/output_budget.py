"""The output budget as a plugin: how much the model sees of what the tools of an agent return."""

from __future__ import annotations

from typing import Any

from mainstay.builtin.history import TOKEN_BYTES, whole_number
from mainstay.errors import InvalidDefinition
from mainstay.model.tool import OutputBudget as Numbers
from mainstay.model.transcript import told
from mainstay.plugins.hooks import Plugin, ToolEndContext
from mainstay.tools.output import project


class OutputBudget(Plugin):
    """Shows the model at most so many bytes and lines, or estimated tokens, of each tool's output; the whole is kept.

    Without numbers it is the usual budget, with some only those count. A tool that declares a budget of its own keeps
    it. The slot is exclusive: a second plugin that projects results is refused.

        Agent(model, tools=[…], plugins=[OutputBudget(tokens=2_000)])
    """

    id = "output_budget"

    def __init__(self, *, bytes: int | None = None, lines: int | None = None, tokens: int | None = None) -> None:
        if bytes is not None and tokens is not None:
            raise InvalidDefinition(
                f"an output budget of bytes={bytes!r} and tokens={tokens!r} is two: give one of them"
            )
        if tokens is not None:
            bytes = whole_number("tokens", tokens) * TOKEN_BYTES
        self._usual = Numbers() if bytes is None and lines is None else Numbers(bytes=bytes, lines=lines)

    def project_result(self, ctx: ToolEndContext) -> Any:
        # What the model is told of a failure may be long as well: its words are often a program's output.
        return project(told(ctx.outcome), ctx.tool.output_budget or self._usual).value
