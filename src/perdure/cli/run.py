"""`perdure run`, `send`, `steer`: give an agent or a session something to do; `call`: an operation of its plugins."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Struct
from rich.console import Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from perdure.agent import Agent
from perdure.cli.host import (
    JsonOption,
    Refusal,
    StoreOption,
    deciding,
    existing,
    find,
    finish,
    has_live_worker,
    is_terminal,
    is_there,
    on_signals,
    perform,
    say_when,
    store_path,
)
from perdure.cli.render import (
    MARKS,
    STYLES,
    brief,
    call_text,
    complain,
    console,
    on_one_line,
    print_json,
    print_value,
    safe,
    styled,
    table,
    text_line,
    whole_call,
)
from perdure.cli.sessions import SessionArgument, model_wait, wanted_metadata
from perdure.errors import MissingSession, TurnFailed
from perdure.model.event import (
    AnyEvent,
    Gap,
    InputDelivered,
    Retracted,
    TextDelta,
    ToolFinished,
    ToolProgress,
    ToolStarted,
    TurnCommitted,
    TurnStarted,
    WaitingFor,
)
from perdure.model.ids import check_session_id, split, turn_id
from perdure.model.message import Scalar
from perdure.model.outcome import GOES_ON, LimitReached, PendingCall, Queued, Waiting, kind_of, text_of
from perdure.model.tool import ToolOutcome
from perdure.plugins.operations import OperationDefinition, OperationOutcome
from perdure.ports.store import OnDisk, Store
from perdure.processes.function.engine import Process
from perdure.runtime import Runtime
from perdure.sessions.result import TurnResult
from perdure.sessions.session import Receipt, Session
from perdure.stores import file_path, open_store
from perdure.wire import outcome_kind, outcome_words, result_json


def load(name: str) -> object:
    """What `module:attribute` or `file.py:attribute` names, looked for in the current folder first."""
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        module_name, attribute = name, ""
    if not module_name:
        raise Refusal(f"{name!r} does not name an agent: write module:attribute, for example app:agent")
    module = _import(module_name)
    if not attribute:
        raise Refusal(f"name the agent in {module_name}: {_choices(module_name, module)}")
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise Refusal(f"module {module.__name__!r} has no {attribute!r}; {_choices(module_name, module)}")
        found = getattr(found, part)
    return found


def load_agent(name: str) -> Agent[object]:
    """The agent behind a name."""
    found = load(name)
    if not isinstance(found, Agent):
        raise Refusal(f"{name} is a {type(found).__name__}, not an Agent; {_found_in(name)}")
    return found


def load_runtime(name: str, store: str | None) -> Runtime | None:
    """The Runtime behind a name, or what the function behind it makes; None where the name is that of an agent.

    A Runtime has what an agent alone lacks: deps, limits, prices, servers of tools, models by name, and its store.
    """
    found = load(name)
    if isinstance(found, Agent):
        return None
    made = inspect.isfunction(found)
    if inspect.isfunction(found):
        try:
            inspect.signature(found).bind()
        except TypeError:
            raise Refusal(f"{name} takes arguments: name an agent, a Runtime, or a function that makes one") from None
        found = found()
        if inspect.iscoroutine(found):
            found.close()
    if not isinstance(found, Runtime):
        what = f"{'makes' if made else 'is'} a {type(found).__name__}"
        raise Refusal(f"{name} {what}, neither an Agent nor a Runtime; {_found_in(name)}")
    where = found.store.location if isinstance(found.store, OnDisk) else "memory"
    if store is not None and os.path.realpath(file_path(store)) != where:
        raise Refusal(f"{name} has a store of its own, {where}: leave out --store and PERDURE_STORE")
    return found


async def warn_of_limits(store: Store) -> None:
    """An agent alone keeps to no limit of its host's Runtime: say so where the store has accounts of some."""
    if await store.accounts():
        complain("this store has limits, which an agent alone does not keep to: name the Runtime that has them instead")


def load_functions(name: str) -> list[Process[Any, Any]]:
    """The durable functions in the module of the agent that `name` names: its tools may start them."""
    module = _import(name.rpartition(":")[0])
    return list({id(found): found for found in vars(module).values() if isinstance(found, Process)}.values())


