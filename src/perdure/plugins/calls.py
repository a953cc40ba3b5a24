"""How hooks are called. There are four shapes, and every hook uses one of them:

    collect   one after another in order; every answer with its plugin; the first fault ends it
    first     one after another until one answers
    pipe      one after another, each on what the one before returned
    notify    all at once; faults are gathered, and end nothing

The hooks of tool calls are asked in a chain too; what their answers come to is decided in `decisions`.

A fault is whatever a hook raises, a hook that hangs past its plugin's time limit, or an answer that makes no sense. It
names its plugin and its hook. A chain with async hooks runs in one task of its own, so that a hook that ignores its
cancellation can be left behind; a chain of plain ones costs the calls.

A protocol that a plugin brings (`PluginProtocol`) is held to the same: what it gives is checked, and what it raises
ends the turn.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from math import inf
from types import CoroutineType
from typing import Any, Literal, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from perdure.engine.control import Guarded, TurnAborted
from perdure.errors import PluginFault, ToolError
from perdure.model.codec import clean, clean_part, clean_text, copied, encode, error_text
from perdure.model.message import NO_METADATA, Message, Metadata, Part, Text, ToolCall
from perdure.model.plugin import AskPerson, Decision, Issue, ReplaceArgs
from perdure.model.protocol import Prompt, Reading
from perdure.model.tool import Failed, ToolOutcome, ToolSpec
from perdure.plugins.decisions import (
    WITHHELD,
    WITHHELD_CODE,
    CallVerdict,
    ConflictingPlugins,
    Fold,
    Left,
    Pipe,
    read_before,
    strength,
)
from perdure.plugins.hooks import FilterContext, FilterKind, Plugin, ToolCallContext, ToolEndContext
from perdure.plugins.shown_args import ShownArgs
from perdure.ports.protocol import TurnProtocol

T = TypeVar("T")

log = logging.getLogger("perdure.plugins")

GRACE = 0.05
"""Seconds that a hook gets after it was cancelled; then its caller does not wait for it any more."""

CANCELLED_ITSELF = "CancelledError: it cancelled itself"

CONFIDENTIAL = ("transform_input",)
"""Hooks that see what must not be stored. What they raise may quote it: only its type is logged and told."""


class Hooks(Struct, frozen=True):
    """The plugins that have a hook, in order, each with its bound method. `waits`: at least one is async.

    The last `filters` of them are those of filters, where these come last.
    """

    name: str
    entries: tuple[tuple[Plugin, Callable[..., Any]], ...] = ()
    waits: bool = False
    filters: int = 0

    def __bool__(self) -> bool:
        return bool(self.entries)

    def parted(self) -> tuple[Hooks, Hooks]:
        """Those of other plugins, and those of filters."""
        if not self.filters:
            return self, Hooks(self.name)
        at = len(self.entries) - self.filters
        others = Hooks(self.name, self.entries[:at], self.waits)
        return others, Hooks(self.name, self.entries[at:], self.waits, self.filters)


HookArguments: TypeAlias = Callable[[Plugin], Sequence[Any]]
"""Makes the arguments of one plugin's hook."""

ReadAnswer: TypeAlias = Callable[[Plugin, Any], Any]
"""Makes of an answer what it means. What it raises is a fault of the plugin that answered, not of the next one."""


async def collect(hooks: Hooks, arguments: HookArguments, read: ReadAnswer | None = None) -> list[tuple[Plugin, Any]]:
    """Ask all in order."""
    chain = HookChain(hooks)

    async def calls() -> list[tuple[Plugin, Any]]:
        return [(plugin, await chain.call(plugin, method, arguments(plugin), read)) for plugin, method in hooks.entries]

    return await chain.run(calls())


async def first(hooks: Hooks, arguments: HookArguments, read: ReadAnswer | None = None) -> tuple[Plugin, Any] | None:
    """Ask in order until one answers with something: not None and, unless `read` says otherwise, not empty."""
    chain, read = HookChain(hooks), read or _something

    async def calls() -> tuple[Plugin, Any] | None:
        for plugin, method in hooks.entries:
            answer = await chain.call(plugin, method, arguments(plugin), read)
            if answer is not None:
                return plugin, answer
        return None

    return await chain.run(calls())


