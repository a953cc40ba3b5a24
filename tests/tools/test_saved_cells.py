"""A cell that is left in its middle goes on from its saved state, or from its first line: with the same end, and with
nothing done again that was recorded."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from perdure import Runtime, tool
from perdure.codemode.dumps import SealedDump, key_beside, seal, unseal
from perdure.codemode.inside.values import EARLIER
from perdure.codemode.monty import MontyExecutor
from perdure.engine.host import SystemClock
from perdure.model.codec import decode_row
from perdure.model.tool import ToolSpec
from perdure.model.write import Append, Commit
from perdure.ports.code import Executor
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.tools.variables import REBUILD_SECONDS
from tests.kit import Place
from tests.tools.coding import cell, coder, outputs
from tests.tools.saving import CALLS, TOLD, Sandbox, Seen, leave

Change = Callable[[bytes, bytes, bytes], bytes | None]
"""What becomes of a dump, given that of the call after it, and the key; None takes it away."""


def of_another(key: bytes, sealed: bytes, **changes: object) -> bytes:
    dump = unseal(sealed, key)
    return seal(SealedDump(replace(dump.header, **changes), dump.base, dump.cell), key)


CHANGES: dict[str, Change] = {
    "present": lambda sealed, later, key: sealed,
    "missing": lambda sealed, later, key: None,
    "truncated": lambda sealed, later, key: sealed[:-1],
    "flipped": lambda sealed, later, key: sealed[:-9] + bytes([sealed[-9] ^ 1]) + sealed[-8:],
    "another version": lambda sealed, later, key: of_another(key, sealed, version="1.3.0"),
    "other rules": lambda sealed, later, key: of_another(key, sealed, policy="0"),
    "ahead": lambda sealed, later, key: later,
    "words of a stranger": lambda sealed, later, key: of_another(key, sealed, contains="what?"),
}
# Of calls at once there is one state; and after the last call there is none that is ahead.
CASES = [(name, call) for name in CHANGES for call in range(CALLS) if (name, call) not in (("ahead", 4), ("ahead", 6))]


def read_dump(folder: Path) -> bytes:
    with closing(sqlite3.connect(folder / "agent.db")) as store:
        ((body,),) = store.execute("SELECT body FROM dumps").fetchall()
        return bytes(body)


def write_dump(folder: Path, body: bytes | None) -> None:
    with closing(sqlite3.connect(folder / "agent.db", isolation_level=None)) as store:
        if body is None:
            store.execute("DELETE FROM dumps")
        else:
            store.execute("UPDATE dumps SET body = ?", (body,))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """How each turn ended that was left in each call, with each change to its dump: all in one fresh OS process."""
    root = tmp_path_factory.mktemp("left")
    key = key_beside(root / "agent.db")
    folders: list[str] = []
    left = [root / f"in call {call}" for call in range(CALLS)]

    async def leave_all() -> None:
        for call, folder in enumerate(left):
            folder.mkdir()
            shutil.copy(root / "agent.db.code-key", folder / "agent.db.code-key")
            await leave(folder, call)

    asyncio.run(leave_all())
    dumps = [read_dump(folder) for folder in left]
    for name, call in CASES:
        copy = root / f"{name} {call}"
        shutil.copytree(left[call], copy, ignore=shutil.ignore_patterns("*.sock"))
        write_dump(copy, CHANGES[name](dumps[call], dumps[min(call + 1, CALLS - 1)], key))
        folders.append(str(copy))
    said = subprocess.run(
        [sys.executable, "-m", "tests.tools.saving", *folders], stdout=subprocess.PIPE, check=True, timeout=300
    ).stdout
    return {os.path.basename(name): seen for name, seen in msgspec.json.decode(said, type=dict[str, Seen]).items()}


@pytest.mark.slow
@pytest.mark.parametrize(("change", "call"), CASES)
def test_cell_left_in_a_call_ends_the_same_in_another_process(resumed: dict[str, Seen], change: str, call: int) -> None:
    seen = resumed[f"{change} {call}"]

    assert seen.told == TOLD
    assert seen.begun == (0 if change == "present" else 2), "cells are run again only where there is no dump to use"
    # Each call once, and that which was under way a second time.
    assert sorted(seen.ledger) == sorted([100, *range(CALLS), call])

    assert seen.attempts == [1 if n != call + 1 else 2 for n in range(CALLS + 1)]


# ---------------------------------------------------------------------- between cells

KEY = b"0123456789abcdef0123456789abcdef"


@tool
async def double(n: int) -> int:
    """Twice as much."""
    return 2 * n


async def test_variables_of_a_session_are_loaded_and_its_cells_are_not_run_again(place: Place) -> None:
    async with place.runtime(coder(cell("a = 1"), "one", cell("b = a + 1"), "two", plugins=[Sandbox(KEY)])) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        await session.run("two")
    sandbox = Sandbox(KEY)
    async with place.runtime(coder(cell("print(a, b)"), "three", plugins=[sandbox])) as runtime:
        result = await (await runtime.session("s")).run("three")

    assert outputs(result.new_messages) == ["Output of the cell:\n1 2"]
    assert len(sandbox.begun) == 1


@pytest.mark.parametrize("same_key", [True, False])
async def test_call_of_an_earlier_cell_raises_live_and_from_saved_variables_and_when_cells_are_run_again(
    place: Place, same_key: bool
) -> None:
    late = cell("try:\n    await early\nexcept Exception as error:\n    print(error)")
    early = cell("early = double(1)\nprint(await double(2))\nif False:\n    await early")
    first = coder(early, late, "live", tools=[double], plugins=[Sandbox(KEY)])
    async with place.runtime(first) as runtime:
        live = await (await runtime.session("s")).run("one")
    sandbox = Sandbox(KEY if same_key else b"another".ljust(32))
    async with place.runtime(coder(late, "later", tools=[double], plugins=[sandbox])) as runtime:
        later = await (await runtime.session("s")).run("two")

    assert outputs(live.messages) == ["Output of the cell:\n4", f"Output of the cell:\n{EARLIER}"]
    assert outputs(later.new_messages) == [f"Output of the cell:\n{EARLIER}"]
    assert len(sandbox.begun) == (1 if same_key else 3)


class Opened(Sandbox):
    """Notes for each REPL that is opened whether it was had from a dump."""

    def __init__(self) -> None:
        super().__init__(KEY)
        self.dumps: list[bool] = []

    def code_executor(self) -> Executor:
        opened = self.dumps

        class Noting(MontyExecutor):
            async def open(self, state: bytes | None = None, tools: Sequence[ToolSpec] = ()) -> Any:
                opened.append(state is not None)
                return await super().open(state, tools)

        return Noting(key=KEY)


async def test_variables_of_idle_sessions_take_a_bounded_room_in_memory_and_are_loaded_again(place: Place) -> None:
    sandbox, large = Opened(), cell("x = 'x' * 3_000_000")
    small = cell("print(len(x))")
    agent = coder(large, "a", large, "b", small, "a again", small, "a once more", plugins=[sandbox])
    async with place.runtime(agent) as runtime:
        told = [outputs((await (await runtime.session(each)).run("go")).new_messages)[-1] for each in "abaa"]

    assert told[2:] == ["Output of the cell:\n3000000"] * 2
    # `a` made room for `b`, and `b` for `a`, whose variables then stay.
    assert sandbox.dumps == [False, False, True]


async def test_fork_has_the_saved_variables_of_where_it_was_forked(place: Place) -> None:
    cells = [cell("a = 1"), "one", cell("a = 2"), "two", cell("a = 3"), "three"]
    async with place.runtime(coder(*cells, plugins=[Sandbox(KEY)])) as runtime:
        session = await runtime.session("s")
        for text in ("one", "two", "three"):
            await session.run(text)
    sandbox = Sandbox(KEY)
    async with place.runtime(coder(cell("print(a)"), "fork", cell("print(a)"), "again", plugins=[sandbox])) as runtime:
        branch = await (await runtime.session("s")).fork(at="s.2")
        told = [outputs((await branch.run(text)).new_messages) for text in ("one", "two")]

    assert told == [["Output of the cell:\n2"]] * 2
    assert len(sandbox.begun) == 2


async def test_fork_of_a_deleted_session_runs_its_cells_again(place: Place) -> None:
    async with place.runtime(coder(cell("a = 1"), "one", plugins=[Sandbox(KEY)])) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        await session.fork(at="s.1", session_id="branch")
        await runtime.sessions.delete("s")
    sandbox = Sandbox(KEY)
    async with place.runtime(coder(cell("print(a)"), "two", plugins=[sandbox])) as runtime:
        result = await (await runtime.session("branch")).run("two")

    assert outputs(result.new_messages) == ["Output of the cell:\n1"]
    assert len(sandbox.begun) == 2


async def test_cell_that_was_rolled_back_leaves_the_variables_before_it_in_its_dump(place: Place) -> None:
    """The dump of that turn was made in the middle of the cell."""
    cells = [cell("a = 1"), cell("a = 2\nawait double(1)\n'x' * (300 * 1024 * 1024)"), "sorry"]
    async with place.runtime(coder(*cells, tools=[double], plugins=[Sandbox(KEY)])) as runtime:
        await (await runtime.session("s")).run("go")
    sandbox = Sandbox(KEY)
    async with place.runtime(coder(cell("print(a)"), "two", tools=[double], plugins=[sandbox])) as runtime:
        result = await (await runtime.session("s")).run("two")

    assert outputs(result.new_messages) == ["Output of the cell:\n1"]
    assert len(sandbox.begun) == 1


# ---------------------------------------------------------------------- what is saved when


class Noting(MemoryStore):
    """Notes the dumps of writes: their size where they are in the row, "blob" where they are one."""

    def __init__(self, rows: MemoryRows) -> None:
        super().__init__(rows)
        self.saved: list[int | str] = []

    async def write(self, write: Any) -> Any:
        if isinstance(write, Append | Commit) and write.dump is not None:
            self.saved.append(len(write.dump.body) if write.dump.digest is None else "blob")
        return await super().write(write)


async def test_small_state_is_saved_in_every_write_of_the_cell() -> None:
    store = Noting(MemoryRows())
    agent = coder(cell("for n in range(4):\n    await double(n)"), "done", tools=[double])
    async with Runtime(store, agents=[agent], clock=Unhurried()) as runtime:
        await (await runtime.session("s")).run("go")

    assert len(store.saved) == 5, "with each call, and with the end of the cell"
    assert all(isinstance(size, int) and size < 64 * 1024 for size in store.saved)


async def test_large_state_is_saved_where_the_turn_parks_and_where_the_cell_ends() -> None:
    @tool(approval="ask")
    async def sign(n: int) -> int:
        """Sign."""
        return n

    store = Noting(MemoryRows())
    code = "big = 'x' * 200_000\nfor n in range(4):\n    await double(n)\nawait sign(1)\nawait double(5)"
    agent = coder(cell(code), "done", tools=[double, sign])
    async with Runtime(store, agents=[agent], clock=Unhurried()) as runtime:
        session = await runtime.session("s")
        waits = await session.run("go")
        at_park = list(store.saved)
        await session.approve(waits.pending[0].call_id)
        await session.result("s.1")

    assert at_park == ["blob", "blob"], "with the first call, by which its size is known, and with the parking"
    assert store.saved[2:] == ["blob", "blob"], "with the first call after that, and with the end"


class Unhurried(SystemClock):
    """Never writes an answer before it is known what the cell asks for next, and counts no time of a cell."""

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        if seconds < 1:
            await asyncio.Event().wait()
        await super().sleep(seconds)


class Grouping(MemoryStore):
    """Notes which records stand in one write."""

    def __init__(self, rows: MemoryRows) -> None:
        super().__init__(rows)
        self.groups: list[list[tuple[str, str]]] = []

    async def write(self, write: Any) -> Any:
        if isinstance(write, Append):
            records = [decode_row(node.body) for node in write.nodes]
            self.groups.append([(type(each).__name__, getattr(each, "call", "")) for each in records])
        return await super().write(write)


async def calls_twice(between: str, clock: SystemClock) -> list[list[tuple[str, str]]]:
    store = Grouping(MemoryRows())
    agent = coder(cell(f"await double(1)\n{between}\nawait double(2)"), "done", tools=[double])
    async with Runtime(store, agents=[agent], clock=clock) as runtime:
        await (await runtime.session("s")).run("go")
    return store.groups


async def test_answer_of_a_call_shares_a_write_with_what_the_cell_calls_next() -> None:
    assert await calls_twice("n = 1", Unhurried()) == [
        [("Replied", ""), ("Called", "")],
        [("Ended", "1.0"), ("Called", "")],
        [("Ended", "1.1"), ("Ended", "1")],
    ]


async def test_answer_of_a_call_is_written_while_the_cell_computes() -> None:
    groups = await calls_twice("for n in range(2_000_000):\n    pass", SystemClock())

    assert [("Ended", "1.0")] in groups


class Counting(Unhurried):
    """Half a second passes with every look."""

    looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return self.looks / 2


async def test_large_state_is_saved_after_each_second_of_its_running() -> None:
    store = Noting(MemoryRows())
    agent = coder(cell("big = 'x' * 200_000\nfor n in range(5):\n    await double(n)"), "done", tools=[double])
    async with Runtime(store, agents=[agent], clock=Counting()) as runtime:
        await (await runtime.session("s")).run("go")

    assert store.saved == ["blob"] * 4, "with the calls 0, 2 and 4, and with the end of the cell"


class Exhausted(SystemClock):
    """The time in which cells may be run again is always over."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(0 if seconds == REBUILD_SECONDS else seconds)


