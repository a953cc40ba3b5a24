"""Durable one-shot waits: their ids and the signed keys that let somebody outside resolve them.

A key is a bearer capability: the wait's id and a signature made with the store's secret. It works in any process on the
same store, for as long as the wait is open, and the first resolution wins.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

from mainstay.errors import UnknownWait

PREFIX = "msw1"


def wait_id(call_id: str, kind: str) -> str:
    return f"{call_id}:{kind}"


def sign(secret: bytes, wait: str) -> str:
    """The completion key of a wait."""
    name = base64.urlsafe_b64encode(wait.encode()).decode().rstrip("=")
    return f"{PREFIX}.{name}.{_signature(secret, wait)}"


def verify(secret: bytes, key: str) -> str:
    """The wait behind a key. A forged, mangled or foreign key is unknown, and nothing more is said."""
    try:
        prefix, name, signature = key.split(".")
        wait = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
    except (ValueError, AttributeError):
        raise UnknownWait(str(key)) from None
    if prefix != PREFIX or not hmac.compare_digest(signature.encode(), _signature(secret, wait).encode()):
        raise UnknownWait(key)
    return wait


def _signature(secret: bytes, wait: str) -> str:
    digest = hmac.new(secret, wait.encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest[:24]).decode()
