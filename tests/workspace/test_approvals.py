"""Commands that wait for a person: what is asked, what an approval holds for, and what a crash changes about it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from perdure import Runtime, Workspace
from perdure.model.tool import Failed
from perdure.workspace.policy import Policy, Rule
from tests.cli.shell import shell
from tests.kit import crash
from tests.workspace.asking import Conversation

LINE = "touch made && echo --password=hunter2"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="commands run on Linux")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work" / "a").mkdir(parents=True)
    (tmp_path / "work" / "b").mkdir()
    (tmp_path / "work" / "here").symlink_to("a")
    return tmp_path / "work"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store" / "agent.db"


class Host:
    """One OS process after another with the same store, as far as one can be two."""

    def __init__(self, work: Path, store: Path) -> None:
        self.work, self.store = work, store

    @contextlib.asynccontextmanager
    async def running(
        self, policy: Policy | None = None, killed: bool = False, **given: Any
    ) -> AsyncGenerator[Conversation]:
        """`killed`: it ends as SIGKILL would end it."""
        workspace = Workspace([self.work], unsandboxed=True, policy=policy, **given)
        model = Conversation(workspace.tools(commands=True))
        model.runtime = Runtime(self.store, agents=[model.agent])
        await model.runtime.__aenter__()
        try:
            model.session = await model.runtime.session("s")
            yield model
        finally:
            await (crash(model.runtime) if killed else model.runtime.__aexit__(None, None, None))

    def made(self) -> list[str]:
        return sorted(str(path.relative_to(self.work)) for path in self.work.rglob("made"))


@pytest.fixture
def host(work: Path, store: Path) -> Host:
    return Host(work, store)


async def ask(model: Conversation, **args: Any) -> str:
    """The id of a call that waits."""
    assert model.session is not None
    await model.turn("run_command", **args)
    [asked] = await model.session.pending()
    return asked.call_id


async def end(model: Conversation, call_id: str) -> Any:
    assert model.session is not None
    result = await model.session.result(call_id.rpartition(".")[0].rpartition(".")[0])
    [record] = result.tool_calls
    return record.outcome


async def test_the_person_sees_all_of_it_and_those_who_watch_no_secret(host: Host, work: Path) -> None:
    async with host.running() as model:
        call_id = await ask(model, command=LINE, cwd="a")
        assert model.session is not None
        [asked] = await model.session.pending()
        await model.session.approve(call_id)
        outcome = await end(model, call_id)
        [process] = await model.runtime.processes.list()

    told = asked.reason.split("\n")
    assert told[:2] == [f"run in {work}/a:", f"  | {LINE}"]
    assert "- write: touch changes files [touch made]" in told
    assert len(asked.approves) == 64
    assert outcome.value["status"] == "exited"
    assert "hunter2" not in process.registration.label
    assert "<secret " in process.registration.label
    assert host.made() == ["a/made"]


async def test_a_waiting_approval_outlives_a_crash_and_holds_for_that_call(host: Host) -> None:
    async with host.running(killed=True) as model:
        call_id = await ask(model, command=LINE)
        before = await model.session.pending() if model.session else []
    async with host.running() as model:
        assert model.session is not None
        after = await model.session.pending()
        await model.session.approve(call_id)
        outcome = await end(model, call_id)
        again = await ask(model, command=LINE)

    assert [(each.call_id, each.reason, each.approves) for each in after] == [
        (each.call_id, each.reason, each.approves) for each in before
    ]
    assert outcome.value["status"] == "exited"
    assert again != call_id, "the next one is asked about anew"
    assert host.made() == ["made"]


async def test_an_approval_that_was_given_before_a_crash_is_acted_on_once(host: Host) -> None:
    async with host.running(killed=True) as model:
        call_id = await ask(model, command="echo x >> made")
        assert model.session is not None
        await model.session.approve(call_id)
    async with host.running() as model:
        outcome = await end(model, call_id)

    assert outcome.value["status"] == "exited"
    assert (host.work / "made").read_text() == "x\n"


async def outdated(host: Host, work: Path, change: Any, **args: Any) -> Any:
    """How a call ends that is approved after something has changed."""
    async with host.running(killed=True) as model:
        call_id = await ask(model, command=LINE, **args)
    given = change(work) or {}
    async with host.running(**given) as model:
        assert model.session is not None
        await model.session.approve(call_id)
        return await end(model, call_id)


async def test_a_folder_that_leads_elsewhere_by_now_was_not_approved(host: Host, work: Path) -> None:
    def change(work: Path) -> None:
        (work / "here").unlink()
        (work / "here").symlink_to("b")

    outcome = await outdated(host, work, change, cwd="here")

    assert isinstance(outcome, Failed)
    assert outcome.code == "approval_outdated"
    assert host.made() == []


async def test_what_is_denied_by_now_is_not_run_although_it_was_approved(host: Host, work: Path) -> None:
    outcome = await outdated(host, work, lambda work: {"policy": Policy((Rule("deny", "touch"),))})

    assert isinstance(outcome, Failed)
    assert outcome.code == "denied_by_policy"
    assert "hunter2" not in outcome.message
    assert host.made() == []


async def test_what_is_allowed_by_now_runs(host: Host, work: Path) -> None:
    outcome = await outdated(host, work, lambda work: {"policy": Policy(otherwise="allow")})

    assert outcome.value["status"] == "exited"
    assert host.made() == ["made"]


async def test_the_command_line_shows_the_whole_question(host: Host, work: Path, store: Path) -> None:
    async with host.running(killed=True) as model:
        call_id = await ask(model, command="touch made\x1b[2K\nrm -rf a")

    listed = (await asyncio.to_thread(shell, "pending", store=store)).stdout
    told = (await asyncio.to_thread(shell, "show", "s", store=store)).stdout

    for shown in (listed, told):
        assert f"run in {work}:" in shown
        assert "  | touch made\\x1b[2K\n" in shown
        assert "  | rm -rf a\n" in shown
        assert "- unclear: the command line is not understood: it has the character U+001B" in shown
        assert f"perdure approve {call_id}" in shown or f"{call_id} asks to" in shown
        assert "\x1b" not in shown
