"""What is no input and no write of an owner: answers, settings, workers, branches and deletions."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule
from msgspec.structs import replace

from perdure.errors import BlobMissing, InvalidSessionId, SessionDeleted, StaleSettings, UnknownSession
from perdure.model.codec import encode
from perdure.model.record import Spilled
from perdure.model.session import Answer, CancelRequest, Node, Offers, WorkerRow
from perdure.model.write import Append, Beat, Branch, Cancel, Configure, Delete, Resolve, Retire, SessionRef
from tests.stores.oracle.machine import StoreMachine
from tests.stores.oracle.values import (
    AGENTS,
    agents,
    answers,
    bodies,
    decisions,
    has,
    index,
    lives,
    maybe_workers,
    names,
    os_processes,
    requests,
    switches,
    texts,
    workers,
)

UNKNOWN = {"status": "unknown", "wait": None, "row": None}


class OutsideRules(StoreMachine):
    """What persons, hosts and other workers do."""

    # ------------------------------------------------------------------ waits

    def open_waits(self) -> list[str]:
        return [w["id"] for w in self.model.waits.values() if w["state"] == "open"]

    def waits_of(self, *, cancel: bool) -> list[str]:
        """Open waits of turns that were asked to stop, or not."""
        stopped = [s["sid"] for s in self.turns(cancel=True)]
        return [name for name in self.open_waits() if (self.model.waits[name]["sid"] in stopped) is cancel]

    @has(lambda self: self.waits_of(cancel=False))
    @rule(n=index, answer=answers, worker=maybe_workers, agents=st.sampled_from([(), AGENTS, AGENTS[:1]]))
    def the_first_answer_stands(self, n: int, answer: Answer, worker: str | None, agents: tuple[str, ...]) -> None:
        wait = self.pick(self.waits_of(cancel=False), n)
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

    @has(open_waits)
    @rule(n=index, answer=answers, request=requests, worker=maybe_workers)
    def an_answer_to_a_turn_that_was_asked_to_stop_is_not_taken(
        self, n: int, answer: Answer, request: CancelRequest, worker: str | None
    ) -> None:
        wait = self.model.waits[self.pick(self.open_waits(), n)]
        session = next(s for s in self.turns() if s["sid"] == wait["sid"])
        self.send(Cancel(SessionRef(session["id"]), request, self.tick(), worker=worker))
        told = self.send(Resolve(wait["id"], answer, self.tick(), worker, AGENTS))
        assert (told["status"], told["wait"]["state"], wait["state"]) == ("already_resolved", "cancelled", "open")

    @has(StoreMachine.held)
    @rule(n=index, answer=answers)
    def a_revoked_wait_is_unknown_like_one_that_never_was(self, n: int, answer: Answer) -> None:
        session = self.pick(self.held(), n)
        wait = self.new_wait(session, 8, None, b"{}")
        self.send(self.appending(session, [b"reserved"], waits=(wait,)))
        self.send(self.appending(session, [b"over"], waits=(replace(wait, state="revoked"),)))
        assert self.send(Resolve(wait.id, answer, self.tick()))["status"] == "unknown"
        self.send(Resolve("nothing", answer, self.tick()), UNKNOWN)

    @has(StoreMachine.held)
    @rule(n=index, answer=st.one_of(st.none(), answers), deleted=st.booleans())
    def waits_go_with_their_turn_whatever_became_of_them(self, n: int, answer: Answer | None, deleted: bool) -> None:
        session = self.pick(self.held(), n)
        new = [self.new_wait(session, number, None, b"{}") for number in (4, 5)]
        self.send(self.appending(session, [b"asks"], waits=tuple(new)))
        self.send(Resolve(new[0].id, answer, self.tick()))
        gone = [w["id"] for w in self.model.waits.values() if w["sid"] == session["sid"]]
        if deleted and len(self.model.live()) > 1:
            self.send(Delete(session["id"], self.tick()), True)
        else:
            self.send(self.committing(session, [], cancelled=session["cancel"] is not None))
        for name in gone:
            assert self.run(self.store.wait(name)) is None
            self.send(Resolve(name, answer, self.tick(), "w1", AGENTS), UNKNOWN)

    @has(lambda self: self.turns(owned=True, cancel=False))
    @rule(n=index, body=bodies, answered=st.booleans())
    def what_a_wait_refers_to_is_kept_until_its_turn_is_over(self, n: int, body: bytes, answered: bool) -> None:
        session = self.pick(self.turns(owned=True, cancel=False), n)
        asked, said = self.a_blob(b"asked " + body), self.a_blob(b"said " + body)
        wait = self.new_wait(session, 6, None, encode(Spilled(asked, 5)))
        known = wait.id in self.model.waits
        self.send(self.appending(session, [b"asks"], waits=(wait,)))
        if answered:
            self.send(Resolve(wait.id, Spilled(said, 4), self.tick()))
        self.sweep()
        assert known or ((asked in self.model.blobs), (said in self.model.blobs)) == (True, answered)
        self.send(self.committing(session, []))
        self.sweep()

    @has(lambda self: self.turns(owned=True, cancel=False))
    @rule(n=index, answer=st.booleans())
    def a_wait_or_an_answer_that_lacks_its_blob_is_refused(self, n: int, answer: bool) -> None:
        session, missing = self.pick(self.turns(owned=True, cancel=False), n), Spilled("0" * 64, 9)
        wait = self.new_wait(session, 9, None, b"{}" if answer else encode(missing))
        opened = self.appending(session, [b"asks"], waits=(wait,))
        if not answer:
            self.send(opened, BlobMissing)
            return
        self.send(opened)
        if self.model.waits[wait.id]["state"] == "open":
            self.send(Resolve(wait.id, missing, self.tick()), BlobMissing)

    # ------------------------------------------------------------------ settings

    @rule(
        name=names,
        agent=agents,
        settings=decisions,
        expected=st.one_of(st.none(), decisions),
        following=st.one_of(st.none(), st.integers(1, 3)),
    )
    def anything_may_be_configured(
        self, name: str, agent: str, settings: bytes, expected: bytes | None, following: int | None
    ) -> None:
        self.send(Configure(name, agent, settings, self.tick(), expected, next=following))

    @has(lambda self: self.model.live())
    @rule(n=index, settings=decisions, careful=st.booleans())
    def a_session_is_configured_and_the_same_again_changes_nothing(
        self, n: int, settings: bytes, careful: bool
    ) -> None:
        session = self.pick(self.model.live(), n)
        expected = session["settings"] if careful else None
        row = self.send(Configure(session["id"], session["agent"], settings, self.tick(), expected))
        assert row["settings"] == settings
        self.send(Configure(session["id"], session["agent"], settings, self.tick(), expected), row)

    @has(lambda self: self.model.live())
    @rule(n=index, missing=st.booleans())
    def settings_that_changed_meanwhile_or_lack_a_blob_are_refused(self, n: int, missing: bool) -> None:
        session = self.pick(self.model.live(), n)
        expected = None if missing else session["settings"] + b" "
        blobs = ("0" * 64,) if missing else (self.a_blob(b"of settings"),)
        write = Configure(session["id"], session["agent"], b'{"label":"new"}', self.tick(), expected, blobs)
        if session["settings"] != write.settings:
            self.send(write, BlobMissing if missing else StaleSettings)
            self.sweep()

    @has(StoreMachine.fresh)
    @rule(n=index, missing=st.booleans())
    def a_refused_configuration_makes_no_session(self, n: int, missing: bool) -> None:
        name = self.pick(self.fresh(), n)
        expected, blobs = (None, ("0" * 64,)) if missing else (b'{"label":"old"}', ())
        write = Configure(name, "clerk", b'{"label":"new"}', self.tick(), expected, blobs)
        self.send(write, BlobMissing if missing else StaleSettings)

    @has(lambda self: self.turns(owned=True, cancel=False))
    @rule(n=index, edits=switches, recorded=st.sampled_from([None, {}, {"p": 2}, {"p": 3}, {"q": 9}]))
    def a_commit_switches_tools_and_takes_out_what_it_recorded(
        self, n: int, edits: dict[str, bool | None], recorded: dict[str, int] | None
    ) -> None:
        session = self.pick(self.turns(owned=True, cancel=False), n)
        self.send(self.committing(session, [], tools=edits, recorded=recorded))

    # ------------------------------------------------------------------ workers

    @rule(worker=workers, beat=st.integers(0, 3), host=texts, process=os_processes, lived=lives)
    def a_worker_says_that_it_lives(self, worker: str, beat: int, host: str, process: str, lived: int) -> None:
        known, offers = worker in self.model.workers, Offers((host,), ("nightly", "名前"))
        row = WorkerRow(worker, host, "boot", 7, self.now, beat, 30_000, offers if beat else None, process, lived, 5)
        self.send(Beat(row), known or beat == 0)

    @has(lambda self: self.model.workers)
    @rule(n=index, dead=st.booleans())
    def a_worker_leaves_or_is_retired_when_it_owns_nothing(self, n: int, dead: bool) -> None:
        worker = self.pick(sorted(self.model.workers), n)
        owns = any(s["owner"] == worker for s in self.held())
        self.send(Retire(worker, dead, beside=tuple(self.model.workers)))
        assert worker not in self.model.workers if not dead else worker in self.model.workers or not owns

    @rule(worker=workers)
    def a_worker_whose_lease_is_held_is_never_proven_dead(self, worker: str) -> None:
        lease = self.store.lease(worker)
        self.run(lease.hold())
        assert not self.run(self.store.proven_dead(WorkerRow(worker, "here", "boot", 7, 0)))
        self.run(lease.drop())

    # ------------------------------------------------------------------ branch and delete

    @has(lambda self: self.model.live(), StoreMachine.fresh)
    @rule(n=index, m=index, agent=agents, back=st.integers(0, 2), ordinal=st.integers(0, 3), whole=st.booleans())
    def a_session_branches_off(self, n: int, m: int, agent: str, back: int, ordinal: int, whole: bool) -> None:
        source, name = self.pick(self.model.live(), n), self.pick(self.fresh(), m)
        turn = max(source["head"] - back, 0)
        write = Branch(name, agent, source["id"], turn, ordinal, self.tick(), whole=whole)
        row = self.send(write)
        assert (row["head"], row["fork"]["sid"]) == (0, source["sid"])
        self.send(write, row)

    @has(lambda self: len(self.model.live()) > 1)
    @rule(n=index, m=index, ordinal=st.integers(4, 5))
    def a_branch_cannot_take_an_id_in_use(self, n: int, m: int, ordinal: int) -> None:
        source, other = self.pick(self.model.live(), n), self.pick(self.model.live(), m)
        self.send(Branch(other["id"], other["agent"], source["id"], 1, ordinal, self.tick()), InvalidSessionId)

    @has(StoreMachine.deleted)
    @rule(n=index)
    def nothing_branches_off_a_deleted_or_unknown_session(self, n: int) -> None:
        source = self.pick(self.deleted(), n)
        self.send(Branch("branch", "clerk", source["id"], 1, 0, self.tick()), SessionDeleted)
        self.send(Branch("branch", "clerk", "nothing", 1, 0, self.tick()), UnknownSession)

    @has(lambda self: len(self.model.live()) > 1)
    @rule(n=index, later=st.integers(0, 2))
    def a_session_is_forgotten_only_if_nothing_can_come_of_it(self, n: int, later: int) -> None:
        session = self.pick(self.model.live(), n)
        self.send(Delete(session["id"], self.tick(), unused_since=session["updated"] + later))
        self.sweep()

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
