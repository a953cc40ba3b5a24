"""`perdure operations` and `perdure call`, also while a runtime runs elsewhere."""

import asyncio
import json
from pathlib import Path

import pytest

from perdure import Runtime
from tests.cli.sample_agents import noting
from tests.cli.shell import process, shell, shell_json

AGENT = "sample_agents:noting"


@pytest.fixture
def kitchen(store: Path) -> Path:
    """A store with a session of the noting agent."""

    async def main() -> None:
        async with Runtime(store, agents=[noting]) as runtime:
            await (await runtime.session("kitchen")).run("hello")

    asyncio.run(main())
    return store


def test_operations_are_listed_without_a_store(store: Path) -> None:
    listed = shell("operations", AGENT, store=store)
    found = shell_json("operations", AGENT, store=store)

    assert [line.split()[:3] for line in listed.stdout.splitlines()] == [
        ["operation", "kind", "arguments"],
        ["notes.about", "query", "without"],
        ["notes.find", "query", "word?"],
        ["notes.add", "command", "text,"],
        ["notes.tidy", "task", "on"],
    ]
    assert [(each["name"], each["kind"], each["session_param"]) for each in found] == [
        ("notes.about", "query", "forbidden"),
        ("notes.find", "query", "required"),
        ("notes.add", "command", "required"),
        ("notes.tidy", "task", "required"),
    ]
    assert found[1]["input_schema"]["properties"]["word"] == {
        "type": "string",
        "default": "",
        "description": "what to look for",
    }
    assert not store.exists()


def test_agent_without_operations_says_so(store: Path) -> None:
    assert shell("operations", "sample_agents:helper", store=store).stdout == "its plugins offer no operations\n"
    assert shell_json("operations", "sample_agents:helper", store=store) == []


def test_command_and_query_work_on_a_session(kitchen: Path) -> None:
    added = shell("call", AGENT, "notes.add", '{"text": "buy tea"}', "--session", "kitchen", store=kitchen)
    listed = shell("call", AGENT, "notes.find", "-s", "kitchen", store=kitchen)
    read = shell("call", AGENT, "notes.find", "-", "-s", "kitchen", store=kitchen, stdin='{"word": "coffee"}')

    assert (added.exit_code, added.stdout, added.stderr) == (0, "1\n", "")
    assert (listed.exit_code, listed.stdout) == (0, '[\n  "buy tea"\n]\n')
    assert read.stdout == "[]\n"


def test_operation_without_a_session_needs_no_store_and_cannot_move_the_cursor(store: Path) -> None:
    called = shell("call", AGENT, "notes.about", store=store)

    assert (called.exit_code, called.stdout) == (0, "notes \ufffd[31mof a session\n")
    assert not store.exists()


def test_turn_that_a_command_queues_runs_and_is_reported(kitchen: Path) -> None:
    args = '{"text": "tea", "tell": true}'
    told = shell("call", AGENT, "notes.add", args, "-s", "kitchen", store=kitchen)
    [turn] = shell_json("call", AGENT, "notes.add", args, "-s", "kitchen", store=kitchen)["turns"]

    assert (told.exit_code, told.stdout) == (0, "1\n")
    assert told.stderr == "perdure: turn kitchen.2: finished: you said noted tea, message 3\n"
    assert (turn["turn_id"], turn["text"]) == ("kitchen.2", "you said noted tea, message 3"), "the same key"


def test_turn_that_a_command_queues_and_that_fails_is_reported_with_its_reason(kitchen: Path) -> None:
    args = '{"text": "tea", "tell": true}'
    told = shell("call", "sample_agents:locked_out", "notes.add", args, "-s", "kitchen", store=kitchen)

    assert (told.exit_code, told.stdout) == (1, "1\n")
    assert told.stderr == "perdure: turn kitchen.2: provider_failed: the key is not valid\n"


def test_outcome_for_machines_has_everything(kitchen: Path) -> None:
    found = shell_json("call", AGENT, "notes.add", '{"text": "tea"}', "-s", "kitchen", store=kitchen)

    assert found == {
        "plugin": "notes",
        "output": 1,
        "events": [{"added": "tea"}],
        "directives": [],
        "accepted": [],
        "turns": [],
    }


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["notes.fnid", "-s", "kitchen"], 2, "operation 'notes.fnid': no plugin offers it; near: notes.find"),
        (["notes.find"], 2, "operation 'notes.find' works on a session: name it with --session"),
        (["notes.about", "-s", "kitchen"], 2, "it works on no session: call it without 'kitchen'"),
        (["notes.find", "-s", "cellar"], 2, "there is no session 'cellar'"),
        (["notes.find", '{"word": 7}', "-s", "kitchen"], 2, "operation 'notes.find': $.word: expected str, got int"),
        (["notes.find", "{word}", "-s", "kitchen"], 2, "the arguments are not JSON"),
        (["notes.find", "[]", "-s", "kitchen"], 2, "the arguments are a JSON object"),
        (["notes.add", '{"text": ""}', "-s", "kitchen"], 1, "operation 'notes.add': ValueError: nothing to write down"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_call_that_cannot_be_made_is_explained(args: list[str], code: int, says: str, kitchen: Path) -> None:
    result = shell("call", AGENT, *args, store=kitchen)

    assert (result.exit_code, result.stdout) == (code, "")
    assert says in result.stderr
    assert shell_json("call", AGENT, "notes.find", "-s", "kitchen", store=kitchen)["output"] == []


def test_a_task_prints_the_handle_of_its_process_which_every_command_takes(kitchen: Path) -> None:
    called = shell("call", AGENT, "notes.tidy", "-s", "kitchen", store=kitchen)

    assert called.exit_code == 0
    handle = json.loads(called.stdout)
    assert handle["__handle__"] == "process"
    told = shell("logs", called.stdout.strip(), "--json", store=kitchen)
    assert json.loads(told.stdout.splitlines()[0])["process_id"] == handle["id"]
    assert [row["id"] for row in shell_json("ps", "--all", store=kitchen)] == [handle["id"]]


def test_session_of_another_agent_is_refused(kitchen: Path) -> None:
    result = shell("call", "sample_agents:helper", "notes.find", "-s", "kitchen", store=kitchen)

    assert result.exit_code == 1
    assert "agent 'noting' is not part of this Runtime" in result.stderr


async def test_command_from_another_process_is_seen_by_a_running_runtime(store: Path) -> None:
    async with Runtime(store, agents=[noting]) as runtime:
        session = await runtime.session("kitchen")
        await session.run("hello")
        await session.call("notes.add", {"text": "tea"})
        line = ["call", AGENT, "notes.add", '{"text": "milk", "tell": true}', "-s", "kitchen", "--json"]
        called = await asyncio.to_thread(process, *line, store=store)
        listed = await session.call("notes.find")
        result = await session.result("kitchen.2")

    assert (called.returncode, called.stderr) == (0, "")
    assert '"output": 2' in called.stdout
    assert listed.output == ["tea", "milk"]
    assert result.text == "you said noted milk, message 3"
