"""A program that is killed at some step of changing a file, and can be started again: `killed.py store work step`.

It counts the calls of the operating system that `workspace/files.py` makes, and kills itself with SIGKILL before number
`step`; 0 never. It prints how the call ended and what became of the undo.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from perdure import Agent, ModelRequest, Runtime, ToolCall, Workspace
from perdure.testing import FunctionModel
from perdure.workspace import files

CALLS = {
    "edit": ToolCall(name="edit_file", args={"path": "a.txt", "old_text": "one", "new_text": "two"}),
    "make": ToolCall(name="write_file", args={"path": "deep/new.txt", "content": "new\n"}),
    "delete": ToolCall(name="delete_file", args={"path": "a.txt"}),
}
FILE = files.replace.__code__.co_filename
ACTING = {"open", "write", "fchmod", "fchown", "fsync", "close", "rename", "unlink"}


class Killer:
    """Kills this process at one of its own steps."""

    def __init__(self, step: int) -> None:
        self._left = step
        self.armed = False

    def __call__(self, frame: FrameType, event: str, made: Any) -> None:
        if self.armed and event == "c_call" and frame.f_code.co_filename == FILE and made.__name__ in ACTING:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


async def main(store: str, work: str, what: str, step: int) -> None:
    def model(request: ModelRequest) -> str | list[ToolCall]:
        return "done" if request.messages[-1].role == "tool" else [CALLS[what.removeprefix("undo ")]]

    agent = Agent(FunctionModel(model), tools=[Workspace([work]).tools()])
    killer, undoes = Killer(step), what.startswith("undo ")
    threading.setprofile(killer)  # for every thread that begins from now on
    async with Runtime(store, agents=[agent]) as runtime:
        session = await runtime.session("s")
        killer.armed = not undoes
        [call] = (await session.run("go", key="once")).tool_calls
        print(call.outcome, [each.status for each in await session.edits()], flush=True)
        if undoes:
            killer.armed = True
            print([each.status for each in await session.undo()], flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
