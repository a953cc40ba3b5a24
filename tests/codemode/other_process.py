"""Finish the cells of saved dumps in a process that has never seen them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from tests.codemode.kit import executing
from tests.codemode.programs import TOOLS, Trace, finish


class Saved(Struct, frozen=True):
    dump: bytes
    seed: int
    answered: int


async def main(path: Path) -> None:
    traces: list[Trace] = []
    async with executing() as executor:
        for saved in msgspec.json.decode(path.read_bytes(), type=list[Saved]):
            repl = await executor.open(saved.dump, TOOLS)
            traces.append(await finish(repl, None, saved.seed, saved.answered))
            await repl.close()
    sys.stdout.buffer.write(msgspec.json.encode(traces))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
