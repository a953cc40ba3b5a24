"""Declaring operations: what a decorated method offers, and which declarations are refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, assert_type

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import InvalidDefinition, PluginConflict
from perdure.plugins.hooks import Plugin
from perdure.plugins.operations import (
    CommandContext,
    OperationContext,
    OperationDefinition,
    QueryContext,
    Result,
    TaskContext,
    collect,
    command,
    query,
    task,
)
from perdure.sessions.operation_table import OperationTable
from perdure.tools.check import check

if TYPE_CHECKING:
    from perdure.plugins import operations as there


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Note(msgspec.Struct):
    text: str
    colour: Colour = Colour.RED
    marks: tuple[int, ...] = ()


class Notes(Plugin):
    id = "notes"

    @query
    def search(self, word: str, limit: int = 5) -> list[str]:
        """Find notes.

        Args:
            word: What they contain.
        """
        return [word] * limit

    @query(session="optional", name="notes.count", description="  How many.  ")
    async def amount(self, ctx: QueryContext) -> int:
        return 7

    @command
    def add(self, note: Note, ctx: CommandContext) -> Result[str]:
        return Result(note.text)

    @task(session="forbidden")
    async def reindex(self, ctx: TaskContext) -> None:
        """Read everything again."""


class Other(Plugin):
    id = "other"


def definitions(*plugins: Plugin) -> dict[str, OperationDefinition]:
    return {definition.name: definition for definition in OperationTable(plugins).definitions}


def test_decorated_method_stays_a_method_with_its_types() -> None:
    found = Notes().search("tea", limit=2)

    assert_type(found, list[str])
    assert found == ["tea", "tea"]


def test_definition_tells_everything_about_an_operation() -> None:
    search = definitions(Notes())["notes.search"]

    assert search.to_json() == {
        "name": "notes.search",
        "kind": "query",
        "plugin": "notes",
        "description": "Find notes.",
        "session_param": "required",
        "input_schema": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "What they contain."},
                "limit": {"type": "integer", "default": 5},
            },
            "required": ["word"],
            "additionalProperties": False,
        },
        "output_schema": {"type": "array", "items": {"type": "string"}},
    }


def test_decorator_names_and_describes_an_operation() -> None:
    count = definitions(Notes())["notes.count"]

    assert (count.description, count.session_param) == ("How many.", "optional")


def test_context_is_not_an_argument() -> None:
    found = definitions(Notes())

    assert found["notes.count"].input_schema == {"type": "object", "properties": {}, "additionalProperties": False}
    assert list(found["notes.add"].input_schema["properties"]) == ["note"]


def test_listing_has_queries_then_commands_then_tasks_each_by_name() -> None:
    class Zoo(Plugin):
        id = "zoo"

        @task
        def ant(self) -> None: ...

        @command
        def bee(self) -> None: ...

        @query
        def cow(self) -> None: ...

    names = [definition.name for definition in OperationTable([Zoo(), Notes()]).definitions]

    assert names == ["notes.count", "notes.search", "zoo.cow", "notes.add", "zoo.bee", "notes.reindex", "zoo.ant"]


def test_plugins_without_operations_offer_none() -> None:
    assert not OperationTable([Other(), Plugin()])
    assert OperationTable([Other()]).definitions == []


class Answers(Plugin):
    id = "answers"

    @query
    def nothing(self) -> None: ...

    @query
    def anything(self):  # type: ignore[no-untyped-def]  # the point of the test
        return 1

    @command
    def bare(self) -> Result:  # ty: ignore[missing-type-argument]  # the point of the test
        return Result(1)

    @command
    def either(self) -> Result[int] | None: ...

    @query
    async def typed(self) -> dict[str, float]:
        return {}


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("answers.nothing", {"type": "null"}),
        ("answers.anything", {}),
        ("answers.bare", {}),
        ("answers.either", {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        ("answers.typed", {"type": "object", "additionalProperties": {"type": "number"}}),
    ],
)
def test_output_schema_comes_from_what_is_returned(name: str, schema: dict[str, Any]) -> None:
    assert definitions(Answers())[name].output_schema == schema


class Kind(Plugin):
    id = "kind"

    @query(name="required")
    def one(self) -> None: ...

    @query(name="optional", session="optional")
    def two(self) -> None: ...

    @query(name="forbidden", session="forbidden")
    def three(self) -> None: ...


@pytest.mark.parametrize("session", ["required", "optional", "forbidden"])
def test_definition_says_whether_an_operation_takes_a_session(session: str) -> None:
    assert definitions(Kind())[session].session_param == session


# ---------------------------------------------------------------------- inheritance


def test_overriding_an_operation_keeps_what_was_said_about_it() -> None:
    class Better(Notes):
        def search(self, word: str, limit: int = 9) -> list[str]:
            return []

    found = definitions(Better())["notes.search"]

    assert found.kind == "query"
    assert found.input_schema["properties"]["limit"]["default"] == 9


def test_overriding_may_say_something_else_about_it() -> None:
    class Better(Notes):
        @query(session="forbidden", name="find")
        def search(self, word: str, limit: int = 9) -> list[str]:
            return []

    found = definitions(Better())

    assert "notes.search" not in found
    assert found["find"].session_param == "forbidden"


def test_operation_set_to_none_is_gone() -> None:
    class Fewer(Notes):
        search = None  # type: ignore[assignment]

    assert "notes.search" not in definitions(Fewer())


def test_static_and_class_methods_may_be_operations() -> None:
    class Shelf(Plugin):
        id = "shelf"

        @staticmethod
        @query
        def total(prices: list[int]) -> int:
            return sum(prices)

        @classmethod
        @query
        def label(cls) -> str:
            return cls.id

    found = definitions(Shelf())

    assert list(found["shelf.total"].input_schema["properties"]) == ["prices"]
    assert list(found["shelf.label"].input_schema["properties"]) == []


def test_one_class_under_two_ids_offers_its_operations_twice() -> None:
    class Box(Plugin):
        def __init__(self, id: str) -> None:
            self.id = id

        @query
        def look(self) -> str:
            return self.id

    assert list(definitions(Box("left"), Box("right"))) == ["left.look", "right.look"]


# ---------------------------------------------------------------------- refused


class Rival(Plugin):
    id = "rival"

    @command(name="notes.search")
    def anything(self) -> None: ...


def test_two_plugins_with_one_operation_name_are_refused_by_both_names() -> None:
    with pytest.raises(PluginConflict, match=r"'rival'.*'notes\.search' belongs to 'notes' already") as caught:
        OperationTable([Notes(), Rival()])

    assert (caught.value.plugin, caught.value.other) == ("rival", "notes")


def test_refused_plugins_are_as_they_were() -> None:
    notes, rival = Notes(), Rival()
    with pytest.raises(PluginConflict):
        OperationTable([notes, rival])

    assert [offer.name for offer in collect([rival])] == ["notes.search"]
    assert len(OperationTable([notes]).definitions) == 4


def test_one_plugin_with_one_name_for_two_operations_is_refused() -> None:
    class Twice(Plugin):
        id = "twice"

        @query
        def look(self) -> None: ...

        @command(name="twice.look")
        def change(self) -> None: ...

    with pytest.raises(PluginConflict, match=r"'twice\.look' belongs to 'twice' already"):
        OperationTable([Twice()])


@pytest.mark.parametrize("name", ["tools", "required", "time_limit", "snapshot"])
def test_what_every_plugin_has_cannot_be_an_operation(name: str) -> None:
    wrong: type[Plugin] = type("Wrong", (Plugin,), {"id": "wrong", name: query(lambda self: 1)})

    with pytest.raises(InvalidDefinition, match=f"query '{name}' of plugin 'wrong': every plugin has a '{name}'"):
        collect([wrong()])


def test_query_cannot_ask_for_what_commands_are_given() -> None:
    class Wrong(Plugin):
        id = "wrong"

        @query
        def look(self, ctx: CommandContext) -> None: ...

    with pytest.raises(
        InvalidDefinition, match=r"'wrong\.look': a query is given a QueryContext, not a CommandContext"
    ):
        OperationTable([Wrong()])


def test_any_operation_may_ask_for_what_all_are_given() -> None:
    class Right(Plugin):
        id = "right"

        @query
        def look(self, ctx: OperationContext) -> None: ...

    assert definitions(Right())["right.look"].input_schema["properties"] == {}


def test_context_may_be_imported_for_type_checkers_only() -> None:
    class Hidden(Plugin):
        id = "hidden"

        @command
        def act(self, ctx: there.CommandContext) -> None: ...

    assert definitions(Hidden())["hidden.act"].input_schema["properties"] == {}


def test_argument_that_has_no_json_form_is_refused() -> None:
    class Wrong(Plugin):
        id = "wrong"

        @query
        def look(self, at: Plugin) -> None: ...

    with pytest.raises(InvalidDefinition, match=r"operation 'wrong\.look', parameter 'at'"):
        OperationTable([Wrong()])


def test_output_that_has_no_json_form_is_refused() -> None:
    class Wrong(Plugin):
        id = "wrong"

        @query
        def look(self) -> Plugin:
            return self

    with pytest.raises(InvalidDefinition, match=r"operation 'wrong\.look': what it returns has no JSON form"):
        OperationTable([Wrong()])


def test_output_type_that_cannot_be_found_is_refused() -> None:
    class Wrong(Plugin):
        id = "wrong"

        @query
        def look(self) -> Lost: ...  # type: ignore[name-defined]  # ty: ignore[unresolved-reference]  # noqa: F821

    with pytest.raises(InvalidDefinition, match=r"operation 'wrong\.look', what it returns: the annotation 'Lost'"):
        OperationTable([Wrong()])


def test_default_name_must_be_a_name() -> None:
    class Wrong(Plugin):
        id = "a/b"

        @query
        def look(self) -> None: ...

    with pytest.raises(InvalidDefinition, match="without '/'"):
        collect([Wrong()])


@pytest.mark.parametrize("name", ["", "a/b", "line\nbreak", "x" * 201, 7])
def test_name_must_be_printable_and_fit_a_path(name: Any) -> None:
    with pytest.raises(InvalidDefinition, match="is no name for an operation"):
        query(name=name)(lambda self: None)


def test_session_parameter_is_one_of_three() -> None:
    wrong: Any = "sometimes"

    with pytest.raises(InvalidDefinition, match=r"session='sometimes' is not .required., .optional. or .forbidden."):
        query(session=wrong)(lambda self: None)


def test_description_is_a_string() -> None:
    wrong: Any = 5

    with pytest.raises(InvalidDefinition, match="description=5 is not a string"):
        query(description=wrong)(lambda self: None)


def test_method_is_decorated_once() -> None:
    with pytest.raises(InvalidDefinition, match="an operation already"):
        command(query(lambda self: None))


@pytest.mark.parametrize("thing", [Notes, "search", staticmethod(lambda: None), property(lambda self: None)])
def test_only_methods_are_decorated(thing: Any) -> None:
    with pytest.raises(InvalidDefinition, match="decorate a method of a plugin"):
        query(thing)


def test_generators_are_refused() -> None:
    def plain(self: Any) -> Iterator[int]:
        yield 1

    async def waiting(self: Any) -> AsyncIterator[int]:
        yield 1

    with pytest.raises(InvalidDefinition, match="is a generator: return a list"):
        query(plain)
    with pytest.raises(InvalidDefinition, match="is a generator: return a list"):
        query(waiting)


# ---------------------------------------------------------------------- properties

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)
schemas = st.dictionaries(texts, st.one_of(texts, st.integers(-9, 9), st.lists(st.booleans(), max_size=2)), max_size=3)


@pytest.mark.slow
@given(
    st.builds(
        OperationDefinition,
        texts,
        st.sampled_from(["query", "command", "task"]),
        texts,
        texts,
        st.sampled_from(["required", "optional", "forbidden"]),
        schemas,
        schemas,
    )
)
def test_definition_comes_back_from_its_json(definition: OperationDefinition) -> None:
    wire = msgspec.json.encode(definition.to_json())

    assert msgspec.json.decode(wire, type=OperationDefinition) == definition


class Echo(Plugin):
    id = "echo"

    @query
    def say(self, notes: list[Note], by: str | None = None) -> dict[str, list[Note]]:
        return {by or "nobody": notes}


ECHO = OperationTable([Echo()]).find("echo.say")


@given(
    st.lists(
        st.fixed_dictionaries(
            {"text": texts},
            optional={"colour": st.sampled_from(["red", "blue"]), "marks": st.lists(st.integers(-9, 9), max_size=3)},
        ),
        max_size=3,
    ),
    st.one_of(st.none(), texts),
)
def test_what_an_input_schema_allows_is_taken_and_what_comes_back_fits_the_output_schema(
    notes: list[dict[str, Any]], by: str | None
) -> None:
    args = {"notes": notes, "by": by}

    output = ECHO.codec.to_json(Echo().say(**ECHO.bind(args)))

    assert check(ECHO.definition.input_schema, args) is None
    assert check(ECHO.definition.output_schema, output) is None
    assert output == {by or "nobody": [{"colour": "red", "marks": [], **note} for note in notes]}


@given(
    st.one_of(st.integers(-9, 9), texts, st.lists(st.integers(-9, 9), max_size=2)),
    st.sampled_from(["notes", "by", "other"]),
)
def test_what_an_input_schema_forbids_is_refused(value: Any, name: str) -> None:
    args = {"notes": [], name: value}
    forbidden = check(ECHO.definition.input_schema, args) is not None

    try:
        ECHO.bind(args)
        refused = False
    except Exception:
        refused = True

    assert refused == forbidden
