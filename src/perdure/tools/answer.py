"""What a turn returns: an output type's schema, and a model's answer as a value of it, when it is whole and while it is
written.

An answer that is being written is the JSON so far, without what does not fit its schema:

    text so far     {"title": "Prin        {"title": "Printer", "tags": ["off        {"title": "Printer", "count": 1
    value so far    {"title": "Prin"}      {"title": "Printer", "tags": ["off"]}     {"title": "Printer"}

A value is JSON and never of the output type itself: required parts may be missing and texts may go on, so nothing takes
it for whole. What cannot be told from its beginning is left out until it is all there: numbers, words of an enum, texts
of a format, keys. What is complete and does not fit is left out as well.

The work is linear in the text: it is scanned once, each complete part is checked once for every level that it closes,
and a new value is made only when the text has grown by a fiftieth, so that all values together cost as much as fifty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from perdure.errors import InvalidDefinition, InvalidInput, quoted
from perdure.model.codec import clean
from perdure.tools.check import Schema, check, resolved, schema_fault
from perdure.tools.revive import ValueCodec, to_json


class OutputCodec(NamedTuple):
    """A result type: its schema, how a model's answer becomes a value, and how a value is stored and read again."""

    schema: Schema
    validate: Callable[[Any], Any]
    to_json: Callable[[Any], Any]
    from_json: Callable[[Any], Any]


# An answer may be megabytes of anything, so nothing here may look at a part of it again for each place before it.
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_BRACKET = re.compile(r"[{\[]")


def output_codec(kind: Any) -> OutputCodec:
    """How answers of this type are asked for, checked and stored. Raises InvalidDefinition when it has no JSON form."""
    try:
        codec = ValueCodec(kind)
    except InvalidDefinition as error:
        raise InvalidDefinition(f"output type {quoted(kind)} cannot be asked of a model: {error}") from error
    is_text = codec.schema.get("type") == "string"

    def validate(answer: Any) -> Any:
        """The answer, text or JSON, as a value; ValueError tells the model what to mend."""
        return _read_text(answer, codec.convert, is_text) if isinstance(answer, str) else codec.convert(answer)

    return OutputCodec(codec.schema, validate, to_json, codec.from_json)


def schema_codec(schema: Any) -> OutputCodec:
    """The same for a schema that came without a type: values are JSON. Raises InvalidInput when it is no schema."""
    fault = schema_fault(schema)
    if fault is not None:
        raise InvalidInput(f"the schema of the output {fault}: give a JSON schema")
    is_text = schema.get("type") == "string"

    def read(value: Any) -> Any:
        problem = check(schema, value)
        if problem is not None:
            raise ValueError(problem)
        return value

    def validate(answer: Any) -> Any:
        return _read_text(answer, read, is_text) if isinstance(answer, str) else read(answer)

    return OutputCodec(schema, validate, clean, read)


def output_schema_of(kind: Any) -> Schema:
    """The schema of one type. Raises InvalidDefinition when it has none."""
    return output_codec(kind).schema


def _read_text(answer: str, read: Callable[[Any], Any], is_text: bool) -> Any:
    """JSON, also fenced, or the bare words: first whichever the type expects."""
    if is_text:
        try:
            return read(answer)
        except ValueError:
            if not answer.lstrip().startswith(('"', "`")):
                raise
    fenced = _FENCED.fullmatch(answer.strip())
    try:
        value = msgspec.json.decode(fenced[1] if fenced else answer)
    except msgspec.DecodeError as error:
        try:
            return read(answer)
        except ValueError:
            found = _inside(answer)
            if found is None:
                raise ValueError(
                    f"the answer is not JSON ({error}): answer with one JSON value and nothing else"
                ) from None
            value = found
    return read(value)


def _bracketed(answer: str) -> Iterator[str]:
    """What stands from a bracket to the last one that closes its kind, from left to right."""
    last, after = {"{": answer.rfind("}"), "[": answer.rfind("]")}, 0
    for found in _BRACKET.finditer(answer):
        begin, end = found.start(), last[found[0]]
        if after <= begin < end:
            yield answer[begin : end + 1]
            after = end + 1


