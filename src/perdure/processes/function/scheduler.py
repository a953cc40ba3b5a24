"""The branches of one run of a durable function: which of them goes on next, and how each is stopped.

    branch      a task with a key space of its own; the function itself is the first, the root
    group       branches that were forked together; their parent waits until all of them have ended

*The order of results.* Branches share memory: a list, a counter, an `asyncio.Lock`. What they make of it depends on
which one goes on first, so results are delivered in the order of the records, live and on replay:

    one at a time   A result (of a step, a wait, a child, a stopped call) is recorded in the moment in which it is
                    delivered, and the next one is delivered only when no branch can run. Live, results queue up in the
                    order in which they come; on replay, the next one is the next record.
    can run         A branch can run unless it is in a call of its context that has no result yet, or waits for a future
                    that is not done: of a lock, a queue, whatever. Between two results, code runs as asyncio runs it,
                    which is the same every time: what one branch releases, another takes before anything else happens.
    held            A call that no record answers does nothing until all recorded results are delivered: a replay that
                    diverges has done nothing.

Nothing here waits for time to pass. Every suspension of a branch's code passes `drive`, and that is the only moment in
which the last branch can stop running.

What a future belongs to cannot be seen. While a branch waits for one that is not ours, a few passes through the event
loop tell whether it is about to be done: asyncio's own wrappers need some between what they wait for and who waits for
them. On replay, it may also be work outside of the context that takes its time again; see `_no_branch_asks`.

A journal that older code began carries no mark. It is answered at once, in whatever order its branches ask.

*Stopping.* A branch that was asked to stop (by a cancel request, or because its group chose another one) is stopped at
its next call that is not recorded: the call is recorded as stopped and raises `BranchStopped`. A request stops a branch
once; what the branch calls afterwards, in its `finally` blocks, is made. A parent that waits for its group is stopped
through its branches. Replay stops at the same calls, because they are recorded.

*Unloading.* A process leaves memory by raising `Unloaded` in all its branches, whose calls all raise it from then on:
it is parked, the Runtime is left, another worker has claimed it, or something is broken (`fault`). Code that swallows
that over and over is not resumed any more.

*Waits and parking.* A branch that waits for a time, a signal or another process is blocked; one that waits for what
calls in this worker share (a slot of a tool) queues, which cannot be parked but needs no place of the worker. When no
branch works, the process is parked after a short delay, and nothing of it stays in memory. A blocked branch holds one
future, which a signal, a timer, the end of a process or a stop resolves. The branch counts as working from that moment
on, not from when its task is resumed: otherwise the process could be found idle, and parked, in between.
"""

from __future__ import annotations

import asyncio
import asyncio.locks
import asyncio.queues
import bisect
import contextlib
import heapq
import inspect
import itertools
import logging
import types
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

from msgspec import Struct, ValidationError, convert
from msgspec.structs import replace

from perdure.engine.control import Control
from perdure.errors import Diverged, ForeignTask, InvalidProcess
from perdure.lifecycle.process import CANCEL_REQUESTED, SIGNAL
from perdure.model.process import Event, Signal, WaitOn
from perdure.model.record import Done, StepKind, StepRecord
from perdure.model.session import CancelRequest
from perdure.ports.host import Clock
from perdure.ports.process import EngineRun, Unloaded
from perdure.processes.function.replay import FORKS, OWN_CANCEL, QUESTION, Replay, limit_around, shown

R = TypeVar("R")
Works: TypeAlias = Sequence[Coroutine[Any, Any, Any]]

log = logging.getLogger("perdure.processes")

CANCEL, DROP = "cancel", "drop"
"""Why a branch is stopped: a cancel request of the process, or another branch of its group was chosen."""

PASSES = 8
"""Passes through the event loop in which nothing happens to a branch before it counts as unable to run."""
MAX_SPINS = 10_000
"""So often branches may go on without a result before the next one is delivered all the same: code that polls
(`while not found: await asyncio.sleep(0)`) waits for just that."""
DEADLOCK_SECONDS = 2.0
"""How long a replay may rest while branches wait for each other's locks or queues, and none asks for what is next."""
DROP_SECONDS = 1.0
"""How long a dropped branch may wait for something that is not a call of its context, until it is cancelled."""
MAX_REFUSALS = 100
"""So often a branch may swallow `Unloaded`: more than any code that unwinds would."""

PARK_DELAY = 0.05
"""Seconds that an idle process stays in memory: an answer often comes at once."""
SHORT_SLEEP = 1.0
"""Sleeps up to so many seconds are spent in memory: to park and come back would cost more."""

STOP, UNLOAD = object(), object()
"""What a wait ends with when its branch is asked to stop, and when the process is unloaded."""

LOCK_FILES = frozenset({asyncio.locks.__file__, asyncio.queues.__file__})

NOT_CHOSEN = CancelRequest("its group", "another branch was chosen")


