"""The probe: every hook of the plugin under contract is called through it, to be logged, checked or disturbed.

The plugin object gets a class derived from its own, with every hook that it has overridden. It runs in a real turn of a
real Runtime like any other: three of them, with a restart before the last one. The model is a function: it calls the
kit's own tools, one of which fails, and the tools that the author names; then it streams an answer in pieces. Every
request for approval is granted.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable
from typing import Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.agent import Agent
from perdure.errors import Conflict, NotFound, PerdureError, PluginFault, ProviderError, ToolError, Unavailable
from perdure.model.agent import Budget
from perdure.model.ids import split
from perdure.model.llm import ModelRequest
from perdure.model.message import ToolCall
from perdure.model.outcome import PluginAborted, kind_of
from perdure.model.plugin import PluginSnapshot
from perdure.model.tool import Failed
from perdure.plugins.hooks import HOOKS, Plugin, SessionContext
from perdure.plugins.registry import overrides, revision_of, take_snapshot
from perdure.plugins.turn import CODES
from perdure.providers.scripted import FunctionModel
from perdure.runtime import Runtime
from perdure.sessions.result import TurnResult
from perdure.sessions.session import Session
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.tools.context import ToolContext
from perdure.tools.define import tool

Way: TypeAlias = Literal["raises", "answers nonsense", "hangs", "is cancelled", "is called twice", "has no services"]
"""How a hook may be disturbed."""

WAYS: tuple[Way, ...] = get_args(Way)

STATE = ("for_session", "revision", "snapshot", "restore")
OFFERS = ("tools", "trigger_events", "extensions", "engines", "protocol", "code_executor", "shutdown")
QUIET = (*STATE, *OFFERS)
"""Hooks that are no part of a turn."""

SHORT = 0.05
"""Seconds that a hook has which is made to hang."""

CANCEL_SECONDS = 1.0
"""Seconds until a hook that was cancelled must have ended."""


class Finding(Struct, frozen=True):
    """What is wrong with a plugin. `hook` is "" when no single hook is to blame."""

    check: str
    hook: str
    what: str

    def __str__(self) -> str:
        return f"{self.hook}: {self.what}" if self.hook else self.what


class HookCall(Struct, frozen=True):
    """A hook that was called. `step` is the model call or tool call that it was about."""

    incarnation: int
    hook: str
    turn_id: str = ""
    step: str = ""


class Planted(RuntimeError):
    """What a disturbed hook raises."""


class HookProbe:
    """Logs and disturbs the hook calls of one run. All state belongs to one event loop.

    `hook` and `way` are the disturbance, until `calm` is called; `struck` says whether it happened. With
    `watch_state` the plugin's state is compared around every hook. `planted` is given to `restore` in place of what
    was saved. `instances` are the plugins by session; "" is the shared one. `calls` may be a list that outlives the
    run: those of all incarnations.
    """

    def __init__(
        self,
        hook: str = "",
        way: Way | None = None,
        *,
        watch_state: bool = False,
        incarnation: int = 1,
        calls: list[HookCall] | None = None,
    ) -> None:
        self.hook, self.way, self._watch_state, self.incarnation = hook, way, watch_state, incarnation
        self.struck = False
        self.calls: list[HookCall] = [] if calls is None else calls
        self.found: list[Finding] = []
        self.instances: dict[str, Plugin] = {}
        self.planted: list[Any] = []
        self._limits: list[tuple[Plugin, float]] = []
        self._known: dict[int, tuple[int, bytes]] = {}
        self._made: dict[int, tuple[Plugin, str]] = {}

    def find(self, check: str, hook: str, what: str) -> None:
        finding = Finding(check, hook, what)
        if finding not in self.found:
            self.found.append(finding)

    def calm(self) -> None:
        """From here on nothing is disturbed."""
        self.way = None
        for plugin, limit in self._limits:
            _set(plugin, "time_limit", limit)

    def watch(self, plugin: Plugin) -> Plugin:
        """The same object, watched."""
        _set(plugin, "__class__", _watched(type(plugin), self))
        self.instances.setdefault("", plugin)
        return self._shortened(plugin)

    def _shortened(self, plugin: Plugin) -> Plugin:
        if self.way == "hangs":
            self._limits.append((plugin, plugin.time_limit))
            _set(plugin, "time_limit", SHORT)
        return plugin

    # ------------------------------------------------------------------ one call

    def opened(self, plugin: Plugin, made: Plugin, own: type[Plugin], ctx: SessionContext) -> Plugin:
        """`for_session` gave an instance."""
        if type(made) is own:
            _set(made, "__class__", type(plugin))
        self._made[id(made)] = (made, ctx.session_id)
        self.instances.setdefault(ctx.session_id, made)
        return self._shortened(made)

    def used(self, plugin: Plugin) -> None:
        """A session runs with this instance; others were made only to see whether its options are sound."""
        if id(plugin) in self._made:
            self.instances[self._made[id(plugin)][1]] = plugin

    def called(self, plugin: Plugin, hook: str, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """A plain hook; also one that gives something to await."""
        way, args = self._enter(plugin, hook, args)
        before = seen(args)
        if way == "is called twice":
            _dropped(method(*args))
        answer = method(*args)
        if inspect.isawaitable(answer):
            return self._awaited(plugin, hook, way, answer, (args, before))
        self._leave(plugin, hook, args, before)
        return _disturbed(way, answer)

    async def called_later(self, plugin: Plugin, hook: str, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        way, args = self._enter(plugin, hook, args)
        before = seen(args)
        if way == "is called twice":
            await method(*args)
        return await self._awaited(plugin, hook, way, method(*args), (args, before))

    async def _awaited(
        self, plugin: Plugin, hook: str, way: Way | None, answer: Awaitable[Any], shown: tuple[Any, Any]
    ) -> Any:
        given = await (self._cancelled(hook, answer) if way == "is cancelled" else answer)
        self._leave(plugin, hook, *shown)
        if way == "hangs":
            await asyncio.get_running_loop().create_future()
        return _disturbed(way, given)

    async def _cancelled(self, hook: str, answer: Awaitable[Any]) -> Any:
        """Cancel a hook where it first waits, as a turn that is cancelled does."""
        task = asyncio.ensure_future(answer)
        await asyncio.sleep(0)
        if task.done():
            return task.result()  # it never waits
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_SECONDS)
        if not task.done():
            self.find(
                "disturbed", hook, f"it ignores its cancellation for {CANCEL_SECONDS:g} s: let CancelledError pass"
            )
            raise asyncio.CancelledError
        if not task.cancelled() and task.exception() is None:
            self.find("disturbed", hook, "it swallows its cancellation: let CancelledError pass")
        raise asyncio.CancelledError

    def _enter(self, plugin: Plugin, hook: str, args: tuple[Any, ...]) -> tuple[Way | None, tuple[Any, ...]]:
        self.calls.append(_call(self.incarnation, hook, args[0] if args else None))
        self.used(plugin)
        self._check_state(plugin, hook, outside=True)
        way = self.way if hook == self.hook else None
        self.struck = self.struck or way is not None
        host: Any = Absent() if way == "has no services" else Silent() if way == "is cancelled" else None
        if host is not None and args and hasattr(args[0], "host"):
            args = (replace(args[0], host=host), *args[1:])
        return way, args

    def _leave(self, plugin: Plugin, hook: str, args: tuple[Any, ...], before: dict[str, bytes]) -> None:
        after = seen(args)
        for name in [name for name in before if before[name] != after[name]]:
            self.find("arguments", hook, f"it changes {name}, which it was only shown: make a copy")
        self._check_state(plugin, hook)

    # ------------------------------------------------------------------ state

    def _check_state(self, plugin: Plugin, hook: str, outside: bool = False) -> None:
        """Find a state that changed while its revision did not."""
        if not self._watch_state or not overrides(plugin, "snapshot") or hook in QUIET:
            return
        content = remembered(plugin)
        if content is None:
            return
        now = (revision_of(plugin), content)
        known = self._known.get(id(plugin))
        self._known[id(plugin)] = now
        if known is None or known == now:
            return
        where = f"between two hooks, before {hook}" if outside else "in it"
        if known[0] == now[0]:
            self.find("state", "" if outside else hook, f"its state changed {where}, and its revision did not move")
        elif now[0] < known[0]:
            self.find("state", "revision", f"it went from {known[0]} back to {now[0]} {where}: it only grows")

    def check_state(self, plugin: Plugin) -> None:
        """Compare the state between two turns."""
        self._check_state(plugin, "the next turn", outside=True)


# ---------------------------------------------------------------------- the class of a watched plugin


def _watched(own: type[Plugin], probe: HookProbe) -> type[Plugin]:
    hooks = [name for name in HOOKS if name not in QUIET and getattr(own, name) is not getattr(Plugin, name)]

    def fill(namespace: dict[str, Any]) -> None:
        namespace["__module__"] = own.__module__
        for hook in hooks:
            later = inspect.iscoroutinefunction(getattr(own, hook))
            namespace[hook] = _later(hook, own, probe) if later else _plain(hook, own, probe)
        for hook, watching in (("for_session", _opening), ("restore", _restoring)):
            if getattr(own, hook) is not getattr(Plugin, hook):
                namespace[hook] = watching(own, probe)

    bases: tuple[Any, ...] = (own,)
    made: type[Plugin] = types.new_class(own.__name__, bases, exec_body=fill)
    return made


def _plain(hook: str, own: type[Plugin], probe: HookProbe) -> Callable[..., Any]:
    def watched(self: Plugin, *args: Any) -> Any:
        return probe.called(self, hook, getattr(own, hook).__get__(self), args)

    return watched


def _later(hook: str, own: type[Plugin], probe: HookProbe) -> Callable[..., Any]:
    async def watched(self: Plugin, *args: Any) -> Any:
        return await probe.called_later(self, hook, getattr(own, hook).__get__(self), args)

    return watched


def _opening(own: type[Plugin], probe: HookProbe) -> Callable[..., Any]:
    def for_session(self: Plugin, ctx: SessionContext) -> Plugin:
        return probe.opened(self, own.for_session(self, ctx), own, ctx)

    return for_session


def _restoring(own: type[Plugin], probe: HookProbe) -> Callable[..., Any]:
    def restore(self: Plugin, snapshot: PluginSnapshot, reader: Any) -> None:
        probe.used(self)
        if probe.planted:
            snapshot = replace(snapshot, state=probe.planted[0])
        own.restore(self, snapshot, reader)

    return restore


def _set(plugin: Plugin, name: str, value: Any) -> None:
    object.__setattr__(plugin, name, value)  # also for those that are frozen


# ---------------------------------------------------------------------- what a hook is given


class Absent:
    """Services that are down, all but the trace, which never fails."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def refused(*_: Any, **__: Any) -> Any:
            if name == "complete":
                raise ProviderError("the contract kit lets no model answer", code="provider_down")
            raise Unavailable(f"the contract kit has taken `{name}` away")

        return (lambda *_, **__: None) if name == "trace" else refused


