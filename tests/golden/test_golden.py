"""Stores that older versions wrote go on with the present one: every open turn, wait, input, wake and process in them.

Each check is about some of the sessions and processes of `make.py`, and independent of the others. What is expected was
written by hand, from what `make.py` did and what the definitions promise.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from perdure import Runtime, Workspace
from perdure.codemode.dumps import key_beside, unseal
from perdure.commands.shim import TOKEN
from perdure.errors import (
    AlreadyAnswered,
    KeyConflict,
    ProcessConflict,
    ProcessFailed,
    ProcessPruned,
    SessionDeleted,
)
from perdure.model import process as ends
from perdure.model.edit import FileRestore, UndoneFile
from perdure.model.tool import Cancelled, Denied, Failed, Ok, OutcomeUnknown, PreparedCall, ToolOutcome, ToolSpec
from perdure.model.write import ProcessFilter, SessionFilter
from perdure.ports.tool import CallContext
from perdure.sessions.result import TurnResult
from perdure.stores.sqlite import SqliteStore, schema
from perdure.testing import VirtualClock
from perdure.workspace.tools import FileTools
from tests.cli.shell import shell_json
from tests.golden.definitions import HOST, LARGE, WORKSPACE, World, runtime, runtime_since_7
from tests.kit import SOON, until

HERE = Path(__file__).parent
STORES = sorted(HERE.glob("schema-*"))


def version(source: Path) -> int:
    return int(source.name.removeprefix("schema-"))


OPENED = 60
"""Seconds of the maker's clock when the store is opened again. Its last process was killed at 30."""


RESERVED = 630
"""Tokens that are reserved for a model call of the session `spending`: its estimated input, and 500 for its answer."""


class Golden(NamedTuple):
    made: Runtime
    world: World
    clock: VirtualClock
    keys: dict[str, str]
    workspace: Path

    async def turn(self, turn_id: str) -> TurnResult[Any]:
        return await (await self.made.session(turn_id.rpartition(".")[0])).result(turn_id)

    async def value(self, process_id: str) -> Any:
        return await self.made.handle(process_id).result(SOON)

    def done(self, key: str) -> list[str]:
        """What this process has done under a key. Calls begun since schema 4 have the store's name before theirs."""
        return [name for name, each in self.world.done if key in (each, each.partition(".")[2])]

    def at(self, seconds: float) -> None:
        """Let the clock reach so many seconds, if it has not."""
        self.clock.advance(max(0.0, seconds - self.clock.monotonic()))

    async def head(self, session_id: str) -> int:
        row = await self.made.store.session(session_id)
        assert row is not None
        return row.head


def copied(source: Path, target: Path) -> Path:
    """A copy, with modes as ours alone whatever the checkout made of them; returns its database."""
    shutil.copytree(source, target)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    return target / "agent.db"


class Moved:
    """Tools for the files of a workspace that was in the folder WORKSPACE when the store was made."""

    def __init__(self, tools: FileTools, folder: Path) -> None:
        self._tools, self._folder = tools, folder

    def specs(self) -> Sequence[ToolSpec]:
        return self._tools.specs()

    async def prepare(self, call: PreparedCall, ctx: CallContext) -> PreparedCall | ToolOutcome:
        return await self._tools.prepare(call, ctx)

    async def execute(self, call: PreparedCall, ctx: CallContext) -> Any:
        return await self._tools.execute(call, ctx)

    def covers(self, path: str) -> bool:
        return path.startswith(f"{WORKSPACE}/")

    async def restore(
        self, wanted: Sequence[FileRestore], earlier: Mapping[str, bytes], store: str | None
    ) -> list[UndoneFile]:
        here = [replace(each, path=each.path.replace(WORKSPACE, str(self._folder), 1)) for each in wanted]
        return await self._tools.restore(here, earlier, store)


@contextlib.asynccontextmanager
async def opened(store: Path, schema_version: int) -> AsyncGenerator[Golden]:
    """The store in a Runtime with the definitions of its work. Since schema 7 that has commands, whose host it must be,
    and a workspace as its edits left it."""
    world, clock, workspace = World(), VirtualClock(), store.with_name("workspace")
    clock.advance(OPENED)
    keys = json.loads((store.parent / "keys.json").read_text())
    if schema_version < 7:
        async with runtime(store, world, clock=clock, grace=0) as made:
            yield Golden(made, world, clock, keys, workspace)
        return
    workspace.mkdir()
    (workspace / "note.txt").write_text("two\n")
    (workspace / "new.txt").write_text("three")
    files = Moved(Workspace(workspace).tools(), workspace)
    with pytest.MonkeyPatch.context() as machine:
        machine.setattr(socket, "gethostname", lambda: HOST)
        async with runtime_since_7(store, world, files, clock=clock, grace=0) as made:
            yield Golden(made, world, clock, keys, workspace)


