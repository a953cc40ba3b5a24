"""The law of replay: any program of calls, killed anywhere any number of times, ends as if nobody had killed it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure import Process, ProcessContext, process
from perdure.errors import OutcomeUnknown
from perdure.testing.crash import Crash, Lab, Mode, Played, Point, play
from tests.fuzzing import cases
from tests.processes.killed import OFTEN

Ctx = ProcessContext[Lab]
Program: TypeAlias = Any
"""A list of calls, each a list of its name and, for those that hold programs, these."""

EXAMPLES = cases(40, 1_500)

LEAVES = ("once", "rerun", "sync", "now", "chance", "sleep", "signal", "emit")


# ---------------------------------------------------------------------- what a program does


async def act(lab: Lab, kind: str, key: str) -> str:
    await lab.effect(kind, key)
    return key


def act_now(lab: Lab, kind: str, key: str) -> str:
    lab.effect_now(kind, key)
    return key


async def run(ctx: Ctx, program: Program, path: str) -> list[Any]:
    return [await one(ctx, call, f"{path}{number}") for number, call in enumerate(program)]


async def one(ctx: Ctx, call: Any, path: str) -> Any:
    name, *inner = call
    if name in ("gather", "all"):
        works = [run(ctx, program, f"{path}.{n}.") for n, program in enumerate(inner)]
        return await (ctx.gather(*works) if name == "gather" else ctx.all(*works))
    if name == "any":
        return list(await ctx.any(ctx.wait_signal("never"), run(ctx, inner[0], f"{path}.1.")))
    if name == "child":
        child = await ctx.start(obeying, {"program": inner[0], "path": f"{path}."})
        return await child.result()
    return await LEAF[name](ctx, path)


async def once(ctx: Ctx, path: str) -> str:
    try:
        return await ctx.step(act, ctx.deps, "once", path)
    except OutcomeUnknown:
        return f"unknown {path}"


async def rerun(ctx: Ctx, path: str) -> str:
    return await ctx.step(act, ctx.deps, "rerun", path, recovery="rerun")


async def sync(ctx: Ctx, path: str) -> str:
    return await ctx.step(act_now, ctx.deps, "rerun", path, recovery="rerun")


async def now(ctx: Ctx, path: str) -> str:
    """What was seen goes into a step: if a replay saw something else, it would diverge."""
    return "now" if await ctx.step(str, ctx.now(), recovery="rerun") else ""


async def chance(ctx: Ctx, path: str) -> str:
    return "chance" if await ctx.step(str, [ctx.random(), str(ctx.uuid())], recovery="rerun") else ""


async def sleep(ctx: Ctx, path: str) -> None:
    await ctx.sleep(0.001)


async def signal(ctx: Ctx, path: str) -> Any:
    return await ctx.wait_signal(path)


async def emit(ctx: Ctx, path: str) -> None:
    await ctx.emit("told", path)


LEAF: dict[str, Callable[[Ctx, str], Any]] = {
    f.__name__: f for f in (once, rerun, sync, now, chance, sleep, signal, emit)
}


@process(events=["told"])
async def obeying(ctx: Ctx, program: list[Any], path: str = "") -> list[Any]:
    return await run(ctx, program, path)


@process(events=["told"])
async def obeying_in_segments(ctx: Ctx, program: list[Any]) -> list[Any]:
    done = ctx.state or []
    while len(done) < len(program):
        done = [*done, await one(ctx, program[len(done)], str(len(done)))]
        await ctx.checkpoint(done, restart=True)
    return done


def signals_of(program: Program, path: str = "") -> list[tuple[bool, str]]:
    """The signals that a program waits for; those of children are sent to them."""
    found: list[tuple[bool, str]] = []
    for number, (name, *inner) in enumerate(program):
        here = f"{path}{number}"
        if name == "signal":
            found.append((True, here))
        for n, sub in enumerate(inner):
            below = {"any": f"{here}.1.", "child": f"{here}."}.get(name, f"{here}.{n}.")
            found += [(ours and name != "child", each) for ours, each in signals_of(sub, below)]
    return found


# ---------------------------------------------------------------------- programs


def without_signals(program: Program) -> Program:
    """A child is sent nothing here: its parent alone knows its id."""
    return [
        ["now"] if call[0] == "signal" else [call[0], *(without_signals(each) for each in call[1:])] for call in program
    ]


leaves = st.sampled_from([[name] for name in LEAVES])


def holding(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    programs = st.lists(inner, max_size=3)
    return st.one_of(
        st.tuples(st.sampled_from(["gather", "all"]), programs, programs).map(list),
        st.tuples(st.just("any"), programs).map(list),
        st.tuples(st.just("child"), programs.map(without_signals)).map(list),
    )


programs = st.lists(st.recursive(leaves, holding, max_leaves=5), min_size=1, max_size=4)


def scenario_of(what: Process[..., Any], program: Program) -> Callable[[Lab], Any]:
    async def scenario(lab: Lab) -> None:
        async with lab.runtime(processes=[obeying, obeying_in_segments], deps=lab, lease=OFTEN) as runtime:
            handle = await runtime.start(what, {"program": program}, id="p")
            for ours, name in signals_of(program):
                if ours and (await handle.record()).live:
                    await handle.signal(name, name, key=name)
            await lab.effect("ended", "p", msgspec.to_builtins(await handle.outcome(20)))

    return scenario


def kill_at(points: list[Point], where: float, mode: Mode) -> Crash:
    return Crash(points[int(where * (len(points) - 1))].name, mode)


KILLS = st.lists(
    st.tuples(st.floats(0, 1, allow_nan=False), st.sampled_from(["before", "lost", "hang"])), min_size=1, max_size=3
)


def end_of(played: Played) -> Any:
    # A later life may take another way, and never pass the point where it was to die.
    problems = [each for each in played.problems if "without passing" not in each]
    seen = [line.data for line in played.ledger if line.name == "ended"]
    assert problems == []
    assert seen
    assert all(each == seen[0] for each in seen)
    assert seen[0]["type"] == "success", seen[0]
    return seen[0].get("value", [])


def known(value: Any) -> Any:
    """A result with what is unknown put in place."""
    if isinstance(value, list):
        return [known(each) for each in value]
    return value.removeprefix("unknown ") if isinstance(value, str) else value


def flat(value: Any) -> list[Any]:
    return [each for item in value for each in flat(item)] if isinstance(value, list) else [value]


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    program=programs,
    what=st.sampled_from([obeying, obeying_in_segments]),
    kills=KILLS,
)
def test_a_killed_program_ends_like_one_that_was_not(
    program: Program, what: Process[..., Any], kills: list[tuple[float, Mode]]
) -> None:
    scenario = scenario_of(what, program)
    plain = play(scenario)
    wanted = end_of(plain)
    points = [
        p for p in plain.traces[0] if p.kind in ("record", "write", "effect") and p.name not in ("beat", "retire")
    ]
    played = play(scenario, [kill_at(points, where, mode) for where, mode in kills])
    got = end_of(played)

    assert known(got) == wanted
    counted: Counter[tuple[str, str]] = played.effects
    unknown = {each.removeprefix("unknown ") for each in flat(got) if str(each).startswith("unknown ")}
    for (kind, key), usual in plain.effects.items():
        count = counted.pop((kind, key), 0)
        if kind == "once":
            assert usual == 1
            assert count <= 1
            assert count == 1 or key in unknown
        elif kind == "rerun":
            assert 1 <= count <= 1 + len(kills)
    assert {kind for kind, _ in counted} <= {"ended"}
