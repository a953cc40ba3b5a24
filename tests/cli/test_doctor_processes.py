"""`perdure doctor` on processes: it names what is stuck, what nobody takes up, and who was not told."""

import asyncio
import time
from pathlib import Path

from perdure import ProcessContext, Runtime, ToolContext, process, tool
from perdure.model.command import CommandResult
from perdure.model.process import Registration, Success, WaitOn, WakeTarget
from perdure.model.write import Advance, Dismiss, ProcessScope, Register, Release
from perdure.stores.sqlite import SqliteStore
from tests.cli.sample_processes import doubled, napping, parked, prepare, write
from tests.cli.shell import say, shell, shell_json
from tests.kit import agent_calling


def now() -> int:
    return int(time.time() * 1000)


async def begun(
    store: SqliteStore, process_id: str, worker: str | None = "w-1", wake: WakeTarget | None = None
) -> ProcessScope:
    """A process of `nightly@1` that is two minutes old."""
    asked = Registration(process_id, "function", "rerunnable", "nightly", "nightly@1", {}, wake=wake)
    row = (await store.write(Register(asked, now() - 120_000, worker))).row
    return ProcessScope(row.id, row.pid, worker or "", row.generation)


def needs(store: Path) -> list[tuple[str, str]]:
    return [(need["about"], need["problem"]) for need in shell_json("doctor", store=store)["needs"]]


def test_what_waits_for_its_time_is_well(store: Path) -> None:
    async def work(runtime: Runtime) -> None:
        await (await runtime.start(doubled, {"n": 3})).result()
        await runtime.start(napping, {"seconds": 3600}, id="n-1")
        await parked(runtime, "n-1")

    prepare(store, work)

    result, told = shell("doctor", store=store), shell_json("doctor", store=store)
    assert result.exit_code == 0
    assert "0 blobs, 2 processes\n  live processes: 1 waiting\n" in result.stdout
    assert (told["processes"], told["live_processes"], told["wakes"]) == (
        2,
        {"waiting": 1},
        {"pending": 0, "discarded": 0, "awaited": 0},
    )


def test_a_stuck_process_is_shown_with_its_reason_and_what_to_do(store: Path) -> None:
    async def work(opened: SqliteStore) -> None:
        await opened.write(Release(await begun(opened, "p-1"), now(), stuck="its code has changed"))

    write(store, work)

    result = shell("doctor", store=store)
    assert result.exit_code == 1
    assert "p-1: stuck: its code has changed" in result.stdout
    assert "then `perdure processes resume p-1`, or end it with `perdure cancel p-1`" in result.stdout


def test_many_stuck_processes_are_counted_after_the_first_ten(store: Path) -> None:
    async def work(opened: SqliteStore) -> None:
        for number in range(12):
            await opened.write(Release(await begun(opened, f"p-{number}"), now(), stuck="its code has changed"))

    write(store, work)

    found = needs(store)
    assert len(found) == 11
    assert found[-1] == ("processes", "2 more are stuck")


def test_without_a_worker_everything_that_should_run_is_named_once_per_definition(store: Path) -> None:
    async def work(opened: SqliteStore) -> None:
        for number in range(5):
            await begun(opened, f"p-{number}", None)
        await begun(opened, "held", "w-gone")

    write(store, work)

    interrupted, queued = needs(store)
    assert queued == (
        "nightly@1",
        "5 processes queued for 2 min, and no live worker has this store open: p-4, p-3, p-2 and 2 more",
    )
    assert interrupted == (
        "nightly@1",
        "1 process interrupted for 2 min, and no live worker has this store open: held",
    )


async def test_a_definition_that_no_live_worker_has_is_named(store: Path) -> None:
    opened = SqliteStore(store)
    await opened.open()
    await begun(opened, "p-1", None)
    await opened.close()
    async with Runtime(store, processes=[doubled]):
        [need] = (await _told(store))["needs"]

    assert need["problem"] == "1 process queued for 2 min, and no worker took them up: p-1"
    assert need["advice"].startswith("does a live worker have function 'nightly@1'? start one that does")


async def _told(store: Path) -> dict[str, list[dict[str, str]]]:
    told: dict[str, list[dict[str, str]]] = await asyncio.to_thread(shell_json, "doctor", store=store)
    return told


