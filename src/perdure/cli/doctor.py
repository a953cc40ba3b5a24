"""`perdure doctor`: is the store whole, who works on it, can its models be asked, and what needs a person."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Struct

from perdure.agent import Agent
from perdure.cli.commands import CommandHealth, examine_commands, health_json, is_here
from perdure.cli.host import (
    FAILED,
    OK,
    JsonOption,
    StoreOption,
    condition,
    dead_workers,
    existing,
    is_terminal,
    is_there,
    perform,
    reading,
    store_path,
)
from perdure.cli.processes import listed, state_of
from perdure.cli.render import ago, complain, console, heading, plural, print_json, size, span, table, text_line
from perdure.cli.run import load_agent
from perdure.cli.sandbox import PYTHON_ADVICE, Confining, confining, no_python, report_sandbox
from perdure.cli.sessions import model_wait
from perdure.engine.journal import load
from perdure.engine.waits import asked
from perdure.errors import BlobMissing, PerdureError, StoreError
from perdure.lifecycle import suspects
from perdure.lifecycle.process import AWAITED
from perdure.model.command import COMMAND_KIND
from perdure.model.ids import turn_id
from perdure.model.limit import Account, Limit, parts_of, shown
from perdure.model.monitor import MONITOR_KIND
from perdure.model.outcome import PendingCall
from perdure.model.process import ProcessRow, Success, WakeRow
from perdure.model.record import Ended, Record, Said
from perdure.model.session import Offers, SessionRow, WorkerRow, load_settings
from perdure.model.tool import Ok
from perdure.model.write import ProcessFilter, SessionFilter, StoreFacts
from perdure.ports.provider import Provider, candidates
from perdure.ports.store import Store
from perdure.processes.run import load_steps
from perdure.tools.output import blobs_of
from perdure.turn.prompt import stored_in

UNCLAIMED_MS = 60_000
"""Two lease terms: what no worker claimed for so long is listed, with the reason."""
LARGE = 5 * 10**9
"""Bytes of a store from which on it should have a retention."""
MANY_NODES = 10**6
"""Nodes from which on it should have a retention."""
NAMED = 10
"""Problems of one sort that are listed one by one; of more, how many there are."""


ORPHANED = "a command runs in this job folder, and its process is over or not in this store"
MEND_ORPHAN = "was the store replaced by an older copy? end the command by its `started` file, then delete the folder"


class Advice(Struct, frozen=True):
    """Something a person should do."""

    about: str
    problem: str
    advice: str


class ProcessHealth(Struct, frozen=True):
    """What doctor found about processes: how many live, by state, and how many wakes wait, were discarded, or were of
    ends that a call had waited for."""

    states: dict[str, int]
    wakes: dict[str, int]
    needs: list[Advice]
    commands: CommandHealth = CommandHealth()


async def examine_processes(store: Store, dead: dict[str, bool], now: int) -> ProcessHealth:
    live_worker = not all(dead.values())
    states: dict[str, int] = {}
    stuck, asked, idle = list[ProcessRow](), list[ProcessRow](), dict[tuple[str, str], list[ProcessRow]]()
    commands, elsewhere = list[ProcessRow](), dict[str, list[ProcessRow]]()
    async for row in listed(store, ProcessFilter(live=True)):
        state = state_of(row, dead)
        states[state] = states.get(state, 0) + 1
        if row.registration.kind == COMMAND_KIND:
            commands.append(row)
        if row.registration.kind in (COMMAND_KIND, MONITOR_KIND) and not is_here(row) and state != "stuck":
            # No worker here may take it up, however long it waits.
            if _overdue(row, state, live_worker, now) is not None:
                elsewhere.setdefault(row.registration.definition, []).append(row)
        elif state == "stuck":
            stuck.append(row)
        elif row.record.abandon is not None and row.owner is None:
            asked.append(row)
        elif (sort := _overdue(row, state, live_worker, now)) is not None:
            idle.setdefault((_definition(row), sort), []).append(row)
    needs = [*_stuck(stuck), *_to_abandon(asked)]
    needs += [_unclaimed(name, sort, rows, live_worker, now) for (name, sort), rows in sorted(idle.items())]
    needs += [_bound(host, rows) for host, rows in sorted(elsewhere.items())]
    lost = [row async for row in listed(store, ProcessFilter(("abandoned",), COMMAND_KIND))]
    found = await examine_commands(store, commands, len(lost))
    needs += [Advice(folder, ORPHANED, MEND_ORPHAN) for folder in found.orphans[:NAMED]]
    pending, discarded = await store.wakes(None, "pending"), await store.wakes(None, "discarded")
    needs += await _wakes(store, pending, discarded, now)
    awaited = sum(each.reason == AWAITED for each in discarded)
    waiting = {"pending": len(pending), "discarded": len(discarded) - awaited, "awaited": awaited}
    return ProcessHealth(dict(sorted(states.items())), waiting, needs, found)


def _bound(host: str, rows: list[ProcessRow]) -> Advice:
    """One line for all commands and monitors that only another machine can go on with."""
    ids = ", ".join(row.id for row in rows[:3])
    more = f" and {len(rows) - 3:,} more" if len(rows) > 3 else ""
    many = plural(len(rows), "command is", "commands are")
    problem = f"{many} bound to this host, and no Runtime there has them: {ids}{more}"
    advice = "start a Runtime on this store there; if the host is gone for good, `runtime.processes.request_abandon(…)`"
    return Advice(f"host {host}", problem, f"{advice} and `.reconcile_abandon(…)` give them up")


def _definition(row: ProcessRow) -> str:
    asked = row.registration
    if asked.kind in (COMMAND_KIND, MONITOR_KIND):
        return asked.name or asked.kind  # its definition is its machine
    return asked.definition or asked.name or asked.kind


def _stuck(rows: list[ProcessRow]) -> list[Advice]:
    needs = [
        Advice(
            row.id,
            f"stuck: {row.stuck}",
            f"repair the cause, then `perdure processes resume {row.id}`, or end it with `perdure cancel {row.id}`",
        )
        for row in rows[:NAMED]
    ]
    if len(rows) > NAMED:
        left = len(rows) - NAMED
        needs.append(Advice("processes", f"{left:,} more are stuck", "`perdure ps --status stuck` lists them"))
    return needs


def _to_abandon(rows: list[ProcessRow]) -> list[Advice]:
    needs = []
    for row in rows[:NAMED]:
        request = row.record.abandon
        assert request is not None
        problem = f"{request.by} thinks that it will never end: {request.reason or 'no reason given'}"
        advice = "look into it, then `runtime.processes.reconcile_abandon(…)` or `.complete(…)`"
        needs.append(Advice(row.id, problem, advice))
    return needs


def _overdue(row: ProcessRow, state: str, live_worker: bool, now: int) -> str | None:
    """The work on it that is overdue, if any."""
    if state in ("queued", "interrupted"):
        since, sort = row.record.updated, state
    elif state == "waiting" and row.due is not None:
        since, sort = row.due, "overdue"
    else:
        return None
    # With a worker there it goes on by itself in a moment; without one it does not.
    return sort if now - since > (UNCLAIMED_MS if live_worker else 0) else None


def _unclaimed(name: str, sort: str, rows: list[ProcessRow], live_worker: bool, now: int) -> Advice:
    """One line for all processes of a definition: they want the same thing."""
    since = min(row.due or 0 if sort == "overdue" else row.record.updated for row in rows)
    ids = ", ".join(row.id for row in rows[:3])
    more = f" and {len(rows) - 3:,} more" if len(rows) > 3 else ""
    why = "no worker took them up" if live_worker else "no live worker has this store open"
    problem = f"{plural(len(rows), 'process', 'processes')} {sort} for {span(now - since)}, and {why}: {ids}{more}"
    kind = rows[0].registration.kind
    if kind in (COMMAND_KIND, MONITOR_KIND):
        return Advice(f"{kind} {name}", problem, "start any Runtime on this store here: it watches them on")
    if live_worker:
        places = "; if one does, all its places are taken" if sort != "overdue" else ""
        return Advice(name, problem, f"does a live worker have {kind} {name!r}? start one that does{places}")
    return Advice(name, problem, f"start a Runtime with {kind} {name!r} on this store: they go on by themselves")


async def _wakes(store: Store, pending: list[WakeRow], discarded: list[WakeRow], now: int) -> list[Advice]:
    needs = list[Advice]()
    # A note waits for the next turn, whenever that is.
    late = [wake for wake in pending if wake.policy == "turn" and now - wake.at > UNCLAIMED_MS]
    for (session_id, _), rows in _by_session(late).items():
        session = await store.session(session_id)
        if session is None or session.turn is None:  # a busy one gets its wakes when its turn has ended
            problem = f"{plural(len(rows), 'wake waits', 'wakes wait')} for {span(now - rows[0].at)} to be delivered"
            agent = f"its agent {session.agent!r}" if session is not None and session.agent else "its agent"
            advice = f"does a live worker have {agent}? start one that does"
            needs.append(Advice(f"session {session_id}", problem, advice))
    for (session_id, reason), rows in _by_session(discarded).items():
        if reason == AWAITED:
            continue
        session = await store.session(session_id)
        if session is not None and session.deleted:
            continue  # its session is deleted
        numbers = " ".join(str(row.number) for row in rows[:NAMED])
        problem = f"{plural(len(rows), 'wake was', 'wakes were')} discarded: {reason or 'no reason recorded'}"
        advice = f"to deliver them after all: perdure processes redrive {numbers}"
        needs.append(Advice(f"session {session_id}", problem, advice))
    return needs


def _by_session(wakes: list[WakeRow]) -> dict[tuple[str, str | None], list[WakeRow]]:
    """By session, and by why they were discarded."""
    found: dict[tuple[str, str | None], list[WakeRow]] = {}
    for wake in wakes:
        found.setdefault((wake.session_id, wake.reason), []).append(wake)
    return found


# ---------------------------------------------------------------------- deep


async def read_processes(store: Store, needs: list[Advice], advance: Callable[[int], Any]) -> int:
    """Decode every event and every record of every journal, and check every blob that one refers to."""
    count = 0
    async for row in listed(store, ProcessFilter()):
        try:
            count += await _read_process(store, row)
        except PerdureError as error:
            needs.append(Advice(row.id, str(error), "restore the store from a backup"))
        advance(1)
    return count


async def _read_process(store: Store, row: ProcessRow) -> int:
    count = after = 0
    while page := await store.events(row.pid, after):
        count, after = count + len(page), page[-1][1]
    records, _ = await load_steps(store, row.pid, row.id)
    outcome = row.record.outcome
    if isinstance(outcome, Success) and outcome.blob is not None:
        await store.blobs.get(outcome.blob.digest)
    if row.registration.env is not None:
        await store.blobs.get(row.registration.env)
    return count + len(records)


# ---------------------------------------------------------------------- models


class ModelState(Struct, frozen=True):
    """A model, who names it, and in words what keeps it from being asked from here, if anything does."""

    model: str
    named_by: list[str]
    lacks: list[str]


async def examine_models(
    store: Store | None, agents: Iterable[tuple[str, Agent[object]]]
) -> tuple[list[ModelState], list[Advice]]:
    """The models of the given agents and of open sessions; and what a person should do about those of the agents."""
    states, needs = list[ModelState](), list[Advice]()
    for name, agent in agents:
        for model, lacks in _lacking(agent.model):
            states.append(ModelState(model, [name], lacks))
            needs += [Advice(f"{name}, model {model}", each, ADVICE) for each in lacks]
    named: dict[str, list[str]] = {}
    for row in [] if store is None else await store.open_sessions():
        for model in await _named_by(store, row):
            named.setdefault(model, []).append(row.id)
    for model, sessions in sorted(named.items()):
        # What has no colon is a name of `Runtime(models=…)`, which only that Runtime knows.
        states += [ModelState(each, sessions, lacks) for each, lacks in (_lacking(model) if ":" in model else ())]
    return states, needs


ADVICE = "set it where the agent runs, and look again; docs/providers.md lists the variables of every service"


def _lacking(model: str | Provider) -> list[tuple[str, list[str]]]:
    """Each model behind a name or an object, and what it lacks."""
    from perdure.providers import registry  # most stores are examined without one

    try:
        found = registry.named(model) if isinstance(model, str) else model
    except PerdureError as error:  # an unknown service, no endpoint, no region, no project
        return [(str(model), [str(error)])]
    return [(each.name, _of(each)) for each in candidates(found)]


def _of(provider: Provider) -> list[str]:
    lacking = getattr(provider, "lacking", None)
    return [] if lacking is None else list(lacking())


async def _named_by(store: Store | None, row: SessionRow) -> list[str]:
    """The models chosen for a session with an open turn."""
    assert store is not None
    settings = load_settings(row.settings)
    choices = [settings.choice, *[each.choice for each in settings.earlier]]
    try:
        records = await load(store, row.sid, row.turn or 0, row.next - 1)
    except PerdureError:  # another check reports it
        records = []
    choices += [record.choice for _, record in records if isinstance(record, Said)]
    return list(dict.fromkeys([choice.model for choice in choices if choice is not None and choice.model]))


# ---------------------------------------------------------------------- the command

EVERY = 1_000_000
CHUNK = 256
"""Turns read at a time, so that a long session does not fill the memory."""


class OpenTurn(Struct, frozen=True):
    """A turn that has not ended."""

    turn_id: str
    agent: str
    state: str
    owner: str | None
    generation: int
    takeovers: int
    age_ms: int
    idle_ms: int
    waits_for: list[str]
    reason: str | None


class Health(Struct):
    """What doctor found."""

    facts: StoreFacts
    workers: list[dict[str, Any]]
    open: list[OpenTurn]
    processes: ProcessHealth
    needs: list[Advice]
    checked: int | None = None
    suspects: dict[str, str] = {}
    models: list[ModelState] = []
    sandbox: Confining | None = None


def doctor(
    agents: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[AGENT]...", help="Agents whose models to check: module:attribute or file.py:attribute."
        ),
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Check every page, record and blob.")] = False,
    sandbox: Annotated[
        bool, typer.Option("--sandbox", help="Attack this machine from inside each sandbox, and tell what it stops.")
    ] = False,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Check a store: its health, its workers, its open turns and processes, and what needs a person.

    With agents, also whether their models can be asked from here: extras, keys and addresses. Nothing is asked of them,
    and no key is shown. With --sandbox, all about what confines commands on this machine, as this user, and no store.

    Exit codes: 0 all is well, 1 something needs a person, 2 there is no such store.
    """
    if sandbox:
        raise typer.Exit(report_sandbox(json))

    async def work() -> int:
        given = [(name, load_agent(name)) for name in agents or ()]
        if given and not is_there(store_path(store)):  # before anything was said, models are all there is to check
            return await _only_models(given, json)
        where = existing(store)
        try:
            async with reading(store) as opened:
                health = await examine(opened, deep)
                health.models, needs = await examine_models(opened, given)
                health.needs += needs
            health.sandbox = await confining()
            if why := health.sandbox.python:
                health.needs.append(Advice("python", no_python(why), PYTHON_ADVICE))
        except StoreError as error:
            # The file itself is the patient: the typed error says what to do with it.
            if json:
                needs = [Advice(where, error.code, str(error))]
                print_json({"store": where, "healthy": False, "error": error.code, "needs": msgspec.to_builtins(needs)})
            else:
                complain(str(error))
            return FAILED
        if json:
            print_json(_as_json(health))
        else:
            _print(health)
        return FAILED if health.needs else OK

    perform(work, json)


