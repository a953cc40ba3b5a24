"""The branches of a durable function that runs here, and how each of them is asked to end.

    branch      a task with a key space of its own; the function itself is the first, the root
    group       branches that were forked together; their parent waits until all of them have ended
    owes        a branch that was asked to end owes an end to whoever asked: it pays at its next call that is not
                recorded, which raises `Cut` there and is recorded as cut off. Paid once, its further calls are its own.

A cancel request is owed by every branch there is; a branch that was not chosen in `any` or `all` owes it to its group.
A parent that waits for its group pays through its branches. Replay pays at the same calls, because they are recorded.

A process is put away by raising `PutAway` in all its branches, whose calls all raise it from then on: it is parked, the
Runtime is left, another worker has taken over, or something is broken (`fault`). Code that swallows that for ever gets
no further step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from msgspec import ValidationError, convert

from mainstay.errors import ForeignTask, InvalidProcess
from mainstay.lifecycle.fold import CANCEL_REQUESTED, SIGNAL
from mainstay.model.process import WaitOn
from mainstay.model.session import CancelRequest
from mainstay.ports.host import Clock
from mainstay.processes.branch import CANCEL, DROP, Branch, Cut, PutAway
from mainstay.processes.journal import ProcessJournal
from mainstay.processes.limits import LOOK, OWN_CANCEL, limit_around
from mainstay.processes.ordering import Ordering
from mainstay.processes.replay import Replay
from mainstay.processes.waiting import AWAY, CUT, Signal, Waiting

R = TypeVar("R")
Works: TypeAlias = Sequence[Coroutine[Any, Any, Any]]

log = logging.getLogger("mainstay.processes")

DROP_SECONDS = 1.0
"""How long a branch that nobody wants may wait for something that is none of its context's calls."""
DEAF = 100
"""So often a branch may swallow that its process is put away: more than any code that unwinds would."""

NOT_CHOSEN = CancelRequest("its group", "another branch was chosen")


class Line(Generic[R]):
    """The code of a branch, handed on step by step: once it has swallowed its end too often it gets no further step.

    Whether it can run is told to `order` with every one of them.
    """

    __slots__ = ("_branch", "_order", "_work")

    def __init__(self, work: Coroutine[Any, Any, R], branch: Branch, order: Ordering) -> None:
        self._work, self._branch, self._order = work, branch, order
        branch.work = work

    def __await__(self) -> Generator[Any, Any, R]:
        work, branch, order = self._work, self._branch, self._order
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        try:
            step = work.send(None)
            while branch.refused <= DEAF:
                if step is LOOK:
                    found = limit_around(work)
                    if found is None and task.cancelling() > cancels:  # by nobody but the code that ran just now
                        found = OWN_CANCEL
                        with contextlib.suppress(asyncio.CancelledError):
                            yield
                        while task.cancelling() > cancels:
                            task.uncancel()
                    step = work.send(found)
                    continue
                if not branch.in_call or order.is_asked:
                    order.suspended(branch, step)
                try:
                    yield step
                except BaseException as error:  # it is the code's to handle, as in any `await`
                    cancels = task.cancelling()
                    if branch.outside is not None:
                        order.resumed(branch)
                    step = work.throw(error)
                else:
                    cancels = task.cancelling()
                    if branch.outside is not None:
                        order.resumed(branch)
                    step = work.send(None)
        except StopIteration as end:
            result: R = end.value
            return result
        finally:
            branch.work = None  # it leads back here, through its context
        self._leave()
        raise PutAway

    def _leave(self) -> None:
        log.error("a durable function swallows that it is put away, and is left: let BaseException through")
        try:
            self._work.close()
        except RuntimeError:
            log.error("it ignores its end too")


class Group:
    """Branches that were forked together. `chosen` is the one that made all others needless, if one did.

    `decides` says whether the end of one of them does that; then `choose` is told, before the others are dropped.
    """

    def __init__(
        self,
        parent: Branch,
        works: Works,
        decides: Callable[[BaseException | None], bool],
        choose: Callable[[int], None],
    ) -> None:
        self.parent, self.works, self.decides, self.choose = parent, works, decides, choose
        self.branches: list[Branch] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.values: list[Any] = [None] * len(works)
        self.errors: list[BaseException | None] = [None] * len(works)
        self.left = len(works)
        self.chosen: int | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def let_through(self) -> list[Branch]:
        """Those of its branches that ended because they were asked to, or have made nothing else of it."""
        ends = zip(self.branches, self.errors, strict=True)
        return [branch for branch, error in ends if isinstance(error, asyncio.CancelledError)]

    @property
    def error(self) -> BaseException | None:
        """What its parent is told when it wants no single one: that it was asked to end, or else the first error."""
        found = [error for error in self.errors if error is not None]
        return next((error for error in found if isinstance(error, Cut)), found[0] if found else None)


