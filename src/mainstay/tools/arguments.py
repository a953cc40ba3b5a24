"""The arguments of a tool: their schema from the signature, and a model's JSON as keyword arguments."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import msgspec
from msgspec import UNSET, convert, to_builtins
from msgspec.structs import asdict

from mainstay.errors import InvalidDefinition
from mainstay.model.codec import clean
from mainstay.tools.schema import (
    ADVICE,
    Described,
    Schema,
    decode_foreign,
    describe,
    description_in,
    encode_foreign,
    explain,
    plain_type,
    tidy,
)

_SCALARS = (str, int, float, bool, NoneType)


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
    except Exception as error:  # a foreign type may raise anything when it is looked at
        raise _unsupported(owner, parameter, error) from error


def _takes_none(annotation: Any) -> bool:
    args = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _takes_none(args[0])
    return annotation in (Any, object, None) or NoneType in args or None in args


def _describe_parameters(owner: str, parameters: Sequence[Parameter], types: Sequence[Any]) -> Described:
    try:
        return describe(types)
    except Exception:  # all at once says not which one it was: ask one by one, to name it
        for parameter, kind in zip(parameters, types, strict=True):
            try:
                describe([kind])
            except Exception as error:  # a foreign type may raise anything when it describes itself
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
        texts = [description_in(one) for one in reversed(args[1:])]
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
