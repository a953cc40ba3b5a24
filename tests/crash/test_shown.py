"""Kills around an update of a held turn: the event by which a command's first stderr opens it, the claim, the write of
what is to be shown, and the model that is shown it.

The kills are real: the command goes on without its worker. Fates are written by hand.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from perdure import Agent, ModelRequest, ModelResponse, ToolCall, ToolContext, Usage, tool
from perdure.ports.store import JobFolders, Store
from perdure.testing import FunctionModel
from perdure.testing.crash import Crash, ForkServer, Lab, Played
from tests.crash.inside import statements_of

COMMAND = "s.1.1.0.1"
SCRIPT = """
echo ran >> "$0"
while ! [ -e "$0.warn" ]; do sleep 0.01; done
echo careful >&2
while ! [ -e "$0.go" ]; do sleep 0.01; done
"""


def answer(request: ModelRequest) -> ModelResponse:
    last, usage = request.messages[-1], Usage(input=1, output=2)
    if last.role == "tool":
        return ModelResponse("I will wait", usage=usage)
    if "> careful" in last.text and "still runs" in last.text:
        return ModelResponse("I wait on", usage=usage)
    if "has ended: exited 0" in last.text:
        return ModelResponse("it is built", usage=usage)
    return ModelResponse("", [ToolCall("c", "build", {})], usage=usage)


async def left_memory(store: Store) -> bool:
    """The turn is parked, or further than that."""
    row = await store.session("s")
    return row is not None and (row.state == "parked" or row.head == 1 or await was_shown(store))


async def is_parked_again(store: Store) -> bool:
    """The model has answered to the update, and the turn is parked once more, or further than that."""
    row, command = await store.session("s"), await store.process(COMMAND)
    if row is None or command is None:
        return False
    return (row.state == "parked" and await was_shown(store)) or row.head == 1 or not command.live


async def was_shown(store: Store) -> bool:
    return await store.wait("s.1.3.0:process") is not None


async def shown(lab: Lab) -> None:
    assert isinstance(lab.store, JobFolders)
    marks = str(Path(lab.store.jobs_folder()).with_name("marks"))

    @tool(recovery="rerun")
    async def build(ctx: ToolContext[Any]) -> str:
        return (await ctx.command(["sh", "-c", SCRIPT, marks], owner="turn")).id

    agent = Agent(FunctionModel(answer), name="builder", tools=[build], wait_for_commands=900)
    async with lab.runtime([agent]) as runtime:
        receipt = await (await runtime.session("s")).send("make it", key="1")
        await lab.until(left_memory)
        Path(f"{marks}.warn").touch()
        await lab.until(is_parked_again)
        Path(f"{marks}.go").touch()
        await receipt.result()


class Fate(Struct, frozen=True):
    """How often the model was asked for each of its last three answers; calls of it whose usage nobody saw."""

    second: int = 1
    third: int = 1
    fourth: int = 1
    unknown: int = 0


CLEAN = Fate()
# No record says whether who had claimed the turn had asked the model already.
NOT_SEEN = Fate(unknown=1)
SHOWN_AGAIN = Fate(third=2, unknown=1)
ALARM, SHOW = f"advance {COMMAND}: held.stderr", "append 1: nothing, opening a wait"
HOLD, PARK = "append 1: replied 3, opening a wait", "append 1: nothing, parking #2"

SHOWN: dict[Crash, Fate] = {
    Crash(ALARM, "before"): CLEAN,
    Crash(ALARM, "lost"): CLEAN,
    Crash("claim", "lost"): NOT_SEEN,
    Crash(SHOW, "before"): NOT_SEEN,
    Crash(SHOW, "lost"): NOT_SEEN,
    Crash("ask model 1.3", "before"): NOT_SEEN,
    Crash("chunk 2 of model 1.3", "before"): SHOWN_AGAIN,
    Crash(HOLD, "before"): SHOWN_AGAIN,
    Crash(HOLD, "lost"): CLEAN,
    Crash(PARK, "before"): CLEAN,
    Crash(PARK, "lost"): CLEAN,
}


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(shown) as helper:
        yield helper


def check(played: Played, fate: Fate) -> None:
    [session], command = played.ending.sessions, played.ending.process(COMMAND)
    assert (played.problems, played.unreached) == ([], [])
    assert command is not None
    assert (command.outcome["value"]["stderr"], command.attempts, command.status) == ("careful\n", 1, "completed")
    assert (session.head, session.state, session.waiting, session.turns) == (1, "idle", [], {1: "finished"})
    assert [line for line in session.said if line.startswith("assistant: ")][1:] == [
        "assistant: I will wait",
        "assistant: I wait on",
        "assistant: it is built",
    ]
    assert [line.count("> careful") for line in session.said if line.startswith("user: [process commands]")] == [1, 1]
    asked = [line.key for line in played.ledger if line.name == "model"]
    second, third, fourth = (asked.count(f"s.1.{step}") for step in (2, 3, 4))
    assert Fate(second, third, fourth, session.unknown_usage) == fate


@pytest.mark.kill
@pytest.mark.parametrize("crash", SHOWN, ids=str)
def test_killed_here_a_held_turn_shows_its_model_the_first_stderr_once(forks: ForkServer, crash: Crash) -> None:
    check(forks.play([crash], shown), SHOWN[crash])


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize("write", [ALARM, SHOW])
def test_killed_inside_the_write_that_alarms_or_shows_it_is_shown_once(forks: ForkServer, write: str) -> None:
    """Before a statement of its transaction, the commit with them: the write has not happened."""
    for statement in statements_of(forks, shown, write):
        try:
            check(forks.play([statement], shown), SHOWN[Crash(write, "before")])
        except AssertionError as error:
            error.add_note(f"killed before {statement}")
            raise


@pytest.mark.kill
def test_every_point_between_the_park_and_the_next_one_has_a_ruling(forks: ForkServer) -> None:
    points = [point.name for point in forks.play([], shown).traces[0]]
    between = points[points.index(ALARM) : points.index(PARK) + 1]

    assert set(between) - {"chunk 1 of model 1.3"} == {crash.point for crash in SHOWN}
