"""Whatever plugins say about a call, in whatever order, the laws of their composition hold."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.model.message import Message
from perdure.model.plugin import (
    AbortTurn,
    AskPerson,
    CreateSession,
    Directive,
    EmitEvents,
    EmitTrace,
    EnqueueMessages,
    ReplaceArgs,
    ShortCircuit,
)
from perdure.model.tool import Cancelled, Denied, Failed, Ok, OutcomeUnknown
from perdure.plugins.decisions import CallVerdict, Left
from tests.fuzzing import cases
from tests.plugins.made import (
    ARGS,
    ENDED,
    After,
    Before,
    LastAfter,
    LaterAfter,
    LaterBefore,
    Voice,
    after,
    before,
    failed,
)

# Generous on time: the machine may be busy with other tests.
law = settings(max_examples=cases(150, 3_000), deadline=None)

STRENGTHS: list[tuple[Directive, int]] = [
    (AbortTurn("stop", "now"), 4),
    (AbortTurn("stop", "at once"), 4),
    (ShortCircuit(Failed("quota", "none left")), 3),
    (ShortCircuit(Denied("no", "policy")), 3),
    (ShortCircuit(Cancelled("ann", "enough")), 3),
    (ShortCircuit(OutcomeUnknown("who knows")), 3),
    (ShortCircuit(Ok("cached")), 2),
    (ShortCircuit(Ok({"made": "up"})), 2),
    (AskPerson("sure?"), 1),
    (EmitEvents(("seen",)), 0),
    (EmitTrace("seen", {"n": 1}), 0),
    (CreateSession(label="audit"), 0),
]
PSST: tuple[Directive, int] = (EnqueueMessages((Message("user", "psst"),)), 0)
LATE = (AskPerson,)  # too late once a call has ended

Said: TypeAlias = list[tuple[Directive, int]]


def votes(kinds: list[tuple[Directive, int]]) -> st.SearchStrategy[dict[str, Said]]:
    """What each plugin says, by its id."""
    ids = st.sampled_from(["a", "b", "c", "d", "e"])
    return st.dictionaries(ids, st.lists(st.sampled_from(kinds), max_size=3), max_size=5)


befores = votes(STRENGTHS)
afters = votes([*[each for each in STRENGTHS if not isinstance(each[0], LATE)], PSST])
orders = st.permutations(["a", "b", "c", "d", "e"])


def seated(said: dict[str, Said], order: list[str], kind: type[Voice]) -> list[Voice]:
    return [kind(name, [directive for directive, _ in said[name]]) for name in order if name in said]


def strongest(said: dict[str, Said]) -> int:
    return max([strength for each in said.values() for _, strength in each], default=0)


def strength_of(verdict: CallVerdict | Left) -> int:
    """How strong a verdict is, read off what becomes of the call."""
    if isinstance(verdict, CallVerdict) and verdict.outcome is None:
        return 0 if verdict.ask is None else 1
    match verdict.outcome:
        case Ok():
            return 0 if verdict.outcome == ENDED else 2
        case Failed(code="stop"):
            return 4
        case _:
            return 3


def run_before(*plugins: Voice) -> CallVerdict:
    return asyncio.run(before(*plugins))


def run_after(*plugins: Voice) -> Left:
    return asyncio.run(after(*plugins))


# ---------------------------------------------------------------------- the strongest wins


@law
@given(befores, orders)
def test_the_strongest_directive_stands_before_a_call_in_any_order(said: dict[str, Said], order: list[str]) -> None:
    verdict = run_before(*seated(said, order, Before))

    assert strength_of(verdict) == strongest(said)
    assert verdict.args == ARGS


@law
@given(afters, orders)
def test_the_strongest_directive_stands_after_a_call_in_any_order(said: dict[str, Said], order: list[str]) -> None:
    verdict = run_after(*seated(said, order, After))

    assert strength_of(verdict) == strongest(said)


@law
@given(befores, orders, orders)
def test_who_decides_before_a_call_does_not_depend_on_the_order(
    said: dict[str, Said], order: list[str], other: list[str]
) -> None:
    one, two = run_before(*seated(said, order, Before)), run_before(*seated(said, other, Before))

    best = strongest(said)
    by = min([name for name, each in said.items() if best in [strength for _, strength in each]], default=None)
    assert [each.plugin for each in one.decisions] == [each.plugin for each in two.decisions] == ([by] if best else [])
    assert one.ask == two.ask
    assert getattr(one.outcome, "message", one.outcome) == getattr(two.outcome, "message", two.outcome)


@law
@given(afters, orders)
def test_every_replacement_after_a_call_takes_effect_unless_it_is_weaker_than_what_stands(
    said: dict[str, Said], order: list[str]
) -> None:
    left = run_after(*seated(said, order, After))

    stands, decided = 2, list[str]()
    for name in order:
        for directive, strength in said.get(name, []):
            again = strength == stands and strength != 4  # a first abort stands
            if strength > stands or (again and isinstance(directive, ShortCircuit)):
                stands = strength
                decided.append(name)
    assert [each.plugin for each in left.decisions] == decided


@law
@given(afters, orders, st.integers(0, 5), st.sampled_from([Ok("clean"), Failed("clean", "clean")]))
def test_a_filter_sees_the_final_outcome_once_wherever_it_stands(
    said: dict[str, Said], order: list[str], where: int, clean: Ok | Failed
) -> None:
    plugins, alone = seated(said, order, After), run_after(*seated(said, order, After))
    plugins.insert(where, seeing := LastAfter("filter", ShortCircuit(clean)))

    left = run_after(*plugins)

    assert seeing.seen == [(alone.outcome, False)]
    withheld = isinstance(clean, Ok) and not isinstance(alone.outcome, Ok)
    assert failed(left).code == "after_tool_call_failed" if withheld else left.outcome == clean


@law
@given(befores, st.lists(st.sampled_from(STRENGTHS), min_size=1, max_size=3), orders, st.integers(0, 5))
def test_one_more_plugin_never_restores_permission_before_a_call(
    said: dict[str, Said], more: Said, order: list[str], where: int
) -> None:
    plugins = seated(said, order, Before)
    alone = strength_of(run_before(*plugins))

    plugins.insert(where, Before("more", [directive for directive, _ in more]))

    assert strength_of(run_before(*plugins)) >= alone


@law
@given(afters, orders, st.sampled_from(["a", "b", "c", "d", "e"]))
def test_denials_under_an_abort_keep_their_words(said: dict[str, Said], order: list[str], by: str) -> None:
    said = {**said, by: [(AbortTurn("stop", "now"), 4)]}

    for verdict in (run_before(*seated(_early(said), order, Before)), run_after(*seated(said, order, After))):
        denials = {
            (name, getattr(directive.outcome, "code", _WORDS.get(type(directive.outcome))))
            for name, each in said.items()
            for directive, strength in each
            if strength == 3 and isinstance(directive, ShortCircuit)
        }
        told = (failed(verdict).data or {}).get("displaced", [])
        assert {(each["plugin"], each["code"]) for each in told} == denials


_WORDS = {Denied: "denied", Cancelled: "cancelled", OutcomeUnknown: "outcome_unknown"}


def _early(said: dict[str, Said]) -> dict[str, Said]:
    return {name: [each for each in votes if each is not PSST] for name, votes in said.items()}


# ---------------------------------------------------------------------- replacements


@law
@given(st.lists(st.sampled_from([None, 2, 3, 4]), max_size=6))
def test_everybody_sees_the_arguments_in_force_and_each_later_replacement_once(numbers: list[int | None]) -> None:
    plugins = [
        Before(str(place), None if number is None else ReplaceArgs({"n": number * 10 + place}))
        for place, number in enumerate(numbers)
    ]

    verdict = run_before(*plugins)

    replacements = {place: {"n": number * 10 + place} for place, number in enumerate(numbers) if number is not None}
    for place, plugin in enumerate(plugins):
        in_force = [args for by, args in replacements.items() if by < place]
        looks = [(args, True) for by, args in replacements.items() if by > place]
        assert plugin.seen == [(in_force[-1] if in_force else ARGS, False), *looks]
    assert verdict.args == [ARGS, *replacements.values()][-1]
    assert [each.detail for each in verdict.decisions] == list(replacements.values())


@law
@given(befores, orders, st.data())
def test_a_replacement_restores_no_permission_and_second_looks_emit_nothing(
    said: dict[str, Said], order: list[str], data: st.DataObject
) -> None:
    plugins = seated(said, order, Before)
    for plugin in plugins:
        plugin.again = [directive for directive, _ in data.draw(st.lists(st.sampled_from(STRENGTHS), max_size=2))]
    again = [directive for plugin in plugins for directive in plugin.again]
    looks = max([strength for each, strength in STRENGTHS if each in again], default=0)

    verdict = run_before(*plugins, Before("last", ReplaceArgs({"n": 2})))

    assert strength_of(verdict) == max(strongest(said), looks)
    assert list(verdict.asides) == [
        (plugin.id, directive) for plugin in plugins for directive, strength in said[plugin.id] if not strength
    ]


@law
@given(befores, orders, st.integers(0, 4))
def test_a_second_replacement_is_a_conflict_whatever_else_is_said(
    said: dict[str, Said], order: list[str], where: int
) -> None:
    plugins = seated(said, order, Before)
    plugins.insert(where, Before("early", None, ReplaceArgs({"n": 3})))

    verdict = run_before(*plugins, Before("last", ReplaceArgs({"n": 2})))

    assert failed(verdict).code == "plugin_conflict"
    assert "'early'" in failed(verdict).message
    assert "'last'" in failed(verdict).message
    assert (verdict.args, verdict.asides, verdict.decisions) == (ARGS, (), ())


# ---------------------------------------------------------------------- faults, and the two ways to wait

FAULTS: list[Any] = [ValueError("broken"), SystemExit(1), asyncio.CancelledError(), 42, ["nonsense"], "text", [None]]


@law
@given(befores, orders, st.integers(0, 5), st.sampled_from(FAULTS), st.sampled_from([Before, LaterBefore]))
def test_a_fault_fails_the_call_wherever_it_stands(
    said: dict[str, Said], order: list[str], where: int, fault: Any, kind: type[Voice]
) -> None:
    plugins = seated(said, order, Before)
    plugins.insert(where, kind("broken", fault))

    verdict = run_before(*plugins)

    assert failed(verdict).code == "before_tool_call_failed"
    assert failed(verdict).message.startswith("plugin 'broken': before_tool_call: ")
    assert (verdict.args, verdict.ask, verdict.asides, verdict.decisions) == (ARGS, None, (), ())


@law
@given(afters, orders, st.integers(0, 5), st.sampled_from(FAULTS), st.sampled_from([After, LaterAfter]))
def test_a_fault_withholds_the_result_wherever_it_stands(
    said: dict[str, Said], order: list[str], where: int, fault: Any, kind: type[Voice]
) -> None:
    plugins = seated(said, order, After)
    plugins.insert(where, kind("broken", fault))

    verdict = run_after(*plugins)

    assert failed(verdict).code == "after_tool_call_failed"
    assert "plugin 'broken': after_tool_call: " in failed(verdict).message
    assert (verdict.asides, verdict.decisions) == ((), ())


@law
@given(befores, afters, orders, st.booleans())
def test_async_hooks_decide_as_plain_ones_do(
    early: dict[str, Said], late: dict[str, Said], order: list[str], replaces: bool
) -> None:
    extra = ReplaceArgs({"n": 2}) if replaces else None

    plain = run_before(*seated(early, order, Before), Before("last", extra))
    waiting = run_before(*seated(early, order, LaterBefore), LaterBefore("last", extra))

    assert plain == waiting
    assert run_after(*seated(late, order, After)) == run_after(*seated(late, order, LaterAfter))
