"""The process in which one entry is counted: `python -S -P opcode_child.py ENTRY PACKAGE`. `opcodes.py` starts it.

Prints JSON: `instructions` of a turn, and the functions that execute them, `by` name.

PACKAGE is `perdure`, or the name of the package in an older tree, whose modules the workloads then import under the
present name.

Wall time does not reach the figures, because time is virtual in this process:

- Each reading of a clock moves it by a microsecond. So a decision by time (a timer, the pace of syncs, a lease) depends
  only on the instructions executed before it.
- The event loop, and threads that wait for a `threading.Event`, ignore timeouts. A workload that waits for a timer
  would therefore wait for ever.
- The wall clock is an hour ahead, so that each file is older than a tick of its file system.
"""

from __future__ import annotations

import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, FrameType
    from typing import Any

PRESENT = "perdure"
MODULES = ("", ".plugins.hooks", ".testing")
"""The modules that the workloads import."""
WARM_UP = 20
HOUR = 3600


class Clock:
    """Virtual time. It replaces functions of `time` before other modules import them."""

    _passed = 0.0
    _start, _wall = time.monotonic(), time.time() + HOUR
    _real = staticmethod(time.clock_gettime)

    @classmethod
    def passed(cls) -> float:
        cls._passed += 1e-6
        return cls._passed

    @classmethod
    def monotonic(cls) -> float:
        return cls._start + cls.passed()

    @classmethod
    def wall(cls) -> float:
        return cls._wall + cls.passed()

    @classmethod
    def wall_ns(cls) -> int:
        return int(cls.wall() * 1e9)

    @classmethod
    def gettime(cls, which: int) -> float:
        if which in (time.CLOCK_PROCESS_CPUTIME_ID, time.CLOCK_THREAD_CPUTIME_ID):
            return cls._real(which)
        return cls.wall() if which == time.CLOCK_REALTIME else cls.monotonic()

    @classmethod
    def install(cls) -> None:
        time.monotonic = time.perf_counter = cls.monotonic
        time.time, time.time_ns, time.clock_gettime = cls.wall, cls.wall_ns, cls.gettime


class Tracing:
    """Counts with a trace function. Threads that start after `watch_threads` are counted too."""

    def __init__(self) -> None:
        self._counts: dict[CodeType, int] = {}
        counts = self._counts

        def count(frame: FrameType, event: str, _: object) -> Any:
            if event == "opcode":
                # Without a call, so that no other thread runs between the reading and the writing of a number.
                try:
                    counts[frame.f_code] += 1
                except KeyError:
                    counts[frame.f_code] = 1
            return count

        def trace(frame: FrameType, event: str, _: object) -> Any:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return count

        self._trace = trace

    def watch_threads(self) -> None:
        import threading

        threading.settrace(self._trace)

    def start(self) -> None:
        sys._getframe().f_trace_opcodes = True  # CPython 3.12 looks for one such frame when tracing begins
        sys.settrace(self._trace)

    def clear(self) -> None:
        self._counts.clear()

    def stop(self) -> dict[CodeType, int]:
        """Stop in this thread, and return the counts. Other threads go on counting, so the result is a copy."""
        sys.settrace(None)
        return self._counts.copy()


class Monitoring:
    """Counts with `sys.monitoring`, in all threads. CPython 3.12.1 crashes if a trace function counts a turn."""

    TOOL = 3

    def __init__(self) -> None:
        self._counts: dict[CodeType, int] = {}
        counts, monitoring = self._counts, sys.monitoring

        def count(code: CodeType, _: int) -> None:
            try:
                counts[code] += 1
            except KeyError:
                counts[code] = 1

        monitoring.use_tool_id(self.TOOL, "opcodes")
        monitoring.register_callback(self.TOOL, monitoring.events.INSTRUCTION, count)

    def watch_threads(self) -> None:
        """Do nothing, because monitoring includes every thread."""

    def start(self) -> None:
        sys.monitoring.set_events(self.TOOL, sys.monitoring.events.INSTRUCTION)

    def clear(self) -> None:
        self._counts.clear()

    def stop(self) -> dict[CodeType, int]:
        sys.monitoring.set_events(self.TOOL, 0)
        return self._counts.copy()


def count_import(package: str) -> dict[CodeType, int]:
    counter = Tracing()  # in every version, because monitoring takes five times as long for code that runs once
    counter.start()
    __import__(package)
    by_code = counter.stop()
    missing = [
        module.__cached__
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == package and not _is_file(module.__cached__)
    ]
    if missing:
        sys.exit(f"cannot keep byte code, so an import would compile each time: make {missing[0]!r} writable")
    return by_code


def _is_file(path: str) -> bool:
    import os

    return os.path.isfile(path)


def count_turns(entry: str) -> tuple[dict[CodeType, int], int]:
    import asyncio
    import gc
    import selectors
    import threading

    Event, wait = threading.Event, threading.Event.wait

    def wait_without_timeout(self: threading.Event, timeout: float | None = None) -> bool:
        return wait(self)

    class Selector(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> Any:
            return super().select(None if timeout else timeout)

    async def run() -> tuple[dict[CodeType, int], int]:
        async with workloads.opened(entry) as (turn, turns):
            for _ in range(WARM_UP):
                await turn()
            gc.collect()
            counter.start()
            await turn()  # the first one begins in frames that are not counted
            counter.clear()
            for _ in range(turns):
                await turn()
            return counter.stop(), turns

    Event.wait = wait_without_timeout  # type: ignore[method-assign]
    counter = Monitoring() if sys.version_info >= (3, 12) else Tracing()
    counter.watch_threads()
    workloads = __import__("opcode_workloads")
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(Selector())) as runner:
        by_code, turns = runner.run(run())
    time_functions = [Clock.passed, Clock.monotonic, Clock.wall, Clock.wall_ns, Clock.gettime]
    for function in (run, counter.clear, counter.stop, wait_without_timeout, Selector.select, *time_functions):
        by_code.pop(function.__code__, None)
    return by_code, turns


def _name(code: CodeType, package: str) -> str:
    _, found, inside = code.co_filename.rpartition(f"/{package}/")
    path = f"{PRESENT}/{inside}" if found else "/".join(code.co_filename.rsplit("/", 2)[-2:])
    return f"{path}:{code.co_qualname}"


def main(entry: str, package: str) -> None:
    if entry == "import":
        by_code, turns = count_import(package), 1
    else:
        Clock.install()
        from importlib import import_module
        from pathlib import Path

        sys.path.append(str(Path(__file__).parent))
        if package != PRESENT:
            sys.modules.update({f"{PRESENT}{name}": import_module(f"{package}{name}") for name in MODULES})
        by_code, turns = count_turns(entry)

    import json

    by: dict[str, float] = {}
    for code, count in by_code.items():
        name = _name(code, package)
        by[name] = by.get(name, 0) + count / turns
    json.dump({"instructions": sum(by_code.values()) / turns, "by": by}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
