"""What reaches a running turn or process from outside: a cancel request, the end of the Runtime, a wake-up.

Control    set on the event loop by whatever learns of a request; wakes `pause`, and cancels what runs in `guard`
Guarded    foreign code in the task that awaits it, which can be left behind when it ignores its cancellation
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from perdure.model.session import CancelRequest
from perdure.ports.process import Leaving

R = TypeVar("R")

log = logging.getLogger("perdure.engine")

CANCEL_GRACE = 0.05
"""Seconds a cancelled tool body has to say how it ended."""
GUARD_GRACE = 1.0
"""Seconds that guarded work has to end when it is cancelled: a provider may have a connection to close."""


class TurnCancelled(Exception):
    """A cancel request won; the turn commits as cancelled."""


class TurnAborted(Exception):
    """A plugin ends the turn, or one that it cannot do without has failed."""

    def __init__(self, plugin: str, code: str, message: str = "") -> None:
        self.plugin, self.code, self.message = plugin, code, message
        super().__init__(message)


class SelfCancelled(Exception):
    """The work was cancelled, but not by us: something inside it gave up."""


class Escaped(Exception):
    """The work raised what ends a coroutine, a task or a program, and nothing outside of it had asked for that.

    `error` is what it raised. Let through, it would end the task that the work runs in, or the host's event loop.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error
        super().__init__(f"{type(error).__name__}: {error}")


class OutOfTime(Exception):
    """The work did not end within the time it was given."""


class LeftBehind(BaseException):
    """Thrown into work that ignores its cancellation, so that it can release what it holds."""


class Guarded(Generic[R]):
    """Work that runs in the task that awaits it, and that can be left there when it ignores its cancellation.

    A plain `await` waits for whatever the work makes of its cancellation. This hands its steps on one by one, and
    `grace` after it was told to stop the next step is not the work's any more: the task goes on without it. `own`
    counts the times that the work has cancelled the task itself, in one of its steps: that ends the work, not the task.
    """

    __slots__ = ("_grace", "_work", "cuts", "left", "own", "task", "timer")

    def __init__(self, work: Coroutine[Any, Any, R], seconds: float | None, grace: float = GUARD_GRACE) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task, self._work, self._grace = task, work, grace
        self.cuts, self.own, self.left = 0, 0, False
        self.timer = None if seconds is None else task.get_loop().call_later(seconds, self.cut)

    def __await__(self) -> Generator[Any, Any, R]:
        work, cancelling = self._work, self.task.cancelling
        thrown: BaseException | None = None
        before = cancelling()
        try:
            step = work.send(None)
            while True:
                if (after := cancelling()) != before:
                    self.own += after - before
                try:
                    thrown = None
                    yield step
                except BaseException as error:  # it is the work's to handle, as in any `await`
                    if self.left:
                        self._close()
                        raise
                    thrown, before = error, cancelling()
                    step = work.throw(error)
                else:
                    before = cancelling()
                    step = work.send(None)
        except StopIteration as end:
            self.own += cancelling() - before
            result: R = end.value
            return result
        except BaseException as error:  # nothing is handled here: it is told apart
            self.own += cancelling() - before
            if isinstance(error, GeneratorExit | KeyboardInterrupt) and error is not thrown:
                raise Escaped(error) from error
            raise

    def cut(self) -> None:
        """Tell the work to stop; once is enough."""
        if not self.cuts:
            if self.timer is not None:
                self.timer.cancel()
            self.timer = self.task.get_loop().call_later(self._grace, self._leave)
            self._cancel()

    def took_back(self) -> bool:
        """Undo our own cancellations; whether there were any, and the task is not cancelled by others besides."""
        for _ in range(self.cuts):
            self.task.uncancel()
        return self.cuts > 0 and self.task.cancelling() == 0

    def forgive(self) -> None:
        """Undo what the work has done to the task it runs in."""
        for _ in range(self.own):
            self.task.uncancel()

    def _leave(self) -> None:
        self.left = True
        self._cancel()

    def _cancel(self) -> None:
        self.cuts += 1
        self.task.cancel()

    def _close(self) -> None:
        name = self.task.get_name()
        log.error("the work of %s does not end when it is cancelled; it is left behind", name)
        try:
            # Not `close()`: that does not reach into an async generator, which most providers are.
            self._work.throw(LeftBehind())
        except BaseException as error:  # it has ended, and how makes no difference any more
            if not isinstance(error, LeftBehind):
                log.error("the work of %s raised on its way out", name, exc_info=error)
        else:
            log.error("the work of %s ignores its end too; it gets no further step", name)


@dataclass(slots=True, eq=False)
class Control:
    """What a turn in this process listens to besides its own work.

    `request` is the cancel request, `leaving` the end of the Runtime, `stopping` that there is one of them. `nudged` is
    a hint that something outside has changed (an answer, an input). All are set on the event loop. They wake the task
    that waits in `pause`, and a stop cancels what runs in `guard`.
    """

    request: CancelRequest | None = None
    leaving: bool = False
    stopping: bool = False
    nudged: bool = False
    _waiter: asyncio.Future[None] | None = None
    _guarded: list[Guarded[Any]] = field(default_factory=list)

    def check(self) -> None:
        """Raise what has been asked for. A cancel request goes before leaving: it ends the turn for good."""
        if self.request is not None:
            raise TurnCancelled
        if self.leaving:
            raise Leaving

    def cancel(self, request: CancelRequest) -> None:
        if self.request is None:
            self.request = request
            self._stop()

    def withdraw(self) -> None:
        """The request has had its effect: a branch of a function is stopped once, and may clean up afterwards."""
        self.request, self.stopping = None, self.leaving

    def leave(self) -> None:
        if not self.leaving:
            self.leaving = True
            self._stop()

    def nudge(self) -> None:
        self.nudged = True
        self.wake()

    def take_nudge(self) -> None:
        """Look outside now: what changes from here on nudges again."""
        self.nudged = False

    def _stop(self) -> None:
        self.stopping = True
        self.wake()
        for guarded in self._guarded:
            guarded.cut()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def pause(self) -> None:
        """Wait for the next wake: a request, a nudge, or work that calls `wake` when it ends."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def guard(self, work: Coroutine[Any, Any, R], seconds: float | None = None) -> R:
        """Run `work` to its end, unless a stop is asked for or `seconds` pass first: then it is cancelled, and
        TurnCancelled, Leaving or OutOfTime is raised. Work that does not end then is left behind.

        It runs in the turn's own task: a model call is the common case, and a task of its own would cost it three
        passes of the event loop.
        """
        if self.stopping:
            work.close()
            self.check()
        guarded: Guarded[R] = Guarded(work, seconds)
        self._guarded.append(guarded)
        try:
            result = await guarded
        except BaseException as error:  # the work may raise anything, and some of it means something else here
            if guarded.own:
                guarded.forgive()
            if isinstance(error, asyncio.CancelledError) and guarded.task.cancelling() == 0:
                raise SelfCancelled("CancelledError: the work cancelled itself") from None
            if guarded.took_back():  # then the error, whatever it is, is what the work made of its cancellation
                self.check()
                raise OutOfTime from error
            raise
        finally:
            self._guarded.remove(guarded)
            if guarded.timer is not None:
                guarded.timer.cancel()
        if guarded.own:
            guarded.forgive()
        if guarded.cuts and guarded.took_back():
            self.check()  # the work swallowed its cancellation; a request stands, an answer out of time counts
        return result