async def _only_models(agents: list[tuple[str, Agent[object]]], json: bool) -> int:
    states, needs = await examine_models(None, agents)
    if json:
        found = {"models": msgspec.to_builtins(states), "needs": msgspec.to_builtins(needs)}
        print_json({"store": None, "healthy": not needs, **found})
    else:
        _print_models(console(), states)
        _print_needs(console(), needs)
    return FAILED if needs else OK


# ---------------------------------------------------------------------- examining


async def examine(store: Store, deep: bool) -> Health:
    now = int(time.time() * 1000)
    facts = await store.facts(deep)
    dead = await dead_workers(store)
    workers = [_worker(w, dead[w.id], now) for w in await store.workers()]
    processes = await examine_processes(store, dead, now)
    health = Health(facts, workers, [], processes, [])
    if facts.held is not None:
        health.needs.append(Advice("store", facts.held, "restore it, unless its original is still in use"))
    for check in facts.checks:
        if check != "ok":
            advice = "restore the file from a backup, or save what is readable with `sqlite3 FILE .recover`"
            health.needs.append(Advice("store", check, advice))
    if facts.shared:
        advice = f"`chmod -R go= {facts.location}*` makes it its owner's alone; leave it if they are meant to"
        problem = f"others than its owner may use {', '.join(facts.shared)}: they can read what was said, and answer"
        health.needs.append(Advice("store", problem, advice))
    if facts.unfolded_since and now - facts.unfolded_since > UNCLAIMED_MS:
        sizes = f"{size(facts.wal_bytes)} beside {size(facts.bytes - facts.wal_bytes)} of database"
        problem = f"its WAL could not be folded for {span(now - facts.unfolded_since)} and grows: {sizes}"
        advice = f"a connection reads an older state: `lsof {facts.location}` names the processes; end its transaction"
        health.needs.append(Advice("store", problem, advice))
    living = [row for row in await store.workers() if not dead[row.id]]
    if (need := growth(facts, [row.offers for row in living])) is not None:
        health.needs.append(need)
    health.needs += [need for row in living if (need := left_on_threads(row)) is not None]
    alive = [w for w in workers if w["alive"]]
    for row in await store.open_sessions():
        await _examine_turn(store, row, dead, bool(alive), now, health)
    health.needs += processes.needs
    health.needs += [need for each in await store.accounts() if (need := _nearly_spent(each)) is not None]
    health.suspects = await _suspects(store, dead)
    if deep:
        health.checked = await _read_everything(store, health)
    return health


