"""Programs that serve one Runtime over their stdin and stdout, and end with it.

A command outlives its Runtime, and what it writes goes to files. A bound command is the other kind: its stdin and
stdout are pipes of the Runtime, nothing of it is in the store, and it ends when these are closed, whether the Runtime
was left or killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from perdure.model.command import Command


class BoundCommand(Protocol):
    """One such program. `stdin` and `stdout` are descriptors, which do not block and are its caller's to close."""

    @property
    def stdin(self) -> int: ...

    @property
    def stdout(self) -> int: ...

    @property
    def pid(self) -> int: ...

    async def complaints(self) -> str:
        """The last of what it wrote to stderr, while it runs; `end` gives all that comes before its end."""
        ...

    async def end(self) -> str:
        """Wait until nothing of it lives, and give the last of what it wrote to stderr: it leaves by itself when its
        stdin is closed, or is killed with all that it began. Its folder is removed."""
        ...


class BoundCommands(Protocol):
    """Begins them, by the rules of commands: their environment, their sandbox, their tree."""

    async def start(self, label: str, command: Command, values: Mapping[str, str]) -> BoundCommand:
        """Begin a program. `values` are those of its grants, which are not stored.

        Raises InvalidCommand where it could never begin, and CommandsUnavailable where it cannot begin here or now.
        """
        ...

    async def check(self, command: Command) -> None:
        """Raise what `start` would raise for its sandbox: SandboxUnavailable where this machine cannot make it, or
        InvalidCommand. Nothing is begun, but a self-test of the machine if it was never made."""
        ...

    async def end_leftovers(self) -> int:
        """End what Runtimes left behind that are dead, by the identities in their folders; how many."""
        ...
