"""Calls that wait for somebody: approval, settlement after a crash, completion by a signed key."""

import asyncio
from typing import Any

import pytest

from perdure import Agent, ModelRequest, Runtime, Session, ToolCall, ToolContext, TurnResult, tool
from perdure.errors import AlreadyAnswered, InvalidInput, TooLarge, UnknownCall, UnknownWait
from perdure.model.outcome import PendingCall, Waiting
from perdure.model.tool import Denied, Failed, Ok, OutcomeUnknown, OutputBudget
from perdure.testing import FunctionModel, ScriptedModel, VirtualClock
from tests.keys import within_store
from tests.kit import SOON, Place, crash, texts, until

CALL = "chat.1.1.0"


@tool(approval="ask")
async def shoot(at: str = "the moon") -> str:
    return f"shot {at}"


def shooter(*more: Any, calls: int = 1) -> Agent[str]:
    asked = [ToolCall(f"p{n}", "shoot", {"at": f"target {n}"}) for n in range(calls)]
    return Agent(ScriptedModel([asked, "done", *more]), tools=[shoot])


def waiting_for(result: TurnResult[Any]) -> tuple[PendingCall, ...]:
    assert isinstance(result.outcome, Waiting)
    return result.outcome.calls


async def ends(session: Session, turn: str = "chat.1") -> Any:
    return await asyncio.wait_for(session.result(turn), SOON)


# ---------------------------------------------------------------------- approval


async def test_a_call_waits_for_approval_and_then_runs(place: Place) -> None:
    async with place.runtime(shooter(), clock=VirtualClock(start=1_000)) as runtime:
        session = await runtime.session("chat")
        parked = await session.run("go")

        asked = PendingCall(CALL, "approval", "shoot", {"at": "target 0"}, 1_000, reason="the tool asks for approval")
        assert parked.outcome == Waiting((asked,))
        assert await session.pending() == [asked]
        assert [row.state for row in await runtime.sessions.list()] == ["parked"]
        await session.approve(CALL, by="operator")
        result = await ends(session)
        assert result.tool_calls[0].outcome == Ok("shot target 0")
        assert result.text == "done"
        assert await session.pending() == []


async def test_a_rejected_call_never_runs_and_the_model_is_told(place: Place) -> None:
    model = ScriptedModel([[ToolCall("p", "shoot")], "as you wish"])
    async with place.runtime(Agent(model, tools=[shoot])) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await session.reject(CALL, "too loud", by="neighbour")
        result = await ends(session)

        assert result.tool_calls[0].outcome == Denied("too loud", "neighbour")
        assert result.tool_calls[0].attempts == 0
        told = model.requests[1].messages[-1].tool_results[0]
        assert (told.status, told.content) == ("denied", {"error": "denied", "message": "too loud"})


async def test_an_approval_is_given_once(place: Place) -> None:
    async with place.runtime(shooter()) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await session.approve(CALL, by="first")

        with pytest.raises(AlreadyAnswered, match="the first answer stands"):
            await session.reject(CALL)
        await ends(session)
        with pytest.raises(AlreadyAnswered):
            await session.approve(CALL)


@pytest.mark.parametrize("verdict", ["approve", "reject"])
async def test_an_answer_may_come_from_another_runtime_days_later(place: Place, verdict: str) -> None:
    clock = VirtualClock()
    async with place.runtime(shooter(), clock=clock) as runtime:
        assert (await (await runtime.session("chat")).run("go")).waiting
    clock.advance(7 * 86_400)
    async with place.runtime() as runtime:
        session = await runtime.session("chat")
        (asked,) = await session.pending()
        await getattr(session, verdict)(asked.call_id)
    async with place.runtime(Agent(ScriptedModel(["done"]), tools=[shoot]), clock=clock) as runtime:
        result = await ends(await runtime.session("chat"))

        assert type(result.tool_calls[0].outcome) is (Ok if verdict == "approve" else Denied)
        assert result.text == "done"


async def test_a_reopened_parked_turn_still_waits(place: Place) -> None:
    async with place.runtime(shooter(calls=2)) as runtime:
        before = await (await runtime.session("chat")).run("go")
    async with place.runtime(shooter()) as runtime:
        session = await runtime.session("chat")
        after = await ends(session)

        assert after.outcome == before.outcome
        assert after.usage == before.usage
        assert texts(after.messages) == texts(before.messages)
        assert await runtime.wait_idle(SOON)


