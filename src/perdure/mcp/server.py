"""What a host says of an MCP server: how it is reached, what of it is offered, and under which contracts.

A server is a stranger: its tools run at most once (`recovery="once"`) unless the host says otherwise, or the server
says that a tool only reads or is idempotent. Where servers are found is said by the host alone: no file is looked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, TypeVar, cast, get_args

import msgspec
from msgspec import Struct

from perdure.errors import InvalidDefinition, quoted
from perdure.model import validate
from perdure.model.command import GRACE, Command
from perdure.model.sandbox import Confinement, read_confinement
from perdure.model.tool import Approval, Recovery

START_SECONDS = 30.0
"""A server has so long to start, agree on a version and list what it offers."""
CALL_SECONDS = 600.0
LONGEST_NAME = 32
LARGEST_FILE = 1 << 20

_NAME = re.compile(r"[a-zA-Z0-9]+([_-][a-zA-Z0-9]+)*")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")

T = TypeVar("T")


class Elicitation(Struct, frozen=True):
    """A question of a server to a person. `schema` is what the answer must look like, `url` where it is to be given
    instead; `call_id` is the call that it belongs to, "" where that is not known."""

    server: str
    message: str
    schema: Mapping[str, Any] | None = None
    url: str = ""
    call_id: str = ""


class Sampling(Struct, frozen=True):
    """A question of a server to a model. `messages` are pairs of role and text."""

    server: str
    messages: Sequence[tuple[str, str]]
    system: str = ""
    max_tokens: int = 0
    call_id: str = ""


Elicit: TypeAlias = Callable[[Elicitation], Awaitable[Mapping[str, Any] | None]]
"""Answers a question: the fields of its schema (none for a URL: it was opened), or None, which declines it."""

Sample: TypeAlias = Callable[[Sampling], Awaitable[str]]
"""Answers a question to a model."""


class McpServer:
    """One MCP server: `Runtime(mcp=[McpServer("git", command=["mcp-server-git"]), McpServer("docs", url="https://…")])`.

    `command` is run as every command is: with few variables of the host, `env` besides, and in `sandbox` if one is
    given; it ends with the Runtime. `url` is a streamable HTTP endpoint, `headers` go with each request, `auth` is what
    the SDK takes there (`httpx2.Auth`, such as its OAuth client). Neither is stored.

    `agents`: those that see its tools; None is all. `tools`, `without`: patterns (`get_*`) of those that are offered.
    `approval` and `recovery` are one for all, or by pattern; the first that fits counts. A tool without a recovery of
    the host is "rerun" if its server annotates it as read-only or idempotent, else "once". `timeout`: seconds for a
    call.

    `elicit` answers its questions to people; without one, a call that asks is parked until `session.answer`. `sample`
    lets it ask a model: True is that of the session, which pays for it. `resources` offers two tools that read them.

    `pin`: what the server says of its tools is approved as it was when the store first saw it. What changes later
    reaches no model before a person has approved it. `legacy`: it is known to speak a version before 2026.
    """

    def __init__(  # noqa: PLR0913  # each is a word of the public vocabulary
        self,
        name: str,
        *,
        command: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        sandbox: Confinement | None = None,
        url: str | None = None,
        headers: Mapping[str, str] | None = None,
        auth: Any = None,
        agents: Sequence[str] | None = None,
        tools: Sequence[str] = ("*",),
        without: Sequence[str] = (),
        approval: Approval | Mapping[str, Approval] = "never",
        recovery: Recovery | Mapping[str, Recovery] | None = None,
        timeout: float | None = CALL_SECONDS,
        start_timeout: float = START_SECONDS,
        elicit: Elicit | None = None,
        sample: bool | Sample = False,
        resources: bool = False,
        pin: bool = True,
        legacy: bool = False,
    ) -> None:
        self.name = validate.name(name, "name", InvalidDefinition)
        if not _NAME.fullmatch(self.name) or len(self.name) > LONGEST_NAME:
            raise InvalidDefinition(
                f"an MCP server cannot be named {quoted(name)}: give up to {LONGEST_NAME} letters and digits, with "
                "single '_' or '-' between them"
            )
        if (command is None) == (url is None):
            raise self._unusable("give it a command or a url, and not both")
        self.command = None if command is None else self._command(command, env or {}, cwd, sandbox)
        self.url = "" if url is None else self._url(url)
        self.headers = self._texts("headers", headers or {})
        if command is not None and (headers or auth is not None):
            raise self._unusable("headers and auth are for a url: give a command its secrets in env")
        if url is not None and (env or cwd is not None or sandbox is not None):
            raise self._unusable("env, cwd and sandbox are for a command: give a url headers or auth")
        self.auth = auth
        self.agents = None if agents is None else validate.several(agents, "agents", InvalidDefinition)
        self._tools = self._patterns("tools", tools)
        self._without = self._patterns("without", without)
        self._approval = self._by_pattern("approval", approval, get_args(Approval))
        named: Recovery | Mapping[str, Recovery] = {} if recovery is None else recovery
        self._recovery = self._by_pattern("recovery", named, get_args(Recovery))
        self.timeout = validate.seconds(timeout, "timeout", InvalidDefinition)
        limit = validate.seconds(start_timeout, "start_timeout", InvalidDefinition)
        if not limit:
            raise self._unusable("start_timeout must be a number of seconds above 0")
        self.start_timeout = limit
        if elicit is not None and not callable(elicit):
            raise self._unusable(f"elicit={quoted(elicit)} is no async function of an Elicitation")
        self.elicit = elicit
        if not isinstance(sample, bool) and not callable(sample):
            raise self._unusable(f"sample={quoted(sample)} is neither True nor an async function of a Sampling")
        self.sample = sample
        self.resources = validate.flag(resources, "resources", InvalidDefinition)
        self.pin = validate.flag(pin, "pin", InvalidDefinition)
        self.legacy = validate.flag(legacy, "legacy", InvalidDefinition)

    def __repr__(self) -> str:
        return f"<McpServer {self.name}>"

    def offers(self, tool: str) -> bool:
        """Whether a tool of this name is to be offered."""
        return _fits(tool, self._tools) and not _fits(tool, self._without)

    def approval_of(self, tool: str) -> Approval:
        return next((each for pattern, each in self._approval if fnmatchcase(tool, pattern)), "never")

    def recovery_of(self, tool: str, repeatable: bool) -> Recovery:
        """Return the host's recovery of a tool, or the default of one that `repeatable` describes."""
        default: Recovery = "rerun" if repeatable else "once"
        return next((each for pattern, each in self._recovery if fnmatchcase(tool, pattern)), default)

    # ------------------------------------------------------------------ checking

    def _unusable(self, why: str) -> InvalidDefinition:
        return InvalidDefinition(f"MCP server {self.name!r}: {why}")

    def _command(
        self,
        argv: object,
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None,
        sandbox: Confinement | None,
    ) -> Command:
        words = validate.several(argv, "command", InvalidDefinition)
        if not words or any(validate.plain_text(each) is None for each in words) or not words[0]:
            raise self._unusable(f"command={quoted(argv):.200} is not usable: give a program and its arguments")
        folder = "" if cwd is None else os.path.abspath(os.path.expanduser(os.fspath(cwd)))
        confined = None if sandbox is None else read_confinement(sandbox)
        return Command(tuple(words), folder, self._texts("env", env), grace=GRACE, sandbox=confined)

    def _url(self, url: object) -> str:
        text = validate.plain_text(url)
        if text is None or not text.startswith(("https://", "http://")):
            raise self._unusable(f"url={quoted(url):.200} is not usable: give one that begins with https:// or http://")
        return text

    def _texts(self, what: str, values: object) -> dict[str, str]:
        if not isinstance(values, Mapping):
            raise self._unusable(f"{what} is not usable: give a dict of strings")
        for name, value in values.items():
            if validate.plain_text(name) is None or validate.plain_text(value) is None:
                raise self._unusable(f"{what}: {quoted(name):.80} has no string as its value")  # which may be a secret
        return dict(values)

    def _patterns(self, what: str, values: object) -> tuple[str, ...]:
        return tuple(
            [validate.name(each, what, InvalidDefinition) for each in validate.several(values, what, InvalidDefinition)]
        )

    def _by_pattern(self, what: str, given: T | Mapping[str, T], known: tuple[T, ...]) -> tuple[tuple[str, T], ...]:
        table = cast("Mapping[str, T]", given) if isinstance(given, Mapping) else {"*": given}
        for pattern, each in table.items():
            if validate.plain_text(pattern) is None or each not in known:
                words = ", ".join(repr(word) for word in known)
                raise self._unusable(
                    f"{what}={quoted(given):.200} is not usable: give one of {words}, or a dict of them"
                )
        return tuple(table.items())


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def checked(given: Iterable[Any], agents: Iterable[str]) -> tuple[McpServer, ...]:
    """The servers of `Runtime(mcp=…)`: each with a name of its own, for agents that there are."""
    servers = validate.several(given, "mcp", InvalidDefinition)
    names, known = set[str](), set(agents)
    for server in servers:
        if not isinstance(server, McpServer):
            raise InvalidDefinition(f"mcp: {quoted(server):.200} is no McpServer")
        if server.name in names:
            raise InvalidDefinition(f"two MCP servers are named {server.name!r}: give each a name of its own")
        names.add(server.name)
        unknown = next((each for each in server.agents or () if each not in known), None)
        if unknown is not None:
            raise InvalidDefinition(
                f"MCP server {server.name!r} is for the agent {quoted(unknown)}, which there is not"
            )
    return servers


