"""The life of one server: started, asked what it offers, watched, started again.

    STARTING ──▶ READY ──▶ DOWN ──▶ STARTING …            a pause before each new start, from 0.5 to 30 s
        │                                                 DETACHED from anywhere
        └──▶ REFUSED       what no second try would mend: no such program, another version, lists without end

One task (`run`) holds everything that belongs to a connection, because the SDK's scopes must be left by the task that
entered them. Calls come from other tasks, and only send and wait. When the connection ends, those that wait are told
that it was lost; calls that come while there is none are refused, and nothing of them was sent.

A server over pipes is known to be gone when these end. One that hangs, or is behind a URL, is asked for a sign of life
when it has been silent for a while, and given up after three questions without an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from enum import Enum
from typing import Any, Protocol

import anyio
import mcp_types
from mcp import Client, MCPError
from mcp_types import UNSUPPORTED_PROTOCOL_VERSION
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from perdure.errors import CommandsUnavailable, InvalidCommand, McpUnavailable, ToolError
from perdure.mcp.answers import MADE_UP, UNSEEN, plain
from perdure.mcp.listing import (
    LARGEST_LIST,
    MOST_PAGES,
    MOST_TOOLS,
    EndlessList,
    HiddenSigns,
    Listing,
    read_listing,
    shown,
    visible,
)
from perdure.mcp.server import Elicitation, McpServer
from perdure.mcp.transport import over_http, over_pipes
from perdure.model.codec import encode, error_text
from perdure.ports.bound import BoundCommand, BoundCommands
from perdure.ports.host import Clock, Random

log = logging.getLogger("perdure.mcp")

PROBE_EVERY = 30.0
"""Seconds of silence after which a server is asked for a sign of life."""
PROBE_SECONDS = 5.0
PROBES = 3
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
COMPLAINT = 400
"""Characters of what a server wrote to stderr that are told as the reason for its end."""
STEADY_SECONDS = 60.0
"""A connection that held for so long starts the pauses anew."""
RELIST_SECONDS, SHARE_OF_LISTS = 1.0, 20
"""The least time between two lists, and the share of the time that reading them may take: a server may say as often as
it likes that they have changed."""
LARGEST_QUESTION = 64 * 1024
MOST_QUESTIONS = 32
"""How many questions a server may ask for each thing that it is asked for."""


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    REFUSED = "refused"
    DETACHED = "detached"


class ConnectionPorts(Protocol):
    """What connections need of their Runtime."""

    @property
    def clock(self) -> Clock: ...

    @property
    def random(self) -> Random: ...

    @property
    def commands(self) -> BoundCommands: ...

    async def prepare(self, server: McpServer) -> None:
        """What must be done before the server is started; it may fail like the start itself."""
        ...


Asked = Callable[[mcp_types.CreateMessageRequestParams], Awaitable[str]]
"""Answers a server's question to a model, for the call that is under way."""


class Gone(Exception):
    """The connection has ended; the text says why."""


