"""What an agent says of its cells is checked where it is said."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.errors import InvalidDefinition
from perdure.model.code import CodeLimits


@pytest.mark.parametrize(
    "given",
    [
        {"seconds": 0},
        {"seconds": -1.0},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"seconds": 86_401},
        {"seconds": "3"},
        {"seconds": True},
        {"memory": 0},
        {"memory": 1.5},
        {"memory": 2**63},
        {"output": -1},
        {"state": "x"},
        {"recursion": 0},
        {"calls": -1},
    ],
)
def test_limits_that_no_cell_can_keep_are_refused(given: dict[str, Any]) -> None:
    """Found when a cell begins, they would leave its turn stuck."""
    (name,) = given
    with pytest.raises(InvalidDefinition, match=f"{name}=.* is not usable"):
        CodeLimits(**given)


def test_a_cell_may_be_allowed_nothing_but_to_compute() -> None:
    limits = CodeLimits(seconds=0.5, output=0, calls=0)

    assert (limits.output, limits.calls) == (0, 0)