# ---------------------------------------------------------------------- parked turns


async def approval_and_the_queue_behind_it(golden: Golden) -> None:
    session = await golden.made.session("approval")
    assert [(p.call_id, p.kind, p.args) for p in await session.pending()] == [
        ("approval.2.1.0", "approval", {"to": "kim"})
    ]
    await session.approve("approval.2.1.0")

    assert (await golden.turn("approval.2")).text == "mail ok: mail done"
    assert (await golden.turn("approval.3")).text == "3: first in the queue"
    assert (await golden.turn("approval.4")).text == "4: second in the queue"
    again = await session.send("first in the queue", key="queued-1")
    assert (again.turn_id, again.known) == ("approval.3", True)
    assert len(await session.history()) == 10


async def rejection(golden: Golden) -> None:
    await (await golden.made.session("rejected")).reject("rejected.1.1.0", "not on Sundays")

    mail, look = (await golden.turn("rejected.1")).tool_calls
    assert isinstance(mail.outcome, Denied)
    assert mail.outcome.reason == "not on Sundays"
    assert look.outcome == Ok("nothing to see")


async def approval_that_was_acknowledged(golden: Golden) -> None:
    assert (await golden.turn("approved.1")).text == "mail ok: mail done"
    assert golden.done("lee") == ["mail"]
    with pytest.raises(AlreadyAnswered):
        await (await golden.made.session("approved")).reject("approved.1.1.0")


async def settlement(golden: Golden) -> None:
    session = await golden.made.session("settlement")
    assert [(p.call_id, p.kind) for p in await session.pending()] == [("settlement.1.1.0", "recovery")]
    await session.settle("settlement.1.1.0", "done", value="in the books")

    assert (await golden.turn("settlement.1")).text == "order ok: in the books"
    assert golden.done("lamp") == []


async def completion_by_a_key_of_old_and_a_steered_input(golden: Golden) -> None:
    await golden.made.resolve(golden.keys["plain"], "all is built")

    result = await golden.turn("deferred.1")
    build, look = result.tool_calls
    assert build.outcome == Ok("all is built")
    assert look.outcome == Ok("nothing to see")
    assert result.text == "2: and hurry"
    steered = await (await golden.made.session("deferred")).steer("and hurry", key="steer-1")
    assert steered.known
    assert (await steered.result()).turn_id == "deferred.1"


async def completions_that_were_acknowledged(golden: Golden) -> None:
    assert (await golden.turn("resolved.1")).text == "build ok: all green"
    (call,) = (await golden.turn("failed.1")).tool_calls
    assert isinstance(call.outcome, Failed)
    assert call.outcome.message == "all red"
    with pytest.raises(AlreadyAnswered):
        await golden.made.resolve(golden.keys["early"], "again")


async def completion_that_is_late(golden: Golden) -> None:
    assert (await golden.turn("late.1")).waiting
    golden.at(3700)

    async def ended() -> bool:
        return await golden.head("late") == 1

    await until(ended)
    (call,) = (await golden.turn("late.1")).tool_calls
    assert isinstance(call.outcome, OutcomeUnknown)
    with pytest.raises(AlreadyAnswered):
        await golden.made.resolve(golden.keys["late"], "too late")


async def cancel_that_was_acknowledged(golden: Golden) -> None:
    result = await golden.turn("cancelled.1")

    assert result.outcome == Cancelled("host", "not needed any more")
    assert golden.done("max") == []


async def subagent_that_waits_for_a_person(golden: Golden) -> None:
    child = await golden.made.session("chief.2.1.0~clerk")
    await child.approve("chief.2.1.0~clerk.1.1.0")
    await child.result("chief.2.1.0~clerk.1")
    golden.clock.advance(10)  # a process that waits for a turn is looked after every few seconds

    result = await golden.turn("chief.2")
    assert result.text == "clerk ok: mail ok: mail done"
    assert [message.text for message in await child.history()][:1] == ["call mail to=kim"]
    assert (await golden.turn("chief.1")).text == "clerk ok: 1: what is new"


# ---------------------------------------------------------------------- what sessions remember


