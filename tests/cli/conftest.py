from pathlib import Path

import pytest


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Where a store may be; nothing is there yet."""
    return tmp_path / "agent.db"
