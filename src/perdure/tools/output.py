"""What becomes of what a tool returned: files into the store, plugins, the output budget.

    a value → JSON, its files in the store → plugins (`review`) → what the model sees (`project`, else the budget) → Ok

The output budget says what a model sees of a value when the whole is too large for it; the whole is kept beside it.

    text    head + marker + tail
    list    head items + a marker item + tail items, when there are too many; items too large are cut themselves
    dict    the same with entries

A value keeps its shape, and only strings are cut: numbers, booleans and nulls are whole or dropped with their item.

The way down never measures more items of a container than could fit into its room, so the work done in Python grows
with the budget, and the rest (encoding to know a size) is linear in the value.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from perdure.errors import InvalidInput, ToolError
from perdure.model.codec import MAX_VALUE, clean, clean_file, encode, error_text
from perdure.model.message import FILES, File, FileRef, Inline, Local, Stored
from perdure.model.tool import BlobRef, Failed, Ok, OutputBudget, ToolOutcome
from perdure.plugins.turn import Projected
from perdure.stores.blobs import host_pieces
from perdure.tools.attempt import Again


class Keeps(Protocol):
    """Keeps bytes beside the store and gives their digest; of a file of the host, also its size."""

    async def keep(self, data: bytes) -> str: ...

    async def keep_file(self, path: str) -> tuple[str, int]: ...


Review: TypeAlias = Callable[[ToolOutcome], Awaitable[ToolOutcome]]
"""What plugins make of how a call ended, before anything of it is kept."""

Project: TypeAlias = Callable[[ToolOutcome], Awaitable[Projected]]
"""What a plugin lets the model see of a result."""

FilterFile: TypeAlias = Callable[[str, bytes, str], bytes]
"""The bytes of a file of this name and media type as filters let them be kept. Raises ToolError where they do not."""


class OutputRules(msgspec.Struct, frozen=True, gc=False):
    """What a returned value passes: `review`, then `project` or the `budget`; the whole goes to `keeps`.

    The bytes of its files pass `filter_file` before they are kept.
    """

    keeps: Keeps
    budget: OutputBudget
    review: Review | None = None
    project: Project | None = None
    filter_file: FilterFile | None = None


class AttemptResult(msgspec.Struct, frozen=True, gc=False):
    """How an attempt ended, and the blobs that its record refers to. `withheld` is shown to the model in place of a
    result that a plugin failed to project."""

    end: ToolOutcome | Again
    blobs: tuple[str, ...] = ()
    withheld: str = ""


_ATOMS = (str, int, float, bool, type(None))


async def returned(value: Any, rules: OutputRules) -> AttemptResult:
    """What the tool returned as JSON within the output budget; what did not fit is kept whole beside it."""
    files: tuple[File, ...] = ()
    try:
        if type(value) not in _ATOMS:
            value, files = await _saved(value, rules)
        plain = clean(value)
    except InvalidInput as error:
        return AttemptResult(Failed("invalid_output", str(error)))
    except BaseException as error:  # its own methods ran, and are no more to be trusted than the tool
        return AttemptResult(Failed("invalid_output", f"{type(error).__name__}: {error_text(error)}"))
    encoded = encode(plain)
    if len(encoded) > MAX_VALUE:
        return AttemptResult(
            Failed("output_too_large", f"the result has {len(encoded):,} bytes, the limit is {MAX_VALUE:,}")
        )
    if rules.review is not None:
        seen = await rules.review(Ok(plain, files=files))
        if not isinstance(seen, Ok):
            return AttemptResult(seen)
        plain, encoded, files = seen.value, encode(seen.value), seen.files
    withheld = ""
    if rules.project is not None:
        seen_by_model = await rules.project(Ok(plain, files=files))
        withheld = seen_by_model.withheld
        if not withheld:
            return await _kept(seen_by_model.value, plain, encoded, files, rules)
    shown = project(plain, rules.budget, encoded=encoded)
    if not shown.truncated and not files:
        return AttemptResult(Ok(plain), (), withheld)
    ended = await _kept(shown.value if shown.truncated else plain, plain, encoded, files, rules)
    return replace(ended, withheld=withheld) if withheld else ended


async def _kept(value: Any, plain: Any, encoded: bytes, files: tuple[File, ...], rules: OutputRules) -> AttemptResult:
    """The model sees `value`; the whole is kept where that is less. Files are referred to by the record."""
    blobs = blobs_of(files) if files else ()
    if value is plain or value == plain:
        return AttemptResult(Ok(plain, files=files), blobs)
    digest = await rules.keeps.keep(encoded)
    return AttemptResult(Ok(value, BlobRef(digest, len(encoded)), files), (*blobs, digest))


async def _saved(value: Any, rules: OutputRules) -> tuple[Any, tuple[File, ...]]:
    """The value with the bytes of its files in the store, and those files: the value itself, or what stands in a list
    or a dict. Deeper down nothing is looked for, so that a large value costs no more than a look at its items."""
    if isinstance(value, FILES):
        [item], files = await _saved([value], rules)
        return item, files
    if type(value) is dict and any(isinstance(each, FILES) for each in value.values()):
        items, files = await _saved(list(value.values()), rules)
        return dict(zip(value, items, strict=True)), files
    if type(value) in (list, tuple) and any(isinstance(each, FILES) for each in value):
        items = [await _passed(each, rules) if isinstance(each, FILES) else each for each in value]
        return items, tuple([each for each in items if isinstance(each, FILES)])
    return value, ()


async def _passed(file: File, rules: OutputRules) -> File | str:
    """The file with its bytes in the store as filters leave them; a text in its place where they withhold it."""
    keeps = rules.keeps
    if rules.filter_file is not None and not isinstance(file, FileRef) and isinstance(file.source, Local | Inline):
        data = await asyncio.to_thread(_read, file.source.path) if isinstance(file.source, Local) else file.source.data
        if data is None or len(data) > MAX_VALUE:
            return f"file {file.name!r} is withheld: plugins look at {MAX_VALUE:,} bytes at most, and it has more"
        if not data:
            raise _empty(file)
        try:
            file = replace(file, source=Inline(rules.filter_file(file.name, data, file.media_type)))
        except ToolError as error:
            return str(error)
    return await saved(file, keeps.keep, keeps.keep_file)


def _read(path: str) -> bytes | None:
    """A file of the host; None where it is too large to be looked at."""
    with contextlib.suppress(OSError, ValueError):  # what is wrong with it is said by `host_pieces`
        if os.stat(path).st_size > MAX_VALUE:
            return None
    pieces, size = list[bytes](), 0
    for piece in host_pieces(path):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_VALUE:  # it grows
            return None
    return b"".join(pieces)


async def saved(
    file: File, put: Callable[[bytes], Awaitable[str]], put_file: Callable[[str], Awaitable[tuple[str, int]]]
) -> File:
    """The file with its bytes in the store, unless they are at an address. They pass through memory in pieces."""
    file = clean_file(file)
    if isinstance(file, FileRef):
        return file
    source = file.source
    if isinstance(source, Local):
        digest, size = await put_file(source.path)
    elif isinstance(source, Inline):
        digest, size = await put(source.data), len(source.data)
    else:
        return file
    if not size:
        raise _empty(file)
    return replace(file, source=Stored(digest, size))


def _empty(file: File) -> InvalidInput:
    return InvalidInput(f"the {type(file).__name__} {file.name!r} is empty")


def blobs_of(files: Iterable[File]) -> tuple[str, ...]:
    """What a record that holds these files refers to."""
    sources = [file.source for file in files if not isinstance(file, FileRef)]
    return tuple(dict.fromkeys([source.digest for source in sources if isinstance(source, Stored)]))


# ---------------------------------------------------------------------- the output budget

USUAL = OutputBudget()

# Any value can be shrunk to this much. A dict shares its room down to here before it drops entries, because its keys
# are what makes it readable; a list prefers fewer items that still say something.
_FLOOR, _ITEM_FLOOR, _LINE_FLOOR = 128, 256, 4
_MARKER_ROOM = 96
_KEPT = "the whole output is kept"

_encode = msgspec.json.Encoder().encode
T = TypeVar("T")
_Measure: TypeAlias = Callable[[str], int]


class Projection(msgspec.Struct, frozen=True):
    """What the model sees, and how much of the whole it does not."""

    value: Any
    truncated: bool = False
    dropped_bytes: int = 0
    dropped_lines: int = 0


def project(value: Any, budget: OutputBudget = USUAL, *, encoded: bytes | None = None) -> Projection:
    """`value` cut to the budget, or itself when it fits; `encoded` is its JSON when the caller has it already.

    A text counts in UTF-8 bytes and lines, anything else in bytes of JSON and lines of its strings together.
    """
    limit_bytes = MAX_VALUE if budget.bytes is None else budget.bytes
    limit_lines = MAX_VALUE if budget.lines is None else budget.lines
    kind = type(value)
    if kind is str:
        if len(value) * 4 <= limit_bytes and value.count("\n") < limit_lines:
            return Projection(value)
        return _project_text(value, _Size(limit_bytes, limit_lines - 1))
    if kind is not dict and kind is not list:
        return Projection(value)
    if encoded is None:
        encoded = _encode(value)
    if len(encoded) <= limit_bytes and encoded.count(b"\\n") < limit_lines:
        return Projection(value)
    cut = _Cut()
    shown = cut.fit(value, _measured(encoded), _Size(limit_bytes, limit_lines - 1))
    return Projection(shown, cut.bytes > 0, cut.bytes, cut.lines)


class _Size(NamedTuple):
    """Bytes, and line breaks in strings: of a value, or of the room that it may take."""

    bytes: int
    breaks: int

    @property
    def needed(self) -> int:
        """The bytes to set aside: cutting lines puts a marker in, which a short value has no room for."""
        return max(self.bytes, _FLOOR) if self.breaks > _LINE_FLOOR else self.bytes


def _project_text(text: str, room: _Size) -> Projection:
    if _utf8_size(text) <= room.bytes and text.count("\n") <= room.breaks:
        return Projection(text)
    shown, dropped = _cut_text(text, room, _utf8_size)
    return Projection(shown, True, _utf8_size(dropped), dropped.count("\n"))


class _Item(NamedTuple):
    """One item of a list or entry of a dict: its value, its size, and the size of what must stand around it."""

    key: str
    value: Any
    size: _Size
    around: _Size


class _Cut(msgspec.Struct):
    """One projection under way, counting what it drops."""

    bytes: int = 0
    lines: int = 0

    def fit(self, value: Any, size: _Size, room: _Size) -> Any:
        """`value` within `room`, which is never less than its floor."""
        if size.needed <= room.bytes and size.breaks <= room.breaks:
            return value
        room = _Size(min(room.bytes, size.needed) - 2, min(room.breaks, size.breaks))  # less its quotes or brackets
        if isinstance(value, str):
            shown, dropped = _cut_text(value, room, _json_size)
            self.bytes += _utf8_size(dropped)
            self.lines += dropped.count("\n")
            return shown
        return self._fit_dict(value, size, room) if isinstance(value, dict) else self._fit_list(value, size, room)

    def _fit_list(self, value: list[Any], size: _Size, room: _Size) -> list[Any]:
        items = [_Item("", item, _measured(_encode(item)), _Size(1, 0)) for item in _ends(value, room)]
        head, tail, dropped = self._fit_items(items, len(value), size, room, _ITEM_FLOOR)
        marker = [f"… [{_count(dropped, 'item')} dropped; {_KEPT}] …"] if dropped else []
        return [*(item for _, item in head), *marker, *(item for _, item in tail)]

    def _fit_dict(self, value: dict[str, Any], size: _Size, room: _Size) -> dict[str, Any]:
        items = []
        for key, item in _ends(list(value.items()), room):
            name = _measured(_encode(key))
            items.append(_Item(key, item, _measured(_encode(item)), _Size(name.bytes + 2, name.breaks)))
        head, tail, dropped = self._fit_items(items, len(value), size, room, _FLOOR)
        if not dropped:
            return dict(head + tail)
        mark, again = "…", 1
        while mark in value:
            again += 1
            mark = f"… {again}"
        return dict([*head, (mark, f"[{_count(dropped, 'entry', 'entries')} dropped; {_KEPT}]"), *tail])

    def _fit_items(
        self, items: list[_Item], count: int, size: _Size, room: _Size, floor: int
    ) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]], int]:
        """The items to keep from the head and from the tail, each fitted, and how many of `count` are dropped."""
        first, last = _choose(items, room, floor)
        if first + last < count:
            room = _Size(room.bytes - _MARKER_ROOM, room.breaks)
            first, last = _choose(items, room, floor)
        kept = items[:first] + items[len(items) - last :]
        around = _Size(sum(item.around.bytes for item in kept), sum(item.around.breaks for item in kept))
        if len(kept) < count:
            # Everything has a comma but the last, and the brackets are two: hence the one.
            self.bytes += size.bytes - 1 - around.bytes - sum(item.size.bytes for item in kept)
            self.lines += size.breaks - around.breaks - sum(item.size.breaks for item in kept)
        share = _Size(
            _share([item.size.needed for item in kept], room.bytes - around.bytes),
            _share([item.size.breaks for item in kept], room.breaks - around.breaks),
        )
        fitted = [(item.key, self.fit(item.value, item.size, share)) for item in kept]
        return fitted[:first], fitted[first:], count - len(kept)


def _ends(items: list[T], room: _Size) -> list[T]:
    """The items that could be kept: each takes two bytes at least with its comma, so those further inside cannot."""
    edge = room.bytes // 2 + 1
    return items if len(items) <= 2 * edge else items[:edge] + items[-edge:]


def _choose(items: list[_Item], room: _Size, floor: int) -> tuple[int, int]:
    """How many items from the head and how many from the tail fit when each is shrunk to its floor."""
    left, breaks = room
    first = last = 0
    head_open = tail_open = True
    while first + last < len(items) and (head_open or tail_open):
        from_head = head_open and (first <= last or not tail_open)
        item = items[first] if from_head else items[-1 - last]
        least = item.around.bytes + min(item.size.needed, floor)
        least_breaks = item.around.breaks + min(item.size.breaks, _LINE_FLOOR)
        if least <= left and least_breaks <= breaks:
            left, breaks = left - least, breaks - least_breaks
            first, last = first + from_head, last + (not from_head)
        elif from_head:
            head_open = False
        else:
            tail_open = False
    return first, last


def _share(sizes: list[int], room: int) -> int:
    """The largest share such that everyone who wants more than it can have it: small ones leave room to large ones."""
    left = room
    for done, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - done)
        if size > share:
            return share
        left -= size
    return room


def _cut_text(text: str, room: _Size, measure: _Measure) -> tuple[str, str]:
    """`text` as head, marker and tail, and what was dropped between them."""
    half = max(room.bytes - measure(_marker(text)) - 4, 0) // 2
    own_line = room.breaks >= 2
    keep = room.breaks - 2 if own_line else room.breaks
    head = _head(text, half, keep - keep // 2, measure)
    tail = _tail(text, half, keep // 2, measure)
    dropped = text[len(head) : len(text) - len(tail)]
    marker = _marker(dropped)
    if own_line and "\n" in dropped:
        before = "" if not head or head.endswith("\n") else "\n"
        after = "" if not tail or tail.startswith("\n") else "\n"
        marker = f"{before}{marker}{after}"
    return f"{head}{marker}{tail}", dropped


def _head(text: str, room: int, breaks: int, measure: _Measure) -> str:
    piece = text[:room]  # a character is a byte at least
    lines = piece.split("\n", breaks + 1)
    if len(lines) > breaks + 1:
        piece = "\n".join(lines[:-1])
    while (size := measure(piece)) > room:
        piece = piece[: len(piece) * room // size]
    return piece


def _tail(text: str, room: int, breaks: int, measure: _Measure) -> str:
    piece = text[max(len(text) - room, 0) :]
    lines = piece.rsplit("\n", breaks + 1)
    if len(lines) > breaks + 1:
        piece = "\n".join(lines[1:])
    while (size := measure(piece)) > room:
        piece = piece[len(piece) - len(piece) * room // size :]
    return piece


def _marker(dropped: str) -> str:
    size, lines = _count(_utf8_size(dropped), "byte"), dropped.count("\n")
    return f"… [{size} and {_count(lines, 'line')} dropped; {_KEPT}] …" if lines else f"… [{size} dropped; {_KEPT}] …"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _measured(encoded: bytes) -> _Size:
    breaks = encoded.count(b"\\n")
    if breaks and b"\\\\" in encoded:
        breaks = encoded.replace(b"\\\\", b"").count(b"\\n")  # a backslash before an n is no line break
    return _Size(len(encoded), breaks)


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _json_size(text: str) -> int:
    return len(_encode(text)) - 2
