"""What a store keeps of a session besides its nodes: the head, who owns it, what waits, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.model.llm import ModelChoice, Usage
from perdure.model.message import Message, Scalar
from perdure.model.plugin import PluginSnapshot
from perdure.model.record import InputKind, SteerBoundary

SessionState: TypeAlias = Literal["idle", "open", "parked", "stuck"]
WaitState: TypeAlias = Literal["open", "resolved", "expired", "cancelled", "revoked"]


class Fork(Struct, frozen=True, gc=False):
    """Where a session's history begins in another one: all before `turn`, and that turn up to record `ordinal`."""

    sid: int
    turn: int
    ordinal: int


class SessionRow(Struct, frozen=True, gc=False):
    """One session. `sid` is the store's own number for it, the prefix of its nodes.

    `turn` is the open turn, if any; `head` the last committed one; `next` the ordinal of the next input. A state of
    `parked` waits for an answer, `stuck` for a person: `reason` says why. `settings` is what was decided for it
    besides its history (`Settings`).
    """

    sid: int
    id: str
    agent: str
    head: int = 0
    next: int = 1
    turn: int | None = None
    state: SessionState = "idle"
    owner: str | None = None
    generation: int = 0
    takeovers: int = 0
    cancel: bytes | None = None
    reason: str | None = None
    fork: Fork | None = None
    created: int = 0
    updated: int = 0
    deleted: bool = False
    settings: bytes = b""

    @property
    def metadata(self) -> dict[str, Scalar]:
        """Whom it is for now."""
        return load_settings(self.settings).metadata

    @property
    def title(self) -> str:
        """What the host calls it; empty where it was not given one."""
        return load_settings(self.settings).title

    @property
    def cursor(self) -> str:
        """Where a listing goes on that ended with this session."""
        return f"{self.updated}.{self.sid}"


class TurnError(Struct, frozen=True, gc=False):
    """How a turn failed: the kind of its outcome (`provider_failed`, `budget_spent`, …), why in words, and when."""

    turn_id: str
    kind: str
    text: str
    at: int


class ListedSession(SessionRow, frozen=True, gc=False):
    """A session as a listing shows it: with a `title` in any case where something was said in it, and with the `error`
    of its last turn if that failed. A later turn that does not fail clears it; one that was cancelled is no error."""

    opening: str = ""
    error: TurnError | None = None

    @property
    def title(self) -> str:
        """What the host calls it, else what its first input begins with."""
        return load_settings(self.settings).title or self.opening

    def __repr__(self) -> str:
        failed = "" if self.error is None else ", its last turn failed"
        return f"<ListedSession {self.id!r} of {self.agent!r}, {self.state}, {self.title!r}{failed}>"


class InboxRow(Struct, frozen=True, gc=False):
    """An accepted input that waits for its turn, or for a boundary of the running one."""

    sid: int
    input: int
    kind: InputKind
    cancel: bytes | None = None


class QueuedInput(Struct, frozen=True, gc=False):
    """An input that waits: for its turn, or (`kind` "steer") for the next boundary of the running one, from `boundary`
    on. `at` is when it was accepted (ms)."""

    turn_id: str
    kind: InputKind
    message: Message
    at: int
    key: str | None = None
    metadata: dict[str, Scalar] = {}
    boundary: SteerBoundary = "after_work"


AWAITS_PROCESSES = "waits for processes"
"""The reason in the row of a turn that is parked until a process ends: it goes on by itself, unlike one that waits for
an answer, and an input that may join it opens it."""


class Dump(Struct, frozen=True, gc=False):
    """The saved interpreter of a turn in code mode, as its executor sealed it: `body`, or the blob `digest`.

    A cache of what the records say: one that is missing or refused costs a rerun of the session's cells.
    """

    body: bytes = b""
    digest: str | None = None


