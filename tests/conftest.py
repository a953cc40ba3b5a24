"""What every test shares."""

import faulthandler
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.fuzzing import FULL, cases
from tests.kit import Place

# The gate tries the same examples every time; new ones are for the fuzzer, whose finds are kept as examples.
# None of them is a matter of time: what is slow on a busy machine is not wrong.
settings.register_profile(
    "mainstay",
    derandomize=not FULL,
    deadline=None,
    max_examples=cases(100, 2_000),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("mainstay")


@pytest.fixture
def anyio_backend() -> str:
    """Mainstay is an asyncio library."""
    return "asyncio"


@pytest.fixture(autouse=FULL)
def no_hurry() -> None:
    """Thousands of cases take longer than a test may that is not the fuzzer's."""
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A durable place for Runtimes: rows in memory, and a file."""
    return Place(request.param, tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Place:
    """A real file, for what only a file can show."""
    return Place("sqlite", tmp_path)
