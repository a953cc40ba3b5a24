"""Permissions: which calls run, which a person is asked about, and which never run.

All rules that fit a call are weighed, in whatever order they are written, and the strictest decides:

    deny                the call ends as denied and the model is told why
    allow, remembered   it runs: the host said so during this session, or a person approved the very same call
    ask                 the call waits for `session.approve` or `session.reject`
    allow               it runs
    no rule fits        `default`

So no allow can shadow a deny, also not a remembered one, and a rule that is added never opens what another closed.
An exception from a general "ask" is written as `default="ask"` and an allow.

A glob compares text only: `git *` fits `git status; rm -rf /` too. Allow what you
can name, ask about the rest, and let a sandbox hold what must not happen.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, get_args

from msgspec import Struct, convert, field, to_builtins

from perdure.errors import InvalidDefinition
from perdure.model.codec import encode
from perdure.model.plugin import AskPerson, Directive, EmitTrace, PluginSnapshot, ShortCircuit
from perdure.model.tool import Denied
from perdure.plugins.hooks import (
    Plugin,
    SessionContext,
    SnapshotReader,
    SnapshotWriter,
    ToolCallContext,
    ToolEndContext,
)

Choice: TypeAlias = Literal["allow", "ask", "deny"]

MAX_APPROVED = 1000
"""Approvals that a session remembers; the oldest is forgotten first, and a person is asked again."""


class Rule(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to do with calls of a tool: a glob for its name, and globs for its arguments by their path.

        Rule("deny", "shell", {"command": "rm *"})
        Rule("allow", "http_get", {"url": "https://docs.example.com/*", "options.method": "GET"})
        Rule("ask", "mail_*", remember=True)

    A path goes into objects by its dots and through lists by itself; the path `*` is every argument. Numbers, true,
    false and null are compared as JSON writes them. Where a path leads to several values, `deny` and `ask` fit when one
    of them does, `allow` only when all of them do. A missing argument fits nothing.

    `remember` is for `ask`: once a person approved a call, the same tool with the same arguments runs for the rest of
    the session without asking. `reason` is what the person, or the denied model, is told.
    """

    decision: Choice
    tool: str = "*"
    args: dict[str, str] = {}
    reason: str = ""
    remember: bool = False

    def __post_init__(self) -> None:
        if self.decision not in get_args(Choice):
            raise InvalidDefinition(f"a rule says allow, ask or deny, not {self.decision!r}")
        if self.remember and self.decision != "ask":
            raise InvalidDefinition(f"remember=True means nothing for {self.decision!r}: only an answer is remembered")

    def fits(self, tool: str, args: dict[str, Any]) -> bool:
        return fnmatchcase(tool, self.tool) and all(self._fits_at(args, *each) for each in self.args.items())

    def _fits_at(self, args: dict[str, Any], path: str, glob: str) -> bool:
        found = list(_values(args, () if path == "*" else tuple(path.split("."))))
        if self.decision == "allow":
            return bool(found) and all(text is not None and fnmatchcase(text, glob) for text in found)
        spelled = [each for text in found if text is not None for each in _spellings(text)]
        return any(fnmatchcase(each, glob) for each in spelled)

    def __str__(self) -> str:
        return " ".join([self.decision, self.tool, *[f"{path}={glob}" for path, glob in self.args.items()]])


def _values(value: Any, path: Sequence[str]) -> Iterator[str | None]:
    """The texts that a path leads to; None for each place where it leads nowhere."""
    if isinstance(value, list):
        for item in value:
            yield from _values(item, path)
    elif path:
        yield from _values(value[path[0]], path[1:]) if isinstance(value, dict) and path[0] in value else (None,)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _values(item, path)
    else:
        yield value if isinstance(value, str) else encode(value).decode()


def _spellings(text: str) -> set[str]:
    """A text, and what a tool may make of it: arguments are checked after us, and leniently.

    A tool that takes a bool takes "True" and 1, one that takes an int takes "5.0". Neither is a way around a rule.
    """
    lowered = text.lower()
    try:
        number = float({"true": "1", "false": "0"}.get(lowered, text))
    except ValueError:
        return {text, lowered} if lowered == "null" else {text}
    if not number.is_integer():
        return {text}
    return {text, str(int(number))} | ({"true"} if number == 1 else {"false"} if number == 0 else set())


class Judgement(Struct, frozen=True):
    """What the rules say to a call, and in whose words."""

    decision: Choice
    rule: str
    reason: str = ""
    remember: bool = False


class Entry(Struct, frozen=True, array_like=True):
    """A line of the audit trail. `ran`: a call that the rules ask about has run. Arguments are not kept."""

    call_id: str
    tool: str
    decision: Literal["allow", "ask", "deny", "ran"]
    rule: str


class Memory(Struct):
    """What a session remembers. `approved` are fingerprints of calls."""

    rules: list[Rule] = field(default_factory=list)
    approved: list[str] = field(default_factory=list)
    trail: list[Entry] = field(default_factory=list)


class SessionOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What may be said when a session is opened: more rules, and another default."""

    rules: tuple[Rule, ...] = ()
    default: Choice | None = None


class Permissions(Plugin):
    """Decides about every call before its arguments are checked.

        Agent(model, plugins=[Permissions([Rule("allow", "read_*"), Rule("deny", "shell", {"command": "*sudo*"})])])

    One session may have its own: `options={"permissions": {"rules": [{"decision": "allow", "tool": "search"}]}}`. Every
    decision goes to the trace; the newest `trail` of them are kept with the session, without arguments.

    Hooks see calls and not answers. A call that ran although the rules ask about it was approved; one that
    was rejected is never heard of again, so nothing is remembered from it. Without its memory no turn runs
    (`required`).
    """

    id = "permissions"
    required = True

    def __init__(self, rules: Iterable[Rule] = (), *, default: Choice = "ask", trail: int = 50) -> None:
        if default not in get_args(Choice):
            raise InvalidDefinition(f"the default is allow, ask or deny, not {default!r}")
        if trail < 0:
            raise InvalidDefinition(f"a trail of {trail} decisions is not usable: give 0 or more")
        self.rules, self.default = tuple(rules), default
        self._keep = trail
        self._memory, self._revision = Memory(), 0

    def for_session(self, ctx: SessionContext) -> Permissions:
        options = SessionOptions() if ctx.options is None else convert(ctx.options, SessionOptions)
        mine = copy.copy(self)
        mine.rules = (*self.rules, *options.rules)
        mine.default = options.default or self.default
        mine._memory, mine._revision = Memory(), 0
        return mine

    # ------------------------------------------------------------------ what hosts and tools may ask

    @property
    def trail(self) -> tuple[Entry, ...]:
        """The newest decisions, oldest first."""
        return tuple(self._memory.trail)

    def remember(self, rule: Rule) -> None:
        """Add a rule for the rest of this session. An allow goes before every `ask`, and before no `deny`.

        It is saved with the next record of the session.
        """
        if rule not in self._memory.rules:
            self._memory.rules.append(rule)
            self._revision += 1

    def judge(self, tool: str, args: dict[str, Any]) -> Judgement:
        """What the rules say to a call, without asking or noting anything."""
        given = [rule for rule in self.rules if rule.fits(tool, args)]
        remembered = [rule for rule in self._memory.rules if rule.fits(tool, args)]
        for rule in (*given, *remembered):
            if rule.decision == "deny":
                return Judgement("deny", str(rule), rule.reason or f"not permitted by the rule `{rule}`")
        for rule in remembered:
            if rule.decision == "allow":
                return Judgement("allow", f"remembered: {rule}")
        asking = [rule for rule in (*given, *remembered) if rule.decision == "ask"]
        if asking:
            return self._question(asking, _fingerprint(tool, args))
        if given:
            return Judgement("allow", str(given[0]))
        return Judgement(self.default, "default", "no rule permits it" if self.default != "allow" else "")

    def _question(self, asking: list[Rule], fingerprint: str) -> Judgement:
        # A rule that wants to ask every time does so, whatever another one would remember.
        remember = all(rule.remember for rule in asking)
        if remember and fingerprint in self._memory.approved:
            return Judgement("allow", f"approved before: {asking[0]}")
        reason = asking[0].reason or f"the rule `{asking[0]}` asks"
        return Judgement("ask", str(asking[0]), reason, remember)

    # ------------------------------------------------------------------ hooks

    def before_tool_call(self, ctx: ToolCallContext) -> list[Directive]:
        name = ctx.tool.name
        judged = self.judge(name, ctx.args)
        self._note(Entry(ctx.call_id, name, judged.decision, judged.rule))
        judgement = {"call_id": ctx.call_id, "tool": name, "decision": judged.decision, "rule": judged.rule}
        found: list[Directive] = [EmitTrace("decision", judgement)]
        if judged.decision == "deny":
            found.append(ShortCircuit(Denied(judged.reason, by=self.id)))
        elif judged.decision == "ask":
            found.append(AskPerson(judged.reason))
        return found

    def after_tool_call(self, ctx: ToolEndContext) -> None:
        """Judge the call as it ran: the person was shown these arguments, whatever the model had given."""
        if ctx.late:
            return  # what a host or a function started, no person has approved
        name = ctx.tool.name
        judged = self.judge(name, ctx.args)
        if judged.decision != "ask":
            return
        self._note(Entry(ctx.call_id, name, "ran", judged.rule))
        if judged.remember:
            self._memory.approved = [*self._memory.approved, _fingerprint(name, ctx.args)][-MAX_APPROVED:]
            self._revision += 1

    def _note(self, entry: Entry) -> None:
        """Once per call and decision: a hook that runs again after a crash decides the same."""
        if self._keep and entry not in self._memory.trail:
            self._memory.trail = [*self._memory.trail, entry][-self._keep :]
            self._revision += 1

    # ------------------------------------------------------------------ state

    @property
    def revision(self) -> int:
        return self._revision

    def snapshot(self, writer: SnapshotWriter) -> Any:
        return to_builtins(self._memory)

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        self._memory = Memory() if snapshot.state is None else convert(snapshot.state, Memory)
        self._revision = snapshot.revision


def _fingerprint(tool: str, args: dict[str, Any]) -> str:
    return hashlib.sha256(encode([tool, args])).hexdigest()[:32]
