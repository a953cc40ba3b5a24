"""What a person is asked about a command, what an approval holds for, and how secrets are kept out of the rest.

question    the whole command with its folder and its risks, in which nothing is cut and nothing is invisible
digest      what exactly was shown: another command, folder, set of variables or sandbox has another one
hidden      a text with marks in place of secrets, for events, traces and hooks
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import shlex
import unicodedata
from collections.abc import Iterable, Sequence

from msgspec import to_builtins

from mainstay.model.codec import encode
from mainstay.model.sandbox import Confinement
from mainstay.workspace.policy import CommandLine, Verdict

_KEY = secrets.token_bytes(16)
"""Of this OS process: a mark tells whether two secrets are the same, and is of no use to try passwords against."""

SHORTEST_SECRET = 4

NAMED = (
    r"[A-Za-z0-9_-]{0,64}(?:passw(?:or)?d|passphrase|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credentials?)"
    r"[A-Za-z0-9_-]{0,64}"
)
VALUE = r"(?:'(?P<single>[^']+)'|\"(?P<double>[^\"]+)\"|(?P<secret>[^\s\"'&;,]+))"
SECRETS = (
    re.compile(rf"(?i)(?P<before>(?<![A-Za-z0-9_]){NAMED}[\"']?\s*[=:]\s*){VALUE}"),
    re.compile(rf"(?i)(?P<before>(?<!\S)--?{NAMED}\s+){VALUE}"),
    re.compile(r"(?P<before>\bmysql\w{0,20}\b.{0,200}?\s-p)(?P<secret>[^\s\"']+)"),
    re.compile(r"(?P<before>[A-Za-z][A-Za-z0-9+.-]*://[^\s/@:\"']*:)(?P<secret>[^\s/@\"']+)(?=@)"),
    re.compile(r"(?P<before>[A-Za-z][A-Za-z0-9+.-]*://)(?P<secret>[^\s/@:\"']{16,})(?=@)"),
    re.compile(r"(?i)(?P<before>(?:bearer|basic|digest)\s+)(?P<secret>[A-Za-z0-9+/=._~-]{8,})"),
    re.compile(r"(?P<before>(?:^|\s)-u\s*[\"']?[^\s:\"']+:)(?P<secret>[^\s\"']+)"),
    re.compile(
        r"(?P<before>)(?P<secret>\b(?:sk|pk|rk)[-_](?:[A-Za-z0-9]{1,40}[-_]){0,6}[A-Za-z0-9]{16,}|\bgh[opusr]_[A-Za-z0-9]{20,}"
        r"|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bxox[abprs]-[\w-]{10,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}"
        r"|\bnpm_[A-Za-z0-9]{30,}|\bpypi-[\w-]{30,}|\bhf_[A-Za-z0-9]{20,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
    ),
    re.compile(r"(?P<before>-----BEGIN [A-Z ]*PRIVATE KEY-----)(?P<secret>.+?)(?=-----END|\Z)", re.DOTALL),
)
"""Where a secret is in a text. `before` stays as it is."""

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


def hidden(text: str, known: Iterable[str] = ()) -> str:
    """A text with marks in place of secrets: those that are `known`, such as values of granted variables, and whatever
    looks like one: tokens, `--password=…`, logins in addresses. The same secret has the same mark in this process."""
    for secret in sorted({each for each in known if len(each) >= SHORTEST_SECRET}, key=len, reverse=True):
        text = text.replace(secret, mark(secret))
    for pattern in SECRETS:
        text = pattern.sub(_marked, text)
    return text


def _marked(found: re.Match[str]) -> str:
    secret = next(text for name, text in found.groupdict().items() if name != "before" and text is not None)
    if secret.startswith(("<", "$")):  # it is marked already, or the name of a variable
        return found[0]
    before = found["before"]
    return before + found[0][len(before) :].replace(secret, mark(secret))


def mark(secret: str) -> str:
    """What is shown in place of a secret."""
    return f"<secret {hmac.new(_KEY, secret.encode(errors='surrogatepass'), 'sha256').hexdigest()[:12]}>"
