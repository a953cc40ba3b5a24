"""The program that CPython's sandbox runs: it reads cells and answers from one pipe, and writes calls and output to
another.

Lines of JSON both ways; `codemode/pipe.py` is the other side, and lists them. The code of a model runs in this very
interpreter, so nothing here protects anything: it can change all of it, and write to the pipe itself. What protects is
the sandbox around, and that the other side believes no message. What is here makes code that means no harm do the same
each time that it is run:

- Calls come out in the order in which code makes them. An answer goes in when nothing can go on without one.
- The clock stands still between two answers; random bytes come from the cell's seed. Both are put in the place of the
  functions of the standard library that read them. The order of sets of strings is fixed by the hash seed.
- The event loop is our own: a queue, without descriptors and threads. A timer that is due goes off before the answer
  that came with the time; where nothing but timers is waited for, the next of them becomes a call of `sleep`.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import collections
import contextlib
import datetime
import functools
import hashlib
import heapq
import io
import json
import linecache
import mmap
import os
import random
import resource
import sys
import time
import traceback
import types
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import values  # type: ignore[import-not-found]  # ty: ignore[import-not-found]  # its folder is on the path

MOST_VALUE = 256 * 1024
MOST_MESSAGE = 4000
MOST_VARIABLES = 1000
PRINTED_AT_ONCE = 16 * 1024
ROOM = 64 * 1024 * 1024
"""Bytes of memory that are left to tell that there is no more."""
COROUTINE = 0x80
LIBRARY = os.path.dirname(os.__file__) + "/"

EXCEPTIONS: dict[str, type[BaseException]] = {
    "failed": RuntimeError,
    "denied": PermissionError,
    "invalid": ValueError,
    "refused": RuntimeError,
    "unknown": BaseException,
}


class EndCell(SystemExit):
    """Ends the cell at the line of a call. Derived from SystemExit: a task hands that on to who runs the loop."""


class AwaitableCall(asyncio.Future[Any]):
    """A call. Only the cell that made it can await it: in another one the value would depend on when it came."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._cell = cast(Loop, self.get_loop()).cell

    def _check(self) -> None:
        if self._cell != cast(Loop, self.get_loop()).cell:
            raise RuntimeError(values.EARLIER)

    def __await__(self) -> Any:
        self._check()
        return super().__await__()

    __iter__ = __await__

    # What `gather` and `wait` ask a future for.

    def add_done_callback(self, fn: Any, /, **context: Any) -> None:
        self._check()
        super().add_done_callback(fn, **context)

    def result(self) -> Any:
        self._check()
        return super().result()

    def exception(self) -> BaseException | None:
        self._check()
        return super().exception()


GATHERING: Any = vars(asyncio.tasks)["_GatheringFuture"]


class Gathered(AwaitableCall, GATHERING):  # type: ignore[misc]  # the library's own class, which is in no stub
    """What `gather` returns."""


async def _awaiting(call: asyncio.Future[Any]) -> Any:
    return await call


class Loop(asyncio.AbstractEventLoop):
    """A queue of what can go on, and timers by a clock that stands. `cell` is the number of the one that runs."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.cell = 0
        self._now = now
        self._ready: collections.deque[asyncio.Handle] = collections.deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = 0

    def run_ready(self) -> None:
        """Until nothing can go on. Raises what ends a cell at once: SystemExit and KeyboardInterrupt."""
        asyncio._set_running_loop(self)
        try:
            while self._ready:
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)

    def fire(self) -> None:
        """Queue the timers that are due."""
        while self._timers and (self._timers[0][0] <= self._now() or self._timers[0][2].cancelled()):
            self._ready.append(heapq.heappop(self._timers)[2])

    def next_timer(self) -> float | None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def forget(self) -> None:
        self._ready.clear()
        self._timers.clear()

    # What tasks, futures and the functions of asyncio ask of a loop.

    def time(self) -> float:
        return self._now()

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None: ...

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        return self.call_at(self._now() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Found cancelled when it is due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None, **more: Any) -> asyncio.Task[Any]:
        if isinstance(coro, asyncio.Future):  # a call of a tool, which has gone out already
            coro = _awaiting(coro)
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A task whose error nobody asked for. When that is noticed depends on the collector: it is told to nobody."""

    def default_exception_handler(self, context: dict[str, Any]) -> None: ...

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise RuntimeError("there are no threads here")

    async def shutdown_asyncgens(self) -> None: ...

    async def shutdown_default_executor(self, timeout: float | None = None) -> None: ...


