"""Whatever tools, processes and people outside give passes the filters of a session before it is stored or shown."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Document, Image, ModelRequest, Plugin, Runtime, ToolCall, ToolContext, tool
from perdure.builtin import Redaction
from perdure.errors import InvalidDefinition
from perdure.model.codec import MAX_VALUE
from perdure.model.event import ToolProgress
from perdure.model.message import Stored
from perdure.model.plugin import ShortCircuit
from perdure.model.tool import Denied, Failed, Ok, PreparedCall, ToolOutcome, ToolSpec
from perdure.plugins import FilterContext, StreamContext, ToolCallContext, ToolEndContext
from perdure.plugins.registry import PluginSet
from perdure.processes.function.context import ProcessContext
from perdure.processes.function.engine import process
from perdure.testing import FunctionModel, ScriptedModel
from tests.kit import SOON, Place
from tests.plugins.made import having

SECRET = "ghp_" + "abcdefghijklmnopqrstuvwxyz0123456789"  # was never valid
HIDDEN = "[redacted:api_key]"
BINARY = b"\xff\xfe" + SECRET.encode()


def on_disk(place: Place) -> list[str]:
    """Files that the secret is in."""
    return [
        each.name for each in place.path.parent.rglob("*") if each.is_file() and SECRET.encode() in each.read_bytes()
    ]


def calling(name: str, **args: Any) -> FunctionModel:
    """A model that calls one tool for each thing a person says, and then is done."""

    def answer(request: ModelRequest) -> Any:
        last = request.messages[-1]
        said = last.role == "user" and not last.text.startswith("[")
        return [ToolCall(name=name, args=args)] if said else "done"

    return FunctionModel(answer)


class Shorten(Plugin):
    """Cuts what tools return."""

    id = "shorten"

    def after_tool_call(self, ctx: ToolEndContext) -> ShortCircuit | None:
        return ShortCircuit(Ok(str(ctx.outcome.value)[:100])) if isinstance(ctx.outcome, Ok) else None


class Discreet(Plugin):
    """A filter of what is beside outcomes only."""

    id = "discreet"
    is_filter = True

    def filter_value(self, ctx: FilterContext, value: Any) -> Any:
        return value.replace(SECRET, HIDDEN) if isinstance(value, str) else value


class Failing(Plugin):
    """A filter that fails on whatever it is to look at, with the value in its words."""

    id = "failing"
    is_filter = True

    def filter_value(self, ctx: FilterContext, value: Any) -> Any:
        raise ValueError(f"cannot read {value}")


@tool
async def fetch() -> str:
    """Fetch something."""
    return f"the token is {SECRET}"


# ---------------------------------------------------------------------- outcomes


@pytest.mark.parametrize("plugins", [(Shorten, Redaction), (Redaction, Shorten)], ids=["last", "first"])
async def test_a_result_that_another_plugin_replaced_is_redacted_wherever_redaction_stands(
    file: Place, plugins: Sequence[Callable[[], Plugin]]
) -> None:
    agent = Agent(calling("fetch"), tools=[fetch], plugins=[make() for make in plugins])
    async with file.runtime(agent) as runtime:
        result = await (await runtime.session("chat")).run("go")

    assert result.tool_calls[0].outcome == Ok(f"the token is {HIDDEN}")
    assert on_disk(file) == []


class Cached(Plugin):
    id = "cached"

    def __init__(self, outcome: ToolOutcome) -> None:
        self.outcome = outcome

    def before_tool_call(self, ctx: ToolCallContext) -> ShortCircuit:
        return ShortCircuit(self.outcome)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (Ok([SECRET]), Ok([HIDDEN])),
        (Denied(f"not with {SECRET}"), Denied(f"not with {HIDDEN}")),
        (Failed("cache", SECRET), Failed("cache", HIDDEN)),
    ],
)
async def test_what_a_plugin_answers_in_place_of_a_call_is_redacted(
    file: Place, given: ToolOutcome, kept: ToolOutcome
) -> None:
    agent = Agent(calling("fetch"), tools=[fetch], plugins=[Redaction(), Cached(given)])
    async with file.runtime(agent) as runtime:
        result = await (await runtime.session("chat")).run("go")

    assert result.tool_calls[0].outcome == kept
    assert on_disk(file) == []


class Refusing:
    """A provider whose preparation ends the call."""

    def specs(self) -> Sequence[ToolSpec]:
        return [ToolSpec("fetch")]

    async def prepare(self, call: PreparedCall, ctx: Any) -> PreparedCall | ToolOutcome:
        return Failed("no_access", f"no access with {SECRET}")

    async def execute(self, call: PreparedCall, ctx: Any) -> Any:
        raise AssertionError("never")


async def test_what_a_provider_says_in_preparation_is_redacted(file: Place) -> None:
    agent = Agent(calling("fetch"), tools=[Refusing()], plugins=[Redaction()])
    async with file.runtime(agent) as runtime:
        result = await (await runtime.session("chat")).run("go")

    assert result.tool_calls[0].outcome == Failed("no_access", f"no access with {HIDDEN}")
    assert on_disk(file) == []


async def test_what_a_broken_plugin_raised_is_redacted(file: Place) -> None:
    def after(ctx: ToolEndContext) -> None:
        raise ValueError(f"cannot read {ctx.outcome}")

    agent = Agent(calling("fetch"), tools=[fetch], plugins=[Redaction(), having("after_tool_call", after, "broken")])
    async with file.runtime(agent) as runtime:
        result = await (await runtime.session("chat")).run("go")

    outcome = result.tool_calls[0].outcome
    assert isinstance(outcome, Failed)
    assert "plugin 'broken'" in outcome.message
    assert HIDDEN in outcome.message
    assert on_disk(file) == []


async def test_what_a_broken_projection_raised_is_redacted_in_the_issue(file: Place) -> None:
    def project(ctx: ToolEndContext) -> None:
        raise ValueError(f"cannot read {SECRET}")

    plugins = [having("project_result", project, "broken"), Redaction()]
    async with file.runtime(Agent(calling("fetch"), tools=[fetch], plugins=plugins)) as runtime:
        result = await (await runtime.session("chat")).run("go")

    assert [issue.message for issue in result.issues] == [
        f"plugin 'broken': project_result: ValueError: cannot read {HIDDEN}"
    ]
    assert on_disk(file) == []


async def test_a_secret_that_a_projection_brings_back_is_redacted(file: Place) -> None:
    plugins = [having("project_result", lambda ctx: {"shown": SECRET}, "short"), Redaction()]
    async with file.runtime(Agent(calling("fetch"), tools=[fetch], plugins=plugins)) as runtime:
        result = await (await runtime.session("chat")).run("go")

    assert result.new_messages[2].tool_results[0].content == {"shown": HIDDEN}
    assert on_disk(file) == []


async def test_text_that_a_later_plugin_brings_in_is_redacted(file: Place) -> None:
    class Decoding(Plugin):
        id = "decoding"

        def transform_text(self, ctx: StreamContext, text: str) -> str:
            return text.replace("THE_TOKEN", SECRET)

    agent = Agent(ScriptedModel(["It is THE_TOKEN here."]), plugins=[Redaction(), Decoding()])
    async with file.runtime(agent) as runtime:
        result = await (await runtime.session("chat")).run("go")

    assert result.text == f"It is {HIDDEN} here."
    assert on_disk(file) == []


# ---------------------------------------------------------------------- what people outside say


async def written(runtime: Runtime) -> bytes:
    """The records of the session, as they are stored."""
    row = await runtime.store.session("chat")
    assert row is not None
    return b"".join([body for _, _, body in await runtime.store.nodes(row.sid, 1, row.next)])


async def test_the_reason_of_a_rejection_is_recorded_redacted(place: Place) -> None:
    @tool(approval="ask")
    async def guarded() -> str:
        """Do something dangerous."""
        return "done"

    async with place.runtime(Agent(calling("guarded"), tools=[guarded], plugins=[Redaction()])) as runtime:
        session = await runtime.session("chat")
        result = await session.run("go")
        await session.reject("chat.1.1.0", f"{SECRET} is for others")
        result = await asyncio.wait_for(session.result(result.turn_id), SOON)
        records = await written(runtime)

    assert result.tool_calls[0].outcome == Denied(f"{HIDDEN} is for others", "host")
    assert SECRET.encode() not in records


@pytest.mark.parametrize("error", [None, f"refused: {SECRET}"])
async def test_what_is_said_about_a_call_whose_tool_is_gone_is_redacted(place: Place, error: str | None) -> None:
    keys = list[str]()

    @tool(deferred=True)
    async def order(ctx: ToolContext) -> None:
        keys.append(ctx.defer())

    async with place.runtime(Agent(calling("order"), tools=[order], plugins=[Redaction()])) as runtime:
        first = await (await runtime.session("chat")).run("go")
    async with place.runtime(Agent(calling("order"), plugins=[Redaction(), Shorten()])) as runtime:
        session = await runtime.session("chat")
        await runtime.resolve(keys[0], SECRET, error=error)
        result = await asyncio.wait_for(session.result(first.turn_id), SOON)
        records = await written(runtime)

    kept = Ok(HIDDEN) if error is None else Failed("settled_as_failed", f"refused: {HIDDEN}", HIDDEN)
    assert result.tool_calls[0].outcome == kept
    assert SECRET.encode() not in records


async def test_what_is_said_about_an_unknown_outcome_passes_the_plugins(place: Place) -> None:
    begun = asyncio.Event()

    @tool
    async def pay() -> str:
        """Pay."""
        begun.set()
        await asyncio.Event().wait()
        return ""

    shown = list[ModelRequest]()

    def answer(request: ModelRequest) -> Any:
        shown.append(request)
        return "done" if len(request.messages) > 1 else [ToolCall(name="pay")]

    plugins = [Redaction(), Shorten()]
    async with place.runtime(Agent(FunctionModel(answer), tools=[pay], plugins=plugins)) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("go")
        await begun.wait()
        await session.cancel()
        await receipt.result()
        await session.settle("chat.1.1.0", "done", value={"token": "x", "text": f"{SECRET}{'!' * 200}"})
        await session.run("well?")
        records = await written(runtime)

    told = next(m.text for m in shown[-1].messages if m.text.startswith("[About"))
    assert HIDDEN in told
    assert len(told) < 300
    assert SECRET.encode() not in records


# ---------------------------------------------------------------------- progress


async def progress_of(place: Place, told: Any, *plugins: Plugin) -> list[Any]:
    @tool
    def slow(ctx: ToolContext) -> str:
        """Do something for long, on a thread."""
        ctx.progress(told)
        return "done"

    agent = Agent(calling("slow"), tools=[slow], plugins=plugins)
    async with place.runtime(agent) as runtime, (await runtime.session("chat")).stream("go") as turn:
        return [event.value async for event in turn if isinstance(event, ToolProgress)]


async def test_progress_is_shown_redacted(place: Place) -> None:
    assert await progress_of(place, {"at": SECRET}, Redaction()) == [{"at": HIDDEN}]


async def test_progress_that_a_filter_fails_on_is_withheld(place: Place) -> None:
    assert await progress_of(place, SECRET, Failing()) == ["progress withheld: plugin 'failing' failed"]


async def test_progress_of_a_background_tool_is_stored_redacted(file: Place) -> None:
    @tool(background=True)
    async def slow(ctx: ToolContext) -> str:
        """Do something for long."""
        ctx.progress({"at": SECRET})
        return "done"

    async with file.runtime(Agent(calling("slow"), tools=[slow], plugins=[Redaction()])) as runtime:
        await (await runtime.session("chat")).run("go")
        await runtime.handle("chat.1.1.0").result(SOON)
        events = [event async for event in runtime.processes.events("chat.1.1.0")]
        await runtime.wait_idle(SOON)

    assert HIDDEN in repr(events)
    assert on_disk(file) == []


# ---------------------------------------------------------------------- artifacts


async def artifact_of(place: Place, data: str | bytes, *plugins: Plugin, **options: Any) -> tuple[Any, Any]:
    """How a call ends that puts an artifact, and what a later call gets of it."""
    got = list[bytes]()

    @tool(**options)
    async def put(ctx: ToolContext) -> str:
        """Keep something."""
        await ctx.artifacts.put(data, name="report")
        got.append(await ctx.artifacts.get("report"))
        return "kept"

    async with place.runtime(Agent(calling("put"), tools=[put], plugins=plugins)) as runtime:
        result = await (await runtime.session("chat")).run("go")
        outcome: Any = result.tool_calls[0].outcome
        if options.get("background"):
            outcome = await runtime.handle("chat.1.1.0").outcome(SOON)
            assert await runtime.wait_idle(SOON)
    return outcome, got[0] if got else None


@pytest.mark.parametrize("data", [f"key: {SECRET}\n", f"key: {SECRET}\n".encode()], ids=["text", "bytes that are text"])
@pytest.mark.parametrize("background", [False, True])
async def test_text_artifacts_are_stored_redacted(file: Place, data: str | bytes, background: bool) -> None:
    _, got = await artifact_of(file, data, Redaction(), background=background)

    assert got == f"key: {HIDDEN}\n".encode()
    assert on_disk(file) == []


async def test_binary_artifacts_pass_unless_redaction_is_told_to_withhold_them(file: Place) -> None:
    passed = await artifact_of(file, BINARY, Redaction())

    assert passed == (Ok("kept"), BINARY)


@pytest.mark.parametrize("background", [False, True])
async def test_binary_artifacts_that_are_withheld_are_not_stored_and_the_tool_is_told(
    file: Place, background: bool
) -> None:
    outcome, got = await artifact_of(file, BINARY, Redaction(binary="withhold"), background=background)

    assert (outcome.code, outcome.message, got) == (
        "artifact_withheld",
        "artifact 'report' is withheld: plugin 'redaction' does not let it pass",
        None,
    )
    assert on_disk(file) == []


async def test_an_artifact_that_a_filter_fails_on_is_withheld(file: Place) -> None:
    outcome, got = await artifact_of(file, SECRET, Failing())

    assert (outcome.message, got) == ("artifact 'report' is withheld: plugin 'failing' failed", None)
    assert on_disk(file) == []


# ---------------------------------------------------------------------- files that tools return


async def returned(place: Place, made: Any, *plugins: Plugin, **options: Any) -> tuple[Any, list[bytes]]:
    """What the outcome of a call is that returns `made`, and the bytes of the files that it left in the store."""

    @tool(**options)
    def show() -> Any:
        """Show something."""
        return made

    async with place.runtime(Agent(calling("show"), tools=[show], plugins=plugins)) as runtime:
        result = await (await runtime.session("chat")).run("go")
        outcome: Any = result.tool_calls[0].outcome
        if options.get("background"):
            outcome = await runtime.handle("chat.1.1.0").outcome(SOON)
            assert await runtime.wait_idle(SOON)
    folder = place.path.with_name(place.path.name + "-blobs")
    stored = [each.read_bytes() for each in folder.rglob("*") if each.is_file()]
    return outcome, [data for data in stored if not data.startswith(b'{"type":"environment.')]  # of a background tool


LEAKING = f"key: {SECRET}\n".encode()


def document(folder: Path, data: bytes, local: bool) -> Document:
    if not local:
        return Document.from_bytes(data, "text/plain", "notes.txt")
    (folder / "outside").mkdir()
    (folder / "outside" / "notes.txt").write_bytes(data)
    return Document.file(folder / "outside" / "notes.txt")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("local", [False, True], ids=["bytes", "a file of the host"])
@pytest.mark.parametrize("filters", [Redaction, Discreet], ids=["redaction", "a filter of values alone"])
async def test_text_files_that_tools_return_are_stored_redacted(
    file: Place, tmp_path_factory: pytest.TempPathFactory, background: bool, local: bool, filters: type[Plugin]
) -> None:
    made = document(tmp_path_factory.mktemp("host"), LEAKING, local)

    _, stored = await returned(file, made, filters(), background=background)

    assert stored == [f"key: {HIDDEN}\n".encode()]
    assert on_disk(file) == []


@pytest.mark.parametrize("media_type", ["text/plain", "application/pdf"])
async def test_a_redacted_file_is_the_one_that_the_model_is_shown(file: Place, media_type: str) -> None:
    outcome, stored = await returned(file, [Document.from_bytes(LEAKING, media_type, SECRET)], Redaction())

    [shown] = outcome.files
    assert shown == Document(Stored(hashlib.sha256(stored[0]).hexdigest(), len(stored[0])), media_type, HIDDEN)
    assert on_disk(file) == []


async def test_binary_files_that_tools_return_pass_unless_redaction_is_told_to_withhold_them(file: Place) -> None:
    outcome, stored = await returned(file, Image.from_bytes(BINARY, "image/png"), Redaction())

    assert stored == [BINARY]
    assert len(outcome.files) == 1


@pytest.mark.parametrize("background", [False, True])
async def test_a_file_that_is_withheld_is_left_out_of_the_result_which_says_so(file: Place, background: bool) -> None:
    made = {
        "text": Document.from_bytes(LEAKING, "text/plain", "notes.txt"),
        "picture": Image.from_bytes(BINARY, "image/png", "x.png"),
    }

    outcome, stored = await returned(file, made, Redaction(binary="withhold"), background=background)

    assert outcome.value["picture"] == "file 'x.png' is withheld: plugin 'redaction' does not let it pass"
    assert outcome.value["text"]["name"] == "notes.txt"
    assert stored == [f"key: {HIDDEN}\n".encode()]
    assert on_disk(file) == []


async def test_a_file_that_a_filter_fails_on_is_withheld(file: Place) -> None:
    outcome, stored = await returned(file, Document.from_bytes(LEAKING, "text/plain", "notes.txt"), Failing())

    assert outcome == Ok("file 'notes.txt' is withheld: plugin 'failing' failed")
    assert (stored, on_disk(file)) == ([], [])


async def test_a_file_too_large_for_filters_to_look_at_is_withheld(file: Place, tmp_path: Path) -> None:
    with (tmp_path / "large.bin").open("wb") as large:
        large.truncate(MAX_VALUE + 1)

    outcome, stored = await returned(file, Document.file(tmp_path / "large.bin"), Redaction())

    assert outcome.value.startswith("file 'large.bin' is withheld: plugins look at ")
    assert (outcome.files, stored) == ((), [])


async def test_a_file_at_an_address_that_holds_a_secret_is_left_out(file: Place) -> None:
    plain = Document.url("https://example.com/a.pdf")

    outcome, _ = await returned(file, [Document.url(f"https://example.com/b.pdf?t={SECRET}"), plain], Redaction())

    assert outcome.files == (plain,)
    assert on_disk(file) == []


async def test_files_that_a_plugin_made_up_do_not_pass_redaction(file: Place) -> None:
    made_up = Ok("see", files=(Document.from_bytes(LEAKING, "text/plain"),))
    agent = Agent(calling("fetch"), tools=[fetch], plugins=[Redaction(), Cached(made_up)])
    async with file.runtime(agent) as runtime:
        result = await (await runtime.session("chat")).run("go")

    outcome = result.tool_calls[0].outcome
    assert isinstance(outcome, Failed)
    assert outcome.code == "before_tool_call_failed"
    assert on_disk(file) == []


async def test_a_pipe_that_a_tool_returns_is_refused_before_filters_wait_for_it(file: Place, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    outcome, _ = await returned(file, Document.file(tmp_path / "pipe", "text/plain"), Redaction())

    assert isinstance(outcome, Failed)
    assert "no regular file" in outcome.message


def test_redaction_knows_two_ways_with_binary_artifacts() -> None:
    wrong: Any = "hide"
    with pytest.raises(InvalidDefinition, match="'withhold'"):
        Redaction(binary=wrong)


# ---------------------------------------------------------------------- wakes


@process
async def quiet(ctx: ProcessContext[Any]) -> str:
    return "nothing special"


async def news_of(place: Place, *plugins: Plugin) -> list[str]:
    """What a session is told of a process whose label is the secret."""
    shown = list[str]()

    def answer(request: ModelRequest) -> str:
        shown.append(request.messages[-1].text)
        return "heard"

    async with place.runtime(Agent(FunctionModel(answer), plugins=plugins), processes=[quiet]) as runtime:
        session = await runtime.session("chat")
        await session.run("hello")
        handle = await session.start(quiet, {}, label=SECRET)
        await handle.result(SOON)
        assert await runtime.wait_idle(SOON)
    return shown[1:]


async def test_the_whole_text_of_a_wake_is_redacted(place: Place) -> None:
    (text,) = await news_of(place, Redaction())

    assert SECRET not in text
    assert HIDDEN in text
    assert "nothing special" in text


async def test_a_wake_that_a_filter_fails_on_is_withheld(place: Place) -> None:
    assert await news_of(place, Failing()) == ["news of processes withheld: plugin 'failing' failed"]


# ---------------------------------------------------------------------- definitions


def test_a_filter_is_one_or_not() -> None:
    with pytest.raises(InvalidDefinition, match="`is_filter` of plugin 'p' is True or False"):
        PluginSet([having("prompt", lambda ctx: (), "p", is_filter="yes")])


def test_an_async_filter_is_refused() -> None:
    async def later(ctx: FilterContext, value: Any) -> Any:
        return value

    with pytest.raises(InvalidDefinition, match="filter_value of plugin 'p' is asked where nothing can wait"):
        PluginSet([having("filter_value", later, "p")])
