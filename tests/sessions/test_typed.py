"""A session that was opened with an Agent object gives results of its type, wherever they are read."""

from __future__ import annotations

import dataclasses

import pytest

from perdure import Agent, ModelRequest, tool
from perdure.errors import InvalidInput, NotRevived, WrongAgent
from perdure.model.outcome import Incomplete
from perdure.testing import FunctionModel, ScriptedModel
from tests.kit import Place, agent_calling, untyped


@dataclasses.dataclass
class Ticket:
    title: str


@dataclasses.dataclass
class Bill:
    amount: int


def answering(text: str) -> FunctionModel:
    def model(request: ModelRequest) -> str:
        return text

    return FunctionModel(model)


def support() -> Agent[Ticket]:
    return Agent(answering('{"title": "Printer"}'), name="support", output=Ticket)


async def test_every_way_to_a_result_has_the_type_of_the_agent(place: Place) -> None:
    agent = support()
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s", agent=agent)
        ran = await session.run("a")
        sent = await (await session.send("b")).result()
        async with session.stream("c") as stream:
            streamed = await stream.result()
        read = await session.result(ran.turn_id)
        forked = await (await session.fork()).run("d")

    assert [each.output for each in (ran, sent, streamed, read, forked)] == [Ticket("Printer")] * 5
    assert {each.agent for each in (ran, sent, streamed, read, forked)} == {"support"}


async def test_a_runtime_without_the_agent_reads_the_type_by_the_agent_object(file: Place) -> None:
    agent = support()
    async with file.runtime(agent) as runtime:
        turn = (await (await runtime.session("s")).run("a")).turn_id
    async with file.runtime() as runtime:
        typed = await (await runtime.session("s", agent=agent)).result(turn)
        plain = await (await runtime.session("s")).result(turn)

    assert typed.output == Ticket("Printer")
    assert plain.output == {"title": "Printer"}


async def test_the_output_of_an_agent_of_another_type_is_refused(file: Place) -> None:
    async with file.runtime(support()) as runtime:
        turn = (await (await runtime.session("s")).run("a")).turn_id
    bill: Agent[Bill] = Agent(ScriptedModel([]), name="support", output=Bill)
    words: Agent[str] = Agent(ScriptedModel([]), name="support")
    async with file.runtime(bill) as runtime:
        result = await (await runtime.session("s", agent=bill)).result(turn)
        with pytest.raises(NotRevived, match="the output of agent 'support'"):
            _ = result.output
        spoken = await (await runtime.session("s", agent=words)).result(turn)
        with pytest.raises(NotRevived, match="the answer is JSON, and this agent answers in words"):
            _ = spoken.output

    assert result.agent == "support"
    assert result.text == '{"title": "Printer"}'


async def test_a_session_belongs_to_the_agent_it_was_begun_with(place: Place) -> None:
    first, second = support(), Agent(ScriptedModel([]), name="other")
    async with place.runtime(first, second) as runtime:
        await (await runtime.session("s", agent=first)).run("a")
        with pytest.raises(WrongAgent):
            await runtime.session("s", agent=second)
        with pytest.raises(InvalidInput, match="it has no read_output"):
            await runtime.session("s", agent=untyped(5))


async def test_a_result_tells_what_it_waits_for_and_whether_it_failed(place: Place) -> None:
    @tool(approval="ask")
    async def pay(amount: int) -> int:
        """Pay."""
        return amount

    async with place.runtime(agent_calling("pay", {"amount": 5}, tools=[pay])) as runtime:
        session = await runtime.session("s")
        waiting = await session.run("pay")
        queued = await session.run("and?")
        await session.approve(waiting.pending[0].call_id)
        done = await session.result(waiting.turn_id)

    assert [(each.tool, each.args) for each in waiting.pending] == [("pay", {"amount": 5})]
    assert (waiting.failed, waiting.error) == (False, None)
    assert [each.tool for each in queued.pending] == ["pay"]
    assert (queued.failed, done.failed, done.pending) == (False, False, ())
    assert done.tool_calls[0].value == 5


async def test_a_failed_result_says_why(place: Place) -> None:
    @tool
    async def broken() -> str:
        """Break."""
        raise ValueError("boom")

    async with place.runtime(agent_calling("broken", tools=[broken])) as runtime:
        done = await (await runtime.session("s")).run("go")
    agent = Agent(answering("no JSON at all"), output=Ticket)
    result = await agent.run("go")

    assert done.tool_calls[0].value is None
    assert isinstance(result.outcome, Incomplete)
    assert result.failed
    assert result.error is not None
    assert result.turn_id in result.error
    assert result.outcome.reason in result.error
    assert result.pending == ()