async def plugin_state_options_and_tools(golden: Golden) -> None:
    session = await golden.made.session("noted")
    assert [p.call_id for p in await session.pending()] == ["noted.3.1.1"]
    await session.approve("noted.3.1.1")
    assert (await golden.turn("noted.3")).text == "remember ok: remembered; mail ok: mail done"

    known = ["it is tea", "it is milk", "it is said by the host"]  # by their keys, as they were saved
    assert (await session.call("notes.all")).output == known
    assert (await session.run("known?")).text.endswith(f"Known: {', '.join(known)}")
    await session.run("call remember fact=honey")
    assert (await session.call("notes.all")).output == [*known, "it is honey"]
    (call,) = (await session.run("call look")).tool_calls
    assert isinstance(call.outcome, Failed)
    assert call.outcome.code == "tool_unavailable"


async def blobs(golden: Golden) -> None:
    session = await golden.made.session("drawn")
    (draw,) = (await golden.turn("drawn.1")).tool_calls
    assert isinstance(draw.outcome, Ok)
    assert await golden.made.store.blobs.get(draw.artifacts[0].digest) == b"<svg/>"
    assert draw.outcome.whole is not None
    assert json.loads(await golden.made.store.blobs.get(draw.outcome.whole.digest)) == LARGE
    assert [message.text for message in await session.history() if message.role == "user"] == ["call draw", LARGE]
    (measure,) = (await session.run("call measure")).tool_calls
    assert measure.outcome == Ok(6)


async def forks_of_a_deleted_session(golden: Golden) -> None:
    fork, grown = await golden.made.session("fork"), await golden.made.session("fork-grown")
    shared = ["one", "1: one", "call remember fact=tea", "", "", "remember ok: remembered"]
    assert [message.text for message in await fork.history()] == shared
    assert [m.text for m in await grown.history()] == [
        *shared,
        "three",
        "3: three",
        "four, elsewhere",
        "4: four, elsewhere",
    ]

    assert (await fork.run("known?")).text.endswith("Known: tea")
    assert (await grown.run("five")).text == "5: five"
    with pytest.raises(SessionDeleted):
        await (await golden.made.session("source")).run("six")


# ---------------------------------------------------------------------- interrupted turns


async def interrupted_model_call(golden: Golden) -> None:
    result = await golden.turn("thinking.1")

    assert result.text == "1: think"
    assert (result.usage.calls, result.usage.unknown) == (1, 2)
    assert [name for name, _ in golden.world.done].count("think") == 1


async def interrupted_once_tool_and_the_input_behind_it(golden: Golden) -> None:
    (call,) = (await golden.turn("paying.1")).tool_calls

    assert isinstance(call.outcome, OutcomeUnknown)
    assert golden.done("paying.1.1.0") == []
    assert (await golden.turn("paying.2")).text == "2: and then?"


async def interrupted_rerun_tool_keeps_its_key(golden: Golden) -> None:
    (call,) = (await golden.turn("fetching.1")).tool_calls

    assert call.outcome == Ok("fetch done")
    assert (call.attempts, call.repeated) == (2, 1)
    assert golden.done("fetching.1.1.0") == ["fetch"]


async def interrupted_tool_that_asks(golden: Golden) -> None:
    assert (await golden.turn("ordering.1")).waiting
    assert golden.done("desk") == []
    session = await golden.made.session("ordering")
    await session.settle("ordering.1.1.0", "rerun")

    assert (await golden.turn("ordering.1")).text == "order ok: order done"
    assert golden.done("desk") == ["order"]


async def failed_attempt_whose_next_is_due_later(golden: Golden) -> None:
    golden.at(100)
    (call,) = (await golden.turn("calling.1")).tool_calls

    assert call.outcome == Ok("call done")
    assert (call.attempts, call.repeated) == (2, 0)
    assert golden.world.begun.count("call") == 1


async def half_a_round(golden: Golden) -> None:
    remember, pay, fetch = (await golden.turn("half.1")).tool_calls

    assert (remember.outcome, remember.repeated) == (Ok("remembered"), 0)
    assert isinstance(pay.outcome, OutcomeUnknown)
    assert (fetch.outcome, fetch.repeated) == (Ok("fetch done"), 1)
    assert golden.done("half.1.1.1") == []
    assert golden.done("half.1.1.2") == ["fetch"]
    assert (await (await golden.made.session("half")).call("notes.all")).output == ["half"]


async def interrupted_background_tools(golden: Golden) -> None:
    assert await golden.value("surveying.1.1.0") == "survey done"
    assert golden.done("surveying.1.1.0") == ["survey"]
    assert isinstance(await golden.made.handle("digging.1.1.0").outcome(), ends.Abandoned)
    assert golden.done("digging.1.1.0") == []
    with pytest.raises(ProcessFailed):
        await golden.value("digging.1.1.0")

    async def delivered() -> bool:
        return [await golden.head(name) for name in ("surveying", "digging")] == [2, 2]

    await until(delivered)
    for name in ("surveying", "digging"):
        messages = (await golden.turn(f"{name}.2")).messages
        assert sum(f'"id":"{name}.1.1.0"' in message.text for message in messages if message.role == "user") == 1


