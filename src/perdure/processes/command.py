"""Commands as hosts, sessions, tools and durable functions ask for them.

A command is a process of kind "command". Its engine (`perdure.commands`) is above this package and is found by its
kind: what is here asks it only for what every engine may offer (`ports.process`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from msgspec import Struct

from perdure.errors import InvalidCommand, TimedOut, quoted
from perdure.model import validate
from perdure.model.command import Command, CommandOwner, CommandResult, read_command
from perdure.processes.handle import ProcessHandle
from perdure.tools.revive import ValueCodec


class CommandStart(Struct, frozen=True):
    """A command to be started, with values that are granted to it and not stored."""

    command: Command
    values: dict[str, str] = {}

    @property
    def name(self) -> str:
        return self.command.argv[0].rpartition("/")[2] or self.command.argv[0]

    def returns(self) -> ValueCodec | None:
        """None: a handle knows the result of a command when it sees one. To make its codec takes milliseconds, which
        the first start would wait for."""
        return None


def prepared(argv: object, options: Mapping[str, Any]) -> CommandStart:
    """A command from what a caller gave. Raises InvalidCommand; nothing of the OS is looked at."""
    return CommandStart(*read_command(argv, options))


def owner_of(options: Mapping[str, Any], usual: CommandOwner, possible: tuple[CommandOwner, ...]) -> CommandOwner:
    """What a command ends with."""
    owner = options.get("owner", usual)
    if owner not in possible:
        known = ", ".join(possible)
        elsewhere = f"owner={owner!r} is not possible here" if owner in get_args(CommandOwner) else quoted(owner)
        raise InvalidCommand(f"{elsewhere}: a command that is started here ends with one of {known}")
    found: CommandOwner = owner
    return found


async def in_foreground(
    handle: ProcessHandle[CommandResult], background_after: float | None
) -> CommandResult | ProcessHandle[CommandResult]:
    """The result of a command if it comes within so many seconds; else its handle, and it goes on."""
    if background_after is None:
        return handle
    try:
        return await handle.result(timeout=validate.seconds(background_after, "background_after", InvalidCommand))
    except TimedOut:
        return handle
