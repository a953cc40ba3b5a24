"""Kills in the middle of an answer over HTTP, in every dialect, counted by the server that outlives them.

A recorded answer is never asked for again; one that was in flight is asked for once more, byte for byte and under the
same id; the turn ends as if nothing had happened, and says how many answers nobody saw.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from perdure.testing.crash import Crash, ForkServer, Played, plans
from perdure.testing.model_server import Asked, ModelServer, Reply
from tests.crash.wired import CASE, OWN_TOOLS, PID, URL, Case, Kind, turn
from tests.fuzzing import cases
from tests.providers.wire import ANSWERS

CHUNK = 48
"""Bytes: an event or a frame of these scripts is cut once or twice, in the middle of characters too."""

BY_THE_SERVER = Crash("killed by the server")
"""A point that no run passes: its process dies because the server kills it."""

DIALECTS = list(ANSWERS)

TYPED: tuple[Kind, ...] = ("tool", "prompt")
LAST: dict[Kind, str] = {"text": "text", "tool": "answer by tool", "prompt": "structured"}


ENDS: dict[Kind, str] = {"text": "Grüße, Welt 😀", "tool": '{"name":"Ada"}', "prompt": '{"name":"Ada"}'}
FOUND = {"anthropic": "It rains.", "openai": "It rains.", "google": "42"}
"""What the assistant says last: with words or a typed answer, and with what a tool of the provider found."""


def script(case: Case) -> list[str]:
    """The answers of the server: two calls of our tools, then the end. A tool of Anthropic's pauses the answer."""
    if case.kind != "provider tools":
        return ["parallel", LAST[case.kind]]
    paused = ["paused"] if case.dialect == "anthropic" else []
    return ["parallel", *paused, OWN_TOOLS[case.dialect].replace("_", " ")]


class Place(NamedTuple):
    """Where a client dies: at which request, when so many chunks of the answer were sent. None: not even its head
    was."""

    request: int
    chunks: int | None