async def pipe(
    hooks: Hooks, value: T, arguments: Callable[[Plugin, T], Sequence[Any]], read: ReadAnswer | None = None
) -> T:
    """Hand a value from one to the next."""
    chain = HookChain(hooks)

    async def calls() -> T:
        current = value
        for plugin, method in hooks.entries:
            current = await chain.call(plugin, method, arguments(plugin, current), read)
        return current

    return await chain.run(calls())


async def notify(hooks: Hooks, arguments: HookArguments) -> list[Issue]:
    """Call all at once. What goes wrong comes back as issues, in the order of the plugins."""

    async def one(plugin: Plugin, method: Callable[..., Any]) -> None:
        chain = HookChain(hooks)
        await chain.run(chain.call(plugin, method, arguments(plugin)))

    ends = await asyncio.gather(*[one(*each) for each in hooks.entries], return_exceptions=True)
    issues = []
    for (plugin, _), end in zip(hooks.entries, ends, strict=True):
        if isinstance(end, asyncio.CancelledError):  # a plain hook cancelled the task that called it
            end = PluginFault(plugin.id, hooks.name, CANCELLED_ITSELF)
        if isinstance(end, PluginFault):
            issues.append(Issue("lifecycle_hook_failed", str(end), plugin.id))
        elif end is not None:
            raise end
    return issues


PhaseProbe: TypeAlias = Callable[[str, str], None]
"""Called at the begin and the end of a phase, with its name."""

_KINDS = {"transform_view": "context_transform", "at_checkpoint": "checkpoint", "prompt": "prompt_contributor"}
"""What a hook is called in the names of its phases, where that is not its own name."""


def probed(hooks: Hooks, probe: PhaseProbe | None) -> Hooks:
    """The same hooks, each telling when it begins and ends; also when it fails."""
    if probe is None:
        return hooks
    kind = _KINDS.get(hooks.name, hooks.name)
    entries = [(plugin, _probing(method, f"plugin_hook.{kind}.{plugin.id}", probe)) for plugin, method in hooks.entries]
    return Hooks(hooks.name, tuple(entries), hooks.waits, hooks.filters)


