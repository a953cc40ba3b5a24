"""What a replay goes by: the recorded calls of a durable function; and time limits, which it cannot repeat.

Records are found by the key of their call, and compared with the call that the code makes now.

Time limits of asyncio and its relatives work by cancelling a task after a time, and on replay that has not happened:
the process was parked, or the call is answered from its record at once. So a call inside of one is refused, before it
does anything. A context manager that was entered is on the stack of the coroutine that entered it, and nowhere else.
The garbage collector can read that stack only while the coroutine is suspended; so the call yields a `QUESTION` to
what drives it (`Scheduler.drive`), which reads the stack and resumes it at once, without a pass through the event loop.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import math
import types
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from perdure.errors import Diverged
from perdure.model.codec import encode
from perdure.model.record import Begun, Done, Segment, StepFaltered, StepKind, StepRecord

SHOWN = 200
"""Characters of a call's arguments that a journal keeps; longer ones are compared by their digest."""

FORKS: frozenset[str] = frozenset({"gather", "any", "all"})

LIBRARIES = frozenset({"asyncio", "anyio", "async_timeout"})
EXITS = frozenset({"__exit__", "__aexit__"})
METHODS = (types.MethodType, types.FunctionType, types.BuiltinMethodType)
OUR_FILES = str(Path(__file__).parent)
DEPTH = 100
"""Coroutines that are searched, from the outermost on."""

OWN_CANCEL = "a cancel of its own task before this call"

QUESTION = object()
"""What a call yields to what drives its branch, to be sent the name of a time limit around it."""


class Open(Struct):
    """A call that did not end: its last start, its last failed attempt since then, and when the first one failed."""

    begun: Begun | None = None
    faltered: StepFaltered | None = None
    since: int | None = None


class Replay:
    """The records of a segment, by key. A record that was used is dropped.

    `_last` has the number of the last recorded call of every branch, `_widths` how many branches of a call have any.
    `_results` are the keys of calls that are done, in the order of delivery, if the journal is `ordered`. `over`: every
    record was used, so that no call needs to be compared any more. `taken` are the signals that records have used.
    """

    def __init__(self, process_id: str, records: Iterable[StepRecord]) -> None:
        self._process_id = process_id
        self._done: dict[str, Done] = {}
        self._open: dict[str, Open] = {}
        self._last: dict[str, int] = {}
        self._widths: dict[str, int] = {}
        self.segment = Segment(0)
        self.taken: set[int] = set()
        self.is_new = self.ordered = True
        for record in records:
            if self.is_new:
                self.is_new, self.ordered = False, getattr(record, "ordered", False)
            self._read(record)
        self.over = not self._done and not self._open
        self._results = deque(self._done if self.ordered else ())

    def _read(self, record: StepRecord) -> None:
        if isinstance(record, Segment):
            self.segment = record
            self.taken = set(record.taken)
            return
        self._place(record.key)
        if isinstance(record, Done):
            self._open.pop(record.key, None)
            self._done[record.key] = record
            if record.event is not None:
                self.taken.add(record.event)
        elif isinstance(record, Begun):
            before = self._open.get(record.key)
            self._open[record.key] = Open(record, since=None if before is None else before.since)
        else:
            before = self._open.setdefault(record.key, Open())
            before.faltered, before.since = record, record.at if before.since is None else before.since

    def _place(self, key: str) -> None:
        branch, _, number = key.rpartition(".")
        self._last[branch] = max(self._last.get(branch, 0), int(number))
        if branch:
            fork, _, index = branch.rpartition(".")
            width = int(index) + 1
            if width > self._widths.get(fork, 0):
                self._widths[fork] = width
                self._place(fork)

    # ------------------------------------------------------------------ in order

    def next_result(self) -> Done | None:
        """The next recorded result that was not used, if the journal is ordered."""
        while self._results:
            done = self._done.get(self._results[0])
            if done is not None:
                return done
            self._results.popleft()
        return None

    def peek(self, key: str, kind: StepKind, name: str, asked: str) -> Done | None:
        """How this call ended before, if it did, without using the record. Raises Diverged as `answer` does."""
        done = self._done.get(key)
        if done is not None:
            self._check(key, done, kind, name, asked)
        elif key not in self._open:
            self._check_none(key, kind, name, asked)
        return done

    def take(self, key: str) -> Done | None:
        """Use the record of this call."""
        return self._done.pop(key, None)

    # ------------------------------------------------------------------ answers

    def answer(self, key: str, kind: StepKind, name: str, asked: str) -> Done | None:
        """How this call ended before, if it did. Raises Diverged when another call was made here, or after it."""
        if self.over:
            return None
        done = self._done.pop(key, None)
        if done is not None:
            self._check(key, done, kind, name, asked)
        elif not self._done and not self._open:
            self.over = True
        elif key not in self._open:
            self._check_none(key, kind, name, asked)
        return done

    def left_open(self, key: str, kind: StepKind, name: str, asked: str) -> Open | None:
        """The start of a call that did not end, if there is one."""
        before = None if self.over else self._open.pop(key, None)
        if before is not None and before.begun is not None:
            self._check(key, before.begun, kind, name, asked)
        return before

    def was_forked(self, key: str, kind: StepKind, size: int) -> bool:
        """Whether branches of this call have made calls before."""
        width = 0 if self.over else self._widths.get(key, 0)
        if width > size:
            raise Diverged(self._process_id, key, f"{width} branches or more", shown(kind, "", str(size)))
        return width > 0

    def is_ahead(self, branch: str, calls: int) -> bool:
        """Whether calls are recorded that this branch has yet to make again."""
        return not self.over and calls < self._last.get(branch, 0)

    def _check(self, key: str, recorded: Begun | Done, kind: StepKind, name: str, asked: str) -> None:
        if (recorded.kind, recorded.name, recorded.asked) != (kind, name, asked):
            there = shown(recorded.kind, recorded.name, recorded.asked)
            raise Diverged(self._process_id, key, there, shown(kind, name, asked))

    def _check_none(self, key: str, kind: StepKind, name: str, asked: str) -> None:
        """Refuse a call where none was made, though later ones were: before it does anything outside."""
        if kind in FORKS:
            return  # leaves no record of its own
        branch, _, number = key.rpartition(".")
        if key in self._widths:
            raise Diverged(self._process_id, key, f"{self._widths[key]} branches or more", shown(kind, name, asked))
        if int(number) < self._last.get(branch, 0):
            raise Diverged(self._process_id, key, "no call, but others after it", shown(kind, name, asked))

    def check_over(self, what: str) -> None:
        """Refuse an end that comes before calls which were made."""
        for key, done in self._done.items():
            raise Diverged(self._process_id, key, shown(done.kind, done.name, done.asked), what)
        for key, left in self._open.items():
            begun = left.begun
            there = "a step" if begun is None else shown(begun.kind, begun.name, begun.asked)
            raise Diverged(self._process_id, key, there, what)


