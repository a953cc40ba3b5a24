"""Direct completions: one question to the session's model beside the conversation, counted whatever becomes of it.

    in a turn      Asking is on disk ── the model is asked ── Completed is on disk (inside a tool: with the next record)
    outside of one one unknown call is in the session's ledger ── the model is asked ── the ledger says what it cost

What a crash cuts off is thus counted as unknown, also when nobody asks again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from msgspec.structs import replace

from mainstay.engine.driver import Run
from mainstay.engine.executor import sound_parts
from mainstay.engine.gate import Guarded
from mainstay.engine.retry import MODEL_RETRIES
from mainstay.errors import InvalidInput, MainstayError, ProviderError, StaleSettings, quoted
from mainstay.model import given
from mainstay.model.codec import clean_part, clean_text, encode, error_text
from mainstay.model.llm import Completion, ModelRequest, ModelResponse, Usage
from mainstay.model.message import Message, Role, Text
from mainstay.model.record import Asking, Completed
from mainstay.model.settings import dump, load
from mainstay.ports.provider import Provider, candidates
from mainstay.sessions.services.scope import ServiceScope
from mainstay.tools.answer import output_codec

LOST = Usage(unknown=1)
FOUND = Usage(unknown=-1)
"""An ask whose cost nobody has seen, and that it was seen after all."""


class Completions:
    """Asks the model of the session at hand."""

    __slots__ = ("_at",)

    def __init__(self, at: ServiceScope) -> None:
        self._at = at

    async def complete(
        self, asked: str | Sequence[Message], label: str, output: Any = None, system: str = ""
    ) -> Completion:
        codec = None if output is None or output == "json" else output_codec(output)
        schema = {"type": "object"} if output == "json" else None if codec is None else codec.schema
        said = [Message("user", asked)] if isinstance(asked, str) else given.several(asked, "asked")
        if not said:
            raise InvalidInput("ask a model something: text, or at least one message")
        messages = [*([Message("system", clean_text(system))] if system else []), *map(_sound, said)]
        digest = hashlib.blake2b(encode((messages, schema)), digest_size=12).hexdigest()
        request = ModelRequest(messages, (), schema, session_id=self._at.id)
        run = self._at.run
        if run is None:
            record = await self._ask_outside(replace(request, call_id=f"{self._at.id}:{digest}"), clean_text(label))
        else:
            record = await self._ask_in_turn(run, request, self._at.key(digest), clean_text(label))
        value = None
        if output is not None:
            try:
                value = msgspec.json.decode(record.text) if codec is None else codec.validate(record.text)
            except ValueError as error:
                raise ProviderError(
                    f"the completion for {label!r} does not have the required form: {error}", code="invalid_output"
                ) from None
        return Completion(record.text, value, record.usage, record.model)

    # ------------------------------------------------------------------ in a turn

    async def _ask_in_turn(self, run: Run, request: ModelRequest, key: str, label: str) -> Completed:
        inside = bool(
            self._at.call
        )  # what happens inside an attempt is part of it: the record of the call speaks for it
        known = None if inside else _answer_to(run, key)
        if known is not None:
            return known
        lost = await self._mark(run, key, label)
        try:
            record = await self._answer(replace(request, call_id=f"{self._at.id}:{key}"), key, label)
        except BaseException as error:  # whatever ended it, whoever adds up must not take it for one under way
            cost = Usage() if _refused(error) else None
            code = clean_text(str(error.code)) if isinstance(error, MainstayError) else type(error).__name__
            run.note(Completed(key, label, "", cost, "", self._now(), interrupted=lost, error=code))
            raise
        record = replace(record, interrupted=lost)
        run.note(replace(record, text="") if inside else record)
        if not inside:
            await run.journal.flush()
        return record

    async def _mark(self, run: Run, key: str, label: str) -> int:
        """See to it that the question is on disk before it is asked. How often a crash cut the same one off before.

        That it is asked again is not written: a turn that dies of it again and again is found out by having no new
        record.
        """
        if _cut_off(run, key):
            return max((await self._at.row()).takeovers, 1)
        run.check_room()
        run.note(Asking(key, label, self._now()))
        await run.journal.flush()
        return 0

    # ------------------------------------------------------------------ outside of turns

    async def _ask_outside(self, request: ModelRequest, label: str) -> Completed:
        await self._count((label, "", LOST))
        try:
            record = await self._answer(request, request.call_id, label)
        except BaseException as error:  # one that was cancelled stays unknown; there may be no time to write anyway
            if _refused(error):
                await self._count((label, "", FOUND))
            raise
        spent = replace(record.usage or LOST, calls=1)
        await self._count((label, "", FOUND), (label, record.model, spent))
        return record

    async def _count(self, *costs: tuple[str, str, Usage]) -> None:
        """Add to the ledger of the session itself: each a label, a model and what it cost."""
        while True:  # somebody else's edit is all that can be in the way, and no cost may be lost
            row = await self._at.row_or_new()
            settings = load(row.settings)
            labels, models = dict(settings.ledger), dict(settings.models)
            for label, model, usage in costs:
                labels[label] = labels.get(label, Usage()) + usage
                models[model] = models.get(model, Usage()) + usage
            # A name of its own: whoever counts the same at the same time must not take our count for its.
            wanted = replace(settings, ledger=_spent(labels), models=_spent(models), saved=self._at.parts.mint("o"))
            try:
                await self._at.configure(row.id, row.agent, dump(wanted), row.settings)
            except StaleSettings:
                continue
            return

    # ------------------------------------------------------------------ the model

    async def _answer(self, request: ModelRequest, key: str, label: str) -> Completed:
        response = await self._response(request)
        try:
            text = "".join([part.text for part in sound_parts(response) if isinstance(part, Text)])
        except (Exception, SystemExit) as error:  # what the provider gave may raise anything when it is looked at
            raise ProviderError(error_text(error), code="provider_nonsense") from error
        return Completed(key, label, text, response.usage, clean_text(response.model), self._now())

    async def _response(self, request: ModelRequest) -> ModelResponse:
        """Ask until there is an answer, as often as a turn would."""
        at, definition = self._at, self._at.definition(self._at.agent)
        limits, model = at.parts.limits, candidates(definition.provider)[0]
        while True:
            try:
                return await Guarded(limits.call(model, request, _whole), None)
            except ProviderError as error:
                if not error.retryable or request.attempt >= MODEL_RETRIES.attempts:
                    raise
                pause = MODEL_RETRIES.delay(request.attempt, error.after, at.parts.random)
            await at.parts.clock.sleep(pause)
            request = replace(request, attempt=request.attempt + 1)

    def _now(self) -> int:
        return self._at.parts.clock.now()


def _answer_to(run: Run, key: str) -> Completed | None:
    """The recorded answer to this question at this place of the turn."""
    return next((r for r in run.records if type(r) is Completed and r.key == key and not r.error), None)


def _cut_off(run: Run, key: str) -> bool:
    """Whether a crash found this question unanswered, and nobody has asked it since."""
    begun = any(type(record) is Asking and record.key == key for record in run.records[: run.found])
    return begun and not any(type(record) is Completed and record.key == key for record in run.records)


def _refused(error: BaseException) -> bool:
    """Whether the model said no, or broke; one that was cancelled may have cost something."""
    return isinstance(error, Exception | SystemExit)


def _spent(found: dict[str, Usage]) -> dict[str, Usage]:
    return {name: usage for name, usage in found.items() if usage != Usage()}


async def _whole(model: Provider, request: ModelRequest) -> ModelResponse:
    response: ModelResponse | None = None
    async for delta in model.stream(request):
        if isinstance(delta, ModelResponse):
            response = delta
    if response is None:
        raise ProviderError("the stream broke off before the answer was complete", retryable=True, code="broken_stream")
    return response


def _sound(message: object) -> Message:
    """A message that a model may be shown, normalised."""
    if not isinstance(message, Message) or message.role not in get_args(Role):
        raise InvalidInput(f"a model is asked with text or Messages, not with {quoted(message)}")
    return Message(message.role, [clean_part(part) for part in message.parts])
