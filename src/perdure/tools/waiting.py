"""How a running tool waits for processes, in memory first, then on disk; and for what a person is asked, on disk.

    wait_ended     the body waits in memory (`EndWait`), and the round goes on with its other calls
    park           nothing else of the round runs: the body is unwound (`ParkCall`), a wait is written, the turn leaves
    open           a process that is waited for has ended, the time is up, or an input came: any worker claims the turn
    go on          the body runs again from its first line, to where it was: the same attempt

A tool that does this declares `recovery="rerun"`: its body may run again in any case. What it awaited before comes back
at once, because that has ended; what it waited for without an end, on its way to a later wait, comes back as "timeout".
So only the newest wait has to be remembered, and which one of its body it was (`ordinal`).

A set of tools may leave a call with a question (`InputNeeded`), whatever its `recovery`: the wait is on disk before the
question is asked. The answer goes back to it with its own `state`, in the payload of the same attempt, which any worker
goes on with: `{"input": …, "state": …}`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from perdure.engine.driver import Run
from perdure.engine.journal import load, taken
from perdure.errors import InvalidInput, ToolError, quoted
from perdure.model.codec import clean, encode
from perdure.model.outcome import PendingCall
from perdure.model.record import Said
from perdure.model.session import Answer, WaitRow
from perdure.ports.store import Store
from perdure.ports.tool import WaitEnd
from perdure.tools.check import check

PARK_AFTER = 1.0
"""Seconds that a wait stays in memory, unless a Runtime says otherwise: to park a turn and to go on with it costs three
writes more than to wait for it here."""


MAX_TIMER = 86_400.0
"""Seconds: event loops refuse timers that are far away."""


class WaitParts(Protocol):
    """What the waits of calls need of the dispatcher."""

    @property
    def store(self) -> Store: ...

    @property
    def park_after(self) -> float | None: ...


class ParkCall(BaseException):
    """Unwinds the body of a tool that waits for processes, or for an answer. Not to be caught."""

    def __init__(self, where: Unwound | InputNeeded) -> None:
        self.where = where
        super().__init__("the turn of this tool leaves memory while it waits")


@dataclass(slots=True, eq=False)
class EndWait:
    """One wait of a body in memory. `broken` ends it from outside: by an input, or because the turn parks."""

    ordinal: int
    processes: tuple[str, ...]
    due: int | None
    parks_at: float
    broken: asyncio.Future[WaitEnd]


class PastWait(Struct, frozen=True, gc=False):
    """The wait that a body was unwound in, and how it ended."""

    ordinal: int
    end: WaitEnd


class Unwound(Struct, frozen=True, gc=False):
    """The body of a call was unwound where it waited: it goes on when one of these processes has ended."""

    ordinal: int
    processes: tuple[str, ...]
    due: int | None


class InputNeeded(Struct, frozen=True, gc=False):
    """The body of a call was left with a question. `asks` are its parts by name: a `message`, and a `schema` that the
    answer must fit or a `url` where it is to be given. `state` is given back with the answer."""

    reason: str
    asks: dict[str, Any]
    state: Any = None


def checked_answer(pending: PendingCall, value: Any) -> dict[str, Any]:
    """An answer to each part of a question, or None where that is declined. Raises InvalidInput where one does not fit.

    The only part of a question need not be named.
    """
    asks, given = pending.asks or {}, clean(value)
    if len(asks) == 1 and not (isinstance(given, dict) and given.keys() == asks.keys()):
        given = dict.fromkeys(asks, given)
    if not isinstance(given, dict) or given.keys() != asks.keys():
        raise InvalidInput(f"answer all that {pending.call_id} asks for, by name: {', '.join(asks)}")
    for name, fields in given.items():
        if fields is None:
            continue
        if not isinstance(fields, dict):
            raise InvalidInput(
                f"answer {name!r} with a dict of its fields, or None to decline it, not {quoted(fields)}"
            )
        schema = asks[name].get("schema")
        problem = None if schema is None else check(schema, fields, foreign=True)
        if problem is not None:
            raise InvalidInput(f"the answer to {name!r} does not fit: {problem}")
    return given


async def any_over(store: Store, processes: tuple[str, ...]) -> bool:
    """Whether one of these has ended, or will not end until a person has looked at it."""
    for process_id in processes:
        row = await store.process(process_id)
        if row is None or not row.live or row.stuck is not None:
            return True
    return False


async def input_came(store: Store, run: Run) -> bool:
    """Whether an input waits that would join the turn as soon as its calls have ended: then nothing is waited for."""
    held = {*taken(run.records), *[each.input for each in run.machine.state.delivered]}
    for row in await store.inbox(run.scope.sid):
        if row.kind == "queue" or row.input in held:
            continue
        records = await load(store, run.scope.sid, row.input, row.input)
        said = records[0][1] if records else None
        if isinstance(said, Said) and said.boundary != "before_completion":
            return True
    return False


async def judged(store: Store, run: Run, wait: WaitRow, processes: tuple[str, ...]) -> WaitRow:
    """The wait for processes with how it ended, if it has: its row does not tell, but when its time is up."""
    end: Any = None
    if wait.state == "open":
        end = "ended" if await any_over(store, processes) else "input" if await input_came(store, run) else None
    return wait if end is None else replace(wait, state="resolved", answer=encode(Answer("value", end)))


class BodyWaits:
    """The waits of one run of a body, one after the other (`Parking`). `current` is under way in memory; `table` is
    where the round finds it. `past` is the wait that an earlier run of the body was unwound in."""

    __slots__ = ("_count", "_key", "_park_after", "_past", "_run", "_store", "_table", "current")

    def __init__(
        self, shared: WaitParts, run: Run, table: dict[str, BodyWaits], key: str, past: PastWait | None = None
    ) -> None:
        self._store, self._park_after = shared.store, shared.park_after
        self._run, self._table, self._key, self._past = run, table, key, past
        self._count = 0
        self.current: EndWait | None = None

    async def wait_ended(
        self, processes: tuple[str, ...], timeout: float | None, in_memory: Callable[[], Awaitable[None]]
    ) -> WaitEnd:
        if self.current is not None:
            raise ToolError("this call waits for processes already: give all of them to one wait", code="waits_already")
        over = await any_over(self._store, processes)
        self._count += 1
        past, ordinal, loop, run = self._past, self._count, asyncio.get_running_loop(), self._run
        if over:
            return "ended"
        if timeout == 0 or (past is not None and ordinal < past.ordinal):
            return "timeout"
        if past is not None and ordinal == past.ordinal and past.end != "ended":
            return past.end
        due = None if timeout is None else run.clock.now() + int(timeout * 1000)
        after = math.inf if self._park_after is None else self._park_after
        wait = self.current = EndWait(ordinal, processes, due, loop.time() + after, loop.create_future())
        self._table[self._key] = self
        ended, wake = asyncio.ensure_future(in_memory()), loop.call_later(min(after, MAX_TIMER), run.control.wake)
        run.control.wake()
        try:
            both: set[asyncio.Future[Any]] = {ended, wait.broken}
            done, _ = await asyncio.wait(both, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if ended in done:
                ended.result()
                return "ended"
            if wait.broken in done:
                return wait.broken.result()
            return "ended" if await any_over(self._store, processes) else "timeout"
        except Exception:  # a store in trouble: it is asked again, and is the same wait
            self._count -= 1
            raise
        finally:
            self.current = None
            self._table.pop(self._key, None)
            wake.cancel()
            ended.cancel()
            if not ended.done():
                await asyncio.wait({ended})
            if not ended.cancelled():
                ended.exception()  # retrieved: a task that asks for the outcome gets it

    @property
    def may_park(self) -> bool:
        """Whether it has waited in memory for long enough."""
        wait = self.current
        return wait is not None and not wait.broken.done() and asyncio.get_running_loop().time() >= wait.parks_at

    def stop(self, end: WaitEnd) -> None:
        """End the wait: the body goes on."""
        if self.current is not None and not self.current.broken.done():
            self.current.broken.set_result(end)

    def unwind(self) -> None:
        """End the body where it waits."""
        wait = self.current
        if wait is not None and not wait.broken.done():
            wait.broken.set_exception(ParkCall(Unwound(wait.ordinal, wait.processes, wait.due)))