# ---------------------------------------------------------------------- wakes


async def wakes_are_told_once(golden: Golden) -> None:
    session = await golden.made.session("listener")
    assert (await golden.turn("listener.3")).text.endswith("are you there?")
    ending = await golden.made.processes.complete("external", {"ok": True})
    assert ending.status == "committed"

    async def delivered() -> bool:
        waiting = [wake for wake in await golden.made.processes.wakes() if wake.session_id == "listener"]
        row = await golden.made.store.session("listener")  # after the wakes: their delivery opens a turn
        return not waiting and row is not None and row.turn is None

    await until(delivered)

    said = "\n".join(message.text for message in await session.history() if message.role == "user")
    for name in ("old-news", "news-1", "news-2", "news-3", "external"):
        assert said.count(f'"id":"{name}"') == 1, name
    assert {row.id for row in await session.processes()} >= {"news-1", "news-2", "news-3", "external", "old-news"}


async def wake_of_a_deleted_session(golden: Golden) -> None:
    await golden.made.handle("orphan").signal("go", "away")
    assert await golden.value("orphan") == ["orphan", "away"]

    async def discarded() -> bool:
        return [w.session_id for w in await golden.made.processes.wakes("discarded")] == ["gone"]

    await until(discarded)


# ---------------------------------------------------------------------- processes


async def process_that_sleeps(golden: Golden) -> None:
    golden.at(3700)

    assert await golden.value("sleeping") == ["before done", "after done"]
    assert golden.done("sleeping") == ["after"]


async def process_that_waits_for_signals(golden: Golden) -> None:
    handle = golden.made.handle("listening")
    await handle.signal("more", 2)
    await handle.signal("go", "late")

    assert await golden.value("listening") == ["early", 2, "late", 4]


async def process_with_checkpoints_and_an_acknowledged_signal(golden: Golden) -> None:
    handle = golden.made.handle("counting")
    await handle.signal("add", 11, key="add-11")
    await handle.signal("add", 2, key="add-2")

    assert await golden.value("counting") == [25, 4]


async def process_in_a_race_of_branches(golden: Golden) -> None:
    await golden.made.handle("racing").signal("go", "now")

    assert await golden.value("racing") == ["left done", "right done", 0, "now"]
    assert golden.done("racing") == []


async def parent_and_child(golden: Golden) -> None:
    await golden.made.handle("leading.1").signal("go", "on")

    assert await golden.value("leading") == ["parent", ["child", "on"]]


async def process_asked_to_end(golden: Golden) -> None:
    assert await golden.made.handle("tidying").outcome(SOON) == ends.Cancelled("host", "enough")
    assert golden.done("tidying") == ["tidy"]


async def interrupted_steps(golden: Golden) -> None:
    assert await golden.value("paying") == "unknown"
    assert await golden.value("fetching") == ["first-step done", "fetch-step done"]
    assert golden.done("paying") == []
    assert golden.done("fetching") == ["fetch-step"]


async def failed_step_whose_next_attempt_is_due(golden: Golden) -> None:
    golden.at(100)

    assert await golden.value("insisting") == "tried"
    assert golden.done("insisting") == ["try"]


async def branches_of_which_one_is_done(golden: Golden) -> None:
    await golden.made.handle("branching").signal("go", "on")
    golden.at(3700)

    assert await golden.value("branching") == ["quick done", "slow done", "on", "sleepy done"]
    assert sorted(golden.done("branching")) == ["sleepy", "slow"]


async def processes_that_had_ended(golden: Golden) -> None:
    assert await golden.made.handle("ended").outcome() == ends.Success("told")
    with pytest.raises(ProcessPruned):
        await golden.value("pruned")
    with pytest.raises(ProcessConflict):
        await golden.made.start("reporting", {"text": "told otherwise"}, id="ended")
    assert (await golden.made.start("reporting", {"text": "told"}, id="ended")).id == "ended"


# ---------------------------------------------------------------------- since schema 7


async def cell_in_monty(golden: Golden) -> None:
    await cell_that_was_cut_off(golden, "in-monty")


async def cell_in_cpython(golden: Golden) -> None:
    await cell_that_was_cut_off(golden, "in-cpython")


