"""Server-sent events: what servers write between the events, and how they cut them."""

from __future__ import annotations

import pytest

from perdure.errors import ProviderError
from perdure.providers.sse import SseReader

CASES = {
    "a name and data": (b'event: ping\ndata: {"a":1}\n\n', [("ping", b'{"a":1}')]),
    "data without a name": (b"data: x\n\n", [("", b"x")]),
    "a name without data is no event": (b"event: ping\n\ndata: x\n\n", [("", b"x")]),
    "a name is of one event": (b"event: ping\ndata: x\n\ndata: y\n\n", [("ping", b"x"), ("", b"y")]),
    "the last name counts": (b"event: a\nevent: b\ndata: x\n\n", [("b", b"x")]),
    "a name after its data": (b"data: x\nevent: ping\n\n", [("ping", b"x")]),
    "lines of data are joined": (b"data: {\ndata: }\n\n", [("", b"{\n}")]),
    "an empty line of data": (b"data: {\ndata:\ndata: }\n\n", [("", b"{\n\n}")]),
    "a field without a colon": (b"data\n\n", [("", b"")]),
    "no space after the colon": (b"event:ping\ndata:x\n\n", [("ping", b"x")]),
    "one space is taken away": (b"data:  x\n\n", [("", b" x")]),
    "an escaped line feed": (b'data: {"a":"x\\n\\ny"}\n\n', [("", b'{"a":"x\\n\\ny"}')]),
    "separators that are no line ends": (
        "data: a\u2028b\u2029c\x85d\x0be\n\n".encode(),
        [("", "a\u2028b\u2029c\x85d\x0be".encode())],
    ),
    "characters of several bytes": ("data: Grüße 😀 известни\n\n".encode(), [("", "Grüße 😀 известни".encode())]),
    "CR LF": (b"event: ping\r\ndata: x\r\n\r\n", [("ping", b"x")]),
    "CR alone": (b"event: ping\rdata: x\r\rdata: y\r\r", [("ping", b"x"), ("", b"y")]),
    "ends of lines that differ": (b"data: x\r\n\ndata: y\n\r\n", [("", b"x"), ("", b"y")]),
    "a byte order mark": (b"\xef\xbb\xbfdata: x\n\n", [("", b"x")]),
    "comments": (b": ping\n\n:\ndata: x\n: in between\ndata: y\n\n", [("", b"x\ny")]),
    "fields that nobody needs": (b"id: 1\nretry: 10\nfoo: bar\ndata: x\n\n", [("", b"x")]),
    "many blank lines": (b"\n\n\ndata: x\n\n\n\n", [("", b"x")]),
    "the end of the body ends no event": (b"data: x\n\ndata: y\n", [("", b"x")]),
}


@pytest.mark.parametrize("case", CASES)
def test_events_are_read_by_the_rules_however_they_are_cut(case: str) -> None:
    body, expected = CASES[case]

    assert SseReader().feed(body) == expected
    for at in range(len(body) + 1):
        reader = SseReader()
        assert [*reader.feed(body[:at]), *reader.feed(body[at:])] == expected, at
    reader = SseReader()
    assert [event for byte in body for event in reader.feed(bytes([byte]))] == expected


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 60 + b"\n", b"x" * 60, b"data: x\n" * 8])
def test_an_event_without_end_is_cut_off(piece: bytes) -> None:
    reader = SseReader(limit=500)

    with pytest.raises(ProviderError) as caught:
        [reader.feed(piece) for _ in range(20)]

    assert caught.value.code == "provider_nonsense"


def test_comments_for_ever_are_no_event_and_cost_nothing() -> None:
    reader = SseReader(limit=500)

    assert [reader.feed(b": keep-alive\n\n") for _ in range(1_000)] == [[]] * 1_000
    assert reader.feed(b"data: x\n\n") == [("", b"x")]
