"""`perdure sessions`, `show`, `fork`, `delete`, and a person's decisions: `pending`, `approve`, `settle`, `cancel`."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from secrets import token_bytes
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from msgspec import Struct

from perdure.cli.host import (
    FAILED,
    OK,
    ByOption,
    JsonOption,
    Refusal,
    StoreOption,
    answered_by,
    condition,
    dead_workers,
    deciding,
    find,
    has_live_worker,
    is_terminal,
    perform,
    process_id,
    reading,
    say_when,
)
from perdure.cli.processes import cancel_process, end_here, is_unwatched, settle_step, what_it_takes
from perdure.cli.render import (
    MARKS,
    STYLES,
    ago,
    brief,
    call_text,
    console,
    heading,
    on_one_line,
    plural,
    print_json,
    span,
    table,
    text_block,
    text_line,
    whole_call,
)
from perdure.engine.journal import load_turns
from perdure.engine.waits import asked
from perdure.errors import InvalidInput, SessionDeleted, StoreDamaged, UnknownCall, UnknownTurn
from perdure.graph.view import Turn, TurnView, forkable, model_calls, stretches, turn_view
from perdure.model import ids, validate
from perdure.model.codec import encode
from perdure.model.ids import node_id, turn_id
from perdure.model.llm import Usage
from perdure.model.message import Message, Scalar
from perdure.model.outcome import GOES_ON, PendingCall
from perdure.model.record import (
    Called,
    Closed,
    Ended,
    Faltered,
    Joined,
    Noted,
    Record,
    Replied,
    Said,
    Slot,
    Started,
)
from perdure.model.search import SearchPage
from perdure.model.secrets import Marks
from perdure.model.session import ListedSession, SessionRow, label
from perdure.model.tool import Cancelled, OutcomeUnknown, ToolRecord
from perdure.model.transcript import Transcript
from perdure.model.write import ProcessFilter, SessionFilter
from perdure.ports.store import Store
from perdure.processes.handle import pending_steps
from perdure.runtime import Runtime
from perdure.sessions.directory import described, labels, search_store
from perdure.sessions.session import Session
from perdure.turn.machine import usage_of
from perdure.wire import (
    call_json,
    message_json,
    model_json,
    outcome_json,
    outcome_kind,
    outcome_words,
    pending_json,
    usage_json,
)

if TYPE_CHECKING:
    from rich.console import Console

SessionArgument = Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.")]

STATES = {"running": "open", "queued": "open", "interrupted": "open"} | {
    s: s for s in ("open", "parked", "stuck", "idle")
}
"""What a person may ask for, and what the store calls it."""


def sessions(
    store: StoreOption = None,
    agent: Annotated[str | None, typer.Option(help="Only sessions of this agent.")] = None,
    state: Annotated[str | None, typer.Option(help="Only those that are " + ", ".join(STATES) + ".")] = None,
    prefix: Annotated[str, typer.Option(help="Only ids that begin like this.")] = "",
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Only those with this metadata; may be said more than once."),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(metavar="WORDS", help="What was said with all of these words, where the store keeps an index."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 100,
    json: JsonOption = False,
) -> None:
    """List sessions, the most recently changed first; with --search, what was said in them."""

    async def work() -> int:
        if search is not None:
            if state is not None or prefix:
                raise Refusal("--search goes with --agent and --where: leave out --state and --prefix")
            async with reading(store) as opened:
                page = await search_store(
                    opened, search, agent=agent, metadata=wanted_metadata(where or []), limit=limit
                )
            _print_page(page, json)
            return 0
        if state is not None and state not in STATES:
            raise Refusal(f"there is no state {state!r}: use one of {', '.join(STATES)}")
        kept = None if state is None else STATES[state]
        wanted = SessionFilter(agent, kept, prefix, limit, metadata=labels(wanted_metadata(where or [])))
        async with reading(store) as opened:
            dead = await dead_workers(opened)
            rows = await described(opened, await opened.sessions(wanted))
            found = [await _described(opened, row, dead) for row in rows]
        if state in ("running", "queued", "interrupted"):
            found = [s for s in found if s["state"] == state]
        if json:
            print_json(found)
        else:
            _print(found)
        return 0

    perform(work, json)


def wanted_metadata(where: list[str], option: str = "--where") -> dict[str, Scalar]:
    """Metadata as it is said here. A value that is a JSON number, boolean or string is that; any other is text."""
    wanted = dict[str, Any]()
    for each in where:
        key, equals, text = each.partition("=")
        if not equals or not key:
            raise Refusal(f"{option} {each!r} is not usable: say KEY=VALUE, such as --where user=u-17")
        if key in wanted:
            raise Refusal(f"{option} names {key!r} twice: a session has one value of each key")
        try:
            wanted[key] = msgspec.json.decode(text.encode())
        except (msgspec.DecodeError, UnicodeEncodeError):
            wanted[key] = text
    try:
        return validate.metadata(wanted, option.removeprefix("--"))
    except InvalidInput as error:
        raise Refusal(f"{option} is not usable: {error}") from None


def _print_page(page: SearchPage, json: bool) -> None:
    if json:
        print_json({"hits": msgspec.to_builtins(page.hits), "indexed": page.indexed, "cursor": page.cursor})
        return
    out = console()
    if not page.complete:
        text_line(out, f"the index is being made: {page.indexed:.0%} of the store was searched", "yellow")
    if not page.hits:
        text_line(out, "nothing was found")
        return
    rows = [[each.node_id, each.role, brief(each.snippet, 100)] for each in page.hits]
    table(out, ["node", "by", "text"], rows, fold=(0, 2))


async def _described(store: Store, row: ListedSession, dead: dict[str, bool]) -> dict[str, Any]:
    origin = None
    if row.fork is not None:
        source = await store.session_by_sid(row.fork.sid)
        origin = node_id(source.id if source else "?", row.fork.turn, row.fork.ordinal)
    return {
        "id": row.id,
        "agent": row.agent,
        "state": await condition(store, row, dead),
        "reason": await _reason(store, row),
        "turns": row.head,
        "inputs": row.next - 1,
        "open_turn": None if row.turn is None else f"{row.id}.{row.turn}",
        "owner": row.owner,
        "created": row.created,
        "updated": row.updated,
        "forked_at": origin,
        "title": row.title,
        "metadata": row.metadata,
        "error": None if row.error is None else msgspec.to_builtins(row.error),
    }


async def _reason(store: Store, row: SessionRow) -> str | None:
    """Return why a session does not go on: the reason in its row, or the wait for its model."""
    if row.state != "parked":
        return row.reason
    waits = await asked(store, [w for w in await store.waits(row.sid) if w.state == "open" and w.kind == "model"])
    return f"waits for {model_wait(waits[0])}" if waits else row.reason


def _print(found: list[dict[str, Any]]) -> None:
    out, now = console(), int(time.time() * 1000)
    if not found:
        text_line(out, "no sessions")
        return
    # A column of its own where width is free; below the id on a terminal.
    forks = not out.is_terminal and any(s["forked_at"] for s in found)
    titled, owned = any(s["title"] for s in found), any(s["metadata"] for s in found)
    headers = ["session", "agent", "state", "turns", "updated"]
    headers += [name for name, shown in (("title", titled), ("for", owned), ("forked at", forks)) if shown]
    rows = []
    for s in found:
        state = f"{s['state']}: {s['reason']}" if s["reason"] else s["state"]
        if s["error"] is not None:
            state += brief(f", last turn failed: {s['error']['kind']} {s['error']['text']}", 80)
        name = f"{s['id']}\n⑂ {s['forked_at']}" if out.is_terminal and s["forked_at"] else s["id"]
        row = [name, s["agent"], state, str(s["turns"]), ago(s["updated"], now)]
        row += [brief(s["title"], 40)] if titled else []
        row += [_whom(s["metadata"])] if owned else []
        rows.append([*row, s["forked_at"] or ""] if forks else row)
    table(out, headers, rows, fold=(0, 2, 5, 6, 7))


def _whom(metadata: dict[str, Scalar]) -> str:
    """A session's metadata, for a person."""
    values = [f"{key}={value if isinstance(value, str) else label(value)}" for key, value in metadata.items()]
    return brief(" ".join(values), 60)