def _probing(method: Callable[..., Any], phase: str, probe: PhaseProbe) -> Callable[..., Any]:
    def begin(*args: Any) -> Any:
        probe(phase, "begin")
        waits = False
        try:
            answer = method(*args)
            waits = answer is not None and inspect.isawaitable(answer)
            return end(answer) if waits else answer
        finally:
            if not waits:
                probe(phase, "end")

    async def end(answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        finally:
            probe(phase, "end")

    return begin


class HookChain:
    """One chain of hook calls: which plugin is at work, since when, and the task that is left behind when it hangs.

    `_own_task`: a hook may be awaited, because the chain runs in a task that it can be left behind in. `_late` is the
    plugin whose time was up. `_ending`: the caller does not wait for the chain any more, whatever the chain does.
    """

    __slots__ = (
        "_due",
        "_ending",
        "_guarded",
        "_hooks",
        "_late",
        "_loop",
        "_own_task",
        "_plugin",
        "_since",
        "_task",
        "_timer",
        "_woken",
    )

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._plugin: Plugin | None = None
        self._loop = asyncio.get_running_loop()
        self._since, self._due = 0.0, inf
        self._own_task = self._ending = False
        self._task: asyncio.Task[Any] | None = None
        self._guarded: Guarded[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._woken: asyncio.Future[None] | None = None
        self._late: Plugin | None = None

    async def run(self, calls: Coroutine[Any, Any, T], alone: bool = False) -> T:
        """Run the calls of the chain, with a task and a timer only where a hook could wait.

        `alone`: the current task exists for this chain, and so it needs no other. Its steps are handed on one by one,
        so that a hook that hangs can be left there.
        """
        if not self._hooks.waits:
            return await calls
        if not alone:
            return await self._in_task(calls)
        self._own_task = True
        guarded: Guarded[T] = Guarded(calls, None, GRACE)
        self._guarded = guarded
        try:
            return await guarded
        except BaseException as error:  # whatever it was, a hook whose time was up is what caused it
            if self._late is not None and guarded.took_back():
                raise self._overdue(self._late, not guarded.left) from error
            raise
        finally:
            if guarded.timer is not None:
                guarded.timer.cancel()
            if self._timer is not None:
                self._timer.cancel()

    async def call(
        self, plugin: Plugin, method: Callable[..., Any], args: Sequence[Any], read: ReadAnswer | None = None
    ) -> Any:
        """Call one hook. What it raises is a fault of its plugin; only a cancellation from outside is not."""
        self._plugin = plugin
        try:
            answer = method(*args)
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a plugin are its own trouble too
            raise self._fault(plugin, error) from error
        if answer is not None and (type(answer) is CoroutineType or inspect.isawaitable(answer)):
            if self._own_task:
                # One timer serves the chain: it is set anew only when this hook's time is up before it would go off.
                self._since = self._loop.time()
                due = self._since + plugin.time_limit
                if due < self._due:
                    if self._timer is not None:
                        self._timer.cancel()
                    self._due, self._timer = due, self._loop.call_at(due, self._check_time)
                try:
                    answer = await answer
                except BaseException as error:  # the same, and what was thrown into it to end it
                    if self._ends(error):
                        raise
                    raise self._fault(plugin, error) from error
                if (
                    self._ending
                ):  # it ignored its cancellation: the rest of the chain must not run after its caller left
                    raise asyncio.CancelledError
            else:
                # A plain function gave something to await: only that needs a task.
                chain = HookChain(self._hooks)
                answer = await chain._in_task(chain.call(plugin, lambda: answer, ()))
        return answer if read is None else self._read(plugin, answer, read)

    def _ends(self, error: BaseException) -> bool:
        """Whether a hook is being ended from outside: cancelled, or left behind and now destroyed with its loop."""
        if isinstance(error, asyncio.CancelledError):
            return self._ending or (self._guarded is not None and self._guarded.task.cancelling() > 0)
        return isinstance(error, GeneratorExit) and not self._runs()

    def _runs(self) -> bool:
        """Whether this chain is a step of its own task right now: a coroutine that is destroyed is not."""
        task = self._task if self._guarded is None else self._guarded.task
        try:
            return asyncio.current_task() is task
        except RuntimeError:  # no loop runs any more
            return False

    def _read(self, plugin: Plugin, answer: Any, read: ReadAnswer) -> Any:
        try:
            return read(plugin, answer)
        except PluginFault:
            raise
        except BaseException as error:  # the methods of its answer ran, and are no more to be trusted
            raise self._fault(plugin, error) from error

    def _fault(self, plugin: Plugin, error: BaseException) -> PluginFault:
        hook = self._hooks.name
        if isinstance(error, asyncio.CancelledError):
            return PluginFault(plugin.id, hook, CANCELLED_ITSELF)
        if hook in CONFIDENTIAL:
            log.warning("hook %s of plugin %s raised %s", hook, plugin.id, type(error).__name__)
            return PluginFault(plugin.id, hook, type(error).__name__)
        log.warning("hook %s of plugin %s raised", hook, plugin.id, exc_info=error)
        return PluginFault(plugin.id, hook, f"{type(error).__name__}: {error_text(error)}")

    async def _in_task(self, calls: Coroutine[Any, Any, T]) -> T:
        """Wait for the chain in a task of its own: until it ends, or shortly after it was cancelled."""
        self._own_task = True  # before the task: a host's loop may begin tasks eagerly
        woken = self._woken = self._loop.create_future()
        task: asyncio.Task[T] = self._loop.create_task(self._waking(calls))
        self._task = task
        try:
            await woken
        except asyncio.CancelledError:
            self._ending = True
            task.add_done_callback(_retrieve)
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE)
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
        if self._late is not None:
            raise self._overdue(self._late, task.done())
        if task.cancelled():  # not by us, so from inside
            assert self._plugin is not None
            raise PluginFault(self._plugin.id, self._hooks.name, CANCELLED_ITSELF)
        return task.result()

    async def _waking(self, calls: Coroutine[Any, Any, T]) -> T:
        """The last step of the chain wakes its caller: sooner by a pass of the event loop than a callback would."""
        try:
            return await calls
        finally:
            self._wake()

    def _overdue(self, plugin: Plugin, ended: bool) -> PluginFault:
        what = f"it did not end within {plugin.time_limit:g} s"
        if not ended:
            what += " and ignores its cancellation: it is left behind"
            log.error("hook %s of plugin %s ignores its cancellation; it is left behind", self._hooks.name, plugin.id)
        return PluginFault(plugin.id, self._hooks.name, what)

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def _check_time(self) -> None:
        """The timer went off: for the hook at work, for one that has long ended, or just after the last one."""
        assert self._plugin is not None
        if self._ending or (self._task is not None and self._task.done()):
            return
        self._due = self._since + self._plugin.time_limit
        if self._due > self._loop.time():
            self._timer = self._loop.call_at(self._due, self._check_time)
            return
        self._late, self._ending = self._plugin, True
        if self._guarded is not None:
            self._guarded.cut()
            return
        assert self._task is not None
        self._task.add_done_callback(_retrieve)
        self._task.cancel()
        self._timer = self._loop.call_later(GRACE, self._wake)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Nothing waits for it any more. An exception that is never retrieved would be logged by asyncio."""
    if not task.cancelled():
        task.exception()


def _something(plugin: Plugin, answer: Any) -> Any:
    return answer or None


# ---------------------------------------------------------------------- tool calls


async def before_tool_call(
    hooks: Hooks,
    context: Callable[[dict[str, Any], bool], ToolCallContext],
    args: dict[str, Any],
    hiding: ShownArgs | None = None,
) -> CallVerdict:
    """Ask all plugins about a call that has not begun. `args` are what they see of its arguments."""
    chain, fold = HookChain(hooks), None

    async def calls() -> dict[str, Any]:
        nonlocal fold
        current, ctx = args, context(copied(args), False)
        for index, (plugin, method) in enumerate(hooks.entries):
            if ctx.args != current:
                ctx = context(copied(current), False)  # replaced, or changed in place, which changes nothing
            answer = await chain.call(plugin, method, (ctx,))
            if answer is None:
                continue
            fold = fold or Fold()
            directives = read_before(plugin, answer)
            fold.weigh(plugin, directives)
            replaced = [each.args for each in directives if isinstance(each, ReplaceArgs)]
            if len(replaced) > 1:
                raise ConflictingPlugins(f"plugin {plugin.id!r} replaced the arguments twice", plugin.id)
            if replaced:
                current = replaced[0] if hiding is None else hiding.seen(replaced[0])
                fold.decisions.append(Decision(plugin.id, fold.seam, "replace_tool_args", current))
                for earlier in hooks.entries[:index]:
                    await _inspect(chain, fold, plugin, earlier, context(copied(current), True))
        return current

    try:
        final = await chain.run(calls(), alone=True)
    except PluginFault as fault:
        return CallVerdict(args, Failed("before_tool_call_failed", str(fault)))
    except ConflictingPlugins as conflict:
        return CallVerdict(args, Failed("plugin_conflict", str(conflict), {"plugins": list(conflict.plugins)}))
    if fold is None:
        return CallVerdict(final)
    ask = fold.winner[1].reason if fold.winner is not None and isinstance(fold.winner[1], AskPerson) else None
    return CallVerdict(final, fold.outcome(), ask, fold.decided(), tuple(fold.asides))


EndContext: TypeAlias = Callable[[ToolOutcome], ToolEndContext]
"""Makes what a plugin is shown of an outcome."""


async def after_tool_call(hooks: Hooks, context: EndContext, ended: ToolOutcome) -> Left:
    """Show all plugins how a call ended."""
    pipe, (others, filters) = Pipe(ended), hooks.parted()
    if others:
        try:
            await _through(pipe, others, context)
        except PluginFault as fault:  # nothing that was decided until now counts
            pipe = Pipe(Failed(WITHHELD_CODE, f"{WITHHELD}: {fault}"))
    if filters:
        pipe = await _filtered(pipe, filters, context)
    return Left(pipe.outcome, tuple(pipe.decisions), tuple(pipe.asides))


async def filtered_outcome(hooks: Hooks, context: EndContext, outcome: ToolOutcome) -> ToolOutcome:
    """The outcome of a call whose body did not run, as filters leave it."""
    filters = hooks.parted()[1]
    return (await _filtered(Pipe(outcome), filters, context)).outcome if filters else outcome


async def _filtered(pipe: Pipe, filters: Hooks, context: EndContext) -> Pipe:
    try:
        await _through(pipe, filters, context)
    except PluginFault as fault:  # its words may quote what it was to hide
        return Pipe(Failed(WITHHELD_CODE, f"{WITHHELD}: plugin {fault.plugin!r} failed"))
    return pipe


async def _through(pipe: Pipe, hooks: Hooks, context: EndContext) -> None:
    chain = HookChain(hooks)

    async def calls() -> None:
        for plugin, method in hooks.entries:
            ctx = context(copied(pipe.outcome))
            answer = await chain.call(plugin, method, (replace(ctx, args=copied(ctx.args)),))
            if answer is not None:
                pipe.take(plugin, answer)

    await chain.run(calls(), alone=True)


async def _inspect(
    chain: HookChain,
    fold: Fold,
    by: Plugin,
    earlier: tuple[Plugin, Callable[..., Any]],
    ctx: ToolCallContext,
) -> None:
    """Show the arguments that `by` replaced to a plugin that let the old ones pass."""
    plugin, method = earlier
    before = encode(ctx.args)
    for directive in read_before(plugin, await chain.call(plugin, method, (ctx,))):
        if isinstance(directive, ReplaceArgs):
            if encode(directive.args) != before:
                why = f"plugins {by.id!r} and {plugin.id!r} both replace the arguments"
                raise ConflictingPlugins(why, by.id, plugin.id)
        elif strength(directive):
            fold.take(plugin, directive)


# ---------------------------------------------------------------------- filters

# What passes the filters of a session before it is stored or shown, beside the outcomes of calls.
#
# Outcomes pass `after_tool_call` (`decisions`). Everything else that tools, processes and people outside give passes
# `filter_value`, one filter after another, each on a value of its own. A filter that fails withholds the value: a text
# takes its place that names the plugin, and nothing else of what it raised, which may quote the value.

ContentKind: TypeAlias = Literal["artifact", "file"]

_TEXTS = ("wake", "answer", "issue")
_NAMES = {"projection": "result", "wake": "news of processes", "answer": "reason"}
"""What is withheld, where that is not the name of its kind."""


def withheld(what: str, plugin: str) -> str:
    """What stands in the place of a value that a plugin failed on."""
    return f"{what} withheld: plugin {plugin!r} failed"


class Filters:
    """The filters of one session. `base` is what every hook knows; `report` is told of faults.

    `refused` is the plugin that keeps the session from opening: nothing passes then.
    """

    __slots__ = ("_base", "_hooks", "_metadata", "_refused", "_report")

    def __init__(
        self,
        hooks: Hooks,
        base: tuple[str, str, str, Any],
        report: Callable[[PluginFault], None],
        refused: str | None = None,
        metadata: Metadata = NO_METADATA,
    ) -> None:
        self._hooks, self._base, self._report, self._refused = hooks, base, report, refused
        self._metadata = metadata

    def value(self, kind: FilterKind, value: Any, call_id: str = "", tool: str = "") -> Any:
        """A text or JSON as it may be stored and shown; in place of what is withheld, that it is."""
        try:
            return self.passed(kind, value, call_id, tool)
        except PluginFault as fault:
            return withheld(_NAMES.get(kind, kind), fault.plugin)

    def passed(self, kind: FilterKind, value: Any, call_id: str = "", tool: str = "") -> Any:
        """A text or JSON as filters leave it. Raises PluginFault when one of them fails."""
        if self._refused is not None:
            raise PluginFault(self._refused, "filter_value", "the session cannot be opened")
        ctx = FilterContext(*self._base, kind, call_id, tool, metadata=self._metadata)
        for plugin, method in self._hooks.entries:
            try:
                answer = method(ctx, copied(value))
                value = _text(answer) if kind in _TEXTS else clean(answer)
            except BaseException as error:  # whatever it was about to hide must not be stored
                raise self._faulted(plugin, error) from error
        return value

    def content(self, kind: ContentKind, call_id: str, tool: str, name: str, data: bytes, media_type: str) -> bytes:
        """The bytes of an artifact, or of a file that a tool returns, as they may be kept. Raises ToolError when they
        may not."""
        if self._refused is not None:
            raise _kept_back(kind, name, self._refused, "failed")
        ctx = FilterContext(*self._base, kind, call_id, tool, name, media_type, metadata=self._metadata)
        for plugin, method in self._hooks.entries:
            try:
                answer = method(ctx, _readable(data))
                passed = None if answer is None else _content(answer)
            except BaseException as error:  # as above
                self._faulted(plugin, error)
                raise _kept_back(kind, name, plugin.id, "failed") from None
            if passed is None:
                raise _kept_back(kind, name, plugin.id, "does not let it pass")
            data = passed
        return data

    def _faulted(self, plugin: Plugin, error: BaseException) -> PluginFault:
        log.warning("filter_value of plugin %s raised", plugin.id, exc_info=error)
        fault = PluginFault(plugin.id, "filter_value", type(error).__name__)
        self._report(fault)
        return fault


def _text(answer: object) -> str:
    if not isinstance(answer, str):
        raise TypeError(f"it returned a {type(answer).__name__}, not text")
    return clean_text(answer)


def _readable(data: bytes) -> str | bytes:
    """Whatever reads as UTF-8 is looked at as text, whatever its media type says."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _content(answer: object) -> bytes:
    if not isinstance(answer, str | bytes):
        raise TypeError(f"it returned a {type(answer).__name__}, neither text nor bytes")
    return answer.encode() if isinstance(answer, str) else answer


def _kept_back(kind: ContentKind, name: str, plugin: str, why: str) -> ToolError:
    return ToolError(f"{kind} {name!r} is withheld: plugin {plugin!r} {why}", code=f"{kind}_withheld")


# ---------------------------------------------------------------------- protocols of plugins


class PluginProtocol:
    """A protocol of the plugin `plugin`. Whatever goes wrong in it is the plugin's fault, and a TurnAborted says so.

    `native` is the protocol that the agent had without it: that knows which calls are cells.
    """

    def __init__(self, plugin: str, make: Callable[[], TurnProtocol], native: TurnProtocol) -> None:
        self._plugin, self._native = plugin, native
        self._protocol = self._within("protocol", lambda: _protocol(make()))

    def ask(self, prompt: Prompt) -> Prompt:
        return self._within("ask", lambda: _asked(self._protocol.ask(prompt)))

    def read(self, parts: Sequence[Part], name: str) -> Reading:
        return self._within("read", lambda: self._read(self._protocol.read(tuple(parts), name), name))

    def _read(self, given: object, name: str) -> Reading:
        """A reading whose parts can be recorded, with an id for every call."""
        if not isinstance(given, Reading):
            raise TypeError(f"it returned a {type(given).__name__}, not a Reading")
        read = self._native.read([clean_part(part) for part in given.parts], name)
        cell, length = given.cell, sum(len(part.text) for part in read.parts if type(part) is Text)
        if cell is not None:
            start, end = cell
            if type(start) is not int or type(end) is not int or not 0 <= start <= end <= length:
                raise ValueError(f"its cell {cell!r:.80} is not within the {length:,} characters of the text")
            if any(type(part) is ToolCall for part in read.parts):
                raise ValueError("it has calls and a cell: give one of them")
            cell = (start, end)
        return Reading(read.parts, cell, clean_text(given.fault), read.cells)

    def _within(self, what: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except Exception as error:  # its own code may raise anything, and no turn can go on without it
            why = f"its protocol ({what}): {type(error).__name__}: {error_text(error)}"
            raise TurnAborted(self._plugin, "plugin_protocol", f"plugin {self._plugin!r}: {why}") from error


def _protocol(made: Any) -> TurnProtocol:
    for method in ("ask", "read"):
        if not callable(getattr(made, method, None)):
            raise TypeError(f"a {type(made).__name__} is no protocol: it has no method `{method}`")
    checked: TurnProtocol = made
    return checked


def _asked(given: object) -> Prompt:
    if not isinstance(given, Prompt):
        raise TypeError(f"it returned a {type(given).__name__}, not a Prompt")
    if not all(isinstance(each, Message) for each in given.messages):
        raise TypeError("its messages are no Messages")
    if not all(isinstance(each, ToolSpec) for each in given.tools):
        raise TypeError("its tools are no ToolSpecs")
    return Prompt(clean_text(given.instructions), list(given.messages), tuple(given.tools), given.output)
