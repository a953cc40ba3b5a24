"""A blob is swept at the worst instant, between its put and the write that refers to it: nobody notices."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from perdure import Agent, Runtime, ToolCall, TurnResult, tool
from perdure.errors import BlobMissing
from perdure.model.codec import spilled
from perdure.model.outcome import Finished
from perdure.model.record import Spilled
from perdure.model.tool import BlobRef, Ok, OutcomeUnknown
from perdure.model.write import Write
from perdure.ports.store import Store
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.testing import ScriptedModel
from perdure.testing.crash.injection import FaultInjector, InstrumentedStore, name_of

ROOT = Path(__file__).parents[2]
R = TypeVar("R")

SOON = 60

INPUT, OUTPUT, ANSWER = "question " * 10_000, "figures\n" * 9_000, "answer " * 12_000
"""Each too large for a row."""


class SweptFirst(InstrumentedStore):
    """Has somebody sweep just before each write that refers to blobs, or so many `times` before `only` this one."""

    def __init__(self, inner: Store, sweep: Callable[[], Awaitable[int]], only: str = "", times: int = 1) -> None:
        super().__init__(inner, FaultInjector())
        self._sweep, self._only, self._times = sweep, only, times
        self._met: Counter[str] = Counter()
        self.swept = 0
        self.refused: list[str] = []

    async def write(self, write: Write[R]) -> R:
        name = name_of(write)
        if refers(write) and self._only in ("", name) and self._met[name] < self._times:
            self._met[name] += 1
            self.swept += await self._sweep()
        try:
            return await super().write(write)
        except BlobMissing:
            self.refused.append(name)
            raise


def refers(write: Write[Any]) -> bool:
    """Whether a write names blobs: by itself, as an answer, or in the waits that it opens."""
    if getattr(write, "blobs", ()) or isinstance(getattr(write, "answer", None), Spilled):
        return True
    return any(spilled(wait.body) is not None for wait in getattr(write, "waits", ()))


@tool
def tally() -> str:
    """A long report."""
    return OUTPUT


def clerk() -> Agent[str]:
    return Agent(ScriptedModel([[ToolCall("c", "tally")], ANSWER]), name="clerk", tools=[tally])


async def one_turn(store: Store) -> TurnResult[str]:
    """A turn whose input, tool output and answer are blobs."""
    async with Runtime(store, agents=[clerk()]) as runtime:
        session = await runtime.session("s")
        return await session.run(INPUT)


class Place:
    """Rows or a file, opened anew by everybody."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.path, self._rows = folder / "agent.db", MemoryRows() if kind == "memory" else None

    def store(self) -> Store:
        return SqliteStore(self.path) if self._rows is None else MemoryStore(self._rows)

    async def check_all_is_there(self, result: TurnResult[str]) -> None:
        """The turn ended as if nothing had been, and a fresh process reads all of it."""
        assert isinstance(result.outcome, Finished)
        assert result.text == ANSWER
        async with Runtime(self.store()) as runtime:
            session = await runtime.session("s")
            said = [message.text for message in await session.history()]
            outcome = (await session.result("s.1")).tool_calls[0].outcome
            assert isinstance(outcome, Ok)
            assert isinstance(outcome.whole, BlobRef)
            whole = await runtime.store.blobs.get(outcome.whole.digest)
            assert await runtime.store.sweep(grace=0) == 0
        assert (said[0], said[-1]) == (INPUT, ANSWER)
        assert len(whole) > len(OUTPUT)


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path)


REFERRING = ["accept queue", "append 1: ended 1.0", "commit 1"]


async def test_what_a_sweep_without_grace_took_is_put_again_and_the_turn_goes_on(place: Place) -> None:
    inner = place.store()
    store = SweptFirst(inner, lambda: inner.sweep(grace=0))

    result = await one_turn(store)

    assert store.refused == REFERRING
    assert store.swept == 3
    await place.check_all_is_there(result)