def growth(facts: StoreFacts, offers: Iterable[Offers | None]) -> Advice | None:
    """Return what to do about a large store without retention. `offers` are those of its living workers."""
    if (facts.bytes < LARGE and facts.nodes < MANY_NODES) or any(
        each is not None and each.retention for each in offers
    ):
        return None
    problem = f"it has {size(facts.bytes)} and {facts.nodes:,} nodes, and no worker forgets old sessions"
    advice = "give a worker `Runtime(retention=Retention(days=90))`, or run `perdure prune --older-than 90d` regularly"
    return Advice("store", problem, advice)


def left_on_threads(row: WorkerRow) -> Advice | None:
    """Return what to do about calls of a worker that were given up and still hold a thread."""
    use = None if row.offers is None else row.offers.use
    if use is None or not use.left:
        return None
    calls = plural(
        len(use.left), "call was given up and still holds a thread", "calls were given up and still hold a thread"
    )
    problem = f"{calls} ({use.threads} of {use.most_threads} are in use): {', '.join(use.left[:NAMED])}"
    advice = "a restart of the worker ends them; give the waits in their functions a time limit"
    return Advice(f"worker {row.id}", problem, advice)


async def _suspects(store: Store, dead: dict[str, bool]) -> dict[str, str]:
    """Turns and processes that are suspected of the deaths of their workers, or will be when they are taken over.

    They go on by themselves, so none of them needs a person.
    """
    gone = {row.id: row for row in await store.workers() if dead[row.id]}
    marks = {mark.scope: mark for mark in await store.deaths()}
    scopes = [(row.sid, turn_id(row.id, row.turn or 0), row.owner) for row in await store.open_sessions()]
    scopes += [(-row.pid, row.id, row.owner) for row in await store.active_processes()]
    found = dict[str, str]()
    for scope, name, owner in scopes:
        mark = marks.get(scope)
        if mark is not None and owner in gone:
            mark = suspects.after(mark, scope, suspects.death_of(gone[owner], gone.values()))
        if mark is not None and suspects.is_suspect(mark):
            found[name] = suspects.why(mark)
    return found


