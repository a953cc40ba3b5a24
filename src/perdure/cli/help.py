"""The text of `perdure --help`, which imports neither typer nor rich nor any command."""

from __future__ import annotations

import shutil
import textwrap

INTRODUCTION = (
    "Durable agents: watch one, run one, look after a store.",
    "The store is .perdure/runtime.db unless --store or PERDURE_STORE names another. All commands work while other "
    "processes have the same store open. `perdure COMMAND --help` has the options of a command.",
)
OPTIONS = {
    "--version": "Show the version and exit.",
    "--install-completion": "Install completion for the current shell.",
    "--show-completion": "Show completion for the current shell, to copy it or customize the installation.",
    "-h, --help": "Show this message and exit.",
}
COMMANDS: dict[str, dict[str, str]] = {
    "Run agents": {
        "demo": "Watch a durable agent being killed in mid-turn and finishing. No key, no network.",
        "run": "Run one turn of an agent, durably; with --model and no agent, ask a model as it is.",
        "send": "Say something to a session: a turn after what was said before, run by a worker that has its agent.",
        "steer": (
            "Say something to the running turn of a session: it arrives at its next boundary. With none, it opens one."
        ),
        "worker": "Work on a store until SIGTERM or SIGINT, then drain and exit with status 0.",
        "mcp": "Serve agents to MCP clients: as tools, with their sessions as resources.",
    },
    "Look": {
        "sessions": "List sessions, the most recently changed first; with --search, what was said in them.",
        "show": "Show a session: what was said, which tools ran, how turns ended, what is open.",
        "pending": "List what waits for a person, or for an outside completion, in the whole store.",
        "ps": "List processes, the newest first: those that live, with who works on them and what they wait for.",
        "logs": "Show the output of a command as it wrote it; of any other process its events, one per line.",
        "operations": "List what may be asked of an agent's plugins: queries, commands, tasks.",
        "usage": (
            "Show what was spent, in sums. Turns count when they end; sessions that are deleted stay in the sums."
        ),
        "workers": "List the Runtimes that have the store open: host, pid, version, start time, and places in use.",
        "doctor": "Check a store: its health, its workers, its open turns and processes, and what needs a person.",
    },
    "Decide": {
        "approve": "Let a call run that asks for approval.",
        "answer": "Answer what a call asks for, such as a question of an MCP server.",
        "reject": "Refuse a call that asks for approval.",
        "settle": "Say what became of a call, or of a step of a durable function, that a crash left unknown.",
        "retry": "Continue a turn that ended without an answer; a living worker with its agent takes it up.",
        "call": "Call an operation of an agent's plugins.",
        "signal": (
            "Send a signal to a process: it is stored, and the worker that runs the process gets it, now or later."
        ),
        "cancel": "Ask a turn of a session, or a process, to stop.",
        "fork": "Begin a new session that shares the history of this one.",
        "delete": "Delete a session for good; its id is never used again, and forks keep what they share.",
        "processes": (
            "Look after processes: wait for one, resume a stuck one, forget old ones, list wakes that were not "
            "delivered."
        ),
    },
    "Look after a store": {
        "backup": "Copy a store, with its blobs, while it is in use.",
        "restore": "Let a copy of a store go on as a store of its own.",
        "compact": "Make a store as small as it can be.",
        "prune": (
            "Forget sessions that were idle for so long, and processes that ended so long ago. Their ids stay spent."
        ),
        "delete-store": "Delete a store: its file, lock, blobs, workers and job folders.",
    },
}
"""The first sentence of each command's documentation, by panel and name. A test compares it with the commands."""


def text() -> str:
    """Return the help, as wide as the terminal."""
    width = max(40, min(shutil.get_terminal_size().columns, 120))
    parts = ["Usage: perdure [OPTIONS] COMMAND [ARGS]...", *INTRODUCTION]
    lines = ["\n\n".join(textwrap.fill(part, width) for part in parts)]
    for heading, rows in {"Options": OPTIONS, **COMMANDS}.items():
        left = max(map(len, rows)) + 4
        lines.append(f"\n{heading}:")
        for name, words in rows.items():
            first = f"  {name}".ljust(left)
            lines.append(textwrap.fill(words, width, initial_indent=first, subsequent_indent=" " * left))
    return "\n".join(lines) + "\n"
