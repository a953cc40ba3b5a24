"""What plugins remember, in real turns: in the records of the turn that changed it, and found again after anything."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, ModelRequest, ToolCall, tool
from perdure.engine.journal import load
from perdure.errors import Conflict
from perdure.model.outcome import Finished, PluginAborted
from perdure.model.plugin import AskPerson, PluginSnapshot
from perdure.model.record import Record, slots
from perdure.model.session import load_settings
from perdure.model.tool import Ok
from perdure.plugins.hooks import Plugin, SessionContext, SnapshotReader, SnapshotWriter, StreamContext, TurnContext
from perdure.plugins.operations import command, query
from perdure.testing import FunctionModel
from tests.kit import SOON, Place, TellingModel, crash


class Counter(Plugin):
    """Counts what its tool is told, and keeps the last words as bytes of their own."""

    id = "counter"

    def __init__(self, taken: list[int] | None = None) -> None:
        self.count, self.changes, self.words = 0, 0, b""
        self.taken = [] if taken is None else taken
        self.hold: asyncio.Event | None = None

    def for_session(self, ctx: SessionContext) -> Counter:
        made = type(self)(self.taken)
        made.hold = self.hold
        return made

    def tools(self) -> Sequence[Any]:
        @tool(recovery="rerun")
        async def count(n: int, word: str = "") -> int:
            """Count on."""
            return self.change(n, word)

        return [count]

    def change(self, n: int, word: str = "") -> int:
        self.count, self.changes, self.words = self.count + n, self.changes + 1, word.encode()
        return self.count

    @command
    def add(self, n: int, word: str = "") -> int:
        """Count on, between turns."""
        return self.change(n, word)

    @command
    async def add_slowly(self, n: int) -> int:
        """Count on, and come back when told to."""
        counted = self.change(n)
        assert self.hold is not None
        await self.hold.wait()
        return counted

    @query
    def read(self) -> int:
        """What was counted."""
        return self.count

    @property
    def revision(self) -> int:
        return self.changes

    def snapshot(self, writer: SnapshotWriter) -> Any:
        self.taken.append(self.changes)
        if self.words:
            writer.put("words", self.words)
        return {"count": self.count}

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        if snapshot.state is not None:
            self.count, self.changes = snapshot.state["count"], snapshot.revision
            self.words = reader.get("words") or b""


class Newer(Counter):
    version = "2"


class Unreadable(Newer):
    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        if snapshot.state is not None:
            raise ValueError("what is this?")


class Indispensable(Unreadable):
    required = True


def model(request: ModelRequest) -> Any:
    """`count 3` asks the tool; anything else is just answered."""
    last = request.messages[-1]
    if last.role == "user" and last.text.startswith("count "):
        _, n, *word = last.text.split()
        return [ToolCall("c", "count", {"n": int(n), "word": " ".join(word)})]
    return "done"


def agent(*plugins: Plugin) -> Agent[str]:
    return Agent(FunctionModel(model), name="agent", plugins=plugins)


async def records(place: Place, session_id: str = "s", turn: int | None = None) -> list[Record]:
    """What is on disk, read as another process would."""
    store = place.store()
    await store.open()
    try:
        row = await store.session(session_id)
        assert row is not None
        return [record for _, record in await load(store, row.sid, turn or 1, turn or row.next)]
    finally:
        await store.close()


def snapshots(found: Sequence[Record]) -> list[tuple[str, str, int, Any]]:
    """Where a snapshot stands: the kind of its record, its plugin, revision and state."""
    return [
        (type(record).__name__, name, each.revision, each.state)
        for record in found
        if (slot := getattr(record, "slot", None)) is not None
        for name, each in (slot.snapshots or {}).items()
    ]


# ---------------------------------------------------------------------- in the records of a turn


async def test_state_that_a_tool_changed_is_in_the_record_of_its_end(place: Place) -> None:
    async with place.runtime(agent(Counter())) as runtime:
        await (await runtime.session("s")).run("count 3")

    assert snapshots(await records(place)) == [("Ended", "counter", 1, {"count": 3})]


async def test_state_that_a_hook_changed_last_is_in_the_commit(place: Place) -> None:
    class Turns(Counter):
        def after_turn(self, ctx: Any) -> None:
            self.change(1)

    async with place.runtime(agent(Turns())) as runtime:
        await (await runtime.session("s")).run("hi")

    assert snapshots(await records(place)) == [("Closed", "counter", 1, {"count": 1})]


async def test_unchanged_state_is_neither_taken_nor_written(place: Place) -> None:
    counter = Counter()
    async with place.runtime(agent(counter)) as runtime:
        session = await runtime.session("s")
        await session.run("count 3")
        await session.run("hi")
        await session.run("hi again")
    async with place.runtime(agent(counter)) as runtime:
        await (await runtime.session("s")).run("and after a restart")

    assert counter.taken == [1]
    assert snapshots(await records(place)) == [("Ended", "counter", 1, {"count": 3})]


async def test_next_turn_goes_on_from_the_state(place: Place) -> None:
    async with place.runtime(agent(Counter())) as runtime:
        session = await runtime.session("s")
        await session.run("count 3 and words")
        second = await session.run("count 4")
    async with place.runtime(agent(Counter())) as runtime:
        third = await (await runtime.session("s")).run("count 5")

    assert [call.outcome for call in (*second.tool_calls, *third.tool_calls)] == [Ok(7), Ok(12)]


async def test_sessions_do_not_share_state(place: Place) -> None:
    async with place.runtime(agent(Counter())) as runtime:
        await (await runtime.session("a")).run("count 3")
        result = await (await runtime.session("b")).run("count 4")

    assert [call.outcome for call in result.tool_calls] == [Ok(4)]


async def test_runtime_that_saw_another_one_commit_keeps_the_state_from_before(file: Place) -> None:
    """The turn of the other one changed nothing of the plugin: its state stands in a turn that is remembered here."""
    async with file.runtime(agent(Counter())) as one, file.runtime(agent(Counter())) as other:
        await (await one.session("s")).run("count 3")
        await (await other.session("s")).run("hi")
        result = await (await one.session("s")).run("count 4")

    assert [call.outcome for call in result.tool_calls] == [Ok(7)]


# ---------------------------------------------------------------------- plugins come and go


async def test_snapshot_of_a_plugin_that_is_away_waits_for_it(place: Place) -> None:
    async with place.runtime(agent(Counter())) as runtime:
        await (await runtime.session("s")).run("count 3")
    async with place.runtime(agent()) as runtime:
        await (await runtime.session("s")).run("without it")
    async with place.runtime(agent(Counter())) as runtime:
        result = await (await runtime.session("s")).run("count 4")

    assert [call.outcome for call in result.tool_calls] == [Ok(7)]


@pytest.mark.parametrize(
    ("stranger", "code"),
    [(Unreadable, "plugin_snapshot_unreadable"), (Counter, "plugin_snapshot_newer")],
    ids=["unreadable", "newer"],
)
async def test_session_opens_without_a_plugin_that_cannot_read_its_state(
    place: Place, stranger: type[Counter], code: str
) -> None:
    async with place.runtime(agent(Newer())) as runtime:
        await (await runtime.session("s")).run("count 3")
    async with place.runtime(agent(stranger())) as runtime:
        session = await runtime.session("s")
        result = await session.run("count 1")
        second = await session.run("hi")
    async with place.runtime(agent(Newer())) as runtime:
        after = await (await runtime.session("s")).run("count 4")

    assert result.outcome == Finished("done")
    assert [(issue.code, issue.plugin) for issue in result.issues] == [(code, "counter")]
    assert [call.outcome.__class__.__name__ for call in result.tool_calls] == ["Failed"], "its tools are away with it"
    assert second.issues == [], "told once"
    assert [call.outcome for call in after.tool_calls] == [Ok(7)], "the snapshot was kept"


class Filtering(Unreadable):
    """Left out, it would let everything pass."""

    is_filter = True


@pytest.mark.parametrize("needed", [Indispensable, Filtering])
async def test_required_plugin_that_cannot_read_its_state_stops_turns(place: Place, needed: type[Counter]) -> None:
    async with place.runtime(agent(Counter())) as runtime:
        await (await runtime.session("s")).run("count 3")
    async with place.runtime(agent(needed())) as runtime:
        result = await (await runtime.session("s")).run("hi")
    async with place.runtime(agent(Counter())) as runtime:
        after = await (await runtime.session("s")).run("count 4")

    assert isinstance(result.outcome, PluginAborted)
    assert (result.outcome.plugin, result.outcome.code) == ("counter", "plugin_snapshot_unreadable")
    assert [call.outcome for call in after.tool_calls] == [Ok(7)]


async def test_snapshot_that_cannot_be_taken_is_reported_and_the_one_before_stays(place: Place) -> None:
    class Sometimes(Counter):
        def snapshot(self, writer: SnapshotWriter) -> Any:
            return object() if self.count == 5 else super().snapshot(writer)

    async with place.runtime(agent(Sometimes())) as runtime:
        session = await runtime.session("s")
        await session.run("count 3")
        result = await session.run("count 2")
        third = await session.run("count 1")

    assert result.outcome == Finished("done")
    assert [(issue.code, issue.plugin) for issue in result.issues] == [("plugin_fault", "counter")]
    assert third.outcome == Finished("done")
    assert [state for _, _, _, state in snapshots(await records(place))] == [{"count": 3}, {"count": 6}]


@pytest.mark.parametrize("broken", [ZeroDivisionError("no"), SystemExit(2), "many"])
async def test_revision_that_cannot_be_told_harms_no_turn_for_good(place: Place, broken: Any) -> None:
    class Vague(Counter):
        @property
        def revision(self) -> int:
            if self.count == 3 and isinstance(broken, BaseException):
                raise broken
            return broken if self.count == 3 else self.changes

    async with place.runtime(agent(Vague())) as runtime:
        session = await runtime.session("s")
        result = await session.run("count 3")
        after = await session.run("count 1")

    assert result.outcome == Finished("done")
    assert [(issue.code, issue.plugin) for issue in result.issues] == [("plugin_fault", "counter")]
    assert after.outcome == Finished("done")
    assert [call.outcome for call in after.tool_calls] == [Ok(4)]


# ---------------------------------------------------------------------- forks and blobs


async def test_fork_has_the_state_of_its_node(place: Place) -> None:
    async with place.runtime(agent(Counter())) as runtime:
        session = await runtime.session("s")
        await session.run("count 3")
        await session.run("count 4")
        early = await session.fork("s.1", session_id="early")
        late = await session.fork(session_id="late")
        assert [c.outcome for c in (await early.run("count 10")).tool_calls] == [Ok(13)]
        assert [c.outcome for c in (await late.run("count 100")).tool_calls] == [Ok(107)]
        assert [c.outcome for c in (await session.run("count 1")).tool_calls] == [Ok(8)]
    async with place.runtime(agent(Counter())) as runtime:
        again = await (await runtime.session("early")).run("count 1")

    assert [call.outcome for call in again.tool_calls] == [Ok(14)]


async def test_fork_inside_a_turn_has_the_state_of_that_record(place: Place) -> None:
    def twice(request: ModelRequest) -> Any:
        last = request.messages[-1]
        if last.role == "tool" and last.tool_results[0].content == 3:
            return [ToolCall("d", "count", {"n": 4})]
        return model(request)

    two = Agent(FunctionModel(twice), name="agent", plugins=[Counter()])
    async with place.runtime(two) as runtime:
        session = await runtime.session("s")
        await session.run("count 3")
        middle = await session.fork("s.1.2", session_id="middle")
        result = await middle.run("count 10")

    assert [call.outcome for call in result.tool_calls] == [Ok(13)]


async def test_state_too_large_for_a_row_is_kept_whole(place: Place) -> None:
    class Large(Counter):
        def snapshot(self, writer: SnapshotWriter) -> Any:
            return super().snapshot(writer) | {"much": "x" * 200_000}

    async with place.runtime(agent(Large())) as runtime:
        session = await runtime.session("s")
        await session.run("count 3")
        await session.call("counter.add", {"n": 10})
    async with place.runtime(agent(Large())) as runtime:
        result = await (await runtime.session("s")).run("count 4")

    assert [call.outcome for call in result.tool_calls] == [Ok(17)]


async def test_turn_that_a_plugin_refuses_keeps_the_state_it_had_recorded(place: Place) -> None:
    """It goes on after a restart, is refused there, and the turn after it finds what the first half of it recorded."""

    class Moody(Counter):
        refusing = False

        def session_ready(self, ctx: SessionContext) -> None:
            if type(self).refusing:
                raise ValueError("not now")

    asked = TellingModel()
    runtime = await place.runtime(Agent(asked, name="agent", plugins=[Moody()])).__aenter__()
    await (await runtime.session("s")).send("go")
    await asked.next()
    asked.say([ToolCall("c", "count", {"n": 3})])
    await asked.next()
    await crash(runtime)
    Moody.refusing = True
    async with place.runtime(agent(Moody())) as runtime:
        session = await runtime.session("s")
        refused = await session.result("s.1")
        Moody.refusing = False
        result = await session.run("count 4")

    assert isinstance(refused.outcome, PluginAborted)
    assert [call.outcome for call in result.tool_calls] == [Ok(7)]


async def test_bytes_of_a_snapshot_survive_a_sweep(place: Place) -> None:
    class Spoken(Counter):
        def before_turn(self, ctx: TurnContext) -> None:
            said.append(self.words.decode())

    said: list[str] = []
    async with place.runtime(agent(Spoken())) as runtime:
        session = await runtime.session("s")
        await session.run("count 1 hello there")
        await session.call("counter.add", {"n": 1, "word": "between turns"})
        assert await runtime.store.sweep(grace=0) == 0
    async with place.runtime(agent(Spoken())) as runtime:
        session = await runtime.session("s")
        await session.run("hi")
        await runtime.store.sweep(grace=0)
    async with place.runtime(agent(Spoken())) as runtime:
        result = await (await runtime.session("s")).run("hi")

    assert (said, result.issues) == (["", "between turns", "between turns"], [])


# ---------------------------------------------------------------------- commands


async def settings_of(place: Place) -> dict[str, Any]:
    store = place.store()
    await store.open()
    try:
        row = await store.session("s")
        assert row is not None
        return {name: each.state for name, each in load_settings(row.settings).snapshots.items()}
    finally:
        await store.close()


async def test_command_between_turns_is_on_disk_when_it_returns_and_recorded_by_the_next_turn(place: Place) -> None:
    async with place.runtime(agent(Counter())) as runtime:
        session = await runtime.session("s")
        await session.run("count 3")
        outcome = await session.call("counter.add", {"n": 4})
        waiting = await settings_of(place)
        result = await session.run("hi")
        after = await settings_of(place)

    assert (outcome.output, waiting, after) == (7, {"counter": {"count": 7}}, {})
    assert snapshots(result.records) == [("Replied", "counter", 2, {"count": 7})]


async def test_command_before_anything_was_said(place: Place) -> None:
    async with place.runtime(agent(Counter())) as runtime:
        await (await runtime.session("s")).call("counter.add", {"n": 4})
    async with place.runtime(agent(Counter())) as runtime:
        result = await (await runtime.session("s")).run("count 1")

    assert [call.outcome for call in result.tool_calls] == [Ok(5)]


async def test_two_commands_at_once_lose_nothing(place: Place) -> None:
    counter = Counter()
    counter.hold = asyncio.Event()
    async with place.runtime(agent(counter)) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        await session.run("hi")
        slow = asyncio.create_task(session.call("counter.add_slowly", {"n": 1}))
        while not (await session.call("counter.read")).output:  # noqa: ASYNC110  # nobody tells when it has begun
            await asyncio.sleep(0)
        await session.call("counter.add", {"n": 10})
        counter.hold.set()
        await slow
        await asyncio.gather(*[session.call("counter.add", {"n": 100}) for _ in range(5)])
        on_disk = await settings_of(place)

    assert on_disk == {"counter": {"count": 511}}


async def test_two_commands_at_once_while_the_session_waits_for_a_person(place: Place) -> None:
    """No turn is in memory then: both must still work on one state, or one of them must hear that it does not."""
    async with place.runtime(agent(Counter(), AlwaysAsk())) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        assert (await session.run("count 3")).waiting
        ends = await asyncio.gather(*[session.call("counter.add", {"n": n}) for n in (10, 100)], return_exceptions=True)
        counted = sum(n for n, end in zip((10, 100), ends, strict=True) if not isinstance(end, BaseException))
        assert all(isinstance(end, Conflict) for end in ends if isinstance(end, BaseException))
        assert counted
        await session.approve("s.1.1.0")
        result = await session.result("s.1")

    assert [call.outcome for call in result.tool_calls] == [Ok(counted + 3)]


class AlwaysAsk(Plugin):
    id = "ask"

    def before_tool_call(self, ctx: Any) -> Any:
        return AskPerson("?")


async def test_command_while_a_turn_runs_is_seen_by_it_and_kept(place: Place) -> None:
    running, go_on = asyncio.Event(), asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        running.set()
        await go_on.wait()
        return "waited"

    def waiting(request: ModelRequest) -> Any:
        results = [r.name for m in request.messages for r in m.tool_results]
        steps = {0: [ToolCall("w", "wait")], 1: [ToolCall("c", "count", {"n": 1})]}
        return steps.get(len(results), "done")

    one = Agent(FunctionModel(waiting), name="agent", tools=[wait], plugins=[Counter()])
    async with place.runtime(one) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        receipt = await session.send("go")
        await running.wait()
        assert (await session.call("counter.add", {"n": 10})).output == 10
        assert await settings_of(place) == {"counter": {"count": 10}}
        go_on.set()
        result = await receipt.result()

    assert [call.outcome for call in result.tool_calls] == [Ok("waited"), Ok(11)]
    assert await settings_of(place) == {}
    async with place.runtime(agent(Counter())) as runtime:
        assert (await (await runtime.session("s")).call("counter.read")).output == 11


@pytest.mark.parametrize("first", [10, 1], ids=["differently", "alike"])
async def test_two_runtimes_that_both_changed_the_state_do_not_both_win(file: Place, first: int) -> None:
    """Each loaded the same state. The second to save hears of it, and its next call sees what the first one did."""
    slow, quick = Counter(), Counter()
    slow.hold = asyncio.Event()
    async with file.runtime(agent(slow)) as one, file.runtime(agent(quick)) as other, asyncio.timeout(SOON):
        session = await one.session("s")
        await session.run("count 3")
        pending = asyncio.create_task(session.call("counter.add_slowly", {"n": 1}))
        while (await session.call("counter.read")).output == 3:  # noqa: ASYNC110  # nobody tells when it has begun
            await asyncio.sleep(0)
        await (await other.session("s")).call("counter.add", {"n": first})
        slow.hold.set()
        with pytest.raises(Conflict):
            await pending
        assert (await session.call("counter.add", {"n": 100})).output == 103 + first
    assert await settings_of(file) == {"counter": {"count": 103 + first}}


# ---------------------------------------------------------------------- killed

CHILD = """
import asyncio, os, signal, sys
from perdure import Runtime
from tests.plugins.test_state_in_turns import Counter, agent

