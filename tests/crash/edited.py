"""A turn that edits a file and makes another one, in a workspace that outlives the process; then both are undone.

Which folder the workspace is, the ledger tells: a second start works in the same one.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from perdure import Agent, ModelRequest, ModelResponse, ToolCall, Usage, Workspace
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab
from tests.crash.reference import ATTENDED, SESSION, patiently

ASKED = (
    ToolCall("c-edit", "edit_file", {"path": "a.txt", "old_text": "one", "new_text": "two"}),
    ToolCall("c-make", "write_file", {"path": "deep/b.txt", "content": "new"}),
    ToolCall("c-delete", "delete_file", {"path": "c.txt"}),
)
FOLDER = "PERDURE_TEST_WORKSPACES"
"""The variable that names the folder which workspaces are made in."""
BEFORE = {"a.txt": "one", "c.txt": "old"}
AFTER = {"a.txt": "two", "deep/b.txt": "new"}


def answer(request: ModelRequest) -> ModelResponse:
    """One call after the other."""
    done = len([r for m in request.messages for r in m.tool_results])
    if done == len(ASKED):
        return ModelResponse("Done.", usage=Usage(input=10, output=5))
    return ModelResponse("", (ASKED[done],), Usage(input=10, output=5), stop="tool_calls")


def contents(work: Path) -> dict[str, str]:
    return {str(path.relative_to(work)): path.read_text() for path in sorted(work.rglob("*")) if path.is_file()}


async def workspace(lab: Lab) -> Path:
    known = [str(line.data) for line in lab.ledger if line.name == "workspace"]
    work = Path(known[0] if known else f"{os.environ[FOLDER]}/{secrets.token_hex(8)}")
    if not known:
        await lab.effect("workspace", "1", str(work))
    if not work.exists():
        work.mkdir()
        for name, text in BEFORE.items():
            (work / name).write_text(text)
    return work


async def edited(lab: Lab) -> None:
    work = await workspace(lab)
    agent = Agent(FunctionModel(answer), name="coder", tools=[Workspace([work]).tools()])
    async with lab.runtime([agent], lease=ATTENDED) as runtime:
        session = await runtime.session(SESSION)
        receipt = await patiently(lambda: session.send("go", key="in-1"))
        await patiently(receipt.result)
        undone = contents(work) == BEFORE
        edits = [[each.tool, each.status, each.kept] for each in await session.edits()]
        await lab.effect("edits", f"of {lab.incarnation}", [edits, contents(work) if not undone else AFTER])
        await session.undo()
        await lab.effect("undone", f"by {lab.incarnation}", contents(work))
