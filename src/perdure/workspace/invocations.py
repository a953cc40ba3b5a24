"""From the commands of a line to the programs that are started: what `env`, `sh -c`, `xargs` and others run in turn.

    ShellCommand → Invocation, and one more for each program that it starts by its arguments

A program that starts others is known here by its options. Where one of them is not known, or what it starts is not in
the text, the invocation says so (`unclear`): a wrapper that is half understood may run anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from perdure.workspace.shell import ASSIGNMENT, MAX_DEPTH, ShellCommand, ShellUnclear, Word, literal, parse

SYSTEM_FOLDERS = frozenset({"/bin", "/usr/bin", "/usr/local/bin", "/sbin", "/usr/sbin", "/opt/homebrew/bin"})
"""A program there is the one of its name; one in any other folder may be anything."""

SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "rbash"})


@dataclass(frozen=True, slots=True)
class Invocation:
    """A program with what it is given. `name` is "" where no program is started: assignments, redirections.

    `inside` says whether an argument of another program named it.
    """

    words: tuple[Word, ...]
    command: ShellCommand
    inside: bool = False
    unclear: tuple[str, ...] = ()
    piped_code: str = ""
    """Why it runs what comes over a pipe or from a substitution."""

    @property
    def program(self) -> str:
        """The program as it is written."""
        return self.words[0].value or "" if self.words else ""

    @property
    def name(self) -> str:
        """By which it is known: the last part of a path, if its folder is one of the system's."""
        folder, slash, base = self.program.rpartition("/")
        return base if slash and folder in SYSTEM_FOLDERS else self.program

    @property
    def args(self) -> tuple[Word, ...]:
        return self.words[1:]

    @property
    def text(self) -> str:
        return " ".join([each.source for each in self.words]) if self.inside else self.command.source


def invocations(commands: Iterable[ShellCommand], depth: int = 0) -> list[Invocation]:
    """Every program that commands start. Raises ShellUnclear where one of them has a text that is not understood."""
    found: list[Invocation] = []
    for each in commands:
        found += _started(Invocation(each.words, each), depth)
    return found


def of_argv(argv: Sequence[str]) -> list[Invocation]:
    """The same for arguments that no shell reads."""
    words = tuple([literal(each) for each in argv])
    return _started(Invocation(words, ShellCommand(words, source=" ".join(argv))), 0)


def _started(outer: Invocation, depth: int) -> list[Invocation]:
    if depth > MAX_DEPTH:
        raise ShellUnclear(f"programs start each other more than {MAX_DEPTH} deep")
    if not outer.words:
        return [outer]
    if outer.words[0].value is None or outer.words[0].glob or outer.words[0].tilde:
        return [replace(outer, unclear=("which program it is depends on a variable or a pattern",))]
    wrapper = WRAPPERS.get(family(outer.name))
    if wrapper is None:
        return [outer]
    try:
        inner = wrapper(outer)
    except _Unknown as unknown:
        return [replace(outer, unclear=(*outer.unclear, unknown.reason))]
    if isinstance(inner, Invocation):
        return [inner]
    if isinstance(inner, str):
        commands = parse(inner, depth).commands
        piped = outer.command.piped or bool(outer.command.redirects)
        context = [replace(each, piped=each.piped or piped, within=outer.command.within) for each in commands]
        return [outer, *invocations(context, depth + 1)]
    found = [outer]
    for words in inner:
        found += _started(Invocation(words, replace(outer.command, assigned=()), True), depth + 1)
    return found


def family(name: str) -> str:
    """The name of an interpreter without its version."""
    stem = re.sub(r"[0-9.]+$", "", name)
    return stem if stem in INTERPRETERS else name


class _Unknown(Exception):  # not an error: the options may be fine, and are not known here
    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


Started = Sequence[tuple[Word, ...]]
"""The programs that a wrapper starts, each with its words."""


def _skip(words: Sequence[Word], flags: str = "", valued: str = "", long: str = "", long_valued: str = "") -> int:
    """The index of the first word that is no option. Raises _Unknown at an option that is not among those given."""
    at = 0
    while at < len(words):
        word = words[at]
        text = word.value
        if text is None or word.glob or word.tilde:
            if (word.head and not word.head.startswith("-")) or word.tilde:
                return at
            raise _Unknown(f"an argument that may be an option depends on a variable or a pattern: {word.source}")
        if text == "--":
            return at + 1
        if not text.startswith("-") or text == "-":
            return at
        at += 1
        begin = at
        if text.startswith("--"):
            name, equals, _ = text[2:].partition("=")
            if (name in long.split() and not equals) or (name in long_valued.split() and equals):
                continue
            if name in long_valued.split():
                at += 1
                _check_single(words[begin:at])
                continue
            raise _Unknown(f"the option {text} is not known")
        for index, letter in enumerate(text[1:], 1):
            if letter in valued:
                at += index == len(text) - 1
                break
            if letter not in flags:
                raise _Unknown(f"the option {text} is not known")
        _check_single(words[begin:at])
    return at


