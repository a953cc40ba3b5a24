from __future__ import annotations

import collections.abc
import datetime
import decimal
import enum
import pathlib
import re
import uuid
from dataclasses import dataclass, field
from typing import (  # noqa: UP035
    Annotated,
    Any,
    Generic,
    Iterable,
    List,
    Literal,
    NamedTuple,
    Optional,
    TypedDict,
    TypeVar,
    Union,
)

import msgspec
import pydantic
import pytest
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import InvalidDefinition
from perdure.tools.answer import output_codec, output_schema_of
from perdure.tools.define import Arguments, Parameter

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Point:
    x: int
    y: int = 0


@dataclass
class Labelled:
    x: int
    label: str = ""


class Place(TypedDict):
    """Somewhere."""

    city: str


class Pair(NamedTuple):
    left: int
    right: str


class Book(msgspec.Struct):
    title: str
    pages: int = 1


class Cat(msgspec.Struct, tag="cat"):
    name: str


class Dog(msgspec.Struct, tag="dog"):
    name: str


class Tree(msgspec.Struct):
    value: int
    kids: list[Tree] = []


class Street(pydantic.BaseModel):
    """A street."""

    name: str
    number: int = pydantic.Field(ge=1, description="House number")


class Person(pydantic.BaseModel):
    title: str
    home: Street
    work: Street | None = None


class Family(pydantic.BaseModel):
    name: str
    parts: list[Family] = []


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    day: datetime.date


class Renamed(pydantic.BaseModel):
    long_name: int = pydantic.Field(alias="n")


class Numbers(pydantic.RootModel[list[int]]):
    pass


class Page(pydantic.BaseModel, Generic[T]):
    items: list[T]


@dataclass
class Owner:
    who: Person
    point: Point = field(default_factory=lambda: Point(1))


class ByMethods:
    """Not Pydantic, but with its two methods."""

    def __init__(self, value: int) -> None:
        self.value = value

    @classmethod
    def model_validate(cls, value: Any) -> ByMethods:
        if not isinstance(value, int):
            raise ValueError("Expected a number")
        return cls(value)

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "integer", "title": "ByMethods"}


Choice = typing_extensions.TypeAliasType("Choice", Point | Labelled)


def one(annotation: Any, **more: Any) -> Arguments:
    return Arguments("tool 'f'", [Parameter("x", annotation, **more)])


def schema_of(annotation: Any, **more: Any) -> Any:
    schema = one(annotation, **more).schema
    return {**schema["properties"]["x"], **{key: schema[key] for key in ("$defs",) if key in schema}}


def bound(annotation: Any, value: Any) -> Any:
    return one(annotation).bind({"x": value})["x"]


