"""What a command wrote, read back: exact bytes by offset, in order, as they come, and in sum."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import signal
import subprocess
from contextlib import aclosing
from pathlib import Path

import pytest

from perdure.commands import shim
from perdure.commands.job import Job
from perdure.commands.output import TextDecoder, follow, pieces, read, summarize
from perdure.commands.spawner import StartRequest
from perdure.errors import InvalidInput
from perdure.model.command import Stream
from tests.commands.conftest import Commands, ended, size
from tests.kit import until, untyped

STREAMS: tuple[Stream, ...] = ("stdout", "combined")


def whole(job: Job, stream: Stream, limit: int = 1 << 16) -> bytes:
    parts, after = [], 0
    while True:
        chunk = read(job, stream, after, limit)
        parts.append(chunk.data)
        after = chunk.next
        if chunk.eof:
            return b"".join(parts)
        assert chunk.data


async def test_binary_output_without_newline_is_kept_byte_by_byte(commands: Commands) -> None:
    program = "import os\nfor _ in range(40): os.write(1, bytes(range(256)) * 100)"
    job = await commands.python(program)
    await ended(job)
    data = bytes(range(256)) * 4000

    assert whole(job, "stdout", 999) == data
    assert whole(job, "combined", 100_000) == data
    summary = await summarize(job)
    assert (summary.stdout.bytes, summary.stdout.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert summary.combined_sha256 == summary.stdout.sha256
    assert summary.missing == 0
    assert read(job, "stderr") == (b"", 0, 0, True)


async def test_combined_output_has_both_streams_in_order(commands: Commands) -> None:
    """Each write waits until the one before was read, so that there is only one order."""
    program = (
        "import fcntl, os, time\n"
        "for n in range(60):\n"
        "    stream = 1 + n % 2\n"
        "    os.write(stream, b'%d ' % n * (1 + n % 5))\n"
        "    while int.from_bytes(fcntl.ioctl(stream, 0x541B, bytes(4)), 'little'): time.sleep(0)\n"
    )
    job = await commands.python(program)
    status = await ended(job)
    texts = [f"{n} " * (1 + n % 5) for n in range(60)]
    text = "".join(texts).encode()

    assert whole(job, "combined") == text
    assert whole(job, "combined", 1) == text
    assert whole(job, "stdout") == "".join(texts[::2]).encode()
    assert whole(job, "stderr") == "".join(texts[1::2]).encode()
    index = list(pieces(job))
    assert [piece.stream for piece in index[:4]] == ["stdout", "stderr", "stdout", "stderr"]
    assert sum(piece.length for piece in index) == status.stdout + status.stderr == len(text)
    assert [piece.time for piece in index] == sorted(piece.time for piece in index)
    assert (await summarize(job)).combined_sha256 == hashlib.sha256(text).hexdigest()


async def test_combined_offsets_find_their_piece(commands: Commands) -> None:
    job = await commands.start("sh", "-c", "for n in 1 2 3 4 5 6 7 8 9; do echo out $n; echo err $n >&2; done")
    await ended(job)
    text = whole(job, "combined")

    assert len(text) == 9 * 12
    for after in range(len(text)):
        assert read(job, "combined", after, 5).data == text[after : after + 5]
    assert read(job, "combined", len(text)).eof


async def test_index_that_ends_early_hides_no_output_of_an_ended_command(commands: Commands) -> None:
    job = await commands.start("sh", "-c", "echo out; echo err >&2")
    await ended(job)
    os.truncate(job.folder / "index", 16)  # half an entry, as a crash may leave it

    assert whole(job, "combined") == b"out\nerr\n"
    assert read(job, "combined", 5, 2).data == b"rr"


async def test_offsets_and_streams_that_there_are_not_are_refused(commands: Commands) -> None:
    job = await commands.start("echo", "hello")
    await ended(job)

    for after in (-1, 7, 1 << 70):
        for stream in STREAMS:
            with pytest.raises(InvalidInput, match="6 bytes"):
                read(job, stream, after)
    with pytest.raises(InvalidInput, match="no stream"):
        read(job, untyped("stdin"))
    with pytest.raises(InvalidInput, match="at least one"):
        read(job, "stdout", 0, 0)
    assert read(job, "stdout", 6) == (b"", 6, 6, True)


async def test_output_is_followed_as_it_comes(commands: Commands) -> None:
    job = await commands.start("cat", stdin=True)
    got = list[bytes]()
    async with aclosing(follow(job, "stdout")) as chunks:
        for number in range(1, 6):
            await job.write_stdin(number, b"%d" % number)
            chunk = await anext(chunks)
            got.append(chunk.data)
            assert not chunk.eof
        await job.close_stdin(6)
        last = await anext(chunks)
        assert (last.data, last.eof) == (b"", True)
        assert await anext(chunks, None) is None
    await ended(job)

    assert got == [b"1", b"2", b"3", b"4", b"5"]


async def test_all_readers_see_all_output(commands: Commands) -> None:
    job = await commands.python("for n in range(20000): print(n)")

    async def everything(stream: Stream) -> bytes:
        return b"".join([chunk.data async for chunk in follow(job, stream)])

    found = await asyncio.gather(*(everything(stream) for stream in ("stdout", "combined", "stdout")))
    await ended(job)
    assert set(found) == {"".join(f"{n}\n" for n in range(20000)).encode()}


@pytest.mark.kill
async def test_follower_ends_when_the_shim_is_killed(commands: Commands) -> None:
    job = await commands.start("sh", "-c", "echo one; exec sleep 100")
    got = list[bytes]()
    async for chunk in follow(job, "combined"):
        got.append(chunk.data)
        if len(got) == 1:
            started = job.started()
            assert started is not None
            assert shim.send_signal(*started.shim, signal.SIGKILL)
            assert shim.send_signal(*started.leader, signal.SIGKILL)

    assert b"".join(got) == b"one\n"
    assert await job.wait() is None


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 7, 64])
async def test_character_over_a_border_of_chunks_is_one(commands: Commands, limit: int) -> None:
    text = "aé€😀" * 30
    job = await commands.start("printf", "%s", text)
    await ended(job)
    decoded, after, reader = "", 0, TextDecoder()
    while True:
        chunk = read(job, "stdout", after, limit)
        decoded += reader.add(chunk)
        after = chunk.next
        if chunk.eof:
            break

    assert decoded == text


@pytest.mark.parametrize("room", range(1, 12))
async def test_head_and_tail_cut_no_character(tmp_path: Path, room: int) -> None:
    job = Job(tmp_path)
    text = "aé€😀z" * 9
    (tmp_path / "stdout").write_text(text, encoding="utf-8")
    stdout = (await summarize(job, room, room)).stdout

    assert stdout.truncated
    assert text.startswith(stdout.head)
    assert text.endswith(stdout.tail)
    assert room - 3 <= len(stdout.head.encode()) <= room
    assert room - 3 <= len(stdout.tail.encode()) <= room


@pytest.mark.parametrize(
    ("data", "lines", "head", "tail", "truncated"),
    [
        (b"", 0, "", "", False),
        (b"one\ntwo", 2, "one\ntwo", "", False),
        (b"one\ntwo\n", 2, "one\ntwo\n", "", False),
        (b"\xff\xfebad \xe2\x82", 1, "��bad �", "", False),
        (b"0123456789abcdef", 1, "0123456789abcdef", "", False),
        (b"0123456789abcdefg", 1, "01234567", "9abcdefg", True),
        (b"\x80" * 20, 1, "�" * 8, "�" * 5, True),
    ],
)
async def test_summary_counts_lines_and_replaces_what_is_no_text(
    tmp_path: Path, data: bytes, lines: int, head: str, tail: str, truncated: bool
) -> None:
    (tmp_path / "stdout").write_bytes(data)
    stdout = (await summarize(Job(tmp_path), 8, 8)).stdout

    assert (stdout.bytes, stdout.lines, stdout.truncated) == (len(data), lines, truncated)
    assert (stdout.head, stdout.tail) == (head, tail)
    assert stdout.sha256 == hashlib.sha256(data).hexdigest()


async def test_summary_says_what_is_missing(commands: Commands) -> None:
    job = await commands.start("sh", "-c", "echo out; echo err >&2")
    await ended(job)
    os.truncate(job.folder / "stdout", 1)
    (job.folder / "stderr").unlink()

    assert (await summarize(job)).missing == 3 + 4


async def test_endless_output_passes_through_no_memory(commands: Commands) -> None:
    """`yes` to a limit, as a host would run it: bytes are exact, and neither shim nor reader grows with them."""
    amount = size(32 << 20, 1 << 30)
    job = await commands.start("sh", "-c", f"yes perdure | head -c {amount}")
    started = job.started()
    assert started is not None
    peak = dict[str, int]()

    def measure() -> bool:
        try:
            text = Path(f"/proc/{started.shim.pid}/status").read_text()
            peak.update({line.split()[0]: int(line.split()[1]) for line in text.splitlines() if "VmHWM" in line})
        except OSError:
            pass
        return not job.held()

    await until(measure)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status, summary = await ended(job), await summarize(job)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    assert (status.code, status.stdout, status.dropped) == (0, amount, 0)
    assert summary.stdout.bytes == amount
    assert summary.stdout.lines == -(-amount // 8)
    assert summary.stdout.head.startswith("perdure\nperdure\n")
    assert peak["VmHWM:"] < 24 << 10
    assert grown < 5 << 10


# ---------------------------------------------------------------------- disks


async def test_file_that_takes_no_more_is_given_up_and_the_status_comes(commands: Commands) -> None:
    """A limit on file sizes, which the shim inherits: its writes fail as on a full disk, in the middle of one."""
    await (await commands.start("true")).wait()
    process = commands.spawner._process
    assert process is not None
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    job = await commands.python("import os\nos.write(2, b'err')\nfor _ in range(300): os.write(1, bytes(1000))")
    status, summary = await ended(job), await summarize(job)

    assert (status.end, status.code) == ("exited", 0)
    assert (status.stdout, status.stderr, status.dropped) == (100_000, 3, 200_000)
    assert status.error == "stdout: File too large"
    assert (summary.stdout.bytes, summary.missing) == (100_000, 0)
    assert len(whole(job, "combined")) == 100_003


async def test_full_disk_costs_output_and_not_the_result(commands: Commands, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    try:
        job = Job(disk / "job")
        job.create()
        request = commands.request(job, ["sh", "-c", "yes | head -c 1000000; echo err >&2; exit 3"])
        await commands.spawner.start(request)
        status, summary = await ended(job), await summarize(job)

        assert (status.end, status.code) == ("exited", 3)
        assert status.error == "stdout: No space left on device"
        assert status.stdout + status.stderr + status.dropped == 1_000_004
        assert 0 < summary.stdout.bytes == status.stdout < 256 << 10
        full = Job(disk / "full")
        full.create()
        (disk / "rest").write_bytes(bytes(max(0, os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize)))
        refused = await commands.spawner.start(_in(full, request))
        assert str(refused) == "SpawnFailed(stage='folder', number=28)"
    finally:
        await until(lambda: subprocess.run(["umount", disk], capture_output=True).returncode == 0)  # a shim is leaving


def _in(job: Job, request: StartRequest) -> StartRequest:
    return StartRequest(job.folder, request.token, request.argv, request.env, request.cwd)
