"""Values go to JSON and come back by their type; types and values that would not are refused by name."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import pathlib
import uuid
import zoneinfo
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar

import msgspec
import pydantic
import pytest

from perdure import tool
from perdure.errors import InvalidDefinition
from perdure.model.codec import decode, encode
from perdure.tools.define import returns_codec
from perdure.tools.revive import value_codec

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForCheckers

T = TypeVar("T")
Cents = NewType("Cents", int)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Row:
    day: datetime.date
    amount: decimal.Decimal


@dataclasses.dataclass(frozen=True)
class Report:
    id: uuid.UUID
    rows: list[Row]
    colour: Colour = Colour.RED
    by_day: dict[datetime.date, Row] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Page(Generic[T]):
    items: list[T]
    next: int | None = None


class Point(msgspec.Struct, frozen=True):
    x: float
    y: float


class Circle(msgspec.Struct, tag=True):
    radius: float


class Square(msgspec.Struct, tag=True):
    side: float


class Ticket(pydantic.BaseModel):
    title: str
    due: datetime.datetime


class Aliased(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(populate_by_name=True)
    n: int = pydantic.Field(alias="number")


@dataclasses.dataclass
class Holder:
    """A dataclass with a Pydantic model in it."""

    ticket: Ticket


class Options(TypedDict):
    name: str
    day: datetime.date


class Pair(NamedTuple):
    left: int
    right: str


DAY = datetime.date(2026, 11, 16)
AT = datetime.datetime(2026, 11, 16, 9, 30, tzinfo=datetime.UTC)
REPORT = Report(uuid.UUID(int=7), [Row(DAY, decimal.Decimal("1.10"))], Colour.BLUE, {DAY: Row(DAY, decimal.Decimal(2))})

VALUES: list[tuple[Any, Any]] = [
    (str, "text"),
    (int, 5),
    (int, 2**80),
    (float, 1.5),
    (float, float("inf")),
    (bool, True),
    (None, None),
    (bytes, b"\x00\xff"),
    (datetime.datetime, AT),
    (datetime.datetime, AT.replace(tzinfo=None)),
    (datetime.date, DAY),
    (datetime.time, datetime.time(9, 30)),
    (datetime.timedelta, datetime.timedelta(days=1, seconds=2)),
    (decimal.Decimal, decimal.Decimal("0.10")),
    (uuid.UUID, uuid.UUID(int=1)),
    (Colour, Colour.RED),
    (Level, Level.LOW),
    (pathlib.Path, pathlib.Path("a/b")),
    (Row, Row(DAY, decimal.Decimal("1.10"))),
    (Report, REPORT),
    (Page[Row], Page([Row(DAY, decimal.Decimal(1))], 2)),
    (Page[Ticket], Page([Ticket(title="a", due=AT)])),
    (Point, Point(1.0, 2.0)),
    (Circle | Square, Square(2.0)),
    (Ticket, Ticket(title="a", due=AT)),
    (Aliased, Aliased(number=3)),
    (Holder, Holder(Ticket(title="a", due=AT))),
    (Ticket | Point, Point(1.0, 2.0)),
    (Options, {"name": "a", "day": DAY}),
    (Pair, Pair(1, "a")),
    (tuple[int, str], (1, "a")),
    (tuple[Row, ...], (Row(DAY, decimal.Decimal(1)),)),
    (list[Report], [REPORT]),
    (set[int], {1, 2}),
    (frozenset[str], frozenset({"a"})),
    (dict[int, datetime.date], {1: DAY}),
    (Mapping[str, Row], {"a": Row(DAY, decimal.Decimal(1))}),
    (Sequence[uuid.UUID], [uuid.UUID(int=1)]),
    (Row | None, None),
    (Row | None, Row(DAY, decimal.Decimal(1))),
    (int | str, "5"),
    (datetime.date | int, DAY),
    (Literal["a", "b"], "b"),
    (Cents, Cents(5)),
    (Annotated[int, msgspec.Meta(ge=1)], 5),
    (list[Any], [1, {"a": None}]),
]


@pytest.mark.parametrize(("kind", "value"), VALUES, ids=str)
def test_a_value_comes_back_from_its_stored_json_as_it_was(kind: Any, value: Any) -> None:
    codec = value_codec(kind)

    back = codec.from_json(decode(encode(codec.store(value))))

    assert back == value
    assert type(back) is type(value)


def test_not_a_number_comes_back_too() -> None:
    back = value_codec(list[float]).from_json(value_codec(list[float]).store([float("nan"), 1.0]))

    assert back[0] != back[0]
    assert back[1] == 1.0


@dataclasses.dataclass(eq=False)
class Unequal:
    n: int


@dataclasses.dataclass(eq=False)
class Incomparable:
    n: int

    def __eq__(self, other: object) -> bool:
        raise LookupError("not with that")

    def __hash__(self) -> int:
        return self.n


BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("kind", "given", "json"),
    [
        (Row, {"day": "2026-11-16", "amount": "1"}, {"day": "2026-11-16", "amount": "1"}),
        (Report, {"id": str(uuid.UUID(int=1)), "rows": []}, {"id": str(uuid.UUID(int=1)), "rows": []}),
        (list[int], (1, 2), [1, 2]),
        (set[int], [2, 1], [2, 1]),
        (dict[str, Any], {"a": decimal.Decimal("1.0"), "b": {1: DAY}}, {"a": "1.0", "b": {"1": "2026-11-16"}}),
        (list[Unequal], [Unequal(1)], [{"n": 1}]),
        (Incomparable, Incomparable(1), {"n": 1}),
        (list[float], [float("nan")], ["NaN"]),
        (float, 1, 1),
        (decimal.Decimal, 5, 5),
        (str, "\ud800", "\ufffd"),
        (
            datetime.datetime,
            datetime.datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1),
            "2026-10-25T02:30:00+01:00",
        ),
    ],
    ids=str,
)
def test_a_value_of_which_nothing_is_lost_is_taken_though_it_is_not_equal(kind: Any, given: Any, json: Any) -> None:
    assert value_codec(kind).store(given) == json


def test_a_bool_is_an_int_where_an_int_is_declared() -> None:
    back = value_codec(int).from_json(value_codec(int).store(True))

    assert (back, type(back)) == (1, int)


class Client:
    """No data: nothing could make one of JSON."""


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (Client, "Client"),
        (list[Client], "Client"),
        (Page[Client], "Client"),
        (Client | None, "Client"),
        (complex, "complex"),
        (Iterator[int], "Iterator"),
        (Callable[[], int], "Callable"),
        (type, "type"),
        (T, "~T"),
        (list[T], "~T"),  # type: ignore[valid-type]  # that is the point
    ],
    ids=str,
)
def test_a_type_without_a_way_back_is_refused_by_its_name(kind: Any, named: str) -> None:
    with pytest.raises(InvalidDefinition, match="cannot be brought back from JSON") as raised:
        value_codec(kind)

    assert named in str(raised.value)


@dataclasses.dataclass
class Dated(Row):
    """What a function may return that is annotated with `Row`."""

    seen: bool = False


class Urgent(Ticket):
    level: int


class Point3(Point, frozen=True):
    z: float


@dataclasses.dataclass
class Growing:
    """Makes something else of what it is given, each time."""

    names: list[str]

    def __post_init__(self) -> None:
        self.names = [*self.names, "x"]


class Shouting(pydantic.BaseModel):
    text: str

    @pydantic.field_validator("text")
    @classmethod
    def shout(cls, value: str) -> str:
        return f"{value}!"


@dataclasses.dataclass
class Left:
    n: int


@dataclasses.dataclass
class Right:
    n: int


@pytest.mark.parametrize(
    ("kind", "value", "fault"),
    [
        (int, "5", "expected int, got '5'"),
        (str, 5, "$: expected str, got int"),
        (None, 5, "$: expected null, got int"),
        (Row, {"day": "2026-11-16"}, "$: object missing required field amount"),
        (Row, {"day": "never", "amount": 1}, "$.day: invalid RFC3339 encoded date"),
        (list[Row], [None], "$[0]: expected object, got null"),
        (Ticket, {"title": 5}, "$.title: Input should be a valid string"),
        (Left | Right, Right(1), "a Right would come back as Left(n=1)"),
        (str | datetime.date, DAY, "a date would come back as '2026-11-16'"),
        (Row, Dated(DAY, decimal.Decimal(1), seen=True), "a Dated would come back as Row("),
        (Row | None, Dated(DAY, decimal.Decimal(1)), "a Dated would come back as Row("),
        (list[Row], [Row(DAY, decimal.Decimal(1)), Dated(DAY, decimal.Decimal(1))], "a Dated would come back as Row("),
        (dict[str, Ticket], {"a": Urgent(title="a", due=AT, level=1)}, "a Urgent would come back as Ticket("),
        (Page[Row], Page([Dated(DAY, decimal.Decimal(1))]), "a Page would come back as Page("),
        (Point, Point3(1.0, 2.0, 3.0), "a Point3 would come back as Point("),
        (Options, {"name": "a", "day": DAY, "more": 1}, "a dict would come back as {'name'"),
        (Growing, Growing(["a"]), "a Growing would come back as Growing(names=['a', 'x', 'x'])"),
        (list[Shouting], [Shouting(text="a")], "a Shouting would come back as Shouting(text='a!!')"),
        (list[Left | Right], [Left(1), Right(1)], "a Right would come back as Left(n=1)"),
        (dict[str, str | datetime.date], {"a": DAY}, "a date would come back as '2026-11-16'"),
    ],
    ids=str,
)
def test_a_value_that_would_not_come_back_is_refused(kind: Any, value: Any, fault: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is compared below
        value_codec(kind).store(value)

    assert str(raised.value).startswith(fault)


# Functions


def later() -> Below:
    raise NotImplementedError


@dataclasses.dataclass
class Below:
    """Written after the function that returns it."""

    n: int


async def coroutine() -> Row:
    raise NotImplementedError


def returns_a_coroutine() -> Coroutine[Any, Any, Row]:
    raise NotImplementedError


def returns_an_awaitable() -> Awaitable[Row]:
    raise NotImplementedError


@tool
def decorated() -> Row:
    raise NotImplementedError


class Bank:
    def balance(self) -> Row:
        raise NotImplementedError

    def __call__(self) -> Row:
        raise NotImplementedError


@pytest.mark.parametrize(
    "fn",
    [coroutine, returns_a_coroutine, returns_an_awaitable, decorated, Bank().balance, Bank(), Row, partial(Row, DAY)],
    ids=lambda fn: getattr(fn, "__name__", type(fn).__name__),
)
def test_the_annotation_of_any_callable_is_found(fn: Any) -> None:
    codec = returns_codec(fn, "step it")

    assert codec is not None
    assert codec.kind is Row


def test_an_annotation_may_name_what_is_written_below_or_in_a_function() -> None:
    @dataclasses.dataclass
    class Local:
        n: int

    def local() -> list[Local]:
        return [Local(1)]

    below, inside = returns_codec(later, "step later"), returns_codec(local, "step local")

    assert below is not None
    assert below.kind is Below
    assert inside is not None
    assert inside.from_json([{"n": 1}]) == [Local(1)]


@pytest.mark.parametrize("fn", [print, len, lambda: 1, dict.get], ids=["print", "len", "lambda", "dict.get"])
def test_what_has_no_annotation_is_json(fn: Any) -> None:
    assert returns_codec(fn, "step it") is None


def test_a_class_that_cannot_be_brought_back_is_refused() -> None:
    with pytest.raises(InvalidDefinition, match=r"step open returns Client: .* cannot be brought back"):
        returns_codec(Client, "step open")


def test_any_and_object_are_json() -> None:
    def anything() -> Any:
        raise NotImplementedError

    def some() -> object:
        raise NotImplementedError

    assert returns_codec(anything, "step it") is None
    assert returns_codec(some, "step it") is None


def test_a_function_is_refused_with_its_name_and_type() -> None:
    def connect() -> Client:
        raise NotImplementedError

    def hidden() -> OnlyForCheckers:
        raise NotImplementedError

    with pytest.raises(InvalidDefinition, match=r"step connect returns Client: .* cannot be brought back"):
        returns_codec(connect, "step connect")
    with pytest.raises(
        InvalidDefinition, match=r"step hidden, what it returns: .*OnlyForCheckers.* cannot be resolved"
    ):
        returns_codec(hidden, "step hidden")
