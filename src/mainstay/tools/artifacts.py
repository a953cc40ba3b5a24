"""Artifacts: bytes that a tool puts under a name, for later tools of its session and for the host.

The bytes go to the store's blobs at once, and the record of the call's outcome refers to them. From then on they belong
to the session, and to every fork that has that record in its past. What was put by an attempt that is never recorded
(its process died, or it was made again) belongs to nobody and is swept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Coroutine
from typing import Any, Protocol

from mainstay.errors import ToolError, quoted
from mainstay.model.codec import MAX_VALUE, clean_text
from mainstay.model.tool import Artifact

MAX_NAME = 200


class Shelf(Protocol):
    """Where artifacts are kept, and found again once the call that put them has ended."""

    def passed(self, name: str, data: bytes, media_type: str) -> bytes:
        """The bytes as the filters of the session let them be kept. Raises ToolError where they do not."""
        ...

    async def keep(self, data: bytes) -> str: ...

    async def kept(self, artifact: Artifact) -> None:
        """These bytes have this name now."""
        ...

    async def find(self, name: str) -> Artifact | None: ...

    async def read(self, artifact: Artifact) -> bytes: ...


class Artifacts:
    """What `ctx.artifacts` is: `put` for this call, `get` for whatever the session has under a name."""

    __slots__ = ("_over", "_put", "_shelf", "_tool")

    def __init__(self, shelf: Shelf | None = None, tool: str = "", over: bool = False) -> None:
        self._shelf, self._tool, self._over = shelf or LooseShelf(), tool, over
        self._put: dict[str, Artifact] = {}

    def put(self, data: bytes | str, *, name: str, media_type: str | None = None) -> Coroutine[Any, Any, Artifact]:
        """Keep `data` under `name`; await it. A name that was used before means the new bytes from now on.

        It is part of the session when the call's outcome is recorded, whatever that is; then `get` finds it.
        """
        must_be_awaited("its artifacts", self._tool, "artifacts_need_async")
        return self._keep(data, name, media_type)

    def get(self, name: str) -> Coroutine[Any, Any, bytes]:
        """The bytes last put under `name`: by this call, or by one of the session that has ended; await it."""
        must_be_awaited("its artifacts", self._tool, "artifacts_need_async")
        return self._find(name)

    def adopt(self, artifact: Artifact) -> None:
        """Make what somebody else kept an artifact of this call too."""
        self._put[artifact.name] = artifact

    def taken(self) -> tuple[Artifact, ...]:
        """The runtime's side: what the call has put. The call is over, and nothing more is taken."""
        self._over = True
        return tuple(self._put.values())

    async def _keep(self, data: bytes | str, name: str, media_type: str | None) -> Artifact:
        kind = "application/octet-stream" if isinstance(data, bytes) else "text/plain; charset=utf-8"
        content = _content(data)
        name, kind = _name(name), clean_text(media_type or kind)
        self._must_be_open(name)
        content = _sized(self._shelf.passed(name, content, kind))
        artifact = Artifact(name, await self._shelf.keep(content), len(content), kind)
        self._must_be_open(name)
        await self._shelf.kept(artifact)
        self._put[name] = artifact
        return artifact

    async def _find(self, name: str) -> bytes:
        name = _name(name)
        found = self._put.get(name) or await self._shelf.find(name)
        if found is None:
            raise ToolError(f"there is no artifact {name!r} in this session", code="artifact_unknown")
        return await self._shelf.read(found)

    def _must_be_open(self, name: str) -> None:
        if self._over:
            raise ToolError(f"the call is over: artifact {name!r} is not kept", code="call_is_over")


def must_be_awaited(what: str, tool: str, code: str) -> None:
    """Refuse a thread: nobody could await it there, and it would be lost in silence."""
    from asyncio import get_running_loop  # noqa: PLC0415  # defining tools needs no event loop

    try:
        get_running_loop()
    except RuntimeError:
        raise ToolError(
            f"tool {tool!r} runs on a thread and cannot await {what}: declare it with `async def`", code=code
        ) from None


class LooseShelf:
    """For a context that belongs to no session, as tests of tools make them: what is put is there while it is."""

    def __init__(self) -> None:
        self._bytes: dict[str, bytes] = {}

    def passed(self, name: str, data: bytes, media_type: str) -> bytes:
        return data

    async def keep(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self._bytes[digest] = data
        return digest

    async def kept(self, artifact: Artifact) -> None:
        """Nothing to do: whoever made the context holds what was put."""

    async def find(self, name: str) -> Artifact | None:
        return None

    async def read(self, artifact: Artifact) -> bytes:
        return self._bytes[artifact.digest]


def _content(data: object) -> bytes:
    if isinstance(data, str):
        data = clean_text(data).encode()
    if not isinstance(data, bytes):
        raise ToolError(f"an artifact is bytes or a string, not a {type(data).__name__}", code="invalid_artifact")
    return _sized(data)


def _sized(data: bytes) -> bytes:
    if len(data) > MAX_VALUE:
        raise ToolError(f"the artifact has {len(data):,} bytes, the limit is {MAX_VALUE:,}", code="artifact_too_large")
    return data


def _name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise ToolError(
            f"an artifact's name is 1 to {MAX_NAME} printable characters, not {quoted(name):.80}",
            code="invalid_artifact",
        )
    return name if type(name) is str else str.__str__(name)
