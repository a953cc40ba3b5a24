"""How the decisions of several plugins about one tool call become one.

Before a call, the strongest directive stands, whichever plugin gave it:

    4    AbortTurn (the call fails)
    3    ShortCircuit, not ok: a denial
    2    ShortCircuit, ok
    1    AskPerson
    0    nothing: allowed

A weaker directive never restores permission. Between equals the smaller plugin id wins. `ReplaceArgs` takes effect at
once: later plugins see the new arguments, and every earlier one looks at them once more (`inspecting`). What such a
look decides counts; what it would emit does not happen twice; and a second replacement in it is a conflict that fails
the call, unless it leaves the arguments as they are. A fault fails the call: whatever a broken plugin would have said,
it was not yes. Nothing that was decided before a fault or a conflict counts.

After a call, plugins are a pipe: each sees the outcome as the one before it left it, and what it answers takes effect
at once. Denial and abort are monotone: a replacement never makes a success of an outcome that is none, and nothing but
a filter replaces what an abort left. Filters stand at the end of the pipe, so that they see what is recorded, and
whatever else becomes the outcome of a call passes them too. A plugin that fails withholds the outcome.

Everybody gets values of their own: what a plugin changes in place changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, TypeAlias, get_args

from msgspec import Struct, ValidationError
from msgspec.structs import replace

from perdure.errors import InvalidInput, PluginFault
from perdure.model.codec import clean, clean_message, clean_part, clean_text, convert, error_text
from perdure.model.ids import check_session_id
from perdure.model.message import Message, Role, Text, unanswered
from perdure.model.plugin import (
    LEGAL,
    AbortTurn,
    AskPerson,
    CreateSession,
    Decision,
    Directive,
    EmitEvents,
    EmitTrace,
    EnqueueMessages,
    ReplaceArgs,
    Seam,
    ShortCircuit,
    kind_of,
)
from perdure.model.tool import Failed, Ok, ToolOutcome
from perdure.plugins.hooks import Plugin

log = logging.getLogger("perdure.plugins")

WITHHELD = "the call ended and its result is withheld"
WITHHELD_CODE = "after_tool_call_failed"

Asides: TypeAlias = tuple[tuple[str, Directive], ...]
"""Directives beside the verdict, each with its plugin: what to create, enqueue and emit."""


class CallVerdict(Struct, frozen=True):
    """What becomes of a call: it runs with `args`, a person is asked (`ask`), or it ends with `outcome`."""

    args: dict[str, Any]
    outcome: ToolOutcome | None = None
    ask: str | None = None
    decisions: tuple[Decision, ...] = ()
    asides: Asides = ()


class Left(Struct, frozen=True):
    """What plugins have left of how a call ended."""

    outcome: ToolOutcome
    decisions: tuple[Decision, ...] = ()
    asides: Asides = ()


class ConflictingPlugins(Exception):
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
    """The verdict before a call so far: the strongest directive with its plugin, and those it displaced."""

    seam: Seam = "before_tool_call"

    def __init__(self) -> None:
        self.winner: tuple[str, Directive] | None = None
        self.displaced: list[tuple[str, Directive]] = []
        self.decisions: list[Decision] = []
        self.asides: list[tuple[str, Directive]] = []

    def weigh(self, plugin: Plugin, directives: Sequence[Directive]) -> None:
        """Take what a plugin says, without replaced arguments."""
        for directive in directives:
            if strength(directive):
                self.take(plugin, directive)
            elif not isinstance(directive, ReplaceArgs):
                self.asides.append((plugin.id, directive))

    def take(self, plugin: Plugin, directive: Directive) -> None:
        """Weigh a terminal directive."""
        given = (plugin.id, directive)
        if self.winner is None:
            self.winner = given
        elif (-strength(directive), plugin.id) < (-strength(self.winner[1]), self.winner[0]):
            self.displaced.append(self.winner)
            self.winner = given
        else:
            self.displaced.append(given)

    def outcome(self) -> ToolOutcome | None:
        """How the call ends if a plugin decided that; a denial under an abort keeps its words."""
        if self.winner is None:
            return None
        match self.winner[1]:
            case AbortTurn(code=code, message=message):
                return _aborted(code, message, [_denial(*each) for each in self.displaced if strength(each[1]) == 3])
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


class Pipe:
    """How a call ended, as one plugin after another leaves it.

    `denials` are what plugins denied so far: an abort keeps their words. The last of `decisions` made the outcome what
    it is, if there is any.
    """

    seam: Seam = "after_tool_call"

    def __init__(self, ended: ToolOutcome) -> None:
        self.outcome = ended
        self._whole = ended.whole if isinstance(ended, Ok) else None
        self._abort: AbortTurn | None = None
        self._denials: list[dict[str, Any]] = []
        self.decisions: list[Decision] = []
        self.asides: list[tuple[str, Directive]] = []

    def take(self, plugin: Plugin, answer: object) -> None:
        """What one plugin says. Raises PluginFault where that makes no sense."""
        for directive in read(plugin, self.seam, answer):
            match directive:
                case AbortTurn():
                    self._stop(plugin, directive)
                case ShortCircuit(outcome=outcome):
                    self._replace(plugin, directive, outcome)
                case _:
                    self.asides.append((plugin.id, directive))

    def _stop(self, plugin: Plugin, abort: AbortTurn) -> None:
        if self._abort is not None:
            self._refuse(plugin)
            return
        # A filter has not seen what was denied before it as it was said, but as it is now.
        denials = self._denials if not plugin.is_filter else [_words(plugin.id, self.outcome)] if self._denials else []
        self._abort, self.outcome = abort, _aborted(abort.code, abort.message, denials)
        self._decide(plugin, abort)

    def _replace(self, plugin: Plugin, directive: ShortCircuit, outcome: ToolOutcome) -> None:
        if isinstance(outcome, Ok):
            if outcome.whole is not None and outcome.whole != self._whole:
                raise PluginFault(plugin.id, self.seam, "its outcome refers to bytes that this call did not keep")
            if not isinstance(self.outcome, Ok):
                if plugin.is_filter:  # what it meant to hide would be recorded
                    raise PluginFault(plugin.id, self.seam, "it makes a success of an outcome that is none")
                self._refuse(plugin)
                return
        elif not plugin.is_filter:
            self._denials.append(_denial(plugin.id, directive))
            if self._abort is not None:
                self.outcome = _aborted(self._abort.code, self._abort.message, self._denials)
                self._refuse(plugin)
                return
        self.outcome = outcome
        self._decide(plugin, directive)

    def _decide(self, plugin: Plugin, directive: Directive) -> None:
        self.decisions.append(Decision(plugin.id, self.seam, kind_of(directive), _detail(directive)))

    def _refuse(self, plugin: Plugin) -> None:
        """A decision without effect; the one that stands in its way tells of it."""
        if not self.decisions:
            log.info("plugin %s makes a success of a call that did not end as one: it stays as it is", plugin.id)
        elif plugin.id not in (self.decisions[-1].plugin, *self.decisions[-1].over):
            last = self.decisions[-1]
            self.decisions[-1] = replace(last, over=(*last.over, plugin.id))


def _aborted(code: str, message: str, denials: Sequence[dict[str, Any]]) -> Failed:
    kept: list[dict[str, Any]] = []
    for denial in denials:
        if denial not in kept:  # said once, and again on a second look
            kept.append(denial)
    return Failed(code, message, {"displaced": kept} if kept else None)


def _denial(plugin: str, directive: Directive) -> dict[str, Any]:
    assert isinstance(directive, ShortCircuit)
    return _words(plugin, directive.outcome)


def _words(plugin: str, outcome: ToolOutcome) -> dict[str, Any]:
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


def read_before(plugin: Plugin, answer: object) -> list[Directive]:
    """What one plugin answers before a call."""
    directives = read(plugin, Fold.seam, answer)
    for each in directives:
        if isinstance(each, ShortCircuit) and isinstance(each.outcome, Ok) and each.outcome.whole is not None:
            raise PluginFault(plugin.id, Fold.seam, "its outcome refers to bytes that this call did not keep")
    return directives


# ---------------------------------------------------------------------- reading answers

# What a hook answered becomes directives that are legal at its seam and can be stored, or a fault of its plugin.

MOST = 1000
"""Directives in one answer. An iterator without an end would hold up every session."""

_KINDS = get_args(Directive)
_ROLES = get_args(Role)


def read(plugin: Plugin, seam: Seam, answer: object) -> list[Directive]:
    """The directives in a hook's answer, normalised."""
    if answer is None:
        return []
    try:
        return [_legal(seam, each) for each in _listed(answer)]
    except InvalidInput as error:
        raise PluginFault(plugin.id, seam, str(error)) from None
    except BaseException as error:  # its iterators and values ran here, and are no more to be trusted than the hook
        raise PluginFault(plugin.id, seam, f"{type(error).__name__}: {error_text(error)}") from error


