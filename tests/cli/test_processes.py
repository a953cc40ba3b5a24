"""`perdure ps`, `signal`, `cancel` and `perdure processes …`: other OS processes' work, by id or handle."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from perdure import Runtime
from perdure.cli.processes import seconds_of
from perdure.model.process import Cancelled, Registration, Success, WakeTarget
from perdure.model.session import WorkerRow
from perdure.model.write import Advance, Beat, Claim, Dismiss, ProcessRef, ProcessScope, Register, Release
from perdure.stores.sqlite import SqliteStore
from tests.cli.sample_processes import (
    ALL,
    approved,
    broken,
    charging,
    doubled,
    interrupt,
    napping,
    parked,
    prepare,
    write,
)
from tests.cli.shell import say, shell, shell_json

HANDLE = '{"__handle__": "process", "id": "a-1"}'


async def some(runtime: Runtime) -> None:
    """One that ended well, one that did not, two that wait, one of somebody else."""
    await (await runtime.start(doubled, {"n": 3}, id="d-1")).result()
    await (await runtime.start(broken, id="b-1")).outcome()
    await runtime.start(approved, {"what": "tea"}, id="a-1", label="the tea")
    await parked(runtime, "a-1")
    await runtime.start(napping, {"seconds": 7300}, id="n-1")
    await parked(runtime, "n-1")
    await runtime.processes.register("x-1", label="a job elsewhere", signals=["done"])


@pytest.fixture
def worked(store: Path) -> Path:
    prepare(store, some)
    return store


async def registered(
    store: SqliteStore, process_id: str, worker: str | None = None, wake: WakeTarget | None = None
) -> ProcessScope:
    registration = Registration(process_id, "function", "rerunnable", "lost", "lost@1", {}, wake=wake)
    row = (await store.write(Register(registration, 1000, worker))).row
    return ProcessScope(row.id, row.pid, worker or "", row.generation)


def cells(text: str) -> list[list[str]]:
    """The rows of a table, by columns that are two or more spaces apart."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()[1:]]


# ---------------------------------------------------------------------- ps


def test_live_processes_are_listed_with_what_they_wait_for(worked: Path) -> None:
    result = shell("ps", store=worked)

    assert result.exit_code == 0
    external, napper, waiter = cells(re.sub(r"\b\d+ s\b", "(age)", result.stdout))
    assert external == ["x-1", 'external "a job elsewhere"', "running", "(age)", "—", "—", "—"]
    assert napper == ["n-1", "function napping@1", "waiting", "(age)", "—", "—", "time, in 2 h"]
    assert waiter[:3] == ["a-1", 'function approved@2 "the tea"', "waiting"]
    assert waiter[5:] == ["tea is ready", "signal approve, at most 60 min"]


def test_ended_ones_are_listed_on_request_with_how_they_ended(worked: Path) -> None:
    rows = {row[0]: row for row in cells(shell("ps", "--all", store=worked).stdout)}

    assert list(rows) == ["x-1", "n-1", "a-1", "b-1", "d-1"]
    assert (rows["d-1"][2], rows["d-1"][-1]) == ("completed", "6")
    assert (rows["b-1"][2], rows["b-1"][-1]) == ("failed", "raised: ValueError: no such order")


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ([], ["x-1", "n-1", "a-1"]),
        (["--status", "waiting"], ["n-1", "a-1"]),
        (["--status", "failed"], ["b-1"]),
        (["--status", "stuck"], []),
        (["--kind", "external"], ["x-1"]),
        (["--name", "doubled"], []),
        (["--all", "--name", "doubled"], ["d-1"]),
        (["--session", "nobody"], []),
        (["--all", "--limit", "2"], ["x-1", "n-1"]),
    ],
    ids=lambda each: " ".join(each) if each and each[0].startswith("-") else None,
)
def test_processes_can_be_chosen(wanted: list[str], found: list[str], worked: Path) -> None:
    assert [row["id"] for row in shell_json("ps", *wanted, store=worked)] == found


def test_a_cut_list_says_so(worked: Path) -> None:
    cut, whole = shell("ps", "--limit", "2", store=worked), shell("ps", "--limit", "3", store=worked)

    assert "the newest 2 of them: --limit shows more" in cut.stderr
    assert whole.stderr == ""


def test_json_holds_the_handle_and_every_field(worked: Path) -> None:
    told = shell_json("ps", "--name", "approved", store=worked)[0]

    assert (told["__handle__"], told["id"], told["status"], told["state"]) == ("process", "a-1", "waiting", "waiting")
    assert (told["input"], told["label"], told["attempts"]) == ({"what": "tea"}, "the tea", 1)
    [wait] = told["waits"]
    assert (wait["kind"], wait["name"], wait["due"]) == ("signal", "approve", told["due"])
    assert told["outcome"] is None


