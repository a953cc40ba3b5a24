"""What stores keep of waits, and for how long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from perdure.model.codec import encode
from perdure.model.record import Spilled
from perdure.model.session import Answer, CancelRequest, Node, WaitRow
from perdure.model.write import Accept, Append, Cancel, Commit, Resolve, SessionRef, TurnScope
from perdure.ports.store import Store
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import SqliteStore


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    store: Store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "agent.db")
    await store.open()
    yield store
    await store.close()


async def turn(store: Store, session: str = "s") -> TurnScope:
    accepted = await store.write(Accept(session, "a", b"{}", "op", 1, worker="w"))
    return TurnScope(session, accepted.row.sid, accepted.turn, "w", accepted.row.generation)


def wait(scope: TurnScope, name: str, **more: Any) -> WaitRow:
    return WaitRow(name, scope.sid, scope.turn, "1.0", "approval", **more)


async def test_a_commit_drops_the_waits_of_its_session_and_of_no_other(store: Store) -> None:
    one, other = await turn(store, "one"), await turn(store, "other")
    await store.write(Append(one, (Node(1, b"1"),), 2, waits=(wait(one, "one.a"), wait(one, "one.b"))))
    await store.write(Append(other, (Node(1, b"1"),), 2, waits=(wait(other, "other.a"),)))
    await store.write(Resolve("one.a", Answer("approved"), 3))

    await store.write(Commit(one, (Node(2, b"2"),), 0, 4))

    assert await store.waits(one.sid) == []
    assert [w.id for w in await store.waits()] == ["other.a"]
    late = [await store.write(Resolve(name, Answer("approved"), 5)) for name in ("one.a", "one.b", "other.a")]
    assert [resolved.status for resolved in late] == ["unknown", "unknown", "accepted"]


async def test_waits_that_an_older_version_left_behind_go_with_the_next_commit(store: Store) -> None:
    first = await turn(store)
    await store.write(Commit(first, (Node(1, b"1"),), 0, 2))
    later = await turn(store)
    left = wait(first, "s.1.1.0:approval", state="resolved", answer=encode(Answer("approved", by="ann")))
    await store.write(Append(later, (Node(1, b"1"),), 3, waits=(left, wait(later, "s.2.1.0:approval"))))

    told = await store.write(Resolve(left.id, Answer("rejected"), 4))
    assert (told.status, told.wait) == ("already_resolved", left)

    await store.write(Commit(later, (Node(2, b"2"),), 1, 5))
    assert await store.waits(later.sid) == []


async def test_an_answer_after_a_cancel_request_is_told_so_and_changes_nothing(store: Store) -> None:
    scope = await turn(store)
    await store.write(Append(scope, (Node(1, b"1"),), 2, waits=(wait(scope, "a"),), park=("a",)))
    await store.write(Cancel(SessionRef("s"), CancelRequest("ann"), 3))
    row = await store.session("s")

    told = await store.write(Resolve("a", Answer("approved"), 4, "w", ("a",)))

    assert told.wait is not None
    assert (told.status, told.wait.state, told.row) == ("already_resolved", "cancelled", row)
    assert [w.state for w in await store.waits(scope.sid)] == ["open"]
    assert await store.session("s") == row


async def test_a_blob_of_a_wait_outlives_it_only_where_a_record_needs_it(store: Store) -> None:
    scope, digests = await turn(store), [await store.blobs.put(data) for data in (b"asked", b"said", b"both")]
    asked, said, both = [Spilled(digest, 4) for digest in digests]
    waits = (wait(scope, "a", body=encode(asked)), wait(scope, "b", body=encode(both)))
    await store.write(Append(scope, (Node(1, b"1"),), 2, waits=waits))
    await store.write(Resolve("a", said, 3))
    assert await store.sweep(grace=0) == 0

    await store.write(Commit(scope, (Node(2, b"2"),), 0, 4, blobs=(both.digest,)))

    assert await store.sweep(grace=0) == 2
    assert await store.blobs.get(both.digest) == b"both"
