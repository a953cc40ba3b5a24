"""Pictures, documents and sound in inputs and in results of tools: references on disk, bytes beside them."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Document, FileRef, Image, Message, ModelRequest, Runtime, ToolCall, tool
from perdure.builtin import Redaction
from perdure.errors import InvalidInput
from perdure.model.message import Inline, Local, Stored, Text, Url
from perdure.model.outcome import Finished, ProviderFailed
from perdure.model.tool import Failed, Ok
from perdure.providers.registry import provider
from perdure.testing import FunctionModel
from perdure.testing.model_server import ModelServer
from tests.kit import Place
from tests.providers.wire import ANSWERS

PNG = b"\x89PNG and so on"
DIGEST = hashlib.sha256(PNG).hexdigest()
NUMBER: Any = 5
TEXT: Any = "x.png"
"""What a type checker would refuse in the place of something else."""
SAVED = Image(Stored(DIGEST, len(PNG)), "image/png", "x.png")


async def read(request: ModelRequest, picture: Image) -> bytes:
    assert request.open_file is not None
    assert isinstance(picture.source, Stored)
    return b"".join([piece async for piece in request.open_file(picture.source)])


async def seeing(request: ModelRequest) -> str:
    """Says what bytes it was shown, in all messages."""
    pictures = [part for message in request.messages for part in message.parts if isinstance(part, Image)]
    return "; ".join([str(await read(request, each)) for each in pictures])


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "x.png"
    path.write_bytes(PNG)
    return path


async def test_a_model_is_shown_a_picture_in_this_turn_and_in_later_ones(place: Place, picture: Path) -> None:
    async with place.runtime(Agent(FunctionModel(seeing))) as runtime:
        session = await runtime.session("chat")
        first = await session.run(["What is this?", Image.file(picture)])
    picture.unlink()
    async with place.runtime(Agent(FunctionModel(seeing))) as runtime:
        session = await runtime.session("chat")
        second = await session.run("And now?")
        history = await session.history()

    assert first.text == second.text == str(PNG)
    assert history[0] == Message("user", (Text("What is this?"), SAVED))


async def test_records_hold_no_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 40
    async with Runtime(tmp_path / "a.db", agents=[Agent(FunctionModel(seeing))]) as runtime:
        await (await runtime.session("chat")).run([Image.from_bytes(data, "image/png")])

    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert files
    for path in files:
        assert data[:512] not in path.read_bytes()
        assert base64.b64encode(data)[:512] not in path.read_bytes()


async def test_the_same_bytes_are_kept_once(place: Place, picture: Path) -> None:
    async with place.runtime(Agent(FunctionModel(seeing))) as runtime:
        session = await runtime.session("chat")
        result = await session.run([Image.file(picture), Image.from_bytes(PNG, "image/png", "y.png")])
        swept = await runtime.store.sweep(0)

    assert result.text == f"{PNG!r}; {PNG!r}"
    assert swept == 0, "what a record refers to stays"


async def test_the_same_key_is_the_same_turn_wherever_the_bytes_come_from(place: Place, picture: Path) -> None:
    async with place.runtime(Agent(FunctionModel(seeing))) as runtime:
        session = await runtime.session("chat")
        first = await session.run([Image.file(picture)], key="k")
        again = await session.run([Image.from_bytes(PNG, "image/png", "x.png")], key="k")

    assert first.turn_id == again.turn_id


@pytest.mark.parametrize(
    "said",
    [
        [Image.file("/no/such/file.png")],
        [Image.from_bytes(b"", "image/png")],
        [],
        ["text", 5],
        [ToolCall("c", "x")],
        [Image(Stored("no digest", 5), "image/png")],
        [Image(Stored("0" * 64, 5), "image/png")],
        [Image(NUMBER)],
        [Image(TEXT)],
        [Image(Stored(NUMBER, TEXT))],
        [Image(Stored(DIGEST, -1))],
        [Image(Url(NUMBER))],
        [Image(Local(NUMBER))],
        [Image(Inline(TEXT))],
    ],
)
async def test_what_cannot_be_said_is_refused_and_nothing_is_written(place: Place, said: Any) -> None:
    async with place.runtime(Agent()) as runtime:
        session = await runtime.session("chat")
        with pytest.raises(InvalidInput):
            await session.run(said)
        assert await runtime.sessions.list() == []


def shows(value: Any) -> Agent[str]:
    @tool
    def show() -> Any:
        """Show something."""
        return value

    async def model(request: ModelRequest) -> Any:
        last = request.messages[-1]
        if last.role != "tool":
            return [ToolCall("c1", "show")]
        [result] = last.tool_results
        return "; ".join([str(await read(request, each)) for each in result.files if isinstance(each, Image)])

    return Agent(FunctionModel(model), tools=[show])


@pytest.mark.parametrize(
    "make",
    [
        lambda picture: picture,
        lambda picture: ["see:", picture],
        lambda picture: {"text": "see", "picture": picture},
    ],
    ids=["alone", "in a list", "in a dict"],
)
async def test_a_tool_may_show_a_picture(place: Place, picture: Path, make: Any) -> None:
    async with place.runtime(shows(make(Image.file(picture)))) as runtime:
        session = await runtime.session("chat")
        result = await session.run("go")
        history = await session.history()
        swept = await runtime.store.sweep(0)

    assert result.text == str(PNG)
    [call] = result.tool_calls
    assert isinstance(call.outcome, Ok)
    assert call.outcome.files == (SAVED,)
    assert history[2].tool_results[0].files == (SAVED,)
    assert swept == 0


async def test_addresses_and_files_of_providers_pass_as_they_are(place: Place) -> None:
    given = [Document.url("https://example.com/a.pdf"), FileRef("openai", "file-1")]
    async with place.runtime(shows(given)) as runtime:
        result = await (await runtime.session("chat")).run("go")

    [call] = result.tool_calls
    assert isinstance(call.outcome, Ok)
    assert call.outcome.files == tuple(given)


async def test_a_file_that_a_tool_cannot_show_is_told_to_the_model(place: Place) -> None:
    async with place.runtime(shows(Image.file("/no/such/file.png"))) as runtime:
        result = await (await runtime.session("chat")).run("go")

    [call] = result.tool_calls
    assert isinstance(call.outcome, Failed)
    assert call.outcome.code == "invalid_output"
    assert "/no/such/file.png" in call.outcome.message


@pytest.mark.parametrize(
    "shown",
    [
        Image(TEXT),
        Image(NUMBER),
        Image(Stored("x", -1)),
        FileRef("anthropic", NUMBER),
    ],
)
async def test_a_tool_that_shows_what_is_no_file_leaves_a_session_that_can_be_read(place: Place, shown: Any) -> None:
    async with place.runtime(shows(shown)) as runtime:
        result = await (await runtime.session("chat")).run("Show it.")
    async with place.runtime(shows(shown)) as runtime:
        again = await (await runtime.session("chat")).run("And now?")

    assert isinstance(result.tool_calls[0].outcome, Failed)
    assert isinstance(again.outcome, Finished)


async def test_what_is_no_file_is_no_trouble_of_the_store(place: Place, tmp_path: Path) -> None:
    """A pipe would be waited for without end, a device never ends, and one file cannot be read at all."""
    os.mkfifo(tmp_path / "pipe")
    paths = [str(tmp_path / "pipe"), str(tmp_path), "/dev/zero", "/proc/self/mem", "a\0b"]
    for number, path in enumerate(paths):
        async with place.runtime(shows(Image.file(path, "image/png"))) as runtime:
            session = await runtime.session(f"chat-{number}")
            with pytest.raises(InvalidInput):
                await session.run([Image.file(path, "image/png")])
            [call] = (await session.run("go")).tool_calls
        assert isinstance(call.outcome, Failed), path
        assert call.outcome.code == "invalid_output", path


async def test_a_file_too_deep_in_a_value_is_refused_and_not_kept_in_the_record(place: Place) -> None:
    async with place.runtime(shows({"a": [{"b": Image.from_bytes(PNG, "image/png")}]})) as runtime:
        [call] = (await (await runtime.session("chat")).run("go")).tool_calls

    assert isinstance(call.outcome, Failed)
    assert "too deep" in call.outcome.message


@pytest.mark.parametrize(("binary", "left"), [("pass", (SAVED,)), ("withhold", ())])
async def test_redaction_passes_or_withholds_pictures_as_it_is_told(
    picture: Path, binary: Any, left: tuple[Image, ...]
) -> None:
    plain = shows(Image.file(picture))
    agent = Agent(plain.model, tools=plain.tools, plugins=[Redaction(binary=binary)])
    async with Runtime("memory", agents=[agent]) as runtime:
        result = await (await runtime.session("chat")).run("go")

    [call] = result.tool_calls
    assert isinstance(call.outcome, Ok)
    assert call.outcome.files == left


async def test_a_fork_sees_the_picture_after_its_source_is_gone(place: Place, picture: Path) -> None:
    async with place.runtime(Agent(FunctionModel(seeing))) as runtime:
        session = await runtime.session("chat")
        await session.run([Image.file(picture)])
        branch = await session.fork()
        await runtime.sessions.delete("chat")
        await runtime.store.sweep(0)
        result = await branch.run("What was it?")

    assert result.text == str(PNG)


# ---------------------------------------------------------------------- bytes that are not there any more


def lose(folder: Path, data: bytes, how: str) -> None:
    """Take the blob of these bytes away, or put others in its place."""
    digest = hashlib.sha256(data).hexdigest()
    [path] = [each for each in folder.rglob(digest[2:]) if each.is_file()]
    path.chmod(0o600)
    path.unlink() if how == "missing" else path.write_bytes(b"others" * 9)


@tool
def photograph() -> Image:
    """Take a picture."""
    return Image.from_bytes(b"by a tool", "image/png", "t.png")


async def looking(request: ModelRequest) -> str | list[ToolCall]:
    """Reads every file that it is shown, and repeats what it is told."""
    last = request.messages[-1]
    if last.text == "photograph":
        return [ToolCall("c", "photograph")]
    told = []
    for message in request.messages:
        files = [file for result in message.tool_results for file in result.files]
        for part in [*message.parts, *files]:
            if isinstance(part, Image):
                await read(request, part)
                told.append(part.name)
        told += [part.text for part in message.parts if isinstance(part, Text) and part.text.startswith("[Image")]
        told += [
            line for result in message.tool_results for line in str(result.content).splitlines() if "not shown" in line
        ]
    return "; ".join(told)


@pytest.mark.parametrize("how", ["missing", "damaged"])
async def test_a_session_goes_on_without_the_bytes_of_files_said_before(tmp_path: Path, how: str) -> None:
    agent = Agent(FunctionModel(looking), tools=[photograph])
    async with Runtime(tmp_path / "a.db", agents=[agent]) as runtime:
        session = await runtime.session("chat")
        pictures = [Image.from_bytes(f"picture {n}".encode(), "image/png", f"{n}.png") for n in range(6)]
        await session.run(["these", *pictures])
        await session.run("photograph")
        before = (await session.run("and now?")).text
    for number in range(5):
        lose(tmp_path, f"picture {number}".encode(), how)
    lose(tmp_path, b"by a tool", how)
    async with Runtime(tmp_path / "a.db", agents=[agent]) as runtime:
        session = await runtime.session("chat")
        results = [await session.run(word) for word in ("still there?", "sure?")]
        history = await session.history()

    assert before == "0.png; 1.png; 2.png; 3.png; 4.png; 5.png; t.png"
    for result in results:
        assert "[Image '0.png' is not shown: its bytes are missing or damaged in the store]" in result.text
        assert "[Image 't.png' is not shown" in result.text
        assert "5.png;" in result.text
        assert [issue.code for issue in result.issues] == ["file_unreadable"]
        assert hashlib.sha256(b"picture 0").hexdigest() in result.issues[0].message
        assert (result.usage.calls, result.usage.unknown) == (1, 1), "the model does not tell, and was answered once"
    assert len([part for part in history[0].parts if isinstance(part, Image)]) == 6, "what is stored does not change"


async def test_a_turn_whose_own_file_is_lost_fails_with_its_own_code_and_the_next_one_goes_on(tmp_path: Path) -> None:
    lost = False

    async def losing(request: ModelRequest) -> Any:
        nonlocal lost
        if not lost:
            lost = True
            lose(tmp_path, PNG, "missing")
        return await looking(request)

    async with Runtime(tmp_path / "a.db", agents=[Agent(FunctionModel(losing))]) as runtime:
        session = await runtime.session("chat")
        first = await session.run(["what is this?", Image.from_bytes(PNG, "image/png", "x.png")])
        second = await session.run("go on")

    assert isinstance(first.outcome, ProviderFailed)
    assert (first.outcome.code, first.outcome.attempts) == ("file_unreadable", 1)
    assert second.text == "[Image 'x.png' is not shown: its bytes are missing or damaged in the store]"


@pytest.mark.parametrize("how", ["missing", "damaged"])
async def test_a_request_over_http_is_sent_anew_without_a_lost_file(tmp_path: Path, how: str) -> None:
    reply = ANSWERS["anthropic"]["text"].reply
    data = os.urandom(300_000)
    async with ModelServer(lambda asked: reply) as server:
        agent = Agent(provider("anthropic:x", base_url=server.url, key="k"))
        async with Runtime(tmp_path / "a.db", agents=[agent]) as runtime:
            session = await runtime.session("chat")
            await session.run(["what is this?", Image.from_bytes(data, "image/png", "x.png")])
            lose(tmp_path, data, how)
            result = await session.run("go on")

    assert isinstance(result.outcome, Finished)
    assert [issue.code for issue in result.issues] == ["file_unreadable"]
    assert "is not shown" in server.asked[-1].body.decode()
