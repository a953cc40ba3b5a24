"""Calling a tool's code: its preparation, and its body once.

Preparation is everything that can be said against a call before anything happens. Its order is fixed, and each step has
its own failure code. It has no effects, so it may run again after a crash.

    tool_unavailable            there is no such tool
    tool_contract_unavailable   it has no schema that arguments could be held to
    invalid_tool_args           the arguments are no object, are too large, or do not fit the schema
    tool_prepare_failed         its provider's own preparation raised, or answered with nonsense
    prepared_tool_id_mismatch   it answered for another tool

A body may do anything: whatever it raises becomes the outcome of its own call. Sync bodies run on threads of our own
(`Threads`), which are daemons: a tool that hangs must not keep the interpreter from leaving.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct, ValidationError

from perdure.engine.control import CANCEL_GRACE
from perdure.errors import InvalidInput, Retry, ToolError
from perdure.model.codec import clean, clean_text, convert, copied, encode, model_text
from perdure.model.effect import AskedCall
from perdure.model.tool import Failed, PreparedCall, ToolOutcome
from perdure.ports.tool import CallContext
from perdure.tools.attempt import cut_off, failure, raised
from perdure.tools.catalog import Catalog, ToolEntry
from perdure.tools.check import check
from perdure.tools.context import ToolContext
from perdure.tools.output import AttemptResult, OutputRules, returned
from perdure.tools.waiting import ParkCall

log = logging.getLogger("perdure.tools")

MAX_ARGS = 1024 * 1024


# ---------------------------------------------------------------------- preparation


class Ready(Struct, frozen=True, gc=False):
    """A call that may run. `kwargs` are a function's own arguments, converted to its types."""

    entry: ToolEntry
    call: PreparedCall
    kwargs: dict[str, Any] | None = None


def checked(catalog: Catalog, asked: AskedCall, call_id: str) -> Ready | Failed:
    """The part of preparation that calls no code of the tool: is it there, are its arguments an object that fits."""
    entry = catalog.get(asked.name)
    if entry is None:
        known = ", ".join(catalog.names()[:20]) or "none"
        return Failed("tool_unavailable", f"there is no tool {asked.name[:80]!r}; available: {known}")
    spec = entry.spec
    if entry.fault is not None:
        return Failed("tool_contract_unavailable", f"tool {spec.name} cannot be called: {entry.fault}")
    if asked.raw is not None:
        return Failed("invalid_tool_args", f"the arguments are not a JSON object: {asked.raw[:200]}")
    size = len(encode(asked.args))
    if size > MAX_ARGS:
        return Failed("invalid_tool_args", f"the arguments have {size:,} bytes, the limit is {MAX_ARGS:,}")
    prepared = PreparedCall(call_id, spec.id or spec.tool_id, spec.name, asked.args, asked.payload)
    if entry.tool is not None:
        try:
            return Ready(entry, prepared, entry.tool.bind(asked.args))
        except ToolError as error:
            return Failed(error.code, error.message)
    if asked.attempts:
        return Ready(entry, prepared)  # its recorded start holds what preparation made of it
    try:
        problem = check(spec.input_schema, asked.args, foreign=True)
    except Exception as error:  # a foreign schema, changed since it was looked at
        return Failed("tool_contract_unavailable", f"its schema cannot be read ({type(error).__name__})")
    return Ready(entry, prepared) if problem is None else Failed("invalid_tool_args", problem)


