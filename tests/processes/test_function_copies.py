"""The arguments of a step: its own copies from the first run on, so that no replay sees other values."""

from __future__ import annotations

import collections
import datetime
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import pydantic
import pytest

from perdure import ProcessContext, process
from perdure.processes.function.calls import copied
from tests.kit import Place
from tests.processes.functions import World, living, parked, result

Ctx = ProcessContext[World]


def sort_in_place(rows: list[int]) -> int:
    rows.sort()
    return rows[0]


@process
async def sorting(ctx: Ctx) -> list[Any]:
    rows = [3, 1, 2]
    smallest = await ctx.step(sort_in_place, rows)
    written = await ctx.step(list[int], rows)  # diverges on replay if the first run had it sorted
    await ctx.wait_signal("go")
    return [smallest, written, rows]


async def test_what_a_step_changes_in_its_arguments_is_lost_on_the_first_run_as_on_every_replay(place: Place) -> None:
    async with living(place, sorting) as runtime:
        handle = await runtime.start(sorting)
        await parked(handle)
        await handle.signal("go")

        assert await result(handle) == [1, [3, 1, 2], [3, 1, 2]]


async def test_every_attempt_of_a_step_gets_arguments_that_nobody_has_changed(place: Place) -> None:
    seen: list[list[int]] = []

    def flaky(rows: list[int], *, more: dict[str, int]) -> int:
        seen.append([*rows, *more.values()])
        rows.append(9)
        more["x"] = 9
        if len(seen) < 2:
            raise ConnectionError
        return len(rows)

    @process
    async def trying(ctx: Ctx) -> int:
        return await ctx.step(flaky, [1], more={"x": 1}, retries=1)

    async with living(place, trying) as runtime:
        assert await result(await runtime.start(trying)) == 2
    assert seen == [[1, 1], [1, 1]]


async def test_arguments_are_those_of_the_call_though_another_branch_changes_them_later(place: Place) -> None:
    @process
    async def two(ctx: Ctx) -> list[Any]:
        rows = [1]

        async def meddle() -> None:
            rows.append(2)

        found, _ = await ctx.gather(ctx.step(sum, rows), meddle())
        return [found, rows]

    async with living(place, two) as runtime:
        assert await result(await runtime.start(two)) == [1, [1, 2]]


async def test_live_objects_are_passed_as_they_are(place: Place) -> None:
    @process
    async def acting(ctx: Ctx) -> None:
        def act(world: World, pair: list[World]) -> None:
            world.done.append(pair[0] is world)

        await ctx.step(act, ctx.deps, [ctx.deps])

    world = World()
    async with living(place, acting, deps=world) as runtime:
        await result(await runtime.start(acting))
    assert world.done == [True]


# ---------------------------------------------------------------------- what is copied


@dataclass
class Order:
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sealed:
    lines: list[str] = field(default_factory=list)


class Row(msgspec.Struct):
    cells: list[int]


class Model(pydantic.BaseModel):
    tags: list[str]


class Pair(NamedTuple):
    left: list[int]
    right: int


class Array:
    """Says itself how it is copied, as arrays and data frames do."""

    def __init__(self, cells: list[int]) -> None:
        self.cells = cells

    def __deepcopy__(self, memo: dict[int, Any]) -> Array:
        return Array(list(self.cells))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Array) and other.cells == self.cells

    __hash__ = None  # type: ignore[assignment]  # it is equal by its cells, which change


VALUES = [
    [1, [2]],
    {"a": {"b": [1]}},
    (1, [2]),
    {1, 2},
    bytearray(b"xy"),
    collections.OrderedDict(a=[1]),
    collections.defaultdict(list, a=[1]),
    collections.deque([[1]], maxlen=3),
    collections.Counter("aab"),
    Order(["a"]),
    Sealed(["a"]),
    Row([1]),
    Model(tags=["a"]),
    Pair([1], 2),
    Array([1]),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda each: type(each).__name__)
def test_data_is_copied_and_keeps_its_type(value: Any) -> None:
    made = copied(value)

    assert made == value
    assert type(made) is type(value)
    assert made is not value


def test_what_is_inside_is_copied_too() -> None:
    order, pair, model = Order(["a"]), Pair([1], 2), Model(tags=["a"])
    made = copied([order, pair, model, {"k": [1]}])
    made[0].lines.append("b")
    made[1].left.append(2)
    made[2].tags.append("b")
    made[3]["k"].append(2)

    assert (order, pair, model) == (Order(["a"]), Pair([1], 2), Model(tags=["a"]))


class Client:
    def __init__(self) -> None:
        self.calls = 0

    def call(self) -> None:
        self.calls += 1


@dataclass
class Deps:
    client: Client
    names: list[str]


LIVE: list[Any] = [
    Client(),
    Deps(Client(), ["a"]),
    open,
    Client().call,
    datetime.date(2026, 11, 16),
    "text",
    1,
    None,
    Order,
]


@pytest.mark.parametrize("value", LIVE, ids=lambda each: type(each).__name__)
def test_what_is_alive_or_cannot_change_is_the_same_object(value: Any) -> None:
    assert copied(value) is value


def test_a_list_of_live_objects_is_a_list_of_its_own() -> None:
    clients = [Client()]
    made = copied(clients)

    assert made is not clients
    assert made[0] is clients[0]


def test_what_is_given_twice_is_one_thing_and_what_holds_itself_is_copied_too() -> None:
    rows: list[Any] = [1]
    rows.append(rows)
    one, two = copied([rows, rows])

    assert one is two
    assert one is not rows
    assert one[1] is one


def test_data_whose_copy_fails_is_passed_as_it_is() -> None:
    @dataclass
    class Stubborn:
        lines: list[str]

        def __deepcopy__(self, memo: dict[int, Any]) -> Stubborn:
            raise TypeError("not me")

    value = Stubborn(["a"])

    assert copied(value) is value