class Silent:
    """Services that never answer."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def never(*_: Any, **__: Any) -> Any:
            await asyncio.get_running_loop().create_future()

        return (lambda *_, **__: None) if name == "trace" else never


def seen(args: tuple[Any, ...]) -> dict[str, bytes]:
    """The arguments of a hook as bytes by name, to compare; without live objects."""
    found: dict[str, bytes] = {}
    for at, each in enumerate(args):
        fields = each.__struct_fields__ if isinstance(each, Struct) and at == 0 else ()
        if not fields:
            found["what it was given"] = _bytes(each)
        for name in fields:
            if name not in ("host", "deps"):
                found[f"ctx.{name}"] = _bytes(getattr(each, name))
    return found


def _bytes(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)


def remembered(plugin: Plugin) -> bytes | None:
    """A plugin's state as bytes, to compare; None when it has none or taking it fails."""
    try:
        taken = take_snapshot(plugin)
    except PluginFault:
        return None
    return _bytes([taken.snapshot.state, taken.snapshot.blobs])


def _call(incarnation: int, hook: str, ctx: Any) -> HookCall:
    turn, step, call = (getattr(ctx, name, "") for name in ("turn_id", "step", "call_id"))
    return HookCall(incarnation, hook, turn, call.rpartition(f"{turn}.")[2] if call else str(step))


