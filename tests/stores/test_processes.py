"""What processes promise, one promise at a time, on both stores."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from perdure.errors import (
    Conflict,
    Fenced,
    InternalError,
    InvalidProcess,
    ProcessConflict,
    ProcessNotVisible,
    ProcessPruned,
    SessionDeleted,
    UnknownProcess,
)
from perdure.model.process import (
    Abandoned,
    Cancelled,
    Event,
    EventType,
    Evidence,
    Failure,
    FirstStart,
    ProcessRow,
    Registration,
    SessionOrigin,
    Success,
    WaitOn,
    WakeRule,
    WakeTarget,
)
from perdure.model.session import CancelRequest, Death, Node, WorkerRow
from perdure.model.write import (
    Accept,
    AddEvent,
    Advance,
    Advanced,
    Beat,
    Branch,
    Cancel,
    Claim,
    Complete,
    Delete,
    Deliver,
    Dismiss,
    ExternalOwner,
    Outlived,
    ProcessRef,
    ProcessScope,
    Prune,
    Register,
    Release,
    Resume,
    Retire,
    SendSignal,
    Share,
    Transfer,
    WorkflowKey,
    Write,
)
from perdure.ports.store import Store
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import SqliteStore

EVENTS = (
    EventType("signal.go"),
    EventType("signal.stop"),
    EventType("tick"),
    EventType("news", wake=WakeRule()),
)


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    made: Store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "agent.db")
    await made.open()
    yield made
    await made.close()


def asked(process_id: str, recovery: Any = "rerunnable", **more: Any) -> Registration:
    return Registration(process_id, "function", recovery, events=EVENTS, **more)


async def begun(store: Store, process_id: str, recovery: Any = "rerunnable", **more: Any) -> ProcessScope:
    row = (await store.write(Register(asked(process_id, recovery, **more), 1, "w1"))).row
    scope = ProcessScope(process_id, row.pid, "w1", 1)
    await store.write(Advance(scope, 2, (Node(0, b"begun"),), first=True, seen=1))
    return scope


async def parked(store: Store, process_id: str, *waits: WaitOn, **more: Any) -> ProcessScope:
    scope = await begun(store, process_id, **more)
    assert (await store.write(Advance(scope, 3, (Node(1, b"parks"),), park=waits, seen=2))).parked
    return scope


async def ended(store: Store, scope: ProcessScope, at: int = 9) -> Advanced:
    return await store.write(Advance(scope, at, outcome=Success(scope.id)))


async def found(store: Store, process_id: str) -> ProcessRow:
    row = await store.process(process_id)
    assert row is not None
    return row


def ids(rows: Any) -> list[str]:
    return [row.id for row in rows]


# ---------------------------------------------------------------------- parked


async def test_a_parked_process_is_nobodys_work_until_its_time_has_come(store: Store) -> None:
    await parked(store, "late", WaitOn("1", "time", due=90))
    await parked(store, "soon", WaitOn("1", "time", due=60), WaitOn("2", "time", due=80))
    await parked(store, "never", WaitOn("1", "signal", "go"))
    await parked(store, "same time", WaitOn("1", "time", due=60))

    assert await store.active_processes() == []
    assert ids(await store.due_processes(59)) == []
    assert ids(await store.due_processes(60)) == ["soon", "same time"]
    assert ids(await store.due_processes(99)) == ["soon", "same time", "late"]
    assert not (await store.write(Claim(ProcessRef("late"), "w2", 1, 89))).won
    assert (await store.write(Claim(ProcessRef("late"), "w2", 1, 90))).won
    late = await found(store, "late")
    assert (late.status, late.due, late.attempts) == ("running", None, 1)
    assert ids(await store.due_processes(99)) == ["soon", "same time"]


async def test_only_the_signal_that_it_waits_for_brings_it_back(store: Store) -> None:
    await parked(store, "p", WaitOn("1", "signal", "go"))

    assert (await store.write(SendSignal("p", "stop", 1, "k1", 5))).row.status == "waiting"
    assert (await store.write(AddEvent("p", Event("tick", 1, 6), 6))).row.status == "waiting"
    told = await store.write(SendSignal("p", "go", 1, "k2", 7))

    assert (told.row.status, told.row.record.waits) == ("running", ())
    assert ids(await store.active_processes()) == ["p"]


async def test_exactly_those_that_wait_for_a_process_go_on_with_its_end(store: Store) -> None:
    target, other = await begun(store, "target"), await begun(store, "other")
    await parked(store, "one", WaitOn("1", "process", "target"))
    await parked(store, "any", WaitOn("1", "process", "other"), WaitOn("2", "process", "target"))
    await parked(store, "stranger", WaitOn("1", "process", "other"))

    assert ids((await ended(store, target)).woken) == ["one", "any"]
    assert ids((await ended(store, other)).woken) == ["stranger"]
    log = [event.type for _, _, event in await store.events((await found(store, "any")).pid)]
    assert log.count("process.resumed") == 1


async def test_a_process_sleeps_through_the_end_of_what_it_once_waited_for(store: Store) -> None:
    target = await begun(store, "target")
    scope = await parked(store, "p", WaitOn("1", "signal", "go"), WaitOn("2", "process", "target"))
    row = (await store.write(SendSignal("p", "go", None, "k", 4))).row
    await store.write(Claim(ProcessRef("p"), "w2", row.generation, 5))
    seen, again = (await found(store, "p")).record.sequence, ProcessScope("p", scope.pid, "w2", 2)
    assert (await store.write(Advance(again, 6, park=(WaitOn("3", "time", due=99),), seen=seen))).parked

    assert (await ended(store, target)).woken == ()
    assert (await found(store, "p")).status == "waiting"


async def test_nobody_parks_on_what_is_over_pruned_or_unknown(store: Store) -> None:
    await ended(store, await begun(store, "over"))
    await ended(store, await begun(store, "pruned"), at=3)
    await store.write(Prune(4, 9))
    scope = await begun(store, "p")

    for ordinal, target in enumerate(["over", "pruned", "unknown"], 1):
        waits = (WaitOn("1", "process", target),)
        assert not (await store.write(Advance(scope, 5, (Node(ordinal, b"r"),), park=waits, seen=2))).parked


async def test_who_waits_for_a_caller_that_departed_goes_on(store: Store) -> None:
    await store.write(Register(asked("outside", "externally_owned"), 1))
    await parked(store, "p", WaitOn("1", "process", "outside"))

    told = await store.write(AddEvent("outside", Event("process.caller_departed", None, 5), 5))

    assert (told.row.status, ids(told.woken)) == ("caller_departed", ["p"])
    with pytest.raises(Conflict, match="is caller_departed"):
        await store.write(Complete("outside", Success(), ExternalOwner(), 6))


# ---------------------------------------------------------------------- families


async def test_children_that_are_to_end_with_their_parent_are_asked_to_in_the_same_write(store: Store) -> None:
    parent = await begun(store, "parent")
    await begun(store, "worked on", parent="parent", parent_end="cancel")
    await parked(store, "parked", WaitOn("1", "signal", "go"), parent="parent", parent_end="cancel")
    await store.write(Register(asked("not begun", parent="parent", parent_end="cancel"), 2))
    await begun(store, "free", parent="parent", parent_end="abandon")
    await begun(store, "no child")
    await begun(store, "asked before", parent="parent", parent_end="cancel")
    await store.write(Cancel(ProcessRef("asked before"), CancelRequest("ann"), 3))

    done = await ended(store, parent)

    # Those that have something to do, and the one that has ended: somebody may wait for it.
    assert sorted(ids(done.woken)) == ["not begun", "parked", "worked on"]
    request = CancelRequest("parent parent", "its parent has ended")
    for name in ("worked on", "parked"):
        row = await found(store, name)
        assert (row.record.cancel, row.status) == (request, "running")
    assert (await found(store, "not begun")).record.outcome == Cancelled(request.by, request.reason)
    for name in ("free", "no child"):
        assert (await found(store, name)).record.cancel is None
    assert (await found(store, "asked before")).record.cancel == CancelRequest("ann")


async def test_a_family_that_cannot_go_on_ends_whole_however_deep_it_is(store: Store) -> None:
    await begun(store, "0")
    for n in range(1, 400):
        scope = await begun(store, str(n), parent=str(n - 1), parent_end="cancel")
        await store.write(Release(scope, 3, "stuck"))
    root = ProcessScope("0", 1, "w1", 1)

    await ended(store, root)

    assert {(await found(store, str(n))).status for n in range(1, 400)} == {"cancelled"}


async def test_a_child_that_comes_after_the_end_of_its_parent_is_asked_at_once(store: Store) -> None:
    await ended(store, await begun(store, "parent"))

    late = (await store.write(Register(asked("late", parent="parent", parent_end="cancel"), 10))).row
    mine = (await store.write(Register(asked("claimed", parent="parent", parent_end="cancel"), 10, "w1"))).row
    free = (await store.write(Register(asked("free", parent="parent"), 10))).row

    assert (late.status, mine.status, free.status) == ("cancelled", "running", "running")
    assert mine.record.cancel is not None
    with pytest.raises(UnknownProcess, match="'nobody'"):
        await store.write(Register(asked("orphan", parent="nobody"), 10))
    assert await store.process("orphan") is None


async def test_work_that_begins_with_its_registration_is_found_where_that_says(store: Store) -> None:
    write = Register(asked("p", "reattachable"), 5, "w1", reference={"job": "4d5"}, store="here")
    row = (await store.write(write)).row

    assert row.record.first_started == FirstStart("w1", 1, 1, 5, "here")
    assert (row.record.external_ref, row.after_owner_death) == ({"job": "4d5"}, "reattach")
    assert row == await found(store, "p")
    types = [event.type for _, _, event in await store.events(row.pid)]
    assert types == ["process.created", "process.first_started", "process.external_ref_set"]
    # Asked for by another worker, which had another place in mind, it is the process that is there.
    again = await store.write(Register(asked("p", "reattachable"), 6, "w2", reference={"job": "000"}, store="here"))
    assert (again.known, again.row) == (True, row)


@pytest.mark.parametrize(
    "write",
    [
        Register(asked("p", "reattachable"), 10, reference={"job": "4d5"}),
        Register(asked("p", "externally_owned"), 10, "w1", reference={"job": "4d5"}),
        Register(asked("p", parent="over", parent_end="cancel"), 10, "w1", reference={"job": "4d5"}),
    ],
    ids=["without an owner", "of others", "to be stopped at once"],
)
async def test_work_that_no_worker_begins_is_not_begun_by_its_registration(store: Store, write: Register) -> None:
    await ended(store, await begun(store, "over"))

    row = (await store.write(write)).row

    assert (row.record.first_started, row.record.external_ref) == (None, None)


# ---------------------------------------------------------------------- whose work it is


async def test_work_that_is_bound_to_its_owner_is_given_up_when_it_is_let_go(store: Store) -> None:
    scope = await begun(store, "p", "owner_bound")
    await parked(store, "waiter", WaitOn("1", "process", "p"))

    gone = await store.write(Release(scope, 7))

    assert gone.row.record.outcome == Abandoned(Evidence("owner_drain", 7, "w1", "its owner let it go"))
    assert ids(gone.woken) == ["waiter"]


async def test_work_that_is_bound_to_its_owner_and_not_begun_is_anybodys(store: Store) -> None:
    row = (await store.write(Register(asked("p", "owner_bound"), 1, "w1"))).row
    await store.write(Release(ProcessScope("p", row.pid, "w1", 1), 2))

    assert (await store.write(Claim(ProcessRef("p"), "w2", 1, 3))).won


async def test_a_silent_owner_keeps_what_is_bound_to_it_unless_somebody_asked_to_abandon_it(store: Store) -> None:
    await begun(store, "p", "owner_bound")

    assert not (await store.write(Claim(ProcessRef("p"), "w2", 1, 99))).won
    assert (await found(store, "p")).owner == "w1"
    await store.write(AddEvent("p", Event("process.abandon_requested", {"by": "ann", "reason": "gone"}, 100), 100))
    taken = await store.write(Claim(ProcessRef("p"), "w2", 1, 101))

    assert not taken.won
    assert (await found(store, "p")).record.outcome == Abandoned(Evidence("reconciled_request", 101, "w1", "ann: gone"))


async def test_a_parked_process_that_was_bound_to_its_owner_is_anybodys(store: Store) -> None:
    """Everything it had done is written down: nothing was in flight."""
    await parked(store, "p", WaitOn("1", "time", due=5), recovery="owner_bound")

    assert (await store.write(Claim(ProcessRef("p"), "w2", 1, 5))).won


async def test_a_worker_that_leaves_gives_up_what_is_bound_to_it_and_frees_the_rest(store: Store) -> None:
    for recovery in ("owner_bound", "rerunnable", "reattachable"):
        await begun(store, recovery, recovery)
    await store.write(Register(asked("not begun", "owner_bound"), 1, "w1"))

    await store.write(Retire("w1", at=7))

    assert (await found(store, "owner_bound")).record.outcome == Abandoned(
        Evidence("owner_drain", 7, "w1", "its owner left")
    )
    assert [(r.id, r.owner, r.status) for r in await store.active_processes()] == [
        ("rerunnable", None, "running"),
        ("reattachable", None, "running"),
        ("not begun", None, "running"),
    ]


async def test_an_owner_that_took_a_process_again_cannot_write_as_who_it_was(store: Store) -> None:
    old = await parked(store, "p", WaitOn("1", "time", due=5))
    row = (await store.write(Claim(ProcessRef("p"), "w1", 1, 5))).row
    assert row is not None
    assert (row.owner, row.generation) == ("w1", 2)

    writes: list[Write[Any]] = [Advance(old, 6, (Node(2, b"late"),)), Advance(old, 6, outcome=Success())]
    for late in (*writes, Release(old, 6, "why")):
        with pytest.raises(Fenced):
            await store.write(late)

    assert await found(store, "p") == row


async def test_attempts_count_only_what_was_begun(store: Store) -> None:
    await store.write(Register(asked("p", max_attempts=2), 1, "w1"))
    row = (await store.write(Claim(ProcessRef("p"), "w2", 1, 2))).row
    assert row is not None
    assert row.attempts == 1, "w1 died before it had begun"
    scope = ProcessScope("p", row.pid, "w2", 2)
    await store.write(Advance(scope, 3, (Node(0, b"begun"),), first=True, seen=1))
    again = (await store.write(Claim(ProcessRef("p"), "w3", 2, 4))).row
    assert again is not None
    assert again.attempts == 2

    taken = await store.write(Claim(ProcessRef("p"), "w4", 3, 5))

    assert not taken.won
    outcome = (await found(store, "p")).record.outcome
    assert outcome == Failure("attempts_exhausted", "it was begun 2 times, and its owners died")


async def test_an_owner_that_died_before_it_began_has_used_up_no_attempt(store: Store) -> None:
    await store.write(Register(asked("p", max_attempts=1), 1, "w1"))

    assert (await store.write(Claim(ProcessRef("p"), "w2", 1, 2))).won


def suspected(generation: int) -> Claim[ProcessRow]:
    """A takeover from a worker that died with process `p` as its only suspect."""
    death = Death(f"w{generation}", suspect=-1)
    return Claim(ProcessRef("p"), f"w{generation + 1}", generation, 5, death=death)


async def test_three_deaths_as_the_only_suspect_and_it_is_stuck_until_a_person_looks(store: Store) -> None:
    await begun(store, "p")
    for generation in (1, 2):
        assert (await store.write(Claim(ProcessRef("p"), f"w{generation + 1}", generation, 5))).won
    for generation in (3, 4):
        assert (await store.write(suspected(generation))).won

    last = await store.write(suspected(5))

    assert not last.won
    assert last.row == (stuck := await found(store, "p"))
    assert (stuck.stuck or "").startswith("3 workers in a row took it over and died without a new record")
    assert await store.active_processes() == []
    with pytest.raises(Fenced):
        await store.write(Advance(ProcessScope("p", 1, "w5", 5), 7, outcome=Success()))
    revived = await store.write(Resume(ProcessRef("p"), 8))
    assert revived is not None
    assert (revived.stuck, revived.takeovers) == (None, 5)
    assert (await store.write(Claim(ProcessRef("p"), "w7", 6, 9))).won
    for generation in (7, 8):
        assert (await store.write(suspected(generation))).won
    assert not (await store.write(suspected(9))).won


async def test_deaths_beside_another_suspect_are_not_counted(store: Store) -> None:
    await begun(store, "p")
    for generation in range(1, 20):
        death = Death(f"w{generation}", suspect=99)
        taken = await store.write(Claim(ProcessRef("p"), f"w{generation + 1}", generation, 5, death=death))
        assert (taken.won, taken.suspect) == (True, False)

    [mark] = await store.deaths()
    assert (mark.scope, mark.counted, mark.alone) == (-1, 0, 0)


async def test_one_os_process_runs_one_suspect_at_a_time(store: Store) -> None:
    for worker, process in (("v1", "one"), ("v2", "one"), ("v3", "two")):
        await store.write(Beat(WorkerRow(worker, "here", "boot", 1, 0, process=process)))
    for name in ("p", "q"):
        await begun(store, name)
        await store.write(Claim(ProcessRef(name), "w2", 1, 5))
    first = await store.write(Claim(ProcessRef("p"), "v1", 2, 6, lived=500))

    held = await store.write(Claim(ProcessRef("q"), "v2", 2, 7))
    elsewhere = await store.write(Claim(ProcessRef("q"), "v3", 2, 8))

    assert (first.won, first.suspect) == (True, True)
    assert (held.won, held.suspect, held.row and held.row.generation) == (False, True, 2)
    assert (elsewhere.won, elsewhere.suspect) == (True, True)
    assert {row.id: row.suspect for row in await store.workers()} == {"v1": -1, "v2": None, "v3": -2}


@pytest.mark.parametrize("way", ["a record", "its end", "let go", "outlived"])
async def test_a_suspect_makes_room(store: Store, way: str) -> None:
    await store.write(Beat(WorkerRow("v1", "here", "boot", 1, 0, process="one")))
    for name in ("p", "q"):
        await begun(store, name)
        await store.write(Claim(ProcessRef(name), "w2", 1, 5))
    assert (await store.write(Claim(ProcessRef("p"), "v1", 2, 6))).suspect
    assert not (await store.write(Claim(ProcessRef("q"), "v1", 2, 6))).won
    scope = ProcessScope("p", 1, "v1", 3)

    if way == "a record":
        await store.write(Advance(scope, 7, (Node(1, b"1"),)))
    elif way == "its end":
        await store.write(Advance(scope, 7, outcome=Success()))
    elif way == "let go":
        await store.write(Release(scope, 7))
    else:
        assert await store.write(Outlived(-1, "v1"))
        assert await store.write(Outlived(-1, "v1")), "sent again, because its reply was lost"

    taken = await store.write(Claim(ProcessRef("q"), "v1", 2, 8))
    assert (taken.won, taken.suspect) == (True, True)


async def test_a_worker_that_was_relieved_of_its_suspect_may_run_another(store: Store) -> None:
    await store.write(Beat(WorkerRow("v1", "here", "boot", 1, 0, process="one")))
    for name in ("p", "q"):
        await begun(store, name)
        await store.write(Claim(ProcessRef(name), "w2", 1, 5))
    await store.write(Claim(ProcessRef("p"), "v1", 2, 6))
    await store.write(Claim(ProcessRef("p"), "other", 3, 7))

    assert (await store.write(Claim(ProcessRef("q"), "v1", 2, 8))).won


async def test_the_row_of_a_dead_worker_stays_until_all_that_died_with_it_is_claimed(store: Store) -> None:
    """It says which suspect ran when the others died."""
    for worker in ("v1", "v2"):
        await store.write(Beat(WorkerRow(worker, "here", "boot", 1, 0, process="one")))
    await begun(store, "p")
    await store.write(Claim(ProcessRef("p"), "w2", 1, 5))
    await store.write(Claim(ProcessRef("p"), "v1", 2, 6))
    await store.write(Register(asked("q"), 6, "v2"))
    dead = ("v1", "v2")
    await store.write(Claim(ProcessRef("p"), "next", 3, 7, death=Death("v1", suspect=-1)))
    await store.write(Retire("v1", dead=True, beside=dead))
    kept = [row.id for row in await store.workers()]
    await store.write(Claim(ProcessRef("q"), "next", 1, 8, death=Death("v2", suspect=-1)))
    for worker in dead:
        await store.write(Retire(worker, dead=True, beside=dead))

    assert kept == ["v1", "v2"]
    assert await store.workers() == []
    assert {mark.scope: mark.counted for mark in await store.deaths()} == {-1: 3, -2: 0}


async def test_a_record_makes_deaths_count_from_the_start(store: Store) -> None:
    await begun(store, "p")
    for generation in (1, 2, 3, 4):
        await store.write(
            suspected(generation) if generation > 2 else Claim(ProcessRef("p"), f"w{generation + 1}", generation, 5)
        )
    await store.write(Advance(ProcessScope("p", 1, "w5", 5), 6, (Node(1, b"1"),)))

    assert await store.deaths() == []
    taken = await store.write(Claim(ProcessRef("p"), "w6", 5, 7))
    assert (taken.won, taken.suspect) == (True, False)


async def test_a_record_that_only_repeats_lets_deaths_be_counted_on(store: Store) -> None:
    await begun(store, "p")
    for generation in (1, 2, 3, 4):
        await store.write(
            suspected(generation) if generation > 2 else Claim(ProcessRef("p"), f"w{generation + 1}", generation, 5)
        )
    repeat = Advance(ProcessScope("p", 1, "w5", 5), 6, (Node(1, b"1"),), repeats=True)
    assert (await store.write(repeat)).row.takeovers == 4

    assert not (await store.write(suspected(5))).won
    assert "died without a new record" in ((await found(store, "p")).stuck or "")


async def test_a_stuck_process_that_is_cancelled_ends_and_says_that_nobody_knows(store: Store) -> None:
    scope = await begun(store, "p")
    await store.write(Release(scope, 3, "diverged"))

    stopped = await store.write(Cancel(ProcessRef("p"), CancelRequest("ann", "enough"), 4))

    assert stopped.row is not None
    assert stopped.row.record.outcome == Cancelled("ann", "enough", unknown=True)
    assert stopped.row.stuck is None


async def test_what_nobody_owns_is_ended_by_whoever_may_also_when_it_is_stuck_or_parked(store: Store) -> None:
    scope = await begun(store, "stuck")
    await store.write(Release(scope, 3, "why"))
    await parked(store, "parked", WaitOn("1", "signal", "go"))
    await begun(store, "owned")

    for name in ("stuck", "parked"):
        assert (await store.write(Complete(name, Success(1), WorkflowKey("wf"), 5))).status == "committed"
        ending = await store.write(Complete(name, Success((1,)), WorkflowKey("wf"), 6))
        assert ending.status == "superseded"
    with pytest.raises(Conflict, match="owned by worker 'w1'"):
        await store.write(Complete("owned", Success(1), WorkflowKey("wf"), 5))


# ---------------------------------------------------------------------- journals


async def test_a_record_that_contradicts_the_journal_is_refused_and_nothing_is_written(store: Store) -> None:
    scope = await begun(store, "p")
    events = await store.events(scope.pid)

    with pytest.raises(InternalError, match="exists with other content"):
        await store.write(Advance(scope, 3, (Node(0, b"other"),), (Event("tick", 1, 3),), outcome=Success()))
    with pytest.raises(InternalError, match="would drop its whole journal"):
        await store.write(Advance(scope, 3, (Node(1, b"1"),), drop=2))

    assert await store.events(scope.pid) == events
    assert await store.steps(scope.pid) == [(0, b"begun")]


async def test_a_key_of_an_event_is_used_once_whoever_uses_it(store: Store) -> None:
    scope = await begun(store, "p")
    await store.write(SendSignal("p", "go", {"n": (1, 2)}, "k", 3))

    with pytest.raises(Conflict, match="'k'"):
        await store.write(Advance(scope, 4, (Node(1, b"1"),), (Event("tick", None, 4, "k"),), seen=3))
    assert await store.steps(scope.pid) == [(0, b"begun")]
    again = await store.write(SendSignal("p", "go", {"n": [1, 2]}, "k", 9))
    assert (again.known, again.sequence) == (True, 3)


async def test_a_mark_that_says_nonsense_is_refused(store: Store) -> None:
    await begun(store, "p")

    for payload in (None, {"by": 7}, "ann"):
        with pytest.raises(InvalidProcess, match="cannot say this"):
            await store.write(AddEvent("p", Event("process.abandon_requested", payload, 3), 3))
    for kind in ("process.completed", "process.resumed", "process.invented", "process."):
        with pytest.raises(InvalidProcess, match="is reserved"):
            await store.write(AddEvent("p", Event(kind, None, 3), 3))
    assert (await found(store, "p")).record.sequence == 2


# ---------------------------------------------------------------------- who hears of it


async def told_once(store: Store, session_id: str, *, turn: bool, body: bytes = b"told") -> Any:
    numbers = tuple(wake.number for wake in await store.wakes(session_id))
    return await store.write(Deliver(session_id, "clerk", numbers, body, "op", 20, turn, "w1"))


async def test_a_busy_session_is_told_when_it_is_idle_and_then_of_everything_at_once(store: Store) -> None:
    await store.write(Accept("chat", "clerk", b"busy", "op", 1))
    for name in ("one", "two"):
        await ended(store, await begun(store, name, wake=WakeTarget("chat")))

    assert await told_once(store, "chat", turn=True) is None
    assert len(await store.wakes("chat")) == 2
    noted = await told_once(store, "chat", turn=False)
    assert (noted.turn, noted.opened) == (2, False)
    assert await store.wakes("chat") == []
    assert [wake.turn for wake in await store.wakes("chat", "enqueued")] == [2, 2]


async def test_an_idle_session_or_one_that_never_was_is_told_in_a_turn_of_its_own(store: Store) -> None:
    await ended(store, await begun(store, "p", wake=WakeTarget("new")))

    told = await told_once(store, "new", turn=True)

    assert (told.turn, told.opened, told.row.owner) == (1, True, "w1")


async def test_one_wake_that_is_gone_and_the_body_that_tells_of_it_is_not_delivered(store: Store) -> None:
    for name in ("one", "two"):
        await ended(store, await begun(store, name, wake=WakeTarget("chat")))
    one, two = await store.wakes("chat")
    await store.write(Dismiss((two.number,), 10, "expired"))
    other = Deliver("chat", "clerk", (one.number, two.number), b"of both", "op", 20)

    assert await store.write(other) is None
    assert await store.session("chat") is None
    (back,) = await store.write(Dismiss((two.number,), 11))
    assert (back.state, back.reason) == ("pending", None)
    assert await store.write(other) is not None


async def test_what_a_session_has_not_heard_of_goes_to_whoever_is_told_instead(store: Store) -> None:
    scope = await begun(store, "p", wake=WakeTarget("first"))
    await ended(store, await begun(store, "other", wake=WakeTarget("first")))
    for at in (3, 4):
        await store.write(AddEvent("p", Event("news", at, at), at))
    first = next(wake for wake in await store.wakes("first") if wake.pid == scope.pid)
    await store.write(Deliver("first", "clerk", (first.number,), b"told", "op", 5))

    await store.write(AddEvent("p", Event("process.subscription_retargeted", {"session_id": "second"}, 6), 6))
    await ended(store, scope)

    assert [(wake.pid, wake.at) for wake in await store.wakes("second")] == [(scope.pid, 4), (scope.pid, 9)]
    assert [wake.pid for wake in await store.wakes("first")] != [scope.pid]
    assert len(await store.wakes("first")) == 1
    nobody = {"session_id": "second", "policy": "none"}
    await begun(store, "q", wake=WakeTarget("third"))
    await store.write(AddEvent("q", Event("news", 1, 7), 7))
    await store.write(AddEvent("q", Event("process.subscription_retargeted", nobody, 8), 8))
    assert [wake.state for wake in await store.wakes("third", "discarded")] == ["discarded"]


async def test_a_deleted_session_hears_nothing_and_holds_nothing_up(store: Store) -> None:
    await store.write(Accept("chat", "clerk", b"said", "op", 1))
    await ended(store, await begun(store, "p", wake=WakeTarget("chat")))
    await store.write(Share("chat", ("p",), 10))

    await store.write(Delete("chat", 11))

    (wake,) = await store.wakes("chat", "discarded")
    assert wake.reason == "its session was deleted"
    assert not await store.is_granted("chat", "p")
    with pytest.raises(SessionDeleted):
        await store.write(Share("chat", ("p",), 12))
    with pytest.raises(SessionDeleted):
        await store.write(Deliver("chat", "clerk", (wake.number,), b"told", "op", 12))
    assert await store.write(Prune(20, 20)) == ("p",)


async def test_children_of_the_turn_of_a_deleted_session_are_asked_to_stop(store: Store) -> None:
    await store.write(Accept("chat", "clerk", b"said", "op", 1))
    await begun(store, "p", parent="chat.1", parent_end="cancel")

    await store.write(Delete("chat", 11))

    assert (await found(store, "p")).record.cancel == CancelRequest("parent chat.1", "its parent has ended")


async def test_a_fork_sees_what_it_was_given_and_its_source_saw(store: Store) -> None:
    await store.write(Accept("chat", "clerk", b"said", "op", 1))
    for name in ("seen", "kept", "unseen"):
        await begun(store, name)
    await store.write(Share("chat", ("seen", "kept"), 3))

    await store.write(Branch("fork", "clerk", "chat", 1, 0, 4, ("seen", "unseen", "nothing")))

    seen = [name for name in ("seen", "kept", "unseen") if await store.is_granted("fork", name)]
    assert seen == ["seen"]


async def test_a_process_is_handed_on_from_one_session_to_another_and_never_to_itself_away(store: Store) -> None:
    await begun(store, "p", origin=SessionOrigin("a"), wake=WakeTarget("a", "clerk", "notify"))
    await store.write(Share("a", ("p",), 3))

    assert await store.write(Transfer("a", "b", ("p",), 4)) == 1
    assert await store.grantees("p") == ["b"]
    assert await store.write(Transfer("b", "b", ("p",), 5)) == 0
    assert await store.grantees("p") == ["b"]
    row = await store.process("p")
    assert row is not None
    assert (row.holder, row.record.wake) == ("b", WakeTarget("b", "clerk", "notify"))


async def test_processes_are_handed_on_all_or_none(store: Store) -> None:
    for name in ("mine", "shared", "foreign"):
        await begun(store, name, origin=SessionOrigin("a" if name == "mine" else "c"))
    await store.write(Share("a", ("mine", "shared"), 3))
    with pytest.raises(ProcessNotVisible, match="foreign"):
        await store.write(Transfer("a", "b", ("mine", "foreign"), 4))
    assert await store.grantees("mine") == ["a"]

    assert await store.write(Transfer("a", "b", ("mine", "shared"), 5)) == 2
    held = [row.holder for name in ("mine", "shared") if (row := await store.process(name)) is not None]
    assert held == ["b", "c"]


async def test_a_session_has_one_live_task_of_a_name_however_it_comes_by_it(store: Store) -> None:
    async def registered(process_id: str, session_id: str) -> None:
        spec = {"task": "watch", "token": process_id}
        task = Registration(process_id, "external", "externally_owned", "watch", input=spec)
        await store.write(Register(replace(task, origin=SessionOrigin(session_id)), 3, grants=(session_id,)))

    await registered("one", "a")
    with pytest.raises(Conflict, match="session 'a' has a live task 'watch'"):
        await registered("two", "a")
    await registered("three", "b")
    with pytest.raises(Conflict, match="session 'b' has a live task 'watch'"):
        await store.write(Transfer("a", "b", ("one",), 4))

    await store.write(Complete("three", Success(), ExternalOwner(), 5))
    assert await store.write(Transfer("a", "b", ("one",), 6)) == 1


# ---------------------------------------------------------------------- retention


async def test_what_may_not_be_pruned_does_not_keep_the_rest_from_it(store: Store) -> None:
    """A limit counts what goes, not what was looked at."""
    for number in range(5):
        await ended(store, await begun(store, f"waits {number}", wake=WakeTarget("chat")), at=3)
    failing = await begun(store, "failed")
    await store.write(Advance(failing, 4, outcome=Failure("bug")))
    await ended(store, await begun(store, "over"), at=5)
    await begun(store, "alive")

    assert await store.write(Prune(9, 9, ("completed",), limit=1)) == ("over",)
    assert await store.write(Prune(9, 9, limit=1)) == ("failed",)
    assert await store.write(Prune(9, 9, limit=1)) == ()


async def test_who_looks_at_a_process_after_its_end_does_not_keep_it(store: Store) -> None:
    await ended(store, await begun(store, "p"), at=3)
    await store.write(Share("chat", ("p",), 50))

    assert (await found(store, "p")).record.updated == 3
    assert await store.write(Prune(10, 60)) == ("p",)


async def test_what_a_projector_has_not_seen_is_not_pruned(store: Store) -> None:
    await ended(store, await begun(store, "p"), at=3)
    seen = await store.last_change()
    await ended(store, await begun(store, "q"), at=4)

    assert await store.write(Prune(10, 10, watermark=seen)) == ("p",)


async def test_a_blob_goes_with_the_last_process_that_refers_to_it(store: Store) -> None:
    digest = await store.blobs.put(b"large")
    for name in ("p", "q"):
        scope = await begun(store, name)
        await store.write(Advance(scope, 3, (Node(1, b"see the blob"),), outcome=Success(), blobs=(digest,)))

    await store.write(Prune(10, 10, limit=1))
    assert await store.sweep(grace=0) == 0
    await store.write(Prune(10, 10))
    assert await store.sweep(grace=0) == 1


async def test_a_tombstone_keeps_nothing_but_its_name(store: Store) -> None:
    scope = await begun(store, "p", input="secret", label="secret", wake=WakeTarget("chat", policy="none"))
    await store.write(Advance(scope, 3, outcome=Success("secret")))
    await store.write(Share("chat", ("p",), 4))
    await store.write(Prune(10, 10))

    tomb = await found(store, "p")

    assert (tomb.status, tomb.pruned, tomb.live) == ("completed", 10, False)
    assert "secret" not in repr(tomb)
    assert await store.steps(scope.pid) == []
    assert await store.events(scope.pid) == []
    assert not await store.is_granted("chat", "p")
    assert ids(row for _, row in await store.changes()) == ["p"]


@pytest.mark.parametrize(
    ("other", "refusal"),
    [
        ({"input": {"b": 2, "a": 1}}, ProcessPruned),
        ({"input": {"a": 1, "b": 2}, "label": "again", "definition": "2"}, ProcessPruned),
        ({"input": {"a": 1, "b": 3}}, ProcessConflict),
        ({"input": {"a": 1, "b": 2}, "name": "other"}, ProcessConflict),
    ],
    ids=["the same", "with newer code", "other arguments", "another function"],
)
async def test_who_asks_for_something_else_under_the_id_of_a_pruned_process_is_told_of_the_conflict(
    store: Store, other: dict[str, Any], refusal: type[Exception]
) -> None:
    await ended(store, await begun(store, "p", input={"a": 1, "b": 2}), at=3)
    await store.write(Prune(10, 10))

    with pytest.raises(refusal):
        await store.write(Register(asked("p", **other), 11, "w1"))


async def test_the_number_of_a_pruned_process_is_never_that_of_a_later_one(store: Store) -> None:
    first = await begun(store, "first")
    newest = await begun(store, "newest")
    await ended(store, newest, at=3)
    await store.write(Prune(10, 10))
    await ended(store, first, at=11)
    await store.write(Prune(20, 20))

    later = await begun(store, "later")

    assert later.pid == newest.pid + 1
    with pytest.raises(Fenced):
        await store.write(Advance(newest, 21, (Node(2, b"late"),)))


async def test_the_change_feed_tells_of_pruned_processes_in_order_and_page_by_page(store: Store) -> None:
    for at, name in enumerate(["p", "q", "r"], 3):
        await ended(store, await begun(store, name), at=at)
    await begun(store, "s")
    cursor = await store.last_change()
    await store.write(Prune(10, 10, limit=2))
    await begun(store, "t")

    pages, after = [], cursor
    while page := await store.changes(after, 1):
        pages.append([(row.id, row.pruned) for _, row in page])
        after = page[-1][0]

    assert pages[:2] == [[("p", 10)], [("q", 10)]]
    assert {name for page in pages[2:] for name, _ in page} == {"t"}
    assert after == await store.last_change()
    assert ids(row for _, row in await store.changes()) == ["r", "s", "p", "q", "t"]
