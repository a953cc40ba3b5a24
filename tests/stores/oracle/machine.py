"""How lives are driven beside the oracle: one private event loop, one write at a time, all compared after it.

`StoreMachine` has no rules of its own. It sends a write to the store and to the model written by hand, compares the
two answers, and after every step reads the whole store back: first against the model, then against what must hold of
any store whatever was asked of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

from hypothesis.stateful import RuleBasedStateMachine, invariant

from perdure.errors import BlobMissing, PerdureError
from perdure.model.session import Node, SessionRow, WaitRow
from perdure.model.spending import UsageFilter, UsageRow
from perdure.model.write import Accept, Append, Commit, SessionFilter, TurnScope, Write
from perdure.ports.store import Store
from perdure.testing.store_contract import Place
from tests.stores.oracle.model import StoreModel
from tests.stores.oracle.plain import Plain, Refusal, deep, plain
from tests.stores.oracle.values import CLOSED, JOINED, SESSIONS

T = TypeVar("T")


class StoreMachine(RuleBasedStateMachine):
    """A store and its model, side by side."""

    new_place: ClassVar[Callable[[], Place]]
    ran: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.ran["lives"] += 1
        self.runner = asyncio.Runner()
        self.place = type(self).new_place()
        self.model = StoreModel()
        self.now = 1_000
        self.by_submit = False
        self.sent: list[Write[Any]] = []
        self.compared = False
        self.seen = Seen()
        self.store = self.opened()
        self.secret = self.run(self.store.secret())

    def opened(self) -> Store:
        store = self.place.store()
        self.run(store.open())
        return store

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        # `Runner.run` installs a signal handler each time; here that would cost more than the work.
        return self.runner.get_loop().run_until_complete(work)

    def teardown(self) -> None:
        try:
            self.run(self.store.close())
        finally:
            self.runner.close()
            self.place.clear()

    # ------------------------------------------------------------------ sending

    def tick(self, by: int = 1) -> int:
        self.now += by
        return self.now

    def send(self, write: Write[Any], expected: object = ...) -> Any:
        """Send a write to both, and return the answer of both. `expected` is what the rule's name promises."""
        answer = self.expect(write)
        if expected is not ...:
            assert answer == expected, f"this form of {write} should lead to {expected}, the model says {answer}"
        got = self.run(self.ask(write))
        assert got == answer, f"{write}\n was answered {got}\n instead of     {answer}"
        self.ran["writes"] += 1
        if not isinstance(answer, type):
            self.sent.append(write)
        self.run(self.compare())
        self.compared = True
        return answer

    def expect(self, write: Write[Any]) -> Any:
        """What the model makes of a write: the receipt, or the class of the refusal."""
        try:
            return self.model.apply(write)
        except Refusal as refusal:
            return refusal.error

    async def ask(self, write: Write[Any]) -> Any:
        """The store's answer as plain data: a receipt, or the class of its refusal."""
        try:
            receipt = await (self._submitted(write) if self.by_submit else self.store.write(write))
        except PerdureError as refusal:
            return type(refusal)
        return deep(receipt)

    async def _submitted(self, write: Write[Any]) -> Any:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Any] = loop.create_future()

        def done(receipt: Any, error: BaseException | None) -> None:
            if error is not None:
                loop.call_soon_threadsafe(answered.set_exception, error)
            else:
                loop.call_soon_threadsafe(answered.set_result, receipt)

        self.store.submit(write, done)
        return await answered

    # ------------------------------------------------------------------ finding something to write about

    def pick(self, found: Sequence[T], number: int) -> T:
        return found[number % len(found)]

    def turns(self, *, owned: bool | None = None, cancel: bool | None = None) -> list[Plain]:
        """Sessions with an open turn, of those asked for."""
        found = [s for s in self.model.sessions.values() if s["turn"] is not None]
        if owned is not None:
            found = [s for s in found if (s["owner"] is not None) == owned]
        if cancel is not None:
            found = [s for s in found if (s["cancel"] is not None) == cancel]
        return found

    def claimable(self) -> list[Plain]:
        return [s for s in self.turns() if s["state"] != "stuck"]

    def scope(self, session: Plain) -> TurnScope:
        return TurnScope(
            session["id"], session["sid"], session["turn"], session["owner"] or "w0", session["generation"]
        )

    def next_nodes(self, scope: TurnScope, bodies: Sequence[bytes]) -> tuple[Node, ...]:
        there = len(self.model.nodes[scope.sid, scope.turn])
        return tuple(Node(there + i, body) for i, body in enumerate(bodies))

    def waiting_inputs(self, session: Plain, *kinds: str) -> list[int]:
        return [n for n, (kind, _) in sorted(self.model.inbox.get(session["sid"], {}).items()) if kind in kinds]

    def held(self) -> list[Plain]:
        return self.turns(owned=True)

    def idle(self) -> list[Plain]:
        return [s for s in self.model.live() if s["turn"] is None]

    def deleted(self) -> list[Plain]:
        return [s for s in self.model.sessions.values() if s["deleted"]]

    def fresh(self) -> list[str]:
        return [name for name in SESSIONS if name not in self.model.sessions]

    def writes(self, kind: type) -> list[Any]:
        return [write for write in self.sent if type(write) is kind]

    # ------------------------------------------------------------------ writing about it

    def accept_on(self, session: Plain, body: bytes, kind: Any = "queue", **more: Any) -> Accept:
        return Accept(session["id"], session["agent"], body, f"op-{self.now}", self.tick(), kind, **more)

    def appending(self, session: Plain, bodies: list[bytes], **more: Any) -> Append:
        scope = self.scope(session)
        return Append(scope, self.next_nodes(scope, bodies), self.tick(), **more)

    def committing(self, session: Plain, bodies: list[bytes], **more: Any) -> Commit:
        scope = self.scope(session)
        nodes = self.next_nodes(scope, [*bodies, CLOSED + b"%d" % self.now])
        return Commit(scope, nodes, more.pop("head", session["head"]), self.tick(), **more)

    def new_wait(self, session: Plain, number: int, due: int | None, body: bytes) -> WaitRow:
        call = f"{session['id']}.{session['turn']}.1.{number}"
        return WaitRow(f"wait:{call}", session["sid"], session["turn"], call, "approval", due=due, body=body)

    def referring(self, session: Plain, digest: str, how: str) -> Any:
        if how == "accept":
            return self.accept_on(session, b"see the blob", blobs=(digest,))
        if how == "append":
            return self.appending(session, [b"see the blob"], blobs=(digest,))
        return self.committing(session, [b"see the blob"], blobs=(digest,), cancelled=True)

    # ------------------------------------------------------------------ blobs

    def a_blob(self, data: bytes) -> str:
        digest = self.run(self.store.blobs.put(data))
        assert digest == self.model.put_blob(data) == self.run(self.store.blobs.put(data))
        return digest

    def sweep(self) -> None:
        """Sweep whatever the age: nobody else is about to refer to anything."""
        orphans = self.model.orphans()
        assert self.run(self.store.sweep(grace=0)) == len(orphans)
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

    # ------------------------------------------------------------------ after every step

    @invariant()
    def the_store_holds_what_was_acknowledged_and_nothing_else(self) -> None:
        if not self.compared:  # the step ended with something else than a write
            self.run(self.compare())
        self.compared = False

    async def compare(self) -> None:
        store, model = self.store, self.model
        for session in model.sessions.values():
            row = await store.session(session["id"])
            assert plain(row) == session
            assert plain(await store.session_by_sid(session["sid"])) == session
            history = await store.nodes(session["sid"], 1, session["next"])
            assert history == model.history(session["sid"], 1, session["next"])
            inbox = [(r.input, [r.kind, r.cancel]) for r in await store.inbox(session["sid"])]
            assert inbox == sorted(model.inbox.get(session["sid"], {}).items())
            assert row is not None
            self.seen.look(row, history, [number for number, _ in inbox])
        everything = await store.sessions(SessionFilter())
        assert [plain(r) for r in everything] == model.listed(SessionFilter())
        assert by_key(await store.open_sessions(), "sid") == sorted(self.turns(), key=lambda s: s["sid"])
        found = [w for s in model.sessions.values() for w in await store.waits(s["sid"])]
        assert by_key(found, "id") == sorted(model.waits.values(), key=lambda w: w["id"])
        assert by_key(await store.workers(), "id") == sorted(model.workers.values(), key=lambda w: w["id"])
        assert by_key(await store.deaths(), "scope") == sorted(model.deaths.values(), key=lambda d: d["scope"])
        sums = {(r.sid, r.hour, r.label, r.model, r.metadata): as_sum(r) for r in await store.usage(UsageFilter())}
        assert sums == model.usage
        accounts = {(a.name, a.key): plain(a) for a in await store.accounts()}
        books = model.books
        assert accounts == {place: {"name": place[0], "key": place[1]} | each for place, each in books.accounts.items()}
        held = {
            (r.sid, r.name): (r.owner, r.turn, [[(h.name, h.key), h.start, h.amount] for h in r.holds])
            for r in await store.reservations()
        }
        assert held == {place: (r["owner"], r["turn"], r["holds"]) for place, r in books.reserved.items()}
        assert await store.secret() == self.secret, "the secret of a store never changes"