# ---------------------------------------------------------------------- mcp.json


class _Entry(Struct, frozen=True):
    """A server as other clients write it. What we do not know is left alone: it is another client's."""

    type: str = ""
    command: str = ""
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str = ""
    url: str = ""
    headers: dict[str, str] = {}
    disabled: bool = False


_TYPES = ("", "stdio", "http", "streamable-http", "streamableHttp")


def read_mcp_json(path: str | os.PathLike[str], **options: Any) -> list[McpServer]:
    """The servers in an `mcp.json` as other clients read it: `{"mcpServers": {"git": {"command": …, "args": […]}}}`.

    The file is the one that the host names, and its commands are run: it must not come from a working folder.
    `${NAME}` and `${NAME:-otherwise}` are replaced by variables of the host. `options` hold for each of the servers.
    """
    where = os.fspath(path)
    try:
        with open(where, "rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise InvalidDefinition(f"{where} cannot be read: {error.strerror}") from None
    if len(data) > LARGEST_FILE:
        raise InvalidDefinition(f"{where} has more than {LARGEST_FILE:,} bytes: it is no mcp.json")
    try:
        whole = msgspec.json.decode(data, type=dict[str, Any])
        entries = msgspec.convert(whole.get("mcpServers", whole.get("servers")), dict[str, _Entry])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidDefinition(f'{where} is no mcp.json, which has "mcpServers": {error}') from None
    found = []
    for name, entry in entries.items():
        if entry.type not in _TYPES:
            raise InvalidDefinition(
                f"{where}: server {quoted(name)} is of type {quoted(entry.type)}: use stdio or http"
            )
        if not entry.disabled:
            found.append(_server(where, name, entry, options))
    return found


def _server(where: str, name: str, entry: _Entry, options: Mapping[str, Any]) -> McpServer:
    def filled(text: str) -> str:
        def value(match: re.Match[str]) -> str:
            found = os.environ.get(match[1], match[2])
            if found is None:
                raise InvalidDefinition(
                    f"{where}: server {quoted(name)} needs the variable {match[1]}, which is not set"
                )
            return found

        return _VARIABLE.sub(value, text)

    def all_filled(values: Mapping[str, str]) -> dict[str, str]:
        return {key: filled(value) for key, value in values.items()}

    given = dict(options)
    if entry.command:
        given |= {"command": [filled(entry.command), *map(filled, entry.args)], "env": all_filled(entry.env)}
        given |= {"cwd": filled(entry.cwd)} if entry.cwd else {}
    if entry.url:
        given |= {"url": filled(entry.url), "headers": all_filled(entry.headers)}
    return McpServer(name, **given)