def _import(name: str) -> ModuleType:
    folder = Path.cwd()
    if name.endswith(".py"):
        path = Path(name)
        if not path.exists():
            raise Refusal(f"there is no file {name}")
        folder, name = path.resolve().parent, path.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise Refusal(f"there is no module {name!r} in {folder} or on Python's path") from None
        raise Refusal(f"module {name!r} needs {error.name!r}, which is not installed") from None
    except Exception as error:  # a user's module ran, and may raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}, line {frame.lineno}"
        raise Refusal(f"module {name!r} cannot be imported: {type(error).__name__}: {error} ({place})") from error


def _found_in(name: str) -> str:
    module = name.rpartition(":")[0]
    return _choices(module, _import(module))


def _choices(name: str, module: ModuleType) -> str:
    agents = [key for key, value in vars(module).items() if isinstance(value, Agent)]
    if not agents:
        return "it defines no Agent"
    return "it has " + ", ".join(f"{name}:{agent}" for agent in agents)


# ---------------------------------------------------------------------- run

EXIT_CODES = {
    "finished": 0,
    "provider_failed": 1,
    "failed": 1,
    "plugin_aborted": 1,
    "invalid_input": 1,
    "waiting": 3,
    "queued": 7,
    "cancelled": 4,
    "budget_spent": 5,
    "limit_reached": 5,
    "incomplete": 6,
}


AgentArgument = Annotated[
    str, typer.Argument(metavar="AGENT", help="Where the agent is: module:attribute or file.py:attribute.")
]
OptionalAgent = Annotated[
    str | None,
    typer.Argument(
        metavar="[AGENT]",
        help="Where the agent is, or the Runtime that has it: module:attribute or file.py:attribute. "
        "Not needed with --model.",
    ),
]
PromptArgument = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="What to say; '-' or nothing reads stdin.")
]
MetadataOption = Annotated[
    list[str] | None,
    typer.Option("--metadata", metavar="KEY=VALUE", help="Whom a new session is for; may be said more than once."),
]
KeyOption = Annotated[str | None, typer.Option(help="The same key is the same turn, however often you say it.")]


class Wish(Struct, frozen=True):
    """What was asked for on the command line. `prompt` None: go on with what is open."""

    prompt: str | None
    session: str | None
    metadata: dict[str, Scalar] | None
    key: str | None
    timeout: float | None
    json: bool


def run(
    agent: OptionalAgent = None,
    prompt: PromptArgument = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Ask this model, such as anthropic:claude-sonnet-4-5.")
    ] = None,
    session: Annotated[
        str | None, typer.Option("--session", "-s", help="Go on with this session, or begin it.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--agent", help="Of a Runtime: whose a new session is. [default: (its first agent)]")
    ] = None,
    metadata: MetadataOption = None,
    store: StoreOption = None,
    key: KeyOption = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="Cancel the turn after so many seconds.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Say nothing; go on with the session's open turn.")] = False,
    json: JsonOption = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the runtime logs.")] = False,
) -> None:
    """Run one turn of an agent, durably; with --model and no agent, ask a model as it is.

    The answer goes to stdout. Ctrl-C cancels the turn, a second Ctrl-C leaves it open for later. A turn that was
    interrupted, also by a crash, goes on when its session is run again. Work that the turn began in the background is
    waited for after the answer; durable functions are those of the agent's module.

    AGENT may also name a Runtime, or a function that makes one. The turn then has what is given there: deps, limits,
    prices, servers of tools. It works in that Runtime's store, and takes up what is interrupted in there.

    Exit codes: 0 finished, 1 failed, 2 usage error, 3 waiting for a person or an outside completion, 4 cancelled,
    5 budget spent, 6 incomplete, 7 queued behind a turn that waits; 130 left open.
    """
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, format="%(levelname)s %(name)s: %(message)s")

    async def work() -> int:
        if resume and (session is None or prompt is not None):
            raise Refusal("--resume goes on with an open turn: name its --session, and say nothing new")
        where, text = (agent, prompt) if model is None or prompt is not None else (None, agent)
        if where is None and model is None:
            raise Refusal("which agent? name one (module:attribute), or a model (--model anthropic:…)")
        said = None if resume else what_is_said(text, "perdure run module:agent 'your question'")
        wish = Wish(said, session, metadata_of(metadata), key, timeout, json)
        runtime = None if where is None else load_runtime(where, store)
        if runtime is not None:
            if model is not None:
                raise Refusal("--model asks another model than an agent's own: name the agent, not its Runtime")
            return await _run(runtime, name, wish, busy=True)
        if name is not None:
            raise Refusal("--agent chooses among the agents of a Runtime, and none was named")
        loaded = Agent(model or "") if where is None else load_agent(where)
        if where is not None and model is not None:
            loaded = loaded.override(model=model)
        loaded.definition()  # a model that does not exist is refused before a store is made
        # Others' interrupted turns may need what only their own host has. They are taken up only when this session is
        # interrupted itself: then its turn must end before the new one can begin.
        busy = session is not None and await _is_open(store_path(store), session)
        functions = [] if where is None else load_functions(where)
        runtime = Runtime(store_path(store), agents=[loaded], processes=functions, recover=busy)
        return await _run(runtime, loaded.name, wish, busy, alone=True)

    perform(work, json)


