"""What every session handle of a Runtime works with: the store, the turns, the inbox, and answers from outside."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from mainstay.engine.journal import spill, write_referring
from mainstay.engine.lease import Worker
from mainstay.engine.supervisor import Supervisor
from mainstay.engine.waits import named, whole
from mainstay.errors import (
    RuntimeClosed,
    SessionDeleted,
    StaleSettings,
    StoreInherited,
    TurnFailed,
    UnknownSession,
    WrongLoop,
)
from mainstay.model.codec import encode
from mainstay.model.ids import mint, turn_id
from mainstay.model.llm import ModelChoice
from mainstay.model.process import ProcessRow
from mainstay.model.record import Spilled
from mainstay.model.session import Answer, CancelRequest, SessionRow
from mainstay.model.settings import Settings, choosing, dump, load
from mainstay.model.write import Cancel, CancelReceipt, CancelStatus, Configure, Resolve, Resolved
from mainstay.observe.feed import Feed
from mainstay.ports.host import Clock, Random
from mainstay.ports.store import Store
from mainstay.processes.local import LocalEngine
from mainstay.processes.service import ProcessService
from mainstay.processes.worker import ProcessWorker
from mainstay.sessions.definition import Definition
from mainstay.sessions.inbox import Inbox
from mainstay.sessions.keeper import TaskKeeper
from mainstay.sessions.news import News
from mainstay.sessions.result import TurnResult
from mainstay.sessions.turns import Turns
from mainstay.sessions.wakes import Vet, Wakes
from mainstay.stores import fork_guard

SETTLEMENTS = ("rerun", "done", "failed")


class Desk:
    """Shared by the session handles of one Runtime.

    `stirred`: something here has changed, or somebody here has begun to wait; `looked`: the watch has been round.
    """

    def __init__(
        self, worker: Worker, feed: Feed, turns: Turns, definitions: Mapping[str, Definition], inbox: Inbox, runs: bool
    ) -> None:
        self.feed, self.turns, self.inbox, self.definitions = feed, turns, inbox, definitions
        self._worker, self._runs = worker, runs
        self.store: Store = turns.store
        self.clock: Clock = turns.clock
        self._random: Random = turns.random
        self._loop = asyncio.get_running_loop()
        self._pid = fork_guard.pid()
        self.closed = False
        self.stirred, self.looked = asyncio.Event(), asyncio.Event()

    def employ(self, processes: ProcessService, work: ProcessWorker, supervisor: Supervisor, vet: Vet) -> None:
        """Who works on processes here: sessions start them, and hear of them what `vet` lets pass."""
        self.processes, self._work, self.circles = processes, work, work.circles
        self.news = News(self.feed, self.store, supervisor)
        self.wakes = Wakes(self.turns, supervisor, self.definitions, self.worker_for, vet)
        local = LocalEngine(self.store, self._worker.id, lambda: self._worker.alive)
        self.tasks = TaskKeeper(local, processes, supervisor)
        work.serve([local])
        work.awaiting.on_need = self.stirred.set
        work.on_news, work.on_wake, self.turns.on_woken = self._changed, self.wakes.call, work.woken

    def _changed(self, row: ProcessRow) -> None:
        self.stirred.set()
        self.wakes.of(row)
        self.news.of(row)
        self.tasks.of(row)

    @property
    def worker_id(self) -> str:
        return self._worker.id

    @property
    def lived(self) -> int:
        return self._worker.lived

    def check(self) -> None:
        """Refuse use after the end, from another loop, or in a forked child."""
        if self.closed:
            raise RuntimeClosed
        if self._pid != fork_guard.pid():
            raise StoreInherited(self._pid, fork_guard.pid())
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop

    def definition(self, agent: str) -> Definition | None:
        return self.definitions.get(agent)

    def mint(self, prefix: str) -> str:
        return mint(prefix, self.clock.now(), self._random.bits(40))

    def worker_for(self, agent: str) -> str | None:
        """This worker, if it may work on that agent's turns."""
        return self._worker.id if self.runs and agent in self.definitions and not self.turns.draining else None

    @property
    def runs(self) -> bool:
        """Whether turns are worked on here: with agents, and in a store that is no copy waiting to be restored."""
        return self._runs and self.store.held() is None

    async def outcome(self, session_id: str, turn: int, known: bool, host: bool = False) -> TurnResult[Any]:
        """How a turn ends or parks. `known`: it may have done so already. `host`: that it is queued is told too."""
        residents = self.turns.residents
        future = residents.expect(session_id, turn, host)  # before looking: it may end meanwhile, and is told only once
        resident = residents.of(session_id)
        try:
            # Whoever works on it here tells its events first, and then its end.
            if resident.turn != turn and (known or resident.task is None):
                result = await self.on_disk(session_id, turn)
                if result is None and host:
                    result = await self.turns.queued(session_id, turn)
                if result is not None:
                    residents.withdraw(session_id, turn, future)
                    return result
            inside = self.circles.check((session_id, turn))
        except BaseException:  # nobody waits any more
            residents.withdraw(session_id, turn, future)
            raise
        if inside is None:
            return await future
        self.stirred.set()
        with self.circles.waiting((session_id, turn)):
            return await future

    async def on_disk(self, session_id: str, turn: int) -> TurnResult[Any] | None:
        """How a turn ended or parked as far as the store knows; None while it is under way."""
        row = await self.store.session(session_id)
        if row is None:
            raise UnknownSession(session_id)
        if row.deleted:
            raise SessionDeleted(session_id)
        turn = await self.turns.archive.joined(row, turn)
        result = await self.turns.archive.result(row, turn)
        if result is None and row.turn == turn and row.state == "parked":
            return await self.turns.archive.parked(row, (await self.turns.view(row)).messages)
        result = result or await self.turns.archive.refused(row, turn)
        if result is None and row.turn is not None and row.turn <= turn and row.state == "stuck":
            # Nobody works on it, nor on what was said after it, until a person looks: whoever waits must hear why.
            raise TurnFailed(turn_id(session_id, row.turn), "stuck", {"reason": row.reason})
        return result

    async def resolve(self, wait_id: str, answer: Answer | None) -> Resolved:
        """Resolve a wait, and see to it that its turn goes on."""
        agents = tuple(self.definitions) if self.runs and not self.turns.draining else ()
        data = encode(answer)
        _, blobs = await spill(self.store, data)
        given = Spilled(blobs[0], len(data)) if blobs else answer
        resolve = Resolve(wait_id, given, self.clock.now(), self._worker.id if agents else None, agents)
        write = functools.partial(self.turns.write, named(wait_id)[0], resolve)
        put_again = functools.partial(spill, self.store, data)
        resolved: Resolved = await (write_referring(write, put_again) if blobs else write())
        if resolved.status == "accepted" and resolved.row is not None:
            self.goes_on(resolved.row)
            return resolved
        wait = None if resolved.wait is None else await whole(self.store, resolved.wait)
        if wait is not None:
            return replace(resolved, wait=wait)
        return await self._too_late(wait_id, answer) or Resolved("unknown")

    async def _too_late(self, wait_id: str, answer: Answer | None) -> Resolved | None:
        """How a wait of a committed turn had ended; None when there was none."""
        row = await self.store.session(named(wait_id)[0])
        wait = None if row is None or row.deleted else await self.turns.archive.recalled(row, wait_id)
        if wait is None:
            return None
        if wait.state == "cancelled" and answer is not None and answer.verdict in SETTLEMENTS:
            return None  # what became of it is still open, and may be told
        return Resolved("already_resolved", wait, row)

    async def set_options(self, session_id: str, agent: str, options: Mapping[str, Any]) -> None:
        """Make the options of a session's plugins durable: recovery has no host code to ask for them."""
        await self._edit(session_id, agent, lambda old, _: replace(old, options=old.options | dict(options)))

    async def set_choice(self, session_id: str, agent: str, choice: ModelChoice | None, reset: bool) -> None:
        """Make durable which model the turns of a session ask: those whose input is accepted from now on."""

        def edit(old: Settings, row: SessionRow) -> Settings:
            before, wanted = None if reset else old.choice, choice
            if wanted is None or before is None:
                wanted = wanted or before
            else:
                settings = before.settings if wanted.settings is None else wanted.settings.over(before.settings)
                wanted = ModelChoice(wanted.model or before.model, settings)
            return choosing(old, wanted, row.next if row.turn is None else row.turn, row.next)

        await self._edit(session_id, agent, edit)

    async def _edit(self, session_id: str, agent: str, edit: Callable[[Settings, SessionRow], Settings]) -> None:
        while True:
            row = await self.store.session(session_id) or SessionRow(0, session_id, agent)
            wanted = dump(edit(load(row.settings), row))
            if wanted == row.settings:
                return
            configure = Configure(session_id, agent, wanted, self.clock.now(), row.settings, next=row.next)
            try:
                await self.store.write(configure)
            except StaleSettings:
                continue  # somebody else changed something: on top of that
            return

    async def cancel(self, session_id: str, agent: str, request: CancelRequest, turn: int | None) -> CancelStatus:
        """Ask a turn to stop: the running one, or the given one. The request is on disk when this returns."""
        write = Cancel(session_id, request, self.clock.now(), turn, self.worker_for(agent))
        receipt: CancelReceipt = await self.turns.write(session_id, write)
        if receipt.status == "requested" and receipt.row is not None:
            self.cancelled(receipt.row, request, receipt.turn)
        return receipt.status

    def cancelled(self, row: SessionRow, request: CancelRequest, turn: int | None) -> None:
        """A cancel request is on disk: pass it to the running turn, or work on the turn it woke."""
        resident = self.turns.residents.of(row.id)
        if resident.run is not None and resident.run.scope.turn == turn:
            resident.run.gate.cancel(request)
        elif resident.task is not None and turn is not None:
            resident.cancel = (turn, request)
        else:
            self.goes_on(row)

    def deleted(self, session_id: str) -> None:
        """A session was deleted here: end what is in memory of it, and let processes hear of it."""
        self.turns.residents.deleted(session_id)
        self.feed.end(session_id)
        self._work.session_deleted(session_id)

    def goes_on(self, row: SessionRow) -> None:
        """Something new is known of an open turn that is ours, or nobody's while we drain."""
        self.stirred.set()
        if row.owner != self._worker.id or row.turn is None:
            return
        resident = self.turns.residents.of(row.id)
        if resident.run is not None:
            resident.run.gate.nudge()
        elif resident.task is None:
            self.turns.launch(row)