def as_sum(row: UsageRow) -> Plain:
    usage = {name: getattr(row.usage, name) for name in ("input", "output", "calls", "unknown")}
    return {"session": row.session_id, "agent": row.agent, "family": row.family} | usage


def by_key(rows: Sequence[Any], key: str) -> list[Plain]:
    return sorted((plain(row) for row in rows), key=lambda row: row[key])


class Seen:
    """What earlier looks at the store showed, and what may follow from it. It knows nothing of the model."""

    def __init__(self) -> None:
        self._rows: dict[int, SessionRow] = {}
        self._owners: dict[tuple[int, int], str] = {}
        self._bodies: dict[tuple[int, int, int], bytes] = {}
        self._stages: dict[tuple[int, int], str] = {}

    def replaced(self, sid: int, turn: int, ordinal: int) -> None:
        """The one record that may change: the last of a turn that is full."""
        self._bodies.pop((sid, turn, ordinal), None)

    def look(self, row: SessionRow, history: list[tuple[int, int, bytes]], inbox: list[int]) -> None:
        self._check_row(row)
        if row.deleted:
            return
        turns: dict[int, list[bytes]] = {}
        for turn, ordinal, body in history:
            bodies = turns.setdefault(turn, [])
            assert ordinal == len(bodies), f"{row.id}.{turn} has a hole before record {ordinal}"
            bodies.append(body)
            assert self._bodies.setdefault((row.sid, turn, ordinal), body) == body, "a record changed"
        assert list(turns) == list(range(1, row.next)), f"inputs of {row.id} are missing"
        for turn, bodies in turns.items():
            self._check_stage(row, turn, stage_of(row, turn, bodies, inbox))

    def _check_row(self, row: SessionRow) -> None:
        before = self._rows.get(row.sid, row)
        assert row.generation >= before.generation, "a generation went back"
        committed = row.head == before.turn and row.head > before.head
        continued = row.turn == before.head and row.head < before.head
        assert row.head == before.head or committed or continued, "the head jumped"
        assert row.next >= before.next, "an input was forgotten"
        if row.owner is not None:
            owner = self._owners.setdefault((row.sid, row.generation), row.owner)
            assert owner == row.owner, f"{owner} and {row.owner} both own generation {row.generation} of {row.id}"
        self._rows[row.sid] = row

    def _check_stage(self, row: SessionRow, turn: int, stage: str) -> None:
        """An input is queued or opens a turn; queued, it opens one later or joins one; an open one closes."""
        before = self._stages.get((row.sid, turn), "new")
        follows = {"new": ("queued", "open"), "queued": ("open", "joined"), "open": ("closed",), "closed": ("open",)}
        assert stage == before or stage in follows.get(before, ()), f"input {row.id}.{turn} went {before} -> {stage}"
        self._stages[row.sid, turn] = stage


def stage_of(row: SessionRow, turn: int, bodies: list[bytes], inbox: list[int]) -> str:
    """Where an input is: exactly one of these must be true of it."""
    stages = {
        "queued": turn in inbox,
        "open": row.turn == turn,
        "joined": len(bodies) == 2 and bodies[1].startswith(JOINED),
        "closed": len(bodies) > 1 and bodies[-1].startswith(CLOSED),
    }
    true = [name for name, holds in stages.items() if holds]
    assert len(true) == 1, f"input {row.id}.{turn} is {true or 'lost'}"
    return true[0]
