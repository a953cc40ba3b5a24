"""`perdure doctor` warns of a large store that no worker makes smaller."""

import pytest

from perdure import Retention, Runtime
from perdure.cli.doctor import growth
from perdure.model.session import Offers
from perdure.model.write import StoreFacts
from tests.kit import Place

GIGABYTE = 10**9


def facts(size: int, nodes: int) -> StoreFacts:
    return StoreFacts("sqlite", "agent.db", 7, 10, nodes, 0, size)


@pytest.mark.parametrize(("size", "nodes"), [(5 * GIGABYTE, 10), (GIGABYTE, 1_000_000)])
def test_a_large_store_without_retention_needs_one(size: int, nodes: int) -> None:
    need = growth(facts(size, nodes), [Offers(), None])

    assert need is not None
    assert "Retention(days=90)" in need.advice
    assert f"{nodes:,} nodes" in need.problem


@pytest.mark.parametrize(("size", "nodes"), [(5 * GIGABYTE - 1, 999_999), (0, 0)])
def test_a_smaller_store_needs_none(size: int, nodes: int) -> None:
    assert growth(facts(size, nodes), []) is None


async def test_a_worker_with_retention_says_so_in_its_row(place: Place) -> None:
    async with Runtime(place.store(), retention=Retention(days=90)) as runtime:
        [row] = await runtime.store.workers()

    assert row.offers is not None
    assert growth(facts(9 * GIGABYTE, 10**7), [row.offers]) is None
