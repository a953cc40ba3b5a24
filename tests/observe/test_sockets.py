"""Sockets of live events: whose they are, what a stranger can do there, and readers that do not read."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Agent, ModelRequest, Runtime
from perdure.errors import LiveEventsUnavailable
from perdure.model import VERSION
from perdure.model.event import Gap, TextDelta
from perdure.model.session import Offers, WorkerRow
from perdure.observe.relay import RECONNECT_SECONDS
from perdure.observe.remote import ANSWER_SECONDS
from perdure.ports.store import WorkerSocket
from perdure.stores.sqlite import SqliteStore
from perdure.testing import FunctionModel
from tests.kit import Place, crash, until
from tests.observe.test_front_ends import END, PacedModel, echo, paced, watching

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A store whose path leaves room for sockets beside it."""
    place = Place("sqlite", tmp_path_factory.mktemp("s"))
    assert len(os.fsencode(place.path)) < 60, "the folder for tests has a very long path"
    return place


async def listening(runtime: Runtime) -> tuple[WorkerRow, WorkerSocket]:
    [row] = [each for each in await runtime.store.workers() if each.id == runtime._worker.id]
    assert isinstance(runtime.store, SqliteStore)
    return row, runtime.store.find_socket(row)


# ---------------------------------------------------------------------- where


async def test_the_socket_is_beside_the_workers_files_and_its_owners_alone(short: Place) -> None:
    async with short.runtime(echo()) as runtime:
        row, where = await listening(runtime)
        assert where.path == f"{short.path}-workers/{row.id}.sock"
        assert stat.S_IMODE(os.lstat(where.path).st_mode) == 0o600
    assert os.listdir(f"{short.path}-workers") == []


async def test_a_path_that_is_too_long_is_replaced_by_a_private_folder(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 20)
    folder.mkdir()
    async with Runtime(folder / "agent.db", agents=[echo()]) as worker, Runtime(folder / "agent.db") as front:
        row, where = await listening(worker)
        assert row.offers is not None
        assert row.offers.socket == where.path
        assert len(where.path) <= 107
        assert stat.S_IMODE(os.lstat(os.path.dirname(where.path)).st_mode) == 0o700
        session = await front.session("s", agent="support")
        async with session.stream("hello") as turn:
            kinds = [type(event) async for event in turn]
        assert TextDelta in kinds
        assert Gap not in kinds
    assert not os.path.exists(os.path.dirname(where.path))


@pytest.mark.parametrize("deep", [0, 20], ids=["beside", "private"])
async def test_what_a_dead_worker_left_is_removed_by_the_next(short: Place, deep: int) -> None:
    folder = short.path.parent / ("deep" * deep)
    folder.mkdir(exist_ok=True)
    place = Place("sqlite", folder)
    dead = await place.runtime(echo()).__aenter__()
    _, where = await listening(dead)
    await crash(dead)
    assert os.path.exists(where.path)

    async with place.runtime(echo()):
        await until(lambda: not os.path.exists(where.path))
        if deep:
            assert not os.path.exists(os.path.dirname(where.path))


async def test_a_runtime_without_definitions_or_file_listens_nowhere(place: Place) -> None:
    async with place.runtime() as front:
        [row] = await front.store.workers()
        assert row.offers == Offers(version=VERSION)
    async with Runtime("memory", agents=[echo()]) as runtime:
        [row] = await runtime.store.workers()
        assert row.offers == Offers(("support",), version=VERSION)


# ---------------------------------------------------------------------- whose


async def test_a_socket_that_nothing_listens_on_is_told_from_the_store(short: Place) -> None:
    async with short.runtime(echo()) as worker, short.runtime() as front:
        worker._live_server.abandon()
        async with watching(front, "s2") as reader:
            session = await front.session("s2", agent="support")
            await session.run("hello")
            await reader.committed("s2.1")
        assert reader.kinds == ["Gap", "TurnCommitted"]
        assert isinstance(reader.seen[0], Gap)
        assert "cannot be read here" in reader.seen[0].reason
        assert "Connection refused" in reader.seen[0].reason


