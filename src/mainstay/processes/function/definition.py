"""The `process` decorator: an `async def` as work that survives everything.

Everything that can be wrong with a definition is said here, at decoration, and never in the middle of a process.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, overload

from mainstay.errors import InvalidDefinition, InvalidProcess
from mainstay.lifecycle.fold import RESERVED, SIGNAL
from mainstay.model.codec import clean_text
from mainstay.model.process import EventType, ProcessRecovery
from mainstay.processes.function.context import ProcessContext
from mainstay.tools.answer import output_codec
from mainstay.tools.define import Arguments, read_signature

P = ParamSpec("P")
R = TypeVar("R")

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,120}")


def is_name(name: str) -> bool:
    """Whether a durable function may have this name."""
    return _NAME.fullmatch(clean_text(name)) is not None


class Process(Generic[P, R]):
    """A durable function. You may call it too, as if it were not decorated, with a context of your own.

    `definition` is what a started process is pinned to: name and version. `code` tells people whether the code is the
    one it was begun with.
    """

    __name__: str
    recovery: ProcessRecovery = "rerunnable"
    fn: Callable[..., Coroutine[Any, Any, Any]]

    def __init__(
        self,
        fn: Callable[P, Coroutine[Any, Any, R]],
        *,
        name: str | None = None,
        version: str = "1",
        signals: Mapping[str, Any] | None = None,
        events: Iterable[EventType | str] = (),
        max_attempts: int | None = None,
    ) -> None:
        if isinstance(fn, Process) or not inspect.iscoroutinefunction(fn):
            raise InvalidDefinition(f"{fn!r} is no durable function: decorate an `async def` once")
        self.fn = fn
        functools.update_wrapper(self, fn, updated=())
        self.name = str(getattr(fn, "__name__", "")) if name is None else name
        owner = f"process {self.name!r}"
        if not is_name(self.name):
            raise InvalidDefinition(f"{owner}: use 1 to 120 letters, digits, '_', '-' or '.' as its name=")
        if not version or "@" in clean_text(version) or not version.isprintable():
            raise InvalidDefinition(f"{owner}: version={version!r} is not usable: give a short text such as '2'")
        if max_attempts is not None and (type(max_attempts) is not int or max_attempts < 1):
            raise InvalidDefinition(f"{owner}: max_attempts={max_attempts!r} is not usable: give 1 or more, or None")
        self.version, self.max_attempts = version, max_attempts
        self.definition = f"{self.name}@{version}"
        signature = read_signature(fn, owner, ProcessContext)
        if signature.context is None:
            raise InvalidDefinition(f"{owner} has no parameter for its context: annotate one as `ctx: ProcessContext`")
        if signature.needs_instance:
            raise InvalidDefinition(
                f"{owner} is a method, and no instance survives a crash: decorate a plain function, which finds what "
                "it needs in its arguments or `ctx.deps`"
            )
        self._context = signature.context.name
        self._arguments = Arguments(owner, signature.parameters)
        if signals is not None and not isinstance(signals, Mapping):
            raise InvalidDefinition(f"{owner}: signals={signals!r} is not usable: give their types by name, or None")
        self.open_signals = signals is None
        self.signals = {each: _payload(owner, each, kind) for each, kind in (signals or {}).items()}
        self.events = (*self.signals.values(), *(_event(owner, each) for each in events))
        code = getattr(inspect.unwrap(fn), "__code__", None)
        self.code = "" if code is None else hashlib.sha256(code.co_code).hexdigest()[:12]

    @property
    def input_schema(self) -> dict[str, Any]:
        return self._arguments.schema

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        made: Coroutine[Any, Any, R] = self.fn(*args, **kwargs)
        return made

    def __repr__(self) -> str:
        return f"<Process {self.definition}>"

    def bind(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Stored arguments as keyword arguments, checked and converted."""
        try:
            return self._arguments.bind(dict(args))
        except ValueError as error:
            raise InvalidProcess(f"invalid arguments for process {self.name}: {error}") from None

    def begin(self, args: Mapping[str, Any], ctx: ProcessContext[Any]) -> Coroutine[Any, Any, Any]:
        """The coroutine of one run."""
        return self.fn(**self.bind(args), **{self._context: ctx})


def _payload(owner: str, name: str, kind: Any) -> EventType:
    if not clean_text(name):
        raise InvalidDefinition(f"{owner}: a signal needs a name, not {name!r}")
    schema = None if kind in (None, Any, object) else output_codec(kind).schema
    return EventType(f"{SIGNAL}{name}", schema)


def _event(owner: str, declared: EventType | str) -> EventType:
    made = declared if isinstance(declared, EventType) else EventType(declared)
    if not clean_text(made.name) or made.name.startswith((RESERVED, SIGNAL)):
        raise InvalidDefinition(f"{owner}: {declared!r} cannot be an event: '{RESERVED}' and '{SIGNAL}' are reserved")
    return made


@overload
def process(fn: Callable[P, Coroutine[Any, Any, R]], /) -> Process[P, R]: ...
@overload
def process(
    *,
    name: str | None = None,
    version: str = "1",
    signals: Mapping[str, Any] | None = None,
    events: Iterable[EventType | str] = (),
    max_attempts: int | None = None,
) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Process[P, R]]: ...
def process(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    version: str = "1",
    signals: Mapping[str, Any] | None = None,
    events: Iterable[EventType | str] = (),
    max_attempts: int | None = None,
) -> Any:
    """Make a durable function of an `async def` that takes a `ProcessContext`.

        @process
        async def nightly(ctx: ProcessContext, day: str) -> int:
            rows = await ctx.step(fetch_rows, day)
            await ctx.sleep(3600)
            return await ctx.step(publish, rows)

    What goes through `ctx` is recorded and never done twice. `version` pins what is started to this code: keep the old
    version registered while any of its processes live (`runtime.processes.drain_status()`). `signals` says which ones
    it takes, and with what payload; without it, it takes any. `events` are those that it may emit.
    """
    made = functools.partial(
        Process, name=name, version=version, signals=signals, events=events, max_attempts=max_attempts
    )
    return made if fn is None else made(fn)
