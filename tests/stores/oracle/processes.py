"""What may happen to processes: who works on them, what others do to them, and who hears of it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from msgspec import convert
from msgspec.structs import replace

from perdure.errors import (
    BlobMissing,
    Conflict,
    Fenced,
    InvalidInput,
    ProcessConflict,
    ProcessEnded,
    ProcessPruned,
    UndeclaredEvent,
    UnknownProcess,
)
from perdure.model.process import (
    Abandoned,
    Cancelled,
    Cause,
    Event,
    Evidence,
    Failure,
    HostOrigin,
    ProcessRow,
    Registration,
    SessionOrigin,
    Success,
    WaitOn,
    WakeTarget,
)
from perdure.model.session import Answer, CancelRequest, Death, Node, WorkerRow
from perdure.model.write import (
    Accept,
    AddEvent,
    Advance,
    Beat,
    Branch,
    Cancel,
    Claim,
    Commit,
    Complete,
    Delete,
    Deliver,
    Dismiss,
    ExternalOwner,
    Outlived,
    ProcessFilter,
    ProcessLimits,
    ProcessRef,
    Prune,
    ReconciledAbandon,
    Register,
    Release,
    Resolve,
    Resume,
    Retire,
    SendSignal,
    SessionRef,
    Share,
    Transfer,
    TurnScope,
    WorkflowKey,
)
from tests.stores.oracle.plain import Plain
from tests.stores.oracle.process_machine import WATCHERS, ProcessMachine
from tests.stores.oracle.values import (
    AGENTS,
    bodies,
    few,
    has,
    index,
    lives,
    maybe_stuck,
    maybe_workers,
    requests,
    steps,
    texts,
    workers,
)

OWNING = ("#chat",)
"""Parents of what ends with its session."""
recoveries = st.sampled_from(["rerunnable", "rerunnable", "owner_bound", "reattachable", "externally_owned"])
watchers = st.sampled_from(WATCHERS)
policies = st.sampled_from(["turn", "notify", "none"])
payloads = st.sampled_from([None, 0, "🦊", {"loud": True, "text": "hé"}, {"loud": 0, "text": [1]}, {"loud": False}])
outcomes = st.one_of(
    payloads.map(Success),
    st.builds(Failure, st.sampled_from(["bug", "late"]), texts, payloads),
    st.builds(Cancelled, texts, texts, st.booleans()),
    st.builds(Abandoned, st.builds(Evidence, st.just("engine_gave_up"), st.just(7), st.none(), texts)),
)
askings = st.fixed_dictionaries(
    {
        "recovery": recoveries,
        "input": payloads,
        "parent_end": st.sampled_from(["cancel", "abandon"]),
        "max_attempts": st.sampled_from([None, 1, 2]),
        "open_signals": st.booleans(),
        "origin": st.sampled_from([HostOrigin(), HostOrigin("cron"), SessionOrigin("chat")]),
    }
)
begins_at_once = st.sampled_from([{}, {}, {"reference": {"job": "4d5"}, "store": "this"}])
filters = st.builds(
    ProcessFilter,
    status=st.sampled_from([(), ("running",), ("completed", "failed"), ("waiting", "stuck"), ("queued",)]),
    kind=st.sampled_from([None, "function", "tool"]),
    session_id=st.sampled_from([None, *WATCHERS]),
    origin=st.sampled_from([None, "chat", ""]),
    live=st.sampled_from([None, True, False]),
    stuck=st.sampled_from([None, True, False]),
    parent=st.sampled_from([None, "job"]),
    limit=st.sampled_from([0, 1, 100]),
)
authorities = st.sampled_from([ExternalOwner("ann"), WorkflowKey("wf-1"), ReconciledAbandon("ann")])
marks = st.one_of(
    st.builds(Event, st.sampled_from(["tick", "news", "signal.go", "signal.shout", "other"]), payloads),
    st.builds(Event, st.sampled_from(["process.progress", "process.external_ref_set"]), payloads),
    st.sampled_from(
        [
            Event("process.abandon_requested", {"by": "ann", "at": 3, "reason": "old"}),
            Event("process.caller_departed"),
            Event("process.completed", {"type": "success"}),
            Event("process.first_started"),
            Event("process.subscription_retargeted", {"session_id": "chat-2", "agent": "", "policy": "notify"}),
            Event("process.subscription_retargeted", {"session_id": "chat", "agent": "", "policy": "none"}),
        ]
    ),
)


class WorkerRules(ProcessMachine):
    """What workers do: register, claim, go on, park, end and leave."""

    @initialize(worker=workers, recovery=recoveries, watcher=watchers, policy=policies)
    def a_store_has_a_past(self, worker: str, recovery: Any, watcher: str, policy: Any) -> None:
        """Most lives begin in the middle, where every rule has something to work on."""
        self.send(Accept("chat", "clerk", b"hello", "op-0", self.tick(), worker="w1"))
        self.send(Beat(WorkerRow("w1", "here", "boot", 7, 0)))
        begun = self.asking("job", recovery=recovery, wake=WakeTarget(watcher, policy=policy))
        self.send(Register(begun, self.tick(), worker, grants=("chat",)))
        if recovery != "externally_owned":
            self.send(self.advancing(self.model.processes["job"], [b"one"], first=True))
        self.send(Register(self.asking("job.1", parent="job", parent_end="cancel"), self.tick(), worker))
        child = self.model.processes["job.1"]
        self.send(self.advancing(child, [b"waits"], first=True, park=(WaitOn("0", "process", "job"),)))
        target = WakeTarget("chat", "clerk", "turn")
        self.send(Register(self.asking("last", cause=Cause("tool_call", "c1"), wake=target), self.tick(), worker))
        self.send(self.advancing(self.model.processes["last"], [b"done"], first=True, outcome=Success({"n": 1})))

    @has(ProcessMachine.fresh_ids)
    @rule(n=index, m=index, asked=askings, worker=maybe_workers, policy=policies, begins=begins_at_once)
    def a_process_is_registered_once_and_the_same_asking_finds_it(
        self, n: int, m: int, asked: dict[str, Any], worker: str | None, policy: Any, begins: dict[str, Any]
    ) -> None:
        name, parent = self.pick(self.fresh_ids(), n), self.pick([None, "chat.1", *OWNING, *self.model.processes], m)
        wake = None if policy == "none" else WakeTarget(WATCHERS[m % 2], "clerk", policy)
        first = self.send(
            Register(
                self.asking(name, parent=parent, wake=wake, **asked), self.tick(), worker, WATCHERS[: m % 3], **begins
            )
        )
        moved_on = self.asking(name, parent=parent, **(asked | {"max_attempts": 9}))
        self.send(Register(moved_on, self.tick(), "w3"), {"row": first["row"], "known": True})
        other = self.asking(name, parent=parent, **(asked | {"input": [asked["input"]]}))
        self.send(Register(other, self.tick(), worker), ProcessConflict)

    @has(ProcessMachine.fresh_ids)
    @rule(n=index, total=st.sampled_from([1, 2, 4]), per_session=st.sampled_from([1, 2]), asked=askings)
    def as_many_are_registered_as_the_limits_allow(
        self, n: int, total: int, per_session: int, asked: dict[str, Any]
    ) -> None:
        wanted = self.asking(self.pick(self.fresh_ids(), n), **asked)
        self.send(Register(wanted, self.tick(), "w1", limits=ProcessLimits(total, per_session)))

    @has(ProcessMachine.fresh_ids)
    @rule(n=index)
    def a_registration_that_lacks_a_blob_or_a_parent_is_refused(self, n: int) -> None:
        asked = self.asking(self.pick(self.fresh_ids(), n))
        self.send(Register(asked, self.tick(), "w1", ("chat",), ("0" * 64,)), BlobMissing)
        orphan = self.asking(asked.id, parent=self.pick(self.fresh_ids(), n + 1))
        self.send(Register(orphan, self.tick(), "w1", ("chat",)), UnknownProcess)

    @has(ProcessMachine.live_processes)
    @rule(n=index, worker=workers, behind=st.sampled_from([0, 0, 0, 1]), proof=st.sampled_from([None, "lock free"]))
    def a_claim_is_won_once_and_fences_the_owner_before(
        self, n: int, worker: str, behind: int, proof: str | None
    ) -> None:
        row = self.pick(self.live_processes(), n)
        before, name = self.scope_of(row), row["registration"]["id"]
        claim = Claim(ProcessRef(name), worker, row["generation"] - behind, self.tick(), proof)
        answer = self.send(claim)
        assert self.send(claim)["won"] is answer["won"]
        if answer["won"] and before.owner != worker:
            assert answer["row"]["generation"] == before.generation + 1
            self.send(Advance(before, self.tick(), (Node(99, b"late"),), outcome=Success()), Fenced)
            self.send(Release(before, self.tick()), Fenced)

    @has(ProcessMachine.held_processes)
    @rule(n=index)
    def workers_die_on_a_process_one_after_the_other(self, n: int) -> None:
        row = self.pick(self.held_processes(), n)
        for worker in ("w7", "w8", "w9", "w10", "w11"):
            death = Death(row["owner"] or "", 5, -row["pid"])
            self.send(Claim(ProcessRef(row["registration"]["id"]), worker, row["generation"], self.tick(), death=death))

    @has(ProcessMachine.held_processes)
    @rule(n=index, lived=lives)
    def a_process_that_is_suspected_runs_beside_no_other_suspect(self, n: int, lived: int) -> None:
        for row in [self.pick(self.held_processes(), n), self.pick(self.held_processes(), n + 1)]:
            for worker in ("w7", "w8", "w1"):
                name = row["registration"]["id"]
                self.send(Claim(ProcessRef(name), worker, row["generation"], self.tick(), None, None, lived))
        running = self.model.workers["w1"]["suspect"] if "w1" in self.model.workers else None
        if running is not None:
            self.send(Outlived(running, "w1"))

    @has(ProcessMachine.held_processes)
    @rule(
        n=index,
        bodies=few,
        first=st.booleans(),
        kinds=st.lists(marks, max_size=2),
        key=st.booleans(),
        repeats=st.booleans(),
    )
    def the_owner_goes_on_and_the_same_sent_again_changes_nothing(
        self, n: int, bodies: list[bytes], first: bool, kinds: list[Event], key: bool, repeats: bool
    ) -> None:
        row = self.pick(self.held_processes(), n)
        told = [Event(e.type, e.payload, self.now, f"k{self.tick()}" if key else None) for e in kinds]
        kept = tuple(e for e in told if not e.type.startswith("process.") or e.type == "process.progress")
        write = self.advancing(row, bodies, first=first, events=kept, repeats=repeats)
        self.send_again(write, self.send(write))

    @has(ProcessMachine.held_processes)
    @rule(n=index, bodies=few, back=steps)
    def a_journal_is_cut_and_the_same_sent_again_brings_nothing_back(
        self, n: int, bodies: list[bytes], back: int
    ) -> None:
        row = self.pick(self.held_processes(), n)
        earlier = self.advancing(row, [b"before the cut"])
        self.send(earlier)
        write = self.advancing(row, [*bodies, b"segment"])
        last = write.records[-1].ordinal
        write = Advance(write.scope, write.at, write.records, seen=write.seen, drop=max(0, last - back))
        answer = self.send(write)
        self.send_again(write, answer)
        self.send_again(earlier, answer)

    @has(ProcessMachine.held_processes)
    @rule(
        n=index,
        m=index,
        ahead=st.sampled_from([None, 0, 3, 50]),
        signal=st.booleans(),
        behind=st.sampled_from([0, 0, 1]),
    )
    def the_owner_parks_unless_something_has_happened(
        self, n: int, m: int, ahead: int | None, signal: bool, behind: int
    ) -> None:
        row = self.pick(self.held_processes(), n)
        waits = [WaitOn("1", "time", due=self.now + ahead)] if ahead is not None else []
        waits += [WaitOn("2", "signal", "go")] if signal else []
        target = self.pick([*self.model.processes, "nothing"], m)
        waits += [WaitOn("4", "turn", ("chat.1", "chat-2.1", "nothing")[n % 3])] if m % 2 == 0 else []
        waits += [WaitOn("3", "process", target)] if m % 3 == 0 or not waits else []
        seen = row["record"]["sequence"] - behind // 2
        write = self.advancing(row, [b"parks"], first=True, park=tuple(waits), seen=seen)
        answer = self.send(write)
        self.send_again(write, answer)

    @has(ProcessMachine.held_processes)
    @rule(n=index, bodies=few, outcome=outcomes, first=st.booleans())
    def a_process_ends_once(self, n: int, bodies: list[bytes], outcome: Any, first: bool) -> None:
        row = self.pick(self.held_processes(), n)
        write = self.advancing(row, bodies, outcome=outcome, first=first)
        answer = self.send(write)
        self.send_again(write, answer | {"woken": []})
        other = Success("other") if outcome != Success("other") else Failure("other")
        self.send(Advance(write.scope, self.tick(), outcome=other), Fenced)

    @has(ProcessMachine.held_processes)
    @rule(n=index)
    def records_that_lack_a_blob_or_contradict_the_journal_are_refused(self, n: int) -> None:
        row = self.pick(self.held_processes(), n)
        self.send(self.advancing(row, [b"see the blob"], blobs=("0" * 64,), outcome=Success()), BlobMissing)

    @has(ProcessMachine.held_processes)
    @rule(n=index, stuck=st.sampled_from([None, "diverged"]))
    def an_owner_lets_go_once(self, n: int, stuck: str | None) -> None:
        row = self.pick(self.held_processes(), n)
        write = Release(self.scope_of(row), self.tick(), stuck)
        answer = self.send(write)
        self.send_again(write, answer | {"woken": []})

    @rule(worker=workers, dead=st.booleans())
    def a_worker_leaves_with_its_processes(self, worker: str, dead: bool) -> None:
        self.send(Retire(worker, dead, self.tick(), tuple(self.model.workers)))

    @has(lambda self: self.model.blobs, ProcessMachine.held_processes)
    @rule(n=index, m=index)
    def a_blob_of_a_process_is_kept_until_it_is_pruned(self, n: int, m: int) -> None:
        row, digest = self.pick(self.held_processes(), n), self.pick(sorted(self.model.blobs), m)
        self.send(self.advancing(row, [b"see the blob"], blobs=(digest,)))
        self.sweep()

    @rule(data=bodies)
    def a_blob_is_put(self, data: bytes) -> None:
        self.a_blob(data)

    @rule(crash=st.booleans())
    def the_store_is_closed_or_its_process_dies(self, crash: bool) -> None:
        self.ran["crashes"] += crash
        self.run(self.place.crash(self.store) if crash else self.store.close())
        self.store = self.opened()


class OtherRules(ProcessMachine):
    """What everybody else does: signal, stop, complete, share, be told, prune, list."""

    @has(ProcessMachine.live_processes)
    @rule(n=index, name=st.sampled_from(["go", "shout", "other", ""]), payload=payloads)
    def a_signal_is_heard_once(self, n: int, name: str, payload: Any) -> None:
        row = self.pick(self.live_processes(), n)
        process_id, key = row["registration"]["id"], f"s{self.tick()}"
        answer = self.send(SendSignal(process_id, name, payload, key, self.tick()))
        if isinstance(answer, dict):
            again = {"row": answer["row"], "sequence": answer["sequence"], "known": True, "woken": []}
            self.send(SendSignal(process_id, name, payload, key, self.tick()), again)
            self.send(SendSignal(process_id, name, [payload], key, self.tick()), Conflict)
        else:
            assert answer is UndeclaredEvent

    @has(lambda self: self.model.processes)
    @rule(n=index, event=marks)
    def anything_may_be_marked(self, n: int, event: Event) -> None:
        process_id = self.pick(list(self.model.processes), n)
        self.send(AddEvent(process_id, Event(event.type, event.payload, self.tick()), self.now))

    @has(lambda self: self.model.processes)
    @rule(n=index, request=requests)
    def a_cancel_request_is_made_once(self, n: int, request: CancelRequest) -> None:
        process_id = self.pick(list(self.model.processes), n)
        answer = self.send(Cancel(ProcessRef(process_id), request, self.tick()))
        if isinstance(answer, dict):
            over = answer["row"]["record"]["outcome"] is not None or answer["status"] == "completion_won"
            status = "completion_won" if over else "already_requested"
            again = {"status": status, "turn": None, "row": answer["row"], "woken": [], "each": []}
            self.send(Cancel(ProcessRef(process_id), request, self.tick()), again)

    @has(lambda self: self.model.processes)
    @rule(n=index, authority=authorities, outcome=outcomes)
    def whoever_may_says_how_a_process_ended(self, n: int, authority: Any, outcome: Any) -> None:
        self.send(Complete(self.pick(list(self.model.processes), n), outcome, authority, self.tick()))

    @has(lambda self: self.model.processes)
    @rule(n=index)
    def a_stuck_process_is_revived_once(self, n: int) -> None:
        process_id = self.pick(list(self.model.processes), n)
        if isinstance(self.send(Resume(ProcessRef(process_id), self.tick())), dict):
            self.send(Resume(ProcessRef(process_id), self.tick()), None)

    @has(ProcessMachine.ended_processes)
    @rule(n=index)
    def nothing_happens_to_what_is_over(self, n: int) -> None:
        process_id = self.pick(self.ended_processes(), n)["registration"]["id"]
        self.send(SendSignal(process_id, "go", None, f"s{self.tick()}", self.now), ProcessEnded)
        self.send(AddEvent(process_id, Event("process.progress", 1), self.now), ProcessEnded)
        assert not self.send(Claim(ProcessRef(process_id), "w1", 0, self.tick(), "dead"))["won"]

    # ------------------------------------------------------------------ grants

    @has(lambda self: self.model.processes)
    @rule(n=index, to=watchers, remove=st.booleans())
    def a_session_sees_a_process_or_no_longer(self, n: int, to: str, remove: bool) -> None:
        process_id = self.pick(list(self.model.processes), n)
        write = Share(to, (process_id, process_id), self.tick(), remove)
        if isinstance(self.send(write), int):
            self.send(write, 0)

    @has(lambda self: self.model.processes)
    @rule(n=index, m=index, giver=watchers, taker=watchers)
    def processes_are_handed_on_all_or_none(self, n: int, m: int, giver: str, taker: str) -> None:
        known = list(self.model.processes)
        write = Transfer(giver, taker, (self.pick(known, n), self.pick(known, m)), self.tick())
        answer = self.send(write)
        if isinstance(answer, int):
            self.send_again(write, answer)

    @has(ProcessMachine.fresh_ids)
    @rule(n=index, who=watchers)
    def a_session_has_one_live_task_of_a_name(self, n: int, who: str) -> None:
        name = self.pick(self.fresh_ids(), n)
        task = Registration(name, "external", "externally_owned", "watch", input={"task": "watch", "token": name})
        self.send(Register(replace(task, origin=SessionOrigin(who)), self.tick(), grants=(who,)))

    @rule(many=st.booleans())
    def a_fork_sees_what_it_was_given_of_what_its_source_saw(self, many: bool) -> None:
        if "chat-2" not in self.model.sessions and "chat" in [s["id"] for s in self.model.live()]:
            given = tuple(self.model.processes)[:: 1 if many else 2]
            self.send(Branch("chat-2", "clerk", "chat", 1, 0, self.tick(), (*given, "nothing")))

    @rule(name=watchers)
    def a_deleted_session_sees_nothing_and_is_told_nothing(self, name: str) -> None:
        if name in [session["id"] for session in self.model.live()]:
            self.send(Delete(name, self.tick()), True)
            assert not [wake for wake in self.pending() if wake["session_id"] == name]

    # ------------------------------------------------------------------ wakes

    @has(ProcessMachine.pending)
    @rule(n=index, turn=st.booleans(), count=st.integers(1, 3), how=maybe_stuck, body=bodies)
    def a_session_is_told_once(
        self, n: int, turn: bool, count: int, how: tuple[str | None, str | None], body: bytes
    ) -> None:
        worker, stuck = how
        session_id = self.pick(self.pending(), n)["session_id"]
        numbers = [wake["number"] for wake in self.pending() if wake["session_id"] == session_id][:count]
        body = b"told %d " % self.tick() + body
        write = Deliver(session_id, "clerk", tuple(numbers), body, "op", self.now, turn, worker, stuck=stuck)
        answer = self.send(write)
        if isinstance(answer, dict):
            self.send_again(write, answer)
            self.send(Deliver(session_id, "clerk", tuple(numbers), b"other", "op", self.tick(), turn, worker), None)

    @has(lambda self: self.model.wakes)
    @rule(n=index, other=watchers)
    def what_is_not_waiting_for_a_session_is_not_told_to_it(self, n: int, other: str) -> None:
        wake = self.pick(list(self.model.wakes.values()), n)
        if (wake["session_id"], wake["state"]) != (other, "pending"):
            self.send(Deliver(other, "clerk", (wake["number"],), b"told %d" % self.tick(), "op", self.now, False))
        self.send(Deliver(other, "clerk", (wake["number"], 99_999), b"told %d" % self.tick(), "op", self.now, False))

    @has(lambda self: self.model.wakes)
    @rule(n=index, reason=st.sampled_from([None, "expired"]))
    def a_wake_is_dismissed_and_comes_back(self, n: int, reason: str | None) -> None:
        number = self.pick(list(self.model.wakes), n)
        self.send(Dismiss((number, number, 99_999), self.tick(), reason))
        self.send(Dismiss((number,), self.tick(), reason), [])

    @has(ProcessMachine.held)
    @rule(n=index)
    def a_turn_parks_and_a_process_with_it(self, n: int) -> None:
        session = self.pick(self.held(), n)
        wait = self.new_wait(session, self.now, None, b"{}")
        self.send(self.appending(session, [b"asks"], waits=(wait,), park=(wait.id,)))
        for row in self.held_processes()[:1]:
            turn = f"{session['id']}.{session['turn']}"
            self.send(self.advancing(row, [b"waits"], first=True, park=(WaitOn("0", "turn", turn),)))

    @has(ProcessMachine.held)
    @rule(n=index, some=st.lists(index, min_size=1, max_size=2), alone=st.sampled_from([None, 0, 1]))
    def a_turn_parks_until_a_process_ends(self, n: int, some: list[int], alone: int | None) -> None:
        session = self.pick(self.held(), n)
        wait = replace(self.new_wait(session, self.now, None, b"{}"), kind="process")
        names = tuple(dict.fromkeys([self.pick([*self.model.processes, "nobody"], each) for each in some]))
        heard = None if alone is None else session["next"] + alone
        write = self.appending(session, [b"waits"], waits=(wait,), park=(wait.id,), awaits=names, heard=heard)
        answer = self.send(write)
        assert answer["parked"] is (session["state"] == "parked")
        assert (wait.id in self.model.waits) is answer["parked"]
        if answer["parked"]:
            self.send_again(write, answer)

    @has(lambda self: [s for s in self.model.sessions.values() if s["state"] == "parked"])
    @rule(n=index, kind=st.sampled_from(["queue", "steer", "note"]), worker=st.sampled_from([None, "w2"]))
    def something_is_said_to_a_parked_turn(self, n: int, kind: Any, worker: str | None) -> None:
        session = self.pick([s for s in self.model.sessions.values() if s["state"] == "parked"], n)
        opens = kind != "queue" and session["reason"] is not None
        said = b"said %d" % self.tick()
        self.send(Accept(session["id"], session["agent"], said, "op", self.now, kind, worker=worker))
        assert session["state"] == ("open" if opens else "parked")

    @has(lambda self: [s for s in self.model.sessions.values() if s["state"] == "parked"])
    @rule(n=index, how=st.sampled_from(["claim", "cancel", "answer"]))
    def a_parked_turn_goes_on_and_what_waits_with_it_does(self, n: int, how: str) -> None:
        session = self.pick([s for s in self.model.sessions.values() if s["state"] == "parked"], n)
        asked = [w["id"] for w in self.model.waits.values() if (w["sid"], w["state"]) == (session["sid"], "open")]
        if how == "claim":
            self.send(Claim(SessionRef(session["id"]), "w2", session["generation"], self.tick()))
        elif how == "cancel":
            self.send(Cancel(SessionRef(session["id"]), CancelRequest("ann"), self.tick()))
        else:
            self.send(Resolve(asked[0], Answer("approved"), self.tick(), "w1", AGENTS))
        turn = f"{session['id']}.{session['turn']}"
        waiting = [wait["name"] for row in self.model.processes.values() for wait in row["record"]["waits"]]
        assert session["state"] == "parked" or turn not in waiting

    @rule()
    def the_turn_of_a_session_ends(self) -> None:
        for session in self.held():
            scope = TurnScope(session["id"], session["sid"], session["turn"], session["owner"], session["generation"])
            there = len(self.model.nodes[scope.sid, scope.turn])
            closing = (Node(there, b"closed %d" % self.now),)
            write = Commit(scope, closing, session["head"], self.tick(), cancelled=True, children=True)
            answer, turn = self.send(write), f"{scope.session_id}.{scope.turn}"
            children = [row for row in answer["woken"] if row["registration"]["parent"] == turn]
            self.send_again(write, answer | {"woken": children})  # who woke by their end is found by whoever looks

    # ------------------------------------------------------------------ retention, reading

    @rule(
        back=st.sampled_from([0, 0, 5, 1000]),
        limit=st.sampled_from([0, 1, 2, 500]),
        old=st.sampled_from([None, 0, 5]),
        statuses=st.sampled_from([(), (), ("completed",), ("failed", "cancelled"), ("abandoned", "caller_departed")]),
    )
    def what_is_over_is_pruned_and_never_comes_back(
        self, back: int, limit: int, old: int | None, statuses: tuple[str, ...]
    ) -> None:
        mark = None if old is None else max(0, self.model.places - old)
        live = [row["registration"]["id"] for row in self.live_processes()]
        asked = {row["registration"]["id"]: convert(row["registration"], Registration) for row in self.rows()}
        gone = self.send(Prune(self.now + 1 - back, self.tick(), statuses, limit, mark))
        assert not set(gone) & set(live)
        for process_id in gone:
            self.send(Register(asked[process_id], self.tick(), "w1"), ProcessPruned)
            self.send(Register(replace(asked[process_id], input="other"), self.tick(), "w1"), ProcessConflict)
            self.send(SendSignal(process_id, "go", None, "k", self.tick()), ProcessPruned)
            self.send(Cancel(ProcessRef(process_id), CancelRequest("ann"), self.tick()), ProcessPruned)
            assert not self.send(Claim(ProcessRef(process_id), "w1", 1, self.tick()))["won"]
        self.sweep()

    @rule(status=st.sampled_from(["running", "waiting"]))
    def what_lives_cannot_be_chosen_for_pruning(self, status: str) -> None:
        self.send(Prune(self.now + 9, self.tick(), ("completed", status)), InvalidInput)

    @rule()
    def what_never_was_is_unknown(self) -> None:
        self.send(SendSignal("nothing", "go", None, "k", self.tick()), UnknownProcess)
        self.send(Cancel(ProcessRef("nothing"), CancelRequest("ann"), self.tick()), UnknownProcess)
        self.send(Complete("nothing", Success(), ExternalOwner(), self.tick()), UnknownProcess)
        self.send(Share("chat", ("nothing",), self.tick(), remove=True), UnknownProcess)
        assert self.run(self.store.process("nothing")) is None
        assert not self.run(self.store.steps(99))
        assert not self.run(self.store.events(99))

    @rule(wanted=filters, back=st.sampled_from([None, 0, 4]), until=st.booleans())
    def processes_are_listed(self, wanted: ProcessFilter, back: int | None, until: bool) -> None:
        at = None if back is None else self.now - back
        wanted = replace(wanted, until=at) if until else replace(wanted, since=at)
        found = [row for row in self.rows() if self.is_wanted(row, wanted)]
        rows = self.run(self.store.processes(wanted))
        assert [row.pid for row in rows] == [row["pid"] for row in found[::-1][: wanted.limit]]

    def is_wanted(self, row: Plain, wanted: ProcessFilter) -> bool:
        asked, status = row["registration"], row["record"]["status"]
        if row["stuck"] is not None:
            status = "stuck"
        elif (status, row["owner"]) == ("running", None) and asked["recovery"] != "externally_owned":
            status = "queued"
        return all(
            (
                not wanted.status or status in wanted.status,
                wanted.kind in (None, asked["kind"]),
                wanted.session_id is None or (wanted.session_id, row["pid"]) in self.model.grants,
                wanted.origin in (None, asked["origin"].get("session_id", "")),
                wanted.live is None or wanted.live is (row in self.live_processes()),
                wanted.stuck is None or wanted.stuck is (row["stuck"] is not None),
                wanted.parent in (None, asked["parent"]),
                wanted.since is None or row["created"] >= wanted.since,
                wanted.until is None or row["created"] < wanted.until,
            )
        )

    @rule(limit=st.integers(1, 4))
    def the_change_feed_shows_every_process_page_by_page(self, limit: int) -> None:
        cursor, seen = 0, dict[int, ProcessRow]()
        while page := self.run(self.store.changes(cursor, limit)):
            assert len(page) <= limit
            assert page[0][0] > cursor
            cursor = page[-1][0]
            seen |= {row.pid: row for _, row in page}
        assert cursor == self.model.places
        assert sorted(seen) == sorted(self.model.events)

    @rule()
    def facts_count_processes(self) -> None:
        assert self.run(self.store.facts()).processes == len(self.rows())
