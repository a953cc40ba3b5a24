"""Paths of a workspace: the one place where a path that a model wrote becomes an open file or folder.

    text → names below a root → off limits? → a walk from the root, one folder at a time → `Location`

A `Location` is an open descriptor of the folder and a name in it. Whatever is done to a file is done to that pair, so a
folder that is swapped for a link after the walk changes nothing: the descriptor is that of the folder that was checked.

Links. The walk opens every folder without following links. Where it meets one, it reads the link, joins its target to
the names so far and begins again at a root: what a link leads to is held to the same rules as what was written, each
time, at its use. `..` is taken from names only, never from the file system, and one that leads above a root is refused.
The kernel's own RESOLVE_BENEATH would do the walk in one call; it exists on Linux alone, does not tell which names it
went through, and these are what is off limits. The walk costs some 3 µs for each folder.

Off limits, whether or not it exists yet, by whatever capital letters or invisible characters it is written:

    the store               its database and everything beside it that begins with the same name, `.perdure`, and
                            `.mainstay`, its name in older versions
    .git/config, hooks      at any depth: they name programs that git runs, and may hold credentials
    everything in .git      for changes; a `.git` itself may not be made either, because a file of that name points git
                            to another repository
    the Python of the host  for changes, with its environment and this package, where they are in a root: the host runs
                            what is there, outside of every sandbox

Files. Only regular files are opened, without waiting for the other end of a pipe. One with a second name (a hard link)
may be a file of somewhere else: it is refused unless the host allows it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import unicodedata
from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple

from perdure.errors import InvalidDefinition, ToolError, quoted
from perdure.ports.store import OLD_STORE_FOLDER, STORE_FOLDER

MAX_LINKS = 40
"""The limit of the kernel: a path with more links is a loop."""

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
PASSED = FOLDER | getattr(os, "O_PATH", 0)
"""Flags to open a folder on the way, in which only the next name is looked up."""
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

PSEUDO = ("/proc", "/sys", "/dev")
"""Pseudo file systems: reading them can reveal secrets of this process, and writing acts on the machine."""

GIT = re.compile(r"\.git|git~\d+")
GIT_PRIVATE = frozenset({"config", "config.worktree", "hooks"})
GIT_FOLDER = ".git"

CODES = {
    errno.ENOENT: ("not_found", "there is no such file or folder"),
    errno.ENOTDIR: ("not_a_folder", "a part of it is no folder"),
    errno.EISDIR: ("not_a_file", "it is a folder"),
    errno.ENXIO: ("not_a_file", "it is a socket, or a device that is not there"),
    errno.EACCES: ("permission_denied", "this user may not do that"),
    errno.EPERM: ("permission_denied", "this user may not do that"),
    errno.EROFS: ("permission_denied", "the file system is read-only"),
    errno.ENAMETOOLONG: ("invalid_path", "it is too long"),
    errno.ELOOP: ("file_changed", "it became a link while it was looked at: try again"),
    errno.EEXIST: ("file_exists", "it is there already"),
    errno.ENOSPC: ("disk_full", "there is no room left on the disk"),
    errno.EDQUOT: ("disk_full", "the quota is used up"),
}


@contextlib.contextmanager
def telling(path: str) -> Generator[None, None, None]:
    """Turn an OSError about a path into a ToolError for the model."""
    try:
        yield
    except OSError as error:
        raise _told(path, error) from None


def _told(path: str, error: OSError) -> ToolError:
    code, why = CODES.get(error.errno or 0, ("file_error", error.strerror or type(error).__name__))
    return ToolError(f"{path}: {why}", code=code)


class Location(NamedTuple):
    """A name in an open folder. `names` lead there from `root` without links; empty names mean the root itself.

    `folder` is -1 if folders on the way are missing.
    """

    root: str
    names: tuple[str, ...]
    folder: int

    @property
    def name(self) -> str:
        return self.names[-1] if self.names else "."

    @property
    def path(self) -> str:
        """Return the absolute path without links. It can be stored and located again."""
        return "/".join((self.root, *self.names))


class Paths:
    """The roots of a workspace and the paths in them that are off limits. `kept`: folders that may be read only."""

    def __init__(
        self, roots: Sequence[str], hard_links: bool = False, store: str | None = None, kept: Sequence[str] = ()
    ) -> None:
        self.roots, self.hard_links = tuple(roots), hard_links
        self.kept = tuple([each for each in kept if self.covers(each)])
        self._store: dict[str, tuple[list[str], str]] = {}
        if store is not None:
            folder, base = os.path.split(os.path.abspath(store))
            folder = os.path.realpath(folder)
            for root in self.roots:
                if folder == root or folder.startswith(f"{root}/"):
                    below = [_fold(name) for name in folder[len(root) :].split("/") if name]
                    self._store[root] = (below, _fold(base))

    def sparing(self, store: str | None) -> Paths:
        """Return these paths with one more path off limits: the store's."""
        return self if store is None else Paths(self.roots, self.hard_links, store, self.kept)

    @property
    def stores(self) -> list[str]:
        """Return the absolute paths of stores that are off limits. Names below a root are case-folded."""
        return ["/".join((root, *folder, base)) for root, (folder, base) in self._store.items()]

    def shown(self, place: Location) -> str:
        """Return a path as a model writes it: relative to the first root, or absolute in another root."""
        return "/".join(place.names) or "." if place.root == self.roots[0] else place.path

    def covers(self, path: str) -> bool:
        return self.below(path) is not None

    def changeable(self, path: str) -> bool:
        """True if tools and commands of the workspace may change the target of an absolute path."""
        real = os.path.realpath(path)
        return self.covers(real) and not any(leads_into(real, each) for each in self.kept)

    # ------------------------------------------------------------------ from text to a place

    @contextlib.contextmanager
    def locate(
        self, path: str, *, change: bool = False, follow: bool = True, missing: bool = False, make: bool = False
    ) -> Generator[Location, None, None]:
        """Resolve a model's path to a location. Its folder is open until the context ends.

        `change`: the caller will change the file. `follow`: follow a link in the last name, too. Missing folders on the
        way raise ToolError, unless `missing` accepts them or `make` creates them.
        """
        root, names = self._parse(path)
        for _ in range(MAX_LINKS):
            self.check(root, names, change)
            try:
                found = self._walk(root, names, follow, missing, make)
            except OSError as error:
                raise _told(path, error) from None
            if isinstance(found, Location):
                break
            root, names = self._join(path, root, *found)
        else:
            raise ToolError(f"{path}: it has more than {MAX_LINKS} links on the way", code="invalid_path")
        try:
            yield found
        finally:
            if found.folder >= 0:
                os.close(found.folder)

    def _parse(self, path: str) -> tuple[str, tuple[str, ...]]:
        if "\0" in path or not path:
            raise ToolError(f"{quoted(path):.200} is no path", code="invalid_path")
        try:
            path.encode()
        except UnicodeEncodeError:
            raise ToolError(
                "the path is not UTF-8: files with such names cannot be named here", code="invalid_path"
            ) from None
        found = self.below(path) if path.startswith("/") else (self.roots[0], _normal(path.split("/")))
        if found is None or found[1] is None:
            raise self._outside(path)
        return found[0], found[1]

    def below(self, path: str) -> tuple[str, tuple[str, ...] | None] | None:
        """Return the innermost root of an absolute path and the names below it, or None outside of all roots."""
        wanted = _normal(path.split("/"))
        for root in sorted(self.roots, key=len, reverse=True):
            above = tuple(root.split("/")[1:])
            if wanted is not None and wanted[: len(above)] == above:
                return root, wanted[len(above) :]
        return None

    def _outside(self, path: str) -> ToolError:
        return ToolError(
            f"{path} is outside of the workspace: give a path below {', '.join(self.roots)}", code="outside_workspace"
        )

    def _walk(
        self, root: str, names: tuple[str, ...], follow: bool, missing: bool, make: bool
    ) -> Location | tuple[tuple[str, ...], str, tuple[str, ...]]:
        """Open the folders on the way. Returns the location or, at a link, the names before, its target, the rest."""
        last = len(names) - 2
        folder = os.open(root, FOLDER if last < 0 else PASSED)
        try:
            for index, name in enumerate(names[:-1]):
                try:
                    inner = self._enter(folder, name, FOLDER if index == last else PASSED, make)
                except OSError as error:
                    if error.errno in (errno.ENOTDIR, errno.ELOOP) and (target := _link(folder, name)) is not None:
                        return names[:index], target, names[index + 1 :]
                    if error.errno == errno.ENOENT and missing:
                        return Location(root, names, -1)
                    raise
                os.close(folder)
                folder = inner
            if follow and names and (target := _link(folder, names[-1])) is not None:
                return names[:-1], target, ()
            found, folder = Location(root, names, folder), -1
            return found
        finally:
            if folder >= 0:
                os.close(folder)

    @staticmethod
    def _enter(folder: int, name: str, flags: int, make: bool) -> int:
        try:
            return os.open(name, flags, dir_fd=folder)
        except FileNotFoundError:
            if not make:
                raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)
        return os.open(name, flags, dir_fd=folder)

    def _join(
        self, path: str, root: str, before: tuple[str, ...], target: str, after: tuple[str, ...]
    ) -> tuple[str, tuple[str, ...]]:
        """Return the root and names to which a link leads. Raises ToolError if they are outside of the workspace."""
        if target.startswith("/"):
            found = self.below("/".join((target, *after)))
        else:
            found = (root, _normal([*before, *target.split("/"), *after]))
        if found is None or found[1] is None:
            raise self._outside(f"{path}, a link to {target},")
        return found[0], found[1]

    # ------------------------------------------------------------------ what is off limits

    def check(self, root: str, names: Sequence[str], change: bool = False) -> None:
        """Raise ToolError if the names below a root are off limits, to read or (`change`) to change."""
        folded = [_fold(name) for name in names]
        if change and self.kept and any(leads_into("/".join((root, *names)), each) for each in self.kept):
            raise _off_limits("/".join(names), "the Python that runs this agent")
        for index, name in enumerate(folded):
            if name in (STORE_FOLDER, OLD_STORE_FOLDER):
                raise _off_limits("/".join(names), "the folder of a store")
            if GIT.fullmatch(name):
                if change:
                    raise _off_limits("/".join(names), "git's own folder, which is changed by git alone")
                if GIT_PRIVATE.intersection(folded[index + 1 :]):
                    raise _off_limits("/".join(names), "what git runs and signs in with")
        if root in self._store:
            folder, base = self._store[root]
            name = folded[len(folder)] if len(folded) > len(folder) and folded[: len(folder)] == folder else ""
            if name == base or name.startswith(f"{base}-"):
                raise _off_limits("/".join(names), "the store of this runtime")

    # ------------------------------------------------------------------ opening

    def open_file(self, folder: int, name: str) -> int:
        """Open a regular file of a folder for reading. Raises OSError, or ToolError for anything but a regular file."""
        descriptor = os.open(name, FILE, dir_fd=folder)
        try:
            self.check_file(os.fstat(descriptor), name)
        except BaseException:  # close the descriptor on any exception, cancellation too
            os.close(descriptor)
            raise
        return descriptor

    def check_file(self, found: os.stat_result, name: str) -> None:
        if stat.S_ISDIR(found.st_mode):
            raise ToolError(f"{name} is a folder", code="not_a_file")
        if not stat.S_ISREG(found.st_mode):
            raise ToolError(f"{name} is a pipe, a socket or a device", code="not_a_file")
        if found.st_nlink > 1 and not self.hard_links:
            raise ToolError(
                f"{name} has {found.st_nlink} names (hard links), and may be a file from outside of the workspace",
                code="hard_link",
            )

    @staticmethod
    def open_folder(folder: int, name: str) -> int:
        """Open a folder of a folder. Raises OSError for a link instead of following it."""
        return os.open(name, FOLDER, dir_fd=folder)