def test_an_empty_store_has_no_processes(store: Path) -> None:
    say(store, "chat", "hello")

    assert shell("ps", store=store).stdout == "no live processes: --all lists those that are over too\n"
    assert shell("ps", "--all", store=store).stdout == "no processes\n"
    assert shell_json("ps", store=store) == []


def test_an_unknown_status_is_a_usage_error(worked: Path) -> None:
    result = shell("ps", "--status", "asleep", store=worked)

    assert result.exit_code == 2
    assert "there is no status 'asleep': use one of running, queued, interrupted, waiting, stuck" in result.stderr


def test_what_a_dead_worker_held_is_interrupted_and_what_nobody_has_is_queued(store: Path) -> None:
    async def work(opened: SqliteStore) -> None:
        await opened.write(Beat(WorkerRow("w-dead", "host", "boot", 1, 1000)))
        await registered(opened, "held", "w-dead")
        await registered(opened, "free")

    write(store, work)

    assert [(row["id"], row["state"]) for row in shell_json("ps", store=store)] == [
        ("free", "queued"),
        ("held", "interrupted"),
    ]
    assert [row["id"] for row in shell_json("ps", "--status", "queued", store=store)] == ["free"]
    assert [row["id"] for row in shell_json("ps", "--status", "interrupted", "--limit", 1, store=store)] == ["held"]


def test_attempts_are_told_of_what_lives_and_nobody_works_on_what_is_over(store: Path) -> None:
    async def work(opened: SqliteStore) -> None:
        for process_id in ("over", "lives"):
            scope = await registered(opened, process_id, "w-dead")
            await opened.write(Advance(scope, 1001, first=True))
            taken = (
                await opened.write(Claim(ProcessRef(process_id), "w-next", scope.generation, 1002, "it is dead"))
            ).row
            assert taken is not None
            scope = ProcessScope(taken.id, taken.pid, "w-next", taken.generation)
            if process_id == "over":
                await opened.write(Advance(scope, 1003, outcome=Success(1)))

    write(store, work)

    lives, over = cells(shell("ps", "--all", store=store).stdout)
    assert (lives[0], lives[4]) == ("lives", "w-next attempt 2")
    assert (over[0], over[4]) == ("over", "—")


def test_a_label_cannot_command_the_terminal(store: Path) -> None:
    async def work(runtime: Runtime) -> None:
        await runtime.processes.register("x-1", label="\x1b]0;pwned\x07 job")

    prepare(store, work)

    shown = shell("ps", store=store).stdout
    assert "\x1b" not in shown
    assert "\x07" not in shown


# ---------------------------------------------------------------------- signal


async def test_a_signal_from_the_shell_reaches_a_process_of_another_runtime(store: Path) -> None:
    async with Runtime(store, processes=ALL) as runtime:
        handle = await runtime.start(approved, {"what": "tea"}, id="a-1")
        await parked(runtime, "a-1")
        told = await asyncio.to_thread(shell, "signal", HANDLE, "approve", '{"by": "kim"}', store=store)
        value = await handle.result(timeout=60)

    assert (told.exit_code, told.stdout) == (0, "told a-1: approve (event 5)\n")
    assert value == "tea approved by kim"


def test_a_signal_that_nobody_can_act_on_says_what_has_to_come(worked: Path) -> None:
    result = shell("signal", "a-1", "approve", "-", store=worked, stdin='{"by": "kim"}')

    assert result.exit_code == 0
    assert "it goes on when a Runtime with function 'approved@2' opens this store" in result.stdout
    assert [row["state"] for row in shell_json("ps", "--name", "approved", store=worked)] == ["queued"]


def test_a_signal_that_it_does_not_wait_for_is_kept_and_says_what_it_waits_for(worked: Path) -> None:
    result = shell("signal", "a-1", "go", store=worked)

    assert result.stdout.splitlines() == [
        "told a-1: go (event 5)",
        "it does not wait for 'go', it waits for: approve; the signal is kept until it asks for it",
    ]


