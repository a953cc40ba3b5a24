"""The contract of a plugin, to run on yours.

    from mainstay.testing.plugin_contract import plugin_contract

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
import unittest
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mainstay.errors import MainstayError, PluginFault
from mainstay.model.plugin import PluginSnapshot
from mainstay.plugins import state
from mainstay.plugins.hooks import HOOKS, Plugin, SessionContext, SnapshotReader
from mainstay.plugins.registry import PluginSet, overrides
from mainstay.testing import plugin_replay
from mainstay.testing.crash.scenario import must_run_alone, on_a_thread
from mainstay.testing.plugin_drill import SESSION, UNENDED, Drilled, Trial, agent_for, drill, quiet
from mainstay.testing.plugin_probe import QUIET, WAYS, Finding, Probe, Way, remembered

__all__ = ["Finding", "Report", "check_plugin", "check_plugin_async", "plugin_contract"]

LONGEST = 600.0
"""Seconds that a hook may take at most before a turn is freed of it."""

ASKED = frozenset({"has no services", "is called twice"})
"""Ways in which a plugin is not itself at fault, so that a turn must not suffer."""

RUBBISH: tuple[Any, ...] = (7, "rubbish", True, [None, {"rubbish": []}], {"rubbish": {"rubbish": 1}})


class Report(Struct, frozen=True):
    """What was found, and what was tried. `unseen` are hooks that no drill came to."""

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


class Bench:
    """A plugin under contract, and what the checks have learned so far."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.found: list[Finding] = []
        self.called: set[str] = set()
        self.disturbed = self.kills = 0
        self._plain: tuple[Drilled, Probe] | None = None

    def find(self, check: str, what: str, hook: str = "") -> None:
        finding = Finding(check, hook, what)
        if finding not in self.found:
            self.found.append(finding)

    def plugin(self) -> Plugin:
        """A new instance, as a new session has it."""
        made = self.trial.make()
        return made.for_session(SessionContext(SESSION, "drill", self.trial.options))

    def hooks(self) -> list[str]:
        plugin = self.trial.make()
        return [hook for hook in HOOKS if hook not in QUIET and overrides(plugin, hook)]

    def plain(self) -> tuple[Drilled, Probe]:
        """The drill that nobody disturbs."""
        if self._plain is None:
            probe = Probe(watch_state=True)
            self._plain = self.run(probe), probe
        return self._plain

    def run(self, probe: Probe, before: str | None = None) -> Drilled:
        with quiet():
            drilled = asyncio.run(drill(self.trial, probe, before=before))
        self.called |= {call.hook for call in probe.calls}
        return drilled


# ---------------------------------------------------------------------- checks


def check_defined(bench: Bench) -> None:
    """The plugin can be told apart, its hooks are spelled and shaped as hooks are, its time limit is sane."""
    plugin, again = bench.trial.make(), bench.trial.make()
    try:
        PluginSet([plugin])
    except MainstayError as error:
        bench.find("defined", str(error))
        return
    if (plugin.id, plugin.version) != (again.id, again.version):
        bench.find("defined", f"its id or version changes: {plugin.id} {plugin.version}, {again.id} {again.version}")
    if plugin.time_limit > LONGEST:
        bench.find("defined", f"its time limit is {plugin.time_limit:g} s: a hook that hangs holds a turn as long")
    try:
        agent_for(bench.trial, Probe())
    except MainstayError as error:
        bench.find("defined", f"no agent can have it: {error}")


def check_undisturbed(bench: Bench) -> None:
    """Three turns and a restart show no fault."""
    drilled, _ = bench.plain()
    for number, turn in enumerate(drilled.turns, 1):
        for fault in turn.faults:
            bench.find("undisturbed", f"turn {number}: {fault}")


def check_arguments(bench: Bench) -> None:
    """No hook changes what it was only shown."""
    _, probe = bench.plain()
    bench.found += [finding for finding in probe.found if finding.check == "arguments"]


