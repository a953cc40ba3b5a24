"""The crash kit as users have it: what it counts, what it finds, what it refuses."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, ModelRequest, ToolCall, ToolContext, tool
from perdure.errors import InvalidDefinition
from perdure.testing import FunctionModel
from perdure.testing.crash import Crash, Lab, Report, kill_everywhere, play


def pay_then_answer(request: ModelRequest) -> Any:
    return "paid" if request.messages[-1].role == "tool" else [ToolCall("c", "pay", {"cents": 500})]


@tool(recovery="rerun")
async def pay(cents: int) -> str:
    """Pay. Knows nothing of any lab: its body's return is counted as its effect."""
    return f"{cents} paid"


@tool(name="pay", recovery="rerun")
def pay_on_a_thread(cents: int) -> str:
    """The same as a sync function."""
    return f"{cents} paid"


async def scenario(lab: Lab) -> None:
    async with lab.runtime(agents=[Agent(FunctionModel(pay_then_answer), tools=[pay])]) as runtime:
        session = await runtime.session("order-7")
        await session.run("pay the invoice", key="pay-7")


async def on_a_thread(lab: Lab) -> None:
    async with lab.runtime(agents=[Agent(FunctionModel(pay_then_answer), tools=[pay_on_a_thread])]) as runtime:
        session = await runtime.session("order-7")
        await session.run("pay the invoice", key="pay-7")


async def without_a_key(lab: Lab) -> None:
    async with lab.runtime(agents=[Agent(FunctionModel(pay_then_answer), tools=[pay])]) as runtime:
        session = await runtime.session("order-7")
        await session.run("pay the invoice")


@pytest.mark.parametrize("subject", [scenario, on_a_thread])
def test_everywhere_killed_nothing_is_lost_and_repeats_are_only_in_the_one_window(
    subject: Any, crash_kit: Callable[..., Report]
) -> None:
    report = crash_kit(subject)

    assert (report.lost, report.unknown, report.problems) == (0, 0, [])
    assert {str(row.crash) for row in report.rows if row.repeated} == {
        "before end pay 1.1.0",
        "before append 1: ended 1.0",
        "hang append 1: ended 1.0",
    }
    assert all(sum(row.repeated_by_tool.values()) == row.repeated for row in report.rows)
    assert {tuple(row.repeated_by_tool.items()) for row in report.rows} == {(), (("pay", 1),)}


@pytest.mark.kill
@pytest.mark.slow
def test_really_killed_everywhere_nothing_is_lost(crash_kit: Callable[..., Report]) -> None:
    report = crash_kit(scenario, real=True)

    assert (report.lost, report.problems) == (0, [])
    assert {str(row.crash) for row in report.rows if row.repeated} == {
        "before end pay 1.1.0",
        "before append 1: ended 1.0",
    }
    assert "before end pay 1.1.0" in report.table()


def test_host_that_forgets_its_key_is_found_out() -> None:
    report = kill_everywhere(without_a_key)

    assert "lost accept queue: session order-7 reads differently" in report.problems


def test_lost_turn_is_counted() -> None:
    """A host that does nothing after a crash: what it never said again is lost, what was accepted is not."""

    async def nothing(lab: Lab) -> None: ...

    report = kill_everywhere(scenario, resume=nothing)

    lost = {str(row.crash) for row in report.rows if row.lost}
    assert {"before accept queue", "before commit 1"} <= lost
    assert not {"lost commit 1", "before retire"} & lost


def test_scenario_that_fails_by_itself_is_refused() -> None:
    async def broken(lab: Lab) -> None:
        raise ZeroDivisionError("no scenario")

    with pytest.raises(AssertionError, match=r"fails without any kill: incarnation 1 raised ZeroDivisionError"):
        kill_everywhere(broken)


def test_scenario_that_no_other_process_finds_is_refused() -> None:
    async def local(lab: Lab) -> None: ...

    with pytest.raises(InvalidDefinition, match="top level of a file"):
        kill_everywhere(local, real=True)


def test_dead_incarnation_changes_nothing_more() -> None:
    """A kill runs no `finally`: what the body would undo there stays as it is, in the store and outside."""
    unwound = list[str]()

    async def careful(lab: Lab) -> None:
        @tool(recovery="rerun")
        async def pay(ctx: ToolContext[Any], cents: int) -> str:
            """Pay, and tidy up."""
            try:
                await lab.effect("pay", ctx.idempotency_key)
            finally:
                unwound.append(f"incarnation {lab.incarnation}, {len(lab.ledger)} lines")
                await lab.effect("tidied up", ctx.idempotency_key)
            return "paid"

        async with lab.runtime(agents=[Agent(FunctionModel(pay_then_answer), tools=[pay])]) as runtime:
            session = await runtime.session("s")
            await session.run("pay", key="1")

    played = play(careful, [Crash("effect pay", "lost")])

    assert played.problems == []
    assert [(line.name, line.incarnation) for line in played.ledger] == [
        ("model", 1),
        ("pay", 1),
        ("pay", 2),
        ("tidied up", 2),
        ("model", 2),
    ]
    assert unwound[0] == "incarnation 2, 3 lines", "the first incarnation unwinds only after all is over"


def test_plugin_itself_brings_in_nothing_but_pytest() -> None:
    """The package around it is imported with it; the plugin adds neither the crash kit nor a store to that."""
    code = "import perdure.testing.pytest_plugin, sys; print([m for m in sys.modules if m.startswith('perdure')])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    heavy = ("perdure.testing.crash", "perdure.testing.crash.runner", "perdure.stores.sqlite", "perdure.cli")
    assert not [name for name in heavy if repr(name) in ran.stdout]


@pytest.mark.slow
@pytest.mark.parametrize("loaded", [True, False])
def test_figures_are_printed_at_the_end_of_a_run_that_loads_the_plugin(tmp_path: Path, loaded: bool) -> None:
    Path(tmp_path, "test_mine.py").write_text(
        "from perdure import Agent\n"
        "async def scenario(lab):\n"
        "    async with lab.runtime(agents=[Agent()]) as runtime:\n"
        "        session = await runtime.session('s')\n"
        "        await session.run('hello', key='1')\n"
        "def test_it(crash_kit):\n"
        "    assert crash_kit(scenario, real=True).lost == 0\n"
    )
    plugin = ["-p", "perdure.testing.pytest_plugin"] if loaded else []
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, "--rootdir", str(tmp_path), tmp_path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )

    if not loaded:
        assert "fixture 'crash_kit' not found" in ran.stdout
        return
    assert ran.returncode == 0, ran.stdout
    assert "perdure crash kit" in ran.stdout
    assert "0 lost, 0 repeated, 0 unknown, 0 problems" in ran.stdout


def test_a_point_that_a_run_never_passes_is_counted_apart_and_many_are_a_problem() -> None:
    """What runs at once may take another order: a kill that did not happen shows nothing, and breaks nothing."""
    runs = itertools.count()

    async def wandering(lab: Lab) -> None:
        await lab.mark("always")
        if next(runs) == 0:
            await lab.mark("only undisturbed")

    report = kill_everywhere(wandering)

    assert (report.rows[1].problems, report.unreached, report.kills) == ([], ["before only undisturbed"], 1)
    assert report.problems == ["1 of 2 points were not reached"]
    assert str(report).endswith("1 problems, 1 not reached")
    assert "! point not reached" in report.table()


def test_a_point_that_a_test_names_itself_must_be_reached() -> None:
    played = play(scenario, [Crash("no such point")])

    assert played.unreached == ["no such point"]
    assert played.problems == ["it ended without passing 'no such point'"]
