"""What is reserved and spent, by hand: limits on tokens and turns, of one session or of all."""

from __future__ import annotations

import json
from typing import Any

from perdure.model.limit import Spending
from tests.stores.oracle.plain import Plain


class Accounts:
    """`accounts` by limit and key: what is spent and reserved in a window. `reserved` by session and call: who reserved
    how much of what, and what the last asking was answered. `sessions` are the model's, by their ids."""

    def __init__(self, sessions: dict[str, Plain]) -> None:
        self.sessions = sessions
        self.accounts: dict[tuple[str, str], Plain] = {}
        self.reserved: dict[tuple[int, str], Plain] = {}

    def spend(self, session: Plain, owner: str, turn: int, spendings: tuple[Spending, ...]) -> list[Plain]:
        given = []
        for number, each in enumerate(spendings):
            known = self.reserved.get((session["sid"], each.name))
            newer = [other.op for other in spendings[number + 1 :] if other.name == each.name]
            applied = known is not None and known["answer"]["op"] in newer  # with that one, whose reply was lost
            given.append(self.nothing(each.op) if applied else self._spend(session, owner, turn, each))
        return given

    def nothing(self, op: str) -> Plain:
        return {"op": op, "output": 0, "short": None, "waits": False, "near": []}

    def _spend(self, session: Plain, owner: str, turn: int, wanted: Spending) -> Plain:
        place = session["sid"], wanted.name
        known = self.reserved.get(place)
        if known is not None and known["answer"]["op"] == wanted.op:
            return dict(known["answer"])
        if known is not None:
            how = wanted.settle
            self._give_back(known, None if how is None else 0 if how.free else how.tokens)
        counted = known is not None and known["turn"] == turn
        answer = self.nothing(wanted.op)
        holds: list[Any] = []
        if wanted.ask is not None:
            answer, holds = self._ask(session, turn, wanted, counted)
        elif wanted.name:
            self.reserved.pop(place, None)
            return answer
        kept = turn if answer["output"] or counted else 0
        self.reserved[place] = {"owner": owner, "turn": kept, "answer": answer, "holds": holds}
        return dict(answer)

    def _ask(self, session: Plain, turn: int, wanted: Spending, counted: bool) -> tuple[Plain, list[Any]]:
        assert wanted.ask is not None
        asked, room, could, short = wanted.ask.output, wanted.ask.output, True, None
        least, found = min(asked, 256), []
        for bound in wanted.bounds:
            if bound.kind == "turns" and wanted.name:
                continue
            key = "null" if bound.per == "all" else json.dumps(self._oldest(session), ensure_ascii=False)
            empty = {"start": 0, "spent": 0, "reserved": 0, "unknown": 0, "most": 0}
            account = self.accounts.setdefault((bound.name, key), empty)
            if bound.start > account["start"]:
                account.update(start=bound.start, spent=0, unknown=0)
            account["most"] = bound.most
            found.append((bound, key, account))
        told = [
            {"name": b.name, "key": key, "start": a["start"], "spent": a["spent"], "reserved": a["reserved"]}
            | {"most": b.most}
            for b, key, a in found
        ]
        for (bound, _, account), each in zip(found, told, strict=True):
            if bound.kind == "turns" and not counted and account["spent"] >= bound.most:
                no = {"op": wanted.op, "output": 0, "short": each, "waits": False, "near": []}
                return no, []
        for (bound, _, account), each in zip(found, told, strict=True):
            if bound.kind == "tokens":
                fits = bound.most - account["spent"] - account["reserved"] - wanted.ask.input
                room = min(room, max(fits, -1))
                if fits < least:
                    short = short or each
                    could = could and bound.most - account["spent"] - wanted.ask.input >= least
        if room < least:
            return {"op": wanted.op, "output": 0, "short": short, "waits": could, "near": []}, []
        holds, near = [], []
        for bound, key, account in found:
            if bound.kind == "turns":
                account["spent"] += 0 if counted else 1
            else:
                account["reserved"] += wanted.ask.input + room
                holds.append([(bound.name, key), account["start"], wanted.ask.input + room])
            if account["spent"] + account["reserved"] >= bound.near:
                now = {name: account[name] for name in ("start", "spent", "reserved")}
                near.append({"name": bound.name, "key": key} | now | {"most": bound.most})
        return {"op": wanted.op, "output": room, "short": None, "waits": False, "near": near}, holds

    def _oldest(self, session: Plain) -> str:
        """The session that its family began with, which may be gone or never have been there."""
        line = [session["id"]]
        while (known := self.sessions.get(line[-1])) is not None and known["settings"]:
            above = json.loads(known["settings"]).get("parent")
            if above is None or above in line:
                break
            line.append(above)
        return str(line[-1])

    def _give_back(self, known: Plain, tokens: int | None) -> None:
        for place, start, amount in known["holds"]:
            account = self.accounts[place]
            account["reserved"] -= amount
            if account["start"] == start:
                account["spent"] += amount if tokens is None else tokens
                account["unknown"] += tokens is None
        known["holds"] = []

    def turn_lost(self, sid: int) -> None:
        """Its owner is gone: what was in flight counts as it was reserved."""
        for (number, _), known in self.reserved.items():
            if number == sid and known["turn"]:
                self._give_back(known, None)

    def turn_over(self, sid: int, turn: int) -> None:
        for number, name in [*self.reserved]:
            if number == sid and (not name or self.reserved[number, name]["turn"] == turn):
                self._give_back(self.reserved.pop((number, name)), None)

    def session_gone(self, sid: int) -> None:
        for place in [each for each in self.reserved if each[0] == sid]:
            self._give_back(self.reserved.pop(place), None)

    def worker_gone(self, worker: str) -> None:
        for place, known in [*self.reserved.items()]:
            if known["owner"] == worker and known["turn"]:
                self._give_back(known, None)
            elif known["owner"] == worker and place[1]:
                self._give_back(self.reserved.pop(place), None)
