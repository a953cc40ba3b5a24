"""A retry that is waited for in memory must begin within the turn's time. On disk, that does not go on."""

from __future__ import annotations

import asyncio

from perdure import Agent, Budget, ModelRequest
from perdure.errors import ProviderError
from perdure.model.outcome import BudgetSpent
from perdure.testing import FunctionModel
from tests.kit import SOON, Place


async def test_a_turn_does_not_wait_for_a_retry_beyond_its_time(place: Place) -> None:
    asked = 0

    def model(request: ModelRequest) -> str:
        nonlocal asked
        asked += 1
        raise ProviderError("slow down", retryable=True, after=30)

    async with place.runtime(Agent(FunctionModel(model), budget=Budget(seconds=10)), park_after=None) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    assert (result.outcome, asked) == (BudgetSpent("seconds", 10), 1)
