"""Which cases `make test` runs and which are left to `make gate`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.lanes import FEW, REAL, Case, Counts, in_test, reason_of, summary

ROOT = Path(__file__).parent.parent
MODES = ("before", "lost", "hang")


def cube(*, kill: bool = False, positions: int = 12) -> list[Case]:
    stores = ("",) if kill else ("memory", "sqlite")
    return [
        Case("test_kill", (position,), mode, store, kill=kill)
        for store in stores
        for position in range(positions)
        for mode in MODES
    ]


def run_by_test(cases: list[Case]) -> list[Case]:
    return [case for case, is_test in zip(cases, in_test(cases), strict=True) if is_test]


def test_every_position_of_a_cube_is_tested_once_with_modes_and_stores_in_turns() -> None:
    chosen = run_by_test(cube())

    assert sorted(case.position for case in chosen) == [(position,) for position in range(12)]
    assert Counter(case.mode for case in chosen) == {"before": 4, "lost": 4, "hang": 4}
    assert Counter(case.store for case in chosen) == {"memory": 6, "sqlite": 6}


def test_a_way_to_die_and_a_store_that_few_positions_have_are_tested_too() -> None:
    cases = cube()
    cases += [Case("test_kill", (0,), "late", "memory"), Case("test_kill", (1,), "before", "network")]

    chosen = run_by_test(cases)

    assert "late" in {case.mode for case in chosen}
    assert "network" in {case.store for case in chosen}


def test_few_cases_of_real_kills_are_tested_and_each_mode() -> None:
    chosen = run_by_test(cube(kill=True, positions=40))

    assert len(chosen) <= REAL
    assert {case.mode for case in chosen} == set(MODES)


def test_of_many_real_kills_that_are_listed_by_anything_a_few_are_tested() -> None:
    chosen = run_by_test([Case("test_kill", (step,), kill=True) for step in range(40)])

    assert 1 < len(chosen) <= REAL


def test_of_a_slow_function_each_position_is_tested_once_however_few_there_are() -> None:
    cases = [case._replace(slow=True) for case in cube(positions=1)]

    assert len(run_by_test(cases)) == len(MODES), "one case, and one for each mode that it is not"


def test_slow_functions_are_tested_on_one_store_each_and_not_all_on_the_same() -> None:
    cases = [
        Case(f"test_killed_anywhere_{number}", (), "", store, slow=True)
        for number in range(20)
        for store in ("memory", "sqlite")
    ]

    chosen = run_by_test(cases)

    assert [case.test for case in chosen] == [f"test_killed_anywhere_{number}" for number in range(20)]
    assert {case.store for case in chosen} == {"memory", "sqlite"}


def test_what_differs_in_neither_mode_nor_store_is_tested_whole() -> None:
    cases = [Case("test_words", (word,)) for word in range(100)]

    assert all(in_test(cases))


def test_a_function_with_few_cases_is_tested_whole() -> None:
    cases = cube(positions=1)[:FEW]

    assert all(in_test(cases))


def test_what_is_marked_gate_is_the_gates_alone() -> None:
    marked, other = Case("test_long", ("all",), gate=True), Case("test_long", ("one",))

    assert in_test([marked, other]) == [False, True]


def test_the_choice_is_the_same_every_time() -> None:
    assert in_test(cube()) == in_test(cube())


# ---------------------------------------------------------------------- of the tree itself


def collected(*arguments: str) -> list[str]:
    """Return the ids of the cases that pytest would run, in its own process."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in ran.stdout.splitlines() if "::" in line]


CUBES = ("tests/crash/test_matrix.py", "tests/crash/test_wakes.py", "tests/observe/test_feed.py")


@pytest.mark.slow
def test_the_two_lanes_together_are_everything_and_no_case_is_in_both() -> None:
    everything, test, gate = collected(*CUBES), collected("--lane=test", *CUBES), collected("--lane=gate", *CUBES)

    assert Counter(test) + Counter(gate) == Counter(everything)
    assert set(test).isdisjoint(gate)


SPLIT = """
import sys, pytest
from tests.lanes import selected

class Splits:
    def pytest_collection_finish(self, session):
        test, gate = selected("test", session.items), selected("gate", session.items)
        assert len(test) + len(gate) == len(session.items) == len({*test, *gate}), "a case is lost, or in both lanes"
        print("split:", len(test), len(gate))

sys.exit(pytest.main(["-q", "-q", "--collect-only", "-p", "no:cacheprovider"], plugins=[Splits()]))
"""


@pytest.mark.gate
@pytest.mark.slow
def test_every_case_of_the_tree_is_in_one_lane() -> None:
    ran = subprocess.run([sys.executable, "-c", SPLIT], cwd=ROOT, capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stdout[-2_000:]
    test, gate = map(int, re.findall(r"split: (\d+) (\d+)", ran.stdout)[0])
    assert 1_000 < gate < test


@pytest.mark.slow
def test_a_cube_of_the_tree_passes_every_point_on_every_store_in_the_test_lane() -> None:
    name = "test_kill_in_process_has_its_ruled_fate"
    everything = [case for case in collected(CUBES[0]) if f"::{name}[" in case]
    test = [case for case in collected("--lane=test", CUBES[0]) if f"::{name}[" in case]

    assert {point_of(case) for case in test} == {point_of(case) for case in everything}
    assert len(test) * 4 < len(everything)
    for word in ("-memory]", "-sqlite]", "[before ", "[lost ", "[hang ", "[late "):
        assert any(word in case for case in test), word


def point_of(case: str) -> str:
    """Return the point that a case's id names: `…[lost commit 1-sqlite]` is at `commit 1`."""
    return case.partition("[")[2].rpartition("-")[0].partition(" ")[2]


# ---------------------------------------------------------------------- what a lane says at its end


def test_a_lane_says_what_ran_and_what_was_skipped_for_which_reason() -> None:
    said = summary("test", Counts(7_100, ["rg: not there", "node: not there", "rg: not there"], left=1_200))

    assert said == [
        "lane test: 7,100 cases ran, 3 skipped, 1,200 left to other lanes (make gate runs them)",
        "  skipped 2: rg: not there",
        "  skipped 1: node: not there",
    ]


@pytest.mark.parametrize(
    ("longrepr", "reason"),
    [
        (("tests/test_one.py", 3, "Skipped: rg: ripgrep is not installed"), "rg: ripgrep is not installed"),
        (["tests/test_one.py", 3, "Skipped: first\nsecond"], "first"),
        (("tests/test_one.py", 3, "Skipped: "), "no reason is given"),
    ],
    ids=["a tuple", "a list, of another process", "nothing"],
)
def test_the_reason_of_a_skip_is_read_from_its_report(longrepr: object, reason: str) -> None:
    assert reason_of(longrepr) == reason


@pytest.mark.slow
def test_a_run_over_several_processes_says_what_it_leaves() -> None:
    arguments = ["-n", "2", "--lane=gate", "-k", "a name that no test has", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments, "tests/test_unsteady.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert re.search(r"lane gate: 0 cases ran, 0 skipped, \d+ left to other lanes \(make test runs them\)", ran.stdout)