def _disturbed(way: Way | None, answer: Any) -> Any:
    if way == "raises":
        raise Planted("the contract kit let this hook fail")
    return object() if way == "answers nonsense" else answer


def _dropped(answer: Any) -> None:
    """Close the coroutine of an answer that is not awaited."""
    if inspect.iscoroutine(answer):
        answer.close()


# ---------------------------------------------------------------------- the turns that the plugin runs in

SESSION = "probed"
PIECES = ("Here is wh", "at I fo", "und: noth", "ing special.")
INPUTS = ("Look it up, please.", "And once more.", "Thank you.")
SECONDS = 30.0
"""For one turn, also on a busy machine."""

UNENDED = ("hung", "stuck")
"""What becomes of a turn that does not end, beside the outcomes of those that do."""

ABORTED = {*CODES.values(), "plugin_output", "plugin_session", "plugin_snapshot_newer", "plugin_snapshot_unreadable"}
SPOILT = {"before_tool_call_failed", "after_tool_call_failed", "plugin_conflict"}
"""How turns and calls end by a plugin's fault. Whatever else they end with is a decision."""

RAISED = {"tool_raised", "invalid_tool_args", "invalid_output", "tool_unavailable"}
"""How calls of the author's own tools must not end here."""


@tool(recovery="rerun")
async def look_up(word: str) -> str:
    """Look something up."""
    return f"{word}: nothing special"


