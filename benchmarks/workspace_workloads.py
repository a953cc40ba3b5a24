"""WF: files of a workspace. What a check of a path, an edit and a search cost."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from workload import Sample, median

from mainstay import Agent, Runtime, ToolCall, Workspace
from mainstay.model.tool import PreparedCall
from mainstay.testing import ScriptedModel
from mainstay.tools.context import ToolContext
from mainstay.workspace.paths import Paths

LINE = "x" * 79 + "\n"


async def wf(params: Sample) -> Sample:
    what: dict[str, Callable[[Sample], Awaitable[Sample]]] = {"paths": _paths, "edits": _edits, "search": _search}
    return await what[params["what"]](params)


def _folder(params: Sample) -> Path:
    work = Path(params["dir"]).resolve() / "work"
    (work / "a" / "b" / "c").mkdir(parents=True, exist_ok=True)
    (work / "a" / "b" / "c" / "file.py").write_text("x")
    return work


async def _paths(params: Sample) -> Sample:
    """A path of four names: what is off limits, and the walk to an open folder."""
    work, times = _folder(params), params["times"]
    paths = Paths([str(work)], store=str(work / "agent.db"))
    began = time.process_time()
    for _ in range(times):
        paths.check(str(work), ("a", "b", "c", "file.py"))
    checked = time.process_time() - began
    began = time.process_time()
    for _ in range(times):
        with paths.locate("a/b/c/file.py"):
            pass
    located = time.process_time() - began
    return {"check_us": checked / times * 1e6, "locate_us": located / times * 1e6}


async def _edits(params: Sample) -> Sample:
    """An edit in the middle of a megabyte, from its arguments to the synced file, with the earlier content kept."""
    work, spent = _folder(params), list[float]()
    tools = Workspace([work]).tools()
    half = LINE * (params["bytes"] // 160)
    for number in range(params["times"]):
        (work / "big.txt").write_text(f"{half}needle{half}")
        context = ToolContext[Any](call_id=f"c{number}", tool="edit_file")
        args = {"path": "big.txt", "old_text": "needle", "new_text": "pin"}
        began = time.process_time()
        call = await tools.prepare(PreparedCall(f"c{number}", "tool:edit_file", "edit_file", args), context)
        call = msgspec.structs.replace(call, payload=msgspec.to_builtins(call.payload))
        await tools.execute(call, context)
        spent.append(time.process_time() - began)
        assert (work / "big.txt").read_text() == f"{half}pin{half}"
    return {"edit_ms": median(spent) * 1000}


async def _search(params: Sample) -> Sample:
    """Many small files, and one line in the last of them."""
    work = _folder(params)
    for number in range(params["files"]):
        folder = work / f"d{number // 500:03}"
        folder.mkdir(exist_ok=True)
        (folder / f"f{number:06}.txt").write_text(LINE * 10 + ("needle\n" if number == params["files"] - 1 else ""))
    calls = [ToolCall(name="search", args={"pattern": "need[l]e"})]
    agent = Agent(ScriptedModel([calls, "done"]), tools=[Workspace([work]).tools()])
    async with Runtime("memory", agents=[agent]) as runtime:
        session = await runtime.session("s")
        began = time.perf_counter()
        [call] = (await session.run("go")).tool_calls
        took = time.perf_counter() - began
    assert len(call.value["matches"]) == 1
    assert call.value["files_searched"] == params["files"] + 1
    return {"files": params["files"], "search_s": took, "cores": os.cpu_count()}