def _listed(answer: object) -> list[object]:
    if isinstance(answer, _KINDS):
        return [answer]
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes | dict):
        raise InvalidInput(f"it returned a {type(answer).__name__} in place of directives")
    given = list(islice(answer, MOST + 1))
    if len(given) > MOST:
        raise InvalidInput(f"it gave more than {MOST} directives at once")
    return given


def _legal(seam: Seam, given: object) -> Directive:
    if not isinstance(given, _KINDS):
        raise InvalidInput(f"a {type(given).__name__} is no directive")
    if type(given) not in LEGAL[seam]:
        legal = ", ".join(sorted(str(kind.__name__) for kind in LEGAL[seam]))
        raise InvalidInput(f"{type(given).__name__} means nothing here; use one of {legal}")
    try:
        return _sound(given)
    except (InvalidInput, ValidationError) as error:
        raise InvalidInput(f"its {kind_of(given)} cannot be stored: {error}") from None


def _sound(directive: Directive) -> Directive:
    """The directive with everything in it as a store would give it back."""
    match directive:
        case AbortTurn(code=code, message=message):
            return AbortTurn(clean_text(code), clean_text(message))
        case EnqueueMessages(messages=messages):
            return EnqueueMessages(tuple([_said(message) for message in _several(messages)]))
        case ReplaceArgs(args=args):
            return ReplaceArgs(convert(clean(args), dict[str, Any]))
        case ShortCircuit(outcome=outcome):
            return ShortCircuit(_outcome(outcome))
        case AskPerson(reason=reason):
            return AskPerson(clean_text(reason))
        case EmitEvents(events=events):
            return EmitEvents(tuple([clean(event) for event in _several(events)]))
        case EmitTrace(name=name, payload=payload, context=context):
            return EmitTrace(clean_text(name), clean(payload), convert(clean(context), dict[str, Any]))
        case CreateSession():
            return sound_child(directive)


