"""Saved interpreters in a store: one of each turn, ten of a session, and no blob that outlives its dump."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import BlobMissing, Fenced
from perdure.model.session import Dump, Node
from perdure.model.write import Accept, Append, Branch, Commit, Delete, TurnScope
from perdure.ports.store import Store
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import SqliteStore


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    made: Store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "agent.db")
    await made.open()
    yield made
    await made.close()


async def opened(store: Store, name: str = "s") -> TurnScope:
    accepted = await store.write(Accept(name, "a", b"said", f"op {name}", 1, worker="w"))
    row = accepted.row
    return TurnScope(name, row.sid, accepted.turn, "w", row.generation)


async def appended(store: Store, scope: TurnScope, ordinal: int, dump: Dump) -> None:
    await store.write(Append(scope, (Node(ordinal, b"record %d" % ordinal),), 2, dump=dump))


async def committed(store: Store, scope: TurnScope, dump: Dump | None = None) -> None:
    nodes = (Node(len(await store.nodes(scope.sid, scope.turn, scope.turn)), b"closed"),)
    await store.write(Commit(scope, nodes, scope.turn - 1, 3, dump=dump))


async def every(store: Store, sid: int) -> list[tuple[int, Dump]]:
    found, last = list[tuple[int, Dump]](), 1000
    while (newest := await store.dump(sid, last)) is not None:
        found.append(newest)
        last = newest[0] - 1
    return found


async def test_dump_of_a_turn_is_replaced_by_the_next(store: Store) -> None:
    scope = await opened(store)
    await appended(store, scope, 1, Dump(b"first"))
    await appended(store, scope, 2, Dump(b"second"))
    await committed(store, scope)

    assert await every(store, scope.sid) == [(1, Dump(b"second"))]


async def test_ten_dumps_of_a_session_are_kept(store: Store) -> None:
    scope = await opened(store)
    for turn in range(1, 15):
        if turn != 13:  # a turn without a cell
            await appended(store, scope, 1, Dump(b"%d" % turn))
        await committed(store, scope)
        scope = await opened(store)

    assert [turn for turn, _ in await every(store, scope.sid)] == [14, 12, 11, 10, 9, 8, 7, 6, 5, 4]
    assert await store.dump(scope.sid, 9) == (9, Dump(b"9"))
    assert await store.dump(scope.sid, 3) is None


async def test_blob_of_a_dump_lives_as_long_as_the_dump(store: Store) -> None:
    scope, swept = await opened(store), []
    for ordinal, data in enumerate((b"one", b"two"), 1):
        await appended(store, scope, ordinal, Dump(digest=await store.blobs.put(data * 40_000)))
        swept.append(await store.sweep(grace=-1))
    await appended(store, scope, 3, Dump(b"small again"))
    swept.append(await store.sweep(grace=-1))

    assert swept == [0, 1, 1]


async def test_dump_that_refers_to_no_blob_is_refused_with_its_records(store: Store) -> None:
    scope = await opened(store)
    with pytest.raises(BlobMissing):
        await appended(store, scope, 1, Dump(digest="0" * 64))
    with pytest.raises(BlobMissing):
        await committed(store, scope, Dump(digest="0" * 64))

    assert len(await store.nodes(scope.sid, 1, 1)) == 1
    assert await store.dump(scope.sid, 1) is None


async def test_relieved_owner_saves_nothing(store: Store) -> None:
    scope = await opened(store)
    old: Any = TurnScope(scope.session_id, scope.sid, scope.turn, "w", scope.generation - 1)
    with pytest.raises(Fenced):
        await appended(store, old, 1, Dump(b"state"))

    assert await store.dump(scope.sid, 1) is None


async def test_deleted_session_leaves_no_dump_even_where_a_fork_needs_its_records(store: Store) -> None:
    digest = await store.blobs.put(b"state" * 40_000)
    scope = await opened(store)
    await committed(store, scope, Dump(digest=digest))
    await store.write(Branch("fork", "a", "s", 1, 1, 4))
    await store.write(Delete("s", 5))

    assert await store.dump(scope.sid, 1) is None
    assert await store.sweep(grace=-1) == 1
    assert await store.nodes(scope.sid, 1, 1) != []