async def cell_that_was_cut_off(golden: Golden, session_id: str) -> None:
    result = await golden.turn(f"{session_id}.1")

    assert result.text == "weigh-apple done and weigh-pear done, after weigh-plum done"
    assert [(call.call_id, call.repeated) for call in result.tool_calls] == [
        (f"{session_id}.1.1.0", 0),
        (f"{session_id}.1.2.0", 0),
        (f"{session_id}.1.2.1", 1),
        (f"{session_id}.1.2.2", 0),
    ]
    assert [golden.done(f"{session_id}.1.{call}") for call in ("1.0", "2.0", "2.1")] == [[], [], ["weigh-pear"]]


async def command_that_ran(golden: Golden) -> None:
    outcome = await golden.made.handle("command.server").outcome(SOON)

    assert isinstance(outcome, ends.Abandoned)
    reason = "the machine was started again since: nothing of it can live"
    result = outcome.value
    assert (result["status"], result["reason"], result["stdout"]) == ("lost", reason, "begun\n")
    assert result["cleanup"] == {"note": reason}, "nothing was found, and nothing was ended"


async def turn_held_for_a_command(golden: Golden) -> None:
    result = await golden.turn("compiling.1")

    assert isinstance(await golden.made.handle("compiling.1.1.0.1").outcome(SOON), ends.Abandoned)
    assert "has ended: lost" in result.text
    assert result.text.endswith("stdout:\n> compiling")


async def monitors_with_lines_to_deliver(golden: Golden) -> None:
    for monitor in ("watching.monitor.lines", "noting.monitor.notes"):
        outcome = await golden.made.handle(monitor).outcome(SOON)
        assert isinstance(outcome, ends.Failure)
        assert outcome.code == "lost"

    async def told() -> bool:
        waiting = {wake.session_id for wake in await golden.made.processes.wakes()}
        return "watching" not in waiting and await golden.head("watching") == 3

    await until(told)
    said = await said_in(golden, "watching")
    assert [text.rpartition("> ")[2] for text in said[:2]] == ["wait here for line one", "line two"]
    assert "its command is lost" in said[2]
    await (await golden.made.session("noting")).run("hello")
    said = await said_in(golden, "noting")
    assert said[0] == "hello"
    assert said[1].endswith("> 1 line:\n> line three")
    assert "its command is lost" in said[2]


async def said_in(golden: Golden, session_id: str) -> list[str]:
    history = await (await golden.made.session(session_id)).history()
    return [message.text for message in history if message.role == "user"]


async def limit_with_an_open_reservation(golden: Golden) -> None:
    assert (await golden.turn("spending.1")).text == "spent"

    (account,) = [each for each in await golden.made.store.accounts() if each.key == '"red"']
    assert (account.spent, account.reserved, account.unknown) == (RESERVED + 30, 0, 1)


async def question_of_a_server(golden: Golden) -> None:
    session = await golden.made.session("booking")
    (asked,) = await session.pending()
    assert (asked.call_id, asked.kind) == ("booking.1.1.0", "input")
    await session.answer("booking.1.1.0", {"time": "19:00"})

    (call,) = (await golden.turn("booking.1")).tool_calls
    assert call.outcome == Ok("garden at 19:00")
    assert call.attempts == 1


async def deferred_call_of_a_process_that_was_killed(golden: Golden) -> None:
    assert (await golden.turn("building.1")).waiting
    await golden.made.resolve(golden.keys["golden"], "all is built")

    (call,) = (await golden.turn("building.1")).tool_calls
    assert call.outcome == Ok("all is built")


async def filtered_inputs(golden: Golden) -> None:
    session = await golden.made.session("paying-by-card")
    assert (await golden.turn("paying-by-card.2")).text == "2: wait here with [card]"
    assert (await golden.turn("paying-by-card.3")).text == "3: and [card] too"

    assert (await session.send("and 6000-7890 too", key="card-3")).known
    with pytest.raises(KeyConflict):
        await session.send("and 6000-7891 too", key="card-3")
    assert (await session.run("or 7000-1234")).text == "4: or [card]"
    files = [path for path in golden.workspace.parent.rglob("*") if path.is_file()]
    stored = b"".join(path.read_bytes() for path in files)
    assert b"wait here with [card]" in stored
    for number in (b"4000-1234", b"5000-4321", b"6000-7890", b"6000-7891", b"7000-1234"):
        assert number not in stored


async def edit_that_is_undone(golden: Golden) -> None:
    session = await golden.made.session("editing")
    edits = await session.edits("editing.1")
    assert sorted((each.path, each.status, each.kept) for each in edits) == [
        (f"{WORKSPACE}/new.txt", "applied", True),
        (f"{WORKSPACE}/note.txt", "applied", True),
    ]
    undone = await session.undo("editing.1")

    assert [each.status for each in undone] == ["undone", "undone"]
    assert {file.name: file.read_text() for file in golden.workspace.iterdir()} == {"note.txt": "one\n"}


