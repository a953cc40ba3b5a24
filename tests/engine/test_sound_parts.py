"""What a provider reports is looked at before it is recorded."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import ModelResponse, Usage
from perdure.engine.model_call import sound_parts
from perdure.errors import InvalidInput

FIGURES = [name for name in Usage.__struct_fields__ if name != "missing"]


@pytest.mark.parametrize("wrong", [True, -1, 2**53, "many"])
@pytest.mark.parametrize("figure", FIGURES)
def test_no_figure_of_a_usage_is_taken_unseen(figure: str, wrong: Any) -> None:
    with pytest.raises(InvalidInput, match=r"usage|cost"):
        sound_parts(ModelResponse("x", usage=Usage(**{figure: wrong})))


@pytest.mark.parametrize("figure", FIGURES)
def test_the_largest_count_is_taken(figure: str) -> None:
    most: dict[str, Any] = {figure: 2**53 - 1}
    assert sound_parts(ModelResponse("", usage=Usage(**most))) == ()
