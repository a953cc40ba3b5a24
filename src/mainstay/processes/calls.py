"""The calls of one durable function: each answered from its journal, or made, recorded and then answered.

What has happened is written before anything else acts outside: a step is preceded by a flush, and so are a child's
start and a signal. What only reads (the time, a wait) is written with the next thing that acts.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from msgspec.structs import replace

from mainstay.errors import (
    Conflict,
    Diverged,
    InvalidInput,
    InvalidProcess,
    NotFound,
    TimedOut,
    UnknownProcess,
)
from mainstay.lifecycle.decide import check_args, check_signal, declared
from mainstay.lifecycle.fold import CONTINUED, SIGNAL
from mainstay.model.codec import clean, clean_text, decode, encode_checked
from mainstay.model.process import Event, Failure, NoLongerRetained, ProcessRow, Success, WaitOn
from mainstay.model.session import CancelRequest
from mainstay.model.step import Done, Segment, StepKind
from mainstay.processes.branch import CANCEL, Branch
from mainstay.processes.branches import Branches
from mainstay.processes.caller import FIRST, answered, call
from mainstay.processes.handle import handle_id, value_of
from mainstay.processes.host import ChildOptions, Host
from mainstay.processes.joins import Joins
from mainstay.processes.journal import ProcessJournal
from mainstay.processes.replay import Replay, shape
from mainstay.processes.steps import Steps
from mainstay.tools.answer import output_codec
from mainstay.tools.check import check

if TYPE_CHECKING:
    from mainstay.processes.chance import Chance

_codec = functools.lru_cache(256)(output_codec)

MAX_SLEEP = 100 * 366 * 86_400
"""Seconds: what is longer than a hundred years is a mistake."""


class BeginAnew(BaseException):
    """The function begins again, with this state, or with other arguments if there are any."""

    def __init__(self, state: Any = None, args: Mapping[str, Any] | None = None) -> None:
        self.state, self.new_args = state, args


class Calls(Steps, Joins):
    """What the context of one process does. One per run of the process in this worker.

    `check_args` refuses arguments that the function would not take.
    """

    def __init__(
        self,
        row: ProcessRow,
        journal: ProcessJournal,
        replay: Replay,
        branches: Branches,
        host: Host,
        check_args: Callable[[Mapping[str, Any]], object],
    ) -> None:
        super().__init__(row, journal, replay, branches, host)
        self._check_args = check_args
        self._chances: dict[str, Chance] = {}

    # ------------------------------------------------------------------ waits

    @call
    async def sleep(self, branch: Branch, seconds: float) -> None:
        _check_seconds(seconds, "sleep for")
        key, asked = branch.next_key(), f"{seconds:g}"
        done = await self._answer(branch, key, "sleep", "", asked)
        if done is None:
            on = self._begun(WaitOn(key, "time"), "sleep", asked, seconds)
            await self._wait(branch, "sleep", asked, on)
            done = Done(key, "sleep", "", asked, at=self._clock.now())
            await self._order.hand_out(branch, done)
        answered(done)

    @call
    async def wait_signal(self, branch: Branch, name: str, kind: Any, timeout: float | None) -> Any:
        check_signal(name)
        _check_timeout(timeout)
        declared(self._row.registration, f"{SIGNAL}{name}")
        read = None if kind is None else _codec(kind).from_json
        key, asked = branch.next_key(), _limit(timeout)
        done = await self._answer(branch, key, "signal", name, asked)
        if done is None:
            done = await self._signalled(branch, key, name, asked, timeout)
        if done.late:
            raise TimedOut(f"no signal {name!r} came", timeout)
        value = answered(done)
        if read is None:
            return value
        try:
            return read(value)
        except ValueError as error:
            raise InvalidInput(f"signal {name!r} came with a payload that does not fit: {error}") from None

    async def _signalled(self, branch: Branch, key: str, name: str, asked: str, timeout: float | None) -> Done:
        on = self._begun(WaitOn(key, "signal", name), "signal", asked, timeout)
        await self._check_cut(branch, key, "signal", name, asked)
        signal = self._branches.waiting.take_signal(name)
        if signal is None:
            signal = await self._wait(branch, "signal", asked, on)
        if signal is None:
            done = Done(key, "signal", name, asked, late=True, at=self._clock.now())
        else:
            done = Done(key, "signal", name, asked, signal.payload, event=signal.sequence, at=self._clock.now())
            self._branches.taken.add(signal.sequence)
        if not await self._order.hand_out(branch, done):
            self._branches.taken.discard(signal.sequence)
            self._branches.waiting.give_back(name, signal)
            await self._check_cut(branch, key, "signal", name, asked)
        return done

    @call
    async def result(self, branch: Branch, process: Any, timeout: float | None) -> Any:
        process_id = handle_id(process)
        if process_id == self.process_id:
            raise InvalidInput(f"process {process_id!r} would wait for its own end")
        _check_timeout(timeout)
        key, asked = branch.next_key(), _limit(timeout)
        done = await self._answer(branch, key, "result", process_id, asked)
        if done is None:
            done = await self._resulted(branch, key, process_id, asked, timeout)
            await self._order.hand_out(branch, done)
        if done.late:
            raise TimedOut(f"process {process_id!r} did not end", timeout)
        return value_of(process_id, answered(done))

    async def _resulted(self, branch: Branch, key: str, process_id: str, asked: str, timeout: float | None) -> Done:
        on = self._begun(WaitOn(key, "process", process_id), "result", asked, timeout)
        while True:
            await self._check_cut(branch, key, "result", process_id, asked)
            self._host.listen(self.process_id, process_id)
            row = await self._journal.patiently(self._host.store.process, process_id)
            if row is None:
                return self._refused(key, "result", process_id, asked, UnknownProcess(process_id))
            if not row.live:
                return Done(key, "result", process_id, asked, await self._output(row), at=self._clock.now())
            if await self._wait(branch, "result", asked, on) is None:
                return Done(key, "result", process_id, asked, late=True, at=self._clock.now())

    async def _output(self, row: ProcessRow) -> Any:
        """How another process ended, as JSON."""
        outcome = row.record.outcome
        if row.pruned is not None:
            return msgspec.to_builtins(NoLongerRetained(row.status, row.pruned))
        if outcome is None:
            return msgspec.to_builtins(Failure(row.status, "its caller has departed: nobody will say how it ended"))
        if isinstance(outcome, Success) and outcome.blob is not None:
            outcome = Success(decode(await self._journal.patiently(self._host.store.blobs.get, outcome.blob.digest)))
        if isinstance(outcome, Failure):
            outcome = replace(outcome, traceback="")  # it is in the other's record
        return msgspec.to_builtins(outcome)

    # ------------------------------------------------------------------ events and others

    @call
    async def emit(self, branch: Branch, event: str, payload: Any) -> None:
        schema, plain = declared(self._row.registration, event).schema, clean(payload)
        problem = None if schema is None else check(schema, plain)
        if problem is not None:
            raise InvalidProcess(f"the payload of {event!r} does not fit: {problem}")
        if event.startswith(SIGNAL):
            raise InvalidProcess(f"{event!r} is a signal: it is for others to send")
        key, asked = branch.next_key(), shape((plain,), {})
        done = await self._answer(branch, key, "emit", event, asked)
        if done is None:
            await self._check_cut(branch, key, "emit", event, asked)
            now = self._clock.now()
            done = Done(key, "emit", event, asked, at=now)
            await self._order.hand_out(branch, done, Event(event, plain, now))
            await self._journal.flush()
        answered(done)

    @call
    async def start(self, branch: Branch, what: Any, args: Mapping[str, Any] | None, options: ChildOptions) -> str:
        plain = clean(check_args(args))
        name = getattr(what, "name", None) or getattr(getattr(what, "spec", None), "name", None) or str(what)
        key = branch.next_key()

        async def begin(_: object) -> str:
            return await self._host.start_child(self._row, self._place(key), what, plain, options)

        return str(await self._act(branch, key, "start", name, shape((plain,), {}), begin))

    @call
    async def tell(self, branch: Branch, process_id: str, name: str, payload: Any) -> None:
        plain = clean(payload)
        key = branch.next_key()

        async def send(_: object) -> None:
            row = await self._host.store.process(process_id)
            schema = None if row is None or not row.live else declared(row.registration, f"{SIGNAL}{name}").schema
            problem = None if schema is None else check(schema, plain)
            if problem is not None:
                raise InvalidProcess(f"the payload of signal {name!r} does not fit: {problem}")
            await self._host.tell(process_id, name, plain, f"{self.process_id}.{self._place(key)}")

        await self._act(branch, key, "tell", name, shape((process_id, plain), {}), send)

    @call
    async def stop(self, branch: Branch, process_id: str, reason: str) -> None:
        request = CancelRequest(f"process {self.process_id}", clean_text(reason))

        async def ask(_: object) -> None:
            await self._host.stop(process_id, request)

        await self._act(branch, branch.next_key(), "stop", process_id, shape((reason,), {}), ask)

    async def _act(
        self, branch: Branch, key: str, kind: StepKind, name: str, asked: str, act: Callable[[object], Awaitable[Any]]
    ) -> Any:
        """Something that another process hears of. Asked for again, it is the same thing, and done once."""
        done = await self._answer(branch, key, kind, name, asked)
        if done is None:
            await self._check_cut(branch, key, kind, name, asked)
            await self._journal.flush()
            try:
                done = Done(key, kind, name, asked, await self._journal.patiently(act, key), at=self._clock.now())
            except (InvalidInput, Conflict, NotFound) as error:
                done = self._refused(key, kind, name, asked, error)
            await self._order.hand_out(branch, done)
        return answered(done)

    # ------------------------------------------------------------------ time and chance

    def now(self) -> int:
        branch = self._branches.current()
        key = branch.next_key()
        if key == FIRST:
            self._check_first(branch, "now", "")
        try:
            done = self._replay.answer(key, "now", "", "")
        except Diverged as error:
            raise self._branches.fail(error) from error
        if done is None:
            branch.unrecorded += 1
            done = Done(key, "now", "", "", self._clock.now())
            self._order.record(done)
        else:
            self._order.look_ahead()
        value: int = done.value
        return value

    def chance(self) -> Chance:
        branch = self._branches.current()
        found = self._chances.get(branch.key)
        if found is None:
            first = self._row.record.first_started
            # A restored copy has the secret of its original, and must not draw the same for what begins in it.
            store = self._host.store.identity() if first is None else first.store
            place = f"{store and store + '#'}{self.process_id}#{self._segment.number}#{branch.key}".encode()
            seed = hmac.new(self._host.store.secret(), place, hashlib.sha256).digest()
            from mainstay.processes.chance import Chance  # noqa: PLC0415  # few processes leave anything to chance

            found = self._chances[branch.key] = Chance(int.from_bytes(seed, "big"))
        return found

    # ------------------------------------------------------------------ segments

    @call
    async def checkpoint(self, branch: Branch, state: Any, restart: bool) -> None:
        plain = clean(state)
        encode_checked(plain, "the state of a process")
        await self._end_segment(branch, "checkpoint")
        if restart:
            raise BeginAnew(state=plain)
        await self._cut(plain, None)
        branch.calls = 0
        self._chances.clear()

    @call
    async def continue_as_new(self, branch: Branch, args: Mapping[str, Any] | None) -> NoReturn:
        plain = clean(check_args(args))
        self._check_args(plain)
        encode_checked(plain, "the arguments of a process")
        await self._end_segment(branch, "continue_as_new")
        raise BeginAnew(args=plain)

    async def _end_segment(self, branch: Branch, what: str) -> None:
        """Whether nothing is left to replay, and nothing stands against it."""
        if branch is not self._branches.root or not self._branches.alone:
            raise InvalidInput(f"{what} is for the function itself, while none of its branches runs")
        key = branch.next_key()
        before = await self._answer(branch, key, "checkpoint", what, "")
        if before is not None:
            answered(before)  # refused; if it was cut off, that was raised
        self._replay.check_over(what)
        await self._check_cut(branch, key, "checkpoint", what, "")

    async def begin_anew(self, anew: BeginAnew) -> Segment:
        """The rest of `continue_as_new`, or of a checkpoint that begins again, once the function has unwound."""
        await self._cut(anew.state, None if anew.new_args is None else dict(anew.new_args))
        return self._segment

    async def _cut(self, state: Any, args: dict[str, Any] | None) -> None:
        waiting, taken = self._branches.waiting.waiting_signals(), self._branches.taken
        floor = waiting[0] - 1 if waiting else self._journal.looked
        still = tuple(sorted(each for each in taken if each > floor))
        if args is None:
            args = self._segment.args
        number, now = self._segment.number + 1, self._clock.now()
        segment = Segment(number, state, args, floor, still, CANCEL in self._branches.root.paid, now, ordered=True)
        await self._journal.cut(segment, Event(CONTINUED, {"segment": number}, now))
        self._segment = segment
        taken.intersection_update(still)


def _limit(timeout: float | None) -> str:
    return "" if timeout is None else f"{timeout:g}"


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None:
        _check_seconds(timeout, "wait without a limit, or for")


def _check_seconds(seconds: object, what: str) -> None:
    fine = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds <= MAX_SLEEP
    if not fine:
        raise InvalidInput(f"{what} 0 to {MAX_SLEEP:,} seconds, not {seconds!r}")
