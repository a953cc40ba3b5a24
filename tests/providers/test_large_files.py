"""What a large file costs: it passes through memory in pieces, from the host's disk to the store and to the model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from perdure.testing.crash import scratch
from perdure.testing.model_server import Reply
from tests.fuzzing import FULL
from tests.providers.wire import ANSWERS

ROOT = Path(__file__).parents[2]
SIZE = 200_000_000
MOST = 8 * 1024
"""Kilobytes more than before."""


class Counting:
    """A model's server that counts what it is sent and keeps none of it: first two tool calls, or text at once."""

    def __init__(self, replies: list[Reply]) -> None:
        self._replies = replies
        self.sizes: list[int] = []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncGenerator[str, None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                left = size = int(head.partition("content-length:")[2].split()[0])
                while left:
                    left -= len(await reader.read(min(left, 1024 * 1024)) or b"x" * left)
                reply = self._replies[len(self.sizes) % len(self._replies)]
                self.sizes.append(size)
                lines = ["HTTP/1.1 200 OK", f"content-length: {len(reply.body)}"]
                lines += [f"{name}: {value}" for name, value in reply.headers.items()]
                writer.write("\r\n".join([*lines, "", ""]).encode() + reply.body)


async def more(what: str, dialect: str, replies: list[Reply]) -> tuple[int, list[int]]:
    """Kilobytes that a child needs more for the large file than for a small one; and the sizes of its requests."""
    counting = Counting(replies)
    with scratch() as folder:
        small, large = Path(folder, "small.pdf"), Path(folder, "large.pdf")
        small.write_bytes(b"%PDF")
        large.touch()
        os.truncate(large, SIZE)  # holes: read as zeros, and take no disk
        async with counting.serving() as url:
            words = [what, dialect, url, str(small), str(large), str(Path(folder, "store.db"))]
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.providers.large_file", *words, cwd=ROOT, stdout=asyncio.subprocess.PIPE
            )
            told, _ = await asyncio.wait_for(child.communicate(), 120)
    found = json.loads(told)
    assert found["text"] == "Grüße, Welt 😀"
    return found["more_kb"], counting.sizes


Told: TypeAlias = Callable[[str, object], None]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured as Linux tells it"),
]


@pytest.mark.fuzz
@pytest.mark.parametrize("dialect", ANSWERS if FULL else ["bedrock"])  # which reads it twice, to sign it
async def test_a_file_of_200_megabytes_is_said_with_8_more_of_memory(dialect: str, record_property: Told) -> None:
    kilobytes, sizes = await more("say", dialect, [ANSWERS[dialect]["text"].reply])

    assert sizes[1] - sizes[0] > SIZE * 4 // 3
    assert kilobytes <= MOST
    record_property("perdure", f"a file of 200 MB, said to {dialect}: {kilobytes / 1024:.1f} MB more of memory")


async def test_a_tool_returns_a_file_of_200_megabytes_with_8_more_of_memory(record_property: Told) -> None:
    answers = ANSWERS["anthropic"]
    kilobytes, sizes = await more("show", "anthropic", [answers["parallel"].reply, answers["text"].reply])

    assert sizes[3] - sizes[2] > SIZE * 4 // 3
    assert kilobytes <= MOST
    record_property("perdure", f"a file of 200 MB, returned by a tool: {kilobytes / 1024:.1f} MB more of memory")


async def test_a_file_that_filters_cannot_look_at_is_withheld_with_8_more_of_memory(record_property: Told) -> None:
    answers = ANSWERS["anthropic"]
    kilobytes, sizes = await more("filter", "anthropic", [answers["parallel"].reply, answers["text"].reply])

    assert sizes[3] - sizes[2] < 10_000
    assert kilobytes <= MOST
    record_property("perdure", f"a file of 200 MB, withheld by a filter: {kilobytes / 1024:.1f} MB more of memory")
