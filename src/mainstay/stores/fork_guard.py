"""The id of this OS process, remembered (the kernel takes a call for it, and every write and every verb asks), and its
name."""

from __future__ import annotations

import os
import secrets

_pid = os.getpid()
_name = secrets.token_hex(8)


def pid() -> int:
    return _pid


def name() -> str:
    """A name of this OS process that no other one ever has, unlike its id."""
    return _name


def _in_child() -> None:
    global _pid, _name
    _pid, _name = os.getpid(), secrets.token_hex(8)


os.register_at_fork(after_in_child=_in_child)
