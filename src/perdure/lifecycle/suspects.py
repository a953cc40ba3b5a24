"""Which turns and processes are suspected of the deaths of their workers.

A turn or process that a worker ran when it died may have killed it, or only have been there. The rule that tells them
apart:

- A first death changes nothing: everything is taken over at once.
- What was there at a second death, without a new record since the first, is a *suspect*.
- An OS process runs one suspect at a time, beside its other work. If it dies, that death counts against the suspect
  only; everything else that was there is not counted.
- A suspect that outlives twice the longest life that ended in a counted death, and at least ten seconds, makes room for
  the next one and is a suspect no more.
- After three deaths as the only suspect it is stuck, until a person looks.

Lives are measured on the worker's own monotonic clock, from the claim to its last beat before the death. When a death
is noticed says nothing: the next worker may start days later.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from perdure.model.session import Death, Deaths, WorkerRow

SUSPECT_AFTER = 2
STUCK_AFTER = 3
LEAST_LIFE = 10_000
"""Milliseconds that a suspect must outlive in any case. A worker beats at least this often, so no life is measured
shorter by more than that."""

REASON = (
    f"{STUCK_AFTER} workers in a row took {{}} over and died without a new record, with no other suspect in their hands"
)


def death_of(worker: WorkerRow, gone: Iterable[WorkerRow]) -> Death:
    """The death of a worker, of which `gone` tell: those of one OS process die one death."""
    with_it = [row for row in gone if row.id == worker.id or (worker.process and row.process == worker.process)]
    running = [row.suspect for row in with_it if row.suspect is not None]
    return Death(worker.id, worker.lived, running[0] if running else None)


def after(mark: Deaths | None, scope: int, death: Death) -> Deaths:
    """What is known of a scope after the death of its owner."""
    found = Deaths(scope) if mark is None else mark
    if death.suspect is not None and death.suspect != scope:
        return found
    life = death.lived - found.since if found.worker == death.worker else 0
    alone = found.alone + (death.suspect == scope)
    return replace(found, counted=found.counted + 1, alone=alone, life=max(found.life, life))


def is_suspect(mark: Deaths) -> bool:
    return mark.counted >= SUSPECT_AFTER


def is_stuck(mark: Deaths) -> bool:
    return mark.alone >= STUCK_AFTER


def room_after(marks: Iterable[Deaths]) -> int:
    """Milliseconds after which a suspect makes room for the next one."""
    return max([LEAST_LIFE, *[2 * mark.life for mark in marks]])


def excused(mark: Deaths) -> Deaths:
    """What is known of a suspect that has outlived the deaths so far. How long lives were is remembered."""
    return replace(mark, counted=0, alone=0)


def why(mark: Deaths) -> str:
    """Why it is a suspect, for a person."""
    return (
        f"{mark.counted} workers died with it in their hands, without a new record: it is run with no other suspect "
        f"beside it, and {mark.alone} of {STUCK_AFTER} died so"
    )
