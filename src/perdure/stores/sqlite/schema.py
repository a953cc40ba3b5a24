"""The tables, as numbered migrations. A file is brought forward when it is opened; a newer one is refused."""

from __future__ import annotations

MIGRATIONS: dict[int, tuple[str, ...]] = {
    1: (
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
        # Counts transactions that write no record, so that the lock file can name each one's trace in here.
        "CREATE TABLE tip (one INTEGER PRIMARY KEY CHECK (one = 1), count INTEGER NOT NULL)",
        "INSERT INTO tip VALUES (1, 0)",
        # `crc` here and below is `records.row_checksum` of the row.
        """
        CREATE TABLE sessions (
            sid INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            agent TEXT NOT NULL,
            head INTEGER NOT NULL,
            next INTEGER NOT NULL,
            turn INTEGER,
            state TEXT NOT NULL,
            owner TEXT,
            generation INTEGER NOT NULL,
            takeovers INTEGER NOT NULL,
            cancel BLOB,
            reason TEXT,
            fork_sid INTEGER,
            fork_turn INTEGER,
            fork_ordinal INTEGER,
            created INTEGER NOT NULL,
            updated INTEGER NOT NULL,
            deleted INTEGER NOT NULL,
            crc INTEGER NOT NULL
        )
        """,
        # Small whatever the number of sessions: only those with an open turn are in it.
        "CREATE INDEX sessions_open ON sessions (sid) WHERE turn IS NOT NULL",
        "CREATE INDEX sessions_forks ON sessions (fork_sid) WHERE fork_sid IS NOT NULL",
        # `place` is session, turn and ordinal in one integer (`records.node_place`): a session's history is one
        # stretch of this tree, a new record goes to the end of a stretch, and a row of up to a page stays in its leaf.
        # A key of three columns would move every row above a quarter of a page to a page of its own.
        """
        CREATE TABLE nodes (
            place INTEGER PRIMARY KEY,
            crc INTEGER NOT NULL,
            body BLOB NOT NULL
        )
        """,
        """
        CREATE TABLE inbox (
            sid INTEGER NOT NULL,
            input INTEGER NOT NULL,
            kind TEXT NOT NULL,
            cancel BLOB,
            crc INTEGER NOT NULL,
            PRIMARY KEY (sid, input)
        ) WITHOUT ROWID
        """,
        """
        CREATE TABLE keys (
            sid INTEGER NOT NULL,
            key TEXT NOT NULL,
            turn INTEGER NOT NULL,
            digest BLOB NOT NULL,
            crc INTEGER NOT NULL,
            PRIMARY KEY (sid, key)
        ) WITHOUT ROWID
        """,
        """
        CREATE TABLE waits (
            id TEXT PRIMARY KEY,
            sid INTEGER NOT NULL,
            turn INTEGER NOT NULL,
            call TEXT NOT NULL,
            kind TEXT NOT NULL,
            state TEXT NOT NULL,
            due INTEGER,
            body BLOB NOT NULL,
            answer BLOB,
            crc INTEGER NOT NULL
        ) WITHOUT ROWID
        """,
        "CREATE INDEX waits_of_session ON waits (sid)",
        "CREATE INDEX waits_due ON waits (due) WHERE state = 'open' AND due IS NOT NULL",
        "CREATE TABLE blobs (digest TEXT NOT NULL, sid INTEGER NOT NULL, PRIMARY KEY (digest, sid)) WITHOUT ROWID",
        "CREATE INDEX blobs_of_session ON blobs (sid)",
        """
        CREATE TABLE workers (
            id TEXT PRIMARY KEY,
            host TEXT NOT NULL,
            boot TEXT NOT NULL,
            pid INTEGER NOT NULL,
            started INTEGER NOT NULL,
            beat INTEGER NOT NULL,
            term_ms INTEGER NOT NULL
        ) WITHOUT ROWID
        """,
    ),
    2: (
        # Beside the sessions, because few have any. The body begins with its own checksum (`records.with_checksum`).
        "CREATE TABLE settings (sid INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    ),
    3: (
        # `active`: a worker has, or should have, its hands on it. A parked process is live and costs nothing.
        """
        CREATE TABLE processes (
            pid INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            live INTEGER NOT NULL,
            active INTEGER NOT NULL,
            due INTEGER,
            parent TEXT,
            updated INTEGER NOT NULL,
            created INTEGER NOT NULL,
            owner TEXT,
            generation INTEGER NOT NULL,
            attempts INTEGER NOT NULL,
            takeovers INTEGER NOT NULL,
            stuck TEXT,
            pruned INTEGER,
            crc INTEGER NOT NULL,
            record BLOB NOT NULL
        )
        """,
        "CREATE INDEX processes_live ON processes (active, pid) WHERE live = 1",
        "CREATE INDEX processes_due ON processes (due) WHERE due IS NOT NULL",
        "CREATE INDEX processes_children ON processes (parent, live) WHERE parent IS NOT NULL",
        "CREATE INDEX processes_over ON processes (updated) WHERE live = 0 AND pruned IS NULL",
        # Beside the processes: it never changes, and a row that does is written whole. It begins with its checksum.
        "CREATE TABLE registrations (pid INTEGER PRIMARY KEY, body BLOB NOT NULL)",
        # `place` grows with every event of any process: it is the cursor of the change feed.
        """
        CREATE TABLE events (
            place INTEGER PRIMARY KEY,
            pid INTEGER NOT NULL,
            sequence INTEGER NOT NULL,
            key TEXT,
            crc INTEGER NOT NULL,
            body BLOB NOT NULL
        )
        """,
        "CREATE UNIQUE INDEX events_of_process ON events (pid, sequence)",
        "CREATE UNIQUE INDEX events_by_key ON events (pid, key) WHERE key IS NOT NULL",
        # `place` is process and ordinal in one integer (`records.step_place`), for the same reasons as in `nodes`.
        "CREATE TABLE steps (place INTEGER PRIMARY KEY, crc INTEGER NOT NULL, body BLOB NOT NULL)",
        "CREATE TABLE awaits (target TEXT NOT NULL, pid INTEGER NOT NULL, PRIMARY KEY (target, pid)) WITHOUT ROWID",
        "CREATE INDEX awaits_of_process ON awaits (pid)",
        """
        CREATE TABLE grants (
            session_id TEXT NOT NULL,
            pid INTEGER NOT NULL,
            PRIMARY KEY (session_id, pid)
        ) WITHOUT ROWID
        """,
        "CREATE INDEX grants_of_process ON grants (pid)",
        # `number` is the place of the event that it tells of.
        """
        CREATE TABLE wakes (
            number INTEGER PRIMARY KEY,
            session_id TEXT NOT NULL,
            pid INTEGER NOT NULL,
            sequence INTEGER NOT NULL,
            policy TEXT NOT NULL,
            body BLOB NOT NULL,
            at INTEGER NOT NULL,
            state TEXT NOT NULL,
            turn INTEGER,
            reason TEXT,
            crc INTEGER NOT NULL
        )
        """,
        "CREATE INDEX wakes_pending ON wakes (session_id) WHERE state = 'pending'",
        "CREATE INDEX wakes_of_process ON wakes (pid)",
    ),
    # Besides this the store is given an id of its own (`connection.migrate`).
    4: (
        # What the worker takes up by itself (`model.session.Offers`, as JSON); NULL: written by an older version.
        "ALTER TABLE workers ADD COLUMN offers BLOB",
        "ALTER TABLE workers ADD COLUMN process TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE workers ADD COLUMN lived INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE workers ADD COLUMN suspect INTEGER",
        # Of turns (`scope` is the session) and processes (its negative) that were taken over and have no new record.
        """
        CREATE TABLE deaths (
            scope INTEGER PRIMARY KEY,
            counted INTEGER NOT NULL,
            alone INTEGER NOT NULL,
            life INTEGER NOT NULL,
            worker TEXT NOT NULL,
            since INTEGER NOT NULL,
            crc INTEGER NOT NULL
        )
        """,
        # What stays of a pruned process (`model.process.Tombstone`). `place` is one in the change feed, as of `events`.
        # Tombstones that older versions left are rows of `processes` with an event each.
        """
        CREATE TABLE tombstones (
            place INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            pid INTEGER NOT NULL,
            status INTEGER NOT NULL,
            pruned INTEGER NOT NULL,
            digest INTEGER NOT NULL,
            crc INTEGER NOT NULL
        )
        """,
    ),
    5: (
        # What sessions are found by: their metadata, a row for each key. `value` is JSON. The settings have the truth.
        """
        CREATE TABLE labels (
            key TEXT NOT NULL,
            value TEXT NOT NULL,
            sid INTEGER NOT NULL,
            PRIMARY KEY (key, value, sid)
        ) WITHOUT ROWID
        """,
        "CREATE INDEX labels_of_session ON labels (sid)",
    ),
    6: (
        # When it last changed, in periods of some seconds (`records.listed`). An index by `updated` itself would be
        # written with every turn; agent and id are in it because they never change, and rows need not be read for them.
        "ALTER TABLE sessions ADD COLUMN listed INTEGER NOT NULL DEFAULT 0",
        "UPDATE sessions SET listed = (updated >> 13) + 1 WHERE deleted = 0",
        "CREATE INDEX sessions_listed ON sessions (listed, agent, id)",
    ),
    7: (
        # Saved states of interpreters (`model.session.Dump`), one for each turn. `place` is that of the turn's first
        # record, for the same reasons as in `nodes`. No checksum: what is in here is under the executor's own.
        "CREATE TABLE dumps (place INTEGER PRIMARY KEY, digest TEXT, body BLOB NOT NULL)",
        # What was spent (`model.spending.UsageRow`), a row for each session, hour, label, model and metadata: sums are
        # read from these. A session's rows are next to each other, as its records are.
        """
        CREATE TABLE usage (
            sid INTEGER NOT NULL,
            hour INTEGER NOT NULL,
            label TEXT NOT NULL,
            model TEXT NOT NULL,
            metadata TEXT NOT NULL,
            session_id TEXT NOT NULL,
            agent TEXT NOT NULL,
            family TEXT NOT NULL,
            usage BLOB NOT NULL,
            crc INTEGER NOT NULL,
            PRIMARY KEY (sid, hour, label, model, metadata)
        ) WITHOUT ROWID
        """,
        # What counts against a limit, for each that it is counted by (`model.limit.Account`).
        """
        CREATE TABLE accounts (
            name TEXT NOT NULL,
            key TEXT NOT NULL,
            start INTEGER NOT NULL,
            spent INTEGER NOT NULL,
            reserved INTEGER NOT NULL,
            unknown INTEGER NOT NULL,
            most INTEGER NOT NULL,
            crc INTEGER NOT NULL,
            PRIMARY KEY (name, key)
        ) WITHOUT ROWID
        """,
        # What is reserved for calls of open turns, and for completions outside of turns (`model.limit.Reservation`).
        # The body begins with its checksum.
        """
        CREATE TABLE reservations (
            sid INTEGER NOT NULL,
            name TEXT NOT NULL,
            body BLOB NOT NULL,
            PRIMARY KEY (sid, name)
        ) WITHOUT ROWID
        """,
    ),
}

VERSION = max(MIGRATIONS)
