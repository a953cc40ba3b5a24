"""What the calls of a round wait for outside: a person's approval or settlement, or a deferred completion.

Each is a durable wait. It opens with the next write of the round, is answered by whoever is first, and is found again
after a crash by its id, which follows from the call.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mainstay.engine.driver import Run
from mainstay.engine.waits import decode_pending, wait_id, whole
from mainstay.model.codec import encode
from mainstay.model.effect import AskedCall
from mainstay.model.outcome import PendingCall
from mainstay.model.plugin import Decision
from mainstay.model.record import Answered, Started
from mainstay.model.session import Answer, WaitRow
from mainstay.model.tool import Artifact, Failed, ToolOutcome
from mainstay.plugins.filters import withheld
from mainstay.plugins.turn import plugins_of
from mainstay.ports.store import Store

_ANSWER = msgspec.json.Decoder(Answer).decode
RESERVED = "its tool has not handed it over yet"
"""Why a deferred call's wait is open before its body has returned: only then may recovery run the body again."""


def completion_of(run: Run, key: str) -> str:
    """The wait for the completion of a deferred call. It outlives attempts that failed, but not a person's word to have
    the call made again: that answered it, and the next attempt has another."""
    again = [r for r in run.records if type(r) is Started and r.call == key and r.answer is not None]
    return wait_id(f"{run.turn_id}.{key}", "deferred", 1 + len(again))


