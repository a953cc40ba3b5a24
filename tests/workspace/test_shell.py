"""What the parse of a command line says against what real shells run: programs that record how they were started."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from perdure.workspace.invocations import Invocation, invocations
from perdure.workspace.policy import CommandLine, Policy
from perdure.workspace.shell import MAX_DEPTH, MAX_LENGTH, ShellUnclear, parse
from tests.fuzzing import FULL, cases

PROGRAMS = ("alpha", "beta", "gamma", "delta", "omega")
REAL = ("env", "nice", "timeout", "nohup", "xargs", "find", "bash", "dash", "sh", "stdbuf", "setsid")
STUB = """#!{shell}
IFS=$(printf '\\037')
name=${{0##*/}}
printf '%s\\n' "$name$IFS$*" >>"{record}"
"""


class Shells:
    """A folder with programs that write down their names and arguments, and the shells of this machine."""

    def __init__(self, folder: Path) -> None:
        self.record, self.bin, self.cwd = folder / "record", folder / "bin", folder / "cwd"
        self.bin.mkdir()
        self.cwd.mkdir()
        (self.cwd / "in").write_text("")
        plain = shutil.which("dash") or shutil.which("sh")
        for name in PROGRAMS:
            (self.bin / name).write_text(STUB.format(shell=plain, record=self.record))
            (self.bin / name).chmod(0o755)
        for name in REAL:
            if found := shutil.which(name):
                (self.bin / name).symlink_to(found)
        self.found = [path for name in ("bash", "dash") if (path := shutil.which(name)) is not None]

    def run(self, shell: str, text: str, **variables: str) -> list[tuple[str, ...]]:
        """What a shell runs of a text: the programs with their arguments."""
        self.record.write_bytes(b"")
        env = {"PATH": str(self.bin), "HOME": str(self.cwd), "V": "value", "LC_ALL": "C.UTF-8", **variables}
        subprocess.run(
            [shell, "-c", f"{text}\nwait"], cwd=self.cwd, env=env, capture_output=True, stdin=subprocess.DEVNULL,
            check=False, timeout=120,
        )  # fmt: skip
        lines = self.record.read_text(errors="surrogateescape").split("\n")
        return [tuple(line.removesuffix("\x1f").split("\x1f")) for line in lines if line.split("\x1f")[0] in PROGRAMS]


@pytest.fixture(scope="module")
def shells(tmp_path_factory: pytest.TempPathFactory) -> Shells:
    made = Shells(tmp_path_factory.mktemp("shells"))
    if not made.found:
        pytest.skip("no shell is there")
    return made


def started(text: str) -> list[Invocation]:
    """What the parse says."""
    return [each for each in invocations(parse(text).commands) if each.name in PROGRAMS or unclear(each)]


def unclear(each: Invocation) -> bool:
    """Whether the parse says that it does not know what this one runs."""
    return bool(each.unclear or each.piped_code)


def could_be(ran: tuple[str, ...], each: Invocation) -> bool:
    """Whether an invocation is what was run, as far as it is known."""
    if unclear(each):
        return True
    if each.name != ran[0]:
        return False
    if any(not word.certain or word.value == "{}" for word in each.args):  # find puts a path there
        return True
    return [word.value for word in each.args if word.value != ""] == [text for text in ran[1:] if text != ""]


# ---------------------------------------------------------------------- command lines that run all that they name


class Writer:
    """Writes command lines at random, in which everything runs, and once."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bash, self.dead, self.functions = False, False, 0

    def word(self, depth: int) -> str:
        pick = self.random.randrange(20)
        plain = ["a", "b1", "-x", "x=y", "a#b", "%", "+", "a,b", ".", "./p", "é", "=", "]", "@", "a:b"]
        tricky = ["a b", ";", "&&", "|", "#", "> x", "(", ")", "`", "$V", "*", "~", "\\", "{", "}", "<<E", "if", '"']
        match pick:
            case 0 | 1 | 2 | 3 | 4:
                return self.random.choice(plain)
            case 5 | 6 | 7:
                return f"'{self.random.choice(tricky)}'"
            case 8 | 9:
                return '"{}"'.format(re.sub(r'([$`"\\])', r"\\\1", self.random.choice(tricky)))
            case 10:
                return "".join(f"\\{each}" for each in self.random.choice(tricky))
            case 11 if depth:
                return f"$({self.line(depth - 1)})"
            case 12 if depth:
                return f'"x$({self.line(depth - 1)})y"'
            case 13 if depth:
                return f"`{self.random.choice(PROGRAMS)} q`"
            case 14:
                return self.random.choice(["$V", '"$V"', "${V}", '"${V:-d}"', "${#V}", "$((1+2))", "$?", '"$@"'])
            case 15:
                return self.random.choice(["p{q,r}s", "{1..3}", "{}", "*.none", "[ab]c", "HEAD@{1}"])
            case 16 if depth:
                self.bash = True
                return f"<({self.random.choice(PROGRAMS)} s)"
            case 17:
                return "pre'mid dle'\"post\"\\ end"
            case 18:
                return f"$({self.random.choice(PROGRAMS)} <in)"
            case _:
                return self.random.choice(["''", '""', '"it\'s"', "'say \"x\"'", "a\\\\b"])

    def simple(self, depth: int) -> str:
        words = [self.random.choice(PROGRAMS), *[self.word(depth) for _ in range(self.random.randrange(4))]]
        if self.random.random() < 0.15:
            words[0] = self.random.choice(["'{}'", '"{}"', "\\{}"]).format(words[0])
        if self.random.random() < 0.2:
            words.insert(0, self.random.choice(["X=1", "X='a b'", "X=", "X=$V", "lower=~"]))
        if self.random.random() < 0.25:
            redirect = self.random.choice(
                [">out", "2>&1", "</dev/null", ">>out", "<in", "2>/dev/null", ">|out", "3<in"]
            )
            words.insert(self.random.randrange(len(words) + 1), redirect)
        return " ".join(words)

    def wrapped(self, depth: int) -> str:
        inner = self.simple(0)
        program = f"{self.random.choice(PROGRAMS)} w {self.random.choice(['x', '-y', '$V'])}"
        script = self.line(0).replace("'", "")
        return self.random.choice(
            [
                f"env {program}", f"env -u Y {program}", f"env A=1 {program}",
                f"nice -n 1 {program}", f"timeout -k 5 60 {program}", f"nohup {program}", f"command {program}",
                f"timeout 60 nice env {program}", f"xargs {program} <in", f"sh -c '{script}'", f"bash -ec '{script}'",
                f"find in -exec {program} {{}} \\;", f"eval '{script}'", f"(exec {program})",
                f"find in -exec sh -c '{script}' \\;", inner,
            ]
        )  # fmt: skip

    def command(self, depth: int) -> str:
        if not depth:
            return self.simple(0)
        body = self.line(depth - 1)
        match self.random.randrange(14):
            case 0:
                return f"({body})"
            case 1:
                return f"{{ {body}; }}"
            case 2:
                return f"if {self.simple(0)}; then {body}; fi"
            case 3:
                self.dead = True
                return f"if {self.simple(0)}\nthen {body}\nelse {self.simple(0)}; fi"
            case 4:
                return f"for v in one; do {body}; done"
            case 5:
                self.dead = True
                return f"case one in two|three) {self.simple(0)};; (one) {body};; esac"
            case 6:
                self.functions += 1
                return f"{{ f{self.functions}() {{ {body}; }}; f{self.functions}; }}"
            case 7:
                self.dead = True
                return f"while false; do {body}; done"
            case 8:
                self.dead = True
                return f"! {{ {body}\n}}"
            case 9:
                document = f"$({self.simple(0)}) $V `{self.random.choice(PROGRAMS)}`"
                return f"{self.simple(0)} <<E\n{document}\nE\n{self.simple(0)}"
            case 10:
                return f"{self.simple(0)} <<-'E'\n\t$({self.simple(0)})\n\tE\n{self.simple(0)}"
            case 11 | 12:
                return self.wrapped(depth)
            case _:
                return self.simple(depth)

    def line(self, depth: int) -> str:
        text = self.command(depth)
        for _ in range(self.random.randrange(3)):
            joint = self.random.choice([" && ", " ; ", "\n", " | ", " |\n", " &&\n ", " # || x\n"])
            if "<<" in text and "\n" not in joint:
                joint = "\n"
            if joint == " | " and self.random.random() < 0.2:
                self.bash, joint = True, " |& "
            if self.random.random() < 0.1:
                self.dead, joint = True, " || "
                text = text if "<<" not in text else f"{text}\n:"
            text = f"{text}{joint}{self.command(depth)}"
        return text


@pytest.mark.slow
def test_the_parse_says_what_real_shells_run(shells: Shells) -> None:
    understood = compared = 0
    for seed in range(cases(120, 6000)):
        writer = Writer(seed)
        text = writer.line(2)
        try:
            said = started(text)
        except ShellUnclear:
            continue
        understood += 1
        for shell in shells.found[: 1 if writer.bash else 2]:
            ran = shells.run(shell, text)
            missing = [each for each in ran if not any(could_be(each, one) for one in said)]
            assert not missing, (seed, shell, text, missing)
            if not writer.dead and shell.endswith("bash") and not any(map(unclear, said)):
                expected = Counter(one.name for one in said)
                compared += 1
                assert Counter(each[0] for each in ran) == expected, (seed, shell, text)

    assert understood > cases(120, 6000) * 0.8
    assert compared > cases(120, 6000) * 0.1


# ---------------------------------------------------------------------- texts of any kind

PIECES = (
    *PROGRAMS * 4, *(";", "\n", "|", "&&") * 2, "echo", "ls", "true", "V=1", "$V", '"$V"', "${V:-x}", "$(", "$((", "`",
    "(", ")", "{",
    "}", ";", "&", "|",
    "&&", "||", "|&", "&>", "<", ">", ">>", "<<", "<<-", "<<<", "<(", "EOF", "\n", "\n", "\nEOF\n", "'", '"', "\\",
    "\\\n", "#", "!",
    "if", "then", "fi", "else", "for v in", "do", "done", "case x in", "x)", ";;", "esac", "[[", "]]", "[", "]",
    "=", "*", "~",
    "$'", '$"', "{a,b}", "2>&1", "env", "nice", "command", "eval", "sh -c", "xargs", "time", "function", "coproc",
)  # fmt: skip


def mixture(seed: int) -> str:
    """Pieces of shell in any order. Without functions, which could call themselves for ever."""
    chance = random.Random(seed)
    text = "".join(
        f"{chance.choice(PIECES)}{chance.choice(['', ' ', ' ', ' '])}" for _ in range(chance.randrange(2, 14))
    )
    return re.sub(r"\(\s*\)|function|coproc", "(alpha)", text)


@pytest.mark.fuzz
def test_no_program_runs_that_the_parse_did_not_name(shells: Shells) -> None:
    """And no line is allowed that runs a program which a policy does not know."""
    understood = 0
    for seed in range(cases(250, 20_000)):
        text = mixture(seed)
        verdict = Policy().judge(CommandLine(shell=text, cwd="/w", roots=("/w",)))
        try:
            said = started(text)
        except ShellUnclear:
            assert verdict.decision == "ask", text
            continue
        understood += 1
        if not said and verdict.decision != "allow":
            continue
        for shell in shells.found:
            ran = shells.run(shell, text)
            assert all(any(could_be(each, one) for one in said) for each in ran), (seed, shell, text, ran)
            assert not ran or verdict.decision != "allow", (seed, shell, text)

    assert understood > cases(250, 20_000) * 0.02


@pytest.mark.parametrize(
    "text",
    [
        "$(" * (MAX_DEPTH + 2) + "alpha" + ")" * (MAX_DEPTH + 2),
        "(" * 200 + "alpha" + ")" * 200,
        "{ " * 5000 + "alpha" + "; }" * 5000,
        "sh -c " * 3 + "'" * 7,
        "alpha " + "x" * MAX_LENGTH,
        "alpha;" * 3000,
        "if " * 4000,
        '"$(' * 1000,
        "eval " * 300 + "alpha",
        "env " * 300 + "alpha",
        "alpha <<E\n" * 3000,
        "{a,b}" * 4000 + " x",
        "[" * 30_000,
        "`" * 20_001,
    ],
)
def test_what_is_long_or_nested_deeply_is_unclear_or_known_at_once(text: str) -> None:
    verdict = Policy().judge(CommandLine(shell=text, cwd="/w", roots=("/w",)))

    assert verdict.decision == "ask"


@pytest.mark.parametrize(
    "text",
    [
        "echo $'a'", 'echo $"a"', "((x))", "echo $((x))", "echo $((a[1]))", "a=(1 2)", "a[1]=2", "coproc alpha",
        "function f { alpha; }",
        "for ((;;)); do alpha; done", "select x in a; do alpha; done", "echo ${x@P}", "echo ${!x}", "echo ${x/a/b}",
        "echo ${x:1:2}",
        "echo ${x:-$(alpha)}", "alpha &>f beta", "case x in a) alpha;& esac", "echo `a \\`b\\``", "echo $[1]",
        "[[ a && b ]]",
        "[[ $x ]]", "[[ 'a[$(alpha)]' -eq 1 ]]", "echo 12>f", "{fd}>f alpha", "alpha <<$V\nx\n$V", "alpha <<E\nx",
        "alpha <<E",
        "al\\\npha", "alpha &\\\n& beta", "alpha\r\nbeta", "alpha\x00beta", "alpha\u00a0beta", "alpha\u2028beta",
        "alpha \x1b[31m",
        "alpha \u202e x", "alpha \ud800", "alpha ' x", 'alpha " x', "alpha ` x", "alpha $( x", "alpha \\",
        "alpha )", "alpha }; fi",
        "then alpha", "if alpha; fi", "for in x; do alpha; done", "alpha;;", "alpha | | beta", "& alpha",
        "alpha > ", "alpha ()", "{alpha; }",
        "alpha <<E $(\nbeta)\nE", "echo ${#V[@]}", "echo !(a)", "echo @(a|b)",
    ],
)  # fmt: skip
def test_what_shells_read_differently_is_not_understood(text: str) -> None:
    with pytest.raises(ShellUnclear):
        started(text)


# ---------------------------------------------------------------------- what is allowed, run for real

HOSTILE = (
    "alpha", "; alpha", "$(alpha)", "a[$(alpha)]", "-exec alpha ;", "5 alpha", "-o made", "-c alpha", "-x alpha",
)  # fmt: skip
"""Values of variables with which a line that is allowed must run nothing that is not known, and change nothing."""
ARGUMENTS = (
    "$X", '"$X"', "a$X", '5"$X"', "5$X", "in", "*", "--", "-n", "-o", "made", "-x", "alpha", "-k", "1", "5", "-e",
    "s/a/b/", "-i", "-exec",
    "-execdir", "{}", "\\;", "+", "-delete", "a=b", "a=$X", "'a[$(alpha)]'", "x", "-v", "-eq", "-gt", "]", "-c",
    "'alpha'", "-s", "KILL",
    "-p", "-f", "-I{}", "-r", "'{print}'", "'1p'", "'1e alpha'", "-u", "A=1", "PATH=.", "-", "-name", "!", "-z",
    "--pre", "--output=made",
)  # fmt: skip
STARTERS = (
    "nice", "timeout", "env", "nohup", "command", "builtin", "exec", "time", "stdbuf", "setsid", "xargs", "eval",
    "sh", "bash",
    "find", "busybox", "trap",
)  # fmt: skip
KNOWN = (
    "test", "[", "[[", "printf", "export", "read", "unset", "set", "wait", "jobs", "cd", "grep", "sort", "uniq",
    "sed", "awk", "date", "echo",
    "cat", "ls", "head", "wc", "expr", "cut", "tr", "diff", "file", "type", "local", "true", "env", "xxd", "seq",
    "stat", "readlink", "pushd",
)  # fmt: skip


def known_line(seed: int) -> str:
    """A line of programs that policies know, with arguments that turn some of them into more."""
    chance = random.Random(seed)
    parts: list[str] = []
    for _ in range(chance.choice([1, 1, 2])):
        words = [*chance.choices(STARTERS, k=chance.choice([0, 0, 1, 2])), chance.choice(KNOWN)]
        for _ in range(chance.randrange(5)):
            words.insert(chance.randrange(1, len(words) + 1), chance.choice(ARGUMENTS))
        parts.append(" ".join(words))
    return chance.choice([" | ", "; ", " && "]).join(parts)


@pytest.mark.fuzz
def test_what_is_allowed_runs_nothing_unknown_and_changes_nothing(shells: Shells) -> None:
    """Whatever variables hold: the only program that they name records that it ran."""
    system = os.pathsep.join(["/usr/bin", "/bin"])
    before = sorted(shells.cwd.rglob("*"))
    allowed = 0
    for seed in range(cases(1000, 20_000)):
        text, chance = known_line(seed), random.Random(-seed)
        verdict = Policy().judge(CommandLine(shell=text, cwd=str(shells.cwd), roots=(str(shells.cwd),)))
        if verdict.decision != "allow" or (not FULL and chance.random() > 0.3):
            continue
        allowed += 1
        value = chance.choice(HOSTILE)
        for shell in shells.found:
            ran = shells.run(shell, text, X=value, PATH=f"{shells.bin}{os.pathsep}{system}")
            assert not ran, (seed, shell, text, value, ran)
            assert sorted(shells.cwd.rglob("*")) == before, (seed, shell, text, value)

    assert allowed > 20
