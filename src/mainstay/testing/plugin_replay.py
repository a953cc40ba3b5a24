"""Kill a plugin's drill at every record, resume it, and compare with the one that nobody killed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from mainstay.testing.crash import judge, play
from mainstay.testing.crash.injection import Crash, Point
from mainstay.testing.crash.scenario import Lab, Played
from mainstay.testing.plugin_drill import SESSION, Trial, agent_for, instance, opened, turn
from mainstay.testing.plugin_probe import Call, Probe, remembered

ABOUT_MODEL = ("prompt", "transform_view", "transform_text", "transform_response", "stream_finished")
ABOUT_CALL = ("before_tool_call", "after_tool_call", "project_result")

APPENDED = re.compile(r"append (\d+): (.*)")
TOLD = re.compile(r"(replied|started|ended) ([\d.]+)")


def kill_everywhere(trial: Trial) -> tuple[int, list[str]]:
    """How often it was killed, and what was wrong afterwards."""
    plain, usual, _ = once(trial)
    if plain.problems:
        return 0, [f"the drill does not even end undisturbed: {plain.problems[0]}"]
    steady = once(trial)[1] == usual  # else it remembers the time, or chance: then nothing can be compared
    found: list[str] = []
    crashes = list(crashes_of(plain.traces[0]))
    for crash in crashes:
        played, state, calls = once(trial, crash)
        row = judge(crash, played, plain)
        found += [f"killed at {crash}: {problem}" for problem in row.problems]
        if steady and state != usual:
            was, now = (each and each.decode() for each in (usual, state))
            found.append(f"killed at {crash}, it remembers {now!s:.300}, and without the kill {was!s:.300}")
        found += [f"killed at {crash}: {again}" for again in called_again(crash, played.traces[0], calls)]
    return len(crashes), found


def once(trial: Trial, crash: Crash | None = None) -> tuple[Played, bytes | None, list[Call]]:
    """One drill of two turns, killed once or not at all; what the plugin remembers, and which hooks were called."""
    ends: list[bytes | None] = []
    calls: list[Call] = []

    async def scenario(lab: Lab) -> None:
        probe = Probe()
        probe.incarnation, probe.calls = lab.incarnation, calls
        async with lab.runtime(agents=[agent_for(trial, probe)]) as host:
            await turn(host, trial, 1)
            await turn(host, trial, 2)
            await (
                await opened(host, trial, SESSION)
            ).tools.list()  # also where both turns were over: the plugin reads what was saved
            ends.append(remembered(instance(probe)))

    played = play(scenario, [] if crash is None else [crash])
    return played, ends[-1] if ends else None, calls


def crashes_of(trace: Iterable[Point]) -> Iterator[Crash]:
    """Before and after every record of a turn, and where bodies begin and end."""
    for point in trace:
        if point.kind in ("record", "body"):
            yield Crash(point.name, "before")
        if point.kind == "record":
            yield Crash(point.name, "lost")


def called_again(crash: Crash, trace: Iterable[Point], calls: Iterable[Call]) -> Iterator[str]:
    """Hooks of steps that were on disk when the process died, called after it."""
    recorded = set(recorded_of(crash, trace))
    for call in calls:
        turn_number = call.turn_id.rpartition(".")[2]
        kinds = ["replied"] if call.hook in ABOUT_MODEL else ["ended"] if call.hook in ABOUT_CALL else []
        if call.hook == "before_tool_call":
            kinds.append("started")
        if call.incarnation > 1 and any((turn_number, kind, call.step) in recorded for kind in kinds):
            yield f"{call.hook} is called again for {call.turn_id}.{call.step}, which was on disk"


def recorded_of(crash: Crash, trace: Iterable[Point]) -> Iterator[tuple[str, str, str]]:
    """Turn, kind and step of what the first incarnation has on disk."""
    for point in trace:
        if point.name == crash.point and crash.mode == "before":
            return
        if (appended := APPENDED.match(point.name)) is not None:
            for kind, step in TOLD.findall(appended[2]):
                yield appended[1], kind, step
        if point.name == crash.point:
            return
