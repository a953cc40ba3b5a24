"""What writes do to accounts and reservations. What is granted is decided by `lifecycle.limits`.

A reservation belongs to the owner and the generation that made it. Who takes its turn over finds a call in flight whose
cost nobody will ever see: it counts as what was reserved for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from perdure.lifecycle import limits
from perdure.model.limit import Account, Bound, Granted, Hold, Reservation, Settle, Spending
from perdure.model.message import Scalar
from perdure.model.session import SessionRow, load_settings, metadata_for
from perdure.model.spending import METADATA
from perdure.stores.rules.rows import (
    AccountOf,
    DropReservation,
    PutAccount,
    PutReservation,
    ReservationAt,
    ReservationsBySid,
    ReservationsOf,
    ReservationsOwnedBy,
    SessionById,
    Transaction,
)

NOTHING_SEEN: Mapping[str, Settle] = {}
LOST = Settle()
"""How a call ended whose end was not seen."""
MAX_FAMILY = 64


async def spend(
    tx: Transaction, row: SessionRow, owner: str, spendings: tuple[Spending, ...], turn: int = 0
) -> tuple[Granted, ...]:
    """Settle and reserve as a write of the session's owner says; what was granted, in the same order.

    A write that is sent again, because its reply was lost, is recognised by the last spending of each name: those
    before it were applied with it.
    """
    granted: list[Granted] = []
    accounts: dict[tuple[str, str], Account] = {}
    for number, spending in enumerate(spendings):
        known = await tx.read(ReservationAt(row.sid, spending.name))
        if known is not None and any(
            (each.name, each.op) == (spending.name, known.granted.op) for each in spendings[number:]
        ):
            granted.append(known.granted if known.granted.op == spending.op else Granted(spending.op))
            continue
        for hold in () if known is None else known.holds:
            await _settle(tx, accounts, hold, spending.settle or LOST)
        given, holds = Granted(spending.op), tuple[Hold, ...]()
        if spending.ask is not None:
            counted = spending.name != "" or (known is not None and known.turn == turn)
            given, holds = await _reserve(tx, accounts, row, spending, turn, counted)
        granted.append(given)
        if spending.ask is None and spending.name:
            tx.change(DropReservation(row.sid, spending.name))
            continue
        counts = turn if given.output or (known is not None and known.turn == turn) else 0
        generation = row.generation if turn else 0
        tx.change(PutReservation(Reservation(row.sid, spending.name, owner, generation, counts, given, holds)))
    for account in accounts.values():
        tx.change(PutAccount(account))
    return tuple(granted)


async def _reserve(
    tx: Transaction,
    accounts: dict[tuple[str, str], Account],
    row: SessionRow,
    spending: Spending,
    turn: int,
    counted: bool,
) -> tuple[Granted, tuple[Hold, ...]]:
    ask = spending.ask
    assert ask is not None
    found: list[tuple[Bound, Account]] = []
    for bound in spending.bounds:
        if bound.kind == "turns" and spending.name:
            continue
        key = await _key(tx, bound.per, row, turn, spending.metadata)
        account = limits.current(await _account(tx, accounts, bound.name, key), bound)
        accounts[bound.name, key] = account
        found.append((bound, account))
    given = limits.decide(spending.op, ask, found, counted)
    if not given.output:
        return given, ()
    holds: list[Hold] = []
    close = []
    for bound, account in found:
        amount = limits.amount_of(bound.kind, ask, given.output)
        if bound.kind == "turns":
            account = replace(account, spent=account.spent + (0 if counted else 1))
        else:
            account = replace(account, reserved=account.reserved + amount)
            holds.append(Hold(account.name, account.key, account.start, amount))
        accounts[account.name, account.key] = account
        if account.spent + account.reserved >= bound.near:
            close.append(limits.near(bound, account))
    return replace(given, near=tuple(close)) if close else given, tuple(holds)


async def _settle(tx: Transaction, accounts: dict[tuple[str, str], Account], hold: Hold, how: Settle) -> None:
    account = await _account(tx, accounts, hold.name, hold.key)
    accounts[hold.name, hold.key] = limits.settled(hold.name.partition("/")[0], account, hold, how)


async def _account(tx: Transaction, accounts: dict[tuple[str, str], Account], name: str, key: str) -> Account:
    known = accounts.get((name, key)) or await tx.read(AccountOf(name, key))
    return known or Account(name, key)


async def _key(tx: Transaction, per: str, row: SessionRow, turn: int, own: dict[str, Scalar]) -> str:
    """Whose account it is, as JSON. A session counts with the one that its family began with."""
    if per == "all":
        return "null"
    if per == "agent":
        return msgspec.json.encode(row.agent).decode()
    settings = load_settings(row.settings)
    if per.startswith(METADATA):
        whom = metadata_for(settings, turn) | own
        return msgspec.json.encode(whom.get(per.removeprefix(METADATA))).decode()
    seen, above = [row.id], settings.parent
    while above is not None and above not in seen and len(seen) < MAX_FAMILY:
        seen.append(above)
        parent = await tx.read(SessionById(above))
        above = None if parent is None else load_settings(parent.settings).parent
    return msgspec.json.encode(seen[-1]).decode()


async def close(tx: Transaction, row: SessionRow, turn: int, spendings: tuple[Spending, ...]) -> None:
    """A turn ends: settle its last call, and forget what is kept of it. The end of what it leaves in flight will not be
    seen. A commit is recognised by its head when it is sent again, so that nothing of it is kept here."""
    how = {each.name: each.settle or LOST for each in reversed(spendings)}  # the first of a name settles what there is
    ended = [
        each
        for each in await tx.read(ReservationsBySid(row.sid))
        if each.turn == turn or not each.name or each.name in how
    ]
    await _forget(tx, ended, how)


async def lose(tx: Transaction, session_id: str) -> None:
    """The owner of a session's turn is gone: what was reserved for calls of the turn counts as spent. That the turn has
    been counted stays."""
    await _lose(tx, [each for each in await tx.read(ReservationsOf(session_id)) if each.turn])


async def delete(tx: Transaction, session_id: str) -> None:
    """A session is deleted: what was reserved for its calls counts as spent."""
    await _forget(tx, await tx.read(ReservationsOf(session_id)))


async def bury(tx: Transaction, worker_id: str) -> None:
    """A worker is dead: what it had reserved counts as spent, also for turns that no living worker can take over, so
    that no call waits for theirs. That those turns have been counted stays."""
    found = await tx.read(ReservationsOwnedBy(worker_id))
    await _lose(tx, [each for each in found if each.turn])
    await _forget(tx, [each for each in found if not each.turn and each.name])


async def _lose(tx: Transaction, found: list[Reservation]) -> None:
    accounts: dict[tuple[str, str], Account] = {}
    for each in [each for each in found if each.holds]:
        for hold in each.holds:
            await _settle(tx, accounts, hold, LOST)
        tx.change(PutReservation(replace(each, holds=())))
    for account in accounts.values():
        tx.change(PutAccount(account))


async def _forget(tx: Transaction, found: list[Reservation], how: Mapping[str, Settle] = NOTHING_SEEN) -> None:
    accounts: dict[tuple[str, str], Account] = {}
    for each in found:
        for hold in each.holds:
            await _settle(tx, accounts, hold, how.get(each.name, LOST))
        tx.change(DropReservation(each.sid, each.name))
    for account in accounts.values():
        tx.change(PutAccount(account))
