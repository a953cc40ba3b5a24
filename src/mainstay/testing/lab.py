"""The lab: what a scenario under crash test is given, and what is left of it when all is over."""

from __future__ import annotations

import asyncio
import functools
import os
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ParamSpec, TypeAlias, TypeVar

from msgspec import Struct, field

from mainstay.errors import InvalidInput
from mainstay.ports.store import Store
from mainstay.runtime import Runtime
from mainstay.sessions.definition import Defined
from mainstay.testing.ending import Ending
from mainstay.testing.faults import Ledger, LedgerLine, Point, Seams
from mainstay.testing.seams import SeamAgent, SeamStore

Scenario: TypeAlias = "Callable[[Lab], Awaitable[None]]"


class Lab:
    """What a scenario is given: the store to use, and the world outside to act on."""

    def __init__(self, store: Store, seams: Seams, ledger: Ledger) -> None:
        self._raw, self._seams, self._ledger = store, seams, ledger
        self.store: Store = SeamStore(store, seams)

    @property
    def incarnation(self) -> int:
        """1 in the first run, one more after every kill."""
        return self._seams.incarnation

    def runtime(self, agents: Iterable[Defined] = (), **options: Any) -> Runtime:
        """A Runtime on the lab's store, with every port of its agents watched."""
        return Runtime(self.store, agents=[self.agent(a) for a in agents], **options)

    def agent(self, agent: Defined) -> Defined:
        """An agent whose model and tools are watched, for a Runtime that you make yourself."""
        return SeamAgent(agent, self._seams, self._ledger)

    async def effect(self, name: str, key: str, data: Any = None) -> None:
        """Change the world outside: a line in the ledger that no crash undoes. Call it where a tool has its effect."""
        line = LedgerLine(name, key, self.incarnation, data)

        async def happen() -> None:
            self._ledger.write(line)

        await self._seams.call("effect", f"effect {name}", happen)

    def effect_now(self, name: str, key: str, data: Any = None) -> None:
        """The same for a sync tool."""
        line = LedgerLine(name, key, self.incarnation, data)
        self._seams.call_now("effect", f"effect {name}", lambda: self._ledger.write(line))

    async def mark(self, name: str) -> None:
        """A point of your own."""
        await self._seams.reach("mark", name)

    @property
    def ledger(self) -> list[LedgerLine]:
        """What has happened outside so far, in all incarnations."""
        return self._ledger.lines()

    async def until(self, check: Callable[[Store], Awaitable[bool]]) -> None:
        """Wait until something is on disk; looked at again after each write of this incarnation.

        Not while a call is under way: what its caller has not heard of has not happened yet, and may never be heard of.
        """
        while self._seams.current or not await check(self._raw):
            await self._seams.next_move()


class Played(Struct, frozen=True):
    """One run with its kills. `traces` has the points of each incarnation; `problems` is empty when all went well."""

    ending: Ending
    ledger: list[LedgerLine]
    traces: list[list[Point]]
    problems: list[str] = field(default_factory=list)

    @property
    def model_calls(self) -> int:
        return sum(1 for line in self.ledger if line.name == "model")

    @property
    def effects(self) -> Counter[tuple[str, str]]:
        """How often each effect happened, by name and key."""
        return Counter((line.name, line.key) for line in self.ledger if line.name != "model")

    def count(self, name: str) -> int:
        return sum(1 for line in self.ledger if line.name == name)

    @property
    def repeated(self) -> int:
        return sum(count - 1 for count in self.effects.values())

    @property
    def unknown(self) -> int:
        """Calls whose outcome nobody knows, and processes that were given up."""
        calls = sum(1 for s in self.ending.sessions for c in s.calls if c.outcome == "outcome_unknown")
        return calls + sum(1 for process in self.ending.processes if process.status == "abandoned")


P = ParamSpec("P")
R = TypeVar("R")


def must_run_alone(name: str) -> None:
    """A kit runs event loops of its own, one after another; inside of a running one it cannot."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise InvalidInput(f"an event loop is running here, and {name} runs its own: await {name}_async(…) instead")


async def on_a_thread(kit: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """Run a kit beside the event loop at hand. It ends by itself: giving up waiting does not stop it."""
    return await asyncio.get_running_loop().run_in_executor(None, functools.partial(kit, *args, **options))


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for one play; in memory where there is such a disk: a kill loses no page of it, and syncing is free."""
    memory = "/dev/shm"
    return tempfile.TemporaryDirectory(prefix="mainstay-crash-", dir=memory if os.access(memory, os.W_OK) else None)
