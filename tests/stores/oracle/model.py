"""What a store should hold and answer, written by hand: plain dictionaries, and no code that any store runs.

Each method takes a write and says in its own words what must come of it: it changes the dictionaries and returns the
receipt as plain data, or raises `Refusal` with the error that a store must raise, having changed nothing. Two readings
of the same contract, this one and the store's, that agree on every step of a long random life are unlikely to share
a mistake.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from perdure.errors import (
    BlobMissing,
    Fenced,
    HeadMoved,
    InternalError,
    InvalidSessionId,
    KeyConflict,
    SessionDeleted,
    StaleSettings,
    UnknownSession,
    WrongAgent,
)
from perdure.model.session import Dump, Node, SessionRow
from perdure.model.spending import UsageRow
from perdure.model.write import (
    Accept,
    Append,
    Beat,
    Branch,
    Cancel,
    Claim,
    Commit,
    Configure,
    Delete,
    Outlived,
    ProcessRef,
    ProcessScope,
    Release,
    ReopenTurn,
    Resolve,
    Resume,
    Retire,
    SessionFilter,
    TurnScope,
    Write,
)
from tests.stores.oracle.accounts import Accounts
from tests.stores.oracle.plain import (
    Plain,
    Refusal,
    SomeReason,
    after_turn,
    as_json,
    blob_in,
    joined,
    of_a_fork,
    plain,
)
from tests.stores.oracle.process_log import is_over
from tests.stores.oracle.process_model import ProcessModel

FOR_WAITS, FOR_DUMPS = 1_000_000, 2_000_000
"""Beside the numbers of sessions: what their waits and dumps refer to."""


class StoreModel(ProcessModel):
    """The tables, as dictionaries of plain values.

    `nodes` holds the bodies of a turn's records by (sid, turn); `inbox` what waits, as [kind, cancel] by input;
    `dumps` are by sid, then turn; `blob_refs` which sessions refer to a blob, or their waits or dumps do; `usage` what
    was spent, in sums; `books` what counts against limits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sessions: dict[str, Plain] = {}
        self.nodes: dict[tuple[int, int], list[bytes]] = {}
        self.inbox: dict[int, dict[int, list[Any]]] = {}
        self.keys: dict[tuple[int, str], tuple[int, bytes]] = {}
        self.waits: dict[str, Plain] = {}
        self.awaited: dict[int, tuple[str, ...]] = {}
        self.dumps: dict[int, dict[int, Dump]] = {}
        self.workers: dict[str, Plain] = {}
        self.blobs: dict[str, bytes] = {}
        self.blob_refs: set[tuple[str, int]] = set()
        self.usage: dict[tuple[Any, ...], Plain] = {}
        self.books = Accounts(self.sessions)
        self._rules: dict[type[Write[Any]], Callable[[Any], Any]] = {
            Accept: self.accept,
            Claim: self.claim,
            Append: self.append,
            Commit: self.commit,
            Cancel: self.cancel,
            Resolve: self.resolve,
            Resume: self.resume,
            ReopenTurn: self.reopen,
            Configure: self.configure,
            Release: self.release,
            Beat: self.beat,
            Retire: self.retire,
            Outlived: self.outlived,
            Branch: self.branch,
            Delete: self.delete,
            **self.process_rules(),
        }
        self._process_rules = self._rules | self.rules_of_both()

    def apply(self, write: Write[Any]) -> Any:
        """The receipt that a store must give, as plain data; raises Refusal where it must refuse."""
        of_process = isinstance(getattr(write, "target", getattr(write, "scope", None)), ProcessRef | ProcessScope)
        rules = self._process_rules if of_process else self._rules
        return rules[type(write)](write)

    # ------------------------------------------------------------------ inputs

    def accept(self, write: Accept) -> Plain:
        session = self.sessions.get(write.session_id)
        if session is not None:
            if session["deleted"]:
                raise Refusal(SessionDeleted)
            if session["agent"] != write.agent:
                raise Refusal(WrongAgent)
            known = self.keys.get((session["sid"], write.key)) if write.key is not None else None
            if known is not None:
                if known[1] != write.digest:
                    raise Refusal(KeyConflict)
                opened = session["turn"] == known[0]
                return {"turn": known[0], "row": dict(session), "opened": opened, "known": True, "granted": None}
        self._need_blobs(write.blobs)
        if session is None:
            session = self._new_session(write.session_id, write.agent, write.at)
        number = session["next"]
        session.update(next=number + 1, updated=write.at)
        opens = write.kind in ("queue", "steer") and session["turn"] is None
        if opens:
            worker = write.worker if write.stuck is None else None
            state = "open" if write.stuck is None else "stuck"
            session.update(turn=number, state=state, owner=worker, takeovers=0, cancel=None, reason=write.stuck)
            if worker is not None:
                session["generation"] += 1
        else:
            self.inbox.setdefault(session["sid"], {})[number] = [write.kind, None]
            if write.kind != "queue" and (session["state"], session["reason"]) == ("parked", "waits for processes"):
                self._wake(session, write.worker)
        if write.key is not None:
            self.keys[session["sid"], write.key] = (number, write.digest)
        self.nodes[session["sid"], number] = [write.body]
        self._refer(session["sid"], write.blobs)
        granted = None
        if write.spending is not None and opens and session["owner"] is not None:
            [granted] = self.books.spend(session, session["owner"], number, (write.spending,))
        return {"turn": number, "row": dict(session), "opened": opens, "known": False, "granted": granted}

    def _new_session(self, session_id: str, agent: str, at: int) -> Plain:
        session: Plain = {
            "sid": len(self.sessions) + 1,
            "id": session_id,
            "agent": agent,
            "head": 0,
            "next": 1,
            "turn": None,
            "state": "idle",
            "owner": None,
            "generation": 0,
            "takeovers": 0,
            "cancel": None,
            "reason": None,
            "fork": None,
            "created": at,
            "updated": at,
            "deleted": False,
            "settings": b"",
        }
        self.sessions[session_id] = session
        return session

    # ------------------------------------------------------------------ an owned turn

    def claim(self, write: Claim[SessionRow]) -> Plain:
        session = self.sessions.get(write.target.id)
        if session is None:
            return {"row": None, "won": False, "suspect": False, "woken": []}
        lost = {"row": dict(session), "won": False, "suspect": False, "woken": []}
        if session["turn"] is None or session["state"] == "stuck":
            return lost
        if session["owner"] == write.worker:
            # Its own claim, sent again because the reply was lost, or something older.
            won = session["generation"] == write.generation + 1
            return lost | {"won": won, "suspect": won and self._is_suspect(session["sid"])}
        if session["generation"] != write.generation:
            return lost
        fate = self._claim(session["sid"], session["owner"], write.worker, write.death, write.lived)
        if fate == "held":
            return lost | {"suspect": True}
        if session["state"] == "parked":
            self._turn_goes_on(session, write.at)
        self.books.turn_lost(session["sid"])
        session.update(generation=write.generation + 1, updated=write.at)
        session["takeovers"] += session["owner"] is not None
        if fate == "stuck":
            session.update(state="stuck", owner=None, reason=SomeReason())
            return {"row": dict(session), "won": False, "suspect": False, "woken": []}
        session.update(owner=write.worker, state="open", reason=None)
        return {"row": dict(session), "won": True, "suspect": fate == "suspect", "woken": []}

    def append(self, write: Append) -> Plain:
        scope = write.scope
        session = self._by_sid(scope.sid)
        landed = ("parked", "open") if write.awaits else ("parked",)
        parked = session is not None and session["state"] in landed and self._let_go(scope)
        if session and parked and write.park and all(self._body(scope, n) == n.body for n in write.nodes):
            # Sent again after it had parked the turn.
            return {"cancel": session["cancel"], "inputs": self._inputs(scope.sid), "parked": True} | {
                "granted": [self.books.nothing(each.op) for each in write.spending]
            }
        session = self._owned(scope)
        self._need_blobs(write.blobs)
        self._need_blobs([digest for wait in write.waits for digest in blob_in(wait.body)])
        self._need_blobs([write.dump.digest] if write.dump is not None and write.dump.digest else [])
        over = [each for each in write.awaits if each not in self.processes or self._will_not_end(self.processes[each])]
        still = not over and write.heard in (None, session["next"]) and session["cancel"] is None
        opened = {w.id for w in write.waits if w.id not in self.waits} if self._is_new(scope, write.nodes) else set()
        still = still and all(name in opened or self._is_open(name) for name in write.park)
        if self._is_new(scope, write.nodes):
            self._record(scope, write.nodes, write.take, write.blobs)
            self._dump(scope, write.dump)
            for wait in write.waits if still or not write.awaits else ():
                known = self.waits.get(wait.id)
                if known is None or known["state"] == "open":
                    self.waits[wait.id] = plain(wait)
                    self._refer(FOR_WAITS + scope.sid, blob_in(wait.body))
        if write.nodes and not write.repeats:
            self._forget_deaths(session["sid"])
            session["takeovers"] = 0
        parks = bool(write.park) and still
        granted = self.books.spend(session, scope.owner, scope.turn, write.spending)
        if parks:
            self._forget_deaths(session["sid"])
            session.update(state="parked", owner=None, takeovers=0, updated=write.at)
            session.update(reason=None if write.heard is None else "waits for processes")
            self.awaited[scope.sid] = write.awaits
        told = {"cancel": session["cancel"], "inputs": self._inputs(scope.sid), "parked": parks}
        return told | {"granted": granted}

    def commit(self, write: Commit) -> Plain:
        scope = write.scope
        session = self._by_sid(scope.sid)
        last = write.nodes[-1]
        if session is not None and session["head"] >= scope.turn and self._body(scope, last) == last.body:
            turn = f"{session['id']}.{scope.turn}"
            asked = [p for p in self.processes.values() if (p["record"]["cancel"] or {}).get("by") == f"parent {turn}"]
            names = {p["registration"]["id"] for p in asked if write.children}
            return {"row": dict(session), "woken": self._rows(names)}
        session = self._owned(scope)
        if session["head"] != write.head:
            raise Refusal(HeadMoved)
        if session["cancel"] is not None and not write.cancelled:
            return {"cancel": session["cancel"]}
        self._need_blobs(write.blobs)
        self._need_blobs([write.dump.digest] if write.dump is not None and write.dump.digest else [])
        if write.over:
            self.nodes[scope.sid, scope.turn][last.ordinal] = last.body
        elif not self._is_new(scope, write.nodes):
            raise Refusal(InternalError)
        self._record(scope, () if write.over else write.nodes, write.take, write.blobs)
        self._dump(scope, write.dump)
        self._forget_waits(scope.sid)
        self._forget_deaths(scope.sid)
        session.update(head=scope.turn, takeovers=0, updated=write.at)
        session["settings"] = after_turn(session["settings"], write.tools or {}, write.recorded or {})
        waiting = [n for n, (kind, _) in sorted(self.inbox.get(scope.sid, {}).items()) if kind != "note"]
        if waiting:
            _, cancel = self.inbox[scope.sid].pop(waiting[0])
            session.update(turn=waiting[0], cancel=cancel)
        else:
            session.update(turn=None, state="idle", owner=None, cancel=None)
        self._count(session, write.costs)
        if write.spending:
            self.books.spend(session, scope.owner, scope.turn, write.spending)
            self.books.turn_over(scope.sid, scope.turn)
        woken: set[str] = set()
        if write.children:
            self._turn_ended(f"{session['id']}.{scope.turn}", write.at, woken)
        return {"row": dict(session), "woken": self._rows(woken)}

    def _dump(self, scope: TurnScope, dump: Dump | None) -> None:
        if dump is not None:
            self.dumps.setdefault(scope.sid, {})[scope.turn] = dump
            kept = dict(sorted(self.dumps[scope.sid].items())[-10:])
            self._forget_dumps(scope.sid)
            self.dumps[scope.sid] = kept
            self._refer(FOR_DUMPS + scope.sid, [each.digest for each in kept.values() if each.digest is not None])

    def _forget_dumps(self, sid: int) -> None:
        self.dumps.pop(sid, None)
        self.blob_refs = {(digest, owner) for digest, owner in self.blob_refs if owner != FOR_DUMPS + sid}

    def release(self, write: Release[SessionRow]) -> Plain:
        scope = write.scope
        assert isinstance(scope, TurnScope)
        session = self._by_sid(scope.sid)
        if session is not None and self._let_go(scope) and (write.stuck is None or session["state"] == "stuck"):
            return {"row": dict(session), "woken": []}
        session = self._owned(scope)
        self._stop_suspecting(session["sid"])
        self.books.turn_lost(session["sid"])
        session.update(owner=None, reason=write.stuck, updated=write.at)
        if write.stuck is not None:
            session["state"] = "stuck"
        return {"row": dict(session), "woken": []}

    def _owned(self, scope: TurnScope) -> Plain:
        session = self._by_sid(scope.sid)
        if session is None or session["deleted"]:
            raise Refusal(SessionDeleted)
        if (session["owner"], session["generation"], session["turn"]) != (scope.owner, scope.generation, scope.turn):
            raise Refusal(Fenced)
        return session

    def _let_go(self, scope: TurnScope) -> bool:
        """The last to own this turn was `scope`, and nobody has taken it since."""
        session = self._by_sid(scope.sid)
        if session is None:
            return False
        return (session["owner"], session["generation"], session["turn"]) == (None, scope.generation, scope.turn)

    def _is_new(self, scope: TurnScope, nodes: tuple[Node, ...]) -> bool:
        """Whether these records are yet to be written. Some already there must be there to the byte."""
        if not nodes or self._body(scope, nodes[0]) is None:
            return True
        if any(self._body(scope, n) != n.body for n in nodes):
            raise Refusal(InternalError)
        return False

    def _record(self, scope: TurnScope, nodes: tuple[Node, ...], take: tuple[int, ...], blobs: Iterable[str]) -> None:
        self.nodes[scope.sid, scope.turn] += [n.body for n in nodes]
        for number in take:
            self.inbox.get(scope.sid, {}).pop(number, None)
            if len(self.nodes[scope.sid, number]) == 1:
                self.nodes[scope.sid, number].append(joined(scope.turn))
        self._refer(scope.sid, blobs)

    # ------------------------------------------------------------------ from outside

    def cancel(self, write: Cancel[SessionRow]) -> Plain:
        session = self.sessions.get(write.target.id)
        if session is None or session["deleted"]:
            return {"status": "unknown", "turn": None, "row": None, "woken": [], "each": []}
        turn = session["turn"] if write.turn is None else write.turn
        if turn is None:
            return {
                "status": "completion_won",
                "turn": session["head"] or None,
                "row": dict(session),
                "woken": [],
                "each": [],
            }
        status = "already_requested"
        if turn != session["turn"]:
            status = self._cancel_queued(session, turn, as_json(write.request))
        elif session["cancel"] is None:
            status = "requested"
            session.update(cancel=as_json(write.request), updated=write.at)
            self._wake(session, write.worker)
        return {"status": status, "turn": turn, "row": dict(session), "woken": [], "each": []}

    def _cancel_queued(self, session: Plain, turn: int, request: bytes) -> str:
        waiting = self.inbox.get(session["sid"], {}).get(turn)
        if waiting is None or waiting[0] == "note":
            return "completion_won" if 1 <= turn < session["next"] else "unknown"
        if waiting[1] is not None:
            return "already_requested"
        waiting[:] = ["queue", request]
        return "requested"

    def resolve(self, write: Resolve) -> Plain:
        wait = self.waits.get(write.wait_id)
        session = self._by_sid(wait["sid"]) if wait is not None else None
        if wait is None or session is None or session["deleted"] or wait["state"] == "revoked":
            return {"status": "unknown", "wait": wait and dict(wait), "row": None}
        if wait["state"] != "open":
            return {"status": "already_resolved", "wait": dict(wait), "row": dict(session)}
        if write.answer is not None and session["cancel"] is not None:
            return {"status": "already_resolved", "wait": {**wait, "state": "cancelled"}, "row": dict(session)}
        if write.answer is None:
            wait["state"] = "expired"
        else:
            said = as_json(write.answer)
            self._need_blobs(blob_in(said))
            self._refer(FOR_WAITS + wait["sid"], blob_in(said))
            wait.update(state="resolved", answer=said)
        if session["owner"] is None and session["turn"] == wait["turn"]:
            session["updated"] = write.at
            self._wake(session, write.worker if session["agent"] in write.agents else None)
        return {"status": "accepted", "wait": dict(wait), "row": dict(session)}

    def resume(self, write: Resume[SessionRow]) -> Plain | None:
        session = self.sessions.get(write.target.id)
        if session is None or session["state"] != "stuck":
            return None
        session["updated"] = write.at
        self._wake(session, write.worker)
        self._resumed(session["sid"], write.worker, write.lived)
        return dict(session)

    def reopen(self, write: ReopenTurn) -> Plain | None:
        session = self.sessions.get(write.session_id)
        if session is None or session["deleted"]:
            return None
        bodies = self.nodes.get((session["sid"], write.turn), [])
        is_there = write.node.ordinal < len(bodies)
        ended = session["turn"] is None and session["head"] == write.turn
        if session["turn"] == write.turn or (is_there and ended):
            return dict(session)
        if not ended or write.node.ordinal != len(bodies):
            return None
        if write.settings is not None and write.expected != session["settings"]:
            raise Refusal(StaleSettings)
        bodies.append(write.node.body)
        session.update(head=write.head, turn=write.turn, state="open", reason=None, cancel=None, updated=write.at)
        if write.settings is not None:
            session["settings"] = write.settings
        if write.worker is not None:
            session.update(owner=write.worker, generation=session["generation"] + 1)
        return dict(session)

    def configure(self, write: Configure) -> Plain:
        session = self.sessions.get(write.session_id)
        before = b""
        if session is not None:
            if session["deleted"]:
                raise Refusal(SessionDeleted)
            if session["agent"] != write.agent:
                raise Refusal(WrongAgent)
            before = session["settings"]
            if before == write.settings:
                return dict(session)
        if write.expected not in (None, before) or write.next not in (None, 1 if session is None else session["next"]):
            raise Refusal(StaleSettings)
        self._need_blobs(write.blobs)
        if session is None:
            session = self._new_session(write.session_id, write.agent, write.at)
        session.update(settings=write.settings, updated=write.at)
        self._refer(session["sid"], write.blobs)
        self._count(session, write.costs)
        self.books.spend(session, write.worker, 0, write.spending)
        return dict(session)

    def _count(self, session: Plain, costs: tuple[UsageRow, ...]) -> None:
        """Add up what was spent. It stays, whatever becomes of the session."""
        for each in costs:
            key = (session["sid"], each.hour, each.label, each.model, each.metadata)
            whose = {"session": each.session_id, "agent": each.agent, "family": each.family}
            known = self.usage.setdefault(key, whose)
            for name in ("input", "output", "calls", "unknown"):
                given = getattr(each.usage, name)
                known[name] = given if known.get(name) is None else known[name] + (given or 0)

    def _wake(self, session: Plain, worker: str | None) -> None:
        """Somebody has to look at an open turn that nobody owns: `worker`, or the first to claim it."""
        if session["owner"] is None:
            if session["state"] == "parked":
                self._turn_goes_on(session, session["updated"])
            session.update(state="open", reason=None, owner=worker)
            session["generation"] += 1 if worker is not None else 0

    def branch(self, write: Branch) -> Plain:
        source = self.sessions.get(write.source)
        if source is None:
            raise Refusal(UnknownSession)
        if source["deleted"]:
            raise Refusal(SessionDeleted)
        fork = {"sid": source["sid"], "turn": write.turn, "ordinal": write.ordinal}
        existing = self.sessions.get(write.session_id)
        if existing is None:
            existing = self._new_session(write.session_id, write.agent, write.at)
            existing.update(
                fork=fork, settings=of_a_fork(source["settings"], write.whole and source["head"] == write.turn)
            )
            named = [self.processes[p]["pid"] for p in write.grants if p in self.processes]
            self.grants |= {(write.session_id, pid) for pid in named if (write.source, pid) in self.grants}
        elif existing["deleted"] or existing["fork"] != fork or existing["agent"] != write.agent:
            raise Refusal(InvalidSessionId)
        return dict(existing)

    def delete(self, write: Delete) -> bool:
        session = self.sessions.get(write.session_id)
        if session is None or session["deleted"]:
            return False
        if write.unused_since is not None and not self._is_unused(session, write.unused_since):
            return False
        self._forget_waits(session["sid"])
        self._forget_dumps(session["sid"])
        self._forget_deaths(session["sid"])
        self.books.session_gone(session["sid"])
        if session["turn"] is not None:
            self._turn_ended(f"{session['id']}.{session['turn']}", write.at, set())
        if session["state"] == "parked":
            self._turn_goes_on(session, write.at)
        self.end_session(session["id"], write.at)
        session.update(deleted=True, turn=None, state="idle", owner=None, cancel=None, reason=None, updated=write.at)
        session.update(settings=b"", generation=session["generation"] + 1)
        self.forget_session(session["id"])
        reached = self._reached()
        for other in self.sessions.values():
            if other["sid"] not in reached:
                self._drop(other)
        return True

    def _is_unused(self, session: Plain, since: int) -> bool:
        sid, name = session["sid"], session["id"]
        seen = [row for row in self.processes.values() if (name, row["pid"]) in self.grants]
        in_use = (
            session["turn"] is not None,
            session["updated"] >= since,
            bool(self.inbox.get(sid)),
            any(other["fork"] is not None and other["fork"]["sid"] == sid for other in self.sessions.values()),
            any(wake["session_id"] == name and wake["state"] == "pending" for wake in self.wakes.values()),
            any(not is_over(row) for row in seen),
        )
        return not any(in_use)

    def _reached(self) -> set[int]:
        """Sessions whose nodes somebody can still read: those that live, and all that they were forked from."""
        reached: set[int] = set()
        for session in self.sessions.values():
            line: Plain | None = None if session["deleted"] else session
            while line is not None:
                reached.add(line["sid"])
                line = self._by_sid(line["fork"]["sid"]) if line["fork"] else None
        return reached

    def _drop(self, session: Plain) -> None:
        sid = session["sid"]
        session["fork"] = None
        self.nodes = {place: bodies for place, bodies in self.nodes.items() if place[0] != sid}
        self.keys = {place: known for place, known in self.keys.items() if place[0] != sid}
        self.blob_refs = {(digest, owner) for digest, owner in self.blob_refs if owner != sid}
        self.inbox.pop(sid, None)

    # ------------------------------------------------------------------ workers and blobs

    def beat(self, write: Beat) -> bool:
        first = write.worker.id not in self.workers
        running = self._runs(write.worker.id)
        self.workers[write.worker.id] = plain(write.worker) | {"suspect": running}
        return not first or write.worker.beat == 0

    def retire(self, write: Retire) -> None:
        owned = [s for s in self.sessions.values() if s["owner"] == write.worker_id]
        self.books.worker_gone(write.worker_id)
        if write.dead and (owned or any(p["owner"] == write.worker_id for p in self.processes.values())):
            return
        if write.dead and self._tells_of_a_suspect(write):
            return
        for session in owned:
            self.books.turn_lost(session["sid"])
            session["owner"] = None
        self.leave(write.worker_id, write.at)
        self.workers.pop(write.worker_id, None)

    def _tells_of_a_suspect(self, write: Retire) -> bool:
        """Others died with it, and what they had is judged by which suspect ran in their OS process."""
        gone = self.workers.get(write.worker_id)
        if gone is None or gone["suspect"] is None or not gone["process"]:
            return False
        rows = [*self.sessions.values(), *self.processes.values()]
        with_it = [w for w in write.beside if w != write.worker_id and w in self.workers]
        same = [w for w in with_it if self.workers[w]["process"] == gone["process"]]
        return any(row["owner"] in same for row in rows)

    def put_blob(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return digest

    def orphans(self) -> set[str]:
        return set(self.blobs) - {digest for digest, _ in self.blob_refs}

    def _need_blobs(self, digests: Iterable[str]) -> None:
        if any(digest not in self.blobs for digest in digests):
            raise Refusal(BlobMissing)

    def _refer(self, sid: int, digests: Iterable[str]) -> None:
        self.blob_refs |= {(digest, sid) for digest in digests}

    # ------------------------------------------------------------------ reading

    def listed(self, wanted: SessionFilter) -> list[Plain]:
        """Sessions as `sessions` must list them: live ones, the last changed first."""
        found = [s for s in self.sessions.values() if not s["deleted"] and s["id"].startswith(wanted.prefix)]
        found = [s for s in found if wanted.agent in (None, s["agent"]) and wanted.state in (None, s["state"])]
        found = [s for s in found if wanted.before is None or s["updated"] < wanted.before]
        return sorted(found, key=lambda s: (-s["updated"], -s["sid"]))[: wanted.limit]

    def history(self, sid: int, first: int, last: int) -> list[tuple[int, int, bytes]]:
        turns = sorted(turn for owner, turn in self.nodes if owner == sid and first <= turn <= last)
        return [(turn, i, body) for turn in turns for i, body in enumerate(self.nodes[sid, turn])]

    def live(self) -> list[Plain]:
        return [s for s in self.sessions.values() if not s["deleted"]]

    def _by_sid(self, sid: int) -> Plain | None:
        return next((s for s in self.sessions.values() if s["sid"] == sid), None)

    def _body(self, scope: TurnScope, node: Node) -> bytes | None:
        bodies = self.nodes.get((scope.sid, scope.turn), [])
        return bodies[node.ordinal] if node.ordinal < len(bodies) else None

    def _inputs(self, sid: int) -> bool:
        """Whether something waits that a running turn should take in."""
        return any(kind != "queue" for kind, _ in self.inbox.get(sid, {}).values())

    def _is_open(self, wait_id: str) -> bool:
        return wait_id in self.waits and self.waits[wait_id]["state"] == "open"

    def _forget_waits(self, sid: int) -> None:
        """A turn is over, or its session: nothing is asked any more, and nothing is kept of what was."""
        self.waits = {name: wait for name, wait in self.waits.items() if wait["sid"] != sid}
        self.blob_refs = {(digest, owner) for digest, owner in self.blob_refs if owner != FOR_WAITS + sid}
