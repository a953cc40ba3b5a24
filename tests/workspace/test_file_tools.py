"""What the tools for files return, and what bad input comes to."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perdure import Agent, Image, Runtime, ToolCall, ToolError, Workspace
from perdure.model.edit import PAYLOAD
from perdure.model.message import Document, Inline
from perdure.model.tool import Ok
from perdure.testing import ScriptedModel
from perdure.tools.attempt import EndsAs
from perdure.workspace import reading
from perdure.workspace.files import temporary_name
from perdure.workspace.paths import Paths
from perdure.workspace.search import Query, glob_pattern, search
from perdure.workspace.tools import FileTools
from tests.workspace.asking import ask, execute, prepare, refused


def png(width: int = 1, height: int = 1) -> bytes:
    """A picture in black, however large it says it is."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(2)))]
    parts = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in [*chunks, (b"IEND", b"")]
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


GIF = base64.b64decode("R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw==")
WEBP = base64.b64decode("UklGRhoAAABXRUJQVlA4TA0AAAAvAAAAEAcQERGIiP4HAA==")
JPEG = (
    b"\xff\xd8\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0\xff\xdb\0\x43\0" + b"\1" * 64
    + b"\xff\xc0\0\x0b\x08\0\1\0\1\1\1\x11\0\xff\xda\0\x08\1\1\0\0\x3f\0\xd2\xcf\xff\xd9"
)  # fmt: skip
PDF = b"%PDF-1.7\n\0\xe2\xe3\ntrailer\n%%EOF\n"


@pytest.fixture
def tools(work: Path) -> FileTools:
    return Workspace([work]).tools()


# ---------------------------------------------------------------------- reading


async def test_a_file_is_read_whole_or_from_a_line_on(tools: FileTools, work: Path) -> None:
    (work / "a.txt").write_text("one\ntwo\nthree\nfour")

    whole = await ask(tools, "read_file", path="a.txt")
    part = await ask(tools, "read_file", path="a.txt", offset=2, limit=2)
    rest = await ask(tools, "read_file", path="a.txt", offset=part["next_offset"])

    assert whole == {
        "path": "a.txt", "size": 18, "content": "one\ntwo\nthree\nfour", "first_line": 1, "lines": 4, "eof": True,
    }  # fmt: skip
    assert (part["content"], part["first_line"], part["next_offset"], part["eof"]) == ("two\nthree\n", 2, 4, False)
    assert (rest["content"], rest["eof"]) == ("four", True)


async def test_pieces_of_lines_and_of_bytes_make_the_whole(tools: FileTools, work: Path) -> None:
    text = "".join(f"line {number} with an é and a 🦉\n" for number in range(9000))
    (work / "long.txt").write_text(text)

    async def joined(**asked: Any) -> str:
        found, offset = "", 0
        while True:
            piece = await ask(tools, "read_file", path="long.txt", offset=offset, **asked)
            found += piece["content"]
            if piece["eof"]:
                return found
            offset = piece["next_offset"]

    assert await joined() == text
    assert await joined(unit="bytes", limit=30_001) == text


async def test_an_empty_file_is_empty(tools: FileTools, work: Path) -> None:
    (work / "empty").write_bytes(b"")

    found = await ask(tools, "read_file", path="empty")

    assert (found["content"], found["lines"], found["eof"]) == ("", 0, True)


async def test_what_is_past_the_end_is_refused(tools: FileTools, work: Path) -> None:
    (work / "a.txt").write_text("one\ntwo\n")

    assert await refused(tools, "read_file", path="a.txt", offset=3) == "past_the_end"
    assert await refused(tools, "read_file", path="a.txt", offset=9, unit="bytes") == "past_the_end"
    assert await refused(tools, "read_file", path="a.txt", offset=-1) == "invalid_tool_args"
    assert await refused(tools, "read_file", path="a.txt", limit=0) == "invalid_tool_args"


