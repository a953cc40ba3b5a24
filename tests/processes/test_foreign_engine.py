"""An engine that a stranger wrote against `perdure.ports.process`: work that is done elsewhere, and outlives its host.

The engine, and what it is asked for, use public modules only (`perdure`, `errors`, `model`, `ports`): what engines of
the runtime can do, another one can do too.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from perdure import Agent, Plugin, ProcessContext, Runtime, ToolContext, process, tool
from perdure.model.process import (
    Abandoned,
    Cancelled,
    EventType,
    Evidence,
    ProcessOutcome,
    Registration,
    Success,
    WaitOn,
)
from perdure.model.record import Done, StepRecord
from perdure.model.tool import Artifact
from perdure.ports.process import CancelRequested, ChildOptions, Engine, EngineRun, Leaving
from perdure.testing import ScriptedModel
from tests.kit import SOON, Place, agent_calling, crash, until


class Job:
    """A program on another machine. It goes on, whatever becomes of those who started it."""

    def __init__(self, number: int) -> None:
        self.identity = {"host": "elsewhere", "boot": "b-1", "pid": 100 + number, "started": 7}
        self.ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.read: list[Any] = []
        self.killed = False

    async def wait(self) -> bytes:
        return await asyncio.shield(self.ended)


class Machine:
    """The other machine. A job is submitted under a name, once."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}

    def submit(self, name: str) -> Job:
        return self.jobs.setdefault(name, Job(len(self.jobs)))

    def find(self, identity: Any) -> Job | None:
        return next((job for job in self.jobs.values() if job.identity == identity), None)


class Batch:
    """Runs jobs of a machine: finds them again, passes signals on, keeps what they wrote."""

    kind = "batch"
    events = (EventType("artifact"), EventType("signal.line"))

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.left = 0
        self.attached: list[str] = []

    def knows(self, registration: Registration) -> bool:
        return True

    def draft(self, what: Any, args: Mapping[str, Any]) -> Registration | None:
        if what != "batch":
            return None
        return Registration("", self.kind, "reattachable", "batch", input=dict(args), events=self.events)

    async def run(self, run: EngineRun) -> ProcessOutcome:
        records = await run.journal.load() if run.resumed else []
        if run.record.external_ref is None:
            await run.begin()
            run.check()
            await run.set_external_ref(self.machine.submit(run.registration.id).identity)
        job = self.machine.find(run.record.external_ref)
        if job is None:
            return Abandoned(Evidence("engine_gave_up", proof="the machine has no such job"))
        self.attached.append(run.registration.id)
        passed = max((each.value for each in records if isinstance(each, Done)), default=0)
        feeding = asyncio.create_task(self._feed(run, job, passed))
        run.rest()
        try:
            written = await run.guard(job.wait())
        except CancelRequested as stop:
            job.killed = True
            return Cancelled(stop.request.by, stop.request.reason)
        except Leaving:
            self.left += 1
            raise
        finally:
            feeding.cancel()
        digest = await run.journal.keep(written)
        await run.emit("artifact", Artifact("output", digest, len(written), "text/plain"))
        return Success({"bytes": len(written)})

    async def _feed(self, run: EngineRun, job: Job, passed: int) -> None:
        async for signal in run.signals(after=passed):
            job.read.append(signal.payload)
            run.journal.record(Done(str(signal.sequence), "signal", signal.name, "", signal.sequence))
            await run.journal.flush()


class Brings(Plugin):
    def __init__(self, *engines: Engine) -> None:
        self.id, self._engines = "foreign", engines

    def engines(self) -> Iterable[Engine]:
        return self._engines


def agent(*engines: Engine) -> Agent[str]:
    return Agent(ScriptedModel([]), name="a", plugins=[Brings(*engines)])


@process
async def quick(ctx: ProcessContext) -> str:
    return "done"


async def begun(runtime: Runtime, machine: Machine, name: str) -> None:
    async def known() -> bool:
        row = await runtime.handle(name).record()
        return name in machine.jobs and row.record.external_ref == machine.jobs[name].identity

    await until(known)


# ---------------------------------------------------------------------- work elsewhere


