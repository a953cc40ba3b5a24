"""Secrets in texts, and the marks that stand in their place where people, plugins and programs watch.

What counts as a secret: a value behind a name that says so (`--password=…`, `API_KEY=…`), the password of an address,
what an `Authorization` header carries, the tokens of well-known services by their shape, and private keys.

A mark is a keyed hash: it tells whether two secrets are the same, and is of no use to try passwords against.
"""

from __future__ import annotations

import functools
import hmac
import re
from collections.abc import Iterable
from typing import Any

SHORTEST_SECRET = 4

WORDS = (
    r"(?:passw(?:or)?d|passphrase|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credentials?)"
    r"[A-Za-z0-9_-]{0,64}"
)
NAMED = rf"[A-Za-z0-9_-]{{0,64}}{WORDS}"
MIXED = r"(?=\S*[0-9])(?=\S*[A-Z])(?=\S*[a-z])"
"""Of a line of a private key: the path of a program seldom has all of them."""
VALUE = r"(?:'(?P<single>[^']+)'|\"(?P<double>[^\"]+)\"|(?P<secret>[^\s\"'&;,]+))"
LONG_OPTION = rf"(?i)--{NAMED}"
SECRETS = (
    rf"(?i)(?P<before>{WORDS}[\"']?(?:=|[ \t]+=[ \t]*|[ \t]*:[ \t]*)){VALUE}",
    rf"(?i)(?P<before>(?<!\S)--?{NAMED}[ \t]+){VALUE}",
    r"(?P<before>\bmysql\w{0,20}\b[^;|&\n]{0,200}?[ \t]-p)(?P<secret>[^\s\"']+)",
    r"(?P<before>[A-Za-z0-9]://[^\s/@:\"']{0,256}:)(?P<secret>[^\s/@\"']{1,1024})(?=@)",
    r"(?P<before>[A-Za-z0-9]://)(?P<secret>[^\s/@:\"']{16,1024})(?=@)",
    r"(?i)(?P<before>(?:[:=][ \t]*|[\"'])(?:bearer|basic|digest)[ \t]+)(?P<secret>[A-Za-z0-9+/=._~-]{8,})",
    r"(?P<before>(?:^|\s)-u[ \t]*[\"']?[^\s:\"']+:)(?P<secret>[^\s\"']+)",
    (
        r"(?P<before>)(?P<secret>\b(?:sk|pk|rk)[-_](?:[A-Za-z0-9]{1,40}[-_]){0,6}[A-Za-z0-9]{16,}|\bgh[opusr]_[A-Za-z0-9]{20,}"
        r"|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bxox[abprs]-[\w-]{10,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}"
        r"|\bnpm_[A-Za-z0-9]{30,}|\bpypi-[\w-]{30,}|\bhf_[A-Za-z0-9]{20,}|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
    ),
    (
        r"(?P<before>-----BEGIN [A-Z ]*PRIVATE KEY-----(?:\\n|\s)*)"
        rf"(?P<secret>(?:{MIXED}[A-Za-z0-9+/]{{32,}}(?:\\n|\s)+)*(?:{MIXED}[A-Za-z0-9+/]{{16,}}=*|[A-Za-z0-9+/]+=+))"
    ),
)
"""Patterns of secrets in texts. `before` stays as it is. No pattern takes time by the square of a text's length: the
part before a deciding word is bounded, or cannot begin in the middle of itself. They are compiled when they are first
used, because compiling them takes a tenth of the time in which Perdure is imported."""

MARK = re.compile(r"<secret [0-9a-f]{12}>")
SYNTAX = re.compile(r"[`;|&()<>\n]|\$\{")
"""What may begin another command in a shell, whatever quotes are around it."""


@functools.cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    return tuple([re.compile(each) for each in SECRETS])


class Marks:
    """Puts marks in the place of secrets, and secrets back in the place of the marks that it made."""

    __slots__ = ("_key", "_secrets")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._secrets: dict[str, str] = {}

    def mark(self, secret: str) -> str:
        """What is shown in place of a secret."""
        digest = hmac.digest(self._key, secret.encode(errors="surrogatepass"), "sha256").hex()
        found = f"<secret {digest[:12]}>"
        self._secrets[found] = secret
        return found

    def hide(self, text: str, known: Iterable[str] = (), *, syntax: bool = False) -> str:
        """A text with marks in place of what looks like a secret, and of those that are `known`.

        A value that may be more than one to a shell stays readable unless `syntax` is hidden too: a plugin that guards
        commands must see whatever may run.
        """

        def marked(found: re.Match[str]) -> str:
            secret = next(each for name, each in found.groupdict().items() if name != "before" and each is not None)
            if secret.startswith(("<secret", "$")):  # it is marked already, or the name of a variable
                return found[0]
            pem = found["before"].startswith("-----BEGIN")
            if not (syntax or pem) and SYNTAX.search(secret):
                return found[0]
            before = found["before"]
            return before + found[0][len(before) :].replace(secret, self.mark(secret))

        for secret in sorted({each for each in known if len(each) >= SHORTEST_SECRET}, key=len, reverse=True):
            text = text.replace(secret, self.mark(secret))
        for pattern in _patterns():
            text = pattern.sub(marked, text)
        return text

    def hide_all(self, value: Any) -> Any:
        """A JSON value with marks in the texts and commands that it holds, whatever they are for."""
        if isinstance(value, str):
            return self.hide(value, syntax=True)
        if isinstance(value, list):
            plain = all(isinstance(each, str) for each in value)
            return hide_argv(value, self) if plain else [self.hide_all(each) for each in value]
        if isinstance(value, dict):
            return {name: self.hide_all(each) for name, each in value.items()}
        return value

    def restore(self, value: Any) -> Any:
        """A JSON value with the secrets in the place of their marks."""
        if isinstance(value, str):
            return MARK.sub(lambda found: self._secrets.get(found[0], found[0]), value)
        if isinstance(value, list):
            return [self.restore(each) for each in value]
        if isinstance(value, dict):
            return {name: self.restore(each) for name, each in value.items()}
        return value


def hide_argv(argv: Iterable[str], marks: Marks) -> list[str]:
    """The arguments of a program with marks in place of secrets: also of one that follows the name of its option."""
    shown, before, program = list[str](), "", ""
    for each in argv:
        program = program or each.rpartition("/")[2]
        name, colon, password = each.partition(":")
        if re.fullmatch(LONG_OPTION, before) and not each.startswith(("-", "$")) and not SYNTAX.search(each):
            shown.append(marks.mark(each))
        elif before in ("-u", "--user", "--proxy-user") and colon and password:
            shown.append(f"{name}:{marks.mark(password)}")
        elif program.startswith("mysql") and re.fullmatch("-p.+", each):
            shown.append(f"-p{marks.mark(each[2:])}")
        else:
            shown.append(marks.hide(each))
        before = each
    return shown
