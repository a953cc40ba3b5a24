"""A hundred programs: saved at every pause and finished in another OS process, and run again against their answers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest

from perdure.model.code import CodeCall, Paused
from perdure.ports.code import Executor
from tests.codemode.kit import AT, cpython, executing
from tests.codemode.other_process import Saved
from tests.codemode.programs import PROGRAMS, TOOLS, Program, Trace, answer, begin, chosen, finish

ROOT = Path(__file__).parents[2]


async def _saved_at_every_pause(executor: Executor, which: Program) -> tuple[Trace, list[tuple[Saved, Trace]]]:
    """The whole trace, and for each pause the dump with the rest of the trace from there."""
    repl, step = await begin(executor, which)
    calls: list[CodeCall] = []
    dumps: list[tuple[Saved, int, int]] = []
    printed = ""
    while isinstance(step, Paused):
        calls += step.calls
        printed += step.printed
        dumps.append((Saved(await repl.dump(f"k{len(dumps)}"), which.seed, len(dumps)), len(calls), len(printed)))
        paused = repl.paused
        assert paused is not None
        call = chosen(which.seed, len(dumps) - 1, paused.calls)
        step = await repl.resume(answer(call), at=AT + len(dumps) * 1000)
    await repl.close()
    error = step.error.message if step.error else ""
    whole = Trace(tuple(calls), printed + step.printed, step.value, error)
    return whole, [
        (saved, Trace(whole.calls[told:], whole.printed[shown:], whole.value, whole.error))
        for saved, told, shown in dumps
    ]


@pytest.mark.fuzz
@pytest.mark.slow
async def test_every_program_goes_on_at_every_pause_in_another_process(tmp_path: Path) -> None:
    expected: list[Trace] = []
    saved: list[Saved] = []
    async with executing() as executor:
        for which in PROGRAMS:
            whole, dumps = await _saved_at_every_pause(executor, which)
            assert (whole.error, len(dumps) > 1) == ("", True), which.code
            saved += [each for each, _ in dumps]
            expected += [rest for _, rest in dumps]
    file = tmp_path / "dumps.json"
    file.write_bytes(msgspec.json.encode(saved))
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.codemode.other_process", str(file), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    told, _ = await child.communicate()

    assert child.returncode == 0
    traces = msgspec.json.decode(told, type=list[Trace])
    for each, trace, rest in zip(saved, traces, expected, strict=True):
        assert trace == rest, (each.seed, each.answered)


@pytest.mark.fuzz
async def test_every_program_makes_the_same_calls_when_it_is_run_again() -> None:
    async with executing() as executor:
        for which in PROGRAMS:
            traces = []
            for _ in range(2):
                repl, step = await begin(executor, which)
                traces.append(await finish(repl, step, which.seed, 0))
                await repl.close()
            assert traces[0] == traces[1], which.code


@pytest.mark.fuzz
async def test_every_program_does_the_same_in_both_executors() -> None:
    """Monty is the oracle of CPython and the reverse: of what both support they make the same calls and values. Random
    numbers are made in other ways."""
    same = [which for which in PROGRAMS if "random" not in which.code]
    async with executing() as monty, cpython() as full:
        repl = await full.open()  # one process for all: each program binds all that it reads
        for which in same:
            expected = await finish(*await begin(monty, which), which.seed, 0)
            step = await repl.begin(which.code, TOOLS, at=AT, seed=str(which.seed), check=False)
            assert await finish(repl, step, which.seed, 0) == expected, which.code
    assert len(same) > 50
