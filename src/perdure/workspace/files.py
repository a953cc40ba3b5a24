"""Reading and replacing single files of a workspace, each at a `Location` that the paths have checked.

A file is never changed in place. Its new content is written to a temporary file in the same folder, synced, and renamed
over it; then the folder is synced. Whoever reads sees the earlier content or the new one. The temporary name follows
from the call that writes it: what a killed attempt left is found and replaced by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import stat
from collections.abc import Callable
from typing import NamedTuple

from perdure.errors import ToolError
from perdure.model.codec import MAX_VALUE
from perdure.workspace.paths import Location, Paths

PIECE = 1024 * 1024

MAX_EDIT = 64 * 1024 * 1024
"""Bytes of a file that may be edited: it is held in memory, before and after."""

MAX_DIGESTED = 4 * 1024 * 1024 * 1024
"""Bytes of a file that may be replaced or deleted: it is read from end to end, twice. A command makes one of any size,
with nothing in it, in no time."""

MAX_KEPT = MAX_VALUE
"""Bytes of earlier content that are kept for an undo."""

RENAME_NOREPLACE = 1
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Content(NamedTuple):
    """What a file holds. `data` is None where there is more of it than was asked for; `digest` is "" where none was."""

    digest: str
    size: int
    mode: int
    data: bytes | None


def content(
    paths: Paths, place: Location, limit: int, known: Content | None = None, digested: bool = True
) -> Content | None:
    """What is at a place; None where nothing is. A link is what it says.

    `known` is what was there before: comparing with it takes a tenth of the time of a digest. Not `digested`: there is
    no digest, the caller makes it together with another one (`digests`).
    """
    if place.folder < 0:
        return None
    try:
        found = os.stat(place.name, dir_fd=place.folder, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            return _of_link(os.readlink(place.name, dir_fd=place.folder))
        descriptor = paths.open_file(place.folder, place.name)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb", buffering=0) as file:
        found = os.fstat(descriptor)
        mode = stat.S_IMODE(found.st_mode)
        if found.st_size <= limit and len(data := _read(file.fileno(), limit + 1)) <= limit:
            if not digested:
                return Content("", len(data), mode, data)
            same = known is not None and data == known.data
            return Content(known.digest if known and same else hashlib.sha256(data).hexdigest(), len(data), mode, data)
        if not digested:
            return Content("", found.st_size, mode, None)
        if found.st_size > MAX_DIGESTED:
            raise ToolError(
                f"{place.name} has {found.st_size:,} bytes; files of up to {MAX_DIGESTED:,} can be changed",
                code="file_too_large",
            )
        file.seek(0)
        seen, left = hashlib.sha256(), os.fstat(descriptor).st_size
        while left > 0 and (piece := file.read(min(PIECE, left))):
            seen.update(piece)
            left -= len(piece)
        return Content(seen.hexdigest(), found.st_size - left, mode, None)


def digests(before: bytes, after: bytes, same: int) -> tuple[str, str]:
    """The digests of two contents whose first `same` bytes are the same: these are looked at once."""
    first = hashlib.sha256(memoryview(before)[:same])
    second = first.copy()
    first.update(memoryview(before)[same:])
    second.update(memoryview(after)[same:])
    return first.hexdigest(), second.hexdigest()


def _of_link(target: str) -> Content:
    data = os.fsencode(target)
    return Content(f"link:{hashlib.sha256(data).hexdigest()}", len(data), 0o777, None)


def _read(descriptor: int, most: int) -> bytes:
    """Up to `most` bytes, in as few calls as there are."""
    data = os.read(descriptor, min(most, max(os.fstat(descriptor).st_size + 1, 1)))
    pieces = [data]
    left = most - len(data)
    while data and left > 0:
        data = os.read(descriptor, min(PIECE, left))
        pieces.append(data)
        left -= len(data)
    return pieces[0] if len(pieces) <= 2 and not data else b"".join(pieces)


def temporary_name(key: str, path: str) -> str:
    """Return the name of the file to which a call writes before it renames, the same in every attempt.

    The prefix is the project's old name, so that a call that an older version began finds and replaces its own file.
    """
    return f".mainstay-{hashlib.sha256(f'{key} {path}'.encode()).hexdigest()[:24]}.tmp"


def replace(place: Location, data: bytes, key: str, mode: int | None, new: bool = False) -> None:
    """Put `data` in the place of a file, or where there is none. `mode` None is that of a new file of this user.

    `new`: refuse with FileExistsError where something is there by now.
    """
    folder, name = place.folder, place.name
    temporary = temporary_name(key, place.path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=folder)  # of an attempt that was killed; a link is removed, not followed
    descriptor = os.open(temporary, NEW_FILE, 0o666 if mode is None else 0o600, dir_fd=folder)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if mode is not None:
                os.fchmod(descriptor, mode & 0o777)  # as with any write, a program stops running as its owner
                _keep_owner(descriptor, folder, name)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if not (new and _rename_new(folder, temporary, name)):
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:  # whatever it was, no half of a file stays behind
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    os.fsync(folder)


def _rename_new(folder: int, temporary: str, name: str) -> bool:
    """Rename without replacing; False where the system or the file system cannot, and nothing was there just now.

    Not by a hard link: killed before the temporary name is gone, it would leave a file with two.
    """
    renameat2 = _renameat2()
    if renameat2 is not None:
        if renameat2(folder, os.fsencode(temporary), folder, os.fsencode(name), RENAME_NOREPLACE) == 0:
            return True
        error = ctypes.get_errno()
        if error not in (errno.EINVAL, errno.ENOSYS, errno.EPERM):
            raise OSError(error, os.strerror(error))
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


@functools.cache
def _renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    found = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return found


def _keep_owner(descriptor: int, folder: int, name: str) -> None:
    """Root edits the files of others: they stay theirs."""
    if os.geteuid() != 0:
        return
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        os.fchown(descriptor, found.st_uid, found.st_gid)


def remove(place: Location) -> None:
    """Delete a file, or a link itself."""
    os.unlink(place.name, dir_fd=place.folder)
    os.fsync(place.folder)


def edited(data: bytes, old: str, new: str, replace_all: bool, path: str) -> tuple[bytes, int, int]:
    """The content with `old` replaced, how often it was there, and from which byte on. Raises ToolError where that is
    not decided."""
    wanted = old.encode()
    at = data.find(wanted)
    if at >= 0 and not replace_all and data.find(wanted, at + 1) < 0:
        whole = memoryview(data)
        return b"".join((whole[:at], new.encode(), whole[at + len(wanted) :])), 1, at  # the usual case, in one pass
    count = data.count(wanted)
    if count == 0:
        hint = ""
        if b"\r\n" in data and "\n" in old and "\r\n" not in old:
            hint = " (its lines end with \\r\\n)"
        elif old.strip() and old.strip().encode() in data:
            hint = " (without the white space around it, it is there)"
        raise ToolError(f"{path} does not contain that text{hint}: read the file, and give it exactly", code="no_match")
    if not replace_all:
        place, lines = -1, list[int]()
        while len(lines) < 5 and (place := data.find(wanted, place + 1)) >= 0:
            lines.append(data.count(b"\n", 0, place) + 1)
        where = ", ".join(str(each) for each in lines) + (", …" if len(lines) == 5 else "")
        raise ToolError(
            f"{path} contains that text more than once (lines {where}): give more of what is around it, "
            "or replace_all=true",
            code="several_matches",
            data={"lines": lines},
        )
    return data.replace(wanted, new.encode()), count, at