class CellOutput(io.TextIOBase):
    """`sys.stdout` and `sys.stderr` of cells."""

    encoding = "utf-8"

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._write(text)
        return len(text)

    def writable(self) -> bool:
        return True


class Driver:
    """The REPL, and the cell that runs in it.

    `calls` are those of the cell without an answer, by number. `over` is set when the code has ended or is to end:
    whatever it calls then raises `EndCell`.
    """

    def __init__(self, read: int, write: int) -> None:
        self._lines, self._pipe = open(read, "rb", buffering=1 << 16), write  # noqa: SIM115  # for as long as it runs
        self.at, self.seed, self.drawn, self.emitted = 0, "", 0, 0
        self.extra = 0.0
        self.loop: Loop = cast(Any, Loop)(self.now)  # what it does not implement is not for cells
        self.calls: dict[int, AwaitableCall] = {}
        self.over = True
        self.file = ""
        self.cells = 0
        self.functions: dict[str, tuple[list[tuple[str, str, bool]], bool]] = {}
        self.spaces: set[str] = set()
        self.main: asyncio.Task[str | None] | None = None
        self._printed: list[str] = []
        self._size = 0
        self.names = types.ModuleType("__main__")
        self.builtins = dict(vars(builtins))
        self.names.__dict__["__builtins__"] = self.builtins
        self.names.__dict__.pop("__loader__", None)
        self.names.__dict__.pop("__spec__", None)

    # ------------------------------------------------------------------ messages

    def send(self, **message: Any) -> None:
        self.flush()
        line = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
        try:
            data = line.encode()
        except UnicodeEncodeError:  # halves of characters
            data = line.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
        self._put(data + b"\n")

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._pipe, view) :]

    def receive(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            os._exit(0)  # the other side has gone
        message: dict[str, Any] = json.loads(line)
        return message

    def print(self, text: str) -> None:
        if self.over or not text:
            return
        self._printed.append(text)
        self._size += len(text)
        if self._size >= PRINTED_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        if self._printed:
            text, self._printed, self._size = "".join(self._printed), [], 0
            for start in range(0, len(text), PRINTED_AT_ONCE):
                self.send(kind="print", text=text[start : start + PRINTED_AT_ONCE])

    # ------------------------------------------------------------------ clock and random bytes

    def now(self) -> float:
        return self.at / 1000 + self.extra

    def entropy(self, size: int) -> bytes:
        self.drawn += 1
        return hashlib.shake_256(f"{self.seed}:{self.drawn}".encode()).digest(size)

    # ------------------------------------------------------------------ calls

    def call(self, path: str, args: Any, kwargs: Any, *, sync: bool = False) -> Any:
        """A call of the cell's: it goes out at once, and what is returned is awaited. A `sync` one waits here."""
        if self.over:
            raise EndCell
        if path in ("finish", "sleep"):
            bound = values.bind_own(path, args, kwargs)
        elif path in self.functions:
            bound = values.bind(path, *self.functions[path], args, kwargs)
        else:
            raise NameError(f"name '{path}' is not defined")
        try:
            bound = values.plain(bound)
        except values.NotPlain as error:
            raise TypeError(str(error)) from None
        number = self.emitted
        self.emitted += 1
        self.send(kind="call", number=number, path=path, args=bound, line=self._line(), sync=sync)
        if not sync:
            made = self.calls[number] = AwaitableCall(loop=self.loop)
            return made
        self.send(kind="paused")
        answer = self.receive()
        self._moved(answer)
        if answer["kind"] == "stop":
            self.over = True
            raise EndCell
        if answer["kind"] == "raise":
            raise EXCEPTIONS[answer["why"]](answer["message"])
        return answer["value"]

    def _line(self) -> int:
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None and not frame.f_code.co_filename.startswith("<cell "):
            frame = frame.f_back
        return frame.f_lineno if frame is not None and frame.f_code.co_filename == self.file else 0

    def _moved(self, message: dict[str, Any]) -> None:
        if message["at"] > self.at:
            self.at, self.extra = message["at"], 0.0

    def install(self, functions: list[Any]) -> None:
        """Put tools in the place of those of the cell before. A name that a cell has bound hides them, as any."""
        for path in self.functions:
            self.builtins.pop(path, None)
        for space in self.spaces:
            self.builtins.pop(space, None)
            sys.modules.pop(space, None)
        self.functions = {path: ([tuple(each) for each in known], more) for path, known, more in functions}
        self.spaces = {path.partition(".")[0] for path in self.functions if "." in path}
        for space in self.spaces:
            self.builtins[space] = sys.modules[space] = types.ModuleType(space)
        for path in self.functions:
            space, _, name = path.rpartition(".")
            made = self._function(path, name)
            if space:
                setattr(self.builtins[space], name, made)
            else:
                self.builtins[path] = made

    def _function(self, path: str, name: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            return self.call(path, args, kwargs)

        function.__name__ = function.__qualname__ = name
        return function

    # ------------------------------------------------------------------ a cell

    def serve(self) -> None:
        while True:
            message = self.receive()
            try:
                if message["kind"] == "begin":
                    self.begin(message)
                else:
                    self.resume(message)
            except MemoryError:
                self._out_of_memory()

    def begin(self, message: dict[str, Any]) -> None:
        code = message["code"]
        self.at, self.seed, self.drawn, self.emitted, self.extra = message["at"], message["seed"], 0, 0, 0.0
        if "functions" in message:
            self.install(message["functions"])
        if not self.cells:
            random.seed(self.seed)
        self.cells += 1
        self.file = f"<cell {self.cells}>"
        self.calls.clear()
        self.loop.forget()
        linecache.cache[self.file] = (len(code), None, code.splitlines(keepends=True), self.file)
        self.over = False
        self.loop.cell = self.cells
        try:
            parts = list(self._compiled(code))
        except (SyntaxError, ValueError, RecursionError, OverflowError) as error:
            self.cells -= 1
            self.over = True
            return self.end_with(error, "syntax")
        self.main = asyncio.Task(self._run(parts), loop=self.loop)
        self.go_on()

    def _compiled(self, code: str) -> Iterator[tuple[types.CodeType, bool]]:
        """The statements of a cell, and its last expression apart."""
        tree = ast.parse(code, self.file)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        make = functools.partial(compile, filename=self.file, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        yield make(tree, mode="exec"), False
        if isinstance(last, ast.Expr):
            yield make(ast.Expression(last.value), mode="eval"), True

    async def _run(self, parts: list[tuple[types.CodeType, bool]]) -> str | None:
        for code, shown in parts:
            value = eval(code, self.names.__dict__)
            if code.co_flags & COROUTINE:
                value = await value
            if shown and value is not None:
                return str(values.show(value, MOST_VALUE))
        return None

    def resume(self, message: dict[str, Any]) -> None:
        call = self.calls.pop(message["number"], None)
        self._moved(message)
        self.loop.fire()
        if call is not None and not call.done():
            if message["kind"] == "raise":
                call.set_exception(EXCEPTIONS[message["why"]](message["message"]))
            elif message["kind"] == "given":
                call.set_result(message["value"])
        self.go_on()

    def go_on(self) -> None:
        """Run until an answer is needed, or until the end."""
        assert self.main is not None
        while True:
            try:
                self.loop.run_ready()
            except EndCell:
                return self.end()
            except (SystemExit, KeyboardInterrupt) as error:
                return self.end_with(error, "raised")
            if self.main.done():
                break
            if self.calls:
                return self.send(kind="paused")
            due = self.loop.next_timer()
            if due is None:
                return self.end_with(None, "unfinished")
            seconds = max(due - self.now(), 0.0)
            if seconds:
                self.call("sleep", (seconds,), {}).add_done_callback(functools.partial(self._slept, due))
            else:
                self.loop.fire()
        if self.over:
            return self.end()
        raised = asyncio.CancelledError() if self.main.cancelled() else self.main.exception()
        if raised is not None:
            return self.end_with(raised, "raised")
        self.end(self.main.result())

    def _slept(self, due: float, call: asyncio.Future[Any]) -> None:
        """A timer was waited for. The clock may have been read a moment before it is due: it is not early here."""
        if not call.cancelled() and call.exception() is None:
            self.extra += max(due - self.now(), 0.0)
            self.loop.fire()

    def end(self, value: str | None = None, error: dict[str, Any] | None = None) -> None:
        self.flush()
        self.over = True
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            self.loop.run_ready()
        self.loop.forget()
        self.calls.clear()
        self.main = None
        self.send(kind="end", value=value, error=error, variables=self._variables())

    def end_with(self, error: BaseException | None, code: str) -> None:
        if isinstance(error, MemoryError):
            raise error
        told = {"code": code, "message": "", "kind": "", "line": 0}
        if error is not None:
            told |= {"message": self._told(error, code), "kind": type(error).__name__, "line": self._line_of(error)}
        self.end(None, told)

    def _out_of_memory(self) -> None:
        self.main = None
        self.calls.clear()
        self.loop.forget()
        self._printed.clear()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        self.send(kind="end", value=None, error={"code": "memory", "message": "", "kind": "", "line": 0}, variables=[])

    def _variables(self) -> list[tuple[str, str, int | None]]:
        found = []
        for name, value in list(self.names.__dict__.items())[: MOST_VARIABLES + 8]:
            if not (name.startswith("__") and name.endswith("__")):
                sized = type(value) in (str, bytes, list, tuple, dict, set)
                found.append((name, type(value).__name__, len(value) if sized else None))
        return found[:MOST_VARIABLES]

    # ------------------------------------------------------------------ errors

    def _line_of(self, error: BaseException) -> int:
        if isinstance(error, SyntaxError) and error.filename == self.file:
            return error.lineno or 0
        here = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == self.file]
        return here[-1] if here else 0

    def _told(self, error: BaseException, code: str) -> str:
        try:
            shown = traceback.TracebackException.from_exception(error, limit=-200, compact=True)
            seen: set[int] = set()
            _without_driver(shown, seen, parsed=code == "syntax")
            text = "".join(shown.format(chain=code != "syntax"))
        except MemoryError:
            raise
        except BaseException:  # an exception of the cell's own whose text raises
            text = type(error).__name__
        text = text.replace(f'"{self.file}"', '"cell"').replace(LIBRARY, "")
        for number in range(1, self.cells):
            if f'"<cell {number}>"' in text:
                text = text.replace(f'"<cell {number}>"', '"earlier cell"')
        text = text.rstrip("\n")
        return text if len(text) <= MOST_MESSAGE else f"…{text[-MOST_MESSAGE:]}"


OWN = (__file__, values.__file__, asyncio.events.__file__)


def _without_driver(shown: traceback.TracebackException | None, seen: set[int], *, parsed: bool = False) -> None:
    """Leave out what is not the cell's: our own frames, with the folder of this host in them, and those of the event
    loop; all of them where the cell did not parse."""
    if shown is None or id(shown) in seen:
        return
    seen.add(id(shown))
    kept = [each for each in shown.stack if each.filename not in OWN and not parsed]
    shown.stack = traceback.StackSummary.from_list(kept)
    _without_driver(shown.__cause__, seen, parsed=parsed)
    _without_driver(shown.__context__, seen, parsed=parsed)
    for each in getattr(shown, "exceptions", None) or ():
        _without_driver(each, seen, parsed=parsed)


# ---------------------------------------------------------------------- the standard library, for one cell


def own_functions(driver: Driver) -> dict[str, Any]:
    async def settled(call: Any) -> Any:
        try:
            return await call
        except Exception as error:  # an unknown outcome is none, and passes
            return error

    def finish(*args: Any, **kwargs: Any) -> Any:
        return driver.call("finish", args, kwargs, sync=True)

    def sleep(*args: Any, **kwargs: Any) -> Any:
        return driver.call("sleep", args, kwargs)

    async def settle(*calls: Any) -> list[Any]:
        return await asyncio.gather(*[settled(call) for call in calls])

    return {"finish": finish, "sleep": sleep, "settle": settle}


def pin_waits(driver: Driver) -> None:
    at_once = asyncio.sleep

    async def later(delay: float, result: Any = None) -> Any:
        if delay <= 0:
            return await at_once(0, result)
        await driver.call("sleep", (float(delay),), {})
        return result

    def sleep(seconds: float, /) -> None:
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        driver.call("sleep", (float(seconds),), {}, sync=True)

    put(asyncio.tasks, "_GatheringFuture", Gathered)
    put(asyncio, "sleep", later)
    put(asyncio.tasks, "sleep", later)
    put(time, "sleep", sleep)


def put(where: Any, name: str, function: Any) -> None:
    """Put a function in the place of one of the standard library."""
    setattr(where, name, function)


def pin_clock(driver: Driver) -> None:
    """Every clock reads the time of the last answer. The zone is UTC, by the environment."""

    def seconds(*_: Any) -> float:
        return driver.now()

    def nanoseconds(*_: Any) -> int:
        return driver.at * 1_000_000 + int(driver.extra * 1e9)

    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"):
        put(time, name, seconds)
        put(time, f"{name}_ns", nanoseconds)
    for name in ("localtime", "gmtime", "ctime"):
        put(time, name, _given(getattr(time, name), seconds))
    asctime, strftime = _given(time.asctime, time.localtime), time.strftime
    put(time, "asctime", asctime)
    put(time, "strftime", lambda form, at=None, /: strftime(form, time.localtime() if at is None else at))


def _given(function: Callable[[Any], Any], now: Callable[[], Any]) -> Callable[..., Any]:
    """A function of a time, whose time is now where none is given."""

    def given(at: Any = None, /) -> Any:
        return function(now() if at is None else at)

    return given


def pin_dates(driver: Driver) -> None:
    """The classes of `datetime` read the same clock. Their own cannot be changed: these are derived from them."""
    behind: dict[type, type] = {}

    class Kind(type):
        """Values that C code makes are of the class behind, and are instances of these too."""

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, behind[cls]) if cls in behind else type.__instancecheck__(cls, value)

        def __subclasscheck__(cls, other: Any) -> bool:
            return issubclass(other, behind[cls]) if cls in behind else type.__subclasscheck__(cls, other)

    class Datetime(datetime.datetime, metaclass=Kind):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return cls.fromtimestamp(driver.now(), tz)

        @classmethod
        def utcnow(cls) -> Any:
            return cls.fromtimestamp(driver.now(), datetime.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return cls.fromtimestamp(driver.now())

        def date(self) -> Any:
            return Date(self.year, self.month, self.day)

        def __repr__(self) -> str:
            return _with_module(super().__repr__())

    class Date(datetime.date, metaclass=Kind):
        @classmethod
        def today(cls) -> Any:
            return cls.fromtimestamp(driver.now())

        def __repr__(self) -> str:
            return _with_module(super().__repr__())

    for made, kind in ((Datetime, datetime.datetime), (Date, datetime.date)):
        made.__name__ = made.__qualname__ = kind.__name__
        made.__module__ = "datetime"
        behind[made] = kind
        put(datetime, kind.__name__, made)


def _with_module(shown: str) -> str:
    """As the class behind shows itself: C code leaves the module out for classes that are made in Python."""
    return f"datetime.{shown}" if shown.startswith(("datetime(", "date(")) else shown


def pin_random(driver: Driver) -> None:
    """Random bytes come from the cell's seed, wherever code of the standard library asks for some."""

    def urandom(size: int, /) -> bytes:
        if size < 0:
            raise ValueError("negative argument not allowed")
        return driver.entropy(size)

    put(os, "urandom", urandom)
    put(os, "getrandom", lambda size, flags=0: urandom(size))
    put(random, "_urandom", urandom)
    seed = random.Random.seed

    def seeded(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed(self, int.from_bytes(urandom(64), "big") if a is None else a, version)

    put(random.Random, "seed", seeded)
    for name in ("_generate_time_safe", "_UuidCreate"):
        if hasattr(uuid, name):
            put(uuid, name, None)  # the C library's own clock
    put(uuid, "_node", 0x010000000001)  # no address of a network card


def limit(memory: int, recursion: int) -> None:
    """Limits that hold for this process from here on; those of the sandbox hold as well."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    size = _address_space(most)
    wanted = (size + memory, size + memory + ROOM)
    if most != resource.RLIM_INFINITY:
        wanted = (min(wanted[0], most), min(wanted[1], most))
    resource.setrlimit(resource.RLIMIT_AS, wanted)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(recursion + 40)


def _address_space(most: int) -> int:
    """Bytes of address space that this process has now."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no /proc: what is left is the largest mapping that there is room for, and never touched
        room = 1 << 36 if most == resource.RLIM_INFINITY else most
        resource.setrlimit(resource.RLIMIT_AS, (room, most))
        low, high = 0, room
        while high - low > 1 << 16:
            middle = (low + high) // 2
            try:
                mmap.mmap(-1, middle, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ).close()
                low = middle
            except OSError:
                high = middle
        return room - low


def take_pipes() -> tuple[int, int]:
    """Where messages come from and go to. The standard descriptors are the null device from here on: what C code prints
    must not get in between."""
    pipes = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)
    return pipes


def main(memory: int, recursion: int, packages: list[str]) -> None:
    driver = Driver(*take_pipes())
    driver.builtins.update(own_functions(driver))
    pin_waits(driver)
    pin_clock(driver)
    pin_dates(driver)
    pin_random(driver)
    put(os, "getpid", lambda: 2)
    os.environ.clear()
    os.environ["TZ"] = "UTC"
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
    output = CellOutput(driver.print)
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        put(sys, name, output)
    for name in ("stdin", "__stdin__"):
        put(sys, name, io.StringIO())
    sys.argv[:] = [""]
    sys.path[:] = [*[path for path in sys.path if path and path != os.path.dirname(__file__)], *packages]
    sys.modules["__main__"] = driver.names
    del sys.modules["values"]
    driver.send(kind="ready")
    limit(memory, recursion)
    driver.serve()
