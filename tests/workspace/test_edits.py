"""Edits of a session: listed from its records, and taken back."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Runtime, Session, ToolCall, Workspace
from perdure.builtin import Redaction
from perdure.errors import InvalidInput, ProviderUnavailable, UndoRefused, UnknownTurn
from perdure.model.edit import FileRestore, UndoneFile
from perdure.testing import ScriptedModel
from tests.kit import Place


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "a.txt").write_text("one")
    (tmp_path / "work" / "b.txt").write_text("bee")
    return tmp_path / "work"


def edit(path: str, old: str, new: str) -> ToolCall:
    return ToolCall(name="edit_file", args={"path": path, "old_text": old, "new_text": new})


def write(path: str, content: str) -> ToolCall:
    return ToolCall(name="write_file", args={"path": path, "content": content})


def delete(path: str) -> ToolCall:
    return ToolCall(name="delete_file", args={"path": path})


def coder(work: Path, *turns: list[ToolCall], **options: Any) -> Agent[str]:
    answers = [each for calls in turns for each in (calls, "done")]
    return Agent(ScriptedModel(answers), tools=[Workspace([work]).tools()], **options)


async def run(runtime: Runtime, turns: int = 1) -> Session[Any]:
    session = await runtime.session("s")
    for _ in range(turns):
        await session.run("go")
    return session


def contents(work: Path) -> dict[str, str]:
    return {str(path.relative_to(work)): path.read_text() for path in sorted(work.rglob("*")) if path.is_file()}


async def test_the_edits_of_a_turn_are_listed_and_taken_back(place: Place, work: Path) -> None:
    before = contents(work)
    calls = [edit("a.txt", "one", "two"), edit("a.txt", "two", "three"), write("new/c.txt", "sea"), delete("b.txt")]
    async with place.runtime(coder(work, calls)) as runtime:
        session = await run(runtime)
        after, edits = contents(work), await session.edits("s.1")
        undone = await session.undo()

        assert after == {"a.txt": "three", "new/c.txt": "sea"}
        assert sorted((e.tool, Path(e.path).name, e.status, e.kept) for e in edits) == [
            ("delete_file", "b.txt", "applied", True),
            ("edit_file", "a.txt", "applied", True),
            ("edit_file", "a.txt", "applied", True),
            ("write_file", "c.txt", "applied", True),
        ]
        assert sorted((Path(each.path).name, each.status) for each in undone) == [
            ("a.txt", "undone"),
            ("b.txt", "undone"),
            ("c.txt", "undone"),
        ]
        assert contents(work) == before
        assert {each.status for each in await session.undo()} == {"unchanged"}, "made again, it changes nothing"


async def test_another_runtime_on_the_store_lists_and_takes_back(tmp_path: Path, work: Path) -> None:
    store = tmp_path / "agent.db"
    async with Runtime(store, agents=[coder(work, [write("a.txt", "two")])]) as runtime:
        await run(runtime)
    async with Runtime(store, agents=[coder(work)]) as runtime:
        session = await runtime.session("s")

        assert [each.path for each in await session.edits()] == ["a.txt"]
        assert await runtime.store.sweep(grace=0) == 0, "what the file held is referred to by the record of the call"
        assert await session.undo("s.1") == [UndoneFile("a.txt", "undone")]

    assert (work / "a.txt").read_text() == "one"


async def test_paths_of_edits_are_those_that_the_tool_answers(tmp_path: Path, place: Place, work: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    calls = [write("new/a.txt", "two"), write(str(work / "b.txt"), "wasp"), write(f"{other}/c.txt", "sea")]
    model = ScriptedModel([calls, "Done."])
    agent = Agent(model, name="coder", tools=[Workspace([work, other]).tools()])
    async with place.runtime(agent) as runtime:
        session = await run(runtime)
        edits = sorted(await session.edits(), key=lambda each: each.call_id)
        answered = [each.value["path"] for each in (await session.result("s.1")).tool_calls]

        assert [each.path for each in edits] == answered == ["new/a.txt", "b.txt", f"{other}/c.txt"]
        assert [each.location for each in edits] == [f"{work}/new/a.txt", f"{work}/b.txt", f"{other}/c.txt"]
        assert {each.path for each in await session.undo(paths=["b.txt", f"{work}/new/a.txt"])} == set(answered[:2])
        assert contents(other) == {"c.txt": "sea"}


async def test_a_file_that_is_no_longer_what_the_edit_left_is_refused_and_nothing_is_changed(
    place: Place, work: Path
) -> None:
    async with place.runtime(coder(work, [edit("a.txt", "one", "two"), edit("b.txt", "bee", "wasp")])) as runtime:
        session = await run(runtime)
        (work / "b.txt").write_text("wasp, by hand")

        with pytest.raises(UndoRefused) as caught:
            await session.undo()

        assert caught.value.files == {"b.txt": f"{work / 'b.txt'} is no longer what the edit left"}
        assert contents(work) == {"a.txt": "two", "b.txt": "wasp, by hand"}
        assert await session.undo(paths=[str(work / "a.txt")]) == [UndoneFile("a.txt", "undone")]
        assert contents(work) == {"a.txt": "one", "b.txt": "wasp, by hand"}


async def test_the_newest_turn_with_edits_is_taken_back_and_then_the_one_before(place: Place, work: Path) -> None:
    async with place.runtime(coder(work, [write("a.txt", "two")], [write("a.txt", "three")])) as runtime:
        session = await run(runtime, 2)

        await session.undo()
        assert (work / "a.txt").read_text() == "two"
        await session.undo("s.1")
        assert (work / "a.txt").read_text() == "one"
        assert len(await session.edits()) == 2


async def test_edits_that_failed_or_changed_nothing_are_not_taken_back(place: Place, work: Path) -> None:
    async with place.runtime(coder(work, [edit("a.txt", "absent", "x"), write("b.txt", "bee")])) as runtime:
        session = await run(runtime)

        assert [(Path(e.path).name, e.status) for e in await session.edits()] == [("b.txt", "not_applied")]
        assert await session.undo() == []


async def test_a_file_that_others_changed_between_two_edits_is_refused(place: Place, work: Path) -> None:
    async with place.runtime(coder(work, [write("a.txt", "two")], [write("a.txt", "four")])) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        (work / "a.txt").write_text("three")
        await session.run("go")
        edits = await session.edits()

        assert edits[0].after != edits[1].before
        await session.undo("s.2")
        assert (work / "a.txt").read_text() == "three"
        with pytest.raises(UndoRefused, match="no longer what the edit left"):
            await session.undo("s.1")


async def test_what_was_deleted_and_written_again_goes_back_in_one_step(place: Place, work: Path) -> None:
    (work / "a.txt").chmod(0o640)
    async with place.runtime(coder(work, [delete("a.txt")], [write("a.txt", "new")])) as runtime:
        session = await run(runtime, 2)

        await session.undo("s.2")
        assert not (work / "a.txt").exists()
        await session.undo("s.1")

    assert (work / "a.txt").read_text() == "one"
    assert (work / "a.txt").stat().st_mode & 0o777 == 0o640


async def test_content_that_a_filter_does_not_let_be_kept_cannot_be_brought_back(place: Place, work: Path) -> None:
    (work / "a.txt").write_text("key = sk-ant-api03-" + "a" * 80)
    agent = coder(work, [write("a.txt", "key = none")], plugins=[Redaction()])
    async with place.runtime(agent) as runtime:
        session = await run(runtime)

        assert [(each.status, each.kept) for each in await session.edits()] == [("applied", False)]
        with pytest.raises(UndoRefused, match="a plugin withheld it"):
            await session.undo()

    assert (work / "a.txt").read_text() == "key = none"


async def test_a_link_that_was_deleted_cannot_be_brought_back(place: Place, work: Path) -> None:
    (work / "way").symlink_to("a.txt")
    async with place.runtime(coder(work, [delete("way")])) as runtime:
        session = await run(runtime)

        with pytest.raises(UndoRefused, match="a link"):
            await session.undo()


async def test_bad_questions_are_refused(place: Place, work: Path) -> None:
    async with place.runtime(coder(work, [write("a.txt", "two")])) as runtime:
        session = await runtime.session("s")
        assert await session.edits() == []
        await session.run("go")

        with pytest.raises(UnknownTurn):
            await session.edits("s.9")
        with pytest.raises(UnknownTurn):
            await session.undo("other.1")
        with pytest.raises(InvalidInput, match="has not changed"):
            await session.undo(paths=["b.txt"])
    assert (work / "a.txt").read_text() == "two"


async def test_a_runtime_without_the_workspace_lists_and_cannot_take_back(tmp_path: Path, work: Path) -> None:
    store = tmp_path / "agent.db"
    async with Runtime(store, agents=[coder(work, [write("a.txt", "two")])]) as runtime:
        await run(runtime)
    async with Runtime(store, agents=[]) as runtime:
        session = await runtime.session("s")
        assert len(await session.edits()) == 1
        with pytest.raises(ProviderUnavailable):
            await session.undo()
    async with Runtime(store, agents=[Agent("scripted")]) as runtime:
        with pytest.raises(UndoRefused, match="no workspace of the agent"):
            await (await runtime.session("s")).undo()

    assert (work / "a.txt").read_text() == "two"


async def test_an_undo_that_is_cancelled_ends_when_its_files_are_at_rest(work: Path) -> None:
    tools, digest = Workspace([work]).tools(), hashlib.sha256(b"one").hexdigest()
    wanted = FileRestore(str(work / "b.txt"), (hashlib.sha256(b"bee").hexdigest(),), digest)

    undoing = asyncio.create_task(tools.restore([wanted], {digest: b"one"}, None))
    await asyncio.sleep(0)  # it has begun
    undoing.cancel()

    with pytest.raises(asyncio.CancelledError):
        await undoing
    assert (work / "b.txt").read_text() == "one"
