"""Kill an agent at every boundary, resume it, and compare with an undisturbed run.

A scenario is an async function that takes a `Lab` and does what your program does:

    async def scenario(lab: Lab) -> None:
        async with lab.runtime(agents=[agent]) as runtime:
            session = await runtime.session("order-7")
            await session.run("pay the invoice", key="pay-7")

    def test_survives_every_kill() -> None:
        report = crash.kill_everywhere(scenario)
        assert report.lost == 0

It runs once undisturbed, and every call that leaves the engine becomes a point: writes, blobs, requests to the model
and each piece of its answer, tool bodies, effects. Then it runs again for every point, dies there, and is started a
second time, as your program would be. Inputs should carry a `key`, so that the second start says the same thing again
instead of a second thing. With `real=True` each run is a process of its own on a SQLite file, killed with SIGKILL;
then the scenario must be a function at the top level of a file.

In process, the ports of a dead incarnation never answer again. What a tool changes outside without `Lab.effect` cannot
be stopped there; `real=True` has no such gap.
"""

from perdure.testing.crash.injection import MODES, Crash, FaultMode, Ledger, LedgerLine, Point
from perdure.testing.crash.runner import (
    ForkServer,
    KillResult,
    Report,
    Row,
    Statement,
    StoreKind,
    judge,
    kill_everywhere,
    kill_everywhere_async,
    plans,
    play,
    play_async,
)
from perdure.testing.crash.scenario import (
    CallEnding,
    Ending,
    Lab,
    Played,
    ProcessEnding,
    SessionEnding,
    capture,
    scratch,
)

Mode = FaultMode
"""Its first name, kept for programs that import it."""

__all__ = [
    "MODES",
    "CallEnding",
    "Crash",
    "Ending",
    "FaultMode",
    "ForkServer",
    "KillResult",
    "Lab",
    "Ledger",
    "LedgerLine",
    "Mode",
    "Played",
    "Point",
    "ProcessEnding",
    "Report",
    "Row",
    "SessionEnding",
    "Statement",
    "StoreKind",
    "capture",
    "judge",
    "kill_everywhere",
    "kill_everywhere_async",
    "plans",
    "play",
    "play_async",
    "scratch",
]
