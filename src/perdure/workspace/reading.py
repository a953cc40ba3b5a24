"""What a model is shown of a file: some lines or bytes of it, a picture, or its outline.

Files may be of any size, and may grow meanwhile: what is read is what was there when the file was opened, a piece at a
time, and no more is held than is shown.
"""

from __future__ import annotations

import base64
import os
import re
from typing import Any, BinaryIO, Literal, TypeAlias

from perdure.errors import ToolError
from perdure.model.message import Document, Image
from perdure.workspace.files import PIECE
from perdure.workspace.paths import Location, Paths
from perdure.workspace.pictures import picture_fault, picture_type

Unit: TypeAlias = Literal["lines", "bytes"]

MAX_LINES = 2000
MAX_BYTES = 48 * 1024
MAX_PICTURE = 20 * 1024 * 1024
SNIFFED = 8192


def shown_file(paths: Paths, place: Location, offset: int, limit: int | None, unit: Unit) -> Any:
    """What `read_file` returns."""
    path = paths.shown(place)
    with open(paths.open_file(place.folder, place.name), "rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        size, head = before.st_size, os.pread(file.fileno(), SNIFFED, 0)
        kind, binary = picture_type(head), b"\0" in head
        if kind is not None and unit == "lines":
            picture = _picture(file, path, place.name, kind, size, binary)
            if picture is not None:
                return picture
        if binary and unit == "lines":
            raise ToolError(
                f"{path} is binary ({size:,} bytes): read its bytes with unit='bytes'",
                code="binary_file",
                data={"size": size},
            )
        if offset > 0 and unit == "bytes" and offset > size:
            raise ToolError(f"{path} has {size:,} bytes: there is no offset {offset:,}", code="past_the_end")
        found = (
            _bytes(file, size, offset, limit, binary) if unit == "bytes" else _lines(file, size, offset, limit, path)
        )
        answer = {"path": path, "size": size, **found}
        after = os.fstat(file.fileno())
        if (after.st_size, after.st_mtime_ns) != (size, before.st_mtime_ns):
            answer["changed_while_read"] = True
        return answer


def _picture(file: BinaryIO, path: str, name: str, kind: str, size: int, binary: bool) -> Image | Document | None:
    """The file as a picture; None where it is a text that only begins like one."""
    if size > MAX_PICTURE:
        raise ToolError(
            f"{path} is a picture of {size:,} bytes; {MAX_PICTURE:,} are shown at most", code="file_too_large"
        )
    data = file.read(size)
    fault = picture_fault(data, kind)
    if fault and not binary:
        return None
    if fault:
        raise ToolError(
            f"{path} cannot be shown as {kind}: {fault}; unit='bytes' reads its bytes",
            code="broken_picture",
            data={"size": size},
        )
    made: type[Image | Document] = Document if kind == "application/pdf" else Image
    return made.from_bytes(data, kind, name)


def _decoded(data: bytes) -> tuple[str, dict[str, Any]]:
    try:
        return data.decode(), {}
    except UnicodeDecodeError:
        return data.decode(errors="replace"), {"invalid_utf8": "bytes that are not UTF-8 are shown as \ufffd"}


def _bytes(file: BinaryIO, size: int, offset: int, limit: int | None, binary: bool) -> dict[str, Any]:
    most = min(MAX_BYTES if limit is None else limit, MAX_BYTES, size - offset)
    data = os.pread(file.fileno(), most, offset) if most > 0 else b""
    following = offset + len(data)
    if not binary and following < size:  # a character that the end cuts goes to the next piece
        cut = next((n for n in range(1, 4) if len(data) > n and data[-n] >= 0xC0), 0)
        if cut and len(data[-cut:]) < _width(data[-cut]):
            data, following = data[:-cut], following - cut
    if binary:
        text, notes = base64.b64encode(data).decode(), {"encoding": "base64"}
    else:
        text, notes = _decoded(data)
    ended = following >= size
    return {"content": text, "offset": offset, "eof": ended, **({} if ended else {"next_offset": following}), **notes}


def _width(first: int) -> int:
    return 4 if first >= 0xF0 else 3 if first >= 0xE0 else 2


def _lines(file: BinaryIO, size: int, offset: int, limit: int | None, path: str) -> dict[str, Any]:
    """Lines from number `offset` (the first is 1; 0 means it too), as many as fit."""
    first = max(offset, 1)
    most = min(MAX_LINES if limit is None else limit, MAX_LINES)
    line, position, begin = 1, 0, 0 if first == 1 else -1
    while begin < 0 and position < size:
        piece = os.pread(file.fileno(), min(PIECE, size - position), position)
        if not piece:
            break
        breaks = piece.count(b"\n")
        if line + breaks < first:
            line += breaks
            position += len(piece)
            continue
        at = -1
        while line < first:
            at = piece.find(b"\n", at + 1)
            line += 1
        begin = position + at + 1
    if begin < 0 or (begin >= size and size > 0 and first > 1):
        raise ToolError(f"{path} has {line:,} lines: there is no line {first:,}", code="past_the_end")
    data = os.pread(file.fileno(), min(MAX_BYTES + 1, size - begin), begin) if size > begin else b""
    end = 0
    for _ in range(most):
        end = data.find(b"\n", end) + 1
        if end == 0:
            end = len(data)
            break
    notes: dict[str, Any] = {}
    if end > MAX_BYTES:
        end = data.rfind(b"\n", 0, MAX_BYTES) + 1
        if end == 0:
            end = MAX_BYTES
            notes["cut_line"] = f"line {first} is longer than {MAX_BYTES:,} bytes: read on with unit='bytes'"
    text = data[:end]
    ended = begin + len(text) >= size
    shown = text.count(b"\n") + (0 if text.endswith(b"\n") or not text else 1)
    if not ended:
        if "cut_line" in notes:
            notes["next_byte"] = begin + len(text)
        else:
            notes["next_offset"] = first + shown
    content, said = _decoded(text)
    return {"content": content, "first_line": first, "lines": shown, "eof": ended, **notes, **said}


# ---------------------------------------------------------------------- outlines

OutlineRule: TypeAlias = tuple[re.Pattern[str], str | None]


def _rules(*pairs: tuple[str, str | None]) -> tuple[OutlineRule, ...]:
    return tuple((re.compile(pattern), kind) for pattern, kind in pairs)


# They see 400 characters of a line, and none has a repetition inside of a repetition that could match in two ways.
_NAME = r"(?P<name>[A-Za-z_$][\w$]*)"
_PYTHON = _rules((rf"\s*(?:async )?(?P<kind>def|class) {_NAME}", None))
_SCRIPT = _rules(
    (
        rf"\s*(?:export )?(?:default )?(?:declare )?(?:abstract )?(?:async )?"
        rf"(?P<kind>function|class|interface|enum|type|namespace)\*? {_NAME}",
        None,
    ),
    (rf"\s*(?:export )?(?:const|let|var) {_NAME} ?= ?(?:async )?(?:function|\()", "function"),
)
_GO = _rules((rf"(?P<kind>func|type) (?:\([^)]*\) )?{_NAME}", None))
_RUST = _rules(
    (
        rf"\s*(?:pub(?:\([^)]*\))? )?(?:unsafe )?(?:async )?(?P<kind>fn|struct|enum|trait|mod|impl) {_NAME}",
        None,
    )
)
_CURLY = _rules(
    (
        rf"\s*(?:(?:public|private|protected|internal|static|final|abstract|sealed|partial|export) )*"
        rf"(?P<kind>class|interface|enum|record|struct|namespace|object|trait) {_NAME}",
        None,
    ),
    (rf"[A-Za-z_][\w:<>*&]*(?: [\w:<>*&]+)* [*&]?{_NAME}\([^;]*$", "function"),
)
_RUBY = _rules((rf"\s*(?P<kind>def|class|module) (?:self\.)?{_NAME}", None))
_MARKDOWN = _rules((r"(?P<kind>#{1,6}) (?P<name>.{1,200})", None))

OUTLINES: dict[str, tuple[OutlineRule, ...]] = {
    **dict.fromkeys(("py", "pyi"), _PYTHON),
    **dict.fromkeys(("js", "jsx", "mjs", "cjs", "ts", "tsx"), _SCRIPT),
    **dict.fromkeys(("c", "h", "cc", "cpp", "hpp", "java", "cs", "kt", "scala", "swift", "php"), _CURLY),
    "go": _GO, "rs": _RUST, "rb": _RUBY, "md": _MARKDOWN,
}  # fmt: skip

MAX_OUTLINED = 8 * 1024 * 1024
MAX_SYMBOLS = 1000
LONGEST = 400
"""Characters of a line that are looked at: a declaration is shorter."""


def outline(paths: Paths, place: Location) -> dict[str, Any]:
    """What `file_outline` returns: declarations by their first line, indentation telling what is inside of what."""
    path = paths.shown(place)
    rules = OUTLINES.get(place.name.rpartition(".")[2].lower())
    if rules is None:
        raise ToolError(f"{path}: there is no outline for files of this kind; read it", code="no_outline")
    with open(paths.open_file(place.folder, place.name), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_OUTLINED:
            raise ToolError(f"{path} has {size:,} bytes, the limit is {MAX_OUTLINED:,}", code="file_too_large")
        data = file.read(size)
    if b"\0" in data[:SNIFFED]:
        raise ToolError(f"{path} is binary", code="binary_file")
    symbols = list[dict[str, Any]]()
    for number, line in enumerate(data.decode(errors="replace").split("\n"), 1):
        symbol = _declared(rules, line[:LONGEST])
        if symbol is not None:
            symbols.append({"line": number, **symbol})
    return {"path": path, "symbols": symbols[:MAX_SYMBOLS], "truncated": len(symbols) > MAX_SYMBOLS}


def _declared(rules: tuple[OutlineRule, ...], line: str) -> dict[str, Any] | None:
    for pattern, kind in rules:
        found = pattern.match(line)
        if found is None:
            continue
        named = kind or found["kind"]
        if named[0] == "#":
            return {"kind": "heading", "name": found["name"].strip(), "depth": len(named) - 1}
        indent = len(line) - len(line.lstrip())
        return {"kind": named, "name": found["name"], "depth": indent // (1 if line[:1] == "\t" else 4)}
    return None
