"""Tools as functions: their names, what a call binds, what a model is shown of them."""

from __future__ import annotations

import ast

import pytest

from perdure.codemode.stubs import Functions, identifier, shown
from tests.codemode.kit import TOOLS, tool


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("search", "search"),
        ("list-issues", "list_issues"),
        ("github.list-issues", "github.list_issues"),
        ("mcp__github__search", "mcp__github__search"),
        ("a.b.c", "a_b.c"),
        ("2fa", "_2fa"),
        ("class", "class_"),
        ("print", "print_"),
        ("json.dumps", "json_.dumps"),
        ("calendar.create", "calendar_.create"),
        ("git.print", "git.print_"),
        ("größe", "gr__e"),
        (".x.", "x"),
        ("…", "_"),
    ],
)
def test_a_name_becomes_an_identifier_that_hides_nothing(name: str, path: str) -> None:
    functions = Functions([tool(name)])

    assert (functions.fault, list(functions.by_path)) == (None, [path])
    assert all(part.isidentifier() for part in path.split("."))


@pytest.mark.parametrize(
    ("tools", "fault"),
    [
        (["a-b", "a_b"], "the tools 'a-b' and 'a_b' would both be a_b() in code: rename one"),
        (["git.log", "git"], "the tool 'git' and the namespace of 'git.log' would both be 'git' in code: rename one"),
        (["finish"], "the tool 'finish' has the name of a function that every cell has: rename it"),
        (["sleep"], "the tool 'sleep' has the name of a function that every cell has: rename it"),
        (["settle"], "the tool 'settle' has the name of a function that every cell has: rename it"),
    ],
)
def test_names_that_a_call_could_not_tell_apart_are_refused(tools: list[str], fault: str) -> None:
    assert Functions([tool(name) for name in tools]).fault == fault


def test_parameters_that_a_call_could_not_tell_apart_are_refused() -> None:
    fault = Functions([tool("t", "a-b", "a_b")]).fault

    assert fault == "the parameters 'a-b' and 'a_b' of the tool 't' would both be 'a_b' in code: rename one"


def test_arguments_are_bound_by_the_names_of_the_schema() -> None:
    function = Functions([tool("t", "from", "to-day", optional=["limit"])]).by_path["t"]

    assert function.bind([1], {"to_day": 2, "limit": 3}) == {"from": 1, "to-day": 2, "limit": 3}
    assert function.bind([], {"from_": 1, "to_day": 2}) == {"from": 1, "to-day": 2}


def test_required_parameters_come_first_whatever_the_schemas_order() -> None:
    spec = tool("t", schema={"properties": {"b": {}, "a": {}}, "required": ["a"]})

    assert Functions([spec]).by_path["t"].bind([1, 2], {}) == {"a": 1, "b": 2}


def test_a_tool_that_takes_anything_is_given_anything() -> None:
    function = Functions([tool("t", "a", schema={"additionalProperties": True})]).by_path["t"]

    assert function.bind([1], {"more": 2}) == {"a": 1, "more": 2}


RICH = tool(
    "shop.order",
    description='Order something.\n\nSays """thanks""".',
    schema={
        "properties": {
            "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}, "description": "What to\norder."},
            "how": {"enum": ["card", "cash", None], "default": "card"},
            "address": {
                "type": "object",
                "properties": {"street": {"type": "string"}, "zip-code": {"type": "integer"}},
                "required": ["street"],
            },
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tags": {"type": "object", "additionalProperties": {"type": "number"}},
            "anything": {},
            "self": {"type": ["string", "integer"], "default": "x" * 100},
        },
        "required": ["items"],
        "$defs": {
            "Item": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "parts": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
                },
                "required": ["name"],
            }
        },
    },
    output_schema={"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
)


def test_a_model_is_shown_types_defaults_and_descriptions() -> None:
    signature = (
        "async def shop.order(items: list[Item], how: Literal['card', 'cash', None] = 'card', "
        "address: ShopOrderAddress = ..., note: str | None = ..., tags: dict[str, float] = ..., anything: Any = ..., "
        "self: str | int = ...) -> ShopOrderResult:"
    )
    assert (
        shown(Functions([RICH]))
        == f'''\
class Item(TypedDict):
    name: str
    parts: NotRequired[list[Item]]

ShopOrderAddress = TypedDict("ShopOrderAddress", {{'street': str, 'zip-code': NotRequired[int]}})

class ShopOrderResult(TypedDict):
    id: int

{signature}
    """Order something.

    Says \\"\\"\\"thanks\\"\\"\\".

    Args:
        items: What to order.
    """

def finish(value: str) -> None:
    """End your work with this value."""'''
    )


def test_a_model_is_shown_what_it_is_to_finish_with() -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}

    assert shown(Functions([]), schema).splitlines()[:4] == [
        "class Output(TypedDict):",
        "    sum: int",
        "",
        "def finish(value: Output) -> None:",
    ]


def test_what_a_cell_is_checked_against_is_wider_and_parses() -> None:
    modules = Functions([RICH, *TOOLS]).stubs

    assert sorted(modules) == ["", "github", "shop"]
    for stub in modules.values():
        ast.parse(stub)
    assert modules["shop"].splitlines()[-1] == (
        "async def order(items: Sequence[Mapping[str, Any]], how: str | None = 'card', "
        "address: Mapping[str, Any] = ..., note: str | None = ..., tags: Mapping[str, Any] = ..., "
        "anything: Any = ..., self: str | int = ...) -> Any: ..."
    )


def test_the_print_of_a_catalogue_changes_with_what_a_cell_could_call() -> None:
    first = Functions(TOOLS).print

    assert first == Functions(list(TOOLS)).print
    assert first != Functions(TOOLS[:2]).print
    assert first != Functions([*TOOLS[:2], tool("github.list-issues", "repo:integer")]).print


def test_a_schema_without_end_or_sense_is_any() -> None:
    odd = tool(
        "t",
        schema={
            "properties": {
                "a": {"$ref": "#/nowhere"},
                "b": {"anyOf": []},
                "c": {"enum": [[1], {}]},
                "d": True,
                "e": {"$ref": "#/properties/e"},
                "f": {"type": "tuple"},
            }
        },
    )

    ast.parse(Functions([odd]).stubs[""])
    assert shown(Functions([odd])).splitlines()[0].count(": Any") == 6
    assert identifier("") == "_"
