"""Values that whoever gets them may change without changing them for others.

Messages and outcomes are frozen, but the JSON inside them is not: arguments, results, schemas. `own` copies that much
of a value and shares the rest. `Seen` is a tuple whose items are copied when they are taken out of it, so that showing
a long history costs nothing until somebody looks at it, and then only what was looked at. Schemas of tools are shown at
every call and seldom looked at: `shown_spec` makes them read-only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, SupportsIndex, TypeVar, cast, overload

from msgspec import Struct
from msgspec.structs import replace

from mainstay.model.message import Message, Part, Text, ToolCall, ToolResult
from mainstay.model.tool import ToolSpec

T = TypeVar("T")

_PLAIN = frozenset((str, int, float, bool, type(None), bytes))


def own(value: T) -> T:
    """The value with JSON of its own. What cannot be changed is shared."""
    return cast(T, _own(value))


def _own(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is Message:
        return _own_message(value)
    if kind is dict:
        return {key: each if type(each) in _PLAIN else _own(each) for key, each in value.items()}
    if kind is list:
        return [each if type(each) in _PLAIN else _own(each) for each in value]
    if isinstance(value, tuple):
        items = [_own(each) for each in tuple.__iter__(value)]
        return value if all(map(_is, tuple.__iter__(value), items)) else tuple(items)
    return _own_struct(value) if isinstance(value, Struct) else value


def _own_message(message: Message) -> Message:
    for part in message.parts:
        if type(part) is not Text and (type(part) is not ToolResult or type(part.content) not in _PLAIN):
            return Message(message.role, tuple([_own_part(part) for part in message.parts]))
    return message


def _own_part(part: Part) -> Part:
    """Those that histories are made of are copied field by field: hooks look at many of them."""
    if type(part) is Text:
        return part
    if type(part) is ToolCall:
        replay = part.replay if part.replay is None else _own(part.replay)
        return ToolCall(part.id, part.name, _own(part.args), part.raw, replay)
    if type(part) is ToolResult:
        content = _own(part.content)
        if content is part.content:
            return part
        return ToolResult(part.call_id, part.name, content, part.status, part.files)
    made: Part = _own_struct(part)
    return made


def _own_struct(value: Any) -> Any:
    """A struct with fields of its own; the same one when none of them can be changed."""
    fields = [getattr(value, name) for name in value.__struct_fields__]
    owned = [each if type(each) in _PLAIN else _own(each) for each in fields]
    if all(map(_is, fields, owned)):
        return value
    return type(value)(**dict(zip(value.__struct_fields__, owned, strict=True)))


def _is(one: object, other: object) -> bool:
    return one is other


class Seen(tuple[T, ...]):
    """Items that are shown to several: each that is taken out is the taker's own."""

    __slots__ = ()

    def __iter__(self) -> Iterator[T]:
        return map(_own, tuple.__iter__(self))

    @overload
    def __getitem__(self, at: SupportsIndex, /) -> T: ...

    @overload
    def __getitem__(self, at: slice, /) -> Seen[T]: ...

    def __getitem__(self, at: Any, /) -> Any:
        found = tuple.__getitem__(self, at)
        return Seen(found) if isinstance(at, slice) else _own(found)

    def shared(self) -> list[T]:
        """The items themselves: for whoever shows them."""
        return list(tuple.__iter__(self))

    def __add__(self, others: Iterable[Any], /) -> tuple[Any, ...]:
        return (*self, *others)


def _refuse(self: object, *_: object, **__: object) -> NoReturn:
    raise TypeError("it is shown to several, and read-only: change a copy (`copy.deepcopy`)")


class _Dict(dict[str, Any]):
    """JSON that cannot be changed. A copy of it can."""

    __slots__ = ()
    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __deepcopy__(self, memo: object) -> dict[str, Any]:
        return {key: _thawed(value) for key, value in self.items()}


class _List(list[Any]):
    __slots__ = ()
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse

    def __deepcopy__(self, memo: object) -> list[Any]:
        return [_thawed(value) for value in self]


def _frozen(value: Any) -> Any:
    if type(value) is dict:
        return _Dict({key: _frozen(each) for key, each in value.items()})
    return _List([_frozen(each) for each in value]) if type(value) is list else value


def _thawed(value: Any) -> Any:
    return value.__deepcopy__(None) if isinstance(value, _Dict | _List) else value


def shown_spec(spec: ToolSpec) -> ToolSpec:
    """A tool whose schemas cannot be changed."""
    return replace(spec, input_schema=_frozen(spec.input_schema), output_schema=_frozen(spec.output_schema))
