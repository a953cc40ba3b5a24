"""The part of the model that says which turns and processes are suspected of the deaths of their workers."""

from __future__ import annotations

from typing import Literal

from perdure.model.session import Death
from perdure.model.write import Outlived
from tests.stores.oracle.plain import Plain


class DeathsModel:
    """`deaths` by scope: a session's number, or the negative of a process's. A scope without one has seen no death."""

    workers: dict[str, Plain]

    def __init__(self) -> None:
        self.deaths: dict[int, Plain] = {}

    def _claim(
        self, scope: int, owner: str | None, worker: str, death: Death | None, lived: int
    ) -> Literal["runs", "suspect", "held", "stuck"]:
        """What a claim does to a scope that `owner` had; nothing is changed where it is held back."""
        known = self.deaths.get(scope)
        if owner is None and known is None:
            return "runs"
        mark: Plain = {"scope": scope, "counted": 0, "alone": 0, "life": 0, "worker": "", "since": 0}
        mark |= known or {}
        if owner is not None:
            self._died(mark, owner, death)
        if mark["alone"] >= 3:
            self.deaths[scope] = mark
            return "stuck"
        suspect = mark["counted"] >= 2
        if suspect and self._process_has_another(worker, scope):
            return "held"
        self.deaths[scope] = mark | {"worker": worker, "since": lived}
        if suspect and worker in self.workers:
            self.workers[worker]["suspect"] = scope
        return "suspect" if suspect else "runs"

    @staticmethod
    def _died(mark: Plain, owner: str, death: Death | None) -> None:
        blamed = None if death is None else death.suspect
        if blamed not in (None, mark["scope"]):
            return  # another one was the suspect
        mark["counted"] += 1
        mark["alone"] += blamed == mark["scope"]
        who, lived = (owner, 0) if death is None else (death.worker, death.lived)
        if mark["worker"] == who:
            mark["life"] = max(mark["life"], lived - mark["since"])

    def _runs(self, worker: str) -> int | None:
        scope = self.workers[worker]["suspect"] if worker in self.workers else None
        return scope if scope in self.deaths and self.deaths[scope]["worker"] == worker else None

    def _process_has_another(self, worker: str, scope: int) -> bool:
        if worker not in self.workers:
            return False
        process = self.workers[worker]["process"]
        beside = [w for w, row in self.workers.items() if w == worker or (process and row["process"] == process)]
        return any(self._runs(each) not in (None, scope) for each in beside)

    def _is_suspect(self, scope: int) -> bool:
        return scope in self.deaths and self.deaths[scope]["counted"] >= 2

    def _forget_deaths(self, scope: int) -> None:
        """It has a new record, is parked, or is over."""
        self._stop_suspecting(scope)
        self.deaths.pop(scope, None)

    def _stop_suspecting(self, scope: int) -> None:
        """No worker runs it any more."""
        mark = self.deaths.get(scope)
        if mark is not None and self._is_suspect(scope) and mark["worker"] in self.workers:
            row = self.workers[mark["worker"]]
            row["suspect"] = None if row["suspect"] == scope else row["suspect"]

    def _resumed(self, scope: int, worker: str | None = None, lived: int = 0) -> None:
        """A person had a look."""
        if scope not in self.deaths:
            return
        self.deaths[scope]["alone"] = 0
        busy = self._is_suspect(scope) and worker is not None and self._process_has_another(worker, scope)
        if worker is not None and not busy:
            self.deaths[scope] |= {"worker": worker, "since": lived}
            if self._is_suspect(scope) and worker in self.workers:
                self.workers[worker]["suspect"] = scope

    def outlived(self, write: Outlived) -> bool:
        mark = self.deaths.get(write.scope)
        if mark is None or mark["worker"] != write.worker:
            return False
        if self._is_suspect(write.scope):
            self._stop_suspecting(write.scope)
            mark.update(counted=0, alone=0)
        return True
