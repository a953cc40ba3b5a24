"""A host whose agent calls every tool of one MCP server: what the conformance suite drives as a client.

    python -m tests.mcp.conforming_client http://127.0.0.1:PORT/mcp

The suite names its scenario, and gives what that needs, in the environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
from mcp.client.auth import OAuthClientProvider
from mcp.client.auth.extensions.client_credentials import (
    ClientCredentialsOAuthProvider,
    PrivateKeyJWTOAuthProvider,
    SignedJWTParameters,
)
from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull, OAuthClientMetadata
from pydantic import AnyUrl

from perdure import Agent, ModelRequest, Runtime, ToolCall
from perdure.mcp import Elicitation, McpServer
from perdure.testing import FunctionModel
from tests.mcp.test_oauth import Kept

BACK = AnyUrl("http://localhost:9/back")
ABOUT = "https://conformance-test.local/client-metadata.json"
VALUES = {"integer": 5, "number": 5, "string": "five", "boolean": True, "array": [], "object": {}}


def auth(url: str, given: dict[str, Any]) -> Any:
    """How this scenario wants to be signed in: what a host makes with the SDK."""
    kept, came_back = Kept(), AuthorizationCodeResult(code="", state=None)
    if "private_key_pem" in given:
        signed = SignedJWTParameters(
            issuer=given["client_id"],
            subject=given["client_id"],
            signing_algorithm=given.get("signing_algorithm", "ES256"),
            signing_key=given["private_key_pem"],
        )
        return PrivateKeyJWTOAuthProvider(url, kept, given["client_id"], signed.create_assertion_provider())
    if "client_secret" in given and os.environ["MCP_CONFORMANCE_SCENARIO"] == "auth/client-credentials-basic":
        return ClientCredentialsOAuthProvider(url, kept, given["client_id"], given["client_secret"])
    if "client_secret" in given:
        kept.client = OAuthClientInformationFull(
            client_id=given["client_id"],
            client_secret=given["client_secret"],
            redirect_uris=[BACK],
            token_endpoint_auth_method="client_secret_basic",
        )

    async def opens(where: str) -> None:
        """A person who agrees at once."""
        nonlocal came_back
        async with httpx2.AsyncClient() as http:
            answer = await http.get(where, follow_redirects=False)
        query = parse_qs(urlsplit(answer.headers["location"]).query)
        came_back = AuthorizationCodeResult(
            code=query["code"][0], state=query.get("state", [None])[0], iss=query.get("iss", [None])[0]
        )

    async def comes_back() -> AuthorizationCodeResult:
        return came_back

    about = OAuthClientMetadata(client_name="perdure", redirect_uris=[BACK])
    return OAuthClientProvider(url, about, kept, opens, comes_back, client_metadata_url=ABOUT)


async def defaults(asked: Elicitation) -> dict[str, Any]:
    """A person who leaves everything as it is offered."""
    offered = ({} if asked.schema is None else asked.schema).get("properties", {})
    return {name: each["default"] for name, each in offered.items() if "default" in each}


def calls_everything(request: ModelRequest) -> str | list[ToolCall]:
    if request.messages[-1].role == "tool":
        return "Done."
    return [
        ToolCall(
            name=tool.name,
            args={
                name: VALUES[each.get("type", "string")]
                for name, each in tool.input_schema.get("properties", {}).items()
            },
        )
        for tool in request.tools
    ]


async def main(url: str) -> int:
    scenario = os.environ["MCP_CONFORMANCE_SCENARIO"]
    given = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}")
    signs_in = auth(url, given) if scenario.startswith("auth/") else None
    server = McpServer("suite", url=url, auth=signs_in, elicit=defaults)
    agent = Agent(FunctionModel(calls_everything), name="host")
    async with Runtime("memory", agents=[agent], mcp=[server]) as runtime:
        result = await (await runtime.session("s")).run("Call everything.")
        print(runtime.mcp.status(), [(each.tool, each.outcome) for each in result.tool_calls], file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[-1])))
