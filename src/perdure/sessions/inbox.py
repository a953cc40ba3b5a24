"""The only ways into a session: inputs, and what is asked of its turns. Each is on disk when its method returns."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from perdure.engine.journal import SPILL_BYTES, spill, write_referring
from perdure.engine.lease import Worker
from perdure.engine.limits import Reserved
from perdure.engine.waiters import depth
from perdure.engine.waits import named, whole
from perdure.errors import BlobMissing, CannotRetry, InvalidDefinition, InvalidInput, KeyConflict, quoted
from perdure.model import validate
from perdure.model.codec import clean_message, clean_text, encode, encode_checked
from perdure.model.ids import turn_id
from perdure.model.llm import ModelChoice
from perdure.model.message import FILES, InputContent, Message, Scalar, Stored, Text
from perdure.model.outcome import (
    BudgetSpent,
    Finished,
    Incomplete,
    LimitReached,
    PluginAborted,
    ProviderFailed,
    kind_of,
)
from perdure.model.record import InputKind, Reopened, Said, Spilled, SteerBoundary
from perdure.model.session import Answer, CancelRequest, Node, SessionRow, WaitRow
from perdure.model.tool import Failed
from perdure.model.write import (
    Accept,
    Accepted,
    Cancel,
    CancelReceipt,
    CancelStatus,
    Delete,
    ReopenTurn,
    Resolve,
    Resolved,
    Resume,
    SessionFilter,
    SessionRef,
)
from perdure.observe.feed import Feed
from perdure.ports.host import Clock, Random
from perdure.ports.store import BlobStore, SessionReads, Store
from perdure.sessions.cache import Archive
from perdure.sessions.definition import Definition
from perdure.sessions.input_filters import FilteredInput, InputFilters, with_digests
from perdure.sessions.turns import Turns
from perdure.tools.output import blobs_of, saved

MAX_KEY = 512

PROCESS_REPORT = "[process"
"""How a line begins with which the runtime reports on a process (`wakes/late_results.py`)."""


class Inbox:
    """Takes inputs in. What is said from outside to an agent that is not among `filters.unfiltered` is `filtered`
    first."""

    def __init__(self, store: Store, clock: Clock, random: Random, turns: Turns, filters: InputFilters) -> None:
        self._store, self._clock, self._random, self._turns = store, clock, random, turns
        self.filters = filters

    async def filtered(  # noqa: PLR0913  # what an input is, each by its place
        self,
        session_id: str,
        agent: str,
        said: InputContent,
        kind: InputKind = "queue",
        key: str | None = None,
        metadata: dict[str, Scalar] | None = None,
        of_session: dict[str, Scalar] | None = None,
    ) -> InputContent | FilteredInput:
        """What filters leave of an input that comes from outside, to be accepted; itself where there are none."""
        if key is not None:
            _check_key(key)
        message = await self.filters.passed(session_id, agent, said, kind, metadata, of_session)
        if message is None or key is None:
            return said if message is None else FilteredInput(message)
        raw = await with_digests(quote_process_reports(clean_message(said, unsaved=True)))
        content = _content(kind, raw, metadata)
        return FilteredInput(message, await self.filters.digest(content), _digest(content))

    async def accept(  # noqa: C901, PLR0913, PLR0915  # what an input is, each by its place
        self,
        session_id: str,
        agent: str,
        said: InputContent | FilteredInput,
        kind: InputKind = "queue",
        key: str | None = None,
        choice: ModelChoice | None = None,
        metadata: dict[str, Scalar] | None = None,
        of_session: dict[str, Scalar] | None = None,
        boundary: SteerBoundary = "after_work",
    ) -> Accepted:
        """Make an input durable, and start on it if the session was idle. `metadata` is the input's own; `of_session`
        is what a new session is for, and one that exists must be. `boundary` is for what is steered."""
        filtered = type(said) is FilteredInput
        message: Message = said.message if isinstance(said, FilteredInput) else clean_message(said, unsaved=True)
        files: tuple[str, ...] = ()
        if any(type(part) is Text and PROCESS_REPORT in part.text.lower() for part in message.parts):
            message = quote_process_reports(message)
        given_message = message
        if any(isinstance(part, FILES) for part in message.parts):
            message, files = await save_files(self._store.blobs, message)
        checked = None if key is None else _check_key(key)
        now = self._clock.now()
        op = f"{self._random.bits(64):016x}"
        record = Said(message, now, op, kind, checked, (), depth(), choice, metadata or {}, boundary)
        whole = encode_checked(record, "the input")
        body, blobs = (whole, ()) if len(whole) <= SPILL_BYTES else await spill(self._store, whole)
        digest = b""
        if checked is not None:
            digest = said.digest if isinstance(said, FilteredInput) else _digest(_content(kind, message, metadata))
        able, places = self._turns.worker_for(agent), self._turns.places
        placed = able is not None and places.try_take()
        worker = able if placed else None
        refers = (*blobs, *files)
        try:
            spending = None
            if self._turns.spend_limits is not None and worker is not None and choice is None:
                spending = self._turns.first_spending(session_id, agent, op, len(whole), metadata or {})
            accept = Accept(
                session_id,
                agent,
                body,
                op,
                now,
                kind,
                checked,
                digest,
                worker,
                refers,
                None,
                of_session,
                filtered,
                spending,
            )
            write = functools.partial(self._turns.runner.write, session_id, accept)

            async def put_again() -> None:
                await save_files(self._store.blobs, given_message)
                await spill(self._store, whole)

            try:
                accepted = await (write_referring(write, put_again) if accept.blobs else write())
            except BlobMissing as missing:
                if missing.digest not in _given_by_digest(given_message):
                    raise
                raise InvalidInput(f"this store has no bytes for a file of the input: {missing}") from None
            except KeyConflict:
                if not isinstance(said, FilteredInput):
                    raise
                # The input may have been accepted before its agent had filters. The key is known: nothing is written.
                accepted = await self._turns.runner.write(session_id, replace(accept, digest=said.before))
        except BaseException:  # also a cancellation: a place that is not released is lost to all
            if placed:
                places.release()
            raise
        opened = not accepted.known and accepted.opened and worker is not None
        if placed and not opened:
            places.release()
        if accepted.known:
            return accepted
        if opened:
            reserved = None
            if spending is not None and spending.ask is not None and accepted.granted is not None:
                reserved = Reserved(spending.ask, accepted.granted.output) if accepted.granted.output else None
            self._turns.launch(accepted.row, record, reserved, placed=True)
        elif kind != "queue":
            self._turns.note_inputs(session_id)
            if accepted.row.owner is not None:
                self._turns.go_on(accepted.row)  # it was parked until a process ends, and this opened it
        row = accepted.row
        if able is not None and not placed and row.turn is not None and row.state == "open" and row.owner is None:
            places.wait(session_id)
        return accepted


def _content(kind: InputKind, message: Message, metadata: dict[str, Scalar] | None) -> tuple[object, ...]:
    """What the same key must come with."""
    return (kind == "note", message, metadata) if metadata else (kind == "note", message)


def _digest(content: tuple[object, ...]) -> bytes:
    return hashlib.blake2b(encode(content), digest_size=16).digest()


async def save_files(blobs: BlobStore, message: Message) -> tuple[Message, tuple[str, ...]]:
    """The message with the bytes of its files in the store, and their digests."""
    if not any(isinstance(part, FILES) for part in message.parts):
        return message, ()
    parts = [await saved(p, blobs.put, blobs.put_file) if isinstance(p, FILES) else p for p in message.parts]
    return Message(message.role, tuple(parts)), blobs_of([part for part in parts if isinstance(part, FILES)])


def quote_process_reports(message: Message) -> Message:
    """The message with each line quoted that a model could take for the runtime's own report on a process."""
    return Message(message.role, tuple([_quoted(part) if type(part) is Text else part for part in message.parts]))


