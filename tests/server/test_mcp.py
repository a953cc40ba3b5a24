"""Agents as tools and sessions as resources, seen by the official client: within one process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import mcp_types as types
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError

from perdure import Agent, Runtime, ToolCall, tool
from perdure.errors import InvalidInput
from perdure.model.tool import Cancelled
from perdure.server import mcp
from perdure.testing import FunctionModel
from tests.kit import untyped

Mode = Literal["auto", "legacy"]
BOTH: list[Mode] = ["auto", "legacy"]


class Shop:
    """An agent whose tool wants approval, and what it did."""

    def __init__(self) -> None:
        self.paid: list[int] = []
        self.begun, self.go = asyncio.Event(), asyncio.Event()

        @tool(approval="ask")
        async def pay(amount: int) -> str:
            self.paid.append(amount)
            return f"paid {amount}"

        @tool
        async def deliver() -> str:
            self.begun.set()
            await self.go.wait()
            return "delivered"

        def model(request: Any) -> Any:
            last = request.messages[-1]
            match last.role, last.text.split(" "):
                case "user", ["pay", *amounts]:
                    return [ToolCall(name="pay", args={"amount": int(amount)}) for amount in amounts]
                case "user", ["deliver"]:
                    return [ToolCall(name="deliver")]
                case "user", said:
                    return f"you said {' '.join(said)}"
                case _:
                    return "thank you"

        self.agent = Agent(FunctionModel(model), name="shop", tools=[pay, deliver])


class Person:
    """Answers the questions of a server, in order, and keeps them."""

    def __init__(self, *answers: types.ElicitResult) -> None:
        self.answers, self.asked = list(answers), list[str]()

    async def __call__(self, context: Any, params: Any) -> types.ElicitResult:
        self.asked.append(params.message)
        return self.answers.pop(0)


def yes() -> types.ElicitResult:
    return types.ElicitResult(action="accept", content={"approve": True})


def no(reason: str) -> types.ElicitResult:
    return types.ElicitResult(action="accept", content={"approve": False, "reason": reason})


@asynccontextmanager
async def opened(path: Path | str, shop: Shop, **options: Any) -> AsyncGenerator[Any, None]:
    async with Runtime(path, agents=[shop.agent]) as runtime:
        yield mcp(runtime, **options)


def said(result: types.CallToolResult) -> str:
    assert isinstance(result.content[0], types.TextContent)
    return result.content[0].text


def facts(result: Any) -> dict[str, Any]:
    assert result.structured_content is not None
    found: dict[str, Any] = result.structured_content
    return found


@pytest.mark.parametrize("mode", BOTH)
async def test_a_prompt_is_a_turn_of_a_session_that_goes_on(mode: Mode) -> None:
    async with opened("memory", Shop()) as server, Client(server, mode=mode) as client:
        first = await client.call_tool("prompt", {"text": "hello"})
        session = facts(first)["session"]
        again = await client.call_tool("prompt", {"text": "again", "session": session})
        read = await client.read_resource(f"perdure://sessions/{session}")
        listed = await client.list_resources()

    assert said(first) == "you said hello"
    assert not first.is_error
    assert facts(again) == {
        "session": session, "turn": f"{session}.2", "status": "finished", "text": "you said again", "output": None,
        "pending": [],
    }  # fmt: skip
    assert isinstance(read.contents[0], types.TextResourceContents)
    shown = json.loads(read.contents[0].text)
    assert [message["role"] for message in shown["messages"]] == ["user", "assistant", "user", "assistant"]
    assert [resource.uri for resource in listed.resources] == [f"perdure://sessions/{session}"]


@pytest.mark.parametrize("mode", BOTH)
async def test_a_person_is_asked_about_each_call_that_wants_approval_and_sees_all_of_it(mode: Mode) -> None:
    shop, person, steps = Shop(), Person(yes(), no("too much")), list[str | None]()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        steps.append(message)

    async with opened("memory", shop) as server, Client(server, mode=mode, elicitation_callback=person) as client:
        result = await client.call_tool("prompt", {"text": "pay 3 4", "session": "s"}, progress_callback=on_progress)

    assert said(result) == "thank you"
    assert shop.paid == [3]
    assert len(person.asked) == 2
    assert "pay (s.1.1.0)" in person.asked[0]
    assert '"amount": 3' in person.asked[0]
    assert "pay: ok" in steps


@pytest.mark.parametrize("mode", BOTH)
async def test_who_has_nobody_to_ask_is_told_what_waits(mode: Mode) -> None:
    shop = Shop()
    async with opened("memory", shop) as server, Client(server, mode=mode) as client:
        result = await client.call_tool("prompt", {"text": "pay 3", "session": "s"})

    assert not result.is_error
    assert facts(result)["status"] == "waiting"
    assert [call["call_id"] for call in facts(result)["pending"]] == ["s.1.1.0"]
    assert "approval of pay (s.1.1.0)" in said(result)
    assert shop.paid == []


@pytest.mark.parametrize("mode", BOTH)
async def test_a_question_that_was_dismissed_waits_on(mode: Mode) -> None:
    shop, person = Shop(), Person(types.ElicitResult(action="cancel"), yes())
    async with opened("memory", shop) as server, Client(server, mode=mode, elicitation_callback=person) as client:
        waiting = await client.call_tool("prompt", {"text": "pay 3", "session": "s"})
        assert facts(waiting)["status"] == "waiting"
        assert shop.paid == []
        done = await client.call_tool("result", {"turn": facts(waiting)["turn"]})

    assert said(done) == "thank you"
    assert shop.paid == [3]


async def questions_of(client: Client, **arguments: Any) -> types.InputRequiredResult:
    asked = await client.session.call_tool("prompt", arguments, allow_input_required=True)
    assert isinstance(asked, types.InputRequiredResult)
    return asked


async def test_a_question_is_answered_in_another_process_on_the_same_store(tmp_path: Path) -> None:
    before, after = Shop(), Shop()
    person = Person()
    async with opened(tmp_path / "a.db", before) as server, Client(server, elicitation_callback=person) as client:
        asked = await questions_of(client, text="pay 3", session="s")
    async with opened(tmp_path / "a.db", after) as server, Client(server, elicitation_callback=person) as client:
        result = await client.session.call_tool(
            "prompt",
            {"text": "pay 3", "session": "s"},
            input_responses={"s.1.1.0": yes()},
            request_state=asked.request_state,
        )

    assert said(result) == "thank you"
    assert facts(result)["turn"] == "s.1"
    assert (before.paid, after.paid) == ([], [3])


async def test_what_was_answered_elsewhere_stands(tmp_path: Path) -> None:
    shop = Shop()
    runtime = Runtime(tmp_path / "a.db", agents=[shop.agent])
    async with runtime, Client(mcp(runtime), elicitation_callback=Person()) as client:
        asked = await questions_of(client, text="pay 3", session="s")
        await (await runtime.session("s")).reject("s.1.1.0", "no money")
        result = await client.session.call_tool(
            "prompt",
            {"text": "pay 3", "session": "s"},
            input_responses={"s.1.1.0": yes()},
            request_state=asked.request_state,
        )

    assert said(result) == "thank you"
    assert shop.paid == []


@pytest.mark.parametrize("how", ["forged", "other arguments", "other store"])
async def test_a_state_that_this_store_did_not_seal_for_this_request_is_refused(tmp_path: Path, how: str) -> None:
    shop = Shop()
    async with opened(tmp_path / "a.db", shop) as server, Client(server, elicitation_callback=Person()) as client:
        asked = await questions_of(client, text="pay 3", session="s")
    assert asked.request_state is not None
    state = f"{asked.request_state[:-4]}AAAA" if how == "forged" else asked.request_state
    place = tmp_path / ("b.db" if how == "other store" else "a.db")
    arguments = {"text": "pay 4" if how == "other arguments" else "pay 3", "session": "s"}
    async with opened(place, shop) as server, Client(server, elicitation_callback=Person()) as client:
        with pytest.raises(MCPError, match="requestState"):
            await client.session.call_tool("prompt", arguments, input_responses={"s.1.1.0": yes()}, request_state=state)

    assert shop.paid == []


async def test_the_same_key_is_the_same_turn() -> None:
    async with opened("memory", Shop()) as server, Client(server) as client:
        first = await client.call_tool("prompt", {"text": "hello", "session": "s", "key": "k"})
        again = await client.call_tool("prompt", {"text": "hello", "session": "s", "key": "k"})

    assert facts(first) == facts(again)


async def given_up(client: Client, shop: Shop) -> None:
    """A client asks, and stops waiting."""
    asking = asyncio.create_task(client.call_tool("prompt", {"text": "deliver", "session": "s"}))
    await shop.begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_request_that_its_client_cancels_ends_its_turn() -> None:
    shop = Shop()
    runtime = Runtime("memory", agents=[shop.agent])
    async with runtime, Client(mcp(runtime), mode="legacy") as client:  # this one sends `notifications/cancelled`
        await given_up(client, shop)
        result = await (await runtime.session("s")).result("s.1")

    assert isinstance(result.outcome, Cancelled)


async def test_a_client_that_is_gone_does_not_end_its_turn() -> None:
    shop = Shop()
    async with opened("memory", shop) as server:
        async with Client(server) as client:  # this one has no such message, and only goes away
            await given_up(client, shop)
        shop.go.set()
        async with Client(server) as client:
            result = await client.call_tool("result", {"turn": "s.1"})

    assert said(result) == "thank you"


async def test_a_turn_is_cancelled_by_its_id() -> None:
    shop = Shop()
    async with opened("memory", shop) as server, Client(server) as client:
        asking = asyncio.create_task(client.call_tool("prompt", {"text": "deliver", "session": "s"}))
        await shop.begun.wait()
        status = await client.call_tool("cancel", {"turn": "s.1"})
        result = await asking

    assert said(status) == "requested"
    assert facts(result)["status"] == "cancelled"


async def test_a_namespace_hides_the_sessions_of_others() -> None:
    shop = Shop()
    async with Runtime("memory", agents=[shop.agent]) as runtime:
        await (await runtime.session("private")).run("hello")
        async with Client(mcp(runtime, namespace="guest-"), elicitation_callback=Person()) as client:
            result = await client.call_tool("prompt", {"text": "hello", "session": "private"})
            listed = [resource.name for resource in (await client.list_resources()).resources]
            other = await client.call_tool("result", {"turn": "../private.1"})
            with pytest.raises(MCPError, match="no resource"):
                await client.read_resource("perdure://sessions/guest-private")
            asked = await questions_of(client, text="pay 3", session="private")
        sessions = sorted([row.id for row in await runtime.sessions.list()])

    assert facts(result)["session"] == "private"
    assert listed == ["private"]
    assert other.is_error
    assert sessions == ["guest-private", "private"]
    assert asked.request_state is not None


async def test_sessions_of_clients_are_for_whom_the_host_says() -> None:
    agent = Agent(FunctionModel(lambda request: f"you are {request.metadata.get('user')}"), name="desk")
    async with Runtime("memory", agents=[agent]) as runtime:
        await (await runtime.session("hers", metadata={"user": "bo"})).run("hello")
        async with Client(mcp(runtime, metadata={"user": "kim"})) as client:
            begun = await client.call_tool("prompt", {"text": "who am I?", "session": "mine"})
            again = await client.call_tool("prompt", {"text": "who am I?", "session": "mine"})
            other = await client.call_tool("prompt", {"text": "who am I?", "session": "hers"})
        [row] = await runtime.sessions.list(metadata={"user": "kim"})

    assert [said(begun), said(again)] == ["you are kim", "you are kim"]
    assert other.is_error
    assert row.id == "mine"


async def test_metadata_that_no_session_can_have_is_refused() -> None:
    with pytest.raises(InvalidInput, match="metadata"):
        mcp(Runtime("memory", agents=[Agent("scripted")]), metadata=untyped({"user": ["kim"]}))


async def test_several_agents_have_a_tool_each_with_what_they_are_for() -> None:
    agents = [Agent(FunctionModel(lambda request: "well"), name=name) for name in ("cook", "baker")]
    async with Runtime("memory", agents=agents) as runtime:
        with pytest.raises(InvalidInput, match="no agent 'waiter'"):
            mcp(runtime, descriptions={"waiter": "Serves."})
        async with Client(mcp(runtime, descriptions={"cook": "Cooks."})) as client:
            tools = {each.name: each.description for each in (await client.list_tools()).tools}
            result = await client.call_tool("prompt_cook", {"text": "hello", "session": "s"})

    assert list(tools) == ["prompt_cook", "prompt_baker", "result", "cancel"]
    assert (tools["prompt_cook"] or "").endswith("Cooks.")
    assert not result.is_error


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("prompt", {}, "text"),
    ("prompt", {"text": 3}, "text"),
    ("prompt", {"text": "x", "sessions": "s"}, "sessions"),
    ("prompt", {"text": "x", "session": "a b/c\n"}, "session"),
    ("prompt", {"text": "x", "key": ""}, "key"),
    ("result", {"turn": "nothing"}, "turn"),
    ("result", {"turn": "nobody.1"}, "nobody"),
    ("cancel", {"turn": "nobody.1"}, "nobody"),
]


@pytest.mark.parametrize(("name", "arguments", "told"), BAD)
async def test_arguments_that_do_not_fit_are_told_in_the_result(
    name: str, arguments: dict[str, Any], told: str
) -> None:
    async with opened("memory", Shop()) as server, Client(server) as client:
        result = await client.call_tool(name, arguments)

    assert result.is_error
    assert told in said(result)


async def test_what_does_not_exist_is_an_error_of_the_protocol() -> None:
    async with opened("memory", Shop()) as server, Client(server) as client:
        with pytest.raises(MCPError, match="no tool 'pay'"):
            await client.call_tool("pay", {"amount": 3})
        for uri in ("perdure://sessions/nobody", "file:///etc/passwd", "perdure://sessions/"):
            with pytest.raises(MCPError, match="no resource"):
                await client.read_resource(uri)
        with pytest.raises(MCPError, match="cursor"):
            await client.list_resources(cursor="nonsense")