async def processes_cut_off_in_a_step(golden: Golden) -> None:
    assert await golden.value("stepping") == "alone: unknown"
    assert await golden.value("awaiting") == ["parent", "child: unknown"]
    assert await golden.value("saving") == ["before-save done", "after-save done"]
    assert golden.done("saving") == ["after-save"]
    assert await golden.value("choosing") == [1, "choose done"]
    assert golden.done("choosing") == ["choose"]


async def process_cut_off_while_it_cleaned_up(golden: Golden) -> None:
    assert await golden.made.handle("quitting").outcome(SOON) == ends.Cancelled("host", "enough")
    assert golden.done("quitting") == ["quit"]


async def processes_cut_off_in_a_gather_and_in_a_sleep(golden: Golden) -> None:
    await golden.made.handle("gathering").signal("go", "on")
    golden.at(3700)

    assert await golden.value("gathering") == [["gather-1 done", "gather-2 done"], None, "on"]
    assert golden.done("gathering") == ["gather-2"]
    assert await golden.value("dozing") == "before-doze done"
    assert golden.done("dozing") == []


CHECKS: list[Callable[[Golden], Awaitable[None]]] = [
    approval_and_the_queue_behind_it,
    rejection,
    approval_that_was_acknowledged,
    settlement,
    completion_by_a_key_of_old_and_a_steered_input,
    completions_that_were_acknowledged,
    cancel_that_was_acknowledged,
    subagent_that_waits_for_a_person,
    plugin_state_options_and_tools,
    blobs,
    forks_of_a_deleted_session,
    interrupted_model_call,
    interrupted_once_tool_and_the_input_behind_it,
    interrupted_rerun_tool_keeps_its_key,
    interrupted_tool_that_asks,
    failed_attempt_whose_next_is_due_later,
    half_a_round,
    interrupted_background_tools,
    wakes_are_told_once,
    wake_of_a_deleted_session,
    process_that_waits_for_signals,
    process_with_checkpoints_and_an_acknowledged_signal,
    process_in_a_race_of_branches,
    parent_and_child,
    process_asked_to_end,
    interrupted_steps,
    failed_step_whose_next_attempt_is_due,
    processes_that_had_ended,
    # The first of those that let the hour pass in which it may come.
    completion_that_is_late,
    branches_of_which_one_is_done,
    process_that_sleeps,
]

CHECKS_SINCE_7 = [
    cell_in_monty,
    cell_in_cpython,
    command_that_ran,
    turn_held_for_a_command,
    monitors_with_lines_to_deliver,
    limit_with_an_open_reservation,
    question_of_a_server,
    deferred_call_of_a_process_that_was_killed,
    filtered_inputs,
    edit_that_is_undone,
    processes_cut_off_in_a_step,
    process_cut_off_while_it_cleaned_up,
    processes_cut_off_in_a_gather_and_in_a_sleep,
]


def contents_of(source: Path) -> tuple[int, int, int]:
    """Return how many sessions, processes and blobs a store holds."""
    return (35, 36, 8) if version(source) >= 7 else (25, 21, 7)


def checks_of(source: Path) -> list[Callable[[Golden], Awaitable[None]]]:
    # The checks that let an hour pass come last.
    return [*CHECKS_SINCE_7[:-1], *CHECKS, CHECKS_SINCE_7[-1]] if version(source) >= 7 else CHECKS


@pytest.mark.parametrize("source", [s for s in STORES if version(s) >= 5], ids=lambda source: source.name)
async def test_metadata_and_titles_of_an_older_store_are_there(tmp_path: Path, source: Path) -> None:
    async with opened(copied(source, tmp_path / "store"), version(source)) as golden:
        rows = await golden.made.sessions.list(metadata={"user": "kim", "tenant": 4, "paying": True})
        assert {row.id: row.title for row in rows} == {
            "approval": "Mail for Kim",
            "chief": "call clerk task=what_is_new",
            "chief.1.1.0~clerk": "what is new",
            "chief.2.1.0~clerk": "call mail to=kim",
        }
        assert await golden.made.sessions.list(metadata={"tenant": "4"}) == []

        session = await golden.made.session("approval", metadata={"user": "kim", "tenant": 4, "paying": True})
        again = await session.send("second in the queue", key="queued-2", metadata={"channel": "sms"})
        assert again.known
        with pytest.raises(KeyConflict):
            await session.send("second in the queue", key="queued-2")


