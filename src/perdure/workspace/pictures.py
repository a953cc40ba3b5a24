"""Pictures and PDFs by their bytes: what they are, how large, and whether they are whole.

A model is shown a picture as it is, and a service refuses one that it cannot read: then it would refuse the whole
conversation, now and in every later turn. So a file that only begins like a picture is none. Nothing is decoded: a
small file which unfolds into gigabytes costs nothing here, and what it says about its size is enough to refuse it.
"""

from __future__ import annotations

import struct

MAX_SIDE = 8000
"""Pixels of a side that services accept."""

PICTURES = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"))
PNG_END = b"IEND\xaeB`\x82"
NO_SIZE = frozenset({0xC4, 0xC8, 0xCC})
"""Markers of a JPEG between those that tell its size and do not."""


def picture_type(head: bytes) -> str | None:
    """The media type of a picture by its first bytes, and of a PDF: what a model can be shown as it is."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    if head[:5] == b"%PDF-":
        return "application/pdf"
    return next((kind for magic, kind in PICTURES if head.startswith(magic)), None)


def picture_fault(data: bytes, kind: str) -> str:
    """Why a picture cannot be shown; "" where it can."""
    try:
        whole, width, height = READERS[kind](data)
    except (struct.error, IndexError):
        whole, width, height = False, 0, 0
    if not whole:
        return "it begins like one and is cut or damaged"
    if kind == "application/pdf":
        return ""
    if not width or not height:
        return "it has no size"
    if width > MAX_SIDE or height > MAX_SIDE:
        return f"it has {width:,} × {height:,} pixels, and {MAX_SIDE:,} on a side are shown at most"
    return ""


def _png(data: bytes) -> tuple[bool, int, int]:
    width, height = struct.unpack_from(">II", data, 16)
    return data[12:16] == b"IHDR" and b"IDAT" in data and data.rfind(PNG_END) > 0, width, height


def _gif(data: bytes) -> tuple[bool, int, int]:
    width, height = struct.unpack_from("<HH", data, 6)
    return data.rstrip(b"\0").endswith(b";"), width, height


def _jpeg(data: bytes) -> tuple[bool, int, int]:
    at, whole = 2, b"\xff\xd9" in data
    while data[at] == 0xFF:
        marker, length = data[at + 1], struct.unpack_from(">H", data, at + 2)[0]
        if 0xC0 <= marker <= 0xCF and marker not in NO_SIZE:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return whole, width, height
        at += 1 if marker == 0xFF else 2 + length  # a marker may be padded
    return False, 0, 0


def _webp(data: bytes) -> tuple[bool, int, int]:
    whole, form = struct.unpack_from("<I", data, 4)[0] + 8 <= len(data), data[12:16]
    if form == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
    elif form == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    else:
        width, height = (each & 0x3FFF for each in struct.unpack_from("<HH", data, 26))
    return whole and form in (b"VP8X", b"VP8L", b"VP8 "), width, height


def _pdf(data: bytes) -> tuple[bool, int, int]:
    return b"%%EOF" in data[-2048:], 0, 0


READERS = {"image/png": _png, "image/gif": _gif, "image/jpeg": _jpeg, "image/webp": _webp, "application/pdf": _pdf}
