"""In which order the branches of a durable function get their results: that of the records, live and on replay.

Branches share memory: a list, a counter, an `asyncio.Lock`. What they make of it depends on who goes on first, so that
has to be the same on every run:

    one at a time   A result (of a step, a wait, a child, a cut-off call) is recorded in the moment in which it is
                    handed out, and the next one is handed out only when no branch can run. Live, results queue up in
                    the order in which they come; on replay, the next one is the next record.
    can run         A branch can run unless it is in a call of its context that has no result yet, or waits for a future
                    that is not done: of a lock, a queue, whatever. Between two results, code runs as asyncio runs it,
                    which is the same every time: what one branch sets free, another takes before anything else happens.
    held            A call that no record answers does nothing until all recorded results are handed out: a replay that
                    diverges has done nothing.

Nothing here waits for time to pass. Every suspension of a branch's code comes by (`suspended`), and that is the only
moment in which the last branch can stop running.

What a future belongs to cannot be seen. While one that is none of ours is waited for, a few passes through the event
loop tell whether it is about to be done: asyncio's own wrappers need some between what they wait for and who waits for
them. On replay, it may also be work outside of the context that takes its time again; see `_nobody_asks`.

A journal that older code began carries no mark. It is answered at once, in whatever order its branches ask.
"""

from __future__ import annotations

import asyncio
import asyncio.locks
import asyncio.queues
import inspect
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mainstay.errors import Diverged
from mainstay.model.process import Event
from mainstay.model.step import Done, StepKind, StepRecord
from mainstay.processes.branch import Branch, PutAway
from mainstay.processes.journal import ProcessJournal
from mainstay.processes.replay import FORKS, Replay, shown

PASSES = 8
"""Passes through the event loop in which nothing happens to a branch before it counts as unable to run."""
SPINS = 10_000
"""So often branches may go on without a result before the next one is handed out all the same: code that only looks
again and again (`while not found: await asyncio.sleep(0)`) waits for just that."""
DEADLOCK_SECONDS = 2.0
"""How long a replay may rest while branches wait for each other's locks or queues, and none asks for what is next."""

PRIMITIVES = frozenset({asyncio.locks.__file__, asyncio.queues.__file__})


class Result(Struct, eq=False):
    """What a call came to, for the branch that waits for it. `event` is written with it; `taken`: it gets it."""

    branch: Branch
    done: Done
    event: Event | None
    turn: asyncio.Future[None]
    taken: bool = True


class Asking(Struct, eq=False):
    """A branch that waits for its recorded result."""

    branch: Branch
    what: str
    turn: asyncio.Future[None]