class BranchStopped(asyncio.CancelledError):
    """A branch is asked to end, at the call where that finds it."""


class FunctionBranch:
    """One line of execution. Its task and the scheduler change it, both on the event loop.

    `pending` are the causes for which it is to be stopped, `delivered` those for which it was; `inherited` are those
    that its parent has passed on to it. `control` carries a request to a step that runs. `unrecorded` counts its calls
    that no record answered, `own_cancels` how often code of the function has cancelled its task. `in_call`: it
    makes a call, so that code of its own which runs meanwhile is a step's. `refused` is how often its calls raised
    `Unloaded`. `children` are branches that it waits
    for, `work` is its coroutine. `can_run`: see the top of this file; `outside` is a future that it waits for and that
    is not ours.
    """

    __slots__ = (
        "calls",
        "can_run",
        "children",
        "control",
        "delivered",
        "in_call",
        "inherited",
        "key",
        "outside",
        "own_cancels",
        "pending",
        "refused",
        "unrecorded",
        "work",
    )

    def __init__(self, key: str, parent: FunctionBranch | None = None) -> None:
        self.key, self.calls = key, 0
        self.work: Coroutine[Any, Any, Any] | None = None
        self.can_run = False
        self.outside: asyncio.Future[Any] | None = None
        self.control = Control()
        self.children: list[FunctionBranch] = []
        self.pending: set[str] = set() if parent is None else set(parent.pending)
        self.inherited: set[str] = set(self.pending)
        self.delivered: set[str] = set() if parent is None else set(parent.delivered)
        self.unrecorded: int = 0 if parent is None else parent.unrecorded
        self.in_call = False
        self.refused = self.own_cancels = 0

    def next_key(self) -> str:
        self.calls += 1
        return f"{self.key}.{self.calls}" if self.key else str(self.calls)

    def begin_anew(self) -> None:
        """Its next call is the first of a segment."""
        self.calls = 0

    def made_unrecorded(self) -> None:
        """It makes a call that no record answers."""
        self.unrecorded += 1

    def deliver_stop(self) -> bool:
        """The call that it makes is stopped. Whether that is because another branch was chosen."""
        dropped = DROP in self.pending
        self.delivered |= self.pending
        self.pending.clear()
        self.control.withdraw()
        return dropped

    def replay_stop(self, dropped: bool) -> None:
        """The same on replay, where a record says so."""
        self.delivered.add(DROP if dropped else CANCEL)
        if dropped:
            self.delivered |= self.pending
        self.pending -= self.delivered
        if not self.pending:
            self.control.withdraw()

    def stopped_through(self, children: Sequence[FunctionBranch]) -> bool:
        """A cause that was passed on to its branches and stopped one of these has stopped it. Whether there was one."""
        due = {cause for each in children for cause in each.delivered & each.inherited & self.pending}
        self.delivered |= due
        self.pending -= due
        if not self.pending:
            self.control.withdraw()
        return bool(due)


class Group:
    """Branches that were forked together. `chosen` is the one that made all others needless, if one did.

    `decides` says whether the end of one of them does that; then `choose` is called, before the others are dropped.
    """

    def __init__(
        self,
        parent: FunctionBranch,
        works: Works,
        decides: Callable[[BaseException | None], bool],
        choose: Callable[[int], None],
    ) -> None:
        self.parent, self.works, self.decides, self.choose = parent, works, decides, choose
        self.branches: list[FunctionBranch] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.values: list[Any] = [None] * len(works)
        self.errors: list[BaseException | None] = [None] * len(works)
        self.left = len(works)
        self.chosen: int | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended_by_stop(self) -> list[FunctionBranch]:
        """Those of its branches that let the exception of their stop through."""
        ends = zip(self.branches, self.errors, strict=True)
        return [branch for branch, error in ends if isinstance(error, asyncio.CancelledError)]

    @property
    def error(self) -> BaseException | None:
        """What its parent raises when no single one was chosen: that it was stopped, or else the first error."""
        found = [error for error in self.errors if error is not None]
        return next((error for error in found if isinstance(error, BranchStopped)), found[0] if found else None)


class CallResult(Struct, eq=False):
    """What a call came to, queued until its branch may go on. `event` is written with it; `taken`: it is delivered."""

    branch: FunctionBranch
    done: Done
    event: Event | None
    turn: asyncio.Future[None]
    taken: bool = True


class PendingAnswer(Struct, eq=False):
    """A branch that waits for its recorded result."""

    branch: FunctionBranch
    what: str
    turn: asyncio.Future[None]


class Waiter(Struct, eq=False):
    """A blocked branch, and the future that ends its wait."""

    on: WaitOn
    result: asyncio.Future[Any]


