"""A child process that puts a large file and sends it to a model: `python -m tests.providers.large_file <what> …`.

say         the user says it
show        a tool returns it
filter      a tool returns it, and a filter looks at results: it is too large to be looked at
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from perdure import Agent, Document, Runtime, tool
from perdure.aws import Credentials
from perdure.builtin.redaction import Redaction
from perdure.providers.registry import provider


def memory(field: str) -> int:
    """Kilobytes of this process: VmRSS, what it has now, or VmHWM, the most it had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


async def main(what: str, dialect: str, url: str, small: str, large: str, store: str) -> None:
    files = iter([small, large])

    @tool
    def get(n: int) -> Document:
        """Get it."""
        return Document.file(next(files))

    @tool
    def put() -> str:
        """Put it."""
        return "put"

    keys: Any = (lambda: Credentials("AKID", "SECRET")) if dialect == "bedrock" else "k"
    model = provider(f"{dialect}:m-1", base_url=url, key=keys)
    agent = Agent(model, tools=[get, put], plugins=[Redaction()] if what == "filter" else [])
    async with Runtime(store, agents=[agent]) as runtime:
        session = await runtime.session("s")
        # What is imported and allocated at a first turn is not the file's.
        await session.run([Document.file(small)] if what == "say" else "show")
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again from here
        result = await session.run([Document.file(large)] if what == "say" else "show")
        print(json.dumps({"more_kb": memory("VmHWM") - before, "text": result.text}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