async def main(where):
    async with Runtime(where, agents=[agent(Counter())]) as runtime:
        session = await runtime.session("s")
        await session.run("count 3 first")
        await session.call("counter.add", {"n": 4, "word": "second"})
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.kill
async def test_state_that_a_command_changed_is_there_after_a_kill(file: Place) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(file.path), cwd=Path(__file__).parents[2], env=dict(os.environ)
    )
    assert await asyncio.wait_for(child.wait(), 60) == -signal.SIGKILL
    async with file.runtime(agent(Counter())) as runtime:
        session = await runtime.session("s")
        assert (await session.call("counter.read")).output == 7
        result = await session.run("count 1")

    assert [call.outcome for call in result.tool_calls] == [Ok(8)]


# ---------------------------------------------------------------------- whatever a plugin counts


class CountingAnew(Counter):
    """Counts its changes from 0 again in every instance."""

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        super().restore(snapshot, reader)
        self.changes = 0


class CountingDown(Counter):
    """Counts backwards."""

    @property
    def revision(self) -> int:
        return -self.changes

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        super().restore(snapshot, reader)
        self.changes = -snapshot.revision


@pytest.mark.parametrize("kind", [Counter, CountingAnew, CountingDown])
async def test_what_a_command_changed_is_there_after_a_restart_however_the_plugin_counts(
    place: Place, kind: type[Counter]
) -> None:
    async with place.runtime(agent(kind())) as runtime:
        session = await runtime.session("s")
        for said in ("count 1", "count 1", "count 1"):
            await session.run(said)
    for n in (10, 100):
        async with place.runtime(agent(kind())) as runtime:
            await (await runtime.session("s")).call("counter.add", {"n": n})
    async with place.runtime(agent(kind())) as runtime:
        session = await runtime.session("s")
        read = await session.call("counter.read")
        counted = await session.run("count 1000")
    async with place.runtime(agent(kind())) as runtime:
        after = await (await runtime.session("s")).call("counter.read")

    assert read.output == 113
    assert [call.outcome for call in counted.tool_calls] == [Ok(1113)]
    assert after.output == 1113


