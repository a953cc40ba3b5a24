"""A session whose tools leave a secret wherever they can, and a filter behind a plugin that replaces results.

    call 0  fetch   returns it, tells it as progress, keeps it as an artifact
    call 1  crawl   does the same in the background

Each incarnation first looks at everything that the one before has stored, and leaves a line for each place where the
secret is.
"""

from __future__ import annotations

from typing import Any

from perdure import Agent, ModelRequest, ToolCall, ToolContext, tool
from perdure.builtin import Redaction
from perdure.engine.journal import load_turns
from perdure.model.codec import encode
from perdure.model.plugin import ShortCircuit
from perdure.model.record import Ended
from perdure.model.tool import Ok
from perdure.plugins.hooks import Plugin, ToolEndContext
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab

SECRET = "ghp_" + "abcdefghijklmnopqrstuvwxyz0123456789"  # was never valid


class Shorten(Plugin):
    """Replaces whatever a tool returned, before the filter."""

    id = "shorten"

    def after_tool_call(self, ctx: ToolEndContext) -> ShortCircuit | None:
        return ShortCircuit(Ok(str(ctx.outcome.value)[:200])) if isinstance(ctx.outcome, Ok) else None


def agents(lab: Lab) -> list[Agent[Any]]:
    @tool(recovery="rerun")
    async def fetch(ctx: ToolContext[Any]) -> str:
        """Fetch."""
        ctx.progress({"with": SECRET})
        await ctx.artifacts.put(f"token: {SECRET}", name="log")
        await lab.effect("fetched", ctx.idempotency_key)
        return f"fetched with {SECRET}"

    @tool(recovery="rerun", background=True)
    async def crawl(ctx: ToolContext[Any]) -> str:
        """Crawl."""
        ctx.progress({"with": SECRET})
        await ctx.artifacts.put(f"token: {SECRET}", name="crawled")
        await lab.effect("crawled", ctx.idempotency_key)
        return f"crawled with {SECRET}"

    def answer(request: ModelRequest) -> Any:
        last = request.messages[-1]
        if last.role == "user" and last.text == "go":
            return [ToolCall("a", "fetch"), ToolCall("b", "crawl")]
        return "done"

    return [Agent(FunctionModel(answer), name="worker", tools=[fetch, crawl], plugins=[Redaction(), Shorten()])]


async def look_for_it(lab: Lab) -> None:
    """Leave a line for every place in the store where the secret is."""
    async with lab.runtime() as reader:
        row = await reader.store.session("s")
        for turn in [] if row is None else await load_turns(reader.store, row.sid, 1, row.next):
            for record in turn.records:
                kept = list(record.artifacts) if isinstance(record, Ended) else []
                blobs = [await reader.store.blobs.get(each.digest) for each in kept]
                if SECRET.encode() in b"".join([encode(record), *blobs]):
                    await lab.effect("leaked", f"{turn.number} {type(record).__name__}")
        for process in await reader.processes.list():
            async for event in reader.processes.events(process.id):
                digest = event.payload.get("digest") if isinstance(event.payload, dict) else None
                blob = b"" if digest is None else await reader.store.blobs.get(digest)
                if SECRET.encode() in encode(event.payload) + blob:
                    await lab.effect("leaked", f"{process.id} {event.type}")


async def filtered(lab: Lab) -> None:
    if lab.incarnation > 1:
        await look_for_it(lab)
    async with lab.runtime(agents(lab)) as runtime:
        session = await runtime.session("s", agent="worker")
        await session.run("go", key="go")
        await runtime.wait_idle(timeout=60)
    await look_for_it(lab)
