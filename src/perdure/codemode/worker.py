"""One interpreter in one OS process, and one cell in it. Everything here blocks, and runs on a thread of the executor.

`MontyWorker` is a process of Monty's pool, taken for one REPL. `MontyCell` drives the interpreter through a cell: Monty
stops at every name, call and reading that it cannot answer itself, and a cell goes on until none of its branches can.
What it stops for and whose answer is at hand (a name, the clock, random bytes) is answered here; what is a call comes
out.

Rules that keep a cell the same when it is run again:

- Every call of a tool is answered with a future at once. So calls come out in the order in which the code makes them,
  whatever their answers are, and `gather` lets several come out of one step.
- The clock stands still between two answers. Random numbers come from the seed.
- A name resolves to a function only while it is not bound in the REPL, as any name does.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

from perdure.codemode.check import TypeFinding, read_diagnostics
from perdure.codemode.dumps import CellState
from perdure.codemode.inside.values import EARLIER, bind_own
from perdure.codemode.plain import plain, show
from perdure.codemode.stubs import OWN, Functions
from perdure.errors import MissingExtra
from perdure.model.code import (
    FINISH,
    SLEEP,
    CellEnd,
    CodeAnswer,
    CodeCall,
    CodeError,
    CodeLimit,
    CodeLimits,
    CodeStep,
    Given,
    Paused,
    Raise,
    RaiseKind,
    StopCell,
    Variable,
)
from perdure.model.codec import clean_text

if sys.platform == "linux":
    import resource

try:
    import pydantic_monty as monty
    from pydantic_monty._binary import find_monty_binary
except ImportError:  # the classes below are refused before they are used
    raise MissingExtra("code mode", "code") from None

VERSION: str = monty.__version__
POLICY = "1: clock and sleep from the host, random numbers from the seed, no files, no environment"
"""What a cell may read, as dumps name it: a change of `MontyWorker` or of the readings below is another policy."""

MOST_VALUE = 256 * 1024
"""Characters of a cell's last expression that are made into text."""
MOST_CLOSED = 10_000
"""Values that are looked at for calls when a cell ends: a walk over a large list takes Monty seconds."""
MOST_ENTROPY = 64 * 1024
MOST_MESSAGE = 4000
MOST_SUSPENSIONS = 2**31 - 1
"""Of Monty's own count, which a cell of 10,000 calls would reach: calls and time are counted here."""

PRELUDE = """\
import asyncio as _asyncio
async def _settled(call):
    try:
        return await call
    except Exception as error:  # an unknown outcome is none, and passes
        return error
async def settle(*calls):
    return await _asyncio.gather(*[_settled(call) for call in calls])
_own = type, repr, len, range
"""

CLOSING = f"""\
_raising = _call_of_earlier_cell()
try:
    await _raising
except RuntimeError:
    pass
def _closing(type, repr, len, range):
    coroutine, a_list, a_dict, a_tuple = type(_raising), type([]), type({{}}), type(())
    todo, left = [], [{MOST_CLOSED}]
    def closed(value, depth=0):
        kind = type(value)
        left[0] -= 1
        if kind is coroutine:
            text = repr(value)
            if text.startswith('<coroutine external_future(') or text.startswith('<gather('):
                return _raising
        elif kind is a_tuple and depth < 50 and len(value) <= left[0]:
            return a_tuple([closed(each, depth + 1) for each in value])
        elif kind is a_list or kind is a_dict:
            todo.append(value)
        return value
    def inside():
        for held in todo:
            if len(held) <= left[0]:
                for key in ([*held] if type(held) is a_dict else range(len(held))):
                    new = closed(held[key])
                    if new is not held[key]:
                        held[key] = new
    return closed, inside
_closed, _inside = _closing(*_own)
"""
"""Puts a call that raises in the place of each call in variables, also in lists, dicts and tuples: Monty gives the
value of a call to any later `await`, and takes no other answer after the cell's end. Built-ins are those of before the
first cell, because a cell may give another meaning to `type`."""

_EXCEPTIONS: dict[RaiseKind, str] = {
    "failed": "RuntimeError",
    "denied": "PermissionError",
    "invalid": "ValueError",
    "refused": "RuntimeError",
    "unknown": "BaseException",
}

Snapshot: TypeAlias = monty.SyncSnapshot
Future: Any = {"future": ...}


