"""Listings of sessions: the same from every store, whatever is asked for, and from a file without reading all of it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from perdure.model.session import Settings, dump_settings
from perdure.model.write import Accept, Configure, Delete, SessionFilter
from perdure.ports.store import Store
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite.records import find_sessions, session_row

PERIOD = 8192
"""Milliseconds within which listings are not in order of the index."""


@contextlib.asynccontextmanager
async def opened(store: Store) -> AsyncGenerator[Store]:
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def fill(store: Store) -> None:
    """Sixty sessions over some periods: in no order, some with the same time, some deleted, some with an open turn."""
    for number in range(60):
        settings = dump_settings(Settings(metadata={"team": number % 3}))
        at = (number * 7919) % 17 * PERIOD // 3
        await store.write(Configure(f"s-{number:02}", "rare" if number % 7 == 0 else "a", settings, at))
    for number in (3, 9, 27):
        await store.write(Accept(f"s-{number:02}", "a", b'{"type":"said.1"}', f"op-{number}", 3 * PERIOD + number))
    for number in (5, 14, 40):
        await store.write(Delete(f"s-{number:02}", 90 * PERIOD))


FILTERS: list[dict[str, Any]] = [
    {},
    {"limit": 7},
    {"agent": "rare"},
    {"agent": "nobody"},
    {"state": "idle", "limit": 9},
    {"state": "open"},
    {"state": "stuck"},
    {"prefix": "s-1"},
    {"prefix": "s-1", "agent": "rare"},
    {"since": 2 * PERIOD},
    {"since": 2 * PERIOD + 1, "before": 4 * PERIOD},
    {"before": 1},
    {"after": (3 * PERIOD, 12)},
    {"after": (2**63 - 1, 1), "limit": 3},
    {"metadata": (("team", "1"),)},
    {"metadata": (("team", "1"),), "state": "open"},
    {"metadata": (("team", "1"),), "since": PERIOD, "agent": "a", "limit": 4},
]


@pytest.mark.parametrize("wanted", FILTERS, ids=str)
async def test_every_store_lists_the_same_sessions_in_the_same_order(tmp_path: Path, wanted: dict[str, Any]) -> None:
    asked = SessionFilter(**wanted)
    async with opened(MemoryStore()) as memory, opened(SqliteStore(tmp_path / "a.db")) as file:
        await fill(memory)
        await fill(file)
        expected = [row.id for row in await memory.sessions(asked)]
        found = [row.id for row in await file.sessions(asked)]

    assert found == expected
    assert set(found).isdisjoint({"s-05", "s-14", "s-40"})


async def test_pages_of_a_listing_hold_every_session_once(tmp_path: Path) -> None:
    async with opened(SqliteStore(tmp_path / "a.db")) as store:
        await fill(store)
        whole = [row.id for row in await store.sessions(SessionFilter())]
        paged, after = list[str](), None
        while page := await store.sessions(SessionFilter(limit=7, after=after)):
            paged += [row.id for row in page]
            after = (page[-1].updated, page[-1].sid)

    assert len(whole) == 57
    assert paged == whole


async def test_deep_check_names_a_session_that_is_listed_elsewhere(tmp_path: Path) -> None:
    async with opened(SqliteStore(tmp_path / "a.db")) as store:
        await fill(store)
        with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as connection:
            connection.execute("UPDATE sessions SET listed = 1 WHERE id = 's-03'")
            connection.commit()

        found = await store.facts(deep=True)

    assert found.checks == ("ok", "malformed row of sessions: it is listed where it does not belong (number 4)")


MANY = 5_000


def whom(n: int) -> dict[str, str | int | float | bool]:
    """All of one app, four in five of the newest half of one tenant, the oldest half of another, and ten of a user."""
    return {"app": "shop", "tenant": n % 5 and 1 if n >= MANY // 2 else 2, "user": n % (MANY // 10)}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with many sessions, five a second, of which a few have an agent of their own."""
    path = tmp_path_factory.mktemp("large") / "a.db"

    async def make() -> None:
        async with opened(SqliteStore(path)) as store:
            writes = [
                Configure(
                    f"s-{n}", "a" if n % 250 else "rare", dump_settings(Settings(metadata=whom(n))), n * PERIOD // 40
                )
                for n in range(MANY)
            ]
            for begin in range(0, MANY, 500):
                await asyncio.gather(*[store.write(write) for write in writes[begin : begin + 500]])

    asyncio.run(make())
    return path