@tool(name="look_up", recovery="rerun")
async def look_up_aloud(word: str, ctx: ToolContext[Any]) -> str:
    """Look something up, and tell and keep what a filter wants to see."""
    ctx.progress({"looking up": word})
    await ctx.artifacts.put(f"{word}: nothing special", name=f"{word}.txt")
    await ctx.artifacts.put(b"\xff\x00", name=f"{word}.bin")
    return f"{word}: nothing special"


@tool(recovery="rerun")
async def stumble(word: str) -> str:
    """Fail."""
    raise ToolError(f"cannot find {word}", code="not_found", data={"word": word})


class Subject(Struct, frozen=True):
    """A plugin and what it needs to show what it does.

    `calls` are made by the model in every turn, beside the kit's own; `tools` are tools of the host for them; `others`
    makes plugins that run before it.
    """

    make: Callable[[], Plugin]
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    tools: tuple[Any, ...] = ()
    options: Any = None
    others: Callable[[], Iterable[Plugin]] = tuple
    fails_without_services: frozenset[str] = frozenset()


class TurnEnd(Struct, frozen=True):
    """One turn: how it ended, what its messages say, and what a plugin did wrong in it."""

    kind: str
    said: tuple[str, ...]
    faults: tuple[str, ...] = ()


class ContractRun(Struct, frozen=True):
    """All turns. `requests` is what the model was asked.

    `states` is the plugin's state before the restart and in the end.
    """

    turns: tuple[TurnEnd, ...]
    requests: tuple[bytes, ...]
    states: tuple[bytes | None, ...] = ()


def agent_for(subject: Subject, probe: HookProbe, requests: list[bytes] | None = None) -> Agent[str]:
    """The agent with a new plugin under the probe. Raises what a Runtime would refuse it with."""

    async def model(request: ModelRequest) -> AsyncIterator[str | ToolCall]:
        if requests is not None:
            requests.append(msgspec.json.encode(request.messages))
        if ":" in request.call_id:  # a plugin asks beside the turn
            yield "It was about nothing special."
            return
        _, (_, step) = split(request.call_id, 2)
        if step > 1:
            for piece in PIECES:
                yield piece
                await asyncio.sleep(0)
            return
        wanted = [("look_up", {"word": "durable"}), ("stumble", {"word": "nowhere"}), *subject.calls]
        for at, (name, args) in enumerate(wanted):
            yield ToolCall(f"call-{request.call_id}-{at}", name, args)

    plugin = probe.watch(subject.make())
    return Agent(
        FunctionModel(model),
        name="contract",
        instructions="Answer briefly.",
        tools=[look_up_aloud if overrides(plugin, "filter_value") else look_up, stumble, *subject.tools],
        plugins=[*subject.others(), plugin],
        budget=Budget(steps=8),
    )


