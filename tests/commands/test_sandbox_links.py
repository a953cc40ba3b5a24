"""Links and exchanged folders in a root, while a sandbox is made of it: what is mounted is what was meant, or nothing.

A command may change its root while the next one begins there. So every name in a root may be a link by the time that it
is mounted, to a folder outside that no command may see.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from perdure.model.sandbox import Confinement, Implementation
from tests.commands.conftest import Commands, ended, printed
from tests.programs import bubblewrap
from tests.workspace import swapping

ELOOP = 40


@pytest.fixture
def root(options: dict[str, Any]) -> Path:
    """With a folder `sub` that is protected in part, and `out` beside it, of which at most `public` is granted."""
    found = Path(options["cwd"])
    for folder, word in ((found / "sub", "inside"), (found.parent / "out", "outside")):
        (folder / ".git").mkdir(parents=True)
        (folder / ".git" / "config").write_text(word)
    (found.parent / "out" / "public").mkdir()
    return found


@pytest.fixture
def protecting(options: dict[str, Any], root: Path) -> dict[str, Any]:
    return {**options, "sandbox": replace(options["sandbox"], protect=(f"{root}/sub/.git",))}


def exchange(root: Path) -> None:
    (root / "sub").rename(root / "real")
    (root / "sub").symlink_to("../out")


def untouched(root: Path) -> bool:
    out = root.parent / "out"
    names = sorted(each.name for each in out.iterdir())
    return names == [".git", "public"] and (out / ".git" / "config").read_text() == "outside"


TRY = "cat sub/.git/config; echo x > sub/.git/config; echo x > sub/made; cat real/.git/config"


async def test_link_where_something_is_protected_is_refused(
    commands: Commands, protecting: dict[str, Any], root: Path, how: Implementation
) -> None:
    if how == "landlock":
        pytest.skip("nothing is mounted there")
    exchange(root)
    failed = await commands.refused("sh", "-c", TRY, **protecting)

    assert (failed.stage, failed.number) == ("sandbox", ELOOP)
    assert untouched(root)


@pytest.mark.parametrize("grant", ["read", "write"])
async def test_folder_that_is_granted_in_a_root_is_not_looked_for_behind_a_link(
    commands: Commands, options: dict[str, Any], root: Path, how: Implementation, grant: str
) -> None:
    inner = f"{root}/sub/.git"
    found: Confinement = options["sandbox"]
    granting = replace(found, accept=(), **{grant: (*getattr(found, grant), inner)})
    options = {**options, "sandbox": granting}
    program = "cat sub/.git/config; echo x > sub/.git/config; mv sub other"
    first = await commands.start("sh", "-c", program, **options)
    await ended(first)
    kept = sorted(each.name for each in root.iterdir())
    exchange(root)
    seen = await commands.tried("sh", "-c", TRY, **options)

    assert printed(first) == "inside"
    assert kept == ["sub"]
    assert "outside" not in seen
    assert untouched(root)


@pytest.mark.parametrize("how", ["bubblewrap"], indirect=True)  # the others open what they look at
@pytest.mark.parametrize("covered", ["protect", "keep", "hide", "read", "write"])
async def test_bubblewrap_mounts_nothing_that_was_exchanged_after_a_look_at_it(
    commands: Commands, options: dict[str, Any], root: Path, monkeypatch: pytest.MonkeyPatch, covered: str
) -> None:
    slow = root.parent / "bin" / "bwrap"
    slow.parent.mkdir()
    slow.write_text(
        f"#!/bin/sh\nmv '{root}/sub' '{root}/real' && ln -s ../out '{root}/sub' && exec '{bubblewrap()}' \"$@\"\n"
    )
    slow.chmod(0o755)
    monkeypatch.setenv("PERDURE_BWRAP", str(slow))
    given: Confinement = options["sandbox"]
    found = replace(given, read=(*given.read, f"{root.parent}/out/public"))  # the link leads somewhere inside, too
    if covered == "keep":
        found = replace(found, protect=(f"{root}/.git",))
    else:
        found = replace(found, **{covered: (*getattr(found, covered), f"{root}/sub/.git")})
    failed = await commands.refused("sh", "-c", TRY, **{**options, "sandbox": found})

    assert failed.stage == "sandbox"
    assert untouched(root)


@pytest.fixture
def swapped(root: Path) -> Iterator[None]:
    """`sub` is, every other moment, a link to `out`."""
    (root / "way").symlink_to("../out")
    with subprocess.Popen([sys.executable, "-I", swapping.__file__, str(root)], stdout=subprocess.PIPE) as swapper:
        try:
            assert swapper.stdout is not None
            assert swapper.stdout.readline() == b"at work\n"
            yield
        finally:
            swapper.kill()


@pytest.mark.usefixtures("swapped")
async def test_folder_that_is_exchanged_all_the_time_leads_nowhere(
    commands: Commands, protecting: dict[str, Any], root: Path, how: Implementation
) -> None:
    if how == "landlock":
        protecting = {**protecting, "sandbox": replace(protecting["sandbox"], accept=())}
    seen = [await commands.tried("sh", "-c", TRY, **protecting) for _ in range(12)]

    assert [each for each in seen if "outside" in each] == []
    assert untouched(root)
