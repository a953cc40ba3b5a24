"""Tools that a provider runs itself: how each dialect asks for them, and what becomes of what they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure import Agent, Budget, ProviderTool, Runtime, tool
from perdure.errors import InvalidDefinition, ProviderError
from perdure.model.llm import ModelRequest, ModelSettings
from perdure.model.message import Message, ProviderPart
from perdure.model.outcome import ProviderFailed
from perdure.model.tool import ToolSpec
from perdure.providers.registry import provider
from perdure.providers.structured import shape_request
from perdure.testing.model_server import ModelServer, Reply
from tests.providers.wire import ANSWERS, MODEL, dialects

SEARCH, CODE = ProviderTool("web_search"), ProviderTool("code_execution")
GET = ToolSpec("get", "Look it up.", {"type": "object", "properties": {}})


def sent(name: str, *tools: ProviderTool, **fields: Any) -> Any:
    request = ModelRequest([Message("user", "x")], provider_tools=tools, **fields)
    wire = dialects()[name].build(request, MODEL)
    return {**msgspec.json.decode(b"".join(p for p in wire.body if isinstance(p, bytes))), "headers": wire.headers}


def test_tools_of_anthropic() -> None:
    said = sent("anthropic", ProviderTool("web_search", {"max_uses": 3}), CODE, tools=(GET,))

    assert said["tools"][:2] == [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "code_execution_20250825", "name": "code_execution"},
    ]
    assert said["tools"][2]["name"] == "get"
    assert said["headers"]["anthropic-beta"] == "code-execution-2025-08-25"


def test_a_newer_version_of_a_tool_is_chosen_by_an_option() -> None:
    said = sent("anthropic", ProviderTool("code_execution", {"type": "code_execution_20260101"}))

    assert said["tools"] == [{"type": "code_execution_20260101", "name": "code_execution"}]
    assert "anthropic-beta" not in said["headers"]


def test_tools_of_openai() -> None:
    said = sent("openai", SEARCH, CODE)

    assert said["tools"] == [
        {"type": "web_search"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
    ]
    assert "code_interpreter_call.outputs" in said["include"]


def test_tools_of_google() -> None:
    said = sent("google", SEARCH, CODE, ProviderTool("web_fetch"), tools=(GET,))

    assert said["tools"][:3] == [{"googleSearch": {}}, {"codeExecution": {}}, {"urlContext": {}}]
    assert said["tools"][3]["functionDeclarations"][0]["name"] == "get"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("openai-chat", "web_search"), ("bedrock", "web_search"), ("openai", "web_fetch"), ("anthropic", "image_search")],
)
def test_a_tool_that_a_provider_does_not_have_is_refused_by_name(name: str, kind: str) -> None:
    with pytest.raises(ProviderError, match=f"no tool '{kind}' of its own") as caught:
        sent(name, ProviderTool(kind))
    assert caught.value.code == "invalid_settings"


@pytest.mark.parametrize("given", [("",), (7,), ("web_search", "fast")])
def test_what_is_no_tool_of_a_provider_is_refused(given: Any) -> None:
    with pytest.raises(InvalidDefinition, match="ProviderTool"):
        ProviderTool(*given)


def test_two_of_one_name_are_refused_at_the_agent() -> None:
    @tool
    def web_search(query: str) -> str:
        """Look it up."""
        return query

    with pytest.raises(InvalidDefinition, match="twice"):
        Agent(tools=[SEARCH, ProviderTool("web_search", {"max_uses": 1})])
    with pytest.raises(InvalidDefinition, match="rename the tool"):
        Agent(tools=[SEARCH, web_search])


@pytest.mark.parametrize("name", ["anthropic", "google"])
def test_a_typed_answer_beside_such_tools_is_asked_for_in_a_way_that_allows_them(name: str) -> None:
    request = ModelRequest([Message("user", "x")], output_schema={"type": "object", "properties": {}})
    request = msgspec.structs.replace(request, provider_tools=(SEARCH,))
    shaped = shape_request(dialects()[name], request, "gemini-2.5-pro").request

    assert not shaped.output_schema, "held to no schema by the API"


CASES = [
    (name, case) for name, answers in ANSWERS.items() for case in answers if case in ("web search", "code execution")
]


@pytest.mark.parametrize(("name", "case"), CASES)
async def test_what_a_tool_of_the_provider_did_is_recorded_and_goes_back_after_a_restart(
    name: str, case: str, tmp_path: Path
) -> None:
    own = ProviderTool(case.replace(" ", "_"))
    parts = [part for part in ANSWERS[name][case].response.parts if isinstance(part, ProviderPart)]
    async with ModelServer([ANSWERS[name][case].reply, ANSWERS[name]["text"].reply]) as server:
        agent = Agent(provider(f"{name}:{MODEL}", base_url=server.url, key="k"), tools=[own])
        async with Runtime(tmp_path / "a.db", agents=[agent]) as runtime:
            await (await runtime.session("s")).run("How is Paris?")
        async with Runtime(tmp_path / "a.db", agents=[agent]) as runtime:
            result = await (await runtime.session("s")).run("And now?")
        first, second = (asked.body.decode() for asked in server.asked)

    assert result.text == "Grüße, Welt 😀"
    assert result.tool_calls == []
    for part in parts:
        assert part.body in second
        assert part.body not in first
        assert part.text


async def test_a_paused_answer_goes_on_with_what_it_had_said() -> None:
    async with ModelServer([ANSWERS["anthropic"][case].reply for case in ("paused", "text")]) as server:
        agent = Agent(provider(f"anthropic:{MODEL}", base_url=server.url, key="k"), tools=[SEARCH])
        result = await agent.run("How is Paris?")
        again = server.asked[1].json["messages"]

    assert result.text == "Grüße, Welt 😀"
    assert [message["role"] for message in again] == ["user", "assistant"]
    assert again[1]["content"][0]["type"] == "server_tool_use"


async def test_the_last_step_of_a_budget_has_no_tools_of_the_provider() -> None:
    async with ModelServer([ANSWERS["anthropic"][case].reply for case in ("paused", "text")]) as server:
        model = provider(f"anthropic:{MODEL}", base_url=server.url, key="k")
        await Agent(model, tools=[SEARCH], budget=Budget(steps=1)).run("How is Paris?")
        asked = [each.json for each in server.asked]

    assert [bool(each.get("tools")) for each in asked] == [True, False]


async def test_an_attempt_that_broke_off_runs_the_tool_again_and_is_counted() -> None:
    whole = ANSWERS["anthropic"]["web search"].reply
    broken = Reply(body=whole.body, headers=whole.headers, upto=len(whole.body) - 40, end="cut")
    async with ModelServer([broken, whole]) as server:
        agent = Agent(provider(f"anthropic:{MODEL}", base_url=server.url, key="k"), tools=[SEARCH])
        result = await agent.run("How is Paris?")

    assert result.text == "It rains."
    assert server.asked[0].body == server.asked[1].body
    assert result.usage.unknown == 1


async def test_a_model_without_such_a_tool_ends_the_turn_with_its_name() -> None:
    agent = Agent("openai-chat:gpt-5", tools=[SEARCH], settings=ModelSettings())
    async with Runtime("memory", agents=[agent]) as runtime:
        result = await (await runtime.session("s")).run("Hi")

    assert isinstance(result.outcome, ProviderFailed)
    assert "'web_search'" in result.outcome.message
