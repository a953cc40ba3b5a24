"""Wrong arguments to the verbs of processes: a typed error, nothing written, and the store opens again."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import ProcessContext, Runtime, process
from perdure.errors import InvalidInput, UnknownProcess
from tests.kit import SOON, Place, untyped

WRONG: Any = 5
NAN = float("nan")
HUGE = 10**5000


class Job(str, enum.Enum):  # noqa: UP042  # users write this, and `format` shows its name
    NIGHTLY = "nightly"


class Loud(str):
    def __str__(self) -> str:
        return "LOUD"


@process
async def quick(ctx: ProcessContext, n: int = 1) -> int:
    return n


async def first_of(events: Any) -> object:
    async for event in events:
        return event
    return None


Ask = Callable[[Runtime], Awaitable[object]]

ASKED: dict[str, Ask] = {
    "what to start": lambda runtime: runtime.start(HUGE),
    "an id": lambda runtime: runtime.start(quick, id=untyped(HUGE)),
    "a label": lambda runtime: runtime.start(quick, label=WRONG),
    "an id to get": lambda runtime: runtime.processes.get(untyped(["ext"])),
    "an id that is no text": lambda runtime: runtime.processes.get("\ud800"),
    "an id to wait for": lambda runtime: runtime.processes.outcome(untyped({}), 0),
    "a time": lambda runtime: runtime.processes.outcome("ext", untyped("soon")),
    "a time that no timer can count": lambda runtime: runtime.processes.outcome("ext", HUGE),
    "an id to signal": lambda runtime: runtime.processes.signal(untyped(["ext"]), "go"),
    "an empty key of another kind": lambda runtime: runtime.processes.signal("ext", "go", key=untyped([])),
    "an id to cancel": lambda runtime: runtime.processes.cancel(untyped({"ext"})),
    "the id of events": lambda runtime: first_of(runtime.processes.events(untyped(["ext"]))),
    "where events begin": lambda runtime: first_of(runtime.processes.events("ext", untyped("1"))),
    "statuses": lambda runtime: runtime.processes.list(WRONG),
    "a status in a list": lambda runtime: runtime.processes.list([untyped(["running"])]),
    "how many": lambda runtime: runtime.processes.list(limit=untyped(None)),
    "fewer than none": lambda runtime: runtime.processes.list(limit=-1),
    "more than a store can count": lambda runtime: runtime.processes.list(limit=2**70),
    "a kind": lambda runtime: runtime.processes.list(kind=WRONG),
    "a name that is no text": lambda runtime: runtime.processes.list(name="\ud800"),
    "whose": lambda runtime: runtime.processes.list(session_id=["s"]),
    "whether they live": lambda runtime: runtime.processes.list(live="yes"),
    "before what": lambda runtime: runtime.processes.list(before="3"),
    "before what is not a number": lambda runtime: runtime.processes.list(before=NAN),
    "a cursor": lambda runtime: runtime.processes.changes(untyped("0")),
    "a cursor below none": lambda runtime: runtime.processes.changes(-1),
    "how many changes": lambda runtime: runtime.processes.changes(0, untyped(None)),
    "an id to register": lambda runtime: runtime.processes.register(untyped(object())),
    "letters for signals": lambda runtime: runtime.processes.register("r", signals="stop"),
    "signals": lambda runtime: runtime.processes.register("r", signals=WRONG),
    "a signal": lambda runtime: runtime.processes.register("r", signals=[untyped(1)]),
    "letters for grants": lambda runtime: runtime.processes.register("r", grants="s"),
    "a grant": lambda runtime: runtime.processes.register("r", grants=[untyped(None)]),
    "events": lambda runtime: runtime.processes.register("r", events=WRONG),
    "an authority": lambda runtime: runtime.processes.complete("ext", 1, authority=WRONG),
    "an empty authority of another kind": lambda runtime: runtime.processes.complete("ext", 1, authority=untyped("")),
    "a session to grant to": lambda runtime: runtime.processes.grant(WRONG, "ext"),
    "no session to grant to": lambda runtime: runtime.processes.grant(untyped(None), "ext"),
    "a session to revoke from": lambda runtime: runtime.processes.revoke(untyped(["s"]), "ext"),
    "a session to transfer from": lambda runtime: runtime.processes.transfer(untyped(["s"]), "t", "ext"),
    "wakes of a session": lambda runtime: runtime.processes.wakes(session_id=untyped(["s"])),
    "wakes in a state": lambda runtime: runtime.processes.wakes(untyped(HUGE)),
    "a wake to discard": lambda runtime: runtime.processes.discard(untyped("1"), reason="old"),
    "a wake to bring back": lambda runtime: runtime.processes.redrive(untyped([1])),
    "an age without end": lambda runtime: runtime.processes.prune(float("inf")),
    "statuses to prune": lambda runtime: runtime.processes.prune(0, status=WRONG),
    "a living status to prune": lambda runtime: runtime.processes.prune(0, status=["running"]),
    "a status to prune in a list": lambda runtime: runtime.processes.prune(0, status=[untyped(["completed"])]),
    "a watermark": lambda runtime: runtime.processes.prune(0, watermark=untyped("3")),
}


@pytest.mark.parametrize("what", ASKED)
async def test_a_wrong_argument_is_refused_and_nothing_is_written(place: Place, what: str) -> None:
    async with place.runtime(processes=[quick]) as runtime:
        await runtime.processes.register("ext", signals=["go"])
        before = await runtime.processes.changes()

        with pytest.raises(InvalidInput):
            await ASKED[what](runtime)

        assert await runtime.processes.changes() == before
    async with place.runtime(processes=[quick]) as runtime:
        assert [row.id for row in await runtime.processes.list()] == ["ext"]
        handle = await runtime.start(quick, {"n": 3})
        assert await asyncio.wait_for(handle.result(), SOON) == 3


@pytest.mark.parametrize("name", [Job.NIGHTLY, Loud("nightly")], ids=["an enum", "a subclass"])
async def test_a_kind_of_string_names_the_process_of_its_value(place: Place, name: str) -> None:
    """Not of what `format` makes of it: a row whose key and content differ is a damaged one."""
    async with place.runtime(processes=[quick]) as runtime:
        assert await asyncio.wait_for((await runtime.start(quick, {"n": 2}, id=name)).result(), SOON) == 2
    async with place.runtime(processes=[quick]) as runtime:
        assert await asyncio.wait_for(runtime.handle("nightly").result(), SOON) == 2
        assert (await runtime.processes.get(name)).id == "nightly"


async def test_an_id_of_no_process_is_unknown(place: Place) -> None:
    async with place.runtime(processes=[quick]) as runtime:
        for asking in (runtime.processes.get, runtime.processes.cancel, runtime.processes.outcome):
            with pytest.raises(UnknownProcess):
                await asking("nobody")
