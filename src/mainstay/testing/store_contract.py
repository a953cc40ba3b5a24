"""The contract of a store, to run on any store: yours too.

A store passes when it lives through thousands of random lives without ever differing from a model of plain
dictionaries: every write in its fresh, stale and repeated forms, every read, blobs, reopening, and crashes. Tell it
where your store's rows live:

    from mainstay.testing.store_contract import store_contract


    class MyPlace:  # a new one is empty; stores on the same place see the same rows
        def __init__(self) -> None:
            self.database = create_scratch_database()

        def store(self) -> MyStore:  # a new store object, not yet opened
            return MyStore(self.database)

        async def crash(self, store: MyStore) -> None:  # end it as kill -9 would
            await store.drop_connections()

        def clear(self) -> None:  # nobody needs this place any more
            self.database.drop()


    TestMyStore = store_contract(MyPlace)

`TestMyStore` is a `unittest.TestCase`: pytest finds it and runs 60 lives of 40 steps; with `MAINSTAY_FUZZ=full` in the
environment 2,000 lives of 80 steps. A failure is reported as the shortest program that shows it. This module needs
Hypothesis (`pip install hypothesis`); nothing else in Mainstay imports it.
"""

from __future__ import annotations

import copy
import os
import unittest
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar, cast

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from msgspec.structs import replace

from mainstay.errors import (
    BlobMissing,
    Fenced,
    HeadMoved,
    InternalError,
    InvalidSessionId,
    KeyConflict,
    SessionDeleted,
    UnknownSession,
    WrongAgent,
)
from mainstay.model.session import Answer, CancelRequest, Node, WaitRow, WorkerRow
from mainstay.model.write import (
    Accept,
    Append,
    Beat,
    Branch,
    Cancel,
    Claim,
    Commit,
    Delete,
    Release,
    Resolve,
    Retire,
    SessionFilter,
)
from mainstay.testing.store_machine import CLOSED, JOINED, Place, StoreMachine, by_key
from mainstay.testing.store_model import Plain, plain

__all__ = ["Place", "StoreContract", "store_contract"]


def store_contract(place: Callable[[], Place]) -> type[unittest.TestCase]:
    """The contract as a test case for the store that lives in `place`."""
    name = f"StoreContract[{getattr(place, '__name__', type(place).__name__)}]"
    ran: Counter[str] = Counter()
    machine = cast("type[StoreContract]", type(name, (StoreContract,), {"new_place": staticmethod(place), "ran": ran}))
    full = os.environ.get("MAINSTAY_FUZZ") == "full"

    def report(cls: type[unittest.TestCase]) -> None:
        print(f"{name}: {ran['lives']} lives, {ran['writes']} writes, {ran['crashes']} crashes")

    machine.TestCase.settings = settings(
        max_examples=2_000 if full else 60,
        stateful_step_count=80 if full else 40,
        derandomize=not full,  # the gate tries the same lives every time, the fuzzer new ones
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        report_multiple_bugs=False,
        phases=(Phase.reuse, Phase.generate, Phase.shrink),
    )
    case: type[unittest.TestCase] = machine.TestCase
    setattr(case, "tearDownClass", classmethod(report))  # noqa: B010 - a class made by Hypothesis
    return case


WORKERS = ("w1", "w2", "w3")
AGENTS = ("clerk", "scout")
SESSIONS = ("chat", "chat-2", "chat.1", "Übergröße 🦊", "名前", "e\u0301tude", "%_'\"; --")
KEYS = ("k1", "msg 2", "ключ\u2028🔑", "K1")

ODD = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
"""Anything that normalisation lets through: no lone surrogates, no NUL."""

texts = st.text(ODD, max_size=12)
bodies = st.one_of(
    st.binary(max_size=40),
    texts.map(lambda t: t.encode()),
    st.sampled_from([b"", b"{}", "🦊\u202e\ufeff\U0010ffff".encode()]),
    st.binary(min_size=1, max_size=4).map(lambda b: b * 400),
).filter(lambda body: not body.startswith((CLOSED, JOINED)))
large = st.binary(min_size=1, max_size=4).map(lambda b: (b * (1 << 20))[: 1 << 20])
workers = st.sampled_from(WORKERS)
maybe_workers = st.sampled_from([None, *WORKERS])
agents = st.sampled_from(AGENTS)
names = st.sampled_from(SESSIONS)
kinds = st.sampled_from(["queue", "steer", "note"])
opening = st.sampled_from(["queue", "steer"])
index = st.integers(0, 1 << 16)
steps = st.integers(0, 3)
requests = st.builds(CancelRequest, st.sampled_from(["ann", "名前"]), texts, st.sampled_from(["", "r1"]))
answers = st.sampled_from(
    [Answer("approved", by="ann"), Answer("rejected", reason="non, merci"), Answer("value", {"n": [1, None, "🦊"]})]
)
few = st.lists(bodies, max_size=3)


