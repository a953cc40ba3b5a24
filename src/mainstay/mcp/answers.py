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
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import anyio
import httpx2
import mcp_types
from mcp import MCPError
from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR, PARSE_ERROR, REQUEST_TIMEOUT
from pydantic import BaseModel, ValidationError

from mainstay.errors import ToolError
from mainstay.mcp.listing import visible
from mainstay.mcp.server import McpServer
from mainstay.model.codec import clean_text, error_text
from mainstay.model.message import Audio, Document, Image, Message, Text
from mainstay.model.tool import OutcomeUnknown
from mainstay.tools.attempt import EndsAs

UNSEEN = frozenset({CONNECTION_CLOSED, REQUEST_TIMEOUT})
MADE_UP = frozenset({INTERNAL_ERROR, PARSE_ERROR})
"""Codes that the SDK answers with itself, where a request over HTTP had no usable answer."""
LONGEST_TEXT = 4000


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
        raise ToolError(_said(error.message), code="mcp_error", data={"code": error.code}) from None
    except (ValidationError, RuntimeError) as error:  # the SDK refuses what fits neither the protocol nor the schema
        raise ToolError(
            f"the call was made, and MCP server {server.name} answered with what is no result: {_said(str(error))}",
            code="mcp_invalid_answer",
        ) from None
    except (anyio.ClosedResourceError, anyio.BrokenResourceError, httpx2.HTTPError, OSError) as error:
        raise EndsAs(_unknown(server, error_text(error))) from None


def _unknown(server: McpServer, why: str) -> OutcomeUnknown:
    return OutcomeUnknown(f"MCP server {server.name} was lost while the call ran ({_said(why)}); it may have been done")


def _said(text: str) -> str:
    return visible(text)[:LONGEST_TEXT]


def value_of(result: mcp_types.CallToolResult) -> Any:
    """What a call returned. Raises ToolError where the server marked it as an error."""
    parts = [part_of(plain(each)) for each in result.content]
    texts = [part for part in parts if isinstance(part, str)]
    if result.is_error:
        raise ToolError("\n".join(texts)[:LONGEST_TEXT] or "it failed without a word", code="mcp_tool_error")
    if len(texts) < len(parts):
        return [*([] if result.structured_content is None else [result.structured_content]), *parts]
    if result.structured_content is not None:
        return result.structured_content  # the texts say the same, for clients that know no other
    return "\n".join(texts)


def part_of(content: Mapping[str, Any]) -> Any:
    """One part of a result or a prompt: text, a picture, sound, a document, or what a link says."""
    match content.get("type"):
        case "text":
            return clean_text(content["text"])
        case "image":
            return Image.from_bytes(_bytes(content["data"]), content["mimeType"])
        case "audio":
            return Audio.from_bytes(_bytes(content["data"]), content["mimeType"])
        case "resource":
            return resource_of(content["resource"])
        case _:
            return {name: value for name, value in content.items() if name not in ("_meta", "annotations")}


def resource_of(resource: Mapping[str, Any]) -> Any:
    """What a resource holds: its text, or its bytes as a part."""
    if "text" in resource:
        return clean_text(resource["text"])
    data, kind = _bytes(resource["blob"]), resource.get("mimeType") or "application/octet-stream"
    media = Image if kind.startswith("image/") else Audio if kind.startswith("audio/") else Document
    return media.from_bytes(data, kind, clean_text(resource["uri"])[:200])


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ToolError(f"the server sent bytes that are no base64: {error}", code="mcp_invalid_answer") from None


def messages_of(prompt: Iterable[mcp_types.PromptMessage]) -> list[Message]:
    """A prompt of a server as messages."""
    found = []
    for each in prompt:
        part = part_of(plain(each.content))
        found.append(Message(each.role, [Text(part) if isinstance(part, str) else part]))
    return found
