"""`perdure logs` and `perdure processes result`: events as they happen, from another OS process."""

import asyncio
import json
import re
import signal
from pathlib import Path

import pytest

from perdure import Runtime
from perdure.model.process import Registration
from perdure.model.write import ProcessScope, Register, Release
from perdure.stores.sqlite import SqliteStore
from tests.cli.sample_processes import ALL, approved, broken, doubled, napping, parked, prepare, write
from tests.cli.shell import shell, shell_json, start

TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}")


def types(text: str) -> list[str]:
    """The types of events, one JSON object per line."""
    return [json.loads(line)["type"] for line in text.splitlines()]


async def waiting(runtime: Runtime) -> None:
    await (await runtime.start(doubled, {"n": 3}, id="d-1")).result()
    await runtime.start(approved, {"what": "tea"}, id="a-1")
    await parked(runtime, "a-1")


@pytest.fixture
def worked(store: Path) -> Path:
    prepare(store, waiting)
    return store


# ---------------------------------------------------------------------- logs


def test_events_are_shown_one_per_line(worked: Path) -> None:
    result = shell("logs", "d-1", store=worked)

    created, began, ended = result.stdout.splitlines()
    assert TIME.sub("(time)", created) == "   1  (time)  process.created"
    assert "process.first_started" in began
    assert TIME.sub("(time)", ended) == '   3  (time)  process.completed  {"type":"success","value":6}'


def test_a_failure_is_shown_with_its_traceback(store: Path) -> None:
    async def fail(runtime: Runtime) -> None:
        await (await runtime.start(broken, id="b-1")).outcome()

    prepare(store, fail)
    result = shell("logs", "b-1", store=store)

    *_, ended, first, place, _, last = [line for line in result.stdout.splitlines() if "^" not in line]
    assert ended.endswith('process.failed  {"type":"failure","code":"raised","message":"ValueError: no such order"}')
    assert first == "      Traceback (most recent call last):"
    assert place.endswith("in broken")
    assert last == "      ValueError: no such order"


def test_events_after_a_number_and_by_handle(worked: Path) -> None:
    handle = json.dumps({"__handle__": "process", "id": "a-1"})
    told = shell("logs", handle, "--after", "2", "--json", store=worked)

    assert types(told.stdout) == ["process.progress", "process.waiting"]
    assert json.loads(told.stdout.splitlines()[0])["payload"] == "tea is ready"
    assert shell("logs", handle, "--after", "99", store=worked).stdout == ""


def test_what_is_over_is_followed_to_its_end(worked: Path) -> None:
    told = shell("logs", "d-1", "-f", "--json", store=worked)

    assert told.exit_code == 0
    assert types(told.stdout) == ["process.created", "process.first_started", "process.completed"]


async def test_following_sees_what_another_process_does_and_ends_with_it(store: Path) -> None:
    async with Runtime(store, processes=ALL) as runtime:
        handle = await runtime.start(approved, {"what": "tea"}, id="a-1")
        await parked(runtime, "a-1")
        following = start("logs", "a-1", "-f", "--json", store=store)
        assert following.stdout is not None
        before = [await asyncio.to_thread(following.stdout.readline) for _ in range(4)]
        await handle.signal("approve", {"by": "kim"})
        rest, complaints = await asyncio.to_thread(following.communicate, timeout=60)

    assert types("".join(before))[-1] == "process.waiting"
    assert (types(rest)[:2], types(rest)[-1]) == (["signal.approve", "process.resumed"], "process.completed")
    assert (following.returncode, complaints) == (0, "")


async def test_ctrl_c_leaves_quietly_and_harms_nobody(store: Path) -> None:
    async with Runtime(store, processes=ALL) as runtime:
        handle = await runtime.start(napping, {"seconds": 7200}, id="n-1")
        await parked(runtime, "n-1")
        following = start("logs", "n-1", "-f", store=store)
        assert following.stdout is not None
        await asyncio.to_thread(following.stdout.readline)
        following.send_signal(signal.SIGINT)
        _, complaints = await asyncio.to_thread(following.communicate, timeout=60)
        status = await handle.status()

    assert (following.returncode, complaints) == (130, "")
    assert status == "waiting"


