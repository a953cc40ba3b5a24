"""Clients that mean harm, or are only quick: what they reach, see and decide."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError

from perdure import Agent, Message, Plugin, Runtime, ToolCall, tool
from perdure.errors import InvalidInput
from perdure.model.tool import Cancelled
from perdure.plugins import InputContext
from perdure.server import mcp
from perdure.testing import FunctionModel
from tests.kit import until, untyped
from tests.server.test_mcp import BOTH, Mode, Person, Shop, facts, opened, questions_of, said, yes

GUEST = "guest-"


@pytest.mark.parametrize("mode", BOTH)
async def test_clients_see_nothing_of_their_namespace(mode: Mode) -> None:
    shop, person, seen, steps = Shop(), Person(yes()), list[Any](), list[str | None]()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        steps.append(message)

    async with Runtime("memory", agents=[shop.agent]) as runtime:
        server = mcp(runtime, namespace=GUEST)
        async with Client(server, mode=mode, elicitation_callback=person) as client:
            paid = await client.call_tool("prompt", {"text": "pay 3", "session": "s"}, progress_callback=on_progress)
            seen.append(await client.call_tool("result", {"turn": "s.9"}))
            seen.append(await client.call_tool("result", {"turn": "nobody.1"}))
            seen.append(await client.call_tool("prompt", {"text": "x", "session": "y" * 2000}))
            seen.append(await client.read_resource("perdure://sessions/s"))
            seen.append(await client.list_resources())
        async with Client(server, mode=mode) as client:
            seen.append(await client.call_tool("prompt", {"text": "pay 4", "session": "s"}))

    assert shop.paid == [3]
    assert said(paid) == "thank you"
    assert "pay (s.1.1.0)" in person.asked[0]
    assert "there is no turn 's.9'" in said(seen[0])
    assert '"id":"s.1.1.0"' in seen[3].contents[0].text
    assert facts(seen[5])["pending"][0]["call_id"] == "s.2.1.0"
    assert GUEST not in repr([paid, seen, person.asked, steps])


async def test_keys_of_questions_are_without_the_namespace() -> None:
    runtime = Runtime("memory", agents=[Shop().agent])
    async with runtime, Client(mcp(runtime, namespace=GUEST), elicitation_callback=Person()) as client:
        asked = await questions_of(client, text="pay 3", session="s")

    assert list(asked.input_requests or {}) == ["s.1.1.0"]


@pytest.mark.parametrize("namespace", ["user1", "a b", "x\n-", "\0-", "é", "n" * 100 + "-", 7, "\ud800-"])
async def test_namespace_that_others_may_begin_with_is_refused(namespace: object) -> None:
    async with Runtime("memory", agents=[Shop().agent]) as runtime:
        with pytest.raises(InvalidInput, match="is not usable"):
            mcp(runtime, namespace=untyped(namespace))


async def test_person_sees_signs_that_a_screen_would_hide() -> None:
    @tool(approval="ask")
    async def send(to: str) -> str:
        return to

    hidden = "kim\u202e\u200b\U000e0041@example.com"
    agent = Agent(
        FunctionModel(lambda request: [ToolCall(name="send", args={"to": hidden})]), name="mail", tools=[send]
    )
    async with (
        Runtime("memory", agents=[agent]) as runtime,
        Client(mcp(runtime), elicitation_callback=Person()) as client,
    ):
        asked = await questions_of(client, text="go", session="s")

    [request] = (asked.input_requests or {}).values()
    assert isinstance(request, types.ElicitRequest)
    assert r'"kim\u202e\u200b\udb40\udc41@example.com"' in request.params.message


# ---------------------------------------------------------------------- states and answers


async def go_on(client: Client, asked: types.InputRequiredResult, answer: types.ElicitResult | None = None) -> Any:
    return await client.session.call_tool(
        "prompt",
        {"text": "pay 3", "session": "s"},
        input_responses={"s.1.1.0": answer or yes()},
        request_state=asked.request_state,
    )


async def test_state_that_is_sent_again_decides_nothing_again(tmp_path: Path) -> None:
    shop = Shop()
    async with opened(tmp_path / "a.db", shop) as server, Client(server, elicitation_callback=Person()) as client:
        asked = await questions_of(client, text="pay 3", session="s")
        first = await go_on(client, asked)
        again = await asyncio.gather(*[go_on(client, asked) for _ in range(5)])

    assert [said(each) for each in [first, *again]] == ["thank you"] * 6
    assert shop.paid == [3]


async def test_answers_from_two_servers_on_a_store_at_once_run_the_call_once(tmp_path: Path) -> None:
    one, two = Shop(), Shop()
    async with (
        opened(tmp_path / "a.db", one) as first,
        opened(tmp_path / "a.db", two) as second,
        Client(first, elicitation_callback=Person()) as here,
        Client(second, elicitation_callback=Person()) as there,
    ):
        asked = await questions_of(here, text="pay 3", session="s")
        results = await asyncio.gather(go_on(here, asked), go_on(there, asked))

    assert [said(each) for each in results] == ["thank you"] * 2
    assert one.paid + two.paid == [3]


async def test_state_of_one_namespace_decides_nothing_in_another(tmp_path: Path) -> None:
    shop = Shop()
    async with Runtime(tmp_path / "a.db", agents=[shop.agent]) as runtime:
        async with Client(mcp(runtime, namespace="a-"), elicitation_callback=Person()) as client:
            asked = await questions_of(client, text="pay 3", session="s")
        async with Client(mcp(runtime, namespace="b-"), elicitation_callback=Person()) as client:
            await questions_of(client, text="pay 3", session="s")
            with pytest.raises(MCPError, match="requestState"):
                await go_on(client, asked)

    assert shop.paid == []


@pytest.mark.parametrize(
    "content",
    [
        {"approve": "true"},
        {"approve": 1},
        {"approve": ["yes"]},
        {},
        {"approve": False, "reason": "no\0\x1b[8m\ud800" * 1000},
    ],
    ids=range(5),
)  # fmt: skip
async def test_only_a_plain_yes_approves(content: dict[str, Any]) -> None:
    shop = Shop()
    async with opened("memory", shop) as server, Client(server, elicitation_callback=Person()) as client:
        asked = await questions_of(client, text="pay 3", session="s")
        answer = types.ElicitResult.model_construct(action="accept", content=untyped(content))
        result: Any = None
        with contextlib.suppress(UnicodeEncodeError):  # what is no text does not even leave the client
            result = await go_on(client, asked, answer=answer)

    assert shop.paid == []
    assert result is None or said(result) == "thank you"


@pytest.mark.parametrize(
    "uri",
    [
        "perdure://sessions/../s", "perdure://sessions/%2e%2e%2fs", "perdure://sessions/%00", "perdure://sessions/s?a=b",
        "perdure://sessions/s%2F..", "perdure://sessions/%ED%A0%80", "PERDURE://sessions/s", "perdure://sessions//s",
        "perdure://user@sessions/s", f"perdure://sessions/{'a' * 100_000}",
    ],
    ids=range(10),
)  # fmt: skip
async def test_tricks_in_a_uri_reach_nothing(uri: str) -> None:
    async with opened("memory", Shop()) as server, Client(server) as client:
        await client.call_tool("prompt", {"text": "hello", "session": "s"})
        with pytest.raises(MCPError, match="no resource"):
            await client.read_resource(uri)


async def test_text_without_end_is_refused() -> None:
    async with opened("memory", Shop()) as server, Client(server) as client:
        result = await client.call_tool("prompt", {"text": "x" * 40_000_000, "session": "s"})

    assert result.is_error
    assert facts(result)["error"] == "too_large"


# ---------------------------------------------------------------------- cancels


class Slow(Plugin):
    """Accepts an input when it is let."""

    id = "slow"

    def __init__(self) -> None:
        self.entered, self.go = asyncio.Event(), asyncio.Event()

    async def transform_input(self, ctx: InputContext, message: Message) -> Message:
        self.entered.set()
        await self.go.wait()
        return message


async def test_request_that_is_cancelled_while_its_turn_is_accepted_ends_it() -> None:
    slow, release = Slow(), asyncio.Event()

    @tool
    async def work() -> str:
        await release.wait()
        return "done"

    agent = Agent(FunctionModel(lambda request: [ToolCall(name="work")]), name="shop", tools=[work], plugins=[slow])
    runtime = Runtime("memory", agents=[agent])
    async with runtime, Client(mcp(runtime), mode="legacy") as client:
        asking = asyncio.create_task(client.call_tool("prompt", {"text": "hello", "session": "s"}))
        await slow.entered.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await client.list_tools()  # the server has heard of it
        slow.go.set()
        await until(lambda: runtime.store.session("s"))
        result = await (await runtime.session("s")).result("s.1")
        release.set()

    assert isinstance(result.outcome, Cancelled)


async def test_cancels_of_requests_that_are_not_there_harm_nothing() -> None:
    async with opened("memory", Shop()) as server, Client(server, mode="legacy") as client:
        for number in (1, 99, "abc", -1):
            params = types.CancelledNotificationParams(request_id=number, reason="\0" * 10)
            await client.session.send_notification(types.CancelledNotification(params=params))
        result = await client.call_tool("prompt", {"text": "hello"})

    assert said(result) == "you said hello"
