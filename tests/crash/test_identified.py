"""Metadata of two tenants is never mixed, wherever the process is killed: before, inside and after each write."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure.testing.crash import Report, StoreKind
from tests.crash.identified import begun_by_an_operation, identified

WHOM = [
    {"tenant": "first", "ip": "a-1"},
    {"tenant": "third", "ip": "a-2"},
    {"tenant": "second", "ip": "b-1"},
    {"tenant": "second", "ip": "b-2"},
]
ENDED = {
    "a": ["assistant: done for first, by a-1", "assistant: done for third, by a-2"],
    "b": ["assistant: done for second, by b-1", "assistant: done for second, by b-2"],
}


def check(report: Report) -> None:
    assert (report.lost, report.problems) == (0, [])
    for row in report.rows:
        played, at = row.played, str(row.crash)
        said = {each.id: [text for text in each.said if " for " in text] for each in played.ending.sessions}
        assert said == ENDED, at
        work = [line.data for line in played.ledger if line.name == "work"]
        assert {session for session, whom in work if whom["tenant"] == "second"} == {"b"}, at
        for whom in WHOM:
            assert [whom["ip"][0], whom] in work, at
        assert all(whom in WHOM for _, whom in work), at
        jobs = [line.data for line in played.ledger if line.name == "job"]
        assert all(whom in WHOM for whom in jobs), at
        assert all(whom in jobs for whom in WHOM), at
        found = [line.data for line in played.ledger if line.name == "found"]
        assert found, at
        assert all(each == {"first": [], "second": ["b"], "third": ["a"]} for each in found), at
    crashes = {str(row.crash) for row in report.rows}
    assert {"before accept queue", "lost accept queue", "before configure", "lost configure"} <= crashes


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_tenants_are_never_mixed_wherever_it_is_killed(store: StoreKind, crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(identified, store=store))


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
def test_tenants_are_never_mixed_wherever_it_is_really_killed(crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(identified, real=True))


def check_begun(report: Report) -> None:
    assert (report.lost, report.problems) == (0, [])
    for row in report.rows:
        played, at = row.played, str(row.crash)
        whom = [line.data for line in played.ledger if line.name in ("command", "answer")]
        assert whom, at
        assert all(each == {"tenant": "first"} for each in whom), at
        assert {line.key for line in played.ledger if line.name == "answer"} == {"greet", "one"}, at
        found = [line.data for line in played.ledger if line.name == "found"]
        assert found, at
        assert all(each == [["a", {"tenant": "first"}]] for each in found), at
    crashes = {str(row.crash) for row in report.rows}
    assert {"before configure", "lost configure", "before configure #2", "before accept queue"} <= crashes


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_a_session_that_an_operation_begins_is_its_tenants_wherever_it_is_killed(
    store: StoreKind, crash_kit: Callable[..., Report]
) -> None:
    check_begun(crash_kit(begun_by_an_operation, store=store))


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
def test_a_session_that_an_operation_begins_is_its_tenants_wherever_it_is_really_killed(
    crash_kit: Callable[..., Report],
) -> None:
    check_begun(crash_kit(begun_by_an_operation, real=True))
