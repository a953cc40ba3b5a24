"""JSON schemas as each API takes them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from perdure.providers.schemas import (
    ANTHROPIC_NATIVE,
    ANY,
    GOOGLE,
    OPENAI_STRICT,
    Remembered,
    SchemaRules,
    Untranslatable,
    tool_schema,
    translated,
    wrapped,
)

STREET = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
CLOSED = {**STREET, "additionalProperties": False}
TREE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]}},
    "required": ["value", "next"],
}


@pytest.mark.parametrize("rules", [OPENAI_STRICT, ANTHROPIC_NATIVE])
def test_objects_are_closed_where_the_api_wants_it(rules: SchemaRules) -> None:
    schema = {"type": "object", "properties": {"at": STREET}, "required": ["at"]}

    assert translated(schema, rules) == {**schema, "properties": {"at": CLOSED}, "additionalProperties": False}


@pytest.mark.parametrize("rules", [OPENAI_STRICT, ANTHROPIC_NATIVE, GOOGLE])
def test_definitions_are_written_out_where_they_are_used(rules: SchemaRules) -> None:
    reference = {"$ref": "#/$defs/Street", "description": "Where it begins."}
    schema = {
        "type": "object",
        "properties": {"a": reference, "b": {"$ref": "#/$defs/Street"}},
        "required": ["a", "b"],
        "$defs": {"Street": STREET},
    }

    found = translated(schema, rules)

    assert "$defs" not in found
    assert found["properties"]["a"]["description"] == "Where it begins."
    assert found["properties"]["b"]["properties"] == {"name": {"type": "string"}}


def test_a_definition_that_refers_to_itself_stays_one_where_the_api_takes_it() -> None:
    schema = {**TREE, "$defs": {"Tree": TREE}}

    assert translated(schema, OPENAI_STRICT)["$defs"]["Tree"]["additionalProperties"] is False
    assert translated(schema, GOOGLE)["$defs"]["Tree"] == TREE


@pytest.mark.parametrize(
    ("rules", "keyword", "value"),
    [
        (OPENAI_STRICT, "minLength", 3),
        (ANTHROPIC_NATIVE, "minLength", 3),
        (ANTHROPIC_NATIVE, "pattern", "[a-z]+"),
        (GOOGLE, "pattern", "[a-z]+"),
        (OPENAI_STRICT, "format", "uri"),
        (GOOGLE, "format", "uuid"),
    ],
)
def test_a_limit_that_the_api_does_not_know_is_said_in_words(rules: SchemaRules, keyword: str, value: Any) -> None:
    found = translated({"type": "string", "description": "A word.", keyword: value, "title": "T"}, rules)

    assert set(found) == {"type", "description"}
    assert found["description"].startswith(f"A word. ({keyword}: ")


def test_alternatives_and_constants_are_spelled_as_the_api_knows_them() -> None:
    schema = {"oneOf": [{"type": "string", "const": "a"}, {"type": "integer"}]}

    assert translated(schema, GOOGLE) == {"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "integer"}]}
    assert translated({"allOf": [STREET], "description": "x"}, OPENAI_STRICT) == {**CLOSED, "description": "x"}


@pytest.mark.parametrize(
    ("rules", "schema", "place"),
    [
        (
            OPENAI_STRICT,
            {"type": "object", "properties": {"a": STREET, "b": {"type": "string"}}, "required": ["a"]},
            "b",
        ),
        (ANTHROPIC_NATIVE, {"type": "array", "items": {"type": "object"}}, "$.items"),
        (ANTHROPIC_NATIVE, {"type": "object", "properties": {"x": {}}}, "$.properties.x"),
        (ANTHROPIC_NATIVE, {"anyOf": [{"type": "null"}, {"type": "object", "additionalProperties": {}}]}, "$.anyOf[1]"),
        (ANTHROPIC_NATIVE, {**TREE, "$defs": {"Tree": TREE}}, "$.properties.next.anyOf[0].$ref"),
        (OPENAI_STRICT, {"type": "array", "prefixItems": [{"type": "string"}]}, "$.prefixItems"),
        (GOOGLE, {"type": "object", "patternProperties": {"a": {}}}, "$.patternProperties"),
        (GOOGLE, {"$ref": "#/$defs/Missing"}, "$.$ref"),
    ],
)
def test_what_has_no_other_form_is_named_by_its_place(rules: SchemaRules, schema: dict[str, Any], place: str) -> None:
    with pytest.raises(Untranslatable) as caught:
        translated(schema, rules)
    assert place in caught.value.place


def test_a_value_that_is_no_object_is_put_into_one_with_its_definitions_at_the_root() -> None:
    schema = {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "$defs": {"Tree": TREE}}

    found = wrapped(schema)

    assert found["properties"]["answer"] == {"type": "array", "items": {"$ref": "#/$defs/Tree"}}
    assert found["$defs"] == {"Tree": TREE}
    assert translated(found, OPENAI_STRICT)["required"] == ["answer"]


def test_arguments_with_alternatives_at_the_root_become_one_object() -> None:
    schema = {
        "oneOf": [
            {
                "type": "object",
                "properties": {"id": {"type": "integer"}, "by": {"type": "string"}},
                "required": ["id", "by"],
            },
            {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
        ],
        "description": "One of two.",
    }

    assert tool_schema(schema, ANY) == {
        "type": "object",
        "properties": {"id": {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "by": {"type": "string"}},
        "required": ["id"],
        "description": "One of two.",
    }


@pytest.mark.parametrize("schema", [{"type": "array"}, {"anyOf": [{"type": "string"}]}, {"$ref": "#/$defs/x"}])
def test_arguments_that_are_no_object_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(Untranslatable, match="object"):
        tool_schema(schema, ANY)


def test_translating_leaves_the_schema_as_it_was() -> None:
    schema = {**TREE, "$defs": {"Tree": TREE}, "title": "T"}
    before = repr(schema)

    translated(schema, OPENAI_STRICT)
    translated(schema, GOOGLE)

    assert repr(schema) == before


@pytest.mark.parametrize("rules", [OPENAI_STRICT, ANTHROPIC_NATIVE, GOOGLE])
def test_definitions_that_double_with_every_level_do_not_grow_without_bound(rules: SchemaRules) -> None:
    levels = 40
    defs: dict[str, Any] = {
        f"D{level}": {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/D{level + 1}"}, "b": {"$ref": f"#/$defs/D{level + 1}"}},
            "required": ["a", "b"],
        }
        for level in range(levels)
    }
    defs[f"D{levels}"] = {"type": "string"}

    found = translated({"$ref": "#/$defs/D0", "$defs": defs}, rules)

    assert len(msgspec.json.encode(found)) < 2_000_000
    assert found["properties"]["a"]["type"] == "object", "written out as far as that is possible"
    assert found["$defs"]["D39"]["properties"]["a"] == {"$ref": "#/$defs/D40"}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": 5},
        {"allOf": [True]},
        {"type": "object", "properties": 5},
        {"type": "string", "format": [1]},
        {"type": "string", "description": 5, "minLength": 1},
        {"$ref": "#/$defs/A", "$defs": {"A": True}},
        {"$ref": "#/$defs/A", "$defs": 5},
        {"$ref": "#/$defs/A", "$defs": ["A"]},
    ],
)
def test_what_is_no_schema_is_refused_as_one_that_cannot_be_taken(schema: dict[str, Any]) -> None:
    take = Remembered(lambda given: translated(given, OPENAI_STRICT))

    with pytest.raises(Untranslatable, match="no JSON schema"):
        take(schema)


def test_a_schema_without_end_is_refused_as_one_that_cannot_be_taken() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(5_000):
        schema = {"type": "array", "items": schema}

    with pytest.raises(Untranslatable, match="nested too deeply"):
        Remembered(lambda given: translated(given, OPENAI_STRICT))(schema)
