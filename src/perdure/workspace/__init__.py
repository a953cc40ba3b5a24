"""Workspaces: the folders of a machine that an agent may work in, and the tools with which it does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perdure.errors import InvalidDefinition, quoted
from perdure.model import validate
from perdure.model.sandbox import Confinement, SandboxGap, SandboxLimits, check_gaps
from perdure.workspace.confinement import own_python, with_paths
from perdure.workspace.paths import Paths, check_roots

if TYPE_CHECKING:
    from perdure.workspace.policy import Policy
    from perdure.workspace.tools import FileTools

NO_LIMITS = SandboxLimits()


class Workspace:
    """Folders that an agent may read and change, and nothing outside of them: `Agent(tools=[workspace.tools()])`.

    Relative paths are below the first of `roots`. Links are followed as far as they stay in the workspace. Git's
    configuration and hooks, and the store, are off limits. A file with several names (hard links) may be one from
    outside, and is refused; `hard_links=True` lets it be read, as package managers that share files need it.

    Commands are confined to it by the operating system (`confinement`), in a sandbox that a self-test of this machine
    chooses. `network`: they may use the host's. `read`: other folders that they may read and run programs from; those
    of the system and of this Python are always among them. `limits`: how much they may use. `accept`: gaps that the
    host accepts by name (`model.sandbox.SandboxGap`). `unsandboxed`: where nothing confines them they run all the
    same; otherwise they are refused there. `policy` says which of them run, and which a person is asked about; without
    one, that is all that do more than read.
    """

    def __init__(  # noqa: PLR0913 - each by name
        self,
        roots: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        hard_links: bool = False,
        network: bool = False,
        policy: Policy | None = None,
        read: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
        limits: SandboxLimits = NO_LIMITS,
        accept: Sequence[SandboxGap] = (),
        unsandboxed: bool = False,
    ) -> None:
        validate.flag(hard_links, "hard_links", InvalidDefinition)
        if policy is not None:
            from perdure.workspace.policy import Policy  # noqa: PLC0415  # who gives one has imported it

            if not isinstance(policy, Policy):
                raise InvalidDefinition(f"policy={quoted(policy)} is no Policy of perdure.workspace.policy: make one")
        self._policy = policy
        checked, gaps = check_roots(roots), check_gaps(accept, InvalidDefinition)
        self._paths = Paths(checked, hard_links, kept=own_python(checked, "python" in gaps))
        if not isinstance(limits, SandboxLimits):
            raise InvalidDefinition(f"limits={quoted(limits):.200} is not usable: give SandboxLimits(…)")
        self._confinement = Confinement(
            write=self._paths.roots,
            read=check_roots(read) if read else (),
            network=validate.flag(network, "network", InvalidDefinition),
            limits=limits,
            accept=gaps,
            unsandboxed=validate.flag(unsandboxed, "unsandboxed", InvalidDefinition),
        )

    @property
    def roots(self) -> tuple[str, ...]:
        """The folders, as absolute paths without links."""
        return self._paths.roots

    def confinement(self, store: str | os.PathLike[str] | None = None) -> Confinement:
        """What a command of this workspace may do: `command(…, sandbox=workspace.confinement(store))`.

        This is where the paths of a workspace become rules for the operating system. `store`: the path of the
        runtime's store, which no command sees. Raises SandboxUnavailable where that cannot be: it is in a root itself.
        """
        return with_paths(self._confinement, None if store is None else os.path.realpath(store))

    def tools(self, *, commands: bool = False) -> FileTools:
        """The tools for its files, as one set: read, write, edit, delete, list, search, outline. With `commands`, also
        those that run programs in it."""
        from perdure.workspace.tools import FileTools  # noqa: PLC0415  # most programs define no such tools

        if not validate.flag(commands, "commands"):
            return FileTools(self._paths)
        from perdure.workspace.checks import CheckTools  # noqa: PLC0415  # the same
        from perdure.workspace.commands import CommandTools  # noqa: PLC0415  # the same
        from perdure.workspace.git import GitTools  # noqa: PLC0415
        from perdure.workspace.policy import Policy  # noqa: PLC0415
        from perdure.workspace.spawning import Programs, ToolPart  # noqa: PLC0415

        policy = Policy.default if self._policy is None else self._policy
        programs = Programs(self._paths, policy, self.confinement)
        parts: list[ToolPart] = [CommandTools(programs), CheckTools(programs), GitTools(programs)]
        return FileTools(self._paths, programs=programs, parts=parts)

    def __repr__(self) -> str:
        return f"Workspace({list(self.roots)})"
