"""Limits under kills: by the ledger of a model server that outlives them, and at every point of a turn."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure import Runtime
from perdure.testing.crash import KillResult, StoreKind, kill_everywhere
from perdure.testing.model_server import Asked, ModelServer, Reply
from tests.crash.limited import limited
from tests.crash.spender import MANY, MONEY, PID, SHARE_OUT, TOKENS
from tests.fuzzing import cases
from tests.kit import SOON

INPUT = 10
"""Tokens that the server says a question had: fewer than any estimate, so that what it adds up has no error of ours."""


class Ledger:
    """Answers every question with as many tokens as it allows, and adds up what that costs, whoever hears the answer.

    It kills who asks at some questions, refuses some without a charge, and breaks some answers off.
    """

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        numbers = chance.sample(range(3, 24), 8)
        self._kill, self._refuse, self._break = {*numbers[:2]}, {*numbers[2:5]}, {*numbers[5:]}
        self._mute = chance.random() < 0.5
        self.asked, self.spent, self.killed = 0, 0, 0

    def __call__(self, asked: Asked) -> Reply:
        self.asked += 1
        number, said = self.asked, asked.json
        if number in self._refuse:
            return Reply.error(503, {"error": {"message": "overloaded"}})
        bound: int = said["max_tokens"]
        self.spent += INPUT + bound
        whole = answer(said["messages"][-1], INPUT, bound)
        if number in self._kill:
            self.killed += 1
            pid = int(asked.headers[PID])
            if self._mute:
                os.kill(pid, signal.SIGKILL)
            half = len(whole.body) // 2
            return Reply(body=whole.body, headers=whole.headers, upto=half, end="cut", then=lambda: os.kill(pid, 9))
        if number in self._break:
            return Reply(body=whole.body, headers=whole.headers, upto=len(whole.body) // 2, end="cut")
        return whole


def answer(last: dict[str, Any], count: int, bound: int) -> Reply:
    usage = {"prompt_tokens": count, "completion_tokens": bound, "total_tokens": count + bound}
    delta: dict[str, Any] = {"role": "assistant", "content": "done"}
    reason = "stop"
    if last["role"] == "user" and last["content"] == SHARE_OUT:
        calls = [{"name": "helper", "arguments": f'{{"task": "part {n}"}}'} for n in range(MANY)]
        delta = {"role": "assistant", "tool_calls": [
            {"index": n, "id": f"c{n}", "type": "function", "function": call} for n, call in enumerate(calls)
        ]}  # fmt: skip
        reason = "tool_calls"
    chunk = {"id": "1", "object": "chat.completion.chunk", "model": "large"}
    return Reply.sse(
        chunk | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        chunk | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        chunk | {"choices": [], "usage": usage},
        done=True,
    )


async def until_it_ends(store: Path, url: str, name: str) -> str:
    """Run a spender, and again as often as it is killed; how its turn ended."""
    while True:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.crash.spender", str(store), url, name, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await child.communicate()
        if child.returncode != -signal.SIGKILL:
            assert child.returncode == 0
            return said.decode().split()[-1]


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.gate) for n in range(1, cases(2, 40)))])
async def test_fifty_subagents_of_two_processes_that_are_killed_stay_within_limits_by_the_servers_ledger(
    seed: int, tmp_path: Path
) -> None:
    ledger, store = Ledger(seed), tmp_path / "agent.db"

    async with ModelServer(ledger) as server, asyncio.timeout(2 * SOON):
        ended = await asyncio.gather(*(until_it_ends(store, server.url, name) for name in ("a", "b")))
    async with Runtime(store) as runtime:
        accounts = {each.name: each for each in await runtime.store.accounts()}
        held = [each for each in await runtime.store.reservations() if each.holds]

    tokens, money = accounts["tokens/all/ever"], accounts["money/metadata.tenant/month"]
    assert ledger.killed >= 1  # what the first one leaves unknown may be all that is left
    assert ledger.spent <= tokens.spent <= TOKENS
    assert ledger.spent * 1_000 <= money.spent <= float(MONEY) * 10**9
    assert (tokens.reserved, money.reserved, held) == (0, 0, [])
    assert tokens.unknown >= ledger.killed
    assert tokens.spent > TOKENS - 1_000, "what was left would have been enough for another call"
    assert {*ended} <= {"Finished", "LimitReached"}


# ---------------------------------------------------------------------- at every point of a turn

ANSWERED, INSIDE = 350, 50
"""Tokens that the turn's four answers take, one of them that of the completion inside its tool."""

