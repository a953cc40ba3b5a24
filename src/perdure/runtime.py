"""The composition root: puts store, engine and agents together, and takes them apart again. It decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, NoReturn, TypeVar, Unpack, overload

from msgspec.structs import replace

from perdure.engine.admission import MOST_THREADS, MOST_TURNS, THREADS, TurnPlaces
from perdure.engine.deps import function_of_caller
from perdure.engine.host import SystemClock, SystemRandom
from perdure.engine.lease import LeaseTerms, Pulse, Worker
from perdure.engine.limits import SpendLimits
from perdure.engine.rate_limits import RateLimits
from perdure.engine.rate_limits import checked as checked_limits
from perdure.engine.retry import IN_MEMORY, USUAL
from perdure.engine.retry_queue import RetryQueue
from perdure.engine.runner import Activity, RuntimeMode, Stage, Supervisor
from perdure.engine.stopping import ReadyFile, StopSignals, unless
from perdure.engine.waits import ending, named, verify
from perdure.engine.watcher import PeriodicJob, ScopeWatcher, WatchedKind
from perdure.errors import (
    AlreadyAnswered,
    InvalidCommand,
    InvalidDefinition,
    InvalidInput,
    MetadataConflict,
    RuntimeClosed,
    UnknownWait,
    WrongAgent,
    quoted,
)
from perdure.model import VERSION, validate
from perdure.model.code import CPython
from perdure.model.codec import clean, clean_text, encode_checked
from perdure.model.command import CommandOptions, CommandResult, CommandSettings
from perdure.model.ids import check_session_id, mint
from perdure.model.limit import Limit
from perdure.model.llm import RateLimit
from perdure.model.message import Scalar
from perdure.model.process import ProcessRow
from perdure.model.session import Answer, Declared, Offers, WorkerUse, load_settings, same_metadata
from perdure.model.spending import Price, UsageFilter, hour_of
from perdure.observe.feed import Feed
from perdure.observe.relay import Relay
from perdure.observe.remote import LiveServer
from perdure.plugins.hooks import Plugin
from perdure.plugins.registry import engines_of, shut_down
from perdure.ports.code import Executor
from perdure.ports.host import Clock, Random
from perdure.ports.provider import Prices
from perdure.ports.services import TraceSink
from perdure.ports.store import STORE_FOLDER, OnDisk, Store, WorkerSockets
from perdure.ports.tool import LoadsParsers
from perdure.processes.command import in_foreground, owner_of, prepared
from perdure.processes.function.engine import FunctionEngine, Process, by_definition
from perdure.processes.handle import CancelPolicy, ProcessCall, ProcessHandle, ProcessPolicy, Startable
from perdure.processes.local import ExternalEngine, LocalEngine
from perdure.processes.service import ProcessService, Start
from perdure.processes.tool import ToolEngine
from perdure.processes.worker import CONCURRENCY, PLACE, ProcessEvents, ProcessWatch, ProcessWorker
from perdure.sessions.cache import CACHE_BYTES, Archive, SessionCache
from perdure.sessions.definition import Defined, Definition, Models, by_name, check_limited, keep_open, with_retries
from perdure.sessions.definition import checked as checked_models
from perdure.sessions.directory import FORGET_SECONDS, Retention, Sessions, forget, searchable, take_in
from perdure.sessions.environment import Environments
from perdure.sessions.hold import HeldCommands
from perdure.sessions.inbox import Inbox, TurnRequests, find_agent
from perdure.sessions.input_filters import InputFilters, checked_filters, checked_secret
from perdure.sessions.operations import RuntimeOperations, task_engine
from perdure.sessions.outcomes import TurnOutcomes
from perdure.sessions.parts import SessionParts
from perdure.sessions.processes import SessionProcesses, TaskTable
from perdure.sessions.result import Answering
from perdure.sessions.services.host import SessionHost
from perdure.sessions.session import Session
from perdure.sessions.setup import checked_options
from perdure.sessions.subagents import TurnEngine
from perdure.sessions.turns import SessionTask, TurnPorts, Turns
from perdure.sessions.usage import UsageGroup, moment, total
from perdure.sessions.wakes.delivery import ProcessFeed, Wakes
from perdure.sessions.wakes.late_results import LateResults
from perdure.sessions.watch import SWEEP_SECONDS, TurnWatch, could_work, see_to_needs, sweep
from perdure.stores import open_store
from perdure.stores.os_process import exhaustion_is_typed
from perdure.tools.catalog import Catalog
from perdure.tools.dispatcher import CallPorts, Dispatcher
from perdure.tools.waiting import PARK_AFTER

if TYPE_CHECKING:
    from perdure.mcp.server import McpServer
    from perdure.mcp.servers import McpServers

R = TypeVar("R")

if TYPE_CHECKING:  # importing Perdure must not import all of it
    from perdure.commands.engine import CommandEngine

log = logging.getLogger("perdure.runtime")

DEFAULT_STORE = f"{STORE_FOLDER}/runtime.db"
GRACE = 5.0
MOST_NAMED = 20
"""Calls without a caller that its row names."""
MODEL_CALLS = 64
"""Calls in flight of one model for which the host sets no limit."""
STOP_GRACE = 30.0
"""Seconds that running work has after a stop signal: what container platforms give a process by default."""
WAIT_FOR = 60.0
"""Seconds for which a caller waits for a parked turn that goes on by itself."""


class Runtime:
    """Holds a store, agents and an engine; use it with `async with`.

    Entering returns at once; interrupted work of this store is taken up beside the host. Leaving lets running effects
    finish for `grace` seconds, then cancels and records them; open turns and processes go on at the next entry. Without
    agents and processes nothing but commands is run; with `recover=False`, only what is said, started, answered or
    resumed here.

    `limits` bound what may be spent, in all processes of this store together. `prices` says what models cost, by their
    names: `Price(…)` each, or "genai-prices" for the table of that package.

    `search=True` has the store keep an index of what is said in its sessions, False drops it; None leaves it as it is.

    `mcp` are servers whose tools its agents are offered. Give an empty list to attach some later (`runtime.mcp`).
    """

    def __init__(  # noqa: PLR0913  # what a user may say about a Runtime, each by name
        self,
        store: str | os.PathLike[str] | Store = DEFAULT_STORE,
        *,
        agents: Iterable[Defined] = (),
        processes: Iterable[Process[..., Any]] = (),
        deps: Any = None,
        concurrency: int = CONCURRENCY,
        threads: int = MOST_THREADS,
        turns: int = MOST_TURNS,
        model_calls: int = MODEL_CALLS,
        cache_bytes: int = CACHE_BYTES,
        cancel_policy: CancelPolicy | None = None,
        process_policy: ProcessPolicy | None = None,
        input_filters: Mapping[str, Plugin | Iterable[Plugin]] | None = None,
        input_secret: bytes | str | None = None,
        recover: bool = True,
        grace: float | None = GRACE,
        park_after: float | None = PARK_AFTER,
        wait_for: float | None = WAIT_FOR,
        lease: LeaseTerms | None = None,
        models: Mapping[str, Any] | None = None,
        rate_limits: Mapping[str, RateLimit] | None = None,
        limits: Iterable[Limit] = (),
        prices: Mapping[str, Price] | Prices | Callable[[str], Price | None] | str | None = None,
        retention: Retention | None = None,
        commands: CommandSettings | None = None,
        mcp: Iterable[McpServer] | None = None,
        search: bool | None = None,
        trace: TraceSink | None = None,
        clock: Clock | None = None,
        random: Random | None = None,
        **foreign: Never,
    ) -> None:
        if foreign:
            validate.unknown_keywords("Runtime", foreign, validate.RUNTIME_KEYWORDS)
        able = functools.partial(validate.having, refuse=InvalidDefinition)
        self._clock: Clock = SystemClock() if clock is None else able(clock, "clock", "now", "monotonic", "sleep")
        self._random: Random = SystemRandom() if random is None else able(random, "random", "bits")
        self._trace = None if trace is None else able(trace, "trace", "write")
        self._cancel_policy = None if cancel_policy is None else able(cancel_policy, "cancel_policy", "cancel")
        self._process_policy = (
            None if process_policy is None else able(process_policy, "process_policy", "sees", "check")
        )
        self._make_deps = function_of_caller(deps, "deps")
        self._deps = deps if self._make_deps is None else None
        self._recover = validate.flag(recover, "recover", InvalidDefinition)
        self._grace = validate.seconds(grace, "grace", InvalidDefinition)
        self._park_after = validate.seconds(park_after, "park_after", InvalidDefinition)
        self._wait_for = validate.seconds(wait_for, "wait_for", InvalidDefinition)
        self._concurrency = validate.count(concurrency, "concurrency", 1, InvalidDefinition)
        self._threads = validate.count(threads, "threads", 1, InvalidDefinition)
        self._most_turns = validate.count(turns, "turns", 1, InvalidDefinition)
        self._model_calls = validate.count(model_calls, "model_calls", 1, InvalidDefinition)
        self._cache_bytes = validate.count(cache_bytes, "cache_bytes", 0, InvalidDefinition)
        self._models = {} if models is None else checked_models(models)
        self._rate_limits = {} if rate_limits is None else checked_limits(rate_limits)
        self._limits = _checked_limits(validate.several(limits, "limits", InvalidDefinition))
        if prices is None and any(each.kind == "money" for each in self._limits):
            prices = _bundled_prices()
        self._prices = None if prices is None else _price_table(prices)
        self._terms = LeaseTerms() if lease is None else lease
        if not isinstance(self._terms, LeaseTerms):
            raise InvalidDefinition(f"lease={quoted(lease)} is not usable: give LeaseTerms")
        self._retention = retention
        if not isinstance(retention, Retention | None):
            raise InvalidDefinition(f"retention={quoted(retention)} is not usable: give Retention(days=…)")
        self._commands = CommandSettings() if commands is None else commands
        if not isinstance(self._commands, CommandSettings):
            raise InvalidDefinition(f"commands={quoted(commands)} is not usable: give CommandSettings(…)")
        self._search = None if search is None else validate.flag(search, "search", InvalidDefinition)
        given = tuple(validate.several(agents, "agents", InvalidDefinition))
        self._agents = by_name(given)
        self._given = tuple([agent.name for agent in given])
        if self._rate_limits:
            at_hand = [each.spec.model for each in self._agents.values()]
            check_limited(self._rate_limits, [*at_hand, *(each.name for each in self._models.values())])
        self._mcp_given = None if mcp is None else checked_servers(mcp, self._agents)
        self._input_filters = {} if input_filters is None else checked_filters(input_filters, self._agents)
        self._input_secret = checked_secret(input_secret)
        self._functions = by_definition(validate.several(processes, "processes", InvalidDefinition)).values()
        self._store = open_store(store, self._clock)
        self._parts: SessionParts | None = None
        self._mcp: McpServers | None = None

    # ------------------------------------------------------------------ life

    async def __aenter__(self) -> Runtime:
        if self._parts is not None:
            raise RuntimeClosed("this Runtime is entered already: make another one")
        with exhaustion_is_typed():
            await self._enter()
        return self

    async def _enter(self) -> None:
        async with contextlib.AsyncExitStack() as opened:
            opened.push_async_callback(self._store.close)
            await self._store.open()
            if (held := self._store.held()) is not None:
                log.warning("%s", held)
            if self._search is not None:
                await searchable(self._store).keep_index(self._search)
            await self._start(opened)
            self._opened = opened.pop_all()

    if not TYPE_CHECKING:  # a checker refuses `with` by itself

        def __enter__(self) -> NoReturn:
            validate.not_a_context_manager("Runtime")

        def __exit__(self, *how: object) -> None:
            """Never reached: `with` asks for it before it enters."""

    def _definitions(self) -> dict[str, Definition]:
        """Return the definitions of the agents. Agents that declare no retries get those of their kind of store."""
        usual = USUAL if isinstance(self._store, OnDisk) else IN_MEMORY
        return {name: with_retries(agent.definition(), usual) for name, agent in self._agents.items()}

    async def _start(self, opened: contextlib.AsyncExitStack) -> None:
        """Put everything together; `opened` takes it apart again, in reverse and whatever part of that fails."""
        from perdure.commands.monitor import command_engines  # noqa: PLC0415  # importing Perdure must not import all of it

        name = mint("w", self._clock.now(), self._random.bits(40))
        definitions = self._definitions()
        self._command_engine, self._monitor_engine = command_engines(self._store, self._commands)
        if any(each.runs_code and each.executor is None for each in definitions.values()):
            definitions = await with_executors(definitions, self._store, self._command_engine)
        providers = [each for definition in definitions.values() for each in definition.catalog.providers]
        for loading in [each for each in providers if isinstance(each, LoadsParsers)]:
            await asyncio.to_thread(loading.load_parsers)
        # Entered first and so left last: turns that are cut off still close their streams.
        connections = await opened.enter_async_context(contextlib.AsyncExitStack())
        for agent, definition in definitions.items():
            made = isinstance(getattr(self._agents[agent], "model", None), str)
            await keep_open(definition.provider, connections, made)
        agents, functions, socket = tuple(definitions), tuple([each.definition for each in self._functions]), None
        if (agents or functions) and isinstance(self._store, WorkerSockets):
            socket = self._store.new_socket(name)
            if socket is not None:
                opened.callback(self._store.remove_socket, socket)
        filtered = tuple([name for name, each in definitions.items() if each.plugins.has("transform_input")])
        offers = Offers(
            version=VERSION,
            retention=self._retention is not None,
            socket="" if socket is None else socket.name,
            input_filters=filtered,
        )
        if self._recover:
            declared = {each.definition: each.declared for each in self._functions if each.declared != Declared()}
            offers = replace(offers, agents=agents, functions=functions, declared=declared)
        worker = Worker(self._store, name, self._terms, self._clock, offers, self._in_use)
        opened.push_async_callback(worker.stop)
        await worker.start()
        parts = self._put_together(worker, definitions, Models(self._models, connections))
        plugins = [each.plugins for each in definitions.values()]
        opened.push_async_callback(shut_down, [*plugins, *self._input_filters.values()])
        opened.callback(self._live_server.close)
        if socket is not None:
            await self._live_server.listen(socket.path)
        self._executors = list({id(each.executor): each.executor for each in definitions.values()}.values())
        opened.callback(self._close, parts)
        opened.callback(parts.relay.close)
        opened.callback(self._dispatcher.threads.close)
        opened.push_async_callback(self._command_engine.close)
        opened.push_async_callback(self._close_code)
        if self._mcp is not None:
            opened.push_async_callback(self._mcp.close)
            self._mcp.open()
        self._pulse = Pulse(worker, asyncio.get_running_loop(), self._busy_with)
        self._pulse.start()
        opened.callback(self._pulse.stop)
        opened.push_async_callback(self._supervisor.stop)
        opened.push_async_callback(self._cut_off, parts)
        opened.push_async_callback(self._background.stop)  # first: what it was just claiming is cut off with the rest
        self._watching = self._background.spawn(self._watcher.watch(), "perdure watch")
        if self._search:
            _ = self._background.spawn(take_in(searchable(self._store), self._clock), "perdure index")
        self._parts = parts

    def _put_together(  # noqa: PLR0915  # everything is made here, once
        self, worker: Worker, definitions: dict[str, Definition], models: Models
    ) -> SessionParts:
        """Make every part, in the order in which they need each other.

        Turns are built before services, wakes and processes, and call them: through functions that find these when
        they are called.
        """
        store, clock, random = self._store, self._clock, self._random
        if self._mcp_given is not None:
            self._mcp = self._servers(self._mcp_given, definitions, lambda: processes)
            definitions = offering(definitions, self._mcp)
        mode, activity = RuntimeMode(), Activity()
        supervisor, background = Supervisor(), Supervisor()
        limits = RateLimits(self._rate_limits, self._models, clock, background.spawn, self._model_calls)
        spend_limits = None
        if self._limits:
            spend_limits = SpendLimits(self._limits, self._prices, clock, background.spawn)
        feed = Feed(worker.id, clock.monotonic)
        calls = CallPorts(
            services=lambda run: SessionHost(parts, run.scope.session_id, run.agent.name, run),
            handles=lambda run, call_id, parking: environments.for_call(run, call_id, parking),
        )
        dispatcher = Dispatcher(
            store, worker, clock, random, self._deps, calls, self._make_deps,
            self._park_after if self._recover else None,  # else no Runtime might end its waits in time
            self._threads,
        )  # fmt: skip
        archive = Archive(store, definitions)
        cache: SessionCache[SessionTask] = SessionCache(archive, self._cache_bytes)
        places = TurnPlaces(self._most_turns, lambda session_id: turns.claim_waiting(session_id))
        outcomes = TurnOutcomes(
            store, worker, definitions, cache, archive, dispatcher.deadlocks, activity, places, self._wait_for
        )
        blocked = set[str]()  # sessions with wakes that wait for a commit
        ports = TurnPorts(
            services=calls.services,
            between=lambda row: wakes.between(row),
            blocked=blocked,
            # A parked turn that goes on has freed the process that waited with it, whichever worker had parked that.
            resumed=lambda: work.find_unowned(),
            woken=lambda rows: work.reconcile_all(rows),
            arm=lambda row, specs: SessionProcesses(processes, store, row.id, row.agent).arm(specs),
            commands=HeldCommands(
                lambda row, query: processes.output_of(row, query),
                lambda process_id, why: processes.cancel(process_id, why, by="hold"),
            ),
        )
        retries = RetryQueue(clock, background.spawn, lambda wait_id: requests.expire(wait_id))
        turns = Turns(
            worker, mode, activity, feed, supervisor, dispatcher, definitions, models, limits, cache, archive, outcomes,
            ports, self._trace, spend_limits, retries, self._prices, places,
        )  # fmt: skip
        passive = not self._agents and not self._functions
        events = ProcessEvents(
            needed=activity.changed.set,
            changed=lambda row: changed(row),
            woken=lambda session_id: wakes.call(session_id),
            start_child=lambda *asked: processes.start_child(*asked),
            filter_start=lambda registration: agents.filter_start(registration),
            filter_message=lambda row, text: agents.filter_message(row, text),
        )
        work = ProcessWorker(dispatcher, supervisor, mode, events, passive, self._concurrency)
        processes = ProcessService(work, self._cancel_policy, self._process_policy)
        commands, monitors = self._command_engine, self._monitor_engine
        local = LocalEngine(store, worker.id, lambda: worker.alive)
        tasks = TaskTable(local, processes, supervisor)
        filters = InputFilters(definitions, self._input_filters, self._input_secret, store, worker)
        requests = TurnRequests(store, clock, worker, archive, feed, turns, work.session_deleted)
        parts = SessionParts(
            mode=mode,
            activity=activity,
            store=store,
            clock=clock,
            random=random,
            worker=worker,
            definitions=definitions,
            models=models,
            limits=limits,
            prices=self._prices,
            spend_limits=spend_limits,
            feed=feed,
            relay=Relay(feed, store, store if isinstance(store, WorkerSockets) else None, outcomes, background.spawn),
            deadlocks=dispatcher.deadlocks,
            cache=cache,
            archive=archive,
            outcomes=outcomes,
            turns=turns,
            requests=requests,
            inbox=Inbox(store, clock, random, turns, filters),
            processes=processes,
            tasks=tasks,
            deps=self._deps,
            make_deps=self._make_deps,
            traces=self._trace,
        )
        allowed_text = LateResults(parts).allowed_text
        wakes = Wakes(store, clock, random, mode, supervisor, turns, definitions, allowed_text, blocked)
        process_feed = ProcessFeed(feed, store, supervisor)
        environments = Environments(parts, dispatcher, processes)
        agents = TurnEngine(parts, work)
        work.serve(
            [
                FunctionEngine(self._functions, work),
                agents,
                task_engine(parts),
                *engines_of(each.plugins for each in definitions.values()),
                ToolEngine(environments, dispatcher),
                ExternalEngine(),
                commands,
                monitors,
                local,
            ]
        )

        def changed(row: ProcessRow) -> None:
            activity.changed.set()
            if row.id in turns.parked.waiting:
                turns.process_changed(row)
            wakes.process_changed(row)
            process_feed.process_changed(row)
            tasks.process_changed(row)

        def may_forget() -> bool:
            return store.held() is None and not mode.draining

        kinds: list[WatchedKind[Any]] = [TurnWatch(parts, passive), ProcessWatch(work)]
        followers = [
            parts.relay.poll, process_feed.poll, tasks.poll, *([wakes.poll] if self._recover and not passive else [])
        ]  # fmt: skip
        jobs = [PeriodicJob("perdure sweep", SWEEP_SECONDS, functools.partial(sweep, store, commands.sweep))]
        if self._retention is not None:
            forgets = functools.partial(forget, parts, worker, self._retention)
            jobs.append(PeriodicJob("perdure retention", FORGET_SECONDS, forgets, may_forget, at_once=True))
        self._watcher = ScopeWatcher(worker, store, clock, activity, kinds, followers, jobs, self._recover)
        self._supervisor, self._background, self._dispatcher = supervisor, background, dispatcher
        self._worker, self._turns, self._work, self._wakes = worker, turns, work, wakes
        self._process_feed = process_feed
        self._live_server = LiveServer(feed, store.identity(), outcomes.works_on, activity.written)
        return parts

    def _servers(
        self, given: Sequence[McpServer], agents: Iterable[str], processes: Callable[[], ProcessService]
    ) -> McpServers:
        from perdure.commands.bound import PipedCommands  # noqa: PLC0415  # most programs have no MCP servers
        from perdure.mcp.servers import McpServers  # noqa: PLC0415  # it imports the SDK

        return McpServers(given, agents, PipedCommands(self._command_engine), self._clock, self._random, processes)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop(0 if kind is not None else self._grace)

    async def _stop(self, grace: float | None) -> None:
        parts, self._parts = self._parts, None
        if parts is None:
            return
        if parts.mode.leaving:
            grace = 0  # a stop signal has cut it off: its grace is over
        parts.mode.advance(Stage.LEAVING)
        parts.activity.polled.set()
        async with self._opened:
            self._work.leave_resting()
            if grace is None or grace > 0:
                await self._supervisor.finish(grace)

    async def _cut_off(self, parts: SessionParts) -> None:
        for task in parts.cache.tasks.values():
            if task.run is not None:
                task.run.control.leave()
        self._work.leave()
        await self._supervisor.finish(2.0)

    async def _close_code(self) -> None:
        """End what runs cells; variables in memory go with it, and are made again from the records."""
        await self._turns.cells.variables.close()
        for executor in self._executors:
            if executor is not None:
                await executor.aclose()

    def _close(self, parts: SessionParts) -> None:
        """The Runtime is closed: fail every waiter with RuntimeClosed."""
        parts.mode.advance(Stage.CLOSED)
        parts.outcomes.waiters.close(lambda _: RuntimeClosed("the Runtime was left while the turn is open"))
        self._work.close()
        parts.feed.close()

    async def drain(self, timeout: float | None = None) -> bool:
        """For servers about to stop: claim nothing new, and wait until what runs has ended or parked.

        What running work waits for, a subagent or a process, is part of it and goes on too.
        """
        parts = self._open()
        validate.seconds(timeout)
        if not parts.mode.draining:
            parts.mode.advance(Stage.DRAINING)
            self._work.drain()
            _ = self._background.spawn(see_to_needs(parts, self._work), "perdure drain")
        return await self._supervisor.finish(timeout)

    async def run_until_stopped(
        self, grace: float | None = STOP_GRACE, *, ready_file: str | os.PathLike[str] | None = None
    ) -> None:
        """Work until SIGTERM or SIGINT, then drain, and return. For the main thread, inside `async with`.

        After the signal nothing new is claimed, and running turns and processes end or park. What still runs `grace`
        seconds later is cancelled and recorded; a second signal does that at once. Afterwards leave the Runtime.

        `ready_file` is made while this Runtime accepts work and touched at each renewal of its lease, for probes.
        Raises SignalsUnavailable in another thread. No other part of Perdure installs signal handlers.
        """
        parts = self._open()
        validate.seconds(grace, "grace")
        with StopSignals() as stop:
            with contextlib.ExitStack() as kept:
                if ready_file is not None:
                    accepts = lambda: not parts.mode.draining and self._store.held() is None  # noqa: E731
                    kept.enter_context(ReadyFile(ready_file, self._worker, accepts).kept())
                await stop.first.wait()
            log.info("stopping: running work has %s s", grace)
            if not await unless(stop.second, self.drain(grace)):
                log.warning("what still runs is cut off, and goes on when the store is opened again")
                parts.mode.advance(Stage.LEAVING)
                parts.activity.polled.set()
                self._work.leave_resting()
                await self._background.stop()
                await self._cut_off(parts)

    async def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until this store holds nothing that this Runtime could work on now; False when time ran out.

        A turn that is parked does not count, nor does a command, such as a server, whose end nothing here waits for and
        no session is woken by.
        """
        parts = self._open()
        validate.seconds(timeout)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    await self._supervisor.finish_but(lambda: self._work.unawaited().values())
                    parts.activity.polled.clear()
                    if not await could_work(parts, self._work, self._wakes, self._recover):
                        return True
                    await parts.activity.polled.wait()  # work of others changes hands when the store is polled
        except TimeoutError:
            return False

    def _in_use(self) -> WorkerUse | None:
        """Return what this Runtime does now, for its row in the store. Called from the thread that renews, too."""
        parts = self._parts
        if parts is None:
            return None
        places, admission = self._dispatcher.thread_places, self._dispatcher.admission
        return WorkerUse(
            turns=parts.turns.places.used,
            most_turns=self._most_turns,
            processes=admission.in_use(PLACE),
            most_processes=self._concurrency,
            threads=admission.in_use(THREADS),
            most_threads=self._threads,
            left=tuple([each.name for each in tuple(places.calls) if each.given_up])[:MOST_NAMED],
        )

    def _busy_with(self) -> str:
        running = ", ".join(f"tool {tool} ({call})" for call, tool in list(self._dispatcher.running.items())[:3])
        return running or "code outside of tools"

    # ------------------------------------------------------------------ copies

    async def backup(self, to: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None) -> None:
        """Copy the store, with its blobs, to a new file while everything goes on; whole or not at all.

        The copy reads and accepts, and works on nothing until it is restored (`Runtime.restore`, `perdure restore`).
        `progress` is called with the bytes done so far and all there are.
        """
        self._open()
        if progress is not None and not callable(progress):
            raise InvalidInput(f"progress={quoted(progress)} is not usable: give a function of two numbers")
        copy = _on_disk(open_store(to), "a copy").location
        await _on_disk(self._store, "copied").backup(copy, functools.partial(_report, progress))

    @staticmethod
    async def restore(store: str | os.PathLike[str]) -> str:
        """Let a copy go on as a store of its own: it gets a new id, which this returns.

        Calls that were started before the copy was made keep their idempotency keys; what starts from now on has new
        ones. Make sure that the original is not at work on the same sessions.
        """
        return await _on_disk(open_store(store), "restored").restore()

    @staticmethod
    async def compact(
        store: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None
    ) -> tuple[int, int]:
        """Write a store anew that no Runtime has open: without free pages, and so that it gives them back from then on.

        Returns its bytes before and after. Stores made by this version need it only to become small at once.
        """
        return await _on_disk(open_store(store), "compacted").compact(functools.partial(_report, progress))

    # ------------------------------------------------------------------ use

    def _open(self) -> SessionParts:
        if self._parts is None:
            raise RuntimeClosed
        self._parts.mode.check()
        return self._parts

    @overload
    async def session(
        self,
        session_id: str | None = None,
        *,
        agent: Answering[R],
        options: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Scalar] | None = None,
    ) -> Session[R]: ...
    @overload
    async def session(
        self,
        session_id: str | None = None,
        *,
        agent: str | None = None,
        options: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Scalar] | None = None,
    ) -> Session[Any]: ...
    async def session(
        self,
        session_id: str | None = None,
        *,
        agent: str | Answering[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Scalar] | None = None,
    ) -> Session[Any]:
        """Open a session, or begin one: nothing is written until something is said. None mints an id.

        `agent` is a name or an Agent: given the Agent, results are of its output type. It may be one that only another
        worker on this store has: that worker runs its turns.

        `options` are for its plugins, by plugin id; they are kept with the session and hold until others are given.

        `metadata` says whom a new session is for: small flat JSON, stored with the first input. One that exists must
        have the same, or MetadataConflict is raised; `session.update` changes it.
        """
        parts = self._open()
        wanted = None if metadata is None else validate.metadata(metadata)
        answers = None
        if agent is not None and not isinstance(agent, str):
            answers = validate.having(agent, "agent", "read_output")
            agent = answers.name
        session_id = None if session_id is None else check_session_id(session_id)
        row = None if session_id is None else await self._store.session(session_id)
        if row is not None and agent is not None and agent != row.agent:
            raise WrongAgent(row.id, agent, row.agent)
        name = await find_agent(parts.definitions, agent, parts.worker, self._store) if row is None else row.agent
        session_id = session_id or parts.mint("s")
        if row is not None and wanted is not None and not same_metadata(wanted, row.metadata):
            raise MetadataConflict(row.id, wanted, row.metadata)
        if options is not None:
            settings = load_settings(b"" if row is None else row.settings)
            if row is None and wanted is not None:
                settings = replace(settings, metadata=wanted)
            options = checked_options(parts.definitions.get(name), session_id, options, settings)
        return Session(parts, session_id, name, options, answers, wanted if row is None else None)

    async def resolve(self, key: str, value: Any = None, *, error: str | None = None) -> None:
        """Complete a deferred tool call by its signed key: with a value, or as failed with `error`."""
        parts = self._open()
        wait = verify(await self._store.secret(), key)
        plain = clean(value)
        if error is not None and (row := await self._store.session(named(wait)[0])) is not None:
            error = await parts.inbox.filters.text(row.id, row.agent, clean_text(error))
        answer = Answer("value", plain) if error is None else Answer("error", plain, clean_text(error))
        encode_checked(answer, "the completion")
        resolved = await parts.requests.resolve(wait, answer)
        if resolved.status == "unknown":
            raise UnknownWait(key)
        if resolved.status == "already_resolved":
            assert resolved.wait is not None
            raise AlreadyAnswered("this completion", ending(resolved.wait))

    @overload
    async def start(self, what: ProcessCall[R], *, id: str | None = None, label: str = "") -> ProcessHandle[R]: ...
    @overload
    async def start(
        self,
        what: Startable[R],
        args: Mapping[str, Any] | None = None,
        *,
        id: str | None = None,
        label: str = "",
    ) -> ProcessHandle[R]: ...
    @overload
    async def start(
        self,
        what: Any,
        args: Mapping[str, Any] | None = None,
        *,
        id: str | None = None,
        label: str = "",
    ) -> ProcessHandle[Any]: ...
    async def start(
        self, what: Any, args: Mapping[str, Any] | None = None, *, id: str | None = None, label: str = ""
    ) -> ProcessHandle[Any]:
        """Begin a process: a durable function, a tool or an agent. On disk when this returns; it never waits for it.

        `nightly.call(day="Sunday")` is a function with arguments that a type checker sees. The handle's `result` is of
        the type that the function returns. The same `id` with the same content is the same process, started once.
        """
        return await self._open().processes.start(what, args, Start(id, label))

    @overload
    async def command(
        self, argv: Sequence[str], *, background_after: None = None, **options: Unpack[CommandOptions]
    ) -> ProcessHandle[CommandResult]: ...
    @overload
    async def command(
        self, argv: Sequence[str], *, background_after: float, **options: Unpack[CommandOptions]
    ) -> ProcessHandle[CommandResult] | CommandResult: ...
    async def command(
        self, argv: Sequence[str], *, background_after: float | None = None, **options: Unpack[CommandOptions]
    ) -> ProcessHandle[CommandResult] | CommandResult:
        """Run a program; its handle, once it runs. `options` are those of `CommandOptions`.

        The command outlives the Runtime, also a crash of it: a later one on this machine and store watches it on. The
        same `key` is the same command. With `background_after`, the result if it comes within so many seconds.
        """
        processes, what = self._open().processes, prepared(argv, options)
        owner_of(options, "detached", ("detached",))
        if options.get("wake", "none") != "none" or options.get("watch") is not None:
            raise InvalidCommand(
                "no session hears of a command of the Runtime: use session.command(…) for wake= and watch="
            )
        key = options.get("key")
        name = None if key is None else f"command.{validate.name(key, 'key', InvalidCommand)}"
        handle = await processes.start(what, None, Start(name, options.get("label", "")))
        return await in_foreground(handle, background_after)

    @overload
    def handle(self, process: Any, function: Startable[R]) -> ProcessHandle[R]: ...
    @overload
    def handle(self, process: Any, function: None = None) -> ProcessHandle[Any]: ...
    def handle(self, process: Any, function: Startable[Any] | None = None) -> ProcessHandle[Any]:
        """The handle of a process, from its JSON or its id. With the durable `function` that it runs, its result is of
        the type which that returns; otherwise it is JSON."""
        return self._open().processes.handle(process, function)

    @property
    def processes(self) -> ProcessService:
        """List processes, and everything else that a host may do with them."""
        return self._open().processes

    async def usage(
        self,
        by: str | Sequence[str] = "model",
        *,
        since: datetime.datetime | datetime.date | int | None = None,
        until: datetime.datetime | datetime.date | int | None = None,
        session: str | None = None,
        agent: str | None = None,
        metadata: Mapping[str, Scalar] | None = None,
    ) -> list[UsageGroup]:
        """What all sessions of this store have spent, in sums: `by` "model", "label", "agent", "session", "family",
        "day", "hour" (UTC) or "metadata.<key>", or several of them.

        `session` is one with everything that it has led to, its subagents too. `since` and `until` are in whole hours:
        the one in which `since` is counts. Turns count when they end; `session.usage()` tells of open ones too.
        """
        store = self._open().store
        wanted = UsageFilter(
            since=None if (first := moment(since, "since")) is None else hour_of(first),
            until=moment(until, "until"),
            session_id=None if session is None else check_session_id(session),
            agent=None if agent is None else validate.name(agent, "agent"),
        )
        return await total(store, by, wanted, None if metadata is None else dict(validate.metadata(metadata)))

    @property
    def operations(self) -> RuntimeOperations:
        """What may be asked of the agents' plugins."""
        return RuntimeOperations(self._open())

    @property
    def agents(self) -> tuple[str, ...]:
        """The names of the agents that it was given, without those that they give work to."""
        return self._given

    @property
    def sessions(self) -> Sessions:
        """List and delete sessions."""
        return Sessions(self._open())

    @property
    def mcp(self) -> McpServers:
        """The MCP servers of this Runtime: attach and detach them, see how they stand, read what they have."""
        self._open()
        if self._mcp is None:
            raise InvalidInput("this Runtime was made without MCP servers: give it mcp=[…], which may be empty")
        return self._mcp

    @property
    def store(self) -> Store:
        return self._store


