"""What a step, a child and a handle are annotated to return is what they return: on the first run, on replay, after a
restart, and in another process."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import functools
import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

from perdure import ProcessContext, ToolContext, call, process, tool
from perdure.errors import InvalidDefinition, InvalidInput, InvalidProcess, NotRevived, ProcessFailed, StepFailed
from perdure.model.process import Failure
from perdure.model.record import Done
from tests.kit import Place, untyped
from tests.processes.functions import World, dying, journal_of, living, memory, parked, result, stuck

__all__ = ["memory"]

Ctx = ProcessContext[World]


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Row:
    day: datetime.date
    amount: decimal.Decimal


@dataclasses.dataclass
class Report:
    id: uuid.UUID
    rows: list[Row]
    colour: Colour = Colour.RED


class Point(msgspec.Struct):
    x: float


class Ticket(pydantic.BaseModel):
    title: str
    due: datetime.datetime


class Options(TypedDict):
    day: datetime.date


DAY = datetime.date(2026, 11, 16)
AT = datetime.datetime(2026, 11, 16, 9, tzinfo=datetime.UTC)
REPORT = Report(uuid.UUID(int=7), [Row(DAY, decimal.Decimal("1.10"))])


async def a_dataclass() -> Report:
    return REPORT


def a_struct() -> Point:
    return Point(1.5)


async def a_model() -> Ticket:
    return Ticket(title="a", due=AT)


async def a_typed_dict() -> Options:
    return {"day": DAY}


async def a_datetime() -> datetime.datetime:
    return AT


async def a_decimal() -> decimal.Decimal:
    return decimal.Decimal("0.10")


async def a_uuid() -> uuid.UUID:
    return uuid.UUID(int=1)


def an_enum() -> Colour:
    return Colour.RED


async def nested() -> dict[str, list[Report] | None]:
    return {"a": [REPORT], "b": None}


async def a_tuple() -> tuple[int, Row]:
    return 1, REPORT.rows[0]


RETURNING: dict[str, tuple[Any, Any]] = {
    "dataclass": (a_dataclass, REPORT),
    "struct": (a_struct, Point(1.5)),
    "model": (a_model, Ticket(title="a", due=AT)),
    "typed dict": (a_typed_dict, {"day": DAY}),
    "datetime": (a_datetime, AT),
    "decimal": (a_decimal, decimal.Decimal("0.10")),
    "uuid": (a_uuid, uuid.UUID(int=1)),
    "enum": (an_enum, Colour.RED),
    "nested": (nested, {"a": [REPORT], "b": None}),
    "tuple": (a_tuple, (1, REPORT.rows[0])),
    "class": (decimal.Decimal, decimal.Decimal(0)),
    "class with arguments": (functools.partial(Point, 2.5), Point(2.5)),
}

SEEN: list[Any] = []


@process
async def looking(ctx: Ctx, what: str) -> str:
    fn, _ = RETURNING[what]
    SEEN.append(await ctx.step(fn))
    await ctx.wait_signal("go")
    return type(SEEN[-1]).__name__


@pytest.mark.parametrize("what", RETURNING)
async def test_a_step_returns_its_annotated_type_on_the_first_run_and_on_replay(place: Place, what: str) -> None:
    SEEN.clear()
    expected = RETURNING[what][1]
    async with dying(place, looking) as runtime:
        await parked(await runtime.start(looking.call(what), id="p"))
    async with living(place, looking) as runtime:
        await runtime.handle("p").signal("go")

        assert await result(runtime.handle("p")) == type(expected).__name__
    assert [expected, expected] == SEEN
    assert [type(each) for each in SEEN] == [type(expected)] * 2


# Handles and children


@process
async def reporting(ctx: Ctx, day: datetime.date, times: int = 1) -> Report:
    report = await ctx.step(a_dataclass)
    return dataclasses.replace(report, rows=[Row(day, decimal.Decimal(times))])


@process
async def parent(ctx: Ctx) -> Row:
    child = await ctx.start(reporting.call(DAY, times=2))
    report = await child.result()
    await ctx.wait_signal("go")
    again = await ctx.result(child)
    assert report == again
    return report.rows[0]


async def test_a_handle_gives_what_the_function_returns_also_after_a_restart(place: Place) -> None:
    expected = Report(REPORT.id, [Row(DAY, decimal.Decimal(3))])
    async with living(place, reporting) as runtime:
        first = await (await runtime.start(reporting.call(DAY, 3), id="p")).result()
    async with living(place, reporting) as runtime:
        second = await runtime.handle("p", reporting).result()
        third = await (await runtime.start(reporting, {"day": "2026-11-16", "times": 3}, id="p")).result()
        plain = await runtime.handle("p").result()

    assert (first, second, third) == (expected, expected, expected)
    assert plain == {"id": str(REPORT.id), "rows": [{"day": "2026-11-16", "amount": "3"}], "colour": "red"}


async def test_a_child_gives_what_its_function_returns_on_the_first_run_and_on_replay(place: Place) -> None:
    async with dying(place, reporting, parent) as runtime:
        handle = await runtime.start(parent.call(), id="p")
        await parked(handle)
    async with living(place, reporting, parent) as runtime:
        await runtime.handle("p").signal("go")

        assert await runtime.handle("p", parent).result() == Row(DAY, decimal.Decimal(2))


ELSEWHERE = """
import asyncio, sys
from perdure import Runtime
from tests.processes.test_typed import reporting

