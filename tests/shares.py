"""Run one lane within its share of time: `python3 tests/shares.py test make test`.

Prints how long the lane took, and a warning if it passed its share by more than half. A lane never fails for being
slow, because a busy machine is no defect of the code; at three times its share it is killed with everything it
started, because it hangs then. The exit status is the lane's, and 124 if it was killed.

It runs before the project's environment is made, so it needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

SHARES: Mapping[str, int] = MappingProxyType({"quick PKG=": 60, "quick": 120, "test": 330, "gate": 480})
"""Seconds that each lane may take on two free cores. The table in ARCHITECTURE.md says what they are for."""
LATE, KILLED = 1.5, 3.0
"""The parts of its share at which a lane gets a warning, and at which it is killed."""
GRACE = 10.0
"""Seconds between the request to end and the kill."""
KILLED_STATUS = 124


def told(lane: str, seconds: float, share: float, killed: bool = False) -> list[str]:
    """Return what is said of a lane that has ended: its time, and a warning if it took too long."""
    lines = [f"lane {lane}: {_minutes(seconds)} of {_minutes(share)}"]
    if killed:
        lines.append(f"KILLED: lane {lane} did not end within {KILLED:g} times its share of {_minutes(share)}")
    elif seconds > LATE * share:
        lines.append(
            f"WARNING: lane {lane} took {seconds / share:.1f} times its share: move cases to another lane, "
            "or make them cheaper (the slowest are listed above)"
        )
    return lines


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60:02} s"


def run(command: Sequence[str], limit: float, grace: float = GRACE) -> tuple[int, float, bool]:
    """Run a command in a process group of its own. Returns its exit status, its seconds, and True if it was killed."""
    began = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True)
    try:
        status, killed = process.wait(limit), False
    except subprocess.TimeoutExpired:
        status, killed = KILLED_STATUS, True
    finally:
        _end(process, grace)  # also if this process is interrupted, and whatever the command left behind
    return status if status >= 0 else 128 - status, time.monotonic() - began, killed


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
        os.killpg(process.pid, number)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2 or arguments[0] not in SHARES:
        print(f"Usage: shares.py LANE COMMAND…, and LANE is one of: {', '.join(SHARES)}", file=sys.stderr)
        return 2
    lane, *command = arguments
    try:
        status, seconds, killed = run(command, KILLED * SHARES[lane])
    except FileNotFoundError:
        print(f"{command[0]}: there is no such program; install it, or name another one", file=sys.stderr)
        return 127
    for line in told(lane, seconds, SHARES[lane], killed):
        print(line, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