class ServerConnection:
    """One server. `changed` is called when what it offers has. `state` and `reason` say how it stands.

    `pid` is that of a server which was started, while it runs.
    `asked` are the calls under way that may put a question to a model, by their ids; `_questions` counts what the
    server has asked since it was last asked for anything. `_first` is set when the first start was decided, whichever
    way.
    """

    def __init__(
        self, server: McpServer, ports: ConnectionPorts, changed: Callable[[ServerConnection], Awaitable[None]]
    ) -> None:
        self.server, self._ports, self._changed = server, ports, changed
        self.state, self.reason, self.version, self.starts = State.STARTING, "", "", 0
        self.pid: int | None = None
        self.listing, self.asked = Listing(), dict[str, Asked]()
        self._client: Client | None = None
        self._lost: asyncio.Future[str] | None = None
        self._first, self._ready, self._stop, self._relist = (asyncio.Event() for _ in range(4))
        self._heard, self._complaint, self._questions = 0.0, "", 0

    # ------------------------------------------------------------------ for callers

    async def wait_first(self) -> None:
        """Wait until the first start has succeeded or failed."""
        await self._first.wait()

    async def client(self) -> Client:
        """The client of a live connection. Raises McpUnavailable: then nothing was sent."""
        if self.state is State.STARTING:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.server.start_timeout):
                    await self._settled()
        if self._client is None or self.state is not State.READY:
            ended = "its connection has just ended" if self.state is State.READY else self.state.value
            raise McpUnavailable(self.server.name, self.reason or ended)
        self._questions = 0
        return self._client

    async def _settled(self) -> None:
        while self.state is State.STARTING:
            self._ready.clear()
            await self._ready.wait()

    def heard(self) -> None:
        """The server has answered something just now."""
        self._heard = self._ports.clock.monotonic()

    def stop(self) -> None:
        self._stop.set()

    # ------------------------------------------------------------------ its task

    async def run(self) -> None:
        """Keep the server connected until it is stopped or refused."""
        pause = FIRST_PAUSE
        while not self._stop.is_set():
            self._become(State.STARTING)
            began = self._ports.clock.monotonic()
            try:
                await self._connect_once()
                break  # it was stopped
            except Exception as error:  # a server, the SDK and the network may raise anything; this server is down
                ended = _leaf(error)

            why = _reason(ended) + self._complaint
            if isinstance(ended, EndlessList | InvalidCommand | UnsupportedVersion):
                return self._become(State.REFUSED, why)
            if self._ports.clock.monotonic() - began >= STEADY_SECONDS:
                pause = FIRST_PAUSE
            log.warning("MCP server %s is down: %s", self.server.name, why)
            self._become(State.DOWN, why)
            jitter = self._ports.random.bits(16) / 65536
            await self._sleep(pause * (0.75 + jitter / 2))
            pause = min(pause * 2, LONGEST_PAUSE)
        self._become(State.DETACHED, "it was detached")

    def _become(self, state: State, reason: str = "") -> None:
        self.state, self.reason = state, reason
        if state is not State.READY:
            self._client = None
        if state is State.REFUSED:
            log.warning("MCP server %s is refused: %s", self.server.name, reason)
        if state is not State.STARTING:
            self._first.set()
            self._ready.set()

    async def _sleep(self, seconds: float) -> None:
        """Wait, or until it is stopped."""
        sleeping = asyncio.ensure_future(self._ports.clock.sleep(seconds))
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({sleeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancelled(sleeping, stopping)

    async def _connect_once(self) -> None:
        """One connection, from its start to its end. Raises why it ended, and returns if it was stopped."""
        server = self.server
        self._lost = asyncio.get_running_loop().create_future()
        self.starts += 1
        self._complaint = ""
        async with contextlib.AsyncExitStack() as opened:
            starting = self._start(opened)
            stopping = asyncio.ensure_future(self._stop.wait())
            try:
                client = await self._within(starting, stopping, server.start_timeout)
                if client is None:
                    return
                self._client = client
                self.heard()
                self._become(State.READY)
                await self._watch(client, stopping)
            finally:
                self._client = None
                await _cancelled(stopping)

    async def _start(self, opened: contextlib.AsyncExitStack) -> Client:
        """Start the server, agree on a version with it and ask what it offers."""
        await self._ports.prepare(self.server)
        client = await opened.enter_async_context(self._connected())
        self.version = client.protocol_version
        self._relist.clear()
        await self._list(client)
        return client

    async def _within(
        self, starting: Coroutine[Any, Any, Client], stopping: asyncio.Future[Any], seconds: float
    ) -> Client | None:
        """Wait for a start in this task. None if it was stopped meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        cancels, stop_now = task.cancelling(), lambda _: task.cancel()
        stopping.add_done_callback(stop_now)
        try:
            async with asyncio.timeout(seconds):
                return await starting
        except asyncio.CancelledError:
            if not self._stop.is_set():
                raise
            while task.cancelling() > cancels:
                task.uncancel()
            return None
        except TimeoutError:
            raise Gone(f"it did not start within {seconds:g} s") from None
        finally:
            stopping.remove_done_callback(stop_now)

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncGenerator[Client, None]:
        server = self.server
        async with contextlib.AsyncExitStack() as opened:
            transport: Any = over_http(server, self._lose)
            if server.command is not None:
                command = await self._ports.commands.start(f"MCP server {server.name}", server.command, {})
                opened.push_async_exit(functools.partial(self._end, command))
                self.pid = command.pid
                transport = over_pipes(command, self._lose)
            client = Client(
                transport,
                mode="legacy" if server.legacy else "auto",
                cache=None,
                message_handler=self._notified,
                elicitation_callback=self._elicited,
                sampling_callback=self._sampled if server.sample else None,
                client_info=mcp_types.Implementation(name="perdure", version="0.1.0"),
            )
            try:
                await opened.enter_async_context(client)
            except Exception as error:  # the SDK tells of a version that neither speaks in several ways
                first = _leaf(error)
                modern = isinstance(first, MCPError) and first.code == UNSUPPORTED_PROTOCOL_VERSION
                if modern or (isinstance(first, RuntimeError) and "protocol version" in str(first)):
                    raise UnsupportedVersion(error_text(first)) from None
                raise
            yield client

    async def _end(self, command: BoundCommand, kind: object, error: BaseException | None, trace: object) -> None:
        """Its pipes are closed: see that nothing of it lives, and keep what it complained of if it went by itself."""
        self.pid = None
        said = await command.end()
        if error is not None and said:
            self._complaint = f"; the last of its stderr: {visible(said)[-COMPLAINT:]}"

    def _lose(self, why: str) -> None:
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(why)

    # ------------------------------------------------------------------ while it is connected

    async def _list(self, client: Client) -> None:
        """Ask what it offers, page by page, and no more than anybody can use."""
        described, size, cursor = list[dict[str, Any]](), 0, None
        tools = client.server_capabilities.tools is not None
        for _ in range(MOST_PAGES if tools else 0):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                described.append(plain(tool))
                size += len(encode(described[-1]))
                if len(described) > MOST_TOOLS or size > LARGEST_LIST:
                    raise EndlessList(f"it lists more than {MOST_TOOLS} tools, or {LARGEST_LIST:,} bytes of them")
            cursor = page.next_cursor
            if cursor is None:
                break
        else:
            if tools:
                raise EndlessList(f"its list of tools has more than {MOST_PAGES} pages")
        self.listing = read_listing(self.server, described)
        for name, why in self.listing.refused.items():
            log.warning("MCP server %s: tool %.80r is left out: %.200r", self.server.name, name, why)
        await self._changed(self)

    async def _watch(self, client: Client, stopping: asyncio.Future[Any]) -> None:
        """Look after a connection until it ends. Raises Gone, unless it was stopped."""
        assert self._lost is not None
        told = asyncio.ensure_future(self._listen(client))
        relist = asyncio.ensure_future(self._relist.wait())
        misses, listing = 0, 0.0
        try:
            while True:
                pause = asyncio.ensure_future(self._ports.clock.sleep(PROBE_EVERY))
                try:
                    await asyncio.wait({stopping, self._lost, relist, pause}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await _cancelled(pause)
                if stopping.done():
                    return
                if self._lost.done():
                    raise Gone(self._lost.result())
                if relist.done():
                    await self._sleep(max(RELIST_SECONDS, listing * SHARE_OF_LISTS))
                    self._relist.clear()
                    began = self._ports.clock.monotonic()
                    async with asyncio.timeout(self.server.start_timeout):
                        await self._list(client)
                    listing = self._ports.clock.monotonic() - began
                    relist = asyncio.ensure_future(self._relist.wait())
                elif self._ports.clock.monotonic() - self._heard >= PROBE_EVERY:
                    misses = 0 if await self._answers(client) else misses + 1
                    if misses >= PROBES:
                        raise Gone(f"it left {PROBES} questions for a sign of life unanswered")
        finally:
            await _cancelled(told, relist)

    async def _answers(self, client: Client) -> bool:
        """Whether it answers within a few seconds; an error is an answer."""
        asking = asyncio.ensure_future(self._ask_for_life(client))
        limit = asyncio.ensure_future(self._ports.clock.sleep(PROBE_SECONDS))
        try:
            await asyncio.wait({asking, limit}, return_when=asyncio.FIRST_COMPLETED)
            return asking.done() and asking.result()
        finally:
            await _cancelled(asking, limit)

    async def _ask_for_life(self, client: Client) -> bool:
        try:
            if self.version in MODERN_PROTOCOL_VERSIONS:
                await client.session.send_discover(self.version)
            else:
                await client.session.send_request(mcp_types.PingRequest(), mcp_types.EmptyResult)
        except MCPError as error:
            if error.code in (MADE_UP | UNSEEN if self.server.url else UNSEEN):
                return False
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            raise Gone("its connection was closed") from None
        self.heard()
        return True

    async def _listen(self, client: Client) -> None:
        """Hear of changed lists where the server tells only who asks for it."""
        tools = client.server_capabilities.tools
        if self.version not in MODERN_PROTOCOL_VERSIONS or tools is None or not tools.list_changed:
            return
        try:
            async with client.listen(tools_list_changed=True) as events:
                async for _ in events:
                    self._relist.set()
        except Exception as error:  # the list is what it was until the next start
            log.debug("MCP server %s does not tell of changes: %s", self.server.name, error_text(error))

    async def _notified(self, message: object) -> None:
        if isinstance(message, Exception):
            return  # what is no message may come from a server that answers nothing any more
        self.heard()
        if isinstance(message, mcp_types.ToolListChangedNotification):
            self._relist.set()

    # ------------------------------------------------------------------ questions of the server

    async def _elicited(self, context: object, params: Any) -> mcp_types.ElicitResult | mcp_types.ErrorData:
        """A question that must be answered while the call waits for it: servers before 2026 ask like this."""
        if refused := self._one_too_many():
            return refused
        calls = list(self.asked)
        return await answer_elicitation(self.server, params, calls[0] if len(calls) == 1 else "")

    async def _sampled(self, context: object, params: mcp_types.CreateMessageRequestParams) -> Any:
        if refused := self._one_too_many():
            return refused
        answers = list(self.asked.values())
        if len(answers) != 1:  # the tools of a server that may sample are called one at a time
            return mcp_types.ErrorData(
                code=mcp_types.INVALID_REQUEST, message="no call is under way that this belongs to"
            )
        return await sampled(answers[0], params)

    def _one_too_many(self) -> mcp_types.ErrorData | None:
        """Count a question; how it is refused when the server has asked too many."""
        self._questions += 1
        if self._questions <= MOST_QUESTIONS:
            return None
        message = f"more than {MOST_QUESTIONS} questions since it was asked for something"
        return mcp_types.ErrorData(code=mcp_types.INVALID_REQUEST, message=message)


class UnsupportedVersion(Exception):
    """The server speaks no version of the protocol that we do."""


async def answer_elicitation(
    server: McpServer, params: Any, call_id: str
) -> mcp_types.ElicitResult | mcp_types.ErrorData:
    """What the host's handler says to a question; without one it is declined."""
    if server.elicit is None:
        return mcp_types.ElicitResult(action="decline")
    try:
        asked = elicitation_of(server, params, call_id)
    except ToolError as error:
        return mcp_types.ErrorData(code=mcp_types.INVALID_PARAMS, message=error.message)
    try:
        answer = await server.elicit(asked)
        fields = None if answer is None else dict(answer)
    except Exception as error:  # the host's code may raise anything; the server is told no more than that
        log.warning("elicit= of MCP server %s raised %s", server.name, type(error).__name__, exc_info=error)
        return mcp_types.ElicitResult(action="cancel")
    if fields is None:
        return mcp_types.ElicitResult(action="decline")
    return mcp_types.ElicitResult(action="accept", content=fields or None)


def elicitation_of(server: McpServer, params: Any, call_id: str) -> Elicitation:
    """A question as a person is shown it. Raises ToolError for one that nobody could read, or should follow."""
    url = getattr(params, "url", "")
    schema = getattr(params, "requested_schema", None)
    message = visible(params.message)
    size = len(message) + len(url) + len(encode(schema))
    if size > LARGEST_QUESTION:
        raise ToolError(f"its question has {size:,} characters, {LARGEST_QUESTION:,} are the most", code="mcp_refused")
    if url and (not url.startswith(("https://", "http://")) or not (url.isascii() and url.isprintable())):
        raise ToolError(f"it wants an address to be opened that is none of the web: {url!r:.200}", code="mcp_refused")
    try:
        return Elicitation(server.name, message, None if schema is None else shown(schema), url, call_id)
    except HiddenSigns:
        raise ToolError("its question has signs that nobody sees", code="mcp_refused") from None


async def sampled(ask: Asked, params: mcp_types.CreateMessageRequestParams) -> Any:
    """The answer of a model to a question of the server."""
    try:
        text = await ask(params)
    except Exception as error:  # a budget that is spent, a provider that is down: the server is told
        return mcp_types.ErrorData(code=mcp_types.INTERNAL_ERROR, message=error_text(error)[:500])
    content = mcp_types.TextContent(type="text", text=text)
    return mcp_types.CreateMessageResult(role="assistant", content=content, model="", stop_reason="endTurn")


def _leaf(error: BaseException) -> BaseException:
    """What went wrong first, of all that a task group tells; what we say ourselves goes before what it led to."""
    leaves, open_ = list[BaseException](), [error]
    while open_:
        each = open_.pop(0)
        if isinstance(each, BaseExceptionGroup):
            open_ = [*each.exceptions, *open_]
        else:
            leaves.append(each)
    return next((each for each in leaves if isinstance(each, Gone)), leaves[0])


def _reason(error: BaseException) -> str:
    if isinstance(error, Gone | CommandsUnavailable | InvalidCommand | EndlessList | UnsupportedVersion):
        return error_text(error)
    if isinstance(error, TimeoutError):
        return "it did not list its tools in time"
    if isinstance(error, anyio.ClosedResourceError | anyio.BrokenResourceError):
        return "its connection was closed"
    return f"{type(error).__name__}: {visible(error_text(error))[:500]}"


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
