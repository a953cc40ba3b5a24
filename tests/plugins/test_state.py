"""What plugins remember: when it is taken, what is given back, and what happens when it cannot be read."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.errors import PluginFault
from perdure.model.codec import convert, decode, encode
from perdure.model.plugin import Issue, PluginSnapshot
from perdure.model.tool import BlobRef
from perdure.plugins.hooks import Plugin, SnapshotReader, SnapshotWriter
from perdure.plugins.registry import fingerprint, is_newer, restore_snapshot, revision_of, take_snapshot

# echo -n hello | sha256sum, and of nothing
HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
NOTHING = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


class Notes(Plugin):
    """Keeps a list, and bytes by name; `serialised` counts how often it was asked for them."""

    id = "notes"
    revision = 0  # a plain counter in place of the property

    def __init__(self, state: Any = None, blobs: dict[str, bytes] | None = None, *, id: str = "notes") -> None:
        self.id, self.state, self.blobs = id, state, blobs or {}
        self.serialised = 0
        self.told: PluginSnapshot | None = None

    def snapshot(self, writer: SnapshotWriter) -> Any:
        self.serialised += 1
        for name, data in self.blobs.items():
            writer.put(name, data)
        return self.state

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        self.told, self.state, self.revision = snapshot, snapshot.state, snapshot.revision
        self.blobs = {name: data for name in ("big", "empty", "none") if (data := reader.get(name)) is not None}


def at(id: str, version: str, count: int) -> Plugin:
    made: Plugin = type("At", (Plugin,), {"id": id, "version": version, "revision": count})()
    return made


# ---------------------------------------------------------------------- the fingerprint


def test_the_fingerprint_is_what_its_definition_gives() -> None:
    # printf 'audit\0001\000\003\0\0\0\0\0\0\0\377plan\0002.1\000\0\0\0\0\0\0\0\0\377' | sha256sum | cut -c1-16
    # read as little-endian
    plugins = [at("audit", "1", 3), at("plan", "2.1", 0)]

    assert fingerprint(plugins) == int.from_bytes(bytes.fromhex("999772346f79b894"), "little")


def test_the_fingerprint_of_nobody() -> None:
    # sha256 of nothing begins with e3b0c44298fc1c14
    assert fingerprint([]) == 0x141CFC9842C4B0E3


@pytest.mark.parametrize(
    "other",
    [
        [at("audit", "1", 4), at("plan", "2", 0)],
        [at("audit", "2", 3), at("plan", "2", 0)],
        [at("other", "1", 3), at("plan", "2", 0)],
        [at("plan", "2", 0), at("audit", "1", 3)],
        [at("audit", "1", 3)],
        [at("audit1", "", 3), at("plan", "2", 0)],
    ],
    ids=["revision", "version", "id", "order", "fewer", "moved border"],
)
def test_the_fingerprint_tells_apart(other: list[Plugin]) -> None:
    assert fingerprint(other) != fingerprint([at("audit", "1", 3), at("plan", "2", 0)])


def test_the_fingerprint_serialises_nothing() -> None:
    notes = Notes(["x"])

    assert fingerprint([notes])
    assert notes.serialised == 0


# ---------------------------------------------------------------------- there and back


def test_a_snapshot_comes_back_with_its_named_bytes() -> None:
    notes = Notes({"done": [1, 2]}, {"big": b"hello", "empty": b""})
    notes.revision = 7

    taken = take_snapshot(notes)
    stored = convert(decode(encode(taken.snapshot)), PluginSnapshot)
    other = Notes()
    issue = restore_snapshot(other, stored, taken.blobs)

    assert taken.snapshot == PluginSnapshot(
        "1",
        7,
        {"done": [1, 2]},
        {
            "big": BlobRef(HELLO, 5, "application/octet-stream"),
            "empty": BlobRef(NOTHING, 0, "application/octet-stream"),
        },
    )
    assert taken.blobs == {HELLO: b"hello", NOTHING: b""}
    assert issue is None
    assert (other.state, other.blobs, other.revision) == ({"done": [1, 2]}, {"big": b"hello", "empty": b""}, 7)


def test_a_state_is_taken_as_it_is_now_and_in_plain_values() -> None:
    state: dict[str, Any] = {"t": (1, float("inf")), "s": "\0"}
    notes = Notes(state)

    taken = take_snapshot(notes)
    state["t"] = "changed"

    assert taken.snapshot.state == {"t": [1, "Infinity"], "s": "�"}


def test_a_plugin_without_an_entry_is_told_so() -> None:
    notes = Notes(["left over"])
    notes.revision = 4

    assert restore_snapshot(notes, None, {}) is None
    assert notes.told == PluginSnapshot("1", 4, None)
    assert (notes.state, notes.blobs) == (None, {})


def test_an_empty_reader_answers_every_name_with_nothing() -> None:
    assert SnapshotReader().get("big") is None


# ---------------------------------------------------------------------- what cannot be saved


class Unwell(Notes):
    """Says `state` and raises it when it is an exception."""

    def snapshot(self, writer: SnapshotWriter) -> Any:
        if isinstance(self.state, BaseException):
            raise self.state
        return super().snapshot(writer)


@pytest.mark.parametrize(
    ("state", "what"),
    [
        (object(), "InvalidInput: a object is not JSON"),
        ({"x": {1, object()}}, "InvalidInput: a set is not JSON"),
        (ValueError("full"), "ValueError: full"),
        (SystemExit(1), "SystemExit: 1"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        ("x" * (32 * 1024 * 1024), "TooLarge: the state"),
    ],
    ids=["object", "nested", "raises", "exits", "interrupts", "huge"],
)
def test_a_snapshot_that_cannot_be_taken_is_a_fault_of_its_plugin(state: Any, what: str) -> None:
    with pytest.raises(PluginFault) as caught:
        take_snapshot(Unwell(state))

    assert (caught.value.plugin, caught.value.hook) == ("notes", "snapshot")
    assert caught.value.what.startswith(what)


@pytest.mark.parametrize("name", [5, "a\0", "\ud800"])
def test_bytes_need_a_name_that_comes_back(name: Any) -> None:
    with pytest.raises(PluginFault, match="cannot name a blob"):
        take_snapshot(Notes(None, {name: b"x"}))


class Moody(Plugin):
    id = "moody"

    @property
    def revision(self) -> int:
        raise RuntimeError("not now")


@pytest.mark.parametrize("count", ["1", 1.5, None, True, 2**63])
def test_a_revision_is_a_count_that_can_be_stored(count: Any) -> None:
    with pytest.raises(PluginFault, match="is no count"):
        revision_of(at("p", "1", count))


def test_a_revision_that_raises_is_a_fault_wherever_it_is_asked() -> None:
    with pytest.raises(PluginFault, match="not now"):
        take_snapshot(Moody())
    with pytest.raises(PluginFault, match="not now"):
        fingerprint([Moody()])


# ---------------------------------------------------------------------- what cannot be read


class Strict(Notes):
    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        if isinstance(snapshot.state, str) and snapshot.state == "exit":
            raise SystemExit(3)
        if snapshot.state is not None and not isinstance(snapshot.state, list):
            raise ValueError("I keep a list")


@pytest.mark.parametrize(
    ("state", "why"),
    [({"no": "list"}, "ValueError: I keep a list"), ("exit", "SystemExit: 3")],
    ids=["raises", "exits"],
)
def test_a_snapshot_that_a_plugin_cannot_read_is_reported_and_kept(state: Any, why: str) -> None:
    assert restore_snapshot(Strict(), PluginSnapshot("1", 1, state), {}) == Issue(
        "plugin_snapshot_unreadable",
        f"its snapshot cannot be restored: {why}; the snapshot is kept: use a version of the plugin that can read it",
        "notes",
    )


def test_a_snapshot_without_its_bytes_is_not_given_back_as_if_it_were_whole() -> None:
    notes = Notes()
    snapshot = PluginSnapshot("1", 1, None, {"big": BlobRef(HELLO, 5), "empty": BlobRef(NOTHING, 0)})

    issue = restore_snapshot(notes, snapshot, {NOTHING: b""})

    assert issue is not None
    assert issue.code == "plugin_snapshot_unreadable"
    assert "'big' are gone" in issue.message
    assert notes.told is None


def test_a_snapshot_of_a_newer_plugin_is_reported_and_not_touched() -> None:
    notes = Notes()

    assert restore_snapshot(notes, PluginSnapshot("1.1", 1, ["x"]), {}) == Issue(
        "plugin_snapshot_newer",
        "its snapshot is of version 1.1, the plugin is 1: upgrade it; the snapshot is kept",
        "notes",
    )
    assert notes.told is None


@pytest.mark.parametrize(
    ("stored", "known", "newer"),
    [
        ("2", "1", True),
        ("1.10", "1.9", True),
        ("1.0.1", "1", True),
        ("1", "1", False),
        ("1.0", "1", False),
        ("1", "1.0.0", False),
        ("1", "2", False),
        ("1.9", "1.10", False),
        ("2.0b1", "1", False),
        ("2", "one", False),
        ("", "1", False),
        ("²", "1", False),
    ],
)
def test_dotted_numbers_tell_which_version_is_newer(stored: str, known: str, newer: bool) -> None:
    assert is_newer(stored, known) is newer


def test_a_restore_that_turns_out_to_be_async_restores_nothing_and_says_so() -> None:
    async def later(snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        """Never awaited."""

    class Wrapped(Notes):
        def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> Any:
            return later(snapshot, reader)

    issue = restore_snapshot(Wrapped(), PluginSnapshot("1", 3, ["kept"]), {})

    assert issue is not None
    assert issue.code == "plugin_snapshot_unreadable"
    assert "nothing can wait" in issue.message
