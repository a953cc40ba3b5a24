"""The pytest plugin: a fixture for crash tests, and their findings at the end of the run.

Load it with `-p perdure.testing.pytest_plugin`, or in `addopts`. It is no entry point, because pytest would load one in
every run of an environment that has Perdure installed, and import Perdure with it.

    def test_survives_every_kill(crash_kit):
        report = crash_kit(scenario, real=True)
        assert report.lost == 0

`crash_kit` takes what `perdure.testing.crash.kill_everywhere` takes; the report's summary is printed at the end of the
run, its whole table when the test fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from perdure.testing.crash import Report

PROPERTY = "perdure"
"""Tests may record a line under this property (`record_property`) to have it printed at the end of the run."""


@pytest.fixture
def crash_kit(record_property: Callable[[str, object], None]) -> Callable[..., Report]:
    """`perdure.testing.crash.kill_everywhere`, with its figures printed at the end of the run."""

    def kill_everywhere(scenario: Any, **options: Any) -> Report:
        from perdure.testing import crash  # noqa: PLC0415  # the plugin is loaded in runs that never use it

        report = crash.kill_everywhere(scenario, **options)
        print(report.table())
        record_property(PROPERTY, str(report))
        return report

    return kill_everywhere


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what tests recorded, also those that ran in other processes."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    lines = [text for report in reports for name, text in getattr(report, "user_properties", ()) if name == PROPERTY]
    if lines:
        terminalreporter.section("perdure crash kit")
        for line in dict.fromkeys(lines):
            terminalreporter.write_line(line)