async def test_bytes_that_are_not_utf8_are_replaced_and_that_is_said(tools: FileTools, work: Path) -> None:
    (work / "latin.txt").write_bytes(b"caf\xe9\n")

    found = await ask(tools, "read_file", path="latin.txt")

    assert found["content"] == "caf\ufffd\n"
    assert "invalid_utf8" in found


async def test_a_binary_file_is_typed_and_its_bytes_can_be_read(tools: FileTools, work: Path) -> None:
    (work / "tool.bin").write_bytes(b"\x7fELF\0\1\2")

    assert await refused(tools, "read_file", path="tool.bin") == "binary_file"
    assert await refused(tools, "file_outline", path="tool.bin") == "no_outline"
    found = await ask(tools, "read_file", path="tool.bin", unit="bytes", limit=4)
    assert (found["content"], found["encoding"], found["next_offset"]) == ("f0VMRg==", "base64", 4)


@pytest.mark.parametrize(
    ("data", "kind"),
    [(png(), "image/png"), (GIF, "image/gif"), (JPEG, "image/jpeg"), (WEBP, "image/webp"), (PDF, "application/pdf")],
    ids=["png", "gif", "jpeg", "webp", "pdf"],
)
async def test_pictures_and_pdfs_are_shown_as_such_whatever_they_are_called(
    tools: FileTools, work: Path, data: bytes, kind: str
) -> None:
    (work / "p.txt").write_bytes(data)

    made = Document if kind == "application/pdf" else Image
    assert await ask(tools, "read_file", path="p.txt") == made(Inline(data), kind, "p.txt")


@pytest.mark.parametrize("data", [png(), GIF, JPEG, WEBP, PDF], ids=["png", "gif", "jpeg", "webp", "pdf"])
async def test_a_picture_that_is_cut_anywhere_is_none(tools: FileTools, work: Path, data: bytes) -> None:
    """A service that is shown one refuses the conversation for ever."""
    told = set()
    for length in range(12, len(data) - 2):
        (work / "p.png").write_bytes(data[:length])
        told.add(await refused(tools, "read_file", path="p.png"))

    assert told <= {"broken_picture", "binary_file", ""}, "a text, before the first byte that no text has"
    assert "broken_picture" in told
    assert not isinstance(await ask(tools, "read_file", path="p.png", unit="bytes"), Image | Document)


@pytest.mark.parametrize("size", [(50_000, 50_000), (1, 8001), (0, 1)])
async def test_a_picture_that_is_too_large_for_any_model_is_refused(
    tools: FileTools, work: Path, size: tuple[int, int]
) -> None:
    (work / "bomb.png").write_bytes(png(*size))

    assert await refused(tools, "read_file", path="bomb.png") == "broken_picture"


@pytest.mark.parametrize("text", ["GIF8 is how they begin.\n", "%PDF-1.7 is a version.\n"])
async def test_a_text_that_begins_like_a_picture_is_a_text(tools: FileTools, work: Path, text: str) -> None:
    (work / "about.txt").write_text(text)

    assert (await ask(tools, "read_file", path="about.txt"))["content"] == text


async def test_a_line_that_is_too_long_is_cut_and_that_is_said(tools: FileTools, work: Path) -> None:
    (work / "min.js").write_text("x" * 200_000 + "\nlast\n")

    found = await ask(tools, "read_file", path="min.js")

    assert len(found["content"]) == reading.MAX_BYTES
    assert found["next_byte"] == reading.MAX_BYTES
    assert "cut_line" in found


async def test_two_gigabytes_are_read_a_piece_at_a_time(tools: FileTools, work: Path) -> None:
    with open(work / "huge.log", "wb") as file:
        file.write(b"first\n" + b"x" * 9000)
        file.truncate(2 * 1024**3)
        file.seek(2 * 1024**3 - 6)
        file.write(b"\nlast\n")

    first = await ask(tools, "read_file", path="huge.log", limit=1)
    last = await ask(tools, "read_file", path="huge.log", offset=2 * 1024**3 - 5, unit="bytes")

    assert first["content"] == "first\n"
    assert last["content"] == "last\n"
    assert await refused(tools, "edit_file", path="huge.log", old_text="a", new_text="b") == "file_too_large"


