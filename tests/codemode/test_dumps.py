"""A saved state is loaded only as it was saved, by who saved it, under the same rules."""

from __future__ import annotations

import hmac
import os
import stat
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from perdure.codemode.dumps import DumpHeader, SealedDump, fitting, key_beside, seal, unseal
from perdure.codemode.inside.values import EARLIER
from perdure.codemode.monty import MontyExecutor
from perdure.codemode.worker import POLICY, VERSION
from perdure.errors import DumpRefused, InvalidDefinition, StoreUnavailable
from perdure.model.code import CellEnd, CodeCall, CodeLimits, Given, Paused
from tests.codemode.kit import AT, KEY, TOOLS, executing, run

HEADER = DumpHeader("s.1.4", "monty", "1.4.0", "p", CodeLimits(), names=("x",), base=3)
SEALED = seal(SealedDump(HEADER, b"abc", b"defg"), KEY)


def test_what_was_sealed_comes_back() -> None:
    assert unseal(SEALED, KEY) == SealedDump(HEADER, b"abc", b"defg")
    assert unseal(seal(SealedDump(replace(HEADER, base=-1), None, b""), KEY), KEY).base is None


def test_no_single_bit_of_a_dump_can_change() -> None:
    loaded = []
    for index in range(len(SEALED)):
        for bit in range(8):
            flipped = bytearray(SEALED)
            flipped[index] ^= 1 << bit
            try:
                loaded.append(unseal(bytes(flipped), KEY))
            except DumpRefused:
                continue

    assert loaded == []


def test_no_shorter_or_longer_dump_is_read() -> None:
    for wrong in (*(SEALED[:length] for length in range(len(SEALED))), SEALED + b"\0", SEALED + SEALED):
        with pytest.raises(DumpRefused):
            unseal(wrong, KEY)


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_bytes_of_a_stranger_are_refused(wrong: bytes) -> None:
    for each in (wrong, SEALED[:36] + wrong, SEALED[:4] + wrong):
        if each != SEALED:
            with pytest.raises(DumpRefused):
                unseal(each, KEY)


def test_a_dump_of_another_key_is_refused() -> None:
    with pytest.raises(DumpRefused, match="changed, or saved under another key"):
        unseal(seal(SealedDump(HEADER, b"abc", b""), b"x" * 32), KEY)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": "1.3.0"}, "monty 1.3.0 saved it, and this is monty 1.4.0"),
        ({"executor": "cpython"}, "cpython 1.4.0 saved it"),
        ({"policy": "q"}, "other rules for clock"),
        ({"limits": CodeLimits(seconds=1)}, "other limits"),
    ],
)
def test_a_dump_that_was_made_under_other_rules_is_refused(change: dict[str, object], reason: str) -> None:
    dump = unseal(seal(SealedDump(replace(HEADER, **change), b"abc", b""), KEY), KEY)

    with pytest.raises(DumpRefused, match=reason):
        fitting(dump, executor="monty", version="1.4.0", policy="p", limits=CodeLimits())


def test_a_header_of_another_format_is_refused() -> None:
    header = b'{"later": true}'
    body = len(header).to_bytes(4, "big") + header

    with pytest.raises(DumpRefused, match="header is of another version"):
        unseal(b"MSD1" + hmac.digest(KEY, b"MSD1" + body, "sha256") + body, KEY)


# The executor


@pytest.fixture(scope="module")
async def executor() -> AsyncIterator[MontyExecutor]:
    async with executing() as executor:
        yield executor


async def test_a_dump_says_what_it_contains_and_how_it_was_made(executor: MontyExecutor) -> None:
    repl = await executor.open()
    await run(repl, "x = 1")
    await repl.begin("y = await search('a')", TOOLS, at=AT, seed="s")
    header = unseal(await repl.dump("s.1.4"), KEY).header

    assert (header.contains, header.executor, header.version) == ("s.1.4", "monty", VERSION)
    assert (header.policy, header.limits, header.names) == (POLICY, executor.limits, ("x",))
    assert len(header.catalogue) == 16
    assert header.cell is not None
    assert header.cell.calls == (CodeCall(0, "search", {"query": "a"}, line=1),)


async def test_a_repl_opens_between_cells_with_all_that_it_had(executor: MontyExecutor) -> None:
    repl = await executor.open()
    await run(repl, "import random\nx = [random.random()]\ndef f():\n    return x")
    saved = await repl.dump("here")
    following = await run(repl, "f() + [random.random()]")
    await repl.close()

    again = await executor.open(saved)
    assert (again.contains, again.names, again.paused) == ("here", ("random", "x", "f"), None)
    assert (await run(again, "f() + [random.random()]")).end == following.end
    assert (await run(await executor.open(await (await executor.open()).dump("empty")), "1")).end.value == "1"


async def test_a_cell_that_is_opened_and_dropped_leaves_the_variables_before_it(executor: MontyExecutor) -> None:
    repl = await executor.open()
    await run(repl, "x = 1")
    await repl.begin("x = 2\nawait search('a')", TOOLS, at=AT, seed="s")
    again = await executor.open(await repl.dump("mid"), TOOLS)
    await again.rollback()

    assert (await run(again, "x")).end.value == "1"


