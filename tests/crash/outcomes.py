"""What must come of every kill of the reference scenario: written by hand and argued from the guarantees.

A ruling names a point, the rows of the failure model that it covers, and the fate of the run for each way to die
there. Whatever the fate, the session ends idle at head 3 with both turns finished, nothing in the inbox, no open wait,
every call answered, every blob there that is referred to and no other, and its last turn worked. `late` has the fate of
`hang`: a relieved owner's write changes nothing. `unheard` is always CLEAN: a lost reply alone costs nothing.
"""

from __future__ import annotations

from msgspec import Struct

from perdure.testing.crash import Mode


class Fate(Struct, frozen=True):
    """Model calls; effects of each tool in the ledger; calls reported unknown; calls that a crash made run again;
    model calls whose usage nobody saw."""

    model: int = 3
    pay: int = 1
    tally: int = 1
    sign: int = 1
    book: int = 1
    ship: int = 1
    unknown: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    usage: int = 0


CLEAN = Fate()
# Nobody can know whether the model had been asked: not twice here, but its usage counts as unknown.
UNSURE = Fate(usage=1)
# It had been asked and the answer was not on disk: the one model call that a crash costs.
ASKED = Fate(model=4, usage=1)
# The reply's record is the start of pay (once), tally (rerun) and sign (ask); ship starts with a record of its own.
STARTED = Fate(pay=0, unknown=("pay",), again=("tally", "sign"))
SHIP_STARTED = Fate(pay=0, unknown=("pay",), again=("tally", "sign", "ship"))
PAID = Fate(unknown=("pay",), again=("tally", "sign", "ship"))
PAY_RECORDED = Fate(again=("tally", "sign", "ship"))
# Effect done, outcome not recorded: the only window that repeats an effect, and only for a tool that says it may.
TALLIED = Fate(tally=2, again=("tally", "sign", "ship"))
TALLY_RECORDED = Fate(again=("sign", "ship"))
# The person who is asked sees that it was signed: nothing runs again.
SIGNED = Fate(again=("ship",))
SHIPPED = Fate(ship=2, again=("ship",))
BOOK_STARTED = Fate(book=0, unknown=("book",))
BOOKED = Fate(unknown=("book",))


class Ruling(Struct, frozen=True):
    """A point of the reference scenario and its fates; None where one cannot die like that."""

    point: str
    covers: str
    before: Fate
    lost: Fate | None = None
    hang: Fate | None = None
    late: bool = False

    def fates(self) -> dict[Mode, Fate]:
        found: dict[Mode, Fate] = {"before": self.before}
        if self.lost is not None and self.hang is not None:
            found |= {"lost": self.lost, "hang": self.hang}
        if self.late and self.hang is not None:
            found["late"] = self.hang
        return found


def record(point: str, covers: str, before: Fate, lost: Fate, hang: Fate | None = None) -> Ruling:
    """A write of the turn's owner; hanging it is like not having sent it, unless said otherwise."""
    return Ruling(point, covers, before, lost, hang or before, late=True)


def call(point: str, covers: str, before: Fate, lost: Fate) -> Ruling:
    return Ruling(point, covers, before, lost, before)


