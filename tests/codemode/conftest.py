"""One event loop, and so one executor with warm workers, for all tests of a module."""

import pytest


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"
