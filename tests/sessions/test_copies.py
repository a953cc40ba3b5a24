"""Backups and other copies of a store: they read and accept, and go on only when they are restored."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from perdure import Agent, ProcessContext, Runtime, ToolCall, ToolContext, process, tool
from perdure.errors import InvalidInput, StoreDamaged, StoreInUse
from perdure.model.outcome import Queued
from perdure.model.tool import OutcomeUnknown
from perdure.model.write import Accept, Claim, ProcessFilter, ProcessRef, Resolve, SessionFilter, SessionRef
from perdure.stores import rules
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.testing import ScriptedModel
from tests.kit import SOON, Place, crash, texts, until

BIG = "x" * 200_000


class Payments:
    """A tool that notes its keys, and hangs while `hangs` is set."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.hangs = False
        self.running = asyncio.Event()

    def agent(self, *answers: Any, recovery: Any = "once") -> Agent[str]:
        @tool(recovery=recovery)
        async def pay(ctx: ToolContext[Any]) -> str:
            self.keys.append(ctx.idempotency_key)
            self.running.set()
            if self.hangs:
                await asyncio.Event().wait()
            return "paid"

        return Agent(ScriptedModel(answers), tools=[pay])


PAY = [ToolCall("a", "pay")]


async def copied(file: Place, to: Path) -> None:
    async with file.runtime(Agent(ScriptedModel(["one", BIG]))) as runtime:
        session = await runtime.session("chat")
        await session.run("first")
        await session.run("second")
        await runtime.backup(to)


async def test_a_backup_holds_everything_and_its_blobs_and_the_original_goes_on(file: Place, tmp_path: Path) -> None:
    copy, told = tmp_path / "deep" / "copy.db", list[tuple[int, int]]()
    async with file.runtime(Agent(ScriptedModel([BIG, "three"]))) as runtime:
        session = await runtime.session("chat")
        await session.run(BIG)
        await runtime.backup(copy, progress=lambda *figures: told.append(figures))
        await session.run("afterwards")
        original = runtime.store.identity()
    async with Runtime(copy) as runtime:
        history = texts(await (await runtime.session("chat")).history())
        held = runtime.store.held()
        facts = await runtime.store.facts(deep=True)

    assert history == [BIG, BIG]
    assert facts.checks == ("ok",)
    assert "perdure restore" in (held or "")
    assert facts.held == held
    assert told[-1][0] == told[-1][1] > 2 * len(BIG)
    assert oct(copy.stat().st_mode & 0o777) == "0o600"
    assert sorted(p.name for p in copy.parent.iterdir() if "partial" in p.name) == []
    async with Runtime(file.path) as runtime:
        assert (runtime.store.identity(), runtime.store.held()) == (original, None)


async def test_nothing_is_overwritten(file: Place, tmp_path: Path) -> None:
    async with file.runtime(Agent("scripted")) as runtime:
        await (await runtime.session("chat")).run("go")
        for taken in ("copy.db", "other.db-wal", "third.db-lock"):
            (tmp_path / taken).write_bytes(b"mine")
        for wanted in ("copy.db", "other.db", "third.db"):
            with pytest.raises(InvalidInput, match="exists already"):
                await runtime.backup(tmp_path / wanted)
        with pytest.raises(InvalidInput, match="exists already"):
            await runtime.backup(file.path)

    assert (tmp_path / "copy.db").read_bytes() == b"mine"
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


async def test_a_store_in_memory_cannot_be_copied(tmp_path: Path) -> None:
    async with Runtime("memory") as runtime:
        with pytest.raises(InvalidInput, match="only a store in a file"):
            await runtime.backup(tmp_path / "copy.db")
        with pytest.raises(InvalidInput, match="only a store in a file"):
            await runtime.backup("memory")
    with pytest.raises(InvalidInput, match="only a store in a file"):
        await Runtime.restore("memory")


async def test_a_cancelled_backup_leaves_nothing(file: Place, tmp_path: Path) -> None:
    async with file.runtime(Agent(ScriptedModel([BIG] * 3))) as runtime:
        session = await runtime.session("chat")
        for number in range(3):
            await session.run(f"{number}{BIG}")
        begun = asyncio.Event()
        copying = asyncio.create_task(runtime.backup(tmp_path / "copy.db", progress=lambda *_: begun.set()))
        await begun.wait()
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying

    assert not (tmp_path / "copy.db").exists() or await opens(tmp_path / "copy.db")
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


async def opens(path: Path) -> bool:
    """Whether the copy is whole: the cancel may have come when everything was done."""
    async with Runtime(path) as runtime:
        return (await runtime.store.facts(deep=True)).checks == ("ok",)


# ---------------------------------------------------------------------- held


