"""The AWS envelope of an HTTP request: its signature (SigV4) and the frames of event streams. No I/O.

This module is below providers and stores, because both sign requests: to Bedrock, and to buckets of blobs.

A frame consists of its total length, the length of its headers, a CRC32 of these two numbers, the headers, the payload
and a CRC32 of all preceding bytes. Numbers are big-endian. A frame with a wrong checksum ends the stream.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

from msgspec import Struct

EMPTY_HASH = hashlib.sha256(b"").hexdigest()


class Credentials(Struct, frozen=True):
    """Keys of an account. The repr leaves them out, because logs must not contain them."""

    access_key: str
    secret_key: str
    session_token: str = ""

    def __repr__(self) -> str:
        return f"Credentials({self.access_key[:4]}…)"


class Signing(Struct, frozen=True):
    """Credentials, region, service and time of a signature. `at` is UTC, as `20260131T235959Z`."""

    credentials: Credentials
    region: str
    service: str
    at: str


def signed_headers(
    signing: Signing, method: str, url: str, headers: Mapping[str, str], payload_hash: str
) -> dict[str, str]:
    """Return the headers to add to the request, with a signature that covers them and all of `headers`."""
    credentials, parts = signing.credentials, urlsplit(url)
    added = {"x-amz-date": signing.at}
    if credentials.session_token:
        added["x-amz-security-token"] = credentials.session_token
    signed = {name.lower(): " ".join(value.split()) for name, value in {**headers, **added}.items()}
    signed["host"] = parts.netloc.rpartition("@")[2]
    names = ";".join(sorted(signed))
    canonical = "\n".join(
        [
            method,
            # Encode the encoded path again, because AWS signs the path in that form.
            quote(parts.path or "/", safe="/-_.~"),
            _canonical_query(parts.query),
            *[f"{name}:{signed[name]}" for name in sorted(signed)],
            "",
            names,
            payload_hash,
        ]
    )
    scope = f"{signing.at[:8]}/{signing.region}/{signing.service}/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = f"AWS4-HMAC-SHA256\n{signing.at}\n{scope}\n{digest}"
    key = f"AWS4{credentials.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.new(key, to_sign.encode(), "sha256").hexdigest()
    credential = f"{credentials.access_key}/{scope}"
    added["authorization"] = f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={signature}"
    return added


def _canonical_query(query: str) -> str:
    pairs = parse_qsl(query, keep_blank_values=True)
    return "&".join(sorted(f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in pairs))


# ---------------------------------------------------------------------- frames


class BadFrame(ValueError):
    """Bytes that are not an event stream."""


class Frame(NamedTuple):
    """One message of an event stream."""

    headers: dict[str, str | int | bool | bytes]
    payload: bytes


_PRELUDE = struct.Struct(">III")
MAX_FRAME = 24 * 1024 * 1024
"""The largest frame that AWS allows, in bytes."""

_SIZED = {2: ">b", 3: ">h", 4: ">i", 5: ">q", 8: ">q"}
"""Formats of the numeric header types: byte, short, integer, long, time."""


class FrameReader:
    """Decoder of one event stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def partial(self) -> bool:
        """True if the stream has ended inside a frame so far: more bytes must follow."""
        return bool(self._buffer)

    def feed(self, chunk: bytes) -> Iterable[Frame]:
        """Add bytes of the stream; return the frames that are now complete, in order.

        Raises BadFrame if a checksum or a length is wrong.
        """
        buffer = self._buffer
        buffer += chunk
        frames: list[Frame] = []
        start = 0
        while len(buffer) - start >= _PRELUDE.size:
            total, headers, crc = _PRELUDE.unpack_from(buffer, start)
            if zlib.crc32(buffer[start : start + 8]) != crc:
                raise BadFrame("the beginning of a frame does not match its checksum")
            if not 16 <= total <= MAX_FRAME or headers > total - 16:
                raise BadFrame(f"a frame cannot have {total} bytes with {headers} bytes of headers")
            if len(buffer) - start < total:
                break
            frames.append(_frame(bytes(buffer[start : start + total]), headers))
            start += total
        del buffer[:start]
        return frames


def _frame(data: bytes, headers: int) -> Frame:
    if zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "big"):
        raise BadFrame("a frame does not match its checksum")
    end = _PRELUDE.size + headers
    try:
        return Frame(_headers(data[_PRELUDE.size : end]), data[end:-4])
    except (struct.error, IndexError, UnicodeDecodeError):
        raise BadFrame("the headers of a frame cannot be read") from None


def _headers(data: bytes) -> dict[str, str | int | bool | bytes]:
    found: dict[str, str | int | bool | bytes] = {}
    at = 0
    while at < len(data):
        size = data[at]
        name = data[at + 1 : at + 1 + size].decode()
        at += 1 + size
        kind = data[at]
        at += 1
        if kind in (0, 1):
            found[name] = kind == 0
        elif kind in _SIZED:
            (found[name],) = struct.unpack_from(_SIZED[kind], data, at)
            at += struct.calcsize(_SIZED[kind])
        elif kind in (6, 7):
            (length,) = struct.unpack_from(">H", data, at)
            value = data[at + 2 : at + 2 + length]
            if len(value) != length:
                raise BadFrame("a header is longer than its frame")
            found[name] = value.decode() if kind == 7 else value
            at += 2 + length
        elif kind == 9:
            found[name] = data[at : at + 16]
            at += 16
        else:
            raise BadFrame(f"a header has the unknown type {kind}")
    return found
