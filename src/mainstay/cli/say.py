"""`mainstay send` and `mainstay steer`: something said to a session that somebody else runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from mainstay.cli.host import JsonOption, StoreOption, deciding, find, is_helped, perform, say_when
from mainstay.cli.render import console, print_json, text_line
from mainstay.cli.run import KeyOption, PromptArgument, what_is_said
from mainstay.cli.sessions import SessionArgument
from mainstay.sessions.session import Receipt, Session


def send(
    session: SessionArgument,
    prompt: PromptArgument = None,
    key: KeyOption = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Say something to a session, for whoever runs its agent: a turn after what was said before."""
    example = f"mainstay send {session} 'your question'"
    _say(session, store, json, lambda s: s.send(what_is_said(prompt, example), key=key))


def steer(
    session: SessionArgument,
    prompt: PromptArgument = None,
    key: KeyOption = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Say something to the running turn of a session: it arrives at its next boundary. With none, it opens one."""
    example = f"mainstay steer {session} 'what to mind'"
    _say(session, store, json, lambda s: s.steer(what_is_said(prompt, example), key=key))


def _say(session: str, store: str | None, json: bool, say: Callable[[Session], Awaitable[Receipt]]) -> None:
    async def work() -> int:
        async with deciding(store) as runtime:
            row = await find(runtime.store, session)
            receipt = await say(await runtime.session(session))
            helped = await is_helped(runtime, row.owner)
        if json:
            print_json({"session_id": session, "input_id": receipt.turn_id, "known": receipt.known})
        else:
            text_line(console(), f"{'known before' if receipt.known else 'accepted'}: {receipt.turn_id}", "green")
            say_when(f"agent {row.agent!r}", helped)
        return 0

    perform(work, json)