RULINGS = [
    call("beat", "T3", CLEAN, CLEAN),
    call("accept queue", "T1 T2", CLEAN, UNSURE),
    call("ask model 1.1", "T5 T6", UNSURE, ASKED),
    Ruling("chunk 1 of model 1.1", "T7", ASKED),
    Ruling("chunk 2 of model 1.1", "T7", ASKED),
    Ruling("chunk 3 of model 1.1", "T7 T8", ASKED),
    record("append 1: replied 1, opening a wait", "T8 T9 T10", ASKED, STARTED),
    Ruling("begin pay 1.1.0", "T10", STARTED),
    Ruling("begin tally 1.1.1", "T10", STARTED),
    Ruling("begin sign 1.1.2", "T10", STARTED),
    record("append 1: started 1.4, opening a wait", "T10", STARTED, SHIP_STARTED),
    Ruling("begin ship 1.1.4", "T10", SHIP_STARTED),
    call("accept steer", "T1 T2 T4", SHIP_STARTED, SHIP_STARTED),
    call("effect pay", "T11 T12", SHIP_STARTED, PAID),
    Ruling("end pay 1.1.0", "T12", PAID),
    record("append 1: ended 1.0", "T12 T13", PAID, PAY_RECORDED),
    call("effect tally", "T11 T12 T13", PAY_RECORDED, TALLIED),
    Ruling("end tally 1.1.1", "T12 T13", TALLIED),
    call("put blob", "T15", TALLIED, TALLIED),
    record("append 1: ended 1.1", "T12 T13 T15", TALLIED, TALLY_RECORDED),
    call("effect sign", "T11 T12 T13", TALLY_RECORDED, SIGNED),
    Ruling("end sign 1.1.2", "T12 T13", SIGNED),
    record("append 1: ended 1.2", "T12 T13", SIGNED, SIGNED),
    call("effect ship", "T11 T12", SIGNED, SHIPPED),
    Ruling("end ship 1.1.4", "T12", SHIPPED),
    record("append 1: nothing, opening a wait, parking", "T12", SHIPPED, CLEAN),
    call("resolve deferred", "T2", CLEAN, CLEAN),
    record("append 1: ended 1.4, parking", "T9", CLEAN, CLEAN),
    call("resolve approval", "T2", CLEAN, CLEAN),
    record("append 1: started 1.3", "T10", CLEAN, BOOK_STARTED),
    Ruling("begin book 1.1.3", "T10", BOOK_STARTED),
    call("effect book", "T11 T12", BOOK_STARTED, BOOKED),
    Ruling("end book 1.1.3", "T12", BOOKED),
    record("append 1: ended 1.3", "T12 T13", BOOKED, UNSURE),
    call("ask model 1.2", "T4 T5 T6", UNSURE, ASKED),
    Ruling("chunk 1 of model 1.2", "T7", ASKED),
    Ruling("chunk 2 of model 1.2", "T7", ASKED),
    Ruling("chunk 3 of model 1.2", "T7 T8", ASKED),
    record("commit 1", "T4 T16 T17", ASKED, CLEAN),
    call("put blob #2", "T15", CLEAN, CLEAN),
    call("sweep", "T15", CLEAN, CLEAN),
    call("accept queue #2", "T18", CLEAN, UNSURE),
    call("ask model 3.1", "T5 T6", UNSURE, ASKED),
    Ruling("chunk 1 of model 3.1", "T7", ASKED),
    Ruling("chunk 2 of model 3.1", "T7", ASKED),
    Ruling("chunk 3 of model 3.1", "T7 T8", ASKED),
    record("commit 3", "T16 T17", ASKED, CLEAN),
    call("retire", "T18", CLEAN, CLEAN),
]

ELSEWHERE = {
    "T6": "test_wired.py: with T7, T8 and T9 over HTTP, in every dialect, counted by a server that outlives the kills",
    "T14": "test_plugins.py: killed at every point around hooks that deny, replace and ask",
    "T19": "test_delivery.py: whoever watches is killed at every event, goes on from its cursor, and misses no commit",
    "T20": "test_turns.py, test_compaction.py: fork, delete and compaction, killed at every point",
    "T21": "test_again.py: killed a second time at every point of the recovery",
    "T22": "test_turns.py: the tool is gone, its schema or the budget is another one",
}
"""Rows of the failure model that have tests of their own."""

OWED = {
    "T1, T2, T19 over HTTP": "a client that retries its POST, a stream that is resumed: comes with the server",
    "T17 on Postgres": "the wire cut between COMMIT and its answer: comes with the Postgres store",
    "T22 across releases": "journals of every release, replayed by every later one: comes with the first release",
}
"""What cannot be tested yet, and what it waits for. Printed at the end of every run."""
