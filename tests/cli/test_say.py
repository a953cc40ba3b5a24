"""`perdure send` and `perdure steer`: said from one process, heard in another."""

import asyncio
from pathlib import Path

from perdure import Agent, ModelRequest, Runtime, ToolCall, tool
from perdure.testing import FunctionModel
from tests.cli.shell import process, say, shell, shell_json
from tests.kit import SOON, noticed


async def test_what_is_steered_reaches_the_turn_that_runs_elsewhere(store: Path) -> None:
    working, enough = asyncio.Event(), asyncio.Event()

    @tool
    async def work() -> str:
        working.set()
        await enough.wait()
        return "worked"

    def answers(request: ModelRequest) -> str | list[ToolCall]:
        return "minded" if request.messages[-1].text == "mind the step" else [ToolCall("a", "work")]

    async with Runtime(store, agents=[Agent(FunctionModel(answers), tools=[work])]) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("begin")
        await working.wait()
        steered = await asyncio.to_thread(process, "steer", "chat", "mind the step", store=store)
        await noticed(runtime)
        enough.set()

        assert (steered.returncode, steered.stdout, steered.stderr) == (0, "accepted: chat.2\n", "")
        assert (await receipt.result(SOON)).text == "minded"
        assert (await session.result("chat.2")).turn_id == "chat.1"


def test_what_is_sent_waits_for_whoever_runs_the_agent(store: Path) -> None:
    say(store, "chat", "one")

    sent = shell("send", "chat", "two", "--key", "mail-2", store=store)
    again = shell("send", "chat", "two", "--key", "mail-2", store=store)
    ran = shell("run", "sample_agents:helper", "-s", "chat", "--resume", store=store)

    assert sent.exit_code == 0
    assert sent.stdout == "accepted: chat.2\nit goes on when a Runtime with agent 'helper' opens this store\n"
    assert again.stdout.startswith("known before: chat.2\n")
    assert ran.stdout == "you said two, message 3\n"


def test_what_to_say_may_come_from_stdin_and_be_told_as_json(store: Path) -> None:
    say(store, "chat", "one")

    assert shell("send", "chat", "-", store=store, stdin="two").exit_code == 0
    assert shell_json("steer", "chat", "three", store=store) == {
        "session_id": "chat",
        "input_id": "chat.3",
        "known": False,
    }


def test_what_cannot_be_said_is_explained(store: Path) -> None:
    say(store, "chat", "one")
    shell("send", "chat", "two", "--key", "mail-2", store=store)

    unknown = shell("send", "nobody", "two", store=store)
    empty = shell("steer", "chat", "", store=store)
    other = shell("send", "chat", "three", "--key", "mail-2", store=store)

    assert (unknown.exit_code, empty.exit_code, other.exit_code) == (2, 2, 1)
    assert "there is no session 'nobody'" in unknown.stderr
    assert "the input is empty" in empty.stderr
    assert "use a new key" in other.stderr


def test_nothing_is_said_past_the_filters_of_an_agent(store: Path) -> None:
    ran = shell("run", "sample_agents:masked", "-s", "chat", "it is hunter2", store=store)
    sent = shell("send", "chat", "again hunter2", store=store)
    files = [each for each in store.parent.rglob("*") if each.is_file()]

    assert ran.stdout == "you said it is [secret], message 1\n"
    assert sent.exit_code == 1
    assert "inputs of agent 'masked' pass filters before they are stored" in sent.stderr
    assert "`perdure run MODULE:AGENT` has them" in sent.stderr
    assert [each.name for each in files if b"hunter2" in each.read_bytes()] == []