async def main() -> None:
    async with Runtime(sys.argv[1], recover=False) as runtime:
        report = await runtime.handle("p", reporting).result(20)
        print(repr(report))

asyncio.run(main())
"""


@pytest.mark.slow
async def test_another_process_reads_the_result_by_the_same_annotation(file: Place) -> None:
    async with living(file, reporting) as runtime:
        await (await runtime.start(reporting.call(DAY), id="p")).result()
        store = runtime.store

    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(untyped(store).location)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )

    assert done.stdout.strip() == repr(Report(REPORT.id, [Row(DAY, decimal.Decimal(1))])), done.stderr


REPLAYED = """
import asyncio, json, sys
from perdure import Runtime
from tests.processes.test_typed import RETURNING, SEEN, looking

async def main() -> None:
    async with Runtime(sys.argv[1], processes=[looking]) as runtime:
        for what in RETURNING:
            await runtime.handle(what.replace(" ", "-")).signal("go")
            print(what, await runtime.handle(what.replace(" ", "-")).result(20), SEEN[-1] == RETURNING[what][1])

asyncio.run(main())
"""


@pytest.mark.slow
async def test_another_process_replays_every_type(file: Place) -> None:
    async with dying(file, looking) as runtime:
        location = str(untyped(runtime.store).location)
        for what in RETURNING:
            await parked(await runtime.start(looking.call(what), id=what.replace(" ", "-")))

    done = subprocess.run(
        [sys.executable, "-c", REPLAYED, location],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )

    expected = [f"{what} {type(value).__name__} True" for what, (_, value) in RETURNING.items()]
    assert done.stdout.splitlines() == expected, done.stderr


async def test_a_tool_that_starts_a_function_gets_its_type(memory: Place) -> None:
    from tests.kit import agent_calling

    found: list[Any] = []

    @tool
    async def report(ctx: ToolContext[Any]) -> str:
        handle = await ctx.start(reporting.call(DAY))
        found.append(await handle.result())
        return "done"

    async with memory.runtime(agent_calling("report", tools=[report]), processes=[reporting]) as runtime:
        await (await runtime.session("s")).run("go")

    assert found == [Report(REPORT.id, [Row(DAY, decimal.Decimal(1))])]


# Refused before anything runs


class Client:
    """A live object: nothing could make one of JSON."""


CONNECTED: list[str] = []


async def connect(to: str) -> Client:
    CONNECTED.append(to)
    return Client()


@process
async def connecting(ctx: Ctx) -> str:
    try:
        await ctx.step(connect, "db")
    except InvalidInput as error:
        return str(error)
    return "connected"


async def test_a_step_whose_type_cannot_be_brought_back_is_refused_before_its_body_runs(memory: Place) -> None:
    CONNECTED.clear()
    async with living(memory, connecting) as runtime:
        handle = await runtime.start(connecting)
        said = await result(handle)

        assert "step connect returns Client" in said
        assert await journal_of(runtime, handle) == []
    assert CONNECTED == []


async def test_a_function_whose_result_cannot_be_brought_back_is_refused_by_its_runtime(memory: Place) -> None:
    @process
    async def opening(ctx: Ctx) -> Client:
        return Client()

    with pytest.raises(InvalidDefinition, match=r"process 'opening' returns Client: .*cannot be brought back"):
        memory.runtime(processes=[opening])


@process
async def counting(ctx: Ctx, day: datetime.date, times: int = 1) -> int:
    return times


@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        ((), {}, "missing required field day"),
        ((DAY, 1, 2), {}, "it takes 2, not 3"),
        ((DAY,), {"day": DAY}, "'day' is given twice"),
        (("never",), {}, "invalid RFC3339"),
        ((DAY,), {"often": 2}, "unknown field often"),
    ],
    ids=str,
)
def test_a_call_of_a_function_is_refused_where_it_is_written(args: Any, kwargs: Any, problem: str) -> None:
    with pytest.raises(InvalidProcess, match=problem):
        untyped(counting).call(*args, **kwargs)


async def test_arguments_are_given_once(memory: Place) -> None:
    async with living(memory, counting) as runtime:
        with pytest.raises(InvalidProcess, match="has its arguments"):
            await runtime.start(untyped(counting.call(DAY)), {"times": 2})


# Options of a step


async def flaky(world: World, day: datetime.date) -> Row:
    world.begun.append(day)
    if len(world.begun) == 1:
        raise OSError("busy")
    return Row(day, decimal.Decimal(1))


async def test_a_call_with_options_is_a_step_with_the_same_type(memory: Place) -> None:
    world = World()

    @process
    async def trying(ctx: Ctx) -> Row:
        return await ctx.step(call(flaky, ctx.deps, day=DAY), retries=1, name="try it")

    async with living(memory, trying, deps=world) as runtime:
        handle = await runtime.start(trying)

        assert await result(handle) == Row(DAY, decimal.Decimal(1))
        assert {record.name for record in await journal_of(runtime, handle) if isinstance(record, Done)} == {"try it"}


async def test_a_call_takes_no_more_arguments_and_no_other_options(memory: Place) -> None:
    @process
    async def wrong(ctx: Ctx) -> list[str]:
        said = []
        for args in ((1,), ()):
            with pytest.raises((InvalidInput, TypeError)) as raised:
                await untyped(ctx).step(call(flaky, ctx.deps, DAY), *args, **({} if args else {"retry": 1}))
            said.append(str(raised.value))
        return said

    async with living(memory, wrong, deps=World()) as runtime:
        first, second = await result(await runtime.start(wrong))

    assert "has its arguments" in first
    assert "has its arguments" in second


# Values that do not fit


async def lying(world: World) -> Report:
    world.done.append("lied")
    return untyped({"id": "nonsense"})


@process
async def believing(ctx: Ctx) -> list[str]:
    try:
        await ctx.step(lying, ctx.deps)
    except StepFailed as error:
        said = [error.fault, error.message, json.dumps(error.data)]
        await ctx.wait_signal("go")
        return said
    return []


async def test_a_value_that_does_not_fit_is_recorded_and_raises_at_its_line_in_both_runs(place: Place) -> None:
    world = World()
    async with dying(place, believing, deps=world) as runtime:
        handle = await runtime.start(believing, id="p")
        await parked(handle)
        done = [record for record in await journal_of(runtime, handle) if isinstance(record, Done)]
    async with living(place, believing, deps=world) as runtime:
        await runtime.handle("p").signal("go")
        fault, message, data = await result(runtime.handle("p"))

    assert world.done == ["lied"]
    assert (fault, json.loads(data)) == ("invalid_output", {"id": "nonsense"})
    assert "does not fit its annotation Report" in message
    assert done[0].fault is not None
    assert done[0].fault.message == message


async def test_a_result_that_does_not_fit_fails_the_process_with_the_value(memory: Place) -> None:
    @process
    async def boasting(ctx: Ctx) -> int:
        return untyped("many")

    async with living(memory, boasting) as runtime:
        handle = await runtime.start(boasting)
        with pytest.raises(ProcessFailed, match="does not fit its annotation int"):
            await handle.result()
        outcome = await handle.outcome()

    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.data) == ("invalid_output", "many")


# Records that today's annotation does not take


@dataclasses.dataclass
class Old:
    name: str


@dataclasses.dataclass
class New:
    name: str
    colour: str


def changing(kind: Any) -> Any:
    """A function whose step returned `Old` when it was begun, and is annotated with another type since."""

    async def find() -> Any:
        return Old("it")

    find.__annotations__["return"] = kind

    @process(name="changing")
    async def function(ctx: Ctx) -> str:
        found = await ctx.step(find)
        await ctx.wait_signal("go")
        return repr(found)

    return function


@pytest.mark.parametrize("kind", [New, int, Client], ids=lambda kind: kind.__name__)
async def test_a_record_that_cannot_be_revived_leaves_the_process_stuck_until_the_code_can(
    place: Place, kind: Any
) -> None:
    async with dying(place, changing(Old)) as runtime:
        await parked(await runtime.start("changing", id="p"))
    async with living(place, changing(kind)) as runtime:
        await runtime.handle("p").signal("go")
        why = await stuck(runtime.handle("p"))
        state = await runtime.handle("p").status()
    async with living(place, changing(Old)) as runtime:
        await runtime.processes.resume("p")

        assert await result(runtime.handle("p")) == "Old(name='it')"
    assert kind.__name__ in why
    assert state == "stuck"


async def test_a_host_is_told_when_a_result_is_not_of_todays_type(memory: Place) -> None:
    def returning(kind: Any) -> Any:
        async def function(ctx: Ctx) -> Any:
            return Old("it")

        function.__annotations__["return"] = kind
        return process(name="old")(function)

    old, new = returning(Old), returning(New)
    async with living(memory, old) as runtime:
        handle = await runtime.start(old, id="p")

        assert await handle.result() == Old("it")
        with pytest.raises(NotRevived, match="its result as New"):
            await runtime.handle("p", new).result()


# Progress


async def test_a_handle_tells_progress_and_state(memory: Place) -> None:
    @process
    async def slow(ctx: Ctx) -> None:
        ctx.progress({"done": 3})
        await ctx.step(ctx.deps.act, "a")
        await ctx.wait_signal("go")

    async with living(memory, slow, deps=World()) as runtime:
        handle = await runtime.start(slow)
        await parked(handle)

        assert await handle.progress() == {"done": 3}
        assert await handle.status() == "waiting"