def check_state(bench: Bench) -> None:
    """JSON; restored it is the same; the revision moves when the state does; rubbish is refused, or does no harm."""
    if not overrides(bench.trial.make(), "snapshot"):
        return
    _, probe = bench.plain()
    bench.found += [finding for finding in probe.found if finding.check == "state"]
    instance = probe.instances.get(SESSION) or probe.instances[""]
    try:
        taken, blank = state.take(instance), state.take(bench.plugin())
    except PluginFault as fault:
        bench.find("state", fault.what, fault.hook)
        return
    if state.take(instance) != taken:
        bench.find("state", "taken twice it is different, although nothing happened in between", "snapshot")
    _check_round_trip(bench, taken)
    _check_nothing_saved(bench, blank.snapshot)
    _check_rubbish(bench, taken.snapshot)


def _check_round_trip(bench: Bench, taken: state.Taken) -> None:
    stored = msgspec.json.decode(msgspec.json.encode(taken.snapshot), type=PluginSnapshot)
    fresh = bench.plugin()
    issue = state.restore(fresh, stored, taken.blobs)
    if issue is not None:
        bench.find("state", issue.message, "restore")
        return
    again = state.take(fresh)
    if again.snapshot.revision < taken.snapshot.revision:
        what = f"the revision is {again.snapshot.revision} after restoring {taken.snapshot.revision}: go on from there"
        bench.find("state", what, "restore")
    if (again.snapshot.state, again.blobs) != (taken.snapshot.state, taken.blobs):
        saved, back = taken.snapshot.state, again.snapshot.state
        bench.find("state", f"what was saved is not what comes back: {saved!r:.200} became {back!r:.200}", "restore")


def _check_nothing_saved(bench: Bench, blank: PluginSnapshot) -> None:
    fresh = bench.plugin()
    issue = state.restore(fresh, None, {})
    if issue is not None:
        bench.find("state", f"without anything saved: {issue.message}", "restore")
    elif (now := remembered(fresh)) is not None and now != msgspec.json.encode([blank.state, blank.blobs]):
        bench.find("state", "without anything saved it remembers something", "restore")


def _check_rubbish(bench: Bench, snapshot: PluginSnapshot) -> None:
    for rubbish in [each for each in RUBBISH if type(each) is not type(snapshot.state)]:
        fresh = bench.plugin()
        if _restored(fresh, replace(snapshot, state=rubbish)) and state.take(fresh).snapshot.state != rubbish:
            bench.find("state", f"it takes {rubbish!r} for a state and forgets it: raise instead", "restore")
    for spoilt in _spoilt(snapshot.state):
        probe = Probe()
        probe.planted.append(spoilt)
        if not _restored(bench.plugin(), replace(snapshot, state=spoilt)):
            continue
        for turn in bench.run(probe).turns:
            for fault in turn.faults:
                bench.find("state", f"it takes {spoilt!r:.120} for a state and then fails: {fault}", "restore")


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


def check_apart(bench: Bench) -> None:
    """What happens in one session is not seen in another."""
    alone, _ = bench.plain()
    if bench.run(Probe()) != alone:
        return  # it depends on the clock or on chance: nothing can be told from a comparison
    after = bench.run(Probe(), before="another")
    if after.states != alone.states:
        bench.find("apart", "a session remembers what happened in another one: keep it in what for_session makes")
    elif after.requests != alone.requests or after.turns != alone.turns:
        bench.find("apart", "a session goes differently after another one: keep such things in what for_session makes")


