"""What a store remembers of sessions that are worked on never outlives what another wrote, or what was undone."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.errors import Fenced
from perdure.model.limit import Ask, Bound, Settle, Spending
from perdure.model.session import CancelRequest, Node
from perdure.model.write import Accept, Append, Cancel, Claim, Commit, Committed, SessionRef, TurnScope
from perdure.stores.blobs import FileBlobs
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite.database import WriterFile


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[tuple[SqliteStore, SqliteStore]]:
    """Two stores on one file, as two processes would have them."""
    ours, theirs = SqliteStore(tmp_path / "agent.db"), SqliteStore(tmp_path / "agent.db")
    await ours.open()
    await theirs.open()
    yield ours, theirs
    await ours.close()
    await theirs.close()


def said(op: str) -> Accept:
    return Accept("chat", "clerk", b"said", op, 1, worker="ours")


BOUND = Bound("tokens/all/ever", "tokens", "all", 0, 10_000, 8_000)


def limited(op: str) -> Accept:
    """One that reserves 1,000 tokens."""
    spending = Spending("", op, (BOUND,), Ask(400, 600))
    return Accept("chat", "clerk", op.encode(), op, 1, worker="ours", spending=spending)


def settled(scope: TurnScope, head: int) -> Commit:
    return Commit(scope, (Node(1, b"closed"),), head, 4, spending=(Spending("", "end", settle=Settle(tokens=70)),))


def append(scope: TurnScope, ordinal: int) -> Append:
    return Append(scope, (Node(ordinal, b"record"),), 2)


async def begun(store: SqliteStore) -> TurnScope:
    """A turn of ours with a first record: by now its row is remembered."""
    accepted = await store.write(said("1"))
    scope = TurnScope("chat", accepted.row.sid, 1, "ours", accepted.row.generation)
    await store.write(append(scope, 1))
    return scope


async def test_an_owner_relieved_by_another_process_is_fenced(stores: tuple[SqliteStore, SqliteStore]) -> None:
    ours, theirs = stores
    scope = await begun(ours)
    await theirs.write(Claim(SessionRef("chat"), "theirs", scope.generation, 3))
    with pytest.raises(Fenced):
        await ours.write(append(scope, 2))


async def test_a_cancel_request_from_another_process_comes_back_with_the_next_write(
    stores: tuple[SqliteStore, SqliteStore],
) -> None:
    ours, theirs = stores
    scope = await begun(ours)
    await theirs.write(Cancel(SessionRef("chat"), CancelRequest("somebody", "enough"), 3))
    assert (await ours.write(append(scope, 2))).cancel is not None


async def test_an_input_queued_by_another_process_opens_the_next_turn(stores: tuple[SqliteStore, SqliteStore]) -> None:
    ours, theirs = stores
    scope = await begun(ours)
    await theirs.write(said("2"))
    committed = await ours.write(Commit(scope, (Node(2, b"closed"),), 0, 4))
    assert isinstance(committed, Committed)
    assert committed.row.turn == 2


async def test_an_input_steered_by_this_process_is_told_of(stores: tuple[SqliteStore, SqliteStore]) -> None:
    ours, _ = stores
    scope = await begun(ours)
    await ours.write(Accept("chat", "clerk", b"also", "2", 3, "steer"))
    assert (await ours.write(append(scope, 2))).inputs


def test_what_was_rolled_back_is_not_remembered(tmp_path: Path) -> None:
    file = WriterFile(tmp_path / "agent.db", FileBlobs(tmp_path / "blobs"))
    file.begin()
    accepted = file.apply(said("1"))
    file.apply(said("2"))
    file.commit()
    scope = TurnScope("chat", accepted.row.sid, 1, "ours", accepted.row.generation)
    closing = Commit(scope, (Node(1, b"closed"),), 0, 4)
    file.begin()
    assert file.apply(closing).row.turn == 2
    file.rollback()
    file.begin()
    assert file.apply(append(scope, 1)).cancel is None, "the first turn is open again, and ours"
    file.commit()
    file.close()


async def test_reservation_that_another_process_has_settled_is_not_settled_again(
    stores: tuple[SqliteStore, SqliteStore],
) -> None:
    ours, theirs = stores
    begun = await ours.write(limited("1"))
    claimed = await theirs.write(Claim(SessionRef("chat"), "theirs", begun.row.generation, 3))
    assert claimed.row is not None
    over = await theirs.write(settled(TurnScope("chat", begun.row.sid, 1, "theirs", claimed.row.generation), 0))
    assert isinstance(over, Committed)
    again = await ours.write(limited("2"))
    await ours.write(settled(TurnScope("chat", again.row.sid, 2, "ours", again.row.generation), 1))

    (account,) = await theirs.accounts()
    assert (account.spent, account.unknown, account.reserved) == (1_000 + 70, 1, 0)


def test_reservation_whose_settling_was_rolled_back_is_settled_by_the_next_write(tmp_path: Path) -> None:
    file = WriterFile(tmp_path / "agent.db", FileBlobs(tmp_path / "blobs"))
    file.begin()
    accepted = file.apply(limited("1"))
    file.commit()
    closing = settled(TurnScope("chat", accepted.row.sid, 1, "ours", accepted.row.generation), 0)
    for ending in (file.rollback, file.commit):
        file.begin()
        file.apply(closing)
        ending()
    file.close()

    with contextlib.closing(sqlite3.connect(tmp_path / "agent.db")) as connection:
        assert connection.execute("SELECT spent, unknown, reserved FROM accounts").fetchall() == [(70, 0, 0)]
        assert connection.execute("SELECT count(*) FROM reservations").fetchone() == (0,)
