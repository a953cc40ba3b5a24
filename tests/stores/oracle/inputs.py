"""What may happen to inputs: how they are accepted, and how they are asked to stop."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from perdure.errors import KeyConflict, SessionDeleted, WrongAgent
from perdure.model.session import CancelRequest
from perdure.model.write import Accept, Cancel, SessionRef
from tests.stores.oracle.machine import StoreMachine
from tests.stores.oracle.plain import Plain
from tests.stores.oracle.values import (
    KEYS,
    agents,
    bodies,
    has,
    index,
    kinds,
    maybe_workers,
    names,
    opening,
    requests,
    steps,
)


class InputRules(StoreMachine):
    """What is said to a session, from outside."""

    # ------------------------------------------------------------------ accept

    @has(StoreMachine.fresh)
    @rule(n=index, agent=agents, body=bodies, kind=kinds, worker=maybe_workers)
    def the_first_input_makes_the_session(self, n: int, agent: str, body: bytes, kind: Any, worker: str | None) -> None:
        name = self.pick(self.fresh(), n)
        write = Accept(name, agent, body, f"op-{self.now}", self.tick(), kind, worker=worker)
        answer = self.send(write)
        assert (answer["turn"], answer["opened"]) == (1, kind != "note")

    @has(StoreMachine.idle)
    @rule(n=index, body=bodies, kind=opening, worker=maybe_workers, step=steps)
    def an_input_opens_a_turn_of_an_idle_session(
        self, n: int, body: bytes, kind: Any, worker: str | None, step: int
    ) -> None:
        session = self.pick(self.idle(), n)
        self.tick(step - 1)  # the clocks of two hosts need not agree
        assert self.send(self.accept_on(session, body, kind, worker=worker))["opened"]

    @has(StoreMachine.idle)
    @rule(n=index, body=bodies, kind=kinds, worker=maybe_workers)
    def an_input_whose_turn_is_stuck_is_worked_on_by_nobody(
        self, n: int, body: bytes, kind: Any, worker: str | None
    ) -> None:
        session = self.pick(self.idle(), n)
        row = self.send(self.accept_on(session, body, kind, worker=worker, stuck="too deep"))["row"]
        if kind != "note":
            assert (row["state"], row["owner"], row["reason"]) == ("stuck", None, "too deep")

    @has(StoreMachine.turns)
    @rule(n=index, body=bodies, kind=kinds, worker=maybe_workers)
    def an_input_of_a_busy_session_waits(self, n: int, body: bytes, kind: Any, worker: str | None) -> None:
        assert not self.send(self.accept_on(self.pick(self.turns(), n), body, kind, worker=worker))["opened"]

    @has(lambda self: self.model.live())
    @rule(n=index, body=bodies)
    def a_note_never_opens_a_turn(self, n: int, body: bytes) -> None:
        assert not self.send(self.accept_on(self.pick(self.model.live(), n), body, "note", worker="w1"))["opened"]

    @rule(name=names, agent=agents, key=st.sampled_from(KEYS), body=bodies, digest=st.sampled_from([b"a", b"b", b""]))
    def a_key_is_used(self, name: str, agent: str, key: str, body: bytes, digest: bytes) -> None:
        self.send(Accept(name, agent, body, f"op-{self.now}", self.tick(), "queue", key, digest, "w1"))

    def keyed(self) -> list[tuple[Plain, str, int, bytes]]:
        by_sid = {s["sid"]: s for s in self.model.live()}
        found = self.model.keys.items()
        return [(by_sid[sid], key, turn, digest) for (sid, key), (turn, digest) in found if sid in by_sid]

    @has(keyed)
    @rule(n=index, body=bodies, kind=kinds, worker=maybe_workers)
    def a_key_used_again_is_the_same_input(self, n: int, body: bytes, kind: Any, worker: str | None) -> None:
        session, key, turn, digest = self.pick(self.keyed(), n)
        answer = self.send(self.accept_on(session, body, kind, key=key, digest=digest, worker=worker))
        assert (answer["known"], answer["turn"]) == (True, turn)

    @has(keyed)
    @rule(n=index, body=bodies)
    def a_key_used_again_for_something_else_is_refused(self, n: int, body: bytes) -> None:
        session, key, _, digest = self.pick(self.keyed(), n)
        self.send(self.accept_on(session, body, key=key, digest=digest + b"!"), KeyConflict)

    @has(lambda self: self.model.live())
    @rule(n=index, body=bodies, key=st.sampled_from([None, *KEYS]))
    def an_input_for_another_agent_is_refused(self, n: int, body: bytes, key: str | None) -> None:
        session = self.pick(self.model.live(), n)
        self.send(Accept(session["id"], "nobody", body, "op", self.tick(), key=key, digest=b"a"), WrongAgent)

    @has(StoreMachine.deleted)
    @rule(n=index, body=bodies, key=st.sampled_from([None, *KEYS]))
    def an_input_for_a_deleted_session_is_refused(self, n: int, body: bytes, key: str | None) -> None:
        session = self.pick(self.deleted(), n)
        self.send(self.accept_on(session, body, key=key, digest=b"a"), SessionDeleted)

    # ------------------------------------------------------------------ cancel

    @has(StoreMachine.turns)
    @rule(n=index, request=requests, worker=maybe_workers, named=st.booleans())
    def the_open_turn_is_asked_to_stop_and_the_first_to_ask_counts(
        self, n: int, request: CancelRequest, worker: str | None, named: bool
    ) -> None:
        session = self.pick(self.turns(), n)
        status = "requested" if session["cancel"] is None else "already_requested"
        turn = session["turn"] if named else None
        assert self.send(Cancel(SessionRef(session["id"]), request, self.tick(), turn, worker))["status"] == status
        assert self.send(Cancel(SessionRef(session["id"]), request, self.tick(), turn))["status"] == "already_requested"

    def queued(self) -> list[tuple[Plain, int]]:
        return [(s, number) for s in self.model.live() for number in self.waiting_inputs(s, "queue", "steer")]

    @has(queued)
    @rule(n=index, request=requests)
    def a_queued_turn_is_asked_to_stop(self, n: int, request: CancelRequest) -> None:
        session, number = self.pick(self.queued(), n)
        first = self.model.inbox[session["sid"]][number][1] is None
        status = "requested" if first else "already_requested"
        assert self.send(Cancel(SessionRef(session["id"]), request, self.tick(), number))["status"] == status
        assert (
            self.send(Cancel(SessionRef(session["id"]), request, self.tick(), number))["status"] == "already_requested"
        )

    def noted(self) -> list[tuple[Plain, int]]:
        return [(s, number) for s in self.model.live() for number in self.waiting_inputs(s, "note")]

    @has(noted)
    @rule(n=index, request=requests)
    def a_note_cannot_be_stopped(self, n: int, request: CancelRequest) -> None:
        session, number = self.pick(self.noted(), n)
        assert (
            self.send(Cancel(SessionRef(session["id"]), request, self.tick(), number, "w1"))["status"]
            == "completion_won"
        )

    @rule(name=names, request=requests, turn=st.sampled_from([None, -1, 0, 1, 2, 3, 999]))
    def anything_may_be_asked_to_stop(self, name: str, request: CancelRequest, turn: int | None) -> None:
        answer = self.send(Cancel(SessionRef(name), request, self.tick(), turn))
        if turn is not None and not 0 < turn < 999:
            assert answer["status"] == "unknown"

    @has(StoreMachine.idle)
    @rule(n=index, request=requests)
    def a_cancel_after_the_end_changes_nothing(self, n: int, request: CancelRequest) -> None:
        session = self.pick(self.idle(), n)
        assert (
            self.send(Cancel(SessionRef(session["id"]), request, self.tick(), worker="w1"))["status"]
            == "completion_won"
        )
