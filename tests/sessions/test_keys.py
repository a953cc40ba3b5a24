"""Idempotency keys: one for all attempts of a call, and no other call's in any store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from perdure import Agent, ProcessContext, Retry, Runtime, ToolCall, ToolContext, process, tool
from perdure.model.tool import Recovery
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.testing import ScriptedModel
from tests.kit import SOON, Place, crash

OLD, NEW = "a" * 13, "b" * 13


class Keys:
    """What tools were given, in order. The first body hangs until its Runtime dies, if it is told to."""

    def __init__(self, hangs: bool = False) -> None:
        self.seen: list[str] = []
        self.running = asyncio.Event()
        self._hangs = hangs

    async def note(self, ctx: ToolContext[Any]) -> str:
        self.seen.append(ctx.idempotency_key)
        self.running.set()
        if self._hangs:
            await asyncio.Event().wait()
        return "paid"


def payer(keys: Keys, answers: list[Any], kind: str = "plain", recovery: Recovery = "rerun") -> Agent[str]:
    @tool(
        recovery=recovery, limit=1 if kind == "queued" else None, retries=int(kind == "retried"),
        background=kind == "background", approval="ask" if kind == "approved" else "never",
    )  # fmt: skip
    async def pay(ctx: ToolContext[None]) -> str:
        if kind == "retried" and ctx.attempt == 1:
            keys.seen.append(ctx.idempotency_key)
            raise Retry("not now", after=0)
        return await keys.note(ctx)

    return Agent(ScriptedModel(answers), tools=[pay])


PAY = [ToolCall("a", "pay")]


async def paid(runtime: Runtime, kind: str) -> None:
    session = await runtime.session("customer-12")
    result = await session.run("go")
    if kind == "approved":
        await session.approve("customer-12.1.1.0")
        result = await asyncio.wait_for(session.result(result.turn_id), SOON)
    if kind == "background":
        await runtime.handle("customer-12.1.1.0").result(SOON)


@pytest.mark.parametrize("kind", ["plain", "queued", "retried", "approved", "background"])
async def test_two_stores_never_give_the_same_key(kind: str) -> None:
    seen: list[list[str]] = []
    for rows in (MemoryRows(), MemoryRows()):
        keys = Keys()
        asked = [*PAY, ToolCall("b", "pay")] if kind == "queued" else PAY
        more = ["heard"] if kind == "background" else []
        async with Runtime(MemoryStore(rows), agents=[payer(keys, [asked, "done", *more], kind)]) as runtime:
            await paid(runtime, kind)
        assert {key.partition(".")[0] for key in keys.seen} == {rows.identity}
        assert {key.partition(".")[2].rpartition(".")[0] for key in keys.seen} == {"customer-12.1.1"}
        seen.append(keys.seen)

    assert len(seen[0]) == len(seen[1]) == (2 if kind in ("queued", "retried") else 1)
    assert not set(seen[0]) & set(seen[1])


async def test_a_file_keeps_its_id_and_another_file_has_another(file: Place, tmp_path: Any) -> None:
    async with Runtime(file.path) as runtime:
        first = runtime.store.identity()
    async with Runtime(file.path) as runtime:
        again = runtime.store.identity()
    async with Runtime(tmp_path / "other.db") as runtime:
        other = runtime.store.identity()

    assert first == again != other
    assert len(first) == len(other) == 13


# ---------------------------------------------------------------------- a store whose id has changed meanwhile


async def killed_while_it_runs(rows: MemoryRows, before: str, begin: Callable[[Runtime], Any], **made: Any) -> None:
    """The store is one of an earlier version, without an id, or was restored after this."""
    rows.identity = before
    keys: Keys = made.pop("keys")
    runtime = await Runtime(MemoryStore(rows), **made).__aenter__()
    await begin(runtime)
    await asyncio.wait_for(keys.running.wait(), SOON)
    await crash(runtime)
    rows.identity = NEW


@pytest.mark.parametrize("before", ["", OLD], ids=["from an earlier version", "restored"])
@pytest.mark.parametrize("kind", ["plain", "retried", "background"])
async def test_a_call_keeps_the_key_it_was_started_with_and_a_later_one_has_the_new(before: str, kind: str) -> None:
    rows, first, second = MemoryRows(), Keys(hangs=True), Keys()

    async def begin(runtime: Runtime) -> None:
        await (await runtime.session("customer-12")).send("go")

    answers = [PAY, "sent"] if kind == "background" else [PAY]
    await killed_while_it_runs(rows, before, begin, keys=first, agents=[payer(first, answers, kind)])
    rest = ["heard", PAY, "done", "heard again"] if kind == "background" else [PAY, "done"]
    async with Runtime(MemoryStore(rows), agents=[payer(second, rest, kind)]) as runtime:
        session = await runtime.session("customer-12")
        if kind == "background":
            await runtime.handle("customer-12.1.1.0").result(SOON)
            await runtime.wait_idle()
            await session.run("again")
            await runtime.wait_idle()
        else:
            await asyncio.wait_for(session.result("customer-12.1"), SOON)

    old = f"{before}.customer-12.1.1.0".lstrip(".")
    assert set(first.seen) == {old}
    assert second.seen[0] == old
    assert {key.partition(".")[0] for key in second.seen[1:]} == {NEW}
    assert len(second.seen) > 1


@pytest.mark.parametrize("before", ["", OLD], ids=["from an earlier version", "restored"])
async def test_a_step_keeps_the_key_it_was_started_with_and_a_later_one_has_the_new(before: str) -> None:
    rows, first, second = MemoryRows(), Keys(hangs=True), Keys()

    def function(keys: Keys) -> Any:
        @tool(recovery="rerun")
        async def pay(ctx: ToolContext[None]) -> str:
            return await keys.note(ctx)

        @process(name="billing")
        async def billing(ctx: ProcessContext) -> str:
            await ctx.step(pay)
            return str(await ctx.step(pay))

        return billing

    async def begin(runtime: Runtime) -> None:
        await runtime.start("billing", id="june")

    await killed_while_it_runs(rows, before, begin, keys=first, processes=[function(first)])
    async with Runtime(MemoryStore(rows), processes=[function(second)]) as runtime:
        assert await runtime.handle("june").result(SOON) == "paid"

    assert first.seen == [f"{before}.june.1".lstrip(".")]
    assert second.seen == [*first.seen, f"{NEW}.june.2"]


async def test_the_calls_of_a_subagent_have_keys_of_their_store_too(place: Place) -> None:
    keys = Keys()
    async with place.runtime(payer(keys, [PAY, "it is paid"])) as runtime:
        handle = await runtime.start("assistant", {"input": "pay"}, id="sub")
        await handle.result(SOON)
        store = runtime.store.identity()

    assert [key.partition(".")[0] for key in keys.seen] == [store]
