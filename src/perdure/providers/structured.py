"""Typed answers: by the API's own schema, by a tool, or by the prompt.

A request that wants an answer of a schema is brought into one of three forms before its dialect sees it:

    schema   the API's own parameter holds the model to it; a value that is no object is put into one where it must be
    tool     one more tool, whose arguments are the answer
    prompt   the schema stands in the instructions

`ModelSettings(output_mode=…)` chooses; else the dialect does, by what is known of the model. Whatever the form, the
answer comes back as text with the JSON in it: a call of the answer tool is read as text, so records, plugins and the
turn know nothing of it, and an answer that does not fit is mended as any other. Text beside such a call is kept as
reasoning. A real call beside it goes first: the turn runs it and asks again, and what was answered before stands in the
history as words.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from msgspec.structs import replace

from perdure.model.llm import CallPiece, Delta, ModelRequest, ModelResponse, OutputMode, Stop
from perdure.model.message import Message, Part, Reasoning, Text, ToolCall
from perdure.model.tool import ToolSpec
from perdure.providers.dialect import AnswerReader, Dialect, encode
from perdure.providers.schemas import ROOT, Remembered, is_object, wrapped

ANSWER = "final_answer"
"""The name of the answer tool, unless a tool of the agent's has it."""

DESCRIPTION = "Gives your final answer: call it once, when you have all that you need. Its arguments are the answer."

JSON: dict[str, Any] = {}
"""The schema of a request whose schema is in its prompt. A dialect may ask for JSON of any form by it."""


class Shaped(NamedTuple):
    """A request in the form that its dialect builds, and what reads its answer."""

    request: ModelRequest
    reading: Callable[[AnswerReader], AnswerReader]


def shape_request(dialect: Dialect, request: ModelRequest, model: str) -> Shaped:
    if request.output_schema is None:
        return Shaped(request, _as_it_is)
    way = dialect.structured(request, model)
    mode: OutputMode = request.settings.output_mode or way.mode
    match mode:
        case "schema":
            return _by_schema(request, request.output_schema, way.object_root)
        case "tool":
            return _by_tool(request, request.output_schema, way.forced)
        case "prompt":
            return _by_prompt(request, request.output_schema)


def _as_it_is(reader: AnswerReader) -> AnswerReader:
    return reader


def _by_schema(request: ModelRequest, schema: dict[str, Any], object_root: bool) -> Shaped:
    if not object_root or is_object(schema):
        return Shaped(request, _as_it_is)
    return Shaped(replace(request, output_schema=_wrapped(schema)), WrappedText)


def _by_tool(request: ModelRequest, schema: dict[str, Any], forced: bool) -> Shaped:
    taken, name = {tool.name for tool in request.tools}, ANSWER
    while name in taken:
        name += "_"
    settings, plain = request.settings, is_object(schema)
    if request.tool_choice == "none" or settings.tool_choice == "none":
        settings = replace(settings, tool_choice=name if forced else "auto")
    elif settings.tool_choice in (None, "auto") and forced:
        settings = replace(settings, tool_choice="required")
    shaped = replace(
        request,
        output_schema=None,
        tools=(*request.tools, ToolSpec(name, DESCRIPTION, schema if plain else _wrapped(schema))),
        tool_choice="auto",
        settings=settings,
    )
    return Shaped(shaped, functools.partial(AnswerCall, name=name, plain=plain))


def _by_prompt(request: ModelRequest, schema: dict[str, Any]) -> Shaped:
    what = "object" if is_object(schema) else "value"
    wish = f"Give your final answer as one JSON {what} that fits this JSON schema, and write nothing else with it:"
    wish = f"{wish}\n{encode(schema).decode()}"
    first = request.messages[0] if request.messages else None
    if first is not None and first.role == "system":
        messages = [_instructed(first.text, wish), *request.messages[1:]]
    else:
        messages = [_instructed("", wish), *request.messages]
    return Shaped(replace(request, messages=messages, output_schema=JSON if is_object(schema) else None), _as_it_is)


@functools.lru_cache(maxsize=256)
def _instructed(instructions: str, wish: str) -> Message:
    """The same message for the same words: dialects know what they have encoded by identity."""
    return Message("system", (Text("\n\n".join(filter(None, [instructions, wish]))),))


_wrapped = Remembered(wrapped)
"""The same object for the same schema: translations are known by identity."""


# ---------------------------------------------------------------------- reading

_OPENING = re.compile(rf'\s*\{{\s*"{ROOT}"\s*:\s*')
_CLOSING = re.compile(r"\}\s*\Z")
_BARE = f'{{"{ROOT}":'