@pytest.mark.parametrize("kind", [Counter, CountingAnew])
async def test_state_that_waited_for_a_turn_gives_way_to_what_that_turn_recorded(
    place: Place, kind: type[Counter]
) -> None:
    async with place.runtime(agent(kind())) as runtime:
        session = await runtime.session("s")
        await session.run("count 1")
    async with place.runtime(agent(kind())) as runtime:
        session = await runtime.session("s")
        await session.call("counter.add", {"n": 10})
        await session.call("counter.add", {"n": 10})
        await session.run("count 100")
        row = await runtime.store.session("s")
    async with place.runtime(agent(kind())) as runtime:
        read = await (await runtime.session("s")).call("counter.read")

    assert row is not None
    assert load_settings(row.settings).snapshots == {}
    assert read.output == 121


async def test_state_of_an_older_version_is_saved_again_by_the_next_turn(place: Place) -> None:
    class Translated(Newer):
        def snapshot(self, writer: SnapshotWriter) -> Any:
            return {"zähler": self.count}

        def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
            if snapshot.version == "1":
                super().restore(snapshot, reader)
            else:
                self.count, self.changes = snapshot.state["zähler"], snapshot.revision

    async with place.runtime(agent(Counter())) as runtime:
        await (await runtime.session("s")).run("count 3")
    async with place.runtime(agent(Translated())) as runtime:
        session = await runtime.session("s")
        await session.run("hi")
        await session.run("hi again")
    found = [slots(await records(place, turn=turn)) for turn in (2, 3)]
    async with place.runtime(agent(Translated())) as runtime:
        after = await (await runtime.session("s")).run("count 4")

    states = [[s.snapshots["counter"].state for s in each if s.snapshots] for each in found]
    assert states == [[{"zähler": 3}], []]
    assert [call.outcome for call in after.tool_calls] == [Ok(7)]