async def test_model_is_told_the_names_of_variables_that_take_too_long_to_make_again(place: Place) -> None:
    async with place.runtime(coder(cell("a = 1"), cell("b, c = 2, 3"), "one", plugins=[Sandbox(KEY)])) as runtime:
        await (await runtime.session("s")).run("go")
    other = Sandbox(b"another key of thirty-two bytes!")
    agent = coder(cell("d = 4"), "two", cell("print(d)"), "three", plugins=[other])
    async with place.runtime(agent, clock=Exhausted()) as runtime:
        session = await runtime.session("s")
        results = [await session.run(text) for text in ("two", "three")]

    lost, after = [outputs(each.new_messages) for each in results]
    assert lost == [
        "Output of the cell:\n[Variables of earlier cells are lost: running the cells again took more than 10 s. "
        "They were: a, b, c.]"
    ]
    assert after == ["Output of the cell:\n4"]


# ---------------------------------------------------------------------- the key


async def test_key_is_beside_the_store_and_a_store_without_it_runs_its_cells_again(tmp_path: Path) -> None:
    async with Runtime(tmp_path / "agent.db", agents=[coder(cell("a = 1"), "one", tools=[double])]) as runtime:
        await (await runtime.session("s")).run("go")
    key = tmp_path / "agent.db.code-key"
    mode, before = key.stat().st_mode & 0o777, key.read_bytes()
    key.unlink()
    async with Runtime(tmp_path / "agent.db", agents=[coder(cell("print(a)"), "two", tools=[double])]) as runtime:
        result = await (await runtime.session("s")).run("and again")

    assert mode == 0o600
    assert before not in (tmp_path / "agent.db").read_bytes()
    assert key.read_bytes() != before
    assert outputs(result.new_messages) == ["Output of the cell:\n1"]


async def test_key_that_others_can_read_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key_beside(tmp_path / "agent.db")
    (tmp_path / "agent.db.code-key").chmod(0o644)
    async with Runtime(tmp_path / "agent.db", agents=[coder(cell("print(1)"), "one", tools=[double])]) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert outputs(result.new_messages) == ["Output of the cell:\n1"]
    assert "chmod 600 it" in caplog.text
