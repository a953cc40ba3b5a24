"""The decisions of several plugins about one call, case by case. `test_laws_properties` holds them against any case."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.model.message import Message
from perdure.model.plugin import (
    AbortTurn,
    AskPerson,
    CreateSession,
    Decision,
    EmitEvents,
    EmitTrace,
    EnqueueMessages,
    ReplaceArgs,
    ShortCircuit,
)
from perdure.model.tool import BlobRef, Cancelled, Denied, Failed, Ok, OutcomeUnknown
from perdure.plugins.hooks import ToolCallContext, ToolEndContext
from tests.plugins.made import ARGS, ENDED, After, Before, LastAfter, LaterBefore, after, before, failed, having

NO = ShortCircuit(Denied("not today", "policy"))
CACHED = ShortCircuit(Ok("cached"))
STOP = AbortTurn("over_budget", "too dear")
WHOLE = BlobRef("a" * 64, 9)


# ---------------------------------------------------------------------- before a call


async def test_a_call_that_nobody_minds_runs_as_it_was_asked() -> None:
    verdict = await before(Before("a"), Before("b", []), Before("c", ()))

    assert (verdict.args, verdict.outcome, verdict.ask, verdict.decisions, verdict.asides) == (ARGS, None, None, (), ())


async def test_denial_beats_approval_beats_nothing() -> None:
    verdict = await before(Before("a", AskPerson("sure?")), Before("b", NO), Before("c", CACHED), Before("d"))

    assert verdict.outcome == Denied("not today", "policy")
    assert verdict.ask is None
    assert verdict.decisions == (Decision("b", "before_tool_call", "short_circuit_tool", None, ("a", "c")),)


async def test_a_person_is_asked_about_the_arguments_that_would_run() -> None:
    verdict = await before(Before("a", AskPerson("sure?")), Before("b", ReplaceArgs({"n": 2})))

    assert (verdict.args, verdict.outcome, verdict.ask) == ({"n": 2}, None, "sure?")
    assert verdict.decisions == (
        Decision("b", "before_tool_call", "replace_tool_args", {"n": 2}),
        Decision("a", "before_tool_call", "ask_person", "sure?"),
    )


async def test_asking_without_a_reason_is_asking_all_the_same() -> None:
    verdict = await before(Before("a", AskPerson()))

    assert verdict.ask == ""


async def test_an_abort_fails_the_call_and_keeps_the_words_of_every_denial() -> None:
    verdict = await before(
        Before("a", ShortCircuit(Failed("quota", "none left", {"left": 0}))),
        Before("b", STOP),
        Before("c", NO),
        Before("d", ShortCircuit(Cancelled("ann", "enough"))),
        Before("e", ShortCircuit(OutcomeUnknown("who knows"))),
        Before("f", CACHED),
    )

    assert verdict.outcome == Failed(
        "over_budget",
        "too dear",
        {
            "displaced": [
                {"plugin": "a", "code": "quota", "message": "none left"},
                {"plugin": "c", "code": "denied", "message": "not today"},
                {"plugin": "d", "code": "cancelled", "message": "enough"},
                {"plugin": "e", "code": "outcome_unknown", "message": "who knows"},
            ]
        },
    )
    assert verdict.decisions == (
        Decision(
            "b",
            "before_tool_call",
            "abort_turn",
            {"code": "over_budget", "message": "too dear"},
            ("a", "c", "d", "e", "f"),
        ),
    )


async def test_a_denial_said_again_on_a_second_look_is_kept_once() -> None:
    verdict = await before(Before("a", NO, NO), Before("b", [ReplaceArgs({"n": 2}), STOP]))

    assert failed(verdict).data == {"displaced": [{"plugin": "a", "code": "denied", "message": "not today"}]}
    assert verdict.decisions[-1].over == ("a",)


async def test_a_plugin_that_says_two_things_displaces_nobody_but_itself() -> None:
    verdict = await before(Before("a", [AskPerson("sure?"), NO, CACHED]))

    assert verdict.outcome == Denied("not today", "policy")
    assert verdict.decisions == (Decision("a", "before_tool_call", "short_circuit_tool"),)


async def test_equals_are_decided_by_plugin_id_before_a_call() -> None:
    first = await before(Before("b", ShortCircuit(Ok("b"))), Before("a", ShortCircuit(Ok("a"))))
    second = await before(Before("a", ShortCircuit(Ok("a"))), Before("b", ShortCircuit(Ok("b"))))

    assert first.outcome == second.outcome == Ok("a")


async def test_later_plugins_see_replaced_arguments_and_earlier_ones_look_once_more() -> None:
    a, b, c = Before("a"), Before("b", ReplaceArgs({"n": 2})), Before("c")

    verdict = await before(a, b, c)

    assert a.seen == [({"n": 1}, False), ({"n": 2}, True)]
    assert b.seen == [({"n": 1}, False)]
    assert c.seen == [({"n": 2}, False)]
    assert verdict.args == {"n": 2}


async def test_a_second_look_may_deny() -> None:
    verdict = await before(Before("a", None, NO), Before("b", ReplaceArgs({"n": 2})))

    assert verdict.outcome == Denied("not today", "policy")


async def test_a_second_look_cannot_take_a_denial_back() -> None:
    verdict = await before(Before("a", NO, CACHED), Before("b", ReplaceArgs({"n": 2})))

    assert verdict.outcome == Denied("not today", "policy")


async def test_what_a_second_look_emits_does_not_happen() -> None:
    said: list[Any] = [EmitEvents(("seen",)), EmitTrace("seen"), CreateSession(label="audit")]

    verdict = await before(Before("a", said, said), Before("b", [ReplaceArgs({"n": 2}), EmitTrace("b")]))

    assert verdict.asides == (("a", said[0]), ("a", said[1]), ("a", said[2]), ("b", EmitTrace("b")))


async def test_a_second_replacement_is_a_conflict_that_names_both() -> None:
    verdict = await before(
        Before("a", [ReplaceArgs({"n": 5}), EmitTrace("a")], ReplaceArgs({"n": 5})), Before("b", ReplaceArgs({"n": 2}))
    )

    assert verdict.outcome == Failed(
        "plugin_conflict", "plugins 'b' and 'a' both replace the arguments", {"plugins": ["b", "a"]}
    )
    assert (verdict.args, verdict.ask, verdict.decisions, verdict.asides) == (ARGS, None, (), ())


async def test_a_second_look_that_leaves_the_arguments_as_they_are_is_no_conflict() -> None:
    verdict = await before(
        Before("a", None, ReplaceArgs({"m": [], "n": 2})), Before("b", ReplaceArgs({"n": 2, "m": []}))
    )

    assert (verdict.args, verdict.outcome) == ({"n": 2, "m": []}, None)


async def test_true_is_not_one_when_replacements_are_compared() -> None:
    verdict = await before(Before("a", None, ReplaceArgs({"n": True})), Before("b", ReplaceArgs({"n": 1})))

    assert failed(verdict).code == "plugin_conflict"


async def test_one_plugin_that_replaces_twice_is_a_conflict_with_itself() -> None:
    verdict = await before(Before("a", [ReplaceArgs({"n": 2}), ReplaceArgs({"n": 3})]))

    assert verdict.outcome == Failed("plugin_conflict", "plugin 'a' replaced the arguments twice", {"plugins": ["a"]})


async def test_a_fault_denies_the_call_and_nothing_said_before_it_counts() -> None:
    verdict = await before(
        Before("a", [EmitEvents((1,)), CreateSession(), ReplaceArgs({"n": 2}), CACHED]),
        Before("b", ValueError("broken")),
        never := Before("c"),
    )

    assert verdict.outcome == Failed("before_tool_call_failed", "plugin 'b': before_tool_call: ValueError: broken")
    assert (verdict.args, verdict.ask, verdict.decisions, verdict.asides) == (ARGS, None, (), ())
    assert never.seen == []


async def test_a_fault_on_a_second_look_denies_the_call() -> None:
    verdict = await before(Before("a", None, KeyError("old")), Before("b", ReplaceArgs({"n": 2})))

    assert failed(verdict).code == "before_tool_call_failed"
    assert "'a'" in failed(verdict).message


async def test_a_directive_that_means_nothing_here_denies_the_call() -> None:
    verdict = await before(Before("a", EnqueueMessages((Message("user", "psst"),))))

    assert failed(verdict).code == "before_tool_call_failed"
    assert "EnqueueMessages means nothing here" in failed(verdict).message


async def test_a_generator_that_breaks_halfway_denies_the_call() -> None:
    def halfway(ctx: ToolCallContext) -> Any:
        yield EmitTrace("looking")
        raise SystemExit(3)

    verdict = await before(having("before_tool_call", halfway, "a"), LaterBefore("b"))

    assert failed(verdict).code == "before_tool_call_failed"
    assert verdict.asides == ()


async def test_arguments_changed_in_place_change_nothing() -> None:
    def meddle(ctx: ToolCallContext) -> None:
        ctx.args["path"]["name"] = "/etc/passwd"
        ctx.args["path"]["more"].append("x")

    args = {"path": {"name": "/tmp/a", "more": ["y"]}}
    b = Before("b", ReplaceArgs({"path": {"name": "/tmp/b", "more": []}}))
    c = Before("c")

    verdict = await before(having("before_tool_call", meddle, "a"), b, c, args=args)

    assert args == {"path": {"name": "/tmp/a", "more": ["y"]}}
    assert b.seen == [({"path": {"name": "/tmp/a", "more": ["y"]}}, False)]
    assert c.seen == [({"path": {"name": "/tmp/b", "more": []}}, False)]
    assert verdict.args == {"path": {"name": "/tmp/b", "more": []}}


async def test_nobody_short_circuits_to_bytes_that_were_never_kept() -> None:
    verdict = await before(Before("a", ShortCircuit(Ok("short", WHOLE))))

    assert failed(verdict).code == "before_tool_call_failed"
    assert "bytes that this call did not keep" in failed(verdict).message


# ---------------------------------------------------------------------- after a call


async def test_an_outcome_that_nobody_minds_stays() -> None:
    left = await after(After("a"), After("b"))

    assert (left.outcome, left.decisions, left.asides) == (ENDED, (), ())


async def test_each_plugin_sees_what_the_one_before_it_left() -> None:
    z, a, b = After("z", ShortCircuit(Ok("z"))), After("a", ShortCircuit(Ok("a"))), After("b")

    left = await after(z, a, b)

    assert (z.seen, a.seen, b.seen) == ([(ENDED, False)], [(Ok("z"), False)], [(Ok("a"), False)])
    assert left.outcome == Ok("a")
    assert left.decisions == (
        Decision("z", "after_tool_call", "short_circuit_tool"),
        Decision("a", "after_tool_call", "short_circuit_tool"),
    )


@pytest.mark.parametrize(
    "ended", [Denied("no", "ann"), Failed("tool_error", "broken"), Cancelled("ann", "enough"), OutcomeUnknown("died")]
)
async def test_a_replacement_makes_no_success_of_a_call_that_did_not_end_as_one(ended: Any) -> None:
    left = await after(After("a", CACHED), After("b", [CACHED, EmitTrace("b")]), ended=ended)

    assert left.outcome == ended
    assert (left.decisions, left.asides) == ((), (("b", EmitTrace("b")),))


async def test_a_denial_after_a_call_is_not_taken_back_and_may_be_put_in_other_words() -> None:
    taken_back = await after(After("a", NO), After("b", CACHED))
    reworded = await after(After("a", NO), After("b", ShortCircuit(Denied("later, perhaps"))))

    assert taken_back.outcome == Denied("not today", "policy")
    assert taken_back.decisions == (Decision("a", "after_tool_call", "short_circuit_tool", None, ("b",)),)
    assert reworded.outcome == Denied("later, perhaps")


async def test_filters_see_what_all_others_have_left_wherever_they_stand() -> None:
    first, last = LastAfter("f", ShortCircuit(Ok("clean"))), LastAfter("g")

    left = await after(first, After("a", ShortCircuit(Ok("long"))), last, After("b", ShortCircuit(Ok("short"))))

    assert first.seen == [(Ok("short"), False)]
    assert last.seen == [(Ok("clean"), False)]
    assert left.outcome == Ok("clean")


async def test_filters_see_the_words_of_an_abort_and_of_what_it_displaced() -> None:
    clean = ShortCircuit(Failed("over_budget", "[hidden]", {"displaced": []}))
    seeing = LastAfter("f", clean)

    left = await after(seeing, After("a", NO), After("b", STOP))

    assert seeing.seen == [
        (
            Failed(
                "over_budget",
                "too dear",
                {"displaced": [{"plugin": "a", "code": "denied", "message": "not today"}]},
            ),
            False,
        )
    ]
    assert left.outcome == clean.outcome


async def test_an_abort_by_a_filter_does_not_bring_back_words_that_another_one_hid() -> None:
    hiding = LastAfter("f", ShortCircuit(Failed("leak", "[hidden]")))

    left = await after(After("a", ShortCircuit(Failed("leak", "hunter2"))), hiding, LastAfter("g", STOP))

    assert "hunter2" not in str(left.outcome)
    assert failed(left).code == "over_budget"


async def test_what_a_plugin_raised_is_seen_by_filters_before_it_is_recorded() -> None:
    seeing = LastAfter("f", ShortCircuit(Failed("after_tool_call_failed", "[hidden]")))

    left = await after(seeing, After("a", ValueError("cannot read hunter2")))

    assert "hunter2" in str(seeing.seen)
    assert left.outcome == Failed("after_tool_call_failed", "[hidden]")


async def test_a_filter_that_fails_withholds_the_outcome_and_its_own_words() -> None:
    left = await after(After("a", CACHED), LastAfter("f", ValueError("cannot read hunter2")), never := LastAfter("g"))

    assert left.outcome == Failed(
        "after_tool_call_failed", "the call ended and its result is withheld: plugin 'f' failed"
    )
    assert (left.decisions, left.asides, never.seen) == ((), (), [])


async def test_a_filter_that_would_make_a_success_of_a_failure_withholds_it() -> None:
    left = await after(LastAfter("f", ShortCircuit(Ok("[hidden]"))), ended=Failed("tool_error", "hunter2"))

    assert failed(left).code == "after_tool_call_failed"
    assert "hunter2" not in failed(left).message


async def test_an_abort_withholds_a_result_and_keeps_denials_that_come_before_and_after_it() -> None:
    verdict = await after(
        After("a", ShortCircuit(Failed("leak", "a secret"))), After("b", STOP), After("c", NO), After("d", CACHED)
    )

    assert verdict.outcome == Failed(
        "over_budget",
        "too dear",
        {
            "displaced": [
                {"plugin": "a", "code": "leak", "message": "a secret"},
                {"plugin": "c", "code": "denied", "message": "not today"},
            ]
        },
    )


async def test_a_fault_withholds_the_result() -> None:
    verdict = await after(After("a", [EmitTrace("a"), CACHED]), After("b", ValueError("broken")))

    assert verdict.outcome == Failed(
        "after_tool_call_failed",
        "the call ended and its result is withheld: plugin 'b': after_tool_call: ValueError: broken",
    )
    assert (verdict.decisions, verdict.asides) == ((), ())


async def test_messages_may_follow_a_call_but_arguments_come_too_late() -> None:
    psst = EnqueueMessages((Message("user", "psst"),))

    spoken = await after(After("a", psst, psst), After("b", CACHED))
    late = await after(After("a", ReplaceArgs({"n": 2})))

    assert spoken.asides == (("a", psst),)
    assert failed(late).code == "after_tool_call_failed"


@pytest.mark.parametrize("ended", [Ok({"rows": [1]}), Failed("tool_error", "no", {"rows": [1]})])
async def test_an_outcome_changed_in_place_stays_as_it_was(ended: Ok | Failed) -> None:
    def meddle(ctx: ToolEndContext) -> None:
        held: Any = ctx.outcome.value if isinstance(ctx.outcome, Ok) else getattr(ctx.outcome, "data", None)
        held["rows"].append(2)
        ctx.args["n"] = 3

    verdict = await after(having("after_tool_call", meddle, "a"), b := After("b"), ended=ended)

    assert verdict.outcome == ended
    assert b.seen == [(ended, False)]
    assert ended in (Ok({"rows": [1]}), Failed("tool_error", "no", {"rows": [1]}))
    assert ARGS == {"n": 1}


async def test_a_plugin_may_shorten_what_is_shown_of_kept_bytes_but_not_point_at_others() -> None:
    ended = Ok("long…", WHOLE)

    shorter = await after(After("a", ShortCircuit(Ok("l…", WHOLE))), ended=ended)
    other = await after(After("a", ShortCircuit(Ok("l…", BlobRef("b" * 64, 9)))), ended=ended)

    assert shorter.outcome == Ok("l…", WHOLE)
    assert failed(other).code == "after_tool_call_failed"