def metadata_of(given: list[str] | None) -> dict[str, Scalar] | None:
    """The metadata of a session that may be new; None leaves that of one which exists."""
    return None if given is None else wanted_metadata(given, "--metadata")


def what_is_said(given: str | None, example: str) -> str:
    """The prompt, or what is piped in."""
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        raise Refusal(f"say something: {example}, or pipe it in")
    return sys.stdin.buffer.read().decode(errors="replace")


async def _run(runtime: Runtime, agent: str | None, wish: Wish, busy: bool, alone: bool = False) -> int:
    """`busy`: the Runtime takes up what is interrupted, which then ends before it is left. `alone`: it has nothing but
    the agent."""
    async with runtime:
        if alone:
            await warn_of_limits(runtime.store)
        session = await runtime.session(wish.session, agent=agent, metadata=wish.metadata)
        result = await OneTurn(session, runtime.store, wish).run()
        _report(result, wish)
        if busy:
            await finish(runtime.drain(), "finishing what else was interrupted in this store")
        else:
            await finish(runtime.wait_idle(), "waiting for work in the background")
    return EXIT_CODES[kind_of(result.outcome)]


async def _is_open(where: str, session_id: str) -> bool:
    """Whether the session has an open turn, in a store that exists."""
    check_session_id(session_id)
    if not is_there(where):
        return False
    store = open_store(where)
    await store.open()
    try:
        row = await store.session(session_id)
    finally:
        await store.close()
    return row is not None and row.turn is not None


class OneTurn:
    """The turn of this command: said, watched, and cancelled by Ctrl-C or the clock."""

    def __init__(self, session: Session[Any], store: Store, wish: Wish) -> None:
        self._session, self._store, self._wish = session, store, wish
        self._turn_id = ""
        self._cancelling: asyncio.Task[Any] | None = None

    async def run(self) -> TurnResult[Any]:
        me = asyncio.current_task()
        assert me is not None
        with on_signals({signal.SIGINT: lambda: self._interrupt(me), signal.SIGTERM: me.cancel}):
            events = self._session.observe()
            self._turn_id = await self._open()
            if is_terminal() and not self._wish.json:
                return await self._watched(events)
            return await self._ended()

    async def _open(self) -> str:
        """Say it, or find the turn that is to go on: the open one, else the last."""
        session, wish = self._session, self._wish
        if wish.prompt is not None:
            return (await session.send(wish.prompt, key=wish.key)).turn_id
        row = await find(self._store, session.id)
        number = row.turn if row.turn is not None else row.head
        if not number:
            raise Refusal(f"nothing was ever said to session {session.id!r}: there is no turn to go on with")
        await session.resume()  # a stuck turn is worked on again; to any other it means nothing
        return turn_id(session.id, number)

    async def _ended(self) -> TurnResult[Any]:
        """How the turn ends; the clock, if one was set, cancels it."""
        if self._wish.timeout is None:
            return await self._session.result_or_queued(self._turn_id)
        try:
            async with asyncio.timeout(self._wish.timeout):
                return await self._session.result_or_queued(self._turn_id)
        except TimeoutError:
            reason = f"it did not end within {self._wish.timeout:g} s"
            await self._session.cancel(reason, by="timeout", turn_id=self._turn_id)
            return await self._session.result(self._turn_id)

    async def _watched(self, events: AsyncIterator[AnyEvent]) -> TurnResult[Any]:
        with LiveTurn() as view:
            watching = asyncio.create_task(self._follow(events, view))
            drawing = asyncio.create_task(view.keep_drawing())
            try:
                result = await self._ended()
                # The last events are in the feed before the result is set; a turn that ended elsewhere has none.
                await asyncio.wait({watching}, timeout=0.1)
            finally:
                watching.cancel()
                drawing.cancel()
            view.ended(result)
        return result

    async def _follow(self, events: AsyncIterator[AnyEvent], view: LiveTurn) -> None:
        async for event in events:
            if event.turn_id in (self._turn_id, ""):
                view.show(event)
                if isinstance(event, TurnCommitted | WaitingFor):
                    return

    def _interrupt(self, me: asyncio.Task[Any]) -> None:
        """Ctrl-C: the first cancels the turn on disk, the second leaves it open for the next host."""
        if self._cancelling is not None or not self._turn_id:
            complain("left; the turn stays open and goes on when its session is run again")
            me.cancel()
            return
        complain("cancelling the turn; Ctrl-C again leaves it open …")
        self._cancelling = asyncio.create_task(
            self._session.cancel("Ctrl-C in the terminal", by="user", turn_id=self._turn_id)
        )


