"""The shell as far as it is read here: from the text of a command line to the commands that it runs.

    parse(text) → Script(commands)        or ShellUnclear, which says what was not understood and where

What the parse is for decides what it may do: a policy allows a line because of what was found in it, so everything that
the line may run must be found. Two rules follow.

It is strict. A text that is not wholly understood is not understood at all: there is no recovery from errors, and no
tree with holes. Whatever is read differently by bash and by a POSIX shell such as dash, or has a meaning that its text
does not show, is refused: `$'…'`, arrays, `((…))`, arithmetic on variables (bash runs what their values say),
`${name@P}`, `coproc`, patterns with brackets, control characters. What is refused is asked about, and costs a question.

It is a superset. Commands of every branch, loop, function body, substitution and here-document are listed, whether or
not they will run, each with what it is given: words, assignments, redirections, and whether its input is a pipe.

A word whose value is not known from the text is kept as such (`Word.value` is None): a variable, a substitution, a
brace expansion. Patterns (`*.py`) and `~` have a value that says so (`glob`, `tilde`): they stand for words that begin
with what is before the first wildcard.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

MAX_LENGTH = 65_536
MAX_DEPTH = 24
"""Substitutions, groups and wrappers in each other."""
MAX_COMMANDS = 2_000

BLANK = " \t"
META = frozenset(" \t\n;&|<>()")
PLAIN = re.compile(r"""[^\\'"$`<>()|&; \t\n]*""")
QUOTED = re.compile(r"""[^\\"$`]*""")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.:+-]+")
DELIMITER = re.compile(r"[A-Za-z0-9_.-]+")
SPECIAL = frozenset("@*#?-$!0123456789")
PARAMETER = re.compile(r"(#?)([A-Za-z_][A-Za-z0-9_]*|[@*#?$!0-9])(?:(:?[-+?]|##?|%%?)([A-Za-z0-9_./,@%+=* :-]*))?\}")
ARITHMETIC = re.compile(r"[0-9+*/%() \t<>=!&|^~?:,-]*")

OPENING = frozenset({"if", "while", "until", "for", "case", "{"})
CLOSING = frozenset({"then", "else", "elif", "fi", "do", "done", "esac", "}", "in"})
REFUSED = {
    "coproc": "coproc is bash only",
    "function": "`function` is bash only",
    "select": "`select` is bash only",
}


