"""Python types as JSON Schema, and JSON back as Python values.

Types are msgspec's, plus what it leaves out and users write: Pydantic models (recognised by their methods, so that
Pydantic is never imported by us), unions it refuses, paths, and metadata objects in `Annotated`.

    annotation ── plain_type ──> a type msgspec takes ── describe ──> schema, tidied for providers
                                        └── convert, with `decode_foreign` for the rest ──> value

`define` and `answer` build on it: what a tool is called with, and what a turn returns. Tools that come with a schema
and no type are checked by `check`.

Descriptions come from docstrings: one of the tool, and one for each parameter. Google, NumPy and reST styles are read,
also mixed. Nothing in that fails: what is not understood stays in the description.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, LiteralString, NamedTuple, Union, cast, get_args, get_origin

import msgspec
from msgspec import Meta, convert

from perdure.tools.check import Schema

ADVICE = "use plain JSON types, dataclasses, TypedDicts, enums, msgspec structs or Pydantic models"


# Annotations


_CONSTRAINTS = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern")
_SUBSTITUTES: dict[Any, Any] = {
    object: Any,
    LiteralString: str,
    Iterable: list,
    # msgspec shows them as bare strings because it takes them with and without a time zone.
    datetime.datetime: Annotated[datetime.datetime, Meta(extra_json_schema={"format": "date-time"})],
    datetime.time: Annotated[datetime.time, Meta(extra_json_schema={"format": "time"})],
}


class _Anything(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return True  # msgspec asks whether what `decode_foreign` returned is one of these


class Either(metaclass=_Anything):
    """A union that msgspec refuses, as a type of our own: two dataclasses, a date or a string, a model or a list…"""

    members: ClassVar[tuple[Any, ...]] = ()


def plain_type(annotation: Any) -> Any:
    """The annotation as a type that msgspec takes, with foreign metadata translated."""
    if isinstance(annotation, type) or annotation is LiteralString:
        return _SUBSTITUTES.get(annotation, annotation)
    if (meaning := getattr(annotation, "__value__", None)) is not None:  # type X = …
        return plain_type(meaning)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _plain_annotated(args[0], args[1:])
    if origin is Union or origin is UnionType:
        return _plain_union(args)
    plain = tuple(plain_type(arg) for arg in args)
    other = _SUBSTITUTES.get(origin, origin)
    if other is origin and all(new is old for new, old in zip(plain, args, strict=True)):
        return annotation
    return other[plain] if plain else other


def _plain_annotated(base: Any, metadata: tuple[Any, ...]) -> Any:
    constraints = {}
    extras = []
    for one in metadata:
        if isinstance(one, Meta):
            extras.append(one)
            continue
        if isinstance(text := description_in(one), str):
            extras.append(Meta(description=text))
        for part in (one, *_parts(one)):
            found = {name: getattr(part, name, None) for name in _CONSTRAINTS}
            constraints.update({name: value for name, value in found.items() if value is not None})
    if isinstance(pattern := constraints.get("pattern"), re.Pattern):
        constraints["pattern"] = pattern.pattern
    plain = plain_type(base)
    if constraints:
        meta = Meta(**constraints)
        # A constraint on `int | None` is meant for the int.
        members = get_args(plain) if get_origin(plain) in (Union, UnionType) else (plain,)
        plain = _union(one if one is NoneType else Annotated[one, meta] for one in members)
    return functools.reduce(lambda inner, extra: Annotated[inner, extra], extras, plain)


def _union(members: Iterable[Any]) -> Any:
    return functools.reduce(operator.or_, members)


def description_in(metadata: Any) -> Any:
    """The words in a string, a `Field(description=…)` or a `Doc(…)`."""
    if isinstance(metadata, str):
        return metadata
    return getattr(metadata, "description", None) or getattr(metadata, "documentation", None)


def _parts(metadata: Any) -> Sequence[Any]:
    """Pydantic's `Field` keeps its constraints as a list of small objects."""
    parts = getattr(metadata, "metadata", ())
    return parts if isinstance(parts, list | tuple) else ()


