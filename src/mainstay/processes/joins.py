"""Branches of a durable function that run at once, and how their ends become one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from mainstay.errors import Diverged, InvalidInput
from mainstay.model.step import Done, StepKind
from mainstay.processes.branch import Branch
from mainstay.processes.branches import Group, Works
from mainstay.processes.caller import Caller, answered, call

DECIDES: dict[StepKind, Callable[[BaseException | None], bool]] = {
    "gather": lambda _: False,
    "all": lambda error: error is not None,
    "any": lambda error: error is None,
}
"""Whether the end of one branch makes all others needless."""


class Joins(Caller):
    """`gather`, `all` and `any`. Which branch was chosen is recorded, before the others are asked to end."""

    async def gather(self, works: Works, return_exceptions: bool) -> list[Any]:
        group = await self._all_ends("gather", works)
        if return_exceptions:
            return [value if error is None else error for value, error in zip(group.values, group.errors, strict=True)]
        if group.error is not None:
            raise group.error
        return group.values

    async def all_of(self, works: Works) -> list[Any]:
        group = await self._all_ends("all", works)
        error = None if group.chosen is None else group.errors[group.chosen]
        if error is not None:
            raise error
        return group.values

    async def first_of(self, works: Works) -> tuple[int, Any]:
        if not works:
            raise InvalidInput("ctx.any needs at least one branch")
        group = await self._all_ends("any", works)
        if group.chosen is None:
            assert group.error is not None
            raise group.error
        return group.chosen, group.values[group.chosen]

    async def _all_ends(self, kind: StepKind, works: Works) -> Group:
        try:
            return await self._fork(kind, works)
        finally:
            for work in works:  # those that were never begun: nobody else can
                if inspect.iscoroutine(work) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                    work.close()

    @call
    async def _fork(self, branch: Branch, kind: StepKind, works: Works) -> Group:
        for work in works:
            if not inspect.iscoroutine(work):
                raise InvalidInput(f"ctx.{kind} runs coroutines such as ctx.sleep(1) or your own, not {work!r}")
        if len(set(map(id, works))) != len(works):
            raise InvalidInput(f"ctx.{kind} was given the same coroutine twice: call the function once for each branch")
        unrecorded, key, asked = branch.unrecorded, branch.next_key(), str(len(works))
        before = await self._answer(branch, key, kind, "", asked)
        branch.unrecorded = unrecorded  # what counts are the calls of its branches
        if before is not None:
            answered(before)
        if before is None and not self._replay.was_forked(key, kind, len(works)) and not self._order.replaying:
            await self._check_cut(branch, key, kind, "", asked)
        # Known beforehand only where results are not handed out in the order in which it was made.
        chosen: int | None = None if before is None else before.value
        group = Group(branch, works, DECIDES[kind], functools.partial(self._choose, key, kind, asked))
        await self._branches.fork(branch, key, group, chosen)
        if chosen is not None and not DECIDES[kind](group.errors[chosen]):
            raise Diverged(self.process_id, f"{key}.{chosen}", f"that it decided {kind}", "another end of that branch")
        return group

    def _choose(self, key: str, kind: StepKind, asked: str, index: int) -> None:
        before = self._replay.take(key)
        if before is None:
            self._order.record(Done(key, kind, "", asked, index, at=self._clock.now()))
        elif before.value != index:
            there = f"that it decided {kind}"
            self._branches.fail(Diverged(self.process_id, f"{key}.{before.value}", there, f"branch {index} before it"))
        else:
            self._order.look_ahead()
