"""Kills around a turn that is held for a command: before, inside and after the writes that hold it and park it, at the
end of the command, the claim, and the model that is told.

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
SCRIPT = 'echo ran >> "$0"; while ! [ -e "$0.go" ]; do sleep 0.01; done; exec cat "$0"'


def answer(request: ModelRequest) -> ModelResponse:
    last, usage = request.messages[-1], Usage(input=1, output=2)
    if last.role == "tool":
        return ModelResponse("I will wait", usage=usage)
    if "has ended: exited 0" in last.text:
        return ModelResponse("it is built", usage=usage)
    return ModelResponse("", [ToolCall("c", "build", {})], usage=usage)


async def has_begun(store: Store) -> bool:
    row = await store.process(COMMAND)
    return row is not None and (not row.live or "pid" in (row.record.external_ref or {}))


async def left_memory(store: Store) -> bool:
    """The turn is parked, or further than that."""
    row, command = await store.session("s"), await store.process(COMMAND)
    if row is None or command is None:
        return False
    return row.state == "parked" or row.head == 1 or not command.live


async def held(lab: Lab) -> None:
    assert isinstance(lab.store, JobFolders)
    marks = str(Path(lab.store.jobs_folder()).with_name("marks"))

    @tool(recovery="rerun")
    async def build(ctx: ToolContext[Any]) -> str:
        command = await ctx.command(["sh", "-c", SCRIPT, marks], owner="turn")
        await lab.until(has_begun)  # so that the command writes nothing more until it may end
        return command.id

    agent = Agent(FunctionModel(answer), name="builder", tools=[build], wait_for_commands=900)
    async with lab.runtime([agent]) as runtime:
        receipt = await (await runtime.session("s")).send("make it", key="1")
        await lab.until(left_memory)
        Path(f"{marks}.go").touch()
        await receipt.result()


class Fate(Struct, frozen=True):
    """How often the model was asked for each of three answers; calls of it whose usage nobody saw."""

    first: int = 1
    second: int = 1
    third: int = 1
    unknown: int = 0


CLEAN = Fate()
WAITS_AGAIN = Fate(second=2, unknown=1)
# No record says whether who had claimed the turn had asked the model already.
NOT_SEEN = Fate(unknown=1)
TOLD_AGAIN = Fate(third=2, unknown=1)
HOLD, PARK = "append 1: replied 2, opening a wait", "append 1: nothing, parking"

HELD: dict[Crash, Fate] = {
    Crash("chunk 2 of model 1.2", "before"): WAITS_AGAIN,
    Crash(HOLD, "before"): WAITS_AGAIN,
    Crash(HOLD, "lost"): CLEAN,
    Crash(PARK, "before"): CLEAN,
    Crash(PARK, "lost"): CLEAN,
    Crash(f"advance {COMMAND}: ending", "before"): CLEAN,
    Crash(f"advance {COMMAND}: ending", "lost"): CLEAN,
    Crash("claim", "before"): CLEAN,
    Crash("claim", "lost"): NOT_SEEN,
    Crash("ask model 1.3", "before"): NOT_SEEN,
    Crash("chunk 2 of model 1.3", "before"): TOLD_AGAIN,
    Crash("commit 1", "before"): TOLD_AGAIN,
    Crash("commit 1", "lost"): CLEAN,
}
BEFORE = {
    "beat", "accept queue", "ask model 1.1", "chunk 1 of model 1.1", "append 1: replied 1", "begin build 1.1.0",
    f"register {COMMAND}", f"advance {COMMAND}: process.external_ref_set", "end build 1.1.0", "append 1: ended 1.0",
    "ask model 1.2", "chunk 1 of model 1.2", "chunk 1 of model 1.3", "retire",
}  # fmt: skip
"""Points of any turn with a command, which have their rulings elsewhere."""


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(held) as helper:
        yield helper


def check(played: Played, fate: Fate) -> None:
    [session], command = played.ending.sessions, played.ending.process(COMMAND)
    assert (played.problems, played.unreached) == ([], [])
    assert command is not None
    assert (command.outcome["value"]["stdout"], command.attempts, command.status) == ("ran\n", 1, "completed")
    assert (session.head, session.state, session.waiting, session.turns) == (1, "idle", [], {1: "finished"})
    assert [line.partition("]")[0] for line in session.said[3:]] == [
        "assistant: I will wait",
        "user: [process commands",
        "assistant: it is built",
    ]
    asked = [line.key for line in played.ledger if line.name == "model"]
    first, second, third = (asked.count(f"s.1.{step}") for step in (1, 2, 3))
    assert Fate(first, second, third, session.unknown_usage) == fate


@pytest.mark.kill
@pytest.mark.parametrize("crash", HELD, ids=str)
def test_killed_here_a_held_turn_tells_its_model_once_of_the_end(forks: ForkServer, crash: Crash) -> None:
    check(forks.play([crash], held), HELD[crash])


@pytest.mark.kill
def test_a_held_turn_is_killed_at_the_hold_and_again_at_its_park(forks: ForkServer) -> None:
    check(forks.play([Crash(HOLD, "lost"), Crash(PARK, "lost")], held), CLEAN)


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize("write", [HOLD, PARK])
def test_killed_inside_the_write_that_holds_or_parks_it_a_turn_is_held_again(forks: ForkServer, write: str) -> None:
    """Before a statement of its transaction, the commit with them: the write has not happened."""
    for statement in statements_of(forks, held, write):
        try:
            check(forks.play([statement], held), HELD[Crash(write, "before")])
        except AssertionError as error:
            error.add_note(f"killed before {statement}")
            raise


@pytest.mark.kill
def test_every_point_of_a_held_turn_has_a_ruling(forks: ForkServer) -> None:
    points = {point.name for point in forks.play([], held).traces[0]}

    assert points - BEFORE == {crash.point for crash in HELD}