async def prepared(ready: Ready, ctx: CallContext, anew: bool = False) -> Ready | ToolOutcome:
    """The provider's own preparation, which may rewrite the arguments, attach a payload or end the call.

    Another attempt runs as it was prepared, unless it must be prepared `anew`.
    """
    provider = ready.entry.provider
    if provider is None or (ctx.attempt > 1 and not anew):
        return ready
    try:
        answer = await provider.prepare(copied(ready.call), ctx)
    except ToolError as error:
        return failure(error)
    except Exception as error:  # the provider's code may raise anything; the call ends with it and the turn goes on
        return Failed("tool_prepare_failed", f"{type(error).__name__}: {model_text(error)}")
    if not isinstance(answer, PreparedCall):
        return _decided(answer)
    if answer.tool_id != ready.entry.spec.tool_id:
        return Failed(
            "prepared_tool_id_mismatch", f"preparation answered for {answer.tool_id}, not {ready.entry.spec.tool_id}"
        )
    try:
        args, payload = clean(answer.args), clean(answer.payload)
    except InvalidInput as error:
        return Failed("tool_prepare_failed", str(error))
    if not isinstance(args, dict):
        return Failed("tool_prepare_failed", f"preparation made a {type(args).__name__} of the arguments")
    ask: Any = answer.ask
    if not isinstance(ask, str):
        return Failed("tool_prepare_failed", f"preparation asks for approval with a {type(ask).__name__}")
    approves: Any = answer.approves
    if not isinstance(approves, str):
        return Failed("tool_prepare_failed", f"preparation gave a {type(approves).__name__} for what is approved")
    name, told = ready.call.name, clean_text(ask)
    call = PreparedCall(ready.call.call_id, answer.tool_id, name, args, payload, told, clean_text(approves))
    return Ready(ready.entry, call)


def _decided(outcome: object) -> ToolOutcome:
    """The outcome with which preparation ended a call, when it can be stored and read back."""
    try:
        plain = clean(outcome) if isinstance(outcome, ToolOutcome) else None
        decided: ToolOutcome = convert(plain, ToolOutcome)
    except (InvalidInput, ValidationError):
        return Failed("tool_prepare_failed", f"preparation answered with a {type(outcome).__name__}")
    return decided


# ---------------------------------------------------------------------- the body


class Interruption(Struct):
    """Why a body was cancelled from outside, if it was: set before the cancellation reaches it.

    `begun`: the body may have had an effect. `over`: it has returned, there is nothing to cancel any more.
    `acknowledged`: an answer from outside that was acknowledged says how the call ended: it is recorded, however long
    plugins look at it.
    """

    begun: bool = False
    reason: str | None = None
    timed_out: bool = False
    over: bool = False
    acknowledged: bool = False

    def because(self, reason: str, timed_out: bool = False) -> None:
        """Why it is cancelled now; of several reasons the first counts."""
        if self.reason is None:
            self.reason, self.timed_out = reason, timed_out


async def execute(
    ready: Ready,
    ctx: ToolContext[Any],
    threads: Threads,
    rules: OutputRules,
    interruption: Interruption,
    ended: Callable[[], None] | None = None,
) -> AttemptResult:
    """Run the body once. Raises nothing but ParkCall: a tool may do anything and harms nothing but its own call.

    `ended` is called when a sync body's thread has really ended, also after the call was given up.
    """
    tool = ready.entry.tool
    interruption.begun = True
    try:
        if tool is None:
            assert ready.entry.provider is not None
            value = await ready.entry.provider.execute(copied(ready.call), ctx)
        elif tool.is_async:
            value = await tool.invoke(ready.kwargs or {}, ctx)
        else:
            value = await on_thread(functools.partial(tool.invoke, ready.kwargs or {}, ctx), threads, ended)
    except asyncio.CancelledError:
        return AttemptResult(cut_off(ready.entry.spec.recovery, interruption.reason, interruption.timed_out))
    except ParkCall:
        raise
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a tool end the tool only
        end = raised(error, ready.entry.retries)
        if isinstance(end, Failed) and end.code == "tool_raised":
            log.warning("tool %s raised %s", ctx.tool, type(error).__name__, exc_info=error)
        return AttemptResult(end)
    interruption.over = True
    return await returned(value, rules)


