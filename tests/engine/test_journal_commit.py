"""A commit after a flush that nobody saw the end of: what was in doubt is on disk first, or the turn has a hole."""

import asyncio

import pytest

from perdure.graph.commit import End
from perdure.model.outcome import Finished
from perdure.model.record import Closed, Ended, Replied, Said
from perdure.testing import VirtualClock
from tests.engine.test_journal import ANSWER, CALL, ENDED, USAGE, FaultyStore, begin, read


@pytest.mark.parametrize("trouble", ["full", "lost"], ids=["refused", "its reply was lost"])
async def test_a_commit_brings_what_a_flush_left_in_doubt(trouble: str) -> None:
    store, clock = FaultyStore(), VirtualClock()
    journal = await begin(store, clock)
    setattr(store, trouble, 1)
    journal.record(CALL)
    journal.record(ENDED)
    flushing = asyncio.create_task(journal.flush())
    await clock.wait_sleeping()

    flushing.cancel()
    await asyncio.wait({flushing})
    journal.record(ANSWER)
    await journal.commit(0, End(Finished("good day"), USAGE, None))

    assert [type(record) for record in await read(store)] == [Said, Replied, Ended, Closed]
