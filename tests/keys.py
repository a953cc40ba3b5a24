"""Idempotency keys, as tests compare them."""

from __future__ import annotations

from perdure.testing.crash import CallEnding, Played


def within_store(key: str) -> str:
    """The part of an idempotency key after the id of its store, which is another one in every run."""
    store, _, rest = key.partition(".")
    assert len(store) == 13, f"{key!r} does not begin with the id of a store"
    return rest


def happened(played: Played, call: CallEnding) -> int:
    """How often the effect of a call happened, by its idempotency key."""
    return sum(count for (name, key), count in played.effects.items() if (name, key[14:]) == (call.tool, call.call_id))
