"""Keys of metadata with the project's prefix, present or old, are reserved."""

import pytest

from perdure.errors import InvalidInput
from perdure.model import validate


@pytest.mark.parametrize("key", ["perdure.origin", "mainstay.origin"])
def test_keys_with_a_prefix_of_the_project_are_refused(key: str) -> None:
    with pytest.raises(InvalidInput, match=r"keys that begin with 'perdure\.' or 'mainstay\.' are Perdure's own"):
        validate.metadata({key: "x"})