async def test_a_cell_that_only_lacks_answers_is_saved_with_its_end(executor: MontyExecutor) -> None:
    repl = await executor.open()
    step = await repl.begin("x = search('a')\nprint('tea')\n3", TOOLS, at=AT, seed="s", check=False)
    assert isinstance(step, Paused)
    again = await executor.open(await repl.dump("mid"), TOOLS)

    assert again.paused == Paused((CodeCall(0, "search", {"query": "a"}, line=1),))
    assert await again.resume(Given(0, 1)) == CellEnd("tea\n", "3")
    assert again.names == ("x",)


async def test_a_call_that_a_saved_cell_kept_raises_in_later_cells(executor: MontyExecutor) -> None:
    repl = await executor.open()
    await repl.begin("early = search('a')\nawait search('b')", TOOLS, at=AT, seed="s", check=False)
    again = await executor.open(await repl.dump("mid"), TOOLS)
    assert await again.resume(Given(0, "a")) == Paused()
    assert await again.resume(Given(1, "b")) == CellEnd(value="'b'")
    again = await executor.open(await again.dump("end"), TOOLS)

    ran = await run(again, "try:\n    await early\nexcept Exception as error:\n    print(error)")
    assert ran.printed == f"{EARLIER}\n"


async def test_calls_that_no_variable_leads_to_are_left_to_the_interpreter(executor: MontyExecutor) -> None:
    """As the documentation says of Monty: it gives the value, or ends the cell where there is none."""
    repl = await executor.open()
    keeping = "class Box:\n    pass\nbox = Box()\nbox.call = search('a')"
    await run(repl, f"{keeping}\nawait search('b')", check=False)
    assert (await run(repl, "await box.call", check=False)).end.value == "'search0'"

    await run(repl, keeping, check=False)
    ran = await run(repl, "kept = 2\nawait box.call", check=False)
    assert ran.end.error is not None
    assert (ran.end.error.code, ran.end.error.rolled_back) == ("unfinished", True)
    assert "an earlier cell made" in ran.end.error.message


async def test_a_cell_that_gives_built_ins_another_meaning_keeps_no_calls_either(executor: MontyExecutor) -> None:
    repl = await executor.open()
    ran = await run(repl, "list = type = tuple = 1\nearly = [search('a')]\nawait search('b')", check=False)
    assert ran.end == CellEnd(value="'search1'")
    ran = await run(repl, "try:\n    await early[0]\nexcept Exception as error:\n    print(error, type)", check=False)
    assert ran.printed == f"{EARLIER} 1\n"

    # One that means harm is left with what it has, and its functions make no calls meanwhile.
    ran = await run(repl, "def harm(*x):\n    return search('c')\n_own = [harm] * 4\nx = search('a')", check=False)
    assert (ran.end.error, len(ran.calls)) == (None, 1)
    assert (await run(repl, "type")).end.value == "1"


async def test_the_notes_of_a_check_wait_in_the_dump_for_the_end(executor: MontyExecutor) -> None:
    repl = await executor.open()
    await repl.begin("x: int = 'tea'\nawait search('a')", TOOLS, at=AT, seed="s")
    end = await (await executor.open(await repl.dump("mid"), TOOLS)).resume(Given(0, 1))

    assert isinstance(end, CellEnd)
    assert len(end.notes) == 1
    assert "not assignable" in end.notes[0]


async def test_a_dump_is_refused_by_an_executor_with_other_limits_or_another_key(executor: MontyExecutor) -> None:
    saved = await (await executor.open()).dump("here")

    async with executing(limits=CodeLimits(seconds=1)) as other:
        with pytest.raises(DumpRefused, match="other limits"):
            await other.open(saved)
    async with executing(key=b"x" * 32) as other:
        with pytest.raises(DumpRefused, match="another key"):
            await other.open(saved)


# The key


def test_a_key_is_made_once_beside_the_store_and_for_its_owner_only(tmp_path: Path) -> None:
    store = tmp_path / "agent.db"
    keys: list[bytes] = []
    threads = [threading.Thread(target=lambda: keys.append(key_beside(store))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    file = tmp_path / "agent.db.code-key"
    assert keys == [file.read_bytes()] * 8
    assert len(keys[0]) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_key_that_is_none_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "agent.db.code-key"
    file.write_bytes(b"short")
    file.chmod(0o600)
    with pytest.raises(StoreUnavailable, match="delete it, and a new one is made"):
        key_beside(tmp_path / "agent.db")

    file.write_bytes(b"x" * 32)
    file.chmod(0o644)
    with pytest.raises(StoreUnavailable, match="chmod 600 it"):
        key_beside(tmp_path / "agent.db")

    file.unlink()
    os.mkfifo(file, 0o600)  # would be waited for
    with pytest.raises(StoreUnavailable, match="delete it, and a new one is made"):
        key_beside(tmp_path / "agent.db")

    file.unlink()
    os.symlink(tmp_path / "elsewhere", file)
    with pytest.raises(StoreUnavailable):
        key_beside(tmp_path / "agent.db")
    with pytest.raises(StoreUnavailable, match="cannot be kept"):
        key_beside(tmp_path / "no" / "folder" / "agent.db")


@pytest.mark.parametrize("key", [b"", b"x" * 31, "x" * 32, None])
def test_an_executor_is_not_made_with_a_key_that_can_be_guessed(key: Any) -> None:
    with pytest.raises(InvalidDefinition, match=r"give 32 bytes that nobody else knows"):
        MontyExecutor(key=key)
