"""What a caller may say about the confinement of a command."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from perdure.errors import InvalidCommand, InvalidDefinition
from perdure.model.command import Command, read_command
from perdure.model.sandbox import Confinement, SandboxLimits


def test_a_confinement_is_stored_with_its_command_and_read_back() -> None:
    asked = Confinement(
        ("/a",), ("/b",), ("/a/.git",), ("/a/.perdure",), True, SandboxLimits(processes=3), ("git",), True
    )
    command, _ = read_command(["true"], {"sandbox": asked})

    assert msgspec.convert(msgspec.to_builtins(command), Command).sandbox == asked


def test_a_command_stored_before_there_were_confinements_has_none() -> None:
    assert msgspec.convert({"argv": ["true"]}, Command).sandbox is None


@pytest.mark.parametrize(
    ("sandbox", "says"),
    [
        (True, "give a Confinement"),
        (Confinement(("relative",)), "give absolute paths"),
        (Confinement(read=("/a/../b",)), "give absolute paths"),
        (Confinement(hide=("/a\nhide /b",)), "give absolute paths"),
        (Confinement(protect=("/a\0",)), "give absolute paths"),
        (Confinement(write=("/a",) * 257), "256 are the most"),
        (Confinement(accept=("everything",)), "there is no gap"),  # type: ignore[arg-type]  # ty: ignore[invalid-argument-type]
        (Confinement(how="none"), "leave it out"),
        (Confinement(network=1), "network=1"),  # type: ignore[arg-type]  # ty: ignore[invalid-argument-type]
    ],
)
def test_a_confinement_that_is_not_usable_is_refused_with_what_to_do(sandbox: Any, says: str) -> None:
    with pytest.raises(InvalidCommand, match=says):
        read_command(["true"], {"sandbox": sandbox})


@pytest.mark.parametrize("limits", [{"processes": 0}, {"memory": -1}, {"file_size": 1.5}, {"cpu": 1 << 63}])
def test_a_limit_that_is_none_is_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidDefinition):
        SandboxLimits(**limits)
