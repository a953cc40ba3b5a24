"""Every program that a tool of a workspace runs is confined as its commands are: what a model asks for, git, scripts of
packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure import Runtime, Workspace
from perdure.commands.sandbox import IMPLEMENTATIONS, examine
from perdure.workspace.policy import Policy
from tests import programs
from tests.programs import missing
from tests.workspace.asking import Conversation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="commands run on Linux")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    if all(examine(how).refused for how in IMPLEMENTATIONS):
        missing("namespaces", "no sandbox can be made here")
    (tmp_path / "secret").write_text("secret")
    found = tmp_path / "work"
    found.mkdir()
    return found


@pytest.fixture
async def model(work: Path, tmp_path: Path) -> AsyncIterator[Conversation]:
    workspace = Workspace([work], policy=Policy((), otherwise="allow"), accept=["git"])
    found = Conversation(workspace.tools(commands=True))
    async with Runtime(tmp_path / "store" / "a.db", agents=[found.agent]) as found.runtime:
        found.session = await found.runtime.session("s")
        yield found


async def test_every_program_is_confined(model: Conversation, work: Path) -> None:
    subprocess.run([programs.git(), "init", "-q", work], check=True)
    answer = await model.call("run_command", command="cat ../secret; echo done")
    await model.call("git", operation="status")
    rows = [await model.runtime.processes.get(each.id) for each in await model.runtime.processes.list()]
    confined = {row.registration.input["sandbox"]["how"] for row in rows}

    assert answer["stdout"] == "done\n"
    assert len(rows) == 2
    assert confined <= set(IMPLEMENTATIONS)


SCRIPT = "cat ../secret > stolen; touch ../made; echo ran > ran"


async def test_script_of_a_package_reaches_nothing_outside(model: Conversation, work: Path) -> None:
    if shutil.which("npm") is None:
        missing("node", "npm is not installed")
    package = {"name": "package", "version": "1.0.0", "scripts": {"postinstall": SCRIPT}}
    (work / "package.json").write_text(json.dumps(package))
    command = ["npm", "install", "--offline", "--no-audit", "--no-fund", "--no-update-notifier"]
    env = {"PATH": os.environ["PATH"], "HOME": str(work)}
    subprocess.run(command, cwd=work, env=env, capture_output=True, check=True)
    stolen = (work / "stolen").read_text(), (work.parent / "made").exists()
    (work.parent / "made").unlink()
    for name in ("stolen", "ran"):
        (work / name).unlink()

    answer = await model.call("run_command", command=command)

    assert stolen == ("secret", True), "without a sandbox it reaches out, or this test proves nothing"
    assert answer["exit_code"] == 0
    assert (work / "ran").exists()
    assert (work / "stolen").read_text() == ""
    assert not (work.parent / "made").exists()


CHANGES_ITS_PYTHON = """
import asyncio, sys
from perdure import Runtime, Workspace

async def main(root, store, *accept):
    workspace = Workspace([root], accept=accept)
    async with Runtime(store) as runtime:
        words = ["sh", "-c", f"echo changed > {root}/.venv/marked; echo made > {root}/made"]
        job = await runtime.command(words, sandbox=workspace.confinement(store))
        await job.result()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("accepted", [False, True], ids=["by default", "accepted"])
def test_the_python_of_the_host_cannot_be_changed_in_a_root_unless_that_is_accepted(
    work: Path, tmp_path: Path, accepted: bool
) -> None:
    if all(examine(how).refused for how in ("bubblewrap", "namespaces")):
        missing("namespaces", "no mount namespace can be made here")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", work / ".venv"], check=True)
    python, store = work / ".venv" / "bin" / "python", tmp_path / "store" / "a.db"
    line = [str(python), "-c", CHANGES_ITS_PYTHON, str(work), str(store)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([each for each in sys.path if each])}
    line += ["python"] if accepted else []
    subprocess.run(line, env=env, check=True)

    assert (work / "made").exists(), "the root can be changed"
    assert (work / ".venv" / "marked").exists() == accepted
