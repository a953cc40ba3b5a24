"""Filters of what comes in: plugins change what is said to an agent before anything of it is stored.

    said ──┬── transform_input of each plugin, in order ──▶ what the last one returns is accepted
           └── HMAC of it as it was said ────────────────▶ what the same key must come with again

Everything that is said from outside passes here: inputs, what a host starts an agent with and signals to it, reasons of
answers. What turns, tools and plugins say themselves was stored before it was said, and does not.

Filters belong to an agent, and run wherever an input for it is taken in. A Runtime that does not have the agent knows
from the rows of workers, or from sessions that have such inputs, that it is filtered, and refuses inputs for it unless
it was given the filters. Until the last filter has answered nothing is written: whatever goes wrong before that, and
wherever the process dies, there is no input.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from perdure.engine.lease import Worker
from perdure.errors import InputFilterMissing, InvalidDefinition, InvalidInput, PluginFault, quoted
from perdure.model import validate
from perdure.model.codec import clean_message, encode
from perdure.model.message import FILES, InputContent, Message, Metadata, Scalar
from perdure.model.session import load_settings
from perdure.model.write import SessionFilter
from perdure.plugins import calls
from perdure.plugins.calls import Hooks
from perdure.plugins.hooks import InputContext, InputSource, Plugin
from perdure.plugins.registry import PluginSet, overrides
from perdure.ports.store import Store
from perdure.sessions.definition import Definition
from perdure.tools.output import saved

HOOK = "transform_input"
DIGEST_CONTEXT = b"mainstay input\0"
"""Part of every stored digest: the project's old name stays, or a repeated input would not match its digest."""
LEAST_SECRET = 16
"""Bytes of `Runtime(input_secret=…)`: shorter ones can be tried out."""
NEWEST = 20
"""Sessions of an agent that are looked at to tell whether it is filtered, while no worker lives that has it."""


class FilteredInput(Struct, frozen=True):
    """What filters have left of an input, and a digest of it as it was said; `before` is the digest that it would have
    without filters. Both are empty where the input has no key."""

    message: Message
    digest: bytes = b""
    before: bytes = b""


class InputFilters:
    """The filters that a Runtime has: those of its agents, and those that it was given for agents of other workers.

    `unfiltered` are its own agents without any: what is said to them needs nothing of this.
    """

    def __init__(
        self,
        definitions: Mapping[str, Definition],
        given: Mapping[str, PluginSet],
        secret: bytes | None,
        store: Store,
        worker: Worker,
    ) -> None:
        own = {name: definition.plugins for name, definition in definitions.items()}
        self._hooks = {name: plugins.hooks(HOOK) for name, plugins in {**given, **own}.items()}
        self.unfiltered = frozenset([name for name in own if not self._hooks[name]])
        self._secret, self._store, self._worker = secret, store, worker

    async def passed(  # noqa: PLR0913  # what an input is, each by its place
        self,
        session_id: str,
        agent: str,
        said: InputContent,
        kind: InputSource,
        metadata: Mapping[str, Scalar] | None = None,
        of_session: Mapping[str, Scalar] | None = None,
        *,
        unsaved: bool = True,
    ) -> Message | None:
        """What filters leave of something that is said; None where there are no filters. `unsaved`: its files may be
        where the host has them. Raises PluginFault where a filter fails, InvalidInput where one refuses the input."""
        hooks = await self._found(agent, session_id)
        if not hooks:
            return None
        row = await self._store.session(session_id) if session_id else None
        known = of_session or {} if row is None else row.metadata
        ctx = InputContext(session_id, agent, kind, metadata=Metadata({**known, **(metadata or {})}))
        message = clean_message(said, unsaved=unsaved)

        def read(plugin: Plugin, answer: Any) -> Message:
            try:
                return clean_message(answer, unsaved=unsaved)
            except InvalidInput:
                # Not in the words of the refusal: they are about what it was to hide.
                what = f"it returned a {type(answer).__name__}, and nothing that can be said: return text or a Message"
                raise PluginFault(plugin.id, HOOK, what) from None

        try:
            return await calls.pipe(hooks, message, lambda _, current: (ctx, current), read)
        except PluginFault as fault:
            if isinstance(fault.__cause__, InvalidInput):
                raise fault.__cause__ from None
            # A new one, without its cause: a host logs what it gets, and the cause may quote the input.
            raise PluginFault(fault.plugin, fault.hook, fault.what) from None

    async def text(self, session_id: str, agent: str, text: str) -> str:
        """What filters leave of the reason that a person gives with an answer."""
        if not text or agent in self.unfiltered:
            return text
        message = await self.passed(session_id, agent, text, "answer")
        return text if message is None else message.text

    async def _found(self, agent: str, session_id: str) -> Hooks | None:
        """The filters of an agent. Raises InputFilterMissing where it has some, and this Runtime has not."""
        hooks = self._hooks.get(agent)
        if hooks is not None:
            return hooks
        offers = await self._worker.offered_elsewhere()
        if any(agent in each.input_filters for each in offers):
            raise InputFilterMissing(agent, session_id)
        if not any(agent in each.agents for each in offers):
            newest = await self._store.sessions(SessionFilter(agent=agent, limit=NEWEST))
            if any(load_settings(row.settings).filtered for row in newest):
                raise InputFilterMissing(agent, session_id)
        return None

    # ------------------------------------------------------------------ digests

    async def digest(self, content: Any) -> bytes:
        """The digest of what was said as it was: under the host's secret, or under that of the store, which whoever has
        the file has too."""
        key = self._secret if self._secret is not None else await self._store.secret()
        return hmac.digest(key, DIGEST_CONTEXT + encode(content), "sha256")[:16]


