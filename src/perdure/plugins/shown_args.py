"""The arguments of a call as those who watch see them: plugins, live events, `perdure show`.

A set of tools that knows where its arguments hold secrets (`HidesSecrets`) puts marks in their place. Its calls run
with the real arguments, the journal keeps these, and a person who approves a call is shown them. What a plugin gives as
new arguments has the secrets put back where it left their marks.
"""

from __future__ import annotations

import logging
from typing import Any

from perdure.model.codec import clean, copied
from perdure.model.secrets import Marks
from perdure.model.tool import PreparedCall, ToolSpec
from perdure.ports.tool import HidesSecrets

log = logging.getLogger("perdure.plugins")


class ShownArgs:
    """What is shown of the arguments of one call. `key` is that of the store: marks are the same in all its workers."""

    __slots__ = ("_call_id", "_last", "_marks", "_provider", "_spec")

    def __init__(self, provider: HidesSecrets, spec: ToolSpec, call_id: str, key: bytes) -> None:
        self._provider, self._spec, self._call_id, self._marks = provider, spec, call_id, Marks(key)
        self._last: tuple[dict[str, Any], dict[str, Any]] | None = None

    def shown(self, args: dict[str, Any]) -> dict[str, Any]:
        """The arguments with marks in place of secrets. Where their set fails to tell, all of them are hidden."""
        if self._last is not None and self._last[0] == args:  # plugins, the record and events see the same
            return args if self._last[1] is self._last[0] else self._last[1]
        found = self._asked(args)
        self._last = (args, found)
        return found

    def _asked(self, args: dict[str, Any]) -> dict[str, Any]:
        call = PreparedCall(self._call_id, self._spec.tool_id, self._spec.name, copied(args))
        try:
            found = clean(dict(self._provider.shown_args(call, self._marks)))
        except Exception as error:  # code of a set of tools, which may raise anything: what it would hide stays hidden
            log.warning("what tool %s hides is not known: %s", self._spec.name, type(error).__name__)
            return {name: self._marks.mark(each if isinstance(each, str) else "") for name, each in args.items()}
        return args if found == args else found

    def seen(self, args: dict[str, Any]) -> dict[str, Any]:
        """Arguments that a plugin gave, as the next one sees them."""
        return self.shown(self.restored(args))

    def restored(self, args: dict[str, Any]) -> dict[str, Any]:
        """Arguments that a plugin gave, with the secrets that it was not shown."""
        found: dict[str, Any] = self._marks.restore(args)
        return found