def fork(
    session: SessionArgument,
    at: Annotated[
        str | None, typer.Option(help="The node (or turn) to branch after; `perdure show --records` lists them.")
    ] = None,
    as_: Annotated[str | None, typer.Option("--as", help="The id of the new session; one is made if absent.")] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Begin a new session that shares the history of this one."""

    async def work() -> int:
        async with deciding(store) as runtime:
            await find(runtime.store, session)
            if as_ is not None and await runtime.store.session(as_) is not None:
                raise Refusal(f"there is a session {as_!r} already: choose another id", 1, "conflict")
            branch = await (await runtime.session(session)).fork(at, session_id=as_)
        if json:
            print_json({"session_id": branch.id, "agent": branch.agent, "source": session, "at": at})
        else:
            text_line(console(), branch.id)
        return 0

    perform(work, json)


def delete(
    session: SessionArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a session for good; its id is never used again, and forks keep what they share."""

    async def work() -> int:
        async with deciding(store) as runtime:
            row = await find(runtime.store, session)
            if not yes:
                _confirm(row)
            await runtime.sessions.delete(session)
        if json:
            print_json({"session_id": session, "deleted": True})
        else:
            text_line(console(), f"deleted {session}")
        return 0

    perform(work, json)


def _confirm(row: SessionRow) -> None:
    if not (sys.stdin.isatty() and is_terminal()):
        raise Refusal(f"deleting {row.id} cannot be undone: say --yes")
    if not typer.confirm(f"Delete {row.id} with {plural(row.head, 'turn')}? This cannot be undone"):
        raise Refusal("nothing was deleted", 1, "refused")


# ---------------------------------------------------------------------- show: one session


class ShownTurn(Struct, frozen=True):
    """One turn of the conversation: whose it is (a fork's past belongs to another session), and its records."""

    session_id: str
    turn: Turn

    @property
    def id(self) -> str:
        return turn_id(self.session_id, self.turn.number)


class Story(Struct, frozen=True):
    """Everything `show` needs of a session."""

    row: SessionRow
    state: str
    past: list[ShownTurn]
    open: ShownTurn | None
    queued: list[ShownTurn]
    pending: list[PendingCall]


def show(
    session: SessionArgument,
    records: Annotated[bool, typer.Option("--records", help="The nodes with their ids: fork at one of them.")] = False,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Show a session: what was said, which tools ran, how turns ended, what is open."""

    async def work() -> int:
        async with reading(store) as opened:
            story = await read_story(opened, session)
        if json:
            print_json(_records_json(story) if records else _story_json(story))
        elif records:
            _print_records(story)
        else:
            _print_story(story)
        return 0

    perform(work, json)


# ---------------------------------------------------------------------- reading


async def read_story(store: Store, session_id: str) -> Story:
    row = await find(store, session_id)
    lineage = [row]
    while (fork := lineage[-1].fork) is not None:
        source = await store.session_by_sid(fork.sid)
        if source is None:
            raise StoreDamaged(f"session {row.id}", "the session it was forked from is gone")
        lineage.append(source)
    names = {r.sid: r.id for r in lineage}
    past: list[ShownTurn] = []
    for stretch in stretches(lineage):
        for turn in await load_turns(store, stretch.sid, 1, stretch.last):
            if turn.number == stretch.last and stretch.ordinal is not None:
                turn = Turn(turn.number, turn.records[: stretch.ordinal + 1])
            past.append(ShownTurn(names[stretch.sid], turn))
    later = [ShownTurn(row.id, t) for t in await load_turns(store, row.sid, row.head + 1, row.next)]
    waits = [w for w in await store.waits(row.sid) if w.state == "open" and row.cancel is None]
    return Story(
        row,
        await condition(store, row, await dead_workers(store)),
        past,
        next((t for t in later if t.turn.number == row.turn), None),
        [t for t in later if t.turn.number != row.turn and t.turn.joined is None],
        await asked(store, waits),
    )


def _view(shown: ShownTurn) -> TurnView:
    """A turn as it reads, also one that was cut short by a fork or is still open."""
    records = shown.turn.records
    if shown.turn.closed is None:
        usage = sum((usage_of(r) for r in records if isinstance(r, Replied)), Usage())
        records = [*records, Closed(Cancelled("reader", "not over yet"), usage)]  # so that every call is listed
    return turn_view(shown.id, records)


def _ended(shown: ShownTurn) -> set[str]:
    """Call ids that have an outcome."""
    return {f"{shown.id}.{r.call}" for r in shown.turn.records if isinstance(r, Ended)}


# ---------------------------------------------------------------------- for machines


def _story_json(story: Story) -> dict[str, Any]:
    row = story.row
    return {
        "id": row.id,
        "agent": row.agent,
        "state": story.state,
        "reason": row.reason,
        "owner": row.owner,
        "created": row.created,
        "updated": row.updated,
        "title": row.title,
        "metadata": row.metadata,
        "turns": [_turn_json(t) for t in story.past if t.turn.joined is None],
        "open": None if story.open is None else _turn_json(story.open),
        "pending": [pending_json(p) for p in story.pending],
        "queued": [_queued_json(t) for t in story.queued],
    }


def _turn_json(shown: ShownTurn) -> dict[str, Any]:
    view, closed, ended = _view(shown), shown.turn.closed, _ended(shown)
    messages = view.messages if closed is not None else [m for m in view.messages if m.role != "tool"]
    return {
        "turn_id": shown.id,
        "outcome": None if closed is None else outcome_json(view.outcome),
        "usage": usage_json(view.usage),
        "messages": [message_json(m) for m in messages],
        "tool_calls": [call_json(c) for c in view.tool_calls if closed is not None or c.call_id in ended],
        "model_calls": [model_json(call) for call in model_calls(shown.turn.records)],
    }


def _queued_json(shown: ShownTurn) -> dict[str, Any]:
    said = shown.turn.said
    return {
        "input_id": shown.id,
        "kind": said.kind if said else None,
        "message": message_json(said.message) if said else None,
    }


def _records_json(story: Story) -> list[dict[str, Any]]:
    found = []
    for shown in [*story.past, *([story.open] if story.open else []), *story.queued]:
        for ordinal, record in enumerate(shown.turn.records):
            found.append(
                {
                    "node_id": node_id(shown.session_id, shown.turn.number, ordinal),
                    "forkable": forkable(shown.turn, ordinal) is None,
                    "record": msgspec.to_builtins(record),
                }
            )
    return found


# ---------------------------------------------------------------------- for people


def _print_story(story: Story) -> None:
    out, row = console(), story.row
    now = int(time.time() * 1000)
    reason = f" ({row.reason})" if row.reason else ""
    text_line(out, f"{row.id} · agent {row.agent} · {story.state}{reason} · changed {ago(row.updated, now)}", "bold")
    if row.title or row.metadata:
        title = f"“{brief(row.title, 60)}” " if row.title else ""
        text_line(out, f"  {title}{_whom(row.metadata)}", "dim")
    for shown in story.past:
        if shown.turn.joined is None:
            _print_turn(out, shown, shared=shown.session_id != row.id)
    if story.open is not None:
        _print_turn(out, story.open, state=story.state)
    for call in story.pending:
        waits = "waits" if call.kind == "model" else f"has waited {span(now - call.since)}"
        text_block(out, f"  {waits} for {answer_hint(call)}", "yellow")
    for shown in story.queued:
        said = shown.turn.said
        text_line(out, f"queued {shown.id}: {brief(said.message.text if said else '', 60)}", "dim")


def _print_turn(out: Console, shown: ShownTurn, shared: bool = False, state: str = "") -> None:
    view, closed = _view(shown), shown.turn.closed
    heading(out, f"── {shown.id}{' (shared history)' if shared else ''}", "dim")
    made, ended = _by_reply(shown.id, shown.turn.records, view.tool_calls), _ended(shown)
    for message in view.messages:
        if message.role == "tool":
            continue
        _print_message(out, message, shown.turn.said)
        for call in made.pop(0)[1] if made and made[0][0] == message else ():
            inset = "  " * (ids.call_in(shown.session_id, call.call_id)[1].count(".") - 1)  # made by a call of run_code
            if closed is None and call.call_id not in ended:
                text_line(out, f"{inset}  … {whole_call(call.tool, shown_args(call))}", "yellow")
                continue
            kind = outcome_kind(call.outcome)
            again = f" ({call.attempts} attempts, {call.repeated} repeated)" if call.attempts > 1 else ""
            # A person may still settle a call whose end was not seen.
            unknown = isinstance(call.outcome, OutcomeUnknown)
            args = shown_args(call)
            what = whole_call(call.tool, args) if unknown else call_text(call.tool, args, 66)
            text_line(out, f"{inset}  {MARKS[kind]} {what}{again}", STYLES[kind])
            text_line(out, f"{inset}      {kind}: {brief(outcome_words(call.outcome), 64)}", "dim")
    for failed in [each for call in model_calls(shown.turn.records) for each in call.attempts if each.code]:
        who = failed.model or "the model"
        text_line(out, f"  ! {who}, attempt {failed.number}: {failed.code}: {brief(failed.message, 60)}", "dim")
    if closed is None:
        text_line(out, f"  {state or 'cut here by the fork'} · {_usage(view.usage)}", STYLES.get(state, "dim"))
    else:
        kind = outcome_kind(view.outcome)
        text_line(out, f"  {kind}{_why(view)} · {_usage(view.usage)}", STYLES.get(kind, ""))


def shown_args(call: ToolRecord) -> dict[str, Any]:
    """The arguments of a call without secrets: as its tool hides them, or, where it never began, by their shape."""
    if call.shown is not None or call.attempts:
        return call.args if call.shown is None else call.shown
    marks = Marks(token_bytes(16))
    return {name: marks.hide_all(value) for name, value in call.args.items()}


def _by_reply(
    turn: str, records: Sequence[Record], calls: Sequence[ToolRecord]
) -> list[tuple[Message, list[ToolRecord]]]:
    """What the model said in each step that has a message, and the calls that it led to, by itself or in a cell."""
    found = []
    for record in records:
        reply = record.reply if isinstance(record, Closed) else record
        if isinstance(reply, Replied):
            said = Transcript()
            said.add(reply)
            of_step = [call for call in calls if call.call_id.startswith(f"{turn}.{reply.step}.")]
            found += [(message, of_step) for message in said.messages if message.role == "assistant"]
    return found


def _print_message(out: Console, message: Message, said: Said | None) -> None:
    if not message.text:
        return
    # A wake has no speaker: the runtime wrote its text.
    who = "wake" if said is not None and said.wakes and message == said.message else message.role
    text_block(out, f"{who}: {message.text}", "bold cyan" if message.role == "user" else "")


def _why(view: TurnView) -> str:
    outcome = view.outcome
    reason = next((v for n in ("message", "reason", "which") if (v := getattr(outcome, n, ""))), "")
    by = getattr(outcome, "by", "")
    return f"{f' by {by}' if by else ''}{f': {reason}' if reason else ''}"


def _usage(usage: Usage) -> str:
    parts = [plural(usage.calls, "model call")]
    if usage.total:
        asked = usage.total - (usage.output or 0)
        parts.append(f"{asked:,} tokens in, {usage.output or 0:,} out")
    if usage.unknown:
        parts.append(f"usage of {usage.unknown} unknown")
    if usage.cost:
        parts.append(f"{usage.cost:.4f} spent")
    return ", ".join(parts)


def _question(call: PendingCall) -> list[str]:
    """What its provider tells the person who decides, where that is more than a reason: a command with its risks."""
    lines = call.reason.split("\n")
    if call.kind == "input":
        return [
            *lines,
            *_asked_fields(call.asks or {}),
            on_one_line(f"perdure answer {call.call_id} {_example(call.asks or {})}"),
        ]
    return lines if call.kind == "approval" and len(lines) > 1 else []


def _asked_fields(asks: dict[str, Any]) -> list[str]:
    """The parts of a question, each with the fields of its answer."""
    lines = []
    for name, ask in asks.items():
        if len(asks) > 1:
            lines.append(f"{name}: {ask.get('message', '')}")
        if ask.get("url"):
            lines.append(f"  open {ask['url']}")
        fields, needed = _fields(ask)
        for field, about in fields.items():
            values = about.get("enum")
            words = [str(about.get("type", "anything")) if values is None else " | ".join(map(str, values))]
            words += [f"{key} {encode(about[key]).decode()}" for key in about if key not in _TOLD]
            if field not in needed:
                words.append("may be left out")
            description = f": {about['description']}" if about.get("description") else ""
            lines.append(f"  {field} ({', '.join(words)}){description}")
    return [on_one_line(line) for line in lines]


_TOLD = ("type", "title", "description", "enum")


def _fields(ask: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The fields of an answer and which of them are needed, by a schema that is somebody else's and may be anything."""
    schema = ask.get("schema")
    found = schema.get("properties") if isinstance(schema, dict) else None
    needed = schema.get("required") if isinstance(schema, dict) else None
    fields = (
        {} if not isinstance(found, dict) else {n: each if isinstance(each, dict) else {} for n, each in found.items()}
    )
    return fields, needed if isinstance(needed, list) else []


def _example(asks: dict[str, Any]) -> str:
    """The form of an answer, as a shell takes it: what is needed of each part, or all where nothing is."""
    forms = {}
    for name, ask in asks.items():
        fields, needed = _fields(ask)
        forms[name] = "{" + ", ".join([f"{encode(field).decode()}: …" for field in needed or fields]) + "}"
    if len(forms) == 1:
        return shlex.quote(*forms.values())
    return shlex.quote("{" + ", ".join([f"{encode(name).decode()}: {form}" for name, form in forms.items()]) + "}")


def answer_hint(call: PendingCall) -> str:
    """What is asked, and the command that answers it."""
    what = whole_call(call.tool, call.args)
    match call.kind:
        case "approval":
            asked = "".join([f"\n    {line}" for line in _question(call)])
            return f"approval of {what}{asked}\n    perdure approve {call.call_id}   (or reject)"
        case "recovery":
            return f"whether {what} took effect\n    perdure settle {call.call_id} done   (or failed, rerun)"
        case "deferred":
            return f"the outside completion of {what}\n    call {call.call_id}, by its signed key"
        case "sleep":
            return f"the end of {what}, by itself"
        case "input":
            form = _example(call.asks or {})
            return f"an answer for {what}: {call.reason}\n    perdure answer {call.call_id} {form}   (or --decline)"
        case "process":
            return f"the end of {', '.join(call.processes)}, in {what}\n    it goes on by itself"
        case "model":
            session = ids.split(call.call_id, 3)[0]
            return f"{model_wait(call)}\n    it goes on by itself; at once with perdure retry {session} --now"


def model_wait(call: PendingCall) -> str:
    """Describe the wait for the next attempt of a model call: the model, until when, and why."""
    until = time.strftime("%H:%M:%S", time.localtime((call.due or 0) / 1000))
    return f"{call.tool} until {until}, attempt {call.ordinal}: {call.reason}"


def _print_records(story: Story) -> None:
    rows = []
    for shown in [*story.past, *([story.open] if story.open else []), *story.queued]:
        for ordinal, record in enumerate(shown.turn.records):
            name = node_id(shown.session_id, shown.turn.number, ordinal)
            at = "" if forkable(shown.turn, ordinal) is not None else "yes"
            rows.append([name, type(record).__name__.lower(), at, _record_text(record)])
    table(console(), ["node", "record", "fork", "what"], rows, fold=(0, 3))


def _record_text(record: Record) -> str:
    match record:
        case Said(message=message, kind=kind, wakes=wakes):
            return f"{'wake' if wakes else kind}: {brief(message.text, 60)}"
        case Joined(turn=turn):
            return f"delivered into turn {turn}"
        case Replied(step=step, parts=parts):
            return f"step {step}: {brief(_reply_text(parts), 60)}"
        case Called(key=key, first=first, calls=calls):
            return f"cell {key}: {', '.join(f'{key}.{n} {call.name}()' for n, call in enumerate(calls, first))}"
        case Started(call=call, attempt=attempt):
            return f"call {call}, attempt {attempt}"
        case Faltered(code=code, message=message, call=call):
            return f"{f'call {call}' if call else 'model'}: {code}: {brief(message, 40)}"
        case Ended(call=call, outcome=outcome):
            what = "call" if "." in call else "cell"
            return f"{what} {call}: {outcome_kind(outcome)}: {brief(outcome_words(outcome), 44)}"
        case Noted(slot=Slot(children=children)) if children:
            return f"begins {', '.join(children)}"
        case Closed(outcome=outcome, reply=reply):
            text = f": {brief(_reply_text(reply.parts), 50)}" if reply is not None else ""
            return f"{outcome_kind(outcome)}{text}"
        case _:
            return brief(msgspec.to_builtins(record), 60)


def _reply_text(parts: Any) -> str:
    message = Message("assistant", parts)
    calls = ", ".join(f"{c.name}()" for c in message.tool_calls)
    return " ".join(p for p in (message.text, f"→ {calls}" if calls else "") if p)


# ---------------------------------------------------------------------- what a person decides

CallArgument = Annotated[str, typer.Argument(metavar="CALL", help="The call's id; `perdure pending` lists them.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; the model is told.")]


class Settlement(StrEnum):
    """What became of a call whose end was not seen."""

    done = "done"
    failed = "failed"
    rerun = "rerun"


def pending(store: StoreOption = None, json: JsonOption = False) -> None:
    """List what waits for a person, or for an outside completion, in the whole store."""

    async def work() -> int:
        async with reading(store) as opened:
            stopping = {row.sid for row in await opened.open_sessions() if row.cancel is not None}
            waits = [w for w in await opened.waits() if w.sid not in stopping and w.kind not in GOES_ON]
            found = await asked(opened, waits)
            found += await _unsettled(opened)
        if json:
            print_json([pending_json(c) for c in found])
            return 0
        out, now = console(), int(time.time() * 1000)
        if not found:
            text_line(out, "nothing waits")
            return 0
        rows = [[c.call_id, c.kind, whole_call(c.tool, c.args), ago(c.since, now)] for c in found]
        table(out, ["call", "waits for", "what", "since"], rows, fold=(0, 2))
        for each in found:
            if question := _question(each):
                heading(out, f"{each.call_id} asks to")
                text_block(out, "\n".join(question))
        kinds = {c.kind for c in found}
        if "approval" in kinds:
            text_line(out, "answer an approval with: perdure approve CALL, perdure reject CALL --reason …", "dim")
        if "recovery" in kinds:
            text_line(out, "answer a recovery with:  perdure settle CALL done | failed | rerun", "dim")
        if "input" in kinds:
            text_line(out, "decline an input with:   perdure answer CALL --decline", "dim")
        return 0

    perform(work, json)


async def _unsettled(store: Store) -> list[PendingCall]:
    """Return the steps of durable functions that wait until a person has settled them."""
    found, last = list[PendingCall](), None
    while page := await store.processes(ProcessFilter(status=("waiting",), kind="function", before=last)):
        found += [call for row in page for call in pending_steps(row)]
        last = page[-1].pid
    return found


def approve(call: CallArgument, by: ByOption = None, store: StoreOption = None, json: JsonOption = False) -> None:
    """Let a call run that asks for approval."""
    _answer(call, store, json, "approved", lambda s: s.approve(call, by=answered_by(by)))


def reject(
    call: CallArgument,
    reason: ReasonOption = "",
    by: ByOption = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Refuse a call that asks for approval."""
    _answer(call, store, json, "rejected", lambda s: s.reject(call, reason, by=answered_by(by)))


def answer(
    call: CallArgument,
    value: Annotated[str | None, typer.Argument(metavar="[JSON]", help="The fields that are asked for.")] = None,
    decline: Annotated[bool, typer.Option("--decline", help="Say that there is no answer.")] = False,
    by: ByOption = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Answer what a call asks for, such as a question of an MCP server."""
    if decline == (value is not None):
        raise InvalidInput("give the answer as JSON, or --decline")
    known = None if value is None else _json_value(value)
    _answer(
        call, store, json, "declined" if decline else "answered", lambda s: s.answer(call, known, by=answered_by(by))
    )


def settle(
    call: CallArgument,
    verdict: Annotated[Settlement, typer.Argument(metavar="VERDICT", help="What became of it; rerun: run it again.")],
    value: Annotated[str | None, typer.Option("--value", help="What the tool would have returned, as JSON.")] = None,
    reason: ReasonOption = "",
    by: ByOption = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Say what became of a call, or of a step of a durable function, that a crash left unknown."""

    word = f"settled as {verdict.value}"

    async def work() -> int:
        known = None if value is None else _json_value(value)

        async def say(session: Session[Any]) -> None:
            await session.settle(call, verdict.value, value=known, reason=reason, by=answered_by(by))

        async with deciding(store) as runtime:
            row = await settle_step(runtime, call, verdict.value, value=known, reason=reason, by=answered_by(by))
            live_worker = row is not None and await has_live_worker(runtime, row.owner)
        if row is None:
            return await _answered(call, store, json, word, say)
        if json:
            print_json({"call_id": call, "process_id": row.id, "answer": word})
        else:
            text_line(console(), f"{word} {call}", "green")
            say_when(what_it_takes(row), live_worker)
        return 0

    perform(work, json)


def _json_value(text: str) -> Any:
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise Refusal(f"--value is not JSON ({error}): quote strings, for example --value '\"seat 12A\"'") from None


def _answer(
    call: str, store: str | None, json: bool, word: str, answer: Callable[[Session[Any]], Awaitable[None]]
) -> None:
    perform(lambda: _answered(call, store, json, word, answer), json)


async def _answered(
    call: str, store: str | None, json: bool, word: str, answer: Callable[[Session[Any]], Awaitable[None]]
) -> int:
    places = _places(call)
    async with deciding(store) as runtime:
        found = [(await runtime.store.session(name), turn) for name, turn in places]
        row, turn = next(((row, turn) for row, turn in found if row is not None and not row.deleted), (None, 0))
        if row is None:
            raise UnknownCall(call, f"there is no session {places[0][0]!r} in this store")
        session_id = row.id
        await answer(await runtime.session(session_id))
        live_worker = await has_live_worker(runtime, row.owner)
    if json:
        print_json({"call_id": call, "session_id": session_id, "answer": word})
    else:
        text_line(console(), f"{word} {call}", "green")
        if row.turn == turn:
            say_when(f"agent {row.agent!r}", live_worker)
        else:
            text_line(console(), f"its turn is over: the model is told with the next one of {session_id}", "dim")
    return 0


def _places(call: str) -> list[tuple[str, int]]:
    """The session and the turn that a call's id may name, the likelier first: a call of `run_code` has a number more,
    which could as well be part of a session's id."""
    found = []
    for count in (3, 4):
        with contextlib.suppress(UnknownTurn):
            session_id, (turn, *_) = ids.split(call, count)
            found.append((session_id, turn))
    if not found:
        raise Refusal(f"{call!r} is not a call id: it looks like session.turn.step.index")
    return found


def cancel(
    target: Annotated[str, typer.Argument(metavar="ID", help="A session's id; or a process's id or handle JSON.")],
    turn: Annotated[str | None, typer.Option(help="This turn (its id or number), not the open one.")] = None,
    process: Annotated[
        bool | None, typer.Option("--process/--session", help="Which of the two it is, where both have this id.")
    ] = None,
    reason: ReasonOption = "",
    by: ByOption = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Ask a turn of a session, or a process, to stop."""

    async def work() -> int:
        async with deciding(store) as runtime:
            if not await _is_process(runtime.store, target, False if turn is not None else process):
                return await _cancel_turn(runtime, target, turn, reason, answered_by(by), json)
            code = await cancel_process(runtime, process_id(target), reason, answered_by(by), json)
            unwatched = code == OK and await is_unwatched(runtime, process_id(target))
        if unwatched:
            await end_here(store, process_id(target), json)
        return code

    perform(work, json)


async def _is_process(store: Store, target: str, said: bool | None) -> bool:
    """Whether a process is meant. What may be either is refused: the wrong one must not be stopped."""
    if said is not None or target.lstrip().startswith("{"):
        return said is not False
    a_session = (row := await store.session(target)) is not None and not row.deleted
    a_process = await store.process(target) is not None
    if a_session and a_process:
        raise Refusal(f"{target!r} is a session and a process: say --session or --process")
    if not a_session and not a_process:
        if row is not None:
            raise SessionDeleted(target)
        raise Refusal(
            f"there is no session {target!r} in this store: `perdure sessions` lists the sessions; nor a process: "
            "`perdure ps` shows those",
            code="not_found",
        )
    return a_process


async def _cancel_turn(runtime: Runtime, session: str, turn: str | None, reason: str, by: str, json: bool) -> int:
    name = ids.turn_id(session, int(turn)) if turn is not None and turn.isdecimal() else turn
    row = await find(runtime.store, session)
    asked = name or (None if row.turn is None else ids.turn_id(session, row.turn))
    status = await (await runtime.session(session)).cancel(reason, by=by, turn_id=name)
    live_worker = await has_live_worker(runtime, row.owner)
    if json:
        print_json({"session_id": session, "turn_id": asked, "status": status})
    else:
        ended = status == "completion_won" and asked is None
        words = f"nothing to stop: no turn of {session} is open" if ended else CANCELLED[status].format(turn=asked)
        text_line(console(), words)
        if status == "requested":
            say_when(f"agent {row.agent!r}", live_worker)
    return 0 if status in ("requested", "already_requested") else FAILED


CANCELLED = {
    "requested": "asked turn {turn} to stop",
    "already_requested": "turn {turn} was asked to stop before",
    "completion_won": "nothing to stop: turn {turn} has ended",
    "unknown": "there is no turn {turn}",
}