async def test_work_is_found_again_by_its_recorded_identity_and_nothing_is_counted(file: Place) -> None:
    machine = Machine()
    for life in range(4):
        engine = Batch(machine)
        runtime = file.runtime(agent(engine))
        await runtime.__aenter__()
        if not life:
            await runtime.start("batch", id="job")
        await begun(runtime, machine, "job")
        await until(functools.partial(engine.attached.__contains__, "job"))
        await crash(runtime)
    async with file.runtime(agent(Batch(machine))) as runtime:
        machine.jobs["job"].ended.set_result(b"built")
        assert await runtime.handle("job").result(SOON) == {"bytes": 5}
        row = await runtime.handle("job").record()

    assert len(machine.jobs) == 1
    assert row.record.external_ref == {"host": "elsewhere", "boot": "b-1", "pid": 100, "started": 7}
    assert (row.attempts, row.takeovers, row.stuck) == (1, 0, None)


async def test_work_that_is_not_there_any_more_is_given_up_with_evidence(file: Place) -> None:
    machine = Machine()
    runtime = file.runtime(agent(Batch(machine)))
    await runtime.__aenter__()
    await runtime.start("batch", id="job")
    await begun(runtime, machine, "job")
    await crash(runtime)
    async with file.runtime(agent(Batch(Machine()))) as runtime:
        outcome = await runtime.handle("job").outcome(SOON)

    assert outcome == Abandoned(Evidence("engine_gave_up", proof="the machine has no such job"))


async def test_a_cancel_ends_the_work_and_leaving_lets_it_go_on(place: Place) -> None:
    machine = Machine()
    first = Batch(machine)
    async with place.runtime(agent(first), grace=0) as runtime:
        for name in ("stays", "ends"):
            await runtime.start("batch", id=name)
            await begun(runtime, machine, name)
        await runtime.handle("ends").cancel("enough", by="me")
        assert await runtime.handle("ends").outcome(SOON) == Cancelled("me", "enough")
    assert (first.left, machine.jobs["ends"].killed, machine.jobs["stays"].killed) == (1, True, False)

    async with place.runtime(agent(Batch(machine))) as runtime:
        machine.jobs["stays"].ended.set_result(b"")
        assert await runtime.handle("stays").result(SOON) == {"bytes": 0}


async def test_signals_are_passed_on_as_they_arrive_and_once(file: Place) -> None:
    machine = Machine()
    runtime = file.runtime(agent(Batch(machine)))
    await runtime.__aenter__()
    handle = await runtime.start("batch", id="job")
    await begun(runtime, machine, "job")
    for n in range(3):
        await handle.signal("line", n)
    job = machine.jobs["job"]
    await until(lambda: len(job.read) == 3)

    async def recorded() -> bool:
        row = await handle.record()
        return len(await runtime.store.steps(row.pid)) == 3

    await until(recorded)
    await crash(runtime)
    async with Runtime(file.store()) as front:
        await front.handle("job").signal("line", 3)
    async with file.runtime(agent(Batch(machine))) as runtime:
        await runtime.handle("job").signal("line", 4)
        await until(lambda: len(job.read) == 5)
        job.ended.set_result(b"")
        await runtime.handle("job").result(SOON)

    assert job.read == [0, 1, 2, 3, 4]


async def test_output_of_any_size_is_kept_with_the_process(file: Place) -> None:
    machine, output = Machine(), b"line\n" * 4_000_000
    async with file.runtime(agent(Batch(machine))) as runtime:
        handle = await runtime.start("batch", id="job")
        await begun(runtime, machine, "job")
        machine.jobs["job"].ended.set_result(output)
        assert await handle.result(SOON) == {"bytes": len(output)}
        (kept,) = [event.payload async for event in handle.events() if event.type == "artifact"]
        found = await runtime.store.blobs.get(kept["digest"])

    assert found == output