async def test_a_file_that_grows_is_read_as_it_was_when_it_was_opened(tools: FileTools, work: Path) -> None:
    """It grows from the moment on at which its size has been asked for."""
    path = work / "log.txt"
    path.write_text("one\n")
    descriptor = os.open(path, os.O_RDONLY)
    with open(descriptor, "rb", buffering=0) as file:
        size = os.fstat(descriptor).st_size
        with open(path, "a") as more:
            more.write("two\n")
        found = reading._lines(file, size, 0, None, "log.txt")

    assert (found["content"], found["eof"]) == ("one\n", True)


async def test_a_file_that_is_written_to_while_it_is_read_says_so(tools: FileTools, work: Path) -> None:
    """The line is behind 32 MB without one: time enough for the other thread."""
    with open(work / "log.txt", "wb") as file:
        file.write(b"first" + b"x" * 9000)
        file.seek(32 * 1024**2)
        file.write(b"\nlast\n")
    over = threading.Event()

    def write() -> None:
        with open(work / "log.txt", "r+b", buffering=0) as file:
            while not over.is_set():
                file.write(b"F")
                file.seek(0)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        async with asyncio.timeout(60):
            while "changed_while_read" not in (found := await ask(tools, "read_file", path="log.txt", offset=2)):
                pass
    finally:
        over.set()
        writer.join()

    assert found["content"] == "last\n"
    assert found["changed_while_read"] is True
    assert "changed_while_read" not in await ask(tools, "read_file", path="log.txt", offset=2)


async def test_an_outline_names_what_a_file_declares(tools: FileTools, work: Path) -> None:
    (work / "a.py").write_text("class A:\n    async def f(self): ...\n\ndef g(): ...\n")
    (work / "b.ts").write_text("export class B {}\nexport const run = async (x) => 1\n")
    (work / "c.md").write_text("# One\ntext\n## Two\n")

    python = await ask(tools, "file_outline", path="a.py")
    assert [(s["line"], s["kind"], s["name"], s["depth"]) for s in python["symbols"]] == [
        (1, "class", "A", 0),
        (2, "def", "f", 1),
        (4, "def", "g", 0),
    ]
    script = await ask(tools, "file_outline", path="b.ts")
    assert [(s["kind"], s["name"]) for s in script["symbols"]] == [("class", "B"), ("function", "run")]
    text = await ask(tools, "file_outline", path="c.md")
    assert [(s["name"], s["depth"]) for s in text["symbols"]] == [("One", 0), ("Two", 1)]


# ---------------------------------------------------------------------- listing


async def test_a_folder_is_listed_in_order_with_what_is_what(tools: FileTools, work: Path) -> None:
    (work / "b.txt").write_text("four")
    (work / "a").mkdir()
    (work / "c").symlink_to("b.txt")
    (work / ".hidden").write_text("")

    found = await ask(tools, "list_directory")

    assert found["entries"] == [
        {"name": "a", "kind": "folder"},
        {"name": "b.txt", "kind": "file", "size": 4},
        {"name": "c", "target": "b.txt", "kind": "link"},
    ]
    assert (found["count"], found["truncated"]) == (3, False)
    assert len((await ask(tools, "list_directory", include_hidden=True))["entries"]) == 4
    assert (await ask(tools, "list_directory", max_entries=1))["truncated"]
    assert await refused(tools, "list_directory", path="b.txt") == "not_a_folder"


async def test_names_that_are_not_utf8_are_listed_and_left_out_of_searches(tools: FileTools, work: Path) -> None:
    with open(os.path.join(os.fsencode(work), b"caf\xe9.txt"), "w") as file:
        file.write("secret")

    assert (await ask(tools, "list_directory"))["entries"] == [
        {"name": "caf\ufffd.txt", "not_utf8": True, "kind": "file", "size": 6}
    ]
    found = await ask(tools, "search", pattern="secret")
    assert (found["matches"], found["files_skipped"]) == ([], 1)


