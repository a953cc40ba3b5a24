"""What a store should hold and answer about processes, written by hand as `model.py` is: plain dictionaries.

It knows first sendings only; that a second one changes nothing is for the rules of the lives to say. Who waits for
a process is read off the waits of those that are parked, and nothing is folded: each change says what it changes.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from perdure.errors import (
    Conflict,
    Fenced,
    InvalidInput,
    InvalidProcess,
    ProcessConflict,
    ProcessEnded,
    ProcessNotVisible,
    ProcessPruned,
    SessionDeleted,
    TooManyCommands,
    UndeclaredEvent,
    UnknownProcess,
    UnknownSession,
    WrongAuthority,
)
from perdure.model.process import Event, ProcessRow
from perdure.model.record import InputKind
from perdure.model.write import (
    Accept,
    AddEvent,
    Advance,
    Cancel,
    Claim,
    Complete,
    Deliver,
    Dismiss,
    ProcessScope,
    Prune,
    Register,
    Release,
    Resume,
    SendSignal,
    Share,
    Transfer,
    Write,
)
from tests.stores.oracle.plain import Plain, Refusal, SomeReason, deep
from tests.stores.oracle.process_log import ENDED, OVER, ProcessLog, dues, is_over, new_row, nothing_asked

MAY_END = {
    ("external_owner", "externally_owned"),
    ("workflow_key", "rerunnable"),
    ("workflow_key", "owner_bound"),
    ("workflow_key", "reattachable"),
    ("reconciled_abandon", "externally_owned"),
    ("reconciled_abandon", "reattachable"),
}
MAY_BE_MARKED = ("abandon_requested", "external_ref_set", "caller_departed", "subscription_retargeted", "progress")


class ProcessModel(ProcessLog):
    """What each write does, and answers."""

    @abstractmethod
    def accept(self, write: Accept) -> Plain:
        """What the model of sessions makes of an input: a delivered wake is one."""

    def process_rules(self) -> dict[type[Write[Any]], Callable[[Any], Any]]:
        return {
            Register: self.register,
            Advance: self.advance,
            SendSignal: self.tell,
            AddEvent: self.mark,
            Complete: self.complete,
            Share: self.share,
            Transfer: self.transfer,
            Deliver: self.deliver,
            Dismiss: self.dismiss,
            Prune: self.prune,
        }

    def rules_of_both(self) -> dict[type[Write[Any]], Callable[[Any], Any]]:
        """What writes that turns have too do to a process."""
        return {Claim: self.take, Release: self.let_go, Cancel: self.stop, Resume: self.revive}

    # ------------------------------------------------------------------ a worker's

    def register(self, write: Register) -> Plain:
        asked = deep(write.registration)
        row = self.processes.get(asked["id"])
        if row is not None:
            before: Plain = self.buried.get(asked["id"]) or row["registration"]
            if any(before[name] != asked[name] for name in ("kind", "name", "input", "recovery", "origin", "parent")):
                raise Refusal(ProcessConflict)
            if row["pruned"] is not None:
                raise Refusal(ProcessPruned)
            return {"row": copy.deepcopy(row), "known": True}
        ended = asked["parent"] is not None and self._parent_ended(asked["parent"])
        if _is_task(asked) and self._has_task(asked["origin"].get("session_id"), asked["name"]):
            raise Refusal(Conflict)
        if write.limits is not None:
            origin = asked["origin"].get("session_id")
            of_kind = [
                r for r in self.processes.values() if self._is_active(r) and r["registration"]["kind"] == asked["kind"]
            ]
            of_session = [r for r in of_kind if r["registration"]["origin"].get("session_id") == origin]
            if len(of_kind) >= write.limits.total or (origin and len(of_session) >= write.limits.per_session):
                raise Refusal(TooManyCommands)
        self._need_blobs(write.blobs)
        owner = None if asked["recovery"] == "externally_owned" else write.worker
        times = 0 if owner is None else 1
        row = new_row(len(self.processes) + 1, asked, write.at, owner, times)
        self.processes[asked["id"]] = row
        self._happened(row, "process.created", None, write.at)
        if write.reference is not None and owner is not None and not ended:
            start = {"owner": owner, "generation": 1, "attempt": 1, "at": write.at, "store": write.store}
            row["record"]["first_started"] = start
            self._happened(row, "process.first_started", start, write.at)
            self._told(row, Event("process.external_ref_set", write.reference, write.at))
        self.grants |= {(session_id, row["pid"]) for session_id in write.grants}
        self._refer(-row["pid"], write.blobs)
        if ended and asked["parent_end"] == "cancel":
            self._ask_to_stop(row, f"parent {asked['parent']}", "its parent has ended", write.at, set())
        return {"row": copy.deepcopy(row), "known": False}

    @staticmethod
    def _is_active(row: Plain) -> bool:
        outside = row["registration"]["recovery"] == "externally_owned"
        return row["record"]["status"] == "running" and row["stuck"] is None and row["pruned"] is None and not outside

    def _parent_ended(self, parent: str) -> bool:
        if parent.startswith("#"):
            if parent[1:] not in self.sessions:
                raise Refusal(UnknownProcess)
            return bool(self.sessions[parent[1:]]["deleted"])
        if parent in self.processes:
            return is_over(self.processes[parent])
        for session in self.sessions.values():
            turns = {f"{session['id']}.{number}": number for number in range(1, session["next"])}
            if parent in turns:
                return bool(session["turn"] != turns[parent])
        raise Refusal(UnknownProcess)

    def take(self, write: Claim[ProcessRow]) -> Plain:
        row = self.processes.get(write.target.id)
        if row is None:
            return {"row": None, "won": False, "woken": [], "suspect": False}
        lost = {"row": copy.deepcopy(row), "won": False, "woken": [], "suspect": False}
        record, asked = row["record"], row["registration"]
        if is_over(row) or row["stuck"] is not None or asked["recovery"] == "externally_owned":
            return lost
        if row["owner"] == write.worker:  # its own claim again, because the reply was lost, or an older one
            won = row["generation"] == write.generation + 1
            return lost | {"won": won, "suspect": won and self._is_suspect(-row["pid"])}
        early = record["status"] == "waiting" and not any(d <= write.at for d in dues(row))
        if row["generation"] != write.generation or early:
            return lost
        if row["owner"] is not None and not _lives_elsewhere(row):
            return self._take_over(row, write)
        return self._own(row, write, row["attempts"] or 1)

    def _take_over(self, row: Plain, write: Claim[ProcessRow]) -> Plain:
        record, asked = row["record"], row["registration"]
        begun = record["first_started"] is not None
        if begun and asked["recovery"] == "owner_bound":
            if write.proof is None and record["abandon"] is None:
                return {"row": copy.deepcopy(row), "won": False, "woken": [], "suspect": False}
            why = "sweep" if write.proof is not None else "reconciled_request"
            proof = write.proof if write.proof is not None else SomeReason()
            evidence = {"writer": why, "at": write.at, "owner": row["owner"], "proof": proof}
            woken = self._end(row, {"type": "abandoned", "evidence": evidence, "value": None}, write.at)
            return {"row": copy.deepcopy(row), "won": False, "woken": woken, "suspect": False}
        if begun and asked["max_attempts"] is not None and row["attempts"] >= asked["max_attempts"]:
            failure = {
                "type": "failure",
                "code": "attempts_exhausted",
                "message": SomeReason(),
                "data": None,
                "traceback": "",
            }
            woken = self._end(row, failure, write.at)
            return {"row": copy.deepcopy(row), "won": False, "woken": woken, "suspect": False}
        return self._own(row, write, row["attempts"] + begun)

    def _own(self, row: Plain, write: Claim[ProcessRow], attempts: int) -> Plain:
        dead = None if _lives_elsewhere(row) else row["owner"]
        fate = self._claim(-row["pid"], dead, write.worker, write.death, write.lived)
        if fate == "held":
            return {"row": copy.deepcopy(row), "won": False, "woken": [], "suspect": True}
        row["takeovers"] += dead is not None
        if fate == "stuck":
            row.update(owner=None, stuck=SomeReason(), generation=row["generation"] + 1)
            self._happened(row, "process.stuck", {"reason": SomeReason()}, write.at)
            self._open_turns(row["registration"]["id"], write.at)
            return {"row": copy.deepcopy(row), "won": False, "woken": [], "suspect": False}
        row.update(owner=write.worker, generation=row["generation"] + 1, attempts=attempts)
        if row["record"]["status"] == "waiting":
            self._resume(row, write.at)
        return {"row": copy.deepcopy(row), "won": True, "woken": [], "suspect": fate == "suspect"}

    def advance(self, write: Advance) -> Plain:
        row = self._owned_process(write.scope)
        record, pid = row["record"], row["pid"]
        self._need_blobs(write.blobs)
        if any(self._by_key(pid, event.key) for event in write.events):
            raise Refusal(Conflict)
        quiet = record["sequence"] <= write.seen
        journal = self.journals.setdefault(pid, {})
        journal.update({node.ordinal: node.body for node in write.records})
        if write.drop is not None:
            self.journals[pid] = {n: body for n, body in journal.items() if n >= write.drop}
        self._refer(-pid, write.blobs)
        if write.first and record["first_started"] is None:
            scope, attempt = write.scope, row["attempts"]
            start = {
                "owner": scope.owner, "generation": scope.generation, "attempt": attempt, "at": write.at,
                "store": write.store,
            }  # fmt: skip
            record["first_started"] = start
            self._happened(row, "process.first_started", start, write.at)
        for event in write.events:
            self._told(row, event)
        if write.records and not write.repeats:
            self._forget_deaths(-pid)
            row["takeovers"] = 0
        woken: list[Plain] = []
        targets = [self.processes.get(wait.name) for wait in write.park if wait.kind == "process"]
        turns = [wait.name for wait in write.park if wait.kind == "turn"]
        parks = bool(write.park) and quiet and all(t is not None and not is_over(t) for t in targets)
        parks = parks and all(turn in self._parked_turns() for turn in turns)
        if write.outcome is not None:
            woken, parks = self._end(row, deep(write.outcome), write.at), False
        elif parks:
            record.update(status="waiting", waits=deep(write.park))
            self._happened(row, "process.waiting", {"waits": deep(write.park)}, write.at)
            self._forget_deaths(-pid)
            row.update(owner=None, takeovers=0)
        return {"row": copy.deepcopy(row), "parked": parks, "woken": woken}

    def _parked_turns(self) -> list[str]:
        return [f"{s['id']}.{s['turn']}" for s in self.sessions.values() if s["state"] == "parked"]

    def let_go(self, write: Release[ProcessRow]) -> Plain:
        scope = write.scope
        assert isinstance(scope, ProcessScope)
        row, woken = self._owned_process(scope), list[Plain]()
        self._stop_suspecting(-row["pid"])
        if write.stuck is not None:
            row.update(owner=None, stuck=write.stuck)
            self._happened(row, "process.stuck", {"reason": write.stuck}, write.at)
            self._open_turns(row["registration"]["id"], write.at)
        else:
            woken = self._free(row, write.at)
        return {"row": copy.deepcopy(row), "woken": woken}

    def leave(self, worker: str, at: int) -> None:
        """The worker is gone, and said so."""
        for row in list(self.processes.values()):
            if row["owner"] == worker:
                self._free(row, at)

    def _free(self, row: Plain, at: int) -> list[Plain]:
        if row["registration"]["recovery"] != "owner_bound" or row["record"]["first_started"] is None:
            row["owner"] = None
            return []
        evidence = {"writer": "owner_drain", "at": at, "owner": row["owner"], "proof": SomeReason()}
        return self._end(row, {"type": "abandoned", "evidence": evidence, "value": None}, at)

    def _owned_process(self, scope: ProcessScope) -> Plain:
        row = self.processes.get(scope.id)
        if row is None or (row["owner"], row["generation"]) != (scope.owner, scope.generation):
            raise Refusal(Fenced)
        return row

    # ------------------------------------------------------------------ from outside

    def tell(self, write: SendSignal) -> Plain:
        return self._outside(write.process_id, Event(f"signal.{write.name}", write.payload, write.at, write.key))

    def mark(self, write: AddEvent) -> Plain:
        return self._outside(write.process_id, write.event)

    def _outside(self, process_id: str, event: Event) -> Plain:
        row = self._known(process_id)
        before = self._by_key(row["pid"], event.key)
        if before is not None:
            if (before["type"], before["payload"]) != (event.type, deep(event.payload)):
                raise Refusal(Conflict)
            return {"row": copy.deepcopy(row), "sequence": before["sequence"], "known": True, "woken": []}
        if is_over(row):
            raise Refusal(ProcessEnded)
        self._check_may_happen(row, event)
        record, woken = row["record"], set[str]()
        if event.type == "process.caller_departed":
            record.update(status="caller_departed", waits=[])
        self._told(row, event)
        sequence = record["sequence"]
        if record["status"] == "waiting" and any(f"signal.{w['name']}" == event.type for w in record["waits"]):
            self._resume(row, event.at)
        if record["status"] == "caller_departed":
            self._follow(row, event.at, woken)
        if event.type == "process.subscription_retargeted":
            self._retarget(row)
        return {"row": copy.deepcopy(row), "sequence": sequence, "known": False, "woken": self._rows(woken)}

    def _check_may_happen(self, row: Plain, event: Event) -> None:
        asked, ours, name = row["registration"], *event.type.partition("process.")[1:]
        if ours and name not in MAY_BE_MARKED:
            raise Refusal(InvalidProcess)
        if name == "caller_departed" and asked["recovery"] != "externally_owned":
            raise Refusal(InvalidProcess)
        is_open = asked["open_signals"] and event.type.startswith("signal.") and event.type != "signal."
        if not ours and event.type not in [each["name"] for each in asked["events"]] and not is_open:
            raise Refusal(UndeclaredEvent)

    def stop(self, write: Cancel[ProcessRow]) -> Plain:
        row, woken = self._known(write.target.id), set[str]()
        status = "completion_won" if is_over(row) else "already_requested"
        if not is_over(row) and row["record"]["cancel"] is None:
            status = "requested"
            self._ask_to_stop(row, write.request.by, write.request.reason, write.at, woken, write.request.request)
        return {"status": status, "turn": None, "row": copy.deepcopy(row), "woken": self._rows(woken), "each": []}

    def complete(self, write: Complete) -> Plain:
        row, outcome, authority = self._known(write.process_id), deep(write.outcome), deep(write.authority)
        if (authority["authority"], row["registration"]["recovery"]) not in MAY_END:
            raise Refusal(WrongAuthority)
        if authority["authority"] == "reconciled_abandon" and outcome["type"] != "abandoned":
            raise Refusal(WrongAuthority)
        if row["record"]["status"] in ENDED:
            status = "already_applied" if row["record"]["outcome"] == outcome else "superseded"
            return {"status": status, "row": copy.deepcopy(row), "woken": []}
        if is_over(row):
            raise Refusal(ProcessEnded)
        if row["owner"] is not None and authority["authority"] != "reconciled_abandon":
            raise Refusal(Conflict)
        woken = self._end(row, outcome, write.at, {"outcome": outcome, "authority": authority})
        return {"status": "committed", "row": copy.deepcopy(row), "woken": woken}

    def end_session(self, session_id: str, at: int) -> None:
        """A session is deleted: what ends with it, and is its own, is asked to stop."""
        for row in list(self.processes.values()):
            asked = row["registration"]
            owned = (asked["parent"] or "").startswith("#") and asked["parent_end"] == "cancel"
            seen = asked["parent"] == f"#{session_id}" or (session_id, row["pid"]) in self.grants
            if owned and seen and _holder(row) == session_id and not is_over(row) and row["record"]["cancel"] is None:
                self._ask_to_stop(row, f"session {session_id}", "its session was deleted", at, set())

    def revive(self, write: Resume[ProcessRow]) -> Plain | None:
        row = self._known(write.target.id)
        if row["stuck"] is None:
            return None
        row.update(stuck=None)
        self._resumed(-row["pid"])
        self._happened(row, "process.revived", None, write.at)
        return copy.deepcopy(row)

    # ------------------------------------------------------------------ grants, wakes, retention

    def share(self, write: Share) -> int:
        if not write.remove and self.sessions.get(write.session_id, {}).get("deleted"):
            raise Refusal(SessionDeleted)
        found = {process_id: self._known(process_id) for process_id in write.process_ids}
        return sum(self._shared(row, write) for row in found.values())

    def _shared(self, row: Plain, write: Share) -> bool:
        had = (write.session_id, row["pid"]) in self.grants
        if write.remove and had:
            self._unsee(row, write.session_id, write.at)
        elif not write.remove and not had:
            self._see(row, write.session_id, write.at)
        return had is write.remove

    def _see(self, row: Plain, session_id: str, at: int) -> None:
        self.grants.add((session_id, row["pid"]))
        self._happened(row, "process.observer_added", {"session_id": session_id}, at, late=is_over(row))

    def _unsee(self, row: Plain, session_id: str, at: int) -> None:
        self.grants.remove((session_id, row["pid"]))
        self._happened(row, "process.observer_removed", {"session_id": session_id}, at, late=is_over(row))

    def transfer(self, write: Transfer) -> int:
        source, target = write.source, write.target
        session = self.sessions.get(target)
        if session is not None and session["deleted"]:
            raise Refusal(SessionDeleted)
        found = {process_id: self._known(process_id) for process_id in write.process_ids}
        if source == target:
            return 0
        if any({(source, row["pid"]), (target, row["pid"])}.isdisjoint(self.grants) for row in found.values()):
            raise Refusal(ProcessNotVisible)
        moved = [row for row in found.values() if (source, row["pid"]) in self.grants]
        own = [row for row in moved if not is_over(row) and _holder(row) == source]
        names = [row["registration"]["name"] for row in own if _is_task(row["registration"])]
        if len(names) > len(set(names)) or any(self._has_task(target, name) for name in names):
            raise Refusal(Conflict)
        for row in moved:
            if (target, row["pid"]) not in self.grants:
                self._see(row, target, write.at)
            self._unsee(row, source, write.at)
            if row in own:
                row["record"]["holder"] = target
                self._happened(row, "process.transferred", {"from": source, "session_id": target}, write.at)
            wake = row["record"]["wake"] or row["registration"]["wake"]
            if (
                not is_over(row)
                and wake is not None
                and (wake["session_id"], wake["policy"] != "none") == (source, True)
            ):
                agent = wake["agent"] if session is None else session["agent"]
                row["record"]["wake"] = {"session_id": target, "agent": agent, "policy": wake["policy"]}
                told = {
                    name: said for name, said in row["record"]["wake"].items() if (name, said) != ("policy", "turn")
                }
                self._happened(row, "process.subscription_retargeted", told, write.at)
                self._retarget(row)
        return len(found)

    def _has_task(self, session_id: str | None, name: str) -> bool:
        """Whether a session has a live task of that name, of its own and in its sight."""
        return any(
            (session_id, row["pid"]) in self.grants and _holder(row) == session_id and not is_over(row)
            for row in self.processes.values()
            if _is_task(row["registration"]) and row["registration"]["name"] == name
        )

    def deliver(self, write: Deliver) -> Plain | None:
        session = self.sessions.get(write.session_id)
        if session is not None and session["deleted"]:
            raise Refusal(SessionDeleted)
        if session is None and not write.agent:
            raise Refusal(UnknownSession)
        wakes = [self.wakes.get(number) for number in write.numbers]
        told = [w for w in wakes if w is not None and (w["session_id"], w["state"]) == (write.session_id, "pending")]
        busy = write.turn and session is not None and session["turn"] is not None
        if not told or len(told) < len(wakes) or busy:
            return None
        kind: InputKind = "queue" if write.turn else "note"
        agent = write.agent if session is None else session["agent"]
        said = Accept(
            write.session_id, agent, write.body, write.op, write.at, kind, worker=write.worker, stuck=write.stuck
        )
        accepted = self.accept(said)
        for wake in told:
            wake.update(state="enqueued", turn=accepted["turn"])
        return accepted

    def dismiss(self, write: Dismiss) -> list[Plain]:
        back = write.reason is None
        chosen = [self.wakes[n] for n in dict.fromkeys(write.numbers) if n in self.wakes]
        chosen = [wake for wake in chosen if wake["state"] == ("discarded" if back else "pending")]
        for wake in chosen:
            wake.update(state="pending" if back else "discarded", reason=write.reason)
            wake.update({"at": write.at} if back else {})
        return copy.deepcopy(chosen)

    def forget_session(self, session_id: str) -> None:
        """It is deleted: it sees nothing, and nobody can tell it anything."""
        self.grants = {grant for grant in self.grants if grant[0] != session_id}
        for wake in self.wakes.values():
            if (wake["session_id"], wake["state"]) == (session_id, "pending"):
                wake.update(state="discarded", reason=SomeReason())

    def prune(self, write: Prune) -> list[str]:
        statuses = write.statuses or OVER
        if any(status not in OVER for status in statuses):
            raise Refusal(InvalidInput)
        waiting = {wake["pid"] for wake in self.wakes.values() if wake["state"] == "pending"}
        found = [
            row
            for row in self.processes.values()
            if row["pruned"] is None
            and row["record"]["status"] in statuses
            and row["record"]["updated"] < write.before
            and row["pid"] not in waiting
            and (write.watermark is None or self.events[row["pid"]][-1]["place"] <= write.watermark)
        ]
        found = sorted(found, key=lambda row: (row["record"]["updated"], row["pid"]))[: write.limit]
        for row in found:
            self._bury(row, write.at)
        return [row["registration"]["id"] for row in found]

    def _bury(self, row: Plain, at: int) -> None:
        pid, status, asked = row["pid"], row["record"]["status"], row["registration"]
        kept = {"id": asked["id"], "kind": "", "recovery": "externally_owned"}
        self.buried[asked["id"]] = asked
        row.update(new_row(pid, nothing_asked() | kept, 0, None, 0), pruned=at)
        row["record"].update(status=status, updated=at)
        self.events[pid] = []
        self.places += 1
        self.graves[pid] = self.places
        self.journals.pop(pid, None)
        self.grants = {grant for grant in self.grants if grant[1] != pid}
        self.wakes = {number: wake for number, wake in self.wakes.items() if wake["pid"] != pid}
        self.blob_refs = {(digest, owner) for digest, owner in self.blob_refs if owner != -pid}


def _holder(row: Plain) -> str | None:
    """The session whose own a process is."""
    found: str | None = row["record"]["holder"] or row["registration"]["origin"].get("session_id")
    return found


def _is_task(asked: Plain) -> bool:
    return asked["kind"] in ("task", "external") and isinstance(asked["input"], dict) and "task" in asked["input"]


def _lives_elsewhere(row: Plain) -> bool:
    """Whether its work goes on without its owner: whoever claims it takes nothing over."""
    return row["registration"]["recovery"] == "reattachable" and row["record"]["first_started"] is not None
