"""One session, several real processes that speak to it and work on it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from perdure.stores.sqlite import SqliteStore
from perdure.testing.crash import Ledger, capture
from tests.crash.speaker import INPUTS
from tests.keys import within_store

ROOT = Path(__file__).parents[2]
NAMES = ("ann", "bob", "cid")


@pytest.mark.kill
@pytest.mark.slow
def test_three_processes_speak_to_one_session_and_every_input_has_one_turn(tmp_path: Path) -> None:
    store, ledger = tmp_path / "agent.db", tmp_path / "ledger"
    speakers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.crash.speaker", name, str(store), str(ledger)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in NAMES
    ]
    said = [speaker.communicate(timeout=200)[0].splitlines() for speaker in speakers]
    turns = [line.split() for lines in said for line in lines]

    assert [speaker.returncode for speaker in speakers] == [0, 0, 0]
    assert sorted(int(turn.rsplit(".")[-1]) for turn, _ in turns) == list(range(1, 3 * INPUTS + 1))
    assert {text for _, text in turns} == {"done"}
    worked = Counter(within_store(line.key) for line in Ledger(ledger).lines())
    assert worked == Counter({f"shared.{number}.1.0": 1 for number in range(1, 3 * INPUTS + 1)})

    async def look() -> list[str]:
        reading = SqliteStore(store)
        await reading.open()
        try:
            ending = await capture(reading, sweep=False)
        finally:
            await reading.close()
        assert ending.problems == []
        return [words.removeprefix("user: ") for words in ending.sessions[0].said if words.startswith("user: ")]

    heard = asyncio.run(look())
    for name in NAMES:
        assert [words for words in heard if words.startswith(name)] == [f"{name} {n}" for n in range(INPUTS)]
