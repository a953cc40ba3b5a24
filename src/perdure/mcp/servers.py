"""The MCP servers of a Runtime: what its agents are offered of them, and what its host may ask (`runtime.mcp`).

A turn sees the tools as they are when it begins; for servers that are just being started it waits, no longer than their
own limit. What a server offered stays in the catalogue while it is down: a call then fails, and the turn goes on.

A call is sent once. What becomes of it when its process dies is decided by `recovery` like that of every tool, which is
`once` unless the host says otherwise. A call whose server asks for something is left on a durable wait with all that
the server wants to see again, and is sent on with the answer by whichever process is there then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import mcp_types
from mcp import Client
from msgspec import Struct
from msgspec.structs import replace
from pydantic import TypeAdapter

from perdure.errors import InvalidInput, McpUnavailable, ToolError, UnknownTool, quoted
from perdure.mcp import approved as approvals
from perdure.mcp.answers import answered, messages_of, part_of, plain, resource_of, value_of
from perdure.mcp.approved import Approved
from perdure.mcp.connection import (
    MOST_QUESTIONS,
    ServerConnection,
    State,
    answer_elicitation,
    elicitation_of,
    sampled,
)
from perdure.mcp.listing import ListedTool, exposed_name, spec_of, tool_id, visible, without_taken
from perdure.mcp.server import McpServer, Sampling, checked
from perdure.model import validate
from perdure.model.llm import ModelSettings
from perdure.model.message import Message, Text
from perdure.model.tool import OutcomeUnknown, PreparedCall, ToolOutcome, ToolSpec
from perdure.ports.bound import BoundCommands
from perdure.ports.host import Clock, Random
from perdure.processes.service import ProcessService
from perdure.tools.attempt import EndsAs
from perdure.tools.waiting import InputNeeded, ParkCall

log = logging.getLogger("perdure.mcp")

MOST_ROUNDS = 16
"""How often one call may ask for something."""
STATE_ONLY_SECONDS = 0.25
CLOSE_SECONDS = 10.0
IDEMPOTENCY_KEY = "mainstay/idempotency-key"
"""The project's old name stays: under another key, a server would do a call again that is repeated after an upgrade."""
LIST, READ = "list_resources", "read_resource"
MOST_LISTED = 200
"""Resources that a model is shown of a server."""
LARGEST_STATE = 1024 * 1024
"""Characters of a server's own state that are kept for it while a person thinks."""
RESULT: TypeAdapter[mcp_types.CallToolResult | mcp_types.InputRequiredResult] = TypeAdapter(
    mcp_types.CallToolResult | mcp_types.InputRequiredResult
)


class McpStatus(Struct, frozen=True):
    """How a server stands. `tools` are the names under which models see them; `refused` are left out, and why.

    `changed` are described otherwise than they were approved, `added` were not there then: by the server's own names.
    """

    name: str
    state: Literal["starting", "ready", "down", "refused", "detached"]
    reason: str
    version: str
    tools: tuple[str, ...]
    refused: Mapping[str, str]
    changed: tuple[str, ...]
    added: tuple[str, ...]
    starts: int


class Attached:
    """One server of a Runtime: its connection, what is approved of it, and what is offered of that."""

    def __init__(self, connection: ServerConnection, approved: Approved) -> None:
        self.connection, self.approved = connection, approved
        self.offered: dict[str, ListedTool] = {}
        self.task: asyncio.Task[None] | None = None

    @property
    def server(self) -> McpServer:
        return self.connection.server

    def pending(self, name: str) -> ListedTool | None:
        """A tool as it is described now, where that is not what was approved."""
        now = self.connection.listing.tools.get(name)
        return now if now is not None and self.server.pin and self.offered[name].print != now.print else None

    def specs(self) -> list[ToolSpec]:
        server = self.server
        found = [spec_of(server, tool) for tool in self.offered.values()]
        if server.resources:
            names = {spec.name for spec in found}
            found += [spec for spec in _resource_specs(server) if spec.name not in names]
        return found


def _resource_specs(server: McpServer) -> list[ToolSpec]:
    said = f"of the MCP server {server.name}"
    uri = {
        "type": "object",
        "properties": {"uri": {"type": "string"}},
        "required": ["uri"],
        "additionalProperties": False,
    }
    return [
        ToolSpec(
            exposed_name(server.name, LIST), f"List the resources {said}.", id=f"mcp-resources:{server.name}:{LIST}",
            recovery=server.recovery_of(LIST, repeatable=True), approval=server.approval_of(LIST),
            timeout=server.timeout,
        ),
        ToolSpec(
            exposed_name(server.name, READ), f"Read a resource {said} by its URI.", uri,
            id=f"mcp-resources:{server.name}:{READ}", recovery=server.recovery_of(READ, repeatable=True),
            approval=server.approval_of(READ), timeout=server.timeout,
        ),
    ]  # fmt: skip


