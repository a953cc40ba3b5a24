"""`perdure show` of a session whose model writes code."""

import asyncio
from pathlib import Path
from typing import Any

from perdure import Agent, Runtime, ToolCall, tool
from perdure.codemode import run_code
from perdure.testing import ScriptedModel
from tests.cli.shell import shell
from tests.kit import SOON
from tests.tools.coding import cell, coder


@tool
async def double(n: int) -> int:
    """Twice as much."""
    return 2 * n


def test_cells_are_shown_with_their_calls(store: Path) -> None:
    agent = coder(cell("x = await double(4)\nprint(x)"), cell("finish(f'{x + await double(1)}')"), tools=[double])

    async def talk() -> None:
        async with Runtime(store, agents=[agent]) as runtime:
            await (await runtime.session("s")).run("go")

    asyncio.run(talk())
    shown = [line.strip() for line in shell("show", "s", store=store).stdout.splitlines()]
    records = shell("show", "s", "--records", store=store).stdout

    calls = [line for line in shown if line.startswith("✓")]
    assert calls == ["✓ double(n=4)", "✓ double(n=1)", '✓ finish(value="10")']
    assert shown.index("✓ double(n=4)") < shown.index("user: Output of the cell:") < shown.index("✓ double(n=1)")
    assert "cell 1: 1.0 double()" in records
    assert 'cell 1: ok: {"output":"8"}' in records


@tool(approval="ask")
async def sign(what: str) -> str:
    """Sign."""
    return f"signed {what}"


def test_calls_of_run_code_are_shown_below_it_and_approved_by_their_id(store: Path) -> None:
    code = "x = await double(4)\nprint(x, await sign('it'))"

    async def talk(*answers: Any) -> None:
        agent = Agent(ScriptedModel(list(answers)), name="caller", tools=[double, sign, run_code])
        async with Runtime(store, agents=[agent]) as runtime:
            session = await runtime.session("s")
            if len(answers) > 1:
                await session.run("go")
            else:
                await asyncio.wait_for(session.result("s.1"), SOON)

    asyncio.run(talk([ToolCall("c", "run_code", {"code": code})], "never"))
    pending = shell("pending", store=store).stdout
    approved = shell("approve", "s.1.1.0.1", store=store)
    asyncio.run(talk("done"))
    shown = shell("show", "s", store=store).stdout

    assert "s.1.1.0.1" in pending
    assert approved.exit_code == 0
    lines = [line.rstrip() for line in shown.splitlines() if "✓" in line]
    assert [line.partition("(")[0] for line in lines] == ["  ✓ run_code", "    ✓ double", "    ✓ sign"]