def _report(result: TurnResult[Any], wish: Wish) -> None:
    """The answer to stdout, everything else to stderr."""
    if wish.json:
        print_json(result_json(result))
        return
    if (text := text_of(result.outcome)) and not is_terminal():
        print_value(text)
    if not _explain(result) and wish.session is None and sys.stderr.isatty():
        complain(f"go on with --session {result.session_id}")


def _explain(result: TurnResult[Any]) -> bool:
    """Write to stderr why a turn has no answer, and how a call that it waits for is answered. True if it has none."""
    kind = kind_of(result.outcome)
    if kind == "finished":
        return False
    if isinstance(result.outcome, Waiting):
        for call in result.outcome.calls:
            complain(f"turn {result.turn_id} waits: {_how_to_answer(call)}")
        complain(f"then: perdure run … --session {result.session_id} --resume")
    elif isinstance(result.outcome, Queued):
        complain(f"turn {result.turn_id} is queued: {result.outcome.reason}")
        for call in result.outcome.calls:
            complain(f"turn {result.outcome.behind} waits: {_how_to_answer(call)}")
        if result.outcome.behind is not None:
            complain(f"then: perdure run … --session {result.session_id} --resume")
    else:
        reason = next((v for n in ("message", "reason", "which") if (v := getattr(result.outcome, n, ""))), "")
        if isinstance(result.outcome, LimitReached):
            reason = TurnFailed(result.turn_id, kind, msgspec.to_builtins(result.outcome)).why
        complain(f"turn {result.turn_id}: {kind}{': ' if reason else ''}{reason}")
    return True


def _how_to_answer(call: PendingCall) -> str:
    what = whole_call(call.tool, call.args)
    if call.kind == "approval":
        return f"{what} asks for approval: perdure approve {call.call_id} (or reject)"
    if call.kind == "recovery":
        return f"it is not known whether {what} took effect: perdure settle {call.call_id} done|failed|rerun"
    if call.kind == "input":
        return f"{what} asks for an answer: perdure answer {call.call_id} '{{…}}' (or --decline)"
    if call.kind == "model":
        return f"it goes on by itself: {model_wait(call)}"
    if call.kind in GOES_ON:
        return f"{what} goes on by itself"
    return f"{what} completes outside ({call.call_id})"


# ---------------------------------------------------------------------- send and steer


