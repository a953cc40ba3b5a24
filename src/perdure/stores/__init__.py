"""Stores, a module or package each; the rules that decide every write; and how a store is chosen by a path or URL."""

from __future__ import annotations

import os

from perdure.errors import InvalidDefinition, quoted
from perdure.model import validate
from perdure.ports.host import Clock
from perdure.ports.store import Store


def open_store(where: str | os.PathLike[str] | Store, clock: Clock | None = None) -> Store:
    """A store from what a user writes: a path, a `sqlite:///` URL, "memory", or a Store."""
    # Stores are imported when they are chosen: a Runtime in memory needs no driver.
    if not isinstance(where, str | os.PathLike):
        return validate.having(where, "store", "open", "write", "close", refuse=InvalidDefinition)
    text = os.fspath(where)
    try:
        usable = text != "" and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise InvalidDefinition(f"store={quoted(where)} is no path: use a path, sqlite:///path or 'memory'")
    if text in ("memory", ":memory:"):
        from perdure.stores.memory import MemoryStore  # noqa: PLC0415  # chosen at run time

        return MemoryStore(clock=clock)
    if text.startswith(("postgresql://", "postgres://")):
        raise InvalidDefinition("the Postgres store is not part of this version: use a file path or 'memory'")
    if "://" in text and not text.startswith("sqlite:///"):
        raise InvalidDefinition(f"{text!r} is not a store: use a path, sqlite:///path or 'memory'")
    try:
        from perdure.stores.sqlite import SqliteStore  # noqa: PLC0415  # chosen at run time
    except ImportError as error:
        if error.name != "fcntl":
            raise
        raise InvalidDefinition(
            f"store={quoted(where)}: a file needs the locks of a POSIX system (fcntl); here there is store='memory'"
        ) from error

    return SqliteStore(file_path(text))


def file_path(text: str) -> str:
    """The file that a path or a `sqlite:///` URL names; `~` is the home folder, as in a shell."""
    path = text.removeprefix("sqlite:///")
    found = os.path.expanduser(path)
    if path.startswith("~") and found == path:
        raise InvalidDefinition(f"store={quoted(text)}: there is no such user; ./{path} is a file of that name")
    return found
