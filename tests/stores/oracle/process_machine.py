"""How a store is driven through lives of processes, and what it compares after every step."""

from __future__ import annotations

import json
from typing import Any

from perdure.lifecycle.process import replay
from perdure.model.process import Event, EventType, ProcessRow, Registration, WakeRow, WakeRule
from perdure.model.session import Node
from perdure.model.write import Advance, ProcessFilter, ProcessScope, Write
from tests.stores.oracle.machine import StoreMachine
from tests.stores.oracle.plain import Plain, deep, short
from tests.stores.oracle.process_log import dues, is_over

PROCESSES = ("job", "job.1", "Übergröße 🦊", "名前", "%_'\"; --", "chat.1.1.0", "e\u0301tude", "last")
WATCHERS = ("chat", "chat-2")
EVENTS = (
    EventType("tick"),
    EventType("news", {"type": "object"}, WakeRule("/loud", "/text")),
    EventType("signal.go"),
    EventType("signal.shout", wake=WakeRule()),
)


class ProcessMachine(StoreMachine):
    """A store and its model, side by side, with processes."""

    # ------------------------------------------------------------------ finding something to write about

    def rows(self, *, over: bool | None = None, owned: bool | None = None, status: str | None = None) -> list[Plain]:
        """Processes that are there still, of those asked for."""
        found = [row for row in self.model.processes.values() if row["pruned"] is None]
        if over is not None:
            found = [row for row in found if is_over(row) is over]
        if owned is not None:
            found = [row for row in found if (row["owner"] is not None) is owned]
        return [row for row in found if status in (None, row["record"]["status"])]

    def held_processes(self) -> list[Plain]:
        return self.rows(owned=True)

    def live_processes(self) -> list[Plain]:
        return self.rows(over=False)

    def ended_processes(self) -> list[Plain]:
        return self.rows(over=True)

    def pruned_processes(self) -> list[Plain]:
        return [row for row in self.model.processes.values() if row["pruned"] is not None]

    def fresh_ids(self) -> list[str]:
        return [name for name in PROCESSES if name not in self.model.processes]

    def pending(self) -> list[Plain]:
        return [wake for wake in self.model.wakes.values() if wake["state"] == "pending"]

    def scope_of(self, row: Plain) -> ProcessScope:
        return ProcessScope(row["registration"]["id"], row["pid"], row["owner"] or "w0", row["generation"])

    def advancing(self, row: Plain, bodies: list[bytes] | tuple[bytes, ...] = (), **more: Any) -> Advance:
        """What the owner of a process might write next; it has looked at everything."""
        after = max(self.model.journals.get(row["pid"], {}), default=-1) + 1
        records = tuple(Node(after + i, body) for i, body in enumerate(bodies))
        more.setdefault("seen", row["record"]["sequence"])
        return Advance(self.scope_of(row), self.tick(), records, **more)

    def asking(self, name: str, **more: Any) -> Registration:
        more.setdefault("recovery", "rerunnable")
        return Registration(name, "function", name="nightly", events=EVENTS, **more)

    # ------------------------------------------------------------------ sending

    async def ask(self, write: Write[Any]) -> Any:
        answer = await super().ask(write)
        if isinstance(answer, dict) and "woken" in answer:
            answer["woken"].sort(key=lambda row: row["pid"])
        if isinstance(answer, list):
            return [as_told(each) if isinstance(each, dict) else each for each in answer]
        return answer

    def expect(self, write: Write[Any]) -> Any:
        answer = super().expect(write)
        if isinstance(answer, list):
            return [short(each) if isinstance(each, dict) else each for each in answer]
        return answer

    def send_again(self, write: Write[Any], expected: Any) -> None:
        """The store has done this already, and its reply was lost: it says so again, and changes nothing."""
        got = self.run(self.ask(write))
        assert got == expected, f"{write} sent again\n was answered {got}\n instead of     {expected}"
        self.run(self.compare())

    # ------------------------------------------------------------------ comparing

    async def compare(self) -> None:
        await super().compare()
        for row in self.model.processes.values():
            await self._compare_process(row)
        await self._compare_lists()
        await self._compare_sight()

    async def _compare_process(self, row: Plain) -> None:
        store, model, pid = self.store, self.model, row["pid"]
        found = await store.process(row["registration"]["id"])
        assert found is not None
        assert deep(found) == row
        events = await store.events(pid)
        assert [_event(each) for each in events] == [short(each) for each in model.events[pid]]
        assert await store.events(pid, row["record"]["sequence"] - 1, 5) == events[-1:]
        assert await store.steps(pid) == sorted(model.journals.get(pid, {}).items())
        if row["pruned"] is None:
            assert replay(event for _, _, event in events) == found.record, "the record is the fold of its events"

    async def _compare_lists(self) -> None:
        store, rows = self.store, list(self.model.processes.values())
        live = [row for row in rows if row["pruned"] is None and not is_over(row)]
        active = [
            row["pid"]
            for row in live
            if row["record"]["status"] == "running"
            and row["stuck"] is None
            and row["registration"]["recovery"] != "externally_owned"
        ]
        assert _pids(await store.active_processes()) == active
        due = sorted((min(dues(row)), row["pid"]) for row in rows if dues(row) and min(dues(row)) <= self.now)
        assert _pids(await store.due_processes(self.now)) == [pid for _, pid in due]
        assert _pids(await store.due_processes(self.now, 1)) == [pid for _, pid in due[:1]]
        kept = [row["pid"] for row in rows if row["pruned"] is None]
        assert _pids(await store.processes(ProcessFilter())) == kept[::-1]
        newest = {pid: events[-1]["place"] for pid, events in self.model.events.items() if events} | self.model.graves
        changes = sorted((place, pid) for pid, place in newest.items())
        assert [(place, row.pid) for place, row in await store.changes()] == changes
        assert await store.last_change() == self.model.places

    async def _compare_sight(self) -> None:
        store, model = self.store, self.model
        for state in ("pending", "enqueued", "discarded"):
            wanted = [short(wake) for _, wake in sorted(model.wakes.items()) if wake["state"] == state]
            assert [as_told(wake) for wake in await store.wakes(state=state)] == wanted
        for session_id in WATCHERS:
            for row in model.processes.values():
                seen = (session_id, row["pid"]) in model.grants
                assert await store.is_granted(session_id, row["registration"]["id"]) is seen
        for row in model.processes.values():
            seeing = sorted(session_id for session_id, pid in model.grants if pid == row["pid"])
            assert await store.grantees(row["registration"]["id"]) == seeing


def as_told(wake: WakeRow | Plain) -> Plain:
    """A wake as the model has it: what it tells is JSON in a body."""
    plain = deep(wake)
    return {**short(plain), "body": short(json.loads(plain["body"]))}


def _event(found: tuple[int, int, Event]) -> Plain:
    place, sequence, event = found
    return short({"place": place, "sequence": sequence} | deep(event))


def _pids(rows: list[ProcessRow]) -> list[int]:
    return [row.pid for row in rows]