def _inside(answer: str) -> Any:
    """The JSON in an answer that has words around it: in its last fence, else from its first bracket to its last."""
    for text in (*[fenced[1] for fenced in reversed([*_FENCED.finditer(answer)])], *_bracketed(answer)):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            continue
    return None


# ---------------------------------------------------------------------- while it is written

GROWTH = 50
"""A new value is made when the text has grown by one part in so many."""

_STRUCTURE = re.compile(r'[{}\[\],:"\s]')
_IN_STRING = re.compile(r'["\\]')
_CLOSERS = {"{": "}", "[": "]"}


class JsonPrefix:
    """JSON that is being written. `value()` is all of it that is certain, with open brackets and texts closed."""

    def __init__(self, opening: str = '{["') -> None:
        self._pieces: list[str] = []
        self._opening = opening
        self.size = 0
        self._awaiting = "start"  # then "key" or "value", and "end" when the outermost value is complete
        self._open: list[str] = []  # the brackets that will close what is open, outermost first
        self._certain = 0  # up to here, and with the brackets closed, it is JSON
        self._string: Literal["", "key", "value"] = ""
        self._escape = 0  # characters of an escape that are to come; -1: the one that says how many
        self._escape_at = 0
        self._scalar = False

    @property
    def depth(self) -> int:
        """How many objects and lists are open."""
        return len(self._open)

    @property
    def in_text(self) -> bool:
        """Whether the last thing is a text that goes on."""
        return self._string == "value"

    def feed(self, piece: str) -> None:
        if self._awaiting == "start":
            found = next((at for at, char in enumerate(piece) if char in self._opening), None)
            if found is None:
                return  # words before it, or a fence
            piece, self._awaiting = piece[found:], "value"
        if self._awaiting == "end":
            return
        at = 0
        while at < len(piece) and self._awaiting != "end":
            at = self._text(piece, at) if self._string else self._structure(piece, at)
        self._pieces.append(piece[:at])
        self.size += at

    def _text(self, piece: str, at: int) -> int:
        if self._escape:
            if self._escape < 0:
                self._escape = 4 if piece[at] == "u" else 0
            else:
                self._escape -= 1
            return at + 1
        found = _IN_STRING.search(piece, at)
        if found is None:
            return len(piece)
        end = found.end()
        if found[0] == "\\":
            self._escape, self._escape_at = -1, self.size + end - 1
        else:
            if self._string == "value":
                self._certain = self.size + end
                self._ended()
            self._string = ""
        return end

    def _structure(self, piece: str, at: int) -> int:
        found = _STRUCTURE.search(piece, at)
        if found is None:
            self._scalar = True
            return len(piece)
        if found.start() > at:
            self._scalar = True
        if self._scalar:  # a number or a word, which ends here
            self._scalar, self._certain = False, self.size + found.start()
            self._ended()
            return found.start()
        char, end = found[0], found.end()
        if char in "{[":
            self._open.append(_CLOSERS[char])
            self._certain, self._awaiting = self.size + end, "key" if char == "{" else "value"
        elif char in "}]":
            if self._open:
                self._open.pop()
            self._certain = self.size + end
            self._ended()
        elif char == '"':
            self._string = "key" if self._awaiting == "key" else "value"
        elif char == ",":
            self._awaiting = "key" if self._open and self._open[-1] == "}" else "value"
        elif char == ":":
            self._awaiting = "value"
        return end

    def _ended(self) -> None:
        """A value is complete; the outermost one ends it all, whatever is written after it."""
        if not self._open:
            self._awaiting = "end"

    def value(self) -> Any:
        """Raises ValueError for what is no JSON, or is cut where it says nothing yet."""
        text = "".join(self._pieces)
        self._pieces = [text]
        end = self._certain
        if self.in_text:
            end = self._escape_at if self._escape else self.size
        closing = ('"' if self.in_text else "") + "".join(reversed(self._open))
        return msgspec.json.decode(text[:end] + closing)


NOTHING: Any = object()
"""Where there is no value yet. None is one."""