def _worker(row: WorkerRow, dead: bool, now: int) -> dict[str, Any]:
    return {
        "id": row.id,
        "alive": not dead,
        "host": row.host,
        "pid": row.pid,
        "started": row.started,
        "up_ms": max(0, now - row.started),
        "beats": row.beat,
        "term_ms": row.term_ms,
    }


async def _examine_turn(
    store: Store, row: SessionRow, dead: dict[str, bool], live_worker: bool, now: int, health: Health
) -> None:
    assert row.turn is not None
    name, state = turn_id(row.id, row.turn), await condition(store, row, dead)
    open_waits = [w for w in await store.waits(row.sid) if w.state == "open" and w.turn == row.turn]
    waits, began = list[PendingCall](), row.updated
    try:
        waits = await asked(store, open_waits)
        first = await load(store, row.sid, row.turn, row.turn)
        began = first[0][1].at if first and isinstance(first[0][1], Said) else began
    except PerdureError as error:
        health.needs.append(Advice(name, str(error), "restore the store from a backup"))
    turn = OpenTurn(
        name,
        row.agent,
        state,
        row.owner,
        row.generation,
        row.takeovers,
        max(0, now - began),
        max(0, now - row.updated),
        [_waits_for(w) for w in waits],
        row.reason,
    )
    health.open.append(turn)
    health.needs += _needs(turn, row, waits, live_worker)