def _checked_limits(given: Sequence[Any]) -> tuple[Limit, ...]:
    names = set[str]()
    for each in given:
        if not isinstance(each, Limit):
            raise InvalidDefinition(f"limits=[{quoted(each):.80}] is not usable: give Limit(…)")
        if each.name in names:
            raise InvalidDefinition(f"two limits are {each.name}: one of them would never be reached")
        names.add(each.name)
    return tuple(given)


def _bundled_prices() -> str | None:
    """The table that is installed, if one is: without any, models are refused where a limit on money holds."""
    return "genai-prices" if importlib.util.find_spec("genai_prices") is not None else None


def _price_table(prices: Any) -> Prices:
    from perdure.providers.prices import checked  # noqa: PLC0415  # importing Perdure imports no provider

    return checked(prices)


def _on_disk(store: Store, what: str) -> OnDisk:
    if not isinstance(store, OnDisk):
        raise InvalidInput(f"only a store in a file can be {what}, and this is none")
    return store


def _report(progress: Callable[[int, int], object] | None, done: int, whole: int) -> None:
    if progress is not None:
        progress(done, whole)


def checked_servers(given: Iterable[Any], agents: Iterable[str]) -> tuple[McpServer, ...]:
    """`Runtime(mcp=…)`, once its extra is known to be there."""
    from perdure.mcp import require_mcp  # noqa: PLC0415  # most programs have no MCP servers
    from perdure.mcp.server import checked  # noqa: PLC0415  # the same

    require_mcp()
    return checked(given, agents)


