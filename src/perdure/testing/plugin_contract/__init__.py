"""The contract of a plugin, to run on yours.

    from perdure.testing.plugin_contract import plugin_contract

    TestAudit = plugin_contract(Audit)
    TestNotes = plugin_contract(
        lambda: Notes(limit=10),
        calls=[("add_note", {"text": "buy tea"})],  # what the model calls, so that the plugin has something to do
        options={"folder": "kitchen"},
    )

`TestNotes` is a `unittest.TestCase`: pytest finds it. Everything runs in real turns of a real Runtime in memory, with a
model that is a function; it takes a few seconds. `check_plugin` does the same and returns what it found.

    defined       the plugin can be told apart, its hooks are spelled and shaped as hooks are, its time limit is sane
    undisturbed   three turns and a restart show no fault
    arguments     no hook changes what it was only shown
    state         JSON; restored it is the same; the revision moves when the state does; nothing saved is fine; rubbish
                  is refused, or does no harm
    apart         what happens in one session is not seen in another
    disturbed     each hook × raises, answers nonsense, hangs, is cancelled, is called twice, has no services: the turn
                  ends, and the turns after it are as if nothing had happened
    replay        killed before and after every record and resumed, a session reads the same and remembers the same, and
                  no hook of a recorded step is called again
"""

from __future__ import annotations

import asyncio
import inspect
import re
import unittest
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import PerdureError, PluginFault
from perdure.model.plugin import PluginSnapshot
from perdure.plugins.hooks import HOOKS, Plugin, SessionContext, SnapshotReader
from perdure.plugins.registry import PluginSet, Taken, overrides, restore_snapshot, take_snapshot
from perdure.testing.crash import Crash, Lab, Played, Point, judge, play
from perdure.testing.crash.scenario import must_run_alone, on_a_thread, without_logging
from perdure.testing.plugin_contract.probe import (
    QUIET,
    SESSION,
    UNENDED,
    WAYS,
    ContractRun,
    Finding,
    HookCall,
    HookProbe,
    Subject,
    Way,
    agent_for,
    instance,
    opened,
    remembered,
    run_turn,
    run_turns,
)

__all__ = ["Finding", "PluginReport", "Report", "check_plugin", "check_plugin_async", "plugin_contract"]

LONGEST = 600.0
"""Seconds that a hook may take at most before a turn is freed of it."""

ASKED = frozenset({"has no services", "is called twice"})
"""Ways in which a plugin is not itself at fault, so that a turn must not suffer."""

ABOUT_MODEL = ("prompt", "transform_view", "transform_text", "transform_response", "stream_finished")
ABOUT_CALL = ("before_tool_call", "after_tool_call", "project_result")

APPENDED = re.compile(r"append (\d+): (.*)")
RECORDED = re.compile(r"(replied|started|ended) ([\d.]+)")

RUBBISH: tuple[Any, ...] = (7, "rubbish", True, [None, {"rubbish": []}], {"rubbish": {"rubbish": 1}})


class PluginReport(Struct, frozen=True):
    """What was found, and what was tried. `unseen` are hooks that no turn called."""

    plugin: str
    findings: tuple[Finding, ...]
    hooks: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    disturbed: int = 0
    kills: int = 0

    def __str__(self) -> str:
        tried = f"{len(self.hooks)} hooks, {self.disturbed} disturbed turns, {self.kills} kills"
        unseen = f"; never called: {', '.join(self.unseen)}" if self.unseen else ""
        return f"plugin {self.plugin}: {tried}, {len(self.findings)} findings{unseen}"


Report = PluginReport
"""The name that it had before the crash kit had a `Report`."""


