"""Values that leave an interpreter, as plain data, in bounded time; and the arguments of calls.

A cell can build a value whose text has no end from a few bytes: `x = [x, x]` forty times, or a million references to
one long string. In memory such a value is small, because what is shared is held once; a walk over it pays for every
path. So everything here counts what it visits, and stops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MOST_NODES = 200_000
MOST_BYTES = 8 * 1024 * 1024
"""Of the arguments of one call."""
MAX_DEPTH = 64
INT_MIN, INT_MAX = -(2**63), 2**63 - 1
EARLIER = "this call was made in an earlier cell: a call can be awaited only in the cell that makes it"


class NotPlain(TypeError):
    """The value cannot be told as plain data: the message says why, and what to do."""


# Arguments


def bind(
    path: str,
    parameters: Sequence[tuple[str, str, bool]],
    more: bool,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments of a call by the names of its schema. Raises TypeError in the words of Python.

    `parameters` are name, alias and whether it is required, in the order of positional arguments; `more`: the function
    takes arguments that its schema does not name.
    """
    if len(args) > len(parameters):
        raise TypeError(f"{path}() takes {len(parameters)} positional arguments but {len(args)} were given")
    bound = {name: value for (name, _, _), value in zip(parameters, args, strict=False)}
    names = {alias: name for name, alias, _ in parameters}
    for alias, value in kwargs.items():
        name = names.get(alias, alias if more else None)
        if name is None:
            raise TypeError(f"{path}() got an unexpected keyword argument '{alias}'")
        if name in bound:
            raise TypeError(f"{path}() got multiple values for argument '{alias}'")
        bound[name] = value
    missing = [alias for name, alias, required in parameters if required and name not in bound]
    if missing:
        raise TypeError(f"{path}() missing required arguments: {', '.join(missing)}")
    return bound


def bind_own(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `finish` or `sleep`. Raises TypeError."""
    key = "value" if name == "finish" else "seconds"
    if len(args) + len(kwargs) > 1 or any(each != key for each in kwargs):
        raise TypeError(f"{name}() takes one argument, {key}")
    given = args[0] if args else kwargs.get(key)
    if key == "seconds" and (isinstance(given, bool) or not isinstance(given, int | float)):
        raise TypeError("sleep() takes a number of seconds")
    return {key: given}


class _Count:
    __slots__ = ("nodes", "size")

    def __init__(self) -> None:
        self.nodes = self.size = 0

    def add(self, size: int) -> None:
        self.nodes += 1
        self.size += size
        if self.nodes > MOST_NODES or self.size > MOST_BYTES:
            raise NotPlain(
                f"the arguments are too large: at most {MOST_NODES:,} values, {MOST_BYTES // 1024 // 1024} MiB of text"
            )


def _same(text: str) -> str:
    return text


def plain(value: Any, clean: Callable[[str], str] = _same) -> Any:
    """`value` as JSON holds it. Raises NotPlain for what is none, and for what is too large."""
    return _plain(value, clean, _Count(), 0)


def _plain(value: Any, clean: Callable[[str], str], count: _Count, depth: int) -> Any:
    kind = type(value)
    count.add(len(value) if kind is str else 8)
    if value is None or kind is bool:
        return value
    if kind is str:
        return clean(value)
    if kind is int:
        if INT_MIN <= value <= INT_MAX:
            return value
        raise NotPlain("an int of more than 64 bits is not JSON: pass it as a string")
    if kind is float:
        if math.isfinite(value):
            return value
        raise NotPlain(f"{value} is not JSON: pass None or a string")
    if depth >= MAX_DEPTH:
        raise NotPlain(f"the value is nested deeper than {MAX_DEPTH} levels: flatten it")
    if kind is list or kind is tuple:
        return [_plain(each, clean, count, depth + 1) for each in value]
    if kind is dict:
        return {_key(key, clean, count): _plain(each, clean, count, depth + 1) for key, each in value.items()}
    raise NotPlain(f"a {_kind(value)} is not JSON: pass numbers, strings, lists and dicts")


def _key(key: Any, clean: Callable[[str], str], count: _Count) -> str:
    if type(key) is not str:
        raise NotPlain(f"a {_kind(key)} cannot be a key of a JSON object: use strings")
    count.add(len(key))
    return clean(key)


def _kind(value: Any) -> str:
    """The type as the cell knows it: an instance of a class of its own arrives from Monty as a stand-in."""
    kind = type(value).__name__
    named = getattr(value, "name", None) if kind.startswith("MontyClass") else None
    return named if isinstance(named, str) else kind


# Text


class _Full(Exception):
    pass


def show(value: Any, most: int) -> str:
    """`value` as Python shows it, of at most about `most` characters; what is left out is marked."""
    parts: list[str] = []
    room = [most]

    def put(text: str) -> None:
        if len(text) > room[0]:
            parts.append(text[: room[0]])
            raise _Full
        room[0] -= len(text)
        parts.append(text)

    try:
        _show(value, put, 0)
    except _Full:
        parts.append(" … (cut)")
    return "".join(parts)


_BRACKETS: dict[type, str] = {list: "[]", tuple: "()", set: "{}", frozenset: "{}", dict: "{}"}


def _show(value: Any, put: Callable[[str], None], depth: int) -> None:
    kind = type(value)
    brackets = _BRACKETS.get(kind)
    if kind is str or kind is bytes:
        half = 1_000_000  # a repr of the whole would be made before it is cut
        put(repr(value) if len(value) <= half else f"{value[:half]!r} … ({len(value):,} in all)")
        return
    if brackets is None:
        put(_plain_repr(value))
        return
    if depth >= MAX_DEPTH:
        put("…")
        return
    put(f"{kind.__name__}({{" if kind is frozenset else "set(" if kind is set and not value else brackets[0])
    for index, each in enumerate(value.items() if isinstance(value, Mapping) else value):
        put(", " if index else "")
        if isinstance(value, Mapping):
            _show(each[0], put, depth + 1)
            put(": ")
            _show(each[1], put, depth + 1)
        else:
            _show(each, put, depth + 1)
    end = "})" if kind is frozenset else ")" if kind is set and not value else brackets[1]
    put(f",{end}" if kind is tuple and len(value) == 1 else end)


def _plain_repr(value: Any) -> str:
    if type(value).__name__ == "MontyClassProxy" and isinstance(attributes := value.attributes, dict):
        shown = ", ".join(f"{key}={show(each, 200)}" for key, each in list(attributes.items())[:20])
        return f"{value.name}({shown})"
    try:
        return repr(value)
    except ValueError:  # an int beyond the interpreter's limit of digits
        if type(value) is not int:
            raise
        return f"<an int of {value.bit_length():,} bits>"
