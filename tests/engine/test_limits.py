"""Rate limits, decided without I/O: nobody passes a limit, nobody waits for ever, and who comes first goes first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure import RateLimit
from perdure.engine.rate_limits import LONGEST, RAMP, Limiter, Ticket
from perdure.errors import InvalidDefinition
from perdure.model.llm import RateReport, Remaining

A, B, ALL = "p:a", "p:b", "p:"


class World:
    """A limiter with a clock, and everything that has happened."""

    def __init__(self, **rules: RateLimit) -> None:
        names = {"a": A, "b": B, "all": ALL}
        self.rules = {names[key]: rule for key, rule in rules.items()}
        self.limiter, self.now = Limiter(self.rules), 0.0
        self.joined: list[Ticket] = []
        self.started: list[Ticket] = []
        self.due: float | None = None

    def join(self, model: str = A, tokens: int = 1) -> Ticket:
        ticket = self.limiter.join(self.limiter.lane(model, ALL), tokens, self.now)
        self.joined.append(ticket)
        if ticket.going:
            self.started.append(ticket)
        self.advance()
        return ticket

    def leave(self, ticket: Ticket, spent: int | None = None) -> None:
        self.limiter.leave(ticket, spent)
        self.advance()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.advance()

    def advance(self) -> None:
        moved, self.due = self.limiter.advance(self.now)
        self.started += [ticket for ticket in moved if ticket.going]

    def going(self) -> list[int]:
        return [ticket.number for ticket in self.started]


def model_of(ticket: Ticket) -> str:
    return ticket.lane.limits[0].name


# ---------------------------------------------------------------------- examples


def test_calls_beyond_the_concurrency_wait_and_go_in_their_order() -> None:
    world = World(a=RateLimit(concurrency=2))
    first, _, third, fourth = [world.join() for _ in range(4)]

    assert world.going() == [1, 2]
    assert world.due is None, "time changes nothing"
    assert world.limiter.why(third, 0.0).reason == "concurrency"
    world.leave(first)
    assert world.going() == [1, 2, 3]
    assert not fourth.going


def test_a_call_that_goes_at_once_leaves_nothing_to_look_for() -> None:
    world = World()
    world.join()

    assert world.going() == [1]
    assert world.due is None


def test_calls_beyond_the_requests_of_a_window_go_when_the_oldest_leaves_it() -> None:
    world = World(a=RateLimit(requests=2, per=10))
    world.join()
    world.pass_time(4)
    for _ in range(3):
        world.join()

    assert world.going() == [1, 2]
    assert world.due == 10.0
    world.pass_time(6)
    assert world.going() == [1, 2, 3]
    assert world.due == 14.0


def test_a_call_larger_than_the_window_goes_alone() -> None:
    world = World(a=RateLimit(tokens=100, per=10))
    small, large, after = world.join(tokens=10), world.join(tokens=1_000), world.join(tokens=10)

    assert (small.going, large.going, after.going) == (True, False, False)
    world.pass_time(10)
    assert (large.going, after.going) == (True, False)
    world.pass_time(10)
    assert after.going


def test_what_a_call_really_took_counts_and_corrects_the_next_estimates() -> None:
    world = World(a=RateLimit(tokens=100, per=10))
    first = world.join(tokens=80)
    world.join(tokens=80)

    assert world.going() == [1]
    world.leave(first, spent=4)  # nearly all of it came from a cache
    assert world.going() == [1, 2]
    assert first.lane.ratio == pytest.approx(0.8 + 0.2 * 4 / 80)


def test_a_call_that_gives_up_waiting_lets_the_next_one_go() -> None:
    world = World(a=RateLimit(tokens=100, per=10))
    world.join(tokens=50)
    large, small = world.join(tokens=90), world.join(tokens=50)

    assert not small.going
    world.leave(large)
    assert small.going


def test_a_model_without_room_does_not_stop_the_others_of_its_provider() -> None:
    world = World(a=RateLimit(concurrency=1), all=RateLimit(concurrency=3))
    world.join(A)
    waiting, other = world.join(A), world.join(B)

    assert not waiting.going
    assert other.going


def test_a_call_that_waited_too_long_is_told_so() -> None:
    world = World(a=RateLimit(concurrency=1, wait=5))
    world.join()
    late = world.join()

    assert world.due == 5.0
    world.pass_time(5)
    assert late.left
    assert not late.going


def test_after_a_refusal_calls_wait_as_long_as_asked_and_come_back_step_by_step() -> None:
    world = World()
    refused = world.join()
    limit = refused.lane.limits[0]
    limit.hold(20.0, world.now)
    world.leave(refused)
    calls = [world.join() for _ in range(200)]

    assert world.due == 20.0
    world.pass_time(20)
    rounds = []
    while len(world.started) < 201:
        before = [ticket for ticket in world.started if not ticket.left]
        rounds.append(len(before))
        for ticket in before:
            limit.accepted(ticket)
            world.leave(ticket)
    assert rounds[:5] == [1, 2, 4, 8, 16]
    assert sum(rounds[:6]) >= RAMP
    assert all(ticket.going for ticket in calls)


@pytest.mark.parametrize("seconds", [1e9, float("inf"), -5.0])
def test_a_provider_is_believed_for_a_minute_at_most(seconds: float) -> None:
    world = World()
    first = world.join()
    first.lane.limits[0].hold(seconds, world.now)
    first.lane.limits[0].learn(first, RateReport(Remaining(0, seconds, 10), Remaining(0, seconds)), world.now)
    world.leave(first)
    second = world.join()

    world.pass_time(LONGEST)
    assert second.going


def test_what_a_provider_says_is_left_is_kept_to_and_refills_evenly() -> None:
    world = World()
    first = world.join()
    world.join()  # under way too: perhaps the provider has not counted it
    first.lane.limits[0].learn(first, RateReport(Remaining(left=2, seconds=40.0, limit=10)), world.now)
    third, fourth = world.join(), world.join()

    assert third.going
    assert not fourth.going
    assert world.limiter.why(fourth, world.now).reason == "provider"
    assert world.due == pytest.approx(5.0)
    world.pass_time(5)
    assert fourth.going


def test_no_tokens_left_is_a_wait_until_there_are_some() -> None:
    world = World()
    first = world.join()
    first.lane.limits[0].learn(first, RateReport(tokens=Remaining(left=0, seconds=7.0)), world.now)
    second = world.join()

    assert not second.going
    assert world.due == 7.0
    world.pass_time(7)
    assert second.going


@pytest.mark.parametrize(
    "wrong",
    [{"concurrency": 0}, {"requests": 1.5}, {"tokens": -1}, {"per": 0}, {"per": "a minute"}, {"wait": float("nan")}],
)
def test_limits_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidDefinition, match=next(iter(wrong))):
        RateLimit(**wrong)


# ---------------------------------------------------------------------- properties

rules = st.builds(
    RateLimit,
    concurrency=st.none() | st.integers(1, 4),
    requests=st.none() | st.integers(1, 5),
    tokens=st.none() | st.integers(1, 50),
    per=st.sampled_from([1.0, 7.5, 60.0]),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.sampled_from([A, B]), st.integers(1, 80)),
        st.tuples(st.just("leave"), st.integers(0, 30), st.none() | st.integers(0, 80)),
        st.tuples(st.just("time"), st.floats(0, 20), st.none()),
        st.tuples(st.just("hold"), st.integers(0, 30), st.floats(0, 100)),
        st.tuples(st.just("accept"), st.integers(0, 30), st.none()),
        st.tuples(st.just("report"), st.integers(0, 30), st.integers(0, 5)),
    ),
    max_size=60,
)


def play(world: World, script: list[tuple[Any, Any, Any]]) -> None:
    for what, one, two in script:
        here = [ticket for ticket in world.joined if not ticket.left]
        if what == "join":
            world.join(one, two)
        elif what == "time":
            world.pass_time(one)
        elif here:
            ticket = here[one % len(here)]
            own = ticket.lane.limits[0]
            if what == "leave":
                world.leave(ticket, two)
            elif ticket.going and what == "hold":
                own.hold(two, world.now)
            elif ticket.going and what == "accept":
                own.accepted(ticket)
            elif ticket.going:
                own.learn(ticket, RateReport(Remaining(two, 30.0, 10)), world.now)
            world.advance()
            check(world)


def check(world: World) -> None:
    for name, rule in world.rules.items():
        mine = [ticket for ticket in world.started if name in [limit.name for limit in ticket.lane.limits]]
        if rule.concurrency is not None:
            assert sum(not ticket.left for ticket in mine) <= rule.concurrency
        if rule.requests is not None:
            # Every window that begins with a start.
            assert all(
                sum(first.at <= other.at < first.at + rule.per for other in mine) <= rule.requests for first in mine
            )


@settings(max_examples=150)
@given(rules, rules, rules, steps)
def test_no_limit_is_passed_and_everybody_goes_in_the_end(
    a: RateLimit, b: RateLimit, together: RateLimit, script: list[tuple[Any, Any, Any]]
) -> None:
    world = World(a=a, b=b, all=together)
    play(world, script)

    for _ in range(2_000):
        under_way = [ticket for ticket in world.started if not ticket.left]
        if under_way:
            world.leave(under_way[0])
        elif world.due is not None:
            assert world.due > world.now, "somebody could go now and was not let"
            world.pass_time(max(world.due - world.now, 0.001))
        else:
            break
    check(world)

    assert world.limiter.waiting == 0
    assert all(ticket.left for ticket in world.joined)
    for model in (A, B):
        order = [ticket.number for ticket in world.started if model_of(ticket) == model]
        assert order == sorted(order), "first come, first served"


@settings(max_examples=200)
@given(st.integers(1, 50), st.lists(st.tuples(st.integers(1, 80), st.floats(0, 5)), max_size=40))
def test_estimated_tokens_of_a_window_stay_within_its_limit(most: int, calls: list[tuple[int, float]]) -> None:
    world = World(a=RateLimit(tokens=most, per=10))
    for tokens, pause in calls:
        world.join(tokens=tokens)
        world.pass_time(pause)

    for first in world.started:
        window = [ticket for ticket in world.started if first.at <= ticket.at < first.at + 10]
        assert sum(ticket.tokens for ticket in window) <= most or len(window) == 1