STREET = {
    "type": "object",
    "description": "A street.",
    "properties": {
        "name": {"type": "string"},
        "number": {"type": "integer", "minimum": 1, "description": "House number"},
    },
    "required": ["name", "number"],
}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}},
    "required": ["x"],
}


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (None, {"type": "null"}),
        (Any, {}),
        (object, {}),
        (list, {"type": "array"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (List[int], {"type": "array", "items": {"type": "integer"}}),  # noqa: UP006
        (Iterable[int], {"type": "array", "items": {"type": "integer"}}),
        (collections.abc.Iterable, {"type": "array"}),
        (collections.abc.Sequence[int], {"type": "array", "items": {"type": "integer"}}),
        (set[str], {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045
        (Union[int, str], {"anyOf": [{"type": "integer"}, {"type": "string"}]}),  # noqa: UP007
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal["a", None], {"enum": [None, "a"]}),
        (Color, {"type": "string", "enum": ["blue", "red"]}),
        (Level, {"type": "integer", "enum": [1, 2]}),
        (Point, POINT),
        (list[Point], {"type": "array", "items": POINT}),
        (
            Place,
            {
                "type": "object",
                "description": "Somewhere.",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        ),
        (
            Book,
            {
                "type": "object",
                "properties": {"title": {"type": "string"}, "pages": {"type": "integer", "default": 1}},
                "required": ["title"],
            },
        ),
        (Street, STREET),
        (datetime.datetime, {"type": "string", "format": "date-time"}),
        (list[datetime.datetime], {"type": "array", "items": {"type": "string", "format": "date-time"}}),
        (datetime.date, {"type": "string", "format": "date"}),
        (datetime.time, {"type": "string", "format": "time"}),
        (uuid.UUID, {"type": "string", "format": "uuid"}),
        (decimal.Decimal, {"type": "string", "format": "decimal"}),
        (bytes, {"type": "string", "contentEncoding": "base64"}),
        (pathlib.Path, {"type": "string"}),
        (ByMethods, {"type": "integer"}),
        (Annotated[str, "A city"], {"type": "string", "description": "A city"}),
        (
            Annotated[str, "A city"] | None,
            {"anyOf": [{"type": "string", "description": "A city"}, {"type": "null"}], "description": "A city"},
        ),
        (
            Annotated[int, msgspec.Meta(ge=1, description="Days")],
            {"type": "integer", "minimum": 1, "description": "Days"},
        ),
        (
            Annotated[int, pydantic.Field(ge=1, description="Days")],
            {"type": "integer", "minimum": 1, "description": "Days"},
        ),
        (
            Annotated[str, pydantic.Field(pattern="^a", max_length=3)],
            {"type": "string", "pattern": "^a", "maxLength": 3},
        ),
        (Annotated[str, pydantic.Field(pattern=re.compile("^a"))], {"type": "string", "pattern": "^a"}),
        (Annotated[int | None, pydantic.Field(ge=1)], {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}),
        (Annotated[Color, "Of the sky"], {"type": "string", "enum": ["blue", "red"], "description": "Of the sky"}),
        (Annotated[Street, "Where to"], {**STREET, "description": "Where to"}),
        (
            Point | Labelled,
            {
                "anyOf": [
                    POINT,
                    {
                        "type": "object",
                        "properties": {"x": {"type": "integer"}, "label": {"type": "string", "default": ""}},
                        "required": ["x"],
                    },
                ]
            },
        ),
        (datetime.date | str, {"anyOf": [{"type": "string", "format": "date"}, {"type": "string"}]}),
        (Street | None, {"anyOf": [STREET, {"type": "null"}]}),
    ],
    ids=repr,
)
def test_a_type_has_a_plain_schema(annotation: Any, schema: dict[str, Any]) -> None:
    assert schema_of(annotation) == schema


@pytest.mark.parametrize(
    ("annotation", "given", "value"),
    [
        (int, "5", 5),
        (int, 5.0, 5),
        (float, "1.5", 1.5),
        (bool, "true", True),
        (int | None, "null", None),
        (str | None, "null", "null"),
        (str | int, "5", "5"),
        (list[int], ["1", 2], [1, 2]),
        (dict[int, str], {"1": "a"}, {1: "a"}),
        (set[int], [1, 1], {1}),
        (tuple[int, str], [1, "a"], (1, "a")),
        (Iterable[int], [1], [1]),
        (Color, "red", Color.RED),
        (Level, "2", Level.HIGH),
        (Point, {"x": "1"}, Point(1)),
        (Place, {"city": "Rome"}, {"city": "Rome"}),
        (Pair, [1, "a"], Pair(1, "a")),
        (Book, {"title": "T"}, Book("T")),
        (Cat | Dog, {"type": "dog", "name": "Rex"}, Dog("Rex")),
        (Tree, {"value": 1, "kids": [{"value": 2}]}, Tree(1, [Tree(2)])),
        (Street, {"name": "A", "number": "3"}, Street(name="A", number=3)),
        (list[Street], [{"name": "A", "number": 3}], [Street(name="A", number=3)]),
        (Strict, {"day": "2025-01-02"}, Strict(day=datetime.date(2025, 1, 2))),
        (Renamed, {"n": 3}, Renamed(n=3)),
        (
            Owner,
            {"who": {"title": "Dr", "home": {"name": "A", "number": 1}}},
            Owner(Person(title="Dr", home=Street(name="A", number=1))),
        ),
        (datetime.datetime, "2025-01-02T03:04:05Z", datetime.datetime(2025, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)),
        (uuid.UUID, "00000000-0000-0000-0000-000000000001", uuid.UUID(int=1)),
        (decimal.Decimal, "1.10", decimal.Decimal("1.10")),
        (bytes, "aGk=", b"hi"),
        (pathlib.Path, "/tmp", pathlib.Path("/tmp")),
        (Point | Labelled, {"x": 1, "label": "a"}, Labelled(1, "a")),
        (Point | Labelled, {"x": 1, "y": 2}, Point(1, 2)),
        (Point | Labelled | None, None, None),
        (list[int] | list[str], ["1"], ["1"]),
        (list[int] | set[str], ["1", 2], [1, 2]),
        (Choice, {"x": 1, "label": "a"}, Labelled(1, "a")),
        (Numbers, [1, "2"], Numbers([1, 2])),
        (Page[int], {"items": ["1"]}, Page[int](items=[1])),
        (Street | str, "Main Street", "Main Street"),
        (Street | str, {"name": "A", "number": 3}, Street(name="A", number=3)),
        (datetime.date | str, "2025-01-02", datetime.date(2025, 1, 2)),
        (datetime.date | str, "tomorrow", "tomorrow"),
        (list[Point | Labelled], [{"x": 1, "label": "a"}, {"x": 2}], [Labelled(1, "a"), Point(2)]),
        (Any, {"a": [1]}, {"a": [1]}),
    ],
    ids=repr,
)
def test_json_becomes_a_value_of_the_type(annotation: Any, given: Any, value: Any) -> None:
    result = bound(annotation, given)

    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("annotation", "given", "fault"),
    [
        (int, "five", "$.x: expected int, got str"),
        (str, 5, "$.x: expected str, got int"),
        (list[int], [1, "a"], "$.x[1]: expected int, got str"),
        (Literal["a", "b"], "c", "$.x: invalid enum value 'c'"),
        (Point, {"y": 1}, "$.x: object missing required field x"),
        (Annotated[int, pydantic.Field(ge=1)], 0, "$.x: expected int >= 1"),
        (Street, {"name": 5}, "$.x.name: Input should be a valid string\n$.x.number: Field required"),
        (list[Street], [{"name": "A", "number": 0}], "$.x[0].number: Input should be greater than or equal to 1"),
        (Person, {"title": "Dr", "home": {"name": "A"}}, "$.x.home.number: Field required"),
        (Owner, {"who": {"title": "Dr"}}, "$.x.who.home: Field required"),
        (ByMethods, "a", "$.x: expected a number"),
        (pathlib.Path, 5, "$.x: expected a path as a string"),
        (Point | Street, 5, "$.x: fits none of the allowed forms ($: expected object, got int; "),
    ],
    ids=repr,
)
def test_what_does_not_fit_is_named_with_its_path(annotation: Any, given: Any, fault: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is compared below
        bound(annotation, given)

    assert str(raised.value).startswith(fault)


def test_missing_and_unknown_arguments_are_named() -> None:
    arguments = Arguments("tool 'f'", [Parameter("city", str), Parameter("days", int, 3)])

    with pytest.raises(ValueError, match=r"^\$: object missing required field city$"):
        arguments.bind({})
    with pytest.raises(ValueError, match=r"^\$: object contains unknown field town; known: city, days$"):
        arguments.bind({"city": "Rome", "town": 1})
    with pytest.raises(ValueError, match=r"^\$: expected object, got array$"):
        arguments.bind([])


def test_the_schema_of_arguments_is_a_closed_object() -> None:
    arguments = Arguments("tool 'f'", [Parameter("city", str, description="Where"), Parameter("days", int, 3)])

    assert arguments.schema == {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Where"}, "days": {"type": "integer", "default": 3}},
        "required": ["city"],
        "additionalProperties": False,
    }


def test_the_description_of_a_parameter_is_nearer_than_that_of_its_class() -> None:
    assert schema_of(Street, description="Where to")["description"] == "Where to"


def test_the_description_in_an_annotation_is_nearer_than_the_docstring() -> None:
    assert schema_of(Annotated[str, "Here"], description="There")["description"] == "Here"


def test_no_arguments_are_an_empty_object() -> None:
    arguments = Arguments("tool 'f'", [])

    assert arguments.schema == {"type": "object", "properties": {}, "additionalProperties": False}
    assert arguments.bind({}) == {}


@pytest.mark.parametrize(
    ("annotation", "default", "shown"),
    [
        (int, 3, 3),
        (Color, Color.RED, "red"),
        (Point, Point(1, 2), {"x": 1, "y": 2}),
        (Street, Street(name="A", number=1), {"name": "A", "number": 1}),
        (pathlib.Path, pathlib.Path("a"), "a"),
        (bytes, b"hi", "aGk="),
        (list[int], [1], [1]),
        (str | None, None, None),
    ],
    ids=repr,
)
def test_a_default_is_shown_as_json(annotation: Any, default: Any, shown: Any) -> None:
    assert schema_of(annotation, default=default)["default"] == shown


@pytest.mark.parametrize("default", [object(), float("nan"), print], ids=["object", "nan", "function"])
def test_a_default_that_is_not_json_is_not_shown(default: Any) -> None:
    arguments = one(Any, default=default)

    assert "default" not in arguments.schema["properties"]["x"]
    assert arguments.bind({}) == {}


def test_a_default_of_none_allows_null() -> None:
    arguments = one(str, default=None)

    assert arguments.schema["properties"]["x"] == {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
    assert arguments.bind({"x": None}) == {"x": None}


@pytest.mark.parametrize("annotation", [int | None, Annotated[int | None, "Days"], Any, None], ids=repr)
def test_null_is_allowed_once(annotation: Any) -> None:
    forms = schema_of(annotation, default=None).get("anyOf", [])

    assert [form["type"] for form in forms] in ([], ["integer", "null"])


def test_omitted_arguments_are_left_to_the_function() -> None:
    arguments = Arguments("tool 'f'", [Parameter("a", int), Parameter("b", list[int], [1])])

    assert arguments.bind({"a": 1}) == {"a": 1}


@pytest.mark.parametrize("annotation", [Any, dict, list[Any], dict[str, Any], Place | None, Family], ids=repr)
def test_bound_values_share_nothing_with_the_arguments(annotation: Any) -> None:
    """A tool may change what it is given; a later attempt of the same call must not see that."""
    values = {"a": [[1]], "city": "Rome", "name": "x", "parts": []}
    args = {"x": [values] if annotation == list[Any] else values}

    result = one(annotation).bind(args)["x"]
    for part in (result, result[0] if isinstance(result, list) else result):
        if isinstance(part, dict) and "a" in part:
            part["a"][0].append(2)
            part["more"] = 1

    assert values == {"a": [[1]], "city": "Rome", "name": "x", "parts": []}


def test_a_model_used_twice_is_defined_once_at_the_root() -> None:
    schema = schema_of(Person)

    assert schema["$defs"] == {"Street": STREET}
    assert schema["properties"]["home"] == {"$ref": "#/$defs/Street"}
    assert schema["properties"]["work"] == {"anyOf": [{"$ref": "#/$defs/Street"}, {"type": "null"}], "default": None}


def test_a_property_called_title_is_not_taken_for_a_title() -> None:
    assert schema_of(Person)["properties"]["title"] == {"type": "string"}


@pytest.mark.parametrize("annotation", [Family, list[Family], Tree, Family | Tree, dict[str, Tree]], ids=repr)
def test_types_that_contain_themselves_refer_to_a_definition(annotation: Any) -> None:
    schema = one(annotation).schema

    assert unresolved(schema) == []
    assert schema["$defs"].keys() <= {"Family", "Tree"}


def test_models_of_one_name_do_not_become_one() -> None:
    def make(kind: Any) -> Any:
        inner = pydantic.create_model("Inner", value=(kind, ...))
        middle = pydantic.create_model("Middle", one=(inner, ...), other=(inner, ...))
        return pydantic.create_model("Outer", first=(middle, ...), second=(middle, ...))

    parameters = [Parameter("a", make(int)), Parameter("b", make(str)), Parameter("c", make(int))]

    schema = Arguments("tool 'f'", parameters).schema

    assert unresolved(schema) == []
    kinds = []
    for name in "abc":
        node = schema["properties"][name]
        for step in ("first", "one"):
            node = schema["$defs"][node["properties"][step]["$ref"].removeprefix("#/$defs/")]
        kinds.append(node["properties"]["value"]["type"])
    assert kinds == ["integer", "string", "integer"]


def test_an_enum_of_its_own_and_of_a_model_keeps_the_names_of_the_others() -> None:
    car = pydantic.create_model("Car", color=(Color, ...), second=(Color, ...))
    pair = pydantic.create_model("Pair", left=(car, ...), right=(car, ...))

    schema = Arguments("tool 'f'", [Parameter("a", Color), Parameter("b", pair), Parameter("c", pair)]).schema

    assert list(schema["$defs"]) == ["Car"]
    assert schema["$defs"]["Car"]["properties"]["color"] == {"type": "string", "enum": ["red", "blue"]}


def unresolved(schema: dict[str, Any]) -> list[str]:
    """References that lead nowhere; found by looking at every dict, so it needs no knowledge of schemas."""
    missing, todo = [], [schema]
    while todo:
        node: Any = todo.pop()
        if isinstance(node, dict):
            ref = node.get("$ref")
            if isinstance(ref, str) and ref.removeprefix("#/$defs/") not in schema.get("$defs", {}):
                missing.append(ref)
            todo.extend(node.values())
        elif isinstance(node, list):
            todo.extend(node)
    return missing


@pytest.mark.parametrize(
    "annotation",
    [
        complex,
        collections.abc.Callable[[int], int],
        type,
        5,
        "str",
        list[complex],
        Annotated[int, pydantic.Field(ge=1, gt=1)],
        Annotated[str, pydantic.Field(ge=1)],
    ],
    ids=repr,
)
def test_a_type_without_json_form_is_refused_by_name(annotation: Any) -> None:
    parameters = [Parameter("fine", int), Parameter("odd", annotation)]

    with pytest.raises(InvalidDefinition, match=r"tool 'f', parameter 'odd': .* use plain JSON types"):
        Arguments("tool 'f'", parameters)


@pytest.mark.parametrize(
    ("kind", "answer", "value"),
    [
        (str, "hello", "hello"),
        (str, '"quoted"', '"quoted"'),
        (str, "5", "5"),
        (int, "5", 5),
        (int, 5, 5),
        (list[str], '["a"]', ["a"]),
        (list[str], ["a"], ["a"]),
        (list[str], '```json\n["a"]\n```', ["a"]),
        (list[str], '  ```\n["a"]```\n', ["a"]),
        (Literal["yes", "no"], "yes", "yes"),
        (Literal["yes", "no"], '"no"', "no"),
        (Literal["1", "2"], "1", "1"),
        (Color, '"red"', Color.RED),
        (datetime.date, "2025-01-02", datetime.date(2025, 1, 2)),
        (Point, '{"x": "1"}', Point(1)),
        (Street, '{"name": "A", "number": 1}', Street(name="A", number=1)),
        (Street, {"name": "A", "number": 1}, Street(name="A", number=1)),
        (list[Street], '[{"name": "A", "number": 1}]', [Street(name="A", number=1)]),
        (Street | Point | None, '{"x": 1}', Point(1)),
        (Street | Point | None, "null", None),
        (Street | str, "just words", "just words"),
        (
            Owner,
            {"who": {"title": "Dr", "home": {"name": "A", "number": 1}}},
            Owner(Person(title="Dr", home=Street(name="A", number=1))),
        ),
        (Renamed, '{"n": 3}', Renamed(n=3)),
        (Family, '{"name": "a", "parts": [{"name": "b"}]}', Family(name="a", parts=[Family(name="b")])),
        (dict[int, datetime.date], '{"1": "2025-01-02"}', {1: datetime.date(2025, 1, 2)}),
    ],
    ids=repr,
)
def test_an_answer_becomes_a_value_and_survives_storage(kind: Any, answer: Any, value: Any) -> None:
    codec = output_codec(kind)

    result = codec.validate(answer)
    stored = msgspec.json.decode(msgspec.json.encode(codec.to_json(result)))

    assert result == value
    assert type(result) is type(value)
    assert codec.from_json(stored) == value


def test_a_stored_string_is_not_read_as_json() -> None:
    codec = output_codec(str | int)

    assert codec.validate("5") == 5
    assert codec.from_json(codec.to_json("5")) == "5"


def test_odd_numbers_are_stored_like_everywhere_else() -> None:
    assert output_codec(float).to_json(float("nan")) == "NaN"


@pytest.mark.parametrize(
    ("kind", "answer", "fault"),
    [
        (int, "five", "the answer is not JSON"),
        (list[int], '["a"]', "$[0]: expected int, got str"),
        (Street, "I cannot say", "the answer is not JSON"),
        (Street, '{"name": 5}', "$.name: Input should be a valid string\n$.number: Field required"),
        (list[Street], [{"name": "A", "number": 0}], "$[0].number: Input should be greater than or equal to 1"),
        (Annotated[str, msgspec.Meta(min_length=3)], "ab", "$: expected str of length >= 3"),
        (uuid.UUID, "nonsense", "$: invalid UUID"),
    ],
    ids=repr,
)
def test_a_wrong_answer_is_explained_to_the_model(kind: Any, answer: Any, fault: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is compared below
        output_codec(kind).validate(answer)

    assert str(raised.value).startswith(fault)


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (str, {"type": "string"}),
        (list[str], {"type": "array", "items": {"type": "string"}}),
        (Point, POINT),
        (Street, STREET),
    ],
    ids=repr,
)
def test_an_output_type_is_its_own_schema(kind: Any, schema: dict[str, Any]) -> None:
    assert output_schema_of(kind) == schema


@pytest.mark.parametrize("kind", [Family, Tree], ids=repr)
def test_an_output_type_that_contains_itself_is_an_object_at_the_top(kind: Any) -> None:
    schema = output_schema_of(kind)

    assert schema["type"] == "object"
    assert unresolved(schema) == []


@pytest.mark.parametrize("kind", [complex, "str", 5, print], ids=repr)
def test_an_output_type_without_json_form_is_refused(kind: Any) -> None:
    with pytest.raises(InvalidDefinition, match="output type"):
        output_codec(kind)


plain = st.builds(Point, st.integers(), st.integers())
everything = st.fixed_dictionaries(
    {
        "text": st.text(),
        "number": st.integers(),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "color": st.sampled_from(Color),
        "point": plain,
        "points": st.lists(plain),
        "by_name": st.dictionaries(st.text(), plain),
        "pair": st.builds(Pair, st.integers(), st.text()),
        "moment": st.datetimes(),
        "data": st.binary(),
        "maybe": st.none() | st.dates(),
    }
)
EVERYTHING = Arguments(
    "tool 'f'",
    [
        Parameter("text", str),
        Parameter("number", int),
        Parameter("ratio", float),
        Parameter("flag", bool),
        Parameter("color", Color),
        Parameter("point", Point),
        Parameter("points", list[Point]),
        Parameter("by_name", dict[str, Point]),
        Parameter("pair", Pair),
        Parameter("moment", datetime.datetime),
        Parameter("data", bytes),
        Parameter("maybe", datetime.date | None),
    ],
)


@given(everything)
def test_arguments_survive_the_way_through_json(values: dict[str, Any]) -> None:
    args = msgspec.json.decode(msgspec.json.encode(values))

    assert EVERYTHING.bind(args) == values


@pytest.mark.parametrize(
    "answer",
    ["```json\n" + " " * 500_000 + "x", " " * 500_000 + "x", "{" * 500_000, "[{" * 250_000, "```json\n" * 60_000],
)
def test_answer_of_half_a_megabyte_that_is_no_json_is_refused_in_the_time_it_takes_to_read_it(answer: str) -> None:
    """An hour for a pattern that looks at the rest again from each place."""
    with pytest.raises(ValueError, match="answer"):
        output_codec(dict[str, int]).validate(answer)


def test_json_is_found_among_words_and_brackets() -> None:
    validate = output_codec(dict[str, int]).validate

    assert validate('} ] It is {"a": 1}. ]') == {"a": 1}
    assert validate('[{] no.\n```json\n{"a": 1}\n\n  ```\nSo.') == {"a": 1}
    assert validate(' \n```JSON \t\n {"a": 1} ``` \n') == {"a": 1}