def check_disturbed(bench: Bench) -> None:
    """Each hook × each disturbance: the turn ends, and the turns after it are as if nothing had happened."""
    plain, watched = bench.plain()
    kinds = [turn.kind for turn in plain.turns]
    plugin = bench.trial.make()
    for hook in [each for each in bench.hooks() if each in {call.hook for call in watched.calls}]:
        for way in [each for each in WAYS if _can(plugin, hook, each)]:
            probe = Probe(hook, way)
            drilled = bench.run(probe)
            bench.disturbed += probe.struck
            bench.found += [finding for finding in probe.found if finding.check == "disturbed"]
            excused = way == "has no services" and hook in bench.trial.fails_without_services
            first, *rest = drilled.turns
            if first.kind in UNENDED or (way in ASKED and not excused):
                for fault in first.faults:
                    bench.find("disturbed", f"when it {way}: {fault}", hook)
            for number, turn in enumerate(rest, 2):
                for fault in turn.faults:
                    bench.find("disturbed", f"after it once {_past(way)}, turn {number}: {fault}", hook)
                if turn.kind != kinds[number - 1]:
                    what = f"after it once {_past(way)}, turn {number} ends as {turn.kind}, not {kinds[number - 1]}"
                    bench.find("disturbed", what, hook)


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


def check_replay(bench: Bench) -> None:
    """Killed and resumed at every record, a session reads and remembers the same, and no recorded hook runs again."""
    with quiet():
        kills, findings = plugin_replay.kill_everywhere(bench.trial)
    bench.kills += kills
    for what in findings:
        bench.find("replay", what)


CHECKS: Mapping[str, Callable[[Bench], None]] = {
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
) -> Report:
    """Run the contract, or some `checks` of it, on the plugin that `make` makes.

    Call it from sync code; where an event loop runs, await `check_plugin_async`.

    `calls` are tool calls that the model makes in every turn, `tools` are tools of a host that it may call, `options`
    is what a session is opened with for the plugin, `others` makes plugins that it works beside. A hook in
    `fails_without_services` may fail when its services do.
    """
    must_run_alone("check_plugin")
    bench = Bench(_trial(make, calls, tools, options, others, fails_without_services))
    for name in checks:
        CHECKS[name](bench)
        if name == "defined" and bench.found:
            break  # no session would open with it
    return _report(bench)


async def check_plugin_async(make: Callable[[], Plugin], **needs: Any) -> Report:
    """`check_plugin` for async code: on a thread, with event loops of its own. Takes what `check_plugin` takes."""
    return await on_a_thread(check_plugin, make, **needs)


def plugin_contract(make: Callable[[], Plugin], **needs: Any) -> type[unittest.TestCase]:
    """The contract as a test case with a test for each check. Takes what `check_plugin` takes."""
    bench = Bench(_trial(make, **needs))

    def summary(cls: type[unittest.TestCase]) -> None:
        print(_report(bench))

    name = f"PluginContract[{getattr(make, '__name__', type(make).__name__)}]"
    tests = {f"test_{number}_{name}": _test(check, bench) for number, (name, check) in enumerate(CHECKS.items(), 1)}
    case: type[unittest.TestCase] = type(name, (unittest.TestCase,), {**tests, "tearDownClass": classmethod(summary)})
    return case


def _trial(  # what an author may say about a plugin, each by name
    make: Callable[[], Plugin],
    calls: Iterable[tuple[str, dict[str, Any]]] = (),
    tools: Iterable[Any] = (),
    options: Any = None,
    others: Callable[[], Iterable[Plugin]] = tuple,
    fails_without_services: Iterable[str] = (),
) -> Trial:
    return Trial(make, tuple(calls), tuple(tools), options, others, frozenset(fails_without_services))


def _test(check: Callable[[Bench], None], bench: Bench) -> Callable[[unittest.TestCase], None]:
    def test(self: unittest.TestCase) -> None:
        before = len(bench.found)
        check(bench)
        found = bench.found[before:]
        if found:
            self.fail("\n".join([f"plugin {bench.trial.make().id!r} breaks its contract:", *map(str, found)]))

    test.__doc__ = check.__doc__
    return test


def _report(bench: Bench) -> Report:
    hooks = bench.hooks()
    unseen = [hook for hook in hooks if hook not in bench.called]
    plugin = bench.trial.make()
    return Report(plugin.id, tuple(bench.found), tuple(hooks), tuple(unseen), bench.disturbed, bench.kills)
