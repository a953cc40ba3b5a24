"""Cassettes: what a real model answered, recorded once and replayed without a network.

    model = Cassette("tests/cassettes/weather.json", "anthropic:claude-sonnet-4-5")
    agent = Agent(model, tools=[weather])

The first run asks the model and records; later ones answer from the file, by what is asked: the conversation, the
tools, the settings. The file is JSON for people, and holds no header and no key: those are below what is recorded
here. A question that it has no answer to is refused with what differs from the nearest one it has.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from perdure.errors import InvalidDefinition, ProviderError
from perdure.model.llm import Delta, ModelRequest, ModelResponse
from perdure.model.message import Message
from perdure.model.tool import ProviderTool, ToolSpec
from perdure.ports.provider import Connecting, Provider
from perdure.providers.registry import provider

Mode = Literal["auto", "replay", "record"]

NO_ANSWER = frozenset(
    {"missing_key", "authentication", "no_network", "unreachable", "tls", "invalid_base_url", "provider_nonsense"}
)
"""Failures that tell of the machine and not of the model: replayed, they would outlive their cause."""


OWN_ID = re.compile(r".+\.\d+\.\d+\.\d+'*", re.DOTALL)
"""Ids of tool calls as a Runtime makes them: session, turn, step, index, and a mark if it was taken already."""
ID_FIELDS = {"tool_call": "id", "tool_result": "call_id"}
"""The field with the id of a call, by the type of the part."""


class Recorded(Struct, frozen=True, omit_defaults=True):
    """One question and its answer; `error` is the code of a failure in place of one."""

    asked: dict[str, Any]
    response: ModelResponse | None = None
    text: tuple[str, ...] = ()
    error: str = ""
    message: str = ""
    retryable: bool = False


class _Tape(Struct):
    model: str
    recorded: list[Recorded]


class Cassette:
    """A provider that records another one, or stands in for it.

    `auto` replays what is there and records what is not, except in CI (`CI` is set), where nothing is asked; `replay`
    never asks, `record` begins anew.
    """

    def __init__(self, path: str | os.PathLike[str], model: str | Provider | None = None, mode: Mode = "auto") -> None:
        if mode not in get_args(Mode):
            raise InvalidDefinition(f"a cassette's mode is auto, replay or record, not {mode!r}")
        self._path = Path(path)
        self._behind: Provider | None = None
        if mode == "record" or (mode == "auto" and not os.environ.get("CI")):
            self._behind = provider(model) if isinstance(model, str) else model
        tape = self._load() if mode != "record" else None
        name = model if isinstance(model, str) else model.name if model is not None else ""
        self._tape = tape or _Tape(name, [])
        self._questions = [with_numbered_ids(each.asked) for each in self._tape.recorded]
        self.name = self._tape.model or "cassette"
        self._used: dict[int, int] = {}  # how often each was replayed: equal questions are answered in their order

    def _load(self) -> _Tape | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Tape)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
            raise InvalidDefinition(f"{self._path} is no cassette: {error}") from None

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncGenerator[None, None]:
        behind: object = self._behind
        async with behind.connected() if isinstance(behind, Connecting) else contextlib.nullcontext():
            yield

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        asked = _asked(request)
        found = self._find(asked)
        if found is None:
            if self._behind is None:
                raise ProviderError(self._miss(asked), code="cassette_miss")
            async for delta in self._record(self._behind, request, asked):
                yield delta
            return
        if found.error:
            raise ProviderError(found.message, retryable=found.retryable, code=found.error)
        for piece in found.text:
            yield piece
        assert found.response is not None
        yield found.response

    def _find(self, asked: dict[str, Any]) -> Recorded | None:
        equal = [index for index, question in enumerate(self._questions) if question == asked]
        if not equal:
            return None
        index = min(equal, key=lambda each: (self._used.get(each, 0), each))
        self._used[index] = self._used.get(index, 0) + 1
        return self._tape.recorded[index]

    async def _record(self, behind: Provider, request: ModelRequest, asked: dict[str, Any]) -> AsyncIterator[Delta]:
        text: list[str] = []
        try:
            async for delta in behind.stream(request):
                if isinstance(delta, str):
                    text.append(delta)
                elif isinstance(delta, ModelResponse):
                    self._keep(Recorded(asked, delta, tuple(text)))
                yield delta
        except ProviderError as error:
            if error.code not in NO_ANSWER:
                self._keep(Recorded(asked, error=error.code, message=str(error), retryable=error.retryable))
            raise

    def _keep(self, recorded: Recorded) -> None:
        self._tape.recorded.append(recorded)
        self._questions.append(recorded.asked)
        self._used[len(self._tape.recorded) - 1] = 1
        self._path.parent.mkdir(parents=True, exist_ok=True)
        data = msgspec.json.format(msgspec.json.encode(self._tape), indent=2)
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        temporary.write_bytes(data + b"\n")
        temporary.replace(self._path)

    def _miss(self, asked: dict[str, Any]) -> str:
        """What is new in this question, beside the recorded one that is most like it."""
        if not self._tape.recorded:
            return f"the cassette {self._path} is empty: run once with a model and a key, and without CI set"
        mine = _lines(asked)
        nearest = max((_lines(each) for each in self._questions), key=lambda each: _likeness(each, mine))
        diff = difflib.unified_diff(nearest, mine, "recorded", "asked", lineterm="", n=1)
        shown = "\n".join(list(diff)[:40])
        return f"the cassette {self._path} has no answer to this; the nearest question differs:\n{shown}"


def _likeness(one: list[str], other: list[str]) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


class _Asked(Struct, omit_defaults=True):
    """What an answer depends on. Ids of turns and sessions are not in it: they differ from run to run."""

    messages: list[Message]
    tools: list[ToolSpec] = []
    output_schema: dict[str, Any] | None = None
    tool_choice: str = "auto"
    settings: Any = None
    label: str = "turn"
    provider_tools: list[ProviderTool] = []


def _asked(request: ModelRequest) -> dict[str, Any]:
    asked = _Asked(
        list(request.messages),
        list(request.tools),
        request.output_schema,
        request.tool_choice,
        msgspec.to_builtins(request.settings) or None,
        request.label,
        list(request.provider_tools),
    )
    written: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(asked))  # as it will be read again
    return with_numbered_ids(written)


def with_numbered_ids(asked: dict[str, Any]) -> dict[str, Any]:
    """Replace the ids that a Runtime gave to tool calls by their position in the conversation.

    A Runtime gives a call an id of its own if the model gives none. It begins with the session, which is another one in
    the next run, so a question with such a call would never equal its recording.
    """
    numbers = dict[str, str]()

    def numbered(part: Any) -> Any:
        key = ID_FIELDS.get(str(part.get("type"))) if isinstance(part, dict) else None
        if key is None or not OWN_ID.fullmatch(str(part.get(key, ""))):
            return part
        return {**part, key: numbers.setdefault(part[key], f"#{len(numbers) + 1}")}

    def renumbered(message: Any) -> Any:
        if not isinstance(message, dict) or not isinstance(message.get("parts"), list):
            return message
        return {**message, "parts": [numbered(part) for part in message["parts"]]}

    messages = asked.get("messages")
    return {**asked, "messages": [renumbered(each) for each in messages]} if isinstance(messages, list) else asked


def _lines(asked: dict[str, Any]) -> list[str]:
    return msgspec.json.format(msgspec.json.encode(asked), indent=1).decode().splitlines()
