"""Gemini on Vertex AI: the same dialect, at another address, with a token of Google Cloud.

A token comes from a function of the host, from `GOOGLE_ACCESS_TOKEN`, or from the package google-auth where it is
installed: it finds the application's default credentials and renews their token.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from perdure.errors import InvalidDefinition, ProviderError
from perdure.providers.dialect import Timeouts, Wire
from perdure.providers.google import GoogleGenerate
from perdure.providers.http import HttpProvider, Key

NO_TOKEN = (
    "there is no token for 'vertex': set GOOGLE_ACCESS_TOKEN, make the provider with key=…, or install google-auth and "
    "requests, which find the default credentials of this machine"
)
SCOPE = "https://www.googleapis.com/auth/cloud-platform"


def vertex_address(project: str | None = None, location: str | None = None) -> tuple[str, str]:
    """Base URL and path of the models of a project."""
    project = project or os.environ.get("GOOGLE_CLOUD_PROJECT")
    location = location or os.environ.get("GOOGLE_CLOUD_LOCATION") or "global"
    if not project:
        raise InvalidDefinition("which project? set GOOGLE_CLOUD_PROJECT for 'vertex:…'")
    host = "aiplatform.googleapis.com" if location == "global" else f"{location}-aiplatform.googleapis.com"
    return f"https://{host}", f"/v1/projects/{project}/locations/{location}/publishers/google"


def vertex(
    model: str,
    base_url: str,
    key: Key | None,
    headers: Mapping[str, str] | None,
    timeouts: Timeouts | None = None,
    http2: bool = False,
) -> HttpProvider:
    where, prefix = vertex_address()
    return HttpProvider(
        GoogleGenerate(prefix),
        model,
        name="vertex",
        base_url=base_url or where,
        authorise=VertexToken(key),
        headers=headers,
        timeouts=timeouts,
        http2=http2,
    )


def _has_google_auth() -> bool:
    try:
        return importlib.util.find_spec("google.auth") is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


class VertexToken:
    """Puts a token of Google Cloud into requests."""

    def __init__(self, key: Key | None = None) -> None:
        self._key = key
        self._credentials: Any = None
        self._refreshing = threading.Lock()  # google-auth's credentials are not for several threads at once

    async def __call__(self, wire: Wire, url: str, body: Callable[[], AsyncIterator[bytes]]) -> Mapping[str, str]:
        token: object = self._key or os.environ.get("GOOGLE_ACCESS_TOKEN", "").strip()
        if callable(token):
            token = token()
            token = await token if inspect.isawaitable(token) else token
        if not token:
            token = await asyncio.to_thread(self._default)
        return {"authorization": f"Bearer {token}"}

    def lacking(self) -> str:
        """What is missing, in words. Whether google-auth finds credentials is known only by asking it."""
        found = self._key or os.environ.get("GOOGLE_ACCESS_TOKEN", "").strip() or _has_google_auth()
        return "" if found else NO_TOKEN

    def _default(self) -> str:
        try:
            auth, requests = map(importlib.import_module, ("google.auth", "google.auth.transport.requests"))
        except ImportError:
            raise ProviderError(NO_TOKEN, code="missing_key") from None
        with self._refreshing:
            try:
                if self._credentials is None:
                    self._credentials, _ = auth.default(scopes=[SCOPE])
                if not self._credentials.valid:
                    self._credentials.refresh(requests.Request())
            except auth.exceptions.GoogleAuthError as error:
                raise ProviderError(
                    f"Google Cloud gave no token for 'vertex': {error}", code="authentication"
                ) from None
            return str(self._credentials.token)