class McpServers:
    """The servers of one Runtime, on its event loop."""

    def __init__(  # put together in one place
        self,
        given: Sequence[McpServer],
        agents: Iterable[str],
        commands: BoundCommands,
        clock: Clock,
        random: Random,
        processes: Callable[[], ProcessService],
    ) -> None:
        self.commands, self.clock, self.random = commands, clock, random
        self._given, self._agents, self._processes = given, tuple(agents), processes
        self.attached: dict[str, Attached] = {}
        self.revision = 0
        self._swept: asyncio.Future[int] | None = None

    # ------------------------------------------------------------------ life

    def open(self) -> None:
        """Begin to start the servers; returns at once."""
        for server in self._given:
            self._begin(server)

    async def close(self) -> None:
        """End every connection, and every server that was started for one."""
        for each in self.attached.values():
            each.connection.stop()
        tasks = [each.task for each in self.attached.values() if each.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, server: McpServer) -> Attached:
        found = Attached(ServerConnection(server, self, self._listed), Approved(server.name, self._processes()))
        self.attached[server.name] = found
        self.revision += 1
        found.task = asyncio.create_task(found.connection.run(), name=f"MCP server {server.name}")
        return found

    async def prepare(self, server: McpServer) -> None:
        """Before a server is started: offer what is approved of it, and end what a Runtime left behind that is dead."""
        each = self.attached[server.name]
        if server.pin and not each.offered:
            await each.approved.read()
            self.offer(each, {n: tool for n, tool in each.approved.tools.items() if server.offers(n)})
        if server.command is not None:
            swept = self._swept
            if swept is None or (swept.done() and (swept.cancelled() or swept.exception() is not None)):
                self._swept = swept = asyncio.ensure_future(self.commands.end_leftovers())
            await asyncio.shield(swept)

    async def _listed(self, connection: ServerConnection) -> None:
        """A server has listed its tools: offer what may be offered of them."""
        each = self.attached[connection.server.name]
        if not connection.server.pin:
            return self.offer(each, dict(connection.listing.tools))
        await each.approved.read()
        if not each.approved.known:
            await each.approved.add(connection.listing.tools.values(), "attached")
        self.offer(each, approvals.offered(connection.listing, each.approved.tools))
        for what, found in self._unapproved(each).items():
            if found:
                names = ", ".join([f"{name!r:.80}" for name in found][:20])
                log.warning("MCP server %s: %s since it was approved: %s", connection.server.name, what, names)
        return None

    def offer(self, each: Attached, tools: dict[str, ListedTool]) -> None:
        if tools != each.offered:
            each.offered = tools
            self.revision += 1

    @staticmethod
    def _unapproved(each: Attached) -> dict[str, dict[str, ListedTool]]:
        if not each.server.pin or not each.approved.known:
            return {"changed": {}, "added": {}}
        listing, tools = each.connection.listing, each.approved.tools
        return {"changed": approvals.changed(listing, tools), "added": approvals.added(listing, tools)}

    # ------------------------------------------------------------------ for the host

    async def attach(self, server: McpServer) -> None:
        """Add a server; its tools are there for turns that begin once it is ready."""
        checked([*(each.server for each in self.attached.values()), server], self._agents)
        self._begin(server)

    async def detach(self, name: str) -> None:
        """End a server. Its tools are gone for turns that begin from now on; calls under way have unknown outcomes."""
        each = self._find(name)
        each.connection.stop()
        if each.task is not None:
            await asyncio.wait({each.task}, timeout=CLOSE_SECONDS)
            each.task.cancel()
            await asyncio.gather(each.task, return_exceptions=True)
        self.attached.pop(name, None)
        self.revision += 1

    async def ready(self, timeout: float | None = None) -> bool:
        """Wait until every server was started, or could not be; whether all are ready."""
        validate.seconds(timeout)
        try:
            async with asyncio.timeout(timeout):
                for each in list(self.attached.values()):
                    await each.connection.wait_first()
        except TimeoutError:
            return False
        return all(each.connection.state is State.READY for each in self.attached.values())

    def status(self) -> list[McpStatus]:
        """How each server stands."""
        found = []
        for name, each in self.attached.items():
            connection, open_ = each.connection, self._unapproved(each)
            names = tuple([spec.name for spec in each.specs()])
            found.append(
                McpStatus(
                    name, connection.state.value, connection.reason, connection.version, names,
                    connection.listing.refused, tuple(open_["changed"]), tuple(open_["added"]), connection.starts,
                )
            )  # fmt: skip
        return found

    async def changes(self, name: str) -> dict[str, str]:
        """What `approve` would approve of a server: how the description of each tool has changed, or all of it where
        the tool is new."""
        each = self._find(name)
        await each.approved.read()
        open_ = {**self._unapproved(each)["changed"], **self._unapproved(each)["added"]}
        return {tool: approvals.difference(each.approved.tools.get(tool), now) for tool, now in open_.items()}

    async def approve(self, name: str, *tools: str, by: str = "host") -> list[str]:
        """Approve tools of a server as it describes them now, or all of them; the names of those that were not."""
        each = self._find(name)
        await each.approved.read()
        open_ = {**self._unapproved(each)["changed"], **self._unapproved(each)["added"]}
        listed = each.connection.listing.tools
        unknown = next((tool for tool in tools if tool not in listed), None)
        if unknown is not None:
            raise UnknownTool(unknown, sorted(listed))
        wanted = [tool for tool in open_ if not tools or tool in tools]
        if wanted:
            await each.approved.add([listed[tool] for tool in wanted], validate.name(by, "by"))
            self.offer(each, approvals.offered(each.connection.listing, each.approved.tools))
        return wanted

    async def resources(self, name: str) -> list[dict[str, Any]]:
        """The resources of a server, as it describes them: the first few hundred."""
        each = self._find(name)
        async with _asked(each) as client:
            return [plain(one) for one in (await client.list_resources()).resources][:MOST_LISTED]

    async def read_resource(self, name: str, uri: str) -> list[Any]:
        """What a resource holds: texts, and what are bytes as parts."""
        each = self._find(name)
        async with _asked(each) as client:
            result = await client.session.read_resource(uri)
            return [resource_of(plain(one)) for one in result.contents]

    async def prompts(self, name: str) -> list[dict[str, Any]]:
        """The prompts of a server, as it describes them."""
        each = self._find(name)
        async with _asked(each) as client:
            return [plain(one) for one in (await client.list_prompts()).prompts][:MOST_LISTED]

    async def prompt(self, name: str, prompt: str, args: Mapping[str, str] | None = None) -> list[Message]:
        """The messages of a prompt: `session.run(messages[0].parts)`."""
        each = self._find(name)
        async with _asked(each) as client:
            return messages_of((await client.session.get_prompt(prompt, dict(args or {}))).messages)

    def _find(self, name: str) -> Attached:
        if name not in self.attached:
            known = ", ".join(self.attached) or "none"
            raise InvalidInput(f"there is no MCP server {quoted(name)}; attached: {known}")
        return self.attached[name]

    # ------------------------------------------------------------------ for agents

    def tools_for(self, agent: str, taken: Iterable[str]) -> AgentTools:
        return AgentTools(self, agent, frozenset(taken))


