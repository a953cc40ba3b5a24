"""Time limits of asyncio and its relatives around a call of a durable function.

They work by cancelling a task after a time, and on replay that has not happened: the task was parked, or the call is
answered from its record at once. So a call inside of one is refused, before it does anything.

A context manager that was entered is on the stack of the coroutine that entered it, and nowhere else. The garbage
collector can read that stack only while the coroutine is suspended; so the call yields a `QUESTION` to what drives it
(`Scheduler.drive`), which reads the stack and resumes it at once, without a pass through the event loop.
"""

from __future__ import annotations

import gc
import inspect
import math
import types
from collections.abc import Generator
from pathlib import Path
from typing import Any

LIBRARIES = frozenset({"asyncio", "anyio", "async_timeout"})
EXITS = frozenset({"__exit__", "__aexit__"})
METHODS = (types.MethodType, types.FunctionType, types.BuiltinMethodType)
OUR_FILES = str(Path(__file__).parent)
DEPTH = 100
"""Coroutines that are searched, from the outermost on."""

OWN_CANCEL = "a cancel of its own task before this call"

QUESTION = object()
"""What a call yields to what drives its branch, to be sent the name of a time limit around it."""


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
