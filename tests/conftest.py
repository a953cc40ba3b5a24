"""What every test shares."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Mainstay is an asyncio library."""
    return "asyncio"
