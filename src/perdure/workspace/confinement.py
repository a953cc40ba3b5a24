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
"""Entries of a `.git` folder that name programs for git to run."""


def with_paths(asked: Confinement, store: str | None) -> Confinement:
    """Return the confinement of a workspace's commands with all its paths. `store` has no symbolic links.

    The whole `.git` folder is read-only, because other files than its configuration (`commondir`) can lead git to
    another configuration. If the host accepts "git", only `GIT_PRIVATE` is protected.
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
    """Return the folders that commands need to run this Python: its base, its environment and this package, which lies
    elsewhere if it is installed in editable mode. With `may_change`, folders in a root are left out."""
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
