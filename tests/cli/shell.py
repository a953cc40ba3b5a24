"""The command line as tests use it: in this process where that is enough, in one of its own where it is not."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from typer.testing import CliRunner

from perdure import Runtime
from perdure.cli.app import app
from tests.cli.sample_agents import helper

HERE = Path(__file__).parent


class Ran(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


def shell(*args: object, store: Path | None = None, stdin: str = "", **env: object) -> Ran:
    """Run a command in this process, in the folder of the sample agents. Nothing it prints goes to a terminal."""
    variables = {"PERDURE_STORE": None if store is None else str(store)} | {k: str(v) for k, v in env.items()}
    with contextlib.chdir(HERE):
        result = CliRunner().invoke(app, [str(a) for a in args], input=stdin, env=variables)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, unhurried(result.stderr))


def unhurried(stderr: str) -> str:
    """Without what is said of a store that takes more than a second to open: on a loaded machine any does."""
    return "".join([line for line in stderr.splitlines(keepends=True) if "waiting for another process" not in line])


def shell_json(*args: object, store: Path | None = None) -> Any:
    result = shell(*args, "--json", store=store)
    return json.loads(result.stdout)


def command(*args: object, store: Path, **env: object) -> tuple[list[str], dict[str, Any]]:
    """A command for `subprocess`, in the folder of the sample agents."""
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "PERDURE_STORE")}
    variables |= {"PERDURE_STORE": str(store), "PYTHONPATH": "", "TERM": "xterm"} | {k: str(v) for k, v in env.items()}
    line = [sys.executable, "-m", "perdure", *[str(a) for a in args]]
    return line, {"cwd": HERE, "env": variables}


def process(*args: object, store: Path, stdin: str = "", **env: object) -> subprocess.CompletedProcess[str]:
    line, options = command(*args, store=store, **env)
    ran = subprocess.run(line, input=stdin, capture_output=True, text=True, timeout=120, check=False, **options)
    ran.stderr = unhurried(ran.stderr)
    return ran


def start(*args: object, store: Path, **env: object) -> subprocess.Popen[str]:
    line, options = command(*args, store=store, **env)
    return subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def wait_for_lines(path: Path, lines: int = 1) -> None:
    """Wait until a file has so many lines: another process writes it."""
    deadline = time.monotonic() + 60
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


def prepare(store: Path, work: Callable[[Runtime], Awaitable[None]]) -> None:
    """Bring a store into some state with the helper agent, and leave it."""

    async def main() -> None:
        async with Runtime(store, agents=[helper]) as runtime:
            await work(runtime)

    asyncio.run(main())


def say(store: Path, session: str, *said: str) -> None:
    """A session in which these things were said."""

    async def work(runtime: Runtime) -> None:
        for words in said:
            await (await runtime.session(session)).run(words)

    prepare(store, work)
