"""A trace as a file of JSON lines."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perdure.model.codec import clean, encode

log = logging.getLogger("perdure.tracing")

MAX_WAITING = 10_000
"""Lines that may wait for the disk; what comes beyond is dropped, and the trace says how many."""


class JsonlSink:
    """Appends one line per event: `{"at": ms, "name": …, …}`. A thread of its own writes: no task waits for the disk.

    A trace is not a journal: what waits when the process is killed is lost, and a full disk costs lines, never a turn.
    A new file, and folders that are made for it, are their owner's alone.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.expanduser(path))  # as in a shell; without such a user it stays as it is
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING)
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def write(self, name: str, payload: Mapping[str, Any]) -> None:
        try:
            line = encode({"at": int(time.time() * 1000), "name": name, **clean(payload)})
        except Exception as error:  # whatever was traced, tracing must not fail its caller
            line = encode({"at": int(time.time() * 1000), "name": name, "untraceable": type(error).__name__})
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="perdure-trace", daemon=True)
            self._thread.start()
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write what waits."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        complained = closed = False
        while not closed:
            taken = [self._lines.get()]
            while not self._lines.empty():
                taken.append(self._lines.get_nowait())
            closed = None in taken
            lines = [line for line in taken if line is not None]
            dropped, self._dropped = self._dropped, 0
            if dropped:
                lines.append(encode({"name": "trace.dropped", "lines": dropped}))
            if not lines:
                continue
            try:
                _make_private(self.path.parent)
                with open(self.path, "ab", opener=_open_private) as file:
                    file.write(b"\n".join(lines) + b"\n")
            except OSError as error:
                if not complained:
                    log.warning("the trace %s cannot be written: %s", self.path, error)
                complained = True


def _open_private(path: str, flags: int) -> int:
    """A trace holds what was said: one that is new is its owner's alone."""
    return os.open(path, flags, 0o600)


def _make_private(folder: Path) -> None:
    if not folder.exists():
        _make_private(folder.parent)
        folder.mkdir(exist_ok=True)
        folder.chmod(0o700)