class MontyProgram:
    """Monty's program, as it is started here: on Linux, so that it is killed with the thread that started it.

    A worker hears of its host's death when it next reads from its pipe, which code that computes does not do. The
    kernel kills it at once (PR_SET_PDEATHSIG), if it is asked to by the worker itself: by a script, in memory, that
    ends as the program. The threads of an executor live as long as its workers. Where that does not work, for want of
    `setpriv` or of memory that may be executed, workers end at the time limit of their cell.
    """

    def __init__(self) -> None:
        self.path: str | None = None
        self._script: int | None = None
        tool = shutil.which("setpriv")
        if sys.platform != "linux" or tool is None:
            return
        try:
            program = shlex.quote(find_monty_binary())
            self._script = os.memfd_create("perdure-monty", os.MFD_CLOEXEC)
            # Some shells add variables to an environment that is empty.
            script = f'#!/bin/sh\nunset PWD OLDPWD SHLVL _\nexec {tool} --pdeathsig KILL -- {program} "$@"\n'
            os.write(self._script, script.encode())
            path = f"/proc/{os.getpid()}/fd/{self._script}"
            tried = subprocess.run([path, "--version"], env={}, capture_output=True, timeout=10, check=False)
            self.path = path if tried.returncode == 0 else None
        except (OSError, subprocess.SubprocessError):
            pass

    def close(self) -> None:
        script, self._script = self._script, None
        if script is not None:
            os.close(script)


