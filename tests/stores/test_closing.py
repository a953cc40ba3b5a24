"""Whoever closes a file last folds its WAL back: under the lock, as every checkpoint of ours."""

import asyncio
from pathlib import Path

from perdure.stores.sqlite import SqliteStore
from tests.stores.child import turn
from tests.stores.test_sqlite_file import held


async def test_the_last_to_close_folds_nothing_back_while_somebody_else_holds_the_lock(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "agent.db")
    await store.open()
    await turn(store, "a", b"said", 1)
    before = store.path.read_bytes()
    with held(store.path):
        closing = asyncio.ensure_future(store.close())
        done, _ = await asyncio.wait([closing], timeout=0.2)
        assert not done
        assert store.path.read_bytes() == before

    await closing
    assert store.path.read_bytes() != before
