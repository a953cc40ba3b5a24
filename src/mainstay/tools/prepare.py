"""Preparing a call: everything that can be said against it before anything happens.

The order is fixed, and each step has its own failure code. Preparation has no effects, so it may run again after a
crash.

    tool_unavailable            there is no such tool
    tool_contract_unavailable   it has no schema that arguments could be held to
    invalid_tool_args           the arguments are no object, are too large, or do not fit the schema
    tool_prepare_failed         its provider's own preparation raised, or answered with nonsense
    prepared_tool_id_mismatch   it answered for another tool
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, ValidationError

from mainstay.errors import InvalidInput, ToolError
from mainstay.model.codec import clean, clean_text, convert, encode, error_text, model_text
from mainstay.model.effect import AskedCall
from mainstay.model.own import own
from mainstay.model.tool import Failed, PreparedCall, ToolOutcome
from mainstay.ports.tool import CallContext
from mainstay.tools.catalog import Catalog, Entry
from mainstay.tools.check import check

MAX_ARGS = 1024 * 1024


class Ready(Struct, frozen=True, gc=False):
    """A call that may run. `kwargs` are a function's own arguments, converted to its types."""

    entry: Entry
    call: PreparedCall
    kwargs: dict[str, Any] | None = None


def inspect(catalog: Catalog, asked: AskedCall, call_id: str) -> Ready | Failed:
    """The part of preparation that only looks: callable, object, schema."""
    entry = catalog.get(asked.name)
    if entry is None:
        known = ", ".join(catalog.names()[:20]) or "none"
        return Failed("tool_unavailable", f"there is no tool {asked.name[:80]!r}; available: {known}")
    if entry.fault is not None:
        return Failed("tool_contract_unavailable", f"tool {entry.spec.name} cannot be called: {entry.fault}")
    if asked.raw is not None:
        return Failed("invalid_tool_args", f"the arguments are not a JSON object: {asked.raw[:200]}")
    size = len(encode(asked.args))
    if size > MAX_ARGS:
        return Failed("invalid_tool_args", f"the arguments have {size:,} bytes, the limit is {MAX_ARGS:,}")
    prepared = PreparedCall(call_id, entry.spec.tool_id, entry.spec.name, asked.args, asked.payload)
    if entry.tool is not None:
        try:
            return Ready(entry, prepared, entry.tool.bind(asked.args))
        except ToolError as error:
            return Failed(error.code, error.message)
    if asked.attempts:
        return Ready(entry, prepared)  # its recorded start holds what preparation made of it
    try:
        problem = check(entry.spec.input_schema, asked.args)
    except Exception as error:  # a foreign schema, changed since it was looked at
        return Failed("tool_contract_unavailable", f"its schema cannot be read ({type(error).__name__})")
    return Ready(entry, prepared) if problem is None else Failed("invalid_tool_args", problem)


async def consult(ready: Ready, ctx: CallContext, anew: bool = False) -> Ready | ToolOutcome:
    """The provider's own preparation, which may rewrite the arguments, attach a payload or end the call.

    Another attempt runs as it was prepared, unless it must be prepared `anew`.
    """
    provider = ready.entry.provider
    if provider is None or (ctx.attempt > 1 and not anew):
        return ready
    try:
        prepared = await provider.prepare(own(ready.call), ctx)
    except ToolError as error:
        return failure(error)
    except Exception as error:  # the provider's code may raise anything; the call ends with it and the turn goes on
        return Failed("tool_prepare_failed", f"{type(error).__name__}: {model_text(error)}")
    if not isinstance(prepared, PreparedCall):
        return _decided(prepared)
    if prepared.tool_id != ready.entry.spec.tool_id:
        return Failed(
            "prepared_tool_id_mismatch", f"preparation answered for {prepared.tool_id}, not {ready.entry.spec.tool_id}"
        )
    try:
        args, payload = clean(prepared.args), clean(prepared.payload)
    except InvalidInput as error:
        return Failed("tool_prepare_failed", str(error))
    if not isinstance(args, dict):
        return Failed("tool_prepare_failed", f"preparation made a {type(args).__name__} of the arguments")
    return Ready(ready.entry, PreparedCall(ready.call.call_id, prepared.tool_id, ready.call.name, args, payload))


def failure(error: ToolError) -> Failed:
    """What a tool told us went wrong, as far as it can be stored."""
    try:
        return Failed(clean_text(error.code), clean_text(error.message), clean(error.data))
    except Exception:  # the tool put anything there, and its methods ran
        return Failed("tool_error", error_text(error))


def _decided(outcome: object) -> ToolOutcome:
    """The outcome with which preparation ended a call, when it can be stored and read back."""
    try:
        plain = clean(outcome) if isinstance(outcome, ToolOutcome) else None
        decided: ToolOutcome = convert(plain, ToolOutcome)
    except (InvalidInput, ValidationError):
        return Failed("tool_prepare_failed", f"preparation answered with a {type(outcome).__name__}")
    return decided
