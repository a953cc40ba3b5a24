"""`mainstay show` of a session whose model writes code."""

import asyncio
from pathlib import Path

from mainstay import Runtime, tool
from tests.cli.shell import shell
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
