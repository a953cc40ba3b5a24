"""The contract kit finds planted faults by name, and lets sound plugins pass."""

from __future__ import annotations

import asyncio
import unittest
from collections.abc import Callable
from typing import Any

import pytest

from perdure import Plugin
from perdure.plugins import CheckpointContext, PromptContext
from perdure.testing.crash import Crash, Point
from perdure.testing.plugin_contract import Report, called_again, check_plugin, plugin_contract
from perdure.testing.plugin_contract.probe import HookCall
from tests.plugins import broken

pytestmark = pytest.mark.slow

FAULTS: list[tuple[type[Plugin], str, str, str]] = [
    (broken.Nameless, "defined", "", "needs an id of 1 to 100 printable characters"),
    (broken.Patient, "defined", "", "its time limit is 86400 s"),
    (broken.Fickle, "defined", "", "its id or version changes"),
    (broken.Misspelt, "defined", "", "before_toolcall of plugin 'misspelt' is no hook and would never be called"),
    (broken.Misshapen, "defined", "", "is called with (ctx): missing a required argument: 'args'"),
    (broken.Unsaved, "defined", "", "let `revision` count its changes"),
    (broken.Talkative, "undisturbed", "", "turn 1: the turn ends as plugin_finalize_turn"),
    (broken.Clumsy, "undisturbed", "", "turn_persisted: KeyError: 'cents'"),
    (broken.Meddling, "arguments", "before_tool_call", "it changes ctx.args, which it was only shown"),
    (broken.Mixing, "undisturbed", "", "filter_value: TypeError"),
    (broken.Cutting, "undisturbed", "", "turn 1: the turn ends as context_prepare_turn"),
    (
        broken.Refusing,
        "undisturbed",
        "",
        "turn 1 cannot go on: plugin 'refusing': transform_input: it returned a NoneType",
    ),
    (broken.Alive, "state", "snapshot", "object"),
    (
        broken.Forgetful,
        "state",
        "restore",
        "what was saved is not what comes back: {'seen': ['probed.1.1.0', 'probed.3.1.0', 'probed.3.1.1']} became",
    ),
    (broken.Silent, "state", "after_tool_call", "its state changed in it, and its revision did not move"),
    (broken.Reborn, "state", "restore", "the revision is 0 after restoring"),
    (broken.Expecting, "state", "restore", "without anything saved"),
    (broken.Gullible, "state", "restore", "it takes 7 for a state and forgets it"),
    (broken.Trusting, "state", "restore", "for a state and then fails"),
    (broken.Restless, "state", "snapshot", "taken twice it is different"),
    (broken.Sharing, "apart", "", "a session remembers what happened in another one"),
    (broken.Gossip, "apart", "", "a session goes differently after another one"),
    (broken.OnlyOnce, "disturbed", "before_tool_call", "when it is called twice: the call of look_up ends as before_"),
    (broken.Dependent, "disturbed", "before_tool_call", "when it has no services: the call of look_up ends as before_"),
    (broken.Stubborn, "disturbed", "prompt", "it swallows its cancellation"),
    (broken.Deaf, "disturbed", "prompt", "it ignores its cancellation"),
    (broken.Jammed, "disturbed", "prompt", "after it once raised, turn 2: the turn ends as context_prepare_turn"),
    (broken.TooLate, "replay", "", "killed at lost commit 2, it remembers"),
    (broken.Naive, "replay", "", "it remembers"),
    (broken.Numbering, "replay", "", "session probed reads differently"),
]


def found(report: Report) -> list[str]:
    return [f"{finding.check} | {finding}" for finding in report.findings]


