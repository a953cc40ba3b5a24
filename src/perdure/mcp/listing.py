"""What a server lists, as tools that a model may be offered. Nothing here waits, and nothing is believed.

    a page of tools ──▶ each within limits ──▶ a name of ours ──▶ compared with what was approved ──▶ ToolSpec

A name is `mcp__server__tool`. One that is too long, or has signs which providers refuse, is cut and cleaned, and ends
with a hash of the whole: two tools of a server never share a name unless it forges one, and then the second is refused.

Of what a server says, a model is shown the description and the schemas, marked as the server's, without signs that
nobody sees. A tool that cannot be called without such signs is refused.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from perdure.mcp.server import McpServer
from perdure.model.codec import MAX_DEPTH, clean_text
from perdure.model.tool import ToolSpec

LONGEST_NAME = 64
MOST_TOOLS = 512
MOST_PAGES = 64
LARGEST_TOOL = 128 * 1024
"""Bytes of one tool with its schemas."""
LARGEST_LIST = 4 * 1024 * 1024
LONGEST_DESCRIPTION = 8 * 1024
REPEATABLE = ("readOnlyHint", "idempotentHint")
"""Annotations by which a server says that a call may be made twice."""

_OTHER = re.compile(r"[^a-zA-Z0-9_-]")
_EXPLAINS = frozenset({"title", "description", "$comment", "default", "example", "examples"})
_INVISIBLE = frozenset({"Cc", "Cf", "Co", "Cs", "Cn"})


class ListedTool(Struct, frozen=True, gc=False):
    """A tool as its server describes it. `print` is a digest of all that: what was approved is approved as it was.

    `repeatable`: the server says that the tool only reads, or that calling it again changes nothing more.
    """

    name: str
    description: str = ""
    input_schema: dict[str, Any] = {}
    output_schema: dict[str, Any] | None = None
    print: str = ""
    repeatable: bool = False


class Listing(Struct, frozen=True):
    """What a server offers, by the server's own names, and what is left out and why."""

    tools: Mapping[str, ListedTool] = {}
    refused: Mapping[str, str] = {}


class EndlessList(Exception):
    """A server lists more than any server needs to: it is not asked again."""


def exposed_name(server: str, tool: str) -> str:
    """The name by which a model calls a tool of a server."""
    prefix = f"mcp__{server}__"
    room = LONGEST_NAME - len(prefix)
    if tool and len(tool) <= room and not _OTHER.search(tool):
        return prefix + tool
    digest = hashlib.sha256(tool.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{prefix}{_OTHER.sub('_', tool)[: room - 9]}_{digest}"


def visible(text: str) -> str:
    """`text` without signs that nobody sees: a model reads them, and the person who approves does not."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        [each for each in clean_text(text) if each in "\n\t" or unicodedata.category(each) not in _INVISIBLE]
    )


def listed(described: Mapping[str, Any]) -> ListedTool | str:
    """A tool as the SDK read it, in plain JSON; or why it is refused."""
    data = msgspec.json.encode(described, order="sorted")
    if len(data) > LARGEST_TOOL:
        return f"its description has {len(data):,} bytes, {LARGEST_TOOL:,} are the most"
    schema, output = described.get("inputSchema"), described.get("outputSchema")
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return "its arguments are described by no object"
    if _depth(described) > MAX_DEPTH // 2:
        return "its schema is too deep"
    try:
        schema, output = shown(schema), None if not isinstance(output, dict) else shown(output)
    except HiddenSigns as found:
        return f"its schema has signs that nobody sees, in {found.args[0]!r:.80}"
    text = described.get("description") or described.get("title") or ""
    compared = ("name", "title", "description", "inputSchema", "outputSchema", "annotations")
    kept = {name: described[name] for name in compared if described.get(name) is not None}
    digest = hashlib.sha256(msgspec.json.encode(kept, order="sorted")).hexdigest()
    hints = described.get("annotations")
    repeatable = isinstance(hints, dict) and any(hints.get(hint) is True for hint in REPEATABLE)
    return ListedTool(described["name"], visible(str(text))[:LONGEST_DESCRIPTION], schema, output, digest, repeatable)


class HiddenSigns(Exception):
    """A name or a value that counts has signs that nobody sees."""


def shown(schema: Any, words: bool = False) -> Any:
    """A schema without signs that nobody sees, in what only explains it (`words`). Raises HiddenSigns where the others
    are: a call would have to have them too."""
    if isinstance(schema, dict):
        return {
            shown(name, words): shown(value, words or (name in _EXPLAINS and not isinstance(value, dict)))
            for name, value in schema.items()
        }
    if isinstance(schema, list):
        return [shown(each, words) for each in schema]
    if not isinstance(schema, str):
        return schema
    seen = visible(schema)
    if not words and seen != clean_text(schema).replace("\r", ""):
        raise HiddenSigns(schema)
    return seen if words else schema


def _depth(value: Any) -> int:
    deepest, open_ = 0, [(value, 1)]
    while open_:
        each, depth = open_.pop()
        deepest = max(deepest, depth)
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        open_ += [(one, depth + 1) for one in inner if isinstance(one, dict | list)]
    return deepest


def read_listing(server: McpServer, described: Iterable[Mapping[str, Any]]) -> Listing:
    """The tools of a server that may be offered."""
    tools, refused, names = dict[str, ListedTool](), dict[str, str](), dict[str, str]()
    for each in described:
        name = str(each.get("name", ""))
        if not server.offers(name):
            continue
        exposed = exposed_name(server.name, name)
        found = listed(each)
        if name in tools:
            refused[name] = "it is listed twice: the first counts"
        elif exposed in names:
            refused[name] = f"it would be called {exposed}, like {names[exposed]!r}"
        elif isinstance(found, str):
            refused[name] = found
        else:
            tools[name] = found
            names[exposed] = name
    return Listing(tools, refused)


def spec_of(server: McpServer, tool: ListedTool) -> ToolSpec:
    """Return the specification of a tool: its description for models, and the contract that its host gave it.

    Hints of the server change one thing: a tool that may be repeated is `rerun` where the host names no recovery.
    """
    said = f": {tool.description}" if tool.description else ""
    return ToolSpec(
        exposed_name(server.name, tool.name),
        f"(Tool of the MCP server {server.name}){said}",
        tool.input_schema,
        tool.output_schema,
        id=tool_id(server.name, tool.name),
        recovery=server.recovery_of(tool.name, tool.repeatable),
        approval=server.approval_of(tool.name),
        timeout=server.timeout,
        # The question of a server says not to which call it belongs: with one at a time, there is no other.
        resource=f"mcp:{server.name}" if server.sample else None,
    )


def tool_id(server: str, tool: str) -> str:
    return f"mcp:{server}:{tool}"


def without_taken(specs: Sequence[ToolSpec], taken: Iterable[str]) -> tuple[ToolSpec, ...]:
    """Those whose names are free in a catalogue: an agent's own tool goes before one of a server."""
    names = set(taken)
    return tuple([spec for spec in specs if spec.name not in names])