def _nearly_spent(account: Account) -> Advice | None:
    """What is to be said of a limit of which a fifth or less is left, in the window that is or was the last."""
    if (account.spent + account.reserved) * 5 < account.most * 4:
        return None
    kind, per, window = parts_of(account.name)
    whose = "all" if per == "all" else f"{per} {account.key}"
    began = Limit(turns=1, window=window).start(int(time.time() * 1000))
    if account.start < began:
        return None  # that window is over
    spent, most = (shown(kind, each) for each in (account.spent + account.reserved, account.most))
    span_of = "" if window is None else f" this {window}" if isinstance(window, str) else f" in {window:,g} s"
    if account.start > began:
        span_of += ", in a window that has not begun by this clock: another process had a later time"
    unknown = f", of {account.unknown} calls by what was reserved for them" if account.unknown else ""
    problem = f"{spent} of {most} are spent{span_of}{unknown}"
    advice = (
        "raise the limit in Runtime(limits=[…]) and go on with `session.retry()` there, or "
        "`perdure retry SESSION`; or wait for the next window"
    )
    return Advice(f"limit of {whose}", problem, advice)


def _waits_for(call: PendingCall) -> str:
    if call.kind == "process":
        return f"the end of {', '.join(call.processes)}"
    if call.kind == "model":
        return model_wait(call)  # under the heading "waits for"
    return f"{call.kind} of {call.tool} ({call.call_id})"


