"""A small JSON Schema checker, for tools that come with a schema and no type.

It knows the keywords that tools use, ignores the others, and answers with one sentence for the model. The schema is as
foreign as the value: whatever is in it, a check ends, and soon.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import msgspec

from perdure.model.codec import clean, error_text

Schema: TypeAlias = dict[str, Any]

MAX_CHECK_DEPTH = 200
MOST_WORK = 50_000
"""Parts of a value that are looked at by a schema of a stranger."""
STEPS_OF_PATTERNS = 200
"""Steps of a regular expression that cost as much as a part."""
LONGEST_PATTERN = 1000
_DATA = ("default", "const", "enum", "examples")
_EXPECTED = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def contract_fault(schema: object) -> str | None:
    """Why a schema cannot be the contract of a tool's arguments, or None: it is JSON, and describes an object."""
    fault = schema_fault(schema)
    if fault is not None or not isinstance(schema, dict):
        return f"its input schema {fault}"
    kind = schema.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        return f"its input schema is for {kind!r:.80}, and arguments are an object"
    return None


def schema_fault(schema: object) -> str | None:
    """Why something cannot be used as a schema, or None: it is JSON, and refers to nothing that is not there."""
    if not isinstance(schema, dict):
        return f"is a {type(schema).__name__}, not an object"
    try:
        clean(schema)
    except Exception as error:  # whatever is in it
        return f"is not JSON ({error_text(error)})"
    lost = _lost_ref(schema, _Checker(schema))
    return None if lost is None else f"refers to {lost!r:.80}, which is not there"


def _lost_ref(node: Any, checker: _Checker) -> str | None:
    """The first reference to a place of the schema itself that does not exist."""
    if isinstance(node, dict):
        ref = node.get("$ref")
        if isinstance(ref, str) and ref.startswith("#") and checker.resolve(ref) is None:
            return ref
        inside = [one for key, one in node.items() if key not in _DATA]
    else:
        inside = node if isinstance(node, list) else []
    return next((lost for one in inside if (lost := _lost_ref(one, checker)) is not None), None)


def check(schema: Any, value: Any, root: Any = None, *, foreign: bool = False) -> str | None:
    """What is wrong with `value`, with its path, or None. Keywords that are not known are ignored.

    `root` is the schema that references are looked up in, where `schema` is a part of it. The schema of a stranger
    (`foreign`) is checked as far as `MOST_WORK` goes: it holds the event loop, and what is left is not judged.
    """
    return _Checker(schema if root is None else root, MOST_WORK if foreign else None).check(schema, value, "$", 0)


def resolved(root: Any, ref: str) -> Any:
    """What a reference inside a schema points at, or None."""
    return _Checker(root).resolve(ref)


