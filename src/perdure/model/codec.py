"""One codec: canonical bytes for everything stored, and one normalisation for everything that comes in.

Values from models, tools and hosts are normalised once, at the boundary, and identically for every store:

    lone surrogate, NUL   ->  U+FFFD
    NaN, ±Infinity        ->  the strings "NaN", "Infinity", "-Infinity"
    int beyond 64 bits    ->  its decimal string
    deeper than 64 levels ->  refused

Decoding builds structs of the closed unions below and plain JSON, never a type named by the data.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn, SupportsIndex, TypeVar, cast, overload

import msgspec
from msgspec import Struct
from msgspec.structs import astuple, replace

from perdure.errors import InvalidInput, PerdureError, TooLarge, quoted
from perdure.model.message import (
    Audio,
    Document,
    File,
    FileRef,
    Image,
    Inline,
    InputContent,
    Local,
    Message,
    Part,
    ProviderPart,
    Reasoning,
    Source,
    Stored,
    Text,
    ToolCall,
    ToolResult,
    Url,
)
from perdure.model.record import RecordRow, Spilled
from perdure.model.tool import ToolSpec

MAX_DEPTH = 64
MAX_VALUE = 32 * 1024 * 1024
INT_MIN, INT_MAX = -(2**63), 2**63 - 1
REPLACEMENT = "\ufffd"

T = TypeVar("T")

encode = msgspec.json.Encoder(order="deterministic").encode
decode = msgspec.json.Decoder().decode
decode_row = msgspec.json.Decoder(RecordRow).decode
convert = msgspec.convert


def clean_text(text: str) -> str:
    """`text` without what some store could not hold."""
    if type(text) is not str:
        text = _plain_text(text)
    if text.isascii():
        return text if "\0" not in text else text.replace("\0", REPLACEMENT)
    if "\0" in text:
        text = text.replace("\0", REPLACEMENT)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Surrogates that form a pair are a character told in two halves; only lone ones are lost.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _plain_text(text: object) -> str:
    """The text of a `str` subclass: an enum's value, not its name."""
    if not isinstance(text, str):
        raise InvalidInput(f"a {type(text).__name__} is not text: give a string")
    return str.__str__(text)


def error_text(error: BaseException) -> str:
    """What an exception says, whatever its own `__str__` does."""
    try:
        return clean_text(str(error))
    except Exception:  # its own __str__ ran, and may raise anything
        return "(it cannot be shown)"


def model_text(error: BaseException) -> str:
    """What an exception says to a model: without hints that only Python code can follow."""
    return clean_text(error.summary) if isinstance(error, PerdureError) else error_text(error)


