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
    "perdure",
    derandomize=not FULL,
    deadline=None,
    max_examples=cases(100, 2_000),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", settings.get_profile("perdure"), max_examples=10)
settings.load_profile("perdure")

LEFT_OUT = {"kill", "slow", "fuzz"}
"""Markers of tests that `--quick` leaves to the gate."""
FOLDERS = {"benchmarks", "cli", "docs", "golden", "oracles", "smoke", "soak"}
"""Folders of tests that begin OS processes, take long, or change with the whole rather than with one module."""
VARIANTS = 2
"""Of a test with many parameters `--quick` runs so many, from all over its list."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="For the inner loop: in memory, one kill mode, few examples.")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        settings.load_profile("quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if _is_quick(item):
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {item for each in variants.values() for item in each[:: -(-len(each) // VARIANTS)]}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _is_quick(item: pytest.Item) -> bool:
    """Whether `--quick` runs a test: without markers that say otherwise, and of its variants the first kind only.

    Many tests run on every store and for every way to die (`before`, `lost`, …). In memory, and dying before a call is
    applied, they find most mistakes in a fraction of the time.
    """
    if item.path.parent.name in FOLDERS or any(marker.name in LEFT_OUT for marker in item.iter_markers()):
        return False
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    modes = [params.get("mode"), getattr(params.get("crash"), "mode", None)]
    on_file = any(str(params.get(name)).startswith("sqlite") for name in ("place", "store"))
    return not on_file and not {"lost", "hang", "late", "unheard"} & {mode for mode in modes if isinstance(mode, str)}


@pytest.fixture
def anyio_backend() -> str:
    """Perdure is an asyncio library."""
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