@pytest.mark.parametrize(
    ("source", "check"),
    [(source, check) for source in STORES for check in checks_of(source)],
    ids=lambda value: value.name if isinstance(value, Path) else value.__name__,
)
async def test_older_store_goes_on_with(
    tmp_path: Path, source: Path, check: Callable[[Golden], Awaitable[None]]
) -> None:
    async with opened(copied(source, tmp_path / "store"), version(source)) as golden:
        await check(golden)


@pytest.mark.parametrize("source", STORES, ids=lambda source: source.name)
async def test_all_of_an_older_store_goes_on_and_then_all_is_well(tmp_path: Path, source: Path) -> None:
    store = copied(source, tmp_path / "store")
    async with opened(store, version(source)) as golden:
        for check in checks_of(source):
            await check(golden)
        assert await golden.made.wait_idle(SOON)

    found = await asyncio.to_thread(shell_json, "doctor", "--deep", store=store)
    assert found["needs"] == []
    assert (found["schema"], found["checks"], found["open_turns"], found["workers"]) == (schema.VERSION, ["ok"], [], [])
    pinned = {"running": 1} if version(source) >= 7 else {}  # what an MCP server said of its tools
    assert found["live_processes"] == pinned
    assert {state: count for state, count in found["wakes"].items() if count} == {"discarded": 1}


@pytest.mark.parametrize("source", STORES, ids=lambda source: source.name)
async def test_sessions_of_an_older_store_are_listed_by_their_last_change(tmp_path: Path, source: Path) -> None:
    store = SqliteStore(copied(source, tmp_path / "store"))
    await store.open()
    try:
        rows = await store.sessions(SessionFilter())
    finally:
        await store.close()

    assert len(rows) == contents_of(source)[0]
    assert [(row.updated, row.sid) for row in rows] == sorted([(row.updated, row.sid) for row in rows], reverse=True)


@pytest.mark.parametrize("source", STORES, ids=lambda source: source.name)
async def test_doctor_finds_an_older_store_whole_and_tells_what_is_open(tmp_path: Path, source: Path) -> None:
    found = await asyncio.to_thread(shell_json, "doctor", "--deep", store=copied(source, tmp_path / "store"))

    assert (found["schema"], found["checks"]) == (schema.VERSION, ["ok"])
    since_7 = version(source) >= 7
    assert (found["sessions"], found["processes"], found["blobs"]) == contents_of(source)
    assert found["records_read"] == (296 if since_7 else 191)
    assert [worker["alive"] for worker in found["workers"]] == ([False, False] if since_7 else [False])
    assert found["commands"]["elsewhere"] == ({HOST: 4} if since_7 else {})
    parked = {turn["turn_id"] for turn in found["open_turns"] if turn["state"] == "parked"}
    assert parked == {
        "settlement.1",
        "approval.2",
        "rejected.1",
        "deferred.1",
        "late.1",
        "noted.3",
        "chief.2.1.0~clerk.1",
        *(("compiling.1", "booking.1", "building.1") if since_7 else ()),
    }
    assert {turn["turn_id"] for turn in found["open_turns"]} - parked == {
        "approved.1",
        "resolved.1",
        "failed.1",
        "cancelled.1",
        "listener.3",
        "chief.2",
        "thinking.1",
        "paying.1",
        "fetching.1",
        "ordering.1",
        "calling.1",
        "half.1",
        *(("in-monty.1", "in-cpython.1", "spending.1", "paying-by-card.2", "watching.1") if since_7 else ()),
    }


RUNNING = {
    "command.server": None,
    "compiling.1.1.0.1": None,
    "watching.monitor.lines.1": None,
    "noting.monitor.notes.1": None,
    "watching.monitor.lines": None,
    "noting.monitor.notes": None,
    "stepping": None,
    "awaiting.1": None,
    "gathering": None,
    "choosing": None,
    "saving": None,
    "quitting": "enough",
}
"""Processes that were at work when schema 7 was cut off, with why they are asked to end."""


