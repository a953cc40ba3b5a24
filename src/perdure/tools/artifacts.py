"""Artifacts: bytes that a tool puts under a name, for later tools of its session and for the host.

The bytes go to the store's blobs at once, and the record of the call's outcome refers to them. From then on they belong
to the session, and to every fork that has that record in its past. What was put by an attempt that is never recorded
(its process died, or it was made again) has no owner and is swept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from perdure.errors import ToolError, quoted
from perdure.model.codec import MAX_VALUE, clean_text
from perdure.model.record import Ended, Record
from perdure.model.session import SessionRow
from perdure.model.tool import Artifact
from perdure.ports.store import Store

if TYPE_CHECKING:  # defining tools needs no event loop, and these bring one
    from perdure.engine.driver import Run
    from perdure.plugins.turn import TurnPlugins

MAX_NAME = 200
TURNS_AT_ONCE = 64
"""History is searched so many turns at a time, from the newest back."""


class ArtifactStore(Protocol):
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

    __slots__ = ("_over", "_put", "_store", "_tool")

    def __init__(self, store: ArtifactStore | None = None, tool: str = "", over: bool = False) -> None:
        self._store, self._tool, self._over = store or MemoryArtifacts(), tool, over
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
        """Make an artifact of this call of what is kept already."""
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
        content = _sized(self._store.passed(name, content, kind))
        artifact = Artifact(name, await self._store.keep(content), len(content), kind)
        self._must_be_open(name)
        await self._store.kept(artifact)
        self._put[name] = artifact
        return artifact

    async def _find(self, name: str) -> bytes:
        name = _name(name)
        found = self._put.get(name) or await self._store.find(name)
        if found is None:
            raise ToolError(f"there is no artifact {name!r} in this session", code="artifact_unknown")
        return await self._store.read(found)

    def _must_be_open(self, name: str) -> None:
        if self._over:
            raise ToolError(f"the call is over: artifact {name!r} is not kept", code="call_is_over")


def must_be_awaited(what: str, tool: str, code: str) -> None:
    """Refuse a thread: a coroutine cannot be awaited there, and would be lost in silence."""
    from asyncio import get_running_loop  # noqa: PLC0415  # defining tools needs no event loop

    try:
        get_running_loop()
    except RuntimeError:
        raise ToolError(
            f"tool {tool!r} runs on a thread and cannot await {what}: declare it with `async def`", code=code
        ) from None


class MemoryArtifacts:
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
        """Nothing to do: there is no record that would tell of it."""

    async def find(self, name: str) -> Artifact | None:
        return None

    async def read(self, artifact: Artifact) -> bytes:
        return self._bytes[artifact.digest]


class SessionArtifacts:
    """The artifacts of a session, as a call of a running turn of it sees them."""

    def __init__(self, store: Store, run: Run, plugins: TurnPlugins | None, call_id: str, tool: str) -> None:
        self._store, self._run, self._plugins, self._call_id, self._tool = store, run, plugins, call_id, tool

    def passed(self, name: str, data: bytes, media_type: str) -> bytes:
        filters = None if self._plugins is None else self._plugins.filters
        if filters is None:
            return data
        return filters.content("artifact", self._call_id, self._tool, name, data, media_type)

    async def keep(self, data: bytes) -> str:
        return await self._run.journal.keep(data)

    async def kept(self, artifact: Artifact) -> None:
        """Nothing to do: the record of the call's outcome tells of it."""

    async def read(self, artifact: Artifact) -> bytes:
        return await self._store.blobs.get(artifact.digest)

    async def find(self, name: str) -> Artifact | None:
        """The newest of that name: in this turn, in those before it, then in what the session was forked from."""
        found = _newest(self._run.records, name)
        if found is None:
            row = await self._store.session_by_sid(self._run.scope.sid)
            found = await in_the_past(self._store, row, self._run.scope.turn - 1, name)
        return found


async def in_the_past(store: Store, row: SessionRow | None, last: int, name: str) -> Artifact | None:
    """The newest of that name in the turns of a session up to `last`, then in what it was forked from."""
    ordinal = None
    while row is not None:
        found = await _search(store, row.sid, last, ordinal, name)
        if found is not None or row.fork is None:
            return found
        last, ordinal = row.fork.turn, row.fork.ordinal
        row = await store.session_by_sid(row.fork.sid)
    return None


async def _search(store: Store, sid: int, last: int, ordinal: int | None, name: str) -> Artifact | None:
    """Turns 1 to `last`, of the last one only up to record `ordinal`, if given."""
    from perdure.engine.journal import load_turns  # noqa: PLC0415  # defining tools needs no event loop

    for end in range(last, 0, -TURNS_AT_ONCE):
        for turn in reversed(await load_turns(store, sid, max(end - TURNS_AT_ONCE + 1, 1), end)):
            whole = ordinal is None or turn.number != last
            found = _newest(turn.records if whole else turn.records[: (ordinal or 0) + 1], name)
            if found is not None:
                return found
    return None


def _newest(records: Iterable[Record], name: str) -> Artifact | None:
    ended = [r for r in records if isinstance(r, Ended)]
    return next((a for r in reversed(ended) for a in reversed(r.artifacts) if a.name == name), None)


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