@contextlib.asynccontextmanager
async def _asked(each: Attached) -> AsyncGenerator[Client, None]:
    """The client for a question of the host, which has the time of a call. What goes wrong is raised as at the host."""
    server = each.server
    client = await each.connection.client()
    try:
        async with asyncio.timeout(server.timeout):
            with answered(server):
                yield client
    except TimeoutError:
        raise McpUnavailable(server.name, f"it did not answer within {server.timeout:g} s") from None
    except ToolError as error:
        raise McpUnavailable(server.name, error.message) from None
    except EndsAs as lost:
        reason = lost.outcome.reason if isinstance(lost.outcome, OutcomeUnknown) else "it was lost"
        raise McpUnavailable(server.name, reason) from None


# ---------------------------------------------------------------------- the tools of one agent


class AgentTools:
    """What one agent is offered of the servers (`ToolProvider`). `taken` are the names of its own tools."""

    def __init__(self, servers: McpServers, agent: str, taken: frozenset[str]) -> None:
        self._servers, self._agent, self._taken = servers, agent, taken
        self._revision, self._specs = -1, tuple[ToolSpec, ...]()
        self._found: dict[str, tuple[Attached, str]] = {}

    async def gather(self) -> None:
        for each in self._seen():
            await each.connection.wait_first()

    def _seen(self) -> list[Attached]:
        """The servers that this agent sees: it waits for no others."""
        attached = self._servers.attached.values()
        return [each for each in attached if each.server.agents is None or self._agent in each.server.agents]

    def specs(self) -> Sequence[ToolSpec]:
        if self._revision != self._servers.revision:
            self._revision, specs, self._found = self._servers.revision, [], {}
            for each in self._seen():
                specs += each.specs()
                self._found |= {tool_id(each.server.name, name): (each, name) for name in each.offered}
                self._found |= {f"mcp-resources:{each.server.name}:{w}": (each, f"#{w}") for w in (LIST, READ)}
            self._specs = without_taken(specs, self._taken)
            if len(self._specs) < len(specs):
                hidden = sorted({spec.name for spec in specs} - {spec.name for spec in self._specs})
                log.warning("agent %s has tools of its own called %s: those of servers are not offered",
                            self._agent, ", ".join(hidden))  # fmt: skip
        return self._specs

    def _find(self, call: PreparedCall) -> tuple[Attached, str]:
        found = self._found.get(call.tool_id)
        if found is None or found[0].server.name not in self._servers.attached:
            raise ToolError(f"the MCP server of {call.name} was detached", code="mcp_unavailable")
        return found

    async def prepare(self, call: PreparedCall, ctx: Any) -> PreparedCall | ToolOutcome:
        each, name = self._find(call)
        now = None if name not in each.offered else each.pending(name)
        if now is None:
            return call
        await each.approved.read()  # another Runtime may have been told
        before = each.approved.tools[name]
        if before.print == now.print:
            return call
        said = approvals.difference(before, now)
        if len(said) > approvals.LONGEST_DIFFERENCE:
            raise ToolError(
                f"MCP server {each.server.name} describes this tool otherwise than when it was approved, with "
                f"{len(said):,} characters of changes: its host reads and approves them (`runtime.mcp.changes`)",
                code="approval_needed",
            )
        why = f"MCP server {each.server.name} describes this tool otherwise than when it was approved:\n{said}"
        return replace(call, payload={"print": now.print}, ask=why, approves=now.print)

    async def execute(self, call: PreparedCall, ctx: Any) -> Any:
        each, name = self._find(call)
        payload: Mapping[str, Any] = call.payload if isinstance(call.payload, dict) else {}
        if "print" in payload:
            await self._approve(each, name, payload["print"], ctx)
        try:
            client = await each.connection.client()
        except McpUnavailable as error:
            raise ToolError(f"{error.summary}; nothing was sent", code=error.code) from None
        if name.startswith("#"):
            return await _read(each, name, call.args)
        return await ServerCall(each, name, call, ctx).send(client, payload)

    async def _approve(self, each: Attached, name: str, approved: str, ctx: Any) -> None:
        """A person has approved a changed tool: from now on it is offered as it is described now."""
        now = each.connection.listing.tools.get(name)
        if now is None or now.print != approved:
            raise ToolError(
                "the tool was described anew since it was approved; call it again", code="approval_outdated"
            )
        await each.approved.add([now], f"call {ctx.call_id}")
        self._servers.offer(each, approvals.offered(each.connection.listing, each.approved.tools))