@pytest.mark.parametrize(
    ("wanted", "thousands"),
    [
        ({}, 12),
        ({"agent": "a"}, 12),
        ({"state": "idle"}, 12),
        ({"state": "parked"}, 1),
        ({"since": MANY * 190}, 12),
        ({"after": (MANY * 100, 5)}, 12),
        # These read all of the index, and none of the rows that they do not list: some steps for each session.
        ({"agent": "rare"}, 12 * MANY // 1000),
        ({"prefix": "s-499"}, 12 * MANY // 1000),
        ({"metadata": (("user", "7"),)}, 3),
        ({"metadata": (("app", '"shop"'), ("user", "7"), ("tenant", "1"))}, 45),
        # A label that most sessions have is counted up to a point, and then the newest of them fill the page.
        ({"metadata": (("app", '"shop"'),)}, 45),
        ({"metadata": (("app", '"shop"'),), "state": "idle", "limit": 20}, 45),
        ({"metadata": (("app", '"shop"'),), "state": "parked"}, 1),
        ({"metadata": (("app", '"shop"'),), "after": (MANY * 100, 5)}, 45),
    ],
    ids=str,
)
def test_a_page_of_a_large_store_takes_few_steps_of_the_database(
    large: Path, wanted: dict[str, Any], thousands: int
) -> None:
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    with contextlib.closing(sqlite3.connect(large)) as connection:
        connection.set_progress_handler(count, 1000)
        found = find_sessions(connection, SessionFilter(**wanted))

    assert bool(found) == (wanted.get("state") != "parked")
    assert steps < thousands


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"metadata": (("app", '"shop"'),), "limit": 3}, [4999, 4998, 4997]),
        ({"metadata": (("tenant", "1"),), "limit": 5}, [4999, 4998, 4997, 4996, 4994]),
        ({"metadata": (("tenant", "2"),), "limit": 2}, [2499, 2498]),
        ({"metadata": (("tenant", "2"), ("app", '"shop"')), "agent": "rare", "limit": 2}, [2250, 2000]),
        ({"metadata": (("app", '"shop"'), ("user", "7")), "limit": 2}, [4507, 4007]),
        (
            {"metadata": (("app", '"shop"'), ("tenant", "2")), "since": 2400 * PERIOD // 40, "limit": 100},
            range(2499, 2399, -1),
        ),
        ({"metadata": (("app", '"shop"'),), "after": (10 * PERIOD // 40, 11), "limit": 100}, range(9, -1, -1)),
        ({"metadata": (("app", '"shop"'), ("tenant", "0")), "prefix": "s-499"}, [4995, 4990]),
        ({"metadata": (("app", '"shop"'), ("tenant", "9"))}, []),
    ],
    ids=str,
)
def test_sessions_with_common_labels_are_listed_in_order(large: Path, wanted: dict[str, Any], expected: Any) -> None:
    with contextlib.closing(sqlite3.connect(large)) as connection:
        found = [row[1] for row in find_sessions(connection, SessionFilter(**wanted))]

    assert found == [f"s-{n}" for n in expected]


async def test_every_page_by_a_common_label_goes_on_where_the_last_one_ended(large: Path) -> None:
    paged: list[str] = []
    with contextlib.closing(sqlite3.connect(large)) as connection:
        after = None
        while found := find_sessions(
            connection, SessionFilter(metadata=(("app", '"shop"'),), agent="a", limit=170, after=after)
        ):
            rows = [session_row(row) for row in found]
            paged += [row.id for row in rows]
            after = (rows[-1].updated, rows[-1].sid)

    assert paged == [f"s-{n}" for n in range(MANY - 1, -1, -1) if n % 250]
