"""The half of the model of processes that says what happens, and what follows from it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from perdure.errors import PerdureError, ProcessPruned, UnknownProcess
from perdure.model.process import Event
from tests.stores.oracle.deaths import DeathsModel
from tests.stores.oracle.plain import Plain, Refusal, SomeReason, deep

ENDED = ("completed", "failed", "cancelled", "abandoned")
OVER = (*ENDED, "caller_departed")
ENDING = {"success": "completed", "failure": "failed", "cancelled": "cancelled", "abandoned": "abandoned"}


class ProcessLog(DeathsModel, ABC):
    """The tables of processes, as dictionaries of plain values.

    `events` has, by number of the process, what happened to it; `journals` its records by ordinal; `wakes`, by number,
    what sessions are told. Who waits for a process is read off the waits of those that are parked.
    """

    sessions: dict[str, Plain]
    awaited: dict[int, tuple[str, ...]]
    blob_refs: set[tuple[str, int]]

    def __init__(self) -> None:
        super().__init__()
        self.processes: dict[str, Plain] = {}
        self.events: dict[int, list[Plain]] = {}
        self.buried: dict[str, Plain] = {}
        self.graves: dict[int, int] = {}
        self.places = 0
        self.journals: dict[int, dict[int, bytes]] = {}
        self.grants: set[tuple[str, int]] = set()
        self.wakes: dict[int, Plain] = {}

    @abstractmethod
    def _need_blobs(self, digests: Iterable[str]) -> None:
        """Refuse references to blobs that are not there."""

    @abstractmethod
    def _refer(self, sid: int, digests: Iterable[str]) -> None:
        """Note who refers to which blobs."""

    def _happened(
        self, row: Plain, kind: str, payload: Any, at: int, key: str | None = None, *, late: bool = False
    ) -> None:
        """One more event. Of one that is over nothing but the count changes."""
        record = row["record"]
        record["sequence"] += 1
        if not late:
            record["updated"] = at
        self.places += 1
        event = {"place": self.places, "sequence": record["sequence"], "type": kind, "payload": payload, "at": at}
        self.events.setdefault(row["pid"], []).append(event | {"key": key})
        self._tell_session(row, kind, payload, at)

    def _told(self, row: Plain, event: Event) -> None:
        payload, record = deep(event.payload), row["record"]
        if event.type == "process.progress":
            record["progress"] = payload
        elif event.type == "process.external_ref_set":
            record["external_ref"] = payload
        elif event.type == "process.abandon_requested":
            record["abandon"] = payload
        elif event.type == "process.subscription_retargeted":
            record["wake"] = payload
        self._happened(row, event.type, payload, event.at, event.key)

    def _tell_session(self, row: Plain, kind: str, payload: Any, at: int) -> None:
        asked, record = row["registration"], row["record"]
        target = record["wake"] or asked["wake"]
        if target is None or target["policy"] == "none":
            return
        asker = (record["cancel"] or {}).get("by")
        if kind == "process.cancelled" and asker == f"session {target['session_id']}":
            return  # it has ended the process itself, and knows
        if kind.removeprefix("process.") in ENDED:
            said = record["outcome"]
        else:
            rule = next((each["wake"] for each in asked["events"] if each["name"] == kind), None)
            there = None if rule is None else at_pointer(payload, rule["when"] or "")
            if rule is None or (rule["when"] is not None and (there is None or there is False)):
                return
            said = at_pointer(payload, rule["input"])
        cause = asked["cause"] or {}
        body = {
            "process_id": asked["id"],
            "type": kind,
            "name": asked["name"],
            "label": asked["label"],
            "status": record["status"],
            "payload": said,
            "call_id": cause.get("id") if cause.get("type") == "tool_call" else None,
            "at": at,
        }
        self.wakes[self.places] = {
            "number": self.places,
            "session_id": target["session_id"],
            "pid": row["pid"],
            "sequence": record["sequence"],
            "policy": target["policy"],
            "body": body,
            "at": at,
            "state": "pending",
            "turn": None,
            "reason": None,
        }

    def _retarget(self, row: Plain) -> None:
        target = row["record"]["wake"]
        for wake in self.wakes.values():
            if (wake["pid"], wake["state"]) != (row["pid"], "pending"):
                continue
            if target["policy"] == "none":
                wake.update(state="discarded", reason=SomeReason())
            else:
                wake.update(session_id=target["session_id"], policy=target["policy"])

    def _resume(self, row: Plain, at: int) -> None:
        row["record"].update(status="running", waits=[])
        self._happened(row, "process.resumed", None, at)

    def _end(self, row: Plain, outcome: Plain, at: int, payload: Any = None) -> list[Plain]:
        woken: set[str] = set()
        self._ended(row, outcome, at, payload)
        self._follow(row, at, woken)
        return self._rows(woken)

    def _ended(self, row: Plain, outcome: Plain, at: int, payload: Any = None) -> None:
        status = ENDING[outcome["type"]]
        row["record"].update(status=status, waits=[], outcome=outcome)
        self._forget_deaths(-row["pid"])
        row.update(owner=None, takeovers=0, stuck=None)
        self._happened(row, f"process.{status}", outcome if payload is None else payload, at)

    def _follow(self, row: Plain, at: int, woken: set[str]) -> None:
        """Who waits for it goes on; its children that are to end with it are asked to."""
        name = row["registration"]["id"]
        for other in self.processes.values():
            if ("process", name) in [(wait["kind"], wait["name"]) for wait in other["record"]["waits"]]:
                self._resume(other, at)
                woken.add(other["registration"]["id"])
        self._open_turns(name, at)
        self._turn_ended(name, at, woken)

    def _open_turns(self, name: str, at: int) -> None:
        """Turns that are parked until this process ends, or a person has to look at it, are open for whoever claims."""
        for session in self.sessions.values():
            if session["state"] == "parked" and name in self.awaited.get(session["sid"], ()):
                self._turn_goes_on(session, at)
                session.update(state="open", reason=None, updated=at)

    def _will_not_end(self, row: Plain) -> bool:
        return is_over(row) or row["stuck"] is not None

    def _turn_goes_on(self, session: Plain, at: int) -> None:
        """Its turn was parked and is not any more: processes may wait for that."""
        self.awaited.pop(session["sid"], None)
        for other in self.processes.values():
            if ("turn", f"{session['id']}.{session['turn']}") in [
                (w["kind"], w["name"]) for w in other["record"]["waits"]
            ]:
                self._resume(other, at)

    def _turn_ended(self, name: str, at: int, woken: set[str]) -> None:
        """A process or a turn is over, and its children are to end with it."""
        for other in self.processes.values():
            asked = other["registration"]
            child = asked["parent"] == name and asked["parent_end"] == "cancel"
            if child and not is_over(other) and other["record"]["cancel"] is None:
                self._ask_to_stop(other, f"parent {name}", "its parent has ended", at, woken)
                woken.add(asked["id"])

    def _ask_to_stop(self, row: Plain, by: str, reason: str, at: int, woken: set[str], request: str = "") -> None:
        record = row["record"]
        record["cancel"] = {"by": by, "reason": reason, "request": request}
        self._happened(row, "process.cancel_requested", record["cancel"], at)
        begun = record["first_started"] is not None
        ours = row["registration"]["recovery"] != "externally_owned"
        stuck, elsewhere = row["stuck"] is not None, row["registration"]["recovery"] == "reattachable"
        if ours and row["owner"] is None and ((stuck and not elsewhere) or not begun):
            outcome = {"type": "cancelled", "by": by, "reason": reason, "unknown": begun, "value": None}
            self._ended(row, outcome, at)
            self._follow(row, at, woken)
            return
        if stuck:
            row.update(stuck=None)
            self._resumed(-row["pid"])
            self._happened(row, "process.revived", None, at)
        if record["status"] == "waiting":
            self._resume(row, at)
        woken.add(row["registration"]["id"])

    def _rows(self, names: set[str]) -> list[Plain]:
        rows = [self.processes[name] for name in names]
        return copy.deepcopy(sorted(rows, key=lambda row: row["pid"]))

    def _known(self, process_id: str) -> Plain:
        row = self.processes.get(process_id)
        if row is None or row["pruned"] is not None:
            error: type[PerdureError] = UnknownProcess if row is None else ProcessPruned
            raise Refusal(error)
        return row

    def _by_key(self, pid: int, key: str | None) -> Plain | None:
        return next((e for e in self.events[pid] if key is not None and e["key"] == key), None)


def is_over(row: Plain) -> bool:
    return row["record"]["status"] in OVER


def dues(row: Plain) -> list[int]:
    return [wait["due"] for wait in row["record"]["waits"] if wait["due"] is not None]


def at_pointer(payload: Any, pointer: str) -> Any:
    """For pointers of one part, which is all that the contract uses."""
    return payload if not pointer else payload.get(pointer[1:]) if isinstance(payload, dict) else None


def new_row(pid: int, asked: Plain, at: int, owner: str | None, times: int) -> Plain:
    record = dict.fromkeys(
        ("first_started", "cancel", "abandon", "external_ref", "progress", "wake", "outcome", "holder")
    )
    return {
        "pid": pid,
        "registration": asked,
        "record": record | {"status": "running", "sequence": 0, "updated": 0, "waits": [], "segment": 0},
        "created": at,
        "owner": owner,
        "generation": times,
        "attempts": times,
        "takeovers": 0,
        "stuck": None,
        "pruned": None,
    }


def nothing_asked() -> Plain:
    texts = dict.fromkeys(("name", "definition", "label", "asked"), "")
    nothing = dict.fromkeys(("input", "cause", "env", "max_attempts", "wake", "parent"))
    origin = {"type": "host", "scope": ""}
    rest = {"origin": origin, "events": [], "open_signals": False, "parent_end": "abandon", "depth": 0, "metadata": {}}
    rest["step_recovery"] = "once"
    return texts | nothing | rest