@pytest.mark.parametrize(("plugin", "check", "hook", "says"), FAULTS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_planted_fault_is_found_and_named(plugin: type[Plugin], check: str, hook: str, says: str) -> None:
    report = check_plugin(plugin, checks=[check])

    named = [f for f in report.findings if (f.check, f.hook) == (check, hook) and says in f.what]
    assert named, found(report)


def test_a_tool_that_changes_state_in_silence_is_found() -> None:
    report = check_plugin(broken.SilentTool, calls=[("count_up", {})], checks=["state"])

    assert any("its state changed between two hooks" in f.what for f in report.findings), found(report)


def test_a_tool_of_the_plugin_that_raises_is_found() -> None:
    report = check_plugin(broken.BadTool, calls=[("divide", {"by": 0})], checks=["undisturbed"])

    assert "undisturbed | turn 1: the call of divide ends as tool_raised: ZeroDivisionError: division by zero" in found(
        report
    )


def test_a_plugin_without_hooks_passes() -> None:
    class Nothing(Plugin):
        id = "nothing"

    report = check_plugin(Nothing)

    assert found(report) == []
    assert (report.hooks, report.disturbed) == ((), 0)


@pytest.mark.parametrize(
    ("make", "needs"),
    [
        (broken.Counter, {}),
        (broken.Guard, {}),
        (broken.Everything, {"calls": [("count_up", {})]}),
        (broken.Dependent, {"fails_without_services": ["before_tool_call"]}),
    ],
    ids=["Counter", "Guard", "Everything", "Dependent"],
)
def test_a_sound_plugin_passes(make: Callable[[], Plugin], needs: dict[str, Any]) -> None:
    report = check_plugin(make, **needs)

    assert found(report) == []
    assert report.kills >= 2
    assert report.unseen == ()


def test_every_hook_is_disturbed_in_every_way_it_can_be() -> None:
    report = check_plugin(broken.Everything, calls=[("count_up", {})], checks=["disturbed"])

    later, plain = 8, 11  # async hooks can hang, be cancelled and lose their services too
    assert len(report.hooks) == later + plain
    assert report.disturbed == later * 6 + plain * 3


class Frozen(Plugin):
    """A plugin that nobody can change: the kit watches it all the same."""

    id = "frozen"

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} is as it is")

    def prompt(self, ctx: PromptContext) -> list[str]:
        return ["Answer briefly."]

    async def at_checkpoint(self, ctx: CheckpointContext) -> None:
        await asyncio.sleep(0)


def test_a_frozen_plugin_can_be_watched() -> None:
    report = check_plugin(Frozen)

    assert found(report) == []
    assert (report.hooks, report.disturbed) == (("prompt", "at_checkpoint"), 3 + 6)


def test_options_reach_the_plugin() -> None:
    class Strict(Plugin):
        id = "strict"

        def for_session(self, ctx: Any) -> Plugin:
            if ctx.options != {"level": 3}:
                raise ValueError(f"{ctx.options!r} is no level")
            return type(self)()

    assert found(check_plugin(Strict, options={"level": 3})) == []
    assert "None is no level" in found(check_plugin(Strict))[0]


# ---------------------------------------------------------------------- as a test case


def run(case: type[unittest.TestCase]) -> unittest.TestResult:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return result


def test_the_contract_is_a_test_case_with_a_test_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(plugin_contract(broken.Counter))

    assert (result.testsRun, result.failures, result.errors) == (7, [], [])
    assert "plugin counter: 1 hooks, 3 disturbed turns" in capsys.readouterr().out


def test_a_failing_check_fails_its_own_test_with_what_was_found() -> None:
    result = run(plugin_contract(broken.Meddling))

    [(test, text)] = result.failures
    assert test.id().endswith("test_3_arguments")
    assert "plugin 'meddling' breaks its contract:\nbefore_tool_call: it changes ctx.args" in text


# ---------------------------------------------------------------------- hooks of recorded steps

TRACE = [Point(name, "record") for name in ("append 1: replied 1", "append 1: started 1.0", "append 1: ended 1.0")]


@pytest.mark.parametrize(
    ("crash", "call", "again"),
    [
        (Crash("append 1: replied 1", "lost"), HookCall(2, "transform_response", "s.1", "1"), True),
        (Crash("append 1: replied 1", "before"), HookCall(2, "transform_response", "s.1", "1"), False),
        (Crash("append 1: replied 1", "lost"), HookCall(1, "transform_response", "s.1", "1"), False),
        (Crash("append 1: replied 1", "lost"), HookCall(2, "transform_response", "s.2", "1"), False),
        (Crash("append 1: started 1.0", "lost"), HookCall(2, "before_tool_call", "s.1", "1.0"), True),
        (Crash("append 1: started 1.0", "lost"), HookCall(2, "after_tool_call", "s.1", "1.0"), False),
        (Crash("append 1: ended 1.0", "lost"), HookCall(2, "after_tool_call", "s.1", "1.0"), True),
    ],
)
def test_a_hook_of_a_recorded_step_must_not_be_called_again(crash: Crash, call: HookCall, again: bool) -> None:
    assert bool(list(called_again(crash, TRACE, [call]))) is again
