"""The SQLite store: one file that several processes of one machine may have open."""

from perdure.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
