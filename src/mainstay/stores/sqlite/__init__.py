"""The SQLite store: one file that several processes of one machine may have open."""

from mainstay.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