def _quoted(part: Text) -> Text:
    lines = part.text.splitlines(keepends=True)
    return Text("".join([f"> {line}" if line.lstrip().lower().startswith(PROCESS_REPORT) else line for line in lines]))


def _given_by_digest(message: Message) -> set[str]:
    """Files that the host says are in the store already: nothing here can put them again."""
    sources = [getattr(part, "source", None) for part in message.parts]
    return {source.digest for source in sources if isinstance(source, Stored)}


def _check_key(key: object) -> str:
    if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY:
        raise InvalidInput(f"a key is a string of 1 to {MAX_KEY} characters, not {quoted(key):.80}")
    plain = clean_text(key)
    if plain != key:
        raise InvalidInput("a key may not contain NUL or lone surrogates: use an id of your own")
    return plain


def pick_agent(definitions: Mapping[str, Definition], name: str | None) -> str:
    """The agent of a session whose turns are to run here: the named one, or the first."""
    if name is not None:
        name = validate.name(name, "agent", InvalidDefinition)
        if name not in definitions:
            known = ", ".join(definitions) or "none"
            raise InvalidDefinition(f"this Runtime has no agent {quoted(name)}; it has: {known}")
        return name
    if not definitions:
        raise InvalidDefinition("this Runtime has no agents: give it agents=[…], or name an existing session")
    return next(iter(definitions))