# ---------------------------------------------------------------------- forks


@pytest.mark.parametrize("kind", [Counter, CountingAnew])
@pytest.mark.parametrize("at", [None, "s.2", "s.2.3"])
async def test_a_fork_of_the_whole_past_has_what_commands_changed_since(
    place: Place, kind: type[Counter], at: str | None
) -> None:
    async with place.runtime(agent(kind())) as runtime:
        session = await runtime.session("s")
        await session.run("count 1")
        await session.run("count 1")
        await session.call("counter.add", {"n": 10, "word": "bytes of their own"})
        branch = await session.fork(at, session_id="branch")
        await session.call("counter.add", {"n": 100})
        forked = await branch.call("counter.read")
    async with place.runtime(agent(kind())) as runtime:
        counted = await (await runtime.session("branch")).run("count 1000")
        again = await (await (await runtime.session("branch")).fork()).call("counter.read")
        own = await (await runtime.session("s")).call("counter.read")

    assert forked.output == 12
    assert [call.outcome for call in counted.tool_calls] == [Ok(1012)]
    assert (again.output, own.output) == (1012, 112)


async def test_a_fork_of_a_fork_without_turns_has_what_commands_changed_in_either(place: Place) -> None:
    async with place.runtime(agent(Counter())) as runtime:
        session = await runtime.session("s")
        await session.run("count 1")
        await session.call("counter.add", {"n": 10})
        first = await session.fork()
        await first.call("counter.add", {"n": 100})
        second = await first.fork()

        assert (await second.call("counter.read")).output == 111


