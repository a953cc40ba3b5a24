from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.tools.check import MOST_WORK, STEPS_OF_PATTERNS, check, contract_fault, matching_steps

OBJECT = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["name"],
        }
    },
}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({}, {"anything": [1]}),
        (True, 5),
        ({"type": "no such type"}, 5),
        ({"unknownKeyword": {"type": "string"}}, 5),
        (OBJECT, {"city": "Paris"}),
        (OBJECT, {"city": "Paris", "days": 7}),
        ({"type": "integer"}, 5.0),
        ({"type": ["string", "null"]}, None),
        ({"type": "number"}, 5),
        ({"enum": ["a", 1, None]}, 1.0),
        ({"const": {"a": [1]}}, {"a": [1.0]}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, 3),
        ({"allOf": [{"minimum": 1}, {"maximum": 3}]}, 2),
        ({"minimum": 3}, "not a number"),
        ({"exclusiveMinimum": True, "minimum": 3}, 3),
        ({"pattern": "^a+$"}, "aaa"),
        ({"pattern": "(unbalanced"}, "anything"),
        ({"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, [1, "a", "b"]),
        ({"items": [{"type": "integer"}], "additionalItems": False}, [1]),
        ({"patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": False}, {"x-a": 1}),
        (TREE, {"name": "root", "kids": [{"name": "leaf"}]}),
        ({"$ref": "https://example.com/schema"}, 5),
        ({"$ref": "#/$defs/missing"}, 5),
        ({"$ref": "#/allOf/0", "allOf": [{"type": "integer"}]}, 5),
        ({"properties": 5, "required": "city", "anyOf": {}, "enum": 3}, {"city": 1}),
        ({"required": [["odd"]]}, {}),
    ],
)
def test_a_value_that_fits_is_not_complained_about(schema: Any, value: Any) -> None:
    assert check(schema, value) is None


