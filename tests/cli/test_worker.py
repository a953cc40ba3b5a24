"""`perdure worker`: processes of their own, told to stop by real signals."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure import Runtime
from tests.cli.shell import command, shell, wait_for_lines
from tests.kit import SOON

HERE = Path(__file__).parent


def start(runtime: str, *options: object, store: Path) -> subprocess.Popen[str]:
    line, where = command("worker", f"sample_worker:{runtime}", *options, store=store, PLACE=store)
    where["env"]["PYTHONPATH"] = str(HERE.parents[1])
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **where)


def ended(worker: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
    worker.send_signal(number)
    _, complaints = worker.communicate(timeout=SOON)
    return worker.returncode, complaints


def with_front(store: Path, agent: str, said: str, wait: bool = True) -> Any:
    """Say something to a session from here; the worker answers."""

    async def main() -> Any:
        async with Runtime(store, recover=False) as front:
            receipt = await (await front.session("s", agent=agent)).send(said, key=said)
            return (await receipt.result(SOON)).text if wait else receipt.turn_id

    return asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["working", "made"])
def test_a_worker_answers_until_it_is_told_to_stop(store: Path, tmp_path: Path, name: str) -> None:
    ready = tmp_path / "ready"
    worker = start(name, "--ready-file", ready, store=store)
    wait_for_lines(ready, 0)
    text = with_front(store, "helper", "hello")
    probe = shell("worker", "--check", ready)
    status, complaints = ended(worker)

    assert (text, probe.exit_code, probe.stderr) == ("You said: hello", 0, "")
    assert (status, ready.exists()) == (0, False)
    assert complaints.startswith(f"perdure: worker {worker.pid} is running")
    assert shell("worker", "--check", ready).exit_code == 1


@pytest.mark.slow
def test_the_ready_file_of_a_killed_worker_grows_old_and_is_replaced(store: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    worker = start("working", "--ready-file", ready, store=store)
    wait_for_lines(ready, 0)
    worker.kill()
    worker.communicate(timeout=SOON)
    os.utime(ready, (1, 1))
    probe = shell("worker", "--check", ready)
    worker = start("working", "--ready-file", ready, store=store)
    text = with_front(store, "helper", "hello")
    after = shell("worker", "--check", ready)

    assert probe.exit_code == 1
    assert "has not renewed its lease" in probe.stderr
    assert (text, after.exit_code) == ("You said: hello", 0)
    assert ended(worker, signal.SIGINT)[0] == 0


@pytest.mark.slow
def test_threads_of_calls_that_are_cut_off_do_not_keep_the_process(store: Path) -> None:
    worker = start("working", "--grace", 0, store=store)
    with_front(store, "hanging", "go", wait=False)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "hanging\n"

    assert ended(worker)[0] == 0


@pytest.mark.slow
def test_a_signal_while_the_store_is_opened_ends_the_worker(store: Path) -> None:
    with_front(store, "helper", "hello", wait=False)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    worker = start("working", store=store)
    assert worker.stderr is not None
    assert worker.stderr.readline().startswith("perdure: waiting for another process")
    status, _ = ended(worker)
    holder.communicate("", timeout=SOON)

    assert status == 0


HOLD = """
import sqlite3, sys
held = sqlite3.connect(sys.argv[1], isolation_level=None)
held.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "which Runtime? name one (module:attribute), for example app:runtime"),
        (("sample_worker:helper",), "sample_worker:helper is an Agent: name a Runtime that has it"),
        (("sample_worker:other",), "makes a int, neither an Agent nor a Runtime"),
        (("sample_worker:nothing",), "has no 'nothing'"),
        (("sample_worker:working", "--check", "ready"), "leave out MODULE:NAME"),
    ],
)
def test_what_is_no_runtime_is_refused(words: tuple[str, ...], told: str) -> None:
    refused = shell("worker", *words)

    assert refused.exit_code == 2
    assert told in refused.stderr