async def test_many_calls_are_answered_one_by_one_and_in_any_order(place: Place) -> None:
    async with place.runtime(shooter(calls=12)) as runtime:
        session = await runtime.session("chat")
        parked = await session.run("go")
        pending = await session.pending()
        assert [c.call_id for c in pending] == [f"chat.1.1.{n}" for n in range(12)]
        assert parked.outcome == Waiting(tuple(pending))
        for asked in reversed(pending):
            n = int(asked.call_id.rpartition(".")[2])
            await (session.approve(asked.call_id) if n % 2 else session.reject(asked.call_id))
        result = await ends(session)

        assert [type(c.outcome) for c in result.tool_calls] == [Denied, Ok] * 6


async def test_a_free_call_runs_while_another_waits_for_approval(place: Place) -> None:
    ran = asyncio.Event()

    @tool
    async def look() -> str:
        ran.set()
        return "seen"

    model = ScriptedModel([[ToolCall("a", "shoot"), ToolCall("b", "look")], "done"])
    async with place.runtime(Agent(model, tools=[shoot, look])) as runtime:
        session = await runtime.session("chat")
        parked = await session.run("go")

        assert ran.is_set()
        assert [c.call_id for c in waiting_for(parked)] == [CALL]
        await session.approve(CALL)
        assert [c.outcome for c in (await ends(session)).tool_calls] == [Ok("shot the moon"), Ok("seen")]


async def test_an_answer_reaches_a_turn_whose_other_call_still_runs(place: Place) -> None:
    running, release = asyncio.Event(), asyncio.Event()

    @tool
    async def wait() -> str:
        running.set()
        await release.wait()
        return "waited"

    @tool(approval="ask")
    async def free() -> str:
        release.set()  # the other call ends only if this one runs
        return "freed"

    model = ScriptedModel([[ToolCall("a", "free"), ToolCall("b", "wait")], "done"])
    async with place.runtime(Agent(model, tools=[free, wait])) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("go")
        await running.wait()
        await until(session.pending)
        await session.approve(CALL)
        result = await receipt.result(SOON)

        assert [c.outcome for c in result.tool_calls] == [Ok("freed"), Ok("waited")]


async def test_an_approved_call_follows_its_contract_after_a_crash(place: Place) -> None:
    running = asyncio.Event()

    @tool(name="shoot", approval="ask")
    async def hang() -> None:
        running.set()
        await asyncio.Event().wait()

    runtime = await place.runtime(Agent(ScriptedModel([[ToolCall("a", "shoot")]]), tools=[hang])).__aenter__()
    session = await runtime.session("chat")
    await session.run("go")
    await session.approve(CALL)
    await running.wait()
    await crash(runtime)
    async with place.runtime(Agent(ScriptedModel(["done"]), tools=[shoot])) as runtime:
        result = await ends(await runtime.session("chat"))

        assert type(result.tool_calls[0].outcome) is OutcomeUnknown


async def test_a_tool_that_is_gone_when_it_is_approved(place: Place) -> None:
    async with place.runtime(shooter()) as runtime:
        await (await runtime.session("chat")).run("go")
    async with place.runtime(Agent(ScriptedModel(["done"]))) as runtime:
        session = await runtime.session("chat")
        await session.approve(CALL)
        outcome = (await ends(session)).tool_calls[0].outcome

        assert isinstance(outcome, Failed)
        assert outcome.code == "tool_unavailable"


# ---------------------------------------------------------------------- recovery


async def crashed(place: Place, recovery: Any) -> list[tuple[int, str]]:
    """A call was running when its process died. Returns the ledger of its attempts."""
    ledger: list[tuple[int, str]] = []
    running = asyncio.Event()

    @tool(recovery=recovery)
    async def pay(ctx: ToolContext[None]) -> None:
        ledger.append((ctx.attempt, within_store(ctx.idempotency_key)))
        running.set()
        await asyncio.Event().wait()

    runtime = await place.runtime(Agent(ScriptedModel([[ToolCall("a", "pay")]]), tools=[pay])).__aenter__()
    await (await runtime.session("chat")).send("go")
    await running.wait()
    await crash(runtime)
    return ledger


def payer(recovery: Any, ledger: list[tuple[int, str]], *answers: Any, model: Any = None) -> Agent[str]:
    @tool(recovery=recovery)
    async def pay(ctx: ToolContext[None]) -> str:
        ledger.append((ctx.attempt, within_store(ctx.idempotency_key)))
        return "paid"

    return Agent(model or ScriptedModel(answers or ["done"]), tools=[pay])


