"""How the decisions of several plugins about one tool call become one.

    strength   before the call                    after the call
    4          AbortTurn (the call fails)         AbortTurn (the call fails)
    3          ShortCircuit, not ok: a denial     ShortCircuit, not ok
    2          ShortCircuit, ok                   ShortCircuit, ok
    1          AskPerson
    0          nothing: allowed                   nothing: as it is

The strongest stands, whoever gave it: a weaker directive never restores permission. Between equals the smaller plugin
id wins before a call, and the first one after it. `ReplaceArgs`, and a replaced outcome, take effect at once: later
plugins see the new value, and every earlier one looks at it once more (`inspecting`). What such a look decides counts;
what it would emit does not happen twice; and a second replacement in it is a conflict that fails the call, unless it
leaves the value as it is. A fault fails the call: whatever a broken plugin would have said, it was not yes. Nothing
that was decided before a fault or a conflict counts.

Everybody gets values of their own: arguments that a plugin changes in place change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from mainstay.errors import PluginFault
from mainstay.model.codec import encode
from mainstay.model.plugin import (
    AbortTurn,
    AskPerson,
    Decision,
    Directive,
    ReplaceArgs,
    Seam,
    ShortCircuit,
    kind_of,
)
from mainstay.model.tool import BlobRef, Failed, Ok, ToolOutcome
from mainstay.plugins.calls import Hooks, Watch, limited
from mainstay.plugins.directives import read
from mainstay.plugins.hooks import Plugin, ToolCallContext, ToolEndContext

WITHHELD = "the call ended and its result is withheld"

Asides: TypeAlias = tuple[tuple[str, Directive], ...]
"""Directives beside the verdict, each with its plugin: what to create, enqueue and emit."""


class Verdict(Struct, frozen=True):
    """What becomes of a call: it runs with `args`, a person is asked (`ask`), or it ends with `outcome`."""

    args: dict[str, Any]
    outcome: ToolOutcome | None = None
    ask: str | None = None
    decisions: tuple[Decision, ...] = ()
    asides: Asides = ()


class Conflict(Exception):
    """Two plugins replaced the same thing, or one did so twice."""

    def __init__(self, what: str, *plugins: str) -> None:
        self.plugins = plugins
        super().__init__(what)


def strength(directive: Directive) -> int:
    match directive:
        case AbortTurn():
            return 4
        case ShortCircuit(outcome=outcome):
            return 2 if isinstance(outcome, Ok) else 3
        case AskPerson():
            return 1
        case _:
            return 0


class Fold:
    """The verdict so far: the strongest directive with its plugin, and those it displaced.

    `whole` are the bytes that the call's own outcome refers to; nobody keeps any others.
    """

    def __init__(self, seam: Seam, whole: BlobRef | None = None) -> None:
        self.seam: Seam = seam
        self.whole = whole
        self.winner: tuple[str, Directive] | None = None
        self.displaced: list[tuple[str, Directive]] = []
        self.decisions: list[Decision] = []
        self.asides: list[tuple[str, Directive]] = []

    def weigh(self, plugin: Plugin, directives: Sequence[Directive]) -> bool:
        """Take what a plugin says, without replaced arguments; whether it says how the call ends now."""
        stands = False
        for directive in directives:
            if strength(directive):
                stands = self.take(plugin, directive) or stands
            elif not isinstance(directive, ReplaceArgs):
                self.asides.append((plugin.id, directive))
        return stands

    def take(self, plugin: Plugin, directive: Directive) -> bool:
        """Weigh a terminal directive; whether it stands now."""
        given = (plugin.id, directive)
        if self.winner is None or self._beats(given, self.winner):
            if self.winner is not None:
                self.displaced.append(self.winner)
            self.winner = given
            return True
        self.displaced.append(given)
        return False

    def _beats(self, given: tuple[str, Directive], held: tuple[str, Directive]) -> bool:
        mine, theirs = strength(given[1]), strength(held[1])
        return mine > theirs or (mine == theirs and self.seam == "before_tool_call" and given[0] < held[0])

    def outcome(self) -> ToolOutcome | None:
        """How the call ends if somebody decided that; a denial under an abort keeps its words."""
        if self.winner is None:
            return None
        match self.winner[1]:
            case AbortTurn(code=code, message=message):
                denials: list[dict[str, Any]] = []
                for told in [_told(*each) for each in self.displaced if strength(each[1]) == 3]:
                    if told not in denials:  # said once, and again on a second look
                        denials.append(told)
                return Failed(code, message, {"displaced": denials} if denials else None)
            case ShortCircuit(outcome=outcome):
                return outcome
            case _:
                return None

    def decided(self) -> tuple[Decision, ...]:
        """What a record keeps of it."""
        if self.winner is None:
            return tuple(self.decisions)
        plugin, directive = self.winner
        over = tuple(dict.fromkeys([each for each, _ in self.displaced if each != plugin]))
        return (*self.decisions, Decision(plugin, self.seam, kind_of(directive), _detail(directive), over))


def _told(plugin: str, directive: Directive) -> dict[str, Any]:
    assert isinstance(directive, ShortCircuit)
    outcome = directive.outcome
    if isinstance(outcome, Failed):
        return {"plugin": plugin, "code": outcome.code, "message": outcome.message}
    return {"plugin": plugin, "code": outcome.__struct_config__.tag, "message": getattr(outcome, "reason", "")}


def _detail(directive: Directive) -> Any:
    match directive:
        case AbortTurn(code=code, message=message):
            return {"code": code, "message": message}
        case AskPerson(reason=reason):
            return reason
        case _:
            return None


async def before(
    hooks: Hooks, told: Callable[[dict[str, Any], bool], ToolCallContext], args: dict[str, Any]
) -> Verdict:
    """Ask everybody about a call that has not begun."""
    fold = Fold("before_tool_call")

    async def chain(watch: Watch) -> dict[str, Any]:
        current, ctx = args, told(_own(args), False)
        for index, (plugin, method) in enumerate(hooks.entries):
            if ctx.args != current:
                ctx = told(_own(current), False)  # replaced, or changed in place, which changes nothing
            answer = await watch.over(plugin, method, (ctx,))
            if answer is None:
                continue
            directives = _heard(fold, plugin, answer)
            fold.weigh(plugin, directives)
            replaced = [each.args for each in directives if isinstance(each, ReplaceArgs)]
            if len(replaced) > 1:
                raise Conflict(f"plugin {plugin.id!r} replaced the arguments twice", plugin.id)
            if replaced:
                current = replaced[0]
                fold.decisions.append(Decision(plugin.id, fold.seam, "replace_tool_args", current))
                for earlier in hooks.entries[:index]:
                    await _look_again(watch, fold, plugin, earlier, told(_own(current), True))
        return current

    try:
        final = await limited(hooks, chain, alone=True)
    except PluginFault as fault:
        return Verdict(args, Failed("before_tool_call_failed", str(fault)))
    except Conflict as conflict:
        return Verdict(args, Failed("plugin_conflict", str(conflict), {"plugins": list(conflict.plugins)}))
    ask = fold.winner[1].reason if fold.winner is not None and isinstance(fold.winner[1], AskPerson) else None
    return Verdict(final, fold.outcome(), ask, fold.decided(), tuple(fold.asides))


async def after(hooks: Hooks, told: Callable[[ToolOutcome, bool], ToolEndContext], ended: ToolOutcome) -> Verdict:
    """Tell everybody how a call ended; the verdict's outcome is what is recorded."""
    fold = Fold("after_tool_call", ended.whole if isinstance(ended, Ok) else None)

    def context(outcome: ToolOutcome, inspecting: bool) -> ToolEndContext:
        ctx = told(_own_outcome(outcome), inspecting)
        return replace(ctx, args=_own(ctx.args))

    async def chain(watch: Watch) -> ToolOutcome:
        for index, (plugin, method) in enumerate(hooks.entries):
            now = fold.outcome() or ended
            answer = await watch.over(plugin, method, (context(now, False),))
            if answer is not None and fold.weigh(plugin, _heard(fold, plugin, answer)):
                now = fold.outcome() or ended
                for earlier in hooks.entries[:index]:
                    await _look_again(watch, fold, plugin, earlier, context(now, True))
        return fold.outcome() or ended

    args = told(ended, False).args
    try:
        outcome = await limited(hooks, chain, alone=True)
    except PluginFault as fault:
        return Verdict(args, Failed("after_tool_call_failed", f"{WITHHELD}: {fault}"))
    except Conflict as conflict:
        data = {"plugins": list(conflict.plugins)}
        return Verdict(args, Failed("plugin_conflict", f"{WITHHELD}: {conflict}", data))
    return Verdict(args, outcome, None, fold.decided(), tuple(fold.asides))


