"""Policies: which command lines run, which a person is asked about, and which never run.

    line → programs (`shell.py`, `invocations.py`) → labels (`risks.py`) → rules → Verdict

Each program of a line is judged by itself, and the strictest judgement is that of the line:

    catastrophic      deny, whatever the rules say: a disk, the machine or a whole system would be lost
    a deny rule fits  deny
    an ask rule fits  ask
    it is unclear     `unclear`, which is ask: no rule can allow what is not understood
    an allow rule fits, and names every label      allow
    it has no label   allow: a known program that only reads
    else              `otherwise`, which is ask unless the host says otherwise

So the order of rules does not matter, and a rule that is added never opens what another one closed. An allow rule
covers the risks that it names and no others: `Rule("allow", "git", ("push",), labels=("network", "write"))` lets git
push, and still asks about a push with `--force`. A rule for deny or ask fits as widely as it can be read, one for allow
as narrowly.

Nothing here acts, waits or looks at the machine: the same line has the same verdict everywhere, also when it is shown
again after a crash. A verdict is advice about a text. What a command can do is decided by the sandbox.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, get_args

from msgspec import Struct

from perdure.errors import InvalidDefinition, quoted
from perdure.workspace.paths import Paths
from perdure.workspace.programs import Label

if TYPE_CHECKING:
    from perdure.workspace.invocations import Invocation
    from perdure.workspace.risks import Scene

RuleAction: TypeAlias = Literal["allow", "ask", "deny"]

STRICTNESS: dict[RuleAction, int] = {"allow": 0, "ask": 1, "deny": 2}
LABELS: tuple[Label, ...] = get_args(Label)
MAX_FOLDERS = 16
MAX_RISKS = 100
"""Of one verdict; a line that has more is asked about in any case."""
MAX_WORDS = 2_000
"""Of all programs of a line: each may be a path, which is looked at from every folder that the line may be in."""


class CommandLine(Struct, frozen=True, omit_defaults=True):
    """What is to be judged: arguments that no shell reads, or the text for one. `env` are the names of variables that
    are set for it. `made_by`: whether a model wrote it, or a tool of ours, which asks only where a rule says so."""

    argv: tuple[str, ...] = ()
    shell: str = ""
    cwd: str = ""
    roots: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    store: str | None = None
    made_by: Literal["model", "tool"] = "model"


class Risk(Struct, frozen=True, omit_defaults=True):
    """Something that a part of a line may do, and why that is said."""

    label: Label
    reason: str
    part: str = ""


class Verdict(Struct, frozen=True, omit_defaults=True):
    """What a policy says to a line. `because` is what decided: a rule, or what there was without one."""

    decision: RuleAction
    risks: tuple[Risk, ...] = ()
    because: str = ""

    @property
    def labels(self) -> tuple[Label, ...]:
        """The labels of all risks, each once, in the order of `LABELS`."""
        found = {each.label for each in self.risks}
        return tuple([label for label in LABELS if label in found])

    @property
    def reasons(self) -> tuple[str, ...]:
        """One line for each risk: its label, the reason, and the part of the command."""
        return tuple([f"{each.label}: {each.reason}" for each in self.risks])


class Rule(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to do with programs of a command line.

        Rule("allow", "pytest")
        Rule("allow", "git", ("commit",), labels=("write",))
        Rule("deny", labels=("network", "sudo"))
        Rule("ask", "make", cwd="/work/app/deploy*")

    `program` and `cwd` are globs, `args` the first arguments. `labels`: of an allow, all that the program may have; of
    the others, one of those that it has. An allow that names its program exactly accepts that its effects are unknown.
    """

    decision: RuleAction
    program: str = "*"
    args: tuple[str, ...] = ()
    labels: tuple[Label, ...] = ()
    cwd: str = "*"
    reason: str = ""

    def __post_init__(self) -> None:
        if self.decision not in STRICTNESS:
            raise InvalidDefinition(f"a rule says allow, ask or deny, not {quoted(self.decision)}")
        self._check_types()
        unknown = [each for each in self.labels if each not in LABELS]
        if unknown:
            raise InvalidDefinition(f"{quoted(unknown[0])} is no label: give some of {', '.join(LABELS)}")
        never = {"catastrophic", "unclear"} & set(self.labels)
        if self.decision == "allow" and never:
            raise InvalidDefinition(f"no rule allows what is {min(never)}: leave it out of labels")
        if self.decision == "allow" and self.program == "*" and self.args:
            raise InvalidDefinition("args of an allow rule are those of a program: name it")

    def _check_types(self) -> None:
        """A Struct that is made in Python takes any value."""
        given: list[tuple[str, object]] = [("program", self.program), ("cwd", self.cwd)]
        for name, value in given:
            if not isinstance(value, str) or not value:
                raise InvalidDefinition(f"{name}={quoted(value)} of a rule is not usable: give a glob such as 'git'")
        given = [("args", self.args), ("labels", self.labels)]
        for name, value in given:
            if not isinstance(value, tuple) or not all(isinstance(each, str) for each in value):
                raise InvalidDefinition(f"{name}={quoted(value)} of a rule is not usable: give a tuple of texts")

    def fits(self, it: Invocation, labels: frozenset[str], cwd: str) -> bool:
        return self._allows(it, labels, cwd) if self.decision == "allow" else self._catches(it, labels, cwd)

    def _allows(self, it: Invocation, labels: frozenset[str], cwd: str) -> bool:
        """As narrowly as the rule can be read."""
        accepted = {*self.labels, *(["unknown"] if not _is_glob(self.program) else [])}
        named = it.program if "/" in self.program else it.name
        first = it.args[: len(self.args)]
        return (
            fnmatchcase(named, self.program)
            and labels <= accepted
            and len(first) == len(self.args)
            and all(word.certain and word.value == wanted for word, wanted in zip(first, self.args, strict=True))
            and fnmatchcase(cwd, self.cwd)
        )

    def _catches(self, it: Invocation, labels: frozenset[str], cwd: str) -> bool:
        """As widely as it can be read: by any spelling of the name, wherever the arguments are."""
        glob, spelled = self.program.casefold(), it.program.casefold()
        if not it.words and glob != "*":
            return False
        if not any(fnmatchcase(each, glob) for each in (spelled, spelled.rpartition("/")[2])):
            return False
        wanted = list(self.args)
        for word in it.args:
            if wanted and word.value == wanted[0]:
                wanted.pop(0)
        return not wanted and (not self.labels or bool(labels & set(self.labels))) and fnmatchcase(cwd, self.cwd)

    def __str__(self) -> str:
        parts = [self.decision, self.program, *self.args]
        return " ".join([*parts, *([f"[{', '.join(self.labels)}]"] if self.labels else [])])