@ROOT_ONLY
async def test_a_socket_of_another_user_is_refused_before_anything_is_sent(short: Place) -> None:
    async with short.runtime(echo()) as worker, short.runtime() as front:
        row, where = await listening(worker)
        os.chown(where.path, 12345, 12345)
        assert isinstance(front.store, SqliteStore)
        with pytest.raises(LiveEventsUnavailable, match="belongs to user 12345") as refused:
            front.store.find_socket(row)
        assert (refused.value.worker_id, refused.value.gone) == (row.id, False)

        session = await front.session("s", agent="support")
        async with watching(front, "s") as reader:
            assert (await session.run("hello")).text == "re: hello"
            await reader.committed("s.1")
        assert reader.kinds == ["Gap", "TurnCommitted"]
        assert not worker._live_server.connections


@ROOT_ONLY
async def test_a_private_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    async with Place("sqlite", tmp_path / ("deep" * 20)).runtime(echo()) as worker:
        row, where = await listening(worker)
        assert isinstance(worker.store, SqliteStore)
        os.chmod(os.path.dirname(where.path), 0o755)
        with pytest.raises(LiveEventsUnavailable, match="open to others"):
            worker.store.find_socket(row)


@pytest.mark.parametrize(
    "name", ["/run/docker.sock", "/tmp/live.sock", "../../x.sock", "other.sock", "/tmp/perdure-x/../live.sock", "x"]
)
async def test_a_row_leads_to_no_socket_that_a_worker_would_not_make(short: Place, name: str) -> None:
    async with short.runtime(echo()) as worker:
        row, _ = await listening(worker)
        assert isinstance(worker.store, SqliteStore)
        with pytest.raises(LiveEventsUnavailable, match="no socket of a worker"):
            worker.store.find_socket(replace(row, offers=Offers(socket=name)))


@pytest.mark.parametrize("name", ["perdure-abcd1234", "mainstay-abcd1234"])
async def test_a_private_folder_of_a_worker_before_or_after_the_rename_is_known(short: Place, name: str) -> None:
    async with short.runtime(echo()) as worker:
        row, _ = await listening(worker)
        assert isinstance(worker.store, SqliteStore)
        with pytest.raises(LiveEventsUnavailable, match="No such file") as missing:
            worker.store.find_socket(replace(row, offers=Offers(socket=f"/tmp/{name}/live.sock")))
        assert missing.value.gone


async def test_a_file_or_link_in_the_place_of_a_socket_is_refused(short: Place) -> None:
    async with short.runtime(echo()) as worker:
        row, where = await listening(worker)
        assert isinstance(worker.store, SqliteStore)
        os.rename(where.path, f"{where.path}.moved")
        os.symlink(f"{where.path}.moved", where.path)
        with pytest.raises(LiveEventsUnavailable, match="is no socket"):
            worker.store.find_socket(row)
        os.unlink(where.path)
        with pytest.raises(LiveEventsUnavailable, match="No such file") as missing:
            worker.store.find_socket(row)
        assert missing.value.gone
        os.unlink(f"{where.path}.moved")


# ---------------------------------------------------------------------- what is said there


def frame(message: Any) -> bytes:
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">I", len(data)) + data


async def answer(reader: asyncio.StreamReader) -> Any:
    async with asyncio.timeout(10):
        (length,) = struct.unpack(">I", await reader.readexactly(4))
        return json.loads(await reader.readexactly(length))