def check_roots(roots: object) -> tuple[str, ...]:
    """Resolve the links of a host's roots. Raises InvalidDefinition if one is not usable."""
    if isinstance(roots, str | os.PathLike):
        roots = [roots]
    if not isinstance(roots, Iterable):
        raise InvalidDefinition(f"Workspace(roots={quoted(roots)}) is not usable: give a list of folders")
    found: list[str] = []
    for root in roots:
        try:
            text = os.fspath(root)
            path = os.path.realpath(text)
            path.encode()
            mode = os.stat(path).st_mode
        except (OSError, ValueError, TypeError) as error:
            why = error.strerror if isinstance(error, OSError) else f"it is no path ({error})"
            raise InvalidDefinition(f"the root {quoted(root)} of a workspace is not usable: {why}") from None
        if not stat.S_ISDIR(mode):
            raise InvalidDefinition(f"the root {quoted(root)} of a workspace is no folder: give the folder it is in")
        if path == "/" or path.startswith("//") or any(path == each or path.startswith(f"{each}/") for each in PSEUDO):
            raise InvalidDefinition(f"{path} is no root for a workspace: give a folder of a project")
        if path not in found:
            found.append(path)
    if not found:
        raise InvalidDefinition("a workspace has one root at least: Workspace(roots=['.'])")
    return tuple(found)


def leads_into(path: str, folder: str) -> bool:
    """True if an absolute path is a folder or lies in it, ignoring case."""
    return _fold(f"{path}/").startswith(_fold(f"{folder}/"))


def _normal(parts: Iterable[str]) -> tuple[str, ...] | None:
    """Remove empty names and `.`, and resolve `..`. Returns None if `..` leads above the first name."""
    names: list[str] = []
    for part in parts:
        if part == "..":
            if not names:
                return None
            names.pop()
        elif part and part != ".":
            names.append(part)
    return tuple(names)


def _fold(name: str) -> str:
    """Normalise a name as a file system may that ignores case, composition and invisible characters."""
    if not name.isascii():
        name = "".join(c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c) != "Cf")
    return name.casefold().rstrip(". ")


def _link(folder: int, name: str) -> str | None:
    """Return the target of a link, or None if the name is not a link."""
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def _off_limits(path: str, what: str) -> ToolError:
    return ToolError(f"{path} is off limits: {what}", code="outside_workspace")