def _is_glob(text: str) -> bool:
    return any(sign in text for sign in "*?[")


class Policy(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rules for the commands of a workspace: `Workspace(roots, policy=Policy((Rule("allow", "pytest"),)))`.

    `otherwise` is what becomes of a program that no rule fits and that does more than read; `unclear`, of one of which
    it is not certain what it does, whatever rules allow. A host that lets the sandbox decide alone allows both.
    """

    rules: tuple[Rule, ...] = ()
    otherwise: RuleAction = "ask"
    unclear: RuleAction = "ask"

    default: ClassVar[Policy]

    def __post_init__(self) -> None:
        for name, value in (("otherwise", self.otherwise), ("unclear", self.unclear)):
            if value not in STRICTNESS:
                raise InvalidDefinition(f"{name}={quoted(value)} is not usable: give allow, ask or deny")
        rules: object = self.rules
        if not isinstance(rules, tuple) or not all(isinstance(each, Rule) for each in rules):
            raise InvalidDefinition(f"Policy(rules={quoted(rules)}) is not usable: give a tuple of Rule")

    def judge(self, line: CommandLine) -> Verdict:
        """What the rules say to a line. Never raises: what is not understood is asked about."""
        # Read with the first line that is judged, or by `load_parsers`: most programs run no commands.
        from perdure.workspace.invocations import invocations, of_argv  # noqa: PLC0415
        from perdure.workspace.risks import findings, of_variable  # noqa: PLC0415
        from perdure.workspace.shell import MAX_LENGTH, ShellUnclear, parse  # noqa: PLC0415

        try:
            if sum([len(each) for each in line.argv]) > MAX_LENGTH:
                raise ShellUnclear(f"it is longer than {MAX_LENGTH:,} characters")
            found = of_argv(line.argv) if line.argv else invocations(parse(line.shell).commands)
            if sum([len(it.words) for it in found]) > MAX_WORDS:
                raise ShellUnclear(f"it has more than {MAX_WORDS:,} words")
        except (ShellUnclear, RecursionError) as unclear:
            why = str(unclear) if isinstance(unclear, ShellUnclear) else "it is nested too deeply"
            risk = Risk("unclear", f"the command line is not understood: {why}", line.shell or " ".join(line.argv))
            return Verdict(self._uncertain(), (risk,), risk.reason)
        scene = _scene(line, found)
        decision: RuleAction = "allow"
        because, risks = "", list[Risk]()
        if not found:
            return Verdict(self._uncertain(), (Risk("unclear", "there is no command"),), "there is no command")
        for it in found:
            mine = dict.fromkeys(findings(it, scene))
            judged, why = self._judge(it, frozenset([label for label, _ in mine]), line)
            if STRICTNESS[judged] > STRICTNESS[decision] or not because:
                decision, because = judged, why
            risks += [Risk(label, reason, it.text) for label, reason in mine]
        for name in line.env:
            mine = dict.fromkeys(of_variable(name))
            risks += [Risk(label, reason, name) for label, reason in mine]
            judged, why = self._otherwise(frozenset([label for label, _ in mine]), line)
            if STRICTNESS[judged] > STRICTNESS[decision]:
                decision, because = judged, why
        if len(risks) > MAX_RISKS:
            risks = [*risks[:MAX_RISKS], Risk("unclear", f"{len(risks) - MAX_RISKS} more")]
        return Verdict(decision, tuple(dict.fromkeys(risks)), because)

    def _judge(self, it: Invocation, labels: frozenset[str], line: CommandLine) -> tuple[RuleAction, str]:
        if "catastrophic" in labels:
            return "deny", "it destroys a disk, the machine or a whole system, and is never run"
        fitting = [rule for rule in self.rules if rule.fits(it, labels, line.cwd)]
        for decision in ("deny", "ask"):
            for rule in fitting:
                if rule.decision == decision:
                    return decision, rule.reason or f"the rule `{rule}`"
        if fitting and "unclear" not in labels:
            return "allow", f"the rule `{fitting[0]}`"
        return self._otherwise(labels, line)

    def _otherwise(self, labels: frozenset[str], line: CommandLine) -> tuple[RuleAction, str]:
        """What becomes of what no rule decides."""
        if line.made_by == "tool":
            return "allow", "a tool of the workspace made it"
        if "unclear" in labels:
            return self._uncertain(), "what it does is not certain"
        if not labels:
            return "allow", "it only reads"
        return self.otherwise, "no rule allows it"

    def _uncertain(self) -> RuleAction:
        """What is not certain is treated no better than what is not allowed by a rule."""
        return "deny" if self.otherwise == "deny" else self.unclear


Policy.default = Policy()


def load_parsers() -> None:
    """Import the modules that read command lines: they compile hundreds of patterns."""
    from perdure.workspace import invocations, risks, shell  # noqa: PLC0415  # as above

    del invocations, risks, shell


def _scene(line: CommandLine, found: Sequence[Invocation]) -> Scene:
    """The folders that a part of the line may run in: where it begins, and where each `cd` of it leads to."""
    from perdure.workspace.risks import Scene  # noqa: PLC0415  # as above

    paths = Paths(line.roots, store=line.store)
    folders = [posixpath.normpath(line.cwd or (line.roots[0] if line.roots else "/"))]
    for it in found:
        if it.name in ("cd", "pushd") and it.args and it.args[-1].certain:
            folders += [posixpath.join(each, it.args[-1].value or "") for each in folders]
            folders = list(dict.fromkeys([posixpath.normpath(each) for each in folders]))
        if len(folders) > MAX_FOLDERS:  # it may be anywhere
            folders = ["/"]
            break
    return Scene(tuple(folders), paths)