async def with_digests(message: Message) -> Message:
    """The message with its files as the store would have them, which gets nothing of them."""
    if not any(isinstance(part, FILES) for part in message.parts):
        return message
    parts = [await saved(p, _digest_of, _digest_of_file) if isinstance(p, FILES) else p for p in message.parts]
    return Message(message.role, tuple(parts))


async def _digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def _digest_of_file(path: str) -> tuple[str, int]:
    from perdure.stores.blobs import host_pieces  # noqa: PLC0415  # most programs say no files, and filter none

    def read() -> tuple[str, int]:
        digest, size = hashlib.sha256(), 0
        for piece in host_pieces(path):
            digest.update(piece)
            size += len(piece)
        return digest.hexdigest(), size

    return await asyncio.to_thread(read)


# ---------------------------------------------------------------------- what a Runtime is given


def checked_filters(given: Any, agents: Iterable[str]) -> dict[str, PluginSet]:
    """`Runtime(input_filters=…)`: by the name of an agent of other workers, a plugin or several."""
    if not isinstance(given, Mapping):
        raise InvalidDefinition(
            f"input_filters={quoted(given)} is not usable: give a dict of agents' names and plugins"
        )
    own, found = frozenset(agents), dict[str, PluginSet]()
    for name, plugins in given.items():
        agent, place = validate.name(name, "agent", InvalidDefinition), f"input_filters[{quoted(name)}]"
        if agent in own:
            raise InvalidDefinition(f"{place}: this Runtime has the agent, and so its plugins: leave it out")
        found[agent] = PluginSet([plugins] if isinstance(plugins, Plugin) else plugins)
        if not found[agent]:
            raise InvalidDefinition(f"{place} has no plugin: give those of the agent that have {HOOK}")
        for plugin in found[agent].plugins:
            if not overrides(plugin, HOOK):
                raise InvalidDefinition(f"{place}: plugin {plugin.id!r} has no {HOOK}: leave it out")
    return found


def checked_secret(given: Any) -> bytes | None:
    """`Runtime(input_secret=…)`."""
    secret = given.encode() if isinstance(given, str) else given
    if secret is not None and not (isinstance(secret, bytes) and len(secret) >= LEAST_SECRET):
        raise InvalidDefinition(
            f"input_secret is not usable: give {LEAST_SECRET} random bytes or more, from where you keep secrets"
        )
    return secret
