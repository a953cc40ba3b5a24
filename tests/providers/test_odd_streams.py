"""Sessions after answers of every shape: the next request is one that the API takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from perdure import Agent, Runtime, tool
from perdure.model.tool import Ok
from perdure.testing.model_server import Asked, ModelServer, Reply
from tests.providers.test_http import ANSWER_CASES, connect
from tests.providers.wire import ANSWERS


@tool
async def get(city: str = "", n: int = 0) -> str:
    """Look it up."""
    return f"{city or n} is fine"


@tool
async def put() -> None:
    """Write it down."""


@tool
async def final_answer(name: str = "") -> str:
    """Answer."""
    return name


def by_anthropic(said: Any) -> None:
    called: list[str] = []
    for before, message in zip([None, *said["messages"]], said["messages"], strict=False):
        assert message["content"]
        assert before is None or before["role"] != message["role"]
        assert [b["tool_use_id"] for b in message["content"] if b["type"] == "tool_result"] == called
        called = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
        assert len(set(called)) == len(called)
        for block in message["content"]:
            assert block["type"] != "text" or block["text"].strip()
            assert block["type"] != "thinking" or block["signature"]


def by_openai(said: Any) -> None:
    items = said["input"]
    for item, after in zip(items, [*items[1:], {}], strict=True):
        if item.get("type") == "reasoning":
            assert item["encrypted_content"]
            assert after.get("role") != "user"
    called = [item["call_id"] for item in items if item.get("type") == "function_call"]
    assert [item["call_id"] for item in items if item.get("type") == "function_call_output"] == called


def by_openai_chat(said: Any) -> None:
    called: list[str] = []
    for message in said["messages"]:
        if message["role"] == "tool":
            assert message["tool_call_id"] == called.pop(0)
            continue
        assert called == []
        assert message["content"] or message.get("tool_calls")
        called = [call["id"] for call in message.get("tool_calls", ())]
        assert len(set(called)) == len(called)
        assert all(call["function"]["name"] for call in message.get("tool_calls", ()))


def by_google(said: Any) -> None:
    called: list[str] = []
    for before, content in zip([None, *said["contents"]], said["contents"], strict=False):
        assert content["parts"]
        assert before is None or before["role"] != content["role"]
        assert all(part.keys() - {"thought", "thoughtSignature"} for part in content["parts"])
        assert [p["functionResponse"]["name"] for p in content["parts"] if "functionResponse" in p] == called
        calls = [part for part in content["parts"] if "functionCall" in part]
        called = [part["functionCall"]["name"] for part in calls]
        assert not calls or calls[0]["thoughtSignature"]


def by_bedrock(said: Any) -> None:
    called: list[str] = []
    for before, message in zip([None, *said["messages"]], said["messages"], strict=False):
        assert message["content"]
        assert before is None or before["role"] != message["role"]
        assert [b["toolResult"]["toolUseId"] for b in message["content"] if "toolResult" in b] == called
        called = [block["toolUse"]["toolUseId"] for block in message["content"] if "toolUse" in block]
        for block in message["content"]:
            assert "text" not in block or block["text"].strip()
            thought = block.get("reasoningContent", {})
            assert "reasoningText" not in thought or thought["reasoningText"]["signature"]


TAKES: dict[str, Callable[[Any], None]] = {
    "anthropic": by_anthropic,
    "openai": by_openai,
    "openai-chat": by_openai_chat,
    "google": by_google,
    "bedrock": by_bedrock,
}
"""What each API insists on, as far as it was ever told by a refusal."""


@pytest.mark.parametrize(("name", "case"), ANSWER_CASES)
async def test_a_session_goes_on_after_an_answer_of_any_shape(name: str, case: str) -> None:
    def reply(_: Asked) -> Reply:
        return ANSWERS[name][case if len(server.asked) == 1 else "text"].reply

    async with ModelServer(reply) as server:
        agent = Agent(connect(server, name), tools=[get, put, final_answer])
        async with Runtime("memory", agents=[agent]) as runtime:
            session = await runtime.session("s")
            await session.run("How is Paris?")
            again = await session.run("And now?")

        assert again.text == "Grüße, Welt 😀"
        for asked in server.asked:
            TAKES[name](asked.json)


SAME_ID = {
    "anthropic": ("parallel", b'"id":"toolu_2"', b'"id":"toolu_1"'),
    "openai": ("parallel", b'"call_id":"call_2"', b'"call_id":"call_1"'),
    "openai-chat": ("parallel", b'"id":"call_2"', b'"id":"call_1"'),
}


@pytest.mark.parametrize("name", SAME_ID)
async def test_calls_under_one_id_are_all_run_and_answered_under_ids_of_their_own(name: str) -> None:
    case, old, new = SAME_ID[name]
    script = ANSWERS[name][case].reply
    same = Reply(body=script.body.replace(old, new), headers=script.headers)
    async with ModelServer([same, ANSWERS[name]["text"].reply]) as server:
        async with Runtime("memory", agents=[Agent(connect(server, name), tools=[get, put])]) as runtime:
            result = await (await runtime.session("s")).run("How is Paris?")

        assert [type(call.outcome) for call in result.tool_calls] == [Ok, Ok]
        TAKES[name](server.asked[1].json)