class Server:
    """A model server on a thread of its own: it kills the client at a place, once, and keeps a ledger of requests."""

    def __init__(self, case: Path) -> None:
        self._file = case
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="model server")
        self._thread.start()
        self._server = ModelServer(self._reply)
        self._wait_for(self._server.__aenter__())
        self.url = self._server.url
        self._case, self._place = Case(""), Place(0, None)
        self.killed = 0

    def close(self) -> None:
        self._wait_for(self._server.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait_for(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def expect(self, case: Case, place: Place | None = None) -> None:
        """Begin a new ledger; the next turns are of this case; kill the client at that place."""
        self._case, self._place = case, place or Place(0, None)
        self._file.write_bytes(msgspec.json.encode(case))
        self._server.asked.clear()
        self.killed = 0

    def ledger(self) -> list[int]:
        """Which request each one was: 1 asks for the tool calls, 2 has their results. Equal numbers had equal bytes."""
        by_body: dict[bytes, int] = {}
        found = []
        for asked in self._server.asked:
            number = by_body.setdefault(asked.body, len(by_body) + 1)
            assert number == _number(asked), "a question was asked again in other words"
            found.append(number)
        return found

    def _reply(self, asked: Asked) -> Reply:
        number, place = _number(asked), self._place
        whole = ANSWERS[self._case.dialect][script(self._case)[number - 1]].reply
        if number != place.request or self.killed:
            return whole
        if place.chunks is None:
            self._kill(asked)
        return replace(whole, upto=(place.chunks or 0) * CHUNK, piece=CHUNK, end="hang", then=lambda: self._kill(asked))

    def _kill(self, asked: Asked) -> None:
        if not self.killed:
            self.killed = int(asked.headers[PID])
            os.kill(self.killed, signal.SIGKILL)


def _number(asked: Asked) -> int:
    """Results of our calls come with the second request, what a paused answer had said with the third."""
    return 1 + (b"got 1" in asked.body) + (b"srvtoolu_1" in asked.body)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server, None, None]:
    with pytest.MonkeyPatch.context() as patch:
        case = tmp_path_factory.mktemp("wired") / "case"
        one = Server(case)
        patch.setenv(URL, one.url)
        patch.setenv(CASE, str(case))
        yield one
        one.close()


@pytest.fixture(scope="module")
def forks(server: Server) -> Generator[ForkServer, None, None]:
    with ForkServer(turn) as ready:
        yield ready


def places(case: Case) -> list[Place]:
    """Every one: before the first byte, and after each chunk; the last one is the terminal event, not HTTP's end."""
    found = []
    for request, answer in enumerate(script(case), 1):
        chunks = -(-len(ANSWERS[case.dialect][answer].reply.body) // CHUNK)
        found += [Place(request, chunk) for chunk in (None, *range(chunks + 1))]
    return found


def sample(found: list[Any], count: int, seed: str) -> list[Any]:
    chosen = random.Random(seed).sample(range(len(found)), min(count, len(found)))
    return [found[index] for index in sorted(chosen)]


def outcome_of(played: Played) -> tuple[list[str], list[tuple[str, str, str]], int]:
    """What the session says in the end, how its calls went, and how many answers nobody saw."""
    assert played.problems == []
    [session] = played.ending.sessions
    assert (session.state, session.turns) == ("idle", {1: "finished"})
    return session.said, [(c.call_id, c.tool, c.outcome) for c in session.calls], session.unknown_usage


def effects(played: Played) -> tuple[int, int]:
    return played.count("get"), played.count("put")


CASES = [
    *[Case(dialect) for dialect in DIALECTS],
    *[Case(dialect, kind) for dialect in DIALECTS for kind in TYPED],
    *[Case(dialect, "provider tools") for dialect in OWN_TOOLS],
]


@pytest.mark.kill
@pytest.mark.fuzz
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_answer_cut_off_by_a_kill_is_asked_for_once_more_and_a_recorded_one_never(
    case: Case, server: Server, forks: ForkServer, record_property: Callable[[str, object], None]
) -> None:
    requests = [*range(1, len(script(case)) + 1)]
    ends = FOUND[case.dialect] if case.kind == "provider tools" else ENDS[case.kind]
    ended = [("s.1.1.0", "get", "ok"), ("s.1.1.1", "put", "ok")]
    chosen = sample(places(case), cases(6 if case.kind == "text" else 3, 10_000), str(case))

    for place in [None, *chosen]:
        server.expect(case, place)
        played = forks.play([BY_THE_SERVER] if place else (), turn)

        assert bool(server.killed) == bool(place), place
        assert server.ledger() == sorted([*requests, place.request] if place else requests), place
        said, calls, unknown = outcome_of(played)
        assert (calls, unknown) == (ended, 1 if place else 0), place
        assert said[-1].replace(": ", ":") == f"assistant:{ends}", place
        assert effects(played) == (1, 1), place
        asked = [(line.key, line.data) for line in played.ledger if line.name == "model"]
        assert len(asked) == len(requests) + bool(place), place
        assert len(set(asked)) == len(requests), f"{place}: under another id"
    record_property("perdure", f"killed by its server over HTTP, {case}: {len(chosen)} of {len(places(case))}")


class Fate(Struct, frozen=True):
    """Requests at the server, effects of get and put, how put ended, and answers that nobody saw."""

    requests: list[int]
    get: int = 1
    put: int = 1
    ended: str = "ok"
    unknown: int = 0


CLEAN = Fate([1, 2])
ASKED_1, ASKED_2 = Fate([1, 1, 2], unknown=1), Fate([1, 2, 2], unknown=1)
UNSURE = Fate([1, 2], unknown=1)  # nobody can know whether the model had been asked
STARTED = Fate([1, 2], put=0, ended="outcome_unknown")
GOT = Fate([1, 2], get=2, put=0, ended="outcome_unknown")
PUT = Fate([1, 2], get=2, ended="outcome_unknown")

RULINGS: dict[str, tuple[Fate, Fate | None]] = {
    "beat": (CLEAN, CLEAN),
    "accept queue": (CLEAN, UNSURE),
    "ask model 1.1": (UNSURE, UNSURE),  # a stream that is only asked for sends nothing yet
    "chunk of model 1.1": (ASKED_1, None),
    "append 1: replied 1": (ASKED_1, STARTED),
    "begin get 1.1.0": (STARTED, None),
    "effect get": (STARTED, GOT),
    "end get 1.1.0": (GOT, None),
    "begin put 1.1.1": (GOT, None),
    "effect put": (GOT, PUT),
    "end put 1.1.1": (PUT, None),
    "append 1: ended 1.0 + ended 1.1": (PUT, UNSURE),
    "ask model 1.2": (UNSURE, UNSURE),
    "chunk of model 1.2": (ASKED_2, None),
    "commit 1": (ASKED_2, CLEAN),
    "retire": (CLEAN, CLEAN),
}
"""What comes of a kill before a point, and after it when nobody heard of it."""


def ruling(crash: Crash) -> Fate:
    words = crash.point.split()
    point = "chunk of model " + words[-1] if words[0] == "chunk" else crash.point
    fate = RULINGS[point][crash.mode == "lost"]
    assert fate is not None, crash
    return fate


@pytest.mark.kill
@pytest.mark.fuzz
@pytest.mark.slow
@pytest.mark.parametrize(
    "dialect", [DIALECTS[0], *(pytest.param(dialect, marks=pytest.mark.gate) for dialect in DIALECTS[1:])]
)
def test_every_kill_around_a_request_over_http_has_its_ruled_fate(
    dialect: str, server: Server, forks: ForkServer, record_property: Callable[[str, object], None]
) -> None:
    server.expect(Case(dialect))
    plain = forks.play()
    every = list(plans(plain.traces[0], ("before", "lost")))
    chosen = sample(every, cases(6, 10_000), dialect)

    for crash in chosen:
        server.expect(Case(dialect))
        played = forks.play([crash])

        _, calls, unknown = outcome_of(played)
        put = next(outcome for _, name, outcome in calls if name == "put")
        assert Fate(server.ledger(), *effects(played), put, unknown) == ruling(crash), crash
    record_property("perdure", f"killed at its points over HTTP, {dialect}: {len(chosen)} of {len(every)}")
