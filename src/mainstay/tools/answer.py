"""What a turn returns: an output type's schema, and a model's answer as a value of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from msgspec import convert, to_builtins

from mainstay.errors import InvalidDefinition, InvalidInput, quoted
from mainstay.model.codec import clean
from mainstay.tools.check import check, schema_fault
from mainstay.tools.schema import ADVICE, Schema, decode_foreign, describe, encode_foreign, explain, plain_type, tidy


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
_BRACKETED = re.compile(r"\{.*\}|\[.*\]", re.DOTALL)


def output_codec(kind: Any) -> OutputCodec:
    """How answers of this type are asked for, checked and stored. Raises InvalidDefinition when it has no JSON form."""
    try:
        plain = plain_type(kind)
        described = describe([plain])
        schema = tidy(described.schemas[0], described.defs)
    except Exception as error:  # a foreign type describes itself with code of its own
        raise InvalidDefinition(f"output type {quoted(kind)} cannot be asked of a model ({error}): {ADVICE}") from error
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


def schema_codec(schema: Any) -> OutputCodec:
    """The same for a schema that came without a type: values are JSON. Raises InvalidInput when it is no schema."""
    fault = schema_fault(schema)
    if fault is not None:
        raise InvalidInput(f"the schema of the output {fault}: give a JSON schema")
    is_text = schema.get("type") == "string"

    def read(value: Any) -> Any:
        problem = check(schema, value)
        if problem is not None:
            raise msgspec.ValidationError(problem)
        return value

    def validate(answer: Any) -> Any:
        try:
            return _read_text(answer, read, is_text) if isinstance(answer, str) else read(answer)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None

    return OutputCodec(schema, validate, clean)


def output_schema_of(kind: Any) -> Schema:
    """The schema of one type. Raises InvalidDefinition when it has none."""
    return output_codec(kind).schema


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
            found = _inside(answer)
            if found is None:
                raise ValueError(
                    f"the answer is not JSON ({error}): answer with one JSON value and nothing else"
                ) from None
            value = found
    return read(value)


def _inside(answer: str) -> Any:
    """The JSON in an answer that has words around it: in its last fence, else from its first bracket to its last."""
    for text in (*[fenced[1] for fenced in reversed([*_FENCED.finditer(answer)])], *_BRACKETED.findall(answer)):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            continue
    return None


def _output_json(value: Any) -> Any:
    return clean(to_builtins(value, str_keys=True, enc_hook=encode_foreign))