def test_a_signal_with_a_key_is_sent_once(worked: Path) -> None:
    words = ("signal", "a-1", "go", "1", "--key", "k")
    first, again = shell_json(*words, store=worked), shell_json(*words, store=worked)
    other = shell("signal", "a-1", "go", "2", "--key", "k", store=worked)

    sent = {"process_id": "a-1", "signal": "go", "event": 5, "awaited": False, "waits_for": ["approve"]}
    assert first == again == sent
    assert other.exit_code == 1
    assert "was used for another event" in other.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["a-1", "approve", "yes"], 2, "the payload is not JSON"),
        (["a-1", "approve", '{"by": 7}'], 2, "the payload of 'signal.approve' does not fit"),
        (["a-1", "reject"], 2, "takes no signal 'reject'; it takes: approve, go"),
        (["d-1", "go"], 1, "process 'd-1' is completed: nothing more can happen to it"),
        (["nobody", "go"], 2, "process 'nobody': there is no such process in this store; `perdure ps --all` lists"),
        (["", "go"], 2, "process id '' is not usable"),
        (['{"__handle__": "process"}', "go"], 2, "Invalid process handle: missing `id`"),
        (['{"id": "a-1"}', "go"], 2, "Invalid process handle: missing `__handle__`"),
        (['{"__handle__": "file", "id": "a"}', "go"], 2, "Invalid process handle kind: file"),
        (["{__handle__: process, id: a-1}", "go"], 2, "looks like a handle, but is not JSON"),
    ],
    ids=["no json", "misfit", "undeclared", "over", "unknown", "empty", "no id", "no kind", "kind", "unquoted"],
)
def test_a_signal_that_cannot_be_sent_is_explained(words: list[str], code: int, says: str, worked: Path) -> None:
    result = shell("signal", *words, store=worked)

    assert result.exit_code == code
    assert says in result.stderr


# ---------------------------------------------------------------------- cancel


async def test_a_process_of_another_runtime_is_cancelled(store: Path) -> None:
    async with Runtime(store, processes=ALL) as runtime:
        handle = await runtime.start(napping, {"seconds": 7200}, id="n-1")
        await parked(runtime, "n-1")
        asked = await asyncio.to_thread(shell, "cancel", "n-1", "--reason", "enough", "--by", "kim", store=store)
        outcome = await handle.outcome(timeout=60)

    assert (asked.exit_code, asked.stdout) == (0, "asked process n-1 to stop\n")
    assert outcome == Cancelled("kim", "enough")


def test_cancelling_twice_is_said_and_cancelling_what_is_over_fails(worked: Path) -> None:
    first, again = shell("cancel", HANDLE, store=worked), shell("cancel", "a-1", store=worked)
    over = shell("cancel", "d-1", store=worked)

    assert (first.exit_code, again.exit_code, over.exit_code) == (0, 0, 1)
    assert again.stdout.startswith("process a-1 was asked to stop before\n")
    assert over.stdout == "nothing to stop: process d-1 is completed\n"
    assert shell_json("cancel", "a-1", store=worked) == {
        "process_id": "a-1",
        "status": "already_requested",
        "process": "queued",
    }


def test_what_nobody_has_begun_ends_at_once(store: Path) -> None:
    async def work(opened: SqliteStore) -> None:
        await registered(opened, "free")

    write(store, work)

    assert shell("cancel", "free", store=store).stdout == "process free is cancelled: no worker was running it\n"


def test_an_id_of_both_a_session_and_a_process_must_be_told_apart(worked: Path) -> None:
    say(worked, "a-1", "pay")

    either = shell("cancel", "a-1", store=worked)
    session, process = shell_json("cancel", "a-1", "--session", store=worked), shell("cancel", HANDLE, store=worked)

    assert either.exit_code == 2
    assert "'a-1' is a session and a process: say --session or --process" in either.stderr
    assert session == {"session_id": "a-1", "turn_id": "a-1.1", "status": "requested"}
    assert process.stdout.startswith("asked process a-1 to stop\n")
    assert shell_json("cancel", "a-1", "--process", store=worked)["status"] == "already_requested"


def test_an_id_of_neither_is_a_usage_error(worked: Path) -> None:
    result = shell("cancel", "nobody", store=worked)

    assert result.exit_code == 2
    assert "there is no session 'nobody' in this store: `perdure sessions` lists the sessions" in result.stderr
    assert "nor a process: `perdure ps` shows those" in result.stderr


# ---------------------------------------------------------------------- keeping house


def test_a_stuck_process_is_resumed(store: Path) -> None:
    async def work(opened: SqliteStore) -> None:
        await opened.write(Release(await registered(opened, "p-1", "w-1"), 2000, stuck="the code has changed"))

    write(store, work)

    listed = shell("ps", "--status", "stuck", store=store).stdout
    resumed, again = shell("processes", "resume", "p-1", store=store), shell("processes", "resume", "p-1", store=store)
    [row] = [re.split(r"\s{2,}", line) for line in listed.splitlines() if line.startswith("p-1")]
    assert (row[2], row[-1]) == ("stuck", "the code has changed")
    assert (resumed.exit_code, again.exit_code) == (0, 1)
    assert resumed.stdout.splitlines() == [
        "resumed p-1",
        "it goes on when a Runtime with function 'lost@1' opens this store",
    ]
    assert again.stdout == "nothing to resume: process p-1 is queued, not stuck\n"


