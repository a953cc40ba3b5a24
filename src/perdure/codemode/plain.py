"""Values that come out of an interpreter, as plain data and clean text: `inside.values` on our side of a sandbox."""

from __future__ import annotations

from typing import Any

from perdure.codemode.inside import values
from perdure.model.codec import clean_text


def plain(value: Any) -> Any:
    """`value` as JSON holds it. Raises NotPlain, a TypeError, for what is none, and for what is too large."""
    return values.plain(value, clean_text)


def show(value: Any, most: int) -> str:
    """`value` as Python shows it, of at most about `most` characters; what is left out is marked."""
    return clean_text(values.show(value, most))
