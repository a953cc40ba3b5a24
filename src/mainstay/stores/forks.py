"""The id of this process, remembered: the kernel takes a call for it, and every write and every verb asks."""

from __future__ import annotations

import os

_pid = os.getpid()


def pid() -> int:
    return _pid


def _in_child() -> None:
    global _pid
    _pid = os.getpid()


os.register_at_fork(after_in_child=_in_child)
