"""What the programs of a command line may do, as far as their arguments say: labels, each with its reason.

    invocation → (label, reason)*         no label: the program is known, and what it is told to do only reads

Labels are a reason to ask, never a proof of harm or of its absence: what a command really may do, the sandbox decides.
They err towards more: an argument that may be an option, a path or a program counts as one. A program that is not in
the tables (`programs.py`) is `unknown`; a word that is not known from the text makes a command `unclear`, unless its
program does nothing with any argument.

Paths are compared as they are written, without looking at the file system: a link inside of the workspace may lead
out of it, and is held by the sandbox alone.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

from perdure.errors import ToolError
from perdure.ports.store import OLD_STORE_FOLDER, STORE_FOLDER
from perdure.workspace.invocations import INTERPRETERS, SHELLS, Invocation, env_assigned, family, xargs_own
from perdure.workspace.paths import GIT_FOLDER, GIT_PRIVATE, Paths
from perdure.workspace.programs import (
    BECOMING,
    CHANGING_THE_SHELL,
    CREDENTIALS,
    FETCHING,
    GIT_NETWORK,
    GIT_READS,
    GUESSES,
    IGNORING,
    NO_CREDENTIALS,
    PACKAGES,
    PROJECT,
    REACHING,
    READING,
    REMOVING,
    RULING,
    STARTING,
    WRITING,
    Label,
)  # fmt: skip
from perdure.workspace.shell import ASSIGNMENT, NAME, Redirect, Word

LabelledRisk: TypeAlias = tuple[Label, str]


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a line runs: the folders that it may begin in (each `cd` of it adds one), and the workspace."""

    folders: tuple[str, ...]
    paths: Paths


# ---------------------------------------------------------------------- words

HARMLESS_VARIABLES = re.compile(
    r"LC_[A-Z]+|LANG|TZ|TERM|CI|NO_COLOR|FORCE_COLOR|CLICOLOR|COLUMNS|LINES|[a-z_][a-z0-9_]*"
)
DANGEROUS_VARIABLES = re.compile(
    r"PATH|IFS|ENV|BASH_ENV|BASHOPTS|SHELLOPTS|PS[0-4]|PROMPT_COMMAND|CDPATH|HOME|TMPDIR|EDITOR|VISUAL|PAGER|MANPAGER|BROWSER|SHELL"
    r"|LD_.*|DYLD_.*|GIT_.*|GCONV_PATH|LOCPATH|LANGUAGE|NLSPATH|HOSTALIASES|NODE_.*|PYTHON.*|PERL.*|RUBY.*|JAVA_.*|_JAVA_OPTIONS|JDK_.*|CLASSPATH"
    r"|LESS.*|RIPGREP_CONFIG_PATH|GREP_.*|TAR_OPTIONS|MAKEFLAGS|MAKEFILES|NPM_CONFIG_.*|npm_config_.*|PIP_.*|UV_.*|CARGO_.*|RUSTC.*|GOFLAGS"
    r"|CC|CXX|.*_PROXY|.*_proxy|SSH_.*|DOCKER_.*|KUBECONFIG|AWS_.*|BASH_FUNC_.*|CONFIG_SITE|FPATH|ZDOTDIR|OPTIND|HISTFILE|MALLOC_.*|GLIBC_.*"
)
"""What other programs run, load or obey."""


SECRET_VARIABLE = re.compile(r"\$\{?#?\w*(?:token|secret|passw|api_?key|access_?key|private_?key|credential)\w*", re.I)

STREAMS = re.compile(r"/dev/(null|zero|stdin|stdout|stderr|tty|full|random|urandom|fd/\d+)")


def _secret(path: str) -> bool:
    for name in path.split("/"):
        folded = name.casefold()
        if any(fnmatchcase(folded, glob) for glob in NO_CREDENTIALS):
            continue
        if any(fnmatchcase(folded, glob) for glob in CREDENTIALS):
            return True
    return False


MAX_LETTERS = 10
"""Options in one word, of which the last may have a path attached."""
MAX_PARTS = 40
LONGEST_PATH = 4096
"""Characters: no system opens a longer one."""
SIGNS = re.compile("[=@:,<]")


def _candidates(text: str) -> Iterator[str]:
    """What of an argument may be a path: all of it, its parts, what is behind a sign, and what is attached to an
    option."""
    yield text
    yield from SIGNS.split(text, MAX_PARTS)[1:]
    for sign in "=@:":
        if sign in text:
            yield text.partition(sign)[2]
    if text.startswith("-") and not text.startswith("--"):
        letters = 1
        while letters < min(len(text) - 1, MAX_LETTERS) and text[letters].isalnum():  # `-rf/etc/passwd`
            letters += 1
            yield text[letters:]


def _path_findings(word: Word, scene: Scene, change: bool) -> Iterator[LabelledRisk]:
    if word.tilde:
        yield "outside_workspace", f"{word.source} is in a home folder"
    text = word.value if word.value is not None else word.head
    if word.value is None and not word.process and not change:
        yield "unclear", f"which path {word.source} is depends on a variable"
    if len(SIGNS.findall(text)) > MAX_PARTS:
        yield "unclear", "an argument has too many parts, each of which may be a path"
    for path in dict.fromkeys(_candidates(text)):
        spelled = path if word.value is not None else _unquoted(word)
        if _secret(spelled) or (word.glob and _could_be_secret(path)):
            yield "credential_read", f"{word.source} may hold credentials"
        if STREAMS.fullmatch(path) or not path:
            continue
        if path.startswith("~"):
            yield "outside_workspace", f"{word.source} is in a home folder"
        for folder in scene.folders:
            place = posixpath.join(folder, path)
            yield from _place_findings(word, place, scene.paths, change)
            if word.glob and len(place) <= LONGEST_PATH:
                for guess in _guesses(place, scene.paths):
                    yield from _place_findings(word, guess, scene.paths, change)


