"""What one command may do to the machine, as plain data that is stored with the command.

A `Confinement` says what is granted; everything else is refused by the operating system. Which means enforce it is
chosen by a self-test of the machine (`perdure.commands.sandbox`) before the command is registered, and is stored as
`how`: a command that begins later, after a crash, begins in that one or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias, get_args

from msgspec import Struct

from perdure.errors import InvalidCommand, InvalidDefinition, SandboxUnavailable, quoted
from perdure.model import validate

Implementation: TypeAlias = Literal["bubblewrap", "namespaces", "landlock", "none"]
"""By which means a command is confined. "none": by none, because the host allowed that where there are no others."""

SandboxGap: TypeAlias = Literal["git", "unix_sockets", "attributes", "python"]
"""What a host may accept by name.

"git": commands change what is in `.git`, and without a mount namespace also its configuration and hooks; with one these
stay read-only. Without it `.git` is read-only, and where there is no mount namespace so is the root that it is in.
"unix_sockets": sockets in the folders that are granted may be connected to; a mount namespace is needed.
"attributes": where there is no mount namespace, commands may change modes, owners and times of all files of this user;
without it they may change none.
"python": commands change the environment of this Python where it lies in a root, and so what the host runs next.
Without it, it is read-only; where there is no mount namespace that holds as long as the root is read-only itself.
"""

MOST_PATHS = 256
LONGEST_PATH = 4095
LARGEST = 1 << 62


class SandboxLimits(Struct, frozen=True, gc=False, omit_defaults=True):
    """The most that a confined command may use; None is no limit. What this machine cannot enforce is refused.

    `processes`: processes and threads of the whole command at a time. `memory`: bytes of address space of each of its
    processes. `file_size`: bytes of each file that it writes. `cpu`: seconds of processor time of each process.
    """

    processes: int | None = None
    memory: int | None = None
    file_size: int | None = None
    cpu: int | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and validate.count(value, name, 1, InvalidDefinition) > LARGEST:
                raise InvalidDefinition(f"{name}={value} is no limit: leave it out")


class Confinement(Struct, frozen=True, gc=False, omit_defaults=True):
    """What one command may do. Paths are absolute and without links.

    `write`: folders that it may read and change. `read`: files and folders that it may read and run, besides those of
    the system. `protect`: paths below them that it may not change, whether or not they exist. `hide`: folders below
    them that it may not see. `network`: it may use the network of the host. `accept`: gaps that the host accepts.
    `unsandboxed`: it runs without any of this where nothing enforces it. `how`: what enforces it; empty until chosen.
    `computes`: it does nothing else: of the system it reads libraries alone, it makes no file, no process and no
    thread, has no variables but its own, and dies with its shim.
    """

    write: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    protect: tuple[str, ...] = ()
    hide: tuple[str, ...] = ()
    network: bool = False
    limits: SandboxLimits = SandboxLimits()
    accept: tuple[SandboxGap, ...] = ()
    unsandboxed: bool = False
    how: Implementation | Literal[""] = ""
    computes: bool = False


def read_confinement(given: object) -> Confinement | None:
    """The confinement of a command from what a caller gave. Raises InvalidCommand; no file is looked at."""
    if given is None:
        return None
    if not isinstance(given, Confinement):
        raise InvalidCommand(
            f"sandbox={quoted(given):.200} is not usable: give a Confinement, such as workspace.confinement(store)"
        )
    for name in ("write", "read", "protect", "hide"):
        paths = validate.several(getattr(given, name), name, InvalidCommand)
        if len(paths) > MOST_PATHS:
            raise InvalidCommand(f"sandbox: {name} has {len(paths)} paths, {MOST_PATHS} are the most")
        for path in paths:
            _check_path(name, path)
    if not isinstance(given.limits, SandboxLimits):
        raise InvalidCommand(f"sandbox: limits={quoted(given.limits):.200} is not usable: give SandboxLimits(…)")
    for name in ("network", "unsandboxed", "computes"):
        validate.flag(getattr(given, name), name, InvalidCommand)
    check_gaps(given.accept, InvalidCommand)
    if given.how:
        raise InvalidCommand(f"sandbox: how={quoted(given.how)} is chosen by a self-test of the machine: leave it out")
    return given


def check_gaps(accept: object, refuse: type[InvalidCommand] | type[InvalidDefinition]) -> tuple[SandboxGap, ...]:
    """The gaps that a host accepts, each by a name that exists."""
    if isinstance(accept, Mapping):
        raise refuse(f"accept={quoted(accept):.200} is not usable: give a list")
    found = validate.several(accept, "accept", refuse)
    for each in found:
        if each not in get_args(SandboxGap):
            raise refuse(f"accept: there is no gap {quoted(each)}: there are {', '.join(get_args(SandboxGap))}")
    return found


def _check_path(name: str, path: object) -> None:
    text = validate.plain_text(path)
    plain = text is not None and text.startswith("/") and "\0" not in text and "\n" not in text
    if not plain or text is None or len(text.encode()) > LONGEST_PATH or {".", ".."} & set(text.split("/")):
        raise InvalidCommand(f"sandbox: {name} has {quoted(path):.200}: give absolute paths, without links")


def folder_of_store(store: str, granted: Iterable[str]) -> tuple[str, ...]:
    """The folder of a store, if a command could see it in what it is granted: it is to be hidden. Paths are absolute
    and without links.

    A folder can be covered, files in a folder that stays visible cannot: SQLite deletes some and makes them anew. So a
    store whose folder itself is granted is refused.
    """
    folder = store.rpartition("/")[0]
    for path in granted:
        if path in (folder, store) or path.startswith(f"{store}-"):
            raise SandboxUnavailable(
                f"the store {store} is in {path} itself, which the command may see: keep the store in a folder of its "
                f"own, such as {path}/.perdure/, or outside of it"
            )
    return (folder,) if any(folder.startswith(f"{path}/") for path in granted) else ()
