"""What the store tests do in processes of their own. Run as `python -m tests.stores.child <what> <arguments>`.

A child says a line for everything that it can vouch for, at once; the test reads them from the pipe.
"""

import asyncio
import fcntl
import itertools
import os
import resource
import signal
import sqlite3
import sys
import threading

from perdure.errors import PerdureError
from perdure.model.process import Registration, Success, WakeTarget
from perdure.model.session import Node, WorkerRow
from perdure.model.write import Accept, Advance, Claim, Commit, ProcessRef, ProcessScope, Register, TurnScope
from perdure.stores.sqlite import SqliteStore
from tests.kit import print_line


async def turn(store: SqliteStore, session_id: str, body: bytes, at: int) -> int:
    """Accept an input and commit its turn; the turn's number."""
    accepted = await store.write(Accept(session_id, "clerk", body, f"{session_id}-{at}", at, worker="w1"))
    scope = TurnScope(session_id, accepted.row.sid, accepted.turn, "w1", accepted.row.generation)
    await store.write(Commit(scope, (Node(1, body),), accepted.row.head, at))
    return accepted.turn


async def turns(path: str, session_id: str, count: str) -> None:
    """So many turns of one session, each said when it is acknowledged."""
    store = SqliteStore(path)
    await store.open()
    for at in range(1, int(count) + 1):
        print_line(await turn(store, session_id, b"%d" % at, at))
    await store.close()


async def openings(path: str, count: str) -> None:
    """Open the file so many times at once, when told to."""
    print_line("ready")
    sys.stdin.readline()
    stores = [SqliteStore(path) for _ in range(int(count))]
    await asyncio.gather(*[store.open() for store in stores])
    print_line((await stores[0].secret()).hex())
    for store in stores:
        await store.close()


def peek(path: str, ready: threading.Event) -> None:
    while True:
        connection = sqlite3.connect(path, timeout=10)
        connection.execute("SELECT count(*) FROM nodes").fetchone()
        connection.close()
        ready.set()


async def peeked(path: str, session_id: str) -> None:
    """Turns without end, while the host looks into the file with connections of its own."""
    store = SqliteStore(path)
    await store.open()
    ready = threading.Event()
    threading.Thread(target=peek, args=(path, ready), daemon=True).start()
    ready.wait(30)
    at = 0
    while True:
        at += 1
        print_line(await turn(store, session_id, b"%d" % at, at))


async def attempt(path: str) -> None:
    """Open the store and write; say how far that went."""
    store = SqliteStore(path)
    try:
        await store.open()
        await turn(store, "mine", b"mine", 1)
    except PerdureError as error:
        print_line(f"{type(error).__name__}: {error}")
    else:
        print_line("wrote")
    await store.close()


async def as_nobody(path: str) -> None:
    """The same without the rights of root."""
    await asyncio.to_thread(os.getpid)  # what threads need may be imported from where only root can read
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    await attempt(path)


async def reaches_as_nobody(folder: str) -> None:
    """Try to open what a store consists of, as another user."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    for name in ("agent.db", "agent.db-wal", "agent.db-lock", "agent.db-workers/w1"):
        try:
            fcntl.flock(os.open(f"{folder}/{name}", os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            print_line(type(error).__name__)
        else:
            print_line(f"locked {name}")


async def in_little_space(path: str, limit: str) -> None:
    """Turns until no file may grow any more."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = SqliteStore(path)
    await store.open()
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    for at in range(1, 10_000):
        try:
            print_line(await turn(store, "mine", b"x" * 500, at))
        except PerdureError as error:
            print_line(f"{type(error).__name__}: {error}")
            break
    os.kill(os.getpid(), signal.SIGKILL)


async def forked(path: str) -> None:
    """A forked child tries everything with the store of its parent."""
    store = SqliteStore(path)
    await store.open()
    lease = store.lease("w1")
    await lease.hold()
    await turn(store, "mine", b"mine", 1)
    child = os.fork()
    if child == 0:
        answers: list[BaseException | None] = []
        store.submit(Accept("mine", "clerk", b"", "op", 1), lambda receipt, error: answers.append(error))
        for attempt in (store.session("mine"), store.write(Accept("mine", "clerk", b"", "op", 1)), store.sweep()):
            try:
                attempt.send(None)
            except PerdureError as error:
                answers.append(error)
        try:
            store.close().send(None)
        except StopIteration:
            answers.append(None)
        await lease.drop()
        for answer in answers:
            print_line(type(answer).__name__)
        os._exit(0)
    os.waitpid(child, 0)
    print_line(await turn(store, "mine", b"after the fork", 2))
    print_line("dead" if await store.proven_dead(WorkerRow("w1", "", "", 0, 0)) else "alive")
    await store.close()


async def dies_with_the_lock(path: str) -> None:
    """Die in a transaction, while a forked child lives on."""
    store = SqliteStore(path)
    await store.open()
    child = os.fork()
    if child == 0:
        signal.pause()
    assert store._file is not None
    fcntl.flock(store._file._lock._descriptor, fcntl.LOCK_EX)
    print_line(child)
    os.kill(os.getpid(), signal.SIGKILL)


async def takes(path: str, worker: str) -> None:
    """Claim every process that nobody has, as a sweep does: from a list that is old by the time it is used."""
    store = SqliteStore(path)
    await store.open()
    rows = await store.active_processes()
    print_line("ready")
    sys.stdin.readline()
    while rows:
        for at in range(0, len(rows), 50):
            claims = [store.write(Claim(ProcessRef(row.id), worker, row.generation, 2)) for row in rows[at : at + 50]]
            for taken in await asyncio.gather(*claims):
                if taken.won and taken.row is not None:
                    print_line(taken.row.id)
        rows = [row for row in await store.active_processes() if row.owner is None]
    await store.close()


async def units(path: str) -> None:
    """Processes without end, ten at a time: each registered, begun and completed, and said when it is."""
    store = SqliteStore(path)
    await store.open()
    numbers = itertools.count()

    async def one_after_the_other() -> None:
        for number in numbers:
            asked = Registration(f"p{number}", "function", "rerunnable", wake=WakeTarget("chat"))
            row = (await store.write(Register(asked, 1, "w1"))).row
            scope = ProcessScope(row.id, row.pid, "w1", 1)
            await store.write(Advance(scope, 2, (Node(0, b"begun"),), first=True, seen=1))
            await store.write(Advance(scope, 3, (Node(1, b"done"),), outcome=Success(number)))
            print_line(row.id)

    await asyncio.gather(*(one_after_the_other() for _ in range(10)))


async def sweeps(path: str, grace: str) -> None:
    """Sweep once for each line that is read, and say how many blobs went."""
    store = SqliteStore(path)
    await store.open()
    for _ in sys.stdin:
        print_line(await store.sweep(float(grace)))
    await store.close()


async def sweeps_without_end(path: str) -> None:
    """Put orphans, make them old and sweep them, over and over; say so after each round."""
    store = SqliteStore(path)
    await store.open()
    print_line("begun")
    for number in itertools.count():
        for piece in range(20):
            digest = await store.blobs.put(b"orphan %d of round %d" % (piece, number))
            os.utime(store.blobs.path(digest), (1, 1))
        await store.sweep()
        print_line(number)


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    asyncio.run(globals()[what](*arguments))