def _needs(turn: OpenTurn, row: SessionRow, waits: list[PendingCall], live_worker: bool) -> list[Advice]:
    """What a person should do about an open turn; nothing when it goes on by itself."""
    if turn.state == "stuck":
        advice = (
            f"repair the cause, then go on with `perdure run … --session {row.id} --resume`, or end the turn with "
            f"`perdure cancel {row.id}`"
        )
        return [Advice(turn.turn_id, f"stuck: {row.reason or 'no reason recorded'}", advice)]
    if turn.state == "parked":
        answers = {
            "approval": "perdure approve {0} (or reject)",
            "recovery": "perdure settle {0} done (or failed, rerun)",
            "input": "perdure answer {0} '{{…}}' (or --decline)",
        }
        return [
            Advice(turn.turn_id, f"waits for {w.kind} of {w.tool}: {w.reason}", answers[w.kind].format(w.call_id))
            for w in waits
            if w.kind in answers
        ]
    waits_for_a_worker = turn.state in ("queued", "interrupted")
    if waits_for_a_worker and not live_worker:
        advice = f"start a Runtime with agent {row.agent!r} on this store: it goes on by itself"
        return [Advice(turn.turn_id, f"{turn.state}, and no live worker has this store open", advice)]
    if waits_for_a_worker and turn.idle_ms > UNCLAIMED_MS:
        advice = f"does a live worker have agent {row.agent!r}? start one that does"
        return [Advice(turn.turn_id, f"{turn.state}, and no worker took it up for {span(turn.idle_ms)}", advice)]
    return []