async def test_schema_7_was_cut_off_in_every_state_that_its_list_names(tmp_path: Path) -> None:
    store = SqliteStore(copied(HERE / "schema-7", tmp_path / "store"))
    await store.open()
    try:
        rows = {row.registration.id: row for row in await store.processes(ProcessFilter(limit=100))}
        accounts = {account.key: account.reserved for account in await store.accounts()}
        waits = {wait.id for wait in await store.waits()}
        sessions = {row.id: row for row in await store.sessions(SessionFilter())}
        held, monty = sessions["compiling"], sessions["in-monty"]
        dump = await store.dump(monty.sid, 1)
    finally:
        await store.close()

    at_work = {name: row.record for name, row in rows.items() if name in RUNNING and row.status == "running"}
    assert {name: each.cancel and each.cancel.reason for name, each in at_work.items()} == RUNNING
    for name in ("command.server", "compiling.1.1.0.1", "watching.monitor.lines.1", "noting.monitor.notes.1"):
        place = at_work[name].external_ref
        assert (place["host"], place["boot"]) == (HOST, "boot of the maker")
    assert {name for name in ("awaiting", "dozing") if rows[name].status == "waiting"} == {"awaiting", "dozing"}
    assert accounts['"red"'] == RESERVED
    assert waits >= {"booking.1.1.0:input#2", "building.1.1.0:deferred", "compiling.1.2.0:process"}
    assert (held.state, held.reason) == ("parked", "waits for processes")
    assert dump is not None
    saved = unseal(dump[1].body, key_beside(store.path)).header
    assert (saved.executor, saved.names) == ("monty", ("apple", "report"))


async def test_process_with_the_mark_of_a_command_of_another_boot_is_not_killed(tmp_path: Path) -> None:
    path = copied(HERE / "schema-7", tmp_path / "store")
    store = SqliteStore(path)
    await store.open()
    row = await store.process("command.server")
    await store.close()
    assert row is not None
    mark = {TOKEN.decode(): row.record.external_ref["token"]}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=mark, stdin=subprocess.PIPE) as stranger:
        async with opened(path, 7) as golden:
            await command_that_ran(golden)
        alive = stranger.poll() is None
        stranger.communicate(b"\n")

    assert (alive, stranger.returncode) == (True, 0)


@pytest.mark.parametrize("key", ["of the store", "another"])
async def test_saved_interpreter_of_an_older_store_goes_on_under_its_key_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    """Another key costs the session that its cells are run again. Another version of Monty costs the same."""
    path = copied(HERE / "schema-7", tmp_path / "store")
    if key == "another":
        path.with_name("agent.db.code-key").write_bytes(bytes(range(32)))
    caplog.set_level("INFO", "perdure")

    async with opened(path, 7) as golden:
        await cell_in_monty(golden)

    refused = [record.getMessage() for record in caplog.records if "a saved state" in record.msg]
    because = "it was changed, or saved under another key"
    assert [text.rpartition(": ")[2] for text in refused] == ([because] if key == "another" else [])


UPGRADE = """
import asyncio, os, pathlib, shutil, signal, sqlite3, sys
from perdure.stores.sqlite import SqliteStore

connect, old, seen = sqlite3.connect, pathlib.Path(sys.argv[1]), []

def watched(*args, **options):
    connection = connect(*args, **options)
    connection.set_trace_callback(executed)
    return connection

def executed(text):
    if not text.lstrip().upper().startswith(("SELECT", "PRAGMA JOURNAL", "--")):
        seen.append(text)
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)

async def upgrade(path):
    store = SqliteStore(path)
    await store.open()
    await store.close()

sqlite3.connect = watched  # this process is ours alone
number, killed = 0, True
while killed:
    number += 1
    folder = old.with_name(f"killed-{number}")
    shutil.copytree(old, folder)
    child = os.fork()
    if child == 0:
        asyncio.run(upgrade(folder / "agent.db"))
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
print(number - 1)
"""

SAMPLE = 4
"""A store whose upgrade was killed opens wherever that was; from so many of these places all of its work goes on."""


@pytest.mark.kill
@pytest.mark.parametrize("source", STORES, ids=lambda source: source.name)
async def test_older_store_goes_on_after_an_upgrade_that_was_killed(tmp_path: Path, source: Path) -> None:
    copied(source, tmp_path / "old")
    command = [sys.executable, "-c", UPGRADE, str(tmp_path / "old")]
    kills = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
    migrations = range(version(source) + 1, schema.VERSION + 1)
    assert kills > sum(len(schema.MIGRATIONS[each]) for each in migrations)

    for number in range(1, kills + 1):
        store = SqliteStore(tmp_path / f"killed-{number}" / "agent.db")
        await store.open()
        try:
            facts = await store.facts(deep=True)
            assert (facts.schema, facts.checks) == (schema.VERSION, ("ok",))
            assert (facts.sessions, facts.processes, facts.blobs) == contents_of(source)
        finally:
            await store.close()
    for number in range(1, kills + 1, max(1, kills // SAMPLE)):
        async with opened(tmp_path / f"killed-{number}" / "agent.db", version(source)) as golden:
            for check in checks_of(source):
                await check(golden)