def hello(runtime: Runtime, **changed: Any) -> dict[str, Any]:
    known = {"ask": "hello", "version": 1, "worker": runtime._worker.id, "store": runtime.store.identity()}
    return known | changed


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n",
        frame(b"not json"),
        frame({"ask": "nonsense"}),
        frame([]),
        frame({"ask": "ask", "number": 1, "session_id": "s"}),
        frame({"ask": "hello", "version": 99, "worker": "w", "store": ""}),
    ],
    ids=["huge", "http", "no json", "unknown", "no object", "without hello", "another version"],
)
async def test_nonsense_is_refused_and_harms_no_other_reader(short: Place, said: bytes) -> None:
    async with short.runtime(echo()) as worker, short.runtime() as front:
        _, where = await listening(worker)
        async with watching(front, "s") as good:
            reader, writer = await asyncio.open_unix_connection(where.path)
            writer.write(said)
            assert (await answer(reader))["event"] == "live_refused"
            assert await reader.read() == b""
            writer.close()
            await (await front.session("s", agent="support")).run("hello")
            await good.committed("s.1")
        assert good.kinds == ["TurnStarted", "TextDelta", "TurnCommitted"]


async def test_odd_cursors_and_sessions_are_answered(short: Place) -> None:
    async with short.runtime(echo()) as worker:
        _, where = await listening(worker)
        reader, writer = await asyncio.open_unix_connection(where.path)
        writer.write(frame(hello(worker)))
        assert (await answer(reader))["event"] == "live_welcome"
        writer.write(frame({"ask": "subscribe", "number": 1, "session_id": "s", "cursor": "nonsense"}))
        lost = await answer(reader)
        assert (lost["number"], "fell behind" in lost["lost"]) == (1, True)
        writer.write(frame({"ask": "replay", "number": 2, "session_id": "s", "cursor": "other:1:s"}))
        assert await answer(reader) == {"event": "live_replayed", "number": 2}
        writer.write(frame({"ask": "unsubscribe", "session_id": "never"}))
        writer.write(frame({"ask": "ask", "number": 3, "session_id": "s"}))
        assert await answer(reader) == {"event": "live_done", "number": 3}
        writer.close()


async def test_a_worker_that_does_not_answer_keeps_no_reader_from_the_others(short: Place) -> None:
    async with short.runtime(echo("other")) as stopped, short.runtime(echo()) as worker, short.runtime() as front:
        _, where = await listening(stopped)
        stopped._live_server.abandon()
        os.unlink(where.path)
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(where.path)
            silent.listen()
            session = await front.session("s", agent="support")
            async with asyncio.timeout(ANSWER_SECONDS), session.stream("hello") as turn:
                kinds = [type(event).__name__ async for event in turn]
        assert kinds == ["TurnStarted", "TextDelta", "TurnCommitted"]
        assert worker._live_server.connections


NESTED = b'{"event": "live_done", "number": 0, "more": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"


@pytest.mark.parametrize("said", [{"event": "of a later version"}, NESTED], ids=["unknown", "nested"])
async def test_a_worker_that_is_not_understood_is_not_asked_again_without_pause(short: Place, said: Any) -> None:
    connected: list[float] = []

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(asyncio.get_running_loop().time())
        asked = await answer(reader)
        writer.write(frame({"event": "live_welcome", "worker": asked["worker"]}))
        asked = await answer(reader)
        writer.write(frame({"event": "live_done", "number": asked["number"]}))
        writer.write(frame(said))
        await reader.read()
        writer.close()

    async with short.runtime(echo()) as worker, short.runtime() as front:
        _, where = await listening(worker)
        worker._live_server.abandon()
        os.unlink(where.path)
        async with await asyncio.start_unix_server(speak, where.path), watching(front, "s") as reader:
            await until(lambda: len(connected) >= 3)
            await (await front.session("s", agent="support")).run("hello")
            await reader.committed("s.1")
    assert connected[2] - connected[0] >= RECONNECT_SECONDS
    assert reader.kinds == ["Gap", "TurnCommitted"]


# ---------------------------------------------------------------------- readers that do not read


async def many(request: ModelRequest) -> Any:
    for n in range(10_000):
        yield f"{n:06d} " * 10
        await asyncio.sleep(0)


