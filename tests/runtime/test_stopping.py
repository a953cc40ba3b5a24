"""Working until a stop signal: the first one drains, the second one cuts off, and a file tells probes of readiness."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Runtime
from perdure.engine.lease import LeaseTerms
from perdure.engine.stopping import StopSignals, unready
from perdure.errors import InvalidInput, RuntimeClosed, SignalsUnavailable
from perdure.model.outcome import Finished
from perdure.model.tool import Ok, OutcomeUnknown
from tests.kit import Place, until, untyped
from tests.runtime.test_leaving import ASK, Work

STOPPING = [signal.SIGTERM, signal.SIGINT]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Every test puts back the handlers that it found."""
    before = [signal.getsignal(number) for number in STOPPING]
    yield
    assert [signal.getsignal(number) for number in STOPPING] == before


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


async def begun(runtime: Runtime, **options: Any) -> asyncio.Task[None]:
    """A Runtime that works until it is stopped, with its handlers in place."""
    before = signal.getsignal(signal.SIGTERM)
    task = asyncio.create_task(runtime.run_until_stopped(**options))
    await until(lambda: signal.getsignal(signal.SIGTERM) != before or task.done())
    return task


@pytest.mark.parametrize("number", STOPPING)
async def test_a_stop_signal_lets_the_running_turn_end_and_begins_no_other(
    place: Place, number: signal.Signals
) -> None:
    work = Work()
    async with place.runtime(work.agent(ASK, "done", "later")) as runtime:
        working = await begun(runtime)
        first = await (await runtime.session("chat")).send("go")
        await work.running.wait()
        send(number)
        await until(lambda: runtime._parts is not None and runtime._parts.mode.draining)
        second = await (await runtime.session("other")).send("go")
        work.release.set()
        await working
        row = await runtime.store.session("other")

        assert (await first.result()).text == "done"
    assert row is not None
    assert (row.state, row.owner) == ("open", None)
    async with place.runtime(work.agent("later")) as runtime:
        assert (await (await runtime.session("other")).result(second.turn_id)).text == "later"


async def test_a_second_signal_cuts_off_at_once_and_records_that(place: Place) -> None:
    work = Work()
    async with place.runtime(work.agent(ASK), grace=None) as runtime:
        working = await begun(runtime, grace=None)
        await (await runtime.session("chat")).send("go")
        await work.running.wait()
        send(signal.SIGTERM)
        await until(lambda: runtime._parts is not None and runtime._parts.mode.draining)
        send(signal.SIGINT)
        await working

        with pytest.raises(RuntimeClosed):
            await runtime.session("chat")
    async with place.runtime(work.agent("done")) as runtime:
        result = await (await runtime.session("chat")).result("chat.1")

    assert result.tool_calls[0].outcome == OutcomeUnknown("the runtime was closed while it ran")
    assert work.ledger == [(1, "chat.1.1.0")]


async def test_what_still_runs_after_the_grace_period_is_cut_off_and_goes_on_later(place: Place) -> None:
    work = Work("rerun")
    async with place.runtime(work.agent(ASK), grace=None) as runtime:
        working = await begun(runtime, grace=0)
        await (await runtime.session("chat")).send("go")
        await work.running.wait()
        send(signal.SIGTERM)
        await working
        row = await runtime.store.session("chat")
    work.release.set()
    async with place.runtime(work.agent("done")) as runtime:
        result = await (await runtime.session("chat")).result("chat.1")

    assert row is not None
    assert (row.state, row.owner) == ("open", None)
    assert (result.tool_calls[0].outcome, result.tool_calls[0].repeated) == (Ok("worked"), 1)


async def test_two_signals_in_one_instant_are_two(place: Place) -> None:
    work = Work()
    async with place.runtime(work.agent(ASK), grace=None) as runtime:
        working = await begun(runtime, grace=None)
        await (await runtime.session("chat")).send("go")
        await work.running.wait()
        send(signal.SIGTERM)
        send(signal.SIGINT)
        await working