def test_a_payload_cannot_command_the_terminal(store: Path) -> None:
    async def work(runtime: Runtime) -> None:
        await runtime.start(approved, {"what": "\x1b]0;pwned\x07"}, id="a-1")
        await parked(runtime, "a-1")

    prepare(store, work)

    shown = shell("logs", "a-1", store=store).stdout
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_an_unknown_process_is_a_usage_error(worked: Path) -> None:
    result = shell("logs", "nobody", store=worked)

    assert result.exit_code == 2
    assert "process 'nobody': there is no such process in this store; `perdure ps --all` lists" in result.stderr


# ---------------------------------------------------------------------- result


def test_a_value_is_printed(worked: Path) -> None:
    assert shell("processes", "result", "d-1", store=worked).stdout == "6\n"
    assert shell_json("processes", "result", "d-1", store=worked) == {
        "process_id": "d-1",
        "status": "completed",
        "outcome": {"type": "success", "value": 6},
    }


async def test_the_end_of_a_process_elsewhere_is_waited_for(store: Path) -> None:
    async with Runtime(store, processes=ALL) as runtime:
        handle = await runtime.start(approved, {"what": "tea"}, id="a-1")
        await parked(runtime, "a-1")
        waiter = start("processes", "result", "a-1", store=store)
        await handle.signal("approve", {"by": "kim"})
        out, complaints = await asyncio.to_thread(waiter.communicate, timeout=60)

    assert (waiter.returncode, out, complaints) == (0, "tea approved by kim\n", "")


def test_a_wait_ends_when_its_time_is_up_and_the_process_goes_on(worked: Path) -> None:
    result = shell("processes", "result", "a-1", "--timeout", "0.05", store=worked)

    assert result.exit_code == 1
    assert "process 'a-1' did not end" in result.stderr
    assert [row["status"] for row in shell_json("ps", store=worked)] == ["waiting"]


def test_the_exit_code_says_how_it_ended(store: Path) -> None:
    async def work(runtime: Runtime) -> None:
        await (await runtime.start(broken, id="b-1")).outcome()
        handle = await runtime.start(napping, {"seconds": 7200}, id="n-1")
        await handle.cancel("enough", by="kim")
        await handle.outcome()

    prepare(store, work)

    failed, cancelled = (shell("processes", "result", name, store=store) for name in ("b-1", "n-1"))
    assert (failed.exit_code, cancelled.exit_code) == (1, 4)
    said, first, *where = failed.stderr.splitlines()
    assert said == "perdure: process 'b-1' failed: raised: ValueError: no such order"
    assert first == "Traceback (most recent call last):"
    assert where[0].endswith("in broken")
    assert where[-1] == "ValueError: no such order"
    assert cancelled.stderr == "perdure: process 'n-1' was cancelled by kim: enough\n"


def test_a_stuck_process_is_not_waited_for(store: Path) -> None:
    async def work(opened: SqliteStore) -> None:
        asked = Registration("p-1", "function", "rerunnable", "lost", "lost@1", {})
        row = (await opened.write(Register(asked, 1000, "w-1"))).row
        await opened.write(Release(ProcessScope(row.id, row.pid, "w-1", row.generation), 2000, stuck="it diverged"))

    write(store, work)

    result = shell("processes", "result", "p-1", store=store)
    assert result.exit_code == 1
    assert "process 'p-1' is stuck (it diverged)" in result.stderr
    assert "perdure processes resume p-1" in result.stderr


def test_result_of_a_process_that_is_not_there_exits_with_1(worked: Path) -> None:
    result = shell("processes", "result", "no-such", store=worked)

    assert result.exit_code == 1
    assert result.stderr.startswith("perdure: process 'no-such': there is no such process in this store")
