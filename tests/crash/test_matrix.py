"""The crash matrix: the reference scenario, killed at every point in every way, in process and for real."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

import pytest

from perdure.testing.crash import MODES, Crash, ForkServer, Mode, Played, Statement, StoreKind, play
from tests.crash.outcomes import CLEAN, ELSEWHERE, OWED, RULINGS, Fate
from tests.crash.reference import SESSION, attended, scenario

TOOLS = ("pay", "tally", "sign", "book", "ship")
STORES: tuple[StoreKind, ...] = ("memory", "sqlite")

DEATHS = [
    pytest.param(Crash(ruling.point, mode), fate, id=f"{mode} {ruling.point}")
    for ruling in RULINGS
    for mode, fate in ruling.fates().items()
]
WRITES = [r.point for r in RULINGS if r.late or r.point.split()[0] in ("accept", "resolve", "sweep", "beat", "retire")]
SAMPLE = 5
"""Of the deaths while a thread commits, one in so many: it is killed elsewhere, but what it wrote is the same."""
KILLS = [death for death in DEATHS if str(death.id).split()[0] in ("before", "lost")]


def check(played: Played, fate: Fate) -> None:
    """The run ended as ruled."""
    assert played.problems == []
    session = played.ending.session(SESSION)
    assert session is not None
    seen = Fate(
        played.model_calls,
        **{name: played.count(name) for name in TOOLS},
        unknown=tuple(c.tool for c in session.calls if c.outcome == "outcome_unknown"),
        again=tuple(c.tool for c in session.calls if (c.outcome, c.attempts, c.repeated) == ("ok", 2, 1)),
        usage=session.unknown_usage,
    )
    assert seen == fate
    assert (session.head, session.state, session.turn) == (3, "idle", None)
    assert session.turns == {1: "finished", 3: "finished"}
    assert (session.inbox, session.waiting) == ([], [])
    assert all(c.outcome in ("ok", "outcome_unknown") and c.attempts <= 2 for c in session.calls)
    assert session.said[-2:] == ["user: and now?", "assistant: Now rest."]
    assert [s for s in session.said if s == "user: greet them"] == ["user: greet them"], "delivered once"
    assert same_question_again(played)
    assert played.ending.orphans == 0, "the sweep took what nobody refers to, and whatever a crash left"


def same_question_again(played: Played) -> bool:
    """A model call that is made again asks byte for byte the same."""
    asked = {(line.key, line.data) for line in played.ledger if line.name == "model"}
    return len(asked) == len({key for key, _ in asked})


@pytest.mark.parametrize("store", STORES)
def test_trace_is_the_ruled_one(store: StoreKind) -> None:
    """A new write, or one that is gone, needs a ruling before the build passes."""
    played = play(scenario, store=store)

    assert [point.name for point in played.traces[0]] == [ruling.point for ruling in RULINGS]
    check(played, CLEAN)


def test_every_way_to_die_is_ruled() -> None:
    played = play(scenario)

    kinds = {point.name: set(MODES[point.kind]) - {"unheard"} for point in played.traces[0]}
    assert {ruling.point: set(ruling.fates()) for ruling in RULINGS} == kinds


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("crash", "fate"), DEATHS)
def test_kill_in_process_has_its_ruled_fate(crash: Crash, fate: Fate, store: StoreKind) -> None:
    check(play(scenario, [crash], store=store, timeout=60), fate)


@pytest.mark.parametrize(("crash", "fate"), DEATHS[::SAMPLE])
def test_kill_in_process_has_its_ruled_fate_when_a_thread_commits(crash: Crash, fate: Fate) -> None:
    check(play(scenario, [crash], store="sqlite-thread", timeout=60), fate)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("point", WRITES)
def test_lost_reply_costs_nothing_while_the_process_lives(point: str, store: StoreKind) -> None:
    check(play(attended, [Crash(point, "unheard")], store=store, timeout=60), CLEAN)


# ---------------------------------------------------------------------- real kills


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(scenario, timeout=60) as ready:
        yield ready


@pytest.fixture(scope="module")
def forks_with_thread() -> Generator[ForkServer, None, None]:
    with ForkServer(scenario, timeout=60, store="sqlite-thread") as ready:
        yield ready


@pytest.mark.kill
def test_real_trace_is_the_ruled_one(forks: ForkServer) -> None:
    played = forks.play()

    assert [point.name for point in played.traces[0]] == [ruling.point for ruling in RULINGS]
    check(played, CLEAN)


@pytest.mark.kill
@pytest.mark.parametrize(("crash", "fate"), KILLS)
def test_real_kill_has_its_ruled_fate(forks: ForkServer, crash: Crash, fate: Fate) -> None:
    check(forks.play([crash]), fate)


@pytest.mark.kill
@pytest.mark.parametrize(("crash", "fate"), KILLS[::SAMPLE])
def test_real_kill_has_its_ruled_fate_when_a_thread_commits(
    forks_with_thread: ForkServer, crash: Crash, fate: Fate
) -> None:
    check(forks_with_thread.play([crash]), fate)


def ruled(statement: Statement) -> Fate:
    """Killed before its COMMIT was executed, a write has not happened, whatever statements of it had."""
    mode: Mode = "hang" if statement.slow else "before"
    return next((r.fates()[mode] for r in RULINGS if r.point == statement.within), CLEAN)


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [
        "on a thread",
        pytest.param("on the loop", marks=pytest.mark.gate),
        pytest.param("on a thread, after a slow disk", marks=pytest.mark.gate),
    ],
)
def test_kill_inside_any_transaction_leaves_nothing_of_it(
    forks: ForkServer, forks_with_thread: ForkServer, variant: str, record_property: Callable[[str, object], None]
) -> None:
    """At each statement that writes; of those on a thread a sample; with a slow disk at each COMMIT, while the rest of
    the process goes on."""
    server, slow = forks if variant == "on the loop" else forks_with_thread, variant.endswith("disk")
    assert server.play().problems == []
    commits = sum(s.text == "COMMIT" for s in server.statements)
    statements = [s for s in server.statements if s.text == "COMMIT" or not slow]
    for seen in statements[:: SAMPLE if variant == "on a thread" else 1]:
        statement = Statement(seen.number, seen.text, seen.within, slow)
        try:
            check(server.play([statement]), ruled(statement))
        except AssertionError as error:
            error.add_note(f"killed at statement {seen.number}, {seen.text!r}, of {seen.within!r}")
            raise

    assert commits == 1 + len(WRITES), "one transaction a write, one for the schema"
    record_property("perdure", f"crash: {len(statements)} real kills inside transactions {variant}")


# ---------------------------------------------------------------------- coverage


def test_every_row_of_the_failure_model_is_covered_or_owed(record_property: Callable[[str, object], None]) -> None:
    rows = {f"T{n}" for n in range(1, 23)}
    covered = {row for ruling in RULINGS for row in ruling.covers.split()} | ELSEWHERE.keys()
    owed = {row for words in OWED for row in re.findall(r"T\d+", words)}

    assert covered <= rows
    assert rows - covered <= owed
    cases = len(STORES) * (len(DEATHS) + len(WRITES)) + len(KILLS) + len(DEATHS[::SAMPLE]) + len(KILLS[::SAMPLE])
    record_property("perdure", f"crash matrix: {len(RULINGS)} points, {cases} cases, {len(covered)} of 22 rows covered")
    for words, reason in OWED.items():
        record_property("perdure", f"owed: {words}: {reason}")
