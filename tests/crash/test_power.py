"""Power cuts. What was acknowledged had been synced; of what came after it, any part may have reached the disk.

The WAL is cut at places between two acknowledgements, and its tail is lost, blank, or noise. The note in the lock file
is never synced, so it may be any of the earlier ones.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from msgspec import Struct

from perdure.stores.sqlite import SqliteStore
from tests.stores.child import turn

TURNS = 6
SAID = b"what was said in this turn, at some length, so that it takes a page or two " * 12
TAILS = ("lost", "blank", "noise")


class Acknowledged(Struct):
    """The files at the moment of an acknowledgement."""

    synced: int
    note: bytes


async def write(path: Path) -> tuple[bytes, bytes, list[Acknowledged]]:
    """The database, its WAL, and what they and the lock file were after each acknowledged turn."""
    store, wal = SqliteStore(path), Path(f"{path}-wal")
    await store.open()
    seen = [Acknowledged(wal.stat().st_size, Path(f"{path}-lock").read_bytes())]
    for number in range(1, TURNS + 1):
        await turn(store, "s", b"%d %s" % (number, SAID), number)
        seen.append(Acknowledged(wal.stat().st_size, Path(f"{path}-lock").read_bytes()))
    found = path.read_bytes(), wal.read_bytes(), seen
    await store.close()
    return found


def tail(how: str, lost: bytes, dice: random.Random) -> bytes:
    return {"lost": b"", "blank": bytes(len(lost)), "noise": dice.randbytes(len(lost))}[how]


@pytest.mark.parametrize("how", TAILS)
async def test_every_acknowledged_turn_survives_a_power_cut(tmp_path: Path, how: str) -> None:
    database, wal, seen = await write(tmp_path / "agent.db")
    dice = random.Random(how)
    for number in range(TURNS):
        first, last = seen[number].synced, seen[number + 1].synced
        assert last > first
        for cut in {first, *dice.sample(range(first, last), 6)}:
            path = tmp_path / f"{number}-{cut}" / "agent.db"
            path.parent.mkdir()
            path.write_bytes(database)
            Path(f"{path}-wal").write_bytes(wal[:cut] + tail(how, wal[cut:last], dice))
            Path(f"{path}-lock").write_bytes(dice.choice(seen[: number + 1]).note)
            store = SqliteStore(path)
            await store.open()
            try:
                row = await store.session("s")
                head = 0 if row is None else row.head
                assert number <= head <= number + 1
                found = [] if row is None else await store.nodes(row.sid, 1, number)
                assert found == [(n, o, b"%d %s" % (n, SAID)) for n in range(1, number + 1) for o in (0, 1)]
                assert await turn(store, "another", b"it goes on", 99) == 1
            finally:
                await store.close()
