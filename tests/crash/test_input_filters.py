"""What is said to an agent with a filter, at every death: before, in and after the filter.

Until an input is accepted there is none, and its host says it again; from then on it is one turn, however often it is
said. A filter is called for every time that it is said, also where the input turns out to be known. What was said is
never on disk as it was said: every incarnation first looks at all that the one before has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest
from msgspec import Struct

from perdure import Agent, Message, ModelRequest, ModelResponse, Plugin, Usage
from perdure.plugins import InputContext
from perdure.testing import FunctionModel
from perdure.testing.crash import MODES, Crash, ForkServer, Lab, LedgerLine, Mode, Played, StoreKind, play
from tests.crash.reference import ATTENDED, patiently

STORES: tuple[StoreKind, ...] = ("memory", "sqlite")
RAW = "4000-1234-5678"


class Numbers(Plugin):
    id = "numbers"

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    async def transform_input(self, ctx: InputContext, message: Message) -> str:
        await self.lab.effect("filter", ctx.session_id)
        return message.text.replace(RAW, "[card]")


def support(lab: Lab) -> Agent[str]:
    def answer(request: ModelRequest) -> ModelResponse:
        return ModelResponse(f"re: {request.messages[-1].text}", usage=Usage(input=1, output=1))

    return Agent(FunctionModel(answer), name="support", plugins=[Numbers(lab)])


async def look_for_it(lab: Lab) -> None:
    """Leave a line if what was said is anywhere in the rows in memory, or in a file of the store."""
    rows, path = getattr(lab._raw, "rows", None), getattr(lab._raw, "path", None)
    found = RAW in repr(vars(rows)) if rows is not None else False
    if path is not None:
        files = [each for each in path.parent.rglob("*") if each.is_file() and each.name.startswith(path.name)]
        assert files
        found = any(RAW.encode() in each.read_bytes() for each in files)
    if found:
        lab._ledger.write(LedgerLine("leaked", "raw", lab.incarnation))


def is_replaced(lab: Lab) -> bool:
    """True if another host was started in the place of this one, which was presumed dead."""
    return any(line.incarnation > lab.incarnation for line in lab.ledger)


async def guarded(lab: Lab, answered: asyncio.Event | None = None) -> None:
    """A host that is started again after every death: one input under a key, one agent started under an id."""
    if lab.incarnation > 1:
        await look_for_it(lab)
    async with lab.runtime([support(lab)], lease=ATTENDED, input_secret=b"not in the store") as runtime:
        session = await runtime.session("s")
        await patiently(lambda: session.run(f"card {RAW}", key="1"))
        if answered is not None:
            answered.set()
        if is_replaced(lab):
            await asyncio.Event().wait()  # its supervisor has put another host in its place, which says the rest
        handle = await patiently(lambda: runtime.start("support", {"input": f"job {RAW}"}, id="job"))
        await handle.result()
    await look_for_it(lab)


async def restless(lab: Lab) -> None:
    """Run `guarded`, and keep a replaced incarnation from idling until its host has its answer, as a busy machine may.

    Otherwise the kit stops the incarnation when its event loop has passed some dozen times without a call, and the
    poll for the answer of the other host comes after that.
    """
    answered = asyncio.Event()
    host = asyncio.ensure_future(guarded(lab, answered))
    while not host.done() and not answered.is_set():
        if is_replaced(lab):
            await lab.mark("awake")
        await asyncio.sleep(0)
    await host


class Fate(Struct, frozen=True):
    """Calls of the filter, requests to the model, and those whose usage is unknown."""

    filters: int
    model: int = 2
    usage: int = 0


RULINGS: dict[str, dict[Mode, Fate]] = {
    "beat": {"before": Fate(2), "lost": Fate(2), "hang": Fate(2)},
    # In the filter: nothing is accepted. What it did outside before the death, it does again.
    "effect filter": {"before": Fate(2), "lost": Fate(3), "hang": Fate(2)},
    # After it: the input is there or it is not. Said again under its key it passes the filter again, and is known.
    "accept queue": {"before": Fate(3), "lost": Fate(3, usage=1), "hang": Fate(3)},
    "ask model 1.1": {"before": Fate(3, usage=1), "lost": Fate(3, 3, 1), "hang": Fate(3, usage=1)},
    "chunk 1 of model 1.1": {"before": Fate(3, 3, 1)},
    "chunk 2 of model 1.1": {"before": Fate(3, 3, 1)},
    "commit 1": {"before": Fate(3, 3, 1), "lost": Fate(3), "hang": Fate(3, 3, 1), "late": Fate(3, 3, 1)},
    # The same for an agent that is started.
    "effect filter #2": {"before": Fate(3), "lost": Fate(4), "hang": Fate(3)},
    "register job": {"before": Fate(4), "lost": Fate(4), "hang": Fate(4)},
    # From here on what filters left is said to the agent's session by the process itself, past any filter.
    "advance job: starting, process.external_ref_set": {
        "before": Fate(4),
        "lost": Fate(4),
        "hang": Fate(4),
        "late": Fate(4),
    },
    "accept queue #2": {"before": Fate(4), "lost": Fate(4, usage=1), "hang": Fate(4)},
    "ask model 1.1 #2": {"before": Fate(4, usage=1), "lost": Fate(4, 3, 1), "hang": Fate(4, usage=1)},
    "chunk 1 of model 1.1 #2": {"before": Fate(4, 3, 1)},
    "chunk 2 of model 1.1 #2": {"before": Fate(4, 3, 1)},
    "commit 1 #2": {"before": Fate(4, 3, 1), "lost": Fate(4), "hang": Fate(4, 3, 1), "late": Fate(4, 3, 1)},
    "advance job: ending": {"before": Fate(4), "lost": Fate(4), "hang": Fate(4), "late": Fate(4)},
    "retire": {"before": Fate(4), "lost": Fate(4), "hang": Fate(4)},
}


def check(played: Played, fate: Fate) -> None:
    assert played.problems == []
    said = {each.id: (each.state, each.head, each.said) for each in played.ending.sessions}
    assert said == {
        "s": ("idle", 1, ["user: card [card]", "assistant: re: card [card]"]),
        "job~support": ("idle", 1, ["user: job [card]", "assistant: re: job [card]"]),
    }
    assert [(each.id, each.status) for each in played.ending.processes] == [("job", "completed")]
    assert [line for line in played.ledger if line.name == "leaked"] == []
    filters = [line for line in played.ledger if line.name == "filter"]
    unknown = sum(each.unknown_usage for each in played.ending.sessions)
    assert Fate(len(filters), played.model_calls, unknown) == fate


DEATHS = [
    pytest.param(Crash(point, mode), fate, id=f"{mode} {point}")
    for point, fates in RULINGS.items()
    for mode, fate in fates.items()
]
KILLS = [death for death in DEATHS if str(death.id).split()[0] in ("before", "lost")]


@pytest.mark.parametrize("store", STORES)
def test_every_point_of_a_filtered_input_is_ruled(store: StoreKind) -> None:
    played = play(guarded, [], store=store)

    check(played, Fate(2))
    kinds = {point.name: set(MODES[point.kind]) - {"unheard"} for point in played.traces[-1]}
    assert {point: set(fates) for point, fates in RULINGS.items()} == kinds


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("crash", "fate"), DEATHS)
def test_kill_around_a_filter_has_its_ruled_fate(crash: Crash, fate: Fate, store: StoreKind) -> None:
    check(play(guarded, [crash], store=store, timeout=60), fate)


@pytest.mark.parametrize("store", STORES)
def test_replaced_host_that_hears_of_the_answer_says_nothing_more(store: StoreKind) -> None:
    played = play(restless, [Crash("commit 1", "late")], store=store, timeout=60)

    check(played, RULINGS["commit 1"]["late"])
    assert "awake" in {point.name for point in played.traces[0]}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("point", ["accept queue", "register job", "accept queue #2", "commit 1"])
def test_lost_reply_costs_a_filtered_input_at_most_another_call_of_the_filter(point: str, store: StoreKind) -> None:
    played = play(guarded, [Crash(point, "unheard")], store=store, timeout=60)

    # What a process says to its agent's session is said by itself, again too; the rest the host says again.
    check(played, Fate(2 if point == "accept queue #2" else 3))


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(guarded, timeout=60) as ready:
        yield ready


@pytest.mark.kill
@pytest.mark.parametrize(("crash", "fate"), KILLS)
def test_real_kill_around_a_filter_has_its_ruled_fate(forks: ForkServer, crash: Crash, fate: Fate) -> None:
    check(forks.play([crash]), fate)
