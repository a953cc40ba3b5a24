"""An older file that is brought forward by a process which dies in it: it is the old file still, or the new one."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.model.write import ProcessFilter
from perdure.stores.sqlite import SqliteStore, schema
from perdure.stores.sqlite.database import put_mark

SECRET = bytes(range(32))
SECRET_CRC = b"\x8a\x7e\x26\x91"  # of that secret, little-endian

UPGRADE = """
import asyncio, os, pathlib, shutil, signal, sqlite3, sys
from perdure.stores.sqlite import SqliteStore

connect, old, seen = sqlite3.connect, pathlib.Path(sys.argv[1]), []

def watched(*args, **options):
    connection = connect(*args, **options)
    connection.set_trace_callback(executed)
    return connection

def executed(text):
    if not text.lstrip().upper().startswith(("SELECT", "PRAGMA JOURNAL", "--")):
        seen.append(text)
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)

async def upgrade(path):
    store = SqliteStore(path)
    await store.open()
    await store.close()

sqlite3.connect = watched  # this process is ours alone
number, killed = 0, True
while killed:
    number += 1
    path = shutil.copy(old, old.with_name(f"killed-{number}.db"))
    child = os.fork()
    if child == 0:
        asyncio.run(upgrade(path))
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
print(number - 1)
"""


def make(path: Path, version: int) -> None:
    """A file as the Perdure of that schema left it."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for number in range(1, version + 1):
            for statement in schema.MIGRATIONS[number]:
                connection.execute(statement)
        connection.execute("INSERT INTO meta VALUES ('secret', ?), ('secret_crc', ?)", (SECRET, SECRET_CRC))
        if version >= 4:
            put_mark(connection, "id", b"0123456789abc")
        connection.execute(f"PRAGMA user_version = {version}")


@pytest.mark.kill
@pytest.mark.parametrize(
    "version",
    [*(pytest.param(old, marks=pytest.mark.gate) for old in range(2, schema.VERSION - 1)), 1, schema.VERSION - 1],
)
async def test_an_upgrade_killed_at_any_statement_leaves_a_file_that_opens(tmp_path: Path, version: int) -> None:
    old = tmp_path / "old.db"
    make(old, version)
    said = subprocess.run(
        [sys.executable, "-c", UPGRADE, str(old)], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    statements = sum(len(schema.MIGRATIONS[n]) for n in range(version + 1, schema.VERSION + 1))
    assert int(said) > statements, "every one of them, and what begins and ends them"

    for number in range(1, int(said) + 1):
        store = SqliteStore(tmp_path / f"killed-{number}.db")
        await store.open()
        try:
            assert await store.secret() == SECRET
            assert (len(store.identity()), store.held()) == (13, None)
            assert await store.processes(ProcessFilter()) == []
            assert (await store.facts(deep=True)).checks == ("ok",)
        finally:
            await store.close()
