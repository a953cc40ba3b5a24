"""Changes of files that the calls of a session made: listed from its records, and taken back.

What a call was about to change is in the record of its start, with the digest of the file before and after
(`EditPlan`); the earlier content is a blob that the record refers to. So edits can be listed and taken back in any
process, whatever has died meanwhile, and taking back needs no record of its own: the digest of a file says whether it
has been. An undo that is killed half-way is made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import ValidationError

from perdure.engine.journal import load_turns
from perdure.errors import BlobMissing, UndoRefused
from perdure.graph.view import Turn
from perdure.model import ids
from perdure.model.codec import convert
from perdure.model.edit import PAYLOAD, EditPlan, EditStatus, FileEdit, FileRestore, UndoneFile
from perdure.model.record import Closed, Ended, Started
from perdure.model.session import SessionRow
from perdure.model.tool import Ok, OutcomeUnknown
from perdure.model.transcript import calls_in
from perdure.ports.store import OnDisk, Store
from perdure.ports.tool import EditsFiles, ToolProvider

TURNS_AT_ONCE = 64


async def edits_of(store: Store, row: SessionRow, first: int, last: int) -> list[FileEdit]:
    """The edits of some turns, in the order in which they were begun."""
    found: list[FileEdit] = []
    for begin in range(first, last + 1, TURNS_AT_ONCE):
        for turn in await load_turns(store, row.sid, begin, min(begin + TURNS_AT_ONCE - 1, last)):
            found += _edits(row.id, turn)
    return found


async def newest_edits(store: Store, row: SessionRow) -> list[FileEdit]:
    """The edits of the newest turn that has any which may have been made."""
    for turn in range(row.next - 1, 0, -1):
        found = await edits_of(store, row, turn, turn)
        if any(each.status != "not_applied" for each in found):
            return found
    return []


def _edits(session_id: str, turn: Turn) -> Iterator[FileEdit]:
    names = dict[str, str]()
    plans = dict[str, EditPlan]()
    ends = dict[str, Ended]()
    for record in turn.records:
        if (asked := calls_in(record)) or isinstance(record, Closed):
            names.update({key: call.name for key, call in asked.items()})
        elif isinstance(record, Started) and (plan := _plan(record.payload)) is not None:
            plans[record.call] = plan  # of a later attempt it is the same
        elif isinstance(record, Ended):
            ends[record.call] = record
    for key, plan in plans.items():
        name = ids.turn_id(session_id, turn.number)
        status, changed = _status(ends.get(key)), plan.before != plan.after
        yield FileEdit(
            f"{name}.{key}", names.get(key, ""), plan.shown or plan.path, plan.before, plan.after,
            status if changed else "not_applied", plan.kept or plan.before is None, plan.mode, plan.path,
        )  # fmt: skip


def _plan(payload: Any) -> EditPlan | None:
    if not isinstance(payload, dict) or PAYLOAD not in payload:
        return None
    try:
        return convert(payload[PAYLOAD], EditPlan)
    except ValidationError:
        return None  # another tool's payload, under the same name


def _status(ended: Ended | None) -> EditStatus:
    if ended is None:
        return "running"
    if isinstance(ended.outcome, Ok):
        return "applied"
    return "unknown" if isinstance(ended.outcome, OutcomeUnknown) else "not_applied"


def plan_undo(edits: Iterable[FileEdit]) -> list[FileRestore]:
    """How files go back to what they were before these edits, each in one step. Raises UndoRefused where that is not
    known: an edit is under way, was made on something else than the one before it left, or has nothing kept."""
    chains, refused = dict[str, list[FileEdit]](), dict[str, str]()
    for edit in edits:
        if edit.status == "running":
            refused[edit.path] = f"{edit.path} is being changed by call {edit.call_id}: wait for its turn"
        elif edit.status != "not_applied":
            chains.setdefault(edit.location, []).append(edit)
    restores = []
    for location, chain in chains.items():
        path, oldest, state = chain[-1].path, chain[0], {chain[0].before}
        for edit in chain:
            if edit.before not in state:
                refused[path] = f"{path} was changed by something else between the edits"
            # Of an edit whose end is unknown, either may be the case.
            state = {edit.before, edit.after} if edit.status == "unknown" else {edit.after}
        if not oldest.kept:
            refused[path] = f"what {path} held before is not kept: it was too large, a link, or a plugin withheld it"
        states = tuple({edit.after for edit in chain} | {edit.before for edit in chain})
        restores.append(FileRestore(location, states, oldest.before, oldest.mode))
    if refused:
        raise UndoRefused(refused)
    return restores


async def undo(store: Store, providers: Sequence[ToolProvider], restores: Sequence[FileRestore]) -> list[UndoneFile]:
    """Bring files back, by the tool sets of the agent that may change them."""
    location = store.location if isinstance(store, OnDisk) else None
    groups, refused, earlier = dict[int, list[FileRestore]](), dict[str, str](), dict[str, bytes]()
    sets = [each for each in providers if isinstance(each, EditsFiles)]
    for each in restores:
        owner = next((number for number, one in enumerate(sets) if one.covers(each.path)), None)
        if owner is None:
            refused[each.path] = f"{each.path} is in no workspace of the agent in this Runtime"
            continue
        groups.setdefault(owner, []).append(each)
        if each.target is not None:
            try:
                earlier[each.target] = await store.blobs.get(each.target)
            except BlobMissing:
                refused[each.path] = f"what {each.path} held before is not in the store any more"
    if refused:
        raise UndoRefused(refused)
    done: list[UndoneFile] = []
    for number, wanted in groups.items():
        done += await sets[number].restore(wanted, earlier, location)
    return done