async def on_thread(
    function: Callable[[], Any], threads: Threads, ended: Callable[[], None] | None, grace: float = CANCEL_GRACE
) -> Any:
    """What a plain function returns, run on a thread. Cancelled, it has `grace` seconds to look at `ctx.cancelled` and
    return.

    `ended` is called once, on whatever thread, when the function has really ended, or will never begin.
    """

    def work() -> Any:
        value = None
        try:
            value = function()
            return value
        finally:
            if ended is not None and not inspect.isawaitable(value):
                ended()

    try:
        future = threads.run(work)
    except RuntimeError as error:  # no more threads: it has not begun, and holds nothing
        if ended is not None:
            ended()
        raise Retry(f"the tool could not be started: {error}", code="no_thread") from None
    try:
        value = await asyncio.shield(future)
    except asyncio.CancelledError:
        if future.done():
            raise  # the tool's own
        # A thread cannot be stopped, but it may look at `ctx.cancelled` and say how far it came.
        await asyncio.wait({future}, timeout=grace)
        future.add_done_callback(functools.partial(_abandoned, ended))
        if not future.done() or _unawaited(future):
            raise
        return future.result()
    if not inspect.isawaitable(value):
        return value
    try:
        return await value  # a plain wrapper around an async function gives what is still to be awaited
    finally:
        if ended is not None:
            ended()


def _unawaited(future: asyncio.Future[Any]) -> bool:
    return not future.cancelled() and future.exception() is None and inspect.isawaitable(future.result())


def _abandoned(ended: Callable[[], None] | None, future: asyncio.Future[Any]) -> None:
    """Take the result of a thread that nothing waits for: asyncio warns of exceptions that are never retrieved, and a
    coroutine that it returned is never awaited."""
    if _unawaited(future):
        if inspect.iscoroutine(future.result()):
            future.result().close()
        if ended is not None:
            ended()


IDLE_SECONDS = 30.0
SHORT_OF_MEMORY = 0.01


class Threads:
    """As many threads as there is work at once, kept for a while. One instance per Runtime and loop.

    With `most`, work beyond so many threads waits for one of them. With `idle_seconds` of None threads end with `close`
    alone: what a thread has started may live only as long as it does.
    """

    def __init__(
        self, name: str = "perdure-tool", idle_seconds: float | None = IDLE_SECONDS, most: int | None = None
    ) -> None:
        self._name, self._idle_seconds, self._most = name, idle_seconds, most
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        """Threads that wait for work; below 0, work that waits for a thread."""
        self._count = 0
        self._alive: set[threading.Thread] = set()
        self._closed = False

    def run(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run `work` with a copy of the caller's context variables. Cancelling the future does not stop it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def body() -> None:
            result, error = None, None
            try:
                result = context.run(work)
            except BaseException as raised:  # SystemExit in a tool ends the tool, not the thread
                error = raised
            while True:
                try:
                    loop.call_soon_threadsafe(_settle, future, result, error)
                except MemoryError:
                    time.sleep(SHORT_OF_MEMORY)  # the waiting task must get it, and other threads give memory back
                except RuntimeError:
                    return  # the loop is closed, and no task waits any more
                else:
                    return

        thread = None
        with self._lock:
            if self._idle <= 0 and (self._most is None or len(self._alive) < self._most):
                self._count += 1
                thread = threading.Thread(target=self._serve, name=f"{self._name}-{self._count}", daemon=True)
                self._alive.add(thread)
            else:
                self._idle -= 1
        if thread is not None:
            # Before the work is queued: if there can be no thread, no other one may find it later and run it after all.
            try:
                thread.start()
            except BaseException:  # a thread that did not start is not to be counted, whatever kept it from that
                self._alive.discard(thread)
                raise
        self._queue.put(body)
        return future

    def _serve(self) -> None:
        try:
            self._work()
        finally:
            self._alive.discard(threading.current_thread())

    def _work(self) -> None:
        while True:
            try:
                body = self._queue.get(timeout=self._idle_seconds)
            except queue.Empty:
                with self._lock:
                    if self._idle > 0:
                        self._idle -= 1
                        return
                continue
            if body is None:
                return
            body()
            with self._lock:
                if self._closed:
                    return
                self._idle += 1

    def close(self) -> None:
        """Let idle threads go. Those at work end with it."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, 0
        for _ in range(idle):
            self._queue.put(None)

    def join(self) -> None:
        """Wait until every thread has ended, after `close`. Blocks."""
        for thread in tuple(self._alive):
            thread.join()


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration | GeneratorExit):
        # Raised inside a coroutine these would end the waiting task, not reach it.
        future.set_exception(RuntimeError(f"the function raised {error!r}"))
    else:
        future.set_exception(error)
