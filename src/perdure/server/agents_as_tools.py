"""Agents as the tools of an MCP server, and sessions as its resources.

A call of `prompt` is a turn: it is on disk before anything answers, and goes on whatever becomes of the client. A turn
that waits for an approval asks the client's person for it. Clients of today's protocol are given the question as the
result, together with a state that they send back with the answer: any later process on the same store takes it, because
the state is sealed with a key of the store. Clients of the older protocol are asked over their open connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Generator, Mapping, Sequence
from typing import Any, Literal, TypeAlias
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct

from perdure.errors import (
    AlreadyAnswered,
    InvalidInput,
    MissingExtra,
    PerdureError,
    UnknownCall,
    UnknownSession,
    quoted,
)
from perdure.model import validate
from perdure.model.codec import clean_text
from perdure.model.event import AnyEvent, RateLimitWait, ToolFinished, ToolProgress, ToolStarted
from perdure.model.ids import mint, split
from perdure.model.message import Message, Scalar
from perdure.model.outcome import PendingCall, Queued, Waiting, text_of
from perdure.model.session import ListedSession
from perdure.ports.store import Store
from perdure.runtime import Runtime
from perdure.sessions.result import TurnResult
from perdure.sessions.session import Session
from perdure.wire import message_json, outcome_kind, pending_json

try:
    import anyio
    import mcp_types as types
    from mcp.server import Server
    from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
    from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
    from mcp.shared.exceptions import MCPError, NoBackChannelError
    from mcp_types import INVALID_PARAMS
    from mcp_types.version import MODERN_PROTOCOL_VERSIONS
except ModuleNotFoundError:
    raise MissingExtra("a server for MCP", "mcp") from None

SCHEME = "perdure://sessions/"
PAGE = 100
MESSAGES = 1000
"""How many messages of a session a client is shown, the newest ones."""
STATE_LASTS = 30 * 24 * 3600.0
"""Seconds in which a person may answer a question; after that the client asks for the turn again."""

CALL_IDS = ("id", "call_id")
"""Fields of a message's parts that begin with the id of its session."""
LONGEST_PROGRESS = 1000
LONGEST_NAMESPACE = 100

ServerContext: TypeAlias = ServerRequestContext["OpenTurns", Any]
OpenTurns: TypeAlias = dict[types.RequestId, tuple[Session, str] | Literal["begun", "cancelled"]]
"""The turns that requests of one connection wait for, each with its session; before there is a turn, whether its
request was cancelled."""


class PromptArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of `prompt`."""

    text: str
    session: str | None = None
    key: str | None = None


class OfTurn(Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of `result` and `cancel`."""

    turn: str


class Question(Struct, frozen=True):
    """What a client's person was asked: a call, and a digest of what exactly is to be approved."""

    call_id: str
    approves: str = ""


class RequestState(Struct, frozen=True):
    """What a client sends back with its answers."""

    turn: str
    asked: tuple[Question, ...] = ()


TURN_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "session": {"type": "string", "description": "The session: give it again to go on with the conversation."},
        "turn": {"type": "string", "description": "The turn: `result` waits for it, `cancel` ends it."},
        "status": {"type": "string", "description": "finished, waiting, queued, cancelled, budget_spent, failed, …"},
        "text": {"type": "string", "description": "What the agent answered, or why it did not."},
        "output": {"description": "The typed answer, where the agent has one."},
        "pending": {"type": "array", "items": {"type": "object"}, "description": "What the turn waits for."},
    },
    "required": ["session", "turn", "status", "text", "output", "pending"],
}
PROMPT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "What to say to the agent."},
        "session": {
            "type": "string",
            "description": "The conversation to go on with, or to begin; a new one if left out.",
        },
        "key": {"type": "string", "description": "Say the same again with the same key, and it is the same turn."},
    },
    "required": ["text"],
    "additionalProperties": False,
}
OF_TURN_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"turn": {"type": "string", "description": "The turn, as `prompt` told it."}},
    "required": ["turn"],
    "additionalProperties": False,
}
APPROVAL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "approve": {"type": "boolean", "title": "Approve", "description": "Let the call run."},
        "reason": {"type": "string", "title": "Reason", "description": "What the agent is told if you do not."},
    },
    "required": ["approve"],
}