def _check_single(words: Sequence[Word]) -> None:
    """Refuse arguments of a wrapper's own that may become several, of which the next is the program."""
    for each in words:
        if each.splits or each.glob:
            raise _Unknown(f"{each.source} may be several words")


def _rest(words: Sequence[Word]) -> Started:
    return [tuple(words)] if words else []


def _env(it: Invocation) -> Started:
    words = list(it.args)
    at = _skip(words, "i0v", "uC", "ignore-environment null debug", "unset chdir")
    if at < len(words) and words[at].value == "-":
        at += 1
    while at < len(words) and (text := words[at].value) is not None and "=" in text.split("/")[0]:
        at += 1
    if at < len(words) and words[at].value is None and "=" in words[at].source:
        raise _Unknown("a variable is set to what is not known")
    return _rest(words[at:])


def env_assigned(it: Invocation) -> list[str]:
    """The names that `env` sets."""
    return [found.group(1) for each in it.args if (found := ASSIGNMENT.match(each.value or "")) is not None]


def _plain(flags: str = "", valued: str = "", long: str = "", long_valued: str = "", first: int = 0) -> Wrapper:
    """A wrapper with `first` arguments of its own before the program."""

    def started(it: Invocation) -> Started:
        begin = _skip(it.args, flags, valued, long, long_valued)
        _check_single(it.args[begin : begin + first])
        return _rest(it.args[begin + first :])

    return started


def _nice(it: Invocation) -> Started:
    words = it.args
    if words and words[0].value is not None and words[0].value[1:].isdigit() and words[0].value[0] in "-+":
        return _rest(words[1:])
    return _rest(words[_skip(words, "", "n", "", "adjustment") :])


def _command(it: Invocation) -> Started:
    at = _skip(it.args, "pvV")
    looks = any(each.value is not None and set(each.value[1:]) & {"v", "V"} for each in it.args[:at])
    return [] if looks else _rest(it.args[at:])


def _sudo(it: Invocation) -> Started:
    at = _skip(it.args, "nEHbkSKv", "ugpCh", "non-interactive preserve-env set-home background stdin", "user group")
    words = it.args[at:]
    while words and ASSIGNMENT.match(words[0].source):
        words = words[1:]
    return _rest(words)


def _xargs_begin(it: Invocation) -> int:
    return _skip(
        it.args,
        "0rtx",
        "nPLIdEsa",
        "null no-run-if-empty verbose exit",
        "max-args max-procs max-lines delimiter arg-file replace",
    )


def xargs_own(it: Invocation) -> Sequence[Word]:
    """The arguments of `xargs` that are its own, as far as they are known."""
    try:
        return it.args[: _xargs_begin(it)]
    except _Unknown:
        return it.args


def _xargs(it: Invocation) -> Started:
    at = _xargs_begin(it)
    words = it.args[at:] or (literal("echo"),)
    options = [each.value or "" for each in it.args[:at]]
    if any(re.match(r"-[0rtx]+I", each) for each in options):
        raise _Unknown("what it puts in place of a part of the command is not certain")
    replaced = [each for each in options if each.startswith(("-I", "--replace"))]
    if replaced:  # whatever is in place of it: the word that holds it is not known
        sign = replaced[0].removeprefix("-I").removeprefix("--replace").lstrip("=") or _behind(it.args, replaced[0])
        return [tuple([_unknown_with(each, sign) for each in words])]
    return [(*words, Word("…", None, splits=True))]


def _behind(words: Sequence[Word], option: str) -> str:
    texts = [each.value or "" for each in words]
    return texts[texts.index(option) + 1] if option == "-I" else "{}"


def _unknown_with(word: Word, sign: str) -> Word:
    text = word.value
    if text is None or not sign or sign not in text:
        return word
    return replace(word, value=None, head=text[: text.index(sign)])


def _find(it: Invocation) -> Started:
    found: list[tuple[Word, ...]] = []
    words = list(it.args)
    while words:
        word = words.pop(0)
        if word.value in ("-exec", "-execdir", "-ok", "-okdir"):
            inner: list[Word] = []
            while words and words[0].value != ";" and not (words[0].value == "+" and inner and inner[-1].value == "{}"):
                inner.append(words.pop(0))
            if not words or not inner:
                raise _Unknown(f"the end of {word.value} is missing")
            # A name that was found is a path and no option. A program that starts others may take it for code.
            starts = inner[0].value is None or inner[0].value.rpartition("/")[2] in WRAPPERS
            found.append(
                tuple([each if each.value == "{}" and not starts else _unknown_with(each, "{}") for each in inner])
            )
    return found


