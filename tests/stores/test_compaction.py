"""Free pages are given back: by themselves in new stores, by `compact` in old ones."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest

from perdure import Agent, Runtime
from perdure.errors import InvalidInput, StoreInUse
from perdure.model.write import Accept, Delete
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite.database import SPARE_PAGES
from perdure.testing import ScriptedModel
from tests.kit import texts, until

BODY = b"x" * 20_000


def pragma(path: Path, name: str) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


@pytest.mark.slow
async def test_a_new_store_shrinks_after_deletions_without_being_asked(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    store = SqliteStore(path)
    await store.open()
    for number in range(200):
        await store.write(Accept(f"s-{number}", "clerk", BODY, f"op {number}", number))
    assert store._file is not None
    store._file.checkpoint("TRUNCATE")
    large = path.stat().st_size
    for number in range(200):
        await store.write(Delete(f"s-{number}", 1_000 + number))

    await until(lambda: path.stat().st_size < large / 4)  # whatever the writer's thread still has to do

    assert large > 200 * len(BODY)
    assert pragma(path, "freelist_count") <= SPARE_PAGES
    assert (await store.facts(deep=True)).checks == ("ok",)
    await store.close()


async def older(path: Path) -> None:
    """A store as the version before made it: it cannot move its pages."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA page_size = 1024")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE empty (one INTEGER)")
        connection.execute("DROP TABLE empty")
        connection.commit()
    async with Runtime(path, agents=[Agent(ScriptedModel(["kept"]))]) as runtime:
        await (await runtime.session("chat")).run("keep this")
        for number in range(50):
            await runtime.store.write(Accept(f"s-{number}", "clerk", BODY, f"op {number}", number))
        for number in range(50):
            await runtime.sessions.delete(f"s-{number}")


async def test_an_older_store_is_compacted_and_shrinks_by_itself_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    await older(path)
    assert pragma(path, "auto_vacuum") == 0

    before, after = await Runtime.compact(path)

    assert after < before / 4
    assert path.stat().st_size == after
    assert pragma(path, "auto_vacuum") == 2
    async with Runtime(path, agents=[Agent(ScriptedModel(["and on"]))]) as runtime:
        session = await runtime.session("chat")
        assert (await session.run("more")).text == "and on"
        assert texts(await session.history()) == ["keep this", "kept", "more", "and on"]
        assert (await runtime.store.facts(deep=True)).checks == ("ok",)


async def test_a_store_in_use_is_not_compacted(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    async with Runtime(path) as runtime:
        with pytest.raises(StoreInUse):
            await Runtime.compact(path)
        assert isinstance(runtime.store, SqliteStore)
        with pytest.raises(InvalidInput, match="is open here"):
            await runtime.store.compact(lambda done, whole: None)
    with pytest.raises(InvalidInput, match="there is no store"):
        await Runtime.compact(tmp_path / "nothing.db")


async def test_a_cancelled_compaction_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    await older(path)
    compacting = asyncio.create_task(Runtime.compact(path))
    await asyncio.sleep(0)
    compacting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await compacting

    async with Runtime(path) as runtime:
        assert texts(await (await runtime.session("chat")).history()) == ["keep this", "kept"]
        assert (await runtime.store.facts(deep=True)).checks == ("ok",)