async def find_agent(
    definitions: Mapping[str, Definition], name: str | None, worker: Worker, store: SessionReads
) -> str:
    """The agent of a new session, which only other workers on this store may have."""
    if definitions and (name is None or name in definitions):
        return pick_agent(definitions, name)
    if name is not None:
        name = validate.name(name, "agent", InvalidDefinition)
    offered = [offers.agents for offers in await worker.offered_elsewhere() if offers.agents]
    elsewhere = list(dict.fromkeys([agent for agents in offered for agent in agents]))
    if name is None and len({agents[0] for agents in offered}) == 1:
        return elsewhere[0]
    if name is not None and name in elsewhere:
        return name
    unknown = (
        name is None or definitions or (elsewhere and not await store.sessions(SessionFilter(agent=name, limit=1)))
    )
    if name is not None and not unknown:
        return name  # its workers may be down just now: what is said to it waits for them, and the host is told so
    if elsewhere:
        have = f"{', '.join(elsewhere)}, of other workers on its store"
        raise InvalidDefinition(
            f"this Runtime has no agent {quoted(name)}: give agent= one of {', '.join([*definitions, have])}"
        )
    return pick_agent(definitions, name)  # which refuses it


# ---------------------------------------------------------------------- requests

# What is asked of the turns of sessions from outside, durably: answers to their waits, cancels, resuming, deletion.

RETRIABLE = (ProviderFailed, BudgetSpent, LimitReached, PluginAborted, Incomplete, Failed)
"""Ends without an answer that a turn can be continued after."""
SETTLEMENTS = ("rerun", "done", "failed")