class ShellUnclear(Exception):  # not an error: the text may be fine, and is not understood here
    """A text that is not understood for certain."""

    def __init__(self, reason: str, at: str = "") -> None:
        self.reason, self.at = reason, at
        super().__init__(f"{reason}{f': {at}' if at else ''}")


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command. `value` is what the program is given, None where that is not known.

    `glob`: the value is a pattern, or begins or ends as one. `tilde`: it begins with somebody's home. `splits`: it may
    become several words, or none. `head` is what is known of its beginning.
    """

    source: str
    value: str | None
    head: str = ""
    glob: bool = False
    tilde: bool = False
    quoted: bool = False
    splits: bool = False
    process: bool = False
    """It is a pipe to a command of its own: `<(…)`."""

    @property
    def certain(self) -> bool:
        """Whether it is exactly one word, known from the text."""
        return self.value is not None and not self.glob and not self.tilde


@dataclass(slots=True)
class Redirect:
    """`operator` without the number in front of it. Of a here-document, the target is its text, which begins with the
    line behind the command and is therefore set after the command was read."""

    operator: str
    target: Word


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """One command that a line may run: `words` is empty where it only assigns or redirects."""

    words: tuple[Word, ...]
    assigned: tuple[tuple[str, Word], ...] = ()
    redirects: tuple[Redirect, ...] = ()
    piped: bool = False
    """Its input is the output of another command."""
    background: bool = False
    within: tuple[str, ...] = ()
    """The functions whose bodies it is in."""
    source: str = ""


@dataclass(frozen=True, slots=True)
class ShellScript:
    commands: tuple[ShellCommand, ...]
    functions: frozenset[str] = frozenset()


def literal(text: str) -> Word:
    """A word that was given as an argument, and is what it is."""
    return Word(text, text, text, quoted=True)


def parse(text: str, depth: int = 0) -> ShellScript:
    """What a line may run. Raises ShellUnclear."""
    if len(text) > MAX_LENGTH:
        raise ShellUnclear(f"it is longer than {MAX_LENGTH:,} characters")
    _check_characters(text)
    if (joined := re.search(r"[^ \t\n]\\\n", text)) is not None:
        raise ShellUnclear("a line is continued within a word", text[: joined.end()][-20:])
    reader = _Reader(text, depth)
    commands = reader.commands(())
    if reader.at < len(text):
        reader.refuse("unexpected")
    if reader.pending:
        reader.refuse("a here-document has no end")
    return ShellScript(tuple(commands), frozenset(reader.functions))


def _check_characters(text: str) -> None:
    if text.isascii() and text.isprintable():
        return
    for at, each in enumerate(text):
        blank = not each.isascii() and unicodedata.category(each).startswith("Z")
        if each in "\t\n" or (each.isprintable() and not blank):
            continue
        raise ShellUnclear(
            f"it has the character U+{ord(each):04X}, which is not shown or not understood", text[:at][-20:]
        )


@dataclass(slots=True)
class _Pending:
    """A here-document whose text begins with the next line."""

    delimiter: str
    quoted: bool
    indented: bool
    redirect: Redirect


@dataclass(slots=True)
class _Reader:
    text: str
    depth: int
    at: int = 0
    pending: list[_Pending] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)
    found: list[ShellCommand] = field(default_factory=list)
    """Commands of substitutions, before the command that they are in."""

    def refuse(self, reason: str) -> NoReturn:
        raise ShellUnclear(reason, self.text[self.at : self.at + 30])

    def peek(self, count: int = 1) -> str:
        return self.text[self.at : self.at + count]

    def blanks(self) -> None:
        while True:
            while self.peek() and self.peek() in BLANK:
                self.at += 1
            if self.peek(2) != "\\\n":
                break
            self.at += 2
        if self.peek() == "#":  # only ever where a word may begin
            while self.peek() not in ("", "\n"):
                self.at += 1

    def newline(self) -> None:
        self.at += 1
        pending, self.pending = self.pending, []
        for each in pending:
            self.here_document(each)

    def newlines(self) -> None:
        self.blanks()
        while self.peek() == "\n":
            self.newline()
            self.blanks()

    # ------------------------------------------------------------------ lists and pipelines

    def commands(self, ends: Sequence[str]) -> list[ShellCommand]:
        """Commands up to a reserved word or a character in `ends`, which is left where it is."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.refuse(f"it is nested more than {MAX_DEPTH} deep")
        commands: list[ShellCommand] = []
        while True:
            self.newlines()
            commands += self.take()  # of here-documents
            if not self.peek() or self.reaches(ends):
                break
            group = self.and_or()
            self.blanks()
            if self.peek() == "&":
                self.at += 1
                group = [replace(each, background=True) for each in group]
            elif self.peek() == ";" and self.peek(2) != ";;":
                self.at += 1
            elif self.peek() != "\n":
                commands += group
                break
            commands += group
            if len(commands) > MAX_COMMANDS:
                self.refuse(f"it has more than {MAX_COMMANDS:,} commands")
        self.depth -= 1
        return commands

    def reaches(self, ends: Sequence[str]) -> bool:
        return any(self.peek(len(end)) == end and (end in ")" or end == ";;" or self.reserved() == end) for end in ends)

    def reserved(self) -> str:
        """The unquoted word that begins here, without reading it."""
        end = self.at
        while end < len(self.text) and self.text[end] not in META:
            end += 1
        return self.text[self.at : end]

    def and_or(self) -> list[ShellCommand]:
        commands = self.pipeline()
        while True:
            self.blanks()
            if self.peek(2) not in ("&&", "||"):
                return commands
            self.at += 2
            self.newlines()
            commands += self.pipeline()

    def pipeline(self) -> list[ShellCommand]:
        while self.reserved() == "!":
            self.at += 1
            self.blanks()
        commands = self.command()
        while True:
            self.blanks()
            if self.peek() != "|" or self.peek(2) == "||":
                return commands
            self.at += 2 if self.peek(2) == "|&" else 1
            self.newlines()
            commands += [replace(each, piped=True) for each in self.command()]

    # ------------------------------------------------------------------ commands

    def command(self) -> list[ShellCommand]:
        begin, word = self.at, self.reserved()
        if self.peek() == "(":
            if self.peek(2) == "((":
                self.refuse("`((` is arithmetic in bash")
            self.at += 1
            commands = self.commands((")",))
            self.expect(")")
            return self.redirected(commands, begin)
        if word in REFUSED:
            self.refuse(REFUSED[word])
        if word in CLOSING:
            self.refuse(f"`{word}` is not expected")
        if word not in OPENING:
            return self.simple()
        self.at += len(word)
        match word:
            case "{":
                if self.peek() not in (" ", "\t", "\n"):
                    self.refuse("`{` has no blank behind it")
                commands = self.commands(("}",))
                self.expect("}")
            case "if":
                commands = self.conditional()
            case "while" | "until":
                commands = self.commands(("do",))
                commands += self.loop()
            case "for":
                commands = self.for_loop()
            case _:
                commands = self.case()
        return self.redirected(commands, begin)

    def expect(self, word: str) -> None:
        self.newlines() if word in CLOSING else self.blanks()
        if (self.peek(len(word)) if word in (")", ";;") else self.reserved()) != word:
            self.refuse(f"`{word}` is missing")
        self.at += len(word)

    def conditional(self) -> list[ShellCommand]:
        commands = self.commands(("then",))
        self.expect("then")
        commands += self.commands(("elif", "else", "fi"))
        if self.reserved() == "elif":
            self.at += 4
            return commands + self.conditional()
        if self.reserved() == "else":
            self.at += 4
            commands += self.commands(("fi",))
        self.expect("fi")
        return commands

    def loop(self) -> list[ShellCommand]:
        self.expect("do")
        commands = self.commands(("done",))
        self.expect("done")
        return commands

    def for_loop(self) -> list[ShellCommand]:
        self.blanks()
        name = NAME.match(self.text, self.at)
        if name is None:
            self.refuse("the variable of a `for` is missing")
        self.at = name.end()
        self.newlines()
        commands: list[ShellCommand] = []
        begin = self.at
        if self.reserved() == "in":
            self.at += 2
            self.blanks()
            while self.peek() not in ("", "\n", ";"):
                if self.peek() in META:
                    self.refuse("it is not expected in the words of a `for`")
                self.word()
                self.blanks()
        commands += self.take()
        commands.append(ShellCommand((), ((name.group(), Word("", None)),), source=self.text[begin : self.at]))
        if self.peek() == ";" and self.peek(2) != ";;":
            self.at += 1
        self.newlines()
        return commands + self.loop()

    def case(self) -> list[ShellCommand]:
        self.blanks()
        self.word()
        commands = self.take()
        self.newlines()
        self.expect("in")
        while True:
            self.newlines()
            if self.reserved() == "esac":
                break
            if self.peek() == "(":
                self.at += 1
            while True:
                self.blanks()
                self.word()
                commands += self.take()
                self.blanks()
                if self.peek() != "|":
                    break
                self.at += 1
            self.expect(")")
            commands += self.commands((";;", "esac"))
            if self.peek(2) == ";;":
                self.at += 2
                if self.peek() == "&":
                    self.refuse("`;;&` is bash only")
        self.expect("esac")
        return commands

    def take(self) -> list[ShellCommand]:
        """The commands of substitutions since the last time."""
        found, self.found = self.found, []
        return found

    def redirected(self, commands: list[ShellCommand], begin: int) -> list[ShellCommand]:
        """A compound command with what is redirected behind it, as a command without words."""
        end = self.at
        redirects: list[Redirect] = []
        while True:
            self.blanks()
            if not self.redirect(redirects):
                break
        if not redirects:
            self.at = end if self.peek() not in ("", "\n") else self.at
            return commands
        own = ShellCommand((), (), tuple(redirects), source=self.text[end : self.at].strip())
        if any(each.operator.startswith("<") for each in redirects):
            commands = [replace(each, piped=True) for each in commands]
        return [*self.take(), *commands, own]

    def simple(self) -> list[ShellCommand]:
        begin = self.at
        words: list[Word] = []
        assigned: list[tuple[str, Word]] = []
        redirects: list[Redirect] = []
        closed = False
        while True:
            self.blanks()
            if self.redirect(redirects):
                closed = closed or redirects[-1].operator.startswith("&")
                continue
            if self.peek() == "(" and len(words) == 1 and not assigned and not redirects:
                return self.function(words[0], begin)
            if (not self.peek() or self.peek() in META) and self.peek(2) not in ("<(", ">("):
                break
            if closed:
                self.refuse("words behind `&>` are another command for some shells")
            word = self.word()
            found = None if words or word.process else ASSIGNMENT.match(word.source)
            if found is not None:
                inner = None if word.value is None else word.value[found.end() :]
                tilde = word.source[found.end() :].startswith("~")
                inner_word = replace(word, value=inner, head=word.head[found.end() :], glob=False, tilde=tilde)
                assigned.append((found.group(1), inner_word))
                continue
            if not words and re.match(r"[A-Za-z_]\w*\[", word.source):
                self.refuse("it looks like an array, which is bash only")
            words.append(word)
        if self.peek() == "(":
            self.refuse("`(` is not expected")
        if not words and not assigned and not redirects:
            self.refuse("a command is missing")
        if words and words[0].source == "[[":
            self.check_test(words)
        source = self.text[begin : self.at].strip()
        return [*self.take(), ShellCommand(tuple(words), tuple(assigned), tuple(redirects), source=source)]

    def check_test(self, words: Sequence[Word]) -> None:
        inside = words[1:-1]
        # Numbers are arithmetic there, and bash runs what the values of variables in it say.
        counts = any(each.value in ("-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-v", "-R") for each in inside)
        if words[-1].source != "]]" or counts or any("[" in each.source or each.value is None for each in inside):
            self.refuse("`[[` with operators, variables, numbers or brackets")

    def function(self, name: Word, begin: int) -> list[ShellCommand]:
        self.at += 1
        self.blanks()
        if self.peek() != ")" or name.quoted or name.value is None or not FUNCTION_NAME.fullmatch(name.value):
            self.refuse("`(` is not expected")
        self.at += 1
        self.newlines()
        if self.peek() != "(" and self.reserved() not in OPENING:
            self.refuse("the body of a function is missing")
        self.functions.add(name.value)
        body = self.command()
        return [replace(each, within=(*each.within, name.value)) for each in body]

    # ------------------------------------------------------------------ redirections

    def redirect(self, into: list[Redirect]) -> bool:
        """Read one redirection, if there is one here."""
        begin = self.at
        if self.peek().isdigit() and self.text[self.at + 1 : self.at + 2] in ("<", ">"):
            self.at += 1
        rest = self.peek(3)
        if rest.startswith("&>"):
            operator = "&>>" if rest == "&>>" else "&>"
        elif rest[:2] in ("<(", ">("):  # a process substitution, and therefore a word
            self.at = begin
            return False
        else:
            operator = next(
                (
                    each
                    for each in ("<<<", "<<-", "<<", "<>", "<&", ">>", ">|", ">&", "<", ">")
                    if rest.startswith(each)
                ),
                "",
            )
        if not operator:
            self.at = begin
            return False
        self.at += len(operator)
        self.blanks()
        if self.peek(2) not in ("<(", ">(") and (not self.peek() or self.peek() in META):
            self.refuse(f"what `{operator}` is for is missing")
        target = self.word()
        if operator in ("<<", "<<-"):
            if not target.certain or target.value is None or not DELIMITER.fullmatch(target.value):
                self.refuse("the end of a here-document is not a plain word")
            made = Redirect(operator, target)
            self.pending.append(_Pending(target.value, target.quoted, operator == "<<-", made))
            into.append(made)
        else:
            into.append(Redirect(operator, target))
        return True

    def here_document(self, each: _Pending) -> None:
        begin = self.at
        while True:
            if self.at >= len(self.text):
                self.refuse("a here-document has no end")
            end = self.text.find("\n", self.at)
            end = len(self.text) if end < 0 else end
            line = self.text[self.at : end]
            if (line.lstrip("\t") if each.indented else line) == each.delimiter:
                break
            self.at = min(end + 1, len(self.text))
        body = self.text[begin : self.at]
        self.at = end  # at the line break behind the delimiter, which ends the command's line
        if self.at < len(self.text):
            self.at += 1
        value: str | None = body
        if not each.quoted and any(sign in body for sign in "$`\\"):
            if "\\" in body:
                self.refuse("a here-document with backslashes")
            inner = _Reader(body, self.depth)
            inner.quoted_text("")
            self.found += inner.found
            self.functions |= inner.functions
            value = None
        each.redirect.target = Word(body, value, body if value is not None else "", quoted=True)

    # ------------------------------------------------------------------ words

    def word(self) -> Word:  # one case for each character that begins something
        """The word that begins here."""
        begin = self.at
        made = _Parts()
        while True:
            each = self.peek()
            if each in ("<", ">") and self.peek(2) in ("<(", ">("):
                self.at += 2
                self.substituted(")")
                made.unknown(process=True)
            elif not each or each in META:
                break
            elif each == "\\":
                if self.peek(2) == "\\":
                    self.refuse("a backslash at the end")
                if self.peek(2) != "\\\n":
                    made.add(self.text[self.at + 1], quoted=True)
                self.at += 2
            elif each == "'":
                end = self.text.find("'", self.at + 1)
                if end < 0:
                    self.refuse("a quote has no end")
                made.add(self.text[self.at + 1 : end], quoted=True)
                self.at = end + 1
            elif each == '"':
                self.at += 1
                made.add("", quoted=True)
                self.quoted_text('"', made)
                self.at += 1
            elif each == "$":
                self.dollar(made, quoted=False)
            elif each == "`":
                self.backticks(made, quoted=False)
            else:
                self.run_of(PLAIN, made, quoted=False)
        if self.at == begin:
            self.refuse("a word is missing")
        source = self.text[begin : self.at]
        if self.peek() in ("<", ">") and (source.isdigit() or re.fullmatch(r"\{\w+\}", source)):
            self.refuse("a redirection of a number that not all shells know")
        return made.word(source)

    def quoted_text(self, end: str, made: _Parts | None = None) -> None:
        """Text in double quotes, or of a here-document (`end` is ""), up to its end, which is left where it is."""
        made = _Parts() if made is None else made
        while self.peek() != end:
            each = self.peek()
            if not each:
                self.refuse("a quote has no end")
            if each == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                if following == "\n":
                    pass
                elif following and following in '$`"\\':
                    made.add(following, quoted=True)
                else:
                    made.add("\\" + following, quoted=True)
                self.at += 2
            elif each == "$":
                self.dollar(made, quoted=True)
            elif each == "`":
                self.backticks(made, quoted=True)
            else:
                self.run_of(QUOTED, made, quoted=True)

    def run_of(self, characters: re.Pattern[str], made: _Parts, quoted: bool) -> None:
        """The character here, which is taken as it is, and those behind it that fit a pattern."""
        found = characters.match(self.text, self.at + 1)
        end = self.at + 1 if found is None else found.end()
        made.add(self.text[self.at : end], quoted)
        self.at = end

    def dollar(self, made: _Parts, quoted: bool) -> None:
        following = self.text[self.at + 1 : self.at + 2]
        if following in ("'", '"') and not quoted:
            self.refuse("$'…' and $\"…\" are read differently by shells")
        if following == "[":
            self.refuse("`$[` is arithmetic in bash")
        if self.peek(3) == "$((":
            end = self.text.find("))", self.at)
            if end < 0 or not ARITHMETIC.fullmatch(self.text, self.at + 3, end):
                self.refuse("arithmetic on more than numbers")
            depth = 0
            for each in self.text[self.at + 3 : end]:
                depth += (each == "(") - (each == ")")
                if depth < 0:
                    self.refuse("arithmetic on more than numbers")
            if depth:
                self.refuse("arithmetic on more than numbers")
            self.at = end + 2
            made.unknown(splits=False)
        elif following == "(":
            self.at += 2
            self.substituted(")")
            made.unknown(splits=not quoted)
        elif following == "{":
            found = PARAMETER.match(self.text, self.at + 2)
            if found is None:
                self.refuse("an expansion that is more than a variable with a plain default")
            self.at = found.end()
            made.unknown(splits=not quoted)
        elif following in SPECIAL and following:
            self.at += 2
            made.unknown(splits=not quoted or following == "@")
        elif (name := NAME.match(self.text, self.at + 1)) is not None:
            self.at = name.end()
            made.unknown(splits=not quoted)
        else:
            self.at += 1
            made.add("$", quoted=quoted)

    def substituted(self, end: str) -> None:
        """The commands of a substitution, and its end."""
        if self.pending:
            self.refuse("a substitution behind the beginning of a here-document")
        mine, self.found = self.found, []
        commands = self.commands((end,))
        if self.pending:
            self.refuse("a here-document has no end")
        self.expect(end)
        self.found = [*mine, *commands]

    def backticks(self, made: _Parts, quoted: bool) -> None:
        end = self.text.find("`", self.at + 1)
        if end < 0:
            self.refuse("a backtick has no end")
        inner = self.text[self.at + 1 : end]
        if "\\" in inner:
            self.refuse("backticks with backslashes")
        script = parse(inner, self.depth)
        self.functions |= script.functions
        self.found += script.commands
        self.at = end + 1
        made.unknown(splits=not quoted)


