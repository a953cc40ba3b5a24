from __future__ import annotations

import asyncio
import functools
import inspect
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Generic, List, Optional, TypeVar, assert_type  # noqa: UP035

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perdure
from perdure.errors import InvalidDefinition, ToolError
from perdure.tools.context import ToolContext
from perdure.tools.define import Tool, as_tool, tool

if TYPE_CHECKING:
    from decimal import Decimal as NotThere

    from perdure.tools.context import ToolContext as Hidden

T = TypeVar("T")


@dataclass
class Deps:
    rate: float


@tool
def weather(city: str, days: int = 3) -> str:
    """The weather of a city.

    Args:
        city: Where to look.
    """
    return f"{city}: sunny for {days} days"


@tool(
    name="look-up",
    description="  Look it up.  ",
    recovery="rerun",
    timeout=30,
    retries=2,
    limit=4,
    resource="net",
    approval="ask",
    deferred=True,
)
async def search(query: str, ctx: ToolContext[Deps]) -> list[str]:
    return [query, ctx.call_id]


class Bank:
    def __init__(self, money: int) -> None:
        self.money = money

    @tool
    def balance(self, account: str, ctx: ToolContext[Deps] | None = None) -> str:
        """The balance of an account."""
        return f"{account} has {self.money}"

    @tool(name="rob")
    async def take(self, amount: int) -> int:
        return self.money - amount

    @tool
    @staticmethod
    def open_hours(day: str) -> str:
        return f"{day}: 9 to 5"

    def plain(self, account: str) -> str:
        return account


