"""Reading what a hook answered: directives that are legal at its seam and can be stored, or a fault of its plugin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, get_args

from msgspec import ValidationError
from msgspec.structs import replace

from mainstay.errors import InvalidInput, PluginFault
from mainstay.model.codec import clean, clean_message, clean_part, clean_text, convert, error_text
from mainstay.model.ids import check_session_id
from mainstay.model.message import Message, Role, Text, unanswered
from mainstay.model.plugin import (
    LEGAL,
    AbortTurn,
    AskPerson,
    CreateSession,
    Directive,
    EmitEvents,
    EmitTrace,
    EnqueueMessages,
    ReplaceArgs,
    Seam,
    ShortCircuit,
    kind_of,
)
from mainstay.model.tool import Failed, Ok, ToolOutcome
from mainstay.plugins.hooks import Plugin

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
