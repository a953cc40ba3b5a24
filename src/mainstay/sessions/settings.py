"""Changing what was decided for a session: its row is replaced only if nobody else has changed it meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from msgspec.structs import replace

from mainstay.errors import StaleSettings
from mainstay.model.llm import ModelChoice
from mainstay.model.session import SessionRow, Settings, choosing, dump_settings, load_settings
from mainstay.model.write import Configure
from mainstay.ports.host import Clock
from mainstay.ports.store import Store

SettingsEdit: TypeAlias = Callable[[Settings, SessionRow], Settings]
"""The settings of a session as an edit leaves them, from those in its row."""


async def edit_settings(store: Store, clock: Clock, session_id: str, agent: str, edit: SettingsEdit) -> None:
    """Make an edit durable, on top of whatever others have changed meanwhile."""
    while True:
        row = await store.session(session_id) or SessionRow(0, session_id, agent)
        wanted = dump_settings(edit(load_settings(row.settings), row))
        if wanted == row.settings:
            return
        try:
            await store.write(Configure(session_id, agent, wanted, clock.now(), row.settings, next=row.next))
        except StaleSettings:
            continue
        return


def with_options(options: Mapping[str, Any]) -> SettingsEdit:
    """The edit that sets options of plugins. They are durable because recovery has no host code to ask for them."""
    return lambda old, _: replace(old, options=old.options | dict(options))


def with_choice(choice: ModelChoice | None, reset: bool) -> SettingsEdit:
    """The edit that sets which model is asked by turns whose input is accepted from now on; over what was chosen
    before, unless that is `reset`."""

    def edit(old: Settings, row: SessionRow) -> Settings:
        before, wanted = None if reset else old.choice, choice
        if wanted is None or before is None:
            wanted = wanted or before
        else:
            settings = before.settings if wanted.settings is None else wanted.settings.over(before.settings)
            wanted = ModelChoice(wanted.model or before.model, settings)
        return choosing(old, wanted, row.next if row.turn is None else row.turn, row.next)

    return edit
