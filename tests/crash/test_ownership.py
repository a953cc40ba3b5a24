"""Ownership between real processes on one file: who is dead is relieved, who is only slow is not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import pytest

from perdure import Agent, Runtime
from perdure.engine.lease import LeaseTerms
from perdure.model.outcome import Finished
from perdure.model.session import SessionRow
from perdure.stores.sqlite import SqliteStore
from perdure.testing import VirtualClock
from perdure.testing.crash import Crash, Ending, ForkServer, Lab, Ledger, capture, play
from tests.crash.worker import SESSIONS, SHORT, agent_for, stepping
from tests.keys import within_store

pytestmark = [pytest.mark.kill, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0


class Child:
    """A worker process. It is resumed and killed at the end, whatever became of it."""

    def __init__(self, what: str, store: Path, ledger: Path) -> None:
        command = [sys.executable, "-m", "tests.crash.worker", what, str(store), str(ledger)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def child(what: str, store: Path, ledger: Path) -> Generator[Child, None, None]:
    one = Child(what, store, ledger)
    try:
        yield one
    finally:
        one.end()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "agent.db"


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


async def read_ending(path: Path) -> Ending:
    reading = SqliteStore(path)
    await reading.open()
    try:
        return await capture(reading, sweep=False)
    finally:
        await reading.close()


async def rows(runtime: Runtime) -> AsyncIterator[SessionRow]:
    """The session's row, over and over, for as long as a test is patient."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        row = await runtime.store.session("s")
        assert row is not None
        yield row
        await asyncio.sleep(0.02)
    pytest.fail(f"nothing happened within {PATIENCE} s")


async def test_killed_owner_is_relieved_at_once(store: Path, ledger: Path) -> None:
    """The successor believes its term to be an hour, so only the proof of death can have let it in."""
    with child("hold", store, ledger) as owner:
        assert owner.line() == "ready"
        owner.kill()
        agent = agent_for(ledger)
        async with Runtime(store, agents=[agent], lease=LeaseTerms(term=3600, renewal=1)) as runtime:
            session = await runtime.session("s")
            result = await asyncio.wait_for(session.result("s.1"), PATIENCE)

    assert isinstance(result.outcome, Finished)
    assert result.text == f"done by {os.getpid()}"
    assert [(c.attempts, c.repeated) for c in result.tool_calls] == [(2, 1)]


async def test_killed_owner_is_relieved_by_the_next_look_of_a_runtime_that_was_open_beside_it(
    store: Path, ledger: Path
) -> None:
    """The survivor's clock stands still, so neither a term nor a time to judge its neighbours ever comes."""
    deps = {"ledger": str(ledger), "silent": False}
    async with Runtime(
        store, agents=[agent_for(ledger)], processes=[stepping], deps=deps, clock=VirtualClock()
    ) as survivor:
        with child("both", store, ledger) as owner:
            assert await asyncio.to_thread(owner.line) == "ready"
            for _ in range(2):  # it has seen the last write of its neighbour
                await looked(survivor)
            owner.kill()
            killed = time.monotonic()
        session = await survivor.session("s")
        turn = await asyncio.wait_for(session.result("s.1"), PATIENCE)
        step = await survivor.handle("p").result(timeout=PATIENCE)
        print(f"taken over and finished {time.monotonic() - killed:.2f} s after the kill")

    assert (turn.text, step) == (f"done by {os.getpid()}", f"done by {os.getpid()}")


async def looked(runtime: Runtime) -> None:
    """Wait until the watch of a Runtime has been round once more."""
    parts = runtime._open()
    parts.activity.polled.clear()
    await asyncio.wait_for(parts.activity.polled.wait(), PATIENCE)


async def test_stopped_owner_keeps_its_term_and_is_fenced_when_it_wakes(store: Path, ledger: Path) -> None:
    with child("hold", store, ledger) as owner:
        assert owner.line() == "ready"
        owner.send(signal.SIGSTOP)
        began = time.monotonic()
        async with Runtime(store, agents=[agent_for(ledger)], lease=SHORT) as runtime:
            first = await runtime.store.session("s")
            assert first is not None
            async for row in rows(runtime):
                if row.generation != first.generation:
                    break
            relieved_after = time.monotonic() - began
            session = await runtime.session("s")
            result = await asyncio.wait_for(session.result("s.1"), PATIENCE)
            before = await read_ending(store)
            Path(f"{ledger}.go").touch()
            owner.send(signal.SIGCONT)
            seen_by_owner = owner.line()
            owner.process.wait(PATIENCE)
        after = await read_ending(store)

    assert relieved_after >= SHORT.term, "not robbed before its term"
    assert result.text == f"done by {os.getpid()}"
    assert seen_by_owner == f"saw done by {os.getpid()}", "the relieved owner reads the other's result"
    assert after == before, "and writes nothing"
    assert owner.process.returncode == 0


def test_two_workers_race_and_each_session_runs_once(store: Path, ledger: Path) -> None:
    with child("open", store, ledger) as opener:
        assert opener.line() == "ready"
        opener.kill()
    with child("take", store, ledger) as one, child("take", store, ledger) as other:
        assert (one.line(), other.line()) == ("ready", "ready")
        Path(f"{ledger}.go").touch()
        assert (one.process.wait(PATIENCE), other.process.wait(PATIENCE)) == (0, 0)
    ending = asyncio.run(read_ending(store))

    assert Counter(within_store(line.key) for line in Ledger(ledger).lines() if line.name == "work") == {
        f"s-{number:02}.1.1.0": 1 for number in range(SESSIONS)
    }
    assert [(s.state, s.turns) for s in ending.sessions] == [("idle", {1: "finished"})] * SESSIONS
    asked = Counter(line.key for line in Ledger(ledger).lines() if line.name == "model")
    assert asked == {f"s-{n:02}.1.{step}": 2 if step == 1 else 1 for n in range(SESSIONS) for step in (1, 2)}


async def test_answer_from_another_process_is_noticed(store: Path, ledger: Path) -> None:
    async with Runtime(store, agents=[agent_for(ledger, approval=True)]) as runtime:
        session = await runtime.session("s")
        parked = await session.run("go")
        assert parked.waiting
        with child("approve", store, ledger) as person:
            assert await asyncio.to_thread(person.process.wait, PATIENCE) == 0
            result = await asyncio.wait_for(session.result("s.1"), PATIENCE)

    assert result.text == f"done by {os.getpid()}"


# ---------------------------------------------------------------------- a turn that kills whoever works on it


async def say_hello(lab: Lab) -> None:
    async with lab.runtime([Agent(name="poison")]) as runtime:
        session = await runtime.session("s")
        await session.send("hello", key="1")
        await runtime.wait_idle(timeout=60)


POISON = [Crash("ask model 1.1", "lost")] * 5
STUCK = "3 workers in a row took this turn over and died without a new record"


def test_turn_that_killed_five_workers_is_stuck_with_its_reason() -> None:
    session = play(say_hello, POISON).ending.session("s")

    assert session is not None
    assert (session.state, session.turn) == ("stuck", 1)
    assert (session.reason or "").startswith(STUCK)


def test_turn_that_really_killed_five_workers_is_stuck_with_its_reason() -> None:
    with ForkServer(say_hello) as forks:
        played = forks.play(POISON)
    session = played.ending.session("s")

    assert session is not None
    assert (session.state, session.turn) == ("stuck", 1)
    assert (session.reason or "").startswith(STUCK)
    assert played.model_calls == 5, "the owner, a successor, and three that had no other suspect"
