"""What people type first who come from elsewhere: an error that names the right word."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from perdure import Agent, Runtime, ToolContext, process, tool
from perdure.errors import InvalidDefinition
from perdure.testing import FunctionModel

agent: Any = Agent(FunctionModel(lambda request: "well"))
MAKE: Any = Agent
OPEN: Any = Runtime
TOOL: Any = tool


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        (lambda: MAKE("scripted", system_prompt="be brief"), "instructions="),
        (lambda: MAKE("scripted", output_type=int), "output="),
        (lambda: MAKE("scripted", result_type=int), "output="),
        (lambda: MAKE("scripted", deps_type=int), "ctx.deps"),
        (lambda: MAKE("scripted", toolsets=[]), "tools="),
        (lambda: MAKE("scripted", handoffs=[]), "as_tool()"),
        (lambda: MAKE("scripted", max_turns=3), "Budget(steps"),
        (lambda: MAKE("scripted", checkpointer=None), "Runtime('agent.db'"),
        (lambda: MAKE("scripted", input_guardrails=[]), "plugins="),
        (lambda: MAKE(lambda request: "well"), "FunctionModel(fn)"),
        (lambda: MAKE("gpt-4o"), "'provider:model'"),
        (lambda: OPEN("memory", agent=agent), "agents=[agent]"),
        (lambda: OPEN(path="x.db"), "the first argument"),
        (lambda: OPEN("memory", workflows=[]), "processes="),
        (lambda: agent.run_sync("hello", message_history=[]), "await runtime.session("),
        (lambda: agent.run_sync("hello", usage_limits=None), "Budget(steps"),
        (lambda: TOOL(requires_approval=True), "approval='ask'"),
        (lambda: TOOL(max_retries=2), "retries="),
        (lambda: TOOL(name_override="x"), "name="),
    ],
    ids=range(19),
)
def test_a_foreign_word_is_refused_with_the_right_one(typed: Callable[[], Any], right: str) -> None:
    with pytest.raises(InvalidDefinition) as refused:
        typed()

    assert right in str(refused.value)


@pytest.mark.parametrize(
    "typed",
    [
        lambda: MAKE("scripted", colour="red"),
        lambda: OPEN("memory", colour="red"),
        lambda: TOOL(colour="red"),
        lambda: agent.run_sync("hello", colour="red"),
    ],
    ids=["agent", "runtime", "tool", "run"],
)
def test_a_word_of_nobody_is_refused_as_python_does(typed: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        typed()


async def test_words_of_a_conversation_are_told() -> None:
    async with Runtime("memory", agents=[agent]) as runtime:
        session: Any = await runtime.session("s")
        for verb in (session.run, session.send, session.steer):
            with pytest.raises(InvalidDefinition, match=r"runtime\.session"):
                await verb("hello", thread_id="1")
        with pytest.raises(InvalidDefinition, match="key="):
            await session.run("hello", idempotency_key="1")
        with pytest.raises(InvalidDefinition, match=r"Runtime\(…, deps=…\)"):
            session.stream("hello", deps=1)
        with pytest.raises(AttributeError, match=r"session\.history\(\)"):
            _ = session.messages
        assert await session.history() == []


def test_a_runtime_is_entered_with_async_with() -> None:
    with pytest.raises(InvalidDefinition, match="async with"), OPEN("memory"):
        pass


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        (lambda: agent.tool, "@tool on a function"),
        (lambda: agent.run_stream, "session.stream"),
        (lambda: agent.invoke, "agent.run_sync"),
        (lambda: agent.run_sync("hello").data, "result.output"),
        (lambda: agent.run_sync("hello").final_output, "result.output"),
        (lambda: agent.run_sync("hello").all_messages(), "result.messages"),
    ],
    ids=range(6),
)
def test_a_foreign_attribute_is_missing_with_the_right_word(typed: Callable[[], Any], right: str) -> None:
    with pytest.raises(AttributeError) as missing:
        typed()

    assert right in str(missing.value)


def test_attributes_that_nobody_means_are_plainly_missing() -> None:
    result: Any = agent.run_sync("hello")

    assert not hasattr(agent, "colour")
    assert not hasattr(result, "colour")


# ---------------------------------------------------------------------- a context without its annotation


def test_a_context_without_annotation_never_becomes_an_argument_of_the_model() -> None:
    with pytest.raises(InvalidDefinition, match="write `ctx: ToolContext`"):

        @tool
        def search(ctx, query: str) -> str:  # type: ignore[no-untyped-def]
            return query

    with pytest.raises(InvalidDefinition, match="ctx: ProcessContext"):

        @process
        async def nightly(ctx, day: str) -> str:  # type: ignore[no-untyped-def]
            return day

    def look(ctx):  # type: ignore[no-untyped-def]
        return ctx

    with pytest.raises(InvalidDefinition, match="write `ctx: ToolContext`"):
        Agent("scripted", tools=[look])


def test_a_parameter_of_that_name_may_have_another_type() -> None:
    @tool
    def search(ctx: str) -> str:
        return ctx

    @tool
    def look(context, ctx: ToolContext[Any]) -> str:  # type: ignore[no-untyped-def]
        return str(context)

    assert list(search.spec.input_schema["properties"]) == ["ctx"]
    assert list(look.spec.input_schema["properties"]) == ["context"]


# ---------------------------------------------------------------------- a typed answer elsewhere


class Ticket(Struct):
    title: str
    urgent: bool


async def test_a_typed_answer_is_json_where_nobody_has_the_agent(tmp_path: Path) -> None:
    typed = Agent(FunctionModel(lambda request: '{"title": "fire", "urgent": true}'), output=Ticket)
    async with Runtime(tmp_path / "x.db", agents=[typed]) as runtime:
        result = await (await runtime.session("s")).run("help")
        assert result.output == Ticket("fire", True)

    async with Runtime(tmp_path / "x.db") as runtime:
        found = await (await runtime.session("s")).result("s.1")
        assert found.output == {"title": "fire", "urgent": True}
        assert found.text == '{"title": "fire", "urgent": true}'


async def test_an_answer_without_type_is_text_where_nobody_has_the_agent(tmp_path: Path) -> None:
    async with Runtime(tmp_path / "x.db", agents=[agent]) as runtime:
        await (await runtime.session("s")).run("help")

    async with Runtime(tmp_path / "x.db") as runtime:
        assert (await (await runtime.session("s")).result("s.1")).output == "well"


# ---------------------------------------------------------------------- extras


def test_every_extra_is_of_use_in_this_version() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

    assert set(project["optional-dependencies"]) == {
        "cli",
        "code",
        "http",
        "http2",
        "mcp",
        "prices",
        "test",
        "wire",
        "dev",
    }
