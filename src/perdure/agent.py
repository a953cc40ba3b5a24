"""The agent: an immutable definition, and the newcomer's one-liner."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import functools
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Never, NoReturn, TypeAlias, TypeVar, cast, overload

from perdure.engine.deps import function_of_caller
from perdure.errors import InvalidDefinition, PluginConflict, quoted
from perdure.model import ids, validate
from perdure.model.agent import WAKE_DEPTH, AgentSpec, Budget, Caller, Mode
from perdure.model.code import CPython
from perdure.model.codec import clean_text, error_text
from perdure.model.command import CommandHold
from perdure.model.llm import DEFAULT_SETTINGS, ModelSettings
from perdure.model.message import InputContent, Message, Scalar
from perdure.model.outcome import Finished
from perdure.model.retries import Retries, read_retries
from perdure.model.tool import OutputBudget, ProviderTool
from perdure.plugins.hooks import Plugin
from perdure.plugins.registry import PluginSet, engines_of, overrides
from perdure.ports.provider import Provider, is_provider
from perdure.runtime import Runtime
from perdure.sessions.definition import Defined, Definition
from perdure.sessions.operation_table import OperationTable
from perdure.sessions.result import TurnResult
from perdure.sessions.session import Session, TurnStream
from perdure.sessions.subagents import AgentTool, agent_tool
from perdure.tools.answer import output_codec
from perdure.tools.catalog import Catalog
from perdure.turn.tools import functions

T = TypeVar("T")
R = TypeVar("R")

Instruct: TypeAlias = Callable[[Caller], str | Awaitable[str]]
"""Writes the instructions of a turn."""


class Agent(Generic[T]):
    """What an agent is: model, instructions, tools, output type, budget. Holds nothing that runs.

    `model` is "provider:model", a Provider object, or "scripted" (no key, no network). `instructions` are text, or a
    function of the `Caller` that writes them for each turn. `budget` limits a turn,
    `output_budget` what the model sees of each tool's output. A session is set aside after `wake_depth` wakes in a row,
    each by work that the turn before has started. With `wait_for_commands` a turn whose model answers while commands
    run that it started is held until they end, each for so many seconds at most. With `mode="code"` the model writes
    Python, which runs in Monty, or in full CPython with `code=CPython()`.
    """

    @overload
    def __init__(
        self: Agent[str],
        model: str | Provider = "scripted",
        *,
        name: str = "assistant",
        instructions: str | Instruct = "",
        tools: Iterable[Any] = (),
        plugins: Iterable[Any] = (),
        output: None = None,
        budget: Budget | None = None,
        output_budget: OutputBudget | None = None,
        wake_depth: int | None = WAKE_DEPTH,
        settings: ModelSettings | None = None,
        mode: Mode = "tools",
        code: CPython | None = None,
        wait_for_commands: float | CommandHold | None = None,
        retries: int | Retries | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        model: str | Provider = "scripted",
        *,
        output: type[T],
        name: str = "assistant",
        instructions: str | Instruct = "",
        tools: Iterable[Any] = (),
        plugins: Iterable[Any] = (),
        budget: Budget | None = None,
        output_budget: OutputBudget | None = None,
        wake_depth: int | None = WAKE_DEPTH,
        settings: ModelSettings | None = None,
        mode: Mode = "tools",
        code: CPython | None = None,
        wait_for_commands: float | CommandHold | None = None,
        retries: int | Retries | None = None,
    ) -> None: ...

    def __init__(  # noqa: PLR0913  # what a user may say about an agent, each by name
        self,
        model: str | Provider = "scripted",
        *,
        name: str = "assistant",
        instructions: str | Instruct = "",
        tools: Iterable[Any] = (),
        plugins: Iterable[Any] = (),
        output: Any = None,
        budget: Budget | None = None,
        output_budget: OutputBudget | None = None,
        wake_depth: int | None = WAKE_DEPTH,
        settings: ModelSettings | None = None,
        mode: str = "tools",
        code: CPython | None = None,
        wait_for_commands: float | CommandHold | None = None,
        retries: int | Retries | None = None,
        **foreign: Never,
    ) -> None:
        if foreign:
            validate.unknown_keywords("Agent", foreign, validate.AGENT_KEYWORDS)
        if output_budget is not None and not isinstance(output_budget, OutputBudget):
            raise InvalidDefinition(f"output_budget={quoted(output_budget)} is not usable: give an OutputBudget")
        if budget is not None and not isinstance(budget, Budget):
            raise InvalidDefinition(f"budget={quoted(budget)} is not usable: give a Budget")
        if wake_depth is not None and not (type(wake_depth) is int and wake_depth > 0):
            raise InvalidDefinition(f"wake_depth={quoted(wake_depth)} is not usable: give 1 or more, or None")
        name = validate.name(name, "name", InvalidDefinition)
        if not name or not name.isprintable() or len(name) > 100:
            raise InvalidDefinition(f"an agent's name is 1 to 100 printable characters, not {quoted(name)}")
        if mode not in ("tools", "code"):
            raise InvalidDefinition(f"mode={quoted(mode)} is not usable: give 'tools' or 'code'")
        self._instruct = None if isinstance(instructions, str) else function_of_caller(instructions, "instructions")
        if self._instruct is None and not isinstance(instructions, str):
            raise InvalidDefinition(
                f"instructions={quoted(instructions)} is not usable: give text, or a function of the Caller"
            )
        self.name, self.model = name, model
        self.instructions = clean_text(instructions) if isinstance(instructions, str) else instructions
        self.tools, self.output = validate.several(tools, "tools", InvalidDefinition), output
        self.budget, self.output_budget = budget or Budget(), output_budget or OutputBudget()
        self.wake_depth = wake_depth
        self.wait_for_commands = (
            wait_for_commands
            if wait_for_commands is None or isinstance(wait_for_commands, CommandHold)
            else CommandHold(wait_for_commands)
        )
        self.retries = None if retries is None else read_retries(retries, "retries")
        self._plugins = PluginSet(plugins)
        self._provider_tools = tuple([each for each in self.tools if isinstance(each, ProviderTool)])
        own = [each for each in self.tools if not isinstance(each, ProviderTool)]
        self._catalog = catalog_of(own, self._plugins)
        check_provider_tools(self._provider_tools, self._catalog)
        self.mode: Mode = "code" if mode == "code" else "tools"
        check_slots(self._plugins, mode, self._catalog.runs_code)
        runs_code = mode == "code" or self._catalog.runs_code
        if runs_code:
            check_functions(self._catalog, self._plugins, code is None)
        self.code = None if code is None else check_code(code, self._plugins, runs_code)
        self._operations = OperationTable(self._plugins.plugins)
        self._codec = None if output in (None, str) else output_codec(output)
        if settings is not None and not isinstance(settings, ModelSettings):
            raise InvalidDefinition(f"settings={quoted(settings)} is not usable: give ModelSettings(…)")
        self.settings = settings or DEFAULT_SETTINGS
        check_model(model)

    @property
    def spec(self) -> AgentSpec:
        """The definition without its live parts."""
        model = self.model if isinstance(self.model, str) else self.model.name
        output = None if self.output is None else getattr(self.output, "__name__", str(self.output))
        return AgentSpec(
            self.name,
            model,
            self._text,
            tuple(self._catalog.names()),
            self._plugins.ids,
            output,
            self.budget,
            self.mode,
            self.output_budget,
        )

    def definition(self) -> Definition:
        """The agent made ready to run."""
        # Made anew for each Runtime, which closes it.
        provider = provider_for(self.model) if isinstance(self.model, str) else self.model
        codec = self._codec
        definition = Definition(
            self.name,
            provider,
            self._text,
            self._catalog,
            self.budget,
            None if codec is None else codec.schema,
            None if codec is None else lambda text: codec.to_json(codec.validate(text)),
            self.read_output,
            self.output_budget,
            self._plugins,
            self._operations,
            self.wake_depth,
            self.settings,
            self._provider_tools,
            instruct=self._instruct,
            mode=self.mode,
            wait_for_commands=self.wait_for_commands,
            code=self.code,
            retries=self.retries,
        )
        own = self._plugins.owner("code_executor")
        return definition if own is None else definition.executed_by(own.code_executor())

    @property
    def _text(self) -> str:
        """The instructions that are the same in every turn."""
        return self.instructions if isinstance(self.instructions, str) else ""

    def read_output(self, finished: Finished) -> T:
        """The output of a turn of this agent: a value of its output type, or the text when it has none. ValueError says
        why it is none."""
        if self._codec is not None:
            return cast(T, self._codec.from_json(finished.value))
        if finished.value is not None:
            raise ValueError("the answer is JSON, and this agent answers in words")
        return cast(T, finished.text)

    @property
    def subagents(self) -> tuple[Defined, ...]:
        """The agents that this one may give work to: a Runtime that has this one has them too."""
        found = [tool.agent for tool in self.tools if isinstance(tool, AgentTool)]
        for plugin in self._plugins.plugins:
            found += getattr(plugin, "agents", ())
        return tuple(found)

    def as_tool(
        self, name: str | None = None, description: str | None = None, *, background: bool = False
    ) -> AgentTool:
        """This agent as a tool of another one: it works on a task in a session of its own, and answers.

            Agent(model, tools=[researcher.as_tool(description="Finds sources.")])

        Several calls in one reply run at the same time. With `background` the call returns a handle at once, and the
        session is woken when the agent has answered.
        """
        validate.flag(background, "background", InvalidDefinition)
        return agent_tool(self, str if self.output is None else self.output, name, description, background)

    def override(self, *, model: str | Provider | None = None, settings: ModelSettings | None = None) -> Agent[T]:
        """The same agent with another model, or other settings laid over its own: for tests, and to try a model.

        agent.override(model=ScriptedModel(["Hello."]))
        """
        other = copy.copy(self)
        if model is not None:
            check_model(model)
            other.model = model
        if settings is not None:
            other.settings = settings.over(self.settings)
        return other

    async def run(
        self, said: InputContent, *, deps: Any = None, timeout: float | None = None, **foreign: Never
    ) -> TurnResult[T]:
        """One turn in memory. Cancelling it cancels the turn. Use a Runtime for what must last."""
        if foreign:
            validate.unknown_keywords("run", foreign, validate.RUN_KEYWORDS)
        async with Runtime("memory", agents=[self], deps=deps, wait_for=None) as runtime:
            session = await runtime.session(agent=self)
            return await session.run(said, timeout=timeout)

    def run_sync(
        self, said: InputContent, *, deps: Any = None, timeout: float | None = None, **foreign: Never
    ) -> TurnResult[T]:
        """The same from sync code, also where an event loop is running (a notebook): then on a thread of its own."""
        if foreign:
            validate.unknown_keywords("run_sync", foreign, validate.RUN_KEYWORDS)
        if not _in_a_loop():  # not in an `except`: tracebacks of tools and models would begin with its error
            return _bridge.runner().run(self.run(said, deps=deps, timeout=timeout))
        return _on_thread(lambda: asyncio.run(self.run(said, deps=deps, timeout=timeout)))

    def chat(self, *, deps: Any = None, metadata: Mapping[str, Scalar] | None = None) -> Chat[T]:
        """A conversation in memory: each `run` and `stream` knows what was said before. Use a Runtime for what must
        last.

            chat = agent.chat()
            await chat.run("My name is Ada.")
            await chat.run("What is my name?")
        """
        return Chat(self, deps, metadata)

    if not TYPE_CHECKING:  # to a checker it has the attributes that it has

        def __getattr__(self, word: str) -> NoReturn:
            validate.unknown_attribute(self, word, validate.AGENT_ATTRIBUTES)

    def __repr__(self) -> str:
        return f"Agent({self.spec.model!r}, name={self.name!r}, tools={list(self.spec.tools)})"


class Chat(Generic[T]):
    """A conversation with one agent, in memory (`Agent.chat`).

    Every `run` and `stream` opens a Runtime on what was said so far and closes it again, so nothing is open in between
    and there is nothing to close. One is under way at a time; others wait for it. Background work goes on while one is.
    """

    def __init__(self, agent: Agent[T], deps: Any, metadata: Mapping[str, Scalar] | None) -> None:
        self._agent, self._deps = agent, deps
        self._metadata = None if metadata is None else validate.metadata(metadata)
        from perdure.stores.memory import MemoryRows, MemoryStore  # noqa: PLC0415  # most programs choose another store

        self._store = functools.partial(MemoryStore, MemoryRows())
        self._turns = asyncio.Lock()
        _ = self._runtime()  # refuses deps that cannot be used, before anything is said

    async def run(self, said: InputContent, *, timeout: float | None = None, **foreign: Never) -> TurnResult[T]:
        """Say something and wait for the answer. Cancelling it cancels the turn, as `timeout` does."""
        if foreign:
            validate.unknown_keywords("run", foreign, validate.RUN_KEYWORDS)
        async with self._open() as session:
            return await session.run(said, timeout=timeout)

    @contextlib.asynccontextmanager
    async def stream(self, said: InputContent, **foreign: Never) -> AsyncGenerator[TurnStream[T]]:
        """Say something and watch its turn; ask for `await turn.result()` inside. Leaving early cancels the turn."""
        if foreign:
            validate.unknown_keywords("stream", foreign, validate.RUN_KEYWORDS)
        async with self._open() as session, session.stream(said) as turn:
            yield turn

    async def approve(self, call_id: str) -> TurnResult[T]:
        """Let a call run that its tool declared with `approval="ask"` (`result.pending` has it), and wait for the rest
        of its turn, and for the answers to what was said meanwhile."""
        async with self._going_on() as session:
            await session.approve(call_id)
            return await session.result(_turn_of(call_id))

    async def reject(self, call_id: str, reason: str = "") -> TurnResult[T]:
        """Refuse such a call, and wait likewise; the model is told the reason."""
        async with self._going_on() as session:
            await session.reject(call_id, reason)
            return await session.result(_turn_of(call_id))

    async def cancel(self, reason: str = "") -> None:
        """Give up the turn that waits for a person or for something outside; what was said meanwhile is answered."""
        async with self._going_on() as session:
            await session.cancel(reason)

    async def history(self) -> list[Message]:
        """What was said so far, by both."""
        async with self._open() as session:
            return list(await session.history())

    @contextlib.asynccontextmanager
    async def _going_on(self) -> AsyncGenerator[Session[T]]:
        """The session, whose turn that waits is answered or ended; left when those behind it have their answers."""
        async with self._open() as session:
            behind = await session.queue()
            yield session
            for each in behind:
                await session.result_or_queued(each.turn_id)

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncGenerator[Session[T]]:
        async with self._turns, self._runtime() as runtime:
            session = await runtime.session(CHAT, agent=self._agent, metadata=self._metadata)
            try:
                yield session
            finally:
                row = await runtime.store.session(CHAT)
                if row is not None and row.state == "open" and row.turn is not None:
                    # Left to itself it would go on with the next run, and that would wait for it.
                    await session.cancel("its caller went away")

    def _runtime(self) -> Runtime:
        return Runtime(self._store(), agents=[self._agent], deps=self._deps, wait_for=None)

    def __repr__(self) -> str:
        return f"Chat({self._agent.name!r})"


CHAT = "chat"
"""The id of a chat's only session."""


