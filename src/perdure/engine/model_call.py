"""Asking the model: one streamed request, its attempts, and what is recorded of them.

    call       write what is recorded, build the request, wait for the model's rate limits, ask, record what came back
    _stream    pass what the provider streams on to live readers; its last item is the whole answer

Attempts are recorded before the next one is made: a failed one with the time at which the next is due, an interrupted
one because its cost is unknown and not zero. Where an agent has several models, a failed attempt is followed by one of
the next model at once, and by a pause only after the last. The answer and the calls that start with it are one record.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from decimal import Decimal
from typing import Any, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.engine.control import Escaped, OutOfTime, TurnAborted, TurnCancelled
from perdure.engine.driver import PER_CALL, Parked, Run
from perdure.engine.limits import TurnSpending, amount, price_of
from perdure.engine.rate_limits import RateLimits, Ticket
from perdure.engine.retry import USUAL, is_retried, kept_due, next_due
from perdure.engine.retry_queue import RetryQueue
from perdure.engine.waiters import current_metadata
from perdure.engine.waits import decode_pending, wait_id
from perdure.errors import BlobMissing, InvalidInput, PerdureError, ProviderError, StoreDamaged
from perdure.model.codec import MAX_VALUE, clean_part, clean_text, encode, error_text
from perdure.model.effect import CallModel, GaveUp, TimeIsUp
from perdure.model.event import (
    LimitNear,
    LimitWait,
    ModelRetry,
    RateLimitWait,
    ReasoningDelta,
    Retracted,
    ToolCallDelta,
)
from perdure.model.ids import call_id
from perdure.model.limit import Ask, Granted
from perdure.model.llm import CallPiece, Delta, ModelRequest, ModelResponse, RateReport, Stop, Usage
from perdure.model.message import Part, ProviderPart, Reasoning, Stored, Text, ToolCall
from perdure.model.outcome import PendingCall
from perdure.model.plugin import Issue
from perdure.model.protocol import Prompt, Reading
from perdure.model.record import INTERRUPTED, Faltered, Framed, Record, Replied, slots
from perdure.model.retries import Retries
from perdure.model.session import WaitRow
from perdure.model.tool import ToolSpec
from perdure.ports.host import Random
from perdure.ports.process import Leaving
from perdure.ports.provider import Prices, Provider, reports_cost
from perdure.ports.services import StreamEnd, TurnHooks
from perdure.ports.store import Store
from perdure.turn import prompt
from perdure.turn.machine import CUT_OFF
from perdure.turn.tools import NATIVE

log = logging.getLogger("perdure.engine")

Admit = Callable[[Run, int, Reading], tuple[int, ...]]
"""Which calls of a reply start with its record: decided by the tools, before the record is written."""

STOPS = get_args(Stop)

MOST = 2**53
"""Beyond it a float, and a reader in another language, does not count any more."""

PER_PART = 16
"""Characters that a part counts for besides what it says: any number of empty ones is not nothing."""

OVERFLOW = "context_overflow"
"""The code of an attempt that the model refused because the conversation does not fit. A turn is made shorter once."""

MAX_REASON = 500
"""Characters of an error in the wait for the next attempt."""

YIELD_EVERY = 256
"""A provider that never waits must not keep other sessions from their turn."""


class ModelAttempt(Struct):
    """One attempt of a model call: the model that is asked, one of `models`.

    `begun`: the provider has taken the request, or a part of the answer has come. What it takes in is paid for, so from
    then on the cost is unknown and not zero until the answer is recorded.
    """

    run: Run
    effect: CallModel
    models: tuple[Provider, ...]
    model: Provider
    begun: bool = False

    def name(self) -> str:
        return clean_text(str(self.model.name))


class ModelCaller:
    """Handles CallModel. Attempts are ours: a provider never retries behind our back."""

    def __init__(  # noqa: PLR0913  # put together in one place
        self,
        admit: Admit,
        random: Random,
        store: Store,
        limits: RateLimits,
        queue: RetryQueue,
        park_after: float | None = None,
        prices: Prices | None = None,
    ) -> None:
        self._admit, self._random, self._store, self._blobs = admit, random, store, store.blobs
        self._limits, self._queue, self._prices = limits, queue, prices
        self._park_after = math.inf if park_after is None else park_after

    async def call(  # noqa: C901, PLR0915  # one attempt and every way that it may end
        self, run: Run, effect: CallModel
    ) -> Parked | None:
        early = None
        if run.spending is None:
            await run.journal.flush()
        else:
            early = await self._ask_early(run, effect, run.spending)
        if effect.attempt > 1 and (stop := await self._may_repeat(run, effect)) is not None:
            return stop if isinstance(stop, Parked) else None
        request, models = early or await self._request(run, effect), run.agent.models
        # A turn that was begun with more models than there are now goes on with the last.
        attempt = ModelAttempt(run, effect, models, models[min(effect.candidate, len(models) - 1)])
        if run.control.stopping:
            run.control.check()
        if len(attempt.models) > 1 and self._passed_over(attempt):
            return None
        if run.agent.budget.money is not None and not reports_cost(attempt.model):
            try:
                price_of(self._prices, attempt.name())
            except ProviderError as unpriced:
                self._failed(attempt, unpriced)
                return None
        if run.spending is not None:
            bounded = await self._bounded(attempt, request, run.spending)
            if bounded is None:
                return None
            request = bounded
        ticket = self._limits.join(attempt.model, request)
        if not ticket.going and not await self._waited_for(ticket, attempt):
            return None
        try:  # from here on it is asked, and its cost unknown until the answer is recorded
            response = await self._answer(attempt, request, ticket)
        except OutOfTime:
            self._cut_off(attempt, "the time of the turn is up")
            await _finished(run, effect, "cancelled")
            run.machine.receive(TimeIsUp())
        except TurnCancelled:
            self._cut_off(attempt, "the turn was cancelled")
            await _finished(run, effect, "cancelled")
            raise
        except TurnAborted as end:
            self._cut_off(attempt, end.message)
            with contextlib.suppress(TurnAborted):  # the first fault is the one to tell
                await _finished(run, effect, "aborted")
            raise
        except Leaving:
            run.events.emit(Retracted, step=effect.step, reason="the runtime was closed")
            await _finished(run, effect, "cancelled")
            self._record_failure(attempt, INTERRUPTED, "the runtime was closed while the model was asked", 0)
            await run.journal.flush()
            raise
        except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            raise  # not the provider's: its own are SelfCancelled and Escaped
        except BaseException as error:  # also what pytest.fail raises: a caller that waits must hear of it
            fault = error.error if isinstance(error, Escaped) else error
            if run.unreadable:
                fault = await self._unreadable(run, fault)
            again = self._failed(attempt, fault)
            await _finished(run, effect, "attempt_reset" if again else "provider_error")
        else:
            if run.hooks is not None and run.hooks.in_model_calls:
                response = await self._responded(attempt, run.hooks, response)
            self._answered(attempt, response)
        return None

    async def _may_repeat(self, run: Run, effect: CallModel) -> Parked | GaveUp | TimeIsUp | None:
        """Wait until another attempt is due, and make the conversation shorter where the one before found it too long;
        None when the attempt may be made. Otherwise the turn is parked, or the machine knows how it ended.

        What is recorded decides: after a crash the same is done from here, with the summaries that were recorded.
        """
        if effect.due:
            stop = await self._until_due(run, effect)
            if stop is not None:
                return stop
        found = next((r for r in reversed(run.records) if type(r) is Framed or _overflow(r)), None)
        if type(found) is not Faltered:
            return None
        if run.hooks is not None and await run.hooks.shrink():
            await run.journal.flush()
            return None
        why = f"{found.message} (it could not be made shorter either)"
        end = GaveUp(found.code, why, effect.attempt - 1, False, found.model)
        run.machine.receive(end)
        return end

    async def _until_due(self, run: Run, effect: CallModel) -> Parked | TimeIsUp | None:
        """Wait for the recorded time of the next attempt, and for its turn among the calls that wait for this model. A
        long wait parks the turn. Only a wait in memory is time of the turn."""
        failed = next(r for r in reversed(run.records) if type(r) is Faltered and not r.call)
        if failed.due <= failed.at:
            return None  # another model, or another request: no repetition
        model, due = _model_name(run, effect.candidate), kept_due(_retries(run), effect.due, run.clock.now())
        if self._queue.take_grant(run.turn_id) or (run.resumed and await self._is_asked_for(run, effect)):
            return None
        seconds, left = self._queue.delay(model, due), _time_left(run)
        if seconds > self._park_after:
            parked = await self._park(run, effect, failed, model, due)
            if parked is not None:
                return parked
        if left is not None and seconds > left:
            end = TimeIsUp()  # at once: the turn's time is up before
            run.machine.receive(end)
            return end
        await run.control.guard(self._queue.wait(model, due))
        return None

    async def _is_asked_for(self, run: Run, effect: CallModel) -> bool:
        """True if a person has asked for this attempt to be made at once."""
        found = [w for w in await self._store.waits(run.scope.sid) if w.kind == "model" and w.state == "resolved"]
        return any(decode_pending(w.body).ordinal == effect.attempt for w in found if w.call == f"{effect.step}.0")

    async def _park(self, run: Run, effect: CallModel, failed: Faltered, model: str, due: int) -> Parked | None:
        """Leave the turn to the disk until the attempt is due; None if it cannot be parked. The wait is written with
        the parking. It says what people want to know; the due time and the number of attempts are in the records."""
        scope, call = run.scope, f"{effect.step}.0"
        earlier = [w for w in await self._store.waits(scope.sid) if w.kind == "model" and w.turn == scope.turn]
        name = wait_id(run.turn_id, call, "model", 1 + len(earlier))
        why, now = f"{failed.code}: {failed.message}"[:MAX_REASON], run.clock.now()
        asked = PendingCall(f"{run.turn_id}.{call}", "model", model, {}, now, due, why, ordinal=effect.attempt)
        wait = WaitRow(name, scope.sid, scope.turn, call, "model", "open", due, encode(asked))
        appended = await run.journal.flush((wait,), (name,))
        if appended is None or not appended.parked:
            run.check_cancel()
            return None
        self._queue.park(model, due, name, run.turn_id)
        return Parked((asked,))

    async def _ask_early(self, run: Run, effect: CallModel, spending: TurnSpending) -> ModelRequest | None:
        """Write what is recorded, and ask in the same write for what the next call may take: the request, where it is
        known by now. Where plugins have a say in it, they are called after the write."""
        request = None
        if effect.attempt == 1 and (run.hooks is None or not run.hooks.in_model_calls):
            request = await self._request(run, effect)
            name = _model_name(run, effect.candidate)
            with contextlib.suppress(ProviderError):  # told when the model is about to be asked
                ask = spending.ask(name, request)
                if spending.reserved is None or not spending.reserved.covers(ask):
                    await self._reserve(run, spending, ask)
        run.journal.spending.extend(spending.pending())
        await run.journal.flush()
        return request

    async def _reserve(self, run: Run, spending: TurnSpending, ask: Ask) -> Granted:
        wanted = spending.reserve(ask)
        run.journal.spending.append(wanted)
        await run.journal.flush()
        given = run.journal.granted.pop(wanted.op)
        spending.granted(ask, given)
        spending.limits.settled()  # the same write may have settled a call
        for near in spending.news(given):
            kind, key = near.name.partition("/")[0], msgspec.json.decode(near.key)
            figures = [float(amount(kind, each)) for each in (near.spent, near.reserved, near.most)]
            spent, reserved, most = figures
            run.events.emit(LimitNear, name=near.name, key=key, spent=spent, reserved=reserved, limit=most)
        return given

    async def _bounded(
        self, attempt: ModelAttempt, request: ModelRequest, spending: TurnSpending
    ) -> ModelRequest | None:
        """The request, with an answer as long as the limits leave room for; None when the model is not to be asked,
        which the machine knows then. While others have reserved what is left, it waits: nothing was asked meanwhile."""
        run, told = attempt.run, False
        try:
            ask = spending.ask(attempt.name(), request)
        except ProviderError as unpriced:
            self._failed(attempt, unpriced)
            return None
        while spending.reserved is None or not spending.reserved.covers(ask):
            given = await self._reserve(run, spending, ask)
            if given.short is None:
                continue
            if not given.waits:
                run.machine.receive(spending.limits.reached(given.short))
                return None
            if not told:
                key, told = msgspec.json.decode(given.short.key), True
                run.events.emit(LimitWait, step=attempt.effect.step, name=given.short.name, key=key)
            try:
                await run.control.guard(spending.limits.room(), _time_left(run))
            except OutOfTime:
                run.machine.receive(TimeIsUp())
                return None
        return spending.limits.bounded(request, spending.reserved.output)

    def _passed_over(self, attempt: ModelAttempt) -> bool:
        """Whether the model is not to be asked now because its provider wants no calls, and there is another one."""
        effect = attempt.effect
        others = {*range(effect.candidate + 1, len(attempt.models))} - {*effect.failed}
        if not others or not (held := self._limits.held(attempt.model)):
            return False
        why = f"{attempt.model.name} wants no calls for {held:.0f} s, and there is another model"
        self._failed(attempt, ProviderError(why, retryable=True, after=held, code="rate_limited"))
        return True

    async def _waited_for(self, ticket: Ticket, attempt: ModelAttempt) -> bool:
        """Wait for the rate limits of the model; False when it is not to be asked now, which the machine knows then.

        Nothing has been asked meanwhile: whatever ends the wait costs nothing. The time of the turn goes on.
        """
        run, effect = attempt.run, attempt.effect
        wait = self._limits.why(ticket)
        told = {"limit": clean_text(wait.limit), "reason": wait.reason, "seconds": wait.seconds}
        run.events.emit(RateLimitWait, step=effect.step, model=attempt.name(), **told)
        try:
            await run.control.guard(self._limits.wait(ticket), _time_left(run))
        except OutOfTime:
            self._limits.leave(ticket)
            run.machine.receive(TimeIsUp())
            return False
        except ProviderError as error:
            self._failed(attempt, error)
            return False
        except BaseException:  # also a cancellation: a ticket that is not given back would hold up the others
            self._limits.leave(ticket)
            raise
        return True

    async def _answer(self, attempt: ModelAttempt, request: ModelRequest, ticket: Ticket) -> ModelResponse:
        """One attempt. Its place is free before hooks are called, which may ask a model themselves."""
        run, timeout = attempt.run, request.settings.timeout

        def report(told: RateReport) -> None:
            attempt.begun = attempt.begun or told.accepted
            self._limits.learn(ticket, told)

        try:
            asking = self._stream(attempt, replace(request, report=report))
            if timeout is not None:
                asking = within(timeout, asking)
            response = await run.control.guard(
                asking, _time_left(run) if run.agent.budget.seconds is not None else None
            )
        except BaseException as error:  # nothing is handled here: its place is given back
            attempt.begun = attempt.begun or is_unseen(error)
            self._limits.failed(ticket, error, attempt.begun)
            if run.spending is not None:
                refused = isinstance(error, ProviderError) or bool(run.unreadable)
                run.spending.ended(attempt.name(), None, attempt.begun or not refused)
                run.journal.spending.extend(run.spending.pending())
            raise
        self._limits.answered(ticket, response.usage)
        if run.spending is not None:
            run.spending.ended(attempt.name(), countable(response), True)
            run.journal.spending.extend(run.spending.pending())
        return response

    async def _responded(self, attempt: ModelAttempt, hooks: TurnHooks, response: ModelResponse) -> ModelResponse:
        """The answer as plugins leave it. People have seen its text: when it is refused, that is taken back."""
        try:
            return await hooks.respond(response, attempt.effect.step)
        except (TurnAborted, TurnCancelled, Leaving) as end:
            self._cut_off(attempt, str(end) or "the turn ended before it was recorded")
            raise

    async def _request(self, run: Run, effect: CallModel) -> ModelRequest:
        agent = run.agent
        tools: Sequence[ToolSpec] = () if effect.last else agent.catalog.specs
        instructions, messages = agent.instructions, [*run.history, *run.machine.messages()]
        if run.hooks is not None and run.hooks.in_model_calls:
            instructions, messages = await run.hooks.shape(effect.step, tools, instructions, messages)
            await run.journal.flush()  # hooks may have noted something
        asked = Prompt(instructions, messages, tools, agent.output_schema)
        if agent.protocol is not NATIVE:  # which asks with all of it as it is
            asked = agent.protocol.ask(asked)
        return ModelRequest(
            prompt.request_messages(asked.instructions, asked.messages) if asked.instructions else asked.messages,
            asked.tools,
            asked.output,
            f"{run.turn_id}.{effect.step}",
            effect.attempt,
            run.scope.session_id,
            run.turn_id,
            "none" if effect.last else "auto",
            agent.settings,
            "turn",
            functools.partial(self._read, run),
            provider_tools=() if effect.last else agent.provider_tools,
            metadata=current_metadata(),
        )

    async def _read(self, run: Run, stored: Stored) -> AsyncIterator[bytes]:
        try:
            async for piece in self._blobs.pieces(stored.digest):
                yield piece
        except (BlobMissing, StoreDamaged):
            run.unreadable.add(stored.digest)
            raise

    async def _unreadable(self, run: Run, error: BaseException) -> BaseException:
        """Bytes of a file could not be read while the model was asked. Without a file of an earlier turn it is asked
        again, told of it in words; else no later turn of the session could be had. One of this turn ends it."""
        run.unreadable.clear()
        earlier = {source.digest for source in prompt.stored_in(run.history)}
        gone = {digest for digest in earlier if not await self._is_whole(digest)}
        if not gone:
            return ProviderError(f"a file of this turn cannot be read: {error_text(error)}", code="file_unreadable")
        run.show(prompt.without_files(run.history, gone))
        message = f"bytes of {len(gone)} files of the conversation are missing or damaged ({', '.join(sorted(gone))})"
        issue = Issue("file_unreadable", f"{message}: the model was told of them in words")
        if not any(issue in slot.issues for slot in slots(run.records)):  # as before a crash
            run.issues.append(issue)
        return ProviderError(f"{message}: it is asked without them", retryable=True, after=0.0, code="file_unreadable")

    async def _is_whole(self, digest: str) -> bool:
        try:
            async for _ in self._blobs.pieces(digest):
                pass
        except (BlobMissing, StoreDamaged):
            return False
        return True

    async def _stream(self, attempt: ModelAttempt, request: ModelRequest) -> ModelResponse:
        """Stream one answer into the feed. The last thing streamed must be the whole response."""
        run, step = attempt.run, attempt.effect.step
        response: ModelResponse | None = None
        count, size, text = 0, 0, run.events.text
        stream = run.hooks.stream(step) if run.hooks is not None and run.hooks.in_model_calls else None
        deltas = attempt.model.stream(request)
        async for delta in deltas:
            attempt.begun = True
            if type(delta) is str:
                size += len(delta)
                text(step, delta if stream is None else stream.feed(delta))
                if stream is not None and stream.stopped:
                    await _close(deltas)
                    break
                count += 1
                if count % YIELD_EVERY == 0:
                    await asyncio.sleep(0)
            elif isinstance(delta, Reasoning):
                run.events.emit(ReasoningDelta, text=clean_text(delta.text), step=step)
                size += len(delta.text)
            elif isinstance(delta, ModelResponse):
                response = delta
            elif isinstance(delta, CallPiece):
                entry = run.agent.catalog.get(delta.name)
                # A secret may be cut in two: what such a call is given is shown when it begins.
                piece = "" if entry is not None and entry.hides else clean_text(delta.text)
                fields = {"tool": clean_text(delta.name), "text": piece, "index": delta.index}
                run.events.emit(ToolCallDelta, step=step, **fields)
                size += len(delta.text)
            else:
                raise ProviderError(f"the provider streamed a {type(delta).__name__}", code="provider_nonsense")
            if size > MAX_VALUE:  # nothing that is larger could be recorded, and it may never end
                await _close(deltas)
                raise ProviderError(
                    f"the answer has more than {MAX_VALUE:,} characters: it is cut off", code="answer_too_large"
                )
        if stream is not None and (response is not None or stream.stopped):
            text(step, stream.finish(response))
            return stream.shown(response)
        if response is None:
            raise ProviderError(
                "the stream broke off before the answer was complete", retryable=True, code="broken_stream"
            )
        return response

    def _answered(self, attempt: ModelAttempt, response: ModelResponse) -> None:
        """Record the answer, and with it which of its calls start."""
        run, effect = attempt.run, attempt.effect
        try:
            reading: Reading = run.agent.protocol.read(sound_parts(response), f"{run.turn_id}.{effect.step}")
        except TurnAborted as end:
            self._cut_off(attempt, end.message)
            raise
        except (Exception, SystemExit) as error:  # what the provider gave may raise anything when it is looked at
            self._failed(attempt, ProviderError(error_text(error), code="provider_nonsense"))
            return
        parts, dropped, started = reading.parts, 0, tuple[int, ...]()
        if count := len([part for part in parts if type(part) is ToolCall]):
            most = run.agent.budget.calls_per_reply
            if (most is not None and count > most) or PER_CALL * count >= run.room:
                dropped, parts = count, tuple([part for part in parts if type(part) is not ToolCall])
            if not dropped and not effect.last and response.stop not in CUT_OFF and run.machine.may_call(count):
                started = self._admit(run, effect.step, reading)
        if self._queue.failing:
            self._queue.answered(attempt.name())
        usage = response.usage
        model = clean_text(response.model)
        if self._prices is not None:
            model = model or attempt.name()
            if usage is not None and usage.cost is None:
                usage = replace(usage, cost=self._prices.cost(attempt.name(), usage))
        run.record(
            Replied(
                effect.step,
                parts,
                usage,
                response.stop,
                model,
                started,
                effect.attempt,
                run.interrupted,
                run.clock.now(),
                run.slot(),
                run.journal.store_id() if started else "",
                dropped,
                reading.cell,
                reading.fault,
                () if dropped else reading.cells,
            )
        )

    def _failed(self, attempt: ModelAttempt, error: BaseException) -> bool:
        """Record a failed attempt, or give up; whether another attempt follows."""
        run, effect = attempt.run, attempt.effect
        # Only our own codes are codes: an HTTP client's `.code` may be anything.
        code = clean_text(str(error.code)) if isinstance(error, PerdureError) else "provider_raised"
        message = error_text(error) or type(error).__name__
        run.events.emit(Retracted, step=effect.step, reason=message)
        if code == OVERFLOW and not any(_overflow(record) for record in run.records):
            if run.hooks is not None and run.hooks.may_shrink():
                self._record_failure(attempt, code, message, 0)
                return True
            message = f"{message} (Compaction(context_tokens=…) in the agent's plugins makes conversations shorter)"
        if not isinstance(error, ProviderError):
            log.error("the model of %s raised", call_id(run.turn_id, effect.step, 0), exc_info=error)
            message = f"{type(error).__name__}: {message}"
        retries, now = _retries(run), run.clock.now()
        final = not is_retried(retries, error, isinstance(error, ProviderError) and error.retryable)
        models = len(attempt.models)
        failed = {*effect.failed, *((effect.candidate,) if final else ())}
        left = [number for number in range(models) if number not in failed]
        rounds = -(-effect.attempt // models)
        following = [number for number in left if number > effect.candidate]
        # The next model is asked at once; only when all have been asked does the first wait for its turn.
        after, since = error.after if isinstance(error, ProviderError) else None, _failing_since(run, effect.step, now)
        due = now if following else next_due(retries, rounds, after, now, since, self._random)
        spent = retries.attempts is not None and effect.attempt >= retries.attempts * models
        if not left or spent or due is None:
            run.machine.receive(GaveUp(code, message, effect.attempt, attempt.begun, attempt.name()))
            return False
        if not following:
            due = max(due, now + 1)  # an attempt that is due at once asks another model, and is no repetition
        following_model = (following or left)[0]
        name = _model_name(run, following_model)
        told = {"model": name, "attempt": effect.attempt + 1, "error": f"{code}: {message}", "due": due}
        run.events.emit(ModelRetry, step=effect.step, **told)
        self._record_failure(attempt, code, message, due - now, following_model, final)
        return True

    def _cut_off(self, attempt: ModelAttempt, why: str) -> None:
        """The model was asked, and its answer is not kept. Recorded, because its cost is unknown and not zero."""
        attempt.run.events.emit(Retracted, step=attempt.effect.step, reason=why)
        self._record_failure(attempt, INTERRUPTED, clean_text(why), 0)

    def _record_failure(  # what a record of it says
        self,
        attempt: ModelAttempt,
        code: str,
        message: str,
        delay: int,
        candidate: int | None = None,
        final: bool = False,
    ) -> None:
        run, effect, now = attempt.run, attempt.effect, attempt.run.clock.now()
        run.record(
            Faltered(
                code,
                message,
                now + delay,
                effect.attempt,
                effect.step,
                at=now,
                slot=run.slot(),
                begun=attempt.begun,
                candidate=effect.candidate if candidate is None else candidate,
                final=final,
                model=attempt.name(),
            )
        )


def _model_name(run: Run, candidate: int) -> str:
    models = run.agent.models
    return clean_text(str(models[min(candidate, len(models) - 1)].name))


def _retries(run: Run) -> Retries:
    found: Retries | None = run.agent.retries
    return found or USUAL


def _failing_since(run: Run, step: int, now: int) -> int:
    """Return when the first attempt of this model call failed; `now` if none has."""
    failed = (
        each.at
        for each in run.records
        if type(each) is Faltered and not each.call and each.step == step and each.code not in (INTERRUPTED, OVERFLOW)
    )
    return next(failed, now)


def _overflow(record: Record) -> bool:
    return type(record) is Faltered and record.code == OVERFLOW and not record.call


async def within(limit: float, asking: Coroutine[Any, Any, ModelResponse]) -> ModelResponse:
    """The answer, if it is there in so many seconds."""
    try:
        async with asyncio.timeout(limit):
            return await asking
    except TimeoutError:
        raise ProviderError(
            f"the model did not answer within {limit:g} s: set ModelSettings(timeout=…) higher",
            retryable=True,
            code="timeout",
            unseen=True,
        ) from None


async def _finished(run: Run, effect: CallModel, reason: StreamEnd) -> None:
    if run.hooks is not None and run.hooks.in_model_calls:
        await run.hooks.stream_finished(effect.step, reason)


async def _close(deltas: AsyncIterator[Delta]) -> None:
    """Stop a stream whose rest is not wanted."""
    close = getattr(deltas, "aclose", None)
    if close is not None:
        await close()


def _time_left(run: Run) -> float | None:
    """What is left of the turn's time, where its budget sets one."""
    seconds: float | None = run.agent.budget.seconds
    return None if seconds is None else max(seconds - run.elapsed_ms / 1000, 0)