class PartialOutput:
    """The answer of one model call, as far as it has been written."""

    def __init__(self, schema: Schema) -> None:
        opening = {"object": "{", "array": "[", "string": '"'}.get(str(schema.get("type")), '{["')
        self._schema, self._json = schema, JsonPrefix(opening)
        self._shown, self._last = 0, NOTHING
        # By the path of an open list or object: how many of its parts were checked, and which of them do not fit.
        self._checked: dict[tuple[int, ...], tuple[int, set[int]]] = {}

    def feed(self, text: str) -> Any:
        """The value, where there is a new one; else NOTHING."""
        json = self._json
        json.feed(text)
        if json.size - self._shown <= self._shown // GROWTH:
            return NOTHING
        self._shown = json.size
        try:
            value = self._fitting(self._schema, json.value(), (), 0)
        except (ValueError, RecursionError):
            return NOTHING
        if value is NOTHING or value == self._last:
            return NOTHING
        self._last = value
        return value

    def _fitting(self, schema: Any, value: Any, path: tuple[int, ...], level: int) -> Any:
        """The part of a value that fits, or NOTHING. What is not open any more fits as a whole or not at all."""
        json = self._json
        if level < json.depth:
            return self._open_part(schema, value, path, level)
        if level == json.depth and json.in_text and isinstance(value, str):
            return value if _takes_beginnings(self._schema, schema) else NOTHING
        return value if check(schema, value, self._schema) is None else NOTHING

    def _open_part(self, schema: Any, value: Any, path: tuple[int, ...], level: int) -> Any:
        """The alternative that keeps most of what is there."""
        kept: list[Any] = []
        for number, form in enumerate(_forms(self._schema, schema)):
            kind, own = "object" if isinstance(value, dict) else "array", (*path, -1 - number)
            kinds = form.get("type", kind)
            if kind not in (kinds if isinstance(kinds, list) else [kinds]):
                continue
            fit = self._entries if kind == "object" else self._items
            kept.append(fit(form, value, own, level))
        return max(kept, key=len, default=NOTHING)

    def _entries(self, form: Schema, value: Any, path: tuple[int, ...], level: int) -> dict[str, Any]:
        properties, others = form.get("properties") or {}, form.get("additionalProperties", True)
        names = list(value)
        parts = [(properties.get(name, others), value[name]) for name in names]
        last, unfit = self._parts(parts, path, level)
        out = {name: value[name] for at, name in enumerate(names) if at not in unfit}
        if last is not NOTHING:
            out[names[-1]] = last
        return out

    def _items(self, form: Schema, value: Any, path: tuple[int, ...], level: int) -> list[Any]:
        first, others = form.get("prefixItems") or [], form.get("items", True)
        known = self._checked.get(path, (0, set()))[0]
        # Those that were checked before are not asked for their schema again.
        parts = [(first[at] if at < len(first) else others, value[at]) for at in range(known, len(value))]
        last, unfit = self._parts([(True, None)] * known + parts, path, level)
        out = [item for at, item in enumerate(value) if at not in unfit]
        if last is not NOTHING:
            out[-1] = last
        return out

    def _parts(self, parts: list[tuple[Any, Any]], path: tuple[int, ...], level: int) -> tuple[Any, set[int]]:
        """The last part as far as it fits, and the numbers of all that do not fit."""
        if not parts:
            return NOTHING, set()
        checked, unfit = self._checked.get(path, (0, set()))
        end = len(parts) - 1
        for at in range(checked, end):  # complete, since another one follows
            if check(*parts[at], self._schema) is not None:
                unfit = unfit | {at}
        self._checked[path] = (end, unfit)
        last = self._fitting(*parts[end], (*path, end), level + 1)
        return last, (unfit | {end} if last is NOTHING else unfit)


def _forms(root: Schema, schema: Any, depth: int = 0) -> list[Schema]:
    """The alternatives that a schema allows, without references."""
    if not isinstance(schema, dict):
        return [] if schema is False else [{}]
    if depth > 20:
        return []
    if "$ref" in schema:
        return _forms(root, resolved(root, schema["$ref"]), depth + 1)
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return [form for each in schema[word] for form in _forms(root, each, depth + 1)]
    return [schema]


def _takes_beginnings(root: Schema, schema: Any) -> bool:
    """Whether the beginning of a text may be shown: not where only certain texts are allowed."""
    return any(
        form.get("type", "string") in ("string", ["string", "null"])
        and not any(word in form for word in ("enum", "const", "format", "pattern"))
        for form in _forms(root, schema)
    )