# ---------------------------------------------------------------------- changing


async def test_a_file_is_written_with_its_folders(tools: FileTools, work: Path) -> None:
    assert await ask(tools, "write_file", path="a/b/c.txt", content="é") == {
        "path": "a/b/c.txt", "size": 2, "created": True,
    }  # fmt: skip
    assert (work / "a" / "b" / "c.txt").read_text() == "é"
    assert os.listdir(work / "a" / "b") == ["c.txt"], "nothing else is left there"


async def test_writing_refuses_what_it_was_told_not_to_do(tools: FileTools, work: Path) -> None:
    (work / "a.txt").write_text("kept")

    assert await refused(tools, "write_file", path="a.txt", content="x", overwrite=False) == "file_exists"
    assert await refused(tools, "write_file", path="d/a.txt", content="x", create_parents=False) == "not_found"
    assert (work / "a.txt").read_text() == "kept"
    assert os.listdir(work) == ["a.txt"]


async def test_a_program_that_runs_as_its_owner_does_not_once_it_is_written(tools: FileTools, work: Path) -> None:
    (work / "run").write_text("one")
    (work / "run").chmod(0o6755)

    await ask(tools, "edit_file", path="run", old_text="one", new_text="two")

    assert (work / "run").stat().st_mode & 0o7777 == 0o755


async def test_a_file_that_would_take_hours_to_read_is_not_changed(tools: FileTools, work: Path) -> None:
    with open(work / "huge", "wb") as file:
        file.truncate(1024**4)

    assert await refused(tools, "write_file", path="huge", content="x") == "file_too_large"
    assert await refused(tools, "delete_file", path="huge") == "file_too_large"
    assert (work / "huge").stat().st_size == 1024**4


async def test_a_file_keeps_its_permissions(tools: FileTools, work: Path) -> None:
    (work / "run.sh").write_text("echo one")
    (work / "run.sh").chmod(0o750)

    await ask(tools, "edit_file", path="run.sh", old_text="one", new_text="two")
    await ask(tools, "write_file", path="run.sh", content="echo three")

    assert (work / "run.sh").stat().st_mode & 0o777 == 0o750
    assert (work / "run.sh").read_text() == "echo three"


@pytest.mark.parametrize(
    ("old", "all_of_them", "code"),
    [
        ("absent", False, "no_match"),
        ("absent", True, "no_match"),
        ("same", False, "several_matches"),
        ("", False, "invalid_tool_args"),
        ("new", False, "invalid_tool_args"),
    ],
)
async def test_an_edit_that_is_not_decided_changes_nothing(
    tools: FileTools, work: Path, old: str, all_of_them: bool, code: str
) -> None:
    (work / "a.txt").write_text("same same new")

    found = await refused(tools, "edit_file", path="a.txt", old_text=old, new_text="new", replace_all=all_of_them)

    assert found == code
    assert (work / "a.txt").read_text() == "same same new"


async def test_overlapping_matches_are_several(tools: FileTools, work: Path) -> None:
    (work / "a.txt").write_text("aaa")

    assert await refused(tools, "edit_file", path="a.txt", old_text="aa", new_text="b") == "several_matches"


async def test_all_matches_are_replaced_when_that_is_said(tools: FileTools, work: Path) -> None:
    (work / "a.txt").write_text("same same")

    found = await ask(tools, "edit_file", path="a.txt", old_text="same", new_text="other", replace_all=True)

    assert found == {"path": "a.txt", "replaced": 2, "size": 11}
    assert (work / "a.txt").read_text() == "other other"


async def test_an_edit_leaves_all_other_bytes_as_they_are(tools: FileTools, work: Path) -> None:
    (work / "a.txt").write_bytes(b"caf\xe9\r\none\r\n\0")

    await ask(tools, "edit_file", path="a.txt", old_text="one", new_text="two")

    assert (work / "a.txt").read_bytes() == b"caf\xe9\r\ntwo\r\n\0"


