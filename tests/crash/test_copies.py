"""Copying, recognising, restoring, compacting and deleting a store, killed at every line.

What must come of it, whatever the line:

    backup     the original is as it was; the copy is not there, or it is whole and held
    open       of a database without its lock file: it is held, at every later opening too
    restore    it is held, or refused, as before, and can be restored; or it has an id of its own and goes on.
               Never does it go on under the id of its original
    compact    everything is there, in as many pages as before or in fewer
    delete     everything is there; or it is refused until it is deleted again; or nothing is there
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure import Agent, Runtime
from perdure.errors import StoreDamaged, StoreEmptied
from perdure.model.write import Accept
from perdure.stores.sqlite.maintenance import delete, parts_of
from perdure.testing import ScriptedModel
from tests.kit import texts

pytestmark = [pytest.mark.kill, pytest.mark.slow]

SAID = ["hello", "x" * 70_000]


def killed_everywhere(what: str, template: Path, folder: Path) -> Iterator[tuple[Path, bool]]:
    """The folders that the killed processes left, and last the one of a process that was not; whether it was killed."""
    command = [sys.executable, "-m", "tests.crash.copying", what, str(template), str(folder)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=400).stdout
    count = int(said)
    assert count > 10
    for number in range(1, count + 2):
        yield folder / str(number), number <= count


async def original(folder: Path) -> str:
    async with Runtime(folder / "agent.db", agents=[Agent(ScriptedModel([SAID[1]]))]) as runtime:
        await (await runtime.session("chat")).run(SAID[0])
        return runtime.store.identity()


async def history(path: Path) -> tuple[list[str], str, str | None]:
    async with Runtime(path) as runtime:
        facts = await runtime.store.facts(deep=True)
        assert facts.checks == ("ok",)
        said = texts(await (await runtime.session("chat")).history())
        return said, runtime.store.identity(), runtime.store.held()


async def history_or_refusal(path: Path) -> tuple[list[str], str, str | None]:
    try:
        return await history(path)
    except StoreDamaged as error:
        return [], "", str(error)


async def goes_on(path: Path) -> bool:
    async with Runtime(path, agents=[Agent(ScriptedModel(["more"]))]) as runtime:
        receipt = await (await runtime.session("chat")).send("and?")
        await runtime.wait_idle()
        row = await runtime.store.session("chat")
        assert row is not None
        return row.turn is None and receipt.turn_id == "chat.2"


@pytest.mark.gate
async def test_a_killed_backup_leaves_no_copy_or_a_whole_one(tmp_path: Path) -> None:
    own = await original(tmp_path / "template")
    made = 0
    for folder, killed in killed_everywhere("backup", tmp_path / "template", tmp_path / "killed"):
        assert await history(folder / "agent.db") == (SAID, own, None)
        if not killed or (folder / "copy.db").exists():
            made += 1
        else:
            async with Runtime(folder / "agent.db") as runtime:
                await runtime.backup(folder / "copy.db")
        said, identity, held = await history(folder / "copy.db")
        assert (said, identity, "is a backup" in (held or "")) == (SAID, own, True)
        if not killed:
            assert [p.name for p in folder.iterdir() if "partial" in p.name] == []
        shutil.rmtree(folder)

    assert made > 1, "it may die when the copy has its name"


@pytest.mark.gate
async def test_a_copy_is_recognised_though_the_first_to_open_it_was_killed(tmp_path: Path) -> None:
    own = await copy_without_lock(tmp_path, tmp_path / "template")

    for folder, _ in killed_everywhere("open", tmp_path / "template", tmp_path / "killed"):
        for _ in range(2):
            said, identity, held = await history(folder / "copy.db")
            assert (said, identity, "without copy.db-lock" in (held or "")) == (SAID, own, True)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "kind",
    [
        "a backup",
        pytest.param("without its lock", marks=pytest.mark.gate),
        pytest.param("in place of a newer one", marks=pytest.mark.gate),
    ],
)
async def test_a_killed_restore_never_lets_a_copy_go_on_under_the_id_of_its_original(tmp_path: Path, kind: str) -> None:
    template = tmp_path / "template"
    own = await (copy_without_lock if kind == "without its lock" else backup)(tmp_path, template)
    if kind == "in place of a newer one":
        shutil.copy(tmp_path / "agent.db-lock", template / "copy.db-lock")

    restored = 0
    for folder, _ in killed_everywhere("restore", template, tmp_path / "killed"):
        path = folder / "copy.db"
        said, identity, held = await history_or_refusal(path)
        if held is None:
            restored += 1
            assert said == SAID
            assert identity != own
        else:
            assert "perdure restore" in held
            assert await Runtime.restore(path) != own
        assert await goes_on(path)
        shutil.rmtree(folder)

    assert restored > 1, "it may die when all is done"


@pytest.mark.gate
async def test_a_killed_compaction_loses_nothing(tmp_path: Path) -> None:
    own = await original(tmp_path / "template")
    async with Runtime(tmp_path / "template" / "agent.db") as runtime:
        for number in range(40):
            await runtime.store.write(Accept(f"s-{number}", "clerk", b"x" * 20_000, f"op {number}", number))
    sizes = set()
    for folder, _ in killed_everywhere("compact", tmp_path / "template", tmp_path / "killed"):
        assert await history(folder / "agent.db") == (SAID, own, None)
        sizes.add((folder / "agent.db").stat().st_size)
        assert await goes_on(folder / "agent.db")
        shutil.rmtree(folder)

    assert len(sizes) <= 3


async def backup(folder: Path, template: Path) -> str:
    own = await original(folder)
    async with Runtime(folder / "agent.db", agents=[Agent(ScriptedModel(["later"]))]) as runtime:
        await runtime.backup(template / "copy.db")
        await (await runtime.session("chat")).run("after the copy was made")
    return own


async def copy_without_lock(folder: Path, template: Path) -> str:
    """A copy as `cp` makes one, at a time when nobody has the file open."""
    own = await original(folder)
    template.mkdir()
    shutil.copy(folder / "agent.db", template / "copy.db")
    shutil.copytree(folder / "agent.db-blobs", template / "copy.db-blobs")
    return own


async def test_a_killed_deletion_leaves_a_whole_store_or_one_that_is_refused_until_it_is_deleted(
    tmp_path: Path,
) -> None:
    own = await original(tmp_path / "template")
    ends = set()
    for folder, _ in killed_everywhere("delete", tmp_path / "template", tmp_path / "killed"):
        path = folder / "agent.db"
        if path.exists():
            ends.add("whole")
            assert await history(path) == (SAID, own, None)
        elif parts_of(path):
            ends.add("refused")
            with pytest.raises(StoreEmptied, match="perdure delete-store"):
                await history(path)
            delete(path)
            assert parts_of(path) == []
        else:
            ends.add("gone")
        shutil.rmtree(folder)

    assert ends == {"whole", "refused", "gone"}