class Branches:
    """All branches of one run of one process. `taken` are the signals that its records have used."""

    def __init__(
        self,
        journal: ProcessJournal,
        replay: Replay,
        clock: Clock,
        seconds_until: Callable[[int, int], float],
        park: Callable[[tuple[WaitOn, ...]], Awaitable[bool]],
        rest: Callable[[bool], None],
    ) -> None:
        self._process_id, self._park, self._replay = journal.scope.id, park, replay
        self.waiting = Waiting(clock, seconds_until, self._try_to_park, rest, self.fail)
        self.order = Ordering(self._process_id, journal, replay, self.fail, self._pull_out)
        self._tasks: dict[asyncio.Task[Any], Branch] = {}
        self.request: CancelRequest | None = None
        self.taken: set[int] = set()
        self.away = False
        self.fault: Exception | None = None
        self.root = self._add(asyncio.current_task(), Branch(""))

    def _add(self, task: asyncio.Task[Any] | None, branch: Branch) -> Branch:
        assert task is not None
        self._tasks[task] = branch
        self.waiting.working += 1
        self.order.begin(branch)
        return branch

    # ------------------------------------------------------------------ who calls

    def current(self) -> Branch:
        """The branch that the running task is; anybody else's call could not be told apart on replay."""
        branch = self.known()
        if branch is None or branch.in_step:
            raise ForeignTask(self._process_id)
        if self.away:
            branch.refused += 1
            raise PutAway
        return branch

    async def enter(self) -> Branch:
        """The same for a call that may wait: code that swallows every refusal can be left there, and nowhere else."""
        branch = self.known()
        if branch is None or branch.in_step or (self.away and branch.refused >= DEAF):
            if branch is not None:
                branch.refused += self.away
            await asyncio.sleep(0)
        return self.current()

    def known(self) -> Branch | None:
        """The branch that the running task is, if it is one."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # a thread: no loop runs there
            return None
        return None if task is None else self._tasks.get(task)

    @property
    def alone(self) -> bool:
        return len(self._tasks) == 1

    # ------------------------------------------------------------------ groups

    async def fork(self, parent: Branch, key: str, group: Group, chosen: int | None = None) -> None:
        """Run a group to its end. `chosen` is known on replay."""
        loop = asyncio.get_running_loop()
        parent.children = group.branches
        for index, work in enumerate(group.works):
            branch = Branch(f"{key}.{index}", parent)
            if chosen is not None and index != chosen:
                branch.owes.add(DROP)
            task = loop.create_task(self._live(group, index, branch, work), name=f"process {self._process_id}")
            group.branches.append(self._add(task, branch))
            group.tasks.append(task)
        group.chosen = chosen
        try:
            if group.left:
                self.waiting.working -= 1  # the last of its branches gives it back
                await group.done
        except asyncio.CancelledError:
            fault = self.interrupted()
            await self._end_by_force(group)
            raise fault from None
        finally:
            parent.children = []
        if self.away:
            raise PutAway
        parent.unrecorded = max((each.unrecorded for each in group.branches), default=parent.unrecorded)
        if not self._replay.ordered:  # begun when a join kept to itself what its branches let through
            parent.pay_through(group.branches)
        elif parent.pay_through(group.let_through()):
            raise Cut(f"process {self._process_id} was asked to end")

    async def _live(self, group: Group, index: int, branch: Branch, work: Coroutine[Any, Any, Any]) -> None:
        """One branch. Its end counts at once, before any other branch makes another step."""
        try:
            group.values[index] = await Line(work, branch, self.order)
        except BaseException as error:  # it is its parent's to hear
            group.errors[index] = error
        task = asyncio.current_task()
        assert task is not None
        if self._tasks.pop(task, None) is None:
            return  # left behind long ago
        group.left -= 1
        if group.chosen is None and not self.away and group.decides(group.errors[index]):
            group.chosen = index
            group.choose(index)
            for each in group.branches:
                self._ask(each, DROP, NOT_CHOSEN)
            self.order.dropped()
        if group.left:
            if group.chosen == index:
                asyncio.get_running_loop().call_later(DROP_SECONDS, self._pull, group)
            self.waiting.working -= 1
            self.waiting.check_idle()
        elif not group.done.done():
            group.done.set_result(None)  # its parent works from now on, in place of its last branch
            self.order.wake(group.parent)
        self.order.end(branch)

    def _pull_out(self, branch: Branch) -> bool:
        """End a branch that nobody wants, and that waits for something that is none of our calls; False if it is
        another one."""
        if DROP not in branch.owes or not self._replay.ordered:
            return False
        branch.pay()
        for task, each in self._tasks.items():
            if each is branch:
                task.cancel()
        return True

    def _pull(self, group: Group) -> None:
        """The same for those that wait again for such a thing, or work on, though they were told."""
        for task, branch in zip(group.tasks, group.branches, strict=True):
            if not task.done() and not branch.in_call:
                branch.pay()
                task.cancel()
        if group.left:
            asyncio.get_running_loop().call_later(DROP_SECONDS, self._pull, group)

    async def _end_by_force(self, group: Group) -> None:
        late = {task for task in group.tasks if not task.done()}
        for task in late:
            task.cancel()
        if late:
            _, late = await asyncio.wait(late, timeout=DROP_SECONDS)
        for task in late:
            log.error("a branch of process %s does not end when it is cancelled; it is left behind", self._process_id)
            self._tasks.pop(task, None)

    # ------------------------------------------------------------------ waiting

    async def wait(self, on: WaitOn) -> Any:
        """Wait for one thing: what it brought, None when its time was up. CUT when the branch is asked to end."""
        told = await self.waiting.wait(on)
        if self.away or told is AWAY:
            if isinstance(told, Signal):
                self.waiting.give_back(on.name, told)
            raise PutAway
        return told

    async def _try_to_park(self, waits: tuple[WaitOn, ...]) -> bool:
        parked = not self.away and await self._park(waits)
        if parked:
            self._put_away()
        return parked

    # ------------------------------------------------------------------ news

    def heard(self, sequence: int, kind: str, payload: Any) -> None:
        """An event that somebody else wrote."""
        if kind == CANCEL_REQUESTED:
            try:
                self.cancel(payload if isinstance(payload, CancelRequest) else convert(payload, CancelRequest))
            except ValidationError:
                log.error("a cancel request of process %s cannot be read", self._process_id)
        elif kind.startswith(SIGNAL) and sequence not in self.taken:
            self.waiting.signalled(kind.removeprefix(SIGNAL), Signal(sequence, payload))

    def ended(self, process_id: str) -> None:
        self.waiting.ended(process_id)

    # ------------------------------------------------------------------ the end

    def cancel(self, request: CancelRequest) -> None:
        """A cancel request: it reaches every branch once, where it waits or runs a step, or at its next call."""
        if self.request is None:
            self.request = request
            self._ask(self.root, CANCEL, request)

    def _ask(self, branch: Branch, cause: str, request: CancelRequest, passed: bool = False) -> None:
        if cause in branch.owes or cause in branch.paid:
            return
        branch.owes.add(cause)
        if passed:
            branch.passed.add(cause)
        if branch.children:
            for each in branch.children:
                self._ask(each, cause, request, passed=True)
            return
        branch.gate.cancel(request)
        self.order.withdraw_signal(branch)
        self.waiting.tell(f"{branch.key}.{branch.calls}" if branch.key else str(branch.calls), CUT)

    def leave(self) -> None:
        """The Runtime is left: steps that run are told, everything else is put away."""
        for branch in self._tasks.values():
            branch.gate.leave()
        self._put_away()
        # Later, because a task that is cancelled before its first step never gets to say that it has ended.
        asyncio.get_running_loop().call_soon(self._pull_all)

    def _pull_all(self) -> None:
        for task, branch in list(self._tasks.items()):
            if branch is not self.root and not branch.in_call:
                task.cancel()

    def _put_away(self) -> None:
        self.away = True
        self.waiting.tell_all(AWAY)
        self.order.put_away()

    def fail(self, error: Exception) -> PutAway:
        """Something is broken, and the function cannot know what to make of it: it is put away, and the error told."""
        if not self.away:
            self.fault = error
            self.leave()
        return PutAway()

    def interrupted(self) -> PutAway:
        """A call was cancelled by nobody here."""
        return self.fail(
            InvalidProcess(
                f"a call of the context of process {self._process_id!r} was cancelled from outside, which no replay "
                "could repeat: use the `timeout` of the call, or `ctx.any`, instead of asyncio's own"
            )
        )
