"""A model's server for the workloads over HTTP, in a process of its own: `python wire_server.py` prints its port.

The first part of the path says what comes: `together` streams the deltas of one answer as fast as they go, `apart` a
delta at a time, `turn` asks for the tool and then answers. It speaks Anthropic's Messages. Standard library only.
"""

from __future__ import annotations

import json
import socketserver
import time
from collections.abc import Iterator

from workload import ANSWER, ARGS, DELTA, DELTAS, TOOL

APART = 500
"""Deltas of an answer that come one at a time."""
PAUSE = 0.001

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(name: str, **fields: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


def delta(text: str) -> bytes:
    return event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})


def answer(block: dict[str, object], deltas: list[bytes], stop: str) -> list[bytes]:
    usage = {"input_tokens": 50, "output_tokens": 10}
    begin = event("message_start", message={"model": "m", "usage": usage})
    begin += event("content_block_start", index=0, content_block=block)
    end = event("content_block_stop", index=0) + event("message_delta", delta={"stop_reason": stop}, usage=usage)
    return [begin, *deltas, end + event("message_stop")]


TEXT: dict[str, object] = {"type": "text", "text": ""}
CALL: dict[str, object] = {"type": "tool_use", "id": "toolu_1", "name": TOOL, "input": {}}
CALLED = event("content_block_delta", index=0, delta={"type": "input_json_delta", "partial_json": json.dumps(ARGS)})

LONG = answer(TEXT, [delta(DELTA)] * DELTAS, "end_turn")
SHORT = answer(TEXT, [delta(DELTA)] * APART, "end_turn")
ASK = b"".join(answer(CALL, [CALLED], "tool_use"))
SAY = b"".join(answer(TEXT, [delta(ANSWER)], "end_turn"))


def chunk(data: bytes) -> bytes:
    """One chunk of HTTP, as servers send each event."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Handler(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True

    def handle(self) -> None:
        while (asked := self._read()) is not None:
            path, body = asked
            self.wfile.write(HEAD)
            for data in self._pieces(path, body):
                self.wfile.write(data)
            self.wfile.write(b"0\r\n\r\n")

    def _read(self) -> tuple[str, bytes] | None:
        first = self.rfile.readline()
        if not first:
            return None
        size = 0
        while line := self.rfile.readline().strip():
            name, _, value = line.partition(b":")
            size = int(value) if name.lower() == b"content-length" else size
        return first.split()[1].decode(), self.rfile.read(size)

    def _pieces(self, path: str, body: bytes) -> Iterator[bytes]:
        what = path.split("/")[1]
        if what == "together":
            yield b"".join([chunk(data) for data in LONG])
        elif what == "apart":
            for data in SHORT:
                yield chunk(data)
                time.sleep(PAUSE)
        else:
            yield chunk(SAY if b"tool_result" in body.rpartition(b'"role":"user"')[2] else ASK)


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


if __name__ == "__main__":
    with Server(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
