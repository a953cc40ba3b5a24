"""A Runtime with the tools for commands, to be killed at a write: a server that forks one for every line it reads.

    {"store": …, "work": …, "what": …, "point": …}   →   {"status": how the OS process ended}

It imports once, which takes longer than what it does.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from typing import Any, TypeVar

from perdure import Agent, ModelRequest, Runtime, ToolCall, Workspace
from perdure.model.write import Advance, Append, Register, Resolve, SendSignal, Write
from perdure.stores.sqlite import SqliteStore
from perdure.testing import FunctionModel
from perdure.workspace.policy import Policy, Rule

R = TypeVar("R")

COMMAND = "s.1.1.0.command"
"""The id of the command that the first call of the first turn begins."""

RUNS = {"command": "echo ran >> ran; cat"}
CALLS: dict[str, list[ToolCall]] = {
    "run": [ToolCall(name="run_command", args={"command": "echo ran >> ran; echo out; exit 3"})],
    "approved": [ToolCall(name="run_command", args={"command": "echo ran >> ran; echo out; exit 3"})],
    "background": [ToolCall(name="run_command", args={**RUNS, "stdin": True, "background": True})],
    "wait": [
        ToolCall(name="run_command", args={"command": "echo ran >> ran; exec sleep 0.2", "background": True}),
        ToolCall(name="wait_command", args={"id": COMMAND}),
    ],
    "output": [
        ToolCall(name="run_command", args={"command": "echo ran >> ran; sleep 0.2; echo out", "background": True}),
        ToolCall(name="wait_command_output", args={"id": COMMAND, "pattern": "^out$"}),
    ],
    "write": [
        ToolCall(name="run_command", args={**RUNS, "stdin": True, "background": True}),
        ToolCall(name="write_stdin", args={"id": COMMAND, "text": "once\n"}),
    ],
    "held": [ToolCall(name="run_command", args=RUNS | {"stdin": True})],
    "held output": [
        ToolCall(name="run_command", args={**RUNS, "stdin": True, "background": True}),
        ToolCall(name="wait_command_output", args={"id": COMMAND, "pattern": "never"}),
    ],
    "cancel": [
        ToolCall(name="run_command", args={**RUNS, "stdin": True, "background": True}),
        ToolCall(name="cancel_command", args={"id": COMMAND}),
    ],
}
"""What the model calls, one after the other."""

SERVER = """
import socket, time
open("ran", "a").write("ran\\n")
time.sleep(0.2)
server = socket.create_server(("127.0.0.1", {port}))
time.sleep(600)
"""


def calls_of(what: str) -> list[ToolCall]:
    """Those of CALLS, and with "port N" a server on that port that is waited for."""
    name, _, port = what.partition(" ")
    if name != "port":
        return CALLS[what]
    program = f"exec {shlex.join([sys.executable, '-c', SERVER.format(port=port)])}"
    return [
        ToolCall(name="run_command", args={"command": program, "background": True}),
        ToolCall(name="wait_port", args={"id": COMMAND, "port": int(port)}),
    ]


def agent(work: str, what: str) -> Agent[str]:
    calls = calls_of(what)

    def model(request: ModelRequest) -> str | list[ToolCall]:
        made = sum(1 for each in request.messages if each.role == "tool")
        asked = any(each.text == "go" for each in request.messages)
        return [calls[made]] if asked and made < len(calls) else "done"

    asked = (Rule("ask", "echo"),) if what == "approved" else ()
    tools = Workspace([work], unsandboxed=True, policy=Policy(asked, otherwise="allow")).tools(commands=True)
    return Agent(FunctionModel(model), name="coder", tools=[tools])


class MortalStore(SqliteStore):
    """A store whose OS process is killed at one write: just before it is made, or just after it was acknowledged."""

    def __init__(self, path: str, point: str) -> None:
        super().__init__(path)
        self._point = point

    async def write(self, write: Write[R]) -> R:
        steps = steps_of(write)
        self._may_die([f"before {step}" for step in steps])
        receipt = await super().write(write)
        self._may_die([f"after {step}" for step in steps])
        return receipt

    def _may_die(self, points: list[str]) -> None:
        if self._point in points:
            os.kill(os.getpid(), signal.SIGKILL)


def steps_of(write: Write[Any]) -> list[str]:
    """What a write is about: the start or the end of a call, a command that is registered or has ended, a signal, a
    question to a person or its answer."""
    match write:
        case Resolve():
            return ["answer"]
        case Append(waits=waits) if waits:
            return ["question"]
        case Register():
            return ["register"]
        case SendSignal():
            return ["signal"]
        case Advance(outcome=outcome) if outcome is not None:
            return ["outcome"]
        case Append(nodes=nodes):
            records = [json.loads(node.body) for node in nodes]
            return [f"{each['type'].partition('.')[0]} {each['call']}" for each in records if "call" in each]
        case _:
            return []


async def main(store: str, work: str, what: str, point: str) -> None:
    async with Runtime(MortalStore(store, point), agents=[agent(work, what)]) as runtime:
        session = await runtime.session("s")
        result = await session.run("go", key="once")
        for asked in await session.pending():
            await session.approve(asked.call_id, by="ada")
            await session.result(result.turn_id)


def serve() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            asyncio.run(main(**asked))
            os._exit(0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}), flush=True)


if __name__ == "__main__":
    serve()
