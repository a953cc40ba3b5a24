"""`perdure retry`, and what a person sees of a turn that waits for its model."""

from __future__ import annotations

import asyncio
from pathlib import Path

from perdure import Agent, Retries, Runtime
from perdure.errors import ProviderError
from perdure.testing import FunctionModel, ScriptedModel
from tests.cli.shell import shell, shell_json
from tests.kit import overloaded, until


async def failed(store: Path, *names: str) -> None:
    agent = Agent(ScriptedModel([ProviderError("no such key", code="authentication") for _ in names]))
    async with Runtime(store, agents=[agent]) as runtime:
        for name in names:
            assert (await (await runtime.session(name)).run("go")).failed


async def waiting(store: Path) -> None:
    """A session `s` whose turn waits for its model."""

    def down(request: object) -> str:
        raise overloaded(after=3000)

    async with Runtime(store, agents=[Agent(FunctionModel(down), retries=Retries())], wait_for=0) as runtime:
        await (await runtime.session("s")).run("go")


async def answered(store: Path, *names: str) -> list[str]:
    async with Runtime(store, agents=[Agent(FunctionModel(lambda request: "fine"))]) as runtime:
        results = [await (await runtime.session(name)).result(f"{name}.1") for name in names]
    return [result.text for result in results]


def test_a_turn_is_continued_by_the_next_worker(store: Path) -> None:
    asyncio.run(failed(store, "s"))

    ran = shell("retry", "s", store=store)

    assert (ran.exit_code, ran.stdout) == (0, "s.1 goes on\n")
    assert asyncio.run(answered(store, "s")) == ["fine"]
    again = shell("retry", "s", store=store)
    assert again.exit_code == 1
    assert "turn s.1 cannot be retried: it has an answer: say something new" in again.stderr


def test_many_turns_are_continued_each_with_a_line(store: Path) -> None:
    asyncio.run(failed(store, "a", "b"))
    dry = shell_json("retry", "--failed", "provider_failed", "--since", "2h", "--dry-run", store=store)

    assert sorted(each["turn_id"] for each in dry) == ["a.1", "b.1"]
    assert shell("retry", "--failed", "budget_spent", store=store).stdout == (
        "no session's last turn ended as budget_spent\n"
    )
    ran = shell("retry", "--failed", "provider_failed", store=store)
    assert sorted(ran.stdout.splitlines()) == ["2 turns of 2", "a.1 goes on", "b.1 goes on"]
    assert asyncio.run(answered(store, "a", "b")) == ["fine", "fine"]
    assert shell_json("retry", "--failed", "provider_failed", store=store) == []


def test_a_waiting_turn_says_what_it_waits_for_and_can_be_made_due(store: Path) -> None:
    asyncio.run(waiting(store))

    reason = "waits for function until "
    assert reason in shell("show", "s", store=store).stdout
    assert "attempt 2: overloaded: overloaded" in shell("show", "s", store=store).stdout
    [listed] = shell_json("sessions", store=store)
    assert listed["reason"].startswith(reason)
    assert "function until" in " ".join(shell("doctor", store=store).stdout.split())
    assert shell("pending", store=store).stdout == "nothing waits\n"

    assert shell("retry", "s", "--now", store=store).stdout == "s.1 makes its next attempt now\n"
    assert asyncio.run(answered(store, "s")) == ["fine"]
    assert shell("retry", "s", "--now", store=store).exit_code == 1


async def test_a_turn_that_is_made_due_keeps_that_through_a_restart(store: Path) -> None:
    await waiting(store)
    asked = list[int]()

    def fine(request: object) -> str:
        asked.append(1)
        return "fine"

    async with Runtime(store, agents=[Agent(FunctionModel(fine))]) as runtime:
        session = await runtime.session("s")
        assert await session.retry_now()
        await until(lambda: asked)
        assert (await session.result("s.1")).text == "fine"
        assert not await session.retry_now()


def test_what_is_retried_is_named_once(store: Path) -> None:
    assert "name a session, or say --failed KIND" in shell("retry", store=store).stderr
    assert "name a session, or say --failed KIND" in shell("retry", "s", "--failed", "failed", store=store).stderr