async def test_once_is_never_repeated_and_everybody_is_told(place: Place) -> None:
    ledger = await crashed(place, "once")
    model = ScriptedModel(["done"])
    async with place.runtime(payer("once", ledger, model=model)) as runtime:
        result = await ends(await runtime.session("chat"))

    assert ledger == [(1, CALL)]
    assert result.tool_calls[0].outcome == OutcomeUnknown("the process died while the call ran")
    told = model.requests[0].messages[-1].tool_results[0]
    assert told.status == "outcome_unknown"
    assert "may or may not have taken effect" in told.content["message"]


async def test_rerun_is_repeated_under_the_same_key_and_counted(place: Place) -> None:
    ledger = await crashed(place, "rerun")
    async with place.runtime(payer("rerun", ledger)) as runtime:
        result = await ends(await runtime.session("chat"))

    assert ledger == [(1, CALL), (2, CALL)]
    assert result.tool_calls[0].outcome == Ok("paid")
    assert (result.tool_calls[0].attempts, result.tool_calls[0].repeated) == (2, 1)


@pytest.mark.parametrize(
    ("verdict", "outcome", "attempts"),
    [
        ("done", Ok({"receipt": 7}), 1),
        ("failed", Failed("settled_as_failed", "no money left", {"receipt": 7}), 1),
        ("rerun", Ok("paid"), 2),
    ],
)
async def test_ask_waits_for_a_person_who_settles_it(
    place: Place, verdict: Any, outcome: Ok | Failed, attempts: int
) -> None:
    ledger = await crashed(place, "ask")
    async with place.runtime(payer("ask", ledger)) as runtime:
        session = await runtime.session("chat")
        parked = await ends(session)
        assert [(c.call_id, c.kind) for c in waiting_for(parked)] == [(CALL, "recovery")]
        assert len(ledger) == 1
        await session.settle(CALL, verdict, value={"receipt": 7}, reason="no money left")
        result = await ends(session)

    assert result.tool_calls[0].outcome == outcome
    assert result.tool_calls[0].attempts == attempts
    assert len(ledger) == attempts


async def test_a_settlement_is_made_once(place: Place) -> None:
    ledger = await crashed(place, "ask")
    async with place.runtime(payer("ask", ledger)) as runtime:
        session = await runtime.session("chat")
        await ends(session)
        await session.settle(CALL, "done")

        with pytest.raises(AlreadyAnswered):
            await session.settle(CALL, "failed")


async def test_an_unknown_outcome_may_be_annotated_later(place: Place) -> None:
    ledger = await crashed(place, "once")
    model = ScriptedModel(["done", "good to know"])
    async with place.runtime(payer("once", ledger, model=model)) as runtime:
        session = await runtime.session("chat")
        await ends(session)
        await session.settle(CALL, "done", value={"receipt": 7}, reason="the bank says so")
        await session.settle(CALL, "done", value={"receipt": 7}, reason="the bank says so")
        with pytest.raises(AlreadyAnswered):
            await session.settle(CALL, "failed")
        result = await session.run("well?")

        note = model.requests[1].messages[-1].text
        assert result.text == "good to know"
        assert "it took effect" in note
        assert '{"receipt":7}' in note
        assert "the bank says so" in note
        assert texts(await session.history())[-3:] == ["well?", note, "good to know"]


async def test_a_known_outcome_is_not_settled(place: Place) -> None:
    async with place.runtime(payer("once", [], [ToolCall("a", "pay")], "done")) as runtime:
        session = await runtime.session("chat")
        await session.run("go")

        with pytest.raises(AlreadyAnswered):
            await session.settle(CALL, "failed")
        odd: Any = "whatever"
        with pytest.raises(InvalidInput, match="'rerun', 'done' or 'failed'"):
            await session.settle(CALL, odd)
        with pytest.raises(UnknownCall):
            await session.settle("chat.1.7.0", "done")


# ---------------------------------------------------------------------- deferred completion


def orderer(keys: list[str], *answers: Any, timeout: float | None = None, **options: Any) -> Agent[str]:
    @tool(deferred=True, **options)
    async def order(ctx: ToolContext[None]) -> str:
        keys.append(ctx.defer(timeout))
        return "ignored"

    return Agent(ScriptedModel(answers or [[ToolCall("a", "order")], "done"]), tools=[order])


async def test_a_deferred_call_is_completed_by_its_key(place: Place) -> None:
    keys: list[str] = []
    async with place.runtime(orderer(keys)) as runtime:
        session = await runtime.session("chat")
        parked = await session.run("go")
        assert [(c.call_id, c.kind) for c in waiting_for(parked)] == [(CALL, "deferred")]
        await runtime.resolve(keys[0], {"tracking": 42})
        result = await ends(session)

        assert result.tool_calls[0].outcome == Ok({"tracking": 42})
        assert result.text == "done"


