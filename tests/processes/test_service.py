"""What a host may do with processes, whoever works on them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import ProcessContext, Runtime, process
from perdure.engine.runner import Stage
from perdure.errors import (
    Conflict,
    InvalidHandle,
    InvalidInput,
    InvalidProcess,
    ProcessAbandoned,
    ProcessCancelled,
    ProcessConflict,
    ProcessEnded,
    ProcessFailed,
    ProcessPruned,
    TimedOut,
    UndeclaredEvent,
    UnknownProcess,
    WrongAuthority,
)
from perdure.model.process import Abandoned, EventType, Evidence, NoLongerRetained, Registration, Success, WakeTarget
from perdure.model.write import ReconciledAbandon, Register, WorkflowKey
from tests.kit import SOON, Place, until


async def double(n: int) -> int:
    return 2 * n


@process
async def doubling(ctx: ProcessContext, n: int) -> int:
    return await ctx.step(double, n)


@process(signals={"go": dict[str, int]}, events=["half_way"])
async def waiting(ctx: ProcessContext) -> Any:
    await ctx.emit("half_way", {"percent": 50})
    return await ctx.wait_signal("go")


@process
async def asking(ctx: ProcessContext) -> list[Any]:
    return [await ctx.wait_signal("approve"), await ctx.wait_signal("aprove")]


def working(place: Place, **options: Any) -> Runtime:
    return place.runtime(processes=[doubling, waiting], **options)


async def parked(runtime: Runtime, process_id: str) -> None:
    async def is_parked() -> bool:
        row = await runtime.store.process(process_id)
        return row is not None and row.status == "waiting" and row.owner is None

    await until(is_parked)


# ---------------------------------------------------------------------- starting


async def test_a_started_process_is_on_disk_and_ends_with_its_value(place: Place) -> None:
    async with working(place) as runtime:
        handle = await runtime.start(doubling, {"n": 4}, id="d-1", label="a doubling")
        row = await runtime.processes.get("d-1")

        assert row.registration.label == "a doubling"
        assert await handle.result(SOON) == 8
        assert [e.type async for e in handle.events()] == [
            "process.created",
            "process.first_started",
            "process.completed",
        ]


async def test_asking_twice_starts_once_and_other_content_is_a_conflict(place: Place) -> None:
    async with working(place) as runtime:
        first = await runtime.start(doubling, {"n": 4}, id="d-1")
        await first.result(SOON)
        again = await runtime.start(doubling, {"n": 4}, id="d-1")

        assert again == first
        with pytest.raises(ProcessConflict, match="'d-1'"):
            await runtime.start(doubling, {"n": 5}, id="d-1")
        assert len(await runtime.processes.list()) == 1


@pytest.mark.parametrize("what", [print, object(), "nobody", 7])
async def test_what_is_no_process_cannot_be_started(what: object) -> None:
    async with Runtime("memory", processes=[doubling]) as runtime:
        with pytest.raises(InvalidProcess, match="cannot be started"):
            await runtime.start(what)


async def test_arguments_are_checked_before_anything_is_written(place: Place) -> None:
    async with working(place) as runtime:
        with pytest.raises(InvalidProcess, match="doubling"):
            await runtime.start(doubling, {"n": "many"})
        with pytest.raises(InvalidProcess, match="doubling"):
            await runtime.start(doubling, {"m": 1})
        with pytest.raises(InvalidProcess, match="no '#'"):
            await runtime.start(doubling, {"n": 1}, id="a#b")

        assert await runtime.processes.list() == []


async def test_a_function_that_this_runtime_was_not_given_is_refused_with_advice() -> None:
    async with Runtime("memory", processes=[doubling]) as runtime:
        with pytest.raises(InvalidProcess, match=r"processes=\[…\]"):
            await runtime.start(waiting)


# ---------------------------------------------------------------------- handles


async def test_a_handle_works_in_another_runtime_from_its_json(place: Place) -> None:
    async with working(place) as runtime, place.runtime() as other:
        handle = await runtime.start(waiting, id="w-1")
        await parked(runtime, "w-1")
        seen = other.handle(handle.to_json())
        result = asyncio.create_task(seen.result(SOON))
        await seen.signal("go", {"n": 1})

        assert await result == {"n": 1}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "Invalid process handle: missing `__handle__`"),
        ([], "Invalid process handle: missing `__handle__`"),
        ({}, "Invalid process handle: missing `__handle__`"),
        ({"__handle__": 1, "id": "p"}, "Invalid process handle: missing `__handle__`"),
        ({"__handle__": "task", "id": "p"}, "Invalid process handle kind: task"),
        ({"__handle__": "process"}, "Invalid process handle: missing `id`"),
        ({"__handle__": "process", "id": ""}, "Invalid process handle: missing `id`"),
        ({"__handle__": "process", "id": 7}, "Invalid process handle: missing `id`"),
    ],
)
async def test_what_is_no_handle_is_refused_by_name(value: object, text: str) -> None:
    async with Runtime("memory") as runtime:
        with pytest.raises(InvalidHandle) as refused:
            runtime.handle(value)

    assert str(refused.value) == text


async def test_unknown_ids_are_typed_everywhere(place: Place) -> None:
    async with place.runtime() as runtime:
        ghost = runtime.handle("ghost")
        with pytest.raises(UnknownProcess):
            await ghost.result()
        with pytest.raises(UnknownProcess):
            await ghost.signal("go")
        with pytest.raises(UnknownProcess):
            await ghost.cancel()
        with pytest.raises(UnknownProcess):
            await ghost.status()
        with pytest.raises(UnknownProcess):
            [_ async for _ in ghost.events()]
        with pytest.raises(UnknownProcess):
            await runtime.processes.complete(ghost, 1)
        with pytest.raises(UnknownProcess):
            await runtime.processes.grant("s", "ghost")


async def test_a_time_limit_ends_the_wait_and_not_the_process(place: Place) -> None:
    async with working(place) as runtime:
        handle = await runtime.start(waiting)
        with pytest.raises(TimedOut):
            await handle.result(0.01)
        await handle.signal("go", {"n": 2})

        assert await handle.result(SOON) == {"n": 2}


async def test_a_cancelled_waiter_harms_nobody(place: Place) -> None:
    async with working(place) as runtime:
        handle = await runtime.start(waiting)
        gone, stays = (asyncio.create_task(handle.result(SOON)) for _ in range(2))
        await parked(runtime, handle.id)
        gone.cancel()
        await handle.signal("go", {"n": 3})

        assert await stays == {"n": 3}
        assert gone.cancelled()


# ---------------------------------------------------------------------- signals


async def test_a_signal_that_was_not_declared_is_refused(place: Place) -> None:
    async with working(place) as runtime:
        handle = await runtime.start(waiting)
        with pytest.raises(UndeclaredEvent, match=r"takes no signal 'stop'; it takes: go\n"):
            await handle.signal("stop")
        with pytest.raises(InvalidProcess, match="does not fit"):
            await handle.signal("go", {"n": "one"})
        with pytest.raises(InvalidProcess, match="needs a name"):
            await handle.signal("")

        types = [e.type async for e in handle.events()]
        assert not [t for t in types if t.startswith("signal.")]


async def test_the_receipt_of_a_signal_says_what_is_waited_for(place: Place) -> None:
    async with place.runtime(processes=[asking]) as runtime:
        handle = await runtime.start(asking, id="a")
        await parked(runtime, "a")
        misspelled = await handle.signal("aprove", 1)
        right = await handle.signal("approve", 2)
        assert await handle.result(SOON) == [2, 1]

        assert (misspelled.awaited, misspelled.waits_for) == (False, ("approve",))
        assert (right.awaited, right.waits_for) == (True, ())
        assert right == misspelled + 1
        assert misspelled.note("aprove") == (
            "it does not wait for 'aprove', it waits for: approve; the signal is kept until it asks for it"
        )
        assert right.note("approve") == ""


async def test_the_receipt_of_a_signal_says_what_is_waited_for_in_memory(place: Place) -> None:
    """Beside another branch that works, a wait is not parked."""
    going = asyncio.Event()

    @process
    async def busy(ctx: ProcessContext) -> Any:
        return await ctx.gather(ctx.wait_signal("approve"), ctx.step(going.wait))

    async with place.runtime(processes=[busy]) as runtime:
        handle = await runtime.start(busy, id="b")
        await until(lambda: runtime._work.signals_awaited("b") == ("approve",))
        misspelled, right = await handle.signal("aprove"), await handle.signal("approve", 2)
        going.set()
        await handle.result(SOON)

        assert (misspelled.awaited, misspelled.waits_for) == (False, ("approve",))
        assert right.awaited is True


async def test_whether_work_of_others_waits_for_a_signal_is_not_known(place: Place) -> None:
    async with working(place) as runtime:
        receipt = await (await runtime.processes.register("job", signals=["go"])).signal("go")

        assert (receipt, receipt.awaited, receipt.note("go")) == (2, None, "")


async def test_the_same_key_is_the_same_signal(place: Place) -> None:
    async with working(place) as runtime:
        handle = await runtime.processes.register("job", signals=["go"])
        first = await handle.signal("go", {"n": 1}, key="k")

        assert await handle.signal("go", {"n": 1}, key="k") == first
        with pytest.raises(Conflict, match="another event"):
            await handle.signal("go", {"n": 2}, key="k")
        assert await handle.signal("go", {"n": 1}, key="l") == first + 1


async def test_the_dead_take_no_signal(place: Place) -> None:
    async with working(place) as runtime:
        handle = await runtime.start(doubling, {"n": 1})
        await handle.result(SOON)

        with pytest.raises(ProcessEnded, match="completed"):
            await handle.signal("go")


# ---------------------------------------------------------------------- cancelling


async def test_cancelling_twice_is_one_request_and_the_end_tells_who_asked(place: Place) -> None:
    async with working(place) as runtime:
        handle = await runtime.start(waiting)
        await parked(runtime, handle.id)

        assert await handle.cancel("enough", by="operator") == "requested"
        with pytest.raises(ProcessCancelled, match="operator: enough"):
            await handle.result(SOON)
        assert await handle.cancel() == "ended"


async def test_what_nobody_has_begun_ends_at_once(place: Place) -> None:
    async with place.runtime(processes=[waiting], recover=False) as starter:
        starter._work.mode.advance(Stage.DRAINING)  # nobody has a place for it
        handle = await starter.start(waiting)

        assert await handle.cancel("not needed") == "requested"
        assert await handle.status() == "cancelled"


# ---------------------------------------------------------------------- work of others


async def test_external_work_is_completed_by_its_owner_only(place: Place) -> None:
    async with working(place) as runtime:
        build = await runtime.processes.register("build", metadata={"job": 7})
        with pytest.raises(WrongAuthority):
            await runtime.processes.complete("build", 1, authority=WorkflowKey("k"))
        await runtime.processes.set_external_ref(build, {"url": "ci/7"})

        assert (await runtime.processes.complete(build.to_json(), {"ok": True})).status == "committed"
        assert (await runtime.processes.complete(build, {"ok": True})).status == "already_applied"
        assert (await runtime.processes.complete(build, {"ok": False})).status == "superseded"
        assert await build.result() == {"ok": True}
        assert (await build.record()).record.external_ref == {"url": "ci/7"}


async def test_external_work_that_failed_says_how(place: Place) -> None:
    async with place.runtime() as runtime:
        build = await runtime.processes.register("build")
        await runtime.processes.complete(build, error="the disk is full", code="disk_full")

        with pytest.raises(ProcessFailed, match="disk_full: the disk is full"):
            await build.result()


async def test_a_worker_s_own_process_cannot_be_completed_from_outside(place: Place) -> None:
    async with working(place) as runtime:
        handle = await runtime.start(waiting)
        await parked(runtime, handle.id)
        with pytest.raises(WrongAuthority):
            await runtime.processes.complete(handle, 1)
        await runtime.processes.complete(handle, {"by": "engine"}, authority=WorkflowKey("key-1"))

        assert await handle.result() == {"by": "engine"}
        last = [e async for e in handle.events()][-1]
        assert last.payload["authority"] == {"authority": "workflow_key", "workflow_key": "key-1"}


async def test_an_abandon_request_ends_nothing_until_it_is_reconciled(place: Place) -> None:
    async with place.runtime() as runtime:
        build = await runtime.processes.register("build")
        with pytest.raises(InvalidProcess, match="nobody asked"):
            await runtime.processes.reconcile_abandon(build)
        await runtime.processes.request_abandon(build, "the machine burnt", by="operator")

        assert await build.status() == "running"
        assert (await runtime.processes.reconcile_abandon(build)).status == "committed"
        with pytest.raises(ProcessAbandoned) as given_up:
            await build.result()
        assert given_up.value.outcome["evidence"]["proof"] == "the machine burnt"


async def test_a_reconciled_abandon_may_say_nothing_else(place: Place) -> None:
    async with place.runtime() as runtime:
        build = await runtime.processes.register("build")
        with pytest.raises(WrongAuthority):
            await runtime.processes.complete(build, outcome=Success(1), authority=ReconciledAbandon())
        evidence = Evidence("reconciled_request", 1)
        await runtime.processes.complete(build, outcome=Abandoned(evidence), authority=ReconciledAbandon())

        assert await build.status() == "abandoned"


async def test_a_departed_caller_leaves_a_process_that_nobody_awaits(place: Place) -> None:
    async with working(place) as runtime:
        build = await runtime.processes.register("build")
        waiter = asyncio.create_task(build.result(SOON))
        await until(lambda: runtime._work.awaited)
        await runtime.processes.caller_departed(build)

        with pytest.raises(ProcessEnded, match="caller_departed"):
            await waiter
        with pytest.raises(ProcessEnded):
            await build.signal("go")
        own = await runtime.start(waiting)
        with pytest.raises(InvalidProcess, match="only a caller from outside"):
            await runtime.processes.caller_departed(own)


async def test_events_from_outside_must_be_declared(place: Place) -> None:
    async with place.runtime() as runtime:
        built = EventType("stage", {"type": "object", "required": ["name"]})
        build = await runtime.processes.register("build", events=[built])
        await runtime.processes.emit(build, "stage", {"name": "link"})
        with pytest.raises(InvalidProcess, match="does not fit"):
            await runtime.processes.emit(build, "stage", {})
        with pytest.raises(UndeclaredEvent):
            await runtime.processes.emit(build, "other")
        with pytest.raises(InvalidProcess, match="reserved"):
            await runtime.processes.emit(build, "process.completed", {"type": "success"})

        assert [e.type async for e in build.events()] == ["process.created", "stage"]


# ---------------------------------------------------------------------- looking


async def test_processes_are_listed_newest_first_and_filtered(place: Place) -> None:
    async with working(place) as runtime:
        await (await runtime.start(doubling, {"n": 1}, id="a", label="one")).result(SOON)
        await runtime.start(waiting, id="b")
        await parked(runtime, "b")
        await runtime.processes.register("c", label="one")

        async def ids(status: Any = None, **wanted: Any) -> list[str]:
            return [row.id for row in await runtime.processes.list(status, **wanted)]

        assert await ids() == ["c", "b", "a"]
        assert await ids(limit=2) == ["c", "b"]
        assert await ids("completed") == ["a"]
        assert await ids(["waiting", "running"]) == ["c", "b"]
        assert await ids(kind="external") == ["c"]
        assert await ids(name="waiting") == ["b"]
        assert await ids(definition="doubling@1") == ["a"]
        assert await ids(label="one") == ["c", "a"]
        assert await ids(live=True) == ["c", "b"]
        with pytest.raises(InvalidInput, match="there is no status"):
            await runtime.processes.list("sleeping")
        with pytest.raises(InvalidInput, match="filter by"):
            await runtime.processes.list(colour="red")


async def test_what_nobody_has_taken_up_yet_is_queued(file: Place) -> None:
    asked = Registration("a", "function", "rerunnable", "doubling", "doubling@1", {"n": 4})
    async with file.runtime() as front:
        await front.store.write(Register(asked, 1))
        assert await front.handle("a").status() == "queued"
        assert [row.id for row in await front.processes.list("queued")] == ["a"]
        assert await front.processes.list("running") == []
    async with working(file) as runtime:
        assert await runtime.handle("a").result(SOON) == 8
        assert await runtime.handle("a").status() == "completed"


async def test_following_events_ends_with_the_process(place: Place) -> None:
    async with working(place) as runtime:
        handle = await runtime.start(waiting)

        async def follow() -> list[str]:
            return [event.type async for event in handle.events(follow=True)]

        following = asyncio.create_task(follow())
        await parked(runtime, handle.id)
        await handle.signal("go", {"n": 1})
        async with asyncio.timeout(SOON):
            types = await following

        assert types[0] == "process.created"
        assert "half_way" in types
        assert types[-1] == "process.completed"


async def test_the_change_feed_tells_every_change_once_and_tombstones(place: Place) -> None:
    async with working(place) as runtime:
        await (await runtime.start(doubling, {"n": 1}, id="a")).result(SOON)
        await runtime.start(waiting, id="b")
        await parked(runtime, "b")
        first = await runtime.processes.changes()
        assert [(c.process_id, c.row is not None and c.row.status) for c in first] == [
            ("a", "completed"),
            ("b", "waiting"),
        ]
        assert await runtime.processes.changes(first[-1].cursor) == []

        assert await runtime.processes.prune(0) == 1
        [tombstone] = await runtime.processes.changes(first[-1].cursor)
        assert (tombstone.process_id, tombstone.row) == ("a", None)


# ---------------------------------------------------------------------- who sees it


async def test_grants_are_added_moved_and_taken_away(place: Place) -> None:
    async with working(place) as runtime:
        await runtime.processes.register("a")
        processes = runtime.processes

        async def seen_by(session_id: str) -> list[str]:
            return [row.id for row in await processes.list(session_id=session_id)]

        assert await processes.grant("s", "a") == 1
        assert await processes.grant("s", "a") == 0
        assert await seen_by("s") == ["a"]
        assert await processes.transfer("s", "t", "a") == 1
        assert (await seen_by("s"), await seen_by("t")) == ([], ["a"])
        assert await processes.transfer("t", "t", "a") == 0
        assert await processes.transfer("t", "u") == 0
        assert await processes.revoke("t", "a") == 1
        assert await seen_by("t") == []
        assert (await processes.get("a")).live


async def test_another_session_may_hear_of_it(place: Place) -> None:
    async with place.runtime() as runtime:
        build = await runtime.processes.register("a", wake=WakeTarget("s", policy="notify"))
        await runtime.processes.retarget(build, WakeTarget("t", policy="notify"))
        await runtime.processes.complete(build, 1)

        assert [w.session_id for w in await runtime.store.wakes()] == ["t"]


# ---------------------------------------------------------------------- keeping house


async def test_pruning_forgets_what_is_over_and_keeps_its_id_spent(place: Place) -> None:
    async with working(place) as runtime:
        done = await runtime.start(doubling, {"n": 1}, id="a")
        await done.result(SOON)
        live = await runtime.start(waiting, id="b")
        await parked(runtime, "b")

        assert await runtime.processes.prune(3600) == 0
        assert await runtime.processes.prune(0) == 1
        assert isinstance(await done.outcome(), NoLongerRetained)
        for refused in (done.result(), done.signal("go"), done.cancel(), runtime.start(doubling, {"n": 1}, id="a")):
            with pytest.raises(ProcessPruned):
                await refused
        assert await live.status() == "waiting"
        with pytest.raises(InvalidInput, match="only what is over"):
            await runtime.processes.prune(0, status=["running"])
        with pytest.raises(InvalidInput):
            await runtime.processes.prune(-1)


async def test_what_a_projector_has_not_seen_is_not_pruned(place: Place) -> None:
    async with working(place) as runtime:
        await (await runtime.start(doubling, {"n": 1}, id="a")).result(SOON)
        seen = (await runtime.processes.changes())[-1].cursor
        await (await runtime.start(doubling, {"n": 1}, id="b")).result(SOON)

        assert await runtime.processes.prune(0, watermark=seen) == 1
        assert [row.id for row in await runtime.processes.list()] == ["b"]


async def test_drain_status_counts_what_lives_by_definition(place: Place) -> None:
    async with working(place) as runtime:
        await (await runtime.start(doubling, {"n": 1})).result(SOON)
        for name in ("x", "y"):
            await runtime.start(waiting, id=name)
        await runtime.processes.register("z")

        assert await runtime.processes.drain_status() == {"external": 1, "waiting@1": 2}
