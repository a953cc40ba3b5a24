"""The native tool-calling protocol: reading a model's reply as calls or as an answer."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from mainstay.model.effect import AskedCall
from mainstay.model.message import Part, Text, ToolCall

CUT_OFF = ("length", "filtered")
"""Stops that mean that the model was not done."""


def with_unique_ids(parts: Sequence[Part], turn_id: str, step: int) -> tuple[Part, ...]:
    """The parts with every call's provider id present and unique in the reply: results are paired by it."""
    ids = [part.id for part in parts if type(part) is ToolCall]
    given = set(ids)
    if len(given) == len(ids) and "" not in given:
        return tuple(parts)
    seen: set[str] = set()
    out: list[Part] = []
    index = 0
    for part in parts:
        if type(part) is ToolCall:
            if not part.id or part.id in seen:
                name = f"{turn_id}.{step}.{index}"
                while name in given or name in seen:
                    name += "'"
                part = replace(part, id=name)
            seen.add(part.id)
            index += 1
        out.append(part)
    return tuple(out)


def asked_calls(calls: dict[str, ToolCall], started: Sequence[int], store: str = "") -> dict[str, AskedCall]:
    """The calls of a reply as the turn asks for them; those in `started` began with the reply's record, in `store`."""
    asked, starts = {}, frozenset(started)
    for index, (key, call) in enumerate(calls.items()):
        begun = index in starts
        asked[key] = AskedCall(
            key, call.id, call.name, call.args, call.raw, begun, attempts=int(begun), store=store if begun else ""
        )
    return asked


def answer_text(parts: Sequence[Part]) -> str:
    return "".join([p.text for p in parts if type(p) is Text])
