"""An MCP server with one tool, `book`, which asks for a time. It uses the standard library alone, and never changes."""

from __future__ import annotations

import json
import sys
from typing import Any

COMPLETE = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
BOOK = {
    "name": "book",
    "description": "Book a table.",
    "inputSchema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
WANTED = {"type": "object", "properties": {"time": {"type": "string"}}, "required": ["time"]}
FORM = {"mode": "form", "message": "At which time?", "requestedSchema": WANTED}


def result(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "server/discover":
        told = {"io.modelcontextprotocol/serverInfo": {"name": "tables", "version": "1"}}
        return {**COMPLETE, "supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, "_meta": told}
    if method == "tools/list":
        return {**COMPLETE, "tools": [BOOK]}
    if method != "tools/call":
        return {}
    answers = params.get("inputResponses")
    if answers is None:
        asked = {"when": {"method": "elicitation/create", "params": FORM}}
        return {"resultType": "input_required", "inputRequests": asked, "requestState": params["arguments"]["place"]}
    booked = f"{params['requestState']} at {answers['when']['content']['time']}"
    return {**COMPLETE, "content": [{"type": "text", "text": booked}]}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        answer = result(message["method"], message.get("params") or {})
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": answer}), flush=True)