def make_server(
    runtime: Runtime, namespace: str, metadata: Mapping[str, Scalar] | None, descriptions: Mapping[str, str]
) -> Server[OpenTurns]:
    shown = AgentServer(runtime, namespace, metadata, descriptions)
    server: Server[OpenTurns] = Server(
        "perdure",
        lifespan=_turns_of_connection,
        on_list_tools=shown.list_tools,
        on_call_tool=shown.call_tool,
        on_list_resources=shown.list_sessions,
        on_list_resource_templates=shown.list_templates,
        on_read_resource=shown.read_session,
    )
    server.add_notification_handler("notifications/cancelled", types.CancelledNotificationParams, shown.cancelled)
    server.middleware.append(StableRequestState(runtime.store, f"{server.name}:{namespace}"))
    return server


@contextlib.asynccontextmanager
async def _turns_of_connection(_: Server[OpenTurns]) -> AsyncGenerator[OpenTurns, None]:
    yield {}


class StableRequestState:
    """Seals and opens the state of requests with a key that every process on the store has."""

    def __init__(self, store: Store, audience: str) -> None:
        self._store, self._audience = store, audience
        self._boundary: RequestStateBoundary | None = None

    async def __call__(self, ctx: ServerContext, call_next: CallNext) -> HandlerResult:
        if self._boundary is None:
            key = hmac.new(await self._store.secret(), b"mcp request state", hashlib.sha256).digest()
            security = RequestStateSecurity(keys=[key], ttl=STATE_LASTS)
            self._boundary = RequestStateBoundary(security, default_audience=self._audience)
        return await self._boundary(ctx, call_next)


