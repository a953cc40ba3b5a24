"""A session in code mode that is left in the middle of a cell, and the process that goes on with it.

    python -m tests.tools.saving FOLDER...

goes on with the turn of the store in each folder and prints, as JSON, how it ended and what was done.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from perdure import Plugin, Runtime, tool
from perdure.codemode.dumps import key_beside
from perdure.codemode.monty import MontyExecutor
from perdure.model.code import CPython
from perdure.model.tool import ToolSpec
from perdure.ports.code import Executor, Repl
from tests.kit import SOON, crash, until
from tests.tools.coding import cell, coder, outputs

FIRST = cell("import asyncio\nbase = await look(100)")
SECOND = cell("""\
total = base
for n in range(2):
    total += await look(n)
print('so far', total)
seen = [await look(n) for n in (2, 3)]
a, b = await asyncio.gather(look(4), look(5))
print('both', a, b)
c = await look(6)
[total, seen, a, b, c]""")

TOLD = ["The cell printed nothing.", "Output of the cell:\nso far 104\nboth 5 6\n[104, [3, 4], 5, 6, 7]"]
CALLS = 7
"""Of the second cell."""


class Watched:
    """A REPL that notes the cells which begin in it."""

    def __init__(self, repl: Repl, begun: list[str]) -> None:
        self._repl, self._begun = repl, begun

    def __getattr__(self, name: str) -> Any:
        if name == "begin":
            self._begun.append(name)
        return getattr(self._repl, name)


class WatchedExecutor(MontyExecutor):
    def __init__(self, key: bytes, begun: list[str]) -> None:
        super().__init__(key=key)
        self.begun = begun

    async def open(self, state: bytes | None = None, tools: Sequence[ToolSpec] = ()) -> Any:
        return Watched(await super().open(state, tools), self.begun)


class Sandbox(Plugin):
    """Runs cells on Monty under a key of its own, and notes the cells that begin."""

    id = "sandbox"

    def __init__(self, key: bytes) -> None:
        self.key, self.begun = key, list[str]()

    def code_executor(self) -> Executor:
        return WatchedExecutor(self.key, self.begun)


class Seen(Struct):
    """What the model was told, how many cells were begun, what `look` was called with by every process, and how many
    attempts of each call are recorded."""

    told: list[str]
    begun: int
    ledger: list[int]
    attempts: list[int]


IN_CPYTHON = "in cpython"
"""Folders whose names begin so are of an agent whose cells run in CPython."""


def looker(folder: Path, sandbox: Sandbox, *answers: str, hang: int = -1, hangs: asyncio.Event | None = None) -> Any:
    """An agent whose tool writes down what it is called with, and hangs at one of these calls."""
    full = folder.name.startswith(IN_CPYTHON)

    @tool(recovery="rerun")
    async def look(n: int) -> int:
        """Look."""
        with (folder / "ledger").open("a") as ledger:
            ledger.write(f"{n}\n")
        if n == hang and hangs is not None:
            hangs.set()
            await asyncio.Event().wait()
        return n + 1

    return coder(*answers, tools=[look], plugins=[] if full else [sandbox], code=CPython() if full else None)


async def leave(folder: Path, call: int) -> None:
    """Leave the turn while that call of its second cell runs."""
    hangs, sandbox = asyncio.Event(), Sandbox(key_beside(folder / "agent.db"))
    agent = looker(folder, sandbox, FIRST, SECOND, hang=call, hangs=hangs)
    runtime = Runtime(folder / "agent.db", agents=[agent])
    await runtime.__aenter__()
    await (await runtime.session("s")).send("go")

    async def is_written() -> bool:
        """Of two calls at once, the other one is answered, and that is on disk."""
        other = {4: b'"2.5"', 5: b'"2.4"'}.get(call)
        bodies = [body for *_, body in await runtime.store.nodes(1, 1, 1)]
        return other is None or any(other in body and b"ended" in body for body in bodies)

    async with asyncio.timeout(SOON):
        await hangs.wait()
    await until(is_written)
    await crash(runtime)


async def go_on(folder: Path) -> Seen:
    sandbox = Sandbox(key_beside(folder / "agent.db"))
    async with Runtime(folder / "agent.db", agents=[looker(folder, sandbox, "Done.")]) as runtime:
        result = await (await runtime.session("s")).result("s.1")
    ledger = [int(line) for line in (folder / "ledger").read_text().split()]
    attempts = [each.attempts for each in result.tool_calls]
    return Seen(outputs(result.messages), len(sandbox.begun), ledger, attempts)


async def main(folders: Sequence[str]) -> None:
    found = {folder: await go_on(Path(folder)) for folder in folders}
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