async def test_a_copy_works_on_nothing_until_it_is_restored(
    file: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy, payments = tmp_path / "copy.db", Payments()
    await copied(file, copy)
    with caplog.at_level(logging.WARNING, "perdure.runtime"):
        async with Runtime(copy, agents=[payments.agent(PAY, "done")]) as runtime:
            receipt = await (await runtime.session("chat")).send("third", key="k")
            assert await runtime.wait_idle(SOON)
            rows = await runtime.store.open_sessions()

    assert payments.keys == []
    assert [(row.id, row.state, row.owner) for row in rows] == [("chat", "open", None)]
    assert "perdure restore" in caplog.text

    own = await Runtime.restore(copy)
    async with Runtime(copy, agents=[payments.agent(PAY, "done")]) as runtime:
        result = await asyncio.wait_for((await runtime.session("chat")).result(receipt.turn_id), SOON)
        held = runtime.store.held()

    assert (result.text, held) == ("done", None)
    assert payments.keys == [f"{own}.chat.3.1.0"]


async def test_a_database_without_its_lock_file_is_a_copy(file: Place, tmp_path: Path) -> None:
    """Also when it is opened once more, and has a lock file by then."""
    async with file.runtime(Agent("scripted")) as runtime:
        await (await runtime.session("chat")).run("go")
    copy = Path(shutil.copy(file.path, tmp_path / "copy.db"))
    for _ in range(2):
        async with Runtime(copy, agents=[Agent("scripted")]) as runtime:
            assert "without copy.db-lock" in (runtime.store.held() or "")

    await Runtime.restore(copy)

    async with Runtime(copy, agents=[Agent("scripted")]) as runtime:
        assert runtime.store.held() is None
        assert (await (await runtime.session("chat")).run("and on")).text


async def test_an_empty_database_without_its_lock_file_is_a_new_store(file: Place) -> None:
    async with file.runtime():
        pass
    Path(f"{file.path}-lock").unlink()

    async with file.runtime(Agent("scripted")) as runtime:
        assert runtime.store.held() is None
        await (await runtime.session("chat")).run("go")


async def test_an_old_copy_in_place_of_its_original_goes_on_when_it_is_restored(file: Place, tmp_path: Path) -> None:
    await copied(file, tmp_path / "copy.db")
    async with file.runtime(Agent("scripted")) as runtime:
        await (await runtime.session("chat")).run("third")
        before = runtime.store.identity()
    for suffix in ("-wal", "-shm"):
        Path(f"{file.path}{suffix}").unlink(missing_ok=True)
    shutil.copy(tmp_path / "copy.db", file.path)
    with pytest.raises(StoreDamaged, match=r"perdure restore .*agent\.db"):
        await Runtime(file.path).__aenter__()

    own = await Runtime.restore(file.path)

    async with file.runtime(Agent("scripted")) as runtime:
        assert texts(await (await runtime.session("chat")).history())[::2] == ["first", "second"]
        assert runtime.store.identity() == own != before


async def test_a_runtime_that_has_a_copy_open_goes_on_as_soon_as_it_is_restored(file: Place, tmp_path: Path) -> None:
    copy, payments = tmp_path / "copy.db", Payments()
    await copied(file, copy)
    async with Runtime(copy, agents=[payments.agent(PAY, "done")]) as runtime:
        receipt = await (await runtime.session("chat")).send("third")
        own = await Runtime.restore(copy)
        result = await asyncio.wait_for(receipt.result(), SOON)

    assert result.text == "done"
    assert payments.keys == [f"{own}.chat.3.1.0"]


async def test_a_store_that_is_no_copy_gets_a_new_id_only_while_nobody_has_it_open(file: Place) -> None:
    """A whole folder that was copied with its lock cannot be told from its original: a person can."""
    async with file.runtime(Agent("scripted")) as runtime:
        await (await runtime.session("chat")).run("go")
        before = runtime.store.identity()
        with pytest.raises(StoreInUse, match="stop them"):
            await Runtime.restore(file.path)
        assert runtime.store.identity() == before

    own = await Runtime.restore(file.path)

    async with file.runtime(Agent("scripted")) as runtime:
        assert runtime.store.identity() == own != before
        await (await runtime.session("chat")).run("again")


async def test_there_must_be_something_to_restore(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="there is no store"):
        await Runtime.restore(tmp_path / "nothing.db")

    assert list(tmp_path.iterdir()) == []


async def test_a_run_in_a_copy_returns_queued_with_the_reason_and_its_result_once_restored(
    file: Place, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.db"
    await copied(file, copy)
    async with Runtime(copy, agents=[Agent(ScriptedModel(["third"]))]) as runtime:
        session = await runtime.session("chat")
        result = await asyncio.wait_for(session.run("third", key="k"), SOON)
        async with session.stream("third", key="k") as turn:
            streamed = await asyncio.wait_for(turn.result(), SOON)
        await Runtime.restore(copy)
        receipt = await session.send("third", key="k")
        assert (await asyncio.wait_for(receipt.result(), SOON)).text == "third"

    for outcome in (result.outcome, streamed.outcome):
        assert isinstance(outcome, Queued)
        assert (outcome.behind, outcome.calls) == (None, ())
        assert "perdure restore" in outcome.reason


# ---------------------------------------------------------------------- what was under way


@pytest.mark.parametrize("recovery", ["once", "rerun"])
async def test_a_call_under_way_in_the_original_goes_by_its_contract_in_the_restored_copy(
    file: Place, tmp_path: Path, recovery: str
) -> None:
    """Started before the copy was made it keeps its key, and the next call has one of the new store."""
    copy, before, after = tmp_path / "copy.db", Payments(), Payments()
    before.hangs = True
    runtime = await file.runtime(before.agent(PAY, recovery=recovery)).__aenter__()
    await (await runtime.session("chat")).send("go")
    await before.running.wait()
    await runtime.backup(copy)
    original = runtime.store.identity()
    await crash(runtime)

    own = await Runtime.restore(copy)
    async with Runtime(copy, agents=[after.agent(PAY, "done", recovery=recovery)]) as runtime:
        result = await asyncio.wait_for((await runtime.session("chat")).result("chat.1"), SOON)

    later = f"{own}.chat.1.2.0"
    if recovery == "once":
        assert isinstance(result.tool_calls[0].outcome, OutcomeUnknown)
        assert after.keys == [later]
    else:
        assert after.keys == [f"{original}.chat.1.1.0", later]


async def test_a_process_parked_in_the_original_sleeps_in_its_copy_until_that_is_restored(
    file: Place, tmp_path: Path
) -> None:
    copy, done = tmp_path / "copy.db", list[str]()

    @process(name="napping")
    async def napping(ctx: ProcessContext) -> str:
        await ctx.wait_signal("go")
        await ctx.step(done.append, "woke")
        return "rested"

    async with Runtime(file.path, processes=[napping]) as runtime:
        handle = await runtime.start(napping, id="nap")
        await until(lambda: waits(handle))
        await runtime.backup(copy)
    async with Runtime(copy, processes=[napping]) as runtime:
        await runtime.handle("nap").signal("go")
        started = await runtime.start(napping, id="second")
        assert await runtime.wait_idle(SOON)
        assert await started.status() in ("running", "queued")
        assert done == []
    await Runtime.restore(copy)
    async with Runtime(copy, processes=[napping]) as runtime:
        assert await runtime.handle("nap").result(SOON) == "rested"

    assert done == ["woke"]


async def waits(handle: Any) -> bool:
    return bool((await handle.record()).record.waits)


# ---------------------------------------------------------------------- the rule, in every store


async def test_every_write_that_can_claim_is_known_to_be_one() -> None:
    """A new one with a `worker` must be in the table, or it would claim in a copy, or be known to claim nothing."""
    claiming = {kind.__name__ for kind in rules.CLAIMING} | {"Claim"}
    claiming_nothing = {"Beat", "Configure", "Outlived"}
    named = {kind for kind in rules.RULES if issubclass(kind, Struct) and "worker" in kind.__struct_fields__}

    assert {kind.__name__ for kind in named} == claiming | claiming_nothing


async def test_in_a_held_store_nothing_is_claimed_whoever_asks() -> None:
    rows = MemoryRows()
    rows.held = "a copy"
    store = MemoryStore(rows)
    accepted = await store.write(Accept("chat", "assistant", b"said", "op", 1, worker="w1"))
    claimed = await store.write(Claim(SessionRef("chat"), "w1", accepted.row.generation, 2))

    assert (accepted.opened, accepted.row.owner) == (True, None)
    assert claimed.won is False
    assert (await store.sessions(SessionFilter()))[0].owner is None
    assert (await store.write(Claim(ProcessRef("none"), "w1", 0, 3))).won is False
    assert await store.processes(ProcessFilter()) == []
    assert (await store.write(Resolve("chat.1.approval", None, 4, "w1"))).status == "unknown"


async def test_a_mark_that_was_changed_is_damage(file: Place, tmp_path: Path) -> None:
    await copied(file, tmp_path / "copy.db")
    connection = sqlite3.connect(tmp_path / "copy.db")
    connection.execute("UPDATE meta SET value = x'00' WHERE key = 'copy'")
    connection.commit()
    connection.close()

    with pytest.raises(StoreDamaged, match="its copy does not match"):
        await SqliteStore(tmp_path / "copy.db").open()