class _Checker:
    """One check. Refs are remembered by place, so that schemas which refer to themselves end and never explode."""

    __slots__ = ("_left", "_met", "_root")

    def __init__(self, root: Any, work: int | None = None) -> None:
        self._root = root
        self._left = work  # None has no end
        self._met: dict[tuple[str, str], str | None] = {}

    def check(self, schema: Any, value: Any, path: str, depth: int) -> str | None:
        if schema is False:
            return f"{path}: nothing is allowed here"
        if not isinstance(schema, dict) or not self._affords(1):
            return None
        if depth > MAX_CHECK_DEPTH:
            return f"{path}: nested too deeply to be checked"
        for rule in (_check_type, _check_value, _check_number, self._string):
            if fault := rule(schema, value):
                return f"{path}: {fault}"
        for look in (self._ref, self._forms, self._object, self._array):
            if fault := look(schema, value, path, depth + 1):
                return fault
        return None

    def _affords(self, work: float) -> bool:
        """Whether so much more may be done; it is counted."""
        if self._left is None:
            return True
        if work > self._left:
            return False
        self._left -= int(work)
        return True

    def _matches(self, pattern: str, text: str) -> bool:
        """Whether a pattern is found in a text; true where it is not judged."""
        if self._left is not None and (
            len(pattern) > LONGEST_PATTERN
            or not self._affords(1 + matching_steps(pattern, len(text)) / STEPS_OF_PATTERNS)
        ):
            return True
        try:
            return re.search(pattern, text) is not None
        except (re.error, OverflowError, RecursionError):  # another dialect: what we cannot read we do not judge
            return True

    def _string(self, schema: Schema, value: Any) -> str | None:
        if not isinstance(value, str):
            return None
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and not self._matches(pattern, value):
            return f"must match the pattern {pattern}"
        return _check_length(schema, len(value), "Length", "characters")

    def _ref(self, schema: Schema, value: Any, path: str, depth: int) -> str | None:
        ref = schema.get("$ref")
        if not isinstance(ref, str) or not ref.startswith("#"):
            return None
        key = (ref, path)
        if key not in self._met:
            self._met[key] = None  # met again at the same place it says nothing new
            self._met[key] = self.check(self.resolve(ref), value, path, depth)
        return self._met[key]

    def resolve(self, ref: str) -> Any:
        """What a reference points at, or None."""
        node = self._root
        for step in ref[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                node = node.get(name)
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            else:
                return None
        return node

    def _forms(self, schema: Schema, value: Any, path: str, depth: int) -> str | None:
        for one in _list(schema, "allOf"):
            if fault := self.check(one, value, path, depth):
                return fault
        for keyword in ("anyOf", "oneOf"):
            forms = _list(schema, keyword)
            faults = [self.check(form, value, path, depth) for form in forms]
            fits = faults.count(None)
            if forms and not fits:
                told = "; ".join(dict.fromkeys(str(fault).removeprefix(f"{path}: ") for fault in faults))
                return f"{path}: fits none of the allowed forms ({told})" if len(forms) > 1 else faults[0]
            if keyword == "oneOf" and fits > 1:
                return f"{path}: fits {fits} of the allowed forms, expected exactly one"
        return None

    def _object(self, schema: Schema, value: Any, path: str, depth: int) -> str | None:
        if not isinstance(value, dict):
            return None
        for name in _list(schema, "required"):
            if isinstance(name, str) and name not in value:
                return f"{_child(path, name)}: is required"
        properties, patterns = _dict(schema, "properties"), _dict(schema, "patternProperties")
        for name, item in value.items():
            rules = [properties[name]] if name in properties else []
            rules += [rule for pattern, rule in patterns.items() if self._matches(pattern, name)]
            if not rules and schema.get("additionalProperties") is False:
                return f"{_child(path, name)}: is not known; known: {', '.join(properties) or 'none'}"
            for rule in rules or [schema.get("additionalProperties")]:
                if fault := self.check(rule, item, _child(path, name), depth):
                    return fault
        return None

    def _array(self, schema: Schema, value: Any, path: str, depth: int) -> str | None:
        if not isinstance(value, list):
            return None
        if fault := _check_length(schema, len(value), "Items", "items"):
            return f"{path}: {fault}"
        # Before 2020 a list under `items` meant what `prefixItems` means now.
        old = isinstance(schema.get("items"), list)
        first = _list(schema, "items" if old else "prefixItems")
        rest = schema.get("additionalItems" if old else "items")
        for at, item in enumerate(value):
            if fault := self.check(first[at] if at < len(first) else rest, item, f"{path}[{at}]", depth):
                return fault
        return None


def _check_type(schema: Schema, value: Any) -> str | None:
    types = schema.get("type")
    names = [types] if isinstance(types, str) else [one for one in _list(schema, "type") if isinstance(one, str)]
    if not names or any(_is_type(name, value) for name in names):
        return None
    return f"expected {' or '.join(_EXPECTED[name] for name in names)}"


def _is_type(name: str, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match name:
        case "string":
            return isinstance(value, str)
        case "integer":
            return number and value == value // 1
        case "number":
            return number
        case "boolean":
            return isinstance(value, bool)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
        case "null":
            return value is None
        case _:
            return True  # not a type of JSON Schema: ignored like any unknown keyword


def _check_value(schema: Schema, value: Any) -> str | None:
    if "const" in schema and not _same(schema["const"], value):
        return f"expected {_shown(schema['const'])}"
    allowed = schema.get("enum")
    if isinstance(allowed, list) and not any(_same(one, value) for one in allowed):
        return f"expected one of {', '.join(_shown(one) for one in allowed)}"
    return None


_BOUNDS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("minimum", operator.ge, "at least"),
    ("maximum", operator.le, "at most"),
    ("exclusiveMinimum", operator.gt, "more than"),
    ("exclusiveMaximum", operator.lt, "less than"),
)


def _check_number(schema: Schema, value: Any) -> str | None:
    if not _is_type("number", value):
        return None
    for keyword, holds, words in _BOUNDS:
        bound = schema.get(keyword)
        if _is_type("number", bound) and not holds(value, bound):
            return f"must be {words} {bound}"
    return None


def _check_length(schema: Schema, length: int, suffix: str, words: str) -> str | None:
    least, most = schema.get(f"min{suffix}"), schema.get(f"max{suffix}")
    if _is_type("number", least) and length < cast("float", least):
        return f"must have at least {least} {words}"
    if _is_type("number", most) and length > cast("float", most):
        return f"must have at most {most} {words}"
    return None


_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_TIMES = re.compile(r"\{(\d*)(,?)(\d*)\}")
_GROUP = re.compile(r"\((?:\?(?::|=|!|<=|<!|P?<\w+>))?")


def matching_steps(pattern: str, length: int) -> float:  # noqa: C901, PLR0915  # one pass over the signs of a pattern
    """At most so many steps a search for `pattern` takes in a text of this length; infinity where that is not known.

    A group multiplies the ways to match its parts and adds those of its alternatives; a repetition chooses how often,
    and each time a way. That counts too many for most patterns, and too few for none. Each way reads as many signs
    besides as there are `atoms`, at least so many `times` each.
    """
    atoms, times = 1, 1.0
    ways, other = 1.0, 0.0  # of what is read of this alternative, and of those before it in the group
    last = 1.0  # of what a repetition would repeat
    open_groups: list[tuple[float, float]] = []
    at = 0
    while at < len(pattern):
        sign, begin = pattern[at], at
        at += 1
        least, most = 1, 1
        if sign == "\\":
            at += 1
        elif sign == "[":
            found = _CLASS.match(pattern, begin)
            if found is None:
                return math.inf
            at = found.end()
        elif sign == "(":
            found = _GROUP.match(pattern, begin)
            assert found is not None
            if found[0] == "(" and pattern.startswith("?", at):
                return math.inf  # flags, conditions and comments change how the rest is read
            open_groups.append((ways, other))
            ways, other, at = 1.0, 0.0, found.end()
            continue
        elif sign == ")":
            if not open_groups:
                return math.inf
            last = ways + other
            before, other = open_groups.pop()
            ways = before * last
            if not math.isfinite(ways):
                return math.inf
            continue
        elif sign == "|":
            ways, other = 1.0, other + ways
            last = 1.0
            continue
        elif sign in "*+?" or (sign == "{" and _TIMES.match(pattern, begin)):
            if sign == "{":
                braces = _TIMES.match(pattern, begin)
                assert braces is not None
                at = braces.end()
                least = int(braces[1] or 0)
                most = least if not braces[2] else int(braces[3]) if braces[3] else length
            else:
                least, most = (1 if sign == "+" else 0), (1 if sign == "?" else length)
            if pattern[at : at + 1] in ("?", "+"):
                at += 1
            times, most = times * max(least, 1), min(most, length)
            try:
                repeated = (max(most - least, 0) + 1) * last ** max(most, 1)
                ways = ways / last * repeated
            except OverflowError:
                return math.inf
            if not math.isfinite(ways + times):
                return math.inf
            last = repeated
            continue
        last, atoms = 1.0, atoms + 1
    steps = (length + 1.0) * (ways + other) * min(atoms * times, length + 1.0)
    return steps if not open_groups and math.isfinite(steps) else math.inf


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is 1.0, but not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _child(path: str, name: str) -> str:
    return f"{path}.{name}" if name.isidentifier() else f"{path}[{_shown(name)}]"


def _list(schema: Schema, keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def _dict(schema: Schema, keyword: str) -> dict[str, Any]:
    found = schema.get(keyword)
    return found if isinstance(found, dict) else {}
