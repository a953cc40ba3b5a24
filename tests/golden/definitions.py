"""The agents, tools, plugin and durable functions whose work is in the golden stores.

A definition here never changes: the stores hold work that was begun with it, and that must go on with it.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tests.golden.package  # noqa: F401  # first, because it decides which package the imports below find

# isort: split

from perdure import (
    Agent,
    Limit,
    Message,
    ModelRequest,
    ModelResponse,
    ModelSettings,
    Plugin,
    ProcessContext,
    Retry,
    Runtime,
    ToolCall,
    ToolContext,
    ToolProvider,
    Usage,
    process,
    tool,
)
from perdure.errors import OutcomeUnknown
from perdure.mcp import McpServer
from perdure.model.code import CPython
from perdure.model.plugin import PluginSnapshot
from perdure.plugins import InputContext, PromptContext, SessionContext, SnapshotReader, SnapshotWriter, command, query
from perdure.processes.function.engine import Process
from perdure.testing import FunctionModel

LARGE = "0123456789abcdef" * 4125
"""66,000 characters: a record that holds it is spilled to a blob."""


class World:
    """What tools and steps act on: deps of the Runtime. An action named in `held` begins and never ends."""

    def __init__(self, held: Iterable[str] = ()) -> None:
        self.held = frozenset(held)
        self.begun: list[str] = []
        self.done: list[tuple[str, str]] = []
        self.keys: dict[str, str] = {}

    async def act(self, name: str, key: str) -> str:
        self.begun.append(name)
        if name in self.held:
            await asyncio.Event().wait()
        self.done.append((name, key))
        return f"{name} done"

    async def try_out(self, key: str) -> str:
        """Fails in the maker, and not later."""
        self.begun.append("try")
        if self.held:
            raise Retry("engaged", after=60)
        self.done.append(("try", key))
        return "tried"


Context = ToolContext[World]
Function = ProcessContext[World]


# ---------------------------------------------------------------------- tools


@tool(approval="ask")
async def mail(to: str, ctx: Context) -> str:
    """Send a mail."""
    return await ctx.deps.act("mail", to)


@tool(recovery="ask")
async def order(article: str, ctx: Context) -> str:
    """Order an article."""
    return await ctx.deps.act("order", article)


@tool(deferred=True)
async def build(name: str, ctx: Context) -> None:
    """Build something elsewhere. One that is named late has an hour."""
    ctx.deps.keys[name] = ctx.defer(timeout=3600 if name == "late" else None)


@tool
async def draw(ctx: Context) -> str:
    """Draw something: an artifact, and a large value."""
    await ctx.artifacts.put(b"<svg/>", name="plan.svg", media_type="image/svg+xml")
    return LARGE


@tool
async def measure(ctx: Context) -> int:
    """Measure what was drawn."""
    return len(await ctx.artifacts.get("plan.svg"))


@tool
async def pay(ctx: Context) -> str:
    """Pay, at most once."""
    return await ctx.deps.act("pay", ctx.idempotency_key)


@tool(recovery="rerun")
async def fetch(ctx: Context) -> str:
    """Fetch, as often as need be."""
    return await ctx.deps.act("fetch", ctx.idempotency_key)


@tool(recovery="rerun", retries=2)
async def call(ctx: Context) -> str:
    """Call somebody who answers the second time, after a minute."""
    if ctx.attempt == 1:
        ctx.deps.begun.append("call")
        raise Retry("engaged", after=60)
    return await ctx.deps.act("call", ctx.idempotency_key)


@tool(background=True, recovery="rerun")
async def survey(ctx: Context) -> str:
    """Survey a site in the background."""
    return await ctx.deps.act("survey", ctx.idempotency_key)


@tool(background=True)
async def dig(ctx: Context) -> str:
    """Dig in the background, at most once."""
    return await ctx.deps.act("dig", ctx.idempotency_key)


@tool
async def look() -> str:
    """Look."""
    return "nothing to see"


# ---------------------------------------------------------------------- a plugin that remembers


class Notes(Plugin):
    """Remembers notes, by the call or the operation that made them. Options: a prefix."""

    id = "notes"

    def __init__(self, prefix: str = "") -> None:
        self.prefix, self.notes, self._revision = prefix, dict[str, str](), 0

    def for_session(self, ctx: SessionContext) -> Notes:
        return Notes((ctx.options or {}).get("prefix", ""))

    def tools(self) -> list[Any]:
        @tool(recovery="rerun")
        def remember(fact: str, ctx: ToolContext[Any]) -> str:
            """Remember a fact."""
            self._note(ctx.call_id, fact)
            return "remembered"

        return [remember]

    def _note(self, key: str, text: str) -> None:
        self.notes[key] = self.prefix + text
        self._revision += 1

    @command(name="notes.add")
    def add(self, text: str) -> int:
        self._note(f"operation {len(self.notes)}", text)
        return len(self.notes)

    @query(name="notes.all")
    def all(self) -> list[str]:
        return list(self.notes.values())

    def prompt(self, ctx: PromptContext) -> list[str]:
        return [f"Known: {', '.join(self.notes.values()) or 'nothing'}"]

    @property
    def revision(self) -> int:
        return self._revision

    def snapshot(self, writer: SnapshotWriter) -> Any:
        writer.put("count", str(len(self.notes)).encode())
        return {"notes": self.notes}

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        if snapshot.state is not None:
            self.notes = dict(snapshot.state["notes"])
            assert reader.get("count") == str(len(self.notes)).encode()
        self._revision = snapshot.revision


# ---------------------------------------------------------------------- agents


def agents(world: World) -> dict[str, Agent[str]]:
    """All of them, by name. The model calls the tools that it is told to, then tells their results."""

    async def model(request: ModelRequest) -> str | list[ToolCall]:
        last = request.messages[-1]
        if last.role == "tool":
            results = [r for m in _tail(request) for r in m.tool_results]
            return "; ".join(f"{r.name} {r.status}: {str(r.content)[:40]}" for r in results)
        if last.text == "think":
            await world.act("think", request.call_id)
        if last.text.startswith("call "):
            return [_asked(each) for each in last.text.removeprefix("call ").split(" and ")]
        if last.text == "known?":
            return request.messages[0].text
        said = [m.text for m in request.messages if m.role == "user"]
        return f"{len(said)}: {last.text[:200]}"

    model_of = FunctionModel(model)
    clerk = Agent(model_of, name="clerk", tools=[mail, order, build, draw, measure, look], plugins=[Notes()])
    worker = Agent(model_of, name="worker", tools=[pay, fetch, order, call, survey, dig], plugins=[Notes()])
    listener = Agent(model_of, name="listener", tools=[look])
    chief = Agent(model_of, name="chief", tools=[clerk.as_tool(description="A clerk.")])
    return {each.name: each for each in (clerk, worker, listener, chief)}


def _tail(request: ModelRequest) -> list[Any]:
    """The messages of tools at the end."""
    found: list[Any] = []
    for message in reversed(request.messages):
        if message.role != "tool":
            break
        found.insert(0, message)
    return found


def _asked(text: str) -> ToolCall:
    """`mail to=kim` as a call. In a value, an underscore is a space."""
    name, *given = text.split(" ")
    pairs = [each.partition("=") for each in given]
    return ToolCall(name=name, args={key: value.replace("_", " ") for key, _, value in pairs})


# ---------------------------------------------------------------------- durable functions


@process
async def sleeping(ctx: Function) -> list[str]:
    first = await ctx.step(ctx.deps.act, "before", ctx.process_id)
    await ctx.sleep(3600)
    return [first, await ctx.step(ctx.deps.act, "after", ctx.process_id)]


@process(signals={"go": str, "more": int})
async def listening(ctx: Function) -> list[Any]:
    """Hears three signals, of which it may have heard some."""
    heard = [await ctx.wait_signal("go")]
    heard.append(await ctx.wait_signal("more"))
    heard.append(await ctx.wait_signal("go"))
    return [*heard, ctx.uuid().version]


@process
async def paying(ctx: Function) -> str:
    try:
        return await ctx.step(ctx.deps.act, "pay-step", ctx.process_id)
    except OutcomeUnknown:
        return "unknown"


@process
async def fetching(ctx: Function) -> list[str]:
    first = await ctx.step(ctx.deps.act, "first-step", ctx.process_id)
    return [first, await ctx.step(ctx.deps.act, "fetch-step", ctx.process_id, recovery="rerun")]


@process
async def insisting(ctx: Function) -> str:
    """Its step fails, and is tried again when its time has come."""
    return await ctx.step(ctx.deps.try_out, ctx.process_id, retries=2)


@process
async def branching(ctx: Function) -> list[Any]:
    """One branch is done, one is interrupted, one waits for a signal and one sleeps."""

    async def quick() -> str:
        return await ctx.step(ctx.deps.act, "quick", ctx.process_id)

    async def slow() -> str:
        return await ctx.step(ctx.deps.act, "slow", ctx.process_id, recovery="rerun")

    async def patient() -> Any:
        return await ctx.wait_signal("go")

    async def sleepy() -> str:
        await ctx.sleep(1800)
        return await ctx.step(ctx.deps.act, "sleepy", ctx.process_id)

    return [*await ctx.gather(quick(), slow(), patient(), sleepy())]


@process
async def racing(ctx: Function) -> list[Any]:
    """Parked in a race of a signal with a sleep, after a gather of which both branches are done."""

    async def noted(name: str) -> str:
        return await ctx.step(ctx.deps.act, name, ctx.process_id)

    both = await ctx.gather(noted("left"), noted("right"))
    which, value = await ctx.any(ctx.wait_signal("go"), ctx.sleep(7000))
    return [*both, which, value]


@process
async def leading(ctx: Function) -> list[Any]:
    """Waits for its child, which waits for a signal."""
    child = await ctx.start(following, {"word": "child"})
    return ["parent", await child.result()]


@process
async def following(ctx: Function, word: str) -> list[Any]:
    return [word, await ctx.wait_signal("go")]


@process
async def counting(ctx: Function, rounds: int) -> list[int]:
    """Keeps its sum in checkpoints, and hears of every amount by a signal."""
    total, heard = ctx.state or [0, 0]
    while heard < rounds:
        total += await ctx.wait_signal("add", int)
        heard += 1
        await ctx.checkpoint([total, heard])
    return [total, heard]


@process
async def reporting(ctx: Function, text: str) -> str:
    return text


@process
async def tidying(ctx: Function) -> str:
    """Cleans up when it is cancelled."""
    try:
        await ctx.wait_signal("never")
    finally:
        await ctx.step(ctx.deps.act, "tidy", ctx.process_id)
    return "not reached"


FUNCTIONS: dict[str, Process[..., Any]] = {
    each.name: each
    for each in (
        sleeping,
        listening,
        paying,
        fetching,
        insisting,
        branching,
        racing,
        leading,
        following,
        counting,
        reporting,
        tidying,
    )
}


def runtime(store: Any, world: World, *, without: Iterable[str] = (), **options: Any) -> Runtime:
    """A Runtime with all definitions, less those that are named."""
    missing = set(without)
    return Runtime(
        store,
        agents=[agent for name, agent in agents(world).items() if name not in missing],
        processes=[function for name, function in FUNCTIONS.items() if name not in missing],
        deps=world,
        **options,
    )


# ---------------------------------------------------------------------- since schema 7

HOST = "golden"
"""The host that the maker and the tests say they are. Only the host on which a command began may look for it."""

WORKSPACE = "/var/tmp/golden-workspace"
"""The workspace of the maker. Its path is in the records of edits, and no test has a folder of that path."""

SECRET = b"secret of the golden stores"
"""The key under which digests of inputs are made."""


@tool(recovery="rerun")
async def weigh(item: str, ctx: Context) -> str:
    """Weigh an item."""
    return await ctx.deps.act(f"weigh-{item}", ctx.idempotency_key)


@tool
async def compile_all(ctx: Context) -> dict[str, str]:
    """Start a command that runs for long, and that ends with the turn."""
    script = "echo compiling; exec sleep 100000"
    return (await ctx.command(["sh", "-c", script], cwd="/", owner="turn")).to_json()


class Cards(Plugin):
    """Takes the numbers of cards out of inputs."""

    id = "cards"

    def transform_input(self, ctx: InputContext, message: Message) -> str:
        return re.sub(r"\d{4}-\d{4}", "[card]", message.text)


CELLS = (
    """~~~python
