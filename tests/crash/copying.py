"""Copies, opens, restores, compacts or deletes a store in forked children, each killed one line later than the last.

    python -m tests.crash.copying <what> <template> <folder>

Each child works in `<folder>/<number>`, which begins as the template. Prints how many were killed: the last of them at
the last line, and one more has come to its end.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from perdure.stores.blobs import FileBlobs
from perdure.stores.sqlite import database, locks, maintenance

WATCHED = {module.__file__ for module in (maintenance, locks, database)}
PLAIN = {"SharedLock", "Connection", "OpenFiles", "connect", "check_beside", "check_ours", "migrate", "reading", "join"}
"""Of these modules, what opens and looks: dying in it leaves what dying before or after it does."""


class Killer:
    """Ends the process with SIGKILL when it is about to run line number `last` of the watched files."""

    def __init__(self, last: int) -> None:
        self.last, self.lines = last, 0

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in WATCHED or frame.f_code.co_qualname.partition(".")[0] in PLAIN:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.trace


def backup(folder: Path) -> None:
    path = folder / "agent.db"
    maintenance.back_up(path, FileBlobs(Path(f"{path}-blobs")), folder / "copy.db", lambda done, whole: None)


def restore(folder: Path) -> None:
    maintenance.restore(folder / "copy.db")


def opening(folder: Path) -> None:
    path = folder / "copy.db"
    database.WriterFile(path, FileBlobs(Path(f"{path}-blobs"))).close()


def compact(folder: Path) -> None:
    maintenance.compact(folder / "agent.db", lambda done, whole: None, steps=5_000)  # often: it dies inside, too


def delete(folder: Path) -> None:
    maintenance.delete(folder / "agent.db")


WORK = {"backup": backup, "restore": restore, "open": opening, "compact": compact, "delete": delete}


def main(what: str, template: Path, folder: Path) -> None:
    number, killed = 0, True
    while killed:
        number += 1
        place = Path(shutil.copytree(template, folder / str(number)))
        child = os.fork()
        if child == 0:
            sys.settrace(Killer(number).trace)
            WORK[what](place)
            sys.settrace(None)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        killed = os.WIFSIGNALED(status)
        assert killed or status == 0, f"it failed when line {number} was not reached"
    print(number - 1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