async def _read_everything(store: Store, health: Health) -> int:
    """Decode every record and check every blob that one refers to; returns how many records were read."""
    rows = {row.sid: row for row in await store.sessions(SessionFilter(limit=EVERY))}
    for row in list(rows.values()):
        fork = row.fork
        while fork is not None and fork.sid not in rows:
            # A deleted session whose past lives on in its forks is not listed, and must be whole all the same.
            source = await store.session_by_sid(fork.sid)
            if source is None:
                health.needs.append(Advice(row.id, "the session it was forked from is gone", "restore from a backup"))
                break
            rows[source.sid] = source
            fork = source.fork
    count = 0
    with _progress(sum(row.next for row in rows.values()) + health.facts.processes) as advance:
        for row in rows.values():
            for first in range(1, row.next, CHUNK):
                last = min(first + CHUNK, row.next) - 1
                try:
                    count += await _read_turns(store, row, first, last)
                except (StoreError, BlobMissing) as error:
                    health.needs.append(Advice(turn_id(row.id, first), str(error), "restore the store from a backup"))
                advance(last - first + 1)
        count += await read_processes(store, health.needs, advance)
    return count


async def _read_turns(store: Store, row: SessionRow, first: int, last: int) -> int:
    records = await load(store, row.sid, first, last)
    for _, record in records:
        for digest in _digests(record):
            await store.blobs.get(digest)
    return len(records)


def _digests(record: Record) -> list[str]:
    """The blobs that a record refers to: files, whole results, artifacts, and what plugins keep."""
    slot = getattr(record, "slot", None)
    snapshots = slot.snapshots or {} if slot is not None else {}
    found = [blob.digest for snapshot in snapshots.values() for blob in snapshot.blobs.values()]
    if isinstance(record, Said):
        found += [source.digest for source in stored_in([record.message])]
    if isinstance(record, Ended):
        found += [artifact.digest for artifact in record.artifacts]
        if isinstance(record.outcome, Ok) and record.outcome.whole is not None:
            found.append(record.outcome.whole.digest)
        if isinstance(record.outcome, Ok):
            found += blobs_of(record.outcome.files)
    return found


@contextlib.contextmanager
def _progress(total: int) -> Generator[Any, None, None]:
    """A progress bar on a terminal; nothing elsewhere."""
    if not is_terminal():
        yield lambda _: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading everything"), BarColumn(), TextColumn("{task.percentage:.0f}%"))
    with Progress(*columns, TimeRemainingColumn(), console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=total)
        yield lambda turns: progress.advance(task, turns)


# ---------------------------------------------------------------------- printing


def _as_json(health: Health) -> dict[str, Any]:
    facts = health.facts
    return {
        "store": facts.location,
        "healthy": not health.needs,
        "kind": facts.kind,
        "schema": facts.schema,
        "bytes": facts.bytes,
        "wal_bytes": facts.wal_bytes,
        "wal_unfolded_since": facts.unfolded_since or None,
        "sessions": facts.sessions,
        "processes": facts.processes,
        "live_processes": health.processes.states,
        "wakes": health.processes.wakes,
        "commands": health_json(health.processes.commands),
        "sandbox": msgspec.to_builtins(health.sandbox),
        "nodes": facts.nodes,
        "blobs": facts.blobs,
        "shared": list(facts.shared),
        "checks": list(facts.checks),
        "records_read": health.checked,
        "workers": health.workers,
        "suspects": health.suspects,
        "models": msgspec.to_builtins(health.models),
        "open_turns": [msgspec.to_builtins(t) for t in health.open],
        "needs": [msgspec.to_builtins(n) for n in health.needs],
    }