def shown(kind: str, name: str, asked: str) -> str:
    return f"{kind} {name}({asked})" if asked else f"{kind} {name}".rstrip()


def shape(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The arguments of a call, shortened: for people, and to compare it with another call."""
    if not args and not kwargs:
        return ""
    given: list[Any] = [*args, dict(kwargs)] if kwargs else list(args)
    try:
        body = encode(given)
    except (TypeError, ValueError, msgspec.EncodeError, RecursionError):
        # Live objects may be arguments too; only their types can be compared.
        body = encode([_stand_in(each) for each in args] + [{k: _stand_in(v) for k, v in kwargs.items()}])
    text = body.decode()[1:-1]
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 24]}… {hashlib.sha256(body).hexdigest()[:16]}"


def _stand_in(value: Any) -> Any:
    try:
        encode(value)
    except (TypeError, ValueError, msgspec.EncodeError, RecursionError):
        return f"<{type(value).__name__}>"
    return value


@types.coroutine
def limit_around_caller() -> Generator[object, str | None, str | None]:
    """The name of a time limit around the coroutine that awaits this, or None."""
    return (yield QUESTION)


def limit_around(work: Any) -> str | None:
    """The name of a time limit that a suspended coroutine is in, or one that it waits for."""
    waits: Any = work
    for _ in range(DEPTH):
        if type(waits) is types.CoroutineType and waits.cr_code.co_filename.startswith(OUR_FILES):
            return None  # the call itself: no code of the function is further in
        found = _entered(waits)
        if found is not None:
            return found
        if type(waits) is types.CoroutineType:
            waits = waits.cr_await
        elif inspect.isasyncgen(waits):
            waits = waits.ag_await
        elif inspect.isgenerator(waits):
            waits = waits.gi_yieldfrom
        else:  # one step of an async generator, or the end of the line
            waits = next(filter(inspect.isasyncgen, gc.get_referents(waits)), None)
        if waits is None:
            return None
    return None


def _entered(frame: Any) -> str | None:
    """The name of a time limit that one coroutine or generator has entered and not left."""
    held = gc.get_referents(frame)
    for each in held:
        # Only methods are asked for their name: any other object of the function may run code of its own to answer.
        if not isinstance(each, METHODS) or getattr(each, "__name__", None) not in EXITS:
            continue
        if isinstance(each, types.FunctionType):  # Python 3.14 has the function and its object side by side
            scopes = [other for other in held if getattr(type(other), each.__name__, None) is each]
        else:
            scopes = [getattr(each, "__self__", None)]
        for scope in scopes:
            found = _limit(scope)
            if found is not None:
                return found
    return None


def _limit(scope: Any) -> str | None:
    kind = type(scope)
    if kind.__module__ == "contextlib":
        return _limit_within(scope)
    if not any(each.__module__.partition(".")[0] in LIBRARIES for each in kind.__mro__):
        return None
    deadline = scope.when() if hasattr(scope, "when") else getattr(scope, "deadline", None)
    limited = isinstance(deadline, int | float) and deadline != math.inf
    limited = limited or getattr(scope, "cancel_called", False) is True  # a scope of anyio that was cancelled by hand
    return f"{kind.__module__.partition('.')[0]} {kind.__name__} around this call" if limited else None


def _limit_within(scope: Any) -> str | None:
    """The same for what `contextlib` has made of a generator, or of several context managers."""
    if hasattr(scope, "gen"):
        return _entered(scope.gen)
    for _, leave in getattr(scope, "_exit_callbacks", ()):
        found = _limit(getattr(leave, "__self__", None))
        if found is not None:
            return found
    return None