class Adder:
    """Adds things up."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.bind = self.spec = "mine"

    async def __call__(self, number: int) -> int:
        return self.base + number


def with_key(city: str, api_key: str, units: str = "metric") -> str:
    """Ask with a key."""
    return f"{city} {api_key} {units}"


# What a tool is


def test_a_bare_decorator_takes_everything_from_the_function() -> None:
    assert weather.spec.name == "weather"
    assert weather.spec.id == "tool:weather"
    assert weather.spec.description == "The weather of a city."
    assert weather.spec.recovery == "once"
    assert weather.spec.output_schema == {"type": "string"}
    assert weather.spec.input_schema == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where to look."},
            "days": {"type": "integer", "default": 3},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    assert (weather.is_async, weather.background, weather.context_parameter) == (False, False, None)


def test_options_reach_the_spec() -> None:
    spec = search.spec

    assert (spec.name, spec.id, spec.description) == ("look-up", "tool:look-up", "Look it up.")
    assert (spec.recovery, spec.approval, spec.deferred) == ("rerun", "ask", True)
    assert (spec.timeout, spec.retries, spec.limit, spec.resource) == (30, 2, 4, "net")
    assert search.is_async
    assert list(spec.input_schema["properties"]) == ["query"]


def test_a_decorated_function_is_called_like_the_original() -> None:
    assert weather("Rome", days=1) == "Rome: sunny for 1 days"
    assert asyncio.run(search("x", ToolContext(call_id="c"))) == ["x", "c"]


def test_a_decorated_function_looks_like_the_original() -> None:
    assert weather.__name__ == "weather"
    assert weather.__doc__ == weather.fn.__doc__
    assert weather.__module__ == __name__
    assert inspect.signature(weather) == inspect.signature(weather.fn)
    assert repr(weather) == "<Tool weather>"


def test_types_of_the_original_are_kept_for_type_checkers() -> None:
    def typed() -> None:
        assert_type(weather("Rome", 1), str)
        assert_type(Bank(1).balance("a"), str)
        weather(5)  # type: ignore[arg-type]  # ty: ignore[invalid-argument-type]  # the mistake is noticed
        tool(recovery="never")  # type: ignore[call-overload]  # ty: ignore[invalid-argument-type]  # this one too

    assert callable(typed)


def test_bound_arguments_are_what_the_function_wants() -> None:
    assert weather.bind({"city": "Rome", "days": "5"}) == {"city": "Rome", "days": 5}
    assert weather.bind({"city": "Rome"}) == {"city": "Rome"}
    assert weather.invoke(weather.bind({"city": "Rome"}), ToolContext()) == "Rome: sunny for 3 days"


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        ({}, "$: object missing required field city"),
        ({"city": 5}, "$.city: expected str, got int"),
        ({"city": "Rome", "days": "many"}, "$.days: expected int, got str"),
        ({"city": "Rome", "town": "Rome"}, "$: object contains unknown field town; known: city, days"),
    ],
)
def test_wrong_arguments_are_told_to_the_model(args: dict[str, Any], fault: str) -> None:
    with pytest.raises(ToolError) as raised:
        weather.bind(args)

    assert raised.value.code == "invalid_tool_args"
    assert raised.value.message == f"invalid arguments for weather: {fault}"


def test_an_async_tool_gives_its_coroutine() -> None:
    ctx: ToolContext[Any] = ToolContext(call_id="c1")

    result = search.invoke(search.bind({"query": "x"}), ctx)

    assert inspect.iscoroutine(result)
    assert asyncio.run(result) == ["x", "c1"]


@given(st.text(), st.integers(), st.lists(st.booleans()), st.none() | st.dictionaries(st.text(), st.integers()))
def test_what_is_bound_reaches_the_function_unchanged(a: str, b: int, c: list[bool], d: dict[str, int] | None) -> None:
    @tool
    def everything(a: str, b: int, c: list[bool], d: dict[str, int] | None = None) -> Any:
        return (a, b, c, d)

    assert everything.invoke(everything.bind({"a": a, "b": b, "c": c, "d": d}), ToolContext()) == (a, b, c, d)


# Contexts


def ctx_first(ctx: ToolContext[Any], city: str) -> Any:
    return ctx


def ctx_last(city: str, ctx: ToolContext[Deps]) -> Any:
    return ctx


def ctx_keyword(city: str, *, ctx: ToolContext[Any]) -> Any:
    return ctx


def ctx_optional(city: str, ctx: Optional[ToolContext[Deps]] = None) -> Any:  # noqa: UP045
    return ctx


def ctx_union(city: str, ctx: ToolContext[Deps] | None = None) -> Any:
    return ctx


def ctx_annotated(city: str, ctx: Annotated[ToolContext[Deps], "given by the host"]) -> Any:
    return ctx


def ctx_string(city: str, ctx: "ToolContext[Deps]") -> Any:  # noqa: UP037
    return ctx


def ctx_generic(city: str, ctx: ToolContext[T]) -> Any:
    return ctx


def ctx_for_checkers_only(city: str, ctx: ToolContext[NotThere]) -> Any:
    return ctx


@pytest.mark.parametrize(
    "fn",
    [
        ctx_first,
        ctx_last,
        ctx_keyword,
        ctx_optional,
        ctx_union,
        ctx_annotated,
        ctx_string,
        ctx_generic,
        ctx_for_checkers_only,
    ],
)
def test_a_context_is_found_by_its_annotation_and_never_shown(fn: Any) -> None:
    made = as_tool(fn)
    ctx: ToolContext[Any] = ToolContext()

    assert made.context_parameter == "ctx"
    assert list(made.spec.input_schema["properties"]) == ["city"]
    assert made.invoke(made.bind({"city": "Rome"}), ctx) is ctx


def test_a_context_that_is_no_text_is_found_too() -> None:
    """Modules without the future import have types where this one has strings."""

    def act(city: Any, ctx: Any) -> None: ...

    context: Any = ToolContext
    act.__annotations__ = {"city": str, "ctx": context["Nowhere"]}

    assert as_tool(act).context_parameter == "ctx"


def test_a_model_cannot_pass_a_context() -> None:
    with pytest.raises(ToolError, match="unknown field ctx"):
        search.bind({"query": "x", "ctx": {}})


def test_a_subclass_of_the_context_is_one_too() -> None:
    class Mine(ToolContext[Deps]):
        pass

    @tool
    def act(mine: Mine) -> None: ...

    assert act.context_parameter == "mine"


def test_two_contexts_are_refused() -> None:
    with pytest.raises(InvalidDefinition, match=r"act.* two contexts, a and b"):

        @tool
        def act(a: ToolContext[Any], b: ToolContext[Any]) -> None: ...


# Annotations as text


class Later(pydantic.BaseModel):
    value: int


def test_local_types_are_found_where_the_tool_is_defined() -> None:
    @dataclass
    class Local:
        value: int

    @tool
    def act(one: Local, many: List["Local"], more: list["Later"]) -> int:  # noqa: UP006, UP037
        return one.value

    @tool(name="closed")
    def over(one: Local) -> Any:
        return Local

    kwargs = act.bind({"one": {"value": 1}, "many": [{"value": 2}], "more": [{"value": 3}]})
    assert kwargs == {"one": Local(1), "many": [Local(2)], "more": [Later(value=3)]}
    assert over.bind({"one": {"value": 1}}) == {"one": Local(1)}


def test_a_tool_may_refer_to_what_is_assigned_after_it() -> None:
    @tool
    def act(one: Later) -> Any:
        return assigned_later

    assigned_later = 5

    assert act.invoke(act.bind({"one": {"value": 1}}), ToolContext()) == 5


def test_an_annotation_that_cannot_be_resolved_names_its_parameter() -> None:
    with pytest.raises(InvalidDefinition, match=r"act'.*parameter 'price'.*'NotThere'.*import its names at run time"):

        @tool
        def act(city: str, price: NotThere) -> None: ...


def test_another_name_of_the_context_for_checkers_only_cannot_be_resolved() -> None:
    with pytest.raises(InvalidDefinition, match="parameter 'ctx'"):

        @tool
        def act(ctx: Hidden[Any]) -> None: ...


def test_an_annotation_that_fails_names_its_parameter() -> None:
    def act(city: Any) -> None: ...

    act.__annotations__["city"] = "1 / 0"

    with pytest.raises(InvalidDefinition, match=r"parameter 'city'.*division by zero"):
        tool(act)


def test_a_return_type_without_schema_is_nobodys_business() -> None:
    @tool
    def act() -> complex:
        return 1j

    @tool
    def other() -> NotThere:
        raise NotImplementedError

    assert act.spec.output_schema is None
    assert other.spec.output_schema is None


def test_a_parameter_without_annotation_takes_anything() -> None:
    @tool
    def act(thing, other=5):  # type: ignore[no-untyped-def]  # the point of the test
        return thing

    assert act.spec.input_schema["properties"] == {"thing": {}, "other": {"default": 5}}
    assert act.bind({"thing": {"a": [1]}}) == {"thing": {"a": [1]}}


# Things that can be called


def test_a_method_in_a_class_body_is_bound_to_its_instance() -> None:
    rich, poor = Bank(100), Bank(1)

    assert rich.balance.spec.name == "balance"
    assert list(rich.balance.spec.input_schema["properties"]) == ["account"]
    assert rich.balance.context_parameter == "ctx"
    assert as_tool(rich.balance).invoke({"account": "a"}, ToolContext()) == "a has 100"
    assert poor.balance("b") == "b has 1"
    assert str(inspect.signature(poor.balance)).startswith("(account")
    assert poor.take.is_async
    assert asyncio.run(poor.take(1)) == 0


def test_a_method_without_its_instance_is_refused() -> None:
    with pytest.raises(InvalidDefinition, match=r"Bank\.balance' is a method without its instance"):
        as_tool(Bank.balance)
    with pytest.raises(InvalidDefinition, match=r"Bank\.plain' is a method without its instance"):
        as_tool(Bank.plain)


def test_a_bound_method_is_a_tool() -> None:
    made = as_tool(Bank(1).plain)

    assert made.spec.name == "plain"
    assert made.invoke(made.bind({"account": "a"}), ToolContext()) == "a"


def test_a_static_method_is_a_tool() -> None:
    assert list(Bank.open_hours.spec.input_schema["properties"]) == ["day"]
    assert as_tool(Bank(1).open_hours).invoke({"day": "Monday"}, ToolContext()) == "Monday: 9 to 5"


def test_what_a_partial_settles_is_not_shown_to_a_model() -> None:
    made = as_tool(functools.partial(with_key, api_key="secret"))

    assert made.spec.name == "with_key"
    assert made.spec.description == "Ask with a key."
    assert "secret" not in str(made.spec)
    assert list(made.spec.input_schema["properties"]) == ["city", "units"]
    assert made.invoke(made.bind({"city": "Rome"}), ToolContext()) == "Rome secret metric"
    with pytest.raises(ToolError, match="unknown field api_key"):
        made.bind({"city": "Rome", "api_key": "mine"})


def test_a_partial_may_settle_leading_parameters() -> None:
    made = as_tool(functools.partial(with_key, "Rome", "key"))

    assert made.invoke(made.bind({"units": "old"}), ToolContext()) == "Rome key old"


def test_a_partial_of_an_async_function_is_async() -> None:
    assert as_tool(functools.partial(search.fn, query="x")).is_async
    assert as_tool(functools.partial(search, query="x")).is_async


def test_an_object_that_can_be_called_is_a_tool() -> None:
    made = tool(name="add")(Adder(2))

    assert made.spec.description == "Adds things up."
    assert made.__name__ == "Adder"
    assert made.is_async
    assert asyncio.run(made.invoke(made.bind({"number": "3"}), ToolContext())) == 5


def test_a_wrapped_function_is_read_behind_its_wrapper() -> None:
    @functools.wraps(weather.fn)
    def logged(*args: Any, **kwargs: Any) -> str:
        return weather.fn(*args, **kwargs).upper()

    made = as_tool(logged)

    assert made.spec == weather.spec
    assert made.invoke(made.bind({"city": "Rome"}), ToolContext()) == "ROME: SUNNY FOR 3 DAYS"


def test_as_tool_keeps_a_tool_and_wraps_a_function() -> None:
    assert as_tool(weather) is weather
    assert isinstance(as_tool(with_key), Tool)


async def stream(city: str) -> AsyncIterator[str]:
    yield city


def generate(city: str) -> Iterator[str]:
    yield city


class Boxed(Generic[T]):
    pass


@pytest.mark.parametrize(
    ("thing", "advice"),
    [
        (stream, "generator: return a list"),
        (generate, "generator: return a list"),
        (Bank, "is a class"),
        (Boxed[int], "'Boxed' is a class"),
        ("weather", "cannot be called"),
        (None, "cannot be called"),
        (5, "cannot be called"),
        (lambda city: city, "'<lambda>' is no name for a tool"),
        (len, "positional-only"),
        (max, "no readable signature"),
        (classmethod(lambda cls: cls), "class method"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_with_advice(thing: Any, advice: str) -> None:
    with pytest.raises(InvalidDefinition, match=advice):
        as_tool(thing)


def test_a_name_in_the_place_of_the_function_is_refused() -> None:
    with pytest.raises(InvalidDefinition, match=r"'weather' cannot be called.*@tool\(name=…\)"):
        tool("weather")  # type: ignore[call-overload]  # ty: ignore[invalid-argument-type]  # the mistake


def test_a_tool_is_decorated_once() -> None:
    with pytest.raises(InvalidDefinition, match="is a tool already"):
        tool(weather)


# Definitions that cannot be right


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"name": ""}, "is no name for a tool"),
        ({"name": "two words"}, "is no name for a tool"),
        ({"name": "x" * 65}, "is no name for a tool"),
        ({"name": "größe"}, "is no name for a tool"),
        ({"name": "line\n"}, "is no name for a tool"),
        ({"name": 5}, "is no name for a tool"),
        ({"description": 5}, "description=5"),
        ({"recovery": "twice"}, 'recovery=\'twice\' is not usable: give "once", "rerun" or "ask"'),
        ({"approval": True}, "approval=True"),
        ({"timeout": -1}, "timeout=-1 is not usable: give seconds, more than 0"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"timeout": True}, "timeout=True"),
        ({"timeout": "5"}, "timeout='5'"),
        ({"retries": -1}, "retries=-1 is not usable: give a whole number, 0 or more"),
        ({"retries": 1.5}, "retries=1.5"),
        ({"limit": 0}, "limit=0 is not usable: give a whole number, 1 or more"),
        ({"limit": -1}, "limit=-1"),
        ({"resource": ""}, "resource=''"),
        ({"background": 1}, "background=1 is not usable: give True or False"),
        ({"background": True, "deferred": True}, "exclude each other: in the background a tool may simply wait"),
        ({"deferred": 1}, "deferred=1"),
        ({"output_budget": 4096}, "output_budget=4096 is not usable: give an OutputBudget"),
    ],
)
def test_an_option_that_cannot_be_right_is_refused(options: dict[str, Any], advice: str) -> None:
    with pytest.raises(InvalidDefinition) as raised:
        tool(**options)(with_key)

    assert str(raised.value).startswith("tool 'with_key': ")
    assert advice in str(raised.value)


@pytest.mark.parametrize("options", [{}, {"name": "x" * 64}, {"deferred": True, "approval": "ask"}, {"timeout": 0.5}])
def test_options_that_are_right_are_taken(options: dict[str, Any]) -> None:
    assert isinstance(tool(**options)(with_key), Tool)


def star_args(city: str, *names: str) -> None: ...


def star_kwargs(city: str, **names: str) -> None: ...


def positional(names: str, /, city: str) -> None: ...


def dunder(city: str, __names: str) -> None: ...  # ty: ignore[invalid-legacy-positional-parameter]  # it is refused


def unsupported(city: str, names: complex) -> None: ...


def field_default(city: str, names: str = pydantic.Field(description="Names")) -> None: ...


@pytest.mark.parametrize(
    ("fn", "parameter", "advice"),
    [
        (star_args, "names", "name each parameter"),
        (star_kwargs, "names", "name each parameter"),
        (positional, "names", "positional-only"),
        (dunder, "__names", "positional-only"),
        (unsupported, "names", "use plain JSON types"),
        (field_default, "names", "write Annotated"),
    ],
)
def test_a_parameter_that_no_model_can_fill_is_refused_by_name(fn: Any, parameter: str, advice: str) -> None:
    with pytest.raises(InvalidDefinition) as raised:
        tool(fn)

    assert str(raised.value).startswith(f"tool {fn.__name__!r}, parameter {parameter!r}")
    assert advice in str(raised.value)


def test_defining_tools_imports_nothing_heavy() -> None:
    """The package root is left out: it imports whatever its users want at once."""
    probe = """
import sys, types
root = sys.modules["perdure"] = types.ModuleType("perdure")
root.__path__ = [sys.argv[1]]
import perdure.tools.define
print(*sorted({"asyncio", "pydantic", "logging", "pathlib"} & set(sys.modules)))
"""
    path = next(iter(perdure.__path__))

    found = subprocess.run([sys.executable, "-c", probe, path], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == ""
