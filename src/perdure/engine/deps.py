"""The live objects of a run: what tools, hooks and durable functions see as `ctx.deps`.

`Runtime(deps=…)` is an object, which every run sees, or a function of the `Caller`, which is called for every run of a
turn or a process and makes objects for that run alone. They are never stored: the worker that goes on with a run after
a crash or a park calls the function again.

    Retry(after=…)     it is called again then; the run waits, and a cancel request or the end of the Runtime ends that
    anything else      NotPrepared: a turn with no record ends as Failed; one with records, and a process, are set aside
                       with the reason, because a bad deploy must not fail all that was interrupted

A function of `Agent(instructions=…)` is called in the same way, and returns text.

A function is told from an object by its type. Functions, methods and `functools.partial` objects are called; anything
else is the object itself, though it may be callable: a class, a mock or a client with `__call__` is more often meant as
such. Of what a function returns only the context managers of `contextlib.asynccontextmanager` are entered: a connection
pool can be entered too, and belongs to all runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

from perdure.engine.control import Control, Escaped, SelfCancelled
from perdure.engine.retry import pause
from perdure.errors import DepsFailed, InstructionsFailed, InvalidDefinition, NotPrepared, Retry, quoted
from perdure.model.agent import Caller
from perdure.model.codec import clean_text, error_text
from perdure.model.retries import Retries
from perdure.ports.host import Random

log = logging.getLogger("perdure.engine")

Make: TypeAlias = Callable[[Caller], Any]
WaitSeconds: TypeAlias = Callable[[float], Awaitable[None]]
Guard: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]

DEPS_RETRIES = Retries(first=1.0, within=None)
LONGEST = 3600.0
"""Seconds: the longest pause that the host's function may ask for."""


def function_of_caller(given: Any, what: str) -> Make | None:
    """The function, checked as far as that can be done without calling it; None when it is an object."""
    inner = given
    while isinstance(inner, functools.partial):
        inner = inner.func
    if not inspect.isroutine(inner):
        return None
    if inspect.isasyncgenfunction(inner) or inspect.isgeneratorfunction(inner):
        raise InvalidDefinition(
            f"{what}={quoted(given)} is a generator: decorate it with contextlib.asynccontextmanager"
        )
    try:
        inspect.signature(given).bind(Caller())
    except TypeError:
        raise InvalidDefinition(
            f"{what}={quoted(given)} cannot be called with a Caller alone: give a function of one argument"
        ) from None
    except ValueError:  # of some built-in functions the signature is not known
        pass
    make: Make = given
    return make


class RunDeps:
    """The live objects of one run, made by a function. `value` is what `ctx.deps` is, once entered."""

    def __init__(self, make: Make, caller: Caller, random: Random, failed: type[NotPrepared] = DepsFailed) -> None:
        self._failed = failed
        self._make, self._caller, self._random = make, caller, random
        self._managed: AbstractAsyncContextManager[Any] | None = None
        self.value: Any = None

    async def enter(self, guard: Guard, wait: WaitSeconds) -> Any:
        """The objects. `guard` ends the work when the run is to stop; `wait` is for the time between attempts."""
        try:
            return await guard(self._enter(wait))
        except (SelfCancelled, Escaped) as error:
            raise self._failed(str(error), self._caller.session_id) from error

    async def _enter(self, wait: WaitSeconds) -> Any:
        attempt = 0
        while True:
            attempt += 1
            try:
                self.value = await self._call()
            except Retry as again:
                delay = min(pause(DEPS_RETRIES, attempt, again.after, self._random), LONGEST)
                log.warning(
                    "the %s for %s: attempt %d asks to wait %.1f s: %s",
                    self._failed.what,
                    self._for,
                    attempt,
                    delay,
                    again,
                )
                await wait(delay)
            except Exception as error:  # code of the host's: which run it was for, and what it raised, is told
                raise self._failed(f"{type(error).__name__}: {error_text(error)}", self._caller.session_id) from error
            else:
                return self.value

    async def _call(self) -> Any:
        made = self._make(self._caller)
        if inspect.isawaitable(made):
            made = await made
        if isinstance(made, contextlib._AsyncGeneratorContextManager):
            value = await made.__aenter__()
            self._managed = made
            return value
        undecorated = isinstance(made, Generator | AsyncGenerator | contextlib._GeneratorContextManager)
        if undecorated or inspect.isawaitable(made):
            raise TypeError(
                f"it returned a {type(made).__name__}: return the object, or decorate an async generator with "
                "contextlib.asynccontextmanager"
            )
        return made

    async def leave(self, error: BaseException | None = None) -> None:
        """The run has ended, is parked or given back. What leaving raises is logged: it changes no outcome."""
        managed, self._managed, self.value = self._managed, None, None
        if managed is None:
            return
        try:
            await managed.__aexit__(type(error) if error is not None else None, error, None)
        except asyncio.CancelledError:
            raise
        except BaseException as fault:  # code of the host's
            if fault is not error:
                log.exception("deps for %s could not be left", self._for)

    @property
    def _for(self) -> str:
        return f"session {self._caller.session_id}" if self._caller.session_id else "a process of the host"


@contextlib.asynccontextmanager
async def deps_for(make: Make, caller: Caller, random: Random, wait: WaitSeconds) -> AsyncGenerator[Any]:
    """Make live objects for work that belongs to no run, and leave them when the block ends."""
    deps = RunDeps(make, caller, random)
    made = await deps.enter(Control().guard, wait)
    try:
        yield made
    except BaseException as error:  # the host's objects are left however the block ends
        await deps.leave(error)
        raise
    await deps.leave()


async def instructions_of(make: Make, caller: Caller, random: Random, guard: Guard, wait: WaitSeconds) -> str:
    """What an agent's function says to its model in one run of a turn."""
    made = RunDeps(make, caller, random, InstructionsFailed)
    text = await made.enter(guard, wait)
    await made.leave()
    if not isinstance(text, str):
        raise InstructionsFailed(f"it returned a {type(text).__name__}: return text", caller.session_id)
    return clean_text(text)
