"""Python types as JSON Schema, and JSON back as Python values.

Types are msgspec's, plus what it leaves out and users write: Pydantic models (recognised by their methods, so that
Pydantic is never imported by us), unions it refuses, paths, and metadata objects in `Annotated`.

    annotation ── plain_type ──> a type msgspec takes ── describe ──> schema, tidied for providers
                                        └── convert, with `decode_foreign` for the rest ──> value

Tools that come with a schema and no type are checked by `mainstay.tools.check`.
"""

from __future__ import annotations

import datetime
import functools
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, LiteralString, NamedTuple, TypeAlias, Union, cast, get_args, get_origin

import msgspec
from msgspec import UNSET, Meta, convert, to_builtins
from msgspec.structs import asdict

from mainstay.errors import InvalidDefinition
from mainstay.model.codec import clean

Schema: TypeAlias = dict[str, Any]

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
_SCALARS = (str, int, float, bool, NoneType)


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
        if isinstance(text := _description(one), str):
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


def _description(metadata: Any) -> Any:
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


def output_schema_of(kind: Any) -> Schema:
    """The schema of one type. Raises InvalidDefinition when it has none."""
    return output_codec(kind).schema


# Arguments


class Parameter(NamedTuple):
    """One parameter that the model fills."""

    name: str
    annotation: Any
    default: Any = UNSET
    description: str = ""


class Arguments:
    """The arguments of one tool: their schema, and how they become keyword arguments."""

    __slots__ = ("_copies", "_hook", "_optional", "_struct", "schema")

    def __init__(self, owner: str, parameters: Sequence[Parameter]) -> None:
        types = [_parameter_type(owner, one) for one in parameters]
        described = _describe_parameters(owner, parameters, types)
        self.schema = _arguments_schema(parameters, described)
        self._optional = any(one.default is not UNSET for one in parameters)
        # Whatever msgspec hands through as it is (Any, a bare dict) must not be shared with the recorded call: the tool
        # may change it, and the next attempt would see that.
        self._copies = any(one not in _SCALARS for kind in types for one in get_args(kind) or (kind,))
        self._hook = decode_foreign if described.foreign else None
        # Defaults stay with the function, so that it gets its own objects.
        fields = [
            (one.name, kind) if one.default is UNSET else (one.name, kind, UNSET)
            for one, kind in zip(parameters, types, strict=True)
        ]
        self._struct = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)

    def bind(self, args: Any) -> dict[str, Any]:
        """Model arguments as keyword arguments; ValueError names the path and the expectation."""
        try:
            if self._copies:
                args = to_builtins(args, str_keys=True)
            found = self._read(args)
        except (msgspec.ValidationError, TypeError) as error:
            raise ValueError(self._explain(error)) from None
        if self._optional:
            return {name: value for name, value in asdict(found).items() if value is not UNSET}
        return asdict(found)

    def _read(self, args: Any) -> msgspec.Struct:
        try:
            # First as it is: nearly always enough, and each option of `convert` costs as much as the conversion.
            return (
                convert(args, self._struct) if self._hook is None else convert(args, self._struct, dec_hook=self._hook)
            )
        except msgspec.ValidationError:
            return convert(args, self._struct, strict=False, str_keys=True, dec_hook=self._hook)

    def _explain(self, error: Exception) -> str:
        text = explain(error)
        if text.startswith("$: object contains unknown field"):
            return f"{text}; known: {', '.join(self._struct.__struct_fields__) or 'none'}"
        return text


def _parameter_type(owner: str, parameter: Parameter) -> Any:
    try:
        # `x: str = None` means that null is fine, whatever the annotation forgets.
        forgotten = parameter.default is None and not _takes_none(parameter.annotation)
        return plain_type(parameter.annotation | None if forgotten else parameter.annotation)
    except Exception as error:
        raise _unsupported(owner, parameter, error) from error


def _takes_none(annotation: Any) -> bool:
    args = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _takes_none(args[0])
    return annotation in (Any, object, None) or NoneType in args or None in args


