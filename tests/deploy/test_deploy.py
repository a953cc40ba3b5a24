"""The files of deploy/: they are what the documentation says, and their command lines run as processes."""

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perdure import Runtime
from tests.kit import SOON, until

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE, UNIT = ROOT / "deploy" / "Dockerfile", ROOT / "deploy" / "perdure.service"


def instructions(name: str) -> list[str]:
    """The arguments of one instruction of the Dockerfile, each on one line."""
    whole = DOCKERFILE.read_text().replace("\\\n", " ")
    return [line.removeprefix(f"{name} ") for line in whole.splitlines() if line.startswith(f"{name} ")]


def settings(name: str) -> list[str]:
    """The values of one setting of the unit."""
    return [line.removeprefix(f"{name}=") for line in UNIT.read_text().splitlines() if line.startswith(f"{name}=")]


def exec_form(text: str) -> list[str]:
    found = json.loads(text[text.index("[") :])
    assert all(isinstance(each, str) for each in found)
    return list(found)


@pytest.mark.slow
async def test_the_command_line_of_the_container_runs_is_probed_and_drains(tmp_path: Path) -> None:
    [command], [probe] = instructions("CMD"), instructions("HEALTHCHECK")
    ready, data = str(tmp_path / "ready"), tmp_path / "data"
    data.mkdir(mode=0o700)
    started, probed = (
        [each.replace("/tmp/ready", ready) for each in exec_form(line)] for line in (command, probe.split(" CMD ")[1])
    )
    folder = str(Path(sys.executable).parent)  # where `perdure` is
    env = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "DATA": str(data)}
    (tmp_path / "app.py").write_text((ROOT / "deploy" / "app.py").read_text())

    worker = await asyncio.create_subprocess_exec(*started, cwd=tmp_path, env=env)
    await until(lambda: Path(ready).exists() or worker.returncode is not None)
    check = await asyncio.create_subprocess_exec(*probed, env=env)
    healthy = await check.wait()
    async with Runtime(data / "agent.db", recover=False) as front:
        text = (await (await front.session("s", agent="assistant")).run("hello")).text
    worker.send_signal(signal.SIGTERM)
    status = await asyncio.wait_for(worker.wait(), SOON)
    check = await asyncio.create_subprocess_exec(*probed, env=env, stderr=subprocess.DEVNULL)

    assert (healthy, text, status, await check.wait()) == (0, "You said: hello", 0, 1)


def test_the_container_runs_as_a_user_that_is_not_root_and_has_a_volume() -> None:
    assert instructions("USER") == ["perdure"]
    assert "--uid 10001" in instructions("RUN")[0]
    assert instructions("STOPSIGNAL") == ["SIGTERM"]
    assert exec_form(instructions("VOLUME")[0]) == ["/data"]
    assert "docker run --init" in DOCKERFILE.read_text()


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in instructions("COPY"):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists()
            assert f"!{source}" in ignored


def test_the_unit_gives_the_worker_longer_than_its_grace_period() -> None:
    words = shlex.split(settings("ExecStart")[0])
    grace = float(words[words.index("--grace") + 1])

    assert words[1:3] == ["worker", "app:runtime"]
    assert float(settings("TimeoutStopSec")[0]) >= grace + 5
    assert settings("KillSignal") == ["SIGTERM"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "perdure.service"
    program = settings("ExecStart")[0].split()[0]
    unit.write_text(UNIT.read_text().replace(program, "/bin/true"))  # it looks whether the program exists

    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)

    assert (done.returncode, [line for line in done.stderr.splitlines() if "perdure" in line]) == (0, [])
