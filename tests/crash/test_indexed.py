"""The index of words, killed at every statement of making it, writing with it and dropping it: whatever is on disk of
sessions, the index holds exactly that once it is complete."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.model.codec import encode
from perdure.model.message import Message, Text
from perdure.model.record import Said
from perdure.model.search import SearchFilter
from perdure.model.write import Accept
from perdure.stores.sqlite import SqliteStore

LIFE = """
import asyncio, os, pathlib, shutil, signal, sqlite3, sys
from perdure.model.write import Accept, Delete
from perdure.stores.sqlite import SqliteStore
from tests.crash.test_indexed import said

connect, old, seen, number = sqlite3.connect, pathlib.Path(sys.argv[1]), [], 0

def watched(*args, **options):
    connection = connect(*args, **options)
    connection.set_trace_callback(executed)
    return connection

def executed(text):
    if number and not text.lstrip().upper().startswith(("SELECT", "PRAGMA", "--")):
        seen.append(text)
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)

async def live(path):
    store = SqliteStore(path, loop_sync=0)
    await store.open()
    await store.keep_index(True)
    await store.write(Accept("new", "a", said("new parcel"), "op-new", 5))
    while await store.index_more():
        pass
    await store.write(Accept("s1", "a", said("late parcel"), "op-late", 6))
    await store.write(Delete("s2", 7))
    await store.keep_index(False)
    await store.write(Accept("s0", "a", said("last parcel"), "op-last", 8))
    await store.keep_index(True)
    await store.close()

sqlite3.connect = watched  # this process is ours alone
killed = True
while killed:
    number += 1
    folder = old.with_name(f"killed-{number}")
    shutil.copytree(old, folder)
    child = os.fork()
    if child == 0:
        asyncio.run(live(folder / "a.db"))
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
print(number - 1)
"""


def said(text: str) -> bytes:
    return encode(Said(Message("user", (Text(text),))))


@pytest.mark.kill
async def test_an_index_holds_what_its_store_holds_wherever_its_writer_was_killed(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "old" / "a.db")
    await store.open()
    for number in range(4):
        await store.write(Accept(f"s{number}", "a", said(f"old parcel {number}"), f"op-{number}", number))
    await store.close()
    command = [sys.executable, "-c", LIFE, str(tmp_path / "old")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    kills = int(ran.stdout)
    assert kills > 40

    for number in range(1, kills + 1):
        path = tmp_path / f"killed-{number}" / "a.db"
        store = SqliteStore(path)
        await store.open()
        try:
            await store.keep_index(True)
            while await store.index_more():
                pass
            found, whole = await store.search(SearchFilter(("parcel",), limit=99))
            checks = (await store.facts(deep=True)).checks
        finally:
            await store.close()
        with contextlib.closing(sqlite3.connect(path)) as connection:
            records = [place for (place,) in connection.execute("SELECT place FROM nodes ORDER BY place DESC")]

        assert [(row.sid << 36) | (row.turn << 16) | row.ordinal for row in found] == records, number
        assert (whole, checks) == (1.0, ("ok",))
