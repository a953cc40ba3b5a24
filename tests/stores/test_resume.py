"""Resuming a stuck turn, on every store: only a person frees it, and whoever takes it is fenced like any owner."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.errors import Fenced
from perdure.model.session import Node, SessionRow
from perdure.model.write import Accept, Append, Claim, Delete, Release, Resume, SessionRef, TurnScope
from perdure.ports.store import Store
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import SqliteStore


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    store: Store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "agent.db")
    await store.open()
    yield store
    await store.close()


async def stuck(store: Store) -> TurnScope:
    """Turn s.1 got stuck under worker `old`; the scope it had."""
    accepted = await store.write(Accept("s", "a", b"{}", "op", 1, worker="old"))
    scope = TurnScope("s", accepted.row.sid, 1, "old", accepted.row.generation)
    await store.write(Release(scope, 2, stuck="no disk"))
    return scope


async def test_a_resumed_turn_belongs_to_its_resumer_and_fences_the_owner_before(store: Store) -> None:
    scope = await stuck(store)

    row = await store.write(Resume(SessionRef("s"), 3, "new"))

    assert isinstance(row, SessionRow)
    assert (row.state, row.owner, row.generation, row.reason) == ("open", "new", scope.generation + 1, None)
    with pytest.raises(Fenced):
        await store.write(Append(scope, (Node(1, b"1"),), 4))


async def test_a_turn_resumed_by_nobody_is_free_to_claim(store: Store) -> None:
    scope = await stuck(store)
    refused = await store.write(Claim(SessionRef("s"), "new", scope.generation, 3))

    row = await store.write(Resume(SessionRef("s"), 4))
    claimed = await store.write(Claim(SessionRef("s"), "new", scope.generation, 5))

    assert row is not None
    assert (refused.won, row.state, row.owner, claimed.won) == (False, "open", None, True)


async def test_only_a_stuck_turn_is_resumed_and_only_once(store: Store) -> None:
    assert await store.write(Resume(SessionRef("s"), 1, "w")) is None
    await stuck(store)

    first, second = (
        await store.write(Resume(SessionRef("s"), 3, "w")),
        await store.write(Resume(SessionRef("s"), 4, "w")),
    )

    assert first is not None
    assert second is None
    assert await store.session("s") == first


async def test_a_deleted_session_is_not_resumed(store: Store) -> None:
    await stuck(store)
    await store.write(Delete("s", 3))

    assert await store.write(Resume(SessionRef("s"), 4, "w")) is None