OPEN: dict[str, tuple[int, int]] = {
    "beat": (0, 0),
    "accept queue": (0, 1),
    "ask model 1.1": (1, 1),
    "append 1: faltered 1": (1, 0),
    "append 1: nothing": (0, 1),
    "ask model 1.1 #2": (1, 1),
    "chunk 1 of model 1.1": (1, 1),
    "append 1: replied 1": (1, 0),
    "begin look 1.1.0": (0, 0),
    "effect looked": (0, 0),
    "append 1: asking": (0, 1),
    "ask model 1.0": (1, 1),
    "chunk 1 of model 1.0": (1, 1),
    "chunk 2 of model 1.0": (1, 1),
    "append 1: completed": (1, 0),
    "end look 1.1.0": (0, 0),
    "append 1: ended 1.0": (0, 1),
    "ask model 1.2": (1, 1),
    "chunk 1 of model 1.2": (1, 1),
    "chunk 2 of model 1.2": (1, 1),
    "append 1: replied 2": (1, 1),  # with it the next call was reserved for
    "ask model 1.3": (1, 1),
    "chunk 1 of model 1.3": (1, 1),
    "chunk 2 of model 1.3": (1, 1),
    "commit 1": (1, 0),
    "effect counted": (0, 0),
    "retire": (0, 0),
}
"""For each point, how many calls are reserved for and not settled when the process dies before it, and after it. The
broken attempt comes on top, which is unknown in any case."""

UNHEARD = {"accept queue", "append 1: nothing"}
"""Where a process lives on, and the reply to what it has reserved is lost. Who called is told so, and leaves the
Runtime: no turn of it knows of the first, and when the second has been sent again the model is about to be asked."""

ASKED_AGAIN = {"lost append 1: completed", "before end look 1.1.0"} | {
    f"{mode} append 1: ended 1.0" for mode in ("before", "hang", "late")
}
"""Where the tool runs a second time although its completion was answered: that is paid for twice."""


def test_wherever_a_process_dies_each_call_counts_once_and_nothing_stays_reserved(store: StoreKind) -> None:
    report = kill_everywhere(limited, store=store, modes=("before", "lost", "hang", "late", "unheard"))

    assert (report.lost, report.problems, report.unreached) == (0, [], [])
    found = {str(row.crash): counted(row) for row in report.rows}
    wanted = {}
    for crash in (row.crash for row in report.rows):
        before, after = OPEN[point_of(crash.point)]
        unknown = 1 + {"lost": after, "unheard": int(crash.point in UNHEARD)}.get(crash.mode, before)
        wanted[str(crash)] = (0, unknown, 1, 0, INSIDE * (str(crash) in ASKED_AGAIN))
    assert {point: told[:4] for point, told in found.items()} == {point: told[:4] for point, told in wanted.items()}
    for point, (_, unknown, _, _, more) in wanted.items():
        left = found[point][4] - ANSWERED - more
        assert 400 * unknown <= left <= 800 * unknown, f"{point}: {left} for {unknown} calls"
    # The broken attempt is the same in all of these, and what was sent again counts once.
    again = {point: told[4] for point, told in found.items() if point.startswith("unheard") and told[1] == 1}
    once = found["before effect counted"][4]
    assert {*again.values()} <= {once, once + INSIDE}  # the tool may run again, with its completion


def point_of(name: str) -> str:
    """The name of a point without what a completion was asked."""
    return re.sub(r"(1\.0):\w+:0", r"\1", name)


def counted(row: KillResult) -> tuple[int, int, int, int, int]:
    """Of tokens what is reserved and unknown, the turns that were counted, what is held still, and what is spent."""
    spent, reserved, unknown, turns, held = next(
        line.data for line in reversed(row.played.ledger) if line.name == "counted"
    )
    return reserved, unknown, turns, held, spent


@pytest.fixture(params=["memory", "sqlite", "sqlite-thread"])
def store(request: pytest.FixtureRequest) -> StoreKind:
    kind: StoreKind = request.param
    return kind
