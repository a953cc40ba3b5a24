"""One Runtime, one loop, one process; and many of them on one store."""

import asyncio
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Receipt, Runtime, Session, ToolCall, ToolContext, tool
from perdure.engine.lease import LeaseTerms
from perdure.errors import InvalidDefinition, PerdureError, RuntimeClosed, StoreInherited, WrongLoop
from perdure.model.tool import Ok
from perdure.sessions.definition import Definition
from perdure.testing import FunctionModel, ScriptedModel
from tests.kit import SOON, Place, TellingModel, noticed, texts, until


def echo(name: str = "assistant") -> Agent[str]:
    return Agent(FunctionModel(lambda request: f"re: {request.messages[-1].text}"), name=name)


async def refusals(runtime: Runtime, session: Session, receipt: Receipt) -> list[type[BaseException] | None]:
    """What everything a host can do ends in."""
    ends: list[type[BaseException] | None] = []
    for use in (
        lambda: session.run("x"),
        lambda: session.send("x"),
        lambda: session.steer("x"),
        lambda: session.cancel(),
        lambda: session.history(),
        lambda: session.pending(),
        lambda: session.result("chat.1"),
        lambda: session.fork(),
        lambda: session.approve("chat.1.1.0"),
        lambda: session.settle("chat.1.1.0", "done"),
        lambda: receipt.result(),
        lambda: runtime.session("x"),
        lambda: runtime.resolve("x"),
        lambda: runtime.wait_idle(),
        lambda: runtime.drain(),
        lambda: _now(session.observe),
        lambda: _now(lambda: session.stream("x")),
        lambda: _now(lambda: runtime.sessions),
    ):
        try:
            await use()
        except PerdureError as error:
            ends.append(type(error))
        else:
            ends.append(None)
    return ends


async def _now(use: Any) -> Any:
    return use()