apple = await weigh("apple")
def report(pear):
    return f"{apple} and {pear}"
~~~""",
    """~~~python
plum = await weigh("plum")
print(plum)
pear = await weigh("pear")
finish(f"{report(pear)}, after {plum}")
~~~""",
)
"""Two cells of a turn. The second one uses a variable and a function of the first."""


def agents_since_7(world: World, files: ToolProvider) -> dict[str, Agent[str]]:
    """The agents that schema 7 brings, by name. `files` are tools for the files of a workspace."""

    async def model(request: ModelRequest) -> str | list[ToolCall]:
        last = request.messages[-1]
        if last.role == "tool":
            return "; ".join(f"{r.name} {r.status}" for m in _tail(request) for r in m.tool_results)
        if "wait here" in last.text:
            await world.act("wait here", request.call_id)
        if last.text.startswith("call "):
            return [_asked(each) for each in last.text.removeprefix("call ").split(" and ")]
        said = [m.text for m in request.messages if m.role == "user"]
        return f"{len(said)}: {last.text[:200]}"

    async def coding(request: ModelRequest) -> str:
        return CELLS[sum(message.role == "assistant" for message in request.messages)]

    async def spending(request: ModelRequest) -> ModelResponse:
        await world.act("spend", request.call_id)
        return ModelResponse("spent", usage=Usage(input=20, output=10))

    model_of = FunctionModel(model)
    made = (
        Agent(FunctionModel(coding), name="monty", tools=[weigh], mode="code"),
        Agent(FunctionModel(coding), name="cpython", tools=[weigh], mode="code", code=CPython(unsandboxed=True)),
        Agent(model_of, name="compiler", tools=[compile_all], wait_for_commands=600),
        Agent(model_of, name="watcher"),
        Agent(FunctionModel(spending), name="spender", settings=ModelSettings(max_tokens=500)),
        Agent(model_of, name="booker"),
        Agent(model_of, name="builder", tools=[build]),
        Agent(model_of, name="cashier", plugins=[Cards()]),
        Agent(model_of, name="editor", tools=[files]),
    )
    return {each.name: each for each in made}


@process
async def stepping(ctx: Function, word: str) -> str:
    """Run one step, at most once."""
    try:
        return await ctx.step(ctx.deps.act, "step", ctx.process_id)
    except OutcomeUnknown:
        return f"{word}: unknown"


@process(signals={"go": str})
async def gathering(ctx: Function) -> list[Any]:
    """Run a gather within a gather: one branch is done, one is in a step, one sleeps and one waits for a signal."""

    async def act(name: str) -> str:
        return await ctx.step(ctx.deps.act, name, ctx.process_id, recovery="rerun")

    async def pair() -> list[Any]:
        return [*await ctx.gather(act("gather-1"), act("gather-2"))]

    return [*await ctx.gather(pair(), ctx.sleep(900), ctx.wait_signal("go"))]


@process(signals={"go": str})
async def choosing(ctx: Function) -> list[Any]:
    """Run a race of a sleep, a step and a signal."""

    async def act() -> str:
        return await ctx.step(ctx.deps.act, "choose", ctx.process_id, recovery="rerun")

    which, value = await ctx.any(ctx.sleep(9000), act(), ctx.wait_signal("go"))
    return [which, value]


@process
async def dozing(ctx: Function) -> str:
    """Sleep after a step."""
    first = await ctx.step(ctx.deps.act, "before-doze", ctx.process_id)
    await ctx.sleep(2000)
    return first


@process
async def saving(ctx: Function) -> list[Any]:
    """Run a step after a checkpoint."""
    if ctx.state is None:
        await ctx.checkpoint([await ctx.step(ctx.deps.act, "before-save", ctx.process_id)])
    return [*ctx.state, await ctx.step(ctx.deps.act, "after-save", ctx.process_id, recovery="rerun")]


@process
async def awaiting(ctx: Function) -> list[Any]:
    """Wait for a child that is in a step."""
    child = await ctx.start(stepping, {"word": "child"})
    return ["parent", await child.result()]


@process
async def quitting(ctx: Function) -> str:
    """Clean up in a step when it is asked to end."""
    try:
        await ctx.sleep(9000)
    finally:
        await ctx.step(ctx.deps.act, "quit", ctx.process_id, recovery="rerun")
    return "not reached"


FUNCTIONS_SINCE_7: dict[str, Process[..., Any]] = {
    each.name: each for each in (stepping, gathering, choosing, dozing, saving, awaiting, quitting)
}


def runtime_since_7(
    store: Any, world: World, files: ToolProvider, *, without: Iterable[str] = (), **options: Any
) -> Runtime:
    """A Runtime with all definitions of schema 7, less those that are named."""
    missing = set(without)
    asking = Path(__file__).with_name("asking_server.py")
    return Runtime(
        store,
        agents=[agent for name, agent in (agents(world) | agents_since_7(world, files)).items() if name not in missing],
        processes=[each for name, each in (FUNCTIONS | FUNCTIONS_SINCE_7).items() if name not in missing],
        deps=world,
        limits=[Limit(tokens=10_000_000, per="metadata.purse")],
        mcp=[McpServer("tables", command=[sys.executable, "-I", "-S", str(asking)], agents=["booker"])],
        input_secret=SECRET,
        **options,
    )