class WaitRow(Struct, frozen=True, gc=False):
    """A durable one-shot promise of a turn. `body` tells a person what is asked, `answer` how it was resolved.

    Either may stand for a blob (`Spilled`), which is kept until the turn is committed.
    """

    id: str
    sid: int
    turn: int
    call: str
    kind: str
    state: WaitState = "open"
    due: int | None = None
    body: bytes = b"{}"
    answer: bytes | None = None


class Declared(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a durable function declares, for those who start it by its name: `events` are `EventType`s as JSON."""

    events: tuple[Any, ...] = ()
    open_signals: bool = True
    max_attempts: int | None = None


class WorkerUse(Struct, frozen=True, gc=False, omit_defaults=True):
    """The places of a worker at its last renewal: for turns, processes and threads, in use and in all.

    `left` are calls that were given up and still hold a thread.
    """

    turns: int = 0
    most_turns: int = 0
    processes: int = 0
    most_processes: int = 0
    threads: int = 0
    most_threads: int = 0
    left: tuple[str, ...] = ()


class Offers(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a worker takes up by itself: turns of these agents, processes of these definitions of durable functions, and
    forgetting what is too old. `socket` is where its live events are read (`observe/remote.py`), "" where nowhere.
    `input_filters` are the agents whose plugins filter what is said to them, `declared` what functions declare, by
    definition, where that is something. `version` is that of its Perdure, and `use` is written at each renewal."""

    agents: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    retention: bool = False
    socket: str = ""
    input_filters: tuple[str, ...] = ()
    declared: dict[str, Declared] = {}
    version: str = ""
    use: WorkerUse | None = None


class WorkerRow(Struct, frozen=True, gc=False):
    """A live Runtime as others see it. `beat` grows with every renewal; wall clocks are never compared.

    `offers` is None for a worker of an older version, which may have any agent. `process` names its OS process, which
    several workers may share; `lived` is how many milliseconds it had lived at its last beat, on its own monotonic
    clock. `suspect` is the scope (`Deaths`) that it runs as its suspect.
    """

    id: str
    host: str
    boot: str
    pid: int
    started: int
    beat: int = 0
    term_ms: int = 30_000
    offers: Offers | None = None
    process: str = ""
    lived: int = 0
    suspect: int | None = None


class Death(Struct, frozen=True, gc=False):
    """The death of a worker as its successor knows it: how long it had lived, and the suspect of its OS process."""

    worker: str
    lived: int = 0
    suspect: int | None = None


class Deaths(Struct, frozen=True, gc=False):
    """What a scope (a session's number, or the negative of a process's) lived through since its last record.

    `counted` deaths of its owners may be its fault, `alone` of them those in which it was the only suspect; `life` is
    the longest of its lives that ended so, in milliseconds. `worker` has it since then, on that worker's clock.
    """

    scope: int
    counted: int = 0
    alone: int = 0
    life: int = 0
    worker: str = ""
    since: int = 0


class Node(Struct, frozen=True, gc=False):
    """A record's place in its turn, and its bytes."""

    ordinal: int
    body: bytes


class CancelRequest(Struct, frozen=True, gc=False, omit_defaults=True):
    """Who asked a turn to stop, and why: the evidence that its commit carries."""

    by: str
    reason: str = ""
    request: str = ""


class Answer(Struct, frozen=True, gc=False, omit_defaults=True):
    """How a wait was resolved: an approval, a denial, a settlement, a deferred value, or that the question is taken
    back ("cancelled")."""

    verdict: Literal["approved", "rejected", "rerun", "done", "failed", "value", "error", "cancelled"]
    value: Any = None
    reason: str = ""
    by: str = ""


class ToolState(Struct, frozen=True, gc=False, omit_defaults=True):
    """What was decided for single tools of a session: a member, or not. `generation` counts the edits."""

    generation: int = 0
    members: dict[str, bool] = {}


class SessionSnapshot(Struct, frozen=True, gc=False, omit_defaults=True):
    """What is committed of a session, for those who may read it. `turn` is the one that is open, if any.

    `label` is what a child session was created for.
    """

    session_id: str
    agent: str
    head: int
    messages: tuple[Message, ...]
    turn: int | None = None
    parent: str | None = None
    tools: ToolState = ToolState()
    label: str = ""


class Appending(Struct, frozen=True, gc=False, tag_field="status", tag="appended"):
    """The messages are accepted: they are part of the history with the next commit."""

    node_ids: tuple[str, ...]
    leaf_node_id: str


class StaleBranch(Struct, frozen=True, gc=False, tag_field="status", tag="stale_branch", omit_defaults=True):
    """The node that had to be part of the history is not: nothing was added."""

    current_leaf_node_id: str | None = None


# ------------------------------------------------------------- settings


class EarlierChoice(Struct, frozen=True, gc=False, omit_defaults=True):
    """The choice of model that the inputs before `until` were accepted under."""

    until: int
    choice: ModelChoice | None = None


class EarlierMetadata(Struct, frozen=True, gc=False, omit_defaults=True):
    """The metadata that the turns before `until` were opened under."""

    until: int
    metadata: dict[str, Scalar] = {}


class Settings(Struct, frozen=True, gc=False, omit_defaults=True):
    """Kept in the session's row. `options` are keyed by plugin.

    `hidden` are tools that cannot be switched on here, `only` all that can: a parent's decision. `snapshots` are
    states of plugins that were changed between turns; the next turn records them and its commit takes them out. `saved`
    names the save that wrote last: two that write the same must not take each other's for their own. `ledger` is what
    direct completions outside of turns have cost, by label, and `models` the same by model. `children` are sessions
    that were begun outside of turns. `prelude` is what a child begins with; its first commit records it and takes it
    out. `output` is the schema of what turns answer with, in place of the agent's own;
    `depth` counts the parents above it. `choice` is the model that its turns ask in place of the agent's; `earlier` are
    choices before it, oldest first, kept for inputs that were accepted under them and may not have ended yet.
    `metadata` says whom the session is for; `replaced` is what the open turn was opened under, where that has changed
    since. `title` is what the host calls it. `filtered`: an input of it has passed filters, so that a Runtime without
    them says nothing to its agent, also while no worker lives that could tell.
    """

    options: dict[str, Any] = {}
    tools: ToolState = ToolState()
    parent: str | None = None
    hidden: tuple[str, ...] = ()
    label: str = ""
    snapshots: dict[str, PluginSnapshot] = {}
    saved: str = ""
    ledger: dict[str, Usage] = {}
    only: tuple[str, ...] | None = None
    models: dict[str, Usage] = {}
    children: tuple[str, ...] = ()
    prelude: tuple[Message, ...] = ()
    output: dict[str, Any] | None = None
    depth: int = 0
    choice: ModelChoice | None = None
    earlier: tuple[EarlierChoice, ...] = ()
    metadata: dict[str, Scalar] = {}
    replaced: EarlierMetadata | None = None
    title: str = ""
    filtered: bool = False


MAX_TITLE = 80
"""Characters of a title that is made from an input."""
JOINERS = "\u200c\u200d"
"""Characters that do not print, and that words and emoji are made with."""


def made_title(message: Message) -> str:
    """A title from what a session begins with: its first line that says something, cut at a word."""
    for line in message.text[: 50 * MAX_TITLE].splitlines():
        shown = " ".join("".join([c if c.isprintable() or c in JOINERS else " " for c in line]).split())
        if not shown.strip(JOINERS):
            continue
        if len(shown) <= MAX_TITLE:
            return shown
        cut = shown[: MAX_TITLE - 1]
        words = cut if shown[MAX_TITLE - 1] == " " else cut.rpartition(" ")[0]
        return f"{(words if len(words) > MAX_TITLE // 2 else cut).rstrip()}…"
    return ""


_DECODER = msgspec.json.Decoder(Settings)


def dump_settings(settings: Settings) -> bytes:
    """As the row keeps it; empty for a session without decisions."""
    data = msgspec.json.encode(settings, order="deterministic")
    return b"" if data == b"{}" else data


def load_settings(data: bytes) -> Settings:
    return _DECODER.decode(data) if data else Settings()


def choice_for(settings: Settings, turn: int) -> ModelChoice | None:
    """The choice that an input was accepted under: a turn asks the same model however often it is taken over."""
    return next((each.choice for each in settings.earlier if turn < each.until), settings.choice)


def choosing(settings: Settings, choice: ModelChoice | None, first: int, following: int) -> Settings:
    """The settings with another choice, for inputs from `following` on. The first that has not ended is `first`."""
    if choice == settings.choice:
        return settings
    earlier = [each for each in settings.earlier if each.until > first]
    if first < following:
        earlier.append(EarlierChoice(following, settings.choice))
    return replace(settings, choice=choice, earlier=tuple(earlier))


def labels_of(settings: bytes) -> frozenset[tuple[str, str]]:
    """The metadata in a row's settings as stores look sessions up by it: keys, and values as JSON."""
    found = load_settings(settings).metadata if b'"metadata"' in settings else {}
    return frozenset([(key, label(value)) for key, value in found.items()])


def same_metadata(one: Mapping[str, Scalar], other: Mapping[str, Scalar]) -> bool:
    """Whether both say the same. To Python 1, 1.0 and True are equal; to who looks sessions up they are not."""
    return one == other and all(type(value) is type(other[key]) for key, value in one.items())


def label(value: Scalar) -> str:
    """A value as it is looked up: 1, 1.0, True and "1" are four different ones."""
    return msgspec.json.encode(value).decode()


def metadata_for(settings: Settings, turn: int) -> dict[str, Scalar]:
    """The metadata that a turn was opened under: an update meanwhile is for the turns after it."""
    replaced = settings.replaced
    return replaced.metadata if replaced is not None and turn < replaced.until else settings.metadata


def describing(settings: Settings, metadata: dict[str, Scalar], open_turn: int | None) -> Settings:
    """The settings with other metadata, for turns that are opened from now on."""
    if same_metadata(metadata, settings.metadata):
        return settings
    replaced = None
    if open_turn is not None:
        replaced = EarlierMetadata(open_turn + 1, metadata_for(settings, open_turn))
    return replace(settings, metadata=metadata, replaced=replaced)


def edited_tools(state: ToolState, edits: Mapping[str, bool | None]) -> ToolState:
    """The state after some tools were switched on, off, or (None) left to the catalogue again."""
    members = {name: member for name, member in (state.members | dict(edits)).items() if member is not None}
    return ToolState(state.generation + 1, members)


def settings_after_commit(
    data: bytes, edits: Mapping[str, bool | None] | None, recorded: Mapping[str, int] | None
) -> bytes:
    """The settings after a turn that made these edits and recorded these revisions of plugins."""
    settings, recorded = load_settings(data), recorded or {}
    tools = edited_tools(settings.tools, edits) if edits else settings.tools
    waiting = {name: each for name, each in settings.snapshots.items() if each.revision > recorded.get(name, -1)}
    saved = settings.saved if waiting else ""
    return dump_settings(replace(settings, tools=tools, snapshots=waiting, saved=saved, prelude=()))


def settings_of_fork(data: bytes, latest: bool) -> bytes:
    """The settings of a fork, without what was spent. A prelude that is there still belongs to the shared history.

    `latest`: the fork shares all of it, so that states of plugins that wait for a turn are its own as well. Elsewhere
    they are states of another history.
    """
    settings = load_settings(data)
    waiting, saved = (settings.snapshots, settings.saved) if latest else ({}, "")
    return dump_settings(
        replace(
            settings,
            snapshots=waiting,
            saved=saved,
            ledger={},
            models={},
            children=(),
            earlier=(),
            replaced=None,
            title="",
        )
    )