def test_prune_forgets_what_is_over_and_nothing_else(worked: Path) -> None:
    refused = shell("processes", "prune", "--older-than", "0s", store=worked)
    none = shell("processes", "prune", "--older-than", "1h", "--yes", store=worked)
    gone = shell_json("processes", "prune", "--older-than", "0s", "--yes", store=worked)

    assert (refused.exit_code, none.stdout, gone) == (2, "pruned 0 processes\n", {"pruned": 2})
    assert "say --yes" in refused.stderr
    assert [row["id"] for row in shell_json("ps", "--all", store=worked)] == ["x-1", "n-1", "a-1"]
    assert "it was completed, and is no longer retained" in shell("logs", "d-1", store=worked).stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--older-than", "a week"], "'a week' is no length of time"),
        (["--older-than", "-1"], "'-1' is no length of time"),
        (["--older-than", "0s", "--status", "running"], "only what is over can be pruned, and running is not"),
    ],
    ids=["words", "negative", "live"],
)
def test_a_prune_that_cannot_be_is_explained(options: list[str], says: str, worked: Path) -> None:
    result = shell("processes", "prune", *options, "--yes", store=worked)

    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("30min", 1800), ("1.5h", 5400), ("7 d", 604_800)]
)
def test_a_length_of_time_is_read(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


def test_live_definitions_are_counted(worked: Path) -> None:
    assert shell_json("processes", "versions", store=worked) == {"approved@2": 1, "external": 1, "napping@1": 1}


# ---------------------------------------------------------------------- wakes


async def ended_for(opened: SqliteStore, process_id: str, session_id: str) -> None:
    """A process whose end a session is to be told."""
    scope = await registered(opened, process_id, "w-1", wake=WakeTarget(session_id, "helper"))
    await opened.write(Advance(scope, 2000, outcome=Success(7)))


def test_discarded_wakes_are_listed_and_brought_back(store: Path) -> None:
    async def work(opened: SqliteStore) -> None:
        for name in ("p-1", "p-2"):
            await ended_for(opened, name, "chat")
        first = (await opened.wakes("chat"))[0]
        await opened.write(Dismiss((first.number,), 3000, "nobody listens"))

    write(store, work)

    pending, discarded = shell_json("processes", "wakes", store=store)
    assert (pending["process_id"], pending["state"], pending["reason"]) == ("p-2", "pending", None)
    assert (discarded["process_id"], discarded["event"], discarded["status"]) == (
        "p-1",
        "process.completed",
        "completed",
    )
    assert "discarded: nobody listens" in shell("processes", "wakes", "--session", "chat", store=store).stdout
    number = discarded["number"]
    assert shell("processes", "redrive", number, store=store).stdout == f"brought back: {number}\n"
    assert shell("processes", "redrive", number, store=store).exit_code == 1
    assert shell_json("processes", "wakes", "--state", "discarded", store=store) == []
    assert len(shell_json("processes", "wakes", "--state", "pending", store=store)) == 2


@pytest.mark.parametrize(
    "command",
    [["ps"], ["logs", "a-1"], ["signal", "a-1", "go"], ["processes", "resume", "a-1"], ["processes", "wakes"]],
    ids=" ".join,
)
def test_looking_makes_no_store(command: list[str], store: Path) -> None:
    result = shell(*command, "--json", store=store)

    assert result.exit_code == 2
    assert "there is no store at" in json.loads(result.stdout)["error"]["message"]
    assert not store.exists()


# ---------------------------------------------------------------------- steps that ask


def test_step_that_a_crash_cut_off_is_listed_and_settled_from_a_shell(store: Path) -> None:
    interrupt(store, charging, "night.1")

    [asked] = shell_json("pending", store=store)
    listed = shell("ps", store=store)
    settled = shell("settle", "night.1.1", "done", "--value", "7", store=store)
    again = shell("settle", "night.1.1.1", "done", store=store)
    found: list[object] = []
    prepare(store, lambda runtime: _result(runtime, found))

    assert (asked["call_id"], asked["kind"], asked["tool"]) == ("night.1.1", "recovery", "charge")
    assert "perdure settle night.1.1 done (or failed, rerun)" in " ".join(listed.stdout.split())
    assert (settled.exit_code, settled.stdout.splitlines()[0]) == (0, "settled as done night.1.1")
    assert again.exit_code == 2
    assert found == [7]


async def _result(runtime: Runtime, found: list[object]) -> None:
    found.append(await runtime.handle("night.1").result(60))
