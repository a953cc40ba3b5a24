"""What the lives compare: receipts, rows and settings as plain data, written by hand."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from perdure.errors import PerdureError

Plain = dict[str, Any]


class Refusal(Exception):
    """The store must refuse with `error`, and change nothing."""

    def __init__(self, error: type[PerdureError]) -> None:
        self.error = error
        super().__init__(error.__name__)


class SomeReason:
    """Equal to any text that is not empty: the words of a reason are the store's own."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SomeReason) or (isinstance(other, str) and bool(other.strip()))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "<some reason>"


def plain(value: Any) -> Any:
    """A receipt or row as plain data, so that it can be compared with what was written by hand."""
    if not isinstance(value, msgspec.Struct):
        return value
    fields = msgspec.structs.asdict(value)
    return {name: plain(field) if isinstance(field, msgspec.Struct) else field for name, field in fields.items()}


def deep(value: Any) -> Any:
    """The same down to the last struct inside, as JSON would have it, but with every field; a tag is its `type`."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        tag = {} if config.tag is None else {config.tag_field or "type": config.tag}
        return tag | {name: deep(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {name: deep(each) for name, each in value.items()}
    return [deep(each) for each in value] if isinstance(value, list | tuple) else value


def short(value: Any) -> Any:
    """The same as it is stored: fields that say nothing are left out."""
    if isinstance(value, dict):
        return {name: short(each) for name, each in value.items() if each not in ("", None, False, 0, [], ())}
    return [short(each) for each in value] if isinstance(value, list) else value


def joined(turn: int) -> bytes:
    """The record that an input gets which was delivered into a running turn."""
    return b'{"type":"joined.1","turn":%d}' % turn


def as_json(struct: msgspec.Struct) -> bytes:
    """A request or an answer as it is stored: compact JSON, a tag first, fields in order, empty ones left out."""
    tag = struct.__struct_config__.tag
    said = {"type": tag, **plain(struct)}
    kept = {name: value for name, value in said.items() if value not in ("", None)}
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode()


def blob_in(body: bytes) -> list[str]:
    """The blob that stands for what a wait asks, or was told, when that is too large for a row."""
    return [json.loads(body)["digest"]] if body.startswith(b'{"type":"spilled.1","digest":') else []


def after_turn(settings: bytes, edits: dict[str, bool | None], recorded: dict[str, int]) -> bytes:
    """A session's settings when a turn ends that switched some tools on, off, or (None) back to what they were.

    States of plugins that wait for a turn wait on, unless it has recorded them, or later ones. What a session began
    with is in the turn's own records now.
    """
    found = json.loads(settings or b"{}")
    found.pop("prelude", None)
    waiting = found.pop("snapshots", {})
    found["snapshots"] = {name: s for name, s in waiting.items() if s["revision"] > recorded.get(name, -1)}
    if edits:
        tools = found.get("tools", {})
        members = {name: on for name, on in {**tools.get("members", {}), **edits}.items() if on is not None}
        found["tools"] = {"generation": tools.get("generation", 0) + 1}
        if members:
            found["tools"]["members"] = dict(sorted(members.items()))
    return written(found)


def of_a_fork(settings: bytes, latest: bool) -> bytes:
    """The settings that a fork begins with: without what the other has cost, and what waits for a turn of the other
    unless it shares all of its past (`latest`)."""
    found = json.loads(settings or b"{}")
    others = ("ledger", "models", "children", *(() if latest else ("snapshots", "saved")))
    return written({name: value for name, value in found.items() if name not in others})


def written(settings: Plain) -> bytes:
    order = ("options", "tools", "parent", "hidden", "label", "snapshots", "ledger", "models", "children", "prelude")
    kept = {name: settings[name] for name in order if settings.get(name)}
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode() if kept else b""
