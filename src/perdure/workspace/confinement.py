"""The paths of a workspace as rules for the operating system."""

from __future__ import annotations

import os
import sys

from msgspec.structs import replace

from perdure.errors import SandboxUnavailable
from perdure.model.sandbox import Confinement, folder_of_store
from perdure.ports.store import OLD_STORE_FOLDER, STORE_FOLDER

GIT = ".git"
GIT_PRIVATE = ("config", "config.worktree", "hooks", "modules")
"""What names programs that git runs: for the repository, a worktree, and those inside of it."""


def with_paths(asked: Confinement, store: str | None) -> Confinement:
    """What commands of a workspace may do, with all its paths. `store` is without links.

    Git's folder is read-only as a whole: next to its configuration, a file of other names in it (`commondir`) leads git
    to another one. A host that accepts that keeps only the files that are there from being changed.
    """
    roots = asked.write
    kept = GIT_PRIVATE if "git" in asked.accept else ("",)
    read = [*asked.read, *own_python(roots, "python" in asked.accept)]
    hide = [f"{root}/{STORE_FOLDER}" for root in roots]
    # A hidden folder is made where it is missing, and no root needs a new folder under the old name.
    hide += [old for root in roots if os.path.lexists(old := f"{root}/{OLD_STORE_FOLDER}")]
    try:
        hide += () if store is None else folder_of_store(store, (*roots, *asked.read))
    except SandboxUnavailable:
        if not asked.unsandboxed:  # otherwise it runs without a sandbox
            raise
    return replace(
        asked,
        read=tuple(dict.fromkeys(read)),
        protect=tuple(f"{root}/{GIT}/{name}".rstrip("/") for root in roots for name in kept),
        hide=tuple(dict.fromkeys(hide)),
    )


def own_python(roots: tuple[str, ...], may_change: bool) -> list[str]:
    """Where this Python is, the environment that it runs in, and this package: in a root, too, unless the host accepts
    that commands change there what it runs itself. The package lies elsewhere where it is installed in editable mode;
    pytest, for one, loads its plugin."""
    package = os.path.dirname(os.path.dirname(__file__))
    folders = [os.path.realpath(folder) for folder in (sys.prefix, sys.base_prefix, package)]
    if any(f"{folders[-1]}/".startswith(f"{each}/") for each in folders[:-1]):
        folders.pop()
    granted = [root for root in roots if may_change]
    return [
        each
        for each in folders
        if each != "/" and each not in roots and not any(f"{each}/".startswith(f"{root}/") for root in granted)
    ]