async def test_a_question_to_a_person_and_its_answer_are_put_again_too(place: Place) -> None:
    told: list[str] = []

    @tool(approval="ask")
    def seal(deed: str) -> str:
        """Seal a deed, if a person agrees."""
        told.append(deed)
        return "sealed"

    inner = place.store()
    store = SweptFirst(inner, lambda: inner.sweep(grace=0))
    model = ScriptedModel([[ToolCall("c", "seal", {"deed": INPUT})], "done"])
    async with Runtime(store, agents=[Agent(model, name="clerk", tools=[seal])]) as runtime:
        session = await runtime.session("s")
        parked = await session.run("seal it")
        (pending,) = await session.pending()
        await session.approve(pending.call_id, by=ANSWER)
        result = await session.result(parked.turn_id)

    assert pending.args == {"deed": INPUT}
    assert (result.text, told) == ("done", [INPUT])
    assert store.refused == ["append 1: spilled, opening a wait, parking", "resolve approval", "append 1: spilled"]
    assert store.swept == 4, "a record and the question in one write, the answer, the record that tells who agreed"


async def test_a_sweep_as_the_runtime_does_it_takes_nothing_that_is_about_to_be_referred_to(place: Place) -> None:
    inner = place.store()
    store = SweptFirst(inner, inner.sweep)

    result = await one_turn(store)

    assert (store.refused, store.swept) == ([], 0)
    await place.check_all_is_there(result)


async def test_a_store_that_loses_blobs_again_and_again_parks_the_turn_with_its_reason(place: Place) -> None:
    """Tried once more, not for ever; and when the store keeps what it is given, the turn can go on."""
    inner = place.store()
    store = SweptFirst(inner, lambda: inner.sweep(grace=0), only="append 1: ended 1.0", times=2)
    async with Runtime(store, agents=[clerk()]) as runtime:
        session = await runtime.session("s")
        with pytest.raises(BlobMissing):
            await session.run("a short question")
        assert await runtime.wait_idle(SOON)
        row = await store.session("s")
        assert row is not None
        stuck = row.state, (row.reason or "")[:18]
        await session.resume()
        result = await session.result("s.1")

    assert store.refused == ["append 1: ended 1.0"] * 2
    assert stuck == ("stuck", "BlobMissing: blob ")
    assert [type(call.outcome) for call in result.tool_calls] == [OutcomeUnknown], "its outcome was lost with the turn"


async def test_an_input_that_a_store_loses_again_and_again_is_refused_and_nothing_is_written(place: Place) -> None:
    inner = place.store()
    store = SweptFirst(inner, lambda: inner.sweep(grace=0), only="accept queue", times=2)
    async with Runtime(store, agents=[clerk()]) as runtime:
        session = await runtime.session("s")
        with pytest.raises(BlobMissing):
            await session.run(INPUT)

        assert await store.session("s") is None


# ---------------------------------------------------------------------- another process


class Sweeper:
    """A process that sweeps the same file when it is told to."""

    def __init__(self, path: Path, grace: str) -> None:
        command = [sys.executable, "-m", "tests.stores.child", "sweeps", str(path), grace]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    async def sweep(self) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("sweep\n")
        return int(self._process.stdout.readline())

    def end(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture
def sweepers() -> Generator[Callable[[Path, str], Sweeper], None, None]:
    begun: list[Sweeper] = []

    def begin(path: Path, grace: str) -> Sweeper:
        begun.append(Sweeper(path, grace))
        return begun[-1]

    yield begin
    for sweeper in begun:
        sweeper.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grace", "refused", "swept"), [("0", REFERRING, 3), ("3600", [], 0)], ids=["without grace", "with grace"]
)
async def test_the_sweep_of_another_process_costs_nothing(
    tmp_path: Path, sweepers: Any, grace: str, refused: list[str], swept: int
) -> None:
    place = Place("sqlite", tmp_path)
    sweeper = sweepers(place.path, grace)
    store = SweptFirst(place.store(), sweeper.sweep)

    result = await one_turn(store)

    assert (store.refused, store.swept) == (refused, swept)
    await place.check_all_is_there(result)


@pytest.mark.kill
@pytest.mark.parametrize("lines", [1, 4, 9])
async def test_a_sweep_killed_at_any_moment_leaves_every_reference_whole(tmp_path: Path, lines: int) -> None:
    """A child sweeps orphans without end, beside a turn that refers to blobs of its own."""
    place = Place("sqlite", tmp_path)
    command = [sys.executable, "-m", "tests.stores.child", "sweeps_without_end", str(place.path)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n"
    result = await one_turn(place.store())
    for _ in range(lines):
        child.stdout.readline()
    child.kill()
    child.communicate(timeout=60)

    store = place.store()
    await store.open()
    await store.sweep(grace=0)
    facts = await store.facts()
    await store.close()

    assert facts.blobs == 3, "the input, the output, the answer"
    await place.check_all_is_there(result)
