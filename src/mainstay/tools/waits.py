"""The durable waits of a turn's calls: a person's approval or settlement, or the completion of a deferred call.

A wait is a row that opens with a write of the turn, is resolved by the first answer, and is found again after a crash
by its id, which follows from the call. This module makes the rows and reads them; which calls wait is in the records.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from mainstay.engine.driver import Run
from mainstay.engine.waits import decode_pending, wait_id, whole
from mainstay.model.codec import encode
from mainstay.model.effect import AskedCall
from mainstay.model.outcome import PendingCall
from mainstay.model.record import Started
from mainstay.model.session import Answer, WaitRow
from mainstay.plugins.calls import withheld
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


class CallWaits:
    """The waits of the calls of one turn. Holds no state: every answer comes from the store or the turn's records."""

    def __init__(self, store: Store, run: Run) -> None:
        self._store, self._run = store, run

    # ------------------------------------------------------------------ rows

    def wait_id(self, key: str, kind: str) -> str:
        if kind == "deferred":
            return completion_of(self._run, key)
        # An answer about recovery stands for one attempt: about the next one a person is asked anew.
        attempt = self._run.machine.state.calls[key].attempts if kind == "recovery" else 1
        return wait_id(f"{self._run.turn_id}.{key}", kind, attempt)

    def pending(self, call: AskedCall, kind: Any, **told: Any) -> PendingCall:
        """What is shown to those who may answer."""
        call_id = f"{self._run.turn_id}.{call.call}"
        return PendingCall(call_id, kind, call.name, call.args, self._run.clock.now(), **told)

    def row(self, call: AskedCall, kind: str, pending: PendingCall) -> WaitRow:
        scope, name = self._run.scope, self.wait_id(call.call, kind)
        return WaitRow(name, scope.sid, scope.turn, call.call, kind, "open", pending.due, encode(pending))

    def reserved(self, call: AskedCall) -> WaitRow:
        """The wait of a deferred call: its key is durable before its body can hand it out."""
        return self.row(call, "deferred", self.pending(call, "deferred", reason=RESERVED))

    def revoked(self, call: AskedCall, kind: str) -> WaitRow:
        """The same wait, closed: from this write on the store refuses answers."""
        pending = replace(self.pending(call, kind), args={})
        return replace(self.row(call, kind, pending), state="revoked")

    # ------------------------------------------------------------------ reading

    async def known(self) -> dict[str, WaitRow]:
        """The waits of the calls without an outcome, as they are on disk: each by its id, so that the cost does not
        grow with the waits that a long session has had."""
        found = {}
        for call in list(self._run.machine.state.calls.values()):
            kinds = ("approval",) if not call.started else ("recovery", "deferred") if call.deferred else ("recovery",)
            for kind in kinds:
                wait = await self._store.wait(self.wait_id(call.call, kind))
                if wait is not None and (wait := await whole(self._store, wait)) is not None:
                    found[wait.id] = wait
        return found

    async def final(self) -> dict[str, WaitRow]:
        """The waits by call in a turn that ends: no answer is accepted after this.

        The store refuses answers to a cancelled turn by itself. In an aborted one, questions that are open are revoked
        first: an answer that was accepted between this read and the commit would be lost.
        """
        waits = await self.known()
        if self._run.gate.request is None:
            calls = self._run.machine.state.calls
            still = [wait for wait in waits.values() if wait.state == "open"]
            if still:
                await self._run.journal.flush(tuple([self.revoked(calls[wait.call], wait.kind) for wait in still]))
                waits = await self.known()
        return {wait.call: wait for wait in sorted(waits.values(), key=lambda wait: wait.state != "open")}

    async def completed(self, call: AskedCall, last: bool) -> bool:
        """Whether a deferred call was completed while its body ran: that was acknowledged, however the body ends.

        `last`: no attempt comes after this one, so its key is revoked at once. The store decides which came first: a
        completion that comes later is refused, and not accepted where nothing would read it. A cancelled turn needs no
        revocation: the store refuses its completions.
        """
        if last and self._run.gate.request is None:
            await self._run.journal.flush((self.revoked(call, "deferred"),))
        wait = await self._store.wait(self.wait_id(call.call, "deferred"))
        return wait is not None and wait.state == "resolved"

    def answer(self, call: AskedCall, wait: WaitRow, refused: str = "") -> Answer | None:
        """The answer that a wait holds; None when it ended without one. Its reason is as the filters of the session let
        it be recorded; its value passes them later.

        `refused`: the plugin that keeps the session from opening, so that it could not look at the reason.
        """
        if wait.answer is None:
            return None
        answer, plugins = _ANSWER(wait.answer), plugins_of(self._run)
        if not answer.reason or (plugins is None and not refused):
            return answer
        if plugins is None:
            return replace(answer, reason=withheld("reason", refused))
        filters = plugins.filters
        if filters is None:
            return answer
        reason = filters.value("answer", answer.reason, f"{self._run.turn_id}.{call.call}", call.name)
        return replace(answer, reason=reason)


def body_is_over(wait: WaitRow) -> bool:
    """Whether the body of a deferred call handed its completion over, or that has come: then it is not run again."""
    return wait.state != "open" or decode_pending(wait.body).reason != RESERVED
