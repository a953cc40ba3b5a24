"""The attacks once more as a user without privileges, where the tests run as root.

Such a user may not be able to reach this tree, its environment and this Python, which lie in folders of root's. In a
mount namespace of the run those folders are covered, and what is needed of them is mounted where it was.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.commands.conftest import WHOLE
from tests.programs import missing

NOBODY = 65534
NEEDED = tuple(dict.fromkeys((sys.base_prefix, str(Path(__file__).parents[2]), sys.prefix)))
SETPRIV = "exec setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all --bounding-set=-all"
PARTS = {
    "files": ["tests/workspace/test_paths.py", "tests/workspace/test_races.py"],
    "sandbox": ["tests/commands/test_sandbox.py", "tests/commands/test_sandbox_links.py"],
}
GATE = "leads_out or off_limits or any_step"


def closed(path: str) -> str | None:
    """The first folder on the way to a path that others may not enter."""
    for folder in reversed(Path(path).parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return str(folder)
    return None


def script(folder: Path, command: list[str]) -> str:
    """Run a command as that user; `folder` has a folder for each path that is needed."""
    staged = {path: shlex.quote(f"{folder}/{number}") for number, path in enumerate(NEEDED)}
    covered = dict.fromkeys(found for path in NEEDED if (found := closed(path)) is not None)
    lines = ["set -eu", *(f"mount --bind {shlex.quote(path)} {place}" for path, place in staged.items())]
    lines += [f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(each)}" for each in covered]
    for path, place in staged.items():
        lines += [f"mkdir -p {shlex.quote(path)}", f"mount --bind {place} {shlex.quote(path)}"]
    return "\n".join([*lines, f"{SETPRIV} {shlex.join(command)}"])


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run something as another user")
@pytest.mark.parametrize("part", PARTS)
def test_attacks_fail_for_an_unprivileged_user_too(part: str) -> None:
    if part == "sandbox" and not WHOLE:
        pytest.skip("its attacks are made as that user in the gate, too: the rest is in make test-commands")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *PARTS[part]]
    command += [] if WHOLE else ["-k", GATE]
    folder = Path(tempfile.mkdtemp(prefix="perdure-unprivileged-", dir="/tmp"))
    folder.chmod(0o755)
    for number in range(len(NEEDED)):
        (folder / str(number)).mkdir()
    own = folder / "own"
    own.mkdir(mode=0o700)
    os.chown(own, NOBODY, NOBODY)
    try:
        ran = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script(folder, command)],
            cwd=NEEDED[1],
            env={
                "PATH": os.environ["PATH"], "HOME": str(own), "TMPDIR": str(own), "PYTHONDONTWRITEBYTECODE": "1",
                "HYPOTHESIS_STORAGE_DIRECTORY": str(own), "PERDURE_REQUIRE": os.environ.get("PERDURE_REQUIRE", ""),
            },
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(own)
        for number in range(len(NEEDED)):
            (folder / str(number)).rmdir()  # nothing is mounted there but in the namespace
        folder.rmdir()
    if "unshare:" in ran.stderr or "mount:" in ran.stderr:
        missing("namespaces", ran.stderr.strip())
    print(ran.stdout, ran.stderr)

    assert ran.returncode == 0
    assert " passed" in ran.stdout
