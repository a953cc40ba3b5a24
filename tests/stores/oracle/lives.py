"""The lives of a store beside the oracle: every write in its fresh, stale and repeated forms, reopening, and crashes.

The oracle is a second reading of the contract, written by hand over plain dictionaries (`model.py` and its neighbours);
it shares no code with the rules that all our stores run. Authors of other stores compare theirs with the memory store
(`perdure.testing.store_contract`); that the memory store itself is right is proven here.
"""

from __future__ import annotations

import copy
import unittest
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from perdure.model.session import WorkerRow
from perdure.model.write import Accept, Beat, Claim, Configure, Release, SessionRef
from perdure.testing.store_contract import Place
from tests.fuzzing import FULL
from tests.stores.oracle.inputs import InputRules
from tests.stores.oracle.outside import OutsideRules
from tests.stores.oracle.plain import plain
from tests.stores.oracle.processes import OtherRules, WorkerRules
from tests.stores.oracle.reads import ReadRules
from tests.stores.oracle.turns import TurnRules
from tests.stores.oracle.values import AGENTS, SESSIONS, agents, bodies, decisions, has, index, kinds, names, workers


def lives_of(place: Callable[[], Place]) -> type[unittest.TestCase]:
    """A test case for the store that lives in `place`: 60 lives of sessions and 60 of processes, of 40 steps each."""
    name = f"Lives[{getattr(place, '__name__', type(place).__name__)}]"
    how = settings(
        max_examples=2_000 if FULL else 60,
        stateful_step_count=80 if FULL else 40,
        derandomize=not FULL,  # the gate tries the same lives every time, the fuzzer new ones
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        report_multiple_bugs=False,
        phases=(Phase.reuse, Phase.generate, Phase.shrink),
    )

    def lives(of: Any, what: str) -> None:
        ran: Counter[str] = Counter()
        machine: Any = type(f"{name} of {what}", (of,), {"new_place": staticmethod(place), "ran": ran})
        try:
            run_state_machine_as_test(machine, settings=how)
        finally:
            print(f"{name}: {ran['lives']} lives of {what}, {ran['writes']} writes, {ran['crashes']} crashes")

    class Case(unittest.TestCase):
        def test_sessions(self) -> None:
            lives(SessionLives, "sessions")

        def test_processes(self) -> None:
            lives(ProcessLives, "processes")

    Case.__name__ = Case.__qualname__ = name
    return Case


class ProcessLives(WorkerRules, OtherRules):
    """What may happen to processes in a store."""


class SessionLives(InputRules, TurnRules, OutsideRules, ReadRules):
    """The rules: what may happen to a store. Each name says what must come of it. Here, its whole life."""

    @initialize(worker=workers, parked=st.booleans(), stuck=st.booleans(), kind=kinds, decided=decisions)
    def a_store_has_a_past(self, worker: str, parked: bool, stuck: bool, kind: Any, decided: bytes) -> None:
        """Most lives begin in the middle, where every rule has something to work on."""
        for name, agent in zip(SESSIONS, (*AGENTS, *AGENTS), strict=False):
            self.send(Accept(name, agent, b"hello", f"op-{self.now}", self.tick(), key="k1", worker="w1"))
        for name in SESSIONS[4:6]:  # at the same time
            self.send(Accept(name, "clerk", b"hello", f"op-{name}", self.now))
        busy, ended, waiting, left = (self.model.sessions[name] for name in SESSIONS[:4])
        self.send(Beat(WorkerRow("w1", "here", "boot", 7, 0)))
        self.send(self.accept_on(busy, b"and then", kind))
        self.send(self.accept_on(busy, b"by the way", "steer"))
        self.send(self.committing(ended, [b"reply"]))
        self.send(self.accept_on(ended, b"remember", "note"))
        wait = self.new_wait(waiting, 0, 900, b"{}")
        self.send(self.appending(waiting, [b"reply"], waits=(wait,), park=(wait.id,) if parked else ()))
        self.send(Claim(SessionRef(left["id"]), worker, left["generation"], self.tick()))
        if stuck:
            self.send(Release(self.scope(left), self.tick(), stuck="no disk"))
        self.send(Configure(ended["id"], ended["agent"], decided, self.tick()))
        self.a_blob_is_put_and_read(b"kept")
        self.send(self.referring(busy, self.a_blob(b"referred to"), "append"))

    # ------------------------------------------------------------------ several stores, reopening, crashing

    @rule(through=st.booleans())
    def writes_are_submitted_from_now_on(self, through: bool) -> None:
        self.by_submit = through

    @rule(name=names, agent=agents, body=bodies)
    def what_another_store_writes_is_seen_and_is_news(self, name: str, agent: str, body: bytes) -> None:
        self.run(self.store.changed())
        first, self.store = self.store, self.opened()
        try:
            self.send(Beat(WorkerRow("w3", "there", "boot", 8, 0)))
            self.send(Accept(name, agent, body, f"op-{self.now}", self.tick()))
        finally:
            self.run(self.store.close())
            self.store = first
        assert self.run(self.store.changed())
        self.send(Beat(WorkerRow("w1", "here", "boot", 7, 0)))
        assert not self.run(self.store.changed()), "its own writes are no news to a store"

    @rule(crash=st.booleans())
    def the_store_is_closed_or_its_process_dies(self, crash: bool) -> None:
        self.ran["crashes"] += crash
        self.run(self.place.crash(self.store) if crash else self.store.close())
        self.store = self.opened()

    @has(lambda self: self.model.live())
    @rule(n=index, body=bodies)
    def the_process_dies_while_it_writes(self, n: int, body: bytes) -> None:
        """A write that nobody has acknowledged is there whole, or not at all."""
        self.ran["crashes"] += 1
        session = self.pick(self.model.live(), n)
        without = copy.deepcopy(self.model)
        write = self.accept_on(session, body, worker="w1")
        receipt = self.expect(write)
        self.store.submit(write, lambda receipt, error: None)
        self.run(self.place.crash(self.store))
        self.store = self.opened()
        if plain(self.run(self.store.session(session["id"]))) != session:
            landed, self.model = self.model, without
            self.run(self.compare())
            self.model = landed
            assert self.run(self.ask(write)) == receipt
