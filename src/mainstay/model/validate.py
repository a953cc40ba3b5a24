"""What callers give: looked at where it comes in, so that a wrong type is told to whoever gave it.

What is let pass here is kept, compared and counted by every store alike, and can be read back. Each function takes the
value and the name that its caller knows it by; the usual types cost one comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from msgspec import Struct, ValidationError
from msgspec.json import decode as decode_as

from mainstay.errors import InvalidInput, quoted
from mainstay.model.codec import INT_MAX, clean_text, encode

S = TypeVar("S", bound=Struct)
T = TypeVar("T")


def plain_text(value: object) -> str | None:
    """`value` as the plain string that a store can hold; None when it is none. An enum of strings is its value."""
    if not isinstance(value, str):
        return None
    text = value if type(value) is str else str.__str__(value)
    return text if clean_text(text) == text else None


def name(value: object, what: str, refuse: type[InvalidInput] = InvalidInput) -> str:
    """A string that something is called, or looked up, by."""
    text = plain_text(value)
    if text is None:
        raise refuse(f"{what}={quoted(value)} is not usable: give a string")
    return text


def seconds(value: object, what: str = "timeout", refuse: type[InvalidInput] = InvalidInput) -> float | None:
    """How long something may take; None is no limit."""
    if value is None or (type(value) is float and value >= 0) or (type(value) is int and 0 <= value <= INT_MAX):
        return value
    raise refuse(f"{what}={quoted(value)} is not usable: give seconds, 0 or more, or None for no limit")


def count(value: object, what: str, least: int = 0, refuse: type[InvalidInput] = InvalidInput) -> int:
    """A whole number: how many, or from where on."""
    if type(value) is int and least <= value <= INT_MAX:
        return value
    raise refuse(f"{what}={quoted(value)} is not usable: give a whole number, {least} or more")


def several(values: object, what: str, refuse: type[InvalidInput] = InvalidInput) -> tuple[Any, ...]:
    """Some of something. A string would be taken apart into its letters."""
    if isinstance(values, Iterable) and not isinstance(values, str | bytes):
        return tuple(values)
    raise refuse(f"{what}={quoted(values)} is not usable: give a list")


def flag(value: object, what: str, refuse: type[InvalidInput] = InvalidInput) -> bool:
    if type(value) is bool:
        return value
    raise refuse(f"{what}={quoted(value)} is not usable: give True or False")


def having(value: T, what: str, *methods: str, refuse: type[InvalidInput] = InvalidInput) -> T:
    """A live object with all of these methods."""
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if missing:
        raise refuse(f"{what}={quoted(value)} is not usable: it has no {missing[0]}()")
    return value


def read_back(value: S, what: str, refuse: type[InvalidInput] = InvalidInput) -> S:
    """A struct as it will be read back; refused when it cannot be."""
    try:
        return decode_as(encode(value), type=type(value))
    except (ValidationError, TypeError, ValueError, RecursionError) as error:
        raise refuse(f"{what} cannot be kept like this: {error}") from None


def readable(value: S, what: str, refuse: type[InvalidInput] = InvalidInput) -> S:
    """The same for one without values of callers in it: what would be read as something else is refused too."""
    read = read_back(value, what, refuse)
    if read != value:
        raise refuse(f"{what} cannot be kept like this: {quoted(value)} would be read as {quoted(read)}")
    return read
