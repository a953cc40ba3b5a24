"""Ids. A child's id is its parent's id and an ordinal, so ids sort in the order things happened.

    session  chat-1            chosen by the host, or minted
    turn     chat-1.7          the seventh input of the session, and the turn that it opens
    node     chat-1.7.2        the third record of that turn
    call     chat-1.7.1.0      the first tool call of the first model reply of that turn

A session id may itself contain dots: ids are read from the right.
"""

from __future__ import annotations

from perdure.errors import InvalidSessionId, UnknownTurn

MAX_SESSION_ID = 200
MAX_TURN = 2**20 - 1
"""The last input of a session."""
MAX_ORDINAL = 2**16 - 1
"""The last record of a turn."""


def turn_id(session_id: str, turn: int) -> str:
    return f"{session_id}.{turn}"


def node_id(session_id: str, turn: int, ordinal: int) -> str:
    return f"{session_id}.{turn}.{ordinal}"


def call_id(turn: str, step: int, index: int) -> str:
    return f"{turn}.{step}.{index}"


def split(text: str, parts: int) -> tuple[str, tuple[int, ...]]:
    """`split("chat-1.7.2", 2)` is `("chat-1", (7, 2))`: the session and the ordinals after it."""
    if not isinstance(text, str):
        raise UnknownTurn(text)
    head, *ordinals = text.rsplit(".", parts)
    if len(ordinals) != parts or not head or not all(o.isascii() and o.isdigit() and len(o) < 16 for o in ordinals):
        raise UnknownTurn(text)
    return head, tuple(map(int, ordinals))


def call_in(session_id: str, text: str) -> tuple[int, str]:
    """The turn and the key of a call of that session: `call_in("chat-1", "chat-1.7.2.0")` is `(7, "2.0")`.

    A call of a call has one number more. Without the session it could not be told from a call of another session, whose
    id ends in a number.
    """
    if not isinstance(text, str):
        raise UnknownTurn(text)
    if text.startswith(f"{session_id}."):
        numbers = text[len(session_id) + 1 :].split(".")
        if len(numbers) in (3, 4) and all(each.isascii() and each.isdigit() and len(each) < 16 for each in numbers):
            turn, *key = map(int, numbers)
            return turn, ".".join(map(str, key))
    raise UnknownTurn(text)


def check_session_id(session_id: object) -> str:
    """The id itself when a session may carry it; it ends up in keys, logs and links."""
    if not isinstance(session_id, str) or not 0 < len(session_id) <= MAX_SESSION_ID or not session_id.isprintable():
        raise InvalidSessionId(session_id)
    if session_id != session_id.strip():
        raise InvalidSessionId(session_id)
    # An enum of strings is its value: its name, which `format` would show, is in no row.
    return session_id if type(session_id) is str else str.__str__(session_id)


def mint(prefix: str, millis: int, noise: int) -> str:
    """An id that sorts by time: eleven digits of milliseconds, then ten of `noise`, which has 40 bits."""
    return f"{prefix}-{millis:011x}{noise:010x}"
