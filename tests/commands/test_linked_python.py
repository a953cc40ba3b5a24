"""An environment whose Python is a link to a link, as uv, asdf, mise and Homebrew make them, in every sandbox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

import perdure
from perdure.commands.job import StartedCommand
from perdure.commands.sandbox import IMPLEMENTATIONS, HelperPrograms, examine, links_to, rules_of
from perdure.model.sandbox import Confinement, Implementation
from tests.commands.conftest import Commands, ended, printed

FOLDERS = ":".join(
    [str(Path(perdure.__file__).parents[1]), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
)


@pytest.fixture
def linked_python(tmp_path: Path) -> Path:
    """Return the Python of an environment: a link to a link, which leads through the link of a folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "current").symlink_to(sys.base_prefix)
    (tmp_path / "bin" / "python3").symlink_to("../current/bin/python3")
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    (environment / "pyvenv.cfg").write_text(f"home = {tmp_path}/bin\n")
    (environment / "bin" / "python").symlink_to(tmp_path / "bin" / "python3")
    return environment / "bin" / "python"


def run(python: Path, program: str, *argv: str) -> str:
    """Run a program that imports this package by another Python; returns what it prints."""
    env = {**os.environ, "PYTHONPATH": FOLDERS}
    done = subprocess.run([python, "-c", program, *argv], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


TRY = "import asyncio, sys; from perdure.cli.sandbox import try_python; print(asyncio.run(try_python(sys.argv[1])))"


def test_python_that_is_a_link_to_a_link_runs_in_every_sandbox(linked_python: Path, how: Implementation) -> None:
    assert run(linked_python, TRY, how) == ""


def test_doctor_names_a_python_that_its_sandbox_does_not_run(tmp_path: Path) -> None:
    if all(examine(how).refused for how in IMPLEMENTATIONS):
        pytest.skip("this machine has no sandbox for commands")
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} "$@"\n')
    wrapper.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": FOLDERS, "PYTHONHOME": sys.base_prefix}
    done = subprocess.run(
        [wrapper, "-m", "perdure", "doctor", "--sandbox", "--json"],
        executable=os.path.realpath(sys.executable), env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 1
    assert json.loads(done.stdout)["python"] == (
        f"its program cannot be run (ENOENT: No such file or directory): {str(wrapper)!r} was looked for, inside the "
        "sandbox, which has the folders of the system and those that are granted. If it is somewhere else, grant its "
        "folder: Workspace(read=[…])"
    )


def test_links_on_the_way_are_found_in_folders_and_files(tmp_path: Path) -> None:
    (tmp_path / "real" / "bin").mkdir(parents=True)
    (tmp_path / "real" / "bin" / "python3.9").touch()
    (tmp_path / "real" / "bin" / "python3").symlink_to("python3.9")
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "python").symlink_to(f"{tmp_path}/folder/../folder/bin/python3")
    (tmp_path / "round").symlink_to("round")

    found = links_to(f"{tmp_path}/python", f"{tmp_path}/round", f"{tmp_path}/gone", "")

    assert found == tuple(f"{tmp_path}/{name}" for name in ("python", "folder", "real/bin/python3", "round"))


async def test_link_grants_nothing_that_it_leads_to(
    commands: Commands, sandbox: Confinement, tmp_path: Path, how: Implementation
) -> None:
    """The sandbox has the link, and not the folder behind it."""
    if how == "landlock":
        pytest.skip("Landlock makes no view of its own: the links are those of the host")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    (tmp_path / "link").symlink_to("private")
    job = commands.job()
    program = f"readlink {tmp_path}/link; cat {tmp_path}/link/key || echo refused"
    request = commands.request(job, ["sh", "-c", program], cwd=sandbox.write[0])
    rules = rules_of(sandbox, HelperPrograms(links=(f"{tmp_path}/link", f"{tmp_path}/gone")))
    started = await commands.spawner.start(replace(request, rules=rules))
    await ended(job)

    assert isinstance(started, StartedCommand), started
    assert printed(job) == "private\nrefused\n"