class Checker:
    """A plugin under contract, and what the checks have found so far."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.found: list[Finding] = []
        self.called: set[str] = set()
        self.disturbed = self.kills = 0
        self._plain: tuple[ContractRun, HookProbe] | None = None

    def find(self, check: str, what: str, hook: str = "") -> None:
        finding = Finding(check, hook, what)
        if finding not in self.found:
            self.found.append(finding)

    def plugin(self) -> Plugin:
        """A new instance, as a new session has it."""
        made = self.subject.make()
        return made.for_session(SessionContext(SESSION, "run_turns", self.subject.options))

    def hooks(self) -> list[str]:
        plugin = self.subject.make()
        return [hook for hook in HOOKS if hook not in QUIET and overrides(plugin, hook)]

    def plain(self) -> tuple[ContractRun, HookProbe]:
        """The undisturbed turns, run once and kept."""
        if self._plain is None:
            probe = HookProbe(watch_state=True)
            self._plain = self.run(probe), probe
        return self._plain

    def run(self, probe: HookProbe, before: str | None = None) -> ContractRun:
        with without_logging():
            run = asyncio.run(run_turns(self.subject, probe, before=before))
        self.called |= {call.hook for call in probe.calls}
        return run


# ---------------------------------------------------------------------- checks


def check_defined(checker: Checker) -> None:
    """The plugin can be told apart, its hooks are spelled and shaped as hooks are, its time limit is sane."""
    plugin, again = checker.subject.make(), checker.subject.make()
    try:
        PluginSet([plugin])
    except PerdureError as error:
        checker.find("defined", str(error))
        return
    if (plugin.id, plugin.version) != (again.id, again.version):
        checker.find("defined", f"its id or version changes: {plugin.id} {plugin.version}, {again.id} {again.version}")
    if plugin.time_limit > LONGEST:
        checker.find("defined", f"its time limit is {plugin.time_limit:g} s: a hook that hangs holds a turn as long")
    try:
        agent_for(checker.subject, HookProbe())
    except PerdureError as error:
        checker.find("defined", f"no agent can have it: {error}")


def check_undisturbed(checker: Checker) -> None:
    """Three turns and a restart show no fault."""
    run, _ = checker.plain()
    for number, turn in enumerate(run.turns, 1):
        for fault in turn.faults:
            checker.find("undisturbed", f"turn {number}: {fault}")


def check_arguments(checker: Checker) -> None:
    """No hook changes what it was only shown."""
    _, probe = checker.plain()
    checker.found += [finding for finding in probe.found if finding.check == "arguments"]


def check_state(checker: Checker) -> None:
    """JSON; restored it is the same; the revision moves when the state does; rubbish is refused, or does no harm."""
    if not overrides(checker.subject.make(), "snapshot"):
        return
    _, probe = checker.plain()
    checker.found += [finding for finding in probe.found if finding.check == "state"]
    instance = probe.instances.get(SESSION) or probe.instances[""]
    try:
        taken, blank = take_snapshot(instance), take_snapshot(checker.plugin())
    except PluginFault as fault:
        checker.find("state", fault.what, fault.hook)
        return
    if take_snapshot(instance) != taken:
        checker.find("state", "taken twice it is different, although nothing happened in between", "snapshot")
    _check_round_trip(checker, taken)
    _check_nothing_saved(checker, blank.snapshot)
    _check_rubbish(checker, taken.snapshot)


def _check_round_trip(checker: Checker, taken: Taken) -> None:
    stored = msgspec.json.decode(msgspec.json.encode(taken.snapshot), type=PluginSnapshot)
    fresh = checker.plugin()
    issue = restore_snapshot(fresh, stored, taken.blobs)
    if issue is not None:
        checker.find("state", issue.message, "restore")
        return
    again = take_snapshot(fresh)
    if again.snapshot.revision < taken.snapshot.revision:
        what = f"the revision is {again.snapshot.revision} after restoring {taken.snapshot.revision}: go on from there"
        checker.find("state", what, "restore")
    if (again.snapshot.state, again.blobs) != (taken.snapshot.state, taken.blobs):
        saved, back = taken.snapshot.state, again.snapshot.state
        checker.find("state", f"what was saved is not what comes back: {saved!r:.200} became {back!r:.200}", "restore")


def _check_nothing_saved(checker: Checker, blank: PluginSnapshot) -> None:
    fresh = checker.plugin()
    issue = restore_snapshot(fresh, None, {})
    if issue is not None:
        checker.find("state", f"without anything saved: {issue.message}", "restore")
    elif (now := remembered(fresh)) is not None and now != msgspec.json.encode([blank.state, blank.blobs]):
        checker.find("state", "without anything saved it remembers something", "restore")


def _check_rubbish(checker: Checker, snapshot: PluginSnapshot) -> None:
    for rubbish in [each for each in RUBBISH if type(each) is not type(snapshot.state)]:
        fresh = checker.plugin()
        if _restored(fresh, replace(snapshot, state=rubbish)) and take_snapshot(fresh).snapshot.state != rubbish:
            checker.find("state", f"it takes {rubbish!r} for a state and forgets it: raise instead", "restore")
    for spoilt in _spoilt(snapshot.state):
        probe = HookProbe()
        probe.planted.append(spoilt)
        if not _restored(checker.plugin(), replace(snapshot, state=spoilt)):
            continue
        for turn in checker.run(probe).turns:
            for fault in turn.faults:
                checker.find("state", f"it takes {spoilt!r:.120} for a state and then fails: {fault}", "restore")


def _restored(plugin: Plugin, snapshot: PluginSnapshot) -> bool:
    try:
        plugin.restore(snapshot, SnapshotReader(dict.fromkeys(snapshot.blobs, b"")))
    except Exception:  # as it should: the session opens without it, and the snapshot is kept
        return False
    return True


def _spoilt(value: Any) -> Iterable[Any]:
    """The state with one thing in it replaced by another kind of thing, or left out."""
    if isinstance(value, dict):
        for key in value:
            yield {**value, key: {"rubbish": 1} if not isinstance(value[key], dict) else "rubbish"}
            yield {name: each for name, each in value.items() if name != key}
    elif isinstance(value, list) and value:
        yield [{"rubbish": 1} if not isinstance(value[0], dict) else "rubbish", *value[1:]]


def check_apart(checker: Checker) -> None:
    """What happens in one session is not seen in another."""
    alone, _ = checker.plain()
    if checker.run(HookProbe()) != alone:
        return  # it depends on the clock or on chance: nothing can be told from a comparison
    after = checker.run(HookProbe(), before="another")
    if after.states != alone.states:
        checker.find("apart", "a session remembers what happened in another one: keep it in what for_session makes")
    elif after.requests != alone.requests or after.turns != alone.turns:
        checker.find(
            "apart", "a session goes differently after another one: keep such things in what for_session makes"
        )


def check_disturbed(checker: Checker) -> None:
    """Each hook × each disturbance: the turn ends, and the turns after it are as if nothing had happened."""
    plain, watched = checker.plain()
    kinds = [turn.kind for turn in plain.turns]
    plugin = checker.subject.make()
    for hook in [each for each in checker.hooks() if each in {call.hook for call in watched.calls}]:
        for way in [each for each in WAYS if _can(plugin, hook, each)]:
            probe = HookProbe(hook, way)
            run = checker.run(probe)
            checker.disturbed += probe.struck
            checker.found += [finding for finding in probe.found if finding.check == "disturbed"]
            excused = way == "has no services" and hook in checker.subject.fails_without_services
            first, *rest = run.turns
            if first.kind in UNENDED or (way in ASKED and not excused):
                for fault in first.faults:
                    checker.find("disturbed", f"when it {way}: {fault}", hook)
            for number, turn in enumerate(rest, 2):
                for fault in turn.faults:
                    checker.find("disturbed", f"after it once {_past(way)}, turn {number}: {fault}", hook)
                if turn.kind != kinds[number - 1]:
                    what = f"after it once {_past(way)}, turn {number} ends as {turn.kind}, not {kinds[number - 1]}"
                    checker.find("disturbed", what, hook)


def _can(plugin: Plugin, hook: str, way: Way) -> bool:
    """Whether a hook can be disturbed like this: a plain one neither hangs nor is cancelled."""
    later = inspect.iscoroutinefunction(getattr(plugin, hook))
    return later if way in ("hangs", "is cancelled") else later or way != "has no services"


def _past(way: Way) -> str:
    return {
        "raises": "raised",
        "answers nonsense": "answered nonsense",
        "hangs": "hung",
        "is cancelled": "was cancelled",
        "is called twice": "was called twice",
        "has no services": "had no services",
    }[way]


def check_replay(checker: Checker) -> None:
    """Killed and resumed at every record, a session reads and remembers the same, and no recorded hook runs again."""
    with without_logging():
        kills, findings = kill_at_every_record(checker.subject)
    checker.kills += kills
    for what in findings:
        checker.find("replay", what)


def kill_at_every_record(subject: Subject) -> tuple[int, list[str]]:
    """Count the kills, and say what was wrong after them."""
    plain, usual, _ = once(subject)
    if plain.problems:
        return 0, [f"the turns do not even end undisturbed: {plain.problems[0]}"]
    steady = once(subject)[1] == usual  # a state with a time or a random number in it cannot be compared
    found: list[str] = []
    crashes = list(crashes_of(plain.traces[0]))
    for crash in crashes:
        played, state, calls = once(subject, crash)
        row = judge(crash, played, plain)
        found += [f"killed at {crash}: {problem}" for problem in row.problems]
        if steady and state != usual:
            was, now = (each and each.decode() for each in (usual, state))
            found.append(f"killed at {crash}, it remembers {now!s:.300}, and without the kill {was!s:.300}")
        found += [f"killed at {crash}: {again}" for again in called_again(crash, played.traces[0], calls)]
    return len(crashes), found


def once(subject: Subject, crash: Crash | None = None) -> tuple[Played, bytes | None, list[HookCall]]:
    """Two turns, killed once or not at all; the state that the plugin has then, and the hooks that were called."""
    ends: list[bytes | None] = []
    calls: list[HookCall] = []

    async def scenario(lab: Lab) -> None:
        probe = HookProbe(incarnation=lab.incarnation, calls=calls)
        async with lab.runtime(agents=[agent_for(subject, probe)]) as host:
            await run_turn(host, subject, 1)
            await run_turn(host, subject, 2)
            # Also where both turns were over at the kill: the plugin is restored from what was saved.
            await (await opened(host, subject, SESSION)).tools.list()
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


def called_again(crash: Crash, trace: Iterable[Point], calls: Iterable[HookCall]) -> Iterator[str]:
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
            for kind, step in RECORDED.findall(appended[2]):
                yield appended[1], kind, step
        if point.name == crash.point:
            return


CHECKS: Mapping[str, Callable[[Checker], None]] = {
    "defined": check_defined,
    "undisturbed": check_undisturbed,
    "arguments": check_arguments,
    "state": check_state,
    "apart": check_apart,
    "disturbed": check_disturbed,
    "replay": check_replay,
}


# ---------------------------------------------------------------------- running them


def check_plugin(  # noqa: PLR0913  # what an author may say about a plugin, each by name
    make: Callable[[], Plugin],
    *,
    calls: Iterable[tuple[str, dict[str, Any]]] = (),
    tools: Iterable[Any] = (),
    options: Any = None,
    others: Callable[[], Iterable[Plugin]] = tuple,
    fails_without_services: Iterable[str] = (),
    checks: Iterable[str] = tuple(CHECKS),
) -> PluginReport:
    """Run the contract, or some `checks` of it, on the plugin that `make` makes.

    Call it from sync code; where an event loop runs, await `check_plugin_async`.

    `calls` are tool calls that the model makes in every turn, `tools` are tools of a host that it may call, `options`
    is what a session is opened with for the plugin, `others` makes plugins that it works beside. A hook in
    `fails_without_services` may fail when its services do.
    """
    must_run_alone("check_plugin")
    checker = Checker(_subject(make, calls, tools, options, others, fails_without_services))
    for name in checks:
        CHECKS[name](checker)
        if name == "defined" and checker.found:
            break  # no session would open with it
    return _report(checker)


async def check_plugin_async(make: Callable[[], Plugin], **needs: Any) -> PluginReport:
    """`check_plugin` for async code: on a thread, with event loops of its own. Takes what `check_plugin` takes."""
    return await on_a_thread(check_plugin, make, **needs)


def plugin_contract(make: Callable[[], Plugin], **needs: Any) -> type[unittest.TestCase]:
    """The contract as a test case with a test for each check. Takes what `check_plugin` takes."""
    checker = Checker(_subject(make, **needs))

    def summary(cls: type[unittest.TestCase]) -> None:
        print(_report(checker))

    name = f"PluginContract[{getattr(make, '__name__', type(make).__name__)}]"
    tests = {f"test_{number}_{name}": _test(check, checker) for number, (name, check) in enumerate(CHECKS.items(), 1)}
    case: type[unittest.TestCase] = type(name, (unittest.TestCase,), {**tests, "tearDownClass": classmethod(summary)})
    return case


def _subject(  # what an author may say about a plugin, each by name
    make: Callable[[], Plugin],
    calls: Iterable[tuple[str, dict[str, Any]]] = (),
    tools: Iterable[Any] = (),
    options: Any = None,
    others: Callable[[], Iterable[Plugin]] = tuple,
    fails_without_services: Iterable[str] = (),
) -> Subject:
    return Subject(make, tuple(calls), tuple(tools), options, others, frozenset(fails_without_services))


def _test(check: Callable[[Checker], None], checker: Checker) -> Callable[[unittest.TestCase], None]:
    def test(self: unittest.TestCase) -> None:
        before = len(checker.found)
        check(checker)
        found = checker.found[before:]
        if found:
            self.fail("\n".join([f"plugin {checker.subject.make().id!r} breaks its contract:", *map(str, found)]))

    test.__doc__ = check.__doc__
    return test


def _report(checker: Checker) -> PluginReport:
    hooks = checker.hooks()
    unseen = [hook for hook in hooks if hook not in checker.called]
    plugin = checker.subject.make()
    return PluginReport(plugin.id, tuple(checker.found), tuple(hooks), tuple(unseen), checker.disturbed, checker.kills)