def _turn_of(call_id: str) -> str:
    return ids.turn_id(CHAT, ids.call_in(CHAT, call_id)[0])


class _Bridge(threading.local):
    """The loop that sync code of a thread runs on: the same one every time, because a model of the host's may have
    connections that belong to it. It is closed with its thread, or with the program."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None
        self._pid = 0

    def runner(self) -> asyncio.Runner:
        if self._runner is None or self._pid != os.getpid():  # a forked child must not touch the loop of its parent
            self._runner, self._pid = asyncio.Runner(), os.getpid()
            atexit.register(_close_bridge, self._runner, self._pid)
        return self._runner


_bridge = _Bridge()


def _close_bridge(runner: asyncio.Runner, pid: int) -> None:
    if pid == os.getpid():
        runner.close()


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def check_slots(plugins: PluginSet, mode: str, run_code: bool) -> None:
    """Refuse plugins and tools for what this agent does not do, rather than leave them idle."""
    if run_code and mode == "code":
        raise InvalidDefinition("run_code is a tool of mode='tools': leave it out, in mode='code' every answer is code")
    if plugins.has("protocol") and mode == "code":
        name = next(plugin.id for plugin in plugins.plugins if overrides(plugin, "protocol"))
        raise InvalidDefinition(f"plugin {name!r} has protocol, and so has mode='code': leave one of them out")
    if plugins.has("code_executor") and mode != "code" and not run_code:
        name = next(plugin.id for plugin in plugins.plugins if overrides(plugin, "code_executor"))
        raise InvalidDefinition(
            f"plugin {name!r} has code_executor: leave it out, or give the agent mode='code' or the tool run_code"
        )
    _ = engines_of([plugins])


def check_functions(catalog: Catalog, plugins: PluginSet, needs_monty: bool) -> None:
    """Refuse tools that cannot be functions of a cell, and code mode where nothing runs code."""
    from perdure.codemode import require_monty  # noqa: PLC0415  # most agents write no code
    from perdure.codemode.stubs import Functions  # noqa: PLC0415

    if needs_monty and not plugins.has("code_executor"):
        require_monty()
    fault = Functions(functions(catalog.specs)).fault
    if fault is not None:
        raise InvalidDefinition(fault)


def check_code(code: CPython, plugins: PluginSet, runs_code: bool) -> CPython:
    """What runs the cells of an agent, if that is not to be Monty."""
    from perdure.codemode.cpython import check_cpython  # noqa: PLC0415  # most agents write no code

    if not runs_code:
        raise InvalidDefinition(
            "code= says what runs the cells of an agent: leave it out, or give it mode='code' or the tool run_code"
        )
    if plugins.has("code_executor"):
        name = next(plugin.id for plugin in plugins.plugins if overrides(plugin, "code_executor"))
        raise InvalidDefinition(f"plugin {name!r} has code_executor, and code= says another: leave one of them out")
    return check_cpython(code)


def catalog_of(tools: Iterable[Any], plugins: PluginSet) -> Catalog:
    """The agent's tools, and those of plugins that are the same in every session. A name belongs to one of them."""
    catalog = Catalog(tools)
    owners = dict.fromkeys(catalog.names(), "the agent")
    shared: list[Any] = []
    for plugin in plugins.plugins:
        offered, names = _offered(plugin)
        for name in names:
            if name in owners:
                raise PluginConflict(plugin.id, owners[name], f"a tool named {name!r}")
            owners[name] = plugin.id
        if plugin in plugins.shared_tools:
            shared += offered
    catalog = catalog.extended(shared) if shared else catalog
    if not any(spec.background for spec in catalog.specs) and not _starts_agents(tools, plugins):
        return catalog
    from perdure.builtin.processes import with_process_tools  # noqa: PLC0415  # most agents need none of these

    return with_process_tools(catalog)


