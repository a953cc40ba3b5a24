"""Values of a Python type as JSON, and JSON back as values of that type.

    value ── to_json ──> JSON, which is what records hold ── from_json ──> value

The answer of an agent, the result of a step or of a process, and the payload of a signal are stored as JSON and brought
back by the type that the program declares for them, on the first run and on every replay. A type that has no way back
is refused when its codec is made, before anything runs.

The types are those that `schema` describes: JSON types, dataclasses, TypedDicts, named tuples, enums, msgspec structs,
attrs classes and Pydantic models, dates, Decimal, UUID, bytes and paths, and containers and unions of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any, Never, NoReturn, TypeVar, get_args

import msgspec
from msgspec import convert, to_builtins

from perdure.errors import InvalidDefinition, InvalidInput, NotRevived, quoted
from perdure.model.codec import clean
from perdure.tools.check import Schema
from perdure.tools.schema import ADVICE, decode_foreign, describe, encode_foreign, explain, plain_type, tidy

JSON_TYPES = (dict, list, tuple, str, int, float, bool, type(None))


class ValueCodec:
    """How values of one type are stored and brought back. `schema` is that of their JSON."""

    __slots__ = ("_foreign", "_holder", "_is_open", "_scalar", "kind", "schema")

    def __init__(self, kind: Any) -> None:
        """Raises InvalidDefinition, with the type named, when there is no way back from JSON."""
        try:
            if (free := _type_variable(kind)) is not None:
                raise TypeError(f"{free} may stand for any type")
            plain = plain_type(kind)
            described = describe([plain])
        except Exception as error:  # a foreign type describes itself with code of its own
            raise InvalidDefinition(f"{shown(kind)} cannot be brought back from JSON ({error}): {ADVICE}") from error
        self.kind, self._foreign, self._is_open = kind, described.foreign, _is_open(kind)
        self._scalar = kind if kind in (str, int, float, bool) else None  # its own JSON: most results are
        self.schema: Schema = tidy(described.schemas[0], described.defs)
        # In a field of a struct, whose decoder msgspec keeps: it would make that of a bare type anew for each value.
        self._holder = msgspec.defstruct("Holder", [("value", plain)])

    def from_json(self, value: Any) -> Any:
        """The value that `store` gave the JSON of. ValueError says what does not fit."""
        if type(value) is self._scalar:
            return value
        try:
            return self._read(value)
        except msgspec.ValidationError:
            return self.convert(value)

    def convert(self, value: Any) -> Any:
        """JSON from a sender that does not know the type: read as a value of it where that can be, else ValueError."""
        try:
            found: Any = convert({"value": value}, self._holder, strict=False, str_keys=True, dec_hook=decode_foreign)
        except msgspec.ValidationError as error:
            raise ValueError(explain(error).replace("$.value", "$")) from None
        return found.value

    def store(self, value: Any) -> Any:
        """The JSON of a value that comes back as it is. ValueError says why it does not: it is not of this type, or
        members of a union look alike as JSON."""
        if type(value) is self._scalar:
            return clean(value)
        if self._scalar is int and type(value) is bool:
            return int(value)  # a bool is an int to type checkers, and comes back as one
        plain = to_json(value)
        try:
            back = self._read(plain)
        except msgspec.ValidationError:
            # NaN and long integers are texts as JSON: only a second look tells them from texts that do not belong.
            back = self.convert(plain)
            if to_json(back) != plain:
                raise ValueError(f"expected {shown(self.kind)}, got {quoted(value)}") from None
        if not _equal(value, back) and (found := self._changed(value, back)) is not None:
            was, becomes = found
            raise ValueError(
                f"a {type(was).__name__} would come back as {quoted(becomes)}: annotate the type that is returned, and "
                "give the types of a union different fields, or tags"
            )
        return plain

    def _changed(self, value: Any, back: Any) -> tuple[Any, Any] | None:
        """The first member that comes back as something else, and what it comes back as.

        Python's `==` is not asked alone: it finds NaN unequal, types without an `__eq__`, and JSON that was given in
        the place of an object.
        """
        if _equal(value, back):
            return None
        if isinstance(value, list | tuple) and isinstance(back, list | tuple) and len(value) == len(back):
            pairs: Iterable[tuple[Any, Any]] = zip(value, back, strict=True)
        elif type(value) is dict and type(back) is dict and value.keys() == back.keys():
            pairs = [(each, back[key]) for key, each in value.items()]
        else:
            is_json = type(value) in JSON_TYPES
            look_alike = self._foreign and not is_json and not (self._is_open and type(back) in JSON_TYPES)
            if not look_alike and _nothing_lost(to_json(value), to_json(back), exact=not is_json):
                return None
            return value, back
        return next((found for one, other in pairs if (found := self._changed(one, other)) is not None), None)

    def _read(self, value: Any) -> Any:
        hook = decode_foreign if self._foreign else None
        found: Any = convert({"value": value}, self._holder, str_keys=True, dec_hook=hook)
        return found.value


def _equal(value: Any, back: Any) -> bool:
    try:
        return bool(value == back)
    except Exception:  # its own code compares: what its JSON says is looked at instead
        return False


def _nothing_lost(given: Any, back: Any, exact: bool) -> bool:
    """Whether all of some JSON is in what came back of it. What is added there are defaults; `exact`: texts and numbers
    are the same, too, rather than other ways to write what an annotation says."""
    if isinstance(given, dict) and isinstance(back, dict):
        return all(key in back and _nothing_lost(each, back[key], exact) for key, each in given.items())
    if isinstance(given, list) and isinstance(back, list) and exact:
        same = len(given) == len(back) and all(map(_nothing_lost, given, back, itertools.repeat(exact)))
        return same or sorted(map(repr, given)) == sorted(map(repr, back))  # of a set, in another order
    return not exact or bool(given == back)


def to_json(value: Any) -> Any:
    """A value as JSON that every store holds alike. Raises InvalidInput for what has no JSON form."""
    try:
        return clean(to_builtins(value, str_keys=True, enc_hook=encode_foreign))
    except (TypeError, ValueError, RecursionError) as error:  # also from code of its own, which shows itself
        raise InvalidInput(f"a {type(value).__name__} is not JSON: give plain data ({error})") from None


def revived(codec: ValueCodec | None, value: Any, where: str, what: str) -> Any:
    """JSON of a record as a value of the type that the program declares for it today; without one, the JSON itself.
    Raises NotRevived when it does not fit."""
    if codec is None:
        return value
    try:
        return codec.from_json(value)
    except ValueError as error:
        raise NotRevived(where, f"{what} as {shown(codec.kind)}", str(error)) from None


@functools.lru_cache(512)
def _kept(kind: Any) -> ValueCodec:
    return ValueCodec(kind)


def value_codec(kind: Any) -> ValueCodec:
    """The codec of a type, made once. Raises InvalidDefinition when there is no way back from JSON."""
    try:
        return _kept(kind)
    except TypeError:  # an annotation may hold what has no hash
        return ValueCodec(kind)


def is_json(kind: Any) -> bool:
    """Whether an annotation says nothing beyond JSON: `Any`, `object`, or that nothing is returned at all."""
    return kind in (Any, object, Never, NoReturn)


def shown(kind: Any) -> str:
    """A type as its author wrote it."""
    return (
        kind.__qualname__.rpartition("<locals>.")[2] if isinstance(kind, type) and not get_args(kind) else quoted(kind)
    )


def _is_open(kind: Any) -> bool:
    """Whether an annotation leaves a part of the value to be any JSON."""
    return is_json(kind) or kind in (dict, list, tuple, set, frozenset) or any(map(_is_open, get_args(kind)))


def _type_variable(kind: Any) -> Any:
    """A type variable in an annotation, which only the caller's type checker could fill."""
    if isinstance(kind, TypeVar):
        return kind
    return next((found for each in get_args(kind) if (found := _type_variable(each)) is not None), None)