def _plain_union(args: tuple[Any, ...]) -> Any:
    members = tuple(plain_type(arg) for arg in args)
    union = _union(members)
    try:
        msgspec.inspect.type_info(union)
    except TypeError:
        return _Anything("Either", (Either,), {"members": members})
    return union


# Foreign types: what msgspec hands to our hooks


def _is_model(kind: Any) -> bool:
    return callable(getattr(kind, "model_validate", None)) and callable(getattr(kind, "model_json_schema", None))


def _is_path(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, os.PathLike)


def _foreign_schema(kind: Any) -> Schema:
    if issubclass(kind, Either):
        described = describe(kind.members)
        return {"anyOf": described.schemas, "$defs": described.defs}
    if _is_model(kind):
        return cast("Schema", kind.model_json_schema())
    if _is_path(kind):
        return {"type": "string"}
    raise TypeError(f"{kind.__name__} has no JSON form")


def decode_foreign(kind: Any, value: Any) -> Any:
    """A value of a type that msgspec does not know; ValueError says what is wrong with it, one line for each fault."""
    if issubclass(kind, Either):
        return _decode_either(kind.members, value)
    if _is_path(kind):
        if isinstance(value, str):
            return kind(value)
        raise ValueError("Expected a path as a string")
    validate_json = getattr(kind, "model_validate_json", None)
    try:
        # From JSON, because strict models take "2025-01-01" for a date only there.
        return kind.model_validate(value) if validate_json is None else validate_json(msgspec.json.encode(value))
    except ValueError as error:
        raise ValueError(_model_faults(error)) from None


def _model_faults(error: ValueError) -> str:
    faults = getattr(error, "errors", None)
    if not callable(faults):
        return str(error)
    lines = []
    for fault in faults():
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in fault["loc"])
        lines.append(f"${path}: {fault['msg']}")
    return "\n".join(lines)


def _decode_either(members: Sequence[Any], value: Any) -> Any:
    """The first member that takes the value: as it is, else converted; members that know all its keys go first."""
    if isinstance(value, dict):
        members = sorted(members, key=lambda member: len(value.keys() - _fields(member)))
    faults = []
    for strict in (True, False):
        for member in members:
            try:
                return convert(value, member, strict=strict, str_keys=True, dec_hook=decode_foreign)
            except msgspec.ValidationError as error:
                faults.append(explain(error).replace("\n", ", "))
    raise ValueError(f"Fits none of the allowed forms ({'; '.join(dict.fromkeys(faults[len(members) :]))})")


def _fields(kind: Any) -> Collection[str]:
    kind = get_origin(kind) or kind
    for name in ("__struct_encode_fields__", "model_fields", "__dataclass_fields__", "__annotations__"):
        if fields := getattr(kind, name, None):
            return set(fields)
    return ()


def encode_foreign(value: Any) -> Any:
    """A value of a type that msgspec does not know, as JSON."""
    if callable(dump := getattr(value, "model_dump", None)):
        return dump(mode="json", by_alias=True)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is not JSON")


def explain(error: Exception) -> str:
    """What msgspec found, path first: `$.limit: expected int, got str`. One line for each fault."""
    message, found, at = str(error).rpartition(" - at ")
    if not found:
        message, at = str(error), "$"
    path = at.replace("`", "")
    if message.startswith("$"):
        return "\n".join(path + line.removeprefix("$") for line in message.split("\n"))
    return f"{path}: {message[:1].lower()}{message[1:]}".replace("`", "")


# Schemas


class Described(NamedTuple):
    """Schemas of some types with the definitions they share, and whether values need `decode_foreign`."""

    schemas: list[Schema]
    defs: dict[str, Schema]
    foreign: bool


def describe(types: Sequence[Any]) -> Described:
    """Schemas as msgspec and Pydantic make them, not yet tidied. Raises whatever they raise."""
    foreign: list[Any] = []

    def hook(kind: Any) -> Schema:
        foreign.append(kind)
        return _foreign_schema(kind)

    schemas, defs = msgspec.json.schema_components(types, schema_hook=hook)
    return Described(list(schemas), defs, bool(foreign))