@pytest.mark.parametrize("first_to_end", [0, 1])
async def test_one_signal_stops_all_runtimes_of_a_process(tmp_path: Path, first_to_end: int) -> None:
    held = [Work(), Work()]
    async with (
        Runtime(tmp_path / "a.db", agents=[held[0].agent(ASK, "done")]) as one,
        Runtime(tmp_path / "b.db", agents=[held[1].agent(ASK, "done")]) as other,
    ):
        working = [await begun(one), await begun(other)]
        receipts = [await (await runtime.session("s")).send("go") for runtime in (one, other)]
        for work in held:
            await work.running.wait()
        send(signal.SIGTERM)
        for number in (first_to_end, 1 - first_to_end):
            held[number].release.set()
            await working[number]
        outcomes = [(await receipt.result()).outcome for receipt in receipts]

    assert outcomes == [Finished("done"), Finished("done")]


async def test_a_signal_from_before_a_block_within_another_is_not_lost() -> None:
    with StopSignals() as outer:
        send(signal.SIGTERM)
        with StopSignals() as inner:
            assert inner.first.is_set()
        await outer.first.wait()

        assert not outer.second.is_set()


async def test_handlers_are_put_back_when_the_task_is_cancelled(place: Place) -> None:
    async with place.runtime(Agent("scripted")) as runtime:
        working = await begun(runtime)
        working.cancel()
        await asyncio.wait({working})

        assert working.cancelled()
        assert await (await runtime.session("s")).history() == []  # it works on


def test_another_thread_is_told_what_to_call_instead(place: Place) -> None:
    found = list[BaseException]()

    async def main() -> None:
        async with place.runtime() as runtime:
            try:
                await runtime.run_until_stopped()
            except SignalsUnavailable as error:
                found.append(error)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join()

    assert "drain(timeout=30)" in str(found[0])


async def test_bad_input_is_refused(place: Place, tmp_path: Path) -> None:
    runtime = place.runtime()
    with pytest.raises(RuntimeClosed):
        await runtime.run_until_stopped()
    async with runtime:
        with pytest.raises(InvalidInput, match="grace='soon' is not usable"):
            await runtime.run_until_stopped(untyped("soon"))
        with pytest.raises(InvalidInput, match="give a file in an existing folder"):
            await runtime.run_until_stopped(ready_file=tmp_path / "nowhere" / "ready")


# ---------------------------------------------------------------------- the ready file


async def test_the_ready_file_is_there_until_draining_begins(place: Place, tmp_path: Path) -> None:
    work, ready = Work(), tmp_path / "ready"
    async with place.runtime(work.agent(ASK, "done")) as runtime:
        working = await begun(runtime, ready_file=ready)
        await (await runtime.session("chat")).send("go")
        await work.running.wait()
        there = unready(ready)
        send(signal.SIGTERM)
        await until(lambda: runtime._parts is not None and runtime._parts.mode.draining)
        gone = unready(ready)
        work.release.set()
        await working

    assert there is None
    assert gone is not None
    assert gone.startswith("there is no ready file")
    assert list(tmp_path.glob("ready*")) == []


async def test_the_ready_file_is_touched_at_each_renewal_and_made_anew(place: Place, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    async with place.runtime(lease=LeaseTerms(term=0.3, renewal=0.1)) as runtime:
        working = await begun(runtime, ready_file=ready)
        os.utime(ready, (1, 1))
        old = unready(ready)
        await until(lambda: unready(ready) is None)
        ready.unlink()
        await until(ready.exists)
        send(signal.SIGTERM)
        await working

    assert old is not None
    assert "its event loop is blocked" in old


async def test_a_ready_file_of_another_worker_is_left_alone(place: Place, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    async with place.runtime() as runtime:
        working = await begun(runtime, ready_file=ready)
        ready.write_bytes(b'{"worker":"w-other","pid":1,"renewal":10.0}')
        send(signal.SIGTERM)
        await working

    assert unready(ready) is None


async def test_a_copy_of_a_store_is_not_ready_before_it_is_restored(tmp_path: Path) -> None:
    async with Runtime(tmp_path / "a.db") as runtime:
        await runtime.backup(tmp_path / "copy.db")
    async with Runtime(tmp_path / "copy.db") as copy:
        working = await begun(copy, ready_file=tmp_path / "ready")
        there = (tmp_path / "ready").exists()
        send(signal.SIGTERM)
        await working

    assert not there


def test_what_is_no_ready_file_is_not_ready(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")

    assert unready(tmp_path / "text") == "this is not a ready file of `perdure worker`"
    assert unready(tmp_path) == "the ready file cannot be read: Is a directory"
