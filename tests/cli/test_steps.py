"""`perdure processes steps`: what a durable function has done, and what it is at."""

import asyncio
from pathlib import Path

from perdure import ProcessContext, Runtime, process
from tests.cli.sample_processes import parked, prepare
from tests.cli.shell import shell, shell_json


def lines(text: str) -> list[list[str]]:
    return [line.split(maxsplit=4) for line in text.splitlines()[1:]]


def test_steps_are_listed_with_how_they_ended(store: Path) -> None:
    async def work(runtime: Runtime) -> None:
        await (await runtime.start("doubled", {"n": 21}, id="d-1")).result(timeout=60)

    prepare(store, work)

    assert lines(shell("processes", "steps", "d-1", store=store).stdout) == [["1", "step", "double", "1", "ok: 42"]]
    assert [record["type"] for record in shell_json("processes", "steps", "d-1", store=store)] == ["done.1"]


def test_what_it_is_at_is_the_last_line(store: Path) -> None:
    async def work(runtime: Runtime) -> None:
        await runtime.start("approved", {"what": "tea"}, id="a-1")
        await parked(runtime, "a-1")

    prepare(store, work)

    [last] = lines(shell("processes", "steps", "a-1", store=store).stdout)
    assert last[:4] == ["1", "signal", "approve", "1"]
    assert last[4] in ("begun, in 60 min", "begun, in 1 h")


def test_a_checkpoint_stands_for_what_was_before_it_and_a_failed_step_says_why(store: Path) -> None:
    async def hopeless() -> None:
        raise ValueError("no such account")

    @process
    async def pay(ctx: ProcessContext[object]) -> None:
        if ctx.state is None:
            await ctx.checkpoint({"paid": 1}, restart=True)
        await ctx.step(hopeless)

    async def work() -> None:
        async with Runtime(store, processes=[pay]) as runtime:
            await (await runtime.start(pay, id="p-1")).outcome()

    asyncio.run(work())

    result = shell("processes", "steps", "p-1", store=store)
    told, where = lines(result.stdout), result.stdout.splitlines()[3:]
    assert told[0] == ["—", "checkpoint", "1", '{"paid":1}']
    assert told[1][1:] == ["step", "hopeless", "1", "raised: ValueError: no such account"]
    assert where[0] == f"call {told[1][0]} raised:"
    assert where[2].endswith("in hopeless")
    assert where[-1] == "  ValueError: no such account"


def test_a_process_without_steps_and_one_that_is_not_there(store: Path) -> None:
    async def work(runtime: Runtime) -> None:
        await runtime.processes.register("build-7")

    prepare(store, work)

    assert shell("processes", "steps", "build-7", store=store).stdout == "nothing is recorded\n"
    assert shell("processes", "steps", "nobody", store=store).exit_code == 2