@pytest.mark.parametrize("at", ["s.1", "s.2.0"])
async def test_a_fork_of_an_earlier_past_has_the_state_of_that_past(place: Place, at: str) -> None:
    async with place.runtime(agent(Counter())) as runtime:
        session = await runtime.session("s")
        await session.run("count 1")
        await session.run("count 1")
        await session.call("counter.add", {"n": 10})
        branch = await session.fork(at)

        assert (await branch.call("counter.read")).output == 1


# ---------------------------------------------------------------------- people read


class Prose(Counter):
    """Shows texts with what it has counted in this session."""

    def project_prose(self, ctx: StreamContext, text: str) -> str:
        if self.count > 100:
            raise ValueError(text)
        return f"{text} ({self.count})"


async def test_prose_is_projected_by_the_instance_of_the_session(place: Place) -> None:
    async with place.runtime(agent(Prose())) as runtime:
        session = await runtime.session("s")
        await session.run("hi")
        await session.call("counter.add", {"n": 3})
        await (await runtime.session("other")).run("hi")
        shown = [(await each.history())[-1].text for each in (session, await runtime.session("other"))]
    async with place.runtime(agent(Prose())) as runtime:
        session = await runtime.session("s")
        again = (await session.history())[-1].text
        await session.call("counter.add", {"n": 300})
        failed = [message.text for message in await session.history()]

    assert shown == ["done (3)", "done (0)"]
    assert again == "done (3)"
    assert failed == ["hi", "text withheld: plugin 'counter' failed"]