def _unquoted(word: Word) -> str:
    return re.sub(r"[\"'\\]", "", word.source)


def _could_be_secret(pattern: str) -> bool:
    name = pattern.rsplit("/", 1)[-1]
    return not name.startswith("*") and any(fnmatchcase(guess, name) for guess in GUESSES)


def _guesses(path: str, paths: Paths) -> Iterator[str]:
    """Paths that a pattern may stand for and that are off limits, where there are any."""
    names = posixpath.normpath(path).split("/")
    patterns = [name.casefold() if any(sign in name for sign in "*?[") else "" for name in names]

    def fits(at: int, name: str) -> bool:
        """A pattern stands for a name with a dot only where it begins with one."""
        return bool(patterns[at]) and (name[0] != "." or names[at][0] == ".") and fnmatchcase(name, patterns[at])

    for folder, private in ((GIT_FOLDER, sorted(GIT_PRIVATE)), (STORE_FOLDER, ()), (OLD_STORE_FOLDER, ())):
        found, inside = list[str](), False
        for at, name in enumerate(names):
            guess = next((each for each in private if inside and fits(at, each)), name)
            found.append(folder if fits(at, folder) else guess)
            inside = inside or found[-1].casefold() == folder
        yield "/".join(found)
    for store in paths.stores:
        wanted = store.split("/")
        if len(wanted) <= len(names) and all(
            name == names[at] or fits(at, name) for at, name in enumerate(wanted[:-1])
        ):
            last = names[len(wanted) - 1]
            if fits(len(wanted) - 1, wanted[-1]) or fnmatchcase(f"{wanted[-1]}-wal", last):
                yield store


def _place_findings(word: Word, path: str, paths: Paths, change: bool) -> Iterator[LabelledRisk]:
    found = paths.below(path)
    if found is None:
        yield "outside_workspace", f"{word.source} is outside of the workspace"
        return
    root, names = found
    try:
        paths.check(root, names or (), change)
    except ToolError as refused:
        yield "outside_workspace", refused.message


def _words_findings(words: Sequence[Word], scene: Scene, change: bool = False) -> Iterator[LabelledRisk]:
    for word in words:
        yield from _path_findings(word, scene, change)
        if word.value is None and change and not word.process:
            yield "unclear", f"what {word.source} is depends on a variable"


def _end_of_options(words: Sequence[Word]) -> int:
    """Where the word `--` ends the options. Behind a word that may be an option it may be what that is given: in
    `rg -g -- --pre=x`, the option `--pre` is one."""
    for index, each in enumerate(words):
        if each.value == "--":
            before = words[index - 1] if index else None
            if before is None or (before.certain and not (before.value or "").startswith("-")):
                return index
    return len(words)


def _options(words: Sequence[Word]) -> list[str]:
    """The options, with what they are given by `=`."""
    texts = [each.value for each in words[: _end_of_options(words)]]
    return [each for each in texts if each is not None and each.startswith("-") and each not in ("-", "--")]


def _operands(words: Sequence[Word]) -> list[Word]:
    found: list[Word] = []
    for index, each in enumerate(words):
        if each.value == "--":
            return found + list(words[index + 1 :])
        if each.value is None or not each.value.startswith("-") or each.value == "-":
            found.append(each)
    return found


def _has(options: Sequence[str], short: str = "", *long: str) -> str:
    """The first option that is one of those, also in a cluster (`-rf`) or cut short (`--recu`)."""
    for option in options:
        if option.startswith("--"):
            name = option[2:].partition("=")[0]
            if name and any(each.startswith(name) for each in long):
                return option
        elif set(option[1:]) & set(short):
            return option
    return ""


def _may_be_option(words: Sequence[Word]) -> Iterator[LabelledRisk]:
    """Words that may turn out to be options, of a program whose options do more than read."""
    for each in words[: _end_of_options(words)]:
        if (each.value is None or each.glob) and (not each.head or each.head.startswith("-")) and not each.process:
            yield "unclear", f"{each.source} may be an option"


# ---------------------------------------------------------------------- programs that only read

RiskReader: TypeAlias = Callable[[Invocation, Scene], Iterator[LabelledRisk]]