def _print(health: Health) -> None:
    out, facts = console(), health.facts
    now = int(time.time() * 1000)
    text_line(out, f"{facts.location}", "bold")
    text_line(out, f"  {facts.kind}, schema {facts.schema}, {size(facts.bytes)} of which WAL {size(facts.wal_bytes)}")
    counts = [plural(facts.sessions, "session"), plural(facts.nodes, "record"), plural(facts.blobs, "blob")]
    if facts.processes:
        counts.append(plural(facts.processes, "process", "processes"))
    text_line(out, f"  {', '.join(counts)}")
    _print_processes(out, health.processes)
    _print_commands(out, health.processes.commands)
    if health.sandbox is not None:
        text_line(out, f"  {health.sandbox.line}")
    if health.checked is not None:
        checked = plural(health.checked, "record") if not facts.processes else f"{health.checked:,} records and events"
        text_line(out, f"  checked: every page, {checked}, and the blobs they refer to")
    _print_workers(out, health, now)
    if health.open:
        heading(out, "open turns")
        rows = [
            [t.turn_id, t.agent, t.state, t.owner or "—", span(t.age_ms), "; ".join(t.waits_for) or "—"]
            for t in health.open
        ]
        table(out, ["turn", "agent", "state", "owner", "age", "waits for"], rows, fold=(0, 3, 5))
    if health.suspects:
        heading(out, "suspects", "bold yellow")
        for name, why in health.suspects.items():
            text_line(out, f"  {name}: {why}")
    _print_models(out, health.models)
    _print_needs(out, health.needs)


def _print_models(out: Any, states: list[ModelState]) -> None:
    if states:
        heading(out, "models")
    for state in states:
        text_line(
            out, f"  {state.model} ({', '.join(state.named_by)}): {'; '.join(state.lacks) or 'nothing is missing'}"
        )


def _print_needs(out: Any, needs: list[Advice]) -> None:
    if not needs:
        heading(out, "all is well", "bold green")
        return
    heading(out, f"{plural(len(needs), 'thing needs', 'things need')} a person", "bold yellow")
    for need in needs:
        problem, *more = need.problem.split("\n")  # what a person is asked about a command has several lines
        text_line(out, f"  {need.about}: {problem}", "yellow")
        for line in more:
            text_line(out, f"      {line}")
        text_line(out, f"    → {need.advice}")


def _print_processes(out: Any, found: ProcessHealth) -> None:
    """How many live, by state, and how many wakes were not delivered."""
    if found.states:
        text_line(out, f"  live processes: {', '.join(f'{count:,} {state}' for state, count in found.states.items())}")
    if any(found.wakes.values()):
        words = {"awaited": "not needed, because a call had waited for the end"}
        told = [f"{count:,} {words.get(state, state)}" for state, count in found.wakes.items() if count]
        text_line(out, f"  wakes: {', '.join(told)}")


def _print_commands(out: Any, found: CommandHealth) -> None:
    counts = [f"{found.here:,} here"] if found.here else []
    counts += [f"{count:,} on {host}" for host, count in sorted(found.elsewhere.items())]
    counts += [f"{found.lost:,} lost (`perdure ps --all --kind command --status abandoned`)"] if found.lost else []
    if counts:
        text_line(out, f"  commands: {', '.join(counts)}")
    for note in found.notes:
        text_line(out, f"  note: {note}")


def _print_workers(out: Any, health: Health, now: int) -> None:
    if not health.workers:
        text_line(out, "  no worker has it open")
        return
    heading(out, "workers")
    rows = [
        [w["id"], "running" if w["alive"] else "dead", str(w["pid"]), w["host"], ago(w["started"], now)]
        for w in health.workers
    ]
    table(out, ["worker", "state", "pid", "host", "started"], rows)
