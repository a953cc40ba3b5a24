"""What every test shares."""

import faulthandler
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.fuzzing import FULL, cases
from tests.kit import Place
from tests.lanes import LANES, Counts, reason_of, selected, summary

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

LEFT = pytest.StashKey[int]()
"""How many collected cases the lane of this run leaves to others."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", choices=LANES, default="", help="Run the cases of one lane only; see tests/lanes.py.")
    parser.addoption("--quick", action="store_const", const="quick", dest="lane", help="Short for --lane=quick.")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("lane") == "quick":
        settings.load_profile("quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lane = config.getoption("lane")
    if not lane:
        return
    kept = selected(lane, items, config.args)
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    config.stash[LEFT] = len(items) - len(kept)
    items[:] = kept


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)  # in a worker of pytest-xdist: what its controller reads
    if output is not None:
        output["left"] = session.config.stash.get(LEFT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over how many cases a worker left: every worker collects all of them."""
    node.config.stash[LEFT] = getattr(node, "workeroutput", {}).get("left", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    stats = terminalreporter.stats
    ran = sum(len(stats.get(name, ())) for name in ("passed", "failed", "xfailed", "xpassed"))
    skipped = [reason_of(report.longrepr) for report in stats.get("skipped", ())]
    for line in summary(config.getoption("lane"), Counts(ran, skipped, config.stash.get(LEFT, 0))):
        terminalreporter.write_line(line)


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