def offering(definitions: Mapping[str, Definition], servers: McpServers) -> dict[str, Definition]:
    """The definitions with the tools of MCP servers in their catalogues."""
    found = {}
    for name, each in definitions.items():
        assert isinstance(each.catalog, Catalog)  # it is a session that has a membership
        taken = each.catalog.names()
        found[name] = replace(each, catalog=each.catalog.extended([servers.tools_for(name, taken)]))
    return found


async def with_executors(
    definitions: Mapping[str, Definition], store: Store, commands: CommandEngine
) -> dict[str, Definition]:
    """The definitions with what runs the cells of agents that bring nothing of their own: Monty, or CPython, once for
    all that say the same about it. Raises SandboxUnavailable."""
    executors: dict[CPython | None, Executor] = {}
    found = dict(definitions)
    for name, each in definitions.items():
        if each.runs_code and each.executor is None:
            if each.code not in executors:
                executors[each.code] = await new_executor(each.code, store, commands)
            found[name] = each.executed_by(executors[each.code])
    return found


async def new_executor(chosen: CPython | None, store: Store, commands: CommandEngine) -> Executor:
    if chosen is None:
        from perdure.codemode.dumps import key_for  # noqa: PLC0415  # most programs have no agent that writes code
        from perdure.codemode.monty import MontyExecutor  # noqa: PLC0415

        location = store.location if isinstance(store, OnDisk) else None
        return MontyExecutor(key=await asyncio.to_thread(key_for, location))
    from perdure.codemode.cpython import CPythonExecutor  # noqa: PLC0415
    from perdure.commands.bound import PipedCommands  # noqa: PLC0415

    executor = CPythonExecutor(PipedCommands(commands), chosen)
    await executor.check()
    return executor