async def test_a_call_that_awaits_it_has_its_artifacts(place: Place) -> None:
    machine, seen = Machine(), list[Any]()

    @tool
    async def build(ctx: ToolContext[Any]) -> str:
        """Build, and wait for that."""
        handle = await ctx.start("batch", key="job")
        await until(lambda: machine.jobs)
        machine.jobs[handle.id].ended.set_result(b"built")
        record = await ctx.handles.await_process(handle.to_json())
        seen.extend((each.name, each.size) for each in record.artifacts)
        return "done"

    builder = agent_calling("build", tools=[build], plugins=[Brings(Batch(machine))])
    async with place.runtime(builder) as runtime:
        await (await runtime.session("s")).run("go")

    assert seen == [("output", 5)]


async def test_jobs_that_are_waited_for_do_not_keep_other_processes_from_running(place: Place) -> None:
    machine = Machine()
    async with place.runtime(agent(Batch(machine)), processes=[quick], grace=0) as runtime:
        for n in range(64):
            await runtime.start("batch", id=f"job-{n}")
        await until(lambda: len(machine.jobs) == 64)

        assert await (await runtime.start(quick)).result(SOON) == "done"


# ---------------------------------------------------------------------- an engine of its own kind of function


class Relay:
    """Starts a child, waits for it on disk, then for a signal on disk."""

    kind = "relay"
    runs = 0

    def knows(self, registration: Registration) -> bool:
        return True

    async def run(self, run: EngineRun) -> ProcessOutcome:
        self.runs += 1
        records = await run.journal.load() if run.resumed else []
        if not records:
            await run.begin()
            child = await run.host.start_child(run.row, "child", run.registration.input, {}, ChildOptions())
            while (row := await run.watch_end(child)) is None or row.live:
                await run.park(WaitOn("1", "process", child))
            run.journal.record(Done("1", "result", child, "", row.status))
            await run.park(WaitOn("2", "signal", "go"))
        signal = await anext(run.signals())
        return Success([child_status(await run.journal.load()), signal.payload])


def child_status(records: list[StepRecord]) -> Any:
    return next(each.value for each in records if isinstance(each, Done))


async def test_an_engine_parks_on_a_child_and_on_a_signal(place: Place) -> None:
    relay = Relay()
    async with place.runtime(agent(relay), processes=[quick]) as runtime:
        handle = await runtime.start(Registration("", "relay", "rerunnable", input="quick", open_signals=True), id="r")

        async def waits_for_a_signal() -> bool:
            return [wait.kind for wait in (await handle.record()).record.waits] == ["signal"]

        await until(waits_for_a_signal)
        await handle.signal("go", "now")
        assert await handle.result(SOON) == ["completed", "now"]

    assert relay.runs >= 2


class Pair:
    """Guards two things at once."""

    kind = "pair"

    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.waiting = 0

    def knows(self, registration: Registration) -> bool:
        return True

    async def _wait(self, run: EngineRun, name: str) -> None:
        async def forever() -> None:
            self.waiting += 1
            await asyncio.Event().wait()

        try:
            await run.guard(forever())
        except CancelRequested:
            self.stopped.append(name)

    async def run(self, run: EngineRun) -> ProcessOutcome:
        await run.begin()
        await asyncio.gather(self._wait(run, "one"), self._wait(run, "two"))
        run.check()
        raise AssertionError("it was asked to end")


async def test_all_that_a_run_guards_is_stopped_by_one_request() -> None:
    pair = Pair()
    async with Runtime("memory", agents=[agent(pair)]) as runtime:
        handle = await runtime.start(Registration("", "pair", "rerunnable"))
        await until(lambda: pair.waiting == 2)
        await handle.cancel("enough", by="me")
        assert await handle.outcome(SOON) == Cancelled("me", "enough")

    assert sorted(pair.stopped) == ["one", "two"]


class Slow:
    """Does not end within the time that it gives itself."""

    kind = "slow"

    def knows(self, registration: Registration) -> bool:
        return True

    async def run(self, run: EngineRun) -> ProcessOutcome:
        with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
            await run.guard(asyncio.Event().wait(), 0.01)
        return Success("late")


async def test_guarded_work_may_have_a_time_limit() -> None:
    async with Runtime("memory", agents=[agent(Slow())]) as runtime:
        assert await (await runtime.start(Registration("", "slow", "rerunnable"))).result(SOON) == "late"