Rule = TypeVar("Rule", bound=Callable[..., None])


def has(*wanted: Callable[[Any], Any]) -> Callable[[Rule], Rule]:
    """A rule for when all of these find something."""
    return precondition(lambda self: all(find(self) for find in wanted))


class StoreContract(StoreMachine):
    """The rules: what may happen to a store. Each name says what must come of it."""

    @initialize(worker=workers, parked=st.booleans(), kind=kinds)
    def a_store_has_a_past(self, worker: str, parked: bool, kind: Any) -> None:
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
        self.send(Claim(left["id"], worker, left["generation"], self.tick()))
        self.a_blob_is_put_and_read(b"kept")
        self.send(self.referring(busy, self.a_blob(b"referred to"), "append"))

    # ------------------------------------------------------------------ accept

    def accept_on(self, session: Plain, body: bytes, kind: Any = "queue", **more: Any) -> Accept:
        return Accept(session["id"], session["agent"], body, f"op-{self.now}", self.tick(), kind, **more)

    def fresh(self) -> list[str]:
        return [name for name in SESSIONS if name not in self.model.sessions]

    def idle(self) -> list[Plain]:
        return [s for s in self.model.live() if s["turn"] is None]

    def deleted(self) -> list[Plain]:
        return [s for s in self.model.sessions.values() if s["deleted"]]

    @has(fresh)
    @rule(n=index, agent=agents, body=bodies, kind=kinds, worker=maybe_workers)
    def the_first_input_makes_the_session(self, n: int, agent: str, body: bytes, kind: Any, worker: str | None) -> None:
        name = self.pick(self.fresh(), n)
        write = Accept(name, agent, body, f"op-{self.now}", self.tick(), kind, worker=worker)
        answer = self.send(write)
        assert (answer["turn"], answer["opened"]) == (1, kind != "note")

    @has(idle)
    @rule(n=index, body=bodies, kind=opening, worker=maybe_workers, step=steps)
    def an_input_opens_a_turn_of_an_idle_session(
        self, n: int, body: bytes, kind: Any, worker: str | None, step: int
    ) -> None:
        session = self.pick(self.idle(), n)
        self.tick(step - 1)  # the clocks of two hosts need not agree
        assert self.send(self.accept_on(session, body, kind, worker=worker))["opened"]

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

    @has(deleted)
    @rule(n=index, body=bodies, key=st.sampled_from([None, *KEYS]))
    def an_input_for_a_deleted_session_is_refused(self, n: int, body: bytes, key: str | None) -> None:
        session = self.pick(self.deleted(), n)
        self.send(self.accept_on(session, body, key=key, digest=b"a"), SessionDeleted)

    # ------------------------------------------------------------------ claim

    def unowned(self) -> list[Plain]:
        return [s for s in self.claimable() if s["owner"] is None]

    def held(self) -> list[Plain]:
        return self.turns(owned=True)

    @has(unowned)
    @rule(n=index, worker=workers)
    def an_unowned_turn_is_claimed(self, n: int, worker: str) -> None:
        session = self.pick(self.unowned(), n)
        assert self.send(Claim(session["id"], worker, session["generation"], self.tick(), session["agent"]))["won"]

    @has(held)
    @rule(n=index, worker=workers)
    def a_turn_is_taken_from_its_owner(self, n: int, worker: str) -> None:
        session = self.pick(self.held(), n)
        last = session["takeovers"] == 3 or session["owner"] == worker
        answer = self.send(Claim(session["id"], worker, session["generation"], self.tick()))
        assert answer["won"] is not last

    @has(StoreMachine.turns)
    @rule(n=index, worker=workers, old=st.integers(2, 4))
    def a_claim_on_a_stale_generation_loses(self, n: int, worker: str, old: int) -> None:
        session = self.pick(self.turns(), n)
        assert not self.send(Claim(session["id"], worker, session["generation"] - old, self.tick()))["won"]

    @has(lambda self: self.writes(Claim))
    @rule(n=index)
    def a_claim_is_sent_again(self, n: int) -> None:
        self.send(self.pick(self.writes(Claim), n))

    @rule(name=names, worker=workers, generation=st.integers(0, 3))
    def anything_may_be_claimed(self, name: str, worker: str, generation: int) -> None:
        self.send(Claim(name, worker, generation, self.tick()))

    @has(StoreMachine.claimable)
    @rule(n=index)
    def a_turn_that_kills_its_owners_gets_stuck(self, n: int) -> None:
        session = self.pick(self.claimable(), n)
        won = []
        for _ in range(6):
            worker = "w1" if session["owner"] == "w2" else "w2"
            won.append(self.send(Claim(session["id"], worker, session["generation"], self.tick()))["won"])
        assert (won[-1], session["state"], session["owner"]) == (False, "stuck", None)

    def writes(self, kind: type) -> list[Any]:
        return [write for write in self.sent if type(write) is kind]

    # ------------------------------------------------------------------ append

    def appending(self, session: Plain, bodies: list[bytes], **more: Any) -> Append:
        scope = self.scope(session)
        return Append(scope, self.next_nodes(scope, bodies), self.tick(), **more)

    @has(held)
    @rule(n=index, some=few)
    def records_are_appended(self, n: int, some: list[bytes]) -> None:
        session = self.pick(self.held(), n)
        assert self.send(self.appending(session, some))["cancel"] == session["cancel"]

    @has(held)
    @rule(n=index, body=large, said=st.booleans())
    def a_megabyte_is_a_record_like_any_other(self, n: int, body: bytes, said: bool) -> None:
        session = self.pick(self.held(), n)
        self.send(self.accept_on(session, body) if said else self.appending(session, [body]))

    def with_mail(self) -> list[Plain]:
        return [s for s in self.held() if self.mail(s, "steer", "note")]

    @has(with_mail)
    @rule(n=index, some=st.lists(bodies, min_size=1, max_size=2), all_of_it=st.booleans())
    def inputs_are_delivered_into_the_turn(self, n: int, some: list[bytes], all_of_it: bool) -> None:
        session = self.pick(self.with_mail(), n)
        mail = self.mail(session, "steer", "note")
        answer = self.send(self.appending(session, some, take=tuple(mail if all_of_it else mail[:1])))
        assert answer["mail"] is (len(mail) > 1 and not all_of_it)

    def new_wait(self, session: Plain, number: int, due: int | None, body: bytes) -> WaitRow:
        call = f"{session['id']}.{session['turn']}.1.{number}"
        return WaitRow(f"wait:{call}", session["sid"], session["turn"], call, "approval", due=due, body=body)

    @has(held)
    @rule(n=index, some=few, number=st.integers(0, 2), due=st.sampled_from([None, 900, 2_000]), body=bodies)
    def waits_open(self, n: int, some: list[bytes], number: int, due: int | None, body: bytes) -> None:
        session = self.pick(self.held(), n)
        self.send(self.appending(session, some, waits=(self.new_wait(session, number, due, body),)))

    @has(held)
    @rule(n=index, some=few, number=st.integers(0, 2), due=st.sampled_from([None, 900, 2_000]))
    def a_turn_parks_unless_an_answer_or_a_cancel_was_faster(
        self, n: int, some: list[bytes], number: int, due: int | None
    ) -> None:
        session = self.pick(self.held(), n)
        wait = self.new_wait(session, number, due, b"{}")
        answered = self.model.waits.get(wait.id, {"state": "open"})["state"] != "open"
        answer = self.send(self.appending(session, some, waits=(wait,), park=(wait.id,)))
        assert answer["parked"] is not (answered or answer["cancel"] is not None)

    @has(held)
    @rule(n=index)
    def a_turn_does_not_park_on_a_wait_that_is_not_there(self, n: int) -> None:
        session = self.pick(self.held(), n)
        assert not self.send(self.appending(session, [], park=("wait:nothing",)))["parked"]

    @has(lambda self: self.writes(Append))
    @rule(n=index)
    def an_append_is_sent_again(self, n: int) -> None:
        write = self.pick(self.writes(Append)[-8:], n)
        if write.nodes or write.park:  # without records there is nothing to tell it from a new one
            self.send(write)

    @has(held)
    @rule(n=index, some=few)
    def the_last_append_is_sent_again_and_answered_alike(self, n: int, some: list[bytes]) -> None:
        session = self.pick(self.held(), n)
        wait = self.new_wait(session, 7, None, b"{}")
        write = self.appending(session, [*some, b"end"], waits=(wait,), park=(wait.id,))
        assert self.send(write) == self.send(write)

    @has(held)
    @rule(n=index, other=st.sampled_from(["owner", "generation", "later", "turn"]), ends=st.integers(0, 2))
    def a_relieved_owner_changes_nothing(self, n: int, other: str, ends: int) -> None:
        session = self.pick(self.held(), n)
        scope = self.scope(session)
        changed = {
            "owner": replace(scope, owner="w9"),
            "generation": replace(scope, generation=scope.generation - 1),
            "later": replace(scope, generation=scope.generation + 1),
            "turn": replace(scope, turn=session["next"]),
        }[other]
        nodes = (Node(50, CLOSED + b"by a stranger"),)
        append: Any = Append(changed, nodes, self.tick(), waits=(self.new_wait(session, 1, 5, b""),))
        commit: Any = Commit(changed, nodes, session["head"], self.tick())
        release: Any = Release(changed, self.tick(), stuck="by a stranger")
        self.send((append, commit, release)[ends], Fenced)

    @has(held)
    @rule(n=index)
    def a_record_is_never_written_over(self, n: int) -> None:
        session = self.pick(self.held(), n)
        scope = self.scope(session)
        first = self.model.nodes[scope.sid, scope.turn][0]
        self.send(Append(scope, (Node(0, first + b"?"),), self.tick()), InternalError)

    # ------------------------------------------------------------------ commit

    def committing(self, session: Plain, bodies: list[bytes], **more: Any) -> Commit:
        scope = self.scope(session)
        nodes = self.next_nodes(scope, [*bodies, CLOSED + b"%d" % self.now])
        return Commit(scope, nodes, more.pop("head", session["head"]), self.tick(), **more)

    def uncancelled(self) -> list[Plain]:
        return self.turns(owned=True, cancel=False)

    def cancelled(self) -> list[Plain]:
        return self.turns(owned=True, cancel=True)

    @has(uncancelled)
    @rule(n=index, some=few, take=st.booleans())
    def a_commit_moves_the_head_and_opens_what_waits(self, n: int, some: list[bytes], take: bool) -> None:
        session = self.pick(self.uncancelled(), n)
        turn, taken = session["turn"], tuple(self.mail(session, "steer", "note")) if take else ()
        waiting = [m for m in self.mail(session, "queue", "steer") if m not in taken]
        row = self.send(self.committing(session, some, take=taken))["row"]
        assert (row["head"], row["turn"]) == (turn, waiting[0] if waiting else None)

    @has(held)
    @rule(n=index, off=st.sampled_from([-1, 1]))
    def a_commit_on_another_head_is_refused(self, n: int, off: int) -> None:
        session = self.pick(self.held(), n)
        self.send(self.committing(session, [], head=session["head"] + off, cancelled=True), HeadMoved)

    @has(cancelled)
    @rule(n=index, some=few)
    def a_cancel_request_wins_over_a_commit(self, n: int, some: list[bytes]) -> None:
        session = self.pick(self.cancelled(), n)
        self.send(self.committing(session, some), {"cancel": session["cancel"]})

    @has(cancelled)
    @rule(n=index, some=few)
    def a_cancelled_turn_is_committed(self, n: int, some: list[bytes]) -> None:
        session = self.pick(self.cancelled(), n)
        turn = session["turn"]
        assert self.send(self.committing(session, some, cancelled=True))["row"]["head"] == turn

    @has(lambda self: self.writes(Commit))
    @rule(n=index)
    def a_commit_is_sent_again(self, n: int) -> None:
        self.send(self.pick(self.writes(Commit), n))

    @has(uncancelled)
    @rule(n=index)
    def records_that_are_there_cannot_be_committed_again(self, n: int) -> None:
        session = self.pick(self.uncancelled(), n)
        append = self.appending(session, [b"too early"])
        self.send(append)
        self.send(Commit(append.scope, append.nodes, session["head"], self.tick()), InternalError)
        self.send(self.committing(session, []))

    # ------------------------------------------------------------------ cancel

    @has(StoreMachine.turns)
    @rule(n=index, request=requests, worker=maybe_workers, named=st.booleans())
    def the_open_turn_is_asked_to_stop_and_the_first_to_ask_counts(
        self, n: int, request: CancelRequest, worker: str | None, named: bool
    ) -> None:
        session = self.pick(self.turns(), n)
        status = "requested" if session["cancel"] is None else "already_requested"
        turn = session["turn"] if named else None
        assert self.send(Cancel(session["id"], request, self.tick(), turn, worker))["status"] == status
        assert self.send(Cancel(session["id"], request, self.tick(), turn))["status"] == "already_requested"

    def queued(self) -> list[tuple[Plain, int]]:
        return [(s, number) for s in self.model.live() for number in self.mail(s, "queue", "steer")]

    @has(queued)
    @rule(n=index, request=requests)
    def a_queued_turn_is_asked_to_stop(self, n: int, request: CancelRequest) -> None:
        session, number = self.pick(self.queued(), n)
        first = self.model.inbox[session["sid"]][number][1] is None
        status = "requested" if first else "already_requested"
        assert self.send(Cancel(session["id"], request, self.tick(), number))["status"] == status
        assert self.send(Cancel(session["id"], request, self.tick(), number))["status"] == "already_requested"

    def noted(self) -> list[tuple[Plain, int]]:
        return [(s, number) for s in self.model.live() for number in self.mail(s, "note")]

    @has(noted)
    @rule(n=index, request=requests)
    def a_note_cannot_be_stopped(self, n: int, request: CancelRequest) -> None:
        session, number = self.pick(self.noted(), n)
        assert self.send(Cancel(session["id"], request, self.tick(), number, "w1"))["status"] == "completion_won"

    @rule(name=names, request=requests, turn=st.sampled_from([None, -1, 0, 1, 2, 3, 999]))
    def anything_may_be_asked_to_stop(self, name: str, request: CancelRequest, turn: int | None) -> None:
        answer = self.send(Cancel(name, request, self.tick(), turn))
        if turn is not None and not 0 < turn < 999:
            assert answer["status"] == "unknown"

    @has(idle)
    @rule(n=index, request=requests)
    def a_cancel_after_the_end_changes_nothing(self, n: int, request: CancelRequest) -> None:
        session = self.pick(self.idle(), n)
        assert self.send(Cancel(session["id"], request, self.tick(), worker="w1"))["status"] == "completion_won"

    # ------------------------------------------------------------------ waits

    def open_waits(self) -> list[str]:
        return [w["id"] for w in self.model.waits.values() if w["state"] == "open"]

    @has(open_waits)
    @rule(n=index, answer=answers, worker=maybe_workers, agents=st.sampled_from([(), AGENTS, AGENTS[:1]]))
    def the_first_answer_stands(self, n: int, answer: Answer, worker: str | None, agents: tuple[str, ...]) -> None:
        wait = self.pick(self.open_waits(), n)
        first = self.send(Resolve(wait, answer, self.tick(), worker, agents))
        assert first["status"] == "accepted"
        later = self.send(Resolve(wait, Answer("failed"), self.tick(), worker, agents))
        assert (later["status"], later["wait"]) == ("already_resolved", first["wait"])

    @has(open_waits)
    @rule(n=index, answer=answers)
    def a_wait_expires_and_an_answer_comes_too_late(self, n: int, answer: Answer) -> None:
        wait = self.pick(self.open_waits(), n)
        assert self.send(Resolve(wait, None, self.tick(), "w1", AGENTS))["wait"]["state"] == "expired"
        assert self.send(Resolve(wait, answer, self.tick()))["wait"]["state"] == "expired"

    @has(lambda self: self.model.waits)
    @rule(n=index, answer=answers)
    def a_revoked_wait_is_unknown_like_one_that_never_was(self, n: int, answer: Answer) -> None:
        wait = self.pick(list(self.model.waits.values()), n)
        over = wait["state"] == "revoked" or wait["sid"] not in [s["sid"] for s in self.model.live()]
        assert (self.send(Resolve(wait["id"], answer, self.tick()))["status"] == "unknown") is over
        self.send(Resolve("nothing", answer, self.tick()), {"status": "unknown", "wait": None, "row": None})

    # ------------------------------------------------------------------ letting go

    @has(held)
    @rule(n=index, why=st.sampled_from([None, "the disk hums", ""]))
    def a_turn_is_let_go_or_gets_stuck(self, n: int, why: str | None) -> None:
        session = self.pick(self.held(), n)
        write = Release(self.scope(session), self.tick(), stuck=why)
        self.send(write)
        self.send(write)
        assert session["owner"] is None
        assert (session["state"] == "stuck") is (why is not None)

    @has(lambda self: self.writes(Release))
    @rule(n=index)
    def a_release_is_sent_again(self, n: int) -> None:
        self.send(self.pick(self.writes(Release), n))

    # ------------------------------------------------------------------ workers

    @rule(worker=workers, beat=st.integers(0, 3), host=texts)
    def a_worker_says_that_it_lives(self, worker: str, beat: int, host: str) -> None:
        known = worker in self.model.workers
        self.send(Beat(WorkerRow(worker, host, "boot", 7, self.now, beat, 30_000)), known or beat == 0)

    @has(lambda self: self.model.workers)
    @rule(n=index, dead=st.booleans())
    def a_worker_leaves_or_is_retired_when_it_owns_nothing(self, n: int, dead: bool) -> None:
        worker = self.pick(sorted(self.model.workers), n)
        owns = any(s["owner"] == worker for s in self.held())
        self.send(Retire(worker, dead))
        assert (worker in self.model.workers) is (dead and owns)

    @rule(worker=workers)
    def a_worker_whose_lease_is_held_is_never_proven_dead(self, worker: str) -> None:
        lease, judge = self.store.lease(worker), self.store.lease("judge")
        lease.hold()
        assert not judge.proven_dead(WorkerRow(worker, "here", "boot", 7, 0))
        lease.drop()

    # ------------------------------------------------------------------ branch and delete

    @has(lambda self: self.model.live(), fresh)
    @rule(n=index, m=index, agent=agents, turn=st.integers(1, 3), ordinal=st.integers(0, 3))
    def a_session_branches_off(self, n: int, m: int, agent: str, turn: int, ordinal: int) -> None:
        source, name = self.pick(self.model.live(), n), self.pick(self.fresh(), m)
        write = Branch(name, agent, source["id"], turn, ordinal, self.tick())
        row = self.send(write)
        assert (row["head"], row["fork"]["sid"]) == (0, source["sid"])
        self.send(write, row)

    @has(lambda self: len(self.model.live()) > 1)
    @rule(n=index, m=index, ordinal=st.integers(4, 5))
    def a_branch_cannot_take_an_id_in_use(self, n: int, m: int, ordinal: int) -> None:
        source, other = self.pick(self.model.live(), n), self.pick(self.model.live(), m)
        self.send(Branch(other["id"], other["agent"], source["id"], 1, ordinal, self.tick()), InvalidSessionId)

    @has(deleted)
    @rule(n=index)
    def nothing_branches_off_a_deleted_or_unknown_session(self, n: int) -> None:
        source = self.pick(self.deleted(), n)
        self.send(Branch("branch", "clerk", source["id"], 1, 0, self.tick()), SessionDeleted)
        self.send(Branch("branch", "clerk", "nothing", 1, 0, self.tick()), UnknownSession)

    @has(lambda self: len(self.model.live()) > 1)
    @rule(n=index)
    def a_session_is_deleted_once_and_its_owner_is_fenced(self, n: int) -> None:
        session = self.pick(self.model.live(), n)
        scope = self.scope(session) if session["turn"] is not None else None
        self.send(Delete(session["id"], self.tick()), True)
        self.send(Delete(session["id"], self.tick()), False)
        if scope is not None:
            self.send(Append(scope, (Node(9, b"late"),), self.tick()), SessionDeleted)
        self.sweep()

    # ------------------------------------------------------------------ blobs

    def a_blob(self, data: bytes) -> str:
        digest = self.run(self.store.blobs.put(data))
        assert digest == self.model.put_blob(data) == self.run(self.store.blobs.put(data))
        return digest

    @rule(data=st.one_of(bodies, large))
    def a_blob_is_put_and_read(self, data: bytes) -> None:
        assert self.run(self.store.blobs.get(self.a_blob(data))) == data

    @has(lambda self: self.model.blobs, held)
    @rule(n=index, m=index, how=st.sampled_from(["accept", "append", "commit"]))
    def a_blob_is_referred_to(self, n: int, m: int, how: str) -> None:
        session, digest = self.pick(self.held(), n), self.pick(sorted(self.model.blobs), m)
        self.send(self.referring(session, digest, how))

    @has(held)
    @rule(n=index, how=st.sampled_from(["accept", "append", "commit"]))
    def a_reference_to_a_missing_blob_is_refused(self, n: int, how: str) -> None:
        self.send(self.referring(self.pick(self.held(), n), "0" * 64, how), BlobMissing)

    def referring(self, session: Plain, digest: str, how: str) -> Any:
        if how == "accept":
            return self.accept_on(session, b"see the blob", blobs=(digest,))
        if how == "append":
            return self.appending(session, [b"see the blob"], blobs=(digest,))
        return self.committing(session, [b"see the blob"], blobs=(digest,), cancelled=True)

    @has(lambda self: self.model.blobs)
    @rule(spare=bodies)
    def the_sweep_takes_orphans_and_nothing_else(self, spare: bytes) -> None:
        self.a_blob(spare)
        self.sweep()

    def sweep(self) -> None:
        orphans = self.model.orphans()
        assert self.run(self.store.sweep()) == len(orphans)
        for digest in orphans:
            del self.model.blobs[digest]
            assert self.run(self.missing(digest))
        for digest, data in self.model.blobs.items():
            assert self.run(self.store.blobs.get(digest)) == data

    async def missing(self, digest: str) -> bool:
        try:
            await self.store.blobs.get(digest)
        except BlobMissing:
            return True
        return False

    # ------------------------------------------------------------------ reading

    @rule(
        agent=st.sampled_from([None, *AGENTS]),
        state=st.sampled_from([None, "idle", "open", "parked", "stuck"]),
        prefix=st.sampled_from(["", "chat", "chat.", "Ü", "e\u0301", "%"]),
        limit=st.sampled_from([0, 1, 2, 100]),
        back=st.sampled_from([None, 0, 3, 10]),
    )
    def sessions_are_listed(
        self, agent: str | None, state: str | None, prefix: str, limit: int, back: int | None
    ) -> None:
        wanted = SessionFilter(agent, state, prefix, limit, None if back is None else self.now - back)
        assert [plain(row) for row in self.run(self.store.sessions(wanted))] == self.model.listed(wanted)

    @has(lambda self: self.model.sessions)
    @rule(n=index, first=st.integers(0, 4), count=st.sampled_from([-1, 0, 1, 2, 500]), due=st.integers(0, 3_000))
    def turns_and_waits_are_read(self, n: int, first: int, count: int, due: int) -> None:
        sid = self.pick(list(self.model.sessions.values()), n)["sid"]
        history = self.run(self.store.nodes(sid, first, first + count))
        assert history == self.model.history(sid, first, first + count)
        waiting = [w for w in self.model.waits.values() if w["state"] == "open"]
        late = [w for w in waiting if w["due"] is not None and w["due"] <= due]
        assert by_key(self.run(self.store.waits()), "id") == sorted(waiting, key=lambda w: w["id"])
        assert by_key(self.run(self.store.waits(due=due)), "id") == sorted(late, key=lambda w: w["id"])
        for wait in self.model.waits.values():
            assert plain(self.run(self.store.wait(wait["id"]))) == wait

    @rule(deep=st.booleans(), digest=st.sampled_from(["", "0" * 64, "../" * 21 + "x", "Z" * 64]))
    def facts_are_counted_and_what_is_not_there_is_not_found(self, deep: bool, digest: str) -> None:
        facts = self.run(self.store.facts(deep))
        counted = (facts.sessions, facts.nodes, facts.blobs)
        records = sum(map(len, self.model.nodes.values()))
        assert counted == (len(self.model.live()), records, len(self.model.blobs))
        assert self.run(self.store.session("nothing")) is None
        assert self.run(self.store.session_by_sid(99)) is None
        assert self.run(self.store.wait("nothing")) is None
        for read in (self.store.nodes(99, 1, 9), self.store.inbox(99), self.store.waits(99)):
            assert self.run(read) == []
        assert self.run(self.missing(digest))

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
