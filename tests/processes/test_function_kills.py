"""Durable functions killed at every write they make: in process at each point in each way, and really, with SIGKILL."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import pytest

from perdure.testing.crash import Crash, ForkServer, Mode, Played, plans, play
from tests.processes import killed
from tests.processes.killed import ended

# How each scenario ends when nobody kills it.
ENDS: dict[Callable[..., Any], Any] = {
    killed.play_plain: ["paid a", "noted b", "paid c"],
    killed.play_typed: ["2026-11-16", "3.30", "noted c"],
    killed.play_branching: [["paid a1", "noted a2", "paid a3"], ["paid b1", "noted b2", "paid b3"]],
    killed.play_waiting: [1, "noted t", 2, "noted n"],
    killed.play_parked: [1, "noted t", 2, "noted n"],
    killed.play_raising: ["noted leaf", "grow", "paid school"],
    killed.play_looping: ["paid round 0", "paid round 1", "noted end"],
    killed.play_polling: ["paid round 0", "paid round 1"],
    killed.play_choosing: [1, "paid last"],
    killed.play_bidding: [2, "paid order", "noted end"],
    killed.play_limited: ["time_limit_around", "paid a", "noted b"],
    killed.play_reading: ["noted r1", "noted r2", "noted r3", "noted r4"],
    killed.play_asking: ["paid a", "noted b"],
}

# How often each of their effects happens then. A kill may repeat what may be repeated, and lose what may not.
EFFECTS: dict[Callable[..., Any], dict[tuple[str, str], int]] = {
    killed.play_plain: {("pay", "a"): 1, ("note", "b"): 1, ("pay", "c"): 1},
    killed.play_typed: {("note", "a"): 1, ("note", "b"): 1, ("note", "c"): 1},
    killed.play_branching: {
        (kind, f"{branch}{number}"): 1 for branch in "ab" for kind, number in (("pay", 1), ("note", 2), ("pay", 3))
    },
    killed.play_waiting: {("note", "t"): 2, ("note", "n"): 1},
    killed.play_parked: {("note", "t"): 2, ("note", "n"): 1},
    killed.play_raising: {("note", "leaf"): 1, ("pay", "school"): 1},
    killed.play_looping: {("pay", "round 0"): 1, ("pay", "round 1"): 1, ("note", "end"): 1},
    killed.play_polling: {("pay", "round 0"): 1, ("pay", "round 1"): 1},
    killed.play_choosing: {("note", "quick"): 1, ("pay", "tidied"): 1, ("pay", "last"): 1},
    killed.play_cancelled: {("note", "tidied"): 1},
    killed.play_joined: {("note", "tidied"): 1},
    killed.play_limited: {("pay", "a"): 1, ("note", "b"): 1},
    killed.play_reading: {("note", "r1"): 1, ("note", "r2"): 1, ("note", "r3"): 1, ("note", "r4"): 2},
    killed.play_asking: {("pay", "a"): 1, ("note", "b"): 1},
    killed.play_bidding: {
        ("note", "s1"): 1,
        ("note", "s2"): 1,
        ("note", "q"): 1,
        ("pay", "order"): 1,
        ("note", "end"): 1,
    },
}

MODES: tuple[Mode, ...] = ("before", "lost", "hang", "late", "unheard")


def name_of(scenario: Callable[..., Any]) -> str:
    return str(getattr(scenario, "__name__", "")).removeprefix("play_")


SCENARIOS = pytest.mark.parametrize("scenario", list(EFFECTS), ids=name_of)


def flat(value: Any) -> list[Any]:
    return [each for item in value for each in (flat(item) if isinstance(item, list) else [item])]


def faults(played: Played, scenario: Callable[..., Any], kills: int) -> list[str]:
    """What is wrong with a run that was killed so often."""
    if played.problems:
        return played.problems
    outcome = ended(played)
    effects = Counter({key: n for key, n in played.effects.items() if key[0] != "ended"})
    if scenario in (killed.play_cancelled, killed.play_joined):
        found = [] if outcome == {"type": "cancelled", "by": "host", "reason": "enough"} else [f"it ended as {outcome}"]
    else:
        found = _wrong_value(outcome, scenario, effects, kills)
    for effect, usual in EFFECTS[scenario].items():
        least, most = (0, 1) if effect[0] == "pay" else (usual, usual + kills)
        if not least <= effects.pop(effect, 0) <= most:
            found.append(f"{effect} happened {played.effects[effect]} times")
    return found + [f"{effect} should not have happened" for effect in effects]


def _wrong_value(outcome: Any, scenario: Callable[..., Any], effects: Counter[Any], kills: int) -> list[str]:
    if outcome["type"] != "success":
        return [f"it ended as {outcome}"]
    value, usual, found = flat(outcome["value"]), flat(ENDS[scenario]), []
    unknown = 0
    if len(value) != len(usual):
        return [f"it ended with {value}"]
    for got, wanted in zip(value, usual, strict=True):
        if got != wanted:
            unknown += 1
            if got != str(wanted).replace("paid", "unknown"):
                found.append(f"{wanted} became {got}")
        elif str(got).startswith("paid") and effects["pay", str(got).removeprefix("paid ")] != 1:
            found.append(f"{got} did not happen once")
    in_flight = 2 if scenario is killed.play_branching else 1
    return found if unknown <= in_flight * kills else [*found, f"{unknown} outcomes are unknown after {kills} kills"]


@SCENARIOS
def test_nothing_is_lost_when_nobody_is_killed(scenario: Callable[..., Any]) -> None:
    played = play(scenario)

    assert faults(played, scenario, kills=0) == []
    assert {key: n for key, n in played.effects.items() if key[0] != "ended"} == EFFECTS[scenario]


@SCENARIOS
@pytest.mark.parametrize("mode", MODES)
def test_killed_at_every_point_in_every_way_it_ends_as_if_nobody_had(scenario: Callable[..., Any], mode: Mode) -> None:
    trace = play(scenario).traces[0]
    kills = list(plans(trace, [mode]))
    found = {str(crash): wrong for crash in kills if (wrong := faults(play(scenario, [crash]), scenario, kills=1))}

    assert found == {}
    assert len(kills) >= 3


@pytest.mark.gate
@pytest.mark.slow
@pytest.mark.parametrize("scenario", [killed.play_plain, killed.play_choosing], ids=name_of)
def test_killed_twice_at_any_two_points(scenario: Callable[..., Any]) -> None:
    trace = [point for point in play(scenario).traces[0] if point.kind in ("record", "effect")]
    crashes = [Crash(point.name, mode) for point in trace for mode in ("before", "lost")]
    found = {}
    for pair in itertools.product(crashes, crashes):
        played = play(scenario, pair)
        # The second life may take another way, and never pass the point where it was to die.
        problems = [each for each in played.problems if "without passing" not in each]
        wrong = problems or faults(Played(played.ending, played.ledger, played.traces), scenario, kills=2)
        if wrong:
            found[" then ".join(map(str, pair))] = wrong

    assert found == {}


@pytest.mark.parametrize("first", ["before", "lost"])
def test_killed_again_while_a_person_settles_its_step_the_step_is_done_once(first: Mode) -> None:
    interrupted = Crash("effect pay", first)
    settling = play(killed.play_asking, [interrupted]).traces[1]
    crashes = list(plans(settling, ["before", "lost"]))
    found = {}
    for crash in crashes:
        played = play(killed.play_asking, [interrupted, crash])
        wrong = faults(played, killed.play_asking, kills=2)
        if wrong or played.effects["pay", "a"] != 1 or ended(played)["value"] != ["paid a", "noted b"]:
            found[str(crash)] = (wrong, dict(played.effects))

    assert found == {}
    assert any("signal p" in str(crash) for crash in crashes)


# ---------------------------------------------------------------------- windows, by hand

# Point, way: the effects of "a" (once), "b" (rerun) and "c" (once), and what became of them.
WINDOWS: list[tuple[str, Mode, tuple[int, int, int], list[str]]] = [
    ("register p", "before", (1, 1, 1), ["paid a", "noted b", "paid c"]),
    ("register p", "lost", (1, 1, 1), ["paid a", "noted b", "paid c"]),
    ("advance p: starting, begun 1", "before", (1, 1, 1), ["paid a", "noted b", "paid c"]),
    ("advance p: starting, begun 1", "lost", (0, 1, 1), ["unknown a", "noted b", "paid c"]),
    ("effect pay", "before", (0, 1, 1), ["unknown a", "noted b", "paid c"]),
    ("effect pay", "lost", (1, 1, 1), ["unknown a", "noted b", "paid c"]),
    ("advance p: done 1", "before", (1, 1, 1), ["unknown a", "noted b", "paid c"]),
    ("advance p: done 1", "lost", (1, 1, 1), ["paid a", "noted b", "paid c"]),
    ("effect note", "before", (1, 1, 1), ["paid a", "noted b", "paid c"]),
    ("effect note", "lost", (1, 2, 1), ["paid a", "noted b", "paid c"]),
    ("advance p: done 2, begun 3", "before", (1, 2, 1), ["paid a", "noted b", "paid c"]),
    ("advance p: done 2, begun 3", "lost", (1, 1, 0), ["paid a", "noted b", "unknown c"]),
    ("effect pay #2", "lost", (1, 1, 1), ["paid a", "noted b", "unknown c"]),
    ("advance p: done 3, ending", "before", (1, 1, 1), ["paid a", "noted b", "unknown c"]),
    ("advance p: done 3, ending", "lost", (1, 1, 1), ["paid a", "noted b", "paid c"]),
]

# The same for scenarios of other writes, where a kill costs nothing but a repeated note.
KEY_POINTS: list[tuple[Callable[..., Any], str, Mode]] = [
    (scenario, point, mode)
    for mode in ("before", "lost")
    for scenario, point in [
        (killed.play_parked, "advance p: starting, begun 1, parking"),
        (killed.play_parked, "signal p"),
        (killed.play_parked, "claim p"),
        (killed.play_parked, "advance p: done 1, done 2, told"),
        (killed.play_parked, "advance p: begun 3, faltered 3, begun 3"),
        (killed.play_parked, "advance p: done 3, begun 4, done 4, begun 5, parking"),
        (killed.play_parked, "signal p #2"),
        (killed.play_raising, "register p.1"),
        (killed.play_raising, "signal p.1"),
        (killed.play_looping, "advance p: segment, process.continued"),
        (killed.play_looping, "advance p: segment, process.continued #2"),
        (killed.play_polling, "advance p: segment, process.continued"),
        (killed.play_polling, "advance p: segment, process.continued #2"),
        (killed.play_cancelled, "cancel p"),
        (killed.play_cancelled, "advance p: done 1.0.1, done 1.1.1"),
        (killed.play_bidding, "effect pay"),
        (killed.play_bidding, "advance p: done 2"),
        (killed.play_bidding, "advance p: done 3, ending"),
        (killed.play_limited, "advance p: starting, done 1, begun 2"),
        (killed.play_joined, "cancel p"),
        (killed.play_joined, "advance p: done 1.0.1, done 1.1.1"),
        (killed.play_choosing, "effect pay"),
        (killed.play_reading, "effect note"),
        (killed.play_reading, "effect note #2"),
        (killed.play_reading, "effect note #3"),
        (killed.play_asking, "effect pay"),
    ]
]


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(killed.play_plain) as ready:
        yield ready


def seen(played: Played) -> tuple[tuple[int, int, int], Any]:
    value = ended(played)["value"]
    return (played.effects["pay", "a"], played.effects["note", "b"], played.effects["pay", "c"]), value


@pytest.mark.parametrize(("point", "mode", "effects", "value"), WINDOWS)
def test_crash_in_a_window_in_process(point: str, mode: Mode, effects: tuple[int, int, int], value: list[str]) -> None:
    assert seen(play(killed.play_plain, [Crash(point, mode)])) == (effects, value)


@pytest.mark.kill
@pytest.mark.parametrize(("point", "mode", "effects", "value"), WINDOWS)
def test_real_kill_in_a_window(
    forks: ForkServer, point: str, mode: Mode, effects: tuple[int, int, int], value: list[str]
) -> None:
    assert seen(forks.play([Crash(point, mode)])) == (effects, value)


@pytest.mark.kill
@pytest.mark.parametrize(("scenario", "point", "mode"), KEY_POINTS)
def test_real_kill_around_a_write(forks: ForkServer, scenario: Callable[..., Any], point: str, mode: Mode) -> None:
    played = forks.play([Crash(point, mode)], scenario)

    assert faults(played, scenario, kills=1) == []


@pytest.mark.gate
@pytest.mark.kill
def test_real_kill_of_two_branches_at_every_effect(forks: ForkServer) -> None:
    found = {}
    for name, mode in itertools.product([f"effect {kind}{n}" for kind, n in EFFECT_NAMES], ("before", "lost")):
        played = forks.play([Crash(name, mode)], killed.play_branching)  # type: ignore[arg-type]
        if wrong := faults(played, killed.play_branching, kills=1):
            found[f"{mode} {name}"] = wrong

    assert found == {}


EFFECT_NAMES = [("pay", ""), ("pay", " #2"), ("pay", " #3"), ("pay", " #4"), ("note", ""), ("note", " #2")]


@pytest.mark.gate
@pytest.mark.kill
def test_real_kill_inside_every_transaction(forks: ForkServer) -> None:
    """Between any two statements of its writes: a half of a write is never seen."""
    assert forks.play().problems == []
    statements = [each for each in forks.statements if each.within.startswith(("register", "advance"))]
    found = {}
    for statement in statements:
        if wrong := faults(forks.play([statement]), killed.play_plain, kills=1):
            found[str(statement)] = wrong

    assert found == {}
    assert len(statements) >= 12
