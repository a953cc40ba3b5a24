"""How Claude models are asked to reason: what Anthropic's own API and Bedrock's have in common.

Models up to 4.5 take a number of thinking tokens, and refuse an effort; later ones take an effort, and
refuse a number of tokens or will.
"""

from __future__ import annotations

import re
from typing import Any

from msgspec import Struct

from perdure.errors import ProviderError
from perdure.model.llm import Effort, ModelSettings

EFFORTS: dict[Effort, str] = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "max": "max"}
BUDGETS: dict[Effort, int] = {"minimal": 1024, "low": 2048, "medium": 8192, "high": 16_384, "max": 23_808}
"""Tokens; with a usual answer after them, the most is what every model that takes them can give out."""

LEAST = 1024
"""Tokens that the API wants in a budget."""

_FOUR = re.compile(r"claude-(?:opus|sonnet|haiku)-4(?:[-.](\d{1,2}))?(?!\d)")
_EARLIER = re.compile(r"claude-(?:v?[1-3](?!\d)|instant|4-)")


class Reasons(Struct, frozen=True):
    """`thinking` as the API takes it, the effort beside it ("" is none), and the tokens that are thought before an
    answer (0: the model decides)."""

    thinking: dict[str, Any]
    effort: str = ""
    tokens: int = 0


def reasons(settings: ModelSettings, model: str) -> Reasons | None:
    """What `ModelSettings(reasoning=…)` means for a Claude model; None where nothing was said of it."""
    match settings.reasoning:
        case None:
            return None
        case "off":
            return Reasons({"type": "disabled"})
        case int(tokens):
            return _budget(tokens)
        case effort if _takes_budget(model):
            return _budget(_within(BUDGETS[effort], settings.max_tokens, model))
        case effort:
            return Reasons({"type": "adaptive"}, EFFORTS[effort])


def _budget(tokens: int) -> Reasons:
    return Reasons({"type": "enabled", "budget_tokens": tokens}, tokens=tokens)


def _within(tokens: int, limit: int | None, model: str) -> int:
    """Half of what may be given out is for the answer: the limit is for both."""
    if limit is None:
        return tokens
    if limit <= LEAST:
        raise ProviderError(
            f"{model} thinks at least {LEAST:,} tokens, and ModelSettings(max_tokens={limit}) leaves none for an "
            "answer: raise it, or leave reasoning out",
            code="invalid_settings",
        )
    return min(tokens, max(LEAST, limit // 2))


def _takes_budget(model: str) -> bool:
    four = _FOUR.search(model)
    return int(four[1] or 0) < 6 if four else _EARLIER.search(model) is not None