def send(
    session: SessionArgument,
    prompt: PromptArgument = None,
    key: KeyOption = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Say something to a session: a turn after what was said before, run by a worker that has its agent."""
    example = f"perdure send {session} 'your question'"
    _say(session, store, json, lambda s: s.send(what_is_said(prompt, example), key=key))


def steer(
    session: SessionArgument,
    prompt: PromptArgument = None,
    key: KeyOption = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Say something to the running turn of a session: it arrives at its next boundary. With none, it opens one."""
    example = f"perdure steer {session} 'what to mind'"
    _say(session, store, json, lambda s: s.steer(what_is_said(prompt, example), key=key))


def _say(session: str, store: str | None, json: bool, say: Callable[[Session[Any]], Awaitable[Receipt[Any]]]) -> None:
    async def work() -> int:
        async with deciding(store) as runtime:
            row = await find(runtime.store, session)
            receipt = await say(await runtime.session(session))
            live_worker = await has_live_worker(runtime, row.owner)
        if json:
            print_json({"session_id": session, "input_id": receipt.turn_id, "known": receipt.known})
        else:
            text_line(console(), f"{'known before' if receipt.known else 'accepted'}: {receipt.turn_id}", "green")
            say_when(f"agent {row.agent!r}", live_worker)
        return 0

    perform(work, json)


# ---------------------------------------------------------------------- a turn on a terminal


class LiveTurn:
    """Finished lines scroll by; the line being written and the running tools stay below them.

    `_line` is text not yet broken into a printed line, `_running` are calls with their start and progress.
    """

    def __init__(self) -> None:
        self._out = console()
        self._line = ""
        self._said = ""
        self._running: dict[str, tuple[str, float, Any]] = {}
        self._since = time.monotonic()
        self._ended = False
        # Drawn from the event loop only: a thread that redraws while lines are printed erases some of them.
        self._live = Live(console=self._out, get_renderable=self._now, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveTurn:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._break()
        self._live.stop()

    async def keep_drawing(self) -> None:
        """For ever: what runs has a clock and a spinner."""
        while True:
            self._live.refresh()
            await asyncio.sleep(1 / 12)

    # ------------------------------------------------------------------ what happens

    def show(self, event: AnyEvent) -> None:
        """Take one event in."""
        match event:
            case TextDelta(text=text):
                self._said += text
                self._write(safe(text))
            case ToolStarted():
                self._break()
                self._running[event.call_id] = (call_text(event.tool, event.args), time.monotonic(), None)
            case ToolProgress():
                label, since, _ = self._running.get(event.call_id, (brief(event.tool), time.monotonic(), None))
                self._running[event.call_id] = (label, since, event.value)
            case ToolFinished(outcome=outcome) if outcome is not None:
                label, since, _ = self._running.pop(event.call_id, (brief(event.tool), time.monotonic(), None))
                self._tool_line(label, time.monotonic() - since, outcome)
            case Retracted(reason=reason):
                if self._said:
                    self._mark("↺", f"taken back: {reason}", "yellow")
                self._said = ""
            case _:
                self._note(event)
        if not isinstance(event, ToolProgress):
            self._since = time.monotonic()

    def _note(self, event: AnyEvent) -> None:
        match event:
            case TurnStarted(resumed=True):
                self._mark("↻", "this turn was interrupted and goes on", "yellow")
            case InputDelivered(input_id=name):
                self._mark("→", f"input {name} reached the turn", "cyan")
            case Gap(reason=reason):
                self._mark("…", f"some live events are missing: {reason}", "dim")
            case _:
                pass

    def ended(self, result: TurnResult[Any]) -> None:
        """The turn is over: what was not seen live is shown now."""
        self._break()
        text = text_of(result.outcome)
        if text and text.strip() not in self._said:
            self._out.print(styled(text))

    # ------------------------------------------------------------------ how it looks

    def _write(self, text: str) -> None:
        self._line += text
        width = max(20, self._out.width - 1)
        while "\n" in self._line or len(self._line) > width:
            line, newline, rest = self._line.partition("\n")
            if len(line) > width:
                cut = line.rfind(" ", 1, width)
                cut = width if cut < 0 else cut
                line, rest = line[:cut], line[cut:].lstrip() + newline + rest
            self._out.print(styled(line))
            self._line = rest

    def _break(self) -> None:
        if self._line:
            self._out.print(styled(self._line))
        self._line = ""

    def _mark(self, sign: str, text: str, style: str) -> None:
        self._break()
        self._out.print(styled(f"{sign} {on_one_line(text)}", style))

    def _tool_line(self, label: str, seconds: float, outcome: ToolOutcome) -> None:
        kind = outcome_kind(outcome)
        shown = brief(outcome_words(outcome), max(20, self._out.width - len(label) - 16))
        line = styled(f"{MARKS[kind]} ", style=STYLES[kind]).append(label, style="bold")
        self._out.print(line.append(f"  {seconds:.1f} s  {shown}", style="dim"), overflow="ellipsis", no_wrap=True)

    def _now(self) -> RenderableType:
        """The live part: the line being written, what runs, or that something is waited for."""
        if self._ended:
            return styled("")
        if self._line:
            return styled(self._line)
        if not self._running:
            waited = time.monotonic() - self._since
            return Spinner("dots", styled(f"thinking … {waited:.0f} s" if waited > 2 else "thinking …", style="dim"))
        rows = Table.grid(padding=(0, 1))
        for label, since, value in list(self._running.values()):
            progress = "" if value is None else brief(value, 30)
            rows.add_row(
                Spinner("dots", styled(label)), styled(f"{time.monotonic() - since:.0f} s {progress}", style="dim")
            )
        return Group(rows)


# ---------------------------------------------------------------------- operations

SESSIONS = {"required": "on a session", "optional": "on a session, or without", "forbidden": "without a session"}


def operations(agent: AgentArgument, json: JsonOption = False) -> None:
    """List what may be asked of an agent's plugins: queries, commands, tasks."""

    async def work() -> int:
        found = load_agent(agent).definition().operations.definitions
        if json:
            print_json([each.to_json() for each in found])
            return 0
        out = console()
        if not found:
            text_line(out, "its plugins offer no operations")
            return 0
        rows = [[each.name, each.kind, _parameters(each), SESSIONS[each.session_param], _first(each)] for each in found]
        table(out, ["operation", "kind", "arguments", "works", "what"], rows, fold=(0, 2, 4))
        return 0

    perform(work, json)


def call(
    agent: AgentArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The operation; `perdure operations` lists them.")],
    args: Annotated[str, typer.Argument(metavar="JSON", help="Its arguments, a JSON object; '-' reads stdin.")] = "{}",
    session: Annotated[str | None, typer.Option("--session", "-s", help="The session that it works on.")] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Call an operation of an agent's plugins.

    Its output goes to stdout. Turns that it queues are run here, unless another process runs the session, and waited
    for, as is what it began in the background; Ctrl-C leaves them for later.

    Exit codes: 0 done, 1 failed, 2 usage error; of a turn that did not finish, that of `perdure run`.
    """

    async def work() -> int:
        given, runtime = _arguments(args), load_runtime(agent, store)
        if runtime is None:
            loaded = load_agent(agent)
            loaded.definition()  # a model that does not exist is refused before a store is opened
            functions = load_functions(agent)
            runtime = Runtime(_where(store, session), agents=[loaded], processes=functions, recover=False)
        async with runtime:
            try:
                outcome = await runtime.operations.call(name, given, session=session)
            except MissingSession as error:
                raise Refusal(f"operation {error.operation!r} works on a session: name it with --session") from None
            if not json:
                print_value(outcome.output)
            results = [await _ended(runtime, turn) for turn in outcome.accepted]
            if json:
                print_json(_as_json(outcome, results))
            else:
                for result in results:
                    if not _explain(result):
                        complain(f"turn {result.turn_id}: {kind_of(result.outcome)}: {brief(result.text, 200)}")
            await finish(runtime.wait_idle(), "waiting for work in the background")
        return next((code for result in results if (code := EXIT_CODES[kind_of(result.outcome)])), 0)

    perform(work, json)


def _where(store: str | None, session: str | None) -> str:
    """The store; none is made for an operation that may need none."""
    where = store_path(store)
    if session is not None or is_there(where):
        return existing(store)
    return "memory"


def _arguments(text: str) -> dict[str, Any]:
    data = sys.stdin.buffer.read() if text == "-" else text.encode(errors="surrogateescape")
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise Refusal(f'the arguments are not JSON ({error}): write for example \'{{"word": "tea"}}\'') from None
    if not isinstance(found, dict):
        raise Refusal('the arguments are a JSON object, for example \'{"word": "tea"}\'')
    return found


async def _ended(runtime: Runtime, turn: str) -> TurnResult[Any]:
    return await (await runtime.session(split(turn, 1)[0])).result(turn)


def _as_json(outcome: OperationOutcome, results: list[TurnResult[Any]]) -> dict[str, Any]:
    return outcome.to_json() | {"turns": [result_json(result) for result in results]}


def _parameters(definition: OperationDefinition) -> str:
    schema = definition.input_schema
    needed = schema.get("required", [])
    return ", ".join([name if name in needed else f"{name}?" for name in schema.get("properties", {})])


def _first(definition: OperationDefinition) -> str:
    return definition.description.partition("\n")[0]