class Unwrapping:
    """Takes the object off a streamed value: `{"answer": [1, 2]}` is read as `[1, 2]`, in pieces of any size.

    The last brace is held back, because it may be the object's own. What does not begin as the object does passes as
    it is.
    """

    def __init__(self) -> None:
        self._held = ""
        self._state = "before"
        self._text: list[str] = []

    def feed(self, piece: str) -> str:
        piece, self._held = self._held + piece, ""
        if self._state == "before":
            opening = _OPENING.match(piece)
            if opening is not None:
                # Space after the colon may go on in the next piece, and is part of no value.
                self._state, piece = "inside", piece[opening.end() :]
            elif _BARE.startswith("".join(piece.split())):
                self._held = piece
                return ""
            else:
                self._state = "bare"
        if self._state == "inside":
            closing = _CLOSING.search(piece)
            if closing is not None:
                piece, self._held = piece[: closing.start()], piece[closing.start() :]
        self._text.append(piece)
        return piece

    @property
    def whole(self) -> str | None:
        """The value's JSON, once all of it was fed; None where there was no object around it."""
        if self._state != "inside" or self._held.strip() != "}":
            return None
        return "".join(self._text).strip()


class WrappedText:
    """Reads an answer whose text is a value put into an object."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader, self._unwrapping = reader, Unwrapping()

    def feed(self, chunk: bytes) -> Iterable[Delta]:
        out: list[Delta] = []
        for delta in self._reader.feed(chunk):
            if type(delta) is not str:
                out.append(delta)
            elif shown := self._unwrapping.feed(delta):
                out.append(shown)
        return out

    def close(self) -> ModelResponse:
        response = self._reader.close()
        value = self._unwrapping.whole
        if value is None:
            return response
        parts: list[Part] = []
        for part in response.all_parts():
            if type(part) is not Text:
                parts.append(part)
            elif value:
                parts.append(Text(value))
                value = ""
        return _with_parts(response, parts)


def _with_parts(response: ModelResponse, parts: Iterable[Part], stop: Stop | None = None) -> ModelResponse:
    return ModelResponse(usage=response.usage, stop=stop or response.stop, model=response.model, parts=tuple(parts))


class AnswerCall:
    """Reads an answer that is given by a call of the answer tool.

    Words are held back until it is clear that they are no preface to such a call: they are shown when they begin as
    JSON does, or when a real call follows them and no answer yet.
    """

    def __init__(self, reader: AnswerReader, name: str, plain: bool) -> None:
        self._reader, self._name = reader, name
        self._unwrapping = None if plain else Unwrapping()
        self._text: list[str] = []
        self._words: list[str] = []
        self._spoken: bool | None = None  # whether words are shown as they come; None before the first
        self._answers: list[int] = []  # numbers of the calls that answer, in order
        self._first = -1  # the one of them that came first: it counts

    def feed(self, chunk: bytes) -> Iterable[Delta]:
        out: list[Delta] = []
        for delta in self._reader.feed(chunk):
            if type(delta) is str:
                self._said(delta, out)
            elif not isinstance(delta, CallPiece):
                out.append(delta)
            elif delta.name == self._name:
                self._answered(delta, out)
            else:
                self._spoken = self._spoken or not self._answers
                self._said("", out)
                out.append(replace(delta, index=delta.index - bisect_left(self._answers, delta.index)))
        return out

    def _said(self, text: str, out: list[Delta]) -> None:
        self._words.append(text)
        if self._spoken is None and text.strip():
            self._spoken = text.lstrip().startswith(("{", "[", "`"))
        if self._spoken and (shown := "".join(self._words)):
            self._words = []
            out.append(shown)

    def _answered(self, piece: CallPiece, out: list[Delta]) -> None:
        if not self._answers:
            self._first = piece.index
        place = bisect_left(self._answers, piece.index)
        if self._answers[place : place + 1] != [piece.index]:
            self._answers.insert(place, piece.index)
        if piece.index != self._first or not piece.text:
            return
        shown = piece.text if self._unwrapping is None else self._unwrapping.feed(piece.text)
        if shown:
            self._text.append(shown)
            out.append(shown)

    def close(self) -> ModelResponse:
        response = self._reader.close()
        given = response.all_parts()
        if not any(type(part) is ToolCall and part.name == self._name for part in given):
            return response
        parts: list[Part] = []
        answered = False
        for part in given:
            if type(part) is ToolCall and part.name == self._name:
                if not answered:
                    parts.append(Text(self._answer(part)))
                answered = True
            elif type(part) is Text and not self._spoken:
                parts.append(Reasoning(part.text))
            else:
                parts.append(part)
        called = any(type(part) is ToolCall for part in parts)
        return _with_parts(response, parts, "end" if response.stop == "tool_calls" and not called else None)

    def _answer(self, call: ToolCall) -> str:
        text = "".join(self._text)
        if self._unwrapping is None:
            return text or (encode(call.args).decode() if call.raw is None else call.raw)
        found = self._unwrapping.whole
        return (encode(call.args).decode() if call.raw is None else call.raw) if found is None else found
