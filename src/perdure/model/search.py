"""Searching the text of sessions: what of a record is found, what is asked for, and what comes back."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from msgspec import Struct

from perdure.errors import InvalidInput, quoted
from perdure.model.ids import node_id, turn_id
from perdure.model.message import Part, Role, Text
from perdure.model.record import Closed, RecordRow, Replied, Said

MAX_QUERY, MAX_WORDS = 1000, 32
MAX_TEXT = 100_000
"""Characters of one record that are found."""

WORDS = re.compile(r"[^\W_]+")


class SearchFilter(Struct, frozen=True, gc=False):
    """Records that have all of these `words`, of sessions with this agent and all of these labels (keys, and values as
    JSON); from the newest session to the oldest, and in each from its end to its beginning. `before` is the place where
    a page before this one ended: session number, turn, ordinal."""

    words: tuple[str, ...]
    agent: str | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    limit: int = 20
    before: tuple[int, int, int] | None = None


class FoundRecord(Struct, frozen=True, gc=False):
    """A record that has the words, and a piece of its text around them."""

    sid: int
    turn: int
    ordinal: int
    session_id: str
    snippet: str


class SearchHit(Struct, frozen=True, gc=False):
    """Where something was said: by the `role` "user" or "assistant". `snippet` is a piece of it, on one line."""

    session_id: str
    turn_id: str
    node_id: str
    role: Role
    snippet: str
    cursor: str


class SearchPage(Struct, frozen=True, gc=False):
    """What was found. `indexed` says how much of the store was searched, from 0 to 1: less than 1 while older sessions
    are being taken into a new index."""

    hits: tuple[SearchHit, ...]
    indexed: float = 1.0

    @property
    def complete(self) -> bool:
        return self.indexed == 1.0

    @property
    def cursor(self) -> str | None:
        """Where the next page begins; None where this one is empty."""
        return self.hits[-1].cursor if self.hits else None


def hit(found: FoundRecord) -> SearchHit:
    return SearchHit(
        found.session_id,
        turn_id(found.session_id, found.turn),
        node_id(found.session_id, found.turn, found.ordinal),
        "assistant" if found.ordinal else "user",
        " ".join(found.snippet.split()),
        f"{found.sid}.{found.turn}.{found.ordinal}",
    )


def query_words(query: object) -> tuple[str, ...]:
    """The words of a query. Everything else in it separates them: no character has a meaning of its own."""
    if not isinstance(query, str) or len(query) > MAX_QUERY:
        raise InvalidInput(f"{quoted(query)} cannot be searched for: give some words, at most {MAX_QUERY} characters")
    found = tuple(dict.fromkeys(WORDS.findall(unicodedata.normalize("NFC", query))))
    if not found or len(found) > MAX_WORDS:
        raise InvalidInput(f"{quoted(query)} has {len(found)} words: search for one to {MAX_WORDS}")
    return found


def spoken(record: RecordRow) -> str:
    """What of a record is found: an input, or what a model answered. Results of tools are not, nor is reasoning."""
    match record:
        case Said(message=message):
            text = message.text
        case Replied(parts=parts):
            text = _text(parts)
        case Closed(reply=reply, rest=rest):
            replies = [*[each for each in rest if isinstance(each, Replied)], *([reply] if reply is not None else [])]
            text = "\n".join([_text(each.parts) for each in replies])
        case _:
            text = ""
    return text[:MAX_TEXT].strip()


def _text(parts: Iterable[Part]) -> str:
    return "".join([part.text for part in parts if isinstance(part, Text)])


# ------------------------------------------------------------- without an index


def folded(text: str) -> str:
    """Words as they are compared: without regard to case and diacritics."""
    plain = unicodedata.normalize("NFD", text)
    return "".join([c for c in plain if unicodedata.category(c) != "Mn"]).lower()


def snippet(text: str, words: Iterable[str]) -> str | None:
    """A piece of the text around the first of the words; None unless it has all of them."""
    found, wanted = [(m.start(), folded(m[0])) for m in WORDS.finditer(text)], {folded(word) for word in words}
    if not wanted.issubset({word for _, word in found}):
        return None
    index = next(i for i, (_, word) in enumerate(found) if word in wanted)
    begin = found[max(0, index - 8)][0]
    end = found[index + 16][0] if index + 16 < len(found) else len(text)
    return f"{'…' if begin else ''}{text[begin:end].strip()}{'…' if end < len(text) else ''}"
