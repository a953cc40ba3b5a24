"""OAuth is the SDK's: discovery, PKCE and refresh, with the tokens where the host keeps them and nowhere else."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from mcp.client.auth import OAuthClientProvider
from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull, OAuthClientMetadata, OAuthToken
from pydantic import AnyUrl

from perdure.mcp import McpServer
from perdure.model.tool import Ok
from tests.kit import Place, agent_calling
from tests.mcp.test_http_hostile import JSON, Evil, Send, echoed, serving

SECRETS = ("first-access", "second-access", "refresh-s3cret", "client-s3cret")


class Kept:
    """The host's own storage of tokens."""

    def __init__(self) -> None:
        self.tokens: OAuthToken | None = None
        self.client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


class Guarded:
    """An MCP server and its authorization server at one address. `granted` are the kinds of grants, in their order."""

    def __init__(self, evil: Evil) -> None:
        self.evil = evil
        self.challenge, self.token, self.base = "", "", ""
        self.granted: list[str] = []

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.base = f"http://{headers['host']}"
        path = scope["path"]
        if path == "/mcp":
            if headers.get("authorization") == f"Bearer {self.token}" and self.token:
                return await self.evil.app(scope, receive, send)
            where = f'Bearer resource_metadata="{self.base}/.well-known/oauth-protected-resource/mcp"'
            return await self._say(send, 401, b"<h1>who?</h1>", ("www-authenticate", where), kind="text/html")
        body = (await receive()).get("body", b"")
        if path == "/.well-known/oauth-protected-resource/mcp":
            found: dict[str, Any] = {"resource": f"{self.base}/mcp", "authorization_servers": [self.base]}
        elif path == "/.well-known/oauth-authorization-server":
            found = {
                "issuer": self.base,
                "authorization_endpoint": f"{self.base}/authorize",
                "token_endpoint": f"{self.base}/token",
                "registration_endpoint": f"{self.base}/register",
                "response_types_supported": ["code"],
                "code_challenge_methods_supported": ["S256"],
            }
        elif path == "/register":
            found = json.loads(body) | {"client_id": "us", "client_secret": "client-s3cret"}
        elif path == "/token":
            found = self._grant({name: values[0] for name, values in parse_qs(body.decode()).items()})
        else:
            return await self._say(send, 404, b"{}")
        await self._say(send, 201 if path == "/register" else 200, json.dumps(found).encode())

    def _grant(self, asked: dict[str, str]) -> dict[str, Any]:
        self.granted.append(asked["grant_type"])
        if asked["grant_type"] == "authorization_code":
            digest = hashlib.sha256(asked["code_verifier"].encode()).digest()
            assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == self.challenge
            self.token, lasts = "first-access", 0
        else:
            assert asked["refresh_token"] == "refresh-s3cret"
            self.token, lasts = "second-access", 3600
        return {
            "access_token": self.token, "token_type": "Bearer", "expires_in": lasts, "refresh_token": "refresh-s3cret",
        }  # fmt: skip

    @staticmethod
    async def _say(send: Any, status: int, body: bytes, *more: tuple[str, str], kind: str = JSON) -> None:
        headers = [(name.encode(), value.encode()) for name, value in (("content-type", kind), *more)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place("sqlite", tmp_path)


async def test_server_behind_oauth_is_called_and_no_token_is_stored(place: Place) -> None:
    async def echo(evil: Evil, asked: Any, send: Send) -> None:
        await send(200, JSON, echoed(asked["id"]), False)

    guarded, kept = Guarded(Evil(echo)), Kept()
    state = ""

    async def opens(url: str) -> None:
        nonlocal state
        query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        guarded.challenge, state = query["code_challenge"], query["state"]

    async def comes_back() -> AuthorizationCodeResult:
        return AuthorizationCodeResult(code="code", state=state)

    async with serving(guarded.app) as url:

        def server() -> McpServer:
            about = OAuthClientMetadata(client_name="perdure", redirect_uris=[AnyUrl("http://localhost:9/back")])
            return McpServer("evil", url=url, auth=OAuthClientProvider(url, about, kept, opens, comes_back))

        async with place.runtime(agent_calling("mcp__evil__echo"), mcp=[server()]) as runtime:
            first = await (await runtime.session("s")).run("go")
        async with place.runtime(agent_calling("mcp__evil__echo"), mcp=[server()]) as runtime:
            second = await (await runtime.session("t")).run("go")
            shown = repr([runtime.mcp.status(), runtime.mcp.attached["evil"].server])

    assert [each.tool_calls[0].outcome for each in (first, second)] == [Ok("hi")] * 2
    assert guarded.granted == ["authorization_code", "refresh_token"]  # the second Runtime has what the host kept
    assert kept.tokens is not None
    assert kept.tokens.access_token == "second-access"
    for file in place.path.parent.rglob("*"):
        data = file.read_bytes() if file.is_file() else b""
        assert not [secret for secret in SECRETS if secret.encode() in data], file
    assert not [secret for secret in SECRETS if secret in shown]