class Questions:
    """`waiting` are the calls that only somebody outside can end; `opened` are waits that the next write must bring;
    `_told` are answers that no record tells of yet."""

    def __init__(self, store: Store, run: Run) -> None:
        self._store, self._run = store, run
        self.waiting: dict[str, PendingCall] = {}
        self.opened: list[WaitRow] = []
        self._told: dict[str, Answered] = {}

    # ------------------------------------------------------------------ asking

    def ask(
        self,
        call: AskedCall,
        kind: Any,
        known: dict[str, WaitRow],
        reason: str,
        decisions: tuple[Decision, ...] = (),
    ) -> WaitRow | None:
        """Wait for somebody, unless the answer is there already: then it is returned."""
        wait = known.get(self.wait_id(call.call, kind))
        if wait is not None and wait.state != "open":
            return wait
        if wait is None:
            pending = self._pending(call, kind, reason=reason, decisions=decisions)
            self.opened.append(self._row(call, kind, pending))
        else:
            pending = decode_pending(wait.body)
        self.waiting[call.call] = pending
        return None

    def reserve(self, call: AskedCall) -> WaitRow:
        """The wait of a deferred call: its key is durable before its body can hand it out."""
        return self._row(call, "deferred", self._pending(call, "deferred", reason=RESERVED))

    def hand_over(self, call: AskedCall, seconds: float | None, artifacts: tuple[Artifact, ...]) -> None:
        """A deferred call's body is over: the rest is for whoever has its key."""
        due = None if seconds is None else self._run.clock.now() + int(seconds * 1000)
        pending = self._pending(call, "deferred", due=due, artifacts=artifacts)
        self.waiting[call.call] = pending
        self.opened.append(self._row(call, "deferred", pending))
        self._run.journal.refer([artifact.digest for artifact in artifacts])

    def over(self, call: AskedCall, outcome: ToolOutcome) -> Answered | None:
        """How the wait of a call that ends had ended. A completion that was reserved in vain is taken back: its key is
        worth nothing any more. One of a cancelled turn is closed with that."""
        told = self._told.pop(call.call, None)
        if told is not None and told.reason and told.verdict in ("failed", "error") and isinstance(outcome, Failed):
            told = msgspec.structs.replace(told, reason=outcome.message)  # as plugins let it be told
        if told is not None or not call.deferred or self._run.gate.request is not None:
            return told
        self.opened.append(self._revoked(call, "deferred"))
        return Answered("revoked")

    def _revoked(self, call: AskedCall, kind: str) -> WaitRow:
        pending = msgspec.structs.replace(self._pending(call, kind), args={})
        return msgspec.structs.replace(self._row(call, kind, pending), state="revoked")

    def handed_over(self, call: AskedCall, known: dict[str, WaitRow]) -> bool:
        """Whether a deferred call's body is over, or its completion has come: it is not run again.

        A key that was taken back tells that the body failed, and no record tells how: another attempt gets another key.
        """
        wait = known.get(self.wait_id(call.call, "deferred"))
        if wait is not None and wait.state == "revoked":
            self._told[call.call] = Answered("revoked")
            return False
        return wait is not None and (wait.state != "open" or decode_pending(wait.body).reason != RESERVED)

    async def completed(self, call: AskedCall, last: bool) -> bool:
        """Whether a deferred call was completed while its body ran: that was acknowledged, however the body ends.

        `last`: no attempt comes after this one, so its key is taken back at once. The store decides which came first;
        whoever comes later is told so, and not that a completion was accepted which nobody would hear of.
        """
        if last and not self._run.gate.shut:
            await self._run.journal.flush((self._revoked(call, "deferred"),))
        wait = await self._store.wait(self.wait_id(call.call, "deferred"))
        return wait is not None and wait.state == "resolved"

    def take_opened(self) -> tuple[WaitRow, ...]:
        opened, self.opened = self.opened, []
        return tuple(opened)

    # ------------------------------------------------------------------ answers

    async def final(self) -> dict[str, WaitRow]:
        """The waits of the calls in hand, by call, in a turn that ends: no answer is accepted after this.

        The store refuses answers to a cancelled turn by itself. In an aborted one, questions that are open are revoked
        first: an answer that was accepted between this look and the commit would be lost.
        """
        waits = await self.known()
        if self._run.gate.request is None:
            calls = self._run.machine.state.calls
            still = [wait for wait in waits.values() if wait.state == "open"]
            if still:
                await self._run.journal.flush(tuple([self._revoked(calls[wait.call], wait.kind) for wait in still]))
                waits = await self.known()
        return {wait.call: wait for wait in sorted(waits.values(), key=lambda wait: wait.state != "open")}

    async def known(self) -> dict[str, WaitRow]:
        """The waits of the calls in hand as they are on disk: each by its id, however many a long session has had."""
        found = {}
        for call in list(self._run.machine.state.calls.values()):
            kinds = ("approval",) if not call.started else ("recovery", "deferred") if call.deferred else ("recovery",)
            for kind in kinds:
                wait = await self._store.wait(self.wait_id(call.call, kind))
                if wait is not None and (wait := await whole(self._store, wait)) is not None:
                    found[wait.id] = wait
        return found

    def hear(self, call: AskedCall, wait: WaitRow, refused: str = "") -> Answer | None:
        """The answer; None when there is none in time. The next record of the call tells of it: the wait itself goes
        with the commit."""
        answer = None if wait.answer is None else self._passed(call, _ANSWER(wait.answer), refused)
        told = Answered(wait.state) if answer is None else Answered(answer.verdict, answer.by, answer.reason)
        self._told[call.call] = told
        return answer

    def _passed(self, call: AskedCall, answer: Answer, refused: str) -> Answer:
        """The answer with its reason as the filters of the session let it be recorded; its value passes them later.

        `refused`: the plugin that keeps the session from opening, so that nobody can look at it.
        """
        plugins = plugins_of(self._run)
        if not answer.reason or (plugins is None and not refused):
            return answer
        if plugins is None:
            return msgspec.structs.replace(answer, reason=withheld("reason", refused))
        filters = plugins.filters
        if filters is None:
            return answer
        reason = filters.value("answer", answer.reason, f"{self._run.turn_id}.{call.call}", call.name)
        return msgspec.structs.replace(answer, reason=reason)

    def heard(self, call: AskedCall) -> tuple[dict[str, str] | None, Answered | None]:
        """Who approved of a call that begins, or who had it begin again."""
        told = self._told.pop(call.call, None)
        return ({"by": told.by}, None) if told is not None and told.verdict == "approved" else (None, told)

    @staticmethod
    def shown(wait: WaitRow) -> PendingCall:
        """What whoever answered was shown: an approval is for that and nothing else."""
        return decode_pending(wait.body)

    @staticmethod
    def artifacts(wait: WaitRow) -> tuple[Artifact, ...]:
        """What a deferred call had put when its body was over."""
        return decode_pending(wait.body).artifacts

    # ------------------------------------------------------------------ names

    def names(self) -> tuple[str, ...]:
        """The waits that the turn parks on."""
        return tuple(self.wait_id(key, pending.kind) for key, pending in self.waiting.items())

    def wait_id(self, key: str, kind: str) -> str:
        if kind == "deferred":
            return completion_of(self._run, key)
        attempt = self._run.machine.state.calls[key].attempts if kind == "recovery" else 1
        return wait_id(f"{self._run.turn_id}.{key}", kind, attempt)

    def _pending(self, call: AskedCall, kind: Any, **told: Any) -> PendingCall:
        return PendingCall(
            f"{self._run.turn_id}.{call.call}", kind, call.name, call.args, self._run.clock.now(), **told
        )

    def _row(self, call: AskedCall, kind: str, pending: PendingCall) -> WaitRow:
        scope, name = self._run.scope, self.wait_id(call.call, kind)
        return WaitRow(name, scope.sid, scope.turn, call.call, kind, "open", pending.due, encode(pending))