async def test_a_key_works_in_another_runtime_on_the_same_store(place: Place) -> None:
    keys: list[str] = []
    async with place.runtime(orderer(keys)) as runtime:
        await (await runtime.session("chat")).run("go")
    async with place.runtime() as runtime:
        await runtime.resolve(keys[0], "arrived")
    async with place.runtime(orderer(keys, "done")) as runtime:
        result = await ends(await runtime.session("chat"))

        assert result.tool_calls[0].outcome == Ok("arrived")
        assert len(keys) == 1


async def test_the_first_completion_wins(place: Place) -> None:
    keys: list[str] = []
    async with place.runtime(orderer(keys)) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        ends_ = await asyncio.gather(*(runtime.resolve(keys[0], n) for n in range(10)), return_exceptions=True)
        result = await ends(session)

        assert [e for e in ends_ if e is None] == [None]
        assert sum(isinstance(e, AlreadyAnswered) for e in ends_) == 9
        assert result.tool_calls[0].outcome == Ok(ends_.index(None))


async def test_a_call_may_be_completed_as_failed(place: Place) -> None:
    keys: list[str] = []
    async with place.runtime(orderer(keys)) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await runtime.resolve(keys[0], {"shelf": 3}, error="sold out")

        expected = Failed("settled_as_failed", "sold out", {"shelf": 3})
        assert (await ends(session)).tool_calls[0].outcome == expected


async def test_a_forged_or_foreign_key_is_unknown(place: Place) -> None:
    keys: list[str] = []
    async with place.runtime(orderer(keys)) as runtime, Runtime("memory") as elsewhere:
        session = await runtime.session("chat")
        await session.run("go")
        prefix, name, signature = keys[0].split(".")
        forged = [
            f"{prefix}.{name}.{'A' * len(signature)}",
            f"{prefix}.{name[:-2]}AA.{signature}",
            f"msw2.{name}.{signature}",
            f"{prefix}.{name}",
            keys[0] + "x",
            "",
            "nonsense",
            "ü.ü.ü",
        ]

        for key in forged:
            with pytest.raises(UnknownWait, match="unknown or revoked"):
                await runtime.resolve(key, "stolen")
        with pytest.raises(UnknownWait):
            await elsewhere.resolve(keys[0], "stolen")
        assert len(await session.pending()) == 1


async def test_a_completion_may_come_before_the_tool_has_returned(place: Place) -> None:
    @tool(deferred=True)
    async def order(ctx: ToolContext[Runtime]) -> str:
        await box[0].resolve(ctx.defer(), "already here")
        return "ignored"

    box: list[Runtime] = []
    agent = Agent(ScriptedModel([[ToolCall("a", "order")], "done"]), tools=[order])
    async with place.runtime(agent) as runtime:
        box.append(runtime)
        result = await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)

        assert result.tool_calls[0].outcome == Ok("already here")


async def test_a_large_completion_has_the_output_budget_too(place: Place) -> None:
    keys: list[str] = []
    async with place.runtime(orderer(keys)) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await runtime.resolve(keys[0], "line\n" * 20_000)
        outcome = (await ends(session)).tool_calls[0].outcome

        assert isinstance(outcome, Ok)
        assert outcome.whole is not None
        assert outcome.whole.size > 100_000
        assert len(outcome.value) < 20_000


async def test_a_completion_has_the_output_budget_of_its_tool(place: Place) -> None:
    keys: list[str] = []
    async with place.runtime(orderer(keys, output_budget=OutputBudget(lines=10))) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await runtime.resolve(keys[0], "line\n" * 100)
        outcome = (await ends(session)).tool_calls[0].outcome

        assert isinstance(outcome, Ok)
        assert outcome.value.count("\n") < 10


async def test_nonsense_is_no_completion(place: Place) -> None:
    keys: list[str] = []
    async with place.runtime(orderer(keys)) as runtime:
        session = await runtime.session("chat")
        await session.run("go")

        with pytest.raises(InvalidInput):
            await runtime.resolve(keys[0], object())
        with pytest.raises(TooLarge):
            await runtime.resolve(keys[0], "x" * 40_000_000)
        await runtime.resolve(keys[0], float("nan"), error="lone \ud800")
        expected = Failed("settled_as_failed", "lone \ufffd", "NaN")
        assert (await ends(session)).tool_calls[0].outcome == expected


