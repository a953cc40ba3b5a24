"""What a person is asked about a command, what an approval holds for, and how secrets are kept out of the rest.

question    the whole command with its folder and its risks, in which nothing is cut and nothing is invisible
digest      what exactly was shown: another command, folder, set of variables or sandbox has another one
hidden      a text with marks in place of secrets, for names of processes and for what a model is told
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shlex
import unicodedata
from collections.abc import Iterable, Sequence

from msgspec import to_builtins

from perdure.model.codec import encode
from perdure.model.sandbox import Confinement
from perdure.model.secrets import Marks
from perdure.workspace.policy import CommandLine, Verdict

INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})
BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Letters, marks and signs that leave nothing to see."""


def visible(text: str) -> str:
    """A text in which everything is seen: control characters, those that turn the direction of writing, blanks that are
    none, and halves of characters are written as escapes."""
    return "".join([each if each == " " or not _is_invisible(each) else _escape(each) for each in text])


def _is_invisible(each: str) -> bool:
    return unicodedata.category(each) in INVISIBLE or BLANK.match(each) is not None


def _escape(each: str) -> str:
    return ascii(each)[1:-1] if not each.isascii() or not each.isprintable() else f"\\u{ord(each):04x}"


def shown(line: CommandLine) -> str:
    """A command as a person reads it: a text for a shell as it is, arguments with the quotes that keep them apart."""
    return line.shell if line.shell else shlex.join(line.argv)


def question(line: CommandLine, verdict: Verdict) -> str:
    """What a person is asked. Each line of the command begins with a bar, so that no part of it looks like ours."""
    told = [f"run in {visible(line.cwd) or '.'}:", *[f"  | {visible(each)}" for each in shown(line).split("\n")]]
    if line.env:
        told.append(f"with the variables {', '.join([visible(each) for each in line.env])}")
    if verdict.because:
        told.append(f"because: {visible(verdict.because)}")
    for risk in verdict.risks:
        part = f" [{visible(risk.part)}]" if risk.part and risk.part != shown(line) else ""
        told.append(f"- {risk.label}: {visible(risk.reason)}{part}")
    strange = sorted({each for each in shown(line) if not each.isascii()})
    if strange:
        names = ", ".join([f"U+{ord(each):04X} {unicodedata.name(each, '?')}" for each in strange[:20]])
        told.append(f"- it has characters that are not ASCII: {names}")
    return "\n".join(told)


def digest(line: CommandLine, argv: Sequence[str], sandbox: Confinement | None, env: Iterable[str] = ()) -> str:
    """What an approval holds for: the command to the last character and the arguments that it is run by, its folder,
    the names of its variables, and what it may do to the machine."""
    names = sorted({*line.env, *env})
    parts = [list(line.argv), line.shell, list(argv), line.cwd, names, to_builtins(sandbox)]
    return hashlib.sha256(encode(parts)).hexdigest()


_MARKS = Marks(secrets.token_bytes(16))


def hidden(text: str, known: Iterable[str] = ()) -> str:
    """A text with marks in place of secrets, where nothing goes by the text: what looks like one is hidden, whatever
    characters it has. The same secret has the same mark in this process."""
    return _MARKS.hide(text, known, syntax=True)