class ProcessWaits:
    """The waits of one process. `park` writes it to disk, or returns False when something has happened meanwhile;
    `failed` is given an error of that.

    `working` counts the branches that are neither blocked nor queueing, `_eager` the waits that may end at any moment:
    those for more than a time. `_signals` have come and no branch has taken them; `_ended` are processes that have
    ended. `seconds_until` says how far off a due time is. Everything changes on the event loop only.
    """

    def __init__(
        self,
        clock: Clock,
        seconds_until: Callable[[int, int], float],
        park: Callable[[tuple[WaitOn, ...]], Awaitable[bool]],
        rest: Callable[[bool], None],
        failed: Callable[[Exception], object],
        working: int = 0,
    ) -> None:
        self._clock, self._seconds_until, self._park = clock, seconds_until, park
        self._rest, self._failed = rest, failed
        self.working, self._queueing = working, 0
        self._waiters: dict[str, Waiter] = {}
        self._by_name: dict[tuple[str, str], dict[str, Waiter]] = {}
        self._eager = 0
        self._signals: dict[str, list[Signal]] = {}
        self._ended: set[str] = set()
        # Due times on the monotonic clock; one task sleeps until the first of them.
        self._dues: list[tuple[float, int, Waiter]] = []
        self._order = itertools.count()
        self._timer: asyncio.Task[None] | None = None
        self._timer_at = 0.0
        self._park_delay: asyncio.Handle | None = None
        self._parking: asyncio.Task[None] | None = None
        self._is_closed = False

    # ------------------------------------------------------------------ waiting

    @property
    def signal_names(self) -> tuple[str, ...]:
        """The signals that branches wait for in memory."""
        return tuple(name for kind, name in self._by_name if kind == "signal")

    async def wait(self, on: WaitOn) -> Any:
        """What it brought: None when its time was up, STOP, or UNLOAD."""
        if on.kind == "process" and on.name in self._ended:
            return True
        waiter = Waiter(on, asyncio.get_running_loop().create_future())
        self._waiters[on.key] = waiter
        if on.kind != "time":
            self._eager += 1
            self._by_name.setdefault((on.kind, on.name), {})[on.key] = waiter
        if on.due is not None:
            ends = self._clock.monotonic() + self._seconds_until(on.since, on.due)
            heapq.heappush(self._dues, (ends, next(self._order), waiter))
        self._block()
        try:
            return await waiter.result
        finally:
            if not waiter.result.done() or waiter.result.cancelled():
                self._resume()  # its task was cancelled: nothing has resolved its wait
            self._remove(waiter)

    async def queue(self, turn: Callable[[], Awaitable[R]]) -> R:
        """Wait for something in this worker's memory that other processes hold."""
        self._queueing += 1
        self._block()
        try:
            return await turn()
        finally:
            self._queueing -= 1
            self._resume()

    def _remove(self, waiter: Waiter) -> None:
        on = waiter.on
        del self._waiters[on.key]
        if on.kind == "time":
            return
        self._eager -= 1
        named = self._by_name[on.kind, on.name]
        del named[on.key]
        if not named:
            del self._by_name[on.kind, on.name]

    def begin_work(self, branches: int) -> None:
        """So many branches more work."""
        self.working += branches

    def end_work(self) -> None:
        """A branch has ended, or waits for branches of its own."""
        self.working -= 1
        self.check_idle()

    def _block(self) -> None:
        self.working -= 1
        self.check_idle()
        if self.working:
            self._start_timer()

    def resolve(self, key: str, value: Any) -> None:
        """End the wait of the branch at `key`, if it waits and nothing has ended that before."""
        waiter = self._waiters.get(key)
        if waiter is not None:
            self._resolve(waiter, value)

    def resolve_all(self, value: Any) -> None:
        for waiter in list(self._waiters.values()):
            self._resolve(waiter, value)

    def _resolve(self, waiter: Waiter, value: Any) -> None:
        if not waiter.result.done():
            waiter.result.set_result(value)
            self._resume()

    # ------------------------------------------------------------------ time

    def _start_timer(self) -> None:
        """Have a task wake the branch whose time comes first."""
        while self._dues and self._dues[0][2].result.done():
            heapq.heappop(self._dues)
        if not self._dues or self._is_closed:
            return
        first = self._dues[0][0]
        if self._timer is not None and not self._timer.done():
            if self._timer_at <= first:
                return
            self._timer.cancel()
        self._timer_at = first
        self._timer = asyncio.get_running_loop().create_task(self._fire(first))

    async def _fire(self, at: float) -> None:
        await self._clock.sleep(max(0.0, at - self._clock.monotonic()))
        now = max(at, self._clock.monotonic())
        while self._dues and self._dues[0][0] <= now:
            self._resolve(heapq.heappop(self._dues)[2], None)
        self._timer = None
        self._start_timer()

    # ------------------------------------------------------------------ parking

    def check_idle(self) -> None:
        """If no branch works, give up the worker's place; park after a delay, unless a wait is over soon."""
        blocked = self._waiters or self._queueing
        if self.working or not blocked or self._park_delay is not None or self._is_closed:
            return
        if self._parking is not None and not self._parking.done():
            return
        self._rest(True)
        while self._dues and self._dues[0][2].result.done():
            heapq.heappop(self._dues)
        if self._queueing or (self._dues and self._dues[0][0] - self._clock.monotonic() <= SHORT_SLEEP):
            self._start_timer()
            return
        loop = asyncio.get_running_loop()
        self._park_delay = loop.call_later(PARK_DELAY if self._eager else 0, self._begin_parking)

    def _begin_parking(self) -> None:
        self._park_delay = None
        if not self.working and not self._queueing and not self._is_closed:
            self._parking = asyncio.get_running_loop().create_task(self._try_to_park())

    async def _try_to_park(self) -> None:
        if self.working:  # a wait has ended since this task was made
            self._parking = None
            return
        try:
            parked = await self._park(tuple(waiter.on for waiter in self._waiters.values()))
        except Exception as error:  # whatever it is, it must end the waits: no branch waits for this task
            self._failed(error)
            return
        self._parking = None
        if not parked:
            self.check_idle()

    def _resume(self) -> None:
        """A branch works again."""
        self.working += 1
        if self._park_delay is not None:
            self._park_delay.cancel()
            self._park_delay = None
        self._rest(False)
        self._start_timer()

    async def close(self) -> None:
        """The run is over: no timer fires any more."""
        self._is_closed = True
        if self._park_delay is not None:
            self._park_delay.cancel()
        late = [task for task in (self._timer, self._parking) if task is not None and not task.done()]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
        del self._park, self._rest, self._failed  # they lead back here: without them the run is freed at once

    # ------------------------------------------------------------------ signals and ends of others

    def add_signal(self, signal: Signal) -> None:
        """A signal goes to the branch that has waited for it longest, or is kept, in its place by number: the branch
        that took it may have been stopped before it was recorded."""
        for waiter in self._by_name.get(("signal", signal.name), {}).values():
            if not waiter.result.done():
                self._resolve(waiter, signal)
                return
        kept = self._signals.setdefault(signal.name, [])
        bisect.insort(kept, signal, key=lambda each: each.sequence)

    def take_signal(self, name: str) -> Signal | None:
        kept = self._signals.get(name)
        return kept.pop(0) if kept else None

    def kept_signals(self) -> list[int]:
        return sorted(each.sequence for kept in self._signals.values() for each in kept)

    def process_ended(self, process_id: str) -> None:
        """A process that a branch waits for, or is about to wait for, has ended."""
        self._ended.add(process_id)
        for waiter in list(self._by_name.get(("process", process_id), {}).values()):
            self._resolve(waiter, True)