def test_a_wait_whose_time_has_passed_is_overdue(store: Path) -> None:
    async def work(opened: SqliteStore) -> None:
        due = WaitOn("1", "time", due=now() - 90_000)
        await opened.write(Advance(await begun(opened, "p-1"), now(), first=True, seen=1, park=(due,)))
        later = WaitOn("1", "time", due=now() + 90_000)
        await opened.write(Advance(await begun(opened, "p-2"), now(), first=True, seen=1, park=(later,)))

    write(store, work)

    assert needs(store) == [
        ("nightly@1", "1 process overdue for 2 min, and no live worker has this store open: p-1"),
    ]


def test_a_request_to_abandon_waits_for_a_person(store: Path) -> None:
    async def work(runtime: Runtime) -> None:
        await runtime.processes.register("job")
        await runtime.processes.request_abandon("job", "the cluster is gone", by="kim")

    prepare(store, work)

    assert needs(store) == [("job", "kim thinks that it will never end: the cluster is gone")]


def test_wakes_that_do_not_arrive_are_named(store: Path) -> None:
    async def work(opened: SqliteStore) -> None:
        for name in ("p-1", "p-2", "p-3"):
            scope = await begun(opened, name, wake=WakeTarget("chat", "helper"))
            await opened.write(Advance(scope, now() - 120_000, outcome=Success(7)))
        first = (await opened.wakes("chat"))[0]
        await opened.write(Dismiss((first.number,), now(), "its agent is unknown"))

    write(store, work)

    result = shell("doctor", store=store)
    assert result.exit_code == 1
    assert "wakes: 2 pending, 1 discarded" in result.stdout
    assert "session chat: 2 wakes wait for 2 min to be delivered" in result.stdout
    assert "session chat: 1 wake was discarded: its agent is unknown" in result.stdout
    assert "perdure processes redrive " in result.stdout


def test_wakes_for_a_deleted_session_need_nobody(store: Path) -> None:
    say(store, "chat", "hello")

    async def work(opened: SqliteStore) -> None:
        scope = await begun(opened, "p-1", wake=WakeTarget("chat", "helper"))
        await opened.write(Advance(scope, now(), outcome=Success(7)))
        await opened.write(Dismiss(tuple(w.number for w in await opened.wakes("chat")), now(), "deleted"))

    write(store, work)
    assert [about for about, _ in needs(store)] == ["session chat"]

    shell("delete", "chat", "--yes", store=store)

    assert needs(store) == []


async def test_wakes_for_what_the_session_awaited_need_nobody(store: Path) -> None:
    """The session has the result, so nothing is to be brought back."""

    @tool
    async def build(ctx: ToolContext) -> str:
        done = await ctx.command(["sh", "-c", "echo built"], background_after=60)
        return done.stdout if isinstance(done, CommandResult) else "late"

    async with Runtime(store, agents=[agent_calling("build", {}, tools=[build])]) as runtime:
        result = await (await runtime.session("chat")).run("go")
        assert result.tool_calls[0].value == "built\n"
        assert [wake.session_id for wake in await runtime.processes.wakes("discarded")] == ["chat"]

    told = (await asyncio.to_thread(shell, "doctor", store=store)).stdout
    assert "wakes: 1 not needed, because a call had waited for the end" in told
    assert "discarded" not in told
    assert await asyncio.to_thread(needs, store) == []


def test_deep_finds_a_blob_that_a_process_lacks(store: Path) -> None:
    @process
    async def large(ctx: ProcessContext[object]) -> str:
        return await ctx.step(lambda: "x" * 3_000_000, name="write")

    async def work() -> None:
        async with Runtime(store, processes=[large]) as runtime:
            await (await runtime.start(large, id="large")).result()

    asyncio.run(work())
    blobs = [p for p in Path(f"{store}-blobs").rglob("*") if p.is_file()]
    assert blobs
    assert shell("doctor", "--deep", store=store).exit_code == 0

    blobs[0].unlink()

    shallow, deep = shell("doctor", store=store), shell("doctor", "--deep", store=store)
    assert (shallow.exit_code, deep.exit_code) == (0, 1)
    assert "is missing" in deep.stdout