_MANY = ("properties", "patternProperties", "$defs", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONES = ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else")
_NOISE = ("title", "discriminator")
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}


def _each(node: Any, change: Callable[[Any], Any]) -> Any:
    """The schema with every schema directly inside it changed; data such as defaults is not looked into."""
    if not isinstance(node, dict):
        return node
    result = dict(node)
    for key, inner in node.items():
        if key in _MANY and isinstance(inner, dict):
            result[key] = {name: change(one) for name, one in inner.items()}
        elif key in _LISTS and isinstance(inner, list):
            result[key] = [change(one) for one in inner]
        elif key in _ONES:
            result[key] = change(inner)
    return result


def tidy(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """The schema as providers like it: definitions at the root and only where shared, no titles, enums with types."""
    defs: dict[str, Schema] = {}
    raw: dict[str, Any] = {}
    _hoist({"$defs": definitions}, defs, raw, {})
    root = _hoist(schema, defs, raw, {})
    if (top := _ref(root)) in defs:
        root = {**defs[top], **{key: value for key, value in root.items() if key != "$ref"}}
    uses: dict[str, int] = {}
    _count_uses(root, defs, uses)

    def inline(node: Any) -> Any:
        name = _ref(node)
        if name is not None and name in defs and (uses[name] == 1 or "enum" in defs[name]):
            around = {key: value for key, value in node.items() if key != "$ref"}
            return {**inline(defs[name]), **around}
        return _each(node, inline)

    result = cast("Schema", inline(root))
    shared = {name: inline(one) for name, one in defs.items() if uses.get(name, 0) > 1 and "enum" not in one}
    return {**result, "$defs": shared} if shared else result


def _ref(node: Any) -> str | None:
    ref = node.get("$ref") if isinstance(node, dict) else None
    return ref.removeprefix("#/$defs/") if isinstance(ref, str) else None


def _hoist(node: Any, defs: dict[str, Schema], raw: dict[str, Any], names: Mapping[str, str]) -> Any:
    """The schema with definitions moved to `defs` and noise removed; `names` says what they are called there."""
    if not isinstance(node, dict):
        return node
    local = node.get("$defs")
    node = {key: value for key, value in node.items() if key != "$defs" and key not in _NOISE}
    if isinstance(local, dict):
        names = {**names, **_free_names(local, raw)}
        for name, one in local.items():
            if names[name] not in raw:
                raw[names[name]] = one
                defs[names[name]] = _hoist(one, defs, raw, names)
    if (name := _ref(node)) is not None and name in names:
        node["$ref"] = f"#/$defs/{names[name]}"
    if "enum" in node and "type" not in node:
        kinds = {_JSON_TYPES.get(type(value)) for value in node["enum"]}
        if len(kinds) == 1 and None not in kinds:
            node["type"] = kinds.pop()
    return _each(node, lambda inner: _hoist(inner, defs, raw, names))


def _free_names(local: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, str]:
    """What each definition is called at the root. Models of two modules may share a name and not mean the same: then
    the whole group is renamed, because its members refer to each other (all but enums, which refer to nothing)."""
    clashing = {name for name, one in local.items() if name in raw and raw[name] != one}
    if any("enum" not in local[name] for name in clashing):
        clashing = set(local)
    number = 2
    while any(f"{name}_{number}" in raw for name in clashing):
        number += 1
    return {name: f"{name}_{number}" if name in clashing else name for name in local}


def _count_uses(node: Any, defs: dict[str, Schema], uses: dict[str, int]) -> None:
    if (name := _ref(node)) is not None and name in defs:
        uses[name] = uses.get(name, 0) + 1
        if uses[name] == 1:
            _count_uses(defs[name], defs, uses)
    _each(node, lambda inner: _count_uses(inner, defs, uses))


# ---------------------------------------------------------------------- docstrings

_GOOGLE = re.compile(r"(args|arguments|params|parameters|keyword args|keyword arguments|other parameters):$", re.I)
_GOOGLE_ENTRY = re.compile(r"[\\*]*(\w+)\s*(?:\((?:[^()]|\([^()]*\))*\))?\s*:(?:\s+(.*)|$)")
_NUMPY = re.compile(r"(parameters|other parameters)$", re.I)
_NUMPY_ENTRY = re.compile(r"([\\*]*\w+(?:\s*,\s*[\\*]*\w+)*)(?:\s*:.*)?$")
_RULE = re.compile(r"-{3,}$|={3,}$")
_FIELD = re.compile(r"[:@](?:param|parameter|arg|argument|key|keyword)\s+(?:[^:]*[\s*\\])?(\w+)\s*:(?:\s+(.*)|$)")
_TYPE_FIELD = re.compile(r"[:@]type\s+[^:]*:")


class Docstring(NamedTuple):
    """The description without its parameter sections, and the descriptions of parameters by name."""

    description: str
    parameters: dict[str, str]


def parse_docstring(doc: object) -> Docstring:
    """Read a docstring; anything but a string is an empty one."""
    if not isinstance(doc, str):
        return Docstring("", {})
    lines = inspect.cleandoc(doc).splitlines()
    rest: list[str] = []
    found: dict[str, list[str]] = {}
    at = 0
    while at < len(lines):
        for read in (_read_field, _read_google, _read_numpy):
            end = read(lines, at, found)
            if end > at:
                at = end
                break
        else:
            rest.append(lines[at].rstrip())
            at += 1
    description = re.sub(r"\n{3,}", "\n\n", "\n".join(rest)).strip()
    texts = {name: " ".join(words).strip() for name, words in found.items()}
    return Docstring(description, {name: text for name, text in texts.items() if text})


# A reader looks at one line and returns where to go on: the same line when it is not for this reader.


def _read_field(lines: list[str], at: int, found: dict[str, list[str]]) -> int:
    line = lines[at].strip()
    if field := _FIELD.match(line):
        entry = found.setdefault(field[1], [])
        entry.append(field[2] or "")
    elif _TYPE_FIELD.match(line):
        entry = []
    else:
        return at
    end = _end_of_block(lines, at, blank_ends=True)
    entry.extend(text.strip() for text in lines[at + 1 : end])
    return end


def _read_google(lines: list[str], at: int, found: dict[str, list[str]]) -> int:
    if not _GOOGLE.match(lines[at].strip()):
        return at
    end = _end_of_block(lines, at)
    block = [line for line in lines[at + 1 : end] if line.strip()]
    if not block:
        return at
    entry: list[str] = []
    for line in block:
        named = _GOOGLE_ENTRY.match(line.strip()) if _indent(line) <= _indent(block[0]) else None
        if named:
            entry = found.setdefault(named[1], [])
        entry.append((named[2] or "") if named else line.strip())
    return end


def _read_numpy(lines: list[str], at: int, found: dict[str, list[str]]) -> int:
    if not (_NUMPY.match(lines[at].strip()) and _is_ruled(lines, at)):
        return at
    margin, end = _indent(lines[at]), at + 2
    entries: list[list[str]] = []
    while end < len(lines) and not _is_ruled(lines, end):
        line = lines[end].strip()
        if line and _indent(lines[end]) <= margin:
            named = _NUMPY_ENTRY.match(line)
            if not named:
                break
            entries = [found.setdefault(name.strip(" \\*"), []) for name in named[1].split(",")]
        elif line:
            for entry in entries:
                entry.append(line)
        end += 1
    return end


def _is_ruled(lines: list[str], at: int) -> bool:
    """Whether the line is a NumPy heading: words with a rule under them."""
    return bool(lines[at].strip()) and at + 1 < len(lines) and bool(_RULE.match(lines[at + 1].strip()))


def _end_of_block(lines: list[str], at: int, *, blank_ends: bool = False) -> int:
    """The first line after `at` that is not indented deeper than it."""
    margin, end = _indent(lines[at]), at + 1
    while end < len(lines):
        if lines[end].strip():
            if _indent(lines[end]) <= margin:
                break
        elif blank_ends:
            break
        end += 1
    return end


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