class Scheduler:
    """All branches of one run of one process, and the order in which they go on. It lives on the event loop.

    `_tasks` are the branches by their tasks; `taken` the signals that records have used; `request` is the cancel
    request; `unloaded` and `fault`: see the top of this file.

    `_running` counts the branches that can run; `_outside` are those that wait for a future that is not ours.
    `_results` have come and are not delivered, `_asking` wait for theirs by key, `_held` for the end of the replay.
    `_moves` counts changes after which all branches must be examined again. `_dropping`: branches were dropped, and
    those that wait for something outside are cancelled there once no branch can run.
    """

    def __init__(
        self,
        run: EngineRun,
        replay: Replay,
        seconds_until: Callable[[int, int], float],
    ) -> None:
        self._run, self._process_id, self._journal, self._replay = run, run.row.id, run.journal, replay
        self.waits = ProcessWaits(run.host.clock, seconds_until, self._park, run.rest, self.fail, working=1)
        self._tasks: dict[asyncio.Task[Any], FunctionBranch] = {}
        self.request: CancelRequest | None = None
        self.taken: set[int] = replay.taken
        self.unloaded = False
        self.fault: Exception | None = None
        self._running, self._moves, self._spins = 1, 0, 0
        self._outside: set[FunctionBranch] = set()
        self._results: deque[CallResult] = deque()
        self._asking: dict[str, PendingAnswer] = {}
        self._held: list[asyncio.Future[None]] = []
        self._passing = self._dropping = False
        self._unmarked = replay.is_new
        self._timer: asyncio.TimerHandle | None = None
        self.replaying = not replay.over and replay.next_result() is not None
        self.root = FunctionBranch("")
        if replay.segment.cut:
            self.root.delivered.add(CANCEL)
        task = asyncio.current_task()
        assert task is not None
        self._root_task = task
        self._tasks[task] = self.root
        self.root.can_run = True

    # ------------------------------------------------------------------ calls

    def enter_call(self) -> FunctionBranch | None:
        """The running task begins a call: its branch, which cannot run until that has a result. None: it may not.

        A call of any other task would have no key that a replay could find it by.
        """
        branch = self._tasks.get(asyncio.current_task())  # type: ignore[arg-type]  # no task is no branch
        if branch is None or branch.in_call or self.unloaded:
            return None
        branch.in_call, branch.can_run = True, False
        self._running -= 1
        return branch

    def leave_call(self, branch: FunctionBranch) -> None:
        branch.in_call = False
        self.wake(branch)

    async def refuse_call(self) -> NoReturn:
        """Raise why the running task may make no call.

        It awaits something where the code may be calling in a loop that swallows every refusal: that is where `drive`
        can stop resuming it.
        """
        branch = self.running_branch()
        if branch is None or branch.in_call:
            await asyncio.sleep(0)
            raise ForeignTask(self._process_id)
        branch.refused += 1
        if branch.refused > MAX_REFUSALS:
            await asyncio.sleep(0)
        raise Unloaded

    def current(self) -> FunctionBranch:
        """The branch of the running task, for a call that does not wait. Raises like `refuse_call`."""
        branch = self.running_branch()
        if branch is None or branch.in_call:
            raise ForeignTask(self._process_id)
        if self.unloaded:
            branch.refused += 1
            raise Unloaded
        return branch

    def running_branch(self) -> FunctionBranch | None:
        """The branch of the running task, if it is one."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # a thread: no loop runs there
            return None
        return None if task is None else self._tasks.get(task)

    @property
    def has_one_branch(self) -> bool:
        return len(self._tasks) == 1

    # ------------------------------------------------------------------ running the code of a branch

    @types.coroutine
    def drive(self, work: Coroutine[Any, Any, R], branch: FunctionBranch) -> Generator[Any, Any, R]:
        """Run the coroutine of a branch to its end, passing on every suspension. That is where the scheduler sees
        whether the branch can run, and where code that swallows `Unloaded` too often is not resumed any more."""
        branch.work = work
        task, root = asyncio.current_task(), self._root_task
        assert task is not None
        cancels, root_cancels = task.cancelling(), root.cancelling()
        try:
            step = work.send(None)
            while branch.refused <= MAX_REFUSALS:
                if step is QUESTION:  # a call asks whether a time limit is around it
                    found = limit_around(work)
                    if found is None and task.cancelling() > cancels:  # cancelled by the code that ran just now
                        found = OWN_CANCEL
                        with contextlib.suppress(asyncio.CancelledError):
                            yield
                        while task.cancelling() > cancels:
                            task.uncancel()
                    step = work.send(found)
                    continue
                branch.own_cancels += max(task.cancelling() - cancels, 0)
                if root is not task:
                    self.root.own_cancels += max(root.cancelling() - root_cancels, 0)
                if not branch.in_call or self._results or self.replaying or self._dropping:
                    self._suspended(branch, step)
                try:
                    yield step
                except BaseException as error:  # it is the code's to handle, as in any `await`
                    if branch.own_cancels and isinstance(error, asyncio.CancelledError):
                        _take_back_cancels(branch, task)
                    cancels, root_cancels = task.cancelling(), root.cancelling()
                    if branch.outside is not None:
                        self._resumed(branch)
                    step = work.throw(error)
                else:
                    cancels, root_cancels = task.cancelling(), root.cancelling()
                    if branch.outside is not None:
                        self._resumed(branch)
                    step = work.send(None)
        except StopIteration as end:
            result: R = end.value
            return result
        finally:
            branch.own_cancels += max(task.cancelling() - cancels, 0)
            branch.work = None  # it leads back here, through its context
        log.error("a durable function swallows that it is unloaded, and is left: let BaseException through")
        try:
            work.close()
        except RuntimeError:
            log.error("it ignores its end too")
        raise Unloaded

    async def take_back_cancels(self) -> None:
        """Undo what the function has done to the task that it runs in: what is left is a cancellation from outside.

        A cancel that was requested in the last step of the code is still to be raised, at the next await.
        """
        _take_back_cancels(self.root, self._root_task)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if self._root_task.cancelling():
                raise

    def wake(self, branch: FunctionBranch) -> None:
        """Its call has a result, or all of its branches have ended: it counts as running from now on, not from its
        next pass through the event loop, so that nothing else is delivered in between."""
        if not branch.can_run:
            branch.can_run = True
            self._running += 1

    def _suspended(self, branch: FunctionBranch, waits_for: Any) -> None:
        """The code of a branch waits for a future, or for its next pass through the event loop (None)."""
        if not branch.in_call:
            if waits_for is None:
                self._moves += 1
                self._spins += 1
            else:
                branch.outside, branch.can_run = waits_for, False
                self._running -= 1
                self._outside.add(branch)
        self._deliver_when_idle()

    def _resumed(self, branch: FunctionBranch) -> None:
        """It goes on after it has waited for a future that is not ours."""
        branch.outside = None
        self._outside.discard(branch)
        self._moves += 1
        self.wake(branch)

    # ------------------------------------------------------------------ groups

    async def fork(self, parent: FunctionBranch, key: str, group: Group, chosen: int | None = None) -> None:
        """Run a group to its end. `chosen` is known on replay."""
        loop = asyncio.get_running_loop()
        parent.children = group.branches
        for index, work in enumerate(group.works):
            branch = FunctionBranch(f"{key}.{index}", parent)
            if chosen is not None and index != chosen:
                branch.pending.add(DROP)
            task = loop.create_task(self._run_branch(group, index, branch, work), name=f"process {self._process_id}")
            self._tasks[task] = branch
            branch.can_run = True
            group.branches.append(branch)
            group.tasks.append(task)
        group.chosen = chosen
        self._running += len(group.branches)
        try:
            if group.left:
                self.waits.begin_work(group.left - 1)  # its last branch goes on as the parent
                await group.done
        except asyncio.CancelledError:
            fault = self.interrupted()
            await self._cancel_group(group)
            raise fault from None
        finally:
            parent.children = []
        if self.unloaded:
            raise Unloaded
        parent.unrecorded = max((each.unrecorded for each in group.branches), default=parent.unrecorded)
        if not self._replay.ordered:  # begun when a join kept the stops of its branches to itself
            parent.stopped_through(group.branches)
        elif parent.stopped_through(group.ended_by_stop()):
            raise BranchStopped(f"process {self._process_id} was asked to end")

    async def _run_branch(
        self, group: Group, index: int, branch: FunctionBranch, work: Coroutine[Any, Any, Any]
    ) -> None:
        """One branch. Its end counts at once, before any other branch is resumed."""
        try:
            group.values[index] = await self.drive(work, branch)
        except BaseException as error:  # its parent raises it
            group.errors[index] = error
        task = asyncio.current_task()
        assert task is not None
        if self._tasks.pop(task, None) is None:
            return  # left behind by `_cancel_group`
        group.left -= 1
        if group.chosen is None and not self.unloaded and group.decides(group.errors[index]):
            group.chosen = index
            group.choose(index)
            for each in group.branches:
                self._request_stop(each, DROP, NOT_CHOSEN)
            self._dropping = True
        if group.left:
            if group.chosen == index:
                asyncio.get_running_loop().call_later(DROP_SECONDS, self._cancel_dropped, group)
            self.waits.end_work()
        elif not group.done.done():
            group.done.set_result(None)
            self.wake(group.parent)  # it works from now on, in place of its last branch
        if branch.can_run:
            branch.can_run = False
            self._running -= 1
        self._deliver_when_idle()

    def _cancel_outside(self) -> bool:
        """Cancel dropped branches that wait for something that is not a call of their context. Whether there was any.

        In a journal without order marks the records do not say where that happened, so it must not happen.
        """
        found = False
        for branch in tuple(self._outside):
            if DROP not in branch.pending or not self._replay.ordered:
                continue
            found = True
            branch.deliver_stop()
            for task, each in self._tasks.items():
                if each is branch:
                    task.cancel()
        return found

    def _cancel_dropped(self, group: Group) -> None:
        """The same for dropped branches that wait for such a thing again, or work on, after they were stopped."""
        for task, branch in zip(group.tasks, group.branches, strict=True):
            if not task.done() and not branch.in_call:
                branch.deliver_stop()
                task.cancel()
        if group.left:
            asyncio.get_running_loop().call_later(DROP_SECONDS, self._cancel_dropped, group)

    async def _cancel_group(self, group: Group) -> None:
        late = {task for task in group.tasks if not task.done()}
        for task in late:
            task.cancel()
        if late:
            _, late = await asyncio.wait(late, timeout=DROP_SECONDS)
        for task in late:
            log.error("a branch of process %s does not end when it is cancelled; it is left behind", self._process_id)
            self._tasks.pop(task, None)

    # ------------------------------------------------------------------ results

    async def replayed(self, branch: FunctionBranch, key: str, kind: StepKind, name: str, asked: str) -> Done | None:
        """While replaying: how this call ended before, once that is next; None when it has to be made.

        Raises Diverged when the code makes another call than the recorded one.
        """
        done = self._replay.peek(key, kind, name, asked)
        if kind in FORKS and (done is None or not (done.cut or done.fault is not None)):
            return None  # it makes no result of its own, and its branches have theirs
        if done is None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._held.append(turn)
            await turn
            self._check_loaded()
            return self._replay.answer(key, kind, name, asked)
        if not self._running and not self._outside and self._replay.next_result() is done:
            self._take_recorded(branch, done)
            return done
        asking = PendingAnswer(branch, shown(kind, name, asked), asyncio.get_running_loop().create_future())
        self._asking[key] = asking
        await asking.turn
        self._check_loaded()
        return done

    async def deliver(self, branch: FunctionBranch, done: Done, event: Event | None = None) -> bool:
        """Record what a call came to, in the moment in which its branch may go on with it.

        False when it is a signal, and the branch was asked to stop before its turn: nothing is recorded then, and
        another branch may take the signal.
        """
        if self.unloaded:
            self.record(done, event)
            raise Unloaded
        if not (self._running or self._outside or self._results or self._dropping):
            self.record(done, event)
            self.wake(branch)
            return True
        result = CallResult(branch, done, event, asyncio.get_running_loop().create_future())
        self._results.append(result)
        await result.turn
        self._check_loaded()
        return result.taken

    def record(self, record: StepRecord, event: Event | None = None, repeats: bool = False) -> None:
        """Add a record to the journal. The first one is marked: those after it are in the order of delivery."""
        if self._unmarked:
            self._unmarked = False
            record = replace(record, ordered=True)
        self._journal.record(record, repeats)
        if event is not None:
            self._journal.event(event)

    def recorded_used(self) -> None:
        """A record was used. After the last one, calls that were held are made."""
        if self.replaying and self._replay.next_result() is None:
            self.replaying = False
            for turn in self._held:
                _release(turn)
            self._held.clear()

    def _take_recorded(self, branch: FunctionBranch, done: Done) -> None:
        self._replay.take(done.key)
        self.wake(branch)
        self.recorded_used()

    def _deliver_when_idle(self) -> None:
        """Deliver the next result, if there is one and no branch can run."""
        if self.unloaded or self._passing or not (self._results or self.replaying or self._dropping):
            return
        if self._spins > MAX_SPINS and (self._results or self._next_asking() is not None):
            self._deliver_next()
        elif self._running or any(branch.outside is None or branch.outside.done() for branch in self._outside):
            return  # such a branch is suspended again before it could wait for ever: then this is called again
        elif self._outside:
            self._passing = True
            asyncio.get_running_loop().call_soon(self._pass, self._moves, PASSES)
        else:
            self._deliver_next()

    def _pass(self, moves: int, left: int) -> None:
        """One of the passes after which a branch that waits outside counts as unable to run."""
        if moves == self._moves and left and not self._running:
            asyncio.get_running_loop().call_soon(self._pass, moves, left - 1)
            return
        self._passing = False
        if self.unloaded:
            return
        if moves != self._moves or self._running:
            self._deliver_when_idle()
        elif not (self._dropping and self._cancel_outside()):
            self._deliver_next()

    def _deliver_next(self) -> None:
        self._spins, self._dropping = 0, False
        if not self.replaying:
            if self._results:
                result = self._results.popleft()
                self.record(result.done, result.event)
                self.wake(result.branch)
                _release(result.turn)
            return
        asking = self._next_asking()
        if asking is None:
            self._no_branch_asks()
            return
        done = self._replay.next_result()
        assert done is not None
        del self._asking[done.key]
        self._take_recorded(asking.branch, done)
        _release(asking.turn)

    def _next_asking(self) -> PendingAnswer | None:
        done = self._replay.next_result()
        return None if done is None else self._asking.get(done.key)

    def _no_branch_asks(self) -> None:
        """No branch asks for what is recorded next.

        Where all of them are in calls, none ever will. One that waits for something outside of the context may, when
        that has come: it is waited for as on the first run. But branches that wait for each other's locks or queues,
        beside one whose own result comes later, may wait for ever, and cannot be told from those that wait for a lock
        of the host: they have some seconds.
        """
        if not self._outside:
            self._diverge()
        elif self._timer is None and (self._asking or self._held) and all(map(_waits_for_a_lock, self._outside)):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(DEADLOCK_SECONDS, self._check_deadlock, self._moves)

    def _check_deadlock(self, moves: int) -> None:
        self._timer = None
        if moves != self._moves or self._running:
            self._deliver_when_idle()
        elif self.replaying and self._next_asking() is None:
            self._diverge()

    def _diverge(self) -> None:
        done = self._replay.next_result()
        assert done is not None
        others = [f"{key}: {each.what}" for key, each in self._asking.items()]
        others += ["calls that are not recorded"] if self._held else []
        others += ["what is none of its context's calls"] if self._outside else []
        there = shown(done.kind, done.name, done.asked)
        self.fail(Diverged(self._process_id, done.key, there, f"nothing there; it waits for {', '.join(others)}"))

    def _check_loaded(self) -> None:
        if self.unloaded:
            raise Unloaded

    # ------------------------------------------------------------------ waiting and parking

    async def wait(self, on: WaitOn) -> Any:
        """Wait for one thing: what it brought, None when its time was up, STOP when the branch is asked to stop."""
        found = await self.waits.wait(on)
        if self.unloaded or found is UNLOAD:
            if isinstance(found, Signal):
                self.waits.add_signal(found)
            raise Unloaded
        return found

    async def _park(self, waits: tuple[WaitOn, ...]) -> bool:
        """Leave the process on disk, unless something has happened meanwhile: then its branches get that.

        Another process may have ended after its branch read the row and before this worker listened for its end, so the
        row is read again.
        """
        if self.unloaded:
            return False
        try:
            await self._run.park(*waits)
        except Unloaded:
            self._unload()
            return True
        for wait in waits:
            if wait.kind == "process":
                target = await self._run.watch_end(wait.name)
                if target is None or not target.live:
                    self.waits.process_ended(wait.name)
        return False

    # ------------------------------------------------------------------ what others write (`ProcessListener`)

    def on_event(self, sequence: int, kind: str, payload: Any) -> None:
        """An event that another writer has added to the process."""
        if kind == CANCEL_REQUESTED:
            try:
                self.cancel(payload if isinstance(payload, CancelRequest) else convert(payload, CancelRequest))
            except ValidationError:
                log.error("a cancel request of process %s cannot be read", self._process_id)
        elif kind.startswith(SIGNAL) and sequence not in self.taken:
            self.waits.add_signal(Signal(sequence, kind.removeprefix(SIGNAL), payload))

    def process_ended(self, process_id: str) -> None:
        self.waits.process_ended(process_id)

    def awaited_signals(self) -> tuple[str, ...]:
        return self.waits.signal_names

    def cancel(self, request: CancelRequest) -> None:
        """A cancel request: it stops every branch once, where it waits or runs a step, or at its next call."""
        if self.request is None:
            self.request = request
            self._request_stop(self.root, CANCEL, request)

    def _request_stop(
        self, branch: FunctionBranch, cause: str, request: CancelRequest, inherited: bool = False
    ) -> None:
        if cause in branch.pending or cause in branch.delivered:
            return
        branch.pending.add(cause)
        if inherited:
            branch.inherited.add(cause)
        if branch.children:
            for each in branch.children:
                self._request_stop(each, cause, request, inherited=True)
            return
        branch.control.cancel(request)
        for result in self._results:
            # A signal that has come for it and is not delivered stays for other branches.
            if result.branch is branch and result.done.event is not None:
                result.taken = False
                self._results.remove(result)
                _release(result.turn)
                break
        self.waits.resolve(f"{branch.key}.{branch.calls}" if branch.key else str(branch.calls), STOP)

    # ------------------------------------------------------------------ unloading

    def leave(self) -> None:
        """The Runtime is left: steps that run are cancelled through their gates, every other call raises."""
        for branch in self._tasks.values():
            branch.control.leave()
        self._unload()
        # Later, because a task that is cancelled before its first step never gets to record its end.
        asyncio.get_running_loop().call_soon(self._cancel_code)

    def _cancel_code(self) -> None:
        """Cancel branches whose code waits for something that is not a call: nothing else would end them."""
        for task, branch in list(self._tasks.items()):
            if branch is not self.root and not branch.in_call:
                task.cancel()

    def _unload(self) -> None:
        """Every waiting call raises. Results that were not delivered have happened all the same: they are recorded, in
        the order in which they came."""
        self.unloaded, self.replaying = True, False
        self.waits.resolve_all(UNLOAD)
        for result in self._results:
            self.record(result.done, result.event)
        turns = [*(each.turn for each in self._results), *(each.turn for each in self._asking.values()), *self._held]
        self._results.clear()
        self._asking.clear()
        self._held.clear()
        for turn in turns:
            _release(turn)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def fail(self, error: Exception) -> Unloaded:
        """Something is broken that the function cannot handle: unload it, and let the engine raise the error."""
        if not self.unloaded:
            self.fault = error
            self.leave()
        return Unloaded()

    def interrupted(self) -> Unloaded:
        """A call was cancelled by something that is not this scheduler."""
        return self.fail(
            InvalidProcess(
                f"a call of the context of process {self._process_id!r} was cancelled from outside, which no replay "
                "could repeat: use the `timeout` of the call, or `ctx.any`, instead of asyncio's own"
            )
        )

    async def close(self) -> None:
        """The run is over."""
        self.unloaded = True
        if self._timer is not None:
            self._timer.cancel()
        await self.waits.close()


def _release(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


def _take_back_cancels(branch: FunctionBranch, task: asyncio.Task[Any]) -> None:
    for _ in range(min(branch.own_cancels, task.cancelling())):
        task.uncancel()
    branch.own_cancels = 0


def _waits_for_a_lock(branch: FunctionBranch) -> bool:
    """Whether a branch waits for what another one may hold: a lock, an event, a queue of asyncio's."""
    inner: Any = branch.work
    while inspect.iscoroutine(following := inner.cr_await):
        inner = following
    return inner.cr_code.co_filename in LOCK_FILES
