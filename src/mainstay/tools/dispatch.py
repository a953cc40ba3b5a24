"""The tools' side of a turn: which calls start with their reply, and the rounds in which they run."""

from __future__ import annotations

from collections.abc import Sequence

from mainstay.engine.driver import Parked, Run
from mainstay.model.effect import RunTools
from mainstay.model.message import Part
from mainstay.model.record import INTERRUPTED, Faltered
from mainstay.model.tool import Failed
from mainstay.model.transcript import calls_of
from mainstay.plugins.turn import plugins_of
from mainstay.tools.attempt import needs_of
from mainstay.tools.prepare import inspect
from mainstay.tools.round import Round
from mainstay.tools.workshop import Workshop
from mainstay.turn.native import asked_calls
from mainstay.turn.states import Phase


class Dispatcher(Workshop):
    """Handles RunTools for every turn of a Runtime."""

    def admit(self, run: Run, step: int, parts: Sequence[Part]) -> tuple[int, ...]:
        """Which calls of a reply start with its record: nothing to ask, nothing to wait for."""
        plugins = plugins_of(run)
        if plugins is not None and plugins.vets:
            return ()  # somebody has to be asked first, and what he says is recorded with the start
        calls = calls_of(parts, step)
        if not calls:
            return ()
        started = []
        for index, asked in enumerate(asked_calls(calls, ()).values()):
            ready = inspect(run.agent.catalog, asked, f"{run.turn_id}.{asked.call}")
            if isinstance(ready, Failed) or ready.entry.provider is not None:
                continue
            spec = ready.entry.spec
            # What goes to the background says so in a record of its own: after a crash it must be sent there again.
            plain = spec.approval == "never" and not spec.deferred and not spec.background
            if plain and self.admission.try_take(needs_of(spec)):
                run.held[asked.call] = ready
                started.append(index)
        return tuple(started)

    async def run(self, run: Run, effect: RunTools) -> Parked | None:
        round_ = Round(self, run, effect)
        try:
            return await round_.go()
        finally:
            round_.abandon()

    async def conclude(self, run: Run, refused: str = "") -> None:
        """The turn is cancelled or aborted: record how the calls in hand end."""
        state = run.machine.state
        if state.calls and state.phase is Phase.TOOLS:
            await Round(self, run, RunTools(state.step, tuple(state.calls.values()))).conclude(refused)

    def withdraw(self, run: Run) -> None:
        """The Runtime is left before calls began whose start is in their reply's record: say that they did not."""
        now = self.clock.now()
        for key in run.held:
            step = int(key.partition(".")[0])
            run.record(Faltered(INTERRUPTED, "the runtime was closed before it began", now, 0, step, key, now))

    def release(self, run: Run) -> None:
        """Give back what was reserved for calls that never ran here. Until then `held` tells that they did not."""
        for ready in run.held.values():
            self.admission.release(needs_of(ready.entry.spec))
        run.held.clear()
