"""What plugins remember: snapshots when a revision has moved, and restoring them when a session is opened again."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from mainstay.errors import InvalidInput, PluginFault
from mainstay.model.codec import INT_MAX, INT_MIN, clean, clean_text, encode_checked, error_text
from mainstay.model.own import own
from mainstay.model.plugin import Issue, PluginSnapshot
from mainstay.model.tool import BlobRef
from mainstay.plugins.hooks import Plugin, SnapshotReader, SnapshotWriter


class Taken(Struct, frozen=True):
    """A snapshot to record, and the bytes that must be kept first. `count` is the plugin's own revision."""

    snapshot: PluginSnapshot
    blobs: dict[str, bytes]
    count: int = 0


class Kept:
    """What is stored of each plugin's state. Lives as long as the session is in memory.

    `counts` are the plugins' own revisions when their state was last recorded; a plugin without one is to be saved.
    `stored` are the revisions of the newest snapshots on disk. They only grow, also where a plugin begins to count
    anew: which of two states is the later one is told by them.
    """

    __slots__ = ("_taken", "counts", "stored")

    def __init__(self, plugins: Iterable[Plugin], snapshots: Mapping[str, PluginSnapshot]) -> None:
        """After `plugins` were restored from `snapshots`. Raises PluginFault."""
        self.counts: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self.stored = {name: each.revision for name, each in snapshots.items()}
        for plugin in plugins:
            count, known = revision(plugin), snapshots.get(plugin.id)
            # What another version wrote, or restoring it has changed, is saved as it is now.
            if known is None or (known.version == plugin.version and count <= known.revision):
                self.counts[plugin.id] = count

    def take(self, plugin: Plugin) -> Taken:
        """Serialise a plugin; what has changed, under a revision later than all that are stored. Raises PluginFault."""
        taken, stored = take(plugin), self.stored.get(plugin.id)
        number = taken.snapshot.revision
        if stored is not None:
            same = self._taken.get(plugin.id) == taken.count
            number = stored if same else min(max(taken.count, stored + 1), INT_MAX)
        self.stored[plugin.id], self._taken[plugin.id] = number, taken.count
        return Taken(replace(taken.snapshot, revision=number), taken.blobs, taken.count)


def revision(plugin: Plugin) -> int:
    """Where a plugin's state is. Raises PluginFault: this is the plugin's code, and asked at every record."""
    try:
        count: object = plugin.revision
    except BaseException as error:  # SystemExit of a plugin is its own trouble too
        raise PluginFault(plugin.id, "revision", f"{type(error).__name__}: {error_text(error)}") from error
    if type(count) is not int or not INT_MIN <= count <= INT_MAX:
        raise PluginFault(plugin.id, "revision", f"{count!r} is no count: let it be an int of 64 bits")
    return count


def take(plugin: Plugin) -> Taken:
    """Serialise one plugin. Raises PluginFault; the plugin's state is then as it was recorded before."""
    count = revision(plugin)  # before the state: what changes meanwhile is taken once more
    writer = SnapshotWriter()
    try:
        state = clean(plugin.snapshot(writer))
        encode_checked(state, "the state")
        kept = {hashlib.sha256(data).hexdigest(): data for data in writer.blobs.values()}
        refs = {_name(name): _ref(data) for name, data in writer.blobs.items()}
    except BaseException as error:  # whatever it raises, the turn goes on and says so
        raise PluginFault(plugin.id, "snapshot", f"{type(error).__name__}: {error_text(error)}") from error
    return Taken(PluginSnapshot(plugin.version, count, state, refs), kept, count)


def _name(name: object) -> str:
    if not isinstance(name, str) or clean_text(name) != name:
        raise InvalidInput(f"{name!r} cannot name a blob: use text")
    return name


def _ref(data: bytes) -> BlobRef:
    return BlobRef(hashlib.sha256(data).hexdigest(), len(data), "application/octet-stream")


def restore(plugin: Plugin, snapshot: PluginSnapshot | None, blobs: Mapping[str, bytes]) -> Issue | None:
    """Give a plugin its state back, or tell it that there is none. An issue: it cannot read it."""
    if snapshot is not None and newer(snapshot.version, plugin.version):
        return Issue(
            "plugin_snapshot_newer",
            f"its snapshot is of version {snapshot.version}, the plugin is {plugin.version}: upgrade it; "
            "the snapshot is kept",
            plugin.id,
        )
    try:
        entry = PluginSnapshot(plugin.version, revision(plugin)) if snapshot is None else own(snapshot)
        gone = [name for name, ref in entry.blobs.items() if ref.digest not in blobs]
        if gone:  # half a state is not shown as a whole one
            raise LookupError(f"its bytes {gone[0]!r} are gone")
        reader = SnapshotReader({name: blobs[ref.digest] for name, ref in entry.blobs.items()})
        give_back: Callable[[PluginSnapshot, SnapshotReader], object] = plugin.restore
        given = give_back(entry, reader)
        if inspect.iscoroutine(given):  # a wrapper hid that it is async: nothing was restored
            given.close()
            raise TypeError("it is asked where nothing can wait: make it plain")
    except BaseException as error:  # the session opens without it, and its snapshot stays where it is
        return Issue(
            "plugin_snapshot_unreadable",
            f"its snapshot cannot be restored: {type(error).__name__}: {error_text(error)}; the snapshot is kept: use "
            "a version of the plugin that can read it",
            plugin.id,
        )
    return None


def newer(stored: str, known: str) -> bool:
    """Whether a dotted version is later than another; other versions are the plugin's own to judge."""
    later, own = _numbers(stored), _numbers(known)
    return later is not None and own is not None and later > own


def _numbers(version: str) -> list[int] | None:
    """`1.2.0` as [1, 2]: zeros at the end make no difference."""
    parts = version.split(".")
    if not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        return None
    numbers = [int(part) for part in parts]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def fingerprint(plugins: Iterable[Plugin]) -> int:
    """One number for who is there, in which version, at which revision."""
    digest = hashlib.sha256()
    for plugin in plugins:
        digest.update(plugin.id.encode() + b"\0" + plugin.version.encode() + b"\0")
        digest.update((revision(plugin) % 2**64).to_bytes(8, "little") + b"\xff")
    return int.from_bytes(digest.digest()[:8], "little")