class AgentServer:
    """The handlers of the server. `_agents` are the names of agents by the tools that stand for them."""

    def __init__(
        self,
        runtime: Runtime,
        namespace: str,
        metadata: Mapping[str, Scalar] | None,
        descriptions: Mapping[str, str],
    ) -> None:
        self._runtime, self._namespace, self._descriptions = runtime, namespace, descriptions
        self._metadata = None if metadata is None else validate.metadata(metadata)
        names = runtime.agents
        for name in descriptions:
            if name not in names:
                raise InvalidInput(f"there is no agent {quoted(name)} to describe: the Runtime has {', '.join(names)}")
        self._agents = {"prompt": names[0]} if len(names) == 1 else {f"prompt_{name}": name for name in names}
        text = validate.plain_text(namespace)
        fits = text is not None and text.isprintable() and len(text) <= LONGEST_NAMESPACE
        if not fits or namespace[-1:].isalnum():  # clients of `a` would reach the sessions of `ab-`
            raise InvalidInput(
                f"namespace={quoted(namespace):.200} is not usable: give what ends with a sign that is no letter or "
                "digit, such as 'guest-'"
            )

    # ------------------------------------------------------------------ tools

    async def list_tools(
        self, ctx: ServerContext, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        tools = [
            types.Tool(
                name=tool, description=self._described(agent), input_schema=PROMPT_SCHEMA, output_schema=TURN_SCHEMA
            )
            for tool, agent in self._agents.items()
        ]
        tools.append(
            types.Tool(
                name="result",
                description="Wait for a turn that was begun before, for example because waiting for it was given up.",
                input_schema=OF_TURN_SCHEMA,
                output_schema=TURN_SCHEMA,
            )
        )
        tools.append(
            types.Tool(name="cancel", description="End a turn that runs or waits.", input_schema=OF_TURN_SCHEMA)
        )
        return types.ListToolsResult(tools=tools)

    def _described(self, agent: str) -> str:
        what = self._descriptions.get(agent, "")
        return f"Say something to the agent {agent!r} and wait for its answer. {what}".strip()

    async def call_tool(
        self, ctx: ServerContext, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        given = params.arguments or {}
        turns, number = ctx.lifespan_context, _number(ctx)
        if number is not None:
            turns[number] = "begun"
        try:
            if params.name == "result":
                return await self._result(ctx, params, msgspec.convert(given, OfTurn))
            if params.name == "cancel":
                return await self._cancel(msgspec.convert(given, OfTurn))
            agent = self._agents.get(params.name)
            if agent is None:
                raise MCPError(INVALID_PARAMS, f"there is no tool {params.name!r}")
            return await self._prompt(ctx, params, agent, msgspec.convert(given, PromptArguments))
        except msgspec.ValidationError as error:
            return _refused("invalid_input", f"the arguments do not fit: {error}")
        except PerdureError as error:
            return _refused(error.code, self._without_namespace(error.summary))
        finally:
            if number is not None and isinstance(turns.get(number), str):
                del turns[number]

    async def _prompt(
        self, ctx: ServerContext, params: types.CallToolRequestParams, agent: str, asked: PromptArguments
    ) -> types.CallToolResult | types.InputRequiredResult:
        if params.request_state is not None:
            return await self._go_on(ctx, params)
        name = mint("s", time.time_ns() // 1_000_000, secrets.randbits(40)) if asked.session is None else asked.session
        session = await self._runtime.session(self._inside(name), agent=agent, metadata=self._metadata)
        turn = session.stream(asked.text, key=asked.key)
        async with contextlib.AsyncExitStack() as stack:
            # A client that gives up now must not leave it open whether its words were accepted.
            with anyio.CancelScope(shield=True):
                await stack.enter_async_context(turn)
                number = _number(ctx)
                if number is not None and ctx.lifespan_context.get(number) == "cancelled":
                    await session.cancel("cancelled by a client", by="mcp", turn_id=turn.turn_id)
            stack.enter_context(self._waited_for(ctx, session, turn.turn_id))
            await _report(ctx, turn)
            return await self._answer(ctx, session, await turn.result())

    async def _result(
        self, ctx: ServerContext, params: types.CallToolRequestParams, of: OfTurn
    ) -> types.CallToolResult | types.InputRequiredResult:
        if params.request_state is not None:
            return await self._go_on(ctx, params)
        session, turn = await self._session_of(of.turn), self._inside(of.turn)
        with self._waited_for(ctx, session, turn):
            async with _reported(ctx, session, turn):
                result = await session.result_or_queued(turn)
            return await self._answer(ctx, session, result)

    async def _cancel(self, of: OfTurn) -> types.CallToolResult:
        session = await self._session_of(of.turn)
        status = await session.cancel("cancelled by a client", by="mcp", turn_id=self._inside(of.turn))
        return types.CallToolResult(content=[types.TextContent(text=status)], structured_content={"status": status})

    async def _session_of(self, turn: str) -> Session:
        name, _ = split(self._inside(turn), 1)
        row = await self._runtime.store.session(name)
        if row is None or row.deleted:
            raise UnknownSession(self._outside(name))
        return await self._runtime.session(name)

    # ------------------------------------------------------------------ answers and questions

    async def _answer(
        self, ctx: ServerContext, session: Session, result: TurnResult[Any]
    ) -> types.CallToolResult | types.InputRequiredResult:
        """How a turn ended; or, when it waits for approvals and the client has a person to ask, the questions."""
        while True:
            questions = (
                [] if not isinstance(result.outcome, Waiting) else [c for c in result.pending if c.kind == "approval"]
            )
            if not questions or not _can_ask(ctx):
                return self._shown(result)
            if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
                asked = tuple([Question(call.call_id, call.approves) for call in questions])
                return types.InputRequiredResult(
                    input_requests={self._outside(call.call_id): self._request(call) for call in questions},
                    request_state=msgspec.json.encode(RequestState(self._outside(result.turn_id), asked)).decode(),
                )
            async with _reported(ctx, session, result.turn_id):
                if not await self._ask_now(ctx, session, questions):
                    return self._shown(result)
                result = await session.result(result.turn_id)

    async def _ask_now(self, ctx: ServerContext, session: Session, questions: Sequence[PendingCall]) -> bool:
        """Ask over the open connection; False when a question was left unanswered."""
        for call in questions:
            try:
                answer = await ctx.session.elicit_form(self._question(call), APPROVAL_SCHEMA, ctx.request_id)
            except (MCPError, NoBackChannelError):
                return False
            if not await _decide(session, call.call_id, answer):
                return False
        return True

    async def _go_on(
        self, ctx: ServerContext, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        """A client comes back with answers, perhaps after the process that asked has ended."""
        state = msgspec.json.decode(params.request_state or "", type=RequestState)
        session, turn = await self._session_of(state.turn), self._inside(state.turn)
        with self._waited_for(ctx, session, turn):
            async with _reported(ctx, session, turn):
                all_answered = await self._take_answers(session, state.asked, params.input_responses or {})
                result = await session.result_or_queued(turn)
            return await self._answer(ctx, session, result) if all_answered else self._shown(result)

    async def _take_answers(
        self, session: Session, asked: Sequence[Question], answers: Mapping[str, types.InputResponse]
    ) -> bool:
        """Carry out what a person answered to what still waits; False when a question was left unanswered."""
        waiting = {call.call_id: call.approves for call in await session.pending() if call.kind == "approval"}
        complete = True
        for question in asked:
            if waiting.get(question.call_id) != question.approves:
                continue  # it was answered elsewhere, or something else is asked now
            answer = answers.get(self._outside(question.call_id))
            complete &= isinstance(answer, types.ElicitResult) and await _decide(session, question.call_id, answer)
        return complete

    def _shown(self, result: TurnResult[Any]) -> types.CallToolResult:
        status, pending = outcome_kind(result.outcome), [self._pending(call) for call in result.pending]
        text = result.error or text_of(result.outcome)
        if isinstance(result.outcome, Waiting | Queued):
            what = ", ".join(f"{call['kind']} of {call['tool']} ({call['call_id']})" for call in pending)
            turn = self._outside(result.turn_id)
            text = f"The turn is {status}: {what}. Call `result` with turn {turn!r} when that is done."
        shown = {
            "session": self._outside(result.session_id),
            "turn": self._outside(result.turn_id),
            "status": status,
            "text": text,
            "output": getattr(result.outcome, "value", None),
            "pending": pending,
        }
        return types.CallToolResult(
            content=[types.TextContent(text=text)], structured_content=shown, is_error=result.failed
        )

    # ------------------------------------------------------------------ clients that give up

    @contextlib.contextmanager
    def _waited_for(self, ctx: ServerContext, session: Session, turn: str) -> Generator[None, None, None]:
        """Note which turn a request waits for. Over HTTP nobody may cancel by the number of a request: others use the
        same numbers, and a client that goes away may come back."""
        number = _number(ctx)
        if number is not None:
            ctx.lifespan_context[number] = session, turn
        yield
        # Not in a `finally`: a request that was cancelled leaves its turn for `cancelled` to find.
        if number is not None:
            ctx.lifespan_context.pop(number, None)

    async def cancelled(self, ctx: ServerContext, params: types.CancelledNotificationParams) -> None:
        """The client's person stopped a request: its turn ends too."""
        turns, number = ctx.lifespan_context, params.request_id
        found = None if number is None else turns.pop(number, None)
        if number is not None and isinstance(found, str):
            turns[number] = "cancelled"  # its turn is just being accepted
        elif isinstance(found, tuple):
            session, turn = found
            await session.cancel(clean_text(params.reason or "cancelled by a client"), by="mcp", turn_id=turn)

    # ------------------------------------------------------------------ sessions as resources

    async def list_sessions(
        self, ctx: ServerContext, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        cursor = None if params is None else params.cursor
        try:
            page = await self._runtime.sessions.list(prefix=self._namespace, limit=PAGE, cursor=cursor)
        except InvalidInput as error:
            raise MCPError(INVALID_PARAMS, str(error)) from None
        return types.ListResourcesResult(
            resources=[self._resource(row) for row in page],
            next_cursor=page[-1].cursor if len(page) == PAGE else None,
        )

    def _resource(self, row: ListedSession) -> types.Resource:
        name = self._outside(row.id)
        return types.Resource(
            uri=f"{SCHEME}{quote(name, safe='')}",
            name=name,
            title=row.title or name,
            description=f"A session of {row.agent}: {row.state}",
            mime_type="application/json",
        )

    async def list_templates(
        self, ctx: ServerContext, params: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        template = types.ResourceTemplate(
            uri_template=f"{SCHEME}{{session}}",
            name="session",
            description="What was said in a session, and what it waits for.",
            mime_type="application/json",
        )
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def read_session(
        self, ctx: ServerContext, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        uri = str(params.uri)
        name = unquote(uri.removeprefix(SCHEME))
        row = await self._runtime.store.session(f"{self._namespace}{name}") if uri.startswith(SCHEME) else None
        if row is None or row.deleted:
            raise MCPError(INVALID_PARAMS, f"there is no resource {uri}", {"uri": uri})
        session = await self._runtime.session(row.id)
        messages = await session.history()
        body = {
            "session": name,
            "agent": row.agent,
            "state": row.state,
            "omitted": max(0, len(messages) - MESSAGES),
            "messages": [self._message(message) for message in messages[-MESSAGES:]],
            "pending": [self._pending(call) for call in await session.pending()],
        }
        text = msgspec.json.encode(body).decode()
        return types.ReadResourceResult(
            contents=[types.TextResourceContents(uri=uri, mime_type="application/json", text=text)]
        )

    # ------------------------------------------------------------------ names

    def _inside(self, turn: str) -> str:
        return f"{self._namespace}{turn}"

    def _outside(self, name: str) -> str:
        return name.removeprefix(self._namespace)

    def _without_namespace(self, text: str) -> str:
        """What we say of a session, as clients know it."""
        return re.sub(rf"(?<!\w){re.escape(self._namespace)}", "", text) if self._namespace else text

    def _pending(self, call: PendingCall) -> dict[str, Any]:
        return {**pending_json(call), "call_id": self._outside(call.call_id)}

    def _message(self, message: Message) -> dict[str, Any]:
        shown = message_json(message)
        for part in shown["parts"]:
            part |= {name: self._outside(part[name]) for name in CALL_IDS if isinstance(part.get(name), str)}
        return shown

    def _question(self, call: PendingCall) -> str:
        """The whole call: whoever approves must see all of it, also signs that a screen would not show."""
        args = _seen(msgspec.json.format(msgspec.json.encode(call.args), indent=2).decode())
        why = f"\n{_seen(clean_text(call.reason))}" if call.reason else ""
        return f"The agent wants to call {call.tool} ({self._outside(call.call_id)}) with\n{args}{why}"

    def _request(self, call: PendingCall) -> types.ElicitRequest:
        return types.ElicitRequest(
            params=types.ElicitRequestFormParams(message=self._question(call), requested_schema=APPROVAL_SCHEMA)
        )


def _number(ctx: ServerContext) -> types.RequestId | None:
    """The number under which a request may be cancelled. Over HTTP others use the same numbers."""
    return ctx.request_id if ctx.request is None else None


def _seen(text: str) -> str:
    """Text with signs that nobody sees as their escapes, which mean the same in JSON."""
    return "".join([each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text])


def _can_ask(ctx: ServerContext) -> bool:
    capabilities = ctx.session.client_capabilities
    return capabilities is not None and capabilities.elicitation is not None


async def _decide(session: Session, call_id: str, answer: types.ElicitResult) -> bool:
    """Carry out what a person answered; False when they did not."""
    if answer.action == "cancel":
        return False
    content = answer.content or {}
    try:
        if answer.action == "accept" and content.get("approve") is True:
            await session.approve(call_id, by="mcp")
        else:
            await session.reject(call_id, str(content.get("reason") or "declined"), by="mcp")
    except (UnknownCall, AlreadyAnswered):
        pass  # it was answered elsewhere: that stands
    return True


async def _report(ctx: ServerContext, events: AsyncIterable[AnyEvent], turn: str = "") -> None:
    """Tell the client what happens; of all events of a session, those of one turn if it is named."""
    count = 0
    async for event in events:
        message = _progress(event) if turn in ("", event.turn_id) else ""
        if message:
            count += 1
            await ctx.session.report_progress(count, message=message)


@contextlib.asynccontextmanager
async def _reported(ctx: ServerContext, session: Session, turn: str) -> AsyncGenerator[None, None]:
    """Tell the client what happens in a turn while the block waits for it."""
    # A task of its own rather than a task group, which would wrap what the block raises.
    reporting = asyncio.create_task(_report(ctx, session.observe(), turn))
    try:
        yield
    finally:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)  # a client that hears no more is no failure


def _progress(event: AnyEvent) -> str:
    match event:
        case ToolStarted(tool=tool):
            return f"{tool} …"
        case ToolProgress(tool=tool, value=value):
            return f"{tool}: {value!s:.{LONGEST_PROGRESS}}"
        case ToolFinished(tool=tool, outcome=outcome) if outcome is not None:
            return f"{tool}: {outcome_kind(outcome)}"
        case RateLimitWait(limit=limit):
            return f"waiting for the rate limit {limit}"
        case _:
            return ""


def _refused(code: str, message: str) -> types.CallToolResult:
    return types.CallToolResult(
        content=[types.TextContent(text=message)], structured_content={"error": code, "message": message}, is_error=True
    )
