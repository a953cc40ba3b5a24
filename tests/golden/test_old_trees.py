"""The frozen source trees are those that their list describes, and their work goes on with the present code."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perdure import Runtime
from perdure.model.tool import Ok, OutcomeUnknown
from tests.golden.old_trees import ALL, NEWEST, TREES, BadTree, digests, environment_of, unpack
from tests.golden.two_trees import HELD, Ledger, agent

ROOT = Path(__file__).parents[2]
TREE = [pytest.param(commit, marks=[] if commit == NEWEST else pytest.mark.gate) for commit in ALL]


def test_every_archive_is_listed() -> None:
    assert sorted(digests()) == sorted(ALL)
    assert sorted(path.name for path in TREES.glob("*.tar.xz")) == sorted(f"{commit}.tar.xz" for commit in ALL)


def test_child_imports_the_older_tree_and_not_the_present_one() -> None:
    program = "import mainstay; print(mainstay.__file__)"
    environment = environment_of(NEWEST)
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)

    source = Path(environment["PYTHONPATH"].partition(":")[0])
    assert Path(ran.stdout.strip()) == source / "mainstay" / "__init__.py"
    assert environment_of(NEWEST) == environment, "it is unpacked once"
    assert not source.is_relative_to(TREES.parents[2])


def test_one_folder_may_be_unpacked_to_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda _: unpack(NEWEST, tmp_path), range(4))]

    assert found == [tmp_path / NEWEST] * 4
    assert [path.name for path in tmp_path.iterdir()] == [NEWEST]
    assert (tmp_path / NEWEST / "src" / "mainstay" / "__init__.py").exists()


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    """A copy of the folder of archives, to be damaged."""
    folder = tmp_path / "trees"
    shutil.copytree(TREES, folder)
    return folder


def test_tree_with_another_digest_is_refused(trees: Path, tmp_path: Path) -> None:
    archive = trees / f"{NEWEST}.tar.xz"
    archive.write_bytes(archive.read_bytes() + b"\0")

    with pytest.raises(BadTree, match=r"README\.md says 345581e6.*restore both files"):
        unpack(NEWEST, tmp_path, trees)
    assert not (tmp_path / NEWEST).exists()


def test_tree_without_its_archive_is_refused(trees: Path, tmp_path: Path) -> None:
    (trees / f"{NEWEST}.tar.xz").unlink()

    with pytest.raises(BadTree, match=r"82f0b67\.tar\.xz is missing: restore it"):
        unpack(NEWEST, tmp_path, trees)


def test_tree_that_is_not_listed_is_refused() -> None:
    with pytest.raises(BadTree, match="no tree of commit 'abc1234': use one of these: 82f0b67, b8c4c5f"):
        environment_of("abc1234")


def killed_in_both_turns(commit: str, store: Path, ledger: Path) -> None:
    """Begin both turns with an older tree, and kill it when each of the held actions is under way."""
    program = [sys.executable, "-m", "tests.golden.two_trees", str(store), str(ledger)]
    child = subprocess.Popen(program, cwd=ROOT, env=environment_of(commit), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        held = sorted(child.stdout.readline().rstrip("\n") for _ in HELD)
        child.kill()
        code = child.wait()
    assert (held, code) == (sorted(HELD), -signal.SIGKILL)


@pytest.mark.kill
@pytest.mark.parametrize("commit", TREE)
async def test_turns_of_an_older_tree_that_was_killed_are_finished_and_nothing_recorded_is_done_twice(
    tmp_path: Path, commit: str
) -> None:
    store, ledger = tmp_path / "a.db", Ledger(tmp_path / "ledger")
    await asyncio.to_thread(killed_in_both_turns, commit, store, tmp_path / "ledger")
    before = ledger.lines()
    async with Runtime(store, agents=[agent(ledger)], deps=ledger) as runtime:
        in_tools = await (await runtime.session("tools")).result("tools.1")
        in_model = await (await runtime.session("model")).result("model.1")
        facts = await runtime.store.facts(deep=True)
    after = ledger.lines()[len(before) :]

    assert in_tools.text == "book ok; charge outcome_unknown; ship ok"
    book, charge, ship = in_tools.tool_calls
    assert (book.outcome, book.repeated) == (Ok("book done"), 0)
    assert isinstance(charge.outcome, OutcomeUnknown)
    assert (ship.outcome, ship.attempts, ship.repeated) == (Ok("ship done"), 2, 1)
    assert in_model.text == "book ok"
    assert [(call.outcome, call.repeated) for call in in_model.tool_calls] == [(Ok("book done"), 0)]
    assert (in_model.usage.calls, in_model.usage.unknown) == (2, 3)  # the model reports no usage, and one call was lost
    assert facts.checks == ("ok",)

    (begun,) = [line.rpartition(" ")[2] for line in before if line.startswith("ship begun")]
    assert sorted(after) == [
        "model 2 of model.1 begun -",
        "model 2 of model.1 done -",
        "model 3 of tools.1 begun -",
        "model 3 of tools.1 done -",
        f"ship begun {begun}",
        f"ship done {begun}",
    ]
