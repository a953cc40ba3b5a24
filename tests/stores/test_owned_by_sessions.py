"""What ends with its session: the request to stop is part of the write that deletes the session, on both stores."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import Conflict, UnknownProcess, WrongAuthority
from perdure.lifecycle.process import ABANDON_REQUESTED, session_parent
from perdure.model.process import (
    Abandoned,
    AbandonRequest,
    Cancelled,
    Event,
    Evidence,
    ProcessRow,
    Registration,
    SessionOrigin,
)
from perdure.model.session import CancelRequest
from perdure.model.write import (
    Accept,
    AddEvent,
    Advance,
    Cancel,
    Complete,
    Delete,
    ProcessRef,
    ProcessScope,
    ReconciledAbandon,
    Register,
    Release,
    Share,
    Transfer,
)
from perdure.ports.store import Store
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import SqliteStore

DELETED = CancelRequest("session chat", "its session was deleted")


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    made: Store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "agent.db")
    await made.open()
    for session_id in ("chat", "other"):
        await made.write(Accept(session_id, "clerk", b"hello", f"op-{session_id}", 1))
    yield made
    await made.close()


def owned(process_id: str, session_id: str = "chat", **more: Any) -> Registration:
    parent = session_parent(session_id)
    origin = SessionOrigin(session_id)
    return Registration(
        process_id, "command", "reattachable", origin=origin, parent=parent, parent_end="cancel", **more
    )


async def begun(store: Store, asked: Registration, grants: tuple[str, ...] = ("chat",)) -> ProcessScope:
    row = (await store.write(Register(asked, 2, "w1", grants))).row
    scope = ProcessScope(asked.id, row.pid, "w1", 1)
    await store.write(Advance(scope, 3, first=True, seen=1))
    return scope


async def found(store: Store, process_id: str) -> ProcessRow:
    row = await store.process(process_id)
    assert row is not None
    return row


async def test_deleting_a_session_asks_what_it_owns_to_stop_and_leaves_it_to_its_owner(store: Store) -> None:
    await begun(store, owned("build"))

    assert await store.write(Delete("chat", 9))

    row = await found(store, "build")
    assert (row.record.cancel, row.status, row.owner) == (DELETED, "running", "w1")


async def test_what_no_worker_owns_and_has_begun_waits_with_its_request_for_the_next_one(store: Store) -> None:
    scope = await begun(store, owned("build"))
    await store.write(Release(scope, 4))

    await store.write(Delete("chat", 9))

    row = await found(store, "build")
    assert (row.record.cancel, row.status, row.owner, row.active) == (DELETED, "running", None, True)


async def test_what_has_not_begun_ends_with_its_session_at_once(store: Store) -> None:
    await store.write(Register(owned("build"), 2))

    await store.write(Delete("chat", 9))

    assert (await found(store, "build")).record.outcome == Cancelled(DELETED.by, DELETED.reason)


async def test_what_a_session_was_only_granted_goes_on(store: Store) -> None:
    await begun(store, owned("theirs", "other"), ("other",))
    await store.write(Share("chat", ("theirs",), 4))

    await store.write(Delete("chat", 9))

    assert (await found(store, "theirs")).record.cancel is None


async def test_what_was_handed_on_ends_with_its_new_session(store: Store) -> None:
    await begun(store, owned("build"))
    await store.write(Transfer("chat", "other", ("build",), 4))

    await store.write(Delete("chat", 8))
    kept = (await found(store, "build")).record.cancel
    await store.write(Delete("other", 9))

    assert kept is None
    asked = (await found(store, "build")).record.cancel
    assert asked == CancelRequest("session other", "its session was deleted")


async def test_a_start_for_a_deleted_session_is_asked_to_stop_with_its_registration(store: Store) -> None:
    await store.write(Delete("chat", 3))

    await store.write(Register(owned("late"), 4))

    assert (await found(store, "late")).status == "cancelled"


async def test_a_session_that_is_not_there_owns_nothing(store: Store) -> None:
    with pytest.raises(UnknownProcess):
        await store.write(Register(owned("build", "nobody"), 4))


async def test_a_cancel_of_stuck_work_that_lives_elsewhere_sends_a_worker_to_look_for_it(store: Store) -> None:
    """It must not end on paper while its OS processes run."""
    scope = await begun(store, owned("build"))
    await store.write(Release(scope, 4, stuck="a fault"))

    await store.write(Cancel(ProcessRef("build"), CancelRequest("ann", "enough"), 5))

    row = await found(store, "build")
    assert (row.status, row.stuck, row.active) == ("running", None, True)


async def test_an_operator_may_abandon_work_whose_machine_is_gone(store: Store) -> None:
    await begun(store, owned("build"))
    gone = Abandoned(Evidence("reconciled_request", 6))
    await store.write(AddEvent("build", Event(ABANDON_REQUESTED, AbandonRequest("ann", 5, "the host is gone"), 5), 5))

    ending = await store.write(Complete("build", gone, ReconciledAbandon("ann"), 6))

    assert (ending.status, ending.row.status, ending.row.owner) == ("committed", "abandoned", None)


async def test_only_work_that_lives_elsewhere_is_abandoned_over_the_head_of_its_owner(store: Store) -> None:
    row = (await store.write(Register(Registration("job", "function", "rerunnable"), 2, "w1"))).row

    with pytest.raises((WrongAuthority, Conflict)):
        await store.write(Complete("job", Abandoned(Evidence("reconciled_request")), ReconciledAbandon("ann"), 6))

    assert row.live
