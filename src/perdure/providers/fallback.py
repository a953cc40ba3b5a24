"""Several models for one agent: when one fails, the next is asked.

    Agent(Fallback("anthropic:claude-sonnet-4-5", "openai:gpt-5", "ollama:qwen3"))

A list, and no provider that asks twice behind the engine's back: the engine walks it, and every attempt is recorded
with the model it asked. What a failed one had streamed is retracted before the next one speaks. After a crash the turn
goes on with the candidate that was to be asked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from perdure.errors import InvalidDefinition, quoted
from perdure.model.llm import Delta, ModelRequest
from perdure.ports.provider import Provider, is_provider
from perdure.providers import registry


class Fallback:
    """Models in the order in which they are asked: strings or Provider objects."""

    def __init__(self, *models: str | Provider) -> None:
        if len(models) < 2:
            raise InvalidDefinition("a Fallback needs two models or more: the first is asked first")
        made: list[Provider] = []
        for model in models:
            if isinstance(model, str):
                made.append(registry.provider(model))
            elif isinstance(model, Fallback):
                made += model.candidates
            elif is_provider(model):
                made.append(model)
            else:
                raise InvalidDefinition(f"{quoted(model)} is no model: name one, or pass a Provider object")
        self.candidates: tuple[Provider, ...] = tuple(made)
        self.name = " | ".join(each.name for each in made)

    def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        """One request is one model's: the first. The engine asks the others itself."""
        return self.candidates[0].stream(request)