async def test_a_runtime_that_was_left_refuses_everything(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("hello")
        await receipt.result()

    assert set(await refusals(runtime, session, receipt)) == {RuntimeClosed}


async def test_a_runtime_that_was_never_entered_refuses_everything() -> None:
    runtime = Runtime("memory", agents=[echo()])

    with pytest.raises(RuntimeClosed, match="async with"):
        await runtime.session("chat")
    with pytest.raises(RuntimeClosed):
        _ = runtime.sessions


async def test_a_runtime_belongs_to_its_event_loop(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("hello")
        await receipt.result()
        ends: list[Any] = []
        other = threading.Thread(target=lambda: ends.extend(asyncio.run(refusals(runtime, session, receipt))))
        other.start()
        await asyncio.to_thread(other.join)

        assert set(ends) == {WrongLoop}
        assert (await session.run("still here")).text == "re: still here"


async def test_a_runtime_is_entered_once_at_a_time(place: Place) -> None:
    runtime = place.runtime(echo())
    async with runtime:
        with pytest.raises(RuntimeClosed, match="entered already"):
            await runtime.__aenter__()
        assert (await (await runtime.session("chat")).run("one")).text == "re: one"


async def test_a_runtime_may_be_entered_again(place: Place) -> None:
    runtime = place.runtime(echo())
    async with runtime:
        await (await runtime.session("chat")).run("one")
    async with runtime:
        session = await runtime.session("chat")
        await session.run("two")

        assert texts(await session.history()) == ["one", "re: one", "two", "re: two"]


async def test_entering_and_leaving_may_happen_in_different_tasks(place: Place) -> None:
    runtime = place.runtime(echo())
    await asyncio.create_task(runtime.__aenter__())
    result = await asyncio.create_task((await runtime.session("chat")).run("hello"))
    await asyncio.create_task(runtime.__aexit__(None, None, None))

    assert result.text == "re: hello"


async def test_leaving_twice_is_harmless(place: Place) -> None:
    runtime = place.runtime(echo())
    async with runtime:
        pass
    await runtime.__aexit__(None, None, None)


async def test_a_forked_child_is_refused(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("chat")
        await session.run("hello")
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork: that is what is tested
            child = os.fork()
        if child == 0:
            said = ""
            try:
                runtime.sessions  # noqa: B018
            except StoreInherited as error:
                said = str(error)
            finally:
                os.write(write, said.encode())
                os._exit(0)
        os.close(write)
        await asyncio.to_thread(os.waitpid, child, 0)
        said = os.read(read, 1000).decode()
        os.close(read)

        assert f"process {child} inherited this store from process {os.getpid()}" in said
        assert "open it only after forking" in said
        assert (await session.run("the parent goes on")).text == "re: the parent goes on"


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("postgresql://localhost/x", "not part of this version"),
        ("mysql://localhost/x", "is not a store"),
    ],
)
def test_a_store_that_is_none_is_refused(where: str, why: str) -> None:
    with pytest.raises(InvalidDefinition, match=why):
        Runtime(where)


@pytest.mark.parametrize("form", ["str", "path", "url"])
async def test_a_store_may_be_named_in_several_ways(tmp_path: Path, form: str) -> None:
    path = tmp_path / "deep" / "folder" / "agent.db"
    where: Any = {"str": str(path), "path": path, "url": f"sqlite:///{path}"}[form]
    async with Runtime(where, agents=[echo()]) as runtime:
        await (await runtime.session("chat")).run("hello")

    assert path.exists()


def test_a_lease_that_is_too_tight_is_refused() -> None:
    with pytest.raises(InvalidDefinition, match="term >= 3"):
        LeaseTerms(term=10, renewal=5)


async def test_an_agent_that_cannot_be_made_ready_leaves_nothing_behind(
    file: Path | Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(file, Place)
    monkeypatch.delenv("AZURE_OPENAI_ENDPOINT", raising=False)
    runtime = file.runtime(Agent("azure:some-deployment"))
    with pytest.raises(InvalidDefinition, match="AZURE_OPENAI_ENDPOINT"):
        await runtime.__aenter__()
    async with file.runtime(echo()) as other:
        assert (await (await other.session("chat")).run("hello")).text == "re: hello"


# ---------------------------------------------------------------------- many


async def test_two_runtimes_in_one_process_share_a_store(place: Place) -> None:
    async with place.runtime(echo()) as one, place.runtime(echo()) as two:
        first, second = await one.session("chat"), await two.session("chat")
        await first.run("from one")
        await second.run("from two")
        await first.run("from one again")

        expected = ["from one", "re: from one", "from two", "re: from two", "from one again", "re: from one again"]
        assert texts(await first.history()) == texts(await second.history()) == expected


async def test_two_runtimes_speak_to_one_session_at_once(file: Place) -> None:
    async with file.runtime(echo()) as one, file.runtime(echo()) as two:
        first, second = await one.session("chat"), await two.session("chat")
        async with asyncio.timeout(3 * SOON):
            results = await asyncio.gather(*(s.run(f"say {n}") for n in range(5) for s in (first, second)))

        assert sorted(r.turn_id for r in results) == sorted(f"chat.{n}" for n in range(1, 11))
        assert all(r.text == f"re: {r.new_messages[0].text}" for r in results)
        assert len(await first.history()) == 20


async def test_a_turn_that_one_runtime_runs_can_be_awaited_in_another(file: Place) -> None:
    model = TellingModel()
    async with file.runtime(Agent(model)) as one, file.runtime() as two:
        receipt = await (await one.session("chat")).send("go")
        await model.next()
        watching = asyncio.create_task((await two.session("chat")).result(receipt.turn_id))
        await asyncio.sleep(0)
        model.say("done")

        assert (await asyncio.wait_for(watching, SOON)).text == "done"


async def test_a_turn_is_steered_from_another_runtime(file: Place) -> None:
    model = TellingModel()
    async with file.runtime(Agent(model)) as one, file.runtime() as two:
        receipt = await (await one.session("chat")).send("go")
        await model.next()
        steered = await (await two.session("chat")).steer("left")
        await noticed(one)
        model.say("one", "two")

        assert (await receipt.result(SOON)).text == "two"
        assert (await steered.result(SOON)).turn_id == receipt.turn_id


async def test_an_approval_from_another_runtime_does_not_wait_for_the_calls_beside_it(file: Place) -> None:
    booked, enough = asyncio.Event(), asyncio.Event()

    @tool
    async def stand_by() -> str:
        await enough.wait()
        return "stood by"

    @tool(approval="ask")
    async def book() -> str:
        booked.set()
        return "booked"

    model = ScriptedModel([[ToolCall("a", "stand_by"), ToolCall("b", "book")], "done"])
    async with file.runtime(Agent(model, tools=[stand_by, book])) as one, file.runtime() as two:
        receipt = await (await one.session("chat")).send("go")
        person = await two.session("chat")
        await until(person.pending)
        await person.approve("chat.1.1.1")
        await asyncio.wait_for(booked.wait(), SOON)
        enough.set()

        assert [call.outcome for call in (await receipt.result(SOON)).tool_calls] == [Ok("stood by"), Ok("booked")]


async def test_two_hundred_sessions_at_once(place: Place) -> None:
    @tool
    async def double(n: int, ctx: ToolContext[None]) -> int:
        await asyncio.sleep(0)
        return 2 * n

    def model(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return f"{request.messages[-1].tool_results[0].content}"
        return [ToolCall("a", "double", {"n": int(request.messages[-1].text)})]

    async with place.runtime(Agent(FunctionModel(model), tools=[double])) as runtime:
        sessions = [await runtime.session(f"s{n}") for n in range(200)]
        results = await asyncio.wait_for(asyncio.gather(*(s.run(str(n)) for n, s in enumerate(sessions))), 4 * SOON)

        assert [r.text for r in results] == [str(2 * n) for n in range(200)]
        assert {type(r.tool_calls[0].outcome) for r in results} == {Ok}
        assert len(await runtime.sessions.list(state="idle", limit=500)) == 200


async def test_a_fault_of_a_definition_parks_one_session_and_names_it(place: Place) -> None:
    """An output rule that fails in a way of its own is our fault or the host's: it must not pass in silence."""

    class Broken:
        name = "broken"
        spec = echo().spec

        def definition(self) -> Definition:
            made = Agent(ScriptedModel(["x", "y"]), name="broken").definition()

            def fail(text: str) -> Any:
                raise ZeroDivisionError("a bug")

            made.output_rule = fail
            return made

    broken: Any = Broken()
    async with place.runtime(echo(), broken) as runtime:
        bad = await runtime.session("bad", agent="broken")
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(bad.run("hello"), SOON)
        good = await runtime.session("good")

        assert (await good.run("hello")).text == "re: hello"
        (row,) = await runtime.sessions.list(state="stuck")
        assert (row.id, row.reason) == ("bad", "ZeroDivisionError: a bug")
        assert await bad.cancel("give it up") == "requested"
        assert type((await bad.result("bad.1")).outcome).__name__ == "Cancelled"


# ---------------------------------------------------------------------- a blocked loop


@pytest.mark.slow
async def test_a_blocked_loop_is_named_while_renewals_go_on(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    def named() -> list[str]:
        return [text for r in caplog.records if "blocked" in (text := r.getMessage()) and "tool freeze" in text]

    @tool
    async def freeze() -> int:
        end = time.monotonic() + SOON
        while (not named() or runtime._worker._row.beat < 4) and time.monotonic() < end:
            time.sleep(0.05)  # noqa: ASYNC251 - the mistake that is to be named
        return runtime._worker._row.beat

    agent = Agent(ScriptedModel([[ToolCall("a", "freeze")], "thawed"]), tools=[freeze])
    async with place.runtime(agent, lease=LeaseTerms(term=0.9, renewal=0.3)) as runtime:
        result = await (await runtime.session("chat")).run("go")
        (worker,) = await runtime.store.workers()

    (name,) = named()
    assert "tool freeze (chat.1.1.0)" in name
    assert "in freeze" in name
    assert worker.beat >= 4
    assert result.text == "thawed"