class TurnRequests:
    """`on_deleted` is called with the id of each session that was deleted here."""

    def __init__(  # noqa: PLR0913  # put together in one place
        self,
        store: Store,
        clock: Clock,
        worker: Worker,
        archive: Archive,
        feed: Feed,
        turns: Turns,
        on_deleted: Callable[[str], None],
    ) -> None:
        self._store, self._clock, self._worker, self._archive = store, clock, worker, archive
        self._feed, self._turns, self._on_deleted = feed, turns, on_deleted

    async def resolve(self, wait_id: str, answer: Answer | None) -> Resolved:
        """Resolve a wait, and work on its turn if this Runtime may."""
        agents = self._turns.agents
        data = encode(answer)
        _, blobs = await spill(self._store, data)
        given = Spilled(blobs[0], len(data)) if blobs else answer
        resolve = Resolve(wait_id, given, self._clock.now(), self._worker.id if agents else None, agents)
        write = functools.partial(self._turns.runner.write, named(wait_id)[0], resolve)
        put_again = functools.partial(spill, self._store, data)
        resolved: Resolved = await (write_referring(write, put_again) if blobs else write())
        if resolved.status == "accepted" and resolved.row is not None:
            self._turns.go_on(resolved.row)
            return resolved
        wait = None if resolved.wait is None else await whole(self._store, resolved.wait)
        if wait is not None:
            return replace(resolved, wait=wait)
        return await self._too_late(wait_id, answer) or Resolved("unknown")

    async def expire(self, wait_id: str) -> bool:
        """End a wait whose time is up, and work on its turn if this Runtime may. True if it was open."""
        return (await self.resolve(wait_id, None)).status == "accepted"

    async def ended(self, wait_id: str) -> WaitRow | None:
        """How a wait has ended, also one of a committed turn; None while it is open, and where there was none."""
        wait = await self._store.wait(wait_id)
        if wait is not None and (wait := await whole(self._store, wait)) is not None:
            return None if wait.state == "open" else wait
        late = await self._too_late(wait_id, None)
        return None if late is None else late.wait

    async def _too_late(self, wait_id: str, answer: Answer | None) -> Resolved | None:
        """How a wait of a committed turn had ended; None when there was none."""
        row = await self._store.session(named(wait_id)[0])
        wait = None if row is None or row.deleted else await self._archive.recalled(row, wait_id)
        if wait is None:
            return None
        if wait.state == "cancelled" and answer is not None and answer.verdict in SETTLEMENTS:
            return None  # the outcome of the call is unknown still, and may be settled
        return Resolved("already_resolved", wait, row)

    async def cancel(self, session_id: str, agent: str, request: CancelRequest, turn: int | None) -> CancelStatus:
        """Ask a turn to stop: the running one, or the given one. The request is on disk when this returns."""
        write = Cancel(SessionRef(session_id), request, self._clock.now(), turn, self._turns.worker_for(agent))
        receipt: CancelReceipt[SessionRow] = await self._turns.runner.write(session_id, write)
        if receipt.status == "requested" and receipt.row is not None:
            self._turns.cancelled(receipt.row, request, receipt.turn)
        return receipt.status

    async def cancel_queued(
        self, session_id: str, inputs: tuple[int, ...], request: CancelRequest
    ) -> tuple[CancelStatus, ...]:
        """Ask that the turns of these inputs end before they begin, as far as the inputs still wait.

        A running turn here may have read one whose delivery is not on disk yet: it is not asked for.
        """
        read = self._turns.read_by_running(session_id)
        over: CancelStatus = "completion_won"
        write = Cancel(
            SessionRef(session_id), request, self._clock.now(), queued=tuple([n for n in inputs if n not in read])
        )
        if not write.queued:
            return (over,) * len(inputs)
        receipt: CancelReceipt[SessionRow] = await self._turns.runner.write(session_id, write)
        statuses = iter(receipt.each)
        return tuple([over if number in read else next(statuses) for number in inputs])

    async def resume(self, session_id: str, agent: str) -> bool:
        """Work again on a turn that is stuck. False when none is."""
        resume = Resume(SessionRef(session_id), self._clock.now(), self._turns.worker_for(agent), self._worker.lived)
        row = await self._turns.runner.write(session_id, resume)
        if row is not None:
            self._turns.go_on(row)
        return row is not None

    async def reopen(self, row: SessionRow, turn: int, by: str) -> None:
        """Continue the last turn of a session, and work on it if this Runtime may. Raises CannotRetry."""
        name = turn_id(row.id, turn)
        if turn < row.head or (row.turn is not None and turn < row.turn):
            raise CannotRetry(name, "a later turn was begun: say something new")
        if turn == row.turn:
            return  # another caller was first, or it has not ended: its end is waited for
        if turn != row.head:
            raise CannotRetry(name, "it has not begun")
        retriable = await self._archive.retriable(row)
        if retriable is None:
            return
        outcome, ordinal = retriable
        if not isinstance(outcome, RETRIABLE):
            why = "it has an answer" if isinstance(outcome, Finished) else f"it ended as {kind_of(outcome)}"
            raise CannotRetry(name, f"{why}: say something new")
        node = Node(ordinal, encode(Reopened(self._clock.now(), by)))
        head, settings = await self._archive.before(row, turn)
        worker = self._turns.worker_for(row.agent)
        write = ReopenTurn(row.id, turn, head, node, self._clock.now(), worker, settings, row.settings)
        after = await self._turns.runner.write(row.id, write)
        if after is None:
            raise CannotRetry(name, "another turn was begun meanwhile")
        if after.turn == turn:
            self._turns.go_on(after)

    async def retry_now(self, row: SessionRow, by: str) -> bool:
        """Make the next attempt of a parked turn's model call at once. True if the turn waited for one."""
        waits = [w for w in await self._store.waits(row.sid) if w.state == "open" and w.kind == "model"]
        done = [(await self.resolve(wait.id, Answer("rerun", by=by))).status == "accepted" for wait in waits]
        return any(done)

    async def delete(self, session_id: str, unused_since: int | None = None) -> bool:
        """Delete a session; with `unused_since` only if nothing has happened to it since then. False: it was not."""
        deleted = await self._store.write(Delete(session_id, self._clock.now(), unused_since))
        if deleted or unused_since is None:
            self._turns.outcomes.session_deleted(session_id)
            self._feed.end(session_id)
        if unused_since is None:
            self._on_deleted(session_id)
        return deleted