class _Parts:
    """A word while it is read."""

    def __init__(self) -> None:
        self.text = ""
        self.pattern = ""  # the same with a NUL for each quoted character: what the shell may still expand
        self.known, self.quoted, self.splits, self.process = True, False, False, False
        self.head: str | None = None

    def add(self, text: str, quoted: bool) -> None:
        self.quoted |= quoted
        self.text += text
        self.pattern += "\0" * len(text) if quoted else text

    def unknown(self, splits: bool = False, process: bool = False) -> None:
        if self.known:
            self.known, self.head = False, self.text
        self.splits |= splits
        self.process |= process

    def word(self, source: str) -> Word:
        text, pattern = self.text, self.pattern
        head = text if self.head is None else self.head
        braces = "{" in pattern and "}" in pattern and ("," in source or ".." in source)
        if braces:  # they expand in bash, and not in others
            return Word(source, None, head[: pattern.index("{")], quoted=self.quoted, splits=True, process=self.process)
        wild = [at for sign in "*?" if (at := pattern.find(sign)) >= 0]
        if 0 <= (bracket := pattern.find("[")) < pattern.rfind("]"):
            wild.append(bracket)
        if wild:
            head = head[: min(wild)]
        value = text if self.known else None
        tilde = pattern.startswith("~")
        return Word(source, value, head, bool(wild), tilde, self.quoted, self.splits, self.process)