def _nothing(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    """No argument matters, but a pattern that the shell looks up."""
    for each in it.args:
        if each.glob and each.value is not None:
            for folder in scene.folders:
                yield from _place_findings(each, posixpath.join(folder, each.value), scene.paths, change=False)


def _reads(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    """Every argument may be a path that is read."""
    yield from _words_findings(it.args, scene)


def _arch(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    """It tells the architecture; on macOS it runs a program."""
    if it.args:
        yield "unclear", "arch may run a program"


def _strings(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    if any(each.value is None or each.glob or each.value.startswith("@") for each in it.args):
        yield "unclear", "strings takes its arguments from what is behind @"
    yield from _reads(it, scene)


def _refusing(short: str, *long: str, label: Label = "unclear", why: str = "", one: bool = False) -> RiskReader:
    """As `_reads`, without some options. `one`: what is behind the first operand is written to."""

    def findings(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
        yield from _may_be_option(it.args)
        option = _has(_options(it.args), short, *long)
        if option:
            yield label, f"{it.name} {option} {why}"
            if "writes" in why:
                yield "write", f"{it.name} {option} {why}"
        first = _operands(it.args)[:1]
        if one and first and it.args[-1] is not first[0]:  # an option behind it is a file too, for some
            yield "write", f"{it.name} writes to what is behind {first[0].source}"
        yield from _words_findings(it.args, scene, change=label == "write" and bool(option))

    return findings


def _grep(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    options = _options(it.args)
    patterns = bool(_has(options, "ef", "regexp", "file")) or (it.name == "rg" and "--files" in options)
    operands = _operands(it.args)
    if it.name == "rg":
        yield from _may_be_option(it.args)
        for option in options:
            if option.startswith(("--pre", "--hostname-bin", "--search-zip")) or re.match(r"-[^-]*z", option):
                yield "unclear", f"rg {option} runs a program"
    pattern = None if patterns or not operands or operands[0].splits else operands[0]
    if _searches_all(it.name, options) and _fits_any_line(it.args):
        yield "credential_read", f"{it.name} shows every line below a folder, also of files that hold credentials"
    yield from _words_findings([each for each in it.args if each is not pattern], scene)


def _searches_all(name: str, options: Sequence[str]) -> bool:
    """Whether it looks into all files below a folder, also hidden ones."""
    if name == "rg":
        hidden = sum(each.count("u") for each in options if re.fullmatch(r"-[A-Za-z.]+", each)) >= 2
        return hidden or bool(_has(options, ".", "hidden")) or options.count("--unrestricted") >= 2
    named = [each.partition("=")[2] for each in options if each.startswith("--include=")]
    if named and not any(_secret(each) or (each.startswith("*") and "." not in each) for each in named):
        return False
    return bool(_has(options, "rRd", "recursive", "dereference-recursive", "directories"))


LITERAL = re.compile(r"(?<!\\)[A-Za-z0-9]{2}")
"""Of a pattern that is written for something: two letters or digits that stand for themselves."""


def _fits_any_line(words: Sequence[Word]) -> bool:
    """Whether a search is for nothing: it shows whatever is there. A pattern that is not known may be one."""
    options, operands, before = _options(words), list[str](), ""
    if _has(options, "v", "invert-match"):
        return True
    given = [each[2:] for each in options if re.match(r"-e.", each)]
    given += [each.partition("=")[2] for each in options if each.startswith("--regexp=")]
    for each in words:
        if re.fullmatch(r"-[A-Za-z]*e|--regexp", before):
            given.append(each.value or "")
        elif not (each.value or "").startswith("-") and not re.fullmatch(r"-[A-Za-z]*[ABCDdgmt]", before):
            operands.append(each.value or "")  # and not what the option before it is given
        before = each.value or ""
    given = given or operands[:1]
    return not given or any(LITERAL.search(each) is None for each in given)


FIND_BEFORE = re.compile(r"-[LPHD]|-O\d*")
"""Options behind which find is told where to look. What -D is given counts as a path."""


def _find(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    starts: list[Word] = []
    begun = False
    runs = any((each.value or "").startswith(("-exec", "-ok")) for each in it.args)
    for word in it.args:
        text = word.value
        if text is None:
            yield "unclear", f"what {word.source} is depends on a variable"
        begun = begun or (
            text is not None
            and ((text.startswith("-") and not FIND_BEFORE.fullmatch(text)) or text in ("(", ")", "!", ","))
        )
        if not begun:
            starts.append(word)
        if word.glob and not begun and not word.head:
            yield "unclear", f"{word.source} may be an option"
        if text == "-files0-from":
            yield "unclear", "find -files0-from looks where a file says"
        if runs and text is not None and _secret(text):
            yield "credential_read", f"{word.source} may hold credentials"
        if text == "-delete":
            yield "destructive", "find -delete removes what it finds"
            yield "write", "find -delete removes what it finds"
        elif text is not None and text.startswith("-f") and text.startswith(("-fprint", "-fls")):
            yield "write", f"find {text} writes a file"
            yield from _words_findings(it.args, scene, True)
    yield from _words_findings(starts, scene)


SED_SET = r"\[(?:\[:[a-z]+:\]|(?!(?P=d))[^\\\n\[\]])+\]"
"""Where a delimiter in a set ends the pattern for one sed, and does not for another, the script is not certain."""
SED_ADDRESS = rf"(?:\d+|\$|/(?:{SED_SET.replace('(?P=d)', '/')}|[^/\\\n\[]|\\[^\n])*/I?)"
SED_COMMAND = re.compile(  # without ways back: white space may match in one place only
    rf"\s*+(?:{SED_ADDRESS}(?:,{SED_ADDRESS})?+)?+\s*+!?+\s*+"
    rf"(?:[pd=q]|s(?P<d>[/|#,:@%!])(?:{SED_SET}|(?!(?P=d))[^\\\n\[]|\\[^\n])*(?P=d)"
    r"(?:(?!(?P=d))[^\\\n]|\\[^\n])*(?P=d)[gpiI0-9]*)\s*(?:[;\n]|$)"
)


def _sed(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    yield from _may_be_option(it.args)
    scripts: list[Word] = []
    files: list[Word] = []
    words = list(it.args)
    options = True
    while words:
        word = words.pop(0)
        text = word.value or ""
        if options and text == "--":
            options = False
        elif options and text in ("-e", "--expression") and words:
            scripts.append(words.pop(0))
        elif options and re.fullmatch(
            r"-[nErsuz]+|--(quiet|silent|regexp-extended|separate|unbuffered|null-data|debug|posix)", text
        ):
            pass
        elif options and (text.startswith(("-i", "--in-place")) or re.match(r"-[nErsuz]+i", text)):
            yield "write", "sed -i changes files"
        elif options and text.startswith("-") and text != "-":
            yield "unclear", f"the option {text} of sed is not known"
        else:
            files.append(word)
    if not scripts and files:
        scripts.append(files.pop(0))
    for script in scripts:
        at, text = 0, script.value or ""
        while at < len(text) and (found := SED_COMMAND.match(text, at)) is not None and found.end() > at:
            at = found.end()
        if at < len(text) or script.value is None:
            yield "unclear", f"what the script of sed does is not certain: {script.source}"
    yield from _words_findings(files, scene)


def _awk(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    yield from _may_be_option(it.args)
    words = list(it.args)
    while words and words[0].value is not None and words[0].value.startswith("-"):
        text = words.pop(0).value or ""
        if text in ("-F", "-v") and words:
            words.pop(0)
        elif not re.match(r"-F.|-v.", text):
            yield "unclear", f"the option {text} of awk is not known"
    if words:
        script = words.pop(0)
        if script.value is None or script.value == "{}":  # of find, which puts a name there
            yield "unclear", f"what the script of awk does is not certain: {script.source}"
        elif re.search(r"system|getline|close|extension|ARGV|SYMTAB|[|>@]", script.value):
            yield "unclear", f"the script of awk may run something, or choose what it reads: {script.source}"
        elif "ENVIRON" in script.value or "PROCINFO" in script.value:
            yield "credential_read", "the script of awk reads variables"
    yield from _words_findings(words, scene)


def _first_is_no_path(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    """`jq FILTER FILE…`, `tr SET SET`: the first operand is no path."""
    operands = _operands(it.args)
    if operands and operands[0].splits:
        yield "unclear", f"{operands[0].source} may be several words"
    if it.name == "jq":
        yield from _jq(it)
    yield from _words_findings([each for each in it.args if not operands or each is not operands[0]], scene)


def _jq(it: Invocation) -> Iterator[LabelledRisk]:
    """Which word is its filter depends on its options: any may be. Some are given two words, of which `--` may be
    one."""
    yield from _may_be_option(it.args)
    options, first = [each.value or "" for each in it.args if (each.value or "")[:1] == "-"], _operands(it.args)[:1]
    named = it.inside and (any(each.startswith("--") for each in options) or [each.value for each in first] == ["{}"])
    for each in it.args:
        text = (each.value or "").casefold()
        if "env" in text:
            yield "credential_read", "the filter of jq may read variables"
        if re.search(r"\b(import|include)\b", text) or (text == "{}" and named):
            yield "unclear", f"what the filter of jq reads is not certain: {each.source}"
    if option := _has(options, "fL", "from-file", "library-path"):
        yield "unclear", f"jq {option} runs the filter of a file"


def _date(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    yield from _may_be_option(it.args)
    before = ""
    for each in it.args:
        text = each.value or ""
        if before not in ("-d", "--date") and not re.match(r"\+|-u$|-R$|-I|--utc$|--iso|--rfc|-d|--date", text):
            yield "unclear", f"date {each.source} may set the clock"
        before = text
    if _has(_options(it.args), "s", "set"):
        yield "destructive", "date sets the clock"


def _printf(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    first = it.args[0].value if it.args else ""
    if first is None or first.startswith("-") or re.search(r"%[^%A-Za-z]*[hlLjztq]*n", first.replace("%%", "")):
        yield "unclear", "printf -v and %n set a variable"


def _test(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    """`[ -v name ]` runs what a subscript in the name says, in bash."""
    if any(each.splits or each.value in ("-v", "-R") for each in it.args) or (
        2 <= len(it.args) <= 3 and it.args[0].value is None and it.args[1].value not in COMPARISONS
    ):
        yield "unclear", "a test of words that depend on a variable"


COMPARISONS = ("=", "==", "!=", "-eq", "-ne", "-lt", "-gt", "-le", "-ge", "]")


def _cd(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    operands = [each for each in it.args if each.value not in ("-P", "-L", "--")]
    if not operands:
        yield "outside_workspace", "it goes to the home folder"
    elif len(operands) != 1 or not operands[0].certain or operands[0].value == "-":
        yield "unclear", "where it goes to is not certain"
    yield from _words_findings(operands, scene)


def _set(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    if not it.args:
        yield "credential_read", "set shows all variables"
    texts = [each.value or "?" for each in it.args]
    for index, text in enumerate(texts):
        if text == "--":
            return
        if text in SHELL_OPTIONS and index and texts[index - 1].endswith("o"):
            continue
        if not re.fullmatch(r"[-+][euxfC]+o?|[-+]o", text):
            yield "unclear", "set changes how the shell reads"


SHELL_OPTIONS = ("pipefail", "errexit", "nounset", "xtrace", "noglob", "noclobber")


def _export(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    for each in it.args:
        found = ASSIGNMENT.match(each.source)
        plain = each.value is not None and NAME.fullmatch(each.value)
        if found is not None:
            yield from of_variable(found.group(1))
        if (found is None and not plain) or each.splits:  # dash makes several assignments of it
            yield "unclear", f"{it.name} {each.source}"
    if not it.args:
        yield "credential_read", f"{it.name} shows variables"


def _variables(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    """`read name`, `unset name`: plain names only, because a subscript is run."""
    for each in it.args:
        if each.value in ("-r", "-f", "-s"):
            continue
        if each.value is None or not NAME.fullmatch(each.value):
            yield "unclear", f"{it.name} {each.source}"
        else:
            yield from of_variable(each.value)


def _wait(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    if any((each.splits and each.source != "$!") or (each.value or "").startswith("-") for each in it.args):
        yield "unclear", "wait -p sets a variable"


def _shows_variables(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    yield "credential_read", f"{it.name} shows variables, which may hold secrets"


def _env(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    for name in env_assigned(it):
        yield from of_variable(name)
    words = [each.value or "" for each in it.args]
    if all(each.startswith("-") or "=" in each for each in words):
        yield from _shows_variables(it, scene)
    if "-C" in words or any(each.startswith(("-C", "--chdir")) for each in words):
        yield "unclear", "env -C changes the folder"


def _ps(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    if any(each.value is None or (not each.value.startswith("-") and "e" in each.value) for each in it.args):
        yield "credential_read", "ps may show variables of processes"


def _xargs(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    """What it starts is judged by itself; of its own arguments, one may be a file to read."""
    yield from _words_findings([each for each in xargs_own(it) if each.value is not None], scene)


def _changes_the_shell(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    yield "unclear", f"{it.name} changes what names mean, or runs what they hold"


def _wrapper(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    """What it starts is judged by itself."""
    yield from ()


def _sudo(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    yield "sudo", f"{it.name} runs as another user"


def of_variable(name: str) -> Iterator[LabelledRisk]:
    """What there is to say about a variable that is set for a program."""
    if DANGEROUS_VARIABLES.fullmatch(name):
        yield "unclear", f"{name} decides what other programs run or load"
    elif not HARMLESS_VARIABLES.fullmatch(name):
        yield "unknown", f"what the variable {name} does is not known"


READERS: dict[str, RiskReader] = {
    **dict.fromkeys(READING, _reads),
    **dict.fromkeys(IGNORING, _nothing),
    **dict.fromkeys(CHANGING_THE_SHELL, _changes_the_shell),
    **dict.fromkeys((*STARTING, *sorted(SHELLS)), _wrapper),
    "xargs": _xargs,
    **dict.fromkeys(("grep", "egrep", "fgrep", "rg"), _grep),
    **dict.fromkeys(("test", "[", "[["), _test),
    **dict.fromkeys(("cd", "pushd"), _cd),
    **dict.fromkeys(("export", "readonly", "local"), _export),
    **dict.fromkeys(("read", "unset"), _variables),
    "wait": _wait,
    **dict.fromkeys(("jq", "tr"), _first_is_no_path),
    **dict.fromkeys(("awk", "gawk", "mawk", "nawk"), _awk),
    "arch": _arch,
    "strings": _strings,
    "printf": _printf,
    "printenv": _shows_variables,
    "env": _env,
    "set": _set,
    "ps": _ps,
    "find": _find,
    "sed": _sed,
    "date": _date,
    "sort": _refusing(
        "oT",
        "output",
        "temporary-directory",
        "compress-program",
        "files0-from",
        why="writes a file, runs a program or reads what a file names",
    ),
    "uniq": _refusing("", one=True),
    "xxd": _refusing("r", "revert", label="write", why="writes a file", one=True),
    "tree": _refusing("oR", "output", label="write", why="writes a file"),
    "file": _refusing("CmzZ", "compile", "magic-file", "uncompress", why="writes a file or runs a program"),
    "fd": _refusing("xX", "exec", "exec-batch", why="runs a program"),
}
"""Programs of which it is known what they do with each argument."""

# ---------------------------------------------------------------------- programs that do more

SOCKETS = re.compile(r"-|STDIO$|(TCP|UDP|SSL|OPENSSL|SOCKS)[A-Z0-9-]*:[^,!]*$", re.I)
"""Addresses of socat that are connections."""

DOERS: dict[str, tuple[tuple[Label, ...], str]] = {
    **dict.fromkeys(WRITING, (("write",), "changes files")),
    **dict.fromkeys(REMOVING, (("destructive", "write"), "removes files or what is in them")),
    **dict.fromkeys(RULING, (("destructive",), "changes the machine or ends processes")),
    **dict.fromkeys(REACHING, (("network",), "reaches other machines or services")),
    **dict.fromkeys(FETCHING, (("network", "write"), "loads files of other machines")),
    **dict.fromkeys(BECOMING, (("sudo",), "runs as another user")),
    "dd": (("destructive", "write"), "writes over files or devices"),
}

CATASTROPHIC = re.compile(
    r"mkfs(\..+)?|mke2fs|wipefs|blkdiscard|shutdown|reboot|halt|poweroff|init|telinit|mkswap|hdparm|nvme"
)
DISKS = re.compile(r"/dev/(sd|hd|vd|xvd|nvme|mmcblk|disk|rdisk|mapper/|dm-|md|loop|mem|kmem|port).*")
WHOLE = re.compile(
    r"/|/\*|~/?|~/\*|/\.|/\.\*|\$HOME/?|\$\{HOME\}/?|/(etc|usr|bin|sbin|lib|lib64|var|boot|home|root|opt|dev|proc|sys|Users|System|Library)/?\*?"
)

RUNNING_OPTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tar": (
        "IF",
        (
            "checkpoint-action",
            "to-command",
            "use-compress-program",
            "rsh-command",
            "info-script",
            "new-volume-script",
            "rmt-command",
        ),
    ),
    "split": ("", ("filter",)),
    "zip": ("T", ("unzip-command", "test")),
    "rsync": ("eM", ("rsh", "rsync-path", "remote-option")),
    "scp": ("SoFD", ()),
    "sftp": ("SoFbDs", ()),
    "ssh": ("oFIS", ()),
    "install": ("", ("strip-program",)),
    "curl": ("K", ("config", "engine")),
    "wget": ("e", ("use-askpass", "execute", "config")),
    "patch": ("e", ("ed",)),
    "cpio": ("", ("rsh-command", "to-stdout")),
    "openssl": ("", ("engine", "provider", "provider-path", "config")),
    "ar": ("", ("plugin",)),
    "aria2c": (
        "",
        (
            "conf-path",
            "on-bt-download-complete",
            "on-download-complete",
            "on-download-error",
            "on-download-pause",
            "on-download-start",
            "on-download-stop",
        ),
    ),
    **dict.fromkeys(("nc", "ncat", "netcat"), ("ec", ("exec", "sh-exec", "lua-exec"))),
    "nmap": ("", ("script", "script-args-file", "script-updatedb", "datadir", "resume")),
    "rclone": ("", ("config", "password-command")),
    "sendmail": ("COX", ()),
    "mail": ("S", ()),
    **dict.fromkeys(("kubectl", "helm"), ("", ("kubeconfig", "post-renderer"))),
    "psql": ("fPv", ("file", "pset", "set", "variable")),
    "mysql": ("", ("defaults-file", "defaults-extra-file", "init-command", "pager", "plugin-dir", "tee")),
    "lftp": ("f", ()),
}
"""Options that name a program to run or a file of settings, of programs that a host may want to allow."""


WRITING_OPTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "curl": (
        "oODcJ",
        (
            "alt-svc",
            "cookie-jar",
            "dump-header",
            "etag-save",
            "hsts",
            "libcurl",
            "output",
            "remote-name",
            "stderr",
            "trace",
            "trace-ascii",
        ),
    ),
    "ssh": ("E", ()),
    "openssl": ("", ("keyout", "out", "outdir", "writerand")),
    **dict.fromkeys(("nc", "ncat", "netcat"), ("o", ("output", "hex-dump", "append-output"))),
    "nmap": ("", ("oA", "oG", "oN", "oS", "oX")),
    **dict.fromkeys(("http", "https", "xh"), ("do", ("download", "output", "session", "session-read-only"))),
}
"""Options that name a file to write, of programs that reach other machines."""
LONG_BY_ONE_DASH = ("openssl", "nmap")
"""Programs whose long options begin with one dash."""
OWN_COMMANDS = frozenset({"psql", "mysql", "mongosh", "redis-cli", "lftp", "ftp", "sftp", "telnet", "mail", "mutt"})
"""Programs with commands of their own, some of which run other programs."""
RUNS = re.compile(r"[\\!|`]|\b(system|source|shell|program|pager|edit)\b", re.I)
ABSOLUTE: dict[str, tuple[str, tuple[str, ...]]] = {"tar": ("P", ("absolute-names",)), "unzip": (":", ())}
"""Options with which what is in an archive is written wherever it says."""
SIGNING_IN: dict[str, tuple[str, tuple[str, ...]]] = {"curl": ("n", ("netrc", "netrc-file", "netrc-optional"))}


def _told_options(it: Invocation) -> list[str]:
    """The options of a program that does more than read, also where they are written in a way of its own."""
    options = _options(it.args)
    if it.name in LONG_BY_ONE_DASH:
        options = [each if each.startswith("--") else f"-{each}" for each in options]
    first = it.args[0].value if it.args else None
    if it.name == "tar" and first and not first.startswith("-"):  # `tar xf`: letters without a dash
        options.append(f"-{first}")
    return options


def _option_findings(it: Invocation, options: Sequence[str]) -> Iterator[LabelledRisk]:
    tables: tuple[tuple[Mapping[str, tuple[str, tuple[str, ...]]], Label, str], ...] = (
        (RUNNING_OPTIONS, "unclear", "may run a program"),
        (WRITING_OPTIONS, "write", "writes a file"),
        (ABSOLUTE, "outside_workspace", "writes wherever an archive says"),
        (SIGNING_IN, "credential_read", "signs in with what a file holds"),
    )
    for table, label, what in tables:
        short, long = table.get(it.name, ("", ()))
        if option := _has(options, short, *long):
            yield label, f"{it.name} {option} {what}"


def _language_findings(it: Invocation, texts: Sequence[str]) -> Iterator[LabelledRisk]:
    """Of programs whose arguments are more than options and paths."""
    if it.name in OWN_COMMANDS:
        fed = it.command.piped or any(each.operator.startswith("<") for each in it.command.redirects)
        if fed or any(RUNS.search(each) for each in texts):
            yield "unclear", f"{it.name} has commands of its own, which may run programs"
    if it.name in ("curl", "wget") and any("file:" in each.casefold() for each in texts):
        yield "unclear", f"{it.name} reads a file by its address"
    if it.name == "curl" and any("%output{" in each for each in texts):
        yield "write", "curl writes a file"
    if it.name == "socat" and not all(SOCKETS.match(each) for each in texts):
        yield "unclear", "socat may run programs, and read and write files"
    if it.name in ("gh", "kubectl", "helm") and {"alias", "config", "edit", "extension", "plugin", "--"} & set(texts):
        yield "unclear", f"{it.name} may run other programs"


def _doer(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    labels, why = DOERS[it.name]
    for label in labels:
        yield label, f"{it.name} {why}"
    options = _told_options(it)
    yield from _may_be_option(it.args)
    yield from _option_findings(it, options)
    yield from _language_findings(it, [each.value or "" for each in it.args])
    if it.name in ("rsync", "tar") and any(re.match(r"[^/=-][^/=]*:", each.value or "") for each in it.args):
        yield "network", f"{it.name} to another machine"
    if it.name == "rsync" and any(each.startswith(("--del", "--remove")) for each in options):
        yield "destructive", "rsync removes files"
    if it.name in ("docker", "podman", "kubectl", "helm", "aws", "gcloud", "az", "gh"):
        if any(
            each.value in ("rm", "rmi", "prune", "delete", "kill", "down", "drain", "uninstall", "stop")
            for each in it.args
        ):
            yield "destructive", f"{it.name} removes something"
        if any(
            each.value in ("token", "get-secret-value", "secret", "secrets", "print-access-token") for each in it.args
        ):
            yield "credential_read", f"{it.name} shows a secret"
    if it.name in ("su", "runuser", "pkexec", "run0", "gosu"):
        yield "unclear", f"what {it.name} runs is not read"
    if it.name in ("chmod", "chown", "chgrp") and _has(options, "R", "recursive"):
        yield "destructive", f"{it.name} changes all that is in a folder"
    yield from _words_findings([each for each in it.args if "://" not in (each.value or "")], scene, True)


def _normal(word: Word) -> str:
    """A path as it is written, without what makes no difference."""
    text = _unquoted(word) if word.value is None else word.value
    return re.sub(r"^/+", "/", posixpath.normpath(text) if text else "")


def _catastrophe(it: Invocation) -> Iterator[LabelledRisk]:
    options = _options(it.args)
    if it.name in it.command.within and (it.command.piped or it.command.background):
        yield "catastrophic", f"{it.name} starts itself again and again"
    if CATASTROPHIC.fullmatch(it.name):
        yield "catastrophic", f"{it.name} destroys a disk or stops the machine"
    if it.name == "rm" and _has(options, "rR", "recursive"):
        for each in _operands(it.args):
            if WHOLE.fullmatch(_normal(each)):
                yield "catastrophic", f"it removes {each.source} as a whole"
        if any(each.startswith("--no-pres") for each in options):
            yield "catastrophic", "it removes the root folder"
    elif it.name in ("dd", "shred", "tee", "cp", "mv"):
        for each in it.args:
            path = posixpath.normpath((each.value or "").removeprefix("of="))
            if DISKS.fullmatch(re.sub(r"^/+", "/", path)):
                yield "catastrophic", f"it writes over the device {each.source}"
    elif it.name in ("chmod", "chown", "chgrp") and _has(options, "R", "recursive"):
        for each in _operands(it.args)[1:]:
            if WHOLE.fullmatch(_normal(each)):
                yield "catastrophic", f"it changes {each.source} as a whole"


GIT_RUNNING: dict[str, tuple[str, tuple[str, ...]]] = {
    "clone": ("uc", ("config", "template")),
    "init": ("", ("template", "separate-git-dir")),
    "ls-remote": ("u", ()),
    "rebase": ("xs", ("strategy",)),
    "merge": ("s", ("strategy",)),
    "pull": ("s", ("strategy",)),
    "apply": ("", ("unsafe-paths",)),
    "archive": ("", ("remote",)),
}
"""Options of commands of git that name a program, or a file with settings; besides those of any command."""
GIT_STARTING = frozenset(
    {"difftool", "mergetool", "filter-branch", "for-each-repo", "hook", "send-email", "instaweb", "daemon", "shell",
     "gui", "citool", "gitk", "web--browse", "credential"}
)  # fmt: skip
GIT_HARMLESS = frozenset({"user.name", "user.email"})
HELPER = re.compile(r"\+?[A-Za-z0-9.+-]+::")
"""Begins the address of a repository that a program of that name fetches."""


def _git_runs(command: str, options: Sequence[str], operands: Sequence[str]) -> str:
    """Why a command of git may run what its arguments name, if it may."""
    anywhere = ("open-files-in-pager", "ext-diff", "textconv", "upload-pack", "receive-pack", "exec", "output")
    short, long = GIT_RUNNING.get(command, ("", ()))
    option = _has(options, f"O{short}", *anywhere, *long) or ("-x" if "-x" in options else "")
    if option:
        return f"{option} runs a program, or names a file for it"
    if command in GIT_STARTING or operands[:1] == ["foreach"] or (command == "bisect" and "run" in operands):
        return "runs programs"
    if command == "config" and (
        _has(options, "e", "edit") or (len(operands) > 1 and operands[0].casefold() not in GIT_HARMLESS)
    ):
        return "changes settings, which may name programs"
    if any(HELPER.match(each) for each in operands):
        return "runs a program that fetches"
    return ""


def _git(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    words = list(it.args)
    while words and words[0].value is not None and words[0].value.startswith("-"):
        text = words.pop(0).value or ""
        if text == "-C" and words:
            yield from _words_findings([words.pop(0)], scene)
        elif text == "-c" and words:
            yield "unclear", f"git -c {words.pop(0).source} may name a program to run"
        elif text not in ("--no-pager", "-P", "--no-optional-locks", "--literal-pathspecs", "--version", "--help"):
            yield "unclear", f"git {text} changes where git looks for its configuration or programs"
    if not words:
        return
    if not words[0].certain:
        yield "unclear", "which command of git it is depends on a variable"
        return
    command, rest = words[0].value or "", words[1:]
    options, texts = _options(rest), [each.value or "" for each in rest]
    yield "unknown", "git runs the programs that its configuration names, such as hooks and filters"
    if command in GIT_NETWORK:
        yield "network", f"git {command} reaches another repository"
    if command not in GIT_READS:
        yield "write", f"git {command} changes the repository or its files"
    if command == "push":
        forced = _has(options, "f", "force", "force-with-lease", "force-if-includes", "mirror", "prune")
        removed = _has(options, "d", "delete")
        refs = [each for each in texts if each.startswith(("+", ":"))]
        if forced or refs or removed:
            yield "force_push", f"git push {forced or removed or refs[0]} removes what others may have pushed"
    if _git_destroys(command, options, texts):
        yield "destructive", f"git {command} removes changes or history"
    if command == "config" or command == "credential":
        yield "credential_read", f"git {command} shows or changes settings, which may hold credentials"
    if why := _git_runs(command, options, [each.value or "" for each in _operands(rest)]):
        yield "unclear", f"git {command} {why}"
    yield from _may_be_option(rest)
    paths = [each for each in rest if not re.match(r"(HEAD|@)[~^@]|[a-z+]+://", each.value or "")]
    yield from _words_findings(paths, scene, command not in GIT_READS)


def _git_destroys(command: str, options: Sequence[str], texts: Sequence[str]) -> bool:
    match command:
        case "clean" | "rm" | "gc" | "prune" | "filter-branch" | "filter-repo" | "restore":
            return True
        case "reset":
            return bool(_has(options, "", "hard", "merge", "keep"))
        case "checkout" | "switch":
            return bool(_has(options, "fBC", "force", "discard-changes")) or "--" in texts or "." in texts
        case "branch" | "tag" | "update-ref" | "replace" | "notes":
            return bool(_has(options, "dDfM", "delete", "force")) or "remove" in texts
        case "stash" | "reflog" | "worktree" | "remote" | "submodule":
            return bool({"drop", "clear", "pop", "expire", "delete", "remove", "rm", "prune", "deinit"} & set(texts))
        case _:
            return False


def _packages(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    wanted = PACKAGES[it.name].split()
    texts = [each.value for each in _operands(it.args)]
    bare = it.name in ("yarn", "pnpm", "bundle") and not texts
    if wanted == ["*"] or bare or None in texts or set(texts) & set(wanted):
        yield "package_install", f"{it.name} brings code of others and may run its scripts"
        yield "network", f"{it.name} loads packages"
        yield "write", f"{it.name} changes what is installed"
    yield from _other(it, scene)


def _other(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    if it.name in PROJECT:
        yield "unknown", f"{it.name} runs what the files of the project say"
    elif "/" in it.program:
        yield "unknown", f"{it.program} is a program of its own, and what it does is not known"
    elif not it.program.isascii():
        yield (
            "unknown",
            f"{ascii(it.program)[1:-1]} is not a program that is known, and has characters that look like others",
        )
    else:
        yield "unknown", f"what {it.name or 'it'} does is not known"
    yield from _words_findings(it.args, scene, True)


def _interpreter(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    texts = [each.value or "" for each in it.args]
    if "-m" in texts and texts[texts.index("-m") + 1 : texts.index("-m") + 2] in (["pip"], ["ensurepip"], ["venv"]):
        yield "package_install", f"{it.name} brings code of others and may run its scripts"
        yield "network", f"{it.name} loads packages"
        yield "write", f"{it.name} changes what is installed"
    yield "unknown", f"{it.name} runs code, which is not read here"
    script = next((index for index, text in enumerate(texts) if text in ("-c", "-e")), None)
    words = [each for index, each in enumerate(it.args) if script is None or index != script + 1]
    yield from _words_findings(words, scene, True)


# ---------------------------------------------------------------------- all of it


def findings(it: Invocation, scene: Scene) -> Iterator[LabelledRisk]:
    """What there is to say about one program of a line."""
    for reason in it.unclear:
        yield "unclear", reason
    if it.piped_code:
        yield "pipe_to_shell", it.piped_code
    if not it.inside:
        for name, _word in it.command.assigned:
            yield from of_variable(name)
        for redirect in it.command.redirects:
            yield from _redirected(redirect, scene)
    if not it.words:
        return
    yield from _secret_variables(it)
    name = family(it.name)
    yield from _catastrophe(it)
    if not it.words[0].certain:
        return
    if it.name in READERS:
        yield from READERS[it.name](it, scene)
    elif it.name in DOERS:
        yield from _doer(it, scene)
    elif it.name == "git":
        yield from _git(it, scene)
    elif it.name in PACKAGES:
        yield from _packages(it, scene)
    elif name in INTERPRETERS:
        yield from _interpreter(it, scene)
    else:
        yield from _other(it, scene)


def _secret_variables(it: Invocation) -> Iterator[LabelledRisk]:
    for word in it.words:
        if word.value is None and (secret := SECRET_VARIABLE.search(word.source)) is not None:
            yield "credential_read", f"{secret[0]} may be a secret"


def _redirected(redirect: Redirect, scene: Scene) -> Iterator[LabelledRisk]:
    operator, target = redirect.operator, redirect.target
    if operator.startswith("<<") or target.process:
        return
    text = target.value
    if operator in ("<&", ">&") and text is not None and re.fullmatch(r"\d+-?|-", text):
        return
    if text is not None and STREAMS.fullmatch(text):
        return
    writes = operator != "<"
    if text is not None and re.match(r"/dev/(tcp|udp)/", text):
        yield "network", f"{target.source} is a connection"
        return
    if writes:
        yield "write", f"{operator} {target.source} writes a file"
        if text is not None and DISKS.fullmatch(posixpath.normpath(text)):
            yield "catastrophic", f"it writes over the device {target.source}"
    yield from _words_findings([target], scene, writes)
    if target.glob:
        yield "unclear", f"which file {target.source} is depends on a pattern"
