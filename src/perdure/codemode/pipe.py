"""The other side of `inside/driver.py`: one CPython in a sandbox, and one cell in it. Everything here blocks, and runs
on a thread of the executor.

    to it     begin(code, at, seed, functions)                    a cell; functions only where they have changed
              given(number, value) | raise(number, why, message) | stop(number), each with the time
    from it   ready, once
              call(number, path, args, line, sync)*, print(text)*, then paused, or
              end(value, error, variables)

Whatever comes from it may have been written by the code of the cell. So a message has no more power than the code has:
each is decoded strictly, within limits on its length and number, and must be one that can come now. Numbers of calls
are counted here, arguments are made plain here, time and output are measured here. What does not fit ends the process,
and the cell is lost; nothing that came before it is taken back, because the code could have asked for that as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from perdure.codemode.plain import plain
from perdure.codemode.stubs import Functions
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
    CPython,
    Given,
    Paused,
    Raise,
    Variable,
)
from perdure.model.codec import clean_text, encode
from perdure.model.command import Command
from perdure.model.sandbox import Confinement, SandboxLimits
from perdure.ports.bound import BoundCommand

INSIDE = str(Path(__file__).parent / "inside")
MOST_LINE = 64 * 1024 * 1024
"""Bytes of a message: the arguments of a call, where each letter needs six."""
MOST_VALUE = 300 * 1024
MOST_MESSAGE = 8_000
MOST_NAME = 200
START_SECONDS = 60.0
CPU_SECONDS = 6 * 3600
"""Of one process over all its cells, by the OS: for one that nobody is left to end. The time of a cell is measured
here, and is much less."""

_MAIN = "import sys; sys.path.insert(0, sys.argv[1]); import driver; driver.main({memory}, {recursion}, {packages!r})"


class ReadyMessage(Struct, frozen=True, tag_field="kind", tag="ready", forbid_unknown_fields=True):
    pass


class CallMessage(Struct, frozen=True, tag_field="kind", tag="call", forbid_unknown_fields=True):
    number: int
    path: str
    args: dict[str, Any]
    line: int
    sync: bool


class Printed(Struct, frozen=True, tag_field="kind", tag="print", forbid_unknown_fields=True):
    text: str


class Waits(Struct, frozen=True, tag_field="kind", tag="paused", forbid_unknown_fields=True):
    pass


class Told(Struct, frozen=True, forbid_unknown_fields=True):
    code: Literal["syntax", "raised", "unfinished", "memory"]
    message: str
    kind: str
    line: int


class Over(Struct, frozen=True, tag_field="kind", tag="end", forbid_unknown_fields=True):
    value: str | None
    error: Told | None
    variables: list[tuple[str, str, int | None]]


FromIt: TypeAlias = ReadyMessage | CallMessage | Printed | Waits | Over
_decoder: msgspec.json.Decoder[FromIt] = msgspec.json.Decoder(FromIt)


class CellDropped(Exception):
    """The cell is dropped where it stands, and its process with it."""

    def __init__(self, error: CodeError) -> None:
        self.error = error
        super().__init__(error.message)


def lost(why: str) -> CodeError:
    return CodeError("lost", f"The process that ran the cell {why}.", rolled_back=True)


def over_limit(which: CodeLimit, why: str) -> CodeError:
    return CodeError("limit", f"The cell was stopped: {why}.", which=which, rolled_back=True)


UNFINISHED = CodeError(
    "unfinished",
    "The cell awaits what can never come, such as a call that an earlier cell made: a call can be awaited only in the "
    "cell that makes it.",
    rolled_back=True,
)


def command_of(chosen: CPython) -> Command:
    """How the interpreter is begun. It may read the installation of Python, our driver and what the host grants, and
    change nothing."""
    python = os.path.realpath(sys.executable)
    # Not -I: it would ignore the hash seed too. No variable but ours is there to be read.
    code = _MAIN.format(memory=chosen.limits.memory, recursion=chosen.limits.recursion, packages=list(chosen.packages))
    library, more = (os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
    read = (python, os.path.dirname(library), more, INSIDE, "/usr/share/zoneinfo", *chosen.packages)
    return Command(
        (python, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", code, INSIDE),
        cwd=INSIDE,
        env=dict(ENVIRONMENT),
        grace=0.0,
        sandbox=Confinement(
            read=tuple(dict.fromkeys(read)),
            limits=SandboxLimits(memory=chosen.limits.memory + (1 << 30), file_size=1, cpu=CPU_SECONDS),
            unsandboxed=chosen.unsandboxed,
            computes=True,
        ),
    )


ENVIRONMENT: Mapping[str, str] = {
    "PYTHONHASHSEED": "0",
    "TZ": "UTC",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "OMP_NUM_THREADS": "1",  # packages with threads of their own: there are none
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class CPythonWorker:
    """A CPython in its sandbox. The event loop begins, kills and ends it; in between one thread at a time talks to it.

    `catalogue` is the print of the functions that it knows.
    """

    def __init__(self, command: BoundCommand) -> None:
        self.catalogue, self._command = "", command
        self._left = bytearray()
        self._lines: list[bytes] = []
        self._out, self._in = select.poll(), select.poll()
        self._out.register(command.stdin, select.POLLOUT)
        self._in.register(command.stdout, select.POLLIN)
        try:
            self._process = os.pidfd_open(command.pid)
        except ProcessLookupError:  # it has ended already: the first message will not come
            self._process = -1

    def kill(self) -> None:
        """It can have begun no other process, so this is all of it."""
        if self._process >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    async def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.kill()
        if self._process >= 0:
            os.close(self._process)
        os.close(self._command.stdin)
        os.close(self._command.stdout)
        await self._command.end()

    async def complaints(self) -> str:
        return await self._command.complaints()

    def wait_ready(self) -> None:
        """Raises Ended."""
        if not isinstance(self.receive(time.monotonic() + START_SECONDS), ReadyMessage):
            raise CellDropped(lost("did not begin as it should"))

    def send(self, message: Mapping[str, Any], until: float) -> None:
        """Raises Ended where it cannot be given: the process has died, or does not read."""
        left = memoryview(encode(message) + b"\n")
        while left:
            if not self._out.poll(max(until - time.monotonic(), 0) * 1000):
                raise CellDropped(_too_long())
            try:
                left = left[os.write(self._command.stdin, left) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise CellDropped(lost("died")) from None

    def receive(self, until: float) -> FromIt:
        """The next message. Raises Ended where there is none by then, or where it is none."""
        while not self._lines:
            if not self._in.poll(max(until - time.monotonic(), 0) * 1000):
                raise CellDropped(_too_long())
            try:
                data = os.read(self._command.stdout, 1 << 18)
            except BlockingIOError:
                continue
            if not data:
                raise CellDropped(lost("died"))
            first, *more = data.split(b"\n")
            self._left += first
            if len(self._left) > MOST_LINE:
                raise CellDropped(lost("wrote a message without an end"))
            if more:
                self._lines = [bytes(self._left), *more[:-1]][::-1]
                self._left = bytearray(more[-1])
        try:
            return _decoder.decode(self._lines.pop())
        except (msgspec.MsgspecError, RecursionError):
            raise CellDropped(lost("wrote what is no message")) from None

    @property
    def quiet(self) -> bool:
        """Whether nothing has come that was not asked for."""
        return not self._lines and not self._left


def _too_long() -> CodeError:
    return over_limit("time", "it ran for longer than it may")


class Kept(Struct):
    """What it takes to run a cell again, to its end or to where it waits.

    `answers` are those that reached the code, each with its time and with the digest of the calls that came out before;
    `told` is the digest of all.
    """

    code: str
    functions: Functions
    at: int
    seed: str
    answers: list[tuple[CodeAnswer, int, bytes]]
    told: bytes
    size: int


class CPythonCell:
    """A cell from its first line to its end.

    `calls` have come out and have no answer yet. `end` is set when the code is over; `keep` is whether its variables
    stay, and `variables` what they are then.
    """

    def __init__(self, code: str, functions: Functions, limits: CodeLimits, at: int, seed: str) -> None:
        self.code, self.functions, self._limits, self.at, self.seed = code, functions, limits, at, seed
        self._began = at
        self.calls: dict[int, CodeCall] = {}
        self.end: CellEnd | None = None
        self.keep = False
        self.notes: tuple[str, ...] = ()
        self.variables: list[Variable] = []
        self.answers: list[tuple[CodeAnswer, int, bytes]] = []
        self.size = len(code)
        self.told = b""
        self._emitted, self._spent, self._output, self._taken = 0, 0.0, 0, 0
        self._stopped = False

    # ------------------------------------------------------------------ steps

    def begin(self, worker: CPythonWorker) -> CodeStep:
        message: dict[str, Any] = {"kind": "begin", "code": self.code, "at": self.at, "seed": self.seed}
        if worker.catalogue != self.functions.print:
            found = self.functions.by_path
            message["functions"] = [(path, each.signature, each.open) for path, each in found.items()]
            worker.catalogue = self.functions.print
        return self._step(worker, message)

    def resume(self, worker: CPythonWorker, answer: CodeAnswer) -> CodeStep:
        self.answers.append((answer, self.at, self.told))
        message: dict[str, Any] = {"number": answer.call, "at": self.at}
        match answer:
            case Given():
                message |= {"kind": "given", "value": answer.value}
                self.size += len(encode(answer.value))
            case Raise():
                message |= {"kind": "raise", "why": answer.kind, "message": clean_text(answer.message)}
                self.size += len(answer.message)
            case _:
                message["kind"] = "stop"
                self._stopped = True
                self.calls.clear()
        self.calls.pop(answer.call, None)
        if self.size > self._limits.state:
            return self.over(
                CellEnd(error=over_limit("state", f"what it was given is more than {self._limits.state:,} bytes"))
            )
        return self._step(worker, message)

    def over(self, end: CellEnd, *, keep: bool = False) -> CodeStep:
        """The code is over; answers that nobody waits for any more may still be missing."""
        self.end, self.keep = msgspec.structs.replace(end, notes=self.notes), keep
        if end.error is not None and end.error.rolled_back:
            self.calls.clear()
        return Paused((), end.printed) if self.calls else self.end

    def kept(self) -> Kept:
        return Kept(self.code, self.functions, self._began, self.seed, self.answers, self.told, self.size)

    def _step(self, worker: CPythonWorker, message: Mapping[str, Any]) -> CodeStep:
        printed: list[str] = []
        fresh: list[CodeCall] = []
        began = time.monotonic()
        until = began + max(self._limits.seconds - self._spent, 0.0)
        try:
            worker.send(message, until)
            return self._read(worker, until, printed, fresh)
        except CellDropped as ended:
            error = ended.error
            if error.which == "time":
                error = over_limit("time", f"it ran for more than {self._limits.seconds:g} s")
            return self.over(CellEnd(printed=_text(printed, self._limits.output), error=error))
        finally:
            self._spent += time.monotonic() - began

    def _read(self, worker: CPythonWorker, until: float, printed: list[str], fresh: list[CodeCall]) -> CodeStep:
        while True:
            match worker.receive(until):
                case Printed(text=text) if text:
                    self._output += len(text)
                    printed.append(text)
                    if self._output > self._limits.output:
                        raise CellDropped(over_limit("output", f"it printed more than {self._limits.output:,} bytes"))
                case CallMessage() as call if not (fresh and fresh[-1].sync):
                    fresh.append(self._called(call))
                case Waits() if worker.quiet and self.calls:
                    self.told = _digest(self.told, fresh)
                    return Paused(tuple(fresh), _text(printed, self._limits.output))
                case Over() as over if worker.quiet and not (fresh and fresh[-1].sync):
                    return self._over(over, fresh, _text(printed, self._limits.output))
                case _:
                    raise CellDropped(lost("wrote a message that has no place there"))

    def _called(self, call: CallMessage) -> CodeCall:
        if self._emitted >= self._limits.calls:
            raise CellDropped(over_limit("calls", f"it made more than {self._limits.calls:,} calls"))
        function = self.functions.get(call.path)
        own = call.path in (FINISH, SLEEP) and function is None
        known = function is not None or own
        if self._stopped or call.number != self._emitted or not known or (call.sync and not own):
            raise CellDropped(lost("wrote a call that no cell can make"))
        try:
            args = plain(call.args)
            fits = set(args) == {"value" if call.path == FINISH else "seconds"}
            if function is not None:
                names = {each.name for each in function.parameters}
                needed = {each.name for each in function.parameters if each.required}
                fits = needed <= set(args) and (function.open or set(args) <= names)
            elif call.path == SLEEP:
                fits = fits and type(args["seconds"]) in (int, float)
            if not fits or (call.path == FINISH and own and not call.sync):
                raise CellDropped(lost("wrote a call with arguments that no cell can give"))
        except TypeError:
            raise CellDropped(lost("wrote a call with arguments that are no plain data")) from None
        self._taken += len(encode(args))
        if self._taken > self._limits.memory:
            raise CellDropped(over_limit("memory", "the arguments of its calls are too large"))
        made = CodeCall(
            self._emitted, function.spec.name if function else call.path, args, max(call.line, 0), call.sync
        )
        self._emitted += 1
        self.calls[made.number] = made
        return made

    def _over(self, over: Over, fresh: list[CodeCall], printed: str) -> CodeStep:
        self.variables = [
            Variable(clean_text(name)[:MOST_NAME], clean_text(kind)[:MOST_NAME], size)
            for name, kind, size in over.variables[:1000]
        ]
        error = None if over.error is None else self._error(over.error)
        value = None if over.value is None else clean_text(over.value)[:MOST_VALUE]
        self.told = _digest(self.told, fresh)
        step = self.over(CellEnd(printed, value, error), keep=error is None or not error.rolled_back)
        if isinstance(step, Paused):
            # What it printed comes with this step: the end is told when its last call has an answer.
            assert self.end is not None
            self.end = msgspec.structs.replace(self.end, printed="")
            return Paused(tuple(fresh), printed)
        return step

    def _error(self, told: Told) -> CodeError:
        message = clean_text(told.message)[-MOST_MESSAGE:]
        match told.code:
            case "unfinished":
                return UNFINISHED
            case "memory":
                return over_limit("memory", f"its values take more than {self._limits.memory:,} bytes")
            case "syntax":
                return CodeError("syntax", message, line=max(told.line, 0), rolled_back=True)
            case _:
                return CodeError("raised", message, clean_text(told.kind)[:MOST_NAME], line=max(told.line, 0))


def _text(printed: Sequence[str], most: int) -> str:
    return clean_text("".join(printed))[:most]


def _digest(before: bytes, calls: Sequence[CodeCall]) -> bytes:
    """Of all calls that came out so far."""
    if not calls:
        return before
    digest = hashlib.sha256(before)
    for call in calls:
        digest.update(encode([call.number, call.name, call.args]))
    return digest.digest()


def run_again(worker: CPythonWorker, cells: Sequence[Kept], limits: CodeLimits, *, waits: bool) -> str:
    """Bring a new process to where another one was, by running cells against their answers: nothing is told of it.

    `waits`: the last of them waits for an answer, the others have ended. Says why it cannot be done; "" where it is.
    """
    for kept in cells:
        cell = CPythonCell(kept.code, kept.functions, limits, kept.at, kept.seed)
        cell.begin(worker)
        for answer, at, told in kept.answers:
            if cell.end is not None or cell.told != told or answer.call not in cell.calls:
                return "a cell did something else when it was run again"
            cell.at = at
            cell.resume(worker, answer)
        if cell.end is not None and not cell.keep:
            error = cell.end.error
            return error.message if error is not None else "a cell ended in another way when it was run again"
        if cell.told != kept.told or (cell.end is None) != (waits and kept is cells[-1]):
            return "a cell did something else when it was run again"
    return ""