def clean(value: Any, depth: int = 0) -> Any:
    """`value` as plain JSON that every store holds alike. Raises InvalidInput for what is not JSON."""
    kind = type(value)
    if kind is str:
        return value if value.isascii() and "\0" not in value else clean_text(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if INT_MIN <= value <= INT_MAX else _long_int(value)
    if kind is float:
        return value if math.isfinite(value) else _odd_float(value)
    if depth >= MAX_DEPTH:
        raise InvalidInput(f"the value is nested deeper than {MAX_DEPTH} levels: flatten it")
    if kind is dict or isinstance(value, Mapping):
        # What is printable has neither a NUL nor half a character: most keys are.
        cleaned = {k if type(k) is str and k.isprintable() else _key(k): clean(v, depth + 1) for k, v in value.items()}
        if len(cleaned) != len(value):
            raise InvalidInput("two keys of an object are the same as JSON, and one value would be lost: rename one")
        return cleaned
    if kind is list or isinstance(value, list | tuple):
        return [clean(item, depth + 1) for item in value]
    return _foreign(value, depth)


def _foreign(value: Any, depth: int) -> Any:
    """Structs, dataclasses, Pydantic models, enums, dates, sets… in the form JSON gives them."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Image | Document | Audio) and isinstance(value.source, Local | Inline):
        raise InvalidInput(
            f"the {type(value).__name__} {value.name!r} is too deep in the value to be kept beside it: return it "
            "alone, or in a list or dict of its own"
        )
    if isinstance(value, int | float):
        return clean(int(value) if isinstance(value, int) else float(value), depth)
    dump = getattr(value, "model_dump", None)
    try:
        plain = dump(mode="json") if callable(dump) else msgspec.to_builtins(value, str_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"a {type(value).__name__} is not JSON: return plain data ({error})") from None
    if type(plain) is type(value):
        raise InvalidInput(f"a {type(value).__name__} is not JSON: return plain data")
    return clean(plain, depth)


def _key(key: Any) -> str:
    if isinstance(key, str):
        return clean_text(key)
    if isinstance(key, bool | int | float) or key is None:
        plain = clean(key)
        return plain if isinstance(plain, str) else encode(plain).decode()
    raise InvalidInput(f"a {type(key).__name__} cannot be a JSON key: use strings")


def _long_int(value: int) -> str:
    try:
        return str(value)
    except ValueError:  # the interpreter's own limit on digits
        return hex(value)


def _odd_float(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def clean_part(part: Part) -> Part:
    """A part with its strings and values normalised; the same object when nothing had to change."""
    if type(part) is Text:
        cleaned = clean_text(part.text)
        return part if cleaned is part.text else Text(cleaned)
    if type(part) is ToolCall:
        return _clean_call(part)
    if type(part) is ToolResult:
        call, name = clean_text(part.call_id), clean_text(part.name)
        return ToolResult(call, name, clean(part.content), part.status, tuple(map(clean_file, part.files)))
    if type(part) is Reasoning:
        return Reasoning(clean_text(part.text), clean(part.replay))
    if type(part) is ProviderPart:
        return ProviderPart(*map(clean_text, astuple(part)))
    return clean_file(part)


def clean_file(part: object) -> File:
    """A file with its strings normalised. Its bytes are where they were: who stores a part has put them somewhere."""
    if isinstance(part, FileRef):
        return FileRef(*map(clean_text, astuple(part)))
    if isinstance(part, Image | Document | Audio):
        return type(part)(_clean_source(part), clean_text(part.media_type), clean_text(part.name))
    raise InvalidInput(f"a {type(part).__name__} is not a part of a message")


def _clean_source(part: Image | Document | Audio) -> Source:
    """Where the bytes are. Structs check no types when they are made, and a record with another one is not readable."""
    match part.source:
        case Url(str() as url):
            return Url(clean_text(url))
        case Stored(str(), int(size)) as source if size >= 0:
            return source
        case Local(str()) | Inline(bytes() | bytearray()) as source:
            return source
        case wrong:
            made = f"make it with {type(part).__name__}.file(…), .from_bytes(…) or .url(…)"
            raise InvalidInput(f"{quoted(wrong)} is no place of a file: {made}")


def _clean_call(call: ToolCall) -> ToolCall:
    """A call as it is stored. Arguments that are no JSON object are kept as text, for the model to see again."""
    try:
        args, raw = clean(call.args), call.raw
    except InvalidInput as error:
        args, raw = None, str(error)
    if not isinstance(args, dict):
        args, raw = {}, raw or str(call.args)[:1000]
    raw = None if raw is None else clean_text(raw)
    return ToolCall(clean_text(call.id), clean_text(call.name), args, raw, clean(call.replay))


def clean_message(said: InputContent, role: str = "user", *, unsaved: bool = False) -> Message:
    """What a host may say, as one normalised user message. `unsaved`: its files may be where the host has them."""
    parts: tuple[Part, ...]
    if isinstance(said, str):
        parts = (Text(clean_text(said)),)
    elif isinstance(said, Message):
        if said.role != role:
            raise InvalidInput(f"a session takes messages with role 'user', not {quoted(said.role)}")
        parts = tuple([_said_part(part, unsaved) for part in said.parts])
    elif isinstance(said, list | tuple):
        parts = tuple([_said_part(Text(each) if isinstance(each, str) else each, unsaved) for each in said])
    else:
        raise InvalidInput(f"say a string, a Message or a list of strings and files, not a {type(said).__name__}")
    if all(type(part) is Text and not part.text.strip() for part in parts):
        raise InvalidInput("the input is empty: say something")
    return Message("user", parts)


def _said_part(part: object, unsaved: bool) -> Part:
    if not isinstance(part, Text | Image | Document | Audio | FileRef):
        # Calls and results that a host made up could never be paired.
        raise InvalidInput(
            f"a message to a session holds text and files, not a {type(part).__name__}: calls and results are the "
            "runtime's to say"
        )
    if not unsaved and not isinstance(part, Text | FileRef) and isinstance(part.source, Local | Inline):
        raise InvalidInput(f"the bytes of this {type(part).__name__} are not in the store: say it with session.run(…)")
    return clean_part(part)


def spilled(body: bytes) -> str | None:
    """The blob that holds what stands in this place, if it was too large for it."""
    if not body.startswith(b'{"type":"spilled.1"'):
        return None
    row = decode_row(body)
    assert type(row) is Spilled
    return row.digest


def encode_checked(value: Any, what: str) -> bytes:
    """Canonical bytes of `value`, refused when they are larger than any session may carry."""
    try:
        data = encode(value)
    except (TypeError, ValueError, RecursionError) as error:  # also text that is none
        raise InvalidInput(f"{what} cannot be kept: {error}") from None
    if len(data) > MAX_VALUE:
        raise TooLarge(what, len(data), MAX_VALUE)
    return data


# ---------------------------------------------------------------------- copies

# Messages and outcomes are frozen, but the JSON inside them is not: arguments, results, schemas. `copied` copies that
# much of a value and shares the rest. `CopiedOnRead` is a tuple whose items are copied when they are taken out of it:
# a long history costs nothing until a hook reads it, and then only what it reads. Schemas of tools are shown at every
# call and seldom read: `read_only_spec` makes them read-only once.

_PLAIN = frozenset((str, int, float, bool, type(None), bytes))


def copied(value: T) -> T:
    """The value with JSON of its own. What cannot be changed is shared."""
    kind, made = type(value), cast(Any, value)
    if kind in _PLAIN:
        return value
    if kind is Message:
        made = _copied_message(made)
    elif kind is dict:
        made = {key: each if type(each) in _PLAIN else copied(each) for key, each in made.items()}
    elif kind is list:
        made = [each if type(each) in _PLAIN else copied(each) for each in made]
    elif isinstance(value, tuple):
        items = [copied(each) for each in tuple.__iter__(value)]
        made = value if all(map(operator.is_, tuple.__iter__(value), items)) else tuple(items)
    elif isinstance(value, Struct):
        made = _copied_struct(made)
    return cast(T, made)


def _copied_message(message: Message) -> Message:
    for part in message.parts:
        if type(part) is not Text and (type(part) is not ToolResult or type(part.content) not in _PLAIN):
            return Message(message.role, tuple([_copied_part(part) for part in message.parts]))
    return message


def _copied_part(part: Part) -> Part:
    """Those that histories are made of are copied field by field: hooks read many of them."""
    if type(part) is Text:
        return part
    if type(part) is ToolCall:
        replay = part.replay if part.replay is None else copied(part.replay)
        return ToolCall(part.id, part.name, copied(part.args), part.raw, replay)
    if type(part) is ToolResult:
        content = copied(part.content)
        if content is part.content:
            return part
        return ToolResult(part.call_id, part.name, content, part.status, part.files)
    made: Part = _copied_struct(part)
    return made


def _copied_struct(value: Any) -> Any:
    """A struct with fields of its own; the same one when none of them can be changed."""
    fields = [getattr(value, name) for name in value.__struct_fields__]
    copies = [each if type(each) in _PLAIN else copied(each) for each in fields]
    if all(map(operator.is_, fields, copies)):
        return value
    return type(value)(**dict(zip(value.__struct_fields__, copies, strict=True)))


class CopiedOnRead(tuple[T, ...]):
    """Items that several readers share: each that is taken out is copied."""

    __slots__ = ()

    def __iter__(self) -> Iterator[T]:
        return map(copied, tuple.__iter__(self))

    @overload
    def __getitem__(self, at: SupportsIndex, /) -> T: ...

    @overload
    def __getitem__(self, at: slice, /) -> CopiedOnRead[T]: ...

    def __getitem__(self, at: Any, /) -> Any:
        found = tuple.__getitem__(self, at)
        return CopiedOnRead(found) if isinstance(at, slice) else copied(found)

    def shared(self) -> list[T]:
        """The items themselves, for code that changes none of them."""
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


def read_only_spec(spec: ToolSpec) -> ToolSpec:
    """A tool whose schemas cannot be changed."""
    return replace(spec, input_schema=_frozen(spec.input_schema), output_schema=_frozen(spec.output_schema))