@pytest.mark.parametrize(
    ("before", "after", "replace_all"),
    [("old rest", "new rest", False), ("first old", "first new", False), ("a old b", "a new b", False),
     ("old", "new", False), ("a old b old", "a new b new", True)],
)  # fmt: skip
async def test_a_plan_names_the_content_before_and_after(
    tools: FileTools, work: Path, before: str, after: str, replace_all: bool
) -> None:
    (work / "a.txt").write_text(before)

    call = await prepare(tools, "edit_file", path="a.txt", old_text="old", new_text="new", replace_all=replace_all)
    await execute(tools, call)

    digests = [hashlib.sha256(each.encode()).hexdigest() for each in (before, after)]
    assert [call.payload[PAYLOAD]["before"], call.payload[PAYLOAD]["after"]] == digests
    assert (work / "a.txt").read_text() == after


async def test_a_file_that_changes_before_its_edit_is_left_alone(tools: FileTools, work: Path) -> None:
    (work / "a.txt").write_text("one")
    call = await prepare(tools, "edit_file", path="a.txt", old_text="one", new_text="two")
    (work / "a.txt").write_text("one, and more")

    with pytest.raises(ToolError) as caught:
        await execute(tools, call)

    assert caught.value.code == "file_changed"
    assert (work / "a.txt").read_text() == "one, and more"


async def test_a_file_that_comes_before_it_is_made_is_left_alone(tools: FileTools, work: Path) -> None:
    call = await prepare(tools, "write_file", path="a.txt", content="ours")
    (work / "a.txt").write_text("theirs")

    with pytest.raises(ToolError) as caught:
        await execute(tools, call)

    assert caught.value.code == "file_changed"
    assert (work / "a.txt").read_text() == "theirs"


@pytest.mark.parametrize(
    ("now", "end"),
    [("one", {"path": "a.txt", "replaced": 1, "size": 3}), ("two", {"path": "a.txt", "done_before": True})],
)
async def test_a_repeated_edit_goes_by_what_the_file_is(
    tools: FileTools, work: Path, now: str, end: dict[str, Any]
) -> None:
    (work / "a.txt").write_text("one")
    call = await prepare(tools, "edit_file", path="a.txt", old_text="one", new_text="two")
    (work / "a.txt").write_text(now)

    assert await execute(Workspace([work]).tools(), call, attempt=2) == end
    assert (work / "a.txt").read_text() == "two"


async def test_a_repeated_edit_of_a_file_that_others_changed_is_unknown(tools: FileTools, work: Path) -> None:
    (work / "a.txt").write_text("one")
    call = await prepare(tools, "edit_file", path="a.txt", old_text="one", new_text="two")
    (work / "a.txt").write_text("three")

    with pytest.raises(EndsAs, match="OutcomeUnknown"):
        await execute(Workspace([work]).tools(), call, attempt=2)

    assert (work / "a.txt").read_text() == "three"


async def test_what_a_killed_attempt_left_is_replaced(tools: FileTools, work: Path) -> None:
    """Even where something else has taken its name: that is removed, and never followed."""
    (work / "a.txt").write_text("one")
    (work.parent / "victim").write_text("kept")
    call = await prepare(tools, "edit_file", path="a.txt", old_text="one", new_text="two")
    (work / temporary_name("c", str(work / "a.txt"))).symlink_to(work.parent / "victim")

    await execute(tools, call, attempt=2)

    assert (work.parent / "victim").read_text() == "kept"
    assert os.listdir(work) == ["a.txt"]
    assert (work / "a.txt").read_text() == "two"


async def test_a_deleted_file_is_gone_and_a_missing_one_no_error(tools: FileTools, work: Path) -> None:
    (work / "a.txt").write_text("x")

    assert await ask(tools, "delete_file", path="a.txt") == {"path": "a.txt", "removed": True}
    assert await ask(tools, "delete_file", path="a.txt") == {"path": "a.txt", "removed": False}
    assert await refused(tools, "delete_file", path=".") == "not_a_file"


