"""Asking the model: one streamed request, its attempts, and what is recorded of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from math import inf
from typing import get_args

from msgspec.structs import astuple

from mainstay.engine.driver import Run
from mainstay.engine.gate import Leaving, TurnCancelled
from mainstay.engine.retry import MODEL_RETRIES, RetryPolicy
from mainstay.errors import InvalidInput, MainstayError, ProviderError
from mainstay.model.codec import MAX_VALUE, clean_part, clean_text, error_text
from mainstay.model.effect import CallModel, GaveUp, TimeIsUp
from mainstay.model.event import ReasoningDelta, Retracted
from mainstay.model.ids import call_id
from mainstay.model.llm import ModelRequest, ModelResponse, Stop, Usage
from mainstay.model.message import Part, Reasoning, Text
from mainstay.model.record import INTERRUPTED, Faltered, Replied
from mainstay.ports.host import Random
from mainstay.turn import native, prompt

log = logging.getLogger("mainstay.engine")

Admit = Callable[[Run, int, Sequence[Part]], tuple[int, ...]]
"""Which calls of a reply start with its record: decided by the tools, before the record is written."""

YIELD_EVERY = 256
"""A provider that never waits must not keep other sessions from their turn."""


class OutOfTime(Exception):
    """The turn's budget of seconds was spent while the model was asked."""


class ModelCaller:
    """Handles CallModel. Attempts are ours: a provider never retries behind our back."""

    def __init__(self, admit: Admit, random: Random, policy: RetryPolicy = MODEL_RETRIES) -> None:
        self._admit, self._random, self._policy = admit, random, policy

    async def call(self, run: Run, effect: CallModel) -> None:
        await run.journal.flush()
        await run.sleep_until(effect.due)
        request = self._request(run, effect)
        try:
            response = await run.gate.guard(self._in_time(run, request, effect.step))
        except OutOfTime:
            run.events.emit(Retracted, step=effect.step, reason="the time of the turn is up")
            run.machine.receive(TimeIsUp())
        except TurnCancelled:
            run.events.emit(Retracted, step=effect.step, reason="the turn was cancelled")
            raise
        except Leaving:
            run.events.emit(Retracted, step=effect.step, reason="the runtime was closed")
            self._record_failure(run, effect, INTERRUPTED, "the runtime was closed while the model was asked", 0)
            await run.journal.flush()
            raise
        except (Exception, SystemExit) as error:
            self._failed(run, effect, error)
        else:
            self._answered(run, effect, response)

    def _request(self, run: Run, effect: CallModel) -> ModelRequest:
        agent = run.agent
        return ModelRequest(
            prompt.request_messages(agent.instructions, run.history, run.machine.messages()),
            () if effect.last else agent.tool_specs(),
            agent.output_schema,
            f"{run.turn_id}.{effect.step}",
            effect.attempt,
            run.scope.session_id,
            run.turn_id,
            "none" if effect.last else "auto",
        )

    async def _in_time(self, run: Run, request: ModelRequest, step: int) -> ModelResponse:
        """Ask within what is left of the turn's time, where its budget sets one."""
        seconds = run.agent.budget.seconds
        if seconds is None:
            return await self._ask(run, request, step)
        left = seconds - run.elapsed_ms / 1000
        try:
            async with asyncio.timeout(max(left, 0)):
                return await self._ask(run, request, step)
        except TimeoutError:
            if run.elapsed_ms / 1000 < seconds:
                raise  # the provider's own
            raise OutOfTime from None

    async def _ask(self, run: Run, request: ModelRequest, step: int) -> ModelResponse:
        """Stream one answer into the feed. The last thing streamed must be the whole response."""
        response: ModelResponse | None = None
        count, text = 0, run.events.text
        async for delta in run.agent.provider.stream(request):
            if type(delta) is str:
                text(step, delta)
                count += 1
                if count % YIELD_EVERY == 0:
                    await asyncio.sleep(0)
            elif isinstance(delta, Reasoning):
                run.events.emit(ReasoningDelta, text=clean_text(delta.text), step=step)
            elif isinstance(delta, ModelResponse):
                response = delta
            else:
                raise ProviderError(f"the provider streamed a {type(delta).__name__}", code="provider_nonsense")
        if response is None:
            raise ProviderError(
                "the stream broke off before the answer was complete", retryable=True, code="broken_stream"
            )
        return response

    def _answered(self, run: Run, effect: CallModel, response: ModelResponse) -> None:
        try:
            parts = _sound_parts(response)
        except (InvalidInput, TypeError) as error:
            self._failed(run, effect, ProviderError(str(error), code="provider_nonsense"))
            return
        parts = native.with_unique_ids(parts, run.turn_id, effect.step)
        runs = not effect.last and response.stop not in native.CUT_OFF
        started = self._admit(run, effect.step, parts) if runs else ()
        interrupted, run.interrupted = run.interrupted, 0
        run.record(
            Replied(
                effect.step,
                parts,
                response.usage,
                response.stop,
                clean_text(response.model),
                started,
                effect.attempt,
                interrupted,
                run.clock.now(),
                run.slot(),
            )
        )

    def _failed(self, run: Run, effect: CallModel, error: BaseException) -> None:
        # Only our own codes are codes: an HTTP client's `.code` may be anything.
        code = clean_text(str(error.code)) if isinstance(error, MainstayError) else "provider_raised"
        message = error_text(error) or type(error).__name__
        run.events.emit(Retracted, step=effect.step, reason=message)
        if not isinstance(error, ProviderError):
            log.error("the model of %s raised", call_id(run.turn_id, effect.step, 0), exc_info=error)
            message = f"{type(error).__name__}: {message}"
        if not isinstance(error, ProviderError) or not error.retryable or effect.attempt >= self._policy.attempts:
            run.machine.receive(GaveUp(code, message, effect.attempt))
            return
        self._record_failure(run, effect, code, message, self._policy.delay(effect.attempt, error.after, self._random))

    def _record_failure(self, run: Run, effect: CallModel, code: str, message: str, delay: float) -> None:
        now = run.clock.now()
        due = now + int(delay * 1000)
        run.record(Faltered(code, message, due, effect.attempt, effect.step, at=now, slot=run.slot()))


def _sound_parts(response: ModelResponse) -> tuple[Part, ...]:
    """The parts of an answer, normalised. Refuses what no store could give back."""
    usage: object = response.usage
    if usage is not None and not (isinstance(usage, Usage) and _countable(usage)):
        raise InvalidInput(f"the provider reported a usage of {usage!r:.200}")
    if response.stop not in get_args(Stop) or not isinstance(response.model, str):
        raise InvalidInput(f"the provider stopped with {response.stop!r:.80}, as model {response.model!r:.80}")
    parts = tuple([clean_part(p) for p in response.all_parts()])
    size = sum([len(p.text) for p in parts if isinstance(p, Text | Reasoning)])
    if size > MAX_VALUE:
        raise InvalidInput(f"the answer has {size:,} characters, the limit is {MAX_VALUE:,}")
    return parts


def _countable(usage: Usage) -> bool:
    *counts, cost = astuple(usage)
    return all(type(n) is int and 0 <= n < 2**53 for n in counts) and isinstance(cost, int | float) and 0 <= cost < inf