def sound_parts(response: ModelResponse) -> tuple[Part, ...]:
    """The parts of an answer, normalised. Refuses what no store could give back."""
    usage: object = response.usage
    if usage is not None and not (isinstance(usage, Usage) and _countable(usage)):
        raise InvalidInput(f"the provider reported a usage of {usage!r:.200}")
    if response.stop not in STOPS or not isinstance(response.model, str):
        raise InvalidInput(f"the provider stopped with {response.stop!r:.80}, as model {response.model!r:.80}")
    parts, size = [], 0
    for given in response.all_parts():
        part = clean_part(given)
        size += PER_PART
        if type(part) is ToolCall:
            size += len(part.raw or "") + len(part.id) + len(part.name) + (len(encode(part.args)) if part.args else 0)
        elif type(part) is Text or type(part) is Reasoning:
            size += len(part.text)
        elif type(part) is ProviderPart:
            size += len(part.text) + len(part.body)
        else:
            raise InvalidInput(f"the provider answered with a {type(part).__name__}: no answer has one")
        parts.append(part)
    if size > MAX_VALUE:
        raise InvalidInput(f"the answer has {size:,} characters, the limit is {MAX_VALUE:,}")
    return tuple(parts)


def is_unseen(error: BaseException) -> bool:
    """Whether a provider was asked, and what became of that is not known."""
    return isinstance(error, ProviderError) and error.unseen


def countable(response: ModelResponse) -> Usage | None:
    """What an answer says that it took; None where that can be nothing of the kind."""
    usage: object = response.usage
    return usage if isinstance(usage, Usage) and _countable(usage) else None


def _countable(usage: Usage) -> bool:
    tokens = usage.input, usage.output, usage.cache_read, usage.cache_write, usage.reasoning
    for count in (*tokens, usage.calls, usage.unknown):
        if count is not None and (type(count) is not int or not 0 <= count < MOST):
            return False
    # A cost of True would be read back as no number, and one that is no finite amount could not be added up.
    cost: object = usage.cost
    return cost is None or (type(cost) is Decimal and cost.is_finite() and 0 <= cost < MOST)