async def run_turns(subject: Subject, probe: HookProbe, *, before: str | None = None) -> ContractRun:
    """Three turns; disturbed, if at all, is the first. `before` is another session that goes first.

    A turn that cannot go on is the last one: the session would accept no other.
    """
    rows, requests, turns, states = MemoryRows(), list[bytes](), list[TurnEnd](), list[bytes | None]()
    for numbers in ((1, 2), (3,)):
        async with runtime(subject, probe, rows, requests) as host:
            if before is not None and probe.incarnation == 1:
                await run_turn(host, subject, 1, before)
                requests.clear()
            for number in numbers:
                turns.append(await run_turn(host, subject, number, probe=probe))
                probe.calm()
                if turns[-1].kind in UNENDED:
                    return ContractRun(tuple(turns), tuple(requests))
            probe.check_state(instance(probe))
            states.append(remembered(instance(probe)))
        probe.incarnation += 1
    return ContractRun(tuple(turns), tuple(requests), tuple(states))


def instance(probe: HookProbe) -> Plugin:
    """The plugin instance of the session, as it is now."""
    return probe.instances.get(SESSION) or probe.instances[""]


def runtime(subject: Subject, probe: HookProbe, rows: MemoryRows, requests: list[bytes]) -> Runtime:
    probe.instances.clear()
    return Runtime(MemoryStore(rows), agents=[agent_for(subject, probe, requests)], grace=0.5)


async def opened(host: Runtime, subject: Subject, name: str) -> Session[Any]:
    options = None if subject.options is None else {subject.make().id: subject.options}
    return await host.session(name, options=options)


async def run_turn(
    host: Runtime, subject: Subject, number: int, name: str = SESSION, probe: HookProbe | None = None
) -> TurnEnd:
    """Say something, approve whatever asks, and see how it ends. An input that a disturbed filter has refused is no
    turn: it is said again, undisturbed."""
    try:
        async with asyncio.timeout(SECONDS):
            session = await opened(host, subject, name)
            try:
                result = await session.run(INPUTS[number - 1], key=f"turn-{number}")
            except PluginFault as fault:
                if probe is None or probe.way is None or fault.hook != "transform_input":
                    raise
                probe.calm()
                result = await session.run(INPUTS[number - 1], key=f"turn-{number}")
            while result.waiting:
                await approve(session)
                result = await session.result(result.turn_id)
            await session.history()
    except TimeoutError:
        return TurnEnd("hung", (), (f"turn {number} did not end within {SECONDS:g} s",))
    except PerdureError as error:
        return TurnEnd("stuck", (), (f"turn {number} cannot go on: {error}",))
    said = tuple([f"{message.role}: {message.text}" for message in result.new_messages])
    return TurnEnd(kind_of(result.outcome), said, tuple(faults(result)))


async def approve(session: Session[Any]) -> None:
    """Answer what waits. After a crash it may be answered already."""
    for pending in await session.pending():
        with contextlib.suppress(Conflict, NotFound):
            if pending.kind == "approval":
                await session.approve(pending.call_id)
            else:
                await session.settle(pending.call_id, "done")


def faults(result: TurnResult[Any]) -> Generator[str, None, None]:
    """What plugins did wrong in a turn."""
    for issue in result.issues:
        yield f"{issue.code}: {issue.message}"
    outcome = result.outcome
    if isinstance(outcome, PluginAborted) and outcome.code in ABORTED:
        yield f"the turn ends as {outcome.code}: {outcome.message}"
    for call in result.tool_calls:
        end = call.outcome
        if isinstance(end, Failed) and end.code in (SPOILT if call.tool in ("look_up", "stumble") else SPOILT | RAISED):
            yield f"the call of {call.tool} ends as {end.code}: {end.message}"
