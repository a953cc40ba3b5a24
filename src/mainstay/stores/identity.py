"""The random id of a store, by which its idempotency keys differ from those of every other store."""

from __future__ import annotations

import base64
import secrets


def mint() -> str:
    """A new id: 64 random bits as 13 letters and digits. Short, because the record of every call's start holds it."""
    return base64.b32encode(secrets.token_bytes(8)).decode().rstrip("=").lower()
