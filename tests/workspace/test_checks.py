"""run_test and run_build_command: what is run, what a model is told of it, and what becomes of it in the background."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Runtime, ToolCall, Workspace
from perdure.model.command import CommandSettings
from perdure.testing import ScriptedModel
from perdure.workspace.checks import SHOWN_BYTES, shown
from perdure.workspace.diagnosis.report import Diagnosis, Diagnostic, FailedTest, Tests
from perdure.workspace.policy import Policy
from tests.kit import crash, until
from tests.workspace.asking import Conversation

pytestmark = pytest.mark.usefixtures("linux")

RECORDED = Path(__file__).parent / "recorded"
KILL = "python3 -c 'import os; os.kill(os.getppid(), 9)'; true"
UNITTEST = f"{shlex.quote(sys.executable)} -m unittest"


@pytest.fixture
async def model(work: Path) -> AsyncIterator[Conversation]:
    workspace = Workspace([work], unsandboxed=True, policy=Policy(otherwise="allow"), read=[RECORDED])
    found = Conversation(workspace.tools(commands=True))
    async with Runtime("memory", agents=[found.agent], commands=CommandSettings(head=100, tail=100)) as found.runtime:
        found.session = await found.runtime.session("s")
        yield found


def replay(case: str, code: int) -> str:
    """A command that prints what was recorded, and ends with a code."""
    folder = shlex.quote(str(RECORDED / case))
    return f"cat {folder}.stdout; cat {folder}.stderr >&2; exit {code}"


# ---------------------------------------------------------------------- what a model is told


async def test_failures_are_told_from_the_whole_output_and_not_from_its_head_and_tail(model: Conversation) -> None:
    told = await model.call("run_test", command=replay("pytest-9.2.0/failing", 1))

    assert (told["status"], told["exit_code"], told["verdict"], told["tool"]) == ("exited", 1, "failed", "pytest")
    assert told["tests"] == {"passed": 2, "failed": 4, "skipped": 1, "errors": 1}
    assert told["failures"][1]["name"] == "tests/test_price.py::test_total_counts_all"
    assert (told["failures"][1]["file"], told["failures"][1]["line"]) == ("tests/test_price.py", 6)
    assert "stdout" not in told
    assert told["id"]


async def test_diagnostics_of_a_build_are_told(model: Conversation) -> None:
    told = await model.call("run_build_command", command=replay("gcc-12.2.0/failing", 1))

    assert (told["verdict"], told["tool"]) == ("failed", "cc")
    assert [each["severity"] for each in told["diagnostics"]] == ["error"] * 2 + ["warning"] * 2 + ["note"] * 4
    assert told["diagnostics"][1]["file"] == "main.c"


async def test_output_that_is_not_understood_is_no_diagnosis_and_not_zero_failures(model: Conversation) -> None:
    passed = await model.call("run_test", command="echo all is well")
    failed = await model.call("run_test", command="echo oh no; exit 4")

    assert (passed["diagnosis"], passed["verdict"]) == (None, "unknown")
    assert "tests" not in passed
    assert "failures" not in passed
    assert (failed["diagnosis"], failed["exit_code"], failed["stdout"]) == (None, 4, "oh no\n")
    assert failed["verdict"] == "failed", "its code says so, whatever it printed"


async def test_a_run_that_is_not_understood_and_was_killed_is_incomplete(model: Conversation) -> None:
    told = await model.call("run_test", command=f"echo so far so good; {KILL}")

    assert (told["diagnosis"], told["verdict"]) == (None, "incomplete")


async def test_a_run_that_could_not_begin_is_a_failure_of_the_call(model: Conversation, work: Path) -> None:
    (work / "broken").write_bytes(b"\x7fELF and no more")
    (work / "broken").chmod(0o755)

    assert await model.call("run_test", command=["./broken"]) == "spawn_failed"
    assert await model.call("run_command", command=["./broken"]) == "spawn_failed"


async def test_a_run_that_was_killed_is_incomplete_whatever_it_printed(model: Conversation) -> None:
    printed = "echo '===== 7 passed in 0.01s ====='"

    killed = await model.call("run_test", command=f"{printed}; {KILL}")
    failed = await model.call("run_test", command=f"{printed}; exit 1")

    assert (killed["status"], killed["verdict"]) == ("signaled", "incomplete")
    assert failed["verdict"] == "failed"
    assert "exit code 1, although the output tells of no failure" in failed["note"]


async def test_a_report_is_read_in_place_of_the_output_unless_it_is_older_than_the_run(
    model: Conversation, work: Path
) -> None:
    report = shlex.quote(str(RECORDED / "vitest-4.1.12/junit.xml"))
    (work / "old.xml").write_text("<testsuite><testcase name='a'/></testsuite>")
    os.utime(work / "old.xml", (1, 1))

    fresh = await model.call("run_test", command=f"cp {report} new.xml; exit 1", report="new.xml")
    stale = await model.call("run_test", command="true", report="old.xml")
    absent = await model.call("run_test", command="true", report="none.xml")

    assert (fresh["tool"], fresh["verdict"], fresh["tests"]["failed"]) == ("junit", "failed", 3)
    assert stale["diagnosis"] is None
    assert "old.xml is older than this run" in stale["note"]
    assert "no report was read" in absent["note"]


async def test_a_run_goes_on_in_the_background_and_is_read_when_it_has_ended(model: Conversation, work: Path) -> None:
    gate = work / "gate"
    command = f"until [ -e gate ]; do sleep 0.05; done; {replay('pytest-9.2.0/failing', 1)}"

    running = await model.call("run_test", command=command, background_after=0)
    early = await model.call("read_diagnosis", id=running["id"])
    gate.touch()
    await model.call("wait_command", id=running["id"])
    told = await model.call("read_diagnosis", id=running["id"], offset=4)

    assert running["status"] == "running"
    assert early == "still_running"
    assert told["verdict"] == "failed"
    assert [each["name"] for each in told["failures"]] == ["tests/test_price.py::TestGroup::test_in_class[2]"]


def test_more_than_there_is_room_for_is_said_and_read_on() -> None:
    failures = tuple([FailedTest(f"test_{n}", "no", "a.py", n, "x" * 4000) for n in range(50)])
    whole = Diagnosis("pytest", "failed", Tests(0, 50, 0, 0), failures, (Diagnostic("error", "bad"),))

    first = shown(whole)
    pages, at = [first], first["next_offset"]
    while "next_offset" in (page := shown(whole, at)):
        pages, at = [*pages, page], page["next_offset"]
    pages.append(page)

    assert len(first["failures"]) * 1200 <= SHOWN_BYTES
    assert [each["name"] for page in pages for each in page["failures"]] == [f"test_{n}" for n in range(50)]
    assert pages[-1]["diagnostics"] == [{"severity": "error", "message": "bad"}]


# ---------------------------------------------------------------------- what is run


async def test_the_runner_is_found_and_a_filter_given_to_it(model: Conversation, work: Path) -> None:
    (work / "test_sum.py").write_text(
        "import unittest\n\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(1, 2)\n"
        "    def test_b(self):\n        pass\n"
    )

    whole = await model.call("run_test")
    part = await model.call("run_test", filter="test_b")

    assert (whole["runner"], whole["because"]) == ("unittest", "test_sum.py, and no file names pytest")
    assert whole["command"] == "python3 -m unittest"
    assert (whole["verdict"], whole["tests"]["failed"], whole["tests"]["passed"]) == ("failed", 1, 1)
    assert whole["failures"][0]["file"] == str(work.resolve() / "test_sum.py")
    assert (part["command"], part["verdict"]) == ("python3 -m unittest -k test_b", "passed")
    assert (len(whole["failures"]), part["failures"]) == (1, [])
    assert part["tests"] == {"passed": 1, "failed": 0, "skipped": 0, "errors": 0}


async def test_tests_that_are_written_for_pytest_are_not_given_to_unittest(model: Conversation, work: Path) -> None:
    """unittest would find none of them, and say that nothing failed."""
    (work / "tests").mkdir()
    (work / "tests" / "test_sum.py").write_text("def test_sum():\n    assert 1 + 1 == 3\n")

    told = await model.call("run_test")

    assert (told["runner"], told["because"]) == ("pytest", "tests in tests/test_sum.py that are written for pytest")


async def test_a_choice_between_runners_is_left_to_the_model(model: Conversation, work: Path) -> None:
    (work / "go.mod").write_text("module x\n")
    (work / "test_a.py").write_text("import unittest\n")
    (work / "Makefile").write_text("test:\n\techo made\n")

    told = await model.told("run_test")
    chosen = await model.call("run_test", runner="make test")
    wrong = await model.told("run_test", runner="jest")

    assert "unittest (test_a.py, and no file names pytest), go (go.mod), make test (the target test" in told
    assert (chosen["stdout"].splitlines()[-1], chosen["other_runners"]) == ("made", ["unittest", "go"])
    assert "has no runner 'jest'" in wrong


async def test_a_run_is_found_again_after_a_crash_whatever_the_files_say_by_then(work: Path, tmp_path: Path) -> None:
    (work / "test_slow.py").write_text(
        "import time, unittest\nfrom pathlib import Path\n\n\n"
        "class T(unittest.TestCase):\n    def test_a(self):\n"
        "        with Path('began').open('a') as began:\n            began.write('once;')\n"
        "        while not Path('gate').exists():\n            time.sleep(0.02)\n"
    )
    tools = Workspace([work], unsandboxed=True, policy=Policy(otherwise="allow")).tools(commands=True)
    agent = Agent(ScriptedModel([[ToolCall(name="run_test", args={})]]), name="model", tools=[tools])
    first = await Runtime(tmp_path / "agent.db", agents=[agent]).__aenter__()
    receipt = await (await first.session("s")).send("test it")
    await until(lambda: (work / "began").exists())
    await crash(first)
    (work / "go.mod").write_text("module x\n")
    (work / "gate").touch()

    again = Agent(ScriptedModel(["I see."]), name="model", tools=[tools])
    async with Runtime(tmp_path / "agent.db", agents=[again]) as second:
        result = await (await second.session("s")).result(receipt.turn_id)

    [call] = result.tool_calls
    assert (call.value["verdict"], call.value["command"]) == ("passed", "python3 -m unittest")
    assert (work / "began").read_text() == "once;"


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({}, "no_runner"),
        ({"command": ""}, "invalid_tool_args"),
        ({"command": "true", "filter": "x"}, "invalid_tool_args"),
        ({"cwd": "nowhere"}, "not_found"),
        ({"cwd": "../elsewhere"}, "outside_workspace"),
        ({"command": "true", "timeout": -1}, "invalid_tool_args"),
        ({"command": "true", "background_after": float("nan")}, "invalid_tool_args"),
    ],
)
async def test_what_cannot_be_run_is_said(model: Conversation, args: dict[str, Any], code: str) -> None:
    assert await model.call("run_test", **args) == code


async def test_a_filter_is_no_option_of_the_runner(model: Conversation, work: Path) -> None:
    (work / "test_a.py").write_text("import unittest\n")
    (work / "package.json").write_text('{"scripts": {"build": "tsc"}}')

    assert await model.call("run_test", filter="--co") == "invalid_tool_args"
    assert await model.call("run_test", filter="") == "invalid_tool_args"
    assert await model.call("read_diagnosis", id="nothing") == "unknown_command"


async def test_files_of_a_project_that_cannot_be_read_say_nothing(model: Conversation, work: Path) -> None:
    (work / "pyproject.toml").mkdir()
    (work / "package.json").symlink_to("/etc/hostname")
    (work / "Makefile").write_bytes(b"\xff\xfe test:\n" * 10)

    assert await model.call("run_test") == "no_runner"