async def _read(each: Attached, name: str, args: Mapping[str, Any]) -> Any:
    client = await each.connection.client()
    with answered(each.server):
        if name == f"#{LIST}":
            listed = (await client.list_resources()).resources[:MOST_LISTED]
            seen = [one for one in listed if one.uri == visible(one.uri)]
            return [{"uri": one.uri, "name": visible(one.name), "type": one.mime_type} for one in seen]
        result = await client.session.read_resource(args["uri"])
    parts = [resource_of(plain(one)) for one in result.contents]
    return parts[0] if len(parts) == 1 else parts


class ServerCall:
    """One call of a tool of a server, with all that the server asks meanwhile."""

    def __init__(self, each: Attached, name: str, call: PreparedCall, ctx: Any) -> None:
        self._each, self._server, self._name, self._call, self._ctx = each, each.server, name, call, ctx
        self._questions = 0

    async def send(self, client: Client, payload: Mapping[str, Any]) -> Any:
        connection, ctx, call = self._each.connection, self._ctx, self._call
        responses, state = _revived(payload)
        connection.asked[ctx.call_id] = self._sample
        try:
            for _ in range(MOST_ROUNDS):
                meta: Any = {IDEMPOTENCY_KEY: ctx.idempotency_key}
                params = mcp_types.CallToolRequestParams(
                    name=self._name,
                    arguments=dict(call.args),
                    input_responses=responses,
                    request_state=state,
                    _meta=meta,
                )
                with answered(self._server):  # not `call_tool`, which checks the result by patterns of the server
                    result = await client.session.send_request(
                        mcp_types.CallToolRequest(params=params), RESULT, progress_callback=self._progress
                    )
                connection.heard()
                if isinstance(result, mcp_types.CallToolResult):
                    tool = self._each.connection.listing.tools.get(self._name)
                    return value_of(self._server, result, None if tool is None else tool.output_schema)
                if not result.input_requests:
                    await asyncio.sleep(STATE_ONLY_SECONDS)
                responses = await self._answers(result)
                state = result.request_state
        finally:
            connection.asked.pop(ctx.call_id, None)
        raise ToolError(f"it asked for something {MOST_ROUNDS} times", code="mcp_too_many_questions")

    async def _progress(self, progress: float, total: float | None, message: str | None) -> None:
        told = {"progress": progress, "total": total, "message": None if message is None else visible(message)[:500]}
        self._ctx.progress({name: value for name, value in told.items() if value is not None})

    async def _answers(self, result: mcp_types.InputRequiredResult) -> dict[str, Any] | None:
        """What the server asks for. Leaves the call on a durable wait where only a person can say it."""
        if len(result.request_state or "") > LARGEST_STATE:
            raise ToolError(f"its state has more than {LARGEST_STATE:,} characters", code="mcp_invalid_answer")
        if not result.input_requests:
            return None
        self._questions += len(result.input_requests)
        if self._questions > MOST_QUESTIONS:
            raise ToolError(f"it asked for more than {MOST_QUESTIONS} things", code="mcp_too_many_questions")
        found, asks, reasons = dict[str, Any](), dict[str, Any](), list[str]()
        for key, request in result.input_requests.items():
            match request:
                case mcp_types.ElicitRequest(params=params) if self._server.elicit is None:
                    asked = elicitation_of(self._server, params, self._ctx.call_id)
                    asks[key] = {"message": asked.message, "schema": asked.schema, "url": asked.url}
                    reasons.append(asked.message)
                case mcp_types.ElicitRequest(params=params):
                    found[key] = await answer_elicitation(self._server, params, self._ctx.call_id)
                case mcp_types.CreateMessageRequest(params=params) if self._server.sample:
                    found[key] = await sampled(self._sample, params)
                case mcp_types.ListRootsRequest():
                    found[key] = mcp_types.ListRootsResult(roots=[])
                case _:
                    raise ToolError("the server asks a model, which its host does not let it do", code="mcp_refused")
            if isinstance(answer := found.get(key), mcp_types.ErrorData):
                raise ToolError(f"what the server asked for could not be had: {answer.message}", code="mcp_refused")
        if not asks:
            return found
        kept = {key: [type(answer).__name__, plain(answer)] for key, answer in found.items()}
        why = f"MCP server {self._server.name} asks: {' / '.join(reasons)}"
        raise ParkCall(InputNeeded(why, asks, {"request": result.request_state, "answers": kept}))

    async def _sample(self, params: mcp_types.CreateMessageRequestParams) -> str:
        """Ask a model for the server: the host's function, or the model of the session, whose budget it is."""
        server, ctx = self._server, self._ctx
        said = [(each.role, _text(each)) for each in params.messages]
        if not isinstance(server.sample, bool):
            asked = Sampling(server.name, said, params.system_prompt or "", params.max_tokens, ctx.call_id)
            return await server.sample(asked)
        messages = [Message(role, [Text(text)]) for role, text in said]
        settings = ModelSettings(max_tokens=max(1, params.max_tokens))
        label = f"mcp:{server.name}"
        completion = await ctx.host.complete(
            messages, label=label, system=params.system_prompt or "", settings=settings
        )
        return str(completion.text)


def _text(message: mcp_types.SamplingMessage) -> str:
    contents = message.content if isinstance(message.content, list) else [message.content]
    parts = [part_of(plain(each)) for each in contents]
    if not all(isinstance(part, str) for part in parts):
        raise ToolError("a server may ask a model with text only", code="mcp_refused")
    return "\n".join(parts)


_REVIVED: Mapping[str, Any] = {
    each.__name__: each for each in (mcp_types.ElicitResult, mcp_types.CreateMessageResult, mcp_types.ListRootsResult)
}


def _revived(payload: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """The answers to what a server asked before the call was left, and its own state, from the payload of the call."""
    if "input" not in payload:
        return None, None
    kept = payload["state"]
    answers = {key: _REVIVED[kind].model_validate(answer) for key, (kind, answer) in kept["answers"].items()}
    for key, fields in payload["input"].items():
        action: Literal["accept", "decline"] = "decline" if fields is None else "accept"
        answers[key] = mcp_types.ElicitResult(action=action, content=fields or None)
    return answers, kept["request"]
