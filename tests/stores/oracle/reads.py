"""Blobs, and everything that is only read."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from perdure.errors import BlobMissing
from perdure.model.write import SessionFilter
from tests.stores.oracle.machine import StoreMachine, by_key
from tests.stores.oracle.plain import plain
from tests.stores.oracle.values import AGENTS, bodies, has, index, large


class ReadRules(StoreMachine):
    """Bytes beside the rows, and rows read in every way."""

    # ------------------------------------------------------------------ blobs

    @rule(data=st.one_of(bodies, large))
    def a_blob_is_put_and_read(self, data: bytes) -> None:
        assert self.run(self.store.blobs.get(self.a_blob(data))) == data

    @has(lambda self: self.model.blobs, StoreMachine.held)
    @rule(n=index, m=index, how=st.sampled_from(["accept", "append", "commit"]))
    def a_blob_is_referred_to(self, n: int, m: int, how: str) -> None:
        session, digest = self.pick(self.held(), n), self.pick(sorted(self.model.blobs), m)
        self.send(self.referring(session, digest, how))

    @has(StoreMachine.held)
    @rule(n=index, how=st.sampled_from(["accept", "append", "commit"]))
    def a_reference_to_a_missing_blob_is_refused(self, n: int, how: str) -> None:
        self.send(self.referring(self.pick(self.held(), n), "0" * 64, how), BlobMissing)

    @has(lambda self: self.model.blobs)
    @rule(spare=bodies)
    def the_sweep_takes_orphans_and_nothing_else(self, spare: bytes) -> None:
        self.a_blob(spare)
        self.sweep()

    @rule(data=bodies)
    def the_sweep_spares_what_was_put_lately(self, data: bytes) -> None:
        """Between its put and its reference a blob looks like an orphan."""
        digest = self.a_blob(data)
        assert self.run(self.store.sweep()) == 0
        assert self.run(self.store.blobs.get(digest)) == data

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
