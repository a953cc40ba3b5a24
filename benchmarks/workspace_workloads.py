"""WF: files of a workspace. What a check of a path, an edit, a search and the reading of a test run's output cost."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from workload import Sample, median

from perdure import Agent, Runtime, ToolCall, Workspace
from perdure.model.event import ToolFinished, ToolProgress, ToolStarted
from perdure.model.tool import PreparedCall
from perdure.testing import ScriptedModel
from perdure.tools.context import ToolContext
from perdure.workspace.diagnosis import Diagnoser
from perdure.workspace.diagnosis.report import CommandEnd
from perdure.workspace.paths import Paths
from perdure.workspace.policy import Policy

LINE = "x" * 79 + "\n"
FAILURE = """\
=================================== FAILURES ===================================
___________________________________ test_sum ___________________________________

    def test_sum():
>       assert 1 + 1 == 3
E       assert (1 + 1) == 3

tests/test_sum.py:2: AssertionError
=========================== short test summary info ============================
FAILED tests/test_sum.py::test_sum - assert (1 + 1) == 3
"""


async def wf(params: Sample) -> Sample:
    what: dict[str, Callable[[Sample], Awaitable[Sample]]] = {
        "paths": _paths,
        "edits": _edits,
        "search": _search,
        "first": _first,
        "parsing": _parsing,
    }
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


def _many(work: Path, files: int, every: int) -> None:
    """Many small files, 500 in a folder, and a line to be found in the last of every so many."""
    for number in range(files):
        folder = work / f"d{number // 500:03}"
        folder.mkdir(exist_ok=True)
        (folder / f"f{number:06}.txt").write_text(LINE * 10 + ("needle\n" if (number + 1) % every == 0 else ""))


async def _first(params: Sample) -> Sample:
    """A search through many files, from the call to the event that tells of its first match, and to its end. One that
    was made before has started what starts programs."""
    work, took = _folder(params), dict[str, float]()
    _many(work, params["files"], 500)
    policy = Policy(otherwise="allow")
    searches = [ToolCall(name="search", args={"pattern": pattern}) for pattern in ("nothing", "need[l]e")]
    tools = Workspace([work], unsandboxed=True, policy=policy).tools(commands=True)
    agent = Agent(ScriptedModel([[searches[0]], "none", [searches[1]], "done"]), tools=[tools])
    async with Runtime(os.path.join(params["dir"], "store", "agent.db"), agents=[agent]) as runtime:
        session = await runtime.session("s")
        await session.run("warm")
        async with session.stream("go") as turn:
            async for event in turn:
                match event:
                    case ToolStarted():
                        began = time.perf_counter()
                    case ToolProgress() if "first" not in took:
                        took["first"] = time.perf_counter() - began
                    case ToolFinished():
                        took["all"] = time.perf_counter() - began
            [call] = (await turn.result()).tool_calls
    assert call.value["truncated"] or len(call.value["matches"]) == params["files"] // 500
    name = "first_ms" if shutil.which("rg") else "first_without_ripgrep_ms"
    return {"files": params["files"], name: took["first"] * 1000, "all_ms": took["all"] * 1000}


async def _parsing(params: Sample) -> Sample:
    """The whole output of a test run, a block at a time, with one failure in every thousand lines."""
    ordinary = "".join(f"tests/test_part{number}.py::test_{number} PASSED        [ 10%]\n" for number in range(1000))
    ended = f"{'=' * 20} 1 failed, {params['lines']} passed in 9.99s {'=' * 20}\n"
    data = "".join([ordinary] * (params["lines"] // 1000) + [FAILURE, ended]).encode()
    began, diagnoser = time.process_time(), Diagnoser()
    for at in range(0, len(data), 65_536):
        diagnoser.feed("stdout", data[at : at + 65_536])
    found = diagnoser.finish(CommandEnd(1))
    spent = time.process_time() - began
    assert found is not None
    assert (found.verdict, len(found.failures)) == ("failed", 1)
    return {"mb": len(data) / 1e6, "parse_ms_per_mb": spent * 1000 / (len(data) / 1e6)}


async def _search(params: Sample) -> Sample:
    """Many small files, and one line in the last of them."""
    work = _folder(params)
    _many(work, params["files"], params["files"])
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
