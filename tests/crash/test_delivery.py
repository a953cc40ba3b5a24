"""T19: whoever watches a session is killed at every event, starts again, and goes on from the last cursor it kept.

It keeps the cursor of an event together with what it shows of it, as a server does that writes to a socket. An event is
shown once, whatever process tells it. What was told while it was dead is a gap, after which history has the rest: no
committed turn is missed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Generator, Sequence
from pathlib import Path

import pytest

from perdure import Agent, ModelRequest, Runtime
from perdure.model.event import AnyEvent, Gap, TurnCommitted
from perdure.testing import FunctionModel
from perdure.testing.crash import Crash, ForkServer, Lab, Ledger, LedgerLine, Played, StoreKind, plans, play
from tests.crash.children import Child, folder
from tests.crash.watcher import line_of
from tests.kit import until

__all__ = ["folder"]

STORES: tuple[StoreKind, ...] = ("memory", "sqlite")

# ---------------------------------------------------------------------- one process works and shows


async def words(request: ModelRequest) -> AsyncIterator[str]:
    """In two pieces, far enough from each other to be two events."""
    for piece in ("half ", "of it"):
        yield piece
        for _ in range(20):
            await asyncio.sleep(0)


async def shown(lab: Lab) -> None:
    """A server that runs a turn and shows its events; started again, it goes on after what it has shown."""
    async with lab.runtime([Agent(FunctionModel(words), name="speaker")]) as runtime:
        session = await runtime.session("s")
        kept = [line for line in lab.ledger if line.name == "shown"]
        if not kept:
            async with session.stream("go", key="1") as turn:
                async for event in turn:
                    await lab.effect("shown", event.cursor, line_of(event))
        elif kept[-1].data[0] != "TurnCommitted":
            await read_on(lab, session.observe(kept[-1].key))


async def read_on(lab: Lab, events: AsyncIterator[AnyEvent]) -> None:
    async for event in events:
        await lab.effect("shown", event.cursor, line_of(event))
        if isinstance(event, TurnCommitted) or (isinstance(event, Gap) and event.last_committed == "s.1"):
            return


def check(played: Played) -> None:
    assert played.problems == []
    session = played.ending.session("s")
    assert session is not None
    assert session.said == ["user: go", "assistant: half of it"]
    lines = [line for line in played.ledger if line.name == "shown"]
    assert set(Counter(line.key for line in lines).values()) == {1}, "no event is shown twice"
    kinds = [line.data[0] for line in lines]
    assert kinds.count("TurnCommitted") <= 1
    # Whoever was told of a gap forgets what he has seen of the turn: it follows as a whole, or is in the history.
    since = max(n for n, kind in enumerate(kinds) if kind in ("Gap", "TurnStarted"))
    text = "".join(line.data[2] for line in lines[since:] if line.data[0] == "TextDelta")
    if kinds[-1] == "TurnCommitted":
        assert text == "half of it"
    else:
        assert (lines[-1].data, text) == (["Gap", "", "s.1"], "")


CRASHES = [Crash(f"effect shown{n}", mode) for n in ("", " #2", " #3", " #4") for mode in ("before", "lost")] + [
    Crash(point, mode)
    for point in ("accept queue", "ask model 1.1", "commit 1", "retire")
    for mode in ("before", "lost")
]


@pytest.mark.parametrize("store", STORES)
def test_undisturbed_every_event_is_shown(store: StoreKind) -> None:
    played = play(shown, store=store)

    check(played)
    kinds = [line.data[0] for line in played.ledger if line.name == "shown"]
    assert kinds == ["TurnStarted", "TextDelta", "TextDelta", "TurnCommitted"]
    assert set(CRASHES) <= set(plans(played.traces[0], ("before", "lost")))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("crash", CRASHES, ids=str)
def test_killed_at_an_event_it_goes_on_after_it(crash: Crash, store: StoreKind) -> None:
    check(play(shown, [crash], store=store, timeout=10))


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(shown, timeout=15) as ready:
        yield ready


@pytest.mark.kill
@pytest.mark.parametrize("crash", CRASHES, ids=str)
def test_really_killed_at_an_event_it_goes_on_after_it(forks: ForkServer, crash: Crash) -> None:
    check(forks.play([crash]))


# ---------------------------------------------------------------------- another process works


def commits(lines: Sequence[LedgerLine]) -> list[str]:
    return [line.data[1] for line in lines if line.data[0] == "TurnCommitted"]


@pytest.mark.kill
@pytest.mark.slow
async def test_watcher_in_another_process_is_killed_and_misses_no_commit(folder: Path) -> None:
    """Three lives of a watcher. One turn ends in each, two while it is dead: the worker has kept their events."""
    ledger = Ledger(folder / "ledger")

    async def one_life(runtime: Runtime, text: str) -> None:
        watcher = Child("tests.crash.watcher", folder)
        try:
            assert await asyncio.to_thread(watcher.line) == "ready"
            turn = await (await runtime.session("s")).run(text)
            await until(lambda: turn.turn_id in commits(ledger.lines()))
        finally:
            watcher.end()

    async with Runtime(folder / "agent.db", agents=[Agent(name="echo")]) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        await one_life(runtime, "two")
        await session.run("three")
        await session.run("four")
        await one_life(runtime, "five")
        await one_life(runtime, "six")
        history = [m.text for m in await session.history() if m.role == "user"]

    lines = ledger.lines()
    assert set(Counter(line.key for line in lines).values()) == {1}, "no event is shown twice"
    assert commits(lines) == ["s.2", "s.3", "s.4", "s.5", "s.6"], "each once, in order"
    assert [line for line in lines if line.data[0] == "Gap"] == [], "nothing was lost"
    assert history == ["one", "two", "three", "four", "five", "six"]
