"""`perdure doctor AGENT`: which models cannot be asked from here, and what to set."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Runtime
from perdure.providers.registry import SERVICES
from perdure.testing import ScriptedModel
from tests.cli.shell import say, shell

SECRET = "sk-very-secret-4711"

AGENTS = """
from perdure import Agent
from perdure.providers.fallback import Fallback
from perdure.providers.registry import provider

claude = Agent("anthropic:claude-x")
given = Agent(provider("openai:gpt-x", key=lambda: "k"))
several = Agent(Fallback("anthropic:claude-x", "ollama:qwen", "mistral:large"))
vertex = Agent("vertex:gemini-x")
azure = Agent("azure:gpt-x")
bedrock = Agent("bedrock:nova")
"""

VARIABLES = [
    *[name for service in SERVICES.values() for name in (service.base_url_variable, *service.key_variables)],
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_BEARER_TOKEN_BEDROCK", "AWS_PROFILE", "AWS_REGION"),
    *("AWS_DEFAULT_REGION", "GOOGLE_ACCESS_TOKEN", "GOOGLE_CLOUD_PROJECT", "OLLAMA_API_KEY"),
]


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of agents, and an environment without any key."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    path = tmp_path / f"agents_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(AGENTS)
    return str(path)


def looked(agents: str, name: str, store: Path) -> tuple[int, Any]:
    result = shell("doctor", f"{agents}:{name}", "--json", store=store)
    assert SECRET not in result.stdout + result.stderr
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("there", [True, False], ids=["with a store", "before there is a store"])
def test_a_missing_key_names_its_variable(
    agents: str, store: Path, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        say(store, "chat", "hello")
    code, found = looked(agents, "claude", store)
    monkeypatch.setenv("ANTHROPIC_API_KEY", SECRET)
    after, well = looked(agents, "claude", store)

    assert (code, found["healthy"]) == (1, False)
    assert "set ANTHROPIC_API_KEY" in found["needs"][0]["problem"]
    assert found["models"][0]["model"] == "anthropic:claude-x"
    assert (after, well["healthy"], well["models"][0]["lacks"]) == (0, True, [])


@pytest.mark.parametrize(
    ("name", "variables", "missing"),
    [
        ("vertex", {}, "GOOGLE_CLOUD_PROJECT"),
        ("azure", {}, "AZURE_OPENAI_ENDPOINT"),
        ("azure", {"AZURE_OPENAI_ENDPOINT": "https://x.example"}, "AZURE_OPENAI_API_KEY"),
        ("azure", {"AZURE_OPENAI_ENDPOINT": "x.example", "AZURE_OPENAI_API_KEY": SECRET}, "begins with http"),
        ("bedrock", {}, "AWS_REGION"),
        ("bedrock", {"AWS_REGION": "eu-west-1"}, "AWS_ACCESS_KEY_ID"),
        ("claude", {"ANTHROPIC_BASE_URL": "gateway", "ANTHROPIC_API_KEY": SECRET}, "begins with http"),
    ],
)
def test_what_is_missing_is_named(
    agents: str, store: Path, name: str, variables: dict[str, str], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)

    code, found = looked(agents, name, store)

    assert code == 1
    assert missing in found["needs"][0]["problem"]
    assert len(found["needs"]) == 1


def test_every_model_of_a_list_is_looked_at(agents: str, store: Path) -> None:
    result = shell("doctor", f"{agents}:several", store=store)

    assert result.exit_code == 1
    assert "ollama:qwen" in result.stdout
    assert "2 things need a person" in result.stdout


def test_a_key_that_a_function_gives_is_not_looked_for(agents: str, store: Path) -> None:
    assert looked(agents, "given", store)[0] == 0


def test_a_model_that_an_open_session_names_is_told_and_is_no_need(agents: str, store: Path) -> None:
    async def leave_open() -> None:
        agent = Agent(ScriptedModel(["x"]), name="helper")
        async with Runtime(store, agents=[agent], recover=False) as runtime:
            session = await runtime.session("chat")
            await session.configure(model="mistral:large")
        async with Runtime(store) as runtime:
            session = await runtime.session("chat")
            await session.send("hello", model="groq:fast")

    asyncio.run(leave_open())
    result = shell("doctor", "--json", store=store)
    found = json.loads(result.stdout)

    assert {each["model"]: each["named_by"] for each in found["models"]} == {
        "groq:fast": ["chat"],
        "mistral:large": ["chat"],
    }
    assert "GROQ_API_KEY" in found["models"][0]["lacks"][0]
    assert not any("API_KEY" in need["problem"] for need in found["needs"])


def test_what_is_no_agent_is_refused(store: Path) -> None:
    assert shell("doctor", "nowhere:agent", store=store).exit_code == 2