class Ordering:
    """Who may run, and who is next. One per run of the process in this worker.

    `_running` counts the branches that can run; `_outside` are those that wait for a future that is none of ours.
    `_results` have come and are not handed out, `_asking` wait for theirs by key, `_held` for the end of the replay.
    `_moves` counts what would make a look at all branches stale. `_dropping`: branches were dropped, and those that
    wait for what is none of ours are pulled out of it (`pull`) when no branch can run.
    """

    def __init__(
        self,
        process_id: str,
        journal: ProcessJournal,
        replay: Replay,
        fail: Callable[[Exception], object],
        pull: Callable[[Branch], bool],
    ) -> None:
        self._process_id, self._journal, self._replay = process_id, journal, replay
        self._fail, self._pull = fail, pull
        self._running = self._moves = self._spins = 0
        self._outside: set[Branch] = set()
        self._results: deque[Result] = deque()
        self._asking: dict[str, Asking] = {}
        self._held: list[asyncio.Future[None]] = []
        self._passing = self._dropping = self._away = False
        self._unmarked = replay.is_new
        self._timer: asyncio.TimerHandle | None = None
        self.replaying = replay.next_result() is not None

    # ------------------------------------------------------------------ who can run

    def begin(self, branch: Branch) -> None:
        """A branch that makes its first step soon."""
        branch.can_run = True
        self._running += 1

    def end(self, branch: Branch) -> None:
        if branch.can_run:
            branch.can_run = False
            self._running -= 1
        self._look()

    def enter(self, branch: Branch) -> None:
        """It makes a call of its context, and cannot run until that has a result."""
        branch.in_call, branch.can_run = True, False
        self._running -= 1

    def leave(self, branch: Branch) -> None:
        branch.in_call = False
        self.wake(branch)

    def wake(self, branch: Branch) -> None:
        """Its call has a result, or all of its branches have ended: it counts as running from now on."""
        if not branch.can_run:
            branch.can_run = True
            self._running += 1

    @property
    def is_asked(self) -> bool:
        """Whether something is to be done as soon as no branch can run."""
        return bool(self._results) or self.replaying or self._dropping

    def suspended(self, branch: Branch, waits_for: Any) -> None:
        """The code of a branch waits for a future, or for its next pass through the event loop (None)."""
        if not branch.in_call:
            if waits_for is None:
                self._moves += 1
                self._spins += 1
            else:
                branch.outside, branch.can_run = waits_for, False
                self._running -= 1
                self._outside.add(branch)
        if self.is_asked:
            self._look()

    def resumed(self, branch: Branch) -> None:
        """It goes on after it has waited for a future that is none of ours."""
        branch.outside = None
        self._outside.discard(branch)
        self._moves += 1
        self.wake(branch)

    def dropped(self) -> None:
        """Branches were asked to end because another was chosen."""
        self._dropping = True

    # ------------------------------------------------------------------ results

    async def answer(self, branch: Branch, key: str, kind: StepKind, name: str, asked: str) -> Done | None:
        """How this call ended before, once that is next; None when it has to be made. Raises Diverged."""
        if not self.replaying:
            return self._replay.answer(key, kind, name, asked)
        done = self._replay.peek(key, kind, name, asked)
        if kind in FORKS and (done is None or not (done.cut or done.fault is not None)):
            return None  # it makes no result of its own, and its branches have theirs
        if done is None:
            await self._hold()
            return self._replay.answer(key, kind, name, asked)
        if self._at_rest and self._replay.next_result() is done:
            self._taken(branch, done)
            return done
        asking = Asking(branch, shown(kind, name, asked), _turn())
        self._asking[key] = asking
        await asking.turn
        self._check_here()
        return done

    async def hand_out(self, branch: Branch, done: Done, event: Event | None = None) -> bool:
        """Record what a call came to, in the moment in which its branch may go on with it.

        False when it is a signal, and the branch was asked to end before its turn: nothing is recorded then, and the
        signal is another's.
        """
        if self._away:
            self._write(done, event)
            raise PutAway
        if self._at_rest and not self._results and not self._dropping:
            self._write(done, event)
            self.wake(branch)
            return True
        result = Result(branch, done, event, _turn())
        self._results.append(result)
        await result.turn
        self._check_here()
        return result.taken

    def withdraw_signal(self, branch: Branch) -> None:
        """The branch is asked to end: a signal that it has and was not handed out stays with the others."""
        for result in self._results:
            if result.branch is branch and result.done.event is not None:
                result.taken = False
                self._results.remove(result)
                _set(result.turn)
                return

    def record(self, record: StepRecord, repeats: bool = False) -> None:
        """Record what is no result: that something has begun, has faltered, was chosen. The first record of a journal
        is marked: what follows is in the order in which it was handed out."""
        if self._unmarked:
            self._unmarked = False
            record = replace(record, ordered=True)
        self._journal.record(record, repeats)

    def put_away(self) -> None:
        """Every branch is told; what has come and was not handed out has happened all the same, in this order."""
        self._away, self.replaying = True, False
        for result in self._results:
            self._write(result.done, result.event)
        turns = [*(each.turn for each in self._results), *(each.turn for each in self._asking.values()), *self._held]
        self._results.clear()
        self._asking.clear()
        self._held.clear()
        for turn in turns:
            _set(turn)
        self._stop_timer()

    def close(self) -> None:
        """The run is over."""
        self._away = True
        self._stop_timer()
        del self._fail, self._pull  # they lead back here: without them the run is freed at once

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ------------------------------------------------------------------ who is next

    @property
    def _at_rest(self) -> bool:
        """Whether it is certain at once that no branch can run."""
        return not self._running and not self._outside

    def _look(self) -> None:
        """Hand out the next result, if no branch can run."""
        if self._away or self._passing or not self.is_asked:
            return
        if self._spins > SPINS and (self._results or self._next_asking() is not None):
            self._next()
        elif self._running or any(branch.outside is None or branch.outside.done() for branch in self._outside):
            return  # it comes by again
        elif self._outside:
            self._passing = True
            asyncio.get_running_loop().call_soon(self._pass, self._moves, PASSES)
        else:
            self._next()

    def _pass(self, moves: int, left: int) -> None:
        if moves == self._moves and left and not self._running:
            asyncio.get_running_loop().call_soon(self._pass, moves, left - 1)
            return
        self._passing = False
        if self._away:
            return
        if moves != self._moves or self._running:
            self._look()
        elif not (self._dropping and self._pull_out()):
            self._next()

    def _pull_out(self) -> bool:
        pulled = [self._pull(branch) for branch in tuple(self._outside)]
        return any(pulled)

    def _next(self) -> None:
        self._spins, self._dropping = 0, False
        if not self.replaying:
            if not self._results:
                return
            result = self._results.popleft()
            self._write(result.done, result.event)
            self.wake(result.branch)
            _set(result.turn)
            return
        asking = self._next_asking()
        if asking is None:
            self._nobody_asks()
            return
        done = self._replay.next_result()
        assert done is not None
        del self._asking[done.key]
        self._taken(asking.branch, done)
        _set(asking.turn)

    def _next_asking(self) -> Asking | None:
        done = self._replay.next_result()
        return None if done is None else self._asking.get(done.key)

    def _taken(self, branch: Branch, done: Done) -> None:
        """The next recorded result is handed out. After the last one, calls that were held are made."""
        self._replay.take(done.key)
        self.wake(branch)
        self.look_ahead()

    def look_ahead(self) -> None:
        """Something recorded was used: perhaps the last."""
        if self.replaying and self._replay.next_result() is None:
            self.replaying = False
            for turn in self._held:
                _set(turn)
            self._held.clear()

    async def _hold(self) -> None:
        turn = _turn()
        self._held.append(turn)
        await turn
        self._check_here()

    def _nobody_asks(self) -> None:
        """No branch asks for what is recorded next.

        Where all of them are in calls, none ever will. One that waits for something outside of the context may, when
        that has come: it is waited for as on the first run. But branches that wait for each other's locks or queues,
        beside one whose own result comes later, may wait for ever, and look no different from those that wait for a
        lock of the host: they have some seconds.
        """
        if not self._outside:
            self._diverge()
        elif self._timer is None and (self._asking or self._held) and all(map(_waits_for_a_lock, self._outside)):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(DEADLOCK_SECONDS, self._give_up, self._moves)

    def _give_up(self, moves: int) -> None:
        self._timer = None
        if moves != self._moves or self._running:
            self._look()
        elif self.replaying and self._next_asking() is None:
            self._diverge()

    def _diverge(self) -> None:
        done = self._replay.next_result()
        assert done is not None
        others = [f"{key}: {each.what}" for key, each in self._asking.items()]
        others += ["calls that are not recorded"] if self._held else []
        others += ["what is none of its context's calls"] if self._outside else []
        there = shown(done.kind, done.name, done.asked)
        self._fail(Diverged(self._process_id, done.key, there, f"nothing there; it waits for {', '.join(others)}"))

    def _write(self, done: Done, event: Event | None) -> None:
        self.record(done)
        if event is not None:
            self._journal.event(event)

    def _check_here(self) -> None:
        if self._away:
            raise PutAway


def _turn() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


def _set(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


def _waits_for_a_lock(branch: Branch) -> bool:
    """Whether a branch waits for what another one may hold: a lock, an event, a queue of asyncio's."""
    inner: Any = branch.work
    while inspect.iscoroutine(following := inner.cr_await):
        inner = following
    return inner.cr_code.co_filename in PRIMITIVES
