"""A worker by hand, killed at every write: what the store promises is enough to carry on, and to end once."""

import itertools
from typing import Any

import pytest

from perdure.model.codec import encode
from perdure.model.message import Message, Text
from perdure.model.process import Event, EventType, ProcessRow, Registration, Success, WaitOn, WakeRule, WakeTarget
from perdure.model.record import Said
from perdure.model.session import CancelRequest, Node, WorkerRow
from perdure.model.write import Advance, Beat, Cancel, Claim, Deliver, ProcessRef, ProcessScope, Register, SendSignal
from perdure.ports.store import Store
from perdure.testing.crash import Lab, kill_everywhere

TARGET = WakeTarget("chat", "clerk")
ASKED = Registration(
    "pay", "function", "rerunnable", events=(EventType("signal.go"), EventType("paid", wake=WakeRule())), wake=TARGET
)
CHILD = Registration("child", "function", "rerunnable", parent="pay", parent_end="cancel")


async def owned(store: Store, row: ProcessRow, worker: str) -> ProcessScope | None:
    """The process as ours, whoever had it: every owner before is dead here. None when it is over, or parked."""
    while row.live and row.owner != worker:
        taken = await store.write(Claim(ProcessRef(row.id), worker, row.generation, 50, "killed"))
        assert taken.row is not None
        row = taken.row
        if not taken.won and row.status == "waiting":
            return None
    return ProcessScope(row.id, row.pid, worker, row.generation) if row.live else None


async def scenario(lab: Lab) -> None:
    """Pay, wait for a signal, tell of it, end; a child ends with it, and a session is told twice."""
    store, worker = lab.store, f"w{lab.incarnation}"
    await store.open()
    await store.write(Beat(WorkerRow(worker, "here", "boot", 1, 0)))
    row = (await store.write(Register(ASKED, 1, worker))).row
    scope = await owned(store, row, worker)
    if scope is not None:
        await pays(lab, store, scope)
    await store.write(SendSignal("pay", "go", 1, "s1", 5))
    again = await store.process("pay")
    assert again is not None
    scope = await owned(store, again, worker)
    if scope is not None:
        steps, seen = len(await store.steps(scope.pid)), again.record.sequence + 9
        if steps == 3:
            await store.write(Advance(scope, 6, (Node(3, b"heard"),), (Event("paid", {"n": 1}, 6),), seen=seen))
        await store.write(Advance(scope, 7, (Node(4, b"ends"),), outcome=Success("paid")))
    await tell_the_session(store)
    await store.close()


async def pays(lab: Lab, store: Store, scope: ProcessScope) -> None:
    steps = len(await store.steps(scope.pid))
    if steps == 0:
        await store.write(Advance(scope, 2, (Node(0, b"begins"),), first=True, seen=1))
    await store.write(Register(CHILD, 2))
    if steps < 2:
        await lab.effect("pay", "pay:0")
        await store.write(Advance(scope, 3, (Node(1, b"paid"),)))
    if steps < 3:
        row = await store.process("pay")
        assert row is not None
        waits = (WaitOn("1", "signal", "go"),)
        await store.write(Advance(scope, 4, (Node(2, b"waits"),), park=waits, seen=row.record.sequence))


async def tell_the_session(store: Store) -> None:
    for wake in await store.wakes("chat"):
        body = encode(Said(Message("user", (Text(f"told of {wake.number}"),))))
        await store.write(Deliver("chat", "clerk", (wake.number,), body, f"wake-{wake.number}", 8, turn=False))


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_killed_at_every_write_a_process_ends_once_and_is_told_of_once(store: Any) -> None:
    report = kill_everywhere(scenario, store=store, modes=("before", "lost", "hang", "late", "unheard"))

    assert (report.problems, report.unreached) == ([], [])
    assert (report.lost, report.unknown) == (0, 0)
    again = {str(row.crash) for row in report.rows if row.repeated}
    assert again == {"lost effect pay", "before advance pay: record", "hang advance pay: record"} | {
        crash for crash in again if crash.startswith("late advance pay: record")
    }
    for row in report.rows:
        process, child = row.played.ending.process("pay"), row.played.ending.process("child")
        assert process is not None
        assert child is not None
        assert (process.status, process.told) == ("completed", ["enqueued", "enqueued"])
        assert [process.events.count(kind) for kind in ("process.first_started", "signal.go", "paid")] == [1, 1, 1]
        assert child.status == "cancelled"


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
def test_really_killed_at_every_write_it_is_the_same() -> None:
    report = kill_everywhere(scenario, real=True)

    assert (report.problems, report.unreached, report.lost, report.unknown) == ([], [], 0, 0)


async def bound(lab: Lab) -> None:
    """Work that only its owner can do: whoever comes after a death finds out whether it had begun."""
    store, worker = lab.store, f"w{lab.incarnation}"
    await store.open()
    asked = Registration("bound", "tool", "owner_bound", wake=TARGET)
    scope = await owned(store, (await store.write(Register(asked, 1, worker))).row, worker)
    if scope is not None:
        await store.write(Advance(scope, 2, first=True, seen=1))
        await lab.effect("work", "bound:0")
        await store.write(Advance(scope, 3, outcome=Success("done")))
    await store.close()


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_what_only_its_owner_could_do_is_never_done_twice(store: Any) -> None:
    report = kill_everywhere(bound, store=store, modes=("before", "lost", "hang", "unheard"))

    assert (report.problems, report.unreached, report.lost, report.repeated) == ([], [], 0, 0)
    for row in report.rows:
        process = row.played.ending.process("bound")
        assert process is not None
        assert process.status in ("completed", "abandoned")
        assert process.told == ["pending"]
        if process.status == "abandoned":
            assert process.outcome["evidence"]["writer"] == "sweep"
            assert process.outcome["evidence"]["proof"] == "killed"
    assert report.unknown > 0


def test_a_cancel_request_and_an_end_from_two_sides_leave_one_end_wherever_one_is_killed() -> None:
    """Both orders, and every point of each."""
    for first in itertools.permutations(["stop", "end"]):

        async def race(lab: Lab, order: tuple[str, ...] = first) -> None:
            store, worker = lab.store, f"w{lab.incarnation}"
            await store.open()
            scope = await owned(store, (await store.write(Register(ASKED, 1, worker))).row, worker)
            for what in order:
                if what == "stop":
                    await store.write(Cancel(ProcessRef("pay"), CancelRequest("ann"), 2))
                elif scope is not None:
                    await store.write(Advance(scope, 3, (Node(0, b"end"),), first=True, outcome=Success(1)))
            await store.close()

        report = kill_everywhere(race, modes=("before", "lost", "hang"))

        assert (report.problems, report.lost) == ([], 0)
