"""Durable one-shot waits: their ids and the signed keys that let somebody outside resolve them.

A key is a bearer capability: the wait's id and a signature made with the store's secret. It works in any process on the
same store, for as long as the wait is open, and the first resolution wins.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

from mainstay.errors import UnknownWait, quoted
from mainstay.model.codec import decode
from mainstay.model.session import WaitRow

PREFIX = "msw1"


def wait_id(call_id: str, kind: str, attempt: int = 1) -> str:
    """A wait's id. A person who is asked about a later attempt is asked anew: an answer stands for one attempt."""
    return f"{call_id}:{kind}" if attempt <= 1 else f"{call_id}:{kind}#{attempt}"


def ending(wait: WaitRow) -> Any:
    """How a wait ended: its answer as JSON, or the word for an end without one (expired, cancelled, revoked)."""
    return wait.state if wait.answer is None else decode(wait.answer)


def sign(secret: bytes, wait: str) -> str:
    """The completion key of a wait."""
    name = base64.urlsafe_b64encode(wait.encode()).decode().rstrip("=")
    return f"{PREFIX}.{name}.{_signature(secret, wait)}"


def verify(secret: bytes, key: str) -> str:
    """The wait behind a key. A forged, mangled or foreign key is unknown, and nothing more is said."""
    try:
        _, name, _ = key.split(".")
        wait = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
        # The whole key is compared: base64 reads several spellings as the same bytes.
        genuine = hmac.compare_digest(key.encode(), sign(secret, wait).encode())
    except (ValueError, AttributeError, TypeError):
        genuine, wait = False, ""
    if not genuine:
        raise UnknownWait(key if type(key) is str else quoted(key))
    return wait


def _signature(secret: bytes, wait: str) -> str:
    digest = hmac.new(secret, wait.encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest[:24]).decode()