def _several(values: object) -> Iterable[Any]:
    """What stands where a tuple is declared. A string or a mapping would be taken apart without a word."""
    if not isinstance(values, list | tuple):
        raise InvalidInput(f"a {type(values).__name__} is no tuple of values")
    return values


def _said(message: object) -> Message:
    if not isinstance(message, Message) or message.role not in ("user", "system"):
        raise InvalidInput("plugins say user and system messages")
    if not all(isinstance(part, Text) for part in message.parts):
        raise InvalidInput("plugins say text: calls and results are the runtime's to say")
    said = Message(message.role, tuple([clean_part(part) for part in message.parts]))
    if not said.text.strip():  # some providers refuse a history with an empty message in it, for ever
        raise InvalidInput("the message is empty: say something")
    return said


def _outcome(outcome: object) -> ToolOutcome:
    match outcome:
        case Ok(value=value, whole=whole, files=files):
            plain: Any = {"type": "ok", "value": clean(value), "whole": clean(whole), "files": clean(files)}
        case Failed(code=code, message=message, data=data):
            plain = {"type": "failed", "code": clean(code), "message": clean(message), "data": clean(data)}
        case _ if isinstance(outcome, get_args(ToolOutcome)):
            plain = clean(outcome)
        case _:
            raise InvalidInput(f"a {type(outcome).__name__} is no outcome of a call")
    sound: ToolOutcome = convert(plain, ToolOutcome)
    return sound


def sound_child(asked: CreateSession) -> CreateSession:
    """A request for a child session as a store would give it back. Raises InvalidInput."""
    if not isinstance(asked, CreateSession):
        raise InvalidInput(f"a child session is begun with a CreateSession, not with a {type(asked).__name__}")
    fields = {name: getattr(asked, name) for name in ("agent", "options", "hidden", "label", "only", "start", "output")}
    try:
        sound = convert({"kind": "create_session", **clean(fields)}, CreateSession)
    except ValidationError as error:
        raise InvalidInput(str(error)) from None
    return replace(
        sound,
        session_id=None if asked.session_id is None else check_session_id(asked.session_id),
        said=None if asked.said is None else clean_message(asked.said),
        prelude=_prelude(asked.prelude),
    )


def _prelude(messages: object) -> tuple[Message, ...]:
    sound = sound_history([_message(message) for message in _several(messages)])
    if any(not message.tool_calls and not message.tool_results and not message.text.strip() for message in sound):
        raise InvalidInput("a message of the prelude is empty: leave it out")
    return sound


def _message(given: object) -> Message:
    if not isinstance(given, Message):
        raise InvalidInput(f"a {type(given).__name__} is no message")
    return given


def sound_history(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Messages that a history may be made of: each call with its result. Others would be shown for ever, and
    providers refuse them."""
    sound = tuple([Message(m.role, tuple([clean_part(part) for part in m.parts])) for m in messages])
    asked: set[str] = set()
    for message in sound:
        asked |= {call.id for call in message.tool_calls}
        calls, results = bool(message.tool_calls), bool(message.tool_results)
        if message.role not in _ROLES or (calls and message.role != "assistant") or results != (message.role == "tool"):
            raise InvalidInput(f"one of its messages cannot be said by {message.role!r}")
        if any(result.call_id not in asked for result in message.tool_results):
            raise InvalidInput("it has a result without its call")
    if unanswered(sound):
        raise InvalidInput("it has a call without its result")
    return sound
