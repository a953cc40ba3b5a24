"""Runs the source trees of `trees/` in child processes, beside the present code.

    subprocess.Popen([sys.executable, "-c", "import mainstay; ..."], env=environment_of(NEWEST))

A tree is unpacked once per process into a temporary folder, which is deleted when the process ends. Workers of xdist
share no folder.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import io
import os
import re
import shutil
import tarfile
import tempfile
from pathlib import Path

TREES = Path(__file__).with_name("trees")
NEWEST = "82f0b67"
"""The tree that tests in `make test` use."""
ALL = (NEWEST, "b8c4c5f")
PACKAGE = "mainstay"
"""The import package of every tree so far."""

ROW = re.compile(r"^\| `(?P<commit>[0-9a-f]+)\.tar\.xz` \|.*\| `(?P<digest>[0-9a-f]{64})` \|$", re.MULTILINE)
"""A row of the table in `trees/README.md`."""


class BadTree(Exception):
    """An archive of an older tree cannot be used."""


def environment_of(commit: str) -> dict[str, str]:
    """Return the environment of a child process that imports `mainstay` from the tree of `commit`.

    `GOLDEN_PACKAGE` names that package for `package.py`, so that a child may also import the modules of `tests.golden`.
    Raises BadTree if there is no archive of that commit, or if it is not the archive that `trees/README.md` describes.
    """
    source = _unpacked(commit) / "src"
    path = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "GOLDEN_PACKAGE": PACKAGE}


@functools.cache
def _unpacked(commit: str) -> Path:
    return unpack(commit, _folder())


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="old-trees-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def unpack(commit: str, folder: Path, trees: Path = TREES) -> Path:
    """Verify the archive of a commit and unpack it to `folder/<commit>`, unless that exists. Returns that folder.

    The archive is unpacked beside the target and renamed, so a process that dies while it unpacks leaves no half of a
    tree under the name, and several processes may unpack to one folder at once.
    """
    content = _verified(commit, trees)
    target = folder / commit
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"{commit}-") as unfinished:
        whole = Path(unfinished) / "tree"
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:xz") as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
            archive.extractall(whole)
        try:
            whole.rename(target)
        except OSError:
            if not target.exists():  # otherwise another process was first
                raise
    return target


def digests(trees: Path = TREES) -> dict[str, str]:
    """Return the SHA-256 of each archive by its commit, as `README.md` lists them."""
    return {row["commit"]: row["digest"] for row in ROW.finditer((trees / "README.md").read_text())}


def _verified(commit: str, trees: Path) -> bytes:
    archive, known = trees / f"{commit}.tar.xz", digests(trees)
    if commit not in known:
        listed = ", ".join(sorted(known)) or "none"
        raise BadTree(f"{trees / 'README.md'} lists no tree of commit {commit!r}: use one of these: {listed}")
    try:
        content = archive.read_bytes()
    except FileNotFoundError:
        raise BadTree(f"the archive {archive} is missing: restore it from version control") from None
    found = hashlib.sha256(content).hexdigest()
    if found != known[commit]:
        raise BadTree(
            f"the archive {archive} has the SHA-256 {found}, but README.md says {known[commit]}: an archive is never "
            "written again, so restore both files from version control"
        )
    return content
