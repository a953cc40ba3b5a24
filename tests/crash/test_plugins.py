"""T14: killed between a hook and its call, at every point of a turn that plugins decide about."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from perdure.engine.journal import load
from perdure.model.record import slots
from perdure.ports.store import Store
from perdure.testing.crash import Crash, ForkServer, KillResult, Lab, Mode, Played, Report, StoreKind, plans, play
from tests.crash.hooked import hooked, remembering

# Call -> the hook that decides about it.
DECIDED = {"1.0": "veto", "1.1": "replace", "1.2": "ask"}


def faults(row: KillResult) -> list[str]:
    """What is wrong with a run that was killed once."""
    found, played = list(row.problems), row.played
    session = played.ending.session("s")
    if session is None:
        return [*found, "the session is gone"]
    if [call.outcome for call in session.calls] != ["denied", "ok", "ok"]:
        found.append(f"calls ended {[call.outcome for call in session.calls]}")
    if "tool: tally ok" not in session.said:
        found.append(f"said {session.said}")
    found += _effects(played)
    recorded = {line.key for line in played.ledger if line.name == "recorded"}
    for call, hook in DECIDED.items():
        lines = [line for line in played.ledger if line.name == hook]
        if len(lines) > 2 or not lines:
            found.append(f"{hook} ran {len(lines)} times")
        if call in recorded and any(line.incarnation > 1 for line in lines):
            found.append(f"{hook} ran again although its decision about {call} was recorded")
    return found + _asked(played, recorded) + _children(played)


def _effects(played: Played, most: int = 2) -> list[str]:
    """Nothing ran that was denied, nothing with arguments that nobody decided, nothing unseen."""
    found = []
    done = Counter((line.name, line.data) for line in played.ledger if line.name in ("drop", "tally", "book"))
    if set(done) != {("tally", 5), ("book", 7)} or max(done.values()) > most:
        found.append(f"effects were {dict(done)}")
    if not any(line.name == "looked" for line in played.ledger):
        found.append("nobody looked at how tally ended")
    return found


def _asked(played: Played, recorded: set[str]) -> list[str]:
    """A direct completion that is recorded is not asked for again by a hook that runs again."""
    asked = [line for line in played.ledger if line.name == "model" and ":" in line.key]
    if not 1 <= len(asked) <= 2:
        return [f"the completion was asked for {len(asked)} times"]
    if "completion" in recorded and any(line.incarnation > 1 for line in asked):
        return ["the completion was asked for again although it was recorded"]
    return []


def _children(played: Played) -> list[str]:
    children = [each for each in played.ending.sessions if each.id != "s"]
    if [each.said for each in children] != [["user: help", "assistant: helped"]]:
        return [f"children: {[(each.id, each.said) for each in children]}"]
    return []


def check(report: Report) -> None:
    assert {str(row.crash): faults(row) for row in report.rows if faults(row)} == {}
    assert report.lost == 0
    again = {str(row.crash) for row in report.rows if _ran_again(row, "veto")}
    assert "lost effect veto" in again, "killed after a hook and before its record, the hook runs again"
    told = {str(row.crash) for row in report.rows if any(line.name == "recorded" for line in row.played.ledger)}
    assert "before retire" in told, "and what was recorded was seen"
    assert any(each.startswith("lost append") and "started 1.1" in each for each in told)


def _ran_again(row: KillResult, hook: str) -> bool:
    return any(line.name == hook and line.incarnation > 1 for line in row.played.ledger)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_never_half_a_decision_wherever_it_is_killed(store: StoreKind, crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(hooked, store=store))


def test_neither_a_lost_reply_nor_a_relieved_owner_makes_half_a_decision(crash_kit: Callable[..., Report]) -> None:
    report = crash_kit(hooked, modes=("late", "unheard"))

    assert {str(row.crash): faults(row) for row in report.rows if faults(row)} == {}


@pytest.mark.slow
def test_second_crash_during_recovery_makes_no_half_decision_either() -> None:
    rng, wrong = random.Random(7), list[str]()
    for first in rng.sample(list(plans(play(hooked).traces[0], ("before", "lost"))), 12):
        recovery = play(hooked, [first]).traces[1]
        for second in rng.sample(list(plans(recovery, ("before", "lost"))), 5):
            played = play(hooked, [first, second])
            wrong += [f"{first}, {second}: {fault}" for fault in [*played.problems, *_effects(played, most=3)]]

    assert wrong == []


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
def test_never_half_a_decision_wherever_it_is_really_killed(crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(hooked, real=True))


def test_undisturbed_turn_asks_each_hook_once() -> None:
    played = play(hooked)

    assert played.problems == []
    lines = Counter(
        (line.name, line.key) for line in played.ledger if line.name in ("veto", "replace", "looked", "ask")
    )
    assert lines == {("veto", "s.1.1.0"): 1, ("replace", "s.1.1.1"): 1, ("looked", "s.1.1.1"): 1, ("ask", "s.1.1.2"): 1}


@pytest.mark.parametrize("crash", [None, Crash("effect veto", "lost")])
def test_state_of_the_plugins_is_in_the_records(crash: Crash | None) -> None:
    """What a hook counted stands in the record that follows it; a hook that ran twice has counted once."""
    seen: dict[str, object] = {}

    async def and_look(lab: Lab) -> None:
        await hooked(lab)
        seen.update(await _states(lab.store))

    played = play(and_look, [] if crash is None else [crash])

    assert played.problems == []
    assert seen == {"veto": 1, "replace": 2, "ask": 1}


COUNTED = ["user: 3", "assistant:  [bump]", "tool: bump ok", "assistant: counted 3"]


def test_state_of_a_plugin_is_as_its_own_tool_left_it_wherever_it_is_killed(crash_kit: Callable[..., Report]) -> None:
    report = crash_kit(remembering)

    assert (report.lost, report.problems, report.unreached) == (0, [], [])
    for row in report.rows:
        session = row.played.ending.session("s")
        assert session is not None
        assert session.said[-1] == "assistant: counted 7", str(row.crash)


@pytest.mark.kill
@pytest.mark.parametrize("mode", ["before", "lost"])
def test_really_killed_when_a_plugins_own_tool_was_recorded_its_state_is_there(mode: Mode) -> None:
    with ForkServer(remembering, timeout=60) as forks:
        played = forks.play([Crash("append 1: ended 1.0", mode)])

    assert played.problems == []
    session = played.ending.session("s")
    assert session is not None
    assert session.said[:4] == COUNTED
    assert session.said[-1] == "assistant: counted 7"


async def _states(store: Store) -> dict[str, object]:
    await store.open()
    row = await store.session("s")
    assert row is not None
    found: dict[str, object] = {}
    for slot in slots([record for _, record in await load(store, row.sid, 1, 1)]):
        found.update({name: each.state for name, each in (slot.snapshots or {}).items()})
    await store.close()
    return found