def _shell(it: Invocation) -> Started | str | Invocation:
    """`sh -c text`, `sh file`, or `sh` that reads its input."""
    words, code, at = it.args, False, 0
    while at < len(words) and (text := words[at].value) is not None and text[:1] in ("-", "+") and len(text) > 1:
        at += 1
        if text == "--":
            break
        if text in ("--login", "--norc", "--noprofile", "--posix"):
            continue
        if text.startswith("--") or set(text[1:]) - set("celuxsfo"):
            raise _Unknown(f"the option {text} of {it.name} is not known")
        code = code or "c" in text
        if "s" in text[1:] and not code:
            return _reads_code(it)
        if "o" in text[1:]:
            if at >= len(words) or words[at].value not in ("pipefail", "errexit", "nounset", "xtrace"):
                raise _Unknown(f"the option {text} of {it.name} is not known")
            at += 1
    if at >= len(words):
        return it if code else _reads_code(it)
    word = words[at]
    if not code:
        if word.process or word.value in ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"):
            return _reads_code(it)
        raise _Unknown(f"it runs the code of a file: {word.source}")
    if word.value is None:
        if "(" in word.source or "`" in word.source:
            return replace(it, piped_code=f"{it.name} runs what another command writes")
        raise _Unknown(f"it runs what a variable holds: {word.source}")
    if not word.certain:
        raise _Unknown("the code that it runs is a pattern")
    return word.value


def _reads_code(it: Invocation) -> Invocation:
    return replace(it, piped_code=f"{it.name} runs what it reads")


def _eval(it: Invocation) -> Started | str | Invocation:
    if any("$(" in each.source or "`" in each.source for each in it.args if each.value is None):
        return replace(it, piped_code="eval runs what another command writes")
    if not all(each.certain for each in it.args):
        raise _Unknown("eval of what a variable holds")
    return " ".join([each.value or "" for each in it.args])


def _trap(it: Invocation) -> Started | str:
    if not it.args or it.args[0].value in ("-", "-l", "-p", ""):
        return []
    if not it.args[0].certain or (it.args[0].value or "").startswith("-"):
        raise _Unknown("trap runs what is not known")
    return it.args[0].value or ""


def _source(it: Invocation) -> Invocation:
    if it.args and it.args[0].process:
        return replace(it, piped_code=f"{it.name} runs what another command writes")
    raise _Unknown("it runs the code of a file")


def _ssh(it: Invocation) -> Started | str:
    at = _skip(it.args, "46AaCfgKkMNnqsTtVvXxYy", "BbcDEeFIiJLlmOopQRSWw")
    words = it.args[at + 1 :]
    if not all(each.certain for each in words):
        raise _Unknown("what it runs there depends on a variable or a pattern")
    return " ".join([each.value or "" for each in words])


def _joined(it: Invocation) -> str:
    at = _skip(it.args, "bcdegtx", "n", "", "interval")
    words = it.args[at:]
    if not all(each.certain for each in words):
        raise _Unknown("what it runs depends on a variable or a pattern")
    return " ".join([each.value or "" for each in words])


def _interpreter(it: Invocation) -> Started | Invocation:
    """Python, Perl, Ruby, Node and others: their code is not read here, but whether it comes over a pipe is seen."""
    operands = [each for each in it.args if each.value is None or not each.value.startswith("-") or each.value == "-"]
    if any(each.process for each in it.args):
        return replace(it, piped_code=f"{it.name} runs what another command writes")
    fed = it.command.piped or any(each.operator.startswith("<") for each in it.command.redirects)
    asks = [each.value for each in it.args if each.value in ("--version", "-V", "--help", "-h")]
    if fed and (not operands or operands[0].value in ("-", "/dev/stdin")) and not asks:
        return _reads_code(it)
    return []


def _applet(it: Invocation) -> Started:
    return _rest(it.args)


Wrapper = Callable[[Invocation], Started | str | Invocation]

INTERPRETERS = (
    "python",
    "python2",
    "python3",
    "perl",
    "ruby",
    "node",
    "nodejs",
    "php",
    "lua",
    "deno",
    "bun",
    "osascript",
)

WRAPPERS: dict[str, Wrapper] = {
    "env": _env,
    "nice": _nice,
    "nohup": _plain(),
    "setsid": _plain("cfw", "", "ctty fork wait"),
    "time": _plain("p"),
    "stdbuf": _plain("", "ioe", "", "input output error"),
    "ionice": _plain("t", "cn", "ignore", "class classdata"),
    "timeout": _plain("v", "ks", "foreground preserve-status verbose", "kill-after signal", first=1),
    "command": _command,
    "builtin": _plain(),
    "exec": _plain("cl", "a"),
    "sudo": _sudo,
    "doas": _plain("n", "u"),
    "xargs": _xargs,
    "find": _find,
    "eval": _eval,
    "trap": _trap,
    "source": _source,
    ".": _source,
    "ssh": _ssh,
    "watch": _joined,
    "busybox": _applet,
    "toybox": _applet,
    **dict.fromkeys(sorted(SHELLS), _shell),
    **dict.fromkeys(INTERPRETERS, _interpreter),
}
"""What a program starts: others with their words, or the text of a shell; or the invocation with what to say of it."""
