"""A coding agent: it runs the tests of a small project, finds out why one fails, repairs it, and runs them again.

    python -m perdure.examples.coder FOLDER                      a scripted model: no key, no network
    python -m perdure.examples.coder FOLDER anthropic:claude-…   a real one, with its key

The project is FOLDER/project, written if it is not there; commands of the agent can change nothing else. Where the
machine cannot confine them they are refused, unless `--unsandboxed` allows them all the same. Kill this program
whenever you like and start it again: the turn goes on, and a test run that went on meanwhile is not begun again.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from perdure import Agent, ModelRequest, Runtime, ToolCall, Workspace
from perdure.model.event import AnyEvent, TextDelta, ToolFinished, ToolStarted, TurnStarted
from perdure.model.tool import Ok
from perdure.ports.provider import Provider
from perdure.testing import FunctionModel
from perdure.wire import outcome_words
from perdure.workspace.policy import Policy, Rule

PROMPT = "A test of this project fails. Find out why, repair the code, not the test, and show that all tests pass."
TESTS = [sys.executable, "-m", "unittest"]
SHOP = '''def total(prices: list[int]) -> float:
    """What an order costs: from 100 on, 10 % less."""
    whole = sum(prices)
    return whole * 0.9 if whole > 100 else whole
'''
TEST_SHOP = '''import time
import unittest
from pathlib import Path

from shop import total


def note(text: str) -> None:
    with Path("runs.log").open("a") as log:
        log.write(text + "\\n")


def setUpModule() -> None:
    """Stands for a long test run: it takes as long as there is a file "slow"."""
    note("began")
    while Path("slow").exists():
        note("at work")
        time.sleep(0.05)


def tearDownModule() -> None:
    note("ended")


class TotalTest(unittest.TestCase):
    def test_a_small_order_costs_what_its_parts_cost(self) -> None:
        self.assertEqual(total([20, 30]), 50)

    def test_from_100_on_it_costs_less(self) -> None:
        self.assertEqual(total([60, 40]), 90)
'''


def write_project(folder: Path) -> None:
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / "shop.py").write_text(SHOP)
        (folder / "test_shop.py").write_text(TEST_SHOP)


def scripted(request: ModelRequest) -> str | list[ToolCall]:
    """Stands in for a model. What it says follows from what it was told: it can be asked in any process."""
    told = [result for message in request.messages for result in message.tool_results]
    fix = {"path": "shop.py", "old_text": "if whole > 100", "new_text": "if whole >= 100"}
    steps = [
        ToolCall(name="run_test", args={"command": TESTS}),
        ToolCall(name="read_file", args={"path": "shop.py"}),
        ToolCall(name="edit_file", args=fix),
        ToolCall(name="run_test", args={"command": TESTS}),
    ]
    if len(told) < len(steps):
        return [steps[len(told)]]
    if told[-1].content.get("verdict") == "passed":
        return "An order of exactly 100 got no discount. Now it does, and all tests pass."
    return "The tests do not pass yet."


def coder(project: Path, model: str | Provider, unsandboxed: bool = False) -> Agent[str]:
    """The agent: files and commands of one folder, without a network; of programs, the tests run without asking."""
    policy = Policy((Rule("allow", TESTS[0], tuple(TESTS[1:])),))
    workspace = Workspace([project], policy=policy, unsandboxed=unsandboxed)
    return Agent(model, name="coder", instructions="You repair Python code.", tools=[workspace.tools(commands=True)])


def say(event: AnyEvent) -> None:
    match event:
        case TurnStarted(resumed=True):
            print("resumed: the turn goes on where it was", flush=True)
        case ToolStarted():
            print(f"{event.tool} {'begins' if event.attempt == 1 else 'goes on: the same call'}", flush=True)
        case ToolFinished(outcome=Ok(value=dict() as told)) if "verdict" in told:
            failures = [f"; {each['name']}: {each['message']}" for each in told.get("failures", ())]
            print(f"{event.tool} ended: {told['verdict']}{''.join(failures)}", flush=True)
        case ToolFinished(outcome=outcome) if outcome is not None:
            print(f"{event.tool} ended: {str(outcome_words(outcome))[:200]}", flush=True)
        case TextDelta(text=text):
            print(f"agent: {text}", flush=True)
        case _:
            pass


async def main(folder: Path, model: str | None = None, unsandboxed: bool = False) -> None:
    """The whole host program. Started again after a kill, it does the same, and the turn goes on."""
    write_project(folder / "project")
    agent = coder(folder / "project", model or FunctionModel(scripted), unsandboxed)
    async with Runtime(folder / "agent" / "store.db", agents=[agent]) as runtime:
        session = await runtime.session("fix")
        async with session.stream(PROMPT, key="fix-1") as turn:
            async for event in turn:
                say(event)
        (await turn.result()).raise_for_outcome()


if __name__ == "__main__":
    folder, *model = [each for each in sys.argv[1:] if each != "--unsandboxed"] or sys.exit(__doc__)
    asyncio.run(main(Path(folder).absolute(), model[0] if model else None, "--unsandboxed" in sys.argv))
