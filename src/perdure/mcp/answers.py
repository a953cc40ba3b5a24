"""What a server's answers mean for the call of a tool.

a result                     its value: structured content, text, pictures and sound as parts
a result marked as an error  the call failed, and the model is told why
an error of the protocol     the same, with the server's code; the call was refused or failed there
nothing, or a lost server    the outcome is unknown: the server may have done it
an answer that is no result  the call was made, and failed as far as anybody can tell
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import re
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import anyio
import httpx2
import mcp_types
from mcp import MCPError
from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR, PARSE_ERROR, REQUEST_TIMEOUT
from pydantic import BaseModel, ValidationError

from perdure.errors import ToolError
from perdure.mcp.listing import visible
from perdure.mcp.server import McpServer
from perdure.model.codec import clean_text, error_text
from perdure.model.message import Audio, Document, Image, Media, Message, Text
from perdure.model.tool import OutcomeUnknown
from perdure.tools.attempt import EndsAs
from perdure.tools.check import check

UNSEEN = frozenset({CONNECTION_CLOSED, REQUEST_TIMEOUT})
MADE_UP = frozenset({INTERNAL_ERROR, PARSE_ERROR})
"""Codes that the SDK answers with itself, where a request over HTTP had no usable answer."""
UNREADABLE, REFUSED = -32098, -32099
"""Codes of our transports: an answer that cannot be read, and a message that a status of HTTP refused."""
SESSION_OVER = "Session terminated"
"""What the SDK says of an answer that the server knows the session no more: it has not looked at the message."""
STATE_REFUSED = "invalid_request_state"
"""What a server of the SDK says when it cannot open the state that came back with an answer: it runs no tool then."""
LONGEST_TEXT = 4000
MOST_FILES = 32
"""Files of one result that a model is shown. More of them are refused by providers, in this turn and in all later."""

_KIND = re.compile(r"[a-z0-9]+/[a-z0-9][a-z0-9.+_-]{0,80}", re.ASCII)
_BEGINS: Mapping[str, tuple[bytes, ...]] = {
    "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/jpeg": (b"\xff\xd8\xff",),
    "image/gif": (b"GIF87a", b"GIF89a"),
    "image/webp": (b"RIFF",),
    "application/pdf": (b"%PDF",),
}
"""How files begin. One that is none makes providers refuse the request, and every later one of its session."""


def plain(model: BaseModel) -> dict[str, Any]:
    """What the SDK read, as the JSON that it was."""
    found: dict[str, Any] = model.model_dump(by_alias=True, mode="json", exclude_none=True)
    return found


@contextlib.contextmanager
def answered(server: McpServer) -> Generator[None, None, None]:
    """Tell what went wrong with a call that was sent as how it ended."""
    unseen = MADE_UP | UNSEEN if server.url else UNSEEN
    try:
        yield
    except MCPError as error:
        if error.code in unseen:
            raise EndsAs(_unknown(server, error.message)) from None
        if error.code == UNREADABLE:
            raise _no_result(server, error.message) from None
        if server.url and error.message == SESSION_OVER:
            raise ToolError("its session at the server is over; nothing was done", code="mcp_unavailable") from None
        if isinstance(error.data, dict) and error.data.get("reason") == STATE_REFUSED:
            raise ToolError(
                "the server does not know any more what it had asked for: it was started again since, or too much time "
                "went by; nothing was done, and the same call has it ask again",
                code="mcp_question_over",
            ) from None
        raise ToolError(_said(error.message), code="mcp_error", data={"code": error.code}) from None
    except (ValidationError, RuntimeError) as error:  # the SDK refuses what does not fit the protocol
        raise _no_result(server, str(error)) from None
    except (anyio.ClosedResourceError, anyio.BrokenResourceError, httpx2.HTTPError, OSError) as error:
        raise EndsAs(_unknown(server, error_text(error))) from None


def _unknown(server: McpServer, why: str) -> OutcomeUnknown:
    return OutcomeUnknown(f"MCP server {server.name} was lost while the call ran ({_said(why)}); it may have been done")


def _no_result(server: McpServer, why: str) -> ToolError:
    told = f"the call was made, and MCP server {server.name} answered with what is no result: {_said(why)}"
    return ToolError(told, code="mcp_invalid_answer")


def _said(text: str) -> str:
    return visible(text)[:LONGEST_TEXT]


def value_of(server: McpServer, result: mcp_types.CallToolResult, schema: Mapping[str, Any] | None) -> Any:
    """What a call returned, which fits `schema`. Raises ToolError where it does not, or is marked as an error."""
    if result.is_error:
        raise ToolError(_words_of(result)[:LONGEST_TEXT] or "it failed without a word", code="mcp_tool_error")
    parts = [part_of(plain(each)) for each in result.content]
    texts = [part for part in parts if isinstance(part, str)]
    # Not the SDK's own check: its patterns are the server's, and may take longer than anybody waits.
    problem = None if schema is None else check(schema, result.structured_content, foreign=True)
    if problem is not None:
        raise _no_result(server, f"its structured content does not fit its schema: {problem}")
    files = [part for part in parts if isinstance(part, Media)]
    if len(files) > MOST_FILES:
        left_out = {id(each) for each in files[MOST_FILES:]}
        parts = [part for part in parts if id(part) not in left_out]
        parts.append(f"({len(left_out):,} more files are left out)")
    if len(texts) < len(parts):
        return [*([] if result.structured_content is None else [result.structured_content]), *parts]
    if result.structured_content is not None:
        return result.structured_content  # the texts say the same, for clients that know no other
    return "\n".join(texts)


def _words_of(result: mcp_types.CallToolResult) -> str:
    """What a failed call says: its texts and links, else its structured content. Its files are not read."""
    words = []
    for each in map(plain, result.content):
        if each["type"] in ("image", "audio") or "blob" in each.get("resource", ()):
            continue
        part = part_of(each)
        words.append(part if isinstance(part, str) else _as_text(part))
    if not any(words) and result.structured_content is not None:
        return _as_text(result.structured_content)
    return "\n".join(words)


def _as_text(value: Any) -> str:
    return clean_text(json.dumps(value, ensure_ascii=False))


def part_of(content: Mapping[str, Any]) -> Any:
    """One part of a result or a prompt: text, a picture, sound, a document, or what a link says."""
    match content.get("type"):
        case "text":
            return clean_text(content["text"])
        case "image" | "audio" as kind:
            return _file(content["data"], content["mimeType"], of=kind)
        case "resource":
            return resource_of(content["resource"])
        case _:
            return {name: value for name, value in content.items() if name not in ("_meta", "annotations")}


def resource_of(resource: Mapping[str, Any]) -> Any:
    """What a resource holds: its text, or its bytes as a part."""
    if "text" in resource:
        return clean_text(resource["text"])
    kind = resource.get("mimeType") or "application/octet-stream"
    return _file(resource["blob"], kind, visible(resource["uri"])[:200])


def _file(text: str, said: str, name: str = "", of: str = "") -> Media:
    """Bytes of a server as what it says they are. Raises ToolError where they are plainly not."""
    kind = said.partition(";")[0].strip().lower()
    if not _KIND.fullmatch(kind) or (of and not kind.startswith(f"{of}/")):
        raise ToolError(f"the server sent bytes of the unknown type {said!r:.80}", code="mcp_invalid_answer")
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ToolError(f"the server sent bytes that are no base64: {error}", code="mcp_invalid_answer") from None
    if not data.startswith(_BEGINS.get(kind, b"")):
        raise ToolError(f"the server sent bytes that are no {kind}", code="mcp_invalid_answer")
    media = Image if kind.startswith("image/") else Audio if kind.startswith("audio/") else Document
    return media.from_bytes(data, kind, name)


def messages_of(prompt: Iterable[mcp_types.PromptMessage]) -> list[Message]:
    """A prompt of a server as messages."""
    found = []
    for each in prompt:
        part = part_of(plain(each.content))
        found.append(Message(each.role, [Text(part) if isinstance(part, str) else part]))
    return found