def check_provider_tools(tools: tuple[ProviderTool, ...], catalog: Catalog) -> None:
    """Refuse a kind that is there twice, or whose name is that of a tool of ours: models tell tools by their names."""
    for index, tool in enumerate(tools):
        if any(tool.kind == other.kind for other in tools[:index]):
            raise InvalidDefinition(f"ProviderTool({tool.kind!r}) is there twice: leave one out")
        if catalog.get(tool.kind) is not None:
            raise InvalidDefinition(
                f"a tool and a ProviderTool are named {tool.kind!r}: rename the tool with @tool(name=…)"
            )


def _starts_agents(tools: Iterable[Any], plugins: PluginSet) -> bool:
    """Whether a model gets handles of agents that work in the background."""
    called = any(isinstance(tool, AgentTool) and tool.in_background for tool in tools)
    return called or any(getattr(plugin, "starts_agents", False) for plugin in plugins.plugins)


def _offered(plugin: Plugin) -> tuple[list[Any], list[str]]:
    """The tools of a plugin, and their names."""
    try:
        tools = list(plugin.tools())
        return tools, Catalog(tools).names()
    except Exception as error:  # its own code runs here, and the error names it
        what = str(error) if isinstance(error, InvalidDefinition) else f"{type(error).__name__}: {error_text(error)}"
        raise InvalidDefinition(f"plugin {plugin.id!r}: its tools cannot be used: {what}") from error


def check_model(model: object) -> None:
    """Refuse what is no provider, and a model string that no version of ours could mean."""
    if isinstance(model, str):
        if model != "scripted":
            from perdure.providers import registry  # noqa: PLC0415  # `import perdure` loads no provider

            registry.check(model)
    elif not is_provider(model):
        raise InvalidDefinition(f"model {quoted(model)} is not one: {validate.not_a_model(model)}")


def provider_for(model: str) -> Provider:
    """The provider behind a model string, imported when it is first used."""
    from perdure.providers import registry  # noqa: PLC0415

    return registry.named(model)


def _on_thread(work: Callable[[], R]) -> R:
    """Run `work` on a thread and wait for it, whatever it raises."""
    box: list[R] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            box.append(work())
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    thread = threading.Thread(target=body, name="perdure-run-sync")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return box[0]