async def test_a_reader_that_never_reads_slows_no_turn_and_holds_no_memory(short: Place) -> None:
    async with short.runtime(Agent(FunctionModel(many), name="support")) as worker:
        _, where = await listening(worker)
        deaf = socket.socket(socket.AF_UNIX)
        deaf.connect(where.path)
        deaf.sendall(frame(hello(worker)))
        deaf.sendall(frame({"ask": "subscribe", "number": 1, "session_id": "s"}))
        assert worker._parts is not None
        channel = worker._parts.feed.channel("s")
        await until(lambda: channel.subscribers)

        await (await worker.session("s", agent="support")).run("go")

        [connection] = worker._live_server.connections
        assert connection._full
        assert connection._transport is not None
        assert connection._transport.get_write_buffer_size() < 1_000_000
        assert len(channel._events) <= 2048
        # What it did not read is a gap when it begins to.
        reader, writer = await asyncio.open_unix_connection(sock=deaf)
        kinds = [(await answer(reader))["event"], (await answer(reader))["event"]]
        while (event := await answer(reader))["event"] != "turn_committed":
            kinds.append(event["event"])
        assert kinds[:3] == ["live_welcome", "live_done", "turn_started"]
        assert kinds.count("gap") == 1
        writer.close()


async def test_a_reader_that_asks_and_does_not_read_is_not_listened_to(short: Place) -> None:
    async with short.runtime(echo()) as worker:
        _, where = await listening(worker)
        deaf = socket.socket(socket.AF_UNIX)
        deaf.connect(where.path)
        deaf.sendall(frame(hello(worker)))
        deaf.setblocking(False)
        one, sent = frame({"ask": "ask", "number": 1, "session_id": "s"}), 0
        await until(lambda: worker._live_server.connections)
        [connection] = worker._live_server.connections

        async def is_stopped() -> bool:
            nonlocal sent
            try:
                while True:
                    sent += deaf.send((one * 1000)[sent % len(one) :])
                    await asyncio.sleep(0)
            except BlockingIOError:
                return connection._full

        await until(is_stopped)
        assert connection._transport is not None
        assert connection._transport.get_write_buffer_size() < 10_000_000
        deaf.close()
        await until(lambda: not worker._live_server.connections)


async def test_readers_of_many_connections_see_the_same(short: Place) -> None:
    model = PacedModel()
    async with short.runtime(paced(model)) as worker:
        _, where = await listening(worker)
        streams = []
        for _ in range(200):
            reader, writer = await asyncio.open_unix_connection(where.path)
            writer.write(frame(hello(worker)) + frame({"ask": "subscribe", "number": 1, "session_id": "s"}))
            assert [(await answer(reader))["event"] for _ in range(2)] == ["live_welcome", "live_done"]
            streams.append((reader, writer))
        running = asyncio.create_task((await worker.session("s", agent="support")).run("go"))
        model.say("one ", "two ", "three", END)
        await running
        for reader, writer in streams:
            text = ""
            while (event := await answer(reader))["event"] != "turn_committed":
                text += event.get("text", "")
            assert text == "one two three"
            writer.close()
        await until(lambda: not worker._live_server.connections)


async def test_a_worker_that_is_left_says_so_after_its_last_event(short: Place) -> None:
    async with short.runtime(echo()) as worker:
        _, where = await listening(worker)
        reader, writer = await asyncio.open_unix_connection(where.path)
        writer.write(frame(hello(worker)) + frame({"ask": "subscribe", "number": 1, "session_id": "s"}))
        assert [(await answer(reader))["event"] for _ in range(2)] == ["live_welcome", "live_done"]
        await (await worker.session("s")).run("hello")
    events = [(await answer(reader))["event"] for _ in range(4)]
    assert events == ["turn_started", "text_delta", "turn_committed", "live_bye"]
    assert await reader.read() == b""
    writer.close()
