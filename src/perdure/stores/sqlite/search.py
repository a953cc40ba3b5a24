"""The index of words of a SQLite store, for who switches it on: a table of FTS5 in the same file.

It is written in the transaction that writes a record, so there is no moment at which one is there without the other,
and a copy of the file has both. A mark says that a store has it: every Runtime that writes to the store keeps it, also
one that does not search. The mark is the place up to which older records are in it (`IndexMore`).

Deleting a row from FTS5 removes its text at once; its words stay in the index until segments are merged. `merge` does
so in small steps, when the writer has nothing else to do.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

import msgspec

from perdure.errors import BlobMissing, SearchUnavailable
from perdure.model.codec import decode_row
from perdure.model.record import Spilled
from perdure.model.search import FoundRecord, SearchFilter, spoken
from perdure.stores.sqlite.records import node_place, node_position

MARK = "search"
WHOLE = b"whole"
"""The mark when all records are in the index."""
AT_ONCE, TEXT_AT_ONCE = 200, 200_000
"""Older records, and characters of them, that one transaction takes in: everybody else's writes wait for it."""
MERGED_AT_ONCE = 64
"""Pages that one step of merging writes, about."""

CREATE = (
    "CREATE VIRTUAL TABLE words USING fts5 (text, columnsize = 0, tokenize = 'unicode61 remove_diacritics 2')",
    # A block of it and its row fit into a page of this file.
    "INSERT INTO words (words, rank) VALUES ('pgsz', 950)",
)
ADD = "INSERT INTO words (rowid, text) VALUES (?, ?)"
FIND = (
    "SELECT words.rowid, sessions.id, snippet(words, 0, '', '', '…', 24) "
    "FROM words CROSS JOIN sessions ON sessions.sid = words.rowid >> 36 "
    "WHERE words MATCH ? AND words.rowid < ? AND sessions.deleted = 0"
)


class WordIndex:
    """The index as the writing connection sees it, inside of its transactions. `place` of a record is its row."""

    def __init__(self, connection: sqlite3.Connection, read_blob: Callable[[str], bytes]) -> None:
        self._do = connection.execute
        self._read_blob = read_blob

    def create(self) -> None:
        try:
            for statement in CREATE:
                self._do(statement)
        except sqlite3.OperationalError as error:
            if "fts5" not in str(error):
                raise
            raise SearchUnavailable("the SQLite library of this Python has no FTS5") from None

    def drop(self) -> None:
        self._do("DROP TABLE IF EXISTS words")

    def add(self, place: int, body: bytes) -> int:
        """Take a record in; how many characters."""
        text = self._text(body)
        if text:
            self._do(ADD, (place, text))
        return len(text)

    def replace(self, place: int, body: bytes) -> None:
        self._do("DELETE FROM words WHERE rowid = ?", (place,))
        self.add(place, body)

    def drop_session(self, sid: int) -> None:
        self._do(
            "DELETE FROM words WHERE rowid BETWEEN ? AND ?", (node_place(sid, 0, 0), node_place(sid + 1, 0, 0) - 1)
        )

    def take_in(self, after: int) -> int | None:
        """Take in some records after a place that are not in it; the place of the last, None when there are no more."""
        found = self._do(
            "SELECT place, body FROM nodes WHERE place > ? ORDER BY place LIMIT ?", (after, AT_ONCE)
        ).fetchall()
        if not found:
            return None
        span = (found[0][0], found[-1][0])
        known = {place for (place,) in self._do("SELECT rowid FROM words WHERE rowid BETWEEN ? AND ?", span)}
        size = 0
        for place, body in found:
            size += 0 if place in known else self.add(place, body)
            if size > TEXT_AT_ONCE:
                return int(place)
        return int(span[1])

    def merge(self, begin: bool) -> bool:
        """One step of merging all segments, which drops the words of deleted rows; whether there are more."""
        before = self._changes()
        self._do("INSERT INTO words (words, rank) VALUES ('merge', ?)", (-MERGED_AT_ONCE if begin else MERGED_AT_ONCE,))
        return self._changes() - before >= 2

    def _changes(self) -> int:
        return int(self._do("SELECT total_changes()").fetchone()[0])

    def _text(self, body: bytes) -> str:
        try:
            record = decode_row(body)
            if isinstance(record, Spilled):
                record = decode_row(self._read_blob(record.digest))
        except (msgspec.DecodeError, BlobMissing):  # reading the session reports it
            return ""
        # SQLite would end the text at a NUL.
        return spoken(record).replace("\0", " ")


def find(connection: sqlite3.Connection, wanted: SearchFilter) -> tuple[list[FoundRecord], float]:
    """What is found, and how much of the store was searched."""
    mark = connection.execute("SELECT value FROM meta WHERE key = ?", (MARK,)).fetchone()
    if mark is None:
        raise SearchUnavailable("this store keeps no index of words")
    clauses, before = "", node_place(*wanted.before) if wanted.before is not None else 2**63 - 1
    args: list[object] = [" ".join([f'"{word}"' for word in wanted.words]), before]
    if wanted.agent is not None:
        clauses, args = " AND sessions.agent = ?", [*args, wanted.agent]
    for each in wanted.metadata:
        clauses += " AND sessions.sid IN (SELECT sid FROM labels WHERE key = ? AND value = ?)"
        args += each
    query = f"{FIND}{clauses} ORDER BY words.rowid DESC LIMIT ?"
    found = connection.execute(query, [*args, wanted.limit]).fetchall()
    rows = [FoundRecord(*node_position(place), session_id, snippet) for place, session_id, snippet in found]
    if mark[0] == WHOLE:
        return rows, 1.0
    last = connection.execute("SELECT max(place) FROM nodes").fetchone()[0] or 1
    return rows, min(0.999, int(mark[0]) / last)
