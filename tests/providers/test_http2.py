"""HTTP/2, where it is asked for: against a server that speaks nothing else."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset

from perdure import Agent, Runtime
from perdure.providers.registry import provider


class Http2Server:
    """Answers every request like Chat Completions: with "Hello" at once, and with the rest when it is let go on."""

    def __init__(self) -> None:
        self.asked: list[dict[str, object]] = []
        self.reset: list[int] = []
        self.rest = asyncio.Event()
        self._bodies: dict[int, bytes] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = H2Connection(H2Configuration(client_side=False))
        connection.initiate_connection()
        writer.write(connection.data_to_send())
        answers = set()
        while data := await reader.read(65536):
            for event in connection.receive_data(data):
                match event:
                    case RequestReceived(stream_id=number):
                        self._bodies[number] = b""
                    case DataReceived(stream_id=number):
                        self._bodies[number] += event.data
                        connection.acknowledge_received_data(event.flow_controlled_length, number)
                    case StreamEnded(stream_id=number):
                        self.asked.append(json.loads(self._bodies[number]))
                        answers.add(asyncio.ensure_future(self._answer(connection, writer, number)))
                    case StreamReset(stream_id=number):
                        self.reset.append(number)
                    case _:
                        pass
            writer.write(connection.data_to_send())
        for answer in answers:
            answer.cancel()
        writer.close()

    async def _answer(self, connection: H2Connection, writer: asyncio.StreamWriter, number: int) -> None:
        connection.send_headers(number, [(":status", "200"), ("content-type", "text/event-stream")])
        connection.send_data(number, sse({"choices": [{"index": 0, "delta": {"content": "Hello"}}]}))
        writer.write(connection.data_to_send())
        await self.rest.wait()
        if number not in self.reset:
            end = sse({"choices": [{"index": 0, "delta": {"content": "!"}, "finish_reason": "stop"}]})
            connection.send_data(number, end + b"data: [DONE]\n\n", end_stream=True)
            writer.write(connection.data_to_send())


def sse(body: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


@asynccontextmanager
async def served(authority: Path) -> AsyncGenerator[tuple[Http2Server, str], None]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "cert.pem", authority / "key.pem")
    context.set_alpn_protocols(["h2"])
    server = Http2Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    async with listening:
        yield server, f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"


async def test_a_stream_over_http2_is_read_beside_one_that_is_cancelled(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))
    async with served(authority) as (server, url):
        model = provider("openai-chat:m", base_url=url, key="k", http2=True)
        async with Runtime("memory", agents=[Agent(model)]) as runtime:
            stays, goes = await runtime.session("stays"), await runtime.session("goes")
            staying = asyncio.create_task(stays.run("Hi"))
            async with goes.stream("Hi") as turn:
                await anext(each async for each in turn if type(each).__name__ == "TextDelta")
                await goes.cancel("enough")
                cancelled = await turn.result()
            server.rest.set()
            result = await staying

    assert result.text == "Hello!"
    assert type(cancelled.outcome).__name__ == "Cancelled"
    assert len(server.asked) == 2
