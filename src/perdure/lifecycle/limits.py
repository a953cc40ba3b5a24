"""Deciding what a call may take of the limits that it counts against. Pure: stores read the accounts and write them.

    room in every account                       granted whole
    less, and an answer of 256 tokens fits      granted, with the answer cut to what fits
    less, and calls in flight may give it back  it waits
    less                                        it is refused: the limit is spent

By our estimates, what is spent and what is reserved never exceed a limit together.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from perdure.model.limit import MOST_COUNTED, Account, Ask, Bound, Granted, Hold, LimitKind, NearLimit, Settle

MILLION = 1_000_000


def current(account: Account, bound: Bound) -> Account:
    """An account in the window of a bound: a new window begins with nothing spent. Clocks of processes may differ, and
    no window begins twice."""
    if bound.start > account.start:
        return replace(account, start=bound.start, spent=0, unknown=0, most=bound.most)
    return account if account.most == bound.most else replace(account, most=bound.most)


def decide(op: str, ask: Ask, accounts: Sequence[tuple[Bound, Account]], counted: bool) -> Granted:
    """What an ask is granted. What is reserved in the accounts is reserved for other calls, all of them in flight.
    `counted`: the turn of the call counts already, or it is no turn."""
    output, least = ask.output, min(ask.output, ask.least)
    for bound, account in accounts:
        if bound.kind != "turns":
            output = min(output, _fits(bound.kind, bound.most - account.spent - account.reserved, ask))
        elif not counted and account.spent >= bound.most:
            return Granted(op, 0, near(bound, account))
    if output >= least:
        return Granted(op, output)
    waits, short = True, None
    for bound, account in accounts:
        if bound.kind != "turns" and _fits(bound.kind, bound.most - account.spent - account.reserved, ask) < least:
            short = short or near(bound, account)
            waits = waits and _fits(bound.kind, bound.most - account.spent, ask) >= least
    return Granted(op, 0, short, waits)


def _fits(kind: LimitKind, left: int, ask: Ask) -> int:
    """How many tokens of an answer fit into what is left, after the input."""
    left -= amount_of(kind, ask, 0)
    if left < 0:
        return -1
    if kind == "tokens":
        return min(left, ask.output)
    return ask.output if not ask.output_price else min(left * MILLION // ask.output_price, ask.output)


def amount_of(kind: LimitKind, ask: Ask, output: int) -> int:
    """What a call takes at most with an answer of `output` tokens, in the units of a limit. A turn is no call."""
    if kind == "tokens":
        return ask.input + output
    if kind == "money":
        return -(-ask.input * ask.input_price // MILLION) - (-output * ask.output_price // MILLION)
    return 0


def near(bound: Bound, account: Account) -> NearLimit:
    return NearLimit(account.name, account.key, account.start, account.spent, account.reserved, bound.most)


def settled(kind: str, account: Account, hold: Hold, how: Settle) -> Account:
    """An account after the end of a call that something was reserved for. What is not known counts as reserved; what
    belongs to an earlier window does not count in this one."""
    reserved, taken = max(account.reserved - hold.amount, 0), how.tokens if kind == "tokens" else how.money
    if hold.start != account.start or how.free:
        return replace(account, reserved=reserved)
    unknown = account.unknown
    if taken is None:
        unknown, taken = unknown + 1, hold.amount
    return replace(account, reserved=reserved, unknown=unknown, spent=min(account.spent + taken, MOST_COUNTED))