@pytest.mark.parametrize(
    ("schema", "value", "fault"),
    [
        (False, 5, "$: nothing is allowed here"),
        (OBJECT, [], "$: expected an object"),
        (OBJECT, {}, "$.city: is required"),
        (OBJECT, {"city": 5}, "$.city: expected a string"),
        (OBJECT, {"city": "Paris", "days": True}, "$.days: expected an integer"),
        (OBJECT, {"city": "Paris", "days": 1.5}, "$.days: expected an integer"),
        (OBJECT, {"city": "Paris", "days": 0}, "$.days: must be at least 1"),
        (OBJECT, {"city": "Paris", "days": 8}, "$.days: must be at most 7"),
        (OBJECT, {"city": "Paris", "town": 1}, "$.town: is not known; known: city, days"),
        (OBJECT, {"city": "Paris", "my town": 1}, '$["my town"]: is not known; known: city, days'),
        ({"type": ["string", "null"]}, 5, "$: expected a string or null"),
        ({"type": "boolean"}, 1, "$: expected true or false"),
        ({"exclusiveMinimum": 3}, 3, "$: must be more than 3"),
        ({"exclusiveMaximum": 3}, 3, "$: must be less than 3"),
        ({"enum": ["a", 1]}, True, '$: expected one of "a", 1'),
        ({"const": "x"}, "y", '$: expected "x"'),
        ({"minLength": 2}, "a", "$: must have at least 2 characters"),
        ({"maxLength": 2}, "abc", "$: must have at most 2 characters"),
        ({"pattern": "^a+$"}, "b", "$: must match the pattern ^a+$"),
        ({"minItems": 1}, [], "$: must have at least 1 items"),
        ({"maxItems": 1}, [1, 2], "$: must have at most 1 items"),
        ({"items": {"type": "string"}}, ["a", 5], "$[1]: expected a string"),
        ({"prefixItems": [{"type": "integer"}], "items": False}, [1, 2], "$[1]: nothing is allowed here"),
        ({"items": [{"type": "integer"}], "additionalItems": False}, [1, 2], "$[1]: nothing is allowed here"),
        ({"additionalProperties": {"type": "integer"}}, {"a": "x"}, "$.a: expected an integer"),
        ({"allOf": [{"minimum": 1}, {"maximum": 3}]}, 4, "$: must be at most 3"),
        (
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
            5,
            "$: fits none of the allowed forms (expected a string; expected null)",
        ),
        ({"anyOf": [{"type": "string"}]}, 5, "$: expected a string"),
        ({"oneOf": [{"type": "number"}, {"minimum": 1}]}, 5, "$: fits 2 of the allowed forms, expected exactly one"),
        (TREE, {"name": "root", "kids": [{"name": "leaf"}, {}]}, "$.kids[1].name: is required"),
        ({"definitions": {"a/b": {"type": "string"}}, "$ref": "#/definitions/a~1b"}, 5, "$: expected a string"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_path(schema: Any, value: Any, fault: str) -> None:
    assert check(schema, value) == fault


def test_a_schema_that_is_only_itself_asks_for_nothing() -> None:
    assert check({"$ref": "#"}, 5) is None
    assert check({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, 5) is None


def test_a_schema_that_doubles_at_every_level_is_checked_once_a_place() -> None:
    steps: dict[str, Any] = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    doubling = {"$defs": {**steps, "d60": {"type": "string"}}, "$ref": "#/$defs/d0"}
    nested: Any = 5
    for _ in range(60):
        nested = {"x": nested}
    deep = {"anyOf": [{"properties": {"x": {"$ref": "#"}}}, {"properties": {"x": {"$ref": "#"}}, "required": ["y"]}]}

    assert check(doubling, "text") is None
    assert "expected a string" in str(check(doubling, 5))
    assert check(deep, nested) is None


def test_a_schema_nested_beyond_reason_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(1000):
        schema = {"allOf": [schema]}

    assert check(schema, 5) == "$: nested too deeply to be checked"


def test_names_with_dots_are_not_taken_for_paths() -> None:
    schema = {
        "properties": {"a.b": {"$ref": "#/$defs/text"}, "a": {"properties": {"b": {"$ref": "#/$defs/text"}}}},
        "$defs": {"text": {"type": "string"}},
    }

    assert check(schema, {"a.b": "fine", "a": {"b": 5}}) == "$.a.b: expected a string"


def test_the_first_levels_of_json_are_deep_enough() -> None:
    value: Any = {"name": "leaf"}
    for _ in range(30):
        value = {"name": "node", "kids": [value]}

    assert check(TREE, value) is None


# ---------------------------------------------------------------------- contracts


def cyclic() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = {"again": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {},
        TREE,
        {"type": ["object", "null"]},
        {"properties": {"$ref": {"type": "string"}}},
        {"default": {"$ref": "#/nowhere"}},
        {"$ref": "https://example.com/schema.json"},
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#"}}},
    ],
    ids=["empty", "tree", "nullable", "property", "data", "elsewhere", "itself"],
)
def test_a_schema_of_an_object_is_a_contract(schema: Any) -> None:
    assert contract_fault(schema) is None


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        (None, "its input schema is a NoneType, not an object"),
        ("object", "its input schema is a str, not an object"),
        ({"type": "string"}, "its input schema is for 'string', and arguments are an object"),
        ({"type": ["string", "null"]}, "and arguments are an object"),
        ({"properties": {"a": {"enum": [object()]}}}, "its input schema is not JSON"),
        (cyclic(), "its input schema is not JSON"),
        ({"properties": {"a": {"$ref": "#/$defs/gone"}}}, "refers to '#/$defs/gone', which is not there"),
        ({"anyOf": [{"required": ["a"]}, {"$ref": "#/anyOf/7"}]}, "refers to '#/anyOf/7', which is not there"),
    ],
    ids=["nothing", "a string", "of a string", "of strings", "an object", "a cycle", "gone", "past the end"],
)
def test_what_arguments_cannot_be_held_to_is_no_contract(schema: Any, fault: str) -> None:
    assert fault in str(contract_fault(schema))


# ---------------------------------------------------------------------- schemas of strangers


@pytest.mark.parametrize(
    "pattern",
    [
        "^(a+)+$",
        "^(a|a)*$",
        "(a*)*b",
        "(?:a{0,30}){0,30}b",
        ".*.*.*.*=",
        "(?x)# [ \n(a+)+$",
        "(?i)(a+)+$",
    ],
)
def test_pattern_of_a_stranger_that_may_take_for_ever_is_not_judged(pattern: str) -> None:
    text = "a" * 2000 + "!"

    assert check({"type": "string", "pattern": pattern}, text, foreign=True) is None


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"^\d{4}-\d{2}-\d{2}$", "tomorrow"),
        (r"^[a-z0-9_-]+$", "No!"),
        (r"^(get|set)_[a-z]+$", "put_it"),
        (r"^[^@\s]+@[^@\s]+$", "nobody"),
        (r"^[]a-c]\(?$", "x"),
    ],
)
def test_pattern_of_a_stranger_that_is_quick_is_judged(pattern: str, text: str) -> None:
    assert check({"type": "string", "pattern": pattern}, text, foreign=True) == f"$: must match the pattern {pattern}"


def test_as_much_is_checked_by_the_schema_of_a_stranger_as_time_allows() -> None:
    schema = {"type": "array", "items": {"anyOf": [{"const": number} for number in range(500)]}}
    value: list[Any] = [*[0] * 50, "no", *[0] * 100_000]

    assert check(schema, value, foreign=True) is not None
    assert check(schema, [*value[51:], "no"], foreign=True) is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", ".", "[ab]", "a?", "(a|b)", "(a*)", "(?:a+)", "b*?", "(a{1,3}){2}", "a{20}"]),
            st.sampled_from(["", "", "*", "+", "{3}", "{2,9}", "?"]),
        ),
        max_size=5,
    ),
    st.integers(0, 400),
)
def test_patterns_are_matched_in_no_more_steps_than_were_counted(parts: list[tuple[str, str]], length: int) -> None:
    pattern = "".join([atom + times for atom, times in parts]) + "c"
    text = "ab" * length
    if matching_steps(pattern, len(text)) <= MOST_WORK * STEPS_OF_PATTERNS:
        try:
            compiled = re.compile(pattern)
        except re.error:  # such as `a?+`, which is another thing
            return
        began = time.thread_time()
        compiled.search(text)

        assert time.thread_time() - began < 1
