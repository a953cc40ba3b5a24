"""`perdure usage`: what the sessions of a store have asked of models, and what that has cost."""

from __future__ import annotations

import datetime
from typing import Annotated, Any

import typer

from perdure.cli.host import JsonOption, Refusal, StoreOption, perform, reading
from perdure.cli.render import console, print_json, table, text_line
from perdure.cli.sessions import wanted_metadata
from perdure.errors import InvalidInput
from perdure.model.llm import Usage
from perdure.model.spending import HOUR, METADATA, UsageFilter
from perdure.sessions.usage import GROUPS, KNOWN, UsageGroup, moment, total
from perdure.wire import usage_json


def usage(
    by: Annotated[
        list[str] | None,
        typer.Option(help=f"What sums are told apart by: {', '.join(GROUPS)}, or user, tenant and other metadata."),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="DAY", help="From this day on (UTC), such as 2026-11-16.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="DAY", help="Before this day (UTC).")] = None,
    session: Annotated[str | None, typer.Option(help="Only this session, with its subagents.")] = None,
    agent: Annotated[str | None, typer.Option(help="Only sessions of this agent.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Only what was spent for this metadata; may be said more than once."),
    ] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Show what was spent, in sums. Turns count when they end; sessions that are deleted stay in the sums."""

    async def work() -> int:
        names = [
            each if each in GROUPS or each.startswith(METADATA) else f"{METADATA}{each}" for each in by or ["model"]
        ]
        first, last = _day(since, "--since"), _day(until, "--until")
        wanted = UsageFilter(since=first, until=last, session_id=session, agent=agent)
        async with reading(store) as opened:
            try:
                found = await total(opened, names, wanted, wanted_metadata(where or []))
            except InvalidInput as error:
                raise Refusal(f"--by is not usable: {error}") from None
        for at, name in enumerate(names):
            if name not in (by or names) and found and not any(each.key[at] for each in found):
                word = name.removeprefix(METADATA)
                raise Refusal(
                    f"--by is not usable: usage is not told by {word!r}: give {KNOWN}; no metadata {word!r} was found"
                )
        if json:
            print_json([dict(zip(names, each.key, strict=True)) | {"usage": usage_json(each.usage)} for each in found])
        else:
            _print(found, names)
        return 0

    perform(work, json)


def _day(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    try:
        at = moment(datetime.date.fromisoformat(text), option)
    except ValueError:
        raise Refusal(f"{option} {text!r} is no day: write it as 2026-11-16") from None
    assert at is not None
    return at - at % HOUR


def _print(found: list[UsageGroup], names: list[str]) -> None:
    out = console()
    if not found:
        text_line(out, "nothing was spent")
        return
    heads = [name.removeprefix(METADATA) for name in names]
    rows = [[*[value or "-" for value in each.key], *_cells(each.usage)] for each in found]
    if len(found) > 1:
        rows.append(["all", *[""] * (len(names) - 1), *_cells(sum((each.usage for each in found), Usage()))])
    table(out, [*heads, "calls", "input", "cached", "output", "unknown", "cost"], rows, fold=tuple(range(len(names))))


def _cells(usage: Usage) -> list[str]:
    """What is not known is a dash, or a question mark after a sum that lacks some of it."""

    def shown(value: Any, name: str) -> str:
        short = "?" if usage.missing is not None and usage.missing.get(name) else ""
        return "-" if value is None else f"{value:,}{short}"

    cost = None if usage.cost is None else usage.cost.quantize(usage.cost.__class__("0.0001"))
    cached = None if usage.cache_read is None and usage.cache_write is None else usage.cache_read or 0
    return [
        f"{usage.calls:,}", shown(usage.input, "input"), shown(cached, "cache_read"), shown(usage.output, "output"),
        f"{usage.unknown:,}" if usage.unknown else "", shown(cost, "cost"),
    ]  # fmt: skip