class MontyWorker:
    """A process of the pool, taken by one REPL from `open` to `close`. Any thread may call `kill`, at any time."""

    def __init__(self, pool: monty.Monty, limits: CodeLimits, seed: str, functions: Functions) -> None:
        self._session = pool.checkout(
            limits={
                "max_feed_duration_secs": limits.seconds,
                "max_memory": limits.memory,
                "max_recursion_depth": limits.recursion,
                "max_suspensions": MOST_SUSPENSIONS,
            },
            os_policy={"datetime": "call_host", "sleep": "call_host", "random_start": {"seed": seed}},
            external_modules=_modules(functions),
        )
        self._limits = limits
        self._pid: int | None = None
        self._descriptor: int | None = None
        self._killed = self._opened = False

    def open(self) -> None:
        """Take a process, unless this has one."""
        if self._opened:
            return
        self._session.__enter__()
        self._opened = True
        self._pid = self._session.worker_pid
        # A descriptor, not the number: the process may have been replaced by the time it is to be killed.
        self._descriptor = os.pidfd_open(self._pid) if self._pid and hasattr(os, "pidfd_open") else None
        _confine(self._pid, self._limits)
        if self._killed:  # by who did not find a process yet
            self.kill()

    def feed(self, code: str, printed: Callable[[str, str], None]) -> Snapshot:
        return self._session.feed_start(code, print_callback=printed)

    def load(self, state: bytes) -> None:
        self._session.load_session(state)

    def load_cell(self, state: bytes, printed: Callable[[str, str], None]) -> Snapshot:
        return self._session.load_snapshot(state, print_callback=printed)

    def dump(self) -> bytes:
        return self._session.dump()

    def kill(self) -> None:
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            elif self._pid:
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Give the process back; once."""
        if not self._opened:
            return
        self._opened, descriptor, self._descriptor = False, self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        with contextlib.suppress(monty.MontyError, RuntimeError):  # its process is gone: the pool makes another
            self._session.__exit__(None, None, None)


def _confine(pid: int | None, limits: CodeLimits) -> None:
    """Limits of the OS on a worker, under which it also reads dumps: no file, no core, no more memory than it can need.

    Monty's own limits hold while it runs code; these hold whatever it does. Linux only: elsewhere Monty's hold alone.
    """
    if sys.platform == "linux" and pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            for which, most in (
                (resource.RLIMIT_AS, limits.memory + 1024 * 1024 * 1024),
                (resource.RLIMIT_FSIZE, 0),
                (resource.RLIMIT_CORE, 0),
                (resource.RLIMIT_NOFILE, 64),
            ):
                resource.prlimit(pid, which, (most, most))


def _modules(functions: Functions) -> Mapping[str, monty.ExternalModule]:
    return {
        space: monty.ExternalModule(
            {each.path.rpartition(".")[2]: _outside(each.path) for each in functions.members(space)}
        )
        for space in functions.namespaces
    }


def _outside(path: str) -> Callable[..., None]:
    """A function that stands for one outside: Monty takes its name, and never calls it."""

    def outside(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    outside.__name__ = path
    return outside


class MontyCell:
    """A cell from its first line to its end.

    `calls` have come out and have no answer yet; `_ids` are Monty's numbers for them. `end` is set when the code is
    over; `variables` is then what to keep of it, or None where what was before the cell is to stay. With `save`, a step
    that calls something and pauses leaves the state there in `saved`. `keepers` are variables in which the cell may
    leave a call.
    """

    def __init__(
        self, functions: Functions, limits: CodeLimits, state: CellState, feeds: int, keepers: Sequence[str] = ()
    ) -> None:
        self.functions, self._limits, self.code = functions, limits, state.code
        self.feeds, self._keepers = feeds, keepers
        self.calls = {call.number: call for call in state.calls}
        self.at, self.notes = state.at, state.notes
        self.end: CellEnd | None = None
        self.variables: bytes | None = None
        self._ids = dict(state.ids)
        self._emitted, self._drawn, self._spent, self._output = state.emitted, state.drawn, state.spent, state.output
        self._seed = state.seed
        self.save = False
        self.saved: bytes | None = None
        self._snapshot: Snapshot | None = None
        self._pending: tuple[Snapshot | None, frozenset[int]] = None, frozenset()
        self._worker: MontyWorker | None = None
        self._printed: list[str] = []
        self._fresh: list[CodeCall] = []
        self._full = False
        self._stopped = ""

    # ------------------------------------------------------------------ state, to be saved

    def state(self) -> CellState:
        return CellState(
            code=self.code,
            calls=tuple(self.calls.values()),
            ids={number: self._ids[number] for number in self.calls},
            emitted=self._emitted,
            at=self.at,
            seed=self._seed,
            drawn=self._drawn,
            spent=self._spent,
            output=self._output,
            notes=self.notes,
            end=self.end,
        )

    def ended(self, end: CellEnd, variables: bytes | None) -> None:
        """The code is over; answers that nobody waits for any more may still be missing."""
        self.end, self.variables, self._snapshot, self._worker = end, variables, None, None

    # ------------------------------------------------------------------ steps

    def begin(self, worker: MontyWorker, variables: bytes | None) -> CodeStep:
        def first() -> Snapshot:
            if variables is not None:
                worker.load(variables)
            else:
                self._import(worker, PRELUDE)
            for space in self.functions.namespaces:
                if re.search(rf"\b{space}\b", self.code):
                    self._import(worker, f"import {space}")
            self.feeds += 1
            return worker.feed(self.code, self._print)

        return self._run(worker, first)

    def _import(self, worker: MontyWorker, code: str) -> None:
        self.feeds += 1
        snapshot = worker.feed(code, self._print)
        while not isinstance(snapshot, monty.MontyComplete):
            snapshot = snapshot.resume_auto()

    def resume(self, worker: MontyWorker, frozen: bytes | None, answer: CodeAnswer) -> CodeStep:
        """`frozen`: the cell was saved, and `worker` has not loaded it yet."""

        def first() -> Snapshot:
            snapshot = self._snapshot if frozen is None else worker.load_cell(frozen, self._print)
            assert snapshot is not None
            return self._answered(snapshot, answer)

        return self._run(worker, first)

    def awaited(self, number: int) -> bool:
        """Whether an answer to this call lets the cell go on. One that was in a `gather` that has failed does not."""
        call = self.calls[number]
        snapshot = self._snapshot
        return self.end is None and (
            call.sync
            or not isinstance(snapshot, monty.FutureSnapshot)
            or self._ids[number] in self._pending_in(snapshot)
        )

    def forget(self, number: int) -> None:
        """A call has its answer."""
        del self.calls[number]
        del self._ids[number]

    def _run(self, worker: MontyWorker, first: Callable[[], Snapshot]) -> CodeStep:
        self._worker = worker
        self._fresh, self._printed = [], []
        try:
            worker.open()
            began = time.monotonic()  # a process that has to be started takes no time of the cell
            snapshot = first()
            while (following := self._next(snapshot)) is not None:
                snapshot = following
                self._check_time(began)
            self._spent += time.monotonic() - began
            if isinstance(snapshot, monty.MontyComplete):
                return self._over(CellEnd(value=self._shown(snapshot)), keep=True)
            self._snapshot = snapshot
            self.saved = worker.dump() if self.save and self._fresh else None
            return Paused(tuple(self._fresh), self._text())
        except _Abort as stop:
            return self._over(CellEnd(error=stop.error), keep=False)
        except monty.MontySyntaxError as error:
            return self._over(CellEnd(error=self._syntax(error)), keep=False)
        except monty.MontyRuntimeError as error:
            return self._failed(error)
        except monty.MontyCrashedError as error:
            return self._over(CellEnd(error=self._crashed(error)), keep=False)
        except (monty.MontyError, OSError, TimeoutError):  # no process could be had, or it broke off
            return self._over(CellEnd(error=LOST), keep=False)
        finally:
            if self.end is not None:
                worker.close()

    def _check_time(self, began: float) -> None:
        """Monty counts the time of one feed, and starts anew when a dump is loaded; this counts that of the cell."""
        if self._spent + time.monotonic() - began > self._limits.seconds:
            raise _Abort(_limit("time", f"it ran for more than {self._limits.seconds:g} s"))

    def _over(self, end: CellEnd, *, keep: bool) -> CodeStep:
        worker = self._worker
        if keep and worker is not None and (fault := self._keep(worker)) is not None:
            end, keep = CellEnd(error=fault), False
        calls = tuple(self._fresh)
        self.ended(
            CellEnd(self._text(), end.value, end.error, self.notes),
            self.variables if keep else None,
        )
        if end.error is not None and end.error.rolled_back:
            self.calls.clear()  # what it asked for and was not told of yet never comes out
        assert self.end is not None
        return self.end if not self.calls else Paused(calls)

    def _keep(self, worker: MontyWorker) -> CodeError | None:
        """Take the variables that the cell leaves. Says why they cannot be kept."""
        try:
            fault = self._close_calls(worker) if self._keepers and self._emitted else None
            variables = worker.dump()
        except monty.MontyCrashedError as error:
            return self._crashed(error)
        except (monty.MontyError, OSError, TimeoutError):
            return LOST
        if len(variables) > self._limits.state:
            most = self._limits.state
            text = f"its variables take {len(variables):,} bytes when they are saved, and may take {most:,}"
            fault = _limit("state", text)
        if fault is None:
            self.variables = variables
        return fault

    def _close_calls(self, worker: MontyWorker) -> CodeError | None:
        """Make the calls that the cell leaves in variables raise in later cells; which limit that reached."""
        made = "_call_of_earlier_cell"
        code = CLOSING
        for name in self._keepers:  # a name may be unbound still: the cell failed before
            code += f"try:\n    {name} = _closed({name})\nexcept NameError:\n    pass\n"
        self.feeds += 1
        try:
            snapshot = worker.feed(f"{code}_inside()\n_raising = _closing = _closed = _inside = None", self._print)
            while not isinstance(snapshot, monty.MontyComplete):
                raised = _raise("RuntimeError", EARLIER)
                match snapshot:
                    case monty.NameLookupSnapshot(variable_name=name):
                        snapshot = snapshot.resume(value=_outside(made)) if name == made else snapshot.resume()
                    case monty.FutureSnapshot(pending_call_ids=pending):
                        snapshot = snapshot.resume(dict.fromkeys(pending, raised))
                    case _:  # another one is of a function that the cell has put in the place of ours
                        snapshot = snapshot.resume(Future if snapshot.function_name == made else raised)
        except monty.MontyRuntimeError as error:
            fault = self._fault(error)
            return fault if fault is not None and fault.rolled_back else None
        return None

    def _failed(self, error: monty.MontyRuntimeError) -> CodeStep:
        fault = self._fault(error)
        if fault is None:
            return self._over(CellEnd(), keep=True)  # it was stopped, and has unwound
        return self._over(CellEnd(error=fault), keep=not fault.rolled_back)

    # ------------------------------------------------------------------ what Monty stops for

    def _next(self, snapshot: Snapshot) -> Snapshot | None:
        """The next stop; None where the cell is over, or waits for an answer from outside."""
        match snapshot:
            case monty.MontyComplete():
                return None
            case monty.NameLookupSnapshot():
                name = snapshot.variable_name
                if name in OWN or self.functions.get(name) is not None:
                    return snapshot.resume(value=_outside(name))
                return snapshot.resume()
            case monty.FutureSnapshot():
                return self._wait(snapshot)
            case _:
                return self._system(snapshot) if snapshot.is_os_function else self._call(snapshot)

    def _wait(self, snapshot: monty.FutureSnapshot) -> Snapshot | None:
        if self._stopped:
            return snapshot.resume({number: _exit(self._stopped) for number in snapshot.pending_call_ids})
        if self._pending_in(snapshot).isdisjoint(self._ids.values()):
            raise _Abort(_UNFINISHED)
        return None

    def _pending_in(self, snapshot: monty.FutureSnapshot) -> frozenset[int]:
        """Monty's numbers of the calls that branches wait for. It makes a list of them each time that it is asked, and
        a `gather` may have ten thousand."""
        if self._pending[0] is not snapshot:
            self._pending = snapshot, frozenset(snapshot.pending_call_ids)
        return self._pending[1]

    def _call(self, snapshot: monty.FunctionSnapshot) -> Snapshot | None:
        name = str(snapshot.function_name)
        if self._stopped:
            return snapshot.resume(_exit(self._stopped))
        function = self.functions.get(name)
        if function is None and name not in (FINISH, SLEEP):
            return snapshot.resume(_raise("NameError", f"name '{name}' is not defined"))
        try:
            if function is not None:
                args, name = function.bind(snapshot.args, snapshot.kwargs), function.spec.name
            else:
                args = bind_own(name, snapshot.args, snapshot.kwargs)
            args = plain(args)
        except TypeError as error:
            return snapshot.resume(_raise("TypeError", str(error)))
        return self._emit(snapshot, name, args, sync=name == FINISH and function is None)

    def _emit(
        self, snapshot: monty.FunctionSnapshot, name: str, args: dict[str, Any], *, sync: bool
    ) -> Snapshot | None:
        if self._emitted >= self._limits.calls:
            raise _Abort(_limit("calls", f"it made more than {self._limits.calls:,} calls"))
        call = CodeCall(self._emitted, name, args, self._line(snapshot.position), sync)
        self._emitted += 1
        self.calls[call.number] = call
        self._ids[call.number] = snapshot.call_id
        self._fresh.append(call)
        return None if sync else snapshot.resume(Future)

    def _system(self, snapshot: monty.FunctionSnapshot) -> Snapshot | None:
        """What a cell asks of its machine: time, sleep, random bytes and imports. Files and variables are refused."""
        args = snapshot.args
        match str(snapshot.function_name):
            case "time.time":
                return snapshot.resume({"return_value": self.at / 1000})
            case "datetime.now":
                zone = args[0] if args else None
                now = datetime.fromtimestamp(self.at / 1000, zone or UTC)
                return snapshot.resume({"return_value": now if zone is not None else now.replace(tzinfo=None)})
            case "date.today":
                return snapshot.resume({"return_value": datetime.fromtimestamp(self.at / 1000, UTC).date()})
            case "os.urandom" if isinstance(args[0], int) and 0 <= args[0] <= MOST_ENTROPY:
                self._drawn += 1
                drawn = hashlib.shake_256(f"{self._seed}:{self._drawn}".encode()).digest(args[0])
                return snapshot.resume({"return_value": drawn})
            case "time.sleep" | "asyncio.sleep" as name if not self._stopped:
                return self._emit(snapshot, SLEEP, {"seconds": float(args[0])}, sync=name == "time.sleep")
            case "import" if args[0] in self.functions.namespaces:
                return snapshot.resume_auto()
            case _:
                return snapshot.resume_not_handled()

    def _answered(self, snapshot: Snapshot, answer: CodeAnswer) -> Snapshot:
        identity = self._ids[answer.call]
        call = self.calls[answer.call]
        self.forget(answer.call)
        match answer:
            case Given():
                result: Any = {"return_value": answer.value}
            case Raise():
                result = _raise(_EXCEPTIONS[answer.kind], answer.message)
            case _:
                # Nothing but an exception that leaves every frame ends a feed in Monty. Its text tells it from one that
                # the code raises; a cell that catches it gets it again from everything that it calls.
                self._stopped = f"stopped {secrets.token_hex(8)}"
                result = _exit(self._stopped)
                self.calls.clear()
                self._ids.clear()
        if call.sync:
            assert isinstance(snapshot, monty.FunctionSnapshot)
            return snapshot.resume(result)
        if isinstance(answer, StopCell):
            assert isinstance(snapshot, monty.FutureSnapshot)
            return snapshot.resume(dict.fromkeys(snapshot.pending_call_ids, result))
        assert isinstance(snapshot, monty.FutureSnapshot)
        if identity not in self._pending_in(snapshot):
            return snapshot
        return snapshot.resume({identity: result})

    # ------------------------------------------------------------------ text

    def _print(self, stream: str, text: str) -> None:
        """Called by Monty in the middle of a step. What is raised here would wait for the end of the cell."""
        if self._full or self._stopped:
            return
        self._output += len(text)
        self._printed.append(text)
        if self._output > self._limits.output:
            self._full = True
            if self._worker is not None:
                self._worker.kill()

    def _text(self) -> str:
        text = clean_text("".join(self._printed))
        return text if len(text) <= self._limits.output else text[: self._limits.output]

    def _shown(self, complete: monty.MontyComplete) -> str | None:
        value = complete.output
        return None if value is None else show(value, MOST_VALUE)

    def _line(self, position: monty.SourceRange) -> int:
        if position.filename != f"<python-input-{self.feeds - 1}>":
            return 0  # inside a function of an earlier cell
        return self.code.encode()[: position.start].count(b"\n") + 1

    # ------------------------------------------------------------------ errors

    def _fault(self, error: monty.MontyRuntimeError) -> CodeError | None:
        raised = error.exception()
        message = clean_text(str(raised))
        match raised:
            case _ if self._full:
                return self._flood()
            case SystemExit() if self._stopped and self._stopped in message:
                return None
            case TimeoutError() if "time limit exceeded" in message:
                return _limit("time", f"it ran for more than {self._limits.seconds:g} s")
            case MemoryError():
                return _limit("memory", f"its values take more than {self._limits.memory:,} bytes")
            case RuntimeError() if "scheduler stalled" in message:
                return _UNFINISHED
            case NotImplementedError() if message.startswith("The monty syntax parser"):
                lacks = message.rpartition("support ")[2].removeprefix("the ")
                text = f"This Python has no {lacks}: write it in another way."
                return CodeError("syntax", self._located(error, text), line=self._error_line(error), rolled_back=True)
        kind = type(raised).__name__
        return CodeError("raised", self._traceback(error), kind=kind, line=self._error_line(error))

    def _syntax(self, error: monty.MontySyntaxError) -> CodeError:
        return CodeError("syntax", self._traceback(error), line=self._error_line(error), rolled_back=True)

    def _crashed(self, error: monty.MontyCrashedError) -> CodeError:
        if self._full:
            return self._flood()
        if error.timed_out:
            return _limit("time", f"it ran for more than {self._limits.seconds:g} s")
        return LOST

    def _flood(self) -> CodeError:
        return _limit("output", f"it printed more than {self._limits.output:,} bytes")

    def _error_line(self, error: monty.MontyRuntimeError | monty.MontySyntaxError) -> int:
        """The line of this cell at which it failed, also where a function of an earlier one raised."""
        here = f"<python-input-{self.feeds - 1}>"
        return next((frame.line for frame in reversed(error.traceback()) if frame.filename == here), 0)

    def _located(self, error: monty.MontyRuntimeError, text: str) -> str:
        line = self._error_line(error)
        return f"line {line}: {text}" if line else text

    def _traceback(self, error: monty.MontyRuntimeError | monty.MontySyntaxError) -> str:
        text = clean_text(error.display()).replace(f"<python-input-{self.feeds - 1}>", "cell")
        text = re.sub(r"<python-input-\d+>", "earlier cell", text)
        return text if len(text) <= MOST_MESSAGE else f"…{text[-MOST_MESSAGE:]}"


class _Abort(Exception):
    """The cell is dropped where it stands, in the middle of what it does."""

    def __init__(self, error: CodeError) -> None:
        self.error = error
        super().__init__(error.message)


LOST = CodeError("lost", "The worker that ran the cell died.", rolled_back=True)
_UNFINISHED = CodeError(
    "unfinished",
    "The cell awaits a call that an earlier cell made: a call can be awaited only in the cell that makes it.",
    rolled_back=True,
)


def _limit(which: CodeLimit, why: str) -> CodeError:
    return CodeError("limit", f"The cell was stopped: {why}.", which=which, rolled_back=True)


def _raise(kind: str, message: str) -> Any:
    return {"exc_type": kind, "message": clean_text(message)}


def _exit(text: str) -> Any:
    return _raise("SystemExit", text)


def list_variables(worker: MontyWorker, variables: bytes, names: Sequence[str]) -> list[Variable]:
    """The variables of `names` that are bound, with their types and lengths."""
    worker.open()
    worker.load(variables)
    found = []
    for name in names:
        sized = f"isinstance({name}, (str, bytes, list, tuple, dict, set))"
        code = f"(type({name}).__name__, len({name}) if {sized} else None)"
        try:
            snapshot = worker.feed(code, lambda stream, text: None)
            if isinstance(snapshot, monty.NameLookupSnapshot):
                snapshot = snapshot.resume()  # never bound: the cell failed before
            if isinstance(snapshot, monty.MontyComplete):
                kind, size = snapshot.output
                found.append(Variable(name, str(kind), size))
        except monty.MontyRuntimeError:
            continue
    return found


class TypeChecker:
    """A session that checks types and runs nothing. One worker serves every catalogue: a stub module for each.

    A cell is fed behind one line that imports what it may call and binds what it may use; Monty checks all of it, stops
    at that import, and is told to raise there.
    """

    MOST_MODULES = 64
    SECONDS = 5.0

    def __init__(self) -> None:
        self._pool: monty.Monty | None = None
        self._session: monty.MontySession | None = None
        self._modules: dict[str, monty.ExternalModule] = {}

    def check(
        self, code: str, functions: Functions, mentions: frozenset[str], names: Sequence[str]
    ) -> list[TypeFinding]:
        """What the checker finds. Raises MontyError where it cannot say."""
        stem = self._stubs(functions)
        called = sorted((mentions & {*OWN, *(each.path for each in functions.plain)}).difference(names))
        spaces = sorted(mentions.intersection(functions.namespaces).difference(names))
        bound = sorted(mentions.intersection(names))
        head = f"from {stem} import {', '.join(('__bound__', *called))}; "
        head += "".join(f"import {stem}_{space} as {space}; " for space in spaces)
        head += "".join(f"{name} = " for name in bound) + "__bound__()"
        try:
            snapshot = self._opened().feed_start(f"{head}\n{code}", print_callback=lambda stream, text: None)
            while isinstance(snapshot, monty.FunctionSnapshot) and snapshot.function_name != "import":
                snapshot = snapshot.resume_auto()
            if isinstance(snapshot, monty.FunctionSnapshot):
                snapshot.resume(_exit("checked"))
        except monty.MontyTypingError as error:
            return read_diagnostics(error.display(), 2)
        except (monty.MontyRuntimeError, monty.MontySyntaxError):
            pass  # nothing to report, or the interpreter itself will say it
        except monty.MontyCrashedError:
            self._drop()
            raise
        return []

    def _stubs(self, functions: Functions) -> str:
        stem = f"tools_{functions.print}"
        if stem not in self._modules:
            if len(self._modules) >= self.MOST_MODULES:
                self._drop()
            for space, stub in functions.stubs.items():
                self._modules[f"{stem}_{space}" if space else stem] = monty.ExternalModule({}, stubs=stub)
        return stem

    def _opened(self) -> monty.MontySession:
        if self._pool is None:
            pool = monty.Monty(min_processes=1, max_processes=1, request_timeout=self.SECONDS)
            self._pool = pool.__enter__()
        if self._session is None:
            self._session = self._pool.checkout(
                limits={"max_suspensions": MOST_SUSPENSIONS, "max_feed_duration_secs": self.SECONDS},
                type_check=True,
                type_check_format="json",
                external_modules=self._modules,
            )
            self._session.__enter__()
        return self._session

    def _drop(self) -> None:
        session, self._session = self._session, None
        self._modules.clear()
        if session is not None:
            with contextlib.suppress(monty.MontyError, RuntimeError):
                session.__exit__(None, None, None)

    def close(self) -> None:
        self._drop()
        if self._pool is not None:
            self._pool.__exit__(None, None, None)