def _heard(fold: Fold, plugin: Plugin, answer: object) -> list[Directive]:
    """What one plugin says."""
    directives = read(plugin, fold.seam, answer)
    for each in directives:
        whole = each.outcome.whole if isinstance(each, ShortCircuit) and isinstance(each.outcome, Ok) else None
        if whole is not None and whole != fold.whole:
            raise PluginFault(plugin.id, fold.seam, "its outcome refers to bytes that this call did not keep")
    return directives


async def _look_again(
    watch: Watch,
    fold: Fold,
    by: Plugin,
    earlier: tuple[Plugin, Callable[..., Any]],
    ctx: ToolCallContext | ToolEndContext,
) -> None:
    """Show what `by` replaced to one who let the old value pass."""
    plugin, method = earlier
    before = encode(ctx.outcome if isinstance(ctx, ToolEndContext) else ctx.args)
    what, replacing = ("outcome", ShortCircuit) if isinstance(ctx, ToolEndContext) else ("arguments", ReplaceArgs)
    for directive in _heard(fold, plugin, await watch.over(plugin, method, (ctx,))):
        if isinstance(directive, replacing):
            after = directive.outcome if isinstance(directive, ShortCircuit) else directive.args
            if encode(after) != before:
                raise Conflict(f"plugins {by.id!r} and {plugin.id!r} both replace the {what}", by.id, plugin.id)
        elif strength(directive):
            fold.take(plugin, directive)


def _own(value: Any) -> Any:
    """A copy of plain JSON."""
    if type(value) is dict:
        return {key: _own(each) for key, each in value.items()}
    return [_own(each) for each in value] if type(value) is list else value


def _own_outcome(outcome: ToolOutcome) -> ToolOutcome:
    match outcome:
        case Ok(value=value, whole=whole):
            return Ok(_own(value), whole)
        case Failed(code=code, message=message, data=data):
            return Failed(code, message, _own(data))
        case _:
            return outcome