def _describe_parameters(owner: str, parameters: Sequence[Parameter], types: Sequence[Any]) -> Described:
    try:
        return describe(types)
    except Exception:
        for parameter, kind in zip(parameters, types, strict=True):
            try:
                describe([kind])
            except Exception as error:
                raise _unsupported(owner, parameter, error) from error
        raise


def _unsupported(owner: str, parameter: Parameter, error: Exception) -> InvalidDefinition:
    return InvalidDefinition(
        f"{owner}, parameter {parameter.name!r}: no model can fill {parameter.annotation!r} ({error}): {ADVICE}"
    )


def _arguments_schema(parameters: Sequence[Parameter], described: Described) -> Schema:
    properties = {}
    for parameter, schema in zip(parameters, described.schemas, strict=True):
        if text := _annotated_description(parameter.annotation) or parameter.description:
            schema["description"] = text  # also instead of what a class says of itself: this is nearer
        if parameter.default is not UNSET:
            schema.update(_shown_default(parameter.default))
        properties[parameter.name] = schema
    required = [one.name for one in parameters if one.default is UNSET]
    return tidy(
        {
            "type": "object",
            "properties": properties,
            **({"required": required} if required else {}),
            "additionalProperties": False,
        },
        described.defs,
    )


def _annotated_description(annotation: Any) -> str:
    args = get_args(annotation)
    if get_origin(annotation) is Annotated:
        texts = [_description(one) for one in reversed(args[1:])]
    elif get_origin(annotation) in (Union, UnionType):
        texts = [_annotated_description(one) for one in args]
    else:
        return ""
    return next((text for text in texts if text and isinstance(text, str)), "")


def _shown_default(default: Any) -> Schema:
    try:
        plain = to_builtins(default, str_keys=True, enc_hook=encode_foreign)
        return {"default": plain} if clean(plain) == plain else {}
    except Exception:  # any object may be a default, and a model need not see it
        return {}


# Output


class OutputCodec(NamedTuple):
    """A result type: its schema, how a model's answer becomes a value, and how a value is stored."""

    schema: Schema
    validate: Callable[[Any], Any]
    to_json: Callable[[Any], Any]

    def from_json(self, value: Any) -> Any:
        """The value that `to_json` gave. A string in it is one, and not an answer that may hold JSON."""
        is_answer = not isinstance(value, str) or self.schema.get("type") == "string"
        return self.validate(value if is_answer else msgspec.json.encode(value).decode())


_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n(.*?)\n?\s*```\s*", re.DOTALL | re.IGNORECASE)


def output_codec(kind: Any) -> OutputCodec:
    """How answers of this type are asked for, checked and stored. Raises InvalidDefinition when it has no JSON form."""
    try:
        plain = plain_type(kind)
        described = describe([plain])
        schema = tidy(described.schemas[0], described.defs)
    except Exception as error:
        raise InvalidDefinition(f"output type {kind!r} cannot be asked of a model ({error}): {ADVICE}") from error
    is_text = schema.get("type") == "string"

    def read(value: Any) -> Any:
        return convert(value, plain, strict=False, str_keys=True, dec_hook=decode_foreign)

    def validate(answer: Any) -> Any:
        """The answer, text or JSON, as a value; ValueError tells the model what to mend."""
        try:
            return _read_text(answer, read, is_text) if isinstance(answer, str) else read(answer)
        except msgspec.ValidationError as error:
            raise ValueError(explain(error)) from None

    return OutputCodec(schema, validate, _output_json)


def _read_text(answer: str, read: Callable[[Any], Any], is_text: bool) -> Any:
    """JSON, also fenced, or the bare words: first whichever the type expects."""
    if is_text:
        try:
            return read(answer)
        except msgspec.ValidationError:
            if not answer.lstrip().startswith(('"', "`")):
                raise
    fenced = _FENCED.fullmatch(answer)
    try:
        value = msgspec.json.decode(fenced[1] if fenced else answer)
    except msgspec.DecodeError as error:
        try:
            return read(answer)
        except msgspec.ValidationError:
            raise ValueError(f"the answer is not JSON ({error}): answer with one JSON value and nothing else") from None
    return read(value)


def _output_json(value: Any) -> Any:
    return clean(to_builtins(value, str_keys=True, enc_hook=encode_foreign))