async def test_edits_of_one_reply_to_one_file_are_made_in_order(tmp_path: Path, work: Path) -> None:
    (work / "a.txt").write_text("0")
    calls = [
        ToolCall(name="edit_file", args={"path": "a.txt", "old_text": f"{n}", "new_text": f"{n} {n + 1}"})
        for n in range(6)
    ]
    calls.append(ToolCall(name="write_file", args={"path": "b.txt", "content": "b"}))
    agent = Agent(ScriptedModel([calls, "done"]), tools=[Workspace([work]).tools()])

    async with Runtime(tmp_path / "agent.db", agents=[agent]) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert [type(call.outcome) for call in result.tool_calls] == [Ok] * 7
    assert (work / "a.txt").read_text() == "0 1 2 3 4 5 6"


async def test_a_call_that_never_runs_keeps_no_other_from_its_file_for_long(work: Path) -> None:
    tools = FileTools(Paths([str(work)]), claim_seconds=0)
    (work / "a.txt").write_text("one")
    await prepare(tools, "edit_file", path="a.txt", old_text="one", new_text="lost", call_id="never")

    await ask(tools, "edit_file", path="a.txt", old_text="one", new_text="two")

    assert (work / "a.txt").read_text() == "two"


# ---------------------------------------------------------------------- searching


@pytest.fixture
def project(work: Path) -> Path:
    (work / "src" / "deep").mkdir(parents=True)
    (work / "src" / "a.py").write_text("import os\n\ndef find(x):\n    return os.path\n")
    (work / "src" / "deep" / "b.ts").write_text("export function find(x) {}\n")
    (work / "build").mkdir()
    (work / "build" / "out.py").write_text("def find(x): ...\n")
    (work / ".gitignore").write_text("# made\n/build/\n*.log\n!keep.log\n")
    (work / "x.log").write_text("find\n")
    (work / "keep.log").write_text("find\n")
    (work / ".hidden.py").write_text("find\n")
    (work / "data.bin").write_bytes(b"find\0")
    return work


def places(found: dict[str, Any]) -> list[tuple[str, int]]:
    return [(match["path"], match["line"]) for match in found["matches"]]


async def test_a_search_finds_lines_and_leaves_out_what_is_ignored(tools: FileTools, project: Path) -> None:
    everywhere = [("keep.log", 1), ("src/a.py", 3), ("src/deep/b.ts", 1)]

    assert places(await ask(tools, "search", pattern="find")) == everywhere
    assert places(await ask(tools, "search", pattern=r"def \w+\(")) == [("src/a.py", 3)]
    assert places(await ask(tools, "search", pattern="find(", fixed=True, path="src/deep")) == [("src/deep/b.ts", 1)]
    assert places(await ask(tools, "search", pattern="FIND", ignore_case=True, path="src/a.py")) == [("src/a.py", 3)]
    assert (".hidden.py", 1) in places(await ask(tools, "search", pattern="find", include_hidden=True))


@pytest.mark.parametrize(
    ("glob", "paths"),
    [
        ("*.py", ["src/a.py"]),
        ("*.{py,ts}", ["src/a.py", "src/deep/b.ts"]),
        ("{src,lib}/{a,b}.py", ["src/a.py"]),
        ("src/*.py", ["src/a.py"]),
        ("src/**/*.ts", ["src/deep/b.ts"]),
        ("**/b.*", ["src/deep/b.ts"]),
        ("src/**", ["src/a.py", "src/deep/b.ts"]),
        ("[ab].??", ["src/a.py", "src/deep/b.ts"]),
        ("[!a].ts", ["src/deep/b.ts"]),
        ("*a*.*p*y*", ["src/a.py"]),
    ],
)
async def test_a_glob_says_which_files(tools: FileTools, project: Path, glob: str, paths: list[str]) -> None:
    assert [path for path, _ in places(await ask(tools, "search", pattern="find", glob=glob))] == paths


