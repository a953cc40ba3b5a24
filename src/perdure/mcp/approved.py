"""What was approved of the servers of a store: which tools, described in which words.

A server may describe a tool anew at any time, and a model obeys what it reads there. So what it lists is compared with
what was approved:

    the store has never seen the server    all that it lists is approved, as it is: by who attached it
    as it was approved                     offered
    described otherwise                    offered as it was approved; a call of it asks a person, who is shown the
                                           difference. Approved, it is offered as it is now
    not there when the server was first    not offered before a person has approved it (`runtime.mcp.approve`)
    seen

It is kept in the log of an external process of the store, `mcp.<server>`: one event for each approval, so that it says
when, of what, and by whom. Its prints are read again before a person is asked: another Runtime may have had the answer.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from perdure.errors import UnknownProcess
from perdure.mcp.listing import ListedTool, Listing
from perdure.processes.local import External
from perdure.processes.service import ProcessService, Start

APPROVED = "approved"
MCP = External("mcp server", events=(APPROVED,))
LARGEST_EVENT = 256 * 1024
LONGEST_DIFFERENCE = 20_000
"""Characters that a person is asked to read. What has more is not cut: it would be approved unseen."""


def process_id(server: str) -> str:
    return f"mcp.{server}"


class Approved:
    """What is approved of one server. `tools` is None until it was read, and empty where nothing ever was."""

    def __init__(self, server: str, processes: ProcessService) -> None:
        self._server, self._processes = server, processes
        self._seen = 0
        self.tools: dict[str, ListedTool] = {}
        self.known = False

    async def read(self) -> None:
        """Take in what was approved since it was last read, by any Runtime."""
        try:
            async for event in self._processes.events(process_id(self._server), self._seen):
                self._seen = event.sequence
                if event.type == APPROVED:
                    self.known = True
                    for each in msgspec.convert(event.payload["tools"], list[ListedTool]):
                        self.tools[each.name] = each
        except UnknownProcess:
            return

    async def add(self, tools: Iterable[ListedTool], by: str) -> None:
        """Approve tools as they are described now. On disk when this returns."""
        name = process_id(self._server)
        label = f"what was approved of MCP server {self._server}"
        await self._processes.start(MCP, {"server": self._server}, Start(name, label, metadata={}))
        for batch in _batches(tools):
            key = ",".join(each.print for each in batch)[:200]
            payload = {"tools": msgspec.to_builtins(batch), "by": by}
            await self._processes.emit(name, APPROVED, payload, key=f"{by}:{key}" if len(batch) == 1 else None)
        await self.read()


def _batches(tools: Iterable[ListedTool]) -> list[list[ListedTool]]:
    found: list[list[ListedTool]] = [[]]
    room = LARGEST_EVENT
    for each in tools:
        size = len(msgspec.json.encode(each))
        if found[-1] and size > room:
            found.append([])
            room = LARGEST_EVENT
        found[-1].append(each)
        room -= size
    return found


def offered(listing: Listing, approved: Mapping[str, ListedTool]) -> dict[str, ListedTool]:
    """What a model may see of what is listed: each as it was approved."""
    found = {}
    for name, now in listing.tools.items():
        if name in approved:
            # The same digest is the same description, read by code that may know more of its parts than the stored one.
            found[name] = now if now.print == approved[name].print else approved[name]
    return found


def changed(listing: Listing, approved: Mapping[str, ListedTool]) -> dict[str, ListedTool]:
    """What is described otherwise than it was approved, as it is now."""
    return {
        name: tool for name, tool in listing.tools.items() if name in approved and approved[name].print != tool.print
    }


def added(listing: Listing, approved: Mapping[str, ListedTool]) -> dict[str, ListedTool]:
    """What is listed and was never approved."""
    return {name: tool for name, tool in listing.tools.items() if name not in approved}


def difference(before: ListedTool | None, now: ListedTool) -> str:
    """What has changed, or all of what is new, for the person who is asked."""
    lines = difflib.unified_diff(
        [] if before is None else _lines(before), _lines(now), "approved", "now", lineterm="", n=1
    )
    return "\n".join(lines) or "only what no model is shown: its title, or the server's hints"


def _lines(tool: ListedTool) -> list[str]:
    schemas: list[Any] = [tool.input_schema, tool.output_schema]
    shown = [msgspec.json.format(msgspec.json.encode(each, order="sorted")).decode() for each in schemas]
    repeatable = ["An interrupted call is sent again: the server says that it only reads, or is idempotent."]
    return [
        *tool.description.splitlines(),
        *[line for each in shown for line in each.splitlines()],
        *(repeatable if tool.repeatable else ()),
    ]
