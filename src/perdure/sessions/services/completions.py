"""Direct completions: one question to a model beside the conversation, counted whatever becomes of it.

    in a turn      Asking is on disk ── the model is asked ── Completed is on disk (inside a tool: with the next record)
    outside of one one unknown call is in the session's ledger ── the model is asked ── the ledger says what it cost

What a crash cuts off is thus counted as unknown, also when it is not asked again.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import msgspec
from msgspec.structs import replace

from perdure.engine.control import Guarded, TurnAborted
from perdure.engine.driver import Run
from perdure.engine.limits import LimitedCall
from perdure.engine.model_call import is_unseen, sound_parts, within
from perdure.engine.retry import USUAL, is_retried, next_due
from perdure.engine.waiters import current_metadata
from perdure.errors import InvalidInput, PerdureError, PluginError, ProviderError, StaleSettings, quoted
from perdure.model import validate
from perdure.model.codec import clean_part, clean_text, encode, encode_checked, error_text
from perdure.model.limit import Spending
from perdure.model.llm import (
    DEFAULT_SETTINGS,
    Completion,
    ModelChoice,
    ModelRequest,
    ModelResponse,
    RateReport,
    Usage,
)
from perdure.model.message import Message, Role, Scalar, Stored, Text, ToolCall
from perdure.model.record import Asking, Completed
from perdure.model.retries import Retries
from perdure.model.session import dump_settings, load_settings
from perdure.model.spending import hour_of, metadata_text
from perdure.model.tool import ToolSpec
from perdure.ports.provider import Counting, Provider, candidates, no_token_count
from perdure.sessions.parts import ServiceScope
from perdure.sessions.usage import usage_rows
from perdure.tools.answer import output_codec
from perdure.turn.tools import NATIVE

LOST = Usage(unknown=1)
FOUND = Usage(unknown=-1)
"""An ask whose cost was not seen, and that it was seen after all."""


Reserve: TypeAlias = Callable[[ModelRequest], Awaitable[ModelRequest]]
"""Reserves for one attempt, where limits hold: the request as it may be asked."""


@dataclass(slots=True)
class Attempts:
    """How a completion was asked so far. `asked`: a provider is asked just now. `unseen`: it has taken the newest
    attempt, of which no answer is known. So many before were `lost` like that."""

    asked: bool = False
    unseen: bool = False
    lost: int = 0

    def cost_nothing(self, error: BaseException) -> bool:
        """Whether the newest attempt, or the wait for it, has cost nothing: the model said no, or broke. One that was
        cancelled may have cost something."""
        refused = isinstance(error, Exception | SystemExit)
        return not self.unseen and (refused or not self.asked)


class DirectCompletions:
    """Asks the model of the session at hand."""

    __slots__ = ("_at",)

    def __init__(self, at: ServiceScope) -> None:
        self._at = at

    async def complete(
        self,
        asked: str | Sequence[Message],
        label: str,
        output: Any = None,
        system: str = "",
        tools: Sequence[Any] = (),
        choice: ModelChoice | None = None,
    ) -> Completion:
        codec = None if output is None or output == "json" else output_codec(output)
        schema = {"type": "object"} if output == "json" else None if codec is None else codec.schema
        messages = _messages(asked, system)
        specs, label = _specs(tools), clean_text(label)
        # The model is part of the question: asked again after a crash, it goes to the same one.
        asked_with = (specs, choice) if specs or choice is not None else ()
        encode_checked(asked_with, "what a model is asked with")
        digest = hashlib.blake2b(encode((messages, schema, *asked_with)), digest_size=12).hexdigest()
        settings = (choice.settings if choice is not None else None) or DEFAULT_SETTINGS
        request = ModelRequest(
            messages,
            specs,
            schema,
            session_id=self._at.id,
            settings=settings,
            label=label,
            open_file=self._open_file,
            metadata=await self._at.metadata(),
        )
        provider = await self._provider("" if choice is None else choice.model)
        run = self._at.run
        if run is None:
            record = await self._ask_outside(provider, replace(request, call_id=f"{self._at.id}:{digest}"))
        else:
            record = await self._ask_in_turn(run, provider, request, self._at.key(digest))
        parts = record.answer()
        text = "".join([part.text for part in parts if isinstance(part, Text)])
        value = None
        if output is not None and not any(isinstance(part, ToolCall) for part in parts):
            try:
                value = msgspec.json.decode(text) if codec is None else codec.validate(text)
            except ValueError as error:
                raise ProviderError(
                    f"the completion for {label!r} does not have the required form: {error}", code="invalid_output"
                ) from None
        return Completion(text, value, record.usage, record.model, record.stop, parts)

    async def count_tokens(
        self, asked: str | Sequence[Message], system: str, tools: Sequence[Any], choice: ModelChoice | None
    ) -> int:
        """What the model would be asked with, in tokens; neither recorded nor counted in a ledger: it is free."""
        request = ModelRequest(
            _messages(asked, system),
            _specs(tools),
            session_id=self._at.id,
            label="count",
            open_file=self._open_file,
            metadata=await self._at.metadata(),
        )
        return await tokens_of(await self._provider("" if choice is None else choice.model), request)

    def _open_file(self, stored: Stored) -> AsyncIterator[bytes]:
        return self._at.parts.store.blobs.pieces(stored.digest)

    async def _provider(self, name: str) -> Provider:
        """Who is asked: the named model, that of the turn at hand, or what the session would ask in its next one."""
        at, models = self._at, self._at.parts.models
        if name:
            return await models.provider(name)
        if at.run is not None:
            found: Provider = at.run.agent.provider
            return found
        row, definition = await at.row_or_new(), at.definition(at.agent)
        if definition.plugins.has("configure"):  # which may say otherwise
            try:
                return (await at.parts.turns.setup(row)).definition.provider
            except TurnAborted as refused:
                raise PluginError(refused.plugin, refused.message) from None
        return (await models.applied(definition, load_settings(row.settings).choice)).provider

    # ------------------------------------------------------------------ in a turn

    async def _ask_in_turn(self, run: Run, provider: Provider, request: ModelRequest, key: str) -> Completed:
        inside = bool(
            self._at.call
        )  # what happens inside an attempt is part of it: the record of the call speaks for it
        known = None if inside else _answer_to(run, key)
        if known is not None:
            return known
        lost, attempts = await self._mark(run, key, request.label), Attempts()
        call: LimitedCall | None = None

        async def reserve(asked: ModelRequest) -> ModelRequest:
            return asked if call is None else await self._reserve_in_turn(run, call, asked)

        try:
            models = candidates(provider)
            if (limits := self._at.parts.spend_limits) is not None:
                call = LimitedCall(limits, self._at.parts.mint("c"), models, request)
                models = call.models
            request = await reserve(replace(request, call_id=f"{self._at.id}:{key}"))
            await run.journal.flush()  # the question is on disk before it is asked
            record = await self._answer(models, request, key, attempts, reserve)
        except BaseException as error:  # whatever ended it, a sum of costs must not take it for one under way
            free = attempts.cost_nothing(error)
            if call is not None:
                run.journal.spending.append(call.failed(free))
            cost, lost = Usage() if free else None, lost + attempts.lost
            code = clean_text(str(error.code)) if isinstance(error, PerdureError) else type(error).__name__
            run.note(Completed(key, request.label, "", cost, "", self._now(), interrupted=lost, error=code))
            if call is not None and isinstance(error, Exception):
                await run.journal.flush()  # other calls may wait for what was reserved, and this turn for them
            raise
        if call is not None:
            run.journal.spending.append(call.settled(record.usage))
        record = replace(record, interrupted=lost + attempts.lost)
        run.note(replace(record, text="", parts=()) if inside else record)
        if not inside or call is not None:
            await run.journal.flush()
        return record

    async def _reserve_in_turn(self, run: Run, call: LimitedCall, request: ModelRequest) -> ModelRequest:
        """The request, with an answer as long as the limits leave room for. Raises LimitReached."""
        while True:
            wanted = call.ask(dict(current_metadata()))
            run.journal.spending.append(wanted)
            await run.journal.flush()
            if (bounded := call.bounded(request, run.journal.granted.pop(wanted.op))) is not None:
                return bounded
            await call.limits.room()

    async def _reserve_outside(
        self, began: int, call: LimitedCall, request: ModelRequest, is_asked: bool
    ) -> ModelRequest:
        """The same outside of turns. `is_asked`: what asks for room is on disk."""
        while True:
            if not is_asked:
                await self._count(began, spending=call.ask(await self._whom()))
            is_asked = False
            row = await self._at.row_or_new()
            found = await self._at.parts.store.reservations(row.sid)
            granted = next((each.granted for each in found if each.name == call.name), None)
            if granted is not None and (bounded := call.bounded(request, granted)) is not None:
                return bounded
            await call.limits.room()

    async def _mark(self, run: Run, key: str, label: str) -> int:
        """Note the question, which is to be on disk before it is asked. How often a crash cut the same one off before.

        That it is asked again is not written: a turn that dies of it again and again is found out by having no new
        record.
        """
        if _cut_off(run, key):
            return max((await self._at.row()).takeovers, 1)
        run.check_room()
        run.note(Asking(key, label, self._now()))
        return 0

    # ------------------------------------------------------------------ outside of turns

    async def _ask_outside(self, provider: Provider, request: ModelRequest) -> Completed:
        label, began, attempts = request.label, self._now(), Attempts()
        models, call, limits = candidates(provider), None, self._at.parts.spend_limits
        if limits is not None:
            call = LimitedCall(limits, self._at.parts.mint("c"), models, request)
            models = call.models

        async def reserve(asked: ModelRequest) -> ModelRequest:
            return asked if call is None else await self._reserve_outside(began, call, asked, attempts.lost == 0)

        await self._count(began, (label, "", LOST), spending=None if call is None else call.ask(await self._whom()))
        try:
            record = await self._answer(models, await reserve(request), request.call_id, attempts, reserve)
        except BaseException as error:  # one that was cancelled stays unknown; there may be no time to write anyway
            free = attempts.cost_nothing(error)
            costs = [(label, "", FOUND)] if free else []
            if attempts.lost:
                costs.append((label, "", Usage(unknown=attempts.lost)))
            if costs or call is not None:
                await self._count(began, *costs, spending=None if call is None else call.failed(free))
            raise
        spent, settled = replace(record.usage or LOST, calls=1), None if call is None else call.settled(record.usage)
        lost = Usage(unknown=attempts.lost - 1)
        await self._count(began, (label, "", lost), (label, record.model, spent), spending=settled)
        return record

    async def _whom(self) -> dict[str, Scalar]:
        return dict(await self._at.metadata())

    async def _count(self, began: int, *costs: tuple[str, str, Usage], spending: Spending | None = None) -> None:
        """Add to the ledger of the session itself, and to its sums: each a label, a model and what it cost.

        It counts in the hour in which it began, so that what was unknown at first is taken back where it was added.
        """
        whom = metadata_text(await self._whom())
        while True:  # only an edit of another task can be in the way, and no cost may be lost
            row = await self._at.row_or_new()
            adds = await usage_rows(self._at.parts.store, row, hour_of(began), whom, costs)
            settings = load_settings(row.settings)
            labels, models = dict(settings.ledger), dict(settings.models)
            for label, model, usage in costs:
                labels[label] = labels.get(label, Usage()) + usage
                models[model] = models.get(model, Usage()) + usage
            # A name of its own: a task that counts the same at the same time must not take our count for its own.
            wanted = replace(settings, ledger=_spent(labels), models=_spent(models), saved=self._at.parts.mint("o"))
            try:
                await self._at.configure(row.id, row.agent, dump_settings(wanted), row.settings, adds, spending)
            except StaleSettings:
                continue
            if (limits := self._at.parts.spend_limits) is not None:
                limits.settled()
            return

    # ------------------------------------------------------------------ the model

    async def _answer(
        self, models: Sequence[Provider], request: ModelRequest, key: str, attempts: Attempts, again: Reserve
    ) -> Completed:
        asked, response = await self._response(models, request, attempts, again)
        try:
            parts = NATIVE.read(sound_parts(response), f"{key}.0").parts
        except (Exception, SystemExit) as error:  # what the provider gave may raise anything when it is looked at
            raise ProviderError(error_text(error), code="provider_nonsense") from error
        attempts.unseen = False
        usage, prices = response.usage, self._at.parts.prices
        model = clean_text(response.model)
        if prices is not None:
            model = model or clean_text(asked.name)
            if usage is not None and usage.cost is None:
                usage = replace(usage, cost=prices.cost(clean_text(asked.name), usage))
        said = [part.text for part in parts if isinstance(part, Text)]
        text, kept = ("".join(said), ()) if len(said) == len(parts) else ("", parts)
        return Completed(key, request.label, text, usage, model, self._now(), stop=response.stop, parts=tuple(kept))

    async def _response(
        self, models: Sequence[Provider], request: ModelRequest, attempts: Attempts, again: Reserve
    ) -> tuple[Provider, ModelResponse]:
        """Ask until there is an answer, as often as a turn would: one model after the other, then all again. With the
        answer, the model that gave it."""
        left, number, rounds, since = list(models), 0, 1, 0
        retries, queue = self._retries(), self._at.parts.turns.retries
        ask = functools.partial(_whole, attempts)
        while True:
            attempts.asked = True
            try:
                response = await Guarded(self._at.parts.limits.call(left[number], request, ask), None)
            except Exception as error:  # a provider may raise anything: the next model is asked
                due, attempts.asked, now = None, False, self._now()
                since = since or now
                attempts.unseen = attempts.unseen or is_unseen(error)
                if is_retried(retries, error, isinstance(error, ProviderError) and error.retryable):
                    number += 1
                else:
                    del left[number]
                if not left:
                    raise
                if number >= len(left):
                    after = error.after if isinstance(error, ProviderError) else None
                    due = next_due(retries, rounds, after, now, since, self._at.parts.random)
                    if due is None:
                        raise
                    number, rounds = 0, rounds + 1
            else:
                if queue.failing:
                    queue.answered(clean_text(str(left[number].name)))
                return left[number], response
            if due:  # behind the turns that wait for this model
                await queue.wait(clean_text(str(left[number].name)), due)
            if attempts.unseen:  # what was reserved is spent by the attempt that broke off
                attempts.lost, attempts.unseen = attempts.lost + 1, False
                request = await again(request)
            request = replace(request, attempt=request.attempt + 1)

    def _retries(self) -> Retries:
        """Return the retries of the agent of this turn or session."""
        at = self._at
        definition = at.parts.definitions.get(at.agent) if at.run is None else at.run.agent
        found: Retries | None = None if definition is None else definition.retries
        return found or USUAL

    def _now(self) -> int:
        return self._at.parts.clock.now()


def _answer_to(run: Run, key: str) -> Completed | None:
    """The recorded answer to this question at this place of the turn."""
    return next((r for r in run.records if type(r) is Completed and r.key == key and not r.error), None)


def _cut_off(run: Run, key: str) -> bool:
    """Whether a crash found this question unanswered, and it was not asked since."""
    begun = any(type(record) is Asking and record.key == key for record in run.records[: run.found])
    return begun and not any(type(record) is Completed and record.key == key for record in run.records)


def _spent(found: dict[str, Usage]) -> dict[str, Usage]:
    return {name: usage for name, usage in found.items() if usage != Usage()}


async def _whole(attempts: Attempts, model: Provider, request: ModelRequest) -> ModelResponse:
    limit = request.settings.timeout
    asking = _streamed(attempts, model, request)
    return await (asking if limit is None else within(limit, asking))


async def _streamed(attempts: Attempts, model: Provider, request: ModelRequest) -> ModelResponse:
    response, learn = None, request.report

    def report(told: RateReport) -> None:
        attempts.unseen = attempts.unseen or told.accepted
        if learn is not None:
            learn(told)

    async for delta in model.stream(replace(request, report=report)):
        attempts.unseen = True
        if isinstance(delta, ModelResponse):
            response = delta
    if response is None:
        raise ProviderError("the stream broke off before the answer was complete", retryable=True, code="broken_stream")
    return response


async def tokens_of(provider: Provider, request: ModelRequest) -> int:
    """How many tokens a request has for the model that would be asked first."""
    model = candidates(provider)[0]
    if not isinstance(model, Counting):
        raise no_token_count(model.name)
    return await model.count_tokens(request)


def _messages(asked: str | Sequence[Message], system: str) -> list[Message]:
    said = [Message("user", asked)] if isinstance(asked, str) else validate.several(asked, "asked")
    if not said:
        raise InvalidInput("ask a model something: text, or at least one message")
    return [*([Message("system", clean_text(system))] if system else []), *map(_sound, said)]


def _specs(tools: Sequence[Any]) -> tuple[ToolSpec, ...]:
    """What a model is shown of tools that it may call and that are not run."""
    found: dict[str, ToolSpec] = {}
    for each in validate.several(tools, "tools"):
        spec = each if isinstance(each, ToolSpec) else getattr(each, "spec", None)
        if not isinstance(spec, ToolSpec):
            raise InvalidInput(f"tools={quoted(each)} is not usable: give ToolSpec(…) or a tool")
        if spec.name in found:
            raise InvalidInput(f"two tools are named {quoted(spec.name)}: a model could not tell them apart")
        found[spec.name] = spec
    return tuple(found.values())


def _sound(message: object) -> Message:
    """A message that a model may be shown, normalised."""
    if not isinstance(message, Message) or message.role not in get_args(Role):
        raise InvalidInput(f"a model is asked with text or Messages, not with {quoted(message)}")
    return Message(message.role, [clean_part(part) for part in message.parts])
