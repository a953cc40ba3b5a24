"""`perdure workers`, and the calls that `perdure doctor` names because they hold a thread."""

import json
import threading
from pathlib import Path

import pytest

from perdure import Agent, Runtime, __version__, tool
from perdure.cli.doctor import left_on_threads
from perdure.engine.lease import LeaseTerms
from perdure.model.session import Offers, WorkerRow, WorkerUse
from tests.cli.shell import process, say, shell, shell_json
from tests.kit import agent_calling, until

QUICK = LeaseTerms(term=0.3, renewal=0.1)


def test_a_store_without_workers_says_so(store: Path) -> None:

    say(store, "s", "hello")

    assert shell("workers", store=store).stdout == "no worker has this store open\n"
    assert shell_json("workers", store=store) == []
    assert shell("workers", store=store.parent / "none.db").exit_code == 2


async def test_workers_are_listed_with_what_is_in_use_and_what_holds_a_thread(store: Path) -> None:
    go = threading.Event()

    @tool(timeout=0.01)
    def block() -> str:
        go.wait(60)
        return "done"

    agent = agent_calling("block", tools=[block], name="blocker")
    async with Runtime(store, agents=[agent], threads=7, concurrency=5, lease=QUICK) as runtime:
        await (await runtime.session("s")).run("go")

        async def told() -> bool:
            [row] = await runtime.store.workers()
            return row.offers is not None and row.offers.use is not None and row.offers.use.left == ("s.1.1.0",)

        await until(told)
        [row] = await runtime.store.workers()
        listed = process("workers", "--json", store=store)
        printed = process("workers", store=store)
        examined = process("doctor", store=store)
        go.set()

        async def over() -> bool:
            [row] = await runtime.store.workers()
            return row.offers is not None and row.offers.use is not None and row.offers.use.threads == 0

        await until(over)

    [found] = json.loads(listed.stdout)
    assert (found["id"], found["alive"], found["pid"], found["host"]) == (row.id, True, row.pid, row.host)
    assert (found["version"], found["since"], found["agents"]) == (__version__, row.started, ["blocker"])
    assert found["threads"] == {"in_use": 1, "places": 7}
    assert found["processes"] == {"in_use": 0, "places": 5}
    assert found["left"] == ["s.1.1.0"]
    assert "call s.1.1.0 was given up and still holds a thread" in printed.stdout.replace("\n", " ")
    assert examined.returncode == 1
    assert "1 call was given up and still holds a thread (1 of 7 are in use): s.1.1.0" in examined.stdout


async def test_turns_and_processes_at_work_are_counted(store: Path) -> None:
    agent = Agent("scripted")
    async with Runtime(store, agents=[agent], lease=QUICK) as runtime:
        runtime._dispatcher.admission.take_beyond(runtime._work.place_needs)

        async def counted() -> bool:
            [row] = await runtime.store.workers()
            return row.offers is not None and row.offers.use == WorkerUse(0, 1000, 1, 64, 0, 64)

        await until(counted)
        runtime._dispatcher.admission.release(runtime._work.place_needs)


@pytest.mark.parametrize("offers", [None, Offers(), Offers(use=WorkerUse(threads=3, most_threads=64))])
def test_a_worker_without_such_calls_needs_nothing(offers: Offers | None) -> None:
    assert left_on_threads(WorkerRow("w", "here", "boot", 7, 0, offers=offers)) is None