@given(st.text(alphabet="ab*?[]!^-{},/\\&|~.", max_size=20))
@example("[[a]")
@example("[a--b]")
@example("[a&&b]*{,")
@example("**/**/**/**")
def test_any_text_is_a_glob_or_refused_as_one(text: str) -> None:
    with contextlib.suppress(ToolError):
        glob_pattern(text).fullmatch("a/b/a.b")


async def test_lines_of_gitignore_that_make_no_sense_ignore_nothing(tools: FileTools, work: Path) -> None:
    (work / ".gitignore").write_text("**/**/**/**/a.txt\n[z-a]\n\\\n!\n/\n[\n")
    (work / "a.txt").write_text("needle\n")

    assert places(await ask(tools, "search", pattern="needle")) == [("a.txt", 1)]


async def test_matches_have_their_column_and_the_lines_around_them(tools: FileTools, project: Path) -> None:
    found = await ask(tools, "search", pattern="return", context_before=1, context_after=1)

    assert found["matches"] == [
        {
            "path": "src/a.py", "line": 4, "column": 5, "text": "    return os.path",
            "before": ["def find(x):"], "after": [],
        }
    ]  # fmt: skip


async def test_matches_beyond_the_limit_are_cut_and_that_is_said(tools: FileTools, work: Path) -> None:
    (work / "a.txt").write_text("x\n" * 50)

    found = await ask(tools, "search", pattern="x", max_matches=10)

    assert (len(found["matches"]), found["truncated"]) == (10, True)


async def test_a_long_file_is_searched_in_pieces_with_the_right_lines(tools: FileTools, work: Path) -> None:
    with open(work / "long.txt", "w") as file:
        file.write("filler line\n" * 300_000 + "needle\n" + "filler line\n" * 10)

    assert places(await ask(tools, "search", pattern="needle")) == [("long.txt", 300_001)]


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({"pattern": "("}, "invalid_pattern"),
        ({"pattern": "x", "glob": "**/**/**/**/x"}, "invalid_pattern"),
        ({"pattern": ""}, "invalid_tool_args"),
        ({"pattern": "x", "context_before": 99}, "invalid_tool_args"),
        ({"pattern": "x", "path": "nowhere"}, "not_found"),
    ],
)
async def test_a_search_that_cannot_be_made_is_refused(
    tools: FileTools, work: Path, args: dict[str, Any], code: str
) -> None:
    (work / "a.txt").write_text("x")

    assert await refused(tools, "search", **args) == code


@pytest.mark.slow
async def test_a_pattern_without_end_ends_and_holds_up_nothing_else(work: Path) -> None:
    (work / "a.txt").write_text("a" * 40 + "\n")
    paths, passes = Paths([str(work)]), 0

    def look() -> None:
        with paths.locate(".") as place:
            search(paths, place, Query("(a+)+b", seconds=1), lambda count: None, lambda: False)

    searching = asyncio.create_task(asyncio.to_thread(look))
    while not searching.done():
        passes += 1
        await asyncio.sleep(0)

    with pytest.raises(ToolError) as caught:
        await searching
    assert caught.value.code == "search_too_long"
    assert passes > 10, "the event loop went on meanwhile"


async def test_the_lines_of_a_search_are_what_the_model_is_shown_within_its_budget(tmp_path: Path, work: Path) -> None:
    (work / "a.txt").write_text("".join(f"match {'x' * 1000}\n" for _ in range(100)))
    agent = Agent(
        ScriptedModel([[ToolCall(name="search", args={"pattern": "match"})], "done"]), tools=[Workspace([work]).tools()]
    )

    async with Runtime("memory", agents=[agent]) as runtime:
        [call] = (await (await runtime.session("s")).run("go")).tool_calls

    assert isinstance(call.outcome, Ok)
    assert call.outcome.whole is not None
    assert call.outcome.whole.size > 100_000
