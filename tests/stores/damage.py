"""Healthy files, and what may happen to them: the material of the damage tests."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from perdure.model.process import Registration, Success, WaitOn, WakeTarget
from perdure.model.session import Node, WaitRow, WorkerRow
from perdure.model.write import (
    Accept,
    Advance,
    Append,
    Beat,
    Commit,
    ProcessFilter,
    ProcessScope,
    Register,
    SendSignal,
    SessionFilter,
    TurnScope,
)
from perdure.ports.store import Store
from perdure.stores.sqlite import SqliteStore

SESSIONS = 12
TURNS = 6


async def fill(store: Store, first: int, last: int) -> None:
    """Sessions with committed turns; every third one ends in the middle of a turn, with inputs that wait."""
    await store.write(Beat(WorkerRow("w1", "here", "boot", 1, 0)))
    for number in range(first, last):
        session_id = f"session-{number}"
        for turn in range(1, TURNS + 1):
            said = b"said %d.%d " % (number, turn) * 8
            key = f"key-{number}-{turn}"
            accepted = await store.write(
                Accept(session_id, "clerk", said, key, turn, key=key, digest=said, worker="w1")
            )
            scope = TurnScope(session_id, accepted.row.sid, turn, "w1", accepted.row.generation)
            await store.write(Append(scope, (Node(1, b"reply %d " % turn * (40 * turn)),), turn))
            if turn < TURNS or number % 3:
                await store.write(Commit(scope, (Node(2, b"closed"),), turn - 1, turn))
            else:
                wait = WaitRow(f"wait-{number}", scope.sid, turn, "1.0", "approval", due=99, body=b'{"asked":1}')
                await store.write(Append(scope, (Node(2, b"asks"),), turn, waits=(wait,)))
                await store.write(Accept(session_id, "clerk", b"later", f"{key}-later", turn))
        await fill_process(store, number)


async def fill_process(store: Store, number: int) -> None:
    """A process with a signal, and then, by its number: one that ended, that is parked, or that is worked on."""
    asked = Registration(
        f"process-{number}", "function", "rerunnable", input="x" * 40 * number, wake=WakeTarget(f"session-{number}"),
        open_signals=True,
    )  # fmt: skip
    row = (await store.write(Register(asked, 1, "w1", (f"session-{number}",)))).row
    scope = ProcessScope(row.id, row.pid, "w1", 1)
    records = tuple(Node(n, b"record %d " % n * 9) for n in range(8))
    await store.write(Advance(scope, 2, records, first=True, seen=1))
    await store.write(SendSignal(row.id, "go", "y" * 30 * number, "k", 3))
    if number % 3 == 0:
        await store.write(Advance(scope, 4, outcome=Success(number)))
    elif number % 3 == 1:
        await store.write(Advance(scope, 4, park=(WaitOn("1", "time", due=9), WaitOn("2", "process", row.id)), seen=3))


async def served(store: Store) -> list[object]:
    """Everything that was acknowledged, as a reader gets it."""
    found: list[object] = [await store.sessions(SessionFilter(limit=1000)), await store.open_sessions()]
    found += [await store.workers(), await store.waits(), await store.secret()]
    for number in range(SESSIONS):
        row = await store.session(f"session-{number}")
        if row is None:
            found.append(None)
            continue
        found += [row, await store.session_by_sid(row.sid), await store.nodes(row.sid, 1, row.next)]
        found += [await store.inbox(row.sid), await store.waits(row.sid)]
    return [*found, *await served_processes(store)]


async def served_processes(store: Store) -> list[object]:
    found: list[object] = [await store.active_processes(), await store.due_processes(10), await store.wakes()]
    found += [await store.processes(ProcessFilter(live=True)), await store.changes(), await store.last_change()]
    for number in range(SESSIONS):
        row = await store.process(f"process-{number}")
        if row is not None:
            found += [row, await store.events(row.pid), await store.steps(row.pid)]
        found.append(await store.is_granted(f"session-{number}", f"process-{number}"))
    return found


def image(path: Path, folder: Path) -> Path:
    """A copy of the store as a crash leaves it: the files as they are, without the shared memory."""
    folder.mkdir()
    for suffix in ("-lock", "", "-wal"):
        if Path(f"{path}{suffix}").exists():
            shutil.copy(f"{path}{suffix}", folder / f"{path.name}{suffix}")
    return folder / path.name


async def healthy(folder: Path, folded: bool) -> tuple[Path, list[object]]:
    """A store that is folded back into its file, or half of which is still in its WAL; and what it serves."""
    store = SqliteStore(folder / "agent.db")
    await store.open()
    await fill(store, 0, SESSIONS // 2)
    assert store._file is not None
    store._file.checkpoint("TRUNCATE")
    await fill(store, SESSIONS // 2, SESSIONS)
    if folded:
        store._file.checkpoint("TRUNCATE")
    truth = await served(store)
    path = image(store.path, folder / "healthy")
    await store.close()
    return path, truth


def flip_a_bit(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def flip_many_bits(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randrange(2, 40)):
        flip_a_bit(data, chance)


def cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def cut_at_a_page(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) // 1024 * 1024 :]


def zero_a_sector(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data)) // 512 * 512
    data[start : start + 512] = bytes(len(data[start : start + 512]))


def garble_a_page(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data)) // 1024 * 1024
    data[start : start + 1024] = chance.randbytes(len(data[start : start + 1024]))


def repeat_a_page(data: bytearray, chance: random.Random) -> None:
    """An old or foreign page where another one belongs, as after a misdirected write."""
    source, target = (chance.randrange(len(data) // 1024) * 1024 for _ in range(2))
    data[target : target + 1024] = data[source : source + 1024]


DAMAGES: dict[str, Callable[[bytearray, random.Random], None]] = {
    "a flipped bit": flip_a_bit,
    "flipped bits": flip_many_bits,
    "cut": cut,
    "cut at a page": cut_at_a_page,
    "a sector of zeros": zero_a_sector,
    "a page of garbage": garble_a_page,
    "a page twice": repeat_a_page,
}


def damage(path: Path, how: str, seed: int) -> str:
    """Do one thing to the database or to its WAL; returns what was done."""
    chance = random.Random(seed)
    wal = Path(f"{path}-wal")
    file = chance.choice([path, wal]) if wal.exists() and wal.stat().st_size else path
    data = bytearray(file.read_bytes())
    before = bytes(data)
    DAMAGES[how](data, chance)
    file.write_bytes(data)
    changed = [i for i, (a, b) in enumerate(zip(before, data, strict=False)) if a != b]
    return f"{how} in {file.name}, seed {seed} ({len(before)} bytes, from {changed[0] if changed else len(data)})"
