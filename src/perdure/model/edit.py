"""Changes of files that tools of a workspace make, as they are recorded, listed and taken back."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

PAYLOAD = "file_edit"
"""Under this name the payload of a call's start record holds its `EditPlan`."""


class EditPlan(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a call is about to make of a file, recorded before it does: recovery goes by the two digests.

    `before` and `after` are SHA-256 of the content, None where there is no file. `kept`: the blob `before` holds the
    earlier content, and the record refers to it. `mode` are the permissions that the file has, or None. `shown` is the
    path as the tool answers it; empty in records of earlier versions.
    """

    path: str
    before: str | None
    after: str | None
    kept: bool = False
    mode: int | None = None
    shown: str = ""


EditStatus: TypeAlias = Literal["applied", "not_applied", "unknown", "running"]


class FileEdit(Struct, frozen=True, gc=False, omit_defaults=True):
    """One change of a file by a call of a session (`session.edits()`).

    `path` is the path as the tool answered it, relative to the first root of the workspace; `location` is absolute.
    `before` and `after` are SHA-256 of the content, None where there was or is no file. `status` is how the call ended.
    `kept`: the earlier content is in the store, so that it can be brought back.
    """

    call_id: str
    tool: str
    path: str
    before: str | None
    after: str | None
    status: EditStatus
    kept: bool = False
    mode: int | None = None
    location: str = ""


class FileRestore(Struct, frozen=True, gc=False):
    """A file to be brought back to `target`, from any of the `states` that edits have left it in."""

    path: str
    states: tuple[str | None, ...]
    target: str | None
    mode: int | None = None


class UndoneFile(Struct, frozen=True, gc=False):
    """What `session.undo()` made of a file: "undone", or "unchanged", because it was as before already."""

    path: str
    status: Literal["undone", "unchanged"]