async def test_nobody_completes_in_time(place: Place) -> None:
    keys: list[str] = []
    clock = VirtualClock()
    async with place.runtime(orderer(keys, timeout=3600), clock=clock) as runtime:
        session = await runtime.session("chat")
        parked = await session.run("go")
        assert waiting_for(parked)[0].due == clock.now() + 3_600_000
        clock.advance(3600)
        result = await waits_out(session)

        assert result.tool_calls[0].outcome == OutcomeUnknown("nobody answered in time")
        with pytest.raises(AlreadyAnswered):
            await runtime.resolve(keys[0], "too late")


async def waits_out(session: Session) -> Any:
    """The result once the turn is not parked any more: a Runtime looks for waits that are due four times a second."""

    async def over() -> bool:
        return not (await session.result("chat.1")).waiting

    await until(over)
    return await session.result("chat.1")


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), -1.0, 1e30], ids=str)
async def test_a_tool_may_not_defer_for_nonsense(place: Place, timeout: float) -> None:
    async with place.runtime(orderer([], timeout=timeout)) as runtime:
        outcome = (await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)).tool_calls[0].outcome

        assert isinstance(outcome, Failed)
        assert outcome.message.startswith("defer for 0 to")


async def test_deferral_must_be_declared(place: Place) -> None:
    @tool
    async def order(ctx: ToolContext[None]) -> None:
        ctx.defer()

    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "order")], "done"]), tools=[order])) as runtime:
        outcome = (await (await runtime.session("chat")).run("go")).tool_calls[0].outcome

        assert isinstance(outcome, Failed)
        assert outcome.code == "tool_deferral_not_declared"


@pytest.mark.parametrize("how", ["returns", "raises"])
async def test_a_declared_tool_that_ends_by_itself_takes_its_key_back(place: Place, how: str) -> None:
    keys: list[str] = []

    @tool(deferred=True)
    async def order(ctx: ToolContext[None]) -> str:
        if how == "raises":
            keys.append(ctx.defer())
            raise ValueError("but then")
        keys.append(ctx._host.completion_key() or "")
        return "in stock"

    model = ScriptedModel([[ToolCall("a", "order")], [ToolCall("b", "shoot")], "done"])
    async with place.runtime(Agent(model, tools=[order, shoot])) as runtime:
        session = await runtime.session("chat")
        parked = await session.run("go")

        assert type(parked.tool_calls[0].outcome) is (Ok if how == "returns" else Failed)
        assert [c.call_id for c in await session.pending()] == ["chat.1.2.0"]
        with pytest.raises(UnknownWait):
            await runtime.resolve(keys[0], "too late")


async def test_a_key_dies_with_its_turn(place: Place) -> None:
    keys: list[str] = []
    async with place.runtime(orderer(keys)) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await session.cancel()
        await ends(session)

        with pytest.raises(AlreadyAnswered, match="cancelled"):
            await runtime.resolve(keys[0], "too late")


async def test_a_key_is_unknown_when_its_session_is_gone(place: Place) -> None:
    keys: list[str] = []
    async with place.runtime(orderer(keys)) as runtime:
        await (await runtime.session("chat")).run("go")
        await runtime.sessions.delete("chat")

        with pytest.raises(UnknownWait):
            await runtime.resolve(keys[0], "too late")


async def test_a_deferred_call_stays_on_its_wait_through_a_crash(place: Place) -> None:
    keys: list[str] = []
    runtime = await place.runtime(orderer(keys)).__aenter__()
    await (await runtime.session("chat")).run("go")
    await crash(runtime)
    async with place.runtime(orderer(keys, "done")) as runtime:
        session = await runtime.session("chat")
        await runtime.resolve(keys[0], "arrived")
        result = await ends(session)

        assert result.tool_calls[0].outcome == Ok("arrived")
        assert len(keys) == 1


async def test_every_key_of_a_hundred_sessions_finds_its_own_call() -> None:
    keys: dict[str, str] = {}

    @tool(deferred=True)
    async def order(ctx: ToolContext[None]) -> None:
        keys[ctx.session_id] = ctx.defer()

    def model(request: ModelRequest) -> Any:
        return "done" if request.messages[-1].role == "tool" else [ToolCall("a", "order")]

    async with Runtime("memory", agents=[Agent(FunctionModel(model), tools=[order])]) as runtime:
        sessions = [await runtime.session(f"s{n}") for n in range(100)]
        await asyncio.wait_for(asyncio.gather(*(s.run("go") for s in sessions)), SOON)
        for name, key in keys.items():
            await runtime.resolve(key, f"for {name}")
        results = await asyncio.wait_for(asyncio.gather(*(s.result(f"{s.id}.1") for s in sessions)), SOON)

        assert [r.tool_calls[0].outcome for r in results] == [Ok(f"for s{n}") for n in range(100)]
