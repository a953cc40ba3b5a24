"""Our stores live as the oracle says, and pass the kit for authors of stores, which finds what is wrong with others."""

import random
import subprocess
import sys
from typing import Any

import pytest

from perdure.model.session import SessionRow
from perdure.model.write import Claim, Claimed, Commit, SessionFilter, Write
from perdure.ports.store import Store
from perdure.stores.memory import MemoryStore
from perdure.stores.rules import RULES
from perdure.testing.store_contract import Author, StoreContract, answer, store_contract
from tests.stores.network import OverNetwork
from tests.stores.oracle.lives import lives_of
from tests.stores.oracle.model import StoreModel
from tests.stores.places import InMemory, InOneFile, InOneFileOnAThread

TestMemoryLives = pytest.mark.gate(pytest.mark.fuzz(lives_of(InMemory)))
TestSqliteLives = pytest.mark.gate(pytest.mark.fuzz(lives_of(InOneFile)))
TestNetworkLives = pytest.mark.gate(pytest.mark.fuzz(lives_of(OverNetwork)))

TestSqliteStore = pytest.mark.fuzz(store_contract(InOneFile))
TestSqliteStoreOnAThread = pytest.mark.gate(pytest.mark.fuzz(store_contract(InOneFileOnAThread)))
TestNetworkStore = pytest.mark.fuzz(store_contract(OverNetwork))


def test_every_write_that_a_store_may_be_asked_for_is_known_to_the_oracle() -> None:
    assert set(StoreModel()._rules) == set(RULES)


async def test_the_kit_sends_every_kind_of_write_and_sees_it_accepted_and_refused() -> None:
    seen: set[tuple[str, bool]] = set()
    for seed in range(90):
        memory, author = MemoryStore(), Author(random.Random(seed), 0)
        for at in range(60):
            write = await author.write(memory, at)
            receipt = await answer(memory, write)
            refused = isinstance(receipt, tuple) and bool(receipt) and isinstance(receipt[0], type)
            seen.add((type(write).__name__, refused))

    assert {name for name, refused in seen if not refused} == {write.__name__ for write in RULES}
    refusable = {"Accept", "Append", "Commit", "Configure", "Release", "Branch"}
    refusable |= {"Register", "Advance", "SendSignal", "AddEvent", "Cancel", "Complete", "Resume", "Share"}
    assert {name for name, refused in seen if refused} >= refusable


# ---------------------------------------------------------------------- stores that are wrong


class ForgetsNotes(MemoryStore):
    """An input is gone when the store is opened again."""

    async def open(self) -> None:
        await super().open()
        self.rows.inbox.clear()


class ClaimsTwice(MemoryStore):
    """Who comes second is told that it won."""

    async def write(self, write: Write[Any]) -> Any:
        receipt = await super().write(write)
        return Claimed(receipt.row, won=True) if isinstance(write, Claim) else receipt


class IgnoresAgent(MemoryStore):
    """A filter is read past."""

    async def sessions(self, wanted: SessionFilter) -> list[SessionRow]:
        return await super().sessions(SessionFilter(None, wanted.state, wanted.prefix, wanted.limit, wanted.before))


class LosesCommits(MemoryStore):
    """What was acknowledged is gone when its process is killed."""

    def submit(self, write: Write[Any], done: Any) -> None:
        if isinstance(write, Commit):
            done(None, None)
        else:
            super().submit(write, done)


class Wrong(InMemory):
    kind: type[MemoryStore] = MemoryStore

    def store(self) -> MemoryStore:
        return self.kind(self.rows)

    async def crash(self, store: Store) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (ForgetsNotes, "inboxes"),
        (ClaimsTwice, "the answer to Claim("),
        (IgnoresAgent, "listed"),
        (LosesCommits, "the answer to Commit("),
    ],
)
def test_the_kit_finds_a_store_that_is_wrong_and_shows_it_in_few_steps(kind: type[MemoryStore], what: str) -> None:
    contract = StoreContract(type("Place", (Wrong,), {"kind": kind}))

    found = next(filter(None, (contract.live(seed, 60, 0.3) for seed in range(30))))

    assert what in found.why
    assert len(found.program.splitlines()) <= 6


def test_the_kit_finds_nothing_wrong_with_the_memory_store() -> None:
    contract = StoreContract(InMemory)

    assert [contract.live(seed, 60, 0.3) for seed in range(5)] == [None] * 5


def test_the_kit_needs_nothing_besides_perdure() -> None:
    code = "import sys; sys.modules['hypothesis'] = sys.modules['pytest'] = None; import perdure.testing.store_contract"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
